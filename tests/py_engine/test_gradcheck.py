"""The gradient checker is checked: it accepts right rules, and catches wrong ones, kinks and misuse."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine import ops
from py_engine.ad.op import TABLE, Op, elementwise
from py_engine.errors import DTypeError, EngineError, GradientCheckError, NotDifferentiableError, ShapeError

X = np.linspace(0.3, 1.7, 24).reshape(4, 6)


@pytest.fixture
def new_op():
    """A way to add elementwise ops to the table for one test."""
    before = set(TABLE)

    def add(ufunc, derivative, name="temporary"):
        def kernel(x, out):  # the bare ufunc would become numpy's stand-in
            ufunc(x, out)

        return elementwise(name, kernel, derivative, doc="for a test")

    yield add
    for name in set(TABLE) - before:
        del TABLE[name]


def in_some_elements(mask, factor):
    return lambda y, x: ops.cos(x) * np.where(mask, factor, 1.0)


# Wrong rules ----------------------------------------------------------------------------------------------


def test_a_right_rule_passes(new_op):
    pe.gradcheck(new_op(np.sin, lambda y, x: ops.cos(x)), X)


@pytest.mark.parametrize("factor", [1.001, 0.999, 1.0001, -1.0, 0.0, 2.0, np.nan, np.inf])
def test_a_wrong_factor_is_caught(new_op, factor):
    wrong = new_op(np.sin, lambda y, x: factor * ops.cos(x))
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(GradientCheckError, match=r"gradient gives .*, finite differences"),
    ):
        pe.gradcheck(wrong, X)


@pytest.mark.parametrize("element", [0, 7, 23])
def test_one_wrong_element_of_many_is_caught(new_op, element, seed):
    mask = np.arange(24).reshape(4, 6) == element
    with pytest.raises(GradientCheckError):
        pe.gradcheck(new_op(np.sin, in_some_elements(mask, 1.001)), X, seed=seed % 1000)


def test_a_missing_dependence_is_caught():
    with pytest.raises(GradientCheckError):
        pe.gradcheck(lambda x: x * ops.stop_gradient(np.sin(x)), X)


def test_a_gradient_that_is_missing_altogether_is_caught():
    with pytest.raises(GradientCheckError, match=r"gives 0\.0"):
        pe.gradcheck(lambda x: ops.stop_gradient(x) * 2, X)


def test_a_wrong_rule_of_the_second_derivative_is_caught(new_op):
    derivative = new_op(np.cos, lambda y, x: -1.001 * ops.sin(x), "wrong_cos")
    sine = new_op(np.sin, lambda y, x: derivative(x), "sine")
    pe.gradcheck(sine, X)
    with pytest.raises(GradientCheckError):
        pe.gradcheck(lambda x: pe.grad(lambda x: np.sum(sine(x)))(x), X)


def test_a_right_second_derivative_passes():
    pe.gradcheck(lambda x: pe.grad(lambda x: np.sum(np.sin(x) * x**3))(x), X)


def test_a_gradient_that_is_mixed_up_between_operands_is_caught():
    pe.gradcheck(lambda a, b: a @ b.T, X, X + 1)
    swapped = Op(
        "swapped",
        infer=TABLE["mul"].infer,
        kernel=np.multiply,
        vjp=(lambda g, y, a, b: g * a, lambda g, y, a, b: g * b),
    )
    with pytest.raises(GradientCheckError):
        pe.gradcheck(swapped, X, X + 1)


# Rules that cannot be gradients at all --------------------------------------------------------------------


def test_a_rule_that_returns_another_shape_is_named():
    op = Op("odd", infer=TABLE["sin"].infer, kernel=np.sin, vjp=(lambda g, y, x: ops.concatenate([g, g]),))
    with pytest.raises(ShapeError, match=r"a gradient rule returned shape \(8, 6\) for an input of shape \(4, 6\)"):
        pe.gradcheck(op, X)


def test_a_rule_that_returns_as_many_elements_in_another_shape_is_named():
    op = Op("odd", infer=TABLE["sin"].infer, kernel=np.sin, vjp=(lambda g, y, x: ops.transpose(g * ops.cos(x)),))
    with pytest.raises(ShapeError, match=r"a gradient rule returned shape \(6, 4\) for an input of shape \(4, 6\)"):
        pe.grad(lambda x: np.sum(op(x)))(X)
    row = Op("row", infer=TABLE["sin"].infer, kernel=np.sin, vjp=(lambda g, y, x: ops.reshape(g * ops.cos(x), (-1,)),))
    np.testing.assert_allclose(pe.grad(lambda x: np.sum(row(x)))(X[:1]), np.cos(X[:1]))


def test_a_rule_that_returns_another_dtype_is_named():
    op = Op("odd", infer=TABLE["sin"].infer, kernel=np.sin, vjp=(lambda g, y, x: ops.astype(g, np.float32),))
    with pytest.raises(DTypeError, match="a gradient rule returned float32 for an input of float64"):
        pe.gradcheck(op, X)


# Kinks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [ops.relu, ops.abs, lambda x: ops.maximum(x, -x), lambda x: ops.clip(x, 0, 1), ops.norm],
    ids=["relu", "abs", "maximum", "clip", "norm"],
)
def test_at_a_kink_the_message_says_so(function):
    with pytest.raises(GradientCheckError, match=r"the two step sizes disagree, so there may be a kink within 2e-4"):
        pe.gradcheck(function, np.full(3, 1.3e-4))


@pytest.mark.parametrize("function", [ops.relu, ops.abs, lambda x: ops.maximum(x, -x)])
def test_next_to_a_kink_all_is_well(function):
    pe.gradcheck(function, np.array([0.01, -0.01, 0.5]))


# Use ------------------------------------------------------------------------------------------------------


def test_labels_and_masks_are_passed_on_and_not_moved():
    pe.gradcheck(ops.softmax_cross_entropy, X, np.array([0, 5, 2, 2]))
    pe.gradcheck(ops.where, X > 1, X, X * 2)


def test_all_float_arguments_are_checked():
    with pytest.raises(GradientCheckError):
        pe.gradcheck(lambda a, b: a * ops.stop_gradient(b), X, X)


def test_scalars_and_empty_arrays_can_be_checked():
    pe.gradcheck(np.exp, 0.5)
    pe.gradcheck(np.exp, np.zeros((0, 3)))


def test_float32_is_refused():
    with pytest.raises(DTypeError, match="float32 is too coarse for finite differences; pass float64"):
        pe.gradcheck(np.sin, X.astype(np.float32))
    with pytest.raises(DTypeError):
        pe.gradcheck(lambda a, b: a, X, X.astype(np.float32))


def test_with_nothing_to_differentiate_by_it_does_not_pass():
    with pytest.raises(NotDifferentiableError, match="at least one float64 argument"):
        pe.gradcheck(lambda i: i, np.arange(3))


@pytest.mark.parametrize(
    ("container", "what"),
    [({"w": X, "b": 1.0}, "a dict with the keys 'w', 'b'"), ([X, X], "a list of 2"), ((X, 1), "tuple")],
)
def test_containers_of_arrays_are_refused(container, what):
    with pytest.raises(
        NotDifferentiableError, match=f"argument 1 is .*{what}.*only arrays can be moved; give its arrays"
    ):
        pe.gradcheck(lambda x, model: x * model["w"], X, container)


def test_tolerances_and_directions_are_settings(new_op):
    slightly_wrong = new_op(np.sin, lambda y, x: 1.001 * ops.cos(x))
    pe.gradcheck(slightly_wrong, X, rtol=1e-1)
    pe.gradcheck(slightly_wrong, X, atol=1.0)
    with pytest.raises(GradientCheckError):
        pe.gradcheck(slightly_wrong, X, directions=1)


def test_the_arguments_are_left_alone():
    x = X.copy()
    x.flags.writeable = False
    pe.gradcheck(np.sin, x)
    np.testing.assert_array_equal(x, X)


def test_the_seed_decides_the_directions(new_op):
    wrong = new_op(np.sin, lambda y, x: 2 * ops.cos(x))
    messages = set()
    for seed in (1, 1, 2):
        with pytest.raises(GradientCheckError) as caught:
            pe.gradcheck(wrong, X, seed=seed)
        messages.add(str(caught.value))
    assert len(messages) == 2


def test_failures_are_assertion_errors():
    assert issubclass(GradientCheckError, AssertionError) and issubclass(GradientCheckError, EngineError)


def test_inside_no_grad_it_checks_all_the_same():
    with pe.no_grad():
        pe.gradcheck(np.sin, np.array([0.5, 1.0]))
        with pytest.raises(GradientCheckError):
            pe.gradcheck(lambda x: x * ops.stop_gradient(x), np.array([0.5, 1.0]))
