"""Julia in this process through ctypes: libjulia and nothing else, from Julia 1.5 on, without a Julia package."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from bridge.errors import JuliaError, JuliaUnavailableError
from bridge.libjulia import environment
from bridge.libjulia.find import Julia
from bridge.libjulia.runtime import EMBEDDED, Runtime, Value

__all__ = ["EmbeddedRuntime"]

# Under which name a libjulia starts with a given system image: 1.5 to 1.8, to 1.11, and one that 1.12 renamed.
_INITIALISERS = ("jl_init_with_image__threading", "jl_init_with_image", "jl_init_with_image_file")

_LIBUNWIND = "libunwind.so.8"


class EmbeddedRuntime(Runtime):
    """Starts Julia when it is made: once in a process, from the main thread.

    Raises `JuliaUnavailableError` when this process is not one that Julia can be started in.
    """

    backend = EMBEDDED

    def __init__(self, julia: Julia, threads: int, notes: Sequence[str] = (), sysimage: str | None = None) -> None:
        self._sysimage = sysimage or julia.sysimage
        self._describe: int | None = None
        super().__init__(julia, notes, environment.settings(threads, julia.kernels))
        self._describe = self._value("TwinGradRuntime.message")

    def _start(self) -> None:
        self._library = _load(self.julia)
        if self._library.jl_is_initialized():
            raise JuliaUnavailableError("Julia runs in this process already, started by another package")
        _initialise(self._library, self.julia.bindir, self._sysimage)
        atexit.register(self._end, os.getpid())

    def _evaluate(self, code: str) -> Value:
        return self._to_python(self._value(code), code)

    def _value(self, code: str) -> int:
        value: int | None = self._library.jl_eval_string(code.encode())
        exception: int | None = self._library.jl_exception_occurred()
        if exception:
            message = self._message(exception)
            self._library.jl_exception_clear()
            raise JuliaError(message)
        if not value:
            raise JuliaError(f"Julia gave no value for {code}")
        return value

    # A value is looked at before anything else is asked of Julia, so that its garbage collector can't have taken it.

    def _to_python(self, value: int, code: str) -> Value:
        kind = self._library.jl_typeof_str(value).decode()
        if kind == "Nothing":
            return None
        if kind == "String":
            return self._string(value)
        if kind in _NUMBERS:
            number: Value = getattr(self._library, f"jl_unbox_{kind.lower()}")(value)
            return bool(number) if kind == "Bool" else number
        raise JuliaError(f"{code} gives a {kind}, which is not passed to Python: end it with '; nothing'")

    def _string(self, value: int) -> str:
        # A Julia String is its length, then its bytes.
        start: int = self._library.jl_string_ptr(value)
        length = c_size_t.from_address(start - ctypes.sizeof(c_size_t)).value
        return ctypes.string_at(start, length).decode("utf-8", errors="replace")

    def _message(self, exception: int) -> str:
        if self._describe is not None:
            text = self._library.jl_call1(self._describe, exception)
            if text:
                return self._string(text)
        return str(self._library.jl_typeof_str(exception).decode())

    def _end(self, pid: int) -> None:
        """Let Julia run its finalizers and write out what it has buffered."""
        if os.getpid() == pid:
            self._library.jl_atexit_hook(0)


def _load(julia: Julia) -> ctypes.CDLL:
    _check_libunwind(julia)
    waiting = list(julia.preload)
    while waiting:
        problems: dict[str, OSError] = {}
        for path in waiting:
            try:
                ctypes.CDLL(path)
            except OSError as error:  # it may need one that comes later
                problems[path] = error
        if len(problems) == len(waiting):
            raise JuliaUnavailableError(f"the libraries of {julia} can't be loaded: {next(iter(problems.values()))}")
        waiting = list(problems)
    try:
        # Global: code that Julia compiles looks for libjulia's functions among those of the whole process.
        library = ctypes.CDLL(julia.libjulia, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise JuliaUnavailableError(f"libjulia of {julia} can't be loaded: {error}") from None
    for name, restype, *argtypes in _SIGNATURES:
        function = getattr(library, name, None)
        if function is None:
            raise JuliaUnavailableError(f"{julia.libjulia} has no {name}: this Julia is too new or too old")
        function.restype, function.argtypes = restype, argtypes
    return library


_NUMBERS = {
    "Bool": ctypes.c_int8,
    "Int32": ctypes.c_int32,
    "Int64": ctypes.c_int64,
    "UInt32": ctypes.c_uint32,
    "UInt64": ctypes.c_uint64,
    "Float32": ctypes.c_float,
    "Float64": ctypes.c_double,
}
"""Julia's numbers that become Python's, and how C returns them."""

_SIGNATURES: tuple[tuple[Any, ...], ...] = (
    ("jl_is_initialized", c_int),
    ("jl_eval_string", c_void_p, c_char_p),
    ("jl_exception_occurred", c_void_p),
    ("jl_exception_clear", None),
    ("jl_typeof_str", c_char_p, c_void_p),
    ("jl_call1", c_void_p, c_void_p, c_void_p),
    ("jl_string_ptr", c_void_p, c_void_p),
    *((f"jl_unbox_{kind.lower()}", restype, c_void_p) for kind, restype in _NUMBERS.items()),
    ("jl_atexit_hook", None, c_int),
)


def _initialise(library: ctypes.CDLL, bindir: str, sysimage: str) -> None:
    for name in _INITIALISERS:
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = None, [c_char_p, c_char_p]
            function(os.fsencode(bindir), os.fsencode(sysimage))
            return
    raise JuliaUnavailableError(f"this libjulia has none of {', '.join(_INITIALISERS)}: it is too new or too old")


def _check_libunwind(julia: Julia) -> None:
    """Libraries of one name are loaded once: a libunwind that is there already would be used in place of Julia's."""
    own = next((path for path in julia.preload if Path(path).name == _LIBUNWIND), None)
    if own is None:
        return
    mapped: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            mapped.add(line.split(maxsplit=5)[-1])
    for path in sorted(mapped):
        if Path(path).name.startswith(_LIBUNWIND) and os.path.realpath(path) != os.path.realpath(own):
            raise JuliaUnavailableError(
                f"Julia can't be started: this process has loaded {path}, with which every exception in Julia would "
                "end in a segmentation fault. Start Julia before whatever needs that library, or in another process"
            )
