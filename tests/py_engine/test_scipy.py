"""scipy's functions of Python code on tensors: values are scipy's, derivatives those of finite differences."""

from __future__ import annotations

import inspect
import operator
import subprocess
import sys
import warnings

import numpy as np
import pytest

import py_engine as pe
from py_engine.errors import (
    ConfigurationError,
    LinearAlgebraError,
    NotDifferentiableError,
    ParameterError,
    ShapeError,
)
from py_engine.scipy import integrate, linalg, signal, special, stats

scipy = pytest.importorskip("scipy")
theirs = {name: pytest.importorskip(f"scipy.{name}") for name in ("integrate", "linalg", "signal", "special", "stats")}

RNG = np.random.default_rng(7)
X, Y = RNG.normal(size=4), RNG.normal(size=4)
POSITIVE, MORE = RNG.uniform(1.1, 3, 4), RNG.uniform(1.1, 3, 4)
SHARE = RNG.uniform(0.3, 0.7, 4)

DISTRIBUTIONS = {
    "norm": (X, (), ("pdf", "logpdf", "cdf", "sf", "logcdf", "logsf")),
    "t": (X, (POSITIVE,), ("pdf", "logpdf", "cdf", "sf", "logcdf", "logsf")),
    "gamma": (POSITIVE, (MORE,), ("pdf", "logpdf", "cdf", "sf", "logcdf", "logsf")),
    "chi2": (POSITIVE, (MORE,), ("pdf", "logpdf", "cdf", "sf", "logcdf", "logsf")),
    "beta": (SHARE, (POSITIVE, MORE), ("pdf", "logpdf", "cdf", "sf", "logcdf", "logsf")),
}
CALLS = [(name, function) for name, (_, _, functions) in DISTRIBUTIONS.items() for function in functions]


def scipy_says(module: str, path: str, *args: object, **kwargs: object) -> np.ndarray:
    found = theirs[module]
    for part in path.split("."):
        found = getattr(found, part)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return np.asarray(found(*args, **kwargs))


@pytest.mark.parametrize(("name", "function"), CALLS)
def test_distributions_are_scipys(name: str, function: str) -> None:
    x, parameters, _ = DISTRIBUTIONS[name]
    ours = getattr(getattr(stats, name), function)
    loc, scale = np.array([0.0, 0.01, -0.02, 0.0]), np.array([1.0, 1.2, 1.1, 0.9])
    for at, rest in ((x, parameters), (x[:, np.newaxis], [p[:1] for p in parameters])):
        expected = scipy_says("stats", f"{name}.{function}", at, *rest, loc, scale)
        np.testing.assert_allclose(ours(at, *rest, loc, scale).numpy(), expected, rtol=1e-12)
        np.testing.assert_allclose(pe.compile(ours)(at, *rest, loc, scale), expected, rtol=1e-12)
    own = x, loc, scale
    if function in ("pdf", "logpdf"):
        pe.gradcheck(ours, x, *parameters, loc, scale)
    else:
        pe.gradcheck(lambda x, loc, scale: ours(x, *parameters, loc, scale), *own)


@pytest.mark.parametrize(("name", "function"), CALLS)
def test_distributions_at_the_edges_are_scipys(name: str, function: str) -> None:
    parameters = {"norm": (), "beta": (1.0, 1.0)}.get(name, (2.0,))
    ours = getattr(getattr(stats, name), function)
    x = np.array([-np.inf, -1e300, -40.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 1e3, 1e300, np.inf, np.nan])
    for more in ((), (0.5, 2.0), (0.0, 0.0), (0.0, -1.0), (0.0, np.nan), (np.nan, 1.0)):
        expected = scipy_says("stats", f"{name}.{function}", x, *parameters, *more)
        if name == "gamma" and not np.isnan([*more]).any() and more[1:] not in ((0.0,), (-1.0,)) and "pdf" in function:
            assert np.isnan(expected[-2])  # scipy's gamma has NaN at infinity, where its chi2 has 0
            expected[-2] = -np.inf if function == "logpdf" else 0
        with np.errstate(all="ignore"):
            found = ours(x, *parameters, *more).numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)
            np.testing.assert_array_equal(pe.compile(ours)(x, *parameters, *more), found)
    for i in range(len(parameters)):
        wrong = [*parameters]
        for wrong[i] in (0.0, -1.0, np.nan):
            with np.errstate(all="ignore"):
                assert np.isnan(ours(0.5, *wrong).numpy())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_keep_float32_and_take_empty_arrays(name: str) -> None:
    x, parameters, functions = DISTRIBUTIONS[name]
    x, *parameters = (part.astype(np.float32) for part in (x, *parameters))
    for function in functions:
        ours = getattr(getattr(stats, name), function)
        found = ours(x, *parameters).numpy()
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, scipy_says("stats", f"{name}.{function}", x, *parameters), rtol=1e-4)
        assert ours(x[:0], *[p[:0] for p in parameters]).shape == (0,)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: stats.norm.pdf(1.0, 0.0, 1.0, 2.0),
            "norm.pdf: the parameters after x are loc, scale, but 3 are given",
        ),
        (lambda: stats.norm.pdf(1.0, 0.0, loc=1.0), "'loc' is given twice"),
        (lambda: stats.t.logpdf(1.0), "'df' is missing"),
        (lambda: stats.t.cdf(1.0, dof=2.0), "there is no parameter 'dof'"),
        (lambda: stats.poisson.pmf(1.0), "poisson.pmf: the parameters after x are mu, loc, but 'mu' is missing"),
    ],
)
def test_parameters_are_named(call, said: str) -> None:
    with pytest.raises(ParameterError, match=said.replace("(", r"\(")):
        call()


def test_probabilities_by_parameters_without_a_formula_raise() -> None:
    for function in (
        lambda a: stats.gamma.cdf(1.0, a),
        lambda a: stats.t.cdf(1.0, a),
        lambda a: stats.beta.cdf(0.5, a, 1.0),
        lambda a: special.gammainc(a, 1.0),
        lambda a: special.jv(a, 1.0),
    ):
        for transform in (pe.grad, lambda f: pe.compile(pe.grad(f)), lambda f: lambda a: pe.jvp(f, (a,), (1.0,))):
            with pytest.raises(NotDifferentiableError, match="no formula is known for the derivative by operand 0"):
                transform(function)(1.5)


def test_poisson() -> None:
    k, mu = np.array([-1.0, 0.0, 1.0, 2.5, 7.0, np.inf, np.nan]), np.array([[0.0], [0.5], [3.0], [-1.0]])
    for function in ("pmf", "logpmf", "cdf"):
        ours = getattr(stats.poisson, function)
        with np.errstate(all="ignore"):
            expected = scipy_says("stats", f"poisson.{function}", k[:-2], mu)
            np.testing.assert_allclose(ours(k[:-2], mu).numpy(), expected, rtol=1e-13)
            np.testing.assert_allclose(ours(k[:-2], mu, 1.0).numpy(), scipy_says(
                "stats", f"poisson.{function}", k[:-2], mu, 1.0), rtol=1e-13)  # fmt: skip
            assert np.isnan(ours(np.nan, 1.0).numpy())
        np.testing.assert_allclose(ours(3, 2).numpy(), scipy_says("stats", f"poisson.{function}", 3, 2))
        pe.gradcheck(lambda mu: ours(np.array([0.0, 1.0, 4.0]), mu), np.array([0.5, 1.0, 3.0]))  # noqa: B023
        assert pe.grad(ours)(2.0, 1.5) == 0  # counts have no derivative


def test_dirichlet() -> None:
    alpha, x = np.array([1.5, 2.0, 0.7, 1.0]), np.array([0.1, 0.2, 0.3, 0.4])
    columns = np.array([[0.1, 0.25], [0.2, 0.25], [0.3, 0.25], [0.4, 0.25]])
    for function in ("pdf", "logpdf"):
        ours = getattr(stats.dirichlet, function)
        for point in (x, x[:-1], columns, columns[:-1]):
            expected = scipy_says("stats", f"dirichlet.{function}", point, alpha)
            np.testing.assert_allclose(ours(point, alpha).numpy(), expected, rtol=1e-13)
            np.testing.assert_allclose(pe.compile(ours)(point, alpha), expected, rtol=1e-13)
        pe.gradcheck(lambda x, alpha: ours(x / np.sum(x), alpha), x, alpha)  # noqa: B023
    assert stats.dirichlet.pdf(np.array([0.5, 0.6]), np.ones(2)).numpy() == 0
    assert np.isnan(stats.dirichlet.pdf(np.array([0.5, 0.5]), np.array([1.0, 0.0])).numpy())
    with pytest.raises(ShapeError, match="or shorter by the last coordinate"):
        stats.dirichlet.pdf(np.ones(5), alpha)


COVARIANCE = X[:, np.newaxis] * X + np.diag(POSITIVE)


def test_multivariate_normal() -> None:
    points = RNG.normal(size=(3, 2, 4))
    for function in ("pdf", "logpdf"):
        ours = getattr(stats.multivariate_normal, function)
        for x, mean, cov in (
            (X, Y, COVARIANCE),
            (points, Y, COVARIANCE),
            (points, None, COVARIANCE),
            (points, Y, POSITIVE),
            (points, Y, 2.0),
            (X, None, 2.0),  # numbers, not a vector
            (0.5, 1.0, 2.0),
            (points[0, :, :1], np.array([0.5]), np.array([[2.0]])),
        ):
            expected = scipy_says("stats", f"multivariate_normal.{function}", x, mean, cov)
            np.testing.assert_allclose(ours(x, mean, cov).numpy(), expected, rtol=1e-12)
            if mean is not None:
                np.testing.assert_allclose(pe.compile(ours)(x, mean, cov), expected, rtol=1e-12)
        pe.gradcheck(ours, X, Y, COVARIANCE)
        pe.gradcheck(ours, points, Y, COVARIANCE)
    entropy = stats.multivariate_normal.entropy
    np.testing.assert_allclose(
        entropy(Y, COVARIANCE).numpy(), scipy_says("stats", "multivariate_normal.entropy", Y, COVARIANCE)
    )
    pe.gradcheck(lambda cov: entropy(Y, cov), COVARIANCE)
    np.testing.assert_allclose(pe.grad(lambda cov: entropy(Y, cov))(COVARIANCE), np.linalg.inv(COVARIANCE) / 2)
    with pytest.raises(LinearAlgebraError):
        stats.multivariate_normal.pdf(X, Y, np.diag([1.0, 1.0, 0.0, 0.0]))
    for wrong in ((X, Y[:3], COVARIANCE), (X[:3], Y, COVARIANCE), (X, Y, COVARIANCE[:3])):
        with pytest.raises(ShapeError, match=r"multivariate_normal: x \(..., K\), mean \(K,\) and cov"):
            stats.multivariate_normal.pdf(*wrong)


def test_a_singular_normal_distribution_has_its_density_on_a_subspace() -> None:
    cov, mean = np.diag([1.0, 2.0, 0.0, 0.0]), np.array([0.5, 0.5, 1.0, 2.0])
    x = np.array([[1.0, 0.0, 1.0, 2.0], [1.0, 0.0, 1.0, 2.5]])
    for function in ("pdf", "logpdf"):
        ours = getattr(stats.multivariate_normal, function)
        expected = scipy_says("stats", f"multivariate_normal.{function}", x, mean, cov, allow_singular=True)
        np.testing.assert_allclose(ours(x, mean, cov, allow_singular=True).numpy(), expected, rtol=1e-12)
        pe.gradcheck(lambda z: ours(np.concatenate([z, mean[2:]]), mean, cov, True), x[0, :2])  # noqa: B023


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_a_point_is_off_the_subspace_from_scipys_distance_on(scale: float) -> None:
    cov, mean = scale * np.ones((2, 2)), np.array([1.0, 3.0])
    x = mean + np.sqrt(scale) * np.array([[1.0, 1.0], [1.0, 1.0 + 1e-8], [1.0, 1.0001], [1.0, 2.0]])
    expected = scipy_says("stats", "multivariate_normal.logpdf", x, mean, cov, allow_singular=True)
    found = stats.multivariate_normal.logpdf(x, mean, cov, allow_singular=True).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_logsumexp() -> None:
    a, b = RNG.normal(size=(2, 3, 4)), RNG.uniform(0.5, 2, (2, 3, 4))
    b[0, 0, 0], b[0, 1, 1] = 0.0, -0.01
    for axis in (None, 0, -1, (0, 2)):
        for keepdims in (False, True):
            at = {"axis": axis, "keepdims": keepdims}
            expected = scipy_says("special", "logsumexp", a, **at)
            np.testing.assert_allclose(special.logsumexp(a, **at).numpy(), expected, rtol=1e-13)
            expected = scipy_says("special", "logsumexp", a, b=b, **at)
            np.testing.assert_allclose(special.logsumexp(a, b=b, **at).numpy(), expected, rtol=1e-12)
            pe.gradcheck(lambda a, b: special.logsumexp(a, b=b, **at), a, b)  # noqa: B023
            signed = special.logsumexp(a, b=-b, return_sign=True, **at)
            for ours, expected in zip(
                signed, theirs["special"].logsumexp(a, b=-b, return_sign=True, **at), strict=True
            ):
                assert ours.shape == expected.shape
                np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)
    for a, b in (
        ([1000.0, 1000.0], [1.0, 1.0]),
        ([-1000.0, -1001.0], [2.0, 1.0]),
        ([1e4, 1.0], [0.0, 1.0]),
        ([-np.inf, -np.inf], [1.0, 1.0]),
        ([np.inf, 0.0], [1.0, 1.0]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([0.0, 0.0], [1.0, -2.0]),
    ):
        with np.errstate(all="ignore"):
            found = special.logsumexp(np.array(a), b=np.array(b)).numpy()
            np.testing.assert_allclose(found, scipy_says("special", "logsumexp", a, b=b), rtol=1e-13)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_softmax_is_scipys(axis: int | None) -> None:
    x = RNG.normal(size=(2, 3))
    for name in ("softmax", "log_softmax"):
        ours = getattr(special, name)
        np.testing.assert_allclose(ours(x, axis=axis).numpy(), scipy_says("special", name, x, axis=axis), rtol=1e-13)
        pe.gradcheck(lambda x: ours(x, axis=axis), x)  # noqa: B023


def test_multigammaln() -> None:
    for d in (1, 2, 3):
        found = special.multigammaln(POSITIVE + 3, d).numpy()
        np.testing.assert_allclose(found, scipy_says("special", "multigammaln", POSITIVE + 3, d), rtol=1e-13)
        pe.gradcheck(lambda a: special.multigammaln(a, d), POSITIVE + 3)  # noqa: B023
    assert np.isnan(special.multigammaln(1.0, 3).numpy())
    with pytest.raises(ConfigurationError, match="multigammaln: d must be positive"):
        special.multigammaln(4.0, 0)


def test_special_has_scipys_ufuncs_and_nothing_else() -> None:
    assert special.erf is pe.ops.erf and special.digamma is pe.ops.digamma
    assert special.jv is theirs["special"].jv
    pe.gradcheck(lambda x: special.jn(2.0, x), POSITIVE)
    for name in ("jn_zeros", "no_such_function"):
        with pytest.raises(AttributeError, match=f"py_engine.scipy.special has no '{name}'"):
            getattr(special, name)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("trans", [0, 1, "T"])
@pytest.mark.parametrize("unit_diagonal", [False, True])
def test_solve_triangular(lower: bool, trans: int | str, unit_diagonal: bool) -> None:
    a = RNG.normal(size=(4, 4)) + 3 * np.eye(4)
    settings = {"lower": lower, "trans": trans, "unit_diagonal": unit_diagonal}
    for b in (X, RNG.normal(size=(4, 3))):
        expected = scipy_says("linalg", "solve_triangular", a, b, **settings)
        np.testing.assert_allclose(linalg.solve_triangular(a, b, **settings).numpy(), expected, rtol=1e-12)
        np.testing.assert_allclose(
            pe.compile(lambda a, b: linalg.solve_triangular(a, b, **settings))(a, b), expected, rtol=1e-12
        )
        pe.gradcheck(lambda a, b: linalg.solve_triangular(a, b, **settings), a, b)
    many = np.stack([a, 2 * a])
    found = linalg.solve_triangular(many, RNG.normal(size=(2, 4, 3)), **settings)
    assert found.shape == (2, 4, 3)


def test_triangular_equations_are_solved_by_substitution() -> None:
    """Elimination without exchanged rows is substitution: small numbers on the diagonal cost no digits."""
    a = np.tril(RNG.normal(size=(30, 30))) * 10.0 ** -np.arange(30.0)
    b = RNG.normal(size=30)
    for lower, matrix in ((True, a), (False, a.T)):
        found = linalg.solve_triangular(matrix, b, lower=lower).numpy()
        size = np.abs(matrix) @ np.abs(found)
        assert (np.abs(matrix @ found - b) <= 30 * np.finfo(float).eps * size).all()
    with pytest.raises(LinearAlgebraError):
        linalg.solve_triangular(np.zeros((2, 2)), np.ones(2))
    with pytest.raises(ShapeError, match="solve_triangular: a must be a square matrix"):
        linalg.solve_triangular(np.ones((2, 3)), np.ones(2))
    with pytest.raises(ConfigurationError, match="trans must be 0, 1, 2"):
        linalg.solve_triangular(np.eye(2), np.ones(2), trans=3)


def test_sqrtm() -> None:
    for a in (COVARIANCE, COVARIANCE.astype(np.float32), np.array([[4.0, 1.0], [0.0, 9.0]])):
        found = linalg.sqrtm(a).numpy()
        assert found.dtype == a.dtype
        np.testing.assert_allclose(found @ found, a, rtol=1e-5 if a.dtype == np.float32 else 1e-12, atol=1e-5)
        np.testing.assert_array_equal(pe.compile(linalg.sqrtm)(a), found)
    pe.gradcheck(linalg.sqrtm, COVARIANCE)
    with pytest.raises(LinearAlgebraError, match="no real square root"):
        linalg.sqrtm(-np.eye(2))
    with pytest.raises(ShapeError, match="sqrtm: A must be a square matrix"):
        linalg.sqrtm(np.ones((2, 3)))


def test_solve_sylvester() -> None:
    a, b, q = RNG.normal(size=(3, 3)), RNG.normal(size=(2, 2)), RNG.normal(size=(3, 2))
    found = linalg.solve_sylvester(a, b, q).numpy()
    np.testing.assert_allclose(a @ found + found @ b, q, rtol=1e-10)
    np.testing.assert_array_equal(pe.compile(linalg.solve_sylvester)(a, b, q), found)
    pe.gradcheck(linalg.solve_sylvester, a, b, q)
    with pytest.raises(LinearAlgebraError, match="solve_sylvester"):
        linalg.solve_sylvester(np.zeros((2, 2)), np.zeros((2, 2)), np.ones((2, 2)))
    with pytest.raises(ShapeError, match="must fit together"):
        linalg.solve_sylvester(a, b, q.T)


@pytest.mark.parametrize("widths", [(0, 0), (1, 1), (2, 0), (0, 2), (2, 1), (3, 6)])
def test_solve_banded(widths: tuple[int, int]) -> None:
    ab = RNG.normal(size=(sum(widths) + 1, 5))
    ab[widths[1]] += 6
    for b in (RNG.normal(size=5), RNG.normal(size=(5, 2))):
        expected = scipy_says("linalg", "solve_banded", widths, ab, b)
        np.testing.assert_array_equal(linalg.solve_banded(widths, ab, b).numpy(), expected)
        np.testing.assert_array_equal(pe.compile(lambda ab, b: linalg.solve_banded(widths, ab, b))(ab, b), expected)
        pe.gradcheck(lambda ab, b: linalg.solve_banded(widths, ab, b), ab, b)


def test_solve_banded_refuses() -> None:
    with pytest.raises(LinearAlgebraError, match="solve_banded"):
        linalg.solve_banded((1, 1), np.zeros((3, 4)), np.ones(4))
    for wrong in (((1, 1), np.ones((2, 4)), np.ones(4)), ((1, 1), np.ones((3, 4)), np.ones(3))):
        with pytest.raises(ShapeError, match="solve_banded"):
            linalg.solve_banded(*wrong)
    with pytest.raises(ConfigurationError, match="pair of integers"):
        linalg.solve_banded(1, np.ones((3, 4)), np.ones(4))


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("shapes", [((6,), (3,)), ((2,), (5,)), ((5, 4), (2, 3)), ((3, 4, 5), (2, 1, 3)), ((), ()), (
    (2, 3, 3, 2), (2, 2, 1, 2))])  # fmt: skip
def test_convolve(shapes: tuple[tuple[int, ...], tuple[int, ...]], mode: str) -> None:
    a, b = (np.asarray(RNG.normal(size=shape)) for shape in shapes)
    expected = scipy_says("signal", "convolve", a, b, mode, method="direct")
    found = signal.convolve(a, b, mode).numpy()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(pe.compile(lambda a, b: signal.convolve(a, b, mode))(a, b), found)
    pe.gradcheck(lambda a, b: signal.convolve(a, b, mode), a, b)


def test_convolve_refuses() -> None:
    for a, b, mode in (
        (np.ones(3), np.ones((3, 1)), "full"),
        (np.ones(0), np.ones(3), "full"),
        (np.ones((2, 5)), np.ones((3, 3)), "valid"),
    ):
        with pytest.raises(ShapeError, match=r"signal.convolve"):
            signal.convolve(a, b, mode)
    for settings in ({"mode": "most"}, {"method": "fft"}):
        with pytest.raises(ConfigurationError, match=r"signal\.convolve: m"):
            signal.convolve(np.ones(3), np.ones(2), **settings)


def pulled(y, t, stiffness, push):
    return np.stack([y[1], -stiffness * np.sin(y[0]) - 0.1 * y[1] + push * np.cos(t)])


CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def test_odeint() -> None:
    y0, t, args = np.array([0.5, -0.2]), np.array([0.1, 0.4, 0.9, 1.5]), (1.3, 0.4)
    expected = scipy_says("integrate", "odeint", lambda y, t: pulled(y, t, *args), y0, t, **CLOSE)

    def solved(y0, t, stiffness, push):
        return integrate.odeint(pulled, y0, t, (stiffness, push), **CLOSE)

    np.testing.assert_allclose(solved(y0, t, *args).numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(pe.compile(solved)(y0, t, *args), expected, rtol=1e-9)
    for times in (t, t[::-1].copy(), t[:1]):
        pe.gradcheck(solved, y0, times, np.array(args[0]), np.array(args[1]), rtol=1e-4, atol=1e-6)


def test_odeint_has_second_derivatives() -> None:
    """y' = a y from y0 has y = y0 exp(a t)."""

    def last(a):
        return np.sum(integrate.odeint(lambda y, t, a: a * y, np.array([2.0]), np.array([0.0, 1.5]), (a,), **CLOSE)[-1])

    value = 2 * np.exp(1.5 * 0.7)
    np.testing.assert_allclose(pe.grad(last)(0.7), 1.5 * value, rtol=1e-7)
    np.testing.assert_allclose(pe.jvp(last, (0.7,), (1.0,))[1], 1.5 * value, rtol=1e-7)
    np.testing.assert_allclose(pe.grad(pe.grad(last))(0.7), 1.5**2 * value, rtol=1e-6)


def test_odeint_refuses() -> None:
    with pytest.raises(ShapeError, match=r"y0 must be \(n,\) and t \(m,\)"):
        integrate.odeint(lambda y, t: y, np.ones((1, 1)), np.ones(2))
    with pytest.raises(ShapeError, match="func must return shape"):
        integrate.odeint(lambda y, t: np.sum(y), np.ones(2), np.arange(2.0))
    captured = pe.tensor(1.0, requires_grad=True)
    with pytest.raises(
        NotDifferentiableError, match="func captures a tensor that requires a gradient; pass it in args"
    ):
        integrate.odeint(lambda y, t: y * captured, np.ones(2), np.arange(2.0))


def test_the_engine_does_not_import_it_and_without_scipy_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['scipy'] = None\n"
        "import py_engine; assert 'py_engine.scipy' not in sys.modules\n"
        "from py_engine.scipy import special, stats\n"
        "print(stats.norm.logpdf(0.0).item(), special.logsumexp([0.0, 0.0]).item())\n"
        "stats.gamma.cdf(1.0, 2.0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "-0.9189385332046727 0.6931471805599453\n", done.stderr
    assert "ConfigurationError: special.gammainc needs scipy.special" in done.stderr
    assert "pip install scipy" in done.stderr


SLOPES_AT_EDGES = {
    "gamma.pdf where it begins": (lambda x: stats.gamma.pdf(x, 2.0), 0.0, 1.0),
    "gamma.pdf where it begins infinitely steep": (lambda x: stats.gamma.pdf(x, 1.5), 0.0, np.inf),
    "chi2.pdf where it begins": (lambda x: stats.chi2.pdf(x, 4.0), 0.0, 0.25),
    "beta.pdf where it begins": (lambda x: stats.beta.pdf(x, 2.0, 2.0), 0.0, 6.0),
    "beta.pdf where it ends": (lambda x: stats.beta.pdf(x, 2.0, 2.0), 1.0, -6.0),
    "poisson.pmf of mean 0": (lambda mu: stats.poisson.pmf(1.0, mu), 0.0, 1.0),
    "poisson.pmf of mean 0, nothing": (lambda mu: stats.poisson.pmf(0.0, mu), 0.0, -1.0),
    "gamma.logpdf by its parameter where it begins": (lambda a: stats.gamma.logpdf(0.0, a), 1.0, -np.inf),
    "beta.logpdf by its parameter where it ends": (lambda b: stats.beta.logpdf(1.0, 2.0, b), 1.0, -np.inf),
    "gamma.cdf at infinity": (lambda x: stats.gamma.cdf(x, 2.0), np.inf, 0.0),
    "chi2.sf at infinity": (lambda x: stats.chi2.sf(x, 2.0), np.inf, 0.0),
    "gamma.cdf before it begins": (lambda x: stats.gamma.cdf(x, 0.5), -1.0, 0.0),
    "beta.cdf after it ends": (lambda x: stats.beta.cdf(x, 0.5, 0.5), 2.0, 0.0),
    "norm.cdf at infinity": (stats.norm.cdf, np.inf, 0.0),
    "the slope of beta.cdf where it ends": (pe.grad(lambda x: stats.beta.cdf(x, 2.0, 1.0)), 1.0, 2.0),
    "the slope of rgamma at 0": (pe.grad(lambda x: special.rgamma(x)), 0.0, 2 * np.euler_gamma),
    "the slope of rgamma at a pole": (pe.grad(lambda x: special.rgamma(x)), -1.0, 0.8455686701969342),
    "t.cdf with many degrees of freedom": (lambda x: stats.t.cdf(x, 1e14), 0.5, 0.3520653267642995),
    "erfcx far out": (lambda x: special.erfcx(x), 1e9, -5.641895835477563e-19),
    "the slope of norm.logcdf far out": (pe.grad(lambda x: stats.norm.logcdf(x)), -1e8, -1.0),
    "gelu by its tanh far out": (lambda x: pe.ops.gelu(x, approximate="tanh"), 1e200, 1.0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", SLOPES_AT_EDGES)
def test_slopes_at_edges(case: str) -> None:
    function, x, expected = SLOPES_AT_EDGES[case]
    np.testing.assert_allclose(pe.grad(function)(x), expected, rtol=1e-7)
    np.testing.assert_allclose(pe.compile(pe.grad(function))(x), expected, rtol=1e-7)
    np.testing.assert_allclose(pe.jvp(function, (x,), (1.0,))[1], expected, rtol=1e-7)


@pytest.mark.parametrize("df", [3.0, 90.0, 101.0, 1e5, 1e10, 1e14, np.inf])
def test_t_has_any_number_of_degrees_of_freedom(df: float) -> None:
    x = np.array([-3.0, 0.5, 7.0])
    np.testing.assert_allclose(
        stats.t.logpdf(x, df).numpy(), scipy_says("stats", "t.logpdf", x, df), rtol=1e-12 if df < 1e3 else 1e-9
    )
    if np.isfinite(df):
        slope = pe.grad(lambda df: np.sum(stats.t.logpdf(x, df)))(df)
        ahead, behind = (np.sum(stats.t.logpdf(x, df * (1 + h)).numpy()) for h in (1e-4, -1e-4))
        np.testing.assert_allclose(slope * df, (ahead - behind) / 2e-4, rtol=1e-5, atol=1e-9)


def test_logsumexp_with_factors_that_take_terms_away() -> None:
    a, b = np.array([0.0, 800.0]), np.array([1.0, 0.0])
    for transform in (pe.grad, lambda f: pe.compile(pe.grad(f))):
        np.testing.assert_array_equal(transform(lambda a: special.logsumexp(a, b=b))(a), [1, 0])
        with np.errstate(all="ignore"):
            found = transform(lambda a: special.logsumexp(a, b=b + 1))(np.full(2, -np.inf))
        np.testing.assert_array_equal(found, [0, 0])
    assert special.logsumexp(np.zeros(0)).numpy() == -np.inf == special.logsumexp(np.zeros(0), b=np.zeros(0)).numpy()
    np.testing.assert_allclose(special.logsumexp([1, 2]).numpy(), scipy_says("special", "logsumexp", [1, 2]))
    np.testing.assert_allclose(special.softmax([1, 2]).numpy(), scipy_says("special", "softmax", [1, 2]))


def test_equations_without_a_single_solution_raise() -> None:
    for call in (
        lambda: linalg.solve_banded((1, 1), np.zeros((3, 1)), np.ones(1)),
        lambda: linalg.solve_sylvester([[1.0]], [[-1.0]], [[0.0]]),
        lambda: linalg.solve_sylvester([[1.0, 5.0], [0.0, 2.0]], [[-1.0, 1.0], [0.0, 3.0]], [[0.0, 1.0], [0.0, 1.0]]),
        lambda: linalg.solve_triangular(np.array([[1.0, 2.0], [0.0, 0.0]]), np.ones(2)),
        lambda: pe.grad(lambda a: np.sum(linalg.sqrtm(a)))(np.diag([4.0, 0.0])),
    ):
        with pytest.raises(LinearAlgebraError, match=r"^(solve_banded|solve_sylvester|solve_triangular|sqrtm): "):
            call()
    with pytest.raises(ShapeError, match="sqrtm: A must be a square matrix"):
        linalg.sqrtm(np.stack([np.eye(2)] * 3))
    with pytest.raises(ShapeError, match=r"solve_triangular: b must be \(n,\)"):
        linalg.solve_triangular(np.eye(2), np.ones(3))


@pytest.mark.parametrize("function", ["pdf", "logpdf"])
def test_multivariate_normal_is_symmetric_single_and_says_what_it_lacks(function: str) -> None:
    ours = getattr(stats.multivariate_normal, function)
    single = [part.astype(np.float32) for part in (X, Y, COVARIANCE)]
    for singular in (False, True):
        found = ours(*single, allow_singular=singular).numpy()
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, ours(X, Y, COVARIANCE).numpy(), rtol=1e-4)
    tilted = COVARIANCE + np.triu(np.ones((4, 4)), 1) - np.tril(np.ones((4, 4)), -1)
    for singular in (False, True):
        np.testing.assert_allclose(
            ours(X, Y, tilted, allow_singular=singular).numpy(), ours(X, Y, COVARIANCE).numpy(), rtol=1e-12
        )
    with pytest.raises(NotDifferentiableError, match="with allow_singular=True there is no derivative by cov"):
        pe.grad(lambda cov: ours(X, Y, cov, allow_singular=True))(COVARIANCE)
    with pytest.raises(LinearAlgebraError, match="no negative eigenvalue"):
        ours(X, Y, -COVARIANCE, allow_singular=True)


def test_odeint_raises_where_an_equation_is_not_solved() -> None:
    t = np.linspace(0, 1, 4)

    def stiff(y):
        slope = lambda y, t: np.stack([y[1], 20 * (1 - y[0] ** 2) * y[1] - y[0]])  # noqa: E731
        return integrate.odeint(slope, y, np.array([0.0, 5.0]))[-1, 0]

    for call in (
        lambda: integrate.odeint(lambda y, t: y * y, [1.0], np.array([0.0, 0.5, 2.0, 3.0])),
        lambda: pe.grad(stiff)(np.array([2.0, 0.0])),
        lambda: integrate.odeint(lambda y, s: -y * integrate.odeint(lambda z, s: -z, [1.0], t)[-1, 0], [1.0], t),
    ):
        with pytest.raises(integrate.IntegrationError, match=r"^odeint: "):
            call()
    np.testing.assert_allclose(pe.jvp(stiff, (np.array([2.0, 0.0]),), (np.array([1.0, 0.0]),))[1], 1.17879, rtol=1e-4)
    for tolerance in (-1.0, np.array([1e-3, 1e-3]), "small"):
        with pytest.raises(ConfigurationError, match="odeint: rtol must be a positive number"):
            integrate.odeint(lambda y, t: y, [1.0], t, rtol=tolerance)


def test_odeint_takes_a_number_as_state_one_array_as_argument_and_float32() -> None:
    t = np.linspace(0, 1, 4)
    np.testing.assert_allclose(
        integrate.odeint(lambda y, t, k: -k * y, 1.0, t, 2.0)[:, 0].numpy(), np.exp(-2 * t), rtol=1e-6
    )
    both = np.array([1.0, 2.0])
    found = integrate.odeint(lambda y, t, k: -k[0] * k[1] * y, 1.0, t, both)
    np.testing.assert_allclose(found[:, 0].numpy(), np.exp(-2 * t), rtol=1e-6)
    small, k = t.astype(np.float32), np.float32(2)
    slope = pe.grad(lambda k: np.sum(integrate.odeint(lambda y, t, k: -k * y, np.ones(1, np.float32), small, (k,))))
    found = slope(np.array(k))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.sum(-t * np.exp(-2 * t)), rtol=1e-4)


def test_a_captured_tensor_is_found_also_where_nothing_reads_the_result() -> None:
    """What is not run cannot tell: a compiled gradient needs no value of the function, only its derivative."""
    t = np.linspace(0, 1, 4)
    uses = {
        "odeint": lambda k: k**2 + np.sum(integrate.odeint(lambda y, t: -k * y, [1.0], t)),
        "custom_rule": lambda k: np.sum(
            pe.custom_rule(lambda x: np.asarray(x) * k, lambda g, y, x: g, infer=lambda x: (x.shape, x.dtype))(
                np.ones(3)
            )
        ),
    }
    for function in uses.values():
        for transform in (pe.grad, lambda f: pe.compile(pe.grad(f)), lambda f: pe.compile(pe.value_and_grad(f))):
            with pytest.raises(NotDifferentiableError, match=r"uses a tensor|captures a tensor"):
                transform(function)(2.0)


def test_gelu_has_pytorchs_words_for_its_form() -> None:
    assert pe.ops.gelu(1.0, approximate="none").item() == pe.ops.gelu(1.0).item() != pe.ops.gelu(1.0, True).item()
    with pytest.raises(
        ConfigurationError, match="gelu: approximate must be True, False, 'tanh' or 'none', got 'exact'"
    ):
        pe.ops.gelu(1.0, approximate="exact")


def test_functions_of_scipy_without_an_op_are_named() -> None:
    with pytest.raises(NotDifferentiableError, match=r"scipy\.special\.k0 is not in the op table"):
        special.k0(pe.tensor(1.0))
    pe.gradcheck(lambda x: special.expm1(x) + special.cbrt(x) + special.exp2(x) + special.log1p(x), POSITIVE)


def test_what_a_captured_tensor_is_asked_for_besides_its_values_is_no_derivative():
    """Its shape, and its values as a plain array, are constants."""
    k = pe.tensor([2.0, 3.0], requires_grad=True)
    rule = pe.custom_rule(lambda x: x * k.numpy() * k.size, lambda g, y, x: g, infer=lambda x: (x.shape, x.dtype))
    for call in (rule, pe.compile(rule)):
        np.testing.assert_array_equal(np.asarray(call(np.ones(2))), [4, 6])
    solved = integrate.odeint(lambda y, t: -y * k.numpy()[0] / k.size, [1.0], np.array([0.0, 1.0]))
    np.testing.assert_allclose(solved[-1, 0].numpy(), np.exp(-1), rtol=1e-6)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 3, 2)])
def test_triangles_in_a_stack_are_solved_as_each_alone(rng, lower, trans, shape):
    from scipy import linalg as scipys

    from py_engine.scipy import linalg

    a = rng.standard_normal((2, 3, 3)) + 3 * np.eye(3)
    b = rng.standard_normal(shape)
    of_each = b if len(shape) == 3 else (b, b)
    expected = [scipys.solve_triangular(m, v, trans=trans, lower=lower) for m, v in zip(a, of_each, strict=True)]
    np.testing.assert_allclose(linalg.solve_triangular(a, b, trans=trans, lower=lower).numpy(), expected, rtol=1e-10)
    pe.gradcheck(lambda a, b: np.sum(linalg.solve_triangular(a, b, trans=trans, lower=lower) ** 2), a, b)


@pytest.mark.parametrize(("dtype", "far"), [(np.float64, 40.0), (np.float32, 14.0)])
def test_second_derivatives_of_log_ndtr_on_either_side(dtype, far):
    from py_engine.scipy import stats

    for function, sign in ((stats.norm.logcdf, 1), (stats.norm.logsf, -1)):
        second = pe.grad(pe.grad(lambda x, f=function: f(x)))
        assert abs(float(second(dtype(sign * far)))) < 1e-30
        assert float(second(dtype(-sign * far))) == pytest.approx(-1, abs=0.02)
    hessian = pe.hessian(lambda w: np.sum(stats.norm.logcdf(w * np.array([1.0, 40.0]))), np.ones(2))
    assert np.isfinite(hessian).all()
    x = np.linspace(-6, 6, 41)
    pe.gradcheck(lambda x: np.sum(pe.grad(lambda x: np.sum(stats.norm.logcdf(x)))(x) * np.arange(41.0)), x)


def test_what_has_no_weight_in_logsumexp_counts_for_nothing_even_if_it_is_nan():
    from scipy.special import logsumexp

    from py_engine.scipy import special

    a, b = np.array([1.0, np.nan, np.inf, 3.0]), np.array([1.0, 0.0, 0.0, 2.0])
    assert special.logsumexp(a, b=b).item() == pytest.approx(logsumexp(a, b=b))
    slope = pe.grad(lambda a: special.logsumexp(a, b=b))(a)
    weights = np.array([np.exp(1.0), 0, 0, 2 * np.exp(3.0)])
    np.testing.assert_allclose(slope, weights / weights.sum())


SIGNATURES = [
    *(("linalg", name) for name in linalg.__all__),
    *(("special", name) for name in ("log_softmax", "logsumexp", "multigammaln", "softmax")),
    ("signal", "convolve"),
    ("integrate", "odeint"),
    *(("stats", f"{of}.{name}") for of in ("dirichlet", "multivariate_normal") for name in ("pdf", "logpdf")),
    ("stats", "multivariate_normal.entropy"),
]


@pytest.mark.parametrize(("module", "path"), SIGNATURES)
def test_names_and_defaults_of_arguments_are_scipys(module: str, path: str) -> None:
    mine = {"integrate": integrate, "linalg": linalg, "signal": signal, "special": special, "stats": stats}[module]
    ours, scipys = (inspect.signature(operator.attrgetter(path)(of)).parameters for of in (mine, theirs[module]))
    by_position = [name for name, p in ours.items() if p.kind is not p.KEYWORD_ONLY]
    assert by_position == list(scipys)[: len(by_position)]
    assert {name: p.default for name, p in ours.items()} == {name: scipys[name].default for name in ours}
