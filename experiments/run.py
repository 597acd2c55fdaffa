"""Runs: which there are to do, doing each in fresh processes, and recording what came of it.

A job is one (paper, engine, seed, measure). All engines of a paper start from the same weights and see the
same batches: both follow from the seed. A job whose record is there is not repeated; one that failed is
recorded with its message and tried again the next time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge import engine as engines
from bridge import spec as model_spec
from bridge import weights
from bridge.engine import Optimizer
from bridge.errors import EngineUnavailableError, TwinGradError
from bridge.spec import ModelSpec
from bridge.worker import Worker, environment
from experiments import data, provenance
from experiments.config import MEASURES, ConfigError, Measure, Paper, ProfileName, Runs, model_path
from experiments.data.dataset import Dataset
from experiments.data.dataset import Progress as Download
from experiments.measure import memory, race, scaling
from experiments.measure import time as timing
from experiments.measure.task import Task
from experiments.progress import Progress, duration, size
from experiments.results import COLUMNS, SCHEMA, Record, Results, ResultsError, key_of, tidy_rows
from experiments.workspace import Workspace
from py_engine.errors import EngineError

TITLES: dict[Measure, str] = {
    "time": "time and accuracy: every seed in a fresh process",
    "memory": "memory: bytes allocated and peak, in runs of their own",
    "race": "race: engines alternating",
    "scaling": "scaling: step time against batch size and sequence length",
}
"""The measures in the order in which `reproduce` takes them, with a heading for each."""


@dataclass(frozen=True)
class Job:
    """One thing to run. `engines` are those of a race, and one otherwise."""

    paper: Paper
    engines: tuple[str, ...]
    seed: int
    measure: Measure
    threads: int
    profile: ProfileName
    rounds: int = 0

    @property
    def runs(self) -> Runs:
        """The counts of the job's profile."""
        return self.paper.runs_of(self.profile)

    @property
    def parts(self) -> int:
        """How many steps of progress it has."""
        epochs = self.paper.training.epochs.value
        lengths = len(self.runs.batch_sizes.value) + len(self.runs.sequence_lengths.value)
        return {"time": epochs, "memory": 2 * epochs, "race": self.rounds + 1, "scaling": lengths}[self.measure]

    def __str__(self) -> str:
        if self.measure == "race":
            return f"{self.paper.key}  race of {', '.join(self.engines)}  threads {self.threads}"
        return f"{self.paper.key}  {self.engines[0]:<13}  {self.measure:<7}  seed {self.seed}"


@dataclass
class Outcome:
    """What came of a sweep: a record for each job, how many were there already, and the time it took."""

    records: list[Record] = field(default_factory=list)
    reused: int = 0
    seconds: float = 0.0


# -----------------------------------------------------------------------------------------------------------
# What to run


def plan(
    paper: Paper,
    profile: ProfileName = "full",
    engine_names: Sequence[str] | None = None,
    seeds: int | None = None,
    measures: Sequence[str] | None = None,
    threads: int | None = None,
    rounds: int | None = None,
) -> list[Job]:
    """The jobs of a paper, seed by seed, so that what a machine does to one engine it does to the others too.

    What is None is taken from the paper file, whose threads are cut to the cores there are. Raises ConfigError
    for an unknown measure, EngineUnavailableError for an engine asked for that is not there, and
    TooManyThreadsError for threads asked for.
    """
    runs = paper.runs_of(profile)
    names = checked_engines(paper, engine_names)
    chosen = [measure for measure in MEASURES if measure in (measures or runs.measures.value)]
    unknown = sorted(set(measures or ()) - set(MEASURES))
    if unknown:
        raise ConfigError(f"no measure {unknown[0]!r}; measures: {', '.join(MEASURES)}")
    cores = provenance.cores()
    usual = provenance.threads(threads, paper.training.threads.value)
    jobs: list[Job] = []
    for measure in chosen:
        if measure in ("time", "memory"):
            counts = {name: _seed_count(runs, name, measure, seeds) for name in names}
            number = usual if measure == "time" else threads or runs.memory_threads.value
            for seed in range(max(counts.values())):
                for name in names:
                    if seed < counts[name]:
                        jobs.append(Job(paper, (name,), seed, measure, number, profile))
        elif measure == "race":
            numbers = [threads] if threads else dict.fromkeys(min(n, cores) for n in runs.race_threads.value)
            for number in numbers:
                jobs.append(Job(paper, tuple(names), 0, "race", number, profile, rounds or runs.race_rounds.value))
        else:
            wanted = names if engine_names else [name for name in names if name in runs.scaling_engines.value]
            jobs += [Job(paper, (name,), 0, "scaling", usual, profile) for name in wanted]
    return jobs


def checked_engines(paper: Paper, names: Sequence[str] | None) -> list[str]:
    """The engines asked for, each known and available; without names those of the paper file, available or not."""
    if names is None:
        return paper.engine_names()
    for name in names:
        found = engines.availability(name)
        if not found.ok:
            raise EngineUnavailableError(f"engine {name}: {found.reason}")
    return list(names)


def _seed_count(runs: Runs, engine: str, measure: str, seeds: int | None) -> int:
    if seeds is None:
        return runs.seed_count(engine, measure)
    return min(seeds, runs.memory_seeds.value) if measure == "memory" else seeds


# -----------------------------------------------------------------------------------------------------------
# Running


class Sweep:
    """Runs jobs one after the other and records them in a results folder that the caller has locked."""

    def __init__(self, results: Results, data_dir: Path | None = None, download: Download | None = None) -> None:
        self.results = results
        self.data_dir = data_dir
        self.download = download
        self._datasets: dict[str, Dataset] = {}

    def run(self, jobs: Sequence[Job], progress: Progress, again: bool = False) -> Outcome:
        """Run every job that has no record yet; with `again` every job."""
        outcome = Outcome()
        start = time.perf_counter()
        by_dataset: dict[str, list[Job]] = {}
        for job in jobs:
            by_dataset.setdefault(job.paper.dataset, []).append(job)
        for name, part in by_dataset.items():
            with Workspace(self._load(name, progress), self.results.work) as work:
                for job in part:
                    self._one(job, work, outcome, progress, again)
        outcome.seconds = time.perf_counter() - start
        return outcome

    def _load(self, name: str, progress: Progress) -> Dataset:
        if name not in self._datasets:
            dataset = data.load(name, self.data_dir, progress=self.download)
            if dataset.notice:
                progress.note(dataset.notice)
            self._datasets[name] = dataset
        return self._datasets[name]

    def _one(self, job: Job, work: Workspace, outcome: Outcome, progress: Progress, again: bool) -> None:
        spec = model_spec.load(model_path(job.paper.model))
        task = task_of(job, spec, work)
        record = skeleton(job, spec, task, work.dataset)
        known = None if again else self.results.finished(record["key"])
        if known is not None:
            outcome.records.append(known)
            outcome.reused += 1
            progress.finish(str(job), "was finished before")
            return
        progress.start(str(job), job.parts)
        start = time.perf_counter()
        try:
            for parts in RUNNERS[job.measure](job, task, record, progress):
                record.update(parts)
        except ResultsError:  # no place to write is no failure of this run: stop
            raise
        except (TwinGradError, EngineError) as error:
            kind = "unavailable" if isinstance(error, EngineUnavailableError) else "failed"
            record.update(status="failed", error=str(error), error_kind=kind)
        record["seconds"] = time.perf_counter() - start
        self.results.save(record)
        outcome.records.append(record)
        progress.finish(str(job), described(record))


def task_of(job: Job, spec: ModelSpec, work: Workspace) -> Task:
    """The training that a job measures."""
    training = job.paper.training
    return Task(
        spec=spec,
        optimizer=optimizer_of(job.paper),
        batch_size=training.batch_size.value,
        dtype=training.dtype.value,
        epochs=training.epochs.value,
        seed=job.seed,
        work=work,
    )


def optimizer_of(paper: Paper) -> Optimizer:
    """The optimizer of a paper's training."""
    training = paper.training
    settings: dict[str, Any] = {"momentum": training.momentum.value} if training.momentum.value else {}
    return Optimizer(training.optimizer.value, training.learning_rate.value, **settings)


def skeleton(job: Job, spec: ModelSpec, task: Task, dataset: Dataset) -> Record:
    """A record with everything that is known before the run, its key included."""
    registered = {name: engines.get(name) for name in job.engines}
    digests = {name: provenance.engine_digest(row.module) for name, row in registered.items()}
    versions: dict[str, str] = {}
    for row in registered.values():
        versions |= row.availability().versions
    training = {name: setting.value for name, setting in job.paper.settings() if name.startswith("training.")}
    config: dict[str, Any] = {
        "paper": job.paper.key,
        "engine": ",".join(job.engines),
        "label": "Race" if job.measure == "race" else registered[job.engines[0]].label,
        "seed": job.seed,
        "measure": job.measure,
        "threads": job.threads,
        "dtype": task.dtype,
        "profile": job.profile,
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "training": training,
    }
    if job.measure == "race":
        length, steps = race.chunk(len(dataset.y_train), task.batch_size)
        config |= {"engines": list(job.engines), "rounds": job.rounds, "steps": steps, "rows": length}
    if job.measure == "scaling":
        config["batch_sizes"] = job.runs.batch_sizes.value
        config["sequence_lengths"] = job.runs.sequence_lengths.value
    origin = {
        **provenance.summary(),
        "threads": job.threads,
        "openblas_coretype": environment(job.threads).get("OPENBLAS_CORETYPE", ""),
        "blas": "",
        "numpy": provenance.versions(["numpy"]).get("numpy", ""),
        "versions": versions,
        "engine_digest": " ".join(digests.values()),
        "spec_digest": spec.digest,
        "weights_digest": weights.digest(task.initial_weights()),
    }
    deciding = ("cpu_model", "openblas_coretype", "python", "numpy", "versions", "spec_digest", "weights_digest")
    key = key_of(
        {
            "schema": SCHEMA,
            "config": config,
            "data": [dataset.name, dataset.digest],
            "engines": digests,
            **{name: origin[name] for name in deciding},
        }
    )
    record: Record = {
        "schema": SCHEMA,
        "key": key,
        "status": "ok",
        "error": None,
        "error_kind": None,
        "config": config,
        "data": {
            "name": dataset.name,
            "source": dataset.source,
            "digest": dataset.digest,
            "train_rows": len(dataset.y_train),
            "test_rows": len(dataset.y_test),
        },
        "provenance": origin,
    }
    if job.measure == "race":
        record["entrants"] = {
            name: {"label": row.label, "engine_digest": digests[name], "error": None}
            for name, row in registered.items()
        }
    return record


# Each runner yields the parts of the record as they come to be, so that those of a run that fails later are
# kept.


def _run_time(job: Job, task: Task, record: Record, progress: Progress) -> Iterator[Record]:
    with start(job.engines[0], job.threads) as worker:
        yield timing.measure(worker, task, progress)
        record["provenance"]["blas"] = blas(worker)


def _run_memory(job: Job, task: Task, record: Record, progress: Progress) -> Iterator[Record]:
    with start(job.engines[0], job.threads) as worker:
        yield memory.measure_peak(worker, task, progress)
        record["provenance"]["blas"] = blas(worker)
    with start(job.engines[0], job.threads) as worker:
        yield memory.measure(worker, task, progress)


def _run_race(job: Job, task: Task, record: Record, progress: Progress) -> Iterator[Record]:
    entrants = record["entrants"]
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in job.engines:
            try:
                workers[name] = stack.enter_context(start(name, job.threads))
            except (TwinGradError, EngineError) as error:
                entrants[name]["error"] = str(error)
        labels = {name: entrants[name]["label"] for name in workers}
        rows, failures = race.measure(workers, labels, task, job.rounds, progress)
        for name, message in failures.items():
            entrants[name]["error"] = message
        alive = [worker for name, worker in workers.items() if name not in failures]
        for worker in alive[:1]:
            worker.resume()
            record["provenance"]["blas"] = blas(worker)
    failed = {name: entrant["error"] for name, entrant in entrants.items() if entrant["error"]}
    yield {"race": rows}
    if failed:
        missing = [name for name in failed if not engines.availability(name).ok]
        yield {
            "status": "failed",
            "error": "; ".join(f"{name}: {message}" for name, message in failed.items()),
            "error_kind": "unavailable" if len(missing) == len(failed) else "failed",
        }


def _run_scaling(job: Job, task: Task, record: Record, progress: Progress) -> Iterator[Record]:
    runs = job.runs
    rows: list[Record] = []
    with start(job.engines[0], job.threads) as worker:
        task.preload(worker)
        for point in scaling.points(task, runs.batch_sizes.value, runs.sequence_lengths.value):
            rows.append(scaling.measure(worker, point, progress))
            yield {"scaling": rows}
        record["provenance"]["blas"] = blas(worker)


RUNNERS: dict[Measure, Callable[[Job, Task, Record, Progress], Iterator[Record]]] = {
    "time": _run_time,
    "memory": _run_memory,
    "race": _run_race,
    "scaling": _run_scaling,
}


def start(engine: str, threads: int) -> Worker:
    """A fresh worker of an engine; EngineUnavailableError, without a process for it, where that cannot be used."""
    found = engines.availability(engine)
    if not found.ok:
        raise EngineUnavailableError(found.reason)
    return Worker(engine, threads)


def blas(worker: Worker) -> str:
    """The BLAS libraries of a worker with the kernels they chose: `openblas 0.3.31 SkylakeX`."""
    found = [library for library in worker.libraries() if library.get("user_api") == "blas"]
    named = ((item["internal_api"], item.get("version"), item.get("architecture")) for item in found)
    return ", ".join(sorted(" ".join(str(part) for part in parts if part) for parts in named))


# -----------------------------------------------------------------------------------------------------------
# In words


def described(record: Record) -> str:
    """One run in a few words, as its line of progress says it."""
    took = duration(record["seconds"])
    if record["status"] != "ok":
        word = "left out" if record["error_kind"] == "unavailable" else "FAILED"
        return f"{word}: {record['error'].splitlines()[0]}"
    row = rows([record])[0]
    match record["config"]["measure"]:
        case "time":
            later = row["later_epoch_seconds"] or row["first_epoch_seconds"]
            return f"test accuracy {row['test_accuracy']:.4f}  {duration(later)} per epoch  (in all {took})"
        case "memory":
            allocated = row["bytes_later_epochs"]
            allocated = row["bytes_first_epoch"] if allocated is None else allocated
            return f"{size(allocated)} allocated per epoch  peak {size(row['peak_rss_bytes'])}  (in all {took})"
        case "race":
            return f"{record['config']['rounds']} rounds  (in all {took})"
        case _:
            return f"{len(record['scaling'])} points  (in all {took})"


def rows(records: Iterable[Record]) -> list[Record]:
    """The rows of `tidy/runs.csv` for records."""
    return [{name: row.get(name) for name in COLUMNS["runs"]} for row in tidy_rows(records)["runs"]]


def summary(records: Iterable[Record]) -> list[list[str]]:
    """A line for each paper and engine: seeds, seconds of the first and of a later epoch, accuracy, memory."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for row in rows(records):
        if row["status"] == "ok" and row["measure"] in ("time", "memory"):
            groups.setdefault((row["paper"], row["engine"]), []).append(row)
    return [
        [
            paper,
            engine,
            str(len({row["seed"] for row in group})),
            _mean(group, "first_epoch_seconds", duration),
            _mean(group, "later_epoch_seconds", duration),
            _mean(group, "test_accuracy", lambda value: f"{value:.4f}"),
            _mean(group, "bytes_later_epochs", size),
            _mean(group, "peak_rss_bytes", size),
        ]
        for (paper, engine), group in groups.items()
    ]


def growth(records: Iterable[Record]) -> list[list[str]]:
    """A line for each point of the scaling series."""
    return [
        [
            record["config"]["paper"],
            record["config"]["engine"],
            row["quantity"].replace("_", " "),
            str(row["value"]),
            f"{row['microseconds_per_step']:.1f}",
        ]
        for record in records
        for row in record.get("scaling", ())
    ]


def _mean(group: Sequence[Record], name: str, text: Callable[[float], str]) -> str:
    values = [row[name] for row in group if row[name] is not None]
    return text(statistics.fmean(values)) if values else "-"
