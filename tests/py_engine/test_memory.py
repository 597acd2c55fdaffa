"""Freed memory stays with the process, unless its environment has a say."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.memory import keep_freed_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@glibc
def test_gradients_fetch_their_memory_once():
    if not keep_freed_memory():
        pytest.skip("does not apply: the environment sets malloc's parameters")

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
    assert not keep_freed_memory.__wrapped__()


@glibc
@pytest.mark.parametrize(
    ("asked", "program"),
    [
        (0, "pe.ops.exp(np.ones(3))"),
        (0, "from py_engine.network import Chain, Dense, Trainer; Trainer(Chain(Dense(2, 3)))"),
        (1, "pe.grad(np.sum)"),
        (1, "pe.tensor([1.0], requires_grad=True).sum().backward()"),
    ],
)
def test_only_who_asks_for_a_gradient_changes_the_process(asked, program):
    """An engine that is measured in a worker must not find another malloc because the worker imports py_engine."""
    check = "from py_engine.ad.memory import keep_freed_memory as keep; print(keep.cache_info().currsize)"
    done = subprocess.run(
        [sys.executable, "-c", f"import numpy as np, py_engine as pe; {program}; {check}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == asked
