"""Processes that work at a sweep in a shared folder, with workers that train nothing; started by `test_sharing.py`.

    python sharing_driver.py FOLDER LOG SEEDS SECONDS

For each line of its input, the name of a machine, it forks a process of that machine, and prints its number.

A process says what it runs, and when, in lines of LOG. There is no flock here, as on some network file systems, and
processes of two machines cannot see each other: only the files of the folder tell whether another one lives.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import io
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bridge.registry import ENGINES, Availability, Registered
from bridge.session import Evaluation
from experiments import data, leases, machine, papers, provenance, slots, sources, sweep
from experiments.data.dataset import Dataset
from experiments.progress import Progress
from experiments.results import Results

FOLDER, LOG, SEEDS, SECONDS = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
MACHINE = ""


def no_flock(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


fcntl.flock = fcntl.lockf = no_flock
leases.BEAT, leases.MISSED, leases.POLL = 0.1, 20, 0.02
leases.identity = lambda: (MACHINE, f"boot-of-{MACHINE}", "namespace")  # type: ignore[assignment]
provenance.machine = lambda: dataclasses.replace(machine.machine(), stepping=MACHINE)  # type: ignore[assignment]
provenance.commit = lambda: ("c0ffee" * 6, False)  # type: ignore[assignment]
provenance.cores = lambda: 2
data.load = lambda *_, **__: ROWS  # type: ignore[assignment]
Registered.availability = lambda self: Availability(True, "", {"numpy": "2.0"})  # type: ignore[method-assign]

X = np.zeros((300, 784), dtype=np.float32)
Y = np.arange(300) % 10
ROWS = Dataset("mnist", "sample", X, Y, X[:50], Y[:50], digest="d" * 64, origin="here", notice="invented rows")


def log(what: str) -> None:
    line = json.dumps([what, MACHINE, os.getpid(), time.monotonic()]) + "\n"
    handle = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(handle, line.encode())
    os.close(handle)


class FakeWorker:
    """Trains nothing, and takes its time."""

    import_seconds = start_seconds = build_seconds = seconds = 0.01

    def __init__(self, engine: str, *_: Any, **__: Any) -> None:
        self.engine, self.pid, self.epochs = ENGINES[engine], 0, 0

    def __enter__(self) -> FakeWorker:
        log("begin")
        return self

    def __exit__(self, *_: object) -> None:
        log("end")

    def train_epoch(self, _x: Path, _y: Path, order: Path) -> np.ndarray:
        self.epochs += 1
        if self.epochs == 1:
            time.sleep(SECONDS)
        return np.linspace(2.3, 1.0, 3)

    def evaluate(self, *_: Path) -> Evaluation:
        return Evaluation(0.5, 0.9)

    def linear_algebra(self) -> str:
        return "none"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


slots.Worker = FakeWorker  # type: ignore[assignment,misc]


def work() -> None:
    """Take part in the sweep."""
    paper = papers.load_paper("mnist-rnn-e")
    jobs = sweep.plan(paper, "full", ["numpy"], SEEDS, ["time"], 1)
    results = Results(FOLDER)
    with results.shared() as held:
        outcome = sweep.Sweep(results, shared=held).run(jobs, Progress(Console(file=io.StringIO()), len(jobs)))
        results.write_tidy(leases=held)
    assert [record["status"] for record in outcome.records] == ["ok"] * len(jobs), outcome.records


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the killed ones leave nothing behind
    sources.SOURCES.digest([sweep.WORKER, "experiments.measures.training", ENGINES["numpy"].module])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            MACHINE = line.strip()
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                work()
                log("done")
            except BaseException:
                log(traceback.format_exc())
            os._exit(0)
        print(child, flush=True)
