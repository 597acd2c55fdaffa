"""Jacobians, Hessians and products with them: closed forms, both modes, chunks, containers, and mistakes."""

from __future__ import annotations

import doctest
from typing import NamedTuple

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad import jacobian
from py_engine.ad.program import trace
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, ShapeError

both = pytest.mark.parametrize("run", [lambda f: f, pe.compile], ids=["eager", "compiled"])
modes = pytest.mark.parametrize("mode", ["forward", "reverse", None])


def rosenbrock(x):
    return np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def rosenbrock_hessian(x):
    found = np.zeros((len(x), len(x)))
    for i in range(len(x) - 1):
        found[i, i] += 1200 * x[i] ** 2 - 400 * x[i + 1] + 2
        found[i + 1, i + 1] += 200
        found[i, i + 1] = found[i + 1, i] = -400 * x[i]
    return found


# Hessians -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_the_hessian_of_rosenbrock_is_its_closed_form(n, chunk, run, rng):
    x = rng.standard_normal(n)
    found = run(lambda x: pe.hessian(rosenbrock, x, chunk=chunk))(x)
    np.testing.assert_allclose(found, rosenbrock_hessian(x), rtol=1e-12, atol=1e-12)


@both
def test_a_product_with_the_hessian_of_rosenbrock(run, rng):
    x, v = rng.standard_normal(30), rng.standard_normal(30)
    found = run(lambda x, v: pe.hvp(rosenbrock, x, v))(x, v)
    np.testing.assert_allclose(found, rosenbrock_hessian(x) @ v, rtol=1e-12)


def test_a_product_with_a_hessian_that_would_not_fit_into_memory():
    x, v = np.linspace(-1, 1, 200_000), np.ones(200_000)
    found = pe.hvp(rosenbrock, x, v)
    inner = 1200 * x[1:-1] ** 2 - 400 * x[2:] + 202 - 400 * x[1:-1] - 400 * x[:-2]
    np.testing.assert_allclose(found[1:-1], inner, rtol=1e-12, atol=1e-9)


def test_the_derivative_of_a_hessian(rng):
    # Third derivatives of sum(x^4) lie on the diagonal, in forward mode over forward over reverse.
    x = rng.standard_normal(4)
    found = pe.jacobian(lambda x: pe.hessian(lambda x: np.sum(x**4), x), x)
    expected = np.zeros((4, 4, 4))
    np.einsum("iii->i", expected)[...] = 24 * x
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_hessian_and_of_a_product_with_it(rng):
    x, v = rng.standard_normal(4), rng.standard_normal(4)
    trace = pe.grad(lambda x: np.einsum("ii->", pe.hessian(lambda x: np.sum(np.sin(x) * x[0]), x)))(x)
    h = 1e-5
    for k in range(4):
        step = h * np.eye(4)[k]
        ahead, behind = (np.trace(pe.hessian(lambda x: np.sum(np.sin(x) * x[0]), p)) for p in (x + step, x - step))
        np.testing.assert_allclose(trace[k], (ahead - behind) / (2 * h), rtol=1e-8, atol=1e-9)
    found = pe.grad(lambda v: np.sum(pe.hvp(rosenbrock, x, v) ** 2))(v)
    np.testing.assert_allclose(found, 2 * rosenbrock_hessian(x) @ rosenbrock_hessian(x) @ v, rtol=1e-12)


def test_the_hessian_by_arrays_with_axes(torch, rng):
    x = rng.standard_normal((2, 3))
    found = pe.hessian(lambda x: np.sum(ops.softmax(x) ** 2) * np.prod(x.shape), x)
    expected = torch.autograd.functional.hessian(lambda x: (torch.softmax(x, -1) ** 2).sum() * 6, torch.tensor(x))
    assert found.shape == (2, 3, 2, 3)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-10, atol=1e-12)


# Jacobians ------------------------------------------------------------------------------------------------


@both
@modes
@pytest.mark.parametrize(("inputs", "outputs"), [((3,), (4,)), ((2, 3), ()), ((), (3,)), ((), ()), ((1, 5), (2, 2))])
def test_the_shape_is_that_of_the_result_and_then_of_the_argument(inputs, outputs, mode, run, rng):
    n, m = int(np.prod(inputs)), int(np.prod(outputs))
    a, x = rng.standard_normal((m, n)), rng.standard_normal(inputs)

    def function(x):
        return np.reshape(a @ np.sin(np.reshape(x, (n,))), outputs)

    found = run(lambda x: pe.jacobian(function, x, mode=mode))(x)
    assert found.shape == outputs + inputs
    np.testing.assert_allclose(found, (a * np.cos(x.reshape(n))).reshape(outputs + inputs), rtol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 7, 1000])
def test_every_chunk_gives_the_same(chunk, rng):
    p = {"w": rng.standard_normal((2, 2)), "b": rng.standard_normal(2), "s": 0.5}

    def function(p):
        return np.tanh(p["w"] @ p["b"] * p["s"]), np.sum(p["w"])

    first, second = pe.jacobian(function, p, mode="forward", chunk=chunk)
    by_row, second_by_row = pe.jacobian(function, p, mode="reverse", chunk=max(1, 4 - chunk))
    for key, value in p.items():
        assert first[key].shape == (2, *np.shape(value)) and second[key].shape == np.shape(value)
        np.testing.assert_allclose(first[key], by_row[key], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(second[key], second_by_row[key], rtol=1e-12, atol=1e-15)


class Point(NamedTuple):
    x: object
    y: object


@both
@modes
def test_containers_nest_the_argument_in_the_result(mode, run):
    def matrix(x, y):
        found = pe.jacobian(lambda p: {"sum": [p.x + p.y], "product": p.x * p.y}, Point(x, y), mode=mode)
        assert type(found["product"]) is Point
        return found["sum"][0].x, found["sum"][0].y, found["product"].x, found["product"].y

    x, y = np.array([1.0, 2.0]), np.array(3.0)
    by = run(matrix)(x, y)
    for found, expected in zip(by, [np.eye(2), np.ones(2), 3 * np.eye(2), x], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_hessian_over_containers_has_a_block_for_every_pair(rng):
    p = {"x": rng.standard_normal(3), "y": rng.standard_normal()}
    found = pe.hessian(lambda p: np.sum(p["x"] ** 2) * p["y"] ** 2, p)
    np.testing.assert_allclose(found["x"]["x"], 2 * p["y"] ** 2 * np.eye(3), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found["x"]["y"], 4 * p["x"] * p["y"], rtol=1e-12)
    np.testing.assert_allclose(found["y"]["x"], 4 * p["x"] * p["y"], rtol=1e-12)
    np.testing.assert_allclose(found["y"]["y"], 2 * np.sum(p["x"] ** 2), rtol=1e-12)
    product = pe.hvp(lambda p: np.sum(p["x"] ** 2) * p["y"] ** 2, p, {"x": np.ones(3), "y": 0.0})
    np.testing.assert_allclose(product["x"], 2 * p["y"] ** 2 * np.ones(3), rtol=1e-12)
    np.testing.assert_allclose(product["y"], 4 * np.sum(p["x"]) * p["y"], rtol=1e-12)


@both
def test_containers_go_in_and_out_of_compiled_transforms(run, rng):
    p = Point(rng.standard_normal(3), rng.standard_normal())
    v = Point(np.ones(3), 0.5)

    def energy(p):
        return np.sum(np.sin(p.x) * p.y**2)

    found = run(lambda p, v: {"H": pe.hessian(energy, p), "Hv": pe.hvp(energy, p, v), "g": pe.grad(energy)(p)})(p, v)
    assert type(found["H"]) is type(found["H"].x) is type(found["Hv"]) is type(found["g"]) is Point
    np.testing.assert_allclose(found["g"].x, np.cos(p.x) * p.y**2, rtol=1e-12)
    np.testing.assert_allclose(found["H"].x.x, np.diag(-np.sin(p.x) * p.y**2), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found["Hv"].x, found["H"].x.x @ v.x + found["H"].x.y * v.y, rtol=1e-12)
    np.testing.assert_allclose(found["Hv"].y, found["H"].y.x @ v.x + found["H"].y.y * v.y, rtol=1e-12)


@modes
def test_what_does_not_depend_has_derivative_zero(mode):
    found = pe.jacobian(lambda p: (p[0] * 2, np.ones(2)), [np.ones(3), 5.0], mode=mode)
    np.testing.assert_array_equal(found[0][0], 2 * np.eye(3))
    for block, shape in ((found[0][1], (3,)), (found[1][0], (2, 3)), (found[1][1], (2,))):
        np.testing.assert_array_equal(block, np.zeros(shape))


@modes
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_nothing_has_an_empty_jacobian(mode, shape):
    assert pe.jacobian(lambda x: np.ones(3) * np.sum(x), np.ones(shape), mode=mode).shape == (3, *shape)
    assert pe.jacobian(lambda x: np.ones(shape) * x, 2.0, mode=mode).shape == shape
    assert pe.jacobian(np.sin, np.ones(shape), mode=mode).shape == shape + shape


@modes
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_that_of_the_result(mode, dtype):
    assert pe.jacobian(np.sin, np.ones(3, dtype), mode=mode).dtype == dtype
    assert pe.jacobian(lambda x: ops.astype(x, np.float64), np.ones(3, dtype), mode=mode).dtype == np.float64
    assert pe.hessian(lambda x: np.sum(x**3), np.ones(3, dtype)).dtype == dtype


@modes
def test_jacobians_of_jacobians(mode, rng):
    x = rng.standard_normal(3)
    inner = pe.jacobian(lambda x: pe.jacobian(lambda x: np.outer(x, x) @ x, x, mode=mode), x)
    outer = pe.jacobian(lambda x: pe.jacobian(lambda x: np.outer(x, x) @ x, x), x, mode=mode)
    eye = np.eye(3)
    # of x_i |x|^2: by x_j 2 x_i x_j + [i = j] |x|^2, and by x_k once more
    expected = 2 * (np.einsum("ik,j->ijk", eye, x) + np.einsum("jk,i->ijk", eye, x) + np.einsum("ij,k->ijk", eye, x))
    np.testing.assert_allclose(inner, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(outer, expected, rtol=1e-12, atol=1e-12)


@modes
def test_a_jacobian_sees_the_tensors_around_it(mode):
    def norm(w):
        return np.sum(pe.jacobian(lambda x: np.sin(w * x), np.array([1.0, 2.0]), mode=mode) ** 2)

    w, x = np.array([0.3, 0.7]), np.array([1.0, 2.0])
    expected = 2 * w * np.cos(w * x) ** 2 - 2 * w**2 * np.cos(w * x) * np.sin(w * x) * x
    np.testing.assert_allclose(pe.grad(norm)(w), expected, rtol=1e-12)
    np.testing.assert_allclose(pe.compile(pe.grad(norm))(w), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("columns", "rows", "mode"), [(1, 1, "forward"), (3, 5, "forward"), (7, 7, "forward"), (5, 3, "reverse")]
)
def test_the_mode_follows_from_the_shapes(columns, rows, mode):
    pulled = []

    def pull(g, y, x):
        pulled.append("reverse")
        return np.sum(g) * np.ones(columns)

    def push(t, y, x):
        pulled.append("forward")
        return np.sum(t[0]) * np.ones(rows)

    total = pe.custom_rule(lambda x: np.sum(x) * np.ones(rows), vjp=pull, jvp=push)
    np.testing.assert_array_equal(pe.jacobian(total, np.ones(columns)), np.ones((rows, columns)))
    assert set(pulled) == {mode}


@modes
def test_the_number_of_ops_does_not_grow_with_the_matrix(mode):
    def ops_of(n):
        x = Tensor.symbol((n,), np.float64)
        weight = np.ones((n, n))
        return len(trace(lambda x: [pe.jacobian(lambda x: np.tanh(weight @ np.sin(x)), x, mode=mode)], [x]).equations)

    assert ops_of(3) == ops_of(60) < 20


def test_a_compiled_hessian_is_one_pass():
    def ops_of(n):
        x = Tensor.symbol((n,), np.float64)
        return len(trace(lambda x: [pe.hessian(rosenbrock, x)], [x]).equations)

    assert ops_of(4) == ops_of(100) < 80


def test_arrays_come_back_as_arrays_and_tensors_as_tensors():
    x = np.array([1.0, 2.0])
    for function in (
        lambda x: pe.jacobian(np.sin, x),
        lambda x: pe.hessian(lambda x: np.sum(np.sin(x)), x),
        lambda x: pe.hvp(lambda x: np.sum(np.sin(x)), x, x),
    ):
        assert type(function(x)) is np.ndarray
        assert type(function(pe.tensor(x))) is Tensor
    a = np.eye(2)
    pe.jacobian(lambda x: a @ x, x, mode="forward")[...] = 7
    np.testing.assert_array_equal(a, np.eye(2))


def test_the_jacobian_of_a_network_agrees_with_torch(torch, rng):
    images, weight = rng.standard_normal((2, 3, 6, 5)), rng.standard_normal((4, 3, 3, 2))

    def ours(x, w, maximum):
        hidden = ops.relu(ops.conv(x, w, padding=1))
        pooled = ops.max_pool(hidden, 2) if maximum else ops.avg_pool(hidden, 2)
        return ops.logsumexp(pooled.reshape(2, -1), -1)

    def theirs(x, w, maximum):
        hidden = torch.relu(torch.nn.functional.conv2d(x, w, padding=1))
        pool = torch.nn.functional.max_pool2d if maximum else torch.nn.functional.avg_pool2d
        return torch.logsumexp(pool(hidden, 2).reshape(2, -1), -1)

    for maximum in (True, False):
        expected = torch.autograd.functional.jacobian(
            lambda x, w, m=maximum: theirs(x, w, m), (torch.tensor(images), torch.tensor(weight))
        )
        for mode in ("forward", "reverse"):
            found = pe.jacobian(lambda p, m=maximum: ours(*p, m), (images, weight), mode=mode)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-12)


# Mistakes -------------------------------------------------------------------------------------------------


def test_modes_and_chunks_that_do_not_exist():
    with pytest.raises(ConfigurationError, match="mode must be 'forward', 'reverse' or None, got 'backward'"):
        pe.jacobian(np.sin, 1.0, mode="backward")
    for transform in (lambda chunk: pe.jacobian(np.sin, 1.0, chunk=chunk), lambda c: pe.hessian(np.sin, 1.0, chunk=c)):
        for chunk in (0, -1, 2.0, True, "auto"):
            with pytest.raises(ConfigurationError, match=f"chunk must be a positive integer or None, got {chunk!r}"):
                transform(chunk)


def test_the_transform_and_the_place_are_named():
    with pytest.raises(NotDifferentiableError, match=r"jacobian: argument 0, \['i'\], is of int64, which has no"):
        pe.jacobian(lambda p: p["i"], {"i": 3})
    with pytest.raises(NotDifferentiableError, match=r"hessian: argument 0 is of complex128, .* separately"):
        pe.hessian(np.sum, np.ones(2) * 1j)
    with pytest.raises(NotDifferentiableError, match="jacobian: the function's result is of bool"):
        pe.jacobian(lambda x: x > 0, 1.0)
    with pytest.raises(ShapeError, match=r"hessian: the function must return a scalar, got shape \(3,\)"):
        pe.hessian(np.sin, np.ones(3))
    with pytest.raises(ShapeError, match=r"hvp: the function must return a scalar, got shape \(3,\)"):
        pe.hvp(np.sin, np.ones(3), np.ones(3))
    with pytest.raises(ShapeError, match=r"hvp: the tangent of argument 0: expected shape \(3,\), got \(2,\)"):
        pe.hvp(np.sum, np.ones(3), np.ones(2))
    with pytest.raises(DTypeError, match=r"hvp: the tangent of argument 0: expected float64, got float32"):
        pe.hvp(np.sum, np.ones(3), np.ones(3, np.float32))
    for transform in (pe.jacobian, pe.hessian, lambda f, x: pe.hvp(f, x, x)):
        with pytest.raises(ConfigurationError, match="expected a function first, got float"):
            transform(1.0, 2.0)


def test_the_examples_are_true():
    assert doctest.testmod(jacobian, extraglobs={"np": np}).failed == 0
