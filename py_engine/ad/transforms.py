"""Function transforms: a function in, a function out. They work on nested use and inside traced functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from py_engine.ad import ops
from py_engine.ad.graph import Graph, gradients, tracing
from py_engine.ad.tape import Tape
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import FLOATS, STATE, Array, Literal, Tensor
from py_engine.errors import NotDifferentiableError, ReplayError, ShapeError, TraceError

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
        plain = not _inside_transform() and not any(isinstance(arg, Tensor) for arg in args)
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
    outside = _inside_transform()
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


def _inside_transform() -> bool:
    return STATE.differentiating or STATE.trace is not None


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


# Compilation ----------------------------------------------------------------------------------------------


class Compiled:
    """A function that is traced once for each combination of argument shapes and dtypes, and then replayed.

    Python code runs only while tracing: branches and loops are fixed by the first call of each shape, and a
    branch on a value raises. Tensors that the function captures are read anew at every call; numpy arrays that
    it captures are read by reference, too. Results are copies. Threads may call it, one after the other.

    Inside another transform, and on tensors that require a gradient, the function itself is called instead: its
    results are then tensors that can be differentiated.
    """

    def __init__(self, function: Function, techniques: Techniques = Techniques()) -> None:  # noqa: B008
        self.function = function
        self.techniques = techniques
        self.tapes: dict[Any, tuple[Tape, Any]] = {}
        self._lock = threading.Lock()  # a tape belongs to one thread at a time
        self.__doc__ = function.__doc__

    def __call__(self, *args: ArrayLike | Tensor) -> Any:
        """Replay the function on these arguments.

        Raises:
            TraceError: the function branches on a value, or returns something other than tensors.
        """
        recorded = STATE.recording and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if recorded or _inside_transform():
            return self.function(*args)  # a tape's results are arrays: the derivative would be lost
        arrays = _arrays(args)
        with self._lock:
            tape, structure = self._tape(arrays)
            return _packed(structure, [np.array(out) for out in tape(*arrays)])

    def _tape(self, arrays: Sequence[Array]) -> tuple[Tape, Any]:
        key = tuple((a.shape, a.dtype) for a in arrays)
        if key not in self.tapes:
            inputs = [Tensor.symbol(a.shape, a.dtype, f"x{i}") for i, a in enumerate(arrays)]
            with tracing() as nodes:
                value = self.function(*inputs)
                outputs: list[Tensor] = []
                structure = _flattened(value, outputs)
            graph = Graph(inputs, outputs, nodes)
            graph.prune()
            self.tapes[key] = (Tape(graph, techniques=self.techniques), structure)
        return self.tapes[key]

    @property
    def source(self) -> str:
        """The tapes made so far as straight-line Python, for reading."""
        if not self.tapes:
            raise ReplayError("the function has not been called yet, so nothing is compiled; call it first")
        return "\n\n".join(
            f"# {', '.join(f'{dtype}{shape}' for shape, dtype in key)}\n{tape.source}"
            for key, (tape, _) in self.tapes.items()
        )


def compile(function: Function, techniques: Techniques = Techniques()) -> Compiled:  # noqa: B008
    """Return `function` as a replayed tape; `compile(grad(f))` and `compile(value_and_grad(f))` work as well.

    See `Compiled` for what is fixed by tracing.
    """
    return Compiled(function, techniques)


def _arrays(args: Sequence[ArrayLike | Tensor]) -> list[Array]:
    """Return the arguments as arrays; Python floats are weak, as they are beside tensors in an op."""
    floats = (arg.dtype for arg in args if isinstance(arg, (Tensor, np.ndarray)) and arg.dtype in FLOATS)
    dtype = next(floats, np.dtype(np.float64))
    return [
        arg.numpy() if isinstance(arg, Tensor) else np.asarray(arg, dtype if isinstance(arg, float) else None)
        for arg in args
    ]


def _flattened(value: Any, leaves: list[Tensor]) -> Any:
    """Append the tensors of a result to `leaves` and return its structure."""
    if isinstance(value, (tuple, list)):
        return type(value), [_flattened(item, leaves) for item in value]
    if isinstance(value, (Tensor, np.ndarray, np.number, int, float)):
        leaves.append(ops.as_tensor(value))
        return len(leaves) - 1
    raise TraceError(f"compile: the function must return tensors in tuples or lists, got {type(value).__name__}")


def _packed(structure: Any, arrays: Sequence[Array]) -> Any:
    if isinstance(structure, int):
        return arrays[structure]
    kind, items = structure
    return kind(_packed(item, arrays) for item in items)


__all__ = ["Compiled", "compile", "grad", "value_and_grad"]
