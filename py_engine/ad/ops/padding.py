"""numpy.pad: arrays surrounded with constants, with their own elements, or with statistics of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from py_engine.ad.mutation import watch_setting
from py_engine.ad.op import as_tensor, implements, in_one_dtype
from py_engine.ad.ops.along import median
from py_engine.ad.ops.arguments import axis_of, checked, wholes
from py_engine.ad.ops.elementary import ROUND, astype, equal, floor, where
from py_engine.ad.ops.reduction import any, max, mean, min
from py_engine.ad.ops.shape import Item, assemble, broadcast_to, concatenate, flip, from_places, part_of
from py_engine.ad.tensor import NO_VALUE, Literal, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError

_Pairs = Sequence[tuple[Any, Any]]

STATISTICS: dict[str, Callable[..., Tensor]] = {"maximum": max, "mean": mean, "median": median, "minimum": min}
SETTINGS = {
    **{"constant": "constant_values", "linear_ramp": "end_values"},
    **dict.fromkeys(STATISTICS, "stat_length"),
    **{"reflect": "reflect_type", "symmetric": "reflect_type"},
}
"""Modes that take a setting, each with its name."""
MODES = ("constant", "edge", "linear_ramp", *STATISTICS, "reflect", "symmetric", "wrap")


@implements(np.pad)
def pad(
    array: Operand,
    pad_width: int | Sequence[int] | Sequence[Sequence[int]] | Mapping[int, int | tuple[int, int]],
    mode: str = "constant",
    *,
    constant_values: Any = NO_VALUE,
    **kwargs: Any,
) -> Tensor:
    """Surround an array with constants, or, in the other modes, with what follows from its elements.

    Widths, values and lengths are given as to numpy.pad: one, a pair (before, after), or such a pair for each axis. The
    modes are numpy's, without "empty", whose values are undefined, and functions, which write into arrays.

    Raises:
        ConfigurationError: another mode, or an argument of one.
        ShapeError: widths or values that do not fit the array.
    """
    x = as_tensor(array)
    if not isinstance(mode, str) or mode not in MODES:
        raise ConfigurationError(
            f"pad: only the modes {', '.join(map(repr, MODES))} are supported, got {mode!r}; join pieces with "
            "concatenate()"
        )
    if constant_values is not NO_VALUE:
        kwargs["constant_values"] = constant_values
    others = sorted(kwargs.keys() - {SETTINGS.get(mode)})
    if others:
        raise ConfigurationError(f"pad: mode {mode!r} does not take {', '.join(others)}")
    setting = kwargs.get(SETTINGS.get(mode, ""))
    widths = _widths(pad_width, x)
    if mode == "constant":
        return _with_constants(x, widths, _padding_values("constant_values", kwargs.get("constant_values", 0), x))
    odd = mode in ("reflect", "symmetric") and _is_odd(kwargs.get("reflect_type", "even"))
    if mode in ("edge", "reflect", "symmetric", "wrap") and not odd:
        return from_places("pad", x, lambda places: np.pad(places, widths, mode))  # type: ignore[call-overload]
    for n, (before, after) in zip(x.shape, widths, strict=True):
        if not n and (before or after):
            raise ShapeError(f"pad: an empty axis of shape {x.shape} can only be extended in the mode 'constant'")
    settings: _Pairs = [(None, None)] * x.ndim
    if mode == "linear_ramp":
        settings = _padding_values("end_values", 0 if setting is None else setting, x)
    elif mode in STATISTICS and setting is not None:
        settings = _pairs("stat_length", setting, x)
    kind = x.dtype
    for axis, (before, after) in enumerate(widths):
        if odd:
            x = _reflected(x, axis, before, after, mode == "symmetric")
        elif mode == "linear_ramp":
            x = _ramped(x, axis, before, after, settings[axis])
        else:
            x = _with_statistics(x, axis, before, after, settings[axis], STATISTICS[mode])
        x = x if x.dtype == kind else astype(x, kind)  # truth values, whose sums are numbers
    return x


def _is_odd(reflect_type: Any) -> bool:
    if reflect_type not in ("even", "odd"):
        raise ConfigurationError(f"pad: reflect_type must be 'even' or 'odd', got {reflect_type!r}")
    return bool(reflect_type == "odd")


def _ends(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    n = x.shape[axis]
    return part_of(x, axis, 0, 1), part_of(x, axis, n - 1, n)


def _wide(x: Tensor, axis: int, width: int) -> Tensor:
    return broadcast_to(x, (*x.shape[:axis], width, *x.shape[axis + 1 :]))


def _with_statistics(
    x: Tensor, axis: int, before: int, after: int, lengths: tuple[Any, Any], statistic: Callable[..., Tensor]
) -> Tensor:
    n = x.shape[axis]
    if not x.size:  # there is nothing to take a statistic of: an axis without elements has no width here
        side = part_of(x, axis, 0, 1 if n else 0)
        return concatenate([_wide(side, axis, before), x, _wide(side, axis, after)], axis)
    first, last = (n if length is None else length if length < n else n for length in lengths)
    sides = [part_of(x, axis, 0, first), part_of(x, axis, n - last, n)]
    found = [statistic(side, axis=axis, keepdims=True) for side in sides]
    if x.dtype.kind in "iu":
        found = [astype(ROUND(value) if value.dtype.kind == "f" else value, x.dtype) for value in found]
    return concatenate([_wide(found[0], axis, before), x, _wide(found[1], axis, after)], axis)


def _ramped(x: Tensor, axis: int, before: int, after: int, values: tuple[Tensor, Tensor]) -> Tensor:
    parts = []
    whole = x.dtype.kind in "iub"
    for edge, value, width in zip(_ends(x, axis), values, (before, after), strict=True):
        shape = [-1 if d == axis else 1 for d in range(x.ndim)]
        if whole:  # rounded down, after the very steps of numpy
            edge, value = astype(edge, np.float64), astype(value, np.float64)
            step, places = (edge - value) / (width or 1), np.arange(float(width)).reshape(shape)
            some_zero = any(equal(step, 0))
            ramp = where(some_zero, places / (width or 1) * (edge - value), places * step) + value
            parts.append(astype(ramp if x.dtype == np.bool_ else floor(ramp), x.dtype))
            continue
        share = np.arange(width, dtype=x.dtype) / x.dtype.type(width or 1)
        parts.append((edge - value) * share.reshape(shape) + value)
    return concatenate([parts[0], x, flip(parts[1], axis)], axis)


def _reflected(x: Tensor, axis: int, before: int, after: int, with_edge: bool) -> Tensor:
    """Reflect by the edges, point-symmetrically: twice the edge minus the elements; again where these are too few."""
    period = x.shape[axis] - (not with_edge)
    if not period:
        first, last = _ends(x, axis)
        return concatenate([_wide(first, axis, before), x, _wide(last, axis, after)], axis)
    while before or after:
        n = x.shape[axis]
        most = (n - (not with_edge)) // period * period
        left, right = (most if width > most else width for width in (before, after))
        skipped = int(not with_edge)
        first, last = _ends(x, axis)
        start = 2 * first - flip(part_of(x, axis, skipped, left + skipped), axis)
        end = 2 * last - flip(part_of(x, axis, n - skipped - right, n - skipped), axis)
        x = concatenate([start, x, end], axis)
        before, after = before - left, after - right
    return x


def _with_constants(x: Tensor, widths: _Pairs, values: _Pairs) -> Tensor:
    lengths = [before + n + after for (before, after), n in zip(widths, x.shape, strict=True)]
    inner: list[Item] = [(before, before + n, 1) for (before, _), n in zip(widths, x.shape, strict=True)]
    parts, places = [x], [tuple(inner)]
    # One axis after the other: the constants of the last one fill the corners, as numpy's do.
    for axis, ((before, after), sides) in enumerate(zip(widths, values, strict=True)):
        outside = [(0, n, 1) for n in lengths[:axis]]
        n = lengths[axis]
        for value, (start, stop) in zip(sides, ((0, before), (n - after, n)), strict=True):
            if start < stop and not _is_zero(value):
                shape = (*lengths[:axis], stop - start, *x.shape[axis + 1 :])
                parts.append(broadcast_to(value, shape))
                places.append((*outside, (start, stop, 1), *inner[axis + 1 :]))
    return assemble(parts, places, tuple(lengths))


def _is_zero(value: Tensor) -> bool:
    return value.__class__ is Literal and value.data is not None and not value.data.tobytes().strip(b"\0")


def _widths(pad_width: Any, x: Tensor) -> list[tuple[int, int]]:
    """Return numpy's forms of `pad_width` as a pair for each axis."""
    if isinstance(pad_width, Mapping):
        pairs = [(0, 0)] * x.ndim
        for axis, width in pad_width.items():
            both = wholes(width, "pad: each width")
            if isinstance(width, (tuple, list)) and len(both) != 2:
                raise ShapeError(f"pad: the width of an axis is a number or a pair, got {width}")
            pairs[axis_of(axis, x.ndim, "pad")] = (both[0], both[-1])
        pad_width = tuple(pairs)
    watch_setting(pad_width)
    given = checked(
        "pad", lambda: np.asarray(pad_width.numpy() if isinstance(pad_width, Tensor) else pad_width), x.shape
    )
    if given.dtype.kind != "i":
        if x.ndim == 0 and given.size == 0:
            return []
        raise DTypeError(f"pad: the widths must be integers, got {pad_width!r}")
    if (given < 0).any():
        raise ShapeError(f"pad: widths must not be negative, got {pad_width}")
    pairs = checked("pad", lambda: np.broadcast_to(given, (x.ndim, 2)).tolist(), x.shape)
    return [(before, after) for before, after in pairs]


def _padding_values(name: str, values: Any, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return numpy's forms of `constant_values` or `end_values` as a pair of numbers for each axis."""
    if isinstance(values, Tensor):
        if values.shape:
            raise ShapeError(f"pad: a tensor as {name} must be one number, got shape {values.shape}")
        values = in_one_dtype((x, values))[1]
        if values.dtype != x.dtype:
            raise DTypeError(f"pad: {name} of {values.dtype} do not fit an array of {x.dtype}; convert with astype()")
        return [(values, values)] * x.ndim
    watch_setting(values)
    given = checked("pad", lambda: np.asarray(values), x.shape)
    if given.dtype.kind not in "fiub":
        raise DTypeError(f"pad: {name} must be numbers, got {values!r}")
    ramped = name == "end_values" and x.dtype.kind in "iub"  # a ramp is made of floats, and then rounded
    with np.errstate(all="ignore"):
        given = given.astype(np.float64 if ramped else x.dtype)
    pairs = checked("pad", lambda: np.broadcast_to(given, (x.ndim, 2)), x.shape)
    return [(Literal(np.array(before)), Literal(np.array(after))) for before, after in pairs]


def _pairs(name: str, given: Any, x: Tensor) -> _Pairs:
    """Return numpy's forms of a setting of whole numbers as a pair for each axis."""
    watch_setting(given)
    found = checked("pad", lambda: np.asarray(given), x.shape)
    if found.dtype.kind not in "iu":
        raise DTypeError(f"pad: {name} must be whole numbers, got {given!r}")
    if (found < 0).any():
        raise ShapeError(f"pad: {name} must not be negative, got {given!r}")
    if not found.all():
        raise ShapeError(f"pad: {name} of 0 leaves no elements, got {given!r}")
    pairs = checked("pad", lambda: np.broadcast_to(found, (x.ndim, 2)).tolist(), x.shape)
    return [(before, after) for before, after in pairs]
