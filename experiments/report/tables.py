"""The tables of the report, each made by one producer from the tidy results.

A producer takes the rows that one paper may show (`View`) and returns a `Table`. What a paper reports has
separate rows, under a heading that says so and names its machine; it never shares a row with a measurement. An
engine that has no number has a row all the same, and a note says why it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd

from experiments.formats import MISSING, fixed, fraction, power_of_ten, scientific, share, significant
from experiments.measures.registry import MEASURES, WORDS
from experiments.papers import Output, Setting
from experiments.quantities import BYTES, QUANTITIES, limit_shares
from experiments.report import comparisons as comparisons  # its producers enter themselves
from experiments.report import microbenchmarks as microbenchmarks  # and so do these
from experiments.report import row_helpers
from experiments.report.row_helpers import (
    PARITY_STEPS,
    PARITY_TOLERANCE,
    PRODUCERS,
    REFERENCE,
    SCALED,
    Cell,
    engine_table,
    loss_differences,
    producer,
    scaling_exponent,
)
from experiments.report.table import Column, Row, Table, column, empty
from experiments.report.view import View
from experiments.testing import of_mean


def make(output: Output, view: View) -> Table:
    """The table that a paper's file asks for, under its id and title there."""
    table = PRODUCERS[output.producer](view, *([output.quantities] if output.quantities else []))
    title = output.title + (f" (the paper's {output.reproduces})" if output.reproduces else "")
    notes = (output.caption, *table.notes) if output.caption else table.notes
    return replace(table, id=output.id, title=title, notes=notes, notice=view.notice, producer=output.producer)


# ---------------------------------------------------------------------------------------------------------------------
# What a paper asks for


@producer
def settings(view: View) -> Table:
    """Every setting of the network and its training with the place it comes from."""
    paper = view.paper
    rows = [
        {"setting": name, "value": row_helpers.setting_text(item.value), "source": item.source, "note": item.note}
        for name, item in paper.settings()
    ]
    runs = view.planned_runs()
    stated = {f"runs.{name}": getattr(runs, name) for name in type(runs).model_fields}
    for kind in ("engine_seeds", "own_engine_seeds"):
        stated |= {f"runs.{kind}.{name}": item for name, item in getattr(runs, kind).items()}
    for name, item in stated.items():
        if isinstance(item, Setting):
            value = row_helpers.setting_text(item.value)
            rows.append({"setting": name, "value": value, "source": item.source, "note": item.note})
    return Table(
        fields=("setting", "value", "source", "note"),
        columns=(
            column("setting", "setting", row_helpers.plain_name, align="left"),
            column("value", "value", align="left"),
            column("source", "source", align="left"),
            Column("note", lambda row: str(row["note"]), align="left"),
        ),
        rows=tuple(rows),
        notes=("Source: the paper's text, its authors' published code, or our choice where neither says.",),
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
        cells = {f"epoch_{epoch}": row_helpers.at(mean, epoch) for epoch in epochs}
        spreads = {f"epoch_{epoch}_sd": row_helpers.at(spread, epoch) for epoch in epochs}
        rows.append({**row_helpers.measured(view, engine, "time"), "seeds": frame["key"].nunique(), **cells, **spreads})
    for item in row_helpers.reported(paper, "train_accuracy"):
        cells = {f"epoch_{epoch}": value for epoch, value in enumerate(item.by_epoch, start=1)}
        rows.append({**row_helpers.as_reported(paper, item), **cells})
    notes = ["Mean over the seeds, evaluated on the whole training set after the epoch."]
    if largest:
        notes.append(f"Largest standard deviation over the seeds: {fraction(largest)}.")
    notes += [
        f"{row_helpers.reported_name(item)}: {item.note}."
        for item in row_helpers.reported(paper, "train_accuracy")
        if item.note
    ]
    return row_helpers.table_of(
        view,
        ("seeds", *(name for epoch in epochs for name in (f"epoch_{epoch}", f"epoch_{epoch}_sd"))),
        [column(str(epoch), f"epoch_{epoch}", lambda value: fraction(value, 3)) for epoch in epochs],
        rows,
        notes,
        "time",
    )


@producer
def performance(view: View) -> Table:
    """The whole run of all epochs: training time, bytes allocated, test accuracy."""
    cells = (
        Cell("total_s", "time [s]", "total_seconds", "seconds_total"),
        Cell("allocated_bytes", "allocated", "bytes_all_epochs", "gibibytes_total", spread=False),
        Cell("test_accuracy", "test accuracy", "test_accuracy", "test_accuracy"),
    )
    notes = (
        "Time is training alone, all epochs; evaluation, imports and start-up are not in it.",
        "Time and allocation come from separate runs.",
        *row_helpers.seeds_note(view),
        *row_helpers.gibibytes_note(view.paper),
    )
    return engine_table(view, ("time", "memory"), cells, notes)


@producer
def summary(view: View) -> Table:
    """Average time per epoch, test accuracy after the last epoch, and bytes allocated in the first and later epochs."""
    cells = (
        Cell("epoch_s", "time per epoch [s]", "average_epoch_seconds", "seconds_per_epoch"),
        Cell("test_accuracy", "test accuracy", "test_accuracy", "test_accuracy", extremes=True),
        Cell("bytes_first_epoch", "allocated, 1st epoch", "bytes_first_epoch", "bytes_per_epoch", spread=False),
        Cell("bytes_later_epochs", "later epochs", "bytes_later_epochs", spread=False),
    )
    notes = (
        "Mean ± standard deviation over the seeds; time is the average of all "
        f"{view.paper.training.epochs.value} epochs of a run, the first included.",
        "Time and allocation come from separate runs.",
    )
    return engine_table(view, ("time", "memory"), cells, notes, seeds="column", wide=True)


@producer
def epoch_times(view: View) -> Table:
    """Start-up, first epoch and the average of the later ones; with and without the evaluation."""
    cells = (
        Cell("import_s", "start-up [s]", "import_seconds"),
        Cell("first_epoch_s", "first epoch [s]", "first_epoch_seconds"),
        Cell("later_epochs_s", "later epochs [s]", "later_epoch_seconds", "seconds_per_epoch"),
        Cell("later_epochs_with_evaluation_s", "with evaluation [s]", "later_evaluated_seconds"),
    )
    notes = (
        "The first epoch contains everything that is built or compiled for it; start-up is the import of the "
        "engine's packages in a fresh process, with the start of its runtime; evaluation is that of the test data.",
        *row_helpers.compilation_notes(view, "time", view.engines()),
        *row_helpers.seeds_note(view),
    )
    return engine_table(view, ("time",), cells, notes, wide=True)


@producer
def race(view: View) -> Table:
    """Time per step with the engines alternating; the ratio to the reference is paired within each round."""
    paper = view.paper
    rows: list[Row] = []
    every = view.table("race")
    for threads in sorted(every["threads"].unique(), reverse=True) or [None]:
        rounds = every if threads is None else every[every["threads"] == threads]
        table = rounds.pivot_table(index="round", columns="engine", values="microseconds_per_step")
        for engine in view.engines():
            steps = table[engine].dropna() if engine in table else pd.Series(dtype=float)
            ratios = (table[engine] / table[REFERENCE]).dropna() if {engine, REFERENCE} <= set(table) else steps[:0]
            rival = row_helpers.best_rival(table)
            against = (table[engine] / rival).dropna() if engine in table and len(rival) else steps[:0]
            own = rounds[rounds["engine"] == engine]
            limits = own["limit_microseconds"].dropna()
            if threads is None or len(steps) or engine in paper.engine_names():
                rows.append(
                    {
                        **row_helpers.measured(view, engine, "race"),
                        "threads": threads,
                        "group": row_helpers.threads_heading(view, threads),
                        "rounds": len(steps),
                        **row_helpers.quartiles("step_us", steps),
                        **row_helpers.quartiles("ratio", ratios),
                        "rival": rival.name if len(rival) else None,
                        **row_helpers.quartiles("rival_ratio", against),
                        "limit_us": float(limits.iloc[0]) if len(limits) else None,
                        "limit_share": row_helpers.or_none(limit_shares(own).median()),
                    }
                )
    label = view.label(REFERENCE)
    return row_helpers.table_of(
        view,
        (
            *("threads", "rounds", "rival"),
            *(field for name in ("step_us", "ratio", "rival_ratio") for field in row_helpers.quartile_fields(name)),
            *("limit_us", "limit_share"),
        ),
        [
            Column("step [µs]", lambda row: row_helpers.quartile_text(row, "step_us", significant)),
            column("of the limit", "limit_share", share),
            Column(
                f"ratio to {label}",
                lambda row: "1" if row["engine"] == REFERENCE else row_helpers.quartile_text(row, "ratio", fixed),
            ),
            Column(
                "ratio to best rival",
                lambda row: (
                    "1" if row["engine"] == row["rival"] else row_helpers.quartile_text(row, "rival_ratio", fixed)
                ),
            ),
            column("rounds", "rounds", lambda value: str(value) if value else MISSING),
        ],
        rows,
        [
            "The best rival is the fastest of TensorFlow (without and with XLA) and JAX, by its median.",
            "Median and, in brackets, the quartiles over the rounds. The engines run alternately in persistent "
            "processes, idle ones stopped; a ratio is taken within a round.",
            *row_helpers.limit_notes(every),
        ],
        "race",
        wide=True,
    )


@producer
def allocations(view: View) -> Table:
    """Bytes allocated in the first epoch, in each later one and in all; nothing about resident memory."""
    cells = (
        Cell("bytes_first_epoch", "first epoch", "bytes_first_epoch", "bytes_per_epoch", spread=False),
        Cell("bytes_later_epochs", "later epochs", "bytes_later_epochs", "gibibytes_per_epoch", spread=False),
        Cell("bytes_total", "all epochs", "bytes_all_epochs", "gibibytes_total", spread=False),
    )
    notes = (
        "The sum of all allocations of an epoch, freed or not, as an allocation profiler counts them; what stays "
        "resident is another figure, in a separate table.",
        *row_helpers.gibibytes_note(view.paper),
    )
    return engine_table(view, ("memory",), cells, notes)


@producer
def peak_memory(view: View) -> Table:
    """Peak resident memory of training; nothing about bytes allocated."""
    notes = (
        "The process's high-water mark (VmHWM), reset after imports and data, before the model is built; it "
        "contains the imported packages and the data. Taken in a separate run.",
        *row_helpers.copies_note(view),
    )
    return engine_table(view, ("memory",), [Cell("peak_rss_bytes", "peak resident", "peak_rss_bytes")], notes)


@producer
def quantities(view: View, names: Sequence[str] = ("later_epoch_seconds", "test_accuracy", "peak_rss_bytes")) -> Table:
    """Any quantities of engines, which a paper's file names."""
    quantities = [QUANTITIES[name] for name in names]
    units = {
        one.name: f" [{one.unit.symbol}]" if one.unit.symbol and one.unit is not BYTES else "" for one in quantities
    }
    cells = [
        Cell(one.name, f"{one.label}{units[one.name]}", one.name, spread=one.unit is not BYTES and not one.about)
        for one in quantities
    ]
    measures = tuple(dict.fromkeys(one.measure for one in quantities))
    return engine_table(view, measures, cells, ["Means over the runs."], seeds="")


@producer
def parity(view: View) -> Table:
    """How far each engine's losses and test accuracy are from the reference's, from the same weights and batches."""
    rows: list[Row] = []
    for engine in view.engines():
        losses = loss_differences(view, engine)
        accuracy = row_helpers.accuracy_differences(view, engine)
        rows.append(
            {
                **row_helpers.measured(view, engine, "time"),
                "seeds": losses.index.get_level_values("seed").nunique(),
                "steps": losses.index.get_level_values("step").nunique(),
                "max_loss_difference": row_helpers.or_none(losses.max()),
                "tolerance": PARITY_TOLERANCE,
                "within_tolerance": bool(losses.max() <= PARITY_TOLERANCE) if len(losses) else None,
                "max_test_accuracy_difference": row_helpers.or_none(accuracy.max()),
            }
        )
    rows = [row for row in rows if row["engine"] != REFERENCE]
    steps = max((row["steps"] for row in rows), default=0) or PARITY_STEPS
    label = view.label(REFERENCE)
    return row_helpers.table_of(
        view,
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
                f"≤ {power_of_ten(PARITY_TOLERANCE)}",
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
    frame = view.table("scaling")
    machine = view.machine(["scaling"])
    where = f", {machine}" if machine else ": nothing was run"
    rows: list[Row] = []
    growth: list[Row] = []
    for quantity, name in SCALED.items():
        common = {"kind": "measured", "machine": machine, "data": view.data_source, "quantity": quantity}
        part = frame[frame["quantity"] == quantity]
        if len(frame) and not len(part):
            continue
        table = part.pivot_table(index="value", columns="engine", values="microseconds_per_step")
        for value, times in table.iterrows():
            cells = {f"{engine}_us": row_helpers.at(times, engine) for engine in view.engines()}
            rows.append({**common, "group": f"{name}: step [µs]{where}", "value": value, **cells})
        exponents = {
            f"{engine}_exponent": scaling_exponent(part[part["engine"] == engine]) for engine in view.engines()
        }
        growth.append({**common, "group": "Largest exponent of growth", "value": name.lower(), **exponents})
    rows += growth if len(frame) else [{**growth[0], "group": "Measured here: nothing yet", "value": None}]

    def text(engine: str) -> Callable[[Row], str]:
        def show(row: Row) -> str:
            if not empty(row.get(f"{engine}_exponent")):
                return fixed(row[f"{engine}_exponent"])
            return MISSING if empty(row.get(f"{engine}_us")) else significant(row[f"{engine}_us"])

        return show

    shown = [engine for engine in view.engines() if (frame["engine"] == engine).any()] or view.engines()
    return Table(
        fields=(
            *("kind", "machine", "data", "quantity", "value"),
            *(f"{engine}_{what}" for engine in shown for what in ("us", "exponent")),
        ),
        columns=(
            column("", "value", lambda value: value if isinstance(value, str) else significant(value, 1), "left"),
            *(Column(view.label(engine), text(engine)) for engine in shown),
        ),
        rows=tuple(rows),
        notes=(
            "The exponent is the slope between neighbouring values on logarithmic axes; 1 is growth in proportion. The "
            "engines ran one after the other, each in its own process: for their ratios see the races.",
            *row_helpers.missing_notes(view, ("scaling",), view.engines()),
        ),
    )


def pooled_accuracies(view: View) -> Table:
    """Accuracy after the last epoch over the runs of all machines, where results come from several."""
    assert view.pooled is not None
    rows: list[Row] = []
    for (measure, engine), runs in view.pooled.groupby(["measure", "engine"], sort=False):
        if runs["test_accuracy"].notna().any():
            interval = of_mean(runs["test_accuracy"].dropna())
            low, high = interval or (None, None)
            mean = row_helpers.or_none(runs["test_accuracy"].mean())
            rows.append(
                {
                    **{"measure": WORDS[measure], "engine": engine, "system": view.label(engine), "seeds": len(runs)},
                    **{"test_accuracy": mean, "test_accuracy_low": low, "test_accuracy_high": high},
                }
            )
    return Table(
        id="pooled-accuracies",
        title="Test accuracy over all machines",
        fields=("measure", "engine", "seeds", "test_accuracy", "test_accuracy_low", "test_accuracy_high"),
        columns=(
            column("", "system", align="left"),
            column("seeds", "seeds"),
            column("test accuracy", "test_accuracy", fraction),
            Column(
                "confidence interval",
                lambda row: (
                    MISSING
                    if empty(row["test_accuracy_low"])
                    else f"{fraction(row['test_accuracy_low'])} to {fraction(row['test_accuracy_high'])}"
                ),
            ),
        ),
        rows=tuple(rows),
        group="measure",
        notes=(
            f"Machines: {'; '.join(view.machines)}. A seed that several machines ran counts once, as the mean of them. "
            "Times are shown for each machine apart.",
        ),
        notice=view.notice,
    )


@producer
def missing(view: View) -> Table:
    """Every planned row that these results lack, with its reason; and the reported systems that are not run here."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        for measure in MEASURES:
            reason = view.why_missing(engine, measure)
            if reason:
                rows.append(
                    {
                        "row": view.label(engine),
                        "measure": WORDS[measure],
                        "reason": reason,
                    }
                )
    for engine, reason in view.absent().items():
        rows.append({"row": view.label(engine), "measure": "everything", "reason": reason})
    for label in view.retired:
        rows.append({"row": label, "measure": "everything", "reason": "retired: its results are kept, and not shown"})
    for name, reason in microbenchmarks.missing_systems(view):
        rows.append({"row": name, "measure": WORDS["microbenchmarks"], "reason": reason})
    named = {item.row for item in paper.reported if item.kind == "paper"}
    stood_for = {engine.reported_as for engine in paper.engines}
    for name in sorted(named - stood_for):
        rows.append({"row": name, "measure": "everything", "reason": "no engine here stands for it: reported only"})
    if not rows:
        rows.append({"row": "none", "measure": "", "reason": "every planned row was measured"})
    return Table(
        fields=("row", "measure", "reason"),
        columns=(
            column("row", "row", align="left"),
            column("measure", "measure", align="left"),
            column("reason", "reason", align="left"),
        ),
        rows=tuple(rows),
        notes=(f"Planned by profile {view.profile}." if view.profile else "Nothing was run yet.",),
    )


@producer
def provenance(view: View) -> Table:
    """Where the measured rows come from: engine, versions, commit, machine, threads, BLAS, data."""
    rows: list[Row] = []
    trained = "time" in view.planned_runs().measures.value
    measures = ("time", "memory") if trained else tuple(view.planned_runs().measures.value)
    for engine in view.engines():
        runs = pd.concat([view.ok(measure, engine) for measure in measures])
        rows.append(
            {
                **row_helpers.measured(view, engine, measures[0]),
                "version": row_helpers.distinct(runs["framework_version"]),
                "engine_digest": row_helpers.distinct(runs["engine_digest"].map(row_helpers.short)),
                "commit": row_helpers.distinct(runs.apply(row_helpers.commit_of, axis=1)) if len(runs) else "",
                "threads": row_helpers.distinct(runs["threads"]),
                "blas": row_helpers.distinct(runs["blas"]),
                "python": row_helpers.distinct(runs["python"]),
                "dtype": row_helpers.distinct(runs["dtype"]),
                "dataset_digest": row_helpers.distinct(runs["dataset_digest"].map(row_helpers.short)),
                "others_share": runs["others_share"].max(),
                "created": row_helpers.days(runs["created"]),
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
        "others_share",
        "created",
    )
    return row_helpers.table_of(
        view,
        names,
        [
            column("version", "version", align="left"),
            column("source", "engine_digest", align="left"),
            column("commit", "commit", align="left"),
            column("threads", "threads"),
            column("BLAS", "blas", align="left"),
            column("Python", "python", align="left"),
            column("data", "dataset_digest", align="left"),
            column("others", "others_share", share),
            column("run on", "created", align="left"),
        ],
        rows,
        [
            "Source and data are the first digits of their digests; a commit with a plus sign had uncommitted changes. "
            "Others: which share of the cores other processes, or the host of a virtual machine, had during a run, "
            "the largest of all runs; older records do not say.",
            *([f"{view.left_out} older or other runs in the same folder are not shown."] if view.left_out else []),
        ],
        measures[0],
        wide=True,
    )
