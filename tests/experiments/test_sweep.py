"""Which runs there are, that a finished one is not repeated, that a failed one is recorded and the rest continues."""

from __future__ import annotations

import dataclasses
import inspect
import io
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from bridge.errors import EngineUnavailableError, SpecError, WorkerError
from bridge.registry import ENGINES, Availability, Registered
from bridge.session import Evaluation
from bridge.worker import Worker
from experiments import cli, data, papers, provenance, slots, sources, summary, sweep
from experiments.data.dataset import Dataset
from experiments.errors import ResultsError
from experiments.machine import machine
from experiments.measures import ablation, memory, race, roofline
from experiments.measures.registry import MEASURES
from experiments.measures.roofline import Rates
from experiments.measures.task import RunError
from experiments.papers import Paper, PaperFileError
from experiments.progress import Progress
from experiments.results import Record, Results, hashes, tidy_rows
from experiments.run_arrays import RunArrays
from experiments.sources import SOURCES, Sources
from experiments.sweep import Job, Outcome, Sweep
from py_engine.errors import NonFiniteError


class FakeWorker:
    """A worker without a process: counts what is asked of it, and fails where a test wants it to."""

    started: ClassVar[list[str]] = []
    seen: ClassVar[list[tuple[str, np.ndarray, dict[str, np.ndarray]]]] = []
    fail: ClassVar[Callable[[str, int], None]] = staticmethod(lambda engine, epoch: None)

    def __init__(self, engine: str, threads: int, counting: bool = False, cores: Any = None) -> None:
        self.engine, self.threads, self.cores, self.pid = ENGINES[engine], threads, cores, id(self)
        self.import_seconds, self.start_seconds, self.build_seconds, self.seconds = 0.1, 0.2, 0.3, 0.01
        self.epoch = 0
        type(self).started.append(engine)

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def build(self, spec: Any, params: dict[str, np.ndarray], *_: Any, **options: Any) -> None:
        self.spec, self.params, self.epoch, self.options = spec, params, 0, options

    def own_parameters(self, spec: Any, seed: int, dtype: str) -> dict[str, np.ndarray]:
        generator = np.random.default_rng([99, seed])
        return {name: generator.random(item.shape, dtype) for name, item in spec.parameters().items()}

    def train_epoch(self, _x: Path, _y: Path, order: Path) -> np.ndarray:
        self.epoch += 1
        type(self).fail(self.engine.name, self.epoch)
        rows = np.load(order)
        type(self).seen.append((self.engine.name, rows, self.params))
        return np.linspace(2.3, 1.0, -(-len(rows) // 100))

    def evaluate(self, *_: Path) -> Evaluation:
        return Evaluation(0.5, 0.9)

    def peak_rss(self) -> int:
        return 1_000_000

    def allocated(self) -> tuple[int, int]:
        return 4_000_000 * self.epoch, 12 * self.epoch

    def start_memray(self, path: Path) -> None:
        path.touch()

    def threads_decided(self) -> bool:
        return True

    def linear_algebra(self) -> str:
        return f"{self.engine.name} blas"

    def preload(self, *_: Path) -> None: ...
    def close_session(self) -> None: ...
    def reset_peak(self) -> None: ...
    def stop_memray(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


def invented(rows: int = 300) -> Dataset:
    generator = np.random.default_rng(1)
    x = generator.random((rows, 784), dtype=np.float32)
    y = generator.integers(0, 10, rows)
    return Dataset("mnist", "sample", x, y, x[:50], y[:50], digest="d" * 64, origin="here", notice="invented rows")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "started", [])
    monkeypatch.setattr(FakeWorker, "seen", [])
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(lambda engine, epoch: None))
    monkeypatch.setattr(slots, "Worker", FakeWorker)
    monkeypatch.setattr(data, "load", lambda *_, **__: invented())
    monkeypatch.setattr(memory, "read_capture", lambda _path: (4_000_000, 12))
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    monkeypatch.setattr(roofline, "measure", lambda *_: Rates(1e18, {1: 1e18}, {"numpy": 0.0}))
    monkeypatch.setattr(Registered, "availability", lambda self: Availability(True, "", {"numpy": "2.0"}))


@pytest.fixture
def paper() -> Paper:
    return papers.load_paper("mnist-rnn-e")


def swept(folder: Path, jobs: list[Job], **options: Any) -> Outcome:
    results = Results(folder)
    with results.locked():
        outcome = Sweep(results).run(jobs, Progress(Console(file=io.StringIO()), len(jobs)), **options)
        results.write_tidy()
    return outcome


def only(records: list[Record]) -> Record:
    (record,) = records
    return record


def key(paper: Paper, tmp_path: Path, **changes: Any) -> str:
    """The key of a time run with something changed."""
    job = dataclasses.replace(Job(paper, ("numpy",), 0, "time", 2, "full"), **changes)
    return only(swept(tmp_path / "keys", [job]).records)["key"]


def with_training(paper: Paper, **settings: Any) -> Paper:
    return paper.model_copy(update={"training": paper.training.model_copy(update=settings)})


# What to run ----------------------------------------------------------------------------------------------------------


def counted(jobs: list[Job], measure: str) -> dict[str, int]:
    """How many jobs of a measure each engine has."""
    counts: dict[str, int] = {}
    for job in jobs:
        if job.measure == measure:
            counts[job.engines[0]] = counts.get(job.engines[0], 0) + 1
    return counts


def test_paper_d_runs_every_engine_on_ten_seeds_and_the_costly_ones_on_fewer() -> None:
    paper = papers.load_paper("mnist-rnn-d")
    few = {name: setting.value for name, setting in paper.runs.full.engine_seeds.items()}
    jobs = sweep.plan(paper)
    assert counted(jobs, "time") == {name: 10 for name in paper.engine_names() if name != "torch-compile"} | {
        name: count for name, count in few.items() if name != "torch-compile"
    }
    assert counted(jobs, "memory") == dict.fromkeys(set(paper.engine_names()) - {"torch-compile"}, 1)
    assert counted(jobs, "own") == {"torch": 10, "tensorflow": 2, "jax": 2}
    assert counted(jobs, "race") == counted(jobs, "ablation") == {}


def test_each_measure_runs_the_engines_that_it_is_for() -> None:
    jobs = sweep.plan(papers.load_paper("imdb-cnn-a"))
    assert counted(jobs, "own") == {"torch": 3, "tensorflow": 3, "jax": 2}
    assert counted(jobs, "variants") == dict.fromkeys(("numpy", "julia", "torch"), 2)
    assert counted(jobs, "ablation") == {"numpy": 1, "julia": 1}
    assert counted(jobs, "scaling") == {}


def test_a_paper_that_shows_the_runs_of_another_has_none_to_do() -> None:
    assert sweep.plan(papers.load_paper("imdb-cnn-c")) == []


def test_the_sample_is_run_with_the_least() -> None:
    for key in papers.paper_keys():
        paper = papers.load_paper(key)
        jobs = sweep.plan(paper, "sample")
        assert {name for job in jobs for name in job.engines} <= {"numpy", "julia", "torch"}
        assert max((job.seed for job in jobs), default=0) == 0
        assert all(job.epochs <= paper.training.epochs.value for job in jobs if not job.network)


def test_engines_take_turns_within_a_seed(paper: Paper) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy", "torch"], seeds=2, measures=["time"])
    assert [(job.seed, job.engines[0]) for job in jobs] == [(0, "numpy"), (0, "torch"), (1, "numpy"), (1, "torch")]


def test_a_race_is_one_job_for_each_number_of_threads(paper: Paper) -> None:
    jobs = sweep.plan(paper, measures=["race"])
    assert [(job.engines, job.threads, job.rounds) for job in jobs] == [
        (tuple(paper.engine_names()), 2, 9),
        (tuple(paper.engine_names()), 1, 9),
    ]
    assert [job.threads for job in sweep.plan(paper, measures=["race"], threads=1)] == [1]


def test_on_one_core_everything_runs_with_one_thread(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "cores", lambda: 1)
    jobs = sweep.plan(paper)
    assert {job.threads for job in jobs} == {1}
    assert sum(job.measure == "race" for job in jobs) == 1


def test_unknown_measures_and_engines_are_refused(paper: Paper) -> None:
    with pytest.raises(
        PaperFileError, match="no measure 'speed'; measures: time, memory, own, variants, race, scaling"
    ):
        sweep.plan(paper, measures=["time", "speed"])
    with pytest.raises(EngineUnavailableError, match="did you mean 'torch'"):
        sweep.plan(paper, engine_names=["troch"])


def test_an_engine_asked_for_by_name_must_be_available(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registered, "availability", lambda self: Availability(False, "torch is not installed"))
    with pytest.raises(EngineUnavailableError, match="engine torch: torch is not installed"):
        sweep.plan(paper, engine_names=["torch"])
    assert sweep.plan(paper)  # those of the paper file are left out one by one, with their reason


# Other measures -------------------------------------------------------------------------------------------------------


def reviews(*_: Any, **options: Any) -> Dataset:
    """Invented reviews with vectors, as the loader gives them for the paper's options."""
    generator = np.random.default_rng(2)
    x, y = generator.integers(0, options["vocabulary"], (200, options["length"])), generator.integers(0, 2, 200)
    vectors = generator.random((options["vocabulary"], 50), dtype=np.float32)
    parts = {"x_train": x, "y_train": y, "x_test": x[:50], "y_test": y[:50]}
    return Dataset("imdb", "sample", **parts, digest="f" * 64, origin="here", pretrained={"glove": vectors})


def test_own_weights_differ_by_engine_and_keep_what_comes_with_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "load", reviews)
    paper = papers.load_paper("imdb-cnn-a")
    record = only(swept(tmp_path, [Job(paper, ("torch",), 0, "own", 2, "full")]).records)
    assert (record["status"], record["config"]["measure"]) == ("ok", "own")
    assert "step_losses" not in record, "from other weights than the others: nothing to compare"
    vectors = reviews(**paper.loader_options()).pretrained["glove"]
    (_, _, params), *_ = FakeWorker.seen
    assert np.array_equal(params["embedding.weight"], vectors)
    swept(tmp_path, [Job(paper, ("torch",), 0, "time", 2, "full")])
    shared = FakeWorker.seen[-1][2]
    assert np.array_equal(shared["embedding.weight"], vectors)
    assert not np.array_equal(shared["output.weight"], params["output.weight"])


def test_an_engine_trains_in_its_own_way_where_the_paper_did(tmp_path: Path) -> None:
    paper = papers.load_paper("mnist-cnn")
    own = only(swept(tmp_path, [Job(paper, ("torch",), 0, "own", 2, "full")]).records)
    assert own["config"]["batch_size"] == 100
    assert own["config"]["training"]["own.torch.optimizer"] == "adam"
    assert "conv.bias" in FakeWorker.seen[-1][2], "the model with biases"
    shared = only(swept(tmp_path, [Job(paper, ("torch",), 0, "time", 2, "full")]).records)
    assert shared["config"]["batch_size"] == 1
    assert "conv.bias" not in FakeWorker.seen[-1][2]


def test_every_variant_is_trained_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", reviews)
    paper = papers.load_paper("imdb-cnn-a")
    record = only(swept(tmp_path, [Job(paper, ("numpy",), 1, "variants", 2, "full")]).records)
    assert [(row["variant"], row["epoch"]) for row in record["variants"]] == [
        (variant.id, epoch) for variant in paper.variants for epoch in range(1, 6)
    ]
    assert FakeWorker.started == ["numpy"] * len(paper.variants)
    assert record["variants"][0]["seconds"] > record["variants"][1]["seconds"], "the first one has the build in it"


def test_an_ablation_builds_every_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[dict[str, bool], str]] = []
    build = FakeWorker.build

    def spy(self: FakeWorker, spec: Any, params: Any, *rest: Any, techniques: dict[str, bool]) -> None:
        built.append((techniques, rest[2]))
        build(self, spec, params, *rest)

    times = [3.0, 1.0, 2.0]  # of all techniques, which are measured so often
    captures = itertools.cycle([(5_000, 1), (9_000, 1)])  # of five steps and of ten, each with what a request allocates
    measure = ablation.measure

    def timed(worker: Any, task: Any, configuration: Any, *rest: Any) -> Record:
        row = measure(worker, task, configuration, *rest)
        return row | {"microseconds_per_step": times.pop()} if configuration.kind == "all" else row

    monkeypatch.setattr(FakeWorker, "build", spy)
    monkeypatch.setattr(ablation, "measure", timed)
    monkeypatch.setattr(memory, "read_capture", lambda _path: next(captures))
    record = only(
        swept(tmp_path, [Job(papers.load_paper("mnist-rnn-e"), ("numpy",), 0, "ablation", 2, "full")]).records
    )
    names = ablation.techniques("numpy")
    assert record["status"] == "ok", record["error"]
    assert len(record["ablation"]) == len(built) - 2 == 2 + 2 * (len(names) + 1)
    assert built.count(({}, "float32")) == 3 and built[0] != ({}, "float32")
    assert built[-1] == (dict.fromkeys(names, False), "float64")
    assert ({"replay": False}, "float32") in built
    assert (dict.fromkeys(names, False) | {"replay": True}, "float64") in built
    rows = {(row["configuration"], row["technique"]): row for row in record["ablation"]}
    assert rows["without", "float32"]["bytes_per_epoch"] == 800 * 3, "three steps in an epoch of 300 rows"
    assert times == [] and rows["all", ""]["microseconds_per_step"] == 2.0, "the one in the middle"


def test_both_engines_tell_their_techniques() -> None:
    numpy, julia = ablation.techniques("numpy"), ablation.techniques("julia")
    assert {"replay", "preallocate", "fused_loss", "split_batch"} <= set(numpy) & set(julia)
    assert "concrete" in julia
    with pytest.raises(RunError, match="engine torch has no switches"):
        ablation.techniques("torch")


def test_memory_of_a_part_of_an_epoch_tells_that_of_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = papers.load_paper("mnist-cnn")
    runs = paper.runs.full.model_copy(update={"memory_rows": papers.Setting(value=30, source="ours")})
    paper = paper.model_copy(update={"runs": paper.runs.model_copy(update={"full": runs})})
    captures = iter([(2_000, 20), (7_000, 70), (1_000, 10), (1_600, 16)])  # build, two epochs, and one of 60 rows
    monkeypatch.setattr(memory, "read_capture", lambda _path: next(captures))
    record = only(swept(tmp_path, [Job(paper, ("numpy",), 0, "memory", 1, "full")]).records)
    assert [len(rows) for _, rows, _ in FakeWorker.seen] == [30, 30, 60] * 2
    # Of 300 rows each of the other 270 allocates 20 bytes, and an epoch 400 beside its rows.
    assert [epoch["bytes_allocated"] for epoch in record["epochs"]] == [9_000 + 270 * 20, 400 + 300 * 20]


@pytest.mark.parametrize(
    ("rows", "batch", "orders"),
    [
        (300, 1, [300]),
        (400, 1, [300]),
        (280, 64, [236, 300]),
        (150, 64, [108, 172]),
        (40, 64, [300]),
        (30, 7, [27, 48]),
    ],
)
def test_memory_is_told_by_an_epoch_with_more_rows_where_there_are_more(
    tmp_path: Path, rows: int, batch: int, orders: list[int]
) -> None:
    paper = papers.load_paper("mnist-cnn")
    with RunArrays(invented(), tmp_path) as work:
        task = sweep.task_of(Job(paper, ("numpy",), 0, "memory", 1, "full"), work)
        task = dataclasses.replace(task, rows_per_epoch=min(rows, 300), batch_size=batch, epochs=1)
        assert [len(np.load(path)) for path in memory._orders(task)] == orders


def test_a_round_of_a_race_can_be_part_of_an_epoch(tmp_path: Path) -> None:
    paper = papers.load_paper("mnist-cnn")
    steps = paper.runs.full.race_steps
    assert steps is not None
    record = only(swept(tmp_path, [Job(paper, ("numpy", "torch"), 0, "race", 2, "full", rounds=2)]).records)
    assert (record["config"]["steps"], record["config"]["rows"]) == (steps.value, steps.value)
    taken = [len(rows) for _, rows, _ in FakeWorker.seen]
    assert taken == 2 * [race.FIRST_STEPS] + 2 * 3 * [steps.value]


def test_rows_that_a_network_cannot_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", reviews)
    paper = papers.load_paper("imdb-cnn-a")
    shorter = papers.Setting(value=100, source="ours")
    paper = paper.model_copy(update={"data": paper.data | {"length": shorter}})
    record = only(swept(tmp_path, [Job(paper, ("numpy",), 0, "time", 2, "full")]).records)
    assert record["status"] == "failed"
    assert "data set imdb: the model reads (N, 130), found rows of shape (200, 100)" in record["error"]


def test_targets_are_what_the_loss_compares_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", reviews)
    loaded: list[tuple[np.ndarray, np.ndarray]] = []

    def spy(self: FakeWorker, x: Path, y: Path, order: Path) -> np.ndarray:
        loaded.append((np.load(x), np.load(y)))
        return np.ones(1)

    monkeypatch.setattr(FakeWorker, "train_epoch", spy)
    swept(tmp_path, [Job(papers.load_paper("imdb-cnn-a"), ("numpy",), 0, "time", 2, "full")])
    x, y = loaded[0]
    assert (x.shape, x.dtype) == ((200, 130), np.int64)
    assert (y.shape, y.dtype) == ((200, 1), np.float32)


# Running --------------------------------------------------------------------------------------------------------------


def test_every_job_gets_a_fresh_worker_and_a_record(paper: Paper, tmp_path: Path) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy", "torch"], seeds=2, measures=["time", "memory"])
    outcome = swept(tmp_path, jobs)
    assert [record["status"] for record in outcome.records] == ["ok"] * 6
    assert sorted(FakeWorker.started) == ["numpy"] * 4 + ["torch"] * 4  # memory takes two: allocations and peak
    assert len(list((tmp_path / "raw").glob("*.json"))) == 6
    assert not (tmp_path / ".work").exists() or not list((tmp_path / ".work").iterdir())


def test_an_engine_is_prepared_once_before_its_first_run(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_then: list[int] = []
    prepared = dataclasses.replace(ENGINES["numpy"], prepare=lambda: started_then.append(len(FakeWorker.started)))
    monkeypatch.setitem(ENGINES, "numpy", prepared)
    swept(tmp_path, sweep.plan(paper, engine_names=["numpy"], seeds=2, measures=["time"]))
    assert started_then == [0]
    assert FakeWorker.started == ["numpy"] * 2


def test_engines_of_runs_side_by_side_are_prepared_before_the_first_of_them(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_then: list[int] = []

    def prepare() -> None:
        time.sleep(0.2)  # in which another run would start its worker
        started_then.append(len(FakeWorker.started))

    monkeypatch.setitem(ENGINES, "numpy", dataclasses.replace(ENGINES["numpy"], prepare=prepare))
    monkeypatch.setattr(sweep, "slots", lambda *_: [sweep.Slot(), sweep.Slot()])
    jobs = [Job(paper, (name,), seed, "memory", 1, "full") for seed in (0, 1) for name in ("torch", "numpy")]
    assert swept(tmp_path, jobs).reused == 0 and FakeWorker.started
    assert swept(tmp_path, jobs).reused == len(jobs)
    assert started_then == [0], "once, and not where every run is finished"


def test_a_run_whose_key_is_known_once_its_engine_is_prepared_is_not_repeated(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    skeleton = sweep.skeleton

    def keyed(*given: Any) -> Any:
        record = skeleton(*given)
        return record if prepared else record | {"key": "0" * len(record["key"])}

    monkeypatch.setattr(sweep, "skeleton", keyed)
    engine = dataclasses.replace(ENGINES["numpy"], prepare=lambda: prepared.append("numpy"))
    monkeypatch.setitem(ENGINES, "numpy", engine)
    jobs = sweep.plan(paper, engine_names=["numpy"], seeds=1, measures=["time"])
    assert swept(tmp_path, jobs).reused == 0
    started = len(FakeWorker.started)
    prepared.clear()
    assert swept(tmp_path, jobs).reused == 1 and prepared and len(FakeWorker.started) == started


def test_all_engines_start_from_the_same_weights_and_see_the_same_batches(paper: Paper, tmp_path: Path) -> None:
    swept(tmp_path, sweep.plan(paper, engine_names=["numpy", "torch"], seeds=2, measures=["time"]))
    epochs = paper.training.epochs.value
    for seed in range(2):
        ours = [item for item in FakeWorker.seen if item[0] == "numpy"][seed * epochs : (seed + 1) * epochs]
        theirs = [item for item in FakeWorker.seen if item[0] == "torch"][seed * epochs : (seed + 1) * epochs]
        for (_, order, params), (_, other_order, other_params) in zip(ours, theirs, strict=True):
            assert np.array_equal(order, other_order)
            assert sorted(order) == list(range(300))
            assert all(np.array_equal(params[name], other_params[name]) for name in params)
        assert not np.array_equal(ours[0][1], ours[1][1])  # every epoch has its own order
    orders = {seed: FakeWorker.seen[seed * 2 * epochs][1].tobytes() for seed in range(2)}
    assert orders[0] != orders[1]


def test_a_record_says_where_its_numbers_come_from(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance.OthersShare, "value", lambda _: 0.07)
    record = only(swept(tmp_path, sweep.plan(paper, engine_names=["numpy"], seeds=1, measures=["time"])).records)
    origin = record["provenance"]
    for name in ("commit", "dirty", "cpu_model", "machine", "cores", "threads", "python", "numpy", "created"):
        assert origin[name] not in (None, ""), name
    for name in ("engine_digest", "spec_digest", "weights_digest"):
        assert len(origin[name]) >= 16, name
    assert origin["others_share"] == 0.07
    assert record["blas"] == {"numpy": "numpy blas"}
    assert record["data"] == {
        "name": "mnist",
        "source": "sample",
        "digest": "d" * 64,
        "train_rows": 300,
        "test_rows": 50,
    }
    assert [epoch["epoch"] for epoch in record["epochs"]] == [1, 2, 3, 4, 5]
    assert len(record["step_losses"]) == 3
    assert record["config"]["training"]["training.learning_rate"] == 0.015


def test_a_finished_run_is_not_repeated(paper: Paper, tmp_path: Path) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy"], seeds=2, measures=["time"])
    first = swept(tmp_path, jobs[:1])
    assert (first.reused, len(FakeWorker.started)) == (0, 1)
    second = swept(tmp_path, jobs)
    assert (second.reused, len(FakeWorker.started)) == (1, 2)
    assert second.records[0] == Results(tmp_path).load(first.records[0]["key"])


def test_again_repeats_it(paper: Paper, tmp_path: Path) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy"], seeds=1, measures=["time"])
    swept(tmp_path, jobs)
    assert swept(tmp_path, jobs, again=True).reused == 0
    assert len(FakeWorker.started) == 2


def test_a_run_that_fails_when_it_is_repeated_does_not_replace_the_finished_one(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy"], seeds=1, measures=["time"])
    before = only(swept(tmp_path, jobs).records)

    def fail(engine: str, epoch: int) -> None:
        raise WorkerError("it died")

    monkeypatch.setattr(FakeWorker, "fail", staticmethod(fail))
    for count in (1, 2):
        assert only(swept(tmp_path, jobs, again=True).records)["status"] == "failed"
        assert Results(tmp_path).finished(before["key"]) == before
        kept = sorted((tmp_path / "replaced").iterdir())
        assert len(kept) == count and all("it died" in path.read_text() for path in kept)


def test_the_key_depends_on_everything_that_decides_the_result(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = key(paper, tmp_path)
    assert key(paper, tmp_path) == usual
    slower = paper.training.learning_rate.model_copy(update={"value": 0.01})
    found = {
        "seed": key(paper, tmp_path, seed=1),
        "engine": key(paper, tmp_path, engines=("torch",)),
        "measure": key(paper, tmp_path, measure="memory"),
        "threads": key(paper, tmp_path, threads=1),
        "profile": key(paper, tmp_path, profile="quick"),
        "paper": key(papers.load_paper("mnist-rnn-d"), tmp_path),
        "training": key(with_training(paper, learning_rate=slower), tmp_path),
    }
    replaced = {
        "machine": (provenance, "machine", lambda: dataclasses.replace(machine(), stepping="another")),
        "source": (sources, "SOURCES", SOURCES.with_changes({"bridge/adapters/numpy.py": b"another"})),
        "libraries": (Registered, "libraries", lambda _: {"numpy": "another build"}),
        "BLAS": (sweep.linear_algebra, "of_numpy", lambda: "another"),
        "versions": (Registered, "availability", lambda _: Availability(True, "", {"numpy": "9.9"})),
        "dataset": (data, "load", lambda *_, **__: dataclasses.replace(invented(), digest="e" * 64)),
        "kernels": (sweep, "environment", lambda _: {"OPENBLAS_CORETYPE": "Another"}),
        "weights": (sweep.weights, "digest", lambda _: "another"),
        "settings": (provenance, "settings", lambda: {"settings": {"TWINGRAD_VECTOR_BYTES": "32"}}),
    }
    for name, (owner, attribute, replacement) in replaced.items():
        with monkeypatch.context() as context:
            context.setattr(owner, attribute, replacement)
            context.setattr(sweep, "_WEIGHTS", {})
            found[name] = key(paper, tmp_path)
    assert usual not in found.values()
    assert len(set(found.values())) == len(found)


def skeleton(job: Job, folder: Path, dataset: Dataset | None = None) -> Record:
    """The record of a job as it is before the run."""
    with RunArrays(dataset or invented(), folder) as work:
        return sweep.skeleton(job, sweep.task_of(job, work), work.dataset)


def test_a_job_is_equal_on_all_machines_and_its_key_is_not(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashes_of_all() -> dict[str, tuple[str, str]]:
        found = {}
        for job in sweep.plan(paper, engine_names=["numpy", "torch"], seeds=1):
            record = skeleton(job, tmp_path)
            found[f"{job.measure} {job.engines} {job.threads_asked}"] = record["job"], record["key"]
        return found

    here = hashes_of_all()
    other_cpu = dataclasses.replace(machine(), model="another")
    changes = (
        (provenance, "cores", lambda: 1),
        (provenance, "machine", lambda: other_cpu),
        (sources, "SOURCES", SOURCES.with_changes({"bridge/worker.py": b"changed = True"})),
        (Registered, "availability", lambda _: Availability(True, "", {"numpy": "9.9"})),
        (sweep.linear_algebra, "of_numpy", lambda: "another"),
        (sweep.weights, "digest", lambda _: "another"),
    )
    for owner, name, value in changes:
        with monkeypatch.context() as other:
            other.setattr(owner, name, value)
            other.setattr(sweep, "_WEIGHTS", {})
            there = hashes_of_all()
        assert there.keys() <= here.keys() and len(there) > 5
        for job, (asked, key) in there.items():
            assert asked == here[job][0], (name, job)
            as_here = name == "cores" and job.endswith(" 1")  # one thread is one thread on a single core, too
            assert (key == here[job][1]) is as_here, (name, job)


def test_each_thing_asked_is_another_job(paper: Paper, tmp_path: Path) -> None:
    usual = Job(paper, ("numpy",), 0, "time", 2, "full")
    slower = paper.training.learning_rate.model_copy(update={"value": 0.01})
    asked = {
        "usual": usual,
        "seed": dataclasses.replace(usual, seed=1),
        "engine": dataclasses.replace(usual, engines=("torch",)),
        "measure": dataclasses.replace(usual, measure="memory"),
        "threads": dataclasses.replace(usual, threads=1),
        "profile": dataclasses.replace(usual, profile="quick"),
        "study": dataclasses.replace(usual, paper=papers.load_paper("mnist-rnn-d")),
        "settings": dataclasses.replace(usual, paper=with_training(paper, learning_rate=slower)),
        "rounds": dataclasses.replace(usual, measure="race", rounds=3),
        "more rounds": dataclasses.replace(usual, measure="race", rounds=4),
    }
    found = {name: skeleton(job, tmp_path)["job"] for name, job in asked.items()}
    found["data"] = skeleton(usual, tmp_path, dataclasses.replace(invented(), digest="e" * 64))["job"]
    assert len(set(found.values())) == len(found)
    assert skeleton(dataclasses.replace(usual, threads=1, threads_asked=2), tmp_path)["job"] == found["usual"]


def test_both_hashes_follow_from_the_record_itself(paper: Paper, tmp_path: Path) -> None:
    record = skeleton(Job(paper, ("numpy",), 0, "time", 2, "full"), tmp_path)
    kept = json.loads(json.dumps(record))
    assert hashes(kept["asked"], kept["decided_by"]) == {
        name: kept[name] for name in ("key", "job", "asked", "decided_by")
    }


def test_a_killed_worker_is_named_with_its_study_engine_and_seed(paper: Paper, tmp_path: Path) -> None:
    """A real worker, ended by a signal while it trains."""

    class Doomed(Worker):
        def train_epoch(self, *rows: Any) -> Any:
            os.kill(self.pid, signal.SIGKILL)
            return super().train_epoch(*rows)

    with pytest.MonkeyPatch.context() as real:
        real.setattr(slots, "Worker", Doomed)
        job = Job(paper, ("numpy",), 3, "time", 1, "full")
        record = only(swept(tmp_path, [job]).records)
        race = only(swept(tmp_path, [dataclasses.replace(job, measure="race", rounds=1)]).records)
    assert record["error"].startswith(
        "study mnist-rnn-e, engine numpy, measure time, seed 3: the worker of engine numpy (process "
    )
    assert "was ended by SIGKILL" in record["error"]
    assert race["error"].startswith("study mnist-rnn-e, measure race, seed 3: numpy: the worker of engine numpy")


def test_every_entrant_of_a_race_has_its_own_linear_algebra(paper: Paper, tmp_path: Path) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy", "torch", "jax"], measures=["race"], threads=2)
    record = only(swept(tmp_path, jobs).records)
    expected = {name: f"{name} blas" for name in ("numpy", "torch", "jax")}
    assert record["blas"] == expected
    assert {row["engine"]: row["blas"] for row in summary.rows([record])} == expected


def test_a_race_with_a_step_below_its_limit_is_kept_and_has_failed(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([Rates(1e6, {1: 1e18}, {"numpy": 0.0}), Rates(1e9, {1: 1e18}, {"numpy": 0.0})])
    asked: list[Any] = []

    def measure(work: Any, dtype: str, threads: int, sizes: Any) -> Rates:  # before the race and after it
        asked.append(sizes)
        return next(measured)

    monkeypatch.setattr(roofline, "measure", measure)
    jobs = sweep.plan(paper, engine_names=["torch", "numpy"], measures=["race"], threads=2)
    record = only(swept(tmp_path, jobs).records)
    assert asked == 2 * [roofline.SIZES], "of memory each op has its own size"
    assert record["status"] == "failed"
    step = record["race"][-1]["microseconds_per_step"]
    limit = record["roofline"]["limit_microseconds"]
    assert limit == pytest.approx(record["roofline"]["products_flops"] / 1e9 * 1e6)
    assert (
        f"TwinGrad numpy: a step of {round(step, 2)} µs is below a quarter of its limit of {round(limit, 2)} µs"
        in record["error"]
    )
    rows = [row for row in Results(tmp_path).records()[0]["race"] if row["engine"] == "numpy"]
    assert rows, "they are kept"
    tidy = tidy_rows([record])
    assert not tidy["race"], "none of its numbers counts"
    assert {row["engine"]: (row["status"], row["error"]) for row in tidy["runs"]} == {
        name: ("failed", record["error"]) for name in ("numpy", "torch")
    }
    older = record | {"entrants": {name: one | {"error": None} for name, one in record["entrants"].items()}}
    assert tidy_rows([older])["runs"] == tidy["runs"] and not tidy_rows([older])["race"]


def test_a_measure_that_a_study_does_not_define_is_refused(paper: Paper) -> None:
    for name, lacks in (
        ("totals", "no totals_engines"),
        ("split", "no split_engines"),
        ("sizes", "no sizes_threads"),
        ("growth", "no growth_engines"),
    ):
        for threads in (None, 1):
            with pytest.raises(PaperFileError, match=f"does not define the measure {name}: .*{lacks}"):
                sweep.plan(paper, measures=[name], threads=threads)
    with pytest.raises(PaperFileError, match="does not define the measure sizes: its file has no networks for it"):
        runs = paper.runs.full.model_copy(update={"sizes_threads": paper.runs.full.race_threads})
        profiles = paper.runs.model_copy(update={"full": runs})
        sweep.plan(paper.model_copy(update={"runs": profiles}), measures=["sizes"])


def test_titles_and_notes_do_not_change_the_key(paper: Paper, tmp_path: Path) -> None:
    noted = paper.training.threads.model_copy(update={"note": "better said"})
    reworded = with_training(paper, threads=noted).model_copy(update={"title": "Another title", "tables": []})
    assert key(reworded, tmp_path) == key(paper, tmp_path)


def test_a_loss_that_is_not_a_number_is_a_failed_run_and_the_others_go_on(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: str, epoch: int) -> None:
        if engine == "torch" and epoch == 2:
            raise NonFiniteError("the loss is NaN at step 7 (layer rnn)")

    monkeypatch.setattr(FakeWorker, "fail", staticmethod(fail))
    jobs = sweep.plan(paper, engine_names=["torch", "numpy"], seeds=1, measures=["time"])
    failed, fine = swept(tmp_path, jobs).records
    assert (failed["status"], failed["error"]) == ("failed", "the loss is NaN at step 7 (layer rnn)")
    assert fine["status"] == "ok"
    assert Results(tmp_path).load(failed["key"]) == failed

    monkeypatch.setattr(FakeWorker, "fail", staticmethod(lambda engine, epoch: None))
    outcome = swept(tmp_path, jobs)  # a failure is tried again
    assert [record["status"] for record in outcome.records] == ["ok", "ok"]
    assert outcome.reused == 1


def test_an_engine_that_is_not_installed_is_left_out_with_the_reason(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(engine: str, threads: int, *_: Any) -> FakeWorker:
        if engine.startswith("torch"):
            raise EngineUnavailableError(f"engine {engine}: torch is not installed")
        return FakeWorker(engine, threads)

    monkeypatch.setattr(slots, "Worker", start)
    outcome = swept(tmp_path, sweep.plan(paper, seeds=1, measures=["time"]))
    found = {record["config"]["engine"]: (record["status"], record["error_kind"]) for record in outcome.records}
    assert found["numpy"] == ("ok", None)
    assert found["torch"] == ("failed", "unavailable")


def test_an_interrupted_sweep_keeps_what_is_finished_and_resumes(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_engine: str, epoch: int) -> None:
        if len(FakeWorker.started) == 3 and epoch == 2:
            raise KeyboardInterrupt

    jobs = sweep.plan(paper, engine_names=["numpy"], seeds=4, measures=["time"])
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(interrupt))
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, jobs)
    assert len(list((tmp_path / "raw").glob("*.json"))) == 2
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(lambda engine, epoch: None))
    assert swept(tmp_path, jobs).reused == 2
    assert len(list((tmp_path / "raw").glob("*.json"))) == 4


@pytest.mark.parametrize("measure", [name for name, measure in MEASURES.items() if not measure.timed])
def test_runs_without_times_go_on_side_by_side(measure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(lambda _engine, _epoch: together.wait(60)))
    paper = papers.load_paper("mnist-rnn-d")
    jobs = sweep.plan(paper, engine_names=["torch", "jax"], seeds=1, measures=[measure])
    assert [job.threads for job in jobs] == [1, 1]
    records = swept(tmp_path, jobs).records
    assert [record["config"]["engine"] for record in records] == ["torch", "jax"]
    assert [record["status"] for record in records] == ["ok", "ok"]
    assert all("seconds" not in epoch for record in records for epoch in record["epochs"])


def test_an_interrupt_in_one_lane_keeps_what_is_finished_and_no_half_of_the_other(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def interrupt(engine: str, epoch: int) -> None:
        if engine == "torch":
            assert begun.wait(60)
            raise KeyboardInterrupt
        if engine == "jax":
            begun.set()
            assert stopped.wait(60)
            raise WorkerError("the worker of engine jax was ended by SIGKILL")

    monkeypatch.setattr(FakeWorker, "kill", lambda self: stopped.set(), raising=False)
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(interrupt))
    jobs = sweep.plan(paper, engine_names=["numpy", "torch", "jax"], seeds=1, measures=["memory"])
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, jobs)
    kept = only(Results(tmp_path).records())
    assert (kept["config"]["engine"], kept["status"]) == ("numpy", "ok")
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(lambda engine, epoch: None))
    assert swept(tmp_path, jobs).reused == 1
    assert len(Results(tmp_path).records()) == 3


def test_a_memory_run_keeps_the_peak_when_the_allocations_cannot_be_had(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise EngineUnavailableError("allocations are measured with memray, which is not installed")

    monkeypatch.setattr(FakeWorker, "start_memray", missing)
    record = only(swept(tmp_path, sweep.plan(paper, engine_names=["numpy"], seeds=1, measures=["memory"])).records)
    assert (record["status"], record["peak_rss_bytes"]) == ("failed", 1_000_000)
    assert "memray" in record["error"]


def test_an_engine_that_falls_out_of_a_race_leaves_the_others_in_it(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: str, epoch: int) -> None:
        if engine == "torch" and epoch == 2:
            raise WorkerError("the worker of engine torch was ended by SIGKILL")

    monkeypatch.setattr(FakeWorker, "fail", staticmethod(fail))
    jobs = sweep.plan(paper, engine_names=["numpy", "torch", "jax"], measures=["race"], threads=2)
    record = only(swept(tmp_path, jobs).records)
    assert record["status"] == "failed" and "torch: the worker" in record["error"]
    assert {row["engine"] for row in record["race"]} == {"numpy", "jax"}
    assert record["entrants"]["numpy"]["error"] is None


def test_an_optional_engine_that_lacks_a_layer_is_left_out_and_fails_no_run(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: str, _epoch: int) -> None:
        if engine == "torch":
            raise SpecError("the model", ["layers[1]: the engine torch has no rnn"])

    monkeypatch.setattr(FakeWorker, "fail", staticmethod(fail))
    for spared in (True, False):
        rows = [row.model_copy(update={"optional": spared and row.name == "torch"}) for row in paper.engines]
        chosen = paper.model_copy(update={"engines": rows})
        jobs = sweep.plan(chosen, engine_names=["torch", "numpy"], seeds=1, measures=["time", "race"], threads=2)
        alone, fine, raced = swept(tmp_path / str(spared), jobs).records
        assert (alone["status"], alone["error_kind"]) == ("failed", "unavailable" if spared else "failed")
        assert fine["status"] == "ok"
        assert (raced["status"], raced["error_kind"]) == (("ok", "unavailable") if spared else ("failed", "failed"))
        assert "has no rnn" in alone["error"] and "has no rnn" in raced["entrants"]["torch"]["error"]
        assert {row["engine"] for row in raced["race"]} == {"numpy"}


def test_the_summary_has_one_line_for_each_engine(paper: Paper, tmp_path: Path) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy", "torch"], seeds=3, measures=["time", "memory"])
    ((headers, lines, words),) = summary.tables(swept(tmp_path, jobs).records)
    assert headers == [
        "PAPER",
        "ENGINE",
        "SEEDS",
        *("ACCURACY OF THE SAMPLE", "FIRST EPOCH", "LATER EPOCHS", "ALLOCATED", "PEAK"),
    ]
    assert words == 2 and [line[:3] for line in lines] == [["mnist-rnn-e", "numpy", "3"], ["mnist-rnn-e", "torch", "3"]]
    assert (lines[0][3], lines[0][6:]) == ("0.9000", ["4.00 MB", "1.00 MB"])


def test_plain_lines_tell_of_every_run(paper: Paper, tmp_path: Path) -> None:
    jobs = sweep.plan(paper, engine_names=["numpy"], seeds=1, measures=["time", "memory", "race", "scaling"], threads=1)
    text = io.StringIO()
    results = Results(tmp_path)
    progress = Progress(Console(file=text, width=200), len(jobs))
    with results.locked(), progress.show():
        Sweep(results).run(jobs, progress)
    lines = text.getvalue().splitlines()
    assert lines[0] == "invented rows"
    assert [line[:5] for line in lines[1:]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "accuracy of the sample 0.9000" in lines[1] and "allocated 4.00 MB  peak 1.00 MB" in lines[2]


def test_progress_on_a_terminal_shows_bars_and_the_same_lines(paper: Paper, tmp_path: Path) -> None:
    text = io.StringIO()
    jobs = sweep.plan(paper, engine_names=["numpy"], seeds=2, measures=["time"])
    results = Results(tmp_path)
    progress = Progress(Console(file=text, width=200, force_terminal=True), len(jobs))
    with results.locked(), progress.show():
        Sweep(results).run(jobs, progress)
    assert "[1/2] mnist-rnn-e" in text.getvalue() and "[2/2] mnist-rnn-e" in text.getvalue()
    assert "━" in text.getvalue()


def test_what_all_keys_have_in_common_is_computed_once(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of all jobs are made before anything runs: weights once for each start, a file's imports once."""
    drawn, parsed = [], []
    initialise, of_python = sweep.weights.initialise, sources.Sources._of_python
    monkeypatch.setattr(sweep, "_WEIGHTS", {})
    fresh = sources.Sources(sources.ROOT)
    monkeypatch.setattr(sources, "SOURCES", fresh)
    monkeypatch.setattr("bridge.weights.initialise", lambda *what: (drawn.append(what[1:]), initialise(*what))[1])
    monkeypatch.setattr(
        sources.Sources, "_of_python", lambda self, name, text: (parsed.append(name), of_python(self, name, text))[1]
    )
    jobs = [job for job in sweep.plan(paper) if job.measure in ("time", "race")]
    dataset = invented()
    with RunArrays(dataset) as work:
        records = [sweep.skeleton(job, sweep.task_of(job, work), dataset) for job in jobs]
    starts = {(record["config"]["seed"], record["provenance"]["weights_digest"]) for record in records}
    assert len(drawn) == len(set(drawn)) == len(starts) == len({job.seed for job in jobs}) > 1
    assert len(parsed) == len(set(parsed)) > 50
    assert len({record["key"] for record in records}) == len(jobs) > 3 * len(starts)


# The way from a paper's file to a session ----------------------------------------------------------------------------


def test_from_the_command_to_a_session_it_is_nine_hops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six functions here; then the worker's side of the pipe, its process, and the engine's session."""
    way: list[str] = []

    real = FakeWorker.build

    def build(self: FakeWorker, *given: Any, **options: Any) -> None:
        real(self, *given, **options)
        ours = Path(sweep.__file__).parent
        way[:] = [frame.function for frame in inspect.stack() if Path(frame.filename).is_relative_to(ours)]

    monkeypatch.setattr(FakeWorker, "build", build)
    options = ["--engines", "numpy", "--seeds", "1", "--measure", "time", "--results", str(tmp_path)]
    cli.cli.main(["run", "mnist-rnn-e", *options], standalone_mode=False)
    assert way[::-1] == ["command", "run", "run", "_job", "run", "build"]


def test_a_run_during_which_a_source_was_edited_is_not_recorded(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(paper, ("numpy",), 0, "time", 2, "full")
    monkeypatch.setattr(Sources, "edited", lambda _, starts: "bridge/worker.py" if sweep.WORKER in starts else None)
    with pytest.raises(ResultsError, match=r"bridge/worker\.py was edited while TwinGrad ran"):
        swept(tmp_path, [job])
    assert not list((tmp_path / "raw").iterdir())


def test_a_record_for_which_there_was_no_room_is_saved_once_the_arrays_are_removed(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Results.save

    def full(results: Results, record: Record) -> None:
        if list(results.work.iterdir()):
            raise ResultsError("no space left")
        save(results, record)

    monkeypatch.setattr(Results, "save", full)
    with pytest.raises(ResultsError, match="no space left"):
        swept(tmp_path, [Job(paper, ("numpy",), 0, "time", 2, "full")])
    monkeypatch.undo()
    assert only(Results(tmp_path).records())["status"] == "ok"
