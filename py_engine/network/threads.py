"""A team of threads that runs one task per thread, again and again, at the cost of two locks.

And `Trials`, which find out which way of using threads is the fastest.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

Task = Callable[[], Any]
Way = TypeVar("Way")

TURNS, LEAST_SECONDS = 3, 0.25
"""Turns of each way, at least, and seconds from the first run to the last."""

BUSY_SECONDS, TURN_SECONDS = 0.1, 0.15
"""After a product threads of BLAS wait busily for 0.1 s, beside those that run what is tried next: seconds of a turn
that do not count for that reason, and of the whole turn."""

LONG_BESIDE = 10
"""Times those busy seconds from which on a run counts, though threads of BLAS wait busily beside its beginning."""

GAIN, GAIN_IN_BLAS = 1.03, 1.1
"""How many times as fast the first ways must be: below that a lucky run decides, and fewer threads do as well. Threads
of BLAS must gain more: what they gain depends on which processors they happen to run on."""

AGAIN_SECONDS, AGAIN_TIMES = 20.0, 50
"""The ways are compared again, since other work that had the processors may have ended, or begun: after at
least these seconds of runs, and at least this many times those of the last comparison."""

WATCHED_SECONDS = 0.25
"""Seconds of runs in the chosen way after which they are compared with the comparison's, at least, and at least those
of that comparison: if most took longer than with fewer threads, or were as much faster than they were then as tells
that other work had the processors, it is made again. Twice as many the next time, half as many if that changes the
choice."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Trials(Generic[Way]):
    """Ways of doing the same thing, tried in turn until it is known which is the fastest, and now and then again.

    Those that use more come first; of ways that take about the same time the last is chosen. Medians are compared. They
    are compared again where the chosen way has become slower than a later one was, or much faster than it was itself:
    the processors on which its threads run may be others now, or busy, or have been busy then.

    Args:
        ways: what `run` calls its argument with.
        blas: how many threads of BLAS each uses; by default all the same. If these differ, a turn of a way takes
            `TURN_SECONDS`, the first `BUSY_SECONDS` of which do not count but in long runs; else it is one run.
        fixed: the way that is used before one is chosen, and left where the others do not compute the same numbers; by
            default the first.
    """

    def __init__(self, ways: Sequence[Way], blas: Sequence[int] = (), fixed: Way | None = None) -> None:
        self.ways = list(ways)
        self._fixed = fixed
        self._gains = [GAIN_IN_BLAS if count > min(blas) else GAIN for count in blas] or [GAIN] * len(self.ways)
        self._busy, self._turn = (BUSY_SECONDS, TURN_SECONDS) if len(set(blas)) > 1 else (0.0, 0.0)
        self.compared = len(self.ways) == 1
        """Whether only those ways are left that give the same numbers, where that matters."""
        self.steps = 0
        """How many were made in the fixed way before that was known."""
        self._chosen = 0 if len(self.ways) == 1 else None
        self._left = 0.0  # seconds of runs until the ways are compared again
        self._limit = math.inf  # seconds of a run that fewer threads would take
        self._floor = 0.0  # seconds of a run that is faster than it was in the comparison
        self._window = 0.0  # seconds of runs that are held against it together
        self._watched, self._runs = 0.0, 0  # seconds of such runs, and how many
        self._slow = self._fast = 0  # how many of them took longer than that limit, and less than that floor
        self._seconds: list[list[float]] = []
        """Of each way in each run that counts, while they are compared."""
        self._begun = 0.0
        self._took = 0.0  # seconds of this comparison's runs
        self._turns = 0  # that are over
        self._spent = 0.0  # seconds of this turn

    @property
    def decided(self) -> bool:
        """Whether a way was chosen."""
        return self._chosen is not None

    @property
    def way(self) -> Way:
        """The way that was chosen last; before that the fixed one."""
        return self.fixed if self._chosen is None else self.ways[self._chosen]

    @property
    def fixed(self) -> Way:
        """The way that is used where no measurement has chosen, or may."""
        return self.ways[0] if self._fixed is None else self._fixed

    @property
    def comparing(self) -> bool:
        """Whether the next run is one of those that tell which way is the fastest."""
        if len(self.ways) == 1:
            return False
        return not self.decided or bool(self._seconds) or self._left <= 0

    @property
    def next(self) -> Way:
        """The way of the next run: the chosen one, or the one whose turn it is."""
        return self.ways[self._turns % len(self.ways)] if self.comparing else self.way

    def run(self, do: Callable[[Way], Any]) -> Any:
        """Return what `do` returns for the next way."""
        if len(self.ways) == 1:
            return do(self.way)
        way, comparing = self.next, self.comparing
        start = perf_counter()
        result = do(way)
        end = perf_counter()
        if comparing:
            self._compare(start, end)
        else:
            self.spend(end - start)
        return result

    def spend(self, seconds: float) -> None:
        """Note the seconds of a run in the chosen way."""
        self._left -= seconds
        self._watched += seconds
        self._runs += 1
        self._slow += seconds > self._limit
        self._fast += seconds < self._floor
        if self._watched >= self._window:
            if 2 * max(self._slow, self._fast) > self._runs:
                self._left, self._window = 0.0, 2 * self._window
            self._watched, self._runs, self._slow, self._fast = 0.0, 0, 0, 0

    def _compare(self, start: float, end: float) -> None:
        if not self._seconds:
            self._seconds, self._begun, self._took = [[] for _ in self.ways], start, 0.0
        number, seconds = self._turns % len(self.ways), end - start
        counts = self._spent >= self._busy or seconds >= LONG_BESIDE * self._busy
        if counts:
            self._seconds[number].append(seconds)
        self._spent += seconds
        self._took += seconds
        if not counts or self._spent < self._turn:
            return
        self._turns, self._spent = self._turns + 1, 0.0
        rounds, rest = divmod(self._turns, len(self.ways))
        if not rest and rounds >= TURNS and end - self._begun >= LEAST_SECONDS:
            self._choose([float(np.median(seconds)) for seconds in self._seconds])
            self._seconds, self._turns = [], 0

    def _choose(self, usual: Sequence[float]) -> None:
        """Choose by the seconds that a run in each way usually takes."""
        before, self._chosen = self._chosen, max(k for k in range(len(usual)) if self._does_as_well(k, usual))
        self._left = max(AGAIN_SECONDS, AGAIN_TIMES * self._took)
        self._limit = GAIN * min(usual[self._chosen + 1 :], default=math.inf)
        self._floor = usual[self._chosen] / GAIN_IN_BLAS
        kept = self._window if self._chosen == before else self._window / 4
        self._window = max(kept, self._took, WATCHED_SECONDS)
        self._watched, self._runs, self._slow, self._fast = 0.0, 0, 0, 0

    def _does_as_well(self, k: int, usual: Sequence[float]) -> bool:
        """Whether none of the ways before gains what it must to be chosen rather than this one."""
        return all(usual[k] <= gain * seconds for gain, seconds in zip(self._gains, usual[:k], strict=False))

    def keep_first(self, seconds: Sequence[float]) -> None:
        """Choose the first way, until the next comparison, where one run in each shows that it is the fastest."""
        if all(seconds[0] * self._gains[0] < others - self._busy for others in seconds[1:]):
            self._took = sum(seconds)
            self._choose(seconds)
            self._limit, self._floor = math.inf, 0.0  # one run tells too little to be watched

    def fix(self) -> None:
        """Leave the fixed way only, since the others do not compute the same numbers."""
        self.ways, self._chosen = [self.fixed], 0


class Team:
    """`size` threads, the caller's among them. numpy releases the interpreter's lock in long calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._tasks: Sequence[Task] = ()
        self._contexts: Sequence[contextvars.Context] = ()
        """Of each further thread's task the caller's context variables."""
        self._errors: list[BaseException] = []
        self._go = [threading.Lock() for _ in range(size - 1)]
        """For each further thread, released when it has a task."""
        self._started = self._finished = 0
        """How many of the further threads have a task in this run, and how many have done it."""
        self._finishing = threading.Lock()
        self._done = threading.Lock()
        """Released when a thread has done its task."""
        self._closed = False
        for lock in (*self._go, self._done):
            lock.acquire()
        try:
            for i in range(size - 1):
                threading.Thread(target=self._work, args=(i,), daemon=True, name=f"py_engine-{i + 1}").start()
        except RuntimeError:  # the system gives no more threads
            self.close()
            raise

    def run(self, tasks: Sequence[Task], failed: Callable[[], Any] = lambda: None) -> None:
        """Run at most `size` tasks, each in its thread, and return when all are done, even where that is interrupted.

        Each has the caller's context variables, among them what numpy does about overflows (`np.errstate`).
        An exception in one of them is raised here, after the others have finished. One in the caller's thread, or an
        interrupt, calls `failed` first: others may wait for what that thread does not do now.
        """
        self._tasks, self._errors = tasks, []
        self._contexts = [contextvars.copy_context() for _ in tasks[1:]]  # a context is entered by one thread at a time
        self._started = self._finished = 0
        interrupt: KeyboardInterrupt | None = None
        try:
            for number, go in enumerate(self._go[: len(tasks) - 1], 1):
                self._started = number  # an interrupt is raised after a call, so not between this line and the next
                go.release()
            tasks[0]()
        except BaseException:
            failed()
            raise
        finally:
            # No thread may be left: it writes what the caller reads next. And none keeps what its task holds.
            while self._finished < self._started:
                try:
                    while self._finished < self._started:
                        self._done.acquire()
                except KeyboardInterrupt as raised:
                    interrupt = raised
            self._tasks = self._contexts = ()
        if interrupt is not None:
            raise interrupt
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def close(self) -> None:
        """End the threads."""
        self._closed = True
        for go in self._go:
            go.release()

    def _work(self, i: int) -> None:
        while True:
            self._go[i].acquire()
            if self._closed:
                return
            try:
                self._contexts[i].run(self._tasks[i + 1])
            except BaseException as error:  # handed to the thread that waits
                self._errors.append(error)
            finally:
                with self._finishing:
                    self._finished += 1
                    if self._done.locked():
                        self._done.release()
