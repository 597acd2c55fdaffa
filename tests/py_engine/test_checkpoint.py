"""Checkpoints: the same derivatives with less memory, eagerly and compiled."""

from __future__ import annotations

import gc
import tracemalloc
from collections import namedtuple

import numpy as np
import pytest

import py_engine as pe
from py_engine import ops
from py_engine.ad.compile.tape import Tape
from py_engine.ad.program import trace
from py_engine.ad.reverse import gradients
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, InPlaceError, TraceError
from py_engine.network import BatchNorm, Chain, Dense
from py_engine.network.layers import update

both = pytest.mark.parametrize("run", [lambda f: f, pe.compile], ids=["eager", "compiled"])

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 6))
X = 0.1 * RNG.standard_normal((50, 6))
Y = np.cos(X) + 0.5


def block(x):
    return np.tanh(np.sin(x @ WEIGHT) * 2) + x


def chain(block, depth=6):
    def f(x):
        for _ in range(depth):
            x = block(x)
        return np.sum(x * x)

    return f


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


# Derivatives ----------------------------------------------------------------------------------------------


@both
def test_gradients_are_the_same(run):
    close(run(pe.grad(chain(pe.checkpoint(block))))(X), pe.grad(chain(block))(X))


@both
def test_second_derivatives_are_the_same(run):
    def size(block):
        return lambda x: np.sum(pe.grad(chain(block, 3))(x) ** 2)

    close(run(pe.grad(size(pe.checkpoint(block))))(X), pe.grad(size(block))(X))


@both
def test_a_derivative_is_differentiated_by_what_it_took_for_fixed(run):
    product = pe.checkpoint(lambda x, y: x * y)

    def inner(x):
        return np.sum(pe.grad(lambda y: np.sum(np.sin(product(x, y))))(Y))

    close(run(pe.grad(inner))(X), np.cos(X * Y) - X * Y * np.sin(X * Y))
    close(run(lambda x: pe.jvp(inner, (x,), (x,))[1])(X), np.sum(X * np.cos(X * Y) - X * X * Y * np.sin(X * Y)))


@both
def test_forward_mode_goes_through(run):
    found = run(lambda x, v: pe.jvp(chain(pe.checkpoint(block)), (x,), (v,))[1])(X, X)
    close(found, pe.jvp(chain(block), (X,), (X,))[1])
    found = run(lambda x, v: pe.hvp(chain(pe.checkpoint(block)), x, v))(X, X)
    close(found, pe.hvp(chain(block), X, X))


@both
def test_forward_mode_goes_through_what_does_not_move(run):
    fixed = pe.checkpoint(lambda x: pe.stop_gradient(np.sin(x)))
    close(run(lambda x, v: pe.jvp(lambda x: x * fixed(x), (x,), (v,))[1])(X, X), X * np.sin(X))
    close(run(lambda x: pe.jvp(fixed, (x,), (x,))[1])(X), np.zeros_like(X))


@both
def test_checkpoints_may_be_nested(run):
    inner = pe.checkpoint(block)
    outer = pe.checkpoint(lambda x: inner(inner(x)))
    close(run(pe.grad(chain(outer, 3)))(X), pe.grad(chain(block, 6))(X))


@both
def test_containers_of_several_arrays_and_numbers(run):
    Pair = namedtuple("Pair", "first second")

    def inside(d):
        return {"a": d["x"] * 2, "b": Pair(np.sin(d["y"]), 3.0), "c": np.array(7)}

    def f(wrap, x, y):
        r = wrap(inside)({"x": x, "y": y})
        assert r["c"].dtype == np.int64
        return np.sum(r["a"] * r["b"].first * r["b"].second)

    x, y = RNG.standard_normal((2, 4))
    found = run(pe.grad(lambda x, y: f(pe.checkpoint, x, y), (0, 1)))(x, y)
    for a, b in zip(found, pe.grad(lambda x, y: f(lambda g: g, x, y), (0, 1))(x, y), strict=True):
        close(a, b)


@both
def test_what_a_function_returns_as_it_was_given_stays_what_it_is(run):
    constant = np.arange(3)

    def f(x):
        same, number, array, nothing = pe.checkpoint(lambda x: (x, 2.0, constant, None))(x)
        assert number == 2 and type(number) is float and array is constant and nothing is None
        return np.sum(same * number)

    gradient = run(pe.grad(f))(np.ones(3, np.float32))
    np.testing.assert_array_equal(gradient, np.full(3, 2, np.float32))


@both
def test_captured_tensors_have_their_gradients_too(run):
    assert run(pe.grad(lambda x: pe.checkpoint(lambda y: x * y)(2.0)))(3.0) == 2
    # One captured tensor computed from another: each has its own share.
    f = pe.grad(lambda x: (lambda w: pe.checkpoint(lambda: np.sin(w) * x)())(x * x))
    close(run(f)(0.7), pe.grad(lambda x: np.sin(x * x) * x)(0.7))


def test_backward_fills_the_leaves_that_were_captured():
    w = pe.tensor(WEIGHT, requires_grad=True)
    x = pe.tensor(X, requires_grad=True)
    np.sum(pe.checkpoint(lambda x: np.tanh(x @ w))(x)).backward()
    expected = pe.grad(lambda x, w: np.sum(np.tanh(x @ w)), (0, 1))(X, WEIGHT)
    close(x.grad, expected[0])
    close(w.grad, expected[1])


def test_eagerly_a_branch_may_depend_on_values_and_python_runs_once():
    calls = []

    @pe.checkpoint
    def f(x):
        calls.append(1)
        return np.sin(x) if x.item() > 0 else np.cos(x)

    close([pe.grad(f)(0.5), pe.grad(f)(-0.5)], [np.cos(0.5), np.sin(0.5)])
    assert len(calls) == 2


@both
def test_random_numbers_are_drawn_once(run):
    generator = np.random.default_rng(1)
    value, gradient = run(
        pe.value_and_grad(lambda x: np.sum(pe.checkpoint(lambda x: ops.dropout(x, 0.5, generator))(x)))
    )(np.ones(200))
    assert 0 < np.count_nonzero(gradient) < 200
    assert value == np.sum(gradient)


def test_outside_of_gradients_it_is_the_function_itself():
    f = pe.checkpoint(lambda x, scale=2.0: x * scale)
    with pe.no_grad():
        assert f(pe.tensor(3.0), scale=4.0).item() == 12
    assert pe.compile(lambda x: f(x))(3.0) == 6


# Memory ---------------------------------------------------------------------------------------------------


def size_of_plan(block):
    def step(x):
        value = chain(block, 12)(x)
        return [value, *gradients([value], [Tensor(np.ones(()))], [x])]

    return Tape(trace(step, [Tensor.symbol((2000, 6), np.float64)])).plan.size


def test_the_plan_of_a_compiled_gradient_gets_smaller():
    # Merged with the forward pass, the recomputation would cost time and save nothing.
    assert size_of_plan(pe.checkpoint(block)) < 0.65 * size_of_plan(block)


def peak(function, x):
    gc.collect()
    tracemalloc.start()
    try:
        function(x)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_eager_gradient_holds_less():
    x = np.ones((5000, 6))
    full = peak(pe.grad(chain(block, 12)), x)
    assert peak(pe.grad(chain(pe.checkpoint(block), 12)), x) < 0.65 * full


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigurationError, match="checkpoint: expected a function first, got ndarray"):
        pe.checkpoint(block(X))


# Random numbers that loops and branches draw -------------------------------------------------------------------------

RNG = np.random.default_rng(0)


DRAWING = {
    "scan": lambda: pe.scan(lambda c, _: (pe.ops.dropout(c, 0.5, RNG), None), np.ones(64), length=1)[0],
    "while": lambda: pe.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, pe.ops.dropout(c[1], 0.5, RNG)), (np.array(0), np.ones(64))
    )[1],
    "cond": lambda: pe.cond(np.array(True), lambda x: pe.ops.dropout(x, 0.5, RNG), lambda x: x, np.ones(64)),
    "scan in scan": lambda: pe.scan(
        lambda c, _: (c * pe.scan(lambda d, _: (pe.ops.dropout(d, 0.5, RNG), None), c, length=1)[0], None),
        np.ones(64),
        length=1,
    )[0],
}


@pytest.mark.parametrize("kind", DRAWING)
def test_what_a_loop_or_branch_draws_in_a_checkpoint_is_kept(kind):
    noise = DRAWING[kind]

    def both(x):
        y, back = pe.vjp(pe.checkpoint(lambda x: x * noise()), x)
        return y, back(np.ones(64))[0]

    for run in (both, pe.compile(both)):
        y, g = run(np.ones(64))
        np.testing.assert_array_equal(y, g)
        assert len(np.unique(np.asarray(y))) > 1, "some were dropped, others not"


def test_a_differentiated_loop_that_draws_is_refused_in_a_checkpoint():
    def loop(x):
        return pe.scan(lambda c, _: (pe.ops.dropout(c, 0.5, RNG), None), x, length=2)[0]

    with pytest.raises(TraceError, match="draws random numbers"):
        pe.grad(lambda x: pe.checkpoint(loop)(x).sum())(np.ones(8))


@pytest.mark.parametrize("kind", DRAWING)
def test_a_derivative_of_a_loop_in_which_another_one_draws_is_refused(kind):
    def loop(x):
        return pe.scan(lambda c, _: (c * DRAWING[kind](), None), x, length=1)[0]

    with pytest.raises(TraceError, match="draws random numbers"):
        pe.grad(lambda x: loop(x).sum())(np.ones(64))


@pytest.mark.parametrize("kind", DRAWING)
def test_each_sample_has_its_own_draws_of_a_loop_or_branch(kind):
    z = np.asarray(pe.vmap(lambda x: x * DRAWING[kind]())(np.ones((4, 64))))
    assert len({row.tobytes() for row in z}) == 4


def test_running_statistics_in_a_checkpoint_are_updated_once():
    x = np.random.default_rng(1).standard_normal((8, 3))

    def gradient_of(wrap):
        chain = Chain(BatchNorm(3), Dense(3, 2, "tanh"), dtype=np.float64, seed=0)
        step = pe.grad(lambda x: np.sum(wrap(lambda x: chain(x, training=True))(x)))
        return step(x).numpy(), chain.parameters.arrays

    found, arrays = gradient_of(pe.checkpoint)
    expected, plain = gradient_of(lambda f: f)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for name in ("batchnorm.running_mean", "batchnorm.running_var"):
        np.testing.assert_allclose(arrays[name], plain[name], rtol=1e-13)
    assert arrays["batchnorm.running_mean"].any()


def test_updates_in_a_checkpoint_that_a_gradient_would_not_see_are_refused():
    x = np.random.default_rng(1).standard_normal((8, 3))
    chain = Chain(BatchNorm(3), dtype=np.float64)
    twice = pe.checkpoint(lambda x: chain(x, training=True) - chain(2 * x, training=True))
    with pytest.raises(ConfigurationError, match="calls a layer twice that updates its running statistics"):
        pe.grad(lambda x: np.sum(twice(x)))(x)
    assert not chain.parameters.arrays["batchnorm.running_mean"].any()

    scale = Tensor(np.ones(3))

    @pe.checkpoint
    def scaled(x):
        update(scale, 0.9 * scale)
        return x * scale

    with pytest.raises(InPlaceError):
        pe.grad(lambda x: np.sum(scaled(x)))(x)
