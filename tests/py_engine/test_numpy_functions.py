"""What test_numpy_sweep.py cannot try of numpy's functions on tensors: functions of functions, methods of ufuncs, modes
of padding, conditions of reductions; with their derivatives, compiled too.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor
from py_engine.ad.op import CONSTANT, NUMPY, TABLE, Op
from py_engine.ad.operators import SHAPE_FROM_VALUES
from py_engine.ad.ops import along
from py_engine.ad.ops.along import METHODS
from py_engine.errors import (
    ConfigurationError,
    DTypeError,
    EngineError,
    NotDifferentiableError,
    ReplayError,
    ShapeError,
    TraceError,
)

A = np.array([[0.5, -0.25, 0.75, 0.31], [0.1, 0.9, -0.6, 0.7], [-0.8, 0.42, 0.05, -0.35]])
V = np.array([0.3, -1.2, 0.8, 2.1, -0.45])
POSITIVE = np.abs(A) + 0.5


def numbers(result):
    """All results as one vector of floats."""
    if isinstance(result, (tuple, list)):
        return np.concatenate([numbers(part) for part in result])
    if isinstance(result, Tensor):
        return np.ravel(result if result.dtype == np.float64 else result.astype(np.float64))
    return np.ravel(np.asarray(result, np.float64))


def assert_numpys(call, x, derivative=True, compiled=True):
    """The values are numpy's, eager and compiled, and two derivatives are those of finite differences."""
    expected, found = call(x), call(Tensor(x))
    for mine, theirs in zip(*(r if isinstance(r, (tuple, list)) else [r] for r in (found, expected)), strict=True):
        assert mine.shape == np.shape(theirs) and mine.dtype == np.asarray(theirs).dtype
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-13, atol=1e-14)
    if compiled:
        np.testing.assert_allclose(pe.compile(lambda x: numbers(call(x)))(x), numbers(expected), rtol=1e-13, atol=1e-14)
    if derivative:
        pe.gradcheck(lambda x: numbers(call(x)), x)
        weights = np.cos(np.arange(numbers(expected).size))
        pe.gradcheck(pe.grad(lambda x: np.sum(np.sin(numbers(call(x))) * weights)), x)


# Functions that the sweep leaves out --------------------------------------------------------------------------------

CALLS = {
    "insert": lambda x: np.insert(x, 1, x[0] * 2, 0),
    "insert several": lambda x: np.insert(x, [0, 2, 2], np.array([7.0, 8.0, 9.0]), 1),
    "insert a slice": lambda x: np.insert(x, slice(0, 4, 2), x[:, :2], 1),
    "insert into all": lambda x: np.insert(x, -1, 5.0),
    "block": lambda x: np.block([[x, x * 2], [np.ones((1, 8))]]),
    "block of numbers": lambda x: np.block([x[0], 1.0, x[1, 0]]),
    "apply_along_axis": lambda x: np.apply_along_axis(lambda row: row[1:] * row[0], 1, x),
    "apply_along_axis to numbers": lambda x: np.apply_along_axis(np.sum, 0, x),
    "apply_along_axis to matrices": lambda x: np.apply_along_axis(lambda row: np.outer(row, row), 0, x),
    "apply_over_axes": lambda x: np.apply_over_axes(np.sum, np.stack([x, x * 2]), (0, -1)),
    "lexsort": lambda x: np.lexsort((x[0], np.array([1, 0, 1, 0]))),
    "unravel_index": lambda x: np.unravel_index(np.argmax(x), x.shape),
    "ravel_multi_index": lambda x: np.ravel_multi_index((np.argmax(x, 0), np.argmin(x, 0)), (4, 5), mode="clip"),
    "histogram": lambda x: np.histogram(x, 5),
    "histogram of weights": lambda x: np.histogram(A, 5, (-1, 1), weights=x)[0],
    "density": lambda x: np.histogram(A, [-1.0, 0.0, 0.2, 1.0], weights=np.exp(x), density=True)[0],
    "edges": lambda x: np.histogram_bin_edges(x, 6),
    "histogram2d": lambda x: np.histogram2d(V, np.sin(V), (3, 2), weights=x.ravel()[:5])[0],
    "histogramdd": lambda x: np.histogramdd(A, 2, weights=x[:, 0], density=True)[0],
    "unwrap": lambda x: np.unwrap(np.cumsum(x * 7.1, 1)),
    "unwrap by a period": lambda x: np.unwrap(x * 3.1, period=2.3, discont=1.2, axis=0),
    "choose": lambda x: np.choose(np.array([0, 2, 1, 0]), [x[0], x[1], x[2]]),
    "matrix_rank": lambda x: np.linalg.matrix_rank(np.stack([x[:, :3], np.outer(x[0, :3], x[1, :3])])),
    "nanmedian": lambda x: np.nanmedian(np.where(A > 0.4, np.nan, x), 0),
    "nanquantile": lambda x: np.nanquantile(np.where(A > 0.4, np.nan, x), [0.2, 0.75], axis=1, method="hazen"),
    "bessel": lambda x: np.i0(x * 5),
    "frexp": lambda x: np.frexp(x * 7)[0],
    "ldexp": lambda x: np.ldexp(x, np.array([3, -2, 0, 1])),
    "float_power": lambda x: np.float_power(np.abs(x) + 0.1, 1.7),
    "polyval": lambda x: np.polyval(x[0], x[1]),
    "polyfit": lambda x: np.polyfit(np.array([0.1, 0.4, 0.9]), x[:, 0], 1, w=np.array([1.0, 2.0, 0.5])),
    "polyfit with its covariance": lambda x: np.polyfit(np.array([0.1, 0.4, 0.5, 0.9]), x[0], 1, cov=True),
    "polyfit at places": lambda x: np.polyfit(x[0], x[1:].T, 2, cov=True)[1],
    "polyfit, covariance unscaled": lambda x: np.polyfit(x[:, 0], A[:, 1], 1, cov="unscaled")[1],
    "cov, counted": lambda x: np.cov(x, fweights=[2, 0, 3, 1]),
    "cov, weighted": lambda x: np.cov(x[:2], x[2:], fweights=[2, 1, 3, 1], aweights=np.exp(x[0]), ddof=2),
    "cov of no freedom": lambda x: np.cov(x, aweights=np.exp(x[0]), ddof=3)[0, :1] * 0 + x[0, :1],
    "weighted quantile": lambda x: np.quantile(x, [0.0, 0.3, 1.0], 0, method="inverted_cdf", weights=np.exp(A)),
    "weighted percentile": lambda x: np.percentile(x, 40, method="inverted_cdf", weights=np.arange(12).reshape(3, 4)),
    "weighted nanquantile": lambda x: np.nanquantile(
        np.where(A > 0.4, np.nan, x), [0.0, 0.3, 1.0], 1, method="inverted_cdf", weights=np.abs(A)
    ),
    **{
        f"{method} of some": lambda x, method=method: np.nanquantile(
            np.where(A > 0.4, np.nan, x), [0, 0.25, 0.3, 0.5, 0.75, 1], axis=1, method=method
        )
        for method in ("inverted_cdf", "averaged_inverted_cdf", "closest_observation")
    },
    "interp over a period": lambda x: np.interp(x * 5.07, np.array([0.3, -1.2, 2.9]), x[:, 1] * 2, period=2.2),
    "interp over a learned period": lambda x: np.interp([0.2, 3.9], x[0], x[1], period=np.exp(x[1, 1])),
    "reshape, first axis fastest": lambda x: np.reshape(x, (2, -1), order="F") * np.arange(6.0),
    "ravel, first axis fastest": lambda x: np.ravel(x, "F") * np.arange(12.0),
    "pinv to a tolerance": lambda x: np.linalg.pinv(x, rtol=0.4),
    "poly": lambda x: np.poly(x[0]),
    "polyint": lambda x: np.polyint(x[0], 2, k=[1.0, 2.0]),
    "polyder": lambda x: np.polyder(x[0], 2),
    "geomspace": lambda x: np.geomspace(np.abs(x[0]) + 0.1, 5.0, 4),
    "logspace": lambda x: np.logspace(x[0], x[1], 3, base=2.0),
    "tensorinv": lambda x: np.linalg.tensorinv(np.reshape(x[:2, :2] + 3 * np.eye(2), (2, 2, 1)), 1),
    "tensorsolve": lambda x: np.linalg.tensorsolve(np.reshape(x[:2, :2] + 3 * np.eye(2), (2, 1, 2)), x[2:, :2].T),
    "isin": lambda x: np.isin(x, [0.5, 0.42, np.nan]),
    "digitize": lambda x: np.digitize(x, [0.8, 0.2, -0.3], right=True),
}


def test_a_polynomial_fitted_in_full_is_numpys():
    for places in (np.array([0.1, 0.4, 0.9]), np.array([0.1, 0.4, 0.4])):
        assert_numpys(lambda x, at=places: np.polyfit(at, x, 1, full=True)[:2], A, compiled=False)
        rank, _, cut = np.polyfit(places, Tensor(A), 2, full=True)[2:]
        expected = np.polyfit(places, A, 2, full=True)
        assert (rank, cut) == (expected[2], expected[4])
    with pytest.raises(TraceError, match="polyfit: the shape of its result depends on values"):
        pe.compile(lambda x: np.polyfit(x[0], x[1], 1, full=True)[0])(A)


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_numpys_with_derivatives(name):
    call = CALLS[name]
    expected = call(A)
    parts = expected if isinstance(expected, tuple) else [expected]
    assert_numpys(call, A, derivative=np.float64 in [np.asarray(part).dtype for part in parts])


def test_answers_about_dtypes_and_text_are_numpys():
    x, y = Tensor(A), Tensor(A.astype(np.float32))
    assert np.result_type(x, y, np.int8) == np.float64 and np.common_type(x, y) is np.float64
    assert np.can_cast(y, np.float64) and not np.can_cast(x, np.float32, "safe")
    assert np.min_scalar_type(Tensor(np.array(3))) == np.uint8 and np.min_scalar_type(x) == np.float64
    assert np.einsum_path("ij,kj->ik", x, A) == np.einsum_path("ij,kj->ik", A, A)
    assert np.array2string(x, precision=2) == np.array2string(A, precision=2)
    assert (np.array_repr(y), np.array_str(x)) == (np.array_repr(A.astype(np.float32)), np.array_str(A))
    assert np.array_equiv(x, A) and not np.array_equiv(x, A + 1)


@pytest.mark.parametrize("order", range(5))
def test_derivatives_of_a_bessel_function_at_0_and_beyond(order):
    def derivative(function):
        return lambda x: pe.grad(lambda x: function(x).sum())(x)

    function = np.i0
    for _ in range(order):
        function = derivative(function)
    at_zero = (1, 0, 1 / 2, 0, 3 / 8)[order]
    np.testing.assert_allclose(function(Tensor(np.zeros(1))).numpy(), at_zero, atol=1e-15)
    # The mean of cos^k t exp(x cos t) over the circle, which the trapezoidal rule gives to all digits.
    t = np.arange(4096) * (2 * np.pi / 4096)
    for x in (0.7, 4.0, 29.9, 30.1, 200.0, -12.0):
        expected = np.mean(np.cos(t) ** order * np.exp(x * np.cos(t)))
        np.testing.assert_allclose(function(Tensor(np.array([x]))).numpy()[0], expected, rtol=1e-12)


def test_what_is_no_position_raises_in_compiled_functions_too():
    def all_nan(x):
        return np.nanargmax(np.where(x > 0, np.nan, x), 1)

    def outside(x):
        return np.unravel_index(np.argmax(x), (2, 2))

    x = np.array([[0.5, 0.25, 0.75], [0.1, 0.2, 0.9]])
    for function in (all_nan, outside):
        for call in (lambda f=function: f(Tensor(x)), lambda f=function: pe.compile(f)(x)):
            with pytest.raises(ShapeError, match=r"All-NaN|out of bounds"):
                call()
    with pytest.raises(ShapeError, match="index"):
        np.choose(Tensor(np.array([0, -1])), [A[0, :2], A[1, :2]])


# Quantiles by their shares ------------------------------------------------------------------------------------------

SHARES = np.array([[0.03, 0.31], [0.47, 0.98]])


@pytest.mark.parametrize("function", [np.quantile, np.percentile, np.nanquantile, np.nanpercentile])
@pytest.mark.parametrize("method", METHODS)
def test_quantiles_of_a_tensor_of_shares_are_numpys_with_derivatives(function, method):
    most = 100 if "percentile" in function.__name__ else 1
    of_rows = np.where(A > 0.6, np.nan, A) if "nan" in function.__name__ else A
    for axis in (0, None):
        for q in (np.array(0.4), SHARES, np.zeros((0,)), np.array([0.0, 1.0])):
            found = function(of_rows, Tensor(q * most), axis, method=method)
            np.testing.assert_allclose(found.numpy(), function(of_rows, q * most, axis, method=method), 1e-14, 1e-15)
        call = lambda q, axis=axis: function(of_rows, q * most, axis, method=method, keepdims=True)  # noqa: E731
        assert_numpys(call, SHARES)


@pytest.mark.parametrize("method", ["linear", "hazen", "midpoint"])
def test_quantiles_have_mixed_derivatives_by_elements_and_shares(method):
    def mixed(x):
        by_share = pe.grad(lambda q: np.sum(np.quantile(x[0], q, method=method) ** 2))
        return by_share(np.exp(-np.abs(x[1, :2])))

    pe.gradcheck(mixed, A)


def test_at_an_element_the_slope_of_a_quantile_is_that_to_its_right_and_at_the_last_one_to_its_left():
    slope = pe.grad(lambda q: np.quantile(np.array([7.0, 1.0, 2.0, 4.0]), q))
    assert [slope(np.array(q)) for q in (0.0, 1 / 3, 1.0)] == [3, 6, 9]
    slope = pe.grad(lambda q: np.quantile(np.array([-np.inf, 1.0, 2.0, np.inf]), q))
    assert slope(np.array(0.5)) == 3
    assert np.quantile(np.array([1.0, np.inf]), Tensor(np.array([0.0, 1.0]))).numpy().tolist() == [1, np.inf]


def test_shares_are_checked_in_each_replay_and_are_of_the_elements_dtype():
    quantile = pe.compile(lambda q: np.quantile(A, q))
    assert quantile(0.5) == np.median(A)
    for call in (quantile, lambda q: np.quantile(A, Tensor(np.array(q))), pe.compile(lambda q: np.quantile(A, q) * 0)):
        for q in (1.5, -0.1, np.nan):
            with pytest.raises(ConfigurationError, match="quantile: q must lie between 0 and 1"):
                call(q)
    with pytest.raises(DTypeError, match="float32 and float64 cannot be mixed"):
        np.quantile(A.astype(np.float32), Tensor(np.array(0.5)))
    assert np.quantile(A.astype(np.float32), Tensor(np.float32(0.5))).dtype == np.float32
    with pytest.raises(DTypeError, match="expected numbers, got truth values"):
        np.quantile(Tensor(A > 0), 0.5)


def test_quantiles_of_many_shares_and_rows_at_once():
    found = pe.vmap(lambda row, q: np.quantile(row, q))(A, SHARES.ravel()[:3])
    np.testing.assert_allclose(found, [np.quantile(*pair) for pair in zip(A, SHARES.ravel()[:3], strict=True)])


# Values that shapes depend on ---------------------------------------------------------------------------------------

MASK = np.array([True, False, True, True, False])
KNOWN = {
    "compress": lambda x: np.compress(MASK, x) ** 2,
    "extract": lambda x: np.extract(MASK, x),
    "method": lambda x: (x * 2).compress(MASK),
    "bincount": lambda x: np.bincount(np.array([0, 3, 1, 0, 3]), x, 6),
    "piecewise": lambda x: np.piecewise(x, [V < 0, V > 1], [lambda v: v**2, np.exp, 7.0]),
}
"""With conditions that are known before the function is called."""
UNKNOWN = {
    "compress": lambda x: np.compress(x > 0, x) ** 2,
    "extract": lambda x: np.extract(x > 0, x),
    "trim_zeros": lambda x: np.trim_zeros(np.where(np.abs(x) > 0.5, x, 0)),
    "piecewise": lambda x: np.piecewise(x, [x < 0], [lambda v: v - np.mean(v), lambda v: np.sqrt(v)]),
    "unique": lambda x: np.unique(np.concatenate([x, x[:2]])),
    "union1d": lambda x: np.union1d(x, x[1:]) ** 2,
    "intersect1d": lambda x: np.intersect1d(x, x[1:]),
    "setdiff1d": lambda x: np.setdiff1d(x, x[:2]),
    "setxor1d": lambda x: np.setxor1d(x, x[3:]),
    "polymul": lambda x: np.polymul(np.concatenate([np.zeros(2), x]), x[1:]),
    "polydiv": lambda x: np.polydiv(x, np.array([2.0, 0.5]))[0],
    "nonzero": lambda x: x[np.nonzero(x > 0)],
    "where": lambda x: x[np.where(x > 0)],
    "argwhere": lambda x: x[np.argwhere(x > 0)[:, 0]],
    "flatnonzero": lambda x: x[np.flatnonzero(x > 0)],
    "bincount": lambda x: np.bincount((x > 0).astype(np.int64), x),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_picked_by_a_known_condition_compiles(name):
    assert_numpys(KNOWN[name], V)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_picked_by_values_is_numpys_and_refused_in_traces(name):
    assert_numpys(UNKNOWN[name], V, compiled=False)
    function = "nonzero" if name == "where" else name
    with pytest.raises(TraceError, match=f"{function}: the shape of its result depends on values"):
        pe.compile(UNKNOWN[name])(V)
    assert function in SHAPE_FROM_VALUES


def test_a_condition_that_changes_is_noticed():
    mask = MASK.copy()
    function = pe.compile(lambda x: np.compress(mask, x))
    np.testing.assert_array_equal(function(V), V[MASK])
    mask[:] = [False, True, True, False, True]
    with pytest.raises(ReplayError, match=r"an argument of compress .* was changed"):
        function(V)


def test_unique_has_positions_and_counts():
    x = np.array([0.5, 2.0, 0.5, -1.0, 2.0])
    for mine, theirs in zip(np.unique(Tensor(x), True, True, True), np.unique(x, True, True, True), strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs)
    rows = np.array([[1.0, 2.0], [0.0, 1.0], [1.0, 2.0]])
    np.testing.assert_array_equal(np.unique(Tensor(rows), axis=0).numpy(), np.unique(rows, axis=0))


# Reductions of some elements ----------------------------------------------------------------------------------------

WHERE = A > -0.3
REDUCTIONS = {
    "sum": lambda x: np.sum(x, 1, where=WHERE, initial=0.5),
    "prod": lambda x: np.prod(x, axis=0, where=WHERE, initial=2.0),
    "mean": lambda x: np.mean(x, (0, 1), where=WHERE[0]),
    "var": lambda x: np.var(x, axis=1, ddof=0.5, where=WHERE, keepdims=True),
    "std": lambda x: np.std(x, axis=0, where=WHERE),
    "var around": lambda x: np.var(x, 1, mean=np.mean(x, 1, keepdims=True) + 0.1),
    "max": lambda x: np.max(x, 0, initial=0.2, where=WHERE),
    "min": lambda x: np.min(x, initial=-0.7, where=WHERE, axis=1, keepdims=True),
    "nansum": lambda x: np.nansum(np.where(A > 0.6, np.nan, x), 0, where=WHERE, initial=1.5),
    "nanmean": lambda x: np.nanmean(np.where(A > 0.6, np.nan, x), 0, where=WHERE),
    "nanvar": lambda x: np.nanvar(np.where(A > 0.8, np.nan, x), where=WHERE),
    "nanmax": lambda x: np.nanmax(np.where(A > 0.6, np.nan, x), 0, initial=-2.0, where=WHERE),
    "add.reduce": lambda x: np.add.reduce(x, where=WHERE, initial=1.0),
    "multiply.reduce": lambda x: np.multiply.reduce(x, 1, initial=3.0, keepdims=True),
    "maximum.reduce": lambda x: np.maximum.reduce(x, None, initial=0.0, where=WHERE),
    "logaddexp.reduce": lambda x: np.logaddexp.reduce(x, 1, where=WHERE, initial=0.3),
    "method": lambda x: x.sum(0, where=WHERE) * x.mean(where=WHERE),
    "of single precision": lambda x: np.sum(x, 0, dtype=np.float32).astype(np.float64) * 1.0,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_take_where_and_initial(name):
    assert_numpys(REDUCTIONS[name], A, derivative="single" not in name)


def test_an_element_that_is_left_out_has_no_gradient_whatever_it_is():
    x = np.array([1.0, np.nan, 3.0, np.inf])
    there = np.array([True, False, True, False])
    for function in (np.sum, np.prod, np.mean, np.var, np.std):
        gradient = pe.grad(lambda x, function=function: function(x, where=there))(x)
        clean = pe.grad(lambda x, function=function: function(x))(x[there])
        np.testing.assert_allclose(gradient, [clean[0], 0, clean[1], 0], rtol=1e-14)


def test_an_initial_number_may_be_a_tensor_and_ties_share_the_gradient():
    assert pe.grad(lambda start: np.sum(Tensor(V), initial=start))(2.0) == 1
    np.testing.assert_array_equal(pe.grad(lambda x: np.max(x, initial=1.0))(np.array([1.0, 0.5])), [0.5, 0])
    np.testing.assert_array_equal(
        pe.grad(lambda x: np.max(x, initial=1.0, where=np.array([True, False])))(np.array([1.0, 5.0])), [0.5, 0]
    )
    assert np.max(Tensor(np.zeros((0, 2))), 0, initial=3.0).numpy().tolist() == [3, 3]


def test_what_reductions_do_not_take_is_named():
    x = Tensor(A)
    for call, error, message in (
        (lambda: np.sum(x, out=np.empty(())), NotDifferentiableError, "out"),
        (lambda: np.max(x, where=WHERE), ConfigurationError, "where needs initial"),
        (lambda: np.sum(x, where=A), DTypeError, "where must be truth values"),
        (lambda: np.sum(x, where=WHERE[np.newaxis]), ShapeError, "broadcast"),
        (lambda: np.sum(x, initial=V), ShapeError, "one number"),
        (lambda: np.prod(x, initial=None), NotDifferentiableError, "initial=None"),
        (lambda: np.sin(x, where=WHERE), NotDifferentiableError, "where"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_ufunc_computes_in_the_dtype_that_is_asked_for():
    x = pe.tensor(A, requires_grad=True)
    y = np.exp(x, dtype=np.float32)
    assert y.dtype == np.float32
    np.sum(y).backward()
    assert x.grad.dtype == np.float64
    np.testing.assert_allclose(x.grad, np.exp(A), rtol=1e-6)
    np.testing.assert_array_equal(np.add(A, Tensor(A), dtype=np.float32).numpy(), np.add(A, A, dtype=np.float32))


# Counting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [np.sum, np.prod, np.max, np.min, np.mean, np.cumsum, np.cumprod, np.any, np.std])
@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.uint8])
def test_whole_numbers_and_truth_values_are_counted_as_by_numpy(function, dtype):
    x = np.array([[3, 0, 2], [5, 1, 4]]).astype(dtype)
    for axis in (None, 0, 1):
        expected = np.asarray(function(x, axis=axis))
        for found in (function(Tensor(x), axis=axis).numpy(), pe.compile(lambda x, a=axis: function(x, axis=a))(x)):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_comparisons_are_masks_and_counts():
    def function(x):
        share = np.mean(x > 0.2)
        return np.sum(np.where(x > 0.2, x**2, 0)) / np.sum(x > 0.2) * share

    # The number of elements has no derivative.
    for found in (pe.grad(function)(A), pe.compile(pe.grad(function))(A)):
        np.testing.assert_allclose(found, np.where(A > 0.2, 2 * A, 0) / A.size, rtol=1e-14)
    x = Tensor(A)
    np.testing.assert_array_equal(A[x > 0.2], A[A > 0.2])
    np.testing.assert_array_equal(x[x > 0.2].numpy(), A[A > 0.2])
    assert int(np.sum(x > 0.2)) == np.sum(A > 0.2)
    assert f"{x[0, 0]:.3f} {np.sum(x > 0.2):d}" == f"{A[0, 0]:.3f} {np.sum(A > 0.2):d}"


# Methods of ufuncs --------------------------------------------------------------------------------------------------

BINARY = [
    key for key in NUMPY if isinstance(key, np.ufunc) and key.nin == 2 and key.nout == 1 and key.signature is None
]
METHODS = {
    "outer": lambda f, x: f.outer(x[0], x[1:, :3]),
    "accumulate": lambda f, x: f.accumulate(x, axis=1),
    "accumulate over the first axis": lambda f, x: f.accumulate(x),
    "reduce": lambda f, x: f.reduce(x, axis=1, keepdims=True),
    "reduce over the first axis": lambda f, x: f.reduce(x),
    "reduceat": lambda f, x: f.reduceat(x, [0, 2, 1, 3], axis=1),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_ufuncs_are_numpys_or_refused(method):
    call, equal, supported = METHODS[method], 0, set()
    for ufunc, x in itertools.product(BINARY, (POSITIVE, np.arange(1, 13).reshape(3, 4), POSITIVE > 0.9)):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                expected = call(ufunc, x)
            except Exception as error:  # of any kind
                expected = error
            try:
                found = call(ufunc, Tensor(x)).numpy()
            except EngineError:
                continue
        assert not isinstance(expected, Exception), (ufunc, x.dtype, expected)
        assert found.dtype == expected.dtype and found.shape == expected.shape, (ufunc, x.dtype)
        np.testing.assert_allclose(found, expected, rtol=1e-13, err_msg=f"{ufunc} {x.dtype}")
        equal += 1
        supported.add(ufunc)
    assert {np.add, np.multiply, np.maximum, np.logaddexp, np.hypot, np.fmin, np.logical_or} <= supported
    assert equal > 20


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.subtract, np.divide, np.maximum, np.logaddexp, np.hypot])
def test_methods_of_ufuncs_have_derivatives(ufunc, method):
    if ufunc in (np.subtract, np.divide) and method.startswith("accumulate"):
        with pytest.raises(NotDifferentiableError, match=f"{ufunc.__name__}.accumulate is not in the op table"):
            METHODS[method](ufunc, Tensor(POSITIVE))
        return
    assert_numpys(lambda x: METHODS[method](ufunc, x), POSITIVE)


# Padding ------------------------------------------------------------------------------------------------------------

WIDTHS = [2, (1, 0), ((0, 3), (2, 1)), ((7, 5), (9, 4)), 0]
SETTINGS = {
    **{mode: [{}, {"stat_length": 2}, {"stat_length": ((1, 3), (2, 9))}] for mode in ("mean", "median")},
    **{mode: [{}, {"stat_length": (1, 2)}] for mode in ("maximum", "minimum")},
    "linear_ramp": [{}, {"end_values": 1.5}, {"end_values": ((1, 2), (3, -4))}],
    "reflect": [{}, {"reflect_type": "even"}, {"reflect_type": "odd"}],
    "symmetric": [{"reflect_type": "even"}, {"reflect_type": "odd"}],
    **{mode: [{}] for mode in ("edge", "wrap", "constant")},
}


@pytest.mark.parametrize("mode", SETTINGS)
@pytest.mark.parametrize("shape", [(3, 4), (1, 2), (2, 1)])
def test_padding_is_numpys(mode, shape):
    x = A[: shape[0], : shape[1]]
    for width, settings in itertools.product(WIDTHS, SETTINGS[mode]):
        expected = np.pad(x, width, mode, **settings)
        found = np.pad(Tensor(x), width, mode, **settings).numpy()
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-14, err_msg=f"{width} {settings}")


@pytest.mark.parametrize("mode", SETTINGS)
def test_padding_has_derivatives(mode):
    for settings in SETTINGS[mode]:
        assert_numpys(lambda x, s=settings: np.pad(x, ((1, 3), (5, 2)), mode, **s), A)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: np.pad(x, 1, "empty"), "only the modes"),
        (lambda x: np.pad(x, 1, lambda *given: None), "only the modes"),
        (lambda x: np.pad(x, 1, "mean", end_values=1), "mode 'mean' does not take end_values"),
        (lambda x: np.pad(x, 1, "reflect", reflect_type="both"), "reflect_type must be"),
        (lambda x: np.pad(x, 1, "maximum", stat_length=0), "stat_length of 0"),
        (lambda x: np.pad(x, 1, "mean", stat_length=1.5), "stat_length must be whole numbers"),
        (lambda x: np.pad(x[:0], 1, "mean"), "empty axis"),
    ],
)
def test_what_padding_does_not_take_is_named(call, message):
    with pytest.raises(EngineError, match=message):
        call(Tensor(A))


# What numpy's and autograd's own tests found --------------------------------------------------------------------


def test_the_covariance_of_one_sample_in_a_column_is_a_matrix():
    x = np.array([[1.0, 2.0, 4.0]])
    expected = np.cov(x, rowvar=False, ddof=0)
    np.testing.assert_allclose(np.cov(Tensor(x), rowvar=False, ddof=0).numpy(), expected, atol=1e-15, strict=True)


@pytest.mark.parametrize("places", [[-np.inf, 1.0], [0.0, np.inf], [-np.inf, np.inf], [0.0, 1.0]])
@pytest.mark.parametrize("values", [[0.0, 10.0], [10.0, 10.0], [-np.inf, 10.0], [np.inf, np.inf]])
def test_interpolation_between_infinite_places_and_values(places, values):
    with np.errstate(all="ignore"):
        at = np.array([0.5, places[1]])
        found = np.interp(Tensor(at), np.array(places), np.array(values)).numpy()
        np.testing.assert_array_equal(found, np.interp(at, places, values))


F32 = np.array([0.7, 0.9, 0.3, 0.1], np.float32)
KINDS_OF_NUMPY = {
    **{
        f"{f.__name__} of float32, {method}, {q!r}": (lambda x, f=f, q=q, method=method: f(x, q, method=method), F32)
        for f in (np.percentile, np.nanpercentile)
        for method in along.METHODS
        for q in ([25, 75], 30, 12.5, np.float64(12.5), np.array([30.0]), np.float32(25), np.array([50], np.float32))
    },
    **{
        f"{f.__name__} of float32, {method}, {q!r}": (lambda x, f=f, q=q, method=method: f(x, q, method=method), F32)
        for f in (np.quantile, np.nanquantile)
        for method in along.METHODS
        for q in ([0.25, 0.6], 0.3, np.float64(0.3), np.array([0.3]), np.array(0.3), np.float32(0.25))
    },
    "histogram of float32 over a range": (lambda x: np.histogram(x, 10, (0, 1)), F32),
    "histogram of float32 over one number": (lambda x: np.histogram(x, 4, (0.7, 0.7)), F32),
    "histogram of float32 over float64": (lambda x: np.histogram(x, 10, (np.float64(0), np.float64(1))), F32),
    "histogram of float32 with edges": (lambda x: np.histogram(x, np.array([0, 0.3, 0.9], np.float32)), F32),
    "density of float32 over a range": (lambda x: np.histogram(x, 10, (0, 1), density=True), F32),
    "edges of float32 over a range": (lambda x: np.histogram_bin_edges(x, 10, (0, 1)), F32),
    "histogram with whole edges": (lambda x: np.histogram(x, [0, 1, 2]), A),
    "edges that are whole": (lambda x: np.histogram_bin_edges(x, [0, 1, 2]), A),
    "edges that are whole, of float32": (lambda x: np.histogram_bin_edges(x, [0, 1, 2]), F32),
    "histogramdd with a range": (lambda x: np.histogramdd(x, 10, [(0, 1)])[0], F32),
    "its edges": (lambda x: np.histogramdd(x, 10, [(0, 1)])[1][0], F32),
    "its edges without one": (lambda x: np.histogramdd(x, 10)[1][0], F32),
    "its edges that are whole": (lambda x: np.histogramdd(x, [[0, 1, 2]])[1][0], F32),
    "histogram2d with a range": (lambda x: np.histogram2d(x, x, 10, [(0, 1), (0, 1)]), F32),
    "histogram2d with whole edges": (lambda x: np.histogram2d(x, x, [0, 1, 2]), V),
    **{
        f"padding of no elements, {mode}": (lambda x, m=mode: np.pad(x, ((1, 2), (0, 0)), mode=m), np.zeros((2, 0)))
        for mode in ("mean", "median", "maximum", "minimum", "linear_ramp", "reflect", "edge")
    },
    **{
        f"padding of truth values, {mode}": (
            lambda x, m=mode: np.pad(x, 1, mode=m),
            np.array([[True, False, True], [False, False, True]]),
        )
        for mode in ("mean", "maximum", "minimum", "linear_ramp", "reflect", "symmetric", "edge", "wrap", "constant")
    },
    **{
        f"odd {mode} of truth values": (
            lambda x, m=mode: np.pad(x, 2, mode=m, reflect_type="odd"),
            np.array([True, False, True]),
        )
        for mode in ("reflect", "symmetric")
    },
    "ramp of truth values": (lambda x: np.pad(x, 3, mode="linear_ramp"), np.array([True, False, True])),
    "interp of float32": (lambda x: np.interp(x, np.array([0, 1], np.float32), np.array([2, 3], np.float32)), F32),
    "interp of float32 with sides": (lambda x: np.interp(x, F32[::-1], F32, left=2, right=np.float32(0.1)), F32 * 2),
    "interp of float32 over a period": (lambda x: np.interp(x, F32, F32, period=0.5), F32 * 2),
    "vander of float32": (np.vander, F32),
    "vander of float32, rising": (lambda x: np.vander(x, 3, True), F32),
    "polyder of float32": (np.polyder, F32),
    "polyder of float32, none": (lambda x: np.polyder(x, 0), F32),
    "polyder of int32": (np.polyder, np.array([3, 1, 2], np.int32)),
    "polyint of float32": (np.polyint, F32),
    "polyint of float32, twice": (lambda x: np.polyint(x, 2, [1, 2]), F32),
    "polyfit of float32": (lambda x: np.polyfit(x, x * x, 1), F32),
    "polyfit of float32, weighted": (lambda x: np.polyfit(x, x * x, 1, w=x), F32),
    "nanargmax of large integers": (np.nanargmax, np.array([2**53, 2**53 + 1])),
    "nanargmin of large integers": (np.nanargmin, np.array([2**53 + 1, 2**53])),
    "nanargmax of truth values": (np.nanargmax, np.array([False, True])),
    "ediff1d of int32 and a list": (lambda x: np.ediff1d(x, to_end=[7, 8], to_begin=3), np.array([1, 2], np.int32)),
    "ediff1d of float32 and a list": (lambda x: np.ediff1d(x, to_end=[7.5, 8]), F32),
}


@pytest.mark.parametrize("name", KINDS_OF_NUMPY)
def test_the_dtype_and_the_values_are_numpys_or_it_is_refused(name):
    call, x = KINDS_OF_NUMPY[name]
    expected = call(x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    try:
        found = call(Tensor(x))
    except DTypeError as error:
        beside = ("edges that are whole, of float32", "its edges that are whole", "ediff1d of float32 and a list")
        assert name in beside or "percentile" in name or "quantile" in name, error
        return
    found = found if isinstance(found, tuple) else (found,)
    again = pe.compile(call)(x)
    for mine, compiled, theirs in zip(found, again if isinstance(again, tuple) else (again,), expected, strict=True):
        assert (mine.dtype, mine.shape) == (np.asarray(theirs).dtype, np.shape(theirs))
        rtol = (
            1e-6
            if "weighted" in name or "quantile" in name or "percentile" in name or theirs.dtype == np.float32
            else 1e-13
        )
        for result in (mine.numpy(), np.asarray(compiled)):
            np.testing.assert_allclose(result, theirs, rtol=rtol, atol=1e-14)
            assert result.dtype == mine.dtype


def test_bins_that_are_too_many_for_their_range_are_refused():
    x = np.array([1.0, 1.0 + 2e-16]) * 0.1
    with pytest.raises(ConfigurationError, match="10 bins are too many for the range"):
        np.histogram(Tensor(x), 10)


def test_einsum_takes_arrays_of_axes_and_repeated_axes_of_length_one():
    a, b = A[:, :3], A[:, 1:]
    lists = (np.array([0, 1]), np.array([1, 2]), np.array([0, 2]))
    assert_numpys(lambda x: np.einsum(x, lists[0], b, lists[1], lists[2]), a)
    x = np.array([[[0.5], [2.0]]]).reshape(1, 2, 1)
    assert_numpys(lambda x: np.einsum("aba,ac->bc", x, A), x)


# Names --------------------------------------------------------------------------------------------------------------


def test_constants_have_no_gradient():
    x = pe.tensor(POSITIVE[:, :3], requires_grad=True)
    tried = 0
    for function in [key for key in NUMPY if key in CONSTANT or getattr(NUMPY[key], "constant", False)]:
        operands = [x] * (function.nin if isinstance(function, np.ufunc) else 1)
        try:
            found = function(*operands)
        except (EngineError, TypeError):  # of whole numbers, or more arguments are needed
            continue
        tried += 1
        for part in found if isinstance(found, tuple) else (found,):
            assert not isinstance(part, Tensor) or not part.requires_grad, function
    assert tried > 40


def test_ops_apart_from_the_table_have_no_name_in_it():
    names = {op.name for op in NUMPY.values() if isinstance(op, Op)}
    assert {"gcd", "spacing", "nextafter"} <= names - set(TABLE)


@pytest.mark.parametrize("name", CALLS)
def test_many_samples_at_once_are_those_one_by_one(name):
    samples = np.stack([A, A[::-1] * 0.8 + 0.05])
    found = pe.vmap(lambda x: numbers(CALLS[name](x)))(samples)
    np.testing.assert_allclose(found, [numbers(CALLS[name](x)) for x in samples], rtol=1e-12, atol=1e-13)


# Of py_engine's own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axis"), [((7,), 0), ((3, 5), 1), ((3, 5), 0), ((2, 3, 4), -1), ((0, 4), 1)])
def test_the_largest_elements_and_where_they_are(shape, axis, rng):
    x = rng.integers(0, 4, shape).astype(np.float64)  # with equal ones
    for k in range(shape[axis] + 1):
        values, places = pe.ops.topk(x, k, axis)
        expected = np.take(np.argsort(-x, axis, kind="stable"), range(k), axis)
        np.testing.assert_array_equal(places.numpy(), expected)
        np.testing.assert_array_equal(values.numpy(), np.take_along_axis(x, expected, axis))


def test_the_largest_elements_have_derivatives_and_nan_comes_first(rng):
    x = rng.standard_normal((3, 5))
    pe.gradcheck(lambda x: pe.ops.topk(x, 2)[0] ** 3, x)
    np.testing.assert_array_equal(pe.compile(lambda x: pe.ops.topk(x, 2))(x)[0], pe.ops.topk(x, 2)[0].numpy())
    np.testing.assert_array_equal(pe.vmap(lambda x: pe.ops.topk(x, 2)[0])(x), pe.ops.topk(x, 2)[0].numpy())
    assert pe.ops.topk(np.array([1.0, 3.0, np.nan, 3.0]), 3)[1].numpy().tolist() == [2, 1, 3]
    with pytest.raises(ShapeError, match="topk: axis 1 of shape \\(3, 5\\) has 5 elements, of which 6 were asked for"):
        pe.ops.topk(x, 6)


def test_searchsorted_takes_the_order_of_its_vector():
    x, v = np.array([3.0, 1.0, 2.0, 2.0]), np.array([0.5, 2.0, 2.5, 9.0])

    def places(x, v):
        return np.searchsorted(x, v, "right", sorter=np.argsort(x))

    for found in (places(Tensor(x), Tensor(v)), pe.compile(places)(x, v)):
        np.testing.assert_array_equal(found, places(x, v))
    np.testing.assert_array_equal(Tensor(x).searchsorted(2.0, sorter=[1, 2, 3, 0]), 1)
    with pytest.raises(ShapeError, match=r"a sorter of shape \(2,\) does not fit a vector of shape \(4,\)"):
        np.searchsorted(Tensor(x), v, sorter=[0, 1])
    with pytest.raises(DTypeError, match="positions must be integers, got float64"):
        np.searchsorted(Tensor(x), v, sorter=[0.0, 1.0, 2.0, 3.0])
