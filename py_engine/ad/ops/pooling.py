"""Pooling over one or two spatial axes, and more, of x (N, C, *lengths).

Windows that would reach beyond the (padded) input are left out. A maximum belongs to the first element, in C order,
that has it: the gradient goes there, undivided.

All work on *phases*: for each place in a window, the elements that stand there, for all windows at once. A maximum over
the phases is as many calls as a window has elements, each over all windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from py_engine.ad.ops.convolution import Pairs, padded, paddings, per_axis, window_view, windows_along
from py_engine.ad.ops.record import Call, Op, Scratch, Shape, as_tensor, linear_jvp, register
from py_engine.ad.tensor import FLOATS, Array, Operand, Tensor
from py_engine.errors import DTypeError, ShapeError

# What the ops share ---------------------------------------------------------------------------------------


def _infer_pool(x: Tensor, window: Shape, stride: Shape, padding: Pairs) -> tuple[Shape, Any]:
    if not window or x.ndim != len(window) + 2:
        raise ShapeError(f"expected x (N, C, *lengths) with at least one spatial axis, got shape {x.shape}")
    if x.dtype not in FLOATS:
        raise DTypeError(f"expected float32 or float64, got {x.dtype}; convert with astype()")
    for axis, (k, pair) in enumerate(zip(window, padding, strict=True)):
        if max(pair) > k // 2:
            raise ShapeError(
                f"padding must be at most half the window, {k // 2}, along spatial axis {axis}, actual {max(pair)}"
            )
    ones = (1,) * len(window)
    counts = windows_along(x.shape[2:], window, stride, padding, ones, "pooling window")
    return (*x.shape[:2], *counts), x.dtype


def _phases_view(x: Array, window: Shape, outputs: Shape, stride: Shape) -> Array:
    """Return a padded x as a view (*window, N, C, *outputs)."""
    windows = window_view(x, window, outputs, stride, (1,) * len(window))
    axes = len(window)
    return windows.transpose(*range(2, 2 + axes), 0, 1, *range(2 + axes, 2 + 2 * axes))


def _phases(
    x: Array,
    outputs: Shape,
    fill: float,
    scratch: Scratch,
    calls: list[Call],
    window: Shape,
    stride: Shape,
    padding: Pairs,
) -> Array:
    """Return the phases (window, N, C, *outputs) in memory of their own, and add the calls that copy them there."""
    view = _phases_view(padded(x, padding, fill, calls), window, outputs, stride)
    phases = scratch((math.prod(window), *view.shape[len(window) :]), x.dtype)
    calls.append(partial(np.copyto, phases.reshape(view.shape), view))
    return phases


def _put_back(phases: Array, out: Array, scratch: Scratch, window: Shape, stride: Shape, padding: Pairs) -> list[Call]:
    """Return the calls that add phases (window, N, C, *outputs) into their places in `out` (N, C, *lengths)."""
    outputs = phases.shape[3:]
    whole = out
    if any(n for pair in padding for n in pair):
        lengths = [n + before + after for n, (before, after) in zip(out.shape[2:], padding, strict=True)]
        whole = scratch((*out.shape[:2], *lengths), out.dtype)
    calls: list[Call] = []
    apart = all(s >= k or n <= 1 for k, s, n in zip(window, stride, outputs, strict=True))
    tiled = apart and all(
        s == k and n * k == length for k, s, n, length in zip(window, stride, outputs, whole.shape[2:], strict=True)
    )
    if not tiled:
        calls.append(partial(whole.fill, 0))
    view = _phases_view(whole, window, outputs, stride)
    if apart:
        calls.append(partial(np.copyto, view, phases.reshape(view.shape)))
    else:
        total = scratch(phases.shape[1:], phases.dtype)
        for k, place in enumerate(product(*(range(n) for n in window))):
            # Added in one piece: numpy adds to scattered memory through buffers that it allocates.
            calls += [
                partial(np.copyto, total, view[place]),
                partial(np.add, total, phases[k], total),
                partial(np.copyto, view[place], total),
            ]
    if whole is not out:
        inside = tuple(slice(before, before + n) for n, (before, _) in zip(out.shape[2:], padding, strict=True))
        calls.append(partial(np.copyto, out, whole[(slice(None), slice(None), *inside)]))
    return calls


def _infer_pool_gradient(
    g: Tensor, *inputs: Tensor, lengths: Shape, window: Shape, stride: Shape, padding: Pairs
) -> tuple[Shape, Any]:
    ones = (1,) * len(window)
    counts = windows_along(lengths, window, stride, padding, ones, "pooling window")
    if g.ndim != len(window) + 2 or g.shape[2:] != counts:
        raise ShapeError(f"expected an upstream gradient (N, C, *{counts}), got shape {g.shape}")
    return (*g.shape[:2], *lengths), g.dtype


def _settings(
    name: str,
    x: Tensor,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int] | Sequence[Sequence[int]],
) -> dict[str, Any]:
    axes = max(x.ndim - 2, 0)
    try:
        sizes = per_axis("window", window, axes)
        return {
            "window": sizes,
            "stride": sizes if stride is None else per_axis("stride", stride, axes),
            "padding": paddings(padding, axes),
        }
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None


# Maximum --------------------------------------------------------------------------------------------------


def first_of_equals(phases: Array, largest: Array, scratch: Scratch) -> tuple[Array, list[Call]]:
    """Return, for each phase, whether it is the first that equals the largest one, and the calls that find out."""
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
    return won, calls


def _bind_max(
    arrays: Sequence[Array], out: Array, scratch: Scratch, window: Shape, stride: Shape, padding: Pairs
) -> Sequence[Call]:
    calls: list[Call] = []
    phases = _phases(arrays[0], out.shape[2:], -np.inf, scratch, calls, window, stride, padding)
    calls.append(partial(np.maximum.reduce, phases, 0, None, out))
    return calls


def _bind_max_gradient(
    arrays: Sequence[Array],
    out: Array,
    scratch: Scratch,
    lengths: Shape,
    window: Shape,
    stride: Shape,
    padding: Pairs,
) -> Sequence[Call]:
    g, x, y = arrays
    calls: list[Call] = []
    phases = _phases(x, g.shape[2:], -np.inf, scratch, calls, window, stride, padding)
    won, more = first_of_equals(phases, y, scratch)
    calls += [*more, partial(np.copyto, phases, won)]
    calls += [partial(np.multiply, phase, g, phase) for phase in phases]
    return calls + _put_back(phases, out, scratch, window, stride, padding)


def _infer_max_gather(
    u: Tensor, x: Tensor, y: Tensor, window: Shape, stride: Shape, padding: Pairs
) -> tuple[Shape, Any]:
    if u.shape != x.shape:
        raise ShapeError(f"expected shape {x.shape}, got {u.shape}")
    return y.shape, u.dtype


def _bind_max_gather(
    arrays: Sequence[Array], out: Array, scratch: Scratch, window: Shape, stride: Shape, padding: Pairs
) -> Sequence[Call]:
    u, x, y = arrays
    calls: list[Call] = []
    phases = _phases(x, out.shape[2:], -np.inf, scratch, calls, window, stride, padding)
    won, more = first_of_equals(phases, y, scratch)
    calls += more
    values = _phases(u, out.shape[2:], 0, scratch, calls, window, stride, padding)
    calls.append(partial(np.copyto, phases, won))
    calls.append(partial(np.multiply, values, phases, values))
    calls.append(partial(np.add.reduce, values, 0, None, out))
    return calls


def _or_zeros(tangent: Tensor | None, x: Tensor) -> Tensor:
    return Tensor(np.zeros(x.shape, x.dtype)) if tangent is None else tangent


MAX_POOL: Op = register(
    Op(
        name="max_pool",
        infer=_infer_pool,
        bind=_bind_max,
        vjp=(lambda g, y, x, **at: MAX_POOL_GRADIENT(g, x, y, lengths=x.shape[2:], **at),),
        jvp=lambda t, y, x, **at: MAX_POOL_GATHER(t[0], x, y, **at),
        doc="the largest element of each window",
    )
)
MAX_POOL_GRADIENT: Op = register(
    Op(
        name="max_pool_gradient",
        infer=_infer_pool_gradient,
        bind=_bind_max_gradient,
        vjp=(lambda u, r, g, x, y, lengths, **at: MAX_POOL_GATHER(u, x, y, **at), None, None),
        jvp=lambda t, r, g, x, y, **at: MAX_POOL_GRADIENT(_or_zeros(t[0], g), x, y, **at),
        accepts=lambda array: array.flags.c_contiguous,
        doc="an element for each window, added into zeros at the place of the window's maximum",
    )
)
MAX_POOL_GATHER: Op = register(
    Op(
        name="max_pool_gather",
        infer=_infer_max_gather,
        bind=_bind_max_gather,
        vjp=(lambda g, r, u, x, y, **at: MAX_POOL_GRADIENT(g, x, y, lengths=x.shape[2:], **at), None, None),
        jvp=lambda t, r, u, x, y, **at: MAX_POOL_GATHER(_or_zeros(t[0], u), x, y, **at),
        doc="for each window the element of another array at the place of the window's maximum",
    )
)


def max_pool(
    x: Operand,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] | Sequence[Sequence[int]] = 0,
) -> Tensor:
    """Return the largest element of each window of `x` (N, C, *lengths).

    Args:
        window: its lengths, one number or one per spatial axis.
        stride: steps between windows; None takes the window's lengths.
        padding: minus infinities around x, at most half the window: one number, one per axis, or a pair per axis.

    Raises:
        ShapeError: the shapes do not fit, or the window is longer than the padded input.
    """
    x = as_tensor(x)
    return MAX_POOL(x, **_settings("max_pool", x, window, stride, padding))


# Mean -----------------------------------------------------------------------------------------------------


def _bind_avg(
    arrays: Sequence[Array], out: Array, scratch: Scratch, window: Shape, stride: Shape, padding: Pairs
) -> Sequence[Call]:
    calls: list[Call] = []
    phases = _phases(arrays[0], out.shape[2:], 0, scratch, calls, window, stride, padding)
    calls.append(partial(np.add.reduce, phases, 0, None, out))
    calls.append(partial(np.multiply, out, 1 / math.prod(window), out))
    return calls


def _bind_avg_gradient(
    arrays: Sequence[Array],
    out: Array,
    scratch: Scratch,
    lengths: Shape,
    window: Shape,
    stride: Shape,
    padding: Pairs,
) -> Sequence[Call]:
    (g,) = arrays
    share = scratch(g.shape, g.dtype)
    calls: list[Call] = [partial(np.multiply, g, 1 / math.prod(window), share)]
    phases = np.broadcast_to(share, (math.prod(window), *g.shape))
    return calls + _put_back(phases, out, scratch, window, stride, padding)


AVG_POOL: Op = register(
    Op(
        name="avg_pool",
        infer=_infer_pool,
        bind=_bind_avg,
        vjp=(lambda g, y, x, **at: AVG_POOL_GRADIENT(g, lengths=x.shape[2:], **at),),
        jvp=linear_jvp("avg_pool"),
        doc="the mean of each window",
    )
)
AVG_POOL_GRADIENT: Op = register(
    Op(
        name="avg_pool_gradient",
        infer=_infer_pool_gradient,
        bind=_bind_avg_gradient,
        vjp=(lambda u, y, g, lengths, **at: AVG_POOL(u, **at),),
        jvp=linear_jvp("avg_pool_gradient"),
        accepts=lambda array: array.flags.c_contiguous,
        doc="an element for each window, divided among all places of the window",
    )
)


def avg_pool(
    x: Operand,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] | Sequence[Sequence[int]] = 0,
) -> Tensor:
    """Return the mean of each window of `x` (N, C, *lengths); padding counts as zeros.

    Args and errors as `max_pool`.
    """
    x = as_tensor(x)
    return AVG_POOL(x, **_settings("avg_pool", x, window, stride, padding))
