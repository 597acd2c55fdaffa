"""Several processes that train together compute what one process computes of the same mini-batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from py_engine.errors import ConfigurationError, NonFiniteError
from py_engine.network import (
    LSTM,
    SGD,
    Adam,
    BatchNorm,
    Chain,
    Conv1D,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Reshape,
    Trainer,
)  # fmt: skip
from py_engine.network.losses import get
from py_engine.network.parallel import Parallel

SIZES = (1, 2, 3, 4, 7)


class Threads:
    """A communicator of threads in the place of processes: what each of them gets."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.sent: list[Any] = [None] * size

    def of(self, rank: int) -> Any:
        return type("Rank", (), {
            "Get_rank": lambda _: rank,
            "Get_size": lambda _: self.size,
            "Allreduce": lambda _, sent, received: self.allreduce(rank, sent, received),
        })()  # fmt: skip

    def allreduce(self, rank: int, sent: Any, received: Any) -> None:
        self.sent[rank] = sent
        self.barrier.wait()
        total = np.sum(self.sent, 0, dtype=sent.dtype)
        self.barrier.wait()
        received[...] = total


def together(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` returns in each of `size` threads, called with a communicator."""
    threads = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, threads.of(rank)) for rank in range(size)]
        return [future.result() for future in futures]


NETWORKS: dict[str, tuple[Callable[[], Chain], tuple[int, ...] | int]] = {
    "dense": (lambda: Chain(Dense(6, 8, "tanh"), Dense(8, 3), dtype=np.float64), (6,)),
    "layer norm": (lambda: Chain(Dense(6, 8), LayerNorm(8), Dense(8, 3), dtype=np.float64), (6,)),
    "recurrent": (lambda: Chain(Reshape(3, 2), LSTM(2, 5), Dense(5, 3), dtype=np.float64), (6,)),
    "text": (
        lambda: Chain(Embedding(20, 4), Reshape(4, 6), Conv1D(4, 3, 3), Flatten(), Dense(12, 3), dtype=np.float64), 20
    ),
}  # fmt: skip


def trained(network: str, batch: int, rows: int, communicator: Any, **options: Any) -> tuple[Any, Any]:
    """Losses and parameters after two epochs."""
    make, shape = NETWORKS[network]
    random = np.random.default_rng(0)
    x = random.integers(0, shape, (40, 6)) if isinstance(shape, int) else random.standard_normal((40, *shape))
    y = random.integers(0, 3, 40)
    chain = make()
    rule = options.pop("rule", SGD)(0.1)
    trainer = Trainer(chain, optimizer=rule, batch_size=batch, communicator=communicator, **{"threads": 1, **options})
    losses = [trainer.train_epoch(x, y, np.random.default_rng(epoch).permutation(40)[:rows]) for epoch in range(2)]
    trainer.close()
    return losses, chain.parameters.vector.copy()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [1, 5, 12, 16, 40, 100])
@pytest.mark.parametrize("rows", [1, 7, 36, 40])
def test_any_number_of_processes_trains_as_one(size: int, batch: int, rows: int) -> None:
    losses, vector = trained("dense", batch, rows, None)
    for found, other in together(size, lambda communicator: trained("dense", batch, rows, communicator)):
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        np.testing.assert_allclose(other, vector, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threads": 2},
        {"accumulate": 3},
        {"rule": partial(SGD, momentum=0.9, clip_norm=0.05)},
        {"rule": Adam},
    ],
    ids=["plain", "threads", "accumulated", "clipped", "adam"],
)
def test_every_kind_of_network_and_update_is_that_of_one_process(network: str, options: dict[str, Any]) -> None:
    def work(communicator: Any) -> tuple[Any, Any]:
        return trained(network, 10, 38, communicator, **options)

    losses, vector = work(None)
    for found, other in together(3, work):
        np.testing.assert_allclose(found, losses, rtol=1e-11)
        np.testing.assert_allclose(other, vector, rtol=1e-11, atol=1e-13)


def with_dropout() -> Chain:
    return Chain(Dense(6, 8, "tanh"), Dropout(0.5), Dense(8, 3), dtype=np.float64)


def resumed(
    epochs: range, communicator: Any, kept: tuple[Any, Any] | None = None, threads: int = 1
) -> tuple[Any, Any, Any]:
    """Losses, parameters and state after these epochs, which continue from parameters and a state."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((40, 6)), random.integers(0, 3, 40)
    chain = with_dropout()
    trainer = Trainer(chain, optimizer=SGD(0.1, momentum=0.9), batch_size=7, threads=threads, communicator=communicator)
    if kept is not None:
        chain.parameters.vector[...] = kept[0]
        trainer.load_state(kept[1])
    losses = [trainer.train_epoch(x, y, np.random.default_rng(epoch).permutation(40)) for epoch in epochs]
    state = trainer.state()
    trainer.close()
    return losses, chain.parameters.vector.copy(), state


@pytest.mark.parametrize(("size", "threads"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_a_state_holds_the_dropout_streams_of_all_processes(size: int, threads: int) -> None:
    """Of mini-batches that do not divide each process has drawn another number of masks."""
    whole = together(size, lambda communicator: resumed(range(4), communicator, threads=threads))
    half = together(size, lambda communicator: resumed(range(2), communicator, threads=threads))
    for _, _, state in half[1:]:
        assert all(np.array_equal(array, half[0][2][name]) for name, array in state.items())
    kept = half[0][1:]  # a checkpoint of the first process serves all
    again = together(size, lambda communicator: resumed(range(2, 4), communicator, kept, threads))
    for (losses, vector, state), (first, *_), (rest, last, found) in zip(whole, half, again, strict=True):
        np.testing.assert_array_equal([*first, *rest], losses)
        np.testing.assert_array_equal(last, vector)
        assert all(np.array_equal(found[name], array) for name, array in state.items())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (3, 1)])
def test_on_another_number_of_processes_new_ones_begin_their_streams(before: int, after: int) -> None:
    def streams(communicator: Any) -> tuple[Any, Any]:
        _, _, state = resumed(range(0, 1), communicator if after > 1 else None, kept)
        (found,) = (array for name, array in state.items() if name.startswith("dropout"))
        return found, state

    kept = together(before, lambda communicator: resumed(range(1), communicator if before > 1 else None))[0][1:]
    found = together(after, streams)[0][0]
    assert found.ndim == (3 if after > 1 else 2)
    if after > 1:
        assert len({row.tobytes() for row in found}) == after, "no two processes draw the same masks"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("samples", [1, 2, 5, 6, 7, 64])
def test_parts_are_disjoint_equal_and_count_as_much_as_they_have(size: int, samples: int) -> None:
    parts = [Parallel(Threads(size).of(rank)).part(samples) for rank in range(size)]
    assert sum(weight for *_, weight in parts) == pytest.approx(1)
    counting = [(first, count) for first, count, weight in parts if weight]
    rows = [row for first, count in counting for row in range(first, first + count)]
    assert rows == list(range(samples))
    assert max(count for _, count, _ in parts) - min(count for _, count, _ in parts) <= 1
    assert all(first >= 0 and first + count <= samples and count > 0 for first, count, _ in parts)
    smaller = [Parallel(Threads(size).of(rank)).part(max(1, samples - 1))[1] for rank in range(size)]
    assert all(less <= count for less, (_, count, _) in zip(smaller, parts, strict=True))


@pytest.mark.parametrize("where", range(3))
def test_what_is_not_finite_in_one_part_ends_all_with_the_same_parameters(where: int) -> None:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((12, 6)), random.integers(0, 3, 12)
    x[6 + 2 * where] = np.nan  # in the second mini-batch, in one part of it

    def work(communicator: Any) -> tuple[str, Any]:
        chain = NETWORKS["dense"][0]()
        trainer = Trainer(chain, optimizer=SGD(0.1), batch_size=6, threads=1, communicator=communicator)
        with pytest.raises(NonFiniteError) as error:
            trainer.train_epoch(x, y, np.arange(12))
        return str(error.value), chain.parameters.vector.copy()

    found = together(3, work)
    assert all(message.startswith("step 2 of the epoch") for message, _ in found)
    assert ["another process's part" in message for message, _ in found] == [rank != where for rank in range(3)]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert np.isfinite(found[0][1]).all()


def test_a_layer_that_needs_the_whole_batch_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"statistics of a whole batch.*layer normalisation instead"):
        Trainer(Chain(Dense(6, 8), BatchNorm(8)), communicator=Threads(2).of(0))


def test_a_loss_that_needs_the_whole_batch_says_so() -> None:
    loss = get("softmax_cross_entropy", class_weights=[1, 2, 3])
    with pytest.raises(
        ConfigurationError, match="softmax_cross_entropy with class_weights is the mean of a whole batch"
    ):
        Trainer(Chain(Dense(6, 3)), loss, communicator=Threads(2).of(0))


def test_another_trainer_of_the_chain_changes_no_rank() -> None:
    x, y = np.random.default_rng(0).standard_normal((14, 6)), np.arange(14) % 3

    def work(communicator: Any, beside: bool) -> Any:
        chain = with_dropout()
        trainer = Trainer(chain, optimizer=SGD(0.1), batch_size=14, threads=1, communicator=communicator)
        if beside:
            Trainer(chain)
        trainer.train_epoch(x, y, np.arange(14))
        return chain.parameters.vector.copy()

    np.testing.assert_array_equal(*(together(2, partial(work, beside=beside)) for beside in (False, True)))


def test_a_rank_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a communicator of 2 processes has no rank 2"):
        Parallel(Threads(2).of(2))
