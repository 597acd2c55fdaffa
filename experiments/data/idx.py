"""The IDX format of MNIST's files: a header that names type and dimensions, then the raw values.

Bytes 0 and 1 are zero, byte 2 is the type code, byte 3 the number of dimensions; each dimension follows as a
big-endian uint32, then the values in C order. Only unsigned bytes (type 8) are read here; MNIST has no
others.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

UNSIGNED_BYTE = 8


def parse(contents: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array in an IDX file's (decompressed) `contents`: a read-only view, which must have `shape`.

    Raises `ValueError` with what is wrong, in words that follow the file's name and a colon.
    """
    magic = UNSIGNED_BYTE << 8 | len(shape)
    start = 4 + 4 * len(shape)
    found = int.from_bytes(contents[:4], "big")
    if len(contents) >= 4 and found != magic:
        raise ValueError(f"it begins with {found}, expected the IDX magic {magic}")
    if len(contents) < start:
        raise ValueError(f"it is truncated: {len(contents):,} bytes, and the header alone has {start}")
    dimensions = tuple(int(n) for n in np.frombuffer(contents, ">u4", len(shape), offset=4))
    if dimensions != shape:
        raise ValueError(f"it holds {in_words(dimensions)} values, expected {in_words(shape)}")
    expected = start + math.prod(shape)
    if len(contents) != expected:
        what = "is truncated" if len(contents) < expected else "has bytes after its end"
        raise ValueError(f"it {what}: {len(contents):,} bytes where its header means {expected:,}")
    return np.frombuffer(contents, np.uint8, offset=start).reshape(shape)


def in_words(shape: tuple[int, ...]) -> str:
    """A shape as people write it: 60,000 x 28 x 28."""
    return " x ".join(f"{n:,}" for n in shape)
