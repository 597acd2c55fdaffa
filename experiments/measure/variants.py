"""Other networks on the same data with the same training: accuracy and time of each, in fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from bridge.worker import Worker
from experiments.measure import time as timing
from experiments.measure.task import Task, Watcher


def measure(
    start: Callable[[], AbstractContextManager[Worker]], tasks: Mapping[str, Task], watcher: Watcher
) -> Iterator[list[dict[str, Any]]]:
    """Train each variant in a worker of its own; after each one the rows so far, one for a variant and epoch."""
    rows: list[dict[str, Any]] = []
    for name, task in tasks.items():
        with start() as worker:
            found = timing.measure(worker, task, watcher)
        found["epochs"][0]["seconds"] += found["startup"]["build_seconds"]
        rows += [{"variant": name, "model": task.spec.name, **epoch} for epoch in found["epochs"]]
        yield rows
