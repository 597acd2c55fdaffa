"""A programmer's own Julia functions in the Julia of this process; `bridge.julia.function` makes ops of them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bridge.errors import JuliaError
from bridge.libjulia.engine import Signature, load_engine, pointers
from bridge.libjulia.runtime import literal
from py_engine.ad.tensor import check_class
from py_engine.errors import ConfigurationError, NotDifferentiableError, ShapeError

__all__ = ["EmbeddedFunction", "as_argument"]

Array = NDArray[Any]

# The codes of julia_engine/src/functions.jl.
_CODES: dict[np.dtype[Any], int] = {np.dtype(np.int64): 1, np.dtype(np.float32): 32, np.dtype(np.float64): 64}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_MOST_AXES = 32

_SIGNATURES: dict[str, Signature] = {
    "call": ([c_int64, c_int64, c_void_p, c_void_p, c_void_p], c_int),
    "take": ([c_int64, c_void_p], c_int),
    "pull": ([c_int64, c_int64, c_void_p, c_void_p, c_void_p], c_int),
    "forget": ([c_int64], c_int),
}


class EmbeddedFunction:
    """A function in the Julia of this process."""

    def __init__(self, runtime: Any, entries: Any, made: str) -> None:
        """Make it by Julia code that gives its number."""
        self._runtime, self._entries = runtime, entries
        self._calls = _entry_points(runtime)
        self._number = int(runtime.evaluate(f"TwinGrad.Functions.{made}") or 0)
        runtime.forget_dropped()
        self._end = weakref.finalize(self, runtime.forget, self._calls["forget"], self._number)
        self._end.atexit = False

    @classmethod
    def defined(cls, code: str, name: str, replay: bool, threads: int) -> EmbeddedFunction:
        """Define it; see `bridge.julia.function`."""
        return cls(*load_engine(threads), f"define({literal(code)}, {literal(name)}, {str(bool(replay)).lower()})")

    def derivative(self, by: int | None, needs_grad: Sequence[bool]) -> EmbeddedFunction:
        """See `bridge.julia.JuliaFunction.derivative`."""
        self._check_open()
        needed = ", ".join(str(bool(one)).lower() for one in needs_grad)
        number = 0 if by is None else by + 1
        return EmbeddedFunction(self._runtime, self._entries, f"derive({self._number}, {number}, Bool[{needed}])")

    def value(self, arrays: Sequence[Array]) -> Array:
        """Call it; see `JuliaFunction.value`."""
        self._check_open()
        result = np.empty(2 + _MOST_AXES, np.int64)
        description, addresses = _described(arrays)
        self._raise(
            self._calls["call"](
                self._number, len(arrays), description.ctypes.data, addresses.ctypes.data, result.ctypes.data
            )
        )
        shape = tuple(int(n) for n in result[2 : 2 + result[1]][::-1])
        out: Array = np.empty(shape, _DTYPES[int(result[0])])
        self._raise(self._calls["take"](self._number, out.ctypes.data))
        return out

    def pullback(self, seed: Array, arrays: Sequence[Array]) -> list[Array | None]:
        """See `bridge.julia.JuliaFunction.pullback`."""
        self._check_open()
        description, addresses = _described([*arrays, seed])
        found = [np.empty_like(x) if x.dtype.kind == "f" else None for x in arrays]
        places = np.array([0 if g is None else g.ctypes.data for g in found], np.uintp)
        self._raise(
            self._calls["pull"](
                self._number, len(arrays), description.ctypes.data, addresses.ctypes.data, places.ctypes.data
            )
        )
        return found

    def close(self) -> None:
        """See `bridge.julia.JuliaFunction.close`."""
        self._end()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise JuliaError("this Julia function was closed: make another one")

    def _raise(self, status: int) -> None:
        if status:
            raise (ConfigurationError if status == 1 else JuliaError)(self._entries.last_message())


@functools.cache
def _entry_points(runtime: Any) -> dict[str, Callable[..., int]]:
    return pointers(runtime, "TwinGrad.Functions", _SIGNATURES)


def as_argument(name: str, place: int | str, x: ArrayLike) -> Array:
    """An array as Julia takes it; `name` and `place`, that of a function and of the argument, are for errors."""
    check_class(x)
    array = np.require(x, requirements=["C_CONTIGUOUS", "ALIGNED"])
    if array.dtype == np.dtype(int) and array.dtype != np.int64:
        array = array.astype(np.int64)
    if array.dtype not in _CODES:
        raise NotDifferentiableError(
            f"{name}: argument {place} is of {array.dtype}; Julia functions take arrays of float32, float64 or int64"
        )
    if array.ndim > _MOST_AXES:
        raise ShapeError(f"{name}: argument {place} has {array.ndim} axes; at most {_MOST_AXES} are passed to Julia")
    return array


def _described(arrays: Sequence[Array]) -> tuple[NDArray[np.int64], NDArray[np.uintp]]:
    """Return the integers that functions.jl reads, and where the arrays lie."""
    integers: list[int] = []
    for x in arrays:
        integers += (_CODES[x.dtype], x.ndim, *reversed(x.shape))
    return np.array(integers or [0], np.int64), np.array([x.ctypes.data for x in arrays] or [0], np.uintp)
