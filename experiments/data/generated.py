"""Rows drawn at random for any network that is to be timed: its time does not depend on their values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.spec import ModelSpec
from experiments.data.dataset import Dataset, Progress, array_digest, combined_digest

OPTIONS: Mapping[str, Any] = {}
"""It has no options: the rows are drawn for a network, by `drawn_for`."""

ROWS = 1024
"""Training rows that are drawn: four of the largest mini-batches of the study `sizes`."""
TEST_ROWS = 16


def load(
    data_dir: str | Path | None = None, allow_download: bool = True, progress: Progress | None = None, **options: Any
) -> Dataset:
    """Images of 28 x 28 numbers with 10 classes, which need no files: for networks of other inputs see `drawn_for`."""
    return _drawn((28 * 28,), None, 10)


def drawn_for(spec: ModelSpec, rows: int = ROWS) -> Dataset:
    """Rows in the form that a classifying network reads.

    Numbers are uniform between 0 and 1. Tokens are as rare as the words of a text: the k-th one appears about 1/k
    times as often as the first (Zipf's law).
    """
    return _drawn(spec.input.sample, spec.vocabulary, spec.output[-1], rows)


def _drawn(sample: tuple[int, ...], vocabulary: int | None, classes: int, rows: int = ROWS) -> Dataset:
    rng = np.random.default_rng(0)
    shape = (rows + TEST_ROWS, *sample)
    x: NDArray[Any]
    if vocabulary is None:
        x = rng.random(shape, np.float32)
    else:
        x = (float(vocabulary) ** rng.random(shape)).astype(np.int64) - 1
    y = rng.integers(0, classes, len(x))
    digest = combined_digest([("x", array_digest(x)), ("y", array_digest(y))])
    return Dataset(
        "generated", "generated", x[:rows], y[:rows], x[rows:], y[rows:], digest, "rows drawn from a fixed seed"
    )
