"""TwinGrad's numpy engine, eager: the graph is built and differentiated in every call.

Functions that the engine's own ops make neither shorter nor faster are those in plain numpy, unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import py_engine as pe
from bridge.linear_algebra import of_numpy
from experiments.microbenchmarks.functions import LABEL, STEPS
from experiments.microbenchmarks.systems import manual
from py_engine import ops

linear_algebra = of_numpy


def sincos(x: Any) -> Any:
    """sin(cos(x)), summed."""
    return np.sum(np.sin(np.cos(x))) if getattr(x, "ndim", 0) else np.sin(np.cos(x))


def loop(x: Any) -> Any:
    """500 multiplications by sin(x)."""
    r = 1.0
    for _ in range(STEPS):
        r = r * np.sin(x)
    return np.sum(r) if getattr(x, "ndim", 0) else r


def logistic(w: Any, b: Any, x: Any) -> Any:
    """The sum of sigmoid(w x + b)."""
    return np.sum(ops.sigmoid(w @ x + (b if x.ndim == 1 else b[:, None])))


def mlp(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """The network's mean cross-entropy."""
    if x.ndim == 1:
        logits = w2 @ ops.relu(w1 @ x + b1) + b2
        return ops.softmax_cross_entropy(logits[None], np.array([LABEL]))
    logits = w2 @ ops.relu(w1 @ x + b1[:, None]) + b2[:, None]
    return ops.softmax_cross_entropy(np.transpose(logits), np.full(x.shape[1], LABEL))


FUNCTIONS = manual.FUNCTIONS | {item.__name__: item for item in (sincos, loop, logistic, mlp)}


def prepare(name: str, inputs: list[Any], by: int) -> Any:
    """The value of tensors that nobody differentiates by, and the gradients."""
    function, arguments = FUNCTIONS[name], [x.item() if x.ndim == 0 else x for x in inputs]
    tensors = [pe.tensor(x) for x in arguments[:by]]
    gradient = pe.grad(function, range(by) if by > 1 else 0)
    return partial(function, *tensors, *arguments[by:]), partial(gradient, *arguments)
