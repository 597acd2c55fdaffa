"""Pooling over one or two spatial axes, and more, of x (N, C, *lengths).

Windows that would reach beyond the (padded) input are left out. A maximum belongs to the first element, in C order,
that has it: the gradient goes there, undivided. NaN is larger than any number, and the first one of a window is its
maximum, as in `argmax`; PyTorch takes the last one. A convolution fused with its pool multiplies what a window sees
by zeros, too: one NaN there makes all elements of the window NaN, and the first of them has the gradient.

All work on *phases*: for each place in a window, the elements at that place, for all windows at once. A maximum over
the phases is as many calls as a window has elements, each over all windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from py_engine.ad.op import (
    Call,
    Op,
    Scratch,
    Shape,
    as_tensor,
    c_ordered,
    common_dtype,
    define,
    float_only,
    here,
    linear_jvp,
    no_gradient,
    per_element,
)
from py_engine.ad.ops.arguments import flag
from py_engine.ad.ops.blocks import copies, in_blocks
from py_engine.ad.ops.convolution import (
    Padding,
    Pairs,
    Sizes,
    columns_apart,
    copy_windows,
    padded,
    paddings,
    per_axis,
    phases_view,
    put_back,
    windows_along,
)
from py_engine.ad.ops.shape import by_samples
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ShapeError

# What the ops share ---------------------------------------------------------------------------------------


def _infer_pool(x: Tensor, window: Shape, stride: Shape, padding: Pairs, dilation: Shape) -> tuple[Shape, Any]:
    if not window or x.ndim != len(window) + 2:
        raise ShapeError(f"expected x (N, C, *lengths) with at least one spatial axis, got shape {x.shape}")
    float_only(x.dtype)
    counts = windows_along(x.shape[2:], window, stride, padding, dilation, "pooling window")
    return (*x.shape[:2], *counts), x.dtype


def _phases(
    x: Array,
    outputs: Shape,
    fill: float,
    scratch: Scratch,
    calls: list[Call],
    window: Shape,
    stride: Shape,
    padding: Pairs,
    dilation: Shape,
) -> Array:
    """Return the phases (window, N, C, *outputs) in their own memory, and add the calls that copy them there."""
    whole = padded(x, padding, fill, calls)
    phases = scratch((math.prod(window), *x.shape[:2], *outputs), x.dtype)
    apart = columns_apart(whole, window, outputs, stride, dilation, scratch)
    windows = np.moveaxis(phases.reshape(*window, *phases.shape[1:]), range(len(window)), range(2, 2 + len(window)))
    calls += copy_windows(windows, whole, window, outputs, stride, dilation, apart)
    return phases


def _in_blocks(
    each: Array,
    arrays: int,
    padding: Pairs,
    window: Shape,
    scratch: Scratch,
    bind: Callable[[slice, Scratch], list[Call]],
) -> list[Call]:
    """Return the calls of a pool, block by block of the samples of `each`, which has an element for each window.

    `arrays` of phases are in use together. What is padded is kept whole: each block would need its own border.
    """
    if any(n for pair in padding for n in pair):
        return bind(slice(None), scratch)
    bytes_each = arrays * math.prod(window) * each.nbytes // max(len(each), 1)
    return in_blocks(len(each), bytes_each, scratch, bind)


def _infer_pool_gradient(
    g: Tensor, *inputs: Tensor, lengths: Shape, window: Shape, stride: Shape, padding: Pairs, dilation: Shape
) -> tuple[Shape, Any]:
    counts = windows_along(lengths, window, stride, padding, dilation, "pooling window")
    if g.ndim != len(window) + 2 or g.shape[2:] != counts:
        raise ShapeError(f"expected an upstream gradient (N, C, *{counts}), got shape {g.shape}")
    return (*g.shape[:2], *lengths), g.dtype


def pool_settings(
    name: str, x: Tensor, window: Sizes, stride: Sizes | None, padding: Padding, dilation: Sizes, ceil_mode: bool
) -> dict[str, Any]:
    """Return the attributes of a pool of `x`. Raises `ShapeError` where the settings do not fit."""
    axes = max(x.ndim - 2, 0)
    try:
        sizes = per_axis("window", window, axes)
        steps = sizes if stride is None else per_axis("stride", stride, axes)
        pairs, apart = paddings(padding, axes), per_axis("dilation", dilation, axes)
        reaches = [(k - 1) * d + 1 for k, d in zip(sizes, apart, strict=True)]
        for axis, (reach, pair) in enumerate(zip(reaches, pairs, strict=True)):
            if max(pair) > reach // 2:
                raise ShapeError(
                    f"padding must be at most half the window, {reach // 2}, along spatial axis {axis}, "
                    f"actual {max(pair)}"
                )
        if flag(ceil_mode, "ceil_mode"):
            windows_along(x.shape[2:], sizes, steps, pairs, apart, "pooling window")  # which refuses one that is longer
            each = zip(x.shape[2:], reaches, steps, pairs, strict=True)
            pairs = tuple(
                (before, _to_last_window(n, reach, s, (before, after))) for n, reach, s, (before, after) in each
            )
        for axis, (n, k, s, d, pair) in enumerate(zip(x.shape[2:], sizes, steps, apart, pairs, strict=True)):
            if (d > 1 or not n) and not _sees_elements(n, k, s, d, pair):
                raise ShapeError(f"a window would lie on padding alone along spatial axis {axis}; use less padding")
    except ShapeError as error:
        raise ShapeError(f"{here(name)}: {error}") from None
    return {"window": sizes, "stride": steps, "padding": pairs, "dilation": apart}


def _to_last_window(n: int, reach: int, stride: int, pair: tuple[int, int]) -> int:
    """Return the padding behind an axis with which its last window, begun before the end, is complete."""
    before, after = pair
    last = -(-max(n + before + after - reach, 0) // stride) * stride
    if last >= n + before:
        last -= stride
    return max(last + reach - n - before, after)


def _sees_elements(n: int, window: int, stride: int, dilation: int, pair: tuple[int, int]) -> bool:
    """Whether each window has an element of the axis."""
    first = range(-pair[0], n + pair[1] - (window - 1) * dilation, stride)
    if not first:
        return True
    # The first place of a window at 0 or behind it: its own first one, or in 0..dilation - 1 for one begun before.
    reached = first[-1] < n and -(first[0] // dilation) < window
    return reached and (dilation <= n or all(start % dilation < n for start in first if start < 0))


# Maximum --------------------------------------------------------------------------------------------------


def first_of_equals(
    phases: Array, largest: Array, scratch: Scratch, elements: Array | None = None
) -> tuple[Array, list[Call]]:
    """Return, for each phase, whether it is the first that equals the largest one, and the calls that find out.

    `elements` broadcasts to the phases and says which are elements; the others, padding of NaN, never win.
    """
    won = scratch(phases.shape, np.bool_)
    calls: list[Call] = [partial(np.equal, phase, largest, mask) for phase, mask in zip(phases, won, strict=True)]
    if len(won) > 1:
        taken = scratch(won.shape[1:], np.bool_)
        calls.append(partial(np.greater, won[1], won[0], won[1]))  # of truth values: and not
        before = won[0]
        for k in range(2, len(won)):
            calls.append(partial(np.logical_or, before, won[k - 1], taken))
            calls.append(partial(np.greater, won[k], taken, won[k]))
            before = taken
    calls.append(partial(_let_nan_win, phases, largest, won, elements))
    return won, calls


def _let_nan_win(phases: Array, largest: Array, won: Array, elements: Array | None) -> None:
    """Let the first NaN win where the largest is NaN, which equals nothing."""
    if not np.isnan(np.max(largest, initial=-np.inf)):
        return
    windows = np.isnan(largest)
    is_nan = np.isnan(phases[:, windows])
    if elements is not None:
        is_nan &= np.broadcast_to(elements, phases.shape)[:, windows]
    first = np.argmax(is_nan, 0)
    won[:, windows] = (np.arange(len(won))[:, None] == first) & is_nan


def _elements_of(
    x: Array, outputs: Shape, window: Shape, stride: Shape, padding: Pairs, dilation: Shape
) -> Array | None:
    """Return which of the phases (window, 1, 1, *outputs) are elements of x; None where there is no padding."""
    if not any(n for pair in padding for n in pair):
        return None
    inside = np.pad(np.ones((1, 1, *x.shape[2:]), np.bool_), ((0, 0), (0, 0), *padding))
    return phases_view(inside, window, outputs, stride, dilation).reshape(math.prod(window), 1, 1, *outputs)


def keep_winners(values: Sequence[Array], won: Array, out: Array) -> list[Call]:
    """Return the calls that leave in `out` the values where they have won, and zeros elsewhere; uses up `won`.

    Bits are kept, not products formed: zero times infinity would be NaN. It takes no more time.
    """
    bits = np.dtype(f"i{out.itemsize}")
    truths, memory = won.view(np.int8), out.view(bits)
    calls: list[Call] = [partial(np.negative, truths, truths), partial(np.copyto, memory, truths)]  # all bits or none
    return calls + [
        partial(np.bitwise_and, part, value.view(bits), part) for part, value in zip(memory, values, strict=True)
    ]


def _covers_all(x: Array, window: Shape, padding: Pairs) -> bool:
    """Whether there is one window, of all of x, whose elements lie in one piece."""
    return x.shape[2:] == window and x.flags.c_contiguous and not any(n for pair in padding for n in pair)


def _bind_max(
    arrays: Sequence[Array], out: Array, scratch: Scratch, window: Shape, stride: Shape, padding: Pairs, dilation: Shape
) -> Sequence[Call]:
    if _covers_all(arrays[0], window, padding) and out.flags.c_contiguous:
        rows = arrays[0].reshape(out.size, math.prod(window))
        return [partial(np.maximum.reduce, rows, 1, None, out.reshape(out.size))]

    def bind(block: slice, scratch: Scratch) -> list[Call]:
        calls: list[Call] = []
        phases = _phases(arrays[0][block], out.shape[2:], -np.inf, scratch, calls, window, stride, padding, dilation)
        return [*calls, partial(np.maximum.reduce, phases, 0, None, out[block])]

    return _in_blocks(out, 2, padding, window, scratch, bind)


def _bind_max_gradient(
    arrays: Sequence[Array],
    out: Array,
    scratch: Scratch,
    lengths: Shape,
    window: Shape,
    stride: Shape,
    padding: Pairs,
    dilation: Shape,
) -> Sequence[Call]:
    if _covers_all(arrays[1], window, padding) and out.flags.c_contiguous and arrays[0].flags.c_contiguous:
        g, rows = arrays[0].reshape(-1), arrays[1].reshape(arrays[0].size, math.prod(window))
        first, places = np.arange(0, rows.size, rows.shape[1]), scratch(g.shape, np.intp)
        return [
            partial(np.argmax, rows, 1, places),
            partial(np.add, places, first, places),
            partial(np.ndarray.fill, out, 0),
            partial(np.put, out, places, g),
        ]

    def bind(block: slice, scratch: Scratch) -> list[Call]:
        g, x, y = (array[block] for array in arrays)
        calls: list[Call] = []
        # Padding of NaN equals no maximum, not even -inf.
        phases = _phases(x, g.shape[2:], np.nan, scratch, calls, window, stride, padding, dilation)
        elements = _elements_of(x, g.shape[2:], window, stride, padding, dilation)
        won, more = first_of_equals(phases, y, scratch, elements)
        calls += [*more, *keep_winners([g] * len(won), won, phases)]
        return calls + put_back(phases, out[block], scratch, window, stride, padding, dilation)

    return _in_blocks(arrays[0], 4, padding, window, scratch, bind)


def _infer_max_gather(
    u: Tensor, x: Tensor, y: Tensor, window: Shape, stride: Shape, padding: Pairs, dilation: Shape
) -> tuple[Shape, Any]:
    if u.shape != x.shape:
        raise ShapeError(f"expected shape {x.shape}, got {u.shape}")
    return y.shape, u.dtype


def _bind_max_gather(
    arrays: Sequence[Array], out: Array, scratch: Scratch, window: Shape, stride: Shape, padding: Pairs, dilation: Shape
) -> Sequence[Call]:
    u, x, y = arrays
    calls: list[Call] = []
    phases = _phases(x, out.shape[2:], np.nan, scratch, calls, window, stride, padding, dilation)
    elements = _elements_of(x, out.shape[2:], window, stride, padding, dilation)
    won, more = first_of_equals(phases, y, scratch, elements)
    calls += more
    values = _phases(u, out.shape[2:], 0, scratch, calls, window, stride, padding, dilation)
    calls += keep_winners(list(values), won, phases)
    calls.append(partial(np.add.reduce, phases, 0, None, out))
    return calls


def _left_over(x: Tensor, window: Shape, stride: Shape, padding: Pairs, dilation: Shape) -> float:
    """At most the share of elements that lie in no window; windows with gaps may share all but their first ones."""
    shape, _ = _infer_pool(x, window, stride, padding, dilation)
    least = [min(w, s) if d == 1 else 1 for w, s, d in zip(window, stride, dilation, strict=True)]
    return 1 - min(1, math.prod(shape) * math.prod(least) / max(x.size, 1))


MAX_POOL: Op = define(
    name="max_pool",
    infer=_infer_pool,
    bind=_bind_max,
    vjp=(lambda g, y, x, **at: MAX_POOL_GRADIENT(g, x, y, lengths=x.shape[2:], **at),),
    jvp=lambda t, y, x, **at: MAX_POOL_GATHER(t[0], x, y, **at),
    flops=lambda x, **at: math.prod(_infer_pool(x, **at)[0]) * math.prod(at["window"]),
    unread=_left_over,
    batch=by_samples,
    doc="the largest element of each window",
)
MAX_POOL_GRADIENT: Op = define(
    name="max_pool_gradient",
    infer=_infer_pool_gradient,
    bind=_bind_max_gradient,
    vjp=(lambda u, r, g, x, y, lengths, **at: MAX_POOL_GATHER(u, x, y, **at), no_gradient, no_gradient),
    jvp=lambda t, r, g, x, y, **at: None if t[0] is None else MAX_POOL_GRADIENT(t[0], x, y, **at),
    accepts=c_ordered,
    flops=per_element(1),
    skipped=lambda g, x, y, lengths, **at: 1 - min(1, g.size / max(x.size, 1)),
    batch=by_samples,
    doc="an element for each window, added into zeros at the place of the window's maximum",
)
MAX_POOL_GATHER: Op = define(
    name="max_pool_gather",
    infer=_infer_max_gather,
    bind=_bind_max_gather,
    vjp=(
        lambda g, r, u, x, y, **at: MAX_POOL_GRADIENT(g, x, y, lengths=x.shape[2:], **at),
        no_gradient,
        no_gradient,
    ),
    jvp=lambda t, r, u, x, y, **at: None if t[0] is None else MAX_POOL_GATHER(t[0], x, y, **at),
    flops=per_element(0),
    batch=by_samples,
    doc="for each window the element of another array at the place of the window's maximum",
)


def max_pool(
    x: Operand,
    window: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Return the largest element of each window of `x` (N, C, *lengths).

    Args:
        window: its lengths, one number or one per spatial axis.
        stride: steps between windows; None takes the window's lengths.
        padding: minus infinities around x, at most half the window: one number, one per axis, or a pair per axis.
        dilation: steps between the elements of a window.
        ceil_mode: whether elements that are left over at the end, too few for a window, have one nevertheless.

    Raises:
        ShapeError: the shapes do not fit, or the window is longer than the padded input.
    """
    x = as_tensor(x)
    return MAX_POOL(x, **pool_settings("max_pool", x, window, stride, padding, dilation, ceil_mode))


# Mean -----------------------------------------------------------------------------------------------------


def _bind_avg(
    arrays: Sequence[Array], out: Array, scratch: Scratch, window: Shape, stride: Shape, padding: Pairs, dilation: Shape
) -> Sequence[Call]:
    calls: list[Call] = []
    phases = _phases(arrays[0], out.shape[2:], 0, scratch, calls, window, stride, padding, dilation)
    calls.append(partial(np.add.reduce, phases, 0, None, out))
    calls.append(partial(np.divide, out, float(math.prod(window)), out))
    return calls


def _bind_avg_gradient(
    arrays: Sequence[Array],
    out: Array,
    scratch: Scratch,
    lengths: Shape,
    window: Shape,
    stride: Shape,
    padding: Pairs,
    dilation: Shape,
) -> Sequence[Call]:
    (g,) = arrays
    share = scratch(g.shape, g.dtype)
    calls: list[Call] = [partial(np.divide, g, float(math.prod(window)), share)]
    phases = np.broadcast_to(share, (math.prod(window), *g.shape))
    return calls + put_back(phases, out, scratch, window, stride, padding, dilation)


AVG_POOL: Op = define(
    name="avg_pool",
    infer=_infer_pool,
    bind=_bind_avg,
    vjp=(lambda g, y, x, **at: AVG_POOL_GRADIENT(g, lengths=x.shape[2:], **at),),
    jvp=linear_jvp("avg_pool"),
    flops=lambda x, **at: math.prod(_infer_pool(x, **at)[0]) * math.prod(at["window"]),
    unread=_left_over,
    batch=by_samples,
    doc="the mean of each window",
)
AVG_POOL_GRADIENT: Op = define(
    name="avg_pool_gradient",
    infer=_infer_pool_gradient,
    bind=_bind_avg_gradient,
    vjp=(lambda u, y, g, lengths, **at: AVG_POOL(u, **at),),
    jvp=linear_jvp("avg_pool_gradient"),
    batch=by_samples,
    accepts=c_ordered,
    flops=lambda g, window, **at: g.size * math.prod(window),
    doc="an element for each window, divided among all places of the window",
)


def avg_pool(
    x: Operand,
    window: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    count_padding: bool = True,
) -> Tensor:
    """Return the mean of each window of `x` (N, C, *lengths).

    Args:
        count_padding: whether padding counts as zeros; else each mean is that of the elements alone. What a window of
            `ceil_mode` has beyond the padding never counts.

    Other arguments and errors are those of `max_pool`.
    """
    x = as_tensor(x)
    at = pool_settings("avg_pool", x, window, stride, padding, dilation, ceil_mode)
    y = AVG_POOL(x, **at)
    axes = x.ndim - 2
    given = paddings(padding, axes) if count_padding else ((0, 0),) * axes
    factor = np.ones((), x.dtype)
    for axis, count in enumerate(y.shape[2:]):
        n, (before, after) = x.shape[2 + axis], given[axis]
        k, s, d, start = at["window"][axis], at["stride"][axis], at["dilation"][axis], at["padding"][axis][0]
        places = np.arange(count)[:, None] * s - start + np.arange(k) * d
        counted = np.sum((places >= -before) & (places < n + after), 1)
        factor = factor * (k / np.maximum(counted, 1)).astype(x.dtype).reshape(count, *(1,) * (axes - 1 - axis))
    return y if np.all(factor == 1) else y * factor


# Convolution and pooling in one ---------------------------------------------------------------------------
#
# What `py_engine.ad.compile.fusion` makes of a convolution whose result is pooled: the phases of
# the result come straight out of a matrix product; the order in which a pool would have to look for them never exists.
# All arrays have the channels first and the samples in the inner axes, so that calls run over long pieces of memory.


def _infer_columns(x: Tensor, kernel: Shape, stride: Shape, padding: Pairs) -> tuple[Shape, Any]:
    counts = windows_along(x.shape[2:], kernel, stride, padding, (1,) * len(kernel), "window")
    return (x.shape[1] * math.prod(kernel), x.shape[0] * math.prod(counts)), x.dtype


def _bind_columns(
    arrays: Sequence[Array], out: Array, scratch: Scratch, kernel: Shape, stride: Shape, padding: Pairs
) -> Sequence[Call]:
    (x,) = arrays
    calls: list[Call] = []
    ones = (1,) * len(kernel)
    counts = windows_along(x.shape[2:], kernel, stride, padding, ones, "window")
    whole = padded(x, padding, 0, calls)
    windows = np.moveaxis(out.reshape(x.shape[1], *kernel, x.shape[0], *counts), 1 + len(kernel), 0)
    apart = columns_apart(whole, kernel, counts, stride, ones, scratch)
    return calls + copy_windows(windows, whole, kernel, counts, stride, ones, apart)


def _bind_columns_gradient(
    arrays: Sequence[Array], out: Array, scratch: Scratch, shape: Shape, kernel: Shape, stride: Shape, padding: Pairs
) -> Sequence[Call]:
    (g,) = arrays
    axes = len(kernel)
    counts = windows_along(shape[2:], kernel, stride, padding, (1,) * axes, "window")
    by_place = g.reshape(shape[1], math.prod(kernel), shape[0], *counts)
    phases = by_place.transpose(1, 2, 0, *range(3, 3 + axes))
    return put_back(phases, out, scratch, kernel, stride, padding)


COLUMNS: Op = define(
    name="columns",
    infer=_infer_columns,
    bind=_bind_columns,
    fused=True,
    doc="the windows of x (N, C, ...) as the columns of a matrix (C * window, N * windows)",
)
COLUMNS_GRADIENT: Op = define(
    name="columns_gradient",
    infer=lambda g, shape, **at: (shape, g.dtype),
    bind=_bind_columns_gradient,
    accepts=c_ordered,
    fused=True,
    doc="columns added back into their windows",
)


def _bind_shifted_gradient(
    arrays: Sequence[Array],
    out: Array,
    scratch: Scratch,
    places: int,
    kernel: int,
    samples: int,
    window: int,
    stride: int,
) -> Sequence[Call]:
    (g,) = arrays
    size, item = out.size // kernel, g.itemsize
    memory = np.zeros(kernel - 1 + size, g.dtype)  # places of no window stay zeros
    rows = memory[kernel - 1 :]
    by_phase = as_strided(rows, g.shape, (item, samples * places * item, places * item, stride * item))
    shifted = as_strided(rows, (kernel, size), (-item, item))
    return [*copies(by_phase, g), *copies(out.reshape(kernel, size), shifted)]


SHIFTED_GRADIENT: Op = define(
    name="shifted_phases_gradient",
    infer=lambda g, places, kernel, samples, **at: ((kernel * g.shape[1], samples * places), g.dtype),
    bind=_bind_shifted_gradient,
    fused=True,
    doc="phases put back into rows, once for each place in the kernel",
)


def _infer_sliding(
    rows: Tensor, weight: Tensor, kernel: int, samples: int, window: int, stride: int
) -> tuple[Shape, Any]:
    length = len(rows) // samples - kernel + 1
    return (window, len(weight) // kernel, samples, (length - window) // stride + 1), common_dtype((rows, weight))


FULL = 16
"""Columns of a result that BLAS's kernels compute in the time of fewer: floats of the longest vectors."""


def slide(rows: Array, weight: Array, out: Array, scratch: Scratch, kernel: int, stride: int) -> list[Call]:
    """Return the calls that compute `SLIDING`.

    What the kernel sees at one place is a piece of memory, `kernel` rows long; pieces that follow each other are the
    rows of a matrix. So a result is one long sum, in the order in which the other frameworks' kernels add: rounded as
    theirs are, it breaks nearly all near-ties in a pool as they do. Few filters are repeated side by side,
    each time one row further down, with zeros around: their products with longer pieces take less time.
    """
    _, filters, samples, _ = out.shape
    places, channels = rows.shape
    memory = np.ascontiguousarray(rows).reshape(-1)  # the tape's are so already
    beside = max(n for n in range(1, FULL) if n == 1 or _suits(n, kernel, filters, places))
    piece = kernel + beside - 1
    apart = beside * -(-piece // beside)  # pieces of one matrix; those of the next begin `beside` rows later
    wide = np.zeros((piece, channels, beside, filters), rows.dtype)
    by_kernel = weight.reshape(kernel, filters, channels).swapaxes(1, 2)
    calls: list[Call] = [partial(np.copyto, wide[k : k + kernel, :, k], by_kernel) for k in range(beside)]
    columns = wide.reshape(piece * channels, beside * filters)
    sums = scratch((places // apart + 1, apart * filters), rows.dtype)
    size = sums.itemsize
    for first in range(0, apart, beside):
        count = max((places - first - piece) // apart + 1, 0)
        strides = (apart * channels * size, size)
        pieces = as_strided(memory[first * channels :], (count, piece * channels), strides, writeable=False)
        calls.append(partial(np.matmul, pieces, columns, sums[:count, first * filters : (first + beside) * filters]))
    by_phase = (filters * size, size, places // max(samples, 1) * filters * size, stride * filters * size)
    calls += copies(out, as_strided(sums, out.shape, by_phase, writeable=False))
    return calls


def _suits(beside: int, kernel: int, filters: int, places: int) -> bool:
    """Whether `beside` copies of the filters cost less than they save, and reach the last place."""
    piece = kernel + beside - 1
    return beside * filters <= FULL and 2 * piece <= 3 * kernel and piece <= places and (places - piece) % beside == 0


SLIDING: Op = define(
    name="sliding_phases",
    infer=_infer_sliding,
    bind=lambda arrays, out, scratch, kernel, stride, **at: slide(arrays[0], arrays[1], out, scratch, kernel, stride),
    accepts=c_ordered,
    fused=True,
    doc="a kernel (kernel * filters, channels) moved over rows (N * places, channels), by phase",
)


def _bind_biased(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    phases, bias = arrays
    each = scratch(out.shape[1:], out.dtype)
    calls: list[Call] = [partial(np.copyto, each.reshape(bias.size, -1), bias.reshape(-1, 1))]
    # Phase by phase: numpy broadcasts through buffers that it allocates.
    return calls + [partial(np.add, phase, each, total) for phase, total in zip(phases, out, strict=True)]


BIASED: Op = define(
    name="biased_phases",
    infer=lambda phases, bias: (phases.shape, common_dtype((phases, bias))),
    bind=_bind_biased,
    overwrites=(0,),
    accepts=c_ordered,
    fused=True,
    doc="phases (window, filters, ...) with a number added to each filter's",
)


def _bind_phase_max_gradient(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    g, phases, y = arrays
    won, calls = first_of_equals(phases, y, scratch)
    return [*calls, *keep_winners([g] * len(won), won, out)]


PHASE_MAX: Op = define(
    name="phase_max",
    infer=lambda phases: (phases.shape[1:], phases.dtype),
    kernel=lambda phases, out: np.maximum.reduce(phases, axis=0, out=out),
    fused=True,
    doc="the largest over the first axis",
)
PHASE_MAX_GRADIENT: Op = define(
    name="phase_max_gradient",
    infer=lambda g, phases, y: (phases.shape, g.dtype),
    bind=_bind_phase_max_gradient,
    overwrites=(1,),
    accepts=c_ordered,
    fused=True,
    doc="an element for each maximum over the first axis, in zeros, at the first place of that maximum",
)
