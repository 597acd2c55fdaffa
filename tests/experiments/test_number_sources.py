"""No number is typed by hand: each comes from a record, from a paper's file with its source, or says what it is."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments import papers
from experiments.papers import Paper, file, load_paper
from experiments.report import figures, numbers, row_helpers, table, tables
from experiments.report.view import ReportError, View
from experiments.results import COLUMNS

ROOT = Path(__file__).resolve().parents[2]
PAPERS = papers.keys_of_others()
ViewOf = Callable[..., View]

UNIT = r"(?:%|s\b|µs|ms\b|ns\b|minutes?|hours?|[kMGT]?i?B\b|bytes|times\b|percent|points?\b)"
MEASURED = rf"(?<![\w.])\d+(?:[.,]\d+)*\s?(?:{UNIT})"
"""What looks like something measured: a number with a unit."""


@pytest.fixture(params=PAPERS)
def empty(request: pytest.FixtureRequest, view_of: ViewOf) -> View:
    """A study of which nothing was run."""
    return view_of({name: [] for name in COLUMNS}, paper=request.param)


def bare(view: View) -> View:
    """The same without what the study reports and cites."""
    return dataclasses.replace(view, paper=view.paper.model_copy(update={"reported": [], "cited": []}))


# Tables, figures and the numbers of the text -------------------------------------------------------------------------

NO_RESULT = {
    ("variants", "network"): "the names of networks",
    ("race", "ratio to PyTorch"): "PyTorch's ratio to itself is 1",
    **dict.fromkeys([("summary", "seeds"), ("parity", "seeds")], "that no seed was run"),
}
"""Cells that have digits though nothing was run, and why."""

FROM_FILES = {"settings": "the study's file", "claims": "the claims and their limits, from the study's file"}
"""Tables that are about the study's file itself."""

DRAWN_FROM = {
    "architecture": "the model's spec",
    "recurrent_cell": "the model's spec",
    "dataset_examples": "the dataset",
    "review_examples": "the dataset",
}
"""Figures without a measured number, and what they are drawn from."""


def producers(paper: Paper) -> dict[str, row_helpers.Producer]:
    """What makes the tables of a study."""
    return {output.producer: row_helpers.PRODUCERS[output.producer] for output in paper.tables}


def test_every_producer_is_used_by_a_study() -> None:
    used = {name for key in PAPERS for name in producers(load_paper(key))}
    of_sizes = {  # tested by test_sizes.py
        *("sizes", "sizes_held", "sizes_start", "sizes_memory", "sizes_threads", "sizes_limits", "sizes_ablation"),
        *("growth", "growth_seconds", "sizes_totals"),
    }
    others = {"peak_memory", "quantities"} | of_sizes  # tested by test_report.py and test_new_quantity.py
    assert set(row_helpers.PRODUCERS) - used <= others, "what no study uses is not tested here"


def cells(made: table.Table) -> Iterator[tuple[str, table.Row, str]]:
    """Every printed cell with digits: the heading of its column, its row, its text."""
    for row in made.rows:
        for column in made.columns:
            if re.search(r"\d", text := column.text(row)):
                yield column.header, row, text


def test_without_records_and_reported_values_no_number_is_left(empty: View) -> None:
    """So that every number of a table, a figure or the text comes from one of the two."""
    view = bare(empty)
    for name, producer in producers(view.paper).items():
        if name not in FROM_FILES:
            left = [(header, text) for header, _, text in cells(producer(view)) if (name, header) not in NO_RESULT]
            assert not left, (name, left)
    for name in dict.fromkeys(output.producer for output in view.paper.figures):
        draw = figures.PRODUCERS[name]
        if name not in DRAWN_FROM:
            with pytest.raises((figures.NotDrawnError, ReportError)):
                draw(view)
    about_files = ("setting.", "settings.", "claims.", "parity.tolerance")
    left = [name for name in numbers.of_paper(view) if not name.startswith(about_files) and not name.endswith(".label")]
    assert not left


def test_a_number_without_a_record_is_the_study_s_own_and_says_so(empty: View) -> None:
    found = 0
    for name, producer in producers(empty.paper).items():
        for header, row, text in cells(producer(empty)) if name not in FROM_FILES else ():
            if (name, header) in NO_RESULT:
                continue
            group = {
                "reported": "Reported by the paper",
                "measured once": "Measured once, not reproducible here",
                "cited": "Cited by the paper",
            }
            assert row["group"].startswith(group[row["kind"]]), (name, text)
            known = in_file(empty.paper, row["kind"])
            values = [item for item in row.values() if isinstance(item, float)]
            assert values or "words" in row, (name, text)
            for value in values:
                assert any(value == pytest.approx(item, rel=1e-9) for item in known), (name, header, value)
            found += 1
    assert found >= 3


def in_file(paper: Paper, kind: str) -> list[float]:
    """The numbers of a kind in a paper's file, in their own unit and in those that tables convert them to."""
    if kind == "cited":
        times = [item.value for item in paper.cited if item.value is not None]
        forward = [item.value for item in paper.cited if item.value is not None and item.column == "Forward"]
        return [value * 1e9 for value in times] + [value / base for value in times for base in forward]
    found = []
    for item in paper.reported:
        if (item.kind == "paper") == (kind == "reported"):
            factor = row_helpers.UNITS.get(item.quantity.partition("_")[0], 1.0)
            values = [*item.by_epoch, *([] if item.value is None else [item.value])]
            found += [value * scale for value in values for scale in (1.0, factor)]
            found += [float(epoch) for epoch in range(1, len(item.by_epoch) + 1)]
    return found


def test_a_number_with_a_record_changes_with_it(fake: ModuleType, view_of: ViewOf) -> None:
    """The measured cells of a table hold nothing that stays when every record has other numbers."""
    quantities = re.compile(r"seconds|accuracy|loss|bytes")
    for key in ("imdb-cnn-a",):
        sweep = fake.rows(key, seeds=2, engines=("numpy", "julia", "torch"))
        other = {
            name: [
                {field: value * 1.7 if value and quantities.search(field) else value for field, value in row.items()}
                for row in rows
            ]
            for name, rows in sweep.items()
        }
        one, two = view_of(sweep, paper=key), view_of(other, paper=key)
        changed = 0
        for name in ("performance", "memory", "accuracy", "epoch_times", "variants"):
            for before, after in zip(tables.PRODUCERS[name](one).rows, tables.PRODUCERS[name](two).rows, strict=True):
                for field, value in before.items():
                    if isinstance(value, float) and value and before["kind"] == "measured":
                        assert after[field] != value, (name, field)
                        changed += 1
        assert changed > 50


@pytest.mark.parametrize("key", ["imdb-cnn-a", "mnist-rnn-e"])
def test_every_export_of_a_table_labels_what_was_measured_once(key: str, view_of: ViewOf) -> None:
    view = view_of({name: [] for name in COLUMNS}, paper=key)
    label = row_helpers.MEASURED_ONCE.partition(" ")[2]
    found = 0
    for producer in producers(view.paper).values():
        made = producer(view)
        if any(row.get("kind") == "measured once" for row in made.rows):
            for text in (table.to_markdown(made), table.to_latex(made), json.dumps(table.to_json(made))):
                assert f"easured {label}" in text
            assert "measured once" in table.to_csv(made)
            found += 1
    assert found >= 2
    assert label in numbers.of_paper(view)["rerun.source"]["text"]


# The text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["main.typ", "sections.typ"])
def test_a_sentence_with_what_was_measured_once_says_so(name: str) -> None:
    text = (ROOT / "paper" / name).read_text(encoding="utf-8")
    blocks = [block for block in re.split(r"\n\s*(?=#if |\])", text) if 'n(paper, "rerun.Own' in block]
    assert blocks or name == "main.typ"
    assert all('n(paper, "rerun.source")' in block for block in blocks)


IN_THE_TEXT = {
    "95~% confidence interval": "the level of all intervals, experiments/testing.py",
    "where 1 is growth in proportion": "what an exponent of one means",
    "2-LAYER MNIST MLP": "the name of a function",
}
"""Digits in the prose of the PDF, and why they are there."""


@pytest.mark.parametrize("name", ["main.typ", "sections.typ"])
def test_the_text_has_no_digit_of_its_own(name: str) -> None:
    text = (ROOT / "paper" / name).read_text(encoding="utf-8")
    for words in IN_THE_TEXT:
        text = text.replace(words, "")
    found = [line.strip() for line in prose(text).splitlines() if re.search(r"(?<![\w@\\#])\d", line)]
    assert not found, found


def prose(text: str) -> str:
    """A typst text without comments, strings, code and measures of the layout."""
    text = re.sub(r"(?m)//.*$", "", text)
    text = re.sub(r'"[^"\n]*"', "", text)
    text = re.sub(r"(?m)^\s*#?(let|set|show|import)\b.*$", "", text)
    text = re.sub(r"(?:#|\b)(?:else )?if [^\[\n]*|#for [^\[\n]*", "", text)
    text = re.sub(r"(?m)^\s*(?:columns|align|inset|stroke|kind|let|table\.\w+|set|caption|\.\.)[^\n]*$", "", text)
    return re.sub(r"@[\w-]+|<[\w-]+>|\d+(?:\.\d+)?(?:pt|em|fr|cm)\b|\([^()\n]*\)|\{[^{}\n]*\}", "", text)


OF_THE_PROGRAM = {
    "500 times": "the definition of LOOP (functions.py)",
    "1 GiB": "what a GiB is, computed beside it",
}
"""Numbers with a unit in the strings of the report's code, and why they are there."""


def test_the_code_of_the_report_has_no_result_in_its_strings() -> None:
    found = []
    for path in sorted((ROOT / "experiments" / "report").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found += [(path.name, text) for text in re.findall(MEASURED, node.value) if text not in OF_THE_PROGRAM]
    assert not found


# The papers' files ---------------------------------------------------------------------------------------------------

OF_THE_FILES: dict[str, str] = {}
"""Numbers with a unit in what a paper's file says itself, and why they are there."""


@pytest.mark.parametrize("key", PAPERS)
def test_a_paper_s_file_has_measured_numbers_only_where_a_source_stands(key: str) -> None:
    """In what it reports, cites and claims, which have `where`, and in settings with a source."""
    content = file.document((papers.PAPERS_DIR / f"{key}.toml").read_text(encoding="utf-8"))
    for kind in ("reported", "cited", "claims"):
        assert all(item["where"] for item in content.get(kind, ()))
    rest = {
        name: value for name, value in content.items() if name not in ("reported", "cited", "claims", "environment")
    }
    found = [text for words in strings(rest) for text in re.findall(MEASURED, words) if text not in OF_THE_FILES]
    assert not found


def strings(value: Any) -> Iterator[str]:
    """The texts of a document, but for those of settings whose source is the paper or its code."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, dict) and value.get("source") not in ("paper", "code"):
        for item in value.values():
            yield from strings(item)


def test_what_was_measured_once_is_what_the_project_s_facts_say() -> None:
    found = {
        (key, item.quantity): item.by_epoch or item.value
        for key in PAPERS
        for item in load_paper(key).reported
        if item.kind == "rerun"
    }
    assert found == {
        ("imdb-cnn-a", "seconds_per_epoch"): 9.46,
        ("imdb-cnn-a", "gigabytes_per_epoch"): 10.07,
        ("mnist-rnn-e", "seconds_per_epoch"): 7.0,
        ("mnist-rnn-e", "gibibytes_per_epoch"): 17.3,
        ("mnist-rnn-e", "train_accuracy"): [0.688, 0.857],
    }


# The README ----------------------------------------------------------------------------------------------------------

IN_THE_README = {
    "3.5 GB": "disk that an installation takes",
    "0.4 GB": "disk that Julia takes",
    "84 MB": "the size of a download",
    "862 MB": "the size of a download",
    "3 GB": "disk that asv takes",
    "1 MB": "a block of rows that are shuffled together",
    "64 MB": "rows that are asked for at a time",
    "13.5 times": "compared with the committed results (test_readme.py)",
    "2.19 times": "compared with the committed results (test_readme.py)",
    "3.3 times": "compared with the committed results (test_readme.py)",
    "3.8 s": "compared with the committed results (test_readme.py)",
    "3.0 s": "compared with the committed results (test_readme.py)",
    "3.6 s": "compared with the committed results (test_readme.py)",
    "2.75 MB": "compared with the committed results (test_readme.py)",
    "3.31 kB": "compared with the committed results (test_readme.py)",
    "1.01 GB": "compared with the committed results (test_readme.py)",
}
"""Numbers with a unit in the README's words, and why they are there; its table is compared by test_readme.py."""


def test_the_readme_has_no_measured_number_that_nothing_checks() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
    words = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    assert set(re.findall(MEASURED, words)) == set(IN_THE_README)
