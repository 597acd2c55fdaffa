"""What the producers of tables share: the registry, rows of measured and reported systems, and their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from bridge import registry as engines
from bridge.libjulia.sysimage import KEEPS_MACHINE_CODE
from experiments.formats import MISSING, counted, fraction, given, significant, size, with_spread
from experiments.measures.registry import TRAINED, WORDS
from experiments.papers import Paper, Reported
from experiments.quantities import BYTES, QUANTITIES
from experiments.report.table import Column, Row, Table, column, empty
from experiments.report.view import View, remembered, with_image

REFERENCE = "torch"
"""The engine that the others are compared with."""

RIVALS = ("tensorflow", "tensorflow-xla", "jax")
"""The other frameworks: a race compares with the best of them, too."""

COMPILING = "torch-compile"
"""The engine whose framework could keep what it compiles for later runs, and is kept from it."""

COPYING = ("tensorflow", "tensorflow-xla", "jax")
"""Engines that train on a copy of the data, made by their framework."""

MEASURED_ONCE = "measured once, not reproducible here"
"""What is said wherever a number is shown that somebody got from the authors' code, and no run of ours can make."""

PARITY_STEPS = 100
PARITY_TOLERANCE = 1e-4
"""Engines agree when no loss of the first 100 steps differs from the reference's by more than this."""

GIB = 2.0**30

Producer = Callable[..., Table]
PRODUCERS: dict[str, Producer] = {}


def producer(function: Producer) -> Producer:
    """Enter a function in PRODUCERS under its own name, which is what paper files call it by."""
    PRODUCERS[function.__name__] = function
    return function


SCALED = {"batch_size": "Batch size", "sequence_length": "Sequence length"}
"""The quantities of the scaling runs in words."""


# ---------------------------------------------------------------------------------------------------------------------
# Quantities that tables, figures and the text share


def loss_differences(view: View, engine: str) -> pd.Series:
    """|loss − reference's loss| by (seed, step) over the first PARITY_STEPS steps; empty without common seeds."""
    loss = _first_losses(view)
    if not {engine, REFERENCE} <= set(loss):
        return pd.Series(dtype=float, index=pd.MultiIndex.from_arrays([[], []], names=["seed", "step"]))
    return (loss[engine] - loss[REFERENCE]).abs().dropna()


@remembered
def _first_losses(view: View) -> pd.DataFrame:
    """The losses of the first PARITY_STEPS steps by (seed, step), a column for each engine."""
    steps = view.steps[view.steps["key"].isin(view.ok("time")["key"]) & (view.steps["step"] <= PARITY_STEPS)]
    return steps.pivot_table(index=["seed", "step"], columns="engine", values="loss", dropna=False)


def scaling_exponent(points: pd.DataFrame) -> float | None:
    """The steepest slope of step time against value between neighbours, both logarithmic; None below two points.

    1 is linear growth. Neighbours closer than a factor of 2 are not compared: noise would decide their slope.
    """
    points = points.groupby("value")["microseconds_per_step"].mean().sort_index()
    values, times = points.index.to_numpy(dtype=float), points.to_numpy(dtype=float)
    slopes = [
        np.log(times[j] / times[i]) / np.log(values[j] / values[i])
        for i, j in zip(range(len(values) - 1), range(1, len(values)), strict=True)
        if values[j] >= 2 * values[i]
    ]
    return float(max(slopes)) if slopes else None


def accuracy_differences(view: View, engine: str) -> pd.Series:
    """|test accuracy − reference's| by seed."""
    accuracy = _accuracies(view)
    if not {engine, REFERENCE} <= set(accuracy):
        return pd.Series(dtype=float)
    return (accuracy[engine] - accuracy[REFERENCE]).abs().dropna()


@remembered
def _accuracies(view: View) -> pd.DataFrame:
    """Test accuracy by seed, a column for each engine."""
    return view.ok("time").pivot_table(index="seed", columns="engine", values="test_accuracy", dropna=False)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def table_of(
    view: View,
    fields: Iterable[str],
    columns: Iterable[Column],
    rows: Iterable[Row],
    notes: Iterable[str],
    *measures: str,
    wide: bool = False,
    only: Iterable[str] | None = None,
) -> Table:
    """A table of measured and reported rows; engines (or those in `only`) that lack one of `measures` are named."""
    common = ("kind", "machine", "data", "engine", "system")
    return Table(
        fields=(*common, *fields, "missing"),
        columns=(column("", "system", align="left"), *columns),
        rows=tuple(rows),
        notes=(
            *notes,
            *(counting_notes(view) if "memory" in measures else ()),
            *(["Accuracies and losses are those of the runs on all machines."] if view.machines else ()),
            *image_notes(view, [measure for measure in measures if measure in TRAINED]),
            *missing_notes(view, measures, only),
        ),
        wide=wide,
    )


@dataclass(frozen=True)
class Cell:
    """A quantity in a table of engines: its field in the CSV, its heading, and what the study reports of it."""

    field: str
    header: str
    quantity: str
    reported: str = ""
    """The reported quantity in the same column."""
    spread: bool = True
    """Whether the standard deviation over the runs is shown beside the mean."""
    extremes: bool = False
    """Whether the CSV has the least and the most, too."""

    def fields(self) -> tuple[str, ...]:
        """The fields of the CSV that it fills."""
        more = ("_sd",) * self.spread + ("_min", "_max") * self.extremes
        return (self.field, *(f"{self.field}{end}" for end in more))

    def measured(self, view: View, engine: str) -> dict[str, Any]:
        """Its fields for an engine."""
        quantity = QUANTITIES[self.quantity]
        if not self.spread:
            return {self.field: quantity.value(view, engine)}
        values = quantity.values(view, engine)
        found = mean_and_spread(self.field, values)
        if self.extremes:
            found |= {f"{self.field}_min": or_none(values.min()), f"{self.field}_max": or_none(values.max())}
        return found

    def column(self) -> Column:
        """How it is printed: by its unit."""
        unit = QUANTITIES[self.quantity].unit
        if unit is BYTES:
            return bytes_column(self.header, self.field, self.reported)
        return (accuracy_column if unit.differences else mean_column)(self.header, self.field, self.reported)


def engine_table(
    view: View,
    measures: tuple[str, ...],
    cells: Sequence[Cell],
    notes: Iterable[str] = (),
    seeds: Literal["", "field", "column"] = "field",
    wide: bool = False,
) -> Table:
    """A table with a row for each engine, and one for each system that the study reports.

    `seeds`: whether their number is a field of the CSV, or a column, too.
    """
    rows: list[Row] = []
    for engine in view.engines():
        row = measured(view, engine, *measures)
        if seeds:
            row["seeds"] = len(view.ok(measures[0], engine))
        for cell in cells:
            row |= cell.measured(view, engine)
        rows.append(row)
    told = dict.fromkeys(cell.reported for cell in cells if cell.reported)
    for reported_row in reported_rows(view.paper, tuple(told)):
        found = {cell.field: _in_units(reported_row, cell.reported) for cell in cells if cell.reported}
        rows.append({**reported_row, **found})
    fields = [*(["seeds"] if seeds else []), *(field for cell in cells for field in cell.fields())]
    columns = [cell.column() for cell in cells]
    shown = [column("seeds", "seeds")] if seeds == "column" else []
    fields += ["words"] if told else []
    return table_of(view, fields, [*shown, *columns], rows, notes, *measures, wide=wide)


def _in_units(row: Row, name: str) -> float | None:
    """A reported value in our units."""
    value = row.get(name)
    return value * GIB if value and name.startswith("gibibytes") else value


def measured(view: View, engine: str, *measures: str) -> dict[str, Any]:
    """The fields that every measured row begins with."""
    machine = view.machine(measures)
    return {
        "kind": "measured",
        "machine": machine,
        "data": view.data_source,
        "engine": engine,
        "system": view.label(engine),
        "group": f"Measured here, {machine}" if machine else "Measured here: nothing yet",
        "missing": "; ".join(
            f"{WORDS[measure]}: {reason}" for measure in measures if (reason := view.why_missing(engine, measure))
        ),
    }


def as_reported(paper: Paper, item: Reported) -> dict[str, Any]:
    """The fields that every reported row begins with; a re-run of the authors' code is neither ours nor the paper's."""
    rerun = item.kind == "rerun"
    machine = item.where if rerun else paper.environment.description
    heading = f"{MEASURED_ONCE[0].upper()}{MEASURED_ONCE[1:]}" if rerun else "Reported by the paper"
    return {
        "kind": "measured once" if rerun else "reported",
        "machine": machine,
        "system": reported_name(item),
        "group": f"{heading}: {machine}",
    }


def reported_name(item: Reported) -> str:
    """How a reported row is called here: a paper's "Own" means nothing beside an engine of ours."""
    name = item.row.partition(",")[0]
    return "The paper's own" if name == "Own" else name


def reported(paper: Paper, *quantities: str) -> list[Reported]:
    """What the paper reports of these quantities, then what its authors' code gave when it was run again."""
    return [
        item
        for kind in ("paper", "rerun")
        for item in paper.reported
        if item.kind == kind and item.quantity in quantities
    ]


def reported_rows(paper: Paper, quantities: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """One row per reported system, its quantities under their own names; words go under `<quantity>_words`.

    Of a quantity by epoch it is the last epoch's.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for item in reported(paper, *quantities):
        row = rows.setdefault((item.kind, item.row), as_reported(paper, item))
        if item.words:
            row[f"{item.quantity}_words"] = item.words
            row["words"] = "; ".join(filter(None, (row.get("words", ""), f"{item.quantity}: {item.words}")))
        else:
            row[item.quantity] = item.by_epoch[-1] if item.by_epoch else item.value
            row[f"{item.quantity}_about"] = item.precision == "approximate"
    yield from rows.values()


UNITS = {"bytes": 1.0, "megabytes": 1e6, "gigabytes": 1e9, "mebibytes": 2.0**20, "gibibytes": GIB}
"""Bytes in the units that reported quantities are named by."""


def in_bytes(item: Reported) -> float | None:
    """What a reported amount of memory is in bytes; its quantity is named `<unit>_<what>`."""
    return None if item.value is None else item.value * UNITS[item.quantity.partition("_")[0]]


def of_memory(paper: Paper, what: str) -> list[str]:
    """The quantities `<unit>_<what>` that the paper reports."""
    names = dict.fromkeys(item.quantity for item in paper.reported)
    return [name for name in names if name.partition("_")[0] in UNITS and name.partition("_")[2] == what]


def missing_notes(view: View, measures: Iterable[str], only: Iterable[str] | None = None) -> list[str]:
    """What the engines lack, and why (`told_missing`), and one note for all engines that have no row at all."""
    found = [
        (WORDS[measure], view.label(engine), reason)
        for measure in measures
        for engine in (view.engines() if only is None else only)
        if (reason := view.why_missing(engine, measure))
    ]
    absent: dict[str, list[str]] = {}
    for engine, reason in view.absent().items() if only is None else ():
        absent.setdefault(reason.removesuffix("."), []).append(view.label(engine))
    left_out = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in absent.items())
    return told_missing(found) + ([f"Without a row: {left_out}."] if left_out else [])


def told_missing(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """Notes on what is missing, of which engine, and why: engines that lack the same for the same reason share one."""
    measures: dict[tuple[str, str], list[str]] = {}
    for measure, label, reason in dict.fromkeys(found):
        measures.setdefault((label, reason), []).append(measure)
    labels: dict[tuple[str, str], list[str]] = {}
    for (label, reason), names in measures.items():
        labels.setdefault(("; ".join(names), reason), []).append(label)
    return [f"Missing, {what}: {', '.join(who)}: {reason.removesuffix('.')}." for (what, reason), who in labels.items()]


def counting_notes(view: View) -> list[str]:
    """What is set for some engines, and only while their allocations are counted, so that they can be seen."""
    found: dict[str, list[str]] = {}
    for engine in view.engines():
        if len(view.ok("memory", engine)) and (note := engines.get(engine).counting_note):
            found.setdefault(note, []).append(view.label(engine))
    return [f"Allocations counted with {note}: {', '.join(names)}." for note, names in found.items()]


def image_notes(view: View, measures: Iterable[str]) -> list[str]:
    """Which engines' Julia started from a system image, so that next to nothing was compiled when they did."""
    found = [
        view.label(engine)
        for engine in view.engines()
        if any(with_image(view.ok(measure, engine)).any() for measure in measures)
    ]
    return [f"Started from a compiled system image of Julia: {', '.join(found)}."] if found else []


def compilation_notes(view: View, measure: str, names: Iterable[str]) -> list[str]:
    """That PyTorch compiled compiles anew in each run, unlike engines whose compiled code stays on the machine."""
    found = {name: view.ok(measure, name) for name in names}
    if not len(found.get(COMPILING, ())):
        return []
    said = (
        f"{view.label(COMPILING)} compiles anew in each run, with one thread and without the caches that PyTorch keeps "
        "by default"
    )
    if kept := [view.label(name) for name, runs in found.items() if _keeps_compiled(runs)]:
        said += f"; of {', '.join(kept)} the machine keeps compiled code from run to run"
    return [f"{said}."]


def _keeps_compiled(runs: pd.DataFrame) -> bool:
    """Whether the runs are of a Julia that keeps compiled code, in its cache or a system image."""
    versions = runs["framework_version"].astype(str).str.extract(r"(?:^| )julia (\d+)\.(\d+)").dropna().astype(int)
    newer = [version >= KEEPS_MACHINE_CODE for version in versions.itertuples(index=False, name=None)]
    return any(newer) or bool(with_image(runs).any())


def limit_notes(rounds: pd.DataFrame) -> list[str]:
    """What the limit of a step is and what it follows from, for each number of threads; or that it was not measured."""
    found, missing = [], []
    for threads, race in rounds.groupby("threads"):
        limits = race.dropna(subset=["limit_microseconds"])
        with_threads = counted(threads, "thread")
        if not len(limits):
            missing.append(with_threads)
            continue
        one = limits.iloc[0]
        found.append(
            f"{significant(one['limit_microseconds'])} µs with {with_threads}, by its {one['limited_by']} "
            f"({significant(one['products_flops'] / 1e6)} million operations of products at "
            f"{significant(one['flops_per_second'] / 1e9)} a nanosecond, {size(one['moved_bytes'])} at "
            f"{size(one['bytes_per_second'])} a second; op by op, nothing fused, the same rates give "
            f"{significant(one['op_by_op_microseconds'])} µs)"
        )
    notes = [f"The limit is the least time that this machine's products and memory allow: {'; '.join(found)}."]
    told = f"Missing, limit of a step: {', '.join(missing)}: the race was run before it was measured."
    return (notes if found else []) + ([told] if missing else [])


def threads_heading(view: View, threads: Any) -> str:
    """The heading of the rows of a race with a number of threads."""
    machine = view.machine(["race"])
    if threads is None:
        return "No race was run"
    return f"{counted(threads, 'thread')} each, {machine}"


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def mean_and_spread(name: str, values: pd.Series) -> dict[str, Any]:
    """Mean and sample standard deviation (none for a single value) under `name` and `<name>_sd`."""
    return {name: or_none(values.mean()), f"{name}_sd": or_none(values.std()) if len(values) > 1 else None}


def quartiles(name: str, values: pd.Series) -> dict[str, Any]:
    """Median and quartiles under `<name>_median`, `<name>_q1` and `<name>_q3`; nothing for no values."""
    if not len(values):
        return dict.fromkeys(quartile_fields(name))
    low, middle, high = (float(item) for item in np.quantile(values, [0.25, 0.5, 0.75]))
    return {f"{name}_median": middle, f"{name}_q1": low, f"{name}_q3": high}


def quartile_fields(name: str) -> tuple[str, str, str]:
    """The names that `quartiles` uses."""
    return (f"{name}_median", f"{name}_q1", f"{name}_q3")


def quartile_text(row: Row, name: str, show: Callable[[float], str]) -> str:
    """`median [first quartile–third quartile]`."""
    middle, low, high = (row.get(field) for field in quartile_fields(name))
    if middle is None or low is None or high is None:
        return MISSING
    return f"{show(middle)} [{show(low)}–{show(high)}]"


def _value_column(
    header: str, name: str, quantity: str, measured: Callable[[Row], str], reported: Callable[[Row], str]
) -> Column:
    """A value as it was measured or reported; the paper's words, or a dash, where a row has none."""

    def text(row: Row) -> str:
        if empty(row.get(name)):
            return str(row.get(f"{quantity}_words") or MISSING)
        return measured(row) if row["kind"] == "measured" else reported(row)

    return Column(header, text)


def mean_column(header: str, name: str, quantity: str = "") -> Column:
    """Mean ± spread; a reported value as the paper gives it, about where it says about."""

    def reported(row: Row) -> str:
        return f"{'≈ ' if row.get(f'{quantity}_about') else ''}{given(row[name])}"

    return _value_column(header, name, quantity, lambda row: with_spread(row[name], row.get(f"{name}_sd")), reported)


def accuracy_column(header: str, name: str, _: str = "") -> Column:
    """A fraction with its spread; a reported one as the paper prints it, or its words."""

    def measured(row: Row) -> str:
        spread = row.get(f"{name}_sd")
        return fraction(row[name]) + ("" if spread is None else f" ± {fraction(spread)}")

    return _value_column(header, name, name, measured, lambda row: given(row[name]))


def bytes_column(header: str, name: str, quantity: str = "") -> Column:
    """A measured number of bytes in decimal units; a reported one in the unit of the paper, GiB."""
    return _value_column(
        header, name, quantity, lambda row: size(row[name]), lambda row: f"{given(row[name] / GIB)} GiB"
    )


def memory_column(header: str, name: str) -> Column:
    """A number of bytes in decimal units; about where the paper says about, words where it has only words."""

    def text(row: Row) -> str:
        if empty(row.get(name)):
            return str(row.get(f"{name}_words") or MISSING)
        return f"{'≈ ' if row.get(f'{name}_about') else ''}{size(row[name])}"

    return Column(header, text)


def best_rival(rounds: pd.DataFrame) -> pd.Series:
    """Of a race's rounds (rows) and engines (columns), the step of whichever of `RIVALS` has the lowest median."""
    present = [name for name in RIVALS if name in rounds]
    if not present:
        return pd.Series(dtype=float)
    return rounds[rounds[present].median().idxmin()]


def seeds_note(view: View) -> list[str]:
    """How many seeds the runs of time have, as a note."""
    counts: dict[int, list[str]] = {}
    for engine in view.engines():
        if count := len(view.ok("time", engine)):
            counts.setdefault(count, []).append(view.label(engine))
    parts = [f"{count} ({', '.join(names)})" for count, names in counts.items()]
    if len(counts) == 1:
        parts = [str(next(iter(counts)))]
    return [f"Mean ± standard deviation over {'; '.join(parts)} seeds."] if counts else []


def copies_note(view: View) -> list[str]:
    """Which engines hold the data twice, as a note under peaks of memory."""
    peaks = (engine for engine in view.engines() if view.ok("memory", engine)["peak_rss_bytes"].notna().any())
    names = [view.label(engine) for engine in peaks if engine in COPYING]
    if not names:
        return []
    return [
        f"The peaks of {', '.join(names)} contain the data twice: the arrays that were read, and the framework's own "
        "copy, which it trains on."
    ]


def gibibytes_note(paper: Paper) -> list[str]:
    """What a GiB is, where the paper reports in it."""
    return (
        [f"1 GiB is {significant(GIB / UNITS['gigabytes'], 4)} GB."]
        if any("gibibytes" in item.quantity for item in paper.reported)
        else []
    )


def setting_text(value: Any) -> str:
    """The value of a setting as a table prints it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def plain_name(name: str) -> str:
    """`training.batch_size` as `training: batch size`."""
    return name.replace(".", ": ", 1).replace("_", " ")


def at(values: pd.Series, key: Any) -> float | None:
    """The value at a key, or None."""
    return or_none(values.get(key))


def or_none(value: Any) -> float | None:
    """A number, or None where there is none."""
    return None if value is None or pd.isna(value) else float(value)


def distinct(values: Iterable[Any]) -> str:
    """The values that there are, each once, between commas."""
    return ", ".join(dict.fromkeys(str(value) for value in values if not empty(value) and not pd.isna(value)))


def short(digest: Any) -> str:
    """The first digits of a digest."""
    return "" if pd.isna(digest) else str(digest).removeprefix("sha256:")[:8]


def commit_of(run: Any) -> str:
    """The commit of a run, with a plus sign where there were changes on top of it."""
    if pd.isna(run["commit"]):
        return ""
    dirty = str(run["dirty"]).lower() in ("true", "1", "1.0")
    return f"{str(run['commit'])[:8]}{'+' if dirty else ''}"


def days(created: Iterable[Any]) -> str:
    """The first and the last day of some moments."""
    days = sorted({str(moment)[:10] for moment in created if not pd.isna(moment)})
    return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
