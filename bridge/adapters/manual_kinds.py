"""Which networks are written by hand, in numpy and in Julia alike: those of the papers, in any size.

Layers must be these, in this order and with these options; each network comes with one loss and one optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bridge.checks import check_chain
from bridge.engine import Optimizer
from bridge.errors import SpecError
from bridge.spec import (
    RNN,
    Activation,
    Conv1D,
    Conv2D,
    Convolution,
    Dense,
    Embedding,
    Flatten,
    MaxPool1D,
    MaxPool2D,
    ModelSpec,
    PermuteDims,
    Pool,
    Reshape,
)
from py_engine.errors import ConfigurationError

__all__ = ["Kind", "check"]


def _is_rnn(spec: ModelSpec) -> bool:
    match [layer for layer in spec.layers if not isinstance(layer, Reshape)]:
        case [RNN(activation="tanh", returns="last"), Dense(bias=True)]:
            return isinstance(spec.layers[-2], RNN)
    return False


def _is_image_cnn(spec: ModelSpec) -> bool:
    match spec.layers:
        case (
            Reshape(shape=(1, _, _)),
            Conv2D(bias=False) as conv,
            Activation(activation="relu"),
            MaxPool2D() as pool,
            Flatten(),
            Dense(bias=False),
            Activation(activation="relu"),
            Dense(bias=False),
        ):
            return _is_plain(conv, pool)
    return False


def _is_text_cnn(spec: ModelSpec) -> bool:
    match spec.layers:
        case (
            Embedding(),
            PermuteDims(axes=(1, 0)),
            Conv1D(bias=True) as conv,
            Activation(activation="relu"),
            MaxPool1D() as pool,
            Flatten(),
            Dense(units=1, bias=True),
        ):
            return _is_plain(conv, pool)
    return False


def _is_plain(conv: Convolution, pool: Pool) -> bool:
    """Neither padding nor stride nor anything else, and pools side by side."""
    at, pools = conv.geometry, pool.geometry
    padding = [n for sides in (*at.padding, *pools.padding) for n in sides]
    return conv.groups == 1 and not any(padding) and {*at.stride, *at.dilation} == {1} and pools.stride == pools.size


@dataclass(frozen=True)
class Kind:
    """A network that is written by hand."""

    name: str
    fits: Callable[[ModelSpec], bool]
    layers: str
    loss: str
    optimizer: str


KINDS = (
    Kind(
        "rnn",
        _is_rnn,
        "reshape, rnn (activation tanh, returns last), dense (with bias)",
        "softmax_cross_entropy",
        "sgd",
    ),
    Kind(
        "image-cnn",
        _is_image_cnn,
        "reshape to one channel, conv2d (plain, no bias), relu, max_pool2d (side by side), flatten, dense (no bias), "
        "relu, dense (no bias)",
        "softmax_cross_entropy",
        "sgd",
    ),
    Kind(
        "text-cnn",
        _is_text_cnn,
        "embedding, permute_dims [1, 0], conv1d (plain, with bias), relu, max_pool1d (side by side), flatten, dense of "
        "one unit (with bias)",
        "binary_cross_entropy",
        "adam",
    ),
)


def check(spec: ModelSpec, optimizer: Optimizer, engine: str) -> Kind:
    """What the network of a spec is.

    Raises `SpecError` for a network, or a loss, that the hand-written engines don't know, `ConfigurationError` for
    another optimizer than the network's own, or for more settings than it has by hand.
    """
    check_chain(spec, engine)
    kind = next((kind for kind in KINDS if kind.fits(spec) and kind.loss == spec.loss.op), None)
    if kind is None:
        found = ", ".join(layer.op for layer in spec.layers)
        known = "; or ".join(f"{kind.layers} and {kind.loss}" for kind in KINDS)
        raise SpecError(
            f'the model "{spec.name}"',
            [
                f"the engine {engine} is written by hand for {known}. Found {found} and {spec.loss.op}, or other "
                "options of them: use another engine"
            ],
        )
    plain = {"sgd": Optimizer("sgd", optimizer.learning_rate)}
    if optimizer.name == "adam":
        plain["adam"] = Optimizer("adam", optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps)
    if optimizer != plain.get(kind.optimizer):
        settings = {"sgd": "a learning rate", "adam": "learning rate, betas and eps"}[kind.optimizer]
        raise ConfigurationError(
            f"the engine {engine} is written by hand for plain {kind.optimizer} on this network, with {settings} and "
            f"nothing else; found {optimizer.name} with {optimizer.settings()}: use another engine"
        )
    return kind
