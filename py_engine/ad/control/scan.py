"""Loops: a graph of constant size, whatever the number of steps.

A loop is one op. Its body is traced once and compiled to a tape, which is replayed at every step. The loop keeps the
carry at the start of each step for its gradient, and nothing else: the backward pass is a loop again, in the other
direction, whose body computes a step's inner values once more. So derivatives of any order work, and a loop over
segments, each of them a loop, needs memory for the segments' carries and for one segment only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.compile.tape import Tape
from py_engine.ad.containers import Structure, flatten, flatten_as, paths, unflatten
from py_engine.ad.forward import push_forward
from py_engine.ad.op import Call, Op, Shape, as_tensor
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.ops.shape import all_mapped
from py_engine.ad.program import Program, close_over, nested_trace, without_inner
from py_engine.ad.reverse import gradients
from py_engine.ad.state import LEVELS, STATE, restoring
from py_engine.ad.techniques import COMPILE_DEFAULTS, Techniques
from py_engine.ad.tensor import COMPLEX, FLOATS, Array, Literal, Node, Tensor, plain_array
from py_engine.ad.transforms import check_callable
from py_engine.ad.vmap import batched_program
from py_engine.errors import ConfigurationError, DTypeError, ShapeError, TraceError

Body = Callable[[Any, Any], tuple[Any, Any]]


@restoring
def scan(
    function: Body,
    carry: Any,
    xs: Any = None,
    length: int | None = None,
    checkpoint: bool | int = False,
    truncate: int | None = None,
) -> tuple[Any, Any]:
    """Carry a state through a sequence: `carry, y = function(carry, x)` for each x, as one op.

    The function is traced once, so its Python code runs once and cannot branch on values. Tensors that it captures
    have their gradients, too; they cost one addition per step each.

    Args:
        function: takes the carry and one element of `xs`, and returns the new carry, of the same structure, shapes
            and dtypes, and an output (None if there is nothing to put out).
        carry: the initial state: an array or a container of arrays; all floats in it, and in what is put out, are of
            one dtype.
        xs: an array, or a container of arrays, whose first axis is the sequence; None if there is none.
        length: the number of steps; needed without `xs`.
        checkpoint: keep the carry only at the start of each segment of this number of steps, and recompute the others
            in the backward pass. True takes segments of about the square root of the length, and so memory that grows
            with the square root; the price is one more forward pass. False keeps all carries.
        truncate: gradients flow through at most that number of steps: the sequence is cut into pieces, the last ones of
            just this length, between which the carry is a constant (truncated back-propagation through time).

    Returns:
        The last carry, and the outputs, stacked along a new first axis.

    Raises:
        ShapeError: the function's carry is of another structure or shape than it was; elements of `xs` differ in
            their number, or that is not `length`; the number of steps is not known.
        DTypeError: the carry changes its dtype, floats of two dtypes are mixed, or something is no real number.
        ConfigurationError: `length`, `checkpoint` or `truncate` is no number of steps; `function` is not callable.
        TraceError: the function branches on a value.

    Source: truncation after Williams and Peng, Neural Computation 2 (1990); the square root after Chen et al.,
    "Training deep nets with sublinear memory cost" (2016).

    Example:
        >>> total, sums = scan(lambda s, x: (s + x, s + x), 0.0, np.array([1.0, 2.0, 3.0]))
        >>> sums.numpy()
        array([1., 3., 6.])
    """
    check_callable("scan", function)
    carry_leaves, carry_structure = flatten(carry)
    x_leaves, x_structure = flatten(xs)
    tensors = tensors_of([*carry_leaves, *x_leaves])
    carries, sequences = tensors[: len(carry_leaves)], tensors[len(carry_leaves) :]
    names = [f"xs{path}" for path in paths(x_structure)]
    check_dtypes("scan", tensors, [*(f"the carry{path}" for path in paths(carry_structure)), *names])
    steps = _length(sequences, names, length)
    body, captured, y_structure = _traced(function, carries, carry_structure, sequences, x_structure)
    segment = _segment(steps, checkpoint)
    if truncate is not None and not is_whole(truncate, 1):
        raise ConfigurationError(f"scan: truncate must be a number of steps from 1 on, got {truncate!r}")
    last, ys = _scanned(body, carries, sequences, captured, steps, segment, truncate)
    return unflatten(carry_structure, last), unflatten(y_structure, ys)


# Arguments ------------------------------------------------------------------------------------------------


def tensors_of(given: Sequence[Any]) -> list[Tensor]:
    """Return leaves as tensors; a number takes the float dtype of the arrays, and there is only one."""
    leaves = [x if isinstance(x, Tensor) or np.isscalar(x) else plain_array(x) for x in given]
    floats = next((x.dtype for x in leaves if isinstance(x, (Tensor, np.ndarray)) and x.dtype in FLOATS), np.float64)

    def is_number(x: Any) -> bool:
        return isinstance(x, (float, int)) and not isinstance(x, bool)

    return [x if isinstance(x, Tensor) else _leaf(np.asarray(x, floats if is_number(x) else None)) for x in leaves]


def _leaf(array: Array) -> Tensor:
    """Return an array as a tensor; what holds no numbers as a symbol, which `check_dtypes` refuses by its name."""
    return Tensor(array) if array.dtype.kind in "fiub" else Tensor.symbol(array.shape, array.dtype)


def check_dtypes(function: str, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise `DTypeError` for what is no array of numbers or truth values."""
    for x, name in zip(tensors, names, strict=True):
        if x.dtype not in FLOATS and x.dtype.kind not in "iub":
            advice = COMPLEX if x.dtype.kind == "c" else "give float32, float64, integers or truth values"
            raise DTypeError(f"{function}: {name} is of {x.dtype}; {advice}")


def _length(sequences: Sequence[Tensor], names: Sequence[str], length: int | None) -> int:
    if length is not None and not is_whole(length, 0):
        raise ConfigurationError(f"scan: length must be a number of steps, got {length!r}")
    for x, name in zip(sequences, names, strict=True):
        if not x.shape:
            raise ShapeError(f"scan: {name} is a single number; its first axis must be the sequence")
        if length is None:
            length = x.shape[0]
        if x.shape[0] != length:
            other = f"{names[0]} has {length}" if sequences[0].shape[0] == length else f"length is {length}"
            raise ShapeError(f"scan: {name} has {x.shape[0]} steps, but {other}")
    if length is None:
        raise ShapeError("scan: the number of steps is not known; give length, or xs whose first axis is the sequence")
    return int(length)


def _segment(steps: int, checkpoint: bool | int) -> int | None:
    if checkpoint is False:
        return None
    if checkpoint is True:
        return max(1, math.isqrt(steps))
    if not is_whole(checkpoint, 1):
        raise ConfigurationError(
            f"scan: checkpoint must be True, False or a number of steps from 1 on, got {checkpoint!r}"
        )
    return int(checkpoint)


def _traced(
    function: Body,
    carries: Sequence[Tensor],
    carry_structure: Structure,
    sequences: Sequence[Tensor],
    x_structure: Structure,
) -> tuple[Program, list[Tensor], Structure]:
    """Return the body as ops, from the leaves of carry and x and from the tensors it captures to carry and y."""
    old = [Tensor.symbol(x.shape, x.dtype) for x in carries]
    elements = [Tensor.symbol(x.shape[1:], x.dtype) for x in sequences]
    level = next(LEVELS)
    with nested_trace() as nodes:
        result = function(unflatten(carry_structure, old), unflatten(x_structure, elements))
        if not isinstance(result, tuple) or len(result) != 2:
            what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise ShapeError(f"scan: the function must return (carry, y), got {what}")
        new_leaves = flatten_as(result[0], carry_structure, "scan: the carry that the function returned")
        y_leaves, y_structure = flatten(result[1])
        new = [like(x, kind) for x, kind in zip(new_leaves, old, strict=True)]
        floats = next((x.dtype for x in (*old, *elements) if x.dtype in FLOATS), np.dtype(np.float64))
        ys = [
            y if isinstance(y, Tensor) else _leaf(plain_array(y, floats if isinstance(y, float) else None))
            for y in y_leaves
        ]
    check_dtypes("scan", ys, [f"the output{path} that the function returned" for path in paths(y_structure)])
    check_kept("scan", new, old, carry_structure)
    kinds = {str(x.dtype) for x in (*new, *ys) if x.dtype in FLOATS}
    if len(kinds) > 1:
        raise DTypeError(f"scan: carry and outputs mix {' and '.join(sorted(kinds))}; convert them with astype()")
    body, captured = close_over(nodes, [*old, *elements], [*new, *ys])
    return body, without_inner(captured, level), y_structure


def check_kept(function: str, new: Sequence[Tensor], old: Sequence[Tensor], structure: Structure) -> None:
    """Raise where what a step makes of the carry is of another shape or dtype."""
    for x, was, path in zip(new, old, paths(structure), strict=True):
        kept = f"{function}: the carry{path} must keep its"
        if x.shape != was.shape:
            raise ShapeError(f"{kept} shape, but it was {was.shape} and the function made it {x.shape}")
        if x.dtype != was.dtype:
            raise DTypeError(f"{kept} dtype, but it was {was.dtype} and the function made it {x.dtype}")


def like(x: Any, kind: Tensor) -> Tensor:
    """Return a result of the body as a tensor; a plain number has the dtype that the carry had."""
    if isinstance(x, Tensor):
        return x
    leaves, structure = flatten(x)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ShapeError(f"expected an array, got {structure}")
    value = np.asarray(x)
    weak = np.isscalar(x) and np.can_cast(value.dtype, kind.dtype, "same_kind")  # 5.5 is no integer
    return as_tensor(value.astype(kind.dtype) if weak else value)


# Segments -------------------------------------------------------------------------------------------------


def _scanned(
    body: Program,
    carries: list[Tensor],
    sequences: list[Tensor],
    captured: list[Tensor],
    steps: int,
    segment: int | None,
    truncate: int | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the last carries and the stacked outputs of a loop, perhaps as a loop over pieces, each of them a loop."""
    if truncate is not None and steps <= truncate:
        truncate = None
    pieces, inside = (segment, None) if truncate is None else (truncate, segment)
    if pieces is None or steps <= pieces or (pieces == 1 and truncate is None):
        return _looped(Loop(body, len(carries), len(sequences), steps), carries, sequences, captured)
    # The first piece takes what is left over, so that all others are of one length and the last is a whole one.
    whole = (steps - 1) // pieces if truncate is not None else steps // pieces
    first = steps - whole * pieces
    ys: list[list[Tensor]] = []
    if first:
        carries, y = _scanned(body, carries, [x[:first] for x in sequences], captured, first, inside, None)
        ys.append(y)
    old = [Tensor.symbol(x.shape, x.dtype) for x in carries]
    elements = [Tensor.symbol((pieces, *x.shape[1:]), x.dtype) for x in sequences]
    constants = [Tensor.symbol(x.shape, x.dtype) for x in captured]
    with nested_trace() as nodes:
        start = [ops.stop_gradient(x) for x in old] if truncate is not None else old
        new, y = _scanned(body, start, elements, constants, pieces, inside, None)
    piece, others = close_over(nodes, [*old, *elements, *constants], [*new, *y])
    rest = [ops.reshape(x[first:], (whole, pieces, *x.shape[1:])) for x in sequences]
    carries, y = _looped(Loop(piece, len(carries), len(sequences), whole), carries, rest, [*captured, *others])
    ys.append([ops.reshape(a, (whole * pieces, *a.shape[2:])) for a in y])
    return carries, [a[0] if len(a) == 1 else ops.concatenate(a) for a in zip(*ys, strict=True)]


# The op ---------------------------------------------------------------------------------------------------


class Tapes:
    """The tapes of a program: as many as calls of it have run at the same time.

    Attributes:
        free: those that nobody uses, by their techniques.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.free: dict[Techniques, list[Tape]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def one(self, techniques: Techniques) -> Iterator[Tape]:
        """Lend a tape."""
        with self._lock:
            free = self.free.setdefault(techniques, [])
            tape = free.pop() if free else Tape(self.program, techniques=techniques)
        try:
            yield tape
        finally:
            with self._lock:
                free.append(tape)


@dataclass(eq=False)
class Loop:
    """A body and how often it is run.

    Attributes:
        body: from carries, elements of the sequences and constants to carries, outputs and sums.
        carries: how many values are carried.
        sequences: how many inputs are taken apart along their first axis.
        length: the number of steps.
        sums: how many of the results, the last ones, are summed over the steps; those before them are stacked.
        reverse: whether the last element comes first.
        derived: whether it is a derivative of another loop, which makes the checks of values.
        name: the function that makes it, for messages.
    """

    body: Program
    carries: int
    sequences: int
    length: int
    sums: int = 0
    reverse: bool = False
    derived: bool = False
    name: str = "scan"
    derivatives: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = [(x.shape, x.dtype) for x in self.body.outputs]
        self.tapes = Tapes(self.body)

    def __repr__(self) -> str:
        return f"<{self.length} times {self.body!r}>"

    @property
    def outputs(self) -> int:
        """How many results are stacked."""
        return len(self.results) - self.carries - self.sums

    @property
    def programs(self) -> list[Program]:
        """The body, and those of the loops that compute its gradients, as far as they were made; see `programs_in`."""
        backward = [made[0].body for (name, *_), made in self.derivatives.items() if name == self._backward.__name__]
        return [self.body, *backward]

    @property
    def checks(self) -> bool:
        """Whether the body accepts only some values, and no other loop checks them."""
        return not self.derived and self.body.checks

    def kinds(self, keep: bool) -> list[tuple[Shape, Any]]:
        """Return shape and dtype of each result: last carries, stacked outputs, sums; the carries before each step."""
        stacked = slice(self.carries, self.carries + self.outputs)
        kinds = [
            *self.results[: self.carries],
            *(((self.length, *shape), dtype) for shape, dtype in self.results[stacked]),
            *self.results[stacked.stop :],
        ]
        if keep:
            kinds += [((self.length, *shape), dtype) for shape, dtype in self.results[: self.carries]]
        return kinds

    def run(self, inputs: Sequence[Array], outs: Sequence[Array], techniques: Techniques) -> None:
        """Compute the loop into these arrays, of `kinds`."""
        with self.tapes.one(techniques) as tape:
            self._run(tape, inputs, outs)

    def _run(self, tape: Tape, inputs: Sequence[Array], places: Sequence[Array]) -> None:
        c, s, y = self.carries, self.sequences, self.outputs
        for part in (slice(c), slice(c + s, None)):
            for buffer, array in zip(tape.inputs[part], inputs[part], strict=True):
                np.copyto(buffer, array)
        last, stacked = places[:c], places[c : c + y]
        sums, kept = places[c + y : c + y + self.sums], places[c + y + self.sums :]
        for total in sums:
            total[...] = 0
        taken = [(source, buffer) for source, buffer in zip(inputs[c : c + s], tape.inputs[c : c + s], strict=True)]
        saved = list(zip(kept, tape.inputs, strict=False))
        made = list(zip(stacked, tape.outputs[c : c + y], strict=True))
        added = list(zip(sums, tape.outputs[c + y :], strict=True))
        carried = list(zip(tape.inputs[:c], tape.outputs[:c], strict=True))
        copy, add, run = np.copyto, np.add, tape.run
        for t in reversed(range(self.length)) if self.reverse else range(self.length):
            for source, buffer in taken:
                copy(buffer, source[t])
            for place, buffer in saved:
                place[t] = buffer
            run()
            for place, result in made:
                place[t] = result
            for total, result in added:
                add(total, result, total)
            for buffer, result in carried:
                copy(buffer, result)
        for place, buffer in zip(last, tape.inputs[:c], strict=True):
            copy(place, buffer)

    # Derivatives ------------------------------------------------------------------------------------------

    def _derive(self, make: Callable[..., Any], *flags: tuple[bool, ...]) -> Any:
        """Return what `make(*flags)` makes: a derivative of this loop, made once for the same flags."""
        key = (make.__name__, *flags)
        if key not in self.derivatives:
            if self.body.random is not None:
                raise TraceError(
                    f"{self.name}: the function draws random numbers ({self.body.random}), which its derivative would "
                    "draw anew; draw them for all steps before and pass them in"
                    f"{' xs' if self.name == 'scan' else ', as part of the carry'}"
                )
            self.derivatives[key] = make(*flags)
        return self.derivatives[key]

    def backward(self, given: tuple[bool, ...], needs_grad: tuple[bool, ...]) -> tuple[Loop, list[Tensor], list[bool]]:
        """Return the loop that computes the gradients.

        Args:
            given: which of the results (carries, outputs, sums, kept carries) have an upstream gradient.
            needs_grad: which inputs' gradients are wanted; those of all floating carries are always there.

        Returns:
            The loop; further constants of its body; and which of (kept carries, sequences, upstream gradients of
            outputs, those of kept carries; constants, upstream gradients of sums) its body reads.
        """
        return self._derive(self._backward, given, needs_grad)  # type: ignore[no-any-return]

    def _backward(self, given: Sequence[bool], needs_grad: Sequence[bool]) -> tuple[Loop, list[Tensor], list[bool]]:
        c, s, n = self.carries, self.sequences, len(self.results)
        inputs = self.body.symbols()
        floating = [i for i in range(c) if inputs[i].dtype in FLOATS]
        wanted = [i for i in range(c, len(inputs)) if needs_grad[i]]
        above = [Tensor.symbol(*self.results[i]) for i in floating]
        upstream = {i: Tensor.symbol(*self.results[i]) for i in range(c, n) if given[i]}
        kept = {i: Tensor.symbol(*self.results[i]) for i in floating if len(given) > n and given[n + i]}
        outputs = [i for i in upstream if i < c + self.outputs]
        sums = [i for i in upstream if i >= c + self.outputs]
        with nested_trace() as nodes:
            results = self.body(inputs)
            seeded = [*zip((results[i] for i in floating), above, strict=True)]
            seeded += [(results[i], g) for i, g in upstream.items()]
            dependents = self._depending({i for i, needed in enumerate(needs_grad) if needed})
            targets = [i for i in (*floating, *wanted) if i in dependents]
            found = gradients(
                [y for y, _ in seeded], [g for _, g in seeded], [inputs[i] for i in targets], stop_at_targets=True
            )
            by_input = {i: g for i, g in zip(targets, found, strict=True) if g is not None}
            for i in (*floating, *wanted):
                by_input.setdefault(i, zeros(inputs[i].shape, inputs[i].dtype))
            before = [by_input[i] + kept[i] if i in kept else by_input[i] for i in floating]
            after = {i: by_input[i] for i in wanted}
        sequences = [*inputs[: c + s], *(upstream[i] for i in outputs), *kept.values()]
        constants = [*inputs[c + s :], *(upstream[i] for i in sums)]
        after_x = [g for i, g in after.items() if i < c + s]
        after_constant = [g for i, g in after.items() if i >= c + s]
        body, others = close_over(
            nodes, [*above, *sequences, *constants], [*before, *after_x, *after_constant], checks=False
        )
        body, used = body.without_unused(len(above))
        loop = Loop(
            body,
            len(above),
            sum(used[len(above) : len(above) + len(sequences)]),
            self.length,
            len(after_constant),
            not self.reverse,
            derived=True,
        )
        return loop, others, used

    def _depending(self, inputs: set[int]) -> set[int]:
        """Return these inputs of the body, and the carries that depend on one of them at some step.

        What the others are computed by needs no rules, whatever their gradients or tangents are.
        """
        body = self.body
        while True:
            depends = {id(body.inputs[i]) for i in inputs}
            for equation in body.equations:
                if not equation.op.constant and any(id(x) in depends for x in equation.inputs):
                    depends.update(map(id, equation.outputs))
            found = inputs | {i for i, x in enumerate(body.outputs[: self.carries]) if id(x) in depends}
            if found == inputs:
                return inputs
            inputs = found

    def tangent(self, given: tuple[bool, ...]) -> tuple[Loop, list[Tensor]]:
        """Return the loop that carries the tangents beside the values; all floating carries have one.

        Its inputs are carries, their tangents, sequences, tangents of those in `given`, constants, theirs; its
        results the carries, their tangents, the tangents of all floating outputs, those of all floating sums.
        """
        return self._derive(self._tangent, given)  # type: ignore[no-any-return]

    def _tangent(self, given: Sequence[bool]) -> tuple[Loop, list[Tensor]]:
        c, s = self.carries, self.sequences
        inputs = self.body.symbols()
        tangents = [
            Tensor.symbol(x.shape, x.dtype) if x.dtype in FLOATS and (i < c or given[i]) else None
            for i, x in enumerate(inputs)
        ]
        with nested_trace() as nodes:
            results = self.body(inputs)
            dependents = self._depending({i for i, has_tangent in enumerate(given) if has_tangent})
            known = {
                x: t for i, (x, t) in enumerate(zip(inputs, tangents, strict=True)) if t is not None and i in dependents
            }
            pushed = push_forward(results, known)
            found = [
                (zeros(y.shape, y.dtype) if t is None else t) if y.dtype in FLOATS else None
                for y, t in zip(results, pushed, strict=True)
            ]
        groups = [slice(0, c), slice(c, c + s), slice(c + s, None)]
        first = [x for group in groups for x in (*inputs[group], *(t for t in tangents[group] if t is not None))]
        carry_tangents = [t for t in found[:c] if t is not None]
        y_tangents = [t for t in found[c : c + self.outputs] if t is not None]
        sum_tangents = [t for t in found[c + self.outputs :] if t is not None]
        body, others = close_over(
            nodes, first, [*results[:c], *carry_tangents, *y_tangents, *sum_tangents], checks=False
        )
        sequences = s + sum(t is not None for t in tangents[c : c + s])
        tangent_loop = Loop(
            body, c + len(carry_tangents), sequences, self.length, len(sum_tangents), self.reverse, derived=True
        )
        return tangent_loop, others

    # Many loops at once -----------------------------------------------------------------------------------

    def of_many(self, samples: int, mapped: tuple[bool, ...]) -> tuple[Loop, list[bool]]:
        """Return the loop of many samples, whose inputs differ where they are `mapped`.

        Its carries, constants and sums have a leading axis of samples, its sequences and outputs have it behind the
        steps. Also return which results are mapped: a carry is where it depends on something mapped at some step.
        """
        key = ("of_many", samples, *mapped)
        if key not in self.derivatives:
            self.derivatives[key] = self._of_many(samples, mapped)
        return self.derivatives[key]  # type: ignore[no-any-return]

    def _of_many(self, samples: int, mapped: Sequence[bool]) -> tuple[Loop, list[bool]]:
        carried = list(mapped[: self.carries])
        while True:
            body, flags = batched_program(self.body, samples, [*carried, *mapped[self.carries :]], carried)
            if flags[: self.carries] == carried:
                kind = (self.sums, self.reverse, self.derived, self.name)
                return Loop(body, self.carries, self.sequences, self.length, *kind), flags
            carried = flags[: self.carries]


def _looped(
    loop: Loop, carries: Sequence[Tensor], sequences: Sequence[Tensor], constants: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the last carries, and the stacked outputs and sums, of a loop."""
    inputs = (*carries, *sequences, *constants)
    # Traced, it is known only later whether there is a gradient that needs the carries of each step; see `LOOP.narrow`.
    symbolic = STATE.symbolic or any(x.data is None for x in inputs)
    keep = symbolic or (STATE.grad_enabled and any(x.requires_grad for x in inputs))
    found = LOOP.apply_several(inputs, {"loop": loop, "keep": keep})[: len(loop.results)]
    return list(found[: loop.carries]), list(found[loop.carries :])


def zeros(shape: Shape, dtype: Any) -> Tensor:
    """Return zeros that take no memory."""
    return ops.broadcast_to(Literal(np.zeros((), dtype)), shape)


def _kernel(*arrays: Array, loop: Loop, keep: bool, techniques: Techniques | None = None) -> None:
    first = len(arrays) - len(loop.results) - (loop.carries if keep else 0)
    loop.run(arrays[:first], arrays[first:], techniques or STATE.techniques or COMPILE_DEFAULTS)


def _bind(arrays: Sequence[Array], *rest: Any, **attrs: Any) -> Sequence[Call]:
    *outs, _ = rest  # and what makes scratch memory
    return [partial(_kernel, *arrays, *outs, techniques=STATE.techniques, **attrs)]


def _pull_back(cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    loop: Loop = node.attrs["loop"]
    c, s, n = loop.carries, loop.sequences, len(loop.results)
    found = [g if dtype in FLOATS else None for g, (_, dtype) in zip(cotangents, node.kinds, strict=True)]
    back, others, used = loop.backward(tuple(g is not None for g in found), tuple(needs_grad))
    floating = [i for i in range(c) if node.inputs[i].dtype in FLOATS]
    above = [zeros(*loop.results[i]) if (g := found[i]) is None else g for i in floating]
    kept: Sequence[Tensor | None] = [None] * c
    if any(used[len(floating) : len(floating) + c]):
        kept = (
            [node.result(n + i) for i in range(c)]
            if node.attrs["keep"]
            else LOOP.apply_several(node.inputs, {**node.attrs, "keep": True})[n:]
        )
    upstream = [g for g in found[c : c + loop.outputs] if g is not None]
    sums = [g for g in found[c + loop.outputs : n] if g is not None]
    others_kept = [g for g in found[n:] if g is not None]
    flags = iter(used[len(floating) :])
    sequences = [x for x in (*kept, *node.inputs[c : c + s], *upstream, *others_kept) if next(flags)]
    constants = [x for x in (*node.inputs[c + s :], *sums) if next(flags)]
    carries, rest = _looped(
        back, above, [x for x in sequences if x is not None], [x for x in (*constants, *others) if x is not None]
    )
    result: list[Tensor | None] = [None] * len(node.inputs)
    for i, g in zip(floating, carries, strict=True):
        result[i] = g if needs_grad[i] else None
    for i, g in zip((i for i in range(c, len(node.inputs)) if needs_grad[i]), rest, strict=True):
        result[i] = g
    return result


def _jvp(tangents: Sequence[Tensor | None], node: Node, *inputs: Tensor, loop: Loop, keep: bool) -> list[Tensor | None]:
    c, s, n = loop.carries, loop.sequences, len(loop.results)
    tangent_loop, others = loop.tangent(tuple(t is not None for t in tangents))
    known: list[Tensor | None] = [
        zeros(x.shape, x.dtype) if t is None and i < c and x.dtype in FLOATS else t
        for i, (x, t) in enumerate(zip(inputs, tangents, strict=True))
    ]

    def both(group: slice) -> tuple[Tensor, ...]:
        return (*inputs[group], *(t for t in known[group] if t is not None))

    attrs = {"loop": tangent_loop, "keep": keep}
    results = LOOP.apply_several(
        (*both(slice(0, c)), *both(slice(c, c + s)), *both(slice(c + s, None)), *others), attrs
    )
    floating = [i for i, (_, dtype) in enumerate(loop.results) if dtype in FLOATS]
    found: list[Tensor | None] = [None] * len(node.kinds)
    for k, i in enumerate(floating):
        found[i] = results[c + k]
    if keep:
        for k, i in enumerate(i for i in floating if i < c):
            found[n + i] = results[len(tangent_loop.results) + c + k]
    return found


def _batch(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    loop, keep = attrs["loop"], attrs["keep"]
    c, s = loop.carries, loop.sequences
    new, flags = loop.of_many(samples, tuple(mapped))
    carries = all_mapped(samples, [m or not f for m, f in zip(mapped[:c], flags[:c], strict=True)], inputs[:c])
    sequences = [ops.moveaxis(x, 0, 1) if m else x for x, m in zip(inputs[c : c + s], mapped[c : c + s], strict=True)]
    found = op.apply_several((*carries, *sequences, *inputs[c + s :]), {"loop": new, "keep": keep})
    stacked = range(c, c + loop.outputs)
    flags = [*flags, *flags[:c]] if keep else flags
    return [
        ops.moveaxis(x, 1, 0) if m and (i in stacked or i >= len(loop.results)) else x
        for i, (x, m) in enumerate(zip(found, flags, strict=True))
    ], flags


LOOP: Op = Op(
    "loop",
    lambda *inputs, loop, keep: loop.kinds(keep),
    kernel=_kernel,
    bind=_bind,
    several=True,
    narrow=lambda attrs, needed: attrs if any(needed[len(attrs["loop"].results) :]) else {**attrs, "keep": False},
    vjp=_pull_back,
    opaque=True,
    jvp=_jvp,
    batch=_batch,
    checks=lambda *inputs, **attrs: (LOOP, inputs, attrs) if attrs["loop"].checks else None,
    doc="a body replayed for each step of a sequence",
)
