"""scan: one op for a loop of any length, with derivatives of any order, in bounded memory."""

from __future__ import annotations

import gc
import itertools
import threading
import tracemalloc
from collections import namedtuple

import numpy as np
import pytest

import py_engine as pe
from py_engine import ops
from py_engine.ad.compile.tape import Tape
from py_engine.ad.control.scan import LOOP
from py_engine.ad.op import as_tensor
from py_engine.ad.program import trace
from py_engine.ad.reverse import gradients
from py_engine.errors import ConfigurationError, DTypeError, ShapeError, TraceError

both = pytest.mark.parametrize("run", [lambda f: f, pe.compile], ids=["eager", "compiled"])

STEPS, FEATURES, HIDDEN = 23, 3, 5
RNG = np.random.default_rng(0)
ARGUMENTS = (
    0.5 * RNG.standard_normal((FEATURES, HIDDEN)),
    0.4 * RNG.standard_normal((HIDDEN, HIDDEN)),
    0.1 * RNG.standard_normal(HIDDEN),
    RNG.standard_normal(HIDDEN),
    RNG.standard_normal((STEPS, FEATURES)),
)
ALL = (0, 1, 2, 3, 4)


def scanned(**options):
    """A recurrent network with an output at every step; weights are captured by the body."""

    def loss(weight, recurrent, bias, start, xs):
        def body(state, x):
            state = np.tanh(x @ weight + state @ recurrent + bias)
            return state, np.sum(state * state)

        last, ys = pe.scan(body, start, xs, **options)
        return np.sum(np.sin(last)) + np.sum(ys * ys)

    return loss


def unrolled(weight, recurrent, bias, start, xs, stop=()):
    """The same, step by step; gradients do not flow into the steps of `stop` from those before."""
    state, total = start, 0.0
    for t in range(STEPS):
        state = ops.stop_gradient(state) if t in stop else state
        state = np.tanh(xs[t] @ weight + state @ recurrent + bias)
        total = total + np.sum(state * state) ** 2
    return np.sum(np.sin(state)) + total


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


OPTIONS = [{}, {"checkpoint": True}, {"checkpoint": 5}, {"checkpoint": 1}, {"checkpoint": STEPS + 1}]
options = pytest.mark.parametrize("kwargs", OPTIONS, ids=str)

# Derivatives ----------------------------------------------------------------------------------------------


@both
@options
def test_value_and_gradients_are_those_of_the_unrolled_loop(run, kwargs):
    value, found = run(pe.value_and_grad(scanned(**kwargs), ALL))(*ARGUMENTS)
    expected_value, expected = pe.value_and_grad(unrolled, ALL)(*ARGUMENTS)
    close(found, expected)
    np.testing.assert_allclose(value, expected_value)


@both
@pytest.mark.parametrize("kwargs", OPTIONS[:2], ids=str)
def test_second_derivatives(run, kwargs):
    def size(f):
        return lambda *args: sum(np.sum(g * g) for g in pe.grad(f, ALL)(*args))

    close(run(pe.grad(size(scanned(**kwargs)), ALL))(*ARGUMENTS), pe.grad(size(unrolled), ALL)(*ARGUMENTS))


@both
@pytest.mark.parametrize("kwargs", OPTIONS[:2], ids=str)
def test_forward_mode_and_its_mixtures_with_reverse_mode(run, kwargs):
    def by_recurrent(f):
        weight, _, *rest = ARGUMENTS
        return lambda u: f(weight, u, *rest)

    def tangent(f, u):
        return pe.jvp(by_recurrent(f), (u,), (u,))[1]

    def products(f):
        return lambda u: (tangent(f, u), pe.hvp(by_recurrent(f), u, u), pe.grad(lambda v: tangent(f, v))(u))

    close(run(products(scanned(**kwargs)))(ARGUMENTS[1]), products(unrolled)(ARGUMENTS[1]))
    close(
        run(lambda *args: pe.jvp(scanned(**kwargs), args, args)[1:])(*ARGUMENTS),
        pe.jvp(unrolled, ARGUMENTS, ARGUMENTS)[1:],
    )


def test_finite_differences_agree():
    pe.gradcheck(scanned(checkpoint=True), *ARGUMENTS)


@both
@pytest.mark.parametrize("truncate", [1, 4, STEPS - 1, STEPS, STEPS + 1])
@pytest.mark.parametrize("kwargs", [{}, {"checkpoint": 2}], ids=str)
def test_truncated_gradients_are_those_of_a_loop_cut_into_pieces(run, truncate, kwargs):
    stop = range(STEPS - truncate, 0, -truncate)
    found = run(pe.grad(scanned(truncate=truncate, **kwargs), ALL))(*ARGUMENTS)
    close(found, pe.grad(lambda *args: unrolled(*args, stop=stop), ALL)(*ARGUMENTS))


def test_a_truncated_gradient_reaches_exactly_so_many_steps_back():
    def last(xs):
        return pe.scan(lambda s, x: (s + x, None), 0.0, xs, truncate=4)[0]

    np.testing.assert_array_equal(pe.grad(last)(np.ones(10)), [0] * 6 + [1] * 4)


# What a body may be ---------------------------------------------------------------------------------------


@both
def test_containers_are_carried_taken_apart_and_stacked(run):
    Pair = namedtuple("Pair", "first second")

    def f(x, xs):
        def body(carry, element):
            s = carry["s"] * element.first + element.second
            return {"s": s, "n": carry["n"] + 1}, [(carry["n"], s > 0), {"s": s, "none": None}]

        carry, ys = pe.scan(body, {"s": x, "n": np.array(0)}, Pair(xs, 2 * xs))
        return carry, ys

    xs = np.array([0.5, -2.0, 1.5])
    carry, ys = run(f)(3.0, xs)
    np.testing.assert_array_equal(np.asarray(as_tensor(carry["n"]).numpy()), 3)
    np.testing.assert_array_equal(as_tensor(ys[0][0]).numpy(), [0, 1, 2])
    np.testing.assert_array_equal(as_tensor(ys[0][1]).numpy(), [True, False, False])
    np.testing.assert_allclose(as_tensor(ys[1]["s"]).numpy(), [2.5, -9, -10.5])
    assert ys[1]["none"] is None
    gradient = run(pe.grad(lambda x: np.sum(f(x, xs)[1][1]["s"])))(3.0)
    np.testing.assert_allclose(gradient, 0.5 + 0.5 * -2 + 0.5 * -2 * 1.5)


@both
def test_a_body_may_return_what_it_was_given_or_captured(run):
    x, w, xs = np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.ones((3, 2))

    def f(x, w):
        return pe.scan(lambda c, e: ((c[0], w), (c[0], e, w)), (x, x), xs)

    (first, second), ys = run(f)(x, w)
    for found, expected in [(first, x), (second, w), (ys[0], [x] * 3), (ys[1], xs), (ys[2], [w] * 3)]:
        found = as_tensor(found).numpy()
        np.testing.assert_array_equal(found, expected)
        assert not any(np.may_share_memory(found, given) for given in (x, w, xs))


@both
def test_without_a_sequence_the_length_is_given(run):
    f = pe.grad(lambda x: pe.scan(lambda c, _: (c * x, None), 1.0, length=5)[0])
    np.testing.assert_allclose(run(f)(2.0), 5 * 2.0**4)


@both
def test_no_step_at_all_leaves_the_carry(run):
    def f(x):
        last, ys = pe.scan(lambda c, e: (c * e, c), x, np.ones(0))
        assert ys.shape == (0,)
        return last * 3 + np.sum(ys)

    assert run(pe.grad(f))(2.0) == 3


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_kept_and_numbers_are_weak(run, dtype):
    xs = np.array([1, 2, 3], dtype)

    def f(xs):
        (total, _), ys = pe.scan(lambda c, x: ((c[0] + x * 2, 1.0), x), (0.0, 0), xs)
        assert total.dtype == ys.dtype == dtype
        return total

    gradient = run(pe.grad(f))(xs)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, [2, 2, 2])


@both
def test_scans_may_be_nested_and_hold_checkpoints_and_custom_rules(run):
    square = pe.custom_rule(lambda x: x**2, vjp=lambda g, y, x: 2 * g * x)
    block = pe.checkpoint(lambda x: np.sin(square(x)))

    def f(x):
        def outer(c, _):
            return pe.scan(lambda d, _: (block(d) * x, None), c, length=3)[0], None

        return pe.scan(outer, x, length=2)[0]

    def g(x):
        c = x
        for _ in range(6):
            c = np.sin(c**2) * x
        return c

    np.testing.assert_allclose(run(pe.grad(f))(1.1), pe.grad(g)(1.1), rtol=1e-12)


@both
def test_what_a_body_computes_without_recording_is_a_constant(run):
    def step(c):
        with pe.no_grad():
            square = c * c
        return square + c

    def f(wrapped):
        return run(lambda x: (pe.grad(wrapped)(x), pe.jvp(wrapped, (x,), (1.0,))[1]))(3.0)

    assert f(step) == (1, 1)
    assert f(pe.checkpoint(step)) == (1, 1)
    for options in ({}, {"checkpoint": 2}, {"truncate": 3}):
        assert f(lambda x, options=options: pe.scan(lambda c, _: (step(c), None), x, length=3, **options)[0]) == (1, 1)


def test_the_function_runs_once_and_the_graph_does_not_grow():
    sizes, calls = [], []
    for length in (10, 10_000):
        for kwargs in ({}, {"checkpoint": True}):

            def body(c, x):
                calls.append(1)
                return np.sin(c) * x, c

            x = pe.tensor(np.ones(length), requires_grad=True)
            last, ys = pe.scan(body, 1.0, x, **kwargs)
            sizes.append(len(pe.topological_sort([last + np.sum(ys)])))
    assert len(calls) == 4
    assert sizes[0] == sizes[2] < 20
    assert sizes[1] < 40 and sizes[3] < 40  # with one more loop where the segments leave a rest


def test_a_loop_is_one_line_of_a_compiled_function():
    f = pe.compile(lambda xs: pe.scan(lambda c, x: (np.sin(c) * x, None), 1.0, xs)[0])
    f(np.ones(100))
    assert f.source.count("loop(") == 1
    assert len(f.source.splitlines()) < 10


def inside(loop):
    """The tapes of a loop's body."""
    return [tape for free in loop.attrs["loop"].tapes.free.values() for tape in free]


def test_no_run_relies_on_what_lies_in_scratch_memory():
    def step(*args):
        value = scanned(checkpoint=True)(*args)
        return [value, *gradients([value], [pe.Tensor(np.ones(()))], args)]

    tape = Tape(trace(step, [pe.Tensor.symbol(a.shape, a.dtype) for a in ARGUMENTS]))
    expected = [out.copy() for out in tape(*ARGUMENTS)]
    tapes = [tape]
    for outer in tapes:  # and those of the loops, and of the loops inside them
        tapes += [inner for x in outer.program.equations if x.op is LOOP for inner in inside(x)]
    assert len(tapes) > 4
    for byte in (0x00, 0xFF):
        for each in tapes:
            each.poison(byte)
        for out, value in zip(tape(*ARGUMENTS), expected, strict=True):
            np.testing.assert_array_equal(out, value)


@pytest.mark.parametrize("off", ["preallocate", "reuse_memory", "in_place", "views", "place_parts", "simplify", "join"])
def test_a_technique_of_the_tape_changes_no_result(off):
    block = pe.checkpoint(np.sin)

    def f(*args):
        counted = pe.scan(lambda n, x: (n + 1, (n, np.sum(x) > 0)), np.array(0), args[4])
        return *pe.value_and_grad(lambda *a: block(scanned(checkpoint=True)(*a)), ALL)(*args)[1], counted[1]

    expected = pe.compile(f)(*ARGUMENTS)
    found = pe.compile(f, pe.Techniques(**{off: False}))(*ARGUMENTS)
    close(found[:-1], expected[:-1])
    for a, b in zip(found[-1], expected[-1], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(found[-1][0], range(STEPS))


@both
def test_many_tangents_at_once(run):
    found = run(lambda x: pe.jacobian(lambda x: pe.scan(lambda c, e: (np.sin(c) * e, c), x, XS)[1], x, mode="forward"))(
        np.ones(2)
    )
    expected = pe.jacobian(lambda x: pe.scan(lambda c, e: (np.sin(c) * e, c), x, XS)[1], np.ones(2), mode="reverse")
    assert found.shape == (4, 2, 2)
    np.testing.assert_allclose(found, expected)


def test_threads_may_share_a_loop():
    f = pe.grad(scanned(checkpoint=True), ALL)
    expected = f(*ARGUMENTS)
    x = pe.tensor(ARGUMENTS[1], requires_grad=True)
    weight, _, *rest = ARGUMENTS
    value = scanned()(weight, x, *rest)
    results: list[object] = []

    def work():
        (g,) = gradients([value], [pe.Tensor(np.ones(()))], [x])
        results.append((f(*ARGUMENTS), g.numpy()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for found, g in results:
        close(found, expected)
        close([g], [expected[1]])


def test_random_numbers_come_with_the_sequence():
    generator = np.random.default_rng(0)

    def f(x):
        return pe.scan(lambda c, _: (ops.dropout(c, 0.5, generator), None), x, length=3)[0]

    assert f(np.ones(4)).shape == (4,)
    with pytest.raises(TraceError, match=r"draws random numbers \(dropout_mask\).*pass them in xs"):
        pe.grad(lambda x: np.sum(f(x)))(np.ones(4))


# Mistakes -------------------------------------------------------------------------------------------------

XS = np.ones(4)


@both
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda c: pe.scan(lambda c, x: ({"h": c["h"][:1]}, None), {"h": c}, XS),
            ShapeError,
            r"the carry\['h'\] must keep its shape, but it was \(2,\) and the function made it \(1,\)",
        ),
        (
            lambda c: pe.scan(lambda c, x: (c.astype(np.float32), None), c, XS),
            DTypeError,
            "the carry must keep its dtype, but it was float64 and the function made it float32",
        ),
        (
            lambda c: pe.scan(lambda c, x: ((c[0], c[1], x), None), (c, c), XS),
            ShapeError,
            "scan: the carry that the function returned: expected a tuple of 2, got a tuple of 3",
        ),
        (lambda c: pe.scan(lambda c, x: c, c, XS), ShapeError, r"the function must return \(carry, y\), got Tensor"),
        (lambda c: pe.scan(lambda c, x: (c, x, x), c, XS), ShapeError, r"must return \(carry, y\), got a tuple of 3"),
        (
            lambda c: pe.scan(lambda c, x: (c, None), c, {"a": XS, "b": XS[:3]}),
            ShapeError,
            r"scan: xs\['b'\] has 3 steps, but xs\['a'\] has 4",
        ),
        (lambda c: pe.scan(lambda c, x: (c, None), c, XS, 5), ShapeError, "scan: xs has 4 steps, but length is 5"),
        (lambda c: pe.scan(lambda c, x: (c, None), c, 1.0), ShapeError, "xs is a single number; its first axis"),
        (lambda c: pe.scan(lambda c, x: (c, None), c), ShapeError, "the number of steps is not known; give length, or"),
        (lambda c: pe.scan(lambda c, x: (c, None), c, length=-1), ConfigurationError, "a number of steps, got -1"),
        (lambda c: pe.scan(lambda c, x: (c, None), c, length=2.0), ConfigurationError, "a number of steps, got 2.0"),
        (lambda c: pe.scan(lambda c, x: (c, None), c, length=True), ConfigurationError, "a number of steps, got True"),
        (
            lambda c: pe.scan(lambda c, x: (c, c.astype(np.float32)), c, XS),
            DTypeError,
            "carry and outputs mix float32 and float64; convert them",
        ),
        (lambda c: pe.scan(3, c, XS), ConfigurationError, "scan: expected a function first, got int"),
        (
            lambda c: pe.scan(lambda n, x: (5.5, None), np.array(0), XS),
            DTypeError,
            "the carry must keep its dtype, but it was int64 and the function made it float64",
        ),
        (
            lambda c: pe.scan(lambda c, x: (c, None), {"z": 1j * XS}, XS),
            DTypeError,
            r"scan: the carry\['z'\] is of complex128; complex numbers are not supported; pass real",
        ),
        (lambda c: pe.scan(lambda c, x: (c, None), c, ["ab", XS]), DTypeError, r"xs\[0\] is of <U2; give float32"),
        (
            lambda c: pe.scan(lambda c, x: (c, (x, object())), c, XS),
            DTypeError,
            r"scan: the output\[1\] that the function returned is of object; give float32",
        ),
        (lambda c: pe.scan(lambda c, x: (c, None), c, XS, checkpoint=-3), ConfigurationError, "from 1 on, got -3"),
        (lambda c: pe.scan(lambda c, x: (c, None), c, XS, checkpoint=2.5), ConfigurationError, "from 1 on, got 2.5"),
        (lambda c: pe.scan(lambda c, x: (c, None), c, XS, truncate=0), ConfigurationError, "from 1 on, got 0"),
        (lambda c: pe.scan(lambda c, x: (c, None), c, XS, truncate=True), ConfigurationError, "from 1 on, got True"),
        (
            lambda c: pe.scan(lambda c, x: (c if c[0] > 0 else -c, None), c, XS),
            TraceError,
            "the function is being traced and only shapes are known",
        ),
    ],
    ids=[
        "shape", "dtype", "structure", "no pair", "too many", "lengths", "length", "number", "unknown", "negative",
        "no count", "no truth value", "mixed", "no function",
        "fraction of a count", "complex", "text", "object", "checkpoint", "fraction", "truncate", "truth", "branch",
    ],
)  # fmt: skip
def test_mistakes_are_named(run, call, error, message):
    with pytest.raises(error, match=message):
        run(lambda c: call(c)[0])(np.ones(2))


def test_a_mistake_in_the_body_leaves_nothing_behind():
    with pytest.raises(KeyError):
        pe.scan(lambda c, x: {}["mine"], 1.0, XS)
    assert pe.grad(lambda x: x * x)(3.0) == 6


# Memory ---------------------------------------------------------------------------------------------------


def peak_of_training(length, hidden=64, **kwargs):
    """The most bytes that are allocated at once by loss and gradients of a sequence of this length.

    The least of three measurements: a table of Python's that happens to grow in one of them is not the gradient's.
    """
    rng = np.random.default_rng(0)
    xs, weight, state = rng.standard_normal(length), 0.1 * rng.standard_normal((hidden, hidden)), np.zeros(hidden)

    def loss(weight):
        def body(carry, x):
            state, total = carry
            state = np.tanh(state @ weight + x)
            return (state, total + np.mean(state * state)), None

        return pe.scan(body, (state, 0.0), xs, **kwargs)[0][1] / length

    peaks = []
    for _ in range(3):
        gc.collect()
        tracemalloc.start()
        try:
            value, gradient = pe.value_and_grad(loss)(weight)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert np.isfinite(value) and np.isfinite(gradient).all()
    return min(peaks)


def test_with_checkpoints_memory_grows_as_the_square_root_of_the_length():
    lengths = (500, 4_000)
    full = [peak_of_training(n) for n in lengths]
    saved = [peak_of_training(n, checkpoint=True) for n in lengths]
    carry = 65 * 8  # bytes
    # Without checkpoints every step keeps its carry; with them there are two carries per segment.
    for n, bytes_full in zip(lengths, full, strict=True):
        assert n * carry <= bytes_full <= 2 * n * carry + 500_000
    growth = [b - a for a, b in itertools.pairwise(saved)]
    expected = [2 * (b**0.5 - a**0.5) * carry for a, b in itertools.pairwise(lengths)]
    for found, root in zip(growth, expected, strict=True):
        assert 0.5 * root < found < 2 * root
    assert saved[-1] < full[-1] / 3


def test_the_plan_of_a_compiled_gradient_keeps_the_carries_of_the_segments_only():
    def arena(length, **kwargs):
        xs = np.ones(length)

        def loss(weight):
            return np.sum(pe.scan(lambda s, x: (np.tanh(s @ weight + x), None), np.zeros(16), xs, **kwargs)[0])

        f = pe.compile(pe.grad(loss))
        f(np.zeros((16, 16)))
        ((tape, _),) = f.tapes.values()
        return tape.plan.size

    for length in (900, 3_600):
        state = 16 * 8  # bytes
        assert length * state <= arena(length) < 1.2 * length * state + 10_000
        assert arena(length, checkpoint=True) < 1.2 * length**0.5 * state + 10_000


def test_a_sequence_of_20_000_steps_trains_in_bounded_memory():
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((20_000, 2)).cumsum(axis=1)
    weights = [pe.tensor(w, requires_grad=True) for w in (0.1 * rng.standard_normal((2, 16)), np.zeros((16, 16)))]

    def loss():
        def body(carry, x):
            state, total = carry
            state = np.tanh(x @ weights[0] + state @ weights[1])
            return (state, total + (np.mean(state) - 0.3) ** 2), None

        return pe.scan(body, (np.zeros(16), 0.0), xs, checkpoint=True)[0][1] / len(xs)

    gc.collect()
    tracemalloc.start()
    try:
        before = loss()
        before.backward()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for w in weights:
        w.assign(w.numpy() - 0.5 * w.grad)
    with pe.no_grad():
        assert loss().item() < before.item()
    assert peak < 20_000 * 17 * 8 / 5  # bytes: a fifth of all carries
