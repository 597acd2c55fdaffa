"""Memory: arrays that start on a cache line, and their parts that do; freed memory, kept for the next gradient.

A gradient taken eagerly holds all values of the forward pass and frees them at once. The C library then gives them
back to the system, page by page, only to fetch them again for the next gradient: that costs several times the
arithmetic on arrays of 10,000 elements, and twenty times on arrays of 100,000.

The setting is the whole process's, so that it is made with the first eager gradient, not by an import: a process that
only trains networks by tapes, or measures another engine, is left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

KEPT = 256 << 20
"""Bytes that may stay with the process although nothing needs them."""

LARGEST = 32 << 20
"""Bytes: larger arrays go back to the system one by one; the C library allows no more."""

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt, in glibc's malloc.h


def aligned_zeros(size: int) -> NDArray[np.uint8]:
    """Return bytes that are zero and start on a cache line, which numpy alone does not promise."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def segments(length: int, count: int) -> list[slice]:
    """Return about equal parts of `length` elements for at most `count` threads, none of them empty but of no elements.

    All begin at multiples of 16 elements: threads do not share a cache line of float32.
    """
    line = ALIGNMENT // 4
    ends = [length * k // count // line * line for k in range(count)] + [length]
    return [slice(start, stop) for start, stop in pairwise(ends) if start < stop] or [slice(0, 0)]


@cache
def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory; return whether it does.

    Not so with another C library, or where the environment says what malloc shall do.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(TRIM_THRESHOLD, KEPT) and library.mallopt(MMAP_THRESHOLD, LARGEST))
