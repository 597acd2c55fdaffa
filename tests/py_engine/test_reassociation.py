"""Sums whose order is free: the terms are added early, each as often as it occurs; others stay as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.compile.reassociation import add_early
from py_engine.ad.compile.tape import Tape
from py_engine.ad.ops.elementary import ADD_IN_ANY_ORDER
from py_engine.ad.program import trace
from py_engine.ad.reverse import gradients
from py_engine.ad.techniques import Techniques

# Random graphs --------------------------------------------------------------------------------------------

OPS = (
    ADD_IN_ANY_ORDER,
    ADD_IN_ANY_ORDER,
    ops.add,
    lambda x, y: ops.clip(x * y, -1000, 1000),
    lambda x, y: -x,
    lambda x, y: x[::-1],
)
"""Of whole numbers that stay small, so that all sums are exact, in any order."""

Step = tuple[int, int, int]


@st.composite
def steps(draw) -> list[Step]:
    """Ops by number, each with two operands among the values before it: two inputs, a constant, and results."""
    count = draw(st.integers(1, 30))
    return [
        (draw(st.integers(0, len(OPS) - 1)), draw(st.integers(0, k + 2)), draw(st.integers(0, k + 2)))
        for k in range(count)
    ]


def values(program: Sequence[Step], *inputs: Tensor) -> list[Tensor]:
    found = [*inputs, Tensor(np.array([2.0, 0.0, -1.0]))]
    for number, i, j in program:
        found.append(OPS[number](found[i], found[j]))
    return found[len(inputs) + 1 :]


SYMBOLS = [Tensor.symbol((3,), np.dtype(np.float64)) for _ in range(2)]
INPUTS = [np.array([1.0, -2.0, 3.0]), np.array([0.0, 5.0, -7.0])]


@pytest.mark.campaign
@settings(max_examples=3 * settings.default.max_examples)
@given(steps(), st.data())
def test_random_sums_have_the_values_that_they_have_in_any_order(program, data):
    results = data.draw(st.lists(st.integers(0, len(program) - 1), min_size=1, max_size=3))

    def function(*inputs: Tensor) -> list[Tensor]:
        found = values(program, *inputs)
        return [found[k] for k in results]

    plain = Tape(trace(function, SYMBOLS), techniques=replace(Techniques(), simplify=False))
    early = Tape(trace(function, SYMBOLS))
    for _ in range(2):
        for found, expected in zip(early(*INPUTS), plain(*INPUTS), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.campaign
@settings(max_examples=3 * settings.default.max_examples)
@given(steps())
@example([(3, 0, 0), (3, 1, 1), (0, 3, 4), (0, 5, 2), (0, 6, 6), (0, 7, 1)])  # a sum that is added to itself
def test_every_op_stands_once_behind_what_it_reads(steps):
    program = trace(lambda *inputs: values(steps, *inputs)[-1:], SYMBOLS)
    known = {id(x) for x in program.inputs}

    def is_there(x: Tensor) -> bool:
        return id(x) in known or x.data is not None

    found = add_early(program)
    for equation in found.equations:
        assert id(equation.output) not in known
        assert all(map(is_there, equation.inputs))
        known.add(id(equation.output))
    assert all(map(is_there, found.outputs))


# What becomes of them -------------------------------------------------------------------------------------


def power(x, n=40):
    r = np.sin(x)
    for _ in range(n - 1):
        r = r * np.sin(x)
    return np.sum(r)


def tape_of(function, *inputs):
    compiled = pe.compile(function)
    compiled(*inputs)
    ((tape, _),) = compiled.tapes.values()
    return tape


def names(tape):
    return [step.equation.op.name for step in tape.steps]


def test_a_long_loop_keeps_half_its_values_and_none_of_the_terms():
    x = np.linspace(0.5, 1.5, 1000)
    n = 40
    tape = tape_of(pe.grad(power), x)
    assert tape.plan.size < (n / 2 + 6) * x.nbytes
    np.testing.assert_allclose(tape(x)[0], n * np.sin(x) ** (n - 1) * np.cos(x), rtol=1e-12)


def test_equal_values_are_pulled_back_once():
    tape = tape_of(pe.grad(lambda x: np.sum(np.sin(x) * np.exp(x) + np.sin(x) * np.sqrt(x))), np.ones(3))
    assert names(tape).count("cos") == 1
    assert names(tape).count("mul") <= 4


def test_terms_that_are_the_same_are_multiplied():
    tape = tape_of(pe.grad(lambda x: np.sum(np.sin(x) + np.exp(x) + np.sin(x) + np.sin(x))), np.ones(3))
    np.testing.assert_array_equal(tape(np.ones(3))[0], np.cos(np.ones(3)) * 3 + np.exp(np.ones(3)))
    assert names(tape).count("cos") == 1


def test_sums_of_the_program_are_computed_in_the_order_in_which_they_are_written():
    x = np.array([40.0])
    (found,) = tape_of(lambda x: x + np.exp(x) + -np.exp(x), x)(x)
    assert found == x + np.exp(x) - np.exp(x) != x


def test_a_value_asked_for_has_a_gradient_of_its_own_beside_an_equal_one():
    def f(x):
        y, z = np.sin(x), np.sin(x)
        return gradients([np.sum(y * np.exp(z))], [Tensor(np.ones(()))], [x, y, z])

    x = np.linspace(0.1, 1, 5)
    y = np.sin(x)
    by_x, by_first, by_second = pe.compile(f)(x)
    np.testing.assert_allclose(by_x, np.cos(x) * (1 + y) * np.exp(y), rtol=1e-14)
    np.testing.assert_allclose(by_first, np.exp(y), rtol=1e-14)
    np.testing.assert_allclose(by_second, y * np.exp(y), rtol=1e-14)


@pytest.mark.parametrize("compiled", [False, True])
def test_equal_ops_on_an_array_that_was_written_to_between_them_have_gradients_of_their_own(compiled):
    given = np.zeros(3)

    def f(x):
        before = np.exp(x)
        given[...] = 1.0
        return np.sum(before + 10 * np.exp(x))

    _, pull_back = pe.vjp(f, given)
    (found,) = pe.compile(pull_back)(1.0) if compiled else pull_back(1.0)
    np.testing.assert_allclose(found, np.full(3, 1 + 10 * np.e))


# Products that a loop sums -----------------------------------------------------------------------------------


def recurrence(weight, x, steps=6):
    for _ in range(steps):
        x = np.tanh(x @ weight)
    return np.sum(x * x)


def test_the_gradient_of_a_weight_that_a_loop_reads_is_one_product_where_the_samples_are_few(rng):
    weight = rng.standard_normal((8, 8)) / 3
    for samples, products in ((1, 6 + 5 + 1), (4, 6 + 5 + 1), (5, 6 + 5 + 6)):  # forward, by x, by the weight
        x = rng.standard_normal((samples, 8))
        gradient = pe.grad(recurrence)
        tape = tape_of(gradient, weight, x)
        assert sum(name == "matmul" for name in names(tape)) == products
        np.testing.assert_allclose(pe.compile(gradient)(weight, x), gradient(weight, x), rtol=1e-12, atol=1e-15)
        each = pe.compile(gradient, Techniques(join=False))
        np.testing.assert_allclose(each(weight, x), gradient(weight, x), rtol=1e-12, atol=1e-15)
        (alone,) = each.tapes.values()
        assert sum(step.equation.op.name == "matmul" for step in alone[0].steps) == 6 + 5 + 6


def test_such_a_gradient_can_be_differentiated_once_more(rng):
    weight, x, v = rng.standard_normal((8, 8)) / 3, rng.standard_normal((2, 8)), rng.standard_normal((8, 8))

    def along(weight):
        return np.sum(pe.grad(recurrence)(weight, x) * v)

    np.testing.assert_allclose(pe.compile(pe.grad(along))(weight), pe.grad(along)(weight), rtol=1e-11, atol=1e-14)


def test_products_beside_other_terms_of_a_sum_are_joined(rng):
    weight, x = rng.standard_normal((8, 8)) / 3, rng.standard_normal((2, 8))

    def function(weight):
        return recurrence(weight, x, 4) + np.sum(weight**2) + np.sum(weight[1:3]) + np.sum(weight.T @ x.T)

    np.testing.assert_allclose(pe.compile(pe.grad(function))(weight), pe.grad(function)(weight), rtol=1e-12, atol=1e-14)
