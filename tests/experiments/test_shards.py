"""Shards are cut alike on every machine: together they have each job once, and about as much to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.registry import Availability, Registered
from experiments import machine, papers, provenance, shards, sweep
from experiments.data.dataset import Dataset
from experiments.results import Results
from experiments.run_arrays import RunArrays
from experiments.shards import Shard, ShardError, cut
from experiments.sweep import Job

COMMITTED = Path(__file__).resolve().parents[2] / "paper" / "results"
X, Y = np.zeros((300, 784), dtype=np.float32), np.arange(300) % 10
ROWS = Dataset("mnist", "sample", X, Y, X[:50], Y[:50], digest="d" * 64, origin="here", notice="invented rows")


def become(monkeypatch: pytest.MonkeyPatch, cores: int, stepping: str) -> None:
    """Another machine."""
    here = dataclasses.replace(machine.machine(), stepping=stepping, cores=cores)
    monkeypatch.setattr(provenance, "machine", lambda: here)
    monkeypatch.setattr(provenance, "cores", lambda: cores)


def planned(*names: str) -> list[Job]:
    """What `twingrad run --shard` cuts."""
    studies = [papers.load_paper(name) for name in names or ("mnist-rnn-e", "mnist-cnn")]
    return [job for paper in studies for job in sweep.plan(paper, everywhere=True)]


def test_the_shards_of_two_machines_have_each_job_exactly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registered, "availability", lambda self: Availability(True, "", {"numpy": "2.0"}))
    monkeypatch.setattr(provenance, "commit", lambda: ("c0ffee", False))
    monkeypatch.setattr(sweep, "_weights_digest", lambda task: "w")
    jobs: dict[str, list[Job]] = {}
    hashes: dict[str, dict[tuple[Any, ...], str]] = {}
    keys: dict[str, set[str]] = {}
    with RunArrays(ROWS, tmp_path) as work:
        for cores, name in ((16, "large"), (1, "small")):
            become(monkeypatch, cores, name)
            jobs[name] = planned("mnist-rnn-e")
            records = {job.identity: sweep.skeleton(job, sweep.task_of(job, work), ROWS) for job in jobs[name]}
            hashes[name] = {identity: record["job"] for identity, record in records.items()}
            keys[name] = {record["key"] for record in records.values()}
    assert hashes["large"] == hashes["small"] and len(set(hashes["small"].values())) == len(jobs["small"])
    assert not keys["large"] & keys["small"], "by their keys no two machines would agree"
    costs = shards.read_costs()
    for count in (1, 2, 5, 500):
        found: list[str] = []
        for number in range(1, count + 1):
            name = "small" if number % 2 else "large"  # they alternate
            found += [hashes[name][job.identity] for job in cut(jobs[name], Shard(number, count), costs)]
        assert sorted(found) == sorted(hashes["large"].values()), count


def test_shards_have_about_as_much_to_do_and_keep_the_order_of_jobs() -> None:
    jobs, costs = planned(), shards.read_costs()
    parts = [cut(jobs, Shard(number, 4), costs) for number in range(1, 5)]
    loads = [sum(shards.cost(job, costs) for job in part) for part in parts]
    assert max(loads) < 1.1 * min(loads)
    place = {job.identity: number for number, job in enumerate(jobs)}
    for part in parts:
        assert [place[job.identity] for job in part] == sorted(place[job.identity] for job in part)
    assert cut([*jobs, *jobs], Shard(1, 4), costs) == parts[0], "a paper that is named twice is run once"


def test_the_cost_of_what_was_never_run_is_that_of_others() -> None:
    job = planned()[0]
    assert shards.cost(job, {}) == 1.0
    assert shards.cost(job, {("other", job.measure, "numpy"): 4.0, ("other", "race", ""): 9.0}) == 4.0
    assert shards.cost(job, {("other", "none", "numpy"): 7.0}) == 7.0


def test_the_committed_costs_are_those_of_the_committed_results() -> None:
    assert shards.costs_of(Results(COMMITTED).records()) == shards.COSTS.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "-1/3", "1/3/5", "a/b", "١/٣", "1/99999999", "1.0/2"])
def test_a_shard_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ShardError, match="expected i/n, such as 1/4"):
        Shard.parse(text)
    assert str(Shard.parse("2/3")) == "2/3"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected the columns study, measure"),
        (b"study,measure\n", "expected the columns study, measure"),
        (b"\xff\xfe", "no table of costs"),
        (b"study,measure,engine,seconds\na,b,c\n", "line 2: expected study"),
        (b"study,measure,engine,seconds\na,b,c,1\na,b,c,nan\n", "line 3"),
        (b"study,measure,engine,seconds\na,b,c,-1\n", "line 2"),
        (b"study,measure,engine,seconds\na,b,c,1e300\n", "line 2"),
    ],
)
def test_costs_that_are_none_are_named(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=rf"costs\.csv: .*{reason}"):
        shards.read_costs(path)
    with pytest.raises(ShardError, match="cannot be read"):
        shards.read_costs(tmp_path / "absent.csv")


def test_a_folder_without_finished_runs_has_no_costs(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no finished runs"):
        shards.main([str(tmp_path / "mistyped")])
    with pytest.raises(ShardError, match="expected one results folder"):
        shards.main([])
    assert shards.main([str(COMMITTED)]) == shards.COSTS.read_text(encoding="utf-8")
