"""Freed memory stays with the process, unless its environment has a say."""

from __future__ import annotations

import platform
import resource

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.memory import keep_freed_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")


@glibc
def test_gradients_fetch_their_memory_once():
    if not keep_freed_memory():
        pytest.skip("the environment sets malloc's parameters")

    def rosenbrock(x):
        return np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    gradient, x = pe.grad(rosenbrock), np.zeros(100_000)
    for _ in range(3):
        gradient(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        gradient(x)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    arrays = pages * resource.getpagesize() / x.nbytes / 10
    assert arrays < 1, f"each gradient fetched {arrays:.1f} arrays' memory from the system"  # it computes some 25


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_goes_first(monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert not keep_freed_memory()
