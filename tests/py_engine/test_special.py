"""Special functions are computed block by block, each element by the formula of its region: as if it were alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine import ops

BLOCK = sys.modules["py_engine.ad.ops.special"].BLOCK  # type: ignore[attr-defined]
SPECIAL = {
    **{name: getattr(ops, name) for name in ("erf", "erfc", "gelu", "gammaln", "digamma")},
    "trigamma": partial(ops.polygamma, 1),
    "polygamma of order 4": partial(ops.polygamma, 4),
}
EDGES = np.array([0, 1e-300, 0.46875, 0.5, 1, 4, 8, 16, 20, 30, 1e3, 1e300, np.inf, np.nan])


@pytest.fixture(params=SPECIAL)
def function(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return SPECIAL[request.param]


def values(count: int, dtype: type) -> np.ndarray:
    rng = np.random.default_rng(count)
    found = rng.normal(size=count) * rng.choice([0.1, 1, 10, 100], count)
    edges = np.concatenate([EDGES, -EDGES, EDGES[:-2] * (1 + 1e-15)])
    found[rng.permutation(count)[: edges.size]] = edges[:count]
    with np.errstate(over="ignore"):
        return found.astype(dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 7, 40, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_an_element_is_computed_as_if_it_stood_alone(function: Any, count: int, dtype: type) -> None:
    x = values(count, dtype)
    found = function(x).numpy()
    assert found.dtype == dtype and found.shape == x.shape
    for part in (slice(0, 20), slice(None, None, 997), slice(-20, None)):
        alone = np.array([function(np.array(element)).numpy() for element in x[part]])
        np.testing.assert_array_equal(found[part], alone)
    np.testing.assert_array_equal(pe.compile(function)(x), found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1), (2, BLOCK)])
def test_layouts_make_no_difference(function: Any, shape: tuple[int, ...]) -> None:
    x = np.resize(values(50, np.float64), shape)
    expected = function(x).numpy()
    assert expected.shape == shape
    for same in (np.asfortranarray(x), np.repeat(x[..., np.newaxis], 2, -1)[..., 0], x.T.copy().T):
        np.testing.assert_array_equal(function(same).numpy(), expected)


@pytest.mark.parametrize("x", [0.0, -0.0, 5e-324, -1e-310, 1e-300, -1e-20, 0.3, -7.0, -30.0, -37.5, 1e10, -1e10])
def test_the_derivative_of_gelu_from_its_value(x: float) -> None:
    """The normal distribution function is taken from gelu's value, where that has the digits."""
    slope = 0.5 * ops.erfc(-x / np.sqrt(2)) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(pe.grad(ops.gelu)(x), slope.numpy(), rtol=1e-12, atol=1e-300)
    second = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (2 - x * x)
    np.testing.assert_allclose(pe.grad(pe.grad(ops.gelu))(x), second, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(pe.jvp(ops.gelu, (x,), (1.0,))[1], slope.numpy(), rtol=1e-12, atol=1e-300)
