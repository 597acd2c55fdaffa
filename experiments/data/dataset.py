"""What every loader returns, and the error every loader raises."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bridge.errors import TwinGradError

SAMPLE_LABEL = "synthetic/embedded sample"
"""The label of every output made from an embedded sample."""

Progress = Callable[[str, int, int], None]
"""Called during a download with (file name, bytes so far, bytes in all)."""


class DataError(TwinGradError, ValueError):
    """Data that is missing where the user said it is, or present but wrong; names the file and what to do."""


class IncompleteError(DataError):
    """A folder holds some files of a dataset but not all of them."""


class NoSampleError(DataError):
    """Neither the data nor the package that carries the embedded sample is there."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test rows, with where they came from.

    For image datasets `x_train` and `x_test` are float32 in [0, 1], C-contiguous, one flattened image per row
    (n, features). For text datasets they are int64 row numbers of the `vocabulary`, one text per row
    (n, length), see `experiments.data.text`. `y_train` and `y_test` are int64 class numbers (n,).
    """

    name: str
    source: Literal["real", "sample", "generated"]
    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    digest: str
    """sha256 over what was loaded: equal for the same data however it was stored (see `combined_digest`)."""
    origin: str
    """Where the rows came from, in words: a folder, or the embedded sample."""
    notice: str | None = None
    """None for real data; for a sample, the sentence that every output prints. It is a sample where any part is."""
    instead_of: str = ""
    """What the sample stands in for: "MNIST"."""
    vocabulary: tuple[str, ...] | None = None
    """For text: the word of each row number. Row 0 is padding, row 1 is every other word."""
    pretrained: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Weights that come with the data, by name: "glove" is (rows of the vocabulary asked for, dimension)."""
    examples: tuple[str, ...] = ()
    """For text: the first training rows as they were written."""
    notes: tuple[str, ...] = ()
    """What else a user should know of how the data was read; nothing that changes what it is."""

    @property
    def line(self) -> str | None:
        """The notice in one short line, for a terminal: what it is not, and how to get that."""
        if not self.instead_of:
            return self.notice
        return (
            f"The embedded sample, not {self.instead_of}: its numbers say nothing about it. Real data: --data-dir "
            "FOLDER or TWINGRAD_DATA (`twingrad doctor` says what is looked for)"
        )


def combined_digest(parts: Iterable[tuple[str, str]]) -> str:
    """One sha256 (hex) for a dataset, from its parts' (name, sha256 hex) in a fixed order."""
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in parts)
    return hashlib.sha256(lines.encode()).hexdigest()


def array_digest(array: NDArray[Any]) -> str:
    """The sha256 (hex) of an array's values as they lie in memory, in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
