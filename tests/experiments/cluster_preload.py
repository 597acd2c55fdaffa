"""What a Dask worker of `test_cluster.py` loads first: it says in the file LOG what runs, and when."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from experiments import sweep
from experiments.measures.registry import MEASURES
from experiments.results import Results

LOG = os.environ["LOG"]


def log(*what: Any) -> None:
    handle = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(handle, (json.dumps([*what, os.getpid(), time.monotonic()]) + "\n").encode())
    os.close(handle)


def assignment(job: sweep.Job, *rest: Any) -> Any:
    log("begin", job.kind.timed, job.measure, job.seed)
    return begun(job, *rest)


def save(results: Results, record: dict[str, Any]) -> Any:
    config = record["config"]
    log("end", MEASURES[config["measure"]].timed, config["measure"], config["seed"])
    return saved(results, record)


if not hasattr(Results, "logged"):  # Dask loads a copy of this file, too
    Results.logged = True  # type: ignore[attr-defined]
    begun, sweep.assignment = sweep.assignment, assignment
    saved, Results.save = Results.save, save  # type: ignore[method-assign]
