"""Several jobs at a time: each on cores of its own, and none outlives the one that failed."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from bridge.errors import WorkerError
from experiments import slots
from experiments.slots import Slot, side_by_side


def test_every_lane_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots.os, "sched_getaffinity", lambda _: {3, 5, 6, 7})
    assert [slot.cores for slot in slots.slots(2, 4)] == [[3, 5], [6, 7]]
    assert [slot.cores for slot in slots.slots(1, 4)] == [[3], [5]]  # no more than two at a time
    assert [slot.cores for slot in slots.slots(3, 4)] == [None]


def test_items_are_done_at_the_same_time_and_each_once() -> None:
    together = threading.Barrier(2)
    done: list[int] = []

    def work(item: int, _lane: Slot) -> None:
        together.wait(60)
        done.append(item)

    side_by_side(work, range(6), [Slot(), Slot()])
    assert sorted(done) == list(range(6))


def test_a_worker_runs_on_the_cores_of_its_lane() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with Slot(cores[-1:]).start("numpy", 1) as worker:
        assert os.sched_getaffinity(worker.pid) == {cores[-1]}
    with pytest.raises(WorkerError, match="expected as many of"):
        Slot([max(cores) + 1]).start("numpy", 1)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ZeroDivisionError])
def test_a_failure_ends_what_the_other_lane_waits_for(failure: type[BaseException]) -> None:
    together = threading.Barrier(2)
    said: list[str] = []
    begun: list[int] = []

    def work(item: int, slot: Slot) -> None:
        begun.append(item)
        with slot.start("numpy", 1) as worker:
            together.wait(60)
            if item == 1:
                raise failure
            os.killpg(worker.pid, signal.SIGSTOP)  # it would never answer
            try:
                worker.libraries()
            except WorkerError as error:
                said.append(str(error))

    places = [Slot(), Slot()]
    with pytest.raises(failure):
        side_by_side(work, range(4), places)
    assert len(said) == 1 and "SIGKILL" in said[0]
    assert sorted(begun) == [0, 1]
    with pytest.raises(WorkerError, match="was stopped"):
        places[0].start("numpy", 1)
