"""Convolution (cross-correlation, as in all deep-learning frameworks) over one or two spatial axes, and more.

    y[n, f, o] = sum over c, k of  x[n, c, o * stride + k * dilation - padding] * weight[f, c, k]

with channels first: x (N, C, *lengths), weight (F, C / groups, *kernel), y (N, F, *outputs). It is linear in x and in
the weight, so three ops are closed under differentiation: `conv` and its two gradients, each the derivative of the
others.

All are matrix products with *columns* (im2col): the windows of x, copied in one strided call into a buffer of the op,
whose rows are in the order (channel, kernel position) of the weight. In training steps some are by Winograd's
algorithm instead (`ad.ops.winograd`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from py_engine.ad.mutation import watch_setting
from py_engine.ad.op import (
    Call,
    Op,
    Scratch,
    Shape,
    as_tensors,
    common_dtype,
    define,
    float_only,
    multilinear_jvp,
    numbered,
)
from py_engine.ad.ops import winograd
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.ops.blocks import blocks, copies, in_blocks, work
from py_engine.ad.ops.padding import pad
from py_engine.ad.ops.product_parts import bind_product, needs_no_copies
from py_engine.ad.ops.shape import add_into, all_mapped, for_each, in_batches, moveaxis, reshape
from py_engine.ad.state import STATE
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ShapeError

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Before and after, for each spatial axis."""

Sizes: TypeAlias = int | Sequence[int]
"""A setting for all spatial axes, or one for each."""

Padding: TypeAlias = Sizes | Sequence[Sequence[int]]
"""The same, or for each spatial axis a pair, before and after."""

# Settings -------------------------------------------------------------------------------------------------


def per_axis(name: str, value: Sizes, axes: int, least: int = 1) -> Shape:
    """Return one whole number per spatial axis; a single one serves all.

    Raises:
        ShapeError: not a whole number of at least `least` for each axis.
    """
    watch_setting(value)
    numbers: list[Any] = list(value) if isinstance(value, Iterable) else [value] * axes
    if len(numbers) != axes or not all(map(is_whole, numbers)):
        raise ShapeError(f"{name} must be a whole number, or {axes} of them, actual {value!r}")
    if any(n < least for n in numbers):
        raise ShapeError(f"{name} must be at least {least}, actual {value!r}")
    return tuple(int(n) for n in numbers)


def paddings(value: Padding, axes: int) -> Pairs:
    """Return (before, after) per spatial axis, from one number, one per axis, or one pair per axis.

    Raises:
        ShapeError: anything else, or a negative padding.
    """
    wrong = ShapeError(
        f"padding must be a whole number >= 0, {axes} of them, or {axes} pairs (before, after), actual {value!r}"
    )
    watch_setting(value)
    each: list[Any] = list(value) if isinstance(value, Iterable) else [value] * axes
    if len(each) != axes:
        raise wrong
    pairs = [list(n) if isinstance(n, Iterable) else [n, n] for n in each]
    if not all(len(pair) == 2 and all(is_whole(n, 0) for n in pair) for pair in pairs):
        raise wrong
    return tuple((int(before), int(after)) for before, after in pairs)


def windows_along(lengths: Shape, window: Shape, stride: Shape, padding: Pairs, dilation: Shape, what: str) -> Shape:
    """Return how many windows fit along each axis; positions left over at the end are not used.

    Raises:
        ShapeError: a window is longer than its axis with padding.
    """
    counts = []
    for axis, (n, k, s, (before, after), d) in enumerate(zip(lengths, window, stride, padding, dilation, strict=True)):
        reach = (k - 1) * d + 1
        if n + before + after < reach:
            dilated = f" (dilated {reach})" if d > 1 else ""
            padded = f" (padded {n + before + after})" if before or after else ""
            raise ShapeError(
                f"a {what} of length {k}{dilated} does not fit an input of length {n}{padded} along spatial axis {axis}"
            )
        counts.append((n + before + after - reach) // s + 1)
    return tuple(counts)


# Windows and columns --------------------------------------------------------------------------------------


def padded(x: Array, padding: Pairs, fill: float, calls: list[Call]) -> Array:
    """Return `x` with its spatial axes padded, adding the call that copies it; `x` itself where there is nothing to do.

    The border is written once, here: nothing else ever writes to this memory.
    """
    if not any(n for pair in padding for n in pair):
        return x
    lengths = [n + before + after for n, (before, after) in zip(x.shape[2:], padding, strict=True)]
    memory = np.full((*x.shape[:2], *lengths), fill, x.dtype)
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(x.shape[2:], padding, strict=True))
    calls += copies(memory[(slice(None), slice(None), *inside)], x)
    return memory


def window_view(x: Array, kernel: Shape, outputs: Shape, stride: Shape, dilation: Shape) -> Array:
    """Return the windows of a padded x as a view (N, C, *kernel, *outputs)."""
    spatial = x.strides[2:]
    strides = (
        *x.strides[:2],
        *(d * b for d, b in zip(dilation, spatial, strict=True)),
        *(s * b for s, b in zip(stride, spatial, strict=True)),
    )
    return as_strided(x, (*x.shape[:2], *kernel, *outputs), strides, writeable=x.flags.writeable)


def phases_view(x: Array, window: Shape, outputs: Shape, stride: Shape, dilation: Shape | None = None) -> Array:
    """Return a padded x as a view (*window, N, C, *outputs)."""
    windows = window_view(x, window, outputs, stride, dilation or (1,) * len(window))
    axes = len(window)
    return windows.transpose(*range(2, 2 + axes), 0, 1, *range(2 + axes, 2 + 2 * axes))


# Copies go along the last axis. Where windows are some columns apart, what is copied into a row lies apart in x, number
# by number. Hence x is first taken apart, or put together at the end, as one long row for each place in a stride: the
# first holds columns 0, stride, 2 stride and so on, the next their neighbours. Then rows are copied in one piece.

LEAST_APART = 4096
"""Elements of the windows from which on that pays. With pools of 2 by 2 putting together takes 0.3 to 0.6 times as long
from here on; taking apart costs the same, and half where rows have four columns."""


def columns_apart(
    x: Array, kernel: Shape, outputs: Shape, stride: Shape, dilation: Shape, scratch: Scratch
) -> Array | None:
    """Return memory for the columns of a padded x by their place in a stride: (stride, N, C, *lengths).

    None where windows are better copied from x as it lies.
    """
    step, size = stride[-1], math.prod((*x.shape[:2], *kernel, *outputs))
    lie_apart = step > 1 and dilation[-1] == 1 and min(kernel[-1], outputs[-1]) > 1
    if not lie_apart or x.shape[-1] % step or size < LEAST_APART or not x.flags.c_contiguous:
        return None
    return scratch((step, *x.shape[:-1], x.shape[-1] // step), x.dtype)


def _each_apart(x: Array, apart: Array, kernel: Shape) -> list[tuple[Array, Array]]:
    """Return the memory of each place in a stride that windows reach, and the columns of x that belong there."""
    rows = x.reshape(-1)
    return [(part.reshape(-1), rows[k :: len(apart)]) for k, part in enumerate(apart[: kernel[-1]])]


def _windows_apart(
    apart: Array, elements: slice, kernel: Shape, outputs: Shape, stride: Shape, dilation: Shape
) -> Array:
    """Return, of windows (N, C, *kernel, *outputs), those elements of the kernel's last axis that lie in one stride."""
    count = elements.stop - elements.start
    part = apart[:count, ..., elements.start // len(apart) :]
    columns = np.reshape(part, (-1, *part.shape[2:]), copy=False)
    windows = window_view(columns, (*kernel[:-1], 1), outputs, (*stride[:-1], 1), dilation)
    windows = np.reshape(windows, (count, -1, *windows.shape[1:]), copy=False)
    return np.moveaxis(windows.squeeze(2 + len(kernel)), 0, 1 + len(kernel))


def copy_windows(
    into: Array, x: Array, kernel: Shape, outputs: Shape, stride: Shape, dilation: Shape, apart: Array | None
) -> list[Call]:
    """Return the calls that copy the windows of a padded x into an array (N, C, *kernel, *outputs).

    `apart` is what `columns_apart` has returned.
    """
    if apart is None:
        return copies(into, window_view(x, kernel, outputs, stride, dilation))
    calls: list[Call] = [partial(np.copyto, part, columns) for part, columns in _each_apart(x, apart, kernel)]
    for first in range(0, kernel[-1], len(apart)):
        elements = slice(first, min(first + len(apart), kernel[-1]))
        place = into[(slice(None),) * (1 + len(kernel)) + (elements,)]
        calls += copies(place, _windows_apart(apart, elements, kernel, outputs, stride, dilation))
    return calls


def put_back(
    phases: Array,
    out: Array,
    scratch: Scratch,
    window: Shape,
    stride: Shape,
    padding: Pairs,
    dilation: Shape | None = None,
) -> list[Call]:
    """Return the calls that add phases (window, N, C, *outputs) into their places in `out` (N, C, *lengths)."""
    outputs = phases.shape[3:]
    dilation = dilation or (1,) * len(window)
    whole = out
    if any(n for pair in padding for n in pair):
        lengths = [n + before + after for n, (before, after) in zip(out.shape[2:], padding, strict=True)]
        whole = scratch((*out.shape[:2], *lengths), out.dtype)
    calls: list[Call] = []
    # As many neighbouring places of a window never meet those of other windows, and are added in one call.
    apart = [k if n <= 1 else min(k, -(-s // d)) for k, s, d, n in zip(window, stride, dilation, outputs, strict=True)]
    blocks = list(
        product(
            *([slice(at, min(at + step, k)) for at in range(0, k, step)] for k, step in zip(window, apart, strict=True))
        )
    )
    tiled = len(blocks) == 1 and all(
        k * n == length and (n <= 1 or s == k) and (k == 1 or d == 1)
        for k, s, d, n, length in zip(window, stride, dilation, outputs, whole.shape[2:], strict=True)
    )
    columns = columns_apart(whole, window, outputs, stride, dilation, scratch)
    if not tiled:
        written = [whole] if columns is None else [columns] if window[-1] >= len(columns) else [columns, whole]
        calls += [partial(np.ndarray.fill, memory, 0) for memory in written]
    axes = range(2, 2 + len(window))
    view = phases_view(whole, window, outputs, stride, dilation)
    parts = np.reshape(phases, view.shape, copy=False)
    sums = scratch((parts[blocks[0]].size,), phases.dtype) if len(blocks) > 1 else None
    for block in blocks:
        part, place = parts[block], view[block]
        if columns is not None:
            windows = _windows_apart(columns, block[-1], window, outputs, stride, dilation)
            place = np.moveaxis(windows, axes, range(len(window)))[block[:-1]]
        if sums is None:
            calls += copies(place, part)
        else:
            calls += add_into(place, part, sums[: part.size].reshape(part.shape))
    if columns is not None:
        calls += [partial(np.copyto, row, part) for part, row in _each_apart(whole, columns, window)]
    if whole is not out:
        inside = tuple(slice(before, before + n) for n, (before, _) in zip(out.shape[2:], padding, strict=True))
        calls += copies(out, whole[(slice(None), slice(None), *inside)])
    return calls


JOINED = 512
"""Columns of a product over several samples, at least."""


def _least_samples(rows: int, places: int) -> int:
    """Return of how many samples the columns are to be one matrix; 1 where each sample's columns are one.

    To bring a product's other matrix into BLAS's order takes time by `rows` of them, and to bring the result of several
    samples into theirs by `places`.
    """
    return -(-JOINED // places) if rows > places > 0 else 1


def _columns(
    x: Array,
    padding: Pairs,
    kernel: Shape,
    outputs: Shape,
    stride: Shape,
    dilation: Shape,
    groups: int,
    scratch: Scratch,
    by_sample: bool,
) -> Iterator[tuple[slice, list[Call], Array]]:
    """Yield which samples, the calls that make their columns, and these: (samples, groups, C/groups * kernel, outputs).

    Where the columns are longer than there are of a sample, and are not to be `by_sample`, they are those of several,
    one sample's after the other's: (1, groups, C/groups * kernel, samples * outputs).

    Padding that is negative is cut off. All columns are in the same memory, so that each is to be used before the next
    is made. Without padding, where the windows lie like columns, there is no call.
    """
    kept = (slice(max(-before, 0), n + min(after, 0)) for n, (before, after) in zip(x.shape[2:], padding, strict=True))
    x = x[(slice(None), slice(None), *kept)]
    padding = tuple((max(before, 0), max(after, 0)) for before, after in padding)
    samples, channels, *lengths = x.shape
    rows, places = channels // groups * math.prod(kernel), math.prod(outputs)
    pads = any(n for pair in padding for n in pair)
    if not pads:
        try:
            yield (
                slice(0, samples),
                [],
                np.reshape(
                    window_view(x, kernel, outputs, stride, dilation), (samples, groups, rows, places), copy=False
                ),
            )
            return
        except ValueError:
            pass
    least = 1 if by_sample else _least_samples(rows, places)
    pieces = blocks(samples, groups * rows * places * x.itemsize, least)
    size = pieces[0].stop if pieces else 0
    if min(least, size) > 1:
        memory = scratch((channels, *kernel, size, *outputs), x.dtype)
        columns = memory.reshape(1, groups, rows, size * places)
        memory = np.moveaxis(memory, 1 + len(kernel), 0)
    else:
        memory = scratch((size, channels, *kernel, *outputs), x.dtype)
        columns = memory.reshape(size, groups, rows, places)
    whole = x
    border = [n + before + after for n, (before, after) in zip(lengths, padding, strict=True)]
    if pads:  # the border is written once, here: nothing else ever writes to this memory
        whole = np.zeros((size, channels, *border), x.dtype)
    elif x.strides[-1] != x.itemsize and math.prod(kernel) > 1:
        # Rows that do not lie in one piece, as where the channels are last, are brought together once, not once for
        # each element of the kernel.
        whole = scratch((size, *x.shape[1:]), x.dtype)
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(lengths, padding, strict=True))
    apart = columns_apart(whole[:size], kernel, outputs, stride, dilation, scratch)
    for block in pieces:
        calls: list[Call] = []
        part = x[block]
        if whole is not x:
            calls += copies(whole[(slice(None), slice(None), *inside)], part)
            part = whole
        calls += copy_windows(memory, part, kernel, outputs, stride, dilation, apart)
        yield block, calls, columns


def _products(
    rows: Array, found: Iterable[tuple[slice, list[Call], Array]], target: Array, scratch: Scratch
) -> Sequence[Call]:
    """Return the calls that leave in `target` (N, channels, *outputs) the products of `rows` with all its columns."""
    calls: list[Call] = []
    memory: Array | None = None
    for block, made, columns in found:
        calls += made
        part = target[block]
        shape = (len(columns), *rows.shape[:2], columns.shape[-1])
        if part.flags.c_contiguous and len(columns) == len(part):
            calls.append(bind_product(rows, columns, part.reshape(shape)))
            continue
        if memory is None:
            memory = scratch(shape, target.dtype)
        product = memory.reshape(part.shape)
        if len(columns) < len(part):
            product = memory.reshape(part.shape[1], len(part), *part.shape[2:]).swapaxes(0, 1)
        calls += [bind_product(rows, columns, memory), *copies(part, product)]
    return calls


def _by_winograd(
    x: Array | Tensor,
    weight: Array | Tensor,
    outputs: Shape,
    stride: Shape,
    padding: Pairs,
    dilation: Shape,
    groups: int,
    direct: int,
) -> tuple[winograd.Axis, winograd.Axis] | None:
    """Return the axes of a convolution that takes less work by Winograd's algorithm than the `direct` one; else None.

    Args:
        weight: (F, C / groups, *kernel).
    """
    on = STATE.techniques is not None and STATE.techniques.winograd
    if not (on and groups == max(*stride, *dilation) == 1 and x.dtype == weight.dtype == np.float32):
        return None
    axes = winograd.axes_of(x.shape[2:], outputs, [before for before, _ in padding], weight.shape[2:])
    if (
        axes is None
        or 0 in (*x.shape, *weight.shape)
        or winograd.work(x.shape[0], weight.shape[1], weight.shape[0], axes) >= direct
    ):
        return None
    return axes


def conv_work(x: Array | Tensor, weight: Array | Tensor, outputs: Shape, **at: Any) -> int:
    """Return what the convolution of `x` costs, by the lowering that is less work."""
    moved = x.shape[0] * math.prod((*weight.shape[1:], *outputs))
    direct = work(weight.shape[0] * moved, at["groups"] * moved)
    axes = _by_winograd(x, weight, outputs, direct=direct, **at)
    return direct if axes is None else winograd.work(x.shape[0], weight.shape[1], weight.shape[0], axes)


def _bound(bind: Callable[..., list[Call]], arrays: Sequence[Array], out: Array, scratch: Scratch) -> list[Call]:
    """Return the calls that `bind` gives for arrays in one piece each: others are copied before or after them."""
    calls: list[Call] = []
    given = [_whole(x, (-1,), scratch, calls).reshape(x.shape) for x in arrays]
    target = out if out.flags.c_contiguous else scratch(out.shape, out.dtype)
    calls += bind(*given, target, scratch=scratch)
    return calls if target is out else [*calls, *copies(out, target)]


def _whole(x: Array, shape: Shape, scratch: Scratch, calls: list[Call]) -> Array:
    """Return `x` in another shape, copied into C order where a view cannot have it."""
    try:
        return np.reshape(x, shape, copy=False)
    except ValueError:
        memory = scratch(x.shape, x.dtype)
        calls += copies(memory, x)
        return memory.reshape(shape)


# Convolution ----------------------------------------------------------------------------------------------


def _check_groups(channels: int, filters: int, groups: int) -> None:
    if groups < 1 or channels % groups or filters % groups:
        raise ShapeError(f"{channels} channels and {filters} filters cannot be divided into {groups} groups")


def _infer_conv(
    x: Tensor, weight: Tensor, stride: Shape, padding: Pairs, dilation: Shape, groups: int
) -> tuple[Shape, Any]:
    axes = len(stride)
    if not axes or x.ndim != axes + 2 or weight.ndim != axes + 2:
        raise ShapeError(
            f"expected x (N, C, *lengths) and a weight (F, C/groups, *kernel) with as many spatial axes, got shapes "
            f"{x.shape} and {weight.shape}"
        )
    _check_groups(x.shape[1], weight.shape[0], groups)
    if weight.shape[1] * groups != x.shape[1]:
        raise ShapeError(
            f"a weight of shape {weight.shape} with {groups} groups needs {weight.shape[1] * groups} channels, "
            f"x of shape {x.shape} has {x.shape[1]}"
        )
    outputs = windows_along(x.shape[2:], weight.shape[2:], stride, padding, dilation, "kernel")
    return (x.shape[0], weight.shape[0], *outputs), float_only(common_dtype((x, weight)))


def _bind_conv(
    arrays: Sequence[Array], out: Array, scratch: Scratch, stride: Shape, padding: Pairs, dilation: Shape, groups: int
) -> Sequence[Call]:
    x, weight = arrays
    calls: list[Call] = []
    filters, kernel, outputs = weight.shape[0], weight.shape[2:], out.shape[2:]
    moved = len(x) * math.prod((*weight.shape[1:], *outputs))
    direct = work(filters * moved, groups * moved)
    axes = _by_winograd(x, weight, outputs, stride, padding, dilation, groups, direct)
    if axes is not None:
        return _bound(partial(winograd.bind_convolution, axes=axes, flipped=False), (x, weight), out, scratch)
    rows = _whole(weight, (groups, filters // groups, math.prod(weight.shape[1:])), scratch, calls)
    by_sample = needs_no_copies(rows.shape[1], rows.shape[2], math.prod(outputs), x.itemsize)
    found = _columns(x, padding, kernel, outputs, stride, dilation, groups, scratch, by_sample)
    return [*calls, *_products(rows, found, out, scratch)]


# The gradient by x, by the lowering that is less work:
#
# - as convolutions of the upstream gradient, with the weight flipped and its two channel axes exchanged: one for each
#   of the `stride` positions of x that different elements of the kernel reach;
# - as columns, the product of the weight and the upstream gradient, added back into their windows.


@dataclass(frozen=True)
class _Phase:
    """Along one axis, positions of x that a kernel with a stride reaches by the same of its elements."""

    positions: slice
    count: int
    """Of positions."""
    elements: slice
    """Of the kernel, from the last to the first."""
    taps: int
    """How many elements."""
    padding: tuple[int, int]
    """Of the upstream gradient, before and after; what is negative is cut off."""
    dilation: int
    """Of the elements, on the upstream gradient."""


def _phases(
    length: int, outputs: int, kernel: int, stride: int, padding: tuple[int, int], dilation: int
) -> list[_Phase]:
    """Return the phases of an axis of x. Those that no element reaches have none."""
    apart = math.gcd(stride, dilation)
    found = []
    for first in range(min(stride, length)):
        count = len(range(first, length, stride))
        taps = [k for k in range(kernel) if (first + padding[0] - k * dilation) % stride == 0]
        elements, before, after = slice(0, 0), 0, 0
        if taps:
            # Position first + stride * t is reached from output t + start, by the last element, and by the others from
            # further on.
            start = (first + padding[0] - taps[-1] * dilation) // stride
            whole = count + dilation // apart * (len(taps) - 1)
            before = -min(start, outputs)  # all is zero where the windows begin behind the last output
            after = max(whole - outputs - before, -outputs)
            before = whole - outputs - after
            elements = slice(taps[-1], None, -(stride // apart))
        positions = slice(first, None, stride)
        found.append(_Phase(positions, count, elements, len(taps), (before, after), dilation // apart))
    return found


def _infer_input_gradient(
    g: Tensor, weight: Tensor, lengths: Shape, stride: Shape, padding: Pairs, dilation: Shape, groups: int
) -> tuple[Shape, Any]:
    _check_groups(weight.shape[1] * groups, weight.shape[0], groups)
    outputs = windows_along(lengths, weight.shape[2:], stride, padding, dilation, "kernel")
    if g.shape[1:] != (weight.shape[0], *outputs):
        raise ShapeError(f"expected an upstream gradient (N, {weight.shape[0]}, *{outputs}), got shape {g.shape}")
    return (g.shape[0], weight.shape[1] * groups, *lengths), float_only(common_dtype((g, weight)))


def _bind_input_gradient(
    arrays: Sequence[Array],
    out: Array,
    scratch: Scratch,
    lengths: Shape,
    stride: Shape,
    padding: Pairs,
    dilation: Shape,
    groups: int,
) -> Sequence[Call]:
    g, weight = arrays
    n, filters, per_group, kernel = len(g), weight.shape[0], weight.shape[1], weight.shape[2:]
    channels, places, outputs = per_group * groups, math.prod(kernel), math.prod(g.shape[2:])
    axes = map(_phases, lengths, g.shape[2:], kernel, stride, padding, dilation)
    phases = list(product(*axes))
    gathered = sum(n * filters * math.prod(axis.taps * axis.count for axis in phase) for phase in phases)
    added = n * channels * places * outputs
    by_columns, by_convolutions = work(added * filters // groups, 2 * added), work(gathered * per_group, gathered)
    by_winograd = _by_winograd(
        out, weight, g.shape[2:], stride, padding, dilation, groups, min(by_columns, by_convolutions)
    )
    if by_winograd is not None:
        turned = by_winograd[0].transposed(), by_winograd[1].transposed()
        return _bound(partial(winograd.bind_convolution, axes=turned, flipped=True), (g, weight), out, scratch)
    if by_columns <= by_convolutions:
        return _add_columns_back(g, weight, out, scratch, phases, groups)
    calls: list[Call] = []
    across = weight.reshape(groups, filters // groups, per_group, *kernel).swapaxes(1, 2)
    for phase in phases:
        target = out[(slice(None), slice(None), *(axis.positions for axis in phase))]
        counts, taps = tuple(axis.count for axis in phase), tuple(axis.taps for axis in phase)
        if not math.prod(taps):
            calls.append(partial(np.copyto, target, 0))
            continue
        rows = scratch((groups, per_group, filters // groups * math.prod(taps)), weight.dtype)
        flipped = across[(slice(None), slice(None), slice(None), *(axis.elements for axis in phase))]
        calls += copies(rows.reshape(flipped.shape), flipped)
        pads, gaps = tuple(axis.padding for axis in phase), tuple(axis.dilation for axis in phase)
        by_sample = needs_no_copies(rows.shape[1], rows.shape[2], math.prod(counts), g.itemsize)
        found = _columns(g, pads, taps, counts, (1,) * len(kernel), gaps, groups, scratch, by_sample)
        calls += _products(rows, found, target, scratch)
    return calls


def _add_columns_back(
    g: Array, weight: Array, out: Array, scratch: Scratch, phases: Sequence[tuple[_Phase, ...]], groups: int
) -> Sequence[Call]:
    calls: list[Call] = []
    n, filters, per_group, kernel = len(g), weight.shape[0], weight.shape[1], weight.shape[2:]
    channels, places, outputs = per_group * groups, math.prod(kernel), g.shape[2:]
    count = math.prod(outputs)
    # The columns of one element of the kernel lie in one piece: they are added at once.
    rows = scratch((groups, places * per_group, filters // groups), weight.dtype)
    by_place = np.moveaxis(weight.reshape(groups, filters // groups, per_group, *kernel), (1, 2), (-1, -2))
    calls += copies(rows.reshape(by_place.shape), by_place)
    upstream = _whole(g, (n, groups, filters // groups, count), scratch, calls)
    by_sample = needs_no_copies(places * per_group, filters // groups, count, g.itemsize)
    least = 1 if by_sample else _least_samples(places * per_group, count)

    def bind(block: slice, scratch: Scratch) -> list[Call]:
        size = block.stop - block.start
        calls: list[Call] = []
        if min(least, size) > 1:
            joined = scratch((groups, filters // groups, size, count), g.dtype)
            calls += copies(joined, np.moveaxis(upstream[block], 0, 2))
            columns = scratch((groups, places * per_group, size * count), g.dtype)
            calls.append(bind_product(rows, joined.reshape(*joined.shape[:2], size * count), columns))
            added = np.moveaxis(columns.reshape(groups, *kernel, per_group, size, *outputs), 2 + len(kernel), 0)
        else:
            columns = scratch((size, groups, places * per_group, count), g.dtype)
            calls.append(bind_product(rows, upstream[block], columns))
            added = columns.reshape(size, groups, *kernel, per_group, *outputs)
        memory = out if len(phases) == 1 else scratch((size, channels, *(axis.count for axis in phases[0])), out.dtype)
        for phase in phases:
            counts = tuple(axis.count for axis in phase)
            target = out[(block, slice(None), *(axis.positions for axis in phase))]
            sums = target
            if len(phases) > 1:
                sums = memory.reshape(-1)[: target.size].reshape(target.shape)
            by_group = np.reshape(sums, (size, groups, per_group, *counts), copy=False)
            calls += _add_shifted(phase, kernel, outputs, added, by_group)
            if len(phases) > 1:
                calls += copies(target, sums)
        return calls

    return calls + in_blocks(n, channels * places * count * g.itemsize, scratch, bind, least)


def _add_shifted(phase: Sequence[_Phase], kernel: Shape, outputs: Shape, added: Array, sums: Array) -> list[Call]:
    """Leave in `sums` (N, groups, C / groups, *positions) what the elements of the kernel add to a phase's positions.

    Args:
        added: (N, groups, *kernel, C / groups, *outputs).
    """
    calls: list[Call] = []
    pairs: list[tuple[Array, Array]] = []
    for taps in product(*(range(axis.taps) for axis in phase)):
        elements: list[int] = []
        here: list[Any] = []
        there: list[Any] = []
        for axis, tap, k, n in zip(phase, taps, kernel, outputs, strict=True):
            elements.append(range(k)[axis.elements][tap])
            shift = tap * axis.dilation - axis.padding[0]  # position t is reached from output t + shift
            first, last = max(0, -shift), max(0, -shift, min(axis.count, n - shift))
            here.append(slice(first, last))
            there.append(slice(first + shift, last + shift))
        of_element: Any = (slice(None), slice(None), *elements)
        pairs.append((sums[(..., *here)], added[of_element][(..., *there)]))
    pairs.sort(key=lambda pair: pair[0].size, reverse=True)
    if pairs and pairs[0][0].size == sums.size:
        into, part = pairs.pop(0)
        calls += copies(into, part)
    else:
        calls.append(partial(np.ndarray.fill, sums, 0))
    return calls + [partial(np.add, into, part, into) for into, part in pairs if into.size]


def _infer_weight_gradient(
    g: Tensor, x: Tensor, kernel: Shape, stride: Shape, padding: Pairs, dilation: Shape, groups: int
) -> tuple[Shape, Any]:
    if x.ndim != len(stride) + 2 or g.ndim != x.ndim:
        raise ShapeError(
            f"expected g and x (N, C, *lengths) with {len(stride)} spatial axes, got shapes {g.shape} and {x.shape}"
        )
    _check_groups(x.shape[1], g.shape[1], groups)
    outputs = windows_along(x.shape[2:], kernel, stride, padding, dilation, "kernel")
    if g.shape[0] != x.shape[0] or g.shape[2:] != outputs:
        raise ShapeError(f"expected an upstream gradient ({x.shape[0]}, F, *{outputs}), got shape {g.shape}")
    return (g.shape[1], x.shape[1] // groups, *kernel), float_only(common_dtype((g, x)))


def _bind_weight_gradient(
    arrays: Sequence[Array],
    out: Array,
    scratch: Scratch,
    kernel: Shape,
    stride: Shape,
    padding: Pairs,
    dilation: Shape,
    groups: int,
) -> Sequence[Call]:
    # Sample by sample, the longer side first: BLAS is slow at few rows and columns with a long sum. A single product
    # with a short sum is in the order of the result instead, which then need not be transposed.
    g, x = arrays
    calls: list[Call] = []
    n, filters, outputs = g.shape[0], g.shape[1], g.shape[2:]
    rows, places = x.shape[1] // groups * math.prod(kernel), math.prod(outputs)
    direct = work(n * filters * rows * places, n * groups * rows * places)
    axes = _by_winograd(x, out, outputs, stride, padding, dilation, groups, direct)
    if axes is not None:
        return _bound(partial(winograd.bind_weight_gradient, axes=axes), (g, x), out, scratch)
    upstream = _whole(g, (n, groups, filters // groups, places), scratch, calls)
    result = out.reshape(groups, filters // groups, rows)
    total = scratch((groups, rows, filters // groups), out.dtype)
    calls += [] if n else [partial(np.ndarray.fill, total, 0)]
    products: Array | None = None
    joined: Array | None = None
    by_sample = needs_no_copies(rows, places, filters // groups, x.itemsize, by_transposed=True)
    for block, made, columns in _columns(x, padding, kernel, outputs, stride, dilation, groups, scratch, by_sample):
        calls += made
        of_block = upstream[block]
        if len(columns) < len(of_block):
            if joined is None:
                joined = scratch((groups, filters // groups, len(of_block), places), g.dtype)
            calls += copies(joined, np.moveaxis(of_block, 0, 2))
            of_block = joined.reshape(1, *joined.shape[:2], len(of_block) * places)
        if n == 1 and places <= filters // groups:
            return [*calls, bind_product(of_block, columns.swapaxes(2, 3), result[np.newaxis])]
        if block.start == 0 and len(columns) == 1:
            calls.append(bind_product(columns, of_block.swapaxes(2, 3), total[np.newaxis]))
            continue
        if products is None:
            products = scratch((len(columns), *total.shape), out.dtype)
        calls.append(bind_product(columns, of_block.swapaxes(2, 3), products))
        added = list(products)
        if block.start == 0 and added:
            calls.append(partial(np.add, added.pop(0), added.pop(0), total))
        calls += [partial(np.add, total, product, total) for product in added]
    return [*calls, *copies(result, total.swapaxes(1, 2))]


# Samples that have a weight each are groups of one convolution: its channels are theirs, one sample after the other.


def _side_by_side(x: Tensor) -> Tensor:
    """Return (count, N, C, *lengths) as (N, count * C, *lengths)."""
    count, samples, channels, *lengths = x.shape
    return reshape(moveaxis(x, 0, 1), (samples, count * channels, *lengths))


def _batch_by_weight(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor | None:
    x, weight = inputs
    if not mapped[1]:
        whole = op(reshape(x, (count * x.shape[1], *x.shape[2:])), weight, **attrs)
        return in_batches(whole, count, x.shape[1])
    if not count:
        return None
    x = x if mapped[0] else for_each(x, count)
    weights = reshape(weight, (count * weight.shape[1], *weight.shape[2:]))
    y = op(_side_by_side(x), weights, **{**attrs, "groups": count * attrs["groups"]})
    return moveaxis(reshape(y, (y.shape[0], count, y.shape[1] // count, *y.shape[2:])), 1, 0)


def _batch_of_weight(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor | None:
    if not count:
        return None
    g, x = map(_side_by_side, all_mapped(count, mapped, inputs))
    y = op(g, x, **{**attrs, "groups": count * attrs["groups"]})
    return in_batches(y, count, y.shape[0] // count)


def _conv_flops(
    samples: int, lengths: Shape, weight: Shape, stride: Shape, padding: Pairs, dilation: Shape, groups: int
) -> int:
    """Multiplications and additions of a convolution and of each of its gradients; products with padding are none."""
    filters, channels, *kernel = weight
    pairs = 1  # of an output and a place in the kernel, with an element between them
    outputs = windows_along(lengths, tuple(kernel), stride, padding, dilation, "kernel")
    for n, k, s, (before, _), d, count in zip(lengths, kernel, stride, padding, dilation, outputs, strict=True):
        # Each place j of the kernel is on an element, o s + j d - before, from one output o to another.
        ends = [(-((j * d - before) // s), (n - 1 + before - j * d) // s) for j in range(k)]
        pairs *= sum(max(0, min(count - 1, last) - max(0, first) + 1) for first, last in ends)
    return 2 * samples * filters * channels * pairs


def _conv_sparsity(
    found: Shape, lengths: Shape, weight: Shape, stride: Shape, padding: Pairs, dilation: Shape, groups: int
) -> tuple[Array, Array]:
    """Return, window by window, the positions in conv's result (N, F, *outputs) and in its input (N, C, *lengths)."""
    per_group, kernel, axes = weight[1], weight[2:], len(stride)
    given = np.pad(numbered((found[0], per_group * groups, *lengths)), ((0, 0), (0, 0), *padding), constant_values=-1)
    windows = window_view(given, kernel, found[2:], stride, dilation)  # (N, C, *kernel, *outputs)
    read = windows.reshape(found[0], groups, 1, per_group, *kernel, *found[2:])
    made = numbered(found).reshape(found[0], groups, weight[0] // groups, 1, *[1] * axes, *found[2:])
    made, read = np.broadcast_arrays(made, read)
    inside = read >= 0  # not padding
    return made[inside], read[inside]


CONV: Op = define(
    name="conv",
    infer=_infer_conv,
    bind=_bind_conv,
    vjp=(
        lambda g, y, x, weight, **at: CONV_INPUT_GRADIENT(g, weight, lengths=x.shape[2:], **at),
        lambda g, y, x, weight, **at: CONV_WEIGHT_GRADIENT(g, x, kernel=weight.shape[2:], **at),
    ),
    jvp=multilinear_jvp("conv"),
    flops=lambda x, weight, **at: _conv_flops(x.shape[0], x.shape[2:], weight.shape, **at),
    product=True,
    batch=_batch_by_weight,
    sparsity=lambda x, weight, **at: (
        None
        if weight.data is None
        else [_conv_sparsity(_infer_conv(x, weight, **at)[0], x.shape[2:], weight.shape, **at), None]
    ),
    doc="cross-correlation over the spatial axes, channels first",
)
CONV_INPUT_GRADIENT: Op = define(
    name="conv_input_gradient",
    infer=_infer_input_gradient,
    bind=_bind_input_gradient,
    vjp=(
        lambda u, y, g, weight, lengths, **at: CONV(u, weight, **at),
        lambda u, y, g, weight, lengths, **at: CONV_WEIGHT_GRADIENT(g, u, kernel=weight.shape[2:], **at),
    ),
    jvp=multilinear_jvp("conv_input_gradient"),
    flops=lambda g, weight, lengths, **at: _conv_flops(g.shape[0], lengths, weight.shape, **at),
    product=True,
    batch=_batch_by_weight,
    sparsity=lambda g, weight, lengths, **at: (
        None if weight.data is None else [_conv_sparsity(g.shape, lengths, weight.shape, **at)[::-1], None]
    ),
    doc="gradient of conv by its input: the transposed convolution",
)
CONV_WEIGHT_GRADIENT: Op = define(
    name="conv_weight_gradient",
    infer=_infer_weight_gradient,
    bind=_bind_weight_gradient,
    vjp=(
        lambda u, y, g, x, kernel, **at: CONV(x, u, **at),
        lambda u, y, g, x, kernel, **at: CONV_INPUT_GRADIENT(g, u, lengths=x.shape[2:], **at),
    ),
    jvp=multilinear_jvp("conv_weight_gradient"),
    flops=lambda g, x, kernel, groups, **at: _conv_flops(
        x.shape[0], x.shape[2:], (g.shape[1], x.shape[1] // groups, *kernel), groups=groups, **at
    ),
    product=True,
    batch=_batch_of_weight,
    doc="gradient of conv by its weight",
)


def conv(
    x: Operand, weight: Operand, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1, groups: int = 1
) -> Tensor:
    """Cross-correlate `x` (N, C, *lengths) with `weight` (F, C / groups, *kernel).

    Args:
        stride: steps between windows, one number or one per spatial axis.
        padding: zeros around x: one number, one per axis, or a pair (before, after) per axis.
        dilation: steps between the elements of a window.
        groups: the channels and filters are divided into this many groups that know nothing of each other.

    Returns:
        (N, F, *outputs), with outputs = (length + padding - dilation * (kernel - 1) - 1) // stride + 1.

    Raises:
        ShapeError: the shapes do not fit, or the kernel is longer than the padded input.
    """
    x, weight = as_tensors((x, weight))
    axes = max(x.ndim - 2, 0)
    try:
        at = {
            "stride": per_axis("stride", stride, axes),
            "padding": paddings(padding, axes),
            "dilation": per_axis("dilation", dilation, axes),
            "groups": per_axis("groups", groups, 1)[0],
        }
    except ShapeError as error:
        raise ShapeError(f"conv: {error}") from None
    return CONV(x, weight, **at)


def conv_transpose(
    x: Operand,
    weight: Operand,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """The transpose of `conv`: each element of `x` (N, F, *lengths) adds so much of `weight` (F, C / groups, *kernel).

    Args:
        stride: steps between the places at which neighbouring elements add.
        padding: elements of the result that are cut off: one number, one per axis, or a pair (before, after) per axis.
        output_padding: elements more at the end of the result, fewer than the stride or the dilation.
        dilation, groups: as those of `conv`.

    Returns:
        (N, C, *outputs), with outputs = (length - 1) * stride + dilation * (kernel - 1) + 1 - padding + output_padding.

    Raises:
        ShapeError: the shapes do not fit, or nothing is left of the result.
    """
    x, weight = as_tensors((x, weight))
    axes = max(x.ndim - 2, 0)
    try:
        if not axes or weight.ndim != x.ndim or x.shape[1] != weight.shape[0] or 0 in x.shape[2:]:
            raise ShapeError(
                "expected x (N, F, *lengths) and a weight (F, C/groups, *kernel) with as many spatial axes, got shapes "
                f"{x.shape} and {weight.shape}"
            )
        steps, pads = per_axis("stride", stride, axes), paddings(padding, axes)
        more, apart = per_axis("output_padding", output_padding, axes, 0), per_axis("dilation", dilation, axes)
        if any(n >= max(s, d) for n, s, d in zip(more, steps, apart, strict=True)):
            raise ShapeError(
                f"output_padding must be less than the stride {steps} or the dilation {apart}, actual {more}"
            )
        # More than the stride is less padding, and zeros where none is left: nothing is added so far behind the end.
        taken = tuple(n if n >= s else 0 for n, s in zip(more, steps, strict=True))
        behind = tuple(max(n - after, 0) for n, (_, after) in zip(taken, pads, strict=True))
        pads = tuple((before, max(after - n, 0)) for n, (before, after) in zip(taken, pads, strict=True))
        more = tuple(n - t for n, t in zip(more, taken, strict=True))
        lengths = tuple(
            (n - 1) * s + d * (k - 1) + 1 - before - after + extra
            for n, s, d, k, (before, after), extra in zip(
                x.shape[2:], steps, apart, weight.shape[2:], pads, more, strict=True
            )
        )
        if min(lengths) < 1:
            raise ShapeError(f"nothing is left of the result, whose lengths would be {lengths}; use less padding")
        number = per_axis("groups", groups, 1)[0]
    except ShapeError as error:
        raise ShapeError(f"conv_transpose: {error}") from None
    y = CONV_INPUT_GRADIENT(x, weight, lengths=lengths, stride=steps, padding=pads, dilation=apart, groups=number)
    return pad(y, [(0, 0), (0, 0), *((0, n) for n in behind)]) if any(behind) else y
