"""Fusion: the rewritten graph gives the values and gradients of the one it replaces, and leaves alone what it must."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import py_engine as pe
from py_engine import Techniques, ops
from py_engine.ad.compile import fusion
from py_engine.ad.compile.tape import Tape, distinct_bytes
from py_engine.ad.ops.reduction import LEAST_DOT, ends_of
from py_engine.ad.program import traced, tracing
from py_engine.ad.reverse import gradients
from py_engine.ad.tensor import Literal, Tensor
from py_engine.network import (
    SGD,
    Activation,
    Chain,
    Conv1D,
    Conv2D,
    Dense,
    Embedding,
    Flatten,
    MaxPool1D,
    MaxPool2D,
    PermuteDims,
    Reshape,
    Trainer,
)

pytestmark = pytest.mark.usefixtures("copied_as_if_large")


def compiled(function, arrays, fused):
    """Value and gradients by all inputs, of a function compiled with or without fusion, and the ops it came to."""
    inputs = [Tensor.symbol(a.shape, a.dtype) for a in arrays]
    with tracing() as nodes:
        value = function(*inputs)
        found = gradients([value], [Literal(np.ones(()))], inputs)
    program = traced(nodes, inputs, [value, *(g for g in found if g is not None)])
    tape = Tape(program, techniques=replace(Techniques(), fuse=fused))
    first = [np.array(a) for a in tape(*arrays)]
    tape.poison(0xFF)
    for again, a in zip(tape(*arrays), first, strict=True):
        np.testing.assert_array_equal(again, a)
    return first, {step.equation.op.name for step in tape.steps}


@st.composite
def networks(draw):
    """Shapes of x and the weight, and settings of convolution and pool."""
    axes = draw(st.integers(1, 2))
    kernel, window = (tuple(draw(st.integers(1, 3)) for _ in range(axes)) for _ in range(2))
    stride = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    padding = tuple((draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in range(axes))
    lengths = tuple(k + w - 1 + draw(st.integers(0, 5)) for k, w in zip(kernel, window, strict=True))
    if draw(st.booleans()):  # the kernel covers the last axis whole
        lengths, window, padding = (
            (*head[:-1], last) for head, last in ((lengths, kernel[-1]), (window, 1), (padding, (0, 0)))
        )
    channels, filters = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    x = (draw(st.integers(1, 3)), channels, *lengths)
    last = draw(st.booleans())
    return x, (filters, channels, *kernel), (window, stride, padding), draw(st.booleans()), draw(st.booleans()), last


@given(network=networks(), whole=st.booleans(), way=st.integers(0, 2), seed=st.integers(0, 99))
def test_equals_what_it_replaces(network, whole, way, seed):
    """In every way that there is, whatever its work.

    With whole numbers too, where results are exact and many of them equal: the first one still gets the gradient.
    """
    x_shape, weight_shape, (window, stride, padding), bias, relu, channels_last = network
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(x_shape), rng.standard_normal(weight_shape), rng.standard_normal(weight_shape[0])]
    if whole:
        arrays = [np.sign(np.round(a)) for a in arrays]
    if channels_last:
        arrays[0] = np.ascontiguousarray(np.moveaxis(arrays[0], 1, -1))

    def function(x, weight, shift):
        y = ops.conv(ops.moveaxis(x, -1, 1) if channels_last else x, weight, padding=padding)
        if bias:
            y = y + ops.reshape(shift, (-1, *(1,) * len(window)))
        if relu:
            y = ops.relu(y)
        y = ops.max_pool(y, window, stride)
        weights = np.random.default_rng(5).integers(1, 9, y.shape).astype(np.float64)
        return ops.sum(weights * y) + (0 if bias else ops.sum(shift))

    plain, _ = compiled(function, arrays, fused=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "_lowering", lambda chain: (all_ := fusion._lowerings(chain))[way % len(all_)][1])
        fused, _ = compiled(function, arrays, fused=True)
    for found, expected in zip(fused, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def names(function, *shapes):
    return compiled(function, [np.random.default_rng(1).standard_normal(s) for s in shapes], fused=True)[1]


def test_small_windows_take_wide_kernels_and_long_ones_sliding_kernels():
    small = names(lambda x, w: ops.sum(ops.max_pool(ops.conv(x, w), 2)), (2, 1, 6, 6), (3, 1, 3, 3))
    assert "columns" in small and "columns_gradient" in small and not {"conv", "max_pool"} & small
    long = names(lambda x, w: ops.sum(ops.max_pool(ops.conv(x, w), 8)), (2, 40, 18), (3, 40, 3))
    assert "sliding_phases" in long and not {"conv", "max_pool"} & long


def test_an_axis_that_the_kernel_covers_whole_is_as_good_as_channels():
    text = names(lambda x, w: ops.sum(ops.max_pool(ops.conv(x, w), (8, 1))), (2, 1, 18, 40), (3, 1, 3, 40))
    assert "sliding_phases" in text and not {"conv", "max_pool"} & text


def test_what_fusion_makes_more_work_stays_as_it_is():
    long = names(lambda x, w: ops.sum(ops.max_pool(ops.conv(x, w, padding=1), 8)), (2, 40, 18), (30, 40, 3))
    assert {"conv", "max_pool"} <= long


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ops.sum(ops.max_pool(ops.conv(x, w, stride=2), 2)),
        lambda x, w: ops.sum(ops.max_pool(ops.conv(x, w, dilation=2), 2)),
        lambda x, w: ops.sum(ops.max_pool(ops.conv(x, w), 2, padding=1)),
        lambda x, w: ops.sum(ops.max_pool(ops.tanh(ops.conv(x, w)), 2)),
        lambda x, w: ops.sum(ops.avg_pool(ops.conv(x, w), 2)),
        lambda x, w: ops.sum(ops.max_pool(ops.relu(ops.conv(x, w) * 2), 2)),
        lambda x, w: (lambda y: ops.sum(ops.max_pool(y, 2)) + ops.sum(y))(ops.conv(x, w)),
        lambda x, w: (lambda y: ops.sum(ops.max_pool(y, 2)) + ops.sum(y))(ops.relu(ops.conv(x, w))),
    ],
)
def test_leaves_alone_what_it_must(function):
    assert "conv" in names(function, (2, 2, 9), (3, 2, 3))


def images():
    layers = [Conv2D(1, 3, 3), Activation("relu"), MaxPool2D(2), Conv2D(3, 2, 2, bias=False), MaxPool2D(2)]
    return Chain(*layers, Flatten(), Dense(8, 4), dtype=np.float64)


def texts():
    words = Embedding(11, 40, padding_index=0)
    layers = [words, PermuteDims(1, 0), Conv1D(40, 3, 3), Activation("relu"), MaxPool1D(8)]
    return Chain(*layers, Flatten(), Dense(6, 4), dtype=np.float64)


def texts_as_images():
    layers = [Embedding(11, 40), Reshape(1, 20, 40), Conv2D(1, 3, (3, 40)), MaxPool2D((8, 1))]
    return Chain(*layers, Flatten(), Dense(6, 4), dtype=np.float64)


@pytest.mark.parametrize("make", [images, texts, texts_as_images])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_switching_it_off_changes_no_result(make, threads, rng):
    x = rng.standard_normal((23, 1, 14, 14)) if make is images else rng.integers(0, 11, (23, 20))
    if make is texts:
        x[:12, 3:] = 0  # equal words: many elements of a window are the largest
    y = rng.integers(0, 4, 23)
    results = []
    for switch in (True, False):
        chain = make()
        techniques = replace(Techniques(split_batch=threads > 1), fuse=switch)
        trainer = Trainer(chain, optimizer=SGD(0.1), batch_size=10, threads=threads, techniques=techniques)
        losses = np.concatenate([trainer.train_epoch(x, y) for _ in range(3)])
        assert ("phase_max" in trainer.source) == switch
        assert ("word_sums" in trainer.source) == (switch and make is not images)
        evaluated = trainer.evaluate(x, y)
        measured = [evaluated.loss, evaluated.accuracy, trainer.predict(x)]
        results.append([losses, *measured, *chain.parameters.as_dict().values()])
        trainer.close()
    for on, off in zip(*results, strict=True):
        np.testing.assert_allclose(on, off, rtol=1e-9, atol=1e-12)


def test_a_fused_op_costs_the_products_that_it_does(rng):
    x, y = rng.integers(0, 11, (10, 20)), rng.integers(0, 4, 10)
    trainer = Trainer(texts(), batch_size=10)
    trainer.train_epoch(x, y)
    flops = {cost.op: cost.flops for cost in trainer.costs() if cost.flops}
    product = 2 * 3 * 3 * 40  # of a filter at each of the kernel's places with a word's vector, for each filter
    assert flops["word_kernel_gradient"] == len(np.unique(x)) * product
    # Filters are repeated side by side, with zeros around, and what they see at the edges of a text is not used.
    assert x.size * product * 0.8 <= flops["word_phases"] <= x.size * product * 2
    trainer.close()
    trainer = Trainer(images(), batch_size=10)
    trainer.train_epoch(rng.standard_normal((10, 1, 14, 14)), y)
    products = {cost.op for cost in trainer.costs() if cost.flops >= 10_000}
    assert "matmul" in products and not products & {"columns", "columns_gradient"}
    trainer.close()


def test_bytes_that_are_seen_several_times_are_moved_once():
    x = np.zeros((6, 8))
    windows = np.lib.stride_tricks.sliding_window_view(x, 3, 1)
    for array, expected in (
        (x, x.nbytes),
        (x[:, ::2], x.nbytes // 2),
        (x[::-1], x.nbytes),
        (np.broadcast_to(x, (5, 6, 8)), x.nbytes),
        (windows, x.nbytes),
        (x[:0], 0),
        (x[0, 0, ...], x.itemsize),
    ):
        assert distinct_bytes(np.asarray(array)) == expected


@pytest.mark.parametrize("window", [fusion.LONGEST_WINDOW, fusion.LONGEST_WINDOW + 3])
def test_a_window_of_words_too_long_for_a_byte_is_fused_by_rows(window, rng):
    x, y = rng.integers(0, 11, (3, window + 2)), rng.integers(0, 3, 3)
    found = []
    for switch in (True, False):
        layers = [Embedding(11, 40), PermuteDims(1, 0), Conv1D(40, 3, 3), Activation("relu"), MaxPool1D(window)]
        trainer = Trainer(Chain(*layers, Flatten(), dtype=np.float64), techniques=replace(Techniques(), fuse=switch))
        found.append(trainer.loss_and_gradients(x, y)[1])
        assert ("word_sums" in trainer.source) == (switch and window <= fusion.LONGEST_WINDOW)
        assert ("sliding_phases" in trainer.source) == (switch and window > fusion.LONGEST_WINDOW)
    for name, g in found[0].items():
        np.testing.assert_allclose(g, found[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("other", [1.0, np.ones(6), np.ones((3, 1, 1))], ids=["number", "row", "filters"])
def test_whatever_stands_left_of_the_convolution_in_a_sum(rng, other):
    def function(x, weight):
        return ops.sum(ops.square(ops.max_pool(ops.relu(ops.add(other, ops.conv(x, weight))), 2)))

    arrays = [rng.standard_normal((2, 1, 8, 8)), rng.standard_normal((3, 1, 3, 3))]
    (plain, _), (fused, _) = (compiled(function, arrays, fused) for fused in (False, True))
    for a, b in zip(plain, fused, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def pooled(x, weight):
    return ops.sum(ops.square(ops.max_pool(ops.relu(ops.conv(x, weight)), 2)))


@pytest.mark.parametrize("fused", [True, False])
def test_compiled_functions_and_their_gradients_fuse_as_the_trainer_does(fused, rng):
    arrays = [rng.standard_normal((2, 1, 8, 8)), rng.standard_normal((3, 1, 3, 3))]
    for function in (pooled, pe.value_and_grad(pooled, (0, 1)), pe.grad(pooled, 1)):
        compiled_function = pe.compile(function, replace(Techniques(), fuse=fused))
        compiled_function(*arrays)
        names = {"phase_max", "columns"} if fused else {"max_pool", "conv"}
        assert all(f"= {name}(" in compiled_function.source for name in names)


@pytest.mark.parametrize("fused", [True, False])
def test_the_bodies_of_loops_fuse_with_the_techniques_of_the_tape_around_them(fused, rng):
    xs, weight = rng.standard_normal((4, 2, 1, 8, 8)), rng.standard_normal((3, 1, 3, 3))

    def total(weight):
        return pe.scan(lambda carry, x: (carry + pooled(x, weight), None), 0.0, xs)[0]

    for function in (total, pe.value_and_grad(total)):
        compiled_function = pe.compile(function, replace(Techniques(), fuse=fused))
        compiled_function(weight)
        ((tape, _),) = compiled_function.tapes.values()
        loops = [x.attrs["loop"] for x in tape.program.equations if x.op.name == "loop"]
        inner = [each for loop in loops for free in loop.tapes.free.values() for each in free]
        assert inner and all(("phase_max" in each.source) == fused for each in inner)


def test_a_long_kernel_under_a_long_pool_takes_no_memory_of_their_product(rng, monkeypatch):
    made = []
    monkeypatch.setattr(fusion, "_embedding", lambda *shapes: made.append(shapes))
    chain = Chain(Conv1D(1, 2, 300), MaxPool1D(200), Flatten(), Dense(6, 2), seed=0)
    x = rng.normal(size=(2, 1, 999)).astype(np.float32)
    out = Trainer(chain, batch_size=2, threads=1).predict(x)
    np.testing.assert_allclose(out, chain(x).numpy(), rtol=1e-4)
    assert not made


AXES = [axes for n in range(1, 5) for axes in itertools.combinations(range(4), n)]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 40), (1, 3, 1, 40), (3, 1, 40, 1), (2, 3, 0, 40)], ids=str)
def test_sums_of_products_over_any_axes(axes, shape, rng):
    """Alone, and beside what else reads the products; of numbers, of squares, and of what broadcasts."""
    a, b = rng.standard_normal(shape), rng.standard_normal(shape)
    row = rng.standard_normal((shape[1], 1, 1))

    def function(a, b):
        read = a * a
        sums = [a * b, ops.square(a - b), a * row, read]
        return sum(ops.sum(ops.sin(ops.sum(x, axes, keepdims=True))) for x in sums) + ops.sum(ops.exp(-read))

    (plain, before), (fused, after) = (compiled(function, [a, b], fused) for fused in (False, True))
    for one, other in zip(fused, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
    assert "sum_of_products" not in before
    ends = ends_of(shape, axes)
    is_long = a.size > 0 and ends is not None and ends[2] >= LEAST_DOT
    assert ("sum_of_products" in after) == is_long
