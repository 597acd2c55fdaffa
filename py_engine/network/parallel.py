"""One training on several processes: each computes a part of every mini-batch, and the gradients are added up."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from py_engine.errors import ConfigurationError

__all__ = ["Communicator", "Parallel"]


class Communicator(Protocol):
    """The processes that train together: what `mpi4py.MPI.COMM_WORLD` is, as far as it is needed."""

    def Get_rank(self) -> int:
        """Which of them this is, from 0 on."""

    def Get_size(self) -> int:
        """How many they are."""

    def Allreduce(self, sendbuf: Any, recvbuf: Any) -> None:
        """Leave in one array the sums over all processes of the other."""


class Parallel:
    """This process's part of each mini-batch. All processes have the same parameters, data and order.

    Attributes:
        rank, size: which of the processes this is, and how many they are.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        if not 0 <= self.rank < self.size:
            raise ConfigurationError(f"a communicator of {self.size} processes has no rank {self.rank}")
        self._sent: NDArray[Any] = np.empty(0)

    def part(self, samples: int) -> tuple[int, int, float]:
        """Return the samples before this part, how many it has, and what its mean gradient counts.

        Parts differ by one sample at most. Of a mini-batch with fewer samples than processes, those left over compute
        the last one, for nothing.
        """
        each, more = divmod(samples, self.size)
        count = each + (self.rank < more)
        if count == 0:
            return samples - 1, 1, 0.0
        return self.rank * each + min(self.rank, more), count, count / samples

    def own_rows(self, rows: NDArray[Any], batch_size: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Return this process's rows of all mini-batches, one after the other, and what each of its parts counts."""
        parts, weights = [], []
        for start in range(0, len(rows), batch_size):
            first, count, weight = self.part(min(batch_size, len(rows) - start))
            parts.append(rows[start + first : start + first + count])
            weights.append(weight)
        return np.concatenate(parts), np.array(weights)

    def exchange(self, gradient: NDArray[Any], weight: float, loss: float) -> None:
        """Add all processes' gradients up, each by its part; NaN where a part is not finite, so that all see it."""
        if not gradient.size:
            return
        np.multiply(gradient, gradient.dtype.type(weight), out=gradient)
        if not math.isfinite(loss):
            gradient[0] = math.nan
        self.add_up(gradient)

    def gather(self, own: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the arrays of all processes, each with any number of rows that are alike, that of rank 0 first."""
        counts = np.zeros(self.size, np.int64)
        counts[self.rank] = len(own)
        self.add_up(counts)
        found = np.zeros((self.size, counts.max(), *own.shape[1:]), own.dtype)
        found[self.rank, : len(own)] = own
        self.add_up(found)
        return [rows[:count] for rows, count in zip(found, counts, strict=True)]

    def add_up(self, vector: NDArray[Any]) -> NDArray[Any]:
        """Sum each element over all processes, in place; return the vector."""
        if self._sent.shape != vector.shape or self._sent.dtype != vector.dtype:
            self._sent = np.empty_like(vector)
        np.copyto(self._sent, vector)
        self._communicator.Allreduce(self._sent, vector)
        return vector
