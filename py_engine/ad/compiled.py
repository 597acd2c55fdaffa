"""Compilation: a function in, a replayed tape out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from py_engine.ad import ops
from py_engine.ad.graph import Graph, tracing
from py_engine.ad.tape import Tape
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import FLOATS, STATE, Array, Tensor, inside_transform
from py_engine.errors import ReplayError, TraceError

Function = Callable[..., Any]


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
        if recorded or inside_transform():
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
