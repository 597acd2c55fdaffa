"""Arithmetic and elementary functions, elementwise with numpy's broadcasting.

Subgradients: ties in `maximum`, `minimum` share the gradient equally; `clip` passes it on at its bounds; `abs`,
`relu`, `sign`, `hypot` and `copysign` have derivative 0 at 0; `sqrt` has infinity there. Where `relu` or `clip` is
constant, nothing passes, not even an infinite gradient: `relu(x) ** 1.5` has derivatives 0 of every order at x < 0.
Where the larger or smaller of two is NaN, both derivatives are 0. The exponent of a power counts in forward mode only
where it has a tangent: that of a negative base has the derivative NaN. Elsewhere infinity times 0 is NaN, as in PyTorch
and JAX, also in forward mode behind a root: an op does not know which of the two would be first in the limit. The
tangent 0 of `relu(x)` at x < 0 can't be told from that of `x ** 3` at 0, where `cbrt(x ** 3)` has derivative 1.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.op import (
    NO_ATTRS,
    NUMPY,
    ZEROS,
    Call,
    Equation,
    Op,
    Scratch,
    Shape,
    Tangents,
    as_tensor,
    as_tensors,
    broadcast,
    common_dtype,
    define,
    elementwise,
    float_only,
    implements,
    infer_elementwise,
    infer_float,
    infer_number,
    infer_same,
    no_gradient,
    one_to_one,
    register,
    scaled,
)
from py_engine.ad.ops.arguments import UFUNC_DEFAULTS, as_dtype, refuse, whole
from py_engine.ad.ops.shape import is_one, leading
from py_engine.ad.state import STATE
from py_engine.ad.tensor import FLOATS, NO_VALUE, Array, Literal, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError

# Arithmetic -----------------------------------------------------------------------------------------------

add = elementwise(
    "add",
    np.add,
    lambda y, a, b: 1,
    lambda y, a, b: 1,
    doc="a + b",
    infer=infer_elementwise,
    commutes=True,
    scalar=lambda equation: "{0} or {1}" if equation.output.dtype == np.bool_ else "{0} + {1}",
)
ADD_IN_ANY_ORDER: Op = replace(add, any_order=True, doc="a + b, as part of a sum whose order is free")
"""Adds the contributions to a gradient: `py_engine.ad.compile.reassociation` chooses their order."""

sub = elementwise(
    "sub", np.subtract, lambda y, a, b: 1, lambda y, a, b: -1, doc="a - b", infer=infer_number, scalar="{0} - {1}"
)


def _times_one(equation: Equation, made: Mapping[int, Equation]) -> Tensor | None:
    for one, other in (equation.inputs, equation.inputs[::-1]):
        if is_one(one, made) and other.shape == equation.output.shape:
            return other
    return None


mul = elementwise(
    "mul",
    np.multiply,
    lambda y, a, b: b,
    lambda y, a, b: a,
    doc="a b",
    infer=infer_elementwise,
    commutes=True,
    scalar=lambda equation: "{0} and {1}" if equation.output.dtype == np.bool_ else "{0} * {1}",
    simplify=_times_one,
)
div = elementwise("div", np.divide, lambda y, a, b: 1 / b, lambda y, a, b: -y / b, doc="a / b", scalar="{0} / {1}")
neg = elementwise("neg", np.negative, lambda y, x: -1, doc="-x", infer=infer_number, scalar="-{0}")
square = elementwise("square", np.square, lambda y, x: 2 * x, doc="x²", infer=infer_number, scalar="{0} * {0}")
reciprocal = elementwise(
    "reciprocal", np.reciprocal, lambda y, x: -square(y), doc="1 / x", scalar="1.0 / {0}", infer=infer_float
)


def pow_base(y: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """Return the derivative of a power by its base."""
    if isinstance(p, Literal) and p.item() not in (0, 1):
        return p * (x if p.item() == 2 else pow(x, p.item() - 1))
    # p x^(p-1), and 0 at x = p = 0, where x^(p-1) is infinite.
    return p * pow(x, where(equal(p, 0) * equal(x, 0), 1, p - 1))


def pow_exponent(y: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """Return the derivative of a power by its exponent."""
    # y log x, and its limit 0 at x = 0 for p >= 0, where log x is infinite.
    return y * log(where(equal(x, 0) * greater_equal(p, 0), 1, x))


def _pow_scalar(equation: Equation) -> str:
    # numpy takes the square root where the exponent is 0.5, which of -0 and of -inf is another one.
    p = equation.inputs[1]
    if not isinstance(p, Literal):
        return "pow({0}, {1}) if {1} != 0.5 or {0} > 0.0 else edge()"
    return "pow({0}, {1}) if {0} > 0.0 else edge()" if p.item() == 0.5 else "pow({0}, {1})"


def _infer_pow(x: Tensor, p: Tensor) -> tuple[Shape, Any]:
    if x.dtype == np.bool_ and p.dtype.kind in "iu":
        raise DTypeError("expected numbers, got truth values; convert with astype()")
    shape, dtype = infer_elementwise(x, p)
    if dtype.kind not in "iu":
        return shape, float_only(dtype)
    if p.__class__ is not Literal or p.item() < 0:
        raise DTypeError(f"powers of {dtype} are those of a number that is not negative; convert with astype()")
    return shape, dtype


def _pow_jvp(tangents: Tangents, y: Tensor, x: Tensor, p: Tensor) -> Tensor | None:
    base, exponent = tangents
    by_base = None if base is None else scaled(base, pow_base(y, x, p))
    if exponent is None:
        return by_base
    # Where the exponent has no tangent, it passes no NaN on, which log x is where x is negative. A derivative that is
    # finite counts there, too, since the tangent may be differentiated by.
    slope = pow_exponent(y, x, p)
    by_exponent = scaled(exponent, (logical_or(not_equal(exponent, 0), isfinite(slope)), slope))
    return by_exponent if by_base is None else by_base + by_exponent


pow = elementwise(
    "pow",
    np.power,
    pow_base,
    pow_exponent,
    doc="x to the power p",
    scalar=_pow_scalar,
    infer=_infer_pow,
    jvp=_pow_jvp,
)

# Exponentials and logarithms ------------------------------------------------------------------------------

exp = elementwise("exp", np.exp, lambda y, x: y, doc="e to the x", scalar="exp({0})")
expm1 = elementwise("expm1", np.expm1, lambda y, x: y + 1, doc="exp(x) - 1, exact near 0", scalar="expm1({0})")
log = elementwise("log", np.log, lambda y, x: 1 / x, doc="natural logarithm", scalar="log({0})")
log1p = elementwise("log1p", np.log1p, lambda y, x: 1 / (x + 1), doc="log(1 + x), exact near 0", scalar="log1p({0})")
sqrt = elementwise("sqrt", np.sqrt, lambda y, x: 0.5 / y, doc="square root", scalar="sqrt({0})")
cbrt = elementwise("cbrt", np.cbrt, lambda y, x: 1 / (3 * square(y)), doc="cube root")
exp2 = elementwise("exp2", np.exp2, lambda y, x: y * math.log(2), doc="2 to the x", scalar="pow(2.0, {0})")
log2 = elementwise("log2", np.log2, lambda y, x: 1 / (x * math.log(2)), doc="binary logarithm", scalar="log2({0})")
log10 = elementwise(
    "log10", np.log10, lambda y, x: 1 / (x * math.log(10)), doc="decimal logarithm", scalar="log10({0})"
)
logaddexp = elementwise(
    "logaddexp",
    np.logaddexp,
    lambda y, a, b: sigmoid(_apart(y, a, b)),
    lambda y, a, b: sigmoid(_apart(y, b, a)),
    doc="log(exp(a) + exp(b)), without overflow",
    commutes=True,
)


def _apart(y: Tensor, mine: Tensor, other: Tensor) -> Tensor:
    # Two infinitely small terms have logaddexp -inf and the derivative 0, not NaN.
    return where(equal(y, -np.inf), -np.inf, mine - other)


# Trigonometric and hyperbolic functions -------------------------------------------------------------------

sin = elementwise("sin", np.sin, lambda y, x: cos(x), doc="sine", scalar="sin({0})")
cos: Op = elementwise("cos", np.cos, lambda y, x: neg(sin(x)), doc="cosine", scalar="cos({0})")
tan = elementwise("tan", np.tan, lambda y, x: 1 + square(y), doc="tangent", scalar="tan({0})")
arcsin = elementwise("arcsin", np.arcsin, lambda y, x: 1 / sqrt(1 - square(x)), doc="inverse sine", scalar="asin({0})")
arccos = elementwise(
    "arccos", np.arccos, lambda y, x: -1 / sqrt(1 - square(x)), doc="inverse cosine", scalar="acos({0})"
)
arctan = elementwise("arctan", np.arctan, lambda y, x: 1 / (1 + square(x)), doc="inverse tangent", scalar="atan({0})")
sinh = elementwise("sinh", np.sinh, lambda y, x: cosh(x), doc="hyperbolic sine", scalar="sinh({0})")
cosh: Op = elementwise("cosh", np.cosh, lambda y, x: sinh(x), doc="hyperbolic cosine", scalar="cosh({0})")
tanh = elementwise("tanh", np.tanh, lambda y, x: 1 - square(y), doc="hyperbolic tangent", scalar="tanh({0})")
arcsinh = elementwise(
    "arcsinh",
    np.arcsinh,
    lambda y, x: 1 / sqrt(1 + square(x)),
    doc="inverse hyperbolic sine",
    scalar="asinh({0})",
)
arccosh = elementwise(
    "arccosh",
    np.arccosh,
    lambda y, x: 1 / sqrt((x - 1) * (x + 1)),
    doc="inverse hyperbolic cosine",
    scalar="acosh({0})",
)
arctanh = elementwise(
    "arctanh",
    np.arctanh,
    lambda y, x: 1 / ((1 - x) * (1 + x)),
    doc="inverse hyperbolic tangent",
    scalar="atanh({0})",
)


def _over_square(part: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """part / (a² + b²), whose squares may overflow or vanish."""
    length = hypot(a, b)
    return part / length / length


arctan2 = elementwise(
    "arctan2",
    np.arctan2,
    lambda y, a, b: _over_square(b, a, b),
    lambda y, a, b: -_over_square(a, a, b),
    doc="the angle of the point (b, a), from -π to π",
    scalar="atan2({0}, {1})",
)


def _hypot(a: Array, b: Array, out: Array, squares: Array, other: Array) -> None:
    # Where no square overflows, or loses digits near 0, their root is several times faster than numpy's function.
    info = np.finfo(out.dtype)
    with np.errstate(over="ignore", under="ignore"):
        np.square(a, squares)
        np.square(b, other)
        np.add(squares, other, squares)
    if squares.min() > info.tiny / info.eps and squares.max() < np.inf:
        np.sqrt(squares, out)
    else:
        np.hypot(a, b, out)


def _bind_hypot(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    a, b = arrays
    if out.size <= LARGE:
        return [partial(np.hypot, a, b, out)]
    return [partial(_hypot, a, b, out, *(scratch(out.shape, out.dtype) for _ in range(2)))]


hypot = elementwise(
    "hypot",
    None,
    lambda y, a, b: _share_of(a, y),
    lambda y, a, b: _share_of(b, y),
    numpy=np.hypot,
    bind=_bind_hypot,
    doc="√(a² + b²), without overflow; derivative 0 at the origin",
    commutes=True,
    scalar="hypot({0}, {1})",
)


def _share_of(a: Tensor, y: Tensor) -> Tensor:
    at_origin = equal(y, 0)
    return where(at_origin, 0, a / where(at_origin, 1, y))


deg2rad = elementwise("deg2rad", np.deg2rad, lambda y, x: math.pi / 180, doc="degrees as radians")
rad2deg = elementwise("rad2deg", np.rad2deg, lambda y, x: 180 / math.pi, doc="radians as degrees")


def _sinc_slope(y: Tensor, x: Tensor) -> Tensor:
    # (cos πx - sinc x) / x, which cancels near 0: there its series, so that the derivatives of every order are right.
    near = less(abs(x), 0.25)
    z = where(near, square(np.pi * x), 0)
    terms = [2 * k * (-1.0) ** k / math.factorial(2 * k + 1) for k in builtins.range(9, 0, -1)]
    series: Any = terms[0]
    for term in terms[1:]:
        series = series * z + term
    return where(near, np.pi**2 * x * series, (cos(np.pi * x) - y) / where(near, 1, x))


def _sinc(x: Array, out: Array) -> None:
    np.multiply(np.pi, x, out)
    zero = out == 0
    np.divide(np.sin(out), np.where(zero, 1, out) if zero.any() else out, out)
    np.copyto(out, 1, where=zero)


SINC = elementwise("sinc", _sinc, _sinc_slope, doc="sin(πx) / (πx), and 1 at 0")


@implements(np.sinc)
def sinc(x: Operand) -> Tensor:
    """sin(πx) / (πx), and 1 at 0."""
    return SINC(x)


# Activations ----------------------------------------------------------------------------------------------


def _sigmoid(x: Array, out: Array) -> None:
    np.negative(x, out)
    with np.errstate(over="ignore"):  # exp overflows to infinity for x << 0, and 1 / infinity is the limit
        np.exp(out, out)
    np.add(out, 1, out)
    np.reciprocal(out, out)


def bind_sigmoid(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    """Return the calls that compute sigmoid."""
    (x,) = arrays
    one = np.ones((), x.dtype)
    return [
        partial(np.negative, x, out),
        partial(np.exp, out, out),
        partial(np.add, out, one, out),
        partial(np.reciprocal, out, out),
    ]


def _softplus(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    # max(x, 0) + log1p(exp(-|x|)): never overflows; np.logaddexp does the same several times slower.
    (x,) = arrays
    rest = scratch(x.shape, x.dtype)
    return [
        partial(np.absolute, x, rest),
        partial(np.negative, rest, rest),
        partial(np.exp, rest, rest),
        partial(np.log1p, rest, rest),
        partial(np.maximum, x, 0, out=out),
        partial(np.add, out, rest, out),
    ]


def _relu(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    # numpy's maximum is vectorised for two arrays, and not for an array and a number. Zeros that are never written
    # take no memory where they are many: the system maps one page of zeros over and over.
    (x,) = arrays
    straight = x.flags.c_contiguous and out.flags.c_contiguous and x.shape == out.shape
    return [partial(np.maximum, x, np.zeros(x.shape, x.dtype) if straight else 0, out=out)]


def _step(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    (x,) = arrays
    above = scratch(out.shape, np.bool_)
    return [partial(np.greater, x, np.zeros((), x.dtype), above), partial(np.copyto, out, above)]


sigmoid: Op = elementwise(
    "sigmoid",
    _sigmoid,
    lambda y, x: y * (1 - y),
    doc="1 / (1 + exp(-x))",
    bind=bind_sigmoid,
    scalar="1.0 / (1.0 + exp(-{0}))",
)
softplus = elementwise(
    "softplus",
    None,
    lambda y, x: sigmoid(x),
    doc="log(1 + exp(x))",
    bind=_softplus,
    scalar="max({0}, 0.0) + log1p(exp(-abs({0})))",
)
relu = elementwise(
    "relu",
    None,
    lambda y, x: greater.apply((y, ZEROS[y.dtype]), NO_ATTRS),
    doc="max(x, 0)",
    infer=infer_float,
    bind=_relu,
    scalar="{0} if {0} > 0.0 or {0} != {0} else 0.0",
)
step: Op = elementwise(
    "step",
    None,
    lambda y, x: 0,
    doc="1 where x > 0, else 0; derivative 0",
    infer=infer_float,
    bind=_step,
    scalar="1.0 if {0} > 0.0 else 0.0",
)
sign = elementwise(
    "sign",
    np.sign,
    lambda y, x: 0,
    doc="-1, 0 or 1; derivative 0",
    infer=infer_number,
    scalar="copysign(1.0, {0}) if {0} < 0.0 or {0} > 0.0 else {0} + 0.0",
)
abs = elementwise("abs", np.absolute, lambda y, x: sign(x), doc="absolute value", infer=infer_number, scalar="abs({0})")

# Choices --------------------------------------------------------------------------------------------------


def _share(y: Tensor, mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    # 1 for the winner, 1/2 for a tie, 0 for the loser.
    return equal(y, mine), 1 - 0.5 * equal_mask(mine, other)


def _equal_mask(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    a, b = arrays
    mask = scratch(out.shape, np.bool_)
    return [partial(np.equal, a, b, mask), partial(np.copyto, out, mask)]


def _inside(y: Tensor, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    # Not where the bounds are the wrong way round: there the result is `high`, whatever x is.
    return equal(y, x) if _in_order(low, high) else equal(y, x) * less_equal(low, high)


def _at_low(y: Tensor, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return less(x, low) if _in_order(low, high) else less(x, low) * less_equal(low, high)


def _in_order(low: Tensor, high: Tensor) -> bool:
    """Whether the bounds are numbers written in the program, the right way round."""
    return low.__class__ is Literal is high.__class__ and bool(low.data <= high.data)  # type: ignore[operator]


equal_mask = elementwise(
    "equal_mask",
    None,
    lambda y, a, b: 0,
    lambda y, a, b: 0,
    doc="1.0 where a = b, else 0.0; derivative 0",
    infer=infer_float,
    bind=_equal_mask,
    scalar="1.0 if {0} == {1} else 0.0",
)
maximum = elementwise(
    "maximum",
    lambda a, b, out: np.maximum(a, b, out=out),
    lambda y, a, b: _share(y, a, b),
    lambda y, a, b: _share(y, b, a),
    doc="the larger; ties share the gradient",
    infer=infer_number,
    numpy=np.maximum,
    scalar="{0} if {0} > {1} or {0} != {0} else {1}",
)
minimum = elementwise(
    "minimum",
    lambda a, b, out: np.minimum(a, b, out=out),
    lambda y, a, b: _share(y, a, b),
    lambda y, a, b: _share(y, b, a),
    doc="the smaller; ties share the gradient",
    infer=infer_number,
    numpy=np.minimum,
    scalar="{0} if {0} < {1} or {0} != {0} else {1}",
)
CLIP = elementwise(
    "clip",
    lambda x, low, high, out: np.clip(x, low, high, out=out),
    _inside,
    _at_low,
    lambda y, x, low, high: greater(maximum(x, low), high),
    doc="x limited to [low, high]",
    infer=infer_number,
)


@implements(np.clip)
def clip(
    a: Operand,
    a_min: Operand | None = NO_VALUE,
    a_max: Operand | None = NO_VALUE,
    out: None = None,
    *,
    min: Operand | None = NO_VALUE,
    max: Operand | None = NO_VALUE,
    **kwargs: Any,
) -> Tensor:
    """Limit `a` to [a_min, a_max]; None leaves that side open. The gradient passes at the bounds.

    Where the lower bound is above the upper one, the result is the upper one, as numpy's.
    """
    refuse("clip", out=(out,), **{name: (value, *UFUNC_DEFAULTS.get(name, ())) for name, value in kwargs.items()})
    if a_min is NO_VALUE is a_max:
        a_min, a_max = min, max
    elif a_min is NO_VALUE or a_max is NO_VALUE:
        raise DTypeError("clip: a_min and a_max are given together; None leaves a side open")
    elif min is not NO_VALUE or max is not NO_VALUE:
        raise ConfigurationError("clip: min and max mean the same as a_min and a_max; give one pair of them")
    low, high = (None if bound is NO_VALUE else bound for bound in (a_min, a_max))
    if isinstance(a, (bool, np.bool_)):
        raise DTypeError("clip: expected numbers, got a truth value")
    x = as_tensor(a)
    if x.dtype == np.bool_:
        raise DTypeError("clip: expected numbers, got truth values; convert with astype()")
    if low is None or high is None:
        given = [bound for bound in (low, high) if bound is not None]
        common = np.result_type(*[part.dtype for part in as_tensors((x, *given))])
        least, most = (np.iinfo(common).min, np.iinfo(common).max) if common.kind in "iu" else (-np.inf, np.inf)
        low, high = least if low is None else low, most if high is None else high
    return CLIP(x, low, high)


BOOL = np.dtype(np.bool_)

LARGE = 256
LARGEST_BOUND = 16_383
"""Bytes: of larger arrays a replay takes the caller's own, which other views of them would not follow."""

_BITS: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}


def _infer_where(condition: Tensor, a: Tensor, b: Tensor) -> tuple[Shape, Any]:
    if a.dtype is b.dtype and condition.shape == a.shape and (not b.shape or b.shape == a.shape):
        return a.shape, a.dtype
    return broadcast((condition, a, b)), common_dtype((a, b))


SELECTED = 8192
"""Elements of a larger result are selected by their bits where the condition jumps between them: there the processor
guesses the branches of numpy's masked copy wrongly."""


def _jumps(condition: Array) -> bool:
    """Whether the condition may change often from one element to the next: it is neither rare nor rarely false."""
    n = condition.size
    return n < 20 * int(np.count_nonzero(condition)) < 19 * n


def _where(condition: Array, a: Array, b: Array, out: Array, spare: Array | None = None) -> None:
    if out.size > LARGE and not b.shape and out.dtype in FLOATS and not b.tobytes().strip(b"\0"):
        # Zeros elsewhere: numpy selects several times more slowly than it multiplies the bits, as integers, by 1 and 0.
        kind = _BITS[out.itemsize]
        np.copyto(out.view(kind), condition)
        np.multiply(out.view(kind), a.view(kind), out.view(kind))
        return
    if out.size > SELECTED and out.dtype in FLOATS and _jumps(condition):
        # ((a ^ b) & m) ^ a with the bits of m all 0 where the condition holds, else all 1; `out` may be that of b.
        kind = _BITS[out.itemsize]
        mask = np.empty(condition.shape, kind) if spare is None else spare
        np.copyto(mask, condition)
        np.subtract(mask, 1, mask)
        bits, of_a = out.view(kind), a.view(kind)
        np.bitwise_xor(of_a, b.view(kind), bits)
        np.bitwise_and(bits, mask, bits)
        np.bitwise_xor(bits, of_a, bits)
        return
    np.copyto(out, b)
    np.copyto(out, a, where=condition)


def bind_where(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    """Return the calls that take the second array where the first, of truth values, holds, and the third elsewhere."""
    condition, a, b = arrays
    if out.size > LARGE and out.nbytes <= LARGEST_BOUND and out.dtype in FLOATS and b is ZEROS[out.dtype].data:
        bits = out.view(_BITS[out.itemsize])
        return [partial(np.copyto, bits, condition), partial(np.multiply, bits, a.view(bits.dtype), bits)]
    if out.size > SELECTED and out.dtype in FLOATS:
        return [partial(_where, condition, a, b, out, scratch(condition.shape, _BITS[out.itemsize]))]
    return [partial(_where, condition, a, b, out)]


def _where_jvp(tangents: Sequence[Tensor | None], y: Tensor, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    _, tangent_a, tangent_b = tangents
    return WHERE(condition, 0 if tangent_a is None else tangent_a, 0 if tangent_b is None else tangent_b)


def _as_numbers(equation: Equation, made: Mapping[int, Equation]) -> Equation | None:
    # 1 where the condition holds and 0 elsewhere.
    (condition, a, b), y = equation.inputs, equation.output
    if not is_one(a, made) or b is not ZEROS.get(y.dtype) or condition.shape != y.shape:
        return None
    return Equation(ASTYPE, (condition,), {"dtype": y.dtype}, equation.outputs, equation.scope)


WHERE: Op = define(
    name="where",
    infer=_infer_where,
    kernel=_where,
    bind=bind_where,
    vjp=(
        no_gradient,
        lambda g, y, condition, a, b: WHERE(condition, g, 0),
        lambda g, y, condition, a, b: WHERE(condition, 0, g),
    ),
    jvp=_where_jvp,
    overwrites=(2,),
    elementwise=True,
    scalar="{1} if {0} else {2}",
    simplify=_as_numbers,
    doc="a where the condition holds, else b",
)


@implements(np.where)
def where(condition: Operand, x: Operand = NO_VALUE, y: Operand = NO_VALUE, /) -> Tensor:
    """Take `x` where the boolean `condition` holds and `y` elsewhere.

    The branch not taken gets gradient zero, but its values are computed: keep them finite where their
    derivative is used (`where(x > 0, log(where(x > 0, x, 1)), 0)`).
    """
    if x is NO_VALUE is y:
        return NUMPY[np.nonzero](condition)  # type: ignore[no-any-return]  # positions, as numpy's
    if x is NO_VALUE or y is NO_VALUE:
        raise ShapeError("where: either both or neither of the two results must be given, where(condition, x, y)")
    chosen = as_tensor(condition)
    if chosen.dtype != np.bool_:
        raise DTypeError(f"where: expected a boolean condition, got {chosen.dtype}; compare, e.g. x > 0")
    if isinstance(x, (int, np.number, np.bool_)) and isinstance(y, (int, np.number, np.bool_)):  # as numpy's, no floats
        dtype = np.result_type(x, y)
        x, y = Literal(np.asarray(x, dtype)), Literal(np.asarray(y, dtype))
    return WHERE(chosen, *as_tensors((x, y)))


# Remainders -----------------------------------------------------------------------------------------------
#
# Between the places where the quotient jumps they are linear.

floor_divide = register(
    Op(
        "floor_divide",
        infer_number,
        np.floor_divide,
        constant=True,
        overwrites=(0, 1),
        elementwise=True,
        doc="the largest whole number that is not above a / b; derivative 0",
    ),
    np.floor_divide,
)
mod = elementwise(
    "mod",
    np.remainder,
    lambda y, a, b: 1,
    lambda y, a, b: -floor_divide(a, b),
    doc="what remains of a divided by b, with the sign of b",
    infer=infer_number,
)


def _quotient(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The quotient of a / b that fmod has taken: a / b itself may be rounded up to a whole number."""
    return ROUND((a - y) / b)


fmod = elementwise(
    "fmod",
    np.fmod,
    lambda y, a, b: 1,
    lambda y, a, b: -_quotient(y, a, b),
    doc="what remains of a divided by b, with the sign of a",
    infer=infer_number,
)
copysign = elementwise(
    "copysign",
    np.copysign,
    lambda y, a, b: sign(a) * sign(y),
    lambda y, a, b: 0,
    doc="|a| with the sign of b",
    scalar="copysign({0}, {1})",
)

# Comparisons ----------------------------------------------------------------------------------------------


def _comparison(name: str, ufunc: np.ufunc, doc: str, scalar: str) -> Op:
    def infer(a: Tensor, b: Tensor) -> tuple[Shape, Any]:
        if a.dtype is not b.dtype:
            common_dtype((a, b))
        return a.shape if a.shape == b.shape or not b.shape else broadcast((a, b)), BOOL

    op = Op(name, infer, ufunc, constant=True, elementwise=True, scalar=scalar, doc=doc)
    return register(op, ufunc)


less: Op = _comparison("less", np.less, "a < b, as booleans", "{0} < {1}")
less_equal: Op = _comparison("less_equal", np.less_equal, "a <= b, as booleans", "{0} <= {1}")
greater: Op = _comparison("greater", np.greater, "a > b, as booleans", "{0} > {1}")
greater_equal = _comparison("greater_equal", np.greater_equal, "a >= b, as booleans", "{0} >= {1}")
equal: Op = _comparison("equal", np.equal, "a = b, as booleans", "{0} == {1}")
not_equal = _comparison("not_equal", np.not_equal, "a ≠ b, as booleans", "{0} != {1}")

# Truth values and whole numbers ---------------------------------------------------------------------------
#
# Constant on purpose: between the places where they jump, these functions don't change.


def _truth(name: str, ufunc: np.ufunc, doc: str, scalar: str | None = None) -> Op:
    def infer(*inputs: Tensor) -> tuple[Shape, Any]:
        return broadcast(inputs), np.dtype(np.bool_)

    return register(Op(name, infer, ufunc, constant=True, elementwise=True, scalar=scalar, doc=doc), ufunc)


def _rounding(name: str, ufunc: np.ufunc, doc: str) -> Op:
    return register(Op(name, infer_float, ufunc, constant=True, overwrites=(0,), elementwise=True, doc=doc), ufunc)


isnan = _truth("isnan", np.isnan, "whether x is NaN")
isfinite = _truth("isfinite", np.isfinite, "whether x is neither infinite nor NaN", "{0} - {0} == 0")
isinf = _truth("isinf", np.isinf, "whether x is infinite")
logical_and = _truth("logical_and", np.logical_and, "whether neither a nor b is 0")
logical_or = _truth("logical_or", np.logical_or, "whether a or b is not 0", "{0} != 0 or {1} != 0")
logical_not = _truth("logical_not", np.logical_not, "whether x is 0")
floor = _rounding("floor", np.floor, "the largest whole number that is not above x")
ceil = _rounding("ceil", np.ceil, "the smallest whole number that is not below x")
trunc: Op = _rounding("trunc", np.trunc, "x without its fraction")
ROUND = _rounding("round", np.rint, "the nearest whole number, halves to the even one")


@implements(np.round, np.around, constant=True)
def round(a: Operand, decimals: int = 0, out: None = None) -> Tensor:
    """Round to the nearest number with `decimals` decimals, halves to the even one; derivative 0."""
    refuse("round", out=(out,))
    digits = whole(decimals, "round: decimals")
    x = as_tensor(a)
    if x.dtype.kind in "iu" and digits >= 0:
        return stop_gradient(x)
    if not digits:
        return ROUND(x)
    float_only(x.dtype)
    with np.errstate(over="ignore"):
        scale = float(np.float64(10.0) ** builtins.abs(digits))
    return ROUND(x * scale) / scale if digits > 0 else ROUND(x / scale) * scale


@implements(np.fix, constant=True)
def _fix(x: Operand, out: None = None) -> Tensor:
    refuse("fix", out=(out,))
    return trunc(x)


@implements(np.logical_xor, constant=True)
def _logical_xor(x1: Operand, x2: Operand, /) -> Tensor:
    return not_equal(logical_not(x1), logical_not(x2))


@implements(np.isclose, constant=True)
def _isclose(a: Operand, b: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    a, b = as_tensors((a, b))
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise DTypeError(f"isclose: {name} must be a number, got {value!r}")
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        b = astype(b, np.float64)  # so that differences do not wrap around
    near = logical_and(less_equal(abs(a - b), atol + rtol * abs(b)), isfinite(b))
    close = logical_or(near, equal(a, b))
    return logical_or(close, logical_and(isnan(a), isnan(b))) if equal_nan else close


def bitwise(symbol: str, op: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Return the operator of truth values `symbol` (&, |, ^, ~), which is the logical op.

    Raises:
        DTypeError: an operand is not of truth values.
    """
    tensors = as_tensors(operands)
    for x in tensors:
        if x.dtype != np.bool_:
            raise DTypeError(f"{symbol} is for truth values on tensors, got {x.dtype}; compare, e.g. x > 0")
    return op(*tensors)


@implements(np.bitwise_and, constant=True)
def _bitwise_and(x1: Operand, x2: Operand, /) -> Tensor:
    return bitwise("&", logical_and, x1, x2)


@implements(np.bitwise_or, constant=True)
def _bitwise_or(x1: Operand, x2: Operand, /) -> Tensor:
    return bitwise("|", logical_or, x1, x2)


@implements(np.bitwise_xor, constant=True)
def _bitwise_xor(x1: Operand, x2: Operand, /) -> Tensor:
    return bitwise("^", not_equal, x1, x2)


@implements(np.invert, constant=True)
def _invert(x: Operand, /) -> Tensor:
    return bitwise("~", logical_not, x)


# Conversions ----------------------------------------------------------------------------------------------


def _infer_astype(x: Tensor, dtype: Any) -> tuple[Shape, Any]:
    if x.level and dtype.kind == "f" and dtype not in FLOATS and STATE.grad_enabled:
        raise DTypeError(
            f"gradients flow through float32 and float64, not {dtype}; convert stop_gradient(x), which has none"
        )
    return x.shape, dtype


ASTYPE: Op = define(
    name="astype",
    infer=_infer_astype,
    kernel=lambda x, out, dtype: np.copyto(out, x, casting="unsafe"),
    vjp=(lambda g, y, x, dtype: astype(g, x.dtype),),
    jvp=lambda t, y, x, dtype: astype(t[0], dtype),
    batch=leading,
    sparsity=one_to_one,
    scalar=lambda equation: "1.0 if {0} else 0.0" if equation.output.dtype in FLOATS else "{0} != 0.0",
    flops=lambda x, dtype: 0,
    doc="convert to another dtype",
)


def astype(x: Operand, dtype: DTypeLike) -> Tensor:
    """Convert to `dtype`; between float types the gradient is converted back.

    NaN, infinite and too large numbers become the integers that numpy makes of them, which the processor decides:
    eagerly with numpy's RuntimeWarning, in a compiled function without.
    """
    x, dtype = as_tensor(x), as_dtype(dtype)
    return x if x.dtype == dtype else ASTYPE(x, dtype=dtype)


stop_gradient = define(
    "stop_gradient",
    infer_same,
    view=lambda x: x,
    constant=True,
    batch=leading,
    in_order=True,
    scalar="{0}",
    simplify=lambda equation, made: equation.inputs[0],
    doc="x as a constant: no gradient flows through it",
)
identity = define(
    "identity",
    infer_same,
    view=lambda x: x,
    vjp=(lambda g, y, x: g,),
    jvp=lambda t, y, x: t[0],
    batch=leading,
    in_order=True,
    scalar="{0}",
    simplify=lambda equation, made: equation.inputs[0],
    doc="x itself, as a new node",
)
