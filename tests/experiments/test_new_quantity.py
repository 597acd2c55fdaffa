"""A new quantity is one record: a table, a figure, a claim and the paper's text ask for it by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from experiments import papers, quantities
from experiments.measures.registry import MEASURES
from experiments.papers import PaperFileError
from experiments.quantities import LOSS, QUANTITIES, Quantity
from experiments.report import claims, figures, numbers, table, tables
from experiments.report.view import View

LOSS_GAP = Quantity(
    "loss_gap",
    "test - train loss",
    LOSS,
    "time",
    source=lambda view, engine, _: (
        view.epochs_of("time", engine).groupby("key")["test_loss"].last()
        - view.epochs_of("time", engine).groupby("key")["train_loss"].last()
    ),
    text="gap",
)

MORE = """
tables = [{ id = "gaps", producer = "quantities", title = "Gaps", quantities = ["loss_gap", "test_accuracy"] }]
figures = [{ id = "gaps", producer = "bars", title = "Gaps", quantities = ["loss_gap"] }]
[claims.small]
text = "the loss on test data is that on training data"
where = "here"
test = { quantity = "loss_gap", engine = "torch", than = "jax", low = -1, high = 1 }
"""


@pytest.fixture
def text() -> str:
    """A paper's file with tables, figures and a claim about the new quantity in place of its own."""
    content = (papers.PAPERS_DIR / "mnist-rnn-e.toml").read_text(encoding="utf-8")
    head, _, rest = content.partition("tables = [")
    more, _, claim = MORE.partition("[claims")
    return head + more + rest[rest.index("# Training accuracy") :].partition("[claims")[0] + "[claims" + claim


def test_a_quantity_is_asked_for_by_its_name(
    text: str, fake: ModuleType, view_of: Callable[..., View], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(QUANTITIES, LOSS_GAP.name, LOSS_GAP)
    paper, view = papers.loads(text), view_of(fake.rows(seeds=3))
    made = tables.make(paper.tables[0], view)
    header, first, *_ = table.to_csv(made).splitlines()
    assert header == "kind,machine,data,engine,system,loss_gap,loss_gap_sd,test_accuracy,test_accuracy_sd,missing"
    value = LOSS_GAP.value(view, "numpy")
    assert value is not None and f",{value}," in first
    assert [item.header for item in made.columns] == ["", "test - train loss", "test accuracy"]
    assert figures.make(paper.figures[0], view, tmp_path / "gaps") is None and (tmp_path / "gaps.svg").is_file()
    found = claims.examine(paper.claims[0], view)
    assert found.verdict == "reproduced" and "difference" in found.words
    assert numbers.of_paper(view)["numpy.gap"]["value"] == value


def test_one_that_is_not_there_gets_the_nearest_name(text: str) -> None:
    with pytest.raises(PaperFileError, match=r"tables\[0\] \(id \"gaps\"\).quantities\[0\]: no quantity 'loss_gap'"):
        papers.loads(text)


def test_summaries_name_quantities_of_their_own_measure() -> None:
    """What the terminal shows of trainings are columns of their rows."""
    for name, measure in MEASURES.items():
        for told in measure.summary if not measure.columns else ():
            assert QUANTITIES[told].measure == name and QUANTITIES[told].column


def test_every_quantity_is_named_as_its_record_says_and_comes_from_a_measure() -> None:
    for name, quantity in QUANTITIES.items():
        assert quantity.name == name and bool(quantity.column) != bool(quantity.source)
        assert quantity.measure in (*MEASURES, "microbenchmarks")
    texts = [quantity.text for quantity in QUANTITIES.values() if quantity.text]
    assert len(texts) == len(set(texts)) > 10
    assert quantities.SECONDS.show(1.234) == "1.23 s"
