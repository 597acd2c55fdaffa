"""Random streams of dropout layers in a trainer's steps, so that a resumed training draws the same masks.

A layer draws the masks of each traced copy from a separate stream. A trainer traces copies for other reasons than to
train, such as to compute a gradient: only the streams of steps that train are in its state. The state says of each
stream which step it belongs to: a resumed training may make its steps in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from py_engine.errors import ParameterError
from py_engine.network.layers import Dropout

WORDS = 6
"""Of a stream's position: two numbers of 128 bits, and what is left of the last draw."""

COLUMNS = 2 + WORDS
"""Of a row of a state: the step's `digest`, the stream's number, and its position."""

ANY_STEP = 0
"""In place of a digest. Older versions do not say it: steps take their rows in the order in which they train."""

StepKey = tuple[int, ...]
"""What a step is known by: samples, and the sizes of a sample and of a target."""


def digest(step: StepKey) -> int:
    """Return 64 bits that stand for a step in a state."""
    return int.from_bytes(hashlib.sha256(",".join(map(str, step)).encode()).digest()[:8], "little")


class DropoutStreams:
    """The streams of these layers, by the step whose traced copies draw from them.

    Use: `tracing` around the trace of a step, and `train` before a step trains for the first time.
    """

    def __init__(self, layers: Mapping[str, Dropout], rank: int = 0) -> None:
        self.layers = dict(layers)
        self._rank = rank
        """Of the process: each draws other numbers."""
        self._calls: dict[str, int] = {}
        """Before the first step was traced: another trainer of the same chain has used streams of these numbers."""
        self._of_step: dict[StepKey, dict[str, list[tuple[str, np.random.Generator]]]] = {}
        self._trained: set[StepKey] = set()
        self._rows = {name: np.zeros((0, COLUMNS), np.uint64) for name in layers}
        """Of a state; the position of a row that a generator draws for is the generator's."""
        self._drawing: dict[str, dict[int, np.random.Generator]] = {name: {} for name in layers}
        """The generator that draws for a row."""

    @contextmanager
    def tracing(self, step: StepKey) -> Iterator[None]:
        """Trace a step inside; its streams resume where the state has them."""
        for name, layer in self.layers.items():
            self._calls.setdefault(name, layer.calls)
            layer.traced, layer.rank = [], self._rank
        try:
            yield
            self._leave(step)
            self._of_step[step] = {name: layer.traced or [] for name, layer in self.layers.items()}
        finally:
            for layer in self.layers.values():
                layer.traced = None
        self._resume(step)

    def _leave(self, step: StepKey) -> None:
        """Keep where the streams of a step are that is traced once more: its new copies resume there."""
        for name, drawing in self._drawing.items():
            for row in set(self._rows_of(name, digest(step))) & drawing.keys():
                self._rows[name][row, -WORDS:] = _words(drawing.pop(row))
        self._trained.discard(step)

    def train(self, step: StepKey) -> None:
        """Let the streams of this step be in the state from now on; those that are not yet begin.

        Their numbers follow those in the state: how often the layer was called for other reasons since the
        first step was traced changes nothing.
        """
        if step in self._trained or step not in self._of_step:
            return
        self._trained.add(step)
        for name, copies in self._of_step[step].items():
            for scope, _ in copies[len(self._rows_of(name, digest(step))) :]:
                self._add_row(name, step, scope)
        self._resume(step)

    @contextmanager
    def unchanged(self, others: Iterable[np.random.Generator] = ()) -> Iterator[list[Any]]:
        """Put all streams, and other generators, back in the end: the block's variable holds where they were, and may
        be cleared."""
        found = [stream.bit_generator for step in self._of_step.values() for of in step.values() for _, stream in of]
        found += [generator.bit_generator for generator in others]
        before = [(bits, bits.state) for bits in found]
        try:
            yield before
        finally:
            for bits, state in before:
                bits.state = state

    def forget(self) -> None:
        """Forget the steps: those that are traced in their place resume their streams."""
        self._rows = self.state()
        self._of_step.clear()
        self._detach()

    def state(self) -> dict[str, NDArray[np.uint64]]:
        """Return where the streams of each layer are, (streams, 8): see `COLUMNS`."""
        found = {name: rows.copy() for name, rows in self._rows.items()}
        for name, drawing in self._drawing.items():
            for row, generator in drawing.items():
                found[name][row, -WORDS:] = _words(generator)
        return found

    def check(self, state: Mapping[str, NDArray[np.uint64]]) -> None:
        """Raise ParameterError for an array that is no part of a `state`, of this version or of an older one."""
        for name, rows in state.items():
            if rows.ndim != 2 or rows.shape[1] not in (WORDS, COLUMNS) or rows.dtype != np.uint64:
                raise ParameterError(
                    f"layer {name!r}: expected streams (copies, {COLUMNS}) of uint64, got {rows.shape} of {rows.dtype}"
                )

    def load_state(self, state: Mapping[str, NDArray[np.uint64]]) -> None:
        """Let the streams resume from a `state`; a step that trains later resumes from its part of it."""
        self.check(state)
        self._rows = {name: self._with_steps(name, rows) for name, rows in state.items()}
        self._detach()
        for step in self._of_step:
            self._resume(step)

    def _with_steps(self, name: str, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return a copy of rows of a state, with the columns that states of older versions lack."""
        found = np.full((len(rows), COLUMNS), ANY_STEP, np.uint64)
        found[:, 1] = self._calls.get(name, self.layers[name].calls) + 1 + np.arange(len(rows))
        found[:, -rows.shape[1] :] = rows
        return found

    def _detach(self) -> None:
        self._trained.clear()
        for drawing in self._drawing.values():
            drawing.clear()

    def _rows_of(self, name: str, of: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(self._rows[name][:, 0] == of)]

    def _add_row(self, name: str, step: StepKey, scope: str) -> None:
        """Give a step one more row: the first one that may be any step's, or a new stream's."""
        rows = self._rows[name]
        if free := self._rows_of(name, ANY_STEP):
            rows[free[0], 0] = digest(step)
            return
        number = 1 + (int(rows[:, 1].max()) if len(rows) else self._calls[name])
        self.layers[name].rank = self._rank
        words = _words(self.layers[name].new_stream(scope, number))
        self._rows[name] = np.append(rows, np.array([[digest(step), number, *words]], np.uint64), axis=0)

    def _resume(self, step: StepKey) -> None:
        """Let the generators of a step draw for its rows, those that do not yet."""
        for name, copies in self._of_step[step].items():
            for row, (_, generator) in zip(self._rows_of(name, digest(step)), copies, strict=False):
                if row not in self._drawing[name]:
                    _put(generator, self._rows[name][row, -WORDS:])
                    self._drawing[name][row] = generator


def _words(generator: np.random.Generator) -> list[int]:
    """Return the state of a stream as words of 64 bits."""
    state: Mapping[str, Any] = generator.bit_generator.state
    numbers = (state["state"]["state"], state["state"]["inc"])
    halves = [half for number in numbers for half in (number >> 64, number & (1 << 64) - 1)]
    return [*halves, state["has_uint32"], state["uinteger"]]


def _put(generator: np.random.Generator, words: NDArray[np.uint64]) -> None:
    """Put a stream where these words say."""
    high, low, increment_high, increment_low, has_left, left = map(int, words)
    numbers = {"state": high << 64 | low, "inc": increment_high << 64 | increment_low}
    bits = generator.bit_generator
    bits.state = {**bits.state, "state": numbers, "has_uint32": has_left, "uinteger": left}
