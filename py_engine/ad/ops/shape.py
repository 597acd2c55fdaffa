"""Changes of shape. All but `assemble` and `copy` are views: they cost nothing when replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.op import (
    TABLE,
    Call,
    Equation,
    Op,
    Scratch,
    Shape,
    as_tensor,
    as_tensors,
    common_dtype,
    define,
    implements,
    in_one_dtype,
    infer_same,
    linear_jvp,
    numbered,
    one_to_one,
    per_element,
)
from py_engine.ad.ops.arguments import as_dtype, axis_of, checked, refuse, same_dtype, whole, wholes
from py_engine.ad.ops.blocks import copies
from py_engine.ad.tensor import Array, Literal, Operand, Tensor, real_array
from py_engine.errors import DTypeError, ShapeError

# Many samples at once -------------------------------------------------------------------------------------
#
# What the batching rules of ops are made of (`Op.batch`). An input that is mapped is (count, *shape).

EACH: tuple[int, int | None, int] = (0, None, 1)
"""The leading axis of samples (count, *shape) in an index: all of it."""


def behind(axes: Iterable[int]) -> tuple[int, ...]:
    """Return axes of a sample as those of all samples."""
    return tuple(axis + 1 for axis in axes)


def aligned(x: Tensor, ndim: int) -> Tensor:
    """Make room behind the leading axis, so that the rest broadcasts like an array among others of `ndim` axes."""
    return reshape(x, (x.shape[0], *(1,) * (ndim + 1 - x.ndim), *x.shape[1:]))


def all_aligned(mapped: Sequence[bool], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the inputs so that they broadcast with each other as those of one sample do."""
    ndim = max(x.ndim - m for x, m in zip(inputs, mapped, strict=True))
    return tuple([aligned(x, ndim) if m else x for x, m in zip(inputs, mapped, strict=True)])


def for_each(x: Tensor, count: int) -> Tensor:
    """Return an array that all samples share with a leading axis of samples."""
    return broadcast_to(x, (count, *x.shape))


def all_mapped(count: int, mapped: Sequence[bool], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the inputs, each with a leading axis of samples."""
    return tuple([x if m else for_each(x, count) for x, m in zip(inputs, mapped, strict=True)])


def leading(op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Any:
    """Batching of an op that takes any leading axes and broadcasts them: elementwise ops, stacks of matrices."""
    operands = all_aligned(mapped, inputs)
    if op.several:
        found = op.apply_several(operands, attrs)
        return found, [True] * len(found)
    return op.apply(operands, attrs)


def along_axes(op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Any:
    """Batching of an op whose inputs lie along the same axes, and that its attribute `axes` or `axis` names."""
    name = "axes" if "axes" in attrs else "axis"
    axes = attrs[name]
    later = axes + 1 if isinstance(axes, int) else behind(axes)
    return op.apply(all_mapped(count, mapped, inputs), {**attrs, name: later})


def by_samples(op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Any:
    """Batching of an op whose inputs and result have a batch's samples on their first axis: one larger batch."""
    whole = [reshape(x, (count * x.shape[1], *x.shape[2:])) for x in all_mapped(count, mapped, inputs)]
    return in_batches(op.apply(tuple(whole), attrs), count, inputs[0].shape[1 if mapped[0] else 0])


def in_batches(y: Tensor, count: int, samples: int) -> Tensor:
    """Return a batch of `count * samples` as (count, samples, ...)."""
    return reshape(y, (count, samples, *y.shape[1:]))


# Reshape and permute --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _reshaped(old: Shape, new: Shape) -> Shape:
    size, known = math.prod(old), math.prod(n for n in new if n != -1)
    shape = new
    if new.count(-1) == 1 and known and size % known == 0:
        shape = tuple(size // known if n == -1 else n for n in new)
    if -1 in shape or math.prod(shape) != size:
        raise ShapeError(f"an array of shape {old} ({size} elements) cannot be reshaped to {shape}")
    return shape


def _is_view(x: Array, shape: Shape) -> bool:
    try:
        np.reshape(x, shape, copy=False)
    except ValueError:
        return False
    return True


def _shorter_reshape(equation: Equation, made: Mapping[int, Equation]) -> Tensor | Equation:
    (x,) = equation.inputs
    before = made.get(id(x))
    if before is not None and before.op is RESHAPE:
        (x,) = before.inputs
    return x if x.shape == equation.output.shape else equation.reading((x,))


RESHAPE: Op = define(
    name="reshape",
    infer=lambda x, shape: (_reshaped(x.shape, shape), x.dtype),
    view=lambda x, shape: x.reshape(shape),
    accepts=_is_view,
    in_order=True,
    simplify=_shorter_reshape,
    vjp=(lambda g, y, x, shape: RESHAPE(g, shape=x.shape),),
    jvp=linear_jvp("reshape"),
    batch=lambda op, count, mapped, inputs, attrs: op(*inputs, shape=(count, *attrs["shape"])),
    doc="the same elements in another shape, in C order",
)


@implements(np.reshape)
def reshape(a: Operand, /, shape: int | Sequence[int], order: str = "C", *, copy: bool | None = None) -> Tensor:
    """Return the same elements in another shape; one length may be -1. They are read and put in C order, the last axis
    fastest, or with `order` "F" the first."""
    x = as_tensor(a)
    lengths = wholes(shape, "reshape: each length")
    if order != "C" or copy is not None:
        refuse("reshape", order=(order, "C", "F"), copy=(copy,))
        if order == "F":
            return transpose(reshape(transpose(x), lengths[::-1]))
    if lengths == x.shape:
        return x
    wanted = _reshaped(x.shape, lengths)
    return x if wanted == x.shape else RESHAPE.apply((x,), {"shape": wanted})


@implements(np.ravel)
def ravel(a: Operand, order: str = "C") -> Tensor:
    """Return the elements as one axis, in C order, or with `order` "F" the first axis fastest."""
    x = as_tensor(a)
    if order != "C":
        refuse("ravel", order=(order, "C", "F"))
        x = transpose(x) if order == "F" else x
    return reshape(x, (x.size,))


@implements(np.expand_dims)
def expand_dims(a: Operand, axis: int | Sequence[int]) -> Tensor:
    """Insert axes of length one, at these positions of the result."""
    x = as_tensor(a)
    axes = wholes(axis, "expand_dims: the axis")
    return reshape(x, checked("expand_dims", lambda: np.expand_dims(_dummy(x.shape), axes).shape, x.shape))


@implements(np.squeeze)
def squeeze(a: Operand, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Remove axes of length one: these, or all of them."""
    x = as_tensor(a)
    return reshape(x, checked("squeeze", lambda: np.squeeze(_dummy(x.shape), axis).shape, x.shape))


@lru_cache(maxsize=1024)
def _dummy(shape: Shape) -> Array:
    return np.broadcast_to(np.empty((), np.bool_), shape)  # a shape to try numpy's own rules on, without memory


def _shorter_transpose(equation: Equation, made: Mapping[int, Equation]) -> Tensor | Equation:
    (x,), axes = equation.inputs, equation.attrs["axes"]
    before = made.get(id(x))
    if before is not None and before.op is TRANSPOSE:
        (x,), axes = before.inputs, tuple([before.attrs["axes"][a] for a in axes])
    if axes == tuple(range(x.ndim)):
        return x
    return Equation(TRANSPOSE, (x,), {"axes": axes}, equation.outputs, equation.scope)


TRANSPOSE: Op = define(
    name="transpose",
    infer=lambda x, axes: (tuple(x.shape[a] for a in axes), x.dtype),
    view=lambda x, axes: x.transpose(axes),
    simplify=_shorter_transpose,
    vjp=(lambda g, y, x, axes: TRANSPOSE(g, axes=tuple(sorted(range(y.ndim), key=axes.__getitem__))),),
    jvp=linear_jvp("transpose"),
    batch=lambda op, count, mapped, inputs, attrs: op(*inputs, axes=(0, *behind(attrs["axes"]))),
    doc="permutation of the axes",
)


@implements(np.transpose, np.permute_dims)
def transpose(a: Operand, axes: Sequence[int] | None = None) -> Tensor:
    """Permute the axes; None reverses them."""
    x = as_tensor(a)
    ndim = len(x.shape)
    order = range(ndim)[::-1] if axes is None else wholes(axes, "transpose: each axis")
    wanted = tuple([n % ndim if -ndim <= n < ndim else -1 for n in order])
    straight = [*range(ndim)]
    if sorted(wanted) != straight:
        raise ShapeError(f"transpose: axes {axes} are no permutation of the {ndim} axes of {x.shape}")
    return x if [*wanted] == straight else TRANSPOSE.apply((x,), {"axes": wanted})


@implements(np.swapaxes)
def swapaxes(a: Operand, axis1: int, axis2: int) -> Tensor:
    """Exchange two axes."""
    x = as_tensor(a)
    first, second = [axis_of(axis, x.ndim, "swapaxes", x.shape) for axis in (axis1, axis2)]
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return transpose(x, order)


@implements(np.moveaxis)
def moveaxis(a: Operand, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Move axes to other positions."""
    x = as_tensor(a)
    places = wholes(source, "moveaxis: each axis"), wholes(destination, "moveaxis: each axis")
    dummy = _dummy(tuple(range(x.ndim)))  # lengths are axis numbers
    return transpose(x, checked("moveaxis", lambda: np.moveaxis(dummy, *places).shape, x.shape))


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


def _batch_broadcast_to(op: Op, count: int, mapped: Any, inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Tensor:
    shape = attrs["shape"]
    return broadcast_to(aligned(inputs[0], len(shape)), (count, *shape))


BROADCAST_TO: Op = define(
    name="broadcast_to",
    infer=_infer_broadcast_to,
    view=_broadcast_to,
    vjp=(lambda g, y, x, shape: g,),  # the runtime sums a gradient back to its input's shape
    jvp=linear_jvp("broadcast_to"),
    batch=_batch_broadcast_to,
    doc="the same elements repeated along new or length-one axes",
)


@implements(np.broadcast_to)
def broadcast_to(array: Operand, shape: int | Sequence[int], subok: bool = False) -> Tensor:
    """Repeat the elements along new or length-one axes."""
    x = as_tensor(array)
    if subok is not False:
        refuse("broadcast_to", subok=(subok, False))
    wanted = wholes(shape, "broadcast_to: each length")
    return x if wanted == x.shape else BROADCAST_TO.apply((x,), {"shape": wanted})


def is_one(x: Tensor, made: Mapping[int, Equation]) -> bool:
    """Whether each element of a program's variable is the number 1, as `made` has its equations; see `Op.simplify`."""
    while id(x) in made and made[id(x)].op in (RESHAPE, BROADCAST_TO):
        (x,) = made[id(x)].inputs
    return isinstance(x, Literal) and x.item() == 1


# Slices and their transpose -------------------------------------------------------------------------------
#
# A basic index is stored as a tuple of integers, (start, stop, step) triples with the slice made explicit, and
# None for a new axis: hashable, unlike slice objects.

Item = int | tuple[int | None, int | None, int] | None
Index = tuple[Item, ...]


@lru_cache(maxsize=4096)  # a recurrent network takes thousands of slices at a few places
def as_index(index: Index) -> tuple[Any, ...]:
    """Return numpy's form of a stored basic index; the ellipsis makes it a view even of a single element."""
    return (*(slice(*item) if isinstance(item, tuple) else item for item in index), Ellipsis)


def _infer_slice(x: Tensor, index: Index) -> tuple[Shape, Any]:
    try:
        return _dummy(x.shape)[as_index(index)].shape, x.dtype
    except IndexError as error:
        raise ShapeError(f"{error}; the shape is {x.shape}") from None


SLICE: Op = define(
    name="slice",
    infer=_infer_slice,
    view=lambda x, index: x[as_index(index)],
    vjp=(lambda g, y, x, index: assemble([g], [index], x.shape),),
    jvp=linear_jvp("slice"),
    batch=lambda op, count, mapped, inputs, attrs: op(*inputs, index=(EACH, *attrs["index"])),
    slice_index=lambda index: index,
    doc="basic indexing: integers, slices, new axes",
)


def part_of(x: Tensor, axis: int, start: int | None, stop: int | None, step: int = 1) -> Tensor:
    """Return the slice start:stop:step of an axis."""
    return SLICE(x, index=_along(axis, (start, stop, step)))


@implements(np.flip)
def flip(m: Operand, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Turn the order of the elements round along `axis` (all axes when None)."""
    x = as_tensor(m)
    axes = range(x.ndim) if axis is None else [axis_of(a, x.ndim, "flip", x.shape) for a in _axes("flip", axis)]
    if len(set(axes)) < len(axes):
        raise ShapeError(f"flip: axes {axis} name one twice")
    items: list[Item] = [(None, None, -1) if d in axes else (0, None, 1) for d in range(x.ndim)]
    return SLICE(x, index=tuple(items)) if len(axes) else x


def _axes(function: str, axis: Any) -> tuple[int, ...]:
    return wholes(axis, f"{function}: each axis")


@implements(np.roll)
def roll(a: Operand, shift: int | tuple[int, ...], axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Move the elements by `shift` places along `axis`; those moved beyond the end come back at the beginning.

    With axis None they move in C order, and the shape stays.
    """
    x = as_tensor(a)
    if axis is None:
        return reshape(roll(ravel(x), _total(shift), 0), x.shape)
    axes = tuple([axis_of(d, x.ndim, "roll", x.shape) for d in _axes("roll", axis)])
    shifts = wholes(shift, "roll: each shift")
    if len(axes) != len(shifts):
        pairs = checked("roll", lambda: np.broadcast(shifts, axes), x.shape)
        if pairs.ndim > 1:
            raise ShapeError(f"roll: shifts {shift} and axes {axis} do not pair up")
        shifts, axes = zip(*pairs, strict=True) if pairs.size else ((), ())
    for places, d in zip(shifts, axes, strict=True):
        n = x.shape[d]
        start = -int(places) % n if n else 0
        if start:
            x = concatenate([part_of(x, d, start, n), part_of(x, d, 0, start)], d)
    return x


def _total(shift: Any) -> int:
    return sum(wholes(shift, "roll: each shift"))


def from_places(function: str, x: Tensor, pick: Callable[[Array], Array]) -> Tensor:
    """Return elements of `x` at the places that `pick`, numpy's own function, takes of an array of places."""
    places = np.arange(x.size).reshape(x.shape)
    found = checked(function, lambda: np.asarray(pick(places)), x.shape)
    return TABLE["gather"](ravel(x), Tensor(np.array(found, np.intp)), pattern=("array",))


@implements(np.repeat)
def repeat(a: Operand, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
    """Repeat each element `repeats` times along `axis` (of all, in C order, when None): one number, or one for each."""
    x = as_tensor(a)
    if axis is None:
        x, axis = ravel(x), 0
    axis = axis_of(axis, x.ndim, "repeat", x.shape)
    counts = wholes(repeats, "repeat: each number of repeats")
    if min(counts, default=0) < 0:
        raise ShapeError(f"repeat: repeats must not be negative, got {repeats}")
    n = x.shape[axis]
    if len(counts) == 1:
        wide = broadcast_to(expand_dims(x, axis + 1), (*x.shape[: axis + 1], counts[0], *x.shape[axis + 1 :]))
        return reshape(wide, (*x.shape[:axis], n * counts[0], *x.shape[axis + 1 :]))
    if len(counts) != n:
        raise ShapeError(f"repeat: {len(counts)} numbers of repeats do not fit the {n} elements along axis {axis}")
    places = Tensor(np.repeat(np.arange(n), counts))
    return TABLE["gather"](x, places, pattern=(*[(0, None, 1)] * axis, "array"))


@implements(np.tile)
def tile(A: Operand, reps: int | Sequence[int]) -> Tensor:
    """Lay copies of the whole array side by side: `reps` of them along each axis, the last axes first."""
    x, counts = as_tensor(A), wholes(reps, "tile: each number of copies")
    if min(counts, default=0) < 0:
        raise ShapeError(f"tile: the numbers of copies must not be negative, got {reps}")
    ndim = max(x.ndim, len(counts))
    counts = (1,) * (ndim - len(counts)) + counts
    shape = (1,) * (ndim - x.ndim) + x.shape
    apart = [k for n in shape for k in (1, n)]
    wide = [k for n, count in zip(shape, counts, strict=True) for k in (count, n)]
    return reshape(broadcast_to(reshape(x, apart), wide), [n * k for n, k in zip(shape, counts, strict=True)])


@implements(np.diagonal)
def diagonal(a: Operand, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The diagonals of the matrices that two axes make, as the last axis; `offset` counts to the right."""
    x = as_tensor(a)
    if x.ndim < 2:
        raise ShapeError(f"diagonal: at least two axes are needed, got shape {x.shape}")
    first, second = (axis_of(axis, x.ndim, "diagonal", x.shape) for axis in (axis1, axis2))
    if first == second:
        raise ShapeError(f"diagonal: the two axes must differ, got {axis1} and {axis2}")
    start = whole(offset, "diagonal: offset")
    x = moveaxis(x, (first, second), (-2, -1))
    *others, rows, columns = x.shape
    row, column = max(-start, 0), max(start, 0)
    count = max(min(rows - row, columns - column), 0)
    flat = reshape(x, (*others, rows * columns))
    begin = row * columns + column if count else 0
    return part_of(flat, len(others), begin, begin + count * (columns + 1) - columns if count else begin, columns + 1)


@implements(np.trace)
def trace(
    a: Operand, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: DTypeLike | None = None, out: None = None
) -> Tensor:
    """The sum of each diagonal, see `diagonal`."""
    refuse("trace", out=(out,))
    found = diagonal(a, offset, axis1, axis2)
    same_dtype("trace", dtype, found)
    return TABLE["sum"](found, axes=(found.ndim - 1,), keepdims=False)


@implements(np.diagflat)
def diagflat(v: Operand, k: int = 0) -> Tensor:
    """A matrix of zeros with the elements of `v`, in C order, on its diagonal, `k` places to the right."""
    x = ravel(v)
    places = whole(k, "diagflat: k")
    n = x.size + abs(places)
    begin = max(places, 0) + max(-places, 0) * n if x.size else 0
    end = begin + x.size * (n + 1) - n if x.size else 0
    return reshape(assemble([x], [((begin, end, n + 1),)], (n * n,)), (n, n))


def _triangle(function: str, m: Any, k: Any, lower: bool) -> Tensor:
    x = as_tensor(m)
    if x.ndim == 1:
        x = broadcast_to(x, (x.size, x.size))
    if x.ndim < 2:
        raise ShapeError(f"{function}: at least one axis is needed, got shape {x.shape}")
    below = np.tri(x.shape[-2], x.shape[-1], k=whole(k, f"{function}: k") - (not lower), dtype=np.bool_)
    return TABLE["where"](Tensor(below if lower else ~below), x, Literal(np.zeros((), x.dtype)))


@implements(np.tril)
def tril(m: Operand, k: int = 0) -> Tensor:
    """The matrix with zeros above the diagonal that is `k` places to the right of the main one."""
    return _triangle("tril", m, k, True)


@implements(np.triu)
def triu(m: Operand, k: int = 0) -> Tensor:
    """The matrix with zeros below the diagonal that is `k` places to the right of the main one."""
    return _triangle("triu", m, k, False)


def _infer_assemble(*parts: Tensor, shape: Shape, indices: tuple[Index, ...]) -> tuple[Shape, Any]:
    for part, index in zip(parts, indices, strict=True):
        place = _dummy(shape)[as_index(index)].shape
        if place != part.shape:
            raise ShapeError(f"a part of shape {part.shape} does not fit a place of shape {place}")
    return shape, common_dtype(parts)


@lru_cache(maxsize=1024)
def layers(shape: Shape, indices: tuple[Index, ...]) -> tuple[int, int]:
    """Return how many of the places hold the least and the most often covered element: (1, 1) is a mosaic."""
    items = [[item for item in index if item is not None] for index in indices]
    # Along an axis that every place covers from end to end, all counts are the same: one element stands for the axis.
    covered = [all(row[axis : axis + 1] in ([], [(0, None, 1)]) for row in items) for axis in range(len(shape))]
    counts = np.zeros([min(n, 1) if whole else n for n, whole in zip(shape, covered, strict=True)], np.uint32)
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
    calls: list[Call] = [] if least else [partial(np.ndarray.fill, out, 0)]
    if most <= 1:
        return calls + [
            call
            for place, part in zip(places, arrays, strict=True)
            if not _same_memory(place, part)  # the planner may have put the part in its place already
            for call in copies(place, part)
        ]
    if least:
        calls.append(partial(np.ndarray.fill, out, 0))
    for place, part in zip(places, arrays, strict=True):
        calls += add_into(place, part, scratch(place.shape, place.dtype))
    return calls


def add_into(place: Array, part: Array, total: Array) -> list[Call]:
    """Return the calls that add a part into its place, by way of the memory `total`, which lies in one piece.

    numpy would add to scattered memory through buffers that it allocates.
    """
    return [*copies(total, place), partial(np.add, total, part, total), *copies(place, total)]


def _same_memory(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data and a.strides == b.strides and a.shape == b.shape


def _batch_assemble(
    op: Op, count: int, mapped: Sequence[bool], parts: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    indices = [(EACH, *index) for index in attrs["indices"]]
    return assemble(all_mapped(count, mapped, parts), indices, (count, *attrs["shape"]))


def _pull_assemble(cotangents: Any, needs_grad: Sequence[bool], node: Tensor) -> list[Tensor | None]:
    (g,), indices = cotangents, node.attrs["indices"]
    return [SLICE(g, index=index) if needed else None for index, needed in zip(indices, needs_grad, strict=True)]


ASSEMBLE: Op = define(
    name="assemble",
    infer=_infer_assemble,
    bind=_bind_assemble,
    vjp=_pull_assemble,
    jvp=linear_jvp("assemble"),
    batch=_batch_assemble,
    sparsity=lambda *parts, shape, indices: [
        (numbered(shape)[as_index(index)], numbered(part.shape)) for part, index in zip(parts, indices, strict=True)
    ],
    places=lambda shape, indices: [as_index(index) for index in indices] if covers(shape, indices) else [],
    flops=lambda *parts, **attrs: sum(part.size for part in parts),
    skipped=lambda *parts, shape, indices: 1 - min(1, sum(part.size for part in parts) / max(math.prod(shape), 1)),
    doc="parts put (where they overlap, added) into their places in an array of zeros",
)


def assemble(parts: Sequence[Operand], indices: Sequence[Index], shape: Shape) -> Tensor:
    """Add each part into its place, a basic index, in an array of zeros of this shape."""
    return ASSEMBLE(*parts, shape=shape, indices=tuple(indices))


def _along(axis: int, item: Item) -> Index:
    return (*[(0, None, 1)] * axis, item)


@implements(np.concatenate)
def concatenate(
    arrays: Sequence[Operand],
    /,
    axis: int | None = 0,
    out: None = None,
    *,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
) -> Tensor:
    """Join arrays along an axis they have; along None as vectors, one after the other."""
    parts = _joined("concatenate", arrays, out, dtype, casting)
    if axis is None:
        return concatenate([ravel(part) for part in parts])
    first = parts[0]
    axis = axis_of(axis, first.ndim, "concatenate", first.shape)
    for part in parts:
        if part.ndim != first.ndim or any(part.shape[a] != first.shape[a] for a in range(first.ndim) if a != axis):
            shapes = " and ".join(str(p.shape) for p in parts)
            raise ShapeError(f"concatenate: shapes {shapes} do not match outside axis {axis}")
    ends = np.cumsum([part.shape[axis] for part in parts]).tolist()
    places = [_along(axis, (end - part.shape[axis], end, 1)) for end, part in zip(ends, parts, strict=True)]
    return assemble(parts, places, (*first.shape[:axis], ends[-1], *first.shape[axis + 1 :]))


@implements(np.stack)
def stack(
    arrays: Sequence[Operand],
    axis: int = 0,
    out: None = None,
    *,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
) -> Tensor:
    """Join arrays of one shape along a new axis."""
    parts = _joined("stack", arrays, out, dtype, casting)
    shape = parts[0].shape
    if any(part.shape != shape for part in parts):
        raise ShapeError(f"stack: all shapes must be equal, got {' and '.join(str(p.shape) for p in parts)}")
    axis = axis_of(axis, len(shape) + 1, "stack")
    places = [_along(axis, i) for i in range(len(parts))]
    return assemble(parts, places, (*shape[:axis], len(parts), *shape[axis:]))


def _joined(function: str, arrays: Any, out: Any, dtype: Any, casting: Any) -> tuple[Tensor, ...]:
    """Return the arrays to be joined, of one dtype: those of a sequence, or the rows of one array."""
    if out is not None or casting != "same_kind":
        refuse(function, out=(out,), casting=(casting, "same_kind"))
    if isinstance(arrays, (Tensor, np.ndarray)) and arrays.shape:
        arrays = [*as_tensor(arrays)]  # of a captured array: a compiled function reads its elements anew
    if not isinstance(arrays, (list, tuple)):
        raise DTypeError(f"{function}: expected a list or tuple of arrays, got {type(arrays).__name__}")
    parts = as_tensors(arrays)
    if not parts:
        raise ShapeError(f"{function}: at least one array is needed")
    try:
        parts = in_one_dtype(parts)
    except DTypeError as error:
        raise DTypeError(f"{function}: {error}") from None
    same_dtype(function, dtype, parts[0])
    return parts


# Copies ---------------------------------------------------------------------------------------------------


COPY: Op = define(
    name="copy",
    infer=infer_same,
    kernel=lambda x, out: np.copyto(out, x),
    bind=lambda arrays, out, scratch: copies(out, arrays[0]),
    vjp=(lambda g, y, x: g,),
    jvp=linear_jvp("copy"),
    batch=leading,
    sparsity=one_to_one,
    scalar="{0}",
    flops=per_element(0),
    doc="the same values in new memory, in C order",
)


@implements(np.copy)
def copy(a: Operand, order: str = "K", subok: bool = False) -> Tensor:
    """Return the same values in new memory, in C order."""
    if order != "K" or subok:
        refuse("copy", order=(order, "K", "C"), subok=(subok, False))
    return COPY(a)


# What a tensor is, and constants of its shape -------------------------------------------------------------


@implements(np.shape, constant=True)
def _shape(a: Tensor) -> Shape:
    return as_tensor(a).shape


@implements(np.ndim, constant=True)
def _ndim(a: Tensor) -> int:
    return as_tensor(a).ndim


@implements(np.size, constant=True)
def _size(a: Tensor, axis: int | tuple[int, ...] | None = None) -> int:
    shape = as_tensor(a).shape
    return int(checked("size", lambda: np.size(_dummy(shape), axis), shape))


def _constants(
    function: str, a: Any, value: Any, dtype: Any, order: Any, subok: Any, shape: Any, device: Any
) -> Tensor:
    """Return a value in the shape of `a`: a constant, since shapes are known while a function is traced."""
    refuse(function, order=(order, "K", "C"), subok=(subok, True, False), device=(device, "cpu"))
    x = as_tensor(a)
    lengths = x.shape if shape is None else wholes(shape, f"{function}: each length")
    if any(n < 0 for n in lengths):
        raise ShapeError(f"{function}: lengths must not be negative, got {lengths}")
    kind = x.dtype if dtype is None else as_dtype(dtype)
    if isinstance(value, Tensor):
        return broadcast_to(value if value.dtype == kind else TABLE["astype"](value, dtype=kind), lengths)
    given = real_array(checked(function, lambda: np.asarray(value), lengths), value)
    filled = checked(function, lambda: given.astype(kind) if given.ndim else np.full((), value, kind), lengths)
    return broadcast_to(Tensor(filled) if filled.ndim else Literal(filled), lengths)


@implements(np.zeros_like, constant=True)
def _zeros_like(
    a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
) -> Tensor:
    return _constants("zeros_like", a, 0, dtype, order, subok, shape, device)


@implements(np.ones_like, constant=True)
def _ones_like(
    a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
) -> Tensor:
    return _constants("ones_like", a, 1, dtype, order, subok, shape, device)


@implements(np.full_like)
def _full_like(
    a: Any,
    fill_value: Any,
    dtype: Any = None,
    order: str = "K",
    subok: bool = True,
    shape: Any = None,
    *,
    device: Any = None,
) -> Tensor:
    return _constants("full_like", a, fill_value, dtype, order, subok, shape, device)


@implements(np.empty_like, constant=True)
def _empty_like(
    prototype: Any, /, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
) -> Tensor:
    return _constants("empty_like", prototype, 0, dtype, order, subok, shape, device)
