"""Random masks. An op here draws anew from its generator every time it is computed, eagerly and in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from py_engine.ad.op import Call, Op, Scratch, as_tensor, define, float_only, per_element
from py_engine.ad.ops.arguments import is_real, shown
from py_engine.ad.ops.shape import leading
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ConfigurationError


def _bind_mask(
    arrays: Sequence[Array], out: Array, scratch: Scratch, rate: float, generator: np.random.Generator
) -> Sequence[Call]:
    draws = scratch(out.shape, out.dtype)
    return [
        partial(generator.random, out.shape, out.dtype, draws),
        partial(np.greater_equal, draws, rate, out),
        partial(np.multiply, out, 1 / (1 - rate), out),
    ]


DROPOUT_MASK: Op = define(
    name="dropout_mask",
    infer=lambda x, rate, generator: (x.shape, float_only(x.dtype)),
    bind=_bind_mask,
    constant=True,
    batch=leading,
    random=True,
    flops=per_element(1),
    doc="0 with probability rate, else 1 / (1 - rate), in the shape of x",
)


def dropout(x: Operand, rate: float, generator: np.random.Generator) -> Tensor:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate).

    Source: Srivastava et al., "Dropout", JMLR 15 (2014), in the inverted form that needs nothing at evaluation.

    Raises:
        ConfigurationError: `rate` is no number, such as an array, or not in [0, 1).
    """
    if not is_real(rate) or not 0 <= rate < 1:
        raise ConfigurationError(f"dropout: the rate must be a number, at least 0 and below 1, got {shown(rate)}")
    x = as_tensor(x)
    return x if rate == 0 else x * DROPOUT_MASK(x, rate=float(rate), generator=generator)
