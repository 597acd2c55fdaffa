"""Arrays packed into one.

An op has one result. What has several (a loop, a gradient by several inputs) is computed into one vector, and the
parts are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.graph import Part, accumulate
from py_engine.ad.ops.record import Op, Shape
from py_engine.ad.ops.shape import SLICE, Index
from py_engine.ad.tensor import FLOATS, Array, Literal, Tensor
from py_engine.errors import TraceError

__all__ = ["Layout", "zeros"]


def zeros(shape: Shape, dtype: Any) -> Tensor:
    """Return zeros that take no memory."""
    return ops.broadcast_to(Literal(np.zeros((), dtype)), shape)


# Several arrays in one vector -----------------------------------------------------------------------------


def _infer_bits(x: Tensor, shape: Shape, dtype: Any) -> tuple[Shape, Any]:
    return shape, dtype


def _bits(x: Array, shape: Shape, dtype: Any) -> Array:
    used = math.prod(shape) * np.dtype(dtype).itemsize
    array: Array = x.view(np.uint8)[:used].view(dtype).reshape(shape)
    return array


BITS = Op("bits", _infer_bits, view=_bits, doc="the same bytes taken as another dtype")


@dataclass(frozen=True)
class Layout:
    """Where arrays lie in a vector. Those of another dtype than the vector's lie there as their bytes.

    Attributes:
        dtype: of the vector.
        places: of each array the first element in the vector and the one behind the last, its shape and its dtype.
        size: the elements of the vector.
    """

    dtype: Any
    places: tuple[tuple[int, int, Shape, Any], ...]
    size: int

    @classmethod
    def of(cls, kinds: Sequence[tuple[Shape, Any]], dtype: Any) -> Layout:
        """Return the layout of arrays of these shapes and dtypes in a vector of `dtype`."""
        at, places = 0, []
        width = np.dtype(dtype).itemsize
        for shape, own in kinds:
            if own != dtype:
                at = -(-at * width // 16) * 16 // width  # aligned for whatever it is
            end = at + -(-math.prod(shape) * np.dtype(own).itemsize // width)
            places.append((at, end, shape, own))
            at = end
        return cls(np.dtype(dtype), tuple(places), at)

    def arrays(self, vector: Array) -> list[Array]:
        """Return the arrays as views of a vector; what lies between them is set to zero."""
        found, done = [], 0
        for start, end, shape, dtype in self.places:
            vector[done:start] = 0
            done = end
            if dtype == self.dtype:
                found.append(vector[start:end].reshape(shape))
                continue
            place = vector[start:end].view(np.uint8)
            used = math.prod(shape) * np.dtype(dtype).itemsize
            place[used:] = 0
            found.append(place[:used].view(dtype).reshape(shape))
        return found

    def index(self, i: int) -> Index:
        """Return the place of array `i`."""
        return ((self.places[i][0], self.places[i][1], 1),)

    def tensor(self, vector: Tensor, i: int) -> Tensor:
        """Return array `i` of a vector."""
        _, _, shape, dtype = self.places[i]
        part = SLICE.apply((vector,), {"index": self.index(i)})
        if dtype == self.dtype:
            return ops.reshape(part, shape)
        return BITS.apply((part,), {"shape": shape, "dtype": dtype})

    def gradients(self, parts: Sequence[Part]) -> list[Tensor | None]:
        """Return, from the contributions to the gradient of a vector, the gradient of each array; None for zero."""
        whole = [(g, index) for g, index in parts if index is None]
        found: list[Tensor | None] = []
        for i, (start, end, shape, dtype) in enumerate(self.places):
            mine: list[Part] = [(g, None) for g, index in parts if index == self.index(i)]
            mine += [(SLICE.apply((g,), {"index": self.index(i)}), None) for g, _ in whole]
            if not mine or dtype not in FLOATS:
                found.append(None)
                continue
            found.append(ops.reshape(accumulate(mine, Tensor.symbol((end - start,), dtype)), shape))
        known = {self.index(i) for i in range(len(self.places))}
        if any(index is not None and index not in known for _, index in parts):
            raise TraceError("a packed vector was taken apart in another way than its layout")
        return found

    def pack(self, arrays: Sequence[Tensor | None]) -> Tensor:
        """Return the vector of these tensors, with zeros for None; all are of its dtype."""
        there = [(ops.reshape(x, -1), self.index(i)) for i, x in enumerate(arrays) if x is not None]
        if not there:
            return zeros((self.size,), self.dtype)
        return ops.assemble([x for x, _ in there], [index for _, index in there], (self.size,))
