"""Embedded samples: small data that is always there, so that everything runs without files or a network.

A sample stands in for a dataset; it is not that dataset. Numbers made from it say nothing about the papers,
and every output that shows them carries `Dataset.notice` or `SAMPLE_LABEL`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.data.dataset import SAMPLE_LABEL, Dataset, NoSampleError, array_digest, combined_digest

SIDE = 28
TRAIN_ROWS = 1500
SPLIT_SEED = 20240229
GREY_LEVELS = 16  # load_digits() counts the inked pixels of 4 x 4 blocks: 0 to 16


def digits(name: str, instead_of: str, reason: str) -> Dataset:
    """scikit-learn's 1,797 handwritten digits, scaled from 8 x 8 to 28 x 28: the stand-in for MNIST.

    `name` is the dataset's name, `instead_of` its title and `reason` why it could not be had, both for the
    notice. The split into 1,500 training and 297 test rows is shuffled with a fixed seed. Source of the
    digits: Alpaydin and Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning Repository,
    1998 (its test set).
    """
    try:
        pixels, labels = _digits()
    except ImportError as error:
        raise NoSampleError(
            f"neither {instead_of} nor its embedded sample is available: {reason}; and scikit-learn, which "
            f"carries the sample, can't be imported ({error}). pip install 'twingrad[data]', or name a folder that "
            f"holds {instead_of} with --data-dir or TWINGRAD_DATA"
        ) from None
    images = bilinear(pixels / GREY_LEVELS, SIDE)
    x = images.reshape(len(images), -1).astype(np.float32)
    y = labels.astype(np.int64)
    order = np.random.Generator(np.random.PCG64(SPLIT_SEED)).permutation(len(x))
    train, test = order[:TRAIN_ROWS], order[TRAIN_ROWS:]
    arrays = {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
    return Dataset(
        name=name,
        source="sample",
        **arrays,
        digest=combined_digest((key, array_digest(array)) for key, array in arrays.items()),
        origin=f"{SAMPLE_LABEL}: scikit-learn's 8 x 8 digits scaled to {SIDE} x {SIDE}",
        instead_of=instead_of,
        notice=(
            f"{SAMPLE_LABEL[0].upper()}{SAMPLE_LABEL[1:]}, not {instead_of}: {len(train):,} training and "
            f"{len(test):,} test images of scikit-learn's 8 x 8 digits, scaled to {SIDE} x {SIDE}, because "
            f"{reason}. For real results, put {instead_of} in a folder and name it with --data-dir or "
            "TWINGRAD_DATA."
        ),
    )


def _digits() -> tuple[NDArray[np.float64], Any]:
    """Return what `load_digits()` does: images (1797, 8, 8) of 0 to 16, and the digits.

    Its file is read without importing scikit-learn, which takes seconds; where the file is elsewhere, it is imported.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ImportError("No module named 'sklearn'")
    try:
        rows = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    except OSError:
        from sklearn.datasets import load_digits

        source = load_digits()
        return source.images, source.target
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]


def bilinear(images: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """Square images (n, s, s) resampled to (n, side, side).

    A pixel's value belongs to its centre; beyond the outermost centres the edge value continues. No value
    leaves the range of the input.
    """
    size = images.shape[1]
    position = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    low = np.minimum(position.astype(np.int64), size - 2)
    part = position - low
    rows = images[:, low] * (1 - part)[:, None] + images[:, low + 1] * part[:, None]
    return rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
