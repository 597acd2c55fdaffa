"""Teams of threads: every task is done, and what interrupts one leaves no thread at work."""

from __future__ import annotations

import _thread
import threading
import time
import warnings
from contextlib import closing

import numpy as np
import pytest

from py_engine.ad.techniques import Techniques
from py_engine.errors import NonFiniteError
from py_engine.network import Activation, BatchNorm, Chain, Conv2D, Dense, Flatten, Trainer, steps
from py_engine.network import threads as threads_module
from py_engine.network.steps import Replay
from py_engine.network.threads import Team, Trials


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
    trainer, meet = make(), Replay._run_shard
    trainer.train_epoch(x, y)

    def interrupted(step, do, k):
        if k == 0:
            raise KeyboardInterrupt
        meet(step, do, k)

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "_run_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train_epoch(x, y)
    trainer.train_epoch(x, y)
    undisturbed = make()
    for _ in range(2):
        undisturbed.train_epoch(x, y)
    np.testing.assert_array_equal(trainer.parameters.vector, undisturbed.parameters.vector)
    trainer.close(), undisturbed.close()


class Clock:
    """A clock for `Trials`, and runs that take as long as they are told."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.ways = 0.0, seconds, []
        monkeypatch.setattr(threads_module, "perf_counter", lambda: self.now)

    def run(self, way):
        self.ways.append(way)
        self.now += self.seconds[way]

    def runs(self, trials, count):
        self.ways.clear()
        for _ in range(count):
            trials.run(self.run)
        return self.ways


def test_a_comparison_beside_other_work_is_made_again_when_that_has_ended(monkeypatch):
    clock, trials = Clock(monkeypatch, {"two": 0.12, "one": 0.1}), Trials(["two", "one"])
    clock.runs(trials, 6)
    assert trials.decided and trials.way == "one"
    clock.seconds = {"two": 0.05, "one": 0.095}
    clock.runs(trials, 40)
    assert trials.way == "one", "a twentieth less tells nothing"
    clock.seconds["one"] = 0.09
    assert "two" in clock.runs(trials, 60) and trials.way == "two"


def test_a_choice_that_another_comparison_changes_is_watched_as_closely_as_the_first(monkeypatch):
    clock, trials = Clock(monkeypatch, {"two": 0.05, "one": 0.1}), Trials(["two", "one"])
    clock.runs(trials, 6)
    for fast, slow in (("one", "two"), ("two", "one")) * 3:
        clock.seconds = {fast: 0.05, slow: 0.2} if fast == "one" else {fast: 0.05, slow: 0.1}
        if fast == "two":
            trials._left = 0.0
        clock.runs(trials, 30)
        assert trials.way == fast and trials._window < 2


def test_a_long_run_counts_though_threads_of_blas_wait_beside_its_beginning(monkeypatch):
    clock, trials = Clock(monkeypatch, {2: 1.0, 1: 1.5}), Trials([2, 1], [2, 1])
    clock.runs(trials, 6)
    assert trials.decided and trials.way == 2, "three runs of each are enough"


@pytest.mark.parametrize("fewest", [0, 10**9])
def test_gradients_of_parts_have_the_same_sum_whoever_adds_them_up(monkeypatch, rng, fewest):
    monkeypatch.setattr(steps, "SUMS_SHARED_FROM", fewest)
    x, y = rng.standard_normal((12, 5)), np.arange(12) % 3
    found = []
    for threads in (3, 1):
        chain = Chain(Dense(5, 40), BatchNorm(40), Dense(40, 3), seed=0, dtype=np.float64)
        trainer = Trainer(chain, batch_size=12, threads=threads, techniques=Techniques(split_batch=True))
        found.append(trainer.loss_and_gradients(x, y))
        if threads > 1:
            (step,) = trainer._steps.values()
            assert len(step.shards) == 3 and (len(step._dense) == 3) == (fewest == 0)
            shards = [shard.gradient.vector.copy() for shard in step.shards[1:]]
        trainer.close()
    assert all(np.any(part) for part in shards)
    for name, gradient in found[1][1].items():
        np.testing.assert_allclose(found[0][1][name], gradient, rtol=1e-10, atol=1e-14)


def test_where_parts_add_up_to_infinity_no_warning_says_so(monkeypatch):
    monkeypatch.setattr(steps, "SUMS_SHARED_FROM", 0)
    chain = Chain(Dense(40, 4), Dense(4, 2), seed=0)
    values = chain.parameters.as_dict()
    chain.parameters.load(values | {"dense.weight": np.zeros((40, 4)), "dense2.weight": np.array([[8e19, 0]] * 4)})
    trainer = Trainer(chain, batch_size=4, threads=2, techniques=Techniques(split_batch=True))
    with warnings.catch_warnings(), closing(trainer):
        warnings.simplefilter("error")
        with pytest.raises(NonFiniteError, match="added up"):
            trainer.train_epoch(np.full((4, 40), 1e19, np.float32), np.ones(4, np.int64))
    assert np.isfinite(trainer.parameters.vector).all()


def test_what_a_convolution_multiplies_counts_against_the_sum_of_gradients(monkeypatch, rng):
    monkeypatch.setattr(steps, "SPLIT_FROM", 0)
    monkeypatch.setattr(steps, "GRADIENT_MOVES", 1000)

    def is_split(*layers, shape):
        x = rng.standard_normal((8, *shape)).astype(np.float32)
        with closing(Trainer(Chain(*layers, seed=0), batch_size=8, threads=2)) as trainer:
            trainer.loss_and_gradients(x, np.arange(8) % 3)
            return trainer.threads_in_step() == "split over 2 threads"

    def convolutional():
        return is_split(Conv2D(2, 8, 3), Activation("relu"), Flatten(), Dense(8 * 36, 3), shape=(2, 8, 8))

    assert not convolutional() and not is_split(Dense(64, 200), Dense(200, 3), shape=(64,))
    monkeypatch.setattr(steps, "OPERATIONS_PER_BYTE", 1e-3)
    assert convolutional() and not is_split(Dense(64, 200), Dense(200, 3), shape=(64,))
