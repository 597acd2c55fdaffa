"""What the studies claim, and whether it holds here: a closed set of tests on the results.

Nothing is decided by hand: a paper's file says which quantity of which engine a claim is about and between which
limits it lies when the claim holds. The verdict and the number behind it follow from the results at hand.

A statement is reproduced, or not, only where it was tested on the engines that it names. The studies' own engines are
not run here; where one of ours stands for one, the statement is not tested, and what holds for ours is said apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from experiments.formats import fixed, given, scientific, significant
from experiments.measures.registry import WORDS
from experiments.papers import Claim
from experiments.quantities import INHERITING, QUANTITIES
from experiments.report.view import View, with_image

Verdict = Literal["reproduced", "not reproduced", "not tested", "not testable"]
"""Of a study's statement; "not tested" where an engine of ours stands for one that is not run here."""

OnOurs = Literal["holds", "does not hold", "not measured", ""]
"""Of the same statement with our engine in the place of the study's; empty where no engine of ours takes part."""

OURS = frozenset((*INHERITING, "numpy-eager", "numpy-compiled", "julia-eager", "julia-compiled", "julia-forward"))
"""Engines, and systems of the micro-benchmarks, that are none of a study's."""


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
    quantity = QUANTITIES[claim.quantity]
    in_place = ", ".join(view.label(name) for name in stand_ins(claim))
    try:
        value = _quantity(view, claim, claim.engine, claim.of)
        shown = f"{view.label(claim.engine)}: {quantity.unit.show(value)}"
        if claim.than:
            other = _quantity(view, claim, claim.than, claim.of if quantity.of_both else "")
            shown += f"; {view.label(claim.than)}: {quantity.unit.show(other)}"
            if quantity.unit.differences:
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
    contains = QUANTITIES[claim.quantity].compilation if claim.quantity else None
    return "" if contains is None else "compilation included, no system image" if contains else "without compilation"


def limits(claim: Claim) -> str:
    """Between which numbers the tested value lies when the claim holds."""
    if claim.quantity is None:
        return ""
    if claim.low is not None and claim.high is not None:
        return f"{given(claim.low)} to {given(claim.high)}"
    if claim.low is not None:
        return f"≥ {given(claim.low)}"
    return "" if claim.high is None else f"≤ {given(claim.high)}"


def _quantity(view: View, claim: Claim, engine: str, of: str) -> float:
    """The value of a claim's quantity for an engine; _NoValueError with the reason when there is none."""
    name = str(claim.quantity)
    if name.startswith("variant_") and not of:  # compared with the engine's own run of the paper's network
        name = name.removeprefix("variant_")
    quantity = QUANTITIES[name]
    measure = quantity.measure
    if quantity.compilation and with_image(view.ok(measure, engine)).any():
        reason = "measured from a system image of Julia, without compilation; run again with TWINGRAD_SYSIMAGE=0"
        raise _NoValueError(WORDS[measure], view.label(engine), reason)
    found = quantity.value(view, engine, of)
    if found is None:
        reason = view.why_missing(engine, measure) or "not measured"
        raise _NoValueError(WORDS[measure], view.label(engine), reason)
    return found
