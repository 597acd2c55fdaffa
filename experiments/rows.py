"""Rows to train on and to predict from: a data set, or files of the user's own, as a model's input wants them."""

from __future__ import annotations

import math
import os
import stat
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge import spec as model_spec
from bridge.errors import shown
from bridge.spec import ModelSpec
from experiments import data, mapped, papers
from experiments.data.dataset import Dataset, array_digest
from experiments.data.reading import DAMAGED_ZIP
from experiments.errors import InputError
from experiments.formats import scientific
from experiments.mapped import UNREADABLE, File, read_npy
from experiments.output import Output
from experiments.progress import download

MOST_BYTES = 16_000_000_000
"""Of all arrays in an .npz together, unpacked."""
MOST_ARRAYS = 100


@dataclass(frozen=True)
class Rows:
    """Rows to work on, with their targets where those are known."""

    x: NDArray[Any]
    y: NDArray[Any] | None
    is_sample: bool = False
    """Whether they are of the embedded sample, on which an accuracy means nothing."""
    files: tuple[File, ...] = ()
    """The files that `x`, and perhaps `y`, map; without any they are in memory."""

    def check(self) -> None:
        """Raise `InputError` if a file that is mapped has changed since it was opened."""
        for file in self.files:
            file.check()

    def digest(self) -> str:
        """Of features and targets: of all that they hold, or of what `mapped.digest` takes of a file."""
        x = mapped.digest(self.x) if self.files else array_digest(self.x)
        return x + array_digest(np.asarray(self.y))


def load_spec(name: str) -> ModelSpec:
    """The spec in a file, or the one of this name that comes with the project."""
    if name.endswith(".toml") or os.sep in name:
        return model_spec.load(name)
    return model_spec.load(papers.model_path(name))


def load_rows(name: str, data_dir: Path | None, spec: ModelSpec, output: Output) -> tuple[Rows, Rows | None]:
    """Training and test rows of a data set or of files, shaped as the spec's input wants them."""
    if name.endswith(".npz"):
        arrays = load_npz(Path(name))
    elif name not in data.LOADERS and mapped.is_mapped(name):
        arrays = mapped.load(Path(name))
    else:
        found = load_dataset(name, "an .npz or .arrow file, a folder of .npy files,", data_dir, output)
        is_sample = found.source == "sample"
        known = Rows(found.x_train, found.y_train, is_sample), Rows(found.x_test, found.y_test, is_sample)
        return fitted(known[0], spec, name), fitted(known[1], spec, name)
    if "x_train" not in arrays or "y_train" not in arrays:
        raise InputError(f"{name}: expected the arrays x_train and y_train, found {', '.join(arrays) or 'none'}")
    training = _rows(arrays["x_train"], arrays["y_train"])
    of_test = {"x_test", "y_test"} & arrays.keys()
    if len(of_test) == 1:
        raise InputError(f"{name}: {of_test.pop()} is alone: give both x_test and y_test, or neither")
    test = _rows(arrays["x_test"], arrays["y_test"]) if of_test else None
    return fitted(training, spec, name), fitted(test, spec, name) if test else None


def _rows(x: NDArray[Any], y: NDArray[Any]) -> Rows:
    return Rows(x, y, files=tuple(File.of(array) for array in (x, y) if isinstance(array, np.memmap)))


def load_dataset(name: str, file: str, data_dir: Path | None, output: Output) -> Dataset:
    """The data set of this name; `file` is the kind of file that could have been meant."""
    if name not in data.LOADERS:
        raise InputError(f"{name}: neither {file} nor a data set ({', '.join(sorted(data.LOADERS))})")
    dataset = data.load(name, data_dir, progress=download(output.console))
    if dataset.line:
        output.say(dataset.line)
    return dataset


def fitted(rows: Rows, spec: ModelSpec, source: str) -> Rows:
    """Rows as the spec reads them, targets as its loss wants them; InputError when they do not allow it."""
    sample = spec.input.sample
    if rows.x.dtype.kind not in "fiub":
        raise InputError(f"{source}: rows must be numbers, found dtype {rows.x.dtype}")
    if spec.input.dtype == "int64" and rows.x.dtype.kind == "f":
        raise InputError(f"{source}: model {spec.name} reads token ids (whole numbers), found dtype {rows.x.dtype}")
    _check_shape(rows.x, sample, "rows", spec, source)
    if rows.files and rows.x.dtype != spec.input.dtype:
        raise InputError(
            f"{source}: model {spec.name} reads {spec.input.dtype}, and the rows are {rows.x.dtype}: a file that is "
            f"mapped is used as it is; write it as {spec.input.dtype}"
        )
    if not len(rows.x):
        raise InputError(f"{source}: there are no rows")
    scale = 'scale them, or take a model whose input.dtype is "float64"'
    x = _as(spec.input.dtype, rows.x.reshape(len(rows.x), *sample), f"{source}: the rows", scale)
    if rows.y is None:
        return replace(rows, x=x)
    if rows.y.ndim == 0 or rows.y.dtype.kind not in "fiub":
        raise InputError(
            f"{source}: expected a label, or numbers, for each row, found {rows.y.dtype} of shape {rows.y.shape}"
        )
    if len(rows.y) != len(x):
        raise InputError(f"{source}: {len(x)} rows but {len(rows.y)} labels")
    target = spec.target
    if target.kind == "classes":
        return replace(rows, x=x, y=np.asarray(rows.y.astype(np.int64) if rows.y.dtype.kind in "iu" else rows.y))
    _check_shape(rows.y, target.shape, "targets", spec, source)
    # No view of a file: one that is asked for again is another array, which would be written out for the worker anew.
    y = _as(spec.dtype, np.array(rows.y.reshape(len(rows.y), *target.shape)), f"{source}: the targets", "scale them")
    return replace(rows, x=x, y=y)


def _check_shape(found: NDArray[Any], sample: Sequence[int], what: str, spec: ModelSpec, source: str) -> None:
    """Raise `InputError` for rows that are no samples of this shape, but for axes that are split or merged."""
    expected = f"model {spec.name} expects {what} of shape ({', '.join(['N', *map(str, sample)])})"
    if found.ndim == 0 or math.prod(found.shape[1:]) != math.prod(sample):
        raise InputError(f"{source}: {expected}, found {found.shape}")
    long, wanted = ([length for length in shape if length != 1] for shape in (found.shape[1:], sample))
    if long != wanted and sorted(long) == sorted(wanted):
        raise InputError(f"{source}: {expected}, found {found.shape}: transpose their axes to that order")


def _as(dtype: str, values: NDArray[Any], what: str, remedy: str) -> NDArray[Any]:
    """The values in C order and in this dtype; `InputError` where one of them is too large for it."""
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(values, dtype=dtype)
    if values.dtype.kind == "f" and found.dtype != values.dtype:
        lost = np.isinf(found) & np.isfinite(values)
        if lost.any():
            row = int(np.argmax(lost.reshape(len(lost), -1).any(axis=1)))
            number = scientific(values[lost][0])
            raise InputError(f"{what} have numbers too large for {dtype}, such as {number} in row {row}; {remedy}")
    return found


def load_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file; `InputError` for any other."""
    try:
        _check_file(path)
        loaded = read_npy(path)
    except UNREADABLE as error:
        raise InputError(f"{path}: not an array that can be read: {shown(str(error))}") from None
    if not isinstance(loaded, np.ndarray):
        raise InputError(f"{path}: holds several arrays; expected an .npy file with one")
    return loaded


def load_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name; `InputError` for any other, and for one that unpacks to too much."""
    try:
        _check_file(path)
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MOST_BYTES:
            raise InputError(f"{path}: unpacks to {size:,} bytes; expected at most {MOST_BYTES:,}")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files[:MOST_ARRAYS]}
    except (*UNREADABLE, *DAMAGED_ZIP, AttributeError) as error:
        raise InputError(f"{path}: not an .npz file that can be read: {shown(str(error))}") from None
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def _check_file(path: Path) -> None:
    """Raise `InputError` for what is no regular file: another would be waited for, or is not to be read twice."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: this is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}")
