"""Large products that are run before the first that matters: when, in which dtype, and in which threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.compile import products
from py_engine.ad.memory import stretches
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


def wide(dtype: Any = np.float32, units: int = 1024, techniques: pe.Techniques = pe.Techniques()) -> Trainer:  # noqa: B008
    """A trainer of a network whose products take most of the operations, for batches of 16."""
    chain = Chain(Dense(512, units, "relu", name="wide"), Dense(units, 10, name="output"), dtype=dtype)
    return Trainer(chain, batch_size=16, threads=2, techniques=techniques)


@pytest.fixture(scope="module")
def batch() -> tuple[Any, Any]:
    """Samples and labels."""
    rng = np.random.default_rng(0)
    return rng.random((40, 512)), rng.integers(0, 10, 40)


@pytest.mark.parametrize("samples", [1, 16, 40])
def test_shared_products_give_the_gradients_of_whole_ones(samples: int, batch: tuple[Any, Any]) -> None:
    """Each thread of two computes rows or columns of the results, a partial batch's, too."""
    x, y = batch[0][:samples], batch[1][:samples]
    found = []
    for split in ("auto", False):
        trainer = wide(np.float64, techniques=pe.Techniques(split_batch=split))
        losses = trainer.train_epoch(x, y)
        found.append((losses, trainer.loss_and_gradients(x, y), trainer.parameters.as_dict()))
        calls = [call for tape in trainer.tapes for step in tape.instructions for call in step.calls]
        assert any(is_shared_out(call, trainer) for call in calls) == (split == "auto")
        trainer.close()
    (losses, (loss, gradients), trained), (losses_, (loss_, gradients_), trained_) = found
    np.testing.assert_allclose(losses, losses_, rtol=1e-12)
    assert loss == pytest.approx(loss_, rel=1e-12)
    for name in gradients:
        np.testing.assert_allclose(gradients[name], gradients_[name], rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(trained[name], trained_[name], rtol=1e-9, atol=1e-15)


def is_shared_out(call: Any, trainer: Trainer) -> bool:
    """Whether a call of a tape hands its parts to the trainer's threads."""
    return getattr(call, "func", None) == getattr(trainer._threads, "run", 0)


def test_two_runs_with_shared_products_give_the_same_bits(batch: tuple[Any, Any]) -> None:
    """Which thread computes what follows from the shapes."""
    found = []
    for _ in range(2):
        trainer = wide()
        found.append(trainer.train_epoch(batch[0].astype(np.float32), batch[1]))
        trainer.close()
    np.testing.assert_array_equal(*found)


def test_small_products_are_left_to_blas(batch: tuple[Any, Any]) -> None:
    """Handing them to threads would take longer than they do."""
    trainer = wide(units=64)
    trainer.train_epoch(batch[0].astype(np.float32), batch[1])
    calls = [call for tape in trainer.tapes for step in tape.instructions for call in step.calls]
    assert not any(is_shared_out(call, trainer) for call in calls)
    trainer.close()


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda a: a,
    "columns": lambda a: np.asfortranarray(a),
    "part": lambda a: np.tile(a, 2)[:, : a.shape[1]],
}


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(3, 5, 200), (200, 5, 3), (64, 1, 40), (1, 300, 90), (90, 300, 1), (33, 17, 65)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_a_product_make_the_whole(layout: str, shape: tuple[int, int, int], threads: int) -> None:
    """Whatever its sides, the order of its operands in memory and the number of threads."""
    rng = np.random.default_rng(0)
    m, k, n = shape
    a, b = (LAYOUTS[layout](rng.random(sides)) for sides in ((m, k), (k, n)))
    out = np.full((m, n), np.nan)

    def run(calls: Any) -> None:
        assert 1 <= len(calls) <= threads
        for call in calls:
            call()

    products.shared(partial(np.matmul, a, b, out), run, threads)()
    np.testing.assert_allclose(out, a @ b, rtol=1e-12)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_stretches_cover_all_elements_once(length: int, count: int) -> None:
    """And begin where a cache line may."""
    found = stretches(length, count)
    assert 1 <= len(found) <= count
    assert [k for part in found for k in range(length)[part]] == list(range(length))
    assert all(part.start % 16 == 0 for part in found)


def test_a_small_network_starts_no_threads(batch: tuple[Any, Any]) -> None:
    """They would have nothing to do."""
    trainer = wide(units=8)
    trainer.train_epoch(batch[0].astype(np.float32), batch[1])
    assert trainer._threads is None
    trainer.close()
