"""The engines agree: same losses and gradients from the same weights and order, whatever the layers and optimizer.

Gradients agree to ‖a - b‖ / ‖b‖ of 1e-5 in float32 and 1e-10 in float64, for each parameter, with PyTorch as b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from bridge import engine
from bridge.engine import Optimizer, Session
from bridge.spec import ModelSpec

Made = Callable[..., Any]
SGD = Optimizer("sgd", 0.015)
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

RNN = {"op": "rnn", "units": 6}
SEGMENTS = {"op": "reshape", "shape": [4, 3]}
DENSE = {"op": "dense", "units": 4}
MODELS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "mlp": ([{"op": "dense", "units": 8}, {"op": "activation", "activation": "relu"}, DENSE], "softmax_cross_entropy"),
    "dense without bias": ([DENSE | {"bias": False}], "mean_squared_error"),
    "activations": (
        [
            *(
                layer
                for name in ("tanh", "sigmoid", "softplus", "identity", "softmax")
                for layer in ({"op": "dense", "units": 7}, {"op": "activation", "activation": name})
            ),
            {"op": "dense", "units": 1},
        ],
        "binary_cross_entropy",
    ),
    "rnn relu": ([SEGMENTS, RNN | {"activation": "relu"}, DENSE], "softmax_cross_entropy"),
    "rnn identity": ([SEGMENTS, RNN | {"activation": "identity"}, DENSE], "softmax_cross_entropy"),
    "rnn of one step": ([{"op": "reshape", "shape": [1, 12]}, RNN, DENSE], "softmax_cross_entropy"),
    "rnn on rnn": ([SEGMENTS, RNN | {"returns": "sequence"}, RNN, DENSE], "softmax_cross_entropy"),
    "many to many": ([SEGMENTS, RNN | {"returns": "sequence"}, DENSE], "softmax_cross_entropy"),
    "lstm": ([SEGMENTS, {"op": "lstm", "units": 5}, DENSE], "softmax_cross_entropy"),
    "lstm sequence": ([SEGMENTS, {"op": "lstm", "units": 5, "returns": "sequence"}, DENSE], "mean_squared_error"),
    "gru": ([SEGMENTS, {"op": "gru", "units": 5}, DENSE], "softmax_cross_entropy"),
    "gru sequence": (
        [SEGMENTS, {"op": "gru", "units": 5, "returns": "sequence"}, {"op": "flatten"}, DENSE],
        "mean_squared_error",
    ),
}


def build(name: str, model: ModelSpec, params: Any, optimizer: Optimizer, dtype: str, batch_size: int = 8) -> Session:
    return engine.get(name).build(model, params, optimizer, batch_size, dtype, 1)


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        distance, size = np.linalg.norm(found[name] - array), np.linalg.norm(array)
        assert distance <= tolerance * size, f"{name}: ‖a - b‖ = {distance:.2e}, ‖b‖ = {size:.2e}"


@pytest.mark.parametrize("name", ["numpy", "manual"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_papers_network_has_the_gradients_of_torch(
    name: str, dtype: str, paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(paper_model, dtype, 0.1), random_data(paper_model, 100, dtype)
    loss, gradients = build(name, paper_model, params, SGD, dtype).loss_and_gradients(x, y)
    torch_loss, torch_gradients = build("torch", paper_model, params, SGD, dtype).loss_and_gradients(x, y)
    assert loss == pytest.approx(torch_loss, rel=TOLERANCE[dtype])
    assert_close(gradients, torch_gradients, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["numpy", "manual"])
def test_the_papers_network_trains_as_in_torch(
    name: str, paper_model: ModelSpec, random_params: Made, random_data: Made, rng: np.random.Generator
) -> None:
    params, (x, y) = random_params(paper_model, scale=0.1), random_data(paper_model, 1050)
    ours, theirs = (build(engine_name, paper_model, params, SGD, "float32", 100) for engine_name in (name, "torch"))
    steps = 0
    while steps < 100:
        order = rng.permutation(1050)
        losses, torch_losses = ours.train_epoch(x, y, order), theirs.train_epoch(x, y, order)
        assert losses.dtype == np.float64
        assert len(losses) == 11
        np.testing.assert_allclose(losses, torch_losses, atol=1e-4)
        steps += len(losses)
    assert_close(ours.params(), theirs.params(), 1e-4)
    assert ours.evaluate(x, y).loss == pytest.approx(theirs.evaluate(x, y).loss, abs=1e-4)
    assert ours.evaluate(x, y).accuracy == pytest.approx(theirs.evaluate(x, y).accuracy, abs=2 / 1050)
    np.testing.assert_allclose(ours.predict(x), theirs.predict(x), atol=1e-4)


@pytest.mark.parametrize("network", MODELS)
def test_every_layer_has_the_gradients_of_torch(
    network: str, model: Made, random_params: Made, random_data: Made
) -> None:
    layers, loss_op = MODELS[network]
    spec = model([12], *layers, loss=loss_op, dtype="float64")
    params, (x, y) = random_params(spec, "float64"), random_data(spec, 9, "float64")
    loss, gradients = build("numpy", spec, params, SGD, "float64").loss_and_gradients(x, y)
    torch_loss, torch_gradients = build("torch", spec, params, SGD, "float64").loss_and_gradients(x, y)
    assert loss == pytest.approx(torch_loss, rel=1e-12)
    assert_close(gradients, torch_gradients, TOLERANCE["float64"])


@pytest.mark.parametrize("network", MODELS)
def test_every_network_is_evaluated_as_in_torch(
    network: str, model: Made, random_params: Made, random_data: Made
) -> None:
    layers, loss_op = MODELS[network]
    spec = model([12], *layers, loss=loss_op, dtype="float64")
    params, (x, y) = random_params(spec, "float64"), random_data(spec, 1100, "float64")
    ours, theirs = (build(name, spec, params, SGD, "float64") for name in ("numpy", "torch"))
    np.testing.assert_allclose(ours.predict(x), theirs.predict(x), atol=1e-12)
    found, expected = ours.evaluate(x, y), theirs.evaluate(x, y)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.accuracy == pytest.approx(expected.accuracy, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer("sgd", 0.1),
        Optimizer("sgd", 0.1, weight_decay=0.1),
        Optimizer("sgd", 0.1, momentum=0.9),
        Optimizer("sgd", 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        Optimizer("rmsprop", 0.01),
        Optimizer("rmsprop", 0.01, alpha=0.9, momentum=0.5, eps=1e-3, weight_decay=0.1),
        Optimizer("adam", 0.01),
        Optimizer("adam", 0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1),
        Optimizer("adamw", 0.01),
        Optimizer("adamw", 0.01, weight_decay=0.3),
        Optimizer("sgd", 0.5, clip_norm=0.1),
        Optimizer("adam", 0.01, clip_norm=0.1),
    ],
    ids=lambda optimizer: f"{optimizer.name} {optimizer.settings()}",
)
def test_every_optimizer_takes_the_steps_of_torch(
    optimizer: Optimizer, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model, "float64"), random_data(small_paper_model, 20, "float64")
    ours, theirs = (build(name, small_paper_model, params, optimizer, "float64") for name in ("numpy", "torch"))
    for _ in range(10):
        np.testing.assert_allclose(*(session.train_epoch(x, y, np.arange(20)) for session in (ours, theirs)), rtol=1e-9)
    assert_close(ours.params(), theirs.params(), 1e-9)
