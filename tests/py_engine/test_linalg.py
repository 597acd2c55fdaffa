"""Products at every rank: values from numpy, gradients from PyTorch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.program import trace
from py_engine.errors import NotDifferentiableError, TraceError

seeds = st.integers(0, 2**32 - 1)
matmul_shapes = hnp.mutually_broadcastable_shapes(
    signature=np.matmul.signature, max_dims=3, min_side=0, max_side=4
).map(lambda shapes: shapes.input_shapes)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def assert_same_gradients(function, in_torch, arrays, torch):
    """The value and all gradients of a product are those of torch, computed eagerly and by a replay."""
    variables = [torch.tensor(a, requires_grad=True) for a in arrays]
    expected = in_torch(*variables)
    weights = np.random.default_rng(0).standard_normal(tuple(expected.shape))
    expected.backward(torch.tensor(weights))
    gradients = [v.grad.numpy() if v.grad is not None else np.zeros(v.shape) for v in variables]

    def weighted(*operands):
        return np.sum(function(*operands) * weights)

    for result in (
        pe.grad(weighted, range(len(arrays)))(*arrays),
        pe.compile(pe.grad(weighted, range(len(arrays))))(*arrays),
    ):
        for ours, theirs in zip(result, gradients, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    for value in (function(*map(pe.tensor, arrays)).numpy(), pe.compile(function)(*arrays)):
        np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-10, atol=1e-12)


@given(matmul_shapes, seeds)
def test_matmul_at_every_rank(torch, shapes, seed):
    a, b = draw(seed, *shapes)
    note(f"{a.shape} @ {b.shape}")
    np.testing.assert_allclose((pe.tensor(a) @ b).numpy(), a @ b, rtol=1e-12, atol=1e-14)
    assert_same_gradients(ops.matmul, torch.matmul, [a, b], torch)


@pytest.mark.parametrize("layout", ["C", "F", "steps", "reversed", "broadcast"])
def test_matmul_of_any_memory_layout_is_right_on_a_tape(layout, rng):
    """Layouts that BLAS cannot take are copied first."""
    a = rng.standard_normal((6, 5, 4))
    matrices = {
        "C": a,
        "F": np.asfortranarray(a),
        "steps": np.repeat(a, 2, axis=2)[:, :, ::2],
        "reversed": a[:, ::-1, ::-1],
        "broadcast": np.broadcast_to(a[0], a.shape),
    }[layout]
    b = rng.standard_normal((6, 4, 3))
    left = pe.Tensor(matrices)
    np.testing.assert_allclose(pe.compile(lambda b: left @ b)(b), matrices @ b, rtol=1e-12)
    np.testing.assert_allclose(pe.compile(lambda b: np.swapaxes(b, 1, 2) @ left.transpose(0, 2, 1))(b),
                               np.swapaxes(b, 1, 2) @ matrices.transpose(0, 2, 1), rtol=1e-12)  # fmt: skip


@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 3), seeds)
def test_dot_is_numpy_dot(left, right, n, seed):
    shape_a = (*left, n)
    shape_b = (*right[:-1], n, *right[-1:])
    a, b = draw(seed, shape_a, shape_b)
    np.testing.assert_allclose(np.dot(pe.tensor(a), b).numpy(), np.dot(a, b), rtol=1e-12, atol=1e-14)
    pe.gradcheck(ops.dot, a, b, directions=1)


@st.composite
def contractions(draw):
    """Two shapes, and the axes of each to contract, in any order."""
    summed = draw(st.lists(st.integers(0, 3), max_size=3))
    free_a, free_b = draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.lists(st.integers(0, 3), max_size=2))

    def placed(free):
        order = draw(st.permutations(range(len(free) + len(summed))))
        lengths = [*summed, *free]
        return tuple(lengths[k] for k in order), [order.index(k) for k in range(len(summed))]

    (shape_a, axes_a), (shape_b, axes_b) = placed(free_a), placed(free_b)
    if draw(st.booleans()):
        axes_a = [axis - len(shape_a) for axis in axes_a]
    return shape_a, shape_b, (axes_a, axes_b)


@given(contractions(), seeds)
def test_tensordot_over_any_axes(torch, case, seed):
    shape_a, shape_b, axes = case
    a, b = draw(seed, shape_a, shape_b)
    note(f"{shape_a} and {shape_b} over {axes}")
    value = np.tensordot(pe.tensor(a), b, axes=axes)
    np.testing.assert_allclose(value.numpy(), np.tensordot(a, b, axes=axes), rtol=1e-12, atol=1e-14)
    assert_same_gradients(
        lambda a, b: ops.tensordot(a, b, axes), lambda a, b: torch.tensordot(a, b, dims=axes), [a, b], torch
    )


@given(
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=2), hnp.array_shapes(min_dims=0, min_side=0, max_dims=2), seeds
)
def test_outer_is_numpy_outer(shape_a, shape_b, seed):
    a, b = draw(seed, shape_a, shape_b)
    np.testing.assert_array_equal(np.outer(pe.tensor(a), b).numpy(), np.outer(a, b))


def test_large_products_agree_with_numpy_in_float32(rng):
    """Rows times a matrix at the size of a training step, through BLAS, on both sides of the gradient."""
    x, w = rng.standard_normal((100, 196)).astype(np.float32), rng.standard_normal((196, 64)).astype(np.float32)
    g = pe.compile(pe.grad(lambda x, w: np.sum(np.tanh(x @ w)), (0, 1)))(x, w)
    slope = 1 - np.tanh(x.astype(float) @ w.astype(float)) ** 2
    np.testing.assert_allclose(g[0], slope @ w.T.astype(float), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(g[1], x.T.astype(float) @ slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 33])
@pytest.mark.parametrize(("summed", "columns"), [(256, 256), (1024, 256), (512, 128), (512, 127), (256, 512)])
def test_a_few_rows_by_a_transposed_matrix_are_numpy_s_product_eagerly_and_compiled(rng, dtype, rows, summed, columns):
    """Many of these are computed as their transpose; the result may be a part of another array."""
    a, w = rng.standard_normal((rows, summed)).astype(dtype), rng.standard_normal((columns, summed)).astype(dtype)

    def beside(a, w):
        return np.concatenate([a[:, :1], a @ w.T, a], axis=1)

    expected = np.concatenate([a[:, :1], a @ w.T, a], axis=1)
    eager = beside(pe.tensor(a), pe.tensor(w)).numpy()
    np.testing.assert_allclose(eager, expected, rtol=1e-9 if dtype is np.float64 else 1e-3, atol=1e-3)
    np.testing.assert_array_equal(pe.compile(beside)(a, w), eager)


def fewest_multiplications(lengths):
    each = range(1, len(lengths) - 1)
    return min(
        (
            fewest_multiplications(lengths[: k + 1])
            + fewest_multiplications(lengths[k:])
            + lengths[0] * lengths[k] * lengths[-1]
            for k in each
        ),
        default=0,
    )


@given(st.lists(st.integers(0, 6), min_size=3, max_size=8), st.booleans(), st.booleans(), seeds)
def test_a_product_of_many_matrices_takes_as_few_multiplications_as_possible(lengths, row, column, seed):
    lengths = [1 if row else lengths[0], *lengths[1:-1], 1 if column else lengths[-1]]
    arrays = draw(seed, *pairwise(lengths))
    if row:
        arrays[0] = arrays[0][0]
    if column:
        arrays[-1] = arrays[-1][:, 0]
    symbols = [Tensor.symbol(a.shape, a.dtype) for a in arrays]
    program = trace(lambda *given: [np.linalg.multi_dot(given)], symbols)
    taken = sum(e.outputs[0].size * e.inputs[0].shape[-1] for e in program.equations if e.op.name == "matmul")
    assert taken == fewest_multiplications(lengths)
    found, expected = np.linalg.multi_dot(list(map(Tensor, arrays))).numpy(), np.linalg.multi_dot(arrays)
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_of_equally_short_ways_to_multiply_matrices_that_of_numpy_is_taken():
    large, small = np.full((2, 2), 1e200), np.full((2, 2), 1e-200)
    for arrays in ([small, large, large], [large, large, small], [small, small, large, large]):
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(
                np.linalg.multi_dot(list(map(Tensor, arrays))).numpy(), np.linalg.multi_dot(arrays)
            )


# Decompositions at equal values -------------------------------------------------------------------------------------


def root_by_eigh(x):
    values, vectors = np.linalg.eigh(x)
    return np.sum((vectors * np.sqrt(values)) @ vectors.T)


def through_svd(x):
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return np.sum((u * np.exp(s)) @ vt)


@pytest.mark.parametrize("function", [root_by_eigh, through_svd])
def test_equal_values_have_no_derivative_of_their_vectors(function):
    apart = np.diag([1.0, 2.0, 3.0])
    pe.gradcheck(lambda x: function((x + np.transpose(x)) * 0.5), apart)
    for alike in (np.eye(3), np.diag([2.0, 2.0, 1.0])):
        assert np.isnan(pe.grad(function)(alike)).any()  # and no finite number that is wrong
        assert np.isnan(pe.jvp(function, (alike,), (np.ones((3, 3)),))[1])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.float64, 1e-200), (np.float64, 1e200), (np.float64, 5e307), (np.float32, 1e-30), (np.float32, 1e30)],
)
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (3, 5)])
def test_vectors_of_singular_values_whose_squares_have_no_number_have_derivatives(dtype, scale, shape, rng):
    left, right = (np.linalg.qr(rng.standard_normal((n, 3)))[0] for n in shape)
    x, move = (left * [3, 2, 1]) @ right.T, 0.1 * rng.standard_normal(shape)

    def turned(x):  # the same for all multiples of x
        u, _, vt = np.linalg.svd(x, full_matrices=False)
        return np.sum((u * np.array([1, 3, 2], x.dtype)) @ vt)

    scaled = (scale * x).astype(dtype)
    tolerance = 1e-9 if dtype is np.float64 else 1e-3
    slope = pe.grad(turned)(scaled).astype(float) * scale
    np.testing.assert_allclose(slope, pe.grad(turned)(x), rtol=tolerance, atol=tolerance)
    pushed = pe.jvp(turned, (scaled,), ((scale * move).astype(dtype),))[1]
    np.testing.assert_allclose(pushed, pe.jvp(turned, (x,), (move,))[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3), (3, 5), (5, 3)])
def test_vectors_of_a_small_singular_value_have_derivatives(shape, rng):
    """What lies outside of a complete basis is nothing: divided by a small singular value, rounding would count."""
    *others, m, n = shape
    left, right = (np.linalg.qr(rng.standard_normal((*others, k, 3)))[0] for k in (m, n))
    complete = {"u": m == 3, "v": n == 3}
    for least, dtype in ((0.0, np.float64), (1e-9, np.float64), (1e-4, np.float32)):
        x = ((left * [3.0, 2.0, least]) @ np.swapaxes(right, -1, -2)).astype(dtype)
        for name, of in (("u", 0), ("v", 2)):
            if not complete[name]:
                continue
            weights = rng.standard_normal(np.linalg.svd(x, full_matrices=False)[of].shape).astype(dtype)

            def by(x, of=of, weights=weights):
                return np.sum(np.linalg.svd(x, full_matrices=False)[of] ** 2 * weights)

            slope, move = pe.grad(by)(x), rng.standard_normal(shape).astype(dtype)
            assert np.isfinite(slope).all() and np.abs(slope).max() < 1e3
            pushed = pe.jvp(by, (x,), (move,))[1]
            np.testing.assert_allclose(pushed, np.sum(slope.astype(float) * move), rtol=1e-4, atol=1e-4)


def test_equal_values_have_derivatives_themselves():
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(np.linalg.eigvalsh(x) ** 2))(np.eye(3) * 2), np.eye(3) * 4)
    np.testing.assert_allclose(pe.grad(lambda x: np.linalg.norm(x, "nuc"))(np.eye(3) * 2), np.eye(3), atol=1e-15)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 4), (3, 4, 3)])
def test_a_pseudo_inverse_that_cuts_what_is_not_zero(shape, rng):
    x = rng.standard_normal(shape)
    weights = rng.standard_normal(np.swapaxes(x, -1, -2).shape)
    s = np.linalg.svd(x, compute_uv=False)
    cut = 1.01 * float((s[..., 1] / s[..., 0]).max())

    def total(x):
        return np.sum(np.sin(np.linalg.pinv(x, cut)) * weights)

    pe.gradcheck(total, x)
    pe.gradcheck(pe.grad(total), x)
    move = rng.standard_normal(shape)
    np.testing.assert_allclose(pe.jvp(total, (x,), (move,))[1], np.sum(pe.grad(total)(x) * move), rtol=1e-9)


@pytest.mark.parametrize("values", [[3, 2, 0.5, 0.5], [3, 3, 0.5, 0.4], [3, 3, 0.5, 0.5], [3, 3, 3, 3]])
def test_a_pseudo_inverse_with_equal_singular_values_has_its_gradient(values, rng):
    left, right = (np.linalg.qr(rng.standard_normal((4, 4)))[0] for _ in range(2))
    pe.gradcheck(lambda x: np.sum(np.linalg.pinv(x, 0.3) ** 3), left @ np.diag(values) @ right)


def test_symmetric_matrices_may_be_said_to_be_so():
    rng = np.random.default_rng(4)
    half = rng.standard_normal((2, 4, 4))
    x = half + np.swapaxes(half, -1, -2)  # with eigenvalues of both signs

    def vectors(x):
        return np.linalg.svd(x, hermitian=True)

    for found in (vectors(pe.tensor(x)), pe.compile(vectors)(x)):
        for value, expected in zip(found, vectors(x), strict=True):
            np.testing.assert_allclose(value, expected, atol=1e-12)

    def projected(x):
        u, s, vt = vectors(x)
        return np.sum(np.sin(u * s[:, np.newaxis] @ vt)) + np.sum(u[..., 0] ** 2 * [1, 2, 3, 4]) + np.sum(s**3)

    def values(x):
        return np.sum(np.linalg.svd(x, hermitian=True, compute_uv=False) ** 2 * [1, 2, 3, 4])

    def inverse(x):
        return np.sum(np.cos(np.linalg.pinv(x, hermitian=True)))

    for function in (projected, values, inverse):
        pe.gradcheck(function, x)
        np.testing.assert_allclose(pe.compile(function)(x), function(x), rtol=1e-12)
        lower = pe.grad(function)(x)  # the one that is read, as by eigh
        np.testing.assert_array_equal(np.triu(lower, 1), 0)
        np.testing.assert_allclose(pe.compile(pe.grad(function))(x), lower, atol=1e-9)
    # Where eigenvalues are equal the pseudo-inverse has a derivative still.
    np.testing.assert_allclose(
        pe.grad(lambda x: np.trace(np.linalg.pinv(x, hermitian=True)))(2 * np.eye(3)), -np.eye(3) / 4
    )


def test_least_squares_in_a_compiled_function_says_what_to_write_instead():
    def fitted(a, b):
        return np.linalg.lstsq(a, b)[0]

    a, b = np.vander(np.arange(5.0), 3), np.arange(5.0) ** 3
    with pytest.raises(TraceError, match=r"lstsq: the rank.*numpy.linalg.pinv\(a\) @ b"):
        pe.compile(fitted)(a, b)
    np.testing.assert_allclose(pe.compile(lambda a, b: np.linalg.pinv(a) @ b)(a, b), fitted(a, b), rtol=1e-10)


@pytest.mark.parametrize(
    "shape", [(4, 3), (3, 4), (3, 3), (2, 5, 2), (2, 2, 5), (1, 3), (3, 1), (0, 3, 2), (3, 0), (0, 3)]
)
def test_complete_decompositions_are_numpys(shape):
    x = np.random.default_rng(3).standard_normal(shape)
    for function in (lambda x: np.linalg.qr(x, "complete"), lambda x: np.linalg.svd(x)):
        for found in (function(Tensor(x)), pe.compile(lambda x, f=function: tuple(f(x)))(x)):
            for mine, theirs in zip(found, function(x), strict=True):
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
                np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-13)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.sin(np.linalg.qr(x, "complete")[1]),
        lambda x: np.linalg.qr(np.swapaxes(x, -1, -2), "complete")[0] ** 3,
        lambda x: np.linalg.svd(x)[1] ** 3,
        lambda x: np.linalg.svd(x)[2] ** 4,
        lambda x: np.linalg.svd(np.swapaxes(x, -1, -2))[0] ** 4,
    ],
)
def test_what_complete_decompositions_share_with_thin_ones_has_derivatives(function):
    x = np.random.default_rng(5).standard_normal((2, 4, 3))

    def total(x):
        found = function(x)
        return np.sum(found * np.cos(np.arange(found.size)).reshape(found.shape))

    pe.gradcheck(total, x)
    pe.gradcheck(pe.grad(total), x)
    np.testing.assert_allclose(pe.compile(pe.grad(total))(x), pe.grad(total)(x), rtol=1e-12)
    np.testing.assert_allclose(
        pe.vmap(pe.grad(lambda x: np.sum(function(x))))(x), pe.grad(lambda x: np.sum(function(x)))(x)
    )


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (lambda x: np.linalg.qr(x, "complete")[0], "mode='reduced'"),
        (lambda x: np.linalg.svd(x)[0], "full_matrices=False"),
        (lambda x: np.linalg.svd(x.T)[2], "full_matrices=False"),
    ],
)
def test_the_vectors_that_complete_a_basis_have_no_derivative(function, instead):
    x = np.random.default_rng(5).standard_normal((4, 3))
    loss = lambda x: np.sum(function(x) ** 3)  # noqa: E731
    for call in (lambda: pe.grad(loss)(x), lambda: pe.jvp(loss, (x,), (x,)), lambda: pe.compile(pe.grad(loss))(x)):
        with pytest.raises(NotDifferentiableError, match=f"any basis of what is left.*{instead}"):
            call()
