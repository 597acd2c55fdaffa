"""The tensor: a numpy array that remembers how it was computed.

A `Tensor` is also the node of the computation graph (the papers' *GraphNode*): it holds the op, the input
tensors and the op's attributes that produced it.  A *concrete* tensor has data; a *symbolic* one, made while a
function is traced, has only a shape and a dtype.

It knows no ops: operators, numpy's functions and the methods of arrays are attached by `py_engine.ad.operators`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from py_engine.ad.state import STATE, inside_transform
from py_engine.errors import ConfigurationError, DTypeError, EngineError, ShapeError, TraceError

if TYPE_CHECKING:
    from py_engine.ad.op import Op
    from py_engine.ad.operators import Operators  # attached when the engine is imported: no base class at run time
else:
    Operators = object

Array: TypeAlias = NDArray[Any]
Operand: TypeAlias = "Tensor | ArrayLike"
Axis: TypeAlias = int | tuple[int, ...] | None

NO_VALUE: Any = getattr(np, "_NoValue")  # noqa: B009  (what numpy's own signatures have for "not given")

FLOATS = (np.dtype(np.float64), np.dtype(np.float32))


_ndarray = np.ndarray  # looked up once


def _no_gradient(dtype: np.dtype[Any]) -> DTypeError:
    return DTypeError(
        f"only float32 and float64 tensors have a gradient, this one is {dtype}; convert it first, for example with "
        "x.astype(np.float32)"
    )


class Tensor(Operators):
    """A numpy array with a derivative.

    Args:
        data: the array; it is kept by reference, not copied, and must not be written to before the gradients that
            need it are found: that is detected (see `InPlaceError`).
        requires_grad: whether `backward()` stores a gradient here, and ops on it keep their inputs for that.

    `copy.copy` and `copy.deepcopy` of a tensor that was computed, or inside a function that is differentiated or
    traced, are ops: gradients flow through them. Outside, the copy of a leaf is a separate leaf, with
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
        "name",
        "op",
        "scope",
        "shape",
        "versions",
    )

    data: Array | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    op: Op | None
    inputs: tuple[Tensor, ...]
    attrs: Mapping[str, Any]
    versions: tuple[tuple[Tensor, Any], ...] | None  # of the arrays that its op was given, see mutation.py
    level: int  # of the last transform to begin whose variables it depends on; 0 for a constant, see reverse.gradients
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
            raise _no_gradient(data.dtype)
        if data.dtype not in FLOATS:
            real_array(data)
        if data.__class__ is not np.ndarray:
            check_class(data)
            if isinstance(data, np.generic):  # no memory that an op could read or compare
                data = np.asarray(data)
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype
        self.op = None
        self.inputs = ()
        self.attrs = {}
        self.versions = None
        self.level = 1 if requires_grad else 0
        self.grad = None
        self.name = name
        self.scope = ""

    @classmethod
    def symbol(cls, shape: tuple[int, ...], dtype: DTypeLike, name: str = "", scope: str = "") -> Tensor:
        """Return a tensor without data: an input of a function that is traced, or a variable of a program."""
        dtype = np.dtype(dtype)
        tensor = cls.__new__(cls)
        tensor.data = None
        tensor.shape = tuple(shape)
        tensor.dtype = dtype
        tensor.op = None
        tensor.inputs = ()
        tensor.attrs = {}
        tensor.versions = None
        tensor.level = 1 if dtype in FLOATS else 0
        tensor.grad = None
        tensor.name = name
        tensor.scope = scope
        return tensor

    # What it is -------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed for this tensor: a leaf with `requires_grad`, or a result of one."""
        return self.level > 0

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and self.dtype not in FLOATS:
            raise _no_gradient(self.dtype)
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
                "a value is needed here, but the function is being traced and only shapes are known; use ops such as "
                "where(), or cond(), while_loop() and scan(), instead of Python branches and loops on values, or call "
                "the function eagerly"
            )
        if self.op is not None:
            array = self.data.view()
            array.flags.writeable = False
            return array
        return self.data

    def assign(self, values: ArrayLike) -> None:
        """Copy `values` into this leaf in place, so that compiled functions that captured it see them.

        Raises:
            TraceError: the tensor was computed from others, whose gradients would become wrong.
            DTypeError: they are no real numbers, or floats for a tensor of integers or truth values.
        """
        if self.op is not None:
            raise TraceError(f"assign() works on leaf tensors, this one was computed by {self.op.name}")
        given = real_array(plain_array(values), values)
        own = self.numpy()
        if not np.can_cast(given.dtype, own.dtype, "same_kind") and (given.dtype.kind == "f" or own.dtype == np.bool_):
            raise DTypeError(f"assign: {given.dtype} does not fit a tensor of {own.dtype}; convert it with astype()")
        own[...] = given

    def __repr__(self) -> str:
        what = "symbolic" if self.data is None else np.array2string(self.data, separator=", ", threshold=20)
        made = f", op={self.op.name}" if self.op else ""
        return f"Tensor({what}, shape={self.shape}, dtype={self.dtype}{made})"

    def __len__(self) -> int:
        if not self.shape:
            raise DTypeError("a scalar tensor has no length")
        return self.shape[0]

    def _is_free(self) -> bool:
        """Whether this is a leaf that no transform around can differentiate by."""
        return self.op is None and self.data is not None and not inside_transform()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "tensors are not pickled: what they were computed from would be lost; save their arrays, for example "
            "np.save(file, x.numpy()), or a chain's with np.savez(file, **chain.parameters.as_dict())"
        )


class Literal(Tensor):
    """A number written in the program: a 0-d constant that never changes, so that graphs may fold it."""

    __slots__ = ()

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self


class Node:
    """An op that was applied and has several results, each of them a `Result`.

    It holds their values, not the tensors: a rule that needs a result once more gets a new tensor of it.
    """

    __slots__ = ("_live", "attrs", "inputs", "kinds", "level", "op", "scope", "values", "variables", "versions")

    def __init__(
        self, op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], kinds: Sequence[tuple[Any, Any]], level: int
    ) -> None:
        self.op, self.inputs, self.attrs, self.kinds, self.level = op, inputs, attrs, tuple(kinds), level
        self.scope = STATE.scope
        self.versions: tuple[tuple[Tensor, Any], ...] | None = None
        self.values: Sequence[Any] = (None,) * len(self.kinds)
        self.variables: tuple[Result, ...] = ()  # the results themselves, where they have no values
        self._live: list[Any] = [None] * len(self.kinds)

    def result(self, i: int) -> Result:
        """Return result `i`: always the same tensor, as long as it is referenced."""
        if self.variables:
            return self.variables[i]
        found = self.known(i)
        if found is None:
            found = Result(self, i)
            self._live[i] = weakref.ref(found)
        return found

    def known(self, i: int) -> Result | None:
        """Return result `i` if it is referenced."""
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
        self.versions = self.grad = None
        self.name = ""


COMPLEX = "complex numbers are not supported; pass real and imaginary parts separately"


def check_class(x: Any) -> None:
    """Raise `DTypeError` for an array of a subclass, such as a matrix or a masked array."""
    kind = x.__class__
    if isinstance(x, np.ndarray) and kind is not np.ndarray and kind is not np.memmap:
        instead = "x.filled(value) and a mask of one's own" if isinstance(x, np.ma.MaskedArray) else "numpy.asarray(x)"
        raise DTypeError(f"a {kind.__module__}.{kind.__name__} has rules that tensors do not follow; pass {instead}")


def plain_array(x: Any, dtype: DTypeLike | None = None) -> Array:
    """Return what numpy makes of `x` as an array.

    Raises:
        DTypeError: it is an array of a subclass.
        ShapeError: it is made of lists of different lengths.
    """
    check_class(x)
    try:
        return np.asarray(x, dtype)
    except EngineError:
        raise
    except ValueError as error:
        raise ShapeError(f"a {type(x).__name__} is not an array of numbers: {error}") from None
    except (TypeError, OverflowError) as error:
        raise DTypeError(f"a {type(x).__name__} is not an array of numbers: {error}") from None


def plain_arrays(leaves: Sequence[Any]) -> list[Array]:
    """Return arrays, tensors and numbers as arrays; Python floats are weak, as they are beside tensors in an op.

    Raises:
        DTypeError, ShapeError: see `plain_array`.
    """
    dtype: np.dtype[Any] = np.dtype(float)
    for x in leaves:
        if isinstance(x, (Tensor, np.ndarray, np.float32)) and x.dtype in FLOATS:
            dtype = x.dtype
            break
    return [
        x
        if x.__class__ is np.ndarray
        else x.numpy()
        if isinstance(x, Tensor)
        else plain_array(x, dtype if isinstance(x, float) else None)
        for x in leaves
    ]


def real_array(x: Array, given: Any = NO_VALUE) -> Array:
    """Return an array of real numbers or truth values that means to numpy what it means here.

    Args:
        x: the array.
        given: what it was made of, for messages; not given: the array itself.

    Raises:
        DTypeError: it holds something else, in another byte order, or is of a subclass, whose operators
            differ (a matrix) or whose elements may be missing (a masked array).
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
