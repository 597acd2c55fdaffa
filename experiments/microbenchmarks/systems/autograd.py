"""HIPS autograd: `autograd.grad` of functions written with its numpy."""

from __future__ import annotations

from functools import partial
from typing import Any

import autograd.numpy as np
from autograd import grad

from bridge.linear_algebra import of_numpy
from experiments.microbenchmarks.functions import LABEL, STEPS

linear_algebra = of_numpy


def sincos(x: Any) -> Any:
    """sin(cos(x))."""
    return np.sin(np.cos(x))


def loop(x: Any) -> Any:
    """500 multiplications by sin(x)."""
    r = 1.0
    for _ in range(STEPS):
        r = r * np.sin(x)
    return r


def logsumexp(x: Any) -> Any:
    """log(sum(exp(x)))."""
    return np.log(np.sum(np.exp(x)))


def logistic(w: Any, b: Any, x: Any) -> Any:
    """The sum of sigmoid(w x + b)."""
    return np.sum(1 / (1 + np.exp(-(w @ x + b))))


def mlp(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """The network's cross-entropy."""
    logits = w2 @ np.maximum(w1 @ x + b1, 0.0) + b2
    largest = np.max(logits)
    return largest + np.log(np.sum(np.exp(logits - largest))) - logits[LABEL]


FUNCTIONS = {item.__name__: item for item in (sincos, loop, logsumexp, logistic, mlp)}


def prepare(name: str, inputs: list[Any], by: int) -> Any:
    """The value by numpy itself, and the gradients."""
    function, arguments = FUNCTIONS[name], [x.item() if x.ndim == 0 else x for x in inputs]
    gradient = grad(function, tuple(range(by)) if by > 1 else 0)
    return partial(function, *arguments), partial(gradient, *arguments)
