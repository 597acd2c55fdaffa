"""A table and its exports: CSV with raw values, LaTeX (booktabs) and Markdown with printed ones.

A row is a dict of raw values. `Table.fields` are the columns of the CSV; `Table.columns` say how a row is printed,
which may join several fields in one cell (a mean and its spread). Rows are gathered under the headings of
`Table.group`, a field of theirs.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from experiments.formats import FROM_SUPERSCRIPTS, MISSING

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A printed column: its heading, and the text of a row's cell."""

    header: str
    text: Callable[[Row], str]
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Table:
    """A finished table. `notice` is set when the numbers come from sample data; `wide` spans the page's columns."""

    fields: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    id: str = ""
    title: str = ""
    group: str = "group"
    notes: tuple[str, ...] = ()
    notice: str | None = None
    wide: bool = False
    producer: str = ""

    def groups(self) -> list[tuple[str, list[list[str]]]]:
        """The printed cells, gathered under their headings (one empty heading when there are none)."""
        return [
            (heading, [[column.text(row) for column in self.columns] for row in rows])
            for heading, rows in groupby(self.rows, key=lambda row: str(row.get(self.group, "")))
        ]


def column(
    header: str, name: str, show: Callable[[Any], str] = str, align: Literal["left", "right"] = "right"
) -> Column:
    """A column that prints one field with `show`, and a dash where it is empty."""
    return Column(header, lambda row: MISSING if empty(row.get(name)) else show(row[name]), align)


def empty(value: Any) -> bool:
    """Whether a field holds nothing: None, an empty string or NaN."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


# ---------------------------------------------------------------------------------------------------------------------
# Exports


def to_csv(table: Table) -> str:
    """The raw values, one line per row; floats in full precision, nothing where a value is missing."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    fields = (*table.fields, "notice") if table.notice else table.fields
    writer.writerow(fields)
    for row in table.rows:
        cells = {**row, "notice": table.notice}
        writer.writerow(["" if empty(cells.get(name)) else cells[name] for name in fields])
    return buffer.getvalue()


def to_markdown(table: Table) -> str:
    """A pipe table under a bold title; group headings are separate rows."""
    lines = [f"**{markdown_escape(table.title)}**", ""]
    lines.append("| " + " | ".join(markdown_escape(item.header) for item in table.columns) + " |")
    lines.append("|" + "|".join("---:" if item.align == "right" else ":---" for item in table.columns) + "|")
    for heading, rows in table.groups():
        if heading:
            lines.append(f"| *{markdown_escape(heading)}* |" + " |" * (len(table.columns) - 1))
        lines += ["| " + " | ".join(markdown_escape(cell) for cell in cells) + " |" for cells in rows]
    for note in _notes(table):
        lines += ["", markdown_escape(note)]
    return "\n".join(lines) + "\n"


def to_latex(table: Table, label: str = "") -> str:
    """A booktabs `table` float; the document needs `\\usepackage{booktabs}` and UTF-8."""
    align = "".join("r" if item.align == "right" else "l" for item in table.columns)
    star = "*" if table.wide else ""
    lines = [
        f"% {table.id}: needs \\usepackage{{booktabs}}",
        f"\\begin{{table{star}}}",
        "\\centering",
        f"\\caption{{{latex_escape(table.title)}}}",
        f"\\label{{tab:{label or table.id}}}",
        f"\\begin{{tabular}}{{@{{}}{align}@{{}}}}",
        "\\toprule",
        " & ".join(latex_escape(item.header) for item in table.columns) + " \\\\",
        "\\midrule",
    ]
    for index, (heading, rows) in enumerate(table.groups()):
        if heading:
            if index:
                lines.append("\\addlinespace")
            lines.append(f"\\multicolumn{{{len(table.columns)}}}{{@{{}}l}}{{\\emph{{{latex_escape(heading)}}}}} \\\\")
        lines += [" & ".join(latex_escape(cell) for cell in cells) + " \\\\" for cells in rows]
    lines += ["\\bottomrule", "\\end{tabular}"]
    lines += [f"\\par\\smallskip{{\\footnotesize {latex_escape(note)}\\par}}" for note in _notes(table)]
    lines.append(f"\\end{{table{star}}}")
    return "\n".join(lines) + "\n"


def to_json(table: Table) -> dict[str, Any]:
    """What the paper's template prints: texts only, so that nothing in them can be read as markup."""
    return {
        "id": table.id,
        "title": table.title,
        "headers": [item.header for item in table.columns],
        "align": [item.align for item in table.columns],
        "groups": [{"heading": heading, "rows": rows} for heading, rows in table.groups()],
        "notes": _notes(table),
        "wide": table.wide,
        "producer": table.producer,
    }


def _notes(table: Table) -> list[str]:
    return ([f"Data: {table.notice}."] if table.notice else []) + list(table.notes)


# ---------------------------------------------------------------------------------------------------------------------
# Escaping

_LATEX = {
    "\\": "\\textbackslash{}",
    "{": "\\{",
    "}": "\\}",
    "[": "{[}",  # a bracket after a line end would be its option
    "]": "{]}",
    "&": "\\&",
    "%": "\\%",
    "$": "\\$",
    "#": "\\#",
    "_": "\\_",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    '"': "''",
    "±": "$\\pm$",
    "×": "$\\times$",
    "·": "$\\cdot$",
    "≈": "$\\approx$",
    "≤": "$\\leq$",
    "≥": "$\\geq$",
    "−": "$-$",
    "→": "$\\rightarrow$",
    "µ": "$\\mu$",
    "Δ": "$\\Delta$",
    "∞": "$\\infty$",
    "…": "...",
    "—": "---",
    "–": "--",
    "\u202f": "\\,",
    "\u00a0": "~",
    "“": "``",
    "”": "''",
    "’": "'",
}


def latex_escape(text: str) -> str:
    """Text that LaTeX prints as it is, signs and exponents included; line ends become spaces."""
    text = " ".join(text.split("\n"))
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"$^{{{found[0].translate(FROM_SUPERSCRIPTS)}}}$", escaped)


def markdown_escape(text: str) -> str:
    """Text that Markdown prints as it is, also inside a cell of a pipe table."""
    return re.sub(r"([\\`*_\[\]<>|~$#])", r"\\\1", " ".join(text.split("\n")))
