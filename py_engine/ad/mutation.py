"""The mutation guard: finds arrays that were written to in place while a gradient still needs their old values.

Tensors cannot be written to, and the array of a tensor that an op computed is handed out read-only. What remains are
the arrays that a program gives, and their views. An op that can be differentiated keeps the version of each of those
that its rules read: a copy, or of more than `COPIED` bytes, and in loops and checkpoints, a checksum. The derivative,
before it uses the op's rules, compares.

A copy and a comparison run at the speed of memory, several times faster than any checksum that numpy can compute, and
miss nothing. Ops that read the same array share one copy as long as the array is as it was. So the price is the memory
of one copy of each given array that a rule reads, up to `COPIED` bytes each, and two passes over it: little beside a
matrix product or a convolution, and about as much as the op itself where an elementwise op takes large given arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from sys import getrefcount
from typing import Any, TypeAlias
from weakref import WeakValueDictionary, ref

import numpy as np

from py_engine.ad.state import STATE, collecting
from py_engine.ad.tensor import Array, Literal, Tensor
from py_engine.errors import InPlaceError, ReplayError, TraceError

SMALL = 8192
"""Bytes: up to here each op keeps its own copy, which takes less time than to look for one to share."""

COPIED = 1 << 27
"""Bytes: of larger arrays only a checksum is kept, so that data that hardly fits into memory needs no more of it.

Loops and checkpoints, which are there to save memory, keep checksums of all."""

READS_OF_A_LOOP = 3
"""Reads of an array by one trace from which on it is copied, as it is probably a loop's weight: to compare it with a
copy takes less time than a checksum, but fresh memory for the copy costs as much as four checksums."""

Version: TypeAlias = "bytes | Snapshot | int"
"""The bytes of an array, a copy of it, or its checksum."""

Versions: TypeAlias = tuple[tuple[Tensor, Version], ...]
"""Tensors that were given to an op, each with the version of its array."""


def mutated(versions: Versions, unchanged: set[object]) -> list[Tensor]:
    """Return the tensors whose arrays were written to since their versions were taken.

    Args:
        versions: of an op.
        unchanged: ids of copies, and pairs of an array's id and its checksum, that were compared before in the same
            pass and fitted; it is added to.
    """
    found = []
    for x, version in versions:
        data = x.data
        assert data is not None
        if version.__class__ is bytes and data.shape == x.shape and data.dtype is x.dtype and data.tobytes() == version:
            continue
        if data.shape != x.shape or data.dtype != x.dtype:  # set in place
            found.append(x)
        elif version.__class__ is bytes:
            if data.tobytes() != version:
                found.append(x)
        elif (known := id(version) if version.__class__ is Snapshot else (id(data), version)) in unchanged:
            pass
        elif version.fits(data) if version.__class__ is Snapshot else version == checksum(data):
            unchanged.add(known)
        else:
            found.append(x)
    return found


def note_given(inputs: Iterable[Tensor]) -> None:
    """While ops are collected, keep the versions of the arrays that one of them was given: it reads them later.

    A trace, which computes nothing and soon ends, keeps a copy of an array that it reads again and again.
    """
    if STATE.given is None:
        return
    for x in inputs:
        if x.op is None and x.data is not None and x.__class__ is not Literal:
            STATE.given.note(x, x.data)


class Given:
    """The arrays that collected ops were given, in order, each with its version when it was read."""

    __slots__ = ("_reads", "versions")

    def __init__(self) -> None:
        self.versions: list[tuple[Tensor, Version]] = []  # the tensors keep the arrays, and so their ids
        self._reads: Counter[int] = Counter()

    def note(self, x: Tensor, data: Array) -> None:
        """Note that an op reads the array of a tensor now."""
        if data.nbytes <= SMALL:
            self.versions.append((x, data.tobytes()))
            return
        reads = self._reads[id(data)] = self._reads[id(data)] + 1
        self.versions.append((x, version_of(data, copied=STATE.symbolic and reads >= READS_OF_A_LOOP)))


class collecting_ops(collecting):
    """`collecting` of ops, at whose end no array that was given to one of them may be another than it was then.

    Raises:
        InPlaceError: one is: all ops that read it would see its last values.
    """

    __slots__ = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__("trace", given=Given(), **fields)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        given: list[tuple[Tensor, Version]] = self.fields["given"].versions
        if error[0] is not None or not given:
            return
        changed = mutated(tuple(given), set())
        if changed:
            raise InPlaceError(
                f"an array of shape {changed[0].shape} was written to after an op had read it, and ops that are "
                "collected read it later: give each a copy, such as a.copy(), or make a new array in each round of a "
                "loop"
            )
        if STATE.given is not None:  # the block around it keeps what was collected here
            STATE.given.versions.extend(given)


# Copies ---------------------------------------------------------------------------------------------------


class Snapshot:
    """The values that an array had."""

    __slots__ = ("__weakref__", "array", "values")

    def __init__(self, array: Array) -> None:
        self.array = array  # kept, so that no other array has its id as long as this is known
        whole = _in_one_piece(array)
        self.values: Array | bytearray = _whole(array).copy("K") if whole is None else bytearray(whole.data)

    def fits(self, array: Array) -> bool:
        """Whether an array has these values still, bit by bit."""
        now, then = _whole(array), self.values
        if then.__class__ is bytearray:  # compared with other memory at its speed, without a mask
            whole = _in_one_piece(array)
            return bool(then == (now.tobytes() if whole is None else whole.data))  # type: ignore[comparison-overlap]
        assert isinstance(then, np.ndarray)
        if now.shape != then.shape or now.dtype != then.dtype:
            return False
        size = now.dtype.itemsize
        if size not in (1, 2, 4, 8) or now.dtype.hasobject:
            return now.tobytes() == then.tobytes()
        return bool((now.view(f"u{size}") == then.view(f"u{size}")).all())


_KNOWN: WeakValueDictionary[int, Snapshot] = WeakValueDictionary()
"""For the id of an array the copy that was made last, as long as an op needs it."""


def version_of(data: Array, copied: bool = True) -> Version:
    """Return the version of an array: a copy, which is shared as long as it fits, or a checksum."""
    if not copied or _whole(data).nbytes > COPIED:
        return checksum(data)
    known = _KNOWN.get(id(data))
    if known is None or known.array is not data or not known.fits(data):
        known = _KNOWN[id(data)] = Snapshot(data)
    return known


def _in_one_piece(data: Array) -> Array | None:
    """Return an array of numbers in C order that has the same elements in memory; None if they lie apart."""
    if data.dtype.kind not in "fiub":
        return None
    return data if data.flags.c_contiguous else data.T if data.flags.f_contiguous else None


def _whole(data: Array) -> Array:
    """Return the array with each element once along the axes that it is only repeated along."""
    if 0 in data.strides and data.size:
        return data[tuple([slice(0, 1) if step == 0 else slice(None) for step in data.strides])]
    return data


# What a trace takes the values of -------------------------------------------------------------------------


def _changed(what: str) -> ReplayError:
    return ReplayError(
        f"{what} that the compiled function captured was changed since it was traced, and a replay would not see that; "
        "pass it as an argument, or compile the function anew"
    )


class Watch:
    """A list, a mask or a setting whose values became part of a traced function, and would not be read anew."""

    __slots__ = ("kind", "source", "tensor", "values", "what")

    def __init__(self, source: Any, what: str, tensor: Tensor | None = None) -> None:
        self.source, self.what = source, what
        self.tensor = None if tensor is None else ref(tensor)  # whose array the source is, and may be another
        values = np.array(source)
        self.kind = values.shape, values.dtype
        self.values = Snapshot(values)

    @property
    def owns_all(self) -> bool:
        """Whether the values are in the list or the array itself, and not in others that it shows."""
        if isinstance(self.source, np.ndarray):
            return self.source.base is None
        return isinstance(self.source, list) and all(isinstance(x, (int, float, np.generic)) for x in self.source)

    def check(self, _unchanged: set[object]) -> None:
        """Raise `ReplayError` if the values are others now."""
        tensor = None if self.tensor is None else self.tensor()
        if tensor is not None and tensor.data is not self.source:
            raise _changed(self.what)
        try:
            now = np.asarray(self.source)
            same = (now.shape, now.dtype) == self.kind and self.values.fits(now)
        except ValueError:  # lists of different lengths
            same = False
        if not same:
            raise _changed(self.what)


def watch(source: Any, what: str, tensor: Tensor | None = None) -> None:
    """While a function is traced, note that it took the values of something that may change, or a tensor's array."""
    if STATE.watched is not None:
        STATE.watched.append(Watch(source, what, tensor))


def captured(watched: Iterable[Any]) -> list[Any]:
    """Of what a trace has taken the values of, return what others hold, too; the rest is gone with the function's call.

    Raises:
        TraceError: the function itself has changed such a thing since an op read it.
    """
    watched = list(watched)
    holds = Counter(id(x.source) for x in watched if isinstance(x, Watch))
    # `getrefcount` counts its argument, too.
    kept = [
        x
        for x in watched
        if not isinstance(x, Watch) or not x.owns_all or getrefcount(x.source) > holds[id(x.source)] + 1
    ]
    for x in kept:
        try:
            x.check(set())
        except ReplayError:
            raise TraceError(
                "the function changes a list or an array that it captures after an op has read it: give the op a copy"
            ) from None
    return kept


class WatchedVersions:
    """The arrays that the ops of a graph from outside the trace were given: a traced derivative reads them later."""

    __slots__ = ("versions",)

    def __init__(self, versions: Versions) -> None:
        self.versions = versions

    def check(self, unchanged: set[object]) -> None:
        """Raise `ReplayError` if the values are others now. `unchanged` is that of `mutated`."""
        if changed := mutated(self.versions, unchanged):
            raise _changed(f"an array of shape {changed[0].shape}")


def watch_versions(versions: Versions) -> None:
    """While a derivative is traced, note that it reads what an op of a graph from outside the trace was given."""
    if STATE.watched is not None:
        STATE.watched.append(WatchedVersions(versions))


def watch_setting(value: Any) -> None:
    """While a function is traced, watch a list, an array or a constant tensor that sets a shape, axes or widths."""
    if STATE.watched is None:
        return
    if isinstance(value, Tensor):
        if value.data is not None:
            watch(value.data, "an array", value)
    elif isinstance(value, np.ndarray):
        watch(value, "an array")
    elif isinstance(value, list):
        with suppress(ValueError):  # of lists of different lengths: its reader refuses it
            watch(value, "a list")


def watch_settings(values: Iterable[Any], made: Sequence[Tensor]) -> None:
    """Watch those lists and arrays among a function's arguments that are no operands of the ops that it made."""
    operands = {id(x.data) for node in made for x in node.inputs if x.op is None}
    stack = list(values)
    while stack:
        x = stack.pop()
        if isinstance(x, np.ndarray):
            if id(x) not in operands:
                watch(x, "an array")
        elif isinstance(x, (list, tuple)):
            if any(isinstance(item, (Tensor, np.ndarray, list, tuple)) for item in x):
                stack.extend(x)
            elif isinstance(x, list):
                watch(x, "a list")


# Checksums ------------------------------------------------------------------------------------------------

WORDS = 1 << 14
"""Eight bytes each: a block and its weights stay in the second-level cache."""

_WEIGHTS = np.random.default_rng(0x5EED).integers(0, 1 << 64, WORDS, np.uint64) | np.uint64(1)


def checksum(data: Array) -> int:
    """Return a sum of all words with odd weights, modulo 2^64, which depends on what is where.

    One changed word always changes it; several do with a probability of all but 2^-29 or less. Each word's upper half
    is mixed into its lower one before: the weights would not see an even number of changed signs.
    """
    total = 0
    mixed = np.empty(WORDS, np.uint64)
    for block in _blocks(_whole(data)):
        words = block[: block.size // 8 * 8].view(np.uint64)
        part = mixed[: words.size]
        np.right_shift(words, np.uint64(29), part)
        np.bitwise_xor(words, part, part)
        rest = int.from_bytes(block[words.size * 8 :].tobytes(), "little")
        total = (total * 0x9E3779B97F4A7C15 + int(part.dot(_WEIGHTS[: words.size])) + rest) % (1 << 64)
    return total


def _blocks(data: Array) -> Iterator[Array]:
    """Yield all bytes of an array in pieces of `WORDS` words, copied where they do not lie in one piece."""
    if data.flags.forc:
        flat = data.ravel("K").view(np.uint8)
        yield from (flat[i : i + 8 * WORDS] for i in range(0, flat.size, 8 * WORDS))
        return
    each = max(1, 8 * WORDS * len(data) // data.nbytes)
    for i in range(0, len(data), each):
        part = data[i : i + each]
        yield from _blocks(np.ascontiguousarray(part) if part.nbytes <= 64 * WORDS or part.ndim == 1 else part[0])
