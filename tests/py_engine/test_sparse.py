"""Sparse Jacobians and Hessians: equal to the dense ones, with few colours; patterns miss nothing, or are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad import sparse
from py_engine.ad.op import TABLE
from py_engine.errors import ConfigurationError, ShapeError, TraceError
from tests.py_engine.test_ops import LINES, examples

CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
scipy_sparse = pytest.importorskip("scipy.sparse")
modes = pytest.mark.parametrize("mode", [None, "forward", "reverse"])


def tridiagonal(x):
    return np.sin(x[2:]) * x[1:-1] + x[:-2] ** 2


def rosenbrock(x):
    return np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def colors_of(pattern):
    rows, columns = np.nonzero(pattern)
    return sparse.column_colors(rows, columns, pattern.shape)


def star_colors_of(pattern):
    return sparse.star_colors(*np.nonzero(pattern), len(pattern))


def banded(n, below, above):
    return np.tri(n, k=above, dtype=bool) & ~np.tri(n, k=-below - 1, dtype=bool)


def arrow(n):
    found = np.eye(n, dtype=bool)
    found[0] = found[:, 0] = True
    return found


def blocks(n, size):
    return np.kron(np.eye(n, dtype=bool), np.ones((size, size), bool))


def with_pattern(pattern, rng):
    """A function whose Jacobian has these entries: sin of products with a matrix, element by element of the matrix."""
    rows, columns = np.nonzero(pattern)
    weights = rng.standard_normal(len(rows))

    def function(x):
        terms = np.sin(x[columns] * weights) * x[columns]
        return scattered(terms, rows, len(pattern))

    return function


def scattered(terms, rows, count):
    """Terms added up row by row: the gradient of a lookup."""
    _, pull = pe.vjp(lambda y: y[rows], np.zeros(count))
    return pull(terms)[0]


def patterns(rng):
    yield from (banded(9, 1, 1), banded(12, 2, 0), banded(7, 0, 3), arrow(8), blocks(3, 4), np.zeros((3, 5), bool))
    for density in (0.05, 0.2, 0.6):
        yield rng.uniform(size=(11, 8)) < density


# Equal to the dense matrices ------------------------------------------------------------------------------


@modes
def test_a_jacobian_of_any_pattern_is_the_dense_one(mode, rng):
    for pattern in patterns(rng):
        function, x = with_pattern(pattern, rng), rng.standard_normal(pattern.shape[1])
        dense = pe.jacobian(function, x)
        for given in (None, pattern, scipy_sparse.csr_array(pattern), np.ones_like(pattern)):
            found = pe.sparse_jacobian(function, x, pattern=given, mode=mode)
            np.testing.assert_allclose(found.toarray(), dense, rtol=1e-13, atol=1e-14)
        np.testing.assert_array_equal(pe.sparsity(function, x).toarray(), pattern)


def test_a_hessian_of_any_pattern_is_the_dense_one_and_symmetric(rng):
    for pattern in patterns(rng):
        if pattern.shape[0] != pattern.shape[1]:
            continue
        rows, columns = np.nonzero(pattern)
        weights = rng.standard_normal(len(rows))

        def function(x, rows=rows, columns=columns, weights=weights):
            return np.sum(np.sin(x[rows] * weights) * x[columns] ** 2)

        x = rng.standard_normal(len(pattern))
        dense = pe.hessian(function, x)
        for given in (
            None,
            pattern | pattern.T | np.eye(len(pattern), dtype=bool),
            pattern | np.eye(len(x), dtype=bool),
        ):
            found = pe.sparse_hessian(function, x, pattern=given).toarray()
            np.testing.assert_allclose(found, dense, rtol=1e-12, atol=1e-13)
            np.testing.assert_array_equal(found, found.T)


@modes
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_arrays_of_any_shape_count_in_c_order(mode, chunk, rng):
    x = rng.standard_normal((3, 4))

    def function(x):
        return np.cumsum(x, axis=0)[:, ::2] * x.T[:2].T

    found = pe.sparse_jacobian(function, x, mode=mode, chunk=chunk)
    np.testing.assert_allclose(found.toarray(), pe.jacobian(function, x).reshape(6, 12), rtol=1e-14)
    assert found.nnz == 3 * 3 + 3 * 4  # a cumulated sum counts all of its axis


def test_float32_stays_and_float64_of_it_is_the_results(rng):
    x = rng.standard_normal(20).astype(np.float32)
    found = pe.sparse_jacobian(tridiagonal, x)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.toarray(), pe.jacobian(tridiagonal, x), rtol=1e-6)
    for mode in ("forward", "reverse"):
        wide = pe.sparse_jacobian(lambda x: tridiagonal(x).astype(np.float64), x, mode=mode)
        assert wide.dtype == np.float64
        np.testing.assert_allclose(wide.toarray(), found.toarray(), rtol=1e-6)


def test_empty_arguments_and_results():
    assert pe.sparse_jacobian(lambda x: x[:0], np.ones(3)).shape == (0, 3)
    assert pe.sparse_jacobian(lambda x: np.ones(2) * np.sum(x), np.zeros(0)).shape == (2, 0)
    assert pe.sparse_jacobian(lambda x: np.ones(2) + 0 * np.floor(x), np.zeros(2)).nnz == 0


def test_many_unknowns(rng):
    x = rng.standard_normal(30_000)
    found = pe.sparse_hessian(rosenbrock, x)
    assert found.nnz == 3 * len(x) - 2
    np.testing.assert_allclose(found @ np.ones(len(x)), pe.hvp(rosenbrock, x, np.ones(len(x))), rtol=1e-10, atol=1e-8)


# Colours --------------------------------------------------------------------------------------------------


def test_the_number_of_colors_of_known_patterns():
    assert colors_of(banded(50, 1, 1)).max() + 1 == 3
    assert colors_of(banded(50, 2, 3)).max() + 1 == 6
    assert colors_of(np.eye(9, dtype=bool)).max() + 1 == 1
    assert colors_of(blocks(5, 4)).max() + 1 == 4
    assert colors_of(arrow(9)).max() + 1 == 9
    assert star_colors_of(arrow(9)).max() + 1 == 2
    assert star_colors_of(banded(50, 1, 1)).max() + 1 == 3
    assert star_colors_of(np.eye(9, dtype=bool)).max() + 1 == 1
    assert colors_of(np.zeros((2, 3), bool)).tolist() == [-1, -1, -1]


def test_columns_of_one_color_have_no_row_in_common(rng):
    for pattern in patterns(rng):
        colors = colors_of(pattern)
        for color in range(colors.max() + 1):
            assert pattern[:, colors == color].sum(axis=1).max() == 1


def test_patterns_are_colored_once_and_not_kept(rng, monkeypatch):
    monkeypatch.setattr(sparse, "_KNOWN", known := {})
    patterns = [np.nonzero(rng.random((20, 20)) < 0.2) for _ in range(sparse._MOST_KNOWN + 5)]
    for rows, columns in patterns:
        assert sparse.column_colors(rows, columns, (20, 20)) is sparse.column_colors(rows, columns, (20, 20))
        assert sparse.column_colors(columns, rows, (20, 20)).shape == (20,)
    assert len(known) == sparse._MOST_KNOWN
    assert sum(map(len, known)) == 16 * sparse._MOST_KNOWN


def test_star_colorings_have_no_path_of_four_vertices_in_two_colors(rng):
    for _ in range(60):
        n = int(rng.integers(2, 12))
        upper = np.triu(rng.uniform(size=(n, n)) < rng.uniform(), 1)
        pattern = upper | upper.T
        colors = star_colors_of(pattern)
        for b, c in np.argwhere(pattern):
            assert colors[b] != colors[c]
            ends = [(a, d) for a in np.flatnonzero(pattern[b]) for d in np.flatnonzero(pattern[c])]
            assert not any(
                a != c and d != b and a != d and colors[a] == colors[c] and colors[d] == colors[b] for a, d in ends
            )


def test_fewer_rows_than_columns_are_computed_in_reverse_mode(rng):
    calls = []

    def function(x):
        calls.append(type(x))
        return np.sum(np.sin(x)) * np.ones(2)

    found = pe.sparse_jacobian(function, rng.standard_normal(30))
    assert found.nnz == 60
    assert colors_of(found.toarray() != 0).max() + 1 == 30 and colors_of(found.toarray().T != 0).max() + 1 == 2


# Patterns -------------------------------------------------------------------------------------------------


FEW = [
    replace(line, examples=line.examples if CAMPAIGN else line.examples[:2])
    for line in LINES
    if line.differentiable and not line.random
]
"""A campaign tries all examples."""


@pytest.mark.campaign
@examples(FEW)
def test_no_op_depends_on_more_than_its_pattern(line, example, rng):
    """On no element whose derivative is another than zero, in both the op and its gradient."""
    arrays = line.arrays(rng, example)
    numbers = [i for i, a in enumerate(arrays) if a.dtype == np.float64]
    ends = np.cumsum([0, *(arrays[i].size for i in numbers)]).tolist()
    call = partial(line.call, **example.attrs)

    def function(z):
        given = list(map(Tensor, arrays))
        for i, start, stop in zip(numbers, ends, ends[1:], strict=False):
            given[i] = np.reshape(z[start:stop], arrays[i].shape)
        return np.ravel(call(*given))

    z = np.concatenate([arrays[i].ravel() for i in numbers])
    pattern = pe.sparsity(function, z).toarray()
    jacobian = pe.jacobian(function, z)
    assert not np.any((jacobian != 0) & ~pattern)

    def gradient(z):
        return pe.grad(lambda z: np.sum(function(z) * np.cos(np.arange(len(jacobian)))))(z)

    if example is line.examples[0]:
        assert not np.any((pe.jacobian(gradient, z) != 0) & ~pe.sparsity(gradient, z).toarray())


FOLLOWED = {
    "reshape": lambda x: np.reshape(x, (2, 6)),
    "flip": lambda x: x[::-1] * 2,
    "take": lambda x: x[np.array([[3, 3], [0, -1]])] ** 2,
    "roll": lambda x: np.roll(x, 5),
    "pad": lambda x: np.pad(x, 2, mode="wrap"),
    "where": lambda x: np.where(x > 0, x, 2 * x),
    "concatenate": lambda x: np.concatenate([x, x[:3]]),
    "softmax": lambda x: ops.softmax(np.reshape(x, (4, 3)), axis=1),
    "cumsum": lambda x: np.cumsum(np.reshape(x, (2, 3, 2)), axis=1),
    "sum": lambda x: np.sum(np.reshape(x, (2, 3, 2)), axis=(0, 2)),
    "max": lambda x: np.max(np.reshape(x, (2, 3, 2)), axis=1, keepdims=True),
    "standardize": lambda x: ops.standardize(np.reshape(x, (4, 3)), axis=-1),
    "matmul": lambda x: np.reshape(x, (4, 3)) @ np.ones((3, 2)),
    "stacked": lambda x: np.ones((2, 5, 2)) @ np.reshape(x, (3, 2, 2))[:2],
    "einsum": lambda x: np.einsum("ijk,kl->il", np.reshape(x, (2, 3, 2)), np.ones((2, 2))),
    "diagonal": lambda x: np.einsum("iij->ij", np.reshape(x[:8], (2, 2, 2))),
    "conv": lambda x: ops.conv(np.reshape(x, (1, 2, 6)), np.ones((2, 1, 3)), padding=1, stride=2, groups=2),
    "conv_transpose": lambda x: ops.conv_transpose(np.reshape(x, (1, 2, 6)), np.ones((2, 2, 3)), stride=2),
    "convolve": lambda x: np.convolve(x, np.array([1.0, -2.0, 1.0]), "same"),
    "embedding": lambda x: ops.embedding(np.reshape(x, (4, 3)), np.array([2, 0, 2])),
    "gradient": lambda x: pe.grad(rosenbrock)(x),
    "interp": lambda x: x.astype(np.float32) * 2,
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_element_by_element_has_no_entry_too_many(name, rng):
    """At a point where no derivative is zero by chance; a cumulated sum counts all of its axis."""
    function, x = FOLLOWED[name], rng.uniform(0.5, 1.5, 12)
    pattern, jacobian = pe.sparsity(function, x).toarray(), pe.jacobian(function, x)
    jacobian = jacobian.reshape(pattern.shape)
    if name == "cumsum":
        jacobian = pe.jacobian(lambda x: np.sum(np.reshape(x, (2, 3, 2)), 1, keepdims=True) * np.ones((2, 3, 2)), x)
        jacobian = jacobian.reshape(pattern.shape)
    if name == "max":
        jacobian = pe.jacobian(lambda x: np.sum(np.reshape(x, (2, 3, 2)), 1, keepdims=True), x).reshape(pattern.shape)
    if name == "where":
        jacobian = np.eye(12)
    if name == "gradient":
        jacobian = banded(12, 1, 1)
    np.testing.assert_array_equal(pattern, jacobian != 0)


def test_the_pattern_holds_wherever_the_values_lie(rng):
    def function(x):
        return np.where(x > 0, x, 0.0) * np.roll(x, 1) + x[np.argsort(x)]

    assert pe.sparsity(function, -np.ones(5)).toarray().all()  # by the order of the values, any may come
    branch = pe.sparsity(lambda x: pe.cond(x[0] > 0, lambda x: x, lambda x: x[::-1], x), np.ones(4)).toarray()
    assert np.all(branch | ~(np.eye(4, dtype=bool) | np.eye(4, dtype=bool)[::-1]))


def test_comparisons_and_what_stands_still_has_no_entry():
    assert pe.sparsity(lambda x: np.floor(x) + np.where(x > 0, 1.0, 2.0), np.ones(4)).nnz == 0
    assert pe.sparsity(lambda x: pe.stop_gradient(x) * x[0], np.ones(3)).toarray().tolist() == [[1, 0, 0]] * 3
    assert pe.sparsity(lambda x: np.ones(2), np.ones(3)).nnz == 0


def test_an_op_of_unknown_structure_depends_on_everything():
    rule = pe.custom_rule(lambda x: x[::-1].copy(), vjp=lambda g, y, x: g[::-1], infer=lambda x: (x.shape, x.dtype))
    assert pe.sparsity(lambda x: rule(x) + x, np.ones(4)).toarray().all()
    assert TABLE["solve"].sparsity is None


@modes
def test_a_pattern_that_misses_an_entry_is_refused_by_the_place(mode, rng):
    x = rng.standard_normal(30)
    pattern = pe.sparsity(tridiagonal, x).toarray()
    for _ in range(20):
        lacking = pattern.copy()
        i, j = (int(k) for k in rng.choice(np.argwhere(pattern)))
        lacking[i, j] = False
        with pytest.raises(
            ConfigurationError, match=r"the pattern misses an entry that is not zero, in (row|column) \d+ \("
        ):
            pe.sparse_jacobian(tridiagonal, x, pattern=lacking, mode=mode)
    with pytest.raises(ConfigurationError, match="misses an entry"):
        pe.sparse_jacobian(tridiagonal, x, pattern=np.zeros_like(pattern), mode=mode)
    lacking = pattern.copy()
    lacking[7] = False
    with pytest.raises(ConfigurationError, match=r"in row 7 \(of 1 that are wrong\)"):
        pe.sparse_jacobian(tridiagonal, x, pattern=lacking, mode="forward")


def test_a_hessian_whose_pattern_misses_an_entry_is_refused(rng):
    x = rng.standard_normal(20)
    with pytest.raises(ConfigurationError, match="sparse_hessian: the pattern misses an entry"):
        pe.sparse_hessian(rosenbrock, x, pattern=np.eye(20))


def test_what_a_function_captured_may_change_and_is_then_found_out(rng):
    places = np.array([0, 1, 2])

    def function(x):
        return x[places] ** 2

    x = rng.standard_normal(4)
    pattern = pe.sparsity(function, x)
    places[0] = 3
    with pytest.raises(ConfigurationError, match="in row 0"):
        pe.sparse_jacobian(function, x, pattern=pattern, mode="forward")


def test_infinite_derivatives_are_what_they_are_in_the_dense_one():
    x = np.array([0.0, 1.0, 4.0])
    with np.errstate(divide="ignore"):
        found = pe.sparse_jacobian(np.sqrt, x).diagonal()
    np.testing.assert_array_equal(found, [np.inf, 0.5, 0.25])


# Mistakes -------------------------------------------------------------------------------------------------


def test_mistakes_are_errors_that_say_what_to_do():
    x = np.ones(3)
    with pytest.raises(ConfigurationError, match="mode must be 'forward', 'reverse' or None, got 'both'"):
        pe.sparse_jacobian(np.sin, x, mode="both")
    with pytest.raises(ConfigurationError, match="chunk must be a positive integer or None, got 0"):
        pe.sparse_jacobian(np.sin, x, chunk=0)
    with pytest.raises(ShapeError, match=r"expected a pattern of shape \(3, 3\), got \(2, 2\)"):
        pe.sparse_jacobian(np.sin, x, pattern=np.eye(2))
    with pytest.raises(ShapeError, match="expected one array, got a tuple"):
        pe.sparse_jacobian(lambda p: p[0], (x, x))
    with pytest.raises(ShapeError, match="the function must return one array"):
        pe.sparse_jacobian(lambda x: (x, x), x)
    with pytest.raises(ShapeError, match="the function must return a scalar"):
        pe.sparse_hessian(np.sin, x)
    with pytest.raises(TraceError):
        pe.sparse_jacobian(lambda x: x if np.sum(x) > 0 else -x, x)
    found = pe.sparse_jacobian(lambda x: x if np.sum(x) > 0 else -x, x, pattern=np.eye(3))
    np.testing.assert_array_equal(found.toarray(), np.eye(3))
    with pytest.raises(ConfigurationError, match="inside another transform or a compiled function"):
        pe.grad(lambda x: np.sum(pe.sparse_jacobian(np.sin, x)))(x)
    with pytest.raises(ConfigurationError, match="inside another transform or a compiled function"):
        pe.compile(lambda x: pe.sparse_jacobian(np.sin, x))(x)
    with pytest.raises(ConfigurationError, match="expected a function first"):
        pe.sparsity(x, x)


def test_a_dense_pattern_is_refused_before_it_fills_the_memory():
    with pytest.raises(ConfigurationError, match="more than a sparse matrix is good for"):
        pe.sparsity(lambda x: x * np.sum(x), np.ones(20_000))
    with pytest.raises(ConfigurationError, match="more than a sparse matrix is good for"):
        pe.sparsity(ops.softmax, np.ones(20_000))


def test_without_scipy_it_says_what_to_install():
    program = (
        "import sys; sys.modules['scipy'] = None\n"
        "import numpy as np, py_engine as pe\n"
        "pe.sparse_jacobian(np.sin, np.ones(2))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "ConfigurationError: sparse_jacobian needs scipy.sparse" in done.stderr
    assert "pip install scipy" in done.stderr
