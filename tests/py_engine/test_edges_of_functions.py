"""Functions at their edges: operands that are one array, whole numbers, infinities, ties and the origin."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor
from py_engine.ad import ops
from py_engine.ad.gradcheck import gradcheck
from py_engine.ad.op import TABLE, elementwise
from py_engine.ad.ops import blocks, convolution
from py_engine.errors import ConfigurationError, DTypeError, EngineError, ShapeError

LARGE = 20_000
"""Elements from which on `where` selects by bits."""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, LARGE])
def test_one_array_as_both_branches_of_a_compiled_where_stays_what_it_is(rng, dtype, size):
    condition, weights = rng.random(size) < 0.5, np.arange(1, size + 1, dtype=dtype)
    x = rng.standard_normal(size).astype(dtype)
    for function in (
        lambda x: np.where(condition, x * 2, x * 2) * weights,
        lambda x: np.where(condition, y := np.exp(x), y) * weights,
        lambda x: np.where(x > 0, np.where(condition, y := x * 3, y), y),
    ):
        expected = function(Tensor(x)).numpy()
        assert expected.any()
        np.testing.assert_array_equal(pe.compile(function)(x), expected)


@pytest.mark.parametrize("size", [7, LARGE])
def test_the_tangent_of_an_angle_that_is_wrapped_is_that_of_the_angle(size):
    w = np.linspace(0, 6, size)

    def tangent(x, t):
        return np.sum(pe.jvp(lambda x: np.where(x * w > np.pi, x * w - 2 * np.pi, x * w), (x,), (t,))[1])

    for made in (tangent, pe.compile(tangent)):
        assert float(made(np.array(1.0), np.array(1.0))) == pytest.approx(w.sum())


OPERANDS_OF_BOTH = [
    lambda y: np.maximum(y, y), lambda y: np.minimum(y, y), lambda y: y * y, lambda y: y - y, lambda y: y / y,
    lambda y: np.hypot(y, y), lambda y: np.arctan2(y, y), lambda y: np.logaddexp(y, y), lambda y: np.mod(y, y),
    lambda y: np.power(y, y), lambda y: np.copysign(y, y), lambda y: np.where(y > 1.2, y, y),
    lambda y: np.clip(y, y, y),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(OPERANDS_OF_BOTH)))
@pytest.mark.parametrize("size", [3, LARGE])
def test_an_array_may_be_all_operands_of_a_compiled_op(rng, place, size):
    x = 1 + rng.random(size)
    function = OPERANDS_OF_BOTH[place]
    for f in (lambda x: function(x + 1), lambda x: np.sin(function(np.sin(x) + 2)) * 3):
        expected = f(Tensor(x)).numpy()
        np.testing.assert_array_equal(pe.compile(f)(x), expected)
        slope = pe.grad(lambda x, f=f: np.sum(f(x)))
        np.testing.assert_allclose(pe.compile(slope)(x), slope(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        (np.array([0], np.uint8), np.array([255], np.uint8), {"rtol": 0.01}),
        (np.array([200], np.uint8), np.array([201], np.uint8), {"atol": 1}),
        (np.array([2**62]), np.array([-(2**62)]), {}),
        (np.array([1, 2]), np.array([1, 3]), {}),
        (np.array([True, False]), np.array([True, True]), {}),
        (np.array([1.0, np.inf]), np.array([1, 2]), {}),
    ],
    ids=str,
)
def test_whole_numbers_are_close_where_numpy_says_so(a, b, options):
    for function in (np.isclose, np.allclose):
        found = function(Tensor(a), b, **options)
        np.testing.assert_array_equal(np.asarray(found), function(a, b, **options))


WHOLE = [
    *(partial(np.pad, pad_width=2, mode=mode) for mode in ("mean", "median", "maximum", "minimum", "linear_ramp")),
    partial(np.pad, pad_width=((3, 1),), mode="linear_ramp", end_values=-7),
    partial(np.pad, pad_width=3, mode="mean", stat_length=2),
    lambda x: np.insert(x, 1, 2.7),
    lambda x: np.insert(x, [0, 2], [-1.5, 9]),
    lambda x: np.piecewise(x, [x < 3, x >= 3], [lambda v: v * 0.5, lambda v: v * 1.0]),
    lambda x: np.piecewise(x, [x < 3], [-1.7, 2.9]),
    partial(np.unwrap, period=4),
    partial(np.unwrap, period=5),
    partial(np.unwrap, period=4, discont=3),
    partial(np.unwrap),
    lambda x: np.histogram(np.array([0.1, 0.2, 0.9, 0.5, 0.3]), 2, weights=x)[0],
    lambda x: np.histogram(np.array([0.1, 0.2, 0.9, 0.5, 0.3]), 2, weights=x, density=True)[0],
]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float64])
@pytest.mark.parametrize("place", range(len(WHOLE)))
def test_functions_of_whole_numbers_have_numpys_dtype_and_values(place, dtype):
    x = np.array([1, 2, -3, 7, 4], dtype)
    expected, found = WHOLE[place](x), WHOLE[place](Tensor(x))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-15)


def test_numbers_of_modf_and_their_slopes(rng):
    x = np.array([2.0, -2.0, 2.5, -2.5, 0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, *rng.standard_normal(20)])
    for found, expected in zip(np.modf(Tensor(x)), np.modf(x), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)
        np.testing.assert_array_equal(np.signbit(found.numpy()), np.signbit(expected))
    finite = x[np.isfinite(x)]
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(np.modf(x)[0]))(finite), np.ones_like(finite))
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(np.modf(x)[1]))(finite), np.zeros_like(finite))


@pytest.mark.parametrize(
    ("a", "b"), [(1.0, 0.1), (-1.0, 0.1), (5.3, 2.0), (5.3, -2.0), (0.3, 0.1), (7.0, 7.0), (1e10, 0.3)]
)
def test_the_slope_of_fmod_is_that_of_the_branch_of_its_value(a, b):
    expected = -np.round((a - np.fmod(a, b)) / b)
    assert pe.grad(lambda b: np.fmod(a, b))(b) == expected
    assert pe.grad(lambda a: np.fmod(a, b))(a) == 1


@pytest.mark.parametrize(
    "function",
    [
        np.linalg.norm,
        np.std,
        lambda x: np.hypot(x[0], x[1]),
        lambda x: np.sum(np.linalg.norm(np.reshape(x, (1, 2)), axis=1)),
        lambda x: np.sum(np.abs(x)),
    ],
)
def test_at_the_origin_of_a_length_all_derivatives_are_zero(function):
    zeros = np.zeros(2)
    for find in (pe.grad(function), partial(pe.hessian, function), pe.compile(partial(pe.hessian, function))):
        assert not np.asarray(find(zeros)).any()
    x = np.array([0.3, -0.4])
    pe.gradcheck(lambda x: np.sum(pe.grad(function)(x) * np.array([1.0, 2.0])), x)


@pytest.mark.parametrize(("dtype", "sizes"), [(np.float64, (1e-200, 1e200)), (np.float32, (1e-23, 1e20))])
def test_slopes_of_arctan2_far_out_and_near_the_origin(dtype, sizes):
    for size in sizes:
        a, b = dtype(size), dtype(2 * size)
        slopes = pe.grad(lambda a, b: np.arctan2(a, b), argnums=(0, 1))(a, b)
        np.testing.assert_allclose(slopes, [0.4 / size, -0.2 / size], rtol=1e-6)
    np.testing.assert_allclose(
        pe.hessian(lambda x: np.arctan2(x[0], x[1]), np.array([0.3, -0.4])), [[3.84, -1.12], [-1.12, -3.84]], rtol=1e-12
    )


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 2, 4, 5)])
def test_padding_does_not_win_a_maximum_of_minus_infinities(shape):
    x = np.full(shape, -np.inf)

    def total(x):
        return ops.sum(ops.max_pool(x, 2, padding=1))

    windows = ops.max_pool(Tensor(x), 2, padding=1).size
    for find in (pe.grad(total), pe.compile(pe.grad(total))):
        assert find(x).sum() == windows
    _, tangent = pe.jvp(total, (x,), (np.ones(shape),))
    assert float(np.asarray(tangent)) == windows


def test_the_power_zero_of_a_matrix_is_the_identity_whatever_is_in_it():
    x = np.array([[np.inf, np.nan], [0, 1.0]])
    np.testing.assert_array_equal(np.linalg.matrix_power(Tensor(x), 0).numpy(), np.eye(2))
    assert not pe.grad(lambda x: np.sum(np.linalg.matrix_power(x, 0)))(np.ones((2, 2))).any()


CONVOLUTIONS = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1), "padding": ((2, 0), (1, 2))},
    {"dilation": 2, "padding": 2},
    {"groups": 2, "padding": 1},
    {"stride": 3, "padding": 1, "groups": 2},
]


@pytest.mark.parametrize("at", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("block_bytes", [1, 50_000, 2**21])
@pytest.mark.parametrize("joined", [1, 20, 512])
def test_columns_of_several_samples_in_one_product_give_the_same_convolution(rng, monkeypatch, at, block_bytes, joined):
    """In one block or several, whichever gradient is by columns or by products, and however few samples there are."""
    x = rng.standard_normal((12, 8, 6, 5))
    w = rng.standard_normal((6, 8 // at.get("groups", 1), 3, 3))
    found = []
    g = rng.standard_normal(ops.conv(Tensor(x), w, **at).shape)
    slopes = pe.grad(lambda x, w: ops.sum(ops.conv(x, w, **at) * g), argnums=(0, 1))
    for columns, size in ((1, blocks.BLOCK_BYTES), (joined, block_bytes)):
        with monkeypatch.context() as patch:
            patch.setattr(convolution, "JOINED", columns)
            patch.setattr(blocks, "BLOCK_BYTES", size)
            y = ops.conv(Tensor(x), w, **at).numpy()
            compiled = pe.compile(slopes)
            found.append([y, *slopes(x, w), *compiled(x, w), *compiled(x, w)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("samples", "channels", "filters"), [(4, 3, 0), (0, 3, 2), (1, 30, 2), (7, 30, 1), (5, 0, 2)])
def test_convolutions_without_samples_channels_or_filters(samples, channels, filters):
    x, w = np.ones((samples, channels, 3, 3)), np.ones((filters, channels, 3, 3))
    for find in (lambda f: f, pe.compile):
        slopes = find(pe.grad(lambda x, w: ops.sum(ops.conv(x, w, padding=1)), argnums=(0, 1)))(x, w)
        assert [slope.shape for slope in slopes] == [x.shape, w.shape]


MEDIANS = [
    [1.0, np.inf], [np.inf, np.inf], [-np.inf, np.inf], [1.0, 2.0, np.inf, np.inf, np.nan], [-1e308, 1e308], [3.0],
    [np.nan], [np.nan, 2.0], [np.nan, 2.0, 1.0], [4.0, 2.0, np.nan, 1.0, 3.0], [2.0, 2.0, 1.0], [-np.inf, -np.inf, 5.0],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("values", MEDIANS, ids=str)
def test_the_median_of_numbers_is_numpys(values):
    x = np.array(values)
    np.testing.assert_array_equal(np.nanmedian(Tensor(x)).numpy(), np.nanmedian(x))
    rows = np.stack([x, x[::-1]])
    for axis in (None, 0, 1, -1):
        np.testing.assert_array_equal(np.nanmedian(Tensor(rows), axis=axis).numpy(), np.nanmedian(rows, axis=axis))
        found = pe.compile(lambda x, axis=axis: np.nanmedian(x, axis=axis, keepdims=True))(rows)
        np.testing.assert_array_equal(found, np.nanmedian(rows, axis=axis, keepdims=True))


def test_the_slope_of_the_median_of_numbers_is_that_of_its_middle_elements():
    slope = pe.grad(lambda x: np.nanmedian(x))
    np.testing.assert_array_equal(slope(np.array([4.0, np.nan, 1.0, 3.0])), [0, 0, 0, 1])
    np.testing.assert_array_equal(slope(np.array([4.0, np.nan, 1.0, 3.0, 2.0])), [0, 0, 0, 0.5, 0.5])


@pytest.mark.parametrize("ufunc", [np.hypot, np.gcd, np.lcm, np.maximum, np.logaddexp], ids=str)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_reductions_of_one_element_or_a_few_are_numpys(ufunc, length):
    x = -np.arange(3.0, 3 + 2 * length).reshape(2, length)
    x = x.astype(np.int64) if ufunc in (np.gcd, np.lcm) else x
    np.testing.assert_allclose(ufunc.reduce(Tensor(x), axis=1).numpy(), ufunc.reduce(x, axis=1), rtol=1e-15)
    np.testing.assert_allclose(ufunc.accumulate(Tensor(x), axis=1).numpy(), ufunc.accumulate(x, axis=1), rtol=1e-15)
    starts = list(range(length))
    found = ufunc.reduceat(Tensor(x), starts, axis=1).numpy()
    np.testing.assert_allclose(found, ufunc.reduceat(x, starts, axis=1), rtol=1e-15)


def test_the_slope_of_a_length_of_one_element_has_its_sign():
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(np.hypot.reduce(x, axis=1)))(np.full((2, 1), -3.0)), -1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_mean_of_equal_numbers_is_their_number(dtype):
    for count in range(1, 200):
        ones = np.ones(count, dtype)
        assert np.mean(Tensor(ones)).item() == 1 and np.std(Tensor(ones)).item() == 0
        assert np.mean(Tensor(ones) > 0).item() == 1
    assert not pe.hessian(lambda x: np.std(x), np.ones(49)).any()


def test_counts_of_a_histogram_do_not_end_at_what_float32_can_count(monkeypatch):
    x = np.zeros(100, np.float32)
    counts, _ = np.histogram(Tensor(x), 3)
    assert counts.dtype == np.intp
    from py_engine.ad.ops import statistics

    assert statistics._weights_of("histogram", None, Tensor(x)).dtype == np.float64


@pytest.mark.parametrize(
    ("x", "xp", "fp", "by_fp"),
    [
        ([0.5, np.inf], [0.0, 1.0], [0.0, 1.0], [0.5, 1.5]),
        ([-np.inf, 0.25], [0.0, 1.0], [0.0, 1.0], [1.75, 0.25]),
        ([2.0], [0.0, 1.0, 1.0], [0.0, 1.0, 2.0], [0.0, 0.0, 1.0]),
        ([-1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 2.0], [1.0, 0.0, 0.0]),
        ([0.5, 1.5], [0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 5.0, 6.0], [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_points_outside_of_a_table_leave_the_slopes_of_the_others(x, xp, fp, by_fp):
    x, xp, fp = map(np.array, (x, xp, fp))
    np.testing.assert_array_equal(np.interp(Tensor(x), xp, fp).numpy(), np.interp(x, xp, fp))
    for find in (lambda f: f, pe.compile):
        np.testing.assert_allclose(find(pe.grad(lambda fp: np.sum(np.interp(x, xp, fp))))(fp), by_fp)
        assert np.isfinite(find(pe.grad(lambda x: np.sum(np.interp(x, xp, fp))))(x)).all()
        slopes = find(pe.grad(lambda x: np.sum(np.interp(x, [0.0, 1.0, 3.0], [0.0, 2.0, 1.0]))))
        np.testing.assert_array_equal(slopes(np.array([0.0, 3.0])), [2.0, -0.5])  # as JAX's, from within


def test_clip_with_one_bound_of_a_wider_dtype_is_numpy_s():
    for x, low, high in (
        (np.array([1, 2], np.uint8), np.array([300, 0], np.int16), None),
        (np.array([1, 2], np.uint8), None, np.array([-300, 0], np.int16)),
        (np.array([1], np.int8), np.int64(1000), None),
        (np.array([1, 2], np.int32), None, 1),
        (np.array([1, 2], np.uint64), np.array([0.5, 3.5]), None),
    ):
        found, expected = np.clip(pe.tensor(x), low, high).numpy(), np.clip(x, low, high)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_the_condition_of_a_matrix_of_zeros_is_infinite_and_that_of_nan_is_nan():
    zeros, mixed = np.zeros((2, 2)), np.stack([np.zeros((2, 2)), np.eye(2), np.full((2, 2), np.nan)])
    for p in (None, 2, -2):
        assert np.linalg.cond(pe.tensor(zeros), p).item() == np.inf
    found = np.linalg.cond(pe.tensor(mixed[:2])).numpy()
    np.testing.assert_array_equal(found, [np.inf, 1])


@pytest.mark.parametrize("p", [1, -1, np.inf, -np.inf, "fro"])
def test_the_condition_of_a_singular_matrix_is_infinite_beside_others(p):
    regular, singular, nan = np.array([[2.0, 1.0], [0.5, 3.0]]), np.ones((2, 2)), np.full((2, 2), np.nan)
    for x in (singular, np.stack([regular, singular, nan]), np.stack([regular, singular])[:, np.newaxis]):
        expected = np.linalg.cond(x, p)
        for found in (np.linalg.cond(pe.tensor(x), p).numpy(), pe.compile(lambda x: np.linalg.cond(x, p))(x)):
            np.testing.assert_allclose(found, expected, rtol=1e-12)
    slope = pe.grad(lambda x: np.linalg.cond(x, p)[0])(np.stack([regular, singular]))
    np.testing.assert_allclose(slope[0], pe.grad(lambda x: np.linalg.cond(x, p))(regular), rtol=1e-12)
    gradcheck(lambda x: np.linalg.cond(x, p), regular)


def test_the_nuclear_condition_of_a_singular_matrix_is_none_as_numpys():
    for x in (np.ones((2, 2)), pe.tensor(np.ones((2, 2)))):
        with pytest.raises(np.linalg.LinAlgError, match="SVD did not converge"):
            np.linalg.cond(x, "nuc")


@pytest.mark.parametrize("rtol", [None, 1e-3])
def test_what_a_pseudo_inverse_cuts_is_given_by_one_name(rtol):
    with pytest.raises(ConfigurationError, match="rcond and rtol mean the same"):
        np.linalg.pinv(pe.tensor(np.eye(2)), rcond=0.5, rtol=rtol)


@pytest.mark.parametrize(("function", "worst"), [(np.nanmax, -np.inf), (np.nanmin, np.inf)])
def test_nan_has_no_share_of_the_slope_of_an_infinite_extremum(function, worst):
    for x, expected in (
        ([worst, np.nan], [1, 0]),
        ([np.nan, worst, np.nan, worst], [0, 0.5, 0, 0.5]),
        ([np.nan, 2.0, 2.0, np.nan], [0, 0.5, 0.5, 0]),
    ):
        x = np.array(x)
        for run in (lambda f: f, pe.compile):
            np.testing.assert_array_equal(run(pe.grad(function))(x), expected)
            assert run(lambda x: pe.jvp(function, (x,), (np.ones_like(x),))[1])(x) == 1
    chosen = pe.grad(lambda x: function(x, initial=worst, where=np.array([True, False])))
    np.testing.assert_array_equal(chosen(np.array([worst, 1.0])), [0.5, 0])  # the other half is the initial number's


def test_the_number_that_nan_extrema_begin_with_is_theirs_where_there_is_no_other():
    x = np.array([[np.nan, 1.0], [np.nan, -3.0]])
    for function in (np.nanmax, np.nanmin):
        np.testing.assert_array_equal(function(pe.tensor(x), 0, initial=0.5).numpy(), function(x, 0, initial=0.5))
        assert function(pe.tensor(np.zeros(0)), initial=0.5).item() == 0.5


def test_differences_of_several_elements_do_not_overflow_before_numpys_do():
    x = np.array([3e38, 2e38, 2e38, -3e38], np.float32)
    for method in (np.subtract.reduce, *(lambda x, at=at: np.subtract.reduceat(x, at) for at in ([0, 1], [0, 3]))):
        np.testing.assert_array_equal(method(pe.tensor(x)).numpy(), method(x))
        np.testing.assert_array_equal(pe.compile(method)(x), method(x))
    rows = np.arange(24.0).reshape(2, 3, 4) ** 2
    for axis in range(3):
        found = np.subtract.reduce(pe.tensor(rows), axis, keepdims=True).numpy()
        np.testing.assert_array_equal(found, np.subtract.reduce(rows, axis, keepdims=True))
        gradcheck(lambda x, axis=axis: np.subtract.reduce(x, axis) ** 2, rows)
    found = pe.vmap(np.subtract.reduce)(rows)
    np.testing.assert_array_equal(found, np.subtract.reduce(rows, 1))
    whole = rows.astype(np.int32)
    assert np.subtract.reduce(pe.tensor(whole)).dtype == np.subtract.reduce(whole).dtype


@pytest.mark.parametrize("axis", [(0,), (0, 1), (1, 0), (2, 0), (-1, 1), (0, 2, 1), 1])
@pytest.mark.parametrize("returned", [False, True])
def test_weights_lie_along_the_axes_that_are_averaged_in_their_order(rng, axis, returned):
    x = rng.standard_normal((2, 3, 4))
    w = rng.random([x.shape[d] for d in (axis if isinstance(axis, tuple) else (axis,))]) + 0.1
    found = np.average(pe.tensor(x), axis, w, returned)
    expected = np.average(x, axis, w, returned)
    for mine, theirs in zip(found if returned else [found], expected if returned else [expected], strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-12)
    gradcheck(lambda x, w: np.average(x, axis, w), x, w)


def test_weights_of_bins_may_be_whole_numbers_and_edges_may_be_none():
    places = np.array([0, 2, 2])
    for weights in ([1, 2, 4], np.array([1, 2, 4], np.int32), np.array([True, False, True])):
        found, expected = np.bincount(pe.tensor(places), weights), np.bincount(places, weights)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.numpy(), expected)
    x = np.array([[0.5, -1.0]])
    for right in (False, True):
        np.testing.assert_array_equal(np.digitize(pe.tensor(x), [], right).numpy(), np.digitize(x, [], right))


def test_a_step_of_no_numbers_is_nan():
    assert np.isnan(np.linspace(pe.tensor(0.0), 1.0, 0, retstep=True)[1].item())
    assert np.isnan(np.linspace(pe.tensor(0.0), 1.0, 1, retstep=True)[1].item())


@pytest.mark.parametrize("deg", [False, True])
def test_the_angle_of_float32_is_float32(deg):
    x = np.array([1, -1, 0, -0.0, np.nan], np.float32)
    found, expected = np.angle(pe.tensor(x), deg=deg).numpy(), np.angle(x, deg=deg)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype == np.float32


@pytest.mark.parametrize("mode", ["wrap", "clip"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64])
def test_small_positions_reach_into_long_axes(mode, dtype):
    x, index = np.arange(300.0), np.array([5, 100], dtype)
    np.testing.assert_array_equal(np.take(pe.tensor(x), index, mode=mode).numpy(), np.take(x, index, mode=mode))
    choices = [np.full(2, float(k)) for k in range(30)]
    small = np.array([3, 29], dtype)
    found = np.choose(small, [pe.tensor(c) for c in choices], mode=mode).numpy()
    np.testing.assert_array_equal(found, np.choose(small, choices, mode=mode))


@pytest.mark.parametrize("function", [np.max, np.min, np.ptp, lambda x: np.sum(np.maximum.reduce(x, axis=-1))])
@pytest.mark.parametrize("x", [[[np.nan, 1.0]], [[1.0, np.nan]], [[np.nan, np.nan]], [[np.inf, np.nan, -np.inf]]])
def test_the_slopes_of_a_largest_element_that_is_nan_are_zero_in_both_modes(function, x):
    x = np.array(x)
    assert np.isnan(function(x))
    for run in (lambda f: f, pe.compile):
        np.testing.assert_array_equal(run(pe.grad(function))(x), np.zeros_like(x))
        assert run(lambda x: pe.jvp(function, (x,), (np.ones_like(x),))[1])(x) == 0


@pytest.mark.parametrize("other", [0.3, np.float64(0.3), np.float32(0.3), 2, True, np.array([0.3]), np.array([2, 3])])
def test_float_power_of_float32_takes_the_other_operand_as_it_is(other):
    x = np.array([0.5, 0.7], np.float32)
    for function in (lambda x: np.float_power(x, other), lambda x: np.float_power(other, x)):
        expected = function(x)
        for found in (function(Tensor(x)).numpy(), pe.compile(function)(x)):
            assert found.dtype == expected.dtype == np.float64
            np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_float_power_takes_no_square_root_and_has_derivatives(rng):
    x = np.array([-np.inf, -0.0, 4.0])
    for run in (lambda f: lambda x: np.asarray(f(Tensor(x))), pe.compile):
        found = run(lambda x: np.float_power(x, 0.5))(x)
        np.testing.assert_array_equal(found, [np.inf, 0, 2])
        assert not np.signbit(found).any()
    a, b = 0.5 + rng.random(3), rng.standard_normal(3)
    pe.gradcheck(lambda a, b: np.sum(np.float_power(a, b)), a, b)
    pe.gradcheck(lambda a: np.sum(pe.grad(lambda a: np.sum(np.float_power(a, a)))(a) * b), a)


def test_exponents_that_int64_cannot_hold_are_refused_by_ldexp():
    exponents = np.array([1, 2], np.uint64)
    for run in (lambda f: f, pe.compile):
        with pytest.raises(DTypeError, match="int64"):
            run(lambda x, n: np.ldexp(Tensor(x) if isinstance(x, np.ndarray) else x, n))(np.ones(2), exponents)


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)])
def test_a_tensor_of_numpys_scalar_holds_an_array(number):
    x = Tensor(number)
    assert isinstance(x.data, np.ndarray) and x.shape == () and x.dtype == number.dtype
    for function in (lambda x: np.stack([x, x]), lambda x: np.hstack([x, x]), lambda x: np.append(x, x)):
        expected, found = function(number), function(x)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.numpy(), expected)


ELEVEN, MANY = np.arange(11, dtype=np.float32), np.arange(101, dtype=np.float32)
AT_EDGES = {
    "percentile lower": (lambda x: np.percentile(x, 70, method="lower"), ELEVEN),
    "percentile higher": (lambda x: np.percentile(x, 30, method="higher"), ELEVEN),
    "percentile midpoint": (lambda x: np.percentile(x, 30, method="midpoint"), ELEVEN),
    "percentile inverted": (lambda x: np.percentile(x, 30, method="inverted_cdf"), ELEVEN[:10]),
    "percentile averaged": (lambda x: np.percentile(x, [30, 70], method="averaged_inverted_cdf"), ELEVEN[:10]),
    "nanpercentile": (lambda x: np.nanpercentile(x, 29, method="lower"), MANY),
    "nanquantile": (lambda x: np.nanquantile(x, 0.29, method="lower"), MANY),
    "nanquantile linear": (lambda x: np.nanquantile(x, [0.29, 0.3]), MANY),
    "correlate": (lambda x: np.correlate(x, np.array([1.0, 2.0, 3.0]), "same"), np.array([1.0, 10.0])),
    "correlate even": (lambda x: np.correlate(x, np.array([1.0, 2.0, 3.0, 4.0]), "same"), np.array([1.0, 10.0])),
    "correlate odd": (lambda x: np.correlate(x, np.arange(5.0), "same"), np.array([1.0, 10.0, 100.0])),
    "gradient unsigned": (lambda x: np.gradient(x, np.array([0, 1, 3, 7], np.uint32)), np.array([1.0, 2, 10, 50])),
    "gradient falling": (lambda x: np.gradient(x, np.array([3, 2, 1, 0], np.uint32)), np.array([1.0, 2, 10, 50])),
    "gradient large": (lambda x: np.gradient(x, np.array([0, 40000, 120000], np.int32)), np.array([1.0, 2, 10])),
    "gradient bytes": (lambda x: np.gradient(x, np.array([0, 100, 250], np.uint8)), np.array([1.0, 2, 10])),
    "gradient spacing": (lambda x: np.gradient(x, np.int32(2**30 + 1)), np.array([1.0, 2, 10])),
    "divide.reduce": (lambda x: np.divide.reduce(x), np.array([1e30, 1e20, 1e20], np.float32)),
    "divide.reduce small": (lambda x: np.divide.reduce(x), np.array([1e-30, 1e-30, 1e-30], np.float32)),
    "divide.reduce axis": (lambda x: np.divide.reduce(x, axis=1), np.arange(1.0, 13).reshape(2, 3, 2)),
    "divide.reduce one": (lambda x: np.divide.reduce(x), np.array([3.0])),
    "apply_over_axes": (lambda x: np.apply_over_axes(np.sum, x, [0, 2]), np.ones((2, 3, 4))),
}


@pytest.mark.parametrize("name", AT_EDGES)
def test_numbers_are_numpys_where_rounding_or_small_dtypes_would_make_others(name):
    function, x = AT_EDGES[name]
    expected, found = function(x), function(pe.Tensor(x))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    if x.dtype == np.float64:
        gradcheck(function, x)


def test_a_ramp_of_whole_numbers_is_made_of_floats():
    given = {"mode": "linear_ramp", "end_values": 0.9}
    x = np.array([10])
    np.testing.assert_array_equal(np.pad(pe.Tensor(x), (4, 0), **given).numpy(), np.pad(x, (4, 0), **given))
    pairs = {"mode": "linear_ramp", "end_values": ((0.5, 7.9),)}
    np.testing.assert_array_equal(np.pad(pe.Tensor(x), (3, 5), **pairs).numpy(), np.pad(x, (3, 5), **pairs))


def test_a_result_of_another_shape_is_refused_over_axes():
    with pytest.raises(ShapeError, match=r"apply_over_axes: the function's result must have 3 axes, or one less"):
        np.apply_over_axes(lambda a, axis: np.sum(a), pe.Tensor(np.ones((2, 3, 4))), [0])


def test_weights_of_a_histogram_are_added_in_float64():
    x = np.full(50_000, 0.5, np.float32)
    w = np.full(50_000, 0.1, np.float32)
    found, edges = np.histogram(pe.Tensor(x), 2, (0, 1), weights=w)
    expected, its_edges = np.histogram(x, 2, (0, 1), weights=w)
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-7)
    np.testing.assert_allclose(edges.numpy(), its_edges)


@pytest.mark.parametrize("name", sorted(name for name, op in TABLE.items() if isinstance(op.kernel, np.ufunc)))
@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_an_operand_too_many_or_too_few_is_refused(name, shape):
    """A ufunc would write its result to one too many, and leave the memory of the result as it is for one too few."""
    op = TABLE[name]
    for count in {0, 1, 2, 3} - {op.kernel.nin}:
        arrays = [np.ones(shape) for _ in range(count)]
        with pytest.raises((TypeError, EngineError)):
            op(*arrays)
        with pytest.raises((TypeError, EngineError)):
            pe.compile(op)(*arrays)
        assert all((array == 1).all() for array in arrays)


def test_a_ufunc_of_another_dtype_gives_the_dtype_that_is_inferred():
    op = elementwise("sign bit", np.signbit, lambda y, x: 0, doc="", in_table=False)
    np.testing.assert_array_equal(op(np.array([-1.0, 2.0])).numpy(), [1.0, 0.0])
    assert op(np.array([-1.0, 2.0])).numpy().dtype == np.float64


def test_an_array_that_is_reshaped_in_place_keeps_no_tensor_of_two_shapes():
    a = np.ones(6)
    x = Tensor(a)
    a.resize((2, 3), refcheck=False)
    try:
        y = np.exp(x)
    except (ValueError, EngineError):
        return
    assert y.shape == y.numpy().shape


# Norms of zeros, reductions of one element ----------------------------------------------------------------


@pytest.mark.parametrize("ord", [1.5, 3, 4, 7.5])
def test_the_gradient_of_a_norm_of_zeros_is_0_as_torchs(ord, torch):
    x = np.array([[0.0, 0.0], [1.0, -2.0], [0.0, 3.0]])
    variable = torch.tensor(x, requires_grad=True)
    torch.linalg.vector_norm(variable, ord, dim=1).sum().backward()
    for function in (partial(np.linalg.norm, ord=ord, axis=1), partial(np.linalg.vector_norm, ord=ord, axis=1)):
        np.testing.assert_allclose(function(Tensor(x)), np.linalg.norm(x, ord, axis=1), rtol=1e-15)
        gradient = pe.grad(lambda x, f=function: np.sum(f(x)))
        for derived in (gradient, pe.compile(gradient)):
            np.testing.assert_allclose(derived(x), variable.grad.numpy(), rtol=1e-12)
    assert np.isnan(pe.grad(lambda x: np.linalg.norm(x, -1))(np.zeros(2))).all()


@pytest.mark.parametrize("ufunc", [np.divide, np.subtract, np.add, np.multiply])
@pytest.mark.parametrize("x", [np.array([3]), np.array([[3], [4]]), np.array([3.0], np.float32)])
def test_a_reduction_of_one_element_has_the_dtype_of_several(ufunc, x):
    found, expected = ufunc.reduce(Tensor(x), axis=-1), ufunc.reduce(x, axis=-1)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
    found, expected = ufunc.reduceat(Tensor(x), [0], axis=-1), ufunc.reduceat(x, [0], axis=-1)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


# What is multiplied by 0, or not at all ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize("function", [np.convolve, np.correlate])
def test_where_a_kernel_reaches_beyond_the_elements_nothing_is_multiplied(rng, function, length, mode):
    short = rng.standard_normal(length)
    short[rng.integers(length)] = np.inf
    short[0] = np.nan if length > 4 else short[0]
    long = rng.standard_normal(length + 7)
    for a, v in ((long, short), (short, long)):
        expected = function(a, v, mode)
        for made in (function(Tensor(a), v, mode), pe.compile(lambda a, v: function(a, v, mode))(a, v)):
            np.testing.assert_array_equal(np.isfinite(made), np.isfinite(expected))
            np.testing.assert_array_equal(np.isnan(made), np.isnan(expected))
            np.testing.assert_allclose(made, expected, rtol=1e-10)
    finite = rng.standard_normal(length)
    gradcheck(lambda a, v: function(a, v, mode), long, finite)
    small = rng.integers(-9, 9, length + 7).astype(np.int8), rng.integers(-9, 9, length).astype(np.int8)
    made = function(Tensor(small[0]), Tensor(small[1]), mode)
    assert made.dtype == np.int8
    np.testing.assert_array_equal(made, function(*small, mode))


def test_a_polynomial_with_an_infinite_root_is_numpys():
    for roots in ([np.inf], [1.0, np.inf], [np.nan, 2.0], [2.0, -np.inf, 3.0]):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(np.poly(Tensor(np.array(roots))), np.poly(np.array(roots)))


@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.inf])
def test_between_equal_steps_the_element_itself_does_not_count(bad):
    x, places = np.array([0.0, bad, 2.0, 3.0, 5.0]), np.arange(5.0)
    with np.errstate(invalid="ignore"):
        for at in (places, places**2):
            np.testing.assert_allclose(np.gradient(Tensor(x), at), np.gradient(x, at))
    smooth = np.sin(places)
    gradcheck(lambda x, at: np.gradient(x, at), smooth, places)


def test_beside_a_diagonal_a_gradient_is_zero():
    x = np.array([[0.0, 1.0], [1.0, 4.0]])
    with np.errstate(divide="ignore", invalid="ignore"):
        for function in (np.diagonal, partial(np.einsum, "ii->i")):
            for grad in (pe.grad, lambda f: pe.compile(pe.grad(f))):
                found = grad(lambda x, f=function: np.sum(np.sqrt(f(x))))(x)
                np.testing.assert_array_equal(found, [[np.inf, 0], [0, 0.25]])
        found = pe.grad(lambda x: 1 / np.einsum("ii->", x) ** 2)(np.array([[1.0, 3.0], [2.0, -1.0]]))
    np.testing.assert_array_equal(found[~np.eye(2, dtype=bool)], 0)
    three = np.arange(1.0, 28).reshape(3, 3, 3)
    found = pe.grad(lambda x: np.sum(np.einsum("iji->j", x) ** 2))(three)
    assert found[0, 1, 2] == 0 and found[1, 1, 1] == 2 * np.einsum("iji->j", three)[1]


def test_the_derivative_of_a_running_product_survives_products_that_overflow():
    x = np.array([1e-300, 1e200, 1e200, 1e-100])
    _, tangent = pe.jvp(np.cumprod, (x,), (np.array([0.0, 1, 0, 0]),))
    np.testing.assert_allclose(tangent, [0, 1e-300, 1e-100, 1e-200])
    np.testing.assert_array_equal(pe.grad(lambda x: np.cumprod(x)[0])(x), [1, 0, 0, 0])
    second = pe.grad(lambda x: np.sum(pe.grad(lambda x: np.cumprod(x)[0])(x)))(x[:3])
    np.testing.assert_array_equal(second, np.zeros(3))
    with np.errstate(invalid="ignore"):  # an infinite factor is one
        assert np.isnan(pe.jvp(np.cumprod, (np.array([2.0, np.inf, 1]),), (np.array([0.0, 0, 1]),))[1][1])


@pytest.mark.parametrize("infinite", [np.inf, np.nan])
def test_a_padding_row_has_no_derivative_however_large(infinite):
    w, ids = np.zeros((2, 1)), np.array([[0, 1], [1, 1]])

    def f(w, ids):
        return np.sum(np.sqrt(ops.embedding(w, ids, 0)))

    with np.errstate(divide="ignore"):
        of_each = pe.vmap(pe.grad(f), in_axes=(None, 0))(w, ids)
        np.testing.assert_array_equal(of_each, [pe.grad(f)(w, row) for row in ids])
        assert of_each[0, 0, 0] == 0
    tangent = np.array([[infinite], [1.0]])
    _, found = pe.jvp(lambda w: ops.embedding(w, ids, 0), (w,), (tangent,))
    np.testing.assert_array_equal(found[..., 0], [[0, 1], [1, 1]])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int64, np.bool_, np.float32])
def test_the_trapezoids_of_whole_numbers_are_numpys(dtype):
    y = np.array([[200, 100, 3], [1, 0, 250]]).astype(dtype)
    for axis in (0, 1):
        np.testing.assert_array_equal(np.trapezoid(Tensor(y), axis=axis), np.trapezoid(y, axis=axis))


def test_elements_of_a_captured_array_are_read_anew():
    arr, index = np.array([1.0, 2.0]), np.array([0, 1])
    for function in (lambda i: i.choose(arr), lambda i: np.choose(i, arr), lambda i: i * ops.stack(arr)):
        compiled = pe.compile(function)
        before = function(Tensor(index)).numpy()
        np.testing.assert_array_equal(compiled(index), before)
        arr[1] += 3
        np.testing.assert_array_equal(compiled(index), function(Tensor(index)).numpy())
        assert not np.array_equal(compiled(index), before)
