"""vmap: every op of the table against its results for each sample, and the transforms in and around it."""

from __future__ import annotations

from collections import namedtuple
from functools import partial

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, network, ops
from py_engine.ad.op import TABLE, Op
from py_engine.ad.program import trace
from py_engine.ad.vmap import ONE_BY_ONE
from py_engine.errors import ConfigurationError, DTypeError, LabelError, ShapeError, TraceError
from tests.py_engine.test_ops import LINES, Line, examples

both = pytest.mark.parametrize("run", [lambda f: f, pe.compile], ids=["eager", "compiled"])

COUNT = 3
BATCHED = [line for line in LINES if not (line.random or (line.name in TABLE and TABLE[line.name].fused))]


def samples_of(line, example, rng):
    """`COUNT` drawings of each operand."""
    return [line.arrays(rng, example) for _ in range(COUNT)]


def stacked(values):
    return [np.stack(each) for each in zip(*values, strict=True)]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def choices(line, example):
    """Which operands are mapped: all, each alone, and all but the first."""
    n = len(example.shapes)
    return dict.fromkeys(
        [(True,) * n, *(tuple(i == k for i in range(n)) for k in range(n)), (False,) + (True,) * (n - 1)]
    )


# Every op -------------------------------------------------------------------------------------------------


@both
@examples(BATCHED)
def test_an_op_on_all_samples_is_the_op_on_each(line, example, run, rng):
    drawn = samples_of(line, example, rng)
    arrays, call = stacked(drawn), partial(line.call, **example.attrs)
    for mapped in choices(line, example):
        if not any(mapped):
            continue
        each = [[drawn[k if m else 0][i] for i, m in enumerate(mapped)] for k in range(COUNT)]
        expected = np.stack([call(*map(Tensor, operands)).numpy() for operands in each])
        given = [a if m else a[0, ...] for a, m in zip(arrays, mapped, strict=True)]
        found = run(pe.vmap(call, in_axes=tuple(0 if m else None for m in mapped)))(*given)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        close(found, expected)
    last = [np.moveaxis(a, 0, -1) for a in arrays]
    found = run(pe.vmap(call, in_axes=-1, out_axes=-1))(*last)
    close(np.moveaxis(found, -1, 0), np.stack([call(*map(Tensor, operands)).numpy() for operands in drawn]))


def differentiable(line, example):
    """The numbers of the operands of floats."""
    arrays = line.arrays(np.random.default_rng(0), example)
    return tuple(i for i, a in enumerate(arrays) if a.dtype == np.float64)


@both
@examples([line for line in BATCHED if line.differentiable])
def test_gradients_of_samples_and_gradients_through_all_of_them(line, example, run, rng):
    drawn = samples_of(line, example, rng)
    arrays, call, numbers = stacked(drawn), partial(line.call, **example.attrs), differentiable(line, example)
    weights = rng.standard_normal((COUNT, *call(*map(Tensor, drawn[0])).shape))

    def loss(weights, *operands):
        return np.sum(call(*operands) * weights)

    by = tuple(i + 1 for i in numbers)
    single = pe.grad(loss, by)
    expected = stacked([single(w, *operands) for w, operands in zip(weights, drawn, strict=True)])
    # Of each sample; and of all, by their own operands and by those that they share.
    for found, gradient in zip(run(pe.vmap(single))(weights, *arrays), expected, strict=True):
        close(found, gradient)
    through = run(pe.grad(lambda w, *x: np.sum(pe.vmap(loss)(w, *x)), by))(weights, *arrays)
    for found, gradient in zip(through, expected, strict=True):
        close(found, gradient)
    for i, n in enumerate(numbers):
        axes = tuple(None if k == n else 0 for k in range(len(arrays)))
        given = [a[0, ...] if k == n else a for k, a in enumerate(arrays)]
        if axes == (None,):
            continue
        each = [
            single(w, *[given[k] if k == n else x for k, x in enumerate(o)])
            for w, o in zip(weights, drawn, strict=True)
        ]
        alone = run(pe.grad(lambda w, *x, a=axes: np.sum(pe.vmap(loss, in_axes=(0, *a))(w, *x)), n + 1))(
            weights, *given
        )
        close(alone, np.sum([g[i] for g in each], axis=0))


@both
@examples([line for line in BATCHED if line.differentiable])
def test_tangents_of_samples(line, example, run, rng):
    drawn = samples_of(line, example, rng)
    arrays, call, numbers = stacked(drawn), partial(line.call, **example.attrs), differentiable(line, example)

    def tangent(*operands):
        return pe.jvp(call, operands, [np.cos(x) if i in numbers else None for i, x in enumerate(operands)])[1]

    expected = np.stack([tangent(*operands) for operands in drawn])
    close(run(pe.vmap(tangent))(*arrays), expected)
    moves = [np.cos(x) if i in numbers else None for i, x in enumerate(arrays)]
    close(run(lambda *x: pe.jvp(pe.vmap(call), x, moves)[1])(*arrays), expected)


def test_every_op_of_the_table_is_batched_at_once():
    """Only what no other op can be made to do for all samples takes one after the other."""
    batched = {name for name, op in TABLE.items() if op.elementwise or op.batch is not None}
    assert set(TABLE) - batched == {name for name, op in TABLE.items() if op.fused and not op.elementwise}
    taken = set()
    for line in BATCHED:
        operands = stacked([line.arrays(np.random.default_rng(0), line.examples[0]) for _ in range(2)])
        call = partial(line.call, **line.examples[0].attrs)
        symbols = [Tensor.symbol(a.shape, a.dtype) for a in operands]
        program = trace(lambda *x, call=call: [pe.vmap(call)(*x)], symbols)
        taken |= {line.name for equation in program.equations if equation.op is ONE_BY_ONE}
    assert taken == {"searchsorted"}


def test_an_op_without_a_rule_takes_one_sample_after_the_other(rng):
    def kernel(x, y, out, factor):
        assert x.ndim == y.ndim == 1
        np.multiply(x, factor * y[::-1], out)

    op = Op(
        "turned",
        lambda x, y, factor: (x.shape, x.dtype),
        kernel=kernel,
        vjp=(lambda g, r, x, y, factor: g * factor * y[::-1], lambda g, r, x, y, factor: (g * factor * x)[::-1]),
        jvp=lambda t, r, x, y, factor: (
            (0.0 if t[0] is None else t[0] * factor * y[::-1]) + (0.0 if t[1] is None else x * factor * t[1][::-1])
        ),
    )
    x, y = rng.standard_normal((4, 3)), rng.standard_normal(3)

    def function(x, y):
        return np.sum(pe.vmap(partial(op, factor=2.0), in_axes=(0, None))(x, y) ** 2)

    def plain(x, y):
        return np.sum((x * 2.0 * y[::-1]) ** 2)

    for transform in (
        lambda f: pe.grad(f, (0, 1)),
        lambda f: pe.compile(pe.grad(f, (0, 1))),
        lambda f: lambda x, y: pe.jvp(f, (x, y), (np.cos(x), np.sin(y))),
        lambda f: lambda x, y: [pe.hessian(lambda y: f(x, y), y), pe.hessian(lambda x: f(x, y), x)],
    ):
        for found, expected in zip(transform(function)(x, y), transform(plain)(x, y), strict=True):
            close(found, expected)
    symbols = [Tensor.symbol(x.shape, x.dtype), Tensor.symbol(y.shape, y.dtype)]
    program = trace(lambda x, y: [pe.vmap(partial(op, factor=2.0), in_axes=(0, None))(x, y)], symbols)
    assert [equation.op for equation in program.equations] == [ONE_BY_ONE]


# Axes and containers --------------------------------------------------------------------------------------


@both
def test_axes_of_containers_of_arguments_and_of_results(run, rng):
    Point = namedtuple("Point", "x y")
    w, b, p = (
        rng.standard_normal((2, 5, 3)),
        rng.standard_normal(2),
        Point(rng.standard_normal(5), rng.standard_normal((2, 5))),
    )

    def function(layer, p):
        return {"sum": layer["w"] @ p.y + p.x, "shared": layer["b"] * 2}, [p.x]

    batched = pe.vmap(function, in_axes=({"w": 1, "b": None}, Point(0, 1)), out_axes=({"sum": 1, "shared": None}, -1))
    found, (x,) = run(lambda w, b, p: batched({"w": w, "b": b}, p))(np.moveaxis(w, 1, 1).transpose(2, 1, 0), b, p)
    expected = np.stack([w.transpose(2, 1, 0)[:, k] @ p.y[:, k] + p.x[k] for k in range(5)], axis=1)
    close(found["sum"], expected)
    close(found["shared"], 2 * b)
    close(x, p.x)


def test_what_is_shared_may_be_anything_and_what_is_the_same_is_repeated():
    def function(x, how, n):
        return x * n if how == "times" else x, 7.0

    found, same = pe.vmap(function, in_axes=(0, None, None))(np.arange(3.0), "times", 2)
    close(found, [0, 2, 4])
    close(same, [7, 7, 7])
    captured = np.ones(2)
    found, mine = pe.vmap(lambda x: (x, captured), out_axes=(0, None))(np.arange(3.0))
    mine[...] = 5  # the caller's own
    close(captured, np.ones(2))


def test_arrays_come_back_for_arrays_and_tensors_for_tensors():
    x = np.arange(3.0)
    assert type(pe.vmap(np.sin)(x)) is np.ndarray
    assert type(pe.vmap(pe.grad(np.sin))(x)) is np.ndarray
    assert type(pe.vmap(np.sin)(pe.tensor(x))) is Tensor
    w = pe.tensor(2.0, requires_grad=True)
    y = pe.vmap(lambda x: w * x)(x)
    y.sum().backward()
    assert w.grad == 3.0
    found = pe.vmap(lambda x: x)(x)
    found[...] = 9
    close(x, [0, 1, 2])


def test_integers_and_truth_values_are_mapped_too():
    labels = np.array([2, 0])
    close(pe.vmap(lambda i, m: np.where(m, i, -i))(labels, np.array([True, False])), [2, 0])
    x = np.arange(6.0).reshape(2, 3)
    close(pe.vmap(lambda x, i: x[i])(x, labels), [2, 3])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: pe.vmap(1.0), ConfigurationError, "vmap: expected a function first, got float"),
        (lambda: pe.vmap(np.sin, in_axes=2)(np.ones((2, 2))), ShapeError, r"of shape \(2, 2\) has no axis 2"),
        (lambda: pe.vmap(np.add)(np.ones(2), np.ones(3)), ShapeError, "argument 1 has 3 samples along axis 0, but arg"),
        (lambda: pe.vmap(np.sin)(1.0), ShapeError, r"argument 0 of shape \(\) has no axis 0"),
        (lambda: pe.vmap(np.sin, in_axes=None)(1.0), ConfigurationError, "nothing is mapped"),
        (lambda: pe.vmap(np.sin, in_axes=(0, 0))(np.ones(2)), ConfigurationError, "in_axes has 2 items, but the func"),
        (lambda: pe.vmap(lambda p: p["a"], in_axes=({"b": 0},))({"a": np.ones(2)}), ConfigurationError,
         r"in_axes for argument 0 must be an axis or None, or a dict with the keys 'a' of them, got \{'b': 0\}"),
        (lambda: pe.vmap(np.sin, in_axes="0")(np.ones(2)), ConfigurationError, "0 must be an axis or None, got"),
        (lambda: pe.vmap(np.sin, out_axes=None)(np.ones(2)), ConfigurationError, "differs from sample to sample"),
        (lambda: pe.vmap(np.sin, out_axes=1)(np.ones(2)), ShapeError, r"the function's result of shape \(2,\) has no"),
        (lambda: pe.vmap(lambda x: (x, x), out_axes=(0,))(np.ones(2)), ConfigurationError, "a tuple of 2 of them, got"),
        (lambda: pe.vmap(lambda x: None)(np.ones(2)), ShapeError, "the function must return arrays, got None"),
        (lambda: pe.vmap(lambda x: "no")(np.ones(2)), DTypeError, "expected a number or an array of numbers, got"),
        (lambda: pe.vmap(np.sin)(np.ones(2) * 1j), DTypeError, "complex numbers are not supported"),
        (lambda: pe.vmap(lambda x: x if x > 0 else -x)(np.ones(2)), TraceError, "cond"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_values_are_checked_for_every_sample():
    logits, labels = np.zeros((2, 4, 3)), np.array([[0, 1, 2, 0], [0, 3, 0, 0]])
    compiled = pe.compile(pe.vmap(ops.softmax_cross_entropy))
    compiled(logits, labels % 3)
    for call in (pe.vmap(ops.softmax_cross_entropy), compiled, pe.vmap(pe.grad(ops.softmax_cross_entropy))):
        with pytest.raises(LabelError, match="label 3"):
            call(logits, labels)
    for call in (pe.vmap(lambda w, i: ops.embedding(w, i)), pe.vmap(lambda w, i: (ops.embedding(w, i), w)[1])):
        for run in (call, pe.compile(call)):
            with pytest.raises(ShapeError, match="token id 5"):
                run(np.zeros((2, 4, 3)), np.array([[1, 2], [5, 0]]))


# Transforms in and around ---------------------------------------------------------------------------------


@both
def test_vmap_of_vmap_over_any_axes(run, rng):
    a, b = rng.standard_normal((4, 2, 3)), rng.standard_normal((2, 5))
    outer = run(pe.vmap(pe.vmap(np.outer, in_axes=(0, None), out_axes=1), in_axes=(1, 0), out_axes=-1))(a, b)
    expected = np.einsum("inj,nk->jikn", a, b)
    close(outer, expected)
    square = pe.vmap(pe.vmap(pe.vmap(lambda x: x**2)))
    close(run(square)(a), a**2)


@both
def test_per_sample_gradients_and_their_norms(run, rng):
    w, x, y = rng.standard_normal((3, 2)), rng.standard_normal((6, 3)), rng.integers(0, 2, 6)

    def loss(w, x, y):
        return ops.softmax_cross_entropy(np.tanh(x @ w), y)

    each = run(pe.vmap(pe.grad(loss), in_axes=(None, 0, 0)))(w, x, y)
    close(each, np.stack([pe.grad(loss)(w, a, np.asarray(b)) for a, b in zip(x, y, strict=True)]))
    value, gradient = run(pe.vmap(pe.value_and_grad(loss), in_axes=(None, 0, 0)))(w, x, y)
    close(gradient, each)
    close(value, [loss(w, Tensor(a), np.asarray(b)).item() for a, b in zip(x, y, strict=True)])


@both
def test_per_sample_gradients_of_a_network_with_convolutions(run, rng):
    layers = [network.Conv2D(2, 3, 3, activation="tanh"), network.MaxPool2D(2), network.Flatten(), network.Dense(12, 4)]
    chain = network.Chain(*layers, dtype=np.float64)
    parameters = {name: x.numpy() for name, x in chain.parameters.tensors.items()}
    images, labels = rng.standard_normal((3, 2, 6, 6)), np.array([0, 3, 1])

    def loss(parameters, image, label):
        return ops.softmax_cross_entropy(chain.apply(parameters, image[None]), label[None])

    each = run(pe.vmap(pe.grad(loss), in_axes=(None, 0, 0)))(parameters, images, labels)
    whole = pe.grad(lambda p: ops.softmax_cross_entropy(chain.apply(p, images), labels))(parameters)
    for name, gradient in whole.items():
        close(np.mean(each[name], axis=0), gradient)
        one = pe.grad(loss)(parameters, images[1], labels[1, ...])[name]
        close(each[name][1], one)


@both
def test_products_with_derivatives_of_each_sample(run, rng):
    x, v = rng.standard_normal((5, 3)), rng.standard_normal((5, 3))

    def function(x):
        return np.tanh(np.cumsum(x) * x[0])

    def of_each(x, v):
        y, pull = pe.vjp(function, x)
        return (
            y,
            pull(v)[0],
            pe.jvp(function, (x,), (v,))[1],
            pe.jacobian(function, x),
            pe.hvp(lambda x: np.sum(function(x)), x, v),
        )

    expected = stacked([of_each(a, b) for a, b in zip(x, v, strict=True)])
    for found, wanted in zip(run(pe.vmap(of_each))(x, v), expected, strict=True):
        close(found, wanted)


@both
def test_derivatives_of_higher_order_through_all_samples(run, rng):
    x = rng.standard_normal((3, 2))

    def function(x):
        return np.sum(pe.vmap(lambda x: np.prod(np.sin(x)))(x) ** 2)

    def plain(x):
        return np.sum(np.prod(np.sin(x), axis=1) ** 2)

    close(run(lambda x: pe.hessian(function, x))(x), pe.hessian(plain, x))
    close(
        run(pe.grad(lambda x: np.sum(pe.grad(function)(x) ** 3)))(x),
        pe.grad(lambda x: np.sum(pe.grad(plain)(x) ** 3))(x),
    )


@both
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"truncate": 2}], ids=str)
def test_loops_of_many_samples(run, options, rng):
    xs, w, start = rng.standard_normal((4, 7, 2)), rng.standard_normal((2, 2)), rng.standard_normal(2)

    def last(w, start, xs):
        def body(carry, x):
            n, h = carry
            h = np.tanh(h @ w + x)
            return (n + 1, h), (h * 2, n)

        (n, h), (ys, numbers) = pe.scan(body, (0, start), xs, **options)
        return np.sum(h) + np.sum(ys**2), n, numbers

    value, n, numbers = run(pe.vmap(last, in_axes=(None, None, 0), out_axes=(0, None, None)))(w, start, xs)
    each = [last(w, start, x) for x in xs]
    close(value, [v.item() for v, _, _ in each])
    assert n == 7 and np.array_equal(numbers, np.arange(7))  # the same for all, and computed once
    gradient = pe.grad(lambda *args: last(*args)[0], (0, 1, 2))
    for found, expected in zip(
        run(pe.vmap(gradient, in_axes=(None, None, 0)))(w, start, xs),
        stacked([gradient(w, start, x) for x in xs]),
        strict=True,
    ):
        close(found, expected)
    total = run(pe.grad(lambda w: np.sum(pe.vmap(lambda x: last(w, start, x)[0])(xs))))(w)
    close(total, np.sum([gradient(w, start, x)[0] for x in xs], axis=0))
    moved = run(lambda w: pe.jvp(lambda w: pe.vmap(lambda x: last(w, start, x)[0])(xs), (w,), (np.ones((2, 2)),))[1])(w)
    close(moved, [pe.jvp(lambda w, x=x: last(w, start, x)[0], (w,), (np.ones((2, 2)),))[1] for x in xs])


@both
def test_loops_over_all_samples(run, rng):
    xs, w = rng.standard_normal((7, 4, 2)), rng.standard_normal((2, 2))

    def last(w):
        def body(h, x):
            return pe.vmap(lambda h, x: np.tanh(h @ w + x))(h, x), None

        return np.sum(pe.scan(body, np.zeros((4, 2)), xs)[0] ** 2)

    def plain(w):
        return np.sum(pe.scan(lambda h, x: (np.tanh(h @ w + x), None), np.zeros((4, 2)), xs)[0] ** 2)

    close(run(pe.grad(last))(w), pe.grad(plain)(w))


@both
def test_checkpoints_and_constants_of_samples(run, rng):
    x, w = rng.standard_normal((4, 3)), rng.standard_normal(3)
    block = pe.checkpoint(lambda x: (np.sin(x * w), np.sum(w)))

    def function(x):
        y, total = block(x)
        return np.sum(y * pe.stop_gradient(x)) * total

    for transform in (lambda f: f, pe.grad, lambda f: lambda x: pe.jvp(f, (x,), (w,))[1]):
        close(
            run(pe.vmap(transform(function)))(x), np.stack([np.asarray(pe.compile(transform(function))(a)) for a in x])
        )
    close(run(pe.grad(lambda x: np.sum(pe.vmap(function)(x))))(x), np.stack([pe.grad(function)(a) for a in x]))


@both
def test_rules_of_the_users_own_see_one_sample(run, rng):
    x = rng.standard_normal((4, 3))
    shapes = []

    def function(x):
        shapes.append(x.shape)
        return np.sin(x)

    rule = pe.custom_rule(
        function,
        vjp=lambda g, y, x: g * np.cos(x),
        jvp=lambda t, y, x: t[0] * np.cos(x),
        infer=lambda x: (x.shape, x.dtype),
    )
    close(run(pe.vmap(rule))(x), np.sin(x))
    assert set(shapes) == {(3,)}
    close(run(pe.vmap(pe.grad(lambda x: np.sum(rule(x) ** 2))))(x), np.sin(2 * x))
    close(run(pe.grad(lambda x: np.sum(pe.vmap(rule)(x) ** 2)))(x), np.sin(2 * x))
    close(run(lambda x: pe.jvp(pe.vmap(rule), (x,), (x,))[1])(x), x * np.cos(x))
    close(run(pe.vmap(pe.grad(pe.grad(lambda x: rule(x)))))(x[:, 0]), -np.sin(x[:, 0]))


def test_masks_are_drawn_for_each_sample():
    def function(x):
        return ops.dropout(x, 0.5, np.random.default_rng(3))

    found = pe.vmap(function)(np.ones((50, 20)))
    assert not np.all(found == found[0])
    shared = pe.vmap(lambda s: s * function(np.ones(20)))(np.ones(50))
    assert not np.all(shared == shared[0])


GENERATOR = np.random.default_rng(3)


def dropped(x):
    return ops.dropout(x, 0.5, GENERATOR)


@both
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: pe.scan(lambda c, _: (dropped(c), None), x, length=2)[0],
        lambda x: pe.scan(lambda c, s: (c, dropped(s + 0 * c[0])), x, np.ones((2, 60)), checkpoint=True)[1],
        lambda x: pe.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, dropped(s[1])), (0.0, x))[1],
        lambda x: pe.while_loop(lambda s: dropped(s[0]) == 0, lambda s: (s[0], s[1] + 1), (1.0, 0 * x))[1],
        lambda x: pe.cond(x[0] > 0, dropped, lambda x: x, x),
        lambda x: pe.checkpoint(dropped)(x),
        lambda x: pe.vmap(lambda y: pe.scan(lambda c, _: (dropped(c), None), y, length=1)[0])(x.reshape(2, 30)),
    ],
)
def test_loops_and_branches_draw_for_each_sample(function, shared, run):
    x = np.ones((20, 60))
    found = run(pe.vmap(lambda x: function(np.ones(60)) + 0 * x[0] if shared else function(x)))(x)
    assert len(np.unique(found.reshape(20, -1), axis=0)) > 1, "all samples have the same draws"


@both
def test_a_sample_whose_loop_has_ended_stays_as_it_is_though_the_condition_draws(run):
    def steps(x):
        return pe.while_loop(lambda s: dropped(s[0]) == 0, lambda s: (s[0], s[1] + 1), (1.0, 0 * x))[1]

    found = run(pe.vmap(steps))(np.ones(400))
    assert 0.6 < found.mean() < 1.5 and found.max() < 30, "each draw ends it with a probability of 1/2"
    nested = run(pe.vmap(pe.vmap(steps)))(np.ones((20, 20)))
    assert 0.6 < nested.mean() < 1.5 and nested.max() < 30


@both
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_condition_of_many_loops_is_not_evaluated_after_the_last_step_that_is_allowed(run, limit):
    table = np.array([1.0, 2.0, 3.0])[: max(limit, 1)]

    def steps(x):
        return pe.while_loop(
            lambda s: ops.take(table, s[0]) > s[1], lambda s: (s[0] + 1, s[1] * 1), (np.array(0), x), max_steps=limit
        )

    for samples in (np.array([0.0, 5.0]), np.array([0.0, 1.0, 2.5]), np.array([9.0])):
        counts, values = run(pe.vmap(steps))(samples)
        np.testing.assert_array_equal(counts, [steps(x)[0] for x in samples])
        np.testing.assert_array_equal(values, samples)
        derivatives = run(pe.vmap(pe.grad(lambda x: steps(x)[1])))(samples)
        np.testing.assert_array_equal(derivatives, np.ones(len(samples)))


def test_what_draws_and_has_no_rule_is_refused_under_vmap(rng):
    class Draws:
        programs = (trace(lambda x: [ops.dropout(x, 0.5, rng)], [Tensor.symbol((2,), np.float64)]),)

    op = Op("noisy", lambda x, inside: (x.shape, x.dtype), kernel=lambda x, out, inside: np.copyto(out, x))
    with pytest.raises(
        ConfigurationError, match=r"'noisy' draws random numbers \('dropout_mask'\), and has no batching"
    ):
        pe.vmap(lambda x: op(x, inside=Draws()))(np.ones((3, 2)))


def test_a_loop_that_draws_and_reads_nothing_is_refused_under_vmap(rng):
    def drawn(x):
        _, masks = pe.scan(lambda carry, _: (carry, ops.dropout(1.0, 0.5, rng)), None, None, length=3)
        return x + np.sum(masks)

    with pytest.raises(ConfigurationError, match=r"draws random numbers \('dropout_mask'\) and reads nothing"):
        pe.vmap(drawn)(np.zeros(4))


def test_a_traced_function_is_replayed_for_other_samples(rng):
    compiled = pe.compile(pe.vmap(lambda x, w: np.tanh(x @ w), in_axes=(0, None)))
    for _ in range(3):
        x, w = rng.standard_normal((5, 3)), rng.standard_normal((3, 2))
        close(compiled(x, w), np.tanh(x @ w))
    assert len(compiled.tapes) == 1
    weight = pe.tensor(np.ones(3))
    captured = pe.compile(pe.vmap(lambda x: x @ weight))
    close(captured(np.ones((2, 3))), [3, 3])
    weight.assign(np.zeros(3))
    close(captured(np.ones((2, 3))), [0, 0])


def test_samples_take_as_many_ops_as_one():
    def equations(samples):
        def function(x, w):
            return [pe.vmap(pe.grad(lambda x, w: np.sum(np.tanh(x @ w) ** 2), 1), in_axes=(0, None))(x, w)]

        return len(trace(function, [Tensor.symbol((samples, 3), "f8"), Tensor.symbol((3, 2), "f8")]).equations)

    assert equations(1) == equations(100) < 20


def test_no_samples_are_mapped_to_none():
    assert pe.vmap(lambda x: np.sum(np.tanh(x)))(np.ones((0, 3))).shape == (0,)
    assert pe.vmap(pe.grad(lambda x: np.sum(np.tanh(x))))(np.ones((0, 3))).shape == (0, 3)
    doubled = partial(pe.while_loop, lambda c: c < 10, lambda c: c * 2)
    for function in (doubled, pe.grad(doubled), lambda x: pe.jvp(doubled, (x,), (x,))[1]):
        assert pe.vmap(function)(np.zeros(0)).shape == (0,)


def test_lines_are_drawn_from_the_table():
    assert isinstance(LINES[0], Line) and len(BATCHED) > 150
