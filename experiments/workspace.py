"""Arrays on disk, where the worker processes read them: the same files for every engine."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.data.dataset import Dataset
from experiments.results import ResultsError, explain


@dataclass(frozen=True)
class Rows:
    """The files of some rows: features (n, ...) and labels (n,)."""

    x: Path
    y: Path


class Workspace:
    """A temporary folder with a dataset's arrays and the orders of batches, for a `with` block.

    Everything follows from the dataset and the seeds, so that nothing here needs to be kept.
    """

    def __init__(self, dataset: Dataset, parent: Path | None = None) -> None:
        self.dataset = dataset
        self._parent = parent

    def __enter__(self) -> Workspace:
        try:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="twingrad-", dir=self._parent))
        except OSError as error:
            raise ResultsError(explain(error, self._parent or Path(tempfile.gettempdir()))) from error
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @cached_property
    def train(self) -> Rows:
        """The training rows."""
        return self.rows("train", self.dataset.x_train, self.dataset.y_train)

    @cached_property
    def test(self) -> Rows:
        """The test rows."""
        return self.rows("test", self.dataset.x_test, self.dataset.y_test)

    def rows(self, name: str, x: NDArray, y: NDArray) -> Rows:
        """Write rows under a name."""
        return Rows(self._save(f"{name}-x.npy", x), self._save(f"{name}-y.npy", y))

    def order(self, seed: int, epoch: int, length: int | None = None) -> Path:
        """The order of the training rows in an epoch (from 1): int64, a permutation drawn from (seed, epoch).

        With a `length`, as many rows as that: the first of the permutation, or several permutations in a row.
        """
        n = len(self.dataset.y_train)
        length = n if length is None else length
        path = self.folder / f"order-{seed}-{epoch}-{length}.npy"
        if path.exists():
            return path
        generator = np.random.default_rng([seed, epoch])
        parts = [generator.permutation(n) for _ in range(-(-length // n))]
        return self._save(path.name, np.concatenate(parts)[:length].astype(np.int64))

    def _save(self, name: str, array: NDArray) -> Path:
        path = self.folder / name
        try:
            np.save(path, np.ascontiguousarray(array), allow_pickle=False)
        except OSError as error:
            raise ResultsError(explain(error, path)) from error
        return path
