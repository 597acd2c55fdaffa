"""The textbook steps compute what both engines compute, in float64: losses, gradients and the update."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from bridge import spec, weights
from bridge.libjulia.find import Julia
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments import papers, textbook

LINES = 40
"""At most, of a step and its update: they are printed."""

STUDIES = sorted({(module, papers.load_paper(study).model) for study, module in textbook.STEPS.items()})


@pytest.fixture(params=STUDIES, ids=lambda study: study[1])
def study(request: pytest.FixtureRequest) -> tuple[Any, ModelSpec]:
    module, model = request.param
    document = spec.load(papers.model_path(model)).model_dump(mode="json", exclude_none=True)
    if document["input"]["dtype"] == "float32":
        document["input"]["dtype"] = "float64"
    return import_module(f"experiments.textbook.{module}"), spec.parse(document, model)


def drawn(network: ModelSpec, rows: int) -> tuple[dict[str, Any], Any, Any]:
    """Parameters, features and targets at random."""
    rng = np.random.default_rng(7)
    params = weights.initialise(network, 7, "float64")
    params = {name: value + 0.01 * rng.standard_normal(value.shape) for name, value in params.items()}
    if network.vocabulary is not None:
        params["embedding.weight"][0] = 0
        x = rng.integers(0, 60, (rows, *network.input.sample))  # with repeats and padding
        return params, x, rng.integers(0, 2, (rows, 1)).astype(np.float64)
    return params, rng.random((rows, *network.input.sample)), rng.integers(0, 10, rows)


def compared(worker: Worker, study: tuple[Any, ModelSpec]) -> None:
    module, network = study
    params, x, y = drawn(network, 12)
    optimizer = Optimizer("sgd" if network.vocabulary is None else "adam", 0.01)
    worker.build(network, params, optimizer, 4, "float64")
    expected, gradients = worker.loss_and_gradients(x, y)
    losses = worker.train_epoch(x, y, np.arange(12))
    trained = worker.params()
    loss, found = module.step(params, x, y)
    assert loss == pytest.approx(expected, rel=1e-10)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-10, atol=1e-10 * abs(gradient).max(), err_msg=name)
    state: tuple[Any, ...] = () if network.vocabulary is None else ({},)
    own = {name: value.copy() for name, value in params.items()}
    for number in range(3):
        rows = slice(4 * number, 4 * number + 4)
        loss, found = module.step(own, x[rows], y[rows])
        assert loss == pytest.approx(losses[number], rel=1e-10)
        module.update(own, found, *state, 0.01)
    for name, value in trained.items():
        np.testing.assert_allclose(own[name], value, rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.fixture(scope="module")
def numpy_worker() -> Iterator[Worker]:
    with Worker("numpy", 1) as worker:
        yield worker


@pytest.fixture(scope="module")
def julia_worker(julia: Julia) -> Iterator[Worker]:
    """One process for all studies: Julia compiles anew in each."""
    with Worker("julia", 1) as worker:
        yield worker


def test_the_numpy_engine_computes_the_same(study: tuple[Any, ModelSpec], numpy_worker: Worker) -> None:
    compared(numpy_worker, study)


def test_the_julia_engine_computes_the_same(study: tuple[Any, ModelSpec], julia_worker: Worker) -> None:
    compared(julia_worker, study)


def test_every_study_has_one_that_is_short_enough_to_print() -> None:
    studies = set(papers.keys_of_others())
    assert {key.removesuffix("-batch100") for key in studies} == set(textbook.STEPS)
    for name in set(textbook.STEPS.values()):
        text = (papers.PAPERS_DIR.parent / "textbook" / f"{name}.py").read_text(encoding="utf-8")
        code = [line for line in text.partition("\ndef step")[2].splitlines() if line.strip()]
        assert len(code) <= LINES and all(len(line) <= 110 for line in code), name
