"""The engines agree: from the same weights and data the same outputs, losses, gradients and training steps.

Engines are compared in pairs, each tensor a of the first with b of the second: ‖a - b‖ / ‖b‖ is at most 1e-5 in float32
and 1e-10 in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel

from bridge import spec
from bridge.engine import Optimizer
from bridge.spec import ModelSpec

Made = Callable[..., Any]
Layers = list[dict[str, Any]]
SGD = Optimizer("sgd", 0.015)
DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
PAIRS = (("numpy", "torch"), ("julia", "torch"), ("julia", "numpy"))
WITH_TORCH = [(name, "torch") for name in ("numpy", "manual", "julia", "manual-julia")]

# Samples of 4 rows of 3, and a dense layer below the one that is tested: the gradient by its input counts, too.
INPUT = [4, 3]
BELOW = {"op": "dense", "units": 5}
LAYERS: dict[str, dict[str, Any]] = {
    "dense": {"op": "dense", "units": 7},
    "dense without bias": {"op": "dense", "units": 7, "bias": False},
    **{
        f"rnn {activation} {returns}": {"op": "rnn", "units": 6, "activation": activation, "returns": returns}
        for activation in ("tanh", "relu", "identity")
        for returns in ("last", "sequence")
    },
    **{
        f"{op} {returns}": {"op": op, "units": 6, "returns": returns}
        for op in ("lstm", "gru")
        for returns in ("last", "sequence")
    },
    "flatten": {"op": "flatten"},
    "reshape": {"op": "reshape", "shape": [2, 2, 5]},
    **{
        f"activation {name}": {"op": "activation", "activation": name}
        for name in ("identity", "tanh", "relu", "sigmoid", "softplus", "softmax")
    },
    "dropout of nothing": {"op": "dropout", "rate": 0.0},
}

LOSSES: dict[str, tuple[Layers, str]] = {
    "a class": ([{"op": "flatten"}, {"op": "dense", "units": 4}], "softmax_cross_entropy"),
    "a class for every row": ([{"op": "dense", "units": 4}], "softmax_cross_entropy"),
    "yes or no": ([{"op": "flatten"}, {"op": "dense", "units": 1}], "binary_cross_entropy"),
    "yes or no for every row": ([{"op": "dense", "units": 2}], "binary_cross_entropy"),
    "a number": ([{"op": "flatten"}, {"op": "dense", "units": 1}], "mean_squared_error"),
    "numbers for every row": ([{"op": "dense", "units": 2}], "mean_squared_error"),
}

RNN = {"op": "rnn", "units": 6}
DENSE = {"op": "dense", "units": 4}
NETWORKS: dict[str, tuple[Layers, str]] = {
    "rnn of one step": ([{"op": "reshape", "shape": [1, 12]}, RNN, DENSE], "softmax_cross_entropy"),
    "rnn on rnn": ([RNN | {"returns": "sequence"}, RNN | {"units": 5}, DENSE], "softmax_cross_entropy"),
    "many to many": (
        [
            {"op": "gru", "units": 6, "returns": "sequence"},
            {"op": "lstm", "units": 5, "returns": "sequence"},
            RNN | {"activation": "relu", "returns": "sequence"},
            DENSE,
        ],
        "softmax_cross_entropy",
    ),
    "deep": (
        [
            {"op": "flatten"},
            *(
                layer
                for name in ("tanh", "relu", "sigmoid", "softplus", "identity", "softmax")
                for layer in ({"op": "dense", "units": 9}, {"op": "activation", "activation": name})
            ),
            {"op": "dense", "units": 1},
        ],
        "binary_cross_entropy",
    ),
}

OPTIMIZERS = [
    Optimizer("sgd", 0.1),
    Optimizer("sgd", 0.1, weight_decay=0.1),
    Optimizer("sgd", 0.1, momentum=0.9),
    Optimizer("sgd", 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Optimizer("rmsprop", 0.01),
    Optimizer("rmsprop", 0.01, alpha=0.9, momentum=0.5, eps=1e-3, weight_decay=0.1),
    Optimizer("adam", 0.01),
    Optimizer("adam", 0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1),
    Optimizer("adamw", 0.01),
    Optimizer("adamw", 0.01, weight_decay=0.3),
    Optimizer("sgd", 0.5, clip_norm=0.1),
    Optimizer("adam", 0.01, clip_norm=0.1),
]


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def compare(session_of: Made, random_params: Made, random_data: Made) -> Callable[..., None]:
    """Compares all that two engines compute of a model without training it."""

    def compare(pair: tuple[str, str], made: ModelSpec, dtype: str, batch: int = 53, scale: float = 0.3) -> None:
        params, (x, y) = random_params(made, dtype, scale), random_data(made, 1100, dtype)
        computed, accuracies = [], []
        for name in pair:
            session = session_of(name, made, params, SGD, batch, dtype)
            loss, gradients = session.loss_and_gradients(x[:batch], y[:batch])
            evaluation = session.evaluate(x, y)
            tensors = {"outputs": session.predict(x), "loss": loss, "loss of all": evaluation.loss}
            computed.append(tensors | {f"gradient of {name}": gradient for name, gradient in gradients.items()})
            accuracies.append(evaluation.accuracy)
        assert_close(*computed, TOLERANCE[dtype])
        a_near_tie = 1 / len(x) if dtype == "float32" else 0.0
        assert accuracies[0] == pytest.approx(accuracies[1], abs=a_near_tie + 1e-12, nan_ok=True)

    return compare


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert np.shape(found[name]) == np.shape(array)
        distance, size = np.linalg.norm(found[name] - array), np.linalg.norm(array)
        assert distance <= tolerance * size, f"{name}: ‖a - b‖ = {distance:.2e}, ‖b‖ = {size:.2e}"


# Layers, losses and networks.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer(pair: tuple[str, str], layer: str, dtype: str, model: Made, compare: Made) -> None:
    compare(pair, model(INPUT, BELOW, LAYERS[layer], loss="mean_squared_error"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss(pair: tuple[str, str], loss: str, dtype: str, model: Made, compare: Made) -> None:
    layers, op = LOSSES[loss]
    compare(pair, model(INPUT, *layers, loss=op), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("network", NETWORKS)
def test_whole_networks(pair: tuple[str, str], network: str, dtype: str, model: Made, compare: Made) -> None:
    layers, loss = NETWORKS[network]
    compare(pair, model(INPUT, *layers, loss=loss), dtype)


def test_nothing_of_the_spec_is_left_out() -> None:
    for kind in get_args(spec.AnyLayer):
        if kind.since > 1:
            continue
        tested = [layer for layer in LAYERS.values() if layer["op"] in choices(kind, "op")]
        assert tested, kind
        for option in {"activation", "returns"} & set(kind.model_fields):
            assert {layer[option] for layer in tested} == choices(kind, option), f"{option} of {kind}"
    assert {op for _, op in LOSSES.values()} == set().union(*(choices(kind, "op") for kind in get_args(spec.AnyLoss)))


def choices(kind: type[BaseModel], name: str) -> set[str]:
    """The values that a field of a spec may have."""
    return set(get_args(kind.model_fields[name].annotation))


# Training.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: f"{optimizer.name} {optimizer.settings()}")
def test_twenty_steps_of_every_optimizer(
    pair: tuple[str, str],
    optimizer: Optimizer,
    dtype: str,
    small_paper_model: ModelSpec,
    session_of: Made,
    random_params: Made,
    random_data: Made,
) -> None:
    params, (x, y) = random_params(small_paper_model, dtype), random_data(small_paper_model, 78, dtype)
    trained = []
    for name in pair:
        session = session_of(name, small_paper_model, params, optimizer, 4, dtype)
        losses = session.train_epoch(x, y, np.arange(78))  # the last batch has 2 rows
        assert losses.shape == (20,)
        trained.append({"losses": losses, **session.params()})
    assert_close(*trained, TOLERANCE[dtype])


# The papers' network.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", WITH_TORCH, ids="-".join)
def test_the_papers_network_has_the_gradients_of_torch(
    pair: tuple[str, str], dtype: str, paper_model: ModelSpec, compare: Made
) -> None:
    compare(pair, paper_model, dtype, batch=100, scale=0.1)


@pytest.mark.parametrize("pair", WITH_TORCH, ids="-".join)
def test_the_papers_network_trains_as_in_torch(
    pair: tuple[str, str],
    paper_model: ModelSpec,
    session_of: Made,
    random_params: Made,
    random_data: Made,
    rng: np.random.Generator,
) -> None:
    params, (x, y) = random_params(paper_model, scale=0.1), random_data(paper_model, 1050)
    ours, theirs = (session_of(name, paper_model, params, SGD, 100) for name in pair)
    steps = 0
    while steps < 100:
        order = rng.permutation(1050)
        losses, torch_losses = ours.train_epoch(x, y, order), theirs.train_epoch(x, y, order)
        assert losses.dtype == np.float64
        assert len(losses) == 11
        np.testing.assert_allclose(losses, torch_losses, atol=1e-4)
        steps += len(losses)
    assert_close(ours.params(), theirs.params(), 1e-4)
    assert ours.evaluate(x, y).loss == pytest.approx(theirs.evaluate(x, y).loss, abs=1e-4)
    assert ours.evaluate(x, y).accuracy == pytest.approx(theirs.evaluate(x, y).accuracy, abs=2 / 1050)
    np.testing.assert_allclose(ours.predict(x), theirs.predict(x), atol=1e-4)
