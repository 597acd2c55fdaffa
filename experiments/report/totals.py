"""The table of whole trainings of the studies' networks: start-up and the seconds of all epochs, beside PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from experiments.formats import MISSING, fixed, significant
from experiments.report.row_helpers import REFERENCE, missing_notes, producer
from experiments.report.sizes import TARGETS
from experiments.report.sizes_targets import julia_notes, start_targets
from experiments.report.table import Column, Row, Table, column, empty
from experiments.report.view import View

MEASURE = "totals"
AHEAD = ("julia",)
"""The engines whose whole training is to take no longer than PyTorch's."""


def engines_of(view: View) -> list[str]:
    """The engines that have whole trainings, in the order of the paper's file."""
    return [name for name in view.engines() if (view.table(MEASURE)["engine"] == name).any()]


def total_rows(view: View) -> list[Row]:
    """Start-up and whole training of each network in every engine: medians and extremes over the rounds.

    The ratio to PyTorch is the median of those within a round.
    """
    every = view.table(MEASURE)
    trainings = {training.id: training for training in view.paper.trainings}
    rows: list[Row] = []
    for threads, name in itertools.product(sorted(every["threads"].unique(), reverse=True), trainings):
        training, found = trainings[name], every[(every["network"] == name) & (every["threads"] == threads)]
        if not len(found):
            continue
        about = {"network": name, "title": training.title, "threads": int(threads), "epochs": training.epochs}
        row: dict[str, Any] = {**about, "steps": -(-training.rows // training.batch_size) * training.epochs}
        row |= {"kind": "measured", "machine": view.machine([MEASURE]), "data": view.data_source}
        totals = found.pivot_table(index="round", columns="engine", values="total_seconds")
        for engine, own in found.groupby("engine"):
            row |= {
                f"{engine}_{name}_s": float(own[f"{name}_seconds"].median()) for name in ("import", "start", "total")
            }
            row[f"{engine}_least_s"] = float(own["total_seconds"].min())
            row[f"{engine}_most_s"] = float(own["total_seconds"].max())
            if engine in TARGETS and REFERENCE in totals:
                row[f"{engine}_ratio"] = float((totals[engine] / totals[REFERENCE]).median())
        rows.append(row)
    return rows


def within(rows: Sequence[Row], name: str, most: float) -> tuple[int, int]:
    """How many rows have a number that is at most `most`, and how many have one."""
    known = [row[name] for row in rows if not empty(row.get(name))]
    return sum(value <= most for value in known), len(known)


@producer
def sizes_totals(view: View) -> Table:
    """Start-up and whole trainings of the studies' networks, beside the targets of our engines."""
    engines, rows, targets = engines_of(view), total_rows(view), start_targets(view, MEASURE)
    columns: list[Column] = []
    for engine in engines:
        label = view.label(engine).removeprefix("TwinGrad ")
        target = f", ≤ {significant(targets[engine], trim=True)}" if engine in targets else ""
        columns += [
            Column(f"{label} start [s]{target}", _start(engine, targets)),
            Column("all epochs [s]", _total(engine)),
        ]
        if engine in TARGETS and REFERENCE in engines:
            columns.append(Column("ratio", _ratio(engine)))
    notes = []
    for engine in (name for name in TARGETS if name in engines):
        count, of = within(rows, f"{engine}_start_s", targets[engine])
        said = f"start-up within {significant(targets[engine], trim=True)} s in {count} of {of} networks"
        count, of = within(rows, f"{engine}_ratio", 1.0)
        if of:
            said += f", a whole training no longer than PyTorch's in {count} of {of}"
        notes.append(f"{view.label(engine)}: {said}.")
    return Table(
        fields=(
            *("kind", "machine", "data", "network", "threads", "epochs", "steps"),
            *(f"{engine}_{name}_s" for engine in engines for name in ("import", "start", "total", "least", "most")),
            *(f"{engine}_ratio" for engine in engines if engine in TARGETS),
        ),
        columns=(
            column("network", "title", align="left"),
            column("threads", "threads", str),
            column("steps", "steps", lambda value: f"{int(value):,}"),
            *columns,
        ),
        rows=tuple(rows),
        notes=(
            "Each training is of a new process. Start-up: `build` and the first step, less a later step; in brackets "
            "the seconds before, of importing the engine and starting its runtime. All epochs: `build` and all steps, "
            "compilation included, evaluation left out, with the extremes over the rounds; ratio: to PyTorch's in the "
            "same round. All are medians. Rows are drawn, as many as the study trains on. × marks what is above its "
            "target: PyTorch's time for the Julia engine. The studies' tables have the same trainings on their data, "
            "with compilation by Julia itself where the version keeps no compiled code.",
            *notes,
            *julia_notes(view, MEASURE),
            *missing_notes(view, (MEASURE,), engines),
        )
        if rows
        else ("Not run: make sizes runs it.",),
        wide=True,
    )


def _start(engine: str, targets: dict[str, float]) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        start = row.get(f"{engine}_start_s")
        if start is None:
            return MISSING
        mark = " ×" if start > targets.get(engine, float("inf")) else ""
        return f"{significant(start)} ({significant(row[f'{engine}_import_s'])}){mark}"

    return text


def _total(engine: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        if empty(row.get(f"{engine}_total_s")):
            return MISSING
        least, most = (significant(row[f"{engine}_{end}_s"]) for end in ("least", "most"))
        return f"{significant(row[f'{engine}_total_s'])} ({least}–{most})"

    return text


def _ratio(engine: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value: Any = row.get(f"{engine}_ratio")
        if value is None or pd.isna(value):
            return MISSING
        return fixed(value) + (" ×" if engine in AHEAD and value > 1 else "")

    return text
