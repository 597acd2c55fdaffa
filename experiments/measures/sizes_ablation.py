"""What each technique of our engines brings in networks of several sizes: a step without it, beside steps with all.

One run is of one network and engine: in one process the network is built and trained anew for each technique that is
off. Between them all are on, since a process grows slower or faster with its age: what is compared with a step without
a technique is the mean of those before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge import spec as model_spec
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments.data import generated
from experiments.measures import sizes
from experiments.measures.ablation import chunk, techniques, warm
from experiments.measures.measure import Measure
from experiments.measures.task import Assignment, Parts, Task
from experiments.run_arrays import RunArrays
from py_engine.errors import EngineError

if TYPE_CHECKING:
    from experiments.papers import Paper, Runs
    from experiments.sweep import Job

REPEATS = 3
"""Timed chunks of steps; the fastest counts."""
CHUNK_SECONDS = 0.1
"""How long the steps of a chunk take, of which there is at least one."""

Row = dict[str, Any]


def run(given: Assignment) -> Parts:
    """All techniques in one worker; after each the rows so far."""
    asked = given.settings
    spec = model_spec.loads(asked["spec"], "the spec")
    rows: list[Row] = []
    with (
        RunArrays(generated.drawn_for(spec, 2 * asked["batch"]), given.task.work.folder) as work,
        given.start() as worker,
    ):
        task = replace(
            given.task,
            spec=spec,
            optimizer=Optimizer(**asked["optimizer"]),
            batch_size=asked["batch"],
            work=work,
            pretrained={},
        )
        task.preload(worker)
        for row in without_each(worker, task, asked["techniques"]):
            rows.append(row)
            given.watcher.step()
            yield {"sizes_ablation": rows}
        yield given.blas(worker)


def without_each(worker: Worker, task: Task, names: list[str]) -> Iterator[Row]:
    """A row for each technique: its steps, and those with all on around it. One that can't be off here has none."""
    before = step(worker, task)
    for name in names:
        row: Row = {"technique": name}
        try:
            row["microseconds_per_step"] = step(worker, replace(task, techniques={name: False}))
        except EngineError as error:
            row["missing"] = str(error)
        after = step(worker, task)
        yield {**row, "all_on_microseconds": (before + after) / 2}
        before = after


def step(worker: Worker, task: Task) -> float:
    """The microseconds of a step, once it is steady."""
    task.build(worker)
    steps = max(1, min(sizes.STEPS_MOST, round(CHUNK_SECONDS / warm(worker, task))))
    return min(chunk(worker, task, steps) for _ in range(REPEATS)) * 1e6


def networks(paper: Paper, runs: Runs) -> list[str]:
    """The names of the networks that a profile measures, as in `sizes`."""
    asked = runs.option("sizes_ablation_networks") or ()
    return [name for name in sizes.names(paper) if name in asked]


def _settings(job: Job) -> Row:
    """The network and how it is trained, by value, and the switches of each engine."""
    return {
        **sizes.network_settings(job),
        "batch": job.option("sizes_ablation_batch"),
        "techniques": list(techniques(job.engines[0])),
    }


def rows_of(record: Mapping[str, Any]) -> Iterator[Row]:
    """The tidy rows of a record."""
    about = {name: record["config"].get(name) for name in ("family", "size", "batch")}
    return (about | row for row in record.get("sizes_ablation", ()))


def _unusable(option: Callable[[str], Any]) -> str:
    needs = ("sizes_ablation_engines", "sizes_ablation_networks", "sizes_ablation_batch")
    if "sizes_ablation" in option("measures") and (absent := [name for name in needs if not option(name)]):
        return f"the measure sizes_ablation needs {', '.join(absent)}"
    return ""


MEASURE = Measure(
    name="sizes_ablation",
    place=9,
    title="ablation in several sizes: what each technique of an engine brings in ordinary networks",
    about="what each technique of our engines brings in networks of several sizes",
    words="ablation in several sizes",
    run=run,
    form={
        "sizes_ablation": [
            {
                **{"technique": "text", "microseconds_per_step?": "positive", "all_on_microseconds": "positive"},
                "missing?": "text",
            }
        ],
    },
    plan="engines",
    networks=networks,
    options={
        **{"sizes_ablation_engines?": "engines", "sizes_ablation_batch?": "count"},
        "sizes_ablation_networks?": "names",  # "<family>-<size>"
    },
    check=_unusable,
    engines="sizes_ablation_engines",
    only_listed=True,
    fixed_engines=True,
    settings=_settings,
    steps=lambda job: len(techniques(job.engines[0])),
    columns=(
        *("key", "paper", "engine", "label", "threads", "profile", "family", "size", "batch", "technique"),
        *("microseconds_per_step", "all_on_microseconds", "missing", "data_source", "cpu_model", "machine", "commit"),
        "created",
    ),
    records=rows_of,
    later=True,
    summary=("family", "size", "technique", "microseconds_per_step", "all_on_microseconds"),
)
