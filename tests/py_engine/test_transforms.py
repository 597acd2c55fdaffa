"""grad, value_and_grad and compile: arguments, nesting, what comes back, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.errors import NotDifferentiableError, ShapeError

both = pytest.mark.parametrize("run", [lambda f: f, pe.compile], ids=["eager", "compiled"])

# Arguments ------------------------------------------------------------------------------------------------


@both
def test_the_first_argument_is_differentiated_by_default(run):
    np.testing.assert_allclose(run(pe.grad(lambda x, y: np.sum(x * y)))(np.ones(2), np.full(2, 3.0)), [3, 3])


@both
@pytest.mark.parametrize(("argnums", "expected"), [(0, 15), (1, 10), (2, 6), (-1, 6), (-2, 10), (-3, 15)])
def test_any_argument_by_its_number(run, argnums, expected):
    assert run(pe.grad(lambda x, y, z: x * y * z, argnums))(2.0, 3.0, 5.0) == expected


@both
def test_several_arguments_give_a_tuple_in_the_order_asked_for(run):
    f = pe.grad(lambda x, y, z: x * y * z, (2, 0, -2))
    assert tuple(float(g) for g in run(f)(2.0, 3.0, 5.0)) == (6, 15, 10)
    (only,) = run(pe.grad(lambda x: x * x, (0,)))(3.0)
    assert only == 6


@both
def test_an_argument_named_twice_is_given_twice(run):
    assert tuple(float(g) for g in run(pe.grad(lambda x: x * x, (0, -1)))(3.0)) == (6, 6)


def test_keyword_arguments_are_passed_on():
    assert pe.grad(lambda x, *, power: x**power)(3.0, power=2) == 6


@both
def test_what_the_result_does_not_depend_on_has_gradient_zero(run):
    f = pe.grad(lambda x, y: np.sum(y), (0, 1))
    x, y = np.ones((2, 3), np.float32), np.ones(2, np.float32)
    gx, gy = run(f)(x, y)
    np.testing.assert_array_equal(gx, np.zeros((2, 3)))
    assert gx.dtype == gy.dtype == np.float32
    assert run(pe.grad(lambda x: 3.0))(1.0) == 0


@both
def test_integer_arguments_are_passed_on(run):
    x = np.arange(6.0).reshape(2, 3)
    g = run(pe.grad(ops.softmax_cross_entropy))(x, np.array([0, 2]))
    assert g.shape == (2, 3)


@pytest.mark.parametrize("argnums", [1, -2, (0, 5)])
def test_an_argument_that_does_not_exist_is_named(argnums):
    with pytest.raises(ShapeError, match=r"there is no argument (1|-2|5), the function was called with 1"):
        pe.grad(lambda x: x, argnums)(1.0)


@both
def test_only_floats_are_differentiated_by(run):
    with pytest.raises(NotDifferentiableError, match="argument 0 is of int64, which has no derivative"):
        run(pe.grad(lambda i: np.sum(i * 1.0)))(np.arange(3))
    with pytest.raises(NotDifferentiableError, match="argument 1 is of int64"):
        run(pe.grad(lambda x, i: np.sum(x), (0, 1)))(np.ones(2), np.arange(3))


# Results --------------------------------------------------------------------------------------------------


def test_arrays_in_arrays_out():
    value, gradient = pe.value_and_grad(lambda x: np.sum(x**2))(np.array([1.0, 2.0]))
    assert type(value) is float and value == 5
    assert type(gradient) is np.ndarray
    np.testing.assert_array_equal(gradient, [2, 4])
    assert type(pe.grad(lambda x: x * x)(3.0)) is np.ndarray


def test_tensors_in_tensors_out():
    value, gradient = pe.value_and_grad(lambda x: np.sum(x**2))(pe.tensor([1.0, 2.0]))
    assert type(value) is Tensor and type(gradient) is Tensor


@both
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scalar_may_have_axes_of_length_one(run, shape):
    np.testing.assert_array_equal(run(pe.grad(lambda x: np.sum(x * x).reshape(shape)))(np.ones(2)), [2, 2])


@both
def test_the_result_must_be_a_scalar(run):
    with pytest.raises(ShapeError, match=r"the function must return a scalar, got shape \(3,\)"):
        run(pe.grad(lambda x: x * 2))(np.ones(3))


def test_plain_numpy_functions_are_differentiated():
    np.testing.assert_allclose(pe.grad(np.linalg.norm)(np.array([3.0, 4.0])), [0.6, 0.8])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@both
def test_the_dtype_is_kept(run, dtype):
    value, gradient = run(pe.value_and_grad(lambda x: np.mean(np.tanh(x) * 2 + 1)))(np.ones(3, dtype))
    assert gradient.dtype == dtype
    assert np.asarray(value).dtype == dtype or isinstance(value, float)


# Derivatives of derivatives -------------------------------------------------------------------------------


@both
def test_higher_derivatives_of_one_number(run):
    x = 0.7
    derivative, signs = np.sin, [(np.cos, 1), (np.sin, -1), (np.cos, -1), (np.sin, 1)]
    for function, sign in signs:
        derivative = pe.grad(derivative)
        np.testing.assert_allclose(run(derivative)(x), sign * function(x), rtol=1e-12)


@both
def test_a_hessian_from_nested_gradients(run):
    def f(x):
        return np.sum(np.sin(x) * x[::-1] ** 2)

    def row(x, i):
        return pe.grad(lambda x: pe.grad(f)(x)[i])(x)

    x = np.array([0.3, 0.9, -0.4])
    hessian = np.stack([run(lambda x, i=i: row(x, i))(x) for i in range(3)])
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-12, atol=1e-14)
    expected = np.diag(-np.sin(x) * x[::-1] ** 2 + 2 * np.sin(x[::-1]))
    for i in range(3):
        expected[i, 2 - i] += np.cos(x[i]) * 2 * x[2 - i] + np.cos(x[2 - i]) * 2 * x[i]
    expected[1, 1] = -np.sin(x[1]) * x[1] ** 2 + 4 * x[1] * np.cos(x[1]) + 2 * np.sin(x[1])
    np.testing.assert_allclose(hessian, expected, rtol=1e-12)


@both
def test_mixed_derivatives(run):
    f = pe.grad(lambda x, y: pe.grad(lambda x, y: np.sin(x * y), 0)(x, y), 1)
    x, y = 0.4, 0.8
    np.testing.assert_allclose(run(f)(x, y), np.cos(x * y) - x * y * np.sin(x * y), rtol=1e-12)


@both
def test_an_inner_derivative_does_not_confuse_the_outer_variable_with_its_own(run):
    # d/dx (x d/dy (x + y)) = 1, and 2 where the two variables are mixed up.
    assert run(pe.grad(lambda x: x * pe.grad(lambda y: x + y)(1.0)))(3.0) == 1
    assert run(pe.grad(lambda x: x * pe.grad(lambda y: x * y)(1.0)))(3.0) == 6
    assert run(pe.grad(lambda x: x * pe.grad(lambda y: x * y)(x)))(3.0) == 6
    assert run(pe.grad(lambda x: pe.grad(lambda x: x**3)(x) * x))(2.0) == 3 * 3 * 4


@both
def test_a_derivative_by_an_argument_sees_the_tensors_around_it(run):
    # The argument of the inner gradient is a plain array, but what it computes depends on x.
    y = np.array([1.0, 2.0])
    f = pe.grad(lambda x: np.sum(pe.grad(lambda y: np.sum(np.sin(x * y)))(y)))
    x = np.array([0.5, 0.25])
    np.testing.assert_allclose(run(f)(x), np.cos(x * y) - x * y * np.sin(x * y), rtol=1e-12)


def test_a_gradient_taken_eagerly_can_be_differentiated_by_backward():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    w = pe.tensor([3.0, 4.0], requires_grad=True)
    slope = pe.grad(lambda x: np.sum(w * x**2))(x)
    assert x.grad is None
    np.sum(slope**2).backward()
    np.testing.assert_allclose(x.grad, 8 * w.numpy() ** 2 * x.numpy())
    np.testing.assert_allclose(w.grad, 8 * w.numpy() * x.numpy() ** 2)


def test_the_graph_around_is_left_alone():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    y = np.exp(x)
    gradient = pe.grad(lambda y: np.sum(y**2))(y)  # by y itself, not by x
    np.testing.assert_allclose(gradient.numpy(), 2 * np.exp(x.numpy()))
    assert x.grad is None


def test_a_gradient_is_taken_inside_no_grad_too():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    with pe.no_grad():
        for argument in (x, x.numpy()):
            gradient = pe.grad(lambda x: np.sum(x**2))(argument)
            np.testing.assert_array_equal(ops.as_tensor(gradient).numpy(), [2, 4])


def test_a_failure_leaves_nothing_behind():
    def broken(x):
        raise KeyError("mine")

    with pe.no_grad():
        with pytest.raises(KeyError):
            pe.grad(broken)(1.0)
        assert not (pe.tensor(1.0, requires_grad=True) * 2).requires_grad
    assert type(pe.grad(lambda x: x * x)(3.0)) is np.ndarray


# compile --------------------------------------------------------------------------------------------------


def test_compiling_before_or_after_differentiating_is_the_same():
    f = pe.compile(lambda x: np.sum(np.sin(x) ** 2))
    x = np.array([0.5, 1.0])
    expected = np.sin(2 * x)
    np.testing.assert_allclose(pe.grad(f)(x), expected, rtol=1e-12)
    np.testing.assert_allclose(pe.compile(pe.grad(f))(x), expected, rtol=1e-12)
    np.testing.assert_allclose(pe.grad(pe.grad(f))(0.3), 2 * np.cos(0.6), rtol=1e-12)


def test_a_compiled_function_on_a_tensor_that_requires_a_gradient_keeps_it():
    f = pe.compile(lambda x: np.sum(x**2))
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    f(x).backward()
    np.testing.assert_array_equal(x.grad, [2, 4])


def test_inside_no_grad_a_compiled_function_is_replayed_on_such_tensors_too():
    f = pe.compile(lambda x: np.sum(x**2))
    with pe.no_grad():
        assert f(pe.tensor([1.0, 2.0], requires_grad=True)) == 5
    assert len(f.tapes) == 1


def test_a_compiled_function_sees_the_variables_of_a_gradient_around_it():
    f = pe.grad(lambda x: pe.compile(lambda y: x * y)(2.0))
    assert f(3.0) == 2


def test_python_floats_are_weak_in_compiled_functions():
    f = pe.compile(lambda x, rate: x * rate)
    assert f(np.ones(2, np.float32), 0.5).dtype == np.float32
    assert f(np.ones(2), 0.5).dtype == np.float64
    np.testing.assert_array_equal(f(np.ones(2), 0.25), [0.25, 0.25])


def test_python_code_runs_while_tracing_only():
    calls = []
    f = pe.compile(lambda x: (calls.append(1), x * len(calls))[1])
    np.testing.assert_array_equal(f(np.ones(2)), [1, 1])
    np.testing.assert_array_equal(f(np.ones(2)), [1, 1])
    np.testing.assert_array_equal(f(np.ones(3)), [2, 2, 2])


def test_results_keep_their_structure():
    f = pe.compile(lambda x: [x, (x * 2, [np.sum(x)])])
    result = f(np.ones(2))
    assert isinstance(result, list) and isinstance(result[1], tuple) and isinstance(result[1][1], list)
    assert result[1][1][0] == 2


def test_tensors_and_lists_are_arguments_like_arrays():
    f = pe.compile(lambda x: x * 2)
    np.testing.assert_array_equal(f(pe.tensor([1.0, 2.0])), [2, 4])
    np.testing.assert_array_equal(f([1.0, 2.0]), [2, 4])
    assert len(f.tapes) == 1


def test_the_docstring_is_kept():
    def documented(x):
        """Twice x."""
        return x * 2

    assert pe.compile(documented).__doc__ == "Twice x."


def test_the_example_of_the_package_is_true():
    x = np.array([0.5, 1.0])
    np.testing.assert_allclose(pe.grad(lambda x: np.sum(np.sin(x) ** 2))(x), np.sin(2 * x))
    assert "array([0.84147098, 0.90929743])" in pe.__doc__
