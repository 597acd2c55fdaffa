"""`scipy.signal` on tensors: convolution."""

from __future__ import annotations

import numpy as np

from py_engine.ad import ops
from py_engine.ad.op import as_floats
from py_engine.ad.ops.convolution import CONV
from py_engine.ad.tensor import Operand, Tensor
from py_engine.errors import ConfigurationError, ShapeError

__all__ = ["convolve"]


def convolve(in1: Operand, in2: Operand, mode: str = "full", method: str = "auto") -> Tensor:
    """Convolve two arrays of the same number of axes, as `scipy.signal.convolve` does, without Fourier transforms.

    Args:
        in1, in2: arrays that are not empty.
        mode: "full" for all sums, "same" for the middle ones, of the shape of `in1`, "valid" for those without padding:
            there one array is at least as long as the other in every axis.
        method: "auto" or "direct".

    Raises:
        ShapeError: the arrays have other numbers of axes, are empty, or "valid" has no sums.
        ConfigurationError: there is no such mode or method.
    """
    if mode not in ("full", "same", "valid"):
        raise ConfigurationError(f"signal.convolve: mode must be 'full', 'same' or 'valid', got {mode!r}")
    if method not in ("auto", "direct"):
        raise ConfigurationError(f"signal.convolve: method must be 'auto' or 'direct', got {method!r}")
    x, kernel = as_floats(in1, in2)
    if x.ndim != kernel.ndim or not x.size or not kernel.size:
        raise ShapeError(
            f"signal.convolve: expected two arrays of the same number of axes that are not empty, got shapes {x.shape} "
            f"and {kernel.shape}"
        )
    if mode == "valid" and any(k > n for n, k in zip(x.shape, kernel.shape, strict=True)):
        x, kernel = kernel, x
        if any(k > n for n, k in zip(x.shape, kernel.shape, strict=True)):
            raise ShapeError(
                f"signal.convolve: for mode 'valid' one array must be at least as long as the other in every axis, got "
                f"shapes {kernel.shape} and {x.shape}"
            )
    if not x.ndim:
        return x * kernel
    padding = {
        "full": tuple((k - 1, k - 1) for k in kernel.shape),
        "same": tuple((k // 2, k - 1 - k // 2) for k in kernel.shape),
        "valid": ((0, 0),) * x.ndim,
    }[mode]
    ones = (1,) * x.ndim
    weight = ops.flip(kernel)[np.newaxis, np.newaxis]
    return CONV(x[np.newaxis, np.newaxis], weight, stride=ones, padding=padding, dilation=ones, groups=1)[0, 0]
