"""LSTM and GRU as one op each: equal to the single ops that define them, in all derivatives, batches and layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.compile.tape import Tape
from py_engine.ad.op import as_tensors
from py_engine.ad.program import trace
from py_engine.network import LSTM, recurrence
from py_engine.network.recurrence import BLOCK, Recurrence

KINDS = {"lstm": (recurrence.LSTM, 4), "gru": (recurrence.GRU, 3)}
# Steps, samples, units.
SIZES = [(1, 1, 1), (1, 3, 2), (2, 2, 3), (5, 3, 2), (5, 1, 3), (4, 0, 2)]


@pytest.fixture(params=[f"{kind}-{returns}" for kind in KINDS for returns in ("last", "all")])
def one(request) -> tuple[Recurrence, int, bool]:
    """A recurrence, how many gates it has, and whether it returns the last state alone."""
    kind, returns = request.param.split("-")
    return (*KINDS[kind], returns == "last")


def drawn(*shapes: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def operands(gates: int, size: tuple[int, int, int], dtype: Any = np.float64) -> list[np.ndarray]:
    steps, samples, units = size
    return drawn((steps, samples, gates * units), (units, gates * units), dtype=dtype)


def fused(one: Recurrence, last: bool, keep: bool, *given: Any) -> tuple[Tensor, ...]:
    return one.op.apply_several(as_tensors(given), {"last": last, "keep": keep})


def single(one: Recurrence, last: bool, keep: bool, *given: Any) -> list[Tensor]:
    return one.steps(*as_tensors(given), last, keep)


def same(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_results_are_those_of_the_single_ops(one, size):
    recurrence, gates, last = one
    given = operands(gates, size)
    ours, theirs = (compute(recurrence, last, True, *given) for compute in (fused, single))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        same(a.numpy(), b.numpy())
    (only,) = fused(recurrence, last, False, *given)
    np.testing.assert_array_equal(only.numpy(), ours[0].numpy())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_many_steps_in_blocks(one, dtype):
    """More than one block of the gates, and a last one that is not full; large and small numbers saturate."""
    recurrence, gates, last = one
    steps, samples, units = 21, 3, BLOCK // 8 // 3 // gates
    projected, recurrent = operands(gates, (steps, samples, units), dtype)
    projected[3:6] *= 100
    recurrent *= 1 / np.sqrt(units)
    weights = drawn((samples, units) if last else (steps, samples, units), dtype=dtype, seed=1)[0]
    found = []
    for compute in (fused, single):

        def loss(*given: Tensor, compute: Any = compute) -> Tensor:
            return ops.sum(compute(recurrence, last, compute is fused, *given)[0] * weights)

        found.append([loss(projected, recurrent), *pe.grad(loss, (0, 1))(projected, recurrent)])
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert ours.dtype == theirs.dtype == dtype
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=(2e-5 if dtype == np.float32 else 1e-12) * largest)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_block_may_have_any_steps(one, samples, monkeypatch):
    recurrence_of, gates, last = one
    given = operands(gates, (7, samples, 3))
    weights = drawn((samples, 3) if last else (7, samples, 3), seed=1)[0]

    def slopes(compute: Any) -> Any:
        def loss(*x: Tensor) -> Tensor:
            return ops.sum(compute(recurrence_of, last, True, *x)[0] * weights)

        return pe.grad(loss, (0, 1))(*given)

    expected = slopes(single)
    for steps in (1, 2, 3, 6, 7):
        monkeypatch.setattr(recurrence, "BLOCK", steps * 4 * samples * 3)
        for ours, theirs in zip(slopes(fused), expected, strict=True):
            same(ours, theirs)


@pytest.mark.parametrize("size", SIZES[:5])
def test_derivatives_are_those_of_the_single_ops(one, size):
    """First and second, of the result and of what is kept, forward and backward."""
    recurrence, gates, last = one
    given = operands(gates, size)
    weights = [np.asarray(x) for x in drawn(*(y.shape for y in fused(recurrence, last, True, *given)), seed=1)]
    tangents = drawn(*(x.shape for x in given), seed=2)

    def of_first(compute: Any) -> Any:
        return lambda *x: ops.sum(compute(recurrence, last, True, *x)[0] * weights[0])

    def of_all(compute: Any) -> Any:
        def loss(*x: Tensor) -> Tensor:
            results = compute(recurrence, last, True, *x)
            return sum((ops.sum(y * w) for y, w in zip(results, weights, strict=True)), ops.sum(x[0]) * 0)

        return loss

    def slope(compute: Any) -> Any:
        gradient = pe.grad(of_first(compute), (0, 1))
        return lambda *x: sum((ops.sum(ops.square(g)) for g in gradient(*x)), ops.sum(x[0]) * 0)

    for loss in (of_first, of_all, slope):
        for i in (0, 1):
            same(pe.grad(loss(fused), i)(*given), pe.grad(loss(single), i)(*given))
            same(pe.compile(pe.grad(loss(fused), i))(*given), pe.grad(loss(single), i)(*given))
    for compute in (of_first, slope):
        same(*(pe.jvp(compute(of), tuple(given), tuple(tangents))[1] for of in (fused, single)))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_batches_are_those_of_the_single_ops(one, mapped):
    recurrence, gates, last = one
    shapes = [x.shape for x in operands(gates, (3, 2, 2))]
    given = drawn(*((4, *shape) if axis == 0 else shape for shape, axis in zip(shapes, mapped, strict=True)))
    (weights,) = drawn((2, 2) if last else (3, 2, 2), seed=1)

    def loss(compute: Any) -> Any:
        return lambda *x: ops.sum(compute(recurrence, last, True, *x)[0] * weights)

    for i in (0, 1):
        same(*(pe.vmap(pe.grad(loss(compute), i), in_axes=mapped)(*given) for compute in (fused, single)))
    same(*(pe.vmap(loss(compute), in_axes=mapped)(*given) for compute in (fused, single)))


def test_gradients_by_finite_differences(one):
    recurrence, gates, last = one
    given = operands(gates, (4, 2, 3))
    pe.gradcheck(lambda *x: fused(recurrence, last, True, *x)[0], *given)


def tape_of(function: Any, *given: np.ndarray) -> Tape:
    return Tape(trace(function, [Tensor.symbol(x.shape, x.dtype) for x in given]))


def test_a_tape_relies_on_no_memory_of_its_own(one):
    recurrence, gates, last = one
    given = operands(gates, (6, 2, 3))
    gradient = pe.grad(lambda *x: ops.sum(ops.square(fused(recurrence, last, True, *x)[0])), (0, 1))
    tape = tape_of(gradient, *given)
    found = []
    for byte in (0, 0xFF):
        tape.poison(byte)
        found.append([y.copy() for y in tape(*given)])
    for ours, again, theirs in zip(*found, gradient(*given), strict=True):
        np.testing.assert_array_equal(ours, again)
        same(ours, theirs)


def test_nothing_is_kept_where_there_is_no_gradient():
    """In a compiled function: the gates of all steps are not among what it holds."""
    shapes = {"weight": (8, 256), "recurrent": (64, 256), "bias": (256,)}
    layer, parameters = LSTM(8, 64, "last"), dict(zip(shapes, map(Tensor, drawn(*shapes.values())), strict=True))
    (x,) = drawn((2, 100, 8))
    projected = 8 * 2 * 100 * 256
    tape = tape_of(lambda x: [layer(x, parameters)], x)
    same(tape(x)[0], layer(Tensor(x), parameters).numpy())
    assert tape.nbytes < 3 * projected
