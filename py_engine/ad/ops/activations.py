"""Activations beside those that the other ops are made with: smooth and leaky kin of relu.

Subgradients at 0: `leaky_relu` has its slope, `elu` and `selu` that of their negative side, as PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from py_engine.ad.op import ZEROS, Call, Op, Scratch, as_tensor, elementwise
from py_engine.ad.ops.elementary import (
    abs,
    bind_sigmoid,
    bind_where,
    clip,
    exp,
    expm1,
    greater,
    minimum,
    sigmoid,
    softplus,
    square,
    tanh,
    where,
)
from py_engine.ad.ops.special import erfc
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ConfigurationError

# Smooth ones ----------------------------------------------------------------------------------------------


def _silu(x: Array, out: Array) -> None:
    rest = np.empty(x.shape, x.dtype)
    with np.errstate(over="ignore"):  # as in sigmoid
        for call in _bind_silu((x,), out, lambda shape, dtype: rest):
            call()


def _bind_silu(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    (x,) = arrays
    share = scratch(x.shape, x.dtype)
    return [*bind_sigmoid((x,), share, scratch), partial(np.multiply, x, share, out)]


def _silu_slope(y: Tensor, x: Tensor) -> Tensor:
    share = sigmoid(x)
    return share + y * (1 - share)


silu = elementwise(
    "silu", _silu, _silu_slope, doc="x sigmoid(x)", bind=_bind_silu, scalar="{0} * (1.0 / (1.0 + exp(-{0})))"
)


def _gelu(x: Array, out: Array) -> None:
    tail = np.empty(out.shape, out.dtype)
    erfc.kernel(x * -math.sqrt(0.5), tail)  # type: ignore[misc]  # it has one
    np.multiply(tail, 0.5, tail)
    np.multiply(x, tail, out)


def _quotient(y: Array, x: Array, out: Array) -> None:
    tiny = np.abs(x) <= np.finfo(x.dtype).tiny  # whose halves have not all their digits
    with np.errstate(all="ignore"):
        np.divide(y, x, out)
    np.copyto(out, 0.5, where=tiny)


def _normal_density(x: Tensor) -> Tensor:
    return exp(-0.5 * square(x)) * (1 / math.sqrt(2 * math.pi))


NORMAL_OF_GELU = elementwise(
    "normal_of_gelu",
    _quotient,
    None,
    lambda p, y, x: _normal_density(x),
    doc="the normal distribution function of x, from x and gelu's value there, whose derivative is part of that by x",
    in_table=False,
)


def _gelu_slope(y: Tensor, x: Tensor) -> Tensor:
    # Φ(x) + x φ(x) with the normal distribution and its density: exact where Φ is small.
    return NORMAL_OF_GELU(y, x) + x * _normal_density(x)


GELU: Op = elementwise("gelu", _gelu, _gelu_slope, doc="x times the normal distribution function of x")

LINEAR, CUBIC = math.sqrt(2 / math.pi), math.sqrt(2 / math.pi) * 0.044715
"""Of the polynomial in the approximation of Hendrycks and Gimpel (2016)."""


def _gelu_tanh(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    (x,) = arrays
    inner = scratch(x.shape, x.dtype)
    return [
        partial(np.multiply, x, x, inner),
        partial(np.multiply, inner, CUBIC, inner),
        partial(np.add, inner, LINEAR, inner),
        partial(np.multiply, inner, x, inner),
        partial(np.tanh, inner, inner),
        partial(np.add, inner, 1, inner),
        partial(np.multiply, inner, 0.5, inner),
        partial(np.multiply, inner, x, out),
    ]


def _gelu_tanh_slope(y: Tensor, x: Tensor) -> Tensor:
    x = clip(x, -100, 100)  # beyond, the tanh is ±1, and no square overflows
    squared = square(x)
    t = tanh(x * (LINEAR + CUBIC * squared))
    return 0.5 * (1 + t) + 0.5 * x * (1 - square(t)) * (LINEAR + 3 * CUBIC * squared)


gelu_tanh = elementwise("gelu_tanh", None, _gelu_tanh_slope, doc="gelu with a tanh in place of erf", bind=_gelu_tanh)


def gelu(x: Operand, approximate: bool | str = False) -> Tensor:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016): exactly, or by their tanh.

    Args:
        x: an array of any shape.
        approximate: True or "tanh" for the tanh, False or "none" for the exact function.
    """
    if approximate not in (True, False, "tanh", "none"):
        raise ConfigurationError(f"gelu: approximate must be True, False, 'tanh' or 'none', got {approximate!r}")
    return gelu_tanh(x) if approximate in (True, "tanh") else GELU(x)


# Bent ones ------------------------------------------------------------------------------------------------
#
# The slope, or the limit, of the negative side is an operand: a number, or a parameter with its own gradient.


def _bind_bent(x: Array, negative: Array, out: Array, scratch: Scratch) -> list[Call]:
    """Return the calls that take `negative` where x is not above 0 and x elsewhere."""
    below = scratch(x.shape, np.bool_)
    return [partial(np.less_equal, x, ZEROS[x.dtype].data, below), *bind_where((below, negative, x), out, scratch)]


def _bind_leaky_relu(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    x, slope = arrays
    negative = scratch(out.shape, out.dtype)
    return [partial(np.multiply, x, slope, negative), *_bind_bent(x, negative, out, scratch)]


def _bind_elu(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    x, alpha = arrays
    powers, negative = scratch(x.shape, x.dtype), scratch(out.shape, out.dtype)
    return [
        partial(np.expm1, x, powers),
        partial(np.multiply, powers, alpha, negative),
        *_bind_bent(x, negative, out, scratch),
    ]


def _elu(x: Array, alpha: Array, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # where x is above 0, which takes x itself
        for call in _bind_elu((x, alpha), out, np.empty):
            call()


LEAKY_RELU: Op = elementwise(
    "leaky_relu",
    None,
    lambda y, x, slope: where(greater(x, 0), 1, slope),
    lambda y, x, slope: where(greater(x, 0), 0, x),
    doc="x where it is above 0, else x times a slope",
    bind=_bind_leaky_relu,
    scalar="{0} if {0} > 0.0 or {0} != {0} else {0} * {1}",
)
ELU: Op = elementwise(
    "elu",
    _elu,
    lambda y, x, alpha: where(greater(x, 0), 1, alpha * exp(minimum(x, 0))),
    lambda y, x, alpha: where(greater(x, 0), 0, expm1(minimum(x, 0))),
    doc="x where it is above 0, else alpha (exp(x) - 1)",
    bind=_bind_elu,
    scalar="{0} if {0} > 0.0 or {0} != {0} else {1} * expm1({0})",
)


def leaky_relu(x: Operand, slope: Operand = 0.01) -> Tensor:
    """x where it is above 0, else x times `slope`, which may be a parameter (PReLU)."""
    return LEAKY_RELU(x, slope)


def elu(x: Operand, alpha: Operand = 1.0) -> Tensor:
    """x where it is above 0, else alpha (exp(x) - 1) (Clevert et al. 2015)."""
    return ELU(x, alpha)


def selu(x: Operand) -> Tensor:
    """The scaled `elu` that keeps mean 0 and variance 1 (Klambauer et al. 2017)."""
    return 1.0507009873554805 * ELU(x, 1.6732632423543772)


# Made of others -------------------------------------------------------------------------------------------


def mish(x: Operand) -> Tensor:
    """x tanh(softplus(x)) (Misra 2019)."""
    x = as_tensor(x)
    return x * tanh(softplus(x))


def hard_swish(x: Operand) -> Tensor:
    """x times x + 3 limited to [0, 6], divided by 6 (Howard et al. 2019)."""
    x = as_tensor(x)
    return x * clip(x + 3, 0, 6) * (1 / 6)


def softsign(x: Operand) -> Tensor:
    """x / (1 + |x|)."""
    x = as_tensor(x)
    return x / (1 + abs(x))


def log_sigmoid(x: Operand) -> Tensor:
    """log(sigmoid(x)), without overflow."""
    return -softplus(-as_tensor(x))
