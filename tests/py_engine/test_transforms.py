"""grad, value_and_grad, vjp, jvp and compile: arguments, containers, nesting, what comes back, and mistakes."""

from __future__ import annotations

import doctest
from typing import NamedTuple

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad import transforms
from py_engine.ad.op import as_tensor
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, ShapeError

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
    with pytest.raises(ShapeError, match=r"there is no argument (1|-2|5), the function was called with 1 by position"):
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
def test_what_is_a_constant_to_all_outside_is_a_variable_inside(run):
    x = 0.5
    constants = (pe.stop_gradient, ops.sign, lambda x: np.exp(as_tensor(np.array(0.3))))
    for constant in constants:
        at = constant(x).numpy()
        for derivative in (
            lambda y: pe.grad(np.sin)(y),
            lambda y: pe.vjp(np.sin, y)[1](1.0)[0],
            lambda y: pe.jvp(np.sin, (y,), (1.0,))[1],
        ):
            found = run(pe.value_and_grad(lambda x: x * derivative(constant(x))))(x)  # noqa: B023  (called here)
            np.testing.assert_allclose(found, [x * np.cos(at), np.cos(at)])
        found = run(pe.grad(lambda x: x * pe.hvp(np.sin, constant(x), 2.0)))(x)  # noqa: B023
        np.testing.assert_allclose(found, -2 * np.sin(at))


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
            np.testing.assert_array_equal(as_tensor(gradient).numpy(), [2, 4])


def test_a_failure_leaves_nothing_behind():
    def broken(x):
        raise KeyError("mine")

    with pe.no_grad():
        with pytest.raises(KeyError):
            pe.grad(broken)(1.0)
        assert not (pe.tensor(1.0, requires_grad=True) * 2).requires_grad
    assert type(pe.grad(lambda x: x * x)(3.0)) is np.ndarray


# Containers -----------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    weight: object
    bias: object


def network():
    rng = np.random.default_rng(3)
    layers = [Layer(rng.standard_normal((3, 4)), rng.standard_normal(4)), Layer(rng.standard_normal((4, 2)), 0.5)]
    return {"layers": layers, "scale": (np.array(2.0), None)}


def energy(parameters, x):
    for layer in parameters["layers"]:
        x = np.tanh(x @ layer.weight + layer.bias)
    return np.sum(parameters["scale"][0] * x**2)


def test_gradients_have_the_structure_of_the_argument(torch):
    parameters, x = network(), np.array([[0.3, -0.2, 0.9]])
    value, found = pe.value_and_grad(energy)(parameters, x)
    assert type(found) is dict and list(found) == ["layers", "scale"]
    assert type(found["layers"]) is list and [type(layer) for layer in found["layers"]] == [Layer, Layer]
    assert type(found["scale"]) is tuple and found["scale"][1] is None

    flat = [parameters["layers"][0].weight, *parameters["layers"][0][1:], *parameters["layers"][1], 2.0]
    variables = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in flat]
    y = torch.tanh(torch.tensor(x) @ variables[0] + variables[1])
    expected = torch.sum(variables[4] * torch.tanh(y @ variables[2] + variables[3]) ** 2)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip([*found["layers"][0], *found["layers"][1], found["scale"][0]], variables, strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-12)


def test_containers_and_arrays_side_by_side():
    f = pe.grad(lambda p, x, q: p["a"] * np.sum(x) * q[0], (2, 1, 0))
    gq, gx, gp = f({"a": 2.0}, np.ones(2), [3.0])
    assert gp == {"a": 6} and gq == [4]
    np.testing.assert_array_equal(gx, [6, 6])


def test_containers_in_nested_gradients():
    f = pe.grad(lambda p: np.sum(pe.grad(lambda p: np.sum(p["x"] ** 3 * p["y"]))(p)["x"]))
    found = f({"x": np.array([1.0, 2.0]), "y": 2.0})
    np.testing.assert_allclose(found["x"], [12, 24])
    np.testing.assert_allclose(found["y"], 15)


def test_python_floats_are_weak_beside_arrays():
    x = np.ones(2, np.float32)
    for argument in ({"rate": 2.0, "x": x}, {"x": x, "rate": 2.0}):
        found = pe.grad(lambda p: np.sum(p["rate"] * p["x"]))(argument)
        assert found["rate"].dtype == found["x"].dtype == np.float32 and found["rate"] == 2
    assert pe.grad(lambda rate, x: np.sum(rate * x))(2.0, x).dtype == np.float32
    assert pe.jvp(lambda rate, x: rate * x, (2.0, x), (1.0, x))[1].dtype == np.float32
    assert pe.grad(lambda rate, i: rate * 2)(2.0, np.arange(3)).dtype == np.float64


def test_a_container_without_leaves_has_a_gradient_of_its_own_kind():
    assert pe.grad(lambda p, x: x, (0, 1))({"none": None, "empty": []}, 1.0) == ({"none": None, "empty": []}, 1)


# Products with the Jacobian -------------------------------------------------------------------------------


def test_vjp_and_jvp_are_products_with_the_matrix_of_a_linear_function(rng):
    a, x, u, v = rng.standard_normal((4, 3)), *(rng.standard_normal(n) for n in (3, 4, 3))
    y, pullback = pe.vjp(lambda x: a @ x, x)
    np.testing.assert_allclose(y, a @ x)
    np.testing.assert_allclose(pullback(u)[0], a.T @ u)
    np.testing.assert_allclose(pullback(2 * u)[0], 2 * a.T @ u)
    y, tangent = pe.jvp(lambda x: a @ x, (x,), (v,))
    np.testing.assert_allclose(y, a @ x)
    np.testing.assert_allclose(tangent, a @ v)


def swirl(p, x):
    return {"sine": np.sin(p["a"] * x), "pair": [np.sum(x), (p["b"] * p["a"],)]}


def test_vjp_and_jvp_agree_over_containers(rng):
    p, x = {"a": rng.standard_normal(3), "b": 0.5}, rng.standard_normal((2, 3))
    dp, dx = {"a": rng.standard_normal(3), "b": rng.standard_normal()}, rng.standard_normal((2, 3))
    y, tangent = pe.jvp(swirl, (p, x), (dp, dx))
    again, pullback = pe.vjp(swirl, p, x)
    for found in (y, again, tangent):
        assert list(found) == ["sine", "pair"] and type(found["pair"]) is list and type(found["pair"][1]) is tuple
        assert found["sine"].shape == (2, 3) and found["pair"][0].shape == () and found["pair"][1][0].shape == (3,)
    seed = {"pair": [0.7, (rng.standard_normal(3),)], "sine": rng.standard_normal((2, 3))}
    gp, gx = pullback(seed)
    there = (
        np.sum(seed["sine"] * tangent["sine"]) + 0.7 * tangent["pair"][0] + seed["pair"][1][0] @ tangent["pair"][1][0]
    )
    np.testing.assert_allclose(there, gp["a"] @ dp["a"] + gp["b"] * dp["b"] + np.sum(gx * dx), rtol=1e-12)


def test_an_argument_without_a_tangent_stays_and_may_be_anything():
    y, tangent = pe.jvp(lambda x, n, name: x**n if name == "power" else x, (3.0, 2, "power"), (1.0, None, None))
    assert (y, tangent) == (9, 6)


def test_what_does_not_move_has_tangent_zero_and_what_is_not_used_gradient_zero():
    _, tangent = pe.jvp(lambda x: (x, np.ones(2), 3), (1.0,), (1.0,))
    np.testing.assert_array_equal(tangent[1], [0, 0])
    assert tangent[0] == 1 and tangent[2] == 0
    _, pullback = pe.vjp(lambda x, y: x * 2, 1.0, np.ones(3, np.float32))
    gx, gy = pullback(1.0)
    assert gx == 2 and gy.dtype == np.float32
    np.testing.assert_array_equal(gy, np.zeros(3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_keep_the_dtype_and_numbers_take_it(dtype):
    x = np.ones((2, 3), dtype)
    y, tangent = pe.jvp(lambda x: np.tanh(x) * 2, (x,), ([[1, 2, 3], [0.5, 0, 0]],))
    assert y.dtype == tangent.dtype == dtype
    _, pullback = pe.vjp(lambda x: np.sum(np.tanh(x)), x)
    assert pullback(1)[0].dtype == dtype


def test_only_a_broadcast_argument_moves():
    x, b = np.ones((2, 3)), np.arange(3.0)
    _, tangent = pe.jvp(lambda b: x + b, (b,), (b,))
    np.testing.assert_array_equal(tangent, [b, b])


def test_arrays_come_back_as_arrays_and_tensors_as_tensors():
    y, pullback = pe.vjp(np.sin, np.ones(2))
    assert type(y) is np.ndarray and type(pullback(np.ones(2))[0]) is np.ndarray
    assert type(pullback(pe.tensor([1.0, 1.0]))[0]) is Tensor
    assert [type(found) for found in pe.jvp(np.sin, (np.ones(2),), (np.ones(2),))] == [np.ndarray, np.ndarray]
    assert [type(found) for found in pe.jvp(np.sin, (pe.tensor([1.0]),), (np.ones(1),))] == [Tensor, Tensor]
    assert [type(found) for found in pe.jvp(np.sin, (np.ones(1),), (pe.tensor([1.0]),))] == [Tensor, Tensor]


def test_results_belong_to_the_caller():
    x, seed = np.ones(3), np.full(3, 2.0)
    y, pullback = pe.vjp(lambda x: x, x)
    y += 1
    pullback(seed)[0][...] = 7
    pe.grad(np.sum)(x)[...] = 5
    pe.jvp(lambda x: x.reshape(3, 1), (x,), (seed,))[1][...] = 9
    captured = np.ones(3)
    pe.jvp(lambda x: (x, captured), (x,), (x,))[0][1][...] = 4
    np.testing.assert_array_equal(captured, np.ones(3))
    np.testing.assert_array_equal(x, np.ones(3))
    np.testing.assert_array_equal(seed, np.full(3, 2.0))


@pytest.mark.parametrize(
    "results",
    [
        lambda x: pe.grad(lambda a, b: np.sum((a + b) ** 2), argnums=(0, 1))(x, x + 1),
        lambda x: pe.grad(lambda a: np.sum(a**2), argnums=(0, 0))(x),
        lambda x: pe.value_and_grad(lambda p: np.sum((p[0] + p[1]) ** 2))([x, x + 1])[1],
        lambda x: pe.vjp(lambda a, b: (a + b) * 2, x, x + 1)[1](x),
        lambda x: pe.jvp(lambda a: [a * 2] * 2, (x,), (x,))[1],
        lambda x: pe.hvp(lambda p: np.sum((p[0] + p[1]) ** 3), [x, x + 1], [x, x]),
        lambda x: pe.grad(lambda a, b: a + b, argnums=(0, 1))(1.0, 2.0),
    ],
    ids=["grad", "argument twice", "value_and_grad", "vjp", "jvp", "hvp", "numbers"],
)
def test_two_results_share_no_memory(results):
    first, second = results(np.ones(3))
    before = second.copy()
    first[...] = 100.0
    np.testing.assert_array_equal(second, before)


def test_a_python_float_takes_the_dtype_of_a_float32_number_beside_it():
    single = np.float32(2.0)
    gradients = pe.grad(lambda a, b: a * b, argnums=(0, 1))
    for found in (gradients(single, 3.0), pe.compile(gradients)(single, 3.0), pe.compile(gradients)(3.0, single)):
        assert [(float(g), g.dtype) for g in found] in (
            [(3.0, np.float32), (2.0, np.float32)],
            [(2.0, np.float32), (3.0, np.float32)],
        )


def test_a_gradient_that_is_written_to_changes_no_later_one():
    captured = np.array(3.0)
    for f, slope in ((lambda x: x + 1, 1.0), (lambda x: captured * x, 3.0)):
        for gradient in (pe.grad(f), lambda x, f=f: pe.vjp(f, x)[1](1.0)[0]):
            g = gradient(2.0)
            g *= 100
            np.testing.assert_array_equal(gradient(2.0), slope)


def test_a_pullback_of_tensors_can_be_differentiated():
    x, w = (pe.tensor([a, a + 1], requires_grad=True) for a in (1.0, 3.0))
    _, pullback = pe.vjp(lambda x: w * x**3, x)
    np.sum(pullback(np.ones(2))[0]).backward()
    np.testing.assert_allclose(x.grad, 6 * w.numpy() * x.numpy())
    np.testing.assert_allclose(w.grad, 3 * x.numpy() ** 2)


# Any order, either way ------------------------------------------------------------------------------------


def forward(f):
    return lambda x: pe.jvp(f, (x,), (1.0,))[1]


def pulled(f):
    return lambda x: pe.vjp(f, x)[1](1.0)[0]


ELEMENTARY = {
    "exp": (np.exp, lambda x: np.exp(x)),
    "log": (np.log, lambda x: 2 / x**3),
    "sin": (np.sin, lambda x: -np.cos(x)),
    "cos": (np.cos, lambda x: np.sin(x)),
    "tan": (np.tan, lambda x: 2 * (1 + np.tan(x) ** 2) * (1 + 3 * np.tan(x) ** 2)),
    "sinh": (np.sinh, lambda x: np.cosh(x)),
    "cosh": (np.cosh, lambda x: np.sinh(x)),
    "tanh": (np.tanh, lambda x: -2 * (1 - np.tanh(x) ** 2) * (1 - 3 * np.tanh(x) ** 2)),
    "arcsin": (np.arcsin, lambda x: (1 + 2 * x**2) / (1 - x**2) ** 2.5),
    "arccos": (np.arccos, lambda x: -(1 + 2 * x**2) / (1 - x**2) ** 2.5),
    "arctan": (np.arctan, lambda x: (6 * x**2 - 2) / (1 + x**2) ** 3),
    "sqrt": (np.sqrt, lambda x: 0.375 * x**-2.5),
    "expm1": (np.expm1, lambda x: np.exp(x)),
    "log1p": (np.log1p, lambda x: 2 / (1 + x) ** 3),
    "reciprocal": (np.reciprocal, lambda x: -6 / x**4),
    "power": (lambda x: x**2.5, lambda x: 1.875 * x**-0.5),
    "cube": (lambda x: x * x * x, lambda x: 6.0),
    "exponential": (lambda x: 3.0**x, lambda x: np.log(3) ** 3 * 3**x),
    "sigmoid": (ops.sigmoid, lambda x: (lambda s: s * (1 - s) * (1 - 6 * s + 6 * s * s))(1 / (1 + np.exp(-x)))),
    "softplus": (ops.softplus, lambda x: (lambda s: s * (1 - s) * (1 - 2 * s))(1 / (1 + np.exp(-x)))),
}
WAYS = {"r": pe.grad, "f": forward, "p": pulled}


@both
@pytest.mark.parametrize("ways", ["rrr", "fff", "frr", "rfr", "rrf", "ffr", "frf", "rff", "pfp", "fpf"])
@pytest.mark.parametrize("name", ELEMENTARY)
def test_third_derivatives_of_elementary_functions(name, ways, run):
    function, third = ELEMENTARY[name]
    for way in ways:
        function = WAYS[way](function)
    np.testing.assert_allclose(run(function)(0.6), third(0.6), rtol=1e-11)


@both
def test_forward_mode_does_not_confuse_an_inner_variable_with_the_outer_one(run):
    # d/dx (x d/dy (x + y)) = 1, and 2 where the two variables are mixed up.
    for outer in WAYS.values():
        for inner in WAYS.values():
            assert run(outer(lambda x, inner=inner: x * inner(lambda y: x + y)(1.0)))(3.0) == 1
            assert run(outer(lambda x, inner=inner: x * inner(lambda y: x * y)(x)))(3.0) == 6


@both
def test_a_tangent_is_differentiated_by_like_an_argument(run):
    # d/dv of the directional derivative along v is the gradient.
    x = np.array([0.3, 0.8])
    along = pe.grad(lambda v: pe.jvp(lambda x: np.sum(np.sin(x) * x[::-1]), (x,), (v,))[1])
    np.testing.assert_allclose(run(along)(np.ones(2)), np.cos(x) * x[::-1] + np.sin(x[::-1]), rtol=1e-12)


def test_a_seed_is_differentiated_by_like_an_argument():
    _, pullback = pe.vjp(lambda x: x**2, np.array([1.0, 2.0]))
    found = pe.grad(lambda u: np.sum(pullback(u)[0] * np.array([1.0, 10.0])))(np.ones(2))
    np.testing.assert_allclose(found, [2, 40])


# A leaf that the function captures -----------------------------------------------------------------------

ONE, PAIR = np.float64(2), np.ones(2)
AROUND_A_LEAF = {
    "grad": (lambda x: pe.grad(lambda y: x * y)(ONE), 3),
    "grad by a list": (lambda x: pe.grad(lambda y: x * y[0])([ONE])[0], 3),
    "grad of what does not depend on it": (lambda x: pe.grad(lambda y: x + y)(ONE), 1),
    "grad of what it was computed to": (lambda x: pe.grad(lambda y, z=x * x: z * y)(ONE), 9),
    "grad of grad": (lambda x: pe.grad(pe.grad(lambda y: x * y**2))(ONE), 6),
    "grad in grad": (lambda x: pe.grad(lambda y: pe.grad(lambda z: x * y * z)(ONE))(ONE), 3),
    "value_and_grad": (lambda x: pe.value_and_grad(lambda y: x * y)(ONE)[0], 6),
    "value_and_grad of a constant": (lambda x: pe.value_and_grad(lambda y: x * 2.0)(ONE)[0], 6),
    "vjp": (lambda x: pe.vjp(lambda y: x * y, ONE)[0], 6),
    "pullback": (lambda x: pe.vjp(lambda y: x * y, ONE)[1](np.float64(1))[0], 3),
    "jvp": (lambda x: pe.jvp(lambda y: x * y, (ONE,), (np.float64(1),))[0], 6),
    "tangent": (lambda x: pe.jvp(lambda y: x * y, (ONE,), (np.float64(1),))[1], 3),
    "jacobian": (lambda x: np.sum(pe.jacobian(lambda y: x * y, PAIR)), 6),
    "jacobian backward": (lambda x: np.sum(pe.jacobian(lambda y: x * y, PAIR, mode="reverse")), 6),
    "hessian": (lambda x: np.sum(pe.hessian(lambda y: np.sum(x * y**2), PAIR)), 12),
    "hvp": (lambda x: np.sum(pe.hvp(lambda y: np.sum(x * y**2), PAIR, PAIR)), 12),
    "vmap": (lambda x: np.sum(pe.vmap(lambda y: x * y)(PAIR)), 6),
    "vmap of grad": (lambda x: np.sum(pe.vmap(pe.grad(lambda y: x * y))(PAIR)), 6),
    "checkpoint": (lambda x: pe.checkpoint(lambda y: x * y)(ONE), 6),
    "cond": (lambda x: pe.cond(np.bool_(True), lambda y: x * y, lambda y: y, ONE), 6),
    "scan": (lambda x: pe.scan(lambda c, s: (c * x + s, c), np.float64(1), PAIR)[0], 13),
    "while_loop": (lambda x: pe.while_loop(lambda c: c < 5.0, lambda c: c * x, np.float64(1)), 9),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", AROUND_A_LEAF)
def test_backward_goes_through_a_transform_to_a_leaf_that_its_function_captures(name, compiled):
    around, value = AROUND_A_LEAF[name]
    x = pe.tensor(3.0, requires_grad=True)
    for _ in range(2):
        x.grad = None
        y = (pe.compile(lambda one: around(x) * one) if compiled else lambda one: around(x) * one)(np.float64(1))
        np.testing.assert_allclose(y.numpy() if isinstance(y, Tensor) else y, value)
        np.sum(x * y).backward()
        by_hand = pe.grad(lambda x: x * around(x))(3.0)
        np.testing.assert_allclose(x.grad, by_hand)
    with pe.no_grad():
        np.testing.assert_allclose(np.asarray(around(x)), value)


def test_a_compiled_function_follows_what_a_leaf_that_it_captures_requires():
    x = pe.tensor(3.0)
    f = pe.compile(lambda y: x * y)
    assert isinstance(f(ONE), np.ndarray)
    x.requires_grad = True
    assert isinstance(f(ONE), pe.Tensor)
    x.requires_grad = False
    assert isinstance(f(ONE), np.ndarray)


def test_what_a_pullback_has_kept_is_a_constant_to_a_later_transform():
    _, pullback = pe.vjp(lambda x: x**2, np.array([1.0, 2.0]))
    later = lambda u: np.sum(pullback(u)[0])  # noqa: E731
    assert isinstance(pe.grad(later)(np.ones(2)), np.ndarray)
    assert isinstance(pe.compile(pe.grad(later))(np.ones(2)), np.ndarray)


def test_rules_and_sparse_matrices_refuse_a_leaf_that_their_function_captures():
    x = pe.tensor(3.0, requires_grad=True)
    rule = pe.custom_rule(lambda y: x * y, vjp=lambda g, out, y: g)
    with pytest.raises(NotDifferentiableError, match="is no input of it"):
        rule(ONE)
    with pytest.raises(NotDifferentiableError, match="is no input of it"):
        pe.grad(rule)(ONE)
    for transform, f in [(pe.sparse_jacobian, lambda y: x * y), (pe.sparse_hessian, lambda y: np.sum(x * y**2))]:
        with pytest.raises(ConfigurationError, match="captures a tensor which requires a gradient"):
            transform(f, PAIR)
        with pe.no_grad():
            assert transform(f, PAIR).shape == (2, 2)


# Mistakes -------------------------------------------------------------------------------------------------


def test_the_place_of_what_has_no_derivative_is_named():
    leaf = "has no derivative; use a float32 or float64 array"
    for value, message in [
        ({"layers": [1.0, np.arange(3)]}, rf"grad: argument 1, \['layers'\]\[1\], is of int64, which {leaf}"),
        (Layer(1.0, "zero"), rf"grad: argument 1, \.bias, is of type str, which {leaf}"),
        ([1.0, object()], rf"grad: argument 1, \[1\], is of type object, which {leaf}"),
        ({1: True}, rf"grad: argument 1, \[1\], is of bool, which {leaf}"),
        (np.float16(1), rf"grad: argument 1 is of float16, which {leaf}"),
        (np.array(["a"]), rf"grad: argument 1 is of <U1, which {leaf}"),
        (3, rf"grad: argument 1 is of int64, which {leaf}"),
    ]:
        with pytest.raises(NotDifferentiableError, match=message):
            pe.grad(lambda x, y: x, 1)(1.0, value)


def test_complex_numbers_are_refused():
    message = r"argument 0 is of complex128, and only real numbers .* pass real and imaginary parts separately"
    for z in (1j, np.ones(2) * 1j, [1.0, 2j]):
        with pytest.raises(NotDifferentiableError, match=message.replace("0 is", r"0(, \[1\],)? is")):
            pe.grad(lambda x: x)(z)
    with pytest.raises(NotDifferentiableError, match=message.replace("argument 0 is", "the function's result is")):
        pe.grad(lambda x: np.array(1j))(1.0)


@both
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x * 1j, "complex numbers are not supported; pass real and imaginary parts separately"),
        (lambda x: x + np.array([1j]), "complex numbers are not supported; pass real and imaginary parts separately"),
        (lambda x: x * "two", "expected a number or an array of numbers, got 'two'"),
        (lambda x: x - {"a": 1}, "expected a number or an array of numbers, got a dict"),
        (lambda x: np.where(x > 0, x, None), "expected a number or an array of numbers, got a NoneType"),
    ],
)
def test_what_is_no_number_is_refused_as_an_operand(function, message, run):
    with pytest.raises(DTypeError, match=message):
        run(pe.grad(lambda x: np.sum(function(x))))(np.ones(2))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("one", "the function's result is of type str"),
        (np.arange(3), "the function's result is of int64"),
        ({"y": [1.0, object()]}, r"the function's result, \['y'\]\[1\], is of type object"),
    ],
)
def test_results_without_a_derivative_are_refused(result, message):
    for transform in (pe.grad(lambda x: result), lambda x: pe.vjp(lambda x: result, x)):
        with pytest.raises(NotDifferentiableError, match=message):
            transform(1.0)


@pytest.mark.parametrize(
    ("result", "found"), [(lambda x: (x, x), "a tuple of 2"), (lambda x: {"y": x}, "a dict with the keys 'y'")]
)
def test_a_container_is_no_scalar(result, found):
    with pytest.raises(ShapeError, match=rf"the function must return a scalar, got {found}; use vjp\(\) or jacobian"):
        pe.grad(result)(1.0)


def test_a_function_must_return_something():
    for transform in (pe.grad(lambda x: None), lambda x: pe.jvp(lambda x: [], (x,), (x,))):
        with pytest.raises(ShapeError, match=r"the function must return arrays, got (None|a list of 0)"):
            transform(1.0)


def test_a_function_is_expected():
    for transform in (pe.grad, pe.value_and_grad, pe.vjp, pe.compile, pe.draw, lambda f: pe.jvp(f, (1.0,), (1.0,))):
        with pytest.raises(ConfigurationError, match="expected a function first, got float; give the function itself"):
            transform(1.0)


def test_a_compiled_function_takes_its_arguments_when_it_is_called():
    with pytest.raises(ConfigurationError, match="techniques must be a Techniques, got float; give the function's arg"):
        pe.compile(np.sin, 1.0)


@pytest.mark.parametrize("argnums", ["x", 1.0, (0, None), True])
def test_argnums_are_integers(argnums):
    with pytest.raises(ConfigurationError, match="argnums must be an integer or integers, got"):
        pe.grad(lambda x: x, argnums)


@pytest.mark.parametrize(
    ("tangent", "error", "message"),
    [
        ({"x": np.ones(2), "y": 1.0}, ShapeError, r"argument 0\['x'\]: expected shape \(3,\), got \(2,\)"),
        ({"x": np.ones(3)}, ShapeError, r"argument 0: expected a dict with the keys 'x', 'y', got a dict with the"),
        ({"x": np.ones(3), "y": [1.0]}, ShapeError, r"argument 0\['y'\]: expected shape \(\), got \(1,\)"),
        ({"x": np.ones(3, np.float32), "y": 1.0}, DTypeError, r"argument 0\['x'\]: expected float64, got float32"),
        ({"x": np.ones(3), "y": 1j}, DTypeError, r"argument 0\['y'\]: expected float64, got complex128"),
        ({"x": np.ones(3), "y": "up"}, DTypeError, r"argument 0\['y'\]: expected float64, got type str"),
        (np.ones(3), ShapeError, r"argument 0: expected a dict with the keys 'x', 'y', got one leaf \(ndarray\)"),
    ],
)
def test_a_tangent_must_fit_its_argument(tangent, error, message):
    with pytest.raises(error, match=f"jvp: the tangent of {message}"):
        pe.jvp(lambda p: p["x"] * p["y"], ({"x": np.ones(3), "y": 2.0},), (tangent,))


def test_a_seed_must_fit_the_result():
    _, pullback = pe.vjp(lambda x: (x, [np.sum(x)]), np.ones(3))
    with pytest.raises(ShapeError, match=r"vjp: the seed: expected a tuple of 2, got one leaf \(ndarray\)"):
        pullback(np.ones(3))
    with pytest.raises(ShapeError, match=r"vjp: the seed\[1\]\[0\]: expected shape \(\), got \(3,\)"):
        pullback((np.ones(3), [np.ones(3)]))
    with pytest.raises(DTypeError, match=r"vjp: the seed\[0\]: expected float64, got float32"):
        pullback((np.ones(3, np.float32), [1.0]))


def test_arguments_and_tangents_come_in_tuples():
    with pytest.raises(
        ConfigurationError, match=r"args must be a tuple .* got ndarray; write jvp\(f, \(x,\), \(v,\)\)"
    ):
        pe.jvp(np.sin, np.ones(2), np.ones(2))
    with pytest.raises(ConfigurationError, match="tangents must be a tuple"):
        pe.jvp(np.sin, (1.0,), 1.0)
    with pytest.raises(ShapeError, match="expected a tangent for each of the 1 arguments, got 2"):
        pe.jvp(np.sin, (1.0,), (1.0, 1.0))


def test_integers_are_refused_by_vjp_and_jvp_too():
    with pytest.raises(NotDifferentiableError, match="vjp: argument 1 is of int64"):
        pe.vjp(lambda x, i: x, 1.0, np.arange(2))
    with pytest.raises(NotDifferentiableError, match=r"jvp: argument 0, \[0\], is of int64"):
        pe.jvp(lambda x: x[0], ([np.arange(2)],), ([np.arange(2)],))


def test_the_examples_are_true():
    assert doctest.testmod(transforms, extraglobs={"np": np}).failed == 0


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


def test_numbers_among_the_results_keep_their_dtypes():
    numbers = (np.float32(2), np.int64(3), 4, 5.0, True)
    found = pe.compile(lambda x: (x, *numbers))(np.ones(2, np.float32))
    assert [y.dtype for y in found] == [np.float32, *(np.asarray(n).dtype for n in numbers)]
    assert found[1:] == numbers


def test_tensors_and_lists_of_numbers_are_arguments():
    f = pe.compile(lambda x: x[0] * 2 + x[1])
    assert f(np.array([1.0, 2.0])) == 4
    assert f(pe.tensor([1.0, 2.0])) == 4
    assert len(f.tapes) == 1
    assert f([1.0, 2.0]) == 4


def test_the_docstring_is_kept():
    def documented(x):
        """Twice x."""
        return x * 2

    assert pe.compile(documented).__doc__ == "Twice x."


def test_the_example_of_the_package_is_true():
    x = np.array([0.5, 1.0])
    np.testing.assert_allclose(pe.grad(lambda x: np.sum(np.sin(x) ** 2))(x), np.sin(2 * x))
    assert "array([0.84147098, 0.90929743])" in pe.__doc__
