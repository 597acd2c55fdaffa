"""The figures over all studies, and the confidence intervals in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from experiments import report, testing
from experiments.report import overview
from experiments.report.view import View


@pytest.mark.parametrize("count", [6, 9, 12, 20, 35])
def test_the_interval_of_a_median_holds_it_as_often_as_it_says(count: int) -> None:
    samples = np.random.default_rng(count).standard_normal((4000, count))
    found = [testing.of_median(sample) for sample in samples]
    held = np.mean([low <= 0 <= high for low, high in filter(None, found)])
    assert None not in found
    assert 0.94 < held <= 1.0
    low, high = testing.of_median(range(1, count + 1)) or (0, 0)
    assert low + high == count + 1, "as many values lie below as above"


@pytest.mark.parametrize("count", range(6))
def test_so_few_rounds_have_no_interval(count: int) -> None:
    assert testing.of_median([1.0] * count) is None


def test_the_interval_of_a_mean_is_students() -> None:
    values = [0.1, 0.4, 0.2, 0.7, 0.6]
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert testing.of_mean(values) == pytest.approx(expected)
    assert testing.of_mean(values[:2]) is None


def test_points_are_ratios_and_differences_to_the_reference(fake: ModuleType, view_of: Callable[..., View]) -> None:
    view = view_of(fake.rows(seeds=5))
    by_id = {item.id: item.points(view) for item in overview.OVERVIEWS}
    for points in by_id.values():
        assert "numpy" in points and "torch" not in points
    rounds = overview.rounds_of(view)
    assert by_id["steps"]["numpy"].value == pytest.approx((rounds["numpy"] / rounds["torch"]).median())
    seconds = view.ok("time").pivot_table(index="seed", columns="engine", values="total_seconds")
    ratios = seconds["numpy"] / seconds["torch"]
    assert by_id["totals"]["numpy"].value == pytest.approx(ratios.mean())
    assert by_id["totals"]["numpy"].interval == pytest.approx(testing.of_mean(ratios))
    accuracy = view.ok("time").pivot_table(index="seed", columns="engine", values="test_accuracy")
    difference = 100 * (accuracy["numpy"] - accuracy["torch"])
    assert by_id["accuracies"]["numpy"].value == pytest.approx(difference.mean())
    assert by_id["accuracies"]["numpy"].interval == pytest.approx(testing.of_mean(difference))


def test_a_study_whose_race_was_with_one_thread_has_its_step(fake: ModuleType, view_of: Callable[..., View]) -> None:
    sweep = fake.rows(seeds=1)
    view = view_of(sweep | {"race": [row for row in sweep["race"] if row["threads"] == 1]})
    (steps,) = [item for item in overview.OVERVIEWS if item.id == "steps"]
    rounds = view.table("race").pivot_table(index="round", columns="engine", values="microseconds_per_step")
    assert steps.points(view)["numpy"].value == pytest.approx((rounds["numpy"] / rounds["torch"]).median())


@pytest.mark.usefixtures("sketched")
def test_a_report_has_the_figures_for_which_something_was_run(fake: ModuleType, tmp_path: Path) -> None:
    sweep = fake.rows(seeds=3)
    fake.write(tmp_path, sweep | {"race": []})
    built = report.build(tmp_path)
    document = json.loads(built.data.read_text(encoding="utf-8"))
    assert [item["id"] for item in document["overviews"]] == ["totals", "accuracies", "bytes"]
    for item in document["overviews"]:
        assert (built.folder / "figures" / item["file"]).is_file()
        assert f'id="overview-{item["id"]}"' in (built.folder / "report.html").read_text(encoding="utf-8")


def test_without_the_reference_nothing_is_drawn(fake: ModuleType, view_of: Callable[..., View], tmp_path: Path) -> None:
    view = view_of(fake.rows(seeds=2, engines=("numpy", "jax")))
    assert not any(overview.draw(item, [view], tmp_path / item.id) for item in overview.OVERVIEWS)
    assert not list(tmp_path.glob("*.svg"))
