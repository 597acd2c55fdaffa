"""By hand: the functions in plain numpy, and their derivatives as a person would write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bridge.linear_algebra import of_numpy
from experiments.microbenchmarks import functions
from experiments.microbenchmarks.functions import LABEL, STEPS

linear_algebra = of_numpy


def sincos(x: Any) -> Any:
    """sin(cos(x)), summed."""
    return np.sum(np.sin(np.cos(x))) if np.ndim(x) else np.sin(np.cos(x))


def loop(x: Any) -> Any:
    """500 multiplications by sin(x)."""
    r = np.ones_like(x)
    for _ in range(STEPS):
        r = r * np.sin(x)
    return np.sum(r)


def logsumexp(x: Any) -> Any:
    """log(sum(exp(x)))."""
    return np.log(np.sum(np.exp(x)))


def logistic(w: Any, b: Any, x: Any) -> Any:
    """The sum of sigmoid(w x + b)."""
    return np.sum(1 / (1 + np.exp(-(w @ x + (b if x.ndim == 1 else b[:, None])))))


def mlp(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """The network's mean cross-entropy."""
    one = x.ndim == 1
    hidden = np.maximum(w1 @ x + (b1 if one else b1[:, None]), 0)
    logits = w2 @ hidden + (b2 if one else b2[:, None])
    largest = logits.max(axis=0)
    return np.mean(largest + np.log(np.sum(np.exp(logits - largest), axis=0)) - logits[LABEL])


def rosenbrock(x: Any) -> Any:
    """Rosenbrock's function."""
    return np.sum((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2)


def ackley(x: Any) -> Any:
    """Ackley's function."""
    bowl = 20 * np.exp(-0.2 * np.sqrt(np.mean(x**2)))
    return 20 + np.e - bowl - np.exp(np.mean(np.cos(2 * np.pi * x)))


FUNCTIONS = {item.__name__: item for item in (sincos, loop, logsumexp, logistic, mlp, rosenbrock, ackley)}


def prepare(name: str, inputs: list[Any], by: int) -> Any:
    """Value and gradients as functions of no arguments."""
    arguments = [x.item() if x.ndim == 0 else x for x in inputs]
    both = functions.benchmark(name).gradient
    return partial(FUNCTIONS[name], *arguments), lambda: both(*arguments)[1]
