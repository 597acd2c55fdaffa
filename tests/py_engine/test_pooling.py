"""Pooling: against PyTorch over the whole argument space, ties, NaN, and what it says when shapes do not fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.forward import push_forward
from py_engine.ad.op import TABLE
from py_engine.ad.ops import pooling
from py_engine.ad.ops.pooling import PHASE_MAX, PHASE_MAX_GRADIENT
from py_engine.ad.reverse import gradients
from py_engine.errors import DTypeError, ShapeError

POOLS = {"max": ops.max_pool, "avg": ops.avg_pool}

pytestmark = pytest.mark.usefixtures("copied_as_if_large")


@st.composite
def calls(draw):
    """A shape of x, and settings that fit it."""
    axes = draw(st.integers(1, 2))
    window = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    stride = draw(st.none() | st.tuples(*(st.integers(1, 4) for _ in window)))
    padding = tuple((n, n) for n in (draw(st.integers(0, k // 2)) for k in window))
    lengths = tuple(max(1, k - 2 * p) + draw(st.integers(0, 6)) for k, (p, _) in zip(window, padding, strict=True))
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 3)), *lengths)
    return shape, {"window": window, "stride": stride, "padding": padding}


def values(kind, shape):
    rng = np.random.default_rng(1)
    return rng.standard_normal(shape) if kind == "plain" else rng.integers(-1, 2, shape).astype(np.float64)


def with_gradient(function, x):
    inputs = Tensor(x, requires_grad=True)
    y = function(inputs)
    upstream = np.random.default_rng(3).standard_normal(y.shape).astype(y.dtype)
    (g,) = gradients([y], [Tensor(upstream)], [inputs])
    return y.numpy(), g.numpy()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", ["plain", "ties"])
@given(call=calls())
def test_equals_torch(torch, pool, kind, call):
    shape, at = call
    x = values(kind, shape)
    theirs = torch.tensor(x, requires_grad=True)
    function = getattr(torch.nn.functional, f"{pool}_pool{len(shape) - 2}d")
    if shape[0]:
        y = function(theirs, at["window"], at["stride"], tuple(n for n, _ in at["padding"]))
        y.backward(torch.tensor(np.random.default_rng(3).standard_normal(tuple(y.shape))))
        expected = y.detach().numpy(), theirs.grad.numpy()
    else:  # torch takes no empty batches here
        one = function(torch.zeros(1, *shape[1:]), at["window"], at["stride"], tuple(n for n, _ in at["padding"]))
        expected = np.zeros((0, *one.shape[1:])), np.zeros(shape)
    channels_last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    for own in (x, channels_last, x[..., ::-1].copy()[..., ::-1]):
        for found, value in zip(with_gradient(lambda a: POOLS[pool](a, **at), own), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pool", POOLS)
@given(call=calls())
def test_replays_what_it_computes_eagerly(pool, call):
    shape, at = call
    x = values("plain", shape)
    weights = np.random.default_rng(2).standard_normal(POOLS[pool](x, **at).shape)
    function = pe.value_and_grad(lambda x: ops.sum(weights * ops.square(POOLS[pool](x, **at))))
    eager_value, eager = function(Tensor(x))
    compiled = pe.compile(function)
    for _ in range(2):
        value, found = compiled(x)
        np.testing.assert_allclose(value, eager_value.numpy(), rtol=1e-12)
        np.testing.assert_allclose(found, eager.numpy(), rtol=1e-12, atol=1e-14)
        ((tape, _),) = compiled.tapes.values()
        tape.poison(0xFF)


def test_a_tie_belongs_to_the_first():
    x = np.array([[[2.0, 2, 1, 3, 3, 3]]])
    y, g = with_gradient(lambda x: ops.max_pool(x, 3), x)
    np.testing.assert_array_equal(y, [[[2, 3]]])
    np.testing.assert_array_equal(g != 0, [[[True, False, False, True, False, False]]])
    plane = np.ones((1, 1, 4, 4))
    _, g = with_gradient(lambda x: ops.max_pool(x, 2), plane)
    np.testing.assert_array_equal(np.argwhere(g[0, 0]), [[0, 0], [0, 2], [2, 0], [2, 2]])


def test_overlapping_windows_add_up():
    y, g = with_gradient(lambda x: ops.max_pool(x, 3, 1), np.array([[[0.0, 0, 5, 0, 0]]]))
    np.testing.assert_array_equal(y, [[[5, 5, 5]]])
    upstream = np.random.default_rng(3).standard_normal((1, 1, 3))
    np.testing.assert_allclose(g, [[[0, 0, upstream.sum(), 0, 0]]])


@pytest.mark.parametrize("pool", POOLS)
def test_nan_spreads_over_its_windows_alone(pool):
    x = np.arange(12.0).reshape(1, 2, 6)
    x[0, 1, 3] = np.nan
    y = POOLS[pool](x, 2).numpy()
    np.testing.assert_array_equal(np.isnan(y), [[[False, False, False], [False, True, False]]])


def test_padding_never_wins_and_counts_as_zero():
    x = np.full((1, 1, 3), -4.0)
    np.testing.assert_array_equal(ops.max_pool(x, 2, padding=1).numpy(), [[[-4, -4]]])
    np.testing.assert_array_equal(ops.avg_pool(x, 2, padding=1).numpy(), [[[-2, -4]]])
    everywhere = np.full((1, 1, 3), -np.inf)
    assert (ops.max_pool(everywhere, 2, padding=1).numpy() == -np.inf).all()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("shape", "at", "message"),
    [
        ((1, 1, 3), {"window": 4}, "window of length 4 does not fit an input of length 3 along spatial axis 0"),
        ((1, 1, 9, 2), {"window": (2, 5), "padding": (0, 1)}, r"length 2 \(padded 4\) along spatial axis 1"),
        ((1, 1, 5), {"window": 3, "padding": 2}, "padding must be at most half the window, 1, along spatial axis 0, "
                                                 "actual 2"),
        ((1, 5), {"window": 1}, r"expected x \(N, C, \*lengths\) with at least one spatial axis, got shape \(1, 5\)"),
        ((1, 1, 5), {"window": (2, 2)}, r"window must be a whole number, or 1 of them, actual \(2, 2\)"),
        ((1, 1, 5), {"window": 0}, "window must be at least 1, actual 0"),
        ((1, 1, 5), {"window": 2, "stride": 0}, "stride must be at least 1, actual 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(pool, shape, at, message):
    with pytest.raises(ShapeError, match=f"{pool}_pool.*({message})"):
        POOLS[pool](np.zeros(shape), **at)


@pytest.mark.parametrize("pool", POOLS)
def test_dtypes_are_kept(pool):
    assert POOLS[pool](np.zeros((1, 1, 4), np.float32), 2).dtype == np.float32
    with pytest.raises(DTypeError, match="expected float32 or float64, got int64"):
        POOLS[pool](np.zeros((1, 1, 4), np.int64), 2)


def test_an_infinite_gradient_leaves_the_others_zero():
    x = np.array([[[1.0, 2, 4, 3]]])
    at = Tensor(x, requires_grad=True)
    y = ops.max_pool(at, 2)
    won = np.isin(x, y.numpy())
    (g,) = gradients([y], [Tensor(np.full(y.shape, np.inf))], [at])
    np.testing.assert_array_equal(g.numpy(), np.where(won, np.inf, 0))
    (tangent,) = push_forward([y], {at: Tensor(np.where(won, 1, np.inf))})
    np.testing.assert_array_equal(tangent.numpy(), np.ones(y.shape))


def test_an_infinite_gradient_of_a_maximum_over_phases_leaves_the_others_zero():
    phases = np.array([[1.0, 5], [2, 3]])
    found = PHASE_MAX_GRADIENT(np.full(2, np.inf), phases, PHASE_MAX(phases)).numpy()
    np.testing.assert_array_equal(found, np.where(phases == np.max(phases, 0), np.inf, 0))


def test_windows_that_see_no_element_are_found_without_a_look_at_each():
    settings = itertools.product(range(4), range(1, 4), range(1, 4), range(1, 5), range(4), range(6))
    for n, window, stride, dilation, before, after in settings:
        starts = range(-before, n + after - (window - 1) * dilation, stride)
        seen = [any(0 <= start + k * dilation < n for k in range(window)) for start in starts]
        assert pooling._sees_elements(n, window, stride, dilation, (before, after)) == all(seen)
    assert pooling._sees_elements(2**40, 2**20, 1, 2, (2**20 - 1, 2**20 - 1))


def _first_nan_or_largest(x, y, upstream, at):
    """The gradient, window by window: at the first NaN, else at the first of the largest."""
    axes = len(at["window"])
    padding, stride = at.get("padding", (0,) * axes), at.get("stride", at["window"])
    dilation = at.get("dilation", (1,) * axes)
    expected = np.zeros_like(x)
    for place in np.ndindex(y.shape):
        best = None
        for offset in np.ndindex(at["window"]):
            each = zip(place[2:], offset, stride, padding, dilation, strict=True)
            element = (*place[:2], *(p * s + o * d - n for p, o, s, n, d in each))
            if any(not 0 <= i < n for i, n in zip(element[2:], x.shape[2:], strict=True)):
                continue
            if best is None or x[element] > x[best] or np.isnan(x[element]) > np.isnan(x[best]):
                best = element
        expected[best] += upstream[place]
    return expected


NAN_POOLS = [
    ((2, 3, 8), {"window": (2,)}),
    ((2, 3, 7), {"window": (3,), "stride": (1,), "padding": (1,)}),
    ((2, 3, 6, 6), {"window": (2, 2)}),
    ((2, 3, 6, 6), {"window": (2, 2), "stride": (1, 2), "padding": (1, 1)}),
    ((2, 3, 7, 7), {"window": (2, 2), "stride": (1, 1), "dilation": (2, 3)}),
    ((2, 3, 3, 4), {"window": (3, 4)}),  # one window of everything
    ((2, 2, 4, 4, 4), {"window": (2, 2, 2)}),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("shape", "at"), NAN_POOLS, ids=str)
def test_the_first_nan_of_a_window_has_its_gradient_in_every_layout(shape, at, channels_last, dtype, rng):
    x = rng.integers(-1, 2, shape).astype(dtype)
    x[rng.random(shape) < 0.3] = np.nan
    x[rng.random(shape) < 0.2] = -np.inf
    x[0, 0] = -np.inf
    given = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if channels_last else x

    def pool(x):
        return ops.max_pool(np.moveaxis(x, -1, 1) if channels_last else x, **at)

    y = pool(Tensor(given)).numpy()
    upstream = rng.standard_normal(y.shape).astype(dtype)

    def gradient(x):
        return pe.grad(lambda x: np.sum(pool(x) * upstream))(x)

    expected = _first_nan_or_largest(x, y, upstream, at)
    for found in (gradient(given), pe.compile(gradient)(given)):
        np.testing.assert_allclose(
            np.moveaxis(found, -1, 1) if channels_last else found, expected, rtol=1e-5, atol=1e-6
        )
    tangent = rng.standard_normal(shape).astype(dtype)
    moved = np.ascontiguousarray(np.moveaxis(tangent, 1, -1)) if channels_last else tangent
    _, forward = pe.jvp(pool, (given,), (moved,))
    np.testing.assert_allclose(np.sum(forward * upstream), np.sum(expected * tangent), rtol=1e-4)


def test_the_first_nan_among_phases_has_the_gradient(rng):
    phases = rng.integers(-1, 2, (4, 3, 2, 5)).astype(np.float64)
    phases[rng.random(phases.shape) < 0.3] = np.nan
    y, g = np.max(phases, 0), rng.standard_normal((3, 2, 5))
    expected = np.where(np.arange(4)[:, None, None, None] == np.argmax(phases, 0), g, 0)
    np.testing.assert_array_equal(PHASE_MAX_GRADIENT(g, Tensor(phases.copy()), y).numpy(), expected)
    words = np.arange(1 + 7 + 7) % 4
    at = {"kernel": 1, "length": 7, "stride": 4}
    phases, y, g = phases[:, :, :1, :1], y[:, :1, :1], g[:, :1, :1]
    sums = TABLE["word_sums"](g, phases, y, words, **at).numpy()
    of_words = np.zeros_like(sums)
    for filter, first in enumerate(np.argmax(phases, 0)[:, 0, 0]):
        of_words[words[1 + len(sums) + first], filter] += g[filter, 0, 0]
    np.testing.assert_array_equal(sums, of_words)
