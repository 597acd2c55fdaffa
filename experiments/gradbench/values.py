"""Numbers and arrays from the JSON of GradBench's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import shown
from experiments.errors import InputError

__all__ = ["Arrays", "InputError", "array", "check_work", "integer", "number"]

Arrays = list[NDArray[Any]]

_LARGEST = 2**53
MOST_ELEMENTS = 2**29
"""Of an array that a function makes on its way: four gigabytes."""


def array(given: Any, name: str, axes: int) -> NDArray[np.float64]:
    """The numbers called `name` as an array of float64 with `axes` axes."""
    try:
        found = np.array(_field(given, name))
        # numpy would take texts for the numbers they spell, and null for NaN. Long integers are objects to it.
        if found.dtype.kind not in "iuf" and not all(_is_number(x) for x in found.flat):
            raise InputError(f"{name}: expected an array of numbers with {axes} axes, found other things in it")
        found = found.astype(np.float64)
    except (OverflowError, ValueError) as error:
        raise InputError(f"{name}: expected an array of numbers with {axes} axes ({error})") from None
    if found.ndim != axes:
        raise InputError(f"{name}: expected {axes} axes, found shape {found.shape}")
    return found


def integer(given: Any, name: str, least: int = 0) -> int:
    """The whole number called `name`, which float64 holds exactly."""
    found = _field(given, name)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, found {shown(found)}")
    if found > _LARGEST:
        raise InputError(f"{name}: expected a whole number of at most {_LARGEST}, found {shown(found)}")
    return found


def number(name: str, given: Any) -> NDArray[np.float64]:
    """A number as an array without axes."""
    if not _is_number(given):
        raise InputError(f"{name}: expected a number, found {shown(given)}")
    try:
        return np.array(given, np.float64)
    except OverflowError as error:
        raise InputError(f"{name}: {error}") from None


def check_work(elements: int, what: str) -> None:
    """Raise `InputError` for an evaluation with more elements at a time than memory is likely to hold."""
    if elements > MOST_ELEMENTS:
        raise InputError(f"{what} are {elements:,} elements; at most {MOST_ELEMENTS:,} are computed at a time")


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _field(given: Any, name: str) -> Any:
    if not isinstance(given, Mapping) or name not in given:
        raise InputError(f"the input has no {name!r}")
    return given[name]
