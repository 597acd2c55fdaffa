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
from py_engine.ad.control.custom import custom_rule
from py_engine.ad.op import as_floats, as_tensor
from py_engine.ad.ops.scipy_functions import log_density_of_t
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import LinearAlgebraError, NotDifferentiableError, ParameterError, ShapeError
from py_engine.scipy import special
from py_engine.scipy.linalg import solve_triangular

__all__ = ["beta", "chi2", "dirichlet", "gamma", "multivariate_normal", "norm", "poisson", "t"]

HALF_LOG_TWO_PI = math.log(2 * math.pi) / 2


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return exponent * log(base), 0 where both are 0."""
    return as_tensor(special.xlogy(exponent, base))


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
        density: the density as a product of powers, for the ends of the support, where the logarithm's is infinite.
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
    density: Callable[..., Tensor] | None = None
    support: tuple[float, float] = (-math.inf, math.inf)
    inside: float = 0.5

    def logpdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of the density at `x`."""
        return self._log_density(*self._standard("logpdf", x, parameters, named))

    def pdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The density at `x`."""
        z, own, scale, valid = self._standard("pdf", x, parameters, named)
        if self.density is None:
            return ops.exp(self._log_density(z, own, scale, valid))
        end = ((z == self.support[0]) | (z == self.support[1])) & (ops.abs(z) < np.inf)
        elsewhere = ops.exp(self._log_density(ops.where(end, self.inside, z), own, scale, valid))
        at_end = self.density(ops.where(end, z, self.inside), *own) / scale
        return ops.where(end, ops.where(valid, at_end, np.nan), elsewhere)

    def cdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The probability of at most `x`."""
        return self._probability("cdf", self.below, (0, 1), x, parameters, named)

    def sf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The probability of more than `x`, exact where it is small."""
        return self._probability("sf", self.above, (1, 0), x, parameters, named)

    def logcdf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of `cdf`."""
        of = self.log_below or (lambda *at: _log_of_share(self.below(*at), self.above(*at)))
        return self._probability("logcdf", of, (-np.inf, 0), x, parameters, named)

    def logsf(self, x: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of `sf`."""
        of = self.log_above or (lambda *at: _log_of_share(self.above(*at), self.below(*at)))
        return self._probability("logsf", of, (0, -np.inf), x, parameters, named)

    def _log_density(self, z: Tensor, own: Sequence[Tensor], scale: Tensor, valid: Tensor) -> Tensor:
        low, high = self.support
        within = (z >= low) & (z <= high) & (ops.abs(z) < np.inf)
        found = self.log_density(ops.where(within, z, self.inside), *own) - ops.log(scale)
        return ops.where(valid, ops.where(within, found, -np.inf), np.nan)

    def _probability(
        self,
        function: str,
        of: Callable[..., Tensor],
        ends: tuple[float, float],
        x: Operand,
        parameters: Sequence[Operand],
        named: Any,
    ) -> Tensor:
        z, own, _, valid = self._standard(function, x, parameters, named)
        below, above = (z < self.support[0]) | (z == -np.inf), (z > self.support[1]) | (z == np.inf)
        found = of(ops.where(below | above, self.inside, z), *own)
        found = ops.where(below, ends[0], ops.where(above, ends[1], found))
        return ops.where(valid, found, np.nan)

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
    found: Tensor = _power(z, a - 1) + special.xlog1py(b - 1, -z) - special.betaln(a, b)
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
    density=lambda z, a: z ** (a - 1) * ops.exp(-z - ops.gammaln(a)),
    support=(0, math.inf),
)
chi2 = Distribution(
    "chi2",
    ("df",),
    _log_density_of_chi2,
    lambda z, df: special.gammainc(df / 2, z / 2),
    lambda z, df: special.gammaincc(df / 2, z / 2),
    density=lambda z, df: (z / 2) ** (df / 2 - 1) * ops.exp(-z / 2 - ops.gammaln(df / 2)) / 2,
    support=(0, math.inf),
)
beta = Distribution(
    "beta",
    ("a", "b"),
    _log_density_of_beta,
    lambda z, a, b: special.betainc(a, b, z),
    lambda z, a, b: special.betainc(b, a, 1 - z),
    density=lambda z, a, b: z ** (a - 1) * (1 - z) ** (b - 1) * ops.exp(-special.betaln(a, b)),
    support=(0, 1),
)


class Poisson:
    """Poisson's distribution of counts k with mean `mu`; derivatives are those by `mu`."""

    def logpmf(self, k: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The logarithm of the probability of `k`; -inf where it is no count."""
        return self._log_mass(*self._shifted("logpmf", k, parameters, named))

    def pmf(self, k: Operand, *parameters: Operand, **named: Operand) -> Tensor:
        """The probability of `k`."""
        k, mu, valid = self._shifted("pmf", k, parameters, named)
        end = mu == 0  # where powers have derivatives, and logarithms none
        count = ops.where(end & (k >= 0) & (k == ops.floor(k)) & (k < np.inf), k, 0)
        at_end = ops.where(end, mu, 1) ** count * ops.exp(-mu - ops.gammaln(count + 1))
        at_end = ops.where(count == k, at_end, 0)
        return ops.where(end & valid, at_end, ops.exp(self._log_mass(k, ops.where(end, 1, mu), valid)))

    def _log_mass(self, k: Tensor, mu: Tensor, valid: Tensor) -> Tensor:
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
        inside = ops.all(x >= 0, axis=0) & (ops.abs(ops.sum(x, 0) - 1) <= OFF_SIMPLEX)
        found = ops.sum(_power(ops.where(inside, x, 1), powers), axis=0)
        found = found - ops.sum(ops.gammaln(alpha)) + ops.gammaln(ops.sum(alpha))
        known = ops.all(alpha > 0) & ops.all(x == x, axis=0)
        return ops.where(known, ops.where(inside, found, -np.inf), np.nan)

    def pdf(self, x: Operand, alpha: Operand) -> Tensor:
        """The density at `x`, see `logpdf`. At the simplex's faces, where it is 0, it has no derivative but NaN."""
        return ops.exp(self.logpdf(x, alpha))


dirichlet = Dirichlet()


class MultivariateNormal:
    """The normal distribution of vectors (..., K), with `mean` (K,) and covariance `cov` (K, K).

    `cov` may also be a vector, the diagonal, or a number, that of each variable. Matrices must be symmetric and
    positive definite; `allow_singular=True` allows those that are singular: then there is no density off the subspace
    that they span (0), within it that of the subspace, and no derivative by `cov`. Otherwise both triangles of it count
    alike, and have half of the derivative each.
    """

    def logpdf(self, x: Operand, mean: Operand | None = None, cov: Operand = 1, allow_singular: bool = False) -> Tensor:
        """The logarithm of the density at each vector of `x`, (...).

        Raises:
            LinearAlgebraError: `cov` is not positive definite, and `allow_singular` is false.
            ShapeError: shapes do not fit together.
        """
        points, center, cov = self._parameters(x, mean, cov)
        apart = points - center
        rank: Any = cov.shape[0]
        outside = None
        if allow_singular:
            root = SINGULAR(cov)  # (K, 2 K + 3)
            count = cov.shape[0]
            within, off = root[:, :count], root[:, count : 2 * count]
            log_determinant, rank, tolerance = (root[0, 2 * count + i] for i in range(3))
            standard = apart @ within
            outside = ops.sqrt(ops.sum(ops.stop_gradient(apart @ off) ** 2, axis=-1)) > tolerance
        else:
            factor = np.linalg.cholesky(cov)
            columns = ops.reshape(apart, (-1, cov.shape[0])).T
            standard = ops.reshape(solve_triangular(factor, columns, lower=True).T, apart.shape)
            log_determinant = 2 * ops.sum(ops.log(np.diagonal(factor)))
        found = -(ops.sum(standard * standard, axis=-1) + log_determinant) / 2 - rank * HALF_LOG_TWO_PI
        return found if outside is None else ops.where(outside, -np.inf, found)

    def pdf(self, x: Operand, mean: Operand | None = None, cov: Operand = 1, allow_singular: bool = False) -> Tensor:
        """The density at each vector of `x`, see `logpdf`."""
        return ops.exp(self.logpdf(x, mean, cov, allow_singular))

    def entropy(self, mean: Operand | None = None, cov: Operand = 1) -> Tensor:
        """The differential entropy, a number in nats."""
        _, _, cov = self._parameters(None, mean, cov)
        factor = np.linalg.cholesky(cov)
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
        return points, center, (matrix + matrix.T) / 2


def _root_of_singular(cov: Array) -> Array:
    """Return what `logpdf` needs of a matrix (K, K), side by side in (K, 2 K + 3).

    That is what takes vectors to standard ones (K, K), what takes them off the subspace (K, K), and in three columns,
    first element each, the logarithm of the product of the eigenvalues that are not 0, their number, and how far off
    the subspace a vector may be.
    """
    values, vectors = np.linalg.eigh(cov)
    precision = (1e6 if cov.dtype == np.float64 else 1e3) * np.finfo(cov.dtype).eps
    least = precision * np.abs(values).max(initial=0)
    if not (values >= -least).all():
        raise LinearAlgebraError("multivariate_normal: cov must have no negative eigenvalue")
    kept = values > least
    root = np.where(kept, 1 / np.sqrt(np.where(kept, values, 1)), 0)
    numbers = np.zeros((cov.shape[0], 3), cov.dtype)
    numbers[:1] = np.log(values[kept]).sum(), kept.sum(), 1e3 * least  # as scipy has it
    return np.concatenate([vectors * root, vectors * ~kept, numbers], axis=1)


def _no_derivative(*args: Any) -> Any:
    raise NotDifferentiableError(
        "multivariate_normal: with allow_singular=True there is no derivative by cov, whose rank a change may raise; "
        "leave allow_singular out where cov is positive definite"
    )


SINGULAR = custom_rule(
    _root_of_singular,
    _no_derivative,
    _no_derivative,
    infer=lambda cov: ((cov.shape[0], 2 * cov.shape[0] + 3), cov.dtype),
)
multivariate_normal = MultivariateNormal()
