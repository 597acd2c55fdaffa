"""What tensors do by ops: operators, numpy's functions, array methods, copies, conversions to Python's numbers.

`py_engine.ad.tensor` knows no ops; the methods here are attached to its class when the engine is imported.
"""

# The methods belong to Tensor, not to the class that they are written in:
# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from py_engine.ad import ops
from py_engine.ad.mutation import watch, watch_setting, watch_settings
from py_engine.ad.op import CONSTANT, NUMPY, TABLE, Op
from py_engine.ad.ops import arguments, scipy_functions, ufuncs
from py_engine.ad.ops.elementary import bitwise
from py_engine.ad.reverse import backward
from py_engine.ad.state import STATE
from py_engine.ad.tensor import (
    COMPLEX,
    FLOATS,
    NO_VALUE,
    Array,
    Axis,
    Literal,
    Operand,
    Tensor,
    plain_array,
    real_array,
)
from py_engine.errors import DTypeError, MissingAttributeError, NotDifferentiableError, ShapeError, TraceError

Binary: TypeAlias = Callable[[Tensor, Operand], Tensor]


def _operator(op: Callable[..., Tensor]) -> Binary:
    def operator(self: Tensor, other: Operand) -> Tensor:
        return op(self, other)

    return operator


def _reflected(op: Callable[..., Tensor]) -> Binary:
    def operator(self: Tensor, other: Operand) -> Tensor:
        return op(other, self)

    return operator


def numpy_state(name: str, function: Any) -> str:
    """Return what becomes of numpy's function on tensors: "derivatives of any order", "constant" or why it is refused.

    Args:
        name: as `numpy.` or `numpy.linalg.` has it.
        function: numpy's own.
    """
    stand_in = NUMPY.get(function)
    if stand_in is not None:
        constant = stand_in.constant if isinstance(stand_in, Op) else function in CONSTANT
        state = "constant" if constant else "derivatives of any order"
        if name in WITHOUT_DERIVATIVE:
            state = f"{state}; none of {WITHOUT_DERIVATIVE[name]}"
        return f"{state}; refused in traced functions: {SHAPE}" if name in SHAPE_FROM_VALUES else state
    return f"refused: {REFUSED.get(name, 'there is no op')}"


SHAPE = "the shape of its result depends on values"
SHAPE_FROM_VALUES = frozenset(
    (
        *("argwhere", "bincount", "compress", "extract", "flatnonzero", "intersect1d", "nonzero", "piecewise"),
        *("polydiv", "polymul", "setdiff1d", "setxor1d", "trim_zeros", "union1d", "unique", "linalg.lstsq"),
    )
)
"""Functions that need values, which a function that is traced does not have."""

WITHOUT_DERIVATIVE = {
    "linalg.qr": "the columns that complete q in the mode 'complete'",
    "linalg.svd": "the vectors that complete u or vt with full_matrices",
}
"""What of a function's results has no derivative, and raises where one is asked for."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(("unique_all", "unique_counts", "unique_inverse", "unique_values"), f"{SHAPE}; use unique()"),
    **dict.fromkeys(
        ("copyto", "put", "put_along_axis", "putmask", "place", "fill_diagonal"), "it writes into its argument"
    ),
    **dict.fromkeys(("roots", "sort_complex", "linalg.eig", "linalg.eigvals"), "its result is complex"),
    **dict.fromkeys(("save", "savetxt", "savez", "savez_compressed"), "it writes a file; pass x.numpy()"),
    **dict.fromkeys(
        ("busday_count", "busday_offset", "datetime_as_string", "is_busday", "isnat"), "it is for dates and times"
    ),
    **dict.fromkeys(("packbits", "unpackbits"), "it is for the bits of whole numbers; pass x.numpy()"),
    **dict.fromkeys(
        ("may_share_memory", "shares_memory"), "what memory a tensor has is up to the engine; ask it of x.numpy()"
    ),
}
"""Why functions of numpy's are refused on tensors, by name."""


def _unsupported(name: str) -> NotDifferentiableError:
    reason = REFUSED.get(name.removeprefix("numpy."))
    if name.endswith(".at"):
        reason = REFUSED["put"]
    if reason is not None:
        return NotDifferentiableError(
            f"{name} is refused on tensors: {reason}. Call it on .numpy() if only the values are wanted: their "
            "derivative is lost"
        )
    return NotDifferentiableError(
        f"{name} is not in the op table, so its derivative would be lost; use an op of py_engine.ops, make "
        "it one with custom_rule(), or call it on .numpy() if only the values are wanted"
    )


class Operators:
    """The methods of `Tensor` that need ops."""

    __slots__ = ()

    # Values -----------------------------------------------------------------------------------------------

    def item(self: Tensor, *place: Any) -> float:
        """Return the only element, or the one at a place, as a Python number."""
        if place:
            return arguments.checked("item", lambda: self._taken().item(*place), self.shape)  # type: ignore[no-any-return]
        return self._only("a Python number").item()  # type: ignore[no-any-return]

    def tolist(self: Tensor) -> Any:
        """Return the elements as nested lists of Python numbers, or a single one as a number."""
        return self._taken().tolist()

    def _only(self: Tensor, wanted: str) -> Array:
        """Return the values of a tensor of one element."""
        if self.size != 1:
            raise ShapeError(f"only a tensor of one element is {wanted}, this one has shape {self.shape}")
        return self._taken().reshape(())

    def _taken(self: Tensor) -> Array:
        """Return the values to take Python numbers of, which a replay would not read anew: a trace watches them."""
        if STATE.watched is not None and self.data is not None and self.__class__ is not Literal:
            watch(self.data, "a tensor", self)
        return self.numpy()

    def detach(self: Tensor) -> Tensor:
        """Return the same values as a constant: no gradient flows through it."""
        return ops.stop_gradient(self)

    def backward(self: Tensor, gradient: ArrayLike | None = None) -> None:
        """Add the derivative of this scalar to `.grad` of every leaf that requires it.

        Args:
            gradient: the upstream gradient, with this tensor's shape; required unless it is a scalar.

        Raises:
            ShapeError: the gradient's shape is not this tensor's, or it is missing.
            NotDifferentiableError: nothing that this tensor depends on requires a gradient.
        """
        backward(self, gradient)

    def __iter__(self: Tensor) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __contains__(self: Tensor, value: Operand) -> bool:
        return bool(ops.any(self == value))

    def __bool__(self: Tensor) -> bool:
        if self.size != 1:
            raise ShapeError(
                f"the truth value of a tensor of shape {self.shape} is ambiguous; use numpy.any() or numpy.all()"
            )
        return bool(self._only("a truth value"))

    def __float__(self: Tensor) -> float:
        if self.requires_grad and STATE.differentiating:  # math.exp(x), and a[0] = x in an array of numpy's, end here
            raise NotDifferentiableError(
                "a Python float of this tensor would lose its derivative; take .item() if only the value is wanted, "
                "or an op of py_engine.ops (numpy's functions instead of math's, np.stack instead of writing into an "
                "array)"
            )
        return float(self._only("a Python float"))

    def __int__(self: Tensor) -> int:
        return int(self._only("a Python int"))

    def __index__(self: Tensor) -> int:
        if self.dtype.kind not in "iu" or self.shape:
            raise DTypeError(f"only a single integer is an index, this is a tensor of {self.dtype} {self.shape}")
        return int(self._taken())

    def __complex__(self: Tensor) -> complex:
        raise DTypeError(COMPLEX)

    def __format__(self: Tensor, specification: str) -> str:
        return format(self.item(), specification) if specification else str(self)

    def __array__(self: Tensor, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if self.requires_grad and STATE.grad_enabled:
            raise NotDifferentiableError(
                "a plain array of this tensor would lose its derivative; take .numpy() if only the values are "
                "wanted, or an op of py_engine.ops that works on tensors (of several, np.stack or np.concatenate)"
            )
        if self.data is None:
            raise TraceError(
                "numpy needs the values of this tensor, but the function is being traced and only shapes are known; an "
                "array that it is an index of must be a tensor, too: py_engine.tensor(a)[x], py_engine.ops.take(a, x); "
                "for branches and loops on values there are where(), cond(), while_loop() and scan()"
            )
        return np.array(self._taken(), dtype=dtype, copy=copy)

    # Copies -----------------------------------------------------------------------------------------------
    #
    # A copy of what others may differentiate through is an op, part of the graph. That of a leaf, outside of any
    # transform, is a separate leaf.

    def __copy__(self: Tensor) -> Tensor:
        if not self._is_free():
            return ops.identity(self)
        found = self.__class__(self.data, self.requires_grad, self.name)  # type: ignore[arg-type]  # not None
        found.grad = self.grad
        return found

    def __deepcopy__(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if not self._is_free():
            found: Tensor = TABLE["copy"].apply((self,), {})
        else:
            found = self.__class__(np.array(self.data), self.requires_grad, self.name)
            found.grad = None if self.grad is None else np.array(self.grad)
        memo[id(self)] = found
        return found

    # numpy's own functions --------------------------------------------------------------------------------

    def __array_ufunc__(self: Tensor, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        called = method == "__call__"
        function = NUMPY.get(ufunc if called else (ufunc, method))
        if function is None:
            function = scipy_functions.stand_in(ufunc) if called else ufuncs.method_of(ufunc, method)
        if function is None:
            name = scipy_functions.full_name(ufunc)
            raise _unsupported(name if called else f"{name}.{method}")
        if not called or not kwargs:
            return function(*inputs, **kwargs)
        dtype = kwargs.pop("dtype", None)
        arguments.refuse(ufunc.__name__, **{k: (v, *arguments.UFUNC_DEFAULTS.get(k, ())) for k, v in kwargs.items()})
        if dtype is not None and arguments.as_dtype(dtype) in FLOATS:  # the operands are converted, as numpy's are
            arrays = [x for x in inputs if isinstance(x, (Tensor, np.ndarray))]
            if all(x.dtype in FLOATS for x in arrays):
                inputs = tuple([ops.astype(x, dtype) if isinstance(x, (Tensor, np.ndarray)) else x for x in inputs])
        result = function(*inputs)
        for found in result if isinstance(result, tuple) else (result,):
            arguments.same_dtype(ufunc.__name__, dtype, found)
        return result

    def __array_function__(
        self: Tensor, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        function = NUMPY.get(func)
        if function is None:
            raise _unsupported(f"{func.__module__}.{func.__name__}")
        if STATE.watched is None or STATE.trace is None:
            return function(*args, **kwargs)
        start = len(STATE.trace)
        result = function(*args, **kwargs)
        watch_settings((*args, *kwargs.values()), STATE.trace[start:])
        return result

    # Operators --------------------------------------------------------------------------------------------

    __add__: Binary = _operator(ops.add)
    __radd__: Binary = _reflected(ops.add)
    __sub__: Binary = _operator(ops.sub)
    __rsub__: Binary = _reflected(ops.sub)
    __mul__: Binary = _operator(ops.mul)
    __rmul__: Binary = _reflected(ops.mul)
    __truediv__: Binary = _operator(ops.div)
    __rtruediv__: Binary = _reflected(ops.div)
    __pow__: Binary = _operator(ops.pow)
    __rpow__: Binary = _reflected(ops.pow)
    __matmul__: Binary = _operator(ops.matmul)
    __rmatmul__: Binary = _reflected(ops.matmul)
    __and__: Binary = _operator(partial(bitwise, "&", ops.logical_and))
    __rand__: Binary = _reflected(partial(bitwise, "&", ops.logical_and))
    __or__: Binary = _operator(partial(bitwise, "|", ops.logical_or))
    __ror__: Binary = _reflected(partial(bitwise, "|", ops.logical_or))
    __xor__: Binary = _operator(partial(bitwise, "^", ops.not_equal))
    __rxor__: Binary = _reflected(partial(bitwise, "^", ops.not_equal))
    __mod__: Binary = _operator(ops.mod)
    __rmod__: Binary = _reflected(ops.mod)
    __floordiv__: Binary = _operator(ops.floor_divide)
    __rfloordiv__: Binary = _reflected(ops.floor_divide)
    __lshift__: Binary = _operator(ufuncs.left_shift)
    __rlshift__: Binary = _reflected(ufuncs.left_shift)
    __rshift__: Binary = _operator(ufuncs.right_shift)
    __rrshift__: Binary = _reflected(ufuncs.right_shift)
    __lt__: Binary = _operator(ops.less)
    __le__: Binary = _operator(ops.less_equal)
    __gt__: Binary = _operator(ops.greater)
    __ge__: Binary = _operator(ops.greater_equal)
    __eq__: Binary = _operator(ops.equal)  # type: ignore[assignment]  # elementwise, as numpy's
    __ne__: Binary = _operator(ops.not_equal)  # type: ignore[assignment]

    def __divmod__(self: Tensor, other: Operand) -> tuple[Tensor, Tensor]:
        return ops.floor_divide(self, other), ops.mod(self, other)

    def __rdivmod__(self: Tensor, other: Operand) -> tuple[Tensor, Tensor]:
        return ops.floor_divide(other, self), ops.mod(other, self)

    def __pos__(self: Tensor) -> Tensor:
        return self

    def __neg__(self: Tensor) -> Tensor:
        return ops.neg(self)

    def __abs__(self: Tensor) -> Tensor:
        return ops.abs(self)

    def __round__(self: Tensor, ndigits: int | None = None) -> Tensor:
        return ops.round(self, ndigits or 0)

    def __invert__(self: Tensor) -> Tensor:
        return bitwise("~", ops.logical_not, self)

    __hash__ = object.__hash__

    def __getitem__(self: Tensor, index: Any) -> Tensor:
        return ops.getitem(self, index)

    def __setitem__(self: Tensor, index: Any, value: Any) -> None:
        raise NotDifferentiableError(
            "tensors cannot be written in place, because a gradient may still need the old values; "
            "build the new tensor with where(), concatenate() or stack(), or use assign() on a leaf"
        )

    # Methods that numpy arrays have -----------------------------------------------------------------------

    @property
    def T(self: Tensor) -> Tensor:
        """The axes in reverse order."""
        return ops.transpose(self)

    @property
    def mT(self: Tensor) -> Tensor:
        """The last two axes exchanged."""
        return ops.swapaxes(self, -1, -2)

    @property
    def itemsize(self: Tensor) -> int:
        """The size of one element in bytes."""
        return self.dtype.itemsize

    @property
    def device(self: Tensor) -> str:
        """Where the elements are."""
        return "cpu"

    @property
    def real(self: Tensor) -> Tensor:
        """The tensor itself: all numbers are real."""
        return self

    @property
    def imag(self: Tensor) -> Tensor:
        """Zeros."""
        return Tensor(np.zeros(self.shape, self.dtype))

    def conj(self: Tensor) -> Tensor:
        """Return the tensor itself: all numbers are real."""
        return self

    conjugate = conj

    def astype(
        self: Tensor, dtype: DTypeLike, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
    ) -> Tensor:
        """Convert to another dtype."""
        given = {"order": (order, "K"), "casting": (casting, "unsafe"), "subok": (subok, True), "copy": (copy, True)}
        arguments.refuse("ndarray.astype", **given)
        return ops.astype(self, dtype)

    # Those whose parameters are those of numpy's function, the tensor first.
    ravel, squeeze, swapaxes, round, dot = ops.ravel, ops.squeeze, ops.swapaxes, ops.round, ops.dot
    sum, prod, mean, max, min = ops.sum, ops.prod, ops.mean, ops.max, ops.min
    argmax, argmin, argsort, searchsorted = ops.argmax, ops.argmin, ops.argsort, ops.searchsorted
    cumsum, cumprod, trace, diagonal = ops.cumsum, ops.cumprod, ops.trace, ops.diagonal
    repeat, take = ops.repeat, ops.take

    def compress(self: Tensor, condition: Operand, axis: int | None = None, out: None = None) -> Tensor:
        """Return the elements where a condition of known values holds, along an axis or in C order."""
        return NUMPY[np.compress](condition, self, axis, out)  # type: ignore[no-any-return]

    def choose(self: Tensor, choices: Sequence[Operand], out: None = None, mode: str = "raise") -> Tensor:
        """Return for each place the element of that one of the choices whose number is there."""
        return NUMPY[np.choose](self, choices, out, mode)  # type: ignore[no-any-return]

    def nonzero(self: Tensor) -> tuple[Tensor, ...]:
        """Return the places of the elements that are not 0, an array for each axis; values must be known."""
        return NUMPY[np.nonzero](self)  # type: ignore[no-any-return]

    def argpartition(
        self: Tensor,
        kth: int | Sequence[int],
        axis: int | None = -1,
        kind: str = "introselect",
        order: None = None,
    ) -> Tensor:
        """Return positions of the elements, of smaller ones before those of larger ones than the `kth`."""
        return NUMPY[np.argpartition](self, kth, axis, kind, order)  # type: ignore[no-any-return]

    def any(
        self: Tensor, axis: Axis = None, out: None = None, *, keepdims: bool = False, where: Operand = True
    ) -> Tensor:
        """Whether any element over axes is not zero."""
        return ops.any(self, axis, out, keepdims, where=where)

    def all(
        self: Tensor, axis: Axis = None, out: None = None, *, keepdims: bool = False, where: Operand = True
    ) -> Tensor:
        """Whether all elements over axes are not zero."""
        return ops.all(self, axis, out, keepdims, where=where)

    def reshape(self: Tensor, *shape: int | Sequence[int], order: str = "C", copy: bool | None = None) -> Tensor:
        """Return the same elements in another shape; one length may be -1. In C order, or with `order` "F" the first
        axis fastest."""
        if not shape:
            raise DTypeError("reshape: the lengths are missing; x.reshape(()) is a tensor without axes")
        return ops.reshape(self, _flat(shape), order, copy=copy)

    def flatten(self: Tensor, order: str = "C") -> Tensor:
        """Return a copy of the elements as one axis, in C order, or with `order` "F" the first axis fastest."""
        return ops.copy(ops.ravel(self, order))

    def copy(self: Tensor, order: str = "C") -> Tensor:
        """Return the same values in new memory; the gradient passes."""
        return ops.copy(self, order)

    def transpose(self: Tensor, *axes: Any) -> Tensor:
        """Permute the axes; reverse them when none is given."""
        return ops.transpose(self, _flat(axes) if axes and axes != (None,) else None)

    def clip(
        self: Tensor, min: Operand | None = NO_VALUE, max: Operand | None = NO_VALUE, out: None = None, **kwargs: Any
    ) -> Tensor:
        """Limit the elements to [min, max]; None leaves that side open."""
        return ops.clip(self, None if min is NO_VALUE else min, None if max is NO_VALUE else max, out, **kwargs)

    def var(
        self: Tensor,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        ddof: float = 0,
        *,
        keepdims: bool = False,
        where: Operand = True,
        mean: Operand = NO_VALUE,
    ) -> Tensor:
        """Variance over axes."""
        return ops.var(self, axis, dtype, out, ddof, keepdims, where=where, mean=mean)

    def std(
        self: Tensor,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        ddof: float = 0,
        *,
        keepdims: bool = False,
        where: Operand = True,
        mean: Operand = NO_VALUE,
    ) -> Tensor:
        """Standard deviation over axes."""
        return ops.std(self, axis, dtype, out, ddof, keepdims, where=where, mean=mean)


def _flat(shape: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], Iterable) and not isinstance(shape[0], Tensor):
        if STATE.watched is not None:
            watch_setting(shape[0])
        return tuple(shape[0])
    return shape  # type: ignore[return-value]


# Attributes that only arrays have ---------------------------------------------------------------------------

_WRITES = (
    "tensors cannot be written in place; build the new one with where(), concatenate() or stack(), or use assign()"
)
_VALUES = "take it of x.numpy(), if only the values are wanted"

MISSING: dict[str, str] = {
    **dict.fromkeys(("fill", "itemset", "put", "setfield", "setflags", "byteswap"), _WRITES),
    "sort": f"{_WRITES}; numpy.sort(x, axis) is a new one in order",
    "partition": f"{_WRITES}; numpy.partition(x, kth, axis) is a new one",
    "resize": f"{_WRITES}; numpy.resize(x, shape) is a new one",
    **dict.fromkeys(
        (
            *("base", "ctypes", "dump", "dumps", "flags", "getfield", "newbyteorder"),
            *("strides", "tobytes", "tofile", "tostring", "to_device"),
        ),
        _VALUES,
    ),
    "flat": "write x.ravel()",
    "ptp": "write numpy.ptp(x, axis)",
    "view": "write x.astype() for another dtype, x.reshape() for another shape",
}
"""Attributes of arrays that tensors don't have, and what to write instead."""


class _Missing:
    """An attribute that raises, so that `hasattr` says no; a `__getattr__` would slow down every other attribute."""

    def __init__(self, name: str, advice: str) -> None:
        self.message = f"a tensor has no {name}: {advice}"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise MissingAttributeError(self.message)


# Attachment -----------------------------------------------------------------------------------------------

for _name, _method in vars(Operators).items():
    if isinstance(_method, (FunctionType, property)):
        if isinstance(_method, FunctionType) and _method.__module__ == __name__:
            _method.__name__, _method.__qualname__ = _name, f"Tensor.{_name}"  # for Python's own messages
            _method.__annotations__.pop("self", None)  # for help()
        setattr(Tensor, _name, _method)
for _name, _advice in MISSING.items():
    setattr(Tensor, _name, _Missing(_name, _advice))


# Making tensors -------------------------------------------------------------------------------------------


def tensor(data: Operand, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor from anything numpy understands; the array is copied.

    Args:
        data: array, nested lists or number; or a tensor, whose copy is part of its graph, so that gradients flow
            through it, unless `requires_grad` asks for a leaf.
        dtype: the element type; None keeps that of an array and takes float64 for Python floats.
        requires_grad: whether `backward()` stores a gradient here: a new leaf.

    Raises:
        NotDifferentiableError: a new leaf of a tensor that a gradient may flow through.
        DTypeError: `data` are not real numbers or truth values, or an array of a class with its own rules.
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
    copied: Tensor = TABLE["copy"].apply((data,), {})
    return copied if dtype is None else ops.astype(copied, dtype)
