"""GradBench's `hello`: a square, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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


def write(result: Arrays, given: Any) -> float:
    """The output is a number."""
    return float(np.asarray(result[0]))


FUNCTIONS = {"square": square, "double": double}
