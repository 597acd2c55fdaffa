"""Which runs there are, that a finished one is not repeated, that a failed one is recorded and the rest goes on."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from bridge.engine import ENGINES, Availability, Evaluation, Registered
from bridge.errors import EngineUnavailableError, WorkerError
from experiments import config, data, provenance, run
from experiments.config import ConfigError, Paper
from experiments.data.dataset import Dataset
from experiments.progress import Progress
from experiments.results import Record, Results
from experiments.run import Job, Outcome, Sweep
from py_engine.errors import NonFiniteError


class FakeWorker:
    """A worker without a process: counts what is asked of it, and fails where a test wants it to."""

    started: ClassVar[list[str]] = []
    seen: ClassVar[list[tuple[str, np.ndarray, dict[str, np.ndarray]]]] = []
    fail: ClassVar[Callable[[str, int], None]] = staticmethod(lambda engine, epoch: None)

    def __init__(self, engine: str, threads: int) -> None:
        self.engine, self.threads, self.pid = ENGINES[engine], threads, 1
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

    def libraries(self) -> list[dict[str, str]]:
        return [{"user_api": "blas", "internal_api": "fakeblas", "version": "1", "architecture": "Fast"}]

    def preload(self, *_: Path) -> None: ...
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
    monkeypatch.setattr(run, "Worker", FakeWorker)
    monkeypatch.setattr(data, "load", lambda *_, **__: invented())
    monkeypatch.setattr(run.memory, "read_capture", lambda _path: (4_000_000, 12))
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    monkeypatch.setattr(Registered, "availability", lambda self: Availability(True, "", {"numpy": "2.0"}))


@pytest.fixture
def paper() -> Paper:
    return config.load_paper("mnist-rnn-e")


def sweep(folder: Path, jobs: list[Job], **options: Any) -> Outcome:
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
    return only(sweep(tmp_path / "keys", [job]).records)["key"]


def with_training(paper: Paper, **settings: Any) -> Paper:
    return paper.model_copy(update={"training": paper.training.model_copy(update=settings)})


# What to run ----------------------------------------------------------------------------------------------------------


def test_paper_d_runs_every_engine_on_ten_seeds_and_the_costly_one_on_fewer() -> None:
    paper = config.load_paper("mnist-rnn-d")
    counts: dict[tuple[str, str], int] = {}
    for job in run.plan(paper):
        counts[job.engines[0], job.measure] = counts.get((job.engines[0], job.measure), 0) + 1
    few = paper.runs.full.engine_seeds["torch-compile"].value
    assert counts == {
        **{(engine, "time"): 10 for engine in ("numpy", "julia", "torch", "manual", "manual-julia")},
        ("torch-compile", "time"): few,
        **{(engine, "memory"): 1 for engine in paper.engine_names()},
    }


def test_engines_take_turns_within_a_seed(paper: Paper) -> None:
    jobs = run.plan(paper, engine_names=["numpy", "torch"], seeds=2, measures=["time"])
    assert [(job.seed, job.engines[0]) for job in jobs] == [(0, "numpy"), (0, "torch"), (1, "numpy"), (1, "torch")]


def test_a_race_is_one_job_for_each_number_of_threads(paper: Paper) -> None:
    jobs = run.plan(paper, measures=["race"])
    assert [(job.engines, job.threads, job.rounds) for job in jobs] == [
        (tuple(paper.engine_names()), 2, 5),
        (tuple(paper.engine_names()), 1, 5),
    ]
    assert [job.threads for job in run.plan(paper, measures=["race"], threads=1)] == [1]


def test_on_one_core_everything_runs_with_one_thread(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "cores", lambda: 1)
    jobs = run.plan(paper)
    assert {job.threads for job in jobs} == {1}
    assert sum(job.measure == "race" for job in jobs) == 1


def test_unknown_measures_and_engines_are_refused(paper: Paper) -> None:
    with pytest.raises(ConfigError, match="no measure 'speed'; measures: time, own, variants, memory, race, scaling, abl"):
        run.plan(paper, measures=["time", "speed"])
    with pytest.raises(EngineUnavailableError, match="did you mean 'torch'"):
        run.plan(paper, engine_names=["troch"])


def test_an_engine_asked_for_by_name_must_be_available(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registered, "availability", lambda self: Availability(False, "torch is not installed"))
    with pytest.raises(EngineUnavailableError, match="engine torch: torch is not installed"):
        run.plan(paper, engine_names=["torch"])
    assert run.plan(paper)  # those of the paper file are left out one by one, with their reason


# Running --------------------------------------------------------------------------------------------------------------


def test_every_job_gets_a_fresh_worker_and_a_record(paper: Paper, tmp_path: Path) -> None:
    jobs = run.plan(paper, engine_names=["numpy", "torch"], seeds=2, measures=["time", "memory"])
    outcome = sweep(tmp_path, jobs)
    assert [record["status"] for record in outcome.records] == ["ok"] * 6
    assert sorted(FakeWorker.started) == ["numpy"] * 4 + ["torch"] * 4  # memory takes two: allocations and peak
    assert len(list((tmp_path / "raw").glob("*.json"))) == 6
    assert not (tmp_path / ".work").exists() or not list((tmp_path / ".work").iterdir())


def test_all_engines_start_from_the_same_weights_and_see_the_same_batches(paper: Paper, tmp_path: Path) -> None:
    sweep(tmp_path, run.plan(paper, engine_names=["numpy", "torch"], seeds=2, measures=["time"]))
    epochs = paper.training.epochs.value
    for seed in range(2):
        ours = [item for item in FakeWorker.seen if item[0] == "numpy"][seed * epochs : (seed + 1) * epochs]
        theirs = [item for item in FakeWorker.seen if item[0] == "torch"][seed * epochs : (seed + 1) * epochs]
        for (_, order, params), (_, other_order, other_params) in zip(ours, theirs, strict=True):
            assert np.array_equal(order, other_order)
            assert sorted(order) == list(range(300))
            assert all(np.array_equal(params[name], other_params[name]) for name in params)
        assert not np.array_equal(ours[0][1], ours[1][1])  # every epoch has an order of its own
    orders = {seed: FakeWorker.seen[seed * 2 * epochs][1].tobytes() for seed in range(2)}
    assert orders[0] != orders[1]


def test_a_record_says_where_its_numbers_come_from(paper: Paper, tmp_path: Path) -> None:
    record = only(sweep(tmp_path, run.plan(paper, engine_names=["numpy"], seeds=1, measures=["time"])).records)
    origin = record["provenance"]
    for name in ("commit", "dirty", "cpu_model", "cores", "threads", "python", "numpy", "created"):
        assert origin[name] not in (None, ""), name
    for name in ("engine_digest", "spec_digest", "weights_digest"):
        assert len(origin[name]) >= 16, name
    assert origin["blas"] == "fakeblas 1 Fast"
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
    jobs = run.plan(paper, engine_names=["numpy"], seeds=2, measures=["time"])
    first = sweep(tmp_path, jobs[:1])
    assert (first.reused, len(FakeWorker.started)) == (0, 1)
    second = sweep(tmp_path, jobs)
    assert (second.reused, len(FakeWorker.started)) == (1, 2)
    assert second.records[0] == Results(tmp_path).load(first.records[0]["key"])


def test_again_repeats_it(paper: Paper, tmp_path: Path) -> None:
    jobs = run.plan(paper, engine_names=["numpy"], seeds=1, measures=["time"])
    sweep(tmp_path, jobs)
    assert sweep(tmp_path, jobs, again=True).reused == 0
    assert len(FakeWorker.started) == 2


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
        "paper": key(config.load_paper("mnist-rnn-d"), tmp_path),
        "training": key(with_training(paper, learning_rate=slower), tmp_path),
    }
    replaced = {
        "cpu_model": (provenance, "cpu_model", lambda: "another CPU"),
        "engine source": (provenance, "engine_digest", lambda _: "another"),
        "versions": (Registered, "availability", lambda _: Availability(True, "", {"numpy": "9.9"})),
        "dataset": (data, "load", lambda *_, **__: dataclasses.replace(invented(), digest="e" * 64)),
        "kernels": (run, "environment", lambda _: {"OPENBLAS_CORETYPE": "Another"}),
        "weights": (run.weights, "digest", lambda _: "another"),
    }
    for name, (owner, attribute, replacement) in replaced.items():
        with monkeypatch.context() as context:
            context.setattr(owner, attribute, replacement)
            found[name] = key(paper, tmp_path)
    assert usual not in found.values()
    assert len(set(found.values())) == len(found)


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
    jobs = run.plan(paper, engine_names=["torch", "numpy"], seeds=1, measures=["time"])
    failed, fine = sweep(tmp_path, jobs).records
    assert (failed["status"], failed["error"]) == ("failed", "the loss is NaN at step 7 (layer rnn)")
    assert fine["status"] == "ok"
    assert Results(tmp_path).load(failed["key"]) == failed

    monkeypatch.setattr(FakeWorker, "fail", staticmethod(lambda engine, epoch: None))
    outcome = sweep(tmp_path, jobs)  # a failure is tried again
    assert [record["status"] for record in outcome.records] == ["ok", "ok"]
    assert outcome.reused == 1


def test_an_engine_that_is_not_installed_is_left_out_with_the_reason(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(engine: str, threads: int) -> FakeWorker:
        if engine.startswith("torch"):
            raise EngineUnavailableError(f"engine {engine}: torch is not installed")
        return FakeWorker(engine, threads)

    monkeypatch.setattr(run, "Worker", start)
    outcome = sweep(tmp_path, run.plan(paper, seeds=1, measures=["time"]))
    found = {record["config"]["engine"]: (record["status"], record["error_kind"]) for record in outcome.records}
    assert found["numpy"] == ("ok", None)
    assert found["torch"] == ("failed", "unavailable")


def test_an_interrupted_sweep_keeps_what_is_finished_and_resumes(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_engine: str, epoch: int) -> None:
        if len(FakeWorker.started) == 3 and epoch == 2:
            raise KeyboardInterrupt

    jobs = run.plan(paper, engine_names=["numpy"], seeds=4, measures=["time"])
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(interrupt))
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, jobs)
    assert len(list((tmp_path / "raw").glob("*.json"))) == 2
    monkeypatch.setattr(FakeWorker, "fail", staticmethod(lambda engine, epoch: None))
    assert sweep(tmp_path, jobs).reused == 2
    assert len(list((tmp_path / "raw").glob("*.json"))) == 4


def test_a_memory_run_keeps_the_peak_when_the_allocations_cannot_be_had(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise EngineUnavailableError("allocations are measured with memray, which is not installed")

    monkeypatch.setattr(FakeWorker, "start_memray", missing)
    record = only(sweep(tmp_path, run.plan(paper, engine_names=["numpy"], seeds=1, measures=["memory"])).records)
    assert (record["status"], record["peak_rss_bytes"]) == ("failed", 1_000_000)
    assert "memray" in record["error"]


def test_an_engine_that_falls_out_of_a_race_leaves_the_others_in_it(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: str, epoch: int) -> None:
        if engine == "torch" and epoch == 2:
            raise WorkerError("the worker of engine torch was ended by SIGKILL")

    monkeypatch.setattr(FakeWorker, "fail", staticmethod(fail))
    jobs = run.plan(paper, engine_names=["numpy", "torch", "manual"], measures=["race"], threads=2)
    record = only(sweep(tmp_path, jobs).records)
    assert record["status"] == "failed" and "torch: the worker" in record["error"]
    assert {row["engine"] for row in record["race"]} == {"numpy", "manual"}
    assert record["entrants"]["numpy"]["error"] is None


def test_the_summary_has_one_line_for_each_engine(paper: Paper, tmp_path: Path) -> None:
    jobs = run.plan(paper, engine_names=["numpy", "torch"], seeds=3, measures=["time", "memory"])
    lines = run.summary(sweep(tmp_path, jobs).records)
    assert [line[:3] for line in lines] == [["mnist-rnn-e", "numpy", "3"], ["mnist-rnn-e", "torch", "3"]]
    assert lines[0][5:] == ["0.9000", "4 MB", "1 MB"]


def test_plain_lines_tell_of_every_run(paper: Paper, tmp_path: Path) -> None:
    jobs = run.plan(paper, engine_names=["numpy"], seeds=1, measures=["time", "memory", "race", "scaling"], threads=1)
    text = io.StringIO()
    results = Results(tmp_path)
    progress = Progress(Console(file=text, width=200), len(jobs))
    with results.locked(), progress.show():
        Sweep(results).run(jobs, progress)
    lines = text.getvalue().splitlines()
    assert lines[0] == "invented rows"
    assert [line[:5] for line in lines[1:]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "test accuracy 0.9000" in lines[1] and "4 MB allocated per epoch  peak 1 MB" in lines[2]


def test_progress_on_a_terminal_shows_bars_and_the_same_lines(paper: Paper, tmp_path: Path) -> None:
    text = io.StringIO()
    jobs = run.plan(paper, engine_names=["numpy"], seeds=2, measures=["time"])
    results = Results(tmp_path)
    progress = Progress(Console(file=text, width=200, force_terminal=True), len(jobs))
    with results.locked(), progress.show():
        Sweep(results).run(jobs, progress)
    assert "[1/2] mnist-rnn-e" in text.getvalue() and "[2/2] mnist-rnn-e" in text.getvalue()
    assert "━" in text.getvalue()
