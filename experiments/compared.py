"""What a comparison of results says, as tables for the terminal and for the page (`experiments.comparison`)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.comparison import Comparison, Difference, probability, signed
from experiments.formats import MISSING, aligned, fixed, fraction, scientific
from experiments.measures.registry import WORDS


@dataclass(frozen=True)
class Shown:
    """A table in words: rows under headings, of which the first `words` cells are no numbers."""

    id: str
    title: str
    headers: Sequence[str]
    groups: Sequence[tuple[str, list[list[str]]]]
    words: int = 1
    notes: Sequence[str] = field(default_factory=tuple)

    def document(self) -> dict[str, Any]:
        """What the page shows, as `experiments.report.table.to_json` has it."""
        align = ["left" if index < self.words else "right" for index in range(len(self.headers))]
        groups = [{"heading": heading, "rows": rows} for heading, rows in self.groups]
        more = {"groups": groups, "notes": list(self.notes), "wide": True, "producer": "compare"}
        return {"id": self.id, "title": self.title, "headers": list(self.headers), "align": align, **more}


def document(comparison: Comparison) -> dict[str, Any]:
    """What the page shows of a comparison."""
    return {
        "here": comparison.here.name,
        "there": comparison.there.name,
        "reproduced": comparison.reproduced,
        "verdict": [line.strip() for line in comparison.verdict()],
        "notes": comparison.notes,
        "tables": [table.document() for table in tables(comparison)],
    }


def tables(comparison: Comparison) -> list[Shown]:
    """All tables of a comparison that have a row."""
    runs = [[row["study"], str(row["both"]), str(row["only_here"]), str(row["only_there"])] for row in comparison.runs]
    first = Shown("runs", "Runs", ("STUDY", "BOTH", "ONLY HERE", "ONLY THERE"), [("", runs)])
    others = (make(comparison) for make in (_failed, _accuracies, _steps, _losses, _claims, _origins))
    return [first, *(table for table in others if table.groups)]


def lines(comparison: Comparison, width: int) -> Iterator[str]:
    """The comparison as lines of a terminal: what both sides are, the tables, and the verdict last."""
    for word, side in (("here", comparison.here), ("there", comparison.there)):
        told = f"{side.name}: {len(side.records)} runs on {'; '.join(side.machines)}"
        yield from textwrap.wrap(told, width, initial_indent=f"{word:7}", subsequent_indent=" " * 7)
    for note in comparison.notes:
        yield from textwrap.wrap(note, width)
    for table in tables(comparison):
        yield ""
        yield table.title
        yield from _listed(table, width) if table.id == "origin" else _aligned(table)
        for note in table.notes:
            yield from textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="  ")
    yield ""
    for line in comparison.verdict():
        first = line[: len(line) - len(line.lstrip())]
        yield from textwrap.wrap(line.strip(), width, initial_indent=first, subsequent_indent="    ")


def _aligned(table: Shown) -> Iterator[str]:
    """Rows in columns that all groups share, numbers flush right, each group under its heading."""
    rows = [row for _, group in table.groups for row in group]
    words = [index for index, header in enumerate(table.headers) if index < table.words or header == ""]
    heads, *lines = (f"  {line}" for line in aligned([table.headers, *rows], words))
    yield heads
    for heading, group in table.groups:
        if heading:
            yield heading
        yield from lines[: len(group)]
        lines = lines[len(group) :]


def _listed(table: Shown, width: int) -> Iterator[str]:
    """Long texts below each other."""
    for _, rows in table.groups:
        for what, here, there in rows:
            yield f"  {what}"
            for word, text in (("here", here), ("there", there)):
                yield from textwrap.wrap(text, width, initial_indent=f"    {word:6}", subsequent_indent=" " * 10)


def _grouped(
    found: Sequence[Difference],
    cells: Callable[[Difference], list[str]],
    heading: Callable[[Difference], str] = lambda one: one.study,
) -> list[tuple[str, list[list[str]]]]:
    """Rows under headings, by default the names of their studies."""
    groups: dict[str, list[list[str]]] = {}
    for one in found:
        groups.setdefault(heading(one), []).append(cells(one))
    return list(groups.items())


def _mark(one: Difference, word: str) -> str:
    return word.upper() if one.counts else word


def _failed(comparison: Comparison) -> Shown:
    found = comparison.of("failed")
    return Shown(
        *("failed", "Runs that finished on one side alone", ("ENGINE", "MEASURE", "HERE", "THERE")),
        _grouped(found, lambda one: [one.engine.replace(",", ", "), one.what, _mark(one, one.here), one.there]),
        words=4,
        notes=list(dict.fromkeys(one.words for one in found)),
    )


def _accuracies(comparison: Comparison) -> Shown:
    def cells(one: Difference) -> list[str]:
        about = one.about
        return [
            one.engine,
            str(about["runs"]),
            _mean(one.here, (about["here_low"], about["here_high"])),
            _mean(one.there, (about["there_low"], about["there_high"])),
            signed(100 * about["difference"], 2),
            probability(about["p_corrected"]),
            _mark(one, about["state"]),
        ]

    return Shown(
        *("accuracy", "Test accuracy of the same runs"),
        ("ENGINE", "N", "HERE", "THERE", "DIFF", "P", ""),
        _grouped(comparison.of("accuracy"), cells, lambda one: f"{one.study}, {WORDS.get(one.what, one.what)}"),
        notes=[
            "Means over N runs and 95 % intervals; the difference in percentage points; p of a paired test, corrected "
            "for the number of rows. A difference counts where it is over half a point and p is below 0.05; without "
            "the latter it is open."
        ],
    )


def _mean(mean: float, interval: tuple[float, float]) -> str:
    half = (interval[1] - interval[0]) / 2
    return f"{fraction(mean)} ±{fraction(half).removeprefix('0')}"


def _steps(comparison: Comparison) -> Shown:
    found = comparison.of("step")

    def cells(one: Difference) -> list[str]:
        about = one.about
        state = "TURNED" if one.counts else "moved" if about["apart"] else "same"
        return [
            one.engine,
            _ratio(one.here, about["here_spread"]),
            _ratio(one.there, about["there_spread"]),
            fixed(about["change"]),
            state,
        ]

    notes = [
        "The median over the rounds of a race, and its 95 % interval, of fewer than six rounds the least and the most; "
        "the change is the quotient of the two. moved: the intervals do not overlap; TURNED: faster than PyTorch on "
        "one side and slower on the other, which counts."
    ]
    machines = len({(one.about["machine_here"], one.about["machine_there"]) for one in found}) > 1

    def heading(one: Difference) -> str:
        where = f": {one.about['machine_here']} against {one.about['machine_there']}" if machines else ""
        return f"{one.study}, {one.what}{where}"

    title = "Time of a step, as a ratio to PyTorch's on the same machine"
    return Shown("steps", title, ("ENGINE", "HERE", "THERE", "CHANGE", ""), _grouped(found, cells, heading), 1, notes)


def _ratio(median: float, spread: tuple[float, float]) -> str:
    return f"{fixed(median)} ({fixed(spread[0])} to {fixed(spread[1])})"


def _losses(comparison: Comparison) -> Shown:
    def cells(one: Difference) -> list[str]:
        numbers = [scientific(one.about[name]) for name in ("first", "largest")]
        return [one.engine, str(one.about["runs"]), *numbers, _mark(one, one.about["state"])]

    return Shown(
        *("losses", "Losses from the same weights and batches", ("ENGINE", "N", "FIRST STEP", "FIRST 100 STEPS", "")),
        _grouped(comparison.of("losses"), cells),
        notes=[
            "The largest difference over the runs. Over 10⁻⁴ at the first step, or over 10⁻² later, counts; between "
            "10⁻⁴ and 10⁻² rounding drifts apart in training."
        ],
    )


def _claims(comparison: Comparison) -> Shown:
    found = [one for one in comparison.of("claim") if "not measured" not in (one.here, one.there)]

    def cells(one: Difference) -> list[str]:
        return [one.what, one.here, one.there, "COUNTS" if one.counts else "near its limit"]

    unmeasured = len(comparison.of("claim")) - len(found)
    notes = [f"{unmeasured} claims were measured on one side alone."] if unmeasured else []
    headers = ("CLAIM", "HERE", "THERE", "")
    return Shown("claims", "Claims whose verdict differs", headers, _grouped(found, cells), words=4, notes=notes)


def _origins(comparison: Comparison) -> Shown:
    rows = [[one.what, one.here or MISSING, one.there or MISSING] for one in comparison.of("origin")]
    groups = [("", rows)] if rows else []
    return Shown("origin", "Versions and hardware that differ", ("WHAT", "HERE", "THERE"), groups, words=3)
