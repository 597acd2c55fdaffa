"""Functions along an axis: running sums and products, differences, and order.

A position is constant between the values where the order changes, so that a sorted array has the gradient of its
elements' places; of equal ones the first in the array comes first. NaN comes last, as numpy has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.mutation import watch_setting
from py_engine.ad.op import (
    Call,
    Op,
    Scratch,
    Shape,
    as_floats,
    as_tensor,
    as_tensors,
    check_op,
    common_dtype,
    define,
    float_only,
    here,
    implements,
    linear_jvp,
    per_element,
)
from py_engine.ad.ops.arguments import axis_of, flag, refuse, whole
from py_engine.ad.ops.elementary import (
    ROUND,
    WHERE,
    astype,
    clip,
    equal,
    floor,
    identity,
    isfinite,
    isnan,
    less,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    mod,
    not_equal,
    stop_gradient,
    where,
)
from py_engine.ad.ops.indexing import take, take_along_axis
from py_engine.ad.ops.reduction import as_numbers, kind_of_sum, normalize_axes, sum
from py_engine.ad.ops.shape import (
    along_axes,
    broadcast_to,
    concatenate,
    flip,
    leading,
    moveaxis,
    part_of,
    ravel,
    reshape,
    stack,
    transpose,
)
from py_engine.ad.tensor import FLOATS, NO_VALUE, Array, Axis, Literal, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError

# Running sums and products ----------------------------------------------------------------------------------


def _infer_running(x: Tensor, axis: int) -> tuple[Shape, Any]:
    return x.shape, x.dtype if x.dtype in FLOATS else kind_of_sum(x.dtype)


CUMSUM: Op = define(
    name="cumsum",
    infer=_infer_running,
    kernel=lambda x, out, axis: np.cumsum(x, axis, out=out),
    vjp=(lambda g, y, x, axis: flip(CUMSUM(flip(g, axis), axis=axis), axis),),
    jvp=linear_jvp("cumsum"),
    flops=per_element(1),
    batch=along_axes,
    doc="sum of the elements up to each place along an axis",
)


def _recurrence(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """Return y with y[i] = a[i] y[i-1] + b[i] along an axis, by recursive doubling (a parallel scan)."""
    n = b.shape[axis]
    if n <= 1:
        return WHERE(equal(a, a), b, b)  # read `a`, as longer ones do
    reach = 1
    while reach < n:
        a_here, b_here = part_of(a, axis, reach, n), part_of(b, axis, reach, n)
        a_there, b_there = part_of(a, axis, 0, n - reach), part_of(b, axis, 0, n - reach)
        factor = a_here
        if reach > 1:  # a product of finite factors may overflow, and nothing comes through it where `b` is 0
            hidden = logical_and(equal(b_there, 0), logical_not(isfinite(a_here)))
            factor = WHERE(hidden, Tensor(np.zeros((), a.dtype)), a_here)
        b = concatenate([part_of(b, axis, 0, reach), factor * b_there + b_here], axis)
        a = concatenate([part_of(a, axis, 0, reach), a_here * a_there], axis)
        reach *= 2
    return b


def _product_before(y: Tensor, axis: int) -> Tensor:
    """Return the product of the elements before each place, from those up to each place."""
    one = Tensor(np.ones((*y.shape[:axis], min(1, y.shape[axis]), *y.shape[axis + 1 :]), y.dtype))
    return concatenate([one, part_of(y, axis, 0, max(y.shape[axis] - 1, 0))], axis)


def _pull_cumprod(g: Tensor, y: Tensor, x: Tensor, axis: int) -> Tensor:
    # From the last place to the first: what a place's factor multiplies is its gradient and the next place's.
    n = x.shape[axis]
    following = concatenate([part_of(x, axis, min(1, n), n), part_of(x, axis, 0, min(1, n))], axis)
    total = flip(_recurrence(flip(following, axis), flip(g, axis), axis), axis)
    return total * _product_before(y, axis)


CUMPROD: Op = define(
    name="cumprod",
    infer=_infer_running,
    kernel=lambda x, out, axis: np.cumprod(x, axis, out=out),
    vjp=(_pull_cumprod,),
    jvp=lambda t, y, x, axis: _recurrence(x, t[0] * _product_before(y, axis), axis),
    flops=per_element(1),
    batch=along_axes,
    doc="product of the elements up to each place along an axis",
)


def _running(op: Op, a: Any, axis: Any, dtype: Any, out: Any) -> Tensor:
    refuse(op.name, out=(out,))
    x = as_tensor(a)
    if axis is None:
        x, axis = ravel(x), 0
    if dtype is not None:
        x = as_numbers(op.name, x, dtype)
    return op(x, axis=axis_of(axis, x.ndim, op.name, x.shape))


@implements(np.cumsum)
def cumsum(a: Operand, axis: int | None = None, dtype: DTypeLike | None = None, out: None = None) -> Tensor:
    """Sum of the elements up to each place along `axis`, or of all of them, in C order, when None."""
    return _running(CUMSUM, a, axis, dtype, out)


@implements(np.cumprod)
def cumprod(a: Operand, axis: int | None = None, dtype: DTypeLike | None = None, out: None = None) -> Tensor:
    """Product of the elements up to each place along `axis`, or of all of them, in C order, when None."""
    return _running(CUMPROD, a, axis, dtype, out)


@implements(np.diff)
def diff(a: Operand, n: int = 1, axis: int = -1, prepend: Operand = NO_VALUE, append: Operand = NO_VALUE) -> Tensor:
    """Differences of neighbours along `axis`, `n` times; of truth values whether they differ.

    `prepend` and `append` are put before and behind the elements first; a number stands for one of each row.
    """
    x, count = as_tensor(a), whole(n, "diff: n")
    if count == 0:
        return x
    if count < 0:
        raise ShapeError(f"diff: n must not be negative, got {count}")
    axis = axis_of(axis, x.ndim, "diff", x.shape)
    parts = [x if part is x else _row(x, part, axis) for part in (prepend, x, append) if part is not NO_VALUE]
    if len(parts) > 1:
        x = concatenate(parts, axis)
    for _ in range(count):
        length = x.shape[axis]
        later, earlier = part_of(x, axis, min(1, length), length), part_of(x, axis, 0, max(length - 1, 0))
        x = not_equal(later, earlier) if x.dtype == np.bool_ else later - earlier
    return x


def _row(x: Tensor, part: Any, axis: int) -> Tensor:
    _, row = as_tensors((x, part))
    if row.ndim == 0:
        row = row * Tensor(np.ones((*x.shape[:axis], 1, *x.shape[axis + 1 :]), row.dtype))
    return row


# Order -------------------------------------------------------------------------------------------------------


def _infer_positions(x: Tensor, axis: int, **attrs: Any) -> tuple[Shape, Any]:
    return x.shape, np.dtype(np.intp)


def _argsort(x: Array, out: Array, axis: int) -> None:
    np.copyto(out, np.argsort(x, axis, kind="stable"))


ARGSORT: Op = define(
    name="argsort",
    infer=_infer_positions,
    kernel=_argsort,
    constant=True,
    flops=lambda x, axis: x.size * max(x.shape[axis] - 1, 0).bit_length() if x.shape else 0,
    batch=along_axes,
    doc="positions of the elements in rising order along an axis, of equal ones the first first",
)


def _in_order(function: str, a: Any, axis: Any, kind: Any, order: Any) -> tuple[Tensor, int]:
    refuse(function, order=(order,))
    if kind is not None and kind not in ("quicksort", "heapsort", "mergesort", "stable"):
        raise ConfigurationError(f"{function}: {kind!r} is no kind of sorting")
    x = as_tensor(a)
    if axis is None:
        return ravel(x), 0
    return x, axis_of(axis, x.ndim, function, x.shape)


@implements(np.argsort, constant=True)
def argsort(
    a: Operand, axis: int | None = -1, kind: str | None = None, order: None = None, *, stable: bool | None = None
) -> Tensor:
    """Positions of the elements in rising order along `axis` (of all, in C order, when None); of equal ones the first
    comes first, whatever `kind`. Constant."""
    x, axis = _in_order("argsort", a, axis, kind, order)
    _stable("argsort", kind, stable)
    return ARGSORT(x, axis=axis)


def topk(a: Operand, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Return the `k` largest elements along `axis`, falling, and their positions, which are constant.

    Of equal ones the first comes first; NaN counts as the largest.

    Raises:
        ShapeError: the axis has fewer elements, or there is no such axis.
    """
    x = as_tensor(a)
    axis = axis_of(axis, x.ndim, "topk", x.shape)
    n, count = x.shape[axis], whole(k, "topk: k")
    if not 0 <= count <= n:
        raise ShapeError(f"topk: axis {axis} of shape {x.shape} has {n} elements, of which {count} were asked for")
    # Rising, then turned round: in what is turned round itself, so that of equal ones the first ends up first.
    rising = ARGSORT(flip(x, axis), axis=axis)
    places = part_of(np.intp(n - 1) - flip(rising, axis), axis, 0, count)
    return take_along_axis(x, places, axis), places


@implements(np.sort)
def sort(
    a: Operand, axis: int | None = -1, kind: str | None = None, order: None = None, *, stable: bool | None = None
) -> Tensor:
    """The elements in rising order along `axis` (all of them, as a vector, when None), NaN last."""
    x, axis = _in_order("sort", a, axis, kind, order)
    _stable("sort", kind, stable)
    return take_along_axis(x, ARGSORT(x, axis=axis), axis)


def _stable(function: str, kind: Any, stable: Any) -> None:
    if stable is not None and kind is not None:
        raise ConfigurationError(f"{function}: kind and stable mean the same; give one of them")
    if stable is not None and not isinstance(stable, (bool, np.bool_)):
        raise DTypeError(f"{function}: stable must be a truth value, got {stable!r}")


def _infer_searchsorted(a: Tensor, v: Tensor, side: str) -> tuple[Shape, Any]:
    if a.ndim != 1:
        raise ShapeError(f"expected a sorted vector, got shape {a.shape}")
    common_dtype((a, v))
    return v.shape, np.dtype(np.intp)


SEARCHSORTED: Op = define(
    name="searchsorted",
    infer=_infer_searchsorted,
    kernel=lambda a, v, out, side: np.copyto(out, np.searchsorted(a, v, side)),
    constant=True,
    flops=lambda a, v, side: v.size * a.size.bit_length(),
    batch=lambda op, count, mapped, inputs, attrs: None if mapped[0] else op.apply(tuple(inputs), attrs),
    doc="places at which elements belong into a sorted vector",
)


@implements(np.searchsorted, constant=True)
def searchsorted(a: Operand, v: Operand, side: str = "left", sorter: Operand | None = None) -> Tensor:
    """Places at which the elements of `v` belong into the sorted vector `a`: before its equals, or behind them where
    `side` is "right". `sorter` has the positions that put `a` in order, as `argsort` gives them. Constant."""
    if sorter is not None:
        order = as_tensor(sorter)
        a = as_tensor(a)
        if a.ndim != 1 or order.shape != a.shape:
            raise ShapeError(f"searchsorted: a sorter of shape {order.shape} does not fit a vector of shape {a.shape}")
        a = take(a, order)
    if side not in ("left", "right"):
        raise ConfigurationError(f"searchsorted: side must be 'left' or 'right', got {side!r}")
    return SEARCHSORTED(*as_tensors((a, v)), side=side)


def rows_of(a: Any, axis: Axis) -> tuple[Tensor, tuple[int, ...], Shape]:
    """Return `a` with the axes made one, the last; the axes; and the shape of the others."""
    x = as_tensor(a)
    watch_setting(axis)
    axes = normalize_axes(tuple(axis) if isinstance(axis, list) else axis, x.ndim)
    others = tuple(d for d in range(x.ndim) if d not in axes)
    shape = tuple(x.shape[d] for d in others)
    count = math.prod(x.shape[d] for d in axes)
    return reshape(transpose(x, others + axes), (*shape, count)), axes, shape


def _median_of(rows: Tensor) -> Tensor:
    n = rows.shape[-1]
    if not n:
        raise ShapeError("median: there is no median of no elements")
    sorted_rows = sort(rows)
    middle = sorted_rows[..., n // 2]
    if n % 2 == 0:
        middle = (sorted_rows[..., n // 2 - 1] + middle) * 0.5
    return WHERE(isnan(sorted_rows[..., -1]), sorted_rows[..., -1], middle)


@implements(np.median)
def median(
    a: Operand, axis: Axis = None, out: None = None, overwrite_input: bool = False, keepdims: bool = False
) -> Tensor:
    """The middle element over `axis` (all axes when None), or the mean of the two; NaN where one is NaN."""
    refuse("median", out=(out,), overwrite_input=(overwrite_input, False))
    (x,) = as_floats(a)
    rows, axes, _ = rows_of(x, axis)
    return kept_axes(_median_of(rows), x, axes, flag(keepdims))


def median_of_numbers(rows: Tensor) -> Tensor:
    """Return the median of each row's elements that are not NaN; NaN where all are."""
    n = rows.shape[-1]
    if not n:
        return sum(rows, -1) * np.nan
    sorted_rows = sort(rows)  # with NaN at the end
    count = sum(astype(logical_not(isnan(rows)), np.intp), -1, keepdims=True)
    first, second = (
        take_along_axis(sorted_rows, maximum((count - less_one) // 2, 0), -1)[..., 0] for less_one in (1, 0)
    )
    odd = equal(mod(count, 2), 1)[..., 0]
    return WHERE(odd, first, (first + second) * 0.5)


def kept_axes(found: Tensor, x: Tensor, axes: tuple[int, ...], keepdims: bool, leading: Shape = ()) -> Tensor:
    """Return what was found of the rows of `x`, with the axes at length one where `keepdims` asks for them."""
    if not keepdims:
        return found
    return reshape(found, (*leading, *(1 if d in axes else n for d, n in enumerate(x.shape))))


CONTINUOUS = {
    "linear": (1.0, 1.0),
    "hazen": (0.5, 0.5),
    "weibull": (0.0, 0.0),
    "interpolated_inverted_cdf": (0.0, 1.0),
    "median_unbiased": (1 / 3, 1 / 3),
    "normal_unbiased": (3 / 8, 3 / 8),
}
"""numpy's continuous methods of quantiles, each with the parameters alpha and beta of Hyndman and Fan (1996)."""
BETWEEN = ("lower", "higher", "midpoint", "nearest")
STEPPED = ("inverted_cdf", "averaged_inverted_cdf", "closest_observation")
"""numpy's methods of quantiles that invert the empirical distribution function, a step at each element."""
METHODS = (*CONTINUOUS, *BETWEEN, *STEPPED)
PICKING = ("lower", "higher", "nearest", "inverted_cdf", "closest_observation")
"""Methods whose quantiles are elements, of integers too."""


def _places(q: Array, n: int, method: str) -> list[tuple[int, int, float]]:
    """For each quantile the two places that it lies between, and how far it is from the first to the second."""
    alpha, beta = CONTINUOUS.get(method, (1.0, 1.0))
    found = []
    for share in q.ravel().tolist():
        if method in STEPPED:
            at = n * share - (1.5 if method == "closest_observation" else 1)
        else:
            at = (n - 1) * share if alpha == beta == 1 else n * share + (alpha + share * (1 - alpha - beta)) - 1
        low = math.floor(at)
        first, second = (min(max(k, 0), n - 1) for k in (low, low + 1))
        between = at - low if 0 <= at < n - 1 else float(at >= n - 1)
        if method == "lower" or (method == "nearest" and round(at) == low):
            second, between = first, 0.0
        elif method in ("higher", "nearest", "inverted_cdf"):
            between = float(between > 0)
        elif method == "midpoint":
            between = 0.5 * (between > 0)
        elif method == "averaged_inverted_cdf":
            between = 1.0 if between else 0.5
        elif method == "closest_observation":
            between = float(between > 0 or low % 2 == 0)
        found.append((first, second, between))
    return found


def weights_of_rows(function: str, x: Tensor, w: Tensor, axis: Axis) -> Tensor:
    """Return weights of the shape of `x`, from one for each element, or one for each place along the axes.

    Raises:
        ShapeError: they are neither.
    """
    if w.shape == x.shape:
        return w
    watch_setting(axis)
    given = [] if axis is None else [*axis] if isinstance(axis, (tuple, list)) else [axis]
    axes = normalize_axes(tuple(given), x.ndim)
    in_order = [whole(d, "the axis") % x.ndim for d in given]  # that of the axes of the weights
    if axis is None or tuple(x.shape[d] for d in in_order) != w.shape:
        raise ShapeError(
            f"{function}: weights of shape {w.shape} do not fit shape {x.shape}; give one for each element, or an "
            "axis, or axes, and one for each place along these"
        )
    w = transpose(w, [in_order.index(d) for d in axes])
    return broadcast_to(reshape(w, [n if d in axes else 1 for d, n in enumerate(x.shape)]), x.shape)


def weighted_quantile(
    function: str, a: Any, q: Any, axis: Axis, method: str, keepdims: bool, weights: Any, skip_nan: bool
) -> Tensor:
    """The first elements at which the weights up to here reach the shares `q` of all; constant in the weights."""
    if method != "inverted_cdf":
        raise ConfigurationError(f"{function}: weights need method='inverted_cdf', got {method!r}")
    x = as_tensor(a)
    given = as_tensor(weights)
    if given.dtype.kind not in "biuf":
        raise DTypeError(f"{function}: weights must be numbers, got {given.dtype}")
    w = astype(stop_gradient(weights_of_rows(function, x, given, axis)), np.float64)
    rows, axes, shape = rows_of(x, axis)
    float_only(rows.dtype)
    if not rows.shape[-1]:
        raise ShapeError(f"{function}: there is no quantile of no elements")
    w, _, _ = rows_of(w, axis)
    message = "weights must be finite, none negative, and not all zero"
    for values, rule in ((w, "not negative"), (sum(w, -1), "finite"), (sum(w, -1), "no zero")):
        check_values(function, values, rule, message)
    order = ARGSORT(rows, axis=rows.ndim - 1)
    sorted_rows, w = take_along_axis(rows, order, -1), take_along_axis(w, order, -1)
    if skip_nan:
        w = WHERE(isnan(sorted_rows), np.zeros((), np.float64), w)
    reached = cumsum(w, -1)
    reached = reached / reached[..., -1:]
    last = sorted_rows[..., -1]
    bad = isnan(reached[..., -1]) if skip_nan else isnan(last)
    wanted = as_floats(stop_gradient(q) if isinstance(q, Tensor) else np.asarray(q))[0]
    reached = astype(reached, wanted.dtype)
    found = []
    for share in ravel(wanted):
        before = logical_or(less(reached, share), equal(reached, 0))
        place = clip(sum(astype(before, np.intp), -1, keepdims=True), 0, rows.shape[-1] - 1)
        found.append(WHERE(bad, np.asarray(np.nan, rows.dtype), take_along_axis(sorted_rows, place, -1)[..., 0]))
    return _as_shares(found, wanted.shape, x, axes, shape, keepdims)


def _as_shares(
    found: list[Tensor], shares: Shape, x: Tensor, axes: tuple[int, ...], shape: Shape, keepdims: bool
) -> Tensor:
    """The quantiles of each share, `shape` each, as one tensor of the shape that numpy gives them."""
    if not shares:
        return kept_axes(found[0], x, axes, keepdims)
    stacked = stack(found) if found else Tensor(np.zeros((0, *shape), x.dtype))
    return kept_axes(reshape(stacked, (*shares, *shape)), x, axes, keepdims, shares)


def quantile_of(
    function: str, a: Any, q: Any, axis: Axis, method: Any, keepdims: bool, weights: Any = None, skip_nan: bool = False
) -> Tensor:
    """The quantiles of the function `function`; `skip_nan` leaves out elements that are NaN."""
    watch_setting(q)
    if method not in METHODS:
        raise ConfigurationError(f"{function}: method must be one of {', '.join(METHODS)}, got {method!r}")
    if weights is not None:
        return weighted_quantile(function, a, q, axis, method, keepdims, weights, skip_nan)
    x = as_tensor(a)
    if x.dtype == np.bool_:
        raise DTypeError(f"{function}: expected numbers, got truth values; convert with astype()")
    if method not in PICKING:
        (x,) = as_floats(x)
        # Beside shares that are no number of Python's numpy interpolates in their dtype.
        strong = not isinstance(q, Tensor) and type(q) not in (int, float)
        x = astype(x, np.float64) if strong and np.asarray(q).dtype == np.float64 else x
    rows, axes, shape = rows_of(x, axis)
    n = rows.shape[-1]
    if not n:
        raise ShapeError(f"{function}: there is no quantile of no elements")
    sorted_rows = sort(rows)
    last = sorted_rows[..., -1]
    if isinstance(q, Tensor) or skip_nan:
        # Places are found in float64, as numpy does; in the dtype of a tensor of shares, which have a derivative.
        kind = x.dtype if x.dtype in FLOATS and isinstance(q, Tensor) else np.dtype(np.float64)
        shares = as_floats(Literal(np.zeros((), kind)), q if isinstance(q, Tensor) else np.asarray(q, kind))[1]
        count: Tensor = Literal(np.asarray(n, kind))
        if skip_nan:
            count = sum(astype(logical_not(isnan(rows)), kind), -1, keepdims=True)
        values = _between(sorted_rows, count, ravel(shares), method)
        values = values if skip_nan else WHERE(isnan(last[..., None]), last[..., None], values)
        found = reshape(moveaxis(values, -1, 0), (*shares.shape, *shape))
        return kept_axes(found, x, axes, keepdims, shares.shape)
    wanted, each = np.asarray(q, np.float64), []
    for first, second, between in _places(wanted, n, method):
        low, high = sorted_rows[..., first], sorted_rows[..., second]
        value = low if not between else high if between == 1 else low + (high - low) * between
        if between and between != 1 and between >= 0.5:  # from the nearer side, as numpy rounds
            value = high - (high - low) * (1 - between)
        each.append(WHERE(isnan(last), last, value))
    return _as_shares(each, wanted.shape, x, axes, shape, keepdims)


def _between(sorted_rows: Tensor, count: Tensor, shares: Tensor, method: str) -> Tensor:
    """The quantiles of each row's first `count` elements, for a vector of shares: its last axis is that of the shares.

    At an element the derivative by a share is that towards larger shares, at the largest one towards smaller ones.
    """
    alpha, beta = CONTINUOUS.get(method, (1.0, 1.0))
    last = count - 1
    if method in STEPPED:
        at = count * shares - (1.5 if method == "closest_observation" else 1)
    else:
        at = last * shares if alpha == beta == 1 else count * shares + (alpha + shares * (1 - alpha - beta) - 1)
    at = clip(at, -1.0 if method in STEPPED else 0.0, last)
    low = floor(minimum(at, maximum(last - 1, 0.0)))
    shape = (*sorted_rows.shape[:-1], shares.size)
    places = [astype(clip(k, 0.0, maximum(last, 0.0)), np.intp) for k in (low, low + 1)]
    first, second = [take_along_axis(sorted_rows, broadcast_to(place, shape), -1) for place in places]
    between = at - low
    if method == "lower":
        return WHERE(equal(between, 1), second, first)
    if method in ("higher", "inverted_cdf"):
        return WHERE(less(0, between), second, first)
    if method == "nearest":
        return WHERE(equal(ROUND(at), low), first, second)
    if method == "closest_observation":
        return WHERE(logical_or(less(0, between), equal(mod(low, 2), 0)), second, first)
    if method == "midpoint":
        between = where(equal(between, 1), 1.0, astype(less(0, between), at.dtype) * 0.5)
    elif method == "averaged_inverted_cdf":
        between = where(less(0, between), 1.0, 0.5 + 0.0 * at)
    width, between = second - first, astype(between, as_floats(sorted_rows)[0].dtype)
    # An element itself, which may be infinite: nothing times an infinite width.
    exact = logical_and(logical_or(equal(between, 0), equal(between, 1)), logical_not(isfinite(width)))
    width = where(exact, 0.0, width)
    return where(less(between, 0.5), first + width * between, second - width * (1 - between))


@implements(np.quantile)
def quantile(
    a: Operand,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: Operand | None = None,
) -> Tensor:
    """The values that shares `q`, in [0, 1], of the elements over `axis` (all axes when None) do not exceed.

    Where a share falls between two elements, `method` says how they are combined; NaN where an element is NaN. It has a
    derivative by `q`, too, where the method interpolates.
    `weights`, one for each element or for each place along `axis`, need the method "inverted_cdf".
    """
    refuse("quantile", out=(out,), overwrite_input=(overwrite_input, False))
    q = shares_of("quantile", q, 1)
    return quantile_of("quantile", a, q, axis, method, flag(keepdims), weights)


def _check_shares(q: Array, most: int, where: str) -> None:
    if not ((q >= 0) & (q <= most)).all():
        raise ConfigurationError(f"{where}: q must lie between 0 and {most}, got {q}")


def _bind_shares(arrays: Sequence[Array], out: Array, scratch: Scratch, of: str, most: int) -> Sequence[Call]:
    (q,) = arrays
    return [partial(_check_shares, q, most, here(of)), partial(np.copyto, out, q)]


CHECK_SHARES = check_op("check_shares", _check_shares, leading)
SHARES: Op = replace(
    identity,
    name="shares",
    view=None,
    bind=_bind_shares,
    in_order=False,
    vjp=(lambda g, y, q, of, most: g,),
    jvp=lambda t, y, q, of, most: t[0],
    checks=lambda q, of, most: (CHECK_SHARES, (q,), {"of": of, "most": most}),
    scalar=None,
    simplify=None,
    doc="shares of a quantile, which lie between 0 and the attribute `most`",
)


RULES: dict[str, Callable[[Array], bool]] = {
    "no zero": lambda x: bool(x.all()),
    "not negative": lambda x: bool((x >= 0).all()),
    "whole": lambda x: bool((x == np.round(x)).all()),
    "finite": lambda x: bool(np.isfinite(x).all()),
    "rising": lambda x: bool((x[..., :-1] <= x[..., 1:]).all()),
    "strictly rising": lambda x: bool((x[..., :-1] < x[..., 1:]).all()),
    "monotonic": lambda x: bool(
        ((x[..., :-1] <= x[..., 1:]).all(-1) | (x[..., :-1] >= x[..., 1:]).all(-1)).all()  # each row by itself
    ),
}
"""What functions of numpy's names ask of values, by its name, of a vector along the last axis."""


def _check_values(values: Array, rule: str, message: str, where: str) -> None:
    if not RULES[rule](values):
        raise ConfigurationError(f"{where}: {message}")


CHECK_VALUES = check_op("check_values", _check_values, leading)


def check_values(function: str, x: Tensor, rule: str, message: str) -> None:
    """Raise ConfigurationError where the values of `x` break one of the `RULES`; in a trace, in each replay."""
    CHECK_VALUES.apply((x,), {"of": function, "rule": rule, "message": message})


def shares_of(function: str, q: Any, most: int) -> Any:
    """Return the shares `q` of a quantile, a tensor as one of floats.

    Raises:
        DTypeError, ConfigurationError: they are no numbers from 0 to `most`; in a traced function in each replay.
    """
    if isinstance(q, Tensor):
        return SHARES(*as_floats(q), of=function, most=most)
    try:
        shares = np.asarray(q, np.float64)
    except (TypeError, ValueError):
        raise DTypeError(f"{function}: q must be numbers, got {q!r}") from None
    _check_shares(shares, most, function)
    return q


@implements(np.percentile)
def _percentile(
    a: Operand,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: Operand | None = None,
) -> Tensor:
    refuse("percentile", out=(out,), overwrite_input=(overwrite_input, False))
    x = as_tensor(a)
    q = percent(shares_of("percentile", q, 100))
    return quantile_of("percentile", x, q, axis, method, flag(keepdims), weights)


def percent(q: Any) -> Any:
    """Return percentages as shares; a number of Python's stays one, which has no dtype."""
    return q / 100 if isinstance(q, Tensor) or type(q) in (int, float) else np.true_divide(q, 100)
