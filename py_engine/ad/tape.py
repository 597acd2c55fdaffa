"""The tape: a graph compiled into a flat list of numpy calls, each bound to its buffers.

Contract. `run()` reads the input buffers and the captured tensors, and writes the output buffers and the tape's
own scratch memory, nothing else; it may destroy any scratch. Outputs are overwritten by the next run. Captured
tensors (parameters) are used in place, so changes made to them between runs are seen. A tape belongs to one thread
at a time.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from py_engine.ad.direct import Direct
from py_engine.ad.graph import Graph, simplify
from py_engine.ad.ops.linalg import MATMUL, suits_blas
from py_engine.ad.ops.record import CHECKS, Call, Op, Shape
from py_engine.ad.ops.shape import ASSEMBLE, BROADCAST_TO, COPY, RESHAPE, as_index, covers
from py_engine.ad.plan import ALIGNMENT, Value, plan
from py_engine.ad.state import STATE, entering
from py_engine.ad.straight_line import Program, straight_line
from py_engine.ad.sums import add_early
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Array, Literal, Tensor
from py_engine.errors import NonFiniteError, ReplayError, TraceError


@dataclass(frozen=True)
class Instruction:
    """One op of the tape: the node it computes, from and into which arrays, by which calls."""

    node: Tensor
    arrays: tuple[Array, ...]
    out: Array
    calls: tuple[Call, ...]
    text: str


class Tape:
    """A compiled graph.

    Args:
        graph: what to compute; it is changed, and belongs to the tape from now on.
        results: memory to compute outputs into, by position (gradients into a parameter vector), in C order and
            apart from everything that the graph reads; the others get memory of their own.
        techniques: what to do to be fast.

    Attributes:
        inputs: the buffers to fill before `run()`.
        outputs: the buffers that `run()` fills.
        instructions: what `run()` does, in order.
        plan: where each value lies.
        program: the same as a function of floats, where all values are single numbers; see `straight_line`.
    """

    def __init__(
        self,
        graph: Graph,
        results: Mapping[int, Array] | None = None,
        techniques: Techniques = Techniques(),  # noqa: B008  (frozen)
    ) -> None:
        if techniques.simplify:
            simplify(graph)
            graph.nodes = add_early(graph.nodes, graph.outputs)
        found = straight_line(graph) if techniques.straight_line else None
        self.program: Program | None = found[1] if found else None
        self._program_source = found[0] if found else ""
        _isolate_outputs(graph)
        if not techniques.views:
            _copy_views(graph)
        _straighten(graph)
        self.graph = graph
        self._watched = tuple(graph.watched)
        self.techniques = techniques
        results = dict(results or {})
        self._scratch: list[Array] = []

        leaves = _captured(graph)
        self._known: list[Tensor] = [*graph.inputs, *leaves, *graph.nodes]
        number = {id(x): i for i, x in enumerate(self._known)}
        output_position = {id(x): k for k, x in enumerate(graph.outputs)}
        needed_whole = _needed_whole(graph)
        self.plan = plan(
            [_value(x, number, output_position, needed_whole, techniques) for x in self._known],
            in_place=techniques.in_place,
            reuse=techniques.reuse_memory,
        )
        self._arena = _aligned_bytes(self.plan.size)

        arrays: list[Array | None] = [None] * len(self._known)
        self.inputs = [np.zeros(x.shape, x.dtype) for x in graph.inputs]
        arrays[: len(self.inputs)] = self.inputs
        for x in leaves:
            arrays[number[id(x)]] = x.numpy()
        for k, x in enumerate(graph.outputs):
            i = number[id(x)]
            if arrays[i] is None:
                arrays[i] = _result(results.get(k), x, leaves)
        self.outputs = [self._memory(number[id(x)], arrays) for x in graph.outputs]
        self.instructions: list[Instruction] = []
        self._checks: set[Any] = set()  # that the instructions so far make; their arrays are held by these
        names = _names(graph, leaves)
        with entering(scope=STATE.scope):
            for x in graph.nodes:
                STATE.scope = x.scope  # errors of the calls name it
                self._bind(x, number, arrays, names)
        self._calls: list[Call] = [call for step in self.instructions for call in step.calls]
        # Non-finite results are found and explained by diagnose(). Entering a context in which numpy is silent takes
        # a tenth of the time that np.errstate does, which is as much as two calls of a small tape.
        self._silent = contextvars.copy_context()
        self._silent.run(np.seterr, all="ignore")
        self._direct: Direct | None = None  # when first asked for
        self._replaying = False

    # Running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Compute the outputs from the inputs.

        Raises:
            ReplayError: something whose values are part of the graph has changed.
        """
        for x in self._watched:
            x.check()
        self._silent.run(self._run)

    def _run(self) -> None:
        if self.techniques.preallocate:
            for call in self._calls:
                call()
        else:
            self._run_allocating()

    def _run_allocating(self) -> None:
        """Compute every op into fresh memory, as an engine without buffers would."""
        values: dict[int, Array] = {id(x): a for x, a in zip(self.graph.inputs, self.inputs, strict=True)}
        with entering(scope=STATE.scope):
            for x in self.graph.nodes:
                assert x.op is not None
                arrays = [values[id(a)] if id(a) in values else a.numpy() for a in x.inputs]
                STATE.scope = x.scope
                values[id(x)] = x.op.compute(arrays, x.shape, x.dtype, x.attrs)
        for x, out in zip(self.graph.outputs, self.outputs, strict=True):
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
            ReplayError: a custom rule that this replay runs asks for a replay of the same tape.
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
            if self._direct is None:
                self._direct = Direct(self.graph, self.inputs, self.outputs, self.instructions, self._silent)
            for x in self._watched:
                x.check()
            return self._direct(arrays)
        finally:
            self._replaying = False

    def poison(self, byte: int) -> None:
        """Fill all memory that a run must not rely on with one byte; for tests."""
        self._arena[...] = byte
        for memory in self._scratch:
            memory.reshape(-1).view(np.uint8)[...] = byte
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
        return self._program_source or "\n".join(step.text for step in self.instructions)

    def diagnose(self) -> NonFiniteError | None:
        """Run once more, op by op, and return an error that names the first op with a NaN or infinite result.

        Returns None when every result is finite. Inputs and parameters must be those of the run in question.
        """
        with np.errstate(all="ignore"):
            for x in self._known:
                if x.data is not None and x.dtype.kind == "f" and not np.isfinite(x.data).all():
                    return NonFiniteError(f"{x.name or 'a captured tensor'} holds NaN or Inf")
            for i, array in enumerate(self.inputs):
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    return NonFiniteError(f"input {i} (shape {array.shape}) holds NaN or Inf")
            for step in self.instructions:
                for call in step.calls:
                    call()
                if step.out.dtype.kind == "f" and not np.isfinite(step.out).all():
                    assert step.node.op is not None
                    layer = f" in layer {step.node.scope!r}" if step.node.scope else ""
                    return NonFiniteError(
                        f"op {step.node.op.name!r}{layer} was the first to give NaN or Inf "
                        f"(result of shape {step.node.shape})"
                    )
        return None

    # Building ---------------------------------------------------------------------------------------------

    def _memory(self, i: int, arrays: list[Array | None]) -> Array:
        """Return the array of value `i`, making it on first use."""
        array = arrays[i]
        if array is not None:
            return array
        x = self._known[i]
        if i in self.plan.placed:
            whole = self._known[self.plan.placed[i]]
            k = next(k for k, part in enumerate(whole.inputs) if part is x)
            index = as_index(whole.attrs["indices"][k])
            array = self._memory(self.plan.placed[i], arrays)[index]
        else:
            at = self.plan.offset[self.plan.storage[i]]
            array = self._arena[at : at + x.nbytes].view(x.dtype).reshape(x.shape)
        arrays[i] = array
        return array

    def _bind(self, x: Tensor, number: Mapping[int, int], arrays: list[Array | None], names: Mapping[int, str]) -> None:
        assert x.op is not None
        i = number[id(x)]
        read = tuple(self._memory(number[id(a)], arrays) for a in x.inputs)
        text = f"{names[id(x)]} = {x.op.name}({', '.join([names[id(a)] for a in x.inputs] + _shown(x.attrs))})"
        if x.op.view is not None:
            arrays[i] = out = x.op.view(*read, **x.attrs)
            if out.size and not np.may_share_memory(out, read[0]):
                raise AssertionError(f"the view op {x.op.name} made a copy")
            self.instructions.append(Instruction(x, read, out, (), f"{text}  # view"))
            return
        out = self._memory(i, arrays)
        calls = tuple(x.op.calls(read, out, self._new_scratch, x.attrs))
        if x.op.checks is not None:
            calls = tuple(call for call in calls if not self._is_checked(call))
        owner = self.plan.storage[i]
        place = "result" if owner not in self.plan.offset else f"arena[{self.plan.offset[owner]}]"
        self.instructions.append(Instruction(x, read, out, calls, f"{text}  # {_named(x.dtype)}{x.shape} in {place}"))

    def _is_checked(self, call: Call) -> bool:
        """Whether a call is a check that an earlier op makes; if it is a check, it is noted."""
        if not isinstance(call, partial) or call.func not in CHECKS or call.keywords:
            return False
        array, *limits, _ = call.args  # and the op's name
        key = call.func, id(array), tuple(limits)
        known = key in self._checks
        self._checks.add(key)
        return known

    def _new_scratch(self, shape: Shape, dtype: Any) -> Array:
        memory: Array = np.empty(shape, dtype)
        self._scratch.append(memory)
        return memory


# Preparing the graph --------------------------------------------------------------------------------------


def _isolate_outputs(graph: Graph) -> None:
    """Give every output a value of its own, computed by an op that writes memory."""
    seen: set[int] = set()
    for k, x in enumerate(graph.outputs):
        if x.op is None or x.data is not None or x.op.view is not None or id(x) in seen:
            graph.outputs[k] = x = _copy_of(x, graph.nodes)
        seen.add(id(x))


def _copy_of(x: Tensor, nodes: list[Tensor]) -> Tensor:
    node = Tensor.symbol(x.shape, x.dtype)
    node.op, node.inputs, node.scope = COPY, (x,), x.scope
    nodes.append(node)
    return node


def _copy_views(graph: Graph) -> None:
    """Put a copy behind every view (the technique `views` switched off)."""
    copies: dict[int, Tensor] = {}
    nodes: list[Tensor] = []
    for x in graph.nodes:
        x.inputs = tuple(copies.get(id(a), a) for a in x.inputs)
        nodes.append(x)
        if x.op is not None and x.op.view is not None:
            copies[id(x)] = _copy_of(x, nodes)
    graph.nodes = nodes
    graph.outputs = [copies.get(id(x), x) for x in graph.outputs]


LARGEST_STAGED = 65_536
"""Elements: numpy's buffers hold 8,192 of each operand; copies of up to this many stay in the second-level cache."""


def _straighten(graph: Graph) -> None:
    """Insert copies where an op needs another memory layout than its input has.

    For elementwise ops that is everything but C order in the result's shape, or a single number: numpy would
    iterate over other operands through buffers that it allocates at every call, and copies in less time. Not so for
    large results, where a copy would have to go to memory and back while those buffers stay in the cache.
    """
    layout: dict[int, Array] = {}
    straight: dict[tuple[int, Shape], Tensor] = {}
    nodes: list[Tensor] = []

    def seen_as(a: Tensor, op: Op, shape: Shape) -> Tensor:
        view = Tensor.symbol(shape, a.dtype)
        view.op, view.inputs, view.attrs, view.scope = op, (a,), {"shape": shape}, a.scope
        nodes.append(view)
        return view

    def copied(a: Tensor, shape: Shape) -> Tensor:
        key = (id(a), shape)
        if key not in straight:
            whole = a.shape != shape and layout[id(a)].flags.c_contiguous
            if whole and a.size == 1:
                straight[key] = seen_as(a, RESHAPE, ())
            elif whole and a.size == math.prod(shape):
                straight[key] = seen_as(a, RESHAPE, shape)
            else:
                straight[key] = _copy_of(a if a.shape == shape else seen_as(a, BROADCAST_TO, shape), nodes)
            layout[id(straight[key])] = _dummy(straight[key])
        return straight[key]

    for x in graph.nodes:
        op = x.op
        assert op is not None
        for a in x.inputs:
            if id(a) not in layout:
                layout[id(a)] = _dummy(a)
        if op is RESHAPE:
            try:
                np.reshape(layout[id(x.inputs[0])], x.shape, copy=False)
            except ValueError:
                x.inputs = (copied(x.inputs[0], x.inputs[0].shape),)
        if op.view is not None:
            layout[id(x)] = op.view(layout[id(x.inputs[0])], **x.attrs)
        elif op.elementwise:
            x.inputs = tuple(
                a
                if not a.shape or x.size > LARGEST_STAGED or (a.shape == x.shape and layout[id(a)].flags.c_contiguous)
                else copied(a, x.shape)
                for a in x.inputs
            )
        elif op.accepts is not None:
            x.inputs = tuple(a if not a.size or op.accepts(layout[id(a)]) else copied(a, a.shape) for a in x.inputs)
        nodes.append(x)
    graph.nodes = nodes


def _dummy(x: Tensor) -> Array:
    """Return an array with the shape and strides that `x` will have, without memory behind it."""
    return _without_memory(x.shape, x.dtype) if x.data is None else x.data


@lru_cache(maxsize=1024)
def _without_memory(shape: Shape, dtype: Any) -> Array:
    strides = [dtype.itemsize] * len(shape)
    for a in reversed(range(len(shape) - 1)):
        strides[a] = strides[a + 1] * max(shape[a + 1], 1)
    return np.lib.stride_tricks.as_strided(np.empty((), dtype), shape, strides, writeable=False)


def _captured(graph: Graph) -> list[Tensor]:
    """Return the tensors with data that the ops use, in order of first use."""
    own = {id(x) for x in (*graph.inputs, *graph.nodes)}
    found: dict[int, Tensor] = {}
    for x in (*(a for node in graph.nodes for a in node.inputs), *graph.outputs):
        if id(x) in own:
            continue
        if x.data is None:
            raise TraceError(
                "a tensor was kept from an earlier trace, where it stood for values that exist only while that "
                "function is replayed; return it from the function, or compute it in this one"
            )
        found.setdefault(id(x), x)
    return list(found.values())


def _needed_whole(graph: Graph) -> set[int]:
    """Return the values that some op can use, directly or through views, only in C order without gaps."""
    needed: set[int] = set()
    for x in reversed(graph.nodes):
        assert x.op is not None
        through = x.op.view is not None and id(x) in needed
        if through or x.op is RESHAPE or (x.op.accepts is not None and x.op is not MATMUL):
            needed.update(id(a) for a in x.inputs)
    return needed


def _value(
    x: Tensor,
    number: Mapping[int, int],
    outputs: Mapping[int, int],
    needed_whole: set[int],
    techniques: Techniques,
) -> Value:
    """Describe a tensor to the planner."""
    if x.op is None or x.data is not None:
        return Value(x.nbytes, fixed=True)
    reads = tuple(number[id(a)] for a in x.inputs)
    if x.op.view is not None:
        return Value(x.nbytes, reads, view_of=reads[0])
    # A single number is computed in place in three times the time that numpy takes otherwise.
    may_overwrite = tuple(
        number[id(a)]
        for a in (x.inputs[i] for i in x.op.overwrites if i < len(x.inputs))
        if x.size > 1
        and a.shape == x.shape
        and a.dtype == x.dtype
        and (a.op is RESHAPE or a.op is None or a.op.view is None)
    )
    return Value(
        x.nbytes,
        reads,
        may_overwrite=may_overwrite,
        parts=tuple(number[id(a)] for a in _placeable(x, needed_whole)) if techniques.place_parts else (),
        fixed=id(x) in outputs,
    )


def _placeable(x: Tensor, needed_whole: set[int]) -> list[Tensor]:
    """Return the inputs of an assembly that may be computed in their places.

    Those are results of elementwise ops where the place lies in one piece, and of matrix products, whose rows
    may lie apart.
    """
    if x.op is not ASSEMBLE or not covers(x.shape, x.attrs["indices"]):
        return []
    whole = _dummy(x)
    parts = []
    for a, index in zip(x.inputs, x.attrs["indices"], strict=True):
        place = whole[as_index(index)]
        if a.op is MATMUL:
            fits = place.ndim == 2 and suits_blas(place)
        else:
            fits = a.op is not None and a.op.elementwise and place.flags.c_contiguous
        if fits and id(a) not in needed_whole and sum(a is b for b in x.inputs) == 1:
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


def _aligned_bytes(size: int) -> Array:
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _names(graph: Graph, leaves: Sequence[Tensor]) -> dict[int, str]:
    names = {id(x): f"x{i}" for i, x in enumerate(graph.inputs)}
    for i, x in enumerate(leaves):
        names[id(x)] = repr(x.item()) if isinstance(x, Literal) else x.name or f"c{i}"
    names.update({id(x): f"v{i}" for i, x in enumerate(graph.nodes)})
    return names


_named = lru_cache(str)  # a dtype's name takes numpy longer than all else about an instruction


def _shown(attrs: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value!r}" for key, value in attrs.items()]
