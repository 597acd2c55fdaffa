"""Zero-copy calls: replays read large arguments where they are, and compute large results in arrays of the caller.

A tape's calls are bound to its own buffers, so that arguments are copied in, and results out. That is not needed where
all calls that use such a buffer take it whole, as it is: they can be given another array of its make. What a result is
computed in is new in every replay, so that none shares memory with an argument or with another replay's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from py_engine.ad.op import Call, Equation
from py_engine.ad.program import Program
from py_engine.ad.tensor import Array

LARGE = 16_384
"""Bytes: smaller arrays are copied in less time than calls are given others."""

Step: TypeAlias = tuple[Equation, Sequence[Call]]
"""An equation and the calls that compute it."""

Place: TypeAlias = tuple[Any, int | str]
"""The arguments of a call, a list or a dict, and where in them an array is."""


class Silent(Protocol):
    """Where numpy is silent: a context, as of `contextvars`."""

    def run(self, function: Callable[[], Any], /) -> Any:
        """Call the function there."""


class ZeroCopyCall:
    """The replays of one tape whose arguments and results are the caller's. They use the tape's other memory.

    Args:
        program: what is computed.
        inputs: the buffers of its inputs.
        outputs: the buffers of its outputs.
        steps: how it is computed, in order.
        silent: the context to run in.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        steps: Sequence[Step],
        silent: Silent,
    ) -> None:
        buffers = {
            id(x): a
            for x, a in (*zip(program.inputs, inputs, strict=True), *zip(program.outputs, outputs, strict=True))
        }
        slots = [[_Slots(call) for call in calls] for _, calls in steps]
        operands = [_Operands(of_step, equation, buffers) for (equation, _), of_step in zip(steps, slots, strict=True)]
        readers: dict[int, list[_Operands]] = {}
        writer: dict[int, _Operands] = {}
        for found_in in operands:
            for number in {id(x) for x in found_in.equation.inputs}:
                readers.setdefault(number, []).append(found_in)
            writer.update((id(y), found_in) for y in found_in.equation.outputs)

        def places(buffer: Array, users: Sequence[_Operands]) -> list[Place]:
            """Return where the calls of these steps have a buffer; none if one has it in another form."""
            if buffer.nbytes < LARGE or any(user.equation.op.view is not None for user in users):
                return []
            found = [user.places(buffer) for user in users]
            return [] if None in found else [place for some in found for place in some or ()]

        self._copied_in: list[tuple[int, Array]] = []
        self._copied_out: list[tuple[int, Array]] = []
        self._read: list[tuple[int, Array, list[Place]]] = []
        self._new: list[tuple[int, Array, list[Place]]] = []
        for k, (x, buffer) in enumerate(zip(program.inputs, inputs, strict=True)):
            if found := places(buffer, readers.get(id(x), [])):
                self._read.append((k, buffer, found))
            else:
                self._copied_in.append((k, buffer))
        for k, (x, buffer) in enumerate(zip(program.outputs, outputs, strict=True)):
            # What else may lie in its memory are views, which read it, and parts of it, which its writer takes as such.
            if id(x) not in readers and (found := places(buffer, [writer[id(x)]])):
                self._new.append((k, buffer, found))
            else:
                self._copied_out.append((k, buffer))
        self._calls = [slot.call() for of_step in slots for slot in of_step]
        self._outputs = list(outputs)
        self._silent = silent

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Replay the tape on arrays of the shapes and dtypes that it is planned for, and return new ones."""
        for k, buffer in self._copied_in:
            buffer[...] = arrays[k]
        results = self._outputs.copy()
        try:
            for k, buffer, places in self._read:
                array = arrays[k]
                if not (array.flags.c_contiguous and array.flags.aligned):
                    buffer[...] = array
                    array = buffer
                _put(array, places)
            for k, buffer, places in self._new:
                results[k] = array = np.empty(buffer.shape, buffer.dtype)
                _put(array, places)
            self._silent.run(self._run)
        finally:  # the caller's arrays are not held any longer
            for _, buffer, places in (*self._read, *self._new):
                _put(buffer, places)
        for k, buffer in self._copied_out:
            results[k] = buffer.copy()
        return results

    def _run(self) -> None:
        for call in self._calls:
            call()


def _put(array: Array, places: Sequence[Place]) -> None:
    for arguments, key in places:
        arguments[key] = array


class _Slots:
    """A call whose operands can be changed."""

    def __init__(self, call: Call) -> None:
        self._plain = call
        self._operands: list[Any] = list(call.args)
        self._named: dict[str, Any] = dict(call.keywords)
        self.changes = False

    def operands(self) -> Iterator[tuple[Any, Place]]:
        """Yield each operand and its place."""
        for k, value in enumerate(self._operands):
            yield value, (self._operands, k)
        for name, value in self._named.items():
            yield value, (self._named, name)

    def call(self) -> Callable[[], Any]:
        """Return the call; it reads its operands anew where some of them change."""
        if not self.changes:
            return self._plain
        function, operands, named = self._plain.func, self._operands, self._named
        return (lambda: function(*operands, **named)) if named else (lambda: function(*operands))


class _Operands:
    """Where the calls of one step have their operands, found in time that grows with their number.

    Args:
        slots: the calls.
        equation: what they compute.
        buffers: of the program's inputs and outputs, by the ids of these.
    """

    def __init__(self, slots: Sequence[_Slots], equation: Equation, buffers: Mapping[int, Array]) -> None:
        self.equation = equation
        self._slots = slots
        self._buffers = [buffers[id(x)] for x in (*equation.inputs, *equation.outputs) if id(x) in buffers]
        self._found: dict[int, list[tuple[_Slots, Place]]] | None = None

    def places(self, buffer: Array) -> list[Place] | None:
        """Return the buffer's places among the operands; None if a call also has a part of it, or may have."""
        if self._found is None:
            self._found = self._find()
        found = self._found.get(id(buffer))
        if found is None:
            return None
        for slot, _ in found:
            slot.changes = True
        return [place for _, place in found]

    def _find(self) -> dict[int, list[tuple[_Slots, Place]]]:
        """Return for each buffer that shares no memory with another operand its places, by its id."""
        found: dict[int, list[tuple[_Slots, Place]]] = {id(buffer): [] for buffer in self._buffers}
        arrays = {id(buffer): buffer for buffer in self._buffers}
        parts: list[Array] = []  # of tuples and lists, which cannot be changed
        for slot in self._slots:
            for value, place in slot.operands():
                if isinstance(value, np.ndarray):
                    arrays[id(value)] = value
                    found.setdefault(id(value), []).append((slot, place))
                elif not _collected(value, parts):
                    return {}
        return {number: found[number] for number in _apart(arrays, parts)}


def _collected(value: Any, parts: list[Array]) -> bool:
    """Whether it is known which arrays a value holds; they are added to `parts`."""
    if isinstance(value, np.ndarray):
        parts.append(value)
        return True
    if isinstance(value, (tuple, list)):
        return all(_collected(part, parts) for part in value)
    return value is None or isinstance(value, (int, float, str, type, np.generic, np.dtype))


def _apart(arrays: Mapping[int, Array], parts: Sequence[Array]) -> list[int]:
    """Return the ids of those arrays that share no memory with another one, or with the parts.

    In the order of their first bytes, arrays whose memory hangs together follow each other.
    """
    ranges = [(*byte_bounds(array), number) for number, array in arrays.items() if array.size]
    ranges += [(*byte_bounds(array), 0) for array in parts if array.size]  # no object has the id 0
    apart = [number for number, array in arrays.items() if not array.size]
    together: list[int] = []
    end = 0
    for first, last, number in sorted(ranges):
        if first >= end:
            apart += together if len(together) == 1 else []
            together = []
        together.append(number)
        end = max(end, last)
    apart += together if len(together) == 1 else []
    return apart
