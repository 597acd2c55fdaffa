"""The hand-written numpy steps: right by finite differences and beside the engine, and free of allocations."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bridge import registry
from bridge.adapters.manual import ManualSession
from bridge.errors import SpecError
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from py_engine.errors import ConfigurationError

Made = Callable[..., Any]
SGD = Optimizer("sgd", 0.1)


def layers(steps: int = 3, **rnn: Any) -> list[dict[str, Any]]:
    return [
        {"id": "segments", "op": "reshape", "shape": [steps, 15 // steps]},
        {"id": "rnn", "op": "rnn", "units": 6, **rnn},
        {"id": "output", "op": "dense", "units": 4},
    ]


def images(kernel: int = 3, window: int = 2, **conv: Any) -> list[dict[str, Any]]:
    return [
        {"id": "image", "op": "reshape", "shape": [1, 8, 9]},
        {"id": "conv", "op": "conv2d", "filters": 3, "kernel": kernel, "bias": False, **conv},
        {"id": "relu", "op": "activation", "activation": "relu"},
        {"id": "pool", "op": "max_pool2d", "window": window},
        {"id": "flat", "op": "flatten"},
        {"id": "hidden", "op": "dense", "units": 7, "bias": False},
        {"id": "relu2", "op": "activation", "activation": "relu"},
        {"id": "output", "op": "dense", "units": 4, "bias": False},
    ]


def text(kernel: int = 3, window: int = 2, dimension: int = 4, **embedding: Any) -> list[dict[str, Any]]:
    return [
        {"id": "embedding", "op": "embedding", "vocabulary": 20, "dimension": dimension, **embedding},
        {"id": "first", "op": "permute_dims", "axes": [1, 0]},
        {"id": "conv", "op": "conv1d", "filters": 3, "kernel": kernel},
        {"id": "relu", "op": "activation", "activation": "relu"},
        {"id": "pool", "op": "max_pool1d", "window": window},
        {"id": "flat", "op": "flatten"},
        {"id": "output", "op": "dense", "units": 1},
    ]


YES_OR_NO = {"loss": "binary_cross_entropy"}
CNNS: dict[str, tuple[list[int], list[dict[str, Any]], dict[str, str]]] = {
    "images": ([72], images(), {}),
    "images that pools leave a part of": ([72], images(2, 3), {}),
    "images in oblong windows": ([72], images([2, 3], [3, 1]), {}),
    "text": ([11], text(), YES_OR_NO),
    "text with padding": ([11], text(2, 3, padding_index=0), YES_OR_NO),
    "text as odd vectors": ([12], text(1, 4, 5, padding_index=3), YES_OR_NO),
    "text with an embedding that is not trained": ([11], text(trainable=False), YES_OR_NO),
}


@pytest.fixture(params=CNNS)
def cnn(request: pytest.FixtureRequest, model: Made) -> Callable[[str], ModelSpec]:
    """A small network of the papers' kinds, in a dtype."""
    shape, layers, loss = CNNS[request.param]
    return lambda dtype: model(shape, *layers, **loss, dtype=dtype)


def optimizer_of(network: ModelSpec) -> Optimizer:
    return Optimizer("sgd", 0.1) if network.vocabulary is None else Optimizer("adam", 0.01)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 2])
def test_convolutional_networks_compute_what_the_engine_computes(
    cnn: Callable[[str], ModelSpec], dtype: str, threads: int, random_params: Made, random_data: Made
) -> None:
    """In 50 steps, the last of them on fewer samples; then evaluated and applied in parts."""
    network, tolerance = cnn(dtype), {"float32": 1e-5, "float64": 1e-12}[dtype]
    params, (x, y) = random_params(network, dtype), random_data(network, 49 * 40 + 17, dtype)
    order = np.random.default_rng(1).permutation(len(x))
    made = [
        registry.get(name).build(network, params, optimizer_of(network), 40, dtype, threads)
        for name in ("manual", "numpy")
    ]
    for rows in (40, 17, 1):
        (loss, gradients), (expected, others) = (each.loss_and_gradients(x[:rows], y[:rows]) for each in made)
        assert loss == pytest.approx(expected, rel=tolerance)
        assert set(gradients) == set(others)
        for name, gradient in gradients.items():
            size = max(np.linalg.norm(others[name]), 0.1)  # what nearly cancels keeps the error of its parts
            assert np.linalg.norm(gradient - others[name]) <= tolerance * size, name
    for name, array in made[0].params().items():
        np.testing.assert_array_equal(array, params[name])
    losses, expected_losses = (each.train_epoch(x, y, order) for each in made)
    assert len(losses) == 50
    np.testing.assert_allclose(losses, expected_losses, rtol=10 * tolerance)
    np.testing.assert_allclose(*(each.predict(x) for each in made), rtol=100 * tolerance, atol=100 * tolerance)
    found, other = (each.evaluate(x, y) for each in made)
    assert found.loss == pytest.approx(other.loss, rel=10 * tolerance)
    assert found.accuracy == pytest.approx(other.accuracy, abs=1.5 / len(x))
    for each in made:
        each.close()


def test_a_windows_gradient_goes_to_the_first_of_equals(cnn: Callable[[str], ModelSpec], random_params: Made) -> None:
    """As the engine and PyTorch have it; all elements of a plane are alike here."""
    network = cnn("float64")
    params, optimizer = random_params(network, "float64"), optimizer_of(network)
    if network.vocabulary is None:
        x, y = np.ones((5, *network.input.sample)), np.arange(5) % 4
    else:
        x, y = np.full((5, *network.input.sample), 7), np.array([[0.0], [1.0], [1.0], [0.0], [1.0]])
    (_, found), (_, expected) = (
        registry.get(name).build(network, params, optimizer, 5, "float64", 1).loss_and_gradients(x, y)
        for name in ("manual", "numpy")
    )
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["mnist-cnn", "imdb-cnn"])
def test_training_convolutional_networks_makes_no_new_buffers(
    name: str, published: Made, random_params: Made, random_data: Made
) -> None:
    network = published(name)
    params, (x, y) = random_params(network), random_data(network, 200)
    session = ManualSession(network, params, optimizer_of(network), 64)
    order = np.arange(200)
    session.train_epoch(x, y, order)
    tracemalloc.start()
    try:
        session.train_epoch(x, y, order)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 150_000  # numpy's own iterators take up to 8192 elements at a time; the activations are some MB


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_gradients_are_those_of_the_loss(steps: int, model: Made, random_params: Made, random_data: Made) -> None:
    network = model([15], *layers(steps), dtype="float64")
    params, (x, y) = random_params(network, "float64"), random_data(network, 7, "float64")
    _, gradients = ManualSession(network, params, SGD, 4, "float64").loss_and_gradients(x, y)
    assert set(gradients) == set(params)

    def loss_at(name: str, index: tuple[int, ...], step: float) -> float:
        moved = params | {name: params[name].copy()}
        moved[name][index] += step
        return ManualSession(network, moved, SGD, 4, "float64").loss_and_gradients(x, y)[0]

    for name, gradient in gradients.items():
        for index in np.ndindex(gradient.shape):
            slope = (loss_at(name, index, 1e-6) - loss_at(name, index, -1e-6)) / 2e-6
            assert gradient[index] == pytest.approx(slope, abs=1e-8), (name, index)


def test_a_step_is_the_gradient_times_the_learning_rate(
    small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    session = ManualSession(small_paper_model, params, SGD, 10)
    loss, gradients = session.loss_and_gradients(x, y)
    assert all(np.array_equal(array, params[name]) for name, array in session.params().items())
    assert session.train_epoch(x, y, np.arange(10)).tolist() == pytest.approx([loss])
    for name, array in session.params().items():
        np.testing.assert_allclose(array, params[name] - 0.1 * gradients[name], rtol=1e-5, atol=1e-7)


def test_the_loss_of_an_evaluation_is_that_of_training(
    small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 2500)
    session = ManualSession(small_paper_model, params, SGD, 10)
    found = session.evaluate(x, y)
    assert found.loss == pytest.approx(session.loss_and_gradients(x, y)[0], rel=1e-5)
    assert found.accuracy == np.mean(session.predict(x).argmax(1) == y)


def test_a_partial_batch_sees_nothing_of_the_one_before(
    small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    together = ManualSession(small_paper_model, params, SGD, 4)
    losses = together.train_epoch(x, y, np.arange(10))
    apart = ManualSession(small_paper_model, params, SGD, 4)
    parts = [apart.train_epoch(x, y, np.arange(start, min(start + 4, 10))) for start in (0, 4, 8)]
    np.testing.assert_array_equal(losses, np.concatenate(parts))
    for name, array in apart.params().items():
        np.testing.assert_array_equal(array, together.params()[name])


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_what_is_left_in_the_buffers_plays_no_part(
    byte: int, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 8)
    expected = ManualSession(small_paper_model, params, SGD, 8).loss_and_gradients(x, y)
    session = ManualSession(small_paper_model, params, SGD, 8)
    session.loss_and_gradients(x, y)
    network = session._network
    (buffers,) = network._buffers.values()
    kept = ("ones_all", "ones_samples", "ones_classes", "_later_times")
    for name, array in [*vars(buffers).items(), ("gradient", network.gradient)]:
        if isinstance(array, np.ndarray) and name not in kept:
            array.view(np.uint8)[...] = byte
    loss, gradients = session.loss_and_gradients(x, y)
    assert loss == expected[0]
    for name, array in gradients.items():
        np.testing.assert_array_equal(array, expected[1][name])


def test_training_makes_no_new_buffers(paper_model: ModelSpec, random_params: Made, random_data: Made) -> None:
    params, (x, y) = random_params(paper_model), random_data(paper_model, 1050)
    session = ManualSession(paper_model, params, Optimizer("sgd", 0.01), 100)
    order = np.arange(1050)
    session.train_epoch(x, y, order)
    tracemalloc.start()
    try:
        session.train_epoch(x, y, order)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000  # numpy's own iterators take up to 8192 elements at a time; all states are 102 kB


def test_overflow_is_not_hidden_by_the_softmax(small_paper_model: ModelSpec, random_params: Made) -> None:
    params = random_params(small_paper_model, scale=1000.0)
    session = ManualSession(small_paper_model, params, SGD, 4)
    x = np.ones((4, 15), np.float32)
    loss, gradients = session.loss_and_gradients(x, np.arange(4))
    assert np.isfinite(loss)
    assert all(np.isfinite(array).all() for array in gradients.values())


@pytest.mark.parametrize(
    "network",
    [
        layers(activation="relu"),
        [*layers(returns="sequence")[:2], {"op": "flatten"}, layers()[2]],
        [*layers()[:2], {**layers()[2], "bias": False}],
        [*layers(), {"op": "activation", "activation": "tanh"}],
        [*layers()[:2], {"op": "reshape", "shape": [2, 3]}, {"op": "flatten"}, layers()[2]],
        [layers()[0], {"op": "gru", "units": 6}, layers()[2]],
        [{"op": "reshape", "shape": [1, 3, 5]}, {**images(2)[1], "padding": 1}, *images(2)[2:]],
        [{"op": "reshape", "shape": [1, 3, 5]}, *images(2, bias=True)[1:]],
    ],
)
def test_other_networks_are_refused(network: list[dict[str, Any]], model: Made, random_params: Made) -> None:
    other = model([15], *network)
    with pytest.raises(SpecError, match="written by hand for reshape, rnn"):
        ManualSession(other, random_params(other), SGD, 4)


def test_another_loss_is_refused(model: Made, random_params: Made) -> None:
    other = model([15], *layers(), loss="mean_squared_error")
    with pytest.raises(SpecError, match="and mean_squared_error"):
        ManualSession(other, random_params(other), SGD, 4)


@pytest.mark.parametrize(
    "optimizer",
    [Optimizer("adam", 0.1), Optimizer("sgd", 0.1, momentum=0.9), Optimizer("sgd", 0.1, clip_norm=1.0)],
)
def test_other_optimizers_are_refused(optimizer: Optimizer, small_paper_model: ModelSpec, random_params: Made) -> None:
    with pytest.raises(ConfigurationError, match="written by hand for plain sgd on this network"):
        ManualSession(small_paper_model, random_params(small_paper_model), optimizer, 4)


def test_a_text_network_is_trained_by_adam_alone(model: Made, random_params: Made) -> None:
    network = model([11], *text(), loss="binary_cross_entropy")
    for optimizer in (Optimizer("sgd", 0.1), Optimizer("adam", 0.1, weight_decay=0.1)):
        with pytest.raises(ConfigurationError, match="plain adam on this network, with learning rate, betas and eps"):
            ManualSession(network, random_params(network), optimizer, 4)
