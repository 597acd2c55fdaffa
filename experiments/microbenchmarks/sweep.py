"""What is measured, and its records in the results folder: one for each suite, with all its systems."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments import provenance
from experiments.formats import duration, nanoseconds, size
from experiments.microbenchmarks import measure
from experiments.microbenchmarks.functions import BENCHMARKS
from experiments.microbenchmarks.measure import Sizes
from experiments.microbenchmarks.process import Entrant, start
from experiments.microbenchmarks.registry import (
    FOLDER,
    SUITES,
    SYSTEMS,
    BenchmarkError,
    System,
    SystemUnavailableError,
    get,
)
from experiments.papers import Microbenchmarks, Paper, PaperFileError, ProfileName, load_paper, paper_keys
from experiments.progress import Progress
from experiments.results import Record, Results, unfinished
from experiments.sources import ROOT, SOURCES

MEASURE = measure.MEASURE.name
THREADS = 1
"""The functions are small: more threads would be waited for."""


@dataclass(frozen=True)
class Job:
    """One suite of a paper, with its systems."""

    paper: str
    suite: str
    systems: tuple[str, ...]
    sizes: Sizes
    profile: ProfileName

    def __str__(self) -> str:
        return f"{self.paper}  micro-benchmarks: {self.suite}  {len(self.systems)} systems"


def plan(paper: Paper, profile: ProfileName = "full", systems: Sequence[str] | None = None) -> list[Job]:
    """The suites that a paper's file asks for, with the systems that it names or those asked for.

    Raises PaperFileError where the file asks for none, SystemUnavailableError for a system unknown or not there.
    """
    given = paper.microbenchmarks
    if given is None:
        raise PaperFileError(f"{paper.key} has no micro-benchmarks; papers that have: {', '.join(papers())}")
    for name in systems or ():
        found = get(name).found()
        if not found.ok:
            raise SystemUnavailableError(f"system {name}: {found.reason}")
    counts = given.profile(profile)
    names = _planned(given, profile) if systems is None else list(systems)
    values = {
        name: getattr(counts, name).value for name in Sizes.__dataclass_fields__ if name not in ("chunks", "lengths")
    }
    sizes = Sizes(**values, chunks=tuple(counts.chunks.value), lengths=tuple(counts.lengths.value))
    jobs = []
    for suite in SUITES:
        members = tuple(name for name in names if suite in get(name).suites)
        if members:
            jobs.append(Job(paper.key, suite, members, sizes, profile))
    return jobs


def of_engines(paper: Paper, profile: ProfileName, engines: Sequence[str]) -> list[str]:
    """Those of a paper's systems that belong to engines: "numpy" has numpy-eager and numpy-compiled."""
    names = _planned(paper.microbenchmarks, profile) if paper.microbenchmarks else []
    return [name for name in names if any(f"{name}-".startswith(f"{engine}-") for engine in engines)]


def _planned(given: Microbenchmarks, profile: ProfileName) -> list[str]:
    few = given.profile(profile).systems
    return few.value if few else given.systems.value


def papers() -> list[str]:
    """The papers whose files ask for micro-benchmarks."""
    return [key for key in paper_keys() if load_paper(key).microbenchmarks]


def run(jobs: Sequence[Job], results: Results, progress: Progress, again: bool = False) -> list[Record]:
    """Measure every suite that has no record yet, and record it; the caller has locked the results folder."""
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        for job in jobs:
            record = skeleton(job)
            known = None if again else results.finished(record["key"])
            if known is not None:
                records.append(known)
                progress.finish(str(job), "was finished before")
                continue
            progress.start(str(job), measure.parts(job.suite, job.sizes))
            begin = time.perf_counter()
            failed = _start(job, record, entrants, stack)
            present = {name: entrants[name] for name in job.systems if name in entrants}
            rows, missing = measure.measure(job.suite, present, job.sizes, progress)
            for row in missing:
                if row["failure"]:
                    failed[row["engine"]] = row["missing"]
                    entrants.pop(row["engine"], None)  # a process that failed is not asked again
            for name in present.keys() & entrants.keys():
                try:
                    record["blas"][name] = present[name].linear_algebra()
                except BenchmarkError as error:
                    failed[name] = str(error)
            labels = {name: SYSTEMS[name].label for name in job.systems}
            record[MEASURE] = [{**row, "label": labels[row["engine"]]} for row in [*rows, *missing]]
            for name, message in failed.items():
                record["entrants"][name]["error"] = message
            if failed:
                record |= {"status": "failed", "error": "; ".join(failed.values()), "error_kind": "failed"}
            record["seconds"] = time.perf_counter() - begin
            SOURCES.check_unedited(starts(job), str(job))
            results.save(record)
            records.append(record)
            progress.finish(str(job), described(record))
    return records


def starts_of(system: System) -> list[str]:
    """Where the closure of a system's sources starts: its program, what serves it, and the reference values."""
    here = FOLDER.parent.relative_to(ROOT).as_posix()
    program = system.path.relative_to(ROOT).as_posix()
    match system.language:
        case "py":
            return [program, f"{here}/serve.py"]
        case "jl":
            return [program, f"{here}/serve.jl", f"{here}/functions.py", "bridge.libjulia.find"]
    return [program, f"{here}/process.py"]


def starts(job: Job) -> list[str]:
    """Where the closure of the sources that decide a job starts: the measure, and every system."""
    return [measure.__name__, *(start for name in job.systems for start in starts_of(get(name)))]


def skeleton(job: Job) -> Record:
    """A record with everything that is known before the run, its hashes included."""
    found = {name: get(name).found() for name in job.systems}
    digests = {name: SOURCES.digest(starts_of(get(name))) for name in job.systems}
    versions = {name: dict(seen.versions) for name, seen in found.items()}
    config: dict[str, Any] = {
        "paper": job.paper,
        "engine": ",".join(job.systems),
        "label": "Micro-benchmarks",
        "seed": 0,
        "measure": MEASURE,
        "threads": THREADS,
        "dtype": "float64",
        "profile": job.profile,
        "suite": job.suite,
        **asdict(job.sizes),
    }
    origin = provenance.summary()
    asked = {
        "study": job.paper,
        "systems": list(job.systems),
        "measure": MEASURE,
        "threads": THREADS,
        "profile": job.profile,
        "suite": job.suite,
        "settings": asdict(job.sizes),
    }
    decided_by = {
        "sources": SOURCES.digest(starts(job)),
        "versions": versions,
        "libraries": {name: seen.libraries for name, seen in found.items()},
        "machine": origin["machine"]["digest"],
        **provenance.settings(),
    }
    origin |= {"threads": THREADS, "engine_digest": " ".join(digests.values()), "versions": {}}
    entrants = {
        name: {
            "label": SYSTEMS[name].label,
            "engine_digest": digests[name],
            "versions": versions[name],
            "error": seen.reason or None,
            "available": seen.ok,
        }
        for name, seen in found.items()
    }
    nothing = {"name": "none", "source": "none", "digest": ""}
    return unfinished(asked, decided_by, config=config, data=nothing, provenance=origin, entrants=entrants)


def _start(job: Job, record: Record, entrants: dict[str, Entrant], stack: contextlib.ExitStack) -> dict[str, str]:
    """Start what is there and does not run yet, all at once; why a system could not be started."""
    failed: dict[str, str] = {}
    for number, name in enumerate(job.systems):
        if name in entrants or not record["entrants"][name]["available"]:
            continue
        try:
            entrant = start(SYSTEMS[name], THREADS, number)
        except (BenchmarkError, OSError) as error:
            failed[name] = f"{SYSTEMS[name].label}: {error}"
            continue
        stack.callback(entrant.close)
        entrants[name] = entrant
    return failed


# -----------------------------------------------------------------------------------------------------------
# In words


def described(record: Record) -> str:
    """One suite in a few words, as its line of progress says it."""
    if record["status"] != "ok":
        return f"failed: {record['error']}"
    ran = {row["engine"] for row in record[MEASURE] if not row.get("missing")}
    return f"{len(ran)} systems  (in all {duration(record['seconds'])})"


def absent(record: Mapping[str, Any]) -> list[str]:
    """What a suite lacks without having failed: systems that are not there, functions that a system does not have."""
    found = [
        f"{entrant['label']}: {entrant['error']}"
        for entrant in record["entrants"].values()
        if not entrant["available"] and entrant["error"]
    ]
    for row in record.get(MEASURE, ()):
        if row.get("missing") and not row["failure"]:
            found.append(f"{row['label']}, {BENCHMARKS[row['benchmark']].title}: {row['missing']}")
    return found


def rows(records: Iterable[Record]) -> list[Record]:
    """A row for programs for each function and system: the medians over the rounds."""
    found: list[Record] = []
    for record in records:
        groups: dict[tuple[Any, ...], list[float]] = {}
        names = ("engine", "label", "benchmark", "size", "chunk", "what")
        for row in record.get(MEASURE, ()):
            if not row.get("missing"):
                value = row["bytes"] if "bytes" in row else row["nanoseconds"]
                groups.setdefault(tuple(row[name] for name in names), []).append(value)
        suite = record["config"]["suite"]
        unit = "bytes" if suite == "memory" else "nanoseconds"
        found += [
            {"kind": "microbenchmark", "suite": suite, **dict(zip(names, key, strict=True))}
            | {unit: statistics.median(values)}
            for key, values in groups.items()
        ]
    return found


def table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A suite as headers and lines: functions down, systems and what was measured across each line."""
    found = rows([dict(record)])
    lines = []
    for row in found:
        value = size(row["bytes"]) if "bytes" in row else nanoseconds(row["nanoseconds"])
        title = BENCHMARKS[row["benchmark"]].title if row["benchmark"] in BENCHMARKS else row["benchmark"]
        lines.append([title, str(row["size"]), str(row["chunk"] or ""), row["label"], row["what"], value])
    return ["FUNCTION", "SIZE", "CHUNK", "SYSTEM", "WHAT", "MEDIAN"], lines
