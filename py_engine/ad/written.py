"""Detection of arrays that were written to in place while a gradient still needed their old values.

Tensors cannot be written to, and the array of a tensor that an op computed is handed out read-only. What remains are
the arrays that a program gives: an op that is recorded takes a fingerprint of each, and the backward pass, before it
uses the op's rules, compares. The fingerprint is the hash of all elements of an array of up to `EXACT`; of a larger
one, of elements spread evenly, so that a write to all of it is always found and a write to few elements may be missed.
That costs a fraction of a microsecond per given array, whatever its size, and no memory to speak of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from py_engine.ad.tensor import Array, Literal, Marks, Tensor

__all__ = ["EXACT", "READ_NOTHING", "fingerprints", "written"]

EXACT = 256
"""Elements: up to here any write is found."""

SAMPLES = 64
"""How many elements of a larger array are looked at, about."""


READ_NOTHING = frozenset(
    [
        "add",
        "sub",
        "neg",
        "sum",
        "copy",
        "assemble",
        "identity",
        "astype",
        "reshape",
        "transpose",
        "slice",
        "broadcast_to",
        "exp",
        "expm1",
        "sqrt",
        "reciprocal",
        "tan",
        "tanh",
        "sigmoid",
        "relu",
    ]
)
"""Ops whose rules read no operand, or the result instead: their operands may be written to, and are not looked at."""


def fingerprints(inputs: Sequence[Tensor]) -> Marks | None:
    """Return the fingerprints of those inputs whose memory was given and not computed; None if all were computed."""
    found: Marks | None = None
    for x in inputs:
        base = x
        while base.op is not None and base.op.view is not None:
            base = base.inputs[0]
        if base.op is None and base.__class__ is not Literal:
            data = x.data
            assert data is not None
            mark = hash(data.tobytes() if data.size <= EXACT else _sample(data).tobytes())
            found = ((x, mark),) if found is None else (*found, (x, mark))
    return found


def written(marks: Marks) -> list[Tensor]:
    """Return the tensors whose arrays were written to since the fingerprints were taken."""
    return [
        x
        for x, mark in marks
        if x.data is not None and mark != hash(x.data.tobytes() if x.data.size <= EXACT else _sample(x.data).tobytes())
    ]


def _sample(data: Array) -> Array:
    if data.flags.forc:
        return data.ravel("K")[:: (data.size // SAMPLES) | 1]  # odd, so as not to stay in one column
    return data[_steps(data.shape)]


@lru_cache(maxsize=256)
def _steps(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return slices that leave about as many elements as there are samples."""
    left, steps = float(SAMPLES), []
    for axis, n in enumerate(shape):
        kept = max(1.0, left ** (1 / (len(shape) - axis)))
        steps.append(slice(None, None, max(1, int(n // kept) | 1)))
        left /= min(n, kept)
    return tuple(steps)
