"""The tape: a program compiled into a flat list of numpy calls, each bound to its buffers.

Contract. `run()` reads the input buffers and the captured tensors, and writes the output buffers and the tape's
own scratch memory, nothing else; it may destroy any scratch. Outputs are overwritten by the next run. Captured
tensors (parameters) are used in place, so changes made to them between runs are seen. A tape belongs to one thread
at a time.
"""

from __future__ import annotations

import contextvars
import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from py_engine.ad.compile.fusion import fuse
from py_engine.ad.compile.plan import Value, plan
from py_engine.ad.compile.products import (
    dtypes_of_products,
    is_one_product,
    operations,
    shared,
    touch_buffers_once,
    worth_sharing,
)
from py_engine.ad.compile.reassociation import add_early
from py_engine.ad.compile.straight_line import Scalar, straight_line
from py_engine.ad.compile.zero_copy import Silent, ZeroCopyCall
from py_engine.ad.memory import aligned_zeros
from py_engine.ad.op import CHECKS, Call, Equation, Op, Shape, described
from py_engine.ad.ops.shape import BROADCAST_TO, COPY, RESHAPE
from py_engine.ad.program import Program, inner_equations, simplify
from py_engine.ad.reverse import topological_sort
from py_engine.ad.state import STATE, entering, restoring
from py_engine.ad.techniques import COMPILE_DEFAULTS, Techniques
from py_engine.ad.tensor import FLOATS, Array, Literal, Tensor
from py_engine.errors import NonFiniteError, ReplayError, TraceError


class Cost(NamedTuple):
    """What a part of a step takes: op, layer, seconds, bytes moved, and operations.

    They are what the op's record says, or the multiplications and additions of its products: where the record says
    nothing, as of fused ops, and where they are fewer, as of convolutions by Winograd's algorithm.
    """

    op: str
    layer: str
    seconds: float
    moved: int
    flops: int


@dataclass(frozen=True)
class TapeStep:
    """One equation of the tape: from and into which arrays it is computed, by which calls."""

    equation: Equation
    arrays: tuple[Array, ...]
    outs: tuple[Array, ...]
    calls: tuple[Call, ...]

    def cost(self, seconds: float) -> Cost:
        """What it takes, given the seconds."""
        op = self.equation.op
        moved = sum(map(distinct_bytes, (*self.arrays, *self.outs))) if op.bytes is None else self.equation.bytes
        said = op.flops is not None or op.elementwise
        products = sum(map(operations, self.calls))
        flops = self.equation.flops if said and (not products or self.equation.flops < products) else products
        return Cost(op.name, self.equation.scope, seconds, moved, flops)


def distinct_bytes(x: Array) -> int:
    """The bytes of an array's elements, those that are seen several times, as in overlapping windows, counted once."""
    elements = math.prod(n for n, step in zip(x.shape, x.strides, strict=True) if step or not n)
    reached = sum((n - 1) * abs(step) for n, step in zip(x.shape, x.strides, strict=True)) + x.itemsize
    return min(elements * x.itemsize, reached) if x.size else 0


class _CallersContext:
    """The context of who calls, but that numpy is silent in it."""

    def run(self, function: Callable[[], Any], /) -> Any:
        with np.errstate(all="ignore"):
            return function()


class Tape:
    """A compiled program.

    Args:
        program: what to compute.
        results: memory to compute outputs into, by position (gradients into a parameter vector), in C order and
            apart from everything that the program reads; the others get separate memory.
        techniques: what to do to be fast.
        is_rewritten: whether `rewritten` gave the program.

    Attributes:
        inputs: the buffers to fill before `run()`.
        outputs: the buffers that `run()` fills.
        steps: what `run()` does, in order.
        program: what it computes, as it is bound: simplified, each output in separate memory, with the copies that
            layouts need.
        captured: the leaves that are captured, or that what is captured was computed from.
        values: the variables of that in the order of the plan: inputs, captured tensors, results.
        equations: for each of these the equation that it is a result of, if there is one.
        plan: where each value lies.
        scalar: the same as a function of floats, where all values are single numbers; see `straight_line`.
    """

    @restoring
    def __init__(
        self,
        program: Program,
        results: Mapping[int, Array] | None = None,
        techniques: Techniques = COMPILE_DEFAULTS,
        is_rewritten: bool = False,
    ) -> None:
        if not is_rewritten:
            program = rewritten(program, techniques)
        if techniques.simplify:
            program = add_early(program)
        found = straight_line(program) if techniques.straight_line else None
        self.scalar: Scalar | None = found[1] if found else None
        self._scalar_source = found[0] if found else ""
        program = _isolate_outputs(program)
        if not techniques.views:
            program = _copy_views(program)
        self.program = program = _legalize_layouts(program)
        self._watched = program.watched
        self.techniques = techniques
        self._leaves = leaves = _captured(program)
        self.captured = [
            x for x in topological_sort(leaves) if x.op is None and x.dtype in FLOATS and not isinstance(x, Literal)
        ]
        given = [*program.inputs, *leaves]
        self.values = [*given, *(y for equation in program.equations for y in equation.outputs)]
        self.equations: list[Equation | None] = [None] * len(given)
        self.equations += [equation for equation in program.equations for _ in equation.outputs]
        self._number = number = {id(x): i for i, x in enumerate(self.values)}
        self.plan = plan(
            _values(program, leaves, number, techniques), in_place=techniques.in_place, reuse=techniques.reuse_memory
        )
        for dtype in dtypes_of_products(program.equations):
            touch_buffers_once(dtype)
        self._bind(results or {})

    def beside(self, results: Mapping[int, Array]) -> Tape | None:
        """Return a tape of the same plan with separate memory and results, which can run while this one does.

        None where an op keeps something that only one tape may use, such as the state of a random generator: where
        one of its attributes is no plain value.
        """
        if not all(_is_plain(value) for equation in self.program.equations for value in equation.attrs.values()):
            return None
        tape = copy.copy(self)
        tape._bind(results)
        return tape

    @restoring
    def _bind(self, results: Mapping[int, Array]) -> None:
        """Take memory, and make the calls that compute in it."""
        program, leaves, number = self.program, self._leaves, self._number
        self._scratch: list[Array] = []
        self._free: list[Array] = []  # scratch memory of the ops that are bound, which the next may use, too
        self._taken: list[Array] = []  # that of the op that is being bound
        self._arena = aligned_zeros(self.plan.size)
        arrays: list[Array | None] = [None] * len(self.values)
        self.inputs = [np.zeros(x.shape, x.dtype) for x in program.inputs]
        arrays[: len(self.inputs)] = self.inputs
        for x in leaves:
            arrays[number[id(x)]] = x.numpy()
        self._read = [(x, x.data) for x in leaves if x.op is None and x.__class__ is not Literal]
        for k, x in enumerate(program.outputs):
            i = number[id(x)]
            if arrays[i] is None:
                arrays[i] = _result(results.get(k), x, leaves)
        self.outputs = [self._memory(number[id(x)], arrays) for x in program.outputs]
        self.steps: list[TapeStep] = []
        self._checks: set[Any] = set()  # that the steps so far make; their arrays are held by these
        with entering(scope=STATE.scope, techniques=self.techniques):
            for equation in program.equations:
                STATE.scope = equation.scope  # errors of the calls name it
                self.steps.append(self._bound(equation, arrays))
        self._calls: list[Call] = [call for step in self.steps for call in step.calls]
        # Non-finite results are found and explained by diagnose(). Entering a context in which numpy is silent takes
        # a tenth of the time that np.errstate does, which is as much as two calls of a small tape.
        self._silent: Silent
        if any(equation.op.opaque for equation in program.equations):
            self._silent = _CallersContext()  # which code of the user's own may read, and change
        else:
            self._silent = contextvars.copy_context()
            self._silent.run(np.seterr, all="ignore")
        self._zero_copy: ZeroCopyCall | None = None  # made by the first replay
        self._replaying = False

    # Running ----------------------------------------------------------------------------------------------

    @property
    def keeps_graph(self) -> bool:
        """Whether a derivative by what it captures may be asked for, which needs the graph of the ops themselves."""
        if self.captured and STATE.grad_enabled:
            for x in self.captured:
                if x.level == 1:
                    return True
        return False

    def run(self) -> None:
        """Compute the outputs from the inputs.

        Raises:
            ReplayError: something whose values are part of the graph has changed.
        """
        self.check_captured()
        self._silent.run(self._run)

    def check_captured(self) -> None:
        """Raise `ReplayError` if something whose values are part of the graph has changed.

        Captured tensors may have other values, but in the array that they had when the tape was made.
        """
        if self._watched:
            unchanged: set[object] = set()  # so that each array is compared once
            for watched in self._watched:
                watched.check(unchanged)
        for x, array in self._read:
            if x.data is not array or (array is not None and (array.shape != x.shape or array.dtype != x.dtype)):
                raise replaced(x)

    def _run(self) -> None:
        if self.techniques.preallocate:
            for call in self._calls:
                call()
        else:
            self._run_allocating()

    @restoring
    def _run_allocating(self) -> None:
        """Compute every op into fresh memory, as an engine without buffers would."""
        values: dict[int, Array] = {id(x): a for x, a in zip(self.program.inputs, self.inputs, strict=True)}
        with entering(scope=STATE.scope, techniques=self.techniques):
            for equation in self.program.equations:
                arrays = [values[id(a)] if id(a) in values else a.numpy() for a in equation.inputs]
                STATE.scope = equation.scope
                kinds = [(y.shape, y.dtype) for y in equation.outputs]
                found = equation.op.compute(arrays, kinds, equation.attrs)
                values.update(zip(map(id, equation.outputs), found, strict=True))
        for x, out in zip(self.program.outputs, self.outputs, strict=True):
            np.copyto(out, values[id(x)])

    def __call__(self, *arrays: Array) -> list[Array]:
        """Copy the arrays in, run, and return the output buffers themselves: the next run overwrites them.

        Raises:
            ReplayError: another number of arrays, another shape or another dtype than planned.
        """
        if len(arrays) != len(self.inputs):
            raise ReplayError(f"expected {len(self.inputs)} arrays, got {len(arrays)}")
        for i, (buffer, array) in enumerate(zip(self.inputs, arrays, strict=True)):
            if array.shape != buffer.shape or array.dtype != buffer.dtype:
                raise ReplayError(
                    f"argument {i}: this tape was planned for shape {buffer.shape} {buffer.dtype}, "
                    f"got {array.shape} {array.dtype}"
                )
            buffer[...] = array
        self.run()
        return self.outputs

    def replay(self, *arrays: Array) -> list[Array]:
        """Run on these arrays, of the shapes and dtypes planned for, and return results that stay as they are.

        Large ones are neither copied in nor out where they need not be: `inputs` and `outputs` may be left as they
        were.

        Raises:
            ReplayError: a custom rule that this replay runs replays the same tape.
        """
        if self._replaying:
            raise ReplayError(
                "a custom rule calls the compiled function that it is part of, on arguments of the same shapes and "
                "dtypes, while that is running; call the function that was compiled there, not its tape"
            )
        self._replaying = True
        try:
            if not self.techniques.preallocate:
                return [out.copy() for out in self(*arrays)]
            if self._zero_copy is None:
                steps = [(step.equation, step.calls) for step in self.steps]
                self._zero_copy = ZeroCopyCall(self.program, self.inputs, self.outputs, steps, self._silent)
            self.check_captured()
            return self._zero_copy(arrays)
        finally:
            self._replaying = False

    def large_products(self) -> set[int]:
        """Return the places, among the steps, of matrix products that are worth sharing out to threads.

        There are none where other products take over a quarter of all operations, or the calls are not what runs.
        """
        products = {k: step for k, step in enumerate(self.steps) if step.equation.op.product}
        large = {k for k, step in products.items() if is_one_product(step.calls) and worth_sharing(step.calls[0])}
        flops = sum(step.equation.flops for step in products.values())
        most = 4 * sum(products[k].equation.flops for k in large) >= 3 * flops
        return large if most and self.techniques.preallocate else set()

    def sharing(self, run: Callable[[Sequence[Call]], None], threads: int) -> Tape:
        """Return this tape with `run` doing parts of each of the `large_products`, one in each of `threads` threads.

        Both compute in the same memory: only one of them may run at a time.
        """
        tape = copy.copy(self)
        tape.steps = list(self.steps)
        for k in self.large_products():
            step = self.steps[k]
            product, *rest = step.calls
            tape.steps[k] = replace(step, calls=(shared(product, run, threads), *rest))
        tape._calls = [call for step in tape.steps for call in step.calls]
        return tape

    def poison(self, byte: int) -> None:
        """Fill all memory that a run must not rely on with one byte; for tests."""
        self._arena[...] = byte
        for memory in self._scratch:
            memory[...] = byte
        for out in self.outputs:
            out[...] = np.frombuffer(bytes([byte]) * out.itemsize, out.dtype)[0]

    # Looking at it ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes of the arena and of the ops' scratch memory; inputs, outputs and parameters not counted."""
        return self.plan.size + sum(memory.nbytes for memory in self._scratch)

    @property
    def source(self) -> str:
        """The tape as straight-line Python, for reading."""
        return self._scalar_source or "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = _names(self.program, self._leaves)
        for step in self.steps:
            equation = step.equation
            operands = [names[id(a)] for a in equation.inputs]
            operands += [f"{key}={value!r}" for key, value in equation.attrs.items()]
            where = "view"
            if equation.op.view is None:
                made = zip(equation.outputs, step.outs, strict=True)
                where = ", ".join(f"{out.dtype}{out.shape} in {self._place(self._number[id(y)])}" for y, out in made)
            results = ", ".join(names[id(y)] for y in equation.outputs)
            yield f"{results} = {equation.op.name}({', '.join(operands)})  # {where}"

    def costs(self) -> list[Cost]:
        """Run once more, op by op; return what each op that computes takes."""
        found: list[Cost] = []

        def timed() -> None:
            for step in self.steps:
                before = time.perf_counter()
                for call in step.calls:
                    call()
                seconds = time.perf_counter() - before
                if step.calls:
                    found.append(step.cost(seconds))

        self._silent.run(timed)
        return found

    def diagnose(self) -> NonFiniteError | None:
        """Run once more, op by op, and return an error that names the first op with a NaN or infinite result.

        Returns None when every result is finite. Inputs and parameters must be those of the run in question.
        """
        # What a program reads an infinite number for, such as to mask by it, may be infinite, too.
        infinite = {id(x) for x in self.values if _is_infinite(x)}
        with np.errstate(all="ignore"):
            for x in self.values:
                if isinstance(x, Literal) or x.data is None or x.dtype.kind != "f":
                    continue
                if not np.isfinite(x.data).all():
                    return NonFiniteError(f"{x.name or 'a captured tensor'} holds NaN or Inf")
            for i, array in enumerate(self.inputs):
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    return NonFiniteError(f"input {i} (shape {array.shape}) holds NaN or Inf")
            for step in self.steps:
                for call in step.calls:
                    call()
                masked = any(id(x) in infinite for x in step.equation.inputs) or any(
                    _is_infinite(x) for inner in inner_equations(step.equation) for x in inner.inputs
                )
                for out in step.outs:
                    if out.dtype.kind != "f" or np.isfinite(out).all():
                        continue
                    if masked and not np.isnan(out).any():
                        infinite.update(map(id, step.equation.outputs))
                        continue
                    return NonFiniteError(
                        f"op {described(step.equation)} was the first to give NaN or Inf (result of shape {out.shape})"
                    )
        return None

    # Building ---------------------------------------------------------------------------------------------

    def _memory(self, i: int, arrays: list[Array | None]) -> Array:
        """Return the array of value `i`, making it on first use."""
        array = arrays[i]
        if array is not None:
            return array
        x = self.values[i]
        if i in self.plan.placed:
            container = self.plan.placed[i]
            whole, memory = self.equations[container], self._memory(container, arrays)
            assert whole is not None and whole.op.places is not None
            for part, place in zip(whole.inputs, whole.op.places(**whole.attrs), strict=True):
                if self.plan.placed.get(self._number[id(part)]) == container:
                    arrays[self._number[id(part)]] = memory[place]
            array = arrays[i]
            assert array is not None
        else:
            at = self.plan.offset[self.plan.storage[i]]
            array = self._arena[at : at + x.nbytes].view(x.dtype).reshape(x.shape)
        arrays[i] = array
        return array

    def _bound(self, equation: Equation, arrays: list[Array | None]) -> TapeStep:
        op, numbers = equation.op, [self._number[id(x)] for x in equation.outputs]
        read = tuple([self._memory(self._number[id(a)], arrays) for a in equation.inputs])
        if op.view is not None:
            found = op.view(*read, **equation.attrs)
            outs = tuple(found) if op.several else (found,)
            for i, out, given in zip(numbers, outs, read, strict=False):
                arrays[i] = out
                if out.size and not np.may_share_memory(out, given):
                    raise AssertionError(f"the view op {op.name} made a copy")
            return TapeStep(equation, read, outs, ())
        outs = tuple([self._memory(i, arrays) for i in numbers])
        calls = tuple(op.calls(read, outs, self._take_scratch, equation.attrs))
        if self.techniques.reuse_memory:
            self._free += self._taken
        self._taken = []
        if op.checks is not None:
            calls = tuple([call for call in calls if not self._is_checked(call)])
        return TapeStep(equation, read, outs, calls)

    def _place(self, i: int) -> str:
        """Name the memory of value `i`."""
        owner = self.plan.storage[i]
        return "result" if owner not in self.plan.offset else f"arena[{self.plan.offset[owner]}]"

    def _is_checked(self, call: Call) -> bool:
        """Whether a call is a check that an earlier op makes; if it is a check, it is noted."""
        if not isinstance(call, partial) or call.func not in CHECKS or call.keywords:
            return False
        array, *limits, _ = call.args  # and the op's name
        key = call.func, id(array), tuple(limits)
        known = key in self._checks
        self._checks.add(key)
        return known

    def _take_scratch(self, shape: Shape, dtype: Any) -> Array:
        """Return memory for the op that is being bound, which others may use before and after it."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        fitting = [i for i, memory in enumerate(self._free) if memory.nbytes >= size]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        else:
            memory = np.empty(size, np.uint8)
            self._scratch.append(memory)
        self._taken.append(memory)
        array: Array = memory[:size].view(dtype).reshape(shape)
        return array


# Preparing the program --------------------------------------------------------------------------------------


def rewritten(program: Program, techniques: Techniques) -> Program:
    """Return the program simplified and fused, as the techniques say."""
    if techniques.simplify:
        program = simplify(program)
    if techniques.fuse:
        with entering(techniques=techniques):
            fused = fuse(program)
        if fused is not program:
            program = simplify(fused) if techniques.simplify else fused
    return program


def _isolate_outputs(program: Program) -> Program:
    """Give every output its own value, computed by an op that writes memory."""
    written = {id(y) for x in program.equations if x.op.view is None for y in x.outputs}
    equations, outputs = [*program.equations], []
    for x in program.outputs:
        if id(x) in written:
            written.remove(id(x))
        else:
            equations.append(_copy_of(x))
            x = equations[-1].output
        outputs.append(x)
    return replace(program, equations=tuple(equations), outputs=tuple(outputs))


def _copy_of(x: Tensor) -> Equation:
    return Equation.of(COPY, (x,), {}, x.scope)


def _copy_views(program: Program) -> Program:
    """Put a copy behind every view (the technique `views` switched off)."""
    copies: dict[int, Tensor] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        equations.append(equation.reading(tuple([copies.get(id(a), a) for a in equation.inputs])))
        if equation.op.view is not None:
            for y in equation.outputs:
                equations.append(_copy_of(y))
                copies[id(y)] = equations[-1].output
    outputs = tuple([copies.get(id(x), x) for x in program.outputs])
    return replace(program, equations=tuple(equations), outputs=outputs)


LARGEST_STAGED = 65_536
"""Elements: numpy's buffers hold 8,192 of each operand; copies of up to this many stay in the second-level cache."""

MANY_PRODUCTS = 8
"""Products from which on a copy of the matrix that they read transposed costs nothing beside them."""


def _legalize_layouts(program: Program) -> Program:
    """Insert copies where an op needs another memory layout than its input has.

    For elementwise ops that is everything but C order in the result's shape, or a single number: numpy would
    iterate over other operands through buffers that it allocates at every call, and copies in less time. Not so for
    large results, where a copy would have to go to memory and back while those buffers stay in the cache.

    A transposed matrix of many products, such as the recurrent weight backward, is copied: BLAS packs rows faster.
    """
    layout: dict[int, Array] = {}
    legal: dict[tuple[int, Shape], Tensor] = {}
    products = Counter(id(a) for equation in program.equations if equation.op.strided for a in equation.inputs)
    equations: list[Equation] = []

    def made(equation: Equation) -> Tensor:
        equations.append(equation)
        return equation.output

    def suits(a: Tensor, y: Tensor) -> bool:
        if not a.shape or y.size > LARGEST_STAGED:
            return True
        return a.shape == y.shape and layout[id(a)].flags.c_contiguous

    def accepted(op: Op, a: Tensor, attrs: Mapping[str, Any]) -> bool:
        if op.accepts is None or not a.size:
            return True
        turned = a.ndim > 1 and layout[id(a)].strides[-1] != a.dtype.itemsize
        return op.accepts(layout[id(a)], **attrs) and not (turned and products[id(a)] >= MANY_PRODUCTS)

    def copied(a: Tensor, shape: Shape) -> Tensor:
        key = (id(a), shape)
        if key not in legal:
            whole = a.shape != shape and layout[id(a)].flags.c_contiguous
            if whole and a.size in (1, math.prod(shape)):
                legal[key] = made(Equation.of(RESHAPE, (a,), {"shape": () if a.size == 1 else shape}, a.scope))
            else:
                if a.shape != shape:
                    a = made(Equation.of(BROADCAST_TO, (a,), {"shape": shape}, a.scope))
                legal[key] = made(_copy_of(a))
            layout[id(legal[key])] = _dummy(legal[key])
        return legal[key]

    for equation in program.equations:
        op, inputs, y = equation.op, equation.inputs, equation.outputs[0]
        for a in inputs:
            if id(a) not in layout:
                layout[id(a)] = _dummy(a)
        if op.elementwise:
            inputs = tuple([a if suits(a, y) else copied(a, y.shape) for a in inputs])
        if op.accepts is not None:
            inputs = tuple([a if accepted(op, a, equation.attrs) else copied(a, a.shape) for a in inputs])
        if op.view is not None:
            views = op.view(*[layout[id(a)] for a in inputs], **equation.attrs)
            layout.update(zip(map(id, equation.outputs), views if op.several else [views], strict=True))
        equations.append(equation.reading(inputs))
    return replace(program, equations=tuple(equations))


def _dummy(x: Tensor) -> Array:
    """Return an array with the shape and strides that `x` will have, without memory behind it."""
    return _without_memory(x.shape, x.dtype) if x.data is None else x.data


def replaced(x: Tensor) -> ReplayError:
    """Return the error for a captured tensor that was given another array."""
    what = x.name or f"a tensor of shape {x.shape}"
    return ReplayError(
        f"the data of {what} that the compiled function captured was replaced since it was traced; give it new values "
        "by assign(), or compile the function anew"
    )


@lru_cache(maxsize=1024)
def _without_memory(shape: Shape, dtype: Any) -> Array:
    strides = [dtype.itemsize] * len(shape)
    for a in reversed(range(len(shape) - 1)):
        strides[a] = strides[a + 1] * max(shape[a + 1], 1)
    return np.lib.stride_tricks.as_strided(np.empty((), dtype), shape, strides, writeable=False)


def _captured(program: Program) -> list[Tensor]:
    """Return the tensors with data that the ops use, in order of first use."""
    own = {id(x) for x in program.inputs} | {id(y) for equation in program.equations for y in equation.outputs}
    found: dict[int, Tensor] = {}
    for x in (*(a for equation in program.equations for a in equation.inputs), *program.outputs):
        if id(x) in own:
            continue
        if x.data is None:
            raise TraceError(
                "a tensor was kept from an earlier trace, where it stood for values that exist only while that "
                "function is replayed; return it from the function, or compute it in this one"
            )
        found.setdefault(id(x), x)
    return list(found.values())


def _needed_whole(program: Program) -> set[int]:
    """Return the values that some op can use, directly or through views, only in C order without gaps."""
    needed: set[int] = set()
    for equation in reversed(program.equations):
        op = equation.op
        through = op.view is not None and any(id(y) in needed for y in equation.outputs)
        if through or (op.accepts is not None and not op.strided):
            needed.update(id(a) for a in equation.inputs)
    return needed


def _values(
    program: Program, leaves: Sequence[Tensor], number: Mapping[int, int], techniques: Techniques
) -> list[Value]:
    """Describe the inputs, the captured tensors and the results to the planner."""
    ops_of = {id(y): equation.op for equation in program.equations for y in equation.outputs}
    results = {id(x) for x in program.outputs}
    needed_whole = _needed_whole(program)
    values = [Value(x.nbytes, fixed=True) for x in (*program.inputs, *leaves)]
    for equation in program.equations:
        op, y = equation.op, equation.outputs[0]
        reads = tuple([number[id(a)] for a in equation.inputs])
        if op.view is not None:
            values += [Value(y.nbytes, reads, view_of=read) for y, read in zip(equation.outputs, reads, strict=False)]
            continue
        if op.several:
            # All are written at once: what is read lives until the last of them, and so do they all.
            *before, last = equation.outputs
            values += [Value(x.nbytes, reads, fixed=id(x) in results) for x in before]
            beside = tuple([number[id(x)] for x in before])
            values.append(Value(last.nbytes, reads + beside, fixed=id(last) in results))
            continue
        # A single number is computed in place in three times the time that numpy takes otherwise.
        # An input may be two operands, of which only one may be overwritten.
        kept = {id(a) for i, a in enumerate(equation.inputs) if i not in op.overwrites}
        may_overwrite = tuple(
            [
                number[id(a)]
                for a in (equation.inputs[i] for i in op.overwrites if i < len(equation.inputs))
                if y.size > 1 and a.shape == y.shape and a.dtype == y.dtype and _is_whole(ops_of.get(id(a)))
                if id(a) not in kept
            ]
        )
        parts = _placeable(equation, ops_of, needed_whole) if techniques.place_parts else []
        values.append(
            Value(
                y.nbytes,
                reads,
                may_overwrite=may_overwrite,
                parts=tuple([number[id(a)] for a in parts]),
                fixed=id(y) in results,
            )
        )
    return values


def _is_whole(op: Op | None) -> bool:
    """Whether the result of this op, or an input, is all of the memory it lies in, if it has as many elements."""
    return op is None or op.view is None or op.in_order


def _placeable(equation: Equation, ops_of: Mapping[int, Op], needed_whole: set[int]) -> list[Tensor]:
    """Return the inputs that may be computed in their places in the result.

    Those are results of elementwise ops where the place lies in one piece, and of matrix products, whose rows
    may lie apart.
    """
    places = [] if equation.op.places is None else equation.op.places(**equation.attrs)
    whole, counts = _dummy(equation.output), Counter(map(id, equation.inputs))
    parts = []
    for a, index in zip(equation.inputs, places, strict=False):
        place, op = whole[index], ops_of.get(id(a))
        if op is not None and op.strided:
            fits = place.ndim == 2 and op.accepts is not None and op.accepts(place)
        else:
            fits = op is not None and op.elementwise and place.flags.c_contiguous
        if fits and id(a) not in needed_whole and counts[id(a)] == 1:
            parts.append(a)
    return parts


def _result(given: Array | None, x: Tensor, captured: Sequence[Tensor]) -> Array:
    if given is None:
        return np.zeros(x.shape, x.dtype)
    if given.shape != x.shape or given.dtype != x.dtype or not given.flags.c_contiguous:
        order = "" if given.flags.c_contiguous else " with gaps or in another order"
        raise ReplayError(
            f"result memory: expected shape {x.shape} {x.dtype} in C order, got {given.shape} {given.dtype}{order}"
        )
    for a in captured:
        if np.may_share_memory(given, a.numpy()):
            raise ReplayError(
                f"result memory of shape {given.shape} is also that of {a.name or 'a captured tensor'}, which would "
                "change while the function still reads it"
            )
    return given


def _names(program: Program, leaves: Sequence[Tensor]) -> dict[int, str]:
    names = {id(x): f"x{i}" for i, x in enumerate(program.inputs)}
    for i, x in enumerate(leaves):
        names[id(x)] = repr(x.item()) if isinstance(x, Literal) else x.name or f"c{i}"
    results = [y for equation in program.equations for y in equation.outputs]
    names.update({id(y): f"v{i}" for i, y in enumerate(results)})
    return names


def _is_plain(value: Any) -> bool:
    """Whether an attribute is a number, text, dtype, slice, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or value is Ellipsis or isinstance(value, (int, float, str, slice, np.dtype, np.generic))


def _is_infinite(x: Tensor) -> bool:
    return isinstance(x, Literal) and bool(np.isinf(x.item()))
