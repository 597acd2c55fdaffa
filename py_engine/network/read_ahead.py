"""Asking for rows of a file that is mapped into memory before they are needed: no step waits for the disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["mapped_file", "reading_ahead"]

WINDOW = 64 * 1024 * 1024
"""Bytes of rows that are asked for at a time, one such window before the first of them is gathered."""

GAP = 64 * 1024
"""Bytes between two rows up to which they are asked for together, with what lies between them."""

PIECE = 128 * 1024
"""Bytes per request: the system may read only the beginning of a larger one."""


def mapped_file(array: NDArray[Any]) -> tuple[str, int] | None:
    """Return the file that a C-contiguous array maps, and the place of its first byte there; None for any other.

    None, too, where the array has its own copy of what is written to it (`mmap_mode="c"`).
    """
    root: Any = array
    # A view of a mapping is a mapping, too, which says nothing of its place: the one that was opened does.
    while root is not None and (not isinstance(root, np.memmap) or isinstance(root.base, np.memmap)):
        root = getattr(root, "base", None)
    if root is None or root.filename is None or root.mode == "c" or not array.flags.c_contiguous:
        return None
    if not _is_file_at(str(root.filename), root.ctypes.data):
        return None
    return str(root.filename), int(root.offset) + array.ctypes.data - root.ctypes.data


def _is_file_at(path: str, address: int) -> bool:
    """Whether the file of this name is what is mapped there: it may have been removed or replaced since."""
    try:
        about = os.stat(path)
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:  # names of files may be any bytes
            for line in lines:
                places, _, _, _, number, *_ = line.split(maxsplit=5)
                start, _, end = places.partition("-")
                if int(start, 16) <= address < int(end, 16):
                    return int(number) == about.st_ino
    except OSError:
        pass
    return False


@contextmanager
def reading_ahead(array: NDArray[Any], rows: NDArray[Any]) -> Iterator[Callable[[int], int]]:
    """Give what is to be called with a place in `rows` before the rows from there on are gathered.

    It returns the place at which it is to be called again. It asks the system for the rows of the next window, sorted,
    those close to each other in one request. Of a file in memory already the requests would only cost time: they
    are made as long as the process reads from the disk. An array that maps no file costs nothing.
    """
    found = mapped_file(array)
    if found is None or not len(array) or not array.nbytes:
        yield lambda place: len(rows)
        return
    path, start = found
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # it was removed, and is there only as long as it is mapped
        yield lambda place: len(rows)
        return
    try:
        yield _Windows(file, start, array.nbytes // len(array), rows).reached
    finally:
        os.close(file)


class _Windows:
    """The windows of `rows`, each of `size` bytes from `start` of the file on, that have been asked for so far."""

    def __init__(self, file: int, start: int, size: int, rows: NDArray[Any]) -> None:
        self._file, self._start, self._size, self._rows = file, start, size, rows
        self._each = max(1, WINDOW // size)
        self._next = 0
        self._blocks = -1

    def reached(self, place: int) -> int:
        while self._next < len(self._rows) and self._next <= place + self._each:
            blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
            if blocks != self._blocks:
                self._ask(self._rows[self._next : self._next + self._each])
            self._blocks = blocks
            self._next += self._each
        return place + max(1, self._each // 4)

    def _ask(self, rows: NDArray[Any]) -> None:
        first = np.sort(rows) * self._size + self._start
        apart = np.flatnonzero(np.diff(first) > self._size + GAP) + 1
        starts = first[np.append(0, apart)]
        ends = first[np.append(apart, len(first)) - 1] + self._size
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            for place in range(start, end, PIECE):
                os.posix_fadvise(self._file, place, min(PIECE, end - place), os.POSIX_FADV_WILLNEED)
