"""Reductions: sums, extrema and their stable exponential kin, over any axes.

A sum over the first or the last axes of contiguous memory, or over both, is a product with a vector of ones, several
times faster than `add.reduce`, which takes some 25 ns for each short row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.op import (
    Call,
    Op,
    Scratch,
    Shape,
    as_tensor,
    as_tensors,
    c_ordered,
    define,
    float_only,
    implements,
    linear_jvp,
    per_element,
    register,
)
from py_engine.ad.ops.arguments import as_dtype, axis_of, flag, refuse, same_dtype, whole
from py_engine.ad.ops.elementary import (
    WHERE,
    astype,
    div,
    equal,
    equal_mask,
    exp,
    less_equal,
    logaddexp,
    maximum,
    minimum,
    not_equal,
    sqrt,
    square,
    where,
)
from py_engine.ad.ops.shape import along_axes, broadcast_to, concatenate, reshape, transpose
from py_engine.ad.tensor import FLOATS, NO_VALUE, Array, Axis, Literal, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, ShapeError

Axes: TypeAlias = tuple[int, ...]

LONGEST_DOT = 4096  # beyond this length numpy's pairwise sum is worth its time: a dot product is less exact


def normalize_axes(axis: Axis, ndim: int) -> Axes:
    """Return the axes as a sorted tuple of non-negative numbers; None means all.

    Raises:
        ShapeError: an axis is out of range or named twice.
        DTypeError: an axis is no integer.
    """
    if axis is None:
        return (*range(ndim),)
    if axis.__class__ is int and 0 <= axis < ndim:
        return (axis,)
    given = [whole(a, "the axis") for a in (axis if isinstance(axis, tuple) else (axis,))]
    axes = tuple(sorted(a + ndim if a < 0 else a for a in given))
    if (axes and not 0 <= axes[0] <= axes[-1] < ndim) or len(set(axes)) < len(axes):
        raise ShapeError(f"axis {axis} does not fit an array of {ndim} dimensions")
    return axes


def kept(shape: Shape, axes: Axes) -> Shape:
    """Return the shape with the reduced axes kept at length one."""
    return tuple([1 if i in axes else n for i, n in enumerate(shape)])


def _infer(x: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
    return _reduced(x.shape, axes, keepdims), float_only(x.dtype)


@lru_cache(maxsize=64)
def kind_of_sum(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a sum or product, of whole numbers and truth values as numpy's: they are counted."""
    return np.add.reduce(np.empty(0, dtype)).dtype if dtype.kind in "iub" else float_only(dtype)  # type: ignore[no-any-return]


def _infer_sum(x: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
    return _reduced(x.shape, axes, keepdims), x.dtype if x.dtype in FLOATS else kind_of_sum(x.dtype)


def _reduced(shape: Shape, axes: Axes, keepdims: bool) -> Shape:
    if keepdims:
        return kept(shape, axes)
    if len(axes) == len(shape):
        return ()
    return tuple([n for i, n in enumerate(shape) if i not in axes])


def _infer_extremum(x: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
    if not math.prod(x.shape[a] for a in axes):
        raise ShapeError(f"no largest or smallest element along an empty axis of shape {x.shape}")
    return _reduced(x.shape, axes, keepdims), x.dtype if x.dtype.kind in "iub" else float_only(x.dtype)


def spread(reduced: Tensor, x: Tensor, axes: Axes) -> Tensor:
    """Return a reduction's result in a shape that broadcasts against its input `x`."""
    return reshape(reduced, kept(x.shape, axes))


# Sums -----------------------------------------------------------------------------------------------------


def ends_of(shape: Shape, axes: Axes) -> tuple[int, int, int] | None:
    """Return lengths (first, kept, last) where a reduction is over the first and last of them alone, else None.

    `shape` is what is reduced, over some axes and not all; lengths are products of neighbouring ones, or 1.
    """
    first = last = 0
    while first < len(axes) and axes[first] == first:
        first += 1
    while first + last < len(axes) and axes[-1 - last] == len(shape) - 1 - last:
        last += 1
    if first + last < len(axes):
        return None
    return math.prod(shape[:first]), math.prod(shape[first : len(shape) - last]), math.prod(shape[len(shape) - last :])


def bind_sum(arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes, keepdims: bool) -> Sequence[Call]:
    """Return the calls that compute the sum over axes."""
    (x,) = arrays
    if x.flags.c_contiguous and out.flags.c_contiguous and x.size and 0 < len(axes) < x.ndim and x.dtype in FLOATS:
        ends = ends_of(x.shape, axes)
        if ends is not None and ends[2] <= LONGEST_DOT:
            first, middle, last = ends
            calls: list[Call] = []
            rows, total = x.reshape(first, middle * last), out.reshape(-1)
            if last > 1:
                rows = total if first == 1 else scratch((first * middle,), x.dtype)
                calls.append(partial(np.matmul, x.reshape(-1, last), np.ones(last, x.dtype), rows))
            if first > 1 or last == 1:
                calls.append(partial(np.matmul, np.ones(first, x.dtype), rows.reshape(first, -1), total))
            return calls
    return [partial(np.add.reduce, x, axes, None, out, keepdims)]


def _reducing(ufunc: np.ufunc) -> Callable[..., None]:
    def kernel(x: Array, out: Array, axes: Axes, keepdims: bool) -> None:
        ufunc.reduce(x, axes, None, out=out, keepdims=keepdims)

    return kernel


SUM: Op = define(
    name="sum",
    infer=_infer_sum,
    kernel=_reducing(np.add),
    bind=bind_sum,
    vjp=(lambda g, y, x, axes, keepdims: broadcast_to(spread(g, x, axes) if g.shape else g, x.shape),),
    jvp=linear_jvp("sum"),
    batch=along_axes,
    scalar="{0} + 0.0",
    flops=per_element(1),
    doc="sum over axes",
)


LEAST_DOT = 32
"""Below this length of the last axes products are made first: each row takes 10 to 15 ns."""


def sums_products(x: Tensor, axes: Axes) -> bool:
    """Whether `SUM_OF_PRODUCTS` is for products like `x`, summed over these axes."""
    ends = ends_of(x.shape, axes)
    return x.dtype in FLOATS and x.size > 0 and ends is not None and LEAST_DOT <= ends[2] <= LONGEST_DOT


def _infer_products(a: Tensor, b: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
    return _infer_sum(a, axes, keepdims)


def _bind_products(arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes, keepdims: bool) -> Sequence[Call]:
    a, b = arrays
    first, middle, last = ends_of(a.shape, axes)  # type: ignore[misc]  # by `sums_products`
    total = out.reshape(-1)
    rows = total if first == 1 else scratch((first * middle,), a.dtype)
    calls: list[Call] = [partial(np.vecdot, a.reshape(-1, last), b.reshape(-1, last), rows)]
    if first > 1:
        calls.append(partial(np.matmul, np.ones(first, a.dtype), rows.reshape(first, middle), total))
    return calls


SUM_OF_PRODUCTS: Op = define(
    name="sum_of_products",
    infer=_infer_products,
    bind=_bind_products,
    accepts=c_ordered,
    fused=True,
    flops=per_element(2),
    doc="sum over first and last axes of the products of two arrays of one shape, element by element",
)


@implements(np.sum)
def sum(
    a: Operand,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = NO_VALUE,
    initial: Operand = NO_VALUE,
    where: Operand = NO_VALUE,
) -> Tensor:
    """Sum over `axis` (all axes when None) of the elements where `where` holds, begun with the number `initial`."""
    x = as_tensor(a)
    if not (dtype is None is out and initial is NO_VALUE and (where is NO_VALUE or where is True)):
        x = _chosen("sum", x, dtype, out, where, 0)
    found = SUM.apply(
        (x,), {"axes": normalize_axes(axis, len(x.shape)), "keepdims": keepdims is not NO_VALUE and flag(keepdims)}
    )
    return found if initial is NO_VALUE else found + _start("sum", found, initial)


def _chosen(function: str, x: Tensor, dtype: Any, out: Any, where: Any, neutral: float) -> Tensor:
    """Return the elements to reduce, of the wanted dtype, with the neutral number where `where` does not hold."""
    refuse(function, out=(out,))
    if dtype is not None and dtype is not NO_VALUE:
        x = as_numbers(function, x, dtype)
    condition = holds(function, x, where)
    if condition is None:
        return x
    kind = x.dtype if math.isfinite(neutral) else float_only(x.dtype)
    return WHERE(condition, x, Literal(np.array(neutral, kind)))


def as_numbers(function: str, x: Tensor, dtype: Any) -> Tensor:
    """Return what is to be reduced in the dtype that the result is to have."""
    wanted = as_dtype(dtype)
    if wanted.kind in "iu" and kind_of_sum(wanted) != wanted:
        raise DTypeError(
            f"{function}: dtype={wanted} is not taken on tensors, whose sums and products of whole numbers are of "
            f"{kind_of_sum(wanted)}; convert with astype() after"
        )
    if wanted == np.bool_:
        raise DTypeError(f"{function}: a result of truth values is not supported; compare, e.g. np.any(x != 0)")
    return astype(x, dtype)


def holds(function: str, x: Tensor, where: Any) -> Tensor | None:
    """Return the condition `where` of a reduction in the shape of `x`; None where it holds everywhere.

    Raises:
        DTypeError: it is not made of truth values.
        ShapeError: it does not broadcast to the shape of `x`.
    """
    if where is NO_VALUE or where is True:
        return None
    condition = as_tensor(where)
    if condition.dtype != np.bool_:
        raise DTypeError(f"{function}: where must be truth values, got {condition.dtype}; compare, e.g. x > 0")
    return broadcast_to(condition, x.shape)


def _start(function: str, found: Tensor, initial: Any) -> Tensor:
    """Return the number that a reduction begins with, in the dtype of what it found."""
    if initial is None:  # which numpy takes for no start at all, not for the usual one
        raise NotDifferentiableError(f"numpy.{function} on tensors does not take initial=None; leave the argument out")
    _, start = as_tensors((found, initial))
    if start.shape:
        raise ShapeError(f"{function}: initial must be one number, got shape {start.shape}")
    if start.dtype != found.dtype:
        raise DTypeError(f"{function}: initial of {start.dtype} does not fit {found.dtype}; convert with astype()")
    return start


@implements(np.mean)
def mean(
    a: Operand,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = NO_VALUE,
    *,
    where: Operand = NO_VALUE,
) -> Tensor:
    """Arithmetic mean over `axis` (all axes when None) of the elements where `where` holds; of none it is NaN."""
    x = as_tensor(a)
    if not (dtype is None is out and (where is NO_VALUE or where is True)):
        condition = holds("mean", x, where)
        whole_numbers = dtype is None and x.dtype.kind in "iub"
        x = _chosen("mean", x, np.float64 if whole_numbers else dtype, out, where, 0)
        float_only(x.dtype)
        if condition is not None:
            return div(sum(x, axis, keepdims=keepdims), astype(_count(condition, axis, keepdims), x.dtype))
    if x.dtype.kind in "iub":  # which are counted, and have no derivative
        x = astype(x, np.float64)
    axes = normalize_axes(axis, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    total = sum(x, axes, keepdims=keepdims)
    return div(total, float(count)) if count else total * np.nan  # times 1 / count equal numbers have another mean


def _count(condition: Tensor, axis: Axis, keepdims: Any) -> Tensor:
    """Return how often a condition holds; float32 counts no further than 2**24."""
    return sum(astype(condition, np.float64), axis, keepdims=keepdims)


@implements(np.var)
def var(
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
    """Variance over `axis`: squared deviations from the mean, summed and divided by count - ddof.

    Where `ddof` is the count or more, the divisor is 0, as numpy's: infinity, or NaN where all elements are equal.
    `where` says which elements count, and `mean` is what they deviate from where that is known already.
    """
    refuse("var", out=(out,))
    centred, axes, divisor = _deviations("var", as_tensor(a), axis, dtype, ddof, correction, where, mean, keepdims)
    total = sum(square(centred), axes, keepdims=keepdims)
    return total * (1 / divisor) if isinstance(divisor, float) and divisor else div(total, divisor)


@implements(np.std)
def std(
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
    """Standard deviation over `axis`, with divisor count - ddof; subgradient 0 where all elements are equal.

    Where `ddof` is the count or more, the divisor is 0, as numpy's: infinity, or NaN where all elements are equal.
    `where` says which elements count, and `mean` is what they deviate from where that is known already.
    """
    refuse("std", out=(out,))
    centred, axes, divisor = _deviations("std", as_tensor(a), axis, dtype, ddof, correction, where, mean, keepdims)
    total = NORM(centred, axes=axes, keepdims=flag(keepdims))
    if isinstance(divisor, float):
        return total * (1 / math.sqrt(divisor)) if divisor else div(total, 0.0)
    return div(total, sqrt(divisor))


def _deviations(
    function: str,
    x: Tensor,
    axis: Axis,
    dtype: Any,
    ddof: Any,
    correction: Any,
    where: Any,
    centre: Any,
    keepdims: Any,
) -> tuple[Tensor, Axes, float | Tensor]:
    """Return x minus its mean, the axes, and the divisor: count - ddof, or 0 where that is negative."""
    if correction is not NO_VALUE:
        if not (isinstance(ddof, (int, float)) and ddof == 0):
            raise ConfigurationError(f"{function}: ddof and correction mean the same; give one of them")
        ddof = correction
    if not isinstance(ddof, (int, float, np.integer, np.floating)):
        raise DTypeError(f"{function}: ddof must be a number, got {ddof!r}")
    axes = normalize_axes(axis, x.ndim)
    if dtype is not None or x.dtype.kind in "iub":
        x = astype(x, np.float64 if dtype is None else dtype)
    float_only(x.dtype)
    condition = holds(function, x, where)
    if centre is NO_VALUE:
        centre = mean(x, axes, keepdims=True, where=where)
    centred = x - centre
    if centred.shape != x.shape:
        raise ShapeError(f"{function}: the mean, {np.shape(centre)}, does not broadcast to the shape {x.shape}")
    if condition is None:
        left = math.prod(x.shape[a] for a in axes) - float(ddof)
        return centred, axes, left if not left <= 0 else 0.0
    count = astype(_count(condition, axes, keepdims), x.dtype) - float(ddof)
    zero = Literal(np.zeros((), x.dtype))
    return WHERE(condition, centred, zero), axes, WHERE(less_equal(count, 0), zero, count)


def _kernel_norm(x: Array, out: Array, axes: Axes, keepdims: bool) -> None:
    # Scaled by the largest element, so that squares neither overflow nor vanish.
    scale = np.empty(kept(x.shape, axes), x.dtype)
    np.maximum.reduce(np.abs(x), axes, out=scale, keepdims=True, initial=0)
    scale[(scale == 0) | ~np.isfinite(scale)] = 1
    total = np.add.reduce(np.square(x / scale), axes, keepdims=True)
    np.multiply(np.sqrt(total), scale, out.reshape(total.shape))


def _direction(y: Tensor, x: Tensor, axes: Axes) -> Tensor:
    length = spread(y, x, axes)
    at_origin = equal(length, 0)  # where the subgradient is 0, and so is what is differentiated once more
    return where(at_origin, 0, div(x, where(at_origin, 1, length)))


NORM: Op = define(
    name="norm",
    infer=_infer,
    kernel=_kernel_norm,
    vjp=(lambda g, y, x, axes, keepdims: spread(g, x, axes) * _direction(y, x, axes),),
    jvp=lambda t, y, x, axes, keepdims: sum(t[0] * _direction(y, x, axes), axes, keepdims=keepdims),
    flops=per_element(2),
    batch=along_axes,
    doc="Euclidean norm over axes; subgradient 0 at the origin",
)


# Extrema --------------------------------------------------------------------------------------------------


# Ties share the gradient equally, so that it stays a directional derivative's mean and sums to one. Selected, not
# multiplied by 0: elements that are not the largest have no gradient even where that of the largest is infinite.


def _to_winners(g: Tensor, y: Tensor, x: Tensor, axes: Axes) -> Tensor:
    won, count = _winners(y, x, axes)
    return WHERE(won, spread(g, x, axes) / maximum(count, 1), 0)  # none has won where the largest is NaN


def _of_winners(t: Tensor, y: Tensor, x: Tensor, axes: Axes, keepdims: bool) -> Tensor:
    won, count = _winners(y, x, axes)
    # None has won where the largest is NaN: its derivative is 0 then, backward as forward, as `maximum` has it.
    total = sum(WHERE(won, t, 0), axes, keepdims=True) / maximum(count, 1)
    return total if keepdims else reshape(total, y.shape)


def _winners(y: Tensor, x: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
    """Return which elements are the largest, and how many over axes."""
    largest = spread(y, x, axes)
    won = equal(x, largest)
    ones = astype(won, x.dtype) if x.shape else equal_mask(x, largest)  # of a single number the same, among floats
    return won, sum(ones, axes, keepdims=True)


def extremum_op(
    name: str,
    ufunc: np.ufunc,
    larger: Callable[..., Tensor],
    worst: float,
    what: str,
    *stands_in_for: Any,
    in_table: bool = True,
) -> tuple[Op, Callable[..., Tensor]]:
    """Return an op for the largest or smallest element over axes, and its function, which stands in for numpy's."""
    op = Op(
        name=name,
        infer=_infer_extremum,
        kernel=_reducing(ufunc),
        vjp=(lambda g, y, x, axes, keepdims: _to_winners(g, y, x, axes),),
        jvp=lambda t, y, x, axes, keepdims: _of_winners(t[0], y, x, axes, keepdims),
        batch=along_axes,
        scalar="{0}",
        flops=per_element(1),
        doc=f"{what} over axes; ties share the gradient",
    )
    if in_table:
        register(op)

    @implements(*stands_in_for)
    def extremum(
        a: Operand,
        axis: Axis = None,
        out: None = None,
        keepdims: bool = NO_VALUE,
        initial: Operand = NO_VALUE,
        where: Operand = NO_VALUE,
    ) -> Tensor:
        x = as_tensor(a)
        axes, keep = normalize_axes(axis, len(x.shape)), keepdims is not NO_VALUE and flag(keepdims)
        attrs = {"axes": axes, "keepdims": keep}
        if not (out is None and initial is NO_VALUE and (where is NO_VALUE or where is True)):
            if where is not NO_VALUE and where is not True and initial is NO_VALUE:
                raise ConfigurationError(f"{name}: where needs initial, which the result is where it holds nowhere")
            x = _chosen(name, x, None, out, where, worst)
            if initial is not NO_VALUE:
                start = _start(name, x, initial)
                if not math.prod(x.shape[d] for d in axes):
                    return broadcast_to(start, _reduced(x.shape, axes, keep))
                return larger(op.apply((x,), attrs), start)
        return op.apply((x,), attrs)

    about = f"{what.capitalize()} over `axis` (all axes when None); ties share the gradient equally."
    return op, _named(extremum, name, about)


def _named(function: Callable[..., Tensor], name: str, doc: str) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


MAX, max = extremum_op("max", np.maximum, maximum, -np.inf, "largest element", np.max, np.amax)
MIN, min = extremum_op("min", np.minimum, minimum, np.inf, "smallest element", np.min, np.amin)


# Products -------------------------------------------------------------------------------------------------


def _products_of_others(x: Tensor, axes: Axes) -> Tensor:
    """Return for each element the product of the others over axes: no division, so that any of them may be 0."""
    order = tuple(a for a in range(x.ndim) if a not in axes) + axes
    moved = transpose(x, order)
    count = math.prod(x.shape[a] for a in axes)
    found = _without_each(reshape(moved, (x.size // count if count else 0, count)))
    return transpose(reshape(found, moved.shape), tuple(sorted(range(x.ndim), key=order.__getitem__)))


def _without_each(rows: Tensor) -> Tensor:
    # Pair by pair: without the one of a pair, there remain the other and what remains without the pair.
    count = rows.shape[1]
    if count <= 1:
        # Ones that read the rows, as those of more columns do.
        return WHERE(equal(rows, rows), 1, Literal(np.ones((), rows.dtype)))
    half = count // 2
    left, right, odd = rows[:, :half], rows[:, half : 2 * half], rows[:, 2 * half :]
    without = _without_each(concatenate([left * right, odd], axis=1))
    return concatenate([without[:, :half] * right, without[:, :half] * left, without[:, half:]], axis=1)


PROD: Op = define(
    name="prod",
    infer=_infer_sum,
    kernel=_reducing(np.multiply),
    vjp=(lambda g, y, x, axes, keepdims: spread(g, x, axes) * _products_of_others(x, axes),),
    jvp=lambda t, y, x, axes, keepdims: sum(t[0] * _products_of_others(x, axes), axes, keepdims=keepdims),
    flops=per_element(1),
    batch=along_axes,
    doc="product over axes",
)


@implements(np.prod)
def prod(
    a: Operand,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = NO_VALUE,
    initial: Operand = NO_VALUE,
    where: Operand = NO_VALUE,
) -> Tensor:
    """Product over `axis` (all axes when None) of the elements where `where` holds, begun with the number `initial`."""
    x = _chosen("prod", as_tensor(a), dtype, out, where, 1)
    found = PROD(x, axes=normalize_axes(axis, x.ndim), keepdims=flag(keepdims))
    return found if initial is NO_VALUE else found * _start("prod", found, initial)


# Truth values and positions: constant on purpose ----------------------------------------------------------


def _quantifier(
    name: str, ufunc: np.ufunc, neutral: bool, what: str, stands_in_for: Any
) -> tuple[Op, Callable[..., Tensor]]:
    def infer(x: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
        return _reduced(x.shape, axes, keepdims), np.dtype(np.bool_)

    doc = "whether " + what.format("axes")
    op = define(name, infer, _reducing(ufunc), constant=True, flops=per_element(1), batch=along_axes, doc=doc)

    @implements(stands_in_for, constant=True)
    def quantifier(
        a: Operand, axis: Axis = None, out: None = None, keepdims: bool = NO_VALUE, *, where: Operand = NO_VALUE
    ) -> Tensor:
        x = as_tensor(a)
        refuse(name, out=(out,))
        condition = holds(name, x, where)
        if condition is not None:
            x = WHERE(condition, x if x.dtype == np.bool_ else not_equal(x, 0), Literal(np.array(neutral)))
        return op(x, axes=normalize_axes(axis, x.ndim), keepdims=flag(keepdims))

    return op, _named(quantifier, name, "Whether " + what.format("`axis` (all axes when None)") + ".")


ANY, any = _quantifier("any", np.logical_or, False, "any element over {} is not 0", np.any)
ALL, all = _quantifier("all", np.logical_and, True, "all elements over {} are not 0", np.all)


def _infer_position(x: Tensor, axis: int | None, keepdims: bool) -> tuple[Shape, Any]:
    axes = normalize_axes(axis, x.ndim)
    if not math.prod(x.shape[a] for a in axes):
        raise ShapeError(f"no largest or smallest element along an empty axis of shape {x.shape}")
    return _reduced(x.shape, axes, keepdims), np.dtype(np.intp)


def _batch_position(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    if attrs["axis"] is not None:
        return along_axes(op, count, mapped, inputs, attrs)  # type: ignore[no-any-return]
    (x,) = inputs
    found = op(reshape(x, (count, math.prod(x.shape[1:]))), axis=1, keepdims=False)
    return reshape(found, (count, *(1,) * (x.ndim - 1))) if attrs["keepdims"] else found


def position_op(name: str, kernel: Callable[..., None], what: str, in_table: bool = True) -> Op:
    """Return an op for the position of an element along an axis, or among all of them."""
    doc = f"position of the {what} along an axis, of equal ones the first"
    op = Op(name, _infer_position, kernel, constant=True, flops=per_element(1), batch=_batch_position, doc=doc)
    return register(op) if in_table else op


def _position(name: str, find: Any, what: str) -> tuple[Op, Callable[..., Tensor]]:
    def kernel(x: Array, out: Array, axis: int | None, keepdims: bool) -> None:
        find(x, axis, out, keepdims=keepdims)

    op = position_op(name, kernel, f"{what} element")

    @implements(find, constant=True)
    def position(a: Operand, axis: int | None = None, out: None = None, *, keepdims: bool = NO_VALUE) -> Tensor:
        x = as_tensor(a)
        refuse(name, out=(out,))
        return op(x, axis=None if axis is None else axis_of(axis, x.ndim, name), keepdims=flag(keepdims))

    about = (
        f"Position of the {what} element along `axis`, or among all (in C order) when None; of equal ones the first."
    )
    return op, _named(position, name, about)


ARGMAX, argmax = _position("argmax", np.argmax, "largest")
ARGMIN, argmin = _position("argmin", np.argmin, "smallest")


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
        *bind_sum((spread,), total, scratch, reduced, True),
        partial(np.log, total, log),
        partial(np.add, log, largest, total),
    ]


def _infer_logsumexp(x: Tensor, axes: Axes, keepdims: bool) -> tuple[Shape, Any]:
    float_only(x.dtype)
    return _infer_extremum(x, axes, keepdims)


def _finite(y: Tensor) -> Tensor:
    # A row of -inf has logsumexp -inf; shifting by 0 instead gives it the gradient 0 rather than NaN.
    return where(equal(y, -np.inf), 0, y)


LOGSUMEXP: Op = define(
    name="logsumexp",
    infer=_infer_logsumexp,
    bind=_bind_logsumexp,
    vjp=(lambda g, y, x, axes, keepdims: spread(g, x, axes) * exp(x - _finite(spread(y, x, axes))),),
    jvp=lambda t, y, x, axes, keepdims: sum(t[0] * exp(x - _finite(spread(y, x, axes))), axes, keepdims=keepdims),
    flops=per_element(4),
    batch=along_axes,
    doc="log of the sum of exponentials over axes, without overflow",
)


def logsumexp(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return log(sum(exp(x))) over `axis` (all axes when None), without overflow."""
    x = as_tensor(x)
    return LOGSUMEXP(x, axes=normalize_axes(axis, x.ndim), keepdims=flag(keepdims))


def _infer_same(x: Tensor, axes: Axes) -> tuple[Shape, Any]:
    return x.shape, _infer_logsumexp(x, axes, True)[1]


def _bind_softmax(arrays: Sequence[Array], out: Array, scratch: Scratch, axes: Axes) -> Sequence[Call]:
    (x,) = arrays
    column = scratch(kept(x.shape, axes), x.dtype)
    total = scratch(x.shape, x.dtype)
    return [
        *_bind_shift(x, column, axes, scratch),
        *bind_subtract(x, column, out),
        partial(np.exp, out, out),
        *bind_sum((out,), column, scratch, axes, True),
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
        *bind_sum((powers,), column, scratch, axes, True),
        partial(np.log, column, column),
        partial(np.copyto, powers, column),
        partial(np.subtract, out, powers, out),
    ]


def _softmax_pull(g: Tensor, y: Tensor, axes: Axes) -> Tensor:
    return y * (g - sum(g * y, axes, keepdims=True))


SOFTMAX: Op = define(
    name="softmax",
    infer=_infer_same,
    bind=_bind_softmax,
    vjp=(lambda g, y, x, axes: _softmax_pull(g, y, axes),),
    jvp=lambda t, y, x, axes: _softmax_pull(t[0], y, axes),
    flops=per_element(5),
    batch=along_axes,
    doc="exponentials that sum to one over axes, without overflow",
)
LOG_SOFTMAX: Op = define(
    name="log_softmax",
    infer=_infer_same,
    bind=_bind_log_softmax,
    vjp=(lambda g, y, x, axes: g - exp(y) * sum(g, axes, keepdims=True),),
    jvp=lambda t, y, x, axes: t[0] - sum(exp(y) * t[0], axes, keepdims=True),
    flops=per_element(5),
    batch=along_axes,
    doc="logarithm of softmax, without overflow",
)


def softmax(x: Operand, axis: Axis = -1) -> Tensor:
    """Exponentials that sum to one over `axis`."""
    x = as_tensor(x)
    return SOFTMAX(x, axes=normalize_axes(axis, x.ndim))


def log_softmax(x: Operand, axis: Axis = -1) -> Tensor:
    """Logarithm of `softmax`."""
    x = as_tensor(x)
    return LOG_SOFTMAX(x, axes=normalize_axes(axis, x.ndim))


# Reductions of ufuncs -------------------------------------------------------------------------------------


def _ufunc_reduction(ufunc: np.ufunc, reduction: Callable[..., Tensor], *named: str) -> None:
    """Enter a reduction as the stand-in for a ufunc's `reduce`, which takes the first axis where none is given.

    Args:
        ufunc: numpy's.
        reduction: a function of the array, `axis`, `keepdims` and those that are `named`.
        named: which of `dtype`, `initial` and `where` it takes.
    """
    name = f"{ufunc.__name__}.reduce"

    @implements((ufunc, "reduce"))
    def reduce(
        array: Operand,
        /,
        axis: Axis = 0,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: Operand = NO_VALUE,
        where: Operand = True,
    ) -> Tensor:
        refuse(name, out=(out,))
        given = {
            key: value for key, value in (("dtype", dtype), ("initial", initial), ("where", where)) if key in named
        }
        x = as_tensor(array)
        if "dtype" not in named and dtype is not None and x.dtype in FLOATS:
            x = astype(x, dtype)
        found = reduction(x, axis=axis, keepdims=flag(keepdims), **given)
        if "initial" not in named:
            refuse(name, initial=("None" if initial is None else initial,))
        same_dtype(name, dtype, found)
        return found


def _logsumexp_where(a: Tensor, axis: Axis, keepdims: bool, initial: Any, where: Any) -> Tensor:
    found = logsumexp(_chosen("logaddexp.reduce", a, None, None, where, -np.inf), axis, keepdims)
    return found if initial is NO_VALUE else logaddexp(found, _start("logaddexp.reduce", found, initial))


_ufunc_reduction(np.add, sum, "dtype", "initial", "where")
_ufunc_reduction(np.multiply, prod, "dtype", "initial", "where")
_ufunc_reduction(np.logical_or, any, "where")
_ufunc_reduction(np.logical_and, all, "where")
_ufunc_reduction(np.maximum, max, "initial", "where")
_ufunc_reduction(np.minimum, min, "initial", "where")
_ufunc_reduction(np.logaddexp, _logsumexp_where, "initial", "where")
