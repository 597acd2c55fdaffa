"""Our numpy engine: the spec's layers as a `Chain`, or a `Graph`, trained by its `Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bridge import linear_algebra, memory, weights
from bridge.checks import DataCheck, check_known
from bridge.layers import Layer, Shape
from bridge.session import Evaluation, Optimizer
from bridge.spec import ModelSpec
from py_engine import Techniques, network
from py_engine.errors import ConfigurationError
from py_engine.network import Chain, Graph, Trainer
from py_engine.network.parallel import Communicator

__all__ = ["NumpySession", "build_chain"]

Array = NDArray[Any]


class NumpySession:
    """A `Session` of py_engine. `trainer` is its own, to look into.

    With a communicator, such as `mpi4py.MPI.COMM_WORLD`, each of its processes has a session of the same model,
    weights, data and order, and trains on its part of every mini-batch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Array],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        threads: int = 1,
        techniques: Mapping[str, Any] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        dtype = np.dtype(dtype)
        check_known(spec, optimizer.name, "numpy", network.LAYERS, network.OPTIMIZERS)
        weights.check(params, spec, dtype)
        self._check = DataCheck(spec, dtype)
        chain = build_chain(spec, dtype, params)
        rule = network.OPTIMIZERS[optimizer.name](**optimizer.settings())
        switches = _techniques(techniques or {})
        self.trainer = Trainer(
            chain, self._check.loss, rule, batch_size, threads, techniques=switches, communicator=communicator
        )

    def train_epoch(
        self, x: Array, y: Array, order: NDArray[np.int64], rates: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        x, y = self._check.batch(x, y)
        order = self._check.order(order, x)
        self._check.batches(len(order), self.trainer.batch_size)
        return self.trainer.train_epoch(x, y, order, rates)

    def train_steps(
        self, x: Array, y: Array, order: NDArray[np.int64], rates: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """See `Scheduling.train_steps`."""
        return self.train_epoch(x, y, order, rates)

    def evaluate(self, x: Array, y: Array) -> Evaluation:
        """See `Session.evaluate`."""
        found = self.trainer.evaluate(*self._check.batch(x, y))
        return Evaluation(found.loss, found.accuracy)

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        return self.trainer.predict(self._check.features(x))

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        x, y = self._check.batch(x, y)
        self._check.batches(len(x), len(x))
        return self.trainer.loss_and_gradients(x, y)

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        return self.trainer.parameters.as_dict()

    def state(self) -> dict[str, Array]:
        """See `Resumable.state`."""
        return self.trainer.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See `Resumable.load_state`."""
        self.trainer.load_state(state)

    def costs(self) -> list[tuple[str, str, float, int, int]]:
        """See `Costed.costs`."""
        return [*self.trainer.costs()]

    def threads_in_step(self) -> str:
        """See `Costed.threads_in_step`."""
        return self.trainer.threads_in_step()

    def threads_decided(self) -> bool:
        """See `Costed.threads_decided`."""
        return self.trainer.threads_decided()

    def held_bytes(self) -> int:
        """See `Costed.held_bytes`."""
        trainer = self.trainer
        state = len(trainer.optimizer.state_names) * trainer.parameters.vector.nbytes
        return state + sum(tape.nbytes + sum(out.nbytes for out in tape.outputs) for tape in trainer.tapes)

    def collecting_seconds(self) -> float:
        """See `Costed.collecting_seconds`."""
        return memory.collecting_seconds()

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return linear_algebra.of_numpy()

    def close(self) -> None:
        """See `Session.close`."""
        self.trainer.close()


def build_chain(spec: ModelSpec, dtype: DTypeLike, values: Mapping[str, Array] | None = None) -> Chain:
    """The network of a spec with these values of its parameters; without, with initial values of the engine's own."""
    layers = (_build_layer(layer, shape.input) for layer, shape in zip(spec.layers, spec.shapes(), strict=True))
    if spec.is_chain:
        return Chain(*layers, dtype=dtype, values=values)
    inputs = {layer.id: layer.inputs for layer in spec.layers if layer.inputs}
    return Graph(*layers, inputs=inputs, dtype=dtype, values=values)


def _build_layer(layer: Layer, input: Shape) -> network.Layer:
    """The engine's own layer of the same op, made with the same settings by name."""
    kind: Callable[..., network.Layer] = network.LAYERS[layer.op]
    arguments = layer.arguments(input)
    spread = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.VAR_POSITIONAL]
    values = [value for name in spread for value in arguments.pop(name)]  # Reshape(4, 196)
    return kind(*values, **arguments, name=layer.id)


def _techniques(switches: Mapping[str, Any]) -> Techniques:
    known = [field.name for field in fields(Techniques)]
    for name in switches:
        if name not in known:
            raise ConfigurationError(f"the numpy engine has no technique {name!r}; it has {', '.join(known)}")
    return Techniques(**switches)
