"""GradBench's `llsq`: fitting a step by a polynomial, ½ Σᵢ (sᵢ - Σⱼ xⱼ tᵢʲ)², and its gradient by x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import py_engine as pe
from experiments.gradbench.values import Arrays, array, check_work, integer


def read(given: Any) -> tuple[Arrays, tuple[int]]:
    """The input's x (m,), and the number of points, n."""
    x, n = array(given, "x", 1), integer(given, "n", least=2)
    check_work(n * max(x.size, 1), f"n={n:,} points by {x.size:,} powers")
    return [x], (n,)


def primal(n: int) -> Callable[..., Any]:
    """The objective for n points t from -1 to 1 and s = sign(t)."""

    def objective(x: Any) -> Any:
        t = (2.0 * np.arange(n) - (n - 1)) / (n - 1)  # the one in the middle is 0 exactly; linspace rounds it to a sign
        powers = t[:, None] ** np.arange(x.shape[0])
        residual = np.sign(t) - powers @ x
        return np.sum(residual * residual) / 2

    return objective


def gradient(n: int) -> Callable[..., Any]:
    """The gradient of `primal` (m,)."""
    return pe.grad(primal(n))


FUNCTIONS = {"primal": primal, "gradient": gradient}
