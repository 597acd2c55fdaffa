"""Attention: each query's mean of values, weighted by how well their keys fit it (Vaswani et al. 2017)."""

from __future__ import annotations

import math

import numpy as np

from py_engine.ad.op import as_tensor, as_tensors
from py_engine.ad.ops import reduction
from py_engine.ad.ops.arguments import flag
from py_engine.ad.ops.elementary import BOOL, logical_and, not_equal, where
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
    seen = as_tensor(np.tri(query.shape[-2], key.shape[-2], dtype=np.bool_)) if flag(causal, "causal") else None
    if mask is not None:
        given = as_tensor(mask)
        sides = (1,) * (scores.ndim - given.ndim) + given.shape
        if len(sides) > scores.ndim or any(n not in (1, m) for n, m in zip(sides, scores.shape, strict=True)):
            raise ShapeError(
                f"scaled_dot_product_attention: the mask must broadcast to (..., L, S), {scores.shape}, got shape "
                f"{given.shape}"
            )
        if given.dtype == BOOL:
            seen = given if seen is None else logical_and(seen, given)
        else:
            scores = scores + given
    if seen is not None:
        scores = where(seen, scores, -np.inf)
    if key.shape[-2] == 0:
        return matmul(scores, value)  # sums over no keys
    if mask is None:
        return matmul(softmax(scores, -1), value)  # each query sees a key
    # The softmax of minus infinities is NaN.
    sees_any = not_equal(reduction.max(scores, -1, keepdims=True), -np.inf)  # NaN is seen, and gives NaN
    return matmul(where(sees_any, softmax(where(sees_any, scores, 0), -1), 0), value)
