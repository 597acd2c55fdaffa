"""The technique `fuse`: a convolution whose result is pooled becomes a chain of few calls over long pieces of memory.

    max_pool(relu(conv(x, weight) + bias))  =  relu(max(phases of conv(x, weight)) + bias)

Both sides are equal to the last bit of the maximum: adding a number and relu keep the order of numbers. On the right,
bias and relu work on what the pool leaves over, and the phases (for each place in a pooling window, the results that
stand there) come out of the matrix product itself, in either of two ways:

- *wide kernels*: the columns hold the whole field that one pooling window sees, and the matrix holds the kernel once
  for each place of the window, with zeros around it. Fewer columns, more products; best for small windows.
- *shifted sums*: one product gives each kernel place's share at every position; they are added up, each moved by its
  place. The product reads x as rows of channels, where it lies so already (an embedding) without a copy.

The rewriting happens before differentiation, so that gradients follow from the ops' own rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from py_engine.ad import ops
from py_engine.ad.graph import scope_of, topological_sort
from py_engine.ad.tensor import Array, Tensor

Shape = tuple[int, ...]

WIDEST = 2.5
"""Wide kernels may have this many times the elements of the kernel itself."""


def fuse(outputs: Sequence[Tensor], nodes: list[Tensor]) -> list[Tensor]:
    """Rewrite what the outputs depend on, while it is being traced; `nodes` is the trace, and is put in order anew.

    Returns:
        The outputs, rewritten. Where there was nothing to fuse, nothing is changed.
    """
    order = topological_sort(outputs)
    uses = Counter(id(x) for node in order for x in node.inputs)
    uses.update(id(x) for x in outputs)
    replaced: dict[int, Tensor] = {}
    for node in order:
        node.inputs = tuple(replaced.get(id(x), x) for x in node.inputs)
        chain = _chain(node, uses) if node.op is ops.MAX_POOL else None
        if chain is not None:
            with scope_of(node):
                replaced[id(node)] = _rewritten(chain)
    if not replaced:
        return list(outputs)
    found = [replaced.get(id(x), x) for x in outputs]
    nodes[:] = [x for x in topological_sort(found) if x.op is not None and x.data is None]
    return found


@dataclass(frozen=True)
class Chain:
    """A convolution, perhaps a bias for each filter, perhaps a relu, and the pool."""

    conv: Tensor
    bias: Tensor | None
    relu: bool
    pool: Tensor


def _chain(pool: Tensor, uses: Counter[int]) -> Chain | None:
    (x,) = pool.inputs
    relu = x.op is ops.relu and uses[id(x)] == 1
    if relu:
        (x,) = x.inputs
    bias = None
    if x.op is ops.add and uses[id(x)] == 1:
        y, other = x.inputs
        if other.shape == (y.shape[1], *(1,) * (y.ndim - 2)) and x.shape == y.shape:
            x, bias = y, other
    at, pooled = x.attrs, pool.attrs
    if (
        x.op is not ops.CONV
        or uses[id(x)] != 1
        or not x.size
        or at["groups"] != 1
        or {*at["stride"], *at["dilation"]} != {1}
        or any(n for pair in pooled["padding"] for n in pair)
        or _phases(x, pooled["window"], pooled["stride"], dry=True) is None
    ):
        return None
    return Chain(x, bias, relu, pool)


def _rewritten(chain: Chain) -> Tensor:
    at = chain.pool.attrs
    phases = _phases(chain.conv, at["window"], at["stride"])
    assert phases is not None
    y = ops.PHASE_MAX(phases)
    samples, filters, *counts = chain.pool.shape
    if chain.bias is not None:
        y = y + ops.reshape(chain.bias, (filters, *(1,) * (y.ndim - 1)))
    if chain.relu:
        y = ops.relu(y)
    y = ops.reshape(y, (filters, samples, *counts))
    result: Tensor = ops.swapaxes(y, 0, 1)
    return result


def _phases(conv: Tensor, window: Shape, stride: Shape, dry: bool = False) -> Tensor | None:
    """Return the phases (window, filters, ...) of a convolution, or None where neither way pays."""
    x, weight = conv.inputs
    filters, channels, *kernel = weight.shape
    field = tuple(k + w - 1 for k, w in zip(kernel, window, strict=True))
    if math.prod(field) <= WIDEST * math.prod(kernel):
        if dry:
            return conv
        places = ops.reshape(weight, (filters * channels, math.prod(kernel)))
        wide = ops.MATMUL(places, Tensor(_embedding(tuple(kernel), window, weight.dtype.str)))
        rows = ops.reshape(wide, (math.prod(window) * filters, channels * math.prod(field)))
        columns = ops.COLUMNS(x, kernel=field, stride=stride, padding=conv.attrs["padding"])
        product = ops.MATMUL(rows, columns)
        return ops.reshape(product, (math.prod(window), filters, product.shape[1]))
    if len(window) == 1 and stride[0] >= window[0] and conv.attrs["padding"] == ((0, 0),):
        if dry:
            return conv
        samples, _, length = x.shape
        rows = ops.reshape(ops.transpose(x, (0, 2, 1)), (samples * length, channels))
        by_place = ops.reshape(ops.transpose(weight, (2, 0, 1)), (kernel[0] * filters, channels))
        shares = ops.MATMUL(by_place, ops.transpose(rows))
        return ops.SHIFTED(shares, kernel=kernel[0], dilation=1, samples=samples, window=window[0], stride=stride[0])
    return None


@lru_cache(maxsize=64)
def _embedding(kernel: Shape, window: Shape, dtype: str) -> Array:
    """Return ones and zeros (window, kernel, field) that put a kernel at each place of a pooling window."""
    field = tuple(k + w - 1 for k, w in zip(kernel, window, strict=True))
    found = np.zeros((*window, *kernel, *field), dtype)
    for place in np.ndindex(*window):
        for at in np.ndindex(*kernel):
            found[(*place, *at, *(p + k for p, k in zip(place, at, strict=True)))] = 1
    return found.reshape(math.prod(window), math.prod(kernel), math.prod(field))
