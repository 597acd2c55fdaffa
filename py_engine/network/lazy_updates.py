"""Lazy updates of an embedding by Adam: rows without a gradient are updated when they are looked up again.

Adam updates every row at every step, since its running means decay slowly where the gradient is zero. Without a
gradient the update has a closed form: after k steps the mean is multiplied by ``beta1**k`` and the square by
``beta2**k``, and each of the steps subtracts ``c * mean / (sqrt(square) + e)`` with its own numbers c and e. So rows
are brought up to date when a mini-batch looks them up, all of them every `WINDOW` steps, and when an epoch ends.

Steps in a row whose e differ by less than a `spread` are one division, by the harmonic mean of their e. That changes
the movement most where sqrt(square) and e are about equal, and by nothing where one is far above the other: by a
40,000th of it at most, and never by more than `MOST_APART`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from py_engine.ad.memory import segments
from py_engine.ad.ops.indexing import check_ids
from py_engine.ad.tensor import Array
from py_engine.network.optimizers import BLOCKS, FLUSHED_EVERY, SPLIT_FROM, Adam
from py_engine.network.threads import Team

WINDOW = 32
"""Steps after which all rows are brought up to date: a pass over the whole matrix is then a small part of a step."""

SPREAD = 1.02
"""How many times as large as the smallest the largest e of the steps is, at most, that are one division.

The movement differs by a quarter of the variance of e, relative to its mean: (SPREAD - 1)² / 16 at most.
"""

MOST_APART = 1e-6
"""How far a parameter may be from what single steps make of it, when it is brought up to date."""

LOOKED_UP = 0.25
"""Which part of the rows a mini-batch may look up at most: each takes twice as long as one that is merely updated."""


class PendingUpdates(NamedTuple):
    """What has become of rows since each step of a window, by the number of that step.

    Their mean and square are to be multiplied by these; `divisions` are the c and e of their movement.
    """

    mean: Array
    square: Array
    divisions: list[tuple[Array, Array]]


def spread(moves: float, betas: tuple[float, float]) -> float:
    """Return the `SPREAD` of steps whose c, with the decay of the mean over the root's, have the sum `moves`.

    Whatever the gradients were, mean / sqrt(square) is at most 1 / sqrt(1 - beta1² / beta2), so that this times the sum
    bounds the movement. One division changes it by 4/27 of this bound times the variance of e, relative to its mean, at
    most; and that is (spread - 1)² / 4 at most.
    """
    part = betas[0] ** 2 / betas[1]
    if part >= 1:
        return 1.0
    movement = moves / math.sqrt(1 - part)
    return SPREAD if movement == 0 else 1.0 + min(SPREAD - 1.0, math.sqrt(27 * MOST_APART / movement))


def pending_updates(
    factors: list[tuple[float, float]], betas: tuple[float, float], dtype: np.dtype[Any]
) -> PendingUpdates:
    """What becomes of rows in steps of these c and e, that were up to date after 0, 1, ... of them."""
    count = len(factors)
    c, e = np.array(factors, np.float64).reshape(count, 2).T
    ago = np.arange(1, count + 1) - np.arange(count + 1)[:, np.newaxis]  # (up to date since, step)
    root = math.sqrt(betas[1])
    moves = np.where(ago > 0, c * (betas[0] / root) ** np.maximum(ago, 0), 0.0)
    beside = e / root ** np.maximum(ago, 0)
    starts, most = [0], spread(moves.sum(1).max(), betas)
    for step in range(count):
        if beside[0, step] > most * beside[0, starts[-1]]:
            starts.append(step)
    divisions = []
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        by = moves[:, start:stop].sum(1)
        together = (moves[:, start:stop] / beside[:, start:stop]).sum(1)
        divisions.append((by.astype(dtype), np.divide(by, together, out=beside[:, start], where=by > 0).astype(dtype)))
    mean, square = (beta ** ago[:, -1] for beta in betas)
    return PendingUpdates(mean.astype(dtype), square.astype(dtype), divisions)


class LazyUpdates:
    """The rows of a matrix that Adam trains, of which each step has a gradient for a few.

    Use: `gather` before a step, `clear` before each time that it leaves a gradient, `update` after the optimizer's step
    without the matrix, and `catch_up` and `clear` at the end. Call `catch_up` again where it is interrupted.

    Args:
        optimizer: it is bound to the vector that the matrix is a part of.
        part: that part.
        arrays: the matrix, (rows, dimension), and its part of the optimizer's state, `mean` and `square`: views.
        gradient: that of the matrix, which is all zeros.
        team: the threads that share what there is to do, if there are any.
    """

    def __init__(
        self, optimizer: Adam, part: slice, arrays: Sequence[Array], gradient: Array, team: Team | None
    ) -> None:
        self.part = part
        self._optimizer = optimizer
        self._matrix, self._gradient = arrays[0], gradient
        self._arrays = [array.reshape(gradient.shape) for array in arrays]
        self._team = team if team is not None and gradient.size >= SPLIT_FROM else None
        self._looked_up = np.zeros(len(gradient), np.bool_)
        self._since = np.zeros(len(gradient), np.intp)
        """The step of the window, from 0, that each row is up to date since."""
        self._factors: list[tuple[float, float]] = []
        """Of the steps of the window."""
        self._gathered = self._written = np.zeros(0, np.intp)
        self._room = self._empty(0)
        self.moved = 0
        """Bytes that the last update read and wrote, the rows' gathering included, and then bringing all up to date."""
        self._unfinished: dict[int, tuple[slice, list[Array]]] = {}
        """By their first row, the rows that are being put in their places, and what they are to be."""

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self._gradient.nbytes

    def gather(self, ids: Array) -> None:
        """Bring the rows of these ids, which may repeat, up to date. Raises ShapeError for one that there is not."""
        try:
            self._looked_up[ids] = True
        except IndexError:  # they were changed since the trainer checked them
            check_ids(ids, len(self._matrix), "the embedding")
            raise
        found = self._looked_up.nonzero()[0]
        self._looked_up[found] = False
        count = len(found)
        if count > self._room.shape[1]:
            self._room = self._empty(count)
        self._share_out(partial(self._gather, found, self._pending() if self._factors else None), count)
        self._gathered = found  # from here on they are what is in the room
        self._matrix[found] = self._room[0, :count]

    def _gather(self, ids: Array, now: PendingUpdates | None, part: slice) -> None:
        *rows, s, root = self._room[:, part]
        for array, found in zip(self._arrays, rows, strict=True):
            array.take(ids[part], 0, found, "clip")
        if now is not None:
            _apply(now, self._since[ids[part], np.newaxis], rows, s, root)

    def clear(self) -> None:
        """Leave the gradient all zeros."""
        self._gradient[self._written] = 0
        self._written = self._gathered

    def squares(self) -> float:
        """The sum of squares of the gradient, whose rows are gathered."""
        rows = self._room[4, : len(self._gathered)]
        self._gradient.take(self._gathered, 0, rows, "clip")
        return float(np.vdot(rows, rows))

    def update(self) -> None:
        """Update the rows that are gathered, after `squares`, as the optimizer has updated the others."""
        self._share_out(self._update, len(self._gathered))
        row = self._gradient.shape[1] * self._gradient.itemsize
        self.moved = (2 * len(self._arrays) + 1) * row * len(self._gathered)
        self._factors.append(self._optimizer.factors())
        self._since[self._gathered] = len(self._factors)
        self._gathered = self._gathered[:0]
        if len(self._factors) == WINDOW:
            self.catch_up()

    def _update(self, part: slice) -> None:
        ids = self._gathered[part]
        p, mean, square, s, gradient = self._room[:, part]
        self._optimizer.update(*(rows.reshape(-1) for rows in (p, gradient, s, mean, square)))
        for array, rows in zip(self._arrays, (p, mean, square), strict=True):
            array[ids] = rows

    def catch_up(self) -> None:
        """Bring all rows up to date; of a step that has failed nothing is left."""
        for block, rows in list(self._unfinished.values()):
            self._put(block, rows)
        for array, found in zip(self._arrays, self._room, strict=False):
            array[self._gathered] = found[: len(self._gathered)]
        self._since[self._gathered] = len(self._factors)
        self._gathered = self._gathered[:0]
        if self._factors:
            now, before = self._optimizer.steps, self._optimizer.steps - len(self._factors)
            flushes = now // FLUSHED_EVERY > before // FLUSHED_EVERY
            self._share_out(partial(self._catch_up, self._pending(), flushes), len(self._matrix))
            self.moved += 2 * len(self._arrays) * self.nbytes
            self._factors.clear()  # first: an interrupt between the two must not let these steps be done again
            self._since.fill(0)

    def _catch_up(self, now: PendingUpdates, flushes: bool, part: slice) -> None:
        length = max(1, BLOCKS[self._team is not None] // self._matrix.shape[1])
        room = self._empty(min(length, part.stop - part.start))
        for start in range(part.start, part.stop, length):
            block = slice(start, min(start + length, part.stop))
            *rows, s, root = room[:, : block.stop - block.start]
            for array, copy in zip(self._arrays, rows, strict=True):
                np.copyto(copy, array[block])
            later = self._since[block].nonzero()[0]  # they were looked up meanwhile
            apart = [copy[later] for copy in rows]
            _apply(now, self._since[block][later, np.newaxis], apart, *np.empty((2, *apart[0].shape), s.dtype))
            _apply(now, 0, rows, s, root)
            for copy, found in zip(rows, apart, strict=True):
                copy[later] = found
            if flushes:
                self._optimizer.flush(rows[1:], s)
            self._put(block, rows)

    def _put(self, block: slice, rows: list[Array]) -> None:
        """Put rows that are up to date in their places; if that is interrupted, they are known to `catch_up`."""
        self._unfinished[block.start] = block, rows
        for array, copy in zip(self._arrays, rows, strict=True):
            array[block] = copy
        self._since[block] = len(self._factors)
        del self._unfinished[block.start]

    def _empty(self, count: int) -> Array:
        """Memory for `count` rows, their mean and square, and two scratch arrays of the same shape."""
        return np.empty((5, count, self._gradient.shape[1]), self._gradient.dtype)

    def _pending(self) -> PendingUpdates:
        return pending_updates(self._factors, self._optimizer.betas, self._gradient.dtype)

    def _share_out(self, do: Callable[[slice], None], count: int) -> None:
        """Call `do` with all parts of `count` rows: one for each thread of the team if they are large enough."""
        if self._team is None or count * self._gradient.shape[1] < SPLIT_FROM:
            do(slice(0, count))
        else:
            self._team.run([partial(do, part) for part in segments(count, self._team.size)])


def _apply(now: PendingUpdates, since: Array | int, rows: Sequence[Array], s: Array, root: Array) -> None:
    """Do to rows, mean and square what was to be done since this step, or these in a column; the rest is scratch."""
    p, mean, square = rows
    np.sqrt(square, out=root)
    for c, e in now.divisions:
        np.add(root, e[since], out=s)
        np.divide(mean, s, out=s)
        np.multiply(s, c[since], out=s)
        np.subtract(p, s, out=p)
    np.multiply(mean, now.mean[since], out=mean)
    np.multiply(square, now.square[since], out=square)
