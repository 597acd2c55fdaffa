"""Changes of shape. All but `assemble` and `copy` are views: they cost nothing when replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from py_engine.ad.ops.record import (
    Call,
    Op,
    Scratch,
    Shape,
    as_tensor,
    as_tensors,
    common_dtype,
    implements,
    linear_jvp,
    register,
)
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import DTypeError, ShapeError

# Reshape and permute --------------------------------------------------------------------------------------


def _infer_reshape(x: Tensor, shape: Shape) -> tuple[Shape, Any]:
    return _reshaped(x.shape, shape), x.dtype


@lru_cache(maxsize=1024)
def _reshaped(old: Shape, new: Shape) -> Shape:
    size, known = math.prod(old), math.prod(n for n in new if n != -1)
    shape = new
    if new.count(-1) == 1 and known and size % known == 0:
        shape = tuple(size // known if n == -1 else n for n in new)
    if -1 in shape or math.prod(shape) != size:
        raise ShapeError(f"an array of shape {old} ({size} elements) cannot be reshaped to {shape}")
    return shape


def _reshape(x: Array, shape: Shape) -> Array:
    return x.reshape(shape)


RESHAPE: Op = register(
    Op(
        name="reshape",
        infer=_infer_reshape,
        view=_reshape,
        vjp=(lambda g, y, x, shape: RESHAPE(g, shape=x.shape),),
        jvp=linear_jvp("reshape"),
        doc="the same elements in another shape, in C order",
    )
)


@implements(np.reshape)
def reshape(x: Operand, shape: int | Sequence[int]) -> Tensor:
    """Return the same elements, in C order, in another shape; one length may be -1."""
    x = as_tensor(x)
    if shape.__class__ is tuple and shape == x.shape:
        return x
    lengths = (shape,) if isinstance(shape, (int, np.integer)) else shape
    wanted = _infer_reshape(x, tuple([int(n) for n in lengths]))[0]
    return x if wanted == x.shape else RESHAPE.apply((x,), {"shape": wanted})


@implements(np.ravel)
def ravel(x: Operand) -> Tensor:
    """Return the elements, in C order, as one axis."""
    return reshape(x, -1)


@implements(np.expand_dims)
def expand_dims(x: Operand, axis: int | tuple[int, ...]) -> Tensor:
    """Insert axes of length one, at these positions of the result."""
    x = as_tensor(x)
    try:
        return reshape(x, np.expand_dims(_dummy(x.shape), axis).shape)
    except ValueError as error:
        raise ShapeError(f"expand_dims: {error}; the shape is {x.shape}") from None


@implements(np.squeeze)
def squeeze(x: Operand, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Remove axes of length one: these, or all of them."""
    x = as_tensor(x)
    try:
        return reshape(x, np.squeeze(_dummy(x.shape), axis).shape)
    except ValueError as error:
        raise ShapeError(f"squeeze: {error}; the shape is {x.shape}") from None


def _dummy(shape: Shape) -> Array:
    return np.broadcast_to(np.empty((), np.bool_), shape)  # a shape to try numpy's own rules on, without memory


def _infer_transpose(x: Tensor, axes: tuple[int, ...]) -> tuple[Shape, Any]:
    return tuple(x.shape[a] for a in axes), x.dtype


def _transpose(x: Array, axes: tuple[int, ...]) -> Array:
    return x.transpose(axes)


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


TRANSPOSE: Op = register(
    Op(
        name="transpose",
        infer=_infer_transpose,
        view=_transpose,
        vjp=(lambda g, y, x, axes: TRANSPOSE(g, axes=_inverse(axes)),),
        jvp=linear_jvp("transpose"),
        doc="permutation of the axes",
    )
)


@implements(np.transpose, np.permute_dims)
def transpose(x: Operand, axes: Sequence[int] | None = None) -> Tensor:
    """Permute the axes; None reverses them."""
    x = as_tensor(x)
    ndim = len(x.shape)
    order = range(ndim)[::-1] if axes is None else axes
    wanted = tuple([int(a) % ndim if -ndim <= a < ndim else -1 for a in order])
    straight = [*range(ndim)]
    if sorted(wanted) != straight:
        raise ShapeError(f"transpose: axes {axes} are no permutation of the {ndim} axes of {x.shape}")
    return x if [*wanted] == straight else TRANSPOSE.apply((x,), {"axes": wanted})


@implements(np.swapaxes)
def swapaxes(x: Operand, axis1: int, axis2: int) -> Tensor:
    """Exchange two axes."""
    x = as_tensor(x)
    order = list(range(x.ndim))
    try:
        order[axis1], order[axis2] = order[axis2], order[axis1]
    except IndexError:
        raise ShapeError(f"swapaxes: axes {axis1} and {axis2} do not both exist in shape {x.shape}") from None
    return transpose(x, order)


@implements(np.moveaxis)
def moveaxis(x: Operand, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Move axes to other positions."""
    x = as_tensor(x)
    try:
        order = np.moveaxis(_dummy(tuple(range(x.ndim))), source, destination).shape  # lengths are axis numbers
    except ValueError as error:
        raise ShapeError(f"moveaxis: {error}; the shape is {x.shape}") from None
    return transpose(x, order)


def _infer_broadcast_to(x: Tensor, shape: Shape) -> tuple[Shape, Any]:
    if not _fits(x.shape, shape):
        raise ShapeError(f"an array of shape {x.shape} cannot be broadcast to {shape}")
    return shape, x.dtype


@lru_cache(maxsize=1024)
def _fits(old: Shape, new: Shape) -> bool:
    try:
        return np.broadcast_shapes(old, new) == new
    except ValueError:
        return False


def _broadcast_to(x: Array, shape: Shape) -> Array:
    if not x.shape:  # numpy's own way takes five times as long
        spread: Array = np.ndarray(shape, x.dtype, x, 0, (0,) * len(shape))
        spread.flags.writeable = False
        return spread
    return np.broadcast_to(x, shape)


BROADCAST_TO: Op = register(
    Op(
        name="broadcast_to",
        infer=_infer_broadcast_to,
        view=_broadcast_to,
        vjp=(lambda g, y, x, shape: g,),  # the runtime sums a gradient back to its input's shape
        jvp=linear_jvp("broadcast_to"),
        doc="the same elements repeated along new or length-one axes",
    )
)


@implements(np.broadcast_to)
def broadcast_to(x: Operand, shape: int | Sequence[int]) -> Tensor:
    """Repeat the elements along new or length-one axes."""
    x = as_tensor(x)
    wanted = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    return x if wanted == x.shape else BROADCAST_TO.apply((x,), {"shape": wanted})


# Slices and their transpose -------------------------------------------------------------------------------
#
# A basic index is stored as a tuple of integers, (start, stop, step) triples with the slice made explicit, and
# None for a new axis: hashable, unlike slice objects.

Item = int | tuple[int, int | None, int] | None
Index = tuple[Item, ...]


def as_index(index: Index) -> tuple[Any, ...]:
    """Return numpy's form of a stored basic index; the ellipsis makes it a view even of a single element."""
    return (*(slice(*item) if isinstance(item, tuple) else item for item in index), Ellipsis)


def _infer_slice(x: Tensor, index: Index) -> tuple[Shape, Any]:
    try:
        return _dummy(x.shape)[as_index(index)].shape, x.dtype
    except IndexError as error:
        raise ShapeError(f"{error}; the shape is {x.shape}") from None


def _slice(x: Array, index: Index) -> Array:
    view: Array = x[as_index(index)]
    return view


SLICE: Op = register(
    Op(
        name="slice",
        infer=_infer_slice,
        view=_slice,
        vjp=(lambda g, y, x, index: assemble([g], [index], x.shape),),
        jvp=linear_jvp("slice"),
        doc="basic indexing: integers, slices, new axes",
    )
)


def _infer_assemble(*parts: Tensor, shape: Shape, indices: tuple[Index, ...]) -> tuple[Shape, Any]:
    for part, index in zip(parts, indices, strict=True):
        place = _dummy(shape)[as_index(index)].shape
        if place != part.shape:
            raise ShapeError(f"a part of shape {part.shape} does not fit a place of shape {place}")
    return shape, common_dtype(parts)


@lru_cache(maxsize=1024)
def layers(shape: Shape, indices: tuple[Index, ...]) -> tuple[int, int]:
    """Return how many of the places hold the least and the most often covered element: (1, 1) is a mosaic."""
    counts = np.zeros(shape, np.uint32)
    for index in indices:
        counts[as_index(index)] += 1
    return (int(counts.min()), int(counts.max())) if counts.size else (1, 1)


def covers(shape: Shape, indices: tuple[Index, ...]) -> bool:
    """Whether the places fill the whole shape without overlap."""
    return layers(shape, indices) == (1, 1)


def _bind_assemble(
    arrays: Sequence[Array], out: Array, scratch: Scratch, shape: Shape, indices: tuple[Index, ...]
) -> list[Call]:
    places = [out[as_index(index)] for index in indices]
    least, most = layers(shape, indices)
    calls: list[Call] = [] if least else [partial(out.fill, 0)]
    if most <= 1:
        return calls + [
            partial(np.copyto, place, part)
            for place, part in zip(places, arrays, strict=True)
            if not _same_memory(place, part)  # the planner may have put the part in its place already
        ]
    if least:
        calls.append(partial(out.fill, 0))
    for place, part in zip(places, arrays, strict=True):
        # Added in one piece: numpy adds to scattered memory through buffers that it allocates.
        total = scratch(place.shape, place.dtype)
        calls += [
            partial(np.copyto, total, place),
            partial(np.add, total, part, total),
            partial(np.copyto, place, total),
        ]
    return calls


def _same_memory(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data and a.strides == b.strides and a.shape == b.shape


ASSEMBLE: Op = register(
    Op(
        name="assemble",
        infer=_infer_assemble,
        bind=_bind_assemble,
        vjp=lambda i, g, y, *parts, shape, indices: SLICE(g, index=indices[i]),
        jvp=linear_jvp("assemble"),
        doc="parts put (where they overlap, added) into their places in an array of zeros",
    )
)


def assemble(parts: Sequence[Tensor], indices: Sequence[Index], shape: Shape) -> Tensor:
    """Add each part into its place, a basic index, in an array of zeros of this shape."""
    return ASSEMBLE(*parts, shape=shape, indices=tuple(indices))


def _along(axis: int, item: Item) -> Index:
    return (*[(0, None, 1)] * axis, item)


def _check_dtypes(name: str, parts: Sequence[Tensor]) -> None:
    try:
        common_dtype(parts)
    except DTypeError as error:
        raise DTypeError(f"{name}: {error}") from None


@implements(np.concatenate)
def concatenate(arrays: Sequence[Operand], axis: int = 0) -> Tensor:
    """Join arrays along an axis they have."""
    parts = as_tensors(arrays)
    if not parts:
        raise ShapeError("concatenate: at least one array is needed")
    _check_dtypes("concatenate", parts)
    first = parts[0]
    if axis is None or not -first.ndim <= axis < first.ndim:
        raise ShapeError(f"concatenate: axis {axis} does not exist in shape {first.shape}")
    axis %= first.ndim
    for part in parts:
        if part.ndim != first.ndim or any(part.shape[a] != first.shape[a] for a in range(first.ndim) if a != axis):
            shapes = " and ".join(str(p.shape) for p in parts)
            raise ShapeError(f"concatenate: shapes {shapes} do not match outside axis {axis}")
    ends = np.cumsum([part.shape[axis] for part in parts]).tolist()
    places = [_along(axis, (end - part.shape[axis], end, 1)) for end, part in zip(ends, parts, strict=True)]
    return assemble(parts, places, (*first.shape[:axis], ends[-1], *first.shape[axis + 1 :]))


@implements(np.stack)
def stack(arrays: Sequence[Operand], axis: int = 0) -> Tensor:
    """Join arrays of one shape along a new axis."""
    parts = as_tensors(arrays)
    if not parts:
        raise ShapeError("stack: at least one array is needed")
    _check_dtypes("stack", parts)
    shape = parts[0].shape
    if any(part.shape != shape for part in parts):
        raise ShapeError(f"stack: all shapes must be equal, got {' and '.join(str(p.shape) for p in parts)}")
    if not -len(shape) - 1 <= axis <= len(shape):
        raise ShapeError(f"stack: axis {axis} does not exist in a stack of arrays of shape {shape}")
    axis %= len(shape) + 1
    places = [_along(axis, i) for i in range(len(parts))]
    return assemble(parts, places, (*shape[:axis], len(parts), *shape[axis:]))


@implements(np.pad)
def pad(
    x: Operand,
    pad_width: int | Sequence[int] | Sequence[Sequence[int]],
    mode: str = "constant",
    constant_values: float = 0,
) -> Tensor:
    """Surround an array with a constant; widths as in numpy.pad."""
    x = as_tensor(x)
    if mode != "constant":
        raise ValueError(f"pad: only mode 'constant' is supported, got {mode!r}")
    widths = np.broadcast_to(pad_width, (x.ndim, 2)).tolist()
    if any(n < 0 for pair in widths for n in pair):
        raise ShapeError(f"pad: widths must not be negative, got {pad_width}")
    place = tuple((before, before + n, 1) for (before, _), n in zip(widths, x.shape, strict=True))
    shape = tuple(before + n + after for (before, after), n in zip(widths, x.shape, strict=True))
    if constant_values == 0:
        return assemble([x], [place], shape)
    return assemble([x - constant_values], [place], shape) + constant_values


# Copies ---------------------------------------------------------------------------------------------------


def _infer_copy(x: Tensor) -> tuple[Shape, Any]:
    return x.shape, x.dtype


def _copy(x: Array, out: Array) -> None:
    np.copyto(out, x)


copy = register(
    Op(
        name="copy",
        infer=_infer_copy,
        kernel=_copy,
        vjp=(lambda g, y, x: g,),
        jvp=linear_jvp("copy"),
        doc="the same values in memory of their own, in C order",
    ),
    np.copy,
)
