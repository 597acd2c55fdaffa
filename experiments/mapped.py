"""Rows in files larger than memory: .npy files of a folder, or an Arrow file, mapped and never read whole."""

from __future__ import annotations

import hashlib
import os
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bridge.errors import shown
from experiments.errors import InputError
from py_engine.network.read_ahead import WINDOW, mapped_file

Array = NDArray[Any]

NAMES = ("x_train", "y_train", "x_test", "y_test")
"""The arrays of a folder: `x_train.npy` and so on. In their place may be `train.arrow` and `test.arrow`."""

BLOCK = 1024 * 1024
"""Bytes of rows that stay together where blocks are shuffled."""

SAMPLED, PIECE = 1000, 16 * 1024
"""Pieces of a file, and their bytes, that its digest is taken of."""

UNREADABLE = (
    *(OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile),
    *(SyntaxError, TokenError, TypeError, IndexError, OverflowError, RecursionError),
)
"""What numpy raises for a damaged .npy file, whose header Python's own tokenizer and parser read."""


@dataclass(frozen=True)
class File:
    """A file that is mapped, as it was when it was opened."""

    path: str
    size: int
    modified: int

    @classmethod
    def of(cls, array: Array) -> File:
        """The file behind a mapped array."""
        found = mapped_file(array)
        assert found is not None
        about = os.stat(found[0])
        return cls(found[0], about.st_size, about.st_mtime_ns)

    def check(self) -> None:
        """Raise `InputError` if it has become another file since."""
        try:
            about = os.stat(self.path)
        except OSError as error:
            raise InputError(f"{self.path}: it can't be found any more ({error.strerror})") from None
        if about.st_size != self.size:
            raise InputError(
                f"{self.path} had {self.size:,} bytes and has {about.st_size:,} now: it was changed while it was in "
                "use; what was trained since then is worth nothing"
            )
        if about.st_mtime_ns != self.modified:
            raise InputError(
                f"{self.path} was written to while it was in use: what was trained since then is worth nothing"
            )


def is_mapped(name: str) -> bool:
    """Whether data of this name are mapped: a folder, or an Arrow file."""
    return name.endswith(".arrow") or os.path.isdir(name)  # which takes names of any length


def load(path: Path) -> dict[str, Array]:
    """Arrays of a folder or of an Arrow file, by the names of `NAMES`; those of the features are mapped."""
    if path.suffix == ".arrow":
        return _of_arrow(path, "train")
    found: dict[str, Array] = {}
    for part in ("train", "test"):
        if os.path.exists(path / f"{part}.arrow"):
            found |= _of_arrow(path / f"{part}.arrow", part)
            continue
        for name in (f"x_{part}", f"y_{part}"):
            if os.path.exists(path / f"{name}.npy"):
                found[name] = _of_npy(path / f"{name}.npy")
    return found


def read_npy(path: Path, mode: Literal["r"] | None = None) -> Any:
    """What numpy reads from an .npy file, mapped with `mode="r"`. Raises one of `UNREADABLE` for a damaged file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a damaged header numpy says that Python 2 wrote it
        return np.load(path, mmap_mode=mode, allow_pickle=False)


def _of_npy(path: Path) -> Array:
    _check_regular(path)
    try:
        array = read_npy(path, "r")
    except UNREADABLE as error:
        raise InputError(
            f"{path}: not an array that can be mapped, damaged, or still being written: {shown(str(error))}"
        ) from None
    if not isinstance(array, np.memmap):
        raise InputError(f"{path}: holds several arrays; expected an .npy file with one")
    if not array.flags.c_contiguous:
        raise InputError(f"{path}: its rows are not one after the other (Fortran order); write it in C order")
    size, expected = path.stat().st_size, int(array.offset) + array.nbytes
    if size != expected:
        raise InputError(
            f"{path} has {size:,} bytes, and {expected:,} by its own header: it is damaged, or still being written"
        )
    return array


def _of_arrow(path: Path, part: str) -> dict[str, Array]:
    """The columns `x` and `y` of an uncompressed Arrow file of one record batch."""
    _check_regular(path)
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        raise InputError(f"{path}: Arrow files are read with pyarrow: pip install 'twingrad[arrow]'") from None
    try:
        with pyarrow.memory_map(str(path)) as file:
            whole = file.read_buffer()
            reader = ipc.open_file(whole)
            if reader.num_record_batches != 1:
                raise InputError(
                    f"{path}: its rows are in {reader.num_record_batches} record batches; write them as one, such as "
                    "by writer.write_table(table, max_chunksize=len(table))"
                )
            batch = reader.get_batch(0)
            found = {f"x_{part}": _column(path, batch, "x", whole)}
            if "y" in batch.schema.names:
                found[f"y_{part}"] = _column(path, batch, "y", whole)
            return found
    except (pyarrow.ArrowException, *UNREADABLE) as error:
        raise InputError(f"{path}: not an Arrow file that can be mapped, or damaged: {shown(str(error))}") from None


def _column(path: Path, batch: Any, name: str, whole: Any) -> Array:
    """A column of numbers, or of lists of as many numbers in every row, as it lies in the file."""
    import pyarrow

    if name not in batch.schema.names:
        raise InputError(f"{path}: expected the columns x and y, found {', '.join(batch.schema.names) or 'none'}")
    if batch.schema.names.count(name) > 1:
        raise InputError(f"{path}: has several columns {name}")
    column = batch.column(name)
    shape: tuple[int, ...] = (len(column),)
    if isinstance(column.type, pyarrow.BaseExtensionType):
        turned = getattr(column.type, "permutation", None)
        if turned is not None and list(turned) != sorted(turned):
            raise InputError(f"{path}: the axes of column {name} are permuted; write it in the order of its shape")
        column = column.storage
    while pyarrow.types.is_fixed_size_list(column.type):
        if column.null_count:
            break
        shape += (column.type.list_size,)
        column = column.flatten()
    if column.null_count or not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)):
        raise InputError(f"{path}: column {name} must be numbers, or lists of as many in every row, without gaps")
    if column.buffers()[1] is None:
        raise InputError(f"{path}: column {name} has no rows")
    dtype = np.dtype(column.type.to_pandas_dtype())
    place = column.buffers()[1].address - whole.address + column.offset * dtype.itemsize
    if not 0 <= place <= whole.size - len(column) * dtype.itemsize:
        raise InputError(f"{path} is compressed, so that its rows can't be mapped; write it without compression")
    return np.memmap(path, dtype, "r", place, shape)


def _check_regular(path: Path) -> None:
    if not os.path.isfile(path):
        raise InputError(f"{path}: {'this is no regular file' if os.path.exists(path) else 'there is no such file'}")


def digest(array: Array) -> str:
    """The sha256 (hex) of a mapped array's shape, dtype and pieces of it, evenly apart: all of it may be terabytes."""
    found = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    values = array.reshape(-1).view(np.uint8)
    last = max(0, len(values) - PIECE)
    for place in np.unique(np.linspace(0, last, SAMPLED).astype(np.int64)).tolist():
        found.update(values[place : place + PIECE].tobytes())
    return found.hexdigest()


def shuffled_blocks(rows: NDArray[np.int64], bytes_per_row: int, seed: list[int]) -> NDArray[np.int64]:
    """The rows in an order that suits a disk: blocks drawn at random, and rows within groups of them.

    A block is about `BLOCK` bytes of rows that lie side by side, and a group about what is read ahead at a time. All
    rows come once; the same seed gives the same order.
    """
    generator = np.random.default_rng(seed)
    each = max(1, BLOCK // bytes_per_row)
    blocks = [rows[start : start + each] for start in range(0, len(rows), each)]
    drawn = [blocks[k] for k in generator.permutation(len(blocks))]
    together = max(1, WINDOW // (each * bytes_per_row))
    groups = (np.concatenate(drawn[start : start + together]) for start in range(0, len(drawn), together))
    return np.concatenate([generator.permutation(group) for group in groups])
