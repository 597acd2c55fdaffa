"""What runs in a worker: one engine, which answers requests as `bridge.child_process` says.

`bridge.worker` starts it and speaks for it. An answer is ``{"result": ..., "seconds": ...}``, the seconds being those
inside the session alone, or ``{"error": {...}}``. Arrays travel as paths of .npy and safetensors files, or as places in
files that are mapped; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bridge import memory, spec
from bridge import registry as engines
from bridge.child_process import Answer, serve
from bridge.errors import EngineUnavailableError
from bridge.session import Costed, Counting, Optimizer, Preloading, Session, Starting
from bridge.temporary import writing_temporary

__all__ = ["main"]

T = TypeVar("T")

Where: TypeAlias = str | dict[str, Any]
"""An array: the .npy file that holds it, or its place in a file that is mapped."""

_KEPT = 8
"""How many data arrays stay in memory: a train and a test set, and the same once more."""


def main(start: Mapping[str, Any]) -> None:
    """Serve until standard input ends. `start` holds `engine`, `threads` and `folder`, the place for files."""
    folder = Path(start["folder"])
    server = _Server(start["engine"], start["threads"], folder)
    serve(server.load, server.answer, _failure, folder)


def _failure(error: Exception) -> Answer:
    """An error's type, message and fields, so that it can be made again in the parent, and where it was raised."""
    fields = {}
    for name, value in vars(error).items():  # such as SpecError.problems
        with contextlib.suppress(TypeError, ValueError):
            fields[name] = json.loads(json.dumps(value))
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return {"type": type(error).__name__, "message": str(error), "fields": fields, "where": where}


class _Server:
    """The requests that a worker answers: each method named `do_...` is one."""

    def __init__(self, engine: str, threads: int, folder: Path) -> None:
        self._engine = engines.get(engine)
        self._threads = threads
        self._folder = folder
        self._session: Session | None = None
        self._arrays: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._functions: list[Any] = []
        self._tracker: Any = None
        self._written = 0
        self._system_seconds = 0.0  # of all that was timed

    def load(self) -> Answer:
        before = time.perf_counter()
        if isinstance(sessions := self._engine.load(), Starting):
            sessions.start(self._threads)
        seconds = time.perf_counter() - before
        versions = {"python": platform.python_version(), **self._engine.availability().versions}
        return {"result": {"import_seconds": seconds, "versions": versions}}

    def answer(self, call: str, arguments: Answer) -> Answer:
        return dict(getattr(self, f"do_{call}")(**arguments))

    # The session.

    def do_build(
        self, spec_text: str, params: str, optimizer: Answer, batch_size: int, dtype: str, techniques: Answer
    ) -> Answer:
        self._close()
        model = spec.loads(spec_text, "the spec")
        weights = load_file(params)
        settings = Optimizer(**optimizer)
        self._session, seconds = self._timed(
            lambda: self._engine.build(model, weights, settings, batch_size, dtype, self._threads, techniques)
        )
        return {"result": None, "seconds": seconds}

    def do_own_parameters(self, spec_text: str, seed: int, dtype: str) -> Answer:
        found = self._engine.own_parameters(spec.loads(spec_text, "the spec"), seed, dtype)
        return {"result": self._write_arrays(found)}

    def do_train_epoch(self, x: Where, y: Where, order: str) -> Answer:
        session, features, targets, rows = self._built, self._data(x), self._data(y), _read_array(order)
        losses, seconds = self._timed(lambda: session.train_epoch(features, targets, rows))
        return {"result": self._write_array(losses), "seconds": seconds}

    def do_train_steps(self, x: Where, y: Where, order: str, rates: str) -> Answer:
        session, features, targets = self._resumable, self._data(x), self._data(y)
        rows, each = _read_array(order), _read_array(rates)
        losses, seconds = self._timed(lambda: session.train_steps(features, targets, rows, each))
        return {"result": self._write_array(losses), "seconds": seconds}

    def do_evaluate(self, x: Where, y: Where) -> Answer:
        session, features, targets = self._built, self._data(x), self._data(y)
        found, seconds = self._timed(lambda: session.evaluate(features, targets))
        return {"result": {"loss": found.loss, "accuracy": found.accuracy}, "seconds": seconds}

    def do_predict(self, x: Where) -> Answer:
        session, features = self._built, self._data(x)
        output, seconds = self._timed(lambda: session.predict(features))
        return {"result": self._write_array(output), "seconds": seconds}

    def do_loss_and_gradients(self, x: Where, y: Where) -> Answer:
        session, features, targets = self._built, self._data(x), self._data(y)
        (loss, gradients), seconds = self._timed(lambda: session.loss_and_gradients(features, targets))
        return {"result": {"loss": loss, "gradients": self._write_arrays(gradients)}, "seconds": seconds}

    def do_params(self) -> Answer:
        params, seconds = self._timed(self._built.params)
        return {"result": self._write_arrays(params), "seconds": seconds}

    def do_state(self) -> Answer:
        return {"result": self._write_arrays(self._resumable.state())}

    def do_load_state(self, state: str) -> Answer:
        self._resumable.load_state(load_file(state))
        return {"result": None}

    def do_linear_algebra(self) -> Answer:
        return {"result": self._built.linear_algebra()}

    def do_close(self) -> Answer:
        self._close()
        memory.give_back()  # of all engines alike
        return {"result": None}

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    @property
    def _built(self) -> Session:
        if self._session is None:
            raise EngineUnavailableError(f"engine {self._engine.name}: nothing is built yet; call build first")
        return self._session

    @property
    def _resumable(self) -> Any:
        engines.check_resumable(self._engine.name)
        return self._built

    # A programmer's own Julia functions, in place of a session, by their places in a list.

    def do_define_function(self, code: str, name: str, replay: bool) -> Answer:
        self._functions.append(self._engine.function(code, name, replay, self._threads))
        return {"result": len(self._functions) - 1}

    def do_derive_function(self, function: int, by: int | None, needs_grad: list[bool]) -> Answer:
        self._functions.append(self._functions[function].derivative(by, needs_grad))
        return {"result": len(self._functions) - 1}

    def do_function_value(self, function: int, args: list[str]) -> Answer:
        arrays = [_read_array(path) for path in args]
        value, seconds = self._timed(lambda: self._functions[function].value(arrays))
        return {"result": self._write_array(value), "seconds": seconds}

    def do_function_pullback(self, function: int, seed: str, args: list[str]) -> Answer:
        upstream, arrays = _read_array(seed), [_read_array(path) for path in args]
        found, seconds = self._timed(lambda: self._functions[function].pullback(upstream, arrays))
        return {"result": [None if g is None else self._write_array(g) for g in found], "seconds": seconds}

    # Data. Read whole rather than mapped: a mapped file's pages are small and come in while the first epoch is timed.
    # What the caller maps may be larger than memory, and is mapped here, too.

    def do_preload(self, paths: list[Where]) -> Answer:
        arrays = [self._data(path) for path in paths]
        if isinstance(self._session, Preloading) and len(arrays) == 2:
            self._session.preload(*arrays)
        return {"result": None}

    def _data(self, where: Where) -> NDArray[Any]:
        key = _version(where) if isinstance(where, str) else json.dumps(where)
        if key not in self._arrays:
            self._arrays[key] = _read_array(where) if isinstance(where, str) else _map_array(**where)
            if len(self._arrays) > _KEPT:
                self._arrays.popitem(last=False)
        self._arrays.move_to_end(key)
        return self._arrays[key]

    def _write_array(self, array: NDArray[Any]) -> str:
        path = self._new_file("npy")
        with writing_temporary(path):
            np.save(path, array, allow_pickle=False)
        return str(path)

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        system, before = memory.system_seconds() or 0.0, time.perf_counter()
        result = work()
        seconds = time.perf_counter() - before
        self._system_seconds += (memory.system_seconds() or 0.0) - system
        return result, seconds

    def _write_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> str:
        path = self._new_file("safetensors")
        with writing_temporary(path):
            save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, path)
        return str(path)

    def _new_file(self, suffix: str) -> Path:
        self._written += 1
        return self._folder / f"answer-{self._written}.{suffix}"

    # Memory and the libraries in use.

    def do_reset_peak(self) -> Answer:
        memory.reset_peak()
        return {"result": None}

    def do_peak_rss(self) -> Answer:
        return {"result": memory.peak_rss()}

    def do_start_memray(self, file: str) -> Answer:
        try:
            import memray
        except ImportError as error:
            raise EngineUnavailableError(
                f"allocations are measured with memray ({error}): pip install 'twingrad[memory]'"
            ) from None
        if self._tracker is not None:
            raise EngineUnavailableError("memray is recording already: call stop_memray first")
        tracker = memray.Tracker(file)
        tracker.__enter__()
        self._tracker = tracker
        return {"result": None}

    def do_stop_memray(self) -> Answer:
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            self._tracker = None
        return {"result": None}

    def do_allocated(self) -> Answer:
        return {"result": cast(Counting, self._built).allocated()}

    def do_costs(self) -> Answer:
        session = self._built
        return {"result": session.costs() if isinstance(session, Costed) else []}

    def do_threads_in_step(self) -> Answer:
        session = self._built
        return {"result": session.threads_in_step() if isinstance(session, Costed) else ""}

    def do_threads_decided(self) -> Answer:
        session = self._built
        return {"result": session.threads_decided() if isinstance(session, Costed) else True}

    def do_held_bytes(self) -> Answer:
        session = self._built
        return {"result": session.held_bytes() if isinstance(session, Costed) else None}

    def do_collecting_seconds(self) -> Answer:
        session = self._built
        return {"result": session.collecting_seconds() if isinstance(session, Costed) else None}

    def do_system_seconds(self) -> Answer:
        return {"result": None if memory.system_seconds() is None else self._system_seconds}

    def do_libraries(self) -> Answer:
        from threadpoolctl import threadpool_info

        return {"result": threadpool_info()}


def _map_array(file: str, offset: int, dtype: str, shape: list[int], at: int) -> NDArray[Any]:
    """Map a place in a file, which had been changed last at this time: `at` tells one file of a name from the next."""
    return np.memmap(file, dtype, "r", offset, tuple(shape))


def _version(path: str) -> str:
    """A file, as it is now."""
    found = os.stat(path)
    return json.dumps([path, found.st_ino, found.st_size, found.st_mtime_ns])


def _read_array(path: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, allow_pickle=False)
    return array
