"""GradBench's `lse`: the logarithm of a sum of exponentials, of which the largest is taken out, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import py_engine as pe
from experiments.gradbench.values import Arrays, InputError, array


def read(given: Any) -> tuple[Arrays, tuple[()]]:
    """The input's x (n,)."""
    x = array(given, "x", 1)
    if not x.size:
        raise InputError("x: expected at least one number")
    return [x], ()


def primal() -> Callable[..., Any]:
    """log Σ exp(x), written in its parts as the benchmark asks."""

    def logsumexp(x: Any) -> Any:
        largest = np.max(x)
        return largest + np.log(np.sum(np.exp(x - largest)))

    return logsumexp


def gradient() -> Callable[..., Any]:
    """The gradient of `primal` (n,)."""
    return pe.grad(primal())


FUNCTIONS = {"primal": primal, "gradient": gradient}
