"""What one report may show together: the rows of one paper, one dataset, one profile, one state of each engine.

A results folder holds everything that was ever run in it. The newest run of a paper decides which data (real or sample)
and which profile is reported; of each engine only the runs of its newest source are taken; older rows are left out and
counted. Machines are never chosen between: rows of two CPU models in one table are an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bridge.errors import TwinGradError
from experiments.config import Paper
from experiments.data import SAMPLE_LABEL
from experiments.results import Tidy

MEASURE_NAMES = {
    "time": "time and accuracy",
    "memory": "bytes allocated and peak memory",
    "race": "race",
    "scaling": "scaling",
}
"""The measures in words."""

TRAINED = ("time", "memory")
"""The measures that train one engine per run; a race has many engines in one run."""


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
    left_out: int = 0
    data_dir: Path | None = None
    """Where to look for the dataset itself, which only its example pictures need."""

    @property
    def notice(self) -> str | None:
        """What every output must say about its data, or None for the real dataset."""
        return f"{SAMPLE_LABEL}, not {self.paper.dataset.upper()}" if self.data_source == "sample" else None

    def engines(self) -> list[str]:
        """The engines of the paper's file in its order, then any others that were run."""
        names = self.paper.engine_names()
        trained = self.runs[self.runs["measure"].isin(TRAINED)]
        found = [*trained["engine"], *self.race["engine"], *self.scaling["engine"]]
        return names + sorted(set(found) - set(names))

    def label(self, engine: str) -> str:
        """The engine's name as its adapter gives it, or its registry name when it never ran."""
        for frame in (self.runs, self.race, self.scaling):
            labels = frame.loc[frame["engine"] == engine, "label"].dropna()
            if len(labels):
                return str(labels.iloc[-1])
        return engine

    def ok(self, measure: str, engine: str | None = None) -> pd.DataFrame:
        """The finished runs of a measure, of all engines or of one; refuses to mix machines."""
        runs = self.runs[(self.runs["measure"] == measure) & (self.runs["status"] == "ok")]
        one_machine(runs["cpu_model"], f"the {MEASURE_NAMES.get(measure, measure)} runs of {self.paper.key}")
        return runs if engine is None else runs[runs["engine"] == engine]

    def epochs_of(self, measure: str, engine: str) -> pd.DataFrame:
        """The epochs of the finished runs of a measure and an engine."""
        return self.epochs[self.epochs["key"].isin(self.ok(measure, engine)["key"])]

    def machine(self, measures: Iterable[str] = TRAINED) -> str:
        """The CPU model of the finished runs of these measures ("" when there are none)."""
        names = [self.ok(measure)["cpu_model"] for measure in measures if measure in TRAINED]
        names += [
            getattr(self, measure)["cpu_model"] for measure in measures if measure in ("race", "scaling")
        ]
        return one_machine(pd.concat(names), f"the runs of {self.paper.key}") if names else ""

    def planned(self, engine: str, measure: str) -> int:
        """How many seeds the paper's file plans for an engine and a measure in the reported profile."""
        if engine not in self.paper.engine_names():
            return 0
        runs = self.paper.runs_of("quick" if self.profile == "quick" else "full")
        if measure not in runs.measures.value:
            return 0
        if measure == "scaling":
            return int(engine in runs.scaling_engines.value)
        return 1 if measure == "race" else runs.seed_count(engine, measure)

    def why_missing(self, engine: str, measure: str) -> str | None:
        """Why an engine has no row, or fewer seeds than planned; None when nothing is missing."""
        runs = self.runs[(self.runs["engine"] == engine) & (self.runs["measure"] == measure)]
        failed = runs[runs["status"] != "ok"]
        if measure in ("race", "scaling"):
            frame = getattr(self, measure)
            done, wanted = int((frame["engine"] == engine).any()), self.planned(engine, measure)
        else:
            done, wanted = len(runs) - len(failed), self.planned(engine, measure)
        if done >= wanted and (done or not len(failed)):
            return None
        how = "not run"
        if len(failed):
            error = str(failed["error"].iloc[-1]).strip().partition("\n")[0] or "no message was recorded"
            how = f"failed: {error}"
        return f"{wanted - done} of {wanted} seeds {how}" if done else how


def view(paper: Paper, tidy: Tidy, data_dir: Path | None = None) -> View:
    """Choose the rows of `paper` that may stand together."""
    runs = _of(tidy.runs, paper)
    race, scaling = _of(tidy.race, paper), _of(tidy.scaling, paper)
    # A race started by hand does not change which profile is reported, so trainings come first.
    data_source, profile = _newest(runs[runs["measure"].isin(TRAINED)], runs, race, scaling)
    everything = len(runs)
    if data_source is not None:
        runs, race, scaling = (frame[frame["data_source"] == data_source] for frame in (runs, race, scaling))
    if profile is not None:
        runs = runs[runs["profile"] == profile]
    runs = _newest_state(runs)
    return View(
        paper=paper,
        data_source=data_source,
        profile=profile,
        runs=runs,
        epochs=_with_keys(_of(tidy.epochs, paper), runs),
        steps=_with_keys(_of(tidy.steps, paper), runs),
        race=_newest_race(race),
        scaling=_newest_scaling(scaling),
        left_out=everything - len(runs),
        data_dir=data_dir,
    )


def one_machine(cpu_models: Iterable[Any], what: str) -> str:
    """The single CPU model among the rows; MixedMachinesError when there are several."""
    counts = pd.Series(list(cpu_models), dtype=object).dropna().value_counts()
    if len(counts) > 1:
        found = ", ".join(f"{name} ({count} rows)" for name, count in sorted(counts.items()))
        raise MixedMachinesError(
            f"{what} come from {len(counts)} machines: {found}; a table never mixes machines: "
            "report each machine from a results folder of its own (--results DIR)"
        )
    return str(counts.index[0]) if len(counts) else ""


def _of(frame: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    return frame[frame["paper"] == paper.key]


def _with_keys(frame: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["key"].isin(runs["key"])]


def _newest(*frames: pd.DataFrame) -> tuple[str | None, str | None]:
    """Data source and profile of the newest row of the first frame that has rows; a race knows no profile."""
    for frame in frames:
        if len(frame):
            row = frame.sort_values("created", kind="stable").iloc[-1]
            return str(row["data_source"]), str(row["profile"]) if "profile" in frame else None
    return None, None


def _newest_state(runs: pd.DataFrame) -> pd.DataFrame:
    """Per engine only the runs of its newest source, and of each configuration only the newest run."""
    runs = runs.sort_values("created", kind="stable")
    if len(runs):
        newest = runs.groupby("engine")["engine_digest"].transform("last")
        runs = runs[runs["engine_digest"].isna() | (runs["engine_digest"] == newest)]
    return runs.drop_duplicates(["engine", "seed", "measure", "threads", "dtype"], keep="last")


def _newest_race(race: pd.DataFrame) -> pd.DataFrame:
    """Of each number of threads the newest race: rounds of two races must not be paired with each other."""
    race = race.sort_values(["created", "round"], kind="stable")
    if not len(race):
        return race
    newest = race.groupby("threads")["created"].transform("max")
    return race[race["created"] == newest]


def _newest_scaling(scaling: pd.DataFrame) -> pd.DataFrame:
    return scaling.drop_duplicates(["engine", "threads", "quantity", "value"], keep="last")
