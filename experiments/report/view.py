"""What one report may show together: the rows of one paper, one dataset, one profile, one state of each engine.

A results folder holds everything that was ever run in it. The newest run of a paper decides which data (real or sample)
and which profile is reported, and that of each measure how many threads; of each engine only the runs of its newest
source are taken; older rows are left out and counted. Machines are never chosen between: rows of two CPU models in one
table are an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bridge import engine as engines
from bridge.errors import TwinGradError
from experiments.data import SAMPLE_LABEL
from experiments.microbenchmarks import registry
from experiments.papers import PROFILES, Paper, Runs
from experiments.results import Tidy

MEASURE_NAMES = {
    "time": "time and accuracy",
    "own": "accuracy from its own initialisation",
    "variants": "variants of the network",
    "memory": "bytes allocated and peak memory",
    "race": "race",
    "scaling": "scaling",
    "ablation": "ablation",
    "microbenchmarks": "micro-benchmarks",
}
"""The measures in words."""

TRAINED = ("time", "memory", "own")
"""The measures that train one engine per run, with its epochs in a file of all; a race has many engines in one run."""

FRAMES = ("race", "scaling", "ablation", "variants")
"""The measures with a tidy file of their own."""


class ReportError(TwinGradError):
    """A report that cannot be made from these results; the message says what to change."""


class MixedMachinesError(ReportError):
    """Rows of two machines would stand in one table."""


@dataclass(frozen=True)
class View:
    """The rows of one paper that belong together. `data_source` and `profile` are None when nothing was run."""

    paper: Paper
    data_source: str | None
    profile: str | None
    runs: pd.DataFrame
    epochs: pd.DataFrame
    steps: pd.DataFrame
    race: pd.DataFrame
    scaling: pd.DataFrame
    ablation: pd.DataFrame
    variants: pd.DataFrame
    microbenchmarks: pd.DataFrame
    left_out: int = 0
    outdated: frozenset[tuple[str, str]] = frozenset()
    """(engine, measure) whose runs were made with an older source of the engine."""
    data_dir: Path | None = None
    """Where to look for the dataset itself, which only its example pictures need."""

    @property
    def notice(self) -> str | None:
        """What every output must say about its data, or None for the real dataset."""
        return f"{SAMPLE_LABEL}, not {self.paper.dataset.upper()}" if self.data_source == "sample" else None

    def engines(self) -> list[str]:
        """The engines of the paper's file in its order but for absent ones, then any others that were run."""
        names, absent = self.paper.engine_names(), self.absent()
        trained = self.runs[self.runs["measure"].isin(TRAINED)]
        found = [*trained["engine"], *(engine for name in FRAMES for engine in getattr(self, name)["engine"])]
        return [name for name in names if name not in absent] + sorted(set(found) - set(names))

    def absent(self) -> dict[str, str]:
        """The optional engines of the paper's file that nothing was measured of, with the reason."""
        done = self.runs[self.runs["measure"].isin(TRAINED) & (self.runs["status"] == "ok")]
        measured = {*done["engine"], *(engine for name in FRAMES for engine in getattr(self, name)["engine"])}
        return {
            row.name: next(filter(None, (self.why_missing(row.name, one) for one in (*TRAINED, *FRAMES))), "not run")
            for row in self.paper.engines
            if row.optional and row.name not in measured
        }

    def label(self, engine: str) -> str:
        """The engine's name as its adapter gives it, or its registry name when it never ran."""
        for frame in (self.runs, *(getattr(self, name) for name in FRAMES), self.microbenchmarks):
            labels = frame.loc[frame["engine"] == engine, "label"].dropna()
            if len(labels):
                return str(labels.iloc[-1])
        known = engines.ENGINES | registry.SYSTEMS
        return known[engine].label if engine in known else engine

    def ok(self, measure: str, engine: str | None = None) -> pd.DataFrame:
        """The finished runs of a measure, of all engines or of one; refuses to mix machines."""
        runs = self.runs[(self.runs["measure"] == measure) & (self.runs["status"] == "ok")]
        one_machine(runs["machine"], f"the {MEASURE_NAMES.get(measure, measure)} runs of {self.paper.key}")
        return runs if engine is None else runs[runs["engine"] == engine]

    def epochs_of(self, measure: str, engine: str) -> pd.DataFrame:
        """The epochs of the finished runs of a measure and an engine."""
        return self.epochs[self.epochs["key"].isin(self.ok(measure, engine)["key"])]

    def machine(self, measures: Iterable[str] = TRAINED) -> str:
        """The CPU model of the finished runs of these measures ("" when there are none)."""
        names = [self.ok(measure)["machine"] for measure in measures if measure in TRAINED]
        names += [getattr(self, measure)["machine"] for measure in measures if measure in FRAMES]
        return one_machine(pd.concat(names), f"the runs of {self.paper.key}") if names else ""

    def planned(self, engine: str, measure: str) -> int:
        """How many seeds the paper's file plans for an engine and a measure in the reported profile."""
        runs = self.planned_runs()
        few = runs.engines.value if runs.engines else self.paper.engine_names()
        among = runs.engines_of(measure)
        if engine not in few or measure not in runs.measures.value or (among is not None and engine not in among):
            return 0
        if measure == "own" and engine not in self.paper.own:
            return 0
        return 1 if measure in ("race", "scaling", "ablation") else runs.seed_count(engine, measure)

    def planned_runs(self) -> Runs:
        """What the paper's file plans in the reported profile; the full one when nothing was run."""
        return self.paper.runs_of(self.profile if self.profile in PROFILES else "full")

    def why_missing(self, engine: str, measure: str) -> str | None:
        """Why an engine has no row, or fewer seeds than planned; None when nothing is missing."""
        if measure == "microbenchmarks":
            return self._why_no_system(engine)
        runs = self.runs[self.runs["measure"] == measure]
        if measure == "race":  # one run with many engines, whose error names those that failed
            named = runs["error"].astype(str).str.contains(f"{engine}: ", regex=False)
            failed = runs[(runs["status"] != "ok") & (named | (runs["engine"] == engine))]
        else:
            runs = runs[runs["engine"] == engine]
            failed = runs[runs["status"] != "ok"]
        wanted = self.planned(engine, measure)
        if measure in FRAMES:
            frame = getattr(self, measure)
            rows = frame[frame["engine"] == engine]
            done = rows["seed"].nunique() if measure == "variants" else int(len(rows) > 0)
        else:
            done = len(runs) - len(failed)
        if done >= wanted and (done or not len(failed)):
            return None
        how = "not run since the engine's source changed" if (engine, measure) in self.outdated else "not run"
        if len(failed):
            error = str(failed["error"].iloc[-1])
            error = error.partition(f"{engine}: ")[2] or error if measure == "race" else error
            how = f"failed: {error.strip().partition(chr(10))[0] or 'no message was recorded'}"
        return f"{wanted - done} of {wanted} seeds {how}" if done else how

    def _why_no_system(self, name: str) -> str | None:
        """Why a system of the micro-benchmarks has no number at all."""
        rows = self.microbenchmarks[self.microbenchmarks["engine"] == name]
        if rows["missing"].isna().any():
            return None
        return str(rows["missing"].iloc[-1]).partition("\n")[0] if len(rows) else "not run"


def paper_view(paper: Paper, tidy: Tidy, data_dir: Path | None = None) -> View:
    """Choose the rows of `paper` that may stand together."""
    runs = _of(tidy.runs, paper)
    race, scaling, ablation, variants = (_of(getattr(tidy, name), paper) for name in FRAMES)
    trained = runs[runs["measure"].isin(TRAINED)]
    # A race started by hand does not change which profile is reported, so trainings come first.
    newest = next((_newest(frame) for frame in (trained, runs, race, scaling, ablation, variants) if len(frame)), None)
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
    race, scaling, ablation, variants = (
        frame[frame["data_source"] == data_source] for frame in (race, scaling, ablation, variants)
    )
    ablation, variants = (frame[frame["profile"] == profile] for frame in (ablation, variants))
    return View(
        paper=paper,
        data_source=data_source,
        profile=profile,
        runs=pd.concat([kept, others]),
        epochs=_with_keys(_of(tidy.epochs, paper), kept),
        steps=_with_keys(_of(tidy.steps, paper), kept),
        race=_one_race(race, others[others["measure"] == "race"]),
        scaling=_newest_of_each(scaling),
        ablation=_newest_of_each(ablation),
        variants=_newest_variants(variants),
        microbenchmarks=_suites(tidy.microbenchmarks[tidy.microbenchmarks["paper"] == paper.key]),
        left_out=len(trained) - len(kept),
        outdated=_pairs(comparable) - _pairs(kept),
        data_dir=data_dir,
    )


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
            "report each machine from a results folder of its own (--results DIR)"
        )
    return str(counts.index[0]) if len(counts) else ""


def _of(frame: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    return frame[frame["paper"] == (paper.runs_of_paper or paper.key)]


def _with_keys(frame: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["key"].isin(runs["key"])]


def _newest(frame: pd.DataFrame) -> pd.Series:
    return frame.sort_values("created", kind="stable").iloc[-1]


def _pairs(runs: pd.DataFrame) -> frozenset[tuple[str, str]]:
    return frozenset(zip(runs["engine"], runs["measure"], strict=True))


def _newest_state(runs: pd.DataFrame) -> pd.DataFrame:
    """Per engine only the runs of its newest source, and of each configuration only the newest run.

    Runs from a system image of Julia give way to those without one: their first epochs are not the same quantity.
    """
    runs = runs.sort_values("created", kind="stable")
    if len(runs):
        newest = runs.groupby("engine")["engine_digest"].transform("last")
        runs = runs[runs["engine_digest"].isna() | (runs["engine_digest"] == newest)]
    if len(runs):
        image = with_image(runs)
        whole = image.groupby([runs["engine"], runs["measure"]]).transform("all")
        runs = runs[~image | whole]
    return runs.drop_duplicates(["engine", "seed", "measure", "dtype"], keep="last")


def _one_race(rows: pd.DataFrame, races: pd.DataFrame) -> pd.DataFrame:
    """Of each number of threads one race, since rounds of two races must not be paired with each other.

    It is the one with the most engines, among equals the newest; a race with the older source of an engine that has
    raced again since does not count.
    """
    races = races.sort_values("created", kind="stable")
    digests = {
        race["key"]: dict(zip(str(race["engine"]).split(","), str(race["engine_digest"]).split(), strict=False))
        for _, race in races.iterrows()
    }
    newest = {engine: digest for found in digests.values() for engine, digest in found.items()}
    stale = {key for key, found in digests.items() if any(newest[engine] != found[engine] for engine in found)}
    rows = rows[~rows["key"].isin(stale)]
    chosen = []
    for _, part in rows.groupby("threads"):
        entrants = part.groupby("key").agg(engines=("engine", "nunique"), created=("created", "max"))
        chosen.append(entrants.sort_values(["engines", "created"], kind="stable").index[-1])
    return rows[rows["key"].isin(chosen)].sort_values(["threads", "round"], kind="stable")


def _newest_of_each(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each engine the newest run, whole: points of two runs do not make one line."""
    if not len(rows):
        return rows
    newest = rows.groupby("engine")["created"].transform("max")
    return rows[rows["created"] == newest]


def _newest_variants(rows: pd.DataFrame) -> pd.DataFrame:
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
