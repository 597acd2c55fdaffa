"""The technique `fuse`: a convolution whose result is pooled becomes a chain of few calls over long pieces of memory.

    max_pool(relu(conv(x, weight) + bias))  =  relu(max(phases of conv(x, weight) + bias))

Both sides are equal to the last bit of the maximum, and its place is the same where the gradient is not zero: relu
keeps the order of numbers. Adding a number does, too, but its rounding makes equals of numbers that are nearly so, and
the first of equals has the gradient: the bias is added before. On the right, relu works on what the pool leaves over,
and the phases (for each place in a pooling window, the results at that place) come out of the matrix product itself,
with one of two lowerings:

- *wide kernels*: the columns hold the whole field that one pooling window sees, and the matrix holds the kernel once
  for each place of the window, with zeros around it. Fewer columns, more products; best for small windows.
- *sliding kernels*: x is read as rows of channels, where it lies so already (an embedding) without a copy; what the
  kernel sees at one place is then one piece of memory, and every kernel-th of these pieces a row of a matrix. It is for
  kernels that move along one axis; any other axis they cover whole, like channels. Where x is an embedding, its rows
  are read from the matrix, and the gradients are sums for each different word (`py_engine.ad.ops.fused_text`).

What is least work is chosen, by an estimate of products and of elements moved; op after op where that is least.

Sums of products, element by element, become one op that keeps no products.

The gradients of the chain are rewritten with it, where they are what differentiating it once makes: the pass finds them
by what reads the chain's values. A chain whose values are needed elsewhere too, by a second derivative for example, is
left alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad import ops
from py_engine.ad.op import Equation
from py_engine.ad.ops.blocks import work
from py_engine.ad.ops.convolution import CONV, CONV_INPUT_GRADIENT, CONV_WEIGHT_GRADIENT, conv_work
from py_engine.ad.ops.elementary import WHERE
from py_engine.ad.ops.fused_text import WORD_GRADIENT, WORD_KERNEL_GRADIENT, WORD_PHASES, WORD_SUMS, WORDS
from py_engine.ad.ops.indexing import EMBEDDING, EMBEDDING_GRADIENT
from py_engine.ad.ops.linalg import MATMUL
from py_engine.ad.ops.pooling import (
    BIASED,
    COLUMNS,
    COLUMNS_GRADIENT,
    MAX_POOL,
    MAX_POOL_GRADIENT,
    PHASE_MAX,
    PHASE_MAX_GRADIENT,
    SHIFTED_GRADIENT,
    SLIDING,
)
from py_engine.ad.ops.reduction import SUM, SUM_OF_PRODUCTS, sums_products
from py_engine.ad.ops.shape import RESHAPE, TRANSPOSE
from py_engine.ad.program import Program, equations_of, nested_trace, prune
from py_engine.ad.reverse import unbroadcast
from py_engine.ad.state import entering
from py_engine.ad.tensor import Array, Literal, Tensor

Shape = tuple[int, ...]


def fuse(program: Program) -> Program:
    """Return the program with fused ops in place of what they compute."""
    return _fuse_sums(_fuse_pools(program))


def _fuse_pools(program: Program) -> Program:
    """Return the program with each convolution and the pool behind it as a chain of few calls, with its gradients."""
    if all(equation.op is not MAX_POOL for equation in program.equations):
        return program
    uses = _Uses(program)
    forward, backward = {}, {}
    for equation in program.equations:
        chain = _chain(equation, uses) if equation.op is MAX_POOL else None
        if chain is not None:
            forward[id(equation)] = chain
            if chain.gradient is not None:
                backward[id(chain.gradient.start)] = chain
    if not forward:
        return program
    replaced: dict[int, Tensor] = {}
    equations: list[Equation] = []
    fused: dict[int, _Fused] = {}
    for equation in program.equations:
        inputs = tuple([replaced.get(id(x), x) for x in equation.inputs])
        if id(equation) in forward:
            chain = forward[id(equation)]
            with nested_trace() as nodes, entering(scope=equation.scope):
                fused[id(chain)] = made = _Fused(chain, replaced)
            replaced[id(equation.output)] = made.result
        elif id(equation) in backward:
            chain = backward[id(equation)]
            with nested_trace() as nodes, entering(scope=equation.scope):
                replaced.update(fused[id(chain)].gradients(inputs[0]))
        else:
            equations.append(equation.reading(inputs))
            continue
        equations += equations_of(nodes)
    outputs = tuple([replaced.get(id(x), x) for x in program.outputs])
    return prune(Program(program.inputs, tuple(equations), outputs, program.watched))


def _fuse_sums(program: Program) -> Program:
    """Return the program with sums of products that keep no products, where nothing else reads these."""
    sums = [x for x in program.equations if x.op is SUM and sums_products(x.inputs[0], x.attrs["axes"])]
    if not sums:
        return program
    summed = {id(total.inputs[0]): total for total in sums}
    reads = Counter(id(x) for equation in program.equations for x in equation.inputs if id(x) in summed)
    reads.update(id(x) for x in program.outputs)
    fused: dict[int, tuple[Tensor, ...]] = {}
    for made in program.equations:
        total = summed.get(id(made.outputs[0]))
        if total is not None and reads[id(made.outputs[0])] == 1 and (factors := _factors(made)):
            fused[id(total)] = factors
    if not fused:
        return program
    equations = [
        Equation(SUM_OF_PRODUCTS, fused[id(x)], x.attrs, x.outputs, x.scope) if id(x) in fused else x
        for x in program.equations
    ]
    return prune(Program(program.inputs, tuple(equations), program.outputs, program.watched))


def _factors(made: Equation) -> tuple[Tensor, ...]:
    """Return the two factors of a product or a square, or nothing: where it is none, or one of them is broadcast."""
    x = made.outputs[0]
    factors = made.inputs * 2 if made.op is ops.square else made.inputs if made.op is ops.mul else ()
    return factors if all((a.shape, a.dtype) == (x.shape, x.dtype) for a in factors) else ()


# What is rewritten ----------------------------------------------------------------------------------------


class _Uses:
    """Which equation makes each value of a program, and which read it."""

    def __init__(self, program: Program) -> None:
        self.made = {id(y): equation for equation in program.equations for y in equation.outputs}
        self._readers: dict[int, list[Equation]] = {}
        for equation in program.equations:
            for number in {id(x) for x in equation.inputs}:
                self._readers.setdefault(number, []).append(equation)
        self._results = {id(x) for x in program.outputs}

    def by(self, x: Tensor) -> Equation | None:
        """Return the equation that makes `x`, None for inputs and constants."""
        return self.made.get(id(x))

    def of(self, x: Tensor) -> list[Equation] | None:
        """Return the equations that read `x`; None where it is a result of the program."""
        return None if id(x) in self._results else self._readers.get(id(x), [])


@dataclass(frozen=True, eq=False)
class PooledGradient:
    """What differentiating a chain once makes.

    Attributes:
        start: the gradient of the pool.
        by_weight, by_bias, by_x: the gradients of the convolution's inputs and of the bias, as many as there are.
        by_words: those of an embedding that is the convolution's input, where all of `by_x` ends there.
    """

    start: Equation
    by_weight: list[Tensor] = field(default_factory=list)
    by_bias: list[Tensor] = field(default_factory=list)
    by_x: list[Tensor] = field(default_factory=list)
    by_words: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class PooledConvolution:
    """A convolution, perhaps a bias for each filter, perhaps a relu, the pool, and perhaps its gradient.

    `embedding` is the embedding of texts (N, length) whose word vectors are the channels of the convolution's input.
    """

    conv: Equation
    bias: Tensor | None
    relu: bool
    pool: Equation
    embedding: Equation | None
    gradient: PooledGradient | None


def _chain(pool: Equation, uses: _Uses) -> PooledConvolution | None:
    """Return the chain that ends in this pool, if there is one that less work can be made of."""
    (before,) = pool.inputs
    x, inner = before, []  # the values that are no longer computed
    relu = (made := uses.by(x)) is not None and made.op is ops.relu
    if relu:
        inner.append(x)
        (x,) = made.inputs  # type: ignore[union-attr]  # there is one
    bias = None
    if (made := uses.by(x)) is not None and made.op is ops.add:
        for y, other in (made.inputs, made.inputs[::-1]):
            conv = uses.by(y)
            if conv is not None and conv.op is CONV and x.shape == y.shape:
                if other.shape == (y.shape[1], *(1,) * (y.ndim - 2)):
                    inner.append(x)
                    x, bias = y, other
                break
    conv = uses.by(x)
    if conv is None or conv.op is not CONV or not x.size:
        return None
    inner.append(x)
    at, steps = conv.attrs, {*conv.attrs["stride"], *conv.attrs["dilation"], *pool.attrs["dilation"]}
    if at["groups"] != 1 or steps != {1} or any(n for p in pool.attrs["padding"] for n in p):
        return None
    if any(uses.of(value) is None or len(uses.of(value) or ()) != 1 for value in inner[1:]):
        return None
    embedding = _embedding_of(conv, uses)
    found = _gradient(before, relu, bias, conv, embedding, uses)
    if found is None:
        return None
    chain = PooledConvolution(conv, bias, relu, pool, embedding, found[0])
    return chain if _lowering(chain) is not None else None


def _gradient(
    before: Tensor,
    relu: bool,
    bias: Tensor | None,
    conv: Equation,
    embedding: Equation | None,
    uses: _Uses,
) -> tuple[PooledGradient | None] | None:
    """Return a chain's gradient in a tuple, `(None,)` where it has none; None if others need the chain's values."""
    readers = uses.of(before)
    if readers is None:
        return None
    starts = [x for x in readers if x.op is MAX_POOL_GRADIENT and x.inputs[1] is before and x.inputs[0] is not before]
    masks = [x for x in readers if relu and x.op is ops.greater and x.inputs[0] is before and _is_zero(x.inputs[1])]
    if len(readers) != 1 + len(starts) + len(masks) or len(starts) > 1:
        return None
    if not starts:
        return None if masks else (None,)
    found, g = PooledGradient(starts[0]), starts[0].output
    if relu:
        selected = uses.of(g)
        if selected is None or len(selected) != 1 or len(masks) != 1 or uses.of(masks[0].output) != selected:
            return None
        (where,) = selected
        mask, chosen, other = where.inputs if where.op is WHERE else (None, None, None)
        if mask is not masks[0].output or chosen is not g or other is None or not _is_zero(other):
            return None
        g = where.output
    for x in uses.of(g) or (None,):
        if x is None:
            return None
        if x.op is CONV_WEIGHT_GRADIENT and _is_of(x, g, conv.inputs[0], conv):
            found.by_weight.append(x.output)
        elif x.op is CONV_INPUT_GRADIENT and _is_of(x, g, conv.inputs[1], conv):
            found.by_x.append(x.output)
        elif x.op is SUM and bias is not None and x.output.size == g.shape[1] and 1 not in x.attrs["axes"]:
            found.by_bias.append(x.output)
        else:
            return None
    if embedding is not None and found.by_x:
        looked_up = [_embedding_gradient(x, embedding, uses) for x in found.by_x]
        if all(x is not None for x in looked_up):
            found.by_words.extend(x.output for x in looked_up if x is not None)
    return (found,)


def _is_zero(x: Tensor) -> bool:
    return isinstance(x, Literal) and x.item() == 0


def _is_of(gradient: Equation, g: Tensor, other: Tensor, conv: Equation) -> bool:
    """Whether this is a gradient of this convolution."""
    same = all(gradient.attrs[name] == value for name, value in conv.attrs.items())
    return gradient.inputs[0] is g and gradient.inputs[1] is other and same


def _embedding_of(conv: Equation, uses: _Uses) -> Equation | None:
    """Return the embedding of texts (N, length) whose word vectors are the channels of a convolution's input."""
    x, weight = conv.inputs
    axis = _sliding_axis(conv)
    seen = uses.by(x)
    if axis is None or seen is None or weight.ndim not in (3, 4):
        return None
    length, channels = x.shape[2 + axis], x.size // max(len(x) * x.shape[2 + axis], 1)
    turned = seen.op is TRANSPOSE and seen.attrs["axes"] == (0, 2, 1)
    # Along the other axis of a table of as many words as a vector has elements the kernel would slide over these.
    if not turned and not (axis == 0 and seen.op is RESHAPE and x.shape == (len(x), 1, length, channels)):
        return None
    words = uses.by(seen.inputs[0])
    if words is None or words.op is not EMBEDDING or words.output.shape != (len(x), length, channels):
        return None
    return words


def _embedding_gradient(x: Tensor, embedding: Equation, uses: _Uses) -> Equation | None:
    """Return the gradient of the embedding that the gradient by the convolution's input is all put into."""
    seen = uses.of(x)
    if seen is None or len(seen) != 1 or seen[0].op not in (RESHAPE, TRANSPOSE):
        return None
    if seen[0].output.shape != embedding.output.shape or seen[0].attrs.get("axes", (0, 2, 1)) != (0, 2, 1):
        return None
    last = uses.of(seen[0].output)
    if last is None or len(last) != 1 or last[0].op is not EMBEDDING_GRADIENT:
        return None
    same = last[0].attrs["padding_index"] == embedding.attrs["padding_index"]
    return last[0] if same and last[0].inputs[1] is embedding.inputs[1] else None


# What it becomes ------------------------------------------------------------------------------------------


Pooled: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What `PHASE_MAX_GRADIENT` takes: the gradient by a maximum over phases, the phases, and the maximum."""

Pull: TypeAlias = Callable[[Pooled, PooledGradient], Mapping[str, Tensor]]
"""Returns from a pool's gradient those that there are: `by_weight`, `by_x`, `by_words`."""

Lowering: TypeAlias = Callable[[PooledConvolution, Tensor, Tensor, "Tensor | None"], tuple[Tensor, Pull]]
"""Makes the phases (window, filters, ...) from x, the weight and an embedding's matrix; and their pullback."""


class _Fused:
    """A chain rewritten: its result, and on demand its gradients. Ops made here are traced."""

    def __init__(self, chain: PooledConvolution, replaced: Mapping[int, Tensor]) -> None:
        lowering = _lowering(chain)
        assert lowering is not None
        self.chain = chain
        x, weight = (replaced.get(id(a), a) for a in chain.conv.inputs)
        words = chain.embedding.inputs[0] if chain.embedding is not None else None
        phases, self._pull = lowering(chain, x, weight, words if words is None else replaced.get(id(words), words))
        samples, filters, *counts = chain.pool.output.shape
        if chain.bias is not None:
            bias = replaced.get(id(chain.bias), chain.bias)
            phases = BIASED(phases, ops.reshape(bias, (filters,)))
        self._phases, self._top = phases, PHASE_MAX(phases)
        self._y = ops.relu(self._top) if chain.relu else self._top
        self.result: Tensor = ops.swapaxes(ops.reshape(self._y, (filters, samples, *counts)), 0, 1)

    def gradients(self, g: Tensor) -> dict[int, Tensor]:
        """Return from the gradient by the result what takes the place of the chain's gradients."""
        gradient = self.chain.gradient
        assert gradient is not None
        g = ops.reshape(ops.swapaxes(g, 0, 1), self._y.shape)
        if self.chain.relu:
            g = WHERE(ops.greater(self._y, 0), g, 0)
        found = {}
        if gradient.by_bias:
            found["by_bias"] = ops.sum(g, tuple(range(1, g.ndim)))
        found.update(self._pull((g, self._phases, self._top), gradient))
        return {id(x): ops.reshape(value, x.shape) for name, value in found.items() for x in getattr(gradient, name)}


def _lowering(chain: PooledConvolution) -> Lowering | None:
    """Return the lowering of a chain to its phases that is least work; None for op after op."""
    return min(_lowerings(chain), key=lambda found: found[0])[1]


def _lowerings(chain: PooledConvolution) -> list[tuple[int, Lowering | None]]:
    """Return all lowerings of a chain to its phases, each with its work in the forward pass of one sample."""
    conv, pool = chain.conv, chain.pool
    x, weight = conv.inputs
    filters, channels, *kernel = weight.shape
    window = pool.attrs["window"]
    results, windows = math.prod(conv.output.shape[2:]), math.prod(pool.output.shape[2:])
    phases = filters * windows * math.prod(window)
    passes = (chain.bias is not None) + chain.relu
    plain = conv_work(x, weight, conv.output.shape[2:], **conv.attrs) // max(x.shape[0], 1)
    plain += work(0, passes * filters * results + 2 * phases)
    field = channels * math.prod(k + w - 1 for k, w in zip(kernel, window, strict=True))
    found: list[tuple[int, Lowering | None]] = [(plain, None)]
    if math.prod(w * k * (k + w - 1) for k, w in zip(kernel, window, strict=True)) <= MOST_EMBEDDED:
        found.append((work(phases * field, windows * field + phases), _wide_kernels))
    axis = _sliding_axis(conv)
    if axis is not None and pool.attrs["stride"][axis] >= window[axis]:
        shares = filters * kernel[axis] * x.shape[2 + axis]
        depth = channels * math.prod(kernel) // kernel[axis]
        found.append((work(shares * depth, shares + 2 * phases), _sliding_kernels))
    return found


def _sliding_axis(conv: Equation) -> int | None:
    """Return the only spatial axis along which the kernel moves; None where there is another, or padding."""
    sliding = [axis for axis, n in enumerate(conv.output.shape[2:]) if n > 1] or [0]
    padded = any(n for pair in conv.attrs["padding"] for n in pair)
    return None if padded or len(sliding) > 1 else sliding[0]


def _wide_kernels(chain: PooledConvolution, x: Tensor, weight: Tensor, words: Tensor | None) -> tuple[Tensor, Pull]:
    filters, channels, *kernel = weight.shape
    window = chain.pool.attrs["window"]
    field = tuple(k + w - 1 for k, w in zip(kernel, window, strict=True))
    at = {"kernel": field, "stride": chain.pool.attrs["stride"], "padding": chain.conv.attrs["padding"]}
    places = ops.reshape(weight, (filters * channels, math.prod(kernel)))
    into_field = Tensor(_embedding(tuple(kernel), window, weight.dtype.str))
    wide = MATMUL(places, into_field)
    rows = ops.reshape(wide, (math.prod(window) * filters, channels * math.prod(field)))
    columns = COLUMNS(x, **at)
    product = MATMUL(rows, columns)

    def pull(pooled: Pooled, gradient: PooledGradient) -> dict[str, Tensor]:
        g = ops.reshape(PHASE_MAX_GRADIENT(*pooled), product.shape)
        found = {}
        if gradient.by_weight:
            by_wide = ops.reshape(_by(0, g, product), wide.shape)
            found["by_weight"] = ops.reshape(_by(0, by_wide, wide), weight.shape)
        if gradient.by_x:
            found["by_x"] = COLUMNS_GRADIENT(_by(1, g, product), shape=x.shape, **at)
        return found

    return ops.reshape(product, (math.prod(window), filters, product.shape[1])), pull


def _by(i: int, g: Tensor, product: Tensor) -> Tensor:
    """Return the gradient of a matrix product by one of its operands."""
    found = MATMUL.pull([g], [i == 0, i == 1], product)[i]
    assert found is not None
    return unbroadcast(found, product.inputs[i])


def _sliding_kernels(chain: PooledConvolution, x: Tensor, weight: Tensor, words: Tensor | None) -> tuple[Tensor, Pull]:
    conv, pool = chain.conv, chain.pool
    axis = _sliding_axis(conv)
    assert axis is not None
    # Other axes follow the channels: an axis that the kernel covers whole is as good as channels.
    spatial = 2 + axis
    others = [1, *(k for k in range(2, x.ndim) if k != spatial)]
    length, samples, kernel, filters = x.shape[spatial], len(x), weight.shape[spatial], len(weight)
    channels = math.prod(x.shape[k] for k in others)
    by_place, kernel_back = _rearranged(weight, (spatial, 0, *others), (kernel * filters, channels))
    at = {"window": pool.attrs["window"][axis], "stride": pool.attrs["stride"][axis]}
    gradient = chain.gradient
    in_words = gradient is None or len(gradient.by_words) == len(gradient.by_x)
    if words is not None and in_words and at["window"] <= LONGEST_WINDOW:
        assert chain.embedding is not None
        return _sliding_words(chain.embedding, words, by_place, kernel_back, kernel, at)
    rows, rows_back = _rearranged(x, (0, spatial, *others), (samples * length, channels))
    settings = {"kernel": kernel, "samples": samples, **at}

    def pull(pooled: Pooled, gradient: PooledGradient) -> dict[str, Tensor]:
        g = SHIFTED_GRADIENT(PHASE_MAX_GRADIENT(*pooled), places=length, **settings)
        found = {}
        if gradient.by_x:
            found["by_x"] = rows_back(MATMUL(ops.transpose(g), by_place))
        if gradient.by_weight:
            found["by_weight"] = kernel_back(MATMUL(g, rows))
        return found

    return SLIDING(rows, by_place, **settings), pull


def _rearranged(x: Tensor, axes: Sequence[int], shape: Shape) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return `x` with its axes permuted and reshaped, and what turns a gradient by that into one by `x`."""
    turned = ops.transpose(x, axes)

    def back(g: Tensor) -> Tensor:
        return ops.transpose(ops.reshape(g, turned.shape), sorted(range(len(axes)), key=axes.__getitem__))

    return ops.reshape(turned, shape), back


LONGEST_WINDOW = 127
"""Places of a window that a byte numbers twice over, as `WORD_SUMS` does."""


def _sliding_words(
    embedding: Equation,
    words: Tensor,
    by_place: Tensor,
    kernel_back: Callable[[Tensor], Tensor],
    places: int,
    at: Mapping[str, int],
) -> tuple[Tensor, Pull]:
    """The same over word vectors, which are read from their matrix; gradients are sums for each different word."""
    ids, padding_index = embedding.inputs[1], embedding.attrs["padding_index"]
    length, vocabulary = ids.shape[1], len(words)

    def pull(pooled: Pooled, gradient: PooledGradient) -> dict[str, Tensor]:
        found: dict[str, Any] = {}
        different = WORDS(ids, vocabulary=vocabulary)
        sums = WORD_SUMS(*pooled, different, kernel=places, length=length, stride=at["stride"])
        if gradient.by_words:
            found["by_words"] = WORD_GRADIENT(
                sums, by_place, different, vocabulary=vocabulary, padding_index=padding_index
            )
        if gradient.by_weight:
            found["by_weight"] = kernel_back(WORD_KERNEL_GRADIENT(sums, words, different))
        return found

    return WORD_PHASES(words, by_place, ids, places=places, padding_index=padding_index, **at), pull


MOST_EMBEDDED = 1 << 20
"""Elements of a constant that `_embedding` makes."""


@lru_cache(maxsize=64)
def _embedding(kernel: Shape, window: Shape, dtype: str) -> Array:
    """Return ones and zeros (window, kernel, field) that put a kernel at each place of a pooling window."""
    field = tuple(k + w - 1 for k, w in zip(kernel, window, strict=True))
    found = np.zeros((*window, *kernel, *field), dtype)
    for place in np.ndindex(*window):
        for at in np.ndindex(*kernel):
            found[(*place, *at, *(p + k for p, k in zip(place, at, strict=True)))] = 1
    return found.reshape(math.prod(window), math.prod(kernel), math.prod(field))
