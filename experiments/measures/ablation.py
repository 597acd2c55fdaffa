"""What each technique of an engine brings: all of them on, each one off, each one alone, and none.

The engine is built again with other switches, in one process, on the first rows of the data. Some configurations are
a hundred times slower than others, so that the number of steps follows from what a step takes. Bytes allocated come
from separate steps, and are scaled up to those of an epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bridge.worker import Worker
from experiments.measures.measure import Measure
from experiments.measures.memory import recorded
from experiments.measures.task import Assignment, Parts, RunError, Task, Watcher
from experiments.run_arrays import RunArrays

REPEATS = 3
"""Timed chunks; the fastest counts, since nothing but other work on the machine makes one slower than another."""
CHUNK_SECONDS = 0.1
"""What a timed chunk of steps is to take, within the limits below, and the chunks before it that warm up."""
STEPS_LEAST, STEPS_MOST = 2, 1000
TRIALS_MOST = 20
"""Further chunks, at most, in which an engine may try how to use threads."""
STEPS_COUNTED = 5
"""Steps whose allocations are counted: what 10 of them allocate less what 5 do, since each request allocates, too."""

ROWS = 2_000
"""Rows that the steps go through, or ten batches where those are more: all in memory, in both types."""

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")

FLOAT32 = "float32"
"""The technique that is no switch of the engine but the type of everything; off: float64."""


@dataclass(frozen=True)
class Configuration:
    """Which techniques are on. `kind` is "all", "without" (all but one), "alone" (only one) or "none"."""

    kind: str
    technique: str
    switches: dict[str, bool]
    dtype: str


def rows_needed(batch_size: int) -> int:
    """How many rows the steps go through."""
    return max(ROWS, 10 * batch_size)


def run(given: Assignment) -> Parts:
    """All configurations in one worker, on the first rows of the data; after each one the rows so far."""
    task, dataset = given.task, given.task.work.dataset
    few = rows_needed(task.batch_size)
    part = replace(dataset, **{name: getattr(dataset, name)[:few] for name in _ARRAYS})
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with RunArrays(part, task.work.folder) as work, given.start() as worker:
        small = replace(task, work=work)
        for configuration in configurations(tuple(given.settings["techniques"])):
            row = measure(worker, small, configuration, task.steps_per_epoch, given.watcher)
            found.setdefault((configuration.kind, configuration.technique), []).append(row)
            yield {"ablation": [usual(rows) for rows in found.values()]}
        yield given.blas(worker)


def usual(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a configuration's rows the one in the middle: the fastest of several would be held against single others."""
    return sorted(rows, key=lambda row: float(row["microseconds_per_step"]))[(len(rows) - 1) // 2]


def configurations(names: tuple[str, ...]) -> Iterator[Configuration]:
    """All techniques but each one, with all of them in between; then each one alone, then none.

    An engine that receives its switches first knows that its process is for an ablation. All of them are measured
    several times, since every row is compared with them, and beside these rows: what is slow and wasteful comes later,
    and leaves its traces in the process.
    """

    def only(on: set[str]) -> tuple[dict[str, bool], str]:
        return {name: name in on for name in names}, "float32" if FLOAT32 in on else "float64"

    every = (*names, FLOAT32)
    for place, name in enumerate(every):
        # The others stay as the engine has them: a switch may have more positions than on and off.
        switches = {} if name == FLOAT32 else {name: False}
        yield Configuration("without", name, switches, only({*every} - {name})[1])
        if place in (0, len(every) // 2, len(every) - 1):
            yield Configuration("all", "", {}, "float32")
    for name in every:
        yield Configuration("alone", name, *only({name}))
    yield Configuration("none", "", *only(set()))


def measure(
    worker: Worker, task: Task, configuration: Configuration, steps_per_epoch: int, watcher: Watcher
) -> dict[str, Any]:
    """Measure one configuration in a worker; a row of the part `ablation` of a record."""
    task = replace(task, techniques=configuration.switches, dtype=configuration.dtype)
    task.build(worker)
    seconds = warm(worker, task)
    steps = max(STEPS_LEAST, min(STEPS_MOST, round(CHUNK_SECONDS / max(seconds, 1e-7))))
    timed = min(chunk(worker, task, steps) for _ in range(REPEATS))
    once, twice = (_allocated(worker, task, steps * STEPS_COUNTED) for steps in (1, 2))
    watcher.step()
    return {
        "configuration": configuration.kind,
        "technique": configuration.technique,
        "microseconds_per_step": timed * 1e6,
        "bytes_per_epoch": max(0, twice - once) / STEPS_COUNTED * steps_per_epoch,
        "steps": steps,
    }


def warm(worker: Worker, task: Task, losses: list[float] | None = None) -> float:
    """Train until the time of a step is steady: the seconds of one.

    The first steps compile, and in a fresh process the next hundred are still slower than those that follow; engines of
    ours also try in them how to use threads. Every engine's steps begin with the same mini-batches; the losses are
    added to `losses`, if it is given.
    """
    chunk(worker, task, STEPS_LEAST, losses)
    steps, spent = STEPS_LEAST, 0.0
    while True:
        seconds = chunk(worker, task, steps, losses)
        spent += seconds * steps
        if spent >= CHUNK_SECONDS or steps == STEPS_MOST:
            break
        steps = min(2 * steps, STEPS_MOST)
    if worker.threads_decided():
        return seconds
    for _ in range(TRIALS_MOST):
        chunk(worker, task, steps, losses)
        if worker.threads_decided():
            break
    return chunk(worker, task, steps, losses)


def chunk(worker: Worker, task: Task, steps: int, losses: list[float] | None = None) -> float:
    """Train some steps: the seconds of one. Their losses are added to `losses`, if it is given."""
    order = task.work.order(task.seed, 1, steps * task.batch_size)
    found, seconds = task.train(worker, order)
    if losses is not None:
        losses += found.tolist()
    return seconds / steps


def _allocated(worker: Worker, task: Task, steps: int) -> int:
    """Bytes allocated in these steps, and by the request to make them."""
    order = task.work.order(task.seed, 1, steps * task.batch_size)
    if worker.engine.counts_itself:
        before = worker.allocated()[0]
        task.train(worker, order)
        return worker.allocated()[0] - before
    return recorded(worker, task, lambda: task.train(worker, order))[0][0]


def techniques(engine: str) -> tuple[str, ...]:
    """The switches of an engine, by the names that it gives them; RunError for an engine that has none."""
    if engine == "numpy":
        from py_engine.ad.techniques import Techniques

        return tuple(item.name for item in fields(Techniques))
    if engine == "julia":
        from bridge.libjulia import environment

        source = Path(environment.ENGINE, "src", "ad", "techniques.jl").read_text(encoding="utf-8")
        return tuple(re.findall(r"^    (\w+)::Bool$", source, re.MULTILINE))
    raise RunError(f"engine {engine} has no switches for its techniques: an ablation is for numpy and julia")


MEASURE = Measure(
    name="ablation",
    place=7,
    title="ablation: what each technique of an engine brings",
    about="what each technique of our engines brings",
    words="ablation",
    run=run,
    form={
        "ablation": [
            {
                **{"configuration": "text", "technique": "text?", "microseconds_per_step": "positive?"},
                **{"bytes_per_epoch?": "number?", "steps?": "number?"},
            }
        ]
    },
    plan="engines",
    options={"ablation_engines?": "engines"},
    engines="ablation_engines",
    only_listed=True,
    fixed_engines=True,
    settings=lambda job: {"techniques": list(techniques(job.engines[0]))},
    steps=lambda job: len(list(configurations(techniques(job.engines[0])))),
    columns=(
        *("key", "paper", "engine", "label", "threads", "profile", "configuration", "technique"),
        *("microseconds_per_step", "bytes_per_epoch", "steps", "data_source", "engine_digest", "cpu_model", "machine"),
        "created",
    ),
    later=True,
)
