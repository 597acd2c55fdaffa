"""The networks of `sizes` as they are, in float32 and with two threads: they train as in PyTorch.

What has its effect only with many parameters, samples or words is used here: shares of a batch, products in parts, lazy
updates, Winograd's algorithm.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bridge import registry, weights
from bridge.libjulia.find import Julia
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments import papers
from experiments.data import generated

PAPER = papers.load_paper("sizes")
FAMILIES = {family.id: family for family in PAPER.families}
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"

FIRST, LAST = (0, 3) if CAMPAIGN else (1, 2)
NETWORKS = [(name, size) for name, family in FAMILIES.items() for size in list(family.sizes)[FIRST:LAST]]
IN_JULIA = NETWORKS if CAMPAIGN else [("cnn", "32"), ("text", "50000")]
"""Networks that Julia compiles for in `make test`; a campaign takes all of them."""

BATCH, STEPS = 24, 5
"""The last batch of an epoch has half as many samples."""

ALLOCATED = 200_000
"""Bytes: of all arrays that are alive at a time beside those from before, in numpy, and of a step, in Julia."""

LOSSES, MOVED = 1e-4, 0.03
LOSSES_OF_CNN, MOVED_OF_CNN = 1e-3, 0.2
"""What may differ: a loss, as a part of it, and a parameter, as a part of all that it was changed by.

Most differ by 1e-7 and 1e-6. But Adam's first steps change it by about the learning rate where a gradient is next to
zero, too: with it some losses differ by 2e-5. And where two places of a max-pool differ by roundings only, the gradient
takes another way: in the CNN both of our engines differ from PyTorch in the same way, by 4e-5 and 0.04.
"""


def trained(engine: Any, name: str, size: str, threads: int = 2) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The losses of two epochs, the parameters after them, and those from which they began."""
    family = FAMILIES[name]
    spec = PAPER.sized(family, size)
    rows = generated.drawn_for(spec, BATCH * STEPS - BATCH // 2)
    before = weights.initialise(spec, 3, "float32")
    optimizer = Optimizer(family.optimizer, family.learning_rate)
    built = engine.build(spec, before, optimizer, BATCH, "float32") or engine
    order = np.arange(len(rows.x_train))
    losses = np.concatenate([built.train_epoch(rows.x_train, rows.y_train, order) for _ in range(2)])
    return losses, built.params(), before


def worker(engine: str) -> Any:
    """A fixture: one process of an engine, with two threads, for all tests."""

    @pytest.fixture(scope="module", name=f"{engine}_worker")
    def started() -> Iterator[Worker]:
        with Worker(engine, 2) as found:
            yield found

    return started


numpy_worker, torch_worker = worker("numpy"), worker("torch")


@pytest.fixture(scope="module")
def julia_worker(julia: Julia) -> Iterator[Worker]:
    with Worker("julia", 2) as found:
        yield found


def as_pytorch(ours: Any, torch_worker: Any, name: str, size: str) -> None:
    expected, wanted, before = trained(torch_worker, name, size)
    losses, params, _ = trained(ours, name, size)
    apart, moved_apart = (LOSSES_OF_CNN, MOVED_OF_CNN) if name == "cnn" else (LOSSES, MOVED)
    np.testing.assert_allclose(losses, expected, rtol=apart)
    for parameter, value in wanted.items():
        moved = np.abs(value - before[parameter]).sum()
        assert np.abs(params[parameter] - value).sum() <= moved_apart * moved, f"{parameter} differs from PyTorch's"


@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_numpy_trains_as_pytorch_does(name: str, size: str, torch_worker: Any, numpy_worker: Any) -> None:
    as_pytorch(numpy_worker, torch_worker, name, size)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "size"), IN_JULIA)
def test_julia_trains_as_pytorch_does(name: str, size: str, torch_worker: Any, julia_worker: Any) -> None:
    as_pytorch(julia_worker, torch_worker, name, size)


@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_a_step_of_numpy_allocates_next_to_nothing(name: str, size: str) -> None:
    """At any moment of later epochs: tracemalloc knows all memory of arrays, and the largest sum of it."""
    session, rows = session_of(name, size)
    order = np.arange(len(rows.x_train))
    for _ in range(4):
        session.train_epoch(rows.x_train, rows.y_train, order)
    tracemalloc.start()
    try:
        session.train_epoch(rows.x_train, rows.y_train, order)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        session.train_epoch(rows.x_train, rows.y_train, order)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # At the end of an epoch the rows of an embedding that have waited are updated, many at once.
    matrix = max(array.nbytes for array in session.params().values()) if name == "text" else 0
    session.close()
    assert peak - before < ALLOCATED + 2 * matrix


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "size"), IN_JULIA)
def test_a_step_of_julia_allocates_next_to_nothing(name: str, size: str, julia_worker: Any) -> None:
    family = FAMILIES[name]
    spec = PAPER.sized(family, size)
    rows = generated.drawn_for(spec, BATCH * STEPS)
    optimizer = Optimizer(family.optimizer, family.learning_rate)
    julia_worker.build(spec, weights.initialise(spec, 3, "float32"), optimizer, BATCH, "float32")
    allocated = []
    for repeats in (2, 2, 4):
        order = np.tile(np.arange(len(rows.x_train)), repeats)
        before, _ = julia_worker.allocated()
        julia_worker.train_epoch(rows.x_train, rows.y_train, order)
        allocated.append(julia_worker.allocated()[0] - before)
    _, few, many = allocated
    assert many - few < ALLOCATED * 2 * STEPS


def session_of(name: str, size: str) -> tuple[Any, Any]:
    """A session of numpy, with two threads, and a batch and a half of rows."""
    family = FAMILIES[name]
    spec = PAPER.sized(family, size)
    rows = generated.drawn_for(spec, BATCH * 2 - BATCH // 2)
    optimizer = Optimizer(family.optimizer, family.learning_rate)
    params = weights.initialise(spec, 3, "float32")
    return registry.get("numpy").build(spec, params, optimizer, BATCH, dtype="float32", threads=2), rows


@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_a_step_of_numpy_reads_nothing_that_it_has_not_written(name: str, size: str) -> None:
    found = []
    for byte in (None, 0xFF, 0):
        session, rows = session_of(name, size)
        losses = []
        for _ in range(3):
            losses += list(session.train_epoch(rows.x_train, rows.y_train, np.arange(len(rows.x_train))))
            for tape in session.trainer.tapes if byte is not None else ():
                tape.poison(byte)
        found.append([np.array(losses), *session.params().values()])
        session.close()
    for plain, *poisoned in zip(*found, strict=True):
        for other in poisoned:
            np.testing.assert_array_equal(other, plain)
