"""Large products that are run before the first that matters: when, in which dtype, and in which threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.compile import products
from py_engine.network import Chain, Dense, Trainer, steps

LARGE = np.ones((128, 128))
"""Its product with itself has 2**22 operations."""


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, int]]]:
    """The dtypes of the large products that are run, each with its thread, in a process that has run none."""
    found: list[tuple[Any, int]] = []
    run = products.touch_buffers

    def noted(dtype: Any) -> None:
        run(dtype)
        found.append((np.dtype(dtype), threading.get_ident()))

    monkeypatch.setattr(products, "_touched", set())
    for module in (products, steps):
        monkeypatch.setattr(module, "touch_buffers", noted)
    yield found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_once_for_each_dtype_before_a_product_that_is_worth_it(dtype: Any, touched: list[tuple[Any, int]]) -> None:
    """The second function with such a product finds it done."""
    a = LARGE.astype(dtype)
    for f in (lambda x: pe.ops.sum(x @ x), lambda x: pe.ops.mean(x @ x)):
        np.testing.assert_allclose(pe.compile(f)(a), f(pe.Tensor(a)).numpy(), rtol=1e-6)
    assert [found for found, _ in touched] == [np.dtype(dtype)]


def test_none_where_there_is_no_large_product(touched: list[tuple[Any, int]]) -> None:
    """Small ones, and functions without any, start at once."""
    a = LARGE[:8, :8]
    pe.compile(lambda x: pe.ops.sum(x @ x))(a)
    pe.compile(lambda x: pe.ops.sum(pe.ops.sin(x)))(LARGE)
    assert not touched


def test_in_each_thread_of_a_split_batch(touched: list[tuple[Any, int]]) -> None:
    """OpenBLAS keeps a buffer for each product that is computed at the same time."""
    rng = np.random.default_rng(0)
    x, y = rng.random((64, 128), np.float32), rng.integers(0, 10, 64)
    chain = Chain(Dense(128, 512, name="wide"), Dense(512, 10, name="output"), dtype=np.float32)
    trainer = Trainer(chain, batch_size=64, threads=2, techniques=pe.Techniques(split_batch=True))
    trainer.train_epoch(x, y)
    trainer.close()
    in_threads = [thread for dtype, thread in touched if dtype == np.float32]
    assert len(set(in_threads)) == 2


def test_the_product_is_larger_than_the_blocks_of_kernels() -> None:
    """Rows of the output beyond 768 numbers are cut into blocks, and sums of more than 640 products."""
    assert products.COLUMNS > 768
    assert products.LENGTH > 640
    assert products.ROWS >= 32  # two groups of columns as kernels of OpenBLAS, which see the transpose, have them
