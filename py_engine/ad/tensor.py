"""The tensor: a numpy array that remembers how it was computed.

A `Tensor` is also the node of the computation graph (the papers' *GraphNode*): it holds the op, the input
tensors and the op's attributes that produced it.  A *concrete* tensor has data; a *symbolic* one, made while a
function is traced, has only a shape and a dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, TraceError

if TYPE_CHECKING:
    from py_engine.ad.ops.record import Op
    from py_engine.ad.written import Snapshot

Array: TypeAlias = NDArray[Any]
Operand: TypeAlias = "Tensor | ArrayLike"
Mark: TypeAlias = "bytes | Snapshot | int"
Marks: TypeAlias = "tuple[tuple[Tensor, Mark], ...]"

FLOATS = (np.dtype(np.float64), np.dtype(np.float32))


class Record(list["Tensor"]):
    """Stands for a trace where ops are computed eagerly and yet all of them are recorded, in order."""


class _State(threading.local):
    """What the engine is doing in this thread."""

    trace: list[Tensor] | None = None  # while a function is traced: its ops so far, all symbolic (but in a Record)
    recording: bool = True  # ops made now can be differentiated
    differentiating: bool = False  # inside a function that grad() was given
    scope: str = ""  # the layer whose ops are being made, for messages


STATE = _State()

_ndarray = np.ndarray  # looked up once


def inside_transform() -> bool:
    """Return whether a function is being differentiated or traced in this thread."""
    return STATE.differentiating or STATE.trace is not None


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Label the ops made inside with the layer `name`; nested scopes are joined by a slash."""
    outer = STATE.scope
    STATE.scope = f"{outer}/{name}" if outer else name
    try:
        yield
    finally:
        STATE.scope = outer


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without recording: results made inside cannot be differentiated."""
    outer = STATE.recording
    STATE.recording = False
    try:
        yield
    finally:
        STATE.recording = outer


class Tensor:
    """A numpy array with a derivative.

    Args:
        data: the array; it is kept by reference, not copied, and must not be written to before the gradients that
            need it are found: that is detected (see `InPlaceError`).
        requires_grad: whether `backward()` stores a gradient here and ops on it are recorded.

    `copy.copy` and `copy.deepcopy` of a tensor that was computed, or inside a function that is differentiated or
    traced, are ops: gradients flow through them. Outside, the copy of a leaf is a leaf of its own, with
    `requires_grad`, name and `.grad`, which share their memory with the original's in `copy.copy` only. Tensors are
    not pickled.

    Raises:
        DTypeError: `requires_grad` with a dtype other than float32 or float64; `data` is no array.
    """

    __slots__ = (
        "__weakref__",
        "attrs",
        "data",
        "dtype",
        "grad",
        "inputs",
        "marks",
        "name",
        "op",
        "requires_grad",
        "scope",
        "shape",
    )

    data: Array | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    op: Op | None
    inputs: tuple[Tensor, ...]
    attrs: Mapping[str, Any]
    marks: Marks | None  # of the arrays that the op was given, see written.py
    requires_grad: bool
    grad: Array | None
    name: str
    scope: str

    def __init__(self, data: Array, requires_grad: bool = False, name: str = "") -> None:
        if data.__class__ is not _ndarray and not isinstance(data, (np.ndarray, np.generic)):
            raise DTypeError(
                f"Tensor: expected a numpy array, got {'a tensor' if isinstance(data, Tensor) else type(data).__name__}"
                "; tensor() makes one from anything, and copies a tensor as part of its graph"
            )
        if requires_grad and data.dtype not in FLOATS:
            raise DTypeError(
                f"only float32 and float64 tensors have a gradient, this one is {data.dtype}; "
                "convert it first, for example with x.astype(np.float32)"
            )
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype
        self.op = None
        self.inputs = ()
        self.attrs = {}
        self.marks = None
        self.requires_grad = requires_grad
        self.grad = None
        self.name = name
        self.scope = ""

    @classmethod
    def symbol(cls, shape: tuple[int, ...], dtype: DTypeLike, name: str = "") -> Tensor:
        """Return a tensor without data: an input of a graph that is being traced."""
        dtype = np.dtype(dtype)
        tensor = cls.__new__(cls)
        tensor.data = None
        tensor.shape = tuple(shape)
        tensor.dtype = dtype
        tensor.op = None
        tensor.inputs = ()
        tensor.attrs = {}
        tensor.marks = None
        tensor.requires_grad = dtype in FLOATS
        tensor.grad = None
        tensor.name = name
        tensor.scope = ""
        return tensor

    # What it is -------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.size * self.dtype.itemsize

    def numpy(self) -> Array:
        """Return the array itself, not a copy; read-only if it was computed and a gradient may need it.

        Raises:
            TraceError: the tensor is symbolic: its values exist only when the traced function is replayed.
        """
        if self.data is None:
            raise TraceError(
                "a value is needed here, but the function is being traced and only shapes are known; use "
                "ops such as where() instead of Python branches on values, or call the function eagerly"
            )
        if self.op is not None:
            array = self.data.view()
            array.flags.writeable = False
            return array
        return self.data

    def item(self) -> float:
        """Return the only element as a Python number."""
        return self.numpy().item()  # type: ignore[no-any-return]

    def detach(self) -> Tensor:
        """Return the same values as a constant: no gradient flows through it."""
        return ops.stop_gradient(self)

    def assign(self, values: ArrayLike) -> None:
        """Copy `values` into this leaf in place, so that compiled functions that captured it see them.

        Raises:
            TraceError: the tensor was computed from others, whose gradients would become wrong.
        """
        if self.op is not None:
            raise TraceError(f"assign() works on leaf tensors, this one was computed by {self.op.name}")
        self.numpy()[...] = values

    def backward(self, gradient: ArrayLike | None = None) -> None:
        """Add the derivative of this scalar to `.grad` of every leaf that requires it.

        Args:
            gradient: the upstream gradient, with this tensor's shape; required unless it is a scalar.
        """
        from py_engine.ad.graph import backward

        backward(self, gradient)

    def __repr__(self) -> str:
        what = "symbolic" if self.data is None else np.array2string(self.data, separator=", ", threshold=20)
        made = f", op={self.op.name}" if self.op else ""
        return f"Tensor({what}, shape={self.shape}, dtype={self.dtype}{made})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __float__(self) -> float:
        if self.requires_grad and STATE.differentiating:  # math.exp(x), and a[0] = x in an array of numpy's, end here
            raise NotDifferentiableError(
                "a Python float of this tensor would lose its derivative; take .item() if only the value is wanted, "
                "or an op of py_engine.ops (numpy's functions instead of math's, np.stack instead of writing into an "
                "array)"
            )
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if self.requires_grad and STATE.recording:
            raise NotDifferentiableError(
                "a plain array of this tensor would lose its derivative; take .numpy() if only the values are "
                "wanted, or an op of py_engine.ops that works on tensors"
            )
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    # Copies -----------------------------------------------------------------------------------------------
    #
    # A copy of what others may differentiate through is an op, part of the graph. That of a leaf, outside of any
    # transform, is a leaf of its own.

    def _is_free(self) -> bool:
        """Whether this is a leaf that no transform around can differentiate by."""
        return self.op is None and self.data is not None and not inside_transform()

    def __copy__(self) -> Tensor:
        if not self._is_free():
            return ops.identity(self)
        found = self.__class__(self.data, self.requires_grad, self.name)  # type: ignore[arg-type]  # not None
        found.grad = self.grad
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self._is_free():
            found: Tensor = ops.TABLE["copy"].apply((self,), {})
        else:
            found = self.__class__(np.array(self.data), self.requires_grad, self.name)
            found.grad = None if self.grad is None else np.array(self.grad)
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "tensors are not pickled: what they were computed from would be lost; save their arrays, for example "
            "np.save(file, x.numpy()), or a chain's with np.savez(file, **chain.parameters.as_dict())"
        )

    # numpy's own functions --------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        called = method == "__call__"
        function = ops.NUMPY.get(ufunc if called else (ufunc, method))
        if called and function is not None and not kwargs:
            return function(*inputs)
        name = f"numpy.{ufunc.__name__}" if called else f"numpy.{ufunc.__name__}.{method}"
        if function is None:
            raise _unsupported(name)
        if "out" in kwargs or (called and kwargs):
            raise NotDifferentiableError(
                f"{name} on tensors does not take {', '.join(kwargs)}: its result is always a new tensor of the "
                "operands' dtype"
            )
        if method == "reduce":
            kwargs.setdefault("axis", 0)  # what numpy's reductions do, unlike numpy.sum
        return function(*inputs, **kwargs)

    def __array_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        function = ops.NUMPY.get(func)
        if function is None:
            raise _unsupported(f"{func.__module__}.{func.__name__}")
        return function(*args, **kwargs)

    # Operators --------------------------------------------------------------------------------------------

    def __add__(self, other: Operand) -> Tensor:
        return ops.add(self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return ops.add(other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return ops.sub(self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return ops.sub(other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return ops.mul(self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return ops.mul(other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return ops.div(self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return ops.div(other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return ops.pow(self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return ops.pow(other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return ops.matmul(other, self)

    def __neg__(self) -> Tensor:
        return ops.neg(self)

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __lt__(self, other: Operand) -> Tensor:
        return ops.less(self, other)

    def __le__(self, other: Operand) -> Tensor:
        return ops.less_equal(self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return ops.greater(self, other)

    def __ge__(self, other: Operand) -> Tensor:
        return ops.greater_equal(self, other)

    def __eq__(self, other: Operand) -> Tensor:  # type: ignore[override]  # elementwise, as numpy's
        return ops.equal(self, other)

    def __ne__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return ops.not_equal(self, other)

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "tensors cannot be written in place, because a gradient may still need the old values; "
            "build the new tensor with where(), concatenate() or stack(), or use assign() on a leaf"
        )

    # Methods that numpy arrays have -----------------------------------------------------------------------

    @property
    def T(self) -> Tensor:
        """The axes in reverse order."""
        return ops.transpose(self)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Convert to another dtype."""
        return ops.astype(self, dtype)

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """Return the same elements, in C order, in another shape; one length may be -1."""
        return ops.reshape(self, _flat(shape))

    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """Permute the axes; reverse them when none is given."""
        return ops.transpose(self, _flat(axes) if axes else None)

    def squeeze(self, axis: int | tuple[int, ...] | None = None) -> Tensor:
        """Remove axes of length one."""
        return ops.squeeze(self, axis)

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """Sum over axes."""
        return ops.sum(self, axis, keepdims)

    def mean(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """Arithmetic mean over axes."""
        return ops.mean(self, axis, keepdims)

    def var(self, axis: int | tuple[int, ...] | None = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        """Variance over axes."""
        return ops.var(self, axis, ddof=ddof, keepdims=keepdims)

    def max(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """Largest element over axes."""
        return ops.max(self, axis, keepdims)

    def min(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """Smallest element over axes."""
        return ops.min(self, axis, keepdims)

    def dot(self, other: Operand) -> Tensor:
        """Inner product, as numpy.dot."""
        return ops.dot(self, other)


class Literal(Tensor):
    """A number written in the program: a 0-d constant that never changes, so that graphs may fold it."""

    __slots__ = ()

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self


def tensor(data: Operand, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor from anything numpy understands; the array is copied.

    Args:
        data: array, nested lists or number; or a tensor, whose copy is part of its graph, so that gradients flow
            through it, unless `requires_grad` asks for a leaf.
        dtype: the element type; None keeps that of an array and takes float64 for Python floats.
        requires_grad: whether `backward()` stores a gradient here: a new leaf.

    Raises:
        NotDifferentiableError: a new leaf of a tensor that a gradient may flow through.
    """
    if not isinstance(data, Tensor):
        return Tensor(np.array(data, dtype=dtype), requires_grad)
    if requires_grad:
        if not data._is_free():
            raise NotDifferentiableError(
                "tensor: with requires_grad=True a tensor that was computed, or that a function being differentiated "
                "or traced uses, would become a leaf, which no gradient passes; leave requires_grad out to copy it, "
                "or take .detach() first if only its values are wanted"
            )
        return Tensor(np.array(data.data, dtype=dtype), True)
    copied: Tensor = ops.TABLE["copy"].apply((data,), {})
    return copied if dtype is None else ops.astype(copied, dtype)


def _unsupported(name: str) -> NotDifferentiableError:
    return NotDifferentiableError(
        f"{name} is not in the op table, so its derivative would be lost; use an op of py_engine.ops, make "
        "it one with custom_rule(), or call it on .numpy() if only the values are wanted"
    )


def _flat(shape: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)):
        return tuple(shape[0])
    return shape  # type: ignore[return-value]


from py_engine.ad import ops  # noqa: E402  (the ops need the class above, its methods need the ops)
