"""What one report may show together: the rows of one paper, one dataset, one profile, one state of each engine.

A results folder holds everything that was ever run in it. The newest run of a paper decides which data (real or sample)
and which profile is reported, and that of each measure how many threads; of each engine only the runs of its newest
source are taken; older rows are left out and counted. Rows of two machines in one table are an error: results of
several machines have a view for each (`views_of`), with the times of that machine and the accuracies of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pandas as pd

from bridge import registry as engines
from bridge.errors import TwinGradError
from experiments.data import SAMPLE_LABEL
from experiments.formats import counted
from experiments.measures.registry import MEASURES, RECORDED, TABLES, TRAINED, WORDS
from experiments.microbenchmarks import measure as micro
from experiments.microbenchmarks import registry
from experiments.papers import PROFILES, Paper, ProfileName, Runs
from experiments.results import Tidy

RETIRED = ("manual", "manual-julia")
"""Engines that are no more: the rows of older results that have them are kept there, and not shown."""


class ReportError(TwinGradError):
    """A report that cannot be made from these results; the message says what to change."""


class MixedMachinesError(ReportError):
    """Rows of two machines would be in one table."""


Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(method: Method) -> Method:
    """A function of a `View` that looks its answers up: a report asks for the same ones hundreds of times."""

    @functools.wraps(method)
    def asked(view: View, *args: Any) -> Any:
        key = (method, *args)
        if key not in view.answers:
            view.answers[key] = method(view, *args)
        return view.answers[key]

    return cast(Method, asked)


@dataclass(frozen=True)
class View:
    """The rows of one paper that belong together. `data_source` and `profile` are None when nothing was run."""

    paper: Paper
    data_source: str | None
    profile: str | None
    runs: pd.DataFrame
    epochs: pd.DataFrame
    steps: pd.DataFrame
    tables: Mapping[str, pd.DataFrame]
    """The rows of measures with their own tidy file."""
    left_out: int = 0
    outdated: frozenset[tuple[str, str]] = frozenset()
    """(engine, measure) whose runs were made with an older source of the engine."""
    data_dir: Path | None = None
    """Where to look for the dataset itself, which only its example pictures need."""
    retired: tuple[str, ...] = ()
    """The labels of engines that these results have and that are no more."""
    machines: tuple[str, ...] = ()
    """Where results come from several machines, all of them, that of this view first."""
    pooled: pd.DataFrame | None = None
    """Accuracies and losses of all machines: a row for each engine, measure and seed, the mean of its machines."""
    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What its methods, and other functions of it, have found, which nobody may change."""

    @property
    def notice(self) -> str | None:
        """What every output must say about its data, or None for the real dataset."""
        return f"{SAMPLE_LABEL}, not {self.paper.dataset.upper()}" if self.data_source == "sample" else None

    @remembered
    def table(self, measure: str, engine: str | None = None) -> pd.DataFrame:
        """The rows of a measure with its own tidy file, of all engines or of one; refuses to mix machines."""
        rows = self.tables[measure]
        one_machine(rows["machine"], f"the {WORDS[measure]} runs of {self.paper.key}")
        return rows if engine is None else rows[rows["engine"] == engine]

    @remembered
    def engines(self) -> list[str]:
        """The engines of the paper's file in its order but for absent ones, then any others that were run."""
        names, absent = self.paper.engine_names(), self.absent()
        trained = self.runs[self.runs["measure"].isin(TRAINED)]
        found = [*trained["engine"], *(engine for name in TABLES for engine in self.tables[name]["engine"])]
        return [name for name in names if name not in absent] + sorted(set(found) - set(names))

    @remembered
    def absent(self) -> dict[str, str]:
        """The optional engines of the paper's file that nothing was measured of, with the reason."""
        done = self.runs[self.runs["measure"].isin(TRAINED) & (self.runs["status"] == "ok")]
        measured = {*done["engine"], *(engine for name in TABLES for engine in self.tables[name]["engine"])}
        return {
            row.name: next(filter(None, (self.why_missing(row.name, one) for one in (*TRAINED, *TABLES))), "not run")
            for row in self.paper.engines
            if row.optional and row.name not in measured
        }

    @remembered
    def label(self, engine: str) -> str:
        """The engine's name as its adapter gives it, or its registry name when it never ran."""
        for frame in (self.runs, *self.tables.values()):
            labels = frame.loc[frame["engine"] == engine, "label"].dropna()
            if len(labels):
                return str(labels.iloc[-1])
        known = engines.ENGINES | registry.SYSTEMS
        return known[engine].label if engine in known else engine

    @remembered
    def ok(self, measure: str, engine: str | None = None) -> pd.DataFrame:
        """The finished runs of a measure that are shown, of all engines or of one; refuses to mix machines."""
        runs = self.runs[(self.runs["measure"] == measure) & (self.runs["status"] == "ok")]
        if measure in TABLES:
            runs = runs[runs["key"].isin(self.tables[measure]["key"])]
        one_machine(runs["machine"], f"the {WORDS[measure]} runs of {self.paper.key}")
        return runs if engine is None else runs[runs["engine"] == engine]

    @remembered
    def epochs_of(self, measure: str, engine: str) -> pd.DataFrame:
        """The epochs of the finished runs of a measure and an engine."""
        return self.epochs[self.epochs["key"].isin(self.ok(measure, engine)["key"])]

    def machine(self, measures: Iterable[str] = TRAINED) -> str:
        """The CPU model of the finished runs of these measures ("" when there are none)."""
        return self._machine(*measures)

    @remembered
    def _machine(self, *measures: str) -> str:
        names = [self.ok(measure)["machine"] for measure in measures if measure in TRAINED]
        names += [self.table(measure)["machine"] for measure in measures if measure in TABLES]
        return one_machine(pd.concat(names), f"the runs of {self.paper.key}") if names else ""

    def planned(self, engine: str, measure: str) -> int:
        """How many seeds the paper's file plans for an engine and a measure in the reported profile."""
        runs, kind = self.planned_runs(), MEASURES[measure]
        few, among = runs.option("engines") or self.paper.engine_names(), runs.engines_of(kind)
        if engine not in few or measure not in runs.measures.value or (among is not None and engine not in among):
            return 0
        return self.paper.seeds_of(self._profile, kind, engine) if kind.plan == "seeds" else 1

    @property
    def _profile(self) -> ProfileName:
        """The reported profile; the full one when nothing was run."""
        return next((name for name in PROFILES if name == self.profile), "full")

    def planned_runs(self) -> Runs:
        """What the paper's file plans in the reported profile; the full one when nothing was run."""
        return self.paper.runs_of(self._profile)

    @remembered
    def _runs_of(self, measure: str) -> pd.DataFrame:
        """The runs of a measure, failed ones included."""
        return self.runs[self.runs["measure"] == measure]

    @remembered
    def why_missing(self, engine: str, measure: str) -> str | None:
        """Why an engine has no row, or fewer seeds than planned; None when nothing is missing."""
        kind = RECORDED[measure]
        if kind.plan == "suites":
            return self._why_no_system(engine)
        runs = self._runs_of(measure)
        if kind.plan == "together":  # one run with many engines, whose error names those that failed
            named = runs["error"].astype(str).str.contains(f"{engine}: ", regex=False)
            failed = runs[(runs["status"] != "ok") & (named | (runs["engine"] == engine))]
        else:
            runs = runs[runs["engine"] == engine]
            failed = runs[runs["status"] != "ok"]
        wanted = self.planned(engine, measure)
        if kind.columns:
            rows = self.tables[measure]
            rows = rows[rows["engine"] == engine]
            done = rows["seed"].nunique() if kind.plan == "seeds" else int(len(rows) > 0)
        else:
            done = len(runs) - len(failed)
        if done >= wanted and (done or not len(failed)):
            if not kind.columns:
                return None
            return (
                "; ".join(filter(None, (self._failing(engine, measure), self._without_rows(measure, engine)))) or None
            )
        how = "not run since the engine's source changed" if (engine, measure) in self.outdated else "not run"
        if len(failed):
            error = str(failed["error"].iloc[-1])
            error = error.partition(f"{engine}: ")[2] or error if kind.plan == "together" else error
            how = f"failed: {error.strip().partition(chr(10))[0] or 'no message was recorded'}"
        return f"{wanted - done} of {wanted} seeds {how}" if done else how

    def _failing(self, engine: str, measure: str) -> str | None:
        """How many of a measure's runs, of each job the newest, failed for an engine, and why the last one did."""
        runs = self._runs_of(measure)
        runs = runs[runs["engine"] == engine]
        if (runs["status"] == "ok").all():
            return None
        jobs = runs["job"].where(runs["job"].fillna("") != "", runs["key"])  # the oldest records have none
        newest = runs.assign(job=jobs).sort_values("created", kind="stable").drop_duplicates("job", keep="last")
        others = tuple(f"{name}: " for name in self.paper.engine_names() if name != engine)
        failed = newest[(newest["status"] != "ok") & ~newest["error"].astype(str).str.startswith(others)]
        if not len(failed):
            return None
        error = str(failed["error"].iloc[-1]).strip().partition("\n")[0]
        return f"{len(failed)} of {len(newest)} runs failed: {error or 'no message was recorded'}"

    def _without_rows(self, measure: str, engine: str) -> str | None:
        """Which of the planned networks of a measure have no row: of an engine, or of any that it is run together with.

        With fewer cores than planned threads, or when asked for by hand, no row has as many: those are not missed.
        """
        kind, runs, rows = MEASURES[measure], self.planned_runs(), self.tables[measure]
        planned = kind.networks(self.paper, runs) if kind.plan != "seeds" else ("",)
        if kind.plan == "engines":
            rows = rows[rows["engine"] == engine]
        if list(planned) == [""] or not len(rows):
            return None
        named = rows["network"] if "network" in rows else rows["family"] + "-" + rows["size"].map(whole)
        done, most = set(zip(named, rows["threads"], strict=True)), rows["threads"].max()
        numbers = runs.option(kind.threads) if kind.plan == "together" else None
        missed = []
        for threads in dict.fromkeys(min(number, most) for number in numbers or [most]):
            names = [name for name in planned if (name, threads) not in done]
            if names:
                which = ", ".join(names) if len(names) < len(planned) else f"all {len(names)} networks"
                missed.append(f"{which} with {counted(threads, 'thread')}")
        return f"no row of {'; '.join(missed)}" if missed else None

    def _why_no_system(self, name: str) -> str | None:
        """Why a system of the micro-benchmarks has no number at all."""
        rows = self.tables["microbenchmarks"]
        rows = rows[rows["engine"] == name]
        if rows["missing"].isna().any():
            return None
        return str(rows["missing"].iloc[-1]).partition("\n")[0] if len(rows) else "not run"


def paper_view(paper: Paper, tidy: Tidy, data_dir: Path | None = None) -> View:
    """The rows of `paper` that may be shown together."""
    found = {"runs": _of(tidy.runs, paper)} | {name: _of(tidy.tables[name], paper) for name in TABLES}
    old = [frame.loc[frame["engine"].isin(RETIRED), "label"].dropna() for frame in found.values()]
    found = {name: frame[~frame["engine"].isin(RETIRED)] for name, frame in found.items()}
    runs, tables = found.pop("runs"), found
    trained = runs[runs["measure"].isin(TRAINED)]
    # A race started by hand does not change which profile is reported, so trainings come first.
    newest = next((_newest(frame) for frame in (trained, runs, *tables.values()) if len(frame)), None)
    data_source = str(newest["data_source"]) if newest is not None else None
    profile = str(newest["profile"]) if newest is not None and "profile" in newest else None
    kept = trained
    for name in ("data_source", "profile"):
        if len(trained):
            kept = kept[kept[name] == _newest(trained)[name]]
    for measure in TRAINED:  # each has its number of threads
        of_measure = kept["measure"] == measure
        if of_measure.any():
            kept = kept[~of_measure | (kept["threads"] == _newest(kept[of_measure])["threads"])]
    comparable = kept
    kept = _newest_state(kept)
    others = runs[~runs["measure"].isin(TRAINED) & (runs["data_source"] == data_source)]
    for name, frame in tables.items():
        tables[name] = _of_profile(frame[frame["data_source"] == data_source], runs, profile)
    small = tidy.tables[micro.MEASURE.name]
    return View(
        paper=paper,
        data_source=data_source,
        profile=profile,
        runs=pd.concat([kept, others]),
        epochs=_with_keys(_of(tidy.epochs, paper), kept),
        steps=_with_keys(_of(tidy.steps, paper), kept),
        tables={
            name: _CHOSEN[MEASURES[name].plan](rows, others[others["measure"] == name]) for name, rows in tables.items()
        }
        | {micro.MEASURE.name: _suites(small[small["paper"] == paper.key])},
        left_out=len(trained) - len(kept),
        outdated=_pairs(comparable) - _pairs(kept),
        data_dir=data_dir,
        retired=tuple(dict.fromkeys(map(str, pd.concat(old)))),
    )


POOLED = ("train_accuracy", "test_accuracy", "test_loss")
"""What does not depend on a machine but for rounding."""


def views_of(paper: Paper, tidy: Tidy, data_dir: Path | None = None) -> list[View]:
    """The rows of `paper` that may be shown together: a view for each machine, the one with most rows first.

    Their accuracies and losses are those of all machines. None where nothing of the paper was run; the newest run
    decides for all machines which data, profile and sources of the engines are shown.
    """
    whole = paper_view(paper, tidy, data_dir)
    trained = whole.runs[whole.runs["measure"].isin(TRAINED)]
    tables = _of_all_machines(paper, tidy, whole)
    frames = [frame for frame in tables.values() if len(frame)]
    small = whole.tables[micro.MEASURE.name]
    counts = pd.concat([frame["machine"] for frame in (trained, small, *frames)]).value_counts()
    machines = sorted(counts.index, key=lambda name: (-counts[name], str(name)))
    if len(machines) < 2:
        return [whole] if machines or len(whole.runs) else []
    runs = tidy.runs
    if len(trained):
        of_paper = (runs["paper"] == (paper.runs_of_paper or paper.key)) & runs["measure"].isin(TRAINED)
        states = runs["engine"] + " " + runs["engine_digest"].fillna("")
        shown = states.isin(trained["engine"] + " " + trained["engine_digest"].fillna(""))
        same = (runs["profile"] == whole.profile) & (runs["data_source"] == whole.data_source)
        runs = runs[~of_paper | (shown & same)]
    views = [
        paper_view(paper, _on(machine, replace(tidy, runs=runs, tables={**tidy.tables, **tables})), data_dir)
        for machine in machines
    ]  # fmt: skip
    views = [view for view in views if (view.data_source, view.profile) == (whole.data_source, whole.profile)]
    found = pd.concat([view.runs[view.runs["status"] == "ok"] for view in views])
    pooled = found.groupby(["engine", "measure", "seed"], as_index=False)[list(POOLED)].mean()
    names = [str(machine) for machine in machines]
    return [
        replace(view, pooled=pooled, machines=(name, *(other for other in names if other != name)))
        for view in views
        if (name := view.machine((*TRAINED, *TABLES)))
    ]


def _of_all_machines(paper: Paper, tidy: Tidy, whole: View) -> dict[str, pd.DataFrame]:
    """The rows of measures with their own tidy file that fit those of `whole`, before one of several runs is chosen.

    They are of the same data and profile, and of races of no older source than another machine's.
    """
    runs, found = _of(tidy.runs, paper), {}
    for name in TABLES:
        rows = _of(tidy.tables[name], paper)
        rows = rows[(rows["data_source"] == whole.data_source) & ~rows["engine"].isin(RETIRED)]
        rows = _of_profile(rows, runs, whole.profile)
        if MEASURES[name].plan == "together":
            rows = _current(rows, runs[(runs["measure"] == name) & ~runs["engine"].isin(RETIRED)])
        found[name] = rows
    return found


def _on(machine: str, tidy: Tidy) -> Tidy:
    """The rows that were made on one machine."""
    runs, epochs = (frame[frame["machine"] == machine] for frame in (tidy.runs, tidy.epochs))
    steps = tidy.steps[tidy.steps["key"].isin(runs["key"])]
    tables = {name: frame[frame["machine"] == machine] for name, frame in tidy.tables.items()}
    return Tidy(tidy.root, runs, epochs, steps, tables)


def with_image(runs: pd.DataFrame) -> pd.Series:
    """For each run whether its Julia started from a compiled system image, as its versions say."""
    return runs["framework_version"].astype(str).str.contains(r"(?:^| )sysimage ", regex=True)


def one_machine(machines: Iterable[Any], what: str) -> str:
    """The single machine among the rows; MixedMachinesError when there are several."""
    counts = pd.Series(list(machines), dtype=object).dropna().value_counts()
    if len(counts) > 1:
        found = ", ".join(f"{name} ({count} rows)" for name, count in sorted(counts.items()))
        raise MixedMachinesError(
            f"{what} come from {len(counts)} machines: {found}; a table never mixes machines: "
            "report each machine from a separate results folder (--results DIR)"
        )
    return str(counts.index[0]) if len(counts) else ""


def _of(frame: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    return frame[frame["paper"] == (paper.runs_of_paper or paper.key)]


def _of_profile(rows: pd.DataFrame, runs: pd.DataFrame, profile: str | None) -> pd.DataFrame:
    """The rows of runs of a profile; all of a table without that column where none was run in it, such as by hand."""
    if "profile" in rows:
        return rows[rows["profile"] == profile]
    fitting = rows[rows["key"].isin(runs.loc[runs["profile"] == profile, "key"])]
    return fitting if len(fitting) else rows


def _with_keys(frame: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["key"].isin(runs["key"])]


def _newest(frame: pd.DataFrame) -> pd.Series:
    return frame.sort_values("created", kind="stable").iloc[-1]


def _pairs(runs: pd.DataFrame) -> frozenset[tuple[str, str]]:
    return frozenset(zip(runs["engine"], runs["measure"], strict=True))


def _newest_state(runs: pd.DataFrame) -> pd.DataFrame:
    """Per engine only the runs of its newest source and settings, and of each configuration only the newest run.

    Runs from a system image of Julia give way to those without one: their first epochs are not the same quantity.
    """
    runs = runs.sort_values("created", kind="stable")
    if len(runs):
        newest = runs.groupby("engine")["engine_digest"].transform("last")
        runs = runs[runs["engine_digest"].isna() | (runs["engine_digest"] == newest)]
    # A paper's file may have been changed between two runs, or a framework; of a system image see below.
    for name in ("training_digest", "dtype", "framework_version"):
        if len(runs):
            asked = runs[name].fillna("").astype(str).str.replace(r"(?:^| )sysimage \S+", "", regex=True)
            runs = runs[asked == asked.groupby([runs["engine"], runs["measure"]]).transform("last")]
    if len(runs):
        image = with_image(runs)
        whole = image.groupby([runs["engine"], runs["measure"]]).transform("all")
        runs = runs[~image | whole]
    return runs.drop_duplicates(["engine", "seed", "measure"], keep="last")


def _current(rows: pd.DataFrame, races: pd.DataFrame) -> pd.DataFrame:
    """The rows of races that have no older source of an engine that has raced again since."""
    races = races.sort_values("created", kind="stable")
    digests: dict[str, dict[str, str]] = {}
    for _, entrant in races.iterrows():
        digests.setdefault(entrant["key"], {})[entrant["engine"]] = entrant["engine_digest"]
    newest = {engine: digest for found in digests.values() for engine, digest in found.items()}
    stale = {key for key, found in digests.items() if any(newest[engine] != found[engine] for engine in found)}
    return rows[~rows["key"].isin(stale)]


def whole(number: float) -> str:
    """The name of a size, which is a whole number."""
    return str(int(number))


def _network(rows: pd.DataFrame) -> list[str]:
    """The columns that say which of several networks a row is about."""
    return [name for name in ("family", "size", "network") if name in rows]


def _one_race(rows: pd.DataFrame, races: pd.DataFrame) -> pd.DataFrame:
    """Of each network and number of threads one race, since rounds of two races must not be paired with each other.

    It is the one with the most engines, among equals the newest; a race with the older source of an engine that has
    raced again since does not count.
    """
    rows = _current(rows, races)
    chosen = []
    for _, part in rows.groupby(["threads", *_network(rows)]):
        entrants = part.groupby("key").agg(engines=("engine", "nunique"), created=("created", "max"))
        chosen.append(entrants.sort_values(["engines", "created"], kind="stable").index[-1])
    return rows[rows["key"].isin(chosen)].sort_values(["threads", "round"], kind="stable")


def _newest_of_each(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Of each engine, and network, the newest run, whole: points of two runs do not make one line.

    All have the number of threads of the newest one, and each engine its newest source.
    """
    if not len(rows):
        return rows
    rows = rows[rows["threads"] == _newest(rows)["threads"]]
    digests = rows["key"].map(runs.drop_duplicates("key").set_index("key")["engine_digest"])
    in_order = rows.sort_values("created", kind="stable").index
    newest_source = rows["engine"].map(digests[in_order].groupby(rows["engine"][in_order]).last())
    rows = rows[digests.isna() | (digests == newest_source)]
    newest = rows.groupby(["engine", *_network(rows)])["created"].transform("max")
    return rows[rows["created"] == newest]


def _newest_seeds(rows: pd.DataFrame, _: pd.DataFrame) -> pd.DataFrame:
    """Of each engine the runs of its newest source, and of each seed the newest one."""
    if not len(rows):
        return rows
    rows = rows.sort_values("created", kind="stable")
    rows = rows[rows["engine_digest"] == rows.groupby("engine")["engine_digest"].transform("last")]
    return rows[rows["key"] == rows.groupby(["engine", "seed"])["key"].transform("last")]


def _suites(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each suite of micro-benchmarks one run of the newest profile: with most systems, among equals the newest."""
    if not len(rows):
        return rows
    rows = rows[rows["profile"] == _newest(rows)["profile"]]
    chosen = []
    for _, part in rows.groupby("suite"):
        measured = part.assign(there=part["engine"].where(part["missing"].isna()))
        runs = measured.groupby("key").agg(systems=("there", "nunique"), created=("created", "max"))
        chosen.append(runs.sort_values(["systems", "created"], kind="stable").index[-1])
    return rows[rows["key"].isin(chosen)]


_CHOSEN = {"together": _one_race, "engines": _newest_of_each, "seeds": _newest_seeds}
"""The rows of a measure's own table that are shown together, by how it is planned; given its rows and its runs."""
