"""Sums over a batch whose samples are split over threads: what batch normalisation needs of the other threads' samples.

Each thread replays its own tape. Where a layer sums over the batch, the tapes wait at a barrier: every one
writes its part of the sum, waits for the others, and adds up all parts in the same order, so that all have the same
bits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad.op import Call, Equation, Op, Scratch, Shape
from py_engine.ad.ops.shape import leading
from py_engine.ad.tensor import Array, Tensor
from py_engine.errors import ShapeError


class BatchSums:
    """Where the tapes of all threads, one for each part of a batch of `samples`, leave parts of sums and add them.

    Outside a run of all of them a tape waits for nobody: it adds what the others have left last.
    """

    def __init__(self, threads: int, samples: int) -> None:
        self.samples = samples
        self._barrier = threading.Barrier(threads)
        self._parts: dict[int, list[Array | None]] = {}
        self._sums = [0] * threads
        self._running = False

    @contextmanager
    def tracing(self, thread: int, samples: int) -> Iterator[None]:
        """Trace the tape of this thread for `samples` samples inside: sums over the batch are sums over all parts."""
        _CURRENT.batch_sums, _CURRENT.thread, _CURRENT.samples = self, thread, samples
        try:
            yield
        finally:
            _CURRENT.batch_sums = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all tapes inside, each in its thread."""
        self._barrier.reset()
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def leave(self) -> None:
        """Let nobody wait for this thread: its tape has failed."""
        self._barrier.abort()

    def next_sum(self, thread: int) -> int:
        """The number of the next sum that this thread's tape makes; sums of one number are one sum."""
        self._sums[thread] += 1
        return self._sums[thread]

    def calls(self, x: Array, out: Array, thread: int, number: int) -> Sequence[Call]:
        """The calls that leave `x` and compute the sum of all parts in `out`."""
        parts = self._parts.setdefault(number, [None] * self._barrier.parties)
        mine = parts[thread] = np.zeros_like(x)
        return [partial(np.copyto, mine, x), partial(self._wait), partial(_add, parts, out)]

    def _wait(self) -> None:
        if self._running:
            self._barrier.wait()


def _add(parts: Sequence[Array | None], out: Array) -> None:
    out.fill(0)
    for part in parts:
        if part is not None:
            np.add(out, part, out)


class _Current(threading.local):
    batch_sums: BatchSums | None = None
    thread: int = 0
    samples: int = 0


_CURRENT = _Current()


def sum_of_parts(x: Tensor) -> Tensor:
    """Return the sum of `x` over all parts of the batch; `x` itself where the batch is not split."""
    batch_sums, thread = _CURRENT.batch_sums, _CURRENT.thread
    if batch_sums is None:
        return x
    return SUM_OF_PARTS(x, batch_sums=batch_sums, thread=thread, number=batch_sums.next_sum(thread))


def samples_of(x: Tensor) -> int:
    """Return how many samples `x` (samples, ...) would have for the whole batch, of all or a part of which it is.

    It may hold several for each sample of the batch, such as its steps in time.

    Raises:
        ShapeError: it holds no whole number of them for each.
    """
    if _CURRENT.batch_sums is None:
        return len(x)
    several, rest = divmod(len(x), _CURRENT.samples)
    if rest:
        raise ShapeError(
            f"statistics of {len(x)} samples, for a part of {_CURRENT.samples} of a batch, are not those of a whole "
            "one; switch the technique split_batch off"
        )
    return several * _CURRENT.batch_sums.samples


def is_batch_sum(attrs: Mapping[str, Any]) -> bool:
    """Whether an op with these attributes is a sum over all parts of a batch."""
    return isinstance(attrs.get("batch_sums"), BatchSums)


def sums(attrs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the sums of a tape over the batch, in order, from its ops' attributes."""
    return [at["number"] for at in attrs if is_batch_sum(at)]


def numbered(equations: Sequence[Equation]) -> tuple[Equation, ...]:
    """Return the ops with their sums over parts numbered from 1: an op that a checkpoint repeats is another sum."""
    numbers = itertools.count(1)
    return tuple(
        replace(step, attrs={**step.attrs, "number": next(numbers)}) if is_batch_sum(step.attrs) else step
        for step in equations
    )


def _bind(
    arrays: Sequence[Array], out: Array, scratch: Scratch, batch_sums: BatchSums, thread: int, number: int
) -> Any:
    return batch_sums.calls(arrays[0], out, thread, number)


def _infer(x: Tensor, batch_sums: BatchSums, thread: int, number: int) -> tuple[Shape, Any]:
    return x.shape, x.dtype


SUM_OF_PARTS = Op(
    name="sum_of_parts",
    infer=_infer,
    bind=_bind,
    vjp=(lambda g, y, x, **at: sum_of_parts(g),),
    batch=leading,
    couples_batch=True,
    doc="the sum over all parts of a batch that is split over threads",
)
