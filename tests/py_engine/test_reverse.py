"""Graphs: order, long chains, accumulation of gradients, simplification. Nothing recurses over a graph."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.compile.tape import Tape
from py_engine.ad.op import as_tensor
from py_engine.ad.program import simplify, trace
from py_engine.ad.reverse import gradients
from py_engine.errors import DTypeError, NotDifferentiableError, ShapeError

# Order ----------------------------------------------------------------------------------------------------


def is_sorted(order):
    position = {id(x): k for k, x in enumerate(order)}
    return len(position) == len(order) and all(position[id(a)] < position[id(x)] for x in order for a in x.inputs)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30), st.integers(0, 2**16))
def test_each_tensor_comes_once_and_after_its_inputs(pairs, seed):
    tensors = [pe.tensor(1.0, requires_grad=True)]
    for a, b in pairs:
        tensors.append(tensors[a % len(tensors)] + tensors[b % len(tensors)])
    outputs = [tensors[k] for k in np.random.default_rng(seed).integers(0, len(tensors), 3)]
    order = pe.topological_sort(outputs)
    assert is_sorted(order)
    assert {id(x) for x in outputs} <= {id(x) for x in order}


def test_an_order_holds_only_what_is_needed():
    x = pe.tensor(1.0, requires_grad=True)
    needed = np.sin(x)
    np.exp(x)
    assert [id(t) for t in pe.topological_sort([needed])] == [id(x), id(needed)]


# Long graphs ----------------------------------------------------------------------------------------------


def test_a_chain_of_ten_thousand_ops():
    def chain(x):
        for _ in range(10_000):
            x = x * 0.9999 + 0.0001
        return np.sum(x)

    x = np.array([1.0, 2.0, 3.0])
    expected = np.full(3, 0.9999**10_000)
    np.testing.assert_allclose(pe.grad(chain)(x), expected)
    np.testing.assert_allclose(pe.compile(pe.grad(chain))(x), expected)


def test_a_graph_of_twenty_thousand_scalars():
    x = pe.tensor(1.0, requires_grad=True)
    y = x
    for _ in range(10_000):
        y = y * x + 0.0
    y.backward()
    assert y.item() == 1
    assert x.grad == 10_001


def test_a_long_chain_is_deleted_without_overflowing_the_stack():
    def build_and_drop():
        y = pe.tensor(1.0, requires_grad=True)
        for _ in range(50_000):
            y = -y
        del y

    build_and_drop()
    previous = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=build_and_drop)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(previous)


def test_a_wide_sum_of_many_uses_of_one_tensor():
    x = pe.tensor(np.ones(3), requires_grad=True)
    parts = [x * k for k in range(2_000)]
    np.sum(ops.stack(parts)).backward()
    np.testing.assert_array_equal(x.grad, np.full(3, 1999 * 2000 / 2))


def test_a_recurrent_network_of_784_steps():
    rng = np.random.default_rng(0)
    steps, batch, hidden = 784, 2, 8
    x = rng.standard_normal((batch, steps, 1)).astype(np.float32)
    labels = np.array([0, 3])
    shapes = [(1, hidden), (hidden, hidden), (hidden,), (hidden, 10)]
    parameters = [rng.standard_normal(shape).astype(np.float32) * 0.2 for shape in shapes]

    def loss(weight, recurrent, bias, output):
        state = np.tanh(x[:, 0] @ weight + bias)
        for t in range(1, steps):
            state = np.tanh(x[:, t] @ weight + state @ recurrent + bias)
        return ops.softmax_cross_entropy(state @ output, labels)

    step = pe.value_and_grad(loss, range(4))
    value, found = step(*parameters)
    compiled_value, compiled = pe.compile(step)(*parameters)
    assert np.isfinite(value) and compiled_value.dtype == np.float32
    np.testing.assert_allclose(compiled_value, value, rtol=1e-5)
    for ours, eager, parameter in zip(compiled, found, parameters, strict=True):
        assert ours.dtype == eager.dtype == np.float32 and ours.shape == parameter.shape
        np.testing.assert_allclose(ours, eager, rtol=1e-3, atol=1e-5)


def test_memory_is_released_with_the_result_and_without_the_garbage_collector():
    x = pe.tensor(np.ones(3), requires_grad=True)
    middle = np.exp(x)
    seen = weakref.ref(middle)
    result = np.sum(middle * x)
    result.backward()
    del middle
    gc.disable()
    try:
        assert seen() is not None
        del result
        assert seen() is None
    finally:
        gc.enable()


# backward -------------------------------------------------------------------------------------------------


def test_backward_adds_to_what_is_there():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    np.sum(x * x).backward()
    np.testing.assert_array_equal(x.grad, [2, 4])
    np.sum(3 * x).backward()
    np.testing.assert_array_equal(x.grad, [5, 7])
    x.grad = None
    np.sum(x).backward()
    np.testing.assert_array_equal(x.grad, [1, 1])


def test_backward_twice_through_one_graph_adds_twice():
    x = pe.tensor(3.0, requires_grad=True)
    y = x * x
    y.backward()
    y.backward()
    assert isinstance(x.grad, np.ndarray) and x.grad == 12


def test_the_stored_gradient_is_memory_of_its_own():
    x = pe.tensor(np.ones(3), requires_grad=True)
    upstream = np.ones(3)
    (x + 0.0).backward(upstream)
    upstream[:] = 9
    np.testing.assert_array_equal(x.grad, [1, 1, 1])
    first = x.grad
    np.sum(x).backward()
    np.testing.assert_array_equal(first, [1, 1, 1])


def test_every_leaf_that_requires_it_gets_a_gradient_and_no_other():
    a, b, c = (pe.tensor(v, requires_grad=r) for v, r in ((2.0, True), (3.0, True), (4.0, False)))
    unused = pe.tensor(1.0, requires_grad=True)
    inner = a * b
    (inner * c).backward()
    assert (a.grad, b.grad, c.grad, unused.grad, inner.grad) == (12, 8, None, None, None)


def test_a_tensor_used_many_times_gets_the_sum():
    x = pe.tensor(2.0, requires_grad=True)
    y = x * x
    (y * y + y * x + x).backward()
    assert x.grad == 4 * 2**3 + 3 * 2**2 + 1


def test_a_leaf_is_its_own_derivative():
    x = pe.tensor(2.0, requires_grad=True)
    x.backward()
    assert x.grad == 1


def test_a_vector_needs_an_upstream_gradient_of_its_shape():
    x = pe.tensor(np.ones((2, 3)), requires_grad=True)
    y = x * 2
    with pytest.raises(ShapeError, match=r"a gradient of shape \(2, 3\) must be given.*\.sum\(\)"):
        y.backward()
    with pytest.raises(ShapeError, match=r"expected a gradient of shape \(2, 3\), got \(3,\)"):
        y.backward(np.ones(3))
    y.backward(np.full((2, 3), 0.5))
    np.testing.assert_array_equal(x.grad, np.ones((2, 3)))


def test_a_constant_has_no_backward():
    with pytest.raises(NotDifferentiableError, match="does not depend on any tensor with requires_grad=True"):
        np.sum(pe.tensor([1.0])).backward()


def test_gradients_are_those_of_pytorch_for_a_whole_network(torch, rng):
    x, w, u = rng.standard_normal((4, 3)), rng.standard_normal((3, 5)), rng.standard_normal((5, 2))
    labels = np.array([0, 1, 1, 0])

    def network(x, w, u, softplus, relu, cross_entropy, labels):
        hidden = softplus(x @ w) - relu(x @ w).T.T
        return cross_entropy(hidden[:, ::1] @ u, labels) + (hidden**2).mean()

    ours = [pe.tensor(a, requires_grad=True) for a in (x, w, u)]
    network(*ours, ops.softplus, ops.relu, ops.softmax_cross_entropy, labels).backward()
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, w, u)]
    f = torch.nn.functional
    network(*theirs, f.softplus, f.relu, f.cross_entropy, torch.tensor(labels)).backward()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.grad, b.grad.numpy(), rtol=1e-12, atol=1e-14)


# Recording ------------------------------------------------------------------------------------------------


def test_no_grad_records_nothing():
    x = pe.tensor(2.0, requires_grad=True)
    with pe.no_grad():
        y = x * x
        with pe.no_grad():
            pass
        z = x * x
    assert not y.requires_grad and not z.requires_grad and y.op is None
    (y * x).backward()
    assert x.grad == 4


def test_recording_goes_on_after_an_error_inside_no_grad():
    x = pe.tensor(2.0, requires_grad=True)
    with pytest.raises(KeyError), pe.no_grad():
        raise KeyError
    assert (x * x).requires_grad


def test_no_grad_holds_in_its_own_thread_only():
    x = pe.tensor(2.0, requires_grad=True)
    seen = []
    with pe.no_grad():
        thread = threading.Thread(target=lambda: seen.append((x * x).requires_grad))
        thread.start()
        thread.join()
    assert seen == [True]


def test_what_is_made_inside_no_grad_is_constant_in_compiled_functions_too():
    def function(x):
        with pe.no_grad():
            scale = np.exp(x)
        return np.sum(scale * x)

    x = np.array([0.5, 1.0])
    np.testing.assert_allclose(pe.grad(function)(x), np.exp(x))
    np.testing.assert_allclose(pe.compile(pe.grad(function))(x), np.exp(x))


def test_a_detached_tensor_is_a_constant():
    x = pe.tensor(3.0, requires_grad=True)
    (x * x.detach()).backward()
    assert x.grad == 3
    np.testing.assert_array_equal(pe.compile(pe.grad(lambda x: np.sum(x * x.detach())))(np.ones(2)), [1, 1])


def test_ops_on_constants_keep_no_graph():
    assert (pe.tensor([1.0]) * 2).op is None


def test_tensors_show_what_they_are():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    assert repr(x) == "Tensor([1., 2.], shape=(2,), dtype=float64)"
    assert "op=mul" in repr(x * 2)
    assert "symbolic" in repr(Tensor.symbol((2,), np.float32))


def test_scopes_nest_and_label_the_gradient_ops_as_well():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    with pe.scope("encoder"), pe.scope("dense"):
        y = np.exp(x)
    z = y * 2
    assert (y.scope, z.scope) == ("encoder/dense", "")
    (found,) = gradients([y], [Tensor(np.ones(2), requires_grad=True)], [x])
    assert found.scope == "encoder/dense"


# Simplification -------------------------------------------------------------------------------------------


def simplified(function, *shapes):
    """The names of the ops left after simplification, which must not change the values."""
    program = trace(lambda *x: [function(*x)], [Tensor.symbol(shape, np.float64) for shape in shapes])
    arrays = [np.random.default_rng(k).standard_normal(shape) for k, shape in enumerate(shapes)]
    expected = function(*map(Tensor, arrays)).numpy()
    program = simplify(program)
    names = [equation.op.name for equation in program.equations]
    np.testing.assert_array_equal(Tape(program)(*arrays)[0], expected)
    return names


def test_equal_ops_are_merged():
    assert simplified(lambda x: np.exp(x) + np.exp(x), (3,)) == ["exp", "add"]
    assert simplified(lambda x: np.sum(x, 0) + np.sum(x, 0), (2, 3)) == ["sum", "add"]


def test_ops_that_differ_in_arguments_or_operands_are_not_merged():
    assert simplified(lambda x: np.sum(x, 0) + np.sum(x, 1), (3, 3)) == ["sum", "sum", "add"]
    assert simplified(lambda x, y: np.exp(x) + np.exp(y), (3,), (3,)) == ["exp", "exp", "add"]
    assert simplified(lambda x: x * 2.0 + x * 3.0, (3,)) == ["mul", "mul", "add"]


def test_arithmetic_on_numbers_is_done_once():
    assert simplified(lambda x: x * (as_tensor(2.0) * 3.0 + 1.0), (3,)) == ["mul"]


def test_factors_of_one_vanish_unless_they_stretch_the_shape():
    assert simplified(lambda x: 1.0 * x * ops.broadcast_to(1.0, (3,)) + 0.5, (3,)) == ["add"]
    assert simplified(lambda x: x * ops.broadcast_to(1.0, (2, 3)), (3,))[-1] == "mul"


def test_views_that_undo_each_other_vanish():
    assert simplified(lambda x: x.T.T + 1.0, (2, 3)) == ["add"]
    assert simplified(lambda x: x.transpose(1, 2, 0).transpose(1, 2, 0) + 1.0, (2, 3, 4)) == ["transpose", "add"]
    assert simplified(lambda x: x.transpose(1, 2, 0).transpose(0, 2, 1) + 1.0, (2, 3, 4)) == ["transpose", "add"]
    assert simplified(lambda x: x.reshape(3, 2).reshape(6).reshape(2, 3) + 1.0, (2, 3)) == ["add"]
    assert simplified(lambda x: x.reshape(6).reshape(3, 2) + 1.0, (2, 3)) == ["reshape", "add"]


def test_identities_and_detachments_vanish_after_their_work_is_done():
    assert simplified(lambda x: ops.identity(x.detach()) + 1.0, (3,)) == ["add"]


def test_only_floats_can_be_given_requires_grad():
    for x in (pe.tensor([1, 2]), pe.tensor([True])):
        with pytest.raises(DTypeError, match="only float32 and float64 tensors have a gradient"):
            x.requires_grad = True
        x.requires_grad = False
        assert not x.requires_grad
