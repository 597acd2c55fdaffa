"""What functions share: constants of the engine, states of a thread, watched values and the variables of transforms."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine import ops
from py_engine.ad.state import STATE
from py_engine.ad.techniques import Techniques
from py_engine.errors import ReplayError


@pytest.mark.parametrize(("length", "dimension"), [(18, 18), (18, 17), (17, 18)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_convolution_of_word_vectors_slides_along_the_axis_that_it_is_given(rng, length, dimension, axis):
    """A text may have as many words as a vector has elements."""
    words = rng.standard_normal((7, dimension))
    ids = rng.integers(0, 7, (2, length))
    shape, window = ((3, dimension), (8, 1)) if axis == 0 else ((length, 3), (1, 8))
    kernel = rng.standard_normal((3, 1, *shape))

    def pooled(words, kernel):
        y = ops.reshape(ops.embedding(words, ids), (2, 1, length, dimension))
        return ops.max_pool(ops.conv(y, kernel), window)

    slopes = pe.grad(lambda words, kernel: ops.sum(ops.square(pooled(words, kernel))), argnums=(0, 1))
    off = Techniques(fuse=False)
    np.testing.assert_allclose(pe.compile(pooled)(words, kernel), pe.compile(pooled, off)(words, kernel), atol=1e-12)
    for found, expected in zip(pe.compile(slopes)(words, kernel), pe.compile(slopes, off)(words, kernel), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


FILLED = [
    lambda x: x + (np.full_like(x, [1.0, 2.0]) - np.full_like(x, [[1.0], [2.0]])),
    lambda x: x * np.full_like(x, [1.0, 2.0]),
    lambda x: x ** np.full_like(x, [2.0, 3.0]),
    lambda x: x * np.full_like(x, [1.0]) + np.full_like(x, 1.0),
    lambda x: x * np.full_like(x, np.array([[1.0, 1.0], [2.0, 1.0]])),
]


@pytest.mark.parametrize("place", range(len(FILLED)))
def test_arrays_that_are_filled_with_lists_are_what_numpy_makes_of_them(place):
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    function = FILLED[place]
    expected = function(x)
    np.testing.assert_array_equal(function(pe.tensor(x)).numpy(), expected)
    np.testing.assert_array_equal(pe.compile(function)(x), expected)
    slope = pe.grad(lambda x: np.sum(function(x)))
    np.testing.assert_allclose(pe.compile(slope)(x), slope(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_gradient_that_a_caller_writes_to_changes_nobody_elses(dtype):
    number = dtype(2.0)
    cases = [
        (lambda b: b + dtype(3), pe.tensor(number)),
        (np.sign, pe.tensor(number)),
        (lambda b: np.sum(b + dtype(3)), pe.tensor(np.array([2], dtype))),
        (lambda b: np.sum(b * dtype(0)), pe.tensor(np.array([2, 3], dtype))),
    ]
    for write in (lambda g: np.multiply(g.numpy(), 0.1, out=g.numpy()), lambda g: g.assign(g.numpy() * 0 + 7)):
        for function, x in cases:
            for find in (pe.grad(function), lambda x, f=function: pe.value_and_grad(f)(x)[1]):
                found = find(x)
                expected = find(x).numpy().copy()
                write(found)
                np.testing.assert_array_equal(find(x).numpy(), expected)
        _, pullback = pe.vjp(lambda b: b + dtype(3), pe.tensor(number))
        (found,) = pullback(pe.tensor(dtype(1)))
        write(found)
    assert pe.grad(lambda x: x * x)(3.0) == 6 and pe.grad(ops.relu)(3.0) == 1


def test_nobody_writes_to_the_engines_own_numbers():
    from py_engine.ad.op import ZEROS
    from py_engine.ad.transforms import ONES

    for numbers in (ZEROS, ONES):
        for literal in numbers.values():
            with pytest.raises(ValueError, match="read-only"):
                literal.numpy()[...] = 3


@pytest.mark.parametrize("make", [pe.no_grad, lambda: ops_scope("encoder")])
def test_one_object_may_be_entered_again_inside_of_itself(make):
    before = dict(STATE.__dict__)
    block = make()

    def evaluate(depth):
        with block:
            inside = dict(STATE.__dict__)
            if depth:
                evaluate(depth - 1)
            assert dict(STATE.__dict__) == inside

    for depth in (0, 1, 3):
        evaluate(depth)
        assert dict(STATE.__dict__) == before


def ops_scope(name):
    from py_engine.ad.state import scope

    return scope(name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1.0, 2.0], [[1.0], [2.0]]),
        ([[1.0, 2.0]], [1.0, 2.0]),
        ([0.0, 0.0], [0, 0]),
        ([1.0, 2.0], [1.0, 3.0]),
        ([1.0, 2.0], [[1.0], [2.0, 3.0]]),
    ],
    ids=str,
)
def test_a_captured_list_that_changes_its_shape_or_kind_is_an_error(before, after):
    numbers = list(before)
    f = pe.compile(lambda x: x * numbers)
    f(np.ones((2, 2)))
    f(np.ones((2, 2)))
    numbers[:] = after
    with pytest.raises(ReplayError, match="changed since it was traced"):
        f(np.ones((2, 2)))


def slope_of_square():
    return pe.grad(lambda z: z * z)(3.0)


INSIDE = {
    "cond": lambda: pe.cond(np.bool_(True), lambda x: x * slope_of_square(), lambda x: x, 2.0),
    "scan": lambda: pe.scan(lambda c, _: (c * slope_of_square(), None), 2.0, length=1)[0],
    "while_loop": lambda: pe.while_loop(lambda c: c < 10, lambda c: c * slope_of_square(), 2.0),
    "checkpoint": lambda: pe.checkpoint(lambda x: x * slope_of_square())(pe.tensor(2.0)),
    "vmap": lambda: pe.vmap(lambda x: x * slope_of_square())(np.array([2.0]))[0],
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_transform_inside_of_a_body_leaves_no_variable(name):
    found = INSIDE[name]()
    assert not getattr(found, "requires_grad", False)
    assert float(np.asarray(found)) == 12


@pytest.mark.parametrize("name", ["cond", "scan", "while_loop", "checkpoint"])
def test_derivatives_by_what_a_body_captures_of_transforms_around_it_are_kept(name):
    def function(w):
        bodies = {
            "cond": lambda: pe.cond(np.bool_(True), lambda x: x * w * slope_of_square(), lambda x: x, 2.0),
            "scan": lambda: pe.scan(lambda c, _: (c * w * slope_of_square(), None), 2.0, length=1)[0],
            "while_loop": lambda: pe.while_loop(lambda c: c < 9, lambda c: c * w * slope_of_square(), 2.0, max_steps=1),
            "checkpoint": lambda: pe.checkpoint(lambda x: x * w * slope_of_square())(pe.tensor(2.0)),
        }
        return bodies[name]()

    assert float(np.asarray(pe.grad(function)(1.5))) == 12


def test_a_custom_rule_is_called_anew_in_every_replay_whatever_it_reads():
    gain = pe.tensor(2.0)
    rule = pe.custom_rule(lambda x: x * gain.item(), vjp=lambda g, y, x: g * gain.item())
    f = pe.compile(lambda x: rule(x) + 1.0)
    np.testing.assert_array_equal(f(np.ones(3)), np.full(3, 3.0))
    gain.assign(5.0)
    np.testing.assert_array_equal(f(np.ones(3)), np.full(3, 6.0))
    numbers = [1.0, 2.0, 3.0]
    rule = pe.custom_rule(lambda x: x * np.array(numbers), vjp=lambda g, y, x: g)
    f = pe.compile(lambda x: rule(x))
    f(np.ones(3))
    numbers[0] = 7.0
    np.testing.assert_array_equal(f(np.ones(3)), [7.0, 2.0, 3.0])


def test_equal_calls_of_a_custom_rule_are_both_made():
    rng = np.random.default_rng(0)
    noise = pe.custom_rule(lambda x: x + rng.standard_normal(x.shape), vjp=lambda g, y, x: g)
    found = pe.compile(lambda x: noise(x) - noise(x))(np.zeros(3))
    assert found.all()
