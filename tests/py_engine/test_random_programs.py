"""Random programs of many ops: eager, compiled and PyTorch agree on values, gradients and gradients of gradients.

Forward mode is held against reverse mode on thousands of programs, and both against PyTorch and finite differences on
some hundreds.

The shapes are such that everything the planner does happens: views of views, parts computed in their places, memory
taken over, gradients of overlapping slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

import py_engine as pe
from py_engine import ops
from py_engine.ad.compile import zero_copy
from py_engine.ad.techniques import Techniques

# The instructions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One op in both libraries: which shapes it takes, and how its other arguments are drawn for them."""

    ours: Callable[..., Any]
    torch: Callable[..., Any]
    takes: Callable[..., bool] = lambda shape: True
    attrs: Callable[..., dict[str, Any]] = lambda draw, *shapes: {}
    operands: int = 1


def size(*shapes):
    return sum(int(np.prod(shape)) for shape in shapes)


def axes(shape):
    return len(shape) > 0


def few_axes(shape):
    return len(shape) < 3


def broadcastable(a, b):
    try:
        return size(np.broadcast_shapes(a, b)) <= 200
    except ValueError:
        return False


def matrices(a, b):
    return len(a) == len(b) == 2 and a[1] == b[0]


def rows_alike(a, b):
    return len(a) == len(b) == 2 and a[1] == b[1]


def join_axes(a, b):
    return [k for k in range(len(a)) if len(a) == len(b) and a[:k] + a[k + 1 :] == b[:k] + b[k + 1 :]]


def joinable(a, b):
    return bool(join_axes(a, b)) and size(a, b) <= 200


def stackable(a, b):
    return a == b and len(a) < 3 and size(a) <= 100


def some_axis(draw, shape):
    return {"axis": draw(st.integers(0, len(shape) - 1)), "keepdims": draw(st.booleans())}


def new_shape(draw, shape):
    n = size(shape)
    return {"shape": draw(st.sampled_from([(n,), (1, n), (n, 1), *((k, n // k) for k in (2, 3, 8) if n % k == 0)]))}


def permutation(draw, shape):
    return {"axes": tuple(draw(st.permutations(range(len(shape)))))}


def piece(draw, shape):
    index = []
    for n in shape:
        k = draw(st.integers(0, n - 1))
        step = draw(st.sampled_from([1, 1, 2]))
        index.append(draw(st.sampled_from([slice(None), slice(k, None, step), slice(None, k + 1), k])))
    return {"index": tuple(index)}


def positions(draw, shape):
    return {"rows": np.array(draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=5)))}


def place_of_axis(draw, *shapes):
    return {"axis": draw(st.integers(0, len(shapes[0])))}


def stretched(draw, shape):
    return {"shape": (draw(st.integers(1, 3)), *shape)}


def widths(draw, shape):
    return {"widths": [draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in shape]}


def joint(draw, a, b):
    return {"axis": draw(st.sampled_from(join_axes(a, b)))}


# Every instruction keeps values of order one in that order, so that no program overflows.
INSTRUCTIONS = {
    "neg": Instruction(lambda x: -x, lambda t, x: -x),
    "half": Instruction(lambda x: x * 0.5 + 0.25, lambda t, x: x * 0.5 + 0.25),
    "tanh": Instruction(np.tanh, lambda t, x: t.tanh(x)),
    "sin": Instruction(np.sin, lambda t, x: t.sin(x)),
    "sigmoid": Instruction(ops.sigmoid, lambda t, x: t.sigmoid(x)),
    "softplus": Instruction(ops.softplus, lambda t, x: t.nn.functional.softplus(x)),
    "relu": Instruction(ops.relu, lambda t, x: t.relu(x)),
    "abs": Instruction(abs, lambda t, x: abs(x)),
    "bell": Instruction(lambda x: np.exp(-(x**2)), lambda t, x: t.exp(-(x**2))),
    "log1p": Instruction(lambda x: np.log1p(np.square(x)), lambda t, x: t.log1p(t.square(x))),
    "root": Instruction(lambda x: np.sqrt(x * x + 1), lambda t, x: t.sqrt(x * x + 1)),
    "power": Instruction(lambda x: (1 + x * x) ** -0.3, lambda t, x: (1 + x * x) ** -0.3),
    "clip": Instruction(lambda x: np.clip(x, -0.5, 0.8), lambda t, x: t.clip(x, -0.5, 0.8)),
    "softmax": Instruction(ops.softmax, lambda t, x: t.softmax(x, -1), axes),
    "log_softmax": Instruction(lambda x: 0.3 * ops.log_softmax(x), lambda t, x: 0.3 * t.log_softmax(x, -1), axes),
    "logsumexp": Instruction(
        lambda x, axis, keepdims: 0.5 * ops.logsumexp(x, axis, keepdims),
        lambda t, x, axis, keepdims: 0.5 * t.logsumexp(x, axis, keepdims),
        axes,
        some_axis,
    ),
    "sum": Instruction(
        lambda x, axis, keepdims: 0.3 * np.sum(x, axis=axis, keepdims=keepdims),
        lambda t, x, axis, keepdims: 0.3 * t.sum(x, axis, keepdim=keepdims),
        axes,
        some_axis,
    ),
    "mean": Instruction(
        lambda x, axis, keepdims: np.mean(x, axis=axis, keepdims=keepdims),
        lambda t, x, axis, keepdims: t.mean(x, axis, keepdim=keepdims),
        axes,
        some_axis,
    ),
    "var": Instruction(
        lambda x, axis, keepdims: np.var(x, axis=axis, keepdims=keepdims),
        lambda t, x, axis, keepdims: t.var(x, axis, correction=0, keepdim=keepdims),
        axes,
        some_axis,
    ),
    "max": Instruction(
        lambda x, axis, keepdims: np.max(x, axis=axis, keepdims=keepdims),
        lambda t, x, axis, keepdims: t.amax(x, axis, keepdim=keepdims),
        axes,
        some_axis,
    ),
    "add": Instruction(lambda a, b: a + b, lambda t, a, b: a + b, broadcastable, operands=2),
    "sub": Instruction(lambda a, b: a - b, lambda t, a, b: a - b, broadcastable, operands=2),
    "mul": Instruction(lambda a, b: a * np.tanh(b), lambda t, a, b: a * t.tanh(b), broadcastable, operands=2),
    "div": Instruction(lambda a, b: a / (1 + b * b), lambda t, a, b: a / (1 + b * b), broadcastable, operands=2),
    "maximum": Instruction(np.maximum, lambda t, a, b: t.maximum(a, b), broadcastable, operands=2),
    "minimum": Instruction(np.minimum, lambda t, a, b: t.minimum(a, b), broadcastable, operands=2),
    "where": Instruction(
        lambda a, b: np.where(a > 0.1, a, 0.5 * b),
        lambda t, a, b: t.where(a > 0.1, a, 0.5 * b),
        broadcastable,
        operands=2,
    ),
    "matmul": Instruction(lambda a, b: a @ b, lambda t, a, b: a @ b, matrices, operands=2),
    "einsum": Instruction(
        lambda a, b: 0.3 * np.einsum("ij,kj->ki", a, b),
        lambda t, a, b: 0.3 * t.einsum("ij,kj->ki", a, b),
        rows_alike,
        operands=2,
    ),
    "reshape": Instruction(np.reshape, lambda t, x, shape: x.reshape(shape), attrs=new_shape),
    "transpose": Instruction(np.transpose, lambda t, x, axes: x.permute(axes), attrs=permutation),
    "slice": Instruction(lambda x, index: x[index], lambda t, x, index: x[index], axes, piece),
    "gather": Instruction(lambda x, rows: x[rows], lambda t, x, rows: x[t.tensor(rows)], axes, positions),
    "expand_dims": Instruction(np.expand_dims, lambda t, x, axis: x.unsqueeze(axis), few_axes, place_of_axis),
    "broadcast_to": Instruction(np.broadcast_to, lambda t, x, shape: x.broadcast_to(shape), few_axes, stretched),
    "pad": Instruction(
        lambda x, widths: np.pad(x, widths),
        lambda t, x, widths: t.nn.functional.pad(x, [n for pair in reversed(widths) for n in pair]),
        lambda shape: axes(shape) and size(shape) <= 50,
        widths,
    ),
    "concatenate": Instruction(
        lambda a, b, axis: np.concatenate([a, b], axis), lambda t, a, b, axis: t.cat([a, b], axis), joinable, joint, 2
    ),
    "stack": Instruction(
        lambda a, b, axis: np.stack([a, b], axis),
        lambda t, a, b, axis: t.stack([a, b], axis),
        stackable,
        place_of_axis,
        2,
    ),
    "detach": Instruction(ops.stop_gradient, lambda t, x: x.detach()),
}
OFTEN = ["concatenate", "stack", "slice", "matmul", "reshape"]  # what the planner has most to do with


# Programs -------------------------------------------------------------------------------------------------

SHAPES = [(), (8,), (1, 8), (3, 8), (3, 1), (3, 3), (2, 3, 8), (3, 9), (8, 3)]


@dataclass(frozen=True)
class Program:
    """Inputs, steps as (name, numbers of operands, arguments), and the values that the result is made of.

    No value is left unused, so nothing is pruned before the planner sees it.
    """

    shapes: list[tuple[int, ...]]
    steps: list[tuple[str, tuple[int, ...], dict[str, Any]]]
    results: list[int]
    seed: int

    def inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.seed)
        return [rng.standard_normal(shape) for shape in self.shapes]

    def directions(self) -> list[np.ndarray]:
        """A tangent, or a weight, for every element of the inputs."""
        return [np.cos(np.arange(int(np.prod(shape)))).reshape(shape) for shape in self.shapes]

    def ours(self, *inputs: Any) -> Any:
        return self._sum(self.values(*inputs), np.sum)

    def torch(self, torch: Any, *inputs: Any) -> Any:
        return self._sum(self._run(inputs, lambda step: lambda *a, **k: step.torch(torch, *a, **k)), torch.sum)

    def values(self, *inputs: Any) -> list[Any]:
        return self._run(inputs, lambda step: step.ours)

    def _run(self, inputs, library):
        values = list(inputs)
        for name, operands, attrs in self.steps:
            values.append(library(INSTRUCTIONS[name])(*(values[k] for k in operands), **attrs))
        return [values[n] for n in self.results]

    def _sum(self, values, total):
        return sum(total(value * (value - 0.3 * k)) for k, value in enumerate(values))

    def __str__(self) -> str:
        lines = [f"v{k}: input {shape}" for k, shape in enumerate(self.shapes)]
        for k, (name, operands, attrs) in enumerate(self.steps, len(self.shapes)):
            lines.append(f"v{k} = {name}({', '.join(f'v{n}' for n in operands)}) {attrs or ''}")
        return "\n".join([*lines, f"result of {self.results}, seed {self.seed}"])


@st.composite
def programs(draw):
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    values = [np.zeros(shape) for shape in shapes]
    steps = []
    for _ in range(draw(st.integers(5, 15))):
        recent = range(max(0, len(values) - 8), len(values))
        name = draw(st.sampled_from([*INSTRUCTIONS, *OFTEN, *OFTEN]))
        step = INSTRUCTIONS[name]
        ways = [ks for ks in product(recent, repeat=step.operands) if step.takes(*(values[k].shape for k in ks))]
        if ways:
            operands = draw(st.sampled_from(ways))
            attrs = step.attrs(draw, *(values[k].shape for k in operands))
            steps.append((name, operands, attrs))
            values.append(step.ours(*(pe.Tensor(values[k]) for k in operands), **attrs).numpy())
    used = {k for _, operands, _ in steps for k in operands}
    results = {0} | {k for k in range(len(values)) if k not in used}
    results |= draw(st.sets(st.integers(0, len(values) - 1), max_size=2))
    return Program(shapes, steps, sorted(results), draw(st.integers(0, 2**16)))


def assert_close(ours, theirs, what):
    for a, b in zip(ours, theirs, strict=True):
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11 * scale, err_msg=what)


pytestmark = pytest.mark.campaign
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
many_draws = settings(max_examples=3 * settings.default.max_examples, suppress_health_check=slow)
more_draws = settings(max_examples=4 * settings.default.max_examples, suppress_health_check=slow)


@many_draws
@given(programs())
def test_eager_compiled_and_torch_agree(torch, program):
    note(str(program))
    inputs = program.inputs()
    variables = [torch.tensor(a, requires_grad=True) for a in inputs]
    value = program.torch(torch, *variables)
    value.backward()
    expected = [value.detach().numpy(), *(np.zeros(v.shape) if v.grad is None else v.grad.numpy() for v in variables)]

    function = pe.value_and_grad(program.ours, range(len(inputs)))
    value, gradients = function(*inputs)
    assert_close([value, *gradients], expected, "eager")

    compiled = pe.compile(function)
    value, gradients = compiled(*inputs)
    assert_close([value, *gradients], expected, "compiled")

    ((tape, _),) = compiled.tapes.values()
    results = []
    for byte in (0x00, 0xFF):
        tape.poison(byte)
        results.append([out.copy() for out in tape(*inputs)])
    for first, poisoned_zeros, poisoned_ones in zip([value, *gradients], *results, strict=True):
        np.testing.assert_array_equal(poisoned_zeros, first)
        np.testing.assert_array_equal(poisoned_ones, first)


switches = st.fixed_dictionaries(
    {name: st.booleans() for name in ("preallocate", "reuse_memory", "in_place", "views", "place_parts", "simplify")}
)


@many_draws
@given(programs(), switches)
def test_techniques_do_not_change_results(program, switched):
    note(str(program))
    inputs = program.inputs()
    function = pe.value_and_grad(program.ours, range(len(inputs)))
    value, gradients = function(*inputs)
    changed = pe.compile(function, replace(Techniques(), **switched))
    for _ in range(2):  # the second run finds what the first one left in the buffers
        ours, theirs = changed(*inputs)
        assert_close([ours, *theirs], [value, *gradients], f"with {switched}")


@many_draws
@given(programs())
def test_arrays_used_where_they_are_give_what_copies_give(program):
    note(str(program))
    inputs = program.inputs()
    compiled = pe.compile(pe.value_and_grad(program.ours, range(len(inputs))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_copy, "LARGE", 0)  # all of them
        value, gradients = compiled(*inputs)
        compiled(*[x + 1 for x in inputs])
    ((tape, _),) = compiled.tapes.values()
    found = [value, *gradients]
    for array, expected in zip(found, tape(*inputs), strict=True):
        np.testing.assert_array_equal(array, expected)
    for i, array in enumerate(found):
        for other in [*inputs, *tape.inputs, *tape.outputs, *found[:i]]:
            assert not np.may_share_memory(array, other)


@many_draws
@given(programs())
def test_gradients_of_gradients_agree(torch, program):
    note(str(program))
    inputs = program.inputs()
    weights = program.directions()
    everything = range(len(inputs))

    def projected(*operands):
        found = pe.grad(program.ours, everything)(*operands)
        return sum(np.sum(g * w) for g, w in zip(found, weights, strict=True))

    variables = [torch.tensor(a, requires_grad=True) for a in inputs]
    first = torch.autograd.grad(program.torch(torch, *variables), variables, create_graph=True, materialize_grads=True)
    total = sum((g * torch.tensor(w)).sum() for g, w in zip(first, weights, strict=True))
    if total.requires_grad:
        second = torch.autograd.grad(total, variables, materialize_grads=True)
    else:
        second = [torch.zeros_like(v) for v in variables]
    expected = [g.detach().numpy() for g in second]
    assert_close(pe.grad(projected, everything)(*inputs), expected, "eager")
    assert_close(pe.compile(pe.grad(projected, everything))(*inputs), expected, "compiled")

    def along(*operands):
        return pe.jvp(program.ours, operands, weights)[1]

    # The Hessian is symmetric: its product with the weights is the same in all orders of the two modes.
    assert_close(pe.hvp(lambda x: program.ours(*x), inputs, weights), expected, "forward over reverse")
    assert_close(pe.grad(along, everything)(*inputs), expected, "reverse over forward")


# Forward mode ---------------------------------------------------------------------------------------------


@more_draws
@given(programs())
def test_jvp_is_consistent_with_vjp(program):
    note(str(program))
    inputs, tangents = program.inputs(), program.directions()
    values, moved = pe.jvp(program.values, inputs, tangents)
    again, pullback = pe.vjp(program.values, *inputs)
    seeds = [np.sin(1.0 + np.arange(value.size)).reshape(value.shape) for value in values]
    pulled = pullback(seeds)
    for one, other in zip(values, again, strict=True):
        np.testing.assert_array_equal(one, other)
    there = [float(np.sum(seed * t)) for seed, t in zip(seeds, moved, strict=True)]
    back = [float(np.sum(g * t)) for g, t in zip(pulled, tangents, strict=True)]
    scale = 1 + sum(map(abs, there)) + sum(map(abs, back))
    assert abs(sum(there) - sum(back)) <= 1e-11 * scale, (there, back)


@many_draws
@given(programs(), st.integers(1, 40))
def test_many_tangents_at_once_are_the_rows_of_the_reverse_mode(program, chunk):
    note(str(program))
    inputs, weights = program.inputs(), program.directions()
    blocks = pe.jacobian(lambda x: program.values(*x), inputs, mode="forward", chunk=chunk)
    values, pullback = pe.vjp(program.values, *inputs)
    seeds = [np.sin(1.0 + np.arange(value.size)).reshape(value.shape) for value in values]
    rows = [
        sum(np.tensordot(seed, block[i], seed.ndim) for seed, block in zip(seeds, blocks, strict=True))
        for i in range(len(inputs))
    ]
    assert_close(rows, pullback(seeds), f"{chunk} at once")
    moved = pe.compile(lambda *x: pe.jvp(program.values, x, weights)[1])(*inputs)
    columns = [sum(np.tensordot(b, w, w.ndim) for b, w in zip(row, weights, strict=True)) for row in blocks]
    assert_close(moved, columns, "compiled")


@many_draws
@given(programs(), st.lists(st.booleans(), min_size=3, max_size=3), st.booleans())
def test_many_samples_at_once_are_each_sample(program, mapped, compiled):
    note(str(program))
    inputs = program.inputs()
    mapped = [True, *mapped[1:]][: len(inputs)]
    samples = [[x * scale if m else x for x, m in zip(inputs, mapped, strict=True)] for scale in (1.0, 0.7, -1.1)]
    given_ = [np.stack([own[i] for own in samples]) if m else inputs[i] for i, m in enumerate(mapped)]
    axes = tuple(0 if m else None for m in mapped)
    gradient = pe.value_and_grad(program.ours, tuple(range(len(inputs))))
    run = pe.compile if compiled else lambda f: f
    value, found = run(pe.vmap(gradient, in_axes=axes))(*given_)
    each = [gradient(*own) for own in samples]
    assert_close([value], [np.stack([v for v, _ in each])], "values")
    assert_close(found, [np.stack(parts) for parts in zip(*(g for _, g in each), strict=True)], "of each sample")
    total = run(pe.grad(lambda *x: np.sum(pe.vmap(program.ours, in_axes=axes)(*x)), tuple(range(len(inputs)))))(*given_)
    expected = [g if m else np.sum(g, axis=0) for g, m in zip(found, mapped, strict=True)]
    assert_close(total, expected, "through all samples")


@many_draws
@given(programs())
def test_forward_mode_agrees_with_torch_and_finite_differences(torch, program):
    note(str(program))
    inputs, tangents = program.inputs(), program.directions()
    _, moved = pe.jvp(program.ours, inputs, tangents)

    variables = [torch.tensor(a, requires_grad=True) for a in inputs]
    gradients = torch.autograd.grad(program.torch(torch, *variables), variables, materialize_grads=True)
    expected = sum(float(torch.sum(g * torch.tensor(t))) for g, t in zip(gradients, tangents, strict=True))
    assert_close([moved], [expected], "torch")
    if any(name == "detach" for name, _, _ in program.steps):
        return  # what is taken as a constant moves all the same

    def difference(h):
        ahead, behind = (
            program.ours(*(pe.Tensor(np.asarray(a + s * t)) for a, t in zip(inputs, tangents, strict=True))).item()
            for s in (h, -h)
        )
        return (ahead - behind) / (2 * h)

    coarse, fine, finer = (difference(h) for h in (2e-4, 1e-4, 5e-5))
    scale = 1 + abs(fine)
    # No kink and no jump in between: the error falls with the square of the step.
    assume(abs(coarse - fine) < 1e-4 * scale and abs(coarse - fine - 4 * (fine - finer)) < 1e-6 * scale)
    assert abs(moved - (4 * fine - coarse) / 3) < 1e-6 * scale
