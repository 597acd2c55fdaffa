"""Reductions: sums, extrema and their stable exponential kin, over any axes.

A sum over the first or the last axes of contiguous memory is a product with a vector of ones, several times faster
than `add.reduce` on the small arrays of a training step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad.ops.elementary import div, equal, equal_mask, exp, square, where
from py_engine.ad.ops.record import (
    Call,
    Op,
    Scratch,
    Shape,
    as_tensor,
    implements,
    linear_jvp,
    register,
)
from py_engine.ad.ops.shape import broadcast_to, reshape
from py_engine.ad.tensor import FLOATS, Array, Operand, Tensor
from py_engine.errors import DTypeError, ShapeError

Axis: TypeAlias = int | tuple[int, ...] | None
Axes: TypeAlias = tuple[int, ...]

LONGEST_DOT = 4096  # beyond this length numpy's pairwise sum is worth its time: a dot product is less exact


def normalize_axes(axis: Axis, ndim: int) -> Axes:
    """Return the axes as a sorted tuple of non-negative numbers; None means all.

    Raises:
        ShapeError: an axis is out of range or named twice.
    """
    if axis is None:
        return (*range(ndim),)
    given = (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    axes = tuple(sorted(int(a) + ndim if a < 0 else int(a) for a in given))
    if any(not 0 <= a < ndim for a in axes) or len(set(axes)) < len(axes):
        raise ShapeError(f"axis {axis} does not fit an array of {ndim} dimensions")
    return axes


def kept(shape: Shape, axes: Axes) -> Shape:
    """Return the shape with the reduced axes kept at length one."""
    return tuple([1 if i in axes else n for i, n in enumerate(shape)])


def _infer(x: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
    if x.dtype not in FLOATS:
        raise DTypeError(f"expected float32 or float64, got {x.dtype}; convert with astype()")
    if keepdims:
        return kept(x.shape, axes), x.dtype
    if len(axes) == len(x.shape):
        return (), x.dtype
    return tuple([n for i, n in enumerate(x.shape) if i not in axes]), x.dtype


def _infer_extremum(x: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
    if any(x.shape[a] == 0 for a in axes):
        raise ShapeError(f"no largest or smallest element along an empty axis of shape {x.shape}")
    return _infer(x, axes, keepdims)


def spread(reduced: Tensor, x: Tensor, axes: Axes) -> Tensor:
    """Return a reduction's result in a shape that broadcasts against its input `x`."""
    return reshape(reduced, kept(x.shape, axes))


# Sums -----------------------------------------------------------------------------------------------------


def _bind_sum(arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes, keepdims: bool) -> Sequence[Call]:
    (x,) = arrays
    if x.flags.c_contiguous and out.flags.c_contiguous and x.size and 0 < len(axes) < x.ndim:
        reduced = math.prod(x.shape[a] for a in axes)
        leading = axes == tuple(range(len(axes)))
        trailing = axes == tuple(range(x.ndim - len(axes), x.ndim)) and reduced <= LONGEST_DOT
        if leading or trailing:
            ones = np.ones(reduced, x.dtype)
            flat = out.reshape(-1)
            if leading:
                return [partial(np.matmul, ones, x.reshape(reduced, -1), flat)]
            return [partial(np.matmul, x.reshape(-1, reduced), ones, flat)]
    return [partial(np.add.reduce, x, axes, None, out, keepdims)]


def _kernel_sum(x: Array, out: Array, axes: Axes, keepdims: bool) -> None:
    np.add.reduce(x, axes, None, out=out, keepdims=keepdims)


SUM: Op = register(
    Op(
        name="sum",
        infer=_infer,
        kernel=_kernel_sum,
        bind=_bind_sum,
        vjp=(lambda g, y, x, axes, keepdims: broadcast_to(spread(g, x, axes) if g.shape else g, x.shape),),
        jvp=linear_jvp("sum"),
        doc="sum over axes",
    )
)


@implements(np.sum, (np.add, "reduce"))
def sum(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Sum over `axis` (all axes when None)."""
    x = as_tensor(x)
    return SUM(x, axes=normalize_axes(axis, x.ndim), keepdims=bool(keepdims))


@implements(np.mean)
def mean(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over `axis` (all axes when None); the mean of no elements is NaN."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    return sum(x, axes, keepdims) * (1 / count if count else np.nan)


@implements(np.var)
def var(x: Operand, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> Tensor:
    """Variance over `axis`: squared deviations from the mean, summed and divided by count - ddof."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    count = math.prod(x.shape[a] for a in axes) - ddof
    deviation = x - mean(x, axes, keepdims=True)
    return sum(square(deviation), axes, keepdims) * (1 / count if count > 0 else np.nan)


@implements(np.std)
def std(x: Operand, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> Tensor:
    """Standard deviation over `axis`, with divisor count - ddof; subgradient 0 where all elements are equal."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    count = math.prod(x.shape[a] for a in axes) - ddof
    return norm(x - mean(x, axes, keepdims=True), None, axes, keepdims) * (
        1 / math.sqrt(count) if count > 0 else np.nan
    )


def _kernel_norm(x: Array, out: Array, axes: Axes, keepdims: bool) -> None:
    # Scaled by the largest element, so that squares neither overflow nor vanish.
    scale = np.empty(kept(x.shape, axes), x.dtype)
    np.maximum.reduce(np.abs(x), axes, out=scale, keepdims=True, initial=0)
    scale[(scale == 0) | ~np.isfinite(scale)] = 1
    total = np.add.reduce(np.square(x / scale), axes, keepdims=True)
    np.multiply(np.sqrt(total), scale, out.reshape(total.shape))


def _direction(y: Tensor, x: Tensor, axes: Axes) -> Tensor:
    length = spread(y, x, axes)
    return div(x, where(equal(length, 0), 1, length))  # 0 / 1 at the origin: the subgradient there is 0


NORM: Op = register(
    Op(
        name="norm",
        infer=_infer,
        kernel=_kernel_norm,
        vjp=(lambda g, y, x, axes, keepdims: spread(g, x, axes) * _direction(y, x, axes),),
        jvp=lambda t, y, x, axes, keepdims: sum(t[0] * _direction(y, x, axes), axes, keepdims),
        doc="Euclidean norm over axes; subgradient 0 at the origin",
    )
)


@implements(np.linalg.norm)
def norm(x: Operand, ord: None = None, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Euclidean norm over `axis` (of all elements when None); only the default `ord` is supported."""
    if ord is not None:
        raise ValueError(f"norm: only the Euclidean norm (ord=None) is supported, got ord={ord!r}")
    x = as_tensor(x)
    return NORM(x, axes=normalize_axes(axis, x.ndim), keepdims=bool(keepdims))


# Extrema --------------------------------------------------------------------------------------------------


def _winners(y: Tensor, x: Tensor, axes: Axes) -> Tensor:
    # Ties share the gradient equally, so that it stays a directional derivative's mean and sums to one.
    won = equal_mask(x, spread(y, x, axes))
    return won / sum(won, axes, keepdims=True)


def _extremum(name: str, ufunc: np.ufunc, doc: str) -> Op:
    def kernel(x: Array, out: Array, axes: Axes, keepdims: bool) -> None:
        ufunc.reduce(x, axes, None, out=out, keepdims=keepdims)

    return register(
        Op(
            name=name,
            infer=_infer_extremum,
            kernel=kernel,
            vjp=(lambda g, y, x, axes, keepdims: spread(g, x, axes) * _winners(y, x, axes),),
            jvp=lambda t, y, x, axes, keepdims: sum(t[0] * _winners(y, x, axes), axes, keepdims),
            doc=doc,
        )
    )


MAX = _extremum("max", np.maximum, "largest element over axes; ties share the gradient")
MIN = _extremum("min", np.minimum, "smallest element over axes; ties share the gradient")


@implements(np.max, (np.maximum, "reduce"))
def max(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Largest element over `axis` (all axes when None); ties share the gradient equally."""
    x = as_tensor(x)
    return MAX(x, axes=normalize_axes(axis, x.ndim), keepdims=bool(keepdims))


@implements(np.min, (np.minimum, "reduce"))
def min(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Smallest element over `axis` (all axes when None); ties share the gradient equally."""
    x = as_tensor(x)
    return MIN(x, axes=normalize_axes(axis, x.ndim), keepdims=bool(keepdims))


# Exponential kin ------------------------------------------------------------------------------------------


def _bind_shift(x: Array, largest: Array, axes: Axes, scratch: Scratch) -> Sequence[Call]:
    # The largest element, which subtracted keeps exp() in range. An infinite one is replaced by the largest
    # number there is: infinity - infinity would be NaN. Not in place, which numpy is slow at for a single number.
    limit = np.array(np.finfo(x.dtype).max)
    found = scratch(largest.shape, largest.dtype)
    return [
        partial(np.maximum.reduce, x, axes, None, largest, True),
        partial(np.minimum, largest, limit, out=found),
        partial(np.maximum, found, -limit, out=largest),
    ]


def bind_subtract(x: Array, column: Array, out: Array) -> Sequence[Call]:
    """Return the calls that write `x - column`, which is broadcast, into `out`."""
    # numpy would broadcast the column through buffers that it allocates; spreading it first costs no more.
    if column.size == 1:
        return [partial(np.subtract, x, column.reshape(()), out)]
    return [partial(np.copyto, out, column), partial(np.subtract, x, out, out)]


def _bind_logsumexp(
    arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes, keepdims: bool
) -> Sequence[Call]:
    # In scratch with the reduced axes first, unless they are the longer part: numpy reduces whole rows fast and
    # many short ones slowly.
    (x,) = arrays
    others = tuple(a for a in range(x.ndim) if a not in axes)
    first = math.prod(x.shape[a] for a in axes) <= math.prod(x.shape[a] for a in others)
    order = axes + others if first else others + axes
    ready = x.flags.c_contiguous and order == tuple(range(x.ndim))
    values = x if ready else scratch(tuple(x.shape[a] for a in order), x.dtype)
    reduced = tuple(range(len(axes))) if first else tuple(range(len(others), x.ndim))
    spread = scratch(values.shape, x.dtype)
    largest = scratch(kept(values.shape, reduced), x.dtype)
    total = out.reshape(largest.shape)
    log = scratch(total.shape, total.dtype)
    return [
        *([] if ready else [partial(np.copyto, values, x.transpose(order))]),
        *_bind_shift(values, largest, reduced, scratch),
        *bind_subtract(values, largest, spread),
        partial(np.exp, spread, spread),
        *_bind_sum((spread,), total, scratch, reduced, True),
        partial(np.log, total, log),
        partial(np.add, log, largest, total),
    ]


def _finite(y: Tensor) -> Tensor:
    # A row of -inf has logsumexp -inf; shifting by 0 instead gives it the gradient 0 rather than NaN.
    return where(equal(y, -np.inf), 0, y)


LOGSUMEXP: Op = register(
    Op(
        name="logsumexp",
        infer=_infer_extremum,
        bind=_bind_logsumexp,
        vjp=(lambda g, y, x, axes, keepdims: spread(g, x, axes) * exp(x - _finite(spread(y, x, axes))),),
        jvp=lambda t, y, x, axes, keepdims: sum(t[0] * exp(x - _finite(spread(y, x, axes))), axes, keepdims),
        doc="log of the sum of exponentials over axes, without overflow",
    )
)


@implements((np.logaddexp, "reduce"))
def logsumexp(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return log(sum(exp(x))) over `axis` (all axes when None), without overflow."""
    x = as_tensor(x)
    return LOGSUMEXP(x, axes=normalize_axes(axis, x.ndim), keepdims=bool(keepdims))


def _infer_same(x: Tensor, axes: Axes) -> tuple[Shape, Any]:
    return x.shape, _infer_extremum(x, axes, True)[1]


def _bind_softmax(arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes) -> Sequence[Call]:
    (x,) = arrays
    column = scratch(kept(x.shape, axes), x.dtype)
    total = scratch(x.shape, x.dtype)
    return [
        *_bind_shift(x, column, axes, scratch),
        *bind_subtract(x, column, out),
        partial(np.exp, out, out),
        *_bind_sum((out,), column, scratch, axes, True),
        partial(np.copyto, total, column),
        partial(np.divide, out, total, out),
    ]


def _bind_log_softmax(arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes) -> Sequence[Call]:
    (x,) = arrays
    column = scratch(kept(x.shape, axes), x.dtype)
    powers = scratch(x.shape, x.dtype)
    return [
        *_bind_shift(x, column, axes, scratch),
        *bind_subtract(x, column, out),
        partial(np.exp, out, powers),
        *_bind_sum((powers,), column, scratch, axes, True),
        partial(np.log, column, column),
        partial(np.copyto, powers, column),
        partial(np.subtract, out, powers, out),
    ]


def _softmax_pull(g: Tensor, y: Tensor, axes: Axes) -> Tensor:
    return y * (g - sum(g * y, axes, keepdims=True))


SOFTMAX: Op = register(
    Op(
        name="softmax",
        infer=_infer_same,
        bind=_bind_softmax,
        vjp=(lambda g, y, x, axes: _softmax_pull(g, y, axes),),
        jvp=lambda t, y, x, axes: _softmax_pull(t[0], y, axes),
        doc="exponentials that sum to one over axes, without overflow",
    )
)
LOG_SOFTMAX: Op = register(
    Op(
        name="log_softmax",
        infer=_infer_same,
        bind=_bind_log_softmax,
        vjp=(lambda g, y, x, axes: g - exp(y) * sum(g, axes, keepdims=True),),
        jvp=lambda t, y, x, axes: t[0] - sum(exp(y) * t[0], axes, keepdims=True),
        doc="logarithm of softmax, without overflow",
    )
)


def softmax(x: Operand, axis: Axis = -1) -> Tensor:
    """Exponentials that sum to one over `axis`."""
    x = as_tensor(x)
    return SOFTMAX(x, axes=normalize_axes(axis, x.ndim))


def log_softmax(x: Operand, axis: Axis = -1) -> Tensor:
    """Logarithm of `softmax`."""
    x = as_tensor(x)
    return LOG_SOFTMAX(x, axes=normalize_axes(axis, x.ndim))
