"""`scipy.special` on tensors: its ufuncs as they are, and its functions of Python code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.op import as_floats
from py_engine.ad.ops.arguments import whole
from py_engine.ad.ops.scipy_functions import NAMES, installed
from py_engine.ad.tensor import Axis, Operand, Tensor
from py_engine.errors import ConfigurationError

digamma, polygamma = ops.digamma, ops.polygamma


LARGEST = {np.dtype(np.float32): 80.0, np.dtype(np.float64): 700.0}
"""Of each dtype, about the largest number that has a finite exponential."""


def __getattr__(name: str) -> Any:
    """One of scipy.special's ufuncs. Those with an op of the engine's own (`erf`, `gammaln`, …) need no scipy."""
    if name in NAMES:
        return NAMES[name]
    if not name.startswith("_"):
        found = getattr(installed("special", f"special.{name}"), name, None)
        if isinstance(found, np.ufunc):
            return found
    raise AttributeError(
        f"py_engine.scipy.special has no {name!r}: it has scipy's ufuncs, and the functions that its file defines"
    )


def logsumexp(
    a: Operand, axis: Axis = None, b: Operand | None = None, keepdims: bool = False, return_sign: bool = False
) -> Any:
    """Return log(sum(b * exp(a))) over `axis` (all axes when None), without overflow.

    Args:
        a: an array.
        axis: an axis, or several.
        b: factors that broadcast with `a`; None is 1. A negative sum has the logarithm NaN, unless its sign is asked
            for.
        keepdims: whether the axes stay, with length 1.
        return_sign: whether the logarithm of the absolute sum and its sign, -1, 0 or 1, are returned, in a pair.
    """
    x, given = as_floats(a, 1.0 if b is None else b)
    if b is None and not return_sign and x.size:
        return ops.logsumexp(x, axis=axis, keepdims=keepdims)
    shape = np.broadcast_shapes(x.shape, given.shape)
    x, factor = ops.broadcast_to(x, shape), ops.broadcast_to(given, shape)
    counted = np.where(factor == 0, -np.inf, x)
    largest = ops.stop_gradient(np.max(counted, axis=axis, keepdims=True, initial=-np.inf))
    shift = np.where(np.isfinite(largest), largest, 0)
    # What has no weight counts for nothing where its exponential is too large for numbers, or NaN.
    without = (factor == 0) & np.logical_not(x - shift <= LARGEST[x.dtype])
    total = np.sum(factor * np.exp(np.where(without, LARGEST[x.dtype], x - shift)), axis=axis, keepdims=True)
    nothing = total == 0
    size = np.where(nothing, 1, np.where(total < 0, -total, total) if return_sign else total)
    found = np.where(nothing, -np.inf, np.log(size) + shift)
    if not keepdims:
        found, total = np.squeeze(found, axis), np.squeeze(total, axis)
    return (found, np.sign(total)) if return_sign else found


def softmax(x: Operand, axis: Axis = None) -> Tensor:
    """Exponentials that sum to one over `axis` (all axes when None)."""
    return ops.softmax(as_floats(x)[0], axis=axis)


def log_softmax(x: Operand, axis: Axis = None) -> Tensor:
    """Logarithm of `softmax`."""
    return ops.log_softmax(as_floats(x)[0], axis=axis)


def multigammaln(a: Operand, d: int) -> Tensor:
    """The logarithm of the multivariate gamma function of dimension `d`; NaN where `a` is not above (d - 1) / 2.

    Raises:
        ConfigurationError: `d` is not a positive integer.
    """
    dimension = whole(d, "multigammaln: d")
    if dimension < 1:
        raise ConfigurationError(f"multigammaln: d must be positive, got {d}")
    (a,) = as_floats(a)
    found = ops.gammaln(a)
    for j in range(1, dimension):
        found = found + ops.gammaln(a - j / 2)
    found = found + dimension * (dimension - 1) / 4 * math.log(math.pi)
    return ops.where(a > (dimension - 1) / 2, found, np.nan)
