"""Teams of threads: every task is done, and what interrupts one leaves no thread at work."""

from __future__ import annotations

import _thread
import threading
import time

import numpy as np
import pytest

from py_engine.ad.techniques import Techniques
from py_engine.network import BatchNorm, Chain, Dense, Trainer
from py_engine.network.steps import Replay
from py_engine.network.threads import Team


def test_an_error_in_a_thread_reaches_the_caller_and_the_team_goes_on():
    team = Team(2)
    done = []
    with pytest.raises(ZeroDivisionError):
        team.run([lambda: done.append(1), lambda: 1 / 0])
    team.run([lambda: done.append(2), lambda: done.append(3)])
    team.close()
    assert sorted(done) == [1, 2, 3]


def test_a_team_that_is_interrupted_while_it_waits_ends_its_work_first():
    team, done = Team(2), []

    def interrupts():
        _thread.interrupt_main()
        time.sleep(0.2)
        done.append(True)
        raise ValueError("of a run that nobody waits for")

    with pytest.raises(KeyboardInterrupt):
        team.run([lambda: time.sleep(0.05), interrupts])
    assert done
    for _ in range(3):
        team.run([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 1, 1, True, 2, 2, 2]
    team.close()


class Interrupting:
    """A lock of a team, where an interrupt comes when it is released, and something is done before."""

    def __init__(self, lock):
        self.lock, self.acquire = lock, lock.acquire

    def release(self):
        self.lock.release()
        raise KeyboardInterrupt


@pytest.mark.parametrize(("size", "number"), [(2, 0), (3, 0), (3, 1), (4, 1)])
def test_a_team_that_is_interrupted_while_its_threads_start_ends_their_work_first(size, number):
    team, done = Team(size), []
    lock = team._go[number]
    team._go[number] = Interrupting(lock)
    with pytest.raises(KeyboardInterrupt):
        team.run([lambda: None, *[lambda: (time.sleep(0.05), done.append(1))] * (size - 1)])
    assert len(done) == number + 1, "those that were started, and no others"
    team._go[number] = lock
    team.run([lambda: done.append(2)] * size)
    assert sorted(done) == [1] * (number + 1) + [2] * size
    team.close()


def test_tasks_have_what_the_caller_has_numpy_do_about_overflows():
    team, found = Team(3), []
    for how in ("ignore", "raise", "warn"):
        found.clear()
        with np.errstate(over=how):
            team.run([lambda: found.append(np.geterr()["over"])] * 3)
        assert found == [how] * 3
    team.run([lambda: np.seterr(over="ignore")] * 3)
    np.seterr(over="warn")
    found.clear()
    team.run([lambda: found.append(np.geterr()["over"])] * 3)
    assert found == ["warn"] * 3, "what a task has set is gone with it"
    team.close()


def test_a_team_runs_fewer_tasks_than_it_has_threads():
    team, done = Team(3), []
    for count in (1, 3, 2, 1, 3):
        done.clear()
        team.run([lambda: done.append(threading.get_ident())] * count)
        assert len(set(done)) == len(done) == count
    team.close()


def test_where_an_error_keeps_a_thread_from_the_others_they_do_not_wait_for_it():
    team, barrier = Team(2), threading.Barrier(2)

    def fails():
        raise ValueError

    def waits():
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait(timeout=30)

    start = time.perf_counter()
    with pytest.raises(ValueError):
        team.run([fails, waits], barrier.abort)
    assert time.perf_counter() - start < 20, "it did not wait for the end of the barrier's patience"
    team.close()


@pytest.mark.timeout(120)
def test_a_split_batch_that_is_interrupted_before_its_parts_meet_ends(monkeypatch):
    def make():
        chain = Chain(Dense(4, 8), BatchNorm(8), Dense(8, 2), seed=0)
        return Trainer(chain, batch_size=8, threads=2, techniques=Techniques(split_batch=True))

    x, y = np.arange(32, dtype=np.float32).reshape(8, 4) % 7, np.arange(8) % 2
    trainer, meet = make(), Replay._meet
    trainer.train_epoch(x, y)

    def interrupted(step, do, k):
        if k == 0:
            raise KeyboardInterrupt
        meet(step, do, k)

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "_meet", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train_epoch(x, y)
    trainer.train_epoch(x, y)
    undisturbed = make()
    for _ in range(2):
        undisturbed.train_epoch(x, y)
    np.testing.assert_array_equal(trainer.parameters.vector, undisturbed.parameters.vector)
    trainer.close(), undisturbed.close()
