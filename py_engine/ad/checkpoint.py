"""Checkpoints: what a function computes inside is not kept for the backward pass, but computed there once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.containers import Structure, flatten, unflatten
from py_engine.ad.forward import push_forward
from py_engine.ad.graph import Part, accumulate, gradients
from py_engine.ad.ops.record import Op, Shape
from py_engine.ad.program import Program, close_over
from py_engine.ad.recorded import Layout
from py_engine.ad.state import LEVELS, STATE, entering
from py_engine.ad.tensor import FLOATS, Array, Tensor
from py_engine.ad.transforms import check_callable

__all__ = ["CHECKPOINT", "checkpoint"]

Function = Callable[..., Any]


def checkpoint(function: Function) -> Function:
    """Return `function` with its inner values recomputed in the backward pass, so that none of them is kept.

    A chain of n such functions keeps n values instead of all; the price is one more forward pass. Random numbers
    drawn inside are kept, not drawn again. It works eagerly and in compiled functions, with containers of arrays
    as arguments and results, and tensors that the function captures have their gradients, too.

    Args:
        function: takes positional arguments (arrays, tensors, containers of them) and returns tensors in containers.

    Raises:
        ConfigurationError: `function` is none.

    Example:
        >>> block = checkpoint(lambda x: np.tanh(np.sin(x) * 2))
        >>> grad(lambda x: np.sum(block(block(x))))(np.ones(3)).shape
        (3,)
    """

    check_callable("checkpoint", function)

    @wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not STATE.grad_enabled:
            return function(*args, **kwargs)
        leaves, structure = flatten(args)
        given = [x for x in leaves if isinstance(x, Tensor)]
        if STATE.trace is None:
            # Eagerly, the ops inside work on tensors of their own, whose graph is given up at the end.
            own = [_alone(x, x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
            nodes: list[Tensor] = []
            with entering(trace=nodes, grad_enabled=True):
                outputs, made, joined = _called(function, unflatten(structure, own), kwargs)
            inputs = [x for x in own if isinstance(x, Tensor)]
            results = [_alone(y) if isinstance(y, Tensor) else y for y in outputs]
        else:
            start = len(STATE.trace)
            outputs, made, joined = _called(function, args, kwargs)
            nodes = STATE.trace[start:]
            inputs = given
            results = list(outputs)
        for places, layout, y in joined:
            inside, captured = close_over(nodes, inputs, [y], redraw=False, checks=False)
            value = _alone(y) if STATE.trace is None else y
            whole = CHECKPOINT.apply((value, *given, *captured), {"inside": inside, "of": next(_NUMBERS)})
            for k, place in enumerate(places):
                results[place] = whole if layout is None else layout.tensor(whole, k)
        return unflatten(made, results)

    return checkpointed


_NUMBERS = count()

Joined = tuple[list[int], Layout | None, Tensor]
"""Which outputs, where they lie in the vector that holds them (None for a single one), and that vector."""


def _alone(x: Tensor, requires_grad: bool = False) -> Tensor:
    """Return the values of `x` as a tensor without a history."""
    x.numpy()  # raises where there are none
    assert x.data is not None
    return Tensor(x.data, requires_grad)


def _called(function: Function, args: Any, kwargs: Any) -> tuple[list[Any], Structure, list[Joined]]:
    outputs, made = flatten(function(*args, **kwargs))
    return outputs, made, _joined(outputs)


def _joined(outputs: Sequence[Any]) -> list[Joined]:
    """Join the tensors of each float dtype into one, so that the function is recomputed once for all."""
    found: list[Joined] = []
    for dtype in FLOATS:
        places = [i for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.dtype == dtype]
        if len(places) == 1:
            found.append((places, None, outputs[places[0]]))
        elif places:
            layout = Layout.of([(outputs[i].shape, dtype) for i in places], dtype)
            found.append((places, layout, layout.pack([outputs[i] for i in places])))
    return found


# The op ---------------------------------------------------------------------------------------------------


def _infer(y: Tensor, *inputs: Tensor, inside: Program, of: int) -> tuple[Shape, Any]:
    return y.shape, y.dtype


def _view(y: Array, *inputs: Array, inside: Program, of: int) -> Array:
    return y


def _pull_back(parts: Sequence[Part], asked: Sequence[bool], node: Tensor) -> list[Tensor | None]:
    """Compute the inside anew, from the checkpoint's inputs, and go backward through it."""
    g = accumulate(parts, node)
    wanted = asked[1:]
    again, y, level = _again(node.inputs[1:], wanted, node.attrs["inside"], node.attrs["of"])
    targets = [x for x, wish in zip(again, wanted, strict=True) if wish]
    found = iter(gradients([y], [g], targets, through=False, level=level))
    return [None, *(next(found) if wish else None for wish in wanted)]


def _again(
    inputs: Sequence[Tensor], moving: Sequence[bool], inside: Program, of: int
) -> tuple[list[Tensor], Tensor, int]:
    """Return inputs that stand for these, what is computed from them, and the level of those that move."""
    connected, level = STATE.grad_enabled, next(LEVELS)
    with entering(grad_enabled=True):
        again = [_input(x, moves, connected, of, level) for x, moves in zip(inputs, moving, strict=True)]
        (y,) = inside(again)
    return again, y, level


def _input(x: Tensor, moves: bool, connected: bool, of: int, level: int) -> Tensor:
    if x.data is None or STATE.trace is not None:
        found = BARRIER.apply((x,), {"of": of})
    elif connected and x.requires_grad:
        # Part of the graph around: the derivative may be differentiated, by what is fixed, too.
        found = ops.identity(x)
    else:
        found = Tensor(x.data)
    if moves:
        found.level = level
    return found


def _jvp(
    tangents: Sequence[Tensor | None], y: Tensor, value: Tensor, *inputs: Tensor, inside: Program, of: int
) -> Tensor:
    if tangents[0] is not None:  # traced: the ops inside are part of the graph
        return tangents[0]
    again, result, level = _again(inputs, [t is not None for t in tangents[1:]], inside, of)
    moves = {x: t for x, t in zip(again, tangents[1:], strict=True) if t is not None}
    (found,) = push_forward([result], moves, level=level)
    return Tensor(np.zeros(y.shape, y.dtype)) if found is None else found


CHECKPOINT = Op(
    "checkpoint",
    _infer,
    view=_view,
    vjp=_pull_back,
    joint=True,
    jvp=_jvp,
    unread=(0,),
    doc="the first input, which the others determine; its gradient computes it from them once more",
)


def _infer_same(x: Tensor, of: int) -> tuple[Shape, Any]:
    return x.shape, x.dtype


def _itself(x: Array, of: int) -> Array:
    return x


BARRIER = Op(
    "barrier",
    _infer_same,
    view=_itself,
    vjp=(lambda g, y, x, of: g,),
    jvp=lambda tangents, y, x, of: tangents[0],
    doc="x, but what is computed from it is never merged with what was computed from x before",
)
