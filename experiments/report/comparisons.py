"""Tables that set things side by side: measured and reported, shared and own weights, networks, techniques, claims."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.formats import MISSING, fixed, fraction, percent, significant, size
from experiments.measures.ablation import FLOAT32, STEPS_COUNTED
from experiments.quantities import INHERITING, QUANTITIES, memory_of, native_runs
from experiments.report import claims as verdicts
from experiments.report import row_helpers
from experiments.report.row_helpers import Cell, engine_table, producer
from experiments.report.table import Row, Table, column
from experiments.report.view import View

TECHNIQUES = {
    "replay": "graph built and sorted once, replayed (a, c, e)",
    "preallocate": "preallocated buffers, in-place passes (a, c, e)",
    "reuse_memory": "values share memory (planned lifetimes)",
    "in_place": "ops overwrite what nobody needs",
    "views": "views instead of copies (a, b, c, e)",
    "place_parts": "parts computed in their place in the whole",
    "straight_line": "functions of single numbers as Python source",
    "simplify": "equal subexpressions merged, needless ops dropped",
    "join": "the products of a loop's weight as one of all steps",
    "fuse": "fused kernels",
    "fused_loss": "stable softmax cross-entropy on sparse labels (e)",
    "concrete": "concrete types, no dispatch (a, b, c)",
    "batched": "the batch in one pass (a, c)",
    "flat_parameters": "one optimizer loop over all parameters",
    "sparse_rows": "an embedding's gradient kept for the rows looked up",
    "lazy_updates": "rows that are not looked up updated later, at once (Adam)",
    "product_parts": "products in parts that BLAS does not copy",
    "winograd": "convolutions by Winograd's algorithm, which rounds otherwise",
    "sparse_columns": "an embedding's gradient kept for the rows looked up",
    "split_batch": "batch split over threads (a, b: threads)",
    FLOAT32: "Float32 instead of Float64 (a, e)",
}
"""What the techniques are, with the papers that name them (by the last letters of their keys; b is mnist-cnn)."""
LETTERS = (
    "Letters name the studies that use a technique: a imdb-cnn-a, b mnist-cnn, c imdb-cnn-c, d mnist-rnn-d, "
    "e mnist-rnn-e."
)


def described(technique: str) -> str:
    """A technique in words."""
    return TECHNIQUES.get(technique, technique.replace("_", " "))


# ---------------------------------------------------------------------------------------------------------------------
# First epoch and average


@producer
def first_and_average_times(view: View) -> Table:
    """Seconds of the first epoch, and the average of those that follow, without and with the evaluation."""
    cells = (
        Cell("first_epoch_s", "first epoch [s]", "first_epoch_seconds", "seconds_first_epoch"),
        Cell("average_s", "average [s]", "later_epoch_seconds", "seconds_per_epoch"),
        Cell("average_with_evaluation_s", "with evaluation [s]", "later_evaluated_seconds"),
    )
    notes = (
        "The average is that of the epochs after the first; the first contains what is built for it.",
        *row_helpers.compilation_notes(view, "time", view.engines()),
        *row_helpers.seeds_note(view),
    )
    return engine_table(view, ("time",), cells, notes)


@producer
def first_and_average_allocations(view: View) -> Table:
    """Bytes allocated in the first epoch, and on average in those that follow."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        memory = memory_of(view, engine)
        rows.append(
            {
                **row_helpers.measured(view, engine, "memory"),
                "bytes_first_epoch": memory["first"],
                "bytes_average": memory["later"],
            }
        )
    rows += _reported_memory(view, {"bytes_first_epoch": "first_epoch", "bytes_average": "per_epoch"})
    return row_helpers.table_of(
        view,
        ("bytes_first_epoch", "bytes_average", "words"),
        [
            row_helpers.memory_column("first epoch", "bytes_first_epoch"),
            row_helpers.memory_column("average", "bytes_average"),
        ],
        rows,
        [
            "The sum of all allocations of an epoch, freed or not; the average is that of the epochs after the first.",
            *row_helpers.gibibytes_note(paper),
        ],
        "memory",
    )


@producer
def memory(view: View) -> Table:
    """Peak resident memory and bytes allocated of every framework: two figures, in separate columns."""
    cells = (
        Cell("peak_rss_bytes", "peak resident", "peak_rss_bytes"),
        Cell("bytes_first_epoch", "allocated, 1st epoch", "bytes_first_epoch", spread=False),
        Cell("bytes_later_epochs", "allocated, later epochs", "bytes_later_epochs", spread=False),
    )
    notes = (
        "Peak resident is the process's high-water mark (VmHWM) in a separate run, imported packages and data "
        "included. Allocated is the sum of what an epoch asks for, freed or not: two figures that do not compare.",
        *row_helpers.copies_note(view),
    )
    return engine_table(view, ("memory",), cells, notes, seeds="")


@producer
def epochs(view: View) -> Table:
    """Every epoch by itself: accuracy on training and test data, seconds, bytes allocated."""
    paper = view.paper
    rows: list[Row] = []
    for engine in view.engines():
        timed = view.epochs_of("time", engine)
        means = timed.groupby("epoch")[["train_accuracy", "test_accuracy", "seconds"]].mean()
        allocated = view.epochs_of("memory", engine).groupby("epoch")["bytes_allocated"].mean()
        for epoch in means.index if len(means) else [None]:
            cells = {name: row_helpers.at(means[name], epoch) for name in means} if epoch is not None else {}
            bytes_allocated = row_helpers.at(allocated, epoch) if epoch is not None else None
            measured = row_helpers.measured(view, engine, "time", "memory")
            rows.append({**measured, "epoch": epoch, **cells, "bytes_allocated": bytes_allocated})
    rows += _reported_epochs(view)
    if any(item.quantity.startswith("resident_growth") for item in paper.reported):
        extra = ["The growth of resident memory that the paper gives for PyTorch is another figure, and left out here."]
    else:
        extra = []
    return row_helpers.table_of(
        view,
        ("epoch", "train_accuracy", "test_accuracy", "seconds", "bytes_allocated"),
        [
            column("epoch", "epoch"),
            column("train accuracy", "train_accuracy", fraction),
            column("test accuracy", "test_accuracy", fraction),
            column("time [s]", "seconds", significant),
            column("allocated", "bytes_allocated", size),
        ],
        rows,
        [
            "Means over the seeds. Time and allocation come from separate runs.",
            *extra,
            *row_helpers.gibibytes_note(paper),
        ],
        "time",
        "memory",
        wide=True,
    )


def _reported_epochs(view: View) -> list[Row]:
    """A row for each system and epoch that the paper reports."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    names = {
        "train_accuracy": "train_accuracy",
        "test_accuracy": "test_accuracy",
        "seconds_by_epoch": "seconds",
        "gibibytes_by_epoch": "bytes_allocated",
    }
    for item in view.paper.reported:
        for epoch, value in enumerate(item.by_epoch if item.quantity in names else [], start=1):
            row = found.setdefault((item.row, epoch), {**row_helpers.as_reported(view.paper, item), "epoch": epoch})
            row[names[item.quantity]] = value * row_helpers.GIB if item.quantity.startswith("gibibytes") else value
    return list(found.values())


def _reported_memory(view: View, names: dict[str, str]) -> list[Row]:
    """A row for each system whose memory the paper reports; `names` are our fields and what its quantities end in."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, what in names.items():
        for item in row_helpers.reported(view.paper, *row_helpers.of_memory(view.paper, what)):
            row = found.setdefault((item.kind, item.row), row_helpers.as_reported(view.paper, item))
            if item.words:
                row |= {f"{name}_words": item.words, "words": item.words}
            else:
                row |= {name: row_helpers.in_bytes(item), f"{name}_about": item.precision == "approximate"}
    return sorted(found.values(), key=lambda row: str(row["kind"] == "measured once"))


# ---------------------------------------------------------------------------------------------------------------------
# Accuracy


@producer
def accuracy(view: View) -> Table:
    """Accuracy on training and test data and the test loss after the last epoch, from the same initial weights."""
    names = ("train_accuracy", "test_accuracy", "test_loss")
    cells = [Cell(name, QUANTITIES[name].label, name, name) for name in names]
    notes = (*row_helpers.seeds_note(view), *_evaluated_note(view))
    return engine_table(view, ("time",), cells, notes)


@producer
def own_accuracy(view: View) -> Table:
    """Test accuracy from shared weights and from each framework's own initialisation, side by side."""
    paper = view.paper
    rows: list[Row] = []
    differs: list[str] = []
    for engine in view.engines():
        shared, own = view.ok("time", engine), native_runs(view, engine)
        measures = ("time", "own") if engine in paper.own else ("time",)
        settings = ", ".join(f"{name.replace('_', ' ')} {item.value}" for name, item in _differing(view, engine))
        if settings:
            differs.append(f"{view.label(engine)}: {settings}")
        rows.append(
            {
                **row_helpers.measured(view, engine, *measures),
                "shared_seeds": len(shared),
                **row_helpers.mean_and_spread("shared_test_accuracy", shared["test_accuracy"]),
                "own_seeds": len(own),
                **row_helpers.mean_and_spread("own_train_accuracy", own["train_accuracy"]),
                **row_helpers.mean_and_spread("own_test_accuracy", own["test_accuracy"]),
                "differs": settings,
            }
        )
    for row in row_helpers.reported_rows(paper, ("train_accuracy", "test_accuracy")):
        cells = {f"own_{name}": row.get(name) for name in ("train_accuracy", "test_accuracy")}
        words = {f"own_{name}_words": row.get(f"{name}_words") for name in ("train_accuracy", "test_accuracy")}
        rows.append({**row, **cells, **words})
    names = ("shared_test_accuracy", "own_train_accuracy", "own_test_accuracy")
    ours = [view.label(name) for name in view.engines() if name in INHERITING and len(view.ok("time", name))]
    return row_helpers.table_of(
        view,
        ("shared_seeds", "own_seeds", *(field for name in names for field in (name, f"{name}_sd")), "differs", "words"),
        [
            row_helpers.accuracy_column("test, shared weights", "shared_test_accuracy"),
            row_helpers.accuracy_column("train, own weights", "own_train_accuracy"),
            row_helpers.accuracy_column("test, own weights", "own_test_accuracy"),
            column("seeds", "own_seeds", lambda count: str(count) if count else MISSING),
        ],
        rows,
        [
            "Own weights: each framework's default initialisation. Mean ± standard deviation over the seeds.",
            *([f"The spec's initialisation counts as that of {', '.join(ours)}: the same runs."] if ours else []),
            *([f"Trained otherwise than the rest, as the paper did: {'; '.join(differs)}."] if differs else []),
            *_evaluated_note(view),
        ],
        "time",
        "own",
        wide=True,
    )


def _differing(view: View, engine: str) -> list[tuple[str, Any]]:
    own = view.paper.own.get(engine)
    return list(own.settings()) if own else []


def _evaluated_note(view: View) -> list[str]:
    rows = view.paper.training.train_evaluation_rows
    return [f"Training accuracy is that of the first {rows.value:,} training rows."] if rows else []


# ---------------------------------------------------------------------------------------------------------------------
# Networks and techniques


@producer
def variants(view: View) -> Table:
    """The paper's network and its variants: accuracy and loss after the last epoch, seconds of an epoch."""
    paper = view.paper
    titles = {variant.id: variant.title for variant in paper.variants}
    rows: list[Row] = []
    for engine in view.engines():
        planned = view.planned(engine, "variants")
        found = view.table("variants", engine)
        if not planned and not len(found) and any(view.planned(name, "variants") for name in view.engines()):
            continue  # this comparison is not planned for all engines
        runs, base = view.ok("time", engine), row_helpers.measured(view, engine, "variants")
        rows.append(
            {
                **base,
                "variant": "",
                "network": "the paper's network",
                "seeds": len(runs),
                **row_helpers.mean_and_spread("train_accuracy", runs["train_accuracy"]),
                **row_helpers.mean_and_spread("test_accuracy", runs["test_accuracy"]),
                **row_helpers.mean_and_spread("epoch_s", runs["later_epoch_seconds"]),
            }
        )
        for name, title in titles.items():
            of = found[found["variant"] == name]
            last, later = of[of["epoch"] == of["epoch"].max()], of[of["epoch"] > 1]
            rows.append(
                {
                    **base,
                    "variant": name,
                    "network": title,
                    "seeds": of["key"].nunique(),
                    **row_helpers.mean_and_spread("train_accuracy", last["train_accuracy"]),
                    **row_helpers.mean_and_spread("test_accuracy", last["test_accuracy"]),
                    **row_helpers.mean_and_spread("epoch_s", later.groupby("key")["seconds"].mean()),
                }
            )
    names = ("train_accuracy", "test_accuracy", "epoch_s")
    return row_helpers.table_of(
        view,
        ("variant", "network", "seeds", *(field for name in names for field in (name, f"{name}_sd"))),
        [
            column("network", "network", align="left"),
            row_helpers.accuracy_column("train accuracy", "train_accuracy"),
            row_helpers.accuracy_column("test accuracy", "test_accuracy"),
            row_helpers.mean_column("epoch [s]", "epoch_s"),
            column("seeds", "seeds", lambda count: str(count) if count else MISSING),
        ],
        rows,
        ["The same data, training and seeds; time is that of an epoch after the first."],
        "variants",
        wide=True,
    )


@producer
def ablation_numpy(view: View) -> Table:
    """What each technique of the numpy engine brings."""
    return _ablation(view, "numpy")


@producer
def ablation_julia(view: View) -> Table:
    """What each technique of the Julia engine brings."""
    return _ablation(view, "julia")


def _ablation(view: View, engine: str) -> Table:
    """Time and bytes with all techniques, without each one, with each one alone, and with none; and the claims."""
    found = view.table("ablation", engine)
    numbers = {
        (row["configuration"], "" if pd.isna(row["technique"]) else row["technique"]): row
        for _, row in found.iterrows()
    }
    base = row_helpers.measured(view, engine, "ablation")
    every, none = numbers.get(("all", "")), numbers.get(("none", ""))
    rows: list[Row] = [
        {**base, "technique": "", "system": "all on", **_cost("without", every, every)},
        {**base, "technique": "", "system": "all off", **_cost("without", none, every), **_cost("alone", none, none)},
    ]
    for name in dict.fromkeys(technique for kind, technique in numbers if kind in ("without", "alone")):
        rows.append(
            {
                **base,
                "technique": name,
                "system": described(name),
                **_cost("without", numbers.get(("without", name)), every),
                **_cost("alone", numbers.get(("alone", name)), none),
            }
        )
    for item in row_helpers.reported(view.paper, "technique_time_saved", "technique_bytes_saved"):
        what = "time" if "time" in item.quantity else "memory"
        stated = item.words or f"saves {percent(item.value)} of the {what}"
        rows.append(
            {**row_helpers.as_reported(view.paper, item), "words": f"{what}: {stated}", "stated_where": item.where}
            | {"system": f"{row_helpers.reported_name(item)}: {stated} ({item.where})"}
        )
    fields = tuple(
        f"{kind}_{what}" for kind in ("without", "alone") for what in ("us", "time_factor", "bytes", "bytes_factor")
    )
    return row_helpers.table_of(
        view,
        ("technique", *fields, "words"),
        [
            column("step [µs]", "without_us", significant),
            column("× all on", "without_time_factor", fixed),
            column("allocated per epoch", "without_bytes", size),
            column("alone [µs]", "alone_us", significant),
            column("× all off", "alone_time_factor", fixed),
            column("allocated per epoch", "alone_bytes", size),
        ],
        rows,
        [
            "Left: all techniques on but the one of the row; a factor above 1 is what it saves. Right: this one alone "
            f"on an engine with all the others off; a factor below 1 is what it saves there. {LETTERS}",
            f"Bytes are those of {STEPS_COUNTED} steps with all threads, scaled up to an epoch: they contain what "
            "OpenBLAS allocates for its threads, and compare techniques with each other alone.",
        ],
        "ablation",
        wide=True,
        only=[engine],
    )


def _cost(kind: str, row: Any, base: Any) -> dict[str, float | None]:
    """A configuration's step and bytes, and their factors to those of a base."""
    if row is None:
        return {}
    cost = {"us": float(row["microseconds_per_step"]), "bytes": row_helpers.or_none(row["bytes_per_epoch"])}
    factors: dict[str, float | None] = {}
    for name, column_ in (("us", "microseconds_per_step"), ("bytes", "bytes_per_epoch")):
        other = None if base is None else row_helpers.or_none(base[column_])
        value = cost[name]
        factor = value / other if value is not None and other else None
        factors["time_factor" if name == "us" else "bytes_factor"] = factor
    return {f"{kind}_{name}": value for name, value in (cost | factors).items()}


# ---------------------------------------------------------------------------------------------------------------------
# What the papers say


@producer
def claims(view: View) -> Table:
    """Every claim of the paper with our verdict and the number behind it."""
    rows: list[Row] = []
    missing: list[tuple[str, str, str]] = []
    for claim in view.paper.claims:
        found = verdicts.examine(claim, view)
        missing += [found.missing] if found.missing else []
        rows.append(
            {
                "kind": "measured",
                "claim": claim.id,
                "text": f"{claim.text} ({claim.where})",
                "verdict": found.verdict,
                "statement": f"not tested: {claim.stands_for} is not run here" if found.in_place else found.verdict,
                "on_ours": found.on_ours,
                "ours": _on_ours(found),
                "time": verdicts.compilation(claim),
                "value": found.value,
                "limits": verdicts.limits(claim),
                "number": found.words,
                "machine": view.machine(["time", "memory", "race", "ablation", "variants"]),
            }
        )
    return Table(
        fields=("claim", "text", "verdict", "on_ours", "time", "value", "limits", "number", "machine"),
        columns=(
            column("claim", "text", align="left"),
            column("the statement", "statement", align="left"),
            column("with ours in its place", "ours", align="left"),
            column("found here", "number", align="left"),
            column("holds when", "limits", align="left"),
        ),
        rows=tuple(rows) or ({"text": "none"},),
        notes=(
            "The verdict follows from the results: a claim holds when the last number found (a value, a ratio or a "
            "difference) lies within the limits. A statement is reproduced only where it holds for the engines that it "
            "names. Machines differ, so that only relations are tested.",
            *row_helpers.told_missing(missing),
        ),
        wide=True,
    )


def _on_ours(found: verdicts.Finding) -> str:
    """Whether a claim holds for our engine in the place of the study's."""
    return f"{found.on_ours} for {found.in_place}" if found.in_place else ""
