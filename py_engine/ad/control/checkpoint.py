"""Checkpoints: what a function computes inside is not kept for the backward pass, but computed there once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import count
from typing import Any

from py_engine.ad import ops
from py_engine.ad.containers import flatten, unflatten
from py_engine.ad.forward import push_forward
from py_engine.ad.mutation import collecting_ops
from py_engine.ad.op import Op, infer_same
from py_engine.ad.ops.shape import all_mapped, leading
from py_engine.ad.program import Program, close_over, without_inner
from py_engine.ad.reverse import gradients
from py_engine.ad.state import LEVELS, STATE, collecting, entering, restoring, update
from py_engine.ad.tensor import FLOATS, Node, Tensor
from py_engine.ad.transforms import check_callable
from py_engine.ad.vmap import batched_program
from py_engine.errors import ConfigurationError

Function = Callable[..., Any]


def checkpoint(function: Function) -> Function:
    """Return `function` with its inner values recomputed in the backward pass, so that none of them is kept.

    A chain of n such functions keeps n values instead of all; the price is one more forward pass. Random numbers
    drawn inside are kept, not drawn again. It works eagerly and in compiled functions, with containers of arrays
    as arguments and results, and tensors that the function captures have their gradients, too.

    Args:
        function: takes positional arguments (arrays, tensors, containers of them) and returns tensors in containers.

    Raises:
        ConfigurationError: `function` is not callable, or calls a layer twice that updates its running statistics.

    Example:
        >>> block = checkpoint(lambda x: np.tanh(np.sin(x) * 2))
        >>> grad(lambda x: np.sum(block(block(x))))(np.ones(3)).shape
        (3,)
    """

    check_callable("checkpoint", function)

    @wraps(function)
    @restoring
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not STATE.grad_enabled:
            return function(*args, **kwargs)
        leaves, structure, level = *flatten(args), next(LEVELS)
        updates: list[Any] = []
        given = [x for x in leaves if isinstance(x, Tensor)]
        if STATE.trace is None:
            # Eagerly, the ops inside work on separate tensors, whose graph is dropped at the end.
            own = [_alone(x, x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
            # The ops inside, and the backward pass, read what layers update: it is given its new values in the end.
            with collecting("updates") as updates, collecting_ops(grad_enabled=True) as nodes:
                outputs, made = flatten(function(*unflatten(structure, own), **kwargs))
            inputs = [x for x in own if isinstance(x, Tensor)]
            results = [_alone(y) if isinstance(y, Tensor) else y for y in outputs]
        else:
            start = len(STATE.trace)
            outputs, made = flatten(function(*args, **kwargs))
            nodes = STATE.trace[start:]
            inputs = given
            results = list(outputs)
        places = [i for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.dtype in FLOATS]
        if places:
            ys = [outputs[i] for i in places]
            inside, captured = close_over(nodes, inputs, ys, redraw=False, checks=False)
            captured = without_inner(captured, level)
            values = [_alone(y) for y in ys] if STATE.trace is None else ys
            attrs = {"inside": inside, "of": next(_NUMBERS)}
            for i, y in zip(places, CHECKPOINT.apply_several((*values, *given, *captured), attrs), strict=True):
                results[i] = y
        if len({id(parameter) for parameter, _ in updates}) < len(updates):
            raise ConfigurationError(
                "checkpoint: the function calls a layer twice that updates its running statistics; put each call into "
                "a separate checkpoint"
            )
        for parameter, value in updates:
            update(parameter, value)
        return unflatten(made, results)

    return checkpointed


_NUMBERS = count()


def _alone(x: Tensor, requires_grad: bool = False) -> Tensor:
    """Return the values of `x` as a tensor without a history."""
    x.numpy()  # raises where there are none
    assert x.data is not None
    return Tensor(x.data, requires_grad)


# The op ---------------------------------------------------------------------------------------------------


def _pull_back(cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    """Compute the inside anew, from the checkpoint's inputs, and go backward through it."""
    count = len(cotangents)
    wanted = needs_grad[count:]
    again, ys, level = _recomputed(node.inputs[count:], wanted, node.attrs["inside"], node.attrs["of"])
    targets = [x for x, needed in zip(again, wanted, strict=True) if needed]
    seeded = [(y, g) for y, g in zip(ys, cotangents, strict=True) if g is not None]
    found = iter(gradients([y for y, _ in seeded], [g for _, g in seeded], targets, stop_at_targets=True, level=level))
    return [*[None] * count, *(next(found) if needed else None for needed in wanted)]


def _recomputed(
    inputs: Sequence[Tensor], needs_grad: Sequence[bool], inside: Program, of: int
) -> tuple[list[Tensor], list[Tensor], int]:
    """Return new variables for these inputs, what is computed from them, and the level of the variables."""
    connected, level = STATE.grad_enabled, next(LEVELS)
    with entering(grad_enabled=True):
        again = [_input(x, needed, connected, of, level) for x, needed in zip(inputs, needs_grad, strict=True)]
        return again, inside(again), level


def _input(x: Tensor, needs_grad: bool, connected: bool, of: int, level: int) -> Tensor:
    if x.data is None or STATE.trace is not None:
        found = BARRIER.apply((x,), {"of": of})
    elif connected and x.requires_grad:
        # Part of the graph around: the derivative may be differentiated, by what is fixed, too.
        found = ops.identity(x)
    else:
        found = Tensor(x.data)
    if needs_grad:
        found.level = level
    return found


def _jvp(
    tangents: Sequence[Tensor | None], node: Node, *inputs: Tensor, inside: Program, of: int
) -> Sequence[Tensor | None]:
    count = len(inside.outputs)
    if any(t is not None for t in tangents[:count]):  # traced: the ops inside are part of the graph
        return tangents[:count]
    again, ys, level = _recomputed(inputs[count:], [t is not None for t in tangents[count:]], inside, of)
    known = {x: t for x, t in zip(again, tangents[count:], strict=True) if t is not None}
    return push_forward(ys, known, level=level)


def _batch(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    inside: Program = attrs["inside"]
    count = len(inside.outputs)
    new, flags = batched_program(inside, samples, mapped[count:], mapped[:count])
    values = all_mapped(samples, [m or not f for m, f in zip(mapped, flags, strict=False)], inputs[:count])
    return op.apply_several((*values, *inputs[count:]), {**attrs, "inside": new}), flags


CHECKPOINT = Op(
    "checkpoint",
    lambda *inputs, inside, of: [(y.shape, y.dtype) for y in inputs[: len(inside.outputs)]],
    several=True,
    view=lambda *inputs, inside, of: inputs[: len(inside.outputs)],
    vjp=_pull_back,
    opaque=True,
    jvp=_jvp,
    batch=_batch,
    doc="the first inputs, which the others determine; their gradient computes them from these once more",
)


BARRIER = Op(
    "barrier",
    infer_same,
    view=lambda x, of: x,
    vjp=(lambda g, y, x, of: g,),
    jvp=lambda tangents, y, x, of: tangents[0],
    batch=leading,
    doc="x, but what is computed from it is never merged with what was computed from x before",
)
