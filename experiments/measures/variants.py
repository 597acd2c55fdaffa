"""Other networks on the same data with the same training: accuracy and time of each, in fresh processes."""

from __future__ import annotations

from typing import Any

from experiments.measures import training
from experiments.measures.measure import EPOCH, Measure
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


MEASURE = Measure(
    name="variants",
    place=4,
    title="variants: other networks on the same data",
    about="other networks on the same data",
    words="variants of the network",
    run=run,
    form={"variants": [{"variant": "text", "model?": "text", **EPOCH}]},
    options={"variant_engines?": "engines", "variant_seeds?": "seeds"},
    engines="variant_engines",
    only_listed=True,
    seeds=("variant_seeds",),
    models=lambda job: {one.id: one.model.value for one in job.paper.variants},
    settings=lambda job: {"variants": {one.id: job.paper.spec(one.model.value).digest for one in job.paper.variants}},
    steps=lambda job: job.epochs * len(job.paper.variants),
    columns=(
        *("key", "paper", "engine", "label", "seed", "threads", "profile", "variant", "model", "epoch", "seconds"),
        *("train_accuracy", "test_accuracy", "test_loss", "data_source", "engine_digest", "cpu_model", "machine"),
        "created",
    ),
    later=True,
)
