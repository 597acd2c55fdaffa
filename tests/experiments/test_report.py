"""Tables: what is measured is what the runs say, what is reported stays apart, and what is missing is named."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import registry as engines
from experiments import formats, papers, quantities, report
from experiments.data import SAMPLE_LABEL
from experiments.microbenchmarks import registry
from experiments.papers import PaperFileError, load_paper
from experiments.report import MixedMachinesError, ReportError, claims, figures, numbers, table, tables
from experiments.report.table import Table
from experiments.report.view import TRAINED, View, views_of
from experiments.results import ResultsError, Tidy

ViewOf = Callable[..., View]
ENGINES = tuple(row.name for row in load_paper("mnist-rnn-e").engines if not row.optional)
ABOUT_SOME = {"settings", "missing", "scaling", "parity", "variants", "ablation_numpy", "ablation_julia", "claims"}
SYSTEMS = {"micro_gradients", "micro_chunks", "micro_ratios", "micro_memory"}
OF_SIZES = {
    "sizes",
    "sizes_held",
    "sizes_start",
    "sizes_totals",
    "sizes_memory",
    "sizes_threads",
    "sizes_limits",
    "sizes_ablation",
    "growth",
    "growth_seconds",
}  # whose rows are networks: see test_sizes.py
ABOUT_ENGINES = sorted(set(tables.PRODUCERS) - ABOUT_SOME - SYSTEMS - OF_SIZES)


def row(made: Table, engine: str, **more: Any) -> dict[str, Any]:
    found = [
        dict(item)
        for item in made.rows
        if item.get("engine") == engine and all(item.get(name) == value for name, value in more.items())
    ]
    assert len(found) == 1, found
    return found[0]


def notes(made: Table) -> str:
    return "\n".join(made.notes)


def runs_of(sweep: Any, engine: str, measure: str = "time") -> list[dict[str, Any]]:
    return [item for item in sweep["runs"] if item["engine"] == engine and item["measure"] == measure]


# ----------------------------------------------------------------------------------------------------------
# What the papers ask for


@pytest.mark.parametrize("key", papers.paper_keys())
def test_everything_that_a_paper_names_has_a_producer(key: str) -> None:
    load_paper(key).check_producers(tables.PRODUCERS, figures.PRODUCERS)


def test_a_table_that_nothing_produces_is_an_error(
    full_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (papers.PAPERS_DIR / "mnist-rnn-e.toml").read_text(encoding="utf-8")
    wrong = papers.loads(text.replace('"parity",', '{ id = "parity", producer = "paritty" },', 1))
    monkeypatch.setattr(report, "load_paper", lambda name: wrong)
    with pytest.raises(PaperFileError, match=r'id "parity".*nothing produces \'paritty\'.*did you mean \'parity\''):
        report.build(full_results, tmp_path)
    assert not list(tmp_path.iterdir()), "an error found before anything is written"


def test_a_report_consists_of_what_the_papers_name(full_report: report.Built) -> None:
    for key in ("mnist-rnn-d", "mnist-rnn-e"):
        paper = load_paper(key)
        for output in paper.tables:
            for suffix in (".csv", ".tex", ".md"):
                assert full_report.folder / "tables" / f"{key}-{output.id}{suffix}" in full_report.written
        for output in paper.figures:
            for suffix in (".svg", ".png"):
                assert full_report.folder / "figures" / f"{key}-{output.id}{suffix}" in full_report.written
    assert all(path.is_file() and path.stat().st_size for path in full_report.written)


def test_the_same_results_give_the_same_bytes(full_results: Path, full_report: report.Built, tmp_path: Path) -> None:
    again = report.build(full_results, tmp_path)
    for old, new in zip(full_report.written, again.written, strict=True):
        assert old.read_bytes() == new.read_bytes(), old.name


def test_nothing_run_is_an_error_that_says_what_to_do(fake: ModuleType, tmp_path: Path) -> None:
    fake.write(tmp_path)
    with pytest.raises(ReportError, match=r"no results of any paper.*twingrad run"):
        report.build(tmp_path)


def test_a_report_folder_that_cannot_be_made_is_named(full_results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot write .*file"):
        report.build(full_results, tmp_path / "file" / "report")


# ----------------------------------------------------------------------------------------------------------
# Measured


@pytest.mark.parametrize("producer", ABOUT_ENGINES)
def test_every_engine_of_the_paper_has_a_row(producer: str, fake: ModuleType, view_of: ViewOf) -> None:
    made = tables.PRODUCERS[producer](view_of(fake.rows(seeds=5)))
    assert set(ENGINES) <= {item.get("engine") for item in made.rows}


def test_measured_cells_are_the_means_and_spreads_of_the_runs(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=5)
    made = tables.performance(view_of(sweep))
    for engine in ENGINES:
        times = [run["total_seconds"] for run in runs_of(sweep, engine)]
        accuracies = [run["test_accuracy"] for run in runs_of(sweep, engine)]
        found = row(made, engine)
        assert found["total_s"] == pytest.approx(statistics.fmean(times))
        assert found["total_s_sd"] == pytest.approx(statistics.stdev(times))
        assert found["test_accuracy"] == pytest.approx(statistics.fmean(accuracies))
        allocated = [item["bytes_allocated"] for item in sweep["epochs"] if item["engine"] == engine]
        assert found["allocated_bytes"] == pytest.approx(sum(item for item in allocated if item is not None))


def test_a_single_seed_has_no_spread(fake: ModuleType, view_of: ViewOf) -> None:
    made = tables.performance(view_of(fake.rows(seeds=1)))
    assert row(made, "numpy")["total_s_sd"] is None
    assert "±" not in made.columns[1].text(row(made, "numpy"))


def test_training_accuracy_follows_the_epochs(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=3)
    made = tables.training_accuracy(view_of(sweep))
    for epoch in range(1, 6):
        values = [
            item["train_accuracy"]
            for item in sweep["epochs"]
            if (item["engine"], item["measure"], item["epoch"]) == ("numpy", "time", epoch)
        ]
        assert row(made, "numpy")[f"epoch_{epoch}"] == pytest.approx(statistics.fmean(values))


def test_the_average_epoch_counts_the_first_and_the_later_ones_do_not(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows("mnist-rnn-d", seeds=1, engines=("torch-compile", "torch"))
    view = view_of(sweep, paper="mnist-rnn-d")
    seconds = [
        item["seconds"] for item in sweep["epochs"] if item["engine"] == "torch-compile" and item["measure"] == "time"
    ]
    assert row(tables.summary(view), "torch-compile")["epoch_s"] == pytest.approx(statistics.fmean(seconds))
    assert row(tables.epoch_times(view), "torch-compile")["first_epoch_s"] == pytest.approx(seconds[0])
    later = row(tables.epoch_times(view), "torch-compile")["later_epochs_s"]
    assert later == pytest.approx(statistics.fmean(seconds[1:]))


def test_ratios_of_a_race_are_paired_within_a_round(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=1)
    # The machine gets slower from round to round. Ratio 0.5 in each; that of the medians would be 0.5 only by luck.
    paces = {1: 100.0, 2: 400.0, 3: 900.0}
    sweep["race"] = [
        item | {"round": number, "threads": 2, "key": "race-2", "microseconds_per_step": pace * share}
        for number, pace in paces.items()
        for item, share in zip(sweep["race"][:2], (0.5, 1.0), strict=True)
    ]
    for item, engine in zip(sweep["race"], ("numpy", "torch") * 3, strict=True):
        item["engine"] = engine
    sweep["race"].append(sweep["race"][0] | {"round": 4, "microseconds_per_step": 45.0})  # torch missed this round
    found = row(tables.race(view_of(sweep)), "numpy")
    assert found["ratio_median"] == found["ratio_q1"] == found["ratio_q3"] == pytest.approx(0.5)
    assert found["rounds"] == 4


def test_both_numbers_of_threads_are_raced_apart(fake: ModuleType, view_of: ViewOf) -> None:
    made = tables.race(view_of(fake.rows(seeds=1)))
    assert row(made, "numpy", threads=1)["step_us_median"] > row(made, "numpy", threads=2)["step_us_median"]
    assert [heading.partition(" each")[0] for heading, _ in made.groups()] == ["2 threads", "1 thread"]


def test_parity_is_the_largest_difference_at_equal_seeds(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=2)
    view = view_of(sweep)
    found = row(tables.parity(view), "numpy")
    assert 0 < found["max_loss_difference"] < 1e-5
    assert found["within_tolerance"] is True
    for item in sweep["steps"]:
        if (item["engine"], item["seed"], item["step"]) == ("numpy", 1, 77):
            item["loss"] += 0.02
    found = row(tables.parity(view_of(sweep)), "numpy")
    assert found["max_loss_difference"] == pytest.approx(0.02, rel=1e-3)
    assert found["within_tolerance"] is False
    assert "no" in [column.text(found) for column in tables.parity(view_of(sweep)).columns]


def test_allocation_and_resident_memory_are_never_in_one_column(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows(seeds=1))
    found = row(tables.PRODUCERS["memory"](view), "numpy")
    assert found["peak_rss_bytes"] == 2.2e8 and found["bytes_first_epoch"] == pytest.approx(11e6)
    headers = [item.header for item in tables.PRODUCERS["memory"](view).columns]
    assert headers == ["", "peak resident", "allocated, 1st epoch", "allocated, later epochs"]
    for name, producer in tables.PRODUCERS.items():
        fields = " ".join(producer(view).fields)
        assert name == "memory" or not ("rss" in fields and re.search(r"\bbytes_|allocated", fields)), name
    assert row(tables.peak_memory(view), "numpy")["peak_rss_bytes"] == 2.2e8


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 1.7])
def test_the_exponent_of_growth_is_that_of_the_power(power: float) -> None:
    values = np.array([1.0, 10, 100, 1000])
    points = pd.DataFrame({"value": values, "microseconds_per_step": 3.0 * values**power})
    assert tables.scaling_exponent(points) == pytest.approx(power)


def test_the_exponent_is_the_steepest_and_close_neighbours_do_not_count() -> None:
    points = pd.DataFrame({"value": [1, 2, 2.1, 10], "microseconds_per_step": [1.0, 2.0, 4.0, 8.0]})
    assert tables.scaling_exponent(points) == pytest.approx(1.0)
    assert tables.scaling_exponent(points[:1]) is None


# ----------------------------------------------------------------------------------------------------------
# Reported


@pytest.mark.parametrize("producer", ["training_accuracy", "performance", "summary", "epoch_times", "allocations"])
@pytest.mark.parametrize("key", ["mnist-rnn-d", "mnist-rnn-e"])
def test_reported_and_measured_stand_in_rows_and_groups_of_their_own(
    producer: str, key: str, fake: ModuleType, view_of: ViewOf
) -> None:
    paper = load_paper(key)
    made = tables.PRODUCERS[producer](view_of(fake.rows(key, seeds=2), paper=key))
    kinds: dict[str, set[str]] = {}
    for item in made.rows:
        kinds.setdefault(item["group"], set()).add(item["kind"])
        if item["kind"] == "measured":
            assert item["machine"] == fake.CPU and fake.CPU in item["group"]
        elif item["kind"] == "reported":
            assert item["machine"] == paper.environment.description
            assert item["group"].startswith("Reported by the paper") and item["machine"] in item["group"]
            assert "engine" not in item, "no engine of ours made this number"
        else:
            assert item["kind"] == "measured once"
            assert item["group"].startswith("Measured once, not reproducible here: authors' published code")
    assert all(len(found) == 1 for found in kinds.values())


def test_reported_numbers_are_those_of_the_paper(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows(seeds=1))
    made = tables.performance(view)
    cells = {
        item["system"]: [column.text(item) for column in made.columns]
        for item in made.rows
        if item["kind"] != "measured"
    }
    assert cells["Flux"] == ["Flux", "51.2", "14.534 GiB", "0.944"]
    assert cells["The paper's own"] == ["The paper's own", "135", "85 GiB", "0.917"]
    reported = next(item for item in made.rows if item["system"] == "PyTorch" and item["kind"] == "reported")
    assert [column.text(reported) for column in made.columns] == ["PyTorch", "94", "not measured", "0.92"]
    stated = [item for item in tables.training_accuracy(view).rows if item["kind"] == "reported"]
    accuracy = [item for item in stated if item["system"] == "Flux"]
    assert [accuracy[0][f"epoch_{epoch}"] for epoch in range(1, 6)] == [0.891, 0.919, 0.930, 0.938, 0.944]


def test_words_stand_where_a_paper_prints_no_number(fake: ModuleType, view_of: ViewOf) -> None:
    made = tables.summary(view_of(fake.rows("mnist-rnn-d", seeds=1), paper="mnist-rnn-d"))
    stated = [item for item in made.rows if item["kind"] == "reported"]
    cells = {item["system"]: [column.text(item) for column in made.columns] for item in stated}
    assert cells["Flux"][2:4] == ["less than both", "close second"]
    assert cells["The paper's own"][2] == "≈ 11"
    flux = next(item for item in stated if item["system"] == "Flux")
    assert "seconds_per_epoch: less than both" in flux["words"]


# ----------------------------------------------------------------------------------------------------------
# Side by side


@pytest.mark.parametrize("key", ["imdb-cnn-a", "imdb-cnn-c", "mnist-cnn", "mnist-cnn-batch100", "mnist-rnn-d"])
def test_every_table_of_a_paper_is_made(key: str, fake: ModuleType, view_of: ViewOf) -> None:
    paper = load_paper(key)
    view = view_of(fake.rows(paper.runs_of_paper or key, seeds=2), paper=key)
    for output in paper.tables:
        made = tables.make(output, view)
        assert made.rows and table.to_markdown(made)
        assert table.to_latex(made).isascii(), output.id  # LaTeX's fonts lack most other characters
        for text in (cell for _, rows in made.groups() for cells in rows for cell in cells):
            assert "nan" not in text.split(), (output.id, text)


def test_a_papers_tables_are_as_it_prints_them(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows("imdb-cnn-a", seeds=2), paper="imdb-cnn-a")

    def stated(producer: str) -> dict[str, list[str]]:
        made = tables.PRODUCERS[producer](view)
        rows = [item for item in made.rows if item["kind"] == "reported"]
        return {item["system"]: [column.text(item) for column in made.columns][1:] for item in rows}

    assert stated("first_and_average_times")["Flux"] == ["43.79", "14.82", formats.MISSING]
    assert stated("first_and_average_allocations")["The paper's own"] == ["12.1 GB", "10.6 GB"]
    assert stated("first_and_average_allocations")["TensorFlow"] == [formats.MISSING, "impossible to measure"]
    assert stated("accuracy")["TensorFlow"] == ["0.9482", "0.8757", formats.MISSING]


def test_a_paper_that_trains_as_another_shows_its_runs(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows("imdb-cnn-a", seeds=2), paper="imdb-cnn-c")
    assert row(tables.PRODUCERS["accuracy"](view), "julia")["seeds"] == 2


def test_epochs_stand_one_by_one_as_reported(fake: ModuleType, view_of: ViewOf) -> None:
    made = tables.PRODUCERS["epochs"](view_of(fake.rows("mnist-cnn", seeds=2), paper="mnist-cnn"))
    own = [item for item in made.rows if item["system"] == "The paper's own"]
    assert [item["seconds"] for item in own] == [50.0, 38.8, 37.7]
    assert [item["test_accuracy"] for item in own] == [0.96, 0.9713, 0.9784]
    assert own[0]["bytes_allocated"] == 152.6 * 2**30
    assert [item["epoch"] for item in made.rows if item.get("engine") == "numpy"] == [1, 2, 3]


def test_own_weights_stand_beside_shared_ones(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows("mnist-cnn", seeds=3)
    for run in runs_of(sweep, "torch", "own"):
        run["test_accuracy"] = 0.5
    made = tables.PRODUCERS["own_accuracy"](view_of(sweep, paper="mnist-cnn"))
    torch, numpy = row(made, "torch"), row(made, "numpy")
    assert (torch["own_test_accuracy"], torch["own_seeds"]) == (0.5, 3)
    assert torch["shared_test_accuracy"] > 0.8
    assert "optimizer adam" in torch["differs"] and "batch size 100" in torch["differs"]
    assert numpy["own_test_accuracy"] == numpy["shared_test_accuracy"], "the spec's initialisation is its own"
    assert row(made, "jax")["own_test_accuracy"] is None


def test_the_best_rival_is_the_fastest_of_the_other_frameworks(fake: ModuleType, view_of: ViewOf) -> None:
    made = tables.race(view_of(fake.rows(seeds=1)))
    assert {item["rival"] for item in made.rows} == {"jax"}
    found = row(made, "numpy", threads=2)
    assert found["rival_ratio_median"] == pytest.approx(300 / 500, rel=0.05)


def test_a_variant_is_compared_with_the_papers_network(fake: ModuleType, view_of: ViewOf) -> None:
    made = tables.PRODUCERS["variants"](view_of(fake.rows("imdb-cnn-a", seeds=2), paper="imdb-cnn-a"))
    assert {item["engine"] for item in made.rows} == set(fake.VARIED)
    static, conv2d = (row(made, "torch", variant=name) for name in ("static", "conv2d"))
    assert conv2d["test_accuracy"] - static["test_accuracy"] == pytest.approx(0.05)
    assert (static["seeds"], row(made, "torch", variant="")["seeds"]) == (2, 2)


def test_a_technique_is_told_by_what_its_absence_costs(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows("mnist-cnn", seeds=1), paper="mnist-cnn")
    made = tables.PRODUCERS["ablation_julia"](view)
    replay = row(made, "julia", technique="replay")
    assert (replay["without_time_factor"], replay["alone_time_factor"]) == (pytest.approx(1.5), pytest.approx(0.8))
    assert replay["without_bytes"] == pytest.approx(1.5e6)
    assert "saves 50 % of the time" in " ".join(str(item["system"]) for item in made.rows)


# ----------------------------------------------------------------------------------------------------------
# Claims


def claim(**settings: Any) -> papers.Claim:
    return papers.Claim(id="claim", text="it is so", where="Section I", **settings)


@pytest.mark.parametrize(
    ("settings", "verdict", "value"),
    [
        ({"quantity": "technique_time_saved", "engine": "julia", "of": "all", "low": 0.5}, "holds", 0.9),
        ({"quantity": "technique_time_saved", "engine": "julia", "of": "replay", "low": 0.5}, "does not hold", 1 / 3),
        (
            {"quantity": "technique_alone_bytes_saved", "engine": "julia", "of": "float32", "low": 0.4},
            "does not hold",
            0.2,
        ),
        (
            {"quantity": "step_microseconds", "engine": "numpy", "than": "torch", "high": 1.0},
            "holds",
            pytest.approx(300 / 800, rel=0.05),
        ),
        (
            {"quantity": "test_accuracy", "engine": "julia", "than": "torch", "low": 0.01},
            "does not hold",
            pytest.approx(0, abs=1e-9),
        ),
        (
            {"quantity": "own_test_loss", "engine": "torch", "than": "tensorflow", "low": -0.01, "high": 0.01},
            "reproduced",
            pytest.approx(0, abs=0.01),
        ),
        (
            {"quantity": "variant_test_accuracy", "engine": "torch", "than": "torch", "of": "static", "high": 0.0},
            "reproduced",
            pytest.approx(-0.18, abs=0.03),
        ),
        (
            {"quantity": "variant_late_gain_accuracy", "engine": "torch", "of": "static", "high": 0.005},
            "not reproduced",
            pytest.approx(0.04),
        ),
        (
            {"quantity": "bytes_all_epochs", "engine": "julia", "than": "torch", "high": 1.0},
            "holds",
            pytest.approx(8e6 / 5e9, rel=0.01),
        ),
        ({"untestable": "nobody can tell"}, "not testable", None),
    ],
)
def test_a_verdict_follows_from_the_results(
    settings: dict[str, Any], verdict: str, value: Any, fake: ModuleType, view_of: ViewOf
) -> None:
    found = claims.examine(claim(**settings), view_of(fake.rows("imdb-cnn-a", seeds=2), paper="imdb-cnn-a"))
    assert (found.on_ours or found.verdict) == verdict
    assert found.value == (pytest.approx(value) if isinstance(value, float) else value)


def test_the_bytes_of_the_whole_run_are_those_of_as_many_epochs_as_were_trained(
    fake: ModuleType, view_of: ViewOf
) -> None:
    sweep = fake.rows(seeds=1)
    sweep["epochs"] = [item for item in sweep["epochs"] if item["measure"] != "memory" or item["epoch"] <= 2]
    view = view_of(sweep)
    first, later, total = quantities.memory_of(view, "torch").values()
    assert first and later and total == pytest.approx(first + 4 * later)


def test_a_technique_that_leaves_nothing_to_save_is_no_missing_run(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows("imdb-cnn-a", seeds=1)
    for item in sweep["ablation"]:
        item["bytes_per_epoch"] = 0.0
    view = view_of(sweep, paper="imdb-cnn-a")
    assert quantities.saved(view, "julia", "replay", "bytes_per_epoch") == 0.0
    found = claims.examine(claim(quantity="technique_bytes_saved", engine="julia", of="replay", low=0.1), view)
    assert (found.verdict, found.on_ours, found.value) == ("not tested", "does not hold", 0.0)


def test_peaks_that_contain_the_data_twice_are_told(fake: ModuleType, view_of: ViewOf) -> None:
    for producer in (tables.PRODUCERS["memory"], tables.PRODUCERS["peak_memory"]):
        (note,) = (text for text in producer(view_of(fake.rows(seeds=1))).notes if "twice" in text)
        assert "TensorFlow" in note and "JAX" in note and "PyTorch" not in note
        alone = producer(view_of(fake.rows(seeds=1, engines=("numpy", "torch"))))
        assert not any("twice" in text for text in alone.notes)


def test_a_claim_about_what_was_not_run_is_not_testable(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows("imdb-cnn-a", seeds=2, engines=("numpy", "julia", "torch")), paper="imdb-cnn-a")
    found = claims.examine(claim(quantity="later_epoch_seconds", engine="torch", than="flux", high=1.0), view)
    assert (found.verdict, found.value) == ("not testable", None)
    assert (found.words, found.missing) == ("Flux: not measured", ("time and accuracy", "Flux", "not run"))


def test_why_claims_cannot_be_tested_is_told_once_below_their_table(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows("imdb-cnn-a", seeds=2)
    for run in (*runs_of(sweep, "flux"), *runs_of(sweep, "flux", "memory")):
        run |= {"status": "failed", "error": "a long reason"}
    made = tables.PRODUCERS["claims"](view_of(sweep, paper="imdb-cnn-a"))
    untested = [item["number"] for item in made.rows if item["value"] is None]
    assert untested == ["Flux: not measured"] * 5
    assert made.notes[1:] == (
        "Missing, time and accuracy; bytes allocated and peak memory: Flux: failed: a long reason.",
    )


@pytest.mark.parametrize("key", papers.keys_of_others())
def test_every_claim_of_a_paper_gets_a_verdict(key: str, fake: ModuleType, view_of: ViewOf) -> None:
    paper = load_paper(key)
    assert paper.claims
    made = tables.PRODUCERS["claims"](view_of(fake.rows(paper.runs_of_paper or key, seeds=2), paper=key))
    assert [item["claim"] for item in made.rows] == papers.ids(paper.claims)
    for item, stated in zip(made.rows, paper.claims, strict=True):
        assert item["number"], "the number behind it, or why there is none"
        assert (item["value"] is None) == (item["verdict"] == "not testable" or item["on_ours"] == "not measured")
        assert not stated.untestable or item["verdict"] == "not testable"


CONTAINING = [name for name, item in quantities.QUANTITIES.items() if item.compilation]
STEADY = [name for name, item in quantities.QUANTITIES.items() if item.compilation is False and not item.about]
STAND_INS = ("julia", "numpy")


SIDES = (
    ("julia", ""),
    ("torch", ""),
    ("julia", "torch"),
    ("tensorflow", "julia"),
    ("numpy", "julia"),
    ("torch", "tensorflow"),
)
"""A claim about an engine alone, and about pairs: ours and not, in either place."""


@pytest.mark.parametrize("image", [False, True], ids=["no image", "image"])
@pytest.mark.parametrize("missing", [False, True], ids=["measured", "missing"])
def test_a_verdict_is_a_study_s_own_only_where_its_own_engines_were_tested(
    missing: bool, image: bool, fake: ModuleType, view_of: ViewOf
) -> None:
    """All combinations: engines of ours or not, measured or not, with and without a system image, true or false."""
    sweep = fake.rows("imdb-cnn-a", seeds=1)
    for item in runs_of(sweep, "julia") + runs_of(sweep, "julia", "memory"):
        item["framework_version"] = "julia 1.5.3 sysimage 0123456789abcdef" if image else "julia 1.5.3"
    gone = ("torch",) if missing else ()
    for name in gone:
        for item in runs_of(sweep, name) + runs_of(sweep, name, "memory"):
            item |= {"status": "failed", "error": "no reason"}
        sweep["race"] = [item for item in sweep["race"] if item["engine"] != name]
    view = view_of(sweep, paper="imdb-cnn-a")
    seen = set()
    asked = (*CONTAINING, *STEADY, "test_accuracy")
    for quantity, (engine, than) in itertools.product(asked, SIDES):
        for limit in ({"low": -1e30}, {"high": -1e30}):
            found = claims.examine(claim(quantity=quantity, engine=engine, than=than, **limit), view)
            ours = engine in STAND_INS or than in STAND_INS
            lacking = bool({engine, than} & {*gone}) or (image and quantity in CONTAINING and "julia" in (engine, than))
            holds = "low" in limit
            assert (found.verdict == "not tested") == ours == bool(found.on_ours) == bool(found.in_place)
            if ours:
                assert found.on_ours == ("not measured" if lacking else "holds" if holds else "does not hold")
            else:
                assert found.verdict == ("not testable" if lacking else "reproduced" if holds else "not reproduced")
            assert (found.value is None) == lacking == bool(found.missing)
            kinds = claims.compilation(claim(quantity=quantity, engine=engine, **limit))
            assert lacking or kinds in found.words
            seen.add((found.verdict, found.on_ours))
    assert len(seen) >= 4


def test_no_claim_about_an_engine_of_ours_can_be_called_reproduced() -> None:
    """Every paper's claims: what an engine of ours decides is never the study's own statement."""
    labels = {name: item.label for name, item in (engines.ENGINES | registry.SYSTEMS).items()}
    known = {name for name, label in labels.items() if label.startswith("TwinGrad")}
    assert known == claims.OURS
    stated = [item for key in papers.paper_keys() for item in load_paper(key).claims]
    assert len(stated) >= 50
    decided = [item for item in stated if claims.stand_ins(item)]
    assert 0 < len(decided) < len(stated)
    about_its_own = [item for item in stated if "the paper's engine" in item.text and item.quantity]
    assert about_its_own and all(claims.stand_ins(item) for item in about_its_own)


def test_time_with_compilation_and_without_it_are_claims_of_their_own() -> None:
    mixed = ("total_seconds", "average_epoch_seconds")
    found = 0
    for key in papers.paper_keys():
        stated = {item.id: item for item in load_paper(key).claims}
        for item in stated.values():
            if item.quantity in mixed:
                steady = stated[f"{item.id}-steady"]
                assert steady.quantity == "later_epoch_seconds"
                assert (steady.engine, steady.than, steady.low, steady.high) == (
                    *(item.engine, item.than, item.low, item.high),
                )
                found += 1
    assert found >= 5


def test_a_system_image_gives_way_to_runs_without_one(fake: ModuleType, view_of: ViewOf) -> None:
    """Whichever is newer: an image made later must not turn a first epoch into a faster one."""
    for newer in ("julia 1.5.3", "julia 1.5.3 sysimage 0123456789abcdef"):
        sweep = fake.rows(seeds=2)
        plain = runs_of(sweep, "julia")
        fast = [item | {"key": f"image{item['seed']}", "first_epoch_seconds": 0.001} for item in plain]
        for item in plain:
            item |= {"framework_version": "julia 1.5.3", "created": "2026-01-01T00:00:00"}
        for item in fast:
            item |= {"framework_version": "julia 1.5.3 sysimage 0123456789abcdef", "created": "2026-01-01T00:00:00"}
        for item in fast if "sysimage" in newer else plain:
            item["created"] = "2027-01-01T00:00:00"
        sweep["runs"] += fast
        view = view_of(sweep)
        assert set(view.ok("time", "julia")["framework_version"]) == {"julia 1.5.3"}
        assert not any("system image" in note for note in tables.PRODUCERS["epoch_times"](view).notes)
        sweep["runs"] = [item for item in sweep["runs"] if item not in plain]
        alone = view_of(sweep)
        assert len(alone.ok("time", "julia")) == 2
        (note,) = (note for note in tables.PRODUCERS["epoch_times"](alone).notes if "system image" in note)
        assert "TwinGrad Julia" in note


@pytest.mark.parametrize(
    ("version", "keeps"),
    [("1.5.3", False), ("1.5.3 backend embedded sysimage 0123456789abcdef", True), ("1.12.2 backend juliacall", True)],
)
def test_what_is_compiled_anew_and_what_is_kept_is_said_once(
    version: str, keeps: bool, fake: ModuleType, view_of: ViewOf
) -> None:
    said = "PyTorch compiled compiles anew in each run, with one thread"
    sweep = fake.rows(seeds=1)
    for item in runs_of(sweep, "julia"):
        item["framework_version"] = f"julia {version}"
    for made in (tables.epoch_times(view_of(sweep)), tables.PRODUCERS["first_and_average_times"](view_of(sweep))):
        (note,) = (note for note in made.notes if said in note)
        assert note.endswith("; of TwinGrad Julia the machine keeps compiled code from run to run.") is keeps
        assert note.endswith("by default.") is not keeps
    alone = fake.rows(seeds=1, engines=("julia", "torch"))
    assert not any(said in note for note in tables.epoch_times(view_of(alone)).notes)


# ----------------------------------------------------------------------------------------------------------
# Missing, mixed, sample


def test_an_engine_that_never_ran_has_a_row_of_dashes_and_a_reason(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows(seeds=5, engines=("numpy", "torch")))
    for name in ABOUT_ENGINES:
        made = tables.PRODUCERS[name](view)
        found = [item for item in made.rows if item.get("engine") == "jax"]
        assert found and all(item["missing"].endswith("not run") for item in found), name
        assert {column.text(found[0]) for column in made.columns[1:]} <= {formats.MISSING, "0", ""}, name
        assert re.search(r"Missing, .*JAX.*not run", notes(made)), name


def test_a_failure_is_quoted_by_its_first_line(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=3)
    for run in runs_of(sweep, "torch")[1:]:
        run |= {"status": "failed", "error": "the loss is NaN at step 7\nTraceback ..."}
    view = view_of(sweep)
    made = tables.performance(view)
    assert "Missing, time and accuracy: PyTorch: 2 of 3 seeds failed: the loss is NaN at step 7." in made.notes
    assert row(made, "torch")["seeds"] == 1
    reason = row(made, "torch")["missing"].partition(": ")[2]
    told = [dict(item) for item in tables.missing(view).rows]
    assert {"row": "PyTorch", "measure": "time and accuracy", "reason": reason} in told


def test_a_failure_in_a_race_is_told_of_the_engine_that_failed(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=5)
    sweep["race"] = [item for item in sweep["race"] if item["engine"] != "torch-compile"]
    for run in sweep["runs"]:
        if run["measure"] == "race":
            run |= {"status": "failed", "error": "torch-compile: no compiler"}
    view = view_of(sweep)
    assert view.why_missing("torch-compile", "race") == "failed: no compiler"
    assert view.why_missing("torch", "race") is None


def test_a_table_without_any_data_is_not_silent(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=1)
    only_race = {name: (items if name == "race" else []) for name, items in sweep.items()}
    for name, producer in tables.PRODUCERS.items():
        made = producer(view_of(only_race))
        assert made.rows or name in OF_SIZES, name
        if name not in ("settings", "race", "missing", "variants", *SYSTEMS, *OF_SIZES):  # e has no variants
            assert "not run" in notes(made), name


def test_systems_that_nothing_stands_for_are_named(fake: ModuleType, view_of: ViewOf) -> None:
    text = (papers.PAPERS_DIR / "mnist-rnn-e.toml").read_text(encoding="utf-8")
    alone = papers.loads(text.replace(', flux = "Flux"', "", 1))
    made = tables.missing(dataclasses.replace(view_of(fake.rows(seeds=5)), paper=alone))
    reasons = {item["row"]: item["reason"] for item in made.rows}
    assert "Flux" in reasons and "reported only" in reasons["Flux"]


@pytest.mark.parametrize("producer", sorted(tables.PRODUCERS))
def test_a_table_never_mixes_machines(producer: str, fake: ModuleType, view_of: ViewOf) -> None:
    """Whose CPUs have one name."""
    sweep = fake.rows(seeds=2)
    for items in sweep.values():
        for item in items:
            item["machine"] = "Another CPU" if item["engine"] in ("torch", "julia") else fake.CPU
            assert item["cpu_model"] == fake.CPU
    view = view_of(sweep)
    if producer in {"settings", "missing", *SYSTEMS, *OF_SIZES}:
        tables.PRODUCERS[producer](view)  # they have no measured number
        return
    with pytest.raises(MixedMachinesError, match=rf"Another CPU \(\d+ rows\), {fake.CPU}.*--results"):
        tables.PRODUCERS[producer](view)


def test_a_report_of_two_machines_shows_times_apart_and_accuracies_of_both(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blank(_built: Any, stem: Path, _draw: Any) -> None:  # the figures of each machine take long to draw
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_name(stem.name + ".svg").write_text('<svg width="100pt"/>')

    monkeypatch.setattr(report, "_draw", blank)
    monkeypatch.setattr(report.overview, "OVERVIEWS", report.overview.OVERVIEWS[:1])
    here = fake.rows(seeds=2, engines=("numpy", "torch"))
    other = fake.rows(seeds=4, engines=("numpy", "torch"), cpu_model="Another CPU")
    for item in (*other["runs"], *other["epochs"]):
        for name in ("train_accuracy", "test_accuracy"):
            if item.get(name) is not None:
                item[name] -= 0.01
    fake.write(tmp_path, here, other)
    built = report.build(tmp_path, papers=["mnist-rnn-e"])
    document = json.loads(built.data.read_text())
    (first,), (second,) = document["papers"], document["other_machines"]
    assert (first["key"], first["machines"]) == ("mnist-rnn-e", ["Another CPU", fake.CPU])
    assert second["key"].startswith("mnist-rnn-e-on-") and second["title"].endswith(f": {fake.CPU}")
    for section, machine, not_here in ((first, "Another CPU", fake.CPU), (second, fake.CPU, "Another CPU")):
        for made in section["tables"]:
            if made["producer"] not in ("settings", "missing") and made["id"] != "pooled-accuracies":
                assert not_here not in json.dumps([group["heading"] for group in made["groups"]]), made["id"]
        (race,) = (made for made in section["tables"] if made["id"] == "race")
        assert all(machine in group["heading"] for group in race["groups"])
    rows = {
        section["key"]: list(csv.DictReader((built.folder / "tables" / f"{section['key']}-performance.csv").open()))
        for section in (first, second)
    }
    times, accuracies = (
        [{row["engine"]: row[name] for row in found if row["kind"] == "measured"} for found in rows.values()]
        for name in ("total_s", "test_accuracy")
    )
    assert times[0] != times[1] and accuracies[0] == accuracies[1]
    pooled = {
        row["engine"]: row
        for row in csv.DictReader((built.folder / "tables" / "mnist-rnn-e-pooled-accuracies.csv").open())
        if row["measure"] == "time and accuracy"
    }
    last = {
        (item["machine"], item["engine"], item["seed"]): item["test_accuracy"]
        for sweep in (here, other)
        for item in ({**row, "machine": row["cpu_model"]} for row in sweep["runs"])
        if item["measure"] == "time"
    }
    seeds = [
        np.mean(
            [last[machine, "numpy", seed] for machine in (fake.CPU, "Another CPU") if (machine, "numpy", seed) in last]
        )
        for seed in range(4)
    ]
    assert (int(pooled["numpy"]["seeds"]), float(pooled["numpy"]["test_accuracy"])) == (
        4,
        pytest.approx(np.mean(seeds)),
    )
    page = (built.folder / "report.html").read_text()
    assert f'id="{second["key"]}"' in page and "Test accuracy over all machines" in page
    labels = (built.folder / "figures" / "overview-steps.svg").read_text()
    assert "Another CPU" in labels and fake.CPU in labels, "one figure of the ratios of both machines"


def test_claims_of_two_machines_are_about_the_times_of_each_and_the_accuracies_of_both(
    fake: ModuleType, tmp_path: Path
) -> None:
    """The runs of one study were spread over two machines: one engine here, another one there."""
    fake.write(
        tmp_path, fake.rows(seeds=3, engines=("julia",)), fake.rows(seeds=3, engines=("torch",), cpu_model="Another")
    )
    paper = fake.about("mnist-rnn-e")
    accuracy, time = quantities.QUANTITIES["test_accuracy"], quantities.QUANTITIES["later_epoch_seconds"]
    found = views_of(paper, Tidy.load(tmp_path))
    assert len(found) == 2
    for view in found:
        assert accuracy.value(view, "julia") is not None and accuracy.value(view, "torch") is not None
        assert {name for name in ("julia", "torch") if time.value(view, name) is not None} == (
            {"torch"} if view.machine() == "Another" else {"julia"}
        )


@pytest.mark.parametrize("producer", sorted(tables.PRODUCERS))
def test_every_export_says_that_its_data_are_a_sample(producer: str, fake: ModuleType, view_of: ViewOf) -> None:
    output = papers.Output(id="made", producer=producer, title="Made")
    made = tables.make(output, view_of(fake.rows(seeds=1, data_source="sample")))
    for text in (table.to_markdown(made), table.to_latex(made), json.dumps(table.to_json(made))):
        assert SAMPLE_LABEL in text
    for line in csv.DictReader(io.StringIO(table.to_csv(made))):
        assert line["notice"].startswith(SAMPLE_LABEL)
    real = tables.make(output, view_of(fake.rows(seeds=1)))
    assert SAMPLE_LABEL not in table.to_markdown(real) + table.to_csv(real)


# ----------------------------------------------------------------------------------------------------------
# Which rows belong together


def test_the_newest_run_decides_data_and_profile(fake: ModuleType, view_of: ViewOf) -> None:
    old = fake.rows(seeds=3)
    new = fake.rows(seeds=2, data_source="sample", profile="quick")
    for items in new.values():
        for item in items:
            item["created"] = "2002-01-01T00:00:00+00:00"
            item["key"] += "-new"
    view = view_of(old, new)
    assert (view.data_source, view.profile) == ("sample", "quick")
    assert row(tables.performance(view), "numpy")["seeds"] == 2
    assert row(tables.provenance(view), "numpy")["others_share"] == 0.02, "the largest of two seeds"
    assert set(view.table("race")["data_source"]) == {"sample"}
    assert view.left_out == len([run for run in old["runs"] if run["measure"] in TRAINED])
    assert f"{view.left_out} older or other runs" in notes(tables.provenance(view))
    assert (view_of(new, old).data_source, view.profile) == ("sample", "quick"), "whatever their order in the file"


def test_of_an_engine_only_its_newest_source_counts(fake: ModuleType, view_of: ViewOf) -> None:
    old, new = fake.rows(seeds=5, engines=("numpy", "torch")), fake.rows(seeds=1, engines=("numpy",))
    for items in new.values():
        for item in items:
            item |= {"created": "2002-01-01T00:00:00+00:00", "key": item["key"] + "-new"}
            item["engine_digest"] = "f" * 64
    view = view_of(old, new)
    assert row(tables.performance(view), "numpy")["seeds"] == 1
    assert row(tables.performance(view), "torch")["seeds"] == 5
    assert view.why_missing("numpy", "time") == "4 of 5 seeds not run"
    new["runs"] = [run for run in new["runs"] if run["measure"] == "memory"]
    assert view_of(old, new).why_missing("numpy", "time") == "not run since the engine's source changed"


def test_runs_with_other_threads_are_not_averaged_in(fake: ModuleType, view_of: ViewOf) -> None:
    old, new = fake.rows(seeds=2, engines=("torch",)), fake.rows(seeds=2)
    for item in old["runs"]:
        item |= {"threads": 1, "created": "2000-01-01T00:00:00+00:00", "key": item["key"] + "-1"}
    assert set(view_of(old, new).ok("time")["threads"]) == {2}


def test_rounds_of_two_races_are_not_paired(fake: ModuleType, view_of: ViewOf) -> None:
    whole, partial = fake.rows(seeds=1), fake.rows(seeds=1, engines=("numpy", "torch"))
    for name in ("race", "runs"):
        for item in partial[name]:
            item |= {"created": "2002-01-01T00:00:00+00:00", "key": item["key"] + "-new"}
    view = view_of(whole, partial)
    assert view.table("race").groupby("threads")["key"].nunique().tolist() == [1, 1]
    assert set(view.table("race")["engine"]) == set(ENGINES), "a later race of two engines does not hide the others"
    for run in partial["runs"]:
        if run["measure"] == "race" and run["engine"] == "numpy":
            run["engine_digest"] = "f" * 64
    assert set(view_of(whole, partial).table("race")["engine"]) == {"numpy", "torch"}, (
        "but the older source of an engine does"
    )


def test_a_race_of_another_profile_is_not_shown(fake: ModuleType, view_of: ViewOf) -> None:
    """Nor is the scaling of another one; a race alone, by hand, is."""
    whole, quick = fake.rows(seeds=1), fake.rows(seeds=1, profile="quick")
    for rows in (whole, quick):
        races = [run for run in rows["runs"] if run["key"] == "race-2"]
        rows["runs"] += [run | {"measure": "scaling", "key": "scaling"} for run in races]
    quick = {name: items if name in ("race", "scaling", "runs") else [] for name, items in quick.items()}
    quick["runs"] = [run for run in quick["runs"] if run["measure"] in ("race", "scaling")]
    for items in quick.values():
        for item in items:
            item |= {"created": "2002-01-01T00:00:00+00:00", "key": item["key"] + "-quick"}
    view = view_of(whole, quick)
    assert view.profile == "full"
    for name in ("race", "scaling"):
        assert len(view.table(name)) and not view.table(name)["key"].str.contains("-quick").any()
    trained = {name: [] if name in ("race", "scaling") else items for name, items in whole.items()}
    trained["runs"] = [run for run in trained["runs"] if run["measure"] not in ("race", "scaling")]
    assert view_of(trained, quick).table("race")["key"].str.contains("-quick").all()


@pytest.mark.parametrize("setting", ["training_digest", "dtype", "framework_version"])
def test_runs_with_other_settings_are_not_averaged_in(fake: ModuleType, view_of: ViewOf, setting: str) -> None:
    """Such as after a change of the paper's file."""
    old, new = fake.rows(seeds=3, engines=("numpy", "torch")), fake.rows(seeds=1, engines=("numpy",))
    for rows, value in ((old, "before"), (new, "after")):
        for item in rows["runs"]:
            item[setting] = value
    for items in new.values():
        for item in items:
            item |= {"created": "2002-01-01T00:00:00+00:00", "key": item["key"] + "-new"}
    view = view_of(old, new)
    assert row(tables.performance(view), "numpy")["seeds"] == 1
    assert row(tables.performance(view), "torch")["seeds"] == 3
    assert view.left_out > 0


def test_an_engine_of_a_later_release_is_shown_after_the_papers_own(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=1)
    for items in sweep.values():
        for item in items:
            if item["engine"] == "jax":
                item |= {"engine": "later", "label": "Later"}
    assert view_of(sweep).engines() == [*ENGINES, "later"]


def test_an_optional_engine_has_a_row_only_where_it_ran(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows(seeds=1)
    tried = [run for run in sweep["runs"] if run["engine"] == "flux"]
    sweep["runs"] += [run | {"engine": "lux", "label": "Lux", "status": "failed", "error": "no Lux"} for run in tried]
    view = view_of(sweep)
    assert view.absent() == {"lux": "failed: no Lux", "simplechains": "not run"}
    for name in ABOUT_ENGINES:
        made = tables.PRODUCERS[name](view)
        assert not {"lux", "simplechains"} & {item.get("engine") for item in made.rows}, name
        assert "Without a row: Lux: failed: no Lux; SimpleChains: not run." in made.notes, name
    told = [dict(item) for item in tables.missing(view).rows]
    assert {"row": "Lux", "measure": "everything", "reason": "failed: no Lux"} in told
    for items in sweep.values():
        items += [item | {"engine": "simplechains"} for item in items if item["engine"] == "flux"]
    assert view_of(sweep).engines() == [*ENGINES, "simplechains"]


# ----------------------------------------------------------------------------------------------------------
# The numbers of the text


def test_every_number_of_the_text_has_a_value_and_a_text(full_report: report.Built) -> None:
    document = json.loads(full_report.data.read_text(encoding="utf-8"))
    for paper in document["papers"]:
        assert len(paper["numbers"]) > 50
        for name, entry in paper["numbers"].items():
            assert entry["text"] and entry["value"] is not None, name
            assert "nan" not in entry["text"].lower(), name


def test_the_text_quotes_what_the_tables_show(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows(seeds=5))
    found = numbers.of_paper(view)
    performance, race = tables.performance(view), tables.race(view)
    assert found["numpy.total_s"]["value"] == pytest.approx(row(performance, "numpy")["total_s"])
    assert found["torch.bytes_total"]["value"] == pytest.approx(row(performance, "torch")["allocated_bytes"])
    assert found["race.2.numpy.ratio"]["value"] == pytest.approx(row(race, "numpy", threads=2)["ratio_median"])
    assert found["reported.Own.seconds_total"] == {"value": 135.0, "text": "135"}
    assert found["settings.all"]["value"] == len(list(view.paper.settings()))


def test_the_text_quotes_own_weights_techniques_variants_and_verdicts(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows("imdb-cnn-a", seeds=2), paper="imdb-cnn-a")
    found = numbers.of_paper(view)
    own = row(tables.PRODUCERS["own_accuracy"](view), "torch")
    assert found["own.torch.test_accuracy"]["value"] == pytest.approx(own["own_test_accuracy"])
    assert found["technique.julia.all.time_saved"] == {"value": pytest.approx(90), "text": "90 %"}
    assert found["technique.numpy.replay.bytes_saved"]["text"] == "33 %"
    assert found["variant.static.torch.test_accuracy"]["value"] < found["torch.test_accuracy"]["value"]
    assert found["race.2.rival"]["text"] == "JAX"
    assert found["race.2.numpy.ratio_to_rival"]["value"] == pytest.approx(300 / 500, rel=0.05)
    shown = tables.PRODUCERS["claims"](view).rows
    for verdict in ("reproduced", "not reproduced", "not tested", "not testable"):
        count = sum(item["verdict"] == verdict for item in shown)
        assert found[f"claims.{verdict.replace(' ', '_')}"]["value"] == count
    for verdict in ("holds", "does not hold", "not measured"):
        count = sum(item["on_ours"] == verdict for item in shown)
        assert found[f"claims.ours.{verdict.replace(' ', '_')}"]["value"] == count
    assert found["claims.not_tested"]["value"] > 5 and found["claims.ours.holds"]["value"] > 0


def test_a_number_that_is_missing_is_left_out(fake: ModuleType, view_of: ViewOf) -> None:
    found = numbers.of_paper(view_of(fake.rows(seeds=1, engines=("numpy",))))
    assert not [name for name in found if name.startswith("torch.") and not name.endswith(".label")]
    assert "numpy.later_ratio" not in found and "numpy.test_accuracy_sd" not in found


# ----------------------------------------------------------------------------------------------------------
# Exports


SPECIALS = "100 % & _under_ #1 $x$ {a|b} ~ ^ \\cmd <tag> [1] * ` 3.1·10⁻⁷ ± × ≤ µs — – Δ −∞ …"


def small(text: str) -> Table:
    return Table(
        id="small",
        title=text,
        fields=("name", "value"),
        columns=(table.column(text, "name", align="left"), table.column("v", "value", formats.significant)),
        rows=({"name": text, "value": 0.1 + 0.2, "g": text}, {"name": None, "value": None, "g": text}),
        group="g",
        notes=(text,),
    )


def test_latex_escapes_every_special_character() -> None:
    text = table.to_latex(small(SPECIALS))
    cell = table.latex_escape(SPECIALS)
    assert cell in text
    plain = re.sub(r"\{[\[\]]\}|\\textbackslash\{\}|\\text[a-z]+\{\}|\\[{}&%$#_,]|\$[^$]*\$", "", cell)
    assert not re.search(r"[\\{}&%$#_~^<>|]", plain), plain
    assert "3.1$\\cdot$10$^{-7}$" in cell
    assert cell.isascii()
    assert text.count(" & ") == text.count("\\\\\n") - 1, "one separator per row; the group heading has none"


def test_markdown_cells_cannot_break_the_table() -> None:
    lines = [line for line in table.to_markdown(small(SPECIALS)).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}


@given(st.text(max_size=40))
def test_no_text_breaks_a_markdown_row_or_a_latex_line(text: str) -> None:
    assert "\n" not in table.markdown_escape(text) + table.latex_escape(text)
    assert not re.search(r"(?<!\\)(\\\\)*\|", table.markdown_escape(text))


def test_csv_keeps_every_digit_and_leaves_missing_cells_empty() -> None:
    lines = list(csv.reader(io.StringIO(table.to_csv(small('a, "b"\n')))))
    assert lines[0] == ["name", "value"]
    assert float(lines[1][1]) == 0.1 + 0.2
    assert lines[2] == ["", ""]


def test_csv_reads_back_as_numbers(full_report: report.Built) -> None:
    for path in (full_report.folder / "tables").glob("*.csv"):
        frame = pd.read_csv(path)
        assert len(frame), path.name
        for name in frame.columns:
            if name.endswith(("_s", "_s_sd", "_bytes", "_us", "_median", "accuracy")):
                assert pd.api.types.is_numeric_dtype(frame[name]), (path.name, name)


def test_the_report_is_made_from_tidy_alone(full_results: Path) -> None:
    assert not (full_results / "raw").exists()
    assert isinstance(Tidy.load(full_results), Tidy)


def test_engines_that_are_no_more_are_kept_in_results_and_named_but_not_shown(
    fake: ModuleType, view_of: ViewOf
) -> None:
    sweep = fake.rows(seeds=1)
    for items in sweep.values():
        items += [
            item | {"engine": "manual", "label": "Hand-written numpy", "key": item["key"].replace("numpy", "manual")}
            for item in items
            if item["engine"] == "numpy"
        ]
    view = view_of(sweep)
    assert view.retired == ("Hand-written numpy",) and "manual" not in view.engines()
    for name in ABOUT_ENGINES:
        made = tables.PRODUCERS[name](view)
        assert not [item for item in made.rows if item.get("engine") == "manual"], name
        assert [item for item in made.rows if item.get("engine") == "numpy"], name
    told = [item for item in tables.missing(view).rows if item["row"] == "Hand-written numpy"]
    assert [item["reason"] for item in told] == ["retired: its results are kept, and not shown"]
