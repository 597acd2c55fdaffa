"""What a Dask worker of `test_cluster.py` loads first: it says in the file LOG what runs, when, and with which weights.

python cluster_preload.py run ...     # a run here, in the same words
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge import weights
from bridge.worker import Worker
from experiments import sweep
from experiments.measures.registry import MEASURES
from experiments.results import Results

LOG = Path(os.environ["LOG"])
CURRENT = threading.local()


def log(what: str, *, name: str, timed: bool, **more: Any) -> None:
    line = {"what": what, "run": name, "timed": timed, **more, "pid": os.getpid(), "at": time.monotonic()}
    handle = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def running() -> list[dict[str, Any]]:
    """The runs of this host that began and did not end, of processes that live."""
    found: dict[Any, dict[str, Any]] = {}
    for line in LOG.read_text().splitlines() if LOG.exists() else []:
        event = json.loads(line)
        if event["what"] == "begin":
            found[event["pid"], event["run"]] = event
        elif event["what"] == "end":
            found.pop((event["pid"], event["run"]), None)
    return [{name: event[name] for name in ("run", "timed")} for event in found.values() if lives(event["pid"])]


def assignment(job: sweep.Job, *rest: Any) -> Any:
    CURRENT.name = f"{job.paper.key} {','.join(job.engines)} {job.measure} {job.seed}"
    CURRENT.timed, CURRENT.weights = job.kind.timed, []
    log("begin", name=CURRENT.name, timed=CURRENT.timed, beside=running())
    return begun(job, *rest)


def evaluate(worker: Worker, *arrays: Any) -> Any:
    CURRENT.weights.append(weights.digest(worker.params()))
    return evaluated(worker, *arrays)


def save(results: Results, record: dict[str, Any]) -> Any:
    config = record["config"]
    name = f"{config['paper']} {config['engine']} {config['measure']} {config['seed']}"
    found = saved(results, record)
    log("end", name=name, timed=MEASURES[config["measure"]].timed, weights=CURRENT.weights)
    return found


if not hasattr(Results, "logged"):  # Dask loads a copy of this file, too
    Results.logged = True  # type: ignore[attr-defined]
    begun, sweep.assignment = sweep.assignment, assignment
    saved, Results.save = Results.save, save  # type: ignore[method-assign]
    evaluated, Worker.evaluate = Worker.evaluate, evaluate  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> int:
    from experiments import cli

    return cli.invoke(list(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
