"""Reverse mode: gradients by the ops' vjp rules, from the outputs back. Nothing here recurses over a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from py_engine.ad import ops
from py_engine.ad.memory import keep_freed_memory
from py_engine.ad.mutation import mutated
from py_engine.ad.op import Op
from py_engine.ad.ops.elementary import ADD_IN_ANY_ORDER
from py_engine.ad.ops.shape import Index, assemble
from py_engine.ad.program import same
from py_engine.ad.state import STATE, entering, no_grad
from py_engine.ad.tensor import FLOATS, Node, Result, Tensor
from py_engine.errors import DTypeError, InPlaceError, NotDifferentiableError, ShapeError

__all__ = [
    "accumulate",
    "backward",
    "described",
    "gradients",
    "mutation_error",
    "topological_sort",
    "unbroadcast",
    "variable",
]

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
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], targets: Sequence[Tensor], through: bool = True, level: int = 1
) -> list[Tensor | None]:
    """Return the vector-Jacobian product of the outputs with the seeds, for each target.

    Reverse mode, by the ops' own rules, which are ops again: eager tensors give values, symbolic ones extend the
    graph, and either can be differentiated once more.

    Args:
        outputs: what is differentiated.
        seeds: for each output the upstream gradient, of its shape and dtype.
        targets: the tensors to differentiate by; they require a gradient.
        through: whether a target's gradient includes what reaches it through the others; if not, they are taken
            as independent of each other, whatever they were computed from.
        level: the targets have at least this one. What depends on them has it, too, and nothing else is looked at: so
            the cost of a transform inside others does not grow with what these have computed before.

    Returns:
        For each target a tensor of its shape and dtype, or None where no output depends on it.
    """
    wanted = {id(target) for target in targets if target.dtype in FLOATS}
    order: Sequence[Tensor | Node]
    order, depends = _between(outputs, wanted, through, level)
    first = _first_equals(order, wanted) if STATE.symbolic else {}
    pending: dict[int, list[Part]] = {}
    for i, output in enumerate(outputs):
        if id(output) in depends:
            pending.setdefault(first.get(id(output), id(output)), []).append((seeds[i], None))
    result: dict[int, Tensor] = {}
    unchanged: set[int] = set()
    outer = scope = STATE.scope
    try:
        for node in reversed(order):
            if node.__class__ is Node:
                STATE.scope = scope = node.scope
                unchanged.clear()  # its rule may be code of the user's own
                _pull_back_several(node, wanted, depends, pending, first, result)
                continue
            parts = pending.pop(id(node), None)
            if parts is None:
                continue
            if node.scope is not scope:
                STATE.scope = scope = node.scope
            op = node.op
            assert op is not None
            if node.versions is not None and (changed := mutated(node.versions, unchanged)):
                raise mutation_error(node, changed[0])
            if id(node) in wanted:
                result[id(node)] = accumulate(parts, node)
            if op.joint:
                unchanged.clear()  # its rule may be code of the user's own
                _pull_back_jointly(node, [accumulate(parts, node)], depends, pending, first)
                continue
            g = parts[0][0] if len(parts) == 1 and parts[0][1] is None else accumulate(parts, node)
            for i, x in enumerate(node.inputs):
                if id(x) in depends:
                    part = _pull_back(node, op, i, x, g)
                    number = first.get(id(x), id(x)) if first else id(x)
                    if part is None:
                        pass
                    elif number in pending:
                        pending[number].append(part)
                    else:
                        pending[number] = [part]
        for target in targets:  # what is left are the leaves
            parts = pending.pop(id(target), None)
            if parts is not None:
                if target.scope is not scope:
                    STATE.scope = scope = target.scope
                result[id(target)] = accumulate(parts, target)
    finally:
        STATE.scope = outer
    return [result.get(id(target)) for target in targets]


def _between(outputs: Sequence[Tensor], wanted: set[int], through: bool, level: int) -> tuple[list[Any], set[int]]:
    """Return the nodes on the ways from the wanted tensors to the outputs, sorted; and all that depends on those.

    Leaves are not among the nodes, and nor are wanted tensors if nothing behind them is asked for.
    """
    order: list[Tensor | Node] = []
    several: set[int] = set()  # nodes with several results that are there already
    depends = set(wanted)
    seen = set() if through else set(wanted)
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
        elif top.level >= level and top.op is not None and id(top) not in seen:
            seen.add(id(top))
            stack.append((top,))
            for x in top.inputs[::-1]:
                if x.op is not None:
                    stack.append(x)
    return order, depends


def _first_equals(order: Sequence[Any], wanted: set[int]) -> dict[int, int]:
    """Return for each node that an earlier one equals which that is.

    Wanted ones stay what they are, and so do ops with joint rules, which may run the user's code.

    What is computed twice is one value, and its gradient the sum of both: pulled back once, not twice. Only what is
    traced: the arrays that an op is given otherwise can be written to between two calls.
    """
    first: dict[int, int] = {}
    known: dict[Any, int] = {}
    for node in order:
        if node.__class__ is Node:
            continue
        assert node.op is not None
        if node.data is None and not (node.op.random or node.op.joint or id(node) in wanted):
            found = known.setdefault(
                same(node.op, [first.get(id(x), id(x)) for x in node.inputs], node.attrs), id(node)
            )
            if found != id(node):
                first[id(node)] = found
    return first


Part = tuple[Tensor, Index | None]
"""A contribution to a gradient: a tensor of the whole shape, or of the place given by a basic index."""


def _pull_back(node: Tensor, op: Op, i: int, x: Tensor, g: Tensor) -> Part | None:
    if op.slice_index is not None:
        # Not put into zeros here: the gradient of an array taken apart by slices is assembled once from all.
        return g, op.slice_index(**node.attrs)
    rule = op.vjp[i] if op.vjp.__class__ is tuple else op.rule(i)
    if rule is None:
        raise _missing_rule(node, i)
    part = rule(g, node, *node.inputs, **node.attrs) if node.attrs else rule(g, node, *node.inputs)
    if part is None:
        return None
    return part if part.shape == x.shape and part.dtype is x.dtype else unbroadcast(part, x), None


def _missing_rule(node: Tensor, i: int) -> NotDifferentiableError:
    assert node.op is not None
    what = (
        "it is made by the technique 'fuse' and has no rule; switch that off to differentiate once more"
        if node.op.fused
        else f"it has no vjp rule for its input {i}; give its record one, or constant=True if no gradient is to pass it"
    )
    return NotDifferentiableError(f"a gradient is taken through {described(node)}, but {what}")


def mutation_error(node: Tensor | Node, x: Tensor) -> InPlaceError:
    """Return the error for an array that the node's rules read, and that was written to after the node used it."""
    i = next(i for i, a in enumerate(node.inputs) if a is x)
    return InPlaceError(
        f"backward: the gradient of {described(node)} needs its input {i} "
        f"({x.name + ', ' if x.name else ''}shape {x.shape} {x.dtype}) as it was, but the array was written to "
        "in place since; write to a copy of it, or after the gradient was taken"
    )


def _pull_back_several(
    node: Node,
    wanted: set[int],
    depends: set[int],
    pending: dict[int, list[Part]],
    first: dict[int, int],
    result: dict[int, Tensor],
) -> None:
    """Pull back an op with several results, each of which may have a gradient."""
    cotangents: list[Tensor | None] = []
    for i in range(len(node.kinds)):
        x = node.known(i)
        parts = None if x is None else pending.pop(id(x), None)
        cotangents.append(None if x is None or parts is None else accumulate(parts, x))
        if id(x) in wanted and cotangents[-1] is not None:
            result[id(x)] = cotangents[-1]
    if any(g is not None for g in cotangents):
        if node.versions is not None and (changed := mutated(node.versions, set())):
            raise mutation_error(node, changed[0])
        _pull_back_jointly(node, cotangents, depends, pending, first)


def _pull_back_jointly(
    node: Tensor | Node,
    cotangents: Sequence[Tensor | None],
    depends: set[int],
    pending: dict[int, list[Part]],
    first: dict[int, int],
) -> None:
    assert node.op is not None and callable(node.op.vjp)
    asked = [id(x) in depends and x.dtype in FLOATS for x in node.inputs]
    if any(asked):
        for x, g in zip(node.inputs, node.op.vjp(cotangents, asked, node), strict=True):
            if g is not None:
                pending.setdefault(first.get(id(x), id(x)), []).append((g, None))


def accumulate(parts: Sequence[Part], node: Tensor) -> Tensor:
    """Return the sum of all contributions to the gradient of `node`."""
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0]
    slices = [(g, index) for g, index in parts if index is not None]
    whole = [g for g, index in parts if index is None]
    if slices:
        whole.append(assemble([g for g, _ in slices], [index for _, index in slices], node.shape))
    total = whole[0]
    for g in whole[1:]:
        total = ADD_IN_ANY_ORDER(total, g)
    return total


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
    if summed.size != x.size:
        raise ShapeError(f"a gradient rule returned shape {g.shape} for an input of shape {x.shape}")
    return ops.reshape(summed, x.shape)


def variable(x: Tensor, level: int) -> Tensor:
    """Return `x` as a new node that gradients are taken by; `x` keeps its own place in the graph."""
    found: Tensor = ops.identity(x)
    found.level = level  # here even what is a constant to all outside, as stop_gradient's result is
    return found


def described(node: Tensor | Node) -> str:
    """Return the name of a node's op, and of the layer that it belongs to, for messages."""
    assert node.op is not None
    return f"{node.op.name!r} in layer {node.scope!r}" if node.scope else repr(node.op.name)


def scope_of(node: Tensor | Node) -> entering:
    """Label the ops made inside with the layer that `node` belongs to."""
    return entering(scope=node.scope)


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
    seed = np.ones(output.shape, output.dtype) if gradient is None else np.asarray(gradient, output.dtype)
    if seed.shape != output.shape:
        raise ShapeError(f"backward: expected a gradient of shape {output.shape}, got {seed.shape}")
    leaves = [x for x in topological_sort([output]) if x.op is None and x.requires_grad]
    with no_grad():
        found = gradients([output], [Tensor(seed)], leaves)
    for leaf, g in zip(leaves, found, strict=True):
        if g is not None:
            leaf.grad = np.array(g.numpy() if leaf.grad is None else leaf.grad + g.numpy())
