"""Reassociation: in sums whose order is free, each term is added as soon as it can be.

The gradient of a value that is used many times is a sum. Backward, its terms come up one by one, and are added when
the last has: until then all are kept, with all that they were computed from. Their order is free, so that a term
can be added, and what it was computed from forgotten, as soon as it is there; and terms that are the same, once
equal expressions are merged, are added once and multiplied. In a long loop over large arrays that halves the memory,
and saves the time of fetching from there what no longer is in the cache.

Sums that a program writes are left in the order in which they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from py_engine.ad import ops
from py_engine.ad.op import Equation, Op
from py_engine.ad.program import Program
from py_engine.ad.tensor import Literal, Tensor


def add_early(program: Program) -> Program:
    """Return the program in an order in which sums are computed as soon as their terms can be."""
    equations = program.equations
    made = {id(y): x for x in equations for y in x.outputs}
    uses = Counter(id(x) for equation in equations for x in equation.inputs)
    uses.update(id(x) for x in program.outputs)
    sums = [x for x in equations if x.op.any_order]
    partial = {
        id(x) for total in sums for x in total.inputs if id(x) in made and made[id(x)].op.any_order and uses[id(x)] == 1
    }
    place = {id(y): i for i, x in enumerate(equations) for y in x.outputs}
    movable = {id(x.output) for x in equations if x.op.elementwise and not x.op.several} - {id(x.output) for x in sums}
    after: list[list[Equation]] = [[] for _ in equations]  # what is to follow each
    gone: set[int] = set()  # from its old place
    for total in sums:
        if id(total.output) in partial:
            continue
        terms, additions = _terms(total, made, partial)
        if len(terms) < 3:
            continue
        gone.update(additions)
        counts = Counter(id(x) for x in terms)
        ready: dict[int, int] = {}
        for x in terms:
            ready[id(x)] = place.get(id(x), 0)
            if id(x) in movable and uses[id(x)] == counts[id(x)]:  # nothing else needs it
                ready[id(x)] = min(ready[id(x)], max(place.get(id(a), 0) for a in made[id(x)].inputs))
        running: dict[int, Tensor] = {}  # for each count the sum of the terms with that count
        at = 0

        def add(op: Op, *inputs: Tensor) -> Tensor:
            after[at].append(Equation.of(op, inputs, {}, inputs[0].scope))  # noqa: B023  (called in this round)
            return after[at][-1].output  # noqa: B023

        for x in sorted({id(x): x for x in terms}.values(), key=lambda x: ready[id(x)]):
            at, n = ready[id(x)], counts[id(x)]
            if at < place.get(id(x), 0):
                gone.add(id(x))
                after[at].append(made[id(x)])
            running[n] = add(ops.add, running[n], x) if n in running else x
        parts = [x if n == 1 else add(ops.mul, x, _number(n, x)) for n, x in running.items()]
        found = parts[0]
        for x in parts[1:]:
            found = add(ops.add, found, x)
        last = after[at].pop()  # whose result is the sum, which others know by its own variable
        after[at].append(Equation(last.op, last.inputs, last.attrs, total.outputs, total.scope))
    order: list[Equation] = []
    for equation, more in zip(equations, after, strict=True):
        if id(equation.outputs[0]) not in gone:
            order.append(equation)
        order += more
    return replace(program, equations=tuple(order))


def _terms(total: Equation, made: Mapping[int, Equation], partial: set[int]) -> tuple[list[Tensor], list[int]]:
    """Return the terms of a sum, in order, and its additions."""
    terms, additions, stack = [], [], [total.output]
    while stack:
        x = stack.pop()
        if x is total.output or id(x) in partial:
            additions.append(id(x))
            stack.extend(reversed(made[id(x)].inputs))
        else:
            terms.append(x)
    return terms, additions


def _number(n: int, beside: Tensor) -> Tensor:
    return Literal(np.asarray(n, beside.dtype))
