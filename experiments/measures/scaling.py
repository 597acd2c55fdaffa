"""How the time of a step grows with the batch size and with the length of the sequence.

The sequence gets longer by cutting the same row into more segments: the spec's reshape layer to [T, features
/ T]. Every point is the least of several short chunks once a step is steady. The engines run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge import spec as model_spec
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments.measures.ablation import chunk, warm
from experiments.measures.measure import Measure
from experiments.measures.task import Assignment, Parts, RunError, Task, Watcher

REPEATS = 3
SAMPLES = 20_000
"""Rows that a chunk of the batch-size series holds, within the limits below."""
SEGMENTS = 2_000
"""Segments that a chunk of the length series holds for each row of a batch, within the limits below."""
STEPS_LEAST, STEPS_MOST = 3, 200


@dataclass(frozen=True)
class Point:
    """One step size to measure: what it is about, and the training that has it."""

    quantity: str
    value: int
    task: Task
    steps: int


def run(given: Assignment) -> Parts:
    """All points in one worker; after each one the rows so far."""
    rows: list[dict[str, Any]] = []
    with given.start() as worker:
        given.task.preload(worker)
        for point in points(given.task, given.settings["batch_sizes"], given.settings["sequence_lengths"]):
            rows.append(measure(worker, point, given.watcher))
            yield {"scaling": rows}
        yield given.blas(worker)


def points(task: Task, batch_sizes: Sequence[int], sequence_lengths: Sequence[int]) -> Iterator[Point]:
    """The points of both series, the longest sequence first: an engine may prepare a small network otherwise."""
    for length in sorted(sequence_lengths, reverse=True):
        longer = replace(task, spec=with_length(task.spec, length))
        yield Point("sequence_length", length, longer, _steps(SEGMENTS / length))
    for size in batch_sizes:
        yield Point("batch_size", size, replace(task, batch_size=size), _steps(SAMPLES / size))


def measure(worker: Worker, point: Point, watcher: Watcher) -> dict[str, Any]:
    """Measure one point in a worker; a row of the part `scaling` of a record."""
    task = point.task
    task.build(worker)
    warm(worker, task)
    seconds = min(chunk(worker, task, point.steps) for _ in range(REPEATS))
    watcher.step()
    return {"quantity": point.quantity, "value": point.value, "microseconds_per_step": seconds * 1e6}


def with_length(spec: ModelSpec, length: int) -> ModelSpec:
    """The same network over a sequence of `length` segments; RunError when its spec has no such sequence."""
    layers = spec.model_dump(mode="json")["layers"]
    place = next((index for index, layer in enumerate(layers) if layer["op"] == "reshape"), None)
    features = math.prod(spec.input.sample)
    if place is None or len(layers[place]["shape"]) != 2:
        raise RunError(f"model {spec.name}: no layer reshapes the input to [segments, features], nothing to lengthen")
    if features % length:
        raise RunError(f"model {spec.name}: {features} features cannot be cut into {length} equal segments")
    document = spec.model_dump(mode="json")
    document["layers"][place]["shape"] = [length, features // length]
    return model_spec.parse(document, f"{spec.name} with {length} segments")


def _steps(wanted: float) -> int:
    return max(STEPS_LEAST, min(STEPS_MOST, round(wanted)))


MEASURE = Measure(
    name="scaling",
    place=6,
    title="scaling: step time against batch size and sequence length",
    about="time per step over batch size and sequence length",
    words="scaling",
    run=run,
    form={"scaling": [{"quantity": "text", "value": "number", "microseconds_per_step": "positive"}]},
    plan="engines",
    options={"scaling_engines?": "engines", "batch_sizes?": "counts", "sequence_lengths?": "counts"},
    engines="scaling_engines",
    only_listed=True,
    settings=lambda job: {name: job.option(name) or [] for name in ("batch_sizes", "sequence_lengths")},
    steps=lambda job: sum(len(job.option(name) or []) for name in ("batch_sizes", "sequence_lengths")),
    columns=(
        *("key", "paper", "engine", "label", "threads", "quantity", "value", "microseconds_per_step"),
        *("data_source", "cpu_model", "machine", "commit", "created"),
    ),
    summary=("quantity", "value", "microseconds_per_step"),
)
