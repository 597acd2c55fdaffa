"""Convolution: against PyTorch over the whole argument space, and what it says when shapes do not fit."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.ops import blocks, convolution
from py_engine.ad.reverse import gradients
from py_engine.errors import DTypeError, ShapeError

pytestmark = pytest.mark.usefixtures("copied_as_if_large")


@st.composite
def calls(draw):
    """Shapes of x and the weight, and settings that fit them."""
    axes = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 3))
    channels, filters = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    each = [st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.tuples(st.integers(0, 3), st.integers(0, 3))]
    kernel, stride, dilation, padding = (tuple(draw(kind) for _ in range(axes)) for kind in each)
    lengths = tuple(
        max(1, (k - 1) * d + 1 - before - after) + draw(st.integers(0, 4))
        for k, d, (before, after) in zip(kernel, dilation, padding, strict=True)
    )
    samples = draw(st.integers(0, 3))
    at = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (samples, channels, *lengths), (filters, channels // groups, *kernel), at


def layouts(array):
    """The same values in other memory layouts: in C order, channels last, backwards, with gaps."""
    yield array
    yield np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
    room = np.zeros([2 * n for n in array.shape], array.dtype)
    view = room[(*(slice(None, None, -2) for _ in array.shape),)]
    view[...] = array
    yield view


def with_gradients(function, *arrays):
    """The result, and its gradients under an upstream gradient drawn from a fixed seed: eagerly."""
    inputs = [Tensor(a, requires_grad=True) for a in arrays]
    y = function(*inputs)
    upstream = np.random.default_rng(3).standard_normal(y.shape).astype(y.dtype)
    return [y.numpy(), *(g.numpy() for g in gradients([y], [Tensor(upstream)], inputs))]


def torch_conv(torch, x, weight, stride, padding, dilation, groups):
    """torch pads both ends alike, so that the padding is made by hand."""
    by_hand = [n for pair in reversed(padding) for n in pair]
    function = getattr(torch.nn.functional, f"conv{x.ndim - 2}d")
    return function(torch.nn.functional.pad(x, by_hand), weight, None, stride, 0, dilation, groups)


@given(call=calls())
def test_equals_torch(torch, call):
    x_shape, weight_shape, at = call
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal(x_shape), rng.standard_normal(weight_shape)
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, weight)]
    y = torch_conv(torch, *theirs, **at)
    upstream = np.random.default_rng(3).standard_normal(tuple(y.shape))
    y.backward(torch.tensor(upstream))
    expected = [y.detach().numpy(), *(t.grad.numpy() for t in theirs)]
    for own in layouts(x):
        for found, value in zip(with_gradients(lambda *a: ops.conv(*a, **at), own, weight), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-10, atol=1e-12)


@given(call=calls())
def test_both_ways_to_the_gradient_of_x_agree(call):
    """Gathered columns of the upstream gradient, and columns added back: `work` decides, here each time for one."""
    x_shape, weight_shape, at = call
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal(x_shape), rng.standard_normal(weight_shape)
    found = []
    for costs in ((1, 0), (0, 1)):  # of adding back, of gathering
        with mock.patch.object(convolution, "work", side_effect=itertools.cycle(costs)):
            found.append(with_gradients(lambda *a: ops.conv(*a, **at), x, weight)[1])
    np.testing.assert_allclose(*found, rtol=1e-10, atol=1e-12)


@given(call=calls())
def test_replays_what_it_computes_eagerly(call):
    x_shape, weight_shape, at = call
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal(x_shape), rng.standard_normal(weight_shape)
    weights = rng.standard_normal(ops.conv(*arrays, **at).shape)
    function = pe.value_and_grad(lambda x, w: ops.sum(weights * ops.square(ops.conv(x, w, **at))), (0, 1))
    eager_value, eager = function(*map(Tensor, arrays))
    compiled = pe.compile(function)
    for _ in range(2):
        value, found = compiled(*arrays)
        np.testing.assert_allclose(value, eager_value.numpy(), rtol=1e-12)
        for g, expected in zip(found, eager, strict=True):
            np.testing.assert_allclose(g, expected.numpy(), rtol=1e-11, atol=1e-12)
        ((tape, _),) = compiled.tapes.values()
        tape.poison(0xFF)


@pytest.mark.parametrize("block_bytes", [1, 2**30])
@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("filters", [2, 8])
def test_the_gradient_of_the_weight_adds_up_the_samples_whatever_their_blocks(
    monkeypatch, rng, block_bytes, samples, filters
):
    """One product in the order of the result where it is the only one and has a short sum; else the sum of several."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    x, g = rng.standard_normal((samples, 4, 6)), rng.standard_normal((samples, filters, 4))
    weight = Tensor(rng.standard_normal((filters, 2, 3)), requires_grad=True)
    (found,) = gradients([ops.conv(x, weight, groups=2)], [Tensor(g)], [weight])
    windows = np.lib.stride_tricks.sliding_window_view(x, 3, axis=2).reshape(samples, 2, 2, 4, 3)
    expected = np.einsum("ngcpk,ngfp->gfck", windows, g.reshape(samples, 2, filters // 2, 4))
    np.testing.assert_allclose(found, expected.reshape(weight.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "order", "parts"),
    [
        ((300, 70), (1, 0), 10),
        ((70, 300), (1, 0), 1),
        ((500, 40, 3, 5), (2, 3, 1, 0), 16),
        ((500, 40, 3, 5), (1, 0, 2, 3), 16),
        ((64, 20, 5, 5), (0, 2, 3, 1), 1),
        ((300, 70), (0, 1), 1),
        ((300, 30), (1, 0), 1),
        ((0, 30_000), (1, 0), 1),
        ((30_000,), (0,), 1),
    ],
)
def test_large_transposed_copies_are_made_in_parts(monkeypatch, rng, shape, order, parts):
    monkeypatch.setattr(blocks, "LEAST_ACROSS", (2**8, 2**14))
    x = rng.standard_normal(shape).transpose(order)
    into = np.full(x.shape, np.nan)
    calls = blocks.copies(into, x)
    assert len(calls) == parts
    for call in calls:
        call()
    np.testing.assert_array_equal(into, x)


def test_numbers_serve_all_axes(rng):
    x, weight = rng.standard_normal((2, 3, 7, 8)), rng.standard_normal((4, 3, 3, 3))
    short = ops.conv(x, weight, stride=2, padding=1, dilation=2).numpy()
    long = ops.conv(x, weight, (2, 2), ((1, 1), (1, 1)), (2, 2)).numpy()
    np.testing.assert_array_equal(short, long)
    np.testing.assert_array_equal(ops.conv(x, weight, padding=(1, 0)), ops.conv(x, weight, padding=((1, 1), (0, 0))))


def test_is_a_correlation_not_turned_round():
    x, weight = np.array([[[1.0, 2, 3, 4]]]), np.array([[[1.0, 10, 100]]])
    np.testing.assert_array_equal(ops.conv(x, weight), [[[321, 432]]])


def test_nan_and_infinity_stay_where_they_are():
    x = np.zeros((2, 1, 5))
    x[0, 0, 1], x[1, 0, 4] = np.nan, np.inf
    y = ops.conv(x, np.ones((1, 1, 2))).numpy()
    np.testing.assert_array_equal(np.isnan(y[0, 0]), [True, True, False, False])
    np.testing.assert_array_equal(y[1, 0], [0, 0, 0, np.inf])


def test_second_derivatives_use_only_the_three_ops(rng):
    """Bilinear: the set {conv, conv_input_gradient, conv_weight_gradient} is closed, at any depth."""
    x = Tensor(rng.standard_normal((2, 2, 5)), requires_grad=True)
    weight = Tensor(rng.standard_normal((3, 2, 2)), requires_grad=True)
    outputs, leaves = [ops.conv(x, weight, 2, 1)], [x, weight]
    for _ in range(3):
        seed = Tensor(rng.standard_normal(outputs[-1].shape), requires_grad=True)
        outputs += [g for g in gradients([outputs[-1]], [seed], leaves) if g is not None]
        leaves.append(seed)
    names = {node.op.name for node in pe.topological_sort(outputs) if node.op is not None}
    assert names <= {"conv", "conv_input_gradient", "conv_weight_gradient"}


@pytest.mark.parametrize(
    ("x", "weight", "at", "message"),
    [
        ((2, 3, 4), (5, 3, 6), {}, "a kernel of length 6 does not fit an input of length 4 along spatial axis 0"),
        ((2, 3, 9, 4), (5, 3, 1, 3), {"dilation": 2},
         r"a kernel of length 3 \(dilated 5\) does not fit an input of length 4 along spatial axis 1"),
        ((2, 3, 4), (5, 3, 7), {"padding": 1}, r"does not fit an input of length 4 \(padded 6\)"),
        ((2, 3, 4), (5, 2, 2), {}, r"with 1 groups needs 2 channels, x of shape \(2, 3, 4\) has 3"),
        ((2, 4, 4), (5, 2, 2), {"groups": 2}, "4 channels and 5 filters cannot be divided into 2 groups"),
        ((2, 3, 4), (5, 3), {}, r"expected x \(N, C, \*lengths\) and a weight"),
        ((2, 3), (5, 3), {}, r"with as many spatial axes, got shapes \(2, 3\) and \(5, 3\)"),
        ((2, 3, 4), (5, 3, 2), {"stride": 0}, "conv: stride must be at least 1, actual 0"),
        ((2, 3, 4), (5, 3, 2), {"stride": 1.5}, "conv: stride must be a whole number"),
        ((2, 3, 4), (5, 3, 2), {"stride": (1, 1)}, r"stride must be a whole number, or 1 of them, actual \(1, 1\)"),
        ((2, 3, 4), (5, 3, 2), {"padding": -1}, "padding must be a whole number >= 0"),
        ((2, 3, 4), (5, 3, 2), {"padding": ((1, 2, 3),)}, "padding must be a whole number >= 0"),
        ((2, 3, 4), (5, 3, 2), {"dilation": True}, "dilation must be a whole number"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(x, weight, at, message):
    with pytest.raises(ShapeError, match=message):
        ops.conv(np.zeros(x), np.zeros(weight), **at)


def test_dtypes_are_kept_and_not_mixed():
    x, weight = np.zeros((1, 1, 3), np.float32), np.zeros((1, 1, 2), np.float32)
    assert ops.conv(x, weight).dtype == np.float32
    with pytest.raises(DTypeError, match="float32 and float64 cannot be mixed"):
        ops.conv(x, weight.astype(np.float64))
    with pytest.raises(DTypeError, match="expected float32 or float64, got int64"):
        ops.conv(np.zeros((1, 1, 3), np.int64), np.zeros((1, 1, 2), np.int64))
