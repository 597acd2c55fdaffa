"""A transform inside another one costs what its own function costs, however much was computed before it began."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import py_engine as pe

START = np.array([1.0, 2.0, 3.0])
ONES = np.ones(3)


def energy(x):
    return np.sum(np.sin(x) * x)


rule = pe.custom_rule(np.sin, vjp=lambda g, y, x: g * np.cos(x), jvp=lambda tangents, y, x: tangents[0] * np.cos(x))


def twice(z, x):
    return pe.scan(lambda carry, _: (np.sin(carry) * z, None), x, length=2)[0]


STEPS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda x: pe.grad(energy)(x),
    "value_and_grad": lambda x: np.multiply(*pe.value_and_grad(energy)(x)),
    "vjp": lambda x: pe.vjp(np.sin, x)[1](ONES)[0],
    "jvp": lambda x: pe.jvp(np.sin, (x,), (ONES,))[1],
    "hvp": lambda x: pe.hvp(energy, x, ONES),
    "jacobian, forward": lambda x: np.sum(pe.jacobian(np.sin, x, mode="forward"), 0),
    "jacobian, reverse": lambda x: np.sum(pe.jacobian(np.sin, x, mode="reverse"), 0),
    "hessian": lambda x: np.sum(pe.hessian(energy, x), 0),
    "grad of grad": lambda x: pe.grad(lambda z: np.sum(pe.grad(energy)(z)))(x),
    "grad of a checkpoint": lambda x: pe.grad(lambda z: np.sum(pe.checkpoint(np.sin)(z * x)))(x),
    "grad of a custom rule's grad": lambda x: pe.grad(lambda z: np.sum(pe.grad(lambda v: np.sum(rule(v)))(z)))(x),
    "grad of a scan": lambda x: pe.grad(lambda z: np.sum(twice(z, x)))(x),
}


def calls(function: Callable[[], Any]) -> int:
    """How many functions, Python's and C's, are called in it: the same in every run."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("outer", ["grad", "jvp", "compiled grad"])
@pytest.mark.parametrize("name", STEPS)
def test_work_grows_linearly_with_the_number_of_inner_transforms(name, outer):
    def work(n: int) -> int:
        def descent(x):
            for _ in range(n):
                x = x - 0.01 * STEPS[name](x)
            return np.sum(x)

        runs = {
            "grad": lambda: pe.grad(descent)(START),
            "jvp": lambda: pe.jvp(descent, (START,), (ONES,)),
            "compiled grad": lambda: pe.compile(pe.grad(descent))(START),
        }
        return calls(runs[outer])

    work(1)  # what is found out once and kept
    some, more, most = work(8), work(16), work(32)
    assert 1.9 * (more - some) < most - more < 2.1 * (more - some)
