"""Each measuring tool is proved on something whose size or order is known; real workers run the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry as engines
from bridge import spec as model_spec
from bridge import weights
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments import papers
from experiments.data.dataset import Dataset
from experiments.measures import memory, race, scaling, training
from experiments.measures.task import RunError, Task
from experiments.run_arrays import RunArrays

MB = 1_000_000


class Watcher:
    """Counts the steps of progress."""

    steps = 0

    def step(self) -> None:
        self.steps += 1


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    """Two epochs of the papers' network on 250 invented rows: three steps each, the last one partial."""
    generator = np.random.default_rng(0)
    x, y = generator.random((250, 784), dtype=np.float32), generator.integers(0, 10, 250)
    dataset = Dataset("mnist", "sample", x, y, x[:60], y[:60], digest="d", origin="invented")
    with RunArrays(dataset, tmp_path_factory.mktemp("work")) as work:
        yield Task(
            spec=model_spec.load(papers.model_path("mnist-rnn")),
            optimizer=Optimizer("sgd", 0.015),
            batch_size=100,
            dtype="float32",
            epochs=2,
            seed=3,
            work=work,
        )


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "megabytes"), [(1, 64), (25, 8), (400, 1)])
def test_memray_counts_the_bytes_of_a_known_loop(tmp_path: Path, count: int, megabytes: int) -> None:
    memray = pytest.importorskip("memray")
    np.empty(1)
    capture = tmp_path / "capture.bin"
    with memray.Tracker(capture):
        for _ in range(count):
            np.empty(megabytes * MB, dtype=np.uint8)
    allocated, allocations = memory.read_capture(capture)
    assert allocated == pytest.approx(count * megabytes * MB, abs=100_000)
    assert count <= allocations < count + 100


def test_memray_sees_other_threads_and_nothing_before_it_started(tmp_path: Path) -> None:
    """In a fresh process, as a worker is: start-up, imports and data do not count."""
    pytest.importorskip("memray")
    code = f"""
        import threading
        import numpy as np
        import memray
        kept = np.ones(100_000_000, dtype=np.uint8)
        with memray.Tracker({str(tmp_path / "capture.bin")!r}):
            threads = [threading.Thread(target=lambda: np.empty(30_000_000, dtype=np.uint8)) for _ in range(2)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
    allocated, _ = memory.read_capture(tmp_path / "capture.bin")
    # A new thread maps its own stack (8 MB of address space) and an arena.
    assert 60 * MB <= allocated < 60 * MB + 2 * 80 * MB


CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
FRAMEWORKS = [("jax", 3.2), ("tensorflow", 3.5), ("torch", 5.0), *([("tensorflow-xla", 3.5)] if CAMPAIGN else ())]
"""A campaign has XLA in TensorFlow, too, which JAX has here."""


@pytest.mark.parametrize(("engine", "most"), FRAMEWORKS)
def test_memray_sees_what_frameworks_allocate(engine: str, most: float, tmp_path: Path) -> None:
    """A step of this network makes two arrays of 8 MB at least, the activations and their gradient, and few more."""
    pytest.importorskip("memray")
    if not (available := engines.availability(engine)).ok:
        pytest.skip(available.reason)
    rows, units, steps = 500, 4000, 3
    layers = [
        {"id": "wide", "op": "dense", "units": units, "bias": False},
        {"id": "tanh", "op": "activation", "activation": "tanh"},
        {"id": "output", "op": "dense", "units": 1},
    ]
    header = {"format": "twingrad-model", "version": 1, "opset": 1, "name": "wide", "layers": layers}
    made = model_spec.parse(header | {"input": {"shape": ["N", 10]}, "loss": {"op": "mean_squared_error"}})
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((steps * rows, n)).astype("float32") for n in (10, 1))
    with Worker(engine, 1, counting=True) as worker:
        worker.build(made, weights.initialise(made, 0), Optimizer("sgd", 0.01), rows)
        worker.train_epoch(x, y, np.arange(len(x)))  # everything is compiled and preloaded
        worker.start_memray(tmp_path / "capture.bin")
        worker.train_epoch(x, y, np.arange(len(x)))
        worker.stop_memray()
    allocated, _ = memory.read_capture(tmp_path / "capture.bin")
    hidden = steps * rows * units * 4
    assert 2 * hidden <= allocated <= most * hidden


def test_allocated_bytes_are_those_of_the_epochs(task: Task) -> None:
    pytest.importorskip("memray")
    watcher = Watcher()
    with Worker("numpy", 1) as worker:
        found = memory.measure(worker, task, watcher)
    assert [epoch["epoch"] for epoch in found["epochs"]] == [1, 2]
    assert watcher.steps == 2
    data = task.work.dataset.x_train.nbytes + task.work.dataset.x_test.nbytes
    for epoch in found["epochs"]:
        assert epoch["bytes_allocated"] > 0
        assert epoch["allocations"] > 0
    assert found["epochs"][1]["bytes_allocated"] < 20 * data
    assert not list(task.work.folder.glob("memray-*"))


def test_the_peak_starts_afresh_after_imports_and_data(task: Task) -> None:
    with Worker("numpy", 1) as worker:
        found = memory.measure_peak(worker, task, Watcher())
    assert MB < found["peak_rss_bytes"] < 1000 * MB


# Time -----------------------------------------------------------------------------------------------------------------


def test_a_time_run_has_its_epochs_and_the_first_losses(task: Task) -> None:
    watcher = Watcher()
    with Worker("numpy", 1) as worker:
        found = training.measure(worker, task, watcher)
    assert watcher.steps == 2
    assert len(found["step_losses"]) == 3
    for epoch in found["epochs"]:
        assert 0 < epoch["seconds"] < epoch["seconds_with_evaluation"]
        assert 0 <= epoch["test_accuracy"] <= 1
    assert found["epochs"][1]["train_loss"] < found["epochs"][0]["train_loss"]
    assert found["startup"]["import_seconds"] <= found["startup"]["start_seconds"]


# Race -----------------------------------------------------------------------------------------------------------------


def test_everybody_starts_a_round_as_often_and_follows_everybody() -> None:
    names = ["a", "b", "c"]
    orders = [race.rotated(names, turn) for turn in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert race.rotated(names, 3) == names


@pytest.mark.parametrize(
    ("rows", "batch", "expected"),
    [(60_000, 100, (60_000, 600)), (60_050, 100, (60_050, 601)), (1500, 100, (60_000, 600))],
)
def test_a_chunk_is_an_epoch_or_as_many_steps(rows: int, batch: int, expected: tuple[int, int]) -> None:
    assert race.chunk(rows, batch) == expected


def raced(steps: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {"engine": name, "label": name.upper(), "round": number, "microseconds_per_step": value}
        for name, values in steps.items()
        for number, value in enumerate(values, start=1)
    ]


def test_ratios_are_taken_within_a_round() -> None:
    """The second round was slow for all: the ratio of the medians would hide that they kept their distance."""
    ours, theirs = race.standings(raced({"numpy": [100, 400, 120], "torch": [200, 800, 240]}))
    assert (ours["base"], theirs["ratio"]) == ("torch", 1.0)
    assert (ours["ratio"], ours["ratio_least"], ours["ratio_most"]) == (0.5, 0.5, 0.5)
    assert (ours["microseconds_per_step"], ours["least"], ours["most"], ours["rounds"]) == (120, 100, 400, 3)


def test_the_base_can_be_chosen_and_defaults_to_torch_or_the_first() -> None:
    rows = raced({"numpy": [100], "jax": [50]})
    assert [row["ratio"] for row in race.standings(rows)] == [1.0, 0.5]
    assert [row["ratio"] for row in race.standings(rows, "jax")] == [2.0, 1.0]


def test_a_race_runs_real_workers_in_turn(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "STEPS", 6)
    watcher = Watcher()
    with Worker("numpy", 1) as first, Worker("numpy", 1) as second:
        race.enter(first, task)
        race.enter(second, task)
        rows, failures = race.measure({"a": first, "b": second}, {"a": "A", "b": "B"}, task, 2, watcher)
    assert failures == {}
    assert watcher.steps == 3
    assert [(row["round"], row["engine"]) for row in rows] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert all(row["microseconds_per_step"] > 0 for row in rows)


def test_a_worker_that_dies_falls_out_of_the_race(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "STEPS", 3)
    with Worker("numpy", 1) as first, Worker("numpy", 1) as second:
        race.enter(first, task)
        second.close()
        rows, failures = race.measure({"a": first, "b": second}, {"a": "A", "b": "B"}, task, 1, Watcher())
    assert {row["engine"] for row in rows} == {"a"}
    assert "numpy is closed" in failures["b"]


# Scaling --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 14, 28, 56, 196, 784])
def test_a_longer_sequence_is_the_same_pixels_in_more_segments(task: Task, length: int) -> None:
    spec = scaling.with_length(task.spec, length)
    assert spec.shapes()[0].output == (length, 784 // length)
    assert spec.input == task.spec.input
    assert spec.shapes()[-1].output == (10,)


def test_a_sequence_that_does_not_divide_the_pixels_is_refused(task: Task) -> None:
    with pytest.raises(RunError, match="784 features cannot be cut into 5 equal segments"):
        scaling.with_length(task.spec, 5)


def test_a_network_without_a_sequence_is_refused(task: Task) -> None:
    document = task.spec.model_dump(mode="json")
    document["layers"] = document["layers"][2:]
    with pytest.raises(RunError, match="nothing to lengthen"):
        scaling.with_length(model_spec.parse(document), 4)


def test_every_point_is_measured_on_one_worker(task: Task) -> None:
    watcher = Watcher()
    with Worker("numpy", 1) as worker:
        rows = [scaling.measure(worker, point, watcher) for point in scaling.points(task, [10, 100], [2, 4])]
    assert [(row["quantity"], row["value"]) for row in rows] == [
        ("sequence_length", 4),
        ("sequence_length", 2),
        ("batch_size", 10),
        ("batch_size", 100),
    ]
    assert all(row["microseconds_per_step"] > 0 for row in rows)
    assert watcher.steps == 4


# The same files for all ----------------------------------------------------------------------------------------------


def test_orders_follow_from_seed_and_epoch(task: Task) -> None:
    first = np.load(task.work.order(1, 1))
    assert sorted(first) == list(range(250))
    assert first.dtype == np.int64
    assert np.array_equal(first, np.load(task.work.order(1, 1)))
    assert not np.array_equal(first, np.load(task.work.order(1, 2)))
    assert not np.array_equal(first, np.load(task.work.order(2, 1)))


def test_a_long_order_goes_through_the_rows_several_times(task: Task) -> None:
    order = np.load(task.work.order(1, 1, 600))
    assert len(order) == 600
    assert sorted(order[:250]) == sorted(order[250:500]) == list(range(250))


def test_a_workspace_is_removed_whatever_happens(task: Task, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunArrays(task.work.dataset, tmp_path / "work") as work:
        assert np.load(work.rows("train").x).shape == (250, 784)
        raise ZeroDivisionError
    assert list((tmp_path / "work").iterdir()) == []
