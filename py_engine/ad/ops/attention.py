"""Attention: each query's mean of values, weighted by how well their keys fit it (Vaswani et al. 2017)."""

from __future__ import annotations

import math

import numpy as np

from py_engine.ad.op import as_tensor, as_tensors
from py_engine.ad.ops.elementary import BOOL, logical_and, where
from py_engine.ad.ops.linalg import matmul
from py_engine.ad.ops.reduction import softmax
from py_engine.ad.ops.shape import swapaxes
from py_engine.ad.tensor import Operand, Tensor
from py_engine.errors import ShapeError


def scaled_dot_product_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Operand | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(query keyᵀ scale) value, over the keys that each query may see.

    Args:
        query: (..., L, D).
        key: (..., S, D).
        value: (..., S, E).
        mask: broadcasts to (..., L, S): booleans, true where a query sees a key, or numbers that are added to the
            products. A query that sees no key has the result 0.
        causal: whether query i sees the keys up to i alone.
        scale: of the products; None takes 1/√D.

    Returns:
        (..., L, E).

    Raises:
        ShapeError: the shapes do not fit.
    """
    query, key, value = as_tensors((query, key, value))
    if (
        min(query.ndim, key.ndim, value.ndim) < 2
        or query.shape[-1] != key.shape[-1]
        or key.shape[-2] != value.shape[-2]
    ):
        raise ShapeError(
            "scaled_dot_product_attention: expected a query (..., L, D), a key (..., S, D) and a value (..., S, E), "
            f"got shapes {query.shape}, {key.shape} and {value.shape}"
        )
    factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)
    scores = matmul(query * factor, swapaxes(key, -1, -2))
    seen = as_tensor(np.tri(query.shape[-2], key.shape[-2], dtype=np.bool_)) if causal else None
    hidden = None
    if mask is not None:
        given = as_tensor(mask)
        if given.dtype == BOOL:
            hidden = seen = given if seen is None else logical_and(seen, given)
        else:
            scores = scores + given
    # The lowest number, and not minus infinity, whose softmax is NaN where a query sees no key.
    if seen is not None:
        scores = where(seen, scores, float(np.finfo(scores.dtype).min))
    shares = softmax(scores, -1)
    return matmul(shares if hidden is None else where(hidden, shares, 0), value)
