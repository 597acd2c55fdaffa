"""The Julia engine in many Python processes: start-up, memory of each, and how much all of them get done.

    python -m experiments.processes --most 16

Processes start at the same time, each with one thread of Julia. Memory is what a process has for itself (of what it
shares with others its part of it, PSS). The work is that of one study's network: training steps, and predictions of one
row at a time, for some seconds in all processes at once.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge import registry, spec, weights
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments.formats import fixed
from experiments.papers import model_path

MODEL, BATCH = "mnist-rnn", 100
SECONDS = 3.0
"""How long each kind of work is done."""


@dataclass(frozen=True)
class Row:
    """What was measured of a number of processes."""

    processes: int
    start_seconds: float
    """Until the last of them has trained its first step."""
    memory_bytes: float
    """Of one process, the mean."""
    steps_per_second: float
    """Of all of them together."""
    predictions_per_second: float


def measured(count: int, seconds: float = SECONDS, engine: str = "julia") -> Row:
    """Start this number of processes, let all work at once, and end them."""
    model = spec.load(model_path(MODEL))
    random = np.random.default_rng(0)
    x = random.standard_normal((20 * BATCH, *model.input.sample)).astype(np.float32)
    y, order = random.integers(0, model.output[-1], len(x)), np.arange(len(x))
    initial = weights.initialise(model, 0)

    def start(_: int) -> Worker:
        worker = stack.enter_context(Worker(engine))
        worker.build(model, initial, Optimizer("sgd", 0.001), BATCH)
        worker.train_epoch(x, y, order[:BATCH])
        worker.predict(x[:1])
        return worker

    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        begin = time.perf_counter()
        workers = list(pool.map(start, range(count)))
        started = time.perf_counter() - begin
        memory = float(np.mean([proportional_bytes(worker.pid) for worker in workers]))
        one = x[:1]
        steps = _rate(pool, workers, lambda worker: len(worker.train_epoch(x, y, order)), seconds)
        predictions = _rate(pool, workers, lambda worker: len(worker.predict(one)), seconds)
    return Row(count, started, memory, steps, predictions)


def _rate(pool: ThreadPoolExecutor, workers: Sequence[Worker], work: Callable[[Worker], int], seconds: float) -> float:
    """How much work all workers do in a second, each as much as it can."""

    def until(worker: Worker) -> int:
        done = work(worker)
        while time.perf_counter() < end:
            done += work(worker)
        return done

    begin = time.perf_counter()
    end = begin + seconds
    return sum(pool.map(until, workers)) / (time.perf_counter() - begin)


def proportional_bytes(pid: int) -> int:
    """The memory of a process, of each page that several share its part."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table with a row for 1, 2, 4, ... processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--most", type=int, default=16, help="processes (16)")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--engine", choices=registry.names(), default="julia")
    options: Any = parser.parse_args(arguments)
    registry.get(options.engine).prepare()
    print("| processes | all started, s | memory of each, MB | steps/s | predictions/s |\n|---:|---:|---:|---:|---:|")
    count = 1
    while count <= options.most:
        row = measured(count, options.seconds, options.engine)
        cells = [fixed(row.start_seconds, 1), fixed(row.memory_bytes / 1e6, 0)]
        cells += [fixed(number, 0) for number in (row.steps_per_second, row.predictions_per_second)]
        print(f"| {count} | {' | '.join(cells)} |", flush=True)
        count *= 2


if __name__ == "__main__":
    main()
