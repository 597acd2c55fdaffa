"""The Julia engine behind the protocol: it computes what the numpy engine computes, and its errors come as Python's.

Each session lives in a worker, since Julia and the torch of other tests must not share a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge import registry
from bridge.adapters import julia as adapter
from bridge.libjulia.find import Julia
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker
from py_engine.errors import ConfigurationError, LabelError, NonFiniteError, ShapeError
from py_engine.network import read_ahead

Made = Callable[..., Any]
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

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
    "rnn on rnn": (
        [SEGMENTS, {"op": "rnn", "units": 6, "returns": "sequence"}, {"op": "rnn", "units": 5}, DENSE],
        "softmax_cross_entropy",
    ),
    "many to many": ([SEGMENTS, {"op": "lstm", "units": 5, "returns": "sequence"}, DENSE], "softmax_cross_entropy"),
    "convolutions": (
        [
            {"op": "reshape", "shape": [2, 3, 2]},
            {
                "op": "conv2d",
                "filters": 4,
                "kernel": [3, 2],
                "stride": [2, 1],
                "padding": [[2, 1], [0, 1]],
                "groups": 2,
                "bias": False,  # batch normalisation takes it away: its gradient is rounding
            },
            {"op": "batch_norm", "momentum": 0.3},
            {"op": "activation", "activation": "relu"},
            {"op": "max_pool2d", "window": [2, 1], "padding": [1, 0], "stride": [1, 1]},
            {"op": "global_avg_pool"},
            DENSE,
        ],
        "softmax_cross_entropy",
    ),
    "sequences": (
        [
            {"op": "reshape", "shape": [4, 3]},
            {"op": "permute_dims", "axes": [1, 0]},
            {"op": "conv1d", "filters": 6, "kernel": 2, "dilation": 2, "padding": [1, 0], "bias": False},
            {"op": "avg_pool1d", "window": 2, "stride": 1},
            {"op": "layer_norm"},
            {"op": "rbf", "units": 3},
            {"op": "global_max_pool"},
            DENSE,
        ],
        "softmax_cross_entropy",
    ),
    "tokens": (
        [
            {"op": "reshape", "shape": [2, 6]},
            {"op": "embedding", "vocabulary": 9, "dimension": 5, "padding_index": 2},
            {"op": "permute_dims", "axes": [2, 0, 1]},
            {"op": "conv2d", "filters": 3, "kernel": 2},
            {"op": "flatten"},
            {"op": "dense", "units": 1},
        ],
        "binary_cross_entropy",
    ),
    "frozen embedding": (
        [
            {"op": "embedding", "vocabulary": 9, "dimension": 5, "trainable": False},
            {"op": "gru", "units": 4},
            {"op": "batch_norm"},
            DENSE,
        ],
        "softmax_cross_entropy",
    ),
    "gru": (
        [SEGMENTS, {"op": "gru", "units": 5, "returns": "sequence"}, {"op": "flatten"}, DENSE],
        "mean_squared_error",
    ),
}
OPTIMIZERS = [
    Optimizer("sgd", 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Optimizer("rmsprop", 0.01, alpha=0.9, momentum=0.5),
    Optimizer("adam", 0.01, betas=(0.8, 0.9), clip_norm=0.1),
    Optimizer("adamw", 0.01),
]


@pytest.fixture(scope="module", params=[1, 2])
def worker(julia: Julia, request: pytest.FixtureRequest) -> Iterator[Worker]:
    with Worker("julia", request.param) as made:
        yield made


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape
        distance, size = np.linalg.norm(found[name] - array), np.linalg.norm(array)
        assert distance <= tolerance * size, f"{name}: ‖a - b‖ = {distance:.2e}, ‖b‖ = {size:.2e}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_computes_what_the_numpy_engine_computes(
    worker: Worker, kind: str, dtype: str, model: Made, random_params: Made, random_data: Made, rng: np.random.Generator
) -> None:
    layers, loss = MODELS[kind]
    reads_tokens = any(layer["op"] == "embedding" for layer in layers)
    made = model([12], *layers, loss=loss, dtype="int64" if reads_tokens else dtype)
    params, (x, y) = random_params(made, dtype), random_data(made, 53, dtype)
    order, sgd = rng.permutation(53), Optimizer("sgd", 0.05)
    worker.build(made, params, sgd, 8, dtype)
    twin = registry.get("numpy").build(made, params, sgd, 8, dtype, 1)
    value, gradients = worker.loss_and_gradients(x, y)
    expected, expected_gradients = twin.loss_and_gradients(x, y)
    assert value == pytest.approx(expected, rel=TOLERANCE[dtype])
    assert_close(gradients, expected_gradients, TOLERANCE[dtype])
    assert_close(
        {"losses": worker.train_epoch(x, y, order)}, {"losses": twin.train_epoch(x, y, order)}, TOLERANCE[dtype]
    )
    assert_close(worker.params(), twin.params(), 10 * TOLERANCE[dtype])
    assert_close({"outputs": worker.predict(x)}, {"outputs": twin.predict(x)}, 10 * TOLERANCE[dtype])
    found, expected_evaluation = worker.evaluate(x, y), twin.evaluate(x, y)
    assert found.loss == pytest.approx(expected_evaluation.loss, rel=10 * TOLERANCE[dtype])
    assert found.accuracy == pytest.approx(expected_evaluation.accuracy, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_optimizers_take_the_numpy_engines_steps(
    worker: Worker, optimizer: Optimizer, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model, "float64"), random_data(small_paper_model, 300, "float64")
    order = np.arange(300)
    worker.build(small_paper_model, params, optimizer, 4, "float64")
    twin = registry.get("numpy").build(small_paper_model, params, optimizer, 4, "float64", 1)
    for _ in range(2):
        assert_close({"losses": worker.train_epoch(x, y, order)}, {"losses": twin.train_epoch(x, y, order)}, 1e-9)
    assert_close(worker.params(), twin.params(), 1e-8)


def test_arrays_that_lie_otherwise_in_memory_are_handled(
    worker: Worker, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 40)
    worker.build(small_paper_model, params, OPTIMIZERS[0], 8)
    expected = worker.predict(x)
    for other in (np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2]):
        assert np.array_equal(worker.predict(other), expected)
    assert worker.evaluate(x, y) == worker.evaluate(np.asfortranarray(x), y.astype(np.int32))


def test_a_mistake_or_a_nan_leaves_the_session_usable(
    worker: Worker, small_paper_model: ModelSpec, random_params: Made, random_data: Made
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 40)
    worker.build(small_paper_model, params, Optimizer("sgd", 0.1), 8)
    order = np.arange(40)
    with pytest.raises(LabelError, match="from 0 to 3"):
        worker.train_epoch(x, y + 4, order)
    spoiled = x.copy()
    spoiled[0, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"step 1 of the epoch: the loss is NaN: input 1"):
        worker.train_epoch(spoiled, y, order)
    assert_close(worker.params(), params, 0)
    assert np.isfinite(worker.train_epoch(x, y, order)).all()


def test_token_ids_out_of_range_are_refused_before_anything_runs(
    worker: Worker, model: Made, random_params: Made, random_data: Made
) -> None:
    layers, loss = MODELS["tokens"]
    made = model([12], *layers, loss=loss, dtype="int64")
    params, (x, y) = random_params(made), random_data(made, 20)
    worker.build(made, params, Optimizer("adam", 0.1), 8, "float32")
    for wrong in (-1, 9):
        spoiled = x.copy()
        spoiled[13, 4] = wrong
        with pytest.raises(ShapeError, match=rf"token id {wrong} in row 13 at position 4 .* 9 of the vocabulary"):
            worker.train_epoch(spoiled, y, np.arange(20))
    assert_close(worker.params(), params, 0)
    assert np.isfinite(worker.train_epoch(x, y, np.arange(20))).all()


def test_techniques_change_nothing_but_how(worker: Worker, model: Made, random_params: Made, random_data: Made) -> None:
    layers, loss = MODELS["tokens"]
    made = model([12], *layers, loss=loss, dtype="int64")
    params, (x, y) = random_params(made, "float64"), random_data(made, 20, "float64")
    found = []
    for techniques in (None, {"sparse_columns": False, "fuse": False}, {"replay": False}):
        worker.build(made, params, Optimizer("adam", 0.1), 8, "float64", techniques)
        found.append({"losses": worker.train_epoch(x, y, np.arange(20))})
    assert_close(found[1], found[0], 1e-9)
    assert_close(found[2], found[0], 1e-9)
    with pytest.raises(ConfigurationError, match="no technique 'fusion'; it has replay, "):
        worker.build(made, params, Optimizer("adam", 0.1), 8, "float64", {"fusion": False})
    with pytest.raises(ConfigurationError, match="fuse: expected True or False, found 'no'"):
        worker.build(made, params, Optimizer("adam", 0.1), 8, "float64", {"fuse": "no"})


def test_an_exception_in_julia_comes_with_its_message(
    worker: Worker, small_paper_model: ModelSpec, random_params: Made
) -> None:
    params = random_params(small_paper_model)
    with pytest.raises(ConfigurationError, match=r"Adam: eps must be a finite number >= 1.0e-30, got 1.0e-40"):
        worker.build(small_paper_model, params, Optimizer("adam", 0.1, eps=1e-40), 8)
    worker.build(small_paper_model, params, Optimizer("adam", 0.1), 8)


def test_a_session_is_described_by_a_line_for_each_part_with_settings_by_name(model: Made) -> None:
    conv = {"op": "conv2d", "filters": 6, "kernel": [3, 2], "padding": [[1, 0], [2, 3]], "bias_init": "ones"}
    tokens = {"op": "embedding", "vocabulary": 9, "dimension": 4, "padding_index": 2}
    for layer, text in (
        (conv, "conv2d filters=6 groups=1 bias=true kernel=3,2 stride=1,1 padding=1,0,2,3 dilation=1,1"),
        ({"op": "batch_norm", "momentum": 0.25}, "batch_norm momentum=0.25 eps=1e-05"),
        (
            {"op": "max_pool2d", "window": 2},
            "max_pool2d window=2,2 stride=2,2 padding=0,0,0,0 dilation=1,1 ceil_mode=false",
        ),
        (tokens, "embedding vocabulary=9 dimension=4 padding_index=2 trainable=true"),
        (tokens | {"padding_index": -1}, "embedding vocabulary=9 dimension=4 trainable=true"),
    ):
        made = model([4, 6, 5], layer | {"id": "a-1"}, {"op": "flatten"}, DENSE)
        found = adapter.describe(made, Optimizer("adam", 1, clip_norm=0.5), 8, np.dtype("float32"), 2, {"fuse": False})
        assert found.decode("ascii").split("\n") == [
            "session format=3 dtype=float32 batch_size=8 threads=2 loss=softmax_cross_entropy "
            f"holds={'ids' if layer['op'] == 'embedding' else 'numbers'} input=4,6,5 layers=3",
            "optimizer name=adam learning_rate=1 betas=0.9,0.999 eps=1e-08 weight_decay=0.0 clip_norm=0.5",
            "techniques fuse=false",
            f"layer id=a-1 op={text}",
            "layer id=layer1 op=flatten",
            "layer id=layer2 op=dense units=4 bias=true",
            "",
        ]


def test_a_text_in_a_line_is_data_and_never_ends_it() -> None:
    line = adapter.line("layer", {"id": 'a=b, c%\n"$(exit())"é', "op": "dense", "units": None})
    assert line == b"layer id=a%3Db%2C%20c%25%0A%22%24%28exit%28%29%29%22%C3%A9 op=dense\n"


def test_a_call_ends_where_more_rows_of_a_mapped_file_are_to_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((100, 6), np.float32))
    x, calls = np.load(tmp_path / "rows.npy", mmap_mode="r"), []
    session = object.__new__(adapter.JuliaSession)
    session._check = SimpleNamespace(batch=lambda *given: given, order=lambda order, _: order, batches=lambda *_: None)
    session._entries = SimpleNamespace(train=lambda *given: calls.append(given[6:8]))
    session._number, session._batch_size, session._steps_per_call = 1, 4, 50
    for rows, first_and_last in ((1000, [(1, 25)]), (32, [(1, 2), (3, 4)]), (1, [(1, 1), (2, 2)])):
        calls.clear()
        monkeypatch.setattr(read_ahead, "WINDOW", rows * 24)
        session._train(x, np.zeros(100, np.int64), np.arange(100), None)
        assert calls[: len(first_and_last)] == first_and_last and calls[-1][1] == 25
