"""What the studies claim, and whether it holds here: a closed set of tests on the results.

Nothing is decided by hand: a paper's file says which quantity of which engine a claim is about and between which
limits it lies when the claim holds. The verdict and the number behind it follow from the results at hand.

A statement is reproduced, or not, only where it was tested on the engines that it names. The studies' own engines are
not run here; where one of ours stands for one, the statement is not tested, and what holds for ours is said apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from experiments.formats import fixed, fraction, given, nanoseconds, percent, scientific, significant, size
from experiments.papers import Claim
from experiments.report import microbenchmarks, row_helpers
from experiments.report.view import MEASURE_NAMES, View, with_image

Verdict = Literal["reproduced", "not reproduced", "not tested", "not testable"]
"""Of a study's statement; "not tested" where an engine of ours stands for one that is not run here."""

OnOurs = Literal["holds", "does not hold", "not measured", ""]
"""Of the same statement with our engine in the place of the study's; empty where no engine of ours takes part."""

OURS = frozenset((*row_helpers.OURS, "numpy-eager", "numpy-compiled", "julia-eager", "julia-compiled", "julia-forward"))
"""Engines, and systems of the micro-benchmarks, that are none of a study's."""

DIFFERENCES = ("accuracy", "loss")
"""Quantities whose names end so are compared by their difference, all others by their ratio."""

OF_BOTH = ("gradient_nanoseconds", "gradient_to_forward", "chunked_gradient_nanoseconds")
"""Quantities that both sides of a comparison have of the same thing."""

WITH_COMPILATION = {
    "first_epoch_seconds": "time",
    "first_to_later_seconds": "time",
    "total_seconds": "time",
    "average_epoch_seconds": "time",
    "bytes_first_epoch": "memory",
    "bytes_all_epochs": "memory",
    "peak_rss_bytes": "memory",
}
"""Quantities that contain what is compiled in the first epoch, which a system image of Julia takes away."""

STEADY = ("later_epoch_seconds", "variant_later_epoch_seconds", "step_microseconds", "bytes_later_epochs")
"""Quantities without compilation."""

ALL = "all"
"""The technique of a claim that is about all techniques together."""

SETTLED = 3
"""After which epoch a gain is a late one: the studies say that learning stopped "after 2 or 3 epochs"."""


@dataclass(frozen=True)
class Finding:
    """What came of a claim: the verdicts, and the number that decides them (None where there is none).

    `words` are that number, or in short why there is none. `missing` is what was not measured, of what, and why.
    `in_place` is the label of our engine that stands for the study's.
    """

    verdict: Verdict
    value: float | None
    words: str
    missing: tuple[str, str, str] | None = None
    on_ours: OnOurs = ""
    in_place: str = ""


class _NoValueError(Exception):
    """A quantity that these results lack; its arguments are `Finding.missing`."""


def examine(claim: Claim, view: View) -> Finding:
    """Test a claim against the results."""
    if claim.quantity is None:
        return Finding("not testable", None, claim.untestable)
    in_place = ", ".join(view.label(name) for name in stand_ins(claim))
    try:
        value = _quantity(view, claim, claim.engine, claim.of)
        shown = f"{view.label(claim.engine)}: {_text(claim.quantity, value)}"
        if claim.than:
            other = _quantity(view, claim, claim.than, claim.of if claim.quantity in OF_BOTH else "")
            shown += f"; {view.label(claim.than)}: {_text(claim.quantity, other)}"
            if claim.quantity.endswith(DIFFERENCES):
                value -= other
                shown += f"; difference {'+' if value > 0 else ''}{fixed(value, 4)}"
            else:
                value = value / other if other else math.inf
                shown += f"; ratio {significant(value) if abs(value) >= 1e-3 else scientific(value)}"
    except _NoValueError as error:
        measure, label, reason = error.args
        words, missing = f"{label}: not measured", (measure, label, reason)
        if in_place:
            return Finding("not tested", None, words, missing, "not measured", in_place)
        return Finding("not testable", None, words, missing)
    low = -math.inf if claim.low is None else claim.low
    high = math.inf if claim.high is None else claim.high
    holds = low <= value <= high
    if kind := compilation(claim):
        shown += f" ({kind})"
    if in_place:
        return Finding("not tested", value, shown, None, "holds" if holds else "does not hold", in_place)
    return Finding("reproduced" if holds else "not reproduced", value, shown)


def stand_ins(claim: Claim) -> list[str]:
    """The engines of ours that stand for others in a claim."""
    return [name for name in dict.fromkeys((claim.engine, claim.than)) if name in OURS]


def compilation(claim: Claim) -> str:
    """Whether the quantity of a claim contains compilation, in words; nothing where that makes no difference."""
    if claim.quantity in WITH_COMPILATION:
        return "compilation included, no system image"
    return "without compilation" if claim.quantity in STEADY else ""


def limits(claim: Claim) -> str:
    """Between which numbers the tested value lies when the claim holds."""
    if claim.quantity is None:
        return ""
    if claim.low is not None and claim.high is not None:
        return f"{given(claim.low)} to {given(claim.high)}"
    if claim.low is not None:
        return f"≥ {given(claim.low)}"
    return "" if claim.high is None else f"≤ {given(claim.high)}"


def saved(view: View, engine: str, technique: str, quantity: str, alone: bool = False) -> float | None:
    """The share of time or bytes that a technique saves: 1 - with it / without it, the others on; None without runs.

    `technique` is "all" for all of them against none; `quantity` is a column of the ablation's tidy file. `alone`: the
    technique as the only one against none, where the others leave it nothing to save.
    """
    rows = view.ablation[view.ablation["engine"] == engine].set_index(["configuration", "technique"])[quantity]
    rows.index = rows.index.map(lambda key: (key[0], "" if pd.isna(key[1]) else key[1]))
    this = ("alone", technique) if alone else ("all", "")
    other = ("none", "") if alone or technique == ALL else ("without", technique)
    if this not in rows.index or other not in rows.index:
        return None
    if rows[other] == 0:  # nothing is left to save, or all that the technique needs is more
        return 0.0 if rows[this] == 0 else -math.inf
    return float(1 - rows[this] / rows[other])


def _quantity(view: View, claim: Claim, engine: str, of: str) -> float:
    """The value of a claim's quantity for an engine; _NoValueError with the reason when there is none."""
    name = str(claim.quantity)
    if name.startswith("variant_") and not of:  # compared with the engine's own run of the paper's network
        name = name.removeprefix("variant_")
    measure, value = _MEASURED[name]
    if name in WITH_COMPILATION and with_image(view.ok(measure, engine)).any():
        reason = "measured from a system image of Julia, without compilation; run again with TWINGRAD_SYSIMAGE=0"
        raise _NoValueError(MEASURE_NAMES[measure], view.label(engine), reason)
    found = value(view, engine, of)
    if found is None or math.isnan(found):
        reason = view.why_missing(engine, measure) or "not measured"
        raise _NoValueError(MEASURE_NAMES[measure], view.label(engine), reason)
    return found


def _run(measure: str, column: str) -> Callable[[View, str, str], float | None]:
    return lambda view, engine, _: row_helpers.or_none(view.ok(measure, engine)[column].mean())


def _own(column: str) -> Callable[[View, str, str], float | None]:
    def value(view: View, engine: str, _: str) -> float | None:
        return row_helpers.or_none(row_helpers.own_runs(view, engine)[column].mean())

    return value


def _first_to_later(view: View, engine: str, _: str) -> float | None:
    runs = view.ok("time", engine)
    return row_helpers.or_none((runs["first_epoch_seconds"] / runs["later_epoch_seconds"]).mean())


def _average(view: View, engine: str, _: str) -> float | None:
    return row_helpers.or_none(row_helpers.epoch_average(view, engine).mean())


def _step(view: View, engine: str, _: str) -> float | None:
    rounds = view.race[(view.race["engine"] == engine) & (view.race["threads"] == view.race["threads"].max())]
    return row_helpers.or_none(rounds["microseconds_per_step"].median())


def _saved(column: str, alone: bool = False) -> Callable[[View, str, str], float | None]:
    return lambda view, engine, of: saved(view, engine, of, column, alone)


def _variant(column: str) -> Callable[[View, str, str], float | None]:
    def value(view: View, engine: str, of: str) -> float | None:
        rows = view.variants[(view.variants["engine"] == engine) & (view.variants["variant"] == of)]
        rows = rows[rows["epoch"] > 1] if column == "seconds" else rows[rows["epoch"] == rows["epoch"].max()]
        return row_helpers.or_none(rows[column].mean())

    return value


def _variant_gain(view: View, engine: str, of: str) -> float | None:
    """What test accuracy gains after epoch `SETTLED`, as the mean over the seeds."""
    rows = view.variants[(view.variants["engine"] == engine) & (view.variants["variant"] == of)]
    by_epoch = rows.groupby("epoch")["test_accuracy"].mean()
    if SETTLED not in by_epoch.index or by_epoch.index.max() == SETTLED:
        return None
    return float(by_epoch[by_epoch.index.max()] - by_epoch[SETTLED])


_MEASURED: dict[str, tuple[str, Callable[[View, str, str], float | None]]] = {
    **{
        name: ("time", _run("time", name))
        for name in (
            *("first_epoch_seconds", "later_epoch_seconds", "total_seconds"),
            *("train_accuracy", "test_accuracy", "test_loss"),
        )
    },
    **{
        name: ("memory", _run("memory", name)) for name in ("bytes_first_epoch", "bytes_later_epochs", "peak_rss_bytes")
    },
    "bytes_all_epochs": ("memory", lambda view, engine, _: row_helpers.memory_of(view, engine)["total"]),
    "first_to_later_seconds": ("time", _first_to_later),
    "average_epoch_seconds": ("time", _average),
    "step_microseconds": ("race", _step),
    "own_train_accuracy": ("own", _own("train_accuracy")),
    "own_test_accuracy": ("own", _own("test_accuracy")),
    "own_test_loss": ("own", _own("test_loss")),
    "technique_time_saved": ("ablation", _saved("microseconds_per_step")),
    "technique_bytes_saved": ("ablation", _saved("bytes_per_epoch")),
    "technique_alone_bytes_saved": ("ablation", _saved("bytes_per_epoch", alone=True)),
    "variant_test_accuracy": ("variants", _variant("test_accuracy")),
    "variant_late_gain_accuracy": ("variants", _variant_gain),
    "variant_later_epoch_seconds": ("variants", _variant("seconds")),
    "gradient_nanoseconds": ("microbenchmarks", microbenchmarks.gradient_time),
    "gradient_to_forward": ("microbenchmarks", microbenchmarks.gradient_to_forward),
    "chunked_gradient_nanoseconds": ("microbenchmarks", microbenchmarks.chunked_time),
}
"""Each quantity of `config.ClaimQuantity`: the measure that it comes from, and its value for an engine."""


def _text(quantity: str, value: float) -> str:
    if quantity.endswith("accuracy"):
        return fraction(value)
    if quantity.startswith("bytes") or quantity.endswith("bytes"):
        return size(value)
    if quantity.endswith("nanoseconds"):
        return nanoseconds(value)
    if quantity == "gradient_to_forward":
        return f"{significant(value)} times"
    if quantity.startswith("technique"):
        return f"{percent(value)} saved"
    if quantity.startswith("first_to_later"):
        return f"{significant(value)} times"
    unit = " µs" if quantity.startswith("step") else " s" if quantity.endswith("seconds") else ""
    return f"{significant(value)}{unit}"
