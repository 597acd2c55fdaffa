"""What every loader returns, and the error every loader raises."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bridge.errors import TwinGradError

SAMPLE_LABEL = "synthetic/embedded sample"
"""The words that stand on every output made from an embedded sample."""

Progress = Callable[[str, int, int], None]
"""Called during a download with (file name, bytes so far, bytes in all)."""


class DataError(TwinGradError, ValueError):
    """Data that is missing where the user said it is, or present but wrong; names the file and what to do."""


class IncompleteError(DataError):
    """A folder holds some files of a dataset but not all of them."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test rows, with where they came from.

    For image datasets `x_train` and `x_test` are float32 in [0, 1], C-contiguous, one flattened image per row
    (n, features); `y_train` and `y_test` are int64 class numbers (n,).
    """

    name: str
    source: Literal["real", "sample"]
    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    digest: str
    """sha256 over what was loaded: equal for the same data however it was stored (see `combined_digest`)."""
    origin: str
    """Where the rows came from, in words: a folder, or the embedded sample."""
    notice: str | None = None
    """None for real data; for a sample, the sentence that every output prints."""


def combined_digest(parts: Iterable[tuple[str, str]]) -> str:
    """One sha256 (hex) for a dataset, from its parts' (name, sha256 hex) in a fixed order."""
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in parts)
    return hashlib.sha256(lines.encode()).hexdigest()
