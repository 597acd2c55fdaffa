"""Tensors in numpy's own functions and Python's operators: right results, or an error that says what is missing.

What must never happen is a result without its derivative.
"""

from __future__ import annotations

import math
import operator
import re

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.errors import DTypeError, EngineError, NotDifferentiableError, ShapeError, TraceError

A = np.array([[0.5, -0.25, 0.75], [0.1, 0.9, -0.6]])
B = np.array([[0.3, 0.2, -0.4], [0.7, -0.8, 0.6]])


# numpy's functions ----------------------------------------------------------------------------------------

# Values, shapes and arguments of all stand-ins are compared with numpy's in test_numpy_sweep.py.


@pytest.mark.parametrize(
    "call",
    [
        lambda x: np.fft.fft(x),
        lambda x: np.linalg.eig(x),
        lambda x: np.put(x, [0], 1.0),
        lambda x: np.roots(x[0]),
        lambda x: np.power.accumulate(x),
        lambda x: np.arctan2.reduce(x),
        lambda x: np.add.at(A.copy(), [0], x),
        lambda x: np.unique_values(x),
        lambda x: np.sin(x, out=np.empty((2, 3))),
        lambda x: np.sin(x, where=A > 0),
        lambda x: np.add(x, B, dtype=np.int64),
        lambda x: np.asarray(x),
        lambda x: np.array([x, x]),
        lambda x: np.array(x, np.float32),
    ],
)
def test_what_has_no_op_says_so_instead_of_losing_the_derivative(call):
    with pytest.raises(TypeError) as caught:
        call(pe.tensor(A, requires_grad=True))
    assert "derivative" in str(caught.value) or "does not take" in str(caught.value) or "%" in str(caught.value)
    with pytest.raises(TypeError):
        pe.compile(call)(A)


def filled(x):
    squares = np.zeros(3)
    for i in range(3):
        squares[i] = x[0, i] ** 2
    return np.sum(squares)


@pytest.mark.parametrize("function", [lambda x: math.sin(x[0, 0]), lambda x: float(x[0, 0]) ** 2, filled])
@pytest.mark.parametrize(
    "transform",
    [
        pe.grad,
        lambda f: lambda x: pe.jvp(f, (x,), (x,)),
        lambda f: lambda x: pe.hessian(f, x),
        lambda f: pe.compile(pe.grad(f)),
    ],
    ids=["grad", "jvp", "hessian", "compiled"],
)
def test_a_float_of_a_variable_says_that_its_derivative_would_be_lost(function, transform):
    with pytest.raises((NotDifferentiableError, ValueError)) as caught:  # numpy has its own error, caused by ours
        transform(function)(A)
    error = caught.value if isinstance(caught.value, NotDifferentiableError) else caught.value.__cause__
    assert re.search(r"Python float .* lose its derivative; take \.item\(\) .*np\.stack", str(error))


def test_a_float_of_what_has_no_derivative_is_only_a_number():
    np.testing.assert_array_equal(
        pe.grad(lambda x: np.sum(x) * float(pe.stop_gradient(x)[0, 0]))(A), np.full(A.shape, A[0, 0])
    )
    w = pe.tensor(2.0, requires_grad=True)
    (w * w).backward()
    assert float(w) + float(w.grad) == 6.0


def test_the_message_names_the_function_and_the_way_out():
    with pytest.raises(NotDifferentiableError, match=r"numpy\.fft\.fft is not in the op table.*\.numpy\(\)"):
        np.fft.fft(pe.tensor(A))
    with pytest.raises(
        NotDifferentiableError, match=r"numpy\.linalg\.eig is refused .* its result is complex.*\.numpy\(\)"
    ):
        np.linalg.eig(pe.tensor(A))
    with pytest.raises(NotDifferentiableError, match=r"numpy\.put is refused .* writes into its argument"):
        np.put(pe.tensor(A), [0], 1.0)
    with pytest.raises(NotDifferentiableError, match=r"numpy\.add\.at is refused .* writes into its argument"):
        np.add.at(A.copy(), [0], pe.tensor(A))
    with pytest.raises(NotDifferentiableError, match=r"numpy\.power\.accumulate is not"):
        np.power.accumulate(pe.tensor(A))
    with pytest.raises(NotDifferentiableError, match=r"numpy\.sin on tensors does not take where"):
        np.sin(pe.tensor(A), where=A > 0)


def test_a_constant_tensor_is_an_array_to_numpy():
    np.testing.assert_array_equal(np.asarray(pe.tensor(A)), A)
    with pe.no_grad():
        np.testing.assert_array_equal(np.asarray(pe.tensor(A, requires_grad=True)), A)


def test_reductions_of_ufuncs_default_to_the_first_axis_as_in_numpy():
    assert np.add.reduce(pe.tensor(A)).shape == (3,)
    assert np.sum(pe.tensor(A)).shape == ()


def test_an_array_is_not_changed_in_place_by_a_tensor():
    a = A.copy()
    with pytest.raises(NotDifferentiableError, match="does not take out"):
        a += pe.tensor(B)
    np.testing.assert_array_equal(a, A)


# Operators ------------------------------------------------------------------------------------------------

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize("operate", ARITHMETIC + COMPARISONS)
@pytest.mark.parametrize("other", [abs(B), 2.0, 2, np.float64(0.5), abs(B).tolist()], ids=type)
def test_operators_on_either_side(operate, other):
    a = abs(A)
    x = pe.tensor(a, requires_grad=True)
    expected = operate(a, np.asarray(other)), operate(np.asarray(other), a)
    for result, value in zip((operate(x, other), operate(other, x)), expected, strict=True):
        assert isinstance(result, Tensor)
        assert result.dtype == value.dtype
        np.testing.assert_allclose(result.numpy(), value, rtol=1e-15)


def test_matmul_with_an_array_on_either_side():
    x = pe.tensor(A, requires_grad=True)
    np.testing.assert_allclose((x @ B.T).numpy(), A @ B.T)
    np.testing.assert_allclose((B.T @ x).numpy(), B.T @ A)
    assert (B.T @ x).requires_grad


def test_an_array_times_a_tensor_is_one_tensor_with_the_right_gradient():
    x = pe.tensor(A, requires_grad=True)
    product = B * x
    assert isinstance(product, Tensor) and product.shape == A.shape
    product.backward(np.ones(A.shape))
    np.testing.assert_array_equal(x.grad, B)


def test_negation_and_absolute_value():
    x = pe.tensor(A)
    np.testing.assert_array_equal((-x).numpy(), -A)
    np.testing.assert_array_equal(abs(x).numpy(), abs(A))


def test_comparing_tensors_leaves_them_usable_as_keys():
    x, y = pe.tensor(A), pe.tensor(A)
    assert {x: 1, y: 2}[x] == 1 and len({x, y}) == 2


def test_methods_are_those_of_arrays():
    x = pe.tensor(A)
    np.testing.assert_array_equal(x.T.numpy(), A.T)
    np.testing.assert_array_equal(x.reshape(3, 2).numpy(), A.reshape(3, 2))
    np.testing.assert_array_equal(x.reshape((3, -1)).numpy(), A.reshape(3, -1))
    np.testing.assert_array_equal(x.transpose().numpy(), A.T)
    np.testing.assert_array_equal(x.transpose(1, 0).numpy(), A.T)
    np.testing.assert_array_equal(x.transpose((1, 0)).numpy(), A.T)
    np.testing.assert_array_equal(x[:, :1].squeeze(1).numpy(), A[:, 0])
    for name in ("sum", "mean", "max", "min", "var"):
        np.testing.assert_allclose(getattr(x, name)(axis=1, keepdims=True).numpy(), getattr(A, name)(1, keepdims=True))
    np.testing.assert_allclose(x.dot(B.T).numpy(), A.dot(B.T))
    assert x.astype(np.float32).dtype == np.float32
    assert (x.ndim, x.size, x.nbytes, len(x)) == (A.ndim, A.size, A.nbytes, len(A))
    assert [row.shape for row in x] == [(3,), (3,)]


def test_scalars_convert_to_python():
    x = pe.tensor(2.5)
    assert (float(x), int(x), x.item(), bool(x)) == (2.5, 2, 2.5, True)
    with pytest.raises(TypeError, match="no length"):
        len(x)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(pe.tensor(A))


def test_writing_into_a_tensor_is_refused():
    x = pe.tensor(A, requires_grad=True)
    with pytest.raises(TypeError, match="cannot be written in place"):
        x[0] = 1.0
    with pytest.raises(TraceError, match="leaf tensors, this one was computed by mul"):
        (x * 2).assign(B)
    x.assign(B)
    np.testing.assert_array_equal(x.numpy(), B)


# dtypes ---------------------------------------------------------------------------------------------------

MIXED = [
    lambda x, y: x + y,
    lambda x, y: y * x,
    lambda x, y: np.maximum(x, y),
    lambda x, y: x @ y.T,
    lambda x, y: np.dot(x, y.T),
    lambda x, y: np.tensordot(x, y),
    lambda x, y: np.einsum("ij,ij", x, y),
    lambda x, y: np.concatenate([x, y]),
    lambda x, y: np.stack([x, y]),
    lambda x, y: np.where(A > 0, x, y),
    lambda x, y: x < y,
    lambda x, y: ops.mean_squared_error(x, y),
]


@pytest.mark.parametrize("mix", MIXED)
def test_float32_and_float64_are_not_mixed(mix):
    single, double = A.astype(np.float32), A
    for x, y in [(pe.tensor(single), pe.tensor(double)), (pe.tensor(single), double), (single, pe.tensor(double))]:
        with pytest.raises(DTypeError, match=r"float32.*float64|float64.*float32"):
            mix(x, y)
    with pytest.raises(TypeError):
        pe.compile(mix)(single, double)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), True])
def test_numbers_take_the_dtype_of_the_array_beside_them(dtype, number):
    x = pe.tensor(A, dtype, requires_grad=True)
    for result in (x * number, number * x, x**number, np.where(A > 0, number, x), np.clip(x, -number, number)):
        assert result.dtype == dtype
    y = np.sum(x * number / np.sqrt(64) + np.mean(A))
    y.backward()
    assert x.grad.dtype == dtype


def test_an_array_without_axes_is_not_a_number():
    with pytest.raises(DTypeError, match="float32 and float64"):
        pe.tensor(A, np.float32) * np.array(2.0)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_integers_and_booleans_have_no_gradient(dtype):
    with pytest.raises(
        DTypeError, match=f"only float32 and float64 tensors have a gradient, this one is {dtype.__name__}"
    ):
        pe.tensor([0, 1], dtype, requires_grad=True)
    with pytest.raises(NotDifferentiableError, match=f"argument 0 is of {dtype.__name__}"):
        pe.grad(lambda i: np.sum(i))(np.zeros(2, dtype))
    with pytest.raises(NotDifferentiableError, match="does not depend on any tensor with requires_grad"):
        pe.tensor([0, 1], dtype).backward([1, 1])


def test_integers_compute_with_integers_and_whole_numbers():
    i = pe.tensor([1, 2, 3])
    assert (i + 1).dtype == (2 * i - i).dtype == (-i).dtype == np.int64
    np.testing.assert_array_equal((i + 1).numpy(), [2, 3, 4])
    np.testing.assert_array_equal((i == 2).numpy(), [False, True, False])


WHOLE, TRUE = np.array([[3, 1, 2], [5, 0, 4]]), A > 0.4
BESIDE_FLOATS = {
    "numbers": lambda x, i, b: (
        i * 0.5,
        i + np.float64(2),
        b * 2,
        b + 0.5,
        i + True,
        i / 2,
        b / np.sum(b),
        2 / (i + 1),
    ),
    "arithmetic": lambda x, i, b: (x + i, b * x, x - np.sum(b), x / np.sum(x > 0.4), x**i, i % x, x // (i + 1)),
    "functions": lambda x, i, b: (np.arctan2(i, x), np.maximum(i, x), np.logaddexp(x, i), np.exp(i), np.sqrt(i)),
    "comparisons": lambda x, i, b: (i < x, np.isclose(i, x), np.equal(x, b), np.searchsorted(np.sort(x[0]), i)),
    "choices": lambda x, i, b: (np.where(b, i, x), np.select([b], [i], x), np.clip(x, b, i), np.clip(i, 1, None)),
    "joining": lambda x, i, b: (np.concatenate([i, x]), np.stack([x, b]), np.append(x, i), np.insert(x, 0, i[0])),
    "products": lambda x, i, b: (
        i @ x.T,
        np.dot(x, [1, 2, 3]),
        np.outer(x, i),
        np.einsum("ij,kj", x, i),
        np.kron(b, x),
    ),
    "systems": lambda x, i, b: (
        np.linalg.solve(x[:, :2] + 2 * np.eye(2, dtype=int), i),
        np.linalg.pinv(x - np.eye(2, 3, dtype=int)),
    ),
    "curves": lambda x, i, b: (np.interp(x, [0, 1], [2, 3]), np.polyval([1, 2, 3], x), np.convolve(x[0], [1, 2, 1])),
    "whole numbers": lambda x, i, b: (i + b, np.maximum(i, 2), abs(i - 3), np.sign(i), i + np.argmax(x), b + 2),
}
"""Whole numbers and truth values beside float64, and what of theirs has one result in numpy."""


@pytest.mark.parametrize("function", BESIDE_FLOATS.values(), ids=BESIDE_FLOATS)
def test_whole_numbers_and_truth_values_become_float64_beside_it_as_numpys(function):
    expected = function(A, WHOLE, TRUE)
    for found in (function(pe.tensor(A), pe.tensor(WHOLE), pe.tensor(TRUE)), pe.compile(function)(A, WHOLE, TRUE)):
        for value, wanted in zip(found, expected, strict=True):
            value = value.numpy() if isinstance(value, pe.Tensor) else value
            assert value.dtype == np.asarray(wanted).dtype
            np.testing.assert_allclose(value, wanted, rtol=1e-14, atol=1e-15)


def test_float32_beside_whole_numbers_is_mixed_where_numpy_keeps_it():
    x = pe.tensor(A, np.float32)
    for other in (TRUE, WHOLE.astype(np.int8), WHOLE.astype(np.uint16)):
        assert (x * other).dtype == (other + x).dtype == np.float32
    for other in (WHOLE, WHOLE.astype(np.int32)):  # of which numpy makes float64
        with pytest.raises(DTypeError, match=f"float32 and {other.dtype} cannot be mixed"):
            x * other


def test_the_gradient_passes_by_whole_numbers_and_masks():
    def mean_of_large(x, steps):
        large = x > 0.4
        return np.sum(x**2 * large * steps) / np.sum(large) + np.mean(x * np.arange(3))

    expected = 2 * A * TRUE * WHOLE / TRUE.sum() + np.arange(3) / 6
    for run in (pe.grad(mean_of_large), pe.compile(pe.grad(mean_of_large))):
        np.testing.assert_allclose(run(A, WHOLE), expected, rtol=1e-14)
    both = pe.vmap(pe.grad(mean_of_large), (0, None))(np.stack([A, A]), WHOLE)
    np.testing.assert_allclose(both, [expected] * 2, rtol=1e-14)
    _, tangent = pe.jvp(mean_of_large, (A, WHOLE), (np.ones_like(A), None))
    np.testing.assert_allclose(tangent, expected.sum(), rtol=1e-14)
    times = pe.compile(lambda x, n: x * n + (x > 1) * (n > 2))  # on single numbers
    assert times(2.5, np.array(3)) == 8.5


@pytest.mark.parametrize("function", [np.floor, np.reciprocal, ops.softmax, ops.logsumexp, ops.relu])
def test_what_is_defined_for_floats_refuses_integers(function):
    with pytest.raises(DTypeError, match="expected float32 or float64, got int64"):
        function(pe.tensor([1, 2, 3]))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_])
def test_integers_become_float64_where_numpy_makes_it_of_them(dtype):
    x, square = np.array([3, 0, 2, 1]).astype(dtype), np.array([[2, 1], [0, 3]]).astype(dtype)
    for function in (np.median, np.nanmean, np.nanstd, np.average, np.cov, np.linalg.norm, np.linalg.vector_norm):
        assert_same(function(Tensor(x)), function(x))
    for function in (np.linalg.inv, np.linalg.det, np.linalg.svdvals, np.linalg.pinv, np.linalg.cond):
        assert_same(function(Tensor(square)), function(square))
    assert_same(np.linalg.solve(Tensor(square), x[:2]), np.linalg.solve(square, x[:2]))
    assert_same(np.linalg.qr(Tensor(square))[1], np.linalg.qr(square)[1])
    for compiled in (np.median, np.linalg.norm):
        assert_same(pe.compile(compiled)(x), compiled(x))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_integers_stay_integers_where_numpy_keeps_them(dtype):
    x, matrix = np.array([3, 0, 2, 1]).astype(dtype), np.array([[2, 1], [0, 3]]).astype(dtype)
    calls = (
        *(lambda x: x**2, lambda x: np.power(x, 3), lambda x: round(x), lambda x: np.round(x, 2)),
        *(lambda x: x @ x, lambda x: np.dot(x, x), lambda x: np.inner(x, x), lambda x: np.convolve(x, x[:2])),
        *(np.nansum, np.nanmax, np.nancumprod, np.nan_to_num, lambda x: np.fmax(x, x[::-1])),
        *(lambda x: np.polyval(x, x), lambda x: np.polyder(x), lambda x: np.quantile(x, 0.4, method="lower")),
        lambda x: np.percentile(x, [10, 90], method="nearest"),
    )
    for call in calls:
        expected = call(x) if call is not calls[2] else np.round(x)
        assert_same(call(Tensor(x)), expected)
        assert_same(pe.compile(call)(x), expected)
    assert_same(Tensor(matrix) @ matrix, matrix @ matrix)
    for refused in (lambda i: 2**i, lambda i: i**i):
        with pytest.raises(DTypeError, match=f"powers of {np.dtype(dtype)} are those of a number that is not negative"):
            refused(Tensor(x))
    with pytest.raises(DTypeError, match=r"not negative|the number -1 does not fit uint8"):
        Tensor(x) ** -1
    with pytest.raises(DTypeError, match="expected numbers, got truth values"):  # of which numpy makes int8
        Tensor(x > 1) ** 2


def assert_same(found, expected):
    found = found.numpy() if isinstance(found, Tensor) else np.asarray(found)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)


def test_numbers_of_one_element_are_those_of_python():
    x = pe.tensor([[1.23456]], requires_grad=True)
    assert (f"{x:.3f}", int(x), bool(x), x.item()) == ("1.235", 1, True, 1.23456)
    rounded = round(pe.tensor([1.255, -2.5]), 1)
    np.testing.assert_array_equal(rounded.numpy(), np.round([1.255, -2.5], 1))
    np.testing.assert_array_equal(round(pe.tensor([0.5, 1.5])).numpy(), [0, 2])
    assert pe.compile(lambda x: round(x, 2))(0.126) == 0.13
    with pytest.raises(ShapeError, match="only a tensor of one element is a Python number"):
        _ = f"{pe.tensor([1.0, 2.0]):.1f}"


def test_conversion_between_floats_carries_the_gradient_back():
    x = pe.tensor(A, np.float32, requires_grad=True)
    np.sum(x.astype(np.float64) * B).backward()
    assert x.grad.dtype == np.float32
    np.testing.assert_allclose(x.grad, B, rtol=1e-7)


def test_conversion_to_integers_ends_the_gradient():
    x = pe.tensor(A, requires_grad=True)
    assert not (x > 0).requires_grad
    assert not x.astype(np.int64).requires_grad
    gradient = pe.grad(lambda x: np.sum(x.astype(np.int64).astype(np.float64)) + np.sum(x))
    np.testing.assert_array_equal(gradient(A), np.ones(A.shape))
    np.testing.assert_array_equal(pe.compile(gradient)(A), np.ones(A.shape))


@pytest.mark.parametrize("true", [True, np.bool_(True), np.array(True)], ids=["bool", "numpy bool", "array"])
def test_one_truth_value_is_a_condition_and_goes_with_others(true):
    x = pe.tensor([1.0, 2.0])
    np.testing.assert_array_equal(np.where(true, x, -x).numpy(), [1, 2])
    np.testing.assert_array_equal(((x > 1) * true).numpy(), [False, True])


def test_where_needs_a_boolean_condition():
    with pytest.raises(DTypeError, match=r"boolean condition, got int64; compare, e.g. x > 0"):
        np.where(pe.tensor([0, 1]), 1.0, pe.tensor([2.0, 3.0]))


# Shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x + np.zeros((4,)), r"add: shapes \(2, 3\) and \(4,\) cannot be broadcast"),
        (lambda x: x @ x, r"matmul: shapes \(2, 3\) and \(2, 3\) do not fit: 3 columns, 2 rows"),
        (lambda x: x @ np.array(2.0), r"matmul: at least one axis is needed"),
        (lambda x: np.zeros((4, 3, 2)) @ (np.ones((3, 1, 1)) * x), r"the leading axes of shapes .* do not fit"),
        (lambda x: np.sum(x, axis=2), "axis 2 does not fit an array of 2 dimensions"),
        (lambda x: np.sum(x, axis=(0, -2)), r"axis \(0, -2\) does not fit"),
        (lambda x: np.reshape(x, (4, 2)), r"shape \(2, 3\) \(6 elements\) cannot be reshaped to \(4, 2\)"),
        (lambda x: np.reshape(x, (-1, 4)), "cannot be reshaped"),
        (lambda x: np.transpose(x, (0, 0)), "no permutation of the 2 axes"),
        (lambda x: np.swapaxes(x, 0, 2), r"swapaxes: axis 2 does not exist in shape \(2, 3\)"),
        (lambda x: np.moveaxis(x, 0, 3), "moveaxis: destination: axis 3 is out of bounds"),
        (lambda x: np.squeeze(x, 0), "squeeze: .*not equal to one"),
        (lambda x: np.expand_dims(x, 4), "expand_dims: axis 4 is out of bounds"),
        (lambda x: np.broadcast_to(x, (3, 2)), r"shape \(2, 3\) cannot be broadcast to \(3, 2\)"),
        (lambda x: np.concatenate([x, x.T]), r"concatenate: shapes \(2, 3\) and \(3, 2\) do not match outside axis 0"),
        (lambda x: np.concatenate([x, x], axis=2), r"concatenate: axis 2 does not exist in shape \(2, 3\)"),
        (lambda x: np.stack([x, x.T]), r"stack: all shapes must be equal, got \(2, 3\) and \(3, 2\)"),
        (lambda x: np.stack([x], axis=3), "stack: axis 3 does not exist"),
        (lambda x: np.pad(x, -1), "pad: widths must not be negative"),
        (lambda x: np.max(x[:, :0], axis=1), "no largest or smallest element along an empty axis"),
        (lambda x: np.tensordot(x, x, axes=1), "do not pair up"),
        (lambda x: np.einsum("ij,jk", x, x), "subscript 'j' stands for both 3 and 2"),
        (lambda x: np.einsum("ij,ij", x), "names 2 operands, got 1"),
        (lambda x: np.einsum("ij->k", x), "must use letters of 'ij'"),
        (lambda x: np.einsum("ijk", x), "do not fit an operand of shape"),
        (lambda x: ops.mean_squared_error(x, x[0]), r"\(2, 3\) and targets of shape \(3,\) differ"),
        (lambda x: ops.binary_cross_entropy(x, x[0]), r"\(2, 3\) and targets of shape \(3,\) differ"),
        (lambda x: ops.softmax_cross_entropy(x, np.zeros(3, int)), r"need labels of shape \(2,\), got \(3,\)"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_listed(call, message):
    with pytest.raises(ShapeError, match=message):
        call(pe.tensor(A))
    with pytest.raises(ShapeError, match=message):
        pe.compile(call)(A)


def test_errors_name_the_layer_they_happen_in():
    with pe.scope("encoder"), pe.scope("rnn"), pytest.raises(ShapeError, match="add in layer 'encoder/rnn': shapes"):
        pe.tensor(A) + np.zeros(4)


@pytest.mark.parametrize("call", [lambda x: np.pad(x, 1, mode="empty"), lambda x: np.linalg.qr(x, "raw")])
def test_options_of_numpy_that_are_missing_are_named(call):
    with pytest.raises(ValueError, match=r"only the modes|mode is 'reduced', 'complete' or 'r', got 'raw'"):
        call(pe.tensor(A))


OF_SCIPY = {
    **dict.fromkeys(("erf", "erfc", "gammaln", "psi", "expit", "logit", "gamma", "rgamma", "erfinv", "erfcinv"), 1),
    **dict.fromkeys(("j0", "j1", "y0", "y1", "i0", "i1", "ndtr", "log_ndtr", "log_expit", "erfcx"), 1),
    **dict.fromkeys(("beta", "betaln", "xlogy", "xlog1py"), 2),
}


@pytest.mark.parametrize("name", OF_SCIPY)
def test_ufuncs_of_scipy(name):
    function = getattr(pytest.importorskip("scipy.special"), name)
    operands = [np.array([0.25, 0.5, 0.8125]), np.array([0.75, 1.25, 0.5])][: OF_SCIPY[name]]
    np.testing.assert_allclose(function(*map(Tensor, operands)).numpy(), function(*operands), rtol=1e-13)
    np.testing.assert_allclose(pe.compile(function)(*operands), function(*operands), rtol=1e-13)
    pe.gradcheck(function, *operands)


@pytest.mark.parametrize("name", ["gammainc", "gammaincc", "jv", "yn", "iv", "ive"])
def test_ufuncs_of_scipy_by_their_last_operand(name):
    function = getattr(pytest.importorskip("scipy.special"), name)
    pe.gradcheck(lambda x: function(2.0, x), np.array([0.5, 1.5, 2.5]))


EDGES_OF_SCIPY = {
    "rgamma at the poles of the gamma function": ("rgamma", (np.array([0.0, -1.0, -2.0, -3.0]),), [1, -1, 2, -6]),
    "psi far below 0": ("psi", (np.array([-1e12 - 0.5, -1e12 - 0.25]),), [np.pi**2, 2 * np.pi**2]),
    "gammaln far below 0": ("gammaln", (np.array([-1e12 - 0.5, -1e12 - 0.25]),), [np.log(1e12), np.log(1e12) + np.pi]),
    "psi at its poles": ("psi", (np.array([0.0, -1.0]),), [np.inf, np.inf]),
    "gammainc at 0": ("gammainc", (1.0, np.array([0.0, 2.0])), [1, np.exp(-2)]),
    "betainc at both ends": ("betainc", (1.0, 1.0, np.array([0.0, 0.5, 1.0])), [1, 1, 1]),
    "log_ndtr far below 0": ("log_ndtr", (np.array([-1e10, -1e5]),), [1e10, 1e5 + 1e-5]),
    "xlogy of nothing": ("xlogy", (0.0, np.array([0.0, 0.5])), [0, 0]),
}


@pytest.mark.parametrize("case", EDGES_OF_SCIPY)
def test_ufuncs_of_scipy_have_derivatives_at_the_edges(case):
    name, (*given, x), expected = EDGES_OF_SCIPY[case]
    function = getattr(pytest.importorskip("scipy.special"), name)
    for grad in (pe.grad, lambda f: pe.compile(pe.grad(f))):
        found = grad(lambda x: np.sum(function(*given, x)))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "given", "x", "expected"),
    [
        ("gammainc", (1.0,), [0.0, 1.0, np.inf], [-1, -np.exp(-1), 0]),
        ("gammainc", (2.0,), [0.0, 1.0, 2.0], [1, 0, -np.exp(-2)]),
        ("gammaincc", (3.0,), [0.0, 2.0], [0, 0]),
        ("betainc", (1.0, 1.0), [0.0, 0.5, 1.0], [0, 0, 0]),
        ("betainc", (2.0, 2.0), [0.0, 0.5, 1.0], [6, 0, -6]),
        ("betainc", (1.0, 2.0), [0.0, 0.5, 1.0], [-2, -2, -2]),
    ],
)
def test_second_derivatives_of_distribution_functions_at_the_edges(name, given, x, expected):
    function = getattr(pytest.importorskip("scipy.special"), name)
    for run in (lambda f: f, pe.compile):
        second = run(pe.grad(lambda x: np.sum(pe.grad(lambda x: np.sum(function(*given, x)))(x))))(np.array(x))
        np.testing.assert_allclose(second, expected, rtol=1e-9, atol=1e-12)


def test_engine_errors_are_also_the_builtin_ones():
    assert issubclass(ShapeError, ValueError) and issubclass(DTypeError, TypeError)
    assert issubclass(ShapeError, EngineError) and issubclass(TraceError, RuntimeError)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0, 1.1, -0.0, np.inf, np.nan, 1e6, (1, 2), ((1, 2), (3, 4))])
@pytest.mark.parametrize("width", [1, (2, 0), ((0, 1), (2, 3)), {1: (1, 2)}])
def test_padding_copies_each_element_as_it_is(dtype, value, width):
    x = np.array([[np.inf, -0.0, 1e30], [0.1, np.nan, 1e-30]]).astype(dtype)

    def padded(x):
        return np.pad(x, width, constant_values=value)

    for result in (padded(pe.tensor(x)).numpy(), pe.compile(padded)(x)):
        assert result.tobytes() == padded(x).tobytes() and result.dtype == dtype
    weights = np.arange(padded(x).size, dtype=dtype).reshape(padded(x).shape)
    rows, columns = np.nonzero(np.pad(np.ones(x.shape), width))
    gradient = pe.grad(lambda x: np.sum(np.where(np.isfinite(padded(x)), padded(x), 0) * weights))(x)
    np.testing.assert_array_equal(gradient, weights[rows, columns].reshape(x.shape) * np.isfinite(x))


# Labels ---------------------------------------------------------------------------------------------------


def test_labels_out_of_range_are_named_with_their_row():
    with pytest.raises(pe.errors.LabelError, match=r"label 3 in row 1 is not one of the 3 classes 0\.\.2"):
        ops.softmax_cross_entropy(A, np.array([0, 3]))
    with pytest.raises(pe.errors.LabelError, match="label -1 in row 0"):
        ops.softmax_cross_entropy(A, np.array([-1, 3]))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_labels_may_be_of_any_integer_type(dtype):
    labels = np.array([2, 0], dtype)
    expected = ops.softmax_cross_entropy(A, np.array([2, 0])).item()
    assert ops.softmax_cross_entropy(A, labels).item() == expected
    np.testing.assert_allclose(pe.compile(ops.softmax_cross_entropy)(A, labels), expected, rtol=1e-15)


def test_labels_must_be_integers():
    with pytest.raises(DTypeError, match="expected integer labels, got float64"):
        ops.softmax_cross_entropy(A, np.array([0.0, 1.0]))


def test_dropout_rates_out_of_range_are_refused():
    for rate in (-0.1, 1.0, np.nan):
        with pytest.raises(pe.errors.ConfigurationError, match="at least 0 and below 1"):
            ops.dropout(A, rate, np.random.default_rng(0))


def test_an_index_of_a_plain_array_that_is_traced_is_refused_with_what_to_write_instead():
    table = np.array([1.0, 2.0, 4.0])
    for refused in (lambda x: np.take(table, np.argmax(x)), lambda x: table[np.searchsorted(x, [0.5])]):
        with pytest.raises(TraceError, match=r"py_engine.tensor\(a\)\[x\], py_engine.ops.take\(a, x\)"):
            pe.compile(refused)(A[0])
    for taken in (lambda x: ops.take(table, np.argmax(x)), lambda x: pe.tensor(table)[np.argmax(x)]):
        assert pe.compile(taken)(A[0]) == 4.0


def test_short_and_long_kernels_are_convolved_alike():
    rng = np.random.default_rng(2)
    x, g = rng.standard_normal(40), rng.standard_normal(72)
    for size in (1, 2, 16, 17, 33):  # up to 16 elements, and more
        kernel = rng.standard_normal(size)
        for mode in ("full", "same", "valid"):
            for function in (np.convolve, np.correlate):
                expected = function(x, kernel, mode)

                def loss(x, kernel, function=function, mode=mode, n=expected.size):
                    return np.sum(function(x, kernel, mode) ** 2 * g[:n])

                np.testing.assert_allclose(function(pe.tensor(x), kernel, mode).numpy(), expected, atol=1e-12)
                pe.gradcheck(loss, x, kernel, directions=1)


WITH_NUMPYS_NUMBERS = {
    "uint8 times int64": (lambda x: x * np.int64(2), np.array([200, 100], np.uint8)),
    "uint8 plus int16": (lambda x: x + np.int16(100), np.array([200, 100], np.uint8)),
    "uint8 plus Python's": (lambda x: x + 1, np.array([200, 100], np.uint8)),
    "int32 times int64": (lambda x: x * np.int64(4), np.array([2**30, 3], np.int32)),
    "int32 times float32": (lambda x: x * np.float32(2.5), np.array([2**30, 3], np.int32)),
    "int8 times float32": (lambda x: x * np.float32(2.5), np.array([1, 3], np.int8)),
    "int8 to the power of int64": (lambda x: x ** np.int64(2), np.array([100, 3], np.int8)),
    "int8 plus what does not fit": (lambda x: x + np.int64(1000), np.array([1, 2], np.int8)),
    "int8 or int64": (lambda x: np.where(x > 1, x, np.int64(5)), np.array([1, 2], np.int8)),
    "the larger of int32 and int64": (lambda x: np.maximum(x, np.int64(7)), np.array([3, 9], np.int32)),
    "int32 between int64": (lambda x: np.clip(x, np.int64(1), np.int64(5)), np.array([0, 9], np.int32)),
    "one whole number or another": (lambda x: np.where(x > 0, 1, 0), np.array([1.0, -1.0], np.float32)),
    "one truth value or another": (lambda x: np.where(x > 0, True, False), np.array([1.0, -1.0], np.float32)),
    "one float32 or another": (
        lambda x: np.where(x > 0, np.float32(1), np.float32(0)), np.array([1.0, -1.0], np.float32)),
    "a number of each kind": (lambda x: np.where(x > 0, 1, 0.5), np.array([1.0, -1.0], np.float32)),
    "a mask times float32": (lambda x: (x > 0) * np.float32(2), np.array([1.0, -1.0], np.float32)),
    "a mask times Python's": (lambda x: (x > 0) * 2, np.array([1.0, -1.0], np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("case", WITH_NUMPYS_NUMBERS)
def test_beside_integers_numpys_numbers_have_their_dtype(case):
    function, x = WITH_NUMPYS_NUMBERS[case]
    expected = function(x)
    for found in (function(pe.tensor(x)).numpy(), pe.compile(function)(x), pe.vmap(function)(x)):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_a_float32_mask_of_numbers_keeps_a_derivative_float32():
    x = np.array([1.0, -1.0], np.float32)
    slope = pe.grad(lambda x: np.sum(x * ((x > 0) * np.float32(2))))(x)
    np.testing.assert_array_equal(slope, [2, 0])
    assert slope.dtype == np.float32
    assert pe.grad(lambda x: x[np.where(x[0] > 0, 1, 0)] * 3.0)(np.array([0.7, 0.2])).tolist() == [0, 3]


@pytest.mark.parametrize("call", [np.sum, np.prod, np.cumsum, np.nansum])
def test_a_dtype_that_sums_of_whole_numbers_have_not_is_refused(call):
    with pytest.raises(DTypeError, match="dtype=int8 is not taken on tensors, whose sums and products"):
        call(pe.tensor(np.full(200, True)), dtype=np.int8)
    assert call(pe.tensor(np.full(3, True)), dtype=np.int64).dtype == np.int64
