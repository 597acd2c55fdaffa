"""TensorFlow and JAX compute what PyTorch computes: every layer, loss and optimizer, from the same weights and data.

In float64 to 1e-10: ‖a - b‖ / ‖b‖ for every tensor. Whole networks are in `test_references.py`.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from bridge import spec
from bridge.session import Optimizer
from bridge.spec import ModelSpec

Made = Callable[..., Any]
Layers = list[dict[str, Any]]

SEQUENCE, IMAGE, VOLUME = [4, 11], [4, 7, 6], [4, 3, 5, 6]

ACTIVATIONS = (
    *("identity", "tanh", "relu", "sigmoid", "softplus", "softmax"),
    *("gelu", "gelu_tanh", "silu", "leaky_relu", "elu"),
)

# Layers of a kind, with all their settings, on top of each other: most of a case's time is what a framework takes to
# compile a network. All have a dense layer below them, so that their gradient by their input counts.
LAYERS: dict[str, tuple[list[int], Layers]] = {
    "dense": (SEQUENCE, [{"op": "dense", "units": 7}, {"op": "dense", "units": 6, "bias": False}]),
    "rnn": (
        SEQUENCE,
        [
            {"op": "rnn", "units": 6, "returns": "sequence", "activation": "tanh"},
            {"op": "rnn", "units": 5, "returns": "sequence", "activation": "relu"},
            {"op": "rnn", "units": 6, "activation": "identity"},
        ],
    ),
    "lstm": (SEQUENCE, [{"op": "lstm", "units": 6, "returns": "sequence"}, {"op": "lstm", "units": 5}]),
    "gru": (SEQUENCE, [{"op": "gru", "units": 6, "returns": "sequence"}, {"op": "gru", "units": 5}]),
    "many steps": (
        [40, 3],
        [
            {"op": "rnn", "units": 3, "returns": "sequence"},
            {"op": "lstm", "units": 3, "returns": "sequence"},
            {"op": "gru", "units": 3},
        ],
    ),
    "other shapes": (
        IMAGE,
        [
            {"op": "permute_dims", "axes": [1, 2, 0]},
            {"op": "dense", "units": 4},
            {"op": "reshape", "shape": [2, 14, 5]},
            {"op": "dense", "units": 3},
            {"op": "flatten"},
        ],
    ),
    "activations": (
        SEQUENCE,
        [
            layer
            for name in ACTIVATIONS
            for layer in ({"op": "activation", "activation": name}, {"op": "dense", "units": 7})
        ],
    ),
    "dropout of nothing": (SEQUENCE, [{"op": "dropout", "rate": 0.0}]),
    "conv1d": (
        SEQUENCE,
        [
            {"op": "conv1d", "filters": 6, "kernel": 2, "stride": 2, "padding": [2, 1], "dilation": 2, "groups": 2},
            {"op": "conv1d", "filters": 3, "kernel": 3},
        ],
    ),
    "conv2d": (IMAGE, [{"op": "conv2d", "filters": 3, "kernel": [3, 2], "bias": False}]),
    "conv2d of all kinds": (
        IMAGE,
        [
            {
                "op": "conv2d",
                "filters": 8,
                "kernel": [2, 3],
                "stride": [2, 1],
                "padding": [[1, 0], [2, 1]],
                "dilation": [3, 2],
                "groups": 4,
            },
            {"op": "conv2d", "filters": 3, "kernel": 2, "stride": 2, "padding": "same"},
        ],
    ),
    **{
        f"{kind}_pool1d": (
            [4, 60],
            [{"op": "dense", "units": 60}]
            + [
                {"op": f"{kind}_pool1d", **options}
                for options in (
                    {"window": 2},
                    {"window": 3, "stride": 2, "padding": [1, 0]},
                    {"window": 2, "dilation": 2, "stride": 2, "padding": 1},
                    {"window": 3, "padding": 1, "stride": 2, "ceil_mode": True},
                    {"window": 5, "padding": 2},
                )
            ],
        )
        for kind in ("max", "avg")
    },
    **{
        f"{kind}_pool2d": (
            [4, 16, 14],
            [{"op": "dense", "units": 14}]
            + [
                {"op": f"{kind}_pool2d", **options}
                for options in (
                    {"window": 2},
                    {"window": 3, "stride": 1, "padding": 1},
                    {"window": [2, 1], "stride": [1, 2], "padding": [[1, 0], [0, 0]]},
                    {
                        **{"window": [2, 3], "dilation": [2, 1], "stride": [2, 1], "ceil_mode": True},
                        "padding": [[1, 0], [0, 1]],
                    },
                )
            ],
        )
        for kind in ("max", "avg")
    },
    "volumes": (
        VOLUME,
        [
            {
                **{"op": "conv3d", "filters": 4, "kernel": [2, 3, 1], "stride": [1, 2, 1], "dilation": [1, 2, 1]},
                **{"padding": [[1, 0], [2, 1], [0, 0]], "groups": 2},
            },
            {"op": "conv3d", "filters": 3, "kernel": 2, "padding": "same", "bias": False},
            {"op": "batch_norm"},
            {
                "op": "conv3d_transpose",
                "filters": 2,
                "kernel": 2,
                "stride": [1, 2, 1],
                "padding": [[1, 0], [0, 0], [0, 1]],
            },
            {"op": "max_pool3d", "window": [2, 1, 2], "stride": [1, 1, 2], "padding": [[1, 0], [0, 0], [0, 1]]},
            {"op": "interpolate", "scale": [1, 2, 1], "mode": "linear"},
            {"op": "max_pool3d", "window": 2, "dilation": [1, 2, 1], "stride": 1, "ceil_mode": True},
            {
                "op": "avg_pool3d",
                "window": [1, 2, 2],
                "stride": [1, 2, 1],
                "padding": [0, 1, 0],
                "count_padding": False,
            },
        ],
    ),
    "pools of whole volumes": (VOLUME, [{"op": "global_max_pool"}]),
    "averages of whole volumes": (VOLUME, [{"op": "global_avg_pool"}]),
    "conv1d_transpose": (
        SEQUENCE,
        [
            {
                **{"op": "conv1d_transpose", "filters": 6, "kernel": 3, "stride": 2, "padding": [2, 1]},
                **{"output_padding": 1, "groups": 2},
            },
            {"op": "conv1d_transpose", "filters": 3, "kernel": 2, "dilation": 3, "output_padding": 2, "bias": False},
            {"op": "interpolate", "size": 17, "mode": "linear"},
            {"op": "interpolate", "size": [9]},
        ],
    ),
    "conv2d_transpose": (
        IMAGE,
        [
            {"op": "conv2d_transpose", "filters": 6, "kernel": [3, 2], "stride": [2, 3], "padding": [[1, 0], [0, 2]]},
            {
                **{"op": "conv2d_transpose", "filters": 4, "kernel": 3, "padding": 1, "groups": 2, "stride": 2},
                **{"output_padding": [1, 0], "dilation": [1, 2]},
            },
            {"op": "interpolate", "size": [10, 41], "mode": "linear", "align_corners": True},
            {"op": "interpolate", "scale": 2},
        ],
    ),
    "averages of elements alone": (
        IMAGE,
        [{"op": "avg_pool2d", "window": 3, "padding": 1, "ceil_mode": True, "count_padding": False}],
    ),
    "global_max_pool": (IMAGE, [{"op": "global_max_pool"}]),
    "global_avg_pool": (SEQUENCE, [{"op": "global_avg_pool"}]),
    "rbf": (SEQUENCE, [{"op": "rbf", "units": 3}]),
    "normalisation": (
        IMAGE,
        [
            {"op": "batch_norm", "momentum": 0.3},
            {"op": "dense", "units": 6},
            {"op": "layer_norm", "eps": 1e-3},
        ],
    ),
    "batch_norm of features": ([6], [{"op": "batch_norm"}]),
    "attention": (
        SEQUENCE,
        [
            {"op": "position_embedding"},
            {"op": "multi_head_attention", "heads": 5},
            {"op": "multi_head_attention", "heads": 1, "causal": True, "bias": False},
        ],
    ),
}

DENSE = {"op": "dense", "units": 5}
GRAPHS: dict[str, tuple[list[int], Layers]] = {
    "a residual": (SEQUENCE, [DENSE, DENSE, {"op": "add", "inputs": ["layer0", "layer1"]}]),
    "branches that are joined": (
        IMAGE,
        [
            {"op": "conv2d", "filters": 3, "kernel": 3, "padding": "same"},
            {"op": "conv2d", "filters": 2, "kernel": 1, "inputs": ["input"]},
            {"op": "concat", "inputs": ["layer1", "layer0", "input"]},
            {"op": "batch_norm"},
            {"op": "concat", "inputs": ["layer3", "layer2"], "axis": 1},
            {"op": "max_pool2d", "window": 2, "inputs": ["layer4"]},
        ],
    ),
    "a residual network of images": (
        IMAGE,
        [
            {"op": "conv2d", "filters": 4, "kernel": 3, "padding": "same", "bias": False},
            {"op": "batch_norm"},
            {"op": "activation", "activation": "relu"},
            {"op": "conv2d", "filters": 4, "kernel": 3, "padding": "same", "bias": False},
            {"op": "add", "inputs": ["layer3", "layer2", "input"]},
            {"op": "flatten"},
            {"op": "dense", "units": 3},
        ],
    ),
    "a transformer's block": (
        [7],
        [
            {"op": "embedding", "vocabulary": 9, "dimension": 6},
            {"op": "position_embedding"},
            {"op": "multi_head_attention", "heads": 2, "causal": True},
            {"op": "add", "inputs": ["layer1", "layer2"]},
            {"op": "layer_norm"},
        ],
    ),
}

EMBEDDINGS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"trainable": False},
    "with padding": {"padding_index": 0},
}

SOFTMAX: dict[str, Any] = {"op": "softmax_cross_entropy"}
LOSSES: dict[str, tuple[Layers, Any]] = {
    "a class by weights, smoothed, some ignored": (
        [{"op": "flatten"}, {"op": "dense", "units": 4}],
        SOFTMAX | {"class_weights": [0.5, 2, 1, 0.0], "label_smoothing": 0.1, "ignored_class": -1},
    ),
    "a class for every row, one class ignored": ([{"op": "dense", "units": 4}], SOFTMAX | {"ignored_class": 2}),
    "a smoothed class": ([{"op": "flatten"}, {"op": "dense", "units": 4}], SOFTMAX | {"label_smoothing": 0.2}),
    "yes, which counts more, or no": (
        [{"op": "dense", "units": 2}],
        {"op": "binary_cross_entropy", "positive_weight": 3},
    ),
    "a class": ([{"op": "flatten"}, {"op": "dense", "units": 4}], "softmax_cross_entropy"),
    "a class for every row": ([{"op": "dense", "units": 4}], "softmax_cross_entropy"),
    "yes or no": ([{"op": "flatten"}, {"op": "dense", "units": 1}], "binary_cross_entropy"),
    "yes or no for every row": ([{"op": "dense", "units": 2}], "binary_cross_entropy"),
    "a number": ([{"op": "flatten"}, {"op": "dense", "units": 1}], "mean_squared_error"),
}

OPTIMIZERS = [
    Optimizer("sgd", 0.1, weight_decay=0.1),
    Optimizer("sgd", 0.1, momentum=0.9),
    Optimizer("sgd", 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Optimizer("rmsprop", 0.01),
    Optimizer("rmsprop", 0.01, alpha=0.9, momentum=0.5, eps=1e-3, weight_decay=0.1),
    Optimizer("adam", 0.01),
    Optimizer("adam", 0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1),
    Optimizer("adam", 0.01, betas=(0.0, 0.99)),
    Optimizer("adamw", 0.01, weight_decay=0.3),
    Optimizer("sgd", 0.5, clip_norm=0.1),
]


FUSION_EMITTERS = "xla_cpu_use_fusion_emitters"


@pytest.fixture(params=("tensorflow", "jax"))
def reference(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly() -> Iterator[None]:
    """Have JAX compile without most of its optimisations: each case is compiled for a few calls, and values count.

    XLA's former emitters of code take a third of the time of those that users have, which compile whole networks in
    `test_references.py`. XLA ends a process whose flags it does not know, hence the look into its library.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        if all(_knows(package, FUSION_EMITTERS) for package in ("jaxlib", "tensorflow")):
            patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --{FUSION_EMITTERS}=false".strip())
        yield


def _knows(package: str, flag: str) -> bool:
    """Whether the XLA inside a package has a flag; true without the package."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("lib*.so*")):
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
                if library.find(flag.encode()) >= 0:
                    return True
    return found is None


@pytest.mark.parametrize("layer", LAYERS)
def test_layers(reference: str, layer: str, model: Made, compare_with_torch: Made) -> None:
    shape, layers = LAYERS[layer]
    compare_with_torch(reference, model(shape, DENSE, *layers, loss="mean_squared_error", dtype="float64"))


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs(reference: str, graph: str, model: Made, compare_with_torch: Made) -> None:
    shape, layers = GRAPHS[graph]
    compare_with_torch(reference, model(shape, *layers, loss="mean_squared_error", dtype="float64"), "float64")


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_embeddings(reference: str, embedding: str, model: Made, compare_with_torch: Made) -> None:
    made = model(
        [7],
        {"op": "embedding", "vocabulary": 9, "dimension": 3, **EMBEDDINGS[embedding]},
        {"op": "permute_dims", "axes": [1, 0]},
        {"op": "conv1d", "filters": 2, "kernel": 3},
        {"op": "flatten"},
        {"op": "dense", "units": 1},
        loss="binary_cross_entropy",
        dtype="int64",
    )
    compare_with_torch(reference, made, optimizer=Optimizer("adam", 0.01))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(reference: str, loss: str, model: Made, compare_with_torch: Made) -> None:
    layers, op = LOSSES[loss]
    compare_with_torch(reference, model([4, 3], *layers, loss=op, dtype="float64"), batch=7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: f"{optimizer.name} {optimizer.settings()}")
def test_optimizers(
    reference: str, optimizer: Optimizer, small_paper_model: ModelSpec, compare_with_torch: Made
) -> None:
    same = optimizer is not OPTIMIZERS[0]  # the network, whose output and gradients depend on no optimizer
    compare_with_torch(reference, small_paper_model, "float64", optimizer, batch=3, training_alone=same)


def test_no_layer_is_left_out() -> None:
    tested = {layer["op"] for _, layers in (*LAYERS.values(), *GRAPHS.values()) for layer in layers} | {"embedding"}
    assert tested == {op for kind in get_args(spec.AnyLayer) for op in get_args(kind.model_fields["op"].annotation)}
