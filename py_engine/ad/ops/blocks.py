"""Ops of many samples in blocks whose arrays stay in the caches, and the expected cost of a lowering."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from py_engine.ad.op import Call, Scratch, Shape
from py_engine.ad.tensor import Array


def work(products: int, moved: int) -> int:
    """Return the expected cost of a lowering, in multiplications of a matrix product.

    Args:
        products: multiplications of its matrix products.
        moved: elements that it copies or adds, in short pieces of memory. One costs as much as some 24 products:
            measured with float32 on one core.
    """
    return products + 24 * moved


def _second_level_cache() -> int:
    """Return the bytes of a core's second-level cache, from 256 KiB to 2 MiB; 1 MiB where the system doesn't say."""
    try:
        kibibytes = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text("ascii").strip().removesuffix("K")
        return min(max(int(kibibytes) * 1024, 2**18), 2**21)
    except (OSError, ValueError):
        return 2**20


BLOCK_BYTES = min(2 * _second_level_cache(), 2**21)
"""Bytes that ops of many samples work on at a time: from one call to the next they stay in the caches.

Blocks that fit into half of the second level are no faster with one thread, and slower with several: after each call
a thread waits for the interpreter.
"""


LONGEST_RUN = 1024
"""Bytes: longer runs are copied as fast number by number."""

ACROSS = 32
"""Elements of a row that a transposed copy writes at a time: as many lines of the other array stay in a cache."""

LEAST_ACROSS = (2**8, 2**14)
"""Elements of a row, and in all, from which on a transposed copy is made in parts: fewer lines stay there anyway."""


def copies(into: Array, x: Array) -> list[Call]:
    """Return the calls that copy `x` into an array of its shape; both are of numbers.

    `np.copyto` takes 5 ns for each run of numbers, however short. Where both arrays have the same runs, each is copied
    as one element of so many bytes: windows of 6 to 30 columns take 0.4 to 0.65 times as long. Where rows of one are
    columns of the other it reads another cache line for each number. With 32 columns at a time the lines are still
    there for the next rows: 2,400 by 256 numbers take a quarter of the time. The copy is exact either way.
    """
    if into.dtype == x.dtype:
        first = _first_of_run(into, x)
        run = math.prod(into.shape[first:])
        if 1 < run < into.size and run * into.itemsize <= LONGEST_RUN:
            into, x = (_by_runs(array, first) for array in (into, x))
    across = into.ndim > 1 and into.strides[-1] == into.itemsize and x.strides[-1] > x.itemsize in x.strides[:-1]
    if not across or into.shape[-1] < LEAST_ACROSS[0] or into.size < LEAST_ACROSS[1]:
        return [partial(np.copyto, into, x)]
    parts = [(..., slice(start, start + ACROSS)) for start in range(0, into.shape[-1], ACROSS)]
    return [partial(np.copyto, into[part], x[part]) for part in parts]


def _first_of_run(into: Array, x: Array) -> int:
    """Return the axis from which on both arrays, of one shape, are in one piece."""
    first, step = into.ndim, into.itemsize
    while first and (into.shape[first - 1] == 1 or into.strides[first - 1] == x.strides[first - 1] == step):
        first -= 1
        step *= into.shape[first]
    return first


def _by_runs(x: Array, first: int) -> Array:
    """Return a view whose elements are what is in one piece from an axis on."""
    run = math.prod(x.shape[first:])
    return np.reshape(x, (*x.shape[:first], run), copy=False).view(f"V{run * x.itemsize}")[..., 0]


def blocks(samples: int, each: int, least: int = 1) -> list[slice]:
    """Return slices of `samples` of equal length, with `each` bytes a sample.

    They have `BLOCK_BYTES` at most, or `least` samples if these have more.
    """
    most = min(max(BLOCK_BYTES // max(each, 1), least), samples)
    size = next((n for n in range(most, 0, -1) if samples % n == 0), 1)
    return [slice(start, start + size) for start in range(0, samples, size)]


def about_equal_blocks(samples: int, each: int) -> list[slice]:
    """Return slices of `samples` of about equal length, with `each` bytes a sample and `BLOCK_BYTES` at most.

    Their lengths differ by one at most, where those of `blocks` are all equal: one sample, if there is a prime number.
    """
    count = min(max(-(-samples * each // BLOCK_BYTES), 1), max(samples, 1))
    return [slice(samples * i // count, samples * (i + 1) // count) for i in range(count)]


def same_scratch(scratch: Scratch) -> Iterator[Scratch]:
    """Yield ways to take scratch memory that all give the same arrays, for calls that are bound several times alike.

    The first takes them from `scratch`; each must be used before the next.
    """
    memory: list[Array] = []

    def first(shape: Shape, dtype: Any) -> Array:
        memory.append(scratch(shape, dtype))
        return memory[-1]

    def later(arrays: Iterator[Array], shape: Shape, dtype: Any) -> Array:
        return next(arrays)

    yield first
    while True:
        yield partial(later, iter(memory))


def in_blocks(
    samples: int, each: int, scratch: Scratch, bind: Callable[[slice, Scratch], Sequence[Call]], least: int = 1
) -> list[Call]:
    """Return the calls that `bind` gives for each of the `blocks` in turn, all with the same scratch memory."""
    calls: list[Call] = []
    for block, same in zip(blocks(samples, each, least), same_scratch(scratch), strict=False):
        calls += bind(block, same)
    return calls
