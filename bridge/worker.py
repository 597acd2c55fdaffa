"""One engine in its own process, so that measurements of one engine know nothing of another.

    with Worker("torch", threads=2) as worker:
        worker.build(spec, params, Optimizer("sgd", 0.015), batch_size=100)
        losses = worker.train_epoch(x, y, order)
        print(worker.seconds)

A `Worker` is a `Session` once it is built, with the time of its last call beside it, taken inside the process and
around nothing but that call. The process starts with its cores and its thread counts fixed before anything is imported.
It ends with `close`, with its parent (however that ends, and stopped or busy as it may be), and whenever a request is
interrupted; whatever it may have started ends with it. Calls from several threads follow each other. It
belongs to the process that made it, and not to forks of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors.numpy import load_file, save_file

import bridge.errors
import py_engine.errors
from bridge import memory, weights
from bridge import registry as engines
from bridge.checks import PerArray
from bridge.child import Child, ChildDiedError, import_path
from bridge.errors import WorkerError
from bridge.session import Evaluation, Optimizer
from bridge.spec import ModelSpec
from bridge.temporary import temporary_folder, writing_temporary
from py_engine.ad.tensor import check_class
from py_engine.errors import ConfigurationError, DTypeError
from py_engine.network.read_ahead import mapped_file

__all__ = ["Worker", "environment"]

Array = NDArray[Any] | str | os.PathLike[str]
"""An array, or the .npy file that holds it, which is then read where it lies. One that maps a file is mapped again."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "JULIA_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "PJRT_NPROC",  # the threads of JAX's XLA
)

KERNEL_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "TF_ENABLE_ONEDNN_OPTS")

# The process finds modules where its parent does.
_BOOTSTRAP = """
import json, sys
start = json.loads(sys.argv[1])
sys.path[:] = start["path"]
from bridge.worker_process import main
main(start)
"""

_ERRORS: dict[str, type[Exception]] = {
    name: getattr(module, name) for module in (py_engine.errors, bridge.errors) for name in module.__all__
}
"""What may be raised here for an error in the worker, by name."""


class Worker:
    """A process that holds one engine and serves one session at a time.

    Raises `EngineUnavailableError` when the engine can't be used here, `WorkerError` when the process dies, and in each
    call what the session raises there.
    """

    def __init__(
        self, engine: str, threads: int = 1, counting: bool = False, cores: Sequence[int] | None = None
    ) -> None:
        """`counting`: for a profiler of memory to see all of it; see `Registered.counting`. Times are then others.

        `cores`: which ones to use, as many as threads; None: the first ones that this process may use.
        """
        self.engine = engines.get(engine)
        threads = _count(threads)
        self._variables = environment(threads) | dict(self.engine.counting if counting else {})
        self.threads = threads
        self.cores = _choose_cores(threads, cores)
        self.seconds = float("nan")
        """Of the last call of the session: its own time, without that of passing arrays to and fro."""
        self.build_seconds = float("nan")
        self._paused = False
        self._ended_for = ""
        self._numbers = itertools.count(1)
        self._turn = threading.RLock()
        self._folder = temporary_folder("twingrad-worker-")
        self._files = PerArray(self._write_array, drop=Path.unlink)
        before = time.perf_counter()
        start = {"engine": engine, "threads": threads, "folder": str(self._folder), "path": import_path()}
        command = [sys.executable, "-X", "faulthandler", "-c", _BOOTSTRAP, json.dumps(start)]
        self._child = Child(command, self._variables, self._folder, self.cores)
        described = self._receive("starting")["result"]
        self.import_seconds: float = described["import_seconds"]
        """What importing the engine, and starting the runtime it has, took; numpy and the bridge were there already."""
        self.start_seconds = time.perf_counter() - before
        """From nothing to a process that is ready to build, imports included."""
        self.versions: dict[str, str] = described["versions"]
        """Of Python and of the packages that the engine is made of."""

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def stderr(self) -> Path:
        """The file with what the process and its libraries have printed; gone after `close`."""
        return self._child.stderr

    # The session.

    def build(
        self,
        spec: ModelSpec,
        params: Mapping[str, NDArray[Any]],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        techniques: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a session, in place of the one before; see `bridge.registry.Registered.build`."""
        weights.check(params, spec, dtype)
        path = self._new_file("safetensors")
        weights.save(path, params)
        with _removing([path]):
            self._call(
                "build",
                spec_text=spec.dump(),
                params=str(path),
                optimizer=dataclasses.asdict(optimizer),
                batch_size=batch_size,
                dtype=str(np.dtype(dtype)),
                techniques=dict(techniques or {}),
            )
        self.build_seconds = self.seconds

    def own_parameters(self, spec: ModelSpec, seed: int, dtype: DTypeLike = "float32") -> dict[str, NDArray[Any]]:
        """See `bridge.registry.Registered.own_parameters`; no session is needed for it."""
        return _take_arrays(self._call("own_parameters", spec_text=spec.dump(), seed=seed, dtype=str(np.dtype(dtype))))

    def train_epoch(self, x: Array, y: Array, order: Array) -> NDArray[np.float64]:
        """See `Session.train_epoch`; `seconds` is then the time of exactly this."""
        if not isinstance(order, np.ndarray):
            return _take_array(self._call("train_epoch", {"x": x, "y": y}, order=_file_of(order, "order")))
        with self._passed([order]) as (rows,):
            return _take_array(self._call("train_epoch", {"x": x, "y": y}, order=rows))

    def train_steps(self, x: Array, y: Array, order: Array, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Scheduling.train_steps`; `seconds` is then the time of exactly this."""
        with self._passed([np.asarray(order), rates]) as (rows, each):
            return _take_array(self._call("train_steps", {"x": x, "y": y}, order=rows, rates=each))

    def evaluate(self, x: Array, y: Array) -> Evaluation:
        """See `Session.evaluate`."""
        return Evaluation(**self._call("evaluate", {"x": x, "y": y}))

    def predict(self, x: Array) -> NDArray[Any]:
        """See `Session.predict`."""
        return _take_array(self._call("predict", {"x": x}))

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, NDArray[Any]]]:
        """See `Session.loss_and_gradients`."""
        result = self._call("loss_and_gradients", {"x": x, "y": y})
        return result["loss"], _take_arrays(result["gradients"])

    def params(self) -> dict[str, NDArray[Any]]:
        """See `Session.params`."""
        return _take_arrays(self._call("params"))

    def state(self) -> dict[str, NDArray[Any]]:
        """See `Resumable.state`."""
        return _take_arrays(self._call("state"))

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """See `Resumable.load_state`."""
        path = self._new_file("safetensors")
        with writing_temporary(path):
            save_file({name: np.asarray(array, order="C") for name, array in state.items()}, path)
        with _removing([path]):
            self._call("load_state", state=str(path))

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return str(self._call("linear_algebra"))

    # A programmer's own Julia functions, in the process of engine "julia"; see `bridge.julia.function`.

    def define_function(self, code: str, name: str, replay: bool) -> int:
        """Make a Julia function in the process; return its number there."""
        return int(self._call("define_function", code=code, name=name, replay=replay))

    def derive_function(self, function: int, by: int | None, needs_grad: Sequence[bool]) -> int:
        """Make a derivative of one of them; return its number. See `bridge.julia.JuliaFunction.derivative`."""
        return int(self._call("derive_function", function=function, by=by, needs_grad=list(needs_grad)))

    def function_value(self, function: int, args: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Call one of them."""
        with self._passed(args) as paths:
            return _take_array(self._call("function_value", function=function, args=paths))

    def function_pullback(
        self, function: int, seed: NDArray[Any], args: Sequence[NDArray[Any]]
    ) -> list[NDArray[Any] | None]:
        """Return its vector-Jacobian products by each argument; None for one of integers."""
        with self._passed([seed, *args]) as paths:
            found = self._call("function_pullback", function=function, seed=paths[0], args=paths[1:])
        return [None if path is None else _take_array(path) for path in found]

    @contextlib.contextmanager
    def _passed(self, arrays: Sequence[NDArray[Any]]) -> Iterator[list[str]]:
        """The files that take arrays across for one call."""
        paths = [self._write_array(array) for array in arrays]
        with _removing(paths):
            yield [str(path) for path in paths]

    # The data and the process.

    def preload(self, *arrays: Array) -> None:
        """Read data into the process now, so that neither its time nor its memory counts for what follows.

        Features with their targets, once more after `build`, for a framework that computes with its own copy.
        """
        self._call("preload", {"paths": arrays})

    def pause(self) -> None:
        """Stop the process, whatever its threads are doing, until `resume`."""
        self._check_open()
        self._child.signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let the process continue."""
        self._check_open()
        self._child.signal(signal.SIGCONT)
        self._paused = False

    def close_session(self) -> None:
        """Close the session that was built last, if it is open: its memory is freed, and given back to the system.

        `build` closes it, too, and leaves what it frees to the next one.
        """
        self._call("close")

    def reset_peak(self) -> None:
        """Start `peak_rss` afresh from the memory that is now resident."""
        self._call("reset_peak")

    def peak_rss(self) -> int:
        """The most memory, in bytes, that was resident since `reset_peak`."""
        return int(self._call("peak_rss"))

    def start_memray(self, file: str | os.PathLike[str]) -> None:
        """Record all allocations in a file, which must not exist yet, until `stop_memray`; everything is slower."""
        self._call("start_memray", file=str(Path(file).absolute()))

    def stop_memray(self) -> None:
        """Complete the file that `start_memray` began."""
        self._call("stop_memray")

    def allocated(self) -> tuple[int, int]:
        """Bytes and allocations so far by the counters of the session's own runtime; see `Registered.counts_itself`."""
        total, count = self._call("allocated")
        return int(total), int(count)

    def costs(self) -> list[tuple[str, str, float, int, int]]:
        """See `Costed.costs`; empty for a session that can't say it."""
        return [tuple(cost) for cost in self._call("costs")]

    def threads_in_step(self) -> str:
        """See `Costed.threads_in_step`; empty for a session that can't say it."""
        return str(self._call("threads_in_step"))

    def threads_decided(self) -> bool:
        """See `Costed.threads_decided`; true for a session that can't say it."""
        return bool(self._call("threads_decided"))

    def held_bytes(self) -> int | None:
        """See `Costed.held_bytes`; None for a session that can't say it."""
        return cast("int | None", self._call("held_bytes"))

    def collecting_seconds(self) -> float | None:
        """See `Costed.collecting_seconds`; None for a session that can't say it."""
        return cast("float | None", self._call("collecting_seconds"))

    def system_seconds(self) -> float | None:
        """`memory.system_seconds` of all that was timed so far, `build` and steps, in the thread that ran it."""
        return cast("float | None", self._call("system_seconds"))

    def libraries(self) -> list[dict[str, Any]]:
        """The BLAS and OpenMP libraries that the process has loaded, as threadpoolctl describes them."""
        return cast("list[dict[str, Any]]", self._call("libraries"))

    def memory(self) -> int:
        """Bytes that the process and all that it has started hold now; see `bridge.memory.held`. From any thread."""
        return memory.held(self.pid) if self._child.is_open else 0

    def kill(self, why: str = "") -> None:
        """End the process, from any thread: a call that waits for it raises `WorkerError`. `close` is still needed.

        `why` is said in that error.
        """
        self._ended_for = why
        self._child.kill()

    def close(self) -> None:
        """End the process and remove its files. Calling it twice does no harm, and calls in other threads fail."""
        if not self._child.is_ours:  # of a fork, whose locks nobody may hold
            self._child.close()
            return
        if not self._turn.acquire(blocking=False):
            self.kill()
            self._turn.acquire()
        try:
            self._child.close()
        finally:
            self._turn.release()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self._child.is_open else "closed"
        return f"Worker({self.engine.name!r}, threads={self.threads}) [process {self.pid}, {state}]"

    # How it works.

    def _call(self, call: str, data: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
        """`data`: arrays, or tuples of them, by the names of arguments."""
        self._check_open()
        with self._turn:
            self._check_open()  # still, after waiting for the others
            for name, array in (data or {}).items():  # in turn: what is kept of others' arrays may be dropped
                several = isinstance(array, tuple)
                arguments[name] = [self._path(one, name) for one in array] if several else self._path(array, name)
            if self._paused:
                raise WorkerError(f"the worker of engine {self.engine.name} is paused: call resume() before {call}")
            answer = self._receive(call, arguments)
            self.seconds = answer.get("seconds", self.seconds)
            return answer["result"]

    def _receive(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request, or without arguments the first one, which comes unasked."""
        try:
            answer = self._child.receive() if arguments is None else self._child.ask(call, **arguments)
        except ChildDiedError as death:
            last = "".join(f"\n  {line}" for line in death.said) or " nothing"
            ending = f"was ended ({self._ended_for})" if self._ended_for else death.ending
            raise WorkerError(
                f"the worker of engine {self.engine.name} (process {self.pid}) {ending} in {call}; it last said:{last}"
            ) from None
        if "error" not in answer:
            return answer
        if arguments is None:
            self.close()
        raise self._error(call, answer["error"])

    def _error(self, call: str, described: dict[str, Any]) -> Exception:
        """The session's own error, made again here."""
        kind, message = described["type"], described["message"]
        if kind not in _ERRORS:
            where = f" ({described['where']})" if described.get("where") else ""
            return WorkerError(f"engine {self.engine.name} failed in {call}: {kind}: {message}{where}")
        error = _ERRORS[kind].__new__(_ERRORS[kind])
        Exception.__init__(error, message)  # not its own __init__, which made the message from the fields
        vars(error).update(described["fields"])
        return error

    def _check_open(self) -> None:
        if not self._child.is_ours:
            raise WorkerError(
                f"the worker of engine {self.engine.name} did not come along into this forked process: start one here"
            )
        if not self._child.is_open:
            raise WorkerError(f"the worker of engine {self.engine.name} is closed: start another one")

    def _path(self, array: Array, name: str) -> str | dict[str, Any]:
        """The file that takes an array across; of one that maps a file, where in that it lies."""
        if not isinstance(array, np.ndarray):
            return _file_of(array, name)
        if self.engine.maps and (found := mapped_file(array)) is not None:
            changed = os.stat(found[0]).st_mtime_ns
            return {"file": found[0], "offset": found[1], "dtype": array.dtype.str, "shape": array.shape, "at": changed}
        return str(self._files(array))

    def _write_array(self, array: NDArray[Any]) -> Path:
        check_class(array)
        if array.dtype.hasobject:
            raise DTypeError(f"expected an array of numbers, found one of Python objects, of shape {array.shape}")
        path = self._new_file("npy")
        with writing_temporary(path):
            np.save(path, array, allow_pickle=False)
        return path

    def _new_file(self, suffix: str) -> Path:
        self._check_open()
        return self._folder / f"request-{next(self._numbers)}.{suffix}"


@contextlib.contextmanager
def _removing(paths: Sequence[Path]) -> Iterator[None]:
    """Remove these files at the end, whatever comes."""
    try:
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _file_of(array: Any, name: str) -> str:
    """The file that is given in place of an array."""
    if not isinstance(array, (str, os.PathLike)):
        raise DTypeError(
            f"{name}: expected a numpy array, found {type(array).__name__}; convert it with np.asarray({name})"
        )
    return str(Path(array).absolute())


def environment(threads: int) -> dict[str, str]:
    """This process's environment with the thread counts of all libraries that a worker may load.

    Which kernels a BLAS uses is left to the library, which knows the CPU: settings such as OPENBLAS_CORETYPE that the
    surroundings happen to hold are dropped, for all engines alike. TWINGRAD_OPENBLAS_CORETYPE chooses them on purpose.
    `Worker.libraries` shows what was chosen.
    """
    kept = {name: value for name, value in os.environ.items() if name not in KERNEL_VARIABLES}
    chosen = os.environ.get("TWINGRAD_OPENBLAS_CORETYPE")
    return kept | ({"OPENBLAS_CORETYPE": chosen} if chosen else {}) | dict.fromkeys(THREAD_VARIABLES, str(threads))


def _count(threads: Any) -> int:
    """A number of threads as Python's own integer."""
    try:
        return operator.index(threads)
    except TypeError:
        raise ConfigurationError(f"a worker's threads are an integer, found threads={threads!r}") from None


def _choose_cores(threads: int, wanted: Sequence[int] | None = None) -> list[int]:
    """The first `threads` cores that this process may use, or those wanted; none where none can be chosen."""
    if threads < 1:
        raise WorkerError(f"a worker needs at least 1 thread, found threads={threads}")
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise WorkerError(
            f"threads={threads}, but this process may use only {len(allowed)} "
            f"core{'s' if len(allowed) > 1 else ''}: ask for at most {len(allowed)}"
        )
    if wanted is None:
        return allowed[:threads]
    if len(wanted) != threads or not set(wanted) <= set(allowed):
        raise WorkerError(f"threads={threads} on cores {list(wanted)}: expected as many of {allowed}")
    return list(wanted)


def _take_array(path: str) -> NDArray[Any]:
    """Read an answer's array and remove its file."""
    array: NDArray[Any] = np.load(path, allow_pickle=False)
    Path(path).unlink()
    return array


def _take_arrays(path: str) -> dict[str, NDArray[Any]]:
    arrays = load_file(path)
    Path(path).unlink()
    return arrays
