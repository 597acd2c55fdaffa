"""Replays read large arguments where they are and compute large results in new arrays; all is as with copies."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.compile import zero_copy

N = zero_copy.LARGE // 8


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def tape_of(compiled):
    ((tape, _),) = compiled.tapes.values()
    return tape


def test_large_arguments_are_not_copied_in_and_small_ones_are():
    f = pe.compile(lambda x, y, z: np.sin(x) * z + np.cos(x) * np.sum(y))
    x, y, z = numbers(N), numbers(3), numbers(N, seed=1)
    np.testing.assert_array_equal(f(x, y, z), np.sin(x) * z + np.cos(x) * np.sum(y))
    read, copied, also_read = tape_of(f).inputs
    assert not read.any() and not also_read.any()
    np.testing.assert_array_equal(copied, y)


def test_large_results_are_computed_in_arrays_of_the_caller():
    f = pe.compile(lambda x: (np.sin(x), np.sum(x)))
    whole, total = f(numbers(N))
    assert not tape_of(f).outputs[0].any()
    assert tape_of(f).outputs[1] == total
    again, _ = f(numbers(N, seed=1))
    np.testing.assert_array_equal(whole, np.sin(numbers(N)))
    assert whole.flags.owndata and whole.flags.writeable and not np.may_share_memory(whole, again)


WAYS = {
    "twice": lambda x: (x * 2, x * 2),
    "an argument": lambda x: (x, x + 1),
    "a view": lambda x: (x.reshape(2, -1), np.sum(x[:5])),
    "a part": lambda x: np.concatenate([np.sin(x), np.cos(x)]),
    "a view beside": lambda x: np.sin(x) * x[::-1],
    "a sum over rows": lambda x: np.cos(x) * np.sum(x, axis=0),
    "read again": lambda x: (np.exp(x), np.exp(x) + 1, np.exp(x)[::2]),
    "one after the other": lambda x: ops.sigmoid(ops.relu(x)),
    "a product": lambda x: x.reshape(-1, 16) @ x.reshape(16, -1),
    "a reduction": lambda x: (np.sum(x), np.max(x), ops.logsumexp(x)),
    "a constant": lambda x: (Tensor(np.ones(N)), x - 1),
    "a gradient": pe.grad(lambda x: np.sum(np.sin(x) * np.exp(x))),
    "a slice's gradient": pe.grad(lambda x: np.sum(x[1:] * x[:-1])),
    "in a scan": lambda x: pe.scan(lambda c, y: (c + y, c), np.zeros(16), x.reshape(-1, 16))[1],
}


@pytest.mark.parametrize("function", WAYS.values(), ids=WAYS)
def test_results_are_those_of_a_tape_with_copies_and_share_no_memory(function):
    compiled = pe.compile(function)
    given = [numbers(N // 16, 16, seed=seed) for seed in range(3)]
    before = [x.copy() for x in given]
    results = [np.atleast_1d(*r) if isinstance(r := compiled(x), tuple) else [r] for x in given]
    for x, old in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, old)
    tape = tape_of(compiled)
    arrays = [*given, *tape.inputs, *tape.outputs]
    for x, found in zip(given, results, strict=True):
        for array, expected in zip(found, tape(x), strict=True):
            np.testing.assert_array_equal(array, np.atleast_1d(expected) if array.ndim else expected)
            assert not any(np.may_share_memory(array, other) for other in arrays)
            arrays.append(array)


@pytest.mark.parametrize("kind", ["strided", "turned", "unaligned", "read-only"])
def test_arguments_may_lie_in_any_memory(kind):
    x = numbers(N // 16, 4, 4)
    if kind == "strided":
        given = np.repeat(x, 2, axis=-1)[..., ::2]
    elif kind == "turned":
        given = np.asfortranarray(x)
    elif kind == "unaligned":
        given = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        given[...] = x
    else:
        given = x.copy()
        given.flags.writeable = False
    f = pe.compile(pe.value_and_grad(lambda x: np.sum(ops.norm(x, axis=(0, 2)) ** 3)))
    value, gradient = f(x)
    doubled, gradient_there = f(2 * x)
    for _ in range(2):
        for array, results in ((given, (value, gradient)), (2 * x, (doubled, gradient_there))):
            for found, expected in zip(f(array), results, strict=True):
                np.testing.assert_array_equal(found, expected)


def test_one_array_may_be_several_arguments_a_captured_one_and_an_earlier_result():
    weight = numbers(N)
    f = pe.compile(lambda x, y: x * y + Tensor(weight))
    result = f(weight, weight)
    np.testing.assert_array_equal(result, weight * weight + weight)
    np.testing.assert_array_equal(f(result, result), result * result + weight)
    np.testing.assert_array_equal(result, weight * weight + weight)


def test_what_a_caller_does_to_results_changes_no_later_ones():
    f = pe.compile(lambda x: np.sqrt(x))
    x = np.arange(N, dtype=np.float64)
    f(x)[...] = -1
    x[...] = 4
    np.testing.assert_array_equal(f(x), np.full(N, 2.0))


def test_arguments_and_results_are_not_held():
    f = pe.compile(lambda x: np.sin(x))
    x = numbers(N)
    result = f(x)
    held = weakref.ref(x), weakref.ref(result)
    del x, result
    gc.collect()
    assert held[0]() is held[1]() is None


def test_a_failed_replay_leaves_nothing_behind():
    def refuse(x):
        if x[0] < 0:
            raise ValueError("negative")
        return np.array(x)

    picky = pe.custom_rule(refuse)
    f = pe.compile(lambda x: np.sin(x) + picky(np.sqrt(x) - 1))
    x = 1 + np.abs(numbers(N))
    expected = f(x)
    wrong = x - 1
    wrong[0] = 0.5
    with pytest.raises(ValueError, match="negative"):
        f(wrong)
    held = weakref.ref(wrong)
    del wrong
    gc.collect()
    assert held() is None
    np.testing.assert_array_equal(f(x), expected)


def test_a_replay_without_memory_for_its_results_leaves_nothing_behind(monkeypatch):
    f = pe.compile(lambda x: np.sin(x))
    f(numbers(N))

    def full(shape, dtype):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(zero_copy, "np", SimpleNamespace(empty=full))
        f(numbers(N, seed=1))
    strided = numbers(2 * N, seed=2)[::2]
    np.testing.assert_array_equal(f(strided), np.sin(strided))


def test_replays_do_not_warn():
    f = pe.compile(lambda x: np.sqrt(x))
    with np.errstate(all="raise"):
        assert np.isnan(f(np.full(N, -1.0))).all()


def calls_made_by(function):
    """How many functions, of Python and of C, a function calls."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "join", [np.concatenate, np.stack, lambda xs: sum(xs[1:], xs[0])], ids=["join", "stack", "sum"]
)
def test_work_grows_with_the_number_of_arguments_and_not_with_its_square(join):
    counts = []
    for n in (40, 160):
        f, arrays = pe.compile(lambda xs: join(xs)), [numbers(N, seed=k) for k in range(n)]
        np.testing.assert_array_equal(f(arrays), join(arrays))
        tape = tape_of(f)
        steps = [(step.equation, step.calls) for step in tape.steps]
        arguments = (tape.program, tape.inputs, tape.outputs, steps, tape._silent)
        counts.append(calls_made_by(lambda arguments=arguments: zero_copy.ZeroCopyCall(*arguments)))
    assert counts[1] < 5 * counts[0]


def test_an_argument_that_a_call_has_in_two_forms_is_copied_in():
    x = numbers(N)
    for function in (lambda x: np.concatenate([x, x[::-1]]), lambda x: np.concatenate([x[: N // 2], x, x[1:]])):
        np.testing.assert_array_equal(pe.compile(function)(x), function(x))


def test_arrays_are_apart_whose_memory_no_other_one_reaches_into():
    memory, other = np.zeros(100), np.ones(5)
    arrays = [
        memory[:10],
        memory[5:20],
        memory[15:30],
        memory[30:40],
        memory[50:50],
        other,
        memory[60:90:3],
        memory[61:70],
    ]
    by_id = {id(a): a for a in arrays}
    expected = [a for a in arrays if not any(np.may_share_memory(a, b) for b in arrays if b is not a)]
    assert sorted(zero_copy._apart(by_id, [])) == sorted(map(id, expected))
    assert id(other) not in zero_copy._apart(by_id, [other])
