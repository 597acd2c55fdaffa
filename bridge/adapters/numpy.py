"""Our numpy engine: the spec's layers as a `Chain`, trained by its `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bridge import linear_algebra, weights
from bridge.checks import DataCheck
from bridge.engine import Evaluation, Optimizer
from bridge.spec import ModelSpec, Shape
from py_engine import Techniques, network
from py_engine.errors import ConfigurationError
from py_engine.network import Chain, Trainer

__all__ = ["NumpySession", "build_chain"]

Array = NDArray[Any]


class NumpySession:
    """A `Session` of py_engine. `trainer` is its own, to look into."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Array],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        threads: int = 1,
        techniques: Mapping[str, Any] | None = None,
    ) -> None:
        dtype = np.dtype(dtype)
        weights.check(params, spec, dtype)
        self._check = DataCheck(spec, dtype)
        chain = build_chain(spec, dtype)
        chain.parameters.load(params)
        rule = network.OPTIMIZERS[optimizer.name](**optimizer.settings())
        switches = _techniques(techniques or {})
        self.trainer = Trainer(chain, spec.loss.op, rule, batch_size, threads, techniques=switches)

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        x, y = self._check.batch(x, y)
        order = self._check.order(order, x)
        self._check.batches(len(order), self.trainer.batch_size)
        return self.trainer.train_epoch(x, y, order)

    def evaluate(self, x: Array, y: Array) -> Evaluation:
        """See `Session.evaluate`."""
        found = self.trainer.evaluate(*self._check.batch(x, y))
        return Evaluation(found.loss, found.accuracy)

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        return self.trainer.predict(self._check.features(x))

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        self._check.batches(len(x), len(x))
        return self.trainer.loss_and_gradients(*self._check.batch(x, y))

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        return self.trainer.parameters.as_dict()

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return linear_algebra.of_numpy()

    def close(self) -> None:
        """See `Session.close`."""
        self.trainer.close()


def build_chain(spec: ModelSpec, dtype: DTypeLike) -> Chain:
    """The network of a spec, with initial values of the engine's own."""
    layers = (_LAYERS[layer.op](layer, shape.input) for layer, shape in zip(spec.layers, spec.shapes(), strict=True))
    return Chain(*layers, dtype=dtype)


def _techniques(switches: Mapping[str, Any]) -> Techniques:
    known = [field.name for field in fields(Techniques)]
    for name in switches:
        if name not in known:
            raise ConfigurationError(f"the numpy engine has no technique {name!r}; it has {', '.join(known)}")
    return Techniques(**switches)


def _convolution(kind: Callable[..., network.Layer], layer: Any, input: Shape) -> network.Layer:
    at = layer.geometry
    settings = {"stride": at.stride, "padding": at.padding, "dilation": at.dilation, "groups": layer.groups}
    return kind(input[0], layer.filters, at.size, **settings, bias=layer.bias, name=layer.id)


def _pool(kind: Callable[..., network.Layer], layer: Any) -> network.Layer:
    at = layer.geometry
    return kind(at.size, at.stride, at.padding, name=layer.id)


_LAYERS: dict[str, Callable[[Any, Shape], network.Layer]] = {
    "dense": lambda layer, input: network.Dense(input[-1], layer.units, bias=layer.bias, name=layer.id),
    "rnn": lambda layer, input: network.RNN(input[-1], layer.units, layer.activation, layer.returns, name=layer.id),
    "lstm": lambda layer, input: network.LSTM(input[-1], layer.units, layer.returns, name=layer.id),
    "gru": lambda layer, input: network.GRU(input[-1], layer.units, layer.returns, name=layer.id),
    "flatten": lambda layer, input: network.Flatten(name=layer.id),
    "reshape": lambda layer, input: network.Reshape(*layer.shape, name=layer.id),
    "activation": lambda layer, input: network.Activation(layer.activation, name=layer.id),
    "dropout": lambda layer, input: network.Dropout(layer.rate, name=layer.id),
    "conv1d": lambda layer, input: _convolution(network.Conv1D, layer, input),
    "conv2d": lambda layer, input: _convolution(network.Conv2D, layer, input),
    "max_pool1d": lambda layer, input: _pool(network.MaxPool1D, layer),
    "max_pool2d": lambda layer, input: _pool(network.MaxPool2D, layer),
    "avg_pool1d": lambda layer, input: _pool(network.AvgPool1D, layer),
    "avg_pool2d": lambda layer, input: _pool(network.AvgPool2D, layer),
    "global_max_pool": lambda layer, input: network.GlobalMaxPool(name=layer.id),
    "global_avg_pool": lambda layer, input: network.GlobalAvgPool(name=layer.id),
    "embedding": lambda layer, input: network.Embedding(
        layer.vocabulary, layer.dimension, layer.padding_row, layer.trainable, name=layer.id
    ),
    "permute_dims": lambda layer, input: network.PermuteDims(*layer.axes, name=layer.id),
    "rbf": lambda layer, input: network.RBF(input[-1], layer.units, name=layer.id),
    "batch_norm": lambda layer, input: network.BatchNorm(input[0], layer.momentum, layer.eps, name=layer.id),
    "layer_norm": lambda layer, input: network.LayerNorm(input[-1], layer.eps, name=layer.id),
}
