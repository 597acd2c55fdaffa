"""GradBench's `hello`: a square, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import py_engine as pe
from experiments.gradbench.values import Arrays, number


def read(given: Any) -> tuple[Arrays, tuple[()]]:
    """The input is a number."""
    return [number("the input", given)], ()


def square() -> Callable[..., Any]:
    """x²."""
    return lambda x: x * x


def double() -> Callable[..., Any]:
    """The derivative of `square`."""
    return pe.grad(square())


FUNCTIONS = {"square": square, "double": double}
