"""A race: engines train alternately, so that machine drift affects all of them equally, and steps are compared.

Each engine keeps one process; those that wait are stopped. Before the race they are built and take their first steps,
which may happen side by side. In a round every engine trains one epoch, or as many steps as the paper's file says, in
an order that rotates from round to round; the first round warms up and does not count. Ratios are taken within a round.

Before and after the race the machine itself is measured (`roofline`): no step can be faster than its products and
memory allow. The best of both measurements gives the limit that all engines are held against. Memory of all sizes is
measured, since each op by itself reads and writes other numbers of bytes than the whole step.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge import registry as engines
from bridge.errors import TwinGradError
from bridge.worker import Worker
from experiments.measures import roofline
from experiments.measures.measure import Measure
from experiments.measures.task import Assignment, Parts, Task, Watcher
from experiments.slots import MOST, Slot, rotated, side_by_side
from py_engine.errors import EngineError

if TYPE_CHECKING:
    from experiments.sweep import Job

STEPS = 600
"""Steps of a chunk at least: those of an epoch of MNIST in batches of 100. Small data is gone through several times."""

FIRST_STEPS = 2
"""Steps before the race, in which some engines compile."""

LIMITS = (
    *("limit_microseconds", "limited_by", "op_by_op_microseconds", "products_flops", "moved_bytes"),
    *("flops_per_second", "bytes_per_second"),
)
"""What the tidy table has of the limit of a step."""

BASE = "torch"
"""The engine that the others are compared with, where it takes part."""


def run(given: Assignment) -> Parts:
    """The rounds, each engine's linear algebra, `failures`: why engines fell out, by name; and the step's limit."""
    blas: dict[str, str] = {}
    length, steps = chunk(len(given.task.work.dataset.y_train), given.task.batch_size, given.settings["steps"])
    work = roofline.work_of(replace(given.task, batch_size=length // steps))  # the last mini-batch may have fewer rows
    rates = roofline.measure(work, given.task.dtype, given.threads, roofline.SIZES)
    with contextlib.ExitStack() as stack:
        ready: dict[str, Worker] = {}
        failures: dict[str, str] = {}

        def begin(name: str, slot: Slot) -> None:
            with failing(name, failures):
                worker = stack.enter_context(slot.start(name, given.threads))
                enter(worker, given.task)
                ready[name] = worker

        side_by_side(begin, given.engines, [given.slot] * MOST)
        workers = {name: ready[name] for name in given.engines if name in ready}
        labels = {name: engines.get(name).label for name in workers}
        asked = given.settings
        rows, later = measure(workers, labels, given.task, asked["rounds"], given.watcher, asked["steps"])
        failures |= later
        for name, worker in workers.items():
            if name not in failures:
                worker.resume()
                blas[name] = worker.linear_algebra()
                worker.pause()
    yield {"race": rows, "blas": blas, "failures": failures}
    later_rates = roofline.measure(work, given.task.dtype, given.threads, roofline.SIZES)
    limit = roofline.Limit(work, rates.best(later_rates))
    yield {"roofline": limit.record()}
    for row in rows:
        roofline.share(row["engine"], row["label"], row["microseconds_per_step"], limit.seconds * 1e6)


def with_limits(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record's rounds, each with the limit of the step, as far as it was measured."""
    limit = {name: value for name, value in record.get("roofline", {}).items() if name in LIMITS}
    return [{**row, **limit} for row in record.get("race", ())]


def chunk(rows: int, batch_size: int, steps: int | None = None) -> tuple[int, int]:
    """How many rows and steps a chunk has: `steps`, or else one epoch, or as many rows as make `STEPS` steps."""
    if steps is not None:
        return steps * batch_size, steps
    per_epoch = -(-rows // batch_size)
    if per_epoch >= STEPS:
        return rows, per_epoch
    return STEPS * batch_size, STEPS


def enter(worker: Worker, task: Task) -> None:
    """Make a worker ready for a race, and stop it until its turn."""
    task.preload(worker)
    task.build(worker)
    task.preload(worker)
    task.train(worker, task.work.order(task.seed, 1, FIRST_STEPS * task.batch_size))
    worker.pause()


def measure(
    workers: Mapping[str, Worker],
    labels: Mapping[str, str],
    task: Task,
    rounds: int,
    watcher: Watcher,
    steps: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Race workers that have entered: microseconds per step by round and engine, and why engines that fell out did.

    An engine that fails is out of the race with all its rounds; the others continue.
    """
    length, steps = chunk(len(task.work.dataset.y_train), task.batch_size, steps)
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for number in range(rounds + 1):  # round 0 warms up
        order = task.work.order(task.seed, number + 1, length)
        for name in rotated([name for name in workers if name not in failures], number):
            worker = workers[name]
            with failing(name, failures):
                worker.resume()
                _, seconds = task.train(worker, order)
                worker.pause()
                if number:
                    step = {"microseconds_per_step": seconds / steps * 1e6}
                    rows.append({"round": number, "engine": name, "label": labels[name], **step})
        watcher.step()
    finished = [name for name in workers if name not in failures]
    rows.sort(key=lambda row: (row["round"], list(workers).index(row["engine"])))
    return [row for row in rows if row["engine"] in finished], failures


@contextmanager
def failing(name: str, failures: dict[str, str], but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Note the failure of one engine instead of ending the race; what is among `but` is raised all the same."""
    try:
        yield
    except but:
        raise
    except (TwinGradError, EngineError) as error:
        failures[name] = str(error)


def standings(rows: Sequence[Mapping[str, Any]], base: str | None = None) -> list[dict[str, Any]]:
    """Median and spread (least, most) of each engine's steps and of their ratios to the base engine's in each round.

    With the share of the step's limit in the median; None where that was not measured.
    """
    names = list(dict.fromkeys(row["engine"] for row in rows))
    if base not in names:
        base = BASE if BASE in names else names[0]
    steps = {(row["engine"], row["round"]): float(row["microseconds_per_step"]) for row in rows}
    labels = {row["engine"]: row["label"] for row in rows}
    rounds = sorted({row["round"] for row in rows})
    limits = {row["engine"]: row.get("limit_microseconds") for row in rows}
    found = []
    for name in names:
        own = [steps[name, number] for number in rounds]
        ratios = [steps[name, number] / steps[base, number] for number in rounds]
        found.append(
            {
                "engine": name,
                "label": labels[name],
                "base": base,
                "rounds": len(rounds),
                "microseconds_per_step": statistics.median(own),
                "least": min(own),
                "most": max(own),
                "ratio": statistics.median(ratios),
                "ratio_least": min(ratios),
                "ratio_most": max(ratios),
                "limit_share": None if (limit := limits[name]) is None else limit / statistics.median(own),
            }
        )
    return found


def _chunk(job: Job, task: Task) -> dict[str, Any]:
    rows, steps = chunk(len(task.work.dataset.y_train), task.batch_size, job.option("race_steps"))
    return {"engines": list(job.engines), "steps": steps, "rows": rows}


MEASURE = Measure(
    name="race",
    place=5,
    title="race: engines alternating",
    about="time per step, engines alternating",
    words="race",
    run=run,
    form={
        "race": [
            {
                "engine": "text",
                "label": "text",
                "round": "count",
                "microseconds_per_step": "positive",
                "limited_by?": "text",
            }
        ],
        "roofline?": roofline.FORM,
    },
    files=("experiments/measures/roofline.jl",),
    plan="together",
    options={"race_rounds": "rounds", "race_threads": "threads list", "race_steps?": "count"},
    threads="race_threads",
    rounds="race_rounds",
    settings=lambda job: {"rounds": job.rounds, "steps": job.option("race_steps")},
    config=_chunk,
    steps=lambda job: job.rounds + 1,
    columns=(
        *("key", "paper", "engine", "label", "threads", "data_source", "round", "microseconds_per_step"),
        *("cpu_model", "machine", "commit", "created"),
        *LIMITS,
    ),
    later_columns=LIMITS,
    records=with_limits,
)
