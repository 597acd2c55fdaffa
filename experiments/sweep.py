"""Runs: which there are to do, doing each in fresh processes, and recording what came of it.

A job is one (paper, engine, seed, measure). All engines of a paper start from the same weights and see the
same batches: both follow from the seed. A job whose record is there is not repeated; one that failed is
recorded with its message and tried again the next time. Jobs in whose results no time takes part run several at a
time, each on a core of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bridge import engine as engines
from bridge import linear_algebra, weights
from bridge.engine import Optimizer
from bridge.errors import EngineUnavailableError, TwinGradError, WorkerError
from bridge.worker import environment
from experiments import data, provenance, sources
from experiments.data.dataset import Dataset
from experiments.data.dataset import Progress as Download
from experiments.formats import duration, fixed, fraction, size
from experiments.measures import ablation, memory, native, race, scaling, training, variants
from experiments.measures.task import Assignment, RunError, Task, Watcher
from experiments.papers import (
    MEASURES,
    Measure,
    NativeTraining,
    Paper,
    PaperFileError,
    ProfileName,
    Runs,
    Setting,
)
from experiments.progress import Progress
from experiments.results import COLUMNS, SCHEMA, Record, Results, ResultsError, hashes, key_of, tidy_rows
from experiments.run_arrays import RunArrays
from experiments.slots import Slot, side_by_side, slots
from py_engine.errors import EngineError

TITLES: dict[Measure, str] = {
    "time": "time and accuracy: every seed in a fresh process",
    "own": "accuracy from each engine's own initialisation",
    "variants": "variants: other networks on the same data",
    "memory": "memory: bytes allocated and peak, in runs of their own",
    "race": "race: engines alternating",
    "scaling": "scaling: step time against batch size and sequence length",
    "ablation": "ablation: what each technique of an engine brings",
}
"""The measures in the order in which `reproduce` takes them, with a heading for each."""

MODULES: dict[Measure, ModuleType] = {
    "time": training,
    "own": native,
    "variants": variants,
    "memory": memory,
    "race": race,
    "scaling": scaling,
    "ablation": ablation,
}
"""The module of each measure, whose `run` makes the parts of a record; see `experiments.measures.task.Assignment`."""

WORKER = "bridge.worker_process"
"""The module that a worker runs."""

UNTIMED: tuple[Measure, ...] = ("own", "memory")
"""Measures in which no time takes part: they run with one thread, unless told otherwise, and side by side."""


@dataclass(frozen=True)
class Job:
    """One thing to run. `engines` are those of a race, and one otherwise."""

    paper: Paper
    engines: tuple[str, ...]
    seed: int
    measure: Measure
    threads: int
    """As many as it runs with here."""
    profile: ProfileName
    rounds: int = 0
    threads_asked: int | None = None
    """As many as the user or the paper asks for, where this machine has fewer cores; None: `threads`."""

    @property
    def runs(self) -> Runs:
        """The counts of the job's profile."""
        return self.paper.runs_of(self.profile)

    @property
    def parts(self) -> int:
        """How many steps of progress it has."""
        match self.measure:
            case "time" | "own":
                return self.epochs
            case "variants":
                return self.epochs * len(self.paper.variants)
            case "memory":
                return 2 * self.epochs
            case "race":
                return self.rounds + 1
            case "scaling":
                return len(_values(self.runs.batch_sizes)) + len(_values(self.runs.sequence_lengths))
            case _:
                return len(list(ablation.configurations(techniques(self.engines[0]))))

    @property
    def epochs(self) -> int:
        """How many epochs it trains."""
        fewer = self.runs.memory_epochs if self.measure == "memory" else None
        return fewer.value if fewer else self.paper.epochs(self.profile)

    @property
    def named(self) -> str:
        """The run in a message: "study mnist-rnn-e, engine numpy, measure time, seed 3"."""
        engine = "" if self.measure == "race" else f"engine {self.engines[0]}, "
        return f"study {self.paper.key}, {engine}measure {self.measure}, seed {self.seed}"

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

    What is None is taken from the paper file, whose threads are cut to the cores there are. Raises PaperFileError
    for an unknown measure, EngineUnavailableError for an engine asked for that is not there, and
    TooManyThreadsError for threads asked for.
    """
    if paper.runs_of_paper:  # they are run, and named in results, as that paper's
        return []
    runs = paper.runs_of(profile)
    names = checked_engines(paper, engine_names, runs)
    chosen = [measure for measure in MEASURES if measure in (measures or runs.measures.value)]
    unknown = sorted(set(measures or ()) - set(MEASURES))
    if unknown:
        raise PaperFileError(f"no measure {unknown[0]!r}; measures: {', '.join(MEASURES)}")
    cores = provenance.cores()
    asked = threads or paper.training.threads.value
    usual = provenance.threads(threads, asked)
    jobs: list[Job] = []
    for measure in chosen:
        if measure in ("time", "memory", "own", "variants"):
            counts = {name: _seed_count(paper, runs, name, measure, seeds, bool(engine_names)) for name in names}
            alone = runs.memory_threads.value if measure == "memory" else 1
            number = (threads or alone) if measure in UNTIMED else usual
            for seed in range(max(counts.values())):
                for name in names:
                    if seed < counts[name]:
                        wanted = number if measure in UNTIMED else asked
                        jobs.append(Job(paper, (name,), seed, measure, number, profile, threads_asked=wanted))
        elif measure == "race":
            numbers: dict[int, int] = {}
            for wanted in [threads] if threads else runs.race_threads.value:
                numbers.setdefault(min(wanted, cores), wanted)
            count = rounds or runs.race_rounds.value
            jobs += [Job(paper, tuple(names), 0, "race", n, profile, count, wanted) for n, wanted in numbers.items()]
        else:
            usually = runs.engines_of(measure) or []
            able = names if engine_names and measure == "scaling" else [name for name in names if name in usually]
            jobs += [Job(paper, (name,), 0, measure, usual, profile, threads_asked=asked) for name in able]
    return jobs


def checked_engines(paper: Paper, names: Sequence[str] | None, runs: Runs | None = None) -> list[str]:
    """The engines asked for, each known and available; without names those of the paper file, available or not."""
    if names is None:
        few = runs.engines.value if runs and runs.engines else None
        return [name for name in paper.engine_names() if few is None or name in few]
    for name in names:
        found = engines.availability(name)
        if not found.ok:
            raise EngineUnavailableError(f"engine {name}: {found.reason}")
    return list(names)


def _seed_count(paper: Paper, runs: Runs, engine: str, measure: Measure, seeds: int | None, asked: bool) -> int:
    """How many seeds an engine runs; `asked` when the user named it."""
    among = runs.engines_of(measure)
    if measure == "own" and engine not in paper.own:
        return 0
    if among is not None and engine not in among and not asked:
        return 0
    planned = runs.seed_count(engine, measure)
    if seeds is None or (measure in ("own", "variants") and not planned):
        return planned
    return min(seeds, runs.memory_seeds.value) if measure == "memory" else seeds


def _values(setting: Setting[list[int]] | None) -> list[int]:
    return setting.value if setting else []


# -----------------------------------------------------------------------------------------------------------
# Running


class Sweep:
    """Runs jobs and records them in a results folder that the caller has locked."""

    def __init__(self, results: Results, data_dir: Path | None = None, download: Download | None = None) -> None:
        self.results = results
        self.data_dir = data_dir
        self.download = download
        self._datasets: dict[str, Dataset] = {}
        self._prepared: set[str] = set()

    def fitting(self, paper: Paper, profile: ProfileName, progress: Progress) -> ProfileName:
        """The profile, or the one that is made for the embedded sample where only that is at hand."""
        return "sample" if self._load(paper, progress).source == "sample" else profile

    def run(self, jobs: Sequence[Job], progress: Progress, again: bool = False) -> Outcome:
        """Run every job that has no record yet; with `again` every job."""
        outcome = Outcome()
        start = time.perf_counter()
        by_dataset: dict[str, list[Job]] = {}
        for job in jobs:
            by_dataset.setdefault(_data_key(job.paper), []).append(job)
        for part in by_dataset.values():
            with RunArrays(self._load(part[0].paper, progress), self.results.work) as work:
                self._all(part, work, outcome, progress, again)
        outcome.seconds = time.perf_counter() - start
        return outcome

    def _load(self, paper: Paper, progress: Progress) -> Dataset:
        key = _data_key(paper)
        if key not in self._datasets:
            dataset = data.load(paper.dataset, self.data_dir, progress=self.download, **paper.loader_options())
            if dataset.notice:
                progress.note(dataset.notice)
            for note in dataset.notes:
                progress.note(note)
            self._datasets[key] = dataset
        return self._datasets[key]

    def _all(self, jobs: Sequence[Job], work: RunArrays, outcome: Outcome, progress: Progress, again: bool) -> None:
        found: dict[int, Record] = {}
        reused: list[int] = []

        def one(numbered: tuple[int, Job], slot: Slot) -> None:
            number, job = numbered
            task = task_of(job, work)
            record = skeleton(job, task, work.dataset)
            known = None if again else self.results.finished(record["key"])
            if known is not None:
                found[number] = known
                reused.append(number)
                progress.finish(str(job), "was finished before")
            elif self._run(job, task, record, slot, progress):
                found[number] = record

        groups = itertools.groupby(enumerate(jobs), lambda numbered: (numbered[1].measure, numbered[1].threads))
        for (measure, threads), alike in groups:
            side_by_side(one, alike, slots(threads, provenance.cores()) if measure in UNTIMED else [Slot()])
        outcome.records += [found[number] for number in range(len(jobs))]
        outcome.reused += len(reused)

    def _run(self, job: Job, task: Task, record: Record, slot: Slot, progress: Progress) -> bool:
        """Run a job and save its record, whatever came of it; False when its slot was stopped."""
        progress.start(str(job), job.parts)
        self._prepare(job.engines)
        start = time.perf_counter()
        try:
            for parts in MODULES[job.measure].run(assignment(job, task, slot, progress)):
                record.update(parts)
            if "failures" in record:
                _note_failures(job, record)
        except ResultsError:  # no place to write is no failure of this run: stop
            raise
        except (TwinGradError, EngineError) as error:
            if slot.stopped:  # its worker was ended, which says nothing about the run
                return False
            kind = "unavailable" if isinstance(error, EngineUnavailableError) else "failed"
            died = f"{job.named}: " if isinstance(error, WorkerError) else ""
            record.update(status="failed", error=f"{died}{error}", error_kind=kind)
        record["seconds"] = time.perf_counter() - start
        self.results.save(record)
        progress.finish(str(job), described(record))
        return True

    def _prepare(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._prepared:
                self._prepared.add(name)
                engines.get(name).prepare()


def assignment(job: Job, task: Task, slot: Slot, watcher: Watcher) -> Assignment:
    """What the job's measure is given to run."""
    models = {item.id: item.model.value for item in job.paper.variants} if job.measure == "variants" else {}
    others = {name: task_of(job, task.work, model) for name, model in models.items()}
    return Assignment(job.engines, job.threads, task, settings(job), slot, watcher, others)


def _note_failures(job: Job, record: Record) -> None:
    """Say in the record of a race which engines fell out; it failed unless all that can race here have raced."""
    failures, entrants = record.pop("failures"), record["entrants"]
    for name, message in failures.items():
        entrants[name]["error"] = message
    if failures:
        reasons = "; ".join(f"{name}: {failures[name]}" for name in entrants if name in failures)
        missing = all(not engines.availability(name).ok for name in failures)
        record.update(error=f"{job.named}: {reasons}", error_kind="unavailable" if missing else "failed")
        if not missing or len(failures) == len(entrants):
            record["status"] = "failed"


def _data_key(paper: Paper) -> str:
    """Equal for papers that load the same data."""
    return key_of({"name": paper.dataset, "options": paper.loader_options()})


def task_of(job: Job, work: RunArrays, model: str | None = None) -> Task:
    """The training that a job measures, with the paper's network or with another `model`."""
    paper, runs, training = job.paper, job.runs, job.paper.training
    differing = paper.own.get(job.engines[0], NativeTraining()) if job.measure == "own" else NativeTraining()
    pixels, batch_size = differing.pixels or training.pixels, differing.batch_size or training.batch_size
    if batch_size.value > len(work.dataset.y_train):
        raise PaperFileError(
            f"paper {paper.key}: a mini-batch (batch_size) of {batch_size.value:,} rows is more than the "
            f"{len(work.dataset.y_train):,} training rows of {work.dataset.name}"
        )
    name = model or (differing.model.value if differing.model else paper.model)
    spec = paper.spec(name)
    known = training.train_evaluation_rows
    rows = runs.memory_rows if job.measure == "memory" else None
    return Task(
        spec=spec,
        optimizer=optimizer_of(paper, differing),
        batch_size=batch_size.value,
        dtype=training.dtype.value,
        epochs=job.epochs,
        seed=job.seed,
        work=work,
        pretrained={name: setting.value for name, setting in paper.pretrained.items() if name in spec.parameters()},
        pixels=pixels.value if pixels else "0 to 1",
        known_rows=known.value if known else None,
        rows_per_epoch=min(rows.value, len(work.dataset.y_train)) if rows else None,
    )


def optimizer_of(paper: Paper, differing: NativeTraining | None = None) -> Optimizer:
    """The optimizer of a paper's training, or what differs from it."""
    training, differing = paper.training, differing or NativeTraining()
    momentum = training.momentum.value if training.momentum and not differing.optimizer else 0.0
    name, rate = differing.optimizer or training.optimizer, differing.learning_rate or training.learning_rate
    settings: dict[str, Any] = {"momentum": momentum} if momentum else {}
    return Optimizer(name.value, rate.value, **settings)


def settings(job: Job) -> dict[str, Any]:
    """What a measure is told besides the training: its own settings, by value."""
    runs = job.runs
    match job.measure:
        case "race":
            return {"rounds": job.rounds, "steps": runs.race_steps.value if runs.race_steps else None}
        case "scaling":
            return {
                "batch_sizes": _values(runs.batch_sizes),
                "sequence_lengths": _values(runs.sequence_lengths),
            }
        case "variants":
            return {"variants": {one.id: job.paper.spec(one.model.value).digest for one in job.paper.variants}}
        case "ablation":
            return {"techniques": list(techniques(job.engines[0]))}
    return {}


def asked(job: Job, task: Task) -> dict[str, Any]:
    """What a job asks, equal on all machines and whatever the code is: the record's `job` is a hash over it."""
    return {
        "study": job.paper.key,
        "engines": list(job.engines),
        "measure": job.measure,
        "seed": job.seed,
        "threads": job.threads_asked or job.threads,
        "profile": job.profile,
        "data": {"name": task.work.dataset.name, "digest": task.work.dataset.digest},
        "network": task.spec.digest,
        "training": {
            "optimizer": dataclasses.asdict(task.optimizer),
            **{name: getattr(task, name) for name in ("batch_size", "dtype", "epochs", "pixels", "known_rows")},
            "rows_per_epoch": task.rows_per_epoch,
            "pretrained": dict(task.pretrained),
        },
        "settings": settings(job),
    }


def starts(job: Job) -> list[str]:
    """Where the closure of the sources that decide a job starts: the measure, the worker and the adapters."""
    return [MODULES[job.measure].__name__, WORKER, *(engines.get(name).module for name in job.engines)]


def skeleton(job: Job, task: Task, dataset: Dataset) -> Record:
    """A record with everything that is known before the run, its hashes included."""
    registered = {name: engines.get(name) for name in job.engines}
    digests = {name: provenance.engine_digest(row.module) for name, row in registered.items()}
    versions = {name: row.availability().versions for name, row in registered.items()}
    kinds = ("training.", "pretrained.", *(f"own.{name}." for name in job.engines if job.measure == "own"))
    training = {name: setting.value for name, setting in job.paper.settings() if name.startswith(kinds)}
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
        **settings(job),
    }
    if job.measure == "race":
        rows, steps = race.chunk(len(dataset.y_train), task.batch_size, config["steps"])
        config |= {"engines": list(job.engines), "steps": steps, "rows": rows}
    if job.measure == "memory":
        config["rows"] = task.rows_per_epoch
    origin = {
        **provenance.summary(),
        "threads": job.threads,
        "openblas_coretype": environment(job.threads).get("OPENBLAS_CORETYPE", ""),
        "numpy": provenance.versions(["numpy"]).get("numpy", ""),
        "versions": {name: text for found in versions.values() for name, text in found.items()},
        "engine_digest": " ".join(digests.values()),
        "spec_digest": task.spec.digest,
        "weights_digest": _weights_digest(task),
    }
    decided_by = {
        "libraries": {name: row.libraries() for name, row in registered.items()},
        "numpy_blas": linear_algebra.of_numpy(),
        "sources": sources.SOURCES.digest(starts(job)),
        "versions": versions,
        "machine": origin["machine"]["digest"],
        **{name: origin[name] for name in ("threads", "openblas_coretype", "python", "numpy", "weights_digest")},
    }
    record: Record = {
        "schema": SCHEMA,
        **hashes(asked(job, task), decided_by),
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
        "blas": {},
    }
    if job.measure == "race":
        record["entrants"] = {
            name: {"label": row.label, "engine_digest": digests[name], "versions": versions[name], "error": None}
            for name, row in registered.items()
        }
    return record


_WEIGHTS: dict[tuple[Any, ...], str] = {}


def _weights_digest(task: Task) -> str:
    """The digest of a task's initial weights, made once for all the jobs that start from the same ones."""
    pretrained = (task.work.dataset.digest, *sorted(task.pretrained.items())) if task.pretrained else ()
    same = (task.spec.model_dump_json(), task.seed, task.dtype, pretrained)
    if same not in _WEIGHTS:
        _WEIGHTS[same] = weights.digest(task.initial_weights())
    return _WEIGHTS[same]


def techniques(engine: str) -> tuple[str, ...]:
    """The switches of an engine, by the names that it gives them; RunError for an engine that has none."""
    if engine == "numpy":
        from py_engine.ad.techniques import Techniques

        return tuple(item.name for item in dataclasses.fields(Techniques))
    if engine == "julia":
        from bridge.julia import environment

        source = Path(environment.ENGINE, "src", "ad", "techniques.jl").read_text(encoding="utf-8")
        return tuple(re.findall(r"^    (\w+)::Bool$", source, re.MULTILINE))
    raise RunError(f"engine {engine} has no switches for its techniques: an ablation is for numpy and julia")


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
        case "own":
            return f"test accuracy {fraction(row['test_accuracy'])}  (in all {took})"
        case "time":
            later = row["later_epoch_seconds"] or row["first_epoch_seconds"]
            return f"test accuracy {fraction(row['test_accuracy'])}  {duration(later)} per epoch  (in all {took})"
        case "memory":
            allocated = row["bytes_later_epochs"]
            allocated = row["bytes_first_epoch"] if allocated is None else allocated
            return f"{size(allocated)} allocated per epoch  peak {size(row['peak_rss_bytes'])}  (in all {took})"
        case "race":
            absent = [name for name, entrant in record["entrants"].items() if entrant["error"]]
            without = f"  without {', '.join(absent)}" if absent else ""
            return f"{record['config']['rounds']} rounds{without}  (in all {took})"
        case "variants":
            return f"{len({row['variant'] for row in record['variants']})} variants  (in all {took})"
        case "ablation":
            return f"{len(record['ablation'])} configurations  (in all {took})"
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
            _mean(group, "test_accuracy", fraction),
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
            fixed(row["microseconds_per_step"], 1),
        ]
        for record in records
        for row in record.get("scaling", ())
    ]


def _mean(group: Sequence[Record], name: str, text: Callable[[float], str]) -> str:
    values = [row[name] for row in group if row[name] is not None]
    return text(statistics.fmean(values)) if values else "-"
