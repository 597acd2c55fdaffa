"""Every number that the paper's text quotes, as raw values and as text, under names such as `numpy.later_s`.

The text looks numbers up by these names and types none itself; a name without a value is printed as not
measured.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pandas as pd

from experiments.formats import (
    fixed,
    fraction,
    given,
    nanoseconds,
    percent,
    power_of_ten,
    scientific,
    share,
    significant,
)
from experiments.microbenchmarks.functions import SMALL
from experiments.microbenchmarks.registry import SYSTEMS
from experiments.quantities import ALL, QUANTITIES, limit_shares, saved
from experiments.report import claims, growth, microbenchmarks, row_helpers, sizes, sizes_targets, totals
from experiments.report.row_helpers import PARITY_TOLERANCE, REFERENCE
from experiments.report.view import View
from experiments.testing import of_median

Numbers = dict[str, dict[str, Any]]
"""Name -> {"value": the number, "text": how it is printed}; names without a value are left out."""


def of_paper(view: View) -> Numbers:
    """The numbers of one paper: per engine, per race, settings, and what the paper reports."""
    found: Numbers = {}
    for engine in view.engines():
        _add_engine(found, view, engine)
    for threads in view.table("race")["threads"].unique():
        _add_race(found, view, int(threads))
    _add_agreement(found, view)
    _add_own(found, view)
    _add_techniques(found, view)
    _add_variants(found, view)
    _add_microbenchmarks(found, view)
    _add_sizes(found, view)
    _add_verdicts(found, view)
    for name, setting in view.paper.settings():
        text = row_helpers.setting_text(setting.value).replace("_", " ")
        _add(found, f"setting.{name.partition('.')[2]}", setting.value, text)
    sources = [setting.source for _, setting in view.paper.settings()]
    for source in ("paper", "code", "ours"):
        _add(found, f"settings.{source}", sources.count(source), str(sources.count(source)))
    _add(found, "settings.all", len(sources), str(len(sources)))
    for item in view.paper.reported:
        kind = "reported" if item.kind == "paper" else "rerun"
        name = f"{kind}.{item.row.partition(',')[0]}.{item.quantity}"
        about = "about " if item.precision == "approximate" else ""
        if item.value is not None:
            _add(found, name, item.value, f"{about}{given(item.value)}")
        for epoch, value in enumerate(item.by_epoch, start=1):
            text = fraction(value, 3) if item.quantity.endswith("accuracy") else given(value)
            _add(found, f"{name}.{epoch}", value, text)
        if kind == "rerun":
            _add(found, "rerun.source", row_helpers.MEASURED_ONCE, f"{row_helpers.MEASURED_ONCE}: {item.where}")
    _add(found, "parity.tolerance", PARITY_TOLERANCE, power_of_ten(PARITY_TOLERANCE))
    return found


def of_runs(view: View) -> dict[str, Any]:
    """Where the numbers of one paper come from: data, profile, machine, versions, days."""
    runs = pd.concat([view.ok("time"), view.ok("memory")])
    return {
        "data_source": view.data_source,
        "profile": view.profile,
        "machine": view.machine(["time", "memory", "race", "scaling"]),
        "threads": row_helpers.distinct(view.ok("time")["threads"]),
        "memory_threads": row_helpers.distinct(view.ok("memory")["threads"]),
        "blas": row_helpers.distinct(runs["blas"].dropna().str.split(", ").explode()),
        "python": row_helpers.distinct(runs["python"]),
        "versions": row_helpers.distinct(runs["framework_version"]),
        "commits": row_helpers.distinct(runs["commit"].map(lambda text: str(text)[:8])),
        "dirty": bool(runs["dirty"].astype(str).str.lower().isin(("true", "1", "1.0")).any()),
        "created": max((str(moment) for moment in runs["created"].dropna()), default=None),
        "runs": len(runs),
        "left_out": view.left_out,
    }


def _add_engine(found: Numbers, view: View, engine: str) -> None:
    time = view.ok("time", engine)
    _add(found, f"{engine}.label", view.label(engine), view.label(engine))
    if len(time):
        _add(found, f"{engine}.seeds", len(time), str(len(time)))
    for quantity in QUANTITIES.values():
        if quantity.text:
            _add(found, f"{engine}.{quantity.text}", quantity.value(view, engine), quantity.unit.number)
    _add(found, f"{engine}.test_accuracy_sd", time["test_accuracy"].std(), fraction)
    if engine == REFERENCE:
        return
    reference = view.ok("time", REFERENCE)["later_epoch_seconds"].mean()
    _add(found, f"{engine}.later_ratio", time["later_epoch_seconds"].mean() / reference, fixed)
    points = view.table("scaling", engine)
    for scaled in row_helpers.SCALED:
        exponent = row_helpers.scaling_exponent(points[points["quantity"] == scaled])
        _add(found, f"{engine}.growth.{scaled}", exponent, fixed)


def _add_race(found: Numbers, view: View, threads: int) -> None:
    """Median step times and paired ratios of the race at a number of threads."""
    rounds = view.table("race")
    rounds = rounds[rounds["threads"] == threads]
    steps = rounds.pivot_table(index="round", columns="engine", values="microseconds_per_step")
    _add(found, f"race.{threads}.rounds", len(steps), str(len(steps)))
    for engine in steps:
        _add(found, f"race.{threads}.{engine}.step_us", steps[engine].median(), significant)
        if REFERENCE in steps and engine != REFERENCE:
            ratios = (steps[engine] / steps[REFERENCE]).dropna()
            _add(found, f"race.{threads}.{engine}.ratio", ratios.median(), fixed)
            if (interval := of_median(ratios)) is not None:
                text = "–".join(map(fixed, interval))
                found[f"race.{threads}.{engine}.interval"] = {"value": list(interval), "text": text}
        rival = row_helpers.best_rival(steps)
        if len(rival) and engine != rival.name:
            ratio = (steps[engine] / rival).dropna().median()
            _add(found, f"race.{threads}.{engine}.ratio_to_rival", ratio, fixed)
        part = limit_shares(rounds[rounds["engine"] == engine]).median()
        _add(found, f"race.{threads}.{engine}.limit_share", part, share)
    _add(found, f"race.{threads}.limit_us", rounds["limit_microseconds"].astype(float).max(), significant)
    rival = row_helpers.best_rival(steps)
    if len(rival):
        _add(found, f"race.{threads}.rival", view.label(str(rival.name)), view.label(str(rival.name)))
        for name in ("step_us", "ratio", "limit_share"):
            if f"race.{threads}.{rival.name}.{name}" in found:
                found[f"race.{threads}.rival.{name}"] = found[f"race.{threads}.{rival.name}.{name}"]
        if f"{rival.name}.bytes_later" in found:
            found[f"race.{threads}.rival.bytes_later"] = found[f"{rival.name}.bytes_later"]


def _add_own(found: Numbers, view: View) -> None:
    """Accuracy from each engine's own initialisation."""
    for engine in view.paper.own:
        runs = view.ok("own", engine)
        for name in ("train_accuracy", "test_accuracy"):
            _add(found, f"own.{engine}.{name}", runs[name].mean(), fraction)
            _add(found, f"own.{engine}.{name}_sd", runs[name].std(), fraction)


def _add_techniques(found: Numbers, view: View) -> None:
    """The share of time and of bytes, in per cent, that each technique saves, and all of them together."""
    for engine in view.table("ablation")["engine"].unique():
        rows = view.table("ablation", engine)
        rows = rows[rows["configuration"] == "without"]
        for technique in (ALL, *rows["technique"].unique()):
            for name, quantity in (("time_saved", "microseconds_per_step"), ("bytes_saved", "bytes_per_epoch")):
                share = saved(view, engine, technique, quantity)
                text = "" if share is None else percent(share)
                _add(found, f"technique.{engine}.{technique}.{name}", None if share is None else 100 * share, text)


def _add_variants(found: Numbers, view: View) -> None:
    """Test accuracy and seconds of an epoch of every variant."""
    for (engine, variant), rows in view.table("variants").groupby(["engine", "variant"]):
        last, later = rows[rows["epoch"] == rows["epoch"].max()], rows[rows["epoch"] > 1]
        _add(found, f"variant.{variant}.{engine}.test_accuracy", last["test_accuracy"].mean(), fraction)
        _add(found, f"variant.{variant}.{engine}.later_s", later["seconds"].mean(), significant)


def _add_microbenchmarks(found: Numbers, view: View) -> None:
    """Gradients of small functions beside other systems', and the worst ratio of forward mode to C++."""
    if not len(view.tables["microbenchmarks"]):
        return
    for of in (ALL, *SMALL):
        times = {name: microbenchmarks.gradient_time(view, name, of) for name in SYSTEMS}
        for name, value in times.items():
            _add(found, f"micro.{of}.{name}.gradient", value, nanoseconds)
            for other, base in times.items():
                if value is not None and base and other != name:
                    _add(found, f"micro.{of}.{name}.to.{other}", value / base, _in_two_digits)
    ratios = microbenchmarks.chunk_ratios(view, "julia-forward", "duals")
    _add(found, "micro.chunks.julia-forward.to.duals.worst", max(ratios, default=None), significant)


FURTHEST = 3
"""Steps above their bound that the text names for each engine and number of threads."""


def _add_sizes(found: Numbers, view: View) -> None:
    """Of several sizes: how many rows of each engine of ours are within bound and targets, and the worst ones."""
    if not len(view.table("sizes")):
        return
    judged = [
        {**about, "engine": engine, **one}
        for about, by_engine in sizes.verdicts(view)
        for engine, one in by_engine.items()
        if "within" in one
    ]
    starts, memory, threads = (
        rows(view) for rows in (sizes_targets.start_rows, sizes_targets.memory_rows, sizes_targets.thread_rows)
    )
    for engine in sizes.TARGETS:
        for count in sorted({row["threads"] for row in judged}):
            rows = [row for row in judged if (row["engine"], row["threads"]) == (engine, count)]
            _add_bound(found, f"sizes.{count}.{engine}", rows)
        for name, fresh in (("start", True), ("restart", False)):
            _add_count(found, f"sizes.{name}.{engine}", *sizes_targets.start_counts(view, starts, engine, fresh))
        _add(found, f"sizes.start.{engine}.target", sizes_targets.start_targets(view)[engine], given)
        for name in ("memory", "peak"):
            ratios = [row[f"{engine}_{name}_ratio"] for row in memory if f"{engine}_{name}_ratio" in row]
            _add_count(found, f"sizes.{name}.{engine}", sum(ratio <= 1 for ratio in ratios), len(ratios))
        slower = [row[f"{engine}_slower"] for row in threads if f"{engine}_slower" in row]
        _add_count(found, f"sizes.threads.{engine}", slower.count(True), len(slower), slower.count(None))
    if threads:
        _add(found, "sizes.threads.slower", 100 * (sizes_targets.SLOWER - 1), percent(sizes_targets.SLOWER - 1))
    held = [row for row in growth.growth_seconds(view).rows if row["held"]]
    missed = sum(len(row["missed"]) for row in held)
    _add_count(found, "sizes.growth", missed, sum(len(row["held"]) for row in held))
    _add_count(found, "sizes.growth.unexplained", *growth.unexplained(view))
    whole = totals.total_rows(view)
    targets = sizes_targets.start_targets(view, totals.MEASURE)
    for engine in sizes.TARGETS:
        _add_count(found, f"sizes.totals.start.{engine}", *totals.within(whole, f"{engine}_start_s", targets[engine]))
        _add_count(found, f"sizes.totals.{engine}", *totals.within(whole, f"{engine}_ratio", 1.0))


def _add_bound(found: Numbers, name: str, rows: list[dict[str, Any]]) -> None:
    """How many steps are within their bound, and those that are furthest above it."""
    verdicts = [row["within"] for row in rows]
    _add_count(found, name, verdicts.count(True), len(rows), verdicts.count(None))
    above = sorted((row for row in rows if row["within"] is False), key=lambda row: -row["to_bound"])[:FURTHEST]
    if above:
        named = [f"{row['family']} {row['size']}, mini-batch {row['batch']}: {fixed(row['to_bound'])}" for row in above]
        _add(found, f"{name}.worst", above[0]["to_bound"], "; ".join(named))


def _add_count(found: Numbers, name: str, count: int, rows: int, undecided: int = 0) -> None:
    """A number of rows, of how many it is, and how many of these are undecided; nothing where there are none."""
    if rows:
        _add(found, f"{name}.count", count, str(count))
        _add(found, f"{name}.rows", rows, str(rows))
    if undecided:
        _add(found, f"{name}.undecided", undecided, str(undecided))


def _add_verdicts(found: Numbers, view: View) -> None:
    """How many claims have which verdict, of the studies' statements and of ours."""
    findings = [claims.examine(claim, view) for claim in view.paper.claims]
    for verdict in get_args(claims.Verdict):
        count = sum(finding.verdict == verdict for finding in findings)
        _add(found, f"claims.{verdict.replace(' ', '_')}", count, str(count))
    for verdict in filter(None, get_args(claims.OnOurs)):
        count = sum(finding.on_ours == verdict for finding in findings)
        _add(found, f"claims.ours.{verdict.replace(' ', '_')}", count, str(count))
    _add(found, "claims.all", len(findings), str(len(findings)))


def _add_agreement(found: Numbers, view: View) -> None:
    """The largest difference of any engine from the reference, in step losses and in test accuracy."""
    losses = {engine: row_helpers.loss_differences(view, engine) for engine in view.engines() if engine != REFERENCE}
    for engine, values in losses.items():
        _add(found, f"{engine}.max_loss_difference", values.max(), scientific)
    steps = max((values.index.get_level_values("step").nunique() for values in losses.values()), default=0)
    if steps:
        _add(found, "parity.steps", steps, str(steps))
    largest = [values.max() for values in losses.values() if len(values)]
    _add(found, "parity.max_loss_difference", max(largest, default=None), scientific)
    points = [100 * row_helpers.accuracy_differences(view, engine).max() for engine in losses]
    _add(found, "parity.max_accuracy_points", pd.Series(points, dtype=float).max(), fixed)


def _add(found: Numbers, name: str, value: Any, text: Any) -> None:
    """Enter a number under its name, unless there is none; `text` prints it or is its text already."""
    if value is None or (not isinstance(value, list | str) and pd.isna(value)):
        return
    if not isinstance(value, bool | str | list):
        value = float(value)
        if not np.isfinite(value):
            return
    found[name] = {"value": value, "text": text if isinstance(text, str) else text(value)}


def _in_two_digits(ratio: float) -> str:
    """A factor as people say it: 3.4, 12, 341."""
    return significant(ratio, 2)
