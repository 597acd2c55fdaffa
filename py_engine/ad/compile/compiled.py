"""Compilation: a function in, a replayed tape out."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from types import NoneType
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad.compile.straight_line import DOMAIN_ERRORS, FLOAT64, Scalar
from py_engine.ad.compile.tape import Tape
from py_engine.ad.containers import Structure, flatten, paths, unflatten
from py_engine.ad.mutation import captured
from py_engine.ad.op import Shape, as_tensor
from py_engine.ad.program import traced, tracing
from py_engine.ad.state import STATE, entering, restoring
from py_engine.ad.techniques import COMPILE_DEFAULTS, Techniques
from py_engine.ad.tensor import Array, Literal, Tensor, plain_arrays
from py_engine.ad.transforms import check_callable
from py_engine.errors import ConfigurationError, DTypeError, ReplayError, TraceError

Function = Callable[..., Any]
Pack: TypeAlias = Callable[[list[Array]], Any]
Signature: TypeAlias = tuple[Structure | None, tuple[tuple[Shape, Any], ...]]
"""The structure of the arguments (None where each is one array), and the arrays' shapes and dtypes."""


class Compiled:
    """A function that is traced once for each signature of its arguments, and then replayed.

    The signature is their containers and the shapes and dtypes of the arrays in them; each has its own tape. Python
    code runs only while tracing: branches and loops are fixed by the first call, and a branch on a value raises. A
    Python float takes the dtype of the arrays beside it, as in an op; a Python int stays an integer, which may be an
    index: beside float32 give a float.

    What the function captures:

    - Arrays and tensors that are operands of its ops are read anew at every call.
    - A boolean mask, a list of numbers that is an operand or an index, and a list, an array or a tensor that sets a
      shape, axes, widths or strides are part of what was traced, and so are Python numbers, lists and numpy arrays
      taken of a captured tensor (`float(t)`, `t.item()`, `np.array(t)`, a branch on it). A call raises where these
      have changed.
    - All else is that of the first call, without a word: Python numbers and strings, also those in lists and dicts;
      which tensors and arrays a container holds; and what numpy computes of captured arrays, or of `t.numpy()`.

    Values that an op refuses (labels, token ids and indices out of range) are refused by every call, whether or not
    a result depends on them. Results are new arrays. Threads may call it, one after the other.

    Inside another transform, on tensors that require a gradient, and where it captures one (outside `no_grad`), the
    function itself is called instead: its results are then tensors that can be differentiated.
    """

    def __init__(self, function: Function, techniques: Techniques = COMPILE_DEFAULTS) -> None:
        self.function = function
        self.techniques = replace(techniques, winograd=False)
        self.tapes: dict[Signature, tuple[Tape, Pack]] = {}
        self._scalars: dict[int, tuple[Tape, Scalar, Pack]] = {}  # by the number of float64 arguments
        self._lock = threading.RLock()  # a tape belongs to one thread at a time; a custom rule may call this again
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any) -> Any:
        """Replay the function on these arguments: arrays, numbers, tensors and containers of them.

        Raises:
            TraceError: the function branches on a value, or returns something other than tensors.
        """
        if STATE.differentiating or STATE.trace is not None:
            return self.function(*args)  # a tape's results are arrays: the derivative would be lost
        found = self._scalars.get(len(args))
        if found is not None and not found[0].keeps_graph:
            floats = _floats(args)
            if floats is not None:
                try:
                    results = found[1](*floats)
                except DOMAIN_ERRORS:
                    pass  # where numpy has infinities and NaNs, the tape below has them, too
                else:
                    return found[2]([np.array(value) for value in results])
        arrays, structure = _opened(args)
        if arrays is not args:  # they are not all arrays
            if STATE.grad_enabled and any(isinstance(x, Tensor) and x.requires_grad for x in arrays):
                return self.function(*args)
            arrays = plain_arrays(arrays)
        signature = structure, tuple([(a.shape, a.dtype) for a in arrays])
        with self._lock:
            tape, pack = self.tapes.get(signature) or self._trace(signature)
            if not tape.keeps_graph:
                return pack(tape.replay(*arrays))
        return self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return Compiled(self.function, self.techniques)

    @restoring
    def _trace(self, signature: Signature) -> tuple[Tape, Pack]:
        # All that is made now stays: the collector would only walk over it, again and again in a long graph.
        collecting = gc.isenabled()
        try:
            gc.disable()
            return self._traced(signature)
        finally:
            if collecting:
                gc.enable()

    def _traced(self, signature: Signature) -> tuple[Tape, Pack]:
        structure, kinds = signature
        for i, (_, dtype) in enumerate(kinds):
            if dtype.kind not in "fiub":
                place = i if structure is None else paths(structure)[i]
                raise DTypeError(
                    f"compile: argument {place} is of {dtype}, and what is compiled takes arrays of real numbers: bind "
                    "all else with functools.partial"
                )
        inputs = [Tensor.symbol(shape, dtype, f"x{i}") for i, (shape, dtype) in enumerate(kinds)]
        with entering(techniques=self.techniques), tracing() as nodes:
            leaves, returned = flatten(self.function(*(inputs if structure is None else unflatten(structure, inputs))))
            outputs = [_output(leaf) for leaf in (leaves if returned.kind is not NoneType else [None])]
            watched = captured(STATE.watched or ())
        tape = Tape(traced(nodes, inputs, outputs, watched), techniques=self.techniques)
        pack = _packing(returned)
        self.tapes[signature] = tape, pack
        if tape.scalar is not None and structure is None and not watched:
            self._scalars[len(inputs)] = tape, tape.scalar, pack
        return tape, pack

    @property
    def source(self) -> str:
        """The tapes made so far as straight-line Python, for reading.

        Those of functions of single numbers are the very source that is executed.
        """
        if not self.tapes:
            raise ReplayError("the function has not been called yet, so nothing is compiled; call it first")
        return "\n\n".join(
            f"# {', '.join(f'{dtype}{shape}' for shape, dtype in kinds)}\n{tape.source}"
            for (_, kinds), (tape, _) in self.tapes.items()
        )


def compile(function: Function, techniques: Techniques = COMPILE_DEFAULTS) -> Compiled:
    """Return `function` as a replayed tape; `compile(grad(f))` and `compile(value_and_grad(f))` work as well.

    See `Compiled` for what is fixed by tracing. Arguments are given by position.

    Raises:
        ConfigurationError: `function` is not callable, or `techniques` are something else.
    """
    check_callable("compile", function)
    if not isinstance(techniques, Techniques):
        raise ConfigurationError(
            f"compile: techniques must be a Techniques, got {type(techniques).__name__}; give the function's arguments "
            "to the compiled function"
        )
    return Compiled(function, techniques)


def _floats(args: Sequence[Any]) -> list[float] | None:
    """Return the arguments as floats if each of them is one float64 number, whatever holds it."""
    floats = []
    for x in args:
        kind = x.__class__
        if kind is float:
            floats.append(x)
        elif kind is np.float64 or (kind is np.ndarray and x.dtype is FLOAT64 and not x.shape):
            floats.append(x.item())
        else:
            return None
    return floats


def _opened(args: tuple[Any, ...]) -> tuple[Sequence[Any], Structure | None]:
    """Return the leaves of all arguments, and their structure; None where each argument is a leaf.

    Where all are arrays, they are the leaves, themselves.
    """
    for x in args:
        if x.__class__ is not np.ndarray:
            leaves, structure = flatten(args)
            return leaves, structure if any(child.kind is not None for child in structure.children) else None
    return args, None


def _packing(structure: Structure) -> Pack:
    """Return what puts a list of leaves into this structure, the shortest way."""
    if structure.kind is None:
        return itemgetter(0)
    if structure.kind is tuple and all(child.kind is None for child in structure.children):
        return tuple
    return partial(unflatten, structure)


def _output(leaf: Any) -> Tensor:
    if isinstance(leaf, (Tensor, np.ndarray)):
        return as_tensor(leaf)
    if isinstance(leaf, (np.number, np.bool_, int, float)):
        return Literal(np.asarray(leaf))  # nothing beside it has a dtype that it would take
    raise TraceError(
        f"compile: the function must return tensors, or tensors in tuples, lists or dicts, got {type(leaf).__name__}"
    )
