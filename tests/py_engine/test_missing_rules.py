"""An op without a rule on a differentiated path is an error, never a gradient of zero."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine import ops
from py_engine.ad.op import TABLE, Op, elementwise, register
from py_engine.errors import NotDifferentiableError

X = np.array([1.5, 2.5])

cube = Op("cube", ops.sin.infer, kernel=lambda x, out: np.power(x, 3, out))
"""An op whose author forgot the rules; not in the table, which refuses it."""


@pytest.mark.parametrize("op", TABLE.values(), ids=lambda op: op.name)
def test_every_op_has_a_rule_for_each_input_or_says_that_it_is_constant(op):
    if op.constant:
        assert op.vjp is None and op.jvp is None
    elif not op.fused:
        assert op.jvp is not None
        assert callable(op.vjp) or (op.vjp and all(op.vjp))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "lacks a vjp rule"),
        ({"vjp": (None,), "jvp": lambda t, y, x: t[0]}, "lacks a vjp rule"),
        ({"vjp": (lambda g, y, x: g,)}, "lacks a jvp rule"),
        ({"vjp": (lambda g, y, x: g,), "jvp": lambda t, y, x: t[0], "constant": True}, "must not have"),
    ],
)
def test_the_table_refuses_an_op_that_does_not_say_what_its_derivative_is(record, message):
    before = set(TABLE)
    with pytest.raises(ValueError, match=message):
        register(Op("odd", ops.sin.infer, kernel=np.sin, **record))
    assert set(TABLE) == before


def test_an_elementwise_op_without_partial_derivatives_is_refused_and_with_none_is_constant():
    with pytest.raises(ValueError, match="lacks a vjp rule"):
        elementwise("odd", np.floor, doc="for a test", numpy=())


MODES = {
    "grad": lambda f: pe.grad(f)(X),
    "value_and_grad": lambda f: pe.value_and_grad(f)(X),
    "vjp": lambda f: pe.vjp(f, X)[1](1.0),
    "jvp": lambda f: pe.jvp(f, (X,), (X,)),
    "backward": lambda f: f(pe.tensor(X, requires_grad=True)).backward(),
    "compiled": lambda f: pe.compile(pe.grad(f))(X),
    "grad of a compiled function": lambda f: pe.grad(pe.compile(f))(X),
    "jacobian, reverse": lambda f: pe.jacobian(f, X, mode="reverse"),
    "jacobian, forward": lambda f: pe.jacobian(f, X, mode="forward"),
    "hessian": lambda f: pe.hessian(f, X),
    "hvp": lambda f: pe.hvp(f, X, X),
    "grad of grad": lambda f: pe.grad(lambda x: np.sum(pe.grad(f)(x)))(X),
    "checkpoint": lambda f: pe.grad(pe.checkpoint(f))(X),
    "compiled checkpoint": lambda f: pe.compile(pe.grad(pe.checkpoint(f)))(X),
    "forward mode of a checkpoint": lambda f: pe.jvp(pe.checkpoint(f), (X,), (X,)),
    "scan": lambda f: pe.grad(lambda x: pe.scan(lambda c, e: (c + f(x * e), None), 0.0, X)[0])(X),
    "scan over the variable": lambda f: pe.grad(lambda x: pe.scan(lambda c, e: (c + f(e), None), 0.0, x)[0])(X),
    "scan of the carry": lambda f: pe.grad(lambda x: np.sum(pe.scan(lambda c, e: (c * f(c), c), x, X)[1]))(X),
    "forward mode of a scan": lambda f: pe.jvp(
        lambda x: pe.scan(lambda c, e: (c + f(x * e), None), 0.0, X), (X,), (X,)
    ),
    "compiled scan": lambda f: pe.compile(pe.grad(lambda x: pe.scan(lambda c, e: (c + f(e), None), 0.0, x)[0]))(X),
    "a custom rule, differentiated twice": lambda f: pe.grad(
        lambda x: np.sum(pe.grad(pe.custom_rule(lambda x: np.sum(x), vjp=lambda g, y, x: g * f(x) * x))(x))
    )(X),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", [lambda x: np.sum(cube(x) * x), lambda x: np.sum(x + cube(2 * x))], ids=["*", "+"])
def test_an_op_without_a_rule_raises_and_is_named(mode, use):
    def f(x):
        with pe.scope("dense"):
            return use(x)

    with pytest.raises(NotDifferentiableError, match="'cube' in layer 'dense'"):
        MODES[mode](f)


@pytest.mark.parametrize("mode", ["jvp", "jacobian, forward", "forward mode of a checkpoint", "forward mode of a scan"])
def test_an_op_with_a_vjp_rule_only_raises_in_forward_mode(mode):
    one_way = Op("cube", cube.infer, cube.kernel, vjp=(lambda g, y, x: g * 3 * x**2,))
    np.testing.assert_allclose(pe.grad(lambda x: np.sum(one_way(x)))(X), 3 * X**2)
    with pytest.raises(NotDifferentiableError, match=r"'cube'.* has no jvp rule"):
        MODES[mode](lambda x: np.sum(one_way(x)))


@pytest.mark.parametrize("mode", ["grad", "backward", "compiled", "checkpoint", "scan"])
def test_an_op_with_a_jvp_rule_only_raises_in_reverse_mode(mode):
    other_way = Op("cube", cube.infer, cube.kernel, jvp=lambda t, y, x: t[0] * 3 * x**2)
    np.testing.assert_allclose(pe.jvp(lambda x: other_way(x), (X,), (np.ones(2),))[1], 3 * X**2)
    with pytest.raises(NotDifferentiableError, match=r"'cube'.* has no vjp rule"):
        MODES[mode](lambda x: np.sum(other_way(x)))


def test_a_rule_that_is_missing_for_one_input_raises_where_that_input_is_differentiated_by():
    half = Op("half", ops.mul.infer, kernel=np.multiply, vjp=(lambda g, y, a, b: g * b, None))
    np.testing.assert_array_equal(pe.grad(lambda a: np.sum(half(a, X)))(X), X)
    with pytest.raises(NotDifferentiableError, match="'half', but it has no vjp rule for its input 1"):
        pe.grad(lambda b: np.sum(half(X, b)))(X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: np.sum(cube(X) * x),
        lambda x: np.sum(pe.stop_gradient(cube(x)) * x),
        lambda x: np.sum(cube(pe.stop_gradient(x)) * x),
        lambda x: np.sum(x) + 0 * len(cube(x)),
        lambda x: np.sum(pe.scan(lambda c, e: (cube(c) + 1, c * e), np.ones(2), np.stack([x, x]))[1]),
        lambda x: np.sum(pe.scan(lambda c, e: ((cube(c[0]) + 1, c[0] * x), c[1]), (np.ones(2), X), X)[1]),
    ],
    ids=["of a constant", "result stopped", "input stopped", "unused", "carry of a scan", "one of two carries"],
)
def test_where_no_gradient_passes_a_rule_may_be_missing(f):
    if f(X).item() != f(2 * X).item():
        found = pe.grad(f)(X)
        np.testing.assert_allclose(pe.compile(pe.grad(f))(X), found)
        np.testing.assert_allclose(pe.jacobian(f, X, mode="forward"), found)
        assert np.isfinite(found).all()
