"""Custom rules: opaque functions with derivatives by hand, everywhere that ops work; and stop_gradient."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.op import as_tensor
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, ReplayError, ShapeError, TraceError

both = pytest.mark.parametrize("run", [lambda f: f, pe.compile], ids=["eager", "compiled"])

X = np.array([1.0, 2.0, 3.0])


def opaque(x, y):
    """x ** 2 * y, on arrays only."""
    assert type(x) is np.ndarray and type(y) is np.ndarray
    return np.fft.ifft(np.fft.fft(x)).real ** 2 * y


def pulled(g, r, x, y):
    return g * 2 * x * y, np.sum(g * x * x)


def pushed(tangents, r, x, y):
    return 2 * x * y * tangents[0] + x * x * tangents[1]


custom = pe.custom_rule(opaque, vjp=pulled, jvp=pushed)


def known(x, y):
    return x**2 * y


def through(f):
    return lambda x, y: np.sum(np.sin(f(np.cos(x), y)))


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


# Where it works -------------------------------------------------------------------------------------------


@both
def test_opaque_code_in_the_middle_of_a_function_is_differentiated_by_its_rule(run):
    close(run(pe.grad(through(custom), (0, 1)))(X, 2.0), pe.grad(through(known), (0, 1))(X, 2.0))


@both
def test_second_derivatives_of_rules_that_work_on_tensors(run):
    def size(f):
        return lambda x, y: sum(np.sum(g**2) for g in pe.grad(through(f), (0, 1))(x, y))

    close(run(pe.grad(size(custom), (0, 1)))(X, 2.0), pe.grad(size(known), (0, 1))(X, 2.0))


@both
def test_forward_mode_by_its_rule(run):
    for f in (lambda x, y: pe.jvp(through(custom), (x, y), (y * x, y)), pe.jacobian):
        if f is pe.jacobian:
            found = run(lambda x: pe.jacobian(lambda x: custom(x, 2.0), x, mode="forward"))(X)
            np.testing.assert_allclose(found, np.diag(4 * X), atol=1e-12)
        else:
            close(run(f)(X, np.array(2.0)), pe.jvp(through(known), (X, 2.0), (2 * X, 2.0)))


@both
def test_a_hessian_goes_forward_over_reverse(run):
    found = run(lambda x: pe.hessian(lambda x: through(custom)(x, 2.0), x))(X)
    np.testing.assert_allclose(found, pe.hessian(lambda x: through(known)(x, 2.0), X), rtol=1e-9, atol=1e-12)


def test_backward_and_the_gradient_checker_use_it_too():
    pe.gradcheck(custom, X, np.array(2.0))
    x = pe.tensor(X, requires_grad=True)
    np.sum(custom(x, 2.0)).backward()
    np.testing.assert_allclose(x.grad, 4 * X)


def test_it_is_one_call_of_a_compiled_tape():
    calls = []
    f = pe.custom_rule(lambda x: calls.append(1) or x.copy(), vjp=lambda g, y, x: g)
    compiled = pe.compile(lambda x: np.sum(f(x) * 2))
    compiled(X)
    before = len(calls)
    assert compiled(X) == 12 and compiled(2 * X) == 24
    assert len(calls) == before + 2
    assert compiled.source.count("custom(") == 1


def test_without_derivatives_it_is_a_function_like_any_other():
    f = pe.custom_rule(lambda x: x * 3)
    np.testing.assert_array_equal(f(X).numpy(), 3 * X)
    np.testing.assert_array_equal(pe.compile(f)(X), 3 * X)


@both
def test_inputs_without_a_derivative_and_zero_gradients_are_none(run):
    pick = pe.custom_rule(
        lambda x, i, z: x[i] + 0 * z,
        vjp=lambda g, y, x, i, z: (np.where(np.arange(3) == i, g, 0.0), None, None),
        jvp=lambda t, y, x, i, z: t[0][i] if t[1] is None else None,
    )
    i = np.array(1)
    gx, gz = run(pe.grad(lambda x, z: pick(x, i, z) ** 2, (0, 1)))(X, 5.0)
    np.testing.assert_array_equal(gx, [0, 4, 0])
    assert gz == 0
    assert pe.jvp(lambda x: pick(x, i, 5.0), (X,), (X,))[1] == 2


@both
def test_gradients_of_float32_and_float64_inputs_at_once(run):
    mixed = pe.custom_rule(
        lambda x, y: x.astype(np.float64) * y, vjp=lambda g, r, x, y: ((g * y).astype(np.float32), g * x)
    )
    gx, gy = run(pe.grad(lambda x, y: np.sum(mixed(x, y)), (0, 1)))(X.astype(np.float32), 2 * X)
    np.testing.assert_array_equal(gx, 2 * X)
    np.testing.assert_array_equal(gy, X)
    assert gx.dtype == np.float32 and gy.dtype == np.float64


def test_the_shape_of_a_traced_result_may_be_told():
    inverse = pe.custom_rule(np.linalg.inv, vjp=lambda g, y, x: -y.T @ g @ y.T, infer=lambda x: (x.shape, x.dtype))
    a = np.array([[2.0, 1.0], [0.0, 4.0]])
    found = pe.compile(pe.grad(lambda a: np.sum(inverse(a))))(a)
    y = np.linalg.inv(a)
    np.testing.assert_allclose(found, -y.T @ np.ones((2, 2)) @ y.T)


# Mistakes -------------------------------------------------------------------------------------------------


def rule(**kwargs):
    def mine(x, y):
        return x * y

    return pe.custom_rule(mine, **kwargs)


def differentiate(f):
    return pe.grad(lambda x, y: np.sum(f(x, y)), (0, 1))


@both
@pytest.mark.parametrize(
    ("vjp", "error", "message"),
    [
        (
            lambda g, r, x, y: (g, np.sum(g)),
            ShapeError,
            r"custom rule mine: the gradient of input 1 must have shape \(3,\), got \(\)",
        ),
        (
            lambda g, r, x, y: (g.astype(np.float32), g),
            DTypeError,
            r"custom rule mine: the gradient of input 0 must be of float64, got float32",
        ),
        (
            lambda g, r, x, y: (g,),
            ShapeError,
            r"custom rule mine: vjp must return one gradient per input, 2 in all.*1$",
        ),
        (lambda g, r, x, y: g, ShapeError, r"one gradient per input, 2 in all, but returned 1"),
        (lambda g, r, x, y: (g, g, g), ShapeError, r"one gradient per input, 2 in all, but returned 3"),
    ],
    ids=["shape", "dtype", "too few", "not a tuple", "too many"],
)
def test_a_vjp_of_the_wrong_kind_is_named(run, vjp, error, message):
    with pytest.raises(error, match=message):
        run(differentiate(rule(vjp=vjp)))(X, X)


@both
def test_a_jvp_of_the_wrong_kind_is_named(run):
    f = rule(jvp=lambda t, r, x, y: np.sum(t[0]))
    with pytest.raises(ShapeError, match=r"mine: the tangent of the result must have shape \(3,\), got \(\)"):
        run(lambda x: pe.jvp(f, (x, x), (x, x))[1])(X)
    f = rule(jvp=lambda t, r, x, y: t[0].astype(np.float32))
    with pytest.raises(DTypeError, match=r"mine: the tangent of the result must be of float64, got float32"):
        run(lambda x: pe.jvp(f, (x, x), (x, x))[1])(X)


@both
def test_a_missing_rule_is_asked_for_by_name(run):
    with pytest.raises(NotDifferentiableError, match=r"custom rule mine: a gradient is taken.*give vjp="):
        run(differentiate(rule(jvp=lambda t, r, x, y: t[0] * y)))(X, X)
    with pytest.raises(NotDifferentiableError, match=r"custom rule mine: a forward-mode derivative is.*give jvp="):
        run(lambda x: pe.jvp(rule(vjp=pulled), (x, x), (x, x))[1])(X)


@both
def test_a_second_derivative_through_an_opaque_rule_is_refused(run):
    f = pe.custom_rule(lambda x: x**2, vjp=lambda g, y, x: g * 2 * np.fft.ifft(np.fft.fft(x)).real)
    np.testing.assert_allclose(run(pe.grad(lambda x: np.sum(f(x))))(X), 2 * X)
    with pytest.raises(NotDifferentiableError, match="a second derivative is taken, so its rules must work on tensors"):
        run(pe.grad(lambda x: np.sum(pe.grad(lambda x: np.sum(f(x)))(x))))(X)


def test_a_function_that_cannot_be_tried_needs_infer():
    f = pe.custom_rule(np.linalg.inv)
    with pytest.raises(TraceError, match=r"custom rule inv.*failed \(LinAlgError: Singular matrix\); give infer="):
        pe.compile(f)(np.array([[2.0, 1.0], [0.0, 4.0]]))


def test_a_function_whose_shape_depends_on_values_is_refused_when_replayed():
    f = pe.custom_rule(lambda x: x[x > 0])
    assert f(np.array([1.0, -1.0])).shape == (1,)
    with pytest.raises(
        ShapeError, match=r"returned shape \(1,\) float64, but \(2,\) float64 when it was tried on ones"
    ):
        pe.compile(f)(np.array([1.0, -1.0]))
    told = pe.custom_rule(lambda x: x.astype(np.float32), infer=lambda x: (x.shape, x.dtype))
    with pytest.raises(ShapeError, match=r"\(3,\) float32, but \(3,\) float64 is what infer said"):
        pe.compile(told)(X)


def test_results_and_inputs_are_arrays():
    with pytest.raises(DTypeError, match="must return one array of numbers, got <U5"):
        pe.custom_rule(lambda x: "three")(X)
    with pytest.raises(ShapeError, match="input 0 is a container; pass its arrays"):
        pe.custom_rule(lambda x: x[0])((pe.tensor(X), pe.tensor(X)))


def test_a_function_may_return_the_same_memory_at_every_call():
    buffer = np.zeros(2)
    double = pe.custom_rule(lambda x: np.multiply(x, 2, out=buffer), vjp=lambda g, y, x: 2 * g)
    first = double(np.array([1.0, 2.0]))
    double(np.array([5.0, 5.0]))
    np.testing.assert_array_equal(first.numpy(), [2.0, 4.0])
    product = pe.grad(lambda x: np.sum(double(x) * double(x + 1)))(np.array([1.0, 2.0]))
    np.testing.assert_allclose(product, [12.0, 20.0])  # of 4 x (x + 1)


def test_a_compiled_function_may_call_itself_on_other_shapes_only():
    inner = pe.custom_rule(lambda x: compiled(x[1:]) if x.size > 1 else x, infer=lambda x: (x[:1].shape, x.dtype))
    compiled = pe.compile(lambda x: inner(x) * 2 + x[0])
    for _ in range(2):
        np.testing.assert_array_equal(compiled(np.array([1.0, 2.0, 3.0])), [2 * (2 * (2 * 3 + 3) + 2) + 1])

    again = [False]
    same = pe.custom_rule(lambda x: compiled(x) if again[0] else x)
    compiled = pe.compile(lambda x: same(x) * 2 + x)
    np.testing.assert_array_equal(compiled(X), 3 * X)
    again[0] = True
    with pytest.raises(ReplayError, match="call the function that was compiled there"):
        compiled(X)
    again[0] = False
    np.testing.assert_array_equal(compiled(X), 3 * X)

    again[0] = True
    with pytest.raises(TraceError, match="RecursionError"):  # while it is traced
        compiled(X[:2])


# stop_gradient --------------------------------------------------------------------------------------------


@both
def test_no_gradient_flows_through_a_stopped_container(run):
    def f(x):
        held = pe.stop_gradient({"a": x, "b": [x * x, None]})
        return np.sum(held["a"] * x + held["b"][0])

    np.testing.assert_array_equal(run(pe.grad(f))(X), X)
    np.testing.assert_array_equal(pe.stop_gradient(X).numpy(), X)


@both
def test_a_stopped_value_does_not_move_in_forward_mode(run):
    found = run(lambda x: pe.jvp(lambda x: x * pe.stop_gradient(x), (x,), (as_tensor(np.ones(3)),))[1])(X)
    np.testing.assert_array_equal(found, X)


def test_a_rule_without_inputs_is_a_constant():
    ones = pe.custom_rule(lambda: np.ones(2))
    assert not ones().requires_grad
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(x * ones()))(np.zeros(2)), np.ones(2))


def test_what_is_no_array_no_tangent_and_no_function_is_refused():
    v = np.array([0.7, -0.3, 1.2])
    with pytest.raises(ShapeError, match="must return one array, got a tuple of 2"):
        pe.custom_rule(lambda a: (a, 2 * a))(v)
    with pytest.raises(ShapeError, match="jvp returned None; where the tangent is zero, return zeros"):
        pe.jvp(pe.custom_rule(lambda a: a, jvp=lambda t, y, a: None), (v,), (v,))
    short = pe.custom_rule(lambda a: a[:2], infer=lambda a: ((3,), np.float64))
    for call in (short, pe.compile(short)):
        with pytest.raises(ShapeError, match=r"returned shape \(2,\) float64, but \(3,\) float64 is what infer said"):
            call(v)
    for name in ("vjp", "jvp", "infer"):
        with pytest.raises(ConfigurationError, match=f"custom_rule: {name} must be a function, got 3"):
            pe.custom_rule(lambda a: a, **{name: 3})
