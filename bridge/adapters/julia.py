"""Our Julia engine, in this process: numpy's memory goes in and out as it is, through the engine's entry points.

Julia starts with the first session, or before, and with that session's threads; one with more needs another process.
A spec reaches Julia as text that is read and never evaluated. An epoch is cut into short calls, between which ctrl-C is
heard.
"""

from __future__ import annotations

import bisect
import ctypes
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bridge import weights
from bridge.checks import DataCheck, check_rates
from bridge.errors import JuliaError
from bridge.layers import Recurrent
from bridge.libjulia.engine import load_engine
from bridge.linear_algebra import of_numpy
from bridge.session import Evaluation, Optimizer
from bridge.spec import ModelSpec
from py_engine.errors import ConfigurationError, NonFiniteError, ParameterError
from py_engine.network.parallel import Communicator, Parallel
from py_engine.network.parameters import FlatVector
from py_engine.network.parameters import Layout as _Layout
from py_engine.network.read_ahead import reading_ahead

__all__ = ["EntrySession", "JuliaSession", "describe", "line", "load_engine"]

Array = NDArray[Any]

_STEPS_PER_CALL = 50
"""The most steps of an epoch in one call of Julia, in which ctrl-C is not heard: 10 ms for the papers' networks."""

_CALL_SECONDS = 0.1
"""Calls that take longer are cut into fewer steps."""

_FORMAT = 3
"""Of the descriptions of sessions that julia_engine/src/entry.jl reads."""


def describe(
    spec: ModelSpec,
    optimizer: Optimizer,
    batch_size: int,
    dtype: np.dtype[Any],
    threads: int,
    techniques: Mapping[str, Any] | None = None,
) -> bytes:
    """A session as the text that `create` of julia_engine/src/entry.jl reads: a line for each part, and for each layer.

    `techniques` are switches of the engine's Techniques (julia_engine/src/ad/techniques.jl) by name; all are on unless
    set to False. Raises `ConfigurationError` for a switch that is neither True nor False.
    """
    switches = techniques or {}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"technique {name}: expected True or False, found {value!r}")
    session = {
        "format": _FORMAT,
        "dtype": dtype.name,
        "batch_size": int(batch_size),
        "threads": int(threads),
        "loss": spec.loss.op,
        **spec.loss.settings(),
        "holds": "numbers" if spec.vocabulary is None else "ids",
        "input": spec.input.sample,
        "layers": len(spec.layers),
    }
    return b"".join(
        [
            line("session", session),
            line("optimizer", {"name": optimizer.name, **optimizer.settings()}),
            line("techniques", switches),
            *(
                line("layer", {"id": layer.id, "op": layer.op, "inputs": layer.inputs or None, **layer.settings()})
                for layer in spec.layers
            ),
        ]
    )


def line(subject: str, settings: Mapping[str, Any]) -> bytes:
    """A line as julia_engine/src/network/lines.jl reads it: what it is about, and settings by name, but for None."""
    given = (f"{_text(name)}={_text(value)}" for name, value in settings.items() if value is not None)
    return f"{' '.join([subject, *given])}\n".encode("ascii")


def _text(value: Any) -> str:
    """A setting's value without any sign that has a meaning in a line: such signs in a text become %XX."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(float(value))  # the shortest text that reads back as the same number
        case str():
            return quote(value, safe="")
        case tuple():
            return ",".join(map(_text, value))
    return str(int(value))


_MOST_INTERPRETED = 64
"""Layers, each step of a recurrent one counted, up to which a plan is made sooner by interpreting what makes it."""


def _is_planned_at_once(spec: ModelSpec) -> bool:
    """Whether the plan of a network is so small that compiling what makes it would take longer."""
    steps = (
        shape.input[0] if isinstance(layer, Recurrent) else 1
        for layer, shape in zip(spec.layers, spec.shapes(), strict=True)
    )
    return sum(steps) <= _MOST_INTERPRETED


class _Sum:
    """What Julia calls to sum a gradient over all processes, at `address`. An exception can't leave it, and is kept."""

    _Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)

    def __init__(self, parallel: Parallel, dtype: np.dtype[Any]) -> None:
        self.parallel = parallel
        self.failure: BaseException | None = None

        def add(address: int, length: int) -> int:
            try:
                memory = (ctypes.c_uint8 * (length * dtype.itemsize)).from_address(address)
                parallel.add_up(np.frombuffer(memoryview(memory), dtype))
                return 1  # ctypes itself returns 0 after an exception
            except BaseException as error:
                self.failure = error
                return 0

        self._function = self._Function(add)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value


class EntrySession:
    """A `Session` of what has the entry points of julia_engine/src/entry.jl that all Julia engines have."""

    # For other engines than our own.
    _load = staticmethod(load_engine)
    _describe: Callable[..., bytes] = staticmethod(describe)
    _layout = staticmethod(_Layout.of)

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
        self._number = 0
        self._steps_per_call = 1
        self._spec = spec
        self._batch_size = batch_size
        self._rule = np.frombuffer(_kept_by(optimizer).encode(), np.uint8)
        self._check = DataCheck(spec, dtype)
        shapes = {name: p.shape for name, p in spec.in_memory().items()}
        self._parameters = FlatVector(self._layout(shapes), dtype)
        more = {"techniques": techniques} if techniques else {}
        description = self._describe(spec, optimizer, batch_size, dtype, threads, **more)
        trained = {name: shapes[name] for name, p in spec.in_memory().items() if p.trainable}
        self._gradient_layout = self._layout(trained)
        for name, array in self._parameters.arrays.items():
            array[...] = params[name]
        self._runtime, self._entries = self._load(threads)
        self._runtime.evaluate(f"TwinGrad.AD.interpret({str(_is_planned_at_once(spec) and not techniques).lower()})")
        vector = self._parameters.vector
        number = self._entries.create(description, len(description), vector.ctypes.data, len(vector))
        self._raise(-number if number < 0 else 0)
        self._number = number
        self._runtime.forget_dropped()
        self._end = weakref.finalize(self, self._runtime.forget, self._entries.free, number)
        self._end.atexit = False

    @classmethod
    def start(cls, threads: int) -> None:
        """See `Starting.start`: Julia with this many threads, and what it runs."""
        cls._load(threads)

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        return self._train(x, y, order, None)

    def _train(
        self, x: Array, y: Array, order: NDArray[np.int64], rates: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """An epoch in several calls: short ones, and with `rates` none in which the learning rate changes."""
        x, y = self._check.batch(x, y)
        order = self._check.order(order, x)
        self._check.batches(len(order), self._batch_size)
        steps = -(-len(order) // self._batch_size)
        changes = self._changes(rates, steps)
        losses = np.empty(steps, np.float64)
        samples, at_x, at_y, rows, at_order = len(x), x.ctypes.data, y.ctypes.data, len(order), order.ctypes.data
        at_losses, train = losses.ctypes.data, self._entries.train
        done = 0
        before = time.perf_counter()
        with reading_ahead(x, order) as reached:
            while done < steps:
                again = reached(done * self._batch_size) // self._batch_size
                last = min(done + self._steps_per_call, max(done + 1, again), steps)
                if rates is not None:
                    last = min(last, changes[bisect.bisect_right(changes, done)])
                    self._raise(self._entries.learning_rate(self._number, rates[done]))
                status = train(self._number, samples, at_x, at_y, rows, at_order, done + 1, last, at_losses)
                if status:
                    self._raise(status)
                done = last
                before, seconds = time.perf_counter(), time.perf_counter() - before
                if seconds > _CALL_SECONDS:
                    self._steps_per_call = max(1, self._steps_per_call // 2)
                elif seconds < _CALL_SECONDS / 4:
                    self._steps_per_call = min(2 * self._steps_per_call, _STEPS_PER_CALL)
        return losses

    @staticmethod
    def _changes(rates: NDArray[np.float64] | None, steps: int) -> list[int]:
        """After how many steps the learning rate becomes another one, and the number of all."""
        if rates is None:
            return [steps]
        check_rates(rates, steps)
        return [*(np.flatnonzero(np.diff(rates)) + 1).tolist(), steps]

    def evaluate(self, x: Array, y: Array) -> Evaluation:
        """See `Session.evaluate`."""
        x, y = self._check.batch(x, y)
        found = np.empty(2)
        self._raise(self._entries.evaluate(self._number, len(x), x.ctypes.data, y.ctypes.data, found.ctypes.data))
        return Evaluation(float(found[0]), float(found[1]))

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        x = self._check.features(x)
        out = np.empty((len(x), *self._spec.output), self._parameters.vector.dtype)
        self._raise(self._entries.predict(self._number, len(x), x.ctypes.data, out.ctypes.data))
        return out

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        x, y = self._check.batch(x, y)
        self._check.batches(len(x), len(x))
        loss, gradient = np.empty(1), FlatVector(self._gradient_layout, self._parameters.vector.dtype)
        self._raise(
            self._entries.gradients(
                self._number, len(x), x.ctypes.data, y.ctypes.data, loss.ctypes.data, gradient.vector.ctypes.data
            )
        )
        return float(loss[0]), gradient.as_dict()

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        found = self._parameters.as_dict()
        return {name: found[name] for name in self._spec.parameters()}

    def allocated(self) -> tuple[int, int]:
        """Bytes and allocations of Julia in this process so far, by its own counters."""
        found = np.empty(2, np.int64)
        self._raise(self._entries.allocated(found.ctypes.data))
        return int(found[0]), int(found[1])

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return f"{of_numpy()} (numpy's)" if self._runtime.uses_numpy_blas else self._runtime.info().linear_algebra

    def close(self) -> None:
        """See `Session.close`."""
        self._end()
        self._number = 0

    def _raise(self, status: int) -> None:
        """Raise what an entry point's status and message say; nothing for status 0."""
        if status:
            raise {1: ConfigurationError, 2: NonFiniteError}.get(status, JuliaError)(self._entries.last_message())


def _kept_by(optimizer: Optimizer) -> str:
    """What an optimizer keeps of each parameter: states of one rule must not be loaded into another."""
    if optimizer.name == "sgd":
        return "velocity" if optimizer.momentum else ""
    if optimizer.name == "rmsprop":
        return "square, velocity" if optimizer.momentum else "square"
    return "mean, square"


def _own_numbers(numbers: Array, rank: int) -> Array:
    """A process's part of the numbers of a state; see `training_state` in julia_engine/src/network/trainer.jl.

    A process that was not there when it was taken has what the first one had but its random streams, which begin anew.
    """
    if numbers.ndim not in (1, 2) or not numbers.size:
        raise ParameterError(f"a state's numbers are a vector, or one for each process, found shape {numbers.shape}")
    rows = [numbers] if numbers.ndim == 1 else [row[1 : 1 + row[0]] for row in numbers]
    if rank < len(rows):
        return rows[rank]
    begin = 3 if rows[0][2:3].tolist() == [-1] else 2  # states of older versions lack the third number
    found, place = list(rows[0][:begin]), begin
    while place < len(rows[0]):  # of each dropout layer a count, and as many numbers
        found.append(0)
        place += 1 + max(0, int(rows[0][place]))
    return np.array(found, np.int64)


class JuliaSession(EntrySession):
    """A `Session` of julia_engine. All calls come from the thread that made the first session of the process.

    After an error of a step the session stays usable: the parameters are those before that step. With a communicator,
    such as `mpi4py.MPI.COMM_WORLD`, each of its processes has a session of the same model, weights, data and order, and
    trains on its part of every mini-batch.
    """

    def __init__(self, *arguments: Any, communicator: Communicator | None = None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        if communicator is None:
            return
        try:
            self._sum = _Sum(Parallel(communicator), self._parameters.vector.dtype)
            ranks = self._sum.parallel.rank, self._sum.parallel.size
            self._raise(self._entries.communicate(self._number, *ranks, self._sum.address))
        except BaseException:
            self.close()
            raise

    _sum: _Sum | None = None

    def _raise(self, status: int) -> None:
        if self._sum is not None and self._sum.failure is not None:
            failure, self._sum.failure = self._sum.failure, None
            raise failure
        super()._raise(status)

    def _train(
        self, x: Array, y: Array, order: NDArray[np.int64], rates: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        losses = super()._train(x, y, order, rates)
        return losses if self._sum is None else self._sum.parallel.add_up(losses)

    def train_steps(
        self, x: Array, y: Array, order: NDArray[np.int64], rates: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """See `Scheduling.train_steps`."""
        return self._train(x, y, order, rates)

    def costs(self) -> list[tuple[str, str, float, int, int]]:
        """See `Costed.costs`."""
        lines = str(self._runtime.evaluate(f"TwinGrad.Entry.costs({self._number})")).splitlines()
        found = (line.split("\t") for line in lines)
        return [(op, layer, float(seconds), int(moved), int(flops)) for op, layer, seconds, moved, flops in found]

    def threads_in_step(self) -> str:
        """See `Costed.threads_in_step`."""
        return str(self._runtime.evaluate(f"TwinGrad.Entry.threads_in_step({self._number})"))

    def threads_decided(self) -> bool:
        """See `Costed.threads_decided`."""
        return bool(self._runtime.evaluate(f"TwinGrad.Entry.threads_decided({self._number})"))

    def held_bytes(self) -> int:
        """See `Costed.held_bytes`."""
        held = f"TwinGrad.Entry.held_bytes(TwinGrad.Entry.session({self._number}))"
        return int(str(self._runtime.evaluate(f"string({held})")))

    def collecting_seconds(self) -> float:
        """See `Costed.collecting_seconds`."""
        return float(str(self._runtime.evaluate("string(Base.gc_num().total_time / 1e9)")))

    def state(self) -> dict[str, Array]:
        """See `Resumable.state`."""
        sizes = np.zeros(3, np.int64)
        self._raise(self._entries.state(self._number, sizes.ctypes.data, None, None, None))
        dtype = self._parameters.vector.dtype
        numbers, first, second = (np.empty(n, t) for n, t in zip(sizes, (np.int64, dtype, dtype), strict=True))
        places = (sizes.ctypes.data, numbers.ctypes.data, first.ctypes.data, second.ctypes.data)
        self._raise(self._entries.state(self._number, *places))
        if self._sum is not None:  # of all processes, which have other random streams: each a row, its length first
            rows = [np.append(len(own), own) for own in self._sum.parallel.gather(numbers)]
            numbers = np.stack([np.pad(row, (0, max(map(len, rows)) - len(row))) for row in rows])
        return {"numbers": numbers, "first": first, "second": second, "rule": self._rule.copy()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See `Resumable.load_state`."""
        dtype = self._parameters.vector.dtype
        expected = {"numbers": np.dtype(np.int64), "first": dtype, "second": dtype, "rule": np.dtype(np.uint8)}
        found = {"rule": self._rule, **state}  # older states do not say of which update rule they are
        if {name: array.dtype for name, array in found.items()} != expected:
            raise ParameterError(f"expected the arrays {', '.join(expected)} of a Julia session in {dtype}")
        if not np.array_equal(found["rule"], self._rule):
            raise ParameterError(
                f"expected the state of an optimizer that keeps {self._rule.tobytes().decode() or 'nothing'}, found "
                f"{found['rule'].tobytes().decode(errors='replace') or 'nothing'}"
            )
        numbers = _own_numbers(state["numbers"], 0 if self._sum is None else self._sum.parallel.rank)
        arrays = [np.ascontiguousarray(array) for array in (numbers, state["first"], state["second"])]
        sizes = np.array([array.size for array in arrays], np.int64)
        status = self._entries.load_state(self._number, sizes.ctypes.data, *(array.ctypes.data for array in arrays))
        if status:
            raise ParameterError(self._entries.last_message())
