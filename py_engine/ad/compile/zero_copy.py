"""Zero-copy calls: replays read large arguments where they are, and compute large results in arrays of the caller.

A tape's calls are bound to its own buffers, so that arguments are copied in, and results out. That is not needed where
all calls that use such a buffer take it whole, as it is: they can be given another array of its make. What a result is
computed in is new in every replay, so that none shares memory with an argument or with another replay's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

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
        readers: dict[int, list[Step]] = {}
        for step in steps:
            for number in {id(x) for x in step[0].inputs}:
                readers.setdefault(number, []).append(step)
        writer = {id(y): step for step in steps for y in step[0].outputs}
        slots = {id(call): _Slots(call) for _, calls in steps for call in calls}

        def places(buffer: Array, users: Sequence[Step]) -> list[Place]:
            """Return where the calls of these steps have a buffer; none if one has it in another form."""
            if buffer.nbytes < LARGE or any(equation.op.view is not None for equation, _ in users):
                return []
            found = [slots[id(call)].places(buffer) for _, calls in users for call in calls]
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
        self._calls = [slots[id(call)].call() for _, calls in steps for call in calls]
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
        self._changes = False

    def places(self, array: Array) -> list[Place] | None:
        """Return the array's places among the operands; None if the call also has a part of it."""
        found: list[Place] = []
        slots: list[Place] = [(self._operands, k) for k in range(len(self._operands))]
        for operands, key in (*slots, *((self._named, key) for key in self._named)):
            value = operands[key]
            if value is array:
                found.append((operands, key))
            elif not _apart(value, array):
                return None
        self._changes = self._changes or bool(found)
        return found

    def call(self) -> Callable[[], Any]:
        """Return the call; it reads its operands anew where some of them change."""
        if not self._changes:
            return self._plain
        function, operands, named = self._plain.func, self._operands, self._named
        return (lambda: function(*operands, **named)) if named else (lambda: function(*operands))


def _apart(value: Any, array: Array) -> bool:
    """Whether an argument is known to share no memory with an array."""
    if isinstance(value, np.ndarray):
        return not np.may_share_memory(value, array)
    if isinstance(value, (tuple, list)):
        return all(_apart(part, array) for part in value)
    return value is None or isinstance(value, (int, float, str, type, np.generic, np.dtype))
