"""What every engine of a measurement is given: the same network, weights, data and order of batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bridge import weights
from bridge.engine import Evaluation, Optimizer
from bridge.errors import TwinGradError
from bridge.spec import ModelSpec
from bridge.weights import Params
from bridge.worker import Worker
from experiments.workspace import Rows, Workspace


class RunError(TwinGradError):
    """A run that could not be finished; the others go on."""

    exit_code = 1


class Watcher(Protocol):
    """Hears of the progress of a run."""

    def step(self) -> None:
        """One part (an epoch, a round) is done."""


@dataclass(frozen=True)
class Task:
    """One training, engine and threads apart."""

    spec: ModelSpec
    optimizer: Optimizer
    batch_size: int
    dtype: str
    epochs: int
    seed: int
    work: Workspace

    def initial_weights(self) -> Params:
        """The weights that every engine starts from."""
        return weights.initialise(self.spec, self.seed, self.dtype)

    def build(self, worker: Worker) -> float:
        """Build the network in a worker; the seconds that took."""
        worker.build(self.spec, self.initial_weights(), self.optimizer, self.batch_size, self.dtype)
        return worker.build_seconds

    def train(self, worker: Worker, order: Path) -> tuple[NDArray[np.float64], float]:
        """Train on the rows of an order: the losses of the steps, and the seconds that took."""
        losses = worker.train_epoch(self.work.train.x, self.work.train.y, order)
        return losses, worker.seconds

    def evaluate(self, worker: Worker, rows: Rows) -> tuple[Evaluation, float]:
        """Loss and accuracy on some rows, and the seconds that took."""
        return worker.evaluate(rows.x, rows.y), worker.seconds

    def preload(self, worker: Worker) -> None:
        """Have the data in the worker's memory, so that reading it counts for nothing that follows."""
        for rows in (self.work.train, self.work.test):
            worker.preload(rows.x, rows.y)
