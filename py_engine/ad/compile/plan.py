"""The memory plan: which values share memory, and where in one arena each lies.

A pure function of what each value needs, so that it can be tested without computing anything. A *storage* is one
piece of memory; views of a value, parts placed inside it, and results that overwrite it share its storage.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from py_engine.ad.memory import ALIGNMENT


@dataclass(frozen=True)
class Value:
    """What the planner knows of one value; values are numbered in the order they are computed.

    Attributes:
        nbytes: the size in bytes.
        reads: the values its computation reads.
        view_of: the value whose memory it is a view of.
        may_overwrite: values it reads whose memory it may take over, if no later step reads them.
        parts: values that can be computed in their places inside this one.
        fixed: it has its own memory outside the arena: inputs, parameters, results.
    """

    nbytes: int
    reads: tuple[int, ...] = ()
    view_of: int | None = None
    may_overwrite: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    fixed: bool = False


@dataclass(frozen=True)
class Plan:
    """Where every value lies.

    Attributes:
        storage: for each value the number of the value that owns its memory.
        offset: for each owner inside the arena its first byte.
        placed: for each part computed in its place the value that contains it.
        size: the bytes of the arena.
        lifetime: for each owner inside the arena the first and last step at which its memory is in use.
    """

    storage: tuple[int, ...]
    offset: dict[int, int]
    placed: dict[int, int]
    size: int
    lifetime: dict[int, tuple[int, int]]


def plan(values: Sequence[Value], in_place: bool = True, reuse: bool = True) -> Plan:
    """Plan the memory of `values`.

    Args:
        values: in the order they are computed.
        in_place: whether results may overwrite values that no later step reads.
        reuse: whether storages that are never alive together may share bytes of the arena.
    """
    placed = _place(values)
    last_read = _last_reads(values, placed)
    storage = list(range(len(values)))
    end = [0] * len(values)  # of each owner: the last step at which its memory is needed
    start = list(range(len(values)))
    # A container's memory is in use from its first placed part on, so owners are found from the last value back.
    for i in reversed(range(len(values))):
        if i in placed:
            storage[i] = storage[placed[i]]
            start[storage[i]] = min(start[storage[i]], i)
    for i, value in enumerate(values):
        if value.view_of is not None:
            storage[i] = storage[value.view_of]
        elif i not in placed and in_place:
            for x in value.may_overwrite:
                if _is_free(values, storage, placed, end, i, x):
                    storage[i] = storage[x]
                    break
        end[storage[i]] = max(end[storage[i]], last_read[i])
    owners = sorted((i for i in range(len(values)) if storage[i] == i and not values[i].fixed), key=start.__getitem__)
    lifetime = {i: (start[i], end[i]) for i in owners}
    offset, size = _pack(values, lifetime, reuse)
    return Plan(tuple(storage), offset, placed, size, lifetime)


def _place(values: Sequence[Value]) -> dict[int, int]:
    placed: dict[int, int] = {}
    for i, value in enumerate(values):
        for part in value.parts:
            if part not in placed and not values[part].fixed and values[part].view_of is None:
                placed[part] = i
    return placed


def _last_reads(values: Sequence[Value], placed: dict[int, int]) -> list[int]:
    """For each value the last step that needs its memory, through views and containers as well."""
    last = list(range(len(values)))
    for i in reversed(range(len(values))):
        value = values[i]
        for x in value.reads:
            last[x] = max(last[x], i)
        if value.view_of is not None:
            last[value.view_of] = max(last[value.view_of], last[i])
    for i in reversed(range(len(values))):  # a container comes after its parts, so it is final when they are met
        if i in placed:
            last[i] = max(last[i], last[placed[i]])
    return last


def _is_free(
    values: Sequence[Value], storage: list[int], placed: dict[int, int], end: list[int], i: int, x: int
) -> bool:
    """Whether step `i` may write its result over the value `x`."""
    owner = storage[x]
    return (
        not values[i].fixed
        and not values[owner].fixed
        and x not in placed
        and owner not in placed
        and values[owner].nbytes == values[i].nbytes
        and end[owner] <= i
        and all(storage[other] != owner for other in values[i].reads if other != x)
    )


def _pack(values: Sequence[Value], lifetime: dict[int, tuple[int, int]], reuse: bool) -> tuple[dict[int, int], int]:
    """Give each storage the smallest gap it fits in when its life begins; gaps that meet are joined."""
    offset: dict[int, int] = {}
    gaps: list[tuple[int, int]] = []  # (offset, size), by offset
    alive: list[tuple[int, int]] = []  # (end, owner), a heap
    size = 0
    for owner, (begin, end) in lifetime.items():
        while reuse and alive and alive[0][0] < begin:
            _, gone = heapq.heappop(alive)
            _release(gaps, offset[gone], _aligned(values[gone].nbytes))
        need = _aligned(values[owner].nbytes)
        fitting = [k for k, (_, n) in enumerate(gaps) if n >= need]
        if fitting:
            k = min(fitting, key=lambda k: gaps[k][1])
            at, n = gaps.pop(k)
            if n > need:
                gaps.insert(k, (at + need, n - need))
        elif gaps and sum(gaps[-1]) == size:  # the last gap ends where the arena does: let it grow
            at, n = gaps.pop()
            size = at + need
        else:
            at, size = size, size + need
        offset[owner] = at
        heapq.heappush(alive, (end, owner))
    return offset, size


def _release(gaps: list[tuple[int, int]], at: int, n: int) -> None:
    if not n:
        return
    k = bisect.bisect(gaps, (at, n))
    if k < len(gaps) and at + n == gaps[k][0]:
        n += gaps.pop(k)[1]
    if k and sum(gaps[k - 1]) == at:
        before = gaps.pop(k - 1)
        at, n, k = before[0], before[1] + n, k - 1
    gaps.insert(k, (at, n))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
