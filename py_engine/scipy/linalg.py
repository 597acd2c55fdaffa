"""`scipy.linalg` on tensors, what numpy's lacks: triangular, banded and Sylvester equations, and matrix roots."""

from __future__ import annotations

from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.control.custom import custom_rule
from py_engine.ad.op import as_floats, as_tensor
from py_engine.ad.ops.arguments import whole
from py_engine.ad.ops.scipy_functions import installed
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ConfigurationError, LinearAlgebraError, ShapeError

__all__ = ["solve_banded", "solve_sylvester", "solve_triangular", "sqrtm"]


def _square(function: str, name: str, x: Tensor, stacked: bool = False) -> None:
    if x.ndim < 2 or (x.ndim > 2 and not stacked) or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"{function}: {name} must be a square matrix, got shape {x.shape}")


def solve_triangular(
    a: Operand, b: Operand, trans: int | str = 0, lower: bool = False, unit_diagonal: bool = False
) -> Tensor:
    """Solve a x = b for x, by one triangle of `a`, whose other elements are not read.

    Args:
        a: square matrices (..., n, n).
        b: right-hand sides (n,) or (..., n, k).
        trans: 0 or "N" for a x = b, 1 or "T" for the transposed of `a` (so are 2 and "C": numbers are real).
        lower: whether the lower triangle is read, or the upper.
        unit_diagonal: whether the diagonal is not read either, and is 1.

    Raises:
        LinearAlgebraError: a number on the diagonal is 0.
        ShapeError: shapes do not fit together.
    """
    if trans not in (0, 1, 2, "N", "T", "C"):
        raise ConfigurationError(f"solve_triangular: trans must be 0, 1, 2, 'N', 'T' or 'C', got {trans!r}")
    a, b = as_floats(a, b)
    _square("solve_triangular", "a", a, stacked=True)
    if not b.ndim or b.shape[0 if b.ndim == 1 else -2] != a.shape[-1]:
        raise ShapeError(f"solve_triangular: b must be (n,) or (..., n, k) with n = {a.shape[-1]}, got shape {b.shape}")
    triangle = ops.tril if lower else ops.triu
    matrix = triangle(a, -1 if lower else 1) + np.eye(a.shape[-1], dtype=a.dtype) if unit_diagonal else triangle(a)
    if trans not in (0, "N"):
        matrix, lower = ops.swapaxes(matrix, -1, -2), not lower
    rows = -1 if b.ndim == 1 else -2
    try:
        if not lower:  # whose elimination has nothing to do, and exchanges no rows
            return ops.solve(matrix, b)
        return ops.flip(ops.solve(ops.flip(matrix, (-2, -1)), ops.flip(b, rows)), rows)
    except LinearAlgebraError as error:
        raise LinearAlgebraError(f"solve_triangular: a number on the diagonal is 0 ({error})") from None


def sqrtm(A: Operand) -> Tensor:
    """The principal square root of a real matrix (n, n) that has a real one; computed by scipy.

    Raises:
        LinearAlgebraError: it has none.
    """
    (a,) = as_floats(A)
    _square("sqrtm", "A", a)
    return ROOT(a)


def _root(a: Array) -> Array:
    found = np.asarray(installed("linalg", "sqrtm").sqrtm(a))
    if np.iscomplexobj(found) or not np.isfinite(found).all():
        raise LinearAlgebraError("sqrtm: the matrix has no real square root, or a singular one")
    return found.astype(a.dtype, copy=False)


ROOT = custom_rule(
    _root,
    vjp=lambda g, y, a: _slope_of_root(y.T, g),
    jvp=lambda tangents, y, a: _slope_of_root(y, tangents[0]),
    infer=lambda a: (a.shape, a.dtype),
)


def _slope_of_root(y: Any, change: Any) -> Tensor:
    try:
        return solve_sylvester(y, y, change)
    except LinearAlgebraError as error:
        raise LinearAlgebraError(f"sqrtm: the root is singular, and has no derivative ({error})") from None


def solve_sylvester(a: Operand, b: Operand, q: Operand) -> Tensor:
    """Solve a x + x b = q for x (m, n), with `a` (m, m), `b` (n, n) and `q` (m, n); computed by scipy.

    Raises:
        LinearAlgebraError: there is no single solution: an eigenvalue of `a` is one of -b.
        ShapeError: shapes do not fit together.
    """
    a, b, q = as_floats(a, b, q)
    _square("solve_sylvester", "a", a)
    _square("solve_sylvester", "b", b)
    if a.ndim != 2 or b.ndim != 2 or q.shape != (a.shape[0], b.shape[0]):
        raise ShapeError(
            f"solve_sylvester: a (m, m), b (n, n) and q (m, n) must fit together, got {a.shape}, {b.shape}, {q.shape}"
        )
    return SYLVESTER(a, b, q)


def _sylvester(a: Array, b: Array, q: Array) -> Array:
    try:
        found = np.asarray(installed("linalg", "solve_sylvester").solve_sylvester(a, b, q))
    except np.linalg.LinAlgError as error:
        raise LinearAlgebraError(f"solve_sylvester: {error}") from None
    # Where an eigenvalue of `a` is one of -b, LAPACK solves a neighbouring equation instead.
    sums = np.abs(np.linalg.eigvals(a)[:, np.newaxis] + np.linalg.eigvals(b))
    size = np.abs(a).max(initial=0) + np.abs(b).max(initial=0)
    if (
        not np.isfinite(found).all()
        or not sums.min(initial=np.inf) > (a.shape[0] + b.shape[0]) * np.finfo(a.dtype).eps * size
    ):
        raise LinearAlgebraError("solve_sylvester: there is no single solution: an eigenvalue of a is one of -b")
    return found


def _pull_sylvester(g: Any, y: Any, a: Any, b: Any, q: Any) -> Any:
    by_q = solve_sylvester(a.T, b.T, g)
    return -(by_q @ y.T), -(y.T @ by_q), by_q


def _push_sylvester(tangents: Any, y: Any, a: Any, b: Any, q: Any) -> Any:
    by_a, by_b, by_q = tangents
    return solve_sylvester(a, b, by_q - by_a @ y - y @ by_b)


SYLVESTER = custom_rule(_sylvester, _pull_sylvester, _push_sylvester, infer=lambda a, b, q: (q.shape, q.dtype))


def solve_banded(l_and_u: tuple[int, int], ab: Operand, b: Operand) -> Tensor:
    """Solve a x = b for x, with a matrix of few diagonals; computed by scipy.

    Args:
        l_and_u: how many diagonals `a` has below and above the main one, l and u.
        ab: its diagonals (l + u + 1, n), the uppermost first: a[i, j] is ab[u + i - j, j]. Elements that lie outside
            of the matrix are not read.
        b: right-hand sides (n,) or (n, k).

    Raises:
        LinearAlgebraError: the matrix is singular.
        ShapeError: shapes do not fit together.
    """
    if not isinstance(l_and_u, (tuple, list)) or len(l_and_u) != 2:
        raise ConfigurationError(f"solve_banded: the first argument must be a pair of integers, got {l_and_u!r}")
    below, above = (whole(n, "solve_banded: the number of diagonals") for n in l_and_u)
    ab, b = as_floats(ab, b)
    if below < 0 or above < 0 or ab.ndim != 2 or ab.shape[0] != below + above + 1:
        raise ShapeError(
            f"solve_banded: the diagonals must be ({below} + {above} + 1, n), one row for each, got shape {ab.shape}"
        )
    if b.ndim not in (1, 2) or b.shape[0] != ab.shape[1]:
        raise ShapeError(f"solve_banded: b must be (n,) or (n, k) with n = {ab.shape[1]}, got shape {b.shape}")
    return as_tensor(_banded(below, above)(ab, b))


def _banded(below: int, above: int) -> Any:
    """Return the op for these numbers of diagonals. Diagonal k has the elements a[j + k, j]: row above + k of `ab`."""
    diagonals = range(-above, below + 1)

    def solve(ab: Array, b: Array) -> Array:
        try:
            found = installed("linalg", "solve_banded").solve_banded((below, above), ab, b, check_finite=False)
        except np.linalg.LinAlgError as error:
            raise LinearAlgebraError(f"solve_banded: {error}") from None
        if not np.isfinite(found).all() and np.isfinite(ab).all() and np.isfinite(b).all():
            raise LinearAlgebraError("solve_banded: the matrix is singular")
        return np.asarray(found)

    def vjp(g: Any, y: Any, ab: Any, b: Any) -> Any:
        transposed = np.stack([np.roll(ab[above + k], k) for k in reversed(diagonals)])
        by_b = _banded(above, below)(transposed, g)
        products = [_moved(by_b, -k) * y for k in diagonals]
        return -np.stack([x if len(x.shape) == 1 else np.sum(x, axis=1) for x in products]), by_b

    def jvp(tangents: Any, y: Any, ab: Any, b: Any) -> Any:
        by_ab, by_b = tangents
        for k in diagonals:
            row = by_ab[above + k] if len(y.shape) == 1 else by_ab[above + k][:, np.newaxis]
            by_b = by_b - _moved(row * y, k)
        return _banded(below, above)(ab, by_b)

    return custom_rule(solve, vjp, jvp, infer=lambda ab, b: (b.shape, b.dtype))


def _moved(x: Any, k: int) -> Any:
    """Return x moved by k along its first axis, with zeros in the places that are left."""
    zeros = np.zeros((min(abs(k), x.shape[0]), *x.shape[1:]), x.dtype)
    return np.concatenate([zeros, x[: max(x.shape[0] - k, 0)]] if k >= 0 else [x[-k:], zeros])
