"""Systems of equations and decompositions of matrices, stacked over leading axes.

Where a matrix is singular, numpy has no inverse, and raises; so do these, as `LinearAlgebraError`, eagerly and in every
replay. `cholesky` and `eigh` read the lower triangle alone, as numpy's do, and that is where their gradient goes: give
(a + aᵀ) / 2 for a symmetric `a` to have it in both. The vectors of equal eigenvalues, or singular values, are any basis
of their space and have no derivative: it is NaN, even of a function that does not depend on which, as a square root of
the matrix, since the whole of it follows from values and vectors together. The values alone have theirs. Nor have the
vectors that complete those of the thin forms: any basis of the rest of the space is one, and their derivative raises.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad.op import (
    Op,
    Shape,
    Tangents,
    as_floats,
    as_tensor,
    as_tensors,
    common_dtype,
    define,
    float_only,
    implements,
    per_matrix,
)
from py_engine.ad.ops.along import argsort
from py_engine.ad.ops.arguments import flag, refuse, whole, wholes
from py_engine.ad.ops.elementary import (
    WHERE,
    abs,
    astype,
    equal,
    greater,
    isnan,
    logical_and,
    logical_not,
    not_equal,
    sign,
    where,
)
from py_engine.ad.ops.indexing import take_along_axis
from py_engine.ad.ops.linalg import MATMUL, matmul
from py_engine.ad.ops.reduction import NORM, max, min, normalize_axes, sum
from py_engine.ad.ops.shape import (
    concatenate,
    diagonal,
    expand_dims,
    flip,
    leading,
    moveaxis,
    part_of,
    reshape,
    swapaxes,
    tril,
    triu,
)
from py_engine.ad.tensor import FLOATS, NO_VALUE, Array, Axis, Node, Operand, Tensor
from py_engine.errors import ConfigurationError, LinearAlgebraError, NotDifferentiableError, ShapeError, TraceError

# Matrices --------------------------------------------------------------------------------------------------------


def _transposed(x: Tensor) -> Tensor:
    return swapaxes(x, -1, -2)


def _matrices(a: Operand) -> Tensor:
    """Return one or several matrices of floats; integers and truth values as float64."""
    (x,) = as_floats(a)
    _check_matrices(x)
    return x


def _check_matrices(x: Tensor) -> None:
    if x.ndim < 2:
        raise ShapeError(f"expected a matrix, or a stack of them, got shape {x.shape}")
    float_only(x.dtype)


def _check_square(x: Tensor) -> None:
    _check_matrices(x)
    if x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"expected square matrices, got shape {x.shape}")


def _infer_square(x: Tensor) -> tuple[Shape, Any]:
    _check_square(x)
    return x.shape, x.dtype


def _infer_of_square(x: Tensor) -> tuple[Shape, Any]:
    _check_square(x)
    return x.shape[:-2], x.dtype


def _by(function: Callable[..., Any], name: str) -> Callable[..., None]:
    """Return the kernel that copies what numpy's function gives."""

    def kernel(*arrays: Array) -> None:
        *operands, out = arrays
        np.copyto(out, _computed(function, name, *operands))

    return kernel


def _computed(function: Callable[..., Any], name: str, *operands: Array) -> Any:
    try:
        return function(*operands)
    except np.linalg.LinAlgError as error:
        raise LinearAlgebraError(f"{name}: {error}") from None


def _diagonal_matrix(x: Tensor) -> Tensor:
    """Return matrices with these diagonals and zeros elsewhere."""
    return expand_dims(x, -1) * Tensor(np.eye(x.shape[-1], dtype=x.dtype))


# Inverses and determinants -----------------------------------------------------------------------------------------


def _infer_solve(a: Tensor, b: Tensor) -> tuple[Shape, Any]:
    dtype = common_dtype((a, b))
    _check_square(a)
    _check_matrices(b)
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"{a.shape[-1]} equations do not fit {b.shape[-2]} right-hand sides, in {a.shape} and {b.shape}"
        )
    try:
        stacked = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ShapeError(f"the leading axes of shapes {a.shape} and {b.shape} do not fit") from None
    return (*stacked, *b.shape[-2:]), dtype


def _solve_jvp(tangents: Tangents, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    t_a, t_b = tangents
    right = t_b if t_a is None else -MATMUL(t_a, y) if t_b is None else t_b - MATMUL(t_a, y)
    assert right is not None
    return SOLVE(a, right)


SOLVE: Op = define(
    name="solve",
    infer=_infer_solve,
    kernel=_by(np.linalg.solve, "solve"),
    vjp=(
        lambda g, y, a, b: -MATMUL(SOLVE(_transposed(a), g), _transposed(y)),
        lambda g, y, a, b: SOLVE(_transposed(a), g),
    ),
    jvp=_solve_jvp,
    flops=lambda a, b: per_matrix(2)(a) + 2 * a.shape[-1] * b.size,
    batch=leading,
    doc="x with a x = b, for square matrices a",
)
INV: Op = define(
    name="inv",
    infer=_infer_square,
    kernel=_by(np.linalg.inv, "inv"),
    vjp=(lambda g, y, x: -MATMUL(MATMUL(_transposed(y), g), _transposed(y)),),
    jvp=lambda t, y, x: -MATMUL(MATMUL(y, t[0]), y),
    flops=per_matrix(6),
    batch=leading,
    doc="inverse of square matrices",
)


def _inverse_or_nan(x: Array) -> Array:
    try:
        found: Array = np.linalg.inv(x)
    except np.linalg.LinAlgError:
        found = np.full_like(x, np.nan) if x.ndim == 2 else np.stack([_inverse_or_nan(part) for part in x])
    return found


INV_OR_NAN: Op = replace(
    INV,
    name="inv_or_nan",
    kernel=_by(_inverse_or_nan, "inv_or_nan"),
    doc="inverse of square matrices, NaN where one is singular",
)
DET: Op = define(
    name="det",
    infer=_infer_of_square,
    kernel=_by(np.linalg.det, "det"),
    vjp=(lambda g, y, x: _as_factor(g * y) * _transposed(INV(x)),),
    jvp=lambda t, y, x: y * _trace_of_product(INV(x), t[0]),
    flops=per_matrix(2),
    batch=leading,
    doc="determinant of square matrices; its derivative needs their inverse",
)
LOGABSDET: Op = define(
    name="logabsdet",
    infer=_infer_of_square,
    kernel=_by(lambda x: np.linalg.slogdet(x)[1], "slogdet"),
    vjp=(lambda g, y, x: _as_factor(g) * _transposed(INV(x)),),
    jvp=lambda t, y, x: _trace_of_product(INV(x), t[0]),
    flops=per_matrix(2),
    batch=leading,
    doc="logarithm of the absolute value of the determinant",
)
DETSIGN: Op = define(
    name="detsign",
    infer=_infer_of_square,
    kernel=_by(lambda x: np.linalg.slogdet(x)[0], "slogdet"),
    constant=True,
    flops=per_matrix(2),
    batch=leading,
    doc="sign of the determinant",
)


def _as_factor(x: Tensor) -> Tensor:
    return expand_dims(x, (-2, -1))


def _trace_of_product(a: Tensor, b: Tensor) -> Tensor:
    return sum(a * _transposed(b), (-2, -1))


@implements(np.linalg.solve)
def solve(a: Operand, b: Operand) -> Tensor:
    """Solve a x = b for x, with square matrices `a` (..., n, n) and right-hand sides `b` (n,) or (..., n, k).

    Raises:
        LinearAlgebraError: a matrix is singular.
    """
    a, b = as_floats(a, b)
    if b.ndim == 1:
        return SOLVE(a, expand_dims(b, -1))[..., 0]
    return SOLVE(a, b)


@implements(np.linalg.inv)
def inv(a: Operand) -> Tensor:
    """The inverse of square matrices (..., n, n).

    Raises:
        LinearAlgebraError: a matrix is singular.
    """
    return INV(_matrices(a))


@implements(np.linalg.det)
def det(a: Operand) -> Tensor:
    """The determinant of square matrices (..., n, n). That of a singular one is 0, and has no gradient: it raises."""
    return DET(_matrices(a))


@implements(np.linalg.slogdet)
def _slogdet(a: Operand) -> Any:
    kind: Any = type(np.linalg.slogdet(np.eye(1)))
    x = _matrices(a)
    return kind(DETSIGN(x), LOGABSDET(x))


# Cholesky ------------------------------------------------------------------------------------------------------------


def _symmetric(x: Tensor) -> Tensor:
    """Return the symmetric matrices with the lower triangles of `x`."""
    return tril(x) + _transposed(tril(x, -1))


def _halved(x: Tensor) -> Tensor:
    """Return the lower triangles, the diagonals halved."""
    return (tril(x) + tril(x, -1)) * 0.5


def _pull_cholesky(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    inner = _halved(MATMUL(_transposed(y), tril(g)))
    right = SOLVE(_transposed(y), inner)
    found = _transposed(SOLVE(_transposed(y), _transposed(right)))
    return (found + _transposed(found)) * 0.5


def _push_cholesky(t: Tangents, y: Tensor, x: Tensor) -> Tensor:
    (tangent,) = t
    assert tangent is not None
    left = SOLVE(y, (tangent + _transposed(tangent)) * 0.5)
    return MATMUL(y, _halved(SOLVE(y, _transposed(left))))


CHOLESKY: Op = define(
    name="cholesky",
    infer=_infer_square,
    kernel=_by(np.linalg.cholesky, "cholesky"),
    vjp=(_pull_cholesky,),
    jvp=_push_cholesky,
    flops=per_matrix(1),
    batch=leading,
    doc="lower triangular l with l lᵀ = x, for symmetric positive definite x",
)


@implements(np.linalg.cholesky)
def cholesky(a: Operand, /, *, upper: bool = False) -> Tensor:
    """The lower triangular matrices l with l lᵀ = a, for symmetric positive definite `a` (..., n, n).

    Only the lower triangle of `a` is read, and has a gradient; with `upper` the upper one, and the result is lᵀ.

    Raises:
        LinearAlgebraError: a matrix is not positive definite.
    """
    x = _matrices(a)
    _check_square(x)
    if flag(upper):
        return _transposed(CHOLESKY(_symmetric(_transposed(x))))
    return CHOLESKY(_symmetric(x))


# Decompositions with several results -----------------------------------------------------------------------------


def _several(name: str, function: Callable[..., Any], infer: Any, vjp: Any, jvp: Any, thirds: int, doc: str) -> Op:
    def kernel(x: Array, *outs: Array, **attrs: Any) -> None:
        for out, found in zip(outs, _computed(partial(function, **attrs), name, x), strict=True):
            np.copyto(out, found)

    flops = per_matrix(thirds)  # of a matrix
    return define(name, infer, kernel=kernel, several=True, vjp=vjp, jvp=jvp, flops=flops, batch=leading, doc=doc)


def _apart(values: Tensor) -> Tensor:
    """Return 1 / (v[j] - v[i]) for i ≠ j, NaN where these are equal, and 0 for i = j."""
    n = values.shape[-1]
    differences = expand_dims(values, -2) - expand_dims(values, -1)
    same = equal(differences, 0)
    unknown = np.where(np.eye(n, dtype=bool), 0, np.nan).astype(values.dtype)
    return WHERE(same, unknown, 1 / WHERE(same, 1, differences))


def _infer_eigh(x: Tensor, UPLO: str) -> list[tuple[Shape, Any]]:
    _check_square(x)
    return [(x.shape[:-1], x.dtype), (x.shape, x.dtype)]


def _pull_eigh(cotangents: Tangents, needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    by_values, by_vectors = cotangents
    values, vectors = node.result(0), node.result(1)
    inner: Tensor | None = None if by_values is None else _diagonal_matrix(by_values)
    if by_vectors is not None:
        turned = _apart(values) * MATMUL(_transposed(vectors), by_vectors)
        inner = turned if inner is None else inner + turned
    if inner is None:
        return [None]
    found = MATMUL(MATMUL(vectors, inner), _transposed(vectors))
    return [(found + _transposed(found)) * 0.5]


def _push_eigh(tangents: Tangents, node: Node, x: Tensor, UPLO: str) -> list[Tensor | None]:
    (t,) = tangents
    assert t is not None
    values, vectors = node.result(0), node.result(1)
    inner = MATMUL(MATMUL(_transposed(vectors), (t + _transposed(t)) * 0.5), vectors)
    return [diagonal(inner, 0, -2, -1), MATMUL(vectors, _apart(values) * inner)]


EIGH: Op = _several(
    *("eigh", np.linalg.eigh, _infer_eigh, _pull_eigh, _push_eigh),
    thirds=27,
    doc="eigenvalues, rising, and eigenvectors of symmetric x",
)


def _lower(function: str, a: Any, UPLO: Any) -> Tensor:
    if UPLO not in ("L", "U", "l", "u"):
        raise ConfigurationError(f"{function}: UPLO must be 'L' or 'U', got {UPLO!r}")
    x = _matrices(a)
    _check_square(x)
    return _symmetric(x if UPLO in ("L", "l") else _transposed(x))


@implements(np.linalg.eigh)
def _eigh(a: Operand, UPLO: str = "L") -> Any:
    kind: Any = type(np.linalg.eigh(np.eye(1)))
    return kind(*EIGH.apply_several((_lower("eigh", a, UPLO),), {"UPLO": UPLO}))


@implements(np.linalg.eigvalsh)
def _eigvalsh(a: Operand, UPLO: str = "L") -> Tensor:
    return EIGH.apply_several((_lower("eigvalsh", a, UPLO),), {"UPLO": UPLO})[0]


def _infer_svd(x: Tensor, full: bool = False) -> list[tuple[Shape, Any]]:
    _check_matrices(x)
    *others, m, n = x.shape
    k = builtins.min(m, n)
    return [((*others, m, k), x.dtype), ((*others, k), x.dtype), ((*others, k, n), x.dtype)]


def _between_squares(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return s[j] / (s[j]² - s[i]²) and s[i] / (s[j]² - s[i]²), each as `_apart` has it for i ≠ j, i = j and equals.

    By differences and sums, since squares may overflow or vanish; halved, since sums may overflow.
    """
    between, half = _apart(s), s * 0.5
    row, column = expand_dims(half, -2), expand_dims(half, -1)
    sums = row + column
    sums = WHERE(equal(sums, 0), 1, sums)
    return between * (row / sums), between * (column / sums)


def _pull_svd(cotangents: Tangents, needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    by_u, by_s, by_v = cotangents
    u, s, v = node.result(0), node.result(1), _transposed(node.result(2))
    row = expand_dims(s, -2)
    m, n = node.inputs[0].shape[-2:]
    by_row, by_column = _between_squares(s)
    terms = [] if by_s is None else [MATMUL(MATMUL(u, _diagonal_matrix(by_s)), _transposed(v))]
    if by_u is not None:
        turned = MATMUL(_transposed(u), by_u)
        inner = by_row * (turned - _transposed(turned))
        terms.append(MATMUL(MATMUL(u, inner), _transposed(v)))
        if m > n:  # else nothing is outside, but what rounding leaves
            outside = (by_u - MATMUL(u, turned)) / row
            terms.append(MATMUL(outside, _transposed(v)))
    if by_v is not None:
        by_v = _transposed(by_v)
        turned = MATMUL(_transposed(v), by_v)
        inner = by_column * (turned - _transposed(turned))
        terms.append(MATMUL(MATMUL(u, inner), _transposed(v)))
        if n > m:
            outside = (by_v - MATMUL(v, turned)) / row
            terms.append(MATMUL(u, _transposed(outside)))
    found = terms[0] if terms else None
    for term in terms[1:]:
        assert found is not None
        found = found + term
    return [found]


def _push_svd(tangents: Tangents, node: Node, x: Tensor, full: bool = False) -> list[Tensor | None]:
    (t,) = tangents
    assert t is not None
    u, s, v = node.result(0), node.result(1), _transposed(node.result(2))
    row = expand_dims(s, -2)
    inner = MATMUL(MATMUL(_transposed(u), t), v)
    by_row, by_column = _between_squares(s)
    by_u = MATMUL(u, by_row * inner + by_column * _transposed(inner))
    by_v = MATMUL(v, by_column * inner + by_row * _transposed(inner))
    m, n = x.shape[-2:]
    if m > n:  # else nothing is outside, but what rounding leaves
        moved = MATMUL(t, v) / row
        by_u = by_u + (moved - MATMUL(u, MATMUL(_transposed(u), moved)))
    if n > m:
        moved = MATMUL(_transposed(t), u) / row
        by_v = by_v + (moved - MATMUL(v, MATMUL(_transposed(v), moved)))
    return [by_u, diagonal(inner, 0, -2, -1), _transposed(by_v)]


def _computed_svd(x: Array, full: bool = False) -> tuple[Array, Array, Array]:
    u, s, vt = np.linalg.svd(
        x, full_matrices=full
    )  # of a matrix of low rank the vectors depend on which form is asked for
    k = s.shape[-1]
    return u[..., :k], s, vt[..., :k, :]


SVD: Op = _several(
    "svd",
    _computed_svd,
    _infer_svd,
    _pull_svd,
    _push_svd,
    thirds=60,
    doc="u, s and vᵀ of the singular value decomposition x = u diag(s) vᵀ, in its thin form",
)


def _infer_rest(x: Tensor, of: str) -> tuple[Shape, Any]:
    _check_matrices(x)
    *others, m, n = x.shape
    return (*others, m, m - n), x.dtype


def _kernel_rest(x: Array, out: Array, of: str) -> None:
    if of == "qr":
        np.copyto(out, np.linalg.qr(x, "complete")[0][..., x.shape[-1] :])
    elif of == "u":
        np.copyto(out, _computed(np.linalg.svd, "svd", x)[0][..., x.shape[-1] :])
    else:
        vt = _computed(np.linalg.svd, "svd", np.swapaxes(x, -1, -2))[2]
        np.copyto(out, np.swapaxes(vt, -1, -2)[..., x.shape[-1] :])


def _no_rest(*given: Any, of: str) -> Any:
    name, instead = ("qr", "mode='reduced'") if of == "qr" else ("svd", "full_matrices=False")
    raise NotDifferentiableError(
        f"{name}: the vectors that complete those of a matrix that is not square have no derivative: any basis of what "
        f"is left of the space would do; take numpy.linalg.{name}(x, {instead})"
    )


REST = Op(
    name="rest",
    infer=_infer_rest,
    kernel=_kernel_rest,
    vjp=(_no_rest,),
    jvp=_no_rest,
    flops=per_matrix(8),
    batch=leading,
    doc="columns that complete those of q, u or v to a basis, for matrices of more rows than columns",
)


def _thin_svd(a: Operand, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The thin singular value decomposition a = u diag(s) vt of matrices (..., m, n).

    Returns:
        u (..., m, k), s (..., k) falling, vt (..., k, n), with k the smaller of m and n; those of the full form where
        `full` asks for them.
    """
    u, s, vt = SVD.apply_several((_matrices(a),), {"full": True} if full else {})
    return u, s, vt


@implements(np.linalg.svd)
def _svd(a: Operand, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    x = _matrices(a)
    m, n = x.shape[-2:]
    full = flag(full_matrices) and flag(compute_uv) and m != n
    u, s, vt = _svd_by_eigh(x) if flag(hermitian) else _thin_svd(x, full)
    if not flag(compute_uv):
        return s
    if full and m > n:
        u = concatenate([u, REST(x, of="u")], -1)
    if full and m < n:
        vt = concatenate([vt, _transposed(REST(_transposed(x), of="v"))], -2)
    kind: Any = type(np.linalg.svd(np.eye(1)))
    return kind(u, s, vt)


def _svd_by_eigh(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of symmetric matrices, of which the lower triangle is read, as numpy finds it:
    the values are those of the eigenvalues, and v has the vectors of u with the eigenvalues' signs."""
    values, vectors = EIGH.apply_several((_lower("svd", x, "L"),), {"UPLO": "L"})
    falling = flip(argsort(abs(values)), -1)
    values, u = take_along_axis(values, falling), take_along_axis(vectors, expand_dims(falling, -2))
    return u, abs(values), _transposed(u * expand_dims(sign(values), -2))


def _infer_qr(x: Tensor) -> list[tuple[Shape, Any]]:
    _check_matrices(x)
    *others, m, n = x.shape
    if m < n:
        raise ShapeError(f"expected at least as many rows as columns, got shape {x.shape}")
    return [((*others, m, n), x.dtype), ((*others, n, n), x.dtype)]


def _right_solve(x: Tensor, r: Tensor) -> Tensor:
    """Return x r⁻¹."""
    return _transposed(SOLVE(_transposed(r), _transposed(x)))


def _pull_qr(cotangents: Tangents, needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    by_q, by_r = cotangents
    q, r = node.result(0), node.result(1)
    inner: Tensor | None = None if by_r is None else MATMUL(r, _transposed(triu(by_r)))
    if by_q is not None:
        product = MATMUL(_transposed(by_q), q)
        inner = -product if inner is None else inner - product
    if inner is None:
        return [None]
    symmetric = tril(inner) + _transposed(tril(inner, -1))
    total = MATMUL(q, symmetric)
    return [_transposed(SOLVE(r, _transposed(total if by_q is None else by_q + total)))]


def _push_qr(tangents: Tangents, node: Node, x: Tensor) -> list[Tensor | None]:
    (t,) = tangents
    assert t is not None
    q, r = node.result(0), node.result(1)
    moved = _right_solve(t, r)
    inner = MATMUL(_transposed(q), moved)
    below = tril(inner, -1)
    turned = below - _transposed(below)
    return [moved - MATMUL(q, inner - turned), MATMUL(inner - turned, r)]


QR: Op = _several(
    *("qr", np.linalg.qr, _infer_qr, _pull_qr, _push_qr),
    thirds=8,
    doc="q, orthonormal, and r, upper triangular, of x = q r",
)


def _factors(a: Operand) -> tuple[Tensor, Tensor]:
    """The decomposition a = q r of matrices (..., m, n) into orthonormal columns q (..., m, k) and upper triangular
    r (..., k, n), with k the smaller of m and n; the first columns must be independent."""
    x = _matrices(a)
    m, n = x.shape[-2:]
    if m >= n:
        q, r = QR.apply_several((x,), {})
        return q, r
    q, r = QR.apply_several((x[..., :m],), {})
    return q, concatenate([r, MATMUL(_transposed(q), x[..., m:])], -1)


@implements(np.linalg.qr)
def _qr(a: Operand, mode: str = "reduced") -> Any:
    if mode not in ("reduced", "complete", "r"):
        raise ConfigurationError(f"qr: on tensors mode is 'reduced', 'complete' or 'r', got {mode!r}")
    x = _matrices(a)
    q, r = _factors(x)
    *others, m, n = x.shape
    if mode == "complete" and m > n:
        q = concatenate([q, REST(x, of="qr")], -1)
        r = concatenate([r, Tensor(np.zeros((*others, m - n, n), x.dtype))], -2)
    kind: Any = type(np.linalg.qr(np.eye(1)))
    return r if mode == "r" else kind(q, r)


# Inverses of other matrices -------------------------------------------------------------------------------------------


def _infer_pinv(x: Tensor, rcond: float) -> tuple[Shape, Any]:
    _check_matrices(x)
    return (*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype


def _kernel_pinv(x: Array, out: Array, rcond: float) -> None:
    np.copyto(out, _computed(lambda x: np.linalg.pinv(x, rcond), "pinv", x))


def _between_kept_and_cut(x: Tensor, rcond: float) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """What singular values that were cut off, without being 0, add to the derivative of a pseudo-inverse.

    With the factors x = u diag(s) vᵀ and m = uᵀ dx v it is v (k + lᵀ) uᵀ, of k = far * mᵀ + near * m and l = far * m +
    near * mᵀ, by the singular subspaces of those kept and those cut, which turn towards each other.

    Returns:
        u, v, far and near; None where what is cut off is rounding.
    """
    if rcond <= 16 * np.finfo(x.dtype).eps * builtins.max(x.shape[-2:]) or not x.size:
        return None
    u, s, vt = _thin_svd(x)
    kept = greater(s, rcond * part_of(s, s.ndim - 1, 0, 1))
    row, column = expand_dims(s, -2), expand_dims(s, -1)
    pairs = logical_and(expand_dims(kept, -2), logical_not(expand_dims(kept, -1)))
    near = where(pairs, column, 0.0) / where(pairs, (row - column) * (row + column) * row, 1.0)
    return u, _transposed(vt), near * (column / where(pairs, row, 1.0)), near


def _with_cut(found: Tensor, m: Tensor, x: Tensor, rcond: float, pulled: bool) -> Tensor:
    """Return the derivative among matrices of one rank, by a tangent or cotangent `m`, with what the cut adds."""
    parts = _between_kept_and_cut(x, rcond)
    if parts is None:
        return found
    u, v, far, near = parts
    left, right = (v, u) if pulled else (u, v)
    inner = MATMUL(MATMUL(_transposed(left), m), right)
    turned = _transposed(inner)
    moved = near * inner + far * turned + _transposed(far * inner + near * turned)
    return found + MATMUL(MATMUL(right, moved), _transposed(left))


def _pull_pinv(g: Tensor, y: Tensor, x: Tensor, rcond: float) -> Tensor:
    yt, gt = _transposed(y), _transposed(g)
    left = MATMUL(gt, MATMUL(y, yt))
    right = MATMUL(MATMUL(yt, y), gt)
    found = left - MATMUL(x, MATMUL(y, left)) - MATMUL(MATMUL(yt, g), yt)
    return _with_cut(found + right - MATMUL(MATMUL(right, y), x), g, x, rcond, True)


def _push_pinv(t: Tangents, y: Tensor, x: Tensor, rcond: float) -> Tensor:
    (tangent,) = t
    assert tangent is not None
    yt, tt = _transposed(y), _transposed(tangent)
    left = MATMUL(MATMUL(y, yt), tt)
    right = MATMUL(tt, MATMUL(yt, y))
    found = left - MATMUL(MATMUL(left, x), y) - MATMUL(MATMUL(y, tangent), y)
    return _with_cut(found + right - MATMUL(y, MATMUL(x, right)), tangent, x, rcond, False)


PINV: Op = define(
    name="pinv",
    infer=_infer_pinv,
    kernel=_kernel_pinv,
    vjp=(_pull_pinv,),
    jvp=_push_pinv,
    flops=per_matrix(60),
    batch=leading,
    doc="pseudo-inverse; its derivative is that among matrices with as many singular values above the cut",
)


def pinv(a: Operand, rcond: float | None = None) -> Tensor:
    """The pseudo-inverse (..., n, m) of matrices (..., m, n).

    Singular values below `rcond` times the largest count as 0 (None: 1e-15). The derivative is that among matrices with
    as many above it. With an `rcond` above rounding, second derivatives at equal singular values are NaN.
    """
    return PINV(_matrices(a), rcond=1e-15 if rcond is None else float(rcond))


@implements(np.linalg.pinv)
def _pinv(a: Operand, rcond: float | None = None, hermitian: bool = False, *, rtol: Any = NO_VALUE) -> Tensor:
    if rcond is not None and rtol is not NO_VALUE:
        raise ConfigurationError("pinv: rcond and rtol mean the same; give one of them")
    if rtol is None:
        x = as_tensor(a)
        rtol = builtins.max(x.shape[-2:], default=1) * np.finfo(x.dtype if x.dtype in FLOATS else np.float64).eps
    rcond = rcond if rtol is NO_VALUE else rtol
    if rcond is not None and not isinstance(rcond, (int, float, np.integer, np.floating)):
        raise ConfigurationError("pinv: rcond must be a number")
    x = _matrices(a)
    # Without eigenvectors, which have no derivative where eigenvalues are equal.
    return pinv(_lower("pinv", x, "L") if flag(hermitian) else x, rcond)


@implements(np.linalg.lstsq)
def _lstsq(a: Operand, b: Operand, rcond: float | None = None) -> Any:
    """Only of full rank: what else numpy returns depends on values."""
    x, right = as_floats(a, b)
    if x.ndim != 2 or right.ndim not in (1, 2) or x.shape[0] != right.shape[0]:
        raise ShapeError(f"lstsq: expected a matrix and right-hand sides of as many rows, got {x.shape}, {right.shape}")
    m, n = x.shape
    cut = np.finfo(x.dtype).eps * (builtins.max(m, n) if rcond is None else 1)
    if rcond is not None:
        if not isinstance(rcond, (int, float, np.integer, np.floating)):
            raise ConfigurationError(f"lstsq: rcond must be a number, got {rcond!r}")
        cut = float(rcond) if rcond >= 0 else cut  # of a negative one LAPACK takes the precision itself
    found = matmul(pinv(x, cut), right)
    singular = _thin_svd(x)[1]
    if singular.data is None:
        raise TraceError(
            "lstsq: the rank, and which residuals there are, depend on values, which a traced function does not have; "
            "use numpy.linalg.pinv(a) @ b, or numpy.linalg.solve(a.T @ a, a.T @ b)"
        )
    found_values = singular.numpy()
    rank = np.int32((found_values > cut * found_values.max(initial=0)).sum())
    residuals = right - matmul(x, found)
    squares = sum(residuals * residuals, 0)
    if rank < n or m <= n:
        squares = Tensor(np.zeros(0, x.dtype))
    return found, reshape(squares, (squares.size,)), rank, singular


@implements(np.linalg.matrix_power)
def matrix_power(a: Operand, n: int) -> Tensor:
    """The product of `n` equal square matrices (..., m, m); of the inverses where `n` is negative."""
    x, power = as_tensor(a), whole(n, "matrix_power: n")
    _check_square(x)
    if power < 0:
        x, power = INV(x), -power
    found: Tensor | None = None
    while power:
        if power % 2:
            found = x if found is None else MATMUL(found, x)
        power //= 2
        if power:
            x = MATMUL(x, x)
    if found is None:
        return where(np.zeros(x.shape, np.bool_), x, np.eye(x.shape[-1], dtype=x.dtype))
    return found


@implements(np.linalg.multi_dot)
def _multi_dot(arrays: Sequence[Operand], *, out: None = None) -> Tensor:
    refuse("linalg.multi_dot", out=(out,))
    if not isinstance(arrays, (list, tuple)) or len(arrays) < 2:
        raise ShapeError("multi_dot: expected a list of at least two arrays")
    first, *rest = as_tensors(arrays)
    for x in (first, *rest):
        float_only(x.dtype)
    if not (1 <= first.ndim <= 2 and 1 <= rest[-1].ndim <= 2 and _all_matrices(rest[:-1])):
        raise ShapeError("multi_dot: expected matrices; the first and the last may be vectors")
    matrices = [reshape(first, (1, first.size)) if first.ndim == 1 else first, *rest]
    if rest[-1].ndim == 1:
        matrices[-1] = reshape(rest[-1], (rest[-1].size, 1))
    return reshape(_product(matrices), first.shape[:-1] + rest[-1].shape[1:])


def _product(matrices: Sequence[Tensor]) -> Tensor:
    """Return the product of matrices in the order of fewest multiplications, of equally many in that of numpy.

    See Cormen et al., Introduction to Algorithms, matrix-chain multiplication.
    """
    n = len(matrices)
    lengths = [*(x.shape[0] for x in matrices), matrices[-1].shape[1]]
    # How many multiplications the matrices from i to j take at least, and behind which of them they are split.
    best = {(i, i): (0, i) for i in range(n)}
    for i, j in [(i, i + further) for further in range(1, n) for i in range(n - further)]:
        best[i, j] = builtins.min(
            (best[i, k][0] + best[k + 1, j][0] + lengths[i] * lengths[k + 1] * lengths[j + 1], k) for k in range(i, j)
        )
    parts = [(0, n - 1)]
    for i, j in parts:  # which grows: the parts of each follow it
        if i < j:
            k = best[i, j][1]
            parts += [(i, k), (k + 1, j)]
    products: dict[tuple[int, int], Tensor] = {}
    for i, j in reversed(parts):
        k = best[i, j][1]
        products[i, j] = matrices[i] if i == j else matmul(products[i, k], products[k + 1, j])
    return products[0, n - 1]


def _all_matrices(arrays: Sequence[Tensor]) -> bool:
    return not [x for x in arrays if x.ndim != 2]


# Norms ---------------------------------------------------------------------------------------------------------------


def _vector_norm(x: Tensor, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    if ord is None or ord == 2:
        return NORM(x, axes=axes, keepdims=keepdims)
    if ord == np.inf:
        return max(abs(x), axes, keepdims=keepdims)
    if ord == -np.inf:
        return min(abs(x), axes, keepdims=keepdims)
    if ord == 0:
        return sum(astype(not_equal(x, 0), x.dtype), axes, keepdims=keepdims)
    if ord == 1:
        return sum(abs(x), axes, keepdims=keepdims)
    if not isinstance(ord, (int, float, np.integer, np.floating)) or isinstance(ord, bool):
        raise ConfigurationError(f"norm: {ord!r} is no norm of vectors")
    powers = sum(abs(x) ** float(ord), axes, keepdims=keepdims)
    if ord < 0:
        return powers ** (1 / float(ord))
    # At zero the root's derivative is infinite; 0 is one of the norm's there.
    zero = equal(powers, 0)
    return where(zero, 0, where(zero, 1, powers) ** (1 / float(ord)))


def _matrix_norm(x: Tensor, ord: Any, axes: tuple[int, int], keepdims: bool) -> Tensor:
    if ord is None or ord == "fro":
        return NORM(x, axes=tuple(sorted(axes)), keepdims=keepdims)
    moved = moveaxis(x, axes, (-2, -1))
    if ord in ("nuc", 2, -2):
        singular = _thin_svd(moved)[1]
        found = sum(singular, -1) if ord == "nuc" else max(singular, -1) if ord == 2 else min(singular, -1)
    elif ord in (1, -1, np.inf, -np.inf):
        sums = sum(abs(moved), -2 if ord in (1, -1) else -1)
        found = max(sums, -1) if ord > 0 else min(sums, -1)
    else:
        raise ConfigurationError(f"norm: {ord!r} is no norm of matrices")
    if not keepdims:
        return found
    return reshape(found, [1 if d in axes else n for d, n in enumerate(x.shape)])


@implements(np.linalg.norm)
def norm(x: Operand, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The norm of vectors or matrices over `axis`, of all elements as one vector when both are None.

    Args:
        x: the array.
        ord: of vectors any number, np.inf or -np.inf; of matrices "fro", "nuc", 1, -1, 2, -2, np.inf or -np.inf; None
            is the Euclidean norm. Subgradient 0 at the origin of that one.
        axis: one axis of vectors, or a pair of matrices; None with `ord`: all of a vector, or of a matrix.
        keepdims: whether the reduced axes stay, with length one.
    """
    (x,) = as_floats(x)
    keep = flag(keepdims)
    if axis is None:
        if ord is None:
            return NORM(x, axes=normalize_axes(None, x.ndim), keepdims=keep)
        if not 1 <= x.ndim <= 2:
            raise ShapeError(f"norm: with ord an axis is needed for shape {x.shape}")
        axes: tuple[int, ...] = tuple(range(x.ndim))
    else:
        normalize_axes(axis, x.ndim)
        axes = tuple(a % x.ndim for a in wholes(axis, "norm: each axis"))
    if len(axes) == 1:
        return _vector_norm(x, ord, axes, keep)
    if len(axes) == 2:
        return _matrix_norm(x, ord, (axes[0], axes[1]), keep)
    raise ShapeError(f"norm: the axes are one of a vector or two of a matrix, got {axis}")


@implements(np.linalg.matrix_norm)
def _matrix_norm_of(x: Operand, /, *, keepdims: bool = False, ord: Any = "fro") -> Tensor:
    a = _matrices(x)
    return _matrix_norm(a, ord, (a.ndim - 2, a.ndim - 1), flag(keepdims))


@implements(np.linalg.vector_norm)
def _vector_norm_of(x: Operand, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2) -> Tensor:
    (a,) = as_floats(x)
    return _vector_norm(a, 2 if ord is None else ord, normalize_axes(axis, a.ndim), flag(keepdims))


@implements(np.linalg.svdvals)
def _svdvals(x: Operand, /) -> Tensor:
    return _thin_svd(x)[1]


@implements(np.linalg.cond)
def _cond(x: Operand, p: Any = None) -> Tensor:
    a = _matrices(x)
    if not a.size:
        raise ShapeError("cond: there is no condition number of no elements")
    if p is None or p in (2, -2):
        singular = _thin_svd(a)[1]
        found = singular[..., 0] / singular[..., -1] if p != -2 else singular[..., -1] / singular[..., 0]
    else:
        axes = (a.ndim - 2, a.ndim - 1)
        found = _matrix_norm(a, p, axes, False) * _matrix_norm(INV_OR_NAN(a), p, axes, False)
    # NaN is that of a singular matrix, which has no inverse or is 0 / 0, unless the matrix holds one.
    holds_nan = not_equal(max(astype(isnan(a), a.dtype), (a.ndim - 2, a.ndim - 1)), 0)
    return where(logical_and(isnan(found), logical_not(holds_nan)), np.inf, found)
