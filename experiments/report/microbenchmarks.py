"""The tables of the micro-benchmarks: each function alone and with its gradient, beside what a study cites.

Cited figures have separate rows, under a heading that says so. A system that was not run has a row all the
same, and a note says why.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pandas as pd

from experiments.formats import MISSING, counted, nanoseconds, significant, size
from experiments.microbenchmarks.functions import BENCHMARKS, CHUNKED, SMALL
from experiments.microbenchmarks.measure import FORWARD_MODE
from experiments.microbenchmarks.registry import SYSTEMS
from experiments.papers import Paper
from experiments.quantities import ALL
from experiments.report.row_helpers import or_none, producer
from experiments.report.table import Column, Row, Table, column, empty
from experiments.report.view import View, one_machine, remembered

DEFINITIONS = (
    "SINCOS: sin(cos(x)) of a number. LOOP: r = 1, then 500 times r = r sin(x), at x = 2. LOGSUMEXP: log(sum(exp(x))) "
    "of 1,000 numbers. LOGISTIC REGRESSION: sum(sigmoid(W x + b)), W (10, 784), one x, by W and b. 2-LAYER MNIST MLP: "
    "784 to 32 rectified units to 10, cross-entropy of one image, by all weights. All in double precision."
)
"""Which function each row is: the study does not say."""


# ---------------------------------------------------------------------------------------------------------------------
# Quantities that tables, figures and claims share


@remembered
def medians(view: View, suite: str) -> pd.DataFrame:
    """A row for each system, function, size, chunk and kind of a suite, with the median over the rounds.

    Refuses to mix machines.
    """
    _machine(view, suite)
    rows = _present(view, suite)
    names = ["engine", "benchmark", "size", "chunk", "what"]
    return rows.groupby(names, as_index=False, sort=False)[["nanoseconds", "bytes"]].median()


def time_of(rows: pd.DataFrame, engine: str, benchmark: str, what: str, chunk: int = 0) -> float | None:
    """Nanoseconds of a call, from `medians`; None where there is none."""
    found = rows[
        (rows["engine"] == engine)
        & (rows["benchmark"] == benchmark)
        & (rows["what"] == what)
        & (rows["chunk"] == chunk)
    ]
    return or_none(found["nanoseconds"].iloc[-1]) if len(found) else None


def gradient_time(view: View, engine: str, of: str) -> float | None:
    """Nanoseconds of the gradient of a small function, or the geometric mean over all of them."""
    rows = medians(view, "gradients")
    return _mean([time_of(rows, engine, name, "gradient") for name in (SMALL if of == ALL else (of,))])


def gradient_to_forward(view: View, engine: str, of: str) -> float | None:
    """How many times as long as the function alone its gradient takes; of all: the geometric mean."""
    rows = medians(view, "gradients")
    return _mean([_ratio(rows, engine, name) for name in (SMALL if of == ALL else (of,))])


def chunked_time(view: View, engine: str, of: str) -> float | None:
    """Nanoseconds of a gradient in forward mode, as the geometric mean over the chunk sizes, and over the functions."""
    rows = medians(view, "chunks")
    chunks = sorted(chunk for chunk in rows["chunk"].unique() if chunk)
    names = CHUNKED if of == ALL else (of,)
    return _mean([time_of(rows, engine, name, "gradient", chunk) for name in names for chunk in chunks])


def chunk_ratios(view: View, engine: str, other: str) -> list[float]:
    """A system's time of a gradient divided by another's, for every function and chunk size that both have."""
    rows = medians(view, "chunks")
    times = [
        [time_of(rows, system, name, "gradient", chunk) for system in (engine, other)]
        for name in CHUNKED
        for chunk in sorted(rows["chunk"].unique())
        if chunk
    ]
    return [own / base for own, base in times if own and base]


def systems(view: View, suite: str) -> list[str]:
    """The systems of a suite in the order of the paper's file: measured, planned, or only known to be missing."""
    given = view.paper.microbenchmarks
    named = given.systems.value if given else []
    found = view.tables["microbenchmarks"].loc[view.tables["microbenchmarks"]["suite"] == suite, "engine"]
    planned = [name for name in named if name in SYSTEMS and suite in SYSTEMS[name].suites]
    return planned + sorted(set(found) - set(planned))


def cited(paper: Paper, table: str) -> dict[str, dict[str, float | None]]:
    """What the study cites: column -> row -> seconds."""
    found: dict[str, dict[str, float | None]] = {}
    for item in paper.cited:
        if item.table == table:
            found.setdefault(item.column, {})[item.row] = item.value
    return found


def _mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean; None where a value is missing."""
    known = list(values)
    logs = [math.log(value) for value in known if value]
    return math.exp(sum(logs) / len(logs)) if logs and len(logs) == len(known) else None


def _ratio(rows: pd.DataFrame, engine: str, name: str) -> float | None:
    forward, gradient = (time_of(rows, engine, name, what) for what in ("forward", "gradient"))
    return gradient / forward if forward and gradient else None


# ---------------------------------------------------------------------------------------------------------------------
# Tables


@producer
def micro_gradients(view: View) -> Table:
    """Small functions: the forward pass alone, the gradient, and their ratio, for every system."""
    found = [_measured(view, "gradients", name, SMALL) for name in systems(view, "gradients")]
    reported = cited(view.paper, "gradients")
    forward = reported.get("Forward", {})
    for system, times in reported.items():
        row: dict[str, Any] = {"kind": "cited", "system": system, "group": "Cited by the paper, from another machine"}
        for name in SMALL:
            title = BENCHMARKS[name].title
            what = "forward" if system == "Forward" else "gradient"
            row |= _cells(name, **{what: _nanoseconds(times.get(title)), "base": _nanoseconds(forward.get(title))})
        found.append(row | ({"system": "plain Julia, forward alone"} if system == "Forward" else {}))
    return _table_of_functions(
        view,
        "gradients",
        SMALL,
        found,
        [
            "Forward pass alone · gradient, which contains a forward pass (their ratio): median times of a call over "
            "the rounds. A cited gradient's ratio is that to the cited forward pass.",
            DEFINITIONS,
        ],
    )


@producer
def micro_ratios(view: View) -> Table:
    """The same functions on arrays of 10,000 elements or more: gradients beside forward passes."""
    rows = medians(view, "arrays")
    names = [name for name in BENCHMARKS if name in set(rows["benchmark"])] or list(BENCHMARKS)
    sizes = {name: rows.loc[rows["benchmark"] == name, "size"].max() for name in names}
    found = [_measured(view, "arrays", name, names) for name in systems(view, "arrays")]
    told = ", ".join(
        f"{BENCHMARKS[name].title} {int(number):,}" for name, number in sizes.items() if not pd.isna(number)
    )
    return _table_of_functions(
        view,
        "arrays",
        names,
        found,
        [
            "Forward pass alone · gradient (their ratio). SINCOS and LOOP are applied to each element and summed; the "
            "networks read many rows at once.",
            *([f"Elements, or rows of the networks: {told}."] if told else []),
        ],
    )


@producer
def micro_chunks(view: View) -> Table:
    """Rosenbrock's and Ackley's gradients by chunk size in forward mode, in reverse mode, and the function alone."""
    rows = medians(view, "chunks")
    reported = cited(view.paper, "forward-mode")
    chunks = sorted({int(chunk) for chunk in rows["chunk"] if chunk} | {int(row) for row in reported.get("C++", {})})
    machine = _machine(view, "chunks")
    found: list[Row] = []
    for name in CHUNKED:
        here = rows[rows["benchmark"] == name]
        inputs = f" of {int(here['size'].iloc[0]):,} inputs" if len(here) else ""
        for system in systems(view, "chunks"):
            row = _measured(view, "chunks", system)
            row["function"] = BENCHMARKS[name].title
            row["group"] = f"{BENCHMARKS[name].title}{inputs}, measured here" + (f", {machine}" if machine else "")
            row |= {f"chunk_{chunk}_ns": time_of(here, system, name, "gradient", chunk) for chunk in chunks}
            row["forward_ns"] = time_of(here, system, name, "forward")
            if system not in FORWARD_MODE:
                row["reverse_ns"] = time_of(here, system, name, "gradient")
                row["ratio"] = _ratio(here, system, name)
            found.append(row)
    for system, times in reported.items():
        group = "Cited by the paper for both functions, from another machine"
        cells = {f"chunk_{chunk}_ns": _nanoseconds(times.get(str(chunk))) for chunk in chunks}
        found.append({"kind": "cited", "system": system, "group": group, **cells})
    fields = [*(f"chunk_{chunk}_ns" for chunk in chunks), "reverse_ns", "forward_ns", "ratio"]
    return _table(
        view,
        "chunks",
        [
            *(column(f"N = {chunk}", f"chunk_{chunk}_ns", nanoseconds) for chunk in chunks),
            column("reverse", "reverse_ns", nanoseconds),
            column("function alone", "forward_ns", nanoseconds),
            column("reverse / alone", "ratio", significant),
        ],
        ["function", *fields],
        found,
        [
            "The time of one gradient in forward mode with N partials at once, in reverse mode (for the hand-written "
            "programs: by hand), and of the function alone. C++ is compiled with full optimisation for this processor; "
            "it keeps the order of sums, which Julia's compiler is allowed to change in Rosenbrock's function (@simd).",
        ],
    )


@producer
def micro_memory(view: View) -> Table:
    """Bytes at the peak of a gradient through a loop, by its length: all steps kept, and checkpointed."""
    rows = medians(view, "memory")
    machine = _machine(view, "memory")
    found: list[Row] = []
    for length in sorted(rows["size"].unique()):
        of = rows[rows["size"] == length].set_index("what")["bytes"]
        plain, checkpointed = (or_none(of.get(what)) for what in ("plain", "checkpointed"))
        found.append(
            {
                "kind": "measured",
                "machine": machine,
                "system": f"{int(length):,}",
                "group": f"{view.label('numpy-compiled')}, measured here, {machine}",
                "length": int(length),
                "plain_bytes": plain,
                "checkpointed_bytes": checkpointed,
                "share": checkpointed / plain if plain and checkpointed else None,
            }
        )
    return _table(
        view,
        "memory",
        [
            column("all steps kept", "plain_bytes", size),
            column("checkpointed", "checkpointed_bytes", size),
            column("share", "share", significant),
        ],
        ["length", "plain_bytes", "checkpointed_bytes", "share"],
        found,
        ["The peak of the bytes in use, above those before, while a recurrence of that many steps is differentiated."],
        first="steps",
        wide=False,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Parts


def _table(
    view: View,
    suite: str,
    columns: Iterable[Column],
    fields: Iterable[str],
    rows: Sequence[Row],
    notes: Iterable[str],
    first: str = "",
    wide: bool = True,
) -> Table:
    return Table(
        fields=("kind", "machine", "engine", "system", *fields, "missing"),
        columns=(column(first, "system", align="left"), *columns),
        rows=tuple(rows) or ({"kind": "measured", "system": "none", "group": "Measured here: nothing yet"},),
        notes=(*notes, *_setting_notes(view, suite), *missing_notes(view, suite)),
        wide=wide,
    )


def _table_of_functions(
    view: View, suite: str, names: Collection[str], rows: Sequence[Row], notes: Iterable[str]
) -> Table:
    """A table of rows from `_measured` and `_cells`, with a column for each function."""
    fields = [field for name in names for field in _cells(name)]
    return _table(view, suite, [_both(BENCHMARKS[name].title, name) for name in names], fields, rows, notes)


def _setting_notes(view: View, suite: str) -> list[str]:
    """Threads, rounds and profile."""
    rows = _present(view, suite)
    if not len(rows):
        return []
    profile, threads = rows["profile"].iloc[0], int(rows["threads"].iloc[0])
    rounds, *by_chunk = (int(part["round"].max()) for _, part in rows.groupby(rows["chunk"] > 0))
    counts = counted(rounds, "round")
    if by_chunk and by_chunk != [rounds]:
        counts += f" ({by_chunk[0]} by chunk size)"
    counts += f", {counted(threads, 'thread')}"
    fewer = "" if profile == "full" else f"; profile {profile}, which measures less than the paper did"
    if suite == "memory":
        return [f"Profile {profile}."] if fewer else []
    return [f"{counts}; systems alternate in every round, each in its own process{fewer}."]


def missing_notes(view: View, suite: str) -> list[str]:
    """One note per reason, naming the systems that it holds for, and the functions where it is not about all."""
    reasons: dict[str, list[str]] = {}
    for name in systems(view, suite):
        whole = _why(view, suite, name)
        if whole:
            reasons.setdefault(whole, []).append(view.label(name))
            continue
        rows = view.tables["microbenchmarks"][
            (view.tables["microbenchmarks"]["suite"] == suite) & (view.tables["microbenchmarks"]["engine"] == name)
        ]
        for reason, part in rows[rows["missing"].notna()].groupby("missing"):
            titles = dict.fromkeys(BENCHMARKS[item].title for item in part["benchmark"] if item in BENCHMARKS)
            reasons.setdefault(str(reason), []).append(f"{view.label(name)} ({', '.join(titles)})")
    return [f"Missing: {', '.join(names)}: {reason.removesuffix('.')}." for reason, names in reasons.items()]


def missing_systems(view: View) -> list[tuple[str, str]]:
    """The systems of the paper's file that have no number at all, by their labels, with the reason."""
    named = view.paper.microbenchmarks.systems.value if view.paper.microbenchmarks else []
    found = []
    for name in named:
        reasons = [_why(view, suite, name) for suite in SYSTEMS[name].suites]
        if all(reasons):
            found.append((view.label(name), reasons[0]))
    return found


def _why(view: View, suite: str, name: str) -> str:
    """Why a system has no number in a suite; empty when it has."""
    rows = view.tables["microbenchmarks"][
        (view.tables["microbenchmarks"]["suite"] == suite) & (view.tables["microbenchmarks"]["engine"] == name)
    ]
    if rows["missing"].isna().any():
        return ""
    if len(rows):
        return str(rows["missing"].iloc[-1]).partition("\n")[0]
    given = view.paper.microbenchmarks
    if given and len(view.tables["microbenchmarks"]):
        profile = view.tables["microbenchmarks"]["profile"].iloc[-1]
        few = given.profile(profile).systems
        if few and name not in few.value:
            return f"not planned in profile {profile}"
    return "not run"


def _measured(view: View, suite: str, system: str, names: Iterable[str] = ()) -> dict[str, Any]:
    """A system's row, with what was measured of functions."""
    rows, machine = medians(view, suite), _machine(view, suite)
    row: dict[str, Any] = {
        "kind": "measured",
        "machine": machine,
        "engine": system,
        "system": view.label(system),
        "group": f"Measured here, {machine}" if machine else "Measured here: nothing yet",
        "missing": _why(view, suite, system),
    }
    for name in names:
        forward, gradient = (time_of(rows, system, name, what) for what in ("forward", "gradient"))
        row |= _cells(name, forward=forward, gradient=gradient, base=forward)
    return row


def _cells(
    name: str, forward: float | None = None, gradient: float | None = None, base: float | None = None
) -> dict[str, Any]:
    ratio = gradient / base if gradient and base else None
    return {f"{name}_forward_ns": forward, f"{name}_gradient_ns": gradient, f"{name}_ratio": ratio}


def _both(header: str, name: str) -> Column:
    """Forward pass · gradient (ratio)."""

    def text(row: Row) -> str:
        cells = [row.get(f"{name}_{field}") for field in ("forward_ns", "gradient_ns", "ratio")]
        times = " · ".join(nanoseconds(float(value)) for value in cells[:2] if value is not None and not empty(value))
        return (times or MISSING) + ("" if cells[2] is None else f" ({significant(float(cells[2]), 2)})")

    return Column(header, text)


@remembered
def _present(view: View, suite: str) -> pd.DataFrame:
    """The rows of a suite but for those that say what is missing."""
    return view.tables["microbenchmarks"][
        (view.tables["microbenchmarks"]["suite"] == suite) & view.tables["microbenchmarks"]["missing"].isna()
    ]


@remembered
def _machine(view: View, suite: str) -> str:
    """The CPU model of a suite; MixedMachinesError where there are several."""
    return one_machine(_present(view, suite)["machine"], f"the micro-benchmarks of {view.paper.key}")


def _nanoseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e9
