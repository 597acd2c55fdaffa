"""What came of runs, in the terminal's words: a line for each run, and tables of all."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from experiments.formats import duration, significant
from experiments.measures.registry import MEASURES
from experiments.quantities import QUANTITIES, Quantity
from experiments.results import COLUMNS, Record, failed_as_a_whole, tidy_rows


def rows(records: Iterable[Record]) -> list[Record]:
    """The rows of `tidy/runs.csv` for records."""
    return [{name: row.get(name) for name in COLUMNS["runs"]} for row in tidy_rows(records)["runs"]]


def described(record: Record) -> str:
    """One run in a few words, as its line of progress says it."""
    took = f"  (in all {duration(record['seconds'])})"
    if record["status"] != "ok":
        word = "left out" if record["error_kind"] == "unavailable" else "FAILED"
        return f"{word}: {record['error'].splitlines()[0]}"
    measure = MEASURES[record["config"]["measure"]]
    if measure.plan == "together":
        absent = [name for name, entrant in record["entrants"].items() if entrant["error"]]
        without = f"  without {', '.join(absent)}" if absent else ""
        return f"{record['config']['rounds']} rounds{without}{took}"
    if measure.columns:
        return f"{len(list(measure.table(record)))} rows{took}"
    row = rows([record])[0]
    quantities = [QUANTITIES[name] for name in measure.summary]
    sample = record["data"]["source"] == "sample"
    return (
        "  ".join(
            f"{_label(one, sample)} {one.unit.show(row[one.column])}"
            for one in quantities
            if row[one.column] is not None
        )
        + took
    )


def _label(quantity: Quantity, sample: bool) -> str:
    """What a quantity is called; accuracy on the embedded sample is not that on a study's test data."""
    return quantity.label.replace("test accuracy", "accuracy of the sample") if sample else quantity.label


def tables(records: Iterable[Record]) -> list[tuple[list[str], list[list[str]], int]]:
    """Tables of what the measures' summaries name: headers, lines, and how many columns of words come first."""
    records = list(records)
    found = [_trainings(records), *(_table(name, records) for name, one in MEASURES.items() if one.columns)]
    return [table for table in found if table[1]]


def _trainings(records: list[Record]) -> tuple[list[str], list[list[str]], int]:
    """A line for each paper and engine with its seeds and the means of its quantities."""
    quantities = [QUANTITIES[name] for one in MEASURES.values() if not one.columns for name in one.summary]
    sample = any(record["data"]["source"] == "sample" for record in records)
    groups: dict[tuple[str, str], list[Record]] = {}
    for row in rows(records):
        if row["status"] == "ok" and not MEASURES[row["measure"]].columns:
            groups.setdefault((row["paper"], row["engine"]), []).append(row)
    values = {
        place: [[row[one.column] for row in group if row["measure"] == one.measure] for one in quantities]
        for place, group in groups.items()
    }
    lines = [
        [*place, str(len({row["seed"] for row in group})), *map(_mean, quantities, values[place])]
        for place, group in groups.items()
    ]
    headers = ["PAPER", "ENGINE", "SEEDS", *(_label(one, sample).upper() for one in quantities)]
    used = [index for index in range(len(headers)) if any(line[index] != "-" for line in lines)]
    return [headers[index] for index in used], [[line[index] for index in used] for line in lines], 2


def _mean(quantity: Quantity, values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return quantity.unit.show(statistics.fmean(known)) if known else "-"


def _table(name: str, records: list[Record]) -> tuple[list[str], list[list[str]], int]:
    """A line for each row of a measure's own table, with the columns that its summary names."""
    measure = MEASURES[name]
    lines = [
        [record["config"]["paper"], _engine(row, record), *(_cell(row.get(column)) for column in measure.summary)]
        for record in records
        if measure.summary and record["config"]["measure"] == name and not failed_as_a_whole(record)
        for row in measure.table(record)
    ]
    headers = ["PAPER", "ENGINE", *(column.replace("_", " ").upper() for column in measure.summary)]
    return headers, lines, 3


def _engine(row: dict[str, Any], record: Record) -> str:
    """Whose row it is: one of several engines that were measured together, or the only one."""
    return str(row.get("engine") or record["config"]["engine"])


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("_", " ")
    return str(value) if isinstance(value, int) else significant(value)
