"""Time and accuracy: the seconds of every epoch, and how good the network is after it.

Import and start-up are reported separately, `build` too (the tidy files add it to the first epoch, as the studies do,
since that is where their compilers work). The time of an epoch is that of `train_epoch` alone; the time with
evaluation adds that of the test rows, as some studies count it. Accuracy on the training rows, or on the part of
them that the paper's file names, is evaluated after the epoch and not timed.
"""

from __future__ import annotations

from typing import Any

from bridge.weights import Params
from bridge.worker import Worker
from experiments.measures.measure import EPOCH, Measure
from experiments.measures.task import Assignment, Parts, Task, Watcher

STEP_LOSSES = 100
"""How many losses from the first step on are recorded: what shows whether engines agree."""


def run(given: Assignment) -> Parts:
    """Train with the weights that all engines start from."""
    with given.start() as worker:
        given.task.preload(worker)
        build_seconds = given.task.build(worker)
        yield train(worker, given.task, given.watcher, build_seconds)
        yield given.blas(worker)


def measure(worker: Worker, task: Task, watcher: Watcher, params: Params | None = None) -> dict[str, Any]:
    """Build and train in a fresh worker, from `params` if given; the parts of a record that `train` gives."""
    task.preload(worker)
    return train(worker, task, watcher, task.build(worker, params))


def train(worker: Worker, task: Task, watcher: Watcher, build_seconds: float) -> dict[str, Any]:
    """Train what was built; the parts `startup`, `epochs` and `step_losses` of a record."""
    task.preload(worker)
    epochs: list[dict[str, Any]] = []
    step_losses: list[float] = []
    for epoch in range(1, task.epochs + 1):
        losses, seconds = task.train(worker, task.order(epoch))
        if epoch == 1:
            step_losses = [float(loss) for loss in losses[:STEP_LOSSES]]
        tested, test_seconds = task.evaluate(worker, task.test_rows)
        known, _ = task.evaluate(worker, task.evaluated_rows)
        epochs.append(
            {
                "epoch": epoch,
                "seconds": seconds,
                "seconds_with_evaluation": seconds + test_seconds,
                "train_loss": known.loss,
                "train_accuracy": known.accuracy,
                "test_loss": tested.loss,
                "test_accuracy": tested.accuracy,
            }
        )
        watcher.step()
    startup = {
        "start_seconds": worker.start_seconds,
        "import_seconds": worker.import_seconds,
        "build_seconds": build_seconds,
    }
    return {"startup": startup, "epochs": epochs, "step_losses": step_losses}


MEASURE = Measure(
    name="time",
    place=1,
    title="time and accuracy: every seed in a fresh process",
    about="time and accuracy, from the same weights in every engine",
    words="time and accuracy",
    run=run,
    form={"epochs": [EPOCH], "step_losses": ["loss?"]},
    options={"time_engines?": "engines"},
    engines="time_engines",
    summary=("test_accuracy", "first_epoch_seconds", "later_epoch_seconds"),
)
