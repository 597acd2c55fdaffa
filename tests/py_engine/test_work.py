"""Every op's record says how many operations it is made of, and which bytes it moves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from py_engine import ops
from py_engine.ad.op import TABLE, Equation
from py_engine.ad.program import trace
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError


def equations(function, *shapes, dtype=np.float32):
    return trace(lambda *x: [function(*x)], [Tensor.symbol(shape, dtype) for shape in shapes]).equations


def test_every_op_that_is_not_fused_says_its_operations():
    silent = [
        name
        for name, op in TABLE.items()
        if not op.fused and op.flops is None and not op.elementwise and op.view is None and not op.opaque
    ]
    assert silent == []


def test_an_elementwise_op_has_one_operation_for_each_result_and_moves_operands_and_result_once():
    (one,) = equations(lambda a, b: a * b, (5, 3), (3,))
    assert (one.flops, one.bytes) == (15, 4 * (15 + 3 + 15))


def test_a_view_does_and_moves_nothing():
    (one,) = equations(lambda a: a.reshape((15,)), (5, 3))
    assert (one.flops, one.bytes) == (0, 0)


@pytest.mark.parametrize("a, b", [((4, 5), (5, 6)), ((3, 4, 5), (5, 6)), ((2, 1, 4, 5), (3, 5, 6))])
def test_a_product_has_two_for_each_term(a, b):
    (one,) = (each for each in equations(ops.matmul, a, b) if each.op.product)
    stacked = math.prod(np.broadcast_shapes(a[:-2], b[:-2]))
    assert one.flops == 2 * stacked * a[-2] * a[-1] * b[-1]
    (same,) = (each for each in equations(lambda x, y: ops.einsum("...ij,...jk->...ik", x, y), a, b) if each.op.product)
    assert same.flops == one.flops


def test_a_convolution_and_both_of_its_gradients_have_as_many():
    at = {"stride": 2, "padding": ((1, 0), (2, 2)), "dilation": (1, 2), "groups": 2}
    x, w = (3, 4, 9, 10), (6, 2, 3, 2)
    (forward,) = (each for each in equations(lambda a, b: ops.conv(a, b, **at), x, w) if each.op.product)
    filled = np.pad(np.ones(x[2:]), at["padding"])  # 1 where there is an element
    terms = sum(filled[2 * i + k, 2 * j + 2 * m] for i, j, k, m in np.ndindex(*forward.output.shape[2:], *w[2:]))
    assert forward.flops == 2 * 3 * 6 * 2 * terms
    g = Tensor.symbol(forward.output.shape, np.float32)
    by_input, by_weight = forward.op.pull((g,), (True, True), forward.output)
    for gradient in (by_input, by_weight):
        assert Equation(gradient.op, gradient.inputs, gradient.attrs, (gradient,), "").flops == forward.flops


def test_rows_that_are_looked_up_are_all_that_is_read_of_a_table():
    table, ids = Tensor.symbol((1000, 8), np.float32), Tensor.symbol((4,), np.int64)
    (one,) = trace(lambda a, i: [ops.embedding(a, i)], [table, ids]).equations
    assert (one.flops, one.bytes) == (0, 2 * 4 * 8 * 4 + 4 * 8)
    (one,) = trace(lambda a, i: [a[i]], [table, ids]).equations
    assert (one.flops, one.bytes) == (0, 2 * 4 * 8 * 4 + 4 * 8)


def test_what_an_op_does_not_say_is_an_error_that_names_it():
    (one,) = equations(ops.tanh, (3,))
    silent = Equation(TABLE["columns"], one.inputs, {}, one.outputs, "conv")
    with pytest.raises(ConfigurationError, match="the op 'columns' in layer 'conv' does not say"):
        _ = silent.flops


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("padding", [(0, 0), (2, 0), (4, 7), (11, 11)])
@pytest.mark.parametrize(("length", "kernel"), [(9, 1), (9, 3), (7, 4), (12, 4)])
def test_products_of_a_kernel_with_padding_do_not_count(stride, dilation, padding, length, kernel):
    if length + sum(padding) < (kernel - 1) * dilation + 1:
        pytest.skip("does not apply: no window")
    at = {"stride": (stride,), "padding": (padding,), "dilation": (dilation,), "groups": 1}
    (one,) = equations(lambda a, b: ops.conv(a, b, **at), (1, 1, length), (1, 1, kernel))
    outputs = one.output.shape[2]
    there = sum(0 <= o * stride + j * dilation - padding[0] < length for o in range(outputs) for j in range(kernel))
    assert one.flops == 2 * there


def test_to_count_the_products_of_a_long_convolution_takes_no_time_of_its_length():
    def conv(a, b):
        return ops.conv(a, b)

    (one,) = equations(conv, (1, 1, 10**9), (1, 1, 512))
    assert one.flops == 2 * 512 * (10**9 - 511)
