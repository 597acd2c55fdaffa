"""Runs: which there are to do, doing each in fresh processes, and recording what came of it.

A job is one (paper, engine, seed, measure). All engines of a paper start from the same weights and see the
same batches: both follow from the seed. A job whose record is there is not repeated; one that failed is
recorded with its message and tried again the next time. Jobs in whose results no time takes part run several at a
time, each on its own core.

Several processes and machines may work at one sweep in a folder that they share. Before a job is run its lease is taken
(`experiments.leases`), and a job that another machine has finished with the same sources is not repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bridge import linear_algebra, weights
from bridge import registry as engines
from bridge.errors import EngineUnavailableError, TwinGradError, WorkerError
from bridge.session import Optimizer
from bridge.worker import environment
from experiments import data, leases, provenance, sources
from experiments.data.dataset import Dataset
from experiments.data.dataset import Progress as Download
from experiments.leases import Leases, Owner
from experiments.measures.measure import Measure
from experiments.measures.registry import MEASURES
from experiments.measures.task import Assignment, Task, Watcher
from experiments.papers import NativeTraining, Paper, PaperFileError, ProfileName, Runs
from experiments.progress import Progress
from experiments.results import Record, Results, ResultsError, key_of, unfinished
from experiments.run_arrays import RunArrays
from experiments.slots import Slot, side_by_side, slots
from experiments.summary import described
from py_engine.errors import EngineError

WORKER = "bridge.worker_process"
"""The module that a worker runs."""


@dataclass(frozen=True)
class Job:
    """One thing to run. `engines` are those of a race, and one otherwise."""

    paper: Paper
    engines: tuple[str, ...]
    seed: int
    measure: str
    threads: int
    """As many as it runs with here."""
    profile: ProfileName
    rounds: int = 0
    threads_asked: int | None = None
    """As many as the user or the paper asks for, where this machine has fewer cores; None: `threads`."""
    network: str = ""
    """Which of the measure's networks it is about, where that has several."""

    @property
    def runs(self) -> Runs:
        """The counts of the job's profile."""
        return self.paper.runs_of(self.profile)

    @property
    def kind(self) -> Measure:
        """The record of its measure."""
        return MEASURES[self.measure]

    def option(self, name: str) -> Any:
        """The value of a key under the `[runs]` of its profile; None where there is none."""
        return self.runs.option(name)

    @property
    def epochs(self) -> int:
        """How many epochs it trains."""
        fewer: int | None = self.option(self.kind.epochs) if self.kind.epochs else None
        return fewer or self.paper.epochs(self.profile)

    @property
    def named(self) -> str:
        """The run in a message: "study mnist-rnn-e, engine numpy, measure time, seed 3"."""
        engine = "" if self.kind.plan == "together" else f"engine {self.engines[0]}, "
        engine += f"network {self.network}, " if self.network else ""
        return f"study {self.paper.key}, {engine}measure {self.measure}, seed {self.seed}"

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells it from the other jobs of a plan, the same on every machine."""
        threads = self.threads_asked or self.threads
        return self.paper.key, self.profile, self.measure, self.engines, self.seed, threads, self.rounds, self.network

    def __str__(self) -> str:
        if self.kind.plan == "together":
            name = f"{self.measure} of {self.network or ', '.join(self.engines)}"
            return f"{self.paper.key}  {name}  threads {self.threads}"
        about = self.network or f"seed {self.seed}"
        return f"{self.paper.key}  {self.engines[0]:<13}  {self.measure:<7}  {about}"


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
    everywhere: bool = False,
) -> list[Job]:
    """The jobs of a paper, seed by seed, so that what a machine does to one engine it does to the others too.

    What is None is taken from the paper file, whose threads are cut to the cores there are. `everywhere`: the same jobs
    on every machine, also those that differ in nothing where there are too few cores. Raises PaperFileError for an
    unknown measure, EngineUnavailableError for an engine asked for that is not there, and
    TooManyThreadsError for threads asked for.
    """
    if paper.runs_of_paper:  # they are run, and named in results, as that paper's
        return []
    runs = paper.runs_of(profile)
    names = checked_engines(paper, engine_names, runs)
    if unknown := sorted(set(measures or ()) - set(MEASURES)):
        raise PaperFileError(f"no measure {unknown[0]!r}; measures: {', '.join(MEASURES)}")
    for name in measures or ():
        _check_defined(paper, runs, MEASURES[name])
    asked = threads or paper.training.threads.value
    usual = provenance.threads(threads, asked)
    jobs: list[Job] = []
    for name, measure in MEASURES.items():
        if name not in (measures or runs.measures.value):
            continue
        among = runs.engines_of(measure)
        if among is None or (engine_names and not measure.fixed_engines):
            chosen = names
        else:
            chosen = [engine for engine in names if engine in among]
        if measure.plan == "together":
            count = rounds or (runs.option(measure.rounds) if measure.rounds else 0)
            planned = runs.option(measure.threads) if measure.threads else [asked]
            for here, wanted in _threads(threads, planned, everywhere):
                for network in measure.networks(paper, runs):
                    jobs.append(Job(paper, tuple(chosen), 0, name, here, profile, count, wanted, network))
        elif measure.plan == "engines":
            for network in measure.networks(paper, runs):
                jobs += [Job(paper, (one,), 0, name, usual, profile, 0, asked, network) for one in chosen]
        else:
            alone = threads or (runs.option(measure.threads) if measure.threads else 1)
            here, wanted = (usual, asked) if measure.timed else (alone, alone)
            counts = {engine: paper.seeds_of(profile, measure, engine, seeds) for engine in chosen}
            for seed in range(max(counts.values(), default=0)):
                able = [engine for engine in chosen if seed < counts[engine]]
                jobs += [Job(paper, (engine,), seed, name, here, profile, threads_asked=wanted) for engine in able]
    return jobs


def _check_defined(paper: Paper, runs: Runs, measure: Measure) -> None:
    """Raise PaperFileError for a measure asked for that the paper's file says nothing of."""
    needed = [measure.threads if measure.plan == "together" else "", measure.engines if measure.only_listed else ""]
    missing = [name for name in needed if name and not runs.option(name)]
    if missing or not measure.networks(paper, runs):
        what = f"gives no {' and no '.join(missing)}" if missing else "has no networks for it"
        raise PaperFileError(f"study {paper.key} does not define the measure {measure.name}: its file {what}")


def _threads(asked: int | None, planned: list[int], everywhere: bool) -> list[tuple[int, int]]:
    """The numbers of threads of a measure of all engines: as many as there are cores for, and as the paper has it."""
    numbers = [(min(wanted, provenance.cores()), wanted) for wanted in ([asked] if asked else planned)]
    firsts = {here: number for number, (here, _) in reversed(list(enumerate(numbers)))}
    return [pair for number, pair in enumerate(numbers) if everywhere or firsts[pair[0]] == number]


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


def optional(paper: Paper) -> set[str]:
    """The engines that have a row only where something was measured of them: that they fail is no failure of a run."""
    return {row.name for row in paper.engines if row.optional}


# -----------------------------------------------------------------------------------------------------------
# Running


class Sweep:
    """Runs jobs and records them in a results folder that the caller has locked, or shares by these leases."""

    def __init__(
        self,
        results: Results,
        data_dir: Path | None = None,
        download: Download | None = None,
        shared: Leases | None = None,
        datasets: dict[str, Dataset] | None = None,
        slot: Slot | None = None,
    ) -> None:
        """`datasets`: those that are read already; `slot`: where all jobs run; None: where `slots` says."""
        self.results = results
        self.data_dir = data_dir
        self.download = download
        self.leases = shared
        self._datasets: dict[str, Dataset] = {} if datasets is None else datasets
        self._slot = slot
        self._prepared: set[str] = set()
        self._others: dict[int, Owner] = {}
        self._unsaved: list[Record] = []

    @property
    def work(self) -> Path:
        """Where this process's arrays are."""
        return self.results.work if self.leases is None else self.results.work / self.leases.me.token

    def fitting(self, paper: Paper, profile: ProfileName, progress: Progress) -> ProfileName:
        """The profile, or the one that is made for the embedded sample where only that is at hand."""
        return "sample" if self.load(paper, progress).source == "sample" else profile

    def run(self, jobs: Sequence[Job], progress: Progress, again: bool = False) -> Outcome:
        """Run every job that has no record yet; with `again` every job.

        Raises `ResultsError` where nothing can be written. The record of the run that has just finished is then saved
        once more, when the arrays of the runs, which may have filled the disk, are removed.
        """
        start, self._since = time.perf_counter(), provenance.now()
        found: dict[int, Record] = {}
        reused: list[int] = []
        waiting, told = list(enumerate(jobs)), ""
        with self._saving_what_is_unsaved():
            while waiting:
                for part in by_data(waiting):
                    with RunArrays(self.load(part[0][1].paper, progress), self.work) as work:
                        one = partial(self._job, work=work, found=found, reused=reused, progress=progress, again=again)
                        for alike, places in _side_by_side(part):
                            if len(places) > 1 and self._slot is None:
                                # Here, since the threads of the jobs would not wait for one another.
                                self._prepare(self._engines_to_run(alike, work, again))
                                side_by_side(one, alike, places)
                                continue
                            for job in alike:
                                one(job, self._slot or places[0])
                waiting = [numbered for numbered in waiting if numbered[0] not in found]
                if waiting:  # others run them, or did until they ended
                    owners = ", ".join(sorted({str(owner) for owner in self._others.values()}))
                    runs = f"{len(waiting)} run{'s' if len(waiting) > 1 else ''}"
                    text = f"waiting for {runs} of {owners or 'another process'}"
                    if text != told:
                        progress.note(told := text)
                    time.sleep(leases.BEAT / 5)
        return Outcome([found[number] for number in range(len(jobs))], len(reused), time.perf_counter() - start)

    @contextmanager
    def _saving_what_is_unsaved(self) -> Iterator[None]:
        """Save what could not be saved inside once more."""
        self._unsaved.clear()
        try:
            yield
        except ResultsError:
            for record in self._unsaved if self.leases is None else ():
                self.results.save(record)
            raise

    def load(self, paper: Paper, progress: Progress) -> Dataset:
        """The data set of a paper, read once."""
        key = _data_key(paper)
        if key not in self._datasets:
            dataset = data.load(paper.dataset, self.data_dir, progress=self.download, **paper.loader_options())
            if dataset.line:
                progress.note(dataset.line)
            for note in dataset.notes:
                progress.note(note)
            self._datasets[key] = dataset
        return self._datasets[key]

    def _job(
        self,
        numbered: tuple[int, Job],
        slot: Slot,
        work: RunArrays,
        found: dict[int, Record],
        reused: list[int],
        progress: Progress,
        again: bool,
    ) -> None:
        """Run a job that has no record yet, and save its record, whatever came of it, unless its slot was stopped."""
        number, job = numbered
        task = task_of(job, work)
        record = skeleton(job, task, work.dataset)
        with self._turn(number, record, again, slot) as known:
            if known is not None:
                found[number] = known
                reused.append(number)
                progress.finish(str(job), "was finished before" if known["status"] == "ok" else described(known))
            if known is not None or number in self._others:
                return
            progress.start(str(job), job.kind.steps(job))
            if self._prepare(job.engines):  # which may have found out what the key needs
                record = skeleton(job, task, work.dataset)
                if not again and (known := self._finished(record)) is not None:
                    found[number] = known
                    reused.append(number)
                    progress.finish(str(job), "was finished before")
                    return
            start, others = time.perf_counter(), provenance.OthersShare()
            try:
                for parts in job.kind.run(assignment(job, task, slot, progress)):
                    record.update(parts)
                if "failures" in record:
                    _note_failures(job, record)
            except ResultsError:  # no place to write is no failure of this run: stop
                raise
            except (TwinGradError, EngineError) as error:
                if slot.stopped:  # its worker was ended, which says nothing about the run
                    return
                absent = isinstance(error, EngineUnavailableError) or optional(job.paper).issuperset(job.engines)
                kind = "unavailable" if absent else "failed"
                died = f"{job.named}: " if isinstance(error, WorkerError) else ""
                record.update(status="failed", error=f"{died}{error}", error_kind=kind)
                failures = record.pop("failures", {})
                for name, entrant in record.get("entrants", {}).items():
                    entrant["error"] = failures.get(name) or record["error"]
            record["seconds"] = time.perf_counter() - start
            if job.kind.timed and (share := others.value()) is not None:
                record["provenance"]["others_share"] = share
            if self.leases is not None and not self.leases.holds(record["job"]):
                self._others[number] = Owner()
                progress.note(
                    f"{job}: taken over by another process, since this one was silent: this result is left out"
                )
                return
            sources.SOURCES.check_unedited(starts(job), str(job))
            try:
                self.results.save(record)
            except ResultsError:
                self._unsaved.append(record)
                raise
            found[number] = record
            progress.finish(str(job), described(record))

    @contextmanager
    def _turn(self, number: int, record: Record, again: bool, slot: Slot) -> Iterator[Record | None]:
        """The record of a finished run, or the right to run the job, unless it is entered in `_others`."""
        known = None if again else self._finished(record)
        self._others.pop(number, None)
        if known is not None or self.leases is None:
            yield known
            return
        owner = self.leases.holder(record["job"])
        if owner is None:
            host = f"host-{self.leases.me.boot or self.leases.me.host}"
            with self.leases.turn(host, lambda: slot.stopped):  # timed runs have it alone
                if self.leases.acquire(record["job"]):
                    try:
                        yield None if again else self._finished(record)  # others may have run it in the meantime
                    finally:
                        self.leases.release(record["job"])
                    return
            owner = self.leases.holder(record["job"])
        self._others[number] = owner or Owner()
        yield None

    def _finished(self, record: Record) -> Record | None:
        """The record of the run that this one would repeat.

        In a shared folder also that of another machine, and of a run that failed in another process a moment ago.
        """
        if (known := self.results.finished(record["key"])) is not None or self.leases is None:
            return known
        failed = self.results.load(record["key"])
        if failed is not None and failed["provenance"]["created"] >= self._since:
            return failed
        return self.results.finished_elsewhere(record)

    def _engines_to_run(self, jobs: Iterable[tuple[int, Job]], work: RunArrays, again: bool) -> list[str]:
        """The engines of those jobs that have no record yet."""
        return [
            name
            for _, job in jobs
            if again or self._finished(skeleton(job, task_of(job, work), work.dataset)) is None
            for name in job.engines
        ]

    def _prepare(self, names: Sequence[str]) -> bool:
        """Prepare the engines that were not yet; whether there were any."""
        missing = [name for name in dict.fromkeys(names) if name not in self._prepared]
        for name in missing:
            engines.get(name).prepare()
            self._prepared.add(name)
        return bool(missing)


def by_data(jobs: Sequence[tuple[int, Job]]) -> list[list[tuple[int, Job]]]:
    """The jobs, each with its number, by the data that they load."""
    groups: dict[str, list[tuple[int, Job]]] = {}
    for number, job in jobs:
        groups.setdefault(_data_key(job.paper), []).append((number, job))
    return list(groups.values())


def _side_by_side(jobs: Sequence[tuple[int, Job]]) -> Iterator[tuple[list[tuple[int, Job]], list[Slot]]]:
    """Jobs that may run at the same time, with the slots for them: one slot where times count."""
    for (name, threads), alike in itertools.groupby(jobs, lambda numbered: (numbered[1].measure, numbered[1].threads)):
        yield list(alike), [Slot()] if MEASURES[name].timed else slots(threads, provenance.cores())


def assignment(job: Job, task: Task, slot: Slot, watcher: Watcher) -> Assignment:
    """What the job's measure is given to run."""
    others = {name: task_of(job, task.work, model) for name, model in job.kind.models(job).items()}
    return Assignment(job.engines, job.threads, task, job.kind.settings(job), slot, watcher, others)


def _note_failures(job: Job, record: Record) -> None:
    """Say in the record of a race which engines fell out; it failed unless all that can race here have raced."""
    failures, entrants = record.pop("failures"), record["entrants"]
    for name, message in failures.items():
        entrants[name]["error"] = message
    if failures:
        reasons = "; ".join(f"{name}: {failures[name]}" for name in entrants if name in failures)
        spared = optional(job.paper)
        missing = all(name in spared or not engines.availability(name).ok for name in failures)
        record.update(error=f"{job.named}: {reasons}", error_kind="unavailable" if missing else "failed")
        if not missing or len(failures) == len(entrants):
            record["status"] = "failed"


def _data_key(paper: Paper) -> str:
    """Equal for papers that load the same data."""
    return key_of({"name": paper.dataset, "options": paper.loader_options()})


def task_of(job: Job, work: RunArrays, model: str | None = None) -> Task:
    """The training that a job measures, with the paper's network or with another `model`."""
    paper, training = job.paper, job.paper.training
    differing = paper.own.get(job.engines[0], NativeTraining()) if job.kind.native else NativeTraining()
    pixels, batch_size = differing.pixels or training.pixels, differing.batch_size or training.batch_size
    if batch_size.value > len(work.dataset.y_train):
        raise PaperFileError(
            f"paper {paper.key}: a mini-batch (batch_size) of {batch_size.value:,} rows is more than the "
            f"{len(work.dataset.y_train):,} training rows of {work.dataset.name}"
        )
    name = model or (differing.model.value if differing.model else paper.model)
    spec = paper.spec(name)
    known = training.train_evaluation_rows
    rows = job.option(job.kind.rows) if job.kind.rows else None
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
        rows_per_epoch=min(rows, len(work.dataset.y_train)) if rows else None,
    )


def optimizer_of(paper: Paper, differing: NativeTraining | None = None) -> Optimizer:
    """The optimizer of a paper's training, or what differs from it."""
    training, differing = paper.training, differing or NativeTraining()
    momentum = training.momentum.value if training.momentum and not differing.optimizer else 0.0
    name, rate = differing.optimizer or training.optimizer, differing.learning_rate or training.learning_rate
    settings: dict[str, Any] = {"momentum": momentum} if momentum else {}
    return Optimizer(name.value, rate.value, **settings)


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
        "settings": job.kind.settings(job),
    }


def starts(job: Job) -> list[str]:
    """Where the closure of the sources that decide a job starts: the measure, the worker and the adapters."""
    return [job.kind.run.__module__, *job.kind.files, WORKER, *(engines.get(name).module for name in job.engines)]


def skeleton(job: Job, task: Task, dataset: Dataset) -> Record:
    """A record with everything that is known before the run, its hashes included."""
    registered = {name: engines.get(name) for name in job.engines}
    digests = {name: sources.SOURCES.digest([row.module]) for name, row in registered.items()}
    versions = {name: row.availability().versions for name, row in registered.items()}
    kinds = ("training.", "pretrained.", *(f"own.{name}." for name in job.engines if job.kind.native))
    training = {name: setting.value for name, setting in job.paper.settings() if name.startswith(kinds)}
    alone = job.kind.plan != "together"
    config: dict[str, Any] = {
        "paper": job.paper.key,
        "engine": ",".join(job.engines),
        "label": registered[job.engines[0]].label if alone else job.measure.capitalize(),
        "seed": job.seed,
        "measure": job.measure,
        "threads": job.threads,
        "dtype": task.dtype,
        "profile": job.profile,
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "training": training,
        **job.kind.settings(job),
        **job.kind.config(job, task),
    }
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
        **provenance.settings(),
        **{name: origin[name] for name in ("threads", "openblas_coretype", "python", "numpy", "weights_digest")},
    }
    rows = {"train_rows": len(dataset.y_train), "test_rows": len(dataset.y_test)}
    about = {"name": dataset.name, "source": dataset.source, "digest": dataset.digest, **rows}
    record = unfinished(asked(job, task), decided_by, config=config, data=about, provenance=origin)
    if not alone:
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
