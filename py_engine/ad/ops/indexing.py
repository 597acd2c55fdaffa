"""Indexing: basic indices are views, integer and boolean arrays gather."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad.ops.record import Op, Shape, as_tensor, register
from py_engine.ad.ops.shape import SLICE, Index, _dummy
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import DTypeError, ShapeError, TraceError

# An advanced index is stored as its basic items with ARRAY where an integer array stands; the arrays themselves
# are inputs of the op, so that they may change from replay to replay.
ARRAY = "array"
Pattern: TypeAlias = tuple[Any, ...]


def fill_in(pattern: Pattern, arrays: Sequence[Array]) -> tuple[Any, ...]:
    """Return numpy's form of an advanced index."""
    rest = iter(arrays)
    return tuple(next(rest) if item == ARRAY else slice(*item) if isinstance(item, tuple) else item for item in pattern)


def _result_shape(x: Tensor, arrays: Sequence[Tensor], pattern: Pattern) -> Shape:
    zeros = [np.zeros(a.shape, np.intp) for a in arrays]
    try:
        shape: Shape = _dummy(x.shape)[fill_in(pattern, zeros)].shape
        return shape
    except IndexError as error:
        raise ShapeError(f"{error}; the shape is {x.shape}") from None


def _infer_gather(x: Tensor, *arrays: Tensor, pattern: Pattern) -> tuple[Shape, Any]:
    return _result_shape(x, arrays, pattern), x.dtype


def _gather(x: Array, *rest: Array, pattern: Pattern) -> None:
    *arrays, out = rest
    if pattern == (ARRAY,) and x.flags.c_contiguous and out.flags.c_contiguous:
        _check_range(arrays[0], x.shape[0])
        x.take(arrays[0], axis=0, out=out, mode="wrap")  # the other modes copy through a buffer
    else:
        try:
            out[...] = x[fill_in(pattern, arrays)]
        except IndexError as error:
            raise ShapeError(f"getitem: {error}; the shape is {x.shape}") from None


def _check_range(index: Array, length: int) -> None:
    if index.size and not (-length <= int(index.min()) and int(index.max()) < length):
        bad = int(index.min()) if int(index.min()) < -length else int(index.max())
        raise ShapeError(f"getitem: index {bad} is out of range for an axis of length {length}")


def _infer_scatter(g: Tensor, *arrays: Tensor, pattern: Pattern, shape: Shape) -> tuple[Shape, Any]:
    return shape, g.dtype


def _scatter(g: Array, *rest: Array, pattern: Pattern, shape: Shape) -> None:
    # Positions may repeat, and then add up. ufunc.at is fast in one dimension only.
    *arrays, out = rest
    places = np.arange(math.prod(shape)).reshape(shape)[fill_in(pattern, arrays)]
    out[...] = 0
    flat = out.reshape(-1)
    np.add.at(flat, places.ravel(), g.ravel())


GATHER: Op = register(
    Op(
        name="gather",
        infer=_infer_gather,
        kernel=_gather,
        vjp=lambda i, g, y, x, *arrays, pattern: SCATTER(g, *arrays, pattern=pattern, shape=x.shape),
        jvp=lambda t, y, x, *arrays, pattern: GATHER(t[0], *arrays, pattern=pattern),
        doc="indexing with integer arrays",
    )
)
SCATTER: Op = register(
    Op(
        name="scatter",
        infer=_infer_scatter,
        kernel=_scatter,
        vjp=lambda i, g, y, x, *arrays, pattern, shape: GATHER(g, *arrays, pattern=pattern),
        jvp=lambda t, y, x, *arrays, pattern, shape: SCATTER(t[0], *arrays, pattern=pattern, shape=shape),
        doc="elements added into an array of zeros at positions given by integer arrays",
    )
)


def getitem(x: Operand, index: Any) -> Tensor:
    """Index like numpy: integers, slices, None, Ellipsis, integer arrays and boolean masks.

    Raises:
        ShapeError: an index is out of range or there are too many.
        TraceError: a boolean mask in a traced function: the result's shape depends on its values.
    """
    x = as_tensor(x)
    items = index if isinstance(index, tuple) else (index,)
    arrays: list[Tensor] = []
    pattern: list[Any] = []
    used = sum(_axes_used(item) for item in items if item is not None and item is not Ellipsis)
    if used > x.ndim:
        raise ShapeError(f"getitem: {used} indices for an array of shape {x.shape}")
    axis = 0  # of x: the one that the next item speaks of
    for item in items:
        if item is Ellipsis:
            pattern.extend([(0, None, 1)] * (x.ndim - used))
            axis += x.ndim - used
            continue
        if item is None:
            pattern.append(None)
            continue
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            pattern.append(int(item))
        elif isinstance(item, slice):
            pattern.append(_triple(item))
        else:
            for part in _integer_arrays(item, x.shape[axis:]):
                pattern.append(ARRAY)
                arrays.append(part)
        axis += _axes_used(item)
    if arrays:
        return GATHER(x, *arrays, pattern=tuple(pattern))
    basic: Index = tuple(pattern)
    return SLICE(x, index=basic)


def _triple(item: slice) -> tuple[Any, ...]:
    step = 1 if item.step is None else int(item.step)
    start = item.start if item.start is None else int(item.start)
    stop = item.stop if item.stop is None else int(item.stop)
    return (0 if start is None and step > 0 else start, stop, step)


def _axes_used(item: Any) -> int:
    dtype = getattr(item, "dtype", None)
    if dtype is not None and dtype == np.bool_:
        return len(item.shape)
    if isinstance(item, list) and item and isinstance(item[0], (bool, list)):
        array = np.asarray(item)
        return array.ndim if array.dtype == np.bool_ else 1
    return 1


def _integer_arrays(item: Any, lengths: Shape) -> list[Tensor]:
    """Return an advanced index as integer arrays, one per axis; `lengths` are those of the axes it can speak of."""
    array = item if isinstance(item, Tensor) else Tensor(np.asarray(item))
    if array.dtype == np.bool_:
        if not array.shape or array.shape != lengths[: array.ndim]:
            raise ShapeError(
                f"getitem: a boolean mask must have the lengths of the axes that it selects from, expected "
                f"{lengths[: max(array.ndim, 1)]}, got {array.shape}"
            )
        if array.data is None:
            raise TraceError(
                "getitem: a boolean mask gives a shape that depends on values, which a traced function "
                "cannot have; use where() and a sum, or call the function eagerly"
            )
        return [Tensor(positions) for positions in np.nonzero(array.data)]
    if array.size == 0 and not isinstance(item, Tensor):
        array = Tensor(np.zeros(array.shape, np.intp))
    if not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(f"getitem: an index must be of integers or booleans, got {array.dtype}")
    return [array]
