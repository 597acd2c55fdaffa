"""The arguments of numpy's functions: what the ops take of them, and what they refuse by name.

A stand-in has numpy's own signature, position by position. An argument that it has no use for may be given its
default value; any other value raises an error that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from py_engine.ad.mutation import watch_setting
from py_engine.ad.tensor import NO_VALUE, Tensor
from py_engine.errors import DTypeError, EngineError, NotDifferentiableError, ShapeError

_INT = {int}

UFUNC_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "where": (True,),
    "casting": ("same_kind",),
    "order": ("K",),
    "subok": (True,),
    "keepdims": (False,),
}
"""What the arguments that all ufuncs share are where they are not given, beside None."""


def refuse(function: str, **given: tuple[Any, ...]) -> None:
    """Raise for the first argument whose value is not the one that numpy takes where it is not given.

    Args:
        function: numpy's name of it.
        given: the arguments by name, each as its value and the values that mean the default, beside None and numpy's
            mark for no value.

    Raises:
        NotDifferentiableError: names the argument.
    """
    for name, (value, *defaults) in given.items():
        if value is None or value is NO_VALUE or (isinstance(value, (bool, str)) and value in defaults):
            continue
        raise NotDifferentiableError(
            f"numpy.{function} on tensors does not take {name}={shown(value)}: its result is always a new tensor of "
            "the operands' dtype, in C order, computed from all elements; leave the argument out"
        )


def same_dtype(function: str, dtype: Any, x: Tensor) -> None:
    """Raise `DTypeError` unless `dtype` is None or that of `x`."""
    if dtype is None or dtype is NO_VALUE:
        return
    if as_dtype(dtype) != x.dtype:
        raise DTypeError(
            f"numpy.{function} on tensors does not take dtype={shown(dtype)} for {x.dtype}: the result has the dtype "
            "of the operands; convert with astype() before or after"
        )


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return what numpy understands by `dtype`.

    Raises:
        DTypeError: it is none, or not one of numbers and truth values.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError):
        raise DTypeError(f"expected a dtype such as numpy.float32, got {shown(dtype)}") from None
    if found.kind not in "fiub" or not found.isnative:
        raise DTypeError(f"expected a dtype of real numbers or truth values, got {found}")
    return found


def is_whole(value: Any, least: float = -np.inf) -> bool:
    """Whether a value is an integer, of Python or numpy, and at least `least`; truth values are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def is_real(value: Any) -> bool:
    """Whether a value is a real number, of Python or numpy; truth values are none."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def whole(value: Any, what: str) -> int:
    """Return an integer of any kind as a Python int.

    Raises:
        DTypeError: it is none, such as a float.
    """
    if value.__class__ is int:
        return int(value)
    watch_setting(value)
    try:
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    except EngineError:
        raise
    except TypeError:
        pass
    raise DTypeError(f"{what} must be an integer, got {shown(value)}")


def wholes(values: Any, what: str) -> tuple[int, ...]:
    """Return one integer, or a sequence of integers, as a tuple of Python ints.

    Raises:
        DTypeError: one of them is none.
    """
    if values.__class__ is tuple and not set(map(type, values)) - _INT:
        return values
    if isinstance(values, (int, np.integer)):
        return (whole(values, what),)
    watch_setting(values)
    if isinstance(values, Tensor):
        values = values.numpy()
    if isinstance(values, np.ndarray):
        values = values.tolist() if values.dtype.kind in "iu" else [*values.flat] if values.ndim else values
    if isinstance(values, (str, bytes)):
        raise DTypeError(f"{what} must be an integer or a sequence of integers, got {shown(values)}")
    try:
        each = iter(values)
    except TypeError:
        return (whole(values, what),)
    return tuple([whole(value, what) for value in each])


def axis_of(axis: Any, ndim: int, function: str, shape: Any = None) -> int:
    """Return one axis as a number that is not negative.

    Raises:
        DTypeError: it is no integer.
        ShapeError: it is out of range.
    """
    found = whole(axis, f"{function}: the axis")
    if not -ndim <= found < ndim:
        what = f"an array of {ndim} dimensions" if shape is None else f"shape {shape}"
        raise ShapeError(f"{function}: axis {found} does not exist in {what}")
    return found % ndim


def flag(value: Any, name: str = "keepdims") -> bool:
    """Return a truth value of this name; not given is False.

    Raises:
        DTypeError: it is neither a truth value nor an integer.
    """
    if value is NO_VALUE or value is False:
        return False
    return value is True or (isinstance(value, np.bool_) and bool(value)) or bool(whole(value, name))


def checked(function: str, compute: Callable[[], Any], shape: tuple[int, ...]) -> Any:
    """Return what numpy computes of arguments, with its complaints as ours.

    Raises:
        ShapeError, DTypeError: numpy raised ValueError or IndexError, or TypeError.
    """
    try:
        return compute()
    except EngineError:
        raise
    except (ValueError, IndexError, ArithmeticError, MemoryError) as error:
        raise ShapeError(f"{function}: {error}; the shape is {shape}") from None
    except TypeError as error:
        raise DTypeError(f"{function}: {error}") from None


def shown(value: Any) -> str:
    """Return a value as a message shows it: an array by its type, all else by its repr, shortened."""
    text = f"{type(value).__name__}" if isinstance(value, (Tensor, np.ndarray)) else repr(value)
    return text if len(text) < 60 else text[:57] + "..."
