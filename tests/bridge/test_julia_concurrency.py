"""Julia sessions in separate processes, called from a thread pool and from an event loop; many at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bridge import julia as public
from bridge.session import Optimizer, Session
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments import processes
from py_engine.errors import ShapeError

pytestmark = pytest.mark.usefixtures("julia")

SGD = Optimizer("sgd", 0.1)


@pytest.fixture(scope="module")
def sessions(small_paper_model: ModelSpec) -> Iterator[list[Session]]:
    """Two sessions of the same model with other weights, each in its process."""
    made = [public.build(small_paper_model, optimizer=SGD, batch_size=4, seed=seed, process=True) for seed in (1, 2)]
    yield made
    for session in made:
        session.close()


def trained(session: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return session.train_epoch(x, y, np.arange(len(x))), session.predict(x)


def test_sessions_compute_at_the_same_time_in_a_thread_pool(
    sessions: list[Session], small_paper_model: ModelSpec, rng: np.random.Generator
) -> None:
    x, y = rng.standard_normal((12, 15)).astype(np.float32), rng.integers(0, 4, 12)
    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(trained, session, x, y) for session in sessions]]
    for (losses, outputs), seed in zip(found, (1, 2), strict=True):
        alone = public.build(small_paper_model, optimizer=SGD, batch_size=4, seed=seed, process=True)
        expected_losses, expected = trained(alone, x, y)
        alone.close()
        np.testing.assert_array_equal(losses, expected_losses)
        np.testing.assert_array_equal(outputs, expected)


def test_an_event_loop_goes_on_while_a_session_trains(sessions: list[Session], rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((400, 15)).astype(np.float32), rng.integers(0, 4, 400)

    async def program() -> tuple[list[Any], int]:
        ticks = 0
        epochs = asyncio.gather(*(asyncio.to_thread(trained, session, x, y) for session in sessions))
        while not epochs.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return await epochs, ticks

    with ThreadPoolExecutor(1) as pool:  # a test before this one may have left its event loop in this thread
        found, ticks = pool.submit(asyncio.run, program()).result()
    assert ticks > 0 and all(np.isfinite(losses).all() for losses, _ in found)


def test_threads_that_share_a_session_take_turns(sessions: list[Session], rng: np.random.Generator) -> None:
    session = sessions[0]
    rows = [rng.standard_normal((n, 15)).astype(np.float32) for n in range(1, 21)]
    expected = [session.predict(x) for x in rows]
    with ThreadPoolExecutor(8) as pool:
        for outputs, wanted in zip(pool.map(session.predict, rows), expected, strict=True):
            np.testing.assert_array_equal(outputs, wanted)


def test_a_mistake_in_one_thread_is_raised_there_and_the_others_go_on(
    sessions: list[Session], rng: np.random.Generator
) -> None:
    good, bad = rng.standard_normal((3, 15)).astype(np.float32), rng.standard_normal((3, 14)).astype(np.float32)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(sessions[0].predict, x) for x in (good, bad) * 5]
    for number, future in enumerate(futures):
        if number % 2:
            with pytest.raises(ShapeError):
                future.result()
        else:
            assert future.result().shape == (3, 4)


def test_what_can_not_be_built_leaves_no_process(small_paper_model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(Worker, "build", lambda *_, **__: 1 / 0)
    close = Worker.close
    monkeypatch.setattr(Worker, "close", lambda worker: closed.append(worker) or close(worker))
    with pytest.raises(ZeroDivisionError):
        public.build(small_paper_model, process=True)
    assert len(closed) == 1


def test_many_processes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    processes.main(["--most", "2", "--seconds", "0.1", "--engine", "numpy"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for count, line in zip((1, 2), lines[2:], strict=True):
        first, *others = (float(re.sub(r"\s", "", cell)) for cell in line.strip("| ").split("|"))
        assert first == count and all(number > 0 for number in others)
