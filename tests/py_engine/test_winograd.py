"""Winograd's algorithm: exact in exact numbers, the same convolutions as by sums, and only where it may be."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.ops import blocks, convolution, winograd
from py_engine.ad.ops.convolution import CONV, CONV_INPUT_GRADIENT, CONV_WEIGHT_GRADIENT
from py_engine.ad.state import entering
from py_engine.ad.techniques import Techniques
from py_engine.errors import NonFiniteError
from py_engine.network import (
    SGD,
    Activation,
    BatchNorm,
    Chain,
    Conv1D,
    Conv2D,
    Dense,
    Flatten,
    Layer,
    MaxPool2D,
    Reshape,
    Trainer,
)

TOLERANCE = 2e-5
"""Of the results' root mean square: some ten times the largest error that was seen with few channels."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions are by Winograd's algorithm wherever they can be, however small."""
    monkeypatch.setattr(winograd, "work", lambda *_: -1)


def scratch(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def computed(op: Any, arrays: tuple[np.ndarray, ...], by_winograd: bool, out: Any = None, **at: Any) -> Any:
    """The op's result, in memory that was full of NaN."""
    shape, dtype = op.infer(*map(pe.Tensor, arrays), **at)
    out = scratch(shape, dtype) if out is None else out
    with entering(techniques=Techniques(winograd=by_winograd)):
        calls = op.bind(arrays, out, scratch, **at)
    for call in calls:
        call()
    return out


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32 and np.isfinite(found).all()
    scale = np.sqrt(np.mean(expected**2)) if expected.size else 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(scale, 1e-30))


# ---------------------------------------------------------------------------------------------------------------------
# The transforms


@pytest.mark.parametrize(
    ("points", "kernel"),
    [((), 1), *itertools.product((winograd.ONE_AXIS, winograd.TWO_AXES), range(2, winograd.LONGEST + 1))],
)
def test_a_tile_has_the_outputs_of_a_kernel(rng, points, kernel):
    size = len(points) + 1
    a, g, b = winograd.transforms(kernel, points)
    x, w = rng.integers(-9, 9, size).astype(float), rng.integers(-9, 9, kernel).astype(float)
    expected = np.correlate(x, w, "valid")
    np.testing.assert_allclose(a.T @ ((g @ w) * (b @ x)), expected, rtol=0, atol=1e-11)
    assert a.shape == (size, size - kernel + 1) and g.shape == (size, kernel) and b.shape == (size, size)


@pytest.mark.parametrize("points", [winograd.ONE_AXIS, winograd.TWO_AXES], ids=len)
def test_the_transform_of_the_input_is_exact_in_float32(points):
    _, _, b = winograd.transforms(3, points)
    np.testing.assert_array_equal(b, b.astype(np.float32))


@pytest.mark.parametrize("outputs", [1, 2, 4, 5, 16, 17, 35])
@pytest.mark.parametrize("before", [-2, 0, 1, 4, 20])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_segments_cover_an_axis(rng, outputs, before, kernel):
    """Padding and a cut at either end, tiles that are not full, several segments, some of them of padding alone."""
    for length in range(max(1, outputs - 7), outputs + 7):
        axis = winograd.Axis(length, outputs, before, kernel, winograd.TWO_AXES)
        x, w = rng.standard_normal(length), rng.standard_normal(kernel)
        places = np.arange(outputs)[:, None] - before + np.arange(kernel)
        inside = (places >= 0) & (places < length)
        expected = np.where(inside, x[places.clip(0, length - 1)], 0) @ w
        _, g, _ = winograd.transforms(kernel, winograd.TWO_AXES)
        found = []
        assert len(winograd.segments(axis)) == axis.segments
        for segment in winograd.segments(axis):
            tiles = len(segment.of_input) // axis.size
            assert 1 <= tiles <= axis.longest[0] <= winograd.MOST_TILES
            assert segment.of_input.shape[1] <= axis.longest[1] and len(segment.of_output) <= axis.longest[2]
            assert segment.outputs.start == sum(map(len, found))
            found.append(segment.of_output @ (np.repeat(g @ w, tiles) * (segment.of_input @ x[segment.inputs])))
            np.testing.assert_array_equal(segment.of_gradient, segment.of_output.T)
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# The three ops

CONVOLUTIONS: list[tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]] = [
    # Samples, channels, filters, lengths, kernel, padding.
    (3, 4, 5, (8, 8), (3, 3), ((1, 1), (1, 1))),
    (2, 3, 2, (16, 16), (3, 3), ((0, 0), (0, 0))),
    (2, 3, 4, (7, 33), (3, 3), ((2, 0), (0, 3))),
    (2, 1, 1, (3, 3), (3, 3), ((0, 0), (0, 0))),
    (1, 2, 3, (1, 1), (3, 3), ((1, 1), (1, 1))),
    (3, 2, 3, (14, 14), (5, 5), ((2, 2), (2, 2))),
    (2, 2, 3, (9, 8), (2, 4), ((1, 0), (0, 2))),
    (2, 2, 3, (5, 4), (3, 3), ((5, 5), (4, 6))),  # the gradient by the input cuts off
    (2, 2, 3, (5, 4), (3, 3), ((12, 11), (1, 30))),  # segments of padding alone
    (2, 2, 3, (5, 4), (1, 3), ((4, 0), (1, 1))),
    (2, 2, 3, (1, 4), (1, 3), ((0, 9), (1, 1))),
    (2, 2, 3, (2, 4), (3, 3), ((12, 0), (14, 0))),
    (2, 3, 4, (7, 9), (1, 5), ((0, 0), (2, 2))),
    (2, 3, 4, (19, 7), (5, 1), ((2, 2), (0, 0))),
    (3, 4, 5, (200,), (5,), ((0, 0),)),
    (3, 4, 5, (23,), (3,), ((1, 1),)),
    (2, 4, 5, (5,), (5,), ((0, 0),)),
    (2, 4, 5, (2,), (2,), ((3, 0),)),
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("block_bytes", [1, 2**21])
@pytest.mark.parametrize("at", CONVOLUTIONS, ids=str)
def test_convolutions_and_their_gradients_are_those_by_sums(rng, monkeypatch, at, block_bytes):
    """With other arrays in another order in memory, too, and in one block or one for each sample."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    samples, channels, filters, lengths, kernel, padding = at
    one = (1,) * len(lengths)
    settings = {"stride": one, "padding": padding, "dilation": one, "groups": 1}
    x = rng.standard_normal((samples, channels, *lengths))
    weight = rng.standard_normal((filters, channels, *kernel))
    g = rng.standard_normal(CONV.infer(pe.Tensor(x), pe.Tensor(weight), **settings)[0])
    for op, arrays, more in (
        (CONV, (x, weight), {}),
        (CONV_INPUT_GRADIENT, (g, weight), {"lengths": lengths}),
        (CONV_WEIGHT_GRADIENT, (g, x), {"kernel": kernel}),
    ):
        expected = computed(op, arrays, False, **settings, **more)
        single = tuple(array.astype(np.float32) for array in arrays)
        assert_close(computed(op, single, True, **settings, **more), expected)
        turned = tuple(np.asfortranarray(array) for array in single)
        into = np.full((*expected.shape, 2), np.nan, np.float32)[..., 0]
        assert_close(computed(op, turned, True, out=into, **settings, **more), expected)


@pytest.mark.usefixtures("always")
def test_it_is_used_only_where_it_may_be(rng, monkeypatch):
    used: list[str] = []
    for name in ("bind_convolution", "bind_weight_gradient"):
        plain = getattr(winograd, name)
        monkeypatch.setattr(
            winograd, name, lambda *args, plain=plain, name=name, **at: (used.append(name), plain(*args, **at))[1]
        )
    settings = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
    x, weight = (
        rng.standard_normal((2, 4, 8, 8)).astype(np.float32),
        rng.standard_normal((6, 4, 3, 3)).astype(np.float32),
    )

    def uses(by_winograd: bool = True, dtype: Any = np.float32, kernel: tuple[int, int] = (3, 3), **at: Any) -> bool:
        used.clear()
        given = np.resize(weight, (6, 4 // at.get("groups", 1), *kernel)).astype(dtype)
        computed(CONV, (x.astype(dtype), given), by_winograd, **{**settings, **at})
        return bool(used)

    assert uses() and uses(kernel=(5, 2)) and uses(kernel=(1, 3))
    assert not uses(by_winograd=False) and not uses(dtype=np.float64) and not uses(kernel=(1, 1))
    assert not uses(kernel=(6, 3)) and not uses(stride=(2, 1)) and not uses(dilation=(1, 2)) and not uses(groups=2)
    used.clear()
    pe.grad(lambda w: pe.ops.sum(pe.ops.conv(x, w)))(weight)
    pe.compile(pe.grad(lambda w: pe.ops.sum(pe.ops.conv(x, w))))(weight)
    pe.compile(lambda w: pe.ops.conv(x, w), Techniques())(weight)
    assert not used


def test_it_is_chosen_where_it_is_less_work():
    def chosen(samples: int, channels: int, filters: int, length: int, kernel: int = 3) -> bool:
        x, weight = (
            np.zeros(shape, np.float32)
            for shape in ((samples, channels, length, length), (filters, channels, kernel, kernel))
        )
        with entering(techniques=Techniques()):
            at = {"stride": (1, 1), "padding": ((1, 1),) * 2, "dilation": (1, 1), "groups": 1}
            outputs = (length + 3 - kernel,) * 2
            return convolution.conv_work(x, weight, outputs, **at) < convolution.conv_work(
                x.astype(np.float64), weight.astype(np.float64), outputs, **at
            )

    assert chosen(64, 32, 64, 16) and chosen(64, 64, 128, 8) and chosen(8, 64, 128, 8) and chosen(64, 24, 64, 14, 5)
    assert not chosen(64, 3, 32, 32) and not chosen(1, 64, 128, 8) and not chosen(64, 1, 6, 28, 5)
    assert not chosen(0, 32, 64, 16) and not chosen(64, 0, 64, 16) and not chosen(64, 32, 0, 16)


def test_the_work_grows_as_the_images_do():
    """Long axes are transformed in segments."""
    of = [winograd.work(8, 32, 64, winograd.axes_of((n, n), (n, n), (1, 1), (3, 3))) for n in (64, 128, 256)]
    assert all(3.9 < later / first < 4.3 for first, later in itertools.pairwise(of))
    counts, matrices = [], []
    for n in (64, 128, 1024):
        x, weight = np.empty((2, 4, n), np.float32), np.empty((4, 4, 3), np.float32)
        axes = winograd.axes_of((n,), (n,), (1,), (3,))
        assert axes is not None
        found = winograd.bind_convolution(x, weight, np.empty_like(x), axes, False, scratch)
        counts.append(len(found))
        matrices.append(len({id(segment.of_input) for segment in winograd.segments(axes[1])}))
    assert counts[2] < 17 * counts[0] and max(matrices) <= 4


# ---------------------------------------------------------------------------------------------------------------------
# Training


def images(dtype: Any) -> Chain:
    layers: list[Layer] = [
        Reshape(3, 16, 16), Conv2D(3, 8, 3, padding=1), Activation("relu"), MaxPool2D(2), Conv2D(8, 16, 3, padding=1),
        BatchNorm(16), Activation("relu"), Conv2D(16, 8, 5, padding=2), Activation("tanh"), Flatten(), Dense(8 * 64, 4),
    ]  # fmt: skip
    return Chain(*layers, seed=0, dtype=dtype)


def words(dtype: Any) -> Chain:
    layers = [Reshape(48, 16), Conv1D(48, 8, 5), Activation("relu"), Conv1D(8, 8, 3), Flatten(), Dense(80, 4)]
    return Chain(*layers, seed=0, dtype=dtype)


@pytest.fixture
def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((22, 3 * 16 * 16)).astype(np.float32), rng.integers(0, 4, 22)


def trained(chain: Chain, x: np.ndarray, y: np.ndarray, threads: int = 1, **techniques: Any) -> np.ndarray:
    how = Techniques(split_batch=threads > 1, **techniques)
    with contextlib.closing(
        Trainer(chain, batch_size=8, optimizer=SGD(0.05), threads=threads, techniques=how)
    ) as trainer:
        return np.concatenate([trainer.train_epoch(x, y) for _ in range(4)])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("make", [images, words])
def test_training_is_the_same_up_to_roundings(batch, make: Callable[[Any], Chain], threads: int) -> None:
    """Split over threads, too, and with a last batch of fewer samples."""
    x, y = batch
    exact = trained(make(np.float64), x.astype(np.float64), y, threads)
    on, off = (trained(make(np.float32), x, y, threads, winograd=by) for by in (True, False))
    assert not np.array_equal(on, off) and exact[-1] < 0.9 * exact[0]
    for losses in (on, off):
        np.testing.assert_allclose(losses, exact, rtol=2e-4)
    np.testing.assert_array_equal(exact, trained(make(np.float64), x.astype(np.float64), y, threads, winograd=False))


@pytest.mark.usefixtures("always")
def test_its_costs_are_the_products_that_it_computes(batch):
    found = []
    for on in (True, False):
        layers = [Reshape(48, 16), Conv1D(48, 96, 5), Flatten(), Dense(96 * 12, 4)]
        chain, how = Chain(*layers, seed=0), Techniques(winograd=on)
        with contextlib.closing(Trainer(chain, batch_size=8, threads=1, techniques=how)) as trainer:
            trainer.train_epoch(*batch)
            found.append(sum(cost.flops for cost in trainer.costs() if cost.op.startswith("conv")))
    assert 0 < found[0] < 0.8 * found[1]


@pytest.mark.usefixtures("always")
def test_predictions_are_by_sums(batch):
    """They are the same whether a step was by Winograd's algorithm or not."""
    x, _ = batch
    chain = images(np.float32)
    found = []
    for on in (True, False):
        with contextlib.closing(Trainer(chain, batch_size=8, threads=1, techniques=Techniques(winograd=on))) as trainer:
            found.append(trainer.predict(x))
    np.testing.assert_array_equal(*found)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("how", [{"preallocate": False}, {"batched": False}, {"fuse": False}, {"reuse_memory": False}])
def test_it_is_used_whatever_other_techniques_are_off(batch, monkeypatch, how):
    used = []
    for name in ("bind_convolution", "bind_weight_gradient"):
        plain = getattr(winograd, name)
        monkeypatch.setattr(
            winograd, name, lambda *a, plain=plain, name=name, **k: (used.append(name), plain(*a, **k))[1]
        )
    expected = trained(words(np.float32), *batch)
    assert {*used} == {"bind_convolution", "bind_weight_gradient"}
    used.clear()
    np.testing.assert_allclose(trained(words(np.float32), *batch, **how), expected, rtol=1e-4)
    assert {*used} == {"bind_convolution", "bind_weight_gradient"}


@pytest.mark.usefixtures("always")
def test_numbers_too_large_for_its_sums_are_an_error(batch):
    """Not NaN that is trained on."""
    x, y = batch
    x[3, 5:9] = 3e38
    with pytest.raises(NonFiniteError):
        trained(words(np.float32), x, y)
