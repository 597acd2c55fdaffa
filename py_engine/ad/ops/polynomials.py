"""numpy's polynomials on tensors: coefficients as a vector, that of the highest power first."""

from __future__ import annotations

from typing import Any

import numpy as np

from py_engine.ad.op import NUMPY, as_floats, as_tensor, as_tensors, float_only, implements, in_one_dtype
from py_engine.ad.ops.arguments import whole
from py_engine.ad.ops.by_values import known, without_leading_zeros
from py_engine.ad.ops.decompositions import pinv
from py_engine.ad.ops.elementary import astype, div
from py_engine.ad.ops.linalg import matmul
from py_engine.ad.ops.reduction import sum
from py_engine.ad.ops.shape import concatenate, part_of, ravel, reshape, stack, transpose
from py_engine.ad.tensor import FLOATS, Operand, Tensor
from py_engine.errors import DTypeError, ShapeError


def _numbers(function: str, *operands: Any) -> tuple[Tensor, ...]:
    """Return numbers in one dtype, integers among them."""
    found = in_one_dtype(as_tensors(operands))
    if found[0].dtype == np.bool_:
        raise DTypeError(f"{function}: expected numbers, got truth values; convert with astype()")
    return found


def _coefficients(function: str, *operands: Any) -> tuple[Tensor, ...]:
    found = tuple([reshape(p, (1,)) if not p.ndim else p for p in _numbers(function, *operands)])
    for p in found:
        if p.ndim != 1:
            raise ShapeError(f"{function}: expected a vector of coefficients, got shape {p.shape}")
    return found


def _as_vector(function: str, p: Any) -> Tensor:
    x = as_tensor(p)
    if not x.ndim:
        raise ShapeError(f"{function}: expected a vector of coefficients, got a number")
    return x


def _zeros(count: int, like: Tensor) -> Tensor:
    return Tensor(np.zeros(count, like.dtype))


@implements(np.polyval)
def _polyval(p: Operand, x: Operand) -> Tensor:
    coefficients, at = _numbers("polyval", p, x)
    if coefficients.ndim != 1:
        raise ShapeError(f"polyval: expected a vector of coefficients, got shape {coefficients.shape}")
    found: Tensor = at * 0
    if coefficients.size:
        found = found + coefficients[0]
    for k in range(1, coefficients.size):
        found = found * at + coefficients[k]
    return found


@implements(np.vander)
def _vander(x: Operand, N: int | None = None, increasing: bool = False) -> Tensor:
    a = as_tensor(x)
    float_only(a.dtype)
    if a.ndim != 1:
        raise ShapeError(f"vander: expected a vector, got shape {a.shape}")
    count = a.size if N is None else whole(N, "vander: N")
    if count < 0:
        raise ShapeError(f"vander: N must not be negative, got {N}")
    a = astype(a, np.float64)  # numpy's kind of a float beside whole powers
    powers = np.arange(count, dtype=a.dtype)
    return reshape(a, (-1, 1) if a.size else (0, 1)) ** (powers if increasing else powers[::-1].copy())


def _of_one_length(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n = max(a.size, b.size)
    first, second = (concatenate([_zeros(n - p.size, p), p]) if p.size < n else p for p in (a, b))
    return first, second


@implements(np.polyadd)
def _polyadd(a1: Operand, a2: Operand) -> Tensor:
    a, b = _of_one_length(*_coefficients("polyadd", a1, a2))
    return a + b


@implements(np.polysub)
def _polysub(a1: Operand, a2: Operand) -> Tensor:
    a, b = _of_one_length(*_coefficients("polysub", a1, a2))
    return a - b


@implements(np.polymul)
def _polymul(a1: Operand, a2: Operand) -> Tensor:
    """Zeros before the first coefficient are left out, as numpy does: while a function is traced, use convolve()."""
    a, b = (without_leading_zeros("polymul", p) for p in _coefficients("polymul", a1, a2))
    return NUMPY[np.convolve](a, b)  # type: ignore[no-any-return]


@implements(np.polydiv)
def _polydiv(u: Operand, v: Operand) -> tuple[Tensor, Tensor]:
    rest, divisor = as_floats(*_coefficients("polydiv", u, v))
    if not rest.size or not divisor.size:
        raise ShapeError(f"polydiv: there must be coefficients, got shapes {rest.shape} and {divisor.shape}")
    n = divisor.size - 1
    steps = rest.size - n
    quotient = []
    for k in range(steps):
        factor = rest[k] / divisor[0]
        quotient.append(factor)
        parts = [part_of(rest, 0, 0, k), part_of(rest, 0, k, k + n + 1) - factor * divisor]
        rest = concatenate([*parts, part_of(rest, 0, k + n + 1, rest.size)])
    values = known("polydiv", rest)
    start = 0
    while start < rest.size - 1 and np.allclose(values[start], 0, rtol=1e-14):
        start += 1
    return stack(quotient) if quotient else _zeros(1, rest), part_of(rest, 0, start, rest.size)


@implements(np.polyder)
def _polyder(p: Operand, m: int = 1) -> Tensor:
    (found,) = _coefficients("polyder", _as_vector("polyder", p))
    order = whole(m, "polyder: m")
    if order < 0:
        raise ShapeError(f"polyder: m must not be negative, got {m}")
    found = astype(found, np.result_type(found.dtype, np.int64)) if order else found
    for _ in range(order):
        n = max(found.size - 1, 0)
        powers = np.arange(n, 0, -1, dtype=found.dtype if found.dtype in FLOATS else np.int64)
        found = part_of(found, 0, 0, n) * powers
    return found


@implements(np.polyint)
def _polyint(p: Operand, m: int = 1, k: Operand | None = None) -> Tensor:
    (found,) = as_floats(*_coefficients("polyint", _as_vector("polyint", p)))
    order = whole(m, "polyint: m")
    if order < 0:
        raise ShapeError(f"polyint: m must not be negative, got {m}")
    found = astype(found, np.float64) if order else found
    constants = _zeros(order, found) if k is None else ravel(as_tensors((found, k))[1])
    if constants.size == 1 and order > 1:
        constants = concatenate([constants] * order)
    if constants.size < order:
        raise ShapeError(f"polyint: {order} constants of integration are needed, got {constants.size}")
    for i in range(order):
        powers = np.arange(found.size, 0, -1, dtype=found.dtype)
        found = concatenate([found / powers, part_of(constants, 0, i, i + 1)])
    return found


@implements(np.poly)
def _poly(seq_of_zeros: Operand) -> Tensor:
    roots = as_tensor(seq_of_zeros)
    float_only(roots.dtype)
    if roots.ndim != 1:
        raise ShapeError(
            f"poly: expected a vector of roots, got shape {roots.shape}; of a matrix they are its eigenvalues, which "
            "may be complex"
        )
    if not roots.size:
        raise ShapeError("poly: expected a vector of roots, got none")
    found = Tensor(np.ones(1, roots.dtype))
    for i in range(roots.size):
        found = concatenate([found, _zeros(1, found)]) - concatenate([_zeros(1, found), roots[i] * found])
    return found


@implements(np.polyfit)
def _polyfit(
    x: Operand,
    y: Operand,
    deg: int,
    rcond: float | None = None,
    full: bool = False,
    w: Operand | None = None,
    cov: bool | str = False,
) -> Any:
    a, b = as_floats(x, y)
    degree = whole(deg, "polyfit: deg")
    if degree < 0 or a.ndim != 1 or not a.size or b.ndim not in (1, 2) or b.shape[0] != a.size:
        raise ShapeError(f"polyfit: places of shape {a.shape}, values of shape {b.shape} and degree {deg} do not fit")
    precision = np.finfo(a.dtype).eps
    a, b = astype(a, np.float64), astype(b, np.float64)
    matrix = NUMPY[np.vander](a, degree + 1)
    if w is not None:
        weights = astype(as_floats(w)[0], np.float64)
        if weights.shape != a.shape:
            raise ShapeError(f"polyfit: weights of shape {weights.shape} do not fit places of shape {a.shape}")
        matrix, b = matrix * weights[:, np.newaxis], b * (weights if b.ndim == 1 else weights[:, np.newaxis])
    scale = NUMPY[np.sqrt](sum(matrix * matrix, 0))
    cut = a.size * precision if rcond is None else rcond
    if not isinstance(cut, (int, float, np.integer, np.floating)):
        raise DTypeError(f"polyfit: rcond must be a number, got {rcond!r}")
    scaled = matrix / scale
    found = matmul(pinv(scaled, float(cut)), b)
    fitted = div(found, scale if b.ndim == 1 else scale[:, np.newaxis])
    left = b - matmul(scaled, found)
    squares = reshape(sum(left * left, 0), (-1,))
    freedom = a.size - degree - 1
    if full:
        singular = NUMPY[np.linalg.svd](scaled, False, False)
        values = known("polyfit", singular)
        rank = np.int32((values > cut * values.max()).sum())
        unique = rank == degree + 1 and freedom > 0
        return fitted, squares if unique else Tensor(np.zeros(0, squares.dtype)), rank, singular, cut
    if not cov:
        return fitted
    spread = NUMPY[np.linalg.inv](matmul(transpose(scaled), scaled)) / (scale * scale[:, np.newaxis])
    spread = spread if b.ndim == 1 else spread[:, :, np.newaxis]
    if cov == "unscaled":
        return fitted, spread
    if freedom <= 0:
        raise ShapeError(
            f"polyfit: a covariance that is scaled needs more than {degree + 1} points, got {a.size}; "
            "use cov='unscaled'"
        )
    return fitted, spread * (squares / freedom)
