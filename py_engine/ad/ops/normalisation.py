"""Normalisation: arrays with mean 0 and variance 1 over some of their axes.

The deviation is a separate op, as the logsumexp of a cross-entropy is, so that the gradient needs nothing computed
again: with r the reciprocal deviation and y the result, it is r (g - mean(g) - y mean(g y)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad.op import (
    Call,
    Op,
    Scratch,
    Shape,
    as_tensor,
    as_tensors,
    define,
    float_only,
    no_gradient,
    per_element,
)
from py_engine.ad.ops.arguments import whole
from py_engine.ad.ops.elementary import sqrt, square
from py_engine.ad.ops.reduction import Axes, bind_subtract, bind_sum, kept, mean, normalize_axes, sum
from py_engine.ad.ops.shape import along_axes, reshape
from py_engine.ad.tensor import Array, Axis, Operand, Tensor
from py_engine.errors import ShapeError


def _count(x: Array | Tensor, axes: Axes) -> int:
    return max(math.prod(x.shape[a] for a in axes), 1)


def _bind_mean(x: Array, out: Array, scratch: Scratch, axes: Axes) -> list[Call]:
    # Divided: times 1 / count equal numbers have another mean.
    return [*bind_sum((x,), out, scratch, axes, True), partial(np.divide, out, float(_count(x, axes)), out)]


def _bind_reciprocal_std(
    arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes, eps: float
) -> Sequence[Call]:
    (x,) = arrays
    centre, deviations = scratch(kept(x.shape, axes), x.dtype), scratch(x.shape, x.dtype)
    return [
        *_bind_mean(x, centre, scratch, axes),
        *bind_subtract(x, centre, deviations),
        partial(np.multiply, deviations, deviations, deviations),
        *_bind_mean(deviations, out, scratch, axes),
        partial(np.add, out, eps, out),
        partial(np.sqrt, out, out),
        partial(np.reciprocal, out, out),
    ]


def _bind_standardize(arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes) -> Sequence[Call]:
    x, reciprocal = arrays
    centre, spread = scratch(reciprocal.shape, x.dtype), scratch(x.shape, x.dtype)
    return [
        *_bind_mean(x, centre, scratch, axes),
        *bind_subtract(x, centre, out),
        partial(np.copyto, spread, reciprocal),  # numpy would broadcast through buffers that it allocates
        partial(np.multiply, out, spread, out),
    ]


def _deviation_slope(r: Tensor, x: Tensor, axes: Axes) -> Tensor:
    return square(r) * (-1 / _count(x, axes)) * STANDARDIZE(x, r, axes=axes)


def _pull(g: Tensor, y: Tensor, r: Tensor, axes: Axes) -> Tensor:
    return r * (g - mean(g, axes, keepdims=True) - y * mean(g * y, axes, keepdims=True))


RECIPROCAL_STD: Op = define(
    name="reciprocal_std",
    infer=lambda x, axes, eps: (kept(x.shape, axes), float_only(x.dtype)),
    bind=_bind_reciprocal_std,
    vjp=(lambda g, r, x, axes, eps: g * _deviation_slope(r, x, axes),),
    jvp=lambda t, r, x, axes, eps: sum(t[0] * _deviation_slope(r, x, axes), axes, keepdims=True),
    flops=per_element(6),
    batch=along_axes,
    doc="1 / √(variance + eps) over axes",
)


def _infer_standardize(x: Tensor, r: Tensor, axes: Axes) -> tuple[Shape, Any]:
    return x.shape, x.dtype


STANDARDIZE: Op = define(
    name="standardize",
    infer=_infer_standardize,
    bind=_bind_standardize,
    vjp=(lambda g, y, x, r, axes: _pull(g, y, r, axes), no_gradient),  # the rule for x contains the deviation's
    jvp=lambda t, y, x, r, axes: None if t[0] is None else _pull(t[0], y, r, axes),
    flops=per_element(3),
    batch=along_axes,
    doc="(x - mean) times the reciprocal deviation of x over axes",
)


def standardize(x: Operand, axis: Axis = -1, eps: float = 1e-5) -> Tensor:
    """Mean 0 and variance 1 over `axis`: (x - mean) / √(variance + eps), with the biased variance; of x's shape."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    return STANDARDIZE(x, RECIPROCAL_STD(x, axes=axes, eps=float(eps)), axes=axes)


def _scaled(y: Tensor, weight: Operand | None, bias: Operand | None, lengths: Shape, place: Shape, name: str) -> Tensor:
    for what, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        _, given = as_tensors((y, value))
        if given.shape != lengths:
            raise ShapeError(f"{name}: expected a {what} of shape {lengths}, got {given.shape}")
        y = y * reshape(given, place) if what == "weight" else y + reshape(given, place)
    return y


def layer_norm(
    x: Operand, weight: Operand | None = None, bias: Operand | None = None, axis: Axis = -1, eps: float = 1e-5
) -> Tensor:
    """`standardize` the last axes of `x`, then scale by `weight` and shift by `bias` (Ba et al. 2016).

    Args:
        weight, bias: of the shape of these axes; None leaves one out.
        axis: the last axis, or several of the last.

    Raises:
        ShapeError: the axes are not the last ones, or a shape does not fit.
    """
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    if axes != tuple(range(x.ndim - len(axes), x.ndim)):
        raise ShapeError(f"layer_norm: expected the last axes, got {axis} of {x.ndim}; standardize takes any")
    lengths = x.shape[x.ndim - len(axes) :]
    return _scaled(standardize(x, axes, eps), weight, bias, lengths, lengths, "layer_norm")


def batch_norm(
    x: Operand,
    weight: Operand | None = None,
    bias: Operand | None = None,
    mean: Operand | None = None,
    variance: Operand | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel of `x` (N, C, ...) with mean 0 and variance 1, then scaled and shifted (Ioffe and Szegedy 2015).

    Args:
        weight, bias: (C,); None leaves one out.
        mean, variance: (C,), those to normalise by; None takes the batch's, over all axes but the second.

    Raises:
        ShapeError: a shape does not fit, or only one of mean and variance is given.
    """
    x = as_tensor(x)
    if x.ndim < 2:
        raise ShapeError(f"batch_norm: expected x (N, C, ...), got shape {x.shape}")
    if (mean is None) != (variance is None):
        raise ShapeError("batch_norm: mean and variance are given together")
    lengths, place = x.shape[1:2], (x.shape[1], *(1,) * (x.ndim - 2))
    if mean is None:
        y = standardize(x, (0, *range(2, x.ndim)), eps)
    else:
        _, centre, spread = as_tensors((x, mean, variance))  # type: ignore[arg-type]  # both are given
        for what, given in (("mean", centre), ("variance", spread)):
            if given.shape != lengths:
                raise ShapeError(f"batch_norm: expected a {what} of shape {lengths}, got {given.shape}")
        factor = _scaled(1 / sqrt(spread + eps), weight, None, lengths, lengths, "batch_norm")
        y = (x - reshape(centre, place)) * reshape(factor, place)
        weight = None
    return _scaled(y, weight, bias, lengths, place, "batch_norm")


def group_norm(
    x: Operand, groups: int, weight: Operand | None = None, bias: Operand | None = None, eps: float = 1e-5
) -> Tensor:
    """`standardize` each group of channels of each sample of `x` (N, C, ...), then scale and shift (Wu and He 2018).

    With one group it is layer normalisation of all but the batch, with C of them instance normalisation.

    Raises:
        ShapeError: the channels cannot be divided so, or a shape does not fit.
    """
    x, groups = as_tensor(x), whole(groups, "group_norm: groups")
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"group_norm: the channels of shape {x.shape} cannot be divided into {groups} groups")
    rows = reshape(x, (x.shape[0], groups, math.prod(x.shape[1:]) // groups))
    place = (x.shape[1], *(1,) * (x.ndim - 2))
    return _scaled(reshape(standardize(rows, -1, eps), x.shape), weight, bias, x.shape[1:2], place, "group_norm")
