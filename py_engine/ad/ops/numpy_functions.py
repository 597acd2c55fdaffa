"""numpy's functions that are written in ops, and that only numpy has a name for: they are reached through numpy."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.mutation import watch_setting
from py_engine.ad.op import (
    NUMPY,
    as_floats,
    as_reals,
    as_tensor,
    as_tensors,
    elementwise,
    float_only,
    implements,
    in_float64,
    in_one_dtype,
    infer_number,
)
from py_engine.ad.ops.along import SEARCHSORTED, argsort, check_values, cumprod, cumsum, diff, sort
from py_engine.ad.ops.arguments import axis_of, checked, flag, refuse, same_dtype, whole, wholes
from py_engine.ad.ops.decompositions import inv, solve
from py_engine.ad.ops.elementary import (
    abs,
    astype,
    clip,
    copysign,
    deg2rad,
    equal,
    equal_mask,
    floor_divide,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log10,
    logaddexp,
    logical_and,
    logical_not,
    mod,
    rad2deg,
    sign,
    step,
    stop_gradient,
    trunc,
    where,
)
from py_engine.ad.ops.indexing import take_along_axis
from py_engine.ad.ops.linalg import MATMUL, cross, dot, matmul, outer, tensordot
from py_engine.ad.ops.reduction import sum
from py_engine.ad.ops.shape import (
    broadcast_to,
    concatenate,
    diagflat,
    diagonal,
    expand_dims,
    flip,
    from_places,
    moveaxis,
    part_of,
    ravel,
    reshape,
    stack,
    swapaxes,
    trace,
    transpose,
)
from py_engine.ad.tensor import Axis, Literal, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, ShapeError

# Elementwise ------------------------------------------------------------------------------------------------

NUMPY[np.radians], NUMPY[np.degrees] = deg2rad, rad2deg


@implements(np.fabs)
def _fabs(x: Operand, /) -> Tensor:
    return abs(*as_reals(x))


@implements(np.positive)
def _positive(x: Operand, /) -> Tensor:
    return _not_of_truth_values("positive", x)


@implements(np.conjugate)
def _conjugate(x: Operand, /) -> Tensor:
    return _positive(x)


@implements(np.divmod)
def _divmod(x1: Operand, x2: Operand, /) -> tuple[Tensor, Tensor]:
    return floor_divide(x1, x2), mod(x1, x2)


@implements(np.modf)
def _modf(x: Operand, /) -> tuple[Tensor, Tensor]:
    (a,) = as_reals(x)
    whole_part = trunc(a)
    finite = where(isinf(a), 0, whole_part)
    part = where(NUMPY[np.signbit](a), -(finite - a), a - finite)  # a zero has the sign of a
    return where(isinf(a), copysign(where(isinf(a), 0, a), a), part), whole_part


@implements(np.logaddexp2)
def _logaddexp2(x1: Operand, x2: Operand, /) -> Tensor:
    a, b = as_reals(x1, x2)
    return logaddexp(a * math.log(2), b * math.log(2)) / math.log(2)


@implements(np.heaviside)
def _heaviside(x1: Operand, x2: Operand, /) -> Tensor:
    a, b = as_reals(x1, x2)
    return where(equal(a, 0), b, where(isnan(a), a, step(a)))


def _other_than_nan(name: str, ufunc: np.ufunc, doc: str) -> None:
    def slope(y: Tensor, mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return equal(y, mine), 1 - 0.5 * equal_mask(mine, other)

    NUMPY[ufunc] = elementwise(
        name,
        ufunc,
        lambda y, a, b: slope(y, a, b),
        lambda y, a, b: slope(y, b, a),
        doc=doc,
        infer=infer_number,
        in_table=False,
    )


_other_than_nan("fmax", np.fmax, "the larger, or the one that is not NaN; ties share the gradient")
_other_than_nan("fmin", np.fmin, "the smaller, or the one that is not NaN; ties share the gradient")


@implements(np.signbit, constant=True)
def _signbit(x: Operand, /) -> Tensor:
    (a,) = as_floats(x)
    return less(copysign(1, a), 0)


@implements(np.isposinf, constant=True)
def _isposinf(x: Operand, out: None = None) -> Tensor:
    refuse("isposinf", out=(out,))
    return equal(*as_floats(x, np.inf))


@implements(np.isneginf, constant=True)
def _isneginf(x: Operand, out: None = None) -> Tensor:
    refuse("isneginf", out=(out,))
    return equal(*as_floats(x, -np.inf))


@implements(np.nan_to_num)
def _nan_to_num(
    x: Operand, copy: bool = True, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    refuse("nan_to_num", copy=(copy, True))
    a = as_tensor(x)
    if a.dtype.kind in "iub":
        return a
    float_only(a.dtype)
    most = float(np.finfo(a.dtype).max)
    high, low = most if posinf is None else posinf, -most if neginf is None else neginf
    return where(isnan(a), nan, where(equal(a, np.inf), high, where(equal(a, -np.inf), low, a)))


def _not_of_truth_values(function: str, x: Any) -> Tensor:
    found = as_tensor(x)
    if found.dtype == np.bool_:
        raise DTypeError(f"{function}: expected numbers, got truth values; convert with astype()")
    return found


def _not_true(function: str, x: Any) -> Tensor:
    if isinstance(x, (bool, np.bool_)):
        raise DTypeError(f"{function}: expected numbers, got a truth value")
    return as_tensor(x)


@implements(np.real)
def _real(val: Operand) -> Tensor:
    return _not_true("real", val)


@implements(np.real_if_close)
def _real_if_close(a: Operand, tol: float = 100) -> Tensor:
    return as_tensor(a)


@implements(np.imag, constant=True)
def _imag(val: Operand) -> Tensor:
    x = _not_true("imag", val)
    return broadcast_to(Literal(np.zeros((), x.dtype)), x.shape)


@implements(np.angle, constant=True)
def _angle(z: Operand, deg: bool = False) -> Tensor:
    (x,) = as_reals(z)
    half_turn, none = (Literal(np.asarray(angle, x.dtype)) for angle in (180.0 if deg else math.pi, 0.0))
    return stop_gradient(where(isnan(x), x, where(less(copysign(1, x), 0), half_turn, none)))


@implements(np.isreal, constant=True)
def _isreal(x: Operand) -> Tensor:
    return broadcast_to(Literal(np.ones((), np.bool_)), as_tensor(x).shape)


@implements(np.iscomplex, constant=True)
def _iscomplex(x: Operand) -> Tensor:
    return broadcast_to(Literal(np.zeros((), np.bool_)), as_tensor(x).shape)


@implements(np.astype)
def _astype(x: Operand, dtype: DTypeLike, /, *, copy: bool = True, device: str | None = None) -> Tensor:
    refuse("astype", copy=(copy, True), device=(device, "cpu"))
    if not isinstance(x, (Tensor, np.ndarray)):
        raise DTypeError(f"astype: expected an array, got {type(x).__name__}")
    return astype(x, dtype)


# Joining --------------------------------------------------------------------------------------------------------


def _sequence(function: str, arrays: Any) -> tuple[Tensor, ...]:
    if isinstance(arrays, (Tensor, np.ndarray)) and arrays.shape:
        arrays = [*as_tensor(arrays)]  # of a captured array: a compiled function reads its elements anew
    if not isinstance(arrays, (list, tuple)):
        raise DTypeError(f"{function}: expected a list or tuple of arrays, got {type(arrays).__name__}")
    if not arrays:
        raise ShapeError(f"{function}: at least one array is needed")
    return as_tensors(arrays)


def _at_least(x: Tensor, ndim: int) -> Tensor:
    if x.ndim >= ndim:
        return x
    if ndim == 3:
        shape = {0: (1, 1, 1), 1: (1, x.size, 1), 2: (*x.shape, 1)}[x.ndim]
    else:
        shape = (1,) * (ndim - x.ndim) + x.shape
    return reshape(x, shape)


def _atleast(ndim: int) -> Callable[..., Any]:
    def atleast(*arys: Operand) -> Any:
        found = tuple([_at_least(as_tensor(x), ndim) for x in arys])
        return found[0] if len(found) == 1 else found

    return atleast


NUMPY[np.atleast_1d], NUMPY[np.atleast_2d], NUMPY[np.atleast_3d] = map(_atleast, (1, 2, 3))


@implements(np.vstack)
def _vstack(tup: Sequence[Operand], *, dtype: DTypeLike | None = None, casting: str = "same_kind") -> Tensor:
    parts = [_at_least(x, 2) for x in _sequence("vstack", tup)]
    return concatenate(parts, 0, dtype=dtype, casting=casting)


@implements(np.hstack)
def _hstack(tup: Sequence[Operand], *, dtype: DTypeLike | None = None, casting: str = "same_kind") -> Tensor:
    parts = [_at_least(x, 1) for x in _sequence("hstack", tup)]
    return concatenate(parts, 0 if parts[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@implements(np.dstack)
def _dstack(tup: Sequence[Operand]) -> Tensor:
    return concatenate([_at_least(x, 3) for x in _sequence("dstack", tup)], 2)


@implements(np.column_stack)
def _column_stack(tup: Sequence[Operand]) -> Tensor:
    parts = [x if x.ndim >= 2 else reshape(x, (x.size, 1)) for x in _sequence("column_stack", tup)]
    return concatenate(parts, 1)


@implements(np.append)
def _append(arr: Operand, values: Operand, axis: int | None = None) -> Tensor:
    return concatenate(as_tensors((arr, values)), axis)


@implements(np.ediff1d)
def _ediff1d(ary: Operand, to_end: Operand | None = None, to_begin: Operand | None = None) -> Tensor:
    x = ravel(ary)
    if x.dtype == np.bool_:
        raise DTypeError("ediff1d: expected numbers, got truth values")
    ends = [None if part is None else ravel(as_tensors((x, part))[1]) for part in (to_begin, to_end)]
    for end in ends:
        if end is not None and not np.can_cast(end.dtype, x.dtype, "same_kind"):
            raise DTypeError(f"ediff1d: ends of {end.dtype} do not fit {x.dtype}; convert with astype()")
    ends = [end if end is None or x.dtype.kind == "f" else astype(end, x.dtype) for end in ends]
    parts = [part for part in (ends[0], diff(x), ends[1]) if part is not None]
    return concatenate(parts)


# Splitting ------------------------------------------------------------------------------------------------------


def _pieces(function: str, split: Callable[..., Any], ary: Any, sections: Any, axis: Any) -> list[Tensor]:
    """Return slices along an axis at the places where numpy's function splits an array of places."""
    x = as_tensor(ary)
    axis = axis_of(axis, x.ndim, function, x.shape)
    given = wholes(sections, f"{function}: each index")
    one = not isinstance(sections, (list, tuple)) and np.ndim(sections) == 0
    pieces = checked(function, lambda: split(np.arange(x.shape[axis]), given[0] if one else given), x.shape)
    return [part_of(x, axis, *((int(p[0]), int(p[-1]) + 1) if len(p) else (0, 0))) for p in pieces]


@implements(np.split)
def _split(ary: Operand, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    return _pieces("split", np.split, ary, indices_or_sections, axis)


@implements(np.array_split)
def _array_split(ary: Operand, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    return _pieces("array_split", np.array_split, ary, indices_or_sections, axis)


def _split_of(name: str, least: int, axis: int) -> Callable[..., list[Tensor]]:
    def split(ary: Operand, indices_or_sections: int | Sequence[int]) -> list[Tensor]:
        x = as_tensor(ary)
        if x.ndim < least:
            raise ShapeError(f"{name}: at least {least} axes are needed, got shape {x.shape}")
        return _pieces(name, np.split, x, indices_or_sections, 0 if x.ndim == 1 else axis)

    return split


NUMPY[np.hsplit], NUMPY[np.vsplit] = _split_of("hsplit", 1, 1), _split_of("vsplit", 2, 0)
NUMPY[np.dsplit] = _split_of("dsplit", 3, 2)


@implements(np.unstack)
def _unstack(x: Operand, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    a = as_tensor(x)
    rows = moveaxis(a, axis_of(axis, a.ndim, "unstack", a.shape), 0)
    return tuple([rows[i] for i in range(rows.shape[0])])


# Shapes -----------------------------------------------------------------------------------------------------------


@implements(np.broadcast_arrays)
def _broadcast_arrays(*args: Operand, subok: bool = False) -> tuple[Tensor, ...]:
    refuse("broadcast_arrays", subok=(subok, False))
    arrays = [as_tensor(x) for x in args]
    shape = checked("broadcast_arrays", lambda: np.broadcast_shapes(*[x.shape for x in arrays]), ())
    return tuple([broadcast_to(x, shape) for x in arrays])


@implements(np.rollaxis)
def _rollaxis(a: Operand, axis: int, start: int = 0) -> Tensor:
    x = as_tensor(a)
    order = checked("rollaxis", lambda: np.rollaxis(np.empty(range(x.ndim)), axis, start).shape, x.shape)
    return transpose(x, order)


@implements(np.fliplr)
def _fliplr(m: Operand) -> Tensor:
    return _flipped("fliplr", m, 1)


@implements(np.flipud)
def _flipud(m: Operand) -> Tensor:
    return _flipped("flipud", m, 0)


def _flipped(function: str, m: Any, axis: int) -> Tensor:
    x = as_tensor(m)
    if x.ndim <= axis:
        raise ShapeError(f"{function}: at least {axis + 1} axes are needed, got shape {x.shape}")
    return flip(x, axis)


@implements(np.rot90)
def _rot90(m: Operand, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Tensor:
    x, turns = as_tensor(m), whole(k, "rot90: k") % 4
    pair = wholes(axes, "rot90: each axis")
    if len(pair) != 2:
        raise ShapeError(f"rot90: axes are a pair, got {axes}")
    first, second = (axis_of(axis, x.ndim, "rot90", x.shape) for axis in pair)
    if first == second:
        raise ShapeError(f"rot90: the axes must differ, got {axes}")
    if turns == 2:
        return flip(x, (first, second))
    if turns == 1:
        return swapaxes(flip(x, second), first, second)
    return flip(swapaxes(x, first, second), second) if turns else x


@implements(np.matrix_transpose)
def _matrix_transpose(x: Operand, /) -> Tensor:
    a = as_tensor(x)
    if a.ndim < 2:
        raise ShapeError(f"matrix_transpose: at least two axes are needed, got shape {a.shape}")
    return swapaxes(a, -1, -2)


@implements(np.linalg.matrix_transpose)
def _linalg_matrix_transpose(x: Operand, /) -> Tensor:
    return _matrix_transpose(x)


@implements(np.diag)
def _diag(v: Operand, k: int = 0) -> Tensor:
    x = as_tensor(v)
    if not 1 <= x.ndim <= 2:
        raise ShapeError(f"diag: expected a vector or a matrix, got shape {x.shape}")
    return diagflat(x, k) if x.ndim == 1 else diagonal(x, k)


@implements(np.resize)
def _resize(a: Operand, new_shape: int | Sequence[int]) -> Tensor:
    x, shape = as_tensor(a), wholes(new_shape, "resize: each length")
    if not x.size:
        raise ShapeError(f"resize: there are no elements to repeat in shape {x.shape}")
    return from_places("resize", x, lambda places: np.resize(places, shape))


@implements(np.delete)
def _delete(arr: Operand, obj: int | slice | Sequence[int], axis: int | None = None) -> Tensor:
    if isinstance(obj, Tensor):
        raise NotDifferentiableError("delete: the places must be numbers or an array, got a tensor; pass x.numpy()")
    return from_places("delete", as_tensor(arr), lambda places: np.delete(places, obj, axis))


@implements(np.meshgrid)
def _meshgrid(*xi: Operand, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> tuple[Tensor, ...]:
    if indexing not in ("xy", "ij"):
        raise ConfigurationError(f"meshgrid: indexing must be 'xy' or 'ij', got {indexing!r}")
    arrays = [ravel(x) for x in xi]
    order = [1, 0, *range(2, len(xi))] if indexing == "xy" and len(xi) > 1 else [*range(len(xi))]
    grids = [reshape(x, [x.size if k == d else 1 for k in order]) for d, x in enumerate(arrays)]
    return tuple(grids) if sparse else _broadcast_arrays(*grids)


# Choices ----------------------------------------------------------------------------------------------------------


@implements(np.select)
def _select(condlist: Sequence[Operand], choicelist: Sequence[Operand], default: Operand = 0) -> Tensor:
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ShapeError(f"select: {len(condlist)} conditions do not fit {len(choicelist)} choices")
    if not np.any([isinstance(x, (Tensor, np.ndarray)) for x in (*choicelist, default)]):
        raise DTypeError("select: expected arrays to choose from, got numbers alone")
    *choices, found = as_tensors((*choicelist, default))
    for condition, choice in zip([*condlist][::-1], choices[::-1], strict=True):
        found = where(condition, choice, found)
    return found


# Sums and products --------------------------------------------------------------------------------------------------


def _cumulative(name: str, function: Callable[..., Tensor], first: float) -> None:
    def cumulative(
        x: Operand,
        /,
        *,
        axis: int | None = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        include_initial: bool = False,
    ) -> Tensor:
        a = as_tensor(x)
        if axis is None:
            if a.ndim > 1:
                raise ShapeError(f"{name}: an axis is needed for shape {a.shape}")
            axis = 0
        found = function(a, axis, dtype, out)
        if not flag(include_initial):
            return found
        axis = axis_of(axis, found.ndim, name)
        start = Tensor(np.full((*found.shape[:axis], 1, *found.shape[axis + 1 :]), first, found.dtype))
        return concatenate([start, found], axis)

    NUMPY[getattr(np, name)] = cumulative


_cumulative("cumulative_sum", cumsum, 0.0)
_cumulative("cumulative_prod", cumprod, 1.0)


@implements(np.trapezoid)
def _trapezoid(y: Operand, x: Operand | None = None, dx: float = 1.0, axis: int = -1) -> Tensor:
    values = as_tensor(y)
    if x is not None:
        values, points = as_tensors((y, x))
        if {values.dtype.kind, points.dtype.kind} & set("bu"):  # whose differences and sums numpy takes without a sign
            raise DTypeError(f"trapezoid: expected floats, got {values.dtype}, {points.dtype}; convert with astype()")
        _, points = as_floats(values, points)
        if points.ndim not in (1, values.ndim):
            raise ShapeError(f"trapezoid: x of shape {points.shape} does not fit y of shape {values.shape}")
        widths = diff(points, axis=-1 if points.ndim == 1 else axis)
        if points.ndim == 1:
            widths = reshape(widths, [widths.size if d == axis % values.ndim else 1 for d in range(values.ndim)])
    axis = axis_of(axis, values.ndim, "trapezoid", values.shape)
    n = values.shape[axis]
    both = part_of(values, axis, 1, n) + part_of(values, axis, 0, builtins.max(n - 1, 0))  # integers in their own dtype
    both, *_ = as_floats(both) if x is None else as_floats(both, points)
    return sum(both * (dx if x is None else widths) * 0.5, axis)


@implements(np.gradient)
def _gradient(f: Operand, *varargs: Any, axis: Axis = None, edge_order: int = 1) -> Any:
    (x,) = as_floats(_not_of_truth_values("gradient", f))
    given = range(x.ndim) if axis is None else wholes(axis, "gradient: each axis")
    axes = [axis_of(d, x.ndim, "gradient", x.shape) for d in given]
    if len(set(axes)) < len(axes):
        raise ShapeError(f"gradient: axes {axis} name one twice")
    if edge_order not in (1, 2):
        raise ConfigurationError(f"gradient: edge_order must be 1 or 2, got {edge_order!r}")
    if len(varargs) not in (0, 1, len(axes)):
        raise ShapeError(f"gradient: {len(varargs)} spacings do not fit {len(axes)} axes")
    if len(varargs) == 1 and len(axes) > 1 and np.ndim(varargs[0]):
        raise ShapeError("gradient: one array of places does not fit several axes")
    spacings = varargs if len(varargs) == len(axes) else (varargs or (1.0,)) * len(axes)
    found = [_slope(x, d, spacing, edge_order) for d, spacing in zip(axes, spacings, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


def _slope(x: Tensor, axis: int, spacing: Any, edge_order: int) -> Tensor:
    n = x.shape[axis]
    if n < edge_order + 1:
        raise ShapeError(f"gradient: axis {axis} of shape {x.shape} needs at least {edge_order + 1} elements")

    def at(k: int, m: int) -> Tensor:
        return part_of(x, axis, k, n + m if m else n)

    def single(k: int) -> Tensor:
        return part_of(x, axis, k % n, k % n + 1)

    h = as_tensors((x, spacing))[1]
    h = astype(h, x.dtype) if h.dtype.kind in "iu" else h  # differences of whole numbers may wrap around
    if h.ndim > 1 or (h.ndim and h.size != n):
        raise ShapeError(f"gradient: places of shape {h.shape} do not fit the {n} elements along axis {axis}")
    if h.ndim == 0:
        middle = (at(2, 0) - at(0, -2)) / (2 * h)
        if edge_order == 1:
            first, last = (single(1) - single(0)) / h, (single(-1) - single(-2)) / h
        else:
            first = (-1.5 * single(0) + 2.0 * single(1) - 0.5 * single(2)) / h
            last = (0.5 * single(-3) - 2.0 * single(-2) + 1.5 * single(-1)) / h
        return concatenate([first, middle, last], axis)
    steps = reshape(diff(h), [n - 1 if d == axis else 1 for d in range(x.ndim)])
    one, two = part_of(steps, axis, 0, n - 2), part_of(steps, axis, 1, n - 1)
    a, b, c = -two / (one * (one + two)), (two - one) / (one * two), one / (two * (one + two))
    between = at(1, -1)  # does not count where the steps are equal
    between = where(logical_and(equal(b, 0), logical_not(isfinite(between))), 0, between)
    middle = a * at(0, -2) + b * between + c * at(2, 0)
    s, e = part_of(steps, axis, 0, 1), part_of(steps, axis, n - 2, n - 1)
    if edge_order == 1:
        return concatenate([(single(1) - single(0)) / s, middle, (single(-1) - single(-2)) / e], axis)
    t, d = part_of(steps, axis, 1, 2), part_of(steps, axis, n - 3, n - 2)
    first = -(2 * s + t) / (s * (s + t)) * single(0) + (s + t) / (s * t) * single(1) - s / (t * (s + t)) * single(2)
    last = e / (d * (d + e)) * single(-3) - (e + d) / (d * e) * single(-2) + (2 * e + d) / (e * (d + e)) * single(-1)
    return concatenate([first, middle, last], axis)


# Products -------------------------------------------------------------------------------------------------------------


@implements(np.inner)
def _inner(a: Operand, b: Operand, /) -> Tensor:
    x, y = as_tensors((a, b))
    if not x.ndim or not y.ndim:
        return x * y
    return tensordot(x, y, ((x.ndim - 1,), (y.ndim - 1,)))


@implements(np.vdot)
def _vdot(a: Operand, b: Operand, /) -> Tensor:
    x, y = (ravel(operand) for operand in as_tensors((a, b)))
    return dot(x, y)


@implements(np.vecdot)
def _vecdot(x1: Operand, x2: Operand, /) -> Tensor:
    a, b = in_one_dtype(as_tensors((x1, x2)))
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-1]:
        raise ShapeError(f"vecdot: the last axes of shapes {a.shape} and {b.shape} do not pair up")
    return astype(sum(a * b, -1), a.dtype)


SHORT_KERNEL = 16
"""Elements of a kernel up to which convolve and correlate add shifted products: a few nodes of the graph for each."""


@implements(np.convolve)
def _convolve(a: Operand, v: Operand, mode: str = "full") -> Tensor:
    return _slid("convolve", a, v, mode, turned=True)


@implements(np.correlate)
def _correlate(a: Operand, v: Operand, mode: str = "valid") -> Tensor:
    return _slid("correlate", a, v, mode, turned=False)


def _overlap(x: Tensor, factor: Tensor, first: int, count: int) -> Tensor:
    """Return `factor` times the `count` elements of x from `first` on, and 0 where there are none: no 0 · inf."""
    low, high = builtins.max(first, 0), builtins.min(first + count, x.size)
    product = part_of(x, 0, low, high) * factor
    sides = (np.zeros(low - first, product.dtype), np.zeros(first + count - high, product.dtype))
    return concatenate([sides[0], product, sides[1]]) if sides[0].size or sides[1].size else product


def _ends(x: Tensor, kernel: Tensor, places: np.ndarray) -> Tensor:
    """Return the products of a kernel with windows of x, without the places that x does not have."""
    inside = (places >= 0) & (places < x.size)
    windows = NUMPY[np.take](x, np.clip(places, 0, x.size - 1))
    return astype(sum(where(inside, windows * kernel, 0), 1), windows.dtype)


def _slid(function: str, a: Any, v: Any, mode: Any, turned: bool) -> Tensor:
    x, kernel = (_at_least(operand, int(turned)) for operand in in_one_dtype(as_tensors((a, v))))
    if x.ndim != 1 or kernel.ndim != 1:
        raise ShapeError(f"{function}: expected two vectors, got shapes {x.shape} and {kernel.shape}")
    if not x.size or not kernel.size:
        raise ShapeError(f"{function}: there must be elements, got shapes {x.shape} and {kernel.shape}")
    if mode not in ("full", "same", "valid"):
        raise ConfigurationError(f"{function}: mode must be 'full', 'same' or 'valid', got {mode!r}")
    swapped = kernel.size > x.size
    long, short = (kernel, x) if swapped else (x, kernel)
    n, k = long.size, short.size
    before = {"full": k - 1, "same": k // 2, "valid": 0}[mode]
    after = {"full": k - 1, "same": k - 1 - before, "valid": 0}[mode]
    if turned:
        short = flip(short)
    count = n + before + after - k + 1
    if k <= SHORT_KERNEL:  # a product for each of its elements, without a copy of each window
        found = _overlap(long, short[0], -before, count)
        for j in range(1, k):
            found = found + _overlap(long, short[j], j - before, count)
    else:
        places = np.arange(count)[:, np.newaxis] + np.arange(k) - before
        whole = NUMPY[np.take](long, places[before : count - after])
        parts = [_ends(long, short, places[:before]), matmul(whole, short), _ends(long, short, places[count - after :])]
        found = concatenate([part for part in parts if part.size])
    return flip(found) if swapped and not turned else found


@implements(np.interp)
def _interp(
    x: Operand,
    xp: Operand,
    fp: Operand,
    left: Operand | None = None,
    right: Operand | None = None,
    period: Operand | None = None,
) -> Tensor:
    at, places, values = [in_float64(part) for part in (x, xp, fp)]  # numpy's computes in nothing else
    if places.ndim != 1 or values.shape != places.shape or not places.size:
        raise ShapeError(f"interp: xp and fp must be vectors of one length, got {places.shape} and {values.shape}")
    if period is not None:
        return _interp(*_over_a_period(at, places, values, period))
    n = places.size
    sides = [values[i] if s is None else in_float64(s) for i, s in ((0, left), (n - 1, right))]
    below = astype(SEARCHSORTED(places, at, side="right"), at.dtype)
    index = astype(NUMPY[np.clip](below - 1, 0, builtins.max(n - 2, 0)), np.intp)
    if n == 1:
        middle = broadcast_to(values[0], at.shape)
    else:
        low, high = places[index], places[index + 1]
        first, second = values[index], values[index + 1]
        # What is computed of points outside is not used, but its derivative is, times 0: it must be finite.
        inside = logical_and(less_equal(places[0], at), less_equal(at, places[n - 1]))
        point, same = where(inside, at, low), equal(high, low)
        slope = (second - first) / where(same, 1, high - low)
        # At the last place the derivative is that from below, as JAX's.
        gap = point - high
        at_high = where(isfinite(slope), slope, 0) * where(isnan(gap), 0, gap) + second
        middle = where(same, second, where(equal(point, high), at_high, slope * (point - low) + first))
        # Between places, or values, that are infinite numpy begins at the upper one, and takes what both have.
        middle = where(isnan(middle), slope * (point - high) + second, middle)
        middle = where(logical_and(isnan(middle), equal(first, second)), first, middle)
    found = where(less(at, places[0]), sides[0], where(less(places[n - 1], at), sides[1], middle))
    return where(isnan(at), at, found)


def _over_a_period(at: Tensor, places: Tensor, values: Tensor, period: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return all places within one period from 0; the known ones in order, with a neighbour at either end."""
    _, length = as_floats(at, period)
    if length.ndim:
        raise ConfigurationError(f"interp: the period must be a number other than 0, got {period!r}")
    check_values("interp", length, "no zero", "the period must be a number other than 0")
    length = NUMPY[np.abs](length)
    at, places = (NUMPY[np.mod](x, length) for x in (at, places))
    order = NUMPY[np.argsort](places)
    places, values = places[order], values[order]
    n = places.size
    around = [part_of(places, 0, n - 1, n) - length, places, part_of(places, 0, 0, 1) + length]
    return at, concatenate(around), concatenate([part_of(values, 0, n - 1, n), values, part_of(values, 0, 0, 1)])


@implements(np.matvec)
def _matvec(x1: Operand, x2: Operand, /) -> Tensor:
    a, b = as_tensors((x1, x2))
    if a.ndim < 2 or not b.ndim:
        raise ShapeError(f"matvec: expected matrices and vectors, got shapes {a.shape} and {b.shape}")
    return MATMUL(a, expand_dims(b, -1))[..., 0]


@implements(np.vecmat)
def _vecmat(x1: Operand, x2: Operand, /) -> Tensor:
    a, b = as_tensors((x1, x2))
    if not a.ndim or b.ndim < 2:
        raise ShapeError(f"vecmat: expected vectors and matrices, got shapes {a.shape} and {b.shape}")
    return MATMUL(expand_dims(a, -2), b)[..., 0, :]


@implements(np.linspace)
def _linspace(
    start: Operand,
    stop: Operand,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: DTypeLike | None = None,
    axis: int = 0,
    *,
    device: str | None = None,
) -> Any:
    refuse("linspace", device=(device, "cpu"))
    first, last = as_floats(start, stop)
    same_dtype("linspace", dtype, first)
    count = whole(num, "linspace: num")
    if count < 0:
        raise ShapeError(f"linspace: num must not be negative, got {num}")
    steps = count - 1 if flag(endpoint) else count
    width = last - first
    places = np.arange(count, dtype=first.dtype).reshape(-1, *(1,) * width.ndim)
    found = expand_dims(first, 0) + expand_dims(width / builtins.max(steps, 1), 0) * places
    if flag(endpoint) and count > 1:
        found = concatenate([part_of(found, 0, 0, count - 1), expand_dims(broadcast_to(last, width.shape), 0)])
    found = moveaxis(found, 0, axis_of(axis, found.ndim, "linspace"))
    return (found, width / steps if steps > 0 else width * np.nan) if flag(retstep) else found


# numpy.linalg's names for functions of numpy --------------------------------------------------------------------------


@implements(np.linalg.matmul)
def _linalg_matmul(x1: Operand, x2: Operand, /) -> Tensor:
    return matmul(x1, x2)


@implements(np.linalg.vecdot)
def _linalg_vecdot(x1: Operand, x2: Operand, /, *, axis: int = -1) -> Tensor:
    a, b = as_tensors((x1, x2))
    if a.ndim and b.ndim and axis != -1:
        a, b = (moveaxis(x, axis_of(axis, x.ndim, "vecdot", x.shape), -1) for x in (a, b))
    return _vecdot(a, b)


@implements(np.linalg.tensordot)
def _linalg_tensordot(x1: Operand, x2: Operand, /, *, axes: Any = 2) -> Tensor:
    return tensordot(x1, x2, axes)


@implements(np.linalg.outer)
def _linalg_outer(x1: Operand, x2: Operand, /) -> Tensor:
    a, b = as_tensors((x1, x2))
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer: expected two vectors, got shapes {a.shape} and {b.shape}")
    return outer(a, b)


@implements(np.linalg.cross)
def _linalg_cross(x1: Operand, x2: Operand, /, *, axis: int = -1) -> Tensor:
    return cross(x1, x2, axis=whole(axis, "cross: the axis"))


@implements(np.linalg.diagonal)
def _linalg_diagonal(x: Operand, /, *, offset: int = 0) -> Tensor:
    return diagonal(x, offset, -2, -1)


@implements(np.linalg.trace)
def _linalg_trace(x: Operand, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> Tensor:
    return trace(x, offset, -2, -1, dtype)


# Order ----------------------------------------------------------------------------------------------------------------


@implements(np.partition)
def _partition(
    a: Operand, kth: int | Sequence[int], axis: int | None = -1, kind: str = "introselect", order: None = None
) -> Tensor:
    """All elements in order: a partition at every place."""
    refuse("partition", kind=("None" if kind is None else kind, "introselect"), order=(order,))
    x = as_tensor(a)
    n = x.size if axis is None else x.shape[axis_of(axis, x.ndim, "partition", x.shape)]
    for k in wholes(kth, "partition: kth"):
        if not -n <= k < n:
            raise ShapeError(f"partition: kth {k} is out of range for {n} elements")
    return sort(x, axis)


@implements(np.argpartition, constant=True)
def _argpartition(
    a: Operand, kth: int | Sequence[int], axis: int | None = -1, kind: str = "introselect", order: None = None
) -> Tensor:
    refuse("argpartition", kind=("None" if kind is None else kind, "introselect"), order=(order,))
    x = as_tensor(a)
    n = x.size if axis is None else x.shape[axis_of(axis, x.ndim, "argpartition", x.shape)]
    for k in wholes(kth, "argpartition: kth"):
        if not -n <= k < n:
            raise ShapeError(f"argpartition: kth {k} is out of range for {n} elements")
    return argsort(x, axis)


# What is inserted and put together ------------------------------------------------------------------------------------


@implements(np.insert)
def _insert(arr: Operand, obj: int | slice | Sequence[int], values: Operand, axis: int | None = None) -> Tensor:
    if isinstance(obj, Tensor):
        raise NotDifferentiableError("insert: the places must be numbers or an array, got a tensor; pass x.numpy()")
    watch_setting(obj)
    x, new = as_tensors((arr, values))
    x, new = (x, astype(new, x.dtype)) if x.dtype.kind in "iub" else in_one_dtype((x, new))
    places = np.arange(x.size + new.size)
    mine, theirs = places[: x.size].reshape(x.shape), places[x.size :].reshape(new.shape)
    found = checked("insert", lambda: np.insert(mine, obj, theirs, axis), x.shape)
    return NUMPY[np.take](concatenate([ravel(x), ravel(new)]), found)  # type: ignore[no-any-return]


@implements(np.block)
def _block(arrays: Any) -> Tensor:
    leaves: list[Any] = []
    depth = _depth_of_block(arrays, leaves)
    if not [x for x in leaves if isinstance(x, (Tensor, np.ndarray))]:
        raise DTypeError("block: expected arrays, got numbers alone")
    parts = as_tensors(leaves)
    ndim = builtins.max(depth, *(part.ndim for part in parts))
    waiting = iter([_at_least_in_front(part, ndim) for part in parts])

    def put_together(nested: Any, level: int) -> Tensor:
        if not level:
            return next(waiting)
        return concatenate([put_together(item, level - 1) for item in nested], -level)

    return put_together(arrays, depth)


def _depth_of_block(nested: Any, leaves: list[Any]) -> int:
    if isinstance(nested, tuple):
        raise DTypeError("block: expected nested lists of arrays, got a tuple")
    if not isinstance(nested, list):
        leaves.append(nested)
        return 0
    depths = {_depth_of_block(item, leaves) for item in nested}
    if len(depths) != 1:
        raise ShapeError("block: all lists must have elements, and be nested equally deep")
    return depths.pop() + 1


def _at_least_in_front(x: Tensor, ndim: int) -> Tensor:
    return reshape(x, (1,) * (ndim - x.ndim) + x.shape) if x.ndim < ndim else x


@implements(np.choose)
def _choose(a: Operand, choices: Sequence[Operand], out: None = None, mode: str = "raise") -> Tensor:
    refuse("choose", out=(out,))
    index = as_tensor(a)
    if index.dtype == np.bool_:
        index = astype(index, np.intp)
    if index.dtype.kind not in "iu":
        raise DTypeError(f"choose: expected whole numbers, got {index.dtype}")
    if mode not in ("raise", "wrap", "clip"):
        raise ConfigurationError(f"choose: mode must be 'raise', 'wrap' or 'clip', got {mode!r}")
    if index.dtype.itemsize < 8:  # which may not hold the number of choices
        index = astype(index, np.intp)
    options = _sequence("choose", choices)
    shape = checked("choose", lambda: np.broadcast_shapes(index.shape, *(x.shape for x in options)), index.shape)
    count = len(options)
    if mode == "wrap":
        index = mod(index, Tensor(np.array(count, index.dtype)))
    elif mode == "clip":
        first, last = (Tensor(np.array(n, index.dtype)) for n in (0, count - 1))
        index = clip(index, first, last)
    else:
        index = where(less(index, 0), Tensor(np.array(count, index.dtype)), index)  # out of range, negative ones too
    rows = stack([broadcast_to(x, shape) for x in options])
    return take_along_axis(rows, expand_dims(broadcast_to(index, shape), 0), 0)[0]


# Functions of functions -----------------------------------------------------------------------------------------------


@implements(np.apply_along_axis)
def _apply_along_axis(func1d: Callable[..., Any], axis: int, arr: Operand, *args: Any, **kwargs: Any) -> Tensor:
    x = as_tensor(arr)
    d = axis_of(axis, x.ndim, "apply_along_axis", x.shape)
    others = (*x.shape[:d], *x.shape[d + 1 :])
    rows = reshape(moveaxis(x, d, -1), (math.prod(others), x.shape[d]))
    if not rows.shape[0]:
        raise ShapeError(f"apply_along_axis: there is nothing to apply the function to in shape {x.shape}")
    found = stack(as_tensors([func1d(rows[i], *args, **kwargs) for i in range(rows.shape[0])]))
    result = reshape(found, (*others, *found.shape[1:]))
    for k in range(found.ndim - 1):
        result = moveaxis(result, len(others) + k, d + k)
    return result


@implements(np.apply_over_axes)
def _apply_over_axes(func: Callable[..., Any], a: Operand, axes: int | Sequence[int]) -> Tensor:
    x = as_tensor(a)
    for axis in wholes(axes, "apply_over_axes: each axis"):
        d = axis_of(axis, x.ndim, "apply_over_axes", x.shape)
        found = as_tensor(func(x, d))
        if found.ndim not in (x.ndim, x.ndim - 1):
            raise ShapeError(
                f"apply_over_axes: the function's result must have {x.ndim} axes, or one less, got shape {found.shape}"
            )
        x = found if found.ndim == x.ndim else expand_dims(found, d)
    return x


# Sequences of numbers -------------------------------------------------------------------------------------------------


@implements(np.logspace)
def _logspace(
    start: Operand,
    stop: Operand,
    num: int = 50,
    endpoint: bool = True,
    base: Operand = 10.0,
    dtype: DTypeLike | None = None,
    axis: int = 0,
) -> Tensor:
    first, last, root = as_floats(start, stop, base)
    if root.ndim:
        ndim = builtins.max(first.ndim, last.ndim, root.ndim)
        first, last, root = (_at_least_in_front(x, ndim) for x in (first, last, root))
        root = expand_dims(root, axis)
    found: Tensor = root ** _linspace(first, last, num, endpoint, axis=axis)
    return found if dtype is None else astype(found, dtype)


@implements(np.geomspace)
def _geomspace(
    start: Operand, stop: Operand, num: int = 50, endpoint: bool = True, dtype: DTypeLike | None = None, axis: int = 0
) -> Tensor:
    first, last = in_float64(start), in_float64(stop)  # as numpy computes
    for end in (first, last):
        check_values("geomspace", end, "no zero", "a geometric sequence cannot begin or end with zero")
    side = sign(first)
    low, high = first / side, last / side
    found = _logspace(log10(low), log10(high), num, endpoint)
    n = found.shape[0]
    if n:  # the ends as they were given
        shape = found.shape[1:]
        parts = [expand_dims(broadcast_to(low, shape), 0), part_of(found, 0, 1, n)]
        if n > 1 and flag(endpoint):
            parts = [parts[0], part_of(found, 0, 1, n - 1), expand_dims(broadcast_to(high, shape), 0)]
        found = concatenate(parts)
    found = moveaxis(found * side, 0, axis_of(axis, found.ndim, "geomspace"))
    return found if dtype is None else astype(found, dtype)


@implements(np.unwrap)
def _unwrap(p: Operand, discont: float | None = None, axis: int = -1, *, period: float = 2 * math.pi) -> Tensor:
    (x,) = as_reals(p)
    d = axis_of(axis, x.ndim, "unwrap", x.shape)
    n = x.shape[d]
    if not isinstance(period, (int, float, np.integer, np.floating)):
        raise DTypeError(f"unwrap: period must be a number, got {period!r}")
    kind = np.result_type(as_tensor(p).dtype, period)
    whole = kind.kind in "iu"
    half = period // 2 if whole else period / 2
    step = diff(x, axis=d)
    wrapped = mod(step + half, period) - half
    if not whole or period % 2 == 0:
        wrapped = where(logical_and(equal(wrapped, -half), less(0, step)), half, wrapped)
    jump = where(less(abs(step), period / 2 if discont is None else discont), 0, wrapped - step)
    first = builtins.min(1, n)
    found = concatenate([part_of(x, d, 0, first), part_of(x, d, first, n) + cumsum(jump, d)], d)
    return astype(found, kind) if whole else found


# Systems of equations over several axes -------------------------------------------------------------------------------


@implements(np.linalg.tensorinv)
def _tensorinv(a: Operand, ind: int = 2) -> Tensor:
    (x,) = as_floats(a)
    count = whole(ind, "tensorinv: ind")
    if count < 1 or not x.ndim:
        raise ShapeError(f"tensorinv: ind must be positive and leave axes of shape {x.shape}, got {ind}")
    rows, columns = x.shape[:count], x.shape[count:]
    if math.prod(rows) != math.prod(columns):
        raise ShapeError(f"tensorinv: the axes of shape {x.shape} do not make a square matrix at {ind}")
    return reshape(inv(reshape(x, (math.prod(rows), math.prod(columns)))), (*columns, *rows))


@implements(np.linalg.tensorsolve)
def _tensorsolve(a: Operand, b: Operand, axes: Sequence[int] | None = None) -> Tensor:
    x, right = as_floats(a, b)
    if axes is not None:
        last = list(wholes(axes, "tensorsolve: each axis"))
        if np.ndim(axes) != 1 or len(set(last)) < len(last) or not set(last) <= {*range(x.ndim)}:
            raise ShapeError(f"tensorsolve: axes {axes} are no sequence of different axes of shape {x.shape}")
        x = transpose(x, [d for d in range(x.ndim) if d not in last] + last)
    shape = x.shape[right.ndim :]
    if not shape or math.prod(shape) != right.size or math.prod(shape) ** 2 != x.size:
        raise ShapeError(f"tensorsolve: shapes {x.shape} and {right.shape} do not make a square system of equations")
    return reshape(solve(reshape(x, (right.size, right.size)), ravel(right)), shape)
