"""Indexing: basic indices are views, integer and boolean arrays gather; embeddings gather rows of a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad.mutation import watch
from py_engine.ad.op import (
    TABLE,
    Call,
    Check,
    Op,
    Scratch,
    Shape,
    all_below,
    as_tensor,
    broadcast,
    c_ordered,
    check_op,
    define,
    here,
    implements,
    nbytes,
    no_gradient,
    numbered,
    per_element,
)
from py_engine.ad.ops.arguments import axis_of, refuse, whole
from py_engine.ad.ops.elementary import astype, equal, stop_gradient, where
from py_engine.ad.ops.shape import (
    EACH,
    SLICE,
    Index,
    _dummy,
    all_aligned,
    expand_dims,
    for_each,
    leading,
    moveaxis,
    reshape,
)
from py_engine.ad.tensor import FLOATS, Array, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError, TraceError

# An advanced index is stored as its basic items with ARRAY in the place of each integer array; these themselves
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


def _gather(x: Array, *rest: Array, pattern: Pattern, where: str = "") -> None:
    *arrays, out = rest
    if pattern == (ARRAY,) and x.flags.c_contiguous and out.flags.c_contiguous:
        _check_range(arrays[0], x.shape[0], where)
        x.take(arrays[0], axis=0, out=out, mode="wrap")  # the other modes copy through a buffer
    else:
        out[...] = _found(x, arrays, pattern, where)


def _bind_gather(arrays: Sequence[Array], out: Array, scratch: Scratch, pattern: Pattern) -> Sequence[Call]:
    return [partial(_gather, *arrays, out, pattern=pattern, where=here("getitem"))]


def _found(x: Array, arrays: Sequence[Array], pattern: Pattern, where: str) -> Array:
    try:
        found: Array = x[fill_in(pattern, arrays)]
    except IndexError as error:
        raise ShapeError(f"{where or here('getitem')}: {error}; the shape is {x.shape}") from None
    return found


def _check_range(index: Array, length: int, where: str) -> None:
    if not index.size or (-length <= int(index.min()) and int(index.max()) < length):
        return
    at = tuple(int(i) for i in np.argwhere((index < -length) | (index >= length))[0])
    raise ShapeError(
        f"{where or here('getitem')}: index {index[at]} is out of range for an axis of length {length}, "
        f"at position {at[0] if len(at) == 1 else at} of the indices"
    )


FEW = 2**15
"""Up to this number of elements an array's are all numbered in less time than the numbers of some are computed."""


def _scatter(g: Array, *rest: Array, pattern: Pattern, shape: Shape, where: str = "") -> None:
    # Positions may repeat, and then add up. ufunc.at is fast in one dimension only.
    *arrays, out = rest
    kind = out.dtype
    if pattern == (ARRAY,) and out.size > FEW:
        _check_range(arrays[0], shape[0], where)
        width = math.prod(shape[1:])
        if width % 2 == 0 and kind in FLOATS:  # two at a time, as one complex number
            width, kind = width // 2, np.result_type(kind, np.complex64)
        rows = arrays[0].reshape(-1, 1).astype(np.intp)
        rows[rows < 0] += shape[0]
        places = rows * width + np.arange(width)
    else:
        places = _places(g.size, arrays, pattern, shape, where)
    out[...] = 0
    np.add.at(out.reshape(-1).view(kind), places.ravel(), g.ravel().view(kind))


def _places(count: int, arrays: Sequence[Array], pattern: Pattern, shape: Shape, where: str) -> Array:
    """Return the flat positions of the `count` elements that an advanced index takes from an array of this shape."""
    if math.prod(shape) <= max(FEW, 8 * len(shape) * count):  # measured: what is computed axis by axis takes longer
        return _found(numbered(shape), arrays, pattern, where)
    parts = []
    for axis, n in enumerate(shape):
        along = np.arange(n).reshape(-1, *(1,) * (len(shape) - 1 - axis)) * math.prod(shape[axis + 1 :])
        parts.append(_found(np.broadcast_to(along, shape), arrays, pattern, where))
    found: Array = np.sum(parts, 0)
    return found


def _bind_scatter(
    arrays: Sequence[Array], out: Array, scratch: Scratch, pattern: Pattern, shape: Shape
) -> Sequence[Call]:
    return [partial(_scatter, *arrays, out, pattern=pattern, shape=shape, where=here("getitem"))]


def _check_indices(*arrays: Array, shape: Shape, pattern: Pattern, where: str) -> None:
    if pattern == (ARRAY,):
        _check_range(arrays[0], shape[0], where)
    else:
        _found(_dummy(shape), arrays, pattern, where)


CHECK_INDICES = check_op("check_indices", _check_indices, leading)


def _indices_checked(arrays: tuple[Tensor, ...], shape: Shape, pattern: Pattern) -> Check:
    return CHECK_INDICES, arrays, {"shape": shape, "pattern": pattern, "of": "getitem"}


# Many samples: where they share the positions, all of the leading axis is taken; where they have an array each, another
# index array of their numbers goes with the positions; where they only share the array, positions are many.


def _batch_gather(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    (x, *arrays), pattern = inputs, attrs["pattern"]
    if not any(mapped[1:]):
        return moveaxis(op(x, *arrays, pattern=(EACH, *pattern)), _place_of_each(arrays, pattern), 0)
    positions, place = all_aligned(mapped[1:], arrays), _place_of_positions(pattern)
    if not mapped[0]:
        return moveaxis(op(x, *positions, pattern=pattern), place, 0)
    numbers, axes = _numbers(count, mapped[1:], arrays)
    found = op(x, numbers, *positions, pattern=(ARRAY, *pattern))
    return moveaxis(found, [1 + k for k in axes], [1 + place + k for k in axes])


def _batch_scatter(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    (g, *arrays), pattern, shape = inputs, attrs["pattern"], (count, *attrs["shape"])
    if not any(mapped[1:]):
        return op(moveaxis(g, 0, _place_of_each(arrays, pattern)), *arrays, pattern=(EACH, *pattern), shape=shape)
    g = g if mapped[0] else for_each(g, count)
    positions, place = all_aligned(mapped[1:], arrays), _place_of_positions(pattern)
    numbers, axes = _numbers(count, mapped[1:], arrays)
    moved = moveaxis(g, [1 + place + k for k in axes], [1 + k for k in axes])
    return op(moved, numbers, *positions, pattern=(ARRAY, *pattern), shape=shape)


def _numbers(count: int, mapped: Sequence[bool], arrays: Sequence[Tensor]) -> tuple[Tensor, range]:
    """Return the samples' numbers as an index array beside those of positions, and a range of as many as their axes."""
    ndim = max(a.ndim - m for a, m in zip(arrays, mapped, strict=True))
    return Tensor(np.arange(count).reshape(count, *(1,) * ndim)), range(ndim)


def _apart(pattern: Pattern) -> bool:
    """Whether numpy puts the axes of index arrays first, since they are not adjacent."""
    advanced = [k for k, item in enumerate(pattern) if item == ARRAY or isinstance(item, int)]
    return advanced[-1] - advanced[0] + 1 != len(advanced)


def _place_of_each(arrays: Sequence[Tensor], pattern: Pattern) -> int:
    """Where numpy puts the leading axis: behind those of the index arrays if these are not adjacent."""
    return len(np.broadcast_shapes(*(a.shape for a in arrays))) if _apart(pattern) else 0


def _place_of_positions(pattern: Pattern) -> int:
    """Where numpy puts the axes of index arrays."""
    if _apart(pattern):
        return 0
    before = list(takewhile(lambda item: item != ARRAY and not isinstance(item, int), pattern))
    return sum(item is not Ellipsis for item in before)


def _pull_gather(cotangents: Any, needs_grad: Sequence[bool], node: Tensor) -> list[Tensor | None]:
    (g,), (x, *arrays) = cotangents, node.inputs
    return [SCATTER(g, *arrays, pattern=node.attrs["pattern"], shape=x.shape), *[None] * len(arrays)]


def _pull_scatter(cotangents: Any, needs_grad: Sequence[bool], node: Tensor) -> list[Tensor | None]:
    (g,), (_, *arrays) = cotangents, node.inputs
    return [GATHER(g, *arrays, pattern=node.attrs["pattern"]), *[None] * len(arrays)]


def _moved(
    taken: Array, shape: Shape, arrays: Sequence[Tensor], pattern: Pattern, back: bool = False
) -> list[tuple[Array, Array] | None] | None:
    """See `Op.sparsity`: the positions of what is taken from an array of this shape, or, `back`, added into one."""
    if any(a.data is None for a in arrays):
        return None
    places = _found(numbered(shape), [a.numpy() for a in arrays], pattern, "")
    return [(places, taken) if back else (taken, places), *[None] * len(arrays)]


GATHER: Op = define(
    name="gather",
    infer=lambda x, *arrays, pattern: (_result_shape(x, arrays, pattern), x.dtype),
    kernel=_gather,
    bind=_bind_gather,
    vjp=_pull_gather,
    jvp=lambda t, y, x, *arrays, pattern: GATHER(t[0], *arrays, pattern=pattern),
    checks=lambda x, *arrays, pattern: _indices_checked(arrays, x.shape, pattern),
    flops=per_element(0),
    bytes=lambda x, *arrays, pattern: (
        2 * x.dtype.itemsize * math.prod(_result_shape(x, arrays, pattern)) + sum(map(nbytes, arrays))
    ),
    skipped=lambda x, *arrays, pattern: 1,
    batch=_batch_gather,
    sparsity=lambda x, *arrays, pattern: _moved(numbered(_result_shape(x, arrays, pattern)), x.shape, arrays, pattern),
    doc="indexing with integer arrays",
)
SCATTER: Op = define(
    name="scatter",
    infer=lambda g, *arrays, pattern, shape: (shape, g.dtype),
    kernel=_scatter,
    bind=_bind_scatter,
    vjp=_pull_scatter,
    jvp=lambda t, y, x, *arrays, pattern, shape: SCATTER(t[0], *arrays, pattern=pattern, shape=shape),
    checks=lambda g, *arrays, pattern, shape: _indices_checked(arrays, shape, pattern),
    flops=per_element(1),
    skipped=lambda g, *arrays, pattern, shape: 1,
    unread=lambda g, *arrays, pattern, shape: 1,
    batch=_batch_scatter,
    sparsity=lambda g, *arrays, pattern, shape: _moved(numbered(g.shape), shape, arrays, pattern, back=True),
    doc="elements added into an array of zeros at positions given by integer arrays",
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
            # One for no axis stays: to numpy, index arrays on its two sides are not adjacent.
            pattern.extend([(0, None, 1)] * (x.ndim - used) or [Ellipsis])
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
    basic: Index = tuple(item for item in pattern if item is not Ellipsis)
    return SLICE(x, index=basic)


def _triple(item: slice) -> tuple[Any, ...]:
    start, stop, step = [
        None if bound is None else whole(bound, "getitem: each of a slice's start, stop and step")
        for bound in (item.start, item.stop, item.step)
    ]
    if step == 0:
        raise ShapeError("getitem: the step of a slice must not be 0")
    step = 1 if step is None else step
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
    given = item if isinstance(item, Tensor) else np.asarray(item)
    if given.size and given.dtype.kind not in "iub":
        raise DTypeError(f"getitem: an index must be of integers or booleans, got {given.dtype}")
    array = given if isinstance(given, Tensor) else Tensor(given)
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
        if isinstance(item, list):
            watch(item, "a boolean mask")
        else:
            watch(array.data, "a boolean mask", array)
        return [Tensor(positions) for positions in np.nonzero(array.data)]
    if isinstance(item, list):
        watch(item, "an index list")
    if array.size == 0 and not isinstance(item, Tensor):
        array = Tensor(np.zeros(array.shape, np.intp))
    if not np.issubdtype(array.dtype, np.integer):  # a tensor without elements
        raise DTypeError(f"getitem: an index must be of integers or booleans, got {array.dtype}")
    return [array]


@implements(np.take)
def take(a: Operand, indices: Operand, axis: int | None = None, out: None = None, mode: str = "raise") -> Tensor:
    """The elements at these positions of an axis, or of all elements in C order when None.

    Positions count from the end where they are negative. `mode` says what those out of range do: "raise" an error,
    "wrap" around, or "clip" to the first and the last. The result has the shape of the indices in the axis' place.

    Raises:
        ShapeError: there is no such axis, or a position is out of range. So does every replay.
        DTypeError: the indices are not integers.
    """
    refuse("take", out=(out,))
    x, index = as_tensor(a), as_tensor(indices)
    if axis is None:
        x, axis = reshape(x, (x.size,)), 0
    axis = axis_of(axis, x.ndim, "take", x.shape)
    if index.size == 0 and not isinstance(indices, (Tensor, np.ndarray)):
        index = Tensor(np.zeros(index.shape, np.intp))
    index = _positions("take", index, isinstance(indices, (int, np.integer)))
    if mode != "raise" and index.dtype.itemsize < 8:  # which may not hold the length of the axis
        index = astype(index, np.intp)
    if mode == "wrap":
        index = TABLE["mod"](index, Tensor(np.array(x.shape[axis], index.dtype)))
    elif mode == "clip":
        index = TABLE["clip"](index, *(Tensor(np.array(n, index.dtype)) for n in (0, max(x.shape[axis] - 1, 0))))
    elif mode != "raise":
        raise ConfigurationError(f"take: mode must be 'raise', 'wrap' or 'clip', got {mode!r}")
    return GATHER(x, index, pattern=(*[(0, None, 1)] * axis, ARRAY))


def _positions(function: str, index: Tensor, number: bool) -> Tensor:
    if number:
        index = astype(index, np.intp)
    if index.dtype.kind not in "iu":
        raise DTypeError(f"{function}: positions must be integers, got {index.dtype}")
    return index


@implements(np.take_along_axis)
def take_along_axis(arr: Operand, indices: Operand, axis: int | None = -1) -> Tensor:
    """The elements at these positions along an axis, one array of positions for each row: what `argsort` gives.

    `indices` has as many axes as `arr` and broadcasts with it along the others; the result has its length along `axis`.

    Raises:
        ShapeError: the shapes do not fit, or a position is out of range. So does every replay.
        DTypeError: the indices are not integers.
    """
    x, index = as_tensor(arr), as_tensor(indices)
    if axis is None:
        x, axis = reshape(x, (x.size,)), 0
    axis = axis_of(axis, x.ndim, "take_along_axis", x.shape)
    if index.ndim != x.ndim:
        raise ShapeError(f"take_along_axis: {x.ndim} axes need positions of as many, got shape {index.shape}")
    index = _positions("take_along_axis", index, False)
    places = []
    for d, n in enumerate(x.shape):
        shape = [n if k == d else 1 for k in range(x.ndim)]
        places.append(index if d == axis else Tensor(np.arange(n).reshape(shape)))
    broadcast(places)
    return GATHER(x, *places, pattern=(ARRAY,) * x.ndim)


# Embeddings -----------------------------------------------------------------------------------------------
#
# A lookup is linear in the matrix, and its gradient in the rows, so that each is the other's derivative. The row
# `padding_index` counts as a constant: its gradient and its tangents are zero.


def _infer_embedding(weight: Tensor, ids: Tensor, padding_index: int) -> tuple[Shape, Any]:
    if len(weight.shape) != 2 or weight.dtype not in FLOATS:
        raise ShapeError(f"expected a matrix (vocabulary, dimension) of floats, got {weight.dtype} {weight.shape}")
    _check_ids(ids, weight.shape[0], padding_index)
    return (*ids.shape, weight.shape[1]), weight.dtype


def _infer_embedding_gradient(g: Tensor, ids: Tensor, vocabulary: int, padding_index: int) -> tuple[Shape, Any]:
    if g.shape[:-1] != ids.shape or g.ndim != ids.ndim + 1 or g.dtype not in FLOATS:
        raise ShapeError(f"ids of shape {ids.shape} need rows {(*ids.shape, 'dimension')}, got {g.dtype} {g.shape}")
    _check_ids(ids, vocabulary, padding_index)
    return (vocabulary, g.shape[-1]), g.dtype


def _check_ids(ids: Tensor, vocabulary: int, padding_index: int) -> None:
    if ids.dtype != np.int64:
        raise DTypeError(f"expected token ids of int64, got {ids.dtype}")
    if not -1 <= padding_index < vocabulary:
        raise ShapeError(f"padding_index must be -1 (none) or a row of the {vocabulary}, got {padding_index}")


def _bind_embedding(arrays: Sequence[Array], out: Array, scratch: Scratch, padding_index: int) -> Sequence[Call]:
    weight, ids = arrays
    checked = partial(check_ids, ids, len(weight), here("embedding"))
    return [checked, partial(np.ndarray.take, weight, ids, 0, out, "clip")]  # the default copies through a buffer


def _bind_embedding_gradient(
    arrays: Sequence[Array], out: Array, scratch: Scratch, vocabulary: int, padding_index: int
) -> Sequence[Call]:
    g, ids = map(np.ascontiguousarray, arrays)  # the tape's are so already
    checked = partial(check_ids, ids, vocabulary, here("embedding_gradient"))
    additions = row_additions(g.reshape(-1, out.shape[1]), ids.reshape(-1), out, 0, padding_index, scratch)
    return [checked, partial(np.ndarray.fill, out, 0), *additions]


def row_additions(
    rows: Array, ids: Array, out: Array, column: int, padding_index: int, scratch: Scratch
) -> Sequence[Call]:
    """Return the calls that add rows to some columns of a matrix.

    Args:
        rows: (n, width) in C order, what is added.
        ids: (n,), the rows of `out` that they are added to; they may repeat.
        out: (vocabulary, dimension) in C order.
        column: the first of the columns.
        padding_index: a row that is set to zero, or -1.
        scratch: see `Op`.
    """
    n, width = rows.shape
    if not rows.size:
        return []
    # ufunc.at is fast in one dimension only, and takes two floats at a time as one complex number. The places are
    # computed in two passes, since numpy would broadcast through buffers that it allocates.
    step = 2 if width % 2 == column % 2 == out.shape[1] % 2 == 0 else 1
    kind = np.result_type(out.dtype, np.complex64) if step == 2 else out.dtype
    offsets = np.tile(np.arange(column // step, (column + width) // step), (n, 1))
    starts = scratch((n,), np.int64)
    places = scratch(offsets.shape, np.int64)
    calls: list[Call] = [
        partial(np.multiply, ids, out.shape[1] // step, starts),
        partial(np.copyto, places, starts[:, np.newaxis]),
        partial(np.add, places, offsets, places),
        partial(np.add.at, out.reshape(-1).view(kind), places.reshape(-1), rows.reshape(-1).view(kind)),
    ]
    if padding_index >= 0:
        calls.append(partial(np.ndarray.fill, out[padding_index, column : column + width], 0))
    return calls


def _sum_rows(
    shards: Sequence[Sequence[Array]], out: Array, zeroed: bool, vocabulary: int, padding_index: int
) -> tuple[list[list[Call]], list[list[Call]]]:
    """See `Op.sum_rows`. Every thread adds all rows in a part of the columns, so that none waits for another."""
    ends = np.cumsum([0, *(ids.size for _, ids in shards)])
    dimension = out.shape[1]
    edges = _column_edges(dimension, len(shards))
    all_ids = np.empty(ends[-1], np.int64)
    parts = [np.empty((len(all_ids), stop - start), out.dtype) for start, stop in pairwise(edges)]
    leave: list[list[Call]] = []
    for k, (rows, ids) in enumerate(shards):
        place = slice(ends[k], ends[k + 1])
        share = out[vocabulary * k // len(shards) : vocabulary * (k + 1) // len(shards)]
        leave.append([] if zeroed else [partial(share.fill, 0)])
        leave[k].append(partial(np.copyto, all_ids[place], ids.reshape(-1)))
        for (start, stop), part in zip(pairwise(edges), parts, strict=True):
            leave[k].append(partial(np.copyto, part[place], rows.reshape(-1, dimension)[:, start:stop]))
    add = [
        [*row_additions(part, all_ids, out, start, padding_index, np.empty)]
        for start, part in zip(edges, parts, strict=False)
    ]
    return leave, add


NARROWEST = 8
"""Columns that a thread should have at least."""


def _column_edges(dimension: int, threads: int) -> list[int]:
    """Where to cut the columns of a matrix for the threads: between pairs, and not into slivers."""
    parts = max(1, min(threads, dimension // NARROWEST))
    return [*(2 * round(dimension * k / parts / 2) for k in range(parts)), dimension]


def unpadded(rows: Tensor, ids: Tensor, padding_index: int) -> Tensor:
    """Rows with those at padding positions set to zero."""
    if padding_index < 0:
        return rows
    return where(expand_dims(equal(ids, padding_index), -1), 0, rows)


def ids_checked(ids: Tensor, vocabulary: int) -> Check:
    """Return the check of token ids, see `Op.checks`."""
    return CHECK_IDS, (ids,), {"vocabulary": vocabulary, "of": "embedding"}


def _batch_embedding(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    (weight, ids), padding_index = inputs, attrs["padding_index"]
    if not mapped[0]:
        return op(weight, ids, **attrs)
    check, checked_inputs, check_attrs = ids_checked(ids, weight.shape[1])
    check.apply(checked_inputs, check_attrs)
    rows = _batch_gather(GATHER, count, mapped, inputs, {"pattern": (ARRAY,)})
    if padding_index < 0:
        return rows
    ids = ids if mapped[1] else for_each(ids, count)
    return where(expand_dims(equal(ids, padding_index), -1), stop_gradient(rows), rows)


def _batch_embedding_gradient(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    vocabulary, padding_index = attrs["vocabulary"], attrs["padding_index"]
    g, ids = inputs
    if not mapped[1]:  # the samples' rows side by side
        dimension = g.shape[-1]
        rows = op(reshape(moveaxis(g, 0, -2), (*ids.shape, count * dimension)), ids, **attrs)
        return moveaxis(reshape(rows, (vocabulary, count, dimension)), 1, 0)
    check, checked_inputs, check_attrs = ids_checked(ids, vocabulary)
    check.apply(checked_inputs, check_attrs)
    g = unpadded(g if mapped[0] else for_each(g, count), ids, padding_index)
    first = Tensor(np.arange(0, count * vocabulary, vocabulary).reshape(count, *(1,) * (ids.ndim - 1)))
    rows = op(g, ids + first, vocabulary=count * vocabulary, padding_index=-1)
    return reshape(rows, (count, vocabulary, g.shape[-1]))


EMBEDDING: Op = define(
    name="embedding",
    infer=_infer_embedding,
    bind=_bind_embedding,
    vjp=(
        lambda g, y, weight, ids, padding_index: EMBEDDING_GRADIENT(
            g, ids, vocabulary=weight.shape[0], padding_index=padding_index
        ),
        no_gradient,
    ),
    jvp=lambda t, y, weight, ids, padding_index: unpadded(
        EMBEDDING(t[0], ids, padding_index=padding_index), ids, padding_index
    ),
    accepts=c_ordered,
    checks=lambda weight, ids, padding_index: ids_checked(ids, weight.shape[0]),
    flops=per_element(0),
    sparsity=lambda weight, ids, padding_index: _moved(
        numbered((*ids.shape, weight.shape[1])), weight.shape, (ids,), (ARRAY,)
    ),
    bytes=lambda weight, ids, padding_index: 2 * ids.size * weight.shape[1] * weight.dtype.itemsize + nbytes(ids),
    skipped=lambda weight, ids, padding_index: 1,
    reads_rows=True,
    batch=_batch_embedding,
    doc="rows of a matrix by their numbers",
)
EMBEDDING_GRADIENT: Op = define(
    name="embedding_gradient",
    infer=_infer_embedding_gradient,
    bind=_bind_embedding_gradient,
    vjp=(
        lambda u, y, g, ids, vocabulary, padding_index: unpadded(
            EMBEDDING(u, ids, padding_index=padding_index), ids, padding_index
        ),
        no_gradient,
    ),
    jvp=lambda t, y, g, ids, vocabulary, padding_index: EMBEDDING_GRADIENT(
        t[0], ids, vocabulary=vocabulary, padding_index=padding_index
    ),
    accepts=c_ordered,
    sparsity=lambda g, ids, vocabulary, padding_index: _moved(
        numbered(g.shape), (vocabulary, g.shape[-1]), (ids,), (ARRAY,), back=True
    ),
    sum_rows=_sum_rows,
    checks=lambda g, ids, vocabulary, padding_index: ids_checked(ids, vocabulary),
    flops=per_element(1),
    skipped=lambda g, ids, vocabulary, padding_index: 1,
    unread=lambda g, ids, vocabulary, padding_index: 1,
    batch=_batch_embedding_gradient,
    doc="rows added into a matrix of zeros at their numbers",
)


def embedding(weight: Operand, ids: Operand, padding_index: int = -1) -> Tensor:
    """Rows of a matrix by their numbers.

    Args:
        weight: (vocabulary, dimension).
        ids: (...), integers in [0, vocabulary).
        padding_index: a row that is looked up like the others and gets no gradient; -1: none.

    Returns:
        (..., dimension).

    Raises:
        ShapeError: an id is out of range; names the first one, its row and position. So does every replay.
        DTypeError: the ids are not integers.
    """
    weight, ids = as_tensor(weight), _whole(ids)
    return EMBEDDING(weight, ids, padding_index=padding_index)


def embedding_gradient(g: Operand, ids: Operand, vocabulary: int, padding_index: int = -1) -> Tensor:
    """The gradient of `embedding` by its matrix, (vocabulary, dimension), from rows `g` (..., dimension)."""
    ids = _whole(ids)
    return EMBEDDING_GRADIENT(as_tensor(g), ids, vocabulary=vocabulary, padding_index=padding_index)


def _whole(ids: Operand) -> Tensor:
    ids = as_tensor(ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise DTypeError(f"embedding: expected integer token ids, got {ids.dtype}")
    return ids if ids.dtype == np.int64 else astype(ids, np.int64)


def check_ids(ids: Array, vocabulary: int, where: str, first: int = 0) -> None:
    """Raise `ShapeError` unless all of `ids` (rows, ...), of which this is the `first` row, are in [0, vocabulary)."""
    if all_below(ids, vocabulary):
        return
    wrong = np.argwhere((ids < 0) | (ids >= vocabulary))[0]
    row, *position = (int(i) for i in wrong) if ids.ndim else (0,)
    at = f" at position {position[0] if len(position) == 1 else position}" if position else ""
    raise ShapeError(
        f"{where}: token id {ids[tuple(wrong)]} in row {first + row}{at} is not one of the {vocabulary} of the "
        f"vocabulary, 0..{vocabulary - 1}"
    )


CHECK_IDS = check_op("check_ids", check_ids, leading)
