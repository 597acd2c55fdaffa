"""Special functions, by formulas of our own: the error function and the gamma function's relatives.

In float64 `erf` is within 6 units in the last place, `erfc` within 16, `gammaln` and `polygamma` within 1e-13 of the
value or, near their zeros, of the largest term of their sums. The twins compute the same formulas.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from py_engine.ad.op import Op, Shape, as_tensor, define, elementwise, float_only
from py_engine.ad.ops.arguments import whole
from py_engine.ad.ops.elementary import exp, reciprocal, square
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ShapeError

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


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    above, below = coefficients
    found: Array = np.polyval(np.array(above, x.dtype), x) / np.polyval(np.array(below, x.dtype), x)
    return found


def _erfc_scaled(size: Array) -> Array:
    """Return exp(x²) erfc(x) for x > 0.46875."""
    inverse = 1 / square_of(np.maximum(size, 4))
    root = size.dtype.type(1 / math.sqrt(math.pi))
    far = (root - inverse * _ratio(FAR, inverse)) / np.maximum(size, 4)
    return np.where(size <= 4, _ratio(MIDDLE, np.minimum(size, 4)), far)


def square_of(x: Array) -> Array:
    """Return x²."""
    return x * x


def _exp_of_minus_square(x: Array) -> Array:
    """Return exp(-x²) for x >= 0, without the rounding of x²: what is squared has few digits, and the rest is small."""
    short = np.floor(x * 16) / 16
    found: Array = np.exp(-short * short) * np.exp(-(x - short) * (x + short))
    return found


def _erf_pieces(x: Array) -> tuple[Array, Array, Array]:
    """Return |x| <= 0.46875, erf there, and erfc(|x|) elsewhere."""
    size = np.abs(x)
    near = size <= 0.46875
    inside = np.where(near, x, 0)
    outside = np.where(near, 1, np.minimum(size, 30))
    return near, inside * _ratio(NEAR, inside * inside), _exp_of_minus_square(outside) * _erfc_scaled(outside)


def _erf(x: Array, out: Array) -> None:
    x = np.asarray(x)
    near, inside, rest = _erf_pieces(x)
    found = np.where(near, inside, np.copysign(1 - rest, x))
    np.copyto(out, np.where(np.isnan(x), x, found))


def _erfc(x: Array, out: Array) -> None:
    x = np.asarray(x)
    near, inside, rest = _erf_pieces(x)
    found = np.where(near, 1 - inside, np.where(x < 0, 2 - rest, rest))
    np.copyto(out, np.where(np.isnan(x), x, found))


erf = elementwise(
    "erf", _erf, lambda y, x: 2 / math.sqrt(math.pi) * exp(-square(x)), doc="the error function 2/√π ∫₀ˣ exp(-t²) dt"
)
erfc = elementwise(
    "erfc", _erfc, lambda y, x: -2 / math.sqrt(math.pi) * exp(-square(x)), doc="1 - erf(x), exact where that is small"
)

# The gamma function -----------------------------------------------------------------------------------------------
#
# Both shift x beyond `LARGE` by the functions' recurrences, and take the asymptotic series there. What is negative is
# reflected first.

LARGE = 16
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
MOST_DERIVATIVES = 150
"""Of `digamma`: the factorial of a larger number and what it is multiplied with are beyond float64."""


def _to_whole(x: Array) -> Array:
    """Return what lies between x and the next whole number, exactly, from -0.5 to 0.5."""
    found: Array = x - np.rint(x)
    return found


def _gammaln_above_zero(x: Array) -> Array:
    product = np.ones_like(x)
    for _ in range(LARGE):
        small = x < LARGE
        product = np.where(small, product * x, product)
        x = np.where(small, x + 1, x)
    inverse = 1 / x
    series = np.zeros_like(x)
    for k in range(len(BERNOULLI), 0, -1):
        series = series * inverse * inverse + BERNOULLI[k - 1] / (2 * k * (2 * k - 1))
    half = math.log(2 * math.pi) / 2
    found: Array = (x - 0.5) * (np.log(x) - 1) + (half - 0.5) + series * inverse - np.log(product)
    return found


def _gammaln(x: Array, out: Array) -> None:
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        negative = x < 0.5
        found = _gammaln_above_zero(np.where(negative, 1 - x, x))
        reflected = math.log(math.pi) - np.log(np.abs(np.sin(math.pi * _to_whole(x)))) - found
        found = np.where(negative, reflected, found)
        found = np.where(np.isinf(x) | ((x <= 0) & (x == np.floor(x))), np.inf, found)
    np.copyto(out, np.where(np.isnan(x), x, found), casting="same_kind")


def _infer_polygamma(x: Tensor, n: int) -> tuple[Shape, Any]:
    return x.shape, float_only(x.dtype)


def _polygamma(x: Array, out: Array, n: int) -> None:
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        total = np.zeros_like(x)
        at = np.where(x < 0, 1 - x, x)
        while (small := at < LARGE + n).any():
            total = np.where(small, total + at ** -(n + 1.0), total)
            at = np.where(small, at + 1, at)
        inverse = 1 / at
        series = np.zeros_like(x)
        for k in range(len(BERNOULLI), 0, -1):
            factor = math.comb(2 * k + n - 1, 2 * k) if n else 1 / (2 * k)
            series = series * inverse * inverse + BERNOULLI[k - 1] * factor
        if n == 0:
            found = np.log(at) - 0.5 * inverse - series * inverse**2 - total
        else:
            first = inverse  # (n - 1)! / xⁿ, whose factors may be beyond the range of numbers
            for k in range(1, n):
                first = first * (k * inverse)
            series = first * (1 + n / 2 * inverse + series * inverse**2)
            found = (-1.0) ** (n + 1) * (series + math.factorial(n) * total)
        if (x < 0).any():
            found = np.where(x < 0, (-1.0) ** n * found - math.pi ** (n + 1) * _slope_of_cot(_to_whole(x), n), found)
        found = np.where((x < 0) & (x == np.floor(x)), np.inf if n % 2 else np.nan, found)
    np.copyto(out, found, casting="same_kind")


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
        raise ShapeError(f"polygamma: n must not be negative, got {n}")
    if order > MOST_DERIVATIVES:
        raise ShapeError(f"polygamma: n must be {MOST_DERIVATIVES} at most, got {n}")
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
