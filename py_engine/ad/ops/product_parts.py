"""Products of matrices in parts, which BLAS multiplies as they lie.

Before BLAS multiplies, it copies both matrices as its kernels read them; where one of them is small, that takes up to
ten times as long as multiplying. For AVX-512 numpy's OpenBLAS has kernels that multiply small matrices without copies.
So a product is computed as many small ones here, by one call of `np.matmul` on stacks of parts:

- one of few rows, those of a loop or of a small batch, some columns at a time;
- a larger one, or a stack of them, in tiles of some rows and columns, where it is known before that BLAS has one thread
  (`STATE.one_blas_thread`): its threads would not share the tiles.

Whether and how follows from shapes, from how the matrices lie, from threads and cores and from BLAS's kernels, and not
from times, so that the same product gives the same numbers in every run on a machine.
"""

from __future__ import annotations

import os
from functools import cache, lru_cache, partial

import numpy as np
from threadpoolctl import ThreadpoolController

from py_engine.ad.state import STATE
from py_engine.ad.tensor import FLOATS, Array

FEW_ROWS = 32
"""Rows of a left matrix, at most, that are few: BLAS takes longer to copy the right one as its kernels read it than to
multiply. They are those of a loop, and of a small batch."""

NO_COPIES = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""The kernels of OpenBLAS, for AVX-512, that multiply small matrices as they lie, without a copy."""

SMALL, SMALL_TRANSPOSED, LEAST_SUMMED = 1_000_000, 1_200, 32
"""Multiplications of a product, at most, that they take for small; by a transposed matrix also elements of the result,
at most, and summands, at least. (OpenBLAS's `sgemm_small_kernel_permit` and its like.)"""

LEAST_WORK, LEAST_TILED = 50_000, 3_000_000
"""Multiplications of a product, at least, that is computed some columns at a time, and of one in tiles that is cut up
when it is called."""

MOST_COLUMNS, LEAST_COLUMNS, LEAST_TRANSPOSED, MOST_BYTES = 64, 48, 8, 2**23
"""Columns that are multiplied at once: at most; at least; at least of a transposed matrix, whose columns lie in one
piece; and bytes of one that is not, at most: each of its rows is in another page."""

MOST_CORES = 4
"""Of the process, up to which large products are computed some columns at a time, by one thread, where BLAS may have
more. With two cores that costs about as much as by BLAS's threads, or less; more cores were not tried, and many threads
are likely to be faster."""

FEW, MANY = 64, 256
"""Rows or columns of a result, at most, that are few, so that copies take long beside the product; and rows above which
they do not."""

MOST_SUMMED, MOST_SUMMED_OF_MANY, MOST_SUMMED_OF_TRANSPOSED = (6400, 3200), 1024, 512
"""Bytes of the summands of an element, at most, in tiles, since more of them leave too few elements to a tile: of a
result with few rows or columns, and of another; with many rows; and where the left matrix is transposed, as for the
gradient of a weight, whose summands are samples."""

LEAST_SUMMED_BY_TRANSPOSED = 128
"""Summands of an element, at least, in tiles by a transposed matrix, of which the kernels multiply less at once."""

MOST_ROWS, MOST_ROWS_BY_TRANSPOSED = 128, 32
"""Rows of a tile, at most, and by a transposed matrix."""

LEAST_ROWS, LEAST_ROWS_OF_FEW, LEAST_ROWS_OF_TRANSPOSED = 12, 8, 32
"""Rows of a tile, at least: with fewer, the right matrix is read too often. Of a result with few rows or columns; and
where the left matrix is transposed."""

LONG_ROW = 512
"""Columns from which on the product of a column and a row is computed row by row: BLAS, which writes blocks of rows and
columns, took 0.8 to 4 times as long. Shorter rows cost more than they save."""


@cache
def _multiplies_without_copies() -> bool:
    """Whether numpy's BLAS has kernels that multiply small matrices as they lie."""
    pools = ThreadpoolController().select(internal_api="openblas").info()
    of_numpy = [pool for pool in pools if "numpy" in pool["filepath"]] or pools
    return bool(of_numpy) and all(pool["architecture"] in NO_COPIES for pool in of_numpy)


@cache
def _cores() -> int:
    """How many cores the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_off() -> bool:
    """Whether the technique is off in what is being bound or run."""
    return STATE.techniques is not None and not STATE.techniques.product_parts


# Some columns at a time -----------------------------------------------------------------------------------


def columns_at_once(a: Array, b: Array, out: Array) -> int:
    """How many columns of `b` are multiplied at a time, so that BLAS copies nothing; 0: all, since it does not or may.

    With one thread, products of 2 to 32 rows took 0.1 to 0.97 times the time so.
    """
    if not (a.ndim == b.ndim == 2 and 1 < a.shape[0] <= FEW_ROWS and a.dtype in FLOATS):
        return 0
    (rows, summed), columns, size = a.shape, b.shape[1], b.itemsize
    work = rows * summed * columns
    if summed < LEAST_SUMMED or work < LEAST_WORK or not a.strides[1] == out.strides[1] == size:
        return 0
    most = min(MOST_COLUMNS, SMALL // (rows * summed))
    if b.strides[0] == size:
        is_small = work <= SMALL and rows * columns <= SMALL_TRANSPOSED
        most, least = min(most, SMALL_TRANSPOSED // rows), LEAST_TRANSPOSED
    elif b.strides[1] == size and b.nbytes <= MOST_BYTES:
        is_small, least = work <= SMALL, LEAST_COLUMNS
    else:
        return 0
    if is_small or not _multiplies_without_copies() or _is_off():
        return 0
    if work > SMALL and _cores() > MOST_CORES and not STATE.one_blas_thread:
        return 0
    if a.strides == b.strides[::-1] and np.may_share_memory(a, b):
        return 0  # a matrix by its own transpose, of which BLAS computes one half
    return next((count for count in range(most, least - 1, -1) if columns % count == 0), 0)


def in_columns(a: Array, b: Array, out: Array) -> tuple[Array, Array, Array]:
    """Return two matrices and their product for `np.matmul`: as they are or, where that is faster, as stacks of parts.

    A part is some columns of `b` and of `out`.
    """
    count = columns_at_once(a, b, out)
    if not count:
        return a, b, out
    of_b, of_out = (x.reshape(len(x), -1, count).transpose(1, 0, 2) for x in (b, out))
    return a, of_b, of_out


def multiply_column_by_row(a: Array, b: Array, out: Array) -> None:
    """Write the product of a matrix of one column and one of one row, which `np.matmul` multiplies without BLAS.

    A single row or column is not left to BLAS, which takes zero times infinity for zero there.
    """
    if out.dtype in FLOATS and (len(b[0]) >= LONG_ROW or 1 in out.shape):
        np.einsum("i,j->ij", a[:, 0], b[0], out=out)
    else:
        np.dot(a, b, out)


def multiply_in_columns(a: Array, b: Array, out: Array) -> None:
    """Leave the product of two matrices in `out`, computed some columns at a time where that is faster."""
    np.matmul(*in_columns(a, b, out))


# In tiles -------------------------------------------------------------------------------------------------


def in_tiles(a: Array, b: Array, out: Array) -> tuple[Array, Array, Array]:
    """Return two matrices, or stacks, and their product for `np.matmul`, as stacks of tiles where that is faster."""
    rows, columns = _tile_of(a, b, out)
    if not rows:
        return a, b, out
    of_a = a.reshape(*a.shape[:-2], a.shape[-2] // rows, 1, rows, a.shape[-1])
    of_b = b.reshape(*b.shape[:-1], b.shape[-1] // columns, columns).swapaxes(-2, -3)[..., None, :, :, :]
    of_out = out.reshape(*out.shape[:-2], of_a.shape[-4], rows, of_b.shape[-3], columns).swapaxes(-2, -3)
    return of_a, of_b, of_out


def multiply_in_tiles(a: Array, b: Array, out: Array) -> None:
    """Leave the product of two matrices in `out`, computed some columns at a time or in tiles where that is faster."""
    np.matmul(*(in_columns if columns_at_once(a, b, out) else in_tiles)(a, b, out))


def bind_product(a: Array, b: Array, out: Array) -> partial[None]:
    """Return the call that leaves a product in `out`.

    That of two matrices is given them whole, so that threads can share them out, and makes the parts when it is called.
    """
    if STATE.one_blas_thread and _tile_of(a, b, out)[0]:
        return partial(multiply_in_tiles, a, b, out) if out.ndim == 2 else partial(np.matmul, *in_tiles(a, b, out))
    return partial(multiply_in_columns if columns_at_once(a, b, out) else np.matmul, a, b, out)


def needs_no_copies(rows: int, summed: int, columns: int, size: int, *, by_transposed: bool = False) -> bool:
    """Whether such matrices, of numbers of `size` bytes, are multiplied well as they lie: in tiles, or whole.

    Both are in C order, or the right one is the transpose of one that is.
    """
    if not STATE.one_blas_thread or not _multiplies_without_copies() or _is_off():
        return False
    of_b = (size, summed * size) if by_transposed else (columns * size, size)
    is_small = rows * summed * columns <= SMALL and columns >= LEAST_COLUMNS and not by_transposed
    return is_small or _tile(rows, summed, columns, (summed * size, size), of_b, size)[0] > 0


def _tile_of(a: Array, b: Array, out: Array) -> tuple[int, int]:
    """The rows and columns of a tile; 0 where a product is not computed in tiles."""
    (rows, summed), columns = a.shape[-2:], b.shape[-1]
    if (
        (out.ndim == 2 and out.size * summed < LEAST_TILED)
        or a.dtype not in FLOATS
        or not _multiplies_without_copies()
        or _is_off()
    ):
        return 0, 0
    if a.strides[-2:] == b.strides[:-3:-1] and np.may_share_memory(a, b):
        return 0, 0  # a matrix by its own transpose, of which BLAS computes one half
    if out.strides[-1] != out.itemsize or out.strides[-2] < columns * out.itemsize:
        return 0, 0
    return _tile(rows, summed, columns, a.strides[-2:], b.strides[-2:], a.itemsize)


@lru_cache(maxsize=4096)
def _tile(
    rows: int, summed: int, columns: int, of_a: tuple[int, int], of_b: tuple[int, int], size: int
) -> tuple[int, int]:
    """See `_tile_of`; `of_a` and `of_b` are strides. With one thread tiles took 0.46 to 1.04 times the time."""
    if not summed or (rows * summed * columns <= SMALL and (of_b[0] != size or rows * columns <= SMALL_TRANSPOSED)):
        return 0, 0  # nothing to multiply, or multiplied without copies as it is
    rows_of_a, rows_of_b = of_a[1] == size and of_a[0] >= summed * size, of_b[1] == size and of_b[0] >= columns * size
    few = min(rows, columns) <= FEW
    most_summed = MOST_SUMMED[0] if few else MOST_SUMMED[1] if rows <= MANY else MOST_SUMMED_OF_MANY
    if rows_of_a and of_b[0] == size and of_b[1] >= summed * size:
        height = _divisor(rows, MOST_ROWS_BY_TRANSPOSED)
        width = _divisor(columns, min(MOST_COLUMNS, SMALL_TRANSPOSED // height, SMALL // (height * summed)))
        fits = min(height, width) >= LEAST_TRANSPOSED and summed >= LEAST_SUMMED_BY_TRANSPOSED
        fits = fits and summed * size <= most_summed and (few or rows <= MANY)
    elif rows_of_b and (rows_of_a or (of_a[0] == size and of_a[1] >= rows * size)):
        width = _divisor(columns, MOST_COLUMNS)
        height = _divisor(rows, min(MOST_ROWS, SMALL // (summed * width)))
        least = (LEAST_ROWS_OF_FEW if few else LEAST_ROWS) if rows_of_a else LEAST_ROWS_OF_TRANSPOSED
        fits = width >= LEAST_COLUMNS and height >= least
        fits = fits and summed * size <= (most_summed if rows_of_a else MOST_SUMMED_OF_TRANSPOSED)
    else:
        return 0, 0
    return (height, width) if fits else (0, 0)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`; 0 where that is below 1."""
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 0)
