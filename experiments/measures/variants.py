"""Other networks on the same data with the same training: accuracy and time of each, in fresh processes."""

from __future__ import annotations

from typing import Any

from experiments.measures import training
from experiments.measures.task import Assignment, Parts


def run(given: Assignment) -> Parts:
    """Train each variant in a fresh worker; after each one the rows so far, one for a variant and epoch."""
    rows: list[dict[str, Any]] = []
    for name, task in given.variants.items():
        with given.start() as worker:
            found = training.measure(worker, task, given.watcher)
            blas = given.blas(worker)
        found["epochs"][0]["seconds"] += found["startup"]["build_seconds"]
        rows += [{"variant": name, "model": task.spec.name, **epoch} for epoch in found["epochs"]]
        yield {"variants": rows, **blas}
