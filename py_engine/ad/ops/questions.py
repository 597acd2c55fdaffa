"""numpy's questions about arrays, on tensors: equality, dtypes, positions, ranks, text; all answers are constants."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.op import NUMPY, Op, as_tensor, as_tensors, broadcast, float_only, implements, in_one_dtype
from py_engine.ad.ops.along import SEARCHSORTED, argsort, sort
from py_engine.ad.ops.arguments import axis_of, checked, flag, wholes
from py_engine.ad.ops.elementary import abs, astype, clip, equal, isnan, less, logical_and, logical_not, logical_or
from py_engine.ad.ops.indexing import take_along_axis
from py_engine.ad.ops.reduction import all, max
from py_engine.ad.ops.shape import broadcast_to, expand_dims, ravel, reshape
from py_engine.ad.tensor import Array, Literal, Operand, Tensor, real_array
from py_engine.errors import ConfigurationError, DTypeError, ShapeError

# Questions about values: answered where these are known -------------------------------------------------------


@implements(np.allclose, constant=True)
def _allclose(a: Operand, b: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(all(NUMPY[np.isclose](a, b, rtol, atol, equal_nan)))


@implements(np.array_equal, constant=True)
def _array_equal(a1: Operand, a2: Operand, equal_nan: bool = False) -> bool:
    a, b = as_tensors((a1, a2))
    if a.shape != b.shape:
        return False
    same = equal(a, b)
    if equal_nan:
        same = logical_or(same, logical_and(isnan(a), isnan(b)))
    return bool(all(same))


@implements(np.iscomplexobj, constant=True)
def _iscomplexobj(x: Operand) -> bool:
    return as_tensor(x).dtype.kind == "c"


@implements(np.isrealobj, constant=True)
def _isrealobj(x: Operand) -> bool:
    return as_tensor(x).dtype.kind != "c"


# Questions about dtypes and shapes, and text --------------------------------------------------------------------------


def _as_dtype_of(x: Any) -> Any:
    return x.dtype if isinstance(x, Tensor) else x


@implements(np.result_type, constant=True)
def _result_type(*arrays_and_dtypes: Any) -> Any:
    return checked("result_type", lambda: np.result_type(*map(_as_dtype_of, arrays_and_dtypes)), ())


@implements(np.can_cast, constant=True)
def _can_cast(from_: Any, to: DTypeLike, casting: Any = "safe") -> bool:
    return bool(checked("can_cast", lambda: np.can_cast(_as_dtype_of(from_), to, casting), ()))


@implements(np.common_type, constant=True)
def _common_type(*arrays: Any) -> Any:
    dummies = [np.empty((), x.dtype) if isinstance(x, Tensor) else x for x in arrays]
    return checked("common_type", lambda: np.common_type(*dummies), ())


@implements(np.min_scalar_type, constant=True)
def _min_scalar_type(a: Any, /) -> Any:
    x = as_tensor(a)
    return x.dtype if x.ndim else np.min_scalar_type(x.item())


@implements(np.array_equiv, constant=True)
def _array_equiv(a1: Operand, a2: Operand) -> bool:
    a, b = as_tensors((a1, a2))
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        return False
    return bool(all(equal(a, b)))


@implements(np.einsum_path, constant=True)
def _einsum_path(*operands: Any, optimize: Any = "greedy", einsum_call: bool = False) -> Any:
    dummies = [np.broadcast_to(np.empty((), x.dtype), x.shape) if isinstance(x, Tensor) else x for x in operands]
    path: Any = np.einsum_path
    return checked("einsum_path", lambda: path(*dummies, optimize=optimize, einsum_call=einsum_call), ())


def _text(function: Any) -> None:
    @wraps(function)
    def text(a: Any, /, *args: Any, **kwargs: Any) -> str:
        x = as_tensor(a)
        return function(np.asarray(x.tolist(), x.dtype).reshape(x.shape), *args, **kwargs)  # type: ignore[no-any-return]

    implements(function, constant=True)(text)


for _function in (np.array2string, np.array_repr, np.array_str):
    _text(_function)


# Positions ------------------------------------------------------------------------------------------------------------


def _positions_of(function: str, compute: Callable[[Any], Any], arr: Any) -> tuple[Tensor, ...]:
    shape = as_tensor(arr).shape
    found = checked(function, lambda: compute(np.broadcast_to(np.empty(()), shape)), shape)
    return tuple([Tensor(places) for places in found])


@implements(np.diag_indices_from, constant=True)
def _diag_indices_from(arr: Operand) -> tuple[Tensor, ...]:
    return _positions_of("diag_indices_from", np.diag_indices_from, arr)


@implements(np.tril_indices_from, constant=True)
def _tril_indices_from(arr: Operand, k: int = 0) -> tuple[Tensor, ...]:
    return _positions_of("tril_indices_from", lambda x: np.tril_indices_from(x, k), arr)


@implements(np.triu_indices_from, constant=True)
def _triu_indices_from(arr: Operand, k: int = 0) -> tuple[Tensor, ...]:
    return _positions_of("triu_indices_from", lambda x: np.triu_indices_from(x, k), arr)


@implements(np.ix_)
def _ix(*args: Operand) -> tuple[Tensor, ...]:
    found = []
    for d, sequence in enumerate(args):
        x = as_tensor(sequence)
        if x.ndim != 1:
            raise ShapeError(f"ix_: expected vectors, got shape {x.shape}")
        if x.dtype == np.bool_:
            (x,) = NUMPY[np.nonzero](x)
        elif not x.size and not isinstance(sequence, (Tensor, np.ndarray)):
            x = astype(x, np.intp)
        found.append(reshape(x, [x.size if k == d else 1 for k in range(len(args))]))
    return tuple(found)


def _infer_unravelled(x: Tensor, **attrs: Any) -> tuple[Any, Any]:
    if x.dtype.kind not in "iu":
        raise DTypeError(f"expected whole numbers, got {x.dtype}")
    return x.shape, np.dtype(np.intp)


def _unravelled(x: Array, out: Array, shape: tuple[int, ...], order: Any, axis: int) -> None:
    np.copyto(out, checked("unravel_index", lambda: np.unravel_index(x, shape, order)[axis], x.shape))


_UNRAVELLED = Op("unravel_index", _infer_unravelled, _unravelled, constant=True, elementwise=True)


@implements(np.unravel_index, constant=True)
def _unravel_index(indices: Operand, shape: int | Sequence[int], order: str = "C") -> tuple[Tensor, ...]:
    lengths = wholes(shape, "unravel_index: each length")
    if order not in ("C", "F"):
        raise ConfigurationError(f"unravel_index: order must be 'C' or 'F', got {order!r}")
    x = indices if isinstance(indices, Tensor) else Tensor(real_array(np.asarray(indices)))
    return tuple([_UNRAVELLED(x, shape=lengths, order=order, axis=d) for d in range(len(lengths))])


def _infer_ravelled(*inputs: Tensor, **attrs: Any) -> tuple[Any, Any]:
    return broadcast(inputs), _infer_unravelled(inputs[0])[1]


def _ravelled(*arrays: Array, dims: tuple[int, ...], mode: Any, order: Any) -> None:
    *index, out = arrays
    np.copyto(out, checked("ravel_multi_index", lambda: np.ravel_multi_index(index, dims, mode, order), out.shape))


_RAVELLED = Op("ravel_multi_index", _infer_ravelled, _ravelled, constant=True, elementwise=True)


@implements(np.ravel_multi_index, constant=True)
def _ravel_multi_index(
    multi_index: Sequence[Operand], dims: int | Sequence[int], mode: Any = "raise", order: str = "C"
) -> Tensor:
    lengths = wholes(dims, "ravel_multi_index: each length")
    parts = [x if isinstance(x, Tensor) else Tensor(real_array(np.asarray(x))) for x in multi_index]
    if len(parts) != len(lengths):
        raise ShapeError(f"ravel_multi_index: {len(parts)} arrays of positions do not fit {len(lengths)} axes")
    for part in parts:
        _infer_unravelled(part)
    return _RAVELLED(*parts, dims=lengths, mode=mode, order=order)


@implements(np.isin, constant=True)
def _isin(
    element: Operand,
    test_elements: Operand,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: str | None = None,
) -> Tensor:
    if kind not in (None, "sort", "table"):
        raise ConfigurationError(f"isin: kind must be None, 'sort' or 'table', got {kind!r}")
    flag(assume_unique)
    x, among = in_one_dtype(as_tensors((element, test_elements)))
    if not among.size:
        there = broadcast_to(Literal(np.zeros((), np.bool_)), x.shape)
    else:
        ordered = sort(ravel(among))
        first, last = (Tensor(np.array(n)) for n in (0, among.size - 1))
        place = clip(SEARCHSORTED(ordered, x, side="left"), first, last)
        there = equal(NUMPY[np.take](ordered, place), x)
    return logical_not(there) if flag(invert) else there


@implements(np.lexsort, constant=True)
def _lexsort(keys: Sequence[Operand], axis: int = -1) -> Tensor:
    parts = as_tensors([*keys])
    if not parts:
        raise ShapeError("lexsort: at least one key is needed")
    shape = parts[0].shape
    if len({part.shape for part in parts}) > 1:
        raise ShapeError(f"lexsort: all keys must have one shape, got {' and '.join(str(p.shape) for p in parts)}")
    d = axis_of(axis, len(shape), "lexsort", shape)
    order = argsort(parts[0], d)
    for key in parts[1:]:
        order = take_along_axis(order, argsort(take_along_axis(key, order, d), d), d)
    return order


@implements(np.linalg.matrix_rank, constant=True)
def _matrix_rank(A: Operand, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Any:
    x = as_tensor(A)
    float_only(x.dtype)
    if tol is not None and rtol is not None:
        raise ConfigurationError("matrix_rank: tol and rtol must not both be given")
    if x.ndim < 2:
        return int(not bool(all(equal(x, 0))))
    singular = NUMPY[np.linalg.svdvals](x) if not hermitian else abs(NUMPY[np.linalg.eigvalsh](x))
    if tol is None:
        share = builtins.max(x.shape[-2:]) * np.finfo(x.dtype).eps if rtol is None else rtol
        limit = max(singular, -1, keepdims=True) * (share if np.ndim(share) == 0 else expand_dims(as_tensor(share), -1))
    else:
        limit = expand_dims(as_tensors((singular, tol))[1], -1)
    return NUMPY[np.count_nonzero](less(limit, singular), -1)
