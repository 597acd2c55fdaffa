"""Ops of neural networks against PyTorch in float64, values and gradients; and what they say of what is wrong."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.reverse import gradients
from py_engine.errors import ConfigurationError, DTypeError, EngineError, LabelError, ShapeError


def compare(torch, ours, theirs, *arrays, rtol=1e-11, atol=1e-12):
    """Value and gradients of both, at a random upstream gradient; ours eagerly and compiled."""
    floats = [i for i, a in enumerate(arrays) if np.asarray(a).dtype == np.float64]
    inputs = [torch.tensor(a, requires_grad=i in floats) for i, a in enumerate(arrays)]
    expected = theirs(*inputs)
    upstream = np.random.default_rng(5).standard_normal(tuple(expected.shape))
    expected.backward(torch.tensor(upstream))
    values = [expected.detach().numpy(), *(inputs[i].grad.numpy() for i in floats)]

    def outputs(*operands):
        y = ours(*operands)
        return [y, *gradients([y], [Tensor(upstream)], [operands[i] for i in floats])]

    eager = [x.numpy() for x in outputs(*(Tensor(a, requires_grad=i in floats) for i, a in enumerate(arrays)))]
    for found in (eager, pe.compile(outputs)(*arrays)):
        for x, value in zip(found, values, strict=True):
            assert x.shape == value.shape
            np.testing.assert_allclose(x, value, rtol=rtol, atol=atol)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


# Activations ----------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": (ops.gelu, lambda f: f.gelu),
    "gelu, tanh": (lambda x: ops.gelu(x, approximate=True), lambda f: lambda x: f.gelu(x, approximate="tanh")),
    "silu": (ops.silu, lambda f: f.silu),
    "leaky_relu": (ops.leaky_relu, lambda f: f.leaky_relu),
    "leaky_relu, 0.3": (lambda x: ops.leaky_relu(x, 0.3), lambda f: lambda x: f.leaky_relu(x, 0.3)),
    "elu": (ops.elu, lambda f: f.elu),
    "elu, 0.5": (lambda x: ops.elu(x, 0.5), lambda f: lambda x: f.elu(x, 0.5)),
    "selu": (ops.selu, lambda f: f.selu),
    "mish": (ops.mish, lambda f: f.mish),
    "hard_swish": (ops.hard_swish, lambda f: f.hardswish),
    "softsign": (ops.softsign, lambda f: f.softsign),
    "log_sigmoid": (ops.log_sigmoid, lambda f: f.logsigmoid),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(torch, name):
    ours, theirs = ACTIVATIONS[name]
    x = np.concatenate([np.linspace(-6, 6, 25) + 0.01, [-200, -30, -1e-9, 0.0, 1e-9, 30, 200]])
    if name == "hard_swish":
        x = x + 0.001  # their gradient at -3 and 3 is another of the kink's
    if name == "softsign":
        x = x[x != 0]  # as theirs at 0
    compare(torch, ours, theirs(torch.nn.functional), x, atol=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_special_values(torch, name):
    ours, theirs = ACTIVATIONS[name]
    x = np.array([np.nan, -700.0, 700.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (np.float64, np.float32):
            found = ours(x.astype(dtype)).numpy()
            assert found.dtype == dtype
            np.testing.assert_allclose(
                found, theirs(torch.nn.functional)(torch.tensor(x.astype(dtype))).numpy(), rtol=1e-6, atol=1e-30
            )


def test_a_slope_is_a_parameter(torch):
    x, slope = normal(4, 3), np.array([0.25, 0.5, 2.0])
    compare(torch, ops.leaky_relu, torch.nn.functional.prelu, x, slope)


# Normalisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "last"), [((5, 4), 1), ((3, 2, 4), 2), ((2, 3, 4), 3), ((4,), 1), ((3, 1), 1)])
def test_layer_norm(torch, shape, last):
    lengths = shape[len(shape) - last :]
    axis = tuple(range(-last, 0))
    compare(
        torch,
        lambda x, w, b: ops.layer_norm(x, w, b, axis=axis),
        lambda x, w, b: torch.nn.functional.layer_norm(x, lengths, w, b),
        normal(*shape),
        normal(*lengths),
        normal(*lengths),
    )


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 2), (2, 3, 4, 2), (3, 2, 2, 2, 2)])
def test_batch_norm_and_group_norm(torch, shape):
    f, c = torch.nn.functional, shape[1]
    x, w, b, mean, variance = normal(*shape), normal(c), normal(c), normal(c), np.random.default_rng(2).random(c) + 0.5
    compare(torch, ops.batch_norm, lambda x, w, b: f.batch_norm(x, None, None, w, b, True), x, w, b)
    running = ops.batch_norm(x, w, b, mean, variance).numpy()
    theirs = f.batch_norm(*map(torch.tensor, (x, mean, variance, w, b)), False).numpy()
    np.testing.assert_allclose(running, theirs, rtol=1e-12, atol=1e-13)
    if len(shape) > 2:
        for groups in (1, c):
            compare(
                torch,
                lambda x, w, b, n=groups: ops.group_norm(x, n, w, b),
                lambda x, w, b, n=groups: f.group_norm(x, n, w, b),
                *(x, w, b),
            )


def test_normalisation_of_equal_and_of_large_numbers(torch):
    for x in (np.full((2, 3), 7.0), 1e8 + normal(2, 5), 1e-8 * normal(2, 5)):
        compare(
            torch, ops.layer_norm, lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), x, rtol=1e-6, atol=1e-6
        )


def test_second_derivatives_of_normalisation(torch):
    x, w = normal(3, 4), normal(3, 4, seed=2)
    ours = pe.compile(pe.grad(lambda x: ops.sum(w * pe.grad(lambda x: ops.sum(ops.layer_norm(x) ** 3))(x))))(x)
    at = torch.tensor(x, requires_grad=True)
    (first,) = torch.autograd.grad((torch.nn.functional.layer_norm(at, (4,)) ** 3).sum(), at, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.tensor(w)).sum(), at)
    np.testing.assert_allclose(ours, second.numpy(), rtol=1e-9, atol=1e-11)


# Attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_attention(torch, batch, causal):
    theirs = torch.nn.functional.scaled_dot_product_attention
    q, k, v = normal(*batch, 4, 3), normal(*batch, 4, 3, seed=2), normal(*batch, 4, 2, seed=3)
    compare(
        torch,
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, causal=causal),
        lambda q, k, v: theirs(q, k, v, is_causal=causal),
        *(q, k, v),
    )
    seen = np.random.default_rng(4).random((4, 4)) < 0.7
    seen[:, 0] = True
    compare(
        torch,
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, seen, causal, scale=0.4),
        lambda q, k, v: theirs(q, k, v, torch.tensor(seen & np.tri(4, dtype=bool) if causal else seen), scale=0.4),
        *(q, k, v),
    )
    compare(
        torch,
        lambda q, k, v, m: ops.scaled_dot_product_attention(q, k, v, m),
        lambda q, k, v, m: theirs(q, k, v, m),
        *(q, k, v, normal(4, 4, seed=4)),
    )


def test_what_sees_nothing_is_zero_and_has_zero_gradients():
    q, k, v = normal(2, 3), normal(4, 3, seed=2), normal(4, 2, seed=3)
    mask = np.array([[True, False, False, True], [False] * 4])

    def attend(q, k, v):
        return ops.scaled_dot_product_attention(q, k, v, mask)

    np.testing.assert_array_equal(attend(q, k, v).numpy()[1], 0)
    found = pe.grad(lambda *x: ops.sum(attend(*x)), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in found)
    np.testing.assert_array_equal(found[0][1], 0)
    large = ops.scaled_dot_product_attention(*(np.float32(1e18 * x) for x in (q, k, v)), causal=True).numpy()
    assert np.isfinite(large).all() and large.dtype == np.float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, np.ones((2, 0), bool), np.zeros((2, 1))])
def test_attention_to_no_keys_is_zero(causal, mask):
    q, k, v = normal(3, 2, 4), np.zeros((3, 0, 4)), np.zeros((3, 0, 5))

    def attend(q, k, v):
        return ops.scaled_dot_product_attention(q, k, v, mask, causal)

    np.testing.assert_array_equal(attend(q, k, v).numpy(), np.zeros((3, 2, 5)))
    np.testing.assert_array_equal(pe.compile(attend)(q, k, v), np.zeros((3, 2, 5)))
    found = pe.grad(lambda *x: ops.sum(attend(*x)), (0, 1, 2))(q, k, v)
    assert [g.shape for g in found] == [x.shape for x in (q, k, v)] and not found[0].any()


def test_attention_to_nan_is_nan_with_a_mask_or_without() -> None:
    q, k, v = np.array([[np.nan, 1.0], [1.0, 1.0]]), np.ones((2, 2)), np.ones((2, 2))
    for mask in (None, np.ones((2, 2), bool), np.zeros((2, 2))):
        found = ops.scaled_dot_product_attention(q, k, v, mask).numpy()
        assert np.isnan(found[0]).all() and (found[1] == 1).all()


# Interpolation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "size"), [
    ((2, 3, 5), (8,)), ((1, 2, 8), (3,)), ((1, 1, 1), (4,)), ((1, 2, 4, 6), (7, 3)), ((2, 1, 3, 3), (1, 6)),
    ((1, 1, 2, 3, 4), (4, 2, 7)),
])  # fmt: skip
def test_interpolation(torch, shape, size):
    f, x = torch.nn.functional, normal(*shape)
    compare(torch, lambda x: ops.interpolate(x, size), lambda x: f.interpolate(x, size), x)
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    for corners in (False, True):
        compare(
            torch,
            lambda x, corners=corners: ops.interpolate(x, size, "linear", corners),
            lambda x, corners=corners: f.interpolate(x, size, mode=mode, align_corners=corners),
            x,
        )


# Convolutions and pools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2, 3])
@given(data=st.data())
def test_transposed_convolution(torch, axes, data):
    draw = data.draw
    groups = draw(st.integers(1, 2))
    stride, dilation, kernel, length = (
        tuple(draw(st.integers(1, 3)) for _ in range(axes)) for _ in range(4)
    )  # fmt: skip
    more = tuple(draw(st.integers(0, s - 1)) for s in stride)
    most = [(n - 1) * s + d * (k - 1) + m for n, s, d, k, m in zip(length, stride, dilation, kernel, more, strict=True)]
    padding = tuple(draw(st.integers(0, min(n // 2, 2))) for n in most)
    x, weight = (
        normal(draw(st.integers(1, 2)), 2 * groups, *length),
        normal(2 * groups, draw(st.integers(1, 2)), *kernel),
    )
    theirs = getattr(torch.nn.functional, f"conv_transpose{axes}d")
    compare(
        torch,
        lambda x, w: ops.conv_transpose(x, w, stride, padding, more, dilation, groups),
        lambda x, w: theirs(x, w, None, stride, padding, more, groups, dilation),
        *(x, weight),
    )


@given(data=st.data())
def test_convolution_over_three_axes(torch, data):
    draw = data.draw
    groups, axes = draw(st.integers(1, 2)), 3
    stride, dilation, kernel = (tuple(draw(st.integers(1, 2)) for _ in range(axes)) for _ in range(3))
    padding = tuple(draw(st.integers(0, 1)) for _ in range(axes))
    lengths = tuple(d * (k - 1) + 1 + draw(st.integers(0, 3)) for k, d in zip(kernel, dilation, strict=True))
    compare(
        torch,
        lambda x, w: ops.conv(x, w, stride, padding, dilation, groups),
        lambda x, w: torch.nn.functional.conv3d(x, w, None, stride, padding, dilation, groups),
        *(normal(draw(st.integers(1, 2)), 2 * groups, *lengths), normal(2 * groups, 2, *kernel)),
    )


@pytest.mark.parametrize("axes", [1, 2, 3])
@given(data=st.data())
def test_pools_with_dilation_ceil_mode_and_excluded_padding(torch, axes, data):
    draw = data.draw
    window = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    padding = tuple(draw(st.integers(0, k // 2)) for k in window)
    ceil, counts = draw(st.booleans()), draw(st.booleans())
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    shape = (draw(st.integers(1, 2)), 2, *(max(r, 2) + draw(st.integers(0, 4)) for r in reach))
    x = np.random.default_rng(3).permutation(int(np.prod(shape))).reshape(shape).astype(float)
    f = torch.nn.functional
    compare(
        torch,
        lambda x: ops.max_pool(x, window, stride, padding, dilation, ceil),
        lambda x: getattr(f, f"max_pool{axes}d")(x, window, stride, padding, dilation, ceil),
        x,
    )
    compare(
        torch,
        lambda x: ops.avg_pool(x, window, stride, padding, ceil_mode=ceil, count_padding=counts),
        lambda x: getattr(f, f"avg_pool{axes}d")(x, window, stride, padding, ceil, counts),
        x,
    )


def test_a_pool_with_dilation_is_not_fused_as_one_without():
    rng = np.random.default_rng(1)
    x, w, b = rng.standard_normal((2, 1, 12)), rng.standard_normal((3, 1, 3)), rng.standard_normal((3, 1))

    def network(x, w, b):
        return ops.sum(ops.max_pool(ops.relu(ops.conv(x, w) + b), 2, 2, dilation=2) ** 2)

    function = pe.value_and_grad(network, (0, 1, 2))
    value, found = function(x, w, b)
    again, taped = pe.compile(function)(x, w, b)
    np.testing.assert_allclose(again, value)
    for a, b in zip(taped, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


# Losses ---------------------------------------------------------------------------------------------------

WEIGHTS = [None, np.array([0.5, 2.0, 1.5])]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [None, 1, -100])
@pytest.mark.parametrize("weight", WEIGHTS, ids=["plain", "weights"])
def test_softmax_cross_entropy(torch, weight, ignored, smoothing, reduction):
    x, labels = normal(6, 3), np.array([0, 2, 1, 1, 0, 2])
    if ignored == -100:
        labels[[1, 4]] = ignored
    compare(
        torch,
        lambda x: ops.softmax_cross_entropy(x, labels, weight, smoothing, ignored, reduction),
        lambda x: torch.nn.functional.cross_entropy(
            x, torch.tensor(labels), None if weight is None else torch.tensor(weight),
            ignore_index=-100 if ignored is None else ignored, reduction=reduction, label_smoothing=smoothing),
        x,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_binary_cross_entropy_and_mean_squared_error(torch, reduction):
    f, x, t = torch.nn.functional, normal(4, 3), np.random.default_rng(2).random((4, 3))
    weight, positive = np.array([0.5, 2.0, 1.0]), np.array([1.5, 1.0, 3.0])
    compare(
        torch,
        lambda x, t: ops.binary_cross_entropy(x, t, weight, positive, reduction),
        lambda x, t: f.binary_cross_entropy_with_logits(
            x, t, torch.tensor(weight), pos_weight=torch.tensor(positive), reduction=reduction
        ),
        *(x, t),
    )
    compare(
        torch,
        lambda p, t: ops.mean_squared_error(p, t, reduction=reduction),
        lambda p, t: f.mse_loss(p, t, reduction=reduction),
        *(x, t),
    )
    found = ops.mean_squared_error(x, t, weight, reduction).numpy()
    expected = weight * (x - t) ** 2
    np.testing.assert_allclose(found, {"mean": np.mean, "sum": np.sum, "none": lambda e: e}[reduction](expected))


def test_an_infinite_logit_counts_only_where_it_is_the_label():
    x = np.array([[1.0, -np.inf, 0.5], [np.nan, np.nan, np.nan]])
    value, found = pe.value_and_grad(lambda x: ops.softmax_cross_entropy(x, [0, 9], np.ones(3), ignored=9))(x)
    assert np.isfinite(value) and np.isfinite(found[0]).all()


# What is refused ------------------------------------------------------------------------------------------

X = np.zeros((2, 4, 6))
REFUSED = {
    "conv_transpose: output_padding must be less than the stride": lambda: ops.conv_transpose(
        X, np.zeros((4, 1, 3)), output_padding=1),
    "conv_transpose: nothing is left of the result, whose lengths would be \\(-4,\\)": lambda: ops.conv_transpose(
        X, np.zeros((4, 1, 3)), padding=6),
    "conv_transpose: expected x \\(N, F": lambda: ops.conv_transpose(X, np.zeros((3, 1, 3))),
    "max_pool.*padding alone along spatial axis 0": lambda: ops.max_pool(np.zeros((1, 1, 1)), 2, padding=1, dilation=2),
    "layer_norm: expected the last axes, got 0 of 3": lambda: ops.layer_norm(X, axis=0),
    "layer_norm: expected a weight of shape \\(6,\\), got \\(4,\\)": lambda: ops.layer_norm(X, np.ones(4)),
    "batch_norm: mean and variance are given together": lambda: ops.batch_norm(X, mean=np.zeros(4)),
    "batch_norm: expected a mean of shape \\(4,\\), got \\(1,\\)": lambda: ops.batch_norm(
        X, mean=np.zeros(1), variance=np.ones(4)),
    "batch_norm: expected a variance of shape \\(4,\\), got \\(1,\\)": lambda: ops.batch_norm(
        X, np.ones(4), mean=np.zeros(4), variance=np.ones(1)),
    "batch_norm: expected a bias of shape \\(4,\\)": lambda: ops.batch_norm(X, bias=np.zeros(6)),
    "group_norm: the channels of shape \\(2, 4, 6\\) cannot be divided into 3 groups": lambda: ops.group_norm(X, 3),
    "scaled_dot_product_attention: expected a query": lambda: ops.scaled_dot_product_attention(X, X[..., 1:], X),
    "interpolate: expected x \\(N, C, \\*lengths\\)": lambda: ops.interpolate(np.zeros((2, 3)), 4),
    "interpolate: size must be at least 1": lambda: ops.interpolate(X, 0),
    "softmax_cross_entropy: expected weights \\(6,\\)": lambda: ops.softmax_cross_entropy(X[0], [0] * 4, np.ones(4)),
    "one_hot: classes must be at least 1": lambda: ops.one_hot([0], 0),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_named(message):
    with pytest.raises(ShapeError, match=message):
        REFUSED[message]()


def test_unknown_words_are_named():
    for call in (
        lambda: ops.interpolate(X, 3, "cubic"),
        lambda: ops.interpolate(X, 3, align_corners=True),
        lambda: ops.softmax_cross_entropy(X[0], [0] * 4, reduction="median"),
        lambda: ops.binary_cross_entropy(X, X, reduction="median"),
        lambda: ops.softmax_cross_entropy(X[0], [0] * 4, label_smoothing=1.5),
    ):
        with pytest.raises(ConfigurationError, match=r"(interpolate|entropy): "):
            call()
    with pytest.raises(DTypeError, match="one_hot: expected integer labels, got float64"):
        ops.one_hot(np.zeros(3), 3)


def test_labels_out_of_range_are_named_eagerly_and_in_replays():
    def loss(x, labels):
        return ops.softmax_cross_entropy(x, labels, label_smoothing=0.1, ignored=7)

    compiled, x = pe.compile(loss), normal(3, 2)
    compiled(x, np.array([0, 1, 7]))
    for call, bad in itertools.product((compiled, loss), (-1, 2)):
        with pytest.raises(LabelError, match=rf"label {bad} in row 1 is not one of the 2 classes 0..1, nor 7, which"):
            call(x, np.array([0, bad, 7]))


def test_a_mask_of_numbers_and_causality_hide_together():
    """A key that is hidden by both is hidden, whatever number the mask has for it; a query without keys has 0."""
    q = k = np.ones((3, 2))
    v = np.arange(6.0).reshape(3, 2)
    for lowest in (-np.inf, np.finfo(float).min):
        mask = np.zeros((3, 3))
        mask[0, 0] = lowest
        causal = partial(ops.scaled_dot_product_attention, causal=True)
        for attend in (causal, pe.compile(causal)):
            found = np.asarray(attend(q, k, v, mask))
            np.testing.assert_allclose(found[0], v[0] if np.isfinite(lowest) else [0, 0])
            np.testing.assert_allclose(found[1:], [v[:2].mean(0), v.mean(0)])
    mask[0] = -np.inf
    for grad in (pe.grad, lambda f: pe.compile(pe.grad(f))):
        slope = grad(lambda q: np.sum(ops.scaled_dot_product_attention(q, k * v[:, :1], v, mask) ** 2))(q)
        assert np.isfinite(slope).all() and not slope[0].any() and slope[1:].any()
    with pytest.raises(ShapeError, match=r"the mask must broadcast to \(..., L, S\), \(3, 3\), got shape \(4, 3\)"):
        ops.scaled_dot_product_attention(q, k, v, np.ones((4, 3)))


@pytest.mark.parametrize("pool", [ops.max_pool, ops.avg_pool])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_window_on_padding_alone_of_an_empty_axis_is_refused(pool, axes):
    with pytest.raises(ShapeError, match="a window would lie on padding alone along spatial axis 0"):
        pool(np.zeros((1, 1, 0, *[3] * (axes - 1))), 2, padding=1)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("pool", [ops.max_pool, ops.avg_pool])
def test_a_window_longer_than_the_padded_input_is_refused(pool, ceil_mode):
    for settings in ({"window": 4}, {"window": (1, 4), "stride": 3}, {"window": (2, 2), "dilation": (1, 3)}):
        with pytest.raises(ShapeError, match="does not fit an input of length 3"):
            pool(np.zeros((1, 1, 3, 3)), ceil_mode=ceil_mode, **settings)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_slope_of_elu_is_exact_where_its_value_is_near_its_limit(dtype):
    x = np.array([-80.0, -36.0, -10.0, -1.0, 0.0, 1.0, 80.0], dtype)
    expected = np.where(x > 0, 1, np.exp(x.astype(float)))
    for grad in (pe.grad, lambda f: pe.compile(pe.grad(f))):
        np.testing.assert_allclose(grad(lambda x: np.sum(ops.elu(x)))(x), expected, rtol=1e-6)
    np.testing.assert_allclose(pe.jvp(lambda x: ops.elu(x, 2.0), (x,), (np.ones_like(x),))[1], np.where(
        x > 0, 1, 2 * expected), rtol=1e-6)  # fmt: skip


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: ops.scaled_dot_product_attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), causal="no"),
            "causal",
        ),
        (lambda: ops.max_pool(np.ones((1, 1, 5)), 2, ceil_mode="no"), "ceil_mode"),
        (
            lambda: ops.softmax_cross_entropy(np.ones((2, 3)), np.array([0, 1]), ignored=1.5),
            "ignored must be an integer",
        ),
        (
            lambda: ops.softmax_cross_entropy(np.ones((2, 3)), np.array([0, 1]), ignored=True),
            "ignored must be an integer",
        ),
        (lambda: ops.softmax_cross_entropy(np.ones((2, 3)), np.array([0, 1]), label_smoothing="x"), "label_smoothing"),
        (lambda: ops.binary_cross_entropy(np.ones(5), np.ones(5), weight=np.ones((3, 5))), "weight must broadcast"),
        (lambda: ops.mean_squared_error(np.ones(5), np.ones(5), weight=np.ones(4)), "weight must broadcast"),
    ],
)
def test_settings_of_another_kind_are_refused_by_name(call, said):
    with pytest.raises(EngineError, match=said):
        call()
