"""The tables of the report, each made by one producer from the tidy results.

A producer takes the rows that one paper may show (`select.View`) and returns a `Table`. What a paper reports stands in
rows of its own, under a heading that says so and names its machine; it never shares a row with a measurement. An
engine that has no number has a row all the same, and a note says why it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.config import Output, Paper, Reported
from experiments.report import select
from experiments.report.select import MEASURE_NAMES, View
from experiments.report.table import (
    MISSING,
    Column,
    Row,
    Table,
    column,
    empty,
    fraction,
    scientific,
    significant,
    size,
    with_spread,
)

REFERENCE = "torch"
"""The engine that the others are compared with."""

PARITY_STEPS = 100
PARITY_TOLERANCE = 1e-4
"""Engines agree when no loss of the first 100 steps differs from the reference's by more than this."""

GIB = 2.0**30

Producer = Callable[[View], Table]
PRODUCERS: dict[str, Producer] = {}


def producer(function: Producer) -> Producer:
    """Enter a function in PRODUCERS under its own name, which is what paper files call it by."""
    PRODUCERS[function.__name__] = function
    return function


def make(output: Output, view: View) -> Table:
    """The table that a paper's file asks for, under its id and title there."""
    table = PRODUCERS[output.producer](view)
    title = output.title + (f" (the paper's {output.reproduces})" if output.reproduces else "")
    notes = (output.caption, *table.notes) if output.caption else table.notes
    return replace(table, id=output.id, title=title, notes=notes, producer=output.producer)


# ---------------------------------------------------------------------------------------------------------------------
# What a paper asks for


@producer
def settings(view: View) -> Table:
    """Every setting of the network and its training with the place it comes from."""
    paper = view.paper
    rows = [
        {"setting": name, "value": _setting(item.value), "source": item.source, "note": item.note}
        for name, item in paper.settings()
    ]
    runs = view.planned_runs()
    for name in ("seeds", "race_rounds"):
        item = getattr(runs, name)
        rows.append(
            {
                "setting": f"runs.{name}",
                "value": _setting(item.value),
                "source": item.source,
                "note": item.note,
            }
        )
    return Table(
        id="settings",
        title="Settings",
        fields=("setting", "value", "source", "note"),
        columns=(
            column("setting", "setting", _plain_name, align="left"),
            column("value", "value", align="left"),
            column("source", "source", align="left"),
            Column("note", lambda row: str(row["note"]), align="left"),
        ),
        rows=tuple(rows),
        notes=("Source: the paper's text, its authors' published code, or our choice where neither says.",),
        notice=view.notice,
        wide=True,
    )


@producer
def training_accuracy(view: View) -> Table:
    """Training accuracy after each epoch: measured (mean over the seeds) and reported, in separate rows."""
    paper = view.paper
    epochs = range(1, paper.training.epochs.value + 1)
    rows: list[Row] = []
    largest = 0.0
    for engine in view.engines():
        frame = view.epochs_of("time", engine)
        by_epoch = frame.groupby("epoch")["train_accuracy"]
        mean, spread = by_epoch.mean(), by_epoch.std()
        largest = max(largest, spread.fillna(0).max()) if len(spread) else largest
        cells = {f"epoch_{epoch}": _get(mean, epoch) for epoch in epochs}
        spreads = {f"epoch_{epoch}_sd": _get(spread, epoch) for epoch in epochs}
        rows.append({**_measured(view, engine, "time"), "seeds": frame["key"].nunique(), **cells, **spreads})
    for item in _reported(paper, "train_accuracy"):
        cells = {f"epoch_{epoch}": value for epoch, value in enumerate(item.by_epoch, start=1)}
        rows.append({**_as_reported(paper, item), **cells})
    notes = ["Mean over the seeds, evaluated on the whole training set after the epoch."]
    if largest:
        notes.append(f"Largest standard deviation over the seeds: {largest:.4f}.")
    notes += [f"{reported_name(item)}: {item.note}." for item in _reported(paper, "train_accuracy") if item.note]
    return _table(
        view,
        "training_accuracy",
        ("seeds", *(name for epoch in epochs for name in (f"epoch_{epoch}", f"epoch_{epoch}_sd"))),
        [column(str(epoch), f"epoch_{epoch}", lambda value: fraction(value, 3)) for epoch in epochs],
        rows,
        notes,
        "time",
    )


@producer
def performance(view: View) -> Table:
    """The whole run of all epochs: training time, bytes allocated, test accuracy."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        time, memory = view.ok("time", engine), _memory(view, engine)
        rows.append(
            {
                **_measured(view, engine, "time", "memory"),
                "seeds": len(time),
                **_spread("total_s", time["total_seconds"]),
                "allocated_bytes": memory["total"],
                **_spread("test_accuracy", time["test_accuracy"]),
            }
        )
    for row in _reported_rows(paper, ("seconds_total", "gibibytes_total", "test_accuracy")):
        gibibytes = row.get("gibibytes_total")
        rows.append({**row, "total_s": row.get("seconds_total"), "allocated_bytes": gibibytes and gibibytes * GIB})
    return _table(
        view,
        "performance",
        ("seeds", "total_s", "total_s_sd", "allocated_bytes", "test_accuracy", "test_accuracy_sd", "words"),
        [
            _mean_column("time [s]", "total_s", "seconds_total"),
            _bytes_column("allocated", "allocated_bytes", "gibibytes_total"),
            _accuracy_column("test accuracy", "test_accuracy"),
        ],
        rows,
        [
            "Time is training alone, all epochs; evaluation, imports and start-up are not in it.",
            "Time and allocation come from separate runs.",
            *_seeds_note(view),
            *_gibibytes_note(paper),
        ],
        "time",
        "memory",
    )


@producer
def summary(view: View) -> Table:
    """Average time per epoch, test accuracy after the last epoch, and bytes allocated in the first and later epochs."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        time, memory = view.ok("time", engine), _memory(view, engine)
        rows.append(
            {
                **_measured(view, engine, "time", "memory"),
                "seeds": len(time),
                **_spread("epoch_s", _epoch_average(view, engine)),
                **_spread("test_accuracy", time["test_accuracy"]),
                "test_accuracy_min": _or_none(time["test_accuracy"].min()),
                "test_accuracy_max": _or_none(time["test_accuracy"].max()),
                "bytes_first_epoch": memory["first"],
                "bytes_later_epochs": memory["later"],
            }
        )
    for row in _reported_rows(paper, ("seconds_per_epoch", "test_accuracy", "bytes_per_epoch")):
        rows.append({**row, "epoch_s": row.get("seconds_per_epoch")})
    return _table(
        view,
        "summary",
        (
            "seeds",
            "epoch_s",
            "epoch_s_sd",
            "test_accuracy",
            "test_accuracy_sd",
            "test_accuracy_min",
            "test_accuracy_max",
            "bytes_first_epoch",
            "bytes_later_epochs",
            "words",
        ),
        [
            column("seeds", "seeds"),
            _mean_column("time per epoch [s]", "epoch_s", "seconds_per_epoch"),
            _accuracy_column("test accuracy", "test_accuracy"),
            _bytes_column("allocated, 1st epoch", "bytes_first_epoch", "bytes_per_epoch"),
            _bytes_column("later epochs", "bytes_later_epochs"),
        ],
        rows,
        [
            f"Mean ± standard deviation over the seeds; time is the average of all {paper.training.epochs.value} "
            "epochs of a run, the first included.",
            "Time and allocation come from separate runs.",
        ],
        "time",
        "memory",
        wide=True,
    )


@producer
def epoch_times(view: View) -> Table:
    """Start-up, first epoch and the average of the later ones; with and without the evaluation."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        time, epochs = view.ok("time", engine), view.epochs_of("time", engine)
        later = epochs[epochs["epoch"] > 1].groupby("key")["seconds_with_evaluation"].mean()
        rows.append(
            {
                **_measured(view, engine, "time"),
                "seeds": len(time),
                **_spread("import_s", time["import_seconds"]),
                **_spread("first_epoch_s", time["first_epoch_seconds"]),
                **_spread("later_epochs_s", time["later_epoch_seconds"]),
                **_spread("later_epochs_with_evaluation_s", later),
            }
        )
    rows += [
        {**row, "later_epochs_s": row.get("seconds_per_epoch")} for row in _reported_rows(paper, ("seconds_per_epoch",))
    ]
    names = ("import_s", "first_epoch_s", "later_epochs_s", "later_epochs_with_evaluation_s")
    return _table(
        view,
        "epoch_times",
        ("seeds", *(field for name in names for field in (name, f"{name}_sd")), "words"),
        [
            _mean_column("start-up [s]", "import_s"),
            _mean_column("first epoch [s]", "first_epoch_s"),
            _mean_column("later epochs [s]", "later_epochs_s", "seconds_per_epoch"),
            _mean_column("with evaluation [s]", "later_epochs_with_evaluation_s"),
        ],
        rows,
        [
            "The first epoch contains everything that is built or compiled for it; start-up is the import of the "
            "engine's packages in a fresh process; evaluation is that of the test data.",
            *_seeds_note(view),
        ],
        "time",
        wide=True,
    )


@producer
def race(view: View) -> Table:
    """Time per step with the engines alternating; the ratio to the reference is paired within each round."""
    paper = view.paper
    rows: list[Row] = []
    for threads in sorted(view.race["threads"].unique(), reverse=True) or [None]:
        rounds = view.race if threads is None else view.race[view.race["threads"] == threads]
        select.one_machine(rounds["cpu_model"], f"the race of {paper.key}")
        table = rounds.pivot_table(index="round", columns="engine", values="microseconds_per_step")
        for engine in view.engines():
            steps = table[engine].dropna() if engine in table else pd.Series(dtype=float)
            ratios = (table[engine] / table[REFERENCE]).dropna() if {engine, REFERENCE} <= set(table) else steps[:0]
            if threads is None or len(steps) or engine in paper.engine_names():
                rows.append(
                    {
                        **_measured(view, engine, "race"),
                        "threads": threads,
                        "group": _threads_heading(view, threads),
                        "rounds": len(steps),
                        **_quartiles("step_us", steps),
                        **_quartiles("ratio", ratios),
                    }
                )
    label = view.label(REFERENCE)
    return _table(
        view,
        "race",
        ("threads", "rounds", *_quartile_fields("step_us"), *_quartile_fields("ratio")),
        [
            Column("step [µs]", lambda row: _quartile_text(row, "step_us", significant)),
            Column(
                f"ratio to {label}",
                lambda row: "1" if row["engine"] == REFERENCE else _quartile_text(row, "ratio", "{:.2f}".format),
            ),
            column("rounds", "rounds", lambda value: str(value) if value else MISSING),
        ],
        rows,
        [
            "Median and, in brackets, the quartiles over the rounds. The engines run alternately in persistent "
            "processes, idle ones stopped; a ratio is taken within a round.",
        ],
        "race",
    )


@producer
def allocations(view: View) -> Table:
    """Bytes allocated in the first epoch, in each later one and in all; nothing about resident memory."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        memory = _memory(view, engine)
        rows.append(
            {
                **_measured(view, engine, "memory"),
                "seeds": len(view.ok("memory", engine)),
                "bytes_first_epoch": memory["first"],
                "bytes_later_epochs": memory["later"],
                "bytes_total": memory["total"],
            }
        )
    for row in _reported_rows(paper, ("gibibytes_total", "bytes_per_epoch", "gibibytes_per_epoch")):
        total, later = row.get("gibibytes_total"), row.get("gibibytes_per_epoch")
        rows.append({**row, "bytes_total": total and total * GIB, "bytes_later_epochs": later and later * GIB})
    return _table(
        view,
        "allocations",
        ("seeds", "bytes_first_epoch", "bytes_later_epochs", "bytes_total", "words"),
        [
            _bytes_column("first epoch", "bytes_first_epoch", "bytes_per_epoch"),
            _bytes_column("later epochs", "bytes_later_epochs", "gibibytes_per_epoch"),
            _bytes_column("all epochs", "bytes_total", "gibibytes_total"),
        ],
        rows,
        [
            "The sum of all allocations of an epoch, freed or not, as an allocation profiler counts them; what stays "
            "resident is another figure, in a table of its own.",
            *_gibibytes_note(paper),
        ],
        "memory",
    )


@producer
def peak_memory(view: View) -> Table:
    """Peak resident memory of training; nothing about bytes allocated."""
    rows: list[Row] = [
        {
            **_measured(view, engine, "memory"),
            "seeds": len(view.ok("memory", engine)),
            **_spread("peak_rss_bytes", view.ok("memory", engine)["peak_rss_bytes"]),
        }
        for engine in view.engines()
    ]
    return _table(
        view,
        "peak_memory",
        ("seeds", "peak_rss_bytes", "peak_rss_bytes_sd"),
        [column("peak resident", "peak_rss_bytes", size)],
        rows,
        [
            "The process's high-water mark (VmHWM), reset after imports and data, before the model is built; it "
            "contains the imported packages and the data. Taken in a run of its own.",
        ],
        "memory",
    )


@producer
def parity(view: View) -> Table:
    """How far each engine's losses and test accuracy are from the reference's, from the same weights and batches."""
    rows: list[Row] = []
    for engine in view.engines():
        losses = loss_differences(view, engine)
        accuracy = _accuracy_differences(view, engine)
        rows.append(
            {
                **_measured(view, engine, "time"),
                "seeds": losses.index.get_level_values("seed").nunique(),
                "steps": losses.index.get_level_values("step").nunique(),
                "max_loss_difference": _or_none(losses.max()),
                "tolerance": PARITY_TOLERANCE,
                "within_tolerance": bool(losses.max() <= PARITY_TOLERANCE) if len(losses) else None,
                "max_test_accuracy_difference": _or_none(accuracy.max()),
            }
        )
    rows = [row for row in rows if row["engine"] != REFERENCE]
    steps = max((row["steps"] for row in rows), default=0) or PARITY_STEPS
    label = view.label(REFERENCE)
    return _table(
        view,
        "parity",
        (
            "seeds",
            "steps",
            "max_loss_difference",
            "tolerance",
            "within_tolerance",
            "max_test_accuracy_difference",
        ),
        [
            column("seeds", "seeds"),
            column("max |Δ loss|", "max_loss_difference", scientific),
            column(
                f"≤ {scientific(PARITY_TOLERANCE).removeprefix('1.0·')}",
                "within_tolerance",
                lambda value: "yes" if value else "no",
            ),
            column("max |Δ accuracy|", "max_test_accuracy_difference", fraction),
        ],
        rows,
        [
            f"Against {label} at the same seed: the same initial weights, the same batches in the same order. "
            f"Δ loss is the largest over the seeds and the first {steps} steps, Δ accuracy that on the test data at "
            "the end."
        ],
        "time",
    )


@producer
def scaling(view: View) -> Table:
    """Step time of every engine against batch size and sequence length, and how steeply it grows."""
    frame = view.scaling
    machine = select.one_machine(frame["cpu_model"], f"the scaling runs of {view.paper.key}")
    where = f", {machine}" if machine else ": nothing was run"
    rows: list[Row] = []
    growth: list[Row] = []
    for quantity, name in SCALED.items():
        common = {"kind": "measured", "machine": machine, "data": view.data_source, "quantity": quantity}
        part = frame[frame["quantity"] == quantity]
        table = part.pivot_table(index="value", columns="engine", values="microseconds_per_step")
        for value, times in table.iterrows():
            cells = {f"{engine}_us": _get(times, engine) for engine in view.engines()}
            rows.append({**common, "group": f"{name}: step [µs]{where}", "value": value, **cells})
        exponents = {
            f"{engine}_exponent": scaling_exponent(part[part["engine"] == engine]) for engine in view.engines()
        }
        growth.append({**common, "group": "Largest exponent of growth", "value": name.lower(), **exponents})
    rows += growth if len(frame) else [{**growth[0], "group": "Measured here: nothing yet", "value": None}]

    def text(engine: str) -> Callable[[Row], str]:
        def show(row: Row) -> str:
            if not empty(row.get(f"{engine}_exponent")):
                return f"{row[f'{engine}_exponent']:.2f}"
            return MISSING if empty(row.get(f"{engine}_us")) else significant(row[f"{engine}_us"])

        return show

    shown = [engine for engine in view.engines() if (frame["engine"] == engine).any()] or view.engines()
    return Table(
        id="scaling",
        title="scaling",
        fields=(
            *("kind", "machine", "data", "quantity", "value"),
            *(f"{engine}_{what}" for engine in shown for what in ("us", "exponent")),
        ),
        columns=(
            column("", "value", lambda value: value if isinstance(value, str) else significant(value, 1), "left"),
            *(Column(view.label(engine), text(engine)) for engine in shown),
        ),
        rows=tuple(rows),
        group="group",
        notes=(
            "The exponent is the slope between neighbouring values on logarithmic axes; 1 is growth in proportion.",
            *_missing_notes(view, ("scaling",)),
        ),
        notice=view.notice,
    )


@producer
def missing(view: View) -> Table:
    """Every planned row that these results lack, with its reason; and the reported systems that are not run here."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        for measure in MEASURE_NAMES:
            reason = view.why_missing(engine, measure)
            if reason:
                rows.append(
                    {
                        "row": view.label(engine),
                        "measure": MEASURE_NAMES[measure],
                        "reason": reason,
                    }
                )
    named = {item.row for item in paper.reported if item.kind == "paper"}
    stood_for = {engine.reported_as for engine in paper.engines}
    for name in sorted(named - stood_for):
        rows.append({"row": name, "measure": "everything", "reason": "no engine here stands for it: reported only"})
    if not rows:
        rows.append({"row": "none", "measure": "", "reason": "every planned row was measured"})
    return Table(
        id="missing",
        title="Rows that are missing",
        fields=("row", "measure", "reason"),
        columns=(
            column("row", "row", align="left"),
            column("measure", "measure", align="left"),
            column("reason", "reason", align="left"),
        ),
        rows=tuple(rows),
        notes=(f"Planned by profile {view.profile}." if view.profile else "Nothing was run yet.",),
        notice=view.notice,
    )


@producer
def provenance(view: View) -> Table:
    """Where the measured rows come from: engine, versions, commit, machine, threads, BLAS, data."""
    rows: list[Row] = []
    for engine in view.engines():
        runs = pd.concat([view.ok(measure, engine) for measure in ("time", "memory")])
        rows.append(
            {
                **_measured(view, engine, "time"),
                "version": _distinct(runs["framework_version"]),
                "engine_digest": _distinct(runs["engine_digest"].map(_short)),
                "commit": _distinct(runs.apply(_commit, axis=1)) if len(runs) else "",
                "threads": _distinct(runs["threads"]),
                "blas": _distinct(runs["blas"]),
                "python": _distinct(runs["python"]),
                "dtype": _distinct(runs["dtype"]),
                "dataset_digest": _distinct(runs["dataset_digest"].map(_short)),
                "created": _dates(runs["created"]),
            }
        )
    names = (
        "version",
        "engine_digest",
        "commit",
        "threads",
        "blas",
        "python",
        "dtype",
        "dataset_digest",
        "created",
    )
    return _table(
        view,
        "provenance",
        names,
        [
            column("version", "version", align="left"),
            column("source", "engine_digest", align="left"),
            column("commit", "commit", align="left"),
            column("threads", "threads"),
            column("BLAS", "blas", align="left"),
            column("Python", "python", align="left"),
            column("data", "dataset_digest", align="left"),
            column("run on", "created", align="left"),
        ],
        rows,
        [
            "Source and data are the first digits of their digests; a commit with a plus sign had uncommitted changes.",
            *([f"{view.left_out} older or other runs in the same folder are not shown."] if view.left_out else []),
        ],
        "time",
        wide=True,
    )


SCALED = {"batch_size": "Batch size", "sequence_length": "Sequence length"}
"""The quantities of the scaling runs in words."""


# ---------------------------------------------------------------------------------------------------------------------
# Quantities that tables, figures and the text share


def loss_differences(view: View, engine: str) -> pd.Series:
    """|loss − reference's loss| by (seed, step) over the first PARITY_STEPS steps; empty without common seeds."""
    steps = view.steps[view.steps["key"].isin(view.ok("time")["key"]) & (view.steps["step"] <= PARITY_STEPS)]
    loss = steps.pivot_table(index=["seed", "step"], columns="engine", values="loss", dropna=False)
    if not {engine, REFERENCE} <= set(loss):
        return pd.Series(dtype=float, index=pd.MultiIndex.from_arrays([[], []], names=["seed", "step"]))
    return (loss[engine] - loss[REFERENCE]).abs().dropna()


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


def _accuracy_differences(view: View, engine: str) -> pd.Series:
    """|test accuracy − reference's| by seed."""
    accuracy = view.ok("time").pivot_table(index="seed", columns="engine", values="test_accuracy", dropna=False)
    if not {engine, REFERENCE} <= set(accuracy):
        return pd.Series(dtype=float)
    return (accuracy[engine] - accuracy[REFERENCE]).abs().dropna()


def _epoch_average(view: View, engine: str) -> pd.Series:
    """Per run the average time of all its epochs, the first included."""
    return view.epochs_of("time", engine).groupby("key")["seconds"].mean()


def _memory(view: View, engine: str) -> dict[str, float | None]:
    """Bytes allocated in the first epoch, per later epoch and in all, as means over the memory runs."""
    runs, epochs = view.ok("memory", engine), view.epochs_of("memory", engine)
    return {
        "first": _or_none(runs["bytes_first_epoch"].mean()),
        "later": _or_none(runs["bytes_later_epochs"].mean()),
        "total": _or_none(epochs.groupby("key")["bytes_allocated"].sum(min_count=1).mean()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def _table(
    view: View,
    name: str,
    fields: Iterable[str],
    columns: Iterable[Column],
    rows: Iterable[Row],
    notes: Iterable[str],
    *measures: str,
    wide: bool = False,
) -> Table:
    """A table of measured and reported rows; engines that lack one of `measures` are named in its notes."""
    common = ("kind", "machine", "data", "engine", "system")
    return Table(
        id=name,
        title=name,
        fields=(*common, *fields, "missing"),
        columns=(column("", "system", align="left"), *columns),
        rows=tuple(rows),
        group="group",
        notes=(*notes, *_missing_notes(view, measures)),
        notice=view.notice,
        wide=wide,
    )


def _measured(view: View, engine: str, *measures: str) -> dict[str, Any]:
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
            f"{MEASURE_NAMES[measure]}: {reason}"
            for measure in measures
            if (reason := view.why_missing(engine, measure))
        ),
    }


def _as_reported(paper: Paper, item: Reported) -> dict[str, Any]:
    """The fields that every reported row begins with; a re-run of the authors' code is neither ours nor the paper's."""
    rerun = item.kind == "rerun"
    machine = item.where if rerun else paper.environment.description
    heading = "Run again, not by this report" if rerun else "Reported by the paper"
    return {
        "kind": "rerun" if rerun else "reported",
        "machine": machine,
        "system": reported_name(item),
        "group": f"{heading}: {machine}",
    }


def reported_name(item: Reported) -> str:
    """How a reported row is called here: a paper's "Own" means nothing beside an engine of ours."""
    name = item.row.partition(",")[0]
    return "The paper's own" if name == "Own" else name


def _reported(paper: Paper, *quantities: str) -> list[Reported]:
    """What the paper reports of these quantities, then what its authors' code gave when it was run again."""
    return [
        item
        for kind in ("paper", "rerun")
        for item in paper.reported
        if item.kind == kind and item.quantity in quantities
    ]


def _reported_rows(paper: Paper, quantities: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """One row per reported system, its quantities under their own names; words go under `<quantity>_words`."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for item in _reported(paper, *quantities):
        row = rows.setdefault((item.kind, item.row), _as_reported(paper, item))
        if item.words:
            row[f"{item.quantity}_words"] = item.words
            row["words"] = "; ".join(filter(None, (row.get("words", ""), f"{item.quantity}: {item.words}")))
        else:
            row[item.quantity] = item.value
            row[f"{item.quantity}_about"] = item.precision == "approximate"
    yield from rows.values()


def _missing_notes(view: View, measures: Iterable[str]) -> list[str]:
    """One note per reason, naming the engines it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for measure in measures:
        for engine in view.engines():
            if reason := view.why_missing(engine, measure):
                reasons.setdefault((MEASURE_NAMES[measure], reason), []).append(view.label(engine))
    return [
        f"Missing, {measure}: {', '.join(names)}: {reason.removesuffix('.')}."
        for (measure, reason), names in reasons.items()
    ]


def _threads_heading(view: View, threads: Any) -> str:
    machine = view.machine(["race"])
    if threads is None:
        return "No race was run"
    return f"{threads} thread{'s' if threads != 1 else ''} each, {machine}"


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def _spread(name: str, values: pd.Series) -> dict[str, Any]:
    """Mean and sample standard deviation (none for a single value) under `name` and `<name>_sd`."""
    return {name: _or_none(values.mean()), f"{name}_sd": _or_none(values.std()) if len(values) > 1 else None}


def _quartiles(name: str, values: pd.Series) -> dict[str, Any]:
    if not len(values):
        return dict.fromkeys(_quartile_fields(name))
    low, middle, high = (float(item) for item in np.quantile(values, [0.25, 0.5, 0.75]))
    return {f"{name}_median": middle, f"{name}_q1": low, f"{name}_q3": high}


def _quartile_fields(name: str) -> tuple[str, str, str]:
    return (f"{name}_median", f"{name}_q1", f"{name}_q3")


def _quartile_text(row: Row, name: str, show: Callable[[float], str]) -> str:
    middle, low, high = (row.get(field) for field in _quartile_fields(name))
    if middle is None or low is None or high is None:
        return MISSING
    return f"{show(middle)} [{show(low)}–{show(high)}]"


def _mean_column(header: str, name: str, quantity: str = "") -> Column:
    """Mean ± spread; a reported value as the paper gives it, about where it says about."""

    def text(row: Row) -> str:
        if empty(row.get(name)):
            return str(row.get(f"{quantity}_words") or MISSING)
        if row["kind"] != "measured":
            return f"{'≈ ' if row.get(f'{quantity}_about') else ''}{row[name]:g}"
        return with_spread(row[name], row.get(f"{name}_sd"))

    return Column(header, text)


def _accuracy_column(header: str, name: str) -> Column:
    def text(row: Row) -> str:
        if empty(row.get(name)):
            return str(row.get(f"{name}_words") or MISSING)
        if row["kind"] != "measured":
            return f"{row[name]:g}"
        spread = row.get(f"{name}_sd")
        return fraction(row[name]) + ("" if spread is None else f" ± {fraction(spread)}")

    return Column(header, text)


def _bytes_column(header: str, name: str, quantity: str = "") -> Column:
    """A measured number of bytes in decimal units; a reported one in the unit of the paper, GiB."""

    def text(row: Row) -> str:
        if empty(row.get(name)):
            return str(row.get(f"{quantity}_words") or MISSING)
        if row["kind"] != "measured":
            return f"{row[name] / GIB:g} GiB"
        return size(row[name])

    return Column(header, text)


def _seeds_note(view: View) -> list[str]:
    counts: dict[int, list[str]] = {}
    for engine in view.engines():
        if count := len(view.ok("time", engine)):
            counts.setdefault(count, []).append(view.label(engine))
    parts = [f"{count} ({', '.join(names)})" for count, names in counts.items()]
    if len(counts) == 1:
        parts = [str(next(iter(counts)))]
    return [f"Mean ± standard deviation over {'; '.join(parts)} seeds."] if counts else []


def _gibibytes_note(paper: Paper) -> list[str]:
    return ["1 GiB is 1.074 GB."] if any("gibibytes" in item.quantity for item in paper.reported) else []


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain_name(name: str) -> str:
    """`training.batch_size` as `training: batch size`."""
    return name.replace(".", ": ", 1).replace("_", " ")


def _get(values: pd.Series, key: Any) -> float | None:
    return _or_none(values.get(key))


def _or_none(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if not empty(value) and not pd.isna(value)))


def _short(digest: Any) -> str:
    return "" if pd.isna(digest) else str(digest).removeprefix("sha256:")[:8]


def _commit(run: Any) -> str:
    if pd.isna(run["commit"]):
        return ""
    dirty = str(run["dirty"]).lower() in ("true", "1", "1.0")
    return f"{str(run['commit'])[:8]}{'+' if dirty else ''}"


def _dates(created: Iterable[Any]) -> str:
    days = sorted({str(moment)[:10] for moment in created if not pd.isna(moment)})
    return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
