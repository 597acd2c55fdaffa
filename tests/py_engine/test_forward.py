"""Forward mode through a recorded graph: one pass for many tangents, memory that is given back, and faulty rules.

That the results are right is tested on every op (test_ops.py) and on random programs (test_random_programs.py).
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.forward import push_forward
from py_engine.ad.program import trace
from py_engine.errors import DTypeError, NotDifferentiableError, ShapeError


def network(x):
    x = ops.reshape(x, (2, -1))
    x = np.tanh(np.concatenate([x, x[:, ::-1] * 0.5], axis=1).T)
    x = np.einsum("ij,kj->ik", x, x) @ np.ones((x.shape[0], 2))
    return ops.logsumexp(ops.softmax(x) + np.max(x, axis=0), axis=1)[np.array([0, 1, 1])]


def test_many_tangents_take_one_pass():
    def length(count):
        x = Tensor.symbol((6,), np.float64)
        moves = np.ones((count, 6))
        return len(trace(lambda x: [pe.vmap(lambda t: pe.jvp(network, (x,), (t,))[1])(moves)], [x]).equations)

    assert length(1) == length(100)


def test_the_leading_axis_is_behind_index_arrays_that_stand_apart(rng):
    # numpy puts the axes of index arrays first where a slice is between them.
    x, i = rng.standard_normal((3, 4, 5)), np.array([[0, 2], [1, 1], [0, 0]])
    for function in (lambda x: x[i, :, i], lambda x: x[1, :, i], lambda x: x[:, i, i], lambda x: x[i, None, i]):
        for mode in ("forward", "reverse"):
            found = pe.jacobian(function, x, mode=mode)
            np.testing.assert_array_equal(
                found, np.eye(60).reshape(3, 4, 5, 60)[function_of(function)].reshape(found.shape)
            )


def function_of(function):
    class Index:
        def __getitem__(self, index):
            return index

    return function(Index())


def test_tangents_are_given_back_when_nobody_needs_them_any_more():
    def chain(x):
        for _ in range(100):
            x = np.sin(x)
        return x

    x, moves = np.ones(1000), np.ones((64, 1000))
    tracemalloc.start()
    try:
        pe.vmap(lambda t: pe.jvp(chain, (x,), (t,))[1])(moves)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * 64 * 1000 * 8  # and not a hundred of them


def test_a_long_chain_needs_no_recursion():
    def chain(x):
        for _ in range(10_000):
            x = x * 0.999
        return x

    assert pe.jvp(chain, (1.0,), (1.0,))[1] == pytest.approx(0.999**10_000)
    assert pe.hvp(lambda x: chain(x) ** 2, 1.0, 1.0) == pytest.approx(2 * 0.999**20_000)


def test_a_tensor_that_moves_by_itself_is_not_moved_by_others():
    x = Tensor(np.array([1.0, 2.0]), requires_grad=True)
    y = np.sin(x)
    (found,) = push_forward([x * y], {x: Tensor(np.ones(2)), y: Tensor(np.zeros(2))})
    np.testing.assert_array_equal(found.numpy(), y.numpy())


def test_outputs_may_be_inputs_and_named_twice():
    x = Tensor(np.array([1.0, 2.0]), requires_grad=True)
    y = x * 3
    moved = push_forward([x, y, y, Tensor(np.ones(1))], {x: Tensor(np.array([1.0, 0.0]))})
    assert [None if t is None else t.numpy().tolist() for t in moved] == [[1, 0], [3, 0], [3, 0], None]


@pytest.mark.parametrize(
    ("jvp", "error", "message"),
    [
        (None, NotDifferentiableError, "through 'sin', but the op has no jvp rule"),
        (lambda t, y, x: ops.sum(t[0]) * np.ones(4), ShapeError, r"sin: a jvp rule returned shape \(4,\), expected"),
        (lambda t, y, x: ops.astype(t[0], np.float32), DTypeError, "sin: a jvp rule returned float32 for a result of"),
    ],
)
def test_a_faulty_rule_is_named(jvp, error, message):
    wrong = replace(ops.sin, jvp=jvp)
    x = np.ones(3)
    with pytest.raises(error, match=message):
        pe.jvp(wrong, (x,), (x,))
    with pytest.raises(error, match=message):
        pe.jacobian(wrong, x, mode="forward")
