"""Distributions of `scipy.stats` on tensors, by their formulas: `norm`, `t`, `chi2`, `gamma`, `beta`, `poisson`,
`dirichlet` and `multivariate_normal`.

Arguments are scipy's: x, the distribution's parameters, `loc` and `scale`, which broadcast together. Outside of a
distribution's support its density is 0, and where a parameter is out of range every result is NaN, as in scipy.
Distribution functions are derived by x, `loc` and `scale`; by other parameters they raise, where no formula is known
(the incomplete gamma and beta functions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.op import as_floats, as_tensor
from py_engine.ad.ops.scipy_functions import log_density_of_t
from py_engine.ad.tensor import Operand, Tensor
from py_engine.errors import ParameterError, ShapeError
from py_engine.scipy import special
from py_engine.scipy.linalg import solve_triangular

__all__ = ["beta", "chi2", "dirichlet", "gamma", "multivariate_normal", "norm", "poisson", "t"]

HALF_LOG_TWO_PI = math.log(2 * math.pi) / 2


def _power(base: Tensor, exponent: Tensor | float) -> Tensor:
    """Return exponent * log(base), 0 where both are 0."""
    return exponent * ops.log(ops.where((base == 0) & (exponent == 0), 1, base))


def _log_of_share(share: Tensor, rest: Tensor) -> Tensor:
    """Return the logarithm of a share of 1, exact next to 1 by the rest."""
    most = share > 0.5
    return ops.where(most, ops.log1p(-ops.where(most, rest, 0)), ops.log(ops.where(most, 1, share)))


# Of one variable ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """A continuous distribution of one variable.

    Attributes:
        name: scipy's.
        parameters: the names of those besides `loc` and `scale`, all positive.
        log_density: of x within the support and of the parameters, for `loc` 0 and `scale` 1.
        below: the probability of at most x.
        above: the probability of more than x.
        log_below, log_above: their logarithms, None to take them.
        support: where the density is not 0.
        inside: a number in the support, at which formulas are evaluated in place of what is outside.
    """

    name: str
    parameters: tuple[str, ...]
    log_density: Callable[..., Tensor]
    below: Callable[..., Tensor]
    above: Callable[..., Tensor]
    log_below: Callable[..., Tensor] | None = None
    log_above: Callable[..., Tensor] | None = None
    support: tuple[float, float] = (-math.inf, math.inf)
    inside: float = 0.5

    def logpdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of the density at `x`."""
        return self._log_density("logpdf", x, parameters, named)

    def pdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The density at `x`."""
        return ops.exp(self._log_density("pdf", x, parameters, named))

    def cdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The probability of at most `x`."""
        return self._probability("cdf", self.below, x, parameters, named)

    def sf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The probability of more than `x`, exact where it is small."""
        return self._probability("sf", self.above, x, parameters, named)

    def logcdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of `cdf`."""
        of = self.log_below or (lambda *at: _log_of_share(self.below(*at), self.above(*at)))
        return self._probability("logcdf", of, x, parameters, named)

    def logsf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of `sf`."""
        of = self.log_above or (lambda *at: _log_of_share(self.above(*at), self.below(*at)))
        return self._probability("logsf", of, x, parameters, named)

    def _log_density(self, function: str, x: Operand, parameters: Sequence[Operand], named: Any) -> Tensor:
        z, own, scale, valid = self._standard(function, x, parameters, named)
        low, high = self.support
        within = (z >= low) & (z <= high) & (ops.abs(z) < np.inf)
        found = self.log_density(ops.where(within, z, self.inside), *own) - ops.log(scale)
        return ops.where(valid, ops.where(within, found, -np.inf), np.nan)

    def _probability(
        self, function: str, of: Callable[..., Tensor], x: Operand, parameters: Sequence[Operand], named: Any
    ) -> Tensor:
        z, own, _, valid = self._standard(function, x, parameters, named)
        low, high = self.support
        z = ops.where(z < low, low, ops.where(z > high, high, z))
        return ops.where(valid, of(z, *own), np.nan)

    def _standard(
        self, function: str, x: Operand, parameters: Sequence[Operand], named: Mapping[str, Operand]
    ) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        """Return x for `loc` 0 and `scale` 1, the other parameters, `scale`, and where all of them are in range."""
        given = arguments(f"{self.name}.{function}", (*self.parameters, "loc", "scale"), parameters, named)
        x, *own, loc, scale = as_floats(x, *given)
        z = (x - loc) / scale
        valid = (scale > 0) & (z == z)
        for parameter in own:
            valid = valid & (parameter > 0)
        return z, own, scale, valid


def arguments(
    function: str, names: tuple[str, ...], given: Sequence[Operand], named: Mapping[str, Operand]
) -> list[Operand]:
    """Return the parameters of a call in the order of their names; `loc` is 0 and `scale` 1 where they are left out.

    Raises:
        ParameterError: there are too many, one has another name or is given twice, or one is missing.
    """
    found: dict[str, Operand] = {"loc": 0.0, "scale": 1.0, **dict(zip(names, given, strict=False)), **named}
    twice = [name for name in names[: len(given)] if name in named]
    unknown = [name for name in named if name not in names]
    missing = [name for name in names if name not in found]
    if len(given) > len(names) or twice or unknown or missing:
        what = (
            f"{twice[0]!r} is given twice" if twice else
            f"there is no parameter {unknown[0]!r}" if unknown else
            f"{missing[0]!r} is missing" if missing else f"{len(given)} are given"
        )  # fmt: skip
        raise ParameterError(f"{function}: the parameters after x are {', '.join(names)}, but {what}")
    return [found[name] for name in names]


def _log_density_of_gamma(z: Tensor, a: Tensor) -> Tensor:
    return _power(z, a - 1) - z - ops.gammaln(a)


def _log_density_of_chi2(z: Tensor, df: Tensor) -> Tensor:
    return _log_density_of_gamma(z / 2, df / 2) - math.log(2)


def _log_density_of_beta(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    beyond = (z == 1) & (b == 1)
    found: Tensor = _power(z, a - 1) + (b - 1) * ops.log1p(ops.where(beyond, 0, -z)) - special.betaln(a, b)
    return found


norm = Distribution(
    "norm",
    (),
    lambda z: -(z * z) / 2 - HALF_LOG_TWO_PI,
    lambda z: ops.erfc(z * -math.sqrt(0.5)) / 2,
    lambda z: ops.erfc(z * math.sqrt(0.5)) / 2,
    lambda z: special.log_ndtr(z),
    lambda z: special.log_ndtr(-z),
)
t = Distribution(
    "t",
    ("df",),
    lambda z, df: log_density_of_t(df, z),
    lambda z, df: special.stdtr(df, z),
    lambda z, df: special.stdtr(df, -z),
)
gamma = Distribution(
    "gamma",
    ("a",),
    _log_density_of_gamma,
    lambda z, a: special.gammainc(a, z),
    lambda z, a: special.gammaincc(a, z),
    support=(0, math.inf),
)
chi2 = Distribution(
    "chi2",
    ("df",),
    _log_density_of_chi2,
    lambda z, df: special.gammainc(df / 2, z / 2),
    lambda z, df: special.gammaincc(df / 2, z / 2),
    support=(0, math.inf),
)
beta = Distribution(
    "beta",
    ("a", "b"),
    _log_density_of_beta,
    lambda z, a, b: special.betainc(a, b, z),
    lambda z, a, b: special.betainc(b, a, 1 - z),
    support=(0, 1),
)


class Poisson:
    """Poisson's distribution of counts k with mean `mu`; derivatives are those by `mu`."""

    def logpmf(self, k: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of the probability of `k`; -inf where it is no count."""
        return self._log_mass("logpmf", k, parameters, named)

    def pmf(self, k: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The probability of `k`."""
        return ops.exp(self._log_mass("pmf", k, parameters, named))

    def _log_mass(self, function: str, k: Operand, parameters: Sequence[Operand], named: Any) -> Tensor:
        k, mu, valid = self._shifted(function, k, parameters, named)
        counts = (k >= 0) & (k == ops.floor(k))
        found = _power(mu, ops.where(counts, k, 0)) - ops.gammaln(ops.where(counts, k, 0) + 1) - mu
        return ops.where(valid, ops.where(counts, found, -np.inf), np.nan)

    def cdf(self, k: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The probability of at most `k`."""
        k, mu, valid = self._shifted("cdf", k, parameters, named)
        found = special.gammaincc(ops.floor(ops.where(k < 0, 0, k)) + 1, mu)
        return ops.where(valid, ops.where(k < 0, 0, found), np.nan)

    def _shifted(
        self, function: str, k: Operand, parameters: Sequence[Operand], named: Mapping[str, Operand]
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = arguments(f"poisson.{function}", ("mu", "loc"), parameters, named)
        k, mu, loc = as_floats(k, *given)
        k = ops.stop_gradient(k - loc)
        return k, mu, (mu >= 0) & (k == k)


poisson = Poisson()

# Of several variables -------------------------------------------------------------------------------------

OFF_SIMPLEX = 1e-6
"""How far the sum of a point's coordinates may lie from 1."""


class Dirichlet:
    """Dirichlet's distribution of points (K,), or columns (K, N), whose coordinates are positive and sum to one."""

    def logpdf(self, x: Operand, alpha: Operand) -> Tensor:
        """The logarithm of the density at `x`, () or (N,).

        It is -inf where x is no such point, and NaN if `alpha` is not positive. As in scipy the last coordinate may be
        left out: x is (K - 1,) or (K - 1, N) then.
        """
        x, alpha = as_floats(x, alpha)
        if alpha.ndim != 1 or x.ndim not in (1, 2) or x.shape[0] not in (alpha.size, alpha.size - 1):
            raise ShapeError(
                f"dirichlet: alpha must be (K,), and x (K,), (K, N), or shorter by the last coordinate, "
                f"got {alpha.shape} and {x.shape}"
            )
        if x.shape[0] < alpha.size:
            x = ops.concatenate([x, 1 - ops.sum(x, 0, keepdims=True)])
        powers = alpha - 1 if x.ndim == 1 else (alpha - 1)[:, np.newaxis]
        inside = np.all(x >= 0, axis=0) & (ops.abs(ops.sum(x, 0) - 1) <= OFF_SIMPLEX)
        found = ops.sum(_power(ops.where(inside, x, 1), powers), axis=0)
        found = found - ops.sum(ops.gammaln(alpha)) + ops.gammaln(ops.sum(alpha))
        return ops.where(np.all(alpha > 0), ops.where(inside, found, -np.inf), np.nan)

    def pdf(self, x: Operand, alpha: Operand) -> Tensor:
        """The density at `x`, see `logpdf`."""
        return ops.exp(self.logpdf(x, alpha))


dirichlet = Dirichlet()


class MultivariateNormal:
    """The normal distribution of vectors (..., K), with `mean` (K,) and covariance `cov` (K, K).

    `cov` may also be a vector, the diagonal, or a number, that of each variable. Matrices must be symmetric and
    positive definite; `allow_singular=True` allows those that are singular: then there is no density off the subspace
    that they span (0), and within it that of the subspace. Derivatives by `cov` count both triangles.
    """

    def logpdf(self, x: Operand, mean: Operand | None = None, cov: Operand = 1, allow_singular: bool = False) -> Tensor:
        """The logarithm of the density at each vector of `x`, (...).

        Raises:
            LinearAlgebraError: `cov` is not positive definite, and `allow_singular` is false.
            ShapeError: shapes do not fit together.
        """
        points, center, cov = self._parameters(x, mean, cov)
        apart = points - center
        if allow_singular:
            root, log_determinant, rank = _root_of_singular(cov)
            standard = apart @ root.within
            off = ops.sqrt(ops.sum((apart @ root.off) ** 2, axis=-1)) > root.tolerance
        else:
            factor = np.linalg.cholesky((cov + cov.T) / 2)
            columns = ops.reshape(apart, (-1, cov.shape[0])).T
            standard = ops.reshape(solve_triangular(factor, columns, lower=True).T, apart.shape)
            log_determinant, rank, off = 2 * ops.sum(ops.log(np.diagonal(factor))), as_tensor(cov.shape[0]), None
        found = -(ops.sum(standard * standard, axis=-1) + log_determinant) / 2 - rank * HALF_LOG_TWO_PI
        return found if off is None else ops.where(off, -np.inf, found)

    def pdf(self, x: Operand, mean: Operand | None = None, cov: Operand = 1, allow_singular: bool = False) -> Tensor:
        """The density at each vector of `x`, see `logpdf`."""
        return ops.exp(self.logpdf(x, mean, cov, allow_singular))

    def entropy(self, mean: Operand | None = None, cov: Operand = 1) -> Tensor:
        """The differential entropy, a number in nats."""
        _, _, cov = self._parameters(None, mean, cov)
        factor = np.linalg.cholesky((cov + cov.T) / 2)
        return cov.shape[0] * (HALF_LOG_TWO_PI + 0.5) + ops.sum(ops.log(np.diagonal(factor)))

    def _parameters(self, x: Operand | None, mean: Operand | None, cov: Operand) -> tuple[Tensor, Tensor, Tensor]:
        given = as_floats(0.0 if x is None else x, 0.0 if mean is None else mean, cov)
        points, center, matrix = given
        count = next((part.shape[-1] for part in (matrix, center) if part.ndim), 1)
        if points.ndim < 2 and count == 1:  # numbers, not the coordinates of one vector
            points = points[..., np.newaxis]
        if matrix.ndim < 2:
            matrix = ops.broadcast_to(matrix, (count,)) * np.eye(count, dtype=matrix.dtype)
        fits = matrix.shape == (count, count) and center.shape in ((), (count,))
        if not fits or not (x is None or points.shape[-1:] == (count,)):
            raise ShapeError(
                f"multivariate_normal: x (..., K), mean (K,) and cov (K, K) must fit together, got "
                f"{', '.join(str(part.shape) for part in given)}"
            )
        return points, center, matrix


@dataclass(frozen=True)
class _Root:
    """What takes vectors to standard ones, what takes them off the subspace, and how far off they may be."""

    within: Tensor
    off: Tensor
    tolerance: Tensor


def _root_of_singular(cov: Tensor) -> tuple[_Root, Tensor, Tensor]:
    """Return the root, the logarithm of the product of the eigenvalues that are not 0, and their number."""
    values, vectors = map(as_tensor, np.linalg.eigh(cov))
    precision = (1e6 if cov.dtype == np.float64 else 1e3) * float(np.finfo(cov.dtype).eps)
    least = ops.stop_gradient(ops.max(ops.abs(values))) * precision
    kept = values > least
    values = ops.where(kept, values, 1)
    within = vectors * ops.where(kept, 1 / ops.sqrt(values), 0)
    root = _Root(within, vectors * ops.where(kept, 0.0, 1.0), least)
    return root, ops.sum(ops.where(kept, ops.log(values), 0)), ops.sum(ops.where(kept, 1.0, 0.0))


multivariate_normal = MultivariateNormal()
