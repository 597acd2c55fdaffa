"""Arrays that are written to in place while a gradient still needs them: found at the backward pass, or refused."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.graph import _reads
from py_engine.ad.written import EXACT, READ_NOTHING, SAMPLES
from py_engine.errors import InPlaceError


def test_the_error_names_op_layer_tensor_and_input():
    w = np.array([1.0, 2.0])
    x = pe.tensor([3.0, 4.0], requires_grad=True)
    weight = Tensor(w, name="weight")
    with pe.scope("dense"):
        y = x * weight
    w += 1
    expected = r"gradient of 'mul' in layer 'dense' needs its input 1 \(weight, shape \(2,\) float64\) as it was"
    with pytest.raises(InPlaceError, match=expected):
        y.sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.__iadd__(1),
        lambda a: a.__setitem__(..., 0),
        lambda a: a.__setitem__((1, 1), 7.0),
        lambda a: a[1:].fill(3.0),
        lambda a: a.T.sort(),
        lambda a: np.negative(a, out=a),
    ],
    ids=["+=", "[...] =", "one element", "through a view", "sort", "out="],
)
def test_any_write_to_a_small_array_is_found(write):
    w = np.arange(6.0).reshape(3, 2)[::-1].copy()
    x = pe.tensor(np.ones((3, 2)), requires_grad=True)
    y = np.sum(x * w)
    assert w.size <= EXACT
    write(w)
    with pytest.raises(InPlaceError, match="'mul'"):
        y.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.reshape(2, 3),
        lambda x: x[::2],
        lambda x: np.broadcast_to(x, (3, 6)),
        lambda x: x.reshape(2, 3)[1:].T,
        lambda x: pe.grad(lambda z: np.sum(z**3))(x),
    ],
    ids=["reshape", "slice", "broadcast", "several", "inner variable"],
)
def test_a_write_is_found_where_the_gradient_reads_a_view_of_what_was_given(view):
    x = np.arange(6.0)
    _, pullback = pe.vjp(lambda x: np.sum(np.sin(view(x))), x)
    x += 1
    with pytest.raises(InPlaceError):
        pullback(1.0)


@pytest.mark.parametrize("layout", ["c", "fortran", "strided", "broadcast"])
def test_a_write_to_all_of_a_large_array_is_found_whatever_its_memory(layout):
    base = np.random.default_rng(0).standard_normal((128, 96))
    w = {"c": base, "fortran": np.asfortranarray(base), "strided": base[::2, ::3], "broadcast": base}[layout]
    assert w.size > EXACT
    seen = np.broadcast_to(w, (3, *w.shape)) if layout == "broadcast" else w
    x = pe.tensor(np.ones(seen.shape), requires_grad=True)
    y = np.sum(x * seen)
    w *= 1.5
    with pytest.raises(InPlaceError):
        y.backward()


def test_a_write_to_a_part_of_a_large_array_is_found_if_the_part_is_not_tiny():
    w = np.zeros(200 * SAMPLES)
    x = pe.tensor(w, requires_grad=True)
    y = np.sum(x * w)
    w[1000:1500] = 1
    with pytest.raises(InPlaceError):
        y.backward()


def test_the_variable_of_a_gradient_is_watched_as_well():
    x = np.array([1.0, 2.0])

    def f(t):
        y = np.sin(t)
        x[0] = 5.0
        return np.sum(y)

    with pytest.raises(InPlaceError, match=r"'sin' needs its input 0 \(shape \(2,\) float64\)"):
        pe.grad(f)(x)


def test_assigning_to_a_leaf_between_forward_and_backward_is_found():
    w = pe.tensor([1.0, 2.0], requires_grad=True)
    y = np.sum(w * w)
    w.assign([3.0, 4.0])
    with pytest.raises(InPlaceError):
        y.backward()


def test_what_no_rule_reads_may_be_written():
    w = np.array([1.0, 2.0])
    x = pe.tensor([3.0, 4.0], requires_grad=True)
    y = np.sum((x + w - w) * 2)  # sums do not need their operands, nor do factors need themselves
    own = np.exp(x)  # needs its result, not its operand
    w += 1
    x.assign([0.0, 0.0])
    y.backward()
    np.testing.assert_array_equal(x.grad, [2, 2])
    np.sum(own).backward()
    np.testing.assert_allclose(x.grad, 2 + np.exp([3.0, 4.0]))


@pytest.mark.parametrize("name", sorted(READ_NOTHING))
def test_the_ops_that_read_nothing_have_rules_that_read_nothing(name):
    op = ops.TABLE[name]
    x = pe.tensor(np.ones((2, 3)), requires_grad=True)
    attrs = {
        "sum": {"axes": (0,), "keepdims": False},
        "assemble": {"shape": (2, 3), "indices": (((0, 2, 1), (0, 3, 1)),)},
        "astype": {"dtype": np.dtype(np.float32)},
        "reshape": {"shape": (3, 2)},
        "transpose": {"axes": (1, 0)},
        "slice": {"index": (0,)},
        "broadcast_to": {"shape": (2, 2, 3)},
    }.get(name, {})
    y = op.apply((x,) * (2 if name in ("add", "sub") else 1), attrs)
    assert y.op is op and y.marks is None
    assert not any(_reads(y, i) for i in range(len(y.inputs)))


def test_before_its_use_and_after_the_gradient_an_array_may_be_written():
    w = np.array([1.0, 2.0])
    x = pe.tensor([3.0, 4.0], requires_grad=True)
    for factor in (1.0, 10.0):
        w[:] = [factor, 2 * factor]
        np.sum(x * w).backward()
    np.testing.assert_array_equal(x.grad, [11, 22])


def test_a_parameter_may_be_updated_between_steps_in_place():
    w = pe.tensor([1.0], requires_grad=True)
    for _ in range(3):
        w.grad = None
        np.sum(w * w).backward()
        w.numpy()[...] -= 0.25 * w.grad
    np.testing.assert_allclose(w.numpy(), [0.125])


def test_the_arrays_of_computed_tensors_are_read_only():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    y = np.exp(x)
    with pytest.raises(ValueError, match="read-only"):
        y.numpy()[0] = 0
    np.sum(y).backward()
    np.testing.assert_allclose(x.grad, np.exp([1.0, 2.0]))
    with pe.no_grad():
        ops.exp(x).numpy()[0] = 0  # nothing is recorded, so nobody needs it


def test_tensors_are_not_written_in_place():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(TypeError, match="tensors cannot be written in place"):
        x[0] = 5.0
    y = x
    y += 1  # a new tensor
    assert y is not x
    np.testing.assert_array_equal(x.numpy(), [1, 2])


def test_a_custom_rule_is_taken_to_read_all_it_was_given():
    w = np.array([1.0, 2.0])
    twice = pe.custom_rule(lambda x, w: x * w, vjp=lambda g, y, x, w: (g * w, None))
    y = twice(pe.tensor([1.0, 1.0], requires_grad=True), w)
    w[1] = 0
    with pytest.raises(InPlaceError, match=r"'custom' needs its input 1 \(shape \(2,\) float64\)"):
        np.sum(y).backward()
