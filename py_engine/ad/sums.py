"""Sums whose order is free: each term is added as soon as it can be.

The gradient of a value that is used many times is a sum. Backward, its terms come up one by one, and are added when
the last has: until then all are kept, with all that they were computed from. Nobody has asked for an order, so that a
term may as well be added, and what it was computed from forgotten, once it is there; and terms that are the same, once
equal expressions are merged, are added once and multiplied. In a long loop over large arrays that halves the memory,
and saves the time of fetching from there what no longer is in the cache.

Sums that a program writes are left in the order in which they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from py_engine.ad import ops
from py_engine.ad.ops.record import Op
from py_engine.ad.tensor import Literal, Tensor

__all__ = ["ADD_IN_ANY_ORDER", "add_early"]

ADD_IN_ANY_ORDER: Op = replace(ops.add, doc="a + b, as part of a sum whose order is free")


def add_early(nodes: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the ops of a graph in an order in which sums are computed as soon as their terms can be.

    Args:
        nodes: the ops in order; additions among them are changed.
        outputs: the graph's results, which stay the same tensors.
    """
    uses = Counter(id(x) for node in nodes for x in node.inputs)
    uses.update(id(x) for x in outputs)
    sums = [node for node in nodes if node.op is ADD_IN_ANY_ORDER]
    partial = {id(x) for node in sums for x in node.inputs if x.op is ADD_IN_ANY_ORDER and uses[id(x)] == 1}
    place = {id(node): i for i, node in enumerate(nodes)}
    movable = {id(x) for x in nodes if x.op is not None and x.op.elementwise} - {*map(id, sums)}
    after: list[list[Tensor]] = [[] for _ in nodes]  # what is to follow each op
    gone: set[int] = set()  # from its old place
    for total in sums:
        if id(total) in partial:
            continue
        terms, additions = _terms(total, partial)
        if len(terms) < 3:
            continue
        gone.update(additions)
        counts = Counter(id(x) for x in terms)
        ready: dict[int, int] = {}
        for x in terms:
            ready[id(x)] = place.get(id(x), 0)
            if id(x) in movable and uses[id(x)] == counts[id(x)]:  # nothing else needs it
                ready[id(x)] = min(ready[id(x)], max(place.get(id(a), 0) for a in x.inputs))
        running: dict[int, Tensor] = {}  # for each count the sum of the terms that occur so often
        at = 0
        for x in sorted({id(x): x for x in terms}.values(), key=lambda x: ready[id(x)]):
            at, n = ready[id(x)], counts[id(x)]
            if at < place.get(id(x), 0):
                gone.add(id(x))
                after[at].append(x)
            running[n] = _made(ops.add, (running[n], x), after[at]) if n in running else x
        parts = [x if n == 1 else _made(ops.mul, (x, _number(n, x)), after[at]) for n, x in running.items()]
        found = parts[0]
        for x in parts[1:]:
            found = _made(ops.add, (found, x), after[at])
        # Others know the sum by its own tensor: it takes the place of the last op.
        total.op, total.inputs = found.op, found.inputs
        after[at][-1] = total
    return [x for node, more in zip(nodes, after, strict=True) for x in (*([] if id(node) in gone else [node]), *more)]


def _terms(total: Tensor, partial: set[int]) -> tuple[list[Tensor], list[int]]:
    """Return the terms of a sum, in order, and its additions."""
    terms, additions, stack = [], [], [total]
    while stack:
        x = stack.pop()
        if x is total or id(x) in partial:
            additions.append(id(x))
            stack.extend(reversed(x.inputs))
        else:
            terms.append(x)
    return terms, additions


def _made(op: Op, inputs: tuple[Tensor, ...], order: list[Tensor]) -> Tensor:
    node = Tensor.symbol(inputs[0].shape, inputs[0].dtype)
    node.op, node.inputs, node.scope = op, inputs, inputs[0].scope
    order.append(node)
    return node


def _number(n: int, beside: Tensor) -> Tensor:
    return Literal(np.asarray(n, beside.dtype))
