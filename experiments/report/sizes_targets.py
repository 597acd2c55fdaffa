"""Start-up, memory and threads of the study of several sizes beside their targets, and the inputs of its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.libjulia.juliacall import OLDEST
from bridge.libjulia.runtime import EMBEDDED, JULIACALL
from experiments.formats import MISSING, fixed, percent, significant, size
from experiments.measures.sizes import RATES
from experiments.report import row_helpers
from experiments.report.row_helpers import REFERENCE, producer
from experiments.report.sizes import MARKS, TARGETS, origin, points, table_of_points, with_names
from experiments.report.table import Column, Row, Table, column, empty
from experiments.report.view import View, remembered, with_image
from experiments.testing import of_median

START_SECONDS = {"numpy": 0.3}
"""Seconds of start-up that an engine is to take at most."""
JULIA_START_SECONDS = {EMBEDDED: 1.5, JULIACALL: 2.0}
"""The same of the Julia engine, by the backend through which Julia is reached from Python."""
SLOWER = 1.03
"""How many times the step of one thread a step of several threads may take."""
MEASURE = "sizes"


@remembered
def engines_of(view: View) -> list[str]:
    """The engines that have rows in the study, in the order of its file."""
    return [name for name in view.engines() if (view.table(MEASURE)["engine"] == name).any()]


# ---------------------------------------------------------------------------------------------------------------------
# Start-up


@remembered
def julia_backend(view: View, measure: str = MEASURE) -> str | None:
    """How Julia was reached from Python, where all records that say it say the same.

    Older records do not; there it is embedded where Julia's version is too old for juliacall.
    """
    versions = view.ok(measure, "julia")["framework_version"].dropna()
    recorded = versions.str.extract(r"(?:^| )backend (\w+)")[0].dropna().unique()
    if len(recorded):
        return str(recorded[0]) if len(recorded) == 1 else None
    found = versions.str.extract(r"julia (\d+)\.(\d+)\.(\d+)").dropna()
    old = [tuple(map(int, version)) < OLDEST for version in found.itertuples(index=False)]
    return EMBEDDED if old and all(old) else None


def start_targets(view: View, measure: str = MEASURE) -> dict[str, float]:
    """The seconds of start-up that each engine of ours is to take at most; of several that may hold, the fewest."""
    backend = julia_backend(view, measure)
    of_julia = JULIA_START_SECONDS.get(backend or "", min(JULIA_START_SECONDS.values()))
    return START_SECONDS | {"julia": of_julia}


def start_rows(view: View) -> list[Row]:
    """Start-up of every engine at each point, where its process is new with the seconds of its import."""
    rows: list[Row] = []
    for about, of_engines, steps in points(view):
        row = {**about, **origin(view)}
        for engine in engines_of(view):
            if engine in of_engines and engine in steps:
                one = of_engines[engine]
                row[f"{engine}_start_s"] = row_helpers.or_none(one["start_seconds"] - steps[engine].median() / 1e6)
                row[f"{engine}_fresh"] = bool(one["first"] == 1)
                if row[f"{engine}_fresh"]:
                    row[f"{engine}_import_s"] = row_helpers.or_none(one["import_seconds"])
        rows.append(row)
    return rows


def start_counts(view: View, rows: Sequence[Row], engine: str, fresh: bool) -> tuple[int, int]:
    """How many start-ups of an engine, in new processes or in others, are within its target, and of how many."""
    known = [row for row in rows if row.get(f"{engine}_fresh") is fresh and not empty(row[f"{engine}_start_s"])]
    return sum(row[f"{engine}_start_s"] <= start_targets(view)[engine] for row in known), len(known)


@producer
def sizes_start(view: View) -> Table:
    """Start-up of every engine at every size, beside the targets of ours."""
    engines, targets, rows = engines_of(view), start_targets(view), start_rows(view)

    def cell(engine: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            start = row.get(f"{engine}_start_s")
            if start is None or empty(start):
                return MISSING
            imported = f" ({_or_dash(row.get(f'{engine}_import_s'))})" if row[f"{engine}_fresh"] else ""
            return significant(start) + imported + (" ×" if start > targets.get(engine, np.inf) else "")

        return text

    counts = []
    for engine in targets:
        parts = []
        for fresh, where in ((True, "a new process"), (False, "a process that has trained before")):
            within, count = start_counts(view, rows, engine, fresh)
            if count:
                parts.append(f"{within} of {count} in {where}")
        if parts:
            counts.append(
                f"{view.label(engine)}, within {significant(targets[engine], trim=True)} s: {', '.join(parts)}."
            )
    below = any(row.get(f"{engine}_start_s", 0) < 0 for row in rows for engine in engines)
    return table_of_points(
        view,
        tuple(f"{engine}_{name}" for engine in engines for name in ("start_s", "import_s", "fresh")),
        [Column(_with_target(view, engine, targets), cell(engine)) for engine in engines],
        rows,
        [
            "Start-up in seconds: `build` and the first step less the median step. With brackets: in a new process, at "
            "the first mini-batch that the engine trains; in them the seconds before, of importing the engine and "
            "starting its runtime (numpy, the bridge and with it our numpy engine are there in every process). "
            "Without: the process has trained smaller mini-batches before, so that code is compiled and memory is at "
            "hand. The later steps in which our engines compare ways to use threads belong neither to start-up nor to "
            "the steps that are timed.",
            *(["Below zero the first step and `build` took less than the median step."] if below else []),
            "× marks a start-up above the target of an engine of ours, which the heading has.",
            *counts,
            *julia_notes(view),
            *row_helpers.compilation_notes(view, MEASURE, engines),
            *(
                ["Where the records do not say how Julia was reached, the lower of its two targets holds."]
                if "julia" in engines and julia_backend(view) is None
                else []
            ),
        ],
    )


def _or_dash(value: Any) -> str:
    return MISSING if empty(value) else significant(value)


def _with_target(view: View, engine: str, targets: dict[str, float]) -> str:
    """The heading of an engine's column, with its target."""
    label = view.label(engine)
    return f"{label}, ≤ {significant(targets[engine], trim=True)}" if engine in targets else label


def julia_notes(view: View, measure: str = MEASURE) -> list[str]:
    """How Julia was reached from Python and whether it started from a system image, as far as the records say."""
    runs = view.ok(measure, "julia")
    if not len(runs):
        return []
    backend = julia_backend(view, measure)
    versions = row_helpers.distinct(
        runs["framework_version"].dropna().str.replace(r"^julia | (?:backend|sysimage) .*", "", regex=True)
    )
    said = {EMBEDDED: "embedded in Python's process", JULIACALL: "by juliacall"}.get(
        backend or "", "embedded or by juliacall, which the records do not say"
    )
    image = with_image(runs)
    with_it = "started from a system image" if image.all() else "started without a system image"
    if image.any() and not image.all():
        with_it = "started from a system image in some runs only"
    return [f"{view.label('julia')}: Julia {versions}, {said}, {with_it}."]


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def memory_rows(view: View) -> list[Row]:
    """Peak memory of every engine at each point, over the level before `build` and whole, and our ratios to PyTorch."""
    rows: list[Row] = []
    for about, of_engines, _ in points(view):
        row = {**about, **origin(view)}
        for engine in engines_of(view):
            if engine in of_engines:
                one = of_engines[engine]
                row[f"{engine}_memory_bytes"] = row_helpers.or_none(one["memory_bytes"])
                row[f"{engine}_peak_bytes"] = row_helpers.or_none(one["memory_bytes"] + one["level_bytes"])
        for engine in TARGETS:
            for name in ("memory", "peak"):
                ours, other = row.get(f"{engine}_{name}_bytes"), row.get(f"{REFERENCE}_{name}_bytes")
                if ours is not None and other:
                    row[f"{engine}_{name}_ratio"] = ours / other
        rows.append(row)
    return rows


@producer
def sizes_memory(view: View) -> Table:
    """Peak memory of every engine at every size, and the ratio of ours to PyTorch's."""
    engines, rows = engines_of(view), memory_rows(view)

    def cell(engine: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            memory, peak = (row.get(f"{engine}_{name}_bytes") for name in ("memory", "peak"))
            return MISSING if empty(memory) else f"{size(memory)} ({size(peak)})"

        return text

    columns: list[Column] = []
    for engine in engines:
        columns.append(Column(view.label(engine), cell(engine)))
        if engine in TARGETS:
            columns.append(Column("ratio", _marked(f"{engine}_memory_ratio", 1.0)))
    notes = []
    for engine in TARGETS:
        said = []
        for name, what in (("memory", "over the level"), ("peak", "of the whole process")):
            known = [row[f"{engine}_{name}_ratio"] for row in rows if f"{engine}_{name}_ratio" in row]
            if known:
                within = f"{sum(ratio <= 1 for ratio in known)} of {len(known)} rows"
                said.append(f"{what} in {within}, the largest ratio {fixed(max(known))}")
        if said:
            notes.append(f"{view.label(engine)}, peak at most PyTorch's: {'; '.join(said)}.")
    return table_of_points(
        view,
        (
            *(f"{engine}_{name}_bytes" for engine in engines for name in ("memory", "peak")),
            *(f"{engine}_{name}_ratio" for engine in TARGETS for name in ("memory", "peak")),
        ),
        columns,
        rows,
        [
            "Memory: the peak resident from `build` to steady steps, over the level before the first `build`; in "
            "brackets the peak of the whole process. A process trains its mini-batches one after the other, the "
            "smallest first, and frees what one needed before the next. Ratio: of the peak over the level to "
            "PyTorch's; × marks one above 1. What a step allocates is not in it: the measure `memory` of the other "
            "studies counts that.",
            *notes,
            *_copies_note(view, rows),
            *julia_notes(view),
        ],
    )


def _copies_note(view: View, rows: Sequence[Row]) -> list[str]:
    """Which engines' memory over the level contains a copy of the data."""
    copying = [name for name in engines_of(view) if name in row_helpers.COPYING]
    names = [view.label(name) for name in copying if any(not empty(row.get(f"{name}_memory_bytes")) for row in rows)]
    if not names:
        return []
    return [
        f"The memory of {', '.join(names)} contains the framework's own copy of the data, which it trains on; the "
        "arrays that were read are in the level of every engine."
    ]


def _marked(name: str, most: float) -> Callable[[Row], str]:
    """The cell of a ratio, with a mark where it is above `most`."""

    def text(row: Row) -> str:
        value = row.get(name)
        return MISSING if value is None or empty(value) else fixed(value) + (" ×" if value > most else "")

    return text


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def thread_rows(view: View) -> list[Row]:
    """The steps with several threads and with one, which alternated, and the median of their ratios, with interval."""
    every = with_names(view.table("split"))
    rows: list[Row] = []
    for family in view.paper.families:
        for name in family.sizes:
            of_network = every[(every["family"] == family.id) & (every["size"] == name)]
            for (threads, batch), of_point in of_network.groupby(["threads", "batch"]):
                row: dict[str, Any] = {
                    "family": family.title,
                    "size": name,
                    "batch": int(batch),
                    "threads": int(threads),
                }
                row |= {"group": f"{family.title}, by {family.over}", "kind": "measured"}
                row |= {"machine": view.machine(["split"]), "data": view.data_source}
                for engine in TARGETS:
                    rounds = of_point[of_point["engine"] == engine]
                    if not len(rounds):
                        continue
                    ratios = rounds["microseconds_per_step"] / rounds["one_thread_microseconds"]
                    low, high = of_median([*ratios]) or (None, None)
                    use = rounds["threads_in_step"].iloc[0]
                    found = {
                        "several_us": float(rounds["microseconds_per_step"].median()),
                        "one_us": float(rounds["one_thread_microseconds"].median()),
                        "ratio": float(ratios.median()),
                        "ratio_low": low,
                        "ratio_high": high,
                        "use": "" if empty(use) else use,
                        "slower": _is_slower(ratios.median(), low),
                    }
                    row |= {f"{engine}_{name}": value for name, value in found.items()}
                rows.append(row)
    return rows


def _is_slower(median: float, low: float | None) -> bool | None:
    """Whether a ratio is above `SLOWER`; None where the rounds are too few to say, or its interval has values below."""
    if median <= SLOWER:
        return None if low is None else False
    return True if low is not None and low > SLOWER else None


@producer
def sizes_threads(view: View) -> Table:
    """The step of our engines with several threads over that with one."""
    rows = thread_rows(view)

    def ratio(engine: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            if f"{engine}_ratio" not in row:
                return MISSING
            low, high = (row[f"{engine}_ratio_{end}"] for end in ("low", "high"))
            interval = "" if low is None else f" [{fixed(low)}, {fixed(high)}]"
            slower = row[f"{engine}_slower"]
            return fixed(row[f"{engine}_ratio"]) + interval + MARKS[None if slower is None else not slower]

        return text

    columns: list[Column] = []
    for engine in TARGETS:
        label = view.label(engine).removeprefix("TwinGrad ")
        columns += [
            column(f"{label} [µs]", f"{engine}_several_us", significant),
            column("one thread [µs]", f"{engine}_one_us", significant),
            Column("ratio", ratio(engine)),
            column("its threads", f"{engine}_use", align="left"),
        ]
    notes = []
    for engine in TARGETS:
        known = [row for row in rows if f"{engine}_ratio" in row]
        if known:
            slower = [row[f"{engine}_slower"] for row in known]
            undecided = f", {slower.count(None)} undecided" if None in slower else ""
            notes.append(
                f"{view.label(engine)}: slower by more than that in {slower.count(True)} of {len(known)} rows"
                f"{undecided}."
            )
    per_engine = ("several_us", "one_us", "ratio", "ratio_low", "ratio_high", "use", "slower")
    return table_of_points(
        view,
        tuple(f"{engine}_{name}" for engine in TARGETS for name in per_engine),
        columns,
        rows,
        [
            "A process with several threads and one with a single thread alternated: the median steps, and the median "
            "of their ratios in the same round, with its confidence interval. Its threads: what a step uses of them. "
            "× marks a step that is slower than with one thread by more than "
            f"{percent(SLOWER - 1)}, by the lower end of the interval; ? one whose median alone is "
            "above that, or that was in too few rounds to say.",
            *notes,
        ]
        if rows
        else ["Not run: make sizes runs it."],
        measure="split",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Limits


@producer
def sizes_limits(view: View) -> Table:
    """The limit of a step at every size, what sets it, and the work and the rates that it follows from."""
    every = view.table(MEASURE)
    recorded = all(name in every for name in RATES) and every[list(RATES)].notna().all(axis=1).any()
    networks: dict[tuple[Any, ...], dict[str, Any]] = {}
    for about, of_engines, _ in points(view):
        limited = (row for row in of_engines.values() if not empty(row["limit_microseconds"]))
        if (one := next(limited, None)) is None:
            continue
        key = (about["threads"], about["family"], about["size"])
        row = networks.setdefault(key, {**about, **origin(view)})
        row[f"limit_us_{about['batch']}"] = float(one["limit_microseconds"])
        row[f"limited_by_{about['batch']}"] = one["limited_by"]
        if recorded and "products_flops" not in row:
            row |= {name: row_helpers.or_none(one[name]) for name in RATES}
            row["products_flops"] /= about["batch"]
    rows = [row for row in networks.values()]
    batches = sorted({int(name.rpartition("_")[2]) for row in rows for name in row if name.startswith("limit_us_")})

    def cell(batch: int) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            value = row.get(f"limit_us_{batch}")
            return MISSING if empty(value) else f"{significant(value)}, {row[f'limited_by_{batch}']}"

        return text

    inputs = [
        column("products of a sample [million]", "products_flops", lambda value: significant(value / 1e6)),
        column("products [billion/s]", "flops_per_second", lambda value: significant(value / 1e9)),
        column("moved", "moved_bytes", size),
        column("memory", "bytes_per_second", lambda value: f"{size(value)}/s"),
    ]
    return Table(
        fields=(
            *("kind", "machine", "data", "family", "size", "threads"),
            *(f"{name}_{batch}" for batch in batches for name in ("limit_us", "limited_by")),
            *(RATES if recorded else ()),
        ),
        columns=(
            column("size", "size", align="left"),
            column("threads", "threads", lambda value: str(int(value))),
            *(Column(f"batch {batch} [µs]", cell(batch)) for batch in batches),
            *(inputs if recorded else ()),
        ),
        rows=tuple(rows),
        notes=(
            "The limit of a step is the longer of two times, plus one call: that of its products at the highest rate "
            "of this machine, and that of moving the parameters, the optimizer's state and the mini-batch (no "
            "rows of an embedding that may be updated later) at the highest bandwidth that was measured of arrays as "
            "large, rounded down, or larger. Products with rows that are looked up in a table are not counted, so that "
            "the limit of a text network is low. Beside each limit is which of the two it is. A step "
            "may take less where an engine puts off the update of an embedding's rows that a mini-batch does not look "
            "up.",
            "Products: multiplications and additions of a sample, and the rate. Moved: the bytes of a step with the "
            "smallest mini-batch, and the bandwidth. Each rate is the best of two measurements, before and after a "
            "run, or of up to four where an op was faster than the first two."
            if recorded
            else "The raw records have the work and the rates that each limit follows from (`limits`); the tidy table "
            "does not.",
        )
        if rows
        else ("No limit was measured; make sizes does.",),
        wide=True,
    )
