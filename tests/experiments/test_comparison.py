"""Whether results reproduce others: each difference that counts is found, and none where there is none."""

from __future__ import annotations

import copy
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from experiments import archive, changed, cli, comparison, papers, testing
from experiments.comparison import Comparison
from experiments.results import Record, Results, plain

COMMITTED = Path(__file__).resolve().parents[2] / "paper" / "results"


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str, list[Record]], Path]:
    """A function that makes a results folder of records."""

    def make(name: str, records: list[Record]) -> Path:
        results = Results(tmp_path / name)
        results.raw.mkdir(parents=True)
        for record in records:
            results.save(record)
        return results.root

    return make


@pytest.fixture
def compared(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Comparison]:
    """A function that compares records; without the claims, which take pandas."""
    monkeypatch.setattr(comparison, "_claims", lambda *_: [])
    numbers = iter(range(1000))

    def compare(here: list[Record], there: list[Record]) -> Comparison:
        folders = [save(f"{name}{next(numbers)}", records) for name, records in (("here", here), ("there", there))]
        found = comparison.compare(*(comparison.load(str(folder)) for folder in folders))
        json.dumps(plain(found.rows()), allow_nan=False)
        return found

    return compare


def counted(found: Comparison) -> set[tuple[str, str]]:
    return {(one.kind, one.engine) for one in found.counted}


# What counts ----------------------------------------------------------------------------------------------------------


def test_the_same_results_and_those_of_another_machine_reproduce(compared: Any, invented: ModuleType) -> None:
    same = compared(invented.sweep("a"), invented.sweep("a"))
    assert same.reproduced and same.of("origin") == []
    other = compared(invented.sweep("b"), invented.sweep("a"))
    assert other.reproduced and other.both == 16
    assert {one.what for one in other.of("origin")} == {"machine"}
    assert other.verdict() == ["Reproduced: all 16 runs were compared, and no difference counts."]
    assert {one.words.partition(" against")[0][:4] for one in other.of("step")} == {"step"}


@pytest.mark.parametrize(
    ("shift", "state"), [(0.0, "agrees"), (0.004, "agrees"), (0.02, "differs"), (-0.02, "differs")]
)
def test_an_accuracy_counts_that_is_over_half_a_point_away_for_sure(
    shift: float, state: str, compared: Any, invented: ModuleType
) -> None:
    mine = invented.sweep("b")
    noise = random.Random(1)
    for record in mine:
        if record["config"]["engine"] == "numpy":
            record["epochs"][-1]["test_accuracy"] += shift + noise.gauss(0, 1e-4)
    found = compared(mine, invented.sweep("a"))
    states = {one.engine: one.about["state"] for one in found.of("accuracy")}
    assert states == {"numpy": state, "julia": "agrees", "torch": "agrees"}
    assert counted(found) == ({("accuracy", "numpy")} if state == "differs" else set())


def test_an_accuracy_that_is_away_by_chance_is_open_and_does_not_count(compared: Any, invented: ModuleType) -> None:
    mine = invented.sweep("b", seeds=3)
    for record, shift in zip(
        [one for one in mine if one["config"]["engine"] == "numpy"], (0.1, -0.05, 0.02), strict=True
    ):
        record["epochs"][-1]["test_accuracy"] += shift
    found = compared(mine, invented.sweep("a", seeds=3))
    assert {one.engine: one.about["state"] for one in found.of("accuracy")}["numpy"] == "open" and found.reproduced


@pytest.mark.parametrize(("shift", "counts"), [(0.004, False), (0.006, False), (0.05, True)])
def test_of_a_single_run_the_test_rows_decide(shift: float, counts: bool, compared: Any, invented: ModuleType) -> None:
    """At 0.9 of 10,000 rows the difference of two shares has a standard error of 0.0042."""
    found = compared(invented.sweep("b", seeds=1, accuracy=0.9 + shift), invented.sweep("a", seeds=1))
    assert found.reproduced != counts


@pytest.mark.parametrize(
    ("change", "state", "counts"),
    [
        (lambda losses: None, "agree", False),
        (lambda losses: losses.__setitem__(40, losses[40] + 5e-3), "drift", False),
        (lambda losses: losses.__setitem__(40, losses[40] + 2e-2), "differ", True),
        (lambda losses: losses.__setitem__(0, losses[0] + 2e-4), "differ", True),
        (lambda losses: losses.__setitem__(7, None), "differ", True),
    ],
)
def test_losses_count_that_are_not_of_the_same_training(
    change: Any, state: str, counts: bool, compared: Any, invented: ModuleType
) -> None:
    mine = invented.sweep("b")
    change(next(one for one in mine if one["config"]["engine"] == "julia")["step_losses"])
    found = compared(mine, invented.sweep("a"))
    assert counted(found) == ({("losses", "julia")} if counts else set())
    assert next(one for one in found.of("losses") if one.engine == "julia").words.startswith(f"losses {state}")


def test_a_run_that_fails_here_counts_and_one_that_is_not_available_does_not(
    compared: Any, invented: ModuleType
) -> None:
    whole = invented.sweep("a")
    for status, counts in (("failed", {("failed", "julia")}), ("unavailable", set())):
        mine = invented.sweep("b")
        mine[1] = invented.record("julia", 0, machine="b", status=status)
        found = compared(mine, whole)
        assert counted(found) == counts
        assert [(one.here, one.there) for one in found.of("failed")] == [(status, "ok")]
        assert compared(whole, mine).reproduced, "what fails there and not here is no failure to reproduce"


def test_an_order_that_turned_counts_and_a_ratio_that_moved_does_not(compared: Any, invented: ModuleType) -> None:
    there = invented.sweep("a")
    moved = compared(
        [*invented.sweep("b")[:-1], invented.record(measure="race", machine="b", speed={"julia": 300.0})], there
    )
    assert moved.reproduced and {one.engine: one.about["apart"] for one in moved.of("step")}["julia"]
    turned = compared(
        [*invented.sweep("b")[:-1], invented.record(measure="race", machine="b", speed={"numpy": 2000.0})], there
    )
    assert counted(turned) == {("step", "numpy")} and "the order turned" in turned.verdict()[1]
    short = copy.deepcopy(
        [*invented.sweep("b")[:-1], invented.record(measure="race", machine="b", speed={"numpy": 2000.0})]
    )
    short[-1]["race"] = [row for row in short[-1]["race"] if row["round"] < 4]
    assert compared(short, there).reproduced, "three rounds say nothing for sure"


def test_ratios_are_taken_on_each_machine_and_times_never_compared(compared: Any, invented: ModuleType) -> None:
    slow = {"numpy": 3000.0, "julia": 1200.0, "torch": 8000.0}
    found = compared(
        [*invented.sweep("b")[:-1], invented.record(measure="race", machine="b", speed=slow)], invented.sweep("a")
    )
    assert found.reproduced and all(0.9 < one.about["change"] < 1.1 for one in found.of("step"))


# Which runs are compared ----------------------------------------------------------------------------------------------


def test_only_what_both_have_is_compared_and_the_rest_is_counted(compared: Any, invented: ModuleType) -> None:
    found = compared(invented.sweep("b", seeds=2), invented.sweep("a", seeds=5))
    assert found.runs == [{"study": "mnist-rnn-e", "both": 7, "only_here": 0, "only_there": 9}]
    assert found.verdict()[0].startswith("Reproduced: 7 of the 16 runs of ")
    assert {one.about["runs"] for one in found.of("accuracy")} == {2}


def test_a_profile_is_a_name_and_what_it_decides_is_compared(compared: Any, invented: ModuleType) -> None:
    quick = [invented.record(seed=0, machine="b", asked={"profile": "quick"})]
    assert compared(quick, invented.sweep("a")).both == 1


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"study": "mnist-cnn"}, "their studies are mnist-cnn and mnist-rnn-e"),
        ({"measure": "own"}, "their measures are own and race, time"),
        ({"threads": 7}, "their threads are 7 and 2"),
        ({"training": {"epochs": 1}}, "the settings of their trainings"),
    ],
)
def test_results_with_nothing_in_common_are_a_mistake_with_its_reason(
    asked: dict[str, Any], reason: str, save: Any, invented: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = save("here", [invented.record(asked=asked)]), save("there", invented.sweep("a"))
    assert cli.invoke(["compare", str(here), str(there)]) == 2
    assert reason in capsys.readouterr().err


def test_results_of_several_machines_pool_their_accuracies_and_keep_their_times_apart(
    compared: Any, invented: ModuleType
) -> None:
    found = compared([*invented.sweep("a"), *invented.sweep("b")], invented.sweep("a"))
    assert found.both == 16 and {one.about["runs"] for one in found.of("accuracy")} == {5}
    assert {(one.engine, one.about["machine_here"]) for one in found.of("step")} == {
        (engine, machine) for engine in ("numpy", "julia") for machine in invented.MACHINES.values()
    }


def test_commits_of_one_folder_are_compared(
    save: Any, invented: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numpy engine was changed and run again: what did not change is not run again, and still compared."""
    monkeypatch.setattr(comparison, "_claims", lambda *_: [])
    before = invented.sweep("a", commit="aaaa" * 10, created="2001-01-01")
    later = {"commit": "bbbb" * 10, "created": "2001-01-02", "sources": "s2"}
    after = [invented.record("numpy", seed, accuracy=0.8, **later) for seed in range(5)]
    folder = save("both", [*before, *after])
    assert cli.invoke(["compare", f"{folder}@bbbb", f"{folder}@aaaa"]) == 1
    said = capsys.readouterr().out
    assert "Not reproduced: all 16 runs were compared, and 1 difference counts:" in said
    assert "mnist-rnn-e numpy: accuracy (time) 0.8" in said.replace("\n    ", " ")
    assert cli.invoke(["compare", f"{folder}@aaaa", f"{folder}@aaaa"]) == 0
    assert cli.invoke(["compare", f"{folder}@cccc", f"{folder}@aaaa"]) == 2
    assert "no run of commit cccc; there are runs of aaaaaaaa, bbbbbbbb" in capsys.readouterr().err


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_says_it_in_80_columns_and_as_json(
    save: Any, invented: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(comparison, "_claims", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    save("results", invented.sweep("b", accuracy=0.8))
    archive.write(tmp_path / "there.tar.xz", Results(save("there", invented.sweep("a"))).files())
    assert cli.invoke(["compare", "results", "there.tar.xz", "--json", "found.json"]) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80, said
    for words in ("Not reproduced: all 16 runs were compared, and 3 differences count:", "DIFFERS", "±.0024", "<0.001"):
        assert words in said, said
    document = json.loads((tmp_path / "found.json").read_text())
    verdict = document["rows"][0]
    assert (verdict["kind"], verdict["reproduced"]) == ("verdict", False) and len(document["errors"]) == 3
    assert {row["kind"] for row in document["rows"]} >= {"side", "runs", "accuracy", "step", "losses", "origin"}
    assert cli.invoke(["compare", "results", "results"]) == 0
    assert capsys.readouterr().out.endswith("Reproduced: all 16 runs were compared, and no difference counts.\n")


def test_the_committed_results_reproduce_themselves_claims_and_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(COMMITTED.parents[1])
    monkeypatch.setattr(papers, "paper_keys", lambda: ["mnist-rnn-e"])  # the claims of all take long
    archive_alone = COMMITTED / archive.NAME
    assert cli.invoke(["compare", str(archive_alone)]) == 0
    assert "no difference counts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "absent: there is no such results folder or archive"),
        ("empty", "no raw records in it"),
        ("text", "no archive of raw records"),
        ("old.tar.xz", "its 10 records are of another release"),
        ("damaged", "is damaged: not JSON"),
        ("later", "its 1 records are of another release"),
        ("asks nothing", "is damaged: asked: found None, expected a table"),
        ("altered", "its key is not the hash of what it says was asked"),
    ],
)
def test_what_cannot_be_compared_is_a_mistake(
    name: str, reason: str, save: Any, invented: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save("good", [invented.record()])
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no archive")
    (tmp_path / "old.tar.xz").write_bytes(Path(__file__).with_name("schema-1.tar.xz").read_bytes())
    record = invented.record(seed=1)
    (save("damaged", [invented.record()]) / "raw" / f"{record['key']}.json").write_text("{")
    later = tmp_path / "later" / "raw"
    later.mkdir(parents=True)
    (later / f"{record['key']}.json").write_text(json.dumps(record | {"schema": 99}))
    for folder, asked in (("asks nothing", None), ("altered", record["asked"] | {"seed": 7})):
        raw = tmp_path / folder / "raw"
        raw.mkdir(parents=True)
        (raw / f"{record['key']}.json").write_text(json.dumps(record | {"asked": asked}))
    for sides in ((name, "good"), ("good", name)):
        assert cli.invoke(["compare", *sides]) == 2
        assert reason in capsys.readouterr().err


def test_runs_with_other_settings_are_said_to_be(save: Any, invented: ModuleType, compared: Any) -> None:
    here, there = save("one", invented.sweep("a")), save("two", invented.sweep("a"))
    (here / changed.NOTE).write_text('["training.epochs=2"]\n')
    found = comparison.compare(comparison.load(str(here)), comparison.load(str(there)))
    assert any("different --set" in note and "training.epochs=2" in note for note in found.notes)


# Claims ---------------------------------------------------------------------------------------------------------------


def test_a_claim_whose_verdict_differs_counts_unless_it_is_near_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def claims(here: tuple[str, float], there: tuple[str, float], low: float = 1.0, differences: bool = False) -> bool:
        sides = iter((here, there))

        def findings(_: Any) -> Any:
            word, value = next(sides)
            return {("mnist-rnn-e", "faster"): (word, value, (low, None, differences), "it is faster")}

        monkeypatch.setattr(comparison, "_findings", findings)
        (found,) = comparison._claims(None, None)  # type: ignore[arg-type]
        return found.counts

    assert claims(("holds", 2.0), ("does not hold", 0.5))
    assert not claims(("holds", 1.05), ("does not hold", 0.95))
    assert claims(("holds", 1.05), ("does not hold", 0.8))
    assert not claims(("holds", 0.002), ("does not hold", -0.001), low=0.0, differences=True)
    assert not claims(("holds", 2.0), ("not measured", math.nan))


# Statistics -----------------------------------------------------------------------------------------------------------


def test_the_plain_methods_agree_with_scipy(seed: int) -> None:
    source = random.Random(seed)
    for degrees in (1, 2, 3, 4, 9, 30, 200):
        for t in (-30.0, -2.0, -0.1, 0.0, 0.7, 1.96, 12.0):
            assert testing.student(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), abs=1e-9)
        assert testing.student_quantile(0.975, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-6)
    for count in range(3, 15):
        here = [source.gauss(0.9, 0.01) for _ in range(count)]
        there = [source.gauss(0.9, 0.01) for _ in range(count)]
        found = testing.paired(here, there, [10_000] * count)
        assert found.p == pytest.approx(stats.ttest_rel(here, there).pvalue, abs=1e-8)
        mean = stats.t.interval(0.95, count - 1, loc=statistics.fmean(here), scale=stats.sem(here))
        assert testing.of_mean(here) == pytest.approx(mean, rel=1e-6)
        outside, ordered = int(stats.binom.ppf(0.025, count, 0.5)), sorted(here)
        assert testing.of_median(here) == ((ordered[outside - 1], ordered[-outside]) if outside else None)
    wilson = stats.binomtest(9_100, 10_000).proportion_ci(method="wilson")
    assert testing.of_share(0.91, 10_000) == pytest.approx((wilson.low, wilson.high), rel=1e-9)
    values = [source.random() ** 4 for _ in range(20)]
    assert sorted(testing.holm(values)) == sorted(testing.holm(values[::-1]))
    assert testing.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_the_test_finds_nothing_too_often_where_there_is_nothing(seed: int) -> None:
    """Of 2,000 comparisons without a difference about one in twenty has p below 0.05."""
    source = random.Random(seed)
    low = sum(
        testing.paired(*([source.gauss(0, 1) for _ in range(5)] for _ in range(2)), [0] * 5).p < 0.05  # type: ignore[arg-type]
        for _ in range(2000)
    )
    assert 60 < low < 140, low


def test_equal_and_shifted_runs_without_any_spread_are_told_apart() -> None:
    same = [0.5, 0.6, 0.7]
    assert testing.paired(same, same, [100] * 3).p == 1.0
    assert testing.paired([0.75, 0.75, 0.75], [0.5, 0.5, 0.5], [100] * 3).p == 0.0
    assert testing.paired([0.9], [0.9], [0]).p == 1.0 and testing.of_share(0.9, 0) == (0.0, 1.0)


def test_steps_of_several_sizes_are_compared_network_by_network(invented: ModuleType) -> None:
    def side(**speed: float) -> Any:
        made = invented.record(measure="race", paper="sizes", speed=speed)
        rounds = made.pop("race")
        made["sizes"] = [row | {"batch": batch} for row in rounds for batch in (1, 16)]
        made["config"] |= {"measure": "sizes", "family": "gru", "size": "64"}
        return SimpleNamespace(records=[made])

    found = comparison._steps(side(), side(numpy=2000.0))
    assert {(one.engine, one.what, one.counts) for one in found} == {
        (engine, f"gru-64, mini-batches of {batch}, 2 threads", engine == "numpy")
        for engine in ("numpy", "julia")
        for batch in (1, 16)
    }


def test_measures_of_which_nothing_is_compared_are_named(compared: Any, invented: ModuleType) -> None:
    found = compared(*([*invented.sweep("a"), invented.record(measure="memory", peak_rss_bytes=1)] for _ in range(2)))
    assert found.notes == ["Of these measures only failures and claims were compared: memory."]
    assert compared(invented.sweep("a"), invented.sweep("a")).notes == []
