"""Whole matrices of derivatives: Jacobians, Hessians, and a Hessian's product with a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.containers import unflatten
from py_engine.ad.forward import push_forward
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.ops.shape import for_each
from py_engine.ad.program import Program, nested_trace, traced
from py_engine.ad.reverse import gradients
from py_engine.ad.state import restoring
from py_engine.ad.tensor import Tensor
from py_engine.ad.transforms import Function, Linearized, check_callable, directional, linearize, named_grad
from py_engine.ad.vmap import batched
from py_engine.errors import ConfigurationError

AT_ONCE = 100_000
"""Elements that the tangents, or cotangents, of one array have together, at most: more of them fall out of the
processor's cache."""


@restoring
def jacobian(function: Function, x: Any, *, mode: str | None = None, chunk: int | None = None) -> Any:
    """Return all derivatives of a function of one argument.

    Args:
        function: takes an array, a tensor or a nested container of them, and returns the same.
        x: where it is differentiated.
        mode: "forward" pushes a tangent for each element of `x` through the graph, "reverse" pulls a cotangent for each
            element of the result back. None takes the one with fewer of them, and forward where they are equal.
        chunk: how many of them at once; None: as many as fit into the cache. Compiled, every chunk is a part of the
            tape, which is long if they are many.

    Returns:
        An array of shape (*shape of the result, *shape of x) and the dtype of the result. Where the result is a
        container, one of its structure with that for each array; where `x` is one, each of these is a container of
        `x`'s structure.

    Raises:
        NotDifferentiableError: something in `x` or in the result is not of float32 or float64; names its place.
        ConfigurationError: there is no such mode, or the chunk is not positive.

    Example:
        >>> jacobian(lambda x: x[:2] * x[2], np.array([1.0, 2.0, 3.0]))
        array([[3., 0., 1.],
               [0., 3., 2.]])
    """
    check_callable("jacobian", function)
    if mode not in (None, "forward", "reverse"):
        raise ConfigurationError(f"jacobian: mode must be 'forward', 'reverse' or None, got {mode!r}")
    _check_chunk("jacobian", chunk)
    return _matrix(linearize("jacobian", function, (x,), (0,)), mode, chunk)


@restoring
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
    forward = columns <= rows if mode is None else mode == "forward"
    given, found = (call.variables, call.outputs) if forward else (call.outputs, call.variables)
    longest = max((x.size for x in (*given, *found)), default=1)
    with call.derivative():
        blocks = _blocks(call, forward, given, found, chunk or max(1, AT_ONCE // max(longest, 1)))
        matrices = [
            _matrix_of(blocks[k, i] if forward else blocks[i, k], y, x, forward)
            for i, y in enumerate(call.outputs)
            for k, x in enumerate(call.variables)
        ]
    shown = iter(call.shown(matrices))
    return unflatten(
        call.structure, [call.in_arguments([next(shown) for _ in call.variables])[0] for _ in call.outputs]
    )


def _matrix_of(block: Tensor, y: Tensor, x: Tensor, forward: bool) -> Tensor:
    """Return the derivatives of `y` by `x` in their shape, from (elements of x, *shape of y), or the reverse."""
    if forward:
        return ops.reshape(ops.moveaxis(block, 0, -1), (*y.shape, *x.shape))
    return ops.reshape(ops.astype(block, y.dtype), (*y.shape, *x.shape))


def _blocks(
    call: Linearized, forward: bool, given: Sequence[Tensor], found: Sequence[Tensor], chunk: int
) -> dict[tuple[int, int], Tensor]:
    """Return what the unit vectors of each of `given` become in each of `found`, as (vectors, *shape).

    The derivative is linear in them: it is traced for one, and applied to a chunk of them at once.
    """
    ends = np.cumsum([0, *(x.size for x in given)]).tolist()
    programs: dict[tuple[int, ...], Program] = {}
    passes: list[list[Tensor]] = [[] for _ in found]
    for start in range(0, ends[-1], chunk):
        stop = min(start + chunk, ends[-1])
        which = tuple(i for i, x in enumerate(given) if x.size and ends[i] < stop and ends[i + 1] > start)
        if which not in programs:
            programs[which] = derivative_program(call, forward, [given[i] for i in which])
        units = [_unit_vectors(given[i], start - ends[i], stop - start) for i in which]
        results, mapped = batched(programs[which], stop - start, units, [True] * len(units))
        for vectors, y, m in zip(passes, results, mapped, strict=True):
            vectors.append(y if m else for_each(y, stop - start))
    whole = [
        ops.concatenate(vectors)
        if len(vectors) > 1
        else vectors[0]
        if vectors
        else Tensor(np.zeros((0, *y.shape), y.dtype))
        for vectors, y in zip(passes, found, strict=True)
    ]
    return {
        (i, k): whole[k] if len(given) == 1 else whole[k][ends[i] : ends[i + 1]]
        for i in range(len(given))
        for k in range(len(found))
    }


def derivative_program(call: Linearized, forward: bool, given: Sequence[Tensor]) -> Program:
    """Return the program from tangents of `given` variables to those of the outputs, or from cotangents of `given`
    outputs to those of the variables; what it reads of the graph are its constants."""
    own = [Tensor.symbol(x.shape, x.dtype) for x in given]
    found: Sequence[Tensor | None]
    with nested_trace() as nodes:
        if forward:
            wanted = call.outputs
            found = push_forward(wanted, dict(zip(given, own, strict=True)), call.level)
        else:
            wanted = call.variables
            found = gradients(given, own, wanted, level=call.level)
        results = [Tensor(np.zeros(x.shape, x.dtype)) if t is None else t for t, x in zip(found, wanted, strict=True)]
    return traced(nodes, own, results, checks=False)


def _unit_vectors(x: Tensor, first: int, count: int) -> Tensor:
    """Vectors (count, *shape of x), the k-th of them 1 at element first + k, if there is such a one, and 0 else."""
    vectors = np.zeros((count, x.size), x.dtype)
    k = np.arange(max(0, -first), min(count, x.size - first))
    vectors[k, first + k] = 1
    return Tensor(vectors.reshape(count, *x.shape))
