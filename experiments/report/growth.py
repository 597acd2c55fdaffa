"""Tables of growth: exponents of the time over batch, length, width, vocabulary and nodes, and the seconds themselves.

The exponents of steps come from the study of several sizes (`sizes.points`), those of the series and of the graphs from
the measure `growth`. Work that grows in proportion (`LINEAR`) should take time in proportion: an exponent above `MOST`
is marked there, of all sizes, of the two largest, of those whose memory fits the machine's largest cache, or of the
others. It is explained where the machine's limit grows as fast; or where the time, without that of collecting garbage
or of the system, whichever is more, grows in proportion in both of these, and from one to the other where one of them
has a single size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from experiments.formats import MISSING, duration, fixed, given, percent, significant
from experiments.measures.growth import (
    BESIDE_PEER,
    CALL_SECONDS,
    EAGER,
    EXPLAINING,
    NODES,
    ONCE_SECONDS,
    PEER_NODES,
    PEER_ROUNDS,
    SHARES,
)
from experiments.report import row_helpers, sizes_targets
from experiments.report.row_helpers import REFERENCE, producer
from experiments.report.sizes import TARGETS, limit_of, origin, points
from experiments.report.table import Column, Row, Table, column, empty
from experiments.report.view import View, remembered

LINEAR = ("batch", "steps in time", "words", NODES)
"""What the work of a step, or of planning it, grows in proportion to; a width is none, whose square counts."""
MOST = 1.05
"""The exponent up to which a time is in proportion."""
SYSTEM_FROM = 0.1
"""Seconds from which on the system's part of a time is known: it is counted in ticks of a clock."""
LEAST_SHARE = 0.005
"""Of a time that is worth mentioning."""
FITTED = ("exponent", "largest", "beyond", "largest_beyond", "collecting", "system", "inside", "outside", "across")
"""Of each engine: the exponents of its time over all sizes and over the two largest; those of time / limit; the shares
of collecting garbage and of the system at the largest size; and the exponents without the larger of these times, of the
sizes whose memory fits the machine's largest cache, of the others, and between the two levels where one has one size.
"""

FIRST_CALL, START = "first call, compiled", "start-up"
COMPILED_NODES, COMPILED_SECONDS = 100, 0.02
"""Nodes of the graph for which the first call of `compile` is to take no longer than these seconds."""


@producer
@remembered
def growth(view: View) -> Table:
    """How the time of each engine grows with mini-batches, networks and graphs, as exponents."""
    engines = _engines(view, ("sizes", "growth"))
    rows = [*_of_points(view), *_of_series(view)]
    above = [
        f"{view.label(engine)}, {row['group']}, {row['at']}: {_why(row, engine)[0]}" for row, engine in _above(rows)
    ]

    def cell(engine: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            found, beyond = row.get(f"{engine}_exponent"), row.get(f"{engine}_beyond")
            if empty(found):
                return MISSING
            mark = " ×" if engine in TARGETS and _is_above(row, engine) else ""
            return f"{fixed(found)} ({MISSING if empty(beyond) else fixed(beyond)}){mark}"

        return text

    shorter = [
        f"{view.label(engine)}, {row['group']}, {row['at']}: up to {largest:,} alone; nothing larger follows a call of "
        f"over {given(CALL_SECONDS)} s."
        for row in rows
        if row["against"] == NODES
        for engine, largest in row.get("shorter", {}).items()
    ]
    without_time = [
        f"{view.label(engine)}, {row['group']}, {row['at']}: at {row[f'{engine}_left_out']} no time was left over, and "
        "the exponent is that of the others."
        for row in rows
        for engine in engines
        if row.get(f"{engine}_left_out")
    ]
    return Table(
        fields=(
            *("kind", "machine", "data", "group", "threads", "against", "at"),
            *(f"{engine}_{name}" for engine in engines for name in FITTED),
        ),
        columns=(
            column("against", "against", align="left"),
            column("at", "at", align="left"),
            column("threads", "threads", lambda value: str(int(value))),
            *(Column(view.label(engine), cell(engine)) for engine in engines),
        ),
        rows=tuple(rows),
        notes=(
            "The exponent is the slope of a line through the logarithms of step and size, by least squares: 1 is "
            "growth in proportion. In brackets that of step / limit: 0 where the step grows as the limit does. "
            "Start-up is `build` and the first step less a later one, of each the least. Graphs are one sine of ten "
            "numbers after another, by one thread.",
            f"× marks an engine of ours with an exponent above {given(MOST)} where the work grows in proportion (over "
            "mini-batches, steps in time, words and nodes): of all sizes, of the two largest, or of those within one "
            "level of memory.",
            *above,
            *shorter,
            *without_time,
        )
        if rows
        else ("Of each kind of network one size with one mini-batch was run; make sizes runs several.",),
        wide=True,
    )


def _engines(view: View, measures: Iterable[str]) -> list[str]:
    """The engines that some measures have rows of, in the order of the paper's file."""
    measured = pd.concat([view.table(name)["engine"] for name in measures])
    return [name for name in view.engines() if (measured == name).any()]


def _of_points(view: View) -> list[Row]:
    """The rows of the growth table for the steps of the study of several sizes."""
    known = pd.DataFrame(
        {**about, "engine": engine, "step": step, "limit": limit}
        for about, of_engines, steps in points(view)
        for limit in [limit_of(of_engines)]
        for engine, step in steps.median().items()
    )
    if not len(known):
        return []
    known["size"] = known["size"].astype(float)
    over = {f"{family.title}, by {family.over}": family.over for family in view.paper.families}
    rows: list[Row] = []
    for against, fixed_ones in (("batch", ["threads", "group", "size"]), ("size", ["threads", "group", "batch"])):
        for (threads, group, at), part in known.groupby(fixed_ones, sort=False):
            if part[against].nunique() > 1:
                other = "size" if against == "batch" else "batch"
                row = {"group": group, "threads": threads, "against": against, "at": f"{other} {given(at)}"}
                row["linear"] = (over[group] if against == "size" else against) in LINEAR
                for engine, line in part.groupby("engine"):
                    times = pd.DataFrame(
                        {"value": line[against], "seconds": line["step"], "limit_seconds": line["limit"]}
                    )
                    row |= _fitted(str(engine), times)
                rows.append({**row, **origin(view)})
    return sorted(rows, key=lambda row: (-int(row["threads"]), str(row["group"])))


def _of_series(view: View) -> Iterator[Row]:
    """The rows of the growth table for what the measure `growth` timed."""
    for about, part in _series(view):
        ends = " to ".join(f"{int(value):,}" for value in (part["value"].min(), part["value"].max()))
        row = {**about, "at": f"{about['what']}, {ends}", "linear": about["against"] in LINEAR}
        for engine, line in part.groupby("engine"):
            row |= _fitted(str(engine), line)
        largest = part.groupby("engine")["value"].max()
        row["shorter"] = {str(engine): int(value) for engine, value in largest.items() if value < part["value"].max()}
        yield row


def _series(view: View) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """What the measure `growth` timed of each series: what it is, and its rows."""
    every = view.table("growth")
    about = {one.id: (f"{one.title}, by {one.over}", one.over) for one in view.paper.series}
    for (series, what), part in every.groupby(["series", "what"], sort=False):
        group, against = about.get(series, ("a graph, by nodes", NODES))
        threads = 1 if series not in about else int(part["threads"].max())
        origins = {"kind": "measured", "machine": view.machine(["growth"]), "data": view.data_source}
        yield {"group": group, "threads": threads, "against": against, "what": what, **origins}, part


def _fitted(engine: str, times: pd.DataFrame) -> dict[str, Any]:
    """What `FITTED` says of an engine's `seconds` over `value`, and the steepest slope between neighbouring values."""
    times = times.sort_values("value").reindex(columns=["value", "seconds", "limit_seconds", *EXPLAINING])
    timed = times["seconds"].astype(float) > 0  # of a start-up less a later step nothing may be left over
    left_out = ""
    if timed.sum() > 1:
        left_out = ", ".join(f"{int(value):,}" for value in times.loc[~timed, "value"])
        times = times[timed]
    names = ("value", "seconds", "limit_seconds", *SHARES, "held_bytes", "cache_bytes")
    values, seconds, limits, collecting, system, held, cache = (times[name].astype(float).to_numpy() for name in names)
    pairs = [
        (slope, low, high)
        for (low, time), (high, later) in pairwise(zip(times["value"], seconds, strict=True))
        if (slope := exponent([low, high], [time, later])) is not None
    ]
    collecting, system = np.nan_to_num(collecting), np.where(seconds >= SYSTEM_FROM, np.nan_to_num(system), 0.0)
    rest = seconds - np.maximum(collecting, system)  # these overlap
    rest = np.where(rest > 0, rest, seconds)
    longest = seconds[-1]
    known = bool((cache > 0).all() and not np.isnan(held).any())
    inside = held <= cache if known else ~np.isnan(rest)
    with np.errstate(all="ignore"):
        beyond = seconds / limits
    found = {
        "exponent": exponent(values, seconds),
        "beyond": exponent(values, beyond),
        "collecting": float(collecting[-1] / longest) if longest else 0.0,
        "system": float(system[-1] / longest) if longest else 0.0,
        "inside": exponent(values[inside], rest[inside]),
        "outside": exponent(values[~inside], rest[~inside]),
        "across": None,
        "largest": exponent(values[-2:], seconds[-2:]),
        "largest_beyond": exponent(values[-2:], beyond[-2:]),
        "largest_rest": exponent(values[-2:], rest[-2:]),
        "steepest": max(pairs, default=None),
        "split": known,
        "left_out": left_out,
    }
    edge = int(inside.sum())  # memory grows with the sizes, so that those that fit come first
    if known and 0 < edge < len(values) and 1 in (edge, len(values) - edge):
        found["across"] = exponent(values[edge - 1 : edge + 1], rest[edge - 1 : edge + 1])
    return {f"{engine}_{name}": value for name, value in found.items()}


def exponent(values: Sequence[float] | np.ndarray, times: Sequence[float] | np.ndarray) -> float | None:
    """The slope of log time over log value by least squares; None for fewer than two values, or without a time."""
    sizes, seconds = np.asarray(values, float), np.asarray(times, float)
    if len(set(sizes)) < 2 or not (np.isfinite(seconds) & (seconds > 0)).all():
        return None
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def _is_above(row: Row, engine: str) -> bool:
    """Whether a time grows faster than the work, which grows in proportion: in all, at the end or within a level."""
    return bool(row["linear"]) and any(
        _exceeds(row.get(f"{engine}_{name}")) for name in ("exponent", "largest", "inside", "outside")
    )


def _above(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """The rows, each with an engine of ours whose time grows faster there than the work."""
    return [(row, engine) for row in rows for engine in TARGETS if _is_above(row, engine)]


def unexplained(view: View) -> tuple[int, int]:
    """How many times of our engines grow faster than the work, which is in proportion, unexplained; and of how many."""
    rows = [*_of_points(view), *_of_series(view)]
    judged = [row for row in rows for engine in TARGETS if row["linear"] and not empty(row.get(f"{engine}_exponent"))]
    return sum(not _why(row, engine)[1] for row, engine in _above(rows)), len(judged)


def _exceeds(exponent: float | None) -> bool:
    return exponent is not None and not empty(exponent) and exponent > MOST


def _why(row: Row, engine: str) -> tuple[str, bool]:
    """The exponents of an engine, one of which is above `MOST`, where that comes from, and whether it is explained."""
    of = {name: row[f"{engine}_{name}"] for name in (*FITTED, "largest_rest", "split")}
    slope, low, high = row[f"{engine}_steepest"]
    at_end = _exceeds(of["largest"]) and not _exceeds(of["exponent"])
    of_largest = f", of the two largest {fixed(of['largest'])}" if at_end else ""
    said = f"{fixed(of['exponent'])}{of_largest}, steepest from {int(low):,} to {int(high):,} ({fixed(slope)}); "
    pairs = (("exponent", "beyond"), ("largest", "largest_beyond"))
    limits = [of[beyond] for name, beyond in pairs if _exceeds(of[name])]
    if limits and all(not empty(beyond) and beyond <= MOST - 1 for beyond in limits):
        return said + "the limit grows as fast.", True
    collecting, system, split = of["collecting"], of["system"], of["split"]
    if not split and max(collecting, system) < LEAST_SHARE:
        return said + "not explained.", False
    places = {"inside": " among the sizes whose memory fits the largest cache", "outside": " among the others"}
    places |= {"across": " from the largest that fits to the next"}
    rest = [(place if split else "", of[name]) for name, place in places.items() if not empty(of[name])]
    if _exceeds(of["largest_rest"]) and not any(_exceeds(found) for _, found in rest):
        rest.append((" of the two largest", of["largest_rest"]))
    of_rest = " and ".join(f"{fixed(found)}{place}" for place, found in rest) or "what can't be fitted"
    known = [(collecting, "collecting garbage"), (system, "the system's work, such as on fresh memory")]
    shares = [f"{what} ({percent(share)} of the longest)" for share, what in known if share >= LEAST_SHARE]
    left_out = shares[0] if len(shares) == 1 else f"the larger of {' and '.join(shares)}" if shares else ""
    without = f"without {left_out}: " if left_out else ""
    explained = bool(rest) and all(found <= MOST for _, found in rest)
    return f"{said}{without}{of_rest}; {'which explains it' if explained else 'the rest is not explained'}.", explained


@producer
def growth_seconds(view: View) -> Table:
    """The times of the graphs and the series that the exponents are fitted to, beside their targets."""
    engines = _engines(view, ("growth",))
    starts = sizes_targets.start_targets(view, "growth")
    rows: list[Row] = []
    for about, part in _series(view):
        for value, found in part.groupby("value"):
            row = {**about, "value": value}
            for one in found.to_dict("records"):
                name = one["engine"]
                row |= {f"{name}_s": one["seconds"], f"{name}_threads_in_step": one["threads_in_step"]}
                if not empty(one["peer_ratio"]):
                    row |= {name: one[name] for name in BESIDE_PEER}
            rows.append(row | _target(row, starts))
    known = [row for row in rows if row["held"]]
    missed = [view.label(engine) for row in known for engine in row["missed"]]
    return Table(
        fields=(
            *("kind", "machine", "data", "group", "threads", "what", "value"),
            *(f"{engine}_{name}" for engine in engines for name in ("s", "threads_in_step")),
            *("target", *(f"{engine}_target_s" for engine in TARGETS), *BESIDE_PEER),
        ),
        columns=(
            column("timed", "what", align="left"),
            column("at", "value", lambda value: f"{int(value):,}"),
            column("threads", "threads", lambda value: str(int(value))),
            *(Column(view.label(engine), _seconds(engine)) for engine in engines),
            Column("target", _target_text, align="left"),
        ),
        rows=tuple(rows),
        notes=(
            "Times are the least of several, and start-ups the least `build` with a first step less the least later "
            f"step; calls of over {given(ONCE_SECONDS)} s are timed once. The engines ran one after the other, each in "
            "its own process, so that differences of a few per cent say nothing. What a process does once, at its "
            "first call of all, is not counted. Beside a step is what its threads do, where the engine says it. In "
            f"brackets behind PyTorch's: numpy's time over it where {PEER_ROUNDS} rounds of each alternate, the median "
            "and its confidence interval, by whose lower end it is judged then. "
            f"× marks a time above its target: {len(missed)} of {sum(len(row['held']) for row in known)}.",
            *row_helpers.missing_notes(view, ("growth",), engines),
        )
        if rows
        else ("Not run: make sizes runs it.",),
        wide=True,
    )


def _target(row: Row, starts: Mapping[str, float]) -> dict[str, Any]:
    """The target of a row in words and each engine's in seconds, and those of them that miss it.

    `starts` are the seconds of start-up.
    """
    graph = row["against"] == NODES
    reference = row.get(f"{REFERENCE}_s")
    words, seconds = "", dict[str, float]()
    if graph and (row["what"], row["value"]) == (EAGER, PEER_NODES) and reference is not None:
        words, seconds = "numpy: PyTorch's", {"numpy": reference}
    elif graph and (row["what"], row["value"]) == (FIRST_CALL, COMPILED_NODES):
        words, seconds = (
            f"{significant(1e3 * COMPILED_SECONDS, trim=True)} ms",
            dict.fromkeys(TARGETS, COMPILED_SECONDS),
        )
    elif row["what"] == START:
        seconds = dict(starts)
        words = ", ".join(f"{name}: {significant(most, trim=True)} s" for name, most in starts.items())
    held = {name: most for name, most in seconds.items() if not empty(row.get(f"{name}_s"))}
    missed = [name for name, most in held.items() if row[f"{name}_s"] > most]
    if "numpy" in held and not empty(row.get("peer_low")):
        missed = ["numpy"] if row["peer_low"] > 1 else []
    targets = {f"{name}_target_s": held.get(name) for name in TARGETS}
    return {"target": words, "held": list(held), "missed": missed, **targets}


def _target_text(row: Row) -> str:
    if empty(row.get("peer_ratio")):
        return str(row["target"])
    return f"{row['target']} ({fixed(row['peer_ratio'])} [{fixed(row['peer_low'])}, {fixed(row['peer_high'])}])"


def _seconds(engine: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value, threads = row.get(f"{engine}_s"), row.get(f"{engine}_threads_in_step")
        if empty(value):
            return MISSING
        return duration(value) + ("" if empty(threads) else f", {threads}") + (" ×" if engine in row["missed"] else "")

    return text
