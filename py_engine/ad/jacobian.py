"""Whole matrices of derivatives: Jacobians, Hessians, and a Hessian's product with a vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.containers import unflatten
from py_engine.ad.forward import push_forward
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.reverse import gradients
from py_engine.ad.state import STATE
from py_engine.ad.tensor import Tensor
from py_engine.ad.transforms import Function, Linearized, check_callable, directional, linearize, named_grad
from py_engine.errors import ConfigurationError

AT_ONCE = 100_000
"""Elements that the tangents of one array have together, at most: more of them fall out of the processor's cache."""

PASS = 1 << 12
"""What one pass through a graph costs beside its elements' arithmetic, counted in elements."""


def jacobian(function: Function, x: Any, *, mode: str | None = None, chunk: int | None = None) -> Any:
    """Return all derivatives of a function of one argument.

    Args:
        function: takes an array, a tensor or a nested container of them, and returns the same.
        x: where it is differentiated.
        mode: "forward" pushes many tangents at once through the graph, "reverse" pulls one seed back for
            each element of the result. None takes the one that costs less by the shapes: reverse for few results of
            many inputs, and forward in general.
        chunk: how many tangents at once in forward mode; None: as many as fit into the cache. Compiled, every chunk
            (or in reverse mode every row) is a part of the tape, which is long if they are many.

    Returns:
        An array of shape (*shape of the result, *shape of x) and the dtype of the result. Where the result is a
        container, one of its structure with that for each array; where `x` is one, each of these is a container of
        `x`'s structure.

    Raises:
        NotDifferentiableError: something in `x` or in the result is not of float32 or float64; names its place.
        ConfigurationError: there is no such mode, the chunk is not positive, or a chunk is given for reverse mode.

    Example:
        >>> jacobian(lambda x: x[:2] * x[2], np.array([1.0, 2.0, 3.0]))
        array([[3., 0., 1.],
               [0., 3., 2.]])
    """
    check_callable("jacobian", function)
    if mode not in (None, "forward", "reverse"):
        raise ConfigurationError(f"jacobian: mode must be 'forward', 'reverse' or None, got {mode!r}")
    _check_chunk("jacobian", chunk)
    if mode == "reverse" and chunk is not None:
        raise ConfigurationError("jacobian: a chunk is of tangents at once, which only forward mode has")
    return _matrix(linearize("jacobian", function, (x,), (0,)), mode, chunk)


def hessian(function: Function, x: Any, *, chunk: int | None = None) -> Any:
    """Return all second derivatives of a scalar function of one argument, forward over reverse.

    Args:
        function: takes an array, a tensor or a nested container of them, and returns a scalar.
        x: where it is differentiated.
        chunk: how many columns at once, see `jacobian`.

    Returns:
        An array of shape (*shape of x, *shape of x); for a container nested ones, `hessian[a][b]` holding the
        derivatives by `x[a]` and then by `x[b]`.

    Raises:
        ShapeError: the result is not a scalar.
        NotDifferentiableError: something in `x` is not of float32 or float64; names its place.
        ConfigurationError: the chunk is not positive.

    Example:
        >>> hessian(lambda x: x[0] ** 2 * x[1], np.array([3.0, 1.0]))
        array([[2., 6.],
               [6., 0.]])
    """
    check_callable("hessian", function)
    _check_chunk("hessian", chunk)
    return _matrix(linearize("hessian", named_grad("hessian", function), (x,), (0,)), "forward", chunk)


def hvp(function: Function, x: Any, v: Any) -> Any:
    """Return the product of the Hessian of a scalar function with a vector, forward over reverse.

    It costs a few times the gradient, whatever the size of `x`: the Hessian itself is never there.

    Args:
        function: takes an array, a tensor or a nested container of them, and returns a scalar.
        x: where it is differentiated.
        v: the vector: a container of `x`'s structure with arrays of its shapes and dtypes.

    Returns:
        A container of `x`'s structure with arrays of its shapes and dtypes.

    Raises:
        ShapeError: the result is not a scalar, or `v` does not fit `x`.
        DTypeError: `v` is of another dtype than `x`.
        NotDifferentiableError: something in `x` is not of float32 or float64; names its place.

    Example:
        >>> hvp(lambda x: x[0] ** 2 * x[1], np.array([3.0, 1.0]), np.array([1.0, 0.0]))
        array([2., 6.])
    """
    check_callable("hvp", function)
    return directional("hvp", named_grad("hvp", function), (x,), (v,))[1]


def _check_chunk(name: str, chunk: Any) -> None:
    if chunk is not None and not is_whole(chunk, 1):
        raise ConfigurationError(f"{name}: chunk must be a positive integer or None, got {chunk!r}")


def _matrix(call: Linearized, mode: str | None, chunk: int | None) -> Any:
    columns, rows = sum(x.size for x in call.variables), sum(y.size for y in call.outputs)
    longest = max((x.size for x in (*call.variables, *call.outputs)), default=1)
    if mode is None:
        mode = cheaper(columns, rows, longest, chunk)
    with call.derivative():
        blocks = _forward(call, chunk or at_once(longest)) if mode == "forward" else _reverse(call)
    shown = iter(call.shown(blocks))
    return unflatten(
        call.structure, [call.in_arguments([next(shown) for _ in call.variables])[0] for _ in call.outputs]
    )


def at_once(longest: int) -> int:
    """Return how many tangents of arrays of up to this many elements are pushed forward at once."""
    return max(1, AT_ONCE // max(longest, 1))


def cheaper(columns: int, rows: int, longest: int, chunk: int | None) -> str:
    """Return the mode that costs less for a Jacobian of this size: passes, and the elements that go through them."""
    forward = math.ceil(columns / (chunk or at_once(longest))) * PASS + columns * longest
    return "forward" if forward <= rows * (PASS + longest) else "reverse"


def _forward(call: Linearized, chunk: int) -> list[Tensor]:
    """The derivatives of each output by each variable, from columns of the identity matrix pushed forward."""
    ends = np.cumsum([x.size for x in call.variables]).tolist()
    columns = ends[-1] if ends else 0
    passes: list[list[Tensor]] = [[] for _ in call.outputs]
    for start in range(0, columns, chunk):
        stop = min(start + chunk, columns)
        tangents = {
            x: _unit_vectors(x, start - (end - x.size), stop - start)
            for x, end in zip(call.variables, ends, strict=True)
            if end > start and end - x.size < stop
        }
        pushed = push_forward(call.outputs, tangents, stop - start, call.level)
        for found, y, t in zip(passes, call.outputs, pushed, strict=True):
            found.append(Tensor(np.zeros((stop - start, *y.shape), y.dtype)) if t is None else t)
    blocks = []
    for found, y in zip(passes, call.outputs, strict=True):
        whole = ops.concatenate(found) if found else Tensor(np.zeros((0, *y.shape), y.dtype))
        for x, end in zip(call.variables, ends, strict=True):
            block = ops.moveaxis(whole[end - x.size : end], 0, -1)
            blocks.append(ops.reshape(block, (*y.shape, *x.shape)))
    return blocks


def _unit_vectors(x: Tensor, first: int, count: int) -> Tensor:
    """Tangents (count, *shape of x), the k-th of them 1 at element first + k, if there is such a one, and 0 else."""
    vectors = np.zeros((count, x.size), x.dtype)
    k = np.arange(max(0, -first), min(count, x.size - first))
    vectors[k, first + k] = 1
    return Tensor(vectors.reshape(count, *x.shape))


def _reverse(call: Linearized) -> list[Tensor]:
    """The derivatives of each output by each variable, row by row."""
    blocks = []
    for y in call.outputs:
        rows = [gradients([y], [_unit(y, k)], call.variables, level=call.level) for k in range(y.size)]
        for i, x in enumerate(call.variables):
            zeros = Tensor(np.zeros(x.shape, x.dtype))
            found = [zeros if g is None else g for g in (row[i] for row in rows)]
            whole = _stacked(found) if found else Tensor(np.zeros((0, *x.shape), x.dtype))
            blocks.append(ops.reshape(ops.astype(whole, y.dtype), (*y.shape, *x.shape)))
    return blocks


def _unit(y: Tensor, k: int) -> Tensor:
    seed = np.zeros(y.size, y.dtype)
    seed[k] = 1
    return Tensor(seed.reshape(y.shape))


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    if all(row.data is not None and not row.requires_grad for row in rows) and STATE.trace is None:
        return Tensor(np.stack([row.numpy() for row in rows]))  # not differentiated: no op for a thousand rows
    return ops.stack(rows)
