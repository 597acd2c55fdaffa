"""Values and derivatives where care is needed: at 0, at ties, at infinity, and far out.

Every row is checked by itself, compiled, in float32, and against PyTorch except where its convention is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops

inf, nan = np.inf, np.nan


@pytest.fixture(autouse=True)
def quiet():
    """numpy warns at these points, as it should when they are computed eagerly."""
    with np.errstate(all="ignore"):
        yield


# Functions of one number ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """A function, its special points as x: (value, derivative), and the same function in torch."""

    name: str
    function: Callable[..., Any]
    at: dict[float, tuple[float, float]]
    torch: Callable[..., Any]


POINTS = [
    Points("abs", ops.abs, {0.0: (0, 0), inf: (inf, 1), -inf: (inf, -1)}, lambda t, x: t.abs(x)),
    Points("sign", ops.sign, {0.0: (0, 0), inf: (1, 0), -inf: (-1, 0)}, lambda t, x: t.sign(x)),
    Points("relu", ops.relu, {0.0: (0, 0), inf: (inf, 1), -inf: (0, 0)}, lambda t, x: t.relu(x)),
    Points("sqrt", ops.sqrt, {0.0: (0, inf), inf: (inf, 0), -1.0: (nan, nan)}, lambda t, x: t.sqrt(x)),
    Points("square", ops.square, {0.0: (0, 0), 1e200: (inf, 2e200), -inf: (inf, -inf)}, lambda t, x: t.square(x)),
    Points("reciprocal", ops.reciprocal, {0.0: (inf, -inf), inf: (0, 0)}, lambda t, x: 1 / x),
    Points("exp", ops.exp, {-1e3: (0, 0), 1e3: (inf, inf), -inf: (0, 0)}, lambda t, x: t.exp(x)),
    Points("expm1", ops.expm1, {1e-30: (1e-30, 1), 0.0: (0, 1), -1e3: (-1, 0)}, lambda t, x: t.expm1(x)),
    Points("log", ops.log, {0.0: (-inf, inf), inf: (inf, 0), -1.0: (nan, -1)}, lambda t, x: t.log(x)),
    Points("log1p", ops.log1p, {1e-30: (1e-30, 1), -1.0: (-inf, inf), inf: (inf, 0)}, lambda t, x: t.log1p(x)),
    Points("tanh", ops.tanh, {1e3: (1, 0), -1e3: (-1, 0), inf: (1, 0), -inf: (-1, 0)}, lambda t, x: t.tanh(x)),
    Points("sigmoid", ops.sigmoid, {0.0: (0.5, 0.25), 1e3: (1, 0), -1e3: (0, 0), inf: (1, 0), -inf: (0, 0)},
           lambda t, x: t.sigmoid(x)),
    Points("softplus", ops.softplus, {1e3: (1e3, 1), -1e3: (0, 0), inf: (inf, 1), -inf: (0, 0)},
           lambda t, x: t.nn.functional.softplus(x)),
    Points("x ** 2", lambda x: x**2, {0.0: (0, 0), inf: (inf, inf)}, lambda t, x: x**2),
    Points("x ** 3", lambda x: x**3, {0.0: (0, 0), -2.0: (-8, 12)}, lambda t, x: x**3),
    Points("x ** 1", lambda x: x**1, {0.0: (0, 1), inf: (inf, 1)}, lambda t, x: x**1),
    Points("x ** 0", lambda x: x**0, {0.0: (1, 0), inf: (1, 0), -3.0: (1, 0)}, lambda t, x: x**0),
    Points("x ** 0.5", lambda x: x**0.5, {0.0: (0, inf), -1.0: (nan, nan)}, lambda t, x: x**0.5),
    Points("x ** -1", lambda x: x**-1, {0.0: (inf, -inf), inf: (0, 0)}, lambda t, x: x**-1),
    Points("x ** array of 0", lambda x: x ** np.zeros((), x.dtype), {0.0: (1, 0), inf: (1, 0), -2.0: (1, 0)},
           lambda t, x: x ** t.zeros(())),
    Points("x ** array of 1", lambda x: x ** np.ones((), x.dtype), {0.0: (0, 1), -2.0: (-2, 1)},
           lambda t, x: x ** t.ones(())),
    Points("2 ** x", lambda x: 2**x, {0.0: (1, np.log(2)), -inf: (0, 0), 2e3: (inf, inf)}, lambda t, x: 2**x),
    Points("0 ** x", lambda x: np.zeros((), x.dtype) ** x, {0.0: (1, 0), 2.0: (0, 0), -1.0: (inf, -inf)},
           lambda t, x: t.zeros((), dtype=x.dtype) ** x),
    Points("clip", lambda x: ops.clip(x, -1, 1), {1.0: (1, 1), -1.0: (-1, 1), 2.0: (1, 0), -inf: (-1, 0), inf: (1, 0)},
           lambda t, x: t.clip(x, -1, 1)),
    Points("maximum(x, 0)", lambda x: ops.maximum(x, 0), {0.0: (0, 0.5), inf: (inf, 1), -inf: (0, 0)},
           lambda t, x: t.maximum(x, t.zeros_like(x))),
    Points("minimum(x, 0)", lambda x: ops.minimum(x, 0), {0.0: (0, 0.5), inf: (0, 0), -inf: (-inf, 1)},
           lambda t, x: t.minimum(x, t.zeros_like(x))),
    Points("maximum(x, x)", lambda x: ops.maximum(x, x), {3.0: (3, 1)}, lambda t, x: t.maximum(x, x)),
]  # fmt: skip


def each(rows, dtype=float):
    """Parametrize a test with every point of every row that neither overflows nor underflows in `dtype`."""
    with np.errstate(over="ignore"):
        pairs = [(row, x, np.array(x, dtype)) for row in rows for x in row.at]
    kept = [np.array_equal([np.isfinite(x), np.equal(x, 0)], [np.isfinite(y), y == 0]) for _, x, y in pairs]
    pairs = [(row, x) for (row, x, _), keep in zip(pairs, kept, strict=True) if keep]
    return pytest.mark.parametrize(("row", "x"), pairs, ids=[f"{row.name} at {x}" for row, x in pairs])


@each(POINTS)
def test_value_and_derivative(row, x):
    expected = row.at[x]
    np.testing.assert_allclose(pe.value_and_grad(row.function)(np.array(x)), expected, rtol=1e-15)
    np.testing.assert_allclose(pe.compile(pe.value_and_grad(row.function))(np.array(x)), expected, rtol=1e-15)


@each(POINTS, np.float32)
def test_value_and_derivative_in_float32(row, x):
    value, derivative = pe.compile(pe.value_and_grad(row.function))(np.array(x, np.float32))
    assert value.dtype == derivative.dtype == np.float32
    np.testing.assert_allclose((value, derivative), np.array(row.at[x], np.float32), rtol=1e-6)


@each(POINTS)
def test_like_torch(row, x, torch):
    variable = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    value = row.torch(torch, variable)
    value.backward()
    np.testing.assert_allclose((value.item(), variable.grad.item()), row.at[x], rtol=1e-15)


@pytest.mark.parametrize("row", POINTS, ids=lambda row: row.name)
def test_nan_is_not_hidden(row):
    value = row.function(pe.tensor(nan)).item()
    assert np.isnan(value) or row.name in ("x ** 0", "x ** array of 0")  # 1 whatever x is, says IEEE 754


# Functions of a vector ------------------------------------------------------------------------------------


def weights(x):
    return np.array([1, 2, 3], str(x.dtype).replace("torch.", ""))  # equal ones have no gradient through softmax


def halves(x):
    return np.array([1, 0, 0.5], str(x.dtype).replace("torch.", ""))


@dataclass(frozen=True)
class Vectors:
    """A function of three numbers, its special points as x: (value, gradient), and the same function in torch.

    `elsewhere` lists the points where torch overflows, underflows, or gives NaN for a gradient that has a limit.
    """

    name: str
    function: Callable[..., Any]
    at: dict[tuple[float, ...], tuple[float, tuple[float, ...]]]
    torch: Callable[..., Any]
    elsewhere: tuple[tuple[float, ...], ...] = ()


third = 1 / 3
VECTORS = [
    Vectors("max", ops.max,
            {(1, 1, 0): (1, (0.5, 0.5, 0)), (2, 2, 2): (2, (third, third, third)), (inf, 0, -inf): (inf, (1, 0, 0))},
            lambda t, x: t.amax(x)),
    Vectors("min", ops.min,
            {(1, 0, 0): (0, (0, 0.5, 0.5)), (-inf, -inf, 1): (-inf, (0.5, 0.5, 0))},
            lambda t, x: t.amin(x)),
    Vectors("norm", ops.norm,
            {(0, 0, 0): (0, (0, 0, 0)), (3, 0, 4): (5, (0.6, 0, 0.8)), (inf, 1, 0): (inf, (nan, 0, 0)),
             (3e200, 0, 4e200): (5e200, (0.6, 0, 0.8)), (0, 3e-200, 4e-200): (5e-200, (0, 0.6, 0.8))},
            lambda t, x: t.linalg.vector_norm(x),
            elsewhere=((3e200, 0, 4e200), (0, 3e-200, 4e-200))),
    Vectors("std", ops.std, {(5, 5, 5): (0, (0, 0, 0))}, lambda t, x: t.std(x, correction=0)),
    Vectors("logsumexp", ops.logsumexp,
            {(1e3, -1e3, 0): (1e3, (1, 0, 0)), (-1e3, -1e3, -2e3): (-1e3 + np.log(2), (0.5, 0.5, 0)),
             (-inf, 0, -inf): (0, (0, 1, 0)), (inf, 0, 0): (inf, (nan, 0, 0)),
             (-inf, -inf, -inf): (-inf, (0, 0, 0))},
            lambda t, x: t.logsumexp(x, 0),
            elsewhere=((-inf, -inf, -inf),)),
    Vectors("softmax", lambda x: ops.sum(ops.softmax(x) * weights(x)),
            {(1e3, -1e3, 0): (1, (0, 0, 0)), (-1e3, -1e3, -2e3): (1.5, (-0.25, 0.25, 0)),
             (-inf, 0, -inf): (2, (0, 0, 0))},
            lambda t, x: t.sum(t.softmax(x, 0) * t.tensor(weights(x)))),
    Vectors("log_softmax", lambda x: ops.sum(ops.log_softmax(x) * weights(x)),
            {(1e3, -1e3, 0): (-7e3, (-5, 2, 3)), (-1e3, -1e3, -2e3): (-3e3 - 6 * np.log(2), (-2, -1, 3)),
             (-inf, 0, 0): (-inf, (1, -1, 0))},
            lambda t, x: t.sum(t.log_softmax(x, 0) * t.tensor(weights(x)))),
    Vectors("softmax_cross_entropy", lambda x: ops.softmax_cross_entropy(x, np.array(1)),
            {(1e3, -1e3, 0): (2e3, (1, -1, 0)), (-1e3, 1e3, 0): (0, (0, 0, 0)), (0, -inf, 0): (inf, (0.5, -1, 0.5)),
             (-inf, 0, 0): (np.log(2), (0, -0.5, 0.5))},
            lambda t, x: t.nn.functional.cross_entropy(x, t.tensor(1))),
    Vectors("binary_cross_entropy", lambda x: 3 * ops.binary_cross_entropy(x, halves(x)),
            {(1e3, 1e3, 0): (1e3 + np.log(2), (0, 1, 0)), (-1e3, -1e3, 0): (1e3 + np.log(2), (-1, 0, 0))},
            lambda t, x: 3 * t.nn.functional.binary_cross_entropy_with_logits(x, t.tensor(halves(x)))),
]  # fmt: skip


@each(VECTORS)
def test_value_and_gradient(row, x):
    value, gradient = row.at[x]
    for function in (pe.value_and_grad(row.function), pe.compile(pe.value_and_grad(row.function))):
        v, g = function(np.array(x, float))
        np.testing.assert_allclose(v, value, rtol=1e-15)
        np.testing.assert_allclose(g, gradient, rtol=1e-12, atol=1e-15)


@each(VECTORS, np.float32)
def test_value_and_gradient_in_float32(row, x):
    value, gradient = row.at[x]
    v, g = pe.compile(pe.value_and_grad(row.function))(np.array(x, np.float32))
    assert v.dtype == g.dtype == np.float32
    np.testing.assert_allclose(v, value, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(g, gradient, rtol=1e-4, atol=1e-4)


@each(VECTORS)
def test_gradient_like_torch(row, x, torch):
    variable = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    value = row.torch(torch, variable)
    value.backward()
    same = np.allclose(value.item(), row.at[x][0], rtol=1e-12, equal_nan=True) and np.allclose(
        variable.grad.numpy(), row.at[x][1], rtol=1e-12, atol=1e-12, equal_nan=True
    )
    assert same == (x not in row.elsewhere)


# Ties, kinks and branches ---------------------------------------------------------------------------------


def test_ties_share_the_gradient_between_the_operands():
    a, b = np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])
    ga, gb = pe.grad(lambda a, b: np.sum(np.maximum(a, b)), (0, 1))(a, b)
    np.testing.assert_array_equal(ga, [0.5, 0, 1])
    np.testing.assert_array_equal(gb, [0.5, 1, 0])
    ga, gb = pe.grad(lambda a, b: np.sum(np.minimum(a, b)), (0, 1))(a, b)
    np.testing.assert_array_equal(ga, [0.5, 1, 0])
    np.testing.assert_array_equal(gb, [0.5, 0, 1])


def test_ties_along_an_axis_share_the_gradient():
    x = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(np.max(x, axis=1)))(x), [[0, 0.5, 0.5], [1 / 3] * 3])


def test_clip_gives_the_gradient_of_each_element_to_exactly_one_operand():
    x, low, high = np.array([0.0, 1.0, 1.5, 2.0, 3.0]), np.full(5, 1.0), np.full(5, 2.0)
    gx, glow, ghigh = pe.grad(lambda *args: np.sum(np.clip(*args)), (0, 1, 2))(x, low, high)
    np.testing.assert_array_equal(gx, [0, 1, 1, 1, 0])  # the bounds themselves count as inside
    np.testing.assert_array_equal(glow, [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(ghigh, [0, 0, 0, 0, 1])


def test_a_branch_not_taken_gives_no_gradient_if_its_values_are_kept_harmless():
    def safe_log(x):
        return np.sum(np.where(x > 0, np.log(np.where(x > 0, x, 1)), 0))

    x = np.array([-1.0, 0.0, 2.0])
    np.testing.assert_array_equal(pe.grad(safe_log)(x), [0, 0, 0.5])
    np.testing.assert_array_equal(pe.compile(pe.grad(safe_log))(x), [0, 0, 0.5])


def test_a_branch_not_taken_hides_its_values_but_not_the_nan_of_its_derivative():
    # What torch and JAX do, too: 0 times the infinite derivative of sqrt at 0. The docstring of where() warns.
    value, gradient = pe.value_and_grad(lambda x: np.sum(np.where(x > 0, np.sqrt(x), 0)))(np.array([0.0, 4.0]))
    assert value == 2
    np.testing.assert_array_equal(gradient, [nan, 0.25])


def test_where_passes_the_upstream_gradient_unharmed_by_infinite_values():
    g = pe.grad(lambda a, b: np.sum(np.where(np.array([True, False]), a, b)), (0, 1))(
        np.array([1, inf]), np.array([nan, 2])
    )
    np.testing.assert_array_equal(g, [[1, 0], [0, 1]])


def test_second_derivatives_at_zero():
    def second(function):
        return pe.grad(pe.grad(function))

    assert second(lambda x: x**2)(0.0) == 2
    assert second(lambda x: x**3)(0.0) == 0
    assert second(lambda x: x**1)(0.0) == 0
    assert second(lambda x: x**0)(0.0) == 0
    assert second(ops.relu)(0.0) == 0
    assert second(ops.abs)(0.0) == 0
    assert second(ops.softplus)(0.0) == 0.25
    assert second(ops.sigmoid)(0.0) == 0


def test_mixed_second_derivative_of_pow():
    mixed = pe.grad(lambda x, p: pe.grad(lambda x: x**p)(x), 1)
    np.testing.assert_allclose(mixed(2.0, 0.0), 1 / 2)
    np.testing.assert_allclose(mixed(2.0, 3.0), 2**2 + 3 * 2**2 * np.log(2))


def test_var_and_mean_of_nothing_are_nan_and_sum_is_zero():
    x = np.zeros((0, 3))
    assert np.isnan(np.mean(pe.tensor(x)).item()) and np.isnan(np.var(pe.tensor(x)).item())
    assert np.sum(pe.tensor(x)).item() == 0
    np.testing.assert_array_equal(np.mean(pe.tensor(x), axis=0).numpy(), [nan] * 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [10, 300, 3000, 5000])
@pytest.mark.parametrize(
    "function",
    [
        ops.relu,
        lambda x: np.clip(x, -0.5, 0.5) * x,
        lambda x: np.minimum(x, 0.25) * x,
        lambda x: np.where(x > 0, x * x, 0),
        lambda x: np.where(x > 0, 0, x * x),
        lambda x: np.where(x > 0, np.ones_like(x), 0) * x,
        lambda x: np.where(x > 0, -0.0, x),
        lambda x: np.max(x[3:] * 2) * x,
    ],
)
def test_selections_of_every_size_are_compiled_to_the_same_bits(function, size, dtype, rng):
    x = rng.standard_normal(size).astype(dtype)
    x[:3] = [np.nan, np.inf, -np.inf]

    def derivative(x):
        return pe.grad(lambda x: np.sum(function(x)))(x)

    with np.errstate(all="ignore"):
        for f in (lambda x: function(pe.tensor(x) if isinstance(x, np.ndarray) else x), derivative):
            value = f(x)
            expected = value.numpy() if isinstance(value, pe.Tensor) else value
            found = pe.compile(f)(x)
            assert found.dtype == expected.dtype == dtype
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_large_choice_is_numpys_to_the_last_bit(dtype, share):
    rng = np.random.default_rng(4)
    condition, a, b = rng.random((99, 101)) < share, *rng.standard_normal((2, 99, 101)).astype(dtype)
    a[0, :4], b[0, :4] = [np.nan, -0.0, np.inf, 1e-40], [0.0, np.nan, -np.inf, -1e-40]
    for operands in ((condition, a, b), (condition, a, b[:1]), (condition[:, :1], a, b), (condition, dtype(2), b)):
        expected = np.where(*operands)
        function = pe.compile(lambda c, x, y: np.where(c, x * 1, y * 1))  # into memory of an operand's
        for found in (np.where(*map(Tensor, map(np.asarray, operands))).numpy(), function(*operands)):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{found.itemsize}"))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_length_of_large_arrays_neither_overflows_nor_vanishes(dtype):
    a, b = np.random.default_rng(4).standard_normal((2, 3000)).astype(dtype)
    info = np.finfo(dtype)
    for scale in (1, info.max / 8, info.tiny, np.inf, np.nan, 0):
        with np.errstate(all="ignore"):
            x, y = a.copy(), b.copy()
            x[7], y[7] = x[7] * dtype(scale), y[7] * dtype(scale)
            expected = np.hypot(x, y)
            for found in (np.hypot(Tensor(x), y).numpy(), pe.compile(np.hypot)(x, y)):
                np.testing.assert_allclose(found, expected, rtol=2 * info.eps)
    with np.errstate(all="raise"):  # as numpy's function, whose result is no infinity here
        np.hypot(Tensor(np.full(3000, info.max / 4)), np.full(3000, info.max / 4))
    y = np.zeros(3000)
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(np.hypot(x, y)))(np.zeros(3000)), y)


# Cancellation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 1, 0.5, 0.999])
@pytest.mark.parametrize("settings", [{}, {"positive_weight": 2.5}, {"weight": 0.5}], ids=str)
def test_the_loss_of_large_logits_is_float64s_in_float32(target, settings):
    sizes = np.geomspace(1e-4, 100, 50)
    logits = np.concatenate([-sizes[::-1], [0], sizes]).astype(np.float32)
    targets = np.full(logits.shape, target, np.float32)
    x, t = logits.astype(float), targets.astype(float)
    weight, positive = settings.get("weight", 1), settings.get("positive_weight", 1)
    expected = weight * (positive * t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x))
    slope = weight * ((1 - t) / (1 + np.exp(-x)) - positive * t / (1 + np.exp(x)))

    def losses(x, t):
        return ops.binary_cross_entropy(x, t, reduction="none", **settings)

    def gradient(x, t):
        return pe.grad(lambda x: np.sum(losses(x, t)))(x)

    zero_inside = 1e-7 if 0 < target < 1 else 1e-37  # the gradient changes its sign there
    for function, wanted, atol in ((losses, expected, 1e-37), (gradient, slope, zero_inside)):
        eager = function(Tensor(logits), Tensor(targets))
        for found in (eager.numpy() if isinstance(eager, Tensor) else eager, pe.compile(function)(logits, targets)):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=atol)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("settings", [{}, {"positive_weight": 2.0}], ids=str)
def test_truth_values_are_targets_of_the_binary_cross_entropy(dtype, settings):
    logits, targets = np.array([-2, 0, 3], dtype), np.array([True, False, True])

    def loss(logits, targets):
        return ops.binary_cross_entropy(logits, targets, **settings)

    for function in (loss, pe.compile(loss), pe.grad(loss)):
        found, expected = function(logits, targets), function(logits, targets.astype(dtype))
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize(("size", "align_corners"), [(2, False), (8, False), (16, False), (2, True), (7, True)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axes", [1, 2])
def test_elements_between_infinite_and_huge_ones_are_torchs(axes, dtype, size, align_corners, torch):
    huge = np.finfo(dtype).max * 0.9
    rows = [
        (1, inf, 2, 3),
        (-inf, inf, 0, 1),
        (inf, inf, 1, -inf),
        (huge, -huge, huge, huge),
        (nan, 1, 2, inf),
        (2, -inf, 0, 3),
    ]
    x = np.array(rows, dtype)[None]
    if axes == 2:
        x = np.stack([x, np.ones_like(x), np.flip(x, -1), x], -2)
    variable = torch.tensor(x, requires_grad=True)
    mode = ["linear", "bilinear"][axes - 1]
    expected = torch.nn.functional.interpolate(variable, size, mode=mode, align_corners=align_corners)
    upstream = np.random.default_rng(3).standard_normal(expected.shape).astype(dtype)
    expected.backward(torch.tensor(upstream))

    def resized(x):
        return ops.interpolate(x, size, "linear", align_corners)

    def gradient(x):
        return pe.grad(lambda x: np.sum(resized(x) * upstream))(x)

    rtol = 20 * np.finfo(dtype).eps
    for found in (resized(Tensor(x)).numpy(), pe.compile(resized)(x)):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=rtol, atol=rtol * huge)
    for found in (gradient(x), pe.compile(gradient)(x)):
        np.testing.assert_allclose(found, variable.grad.numpy(), rtol=rtol, atol=10 * rtol)


# Forward mode where a derivative is infinite --------------------------------------------------------------


def along(function, at, tangents):
    """The derivative along a direction, eagerly and compiled."""
    at, tangents = (tuple(np.array(x) for x in given) for given in (at, tangents))
    _, eager = pe.jvp(function, at, tangents)
    compiled = pe.compile(lambda *x: pe.jvp(function, x[: len(at)], x[len(at) :])[1])(*at, *tangents)
    np.testing.assert_array_equal(eager, compiled)
    return float(eager)


ROOTS = {
    "sqrt": lambda x: ops.sqrt(ops.relu(x)),
    "cbrt": lambda x: ops.cbrt(ops.relu(x)),
    "** 0.5": lambda x: ops.relu(x) ** 0.5,
    "** p": lambda x: ops.relu(x) ** (0.5 + 0 * x),
    "sqrt of a maximum": lambda x: ops.sqrt(ops.maximum(x, 0)),
    "1 / **": lambda x: ops.relu(x) ** -1.5,
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_constant_behind_a_root_has_the_gradient_0_and_zero_times_infinity_forward(name):
    function = ROOTS[name]
    for x in (-1.0, -0.5):
        assert pe.grad(function)(x) == 0 and np.isnan(along(function, (x,), (1.0,)))
    np.testing.assert_allclose(along(function, (2.0,), (1.0,)), pe.grad(function)(2.0))
    assert np.isnan(along(ops.sqrt, (-1.0,), (1.0,)))


@pytest.mark.parametrize("function", [lambda x: ops.cbrt(x**3), lambda x: (x**3) ** (1 / 3), lambda x: ops.sqrt(x**2)])
def test_a_tangent_that_is_0_at_a_point_is_no_constant(function):
    """The derivative is 1, or there is none, so 0 would be wrong."""
    assert np.isnan(pe.grad(function)(0.0)) and np.isnan(along(function, (0.0,), (1.0,)))


@pytest.mark.parametrize(
    ("u", "v", "by_u", "by_v"),
    [
        (0.0, 0.0, 0, 0), (0.0, 1.0, 1, 0), (0.0, 2.0, 0, 0), (0.0, 0.5, inf, 0), (0.0, -1.0, -inf, -inf),
        (2.0, 3.0, 12, 8 * np.log(2)), (-2.0, 2.0, -4, nan), (-2.0, 3.0, 12, nan), (-2.0, -1.0, -0.25, nan),
    ],
)  # fmt: skip
def test_a_power_along_its_base_its_exponent_and_both(u, v, by_u, by_v):
    def power(u, v):
        return u**v

    np.testing.assert_allclose(pe.grad(power, (0, 1))(u, v), (by_u, by_v))
    still = 0 * by_u  # zero times infinity is NaN
    for tangents, expected in (
        ((1.0, 0.0), by_u),
        ((0.0, 1.0), still + by_v),
        ((1.0, 1.0), by_u + by_v),
        ((0.0, 0.0), still),
    ):
        np.testing.assert_allclose(along(power, (u, v), tangents), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.maximum(x, 1), lambda x: ops.minimum(1, x), lambda x: ops.clip(x, -1, 1), ops.relu,
        lambda x: ops.maximum(x, x + 1), lambda x: ops.max(ops.stack([x, x + 1])),
    ],
)  # fmt: skip
def test_where_one_of_two_is_nan_both_derivatives_are_0(function):
    assert pe.grad(function)(nan) == along(function, (nan,), (1.0,)) == 0


@pytest.mark.parametrize("function", [ops.exp, ops.expm1])
def test_a_limit_of_what_overflows_passes_no_tangent_and_zero_times_infinity_backward(function, torch):
    def limited(x):
        return ops.clip(function(x), -1, 1)

    x = torch.tensor(800.0, requires_grad=True)
    torch.clip(getattr(torch, function.name)(x), -1, 1).backward()
    assert along(limited, (800.0,), (1.0,)) == 0
    assert np.isnan(x.grad.item()) and np.isnan(pe.grad(limited)(800.0))
