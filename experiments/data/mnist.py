"""MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 x 28 grey values each.

LeCun, Cortes and Burges, *The MNIST database of handwritten digits*; the usual reference is LeCun, Bottou,
Bengio and Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 86(11), 1998.

Files may be gzip-compressed or plain, named `train-images-idx3-ubyte` or `train-images.idx3-ubyte`, and lie
in the data folder itself or in one of `SUBFOLDERS`. Contents are checked by the sha256 of the decompressed
file, so that a file that was unpacked or compressed anew is as good as the original.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.data import idx, reading, sample
from experiments.data.dataset import DataError, Dataset, IncompleteError, Progress, combined_digest
from experiments.data.fetch import RemoteFile
from experiments.data.search import search

OPTIONS: Mapping[str, Any] = {}
"""It has no options: there is one MNIST."""

CLASSES = 10
ROOM = 1_000_000
"""Bytes that are read beyond twice what a file must hold: a small file of gzip can unpack to terabytes."""
SUBFOLDERS = ("", "mnist", "MNIST/raw")  # the last one is where torchvision puts the files

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://raw.githubusercontent.com/fgnt/mnist/master",
)
"""Public copies of the original archives. The original site, yann.lecun.com, answers 403 to downloads."""


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: what it must hold, and how the mirrors hold it."""

    title: str
    name: str
    shape: tuple[int, ...]
    sha256: str
    """Of the decompressed contents."""
    gz_size: int
    gz_sha256: str

    @property
    def size(self) -> int:
        """The bytes of the decompressed contents: the header and one byte for each value."""
        return 4 + 4 * len(self.shape) + math.prod(self.shape)

    @property
    def gz(self) -> RemoteFile:
        """The file to download."""
        return RemoteFile(f"{self.name}.gz", self.gz_size, self.gz_sha256)

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names it may have on disk, in order of preference: plain before gz, because it loads faster."""
        dotted = self.name.replace("-idx", ".idx")
        return self.name, dotted, f"{self.name}.gz", f"{dotted}.gz"


FILES = (  # the order of a dataset's arrays
    IdxFile(
        title="training images",
        name="train-images-idx3-ubyte",
        shape=(60_000, 28, 28),
        sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        gz_size=9_912_422,
        gz_sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    IdxFile(
        title="training labels",
        name="train-labels-idx1-ubyte",
        shape=(60_000,),
        sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        gz_size=28_881,
        gz_sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    IdxFile(
        title="test images",
        name="t10k-images-idx3-ubyte",
        shape=(10_000, 28, 28),
        sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        gz_size=1_648_877,
        gz_sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    IdxFile(
        title="test labels",
        name="t10k-labels-idx1-ubyte",
        shape=(10_000,),
        sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        gz_size=4_542,
        gz_sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)


def load(
    data_dir: str | Path | None = None,
    allow_download: bool = True,
    progress: Progress | None = None,
    files: Sequence[IdxFile] = FILES,
    mirrors: Sequence[str] = MIRRORS,
) -> Dataset:
    """MNIST from the first place that has it (see `experiments.data`), or the embedded digits.

    `files` is the table of what each file must hold, in the order training images and labels, test images and
    labels. Raises `DataError` for files that are present but wrong.
    """
    place = search(
        dataset="mnist",
        title="MNIST",
        find=lambda folder: find(folder, files),
        files=[file.gz for file in files],
        mirrors=mirrors,
        data_dir=data_dir,
        allow_download=allow_download,
        progress=progress,
    )
    if place.found is None:
        return sample.digits("mnist", instead_of="MNIST", reason=place.reason)
    remedy = (
        "Delete it and run again: it will be downloaded anew."
        if place.cached
        else "Put the original file in its place, or name another folder with --data-dir or TWINGRAD_DATA."
    )
    x_train, y_train, x_test, y_test = (_read_in(place.found, file, remedy) for file in files)
    return Dataset(
        name="mnist",
        source="real",
        x_train=_scaled(x_train),
        y_train=y_train.astype(np.int64),
        x_test=_scaled(x_test),
        y_test=y_test.astype(np.int64),
        digest=combined_digest((file.name, file.sha256) for file in files),
        origin=str(place.found),
    )


def find(folder: Path, files: Sequence[IdxFile] = FILES) -> Path | None:
    """The folder among the `SUBFOLDERS` of `folder` that holds all of `files`; None when none is there.

    Raises `IncompleteError` when only some are there.
    """
    incomplete = None
    for subfolder in SUBFOLDERS:
        candidate = folder / subfolder
        missing = [file for file in files if reading.first_file(_paths_of(candidate, file)) is None]
        if not missing:
            return candidate
        if len(missing) < len(files) and incomplete is None:
            incomplete = IncompleteError(
                f"{candidate} holds only {len(files) - len(missing)} of MNIST's {len(files)} files. "
                f"Missing, plain or gz: {', '.join(file.gz.name for file in missing)}. "
                "Copy them there, or name another folder"
            )
    reading.refuse_others((folder / subfolder for subfolder in SUBFOLDERS), folder=True)
    for subfolder in SUBFOLDERS:
        reading.refuse_others(path for file in files for path in _paths_of(folder / subfolder, file))
    if incomplete is not None:
        raise incomplete
    return None


def _paths_of(folder: Path, file: IdxFile) -> list[Path]:
    """Where `file` may be in `folder`, under all of its spellings."""
    return [folder / spelling for spelling in file.spellings]


def _read_in(folder: Path, file: IdxFile, remedy: str) -> NDArray[np.uint8]:
    return read(reading.first_file(_paths_of(folder, file)) or folder / file.gz.name, file, remedy)


def read(path: Path, file: IdxFile, remedy: str = "") -> NDArray[np.uint8]:
    """The array in `path`, which must be exactly the one that `file` describes.

    Raises `DataError` naming the path, what is wrong with it, both digests and the `remedy`.
    """
    most = 2 * file.size + ROOM
    stored = reading.contents(path, most)

    def wrong(reason: object, expected: str, found: str) -> DataError:
        return DataError(
            f"{path} is not the file of MNIST's {file.title}: {reason}.\n"
            f"  expected sha256 {expected}\n"
            f"  found sha256    {found}\n"
            f"{remedy}".rstrip()
        )

    contents, of_contents = stored, ""
    if path.suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(stored)) as packed:
                contents, of_contents = packed.read(most + 1), " (decompressed)"
        except reading.DAMAGED as error:
            raise wrong(f"corrupt gzip: {error}", file.gz_sha256, _sha256(stored)) from error
        if len(contents) > most:
            raise wrong(f"it unpacks to more than {most:,} bytes", file.gz_sha256, _sha256(stored))
    found = _sha256(contents)
    try:
        array = idx.parse(contents, file.shape)
        if array.ndim == 1 and array.max(initial=0) >= CLASSES:
            row = int(np.argmax(array >= CLASSES))
            raise ValueError(f"row {row + 1:,} has label {array[row]}; labels are 0 to {CLASSES - 1}")
        if found != file.sha256:
            raise ValueError("its form is right but its contents differ from the original's")
    except ValueError as error:
        raise wrong(error, file.sha256 + of_contents, found + of_contents) from error
    return array


def _scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Grey values 0..255 (n, 28, 28) as float32 in [0, 1] (n, 784)."""
    return np.divide(images.reshape(len(images), -1), np.float32(255), dtype=np.float32)


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
