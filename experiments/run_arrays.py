"""Arrays on disk, where the worker processes read them: the same files for every engine."""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from bridge.errors import TwinGradError
from bridge.spec import ModelSpec
from experiments.errors import ResultsError, explain

if TYPE_CHECKING:
    from experiments.data.dataset import Dataset


@dataclass(frozen=True)
class Rows:
    """The files of some rows: features (n, ...) and targets (n, ...)."""

    x: Path
    y: Path


Part = Literal["train", "test"]

MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081
"""Of MNIST's training pixels between 0 and 1: what "normalised" stands for, as in PyTorch's examples."""


class RowsError(TwinGradError):
    """Rows of a dataset that a network cannot read; names both, expected and found."""


@dataclass(frozen=True)
class Form:
    """The form in which a network reads rows: shapes of one sample, types, and the scale of the pixels."""

    sample: tuple[int, ...] | None = None
    """Shape of one sample; None: as the dataset has it."""
    x_dtype: str = "float32"
    target: tuple[int, ...] = ()
    y_dtype: str = "int64"
    pixels: str = "0 to 1"

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str, pixels: str = "0 to 1") -> Form:
        """What a network with parameters of `dtype` reads and compares with."""
        ids = spec.input.dtype == "int64"
        numbers = spec.target.kind == "numbers"
        return cls(
            sample=spec.input.sample,
            x_dtype="int64" if ids else dtype,
            target=spec.target.shape,
            y_dtype=dtype if numbers else "int64",
            pixels=pixels,
        )

    def features(self, x: NDArray[Any], dataset: Dataset) -> NDArray[Any]:
        """The rows (n, ...) as (n, *sample)."""
        if self.pixels == "normalised":
            x = (x - MNIST_MEAN) / MNIST_DEVIATION
        return self._shaped(x, self.sample, dataset).astype(self.x_dtype)

    def targets(self, y: NDArray[Any], dataset: Dataset) -> NDArray[Any]:
        """The labels (n,) as (n, *target)."""
        return self._shaped(y, self.target, dataset).astype(self.y_dtype)

    def _shaped(self, array: NDArray[Any], shape: tuple[int, ...] | None, dataset: Dataset) -> NDArray[Any]:
        if shape is None or array.shape[1:] == shape:
            return array
        if math.prod(array.shape[1:]) != math.prod(shape):
            expected = ", ".join(["N", *map(str, shape)])
            raise RowsError(
                f"data set {dataset.name}: the model reads ({expected}), found rows of shape {array.shape}; "
                "change the model's input or the options under [data] in the paper file"
            )
        return array.reshape(len(array), *shape)


FLAT = Form()
"""Rows as the dataset has them."""


class RunArrays:
    """A temporary folder with a dataset's arrays and the orders of batches, for a `with` block.

    Everything follows from the dataset and the seeds, so that nothing here needs to be kept. Several threads may ask.
    """

    def __init__(self, dataset: Dataset, parent: Path | None = None) -> None:
        self.dataset = dataset
        self._parent = parent
        self._rows: dict[tuple[Part, Form, int], Rows] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> RunArrays:
        try:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="twingrad-", dir=self._parent))
        except OSError as error:
            raise ResultsError(explain(error, self._parent or Path(tempfile.gettempdir()))) from error
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def rows(self, part: Part, form: Form = FLAT, limit: int | None = None) -> Rows:
        """The training or test rows in the form that a network reads; with a `limit` only the first ones, this many.

        Raises RowsError when the rows cannot have this form.
        """
        x, y = (getattr(self.dataset, f"{name}_{part}")[:limit] for name in ("x", "y"))
        with self._lock:
            known = self._rows.get((part, form, len(y)))
            if known is None:
                name = f"{part}-{len(self._rows)}"
                known = Rows(
                    self._save(f"{name}-x.npy", form.features(x, self.dataset)),
                    self._save(f"{name}-y.npy", form.targets(y, self.dataset)),
                )
                self._rows[part, form, len(y)] = known
            return known

    def order(self, seed: int, epoch: int, length: int | None = None) -> Path:
        """The order of the training rows in an epoch (from 1): int64, a permutation drawn from (seed, epoch).

        With a `length`, as many rows as that: the first of the permutation, or several permutations in a row.
        """
        n = len(self.dataset.y_train)
        length = n if length is None else length
        path = self.folder / f"order-{seed}-{epoch}-{length}.npy"
        with self._lock:
            if path.exists():
                return path
            generator = np.random.default_rng([seed, epoch])
            parts = [generator.permutation(n) for _ in range(-(-length // n))]
            return self._save(path.name, np.concatenate(parts)[:length].astype(np.int64))

    def _save(self, name: str, array: NDArray[Any]) -> Path:
        path = self.folder / name
        try:
            np.save(path, np.ascontiguousarray(array), allow_pickle=False)
        except OSError as error:
            path.unlink(missing_ok=True)  # another run would take it for whole
            raise ResultsError(explain(error, path)) from error
        return path
