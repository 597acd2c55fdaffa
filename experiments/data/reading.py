"""Reading what lies in a data folder: regular files only, and never more of them than the data set's form allows."""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from experiments.data.dataset import DataError

_ABSENT = (errno.ENOENT, errno.ENOTDIR)

DAMAGED = (OSError, EOFError, zlib.error)
"""What reading a damaged gzip file raises."""

DAMAGED_ZIP = (
    *(*DAMAGED, zipfile.BadZipFile, lzma.LZMAError),
    *(NotImplementedError, RuntimeError),  # an unknown compression, an encrypted member
    UnicodeError,  # a member's name
)
"""What reading a damaged zip file raises, whichever of its compressions it has."""


def first_file(paths: Iterable[Path]) -> Path | None:
    """The first of these that is a regular file, or a link to one; None without any."""
    return next((path for path in paths if (mode := _mode(path)) is not None and stat.S_ISREG(mode)), None)


def refuse_others(paths: Iterable[Path], folder: bool = False) -> None:
    """Raise `DataError` for the first of these that exists and is no regular file (or, with `folder`, no folder).

    For when none serves: what lies in the place of the data is not passed over in favour of a sample.
    """
    expected, is_expected = ("a folder", stat.S_ISDIR) if folder else ("a file", stat.S_ISREG)
    for path in paths:
        mode = _mode(path)
        if mode is None and path.is_symlink():
            raise DataError(f"{path} is a link that leads nowhere; expected {expected}. Correct or remove it")
        if mode is not None and not is_expected(mode):
            raise DataError(f"{path} is {_kind(mode)}; expected {expected}. Put the data in its place, or remove it")


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


@contextmanager
def opened(path: Path, most: int) -> Iterator[io.BufferedReader]:
    """A regular file of at most `most` bytes for reading; `DataError` for anything else."""
    try:
        refuse_others([path])
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise DataError(f"{path} has {size:,} bytes; expected at most {most:,}")
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error


def contents(path: Path, most: int) -> bytes:
    """All of such a file."""
    try:
        with opened(path, most) as file:
            return file.read(most + 1)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


class TooLongError(OSError):
    """Something unpacks to more than its form allows."""


class Bounded(io.RawIOBase):
    """A stream that raises `TooLongError` after `most` bytes: an archive of some kilobytes can hold terabytes."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most, self._count = stream, most, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """The next bytes."""
        read = self._stream.read(len(buffer))
        self._count += len(read)
        if self._count > self._most:
            raise TooLongError(f"it unpacks to more than {self._most:,} bytes")
        buffer[: len(read)] = read
        return len(read)


@contextmanager
def unpacked(path: Path, most_stored: int, most: int) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed where it is gzip by its first two bytes; at most `most` of them."""
    with opened(path, most_stored) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if packed else file
        yield io.BufferedReader(Bounded(stream, most), 1 << 20)  # type: ignore[arg-type]
