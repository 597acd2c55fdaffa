"""TwinGrad's numpy engine, compiled: the function and its gradient are traced once, and replayed from a tape."""

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import numpy as np

import py_engine as pe
from bridge.linear_algebra import of_numpy
from experiments.microbenchmarks.systems import numpy_eager

linear_algebra = of_numpy

WIDTH = 64
"""Numbers that the recurrence of `memory` carries from step to step."""


def prepare(name: str, inputs: list[Any], by: int) -> Any:
    """The value and the gradients, each replayed from its own tape."""
    function, arguments = numpy_eager.FUNCTIONS[name], [x.item() if x.ndim == 0 else x for x in inputs]
    gradient = pe.compile(pe.grad(function, range(by) if by > 1 else 0))
    return partial(pe.compile(function), *arguments), partial(gradient, *arguments)


def memory(length: int, checkpoint: bool) -> int:
    """The peak of the bytes in use, above those before, while a recurrence of `length` steps is differentiated."""
    weight = 0.1 * np.random.default_rng(0).standard_normal((WIDTH, WIDTH))
    inputs = np.random.default_rng(1).standard_normal((length, WIDTH))
    start = np.zeros(WIDTH)

    def loss(w: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            return np.tanh(w @ state + x), None

        state, _ = pe.scan(step, start, inputs, checkpoint=checkpoint)
        return np.sum(state**2)

    gradient = pe.grad(loss)
    gradient(weight)  # what is made once does not count
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        gradient(weight)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
