"""The hand-written Julia steps compute what the hand-written numpy steps compute, and refuse what those refuse.

Each session lives in a worker, since Julia and the torch of other tests must not share a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import spec
from bridge.adapters.manual import ManualSession
from bridge.errors import SpecError
from bridge.libjulia.find import Julia
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker
from py_engine.errors import ConfigurationError, LabelError, NonFiniteError, ShapeError

Made = Callable[..., Any]
SGD = Optimizer("sgd", 0.1)
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@pytest.fixture(scope="module", params=[1, 2])
def worker(julia: Julia, request: pytest.FixtureRequest) -> Iterator[Worker]:
    with Worker("manual-julia", request.param) as made:
        yield made


# For each network the bytes that Julia allocates in one call of 5 steps, and in one of 50.
ALLOCATIONS = """
import json, sys
import numpy as np
from bridge import spec, weights
from bridge.adapters.manual_julia import ManualJuliaSession
from bridge.session import Optimizer

def of_steps(name, threads):
    model, rng = spec.load(f"experiments/models/{name}.toml"), np.random.default_rng(0)
    if name == "imdb-cnn":
        x, y = rng.integers(0, 12849, (5000, 130)), rng.random((5000, 1), np.float32)
        optimizer = Optimizer("adam", 0.001)
    else:
        x, y, optimizer = rng.random((5000, 784), np.float32), rng.integers(0, 10, 5000), Optimizer("sgd", 0.01)
    made = weights.initialise(model, 0, np.float32)
    session = ManualJuliaSession(model, made, optimizer, 100, "float32", threads)

    def allocated(steps):
        session._steps_per_call = steps  # whatever the machine is busy with
        before, _ = session.allocated()
        session.train_epoch(x, y, np.arange(100 * steps))
        return session.allocated()[0] - before

    allocated(5)
    return [min(allocated(steps) for _ in range(3)) for steps in (5, 50)]

threads, *names = sys.argv[1:]
print(json.dumps({name: of_steps(name, int(threads)) for name in names}))
"""
PAPERS = ("mnist-rnn", "mnist-cnn", "imdb-cnn")
ROOT = Path(spec.__file__).parents[1]


def network(steps: int, features: int, units: int, classes: int) -> tuple[list[int], list[dict[str, Any]]]:
    return [steps * features], [
        {"id": "segments", "op": "reshape", "shape": [steps, features]},
        {"id": "rnn", "op": "rnn", "units": units},
        {"id": "output", "op": "dense", "units": classes},
    ]


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape
        distance, size = np.linalg.norm(found[name] - array), np.linalg.norm(array)
        assert distance <= tolerance * size, f"{name}: ‖a - b‖ = {distance:.2e}, ‖b‖ = {size:.2e}"


# Sizes that fill vectors and tiles, that do not, and that leave rows to BLAS.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(4, 196, 64, 10), (3, 5, 6, 4), (1, 7, 16, 3), (2, 3, 37, 20), (9, 1, 1, 2)])
def test_it_computes_what_the_numpy_step_computes(
    worker: Worker,
    sizes: tuple[int, int, int, int],
    dtype: str,
    model: Made,
    random_params: Made,
    random_data: Made,
    rng: np.random.Generator,
) -> None:
    shape, layers = network(*sizes)
    made = model(shape, *layers, dtype=dtype)
    params, (x, y) = random_params(made, dtype, 0.1), random_data(made, 253, dtype)
    order, tolerance = rng.permutation(253), TOLERANCE[dtype]
    worker.build(made, params, SGD, 25, dtype)
    twin = ManualSession(made, params, SGD, 25, dtype)
    for rows in (253, 25, 1):
        value, gradients = worker.loss_and_gradients(x[:rows], y[:rows])
        expected, expected_gradients = twin.loss_and_gradients(x[:rows], y[:rows])
        assert value == pytest.approx(expected, rel=tolerance)
        assert_close(gradients, expected_gradients, tolerance)
    assert_close(worker.params(), params, 0)
    for _ in range(2):  # the last batch has 3 rows
        losses = {"losses": worker.train_epoch(x, y, order)}
        assert_close(losses, {"losses": twin.train_epoch(x, y, order)}, tolerance)
    assert_close(worker.params(), twin.params(), 10 * tolerance)
    assert_close({"logits": worker.predict(x)}, {"logits": twin.predict(x)}, 10 * tolerance)
    found, other = worker.evaluate(x, y), twin.evaluate(x, y)
    assert found.loss == pytest.approx(other.loss, rel=10 * tolerance)
    assert found.accuracy == pytest.approx(other.accuracy, abs=1e-12)


def images(height: int, width: int, kernel: int = 3) -> tuple[list[int], list[dict[str, Any]], dict[str, str]]:
    layers = [
        {"op": "reshape", "shape": [1, height, width]},
        {"op": "conv2d", "filters": 3, "kernel": kernel, "bias": False},
        {"op": "activation", "activation": "relu"},
        {"op": "max_pool2d", "window": 2},
        {"op": "flatten"},
        {"op": "dense", "units": 7, "bias": False},
        {"op": "activation", "activation": "relu"},
        {"op": "dense", "units": 4, "bias": False},
    ]
    return [height * width], layers, {}


def text(
    kernel: int, window: int, filters: int, dimension: int, **embedding: Any
) -> tuple[list[int], list[dict[str, Any]], dict[str, str]]:
    layers = [
        {"op": "embedding", "vocabulary": 20, "dimension": dimension, **embedding},
        {"op": "permute_dims", "axes": [1, 0]},
        {"op": "conv1d", "filters": filters, "kernel": kernel},
        {"op": "activation", "activation": "relu"},
        {"op": "max_pool1d", "window": window},
        {"op": "flatten"},
        {"op": "dense", "units": 1},
    ]
    return [13], layers, {"loss": "binary_cross_entropy"}


CNNS = {
    "images": images(8, 8),
    "images that pools leave a part of": images(9, 11),
    "images wider than a vector": images(7, 43),
    "text": text(3, 2, 8, 4),
    "text with padding": text(2, 3, 3, 5, padding_index=0),
    "text with padding amid": text(1, 4, 11, 3, padding_index=3),
    "text with an embedding that is not trained": text(3, 2, 8, 4, trainable=False),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CNNS)
def test_convolutional_networks(
    worker: Worker, name: str, dtype: str, model: Made, random_params: Made, random_data: Made, rng: np.random.Generator
) -> None:
    shape, layers, loss = CNNS[name]
    made = model(shape, *layers, **loss, dtype=dtype)
    optimizer = SGD if made.vocabulary is None else Optimizer("adam", 0.01)
    params, (x, y) = random_params(made, dtype), random_data(made, 49 * 40 + 17, dtype)
    order, tolerance = rng.permutation(len(x)), TOLERANCE[dtype]
    worker.build(made, params, optimizer, 40, dtype)
    twin = ManualSession(made, params, optimizer, 40, dtype)
    for rows in (100, 40, 1):
        value, gradients = worker.loss_and_gradients(x[:rows], y[:rows])
        expected, others = twin.loss_and_gradients(x[:rows], y[:rows])
        assert value == pytest.approx(expected, rel=tolerance)
        assert set(gradients) == set(others)
        for key, gradient in gradients.items():
            size = max(np.linalg.norm(others[key]), 0.1)  # what nearly cancels keeps the error of its parts
            assert np.linalg.norm(gradient - others[key]) <= tolerance * size, key
    assert_close(worker.params(), params, 0)
    losses = {"losses": worker.train_epoch(x, y, order)}  # 50 steps, the last on 17 rows
    assert_close(losses, {"losses": twin.train_epoch(x, y, order)}, 10 * tolerance)
    assert_close({"logits": worker.predict(x)}, {"logits": twin.predict(x)}, 100 * tolerance)
    found, other = worker.evaluate(x, y), twin.evaluate(x, y)
    assert found.loss == pytest.approx(other.loss, rel=10 * tolerance)
    assert found.accuracy == pytest.approx(other.accuracy, abs=1.5 / len(x))


def test_images_are_known_with_one_size_of_kernel(worker: Worker, model: Made, random_params: Made) -> None:
    shape, layers, _ = images(9, 9, kernel=2)
    made = model(shape, *layers)
    with pytest.raises(SpecError, match=r"for a kernel of \[3, 3\].*found \[2, 2\] and \[2, 2\]"):
        worker.build(made, random_params(made), SGD, 4)


def test_a_batch_may_have_fewer_rows_than_there_are_threads(
    worker: Worker, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 3)
    worker.build(small_paper_model, params, SGD, 1)
    twin = ManualSession(small_paper_model, params, SGD, 1)
    order = np.array([2, 0, 1, 2])
    assert_close({"losses": worker.train_epoch(x, y, order)}, {"losses": twin.train_epoch(x, y, order)}, 1e-5)
    assert_close(worker.params(), twin.params(), 1e-5)


def test_a_partial_batch_sees_nothing_of_the_one_before(
    worker: Worker, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    worker.build(small_paper_model, params, SGD, 4)
    losses, after = worker.train_epoch(x, y, np.arange(10)), worker.params()
    worker.build(small_paper_model, params, SGD, 4)
    parts = [worker.train_epoch(x, y, np.arange(start, min(start + 4, 10))) for start in (0, 4, 8)]
    np.testing.assert_array_equal(losses, np.concatenate(parts))
    assert_close(worker.params(), after, 0)


@pytest.fixture(scope="module", params=[1, 2])
def allocations(julia: Julia, request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """Of the papers' networks, with one thread and with two."""
    command = [sys.executable, "-c", ALLOCATIONS, str(request.param), *PAPERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", PAPERS)
def test_steps_allocate_nothing(allocations: dict[str, list[int]], name: str) -> None:
    five, fifty = allocations[name]
    assert five < 10_000
    assert fifty - five < 45 * 16, "the smallest thing that Julia allocates has 16 bytes"


def test_large_logits_do_not_overflow(worker: Worker, small_paper_model: ModelSpec, random_params: Made) -> None:
    worker.build(small_paper_model, random_params(small_paper_model, scale=1000.0), SGD, 4)
    loss, gradients = worker.loss_and_gradients(np.ones((4, 15), np.float32), np.arange(4))
    assert np.isfinite(loss)
    assert all(np.isfinite(array).all() for array in gradients.values())


def test_mistakes_leave_the_session_usable(
    worker: Worker, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 12)
    worker.build(small_paper_model, params, SGD, 4)
    with pytest.raises(LabelError, match="from 0 to 3"):
        worker.train_epoch(x, y + 4, np.arange(12))
    with pytest.raises(ShapeError, match="order names row 12"):
        worker.train_epoch(x, y, np.arange(1, 13))
    with pytest.raises(ShapeError, match="x: expected shape"):
        worker.predict(x[:, 1:])
    assert_close(worker.params(), params, 0)
    assert np.isfinite(worker.train_epoch(np.asfortranarray(x), y, np.arange(12))).all()


def test_a_loss_that_is_not_finite_is_named_with_its_step(
    worker: Worker, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 12)
    worker.build(small_paper_model, params, SGD, 4)
    worker.train_epoch(x, y, np.arange(12))
    spoiled = x.copy()
    spoiled[4] = np.nan
    with pytest.raises(NonFiniteError, match=r"nan at step 5 of training \(step 2 of 3 in its epoch\)"):
        worker.train_epoch(spoiled, y, np.arange(12))


def test_other_networks_and_optimizers_are_refused(
    worker: Worker, model: Made, small_paper_model: ModelSpec, random_params: Made
) -> None:
    other = model([4], {"op": "dense", "units": 3})
    with pytest.raises(SpecError, match="the engine manual-julia is written by hand for reshape, rnn"):
        worker.build(other, random_params(other), SGD, 4)
    with pytest.raises(ConfigurationError, match="the engine manual-julia is written by hand for plain sgd"):
        worker.build(small_paper_model, random_params(small_paper_model), Optimizer("adam", 0.1), 4)
