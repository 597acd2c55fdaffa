"""Forward mode: tangents pushed through a graph by the ops' jvp rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from py_engine.ad import ops
from py_engine.ad.op import Tangents, described
from py_engine.ad.reverse import check_versions, topological_sort
from py_engine.ad.state import entering
from py_engine.ad.tensor import Node, Result, Tensor
from py_engine.errors import DTypeError, NotDifferentiableError, ShapeError

# The sweep ------------------------------------------------------------------------------------------------


def push_forward(outputs: Sequence[Tensor], tangents: Mapping[Tensor, Tensor], level: int = 1) -> list[Tensor | None]:
    """Return the tangents of the outputs, from those of tensors that they depend on: Jacobian-vector products.

    Args:
        outputs: tensors with the graph that computed them, of any shape.
        tangents: tensors, each with its tangent of the same shape and dtype.
        level: the tensors with tangents have at least this one, see `reverse.gradients`.

    Returns:
        For each output its tangent, of its shape and dtype; None where that is zero.

    Raises:
        NotDifferentiableError: an op has no jvp rule.
        InPlaceError: an array that a rule reads was written to since.
        ShapeError, DTypeError: a rule returned something that cannot be the tangent of its result.
    """
    order = topological_sort(outputs, level=level)
    uses = _uses(order, outputs)
    unchanged: set[object] = set()
    several: set[int] = set()  # nodes with several results that were pushed through
    found: dict[int, Tensor] = {id(x): t for x, t in tangents.items()}
    for node in order:
        if node.op is None:
            continue
        given = [found.get(id(x)) for x in node.inputs]
        if node.__class__ is Result:
            if id(node.node) not in several:
                several.add(id(node.node))
                unchanged.clear()  # its rule may write
                _push_several(node.node, given, found)
        elif node not in tangents and any(t is not None for t in given):
            if node.versions is not None:
                check_versions(node, node.versions, unchanged)
            if node.op.opaque:
                unchanged.clear()  # its rule may write
            with entering(scope=node.scope):
                tangent = _push(node, given)
            if tangent is not None:
                found[id(node)] = tangent
        for x in node.inputs:
            uses[id(x)] -= 1
            if not uses[id(x)]:
                found.pop(id(x), None)  # only as long as it is needed
    return [found.get(id(output)) for output in outputs]


def _uses(order: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[int, int]:
    uses: dict[int, int] = {id(output): 1 for output in outputs}
    for node in order:
        for x in node.inputs:
            uses[id(x)] = uses.get(id(x), 0) + 1
    return uses


def _push(node: Tensor, given: Tangents) -> Tensor | None:
    op = node.op
    assert op is not None
    if op.jvp is None:
        raise _missing_rule(node)
    tangent = op.jvp(given, node, *node.inputs, **node.attrs)
    return None if tangent is None else _checked(tangent, node)


def _push_several(node: Node, given: Tangents, tangents: dict[int, Tensor]) -> None:
    """Push tangents through an op with several results, and enter those of its results."""
    if all(t is None for t in given):
        return
    if node.op.jvp is None:
        raise _missing_rule(node)
    if node.versions is not None:
        check_versions(node, node.versions, set())
    with entering(scope=node.scope):
        found = node.op.jvp(given, node, *node.inputs, **node.attrs)
    for i, t in enumerate(found):
        x = node.known(i)
        if t is not None and x is not None and id(x) not in tangents:
            tangents[id(x)] = _checked(t, x)


def _missing_rule(node: Tensor | Node) -> NotDifferentiableError:
    return NotDifferentiableError(
        f"a derivative is taken through {described(node)}, but the op has no jvp rule, which forward mode needs"
    )


def _checked(tangent: Tensor, node: Tensor) -> Tensor:
    """Return a rule's result in the whole shape: where only a broadcast input has a tangent, the rule knows no more."""
    assert node.op is not None
    if tangent.dtype != node.dtype:
        raise DTypeError(f"{node.op.name}: a jvp rule returned {tangent.dtype} for a result of {node.dtype}")
    try:
        return ops.broadcast_to(tangent, node.shape)
    except ShapeError:
        raise ShapeError(
            f"{node.op.name}: a jvp rule returned shape {tangent.shape}, expected {node.shape}, that of the result"
        ) from None
