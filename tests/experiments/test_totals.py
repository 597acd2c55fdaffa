"""Whole trainings of the studies' networks: what the file says of them, a run, and the table of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from bridge.worker import Worker
from experiments import papers, summary, sweep
from experiments.data import imdb, mnist
from experiments.papers import PaperFileError
from experiments.progress import Progress
from experiments.report import numbers, totals
from experiments.report.table import to_markdown
from experiments.report.view import View, paper_view
from experiments.results import COLUMNS, Results, Tidy, tidy_rows

PAPER = papers.load_paper("sizes")
ViewOf = Callable[..., View]
ROWS = {"mnist": mnist.FILES[0].shape[0], "imdb": int(imdb.OPTIONS["split"].partition("/")[0])}


def test_the_trainings_are_those_of_the_studies() -> None:
    ways = set()
    for one in PAPER.trainings:
        study = papers.load_paper(one.id)
        training = study.training
        assert study.data.get("split") is None or study.data["split"].value == imdb.OPTIONS["split"]
        assert training.momentum is None or training.momentum.value == 0, "else it needs one here, too"
        expected = (study.model, training.optimizer.value, training.learning_rate.value, training.batch_size.value)
        assert (one.model, one.optimizer, one.learning_rate, one.batch_size) == expected
        assert (one.epochs, one.rows) == (training.epochs.value, ROWS[study.dataset])
        ways.add((*expected, one.epochs))
    for key in papers.keys_of_others():
        study = papers.load_paper(key)
        training = study.training
        way = (study.model, training.optimizer.value, training.learning_rate.value, training.batch_size.value)
        assert (*way, training.epochs.value) in ways, f"the training of {key} is missing"


def test_a_training_needs_a_model_that_there_is_and_its_own_id() -> None:
    text = (papers.PAPERS_DIR / "sizes.toml").read_text(encoding="utf-8")
    with pytest.raises(PaperFileError, match="training given twice: mnist-cnn"):
        papers.loads(text.replace('id = "mnist-cnn-batch100"', 'id = "mnist-cnn"'))
    with pytest.raises(PaperFileError, match="mnist-rnnn"):
        papers.loads(text.replace('model = "mnist-rnn"\n', 'model = "mnist-rnnn"\n')).check("sizes.toml")
    with pytest.raises(PaperFileError, match="the measure totals needs totals_rounds"):
        papers.loads(text.replace("totals_rounds = 3\n", ""))


def run(folder: Path, engines: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """A study with one small training, run with two rounds, and its record."""
    text = (papers.PAPERS_DIR / "sizes.toml").read_text(encoding="utf-8")
    head, _, _ = text.partition("[[families]]")
    training = """
[[trainings]]
id = "small"
title = "a small one"
model = "mnist-rnn"
optimizer = "sgd"
learning_rate = 0.015
batch_size = 10
epochs = 3
rows = 45
"""
    runs = f"""
measures = ["totals"]
totals_engines = {list(engines)}
totals_rounds = 2
totals_threads = [1]
"""
    paper = papers.loads(f"{head}{training}[runs.full]{runs}[runs.quick]{runs}[runs.sample]{runs}")
    results = Results(folder)
    with results.locked():
        found = sweep.Sweep(results).run(sweep.plan(paper), Progress(Console(file=io.StringIO()), 1))
        results.write_tidy()
    assert len(found.records) == 1
    return paper, found.records[0]


def test_each_round_trains_every_engine_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    steps = Worker.train_epoch

    def noted(self: Worker, *given: Any) -> Any:
        losses = steps(self, *given)
        lengths.append(len(losses))
        return losses

    monkeypatch.setattr(Worker, "train_epoch", noted)
    paper, record = run(tmp_path, ("numpy", "torch"))
    assert record["status"] == "ok", record["error"]
    assert [(row["engine"], row["round"]) for row in record["totals"]] == [
        *(("torch", 1), ("numpy", 1)),
        *(("numpy", 2), ("torch", 2)),
    ]
    assert lengths == [1, 5, 5, 5] * 4, "a first step, and epochs whose last mini-batch is partial"
    assert all(row["total_seconds"] > 0 and row["import_seconds"] > 0 for row in record["totals"])
    assert set(record["blas"]) == {"numpy", "torch"}
    rows = tidy_rows([record])["totals"]
    assert {row["network"] for row in rows} == {"small"} and len(rows) == 4
    made = totals.sizes_totals(paper_view(paper, Tidy.load(tmp_path)))
    assert len(made.rows) == 1 and made.rows[0]["numpy_ratio"] > 0 and made.rows[0]["steps"] == 15
    (table,) = [lines for headers, lines, _ in summary.tables([record]) if "NETWORK" in headers]
    assert {line[1] for line in table} == {"numpy", "torch"}, "each row says whose it is"


def test_an_engine_that_fails_is_named_and_the_others_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Worker.build

    def failing(self: Worker, *given: Any, **options: Any) -> None:
        if self.engine.name == "torch":
            raise papers.TwinGradError("an invented reason")
        build(self, *given, **options)

    monkeypatch.setattr(Worker, "build", failing)
    _, record = run(tmp_path, ("numpy", "torch"))
    assert record["status"] == "failed" and "torch: an invented reason" in record["error"]
    assert [(row["engine"], row["round"]) for row in record["totals"]] == [("numpy", 1), ("numpy", 2)]


def test_start_up_and_totals_are_held_against_their_targets(fake: ModuleType, view_of: ViewOf) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    view = view_of(rows, paper="sizes")
    made = totals.sizes_totals(view)
    assert [row["network"] for row in made.rows] == [one.id for one in PAPER.trainings]
    assert made.rows[0]["julia_ratio"] == 0.6 and made.rows[0]["numpy_ratio"] == 1
    assert "| 0.400 (1.50) × | 10.0 (9.00–11.0) | 1.00 | 0.400 (1.50) | 6.00 (5.00–7.00) | 0.60 |" in (
        to_markdown(made)
    )
    said = (
        "TwinGrad Julia: start-up within 1.5 s in 5 of 5 networks, a whole training no longer than PyTorch's in 5 of 5."
    )
    assert said in made.notes
    found = numbers.of_paper(view)
    assert (found["sizes.totals.julia.count"]["text"], found["sizes.totals.julia.rows"]["text"]) == ("5", "5")
    assert found["sizes.totals.start.numpy.count"]["text"] == "0"
    for row in rows["totals"]:
        row["total_seconds"] *= 2 if row["engine"] == "julia" else 1
    behind = totals.sizes_totals(view_of(rows, paper="sizes"))
    assert "| 12.0 (10.0–14.0) | 1.20 × |" in to_markdown(behind)


def test_numbers_of_several_threads_are_apart(fake: ModuleType, view_of: ViewOf) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    alone = [
        row | {"threads": 1, "key": f"{row['key']}-1", "total_seconds": 10 * row["total_seconds"]}
        for row in rows["totals"]
    ]
    rows["totals"] += alone
    made = totals.sizes_totals(view_of(rows, paper="sizes"))
    assert [(row["threads"], row["julia_total_s"]) for row in made.rows] == [(2, 6.0)] * 5 + [(1, 60.0)] * 5


def test_a_network_that_failed_in_an_engine_is_named(fake: ModuleType, view_of: ViewOf) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    rows["totals"] = [row for row in rows["totals"] if (row["network"], row["engine"]) != ("mnist-cnn", "julia")]
    for run in rows["runs"]:
        if (run["key"], run["engine"]) == ("totals-mnist-cnn", "julia"):
            run |= {"status": "failed", "error": "its process ended\nTraceback"}
    made = totals.sizes_totals(view_of(rows, paper="sizes"))
    assert "Missing, whole trainings: TwinGrad Julia: 1 of 5 runs failed: its process ended." in made.notes
    assert made.rows[2]["network"] == "mnist-cnn" and made.rows[2].get("julia_total_s") is None


def test_a_study_that_was_not_run_says_so(view_of: ViewOf) -> None:
    made = totals.sizes_totals(view_of({name: [] for name in COLUMNS}, paper="sizes"))
    assert not made.rows and made.notes == ("Not run: make sizes runs it.",)
