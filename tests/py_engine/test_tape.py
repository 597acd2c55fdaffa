"""The tape: replay is safe, does what eager execution does whichever technique is on, and allocates nothing."""

from __future__ import annotations

import gc
import re
import threading
import tracemalloc
from dataclasses import fields, replace
from functools import partial, reduce

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.compile.tape import Tape
from py_engine.ad.memory import ALIGNMENT
from py_engine.ad.op import TABLE
from py_engine.ad.ops.elementary import ADD_IN_ANY_ORDER, ASTYPE, WHERE
from py_engine.ad.program import Program, trace, tracing
from py_engine.ad.reverse import gradients
from py_engine.ad.techniques import Techniques
from py_engine.errors import NonFiniteError, ReplayError, TraceError

# A network to replay --------------------------------------------------------------------------------------

BATCH, STEPS, FEATURES, HIDDEN, CLASSES = 40, 5, 12, 16, 10
NAMES = ("weight", "recurrent", "bias", "output")
SHAPES = [(FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES)]


def loss(weight, recurrent, bias, output, x, labels):
    """A recurrent network with a loss: products, views, broadcasting, reductions, a fused op."""
    state = np.tanh(x[:, 0] @ weight + bias)
    for t in range(1, x.shape[1]):
        state = np.tanh(x[:, t] @ weight + state @ recurrent + bias)
    return ops.softmax_cross_entropy(state @ output, labels)


def sequences(weight, recurrent, bias, output, x, labels):
    """The same with a loss at every step: parts computed in their places, gradients of slices."""
    states = [np.tanh(x[:, 0] @ weight + bias)]
    for t in range(1, x.shape[1]):
        states.append(np.tanh(x[:, t] @ weight + states[-1] @ recurrent + bias))
    return ops.softmax_cross_entropy(np.concatenate(states) @ output, np.tile(LABELS, STEPS))


LABELS = np.arange(BATCH) % CLASSES


def arguments(dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    parameters = [0.3 * rng.standard_normal(shape).astype(dtype) for shape in SHAPES]
    return [*parameters, rng.standard_normal((BATCH, STEPS, FEATURES)).astype(dtype), LABELS]


def training_tape(function=loss, techniques=Techniques(), results=None, dtype=np.float64):  # noqa: B008
    """A tape of loss and gradients that captures the parameters, as a trainer makes it."""
    arrays = arguments(dtype)
    parameters = [Tensor(a, requires_grad=True, name=name) for a, name in zip(arrays, NAMES, strict=False)]

    def step(x, labels):
        value = function(*parameters, x, labels)
        return [value, *gradients([value], [Tensor(np.ones((), value.dtype))], parameters)]

    inputs = [Tensor.symbol(a.shape, a.dtype) for a in arrays[4:]]
    return Tape(trace(step, inputs), results, techniques), parameters, arrays[4:]


# Poison and techniques ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False])
def test_ops_share_the_memory_that_they_need_while_they_are_computed(rng, shares):
    x, weights = rng.standard_normal((4, 3, 9, 9)), [rng.standard_normal((3, 3, 3, 3)) for _ in range(6)]

    def convolutions(x, count):
        for weight in weights[:count]:
            x = ops.conv(x, weight, padding=1)
        return x

    taken = []
    for count in (1, 2, 6):
        found = pe.compile(partial(convolutions, count=count), Techniques(reuse_memory=shares))
        np.testing.assert_array_equal(found(x), convolutions(pe.Tensor(x), count).numpy())
        ((tape, _),) = found.tapes.values()
        taken.append(sum(memory.nbytes for memory in tape._scratch))
        tape.poison(0xFF)
        np.testing.assert_array_equal(found(x), convolutions(pe.Tensor(x), count).numpy())
    assert taken[0] > 0 and taken[1:] == ([taken[0]] * 2 if shares else [2 * taken[0], 6 * taken[0]])


@pytest.mark.parametrize("function", [loss, sequences])
def test_no_run_relies_on_what_lies_in_scratch_memory(function):
    tape, _, data = training_tape(function)
    expected = [out.copy() for out in tape(*data)]
    for byte in (0x00, 0xFF):
        tape.poison(byte)
        for out, value in zip(tape(*data), expected, strict=True):
            np.testing.assert_array_equal(out, value)


TAPE_TECHNIQUES = ["preallocate", "reuse_memory", "in_place", "views", "place_parts", "simplify"]


def test_the_techniques_are_switches_that_are_on():
    techniques = Techniques()
    assert all(getattr(techniques, field.name) in (True, "auto") for field in fields(techniques))
    assert set(TAPE_TECHNIQUES) <= {field.name for field in fields(techniques)}


@pytest.mark.parametrize("off", [*[(name,) for name in TAPE_TECHNIQUES], tuple(TAPE_TECHNIQUES)], ids="+".join)
@pytest.mark.parametrize("function", [loss, sequences])
def test_a_technique_changes_no_result(function, off):
    expected = pe.value_and_grad(function, range(4))(*arguments())
    tape, _, data = training_tape(function, replace(Techniques(), **dict.fromkeys(off, False)))
    for _ in range(2):
        value, *found = tape(*data)
        np.testing.assert_allclose(value, expected[0], rtol=1e-13)
        for ours, theirs in zip(found, expected[1], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


def test_reusing_memory_makes_the_arena_smaller():
    sizes = {name: training_tape(loss, replace(Techniques(), **{name: False}))[0].nbytes for name in TAPE_TECHNIQUES}
    size = training_tape(loss)[0].nbytes
    assert size < sizes["reuse_memory"] / 2
    assert size <= sizes["in_place"]
    assert size < sizes["views"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_single_number_is_not_computed_in_place(size):
    tape = Tape(trace(lambda x: [np.exp(np.sin(np.cos(x)))], [Tensor.symbol((size,), np.dtype(np.float32))]))
    assert tape.plan.size == ALIGNMENT * (2 if size == 1 else 1)
    for step in tape.steps:
        in_place = any(np.may_share_memory(step.outs[0], array) for array in step.arrays)
        assert in_place == (size > 1 and step.equation.op is ops.sin)


def test_parts_are_computed_in_their_places():
    tape, _, _ = training_tape(sequences)
    apart, _, _ = training_tape(sequences, replace(Techniques(), place_parts=False))

    def copies(tape):
        return sum(len(step.calls) for step in tape.steps if step.equation.op.name == "assemble")

    assert tape.plan.placed and not apart.plan.placed
    assert copies(tape) < copies(apart)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: np.reshape(p, 32),
        lambda p: np.reshape(p[1:3], 16),
        lambda p: np.reshape(p.T, 32),
        lambda p: np.exp(p.T),
        lambda p: np.reshape(p[1:3], 16)[:8] @ p.T,
        lambda p: ops.softmax_cross_entropy(p, np.array([0, 7, 3, 3])),
        lambda p: ops.softmax_cross_entropy(p[::2], np.array([0, 7])),
        lambda p: ops.softmax(p) + ops.logsumexp(p.T, 0)[:, None],
        lambda p: np.concatenate([p, p], axis=1),
        lambda p: np.concatenate([p[:2], p[2:]]),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["product", "elementwise"])
def test_parts_in_their_places_may_be_used_in_other_ways_too(use, axis, kind, rng):
    a, b = rng.standard_normal((4, 3)), rng.standard_normal((3, 8))

    def function(a, b):
        part, other = (a @ b, a @ (b * 2)) if kind == "product" else (np.exp(a @ b), np.sin(a @ b))
        joined = np.concatenate([part, other], axis=axis)
        return np.sum(joined**2) + np.sum(use(part) ** 2) + np.sum(part)

    expected = pe.value_and_grad(function, (0, 1))(a, b)
    value, found = pe.compile(pe.value_and_grad(function, (0, 1)))(a, b)
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    for ours, eager in zip(found, expected[1], strict=True):
        np.testing.assert_allclose(ours, eager, rtol=1e-10)


def test_equal_expressions_are_computed_once():
    def twice(x):
        return np.sum(np.exp(x) * np.exp(x)) + np.sum(np.exp(x))

    def exponentials(simplify):
        f = pe.compile(pe.grad(twice), replace(Techniques(), simplify=simplify))
        f(np.zeros(3))
        ((tape, _),) = f.tapes.values()
        return sum(step.equation.op.name == "exp" for step in tape.steps)

    assert exponentials(True) == 1
    assert exponentials(False) == 2  # differentiation pulls the two back as one, from one of them


# What a replay sees and gives -----------------------------------------------------------------------------


def test_outputs_are_overwritten_by_the_next_run_and_copies_are_not():
    tape, _, (x, labels) = training_tape()
    first = tape(x, labels)
    kept = [out.copy() for out in first]
    second = tape(2 * x, labels)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert first[0] != kept[0]

    compiled = pe.compile(lambda x: x * 2)
    once = compiled(np.ones(2))
    compiled(np.zeros(2))
    np.testing.assert_array_equal(once, [2, 2])


def test_captured_tensors_are_read_anew_at_every_run():
    tape, parameters, data = training_tape()
    before = tape(*data)[0].copy()
    parameters[0].assign(0.5 * parameters[0].numpy())
    after = tape(*data)[0].copy()
    assert after != before
    np.testing.assert_allclose(after, loss(*parameters, *data).item(), rtol=1e-13)


def test_captured_arrays_are_read_anew_and_numbers_are_part_of_the_program():
    scale, number = np.ones(3), 2.0
    f = pe.compile(lambda x: x * scale * number)
    np.testing.assert_array_equal(f(np.ones(3)), [2, 2, 2])
    scale[:] = 10.0
    number = 3.0
    np.testing.assert_array_equal(f(np.ones(3)), [20, 20, 20])


def test_captured_ones_are_not_taken_for_the_number_one():
    w = pe.tensor(np.ones(3))
    f = pe.compile(lambda x: x * w)
    np.testing.assert_array_equal(f(np.full(3, 2.0)), [2, 2, 2])
    w.assign([5.0, 6.0, 7.0])
    np.testing.assert_array_equal(f(np.full(3, 2.0)), [10, 12, 14])
    scalar = pe.tensor(1.0)
    g = pe.compile(lambda x: x * scalar)
    assert g(2.0) == 2
    scalar.assign(5.0)
    assert g(2.0) == 10


def test_a_captured_tensor_may_have_been_computed():
    w = pe.tensor([1.0, 2.0], requires_grad=True)
    c = np.exp(w) * 2
    f = pe.compile(pe.grad(lambda x: np.sum(x * c + np.reshape(c, (1, 2)))))
    with pe.no_grad():
        np.testing.assert_allclose(f(np.ones(2)), c.numpy())
        np.testing.assert_array_equal(pe.compile(lambda x: c)(np.ones(2)), c.numpy())


def test_captured_tensors_are_not_written():
    tape, parameters, data = training_tape()
    for parameter in parameters:
        parameter.data.flags.writeable = False
    tape(*data)


def test_the_same_array_may_be_passed_twice():
    f = pe.compile(pe.value_and_grad(lambda a, b: np.sum(a * np.sin(b)), (0, 1)))
    x = np.array([1.0, 2.0])
    value, (ga, gb) = f(x, x)
    np.testing.assert_allclose(value, np.sum(x * np.sin(x)))
    np.testing.assert_allclose(ga, np.sin(x))
    np.testing.assert_allclose(gb, x * np.cos(x))
    np.testing.assert_array_equal(x, [1, 2])


def test_outputs_may_be_passed_in_again():
    tape = Tape(trace(lambda x, y: [x + y, x - y], symbols((2,), (2,))))
    outputs = tape(np.array([1.0, 2.0]), np.array([3.0, 5.0]))
    again = tape(outputs[1], outputs[0])
    np.testing.assert_array_equal(again[0], [2, 4])
    np.testing.assert_array_equal(again[1], [-6, -10])


def symbols(*shapes):
    return [Tensor.symbol(shape, np.float64) for shape in shapes]


def test_arguments_are_copied_in_whatever_their_memory():
    f = pe.compile(lambda x: x @ x.T)
    x = np.arange(12.0).reshape(4, 3)
    strided = np.repeat(x, 2, axis=0)[::2]
    for array in (np.asfortranarray(x), strided, x[::-1][::-1]):
        np.testing.assert_array_equal(f(array), x @ x.T)
    assert len(f.tapes) == 1


def test_an_input_or_a_constant_may_be_an_output_also_twice():
    x = np.array([1.0, 2.0])
    a, (b, c), d, e = pe.compile(lambda x: (x, [x, 3.0], x.reshape(2, 1), np.zeros(2)))(x)
    np.testing.assert_array_equal(a, x)
    np.testing.assert_array_equal(b, x)
    np.testing.assert_array_equal(d, x[:, None])
    np.testing.assert_array_equal(e, [0, 0])
    assert c == 3
    a[:] = 7
    np.testing.assert_array_equal(b, x)


def test_results_are_copies_of_what_was_passed_in_or_captured():
    weight = pe.tensor([3.0, 4.0])
    f = pe.compile(lambda x: {"same": x, "view": x[::-1], "captured": weight, "again": [x]})
    x = np.array([1.0, 2.0])
    first = f(x)
    for result in (first["same"], first["view"], first["captured"], first["again"][0]):
        assert not np.may_share_memory(result, x) and not np.may_share_memory(result, weight.numpy())
        result[:] = -1
    np.testing.assert_array_equal(x, [1, 2])
    np.testing.assert_array_equal(weight.numpy(), [3, 4])
    second = f(x)
    np.testing.assert_array_equal(second["same"], [1, 2])
    np.testing.assert_array_equal(second["view"], [2, 1])
    np.testing.assert_array_equal(second["captured"], [3, 4])
    number = pe.compile(lambda x: (x, x))
    a, b = number(2.0)
    a[...] = 5
    assert b == 2 and number(2.0)[0] == 2


def test_random_ops_draw_anew_at_every_run():
    f = pe.compile(lambda x: ops.dropout(x, 0.5, generator))
    generator = np.random.default_rng(0)
    draws = {f(np.ones(64)).tobytes() for _ in range(4)}
    assert len(draws) == 4


def test_two_draws_of_one_generator_are_not_merged():
    generator = np.random.default_rng(0)
    a, b = pe.compile(lambda x: (ops.dropout(x, 0.5, generator), ops.dropout(x, 0.5, generator)))(np.ones(64))
    assert not np.array_equal(a, b)


def test_a_function_may_have_no_arguments():
    w = pe.tensor([1.0, 2.0])
    f = pe.compile(lambda: np.sum(w * w))
    assert f() == 5
    w.assign([3.0, 4.0])
    assert f() == 25


# Other shapes, other memory -------------------------------------------------------------------------------


def test_another_shape_or_dtype_gets_a_plan_of_its_own():
    f = pe.compile(pe.grad(lambda x: np.sum(np.tanh(x))))
    for x in (np.ones(3), np.ones(4), np.ones((2, 2)), np.ones(3, np.float32), np.ones(3)):
        g = f(x)
        assert g.dtype == x.dtype
        np.testing.assert_allclose(g, 1 - np.tanh(x) ** 2, rtol=1e-6)
    assert len(f.tapes) == 4


def test_a_tape_refuses_what_it_was_not_planned_for():
    tape, _, (x, labels) = training_tape()
    with pytest.raises(ReplayError, match="expected 2 arrays, got 1"):
        tape(x)
    with pytest.raises(ReplayError, match=r"argument 0: .* shape \(40, 5, 12\) float64, got \(39, 5, 12\) float64"):
        tape(x[1:], labels)
    with pytest.raises(ReplayError, match=r"argument 0: .* float64, got \(40, 5, 12\) float32"):
        tape(x.astype(np.float32), labels)
    with pytest.raises(ReplayError, match="argument 1"):
        tape(x, labels.astype(float))


def test_results_go_into_memory_that_is_given():
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    vector = np.full(sum(sizes), np.nan)
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    results = {k + 1: part.reshape(shape) for k, (part, shape) in enumerate(zip(parts, SHAPES, strict=True))}
    tape, _, data = training_tape(results=results)
    tape(*data)
    expected = pe.grad(loss, range(4))(*arguments())
    np.testing.assert_allclose(vector, np.concatenate([g.ravel() for g in expected]), rtol=1e-10, atol=1e-14)
    assert all(np.shares_memory(out, vector) for out in tape.outputs[1:])


def test_one_value_may_go_into_several_results():
    first, second = np.zeros(3), np.zeros(3)
    tape = Tape(trace(lambda x: [y := np.exp(x), y, np.exp(x)], symbols((3,))), {0: first, 1: second})
    third = tape(np.arange(3.0))[2]
    for result in (first, second, third):
        np.testing.assert_array_equal(result, np.exp(np.arange(3.0)))


@pytest.mark.parametrize(
    "memory",
    [np.zeros((16, 12)), np.zeros((12, 16), np.float32), np.zeros((16, 12)).T, np.zeros((12, 32))[:, ::2]],
    ids=["shape", "dtype", "order", "gaps"],
)
def test_memory_that_does_not_suit_a_result_is_refused(memory):
    with pytest.raises(ReplayError, match=r"result memory: expected shape \(12, 16\) float64 in C order"):
        training_tape(results={1: memory})


def test_a_result_may_not_be_computed_over_what_the_function_reads():
    w = Tensor(np.ones(3), name="weight")
    graph = trace(lambda x: [w - x, w * x], symbols((3,)))
    with pytest.raises(ReplayError, match="also that of weight, which would change while"):
        Tape(graph, {0: w.numpy()})


def test_arena_and_buffers_are_aligned_to_cache_lines():
    tape, _, _ = training_tape()
    for step, line in zip(tape.steps, tape.source.splitlines(), strict=True):
        if step.equation.op.view is None and line.endswith("]"):  # in the arena
            assert step.outs[0].ctypes.data % ALIGNMENT == 0


# No allocation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [loss, sequences])
def test_a_warm_tape_allocates_no_array(function):
    tape, _, data = training_tape(function, dtype=np.float32)
    tape(*data)
    smallest = 4 * BATCH * CLASSES  # the logits; iterators of numpy take some 1300 bytes for a moment
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(20):  # Python, too, specialises what runs often, and numpy keeps small blocks
            tape.run()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(5):
            tape.run()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < smallest, f"a run had {peak - before} bytes allocated at once"
    assert after - before < 512


def test_without_preallocation_every_op_allocates():
    tape, _, data = training_tape(loss, replace(Techniques(), preallocate=False), dtype=np.float32)
    tape(*data)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        tape.run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before > 4 * BATCH * HIDDEN * STEPS


# Tracing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if np.sum(x) > 0 else -x,
        lambda x: x * float(np.sum(x)),
        lambda x: x * x.numpy(),
        lambda x: x[int(x[0])],
        lambda x: x * np.sum(x).item(),
    ],
)
def test_a_value_that_is_needed_while_tracing_is_an_error_that_says_what_to_do(function):
    with pytest.raises(TraceError, match=r"only shapes are known; use ops such as where\(\)"):
        pe.compile(function)(np.ones(3))


def test_a_failed_trace_leaves_nothing_behind():
    def broken(x):
        np.tanh(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pe.compile(broken)(np.ones(3))
    assert pe.tensor([1.0]).numpy() + 1 == 2
    assert np.tanh(pe.tensor(0.0)).item() == 0


def test_a_compiled_function_inside_another_becomes_part_of_it():
    inner = pe.compile(lambda x: np.sin(x) * 2)
    outer = pe.compile(pe.grad(lambda x: np.sum(inner(x) * x)))
    x = np.array([0.5, 1.0])
    np.testing.assert_allclose(outer(x), 2 * np.cos(x) * x + 2 * np.sin(x))
    assert not inner.tapes


def test_traces_are_not_nested():
    with tracing(), pytest.raises(TraceError, match="call it uncompiled there"), tracing():
        pass


@pytest.mark.parametrize("use", [lambda x, kept: kept[0] * x, lambda x, kept: kept[0], lambda x, kept: kept[0].T])
def test_a_tensor_kept_from_an_earlier_trace_is_refused(use):
    kept = []
    pe.compile(lambda x: kept.append(np.exp(x)) or x)(np.ones(3))
    with pytest.raises(TraceError, match="kept from an earlier trace"):
        pe.compile(lambda x: use(x, kept))(np.ones(3))


@pytest.mark.parametrize(("result", "named"), [(None, "NoneType"), ("a", "str"), ({"a": ["b"]}, "str")])
def test_results_that_are_no_tensors_are_named(result, named):
    with pytest.raises(TraceError, match=f"tensors in tuples, lists or dicts, got {named}"):
        pe.compile(lambda x: result)(np.ones(3))


def test_containers_go_in_and_come_out():
    f = pe.compile(pe.value_and_grad(lambda layer, x: np.sum(x @ layer["weight"] + layer["bias"][0])))
    x = np.arange(6.0).reshape(3, 2)
    for scale in (1.0, 2.0):
        value, gradient = f({"weight": np.full(2, scale), "bias": (3.0, None)}, x)
        assert value == 15 * scale + 9
        np.testing.assert_array_equal(gradient["weight"], [6, 9])
        assert gradient["bias"] == (3, None)
    assert len(f.tapes) == 1
    f({"weight": np.ones(2), "bias": [3.0]}, x)
    assert len(f.tapes) == 2  # another structure is another tape
    assert pe.compile(lambda pair: pair[0] - pair[1])((3.0, 1.0)) == 2


# Straight-line programs of single numbers -----------------------------------------------------------------

NUMBERS = {
    "arithmetic": lambda x, y: (x - y) * -x / (y * y + 2.0) + 1.0 / x,
    "powers": lambda x, y: abs(x) ** y + x**3 + x**2 + np.square(y) + np.reciprocal(x),
    "exponentials": lambda x, y: np.exp(x) + np.expm1(y) + np.log(x * x) + np.log1p(y * y) + np.sqrt(abs(y)),
    "trigonometry": lambda x, y: (
        np.sin(x) + np.cos(y) * np.tan(x) + np.arctan(y) + np.arcsin(0.1 * x) + np.arccos(y / 9)
    ),
    "hyperbolic": lambda x, y: np.sinh(x) + np.cosh(y) + np.tanh(x * y),
    "activations": lambda x, y: ops.sigmoid(x) + ops.softplus(y) * ops.relu(x) + ops.relu(y),
    "choices": lambda x, y: np.maximum(x, y) * np.minimum(x, 2.0) + np.where(x > y, x, y * y) + np.sign(x) * abs(y),
    "comparisons": lambda x, y: sum(np.where(c, x, 1.0) for c in (x < y, x <= y, x >= y, x == y, x != y)),
    "nothing reduced": lambda x, y: np.sum(x) * np.max(y) + np.min(x) - ops.stop_gradient(x * y) * np.copy(y),
    "long": lambda x, y: reduce(lambda r, _: np.sin(r) + x * y, range(300), x),
}
EDGES = [0.7, -1.3, 2.0, 0.0, -0.0, 1e-320, 800.0, -800.0, 1e308, -1e308, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_function_of_numbers_is_a_program_of_floats_with_the_same_results(name):
    function = pe.value_and_grad(NUMBERS[name], (0, 1))
    program, arrays = pe.compile(function), pe.compile(function, Techniques(straight_line=False))
    for x in EDGES:
        for y in EDGES:
            value, (gx, gy) = program(x, y)
            expected, (ex, ey) = arrays(x, y)
            for ours, theirs in ((value, expected), (gx, ex), (gy, ey)):
                assert type(ours) is np.ndarray and ours.dtype == np.float64 and ours.shape == ()
                np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=f"at {x}, {y}")
    ((tape, _),) = program.tapes.values()
    assert tape.scalar is not None and tape.source == program.source.partition("\n")[2]
    ((tape, _),) = arrays.tapes.values()
    assert tape.scalar is None


SPECIAL = [*EDGES, 1.0, -1.0, 0.5, -0.5, -2.0, 3.0, 1 / 3, 709.9, -745.2]
OF_TWO = (
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "equal_mask", "arctan2", "hypot", "copysign"),
    "leaky_relu",
    "elu",
)
SCALAR = [*(op for op in TABLE.values() if op.scalar is not None), ADD_IN_ANY_ORDER]
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "logical_or")


@pytest.mark.parametrize("op", [ops.add, ops.mul, *(TABLE[name] for name in COMPARISONS)], ids=lambda op: op.name)
def test_truth_values_among_single_numbers_are_numpy_s(op):
    compiled = pe.compile(lambda x: ops.where(op(x > 0, x < 1), x, -x))
    for x in (-1.0, 0.0, 0.5, 1.0, 2.0):
        expected = x if op.kernel(np.bool_(x > 0), np.bool_(x < 1)) else -x
        assert [compiled(x).item() for _ in range(2)] == [expected] * 2
    ((tape, _),) = compiled.tapes.values()
    assert tape.scalar is not None


@pytest.mark.parametrize("op", SCALAR, ids=lambda op: op.name)
def test_each_op_on_one_number_is_numpy_s_in_every_call_to_the_sign_of_zero(op):
    """Eagerly, by the tape of arrays (the first call of a compiled function) and as floats (the later ones)."""
    call = getattr(ops, op.name, op) if op.name in ("sum", "max", "min") else op
    if op is WHERE:
        function = lambda x, y: ops.where(x > 0, x, y)  # noqa: E731
    elif op is ASTYPE:
        function = lambda x: ops.astype(ops.astype(x, np.bool_), np.float64)  # noqa: E731
    elif op.name in COMPARISONS:
        function = lambda x, y: ops.where(call(x, y), 1.0, 2.0)  # noqa: E731
    else:
        function = call
    pairs = op is WHERE or op.name in OF_TWO + COMPARISONS or op is ADD_IN_ANY_ORDER
    if not pairs:
        rows = [(function, [(x,) for x in SPECIAL])]
    else:
        rows = [(function, [(x, y) for x in SPECIAL for y in SPECIAL])]
        rows += [
            (lambda x, y=y: function(x, y), [(x,) for x in SPECIAL]) for y in SPECIAL if op.name not in COMPARISONS
        ]
    with np.errstate(all="ignore"):
        for run, points in rows:
            compiled, arrays = pe.compile(run), pe.compile(run, Techniques(straight_line=False))
            for at in points:
                expected = run(*(Tensor(np.array(x)) for x in at)).numpy()
                for value in (arrays(*at), compiled(*at)):
                    np.testing.assert_allclose(value, expected, rtol=1e-15, err_msg=f"{op.name}{at}")
                    if expected == 0:
                        assert np.signbit(value) == np.signbit(expected), f"{op.name}{at}"


@pytest.mark.parametrize("number", range(20))
def test_a_program_of_floats_uses_names_again_when_their_values_are_read_no_more(number):
    rng = np.random.default_rng(number)
    steps = [(rng.integers(3), rng.integers(-6, 0), rng.integers(-12, 0)) for _ in range(60)]

    def function(x, y):
        values = [x, y] * 6
        for op, i, j in steps:
            values.append((np.add, np.subtract, np.multiply)[op](values[i], values[j]))
        return values[-8::3]

    program, arrays = pe.compile(function), pe.compile(function, Techniques(straight_line=False))
    assert program(0.3, -0.7) == arrays(0.3, -0.7)
    targets = re.findall(r"^    (v\d+) =", program.source, re.MULTILINE)
    assert len(targets) > 20 and len(set(targets)) <= 14


def test_a_program_of_floats_takes_numbers_in_any_form():
    scale = pe.tensor(2.0)
    f = pe.compile(lambda x, y: (x * scale, [x > y, 3.0]))
    for number in (1.5, np.float64(1.5), np.array(1.5), pe.tensor(1.5)):
        product, (above, three) = f(number, 1.0)
        assert (product, above, three) == (3.0, True, 3.0) and above.dtype == np.bool_
    assert len(f.tapes) == 1
    scale.assign(4.0)
    assert f(1.5, 1.0)[0] == 6
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        f(1.0)


def test_single_precision_and_arrays_stay_with_numpy():
    f = pe.compile(lambda x: np.sin(x) * 0.1)
    for x in (np.float32(0.7), np.full((1,), 0.7), np.full((), 0.7, np.float32)):
        assert f(x).dtype == x.dtype and f(x).shape == x.shape
        np.testing.assert_array_equal(f(x), np.sin(x) * x.dtype.type(0.1))
    assert all(tape.scalar is None for tape, _ in f.tapes.values())


def test_threads_trace_and_replay_side_by_side():
    failures = []

    def work(k):
        try:
            f = pe.compile(pe.grad(lambda x: np.sum(np.sin(k * x))))
            for n in range(1, 20):
                x = np.linspace(0, 1, n)
                np.testing.assert_allclose(f(x), k * np.cos(k * x))
                np.testing.assert_allclose(pe.grad(lambda x: np.sum(x**2))(x), 2 * x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_may_share_a_compiled_function():
    f = pe.compile(lambda x: np.sum(np.exp(np.log(x) * 2)) / len(x))
    failures = []

    def work(k):
        x = np.full(20_000, float(k))  # long enough for numpy to let other threads run
        for _ in range(50):
            if not np.isclose(f(x), k * k):
                failures.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Looking at a tape ----------------------------------------------------------------------------------------


def test_the_source_is_one_line_per_op_and_names_parameters():
    tape, _, _ = training_tape()
    lines = tape.source.splitlines()
    assert len(lines) == len(tape.steps)
    assert any("matmul(v0, weight)" in line and "float64(40, 16) in arena" in line for line in lines)
    assert any("softmax_cross_entropy" in line and "in result" in line for line in lines)
    assert any(line.endswith("# view") for line in lines)


def test_the_source_of_a_compiled_function_shows_every_shape():
    f = pe.compile(lambda x: x * 2)
    with pytest.raises(ReplayError, match="has not been called yet"):
        _ = f.source
    f(np.ones(2))
    f(np.ones(3, np.float32))
    assert "# float64(2,)\nv0 = mul(x0, 2.0)" in f.source
    assert "# float32(3,)" in f.source


def test_diagnosis_names_the_first_op_with_a_non_finite_result_and_its_layer():
    def function(x):
        with pe.scope("encoder"):
            y = np.log(x)
        with pe.scope("decoder"):
            return [np.sum(y * 0)]

    tape = Tape(trace(function, symbols((3,))))
    tape(np.array([1.0, 2.0, 3.0]))
    assert tape.diagnose() is None
    tape(np.array([1.0, 0.0, 3.0]))
    error = tape.diagnose()
    assert isinstance(error, NonFiniteError)
    assert "op 'log' in layer 'encoder' was the first to give NaN or Inf (result of shape (3,))" in str(error)


def test_diagnosis_names_inputs_and_parameters_that_are_not_finite_themselves():
    w = Tensor(np.ones(3), name="rnn.weight")
    tape = Tape(trace(lambda x: [x * w], symbols((3,))))
    tape(np.array([1.0, np.nan, 3.0]))
    assert "input 0 (shape (3,)) holds NaN or Inf" in str(tape.diagnose())
    w.assign([1.0, np.inf, 1.0])
    tape(np.ones(3))
    assert "rnn.weight holds NaN or Inf" in str(tape.diagnose())


def test_diagnosis_of_a_masked_program_names_the_op_and_not_the_mask():
    def masked(x):
        return [np.log(ops.softmax(ops.where(np.tri(3, dtype=bool), x, -np.inf)) - 2.0)]

    tape = Tape(trace(masked, [Tensor.symbol((3, 3), np.float64)]))
    tape(np.ones((3, 3)))
    assert "op 'log'" in str(tape.diagnose()) or 'op "log"' in str(tape.diagnose())
    fine = Tape(trace(lambda x: [ops.where(x > 0, x, -np.inf)], [Tensor.symbol((3,), np.float64)]))
    fine(np.array([1.0, -1.0, 2.0]))
    assert fine.diagnose() is None


@pytest.mark.parametrize(
    "inside",
    [
        lambda f, x: pe.scan(lambda h, _: (f(h), None), x, length=1)[0],
        lambda f, x: pe.cond(ops.sum(x) > 0, f, f, x),
        lambda f, x: pe.while_loop(lambda h: ops.max(h) < 2, lambda h: f(h) + 1, x),
        lambda f, x: pe.checkpoint(f)(x),
        lambda f, x: pe.vmap(f)(x),
    ],
    ids=["scan", "cond", "while_loop", "checkpoint", "vmap"],
)
def test_diagnosis_takes_no_mask_in_a_loop_for_the_op(inside):
    def masked(x):
        return [np.log(np.exp(inside(lambda h: ops.where(h > 0, h, -np.inf), x)) - 20.0)]

    tape = Tape(trace(masked, [Tensor.symbol((3,), np.float64)]))
    tape(np.array([1.0, -1.0, 1.5]))
    assert "op 'log'" in str(tape.diagnose())


def test_a_graph_drops_what_no_output_needs():
    def wasteful(x):
        np.exp(x)
        return [x * 2]

    program = trace(wasteful, symbols((3,)))
    assert isinstance(program, Program)
    assert [equation.op.name for equation in program.equations] == ["mul"]
