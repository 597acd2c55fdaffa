"""Random streams of dropout layers in a trainer's steps, so that a resumed training draws the same masks.

A layer draws the masks of each traced copy from a separate stream. A trainer traces copies for other reasons than to
train, such as to compute a gradient: only the streams of steps that train are in its state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from py_engine.errors import ParameterError
from py_engine.network.layers import Dropout

WORDS = 6
"""Of a stream's state: two numbers of 128 bits, and what is left of the last draw."""


class DropoutStreams:
    """The streams of these layers, by the step whose traced copies draw from them.

    Use: `tracing` around the trace of a step, and `train` before a step trains for the first time.
    """

    def __init__(self, layers: Mapping[str, Dropout]) -> None:
        self.layers = dict(layers)
        self._calls = {name: layer.calls for name, layer in layers.items()}
        """Before: another trainer of the same chain has used streams of these numbers."""
        self._of_step: dict[Hashable, dict[str, list[tuple[str, np.random.Generator]]]] = {}
        self._trained: list[Hashable] = []
        """The steps that train, in the order in which they first did."""
        self._loaded = {name: np.zeros((0, WORDS), np.uint64) for name in layers}

    @contextmanager
    def tracing(self, step: Hashable) -> Iterator[None]:
        """Trace a step inside."""
        for layer in self.layers.values():
            layer.traced.clear()  # copies that others have traced
        yield
        self._of_step[step] = {name: list(layer.traced) for name, layer in self.layers.items()}

    def train(self, step: Hashable) -> None:
        """Let the streams of this step be in the state from now on; where some were loaded, they resume.

        Others begin by their place among all: how often the layer was called for other reasons changes nothing.
        """
        if step not in self._trained and step in self._of_step:
            before = {name: len(generators) for name, generators in self._generators().items()}
            self._trained.append(step)
            for name, layer in self.layers.items():
                for number, (scope, generator) in enumerate(
                    self._of_step[step][name], self._calls[name] + before[name]
                ):
                    generator.bit_generator.state = layer.new_stream(scope, number + 1).bit_generator.state
            self._resume(before)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put all streams back in the end."""
        found = [stream.bit_generator for step in self._of_step.values() for of in step.values() for _, stream in of]
        states = [bits.state for bits in found]
        try:
            yield
        finally:
            for bits, state in zip(found, states, strict=True):
                bits.state = state

    def forget(self) -> None:
        """Forget the steps: those that are traced in their place resume their streams."""
        self._loaded = self.state()
        self._of_step.clear()
        self._trained.clear()

    def state(self) -> dict[str, NDArray[np.uint64]]:
        """Return where the streams of each layer are, (streams, 6), in the order in which the steps first trained.

        Behind them those of a loaded state whose steps have not trained yet.
        """
        found = {}
        for name, generators in self._generators().items():
            words = np.array([_words(generator) for generator in generators], np.uint64).reshape(-1, WORDS)
            found[name] = np.concatenate([words, self._loaded[name][len(words) :]])
        return found

    def check(self, state: Mapping[str, NDArray[np.uint64]]) -> None:
        """Raise ParameterError for an array that is no part of a `state`."""
        for name, words in state.items():
            if words.ndim != 2 or words.shape[1] != WORDS or words.dtype != np.uint64:
                raise ParameterError(
                    f"layer {name!r}: expected streams (copies, {WORDS}) of uint64, got {words.shape} of {words.dtype}"
                )

    def load_state(self, state: Mapping[str, NDArray[np.uint64]]) -> None:
        """Let the streams resume from a `state`; a step that trains later resumes from its part of it."""
        self.check(state)
        self._loaded = {name: words.copy() for name, words in state.items()}
        self._resume(dict.fromkeys(self.layers, 0))

    def _generators(self) -> dict[str, list[np.random.Generator]]:
        return {name: [g for step in self._trained for _, g in self._of_step[step][name]] for name in self.layers}

    def _resume(self, first: Mapping[str, int]) -> None:
        """Put the streams of each layer where the loaded ones are, from this one on."""
        for name, generators in self._generators().items():
            start = first[name]
            for generator, words in zip(generators[start:], self._loaded[name][start:], strict=False):
                _put(generator, words)


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
