"""The technique `fuse`: a convolution whose result is pooled becomes a chain of few calls over long pieces of memory.

    max_pool(relu(conv(x, weight) + bias))  =  relu(max(phases of conv(x, weight) + bias))

Both sides are equal to the last bit of the maximum, and its place is the same where the gradient is not zero: relu
keeps the order of numbers. Adding a number does, too, but its rounding makes equals of numbers that are nearly so, and
the first of equals has the gradient: the bias is added before. On the right, relu works on what the pool leaves over,
and the phases (for each place in a pooling window, the results that stand there) come out of the matrix product itself,
in either of two ways:

- *wide kernels*: the columns hold the whole field that one pooling window sees, and the matrix holds the kernel once
  for each place of the window, with zeros around it. Fewer columns, more products; best for small windows.
- *sliding kernels*: x is read as rows of channels, where it lies so already (an embedding) without a copy; what the
  kernel sees at one place is then one piece of memory, and every kernel-th of these pieces a row of a matrix. It is for
  kernels that move along one axis; any other axis they cover whole, like channels. Where x is an embedding, its rows
  are read from the matrix, and the gradients are sums for each different word (`py_engine.ad.ops.words`).

What is least work is chosen, by an estimate of products and of elements moved; op after op where that is least.

The rewriting happens before differentiation, so that gradients follow from the ops' own rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from py_engine.ad import ops
from py_engine.ad.graph import scope_of, topological_sort
from py_engine.ad.ops.convolution import work
from py_engine.ad.ops.shape import RESHAPE, TRANSPOSE
from py_engine.ad.program import traced
from py_engine.ad.tensor import Array, Tensor

Shape = tuple[int, ...]
Way: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Makes the phases (window, filters, ...) from a convolution and its pool."""


def fuse(outputs: Sequence[Tensor], nodes: list[Tensor]) -> list[Tensor]:
    """Rewrite what the outputs depend on, while it is being traced; `nodes` is the trace, and is put in order anew.

    Returns:
        The outputs, rewritten. Where there was nothing to fuse, nothing is changed.
    """
    own = {id(x) for x in topological_sort(outputs)}
    beside = [x for x in _with_checks(nodes, outputs) if id(x) not in own]
    order = topological_sort([*outputs, *beside])
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
    nodes[:] = [x for x in topological_sort([*found, *beside]) if x.op is not None and x.data is None]
    return found


def _with_checks(nodes: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the ops that the outputs need, and the checks of values that the others make."""
    found = []
    for equation in traced(nodes, (), outputs).equations:
        x = equation.output
        x.op, x.inputs, x.attrs = equation.op, equation.inputs, equation.attrs
        found.append(x)
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
        if y.op is ops.CONV and other.shape == (y.shape[1], *(1,) * (y.ndim - 2)) and x.shape == y.shape:
            x, bias = y, other
    at, pooled = x.attrs, pool.attrs
    if (
        x.op is not ops.CONV
        or uses[id(x)] != 1
        or not x.size
        or at["groups"] != 1
        or {*at["stride"], *at["dilation"]} != {1}
        or any(n for pair in pooled["padding"] for n in pair)
    ):
        return None
    chain = Chain(x, bias, relu, pool)
    return chain if _way(chain) is not None else None


def _rewritten(chain: Chain) -> Tensor:
    way = _way(chain)
    assert way is not None
    phases = way(chain.conv, chain.pool)
    samples, filters, *counts = chain.pool.shape
    if chain.bias is not None:
        phases = ops.BIASED(phases, ops.reshape(chain.bias, (filters,)))
    y = ops.PHASE_MAX(phases)
    if chain.relu:
        y = ops.relu(y)
    y = ops.reshape(y, (filters, samples, *counts))
    result: Tensor = ops.swapaxes(y, 0, 1)
    return result


def _way(chain: Chain) -> Way | None:
    """Return the way to the phases that is least work; None for op after op."""
    return min(_ways(chain), key=lambda way: way[0])[1]


def _ways(chain: Chain) -> list[tuple[int, Way | None]]:
    """Return all ways to the phases, each with its work in the forward pass of one sample."""
    conv, pool = chain.conv, chain.pool
    x, weight = conv.inputs
    filters, channels, *kernel = weight.shape
    window = pool.attrs["window"]
    results, windows = math.prod(conv.shape[2:]), math.prod(pool.shape[2:])
    columns = channels * math.prod(kernel) * results
    phases = filters * windows * math.prod(window)
    passes = (chain.bias is not None) + chain.relu
    plain = work(filters * columns, columns + passes * filters * results + 2 * phases)
    field = channels * math.prod(k + w - 1 for k, w in zip(kernel, window, strict=True))
    ways: list[tuple[int, Way | None]] = [
        (plain, None),
        (work(phases * field, windows * field + phases), _wide_kernels),
    ]
    axis = _moving_axis(conv)
    if axis is not None and pool.attrs["stride"][axis] >= window[axis]:
        shares = filters * kernel[axis] * x.shape[2 + axis]
        depth = channels * math.prod(kernel) // kernel[axis]
        ways.append((work(shares * depth, shares + 2 * phases), _sliding_kernels))
    return ways


def _moving_axis(conv: Tensor) -> int | None:
    """Return the only spatial axis along which the kernel moves; None where there is another, or padding."""
    moving = [axis for axis, n in enumerate(conv.shape[2:]) if n > 1] or [0]
    padded = any(n for pair in conv.attrs["padding"] for n in pair)
    return None if padded or len(moving) > 1 else moving[0]


def _wide_kernels(conv: Tensor, pool: Tensor) -> Tensor:
    x, weight = conv.inputs
    filters, channels, *kernel = weight.shape
    window, stride = pool.attrs["window"], pool.attrs["stride"]
    field = tuple(k + w - 1 for k, w in zip(kernel, window, strict=True))
    places = ops.reshape(weight, (filters * channels, math.prod(kernel)))
    wide = ops.MATMUL(places, Tensor(_embedding(tuple(kernel), window, weight.dtype.str)))
    rows = ops.reshape(wide, (math.prod(window) * filters, channels * math.prod(field)))
    columns = ops.COLUMNS(x, kernel=field, stride=stride, padding=conv.attrs["padding"])
    product = ops.MATMUL(rows, columns)
    return ops.reshape(product, (math.prod(window), filters, product.shape[1]))


def _sliding_kernels(conv: Tensor, pool: Tensor) -> Tensor:
    x, weight = conv.inputs
    axis = _moving_axis(conv)
    assert axis is not None
    # Other axes follow the channels: an axis that the kernel covers whole is as good as channels.
    spatial = 2 + axis
    others = [1, *(k for k in range(2, x.ndim) if k != spatial)]
    length, samples, kernel, filters = x.shape[spatial], len(x), weight.shape[spatial], len(weight)
    channels = math.prod(x.shape[k] for k in others)
    by_place = ops.reshape(ops.transpose(weight, (spatial, 0, *others)), (kernel * filters, channels))
    at = {"window": pool.attrs["window"][axis], "stride": pool.attrs["stride"][axis]}
    words = _embedded(x, length, channels)
    if words is not None:
        return ops.WORD_PHASES(*words.inputs[:1], by_place, words.inputs[1], places=kernel, **at, **words.attrs)
    rows = ops.reshape(ops.transpose(x, (0, spatial, *others)), (samples * length, channels))
    return ops.SLIDING(rows, by_place, kernel=kernel, samples=samples, **at)


def _embedded(x: Tensor, length: int, channels: int) -> Tensor | None:
    """Return the embedding of texts (N, length) whose word vectors are the channels of `x`, if that is what x is."""
    turned = x.op is TRANSPOSE and x.attrs["axes"] == (0, 2, 1)
    if not turned and not (x.op is RESHAPE and x.shape == (len(x), 1, length, channels)):
        return None
    (words,) = x.inputs
    return words if words.op is ops.EMBEDDING and words.shape == (len(x), length, channels) else None


@lru_cache(maxsize=64)
def _embedding(kernel: Shape, window: Shape, dtype: str) -> Array:
    """Return ones and zeros (window, kernel, field) that put a kernel at each place of a pooling window."""
    field = tuple(k + w - 1 for k, w in zip(kernel, window, strict=True))
    found = np.zeros((*window, *kernel, *field), dtype)
    for place in np.ndindex(*window):
        for at in np.ndindex(*kernel):
            found[(*place, *at, *(p + k for p, k in zip(place, at, strict=True)))] = 1
    return found.reshape(math.prod(window), math.prod(kernel), math.prod(field))
