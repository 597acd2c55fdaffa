"""PyTorch behind the protocol: its layers compute what the spec says, from our parameters and in our layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from bridge import engine  # noqa: E402
from bridge.adapters.torch import TorchSession  # noqa: E402
from bridge.engine import Optimizer  # noqa: E402
from bridge.spec import ModelSpec  # noqa: E402

Array = NDArray[Any]
Made = Callable[..., Any]
SGD = Optimizer("sgd", 0.1)
FUNCTIONS = {"identity": lambda a: a, "tanh": np.tanh, "relu": lambda a: np.maximum(a, 0)}


def sigmoid(a: Array) -> Array:
    return 1 / (1 + np.exp(-a))


def rnn(x: Array, weight: Array, recurrent: Array, bias: Array, activation: str = "tanh") -> Array:
    state, states = np.zeros((len(x), len(recurrent))), []
    for step in range(x.shape[1]):
        state = FUNCTIONS[activation](x[:, step] @ weight + state @ recurrent + bias)
        states.append(state)
    return np.stack(states, 1)


def lstm(x: Array, weight: Array, recurrent: Array, bias: Array) -> Array:
    state = cell = np.zeros((len(x), len(recurrent)))
    states = []
    for step in range(x.shape[1]):
        i, f, g, o = np.split(x[:, step] @ weight + state @ recurrent + bias, 4, axis=1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        state = sigmoid(o) * np.tanh(cell)
        states.append(state)
    return np.stack(states, 1)


def gru(x: Array, weight: Array, recurrent: Array, bias: Array) -> Array:
    state, states = np.zeros((len(x), len(recurrent))), []
    for step in range(x.shape[1]):
        xr, xz, xn = np.split(x[:, step] @ weight + bias, 3, axis=1)
        hr, hz, hn = np.split(state @ recurrent, 3, axis=1)
        n = np.tanh(xn + sigmoid(xr + hr) * hn)
        z = sigmoid(xz + hz)
        state = (1 - z) * n + z * state
        states.append(state)
    return np.stack(states, 1)


@pytest.fixture
def build(random_params: Made) -> Callable[..., TorchSession]:
    """A session in float64, or of another engine of the same kind, from random parameters."""

    def make(model: ModelSpec, kind: type[TorchSession] = TorchSession, optimizer: Optimizer = SGD) -> TorchSession:
        return kind(model, random_params(model, "float64"), optimizer, 4, "float64", 1)

    return make


# --- Layers ---


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("returns", ["last", "sequence"])
@pytest.mark.parametrize(
    ("layer", "reference"),
    [
        ({"op": "rnn"}, rnn),
        ({"op": "rnn", "activation": "relu"}, lambda *a: rnn(*a, activation="relu")),
        ({"op": "rnn", "activation": "identity"}, lambda *a: rnn(*a, activation="identity")),
        ({"op": "lstm"}, lstm),
        ({"op": "gru"}, gru),
    ],
)
def test_recurrent_layers_are_those_of_the_spec(
    layer: dict[str, Any], reference: Made, returns: str, unrolled: bool, model: Made, build: Made, random_data: Made
) -> None:
    from bridge.adapters.torch_compile import TorchCompileSession

    network = model(
        [5, 3], {"id": "layer", "units": 4, "returns": returns, **layer}, loss="mean_squared_error", dtype="float64"
    )
    session = build(network, TorchCompileSession if unrolled else TorchSession)  # predicts without compiling
    x, _ = random_data(network, 6, "float64")
    params = session.params()
    expected = reference(x, params["layer.weight"], params["layer.recurrent"], params["layer.bias"])
    np.testing.assert_allclose(session.predict(x), expected if returns == "sequence" else expected[:, -1], atol=1e-12)


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        *FUNCTIONS.items(),
        ("sigmoid", sigmoid),
        ("softplus", lambda a: np.logaddexp(0, a)),
        ("softmax", lambda a: np.exp(a) / np.exp(a).sum(-1, keepdims=True)),
    ],
)
def test_activations(function: str, reference: Made, model: Made, build: Made, rng: np.random.Generator) -> None:
    layers = {"id": "dense", "op": "dense", "units": 3}, {"op": "activation", "activation": function}
    session = build(model([2, 3], *layers, loss="mean_squared_error", dtype="float64"))
    x = rng.standard_normal((5, 2, 3))
    p = session.params()
    np.testing.assert_allclose(session.predict(x), reference(x @ p["dense.weight"] + p["dense.bias"]), atol=1e-12)


def test_dense_works_on_the_last_axis_and_reshapes_are_in_c_order(model: Made, build: Made, random_data: Made) -> None:
    network = model(
        [2, 6],
        {"op": "reshape", "shape": [4, 3]},
        {"id": "plain", "op": "dense", "units": 5, "bias": False},
        {"op": "flatten"},
        {"id": "out", "op": "dense", "units": 2},
        dtype="float64",
    )
    session = build(network)
    x, _ = random_data(network, 5, "float64")
    p = session.params()
    hidden = (x.reshape(5, 4, 3) @ p["plain.weight"]).reshape(5, 20)
    np.testing.assert_allclose(session.predict(x), hidden @ p["out.weight"] + p["out.bias"], atol=1e-12)


def test_dropout_drops_in_training_and_only_there(model: Made, build: Made) -> None:
    layers = {"op": "dropout", "rate": 0.25}, {"id": "dense", "op": "dense", "units": 1, "bias": False}
    session = build(model([10_000], *layers, loss="mean_squared_error", dtype="float64"))
    x, y = np.ones((1, 10_000)), np.ones((1, 1))
    assert session.predict(x).item() == pytest.approx(session.params()["dense.weight"].sum())
    _, gradients = session.loss_and_gradients(x, y)
    values, counts = np.unique(np.abs(gradients["dense.weight"]), return_counts=True)
    assert values[0] == 0
    assert len(values) == 2
    assert 0.22 < counts[0] / counts.sum() < 0.28


# --- Losses ---


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "binary_cross_entropy", "mean_squared_error"])
def test_losses_and_accuracies(loss: str, model: Made, build: Made, random_data: Made) -> None:
    units = 3 if loss == "softmax_cross_entropy" else 1
    network = model([2], {"op": "dense", "units": units}, loss=loss, dtype="float64")
    session = build(network)
    x, y = random_data(network, 2500, "float64")
    out = session.predict(x)
    if loss == "softmax_cross_entropy":
        log_softmax = out - np.log(np.exp(out).sum(1, keepdims=True))
        expected, accuracy = -log_softmax[np.arange(2500), y].mean(), (out.argmax(1) == y).mean()
    elif loss == "binary_cross_entropy":
        expected = -(y * np.log(sigmoid(out)) + (1 - y) * np.log(1 - sigmoid(out))).mean()
        accuracy = ((out > 0) == (y > 0.5)).mean()
    else:
        expected, accuracy = ((out - y) ** 2).mean(), np.nan
    found = session.evaluate(x, y)
    assert found.loss == pytest.approx(expected)
    assert session.loss_and_gradients(x, y)[0] == pytest.approx(expected)
    np.testing.assert_allclose(found.accuracy, accuracy)


def test_targets_of_one_number_need_no_axis_of_their_own(model: Made, build: Made, random_data: Made) -> None:
    network = model([2], {"op": "dense", "units": 1}, loss="binary_cross_entropy", dtype="float64")
    session = build(network)
    x, y = random_data(network, 10, "float64")
    assert session.evaluate(x, y[:, 0]) == session.evaluate(x, y)


def test_classes_after_every_step(model: Made, build: Made, random_data: Made) -> None:
    network = model([5, 3], {"op": "rnn", "units": 4, "returns": "sequence"}, dtype="float64")
    session = build(network)
    x, y = random_data(network, 10, "float64")
    assert y.shape == (10, 5)
    out = session.predict(x)
    log_softmax = out - np.log(np.exp(out).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_softmax, y[..., None], -1).mean()
    assert session.evaluate(x, y).loss == pytest.approx(expected)
    assert session.evaluate(x, y).accuracy == (out.argmax(-1) == y).mean()


# --- The layout of parameters ---


@pytest.mark.parametrize("op", ["rnn", "lstm", "gru"])
def test_the_second_bias_stays_zero(op: str, model: Made, build: Made, random_data: Made) -> None:
    network = model([3, 2], {"op": op, "units": 4}, dtype="float64")
    session = build(network)
    x, y = random_data(network, 8, "float64")
    session.train_epoch(x, y, np.arange(8))
    (second,) = (p for name, p in session._model.named_parameters() if "bias_hh" in name)
    assert not second.any()
    assert second.grad is None


def test_parameters_are_copies(small_paper_model: ModelSpec, build: Made, random_data: Made) -> None:
    session = build(small_paper_model)
    x, y = random_data(small_paper_model, 8, "float64")
    before = session.params()
    kept = {name: array.copy() for name, array in before.items()}
    session.train_epoch(x, y, np.arange(8))
    for name, array in before.items():
        np.testing.assert_array_equal(array, kept[name])
        assert array.flags.c_contiguous
        assert not np.array_equal(array, session.params()[name])


# --- Compiled ---


def test_compiled_training_is_eager_training(
    small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    available = engine.availability("torch-compile")
    if not available.ok:
        pytest.skip(available.reason)
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 16)
    sessions = [
        engine.get(name).build(small_paper_model, params, Optimizer("adam", 0.01), 8, "float32", 1)
        for name in ("torch", "torch-compile")
    ]
    for _ in range(3):
        eager, compiled = (session.train_epoch(x, y, np.arange(16)) for session in sessions)
        np.testing.assert_allclose(compiled, eager, rtol=1e-5)
    (_, eager_gradients), (_, compiled_gradients) = (session.loss_and_gradients(x[:8], y[:8]) for session in sessions)
    for name, array in eager_gradients.items():
        np.testing.assert_allclose(compiled_gradients[name], array, rtol=1e-3, atol=1e-6)
    assert sessions[1].evaluate(x, y).loss == pytest.approx(sessions[0].evaluate(x, y).loss, rel=1e-5)
