"""Function transforms: a function in, a function out. They work on nested use and inside traced functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.graph import gradients
from py_engine.ad.tensor import FLOATS, STATE, Literal, Tensor, inside_transform
from py_engine.errors import NotDifferentiableError, ShapeError

Function = Callable[..., Any]


# Gradients ------------------------------------------------------------------------------------------------


def grad(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """Return a function that computes the gradient of a scalar `function`.

    Args:
        function: takes arrays or tensors as positional arguments and returns a scalar, written with operators,
            numpy's functions or `py_engine.ops`.
        argnums: the argument, or arguments, to differentiate by.

    Returns:
        A function of the same arguments. It returns a numpy array for each argument (a tuple if `argnums` is a
        sequence), or tensors when it is called with tensors or inside another transform.

    Raises:
        ShapeError: the result is not a scalar.
        NotDifferentiableError: an argument is not of float32 or float64.

    Example:
        >>> grad(lambda x: np.sum(x**3))(np.array([1.0, 2.0]))
        array([ 3., 12.])
    """

    def gradient(*args: Any, **kwargs: Any) -> Any:
        return value_and_grad(function, argnums)(*args, **kwargs)[1]

    return gradient


def value_and_grad(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """Return a function that computes both the value of a scalar `function` and its gradient; see `grad`."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        value, found = _differentiate(function, numbers, args, kwargs)
        # Inside another transform the result may depend on tensors of the function around it, too.
        plain = not inside_transform() and not any(isinstance(arg, Tensor) for arg in args)
        shown = [g.numpy() for g in found] if plain else found
        result = shown[0] if isinstance(argnums, int) else tuple(shown)
        return (value.item() if plain else value), result

    return value_and_gradient


def _differentiate(
    function: Function, numbers: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    for n in numbers:
        if not -len(args) <= n < len(args):
            raise ShapeError(f"grad: there is no argument {n}, the function was called with {len(args)}")
    numbers = [n % len(args) for n in numbers]
    outside = inside_transform()
    recording, differentiating = STATE.recording, STATE.differentiating
    try:
        STATE.recording = STATE.differentiating = True
        variables = {n: _variable(args, n) for n in numbers}
        output = ops.as_tensor(function(*(variables.get(i, arg) for i, arg in enumerate(args)), **kwargs))
        if output.size != 1:
            raise ShapeError(f"grad: the function must return a scalar, got shape {output.shape}")
        # Derivatives of derivatives are recorded only where someone outside may ask for them.
        STATE.recording = recording and (outside or any(isinstance(x, Tensor) and x.requires_grad for x in args))
        seed = ops.reshape(Literal(np.ones((), output.dtype)), output.shape)
        found = gradients([output], [seed], [variables[n] for n in numbers])
    finally:
        STATE.recording, STATE.differentiating = recording, differentiating
    zeros = [
        Tensor(np.zeros(variables[n].shape, variables[n].dtype)) if g is None else g
        for g, n in zip(found, numbers, strict=True)
    ]
    return output, zeros


def _variable(args: Sequence[Any], n: int) -> Tensor:
    """Return argument `n` as a tensor that is differentiated by here and nowhere else."""
    x = args[n] if isinstance(args[n], Tensor) else np.asarray(args[n])
    if x.dtype not in FLOATS:
        raise NotDifferentiableError(
            f"grad: argument {n} is of {x.dtype}, which has no derivative; use a float32 or float64 array"
        )
    if isinstance(x, Tensor) and (x.requires_grad or x.data is None):
        return ops.identity(x)  # a new node: the tensor outside keeps its own place in the graph
    return Tensor(x.numpy() if isinstance(x, Tensor) else x, requires_grad=True)
