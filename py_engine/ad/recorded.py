"""A function kept as the list of ops it consists of, to be applied to other tensors; and arrays packed into one.

An op has one result. What has several (a loop, a gradient by several inputs) is computed into one vector, and the
parts are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad import ops
from py_engine.ad.graph import Part, accumulate, needed_ops
from py_engine.ad.ops.record import Op, Shape
from py_engine.ad.ops.shape import SLICE, Index
from py_engine.ad.state import STATE, entering
from py_engine.ad.tensor import FLOATS, Array, Literal, Tensor
from py_engine.errors import TraceError

__all__ = ["Layout", "Recorded", "nested_trace", "record", "zeros"]

# Functions as lists of ops --------------------------------------------------------------------------------

Reference = int | Literal
"""A value in a recorded function: the inputs are numbered first, then the steps."""

Step: TypeAlias = tuple[Op, tuple[Reference, ...], Mapping[str, Any], str]


@dataclass(frozen=True, eq=False, repr=False)
class Recorded:
    """A function of tensors as the ops it consists of.

    Attributes:
        inputs: shape and dtype of each input.
        steps: the ops in order, each with its operands, its attributes and the layer that it belongs to.
        outputs: which values are its results.
        random: the name of an op that draws anew whenever it is computed, if there is one.
    """

    inputs: tuple[tuple[Shape, Any], ...]
    steps: tuple[Step, ...]
    outputs: tuple[Reference, ...]
    random: str | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Apply the ops to other inputs, of the same shapes and dtypes."""
        values = list(inputs)
        with entering(scope=STATE.scope):
            for op, operands, attrs, scope in self.steps:
                found = [values[x] if isinstance(x, int) else x for x in operands]
                if "inside" in attrs and STATE.trace is None:  # a checkpoint: how its value was found is not kept
                    found[0] = Tensor(found[0].data) if found[0].data is not None else found[0]
                STATE.scope = scope
                values.append(op.apply(tuple(found), attrs))
        return [values[x] if isinstance(x, int) else x for x in self.outputs]

    def __repr__(self) -> str:
        return f"<{len(self.steps)} ops>"

    def symbols(self) -> list[Tensor]:
        """Return a symbolic tensor for each input."""
        return [Tensor.symbol(shape, dtype) for shape, dtype in self.inputs]

    def without_unused(self, first: int) -> tuple[Recorded, list[bool]]:
        """Return the function of the first inputs and of those others that it reads, and which these are."""
        read = {x for _, operands, *_ in self.steps for x in operands if isinstance(x, int)} | set(self.outputs)
        used = [i < first or i in read for i in range(len(self.inputs))]
        new = {old: k for k, old in enumerate(i for i, keep in enumerate(used) if keep)}
        shift = len(self.inputs) - len(new)

        def moved(x: Reference) -> Reference:
            return x if not isinstance(x, int) else new[x] if x < len(self.inputs) else x - shift

        return Recorded(
            tuple(kind for kind, keep in zip(self.inputs, used, strict=True) if keep),
            tuple((op, tuple(moved(x) for x in operands), attrs, scope) for op, operands, attrs, scope in self.steps),
            tuple(moved(x) for x in self.outputs),
            self.random,
        ), used


def record(
    nodes: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    redraw: bool = True,
    checks: bool = True,
) -> tuple[Recorded, list[Tensor]]:
    """Return recorded ops as a function, and the tensors from elsewhere that they read: its further inputs.

    Args:
        nodes: the ops, in order.
        inputs: the function's own inputs.
        outputs: its results.
        redraw: whether ops that draw random numbers are part of it; if not, what they drew is another input.
        checks: whether checks of values that the results do not need are part of it, see `graph.needed_ops`.
    """
    inner = {id(x) for x in (*inputs, *nodes)}
    steps = [x for x in needed_ops(nodes, outputs, checks) if redraw or not (x.op and x.op.random)]
    made = {id(x) for x in (*inputs, *steps)}
    captured: dict[int, Tensor] = {}
    for x in (*(a for node in steps for a in node.inputs), *outputs):
        if id(x) not in made and not isinstance(x, Literal):
            captured.setdefault(id(x), x)
    first = [*inputs, *captured.values()]
    number = {id(x): i for i, x in enumerate(first)}

    def reference(x: Tensor) -> Reference:
        return x if isinstance(x, Literal) and id(x) not in number else number[id(x)]

    program: list[Step] = []
    for x in steps:
        program.append((_op(x), tuple(reference(a) for a in x.inputs), x.attrs, x.scope))
        if _made_without_recording(x):  # applied anew it would be recorded
            program.append((ops.stop_gradient, (len(first) + len(program) - 1,), {}, x.scope))
        number[id(x)] = len(first) + len(program) - 1
    function = Recorded(
        tuple((x.shape, x.dtype) for x in first),
        tuple(program),
        tuple(reference(x) for x in outputs),
        next((_op(x).name for x in steps if _op(x).random), None),
    )
    # What an op drew is a constant from here on; whatever else is captured stays part of its own graph.
    return function, [Tensor(x.data) if id(x) in inner and x.data is not None else x for x in captured.values()]


def _op(x: Tensor) -> Op:
    assert x.op is not None
    return x.op


def _made_without_recording(x: Tensor) -> bool:
    """Whether an op would have a derivative, had it not been made under `no_grad()`."""
    if x.requires_grad or x.dtype not in FLOATS or _op(x).constant:
        return False
    return any(a.requires_grad for a in x.inputs)


@contextmanager
def nested_trace() -> Iterator[list[Tensor]]:
    """Make every op symbolic, and collect the ops, also inside another trace."""
    nodes: list[Tensor] = []
    with entering(trace=nodes, symbolic=True, grad_enabled=True):
        yield nodes


def zeros(shape: Shape, dtype: Any) -> Tensor:
    """Return zeros that take no memory."""
    return ops.broadcast_to(Literal(np.zeros((), dtype)), shape)


# Several arrays in one vector -----------------------------------------------------------------------------


def _infer_bits(x: Tensor, shape: Shape, dtype: Any) -> tuple[Shape, Any]:
    return shape, dtype


def _bits(x: Array, shape: Shape, dtype: Any) -> Array:
    used = math.prod(shape) * np.dtype(dtype).itemsize
    array: Array = x.view(np.uint8)[:used].view(dtype).reshape(shape)
    return array


BITS = Op("bits", _infer_bits, view=_bits, doc="the same bytes taken as another dtype")


@dataclass(frozen=True)
class Layout:
    """Where arrays lie in a vector. Those of another dtype than the vector's lie there as their bytes.

    Attributes:
        dtype: of the vector.
        places: of each array the first element in the vector and the one behind the last, its shape and its dtype.
        size: the elements of the vector.
    """

    dtype: Any
    places: tuple[tuple[int, int, Shape, Any], ...]
    size: int

    @classmethod
    def of(cls, kinds: Sequence[tuple[Shape, Any]], dtype: Any) -> Layout:
        """Return the layout of arrays of these shapes and dtypes in a vector of `dtype`."""
        at, places = 0, []
        width = np.dtype(dtype).itemsize
        for shape, own in kinds:
            if own != dtype:
                at = -(-at * width // 16) * 16 // width  # aligned for whatever it is
            end = at + -(-math.prod(shape) * np.dtype(own).itemsize // width)
            places.append((at, end, shape, own))
            at = end
        return cls(np.dtype(dtype), tuple(places), at)

    def arrays(self, vector: Array) -> list[Array]:
        """Return the arrays as views of a vector; what lies between them is set to zero."""
        found, done = [], 0
        for start, end, shape, dtype in self.places:
            vector[done:start] = 0
            done = end
            if dtype == self.dtype:
                found.append(vector[start:end].reshape(shape))
                continue
            place = vector[start:end].view(np.uint8)
            used = math.prod(shape) * np.dtype(dtype).itemsize
            place[used:] = 0
            found.append(place[:used].view(dtype).reshape(shape))
        return found

    def index(self, i: int) -> Index:
        """Return the place of array `i`."""
        return ((self.places[i][0], self.places[i][1], 1),)

    def tensor(self, vector: Tensor, i: int) -> Tensor:
        """Return array `i` of a vector."""
        _, _, shape, dtype = self.places[i]
        part = SLICE.apply((vector,), {"index": self.index(i)})
        if dtype == self.dtype:
            return ops.reshape(part, shape)
        return BITS.apply((part,), {"shape": shape, "dtype": dtype})

    def gradients(self, parts: Sequence[Part]) -> list[Tensor | None]:
        """Return, from the contributions to the gradient of a vector, the gradient of each array; None for zero."""
        whole = [(g, index) for g, index in parts if index is None]
        found: list[Tensor | None] = []
        for i, (start, end, shape, dtype) in enumerate(self.places):
            mine: list[Part] = [(g, None) for g, index in parts if index == self.index(i)]
            mine += [(SLICE.apply((g,), {"index": self.index(i)}), None) for g, _ in whole]
            if not mine or dtype not in FLOATS:
                found.append(None)
                continue
            found.append(ops.reshape(accumulate(mine, Tensor.symbol((end - start,), dtype)), shape))
        known = {self.index(i) for i in range(len(self.places))}
        if any(index is not None and index not in known for _, index in parts):
            raise TraceError("a packed vector was taken apart in another way than its layout")
        return found

    def pack(self, arrays: Sequence[Tensor | None]) -> Tensor:
        """Return the vector of these tensors, with zeros for None; all are of its dtype."""
        there = [(ops.reshape(x, -1), self.index(i)) for i, x in enumerate(arrays) if x is not None]
        if not there:
            return zeros((self.size,), self.dtype)
        return ops.assemble([x for x, _ in there], [index for _, index in there], (self.size,))
