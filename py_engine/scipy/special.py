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


def __getattr__(name: str) -> Any:
    """One of scipy.special's ufuncs. Those with an op of the engine's own (`erf`, `gammaln`, …) need no scipy."""
    if name in NAMES:
        return NAMES[name]
    if not name.startswith("_"):
        found = getattr(installed("special", f"special.{name}"), name, None)
        if isinstance(found, np.ufunc):
            return found
    raise AttributeError(f"py_engine.scipy.special has no {name!r}, only scipy's ufuncs and what stands in its file")


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
    if b is None and not return_sign:
        return ops.logsumexp(a, axis=axis, keepdims=keepdims)
    x, factor = np.broadcast_arrays(*as_floats(a, 1.0 if b is None else b))
    counted = np.where(factor == 0, -np.inf, x)
    largest = ops.stop_gradient(np.max(counted, axis=axis, keepdims=True, initial=-np.inf))
    shift = np.where(np.isfinite(largest), largest, 0)
    terms = np.exp(x - shift)
    total = np.sum(np.where((factor == 0) & np.isinf(terms), 0, factor * terms), axis=axis, keepdims=True)
    negative = total < 0
    found = np.log(np.where(negative, -total, total) if return_sign else total) + shift
    if not keepdims:
        found, total = np.squeeze(found, axis), np.squeeze(total, axis)
    return (found, np.sign(total)) if return_sign else found


def softmax(x: Operand, axis: Axis = None) -> Tensor:
    """Exponentials that sum to one over `axis` (all axes when None)."""
    return ops.softmax(x, axis=axis)


def log_softmax(x: Operand, axis: Axis = None) -> Tensor:
    """Logarithm of `softmax`."""
    return ops.log_softmax(x, axis=axis)


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
