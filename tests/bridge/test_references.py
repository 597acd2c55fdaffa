"""TensorFlow and JAX compute what PyTorch computes of whole networks, from the same weights and data.

In float64 to 1e-10, in float32 to 1e-5 for the papers' networks: ‖a - b‖ / ‖b‖ for every tensor. Single layers, losses
and optimizers are in `test_reference_layers.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry, spec
from bridge.session import Optimizer

Made = Callable[..., Any]
Layers = list[dict[str, Any]]

REFERENCES = ("tensorflow", "jax")
PAPERS = ("mnist-rnn", "mnist-cnn", "imdb-cnn")
WITH_XLA = ("images", "permuted and back", "mnist-rnn")
"""Networks that TensorFlow computes with XLA, too: the adapter is the same but for a switch, and compiles longer."""

CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
MODELS = Path(spec.__file__).parents[1] / "experiments" / "models"
SGD = Optimizer("sgd", 0.1)

RELU = {"op": "activation", "activation": "relu"}
CONV = {"op": "conv2d", "filters": 5, "kernel": 2}
# Where channels come last, what is between these layers is transposed only where it must be.
NETWORKS: dict[str, tuple[list[int], Layers]] = {
    "images": (
        [2, 8, 7],
        [CONV, RELU, {"op": "max_pool2d", "window": 2}, {"op": "flatten"}, RELU, {"op": "dense", "units": 4}],
    ),
    "convolutions on convolutions": (
        [2, 8, 7],
        [CONV, {"op": "batch_norm"}, CONV, {"op": "avg_pool2d", "window": 2}, {"op": "reshape", "shape": [30]}],
    ),
    "volumes": (
        [2, 4, 3, 5],
        [
            {"op": "conv3d", "filters": 4, "kernel": 2, "padding": "same"},
            {"op": "max_pool3d", "window": [2, 1, 2], "stride": [1, 1, 2]},
            {
                "op": "conv3d_transpose",
                "filters": 2,
                "kernel": [1, 2, 2],
                "stride": [1, 2, 1],
                "output_padding": [0, 1, 0],
            },
            {"op": "interpolate", "scale": [1, 1, 2], "mode": "linear"},
            {"op": "avg_pool3d", "window": 2},
            {"op": "flatten"},
            {"op": "dense", "units": 3},
        ],
    ),
    "permuted and back": (
        [9, 3],
        [
            {"op": "permute_dims", "axes": [1, 0]},
            {"op": "conv1d", "filters": 4, "kernel": 3},
            {"op": "permute_dims", "axes": [1, 0]},
            {"op": "gru", "units": 3},
        ],
    ),
    "flattened for no dense layer": (
        [2, 8, 7],
        [CONV, {"op": "flatten"}, {"op": "activation", "activation": "softmax"}],
    ),
    "channels at the end": ([2, 8, 7], [CONV, RELU, {"op": "permute_dims", "axes": [1, 2, 0]}]),
    "the last layer a convolution": ([2, 8, 7], [CONV]),
}


def with_xla(networks: Iterable[str]) -> list[tuple[str, str]]:
    """Each network with each reference, and some with TensorFlow's XLA."""
    pairs = [(reference, network) for network in networks for reference in REFERENCES]
    chosen = networks if CAMPAIGN else WITH_XLA
    return pairs + [("tensorflow-xla", network) for network in networks if network in chosen]


@pytest.fixture(params=REFERENCES)
def reference(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.campaign
@pytest.mark.parametrize(("reference", "network"), with_xla(NETWORKS), indirect=["reference"])
def test_networks(reference: str, network: str, model: Made, compare_with_torch: Made) -> None:
    shape, layers = NETWORKS[network]
    compare_with_torch(reference, model(shape, *layers, loss="mean_squared_error", dtype="float64"))


@pytest.mark.campaign
@pytest.mark.parametrize(("reference", "name"), with_xla(PAPERS), indirect=["reference"])
def test_the_papers_networks(reference: str, name: str, compare_with_torch: Made) -> None:
    optimizer = Optimizer("adam", 0.001) if "imdb" in name else Optimizer("sgd", 0.015)
    compare_with_torch(reference, spec.load(MODELS / f"{name}.toml"), "float32", optimizer, batch=20, rows=50)


def test_a_large_batch_of_images_is_normalised(reference: str, model: Made, compare_with_torch: Made) -> None:
    """TensorFlow does it by a fused kernel whose variance is unbiased."""
    made = model(
        [32, 10, 10],
        {"op": "dense", "units": 10, "bias": False},
        {"op": "batch_norm"},
        {"op": "activation", "activation": "tanh"},
        {"op": "flatten"},
        {"op": "dense", "units": 3},
        loss="mean_squared_error",
    )
    compare_with_torch(reference, made, "float32", batch=32, rows=64)


def test_maxima_and_long_sequences_with_xla(model: Made, compare_with_torch: Made) -> None:
    """The maximum of a small window is written out there, and XLA compiles loops in another way."""
    made = model(
        [2, 40, 9],
        {"op": "dense", "units": 9},
        {"op": "max_pool2d", "window": 2, "stride": 1, "padding": 1},
        {"op": "max_pool2d", "window": [2, 1], "stride": [1, 2], "dilation": [2, 1]},
        {"op": "max_pool2d", "window": 3, "stride": 1},
        {"op": "permute_dims", "axes": [1, 0, 2]},
        {"op": "reshape", "shape": [37, 6]},
        {"op": "lstm", "units": 3, "returns": "sequence"},
        {"op": "gru", "units": 2},
        loss="mean_squared_error",
        dtype="float64",
    )
    compare_with_torch("tensorflow-xla", made)


# --- What is not PyTorch's ---

SETTING = {
    "jax": "import jax; jax.config.update('jax_num_cpu_devices', {})",
    "tensorflow": "import tensorflow; tensorflow.config.threading.set_intra_op_parallelism_threads({})",
}
"""What raises a RuntimeError once the runtime is there."""

START = """
import sys
from bridge import registry
from bridge.session import Starting
sessions = registry.get(sys.argv[1]).load()
exec(sys.argv[2].format(1))
assert isinstance(sessions, Starting)
sessions.start(2)
if "tensorflow" in sys.modules:
    assert sys.modules["tensorflow"].config.threading.get_intra_op_parallelism_threads() == 2
try:
    exec(sys.argv[2].format(3))
except RuntimeError:
    print("started")
"""


def test_the_runtime_starts_before_the_first_session_and_not_with_the_import(
    reference: str,
) -> None:
    found = registry.availability(reference)
    if not found.ok:
        pytest.skip(found.reason)
    command = [sys.executable, "-c", START, reference, SETTING[reference]]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.endswith("started\n"), done.stderr


def test_dropout_drops_in_training_and_only_there(reference: str, model: Made, session_of: Made) -> None:
    layers = {"op": "dropout", "rate": 0.25}, {"id": "dense", "op": "dense", "units": 1, "bias": False}
    made = model([10_000], *layers, loss="mean_squared_error", dtype="float64")
    params = {"dense.weight": np.ones((10_000, 1))}
    session = session_of(reference, made, params, SGD, 1)
    x, y = np.ones((1, 10_000)), np.ones((1, 1))
    assert session.predict(x).item() == pytest.approx(10_000)
    _, gradients = session.loss_and_gradients(x, y)
    values, counts = np.unique(np.abs(gradients["dense.weight"]), return_counts=True)
    assert values[0] == 0
    assert len(values) == 2
    assert 0.22 < counts[0] / counts.sum() < 0.28


def test_of_equal_maxima_the_first_has_the_gradient(reference: str, model: Made, session_of: Made) -> None:
    scale = {"op": "conv1d", "filters": 1, "kernel": 1, "bias": False}
    for pool in ({"op": "max_pool1d", "window": 4}, {"op": "max_pool1d", "window": 5}, {"op": "global_max_pool"}):
        layers = {"op": "reshape", "shape": [1, 5]}, {"id": "bias", "op": "layer_norm"}, scale, pool
        made = model([5], *layers, loss="mean_squared_error", dtype="float64")
        params = {name: np.zeros(p.shape) for name, p in made.parameters().items()}
        params["layer2.weight"][...] = 1
        session = session_of(reference, made, params, SGD, 1)
        shape = (1, *made.output)
        _, gradients = session.loss_and_gradients(np.arange(5.0)[None], np.ones(shape))
        np.testing.assert_allclose(gradients["bias.shift"], [-2, 0, 0, 0, 0], atol=1e-12)


@pytest.mark.parametrize("engine", ["jax", "tensorflow-xla"])
def test_nan_is_not_lost_in_a_maximum_that_is_written_out(
    engine: str, model: Made, session_of: Made, random_params: Made
) -> None:
    layers = {"op": "conv1d", "filters": 1, "kernel": 1}, {"op": "max_pool1d", "window": 2}
    made = model([1, 4], *layers, loss="mean_squared_error", dtype="float64")
    session = session_of(engine, made, random_params(made, "float64"), SGD, 1)
    for at in (0, 1):
        x = np.ones((1, 1, 4))
        x[0, 0, at] = np.nan
        assert np.isnan(session.predict(x)).tolist() == [[[True, False]]]


@pytest.mark.parametrize("own", REFERENCES)
def test_parameters_of_its_own(own: str, model: Made, workers: Made) -> None:
    """Deviations are those that Keras and Flax document; a seed gives the same again, another one something else."""
    if not (found := registry.availability(own)).ok:
        pytest.skip(found.reason)
    made = model(
        [8, 60],
        {"id": "conv", "op": "conv1d", "filters": 200, "kernel": 3},
        {"op": "permute_dims", "axes": [1, 0]},
        {"id": "lstm", "op": "lstm", "units": 50},
        {"id": "dense", "op": "dense", "units": 100},
    )
    ids = model(
        [5], {"id": "rows", "op": "embedding", "vocabulary": 500, "dimension": 64}, {"op": "flatten"}, dtype="int64"
    )
    params = workers(own).own_parameters(made, 3) | workers(own).own_parameters(ids, 3)
    shapes = {**made.parameters(), **ids.parameters()}
    assert {name: array.shape for name, array in params.items()} == {name: p.shape for name, p in shapes.items()}
    glorot = {"conv.weight": (24, 600), "lstm.weight": (200, 200), "dense.weight": (50, 100)}
    for name, (fan_in, fan_out) in glorot.items():
        deviation = np.sqrt(2 / (fan_in + fan_out)) if own == "tensorflow" else np.sqrt(1 / fan_in)
        assert params[name].std() == pytest.approx(deviation, rel=0.06), name
    assert params["rows.weight"].std() == pytest.approx(0.1 / np.sqrt(12) if own == "tensorflow" else 1 / 8, rel=0.05)
    recurrent = params["lstm.recurrent"]
    rows = recurrent if own == "tensorflow" else recurrent[:, 50:100]
    np.testing.assert_allclose(rows @ rows.T, np.eye(50), atol=1e-5)
    ones = np.flatnonzero(params["lstm.bias"])
    np.testing.assert_array_equal(ones, np.arange(50, 100) if own == "tensorflow" else [])
    again, other = workers(own).own_parameters(made, 3), workers(own).own_parameters(made, 4)
    np.testing.assert_array_equal(again["dense.weight"], params["dense.weight"])
    assert not np.array_equal(other["dense.weight"], params["dense.weight"])


def test_parameters_are_copies(
    reference: str, model: Made, session_of: Made, random_params: Made, random_data: Made
) -> None:
    made = model([2, 6, 5], CONV, {"op": "flatten"}, {"op": "dense", "units": 3}, dtype="float32")
    given = random_params(made)
    kept = {name: array.copy() for name, array in given.items()}
    session = session_of(reference, made, given, SGD, 4)
    before = session.params()
    x, y = random_data(made, 8)
    session.train_epoch(x, y, np.arange(8))
    for name, array in before.items():
        np.testing.assert_array_equal(array, kept[name])
        np.testing.assert_array_equal(given[name], kept[name])
        assert array.flags.c_contiguous
        assert not np.array_equal(array, session.params()[name])
