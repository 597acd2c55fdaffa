"""A step with all threads beside one with one thread: what the file says of it, and a run."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridge.worker import Worker
from experiments import papers, sweep
from experiments.papers import PaperFileError
from experiments.progress import Progress
from experiments.report import sizes_targets
from experiments.report.view import paper_view
from experiments.results import Results, Tidy, tidy_rows

TEXT = (papers.PAPERS_DIR / "sizes.toml").read_text(encoding="utf-8")


def run(folder: Path, engines: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """A small network with two threads and with one, in two rounds, and the record."""
    head, _, rest = TEXT.partition("[[families]]")
    family = rest.partition("[[families]]")[0]
    runs = f"""
measures = ["split"]
split_engines = {list(engines)}
split_rounds = 2
split_threads = [2]
sizes_batches = [4, 2]
sizes_networks = ["lenet5-1"]
"""
    paper = papers.loads(f"{head}[[families]]{family}[runs.full]{runs}[runs.quick]{runs}[runs.sample]{runs}")
    results = Results(folder)
    with results.locked():
        found = sweep.Sweep(results).run(sweep.plan(paper), Progress(Console(file=io.StringIO()), 1))
        results.write_tidy()
    assert len(found.records) == 1
    return paper, found.records[0]


def test_every_option_is_needed() -> None:
    for name in ("split_rounds", "split_threads"):
        without, left_out = re.subn(rf"^{name} = .*\n", "", TEXT, flags=re.MULTILINE)
        assert left_out
        with pytest.raises(PaperFileError, match=f"the measure split needs {name}"):
            papers.loads(without)


def test_two_workers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    train = Worker.train_epoch

    def noted(self: Worker, *given: Any) -> Any:
        turns.append(self.threads)
        return train(self, *given)

    monkeypatch.setattr(Worker, "train_epoch", noted)
    paper, record = run(tmp_path, ("numpy",))
    assert record["status"] == "ok", record["error"]
    assert [(row["batch"], row["round"]) for row in record["split"]] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert all(row["microseconds_per_step"] > 0 and row["one_thread_microseconds"] > 0 for row in record["split"])
    assert all(row["threads_in_step"] for row in record["split"]) and set(record["blas"]) == {"numpy"}
    assert turns[-6:] == [2, 1, 1, 2, 2, 1], "the one that begins changes"
    rows = tidy_rows([record])["split"]
    assert {(row["family"], row["size"], row["threads"]) for row in rows} == {("lenet5", "1", 2)}
    made = sizes_targets.sizes_threads(paper_view(paper, Tidy.load(tmp_path)))
    assert [row["batch"] for row in made.rows] == [2, 4] and all(row["numpy_ratio"] > 0 for row in made.rows)


def test_an_engine_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Worker, *given: Any, **options: Any) -> None:
        raise papers.TwinGradError("an invented reason")

    monkeypatch.setattr(Worker, "build", failing)
    _, record = run(tmp_path, ("numpy",))
    assert record["status"] == "failed" and "numpy: an invented reason" in record["error"]
