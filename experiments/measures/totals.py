"""Whole trainings of the studies' networks, started as users start them: start-up, and build with all epochs.

The studies' own runs leave a system image of Julia aside, since what is said there of first epochs includes
compilation. Here Julia starts from the image that `make` builds, where its version needs one.

A run is of one network. In each round every engine trains it in a fresh process, one engine after the other, in an
order that rotates from round to round. Rows are drawn, as many as the study trains on, so that it runs anywhere.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge import spec as model_spec
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments.data import generated
from experiments.measures.measure import Measure
from experiments.measures.race import failing
from experiments.measures.task import Assignment, Parts, Task
from experiments.run_arrays import RunArrays
from experiments.slots import rotated

if TYPE_CHECKING:
    from experiments.papers import Paper, Runs
    from experiments.sweep import Job

Row = dict[str, Any]


def run(given: Assignment) -> Parts:
    """The trainings of each round, and why engines fell out."""
    asked = given.settings
    spec = model_spec.loads(asked["spec"], "the spec")
    rows: list[Row] = []
    failures: dict[str, str] = {}
    blas: dict[str, str] = {}
    with RunArrays(generated.drawn_for(spec, asked["rows"]), given.task.work.folder) as work:
        task = replace(
            given.task,
            spec=spec,
            optimizer=Optimizer(**asked["optimizer"]),
            batch_size=asked["training_batch"],
            epochs=asked["training_epochs"],
            work=work,
            pretrained={},
        )
        for number in range(1, asked["rounds"] + 1):
            for name in rotated([name for name in given.engines if name not in failures], number):
                with failing(name, failures), given.slot.start(name, given.threads) as worker:
                    rows.append({"engine": name, "round": number, **whole(worker, task)})
                    blas[name] = worker.linear_algebra()
            given.watcher.step()
            yield {"totals": [row for row in rows if row["engine"] not in failures], "blas": blas, "failures": failures}


def whole(worker: Worker, task: Task) -> Row:
    """Train in a fresh process: the seconds of its import, of start-up, and of `build` and all epochs.

    Start-up is `build` and a first step, less a later one: the median epoch after the first, divided by its steps. The
    first step is one beside those of the epochs, and is in the total.
    """
    task.preload(worker)
    build = task.build(worker)
    task.preload(worker)
    _, first = task.train(worker, task.work.order(task.seed, task.epochs + 1, task.batch_size))
    epochs = [task.train(worker, task.order(epoch))[1] for epoch in range(1, task.epochs + 1)]
    later = statistics.median(epochs[1:] or epochs) / task.steps_per_epoch
    return {
        "import_seconds": worker.import_seconds,
        "start_seconds": build + first - later,
        "total_seconds": build + first + sum(epochs),
    }


def networks(paper: Paper, runs: Runs) -> list[str]:
    """The names of the trainings in a paper's file."""
    return [one.id for one in paper.trainings]


def _settings(job: Job) -> Row:
    """The network and how it is trained, by value."""
    one = next(one for one in job.paper.trainings if one.id == job.network)
    return {
        "network": one.id,
        "spec": job.paper.spec(one.model).dump(),
        "optimizer": dataclasses.asdict(Optimizer(one.optimizer, one.learning_rate)),
        "training_batch": one.batch_size,
        "training_epochs": one.epochs,
        "rows": one.rows,
        "rounds": job.rounds,
    }


def rows_of(record: Mapping[str, Any]) -> Iterator[Row]:
    """The tidy rows of a record."""
    network, entrants = record["config"].get("network"), record["entrants"]
    for row in record.get("totals", ()):
        yield {"network": network, "label": entrants.get(row["engine"], {}).get("label"), **row}


def _unusable(option: Callable[[str], Any]) -> str:
    needs = ("totals_engines", "totals_rounds", "totals_threads")
    if "totals" in option("measures") and (absent := [name for name in needs if not option(name)]):
        return f"the measure totals needs {', '.join(absent)}"
    return ""


MEASURE = Measure(
    name="totals",
    place=11,
    title="totals: whole trainings of the studies' networks, start-up included",
    about="start-up and whole trainings of the studies' networks, with Julia's system image",
    words="whole trainings",
    run=run,
    form={
        "totals": [
            {
                **{"engine": "text", "round": "count", "network?": "text?"},
                **dict.fromkeys(("import_seconds", "start_seconds", "total_seconds"), "number"),
            }
        ]
    },
    plan="together",
    networks=networks,
    options={"totals_engines?": "engines", "totals_rounds?": "rounds", "totals_threads?": "threads list"},
    check=_unusable,
    engines="totals_engines",
    only_listed=True,
    threads="totals_threads",
    rounds="totals_rounds",
    settings=_settings,
    steps=lambda job: job.rounds,
    columns=(
        *("key", "paper", "engine", "label", "threads", "profile", "network", "round", "import_seconds"),
        *("start_seconds", "total_seconds", "data_source", "cpu_model", "machine", "commit", "created"),
    ),
    records=rows_of,
    later=True,
    summary=("network", "round", "start_seconds", "total_seconds"),
)
