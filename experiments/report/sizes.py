"""Tables and the figure of the study of several sizes: our engines beside the best peer and the machine's limit.

The best peer of a network, a size of mini-batch and a number of threads is the framework with the least median step. A
step of ours is held against a bound: the larger of its `TARGETS` share of the peer's step in the same round and `ROOM`
times the machine's limit. It is within it unless the lower end of the interval of 95 % of the median over the rounds of
step / bound is above 1. Where the peer was in fewer than `ROUNDS` rounds with it, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from experiments.formats import MISSING, counted, fixed, power_of_ten, scientific, share, significant
from experiments.measures.sizes import COMPILED, KERNELS, MOST_DEVIATION, PEERS, SLOW, as_kernels, as_text, gain
from experiments.report import figures as drawing
from experiments.report import row_helpers, style
from experiments.report.comparisons import LETTERS, described
from experiments.report.figures import NotDrawnError
from experiments.report.row_helpers import REFERENCE, producer
from experiments.report.style import PAGE
from experiments.report.table import Column, Row, Table, column, empty
from experiments.report.view import View, remembered, whole
from experiments.testing import of_median

TARGETS = {"numpy": 1.0, "julia": 0.8}
"""Our engines, and which share of the best peer's step theirs is to take at most."""
ROOM = 1.1
"""How many times the limit a step may take however fast the peers are."""
ROUNDS = 20
"""Of an engine and the best peer together, that a verdict needs."""
OF_KERNEL = ("kernel_limit_share", "rest_share")
STEP = ("step_us", "step_low_us", "step_high_us")
"""The median step of an engine, and its quartiles."""
POINT = ["threads", "family", "size", "batch"]
AT_LIMIT = "at its limit"
MARKS = {True: "", False: " ×", None: " ?"}
"""Of a step within its bound, above it, and one of which nothing can be said."""
ALL_ON = "all on"
"""In place of a technique, in the row that shows how far apart the steps with all techniques are."""
NONE_OFF = {ALL_ON: "none: longest over shortest"}
ACROSS = 4
"""Panels side by side."""


def with_names(every: pd.DataFrame) -> pd.DataFrame:
    """A table whose sizes are the names that the paper's file gives them."""
    return every.assign(size=every["size"].map(whole))


@remembered
def points(view: View) -> list[tuple[dict[str, Any], dict[str, Row], pd.DataFrame]]:
    """Each network, size of mini-batch and number of threads: what it is, what is known of each engine that took part
    (its row of the first round), and the steps by round and engine.

    In the order of the paper's file, the most threads first.
    """
    every = with_names(view.table("sizes"))
    families = {family.id: family for family in view.paper.families}
    networks = [(family.id, name) for family in view.paper.families for name in family.sizes]
    place = {network: number for number, network in enumerate(networks)}
    found = []
    for (threads, family, size, batch), rows in every.groupby(POINT):
        if (family, size) in place:
            timed = rows.dropna(subset=["microseconds_per_step"])
            steps = timed.pivot(index="round", columns="engine", values="microseconds_per_step")
            about = {"threads": threads, "family": families[family].title, "size": size, "batch": int(batch)}
            about["group"] = f"{families[family].title}, by {families[family].over}"
            order = (-threads, place[family, size], batch)
            of_engines = rows.drop_duplicates("engine").set_index("engine").to_dict("index")
            found.append((order, (about, of_engines, steps)))
    return [point for _, point in sorted(found, key=lambda one: one[0])]


def limit_of(of_engines: dict[str, Row]) -> float:
    """The limit of a step at a point, in microseconds; NaN where none was computed."""
    return float(pd.Series([row["limit_microseconds"] for row in of_engines.values()], dtype=float).median())


def judged(of_engines: dict[str, Row], steps: pd.DataFrame, engine: str) -> dict[str, Any]:
    """An engine of ours at a point: its step, the ratio to the best peer, and whether it is within its bound."""
    limit = limit_of(of_engines)
    medians = {name: float(steps[name].median()) for name in (engine, *PEERS) if name in steps}
    peer = min((name for name in PEERS if name in medians), key=lambda name: medians[name], default=None)
    found: dict[str, Any] = {"limit_us": row_helpers.or_none(limit), "peer": peer}
    found["peer_us"] = medians[peer] if peer else None
    if engine not in medians:
        return found
    of_engine = of_engines[engine]
    found |= {name: of_engine[name] for name in ("kernel", "kernel_share", "kernels", *OF_KERNEL, "threads_in_step")}
    found["fastest_us"] = float(steps[engine].min())
    found |= {"step_us": medians[engine], "limit_share": row_helpers.or_none(limit / medians[engine])}
    if peer:
        ratios = (steps[engine] / steps[peer]).dropna()
        bound = (TARGETS[engine] * steps[peer]).clip(lower=0 if np.isnan(limit) else ROOM * limit)
        quotients = (steps[engine] / bound).dropna()
        to_bound = of_median(quotients)
        ends = of_median(ratios) or (None, None)
        found |= {"ratio": float(ratios.median()), "ratio_low": ends[0], "ratio_high": ends[1]}
        found["within"] = bool(to_bound[0] <= 1) if len(ratios) >= ROUNDS and to_bound is not None else None
        found["to_bound"] = row_helpers.or_none(quotients.median())
    return found


@remembered
def verdicts(view: View) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """What each of the points is, and how each engine of ours is judged there."""
    return [
        (about, {engine: judged(of_engines, steps, engine) for engine in TARGETS})
        for about, of_engines, steps in points(view)
    ]


@producer
def sizes(view: View) -> Table:
    """The step of our engines at every size: beside the best peer's, and its share of the limit."""
    rows: list[Row] = []
    for (about, found), (_, _, steps) in zip(verdicts(view), points(view), strict=True):
        cells = {f"{engine}_{name}": value for engine, one in found.items() for name, value in one.items()}
        first = next(iter(found.values()))
        common = {name: first.get(name) for name in ("limit_us", "peer", "peer_us")}
        rows.append({**about, **common, **cells, **_spread(steps), **origin(view)})
    per_engine = ("limit_share", "ratio", "ratio_low", "ratio_high", "to_torch", "within", "kernel")
    timed = [name for name in view.engines() if (view.table("sizes")["engine"] == name).any()]
    counts = []
    for engine in TARGETS:
        known = [row[f"{engine}_within"] for row in rows if f"{engine}_within" in row]
        if known:
            undecided = f"; {known.count(None)} undecided" if None in known else ""
            counts.append(f"{view.label(engine)}: {known.count(True)} of {len(known)} rows within its bound{undecided}")
    return table_of_points(
        view,
        (
            *("limit_us", "peer", "peer_us", *(f"{engine}_{name}" for engine in timed for name in (*STEP, "rounds"))),
            *(f"{engine}_{name}" for engine in TARGETS for name in per_engine),
            *(
                f"{engine}_{name}"
                for engine in TARGETS
                for name in ("kernel_share", "kernels", *OF_KERNEL, "threads_in_step")
            ),
        ),
        [
            column("limit [µs]", "limit_us", significant),
            Column("best peer [µs]", lambda row: _named(view, row)),
            *(item for engine in TARGETS for item in _columns_of(view, engine)),
        ],
        rows,
        [
            "The ratio is to the best peer's step (PyTorch eager and compiled, TensorFlow without and with XLA, JAX) "
            "in the same round: the median, and its confidence interval. × marks a step above its bound, the larger of "
            + " and ".join(f"{target:g} times the peer's ({view.label(name)})" for name, target in TARGETS.items())
            + f" and {ROOM:g} times the limit, by the lower end of the interval; ? one that was in too few rounds with "
            "that peer to say.",
            "The CSV has the steps of all engines, with their quartiles and rounds: a framework whose steps take over "
            f"{SLOW:g} times as long as the fastest one's is in every third round alone.",
            *_compiled_only(view),
            *counts,
            *_losses(view),
            *absent(view),
        ],
    )


def _spread(steps: pd.DataFrame) -> Row:
    """The step of every engine at a point, its quartiles over the rounds, and the ratios of ours to PyTorch's."""
    found: dict[str, Any] = {}
    for engine in steps.columns:
        found[f"{engine}_rounds"] = int(steps[engine].count())
        low, middle, high = np.nanquantile(steps[engine], [0.25, 0.5, 0.75])
        found |= {f"{engine}_{name}": float(value) for name, value in zip(STEP, (middle, low, high), strict=True)}
        if engine in TARGETS and REFERENCE in steps:
            found[f"{engine}_to_torch"] = row_helpers.or_none((steps[engine] / steps[REFERENCE]).median())
    return found


def _compiled_only(view: View) -> list[str]:
    """Where compiled PyTorch took part, which compiles for minutes: in one sentence, if it was not everywhere."""
    every = view.table("sizes")
    timed = every[every["microseconds_per_step"].notna()]
    found = [
        {(int(threads), int(batch)) for threads, batch in zip(rows["threads"], rows["batch"], strict=True)}
        for rows in (timed, timed[timed["engine"] == COMPILED])
    ]
    if not found[1] or found[0] == found[1]:
        return []
    named = ", ".join(f"{batch} with {counted(threads, 'thread')}" for threads, batch in sorted(found[1]))
    return [
        f"{view.label(COMPILED)} compiles anew for each size of mini-batch and takes part in mini-batches of {named} "
        "alone: elsewhere the best peer is the best of the others."
    ]


def _losses(view: View) -> list[str]:
    """By how much losses differ from PyTorch's at most, in one sentence; none where they were not compared."""
    every = view.table("sizes")
    known = every[every["loss_deviation"].notna()]
    if not len(known):
        return []
    most = known.loc[known["loss_deviation"].astype(float).idxmax()]
    return [
        "From the same weights and mini-batches the losses of the first steps differ from PyTorch's by at most "
        f"{scientific(most['loss_deviation'])} ({view.label(most['engine'])}, {most['family']}-{whole(most['size'])}, "
        f"batch {int(most['batch'])}, threads {int(most['threads'])}). A framework in which they differ by more than "
        f"{power_of_ten(MOST_DEVIATION)} is left out there; with an engine of ours the run fails."
    ]


def absent(view: View) -> list[str]:
    """Which engines are left out at which points, and why."""
    every = view.table("sizes")
    found = []
    for (engine, reason, threads), rows in every[every["missing"].notna()].groupby(
        ["engine", "missing", "threads"], sort=False
    ):
        networks: dict[str, dict[str, None]] = {}  # each with its sizes of mini-batches, in order
        for family, size, batch in zip(rows["family"], rows["size"], rows["batch"], strict=True):
            networks.setdefault(f"{family}-{whole(size)}", {})[whole(batch)] = None
        where = "; ".join(f"{network} in mini-batches of {', '.join(batches)}" for network, batches in networks.items())
        found.append(f"{view.label(str(engine))}, threads {threads}, {reason}: {where}.")
    return found


def _columns_of(view: View, engine: str) -> list[Column]:
    def ratio(row: Row) -> str:
        if empty(row.get(f"{engine}_ratio")):
            return MISSING
        ends = [row[f"{engine}_ratio_{end}"] for end in ("low", "high")]
        interval = "" if any(map(empty, ends)) else f" [{fixed(ends[0])}, {fixed(ends[1])}]"
        return fixed(row[f"{engine}_ratio"]) + interval + MARKS[row[f"{engine}_within"]]

    label = view.label(engine).removeprefix("TwinGrad ")
    return [
        column(f"{label} [µs]", f"{engine}_step_us", significant),
        column("of limit", f"{engine}_limit_share", share),
        Column("ratio", ratio),
    ]


def _named(view: View, row: Row) -> str:
    return MISSING if empty(row["peer"]) else f"{significant(row['peer_us'])} ({view.label(row['peer'])})"


@producer
def sizes_held(view: View) -> Table:
    """The steps that are above their bound, each with the ops that hold it."""
    rows = [
        {**about, "engine": view.label(engine), **found, **held(found), **origin(view)}
        for about, by_engine in verdicts(view)
        for engine, found in by_engine.items()
        if found.get("within") is False
    ]
    short = sum(row["gained"] < row["too_long"] for row in rows if row["gained"] is not None)
    return table_of_points(
        view,
        ("engine", "to_bound", "too_long", "ratio", "threads_in_step", "held_by", "gained", *OF_KERNEL),
        [
            column("engine", "engine", align="left"),
            column("of its bound", "to_bound", fixed),
            column("too long by", "too_long", share),
            column("of the peer's step", "ratio", fixed),
            column("its threads", "threads_in_step", align="left"),
            Column("ops, of the step (of their limit)", _ops, align="left"),
            column("which could save", "gained", share),
            column("rest", "rest_share", share),
        ],
        rows,
        [
            "Of its bound: how many times as long the step takes as it may, the median over the rounds. Too long by: "
            "the share of the step that is beyond the bound. Shares of ops are of the step in its fastest round, what "
            "they could save is of the median one.",
            "The ops that hold it are those from which most could be saved, until that is enough: one of a layer with "
            "all its calls, or the update. Each has its part of the step and, in brackets, the share of its time that "
            "the machine would need for its operations and bytes; the rest could be saved. An op at its limit is as "
            "fast as the highest rate that was measured of this machine, or faster by less than such rates vary. Of "
            "runs from before this was recorded the op is named that takes most.",
            "Fused ops count as one, of the layer of the last of them: the product of a convolution that its pool is "
            "fused with is of the pool. All are timed as they run, beside those of the other threads. The rest of a "
            "step is gathering rows, looking for NaN and waiting.",
            *(
                [f"In {short} of {len(rows)} rows the ops that are named, at most {KERNELS}, could not save enough."]
                if short
                else []
            ),
        ]
        if rows
        else [_none_above(view)],
    )


def held(found: Row) -> Row:
    """What holds a step that is above its bound: `held_by`, as text, and which share of it that could save.

    Ops are timed beside the fastest round, of whose step they are shares; what they save is of the median step.
    """
    too_long = 1 - 1 / found["to_bound"]
    if empty(found.get("kernels")):
        return {"too_long": too_long, "held_by": found.get("kernel"), "gained": None}
    named: list[Row] = []
    gained = 0.0
    for op in as_kernels(found["kernels"]):
        if gained < too_long and gain(op) > 0:
            named.append(op)
            gained += gain(op) * found["fastest_us"] / found["step_us"]
    return {"too_long": too_long, "held_by": as_text(named), "gained": gained, "ops": named}


def _ops(row: Row) -> str:
    """The ops that hold a step, with their shares of it and of their limits.

    Rows without a rest are of earlier runs, which took the operations of other ops for those of this one.
    """
    if "ops" not in row:
        if empty(row["kernel"]):
            return MISSING
        known = not empty(row["rest_share"]) and not empty(row["kernel_limit_share"])
        limit = f" ({_of_limit(row['kernel_limit_share'])})" if known else ""
        return f"{row['kernel']} {share(row['kernel_share'])}{limit}"
    return (
        ", ".join(f"{op['kernel']} {share(op['share'])} ({_of_limit(op['limit_share'])})" for op in row["ops"])
        or "none: all are at their limits"
    )


def _of_limit(part: float) -> str:
    return AT_LIMIT if part >= 1 else share(part)


def _none_above(view: View) -> str:
    """What is known of the steps where none is above its bound."""
    known = [found["within"] for _, by_engine in verdicts(view) for found in by_engine.values() if "within" in found]
    judged = len(known) - known.count(None)
    if not judged:
        return "No step was judged: none of ours was run beside a peer's in rounds enough."
    if judged < len(known):
        return f"No step is above its bound, as far as is known: of {len(known)} {len(known) - judged} are undecided."
    return "Every step is within its bound."


@producer
def sizes_ablation(view: View) -> Table:
    """The step of each of our engines without one technique over its step with all, network by network.

    In the first row of an engine the longest step with all techniques over the shortest: what a run varies by itself.
    """
    every = with_names(view.table("sizes_ablation"))
    networks = {
        f"{family.id}-{size}": f"{family.title} {size}"
        for family in view.paper.families
        for size in family.sizes
        if (every[["family", "size"]] == [family.id, size]).all(axis=1).any()
    }
    every = every.assign(
        network=every["family"] + "-" + every["size"],
        factor=every["microseconds_per_step"] / every["all_on_microseconds"],
    )
    rows: list[Row] = []
    apart: dict[str, dict[str, float]] = {}
    for engine, of_engine in every.groupby("engine", sort=False):
        about = {"kind": "measured", "machine": view.machine(["sizes_ablation"]), "data": view.data_source}
        about |= {"group": view.label(str(engine)), "engine": engine}
        with_all = of_engine.groupby("network")["all_on_microseconds"]
        apart[str(engine)] = (with_all.max() / with_all.min()).to_dict()
        rows.append({**about, "technique": ALL_ON, **apart[str(engine)]})
        for technique, part in of_engine.groupby("technique", sort=False):
            factors = zip(part["network"], map(row_helpers.or_none, part["factor"]), strict=True)
            rows.append({**about, "technique": technique, **dict(factors)})

    def cell(network: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            factor = row.get(network)
            if factor is None or empty(factor):
                return MISSING
            by_itself = apart[row["engine"]][network]
            known = row["technique"] == ALL_ON or not 1 / by_itself <= factor <= by_itself
            return fixed(factor) + ("" if known else MARKS[None])

        return text

    timed = sorted(
        {(int(batch), int(threads)) for batch, threads in zip(every["batch"], every["threads"], strict=True)}
    )
    steps = "; ".join(f"mini-batches of {batch} with {counted(threads, 'thread')}" for batch, threads in timed)
    return Table(
        fields=("kind", "machine", "data", "engine", "technique", *networks),
        columns=(
            Column("technique off", lambda row: NONE_OFF.get(row["technique"]) or described(row["technique"]), "left"),
            *(Column(title, cell(name)) for name, title in networks.items()),
        ),
        rows=tuple(rows),
        notes=(
            f"A step without the technique over the steps with all before and after it, in {steps}: above 1 the "
            f"technique makes it faster. ? marks what differs from 1 by no more than the steps with all do among "
            f"themselves, as the first row has it: each is the mean of two, so that single steps differ by more. "
            f"{MISSING}: it can't be switched off there, or the network was not "
            f"run. {LETTERS}"
            if rows
            else "Not run: make sizes runs it.",
            *row_helpers.missing_notes(view, ("sizes_ablation",), tuple(TARGETS)),
        ),
        wide=True,
    )


@remembered
def origin(view: View) -> dict[str, Any]:
    """The fields of a row that say where it comes from."""
    return {"kind": "measured", "machine": view.machine(["sizes"]), "data": view.data_source}


def table_of_points(
    view: View,
    fields: Sequence[str],
    columns: Sequence[Column],
    rows: Sequence[Row],
    notes: Sequence[str],
    measure: str = "sizes",
) -> Table:
    """A table with a row for each network, size of mini-batch and number of threads, of what a measure timed."""
    return Table(
        fields=("kind", "machine", "data", "family", "size", "batch", "threads", *fields),
        columns=(
            column("size", "size", align="left"),
            column("batch", "batch", lambda value: str(int(value))),
            column("threads", "threads", lambda value: str(int(value))),
            *columns,
        ),
        rows=tuple(rows),
        notes=(*notes, *row_helpers.missing_notes(view, (measure,), view.engines())),
        wide=True,
    )


@drawing.producer
def ratios_by_size(view: View) -> Figure:
    """A panel for each family: our engines' step / the best peer's over the size, a line for each mini-batch.

    With the most threads that were measured; a dotted line is at an engine's target.
    """
    known = [
        {**about, "engine": engine, **found}
        for about, by_engine in verdicts(view)
        for engine, found in by_engine.items()
        if "ratio" in found
    ]
    if not known:
        raise NotDrawnError("no step of ours was run beside a peer's: make sizes")
    frame = pd.DataFrame(known)
    threads = int(frame["threads"].max())
    frame = frame[frame["threads"] == threads]
    families = [family for family in view.paper.families if (frame["family"] == family.title).any()]
    batches = sorted(frame["batch"].unique())
    down = -(-len(families) // ACROSS)
    drawn = style.new(PAGE, 1.75 * down)
    panels = list(np.ravel(drawn.subplots(down, ACROSS, sharey=True, squeeze=False)))
    for axes, family in zip(panels, families, strict=False):
        here, names = frame[frame["family"] == family.title], list(family.sizes)
        for engine, target in TARGETS.items():
            look = style.look(engine)
            axes.axhline(target, color=look.color, linewidth=0.8, linestyle=":")
            for place, batch in enumerate(batches):
                line = here[(here["engine"] == engine) & (here["batch"] == batch)]
                if not len(line):
                    continue
                shift = 0.12 * (place - (len(batches) - 1) / 2) + (0.02 if engine == "julia" else -0.02)
                x = [names.index(name) + shift for name in line["size"]]
                ends = [(line["ratio"] - line["ratio_low"]).fillna(0), (line["ratio_high"] - line["ratio"]).fillna(0)]
                axes.errorbar(
                    x,
                    line["ratio"],
                    np.clip(np.array(ends, float), 0, None),
                    color=look.color,
                    marker=look.marker,
                    markersize=1.5 + 0.7 * place,
                    linewidth=0.4 + 0.2 * place,
                    elinewidth=0.6,
                    label=f"{view.label(engine)}, batch {batch}",
                )
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.4, len(names) - 0.6)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(family.title, loc="left")
        axes.set_xlabel(family.over)
        style.clean(axes)
    for axes in panels[len(families) :]:
        axes.set_axis_off()
    drawn.supylabel(f"step / best peer's step, {counted(threads, 'thread')}")
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(
        list(lines.values()), list(lines), loc="outside upper center", ncols=len(batches) * len(TARGETS) // 2 or 1
    )
    return drawn
