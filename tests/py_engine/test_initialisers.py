"""Initialisers: the documented distributions, one stream per name, and clear errors."""

from __future__ import annotations

import numpy as np
import pytest

from py_engine.errors import ConfigurationError
from py_engine.network.initialisers import INITIALISERS, ParameterSpec, initialise, initialise_all, stream

FAN_IN, FAN_OUT = 300, 200
ALL = [
    *INITIALISERS,
    {"name": "uniform", "low": -2.0, "high": 3.0},
    {"name": "normal", "mean": 4, "std": 2.0},
]


def draw(initialiser, seed=0, dtype=np.float64):
    spec = ParameterSpec((FAN_IN, FAN_OUT), initialiser, FAN_IN, FAN_OUT)
    return initialise(spec, stream(seed, "weight"), dtype)


@pytest.mark.parametrize(
    ("initialiser", "mean", "variance", "limits"),
    [
        ("glorot_uniform", 0, 2 / 500, (6 / 500) ** 0.5),
        ("glorot_normal", 0, 2 / 500, None),
        ("he_uniform", 0, 2 / 300, (6 / 300) ** 0.5),
        ("he_normal", 0, 2 / 300, None),
        ("uniform", 0, 0.2**2 / 12, 0.1),
        ("normal", 0, 0.1**2, None),
        ({"name": "uniform", "low": -2.0, "high": 3.0}, 0.5, 25 / 12, 3.0),
        ({"name": "normal", "mean": 4, "std": 2.0}, 4, 4, None),
        ("zeros", 0, 0, 0),
        ("ones", 1, 0, 1),
    ],
    ids=str,
)
def test_distribution(initialiser, mean, variance, limits):
    values = draw(initialiser)
    assert values.shape == (FAN_IN, FAN_OUT)
    error = 5 * np.sqrt(variance / values.size)
    assert values.mean() == pytest.approx(mean, abs=error)
    assert values.var() == pytest.approx(variance, rel=0.05)
    if limits is not None:
        assert np.abs(values).max() <= limits
        assert np.abs(values).max() == pytest.approx(limits, rel=1e-3)
    else:
        assert np.abs(values - mean).max() > 3 * np.sqrt(variance), "normal values are not cut off"


@pytest.mark.parametrize("initialiser", ALL, ids=str)
def test_float32_is_the_rounded_float64(initialiser):
    single = draw(initialiser, dtype=np.float32)
    assert single.dtype == np.float32
    assert single.flags.c_contiguous
    np.testing.assert_array_equal(single, draw(initialiser).astype(np.float32))


def test_seed_and_name_decide_and_nothing_else():
    spec = ParameterSpec((5, 4), "glorot_uniform", 5, 4)
    both = initialise_all({"a.weight": spec, "b.weight": spec}, seed=3)
    swapped = initialise_all({"b.weight": spec, "c.weight": spec, "a.weight": spec}, seed=3)
    np.testing.assert_array_equal(both["a.weight"], swapped["a.weight"])
    np.testing.assert_array_equal(both["b.weight"], swapped["b.weight"])
    assert not np.array_equal(both["a.weight"], both["b.weight"])
    assert not np.array_equal(both["a.weight"], initialise_all({"a.weight": spec}, seed=4)["a.weight"])


@pytest.mark.parametrize(
    ("initialiser", "message"),
    [
        ("xavier", r"unknown initialiser 'xavier'; there are: glorot_uniform, "),
        (0.1, r"unknown initialiser 0.1"),
        ({"low": 1.0}, r"unknown initialiser None"),
        ({"name": "normal", "low": 1.0}, r"initialiser normal has no option 'low'; it takes mean, std"),
        ({"name": "zeros", "std": 1.0}, r"initialiser zeros has no option 'std'; it takes none"),
        ({"name": "normal", "std": "1"}, r"normal: std must be a finite number, actual '1'"),
        ({"name": "normal", "std": float("inf")}, r"normal: std must be a finite number, actual inf"),
        ({"name": "normal", "std": -1.0}, r"normal: expected std >= 0, actual std = -1.0"),
        ({"name": "uniform", "low": 1.0, "high": 0.0}, r"uniform: expected low <= high, actual low = 1.0"),
    ],
    ids=str,
)
def test_bad_initialisers_are_named(initialiser, message):
    with pytest.raises(ConfigurationError, match=message):
        draw(initialiser)


@pytest.mark.parametrize("seed", [-1, 0.5, None, True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ConfigurationError, match="a seed must be an integer >= 0"):
        stream(seed, "weight")
