"""What every engine of a measurement is given: the same network, weights, data and order of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bridge import weights
from bridge.errors import TwinGradError
from bridge.session import Evaluation, Optimizer
from bridge.spec import ModelSpec
from bridge.weights import Params
from bridge.worker import Worker
from experiments.run_arrays import Form, Rows, RunArrays
from experiments.slots import Slot


class RunError(TwinGradError):
    """A run that could not be finished; the others continue."""

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
    work: RunArrays
    pretrained: Mapping[str, str] = field(default_factory=dict)
    """Parameters that start from an array of the dataset: parameter name -> name there."""
    pixels: str = "0 to 1"
    known_rows: int | None = None
    """On how many training rows accuracy and loss are evaluated; None: on all."""
    rows_per_epoch: int | None = None
    """How many training rows an epoch has; None: all."""
    techniques: Mapping[str, bool] | None = None
    """Switches of the engine's techniques; None: as the engine has them."""

    @property
    def train_rows(self) -> Rows:
        """The training rows."""
        return self.work.rows("train", self._form)

    @property
    def test_rows(self) -> Rows:
        """The test rows."""
        return self.work.rows("test", self._form)

    @property
    def evaluated_rows(self) -> Rows:
        """The training rows that are evaluated."""
        return self.work.rows("train", self._form, self.known_rows)

    @property
    def steps_per_epoch(self) -> int:
        """Mini-batches in an epoch, the last one partial or not."""
        return -(-len(self.work.dataset.y_train) // self.batch_size)

    def order(self, epoch: int) -> Path:
        """The order of the rows in an epoch, from 1."""
        return self.work.order(self.seed, epoch, self.rows_per_epoch)

    @property
    def _form(self) -> Form:
        return Form.of(self.spec, self.dtype, self.pixels)

    def initial_weights(self) -> Params:
        """The weights that every engine starts from."""
        return self.with_pretrained(weights.initialise(self.spec, self.seed, self.dtype))

    def with_pretrained(self, params: Params) -> Params:
        """The weights with those that come with the dataset put in their place; RunError where they do not fit."""
        found = dict(params)
        for name, source in self.pretrained.items():
            given = (self.work.dataset.pretrained or {}).get(source)
            if given is None:
                raise RunError(
                    f"pretrained.{name}: data set {self.work.dataset.name} has no {source!r}; "
                    f"it has {', '.join(self.work.dataset.pretrained or {}) or 'none'}"
                )
            if name not in found or found[name].shape != given.shape:
                expected = f"shape {found[name].shape}" if name in found else f"one of {', '.join(found)}"
                raise RunError(f"pretrained.{name}: expected {expected}, found {source!r} of shape {given.shape}")
            found[name] = np.ascontiguousarray(given, dtype=self.dtype)
        return found

    def build(self, worker: Worker, params: Params | None = None) -> float:
        """Build the network in a worker; the seconds that took."""
        params = self.initial_weights() if params is None else params
        switches = {} if self.techniques is None else {"techniques": dict(self.techniques)}
        worker.build(self.spec, params, self.optimizer, self.batch_size, self.dtype, **switches)
        return worker.build_seconds

    def train(self, worker: Worker, order: Path) -> tuple[NDArray[np.float64], float]:
        """Train on the rows of an order: the losses of the steps, and the seconds that took."""
        losses = worker.train_epoch(self.train_rows.x, self.train_rows.y, order)
        return losses, worker.seconds

    def evaluate(self, worker: Worker, rows: Rows) -> tuple[Evaluation, float]:
        """Loss and accuracy on some rows, and the seconds that took."""
        return worker.evaluate(rows.x, rows.y), worker.seconds

    def preload(self, worker: Worker) -> None:
        """Have the data in the worker's memory, so that reading it counts for nothing that follows.

        Once more after `build`, where a framework may make its own copy.
        """
        for rows in dict.fromkeys((self.train_rows, self.test_rows, self.evaluated_rows)):
            worker.preload(rows.x, rows.y)


@dataclass(frozen=True)
class Assignment:
    """What a measure is given to run. A measure is a module with `run(assignment)`, which yields parts of a record.

    Parts come as they are made, so that those of a run that fails later are kept. Everything that decides a result is
    here by value, so that the record's hashes cover it.
    """

    engines: tuple[str, ...]
    """Those of a race, and one otherwise."""
    threads: int
    task: Task
    settings: Mapping[str, Any]
    """The measure's own settings."""
    slot: Slot
    watcher: Watcher
    variants: Mapping[str, Task] = field(default_factory=dict)
    """Other networks on the same data, by name."""

    def start(self, counting: bool = False) -> Worker:
        """A fresh worker of the engine; see `Slot.start`."""
        return self.slot.start(self.engines[0], self.threads, counting)

    def blas(self, worker: Worker) -> dict[str, Any]:
        """The part `blas` of a record: the linear algebra that the engine says it computes with."""
        return {"blas": {self.engines[0]: worker.linear_algebra()}}


Parts = Iterator[dict[str, Any]]
"""Parts of a record, one after the other."""
