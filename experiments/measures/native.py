"""Accuracy from each engine's own initialisation, as the studies compared: no weights are shared.

The initial weights come from the framework's own default initialisers, in the layout of the spec; parameters that the
study took from elsewhere (pretrained word vectors) start from there all the same. What else an engine does in its
own way (optimizer, batch size, scale of the pixels) is said by the paper's file.
"""

from __future__ import annotations

from typing import Any

from bridge.worker import Worker
from experiments.measures import training
from experiments.measures.measure import EPOCH, Measure
from experiments.measures.task import Assignment, Parts, Task, Watcher


def run(given: Assignment) -> Parts:
    """Train with the weights that the engine itself would start from."""
    with given.start() as worker:
        yield measure(worker, given.task, given.watcher)
        yield given.blas(worker)


def measure(worker: Worker, task: Task, watcher: Watcher) -> dict[str, Any]:
    """Train in a fresh worker from the engine's own weights; what `training.measure` gives, but for times.

    Other runs may happen at the same time.
    """
    params = task.with_pretrained(worker.own_parameters(task.spec, task.seed, task.dtype))
    found = training.measure(worker, task, watcher, params)
    del found["step_losses"]  # from other weights than anybody else's: nothing to compare them with
    del found["startup"]
    for epoch in found["epochs"]:
        del epoch["seconds"], epoch["seconds_with_evaluation"]
    return found


MEASURE = Measure(
    name="own",
    place=3,
    title="accuracy from each engine's own initialisation",
    about="accuracy, from each engine's own initialisation",
    words="accuracy from its own initialisation",
    run=run,
    form={"epochs": [EPOCH]},
    timed=False,
    options={"own_seeds?": "seeds", "own_engine_seeds?": "seeds by engine"},
    seeds=("own_seeds",),
    native=True,
    summary=("own_test_accuracy",),
)
