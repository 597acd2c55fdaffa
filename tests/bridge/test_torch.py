"""PyTorch behind the protocol: its layers compute what the spec says, from our parameters and in our layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from bridge import registry, spec, weights  # noqa: E402
from bridge.adapters.torch import TorchSession  # noqa: E402
from bridge.layers import Geometry  # noqa: E402
from bridge.session import Optimizer  # noqa: E402
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


def windows(x: Array, at: Geometry, fill: float) -> Array:
    """(N, channels, *places, *size): what every window sees of x (N, channels, ...), its padding being `fill`."""
    x = np.pad(x, [(0, 0), (0, 0), *at.padding], constant_values=fill)
    axes = tuple(range(2, x.ndim))
    seen = np.lib.stride_tricks.sliding_window_view(x, at.extent, axes)
    places = tuple(slice(None, None, stride) for stride in at.stride)
    elements = tuple(slice(None, None, dilation) for dilation in at.dilation)
    return seen[:, :, *places, *elements]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1, "stride": 2},
        {"padding": [2, 0], "dilation": 2},
        {"groups": 2, "bias": False},
        {"groups": 4, "filters": 8, "padding": [0, 1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["conv1d", "conv2d"])
def test_convolutions_are_cross_correlations(
    op: str, options: dict[str, Any], model: Made, build: Made, random_data: Made
) -> None:
    layer = {"id": "conv", "op": op, "filters": 6, "kernel": 3} | options
    if op == "conv2d" and isinstance(options.get("padding"), list):
        layer["padding"] = [options["padding"], [1, 1]]
    network = model([4, 9] if op == "conv1d" else [4, 9, 8], layer, loss="mean_squared_error", dtype="float64")
    session, (x, _) = build(network), random_data(network, 5, "float64")
    p, conv = session.params(), network.layers[0]
    axes = len(conv.geometry.size)
    seen = np.split(windows(x, conv.geometry, 0.0), conv.groups, 1)
    filters = np.split(p["conv.weight"], conv.groups)
    shared = [1, *range(-axes, 0)]
    parts = [np.tensordot(a, b, (shared, range(1, 2 + axes))) for a, b in zip(seen, filters, strict=True)]
    expected = np.moveaxis(np.concatenate(parts, -1) + p.get("conv.bias", 0.0), -1, 1)
    np.testing.assert_allclose(session.predict(x), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ([3, 9], {"window": 2}),
        ([3, 9], {"window": 4, "stride": 3, "padding": 2}),
        ([3, 9], {"window": 3, "padding": [0, 1]}),
        ([3, 9, 7], {"window": [2, 3]}),
        ([3, 9, 7], {"window": [3, 2], "stride": 1, "padding": [[1, 0], [0, 1]]}),
    ],
)
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pools(kind: str, shape: list[int], layer: dict[str, Any], model: Made, build: Made, random_data: Made) -> None:
    below = {"op": "conv1d" if len(shape) == 2 else "conv2d", "filters": 3, "kernel": 1, "groups": 3, "bias": False}
    pool = {"op": f"{kind}_pool{len(shape) - 1}d"} | layer
    network = model(shape, below | {"id": "below"}, pool, loss="mean_squared_error", dtype="float64")
    session, (x, _) = build(network), random_data(network, 5, "float64")
    x_pooled = x * session.params()["below.weight"].reshape(3, *[1] * (len(shape) - 1))
    seen = windows(x_pooled, network.layers[1].geometry, -np.inf if kind == "max" else 0.0)
    axes = tuple(range(1 - len(shape), 0))
    expected = seen.max(axes) if kind == "max" else seen.mean(axes)
    np.testing.assert_allclose(session.predict(x), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "reference"),
    [
        ({"op": "global_max_pool"}, lambda a, p: a.max((2, 3))),
        ({"op": "global_avg_pool"}, lambda a, p: a.mean((2, 3))),
        ({"op": "permute_dims", "axes": [2, 0, 1]}, lambda a, p: a.transpose(0, 3, 1, 2)),
        (
            {"op": "rbf", "units": 6},
            lambda a, p: np.exp(-p["a.beta"] * ((a[..., None, :] - p["a.centers"]) ** 2).sum(-1)),
        ),
        (
            {"op": "layer_norm", "eps": 0.1},
            lambda a, p: (
                (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 0.1) * p["a.scale"] + p["a.shift"]
            ),
        ),
        (
            {"op": "batch_norm", "eps": 0.1},
            lambda a, p: np.moveaxis(
                (np.moveaxis(a, 1, -1) - p["a.running_mean"]) / np.sqrt(p["a.running_var"] + 0.1) * p["a.scale"]
                + p["a.shift"],
                -1,
                1,
            ),
        ),
    ],
    ids=lambda value: value["op"] if isinstance(value, dict) else "",
)
def test_other_layers(layer: dict[str, Any], reference: Made, model: Made, build: Made, random_data: Made) -> None:
    below = {"id": "below", "op": "dense", "units": 5}
    network = model([4, 6, 3], below, layer | {"id": "a"}, loss="mean_squared_error", dtype="float64")
    session, (x, _) = build(network), random_data(network, 5, "float64")
    p = session.params()
    a = x @ p["below.weight"] + p["below.bias"]
    np.testing.assert_allclose(session.predict(x), reference(a, p), atol=1e-12)


def test_running_statistics_follow_the_batches(model: Made, build: Made, random_data: Made) -> None:
    below = {"id": "below", "op": "dense", "units": 5}
    norm = {"id": "a", "op": "batch_norm", "momentum": 0.3}
    network = model([4, 3], below, norm, loss="mean_squared_error", dtype="float64")
    session, (x, y) = build(network), random_data(network, 4, "float64")
    before = session.params()
    session.loss_and_gradients(x, y)
    np.testing.assert_array_equal(session.params()["a.running_mean"], before["a.running_mean"])
    session.train_epoch(x, y, np.arange(4))
    a = (x @ before["below.weight"] + before["below.bias"]).swapaxes(0, 1).reshape(4, -1)
    for name, now in {"running_mean": a.mean(1), "running_var": a.var(1, ddof=1)}.items():
        expected = 0.7 * before[f"a.{name}"] + 0.3 * now
        np.testing.assert_allclose(session.params()[f"a.{name}"], expected, atol=1e-12)


def test_an_embedding_leaves_the_row_of_padding_alone(model: Made, build: Made) -> None:
    embedding = {"id": "a", "op": "embedding", "vocabulary": 5, "dimension": 3, "padding_index": 2}
    network = model([2], embedding, loss="mean_squared_error")
    session = build(network)
    ids, y = np.array([[0, 2], [2, 3]]), np.zeros((2, 2, 3))
    before = session.params()["a.weight"]
    np.testing.assert_array_equal(session.predict(ids), before[ids])
    _, gradients = session.loss_and_gradients(ids, y)
    assert gradients["a.weight"].any(1).tolist() == [True, False, False, True, False]
    session.train_epoch(ids, y, np.arange(2))
    changed = (session.params()["a.weight"] != before).any(1)
    assert changed.tolist() == [True, False, False, True, False]


# --- Torch's own initial parameters ---


def test_own_parameters_are_those_of_torchs_layers() -> None:
    model = spec.load(Path(spec.__file__).parents[1] / "experiments" / "models" / "mnist-cnn-bias.toml")
    own = registry.get("torch").own_parameters(model, 7, "float32")
    torch.manual_seed(7)
    layers = {"conv": torch.nn.Conv2d(1, 6, 3), "hidden": torch.nn.Linear(1014, 84), "output": torch.nn.Linear(84, 10)}
    assert list(own) == list(model.parameters())
    for name, layer in layers.items():
        weight = layer.weight.detach().numpy()
        np.testing.assert_array_equal(own[f"{name}.weight"], weight if name == "conv" else weight.T)
        np.testing.assert_array_equal(own[f"{name}.bias"], layer.bias.detach().numpy())


@pytest.mark.parametrize(
    "layer", [{"op": "rnn"}, {"op": "rnn", "activation": "identity"}, {"op": "lstm"}, {"op": "gru"}], ids=str
)
def test_own_parameters_of_recurrent_layers_fill_torchs_interval(layer: dict[str, Any], model: Made) -> None:
    network = model([3, 2], layer | {"id": "a", "units": 16})
    own = TorchSession.own_parameters(network, 1)
    weights.check(own, network)
    assert all(abs(array).max() <= 0.25 for array in own.values())
    assert all(abs(own[name]).max() > 0.2 for name in ("a.weight", "a.recurrent"))


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
    available = registry.availability("torch-compile")
    if not available.ok:
        pytest.skip(available.reason)
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 16)
    sessions = [
        registry.get(name).build(small_paper_model, params, Optimizer("adam", 0.01), 8, "float32", 1)
        for name in ("torch", "torch-compile")
    ]
    for _ in range(3):
        eager, compiled = (session.train_epoch(x, y, np.arange(16)) for session in sessions)
        np.testing.assert_allclose(compiled, eager, rtol=1e-5)
    (_, eager_gradients), (_, compiled_gradients) = (session.loss_and_gradients(x[:8], y[:8]) for session in sessions)
    for name, array in eager_gradients.items():
        np.testing.assert_allclose(compiled_gradients[name], array, rtol=1e-3, atol=1e-6)
    assert sessions[1].evaluate(x, y).loss == pytest.approx(sessions[0].evaluate(x, y).loss, rel=1e-5)
