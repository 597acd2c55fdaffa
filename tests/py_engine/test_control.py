"""cond and while_loop: eager and compiled, derivatives of every kind, many samples, and mistakes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.program import trace
from py_engine.errors import ConfigurationError, DTypeError, LabelError, ShapeError, TraceError

both = pytest.mark.parametrize("run", [lambda f: f, pe.compile], ids=["eager", "compiled"])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def all_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        close(a, b)


TRANSFORMS = {
    "value": lambda f: lambda *x: [f(*x)],
    "gradient": lambda f: pe.grad(f, (0, 1)),
    "tangent": lambda f: lambda *x: pe.jvp(f, x, [np.cos(a) for a in x]),
    "second, reverse over reverse": lambda f: pe.grad(
        lambda *x: sum(np.sum(np.sin(g)) for g in pe.grad(f, (0, 1))(*x)), (0, 1)
    ),
    "second, forward over reverse": lambda f: lambda *x: pe.jvp(pe.grad(f, (0, 1)), x, [np.cos(a) for a in x])[1],
    "second, reverse over forward": lambda f: pe.grad(lambda *x: pe.jvp(f, x, [np.cos(a) for a in x])[1], (0, 1)),
    "second, forward over forward": lambda f: (
        lambda *x: pe.jvp(lambda *x: pe.jvp(f, x, [np.cos(a) for a in x])[1], x, x)
    ),
    "third": lambda f: pe.grad(
        lambda *x: sum(
            np.sum(np.sin(g))
            for g in pe.grad(lambda *x: sum(np.sum(np.sin(g)) for g in pe.grad(f, (0, 1))(*x)), (0, 1))(*x)
        ),
        (0, 1),
    ),
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)

W, X = np.array([[0.5, -0.3], [0.2, 0.4]]), np.array([0.9, -0.7])


# Branches -------------------------------------------------------------------------------------------------


def branching(w, x):
    found = pe.cond(np.sum(x) > 0, lambda x: (np.tanh(w @ x), x[0]), lambda x: (np.sin(x), x @ w @ x), x)
    return np.sum(found[0] ** 2) * found[1]


def branching_in_python(w, x):
    found = (np.tanh(w @ x), x[0]) if np.sum(x) > 0 else (np.sin(x), x @ w @ x)
    return np.sum(found[0] ** 2) * found[1]


@both
@transforms
def test_a_branch_has_the_values_and_derivatives_of_python(run, transform):
    called = run(transform(branching))
    for x in (X, -X):
        all_close(called(W, x), transform(branching_in_python)(W, x))


@both
def test_only_one_branch_is_computed(run):
    taken = []

    def noting(name):
        def function(x):
            taken.append(name)
            return x * 2

        return pe.custom_rule(function, vjp=lambda g, y, x: g * 2, infer=lambda x: (x.shape, x.dtype))

    called = run(pe.grad(lambda x: pe.cond(x > 0, noting("yes"), noting("no"), x)))
    for x, name in ((1.0, "yes"), (-1.0, "no"), (2.0, "yes")):
        taken.clear()
        close(called(np.array(x)), 2)
        assert set(taken) == {name}


@both
def test_containers_numbers_and_what_is_captured(run):
    scale = pe.tensor(3.0)

    def function(p, flag):
        found = pe.cond(
            flag,
            lambda p, n: {"a": p["x"] * scale, "n": n + 1, "z": 0.0},
            lambda p, n: {"z": p["x"][0], "n": n, "a": p["x"]},
            p,
            np.array(4),
        )
        return found["a"], found["n"], found["z"]

    called = run(function)
    a, n, z = called({"x": np.ones(2)}, np.array(True))
    close(a, [3, 3])
    assert n == 5 and z == 0 and np.asarray(n).dtype == np.int64
    a, n, z = called({"x": np.ones(2)}, np.array(False))
    close(a, [1, 1])
    assert n == 4 and z == 1
    scale.assign(5.0)
    close(called({"x": np.ones(2)}, np.array(True))[0], [5, 5])
    assert run(lambda x: pe.cond(True, lambda x: x, lambda x: 0.0, x))(np.float32(2)).dtype == np.float32


@pytest.mark.parametrize("true", [True, np.True_, np.array(True)])
def test_a_truth_value_stays_one(true):
    assert pe.cond(np.True_, lambda f: f, lambda f: f, true).dtype == np.bool_
    assert not pe.while_loop(lambda go: go, lambda go: go & False, true).item()
    assert pe.scan(lambda ok, x: (ok & (x > 0), None), true, np.ones(3))[0].item() is True
    assert pe.while_loop(lambda n: n < 3, lambda n: n + 1, 0).dtype == np.float64


@both
@pytest.mark.parametrize("shared", [False, True])
def test_branches_of_many_samples(run, shared):
    xs = np.array([[0.9, -0.7], [-0.4, 0.1], [0.3, 0.3]])
    flags = np.array(True) if shared else np.array([True, False, True])

    def function(flag, x):
        return pe.cond(flag, lambda x: (np.tanh(W @ x), np.sum(W)), lambda x: (np.sin(x), x[0]), x)

    def loss(flag, x):
        y, s = function(flag, x)
        return np.sum(y**2) * s

    axes = (None if shared else 0, 0)
    for f in (loss, pe.grad(loss, 1), lambda flag, x: pe.jvp(lambda x: loss(flag, x), (x,), (x,))[1]):
        each = [np.asarray(pe.compile(f)(np.array(flags if shared else flags[k]), x)) for k, x in enumerate(xs)]
        close(run(pe.vmap(f, in_axes=axes))(flags, xs), each)
    through = run(pe.grad(lambda xs: np.sum(pe.vmap(loss, in_axes=axes)(flags, xs))))(xs)
    close(through, [pe.grad(loss, 1)(np.array(flags if shared else flags[k]), x) for k, x in enumerate(xs)])


@both
def test_checks_are_those_of_the_branch_that_is_taken(run):
    logits = np.zeros((2, 3))

    def function(flag, labels):
        return pe.cond(flag, lambda y: ops.softmax_cross_entropy(logits, y), lambda y: 1.0, labels)

    called = run(function)
    wrong = np.array([0, 7])
    close(called(np.array(False), wrong), 1)
    with pytest.raises(LabelError, match="label 7"):
        called(np.array(True), wrong)


@both
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: pe.cond(x, np.sin, np.cos, x), DTypeError, "cond: pred must be a truth value, such as x > 0"),
        (lambda x: pe.cond(np.stack([x, x]) > 0, np.sin, np.cos, x), ShapeError, r"one truth value, got shape \(2,\)"),
        (lambda x: pe.cond(x > 0, 1.0, np.cos, x), ConfigurationError, "true_fun must be a function, got float"),
        (lambda x: pe.cond(x > 0, np.sin, None, x), ConfigurationError, "false_fun must be a function, got None"),
        (lambda x: pe.cond(x > 0, lambda x: np.stack([x, x]), np.cos, x), ShapeError,
         r"cond: the result is of shape \(2,\) from true_fun, and \(\) from false_fun"),
        (lambda x: pe.cond(x > 0, lambda x: {"a": x}, lambda x: {"a": x > 1}, x), DTypeError,
         r"cond: the result\['a'\] is of float64 from true_fun, and bool from false_fun"),
        (lambda x: pe.cond(x > 0, lambda x: (x, x), np.cos, x), ShapeError, "expected an array, got a tuple of 2"),
        (lambda x: pe.cond(x > 0, lambda x: x if x > 1 else -x, np.cos, x), TraceError, "while_loop"),
        (lambda x: pe.cond(x > 0, np.sin, np.cos, "x"), DTypeError, "cond: operand"),
    ],
)  # fmt: skip
def test_mistakes_of_branches_are_named(run, call, error, match):
    with pytest.raises(error, match=match):
        run(call)(np.array(0.5))


def test_a_drawing_branch_has_no_derivative():
    def function(x):
        return pe.cond(np.sum(x) > 0, lambda x: np.sum(ops.dropout(x, 0.5, np.random.default_rng(0))), np.sum, x)

    assert pe.compile(function)(np.ones(4)) >= 0
    with pytest.raises(TraceError, match="cond: a function draws random numbers"):
        pe.compile(pe.grad(function))(np.ones(4))


# Loops that end on a value --------------------------------------------------------------------------------


def looping(w, x):
    """Until the vector is short, or many steps are done: the number of steps depends on the values."""
    n, x, total = pe.while_loop(
        lambda c: np.sum(c[1] ** 2) > 0.01, lambda c: (c[0] + 1, np.tanh(w @ c[1]), c[2] + c[1][0]), (0, x, 0.5)
    )
    return np.sum(np.sin(x)) * total + n


def looping_in_python(w, x):
    total, n = 0.5, 0
    while np.sum(x**2) > 0.01:
        n, x, total = n + 1, np.tanh(w @ x), total + x[0]
    return np.sum(np.sin(x)) * total + n


@both
@transforms
def test_a_loop_has_the_values_and_derivatives_of_python(run, transform):
    called = run(transform(looping))
    for x in (X, 5 * X, X * 0.01, np.array([0.05, 0.2])):
        all_close(called(W, x), transform(looping_in_python)(W, x))


@both
def test_fourth_derivatives_of_newtons_method(run):
    def root(a):
        return pe.while_loop(lambda x: np.abs(x * x - a) > 1e-14, lambda x: (x + a / x) / 2, a)

    function = root
    for expected in (2**0.5, 0.5 * 2**-0.5, -0.25 * 2**-1.5, 0.375 * 2**-2.5):
        np.testing.assert_allclose(run(function)(np.array(2.0)), expected, rtol=1e-3)
        function = pe.grad(function)
    np.testing.assert_allclose(run(root)(np.array(2.0)), 2**0.5, rtol=1e-14)


@both
@pytest.mark.parametrize("limit", [0, 1, 2, 1000])
def test_a_limit_of_steps(run, limit):
    def function(x):
        n, y = pe.while_loop(lambda c: c[1] < 100, lambda c: (c[0] + 1, c[1] * c[1]), (0, x), max_steps=limit)
        return y, n

    y, n = run(function)(np.array(3.0))
    steps = min(limit, 3)
    assert n == steps and y == 3.0 ** (2**steps)
    close(run(pe.grad(lambda x: function(x)[0]))(np.array(3.0)), 2**steps * 3.0 ** (2**steps - 1))


@both
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 8, 9, 10, 17])
def test_every_number_of_steps_goes_back_through_its_segments(run, steps):
    def function(w, x, n):
        last = pe.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, np.sin(w @ c[1]) + c[0] * x), (0.0, x))
        return np.sum(last[1] ** 2)

    def plain(w, x):
        y = x
        for k in range(steps):
            y = np.sin(w @ y) + k * x
        return np.sum(y**2)

    found = run(pe.grad(function, (0, 1, 2)))(W, X, np.array(float(steps)))
    all_close(found[:2], pe.grad(plain, (0, 1))(W, X))
    assert found[2] == 0  # the number of steps has no derivative


def test_one_tape_serves_every_number_of_steps():
    compiled = pe.compile(pe.value_and_grad(looping, (0, 1)))
    for scale in (1, 3, 0.01, 10):
        value, found = compiled(W, scale * X)
        close(value, looping_in_python(W, Tensor(scale * X)).item())
        all_close(found, pe.grad(looping_in_python, (0, 1))(W, scale * X))
    assert len(compiled.tapes) == 1


def test_memory_grows_with_the_square_root_of_the_steps():
    size = 1000

    def function(x, n):
        return np.sum(pe.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, np.sin(c[1])), (0.0, x))[1])

    compiled = pe.compile(pe.grad(function))
    compiled(np.ones(size), np.array(4.0))
    peaks = []
    for n in (100.0, 10_000.0):
        tracemalloc.start()
        try:
            compiled(np.ones(size), np.array(n))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 15 * peaks[0] and peaks[1] < 2.5 * 100 * size * 8  # of 10,000 carries


def test_the_graph_does_not_grow_with_the_steps():
    symbols = [Tensor.symbol((2, 2), "f8"), Tensor.symbol((2,), "f8")]
    assert len(trace(lambda *x: [*pe.grad(looping, (0, 1))(*x)], symbols).equations) < 25


@both
def test_loops_of_many_samples_end_each_at_its_own_step(run):
    xs = np.array([0.3, 1.0, 5.0]).reshape(3, 1) * X

    single = {
        "value": looping,
        "gradient": pe.grad(looping, (0, 1)),
        "tangent": lambda w, x: pe.jvp(looping, (w, x), (w, x))[1],
        "product": lambda w, x: pe.hvp(lambda x: looping(w, x), x, np.cos(x)),
        "hessian": lambda w, x: pe.hessian(lambda x: looping(w, x), x),
    }
    for name, function in single.items():
        found = run(pe.vmap(function, in_axes=(None, 0)))(W, xs)
        each = [pe.compile(function)(W, x) for x in xs]
        if name == "gradient":
            for k, part in enumerate(found):
                close(part, [g[k] for g in each])
        else:
            close(found, each)
    through = run(pe.grad(lambda w, xs: np.sum(pe.vmap(looping, in_axes=(None, 0))(w, xs)), (0, 1)))(W, xs)
    each = [pe.grad(looping, (0, 1))(W, x) for x in xs]
    close(through[0], np.sum([g[0] for g in each], axis=0))
    close(through[1], [g[1] for g in each])
    hessian = run(lambda w: pe.hessian(lambda w: np.sum(pe.vmap(looping, in_axes=(None, 0))(w, xs)), w))(W)
    close(hessian, np.sum([pe.hessian(lambda w, x=x: looping(w, x), W) for x in xs], axis=0))


@both
def test_a_loop_whose_end_all_samples_share(run):
    xs = np.array([[0.5, 1.0], [2.0, -1.0], [0.1, 0.2]])

    def function(x, n):
        def body(c):
            return c[0] + 1, np.sin(c[1] * x), c[2] * 0.5

        k, y, z = pe.while_loop(lambda c: c[0] < n, body, (np.array(0), x, 1.0))
        return np.sum(y) * z, k, z

    n = np.array(4)
    value, k, z = run(pe.vmap(function, in_axes=(0, None), out_axes=(0, None, None)))(xs, n)
    close(value, [np.asarray(function(Tensor(x), n)[0].numpy()) for x in xs])
    assert k == 4 and z == 0.5**4  # computed once, for all
    gradient = pe.grad(lambda x, n: function(x, n)[0])
    close(run(pe.vmap(gradient, in_axes=(0, None)))(xs, n), [gradient(x, n) for x in xs])
    shared = pe.vmap(pe.grad(lambda a, x: function(x * a, n)[0]), in_axes=(None, 0))
    close(run(shared)(np.array(2.0), xs), [pe.grad(lambda a, x=x: function(x * a, n)[0])(np.array(2.0)) for x in xs])


@both
def test_loops_in_loops_and_branches_in_loops(run):
    def collatz(n):
        def step(c):
            n, steps = c
            return pe.cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n), steps + 1

        return pe.while_loop(lambda c: c[0] > 1, step, (n, 0))[1]

    assert run(collatz)(np.array(27)) == 111
    np.testing.assert_array_equal(run(pe.vmap(collatz))(np.array([1, 6, 27])), [0, 8, 111])

    def nested(w, xs):
        def body(h, x):
            inner = pe.while_loop(lambda c: np.sum(c * c) > 0.3, lambda c: np.tanh(w @ c), h + x)
            return pe.cond(inner[0] > 0, lambda h: h * 2, lambda h: np.sin(h), inner), np.sum(inner)

        last, ys = pe.scan(body, X, xs)
        return np.sum(last) + np.sum(ys)

    def plain(w, xs):
        h, total = X, 0.0
        for k in range(4):
            c = h + xs[k]
            while np.sum(c * c) > 0.3:
                c = np.tanh(w @ c)
            h, total = c * 2 if c[0] > 0 else np.sin(c), total + np.sum(c)
        return np.sum(h) + total

    xs = np.random.default_rng(0).standard_normal((4, 2))
    all_close(run(pe.grad(nested, (0, 1)))(W, xs), pe.grad(plain, (0, 1))(W, xs))
    close(
        run(pe.vmap(lambda xs: pe.grad(nested)(W, xs)))(np.stack([xs, -xs])),
        [pe.grad(plain)(W, xs), pe.grad(plain)(W, -xs)],
    )


@both
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: pe.while_loop(1, np.sin, x), ConfigurationError, "cond must be a function, got int"),
        (lambda x: pe.while_loop(lambda x: x > 0, None, x), ConfigurationError, "body must be a function, got NoneTy"),
        (lambda x: pe.while_loop(lambda x: x > 0, np.sin, x, max_steps=-1), ConfigurationError, "or None, got -1"),
        (lambda x: pe.while_loop(lambda x: x, np.sin, x), DTypeError, "what cond returns must be a truth value"),
        (lambda x: pe.while_loop(lambda x: np.stack([x]) > 0, np.sin, x), ShapeError, r"value, got shape \(1,\)"),
        (lambda x: pe.while_loop(lambda x: x > 0, lambda x: np.stack([x]), x), ShapeError,
         r"while_loop: the carry must keep its shape, but it was \(\) and the function made it \(1,\)"),
        (lambda x: pe.while_loop(lambda c: c["x"] > 0, lambda c: {"x": c["x"] > 1}, {"x": x}), DTypeError,
         r"while_loop: the carry\['x'\] must keep its dtype, but it was float64 and the function made it bool"),
        (lambda x: pe.while_loop(lambda c: c[0] > 0, lambda c: c[0], (x,)), ShapeError, "that body returned: expe"),
        (lambda x: pe.while_loop(lambda x: x > 0, lambda x: x if x > 1 else -x, x), TraceError, "while_loop"),
        (lambda x: pe.while_loop(lambda c: True, lambda c: c, ()), ShapeError, "init must hold an array at least"),
        (lambda x: pe.while_loop(lambda c: x > 0, lambda c: c, "text"), DTypeError, "while_loop: the carry is of <U4"),
    ],
)  # fmt: skip
def test_mistakes_of_loops_are_named(run, call, error, match):
    with pytest.raises(error, match=match):
        run(call)(np.array(0.5))


def test_a_drawing_loop_has_no_derivative():
    def function(x):
        draw = np.random.default_rng(0)
        return np.sum(pe.while_loop(lambda c: np.sum(c) > 1, lambda c: ops.dropout(c, 0.5, draw) * 0.4, x))

    assert pe.compile(function)(np.ones(4)) <= 1
    with pytest.raises(TraceError, match="while_loop: the function draws random numbers"):
        pe.grad(function)(np.ones(4))


@both
def test_values_in_a_loop_are_checked(run):
    def function(ids, x):
        return pe.while_loop(lambda x: x < 1, lambda x: x + np.sum(ops.embedding(np.ones((3, 2)), ids)), x)

    close(run(function)(np.array([1]), np.array(0.0)), 2)
    with pytest.raises(ShapeError, match="token id 3"):
        run(function)(np.array([3]), np.array(0.0))


def test_branches_and_loops_on_values_in_python_are_refused_with_what_to_use():
    for function in (
        lambda x: x if np.sum(x) > 0 else -x,
        lambda x: [x for _ in range(int(x[0]))],
        lambda x: x * float(x[0]),
        lambda x: x * x[0].item(),
    ):
        with pytest.raises(TraceError, match=r"cond\(\), while_loop\(\) and scan\(\), instead of Python branches and"):
            pe.compile(function)(np.ones(2))


def test_random_loops_against_python(rng):
    """Bodies of random matrices that end at random steps, through both kinds of derivative."""
    compiled = pe.compile(lambda w, x: (*pe.grad(looping, (0, 1))(w, x), pe.jvp(looping, (w, x), (x * w, x))[1]))
    for _ in range(20):
        w, x = rng.standard_normal((2, 2)), rng.standard_normal(2)
        w *= rng.uniform(0.2, 0.9) / np.linalg.norm(w, 2)  # so that it ends
        expected = (*pe.grad(looping_in_python, (0, 1))(w, x), pe.jvp(looping_in_python, (w, x), (x * w, x))[1])
        all_close(compiled(w, x), expected)
