"""Forward mode: tangents pushed through a recorded graph by the ops' jvp rules, one at a time or many at once.

Many tangents lie in one array along a new leading axis, (count, *shape), and go through the graph in one pass.
An elementwise op's own rule takes them as they are, by broadcasting; the ops in `BATCHED` have a rule here; every
other op pushes one tangent after the other and stacks the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad import ops
from py_engine.ad.graph import described, scope_of, topological_sort, written_to
from py_engine.ad.ops import convolution, elementary, indexing, linalg, loss, pooling, reduction, shape
from py_engine.ad.ops.record import Op, Shape
from py_engine.ad.tensor import Tensor
from py_engine.ad.written import written
from py_engine.errors import DTypeError, NotDifferentiableError, ShapeError

__all__ = ["push_forward"]

Tangents: TypeAlias = Sequence[Tensor | None]
Batched: TypeAlias = Callable[..., Tensor]

# The sweep ------------------------------------------------------------------------------------------------


def push_forward(
    outputs: Sequence[Tensor], moves: Mapping[Tensor, Tensor], count: int | None = None, level: int = 1
) -> list[Tensor | None]:
    """Return how the outputs move when some tensors that they were computed from move: Jacobian-vector products.

    Args:
        outputs: recorded tensors, of any shape.
        moves: the tensors that move, each with its tangent of the same shape and dtype.
        count: how many tangents each array holds along a new leading axis; None: one, without that axis.
        level: those that move have at least this one, see `graph.gradients`.

    Returns:
        For each output its tangent, of its shape (behind the leading axis) and dtype; None where it stays.

    Raises:
        NotDifferentiableError: an op has no jvp rule.
        InPlaceError: an array that a rule reads was written to since.
        ShapeError, DTypeError: a rule returned something that cannot be the tangent of its result.
    """
    order = topological_sort(outputs, level=level)
    uses = _uses(order, outputs)
    unchanged: set[int] = set()
    tangents: dict[int, Tensor] = {id(x): t for x, t in moves.items()}
    for node in order:
        if node.op is None:
            continue
        moved = [tangents.get(id(x)) for x in node.inputs]
        if node not in moves and any(t is not None for t in moved):
            if node.marks is not None and (changed := written(node.marks, unchanged)):
                raise written_to(node, changed[0])
            with scope_of(node):
                tangent = _push(node, moved, count)
            if tangent is not None:
                tangents[id(node)] = tangent
        for x in node.inputs:
            uses[id(x)] -= 1
            if not uses[id(x)]:
                tangents.pop(id(x), None)  # many tangents are much memory: only as long as they are needed
    return [tangents.get(id(output)) for output in outputs]


def _uses(order: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[int, int]:
    uses: dict[int, int] = {id(output): 1 for output in outputs}
    for node in order:
        for x in node.inputs:
            uses[id(x)] = uses.get(id(x), 0) + 1
    return uses


def _push(node: Tensor, moved: Tangents, count: int | None) -> Tensor | None:
    op = node.op
    assert op is not None
    if op.jvp is None:
        raise NotDifferentiableError(
            f"a derivative is taken through {described(node)}, but the op has no jvp rule, which forward mode needs"
        )
    if count is None:
        tangent = op.jvp(moved, node, *node.inputs, **node.attrs)
        return None if tangent is None else _checked(tangent, node, node.shape)
    if op.elementwise:
        aligned = [None if t is None else _aligned(t, node.ndim) for t in moved]
        tangent = op.jvp(aligned, node, *node.inputs, **node.attrs)
    elif op in BATCHED:
        tangent = BATCHED[op](moved, count, node, *node.inputs, **node.attrs)
    else:
        return _one_by_one(node, moved, count)
    return None if tangent is None else _checked(tangent, node, (count, *node.shape))


def _checked(tangent: Tensor, node: Tensor, wanted: Shape) -> Tensor:
    """Return a rule's result in the whole shape: where only a broadcast input moves, the rule knows no more."""
    assert node.op is not None
    if tangent.dtype != node.dtype:
        raise DTypeError(f"{node.op.name}: a jvp rule returned {tangent.dtype} for a result of {node.dtype}")
    try:
        return ops.broadcast_to(tangent, wanted)
    except ShapeError:
        raise ShapeError(
            f"{node.op.name}: a jvp rule returned shape {tangent.shape}, expected {wanted}, that of the result"
        ) from None


def _one_by_one(node: Tensor, moved: Tangents, count: int) -> Tensor:
    """The way that every op can go: one tangent after the other."""
    each = [_push(node, [None if t is None else t[k] for t in moved], None) for k in range(count)]
    still = Tensor(np.zeros(node.shape, node.dtype))
    return ops.stack([still if t is None else t for t in each])


# Rules for many tangents ----------------------------------------------------------------------------------
#
# `rule(tangents, count, y, *inputs, **attrs)`, where each tangent is (count, *shape of its input) or None.


def _aligned(t: Tensor, ndim: int) -> Tensor:
    """Make room behind the leading axis, so that the rest broadcasts like an array among others of `ndim` axes."""
    return ops.reshape(t, (t.shape[0], *(1,) * (ndim + 1 - t.ndim), *t.shape[1:]))


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _behind(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis in axes)


EACH: tuple[int, int | None, int] = (0, None, 1)
"""The leading axis in an index: all of it."""


def _reshape(tangents: Tangents, count: int, y: Tensor, x: Tensor, shape: Shape) -> Tensor:
    return ops.reshape(_only(tangents), (count, *y.shape))


def _transpose(tangents: Tangents, count: int, y: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return ops.transpose(_only(tangents), (0, *_behind(axes)))


def _broadcast_to(tangents: Tangents, count: int, y: Tensor, x: Tensor, shape: Shape) -> Tensor:
    return _aligned(_only(tangents), y.ndim)


def _slice(tangents: Tangents, count: int, y: Tensor, x: Tensor, index: shape.Index) -> Tensor:
    return shape.SLICE(_only(tangents), index=(EACH, *index))


def _assemble(
    tangents: Tangents, count: int, y: Tensor, *parts: Tensor, shape: Shape, indices: tuple[shape.Index, ...]
) -> Tensor:
    moved = [(t, (EACH, *index)) for t, index in zip(tangents, indices, strict=True) if t is not None]
    return ops.assemble([t for t, _ in moved], [index for _, index in moved], (count, *shape))


def _unchanged(tangents: Tangents, count: int, y: Tensor, x: Tensor, **attrs: Any) -> Tensor:
    return ops.astype(_only(tangents), y.dtype)


def _only(tangents: Tangents) -> Tensor:
    t = tangents[0]
    assert t is not None
    return t


def _plain_sum(tangents: Tangents, count: int, y: Tensor, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return ops.sum(_only(tangents), _behind(axes), keepdims=keepdims)


def _weighted_sum(
    tangents: Tangents, count: int, y: Tensor, x: Tensor, axes: tuple[int, ...], keepdims: bool
) -> Tensor:
    # Every element of x counts for one element of y: the gradient by x with ones upstream has all derivatives.
    return ops.sum(_only(tangents) * _derivatives(y, x, axes=axes, keepdims=keepdims), _behind(axes), keepdims=keepdims)


def _derivatives(y: Tensor, x: Tensor, *others: Tensor, **attrs: Any) -> Tensor:
    assert y.op is not None
    rule = y.op.rule(0)
    assert rule is not None
    found = rule(Tensor(np.ones(y.shape, y.dtype)), y, x, *others, **attrs)
    assert found is not None
    return found


def _softmax(tangents: Tangents, count: int, y: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    t = _only(tangents)
    return y * (t - ops.sum(y * t, _behind(axes), keepdims=True))


def _log_softmax(tangents: Tangents, count: int, y: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    t = _only(tangents)
    return t - ops.sum(ops.exp(y) * t, _behind(axes), keepdims=True)


def _cross_entropy(tangents: Tangents, count: int, y: Tensor, logits: Tensor, lse: Tensor, labels: Tensor) -> Tensor:
    return ops.sum(_only(tangents) * _derivatives(y, logits, lse, labels), _behind(range(logits.ndim)))


def _matmul(tangents: Tangents, count: int, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    terms = []
    moved_a, moved_b = tangents
    if moved_a is not None:
        if b.ndim == 2:  # all the rows there are in one product
            rows = linalg.MATMUL(ops.reshape(moved_a, (count * math.prod(a.shape[:-1]), a.shape[-1])), b)
            terms.append(ops.reshape(rows, (count, *a.shape[:-1], b.shape[-1])))
        else:
            terms.append(linalg.MATMUL(_aligned(moved_a, y.ndim), b))
    if moved_b is not None:
        if a.ndim == 2 and b.ndim == 2 and b.shape[1] == 1:  # a matrix times many vectors is a matrix product
            columns = linalg.MATMUL(ops.reshape(moved_b, (count, b.shape[0])), ops.swapaxes(a, 0, 1))
            terms.append(ops.reshape(columns, (count, a.shape[0], 1)))
        else:
            terms.append(linalg.MATMUL(a, _aligned(moved_b, y.ndim)))
    return _sum(terms)


def _einsum(tangents: Tangents, count: int, y: Tensor, *inputs: Tensor, terms: tuple[str, ...], result: str) -> Tensor:
    used = set("".join(terms))
    each = next((letter for letter in linalg._LETTERS if letter not in used), "")
    if not each:
        return _one_by_one(y, tangents, count)
    return _sum(
        [
            linalg.EINSUM(
                *inputs[:i],
                t,
                *inputs[i + 1 :],
                terms=(*terms[:i], each + terms[i], *terms[i + 1 :]),
                result=each + result,
            )
            for i, t in enumerate(tangents)
            if t is not None
        ]
    )


def _gather(tangents: Tangents, count: int, y: Tensor, x: Tensor, *arrays: Tensor, pattern: Any) -> Tensor:
    found = indexing.GATHER(_only(tangents), *arrays, pattern=(EACH, *pattern))
    return ops.moveaxis(found, _place_of_each(arrays, pattern), 0)


def _scatter(
    tangents: Tangents, count: int, y: Tensor, g: Tensor, *arrays: Tensor, pattern: Any, shape: Shape
) -> Tensor:
    moved = ops.moveaxis(_only(tangents), 0, _place_of_each(arrays, pattern))
    return indexing.SCATTER(moved, *arrays, pattern=(EACH, *pattern), shape=(count, *shape))


def _place_of_each(arrays: Sequence[Tensor], pattern: Any) -> int:
    """Where numpy puts the leading axis: behind those of the index arrays if these don't stand side by side."""
    advanced = [k for k, item in enumerate(pattern) if item == indexing.ARRAY or isinstance(item, int)]
    together = advanced[-1] - advanced[0] + 1 == len(advanced)
    return 0 if together else len(np.broadcast_shapes(*(a.shape for a in arrays)))


def _per_sample(tangents: Tangents, count: int, y: Tensor, x: Tensor, *others: Tensor, **attrs: Any) -> Tensor:
    # Linear in x and sample by sample: the samples of all tangents are one large batch.
    assert y.op is not None
    terms = []
    t = tangents[0]
    if t is not None:
        batch = y.op(ops.reshape(t, (count * x.shape[0], *x.shape[1:])), *others, **attrs)
        terms.append(ops.reshape(batch, (count, *y.shape)))
    rest = [None, *tangents[1:]]
    if any(t is not None for t in rest):
        terms.append(_one_by_one(y, rest, count))
    return _sum(terms)


BATCHED: dict[Op, Batched] = {
    shape.RESHAPE: _reshape,
    shape.TRANSPOSE: _transpose,
    shape.BROADCAST_TO: _broadcast_to,
    shape.SLICE: _slice,
    shape.ASSEMBLE: _assemble,
    shape.COPY: _unchanged,
    elementary.identity: _unchanged,
    elementary.ASTYPE: _unchanged,
    reduction.SUM: _plain_sum,
    reduction.MAX: _weighted_sum,
    reduction.MIN: _weighted_sum,
    reduction.NORM: _weighted_sum,
    reduction.LOGSUMEXP: _weighted_sum,
    reduction.SOFTMAX: _softmax,
    reduction.LOG_SOFTMAX: _log_softmax,
    loss.SOFTMAX_CROSS_ENTROPY: _cross_entropy,
    linalg.MATMUL: _matmul,
    linalg.EINSUM: _einsum,
    indexing.GATHER: _gather,
    indexing.SCATTER: _scatter,
    convolution.CONV: _per_sample,
    convolution.CONV_INPUT_GRADIENT: _per_sample,
    pooling.AVG_POOL: _per_sample,
    pooling.AVG_POOL_GRADIENT: _per_sample,
}
"""The ops that push many tangents forward in one call, beside the elementwise ones."""
