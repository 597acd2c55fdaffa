"""A graph of 20,000 ops, far more than the stack has room for, is differentiated and compiled without recursion."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

import py_engine as pe

OPS = 20_000


@pytest.fixture
def little_stack() -> Iterator[None]:
    """Leave no room for recursion over a graph."""
    limit = sys.getrecursionlimit()
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + 100)
    yield
    sys.setrecursionlimit(limit)


def long(x, steps=OPS // 2):
    """r = sin(r x), again and again."""
    r = x
    for _ in range(steps):
        r = np.sin(r * x)
    return r


def by_hand(x, steps=OPS // 2):
    r, slope = x, 1.0
    for _ in range(steps):
        r, slope = np.sin(r * x), np.cos(r * x) * (slope * x + r)
    return r, slope


def lines_of(work):
    """How many lines of Python run."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("made", [pe.grad, lambda f: pe.compile(pe.grad(f))], ids=["eager", "traced and planned"])
def test_the_work_is_in_proportion_to_the_ops(made):
    def of(steps):
        return lines_of(lambda: made(lambda x: long(x, steps))(1.2))

    of(10)  # what is done once
    few, many = of(100), of(1000)
    assert 5 * few < many < 10.5 * few


@pytest.mark.usefixtures("little_stack")
def test_eagerly():
    x = pe.tensor(1.2, requires_grad=True)
    y = long(x)
    assert len(pe.topological_sort([y])) == OPS + 1
    y.backward()
    np.testing.assert_allclose((y.item(), x.grad), by_hand(1.2))


@pytest.mark.usefixtures("little_stack")
def test_compiled():
    steps = OPS // 6
    f = pe.compile(pe.value_and_grad(lambda x: long(x, steps)))
    np.testing.assert_allclose(f(1.2), by_hand(1.2, steps))
    np.testing.assert_allclose(f(1.1), by_hand(1.1, steps))
    ((tape, _),) = f.tapes.values()
    assert len(tape.program.equations) >= OPS
