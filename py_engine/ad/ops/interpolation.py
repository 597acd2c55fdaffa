"""Images and sequences in another size: x (N, C, *lengths), axis by axis."""

from __future__ import annotations

import numpy as np

from py_engine.ad.op import as_tensor, float_only
from py_engine.ad.ops.convolution import Sizes, per_axis
from py_engine.ad.ops.indexing import take
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ConfigurationError, ShapeError


def interpolate(x: Operand, size: Sizes, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """Return `x` (N, C, *lengths) with spatial axes of other lengths.

    Args:
        size: the new lengths, one number or one per spatial axis.
        mode: "nearest", the element whose part of the axis it lies in, or "linear" (bilinear over two axes), between
            the two that are nearest: (1 - w) a + w b with the interpolation weight w. An infinite b gives NaN where w
            is 0, as in PyTorch.
        align_corners: of "linear", whether the first and last elements stay where they are; else elements are the
            centres of pieces of equal length, and the outermost ones continue beyond.

    Raises:
        ShapeError: no spatial axis, an empty one, or a size that is not a whole number above 0.
        ConfigurationError: another mode.
    """
    x = as_tensor(x)
    float_only(x.dtype)
    axes = x.ndim - 2
    if mode not in ("nearest", "linear"):
        raise ConfigurationError(f"interpolate: mode must be nearest or linear, got {mode!r}")
    if mode == "nearest" and align_corners:
        raise ConfigurationError("interpolate: align_corners is for mode linear")
    if axes < 1 or 0 in x.shape[2:]:
        raise ShapeError(f"interpolate: expected x (N, C, *lengths) with elements on each axis, got shape {x.shape}")
    try:
        sizes = per_axis("size", size, axes)
    except ShapeError as error:
        raise ShapeError(f"interpolate: {error}") from None
    for axis, new in enumerate(sizes, 2):
        old = x.shape[axis]
        if new == old:
            continue
        if mode == "nearest":
            x = take(x, np.arange(new) * old // new, axis)
            continue
        first, second, share = _neighbours(old, new, align_corners)
        before, behind = take(x, first, axis), take(x, second, axis)
        share = share.reshape(new, *(1,) * (x.ndim - 1 - axis))
        near, far = (1 - share).astype(x.dtype), share.astype(x.dtype)
        x = before * near + behind * far  # no difference of elements, which overflows or is inf - inf
    return x


def _neighbours(old: int, new: int, align_corners: bool) -> tuple[Array, Array, Array]:
    """Return, for each new element, the old ones before and behind it, and the interpolation weight of the latter.

    Behind the last element is that element again, with any weight, as in PyTorch: 0 times infinity would be NaN.
    """
    if align_corners:
        places = np.arange(new) * ((old - 1) / max(new - 1, 1))
    else:
        places = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    first = np.minimum(places.astype(np.int64), old - 1)
    return first, np.minimum(first + 1, old - 1), places - first
