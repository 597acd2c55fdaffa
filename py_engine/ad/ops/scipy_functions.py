"""More of scipy.special's functions on tensors, computed by scipy where the caller has imported it.

This is the only module that imports scipy, late. scipy's ufuncs reach it when one of them meets a tensor: their ops are
not in the table, and have no twins. A derivative for which no formula is known raises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from py_engine.ad.op import Op, elementwise
from py_engine.ad.ops.elementary import (
    cbrt,
    cos,
    exp,
    exp2,
    expm1,
    log,
    log1p,
    sigmoid,
    sign,
    sin,
    square,
    where,
)
from py_engine.ad.ops.special import digamma, erf, erfc, gammaln, logit
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, NotDifferentiableError

NAMES: dict[str, Callable[..., Tensor]] = {
    **{"erf": erf, "erfc": erfc, "gammaln": gammaln},
    **{"psi": digamma, "expit": sigmoid, "logit": logit},
    **{"cbrt": cbrt, "exp2": exp2, "expm1": expm1, "log1p": log1p},
}
"""The ufuncs of scipy.special that are our own ops, by name."""


def installed(module: str, what: str) -> Any:
    """Return one of scipy's modules, which a function named `what` needs.

    Raises:
        ConfigurationError: scipy is not installed.
    """
    try:
        import scipy
    except ImportError as error:
        raise ConfigurationError(f"{what} needs scipy.{module} ({error}): pip install scipy") from None
    return getattr(scipy, module)  # which imports it


def full_name(ufunc: Any) -> str:
    """The name of one of numpy's or scipy's ufuncs with that of its library."""
    special = sys.modules.get("scipy.special")
    name = ufunc.__name__
    return f"scipy.special.{name}" if special and getattr(special, name, None) is ufunc else f"numpy.{name}"


def stand_in(ufunc: Any) -> Callable[..., Tensor] | None:
    """Return what stands in for one of scipy.special's ufuncs on tensors, or None."""
    special = sys.modules.get("scipy.special")
    name = ufunc.__name__
    if special is None or getattr(special, name, None) is not ufunc:
        return None
    return NAMES[name] if name in NAMES else _ops(special).get(name)


@cache
def _ops(special: Any) -> dict[str, Op]:
    found: dict[str, Op] = {}

    def row(name: str, *partials: Any) -> None:
        ufunc = getattr(special, name)
        partials = tuple([_unknown(name, i) if known is None else known for i, known in enumerate(partials)])
        found[name] = elementwise(
            f"scipy.special.{name}", ufunc, *partials, doc=f"scipy.special.{name}", in_table=False
        )

    def of(name: str) -> Op:
        return found[name]

    half_root = math.sqrt(math.pi) / 2
    row("gamma", lambda y, x: y * digamma(x))
    row("rgamma", partial(_slope_of_rgamma, of))
    row("gammasgn", lambda y, x: 0)
    row("beta", lambda y, a, b: y * (digamma(a) - digamma(a + b)), lambda y, a, b: y * (digamma(b) - digamma(a + b)))
    row("betaln", lambda y, a, b: digamma(a) - digamma(a + b), lambda y, a, b: digamma(b) - digamma(a + b))
    row("erfinv", lambda y, x: half_root * exp(square(y)))
    row("erfcinv", lambda y, x: -half_root * exp(square(y)))
    row("gammainc", None, partial(_gamma_density, of))
    row("gammaincc", None, lambda y, a, x: -_gamma_density(of, y, a, x))
    row("betainc", None, None, partial(_beta_density, of))
    row("stdtr", None, lambda y, df, t: exp(log_density_of_t(df, t)))
    row("j0", lambda y, x: -of("j1")(x))
    row("j1", lambda y, x: (of("j0")(x) - of("jv")(2, x)) / 2)
    row("y0", lambda y, x: -of("y1")(x))
    row("y1", lambda y, x: (of("y0")(x) - of("yn")(2, x)) / 2)
    row("i0", lambda y, x: of("i1")(x))
    row("i1", lambda y, x: (of("i0")(x) + of("iv")(2, x)) / 2)
    for name, sign_of_next in (("jv", -1), ("yn", -1), ("iv", 1)):
        row(name, None, partial(_neighbours, of, name, sign_of_next))
    row("ive", None, lambda y, n, x: (of("ive")(n - 1, x) + of("ive")(n + 1, x)) / 2 - sign(x) * y)
    row("xlogy", lambda y, x, p: log(p), lambda y, x, p: x / where((x == 0) & (p == 0), 1, p))
    row("xlog1py", lambda y, x, p: log1p(p), lambda y, x, p: x / where((x == 0) & (p == -1), 1, 1 + p))
    row("ndtr", lambda y, x: exp(-square(x) / 2) / math.sqrt(2 * math.pi))
    row("erfcx", _slope_of_erfcx)
    row("log_ndtr", lambda y, x: _slope_of_log_ndtr(of, x))
    row("log_expit", lambda y, x: sigmoid(-x))
    return found


def _unknown(name: str, i: int) -> Callable[..., Tensor]:
    def partial(y: Tensor, *operands: Tensor) -> Tensor:
        raise NotDifferentiableError(
            f"scipy.special.{name}: no formula is known for the derivative by operand {i} of {len(operands)}, counted "
            "from 0; a constant there needs none: stop_gradient(x)"
        )

    return partial


def _slope_of_rgamma(of: Callable[[str], Op], y: Tensor, x: Tensor) -> Tensor:
    """The derivative of 1/Γ, which has those of any order where Γ has its poles, too: of Γ(1 - x) sin(πx) / π there."""
    below = x < 0.5
    small = where(below, x, 0.5)
    reflected = of("gamma")(1 - small) * (cos(math.pi * small) - digamma(1 - small) * sin(math.pi * small) / math.pi)
    return where(below, reflected, -y * digamma(where(below, 0.5, x)))


def _gamma_density(of: Callable[[str], Op], y: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """The derivative of `gammainc` by x, 0 at infinity; at 0 by a power, which has derivatives there."""
    there, zero = x == math.inf, x == 0
    at = where(there | zero, 1, x)
    inside = exp(of("xlogy")(a - 1, at) - at - gammaln(a))
    end = where(zero, x, 1)
    return where(there, 0, where(zero, end ** (a - 1) * exp(-end - gammaln(a)), inside))


def _beta_density(of: Callable[[str], Op], y: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The derivative of `betainc` by x; at 0 and 1 by powers, which have derivatives there."""
    at_end = (x == 0) | (x == 1)
    at = where(at_end, 0.5, x)
    inside = exp(of("xlogy")(a - 1, at) + of("xlog1py")(b - 1, -at) - of("betaln")(a, b))
    end = where(at_end, x, 0.5)
    return where(at_end, end ** (a - 1) * (1 - end) ** (b - 1) * exp(-of("betaln")(a, b)), inside)


ERFCX_SERIES = tuple(math.prod(range(1, 2 * k, 2)) * (-0.5) ** k for k in range(6, 0, -1))


def _slope_of_log_ndtr(of: Callable[[str], Callable[..., Tensor]], x: Tensor) -> Tensor:
    """The density over the distribution function: where both vanish by erfcx, which grows without limit elsewhere."""
    above = x > 0
    high, low = where(above, x, 0), where(above, 0, x)
    density = exp(-square(high) / 2) / math.sqrt(2 * math.pi)
    return where(above, density / of("ndtr")(high), math.sqrt(2 / math.pi) / of("erfcx")(low * -math.sqrt(0.5)))


def _slope_of_erfcx(y: Tensor, x: Tensor) -> Tensor:
    """2 x y - 2 / √π, by its asymptotic series where its terms cancel."""
    least = 50.0 if x.dtype == np.float64 else 10.0
    far = x > least
    inverse = 1 / square(where(far, x, least))
    series = inverse * ERFCX_SERIES[0]
    for coefficient in ERFCX_SERIES[1:]:
        series = (series + coefficient) * inverse
    direct = 2 * where(far, least, x) * y - 2 / math.sqrt(math.pi)
    return where(far, series * (2 / math.sqrt(math.pi)), direct)


def log_density_of_t(df: Tensor, t: Tensor) -> Tensor:
    """The logarithm of the density of Student's distribution, the normal one for infinitely many degrees of freedom."""
    normal = df == math.inf
    finite = where(normal, 1, df)
    density = _log_ratio_of_gammas(finite / 2) - log(finite * math.pi) / 2
    density = density - (finite + 1) / 2 * log1p(square(t) / finite)
    return where(normal, -square(t) / 2 - math.log(2 * math.pi) / 2, density)


def _log_ratio_of_gammas(x: Tensor) -> Tensor:
    """Return log Γ(x + ½) - log Γ(x), by its asymptotic series where the two are large and nearly equal."""
    far = x > 50
    large, small = where(far, x, 50), where(far, 50, x)
    inverse = 1 / large
    squared = square(inverse)
    series = ((squared * (17 / 14336) - 1 / 640) * squared + 1 / 192) * squared - 1 / 8
    return where(far, log(large) / 2 + series * inverse, gammaln(small + 0.5) - gammaln(small))


def _neighbours(of: Callable[[str], Op], name: str, sign_of_next: int, y: Tensor, n: Tensor, x: Tensor) -> Tensor:
    """The derivative of Bessel functions by x, from those of the orders beside."""
    return (of(name)(n - 1, x) + sign_of_next * of(name)(n + 1, x)) / 2
