"""GradBench's `particle`: where a charge must stand for a particle to pass the origin, by nested derivatives.

The path ends when the particle crosses the axis, after a number of steps that depends on values: the functions run
eagerly, and there are none for Julia.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import py_engine as pe
from experiments.gradbench.values import Arrays, InputError, number

STEP = 0.1
"""Of time."""
MOST_STEPS = 1_000
"""Of one path."""
CLOSE = 1e-6
"""The change of the parameter at which the search ends."""

Slope = Callable[[Callable[..., Any], Any], Any]


def read(given: Any) -> tuple[Arrays, tuple[()]]:
    """The input's w, where the search begins."""
    return [number("w", given.get("w") if isinstance(given, dict) else None)], ()


def forward(function: Callable[..., Any], x: Any) -> Any:
    """The derivative in forward mode."""
    if not x.shape:
        return pe.jvp(function, (x,), (np.ones(()),))[1]
    return np.stack([pe.jvp(function, (x,), (unit,))[1] for unit in np.eye(len(x))])


def reverse(function: Callable[..., Any], x: Any) -> Any:
    """The derivative in reverse mode."""
    return pe.grad(function)(x)


def missed(w: Any, slope: Slope) -> Any:
    """The squared distance from the origin at which the particle crosses the axis, for the charge at (10, 10 - w).

    It is infinite where the particle doesn't cross it in as many steps as are tried.
    """

    def potential(x: Any) -> Any:
        first, second = np.stack([10.0 - x[0], 10.0 - w - x[1]]), np.stack([10.0 - x[0], -x[1]])
        return 1 / np.sqrt(np.sum(first * first)) + 1 / np.sqrt(np.sum(second * second))

    x, velocity = np.array([0.0, 8.0]), np.array([0.75, 0.0])
    for _ in range(MOST_STEPS):
        acceleration = -slope(potential, x)
        after = x + STEP * velocity
        if after[1] <= 0:  # the line through the last two points crosses the axis here
            crossed = x[0] - x[1] * (after[0] - x[0]) / (after[1] - x[1])
            return crossed * crossed
        x, velocity = after, velocity + STEP * acceleration
    return np.array(np.inf)


def search(outer: Slope, inner: Slope) -> Callable[..., Any]:
    """Gradient descent from w, at the rate that the last two gradients give; a step that makes it worse is halved."""

    def found(w: Any) -> Any:
        def value(w: Any) -> Any:
            return missed(w, inner)

        best, rate, before = float(value(w)), 1e-3, None
        if not np.isfinite(best):
            raise InputError(f"w: the particle doesn't cross the axis in {MOST_STEPS} steps from {float(w)}")
        while True:
            gradient = np.asarray(outer(value, w))
            if before is not None and gradient != before[1]:
                rate = abs(float((w - before[0]) / (gradient - before[1])))
            before, step = (w, gradient), rate * gradient
            while (trial := float(value(w - step))) > best and abs(step) >= CLOSE:
                step = step / 2
            w, best = w - step, trial
            if abs(step) < CLOSE:
                return w

    return found


FUNCTIONS = {
    "ff": lambda: search(forward, forward),
    "fr": lambda: search(forward, reverse),
    "rf": lambda: search(reverse, forward),
    "rr": lambda: search(reverse, reverse),
}
EAGER = tuple(FUNCTIONS)
