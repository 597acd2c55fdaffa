"""Reverse mode: gradients by the ops' vjp rules, from the outputs back. Nothing here recurses over a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from py_engine.ad import ops
from py_engine.ad.memory import keep_freed_memory
from py_engine.ad.mutation import Versions, mutated, watch_versions
from py_engine.ad.op import described
from py_engine.ad.ops.elementary import ADD_IN_ANY_ORDER
from py_engine.ad.ops.shape import Index, assemble
from py_engine.ad.program import same
from py_engine.ad.state import STATE, entering, restoring
from py_engine.ad.tensor import FLOATS, Node, Result, Tensor, plain_array, real_array
from py_engine.errors import DTypeError, InPlaceError, NotDifferentiableError, ShapeError

# Sorting --------------------------------------------------------------------------------------------------


def topological_sort(outputs: Sequence[Tensor], stop: Iterable[Tensor] = (), level: int = 0) -> list[Tensor]:
    """Return every tensor that the outputs depend on, and themselves, each after its inputs.

    Tensors in `stop`, and those of a lower level, are left out, with all that is only behind them.
    """
    order: list[Tensor] = []
    seen: set[int] = {id(x) for x in stop}
    stack: list[tuple[Tensor, bool]] = [(output, False) for output in reversed(outputs)]
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            order.append(node)
        elif id(node) not in seen and node.level >= level:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((x, False) for x in reversed(node.inputs) if id(x) not in seen)
    return order


# Differentiation ------------------------------------------------------------------------------------------


def gradients(
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    targets: Sequence[Tensor],
    stop_at_targets: bool = False,
    level: int = 1,
    path: Path | None = None,
) -> list[Tensor | None]:
    """Return the vector-Jacobian product of the outputs with the seeds, for each target.

    Reverse mode, by the ops' own rules, which are ops again: eager tensors give values, symbolic ones extend the
    graph, and either can be differentiated once more.

    Args:
        outputs: what is differentiated.
        seeds: for each output its cotangent, of its shape and dtype.
        targets: the tensors to differentiate by; they require a gradient.
        stop_at_targets: whether the targets are taken as independent of each other, whatever they were computed from;
            if not, a target's gradient includes what reaches it through the others.
        level: the targets have at least this one. What depends on them has it, too, and nothing else is looked at: so
            the cost of a transform inside others does not grow with what these have computed before.
        path: from the targets to the outputs, where that is known already, see `path_between`.

    Returns:
        For each target a tensor of its shape and dtype, or None where no output depends on it.
    """
    wanted = {id(target) for target in targets if target.dtype in FLOATS}
    if path is None:
        path = path_between(outputs, wanted, stop_at_targets, level)
    order, depends = path.order, path.depends
    first = _first_equals(order, wanted) if STATE.symbolic else {}
    pending: Pending = {}
    for i, output in enumerate(outputs):
        if id(output) in depends:
            _add(pending, first.get(id(output), id(output)), seeds[i], None)
    result: dict[int, Tensor] = {}
    unchanged: set[object] = set()
    outer = scope = STATE.scope
    try:
        for node in reversed(order):
            cotangents: Sequence[Tensor | None]
            if node.__class__ is Node:
                STATE.scope = scope = node.scope
                cotangents = _cotangents(node, pending, wanted, result)
                if all(g is None for g in cotangents):
                    continue
            else:
                terms = pending.pop(id(node), None)
                if terms is None:
                    continue
                if node.scope is not scope:
                    STATE.scope = scope = node.scope
                g = accumulate(terms, node) if isinstance(terms, list) else terms
                if id(node) in wanted:
                    result[id(node)] = g
                cotangents = (g,)
            if node.versions is not None:
                check_versions(node, node.versions, unchanged)
            op, inputs = node.op, node.inputs
            index = None
            if op.slice_index is not None:
                # Not put into zeros here: the gradient of an array taken apart by slices is assembled once from all.
                found, index = cotangents, op.slice_index(**node.attrs)
            else:
                if op.opaque:
                    unchanged.clear()
                if len(inputs) == 1:
                    needs_grad = _ONE
                elif len(inputs) == 2:
                    needs_grad = id(inputs[0]) in depends, id(inputs[1]) in depends
                else:
                    needs_grad = tuple([id(x) in depends for x in inputs])
                found = op.pull(cotangents, needs_grad, node)
            for i, term in enumerate(found):
                if term is None:
                    continue
                x = inputs[i]
                if index is None and (term.shape != x.shape or term.dtype is not x.dtype):
                    term = unbroadcast(term, x)
                number = first.get(id(x), id(x)) if first else id(x)
                if number in pending or index is not None:
                    _add(pending, number, term, index)
                else:
                    pending[number] = term
        for target in targets:  # what is left are the leaves
            terms = pending.pop(id(target), None)
            if terms is not None:
                if target.scope is not scope:
                    STATE.scope = scope = target.scope
                result[id(target)] = accumulate(terms, target)
    finally:
        STATE.scope = outer
    return [result.get(id(target)) for target in targets]


_ONE: tuple[bool, ...] = (True,)  # of a node's only input: the node is there since that needs a gradient


@dataclass(slots=True)
class Path:
    """What lies between the targets of a derivative and its outputs.

    Attributes:
        order: the nodes, each after its inputs; leaves are not among them, and targets only if others are behind them.
        depends: the ids of the targets and of all that depends on them.
        below: the tensors of lower levels that the outputs depend on, too.
    """

    order: list[Any]
    depends: set[int]
    below: list[Tensor]


def path_between(outputs: Sequence[Tensor], wanted: set[int], stop_at_wanted: bool, level: int) -> Path:
    """Return the path from the tensors with the ids `wanted`, which have at least this level, to `outputs`."""
    order: list[Tensor | Node] = []
    several: set[int] = set()  # nodes with several results that are there already
    depends = set(wanted)
    seen = set(wanted) if stop_at_wanted else set()
    below: list[Tensor] = []
    stack: list[Any] = [*reversed(outputs)]  # nodes; and, in tuples of one, nodes whose inputs are above them
    while stack:
        top = stack.pop()
        if top.__class__ is tuple:  # its inputs are done
            (node,) = top
            for x in node.inputs:
                if id(x) in depends:
                    depends.add(id(node))
                    if node.__class__ is Result:
                        node = node.node
                        if id(node) in several:
                            break
                        several.add(id(node))
                    order.append(node)
                    break
        elif top.level < level:
            if top.level:
                below.append(top)
        elif top.op is not None and id(top) not in seen:
            seen.add(id(top))
            stack.append((top,))
            for x in top.inputs[::-1]:
                if x.level:
                    stack.append(x)
    return Path(order, depends, below)


def depend_on_a_leaf(tensors: Sequence[Tensor]) -> bool:
    """Return whether one of these tensors depends on a leaf that `backward()` stores a gradient in, or is one."""
    stack = list(tensors)
    seen: set[int] = set()
    while stack:
        x = stack.pop()
        if x.level == 1:
            return True
        if id(x) not in seen:  # of a transform that has ended, as what a pullback reads, or of one in another thread
            seen.add(id(x))
            stack.extend(y for y in x.inputs if y.level)
    return False


def _first_equals(order: Sequence[Any], wanted: set[int]) -> dict[int, int]:
    """Map each duplicate node to its first occurrence (CSE): ids to ids.

    Wanted nodes stay what they are, and so do opaque ones, which may run code of the user's own.

    What is computed twice is one value, and its gradient the sum of both: pulled back once, not twice. Only what is
    traced: the arrays that an op is given otherwise can be written to between two calls.
    """
    first: dict[int, int] = {}
    known: dict[Any, int] = {}
    for node in order:
        if node.__class__ is Node:
            continue
        assert node.op is not None
        if node.data is None and not (node.op.random or node.op.opaque or id(node) in wanted):
            found = known.setdefault(
                same(node.op, [first.get(id(x), id(x)) for x in node.inputs], node.attrs), id(node)
            )
            if found != id(node):
                first[id(node)] = found
    return first


Term = tuple[Tensor, Index | None]
"""A term of a cotangent: a tensor of the whole shape, or of the place given by a basic index."""

Pending = dict[int, Tensor | list[Term]]
"""By the ids of tensors the terms of their cotangents, or the only one, which is of the whole shape."""


def _cotangents(node: Node, pending: Pending, wanted: set[int], result: dict[int, Tensor]) -> list[Tensor | None]:
    """Return the cotangents of an op's several results, each the sum of its terms; None where there are none."""
    found: list[Tensor | None] = []
    for i in range(len(node.kinds)):
        x = node.known(i)
        terms = None if x is None else pending.pop(id(x), None)
        found.append(None if x is None or terms is None else accumulate(terms, x))
        if id(x) in wanted and (g := found[-1]) is not None:
            result[id(x)] = g
    return found


def check_versions(node: Tensor | Node, versions: Versions, unchanged: set[object]) -> None:
    """Raise `InPlaceError` if an array that the node's rules read was written to since; a trace watches them all.

    `unchanged` is that of `mutated`.
    """
    changed = mutated(versions, unchanged)
    if not changed:
        watch_versions(versions)
        return
    x = changed[0]
    i = next(i for i, a in enumerate(node.inputs) if a is x)
    raise InPlaceError(
        f"backward: the gradient of {described(node)} needs its input {i} "
        f"({x.name + ', ' if x.name else ''}shape {x.shape} {x.dtype}) as it was, but the array was written to "
        "in place since; write to a copy of it, or after the gradient was taken"
    )


def _add(pending: Pending, number: int, term: Tensor, index: Any) -> None:
    """Note one more term of a cotangent, of a part of it where there is an index."""
    terms = pending.get(number)
    if terms is None:
        pending[number] = term if index is None else [(term, index)]
    elif isinstance(terms, list):
        terms.append((term, index))
    else:
        pending[number] = [(terms, None), (term, index)]


def accumulate(terms: Tensor | Sequence[Term], node: Tensor) -> Tensor:
    """Return the sum of all terms of the cotangent of `node`."""
    if isinstance(terms, Tensor):
        return terms
    slices = [(g, index) for g, index in terms if index is not None]
    whole = [g for g, index in terms if index is None]
    if len(whole) > 2 and STATE.symbolic and (STATE.techniques is None or STATE.techniques.join):
        whole = joined(whole)
    if slices:
        whole.append(assemble([g for g, _ in slices], [index for _, index in slices], node.shape))
    total = whole[0]
    for g in whole[1:]:
        total = ADD_IN_ANY_ORDER(total, g)
    return total


def joined(terms: list[Tensor]) -> list[Tensor]:
    """Return traced terms of a gradient as those of the same sum that are less to compute, where ops know some."""
    kept: list[Tensor] = []
    by_op: dict[int, list[Tensor]] = {}
    for x in terms:
        knows = x.data is None and x.op is not None and x.op.join is not None
        (by_op.setdefault(id(x.op), []) if knows else kept).append(x)
    for results in by_op.values():
        op = results[0].op
        assert op is not None and op.join is not None
        kept += op.join(results)
    return kept


def unbroadcast(g: Tensor, x: Tensor) -> Tensor:
    """Sum a gradient over the axes along which `x` was broadcast, to the shape of `x`.

    Raises:
        ShapeError, DTypeError: a rule returned something that cannot be the gradient of `x`.
    """
    if g.dtype != x.dtype:
        raise DTypeError(f"a gradient rule returned {g.dtype} for an input of {x.dtype}")
    if g.shape == x.shape:
        return g
    new = g.ndim - x.ndim
    axes = tuple(range(new)) + tuple(
        i + new for i, n in enumerate(x.shape) if n == 1 and new >= 0 and g.shape[i + new] != 1
    )
    summed = ops.sum(g, axes) if new >= 0 else g
    if [n for n in summed.shape if n != 1] != [n for n in x.shape if n != 1]:
        raise ShapeError(f"a gradient rule returned shape {g.shape} for an input of shape {x.shape}")
    return ops.reshape(summed, x.shape)


def variable(x: Tensor, level: int) -> Tensor:
    """Return `x` as a new node that gradients are taken by; `x` keeps its own place in the graph."""
    found: Tensor = ops.identity(x)
    found.level = level  # here even what is a constant to all outside, as stop_gradient's result is
    return found


@restoring
def backward(output: Tensor, gradient: ArrayLike | None = None) -> None:
    """Add the derivative of `output` to `.grad` of every leaf that requires it."""
    if not output.requires_grad:
        raise NotDifferentiableError("backward: this tensor does not depend on any tensor with requires_grad=True")
    if gradient is None and output.size != 1:
        raise ShapeError(
            f"backward: a gradient of shape {output.shape} must be given, since the tensor is not a scalar; "
            "or reduce it first, for example with .sum()"
        )
    keep_freed_memory()
    if gradient is None:
        seed = np.ones(output.shape, output.dtype)
    else:
        seed = real_array(plain_array(gradient), gradient).astype(output.dtype, copy=False)
    if seed.shape != output.shape:
        raise ShapeError(f"backward: expected a gradient of shape {output.shape}, got {seed.shape}")
    leaves = [x for x in topological_sort([output]) if x.op is None and x.requires_grad]
    with entering(grad_enabled=False):
        found = gradients([output], [Tensor(seed)], leaves)
    for leaf, g in zip(leaves, found, strict=True):
        if g is not None:
            leaf.grad = np.array(g.numpy() if leaf.grad is None else leaf.grad + g.numpy())
