"""Several jobs at a time: each on its own cores, and none outlives the one that failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bridge import memory
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


def test_workers_that_hold_more_memory_than_their_lane_has_are_ended_and_say_so() -> None:
    with Slot(memory=10**12).start("numpy", 1) as worker:
        assert 5e6 < worker.memory() < 1e9
        size = worker.memory()
    lane = Slot(memory=round(1.5 * size))  # enough for one of them
    with lane.start("numpy", 1) as first:
        first.libraries()
        with (
            pytest.raises(
                WorkerError, match=r"was ended \(the run held \S+ MB of memory, more than the \S+ MB"
            ) as error,
            lane.start("numpy", 1) as second,
        ):
            limit = time.monotonic() + 60
            while time.monotonic() < limit:
                first.libraries()
                second.libraries()
        assert "engine numpy" in str(error.value)


def test_memory_is_that_of_a_process_and_of_what_it_started_but_not_of_files() -> None:
    child = "import sys; held = b'1' * 60_000_000; print(flush=True); sys.stdin.read()"
    mapped = "import mmap; file = open('/proc/self/exe', 'rb'); m = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
    code = (
        f"{mapped}import subprocess, sys; sum(m[::4096]); child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    )
    code += "child.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # of the child
        alone, both = memory.held_alone(process.pid), memory.held(process.pid)
        process.stdin.close()
    assert 60e6 < both - alone < 80e6
    assert alone < 20e6
    assert memory.held(process.pid) == 0


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
