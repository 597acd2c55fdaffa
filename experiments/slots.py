"""Where jobs run: one after the other, or, in measures in which time plays no part, several at a time.

Each job has fresh worker processes either way; side by side, every slot has its own cores.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from bridge import registry as engines
from bridge.errors import EngineUnavailableError, WorkerError
from bridge.worker import Worker

T = TypeVar("T")

MOST = 2
"""Jobs at a time at most, whatever the number of cores: each may take gigabytes of memory."""


LOOK = 0.1
"""Seconds between two looks at the memory of workers that have a limit."""


class Slot:
    """Starts the workers of one job after the other. Another thread may `stop` it."""

    def __init__(self, cores: Sequence[int] | None = None, memory: int | None = None) -> None:
        """`cores`: those that its workers are bound to; None: the first ones.

        `memory`: bytes that its workers may hold together (`bridge.memory.held`). Beyond that the largest is ended, and
        its call raises WorkerError with these numbers. None: no limit.
        """
        self.cores = cores
        self.memory = memory
        self.stopped = False
        self._watching = False
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._lock = threading.Lock()

    def start(self, engine: str, threads: int, counting: bool = False) -> Worker:
        """A fresh worker of an engine; EngineUnavailableError, without a process for it, where that cannot be used.

        `counting`: with all that it allocates to be seen, where that needs its own settings. Raises WorkerError
        when the slot is stopped.
        """
        found = engines.availability(engine)
        if not found.ok:
            raise EngineUnavailableError(found.reason)
        worker = Worker(engine, threads, counting and bool(engines.get(engine).counting), self.cores)
        with self._lock:
            self._workers.add(worker)
            stopped = self.stopped
            watched = self.memory is not None and not self._watching
            self._watching = self._watching or watched
        if watched:
            try:
                threading.Thread(target=self._watch, name="memory", daemon=True).start()
            except BaseException:  # without a watcher there is no limit
                with self._lock:
                    self._watching = False
                worker.close()
                raise
        if stopped:
            worker.close()
            raise WorkerError(f"the worker of engine {engine} was stopped")
        return worker

    def stop(self) -> None:
        """End the workers there are, whose calls then raise WorkerError, and start no others."""
        with self._lock:
            self.stopped = True
            for worker in self._workers:
                worker.kill()

    def _watch(self) -> None:
        """End workers that hold too much, as long as there are any."""
        limit = self.memory or 0
        while True:
            with self._lock:
                held = {worker: worker.memory() for worker in self._workers}
                self._watching = any(held.values())
            if not self._watching:
                return
            total = sum(held.values())
            if total > limit:
                largest = max(held, key=lambda worker: held[worker])
                largest.kill(
                    f"the run held {total // 10**6} MB of memory, more than the {limit // 10**6} MB that it may "
                    "have here"
                )
            del held
            time.sleep(LOOK)


def slots(threads: int, available: int) -> list[Slot]:
    """The slots that fit on the available cores, for workers with this number of threads: 1 to `MOST`."""
    count = min(MOST, available // threads)
    if count < 2:
        return [Slot()]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [Slot(cores[number * threads : (number + 1) * threads] or None) for number in range(count)]


def side_by_side(work: Callable[[T, Slot], None], items: Iterable[T], places: Sequence[Slot]) -> None:
    """Do the work of each item in the first slot that is free.

    The first failure, and ctrl-C, stop all slots, and are raised once these have ended.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)

    def serve(slot: Slot) -> None:
        while not slot.stopped:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            work(item, slot)

    with ThreadPoolExecutor(len(places)) as pool:
        serving = [pool.submit(serve, slot) for slot in places]
        try:
            for served in as_completed(serving):
                served.result()
        except BaseException:
            for slot in places:
                slot.stop()
            raise


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order that starts one later each turn, so that nobody always follows the same one."""
    shift = turn % max(1, len(names))
    return [*names[shift:], *names[:shift]]
