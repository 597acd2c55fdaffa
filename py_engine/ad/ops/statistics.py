"""numpy's statistics on tensors: what skips NaN, weighted means and covariances, and histograms."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.op import NUMPY, as_floats, as_tensor, as_tensors, float_only, implements
from py_engine.ad.ops.along import (
    RULES,
    SEARCHSORTED,
    check_values,
    cumprod,
    cumsum,
    kept_axes,
    median_of_numbers,
    percent,
    quantile_of,
    rows_of,
    shares_of,
    weights_of_rows,
)
from py_engine.ad.ops.arguments import as_dtype, axis_of, checked, flag, refuse, same_dtype, whole
from py_engine.ad.ops.elementary import (
    WHERE,
    astype,
    clip,
    equal,
    greater_equal,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    not_equal,
    sqrt,
    square,
    stop_gradient,
    where,
)
from py_engine.ad.ops.indexing import SCATTER
from py_engine.ad.ops.linalg import MATMUL
from py_engine.ad.ops.reduction import (
    extremum_op,
    holds,
    max,
    mean,
    min,
    normalize_axes,
    position_op,
    prod,
    std,
    sum,
    var,
)
from py_engine.ad.ops.shape import (
    broadcast_to,
    concatenate,
    diagonal,
    expand_dims,
    flip,
    part_of,
    ravel,
    reshape,
    stack,
    transpose,
)
from py_engine.ad.state import STATE
from py_engine.ad.tensor import NO_VALUE, Array, Axis, Literal, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError

# Without NaN ------------------------------------------------------------------------------------------------


def _without_nan(x: Any, value: float) -> Tensor:
    """Return `x` with a value in the place of each NaN, of which integers and truth values have none."""
    a = as_tensor(x)
    if a.dtype.kind in "iub":
        return a
    float_only(a.dtype)
    return WHERE(isnan(a), Literal(np.array(value, a.dtype)), a)


def _skipping(name: str, function: Callable[..., Tensor], value: float) -> None:
    def reduction(
        a: Operand,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = NO_VALUE,
        initial: Operand = NO_VALUE,
        where: Operand = NO_VALUE,
    ) -> Tensor:
        return function(_without_nan(a, value), axis, dtype, out, keepdims, initial, where)

    NUMPY[getattr(np, name)] = reduction


_skipping("nansum", sum, 0.0)
_skipping("nanprod", prod, 1.0)


# NaN equals no extremum and has no share of its gradient, which an infinity in its place could have.
extremum_op(
    *("nanmax", np.fmax, lambda a, b: NUMPY[np.fmax](a, b), np.nan, "largest element that is not NaN", np.nanmax),
    in_table=False,
)
extremum_op(
    *("nanmin", np.fmin, lambda a, b: NUMPY[np.fmin](a, b), np.nan, "smallest element that is not NaN", np.nanmin),
    in_table=False,
)


def _counted(x: Tensor, axis: Axis, keepdims: Any, where: Any) -> tuple[Tensor, Tensor]:
    """Return the sum over the elements that are not NaN, and how many there are."""
    there = astype(logical_not(isnan(x)), np.float64)  # float32 counts no further than 2**24
    found = [sum(part, axis, keepdims=keepdims, where=where) for part in (_without_nan(x, 0.0), there)]
    return found[0], astype(found[1], x.dtype)


def _converted(function: str, x: Tensor, dtype: DTypeLike | None) -> Tensor:
    """Return floats in the dtype to compute in.

    Raises:
        DTypeError: that one is not of floats.
    """
    if dtype is not None and as_dtype(dtype).kind != "f":
        raise DTypeError(f"{function}: the dtype of floats must be one of floats, got {as_dtype(dtype)}")
    return as_floats(x if dtype is None else astype(x, dtype))[0]


@implements(np.nanmean)
def _nanmean(
    a: Operand,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = NO_VALUE,
    *,
    where: Operand = NO_VALUE,
) -> Tensor:
    refuse("nanmean", out=(out,))
    x = as_tensor(a)
    if x.dtype.kind in "iub":
        return mean(x, axis, dtype, keepdims=keepdims, where=where)
    x = _converted("nanmean", x, dtype)
    total, count = _counted(x, axis, keepdims, where)
    return total / count


def _nan_variance(name: str) -> Callable[..., Tensor]:
    def variance(
        a: Operand,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        ddof: float = 0,
        keepdims: bool = NO_VALUE,
        *,
        where: Operand = NO_VALUE,
        mean: Operand = NO_VALUE,
        correction: float = NO_VALUE,
    ) -> Tensor:
        refuse(name, out=(out,))
        if correction is not NO_VALUE:
            if ddof != 0:
                raise ConfigurationError(f"{name}: ddof and correction mean the same; give one of them")
            ddof = correction
        if not isinstance(ddof, (int, float, np.integer, np.floating)):
            raise DTypeError(f"{name}: ddof must be a number, got {ddof!r}")
        x = as_tensor(a)
        if x.dtype.kind in "iub":
            plain: Tensor = (var if name == "nanvar" else std)(
                x, axis, dtype, None, ddof, keepdims, where=where, mean=mean
            )
            return plain
        x = _converted(name, x, dtype)
        total, count = _counted(x, axis, True, where)
        missing, condition = isnan(x), holds(name, x, where)
        if condition is not None:
            missing = logical_or(missing, logical_not(condition))
        centred = _without_nan(x, 0.0) - (total / count if mean is NO_VALUE else mean)
        if centred.shape != x.shape:
            raise ShapeError(f"{name}: the mean, {np.shape(mean)}, does not broadcast to the shape {x.shape}")
        deviations = NUMPY[np.where](missing, 0, centred)
        axes = normalize_axes(axis, x.ndim)
        squares = sum(square(deviations), axes, keepdims=keepdims)
        left = reshape(count, squares.shape) - float(ddof)
        found = squares / NUMPY[np.where](less(0, left), left, np.nan)
        return found if name == "nanvar" else _root(found)

    return variance


def _root(x: Tensor) -> Tensor:
    zero = equal(x, 0)
    return where(zero, 0, sqrt(where(zero, 1, x)))


NUMPY[np.nanvar], NUMPY[np.nanstd] = _nan_variance("nanvar"), _nan_variance("nanstd")


@implements(np.nancumsum)
def _nancumsum(a: Operand, axis: int | None = None, dtype: DTypeLike | None = None, out: None = None) -> Tensor:
    return cumsum(_without_nan(a, 0.0), axis, dtype, out)


@implements(np.nancumprod)
def _nancumprod(a: Operand, axis: int | None = None, dtype: DTypeLike | None = None, out: None = None) -> Tensor:
    return cumprod(_without_nan(a, 1.0), axis, dtype, out)


def _position(name: str, find: Any, what: str) -> None:
    def kernel(x: Array, out: Array, axis: int | None, keepdims: bool) -> None:
        checked(name, lambda: find(x, axis, out, keepdims=keepdims), x.shape)

    op = position_op(name, kernel, what, in_table=False)

    @implements(find, constant=True)
    def position(a: Operand, axis: int | None = None, out: None = None, *, keepdims: bool = NO_VALUE) -> Tensor:
        x = as_tensor(a)
        if x.dtype.kind not in "iub":
            float_only(x.dtype)
        refuse(name, out=(out,))
        return op(x, axis=None if axis is None else axis_of(axis, x.ndim, name), keepdims=flag(keepdims))


_position("nanargmax", np.nanargmax, "largest element that is not NaN")
_position("nanargmin", np.nanargmin, "smallest element that is not NaN")


@implements(np.nanmedian)
def _nanmedian(
    a: Operand, axis: Axis = None, out: None = None, overwrite_input: bool = False, keepdims: bool = NO_VALUE
) -> Tensor:
    refuse("nanmedian", out=(out,), overwrite_input=(overwrite_input, False))
    (x,) = as_floats(a)
    rows, axes, _ = rows_of(x, axis)
    return kept_axes(median_of_numbers(rows), x, axes, flag(keepdims))


@implements(np.nanquantile)
def _nanquantile(
    a: Operand,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = NO_VALUE,
    *,
    weights: Operand | None = None,
) -> Tensor:
    refuse("nanquantile", out=(out,), overwrite_input=(overwrite_input, False))
    q = shares_of("nanquantile", q, 1)
    return quantile_of("nanquantile", a, q, axis, method, flag(keepdims), weights, skip_nan=True)


@implements(np.nanpercentile)
def _nanpercentile(
    a: Operand,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = NO_VALUE,
    *,
    weights: Operand | None = None,
) -> Tensor:
    refuse("nanpercentile", out=(out,), overwrite_input=(overwrite_input, False))
    x = as_tensor(a)
    q = percent(shares_of("nanpercentile", q, 100))
    return quantile_of("nanpercentile", x, q, axis, method, flag(keepdims), weights, skip_nan=True)


# Means and covariances --------------------------------------------------------------------------------------


@implements(np.ptp)
def _ptp(a: Operand, axis: Axis = None, out: None = None, keepdims: bool = NO_VALUE) -> Tensor:
    refuse("ptp", out=(out,))
    return max(a, axis, keepdims=keepdims) - min(a, axis, keepdims=keepdims)


@implements(np.count_nonzero, constant=True)
def _count_nonzero(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    x = as_tensor(a)
    there = astype(not_equal(x, False if x.dtype == np.bool_ else 0), np.float64)
    return astype(sum(there, axis, keepdims=keepdims), np.intp)


@implements(np.average)
def _average(
    a: Operand, axis: Axis = None, weights: Operand | None = None, returned: bool = False, *, keepdims: bool = NO_VALUE
) -> Any:
    if weights is None:
        (x,) = as_floats(a)
        found = mean(x, axis, keepdims=keepdims)
        count = math.prod(x.shape[d] for d in normalize_axes(axis, x.ndim))
        total = broadcast_to(Literal(np.array(count, x.dtype)), found.shape)
        return (found, total) if returned else found
    x, w = as_floats(a, weights)
    w = weights_of_rows("average", x, w, axis)
    total = sum(w, axis, keepdims=keepdims)
    check_values("average", total, "no zero", "the weights sum to zero")
    found = sum(x * w, axis, keepdims=keepdims) / total
    return (found, total) if returned else found


@implements(np.cov)
def _cov(
    m: Operand,
    y: Operand | None = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Operand | None = None,
    aweights: Operand | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Tensor:
    parts = as_floats(m) if y is None else as_floats(m, y)
    same_dtype("cov", dtype, parts[0])
    if parts[0].dtype != np.float64:
        raise DTypeError(f"cov: numpy computes covariances in float64, got {parts[0].dtype}; convert with astype()")
    rows: list[Tensor] = []
    for x in parts:
        if x.ndim > 2:
            raise ShapeError(f"cov: expected at most two axes, got shape {x.shape}")
        row = reshape(x, (1,) * (2 - x.ndim) + x.shape)
        one = row.shape[0] == 1 if rows else x.ndim == 1
        rows.append(row if flag(rowvar) or one else transpose(row))
    x = rows[0] if len(rows) == 1 else concatenate(rows)
    if not x.size:
        raise ShapeError("cov: there is no covariance of no elements")
    spare = whole(ddof, "cov: ddof") if ddof is not None else int(not flag(bias))
    weights = _weights_of_columns(x, fweights, aweights)
    if weights is None:
        centred = x - mean(x, 1, keepdims=True)
        count = x.shape[1] - spare
        product = MATMUL(centred, transpose(centred))
        return _without_ones(product / count if count > 0 else product / 0.0)
    total = sum(weights)
    check_values("cov", total, "no zero", "the weights sum to zero")
    centred = x - sum(x * weights, 1, keepdims=True) / total
    lost = spare if aweights is None else spare * sum(weights * as_floats(x, aweights)[1]) / total
    return _without_ones(MATMUL(centred, transpose(centred * weights)) / maximum(total - lost, 0.0))


def _weights_of_columns(x: Tensor, fweights: Any, aweights: Any) -> Tensor | None:
    """The product of how often each observation counts and how reliable it is, or None where neither is given."""
    found = None
    for name, given in (("fweights", fweights), ("aweights", aweights)):
        if given is None:
            continue
        w = as_tensor(given)
        if name == "fweights" and w.dtype.kind not in "iuf":
            raise DTypeError(f"cov: fweights must be whole numbers, got {w.dtype}")
        if w.shape != (x.shape[1],):
            raise ShapeError(f"cov: {name} of shape {w.shape} do not fit {x.shape[1]} observations")
        check_values("cov", w, "not negative", f"{name} must not be negative")
        if name == "fweights":
            if w.data is not None and (w.data != np.round(w.data)).any():
                raise DTypeError("cov: fweights must be whole numbers")
            check_values("cov", w, "whole", "fweights must be whole numbers")
        w = as_floats(x, w if name == "aweights" else astype(w, np.float64))[1]
        found = w if found is None else found * w
    return found


def _without_ones(x: Tensor) -> Tensor:
    return reshape(x, [n for n in x.shape if n != 1])


@implements(np.corrcoef)
def _corrcoef(x: Operand, y: Operand | None = None, rowvar: bool = True, *, dtype: DTypeLike | None = None) -> Tensor:
    found = _cov(x, y, rowvar, dtype=dtype)
    if found.ndim < 2:
        return found / found
    deviations = sqrt(diagonal(found))
    return clip(found / expand_dims(deviations, 1) / deviations, -1, 1)


# Histograms -------------------------------------------------------------------------------------------------
#
# How many elements fall into a bin is constant; a sum of weights has a derivative by these, and equally wide bins have
# one by the least and the largest element.


def _number_of_bins(function: str, bins: Any) -> int | None:
    """Return the number of bins where that is what `bins` says, None for an array of edges."""
    if isinstance(bins, str):
        raise ConfigurationError(
            f"{function}: with bins={bins!r} their number depends on values; give their number or their edges"
        )
    if isinstance(bins, Tensor) or np.ndim(bins):
        return None
    count = whole(bins, f"{function}: the number of bins")
    if count < 1:
        raise ShapeError(f"{function}: at least one bin is needed, got {count}")
    return count


def _edges(function: str, x: Tensor, bins: Any, range: Any) -> Tensor:
    """Return the edges of bins: those given, or equally spaced ones over the range, or over that of `x`."""
    count = _number_of_bins(function, bins)
    if count is None:
        _, edges = as_floats(x, bins)
        if edges.ndim != 1 or (function == "histogramdd" and edges.size < 2):
            raise ShapeError(f"{function}: the edges of bins are a vector, got shape {edges.shape}")
        check_values(function, edges, "rising", "the edges of bins must not fall")
        return edges
    if range is None:
        low, high = (min(x), max(x)) if x.size else as_tensors((x, 0.0, 1.0))[1:]
    elif not isinstance(range, (list, tuple, np.ndarray)) or len(range) != 2:
        raise ShapeError(f"{function}: a range is a pair of numbers, got {range!r}")
    else:
        low, high = checked(function, lambda: as_tensors((x, *range))[1:], x.shape)
        if low.shape or high.shape:
            raise ShapeError(f"{function}: a range is a pair of numbers, got {range!r}")
    if low.data is not None and high.data is not None:
        if not np.isfinite([low.data, high.data]).all():
            raise ConfigurationError(f"{function}: the range of bins, {low.data} to {high.data}, is not finite")
        if low.data > high.data:
            raise ConfigurationError(f"{function}: the range of bins falls, from {low.data} to {high.data}")
    else:
        ends = stack([low, high])
        check_values(function, ends, "finite", "the range of bins is not finite")
        check_values(function, ends, "rising", "the range of bins falls")
    if range is None or builtins.any(isinstance(end, Tensor) for end in range):
        half = where(equal(low, high), 0.5, Literal(np.zeros((), x.dtype)))  # numpy's bins around a single value
        found: Tensor = NUMPY[np.linspace](low - half, high + half, count + 1)
    else:  # of numbers numpy spaces them in float64, and rounds once
        first, last = range
        around = 0.5 if first == last else 0.0
        kind = np.result_type(first, last, x.dtype)
        found = Tensor(np.linspace(first - around, last + around, count + 1, dtype=kind))
    if found.data is not None and not (found.data[:-1] < found.data[1:]).all():
        raise ConfigurationError(f"{function}: {count} bins are too many for the range {low.data} to {high.data}")
    if found.data is None:
        check_values(function, found, "strictly rising", f"{count} bins are too many for their range")
    return found


def _returned(edges: Tensor, bins: Any) -> Tensor:
    """Return edges of bins as numpy does: those that are given in their dtype."""
    given = None if not isinstance(bins, Tensor) and not np.ndim(bins) else as_tensor(bins)
    return edges if given is None or given.dtype.kind not in "iu" else given


def _counts(columns: Sequence[Tensor], edges: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return the sum of the weights of the samples in each bin: its own lower edge, not the upper one but of the last.

    A sample that is in no bin is added to a place beside the result, which is left out.
    """
    lengths = [e.size - 1 for e in edges]
    place = Tensor(np.zeros(columns[0].shape, np.intp))
    inside = Tensor(np.ones(columns[0].shape, np.bool_))
    for x, e, n in zip(columns, edges, lengths, strict=True):
        below = SEARCHSORTED(stop_gradient(e), stop_gradient(x), side="right")
        at_end = equal(x, e[n])
        index = where(at_end, Tensor(np.array(n - 1)), below - 1)
        inside = logical_and(inside, logical_and(greater_equal(x, e[0]), less_equal(x, e[n])))
        place = place * Tensor(np.array(n)) + index
    size = math.prod(lengths)
    place = where(inside, place, Tensor(np.array(size)))
    total = SCATTER(weights, place, pattern=("array",), shape=(size + 1,))
    return reshape(part_of(total, 0, 0, size), lengths)


def _widths(edges: Tensor) -> Tensor:
    return astype(part_of(edges, 0, 1, edges.size) - part_of(edges, 0, 0, edges.size - 1), np.float64)


def _weights_of(function: str, weights: Any, x: Tensor) -> Tensor:
    if weights is None:
        return Tensor(np.ones(x.size))  # float32 does not count beyond 2²⁴
    _, w = as_floats(x, weights)
    w = astype(w, np.float64)
    if w.size != x.size or (function == "histogram" and w.shape != x.shape):
        raise ShapeError(f"{function}: weights of shape {w.shape} do not fit {x.shape}")
    return ravel(w)


@implements(np.histogram)
def _histogram(
    a: Operand,
    bins: int | Operand = 10,
    range: tuple[float, float] | None = None,
    density: bool | None = None,
    weights: Operand | None = None,
) -> tuple[Tensor, Tensor]:
    (x,) = as_floats(a)
    w = _weights_of("histogram", weights, x)
    edges = _edges("histogram", x, bins, range)
    counts = _counts([astype(ravel(x), edges.dtype)], [edges], w)
    if density:
        counts = astype(counts, np.float64)
        return counts / _widths(edges) / sum(counts), _returned(edges, bins)
    kind = np.dtype(np.intp) if weights is None else as_tensor(weights).dtype
    return astype(counts, kind), _returned(edges, bins)


@implements(np.histogram_bin_edges)
def _histogram_bin_edges(
    a: Operand, bins: int | Operand = 10, range: tuple[float, float] | None = None, weights: Operand | None = None
) -> Tensor:
    (x,) = as_floats(a)
    if weights is not None:
        _weights_of("histogram", weights, x)
    return _returned(_edges("histogram_bin_edges", x, bins, range), bins)


def _for_each_column(name: str, given: Any, columns: int) -> list[Any]:
    if columns and isinstance(given, (int, np.integer)):
        return [given] * columns
    if isinstance(given, str) or not isinstance(given, (Sequence, np.ndarray, Tensor)):
        raise DTypeError(f"histogramdd: expected one entry of {name} for each coordinate, got {given!r}")
    return [*given]


@implements(np.histogramdd)
def _histogramdd(
    sample: Operand,
    bins: int | Sequence[int | Operand] = 10,
    range: Sequence[tuple[float, float] | None] | None = None,
    density: bool | None = None,
    weights: Operand | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if isinstance(sample, (Tensor, np.ndarray)):
        (x,) = as_floats(sample)
        rows = x if x.ndim != 1 else reshape(x, (x.size, 1))
    elif isinstance(sample, (list, tuple)) and sample:  # coordinates, each with all samples
        rows = transpose(stack(as_floats(*sample)))
    else:
        raise ShapeError("histogramdd: expected rows of coordinates, or a list of columns")
    if rows.ndim != 2 or not rows.shape[1]:
        raise ShapeError(f"histogramdd: samples are rows of coordinates, got shape {rows.shape}")
    columns = [rows[:, d] for d in builtins.range(rows.shape[1])]
    each = _for_each_column("bins", bins, len(columns))
    ranges = [None] * len(columns) if range is None else _for_each_column("range", range, 0)
    if len(each) != len(columns) or len(ranges) != len(columns):
        raise ShapeError(f"histogramdd: one entry of bins and range for each of {len(columns)} coordinates is needed")
    w = _weights_of("histogramdd", weights, columns[0])
    for d, (bins_of, range_of) in enumerate(zip(each, ranges, strict=True)):
        if range_of is not None and not isinstance(bins_of, Tensor) and not np.ndim(bins_of):
            columns[d] = astype(columns[d], np.float64)  # as numpy spaces bins over a range that is given
    edges = [_edges("histogramdd", *given) for given in zip(columns, each, ranges, strict=True)]
    counts = astype(_counts(columns, edges, w), np.float64)
    if density:
        total = sum(counts)
        for d, e in enumerate(edges):
            counts = counts / reshape(_widths(e), [-1 if k == d else 1 for k in builtins.range(counts.ndim)])
        counts = counts / total
    return counts, tuple(map(_returned, edges, each))


@implements(np.histogram2d)
def _histogram2d(
    x: Operand,
    y: Operand,
    bins: int | Sequence[int | Operand] = 10,
    range: Sequence[tuple[float, float] | None] | None = None,
    density: bool | None = None,
    weights: Operand | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    a, b = as_floats(x, y)
    if a.ndim != 1 or a.shape != b.shape:
        raise ShapeError(f"histogram2d: expected two vectors of one length, got shapes {a.shape} and {b.shape}")
    one = isinstance(bins, (int, np.integer, str, float)) or len(bins) == 2
    both: Any = bins if one else [bins, bins]
    counts, (first, second) = _histogramdd([a, b], both, range, density, weights)
    return counts, first, second


@implements(np.digitize, constant=True)
def _digitize(x: Operand, bins: Operand, right: bool = False) -> Tensor:
    a, edges = as_tensors((x, bins))
    if edges.ndim != 1:
        raise ShapeError(f"digitize: the edges of bins are a vector, got shape {edges.shape}")
    side = "left" if flag(right) else "right"
    rising, falling = (SEARCHSORTED(e, a, side=side) for e in (edges, flip(edges)))
    if not edges.size:
        return rising
    last = Tensor(np.array(edges.size))
    check_values("digitize", edges, "monotonic", "the edges of bins must rise, or fall")
    if STATE.watched is None and edges.data is not None and RULES["rising"](edges.data):
        return rising
    return where(less_equal(edges[0], edges[-1]), rising, last - falling)
