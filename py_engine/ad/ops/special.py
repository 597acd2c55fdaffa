"""Special functions, by our own formulas: the error function and the gamma function's relatives.

In float64 `erf` is within 6 units in the last place, `erfc` within 16, `gammaln` and `polygamma` within 1e-13 of the
value or, near their zeros, of the largest term of their sums. The twins compute the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad.op import Op, Shape, as_tensor, define, elementwise, float_only
from py_engine.ad.ops.arguments import whole
from py_engine.ad.ops.elementary import exp, reciprocal, square
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ConfigurationError

# The error function -------------------------------------------------------------------------------------------
#
# W. J. Cody, Rational Chebyshev approximations for the error function, Mathematics of Computation 23 (1969): numerators
# and denominators, the highest power first, for |x| <= 0.46875, up to 4, and beyond.

NEAR = (
    (1.85777706184603153e-1, 3.16112374387056560, 113.864154151050156, 377.485237685302021, 3209.37758913846947),
    (1.0, 23.6012909523441209, 244.024637934444173, 1282.61652607737228, 2844.23683343917062),
)
MIDDLE = (
    (
        *(2.15311535474403846e-8, 0.564188496988670089, 8.88314979438837594, 66.1191906371416295),
        *(298.635138197400131, 881.952221241769090, 1712.04761263407058, 2051.07837782607147, 1230.33935479799725),
    ),
    (
        *(1.0, 15.7449261107098347, 117.693950891312499, 537.181101862009858, 1621.38957456669019),
        *(3290.79923573345963, 4362.61909014324716, 3439.36767414372164, 1230.33935480374942),
    ),
)
FAR = (
    (
        *(1.63153871373020978e-2, 0.305326634961232344, 0.360344899949804439, 0.125781726111229246),
        *(1.60837851487422766e-2, 6.58749161529837803e-4),
    ),
    (
        *(1.0, 2.56852019228982242, 1.87295284992346725, 0.527905102951428412, 6.05183413124413191e-2),
        2.33520497626869185e-3,
    ),
)


BLOCK = 12_288
"""Elements that are computed at once, so that what is made on the way stays in the cache."""

Formula = Callable[[Array], Array]


def _in_blocks(formula: Formula, x: Array, out: Array, dtype: Any = None) -> None:
    """Compute `out` from x by a formula for vectors, of `dtype` where it is given."""
    x = np.ascontiguousarray(x).reshape(-1)
    found = out.reshape(-1) if out.flags.c_contiguous else np.empty(x.shape, out.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, x.size, BLOCK):
            block = slice(start, start + BLOCK)
            found[block] = formula(np.asarray(x[block], dtype))
    if not out.flags.c_contiguous:
        np.copyto(out, found.reshape(out.shape))


def _by_regions(x: Array, *regions: tuple[Array, Formula]) -> Array:
    """Return for each element of x the formula of its region, x itself where it is in none (NaN)."""
    found: Array | None = None
    for inside, formula in regions:
        places = np.flatnonzero(inside)  # several times as fast an index as truth values that change often
        if places.size == x.size:
            return formula(x)
        if places.size:
            found = np.array(x) if found is None else found
            found[places] = formula(x.take(places))
    return x if found is None else found


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    """Return the polynomial at x, the highest power first."""
    found: Array = x * coefficients[0]
    found += coefficients[1]
    for coefficient in coefficients[2:]:
        found *= x
        found += coefficient
    return found


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    above, below = coefficients
    found = _polynomial(above, x)
    found /= _polynomial(below, x)
    return found


def _exp_of_minus_square(x: Array) -> Array:
    """Return exp(-x²) for x >= 0, without the rounding of x²: what is squared has few digits, and the rest is small."""
    short = np.floor(x * 16) / 16
    found: Array = np.exp(-short * short)
    found *= np.exp(-(x - short) * (x + short))
    return found


def _erf_near(x: Array) -> Array:
    return x * _ratio(NEAR, x * x)


def _erfc_middle(size: Array) -> Array:
    return _exp_of_minus_square(size) * _ratio(MIDDLE, size)


def _erfc_far(size: Array) -> Array:
    size = np.minimum(size, 30)
    inverse = 1 / (size * size)
    found = inverse * _ratio(FAR, inverse)
    np.subtract(1 / math.sqrt(math.pi), found, found)
    found /= size
    return _exp_of_minus_square(size) * found


def _of_erf(near: Formula, rest: Callable[[Array, Array], Array]) -> Formula:
    """Return a formula from those near 0 and, by x and erfc(|x|), elsewhere."""

    def formula(x: Array) -> Array:
        size = np.abs(x)
        return _by_regions(
            x,
            (size <= 0.46875, near),
            ((size > 0.46875) & (size <= 4), lambda x: rest(x, _erfc_middle(np.abs(x)))),
            (size > 4, lambda x: rest(x, _erfc_far(np.abs(x)))),
        )

    return formula


_erf = partial(_in_blocks, _of_erf(_erf_near, lambda x, rest: np.copysign(1 - rest, x)))
_erfc = partial(_in_blocks, _of_erf(lambda x: 1 - _erf_near(x), lambda x, rest: np.where(x < 0, 2 - rest, rest)))
erf = elementwise(
    "erf", _erf, lambda y, x: 2 / math.sqrt(math.pi) * exp(-square(x)), doc="the error function 2/√π ∫₀ˣ exp(-t²) dt"
)
erfc = elementwise(
    "erfc", _erfc, lambda y, x: -2 / math.sqrt(math.pi) * exp(-square(x)), doc="1 - erf(x), exact where that is small"
)

# The gamma function -----------------------------------------------------------------------------------------------
#
# Both shift x by the functions' recurrences, and take the asymptotic series there. What is negative is reflected first.
# The factors, and terms, of a shift are taken in pairs, from both ends: (x + k) (x + m - k) = x (x + m) + k (m - k).

SHIFT = 16
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
LOG_GAMMA_SERIES = tuple(b / (2 * k * (2 * k - 1)) for k, b in enumerate(BERNOULLI, 1))
MOST_DERIVATIVES = 150
"""Of `digamma`: the factorial of a larger number and what it is multiplied with are beyond float64."""


def _to_whole(x: Array) -> Array:
    """Return what lies between x and the next whole number, exactly, from -0.5 to 0.5."""
    found: Array = x - np.rint(x)
    return found


def _gammaln_beyond(x: Array) -> Array:
    """Return log Γ(x) for x >= 8, by Stirling's series."""
    inverse = 1 / x
    found = _polynomial(LOG_GAMMA_SERIES[::-1], inverse * inverse)
    found *= inverse
    found += (x - 0.5) * (np.log(x) - 1)
    found += math.log(2 * math.pi) / 2 - 0.5
    return found


def _gammaln_shifted(x: Array) -> Array:
    """Return log Γ(x) = log Γ(x + 8) - log(x (x + 1) … (x + 7)) for x from 0.5 to 8."""
    ends = x * (x + 7)
    product = ends * (ends + 6)
    product *= ends + 10
    product *= ends + 12
    found: Array = _gammaln_beyond(x + 8) - np.log(product)
    return found


def _gammaln_above(x: Array) -> Array:
    return _by_regions(x, (x >= 8, _gammaln_beyond), (x < 8, _gammaln_shifted))


def _gammaln_reflected(x: Array) -> Array:
    found = math.log(math.pi) - np.log(np.abs(np.sin(math.pi * _to_whole(x)))) - _gammaln_above(1 - x)
    return np.where(x == np.floor(x), np.inf, found)


def _gammaln(x: Array, out: Array) -> None:
    def formula(x: Array) -> Array:
        return _by_regions(x, (x >= 0.5, _gammaln_above), (x < 0.5, _gammaln_reflected))

    _in_blocks(formula, x, out, np.float64)


def _infer_polygamma(x: Tensor, n: int) -> tuple[Shape, Any]:
    return x.shape, float_only(x.dtype)


def _power(x: Array, n: int) -> Array:
    """Return xⁿ by products, n >= 1."""
    found = x if n == 1 else _power(x * x, n // 2)
    return found * x if n % 2 and n > 1 else found


def _polygamma_beyond(x: Array, n: int) -> Array:
    """Return derivative `n` of digamma for x >= SHIFT + n, by its asymptotic series."""
    inverse = 1 / x
    factors = [math.comb(2 * k + n - 1, 2 * k) if n else 1 / (2 * k) for k in range(1, len(BERNOULLI) + 1)]
    series = _polynomial([b * f for b, f in zip(BERNOULLI, factors, strict=True)][::-1], inverse * inverse)
    series *= inverse
    series *= inverse
    if n == 0:
        return np.log(x) - 0.5 * inverse - series
    found = inverse  # (n - 1)! / xⁿ, whose factors may be beyond the range of numbers
    for k in range(1, n):
        found = found * (k * inverse)
    return (-1.0) ** (n + 1) * found * (1 + n / 2 * inverse + series)


def _polygamma_shifted(x: Array, n: int) -> Array:
    """Return derivative `n` of digamma at 0 <= x < SHIFT + n, from that at x + SHIFT + n, or one further."""
    shift = SHIFT + n + n % 2
    if n == 0:
        ends = x * (x + (shift - 1))
        total = 1 / ends
        for k in range(1, shift // 2):
            total += 1 / (ends + k * (shift - 1 - k))
        total *= 2 * x + (shift - 1)
    else:
        total = _power(1 / x, n + 1)
        for k in range(1, shift):
            total += _power(1 / (x + k), n + 1)
    found: Array = _polygamma_beyond(x + shift, n) - (-1.0) ** n * math.factorial(n) * total
    return found


def _polygamma_above(x: Array, n: int) -> Array:
    beyond = x >= SHIFT + n
    return _by_regions(x, (beyond, partial(_polygamma_beyond, n=n)), (~beyond, partial(_polygamma_shifted, n=n)))


def _polygamma_reflected(x: Array, n: int) -> Array:
    found = (-1.0) ** n * _polygamma_above(1 - x, n) - math.pi ** (n + 1) * _slope_of_cot(_to_whole(x), n)
    return np.where(x == np.floor(x), np.inf if n % 2 else np.nan, found)


def _polygamma(x: Array, out: Array, n: int) -> None:
    def formula(x: Array) -> Array:
        return _by_regions(x, (x >= 0, partial(_polygamma_above, n=n)), (x < 0, partial(_polygamma_reflected, n=n)))

    _in_blocks(formula, x, out, np.float64)


def _slope_of_cot(x: Array, n: int) -> Array:
    """Return derivative `n` of the cotangent at πx, |x| <= 0.5, a polynomial of it: (cot)' = -(1 + cot²)."""
    near = np.abs(x) <= 0.25
    of_rest = np.copysign(np.tan(math.pi * (0.5 - np.abs(x))), x)  # the smaller of both angles has all its digits
    cot = np.where(near, 1 / np.tan(math.pi * np.where(near, x, 0.25)), of_rest)
    polynomial = np.array([1.0, 0.0])
    for _ in range(n):
        polynomial = np.polymul([-1.0, 0.0, -1.0], np.polyder(polynomial))
    found: Array = np.polyval(polynomial, cot)
    return found


POLYGAMMA: Op = define(
    name="polygamma",
    infer=_infer_polygamma,
    kernel=_polygamma,
    vjp=(lambda g, y, x, n: g * POLYGAMMA(x, n=n + 1),),
    jvp=lambda t, y, x, n: t[0] * POLYGAMMA(x, n=n + 1),
    elementwise=True,
    doc="derivative n of digamma",
)
gammaln = elementwise("gammaln", _gammaln, lambda y, x: digamma(x), doc="log |Γ(x)|")


def digamma(x: Operand) -> Tensor:
    """The derivative of `gammaln`."""
    return POLYGAMMA(as_tensor(x), n=0)


def polygamma(n: int, x: Operand) -> Tensor:
    """Derivative `n` of `digamma`, for n up to `MOST_DERIVATIVES`; at negative poles inf for odd n, NaN for even n."""
    order = whole(n, "polygamma: n")
    if order < 0:
        raise ConfigurationError(f"polygamma: n must not be negative, got {n}")
    if order > MOST_DERIVATIVES:
        raise ConfigurationError(f"polygamma: n must be {MOST_DERIVATIVES} at most, got {n}")
    return POLYGAMMA(as_tensor(x), n=order)


# The logistic function's inverse ------------------------------------------------------------------------------


def _logit(x: Array, out: Array) -> None:
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        off = 2 * (x - 0.5)
        found = np.where(np.abs(off) < 0.5, np.log1p(off) - np.log1p(-off), np.log(x) - np.log1p(-x))
    np.copyto(out, found)


logit = elementwise(
    "logit",
    _logit,
    lambda y, x: reciprocal(x * (1 - x)),
    doc="log(x / (1 - x)), the inverse of sigmoid, exact near 0.5",
)
