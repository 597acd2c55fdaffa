"""The tensor: a numpy array that remembers how it was computed.

A `Tensor` is also the node of the computation graph (the papers' *GraphNode*): it holds the op, the input
tensors and the op's attributes that produced it.  A *concrete* tensor has data; a *symbolic* one, made while a
function is traced, has only a shape and a dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from py_engine.ad.state import STATE, inside_transform
from py_engine.errors import (
    ConfigurationError,
    DTypeError,
    EngineError,
    MissingAttributeError,
    NotDifferentiableError,
    ShapeError,
    TraceError,
)

if TYPE_CHECKING:
    from py_engine.ad.ops.record import Op
    from py_engine.ad.written import Snapshot

Array: TypeAlias = NDArray[Any]
Operand: TypeAlias = "Tensor | ArrayLike"
Axis: TypeAlias = int | tuple[int, ...] | None
Mark: TypeAlias = "bytes | Snapshot | int"
Marks: TypeAlias = "tuple[tuple[Tensor, Mark], ...]"

NO_VALUE: Any = getattr(np, "_NoValue")  # noqa: B009  (what numpy's own signatures have for "not given")

FLOATS = (np.dtype(np.float64), np.dtype(np.float32))


_ndarray = np.ndarray  # looked up once


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
        "level",
        "marks",
        "name",
        "op",
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
    level: int  # of the last transform to begin whose variables it depends on; 0 for a constant, see graph.gradients
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
        if data.__class__ is not np.ndarray:
            check_class(data)
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype
        self.op = None
        self.inputs = ()
        self.attrs = {}
        self.marks = None
        self.level = 1 if requires_grad else 0
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
        tensor.level = 1 if dtype in FLOATS else 0
        tensor.grad = None
        tensor.name = name
        tensor.scope = ""
        return tensor

    # What it is -------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient reaches this tensor: a leaf of which that is asked, or what depends on one."""
        return self.level > 0

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != (self.level > 0):
            self.level = 1 if value else 0

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

    def item(self, *place: Any) -> float:
        """Return the only element, or the one at a place, as a Python number."""
        if place:
            return arguments.checked("item", lambda: self._taken().item(*place), self.shape)  # type: ignore[no-any-return]
        return self._only("a Python number").item()  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers, or a single one as a number."""
        return self._taken().tolist()

    def _only(self, wanted: str) -> Array:
        """Return the values of a tensor of one element."""
        if self.size != 1:
            raise ShapeError(f"only a tensor of one element is {wanted}, this one has shape {self.shape}")
        return self._taken().reshape(())

    def _taken(self) -> Array:
        """Return the values to take Python numbers of, which a replay would not read anew: a trace watches them."""
        if STATE.watched is not None and self.data is not None and self.__class__ is not Literal:
            from py_engine.ad.written import watch

            watch(self.data, "a tensor")
        return self.numpy()

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
            raise DTypeError("a scalar tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, value: Operand) -> bool:
        return bool(ops.any(self == value))

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(
                f"the truth value of a tensor of shape {self.shape} is ambiguous; use numpy.any() or numpy.all()"
            )
        return bool(self._only("a truth value"))

    def __float__(self) -> float:
        if self.requires_grad and STATE.differentiating:  # math.exp(x), and a[0] = x in an array of numpy's, end here
            raise NotDifferentiableError(
                "a Python float of this tensor would lose its derivative; take .item() if only the value is wanted, "
                "or an op of py_engine.ops (numpy's functions instead of math's, np.stack instead of writing into an "
                "array)"
            )
        return float(self._only("a Python float"))

    def __int__(self) -> int:
        return int(self._only("a Python int"))

    def __index__(self) -> int:
        if self.dtype.kind not in "iu" or self.shape:
            raise DTypeError(f"only a single integer is an index, this is a tensor of {self.dtype} {self.shape}")
        return int(self._taken())

    def __complex__(self) -> complex:
        raise DTypeError(COMPLEX)

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if specification else str(self)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if self.requires_grad and STATE.grad_enabled:
            raise NotDifferentiableError(
                "a plain array of this tensor would lose its derivative; take .numpy() if only the values are "
                "wanted, or an op of py_engine.ops that works on tensors"
            )
        return np.array(self._taken(), dtype=dtype, copy=copy)

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
        if function is None:
            raise _unsupported(f"numpy.{ufunc.__name__}" if called else f"numpy.{ufunc.__name__}.{method}")
        if not called or not kwargs:
            return function(*inputs, **kwargs)
        dtype = kwargs.pop("dtype", None)
        arguments.refuse(ufunc.__name__, **{k: (v, *arguments.UFUNC_DEFAULTS.get(k, ())) for k, v in kwargs.items()})
        result = function(*inputs)
        arguments.same_dtype(ufunc.__name__, dtype, result)
        return result

    def __array_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        function = ops.NUMPY.get(func)
        if function is None:
            raise _unsupported(f"{func.__module__}.{func.__name__}")
        if STATE.watched is None or STATE.trace is None:
            return function(*args, **kwargs)
        from py_engine.ad.written import watch_settings

        start = len(STATE.trace)
        result = function(*args, **kwargs)
        watch_settings((*args, *kwargs.values()), STATE.trace[start:])
        return result

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

    def __and__(self, other: Operand) -> Tensor:
        return ops.bitwise("&", ops.logical_and, self, other)

    def __rand__(self, other: Operand) -> Tensor:
        return ops.bitwise("&", ops.logical_and, other, self)

    def __or__(self, other: Operand) -> Tensor:
        return ops.bitwise("|", ops.logical_or, self, other)

    def __ror__(self, other: Operand) -> Tensor:
        return ops.bitwise("|", ops.logical_or, other, self)

    def __xor__(self, other: Operand) -> Tensor:
        return ops.bitwise("^", ops.not_equal, self, other)

    def __rxor__(self, other: Operand) -> Tensor:
        return ops.bitwise("^", ops.not_equal, other, self)

    def __invert__(self) -> Tensor:
        return ops.bitwise("~", ops.logical_not, self)

    def __mod__(self, other: Operand) -> Tensor:
        raise _unsupported("% (numpy.remainder)")

    def __floordiv__(self, other: Operand) -> Tensor:
        raise _unsupported("// (numpy.floor_divide; numpy.floor(x / y) is there)")

    def __divmod__(self, other: Operand) -> Tensor:
        raise _unsupported("divmod (numpy.divmod)")

    def __lshift__(self, other: Operand) -> Tensor:
        raise _unsupported("<< (numpy.left_shift)")

    def __rshift__(self, other: Operand) -> Tensor:
        raise _unsupported(">> (numpy.right_shift)")

    __rmod__, __rfloordiv__, __rdivmod__ = __mod__, __floordiv__, __divmod__
    __rlshift__, __rrshift__ = __lshift__, __rshift__

    def __pos__(self) -> Tensor:
        return self

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
        raise NotDifferentiableError(
            "tensors cannot be written in place, because a gradient may still need the old values; "
            "build the new tensor with where(), concatenate() or stack(), or use assign() on a leaf"
        )

    # Methods that numpy arrays have -----------------------------------------------------------------------

    @property
    def T(self) -> Tensor:
        """The axes in reverse order."""
        return ops.transpose(self)

    @property
    def mT(self) -> Tensor:
        """The last two axes exchanged."""
        return ops.swapaxes(self, -1, -2)

    @property
    def itemsize(self) -> int:
        """The size of one element in bytes."""
        return self.dtype.itemsize

    @property
    def device(self) -> str:
        """Where the elements are."""
        return "cpu"

    @property
    def real(self) -> Tensor:
        """The tensor itself: all numbers are real."""
        return self

    @property
    def imag(self) -> Tensor:
        """Zeros."""
        return Tensor(np.zeros(self.shape, self.dtype))

    def conj(self) -> Tensor:
        """Return the tensor itself: all numbers are real."""
        return self

    conjugate = conj

    def astype(
        self, dtype: DTypeLike, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
    ) -> Tensor:
        """Convert to another dtype."""
        if not (order == "K" and casting == "unsafe" and subok is True and copy is True):
            arguments.refuse(
                "ndarray.astype",
                order=(order, "K"),
                casting=(casting, "unsafe"),
                subok=(subok, True),
                copy=(copy, True),
            )
        return ops.astype(self, dtype)

    def reshape(self, *shape: int | Sequence[int], order: str = "C", copy: bool | None = None) -> Tensor:
        """Return the same elements, in C order, in another shape; one length may be -1."""
        if not shape:
            raise DTypeError("reshape: the lengths are missing; x.reshape(()) is a tensor without axes")
        return ops.reshape(self, _flat(shape), order, copy=copy)

    def ravel(self, order: str = "C") -> Tensor:
        """Return the elements, in C order, as one axis."""
        return ops.ravel(self, order)

    def flatten(self, order: str = "C") -> Tensor:
        """Return the elements, in C order, as one axis in memory of its own."""
        return ops.copy(ops.ravel(self, order))

    def copy(self, order: str = "C") -> Tensor:
        """Return the same values in memory of their own; the gradient passes."""
        return ops.copy(self, order)

    def transpose(self, *axes: Any) -> Tensor:
        """Permute the axes; reverse them when none is given."""
        return ops.transpose(self, _flat(axes) if axes and axes != (None,) else None)

    def squeeze(self, axis: int | tuple[int, ...] | None = None) -> Tensor:
        """Remove axes of length one."""
        return ops.squeeze(self, axis)

    def swapaxes(self, axis1: int, axis2: int) -> Tensor:
        """Exchange two axes."""
        return ops.swapaxes(self, axis1, axis2)

    def clip(
        self, min: Operand | None = NO_VALUE, max: Operand | None = NO_VALUE, out: None = None, **kwargs: Any
    ) -> Tensor:
        """Limit the elements to [min, max]; None leaves that side open."""
        return ops.clip(self, None if min is NO_VALUE else min, None if max is NO_VALUE else max, out, **kwargs)

    def round(self, decimals: int = 0, out: None = None) -> Tensor:
        """Round to the nearest number of so many decimals, halves to even; derivative 0."""
        return ops.round(self, decimals, out)

    def sum(
        self,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        *,
        keepdims: bool = False,
        initial: None = NO_VALUE,
        where: bool = True,
    ) -> Tensor:
        """Sum over axes."""
        return ops.sum(self, axis, dtype, out, keepdims, initial, where)

    def prod(
        self,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        *,
        keepdims: bool = False,
        initial: None = NO_VALUE,
        where: bool = True,
    ) -> Tensor:
        """Product over axes."""
        return ops.prod(self, axis, dtype, out, keepdims, initial, where)

    def mean(
        self,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        *,
        keepdims: bool = False,
        where: bool = True,
    ) -> Tensor:
        """Arithmetic mean over axes."""
        return ops.mean(self, axis, dtype, out, keepdims, where=where)

    def var(
        self,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        ddof: float = 0,
        *,
        keepdims: bool = False,
        where: bool = True,
        mean: None = None,
    ) -> Tensor:
        """Variance over axes."""
        return ops.var(self, axis, dtype, out, ddof, keepdims, where=where, mean=mean)

    def std(
        self,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        ddof: float = 0,
        *,
        keepdims: bool = False,
        where: bool = True,
        mean: None = None,
    ) -> Tensor:
        """Standard deviation over axes."""
        return ops.std(self, axis, dtype, out, ddof, keepdims, where=where, mean=mean)

    def max(
        self,
        axis: Axis = None,
        out: None = None,
        *,
        keepdims: bool = False,
        initial: None = NO_VALUE,
        where: bool = True,
    ) -> Tensor:
        """Largest element over axes."""
        return ops.max(self, axis, out, keepdims, initial, where)

    def min(
        self,
        axis: Axis = None,
        out: None = None,
        *,
        keepdims: bool = False,
        initial: None = NO_VALUE,
        where: bool = True,
    ) -> Tensor:
        """Smallest element over axes."""
        return ops.min(self, axis, out, keepdims, initial, where)

    def argmax(self, axis: int | None = None, out: None = None, *, keepdims: bool = False) -> Tensor:
        """Position of the largest element along an axis, of equal ones the first."""
        return ops.argmax(self, axis, out, keepdims=keepdims)

    def argmin(self, axis: int | None = None, out: None = None, *, keepdims: bool = False) -> Tensor:
        """Position of the smallest element along an axis, of equal ones the first."""
        return ops.argmin(self, axis, out, keepdims=keepdims)

    def any(self, axis: Axis = None, out: None = None, *, keepdims: bool = False, where: bool = True) -> Tensor:
        """Whether any element over axes is not zero."""
        return ops.any(self, axis, out, keepdims, where=where)

    def all(self, axis: Axis = None, out: None = None, *, keepdims: bool = False, where: bool = True) -> Tensor:
        """Whether all elements over axes are not zero."""
        return ops.all(self, axis, out, keepdims, where=where)

    def dot(self, other: Operand, out: None = None) -> Tensor:
        """Inner product, as numpy.dot."""
        return ops.dot(self, other, out)


_WRITES = (
    "tensors cannot be written in place; build the new one with where(), concatenate() or stack(), or use assign()"
)
_VALUES = "take it of x.numpy(), if only the values are wanted"
_SHAPE = "the shape of the result depends on values; take it of x.numpy(), or use where() and a reduction"

MISSING: dict[str, str] = {
    **dict.fromkeys(
        ("fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort", "byteswap"), _WRITES
    ),
    **dict.fromkeys(
        (
            *("argpartition", "argsort", "base", "ctypes", "dump", "dumps", "flags", "getfield", "newbyteorder"),
            *("searchsorted", "strides", "tobytes", "tofile", "tostring", "to_device", "ptp"),
        ),
        _VALUES,
    ),
    **dict.fromkeys(("compress", "nonzero"), _SHAPE),
    "choose": "write where(), or index a stack of the choices",
    "cumprod": "there is no such op; write scan(), or make it one with custom_rule()",
    "cumsum": "there is no such op; write a product with a triangular matrix of ones, or scan()",
    "diagonal": "write x[numpy.arange(n), numpy.arange(n)]",
    "flat": "write x.ravel()",
    "repeat": "write x[numpy.repeat(numpy.arange(len(x)), n)]",
    "take": "write x[indices]",
    "trace": "write x[numpy.arange(n), numpy.arange(n)].sum()",
    "view": "write x.astype() for another dtype, x.reshape() for another shape",
}
"""Attributes of arrays that tensors don't have, and what to write instead."""


class _Missing:
    """An attribute that raises, so that `hasattr` says no; a `__getattr__` would slow down every other attribute."""

    def __init__(self, name: str, advice: str) -> None:
        self.message = f"a tensor has no {name}: {advice}"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise MissingAttributeError(self.message)


for _name, _advice in MISSING.items():
    setattr(Tensor, _name, _Missing(_name, _advice))


class Literal(Tensor):
    """A number written in the program: a 0-d constant that never changes, so that graphs may fold it."""

    __slots__ = ()

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self


class Node:
    """An op that was applied and has several results, each of them a `Result`.

    It holds their values, not the tensors: who needs a result once more, as a rule does, gets a tensor of it anew.
    """

    __slots__ = ("_live", "attrs", "inputs", "kinds", "level", "marks", "op", "scope", "values", "variables")

    def __init__(
        self, op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], kinds: Sequence[tuple[Any, Any]], level: int
    ) -> None:
        self.op, self.inputs, self.attrs, self.kinds, self.level = op, inputs, attrs, tuple(kinds), level
        self.scope = STATE.scope
        self.marks: Marks | None = None
        self.values: Sequence[Any] = (None,) * len(self.kinds)
        self.variables: tuple[Result, ...] = ()  # the results themselves, where they have no values
        self._live: list[Any] = [None] * len(self.kinds)

    def result(self, i: int) -> Result:
        """Return result `i`: always the same tensor, as long as anybody holds it."""
        if self.variables:
            return self.variables[i]
        found = self.known(i)
        if found is None:
            found = Result(self, i)
            self._live[i] = weakref.ref(found)
        return found

    def known(self, i: int) -> Result | None:
        """Return result `i` if anybody holds it."""
        if self.variables:
            return self.variables[i]
        return None if self._live[i] is None else self._live[i]()


class Result(Tensor):
    """One of the results of an op that has several."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int) -> None:
        self.node, self.index = node, index
        self.shape, self.dtype = node.kinds[index]
        self.data = node.values[index]
        self.op, self.inputs, self.attrs = node.op, node.inputs, node.attrs
        self.level = node.level if self.dtype in FLOATS else 0
        self.scope = node.scope
        self.marks = self.grad = None
        self.name = ""


COMPLEX = "complex numbers are not supported; pass real and imaginary parts separately"


def check_class(x: Any) -> None:
    """Raise `DTypeError` for an array of a class of its own, such as a matrix or a masked array."""
    kind = x.__class__
    if isinstance(x, np.ndarray) and kind is not np.ndarray and kind is not np.memmap:
        way = "x.filled(value) and a mask of one's own" if isinstance(x, np.ma.MaskedArray) else "numpy.asarray(x)"
        raise DTypeError(f"a {kind.__module__}.{kind.__name__} has rules that tensors do not follow; pass {way}")


def plain_array(x: Any, dtype: DTypeLike | None = None) -> Array:
    """Return what numpy makes of `x` as an array.

    Raises:
        DTypeError: it is an array of a class of its own.
        ShapeError: it is made of lists of different lengths.
    """
    check_class(x)
    try:
        return np.asarray(x, dtype)
    except EngineError:
        raise
    except ValueError as error:
        raise ShapeError(f"expected an array of numbers, got a {type(x).__name__} that is none: {error}") from None
    except (TypeError, OverflowError) as error:
        raise DTypeError(f"expected an array of numbers, got a {type(x).__name__} that is none: {error}") from None


def real_array(x: Array, given: Any = NO_VALUE) -> Array:
    """Return an array of real numbers or truth values that means to numpy what it means here.

    Args:
        x: the array.
        given: what it was made of, for messages; not given: the array itself.

    Raises:
        DTypeError: it holds something else, in another byte order, or is of a class of its own, whose operators
            are others (a matrix) or whose elements may be missing (a masked array).
    """
    check_class(x)
    if x.dtype.kind not in "fiub":
        if x.dtype.kind == "c":
            raise DTypeError(COMPLEX)
        what = f"an array of {x.dtype}" if given is NO_VALUE else f"a {type(given).__name__}"
        raise DTypeError(f"expected a number or an array of numbers, got {what}")
    if not x.dtype.isnative:
        raise DTypeError(
            f"{x.dtype} is not this machine's byte order; convert with x.astype(x.dtype.newbyteorder('='))"
        )
    return x


def tensor(data: Operand, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor from anything numpy understands; the array is copied.

    Args:
        data: array, nested lists or number; or a tensor, whose copy is part of its graph, so that gradients flow
            through it, unless `requires_grad` asks for a leaf.
        dtype: the element type; None keeps that of an array and takes float64 for Python floats.
        requires_grad: whether `backward()` stores a gradient here: a new leaf.

    Raises:
        NotDifferentiableError: a new leaf of a tensor that a gradient may flow through.
        DTypeError: `data` are not real numbers or truth values, or an array of a class with rules of its own.
        ShapeError: `data` are nested lists of different lengths.
    """
    if not isinstance(data, Tensor):
        return Tensor(real_array(np.array(plain_array(data, dtype)), data), requires_grad)
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
    if name.removeprefix("numpy.") in SHAPE_FROM_VALUES:
        return NotDifferentiableError(
            f"{name} has a result whose shape depends on values, which no op has; call it on .numpy() if only the "
            "values are wanted, or use where() and a reduction"
        )
    return NotDifferentiableError(
        f"{name} is not in the op table, so its derivative would be lost; use an op of py_engine.ops, make "
        "it one with custom_rule(), or call it on .numpy() if only the values are wanted"
    )


SHAPE_FROM_VALUES = frozenset(
    (
        *("argwhere", "compress", "delete", "extract", "flatnonzero", "intersect1d", "nonzero", "setdiff1d"),
        *("setxor1d", "trim_zeros", "union1d", "unique", "unique_all", "unique_counts", "unique_inverse"),
        "unique_values",
    )
)


def _flat(shape: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], Iterable) and not isinstance(shape[0], Tensor):
        if STATE.watched is not None:
            from py_engine.ad.written import watch_setting

            watch_setting(shape[0])
        return tuple(shape[0])
    return shape  # type: ignore[return-value]


from py_engine.ad import ops  # noqa: E402  (the ops need the class above, its methods need the ops)
from py_engine.ad.ops import arguments  # noqa: E402
