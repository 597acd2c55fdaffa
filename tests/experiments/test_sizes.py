"""The study of several sizes: its file, a run of it, and what is made of its rows."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from bridge import registry, toml, weights
from bridge.errors import SpecError, WorkerError
from bridge.libjulia.find import Julia
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments import formats, papers, sweep, testing
from experiments.data import generated
from experiments.measures import ablation, growth, sizes_ablation
from experiments.measures import sizes as measured
from experiments.papers import Family, Paper, PaperFileError
from experiments.progress import Progress
from experiments.report import figures, numbers, sizes, sizes_targets, tables
from experiments.report import growth as growth_tables
from experiments.report.table import to_markdown
from experiments.report.view import View, paper_view, views_of
from experiments.results import COLUMNS, Results, Tidy, tidy_rows
from py_engine.network.trainer import UPDATE

PAPER = papers.load_paper("sizes")
FAMILIES = {family.id: family for family in PAPER.families}
ViewOf = Callable[..., View]

CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
IN_JULIA = ("cnn-norm", "gru")
"""Families that Julia compiles for in `make test`; a campaign takes all of them."""

SMALL: dict[str, dict[str, Any]] = {
    "lenet5": {"conv1.filters": 2, "conv2.filters": 3, "dense1.units": 8, "dense2.units": 7},
    "cnn": {"conv1.filters": 2, "conv2.filters": 3, "conv3.filters": 4},
    "cnn-norm": {"conv1.filters": 2, "conv2.filters": 3, "conv3.filters": 4},
    "mlp": {"dense1.units": 9, "dense2.units": 8, "dense3.units": 7},
    "lstm": {"lstm.units": 5, "input.shape": ["N", 6, 4]},
    "gru": {"gru1.units": 5, "gru2.units": 4, "input.shape": ["N", 6, 4]},
    "text": {"embedding.vocabulary": 50, "embedding.dimension": 6, "conv.filters": 5, "input.shape": ["N", 12]},
}
"""Each family in a size that trains in no time."""
PRODUCTS = ("matmul", "conv", "sequence_pool")
"""How the names of the Julia engine's ops begin that add up products."""


def changed(model: str, changes: dict[str, Any], name: str) -> ModelSpec:
    given = toml.parse(toml.read(PAPER.model_file(model)))
    return papers.network.changed(PAPER.spec(model), given, changes, name)


def small(family: Family) -> ModelSpec:
    return changed(family.model, SMALL[family.id], family.id)


def worker(engine: str) -> Any:
    """A fixture: one process of an engine for all tests."""

    @pytest.fixture(scope="module", name=f"{engine}_worker")
    def started() -> Iterator[Worker]:
        with Worker(engine, 1) as found:
            yield found

    return started


numpy_worker, torch_worker = worker("numpy"), worker("torch")


@pytest.fixture(scope="module")
def julia_worker(julia: Julia) -> Iterator[Worker]:
    with Worker("julia", 1) as found:
        yield found


# The file ------------------------------------------------------------------------------------------------------------


def test_every_family_has_three_sizes_and_the_larger_ones_have_more_parameters() -> None:
    assert set(FAMILIES) == set(SMALL)
    for family in PAPER.families:
        counts = [
            sum(int(np.prod(p.shape)) for p in PAPER.sized(family, size).parameters().values()) for size in family.sizes
        ]
        assert len(counts) == 3 and counts == sorted(set(counts)), family.id


def test_the_profiles_run_what_they_are_to() -> None:
    full, quick = sweep.plan(PAPER, "full"), sweep.plan(PAPER, PAPER.reproduced["full"])
    of_growth = [job for job in full if job.measure == "growth"]
    assert [job.engines for job in of_growth] == [("numpy",), ("julia",), ("torch",)]
    full = [job for job in full if job.measure == "sizes"]
    assert len(full) == 2 * len({job.network for job in full}) == 42
    assert len(quick) == 7 and {job.threads for job in quick} == {min(2, full[0].threads)}
    assert "torch-compile" in full[0].engines and "torch-compile" not in quick[0].engines
    settings = [job.kind.settings(job) for job in (full[0], full[-1], quick[0])]
    assert [given["batches"] for given in settings] == [[1, 16, 64, 256], [1, 64], [64]]
    assert settings[0]["compiled"] == 64 and settings[1]["compiled"] is None
    assert all(given["rounds"] >= 20 for given in settings)
    assert len({job.named for job in full}) == 21


def test_a_size_that_its_model_lacks_is_refused() -> None:
    with pytest.raises(SpecError, match=r"sizes-mlp has no setting 'dense9\.units'"):
        changed("sizes-mlp", {"dense9.units": 3}, "mlp-3")
    text = (papers.PAPERS_DIR / "sizes.toml").read_text(encoding="utf-8")
    with pytest.raises(PaperFileError, match=r"runs\.sample\.sizes_networks: 'lenet5-3' is in no family"):
        papers.loads(text.replace('sizes_networks = ["lenet5-1"]', 'sizes_networks = ["lenet5-3"]'))
    with pytest.raises(PaperFileError, match="the measure sizes needs sizes_batches"):
        papers.loads(text.replace("sizes_batches = [1, 16, 64, 256]", ""))


def test_rows_are_drawn_in_the_form_that_a_network_reads() -> None:
    words = generated.drawn_for(PAPER.sized(FAMILIES["text"], "5000"))
    assert words.x_train.shape == (generated.ROWS, 200) and words.x_train.min() == 0 and words.x_train.max() < 5000
    counts = np.bincount(words.x_train.ravel(), minlength=5000)
    assert counts[:10].sum() > 5 * counts[1000:2000].mean() * 10, "few words make most of a text"
    assert generated.drawn_for(PAPER.spec("sizes-cnn"), 3).x_train.shape == (3, 3, 32, 32)


# The networks --------------------------------------------------------------------------------------------------------


def trained(engine: Any, spec: ModelSpec, family: Family) -> tuple[list[float], dict[str, Any]]:
    """The losses of three steps and the parameters after them, in double precision."""
    rows = generated.drawn_for(spec, 12)
    optimizer = Optimizer(family.optimizer, family.learning_rate)
    engine.build(spec, weights.initialise(spec, 3, "float64"), optimizer, 4, "float64")
    x = rows.x_train if spec.vocabulary else rows.x_train.astype(np.float64)
    losses = engine.train_epoch(x, rows.y_train, np.arange(12))
    return list(losses), engine.params()


def as_pytorch(worker: Any, torch_worker: Any, name: str) -> None:
    spec = small(FAMILIES[name])
    losses, params = trained(torch_worker, spec, FAMILIES[name])
    found, ours = trained(worker, spec, FAMILIES[name])
    np.testing.assert_allclose(found, losses, rtol=1e-10)
    for parameter, expected in params.items():
        np.testing.assert_allclose(ours[parameter], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_numpy_engine_trains_each_family_as_pytorch_does(name: str, torch_worker: Any, numpy_worker: Any) -> None:
    as_pytorch(numpy_worker, torch_worker, name)


@pytest.mark.campaign
@pytest.mark.parametrize("name", FAMILIES if CAMPAIGN else IN_JULIA)
def test_the_julia_engine_trains_each_family_as_pytorch_does(name: str, torch_worker: Any, julia_worker: Any) -> None:
    as_pytorch(julia_worker, torch_worker, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_numpy_engine_can_say_where_the_time_of_a_step_goes(name: str, numpy_worker: Any) -> None:
    spec = small(FAMILIES[name])
    trained(numpy_worker, spec, FAMILIES[name])
    costs = numpy_worker.costs()
    check_costs(costs, spec)
    # At least: small filters are repeated side by side, with zeros that are multiplied, too.
    assert sum(flops for *_, flops in costs) >= operations(spec, FAMILIES[name])[0]
    of_output = [flops for op, layer, _, _, flops in costs if (op, layer) == ("matmul", spec.layers[-1].id)]
    inputs = spec.parameters()[f"{spec.layers[-1].id}.weight"].shape
    assert of_output == [2 * 4 * int(np.prod(inputs))] * 3, "forward, and the gradients by weight and input"
    check_memory(numpy_worker, spec)


def operations(spec: ModelSpec, family: Family) -> tuple[float, int]:
    """Operations of the products of a step of `trained`: of those that can't be left out, and of all."""
    optimizer = Optimizer(family.optimizer, family.learning_rate)
    task = measured.Task(spec, optimizer, 4, "float64", 1, 0, None)  # type: ignore[arg-type]
    _, program, _ = measured.roofline._traced(task)
    return measured.roofline.work_of(task).products, sum(one.flops for one in program.equations if one.op.product)


def test_the_julia_engine_can_too_and_frameworks_can_not(julia_worker: Any, torch_worker: Any) -> None:
    for name in FAMILIES if CAMPAIGN else IN_JULIA:
        spec = small(FAMILIES[name])
        trained(julia_worker, spec, FAMILIES[name])
        before = julia_worker.params()
        costs = julia_worker.costs()
        check_costs(costs, spec)
        needed, products = operations(spec, FAMILIES[name])
        # Each op has its own operations, and none has those of another; tiles compute some rows twice.
        assert needed <= sum(flops for *_, flops in costs) <= 1.25 * products
        assert {op for op, *_, flops in costs if flops} <= {op for op, *_ in costs if op.startswith(PRODUCTS)}
        after = julia_worker.params()
        assert all((after[key] == before[key]).all() for key in before), "asking changes nothing that is trained"
        assert julia_worker.threads_decided(), "one thread has nothing to try"
        check_memory(julia_worker, spec)
    trained(torch_worker, spec, FAMILIES[name])
    assert torch_worker.costs() == []
    assert torch_worker.held_bytes() is torch_worker.collecting_seconds() is None
    assert torch_worker.threads_in_step() == "" and torch_worker.threads_decided()


def check_memory(worker: Worker, spec: ModelSpec) -> None:
    """A step holds at least the mini-batch's output, and less than 100 MB of these small networks."""
    held, collecting = worker.held_bytes(), worker.collecting_seconds()
    assert held is not None and collecting is not None
    assert 4 * 4 * spec.layers[-1].settings()["units"] <= held < 1e8
    assert 0 <= collecting <= (worker.collecting_seconds() or 0) < 1000


def check_costs(costs: list[tuple[str, str, float, int, int]], spec: ModelSpec) -> None:
    assert spec.layers[-1].id in {layer for _, layer, *_ in costs}
    assert costs[-1][0] == "sums and update"
    assert all(0 < seconds < 10 and moved > 0 and flops >= 0 for _, _, seconds, moved, flops in costs)


# A run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured."""
    found = measured.roofline.Rates(1e13, {2**14: 1e13}, {"numpy": 1e-9})
    monkeypatch.setattr(measured.roofline, "measure", lambda *_: found)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of few steps: what is tested is that all are taken, not how exact they are."""
    for module in (ablation, sizes_ablation, growth):
        monkeypatch.setattr(module, "CHUNK_SECONDS", 0.01)
    monkeypatch.setattr(sizes_ablation, "REPEATS", 1)
    monkeypatch.setattr(growth, "ROUNDS", 2)


@pytest.mark.parametrize(
    ("seconds", "decided_after", "expected"),
    [
        (0.03, 0, [2, 2, 4]),
        (0.03, 15, [2, 2, 4, 4, 4, 4]),  # the last are timed when it is known what threads do
        (0.03, 10**9, [2, 2, 4, *[4] * 21]),  # an engine that never knows it is waited for no longer
    ],
)
def test_warming_up_ends_when_an_engine_knows_what_its_threads_do(
    monkeypatch: pytest.MonkeyPatch, seconds: float, decided_after: int, expected: list[int]
) -> None:
    trained: list[int] = []

    def chunk(_worker: Any, _task: Any, steps: int, _losses: Any = None) -> float:
        trained.append(steps)
        return seconds

    monkeypatch.setattr(ablation, "chunk", chunk)
    worker: Any = SimpleNamespace(threads_decided=lambda: sum(trained) >= decided_after)
    assert ablation.warm(worker, cast(Any, None)) == seconds
    assert trained == expected


def study(tmp_path: Path, **changed: Any) -> Paper:
    """The study in one small network and few rounds."""
    text = (papers.PAPERS_DIR / "sizes.toml").read_text(encoding="utf-8")
    head, _, _ = text.partition("[runs.full]")
    given = {"sizes_rounds": 6, "sizes_threads": [1], "sizes_batches": [4, 2], "sizes_milliseconds": 1}
    lines = [f"{name} = {value!r}".replace("'", '"') for name, value in (given | changed).items()]
    more = "\n".join(['measures = ["sizes"]', 'sizes_networks = ["mlp-256"]', *lines])
    return papers.loads(f"{head}[runs.full]\n{more}\n[runs.quick]\n{more}\n[runs.sample]\n{more}\n")


def test_ops_are_set_beside_the_fastest_round(tmp_path: Path, rates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[float] = []

    def noted(costs: Any, step: float) -> dict[str, Any]:
        steps.append(step)
        return ops_of(costs, step)

    ops_of = measured.ops_of
    monkeypatch.setattr(measured, "ops_of", noted)
    rows = swept(study(tmp_path), tmp_path, ["numpy"])["sizes"]
    of_batch = [[row["microseconds_per_step"] for row in rows if row["batch"] == batch] for batch in (2, 4)]
    assert steps == [min(found) / 1e6 for found in of_batch]


def swept(paper: Paper, folder: Path, engines: list[str]) -> dict[str, Any]:
    results = Results(folder)
    with results.locked():
        jobs = sweep.plan(paper, engine_names=engines)
        found = sweep.Sweep(results).run(jobs, Progress(Console(file=io.StringIO()), 1))
        results.write_tidy()
    (record,) = found.records
    return record


def test_a_run_has_rounds_start_up_memory_and_the_op_that_takes_most(tmp_path: Path, rates: None) -> None:
    paper = study(tmp_path)
    record = swept(paper, tmp_path, ["numpy", "torch"])
    assert record["status"] == "ok", record["error"]
    rows = tidy_rows([record])["sizes"]
    assert {(row["engine"], row["batch"], row["round"]) for row in rows} >= {
        ("numpy", batch, number) for batch in (2, 4) for number in range(1, 7)
    }
    first = {(row["engine"], row["batch"]): row["first"] for row in rows}
    assert [first[name, batch] for name in ("numpy", "torch") for batch in (2, 4)] == [1, None, 1, None]
    assert all(row["start_seconds"] > 0 and row["memory_bytes"] >= 0 for row in rows)
    ours = next(row for row in rows if row["engine"] == "numpy")
    assert ours["kernel"] and 0 < ours["kernel_share"] <= 1 and 0 < ours["kernel_limit_share"] < 1
    assert ours["kernel_share"] + ours["rest_share"] <= 1 and ours["rest_share"] >= 0
    assert {row["loss_deviation"] is None for row in rows if row["engine"] == "torch"} == {True}
    assert 0 <= ours["loss_deviation"] < 1e-5
    assert ours["threads_in_step"] == "one thread"
    assert ours["limit_microseconds"] > 0 and (ours["family"], ours["size"]) == ("mlp", "256")
    loaded = Tidy.load(tmp_path).tables["sizes"]
    assert len(loaded) == len(rows)
    again = sweep.plan(paper, engine_names=["numpy", "torch"])
    with Results(tmp_path).locked():
        assert sweep.Sweep(Results(tmp_path)).run(again, Progress(Console(file=io.StringIO()), 1)).reused == 1


def test_an_engine_that_is_not_ready_in_time_is_given_up_with_the_reason(
    tmp_path: Path, rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run is done: it is not tried again and again."""

    def late(self: Any, worker: Any, params: Any = None) -> float:
        if worker.engine.name == "torch":
            worker._child._process.wait(20)  # until it is ended
        return built(self, worker, params)

    built = measured.Task.build
    monkeypatch.setattr(measured.Task, "build", late)
    monkeypatch.setattr(measured, "GIVE_UP", 0.2)
    record = swept(study(tmp_path), tmp_path, ["torch"])
    assert record["status"] == "ok" and not record["sizes"]
    rows = tidy_rows([record])["sizes"]
    assert {row["batch"]: row["missing"] for row in rows} == dict.fromkeys(
        (2, 4), "given up: building and a first step took over 0.2 s"
    )


def test_slow_frameworks_take_part_in_every_third_round_and_ours_in_all() -> None:
    class Ready:
        def resume(self) -> None: ...
        def pause(self) -> None: ...
        def train_epoch(self, *_: Any) -> Any:
            self.seconds = 1.0
            return np.zeros(1)

    class Given:
        seed, batch_size = 0, 2
        work = type("Work", (), {"order": staticmethod(lambda *_: Path("order"))})

        def train(self, worker: Ready, order: Path) -> tuple[Any, float]:
            return np.zeros(1), 0.5

    seconds = {"numpy": 5.0, "torch": 1.0, "jax": 1.9, "tensorflow": 2.1}
    workers: Any = {name: Ready() for name in seconds}
    task: Any = Given()
    taking_part = [
        {row["engine"] for row in measured.in_round(number, workers, seconds, task, 50, {})} for number in (1, 2, 3)
    ]
    assert taking_part == [{"numpy", "torch", "jax"}] * 2 + [set(seconds)]


def test_a_framework_that_gets_faster_has_as_many_rounds_as_the_others() -> None:
    """And so the fastest one has, whatever its first steps took."""

    class Ready:
        def __init__(self, name: str) -> None:
            self.name, self.steps = name, 0

        def resume(self) -> None: ...
        def pause(self) -> None: ...

    class Given:
        seed, batch_size = 0, 2
        work = type("Work", (), {"order": staticmethod(lambda *_: Path("order"))})

        def train(self, worker: Ready, order: Path) -> tuple[Any, float]:
            worker.steps += 1
            later = {"numpy": 1.0, "torch": 1.0, "jax": 0.5 if worker.steps > 2 else 9.0, "tensorflow": 9.0}
            return np.zeros(1), later[worker.name]

    class Watched:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    seconds = {"numpy": 1.0, "torch": 1.0, "jax": 9.0, "tensorflow": 9.0}
    workers: Any = {name: Ready(name) for name in seconds}
    task: Any = Given()
    watched = Watched()
    rows = measured.all_rounds(workers, seconds, task, 20, 0.001, {}, watched)
    rounds = {name: {row["round"] for row in rows if row["engine"] == name} for name in seconds}
    assert len(rounds["jax"]) == 20 and rounds["jax"] <= rounds["numpy"] and rounds["jax"] <= rounds["torch"]
    assert len(rounds["tensorflow"]) == 6 and max(rounds["tensorflow"]) <= 20, "not in rounds that are added"
    assert len(rounds["numpy"]) > 20 and watched.steps == 21


# Losses --------------------------------------------------------------------------------------------------------------


def test_losses_are_compared_with_those_of_pytorch_step_by_step() -> None:
    pytorch = [2.0, 1e-6, 4.0, 1.0, 1.0, 7.0]
    losses = {"torch": pytorch, "numpy": [2.0, 3e-6, 4.0], "jax": [2.0, 1e-6, 4.0002, 1.0, 1.0, 9.0]}
    found, others = measured.compared(losses, 1e-4)
    assert found == {"numpy": pytest.approx(1e-6), "jax": pytest.approx(5e-5)}, "relative to losses, the first steps"
    assert others == {}
    assert measured.compared({"numpy": [1.0]}, 1e-4) == ({}, {}), "nothing to compare with"
    assert measured.compared({}, 1e-4) == ({}, {})
    for wrong in (4.1, float("nan"), float("inf")):
        found, others = measured.compared(losses | {"numpy": [2.0, 1e-6, wrong]}, 1e-4)
        assert set(found) == {"jax"} and set(others) == {"numpy"}
        assert f"the loss of step 3 is {wrong:.8g}, PyTorch's 4," in others["numpy"]


def perturbed(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the losses of an engine be others, by more than rounding explains."""
    train = measured.Task.train

    def altered(self: Any, worker: Any, order: Path) -> Any:
        losses, seconds = train(self, worker, order)
        return losses * (1.002 if worker.engine.name == engine else 1.0), seconds

    monkeypatch.setattr(measured.Task, "train", altered)


def test_an_engine_of_ours_that_trains_otherwise_fails_the_run(
    tmp_path: Path, rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    perturbed("numpy", monkeypatch)
    record = swept(study(tmp_path), tmp_path, ["numpy", "torch"])
    assert record["status"] != "ok" and not record.get("sizes")
    assert (
        "engine numpy trains otherwise than PyTorch: from the same weights and rows the loss of step 1"
        in (record["error"])
    )
    assert record["error"].endswith("(mlp-256, mini-batches of 2)")


def test_a_framework_that_trains_otherwise_is_left_out_with_the_reason(
    tmp_path: Path, rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    perturbed("numpy", monkeypatch)
    monkeypatch.setattr(measured.roofline, "OURS", ("julia",))  # numpy starts sooner than a framework
    paper = study(tmp_path)
    record = swept(paper, tmp_path, ["numpy", "torch"])
    assert record["status"] == "ok", record["error"]
    assert {row["engine"] for row in record["sizes"]} == {"torch"}
    reasons = {about["batch"]: about["missing"] for about in record["facts"] if about["engine"] == "numpy"}
    assert set(reasons) == {2, 4}
    assert all(reason.startswith("trains otherwise than PyTorch: from the same") for reason in reasons.values())
    rows = tidy_rows([record])["sizes"]
    assert {row["batch"]: row["missing"] for row in rows if row["engine"] == "numpy"} == reasons
    notes = " ".join(sizes.sizes(paper_view(paper, Tidy.load(tmp_path))).notes)
    assert all(reason in notes for reason in reasons.values())


def test_weights_that_are_updated_otherwise_are_found(
    tmp_path: Path, rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(self: Any, worker: Any, params: Any = None) -> float:
        if worker.engine.name == "numpy":
            rate = self.optimizer.settings()["learning_rate"]
            self = measured.replace(self, optimizer=Optimizer(self.optimizer.name, 1.5 * rate))
        return build(self, worker, params)

    build = measured.Task.build
    monkeypatch.setattr(measured.Task, "build", built)
    record = swept(study(tmp_path), tmp_path, ["numpy", "torch"])
    assert "trains otherwise than PyTorch" in record["error"] and "step 1 " not in record["error"]


# The op that takes most ----------------------------------------------------------------------------------------------


def test_ops_are_named_with_their_share_of_the_step_and_of_the_limit_and_the_rest_is_apart() -> None:
    costs = [
        ("matmul", "a", 2.0, 10, 40),
        ("matmul", "a", 1.0, 10, 20),
        ("exp", "b", 2.5, 10, 0),
        (UPDATE, "", 2.0, 10, 0),
    ]
    found = measured.ops_of(costs, 10.0)
    assert [op["kernel"] for op in found["ops"]] == ["matmul of a", "exp of b", UPDATE]
    assert [op["share"] for op in found["ops"]] == [0.3, 0.25, 0.2] and found["rest_share"] == pytest.approx(0.25)
    rates = measured.roofline.Rates(40.0, {1: 20.0, 10: 10.0}, {})
    against = measured._against({"engine": "numpy", **found}, rates)
    # The calls of matmul take 1 s each, for operations and bytes; of the update, in place, half as many bytes lie
    # there, which are moved at the higher rate.
    assert against["kernel_limit_share"] == pytest.approx(2 / 3) and "ops" not in against
    assert [(op["kernel"], op["limit_share"]) for op in against["kernels"]] == [
        (UPDATE, pytest.approx(0.25)),
        ("exp of b", pytest.approx(0.4)),
        ("matmul of a", pytest.approx(2 / 3)),
    ]
    assert measured.as_kernels(measured.as_text(against["kernels"])) == [
        {**op, "limit_share": pytest.approx(op["limit_share"], abs=1e-4)} for op in against["kernels"]
    ]
    assert measured.ops_of(costs, 5.0)["rest_share"] == 0, "ops that took longer than in a step"
    assert measured.ops_of([], 1.0) == {} and measured.as_kernels("") == []


def test_the_ops_that_hold_a_step_are_named_until_they_could_save_enough() -> None:
    kernels = "conv of a 0.5000 0.6000; matmul of b 0.1500 0.0000; exp of c 0.3000 0.8000; add of d 0.0500 1.2000"

    def named(to_bound: float, **others: Any) -> tuple[list[str], float]:
        found = sizes.held({"to_bound": to_bound, "kernels": kernels, "fastest_us": 1.0, "step_us": 1.0, **others})
        return [op["kernel"] for op in found["ops"]], found["gained"]

    assert named(1.1) == (["conv of a"], pytest.approx(0.2))
    assert named(1.3) == (["conv of a", "matmul of b"], pytest.approx(0.35))
    assert named(1.1, step_us=2.0) == (["conv of a"], pytest.approx(0.1)), "of the median step"
    everything = ["conv of a", "matmul of b", "exp of c"]
    assert named(3.0) == (everything, pytest.approx(0.41)), "what is at its limit saves nothing"
    earlier = sizes.held({"to_bound": 2.0, "kernel": "conv of a"})
    assert earlier == {"too_long": 0.5, "held_by": "conv of a", "gained": None}


def test_operations_that_no_machine_could_do_in_that_time_are_an_error(
    tmp_path: Path, rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "costs", lambda self: [("matmul", "dense1", 1e-3, 1, int(1.3e10))])
    record = swept(study(tmp_path), tmp_path, ["numpy"])
    assert "engine numpy: matmul of dense1 in mini-batches of 2 reaches 1.30 times the highest rate" in record["error"]
    monkeypatch.setattr(Worker, "costs", lambda self: [("matmul", "dense1", 1e-3, 1, int(1.1e10))])
    record = swept(study(tmp_path / "near", sizes_rounds=5), tmp_path / "near", ["numpy"])
    assert record["status"] == "ok" and record["facts"][0]["kernel_limit_share"] == pytest.approx(1.1)


# Ablation ------------------------------------------------------------------------------------------------------------


def test_each_technique_is_switched_off_in_each_network(
    tmp_path: Path, julia: Julia, briefly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Julia compiles for each of them.
    of_engines = {"numpy": ablation.techniques("numpy"), "julia": ("fuse", "batched", "join")}
    assert {*of_engines["julia"]} < {*ablation.techniques("julia")}
    monkeypatch.setattr(sizes_ablation, "techniques", of_engines.__getitem__)
    text = (papers.PAPERS_DIR / "sizes.toml").read_text(encoding="utf-8")
    head, _, _ = text.partition("[[families]]")
    families = """
[[families]]
id = "cnn-norm"
title = "CNN, normalised"
model = "sizes-cnn-norm"
optimizer = "sgd"
learning_rate = 0.01
over = "first filters"
[families.sizes]
2 = { "conv1.filters" = 2, "conv2.filters" = 3, "conv3.filters" = 4 }
"""
    runs = """
measures = ["sizes_ablation"]
sizes_ablation_engines = ["numpy", "julia"]
sizes_ablation_networks = ["cnn-norm-2"]
sizes_ablation_batch = 4
"""
    paper = papers.loads(f"{head}{families}[runs.full]{runs}[runs.quick]{runs}[runs.sample]{runs}")
    results = Results(tmp_path)
    with results.locked():
        found = sweep.Sweep(results).run(sweep.plan(paper), Progress(Console(file=io.StringIO()), 1))
        results.write_tidy()
    assert [record["status"] for record in found.records] == ["ok", "ok"], [one["error"] for one in found.records]
    rows = tidy_rows(found.records)["sizes_ablation"]
    for engine in ("numpy", "julia"):
        of_engine = {row["technique"]: row for row in rows if row["engine"] == engine}
        assert tuple(of_engine) == of_engines[engine]
        assert all(row["all_on_microseconds"] > 0 for row in of_engine.values())
        batched = of_engine.pop("batched")
        assert "microseconds_per_step" not in batched and "batch" in batched["missing"]  # it is normalised
        assert all(row["microseconds_per_step"] > 0 for row in of_engine.values())
    made = sizes.sizes_ablation(paper_view(paper, Tidy.load(tmp_path)))
    assert len(made.rows) == len(rows) + 2, "and how far apart the steps with all techniques are, of each engine"
    assert all(row["cnn-norm-2"] or row["technique"] == "batched" for row in made.rows)


def test_the_committed_ablation_has_every_network_engine_and_technique() -> None:
    paper = papers.load_paper("sizes")
    committed = Tidy.load(papers.PAPERS_DIR.parents[1] / "paper" / "results")
    rows = committed.tables["sizes_ablation"]
    networks = {f"{row.family}-{row.size:g}" for row in rows.itertuples()}
    assert len(networks) == 7
    made = sizes.sizes_ablation(paper_view(paper, committed))
    for engine in ("numpy", "julia"):
        of_engine = [row for row in made.rows if row["engine"] == engine and row["technique"] != sizes.ALL_ON]
        assert all(any(row[name] is not None for row in of_engine) for name in networks), engine
        measured = rows.loc[rows["engine"] == engine, "technique"]
        assert set(measured) == {*ablation.techniques(engine)}, f"{engine}: make sizes again, and commit its results"


# Growth --------------------------------------------------------------------------------------------------------------


def test_growth_is_timed_of_networks_and_of_graphs(tmp_path: Path, rates: None, briefly: None) -> None:
    text = (papers.PAPERS_DIR / "sizes.toml").read_text(encoding="utf-8")
    head, _, _ = text.partition("[[series]]")
    series = """
[[series]]
id = "width"
title = "MLP"
model = "sizes-mlp"
optimizer = "adam"
learning_rate = 0.001
over = "units"
[series.sizes]
8 = { "dense1.units" = 8, "dense2.units" = 8 }
16 = { "dense1.units" = 16, "dense2.units" = 16 }
"""
    runs = """
measures = ["growth"]
growth_engines = ["numpy", "torch", "jax"]
growth_batch = 4
growth_nodes = [10, 20]
"""
    paper = papers.loads(f"{head}{series}[runs.full]{runs}[runs.quick]{runs}[runs.sample]{runs}")
    results = Results(tmp_path)
    with results.locked():
        jobs = sweep.plan(paper, engine_names=["numpy", "torch", "jax"])
        found = sweep.Sweep(results).run(jobs, Progress(Console(file=io.StringIO()), 1))
    assert [record["status"] for record in found.records] == ["ok"] * 3, [record["error"] for record in found.records]
    rows = {record["config"]["engine"]: record["growth"] for record in found.records}
    of_networks = [("width", value, what) for value in (8, 16) for what in ("step", "start-up")]
    eager = [("nodes", value, "eager gradient") for value in (10, 20)]
    compiled = [("nodes", value, f"{which} call, compiled") for value in (10, 20) for which in ("first", "later")]
    for engine, of_graphs in (("numpy", [*eager, *compiled]), ("torch", eager), ("jax", [])):
        expected = [*of_networks, *of_graphs]
        assert [(row["series"], row["value"], row["what"]) for row in rows[engine]] == expected
        assert all(row["seconds"] > 0 or row["what"] == "start-up" for row in rows[engine])
        assert all(row["limit_seconds"] > 0 for row in rows[engine] if row["what"] == "step")
        ours = engine == "numpy"
        for row in rows[engine]:
            graph = row["series"] == "nodes"
            assert ("held_bytes" in row, "cache_bytes" in row) == (ours or graph, ours or graph)
            assert ("collecting_seconds" in row) == (graph or (ours and row["what"] == "start-up"))
            assert ("system_seconds" in row) == (graph or row["what"] == "start-up")
            assert 0 <= row.get("system_seconds", 0) <= row["seconds"] or graph  # of a short call by ticks of a clock
            assert (row.get("threads_in_step") == "one thread") == (ours and row["what"] == "step")
    assert len(tidy_rows(found.records)["growth"]) == sum(map(len, rows.values()))


def test_growth_is_timed_of_graphs_in_julia(julia: Julia) -> None:
    found = list(growth.of_graphs("julia", [5, 10]))
    eager = [("eager gradient", nodes) for nodes in (5, 10)]
    compiled = [(f"{which} call, compiled", nodes) for nodes in (5, 10) for which in ("first", "later")]
    assert [(row["what"], row["value"]) for row in found] == [*eager, *compiled]
    assert all(0 <= row["collecting_seconds"] <= row["seconds"] < 60 and row["held_bytes"] >= 0 for row in found)
    assert all(0 <= row["system_seconds"] < 60 for row in found)


def test_a_process_of_graphs_that_fails_is_named_with_its_last_words() -> None:
    with pytest.raises(WorkerError, match=r"engine numpy: its graphs can't be timed; .*integer"):
        list(growth.of_graphs("numpy", ["x"]))  # type: ignore[list-item]


def test_the_eager_gradient_is_timed_beside_pytorch_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "PEER_ROUNDS", 6)
    found = growth.beside_peer(20)
    assert list(found) == list(growth.BESIDE_PEER)
    assert 0 < found["peer_low"] <= found["peer_ratio"] <= found["peer_high"]


def test_a_process_that_is_called_alternately_and_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match=r"engine numpy: its graphs can't be timed; .*integer"):
        growth.beside_peer("x")  # type: ignore[arg-type]
    ends = [sys.executable, "-c", "import sys; sys.stdin.close(); sys.exit('no memory')"]
    monkeypatch.setattr(growth, "_command", lambda *_: ends)
    monkeypatch.setattr(growth, "PEER_ROUNDS", 1)
    with growth.on_request("torch", 20) as timed:
        time.sleep(0.5)  # it has ended when it is asked
        with pytest.raises(WorkerError, match=r"engine torch: its graphs can't be timed; .*no memory"):
            timed()


@pytest.mark.parametrize("there", [True, False])
def test_only_the_graph_with_a_target_is_timed_beside_pytorch(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"what": "eager gradient", "value": growth.PEER_NODES}
    monkeypatch.setattr(registry.Registered, "availability", lambda _: registry.Availability(there, ""))
    for engine, one, beside in (
        ("numpy", row, there),
        ("torch", row, False),
        ("numpy", row | {"value": 20}, False),
        ("numpy", row | {"what": "first call, compiled"}, False),
    ):
        assert growth.is_beside_peer(engine, one) is beside


# What is made of the rows --------------------------------------------------------------------------------------------


@pytest.fixture
def view(fake: ModuleType, view_of: ViewOf) -> View:
    return view_of(fake.rows("sizes", seeds=0, data_source="generated"), paper="sizes")


def with_columns(view: View, **columns: Any) -> View:
    """The same view, but with other columns in the table of the study."""
    return dataclasses.replace(view, tables={**view.tables, "sizes": view.tables["sizes"].assign(**columns)})


def test_a_step_is_judged_by_the_lower_end_of_the_interval(view: View) -> None:
    for about, of_engines, steps in sizes.points(view):
        found = sizes.judged(of_engines, steps, "numpy")
        held = about["size"] == list(next(f for f in PAPER.families if f.title == about["family"]).sizes)[-1]
        assert found["peer"] == "jax" and found["within"] is not held
        low, high = testing.of_median(steps["numpy"] / steps["jax"]) or (0, 0)
        assert (found["ratio_low"], found["ratio_high"]) == (low, high) and low <= found["ratio"] <= high
        assert sizes.judged(of_engines, steps, "julia")["within"]
        of_engines = {engine: {**row, "limit_microseconds": 1e9} for engine, row in of_engines.items()}
        assert sizes.judged(of_engines, steps, "numpy")["within"], "near the limit there is nothing to be ahead of"


def test_the_tables_and_the_figure_are_made(view: View) -> None:
    made = sizes.sizes(view)
    assert len(made.rows) == 21 * (4 + 2)
    held = sizes.sizes_held(view)
    assert len(held.rows) == 42 and {row["engine"] for row in held.rows} == {"TwinGrad numpy"}
    saved = formats.share(0.54 * held.rows[0]["fastest_us"] / held.rows[0]["step_us"])
    named = f"matmul of dense1 60 % (40 %), relu of dense1 20 % (10 %) | {saved} | 10 % |"
    assert named in to_markdown(held) and not any("could not save enough" in note for note in held.notes)
    (said,) = [note for note in made.notes if "losses" in note]
    assert "at most 8.0·10⁻⁶" in said and "by more than 10⁻³ is left out there" in said
    assert "TwinGrad numpy: 84 of 126 rows within its bound" in made.notes
    assert "given up: an invented reason" in "".join(made.notes)
    assert not any("compiles anew" in note for note in made.notes), "compiled PyTorch is in no row here"
    for row in growth_tables.growth(view).rows:
        if row["against"] == "batch":
            assert row["torch_exponent"] == pytest.approx(1, abs=0.05)
            assert row["torch_beyond"] == pytest.approx(0, abs=0.05)
    of_series = {(row["group"], row["at"]): row for row in growth_tables.growth(view).rows if "units" in row["group"]}
    width = of_series["MLP, by units", "step, 100 to 10,000"]
    assert width["torch_exponent"] == pytest.approx(1) and width["torch_beyond"] == pytest.approx(0)
    assert of_series["MLP, by units", "start-up, 100 to 10,000"]["torch_beyond"] is None
    assert "| nodes | eager gradient, 100 to 10,000 | 1 | 0.50 (—) |" in to_markdown(growth_tables.growth(view))
    axes = [one for one in figures.PRODUCERS["ratios_by_size"](view).axes if one.get_title(loc="left")]
    assert [one.get_title(loc="left") for one in axes] == [family.title for family in PAPER.families]


def test_the_figure_shows_the_ratios_of_the_table_with_the_most_threads(view: View) -> None:
    drawn = figures.PRODUCERS["ratios_by_size"](view)
    assert drawn.get_supylabel().endswith(", 2 threads")
    family = PAPER.families[1]
    (axes,) = [one for one in drawn.axes if one.get_title(loc="left") == family.title]
    lines = {str(one.get_label()): one.lines[0].get_ydata() for one in axes.containers}
    assert len(lines) == 2 * 4
    for engine, label in (("numpy", "TwinGrad numpy"), ("julia", "TwinGrad Julia")):
        for batch in (1, 16, 64, 256):
            expected = [
                found[engine]["ratio"]
                for about, found in sizes.verdicts(view)
                if (about["family"], about["batch"], about["threads"]) == (family.title, batch, 2)
            ]
            assert list(lines[f"{label}, batch {batch}"]) == expected
    targets = [line.get_ydata()[0] for line in axes.lines if len({*line.get_ydata()}) == 1]
    assert {1.0, 0.8} <= {*targets}


def test_networks_without_a_row_are_named_once(view: View) -> None:
    rows = view.table("sizes")
    of_gru = (rows["family"] == "gru") & (rows["size"] == 64) & (rows["threads"] == 2)

    def with_rows(kept: Any) -> View:
        return dataclasses.replace(view, tables={**view.tables, "sizes": rows[kept]})

    assert not any(view.why_missing(engine, "sizes") for engine in ("numpy", "julia", "torch"))
    several = rows["threads"] == 2
    for kept, said in (
        (~of_gru, "no row of gru-64 with 2 threads"),
        (several, "no row of all 21 networks with 1 thread"),
        (several & ~of_gru, "no row of gru-64 with 2 threads; all 21 networks with 1 thread"),
        (~several, None),  # as on a machine with one core
    ):
        assert with_rows(kept).why_missing("numpy", "sizes") == said
    (note,) = [note for note in sizes.sizes(with_rows(~of_gru)).notes if "no row of" in note]
    assert note.endswith("no row of gru-64 with 2 threads.")


def test_a_share_above_one_is_at_the_limit_and_one_of_earlier_runs_is_not_shown(view: View) -> None:
    little = with_columns(view, kernels="matmul of dense1 0.6 0.9; sums and update 0.1 1.1")
    held = sizes.sizes_held(little)
    saved = formats.share(0.06 * held.rows[0]["fastest_us"] / held.rows[0]["step_us"])
    assert f"| matmul of dense1 60 % (90 %) | {saved} | 10 % |" in to_markdown(held)
    assert any(note.startswith("In 42 of 42 rows the ops that are named") for note in held.notes)
    nothing = with_columns(view, kernels="matmul of dense1 0.6 1.0")
    assert "| none: all are at their limits | 0 % | 10 % |" in to_markdown(sizes.sizes_held(nothing))
    above = with_columns(view, kernels=None, kernel_limit_share=1.1)
    assert "| matmul of dense1 60 % (at its limit) | — | 10 % |" in to_markdown(sizes.sizes_held(above))
    earlier = with_columns(above, rest_share=None, loss_deviation=None)
    assert "| matmul of dense1 60 % | — | — |" in to_markdown(sizes.sizes_held(earlier))
    assert not [note for note in sizes.sizes(earlier).notes if "losses" in note]


def test_no_step_is_judged_by_a_peer_that_was_in_fewer_rounds(view: View) -> None:
    _, of_engines, steps = sizes.points(view)[0]
    steps = steps.copy()
    steps.loc[steps.index[-1], "jax"] = None
    found = sizes.judged(of_engines, steps, "numpy")
    assert found["peer"] == "jax" and found["ratio_low"] is not None and found["within"] is None
    every = view.table("sizes")
    few = (every["engine"] == "jax") & (every["round"] == 20) & (every["batch"] == 16)
    shown = dataclasses.replace(view, tables={**view.tables, "sizes": every[~few]})
    made = sizes.sizes(shown)
    assert "TwinGrad numpy: 70 of 126 rows within its bound; 21 undecided" in made.notes
    assert to_markdown(made).count(" ? |") == 2 * 21
    found = numbers.of_paper(shown)
    for threads, counted in ((2, ("42", "84", "21")), (1, ("28", "42", None))):
        for name, text in zip(("count", "rows", "undecided"), counted, strict=True):
            assert found.get(f"sizes.{threads}.numpy.{name}", {}).get("text") == text


def verdict(
    engine: str, step: float, peers: dict[str, float], limit: float, rounds: int = 20, together: int | None = None
) -> dict[str, Any]:
    """How an engine's step is judged where every round is alike, and only some of them are the peers', too."""
    steps = pd.DataFrame({engine: step, **peers}, index=range(1, rounds + 1))
    steps.loc[steps.index[together or rounds :], list(peers)] = None
    unknown = dict.fromkeys(("kernel", "kernel_share", "kernels", *sizes.OF_KERNEL, "threads_in_step"))
    of_engines = {name: {"limit_microseconds": limit, **unknown} for name in (engine, *peers)}
    return sizes.judged(of_engines, steps, engine)


@pytest.mark.parametrize(
    ("engine", "step", "peers", "limit", "within"),
    [
        *(("numpy", 99, {"torch": 120, "jax": 100}, 1, True), ("numpy", 101, {"torch": 120, "jax": 100}, 1, False)),
        *(("julia", 79, {"torch": 120, "jax": 100}, 1, True), ("julia", 81, {"torch": 120, "jax": 100}, 1, False)),
        *(("numpy", 109, {"torch": 50}, 100, True), ("numpy", 111, {"torch": 50}, 100, False)),
        *(("julia", 109, {"torch": 50}, 100, True), ("julia", 111, {"torch": 50}, 100, False)),
        *(("julia", 109, {"torch": 140}, 100, True), ("julia", 113, {"torch": 140}, 100, False)),
        *(("numpy", 95, {"torch": 100, "torch-compile": 90}, 1, False), ("numpy", 95, {"torch": 100}, 1, True)),
        ("numpy", 95, {"torch": 100, "flux": 90}, 1, True),  # which is no peer here
    ],
)
def test_a_bound_is_a_share_of_the_best_peer_or_a_tenth_above_the_limit(
    engine: str, step: float, peers: dict[str, float], limit: float, within: bool
) -> None:
    found = verdict(engine, step, peers, limit)
    assert found["within"] is within
    assert found["peer"] == min((name for name in peers if name in measured.PEERS), key=peers.__getitem__)


def test_a_step_without_a_peer_has_no_verdict_and_one_with_twenty_rounds_of_more_has() -> None:
    assert verdict("numpy", 1, {}, 1)["peer"] is None and "within" not in verdict("numpy", 1, {}, 1)
    judged = {n: verdict("numpy", 1, {"torch": 2}, 0.1, rounds=25, together=n)["within"] for n in (19, 20, 25)}
    assert judged == {19: None, 20: True, 25: True}


def test_no_step_is_called_within_its_bound_that_was_not_judged(view: View) -> None:
    every = view.table("sizes")

    def said(kept: Any) -> str:
        shown = dataclasses.replace(view, tables={**view.tables, "sizes": every[kept]})
        made = sizes.sizes_held(shown)
        assert not made.rows
        return made.notes[0]

    ours, small = every["engine"].isin(sizes.TARGETS), every["size"] != 0
    for family in PAPER.families:
        small &= (every["family"] != family.id) | (every["size"] != float(list(family.sizes)[-1]))
    assert said(small) == "Every step is within its bound."
    assert said(ours).startswith("No step was judged")
    assert said(every["round"] < 3).startswith("No step was judged")
    few = (every["engine"] == "jax") & (every["round"] == 8) & (every["batch"] == 16)
    assert said(small & ~few).startswith("No step is above its bound, as far as is known: of 168 28 are undecided")


def test_every_engine_s_step_is_in_the_csv_with_its_quartiles(view: View) -> None:
    made = sizes.sizes(view)
    for row, (_, _, steps) in zip(made.rows, sizes.points(view), strict=True):
        for engine in steps.columns:
            low, middle, high = (row[f"{engine}_{name}"] for name in ("step_low_us", "step_us", "step_high_us"))
            assert low < middle < high and middle == pytest.approx(steps[engine].median())
        assert row["numpy_to_torch"] == pytest.approx((steps["numpy"] / steps["torch"]).median())
        assert {f"{engine}_{name}" for engine in steps.columns for name in sizes.STEP} < {*made.fields}


def test_where_compiled_pytorch_took_part_is_said(view: View) -> None:
    every = view.table("sizes")
    like = every[(every["engine"] == "torch") & (every["batch"] == 64) & (every["threads"] == 2)]
    compiled = like.assign(engine="torch-compile", label="PyTorch compiled")
    made = sizes.sizes(dataclasses.replace(view, tables={**view.tables, "sizes": pd.concat([every, compiled])}))
    (said,) = [note for note in made.notes if "compiles anew" in note]
    assert "takes part in mini-batches of 64 with 2 threads alone" in said


def test_a_factor_of_the_ablation_is_marked_where_the_steps_with_all_differ_as_much(
    fake: ModuleType, view_of: ViewOf
) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    like = next(row for row in rows["split"] if (row["engine"], row["family"]) == ("numpy", "cnn"))
    rows["sizes_ablation"] = [
        like | {"technique": name, "microseconds_per_step": step, "all_on_microseconds": with_all}
        for name, step, with_all in (("fuse", 150.0, 100.0), ("views", 120.0, 110.0), ("in_place", 99.0, 110.0))
    ]
    made = sizes.sizes_ablation(view_of(rows, paper="sizes"))
    network = f"cnn-{formats.given(like['size'])}"
    assert [row[network] for row in made.rows] == pytest.approx([1.1, 1.5, 120 / 110, 0.9])
    shown = [line.split(" | ")[1].rstrip(" |") for line in to_markdown(made).split("\n") if line.startswith("| ")]
    assert shown[-4:] == ["1.10", "1.50", "1.09 ?", "0.90"]
    assert "with 2 threads" in made.notes[0] and "Letters name the studies" in made.notes[0]


@pytest.mark.parametrize("image", [True, False])
def test_start_up_from_a_system_image_is_called_that(image: bool, fake: ModuleType, view_of: ViewOf) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    for item in rows["runs"]:
        if image and item["engine"] == "julia":
            item["framework_version"] = "julia 1.5.3 sysimage 0123456789abcdef"
    notes = sizes_targets.sizes_start(view_of(rows, paper="sizes")).notes
    assert sum("compiles anew in each run" in note for note in notes) == 1
    with_image = "embedded in Python's process, started from a system image."
    assert any(note.endswith(with_image) for note in notes) is image
    assert any(note.endswith("started without a system image.") for note in notes) is not image


def test_what_is_said_of_julia_is_of_the_runs_that_are_shown(fake: ModuleType, view_of: ViewOf) -> None:
    older, newer = (fake.rows("sizes", seeds=0, data_source="generated") for _ in range(2))
    for rows, version, moment in (
        (older, "1.5.3 backend embedded", "2025"),
        (newer, "1.11.2 backend juliacall", "2026"),
    ):
        for items in rows.values():
            for item in items:
                item["created"] = f"{moment}-01-01T00:00:00"
                item["framework_version"] = f"julia {version}"
    view = view_of(older, newer, paper="sizes")
    assert sizes_targets.start_targets(view)["julia"] == 2.0
    assert "TwinGrad Julia: Julia 1.11.2, by juliacall, started without a system image." in (
        sizes_targets.sizes_start(view).notes
    )


def test_two_machines_have_a_view_each(fake: ModuleType, tmp_path: Path) -> None:
    here = fake.rows("sizes", seeds=0, data_source="generated")
    there = fake.rows("sizes", seeds=0, data_source="generated", cpu_model="Another CPU")
    fake.write(tmp_path, here, there)
    views = views_of(PAPER, Tidy.load(tmp_path))
    assert {view.machines[0] for view in views} == {fake.CPU, "Another CPU"}
    for view in views:
        assert len(sizes.sizes(view).rows) == 126 and len(sizes_targets.sizes_start(view).rows) == 126


def with_facts(rows: Any, **changed: Any) -> Any:
    """Invented rows in which the numpy engine's facts with mini-batches of 1 are others."""
    found = [row | (changed if (row["engine"], row["batch"]) == ("numpy", 1) else {}) for row in rows["sizes"]]
    return {**rows, "sizes": found}


def test_start_up_is_held_against_its_target_in_new_processes_and_in_others(fake: ModuleType, view_of: ViewOf) -> None:
    rows = with_facts(fake.rows("sizes", seeds=0, data_source="generated"), start_seconds=0.2)
    view = view_of(rows, paper="sizes")
    made = sizes_targets.sizes_start(view)
    assert [row["numpy_fresh"] for row in made.rows] == [row["batch"] == 1 for row in made.rows]
    assert "TwinGrad numpy, within 0.3 s: 42 of 42 in a new process, 0 of 84 in a process that has trained before." in (
        made.notes
    )
    assert "TwinGrad Julia, within 1.5 s: 0 of 42 in a new process, 0 of 84 in a process that has trained before." in (
        made.notes
    )
    first, later = to_markdown(made).split("| 1 | 1 | 2 | ")[1].split("\n")[:2]
    assert first.startswith("0.200 (1.50) | 2.50 (1.50) × |") and later.startswith("| 1 | 16 | 2 | 2.50 × | 2.50 × |")
    found = numbers.of_paper(view)
    assert found["sizes.start.numpy.count"]["text"] == found["sizes.start.numpy.rows"]["text"] == "42"
    assert found["sizes.start.julia.count"]["text"] == "0"


@pytest.mark.parametrize(
    ("version", "backend", "target"),
    [
        *(("1.5.3", "embedded", 1.5), ("1.12.2", None, 1.5), ("1.12.2 backend juliacall", "juliacall", 2.0)),
        ("1.5.3 backend embedded sysimage 0123456789abcdef", "embedded", 1.5),
    ],
)
def test_the_target_of_julia_s_start_up_is_that_of_its_backend(
    version: str, backend: str | None, target: float, fake: ModuleType, view_of: ViewOf
) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    for item in rows["runs"]:
        if item["engine"] == "julia":
            item["framework_version"] = f"julia {version}"
    view = view_of(rows, paper="sizes")
    assert sizes_targets.julia_backend(view) == backend and sizes_targets.start_targets(view)["julia"] == target
    said = "embedded or by juliacall, which the records do not say" in " ".join(sizes_targets.sizes_start(view).notes)
    assert said is (backend is None)


def test_memory_is_compared_with_pytorch_s(fake: ModuleType, view_of: ViewOf) -> None:
    rows = with_facts(fake.rows("sizes", seeds=0, data_source="generated"), memory_bytes=3e6)
    view = view_of(rows, paper="sizes")
    made = sizes_targets.sizes_memory(view)
    assert made.rows[0]["numpy_memory_ratio"] == 3 and made.rows[1]["numpy_memory_ratio"] == 1
    assert made.rows[0]["numpy_peak_ratio"] == pytest.approx(203 / 201)
    assert "| 3.00 MB (203 MB) | 3.00 × | 1.00 MB (201 MB) | 1.00 |" in to_markdown(made)
    assert any(
        note.startswith("TwinGrad numpy, peak at most PyTorch's: over the level in 84 of 126 rows")
        for note in made.notes
    )
    (note,) = (note for note in made.notes if "own copy of the data" in note)
    copying = [name for name in sizes_targets.engines_of(view) if name in ("tensorflow", "tensorflow-xla", "jax")]
    assert copying and note.startswith(f"The memory of {', '.join(map(view.label, copying))} contains")
    without = {name: [row for row in found if row["engine"] not in copying] for name, found in rows.items()}
    notes = sizes_targets.sizes_memory(view_of(without, paper="sizes")).notes
    assert not any("own copy of the data" in note for note in notes)


def test_two_threads_are_compared_with_one_by_the_ratios_in_the_same_round(fake: ModuleType, view_of: ViewOf) -> None:
    """A machine that drifts by a half changes no ratio, and one slow round no verdict."""
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    view = view_of(rows, paper="sizes")
    made = sizes_targets.sizes_threads(view)
    assert [row["batch"] for row in made.rows] == 21 * [1, 16, 64, 256]
    for row in made.rows:
        slower = row["batch"] == 64
        assert row["numpy_ratio"] == pytest.approx(0.6) and not row["numpy_slower"]
        assert row["julia_ratio"] == pytest.approx(1.5 if slower else 1.02) and row["julia_slower"] is slower
        assert row["julia_ratio_low"] <= row["julia_ratio"] <= row["julia_ratio_high"]
    assert "TwinGrad Julia: slower by more than that in 21 of 84 rows." in made.notes
    assert r"| 1.50 \[1.50, 4.50\] × | products shared by 2 threads |" in to_markdown(made)
    assert numbers.of_paper(view)["sizes.threads.julia.count"]["value"] == 21
    few = {name: [row for row in found if row.get("round") != 8] for name, found in rows.items()}
    few["split"] = [row for row in few["split"] if row["round"] < 3]
    made = sizes_targets.sizes_threads(view_of(few, paper="sizes"))
    assert not any(row["julia_slower"] for row in made.rows), "of two rounds nothing is known"


@pytest.mark.parametrize(
    ("ratios", "slower"),
    [
        ([1.02] * 10, False),
        ([1.05] * 10, True),
        ([1.0] * 4 + [1.05] * 6, None),  # the median alone is above
        ([1.0] * 6 + [1.05] * 4, False),
        ([1.05] * 2, None),
    ],
)
def test_several_threads_are_slower_by_the_lower_end_and_undecided_by_the_median_alone(
    ratios: list[float], slower: bool | None, fake: ModuleType, view_of: ViewOf
) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    (first, *_) = [row for row in rows["split"] if row["engine"] == "julia"]
    rows["split"] = [
        first | {"round": number, "microseconds_per_step": 1e3 * ratio, "one_thread_microseconds": 1e3}
        for number, ratio in enumerate(ratios, start=1)
    ]
    (row,) = sizes_targets.thread_rows(view_of(rows, paper="sizes"))
    assert row["julia_slower"] is slower


def test_limits_are_shown_with_what_they_follow_from_where_the_table_has_it(view: View) -> None:
    made = sizes_targets.sizes_limits(view)
    assert len(made.rows) == 42 and "8.00, products" in to_markdown(made)
    assert any("the tidy table does not" in note for note in made.notes)
    rates = {"products_flops": 2e6, "moved_bytes": 3e6, "flops_per_second": 1.5e11, "bytes_per_second": 2e11}
    shown = sizes_targets.sizes_limits(with_columns(view, **rates))
    assert "| 2.00 | 150 | 3.00 MB | 200 GB/s |" in to_markdown(shown)


def test_the_text_says_how_many_steps_are_within_their_bound_and_which_are_furthest_above(view: View) -> None:
    found = numbers.of_paper(view)
    assert (found["sizes.2.numpy.count"]["text"], found["sizes.2.numpy.rows"]["text"]) == ("56", "84")
    assert (found["sizes.1.julia.count"]["text"], found["sizes.1.julia.rows"]["text"]) == ("42", "42")
    worst = found["sizes.2.numpy.worst"]
    assert worst["text"].count("mini-batch") == numbers.FURTHEST and formats.fixed(worst["value"]) in worst["text"]
    assert "sizes.2.julia.worst" not in found, "none is above"


def growth_alone(fake: ModuleType) -> dict[str, list[dict[str, Any]]]:
    """Invented rows of growth, without those of the other measures."""
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    return {name: found if name == "growth" else [] for name, found in rows.items()}


def grown(fake: ModuleType, view_of: ViewOf, power: float) -> View:
    """Invented rows in which the Julia engine's graphs, and steps over time, grow with a power of their size."""
    rows = growth_alone(fake)
    for row in rows["growth"]:
        if row["engine"] == "julia" and row["series"] in ("nodes", "length", "width"):
            row["seconds"] = 1e-6 * row["value"] ** power
            if row["series"] == "length" and row["what"] == "step":
                row["limit_seconds"] = row["seconds"] / 10
    return view_of(rows, paper="sizes")


def test_an_exponent_above_that_of_linear_work_is_marked_and_said_to_be_explained_or_not(
    fake: ModuleType, view_of: ViewOf
) -> None:
    made = growth_tables.growth(grown(fake, view_of, 1.2))
    said = "TwinGrad Julia, a graph, by nodes, eager gradient, 100 to 10,000: 1.20, steepest from "
    assert any(note.startswith(said) and note.endswith("; not explained.") for note in made.notes)
    explained = [note for note in made.notes if note.endswith("; the limit grows as fast.")]
    assert len(explained) == 1 and "LSTM, by steps in time, step" in explained[0]
    assert not any("units, step" in note for note in made.notes), "a width's square counts"
    assert "1.20 (—) ×" in to_markdown(made)
    assert "×" not in "".join(
        column.text(row) for row in growth_tables.growth(grown(fake, view_of, 1.0)).rows for column in made.columns
    )


@pytest.mark.parametrize(
    ("collecting", "system", "cache", "explanation"),
    [
        # By the nodes: 100, 1,000 and 10,000. All time beyond 1 ms for each node is that of collecting.
        (1.0, 0, 0, "); without collecting garbage (84 % of the longest): 1.00; which explains it."),
        (0.5, 0, 0, "); without collecting garbage (42 % of the longest): 1.16; the rest is not explained."),
        (
            0.0,
            0,
            1000,
            " fits the largest cache and 1.20 from the largest that fits to the next; the rest is not explained.",
        ),
        (
            1.0,
            0,
            1000,
            " fits the largest cache and 1.00 from the largest that fits to the next; which explains it.",
        ),
        (1.0, 0, 10, "without collecting garbage (84 % of the longest): 1.00 among the others; which explains it."),
        (0.0, 1.0, 0, "; without the system's work, such as on fresh memory (84 % of the longest): 1.00; which"),
        (0.5, 0.5, 0, "; without the larger of collecting garbage (42 % of the longest) and the system's work, "),
        (0.5, 0.5, 0, " longest): 1.16; the rest is not explained."),  # the same seconds may be in both
        (0.001, 0, 0, "; not explained."),
    ],
)
def test_an_exponent_is_explained_by_collecting_garbage_by_the_system_and_by_the_caches(
    fake: ModuleType, view_of: ViewOf, collecting: float, system: float, cache: int, explanation: str
) -> None:
    rows = growth_alone(fake)
    for row in rows["growth"]:
        if (row["engine"], row["series"]) == ("julia", "nodes"):
            linear, row["seconds"] = 1e-3 * row["value"], 1e-3 * row["value"] ** 1.2
            row |= {"collecting_seconds": collecting * (row["seconds"] - linear)}
            row |= {"system_seconds": system * (row["seconds"] - linear)}
            row |= {"held_bytes": row["value"], "cache_bytes": cache}
    (said,) = [note for note in growth_tables.growth(view_of(rows, paper="sizes")).notes if "eager gradient" in note]
    assert explanation in said


@pytest.mark.parametrize(
    ("seconds", "cache", "marked", "explained"),
    [
        ((1e-4, 1e-3, 1e-2), 10**9, False, None),
        ((9e-4, 1e-3, 1.2e-2), 500, True, False),  # 0.56 in all, 1.08 among the others
        ((1e-4, 1e-3, 2e-2), 5000, True, False),  # 1.15 in all: one size alone is beyond the cache
        ((1e-4, 3e-4, 2.1e-3), 5000, False, None),
        ((1e-3, 2e-3, 2.4e-2), 10**9, True, False),  # 0.69 in all, 1.08 of the two largest
        ((1e-3, 2e-3, 2.4e-2), 5000, True, False),  # of which one alone is beyond the cache
    ],
)
def test_growth_within_a_level_of_memory_is_judged_too(
    seconds: tuple[float, ...],
    cache: int,
    marked: bool,
    explained: bool | None,
    fake: ModuleType,
    view_of: ViewOf,
) -> None:
    rows = growth_alone(fake)
    for row in rows["growth"]:
        if (row["engine"], row["series"], row["what"]) == ("julia", "nodes", "eager gradient"):
            row |= {"seconds": dict(zip((100, 1000, 10_000), seconds, strict=True))[row["value"]]}
            row |= {"held_bytes": row["value"], "cache_bytes": cache, "collecting_seconds": 0.0}
            row |= {"system_seconds": 0.0}
    made = growth_tables.growth(view_of(rows, paper="sizes"))
    (row,) = [row for row in made.rows if row["at"].startswith("eager gradient")]
    assert growth_tables._is_above(row, "julia") is marked
    notes = [note for note in made.notes if note.startswith("TwinGrad Julia, a graph, by nodes, eager gradient")]
    assert len(notes) == marked and all(note.endswith("which explains it.") is explained for note in notes)


def test_a_limit_that_grows_as_fast_in_all_does_not_explain_a_level_of_memory(
    fake: ModuleType, view_of: ViewOf
) -> None:
    rows = growth_alone(fake)
    for row in rows["growth"]:
        if (row["engine"], row["series"], row["what"]) == ("julia", "vocabulary", "step"):
            row |= {"seconds": {100: 1e-4, 1000: 1e-4 * 10**1.2, 10_000: 1e-2}[row["value"]]}  # 1.00 in all
            row |= {"limit_seconds": 1e-8 * row["value"], "held_bytes": row["value"], "cache_bytes": 5000}
    (said,) = [note for note in growth_tables.growth(view_of(rows, paper="sizes")).notes if "by words, step" in note]
    places = "1.20 among the sizes whose memory fits the largest cache and 0.80 from the largest that fits to the next"
    assert said.endswith(f"{places}; the rest is not explained.")


def test_start_ups_have_their_targets_among_the_times_that_grow(fake: ModuleType, view_of: ViewOf) -> None:
    rows = growth_alone(fake)
    for row in rows["growth"]:
        if (row["engine"], row["series"], row["what"], row["value"]) == ("numpy", "width", "start-up", 10_000):
            row["seconds"] = 0.4
    made = growth_tables.growth_seconds(view_of(rows, paper="sizes"))
    (row,) = [row for row in made.rows if row["missed"]]
    assert (row["what"], row["value"], row["missed"]) == ("start-up", 10_000, ["numpy"])
    assert row["numpy_target_s"] == 0.3 and "400 ms ×" in to_markdown(made)


def test_exponents_without_an_explanation_are_counted(fake: ModuleType, view_of: ViewOf) -> None:
    found = growth_tables.unexplained(grown(fake, view_of, 1.2))
    assert found[0] == 2 and growth_tables.unexplained(grown(fake, view_of, 1.0)) == (0, found[1])


def test_sizes_that_an_exponent_does_not_have_are_named(fake: ModuleType, view_of: ViewOf) -> None:
    rows = growth_alone(fake)
    rows["growth"] = [
        row for row in rows["growth"] if (row["engine"], row["series"], row["value"]) != ("numpy", "nodes", 10_000)
    ]
    for row in rows["growth"]:
        if (row["engine"], row["series"], row["value"], row["what"]) == ("julia", "width", 100, "start-up"):
            row["seconds"] = 0.0
    made = growth_tables.growth(view_of(rows, paper="sizes"))
    assert (
        "TwinGrad numpy, a graph, by nodes, eager gradient, 100 to 10,000: up to 1,000 alone; nothing larger follows a "
        "call of over 30 s." in made.notes
    )
    said = "at 100 no time was left over, and the exponent is that of the others."
    assert [note for note in made.notes if "left over" in note] == [
        f"TwinGrad Julia, MLP, by units, start-up, 100 to 10,000: {said}"
    ]
    (row,) = [row for row in made.rows if row["group"] == "MLP, by units" and row["at"].startswith("start-up")]
    assert row["julia_exponent"] == pytest.approx(1)


def test_times_of_graphs_are_shown_beside_their_targets(fake: ModuleType, view_of: ViewOf) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    nodes = [row for row in rows["growth"] if row["series"] == "nodes"]
    for row in nodes:
        if (row["engine"], row["value"]) == ("numpy", 10_000):
            row["seconds"] = 2e-4  # PyTorch takes 1e-4
    for row in rows["growth"]:
        if (row["engine"], row["what"]) == ("julia", "step"):
            row["threads_in_step"] = "one thread"
    calls = {"numpy": 0.021, "julia": 0.019}
    rows["growth"] += [
        row | {"what": "first call, compiled", "seconds": calls[row["engine"]]}
        for row in nodes
        if row["value"] == 100 and row["engine"] in calls
    ]
    view = view_of(rows, paper="sizes")
    made = growth_tables.growth_seconds(view)
    assert made.notes[0].endswith("× marks a time above its target: 2 of 21.")
    assert {(row["what"], row["value"]): row["missed"] for row in made.rows if row["held"]} == {
        ("eager gradient", 10_000): ["numpy"],
        ("first call, compiled", 100): ["numpy"],
        **{("start-up", value): [] for value in (100, 1000, 10_000)},
    }
    assert "| 21.0 ms × | 19.0 ms | — |" in to_markdown(made)
    assert all(
        column.text(row).endswith("s, one thread") == (row["what"] == "step" and column.header == "TwinGrad Julia")
        for row in made.rows
        for column in made.columns
    )
    found = numbers.of_paper(view)
    assert (found["sizes.growth.count"]["text"], found["sizes.growth.rows"]["text"]) == ("2", "21")


@pytest.mark.parametrize(("low", "missed"), [(0.97, []), (1.01, ["numpy"])])
def test_what_was_called_alternately_is_judged_by_its_ratio(
    low: float, missed: list[str], fake: ModuleType, view_of: ViewOf
) -> None:
    rows = fake.rows("sizes", seeds=0, data_source="generated")
    for row in rows["growth"]:
        if (row["engine"], row["series"], row["value"]) == ("numpy", "nodes", 10_000):
            row |= {"seconds": 2e-4, "peer_ratio": 1.02, "peer_low": low, "peer_high": 1.04}  # PyTorch takes 1e-4
    made = growth_tables.growth_seconds(view_of(rows, paper="sizes"))
    (judged,) = (row for row in made.rows if row["held"] and row["against"] == growth.NODES)
    assert judged["missed"] == missed
    assert f"numpy: PyTorch's (1.02 [{low}, 1.04])" in [made.columns[-1].text(judged)]


def test_tables_of_a_study_that_was_not_run_say_so(view_of: ViewOf) -> None:
    view = view_of({name: [] for name in COLUMNS}, paper="sizes")
    for make in (
        *(sizes.sizes, sizes.sizes_held, sizes.sizes_ablation),
        *(sizes_targets.sizes_start, sizes_targets.sizes_memory, sizes_targets.sizes_threads),
        *(sizes_targets.sizes_limits, growth_tables.growth, growth_tables.growth_seconds),
    ):
        made = make(view)
        assert not made.rows and made.notes
    assert not any(name.startswith("sizes.") for name in numbers.of_paper(view))


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    assert growth_tables.exponent([1, 10, 100], [3, 30, 300]) == pytest.approx(1)
    assert growth_tables.exponent([2, 2], [1, 2]) is None
    assert growth_tables.exponent([1, 10], [0, 1]) is None, "no time was left over of a start-up"


def test_the_committed_run_says_where_its_rows_come_from_and_how_all_of_it_grows() -> None:
    view = paper_view(PAPER, Tidy.load(papers.PAPERS_DIR.parents[1] / "paper" / "results"))
    made = {row["engine"]: row for row in tables.provenance(view).rows}
    for name in ("numpy", "julia", "torch", "tensorflow", "jax"):
        assert made[name]["group"].startswith("Measured here, ") and made[name]["version"] and made[name]["blas"]
    growth = growth_tables.growth(view).rows
    assert {row["against"] for row in growth} == {"batch", "size", *(one.over for one in PAPER.series), "nodes"}
    assert all(row["numpy_exponent"] is not None and row["julia_exponent"] is not None for row in growth)
