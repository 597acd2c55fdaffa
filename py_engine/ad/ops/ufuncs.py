"""numpy's ufuncs that only numpy has a name for, and the methods of all: reduce, accumulate, outer and reduceat."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from py_engine.ad.op import (
    NUMPY,
    Op,
    Shape,
    as_tensor,
    as_tensors,
    broadcast,
    elementwise,
    float_only,
    implements,
    in_float64,
    infer_elementwise,
    no_gradient,
    per_element,
)
from py_engine.ad.ops.along import cumprod, cumsum
from py_engine.ad.ops.arguments import axis_of, refuse, same_dtype, wholes
from py_engine.ad.ops.elementary import astype, pow_base, pow_exponent
from py_engine.ad.ops.shape import along_axes, concatenate, moveaxis, part_of, reshape, stack
from py_engine.ad.tensor import FLOATS, NO_VALUE, Array, Axis, Operand, Tensor, plain_array, real_array
from py_engine.errors import DTypeError, ShapeError

# Whole numbers: constant on purpose, since there is nothing between them -----------------------------------------


def _infer_whole(*inputs: Tensor) -> tuple[Shape, Any]:
    shape, dtype = infer_elementwise(*inputs)
    if dtype.kind not in "iu":
        raise DTypeError(f"expected whole numbers, got {dtype}")
    return shape, dtype


def _infer_count(x: Tensor) -> tuple[Shape, Any]:
    return _infer_whole(x)[0], np.dtype(np.uint8)


for _ufunc in (np.left_shift, np.right_shift, np.gcd, np.lcm):
    NUMPY[_ufunc] = Op(_ufunc.__name__, _infer_whole, _ufunc, constant=True, elementwise=True)
NUMPY[np.bitwise_count] = Op("bitwise_count", _infer_count, np.bitwise_count, constant=True, elementwise=True)
left_shift, right_shift = NUMPY[np.left_shift], NUMPY[np.right_shift]

# Parts of floats --------------------------------------------------------------------------------------------

_MANTISSA = elementwise(
    "mantissa",
    lambda x, out: np.copyto(out, np.frexp(x)[0]),
    lambda y, x: NUMPY[np.where](x == 0, 0, y / NUMPY[np.where](x == 0, 1, x)),
    doc="x scaled by a power of two to lie from 1/2 to 1",
    in_table=False,
)
_EXPONENT = Op(
    "exponent",
    lambda x: (x.shape, np.dtype(np.int32) if float_only(x.dtype) else None),
    lambda x, out: np.copyto(out, np.frexp(x)[1]),
    constant=True,
    elementwise=True,
)


@implements(np.frexp)
def _frexp(x: Operand, /) -> tuple[Tensor, Tensor]:
    a = as_tensor(x)
    return _MANTISSA(a), _EXPONENT(a)


def _infer_ldexp(x: Tensor, n: Tensor) -> tuple[Shape, Any]:
    if n.dtype.kind not in "iu" or not np.can_cast(n.dtype, np.int64):
        raise DTypeError(f"expected whole numbers as exponents, which int64 can hold, got {n.dtype}")
    return broadcast((x, n)), float_only(x.dtype)


_LDEXP: Op = Op(
    "ldexp",
    _infer_ldexp,
    lambda x, n, out: np.ldexp(x, n, out=out),
    vjp=(lambda g, y, x, n: _LDEXP(g, n), no_gradient),
    jvp=lambda t, y, x, n: _LDEXP(t[0], n),
    elementwise=True,
)


@implements(np.ldexp)
def _ldexp(x1: Operand, x2: Operand, /) -> Tensor:
    if isinstance(x1, (int, np.integer)):
        raise DTypeError("ldexp: expected a float, or an array of floats, to be scaled, got a whole number")
    return _LDEXP(as_tensor(x1), x2 if isinstance(x2, Tensor) else Tensor(real_array(plain_array(x2), x2)))


NUMPY[np.nextafter] = elementwise(
    "nextafter",
    np.nextafter,
    lambda y, a, b: a != b,  # where they are equal, the result is b
    lambda y, a, b: a == b,
    doc="the next number after a towards b",
    in_table=False,
)
NUMPY[np.spacing] = Op(
    "spacing", lambda x: (x.shape, float_only(x.dtype)), np.spacing, constant=True, overwrites=(0,), elementwise=True
)


_FLOAT_POWER = elementwise(  # numpy's takes no square root where the exponent is 0.5, as its power does
    "float_power", np.float_power, pow_base, pow_exponent, doc="x to the power p, in float64", in_table=False
)


@implements(np.float_power)
def _float_power(x1: Operand, x2: Operand, /) -> Tensor:
    return _FLOAT_POWER(in_float64(x1), in_float64(x2))


# Bessel functions -------------------------------------------------------------------------------------------

LARGEST_OF_SERIES = 30.0


def _bessel(order: int, x: Array) -> Array:
    """Return the modified Bessel function of the first kind of a whole order, of numbers that are not negative.

    Its power series, whose terms are all positive, and for large numbers its asymptotic one (Abramowitz and Stegun,
    9.6.10 and 9.7.1).
    """
    small = np.minimum(x, LARGEST_OF_SERIES)
    quarter, series = np.square(small / 2), np.ones_like(small)
    for k in range(_terms(order, float(np.fmax.reduce(small, None, initial=0))), 0, -1):
        series *= quarter
        series /= k * (k + order)
        series += 1
    if order:
        series *= (small / 2) ** order / math.factorial(order)
    if not (x > LARGEST_OF_SERIES).any():
        return series
    large = np.maximum(x, LARGEST_OF_SERIES)
    term, sum_of_terms = np.ones_like(large), np.ones_like(large)
    for k in range(1, 30):
        term *= -(4 * order**2 - (2 * k - 1) ** 2) / (8 * k * large)
        sum_of_terms += term
    with np.errstate(over="ignore"):
        asymptotic = np.exp(large) / np.sqrt(2 * np.pi * large) * sum_of_terms
    return np.where(x <= LARGEST_OF_SERIES, series, asymptotic)


def _terms(order: int, x: float) -> int:
    """Return how many terms of the power series change its sum at `x`, and so at smaller numbers."""
    term = total = 1.0
    k = 0
    while k < 90 and (term > 1e-17 * total or k < x):
        k += 1
        term *= x * x / (4 * k * (k + order))
        total += term
    return k


@cache
def _bessel_op(order: int) -> Op:
    def kernel(x: Array, out: Array) -> None:
        values = _bessel(order, np.abs(x))
        np.multiply(values, np.sign(x) if order % 2 else 1, out)

    def slope(y: Tensor, x: Tensor) -> Tensor:
        if not order:
            return _bessel_op(1)(x)
        return (_bessel_op(order - 1)(x) + _bessel_op(order + 1)(x)) / 2

    doc = "modified Bessel function of the first kind"
    return elementwise(f"i{order}", kernel, slope, doc=doc, in_table=False)


@implements(np.i0)
def _i0(x: Operand) -> Tensor:
    return _bessel_op(0)(x)


# Methods ----------------------------------------------------------------------------------------------------

ASSOCIATIVE = {
    *(np.maximum, np.minimum, np.fmax, np.fmin, np.logaddexp, np.logaddexp2, np.hypot, np.gcd, np.lcm),
    *(np.logical_and, np.logical_or, np.logical_xor, np.bitwise_and, np.bitwise_or, np.bitwise_xor),
}
"""Of which neighbours may be combined in any grouping."""
FROM_ZERO = {np.hypot, np.gcd}
"""Which numpy reduces from 0 on, so that a single element loses its sign."""
RUNNING: dict[Any, Callable[..., Tensor]] = {np.add: cumsum, np.multiply: cumprod}
ONE_BY_ONE = {np.divide}
"""Of which a reduction takes one element after the other: a product may overflow or vanish where no quotient does."""


def _infer_subtracted(x: Tensor, axis: int) -> tuple[Shape, Any]:
    shape = tuple([1 if d == axis else n for d, n in enumerate(x.shape)])
    return shape, x.dtype if x.dtype.kind in "iu" else float_only(x.dtype)


def _signs(x: Tensor, axis: int) -> Tensor:
    """Return 1 for the first element along an axis and -1 for the others."""
    signs = np.full(x.shape[axis], -1, x.dtype)
    signs[0] = 1
    return Tensor(signs.reshape(-1, *(1,) * (x.ndim - 1 - axis)))


_SUBTRACTED: Op = Op(
    "subtracted",
    _infer_subtracted,
    lambda x, out, axis: np.subtract.reduce(x, axis, out=out, keepdims=True),
    vjp=(lambda g, y, x, axis: g * _signs(x, axis),),
    jvp=lambda t, y, x, axis: _SUBTRACTED(t[0], axis=axis),
    flops=per_element(1),
    batch=along_axes,
    doc="the first element along an axis minus the others, one after the other, whose sum may overflow",
)


@cache
def method_of(ufunc: np.ufunc, method: str) -> Callable[..., Any] | None:
    """Return what stands in for a method of a ufunc of two operands on tensors, or None."""
    function = NUMPY.get(ufunc)
    if function is None or ufunc.nin != 2 or ufunc.nout != 1 or ufunc.signature is not None:
        return None
    if method == "outer":
        return _outer(function)
    if method == "accumulate":
        return _accumulate(ufunc, function)
    if method == "reduce":
        return _reduce(ufunc, function)
    return _reduceat(ufunc) if method == "reduceat" else None


def _outer(function: Callable[..., Any]) -> Callable[..., Any]:
    def outer(A: Operand, B: Operand, /) -> Tensor:
        a, b = as_tensors((A, B))
        return function(reshape(a, (*a.shape, *(1,) * b.ndim)), b)  # type: ignore[no-any-return]

    return outer


def _accumulate(ufunc: np.ufunc, function: Callable[..., Any]) -> Callable[..., Any] | None:
    name = f"{ufunc.__name__}.accumulate"
    running: Callable[..., Tensor] | None = RUNNING.get(ufunc)
    if running is None and ufunc not in ASSOCIATIVE:
        return None

    def accumulate(array: Operand, /, axis: int = 0, dtype: Any = None, out: None = None) -> Tensor:
        refuse(name, out=(out,))
        x = as_tensor(array)
        axis = axis_of(axis, x.ndim, name, x.shape)
        if dtype is not None and x.dtype in FLOATS:
            x = astype(x, dtype)
        found = running(x, axis) if running is not None else _doubled(function, x, axis)
        same_dtype(name, dtype, found)
        return found

    return accumulate


def _doubled(function: Callable[..., Any], x: Tensor, axis: int) -> Tensor:
    """Combine the elements up to each place, by recursive doubling (a parallel scan)."""
    n = x.shape[axis]
    reach = 1
    x = _as_combined(function, x, axis)
    while reach < n:
        combined = function(part_of(x, axis, 0, n - reach), part_of(x, axis, reach, n))
        x = concatenate([part_of(x, axis, 0, reach), combined], axis)
        reach *= 2
    return x


def _as_combined(function: Callable[..., Any], x: Tensor, axis: int) -> Tensor:
    """Return the elements in the dtype of two that are combined: truth values of logical functions."""
    if not x.shape[axis]:
        return x
    kind = function(part_of(x, axis, 0, 1), part_of(x, axis, 0, 1)).dtype
    return x != 0 if kind == np.bool_ else astype(x, kind)


def _reduce(ufunc: np.ufunc, function: Callable[..., Any]) -> Callable[..., Any] | None:
    name = f"{ufunc.__name__}.reduce"
    if ufunc is not np.subtract and ufunc not in ASSOCIATIVE and ufunc not in ONE_BY_ONE:
        return None

    def reduce(
        array: Operand,
        /,
        axis: Axis = 0,
        dtype: Any = None,
        out: None = None,
        keepdims: bool = False,
        initial: Any = NO_VALUE,
        where: Any = True,
    ) -> Tensor:
        refuse(name, out=(out,), initial=("None" if initial is None else initial,), where=(where, True))
        x = as_tensor(array)
        if isinstance(axis, tuple) and len(axis) == 1:
            (axis,) = axis
        axis = axis_of(axis, x.ndim, f"{name}, which reduces one axis", x.shape)
        if not x.shape[axis]:
            raise ShapeError(f"{name}: there is no element along axis {axis} of shape {x.shape}")
        if dtype is not None and x.dtype in FLOATS:
            x = astype(x, dtype)
        if ufunc is np.subtract:
            found = _SUBTRACTED(x, axis=axis)
        elif ufunc in ONE_BY_ONE:
            found = part_of(x, axis, 0, 1)
            for k in range(1, x.shape[axis]):
                found = function(found, part_of(x, axis, k, k + 1))
            if x.shape[axis] == 1:
                found = function(found, 1)  # in the dtype of a quotient
        else:
            found = _combined(function, x, axis)
            if ufunc in FROM_ZERO and x.shape[axis] == 1:  # more elements are combined with 0 without effect
                found = NUMPY[np.abs](found)
        same_dtype(name, dtype, found)
        return found if keepdims else reshape(found, [n for d, n in enumerate(x.shape) if d != axis])

    return reduce


def _combined(function: Callable[..., Any], x: Tensor, axis: int) -> Tensor:
    """Combine the elements along an axis, neighbour with neighbour."""
    x = _as_combined(function, x, axis)
    while (n := x.shape[axis]) > 1:
        half = n // 2
        pairs = function(part_of(x, axis, 0, 2 * half, 2), part_of(x, axis, 1, 2 * half, 2))
        x = concatenate([pairs, part_of(x, axis, 2 * half, n)], axis) if n % 2 else pairs
    return x


def _reduceat(ufunc: np.ufunc) -> Callable[..., Any] | None:
    name = f"{ufunc.__name__}.reduceat"
    reduce: Any = NUMPY.get((ufunc, "reduce")) or method_of(ufunc, "reduce")
    if reduce is None:
        return None

    def reduceat(array: Operand, indices: Any, /, axis: int = 0, dtype: Any = None, out: None = None) -> Tensor:
        refuse(name, out=(out,))
        x = as_tensor(array)
        axis = axis_of(axis, x.ndim, name, x.shape)
        n = x.shape[axis]
        starts = wholes(indices, f"{name}: each index")
        if not all(0 <= start < n for start in starts) or not starts:
            raise ShapeError(f"{name}: indices {indices} do not fit the {n} elements along axis {axis}")
        parts, others = [], [n for d, n in enumerate(x.shape) if d != axis]
        for start, stop in zip(starts, (*starts[1:], n), strict=True):
            piece = part_of(x, axis, start, stop if stop > start else start + 1)
            alone = ufunc in FROM_ZERO and piece.shape[axis] == 1  # which is not combined with 0 here
            if alone:
                parts.append(reshape(piece if dtype is None else astype(piece, dtype), others))
            else:
                parts.append(reduce(piece, axis=axis, dtype=dtype))
        return moveaxis(stack(parts), 0, axis)

    return reduceat
