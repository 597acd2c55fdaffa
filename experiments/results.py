"""The results folder: one raw record per run, tidy CSVs made from them, and a lock for whoever writes.

    results/raw/<key>.json     one run each, written whole or not at all
    results/raw.tar.xz         the same as one file, in committed results (experiments.archive)
    results/tidy/*.csv         everything the tables and figures need, made from raw
    results/report/            tables, figures and the paper, made from tidy
    results/damaged/           records that could not be read, set aside and run again
    results/replaced/          failed runs in whose place there are finished ones
    results/.locks/            who writes here, and who runs which job (experiments.leases)

A raw record (schema 2) holds

    schema, status, error, error_kind, seconds
    asked        what the run is: study, engines, measure, seed, threads, profile, data, network, training, settings
    job          a hash over `asked`: equal on every machine
    decided_by   what else decides the result here: sources, threads in use, weights, versions, BLAS, machine
    key          a hash over job and `decided_by`
    config       the same run in the words of the tidy columns: paper, engine, label, seed, measure, threads, ...
    data         name, source and digest of the data set, rows
    provenance   commit, dirty, machine (see `experiments.machine`), cpu_model, versions, digests, created, ...
    blas         the linear algebra that each engine (or system) said it computes with: {engine: text}
    entrants     of a race and of micro-benchmarks: label, engine_digest, versions, error of each
    startup, epochs, step_losses, peak_rss_bytes, race, roofline, scaling, ablation, variants, microbenchmarks
                 what was measured, as far as the measure has it

An interrupted sweep resumes where it stopped: a record under the same key is not made again. A changed engine has
another key, so that it runs again. A failed run is recorded under its key and tried again the next time. Both hashes
can be computed from the record itself: `hashes`.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.files import encoded
from experiments import archive, records
from experiments.errors import ResultsError as ResultsError
from experiments.errors import ResultsInUseError as ResultsInUseError
from experiments.errors import explain, write
from experiments.leases import Leases, Owner
from experiments.measures.registry import RECORDED

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 2
KEY_LENGTH = 16
COMMITTED = "COMMITTED"
"""A results folder that holds a file of this name is kept as it is: no run writes to it."""

Record = dict[str, Any]

# Columns of the tidy files. Times are in seconds unless the name says otherwise, accuracies are fractions.
# The first epoch's seconds include `build`, as the studies count it; `build_seconds` is that share of them.
COLUMNS: dict[str, tuple[str, ...]] = {
    "runs": (
        *("key", "paper", "engine", "label", "seed", "measure", "threads", "dtype", "profile"),
        *("data_source", "dataset_digest", "status", "error", "import_seconds", "build_seconds"),
        *("first_epoch_seconds", "later_epoch_seconds", "total_seconds", "total_seconds_with_evaluation"),
        *("train_accuracy", "test_accuracy", "test_loss", "bytes_first_epoch", "bytes_later_epochs"),
        *("peak_rss_bytes", "commit", "dirty", "cpu_model", "machine", "blas", "python", "framework_version"),
        *("engine_digest", "training_digest", "job", "created", "others_share"),
    ),
    "epochs": (
        *("key", "paper", "engine", "label", "seed", "measure", "threads", "data_source", "epoch", "seconds"),
        *("seconds_with_evaluation", "train_loss", "train_accuracy", "test_loss", "test_accuracy"),
        *("bytes_allocated", "cpu_model", "machine"),
    ),
    "steps": ("key", "paper", "engine", "seed", "step", "loss"),  # by far the longest: runs.csv has the rest by key
    **{name: measure.columns for name, measure in RECORDED.items() if measure.columns},
}
LATER_COLUMNS = (
    *("machine", "job", "blas", "training_digest", "others_share"),
    *(name for measure in RECORDED.values() for name in measure.later_columns),
)
"""Columns that older tidy files may lack: they are read as empty, and the machine as the name of its CPU."""
_FOLDER, _SHARING, _TIDY = "folder", "with-", "tidy"
"""Leases: of the whole folder, of one of several processes that share it, and of the tidy tables."""

LATER_FILES = tuple(name for name, measure in RECORDED.items() if measure.later)
"""Tidy files that older results lack: they are read as empty."""


class TidyError(ResultsError):
    """A tidy table that is damaged."""

    def __init__(self, place: Path, problem: str) -> None:
        self.place = place
        super().__init__(f"{place} is damaged: {problem}; restore it, or the raw records that it is made from")


def key_of(content: Mapping[str, Any]) -> str:
    """The first 16 hex digits of the sha256 over some content, as JSON with sorted names."""
    canonical = json.dumps(plain(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_date)
    return hashlib.sha256(encoded(canonical)).hexdigest()[:KEY_LENGTH]


def _date(value: Any) -> str:
    """A date as text: TOML has them, JSON none. No setting is one, as whoever reads the setting says."""
    if not isinstance(value, datetime.date | datetime.time):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return value.isoformat()


def hashes(asked: Mapping[str, Any], decided_by: Mapping[str, Any]) -> Record:
    """The part of a record that says what was asked and what decides the result here, with the hash of each."""
    job = key_of({"asked": asked})
    key = key_of({"schema": SCHEMA, "job": job, "decided_by": decided_by})
    return {"key": key, "job": job, "asked": plain(asked), "decided_by": plain(decided_by)}


def unfinished(asked: Mapping[str, Any], decided_by: Mapping[str, Any], **parts: Any) -> Record:
    """A record before its run: its hashes, and what is known of it by then."""
    state = {"status": "ok", "error": None, "error_kind": None}
    return {"schema": SCHEMA, **hashes(asked, decided_by), **state, **parts, "blas": {}}


@dataclass(frozen=True)
class Results:
    """A results folder. Reading needs no lock; writing happens inside `with results.locked():`."""

    root: Path

    @property
    def raw(self) -> Path:
        """Where the raw records are."""
        return self.root / "raw"

    @property
    def archive(self) -> Path:
        """The raw records as one file, where there is one."""
        return self.root / archive.NAME

    @property
    def tidy(self) -> Path:
        """Where the tidy CSVs are."""
        return self.root / "tidy"

    @property
    def report(self) -> Path:
        """Where tables, figures and the paper go unless told otherwise."""
        return self.root / "report"

    @property
    def work(self) -> Path:
        """Where runs put the arrays that their workers read; empty between runs.

        A process that shares the folder has one in it with the name of its lease: others remove what it leaves when it
        is killed.
        """
        return self.root / ".work"

    @property
    def locks(self) -> Path:
        """Where the leases of whoever writes are."""
        return self.root / ".locks"

    @contextmanager
    def locked(self, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """Hold the folder for this process alone, and clear away what a killed run left half-written.

        Damaged records are set aside in the folder `damaged`, with a sentence to `say` on each, and run again.

        The folder is free again when the process ends, however it ends; of a process on another machine that is found
        out within half a minute, and `say` gets a sentence on the waiting. Raises ResultsInUseError when another
        process holds or shares it and ResultsError when the folder cannot be written.
        """
        self.check_writable()
        leases = Leases(self.locks)
        with ExitStack() as stack:
            stack.callback(leases.close)
            self._refuse(leases, _FOLDER, say)
            if not leases.acquire(_FOLDER):
                self._refuse(leases, _FOLDER, say)
                raise ResultsInUseError(self._in_use(""))
            for name in leases.names(_SHARING):
                self._refuse(leases, name, say)
            leases.clear(_FOLDER)
            for folder in (self.root, self.raw, self.tidy):
                remove_partial(folder)
            shutil.rmtree(self.work, ignore_errors=True)
            self._set_aside(say)
            yield

    @contextmanager
    def shared(self, say: Callable[[str], None] = lambda text: None) -> Iterator[Leases]:
        """Write to the folder together with other processes, also of other machines; the leases of this one.

        Before a job is run its lease is taken. Raises ResultsInUseError while a process holds the folder alone.
        """
        self.check_writable()
        leases = Leases(self.locks)
        with ExitStack() as stack:
            stack.callback(leases.close)
            if not leases.acquire(f"{_SHARING}{leases.me.token}"):
                raise ResultsInUseError(self._in_use(""))
            self._refuse(leases, _FOLDER, say)
            self._set_aside(say)
            for left in self.work.glob("*"):
                if leases.holder(f"{_SHARING}{left.name}") is None:
                    shutil.rmtree(left, ignore_errors=True)
            stack.callback(shutil.rmtree, self.work / leases.me.token, ignore_errors=True)
            yield leases

    def _refuse(self, leases: Leases, name: str, say: Callable[[str], None]) -> None:
        """Raise ResultsInUseError where another process holds a lease."""

        def waiting(owner: Owner) -> None:
            say(f"{self.root} was in use by {owner}: waiting for a sign of life, at most half a minute")

        owner = leases.settled(name, waiting)
        if owner is not None:
            raise ResultsInUseError(self._in_use(f" ({owner})"))

    def _in_use(self, owner: str) -> str:
        return (
            f"the results folder {self.root} is in use by another twingrad process{owner}; "
            "wait until it has finished, or choose another folder with --results DIR"
        )

    def damaged(self) -> Iterator[tuple[Path, records.DamagedError]]:
        """The raw records and the tidy tables that can't be used, with the reason; nothing is changed."""
        for path in sorted(self.raw.glob("*.json")):
            try:
                records.read(path, _schemas())
            except records.DamagedError as error:
                yield path, error
        for path in sorted(self.tidy.glob("*.csv")):
            try:
                records.check_regular(path)
            except records.DamagedError as error:
                yield path, error

    def _set_aside(self, say: Callable[[str], None]) -> None:
        """Move away what is damaged, with a sentence on each."""
        try:
            for path, reason in list(self.damaged()):
                if isinstance(reason, records.UnreadableError):
                    raise ResultsError(
                        f"{path} {reason}: let this user read it, or choose another folder with --results DIR"
                    )
                try:
                    moved = records.set_aside(path, self.root)
                except FileNotFoundError:  # by another process that shares the folder
                    continue
                say(f"{path} is damaged: {reason}; it was moved to {moved}")
        except OSError as error:
            raise ResultsError(explain(error, self.root / records.DAMAGED)) from error

    def check_writable(self) -> None:
        """Create the folder if need be; raise ResultsError when it cannot be written or must not be."""
        if (self.root / COMMITTED).exists():
            raise ResultsError(
                f"the results in {self.root} are committed and are not overwritten by a run "
                f"(the file {COMMITTED} says so); choose another folder with --results DIR"
            )
        try:
            for folder in (self.raw, self.tidy):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(explain(error, self.root)) from error
        write(self.root / ".writable", "")
        (self.root / ".writable").unlink(missing_ok=True)

    def load(self, key: str) -> Record | None:
        """The record with this key; None when there is none or it is of another schema."""
        path = self.raw / f"{key}.json"
        if os.path.lexists(path):
            return _of_schema(_read(path))
        packed = self._archived().get(key)
        return None if packed is None else _of_schema(_read(self.archive / path.name, packed))

    def finished(self, key: str) -> Record | None:
        """The record with this key if that run succeeded: it need not run again."""
        record = self.load(key)
        return record if record and record["status"] == "ok" else None

    def finished_elsewhere(self, record: Record) -> Record | None:
        """The record of a run of the same job that another machine finished with the same sources."""
        here, sources = (record["decided_by"][name] for name in ("machine", "sources"))
        for path in sorted(self.raw.glob("*.json")):
            other = _summary(path, path.stat().st_mtime_ns)
            found = self.finished(path.stem) if other == ("ok", record["job"], sources) else None
            if found is not None and found.get("decided_by", {}).get("machine") not in (None, here):
                return found
        return None

    def save(self, record: Record) -> Path:
        """Write a record under its key, whole or not at all.

        A failed run never replaces a finished one: it is written into the folder `replaced` then.
        """
        path = self.raw / f"{record['key']}.json"
        if record["status"] != "ok" and self.finished(record["key"]) is not None:
            path = records.free_place(path, self.root, records.REPLACED)
        write(path, json.dumps(plain(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return path

    def put(self, key: str, content: bytes) -> None:
        """Write a record as it is, under its key."""
        write(self.raw / f"{key}.json", content)

    def records(self) -> list[Record]:
        """All raw records of this schema, oldest first; where there are none, those of an older schema, to be shown."""
        found = [record for _, record in self._all() if record]
        current = [record for record in found if _of_schema(record)]
        chosen = current or [_as_current(record) for record in found if _is_older(record)]
        return sorted(chosen, key=lambda record: str(record["provenance"]["created"]))

    def older(self) -> int:
        """How many records of an older schema there are, which count for no run."""
        return sum(_is_older(record) for _, record in self._all())

    def files(self) -> dict[str, bytes]:
        """The bytes of every raw record of this schema, by key: what an archive holds."""
        current = {record["key"] for _, record in self._all() if record and _of_schema(record)}
        found = self._archived() | {path.stem: path.read_bytes() for path in self.raw.glob("*.json")}
        return {key: found[key] for key in sorted(current)}

    def _all(self) -> Iterator[tuple[Path, Record | None]]:
        """Every record of the folder and of its archive, by key; one in the folder comes before one in the archive."""
        paths = {path.stem: path for path in self.raw.glob("*.json")}
        packed = self._archived()
        for key in sorted({*paths, *packed}):
            path = paths.get(key, self.archive / f"{key}.json")
            yield path, _read(path, None if key in paths else packed[key])

    def _archived(self) -> dict[str, bytes]:
        """The records of the archive; none where there is no archive."""
        if not self.archive.is_file():
            return {}
        status = self.archive.stat()
        return _unpacked(self.archive, status.st_mtime_ns, status.st_size)

    def write_tidy(self, records: Iterable[Record] | None = None, leases: Leases | None = None) -> dict[str, int]:
        """Make the tidy CSVs from all raw records, oldest first, or from these; the number of rows of each file.

        Those who share the folder give their `leases`, and write one after the other: the last one has all records.
        """
        with nullcontext() if leases is None else leases.turn(_TIDY):
            rows = tidy_rows(self.records() if records is None else records)
            for name, columns in COLUMNS.items():
                write(self.tidy / f"{name}.csv", _csv(columns, rows[name]))
        return {name: len(found) for name, found in rows.items()}

    def tidy_is_current(self) -> bool:
        """Whether the tidy CSVs are there, have their columns, and are of the raw records that there are and newer."""
        sources = [*self.raw.glob("*.json"), *([self.archive] if self.archive.is_file() else [])]
        newest = max((path.lstat().st_mtime_ns for path in sources), default=0)
        for name, columns in COLUMNS.items():
            path = self.tidy / f"{name}.csv"
            if not path.is_file():
                return not newest  # without raw records there is nothing to make them from
            with path.open("rb") as file:
                header = file.readline(10_000).decode(errors="replace")
            if newest and (path.stat().st_mtime_ns < newest or header != ",".join(columns) + "\n"):
                return False
        return not newest or self._tidy_has_all()

    def _tidy_has_all(self) -> bool:
        """Whether the tidy CSVs have a row of every raw record of this schema, and of nothing else."""
        shown: set[str] = set()
        there = {*self._archived(), *(path.stem for path in self.raw.glob("*.json"))}
        try:
            for name in ("runs", "microbenchmarks"):
                with (self.tidy / f"{name}.csv").open(encoding="utf-8", errors="replace", newline="") as file:
                    shown.update(row[0] for row in itertools.islice(csv.reader(file), 1, None) if row)
            return shown <= there and not any(self.load(key) for key in there - shown)
        except (records.DamagedError, csv.Error):  # of a file that was edited, or of an error of 128 KiB
            return False


def plain(value: Any) -> Any:
    """`value` with only what JSON has: nothing (null) for NaN and infinity, no numpy scalars, no paths."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def remove_partial(folder: Path) -> None:
    """Remove the temporary files of killed writers; only for who holds the folder's lock."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


# -----------------------------------------------------------------------------------------------------------
# From raw to tidy


def tidy_rows(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The rows of every tidy file, for all records: which may share a table is the report's choice."""
    rows: dict[str, list[Record]] = {name: [] for name in COLUMNS}
    for record in records:
        common = _common(record)
        measure = RECORDED[record["config"]["measure"]]
        origin = {"engine_digest": record["provenance"]["engine_digest"]}
        for row in () if failed_as_a_whole(record) else measure.table(record):
            rows[measure.name].append(common | origin | row)
        if measure.plan == "suites":
            continue
        rows["runs"] += [common | row for row in _run_rows(record)]
        rows["epochs"] += [common | epoch for epoch in _epochs(record)]
        for step, loss in enumerate(record.get("step_losses", ()), start=1):
            shortened = None if loss is None else float(f"{loss:.9g}")  # as exact as a float32
            rows["steps"].append(common | {"step": step, "loss": shortened})
    return rows


def _common(record: Record) -> Record:
    config, provenance = record["config"], record["provenance"]
    names = ("paper", "engine", "label", "seed", "measure", "threads", "dtype", "profile")
    return {
        "key": record["key"],
        "job": record["job"],
        **{name: config[name] for name in names},
        "data_source": record["data"]["source"],
        "dataset_digest": record["data"]["digest"],
        **{name: provenance[name] for name in ("commit", "dirty", "cpu_model", "created")},
        "machine": provenance["machine"]["label"],
    }


def _run_rows(record: Record) -> Iterator[Record]:
    """One row for a run; one for each engine of a race."""
    entrants = record.get("entrants")
    if entrants is None:
        digest = record["provenance"]["engine_digest"]
        yield _run_row(record, record["config"]["engine"], record["status"], record.get("error"), digest)
    for engine, entrant in (entrants or {}).items():
        error = entrant["error"] or (record.get("error") if failed_as_a_whole(record) else None)
        row = _run_row(record, engine, "failed" if error else "ok", error, entrant["engine_digest"])
        yield row | {"engine": engine, "label": entrant["label"], "framework_version": _versions(entrant["versions"])}


def failed_as_a_whole(record: Record) -> bool:
    """Whether a run of several engines failed, and not some of them, so that none of its numbers counts.

    Older records name no engine then; newer ones all.
    """
    if RECORDED[record["config"]["measure"]].plan != "together" or record["status"] == "ok":
        return False
    errors = [entrant["error"] for entrant in record.get("entrants", {}).values()]
    return all(errors) or not any(errors)


def _run_row(record: Record, engine: str, status: str, error: str | None, engine_digest: str) -> Record:
    provenance, startup = record["provenance"], record.get("startup", {})
    epochs = _epochs(record)
    last: Record = epochs[-1] if epochs else {}
    seconds = [epoch["seconds"] for epoch in epochs if epoch.get("seconds") is not None]
    evaluated = [epoch.get("seconds_with_evaluation") for epoch in epochs]
    allocated = [epoch["bytes_allocated"] for epoch in epochs if epoch.get("bytes_allocated") is not None]
    return {
        "status": status,
        "error": error,
        "import_seconds": startup.get("import_seconds"),
        "build_seconds": startup.get("build_seconds"),
        "first_epoch_seconds": seconds[0] if seconds else None,
        "later_epoch_seconds": _mean(seconds[1:]),
        "total_seconds": sum(seconds) if seconds else None,
        "total_seconds_with_evaluation": sum(evaluated) if evaluated and None not in evaluated else None,
        **{name: last.get(name) for name in ("train_accuracy", "test_accuracy", "test_loss")},
        "bytes_first_epoch": allocated[0] if allocated else None,
        "bytes_later_epochs": _mean(allocated[1:]),
        "peak_rss_bytes": record.get("peak_rss_bytes"),
        "framework_version": _versions(provenance["versions"]),
        "engine_digest": engine_digest,
        "training_digest": _training_digest(record),
        "blas": record["blas"].get(engine, ""),
        "python": provenance["python"],
        "others_share": provenance.get("others_share"),
    }


def _training_digest(record: Record) -> str | None:
    """A hash over the data, the network and how it is trained; None where an older record does not say."""
    asked = record.get("asked", {})
    names = ("data", "network", "training")
    return key_of({name: asked[name] for name in names}) if set(names) <= asked.keys() else None


def _versions(versions: Mapping[str, str]) -> str:
    return " ".join(f"{name} {version}" for name, version in versions.items())


def _epochs(record: Record) -> list[Record]:
    """The epochs, the first with the seconds of `build` added to its own."""
    build = record.get("startup", {}).get("build_seconds") or 0.0
    epochs = [dict(epoch) for epoch in record.get("epochs", ())]
    for name in ("seconds", "seconds_with_evaluation"):
        if epochs and epochs[0].get(name) is not None:
            epochs[0][name] += build
    return epochs


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _read(path: Path, packed: bytes | None = None) -> Record | None:
    """The record in a file, or in these bytes of an archive; None for one of a later release.

    Damaged ones were set aside when the folder was locked.
    """
    try:
        return records.read(path, _schemas()) if packed is None else records.parse(packed, path.stem, _schemas())
    except records.DamagedError as error:
        raise ResultsError(f"{path} is damaged: {error}; run again, which sets it aside") from None


def _schemas() -> range:
    """Those that are known; records of others belong to later releases."""
    return range(1, SCHEMA + 1)


def _of_schema(record: Record | None) -> Record | None:
    """The record if it is of the schema that is written today."""
    return record if record and record.get("schema") == SCHEMA else None


def _is_older(record: Record | None) -> bool:
    schema = record.get("schema") if record else None
    return isinstance(schema, int) and not isinstance(schema, bool) and 1 <= schema < SCHEMA


def _as_current(record: Record) -> Record:
    """A record of an older schema with what today's tidy tables ask for: empty where it was not recorded.

    Schema 1 knew one BLAS for all engines of a run, no job, and of the machine the name of its CPU.
    """
    provenance, config = record["provenance"], record["config"]
    entrants = {name: {"versions": {}} | entrant for name, entrant in record.get("entrants", {}).items()}
    upgraded = {
        "job": "",
        "blas": {name: provenance.get("blas", "") for name in entrants or [config["engine"]]},
        **record,
        "provenance": {"machine": {"label": provenance["cpu_model"]}, **provenance},
    }
    return upgraded | ({"entrants": entrants} if entrants else {})


@lru_cache(maxsize=10_000)
def _summary(path: Path, _mtime: int) -> tuple[str, str, str] | None:
    """Whether a run finished, its job and its sources; None for a record without them."""
    record = _of_schema(_read(path))
    if record is None:
        return None
    return record["status"], record["job"], str(record.get("decided_by", {}).get("sources"))


@lru_cache(maxsize=1)
def _unpacked(path: Path, _mtime: int, _size: int) -> dict[str, bytes]:
    return archive.read(path)


def _csv(columns: tuple[str, ...], rows: list[Record]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


# -----------------------------------------------------------------------------------------------------------
# Reading tidy


@dataclass(frozen=True)
class Tidy:
    """The tidy CSVs of a results folder as data frames, with the columns that `COLUMNS` lists."""

    root: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    steps: pd.DataFrame
    tables: Mapping[str, pd.DataFrame]
    """Those of measures, by their names."""

    @classmethod
    def load(cls, results_dir: str | Path) -> Tidy:
        """Read `<results_dir>/tidy`; a file that results of an earlier release lack is an empty frame.

        Raises ResultsError when there is no such folder, another file is missing or one lacks a column.
        """
        import pandas as pd

        root = Path(results_dir)
        if not (root / "tidy").is_dir():
            raise ResultsError(f"no results in {root}: nothing has been run into it; start with `twingrad run`")
        frames = {}
        for name, columns in COLUMNS.items():
            path = root / "tidy" / f"{name}.csv"
            if not os.path.lexists(path) and os.path.lexists(f"{path}.xz"):  # as a large table is committed
                path = Path(f"{path}.xz")
            if not os.path.lexists(path) and name in LATER_FILES:
                frames[name] = pd.DataFrame(columns=list(columns))
                continue
            if not os.path.lexists(path):
                raise ResultsError(f"no {path}: nothing has been run into {root} yet; start with `twingrad run`")
            try:
                frame = records.read_table(path, columns, LATER_COLUMNS)
            except records.DamagedError as error:
                raise TidyError(path, str(error)) from None
            for column in LATER_COLUMNS:
                if column in columns and column not in frame.columns:
                    frame[column] = None
            if "machine" in columns:
                known = frame["machine"].astype(object)
                frame["machine"] = known.where(known.notna(), frame["cpu_model"])
            frames[name] = frame
        runs, epochs, steps = (frames.pop(name) for name in ("runs", "epochs", "steps"))
        return cls(root, runs, epochs, steps, frames)
