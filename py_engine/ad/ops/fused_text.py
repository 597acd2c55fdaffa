"""Texts under a convolution and a pool: an embedding whose rows never exist as a gradient.

What the technique `fuse` makes of word vectors that are convolved along the text and pooled. A pool sends its gradient
to one place of each window, so that hardly anything of the gradient by the convolution's input is not zero, and many
words of a batch are the same. Both are used: the few numbers that there are, are added up for each different word of
the batch, kernel place and filter, and the gradients by the kernel and by the embedding are products with these sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from py_engine.ad.op import COUNTED, Call, Op, Scratch, Shape, c_ordered, common_dtype, define, here, nbytes
from py_engine.ad.ops.indexing import check_ids, ids_checked
from py_engine.ad.ops.pooling import slide
from py_engine.ad.tensor import Array, Tensor

# The different words of a batch ---------------------------------------------------------------------------


def _bind_words(arrays: Sequence[Array], out: Array, scratch: Scratch, vocabulary: int) -> Sequence[Call]:
    ids = arrays[0].reshape(-1)
    room = out.size - 1 - ids.size
    count, words, places = out[:1], out[1 : 1 + room], out[1 + room :]
    ranks = scratch((vocabulary,), np.int64)
    return [
        partial(np.ndarray.fill, ranks, 0),
        partial(np.ndarray.__setitem__, ranks, ids, 1),
        partial(np.add.accumulate, ranks, 0, None, ranks),
        partial(np.copyto, count, ranks[-1:]),
        partial(np.ndarray.take, ranks, ids, 0, places, "clip"),
        partial(np.subtract, places, 1, places),
        partial(np.ndarray.fill, words, 0),
        partial(np.ndarray.__setitem__, words, places, ids),
    ]


WORDS: Op = define(
    name="words",
    infer=lambda ids, vocabulary: ((1 + min(ids.size, vocabulary) + ids.size,), ids.dtype),
    bind=_bind_words,
    constant=True,
    accepts=c_ordered,
    keeps_ids=True,
    fused=True,
    doc="packed unique(ids): count, sorted ids, padding, inverse indices",
)


def different(words: Array) -> Array:
    """Return the different ids in the result of `WORDS`."""
    return words[1 : 1 + int(words[0])]


# Sums of the gradient of a pool, for each word -------------------------------------------------------------


def _infer_sums(
    g: Tensor, phases: Tensor, y: Tensor, words: Tensor, kernel: int, length: int, stride: int
) -> tuple[Shape, Any]:
    filters, samples = g.shape[:2]
    return (words.size - 1 - samples * length, kernel * filters), g.dtype


def _bind_sums(
    arrays: Sequence[Array], out: Array, scratch: Scratch, kernel: int, length: int, stride: int
) -> Sequence[Call]:
    g, phases, y, words = arrays
    filters, samples, counts = g.shape
    window = len(phases)
    # Which place of each window was the first of the largest: the smallest number, those of all others being larger.
    differs = scratch((window, g.size), np.bool_)
    numbers = differs.view(np.uint8)
    first = scratch((g.size,), np.uint8)
    which = np.arange(window, dtype=np.uint8)[:, np.newaxis]
    calls: list[Call] = [
        partial(np.not_equal, phase, y, mask.reshape(y.shape)) for phase, mask in zip(phases, differs, strict=True)
    ]
    calls += [
        partial(np.multiply, numbers, np.uint8(window), numbers),
        partial(np.add, numbers, which, numbers),
        partial(np.minimum.reduce, numbers, 0, None, first),
        partial(_take_first_nan, phases, y, first.reshape(y.shape)),
    ]
    at_window = np.arange(samples)[:, np.newaxis] * length + np.arange(counts) * stride
    starts = np.tile(at_window.reshape(-1), filters)
    filter_of = np.repeat(np.arange(filters), samples * counts)
    places, cells, into = (scratch(shape, np.int64) for shape in (starts.shape, (samples * length,), starts.shape))
    calls += [
        partial(np.copyto, places, first),
        partial(np.add, places, starts, places),
        partial(np.multiply, words[1 + len(out) :], out.shape[1], cells),
        partial(np.ndarray.fill, out, 0),
    ]
    for k in range(kernel):
        calls += [
            partial(np.ndarray.take, cells[k:], places, 0, into, "clip"),
            partial(np.add, into, filter_of, into),
            partial(np.add.at, out.reshape(-1)[k * filters :], into, g.reshape(-1)),
        ]
    return calls


def _take_first_nan(phases: Array, y: Array, first: Array) -> None:
    """Write to `first` the place of the first NaN where the largest is NaN, which equals nothing."""
    if np.isnan(np.max(y, initial=-np.inf)):
        windows = np.isnan(y)
        first[windows] = np.argmax(np.isnan(phases[:, windows]), 0)


WORD_SUMS: Op = define(
    name="word_sums",
    infer=_infer_sums,
    bind=_bind_sums,
    accepts=c_ordered,
    fused=True,
    doc="a pool's gradient added up for each different word (room, kernel * filters), from the pool's phases",
)


def _bind_kernel_gradient(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    sums, weight, words = arrays
    memory = scratch((len(sums), weight.shape[1]), weight.dtype)
    return [partial(_kernel_product, sums, weight, words, memory, out)]


def _kernel_product(sums: Array, weight: Array, words: Array, memory: Array, out: Array) -> None:
    ids = different(words)
    rows = memory[: len(ids)]
    weight.take(ids, 0, rows, "clip")
    np.matmul(sums[: len(ids)].T, rows, out)


COUNTED[_kernel_product] = lambda sums, weight, words, memory, out: 2 * int(words[0]) * out.size


def _bind_weight_gradient(
    arrays: Sequence[Array], out: Array, scratch: Scratch, vocabulary: int, padding_index: int
) -> Sequence[Call]:
    sums, kernel, words = arrays
    memory = scratch((len(sums), kernel.shape[1]), kernel.dtype)
    calls: list[Call] = [partial(np.ndarray.fill, out, 0), partial(_weight_product, sums, kernel, words, memory, out)]
    if padding_index >= 0:
        calls.append(partial(np.ndarray.fill, out[padding_index], 0))
    return calls


def _weight_product(sums: Array, kernel: Array, words: Array, memory: Array, out: Array) -> None:
    ids = different(words)
    out[ids] = np.matmul(sums[: len(ids)], kernel, memory[: len(ids)])


COUNTED[_weight_product] = lambda sums, kernel, words, memory, out: 2 * int(words[0]) * kernel.size


def _sum_word_rows(
    shards: Sequence[Sequence[Array]], out: Array, zeroed: bool, vocabulary: int, padding_index: int
) -> tuple[list[list[Call]], list[list[Call]]]:
    """See `Op.sum_rows`. Every thread puts all rows of a part of the vocabulary in their places.

    So none waits for another, and none writes where another does.
    """
    edges = [vocabulary * k // len(shards) for k in range(len(shards) + 1)]
    left = [(words, np.empty((len(sums), out.shape[1]), out.dtype)) for sums, _, words in shards]
    most = max((rows for _, rows in left), key=len)
    leave: list[list[Call]] = []
    add: list[list[Call]] = []
    for (start, stop), (sums, kernel, words), (_, rows) in zip(pairwise(edges), shards, left, strict=True):
        leave.append([] if zeroed else [partial(out[start:stop].fill, 0)])
        leave[-1].append(partial(_rows_by_word, sums, kernel, words, rows))
        add.append([partial(_put_rows, left, start, stop, out, np.empty_like(most))])
        if start <= padding_index < stop:
            add[-1].append(partial(out[padding_index].fill, 0))
    return leave, add


def _rows_by_word(sums: Array, kernel: Array, words: Array, rows: Array) -> None:
    count = int(words[0])
    np.matmul(sums[:count], kernel, rows[:count])


def _put_rows(left: Sequence[tuple[Array, Array]], start: int, stop: int, out: Array, memory: Array) -> None:
    """Add rows of different words into those rows of `out`, all zeros, that lie between `start` and `stop`."""
    for k, (words, rows) in enumerate(left):
        ids = different(words)
        first, last = np.searchsorted(ids, (start, stop))
        found, added = ids[first:last], rows[first:last]
        if k:
            total = memory[: len(found)]
            out.take(found, 0, total, "clip")
            added = np.add(total, added, total)
        out[found] = added


WORD_KERNEL_GRADIENT: Op = define(
    name="word_kernel_gradient",
    infer=lambda sums, weight, words: ((sums.shape[1], weight.shape[1]), common_dtype((sums, weight))),
    bind=_bind_kernel_gradient,
    bytes=lambda sums, weight, words: sums.shape[1] * weight.shape[1] * weight.dtype.itemsize,  # and rows of both
    accepts=c_ordered,
    reads_rows=True,
    fused=True,
    doc="gradient of word_phases by its kernel, from the sums for each word",
)
WORD_GRADIENT: Op = define(
    name="word_gradient",
    infer=lambda sums, kernel, words, vocabulary, padding_index: (
        (vocabulary, kernel.shape[1]),
        common_dtype((sums, kernel)),
    ),
    bind=_bind_weight_gradient,
    sum_rows=_sum_word_rows,
    accepts=c_ordered,
    fused=True,
    doc="gradient of word_phases by its word vectors, from the sums for each word",
)


# Word vectors under a moving kernel -------------------------------------------------------------------------


def _infer_phases(
    weight: Tensor, kernel: Tensor, ids: Tensor, places: int, window: int, stride: int, padding_index: int
) -> tuple[Shape, Any]:
    samples, length = ids.shape
    counts = (length - places + 1 - window) // stride + 1
    return (window, len(kernel) // places, samples, counts), common_dtype((weight, kernel))


def _bytes_of_phases(weight: Tensor, kernel: Tensor, ids: Tensor, **at: int) -> int:
    """Those of the rows that are looked up, once for each id, and not of the whole matrix."""
    out = math.prod(_infer_phases(weight, kernel, ids, **at)[0])
    return nbytes(ids) + nbytes(kernel) + (ids.size * weight.shape[1] + out) * weight.dtype.itemsize


def _bind_phases(
    arrays: Sequence[Array], out: Array, scratch: Scratch, places: int, window: int, stride: int, padding_index: int
) -> Sequence[Call]:
    weight, kernel, ids = arrays
    rows = scratch((ids.size, weight.shape[1]), weight.dtype)
    checked = partial(check_ids, ids, len(weight), here("embedding"))
    gather = partial(np.ndarray.take, weight, ids.reshape(-1), 0, rows, "clip")
    return [checked, gather, *slide(rows, kernel, out, scratch, places, stride)]


WORD_PHASES: Op = define(
    name="word_phases",
    infer=_infer_phases,
    bind=_bind_phases,
    accepts=c_ordered,
    reads_rows=True,
    checks=lambda weight, kernel, ids, **at: ids_checked(ids, weight.shape[0]),
    bytes=_bytes_of_phases,
    fused=True,
    doc="a kernel (places * filters, dimension) moved over the word vectors of texts (N, T), by phase",
)
