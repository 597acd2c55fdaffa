"""What both backends, which run Julia in this process, have in common.

A runtime evaluates a string and gives out C-callable entry points; everything else is built on these two. What it
evaluates is our own source and never made of what a user wrote: data goes through entry points, as numbers and
arrays. Julia belongs to the thread that started it, and to this process: it does not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import json
import os
import re
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from bridge.errors import JuliaError, JuliaUnavailableError
from bridge.libjulia import environment
from bridge.libjulia.find import Julia

__all__ = ["BACKENDS", "EMBEDDED", "JULIACALL", "Info", "Runtime", "Value", "literal"]

JULIACALL = "juliacall"
EMBEDDED = "embedded"
BACKENDS = (JULIACALL, EMBEDDED)

_SUPPORT = Path(__file__).with_name("runtime.jl")
"""The Julia module TwinGradRuntime, which every runtime evaluates when it starts."""

Value = bool | int | float | str | None
"""What `Runtime.evaluate` can pass to Python."""

_NAME = re.compile(r"[A-Za-z_]\w*!?(\.[A-Za-z_]\w*!?)*", re.ASCII)

_TORCH = "torch"
_WHY_APART = (
    "Julia and PyTorch have crashed each other when they share a process, in either order of loading. Give each a "
    "separate process: bridge.worker.Worker starts an engine in one"
)


@dataclass(frozen=True)
class Info:
    """The Julia that runs in this process, and how it came there."""

    backend: str
    """"juliacall" or "embedded"."""
    version: str
    executable: str
    libjulia: str
    sysimage: str
    threads: int
    blas: str
    kernels: str
    """What the BLAS has chosen, or was set to, for this CPU; empty when it can't be asked."""
    notes: tuple[str, ...]
    """Why it was not the other backend."""

    @property
    def linear_algebra(self) -> str:
        """Its BLAS with the kernels, for tables: "OpenBLAS 0.3.9 SkylakeX"."""
        return f"{self.blas} {self.kernels}".strip() or "unknown"


class Runtime(ABC):
    """Julia in this process. There is at most one, made by `bridge.julia.runtime`."""

    backend: str
    uses_numpy_blas = False
    """Whether the engine's products are computed by numpy's BLAS; see `numpy_blas`."""

    def __init__(self, julia: Julia, notes: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start Julia in an environment with these variables."""
        _check_process()
        self.julia = julia
        with _process_kept(), environment.temporarily(variables):
            self._start()
            self._notes = tuple(notes)
            self._dropped: list[tuple[Callable[[int], Any], int]] = []
            self._thread = threading.get_ident()
            self._thread_name = threading.current_thread().name
            os.register_at_fork(after_in_child=self._forked)
            _keep_torch_out()
            # This loads LinearAlgebra and with it the BLAS, which reads the environment then.
            self._evaluate(f"Base.include(Main, {literal(_SUPPORT)}); nothing")

    def evaluate(self, code: str) -> Value:
        """Evaluate one expression (or several, joined by semicolons) in Julia's Main and return the value.

        The value is nothing, a Bool, a number or a String; for another, end the code with ``; nothing``.
        Raises `JuliaError` with Julia's message for an exception, and for a call from another thread.
        """
        self._check_caller()
        return self._evaluate(code)

    def function_pointer(
        self, name: str, argtypes: Sequence[type[Any]], restype: type[Any] | None
    ) -> Callable[..., Any]:
        """A C-callable entry point as a Python function; the GIL is released while it runs.

        `name` is that of a Julia function without arguments that returns the pointer, such as
        ``pointer() = @cfunction(step, Cint, (Ptr{Float32},))`` in a module: ``"Module.pointer"``. `argtypes` and
        `restype` are the same signature as ctypes types. No Julia exception may leave the entry point.
        """
        if _NAME.fullmatch(name) is None:
            raise JuliaError(f"{name!r} is not the name of a Julia function: expected one such as 'Module.pointer'")
        address = self.evaluate(f"UInt({name}())")
        if not isinstance(address, int) or address == 0:
            raise JuliaError(f"{name}() gave {address!r} where a pointer to an entry point was expected")
        entry = ctypes.CFUNCTYPE(restype, *argtypes)(address)

        def call(*arguments: Any) -> Any:
            if threading.get_ident() != self._thread:
                self._check_caller()
            return entry(*arguments)

        call.__name__ = call.__qualname__ = name
        return call

    def info(self) -> Info:
        """What runs here."""
        return Info(
            backend=self.backend,
            version=str(self.evaluate("string(VERSION)")),
            executable=self.julia.executable,
            libjulia=self.julia.libjulia,
            sysimage=str(self.evaluate("unsafe_string(Base.JLOptions().image_file)")),
            threads=int(self.evaluate("Threads.nthreads()") or 0),
            blas=str(self.evaluate("TwinGradRuntime.blas()")),
            kernels=str(self.evaluate("TwinGradRuntime.kernels()")),
            notes=self._notes,
        )

    def is_callable(self) -> bool:
        """Whether Julia can be called from here: from this thread, in this process."""
        return threading.get_ident() == self._thread

    def forget(self, free: Callable[[int], Any], number: int) -> None:
        """Let Julia free what it keeps for Python under a number, and Python has dropped.

        Later, where Python drops it in a thread that can't call Julia; never in a fork.
        """
        self._dropped.append((free, number))
        if self.is_callable():
            self.forget_dropped()

    def forget_dropped(self) -> None:
        """Let Julia free what was dropped elsewhere."""
        while self._dropped:
            free, number = self._dropped.pop()
            free(number)

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _evaluate(self, code: str) -> Value: ...

    def _check_caller(self) -> None:
        if self._thread == 0:
            raise JuliaError("Julia did not come along into this forked process: start it here, in a new process")
        if threading.get_ident() != self._thread:
            raise JuliaError(
                f"Julia was called from thread {threading.current_thread().name!r}, but belongs to thread "
                f"{self._thread_name!r}, which started it: make all calls from there"
            )

    def _forked(self) -> None:
        self._thread = 0


def literal(text: str | os.PathLike[str]) -> str:
    """A path, or another string that we made, as a Julia string literal: nothing in it is interpolated or ends it."""
    # JSON's escapes are Julia's, apart from the dollar and from pairs of surrogates, which this leaves unescaped.
    return json.dumps(os.fspath(text), ensure_ascii=False).replace("$", "\\$")


def _check_process() -> None:
    """Raise `JuliaUnavailableError` where Julia must not be started."""
    if threading.current_thread() is not threading.main_thread():
        raise JuliaUnavailableError(
            f"Julia can't be started from thread {threading.current_thread().name!r}: start it, and call it, from the "
            "main thread"
        )
    if _TORCH in sys.modules:
        raise JuliaUnavailableError(f"Julia can't be started: this process has imported torch. {_WHY_APART}")


def _keep_torch_out() -> None:
    """From now on ``import torch`` raises ImportError with the reason; whether it is installed can still be asked."""
    if not any(isinstance(finder, _TorchRefused) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchRefused())


class _TorchRefused(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TORCH:
            return None
        there = importlib.machinery.PathFinder.find_spec(fullname, path)
        return None if there is None else importlib.machinery.ModuleSpec(fullname, self, origin=there.origin)

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"torch can't be imported: this process runs Julia. {_WHY_APART}", name=_TORCH)


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """What Julia takes over when it starts stays Python's: signal handlers, what is blocked, streams that wait.

    Julia's libuv makes standard streams that are pipes non-blocking, for all who use them. Python takes such a standard
    input for ended where nothing has come yet, and can't write to such an output where the reader is slow.
    """
    with _signals_kept(), _streams_kept():
        yield


@contextlib.contextmanager
def _streams_kept() -> Iterator[None]:
    waiting = {}
    for stream in range(3):
        with contextlib.suppress(OSError):  # closed
            waiting[stream] = os.get_blocking(stream)
    try:
        yield
    finally:
        for stream, waits in waiting.items():
            os.set_blocking(stream, waits)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    asynchronous = [signal.SIGINT, signal.SIGTERM]
    asynchronous += [getattr(signal, name) for name in ("SIGQUIT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in asynchronous}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not Python's
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
