"""numpy's functions whose result has a shape that depends on values: on tensors whose values are known.

What they pick keeps its derivative; positions and counts are constants. While a function is traced the values of its
arguments are unknown, and these functions are refused; those of arrays that it only uses are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from py_engine.ad.mutation import watch
from py_engine.ad.op import NUMPY, as_floats, as_tensor, as_tensors, implements
from py_engine.ad.ops.arguments import axis_of, checked, flag, refuse, whole, wholes
from py_engine.ad.ops.elementary import astype, where
from py_engine.ad.ops.indexing import SCATTER, take
from py_engine.ad.ops.shape import from_places, part_of, ravel, reshape
from py_engine.ad.tensor import Array, Axis, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError, TraceError


def known(function: str, x: Tensor) -> Array:
    """Return the values of a tensor, which the shape of a result depends on.

    Raises:
        TraceError: they are unknown, since the function is being traced.
    """
    if x.data is None:
        raise TraceError(
            f"{function}: the shape of its result depends on values, which a traced function cannot have; use where() "
            "and a reduction, or call the function eagerly"
        )
    watch(x.data, f"an argument of {function}", x)
    return x.data


# Positions --------------------------------------------------------------------------------------------------


@implements(np.nonzero, constant=True)
def _nonzero(a: Operand) -> tuple[Tensor, ...]:
    x = as_tensor(a)
    if not x.ndim:
        raise ShapeError("nonzero: at least one axis is needed; use atleast_1d()")
    return tuple([Tensor(places) for places in np.nonzero(known("nonzero", x))])


@implements(np.argwhere, constant=True)
def _argwhere(a: Operand) -> Tensor:
    return Tensor(np.argwhere(known("argwhere", as_tensor(a))))


@implements(np.flatnonzero, constant=True)
def _flatnonzero(a: Operand) -> Tensor:
    return Tensor(np.flatnonzero(known("flatnonzero", as_tensor(a))))


# Elements ---------------------------------------------------------------------------------------------------


def _condition(function: str, condition: Any) -> Array:
    given = as_tensor(condition)
    return np.not_equal(known(function, given), 0)


@implements(np.compress)
def _compress(condition: Operand, a: Operand, axis: int | None = None, out: None = None) -> Tensor:
    refuse("compress", out=(out,))
    holds = _condition("compress", condition)
    return from_places("compress", as_tensor(a), lambda places: np.compress(holds, places, _axis("compress", axis)))


def _axis(function: str, axis: Any) -> int | None:
    return None if axis is None else whole(axis, f"{function}: the axis")


@implements(np.extract)
def _extract(condition: Operand, arr: Operand) -> Tensor:
    holds = _condition("extract", condition)
    return from_places("extract", as_tensor(arr), lambda places: np.extract(holds, places))


@implements(np.trim_zeros)
def _trim_zeros(filt: Operand, trim: str = "fb", axis: Axis = None) -> Any:
    if not isinstance(filt, (Tensor, np.ndarray)):
        raise DTypeError(f"trim_zeros: expected an array, got {type(filt).__name__}")
    x = as_tensor(filt)
    values = known("trim_zeros", x)
    if not isinstance(trim, str) or trim.lower() not in ("fb", "f", "b", "bf"):
        raise ConfigurationError(f"trim_zeros: trim must be made of 'f' and 'b', got {trim!r}")
    axes = range(x.ndim) if axis is None else wholes(axis, "trim_zeros: each axis")
    places = [axis_of(d, x.ndim, "trim_zeros", x.shape) for d in axes]
    if len(set(places)) < len(places):
        raise ShapeError(f"trim_zeros: axes {axis} name one twice")
    for d in places:
        (there,) = np.nonzero(values.any(tuple(k for k in range(x.ndim) if k != d)))
        n = x.shape[d]
        if there.size:
            start = int(there[0]) if "f" in trim.lower() else 0
            stop = int(there[-1]) + 1 if "b" in trim.lower() else n
        else:  # numpy leaves no element of zeros alone, at the side that it trims last
            start = stop = 0 if "f" not in trim.lower() else n
        x = part_of(x, d, start, stop)
    return x


@implements(np.piecewise)
def _piecewise(x: Operand, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> Tensor:
    """Each function is called with the elements of its piece alone, as numpy's is."""
    a = as_tensor(x)
    conditions = _conditions(a, condlist)
    if len(conditions) == len(funclist) - 1:
        conditions = [*conditions, ~np.any(conditions, axis=0)]
    elif len(conditions) != len(funclist):
        raise ShapeError(
            f"piecewise: {len(conditions)} conditions need as many functions, or one more, got {len(funclist)}"
        )
    found: Tensor = a * 0 if not a.size else where(np.ones(a.shape, np.bool_), NUMPY[np.zeros_like](a), a)
    for condition, function in zip(conditions, funclist, strict=True):
        places = np.flatnonzero(condition)
        if not places.size:
            continue
        value = function(ravel(a)[places], *args, **kw) if callable(function) else function
        _, values = as_tensors((a, value))
        if a.dtype.kind in "iub":
            values = astype(values, a.dtype)
        values = NUMPY[np.broadcast_to](values, (places.size,))
        spread = SCATTER(values, Tensor(places), pattern=("array",), shape=(a.size,))
        found = where(condition, reshape(spread, a.shape), found)
    return found


def _conditions(x: Tensor, condlist: Any) -> list[Array]:
    if (
        isinstance(condlist, (list, tuple))
        and condlist
        and (not x.ndim or isinstance(condlist[0], (list, tuple, np.ndarray, Tensor)))
    ):
        given = list(condlist)
    else:
        stacked = as_tensor(condlist)
        given = [*stacked] if stacked.ndim > x.ndim or (not x.ndim and stacked.ndim) else [stacked]
    found = []
    for condition in given:
        holds = _condition("piecewise", condition)
        if holds.shape != x.shape:
            raise ShapeError(f"piecewise: a condition of shape {holds.shape} does not fit shape {x.shape}")
        found.append(holds)
    return found


# Sets -------------------------------------------------------------------------------------------------------


@implements(np.unique)
def _unique(
    ar: Operand,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    sorted: bool = True,
) -> Any:
    refuse("unique", sorted=(sorted, True))
    x = as_tensor(ar)
    data = known("unique", x)
    along = None if axis is None else axis_of(axis, x.ndim, "unique", x.shape)
    _, index, inverse, counts = checked(
        "unique", lambda: np.unique(data, True, True, True, along, equal_nan=bool(flag(equal_nan))), x.shape
    )
    picked = take(ravel(x) if along is None else x, index, 0 if along is None else along)
    more = zip((return_index, return_inverse, return_counts), (index, inverse, counts), strict=True)
    found = (picked, *(Tensor(part) for wanted, part in more if wanted))
    return found if len(found) > 1 else picked


def _elements(function: str, compute: Callable[..., Any], *operands: Any) -> tuple[Tensor, Any]:
    """Return those elements of the operands, seen as vectors, that a function of sets finds; and all that it found."""
    parts = [ravel(x) for x in as_tensors(operands)]
    pool = NUMPY[np.concatenate](parts)
    values = known(function, pool)
    ends = np.cumsum([part.size for part in parts])[:-1]
    found = checked(function, lambda: compute(*np.split(values, ends)), pool.shape)
    elements, first = np.unique(values, return_index=True)
    picked = found[0] if isinstance(found, tuple) else found
    places = first[np.searchsorted(elements, picked)] if elements.size else np.zeros(0, np.intp)
    return take(pool, Tensor(np.asarray(places, np.intp))), found


@implements(np.union1d)
def _union1d(ar1: Operand, ar2: Operand) -> Tensor:
    return _elements("union1d", np.union1d, ar1, ar2)[0]


@implements(np.intersect1d)
def _intersect1d(ar1: Operand, ar2: Operand, assume_unique: bool = False, return_indices: bool = False) -> Any:
    once, places = bool(flag(assume_unique)), bool(flag(return_indices))
    function: Any = np.intersect1d
    picked, found = _elements("intersect1d", lambda a, b: function(a, b, once, places), ar1, ar2)
    return (picked, *map(Tensor, found[1:])) if places else picked


@implements(np.setdiff1d)
def _setdiff1d(ar1: Operand, ar2: Operand, assume_unique: bool = False) -> Tensor:
    once = bool(flag(assume_unique))
    if not isinstance(ar1, (Tensor, np.ndarray, list, tuple)):
        raise DTypeError(f"setdiff1d: expected an array, got {type(ar1).__name__}")
    mine, others = as_tensors((ar1, ar2))
    return astype(_elements("setdiff1d", lambda a, b: np.setdiff1d(a, b, once), mine, others)[0], mine.dtype)


@implements(np.setxor1d)
def _setxor1d(ar1: Operand, ar2: Operand, assume_unique: bool = False) -> Tensor:
    once = bool(flag(assume_unique))
    return _elements("setxor1d", lambda a, b: np.setxor1d(a, b, once), ar1, ar2)[0]


# Counts -----------------------------------------------------------------------------------------------------


@implements(np.bincount)
def _bincount(x: Operand, /, weights: Operand | None = None, minlength: int = 0) -> Tensor:
    places = as_tensor(x)
    if places.ndim != 1 or places.dtype.kind not in "iu":
        raise DTypeError(f"bincount: expected a vector of whole numbers, got {places.dtype} {places.shape}")
    least = whole(minlength, "bincount: minlength")
    counts = checked("bincount", lambda: np.bincount(known("bincount", places), minlength=least), places.shape)
    if weights is None:
        return Tensor(counts)
    (w,) = as_floats(weights)
    if w.shape != places.shape:
        raise ShapeError(f"bincount: weights of shape {w.shape} do not fit {places.shape}")
    return SCATTER(astype(w, np.float64), astype(places, np.intp), pattern=("array",), shape=counts.shape)


# Polynomials ------------------------------------------------------------------------------------------------


def without_leading_zeros(function: str, p: Tensor) -> Tensor:
    """Return the coefficients of a polynomial from the first that is not zero, and one where all are."""
    (there,) = np.nonzero(known(function, p))
    return part_of(p, 0, int(there[0]) if there.size else max(p.size - 1, 0), p.size)
