"""The model spec: what it accepts, the shapes it infers, its canonical form, what it says about bad input."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import layers, spec, toml
from bridge.errors import SpecError, TwinGradError
from bridge.layers import Geometry
from py_engine.network.initialisers import INITIALISERS

MODELS = Path(spec.__file__).parents[1] / "experiments" / "models"

GOOD = """\
format = "twingrad-model"
version = 1
opset = 1
name = "small"

[input]
shape = ["N", 12]

[[layers]]
id = "rows"
op = "reshape"
shape = [3, 4]

[[layers]]
id = "rnn"
op = "rnn"
units = 5
weight_init = { name = "normal", mean = 0, std = 0.5 }

[[layers]]
id = "output"
op = "dense"
units = 2

[loss]
op = "softmax_cross_entropy"
"""


def complaint(text: str) -> str:
    """What the spec says about TOML `text`."""
    with pytest.raises(SpecError) as caught:
        spec.loads(text, "bad.toml")
    return str(caught.value)


def change(*pairs: tuple[str, str]) -> str:
    """The good spec with each first text replaced by the second."""
    text = GOOD
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


# --- The network of the papers ---


@pytest.mark.parametrize(
    ("name", "recurrent_init"),
    [("mnist-rnn", "glorot_uniform"), ("mnist-rnn-e", "zeros")],  # zeros, says paper e's code
)
def test_mnist_rnn_is_the_network_of_the_papers(name: str, recurrent_init: str) -> None:
    model = spec.load(MODELS / f"{name}.toml")
    assert [(shape.id, shape.input, shape.output) for shape in model.shapes()] == [
        ("segments", (784,), (4, 196)),
        ("rnn", (4, 196), (64,)),
        ("output", (64,), (10,)),
    ]
    parameters = model.parameters()
    assert {name: parameter.shape for name, parameter in parameters.items()} == {
        "rnn.weight": (196, 64),
        "rnn.recurrent": (64, 64),
        "rnn.bias": (64,),
        "output.weight": (64, 10),
        "output.bias": (10,),
    }
    assert parameters["rnn.weight"].initialiser.name == "glorot_uniform"  # Xavier, says paper e
    assert parameters["rnn.recurrent"].initialiser.name == recurrent_init
    assert model.target == spec.Target((), "classes")


@pytest.mark.parametrize(("name", "bias"), [("mnist-cnn", False), ("mnist-cnn-bias", True)])
def test_mnist_cnn_is_the_network_of_the_paper(name: str, bias: bool) -> None:
    model = spec.load(MODELS / f"{name}.toml")
    assert [shape.output for shape in model.shapes()] == [
        (1, 28, 28),
        *2 * [(6, 26, 26)],
        (6, 13, 13),
        (1014,),
        *2 * [(84,)],
        (10,),
    ]
    weights = {"conv.weight": (6, 1, 3, 3), "hidden.weight": (1014, 84), "output.weight": (84, 10)}
    biases = {"conv.bias": (6,), "hidden.bias": (84,), "output.bias": (10,)}
    parameters = model.parameters()
    assert {name: parameter.shape for name, parameter in parameters.items()} == weights | (biases if bias else {})
    assert all(parameters[name].initialiser == layers.Normal(name="normal", std=0.1) for name in weights)


@pytest.mark.parametrize(
    ("name", "convolved", "kernel"),
    [
        ("imdb-cnn", [(50, 130), *2 * [(8, 128)], (8, 16)], (8, 50, 3)),
        ("imdb-cnn-static", [(50, 130), *2 * [(8, 128)], (8, 16)], (8, 50, 3)),
        ("imdb-cnn-conv2d", [(1, 130, 50), *2 * [(8, 128, 1)], (8, 16, 1)], (8, 1, 3, 50)),
    ],
)
def test_imdb_cnn_is_the_network_of_the_papers(
    name: str, convolved: list[tuple[int, ...]], kernel: tuple[int, ...]
) -> None:
    model = spec.load(MODELS / f"{name}.toml")
    assert [shape.output for shape in model.shapes()] == [(130, 50), *convolved, (128,), (1,)]
    parameters = model.parameters()
    assert {name: parameter.shape for name, parameter in parameters.items()} == {
        "embedding.weight": (12_849, 50),
        "conv.weight": kernel,
        "conv.bias": (8,),
        "output.weight": (128, 1),
        "output.bias": (1,),
    }
    assert parameters["embedding.weight"].trainable == (name != "imdb-cnn-static")
    assert parameters["embedding.weight"].zero_row == 0
    assert (model.input.dtype, model.dtype, model.vocabulary) == ("int64", "float32", 12_849)
    assert model.target == spec.Target((1,), "numbers")


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_model_of_ours_is_valid_and_named_like_its_file(path: Path) -> None:
    assert spec.load(path).name == path.stem


# --- Shapes and parameters, layer by layer ---

GLOROT, ZEROS = layers.GLOROT_UNIFORM, layers.ZEROS


@pytest.mark.parametrize(
    ("table", "input", "output"),
    [
        ({"op": "dense", "units": 5}, (7,), (5,)),
        ({"op": "dense", "units": 5}, (3, 7), (3, 5)),
        ({"op": "rnn", "units": 5}, (3, 7), (5,)),
        ({"op": "rnn", "units": 5, "returns": "sequence"}, (3, 7), (3, 5)),
        ({"op": "lstm", "units": 5}, (1, 7), (5,)),
        ({"op": "gru", "units": 5, "returns": "sequence"}, (3, 1), (3, 5)),
        ({"op": "flatten"}, (2, 3, 4), (24,)),
        ({"op": "flatten"}, (7,), (7,)),
        ({"op": "reshape", "shape": [4, 6]}, (2, 3, 4), (4, 6)),
        ({"op": "activation", "activation": "softplus"}, (2, 3), (2, 3)),
        ({"op": "dropout", "rate": 0.5}, (2, 3), (2, 3)),
        ({"op": "conv1d", "filters": 5, "kernel": 3}, (2, 8), (5, 6)),
        ({"op": "conv1d", "filters": 5, "kernel": 3, "padding": 1, "stride": 2}, (2, 8), (5, 4)),
        ({"op": "conv1d", "filters": 5, "kernel": 3, "padding": [4, 0], "dilation": 2}, (2, 8), (5, 8)),
        ({"op": "conv2d", "filters": 6, "kernel": 3}, (1, 28, 28), (6, 26, 26)),
        ({"op": "conv2d", "filters": 6, "kernel": [3, 2], "stride": [1, 2]}, (4, 8, 9), (6, 6, 4)),
        ({"op": "conv2d", "filters": 6, "kernel": 3, "padding": [1, 2], "groups": 2}, (4, 8, 9), (6, 8, 11)),
        ({"op": "conv2d", "filters": 6, "kernel": 3, "padding": [[0, 1], [2, 0]]}, (4, 8, 9), (6, 7, 9)),
        ({"op": "max_pool1d", "window": 3}, (2, 8), (2, 2)),
        ({"op": "max_pool1d", "window": 3, "stride": 1, "padding": 1}, (2, 8), (2, 8)),
        ({"op": "avg_pool1d", "window": 2, "padding": [1, 0]}, (2, 8), (2, 4)),
        ({"op": "max_pool2d", "window": 2}, (6, 27, 26), (6, 13, 13)),
        ({"op": "avg_pool2d", "window": [8, 1], "stride": [4, 1]}, (8, 128, 1), (8, 31, 1)),
        ({"op": "max_pool1d", "window": 3, "dilation": 2, "stride": 1}, (2, 8), (2, 4)),
        ({"op": "max_pool1d", "window": 3, "ceil_mode": True}, (2, 8), (2, 3)),
        ({"op": "avg_pool1d", "window": 2, "stride": 4, "ceil_mode": True}, (2, 6), (2, 2)),
        ({"op": "avg_pool1d", "window": 2, "stride": 3, "padding": [0, 1], "ceil_mode": True}, (2, 3), (2, 1)),
        ({"op": "conv3d", "filters": 5, "kernel": [2, 1, 3], "padding": 1, "stride": 2}, (2, 3, 4, 5), (5, 2, 3, 3)),
        ({"op": "conv3d", "filters": 5, "kernel": 2, "padding": "same"}, (2, 3, 4, 5), (5, 3, 4, 5)),
        ({"op": "max_pool3d", "window": [1, 2, 2], "ceil_mode": True}, (2, 3, 4, 5), (2, 3, 2, 3)),
        ({"op": "avg_pool3d", "window": 2, "padding": [[1, 0], [0, 0], [0, 1]]}, (2, 3, 4, 5), (2, 2, 2, 3)),
        ({"op": "conv1d_transpose", "filters": 5, "kernel": 3}, (2, 8), (5, 10)),
        ({"op": "conv1d_transpose", "filters": 5, "kernel": 3, "stride": 2, "padding": [1, 0]}, (2, 8), (5, 16)),
        ({"op": "conv1d_transpose", "filters": 5, "kernel": 2, "dilation": 3, "output_padding": 2}, (2, 8), (5, 13)),
        (
            {"op": "conv2d_transpose", "filters": 6, "kernel": 3, "stride": 2, "output_padding": 1},
            (4, 8, 9),
            (6, 18, 20),
        ),
        (
            {"op": "conv3d_transpose", "filters": 6, "kernel": [1, 2, 3], "padding": [0, 0, 1]},
            (4, 2, 3, 4),
            (6, 2, 4, 4),
        ),
        ({"op": "interpolate", "size": 5}, (2, 3, 4), (2, 5, 5)),
        ({"op": "interpolate", "size": [5], "mode": "linear"}, (2, 8), (2, 5)),
        ({"op": "interpolate", "scale": [1, 2, 3]}, (2, 3, 4, 5), (2, 3, 8, 15)),
        ({"op": "global_max_pool"}, (2, 3, 4, 5), (2,)),
        ({"op": "global_max_pool"}, (8, 128), (8,)),
        ({"op": "global_avg_pool"}, (8, 3, 4, 5), (8,)),
        ({"op": "permute_dims", "axes": [1, 2, 0]}, (2, 3, 4), (3, 4, 2)),
        ({"op": "rbf", "units": 5}, (3, 7), (3, 5)),
        ({"op": "batch_norm"}, (3, 7), (3, 7)),
        ({"op": "layer_norm"}, (3, 7), (3, 7)),
    ],
)
def test_a_layer_infers_its_shape(table: dict[str, Any], input: tuple[int, ...], output: tuple[int, ...]) -> None:
    model = spec.parse(network([table], input) | {"opset": spec.OPSET})
    assert model.shapes()[0].input == input
    assert model.shapes()[0].output == model.output == output


def test_dense_parameters() -> None:
    model = spec.parse(network([{"op": "dense", "units": 5}], (3, 7)))
    assert model.parameters() == {
        "a.weight": layers.ParameterSpec((7, 5), GLOROT, fan_in=7, fan_out=5),
        "a.bias": layers.ParameterSpec((5,), ZEROS, fan_in=7, fan_out=5),
    }


def test_dense_without_bias() -> None:
    model = spec.parse(network([{"op": "dense", "units": 5, "bias": False}], (7,)))
    assert list(model.parameters()) == ["a.weight"]


@pytest.mark.parametrize(("op", "gates"), [("rnn", 1), ("lstm", 4), ("gru", 3)])
def test_gates_lie_side_by_side_and_have_the_fans_of_one(op: str, gates: int) -> None:
    model = spec.parse(network([{"op": op, "units": 5, "recurrent_init": "zeros"}], (3, 7)))
    assert model.parameters() == {
        "a.weight": layers.ParameterSpec((7, gates * 5), GLOROT, fan_in=7, fan_out=5),
        "a.recurrent": layers.ParameterSpec((5, gates * 5), ZEROS, fan_in=5, fan_out=5),
        "a.bias": layers.ParameterSpec((gates * 5,), ZEROS, fan_in=7, fan_out=5),
    }


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_have_a_kernel_for_every_filter_and_channel_of_its_group(bias: bool) -> None:
    layer = {"op": "conv2d", "filters": 6, "kernel": [3, 2], "groups": 2, "bias": bias, "bias_init": "ones"}
    parameters = spec.parse(network([layer], (4, 8, 9))).parameters()
    fans = {"fan_in": 2 * 3 * 2, "fan_out": 3 * 3 * 2}
    assert parameters.pop("a.weight") == layers.ParameterSpec((6, 2, 3, 2), GLOROT, **fans)
    assert parameters == ({"a.bias": layers.ParameterSpec((6,), layers.ONES, **fans)} if bias else {})


def test_a_transposed_convolution_has_the_weight_of_the_convolution_that_it_transposes() -> None:
    layer = {"op": "conv2d_transpose", "filters": 6, "kernel": [3, 2], "groups": 2}
    parameters = spec.parse(network([layer], (4, 8, 9)) | {"opset": 4}).parameters()
    fans = {"fan_in": 2 * 3 * 2, "fan_out": 3 * 3 * 2}
    assert parameters["a.weight"] == layers.ParameterSpec((4, 3, 3, 2), GLOROT, **fans)
    assert parameters["a.bias"] == layers.ParameterSpec((6,), ZEROS, **fans)


def test_a_scale_becomes_a_size() -> None:
    models = [
        spec.parse(network([{"op": "interpolate", **given}], (2, 3, 4)) | {"opset": 4})
        for given in ({"scale": 2}, {"size": [6, 8]})
    ]
    assert models[0] == models[1] == spec.loads(models[0].dump())
    assert "scale" not in models[0].dump()


def test_rbf_parameters() -> None:
    model = spec.parse(network([{"op": "rbf", "units": 5}], (3, 7)))
    assert model.parameters() == {
        "a.centers": layers.ParameterSpec((5, 7), layers.Normal(name="normal", std=1.0), fan_in=7, fan_out=5),
        "a.beta": layers.ParameterSpec((5,), layers.ONES, fan_in=7, fan_out=5),
    }


def test_normalisations_have_the_parameters_of_their_axis() -> None:
    model = spec.parse(network([{"op": "batch_norm"}, {"op": "layer_norm"}], (3, 7)))
    found = [(name, p.shape, p.initialiser.name, p.trainable) for name, p in model.parameters().items()]
    assert found == [
        ("a.scale", (3,), "ones", True),
        ("a.shift", (3,), "zeros", True),
        ("a.running_mean", (3,), "zeros", False),
        ("a.running_var", (3,), "ones", False),
        ("b.scale", (7,), "ones", True),
        ("b.shift", (7,), "zeros", True),
    ]
    assert list(model.in_memory()) == ["a.scale", "a.shift", "b.scale", "b.shift", "a.running_mean", "a.running_var"]
    assert model.in_memory() == model.parameters()


# Token ids.

EMBEDDING = {"op": "embedding", "vocabulary": 9, "dimension": 4}


@pytest.mark.parametrize("before", [[], [{"op": "reshape", "shape": [3, 2]}], [{"op": "permute_dims", "axes": [0]}]])
def test_an_embedding_makes_numbers_of_token_ids(before: list[dict[str, Any]]) -> None:
    model = spec.parse(tokens([*before, EMBEDDING, {"op": "flatten"}, {"op": "dense", "units": 1}], (6,)))
    embedding = model.shapes()[len(before)]
    assert embedding.output == (*embedding.input, 4)
    assert model.parameters()[f"{embedding.id}.weight"] == layers.ParameterSpec((9, 4), layers.NORMAL, 9, 4)
    assert (model.input.dtype, model.dtype, model.vocabulary) == ("int64", "float32", 9)


def test_numbers_have_no_vocabulary() -> None:
    model = spec.parse(network([{"op": "dense", "units": 1}], (6,)))
    assert model.vocabulary is None
    assert model.dtype == model.input.dtype == "float32"


def tokens(layers: list[dict[str, Any]], input: tuple[int, ...]) -> dict[str, Any]:
    """The same as `network` for token ids."""
    made = network(layers, input)
    made["input"]["dtype"] = "int64"
    return made


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        ("softmax_cross_entropy", spec.Target((3,), "classes")),
        ("binary_cross_entropy", spec.Target((3, 7), "numbers")),
        ("mean_squared_error", spec.Target((3, 7), "numbers")),
    ],
)
def test_a_loss_says_what_targets_it_needs(loss: str, target: spec.Target) -> None:
    model = spec.parse(network([{"op": "dense", "units": 7}], (3, 7)) | {"loss": {"op": loss}})
    assert model.target == target


WEIGHTED = {"op": "softmax_cross_entropy", "class_weights": [1, 2.5], "label_smoothing": 0.1, "ignored_class": -1}


def test_settings_of_a_loss_need_opset_4_and_are_said_where_they_are_given() -> None:
    layers = [{"op": "dense", "units": 2}]
    made = network(layers, (3, 7)) | {"loss": WEIGHTED}
    assert "loss.class_weights: class_weights of a loss needs opset 4, found 2" in refusal(made)
    found = spec.parse(made | {"opset": 4})
    assert found == spec.loads(found.dump())
    assert found.loss.settings() == {"class_weights": (1.0, 2.5), "label_smoothing": 0.1, "ignored_class": -1}
    defaults = {"op": "softmax_cross_entropy", "label_smoothing": 0.0}
    plain = spec.parse(network(layers, (3, 7)) | {"loss": defaults})
    assert plain.loss.settings() == {} and "smoothing" not in plain.dump()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (WEIGHTED | {"class_weights": [1, 2, 3]}, "found 3 class_weights, expected one for each of 2 classes"),
        (WEIGHTED | {"class_weights": [0, 0]}, "loss.class_weights: found zeros alone, expected one number above 0"),
        (
            WEIGHTED | {"class_weights": [1, -1]},
            "loss.class_weights[1]: found -1, expected a finite number of at least 0",
        ),
        (WEIGHTED | {"label_smoothing": 2}, "loss.label_smoothing: found 2, expected a finite number from 0 to 1"),
        (WEIGHTED | {"ignored_class": 2**40}, "loss.ignored_class: found 1099511627776, expected an integer"),
        (
            {"op": "binary_cross_entropy", "positive_weight": 0},
            "loss.positive_weight: found 0, expected a finite number above 0",
        ),
        ({"op": "mean_squared_error", "ignored_class": 0}, 'loss.ignored_class: unknown key, expected "op"'),
    ],
)
def test_settings_of_a_loss_that_do_not_fit(loss: dict[str, Any], message: str) -> None:
    found = refusal(network([{"op": "dense", "units": 2}], (3, 7)) | {"opset": 4, "loss": loss})
    assert message in found, found


def test_every_layer_and_loss_is_in_the_closed_set() -> None:
    assert leaves(layers.Layer) == set(get_args(spec.AnyLayer))
    assert leaves(spec.Loss) == set(get_args(spec.AnyLoss))


def test_the_spec_knows_the_initialisers_of_the_engine() -> None:
    names = {name for kind in get_args(layers.AnyInitialiser) for name in kind.model_fields["name"].annotation.__args__}
    assert names == set(INITIALISERS)


def leaves(base: type) -> set[type]:
    """All classes below `base` that have none below themselves."""
    below = base.__subclasses__()
    return set().union(*map(leaves, below)) if below else {base}


def network(layers: list[dict[str, Any]], input: tuple[int, ...]) -> dict[str, Any]:
    """A spec as data: the given layers, called a, b, c, …, with a loss that fits any output."""
    return {
        "format": "twingrad-model",
        "version": 1,
        "opset": 2,
        "name": "net",
        "input": {"shape": ["N", *input]},
        "layers": [{"id": chr(ord("a") + index)} | layer for index, layer in enumerate(layers)],
        "loss": {"op": "mean_squared_error"},
    }


# --- Random valid specs ---

sizes = st.integers(1, 6)
numbers = st.floats(-1e6, 1e6, allow_nan=False)
plain_names = sorted(INITIALISERS)


@st.composite
def initialisers(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(plain_names))
    if draw(st.booleans()):
        return name
    if name == "uniform":
        low, high = sorted([draw(numbers), draw(numbers)])
        return {"name": name, "low": low, "high": high}
    if name == "normal":
        return {"name": name, "mean": draw(numbers), "std": abs(draw(numbers))}
    return {"name": name}


def factors(draw: st.DrawFn, product: int) -> list[int]:
    """Some shape with this many elements."""
    shape: list[int] = []
    while product > 1 and len(shape) < 3:
        divisor = draw(st.sampled_from([d for d in range(1, product + 1) if product % d == 0]))
        shape.append(divisor)
        product //= divisor
    return [*shape, product]


def windows(draw: st.DrawFn, sizes: tuple[int, ...], dilates: bool) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Options of a window that fits, and what it leaves of the axes, counted place by place."""
    kernels, strides, paddings, dilations, left = [], [], [], [], []
    for size in sizes:
        padding = draw(st.tuples(*2 * [st.integers(0, 2)]))
        dilation = draw(st.integers(1, 3)) if dilates else 1
        whole = size + sum(padding)
        kernel = draw(st.integers(1, (whole - 1) // dilation + 1))
        if not dilates:
            padding = tuple(min(side, kernel // 2) for side in padding)
            whole, kernel = size + sum(padding), min(kernel, size + sum(padding))
            padding = tuple(min(side, kernel // 2) for side in padding)
            whole = size + sum(padding)
        stride = draw(st.integers(1, 3))
        left.append(sum(1 for start in range(0, whole, stride) if start + dilation * (kernel - 1) < whole))
        for values, value in ((kernels, kernel), (strides, stride), (paddings, list(padding)), (dilations, dilation)):
            values.append(value)
    given = {"kernel" if dilates else "window": kernels, "stride": strides, "padding": paddings}
    given |= {"dilation": dilations} if dilates else {}
    return {key: values[0] if len(sizes) == 1 else values for key, values in given.items()}, tuple(left)


def divisors(*numbers: int) -> st.SearchStrategy[int]:
    """Those that all numbers have."""
    return st.sampled_from([d for d in range(1, min(numbers) + 1) if not any(number % d for number in numbers)])


Built = tuple[dict[str, Any], list[tuple[int, ...]], dict[str, tuple[int, ...]]]


@st.composite
def networks(draw: st.DrawFn) -> Built:
    """A valid spec as data, with its shapes and its parameters' as a few lines of arithmetic have them."""
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    input, shapes, parameters, layers = shape, [shape], {}, []
    for name in draw(st.lists(st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True), min_size=1, unique=True)):
        recurrent = ["rnn", "lstm", "gru"] if len(shape) == 2 else []
        spatial = {2: ["conv1d", "max_pool1d", "avg_pool1d"], 3: ["conv2d", "max_pool2d", "avg_pool2d"]}
        new = ["permute_dims", "rbf", "batch_norm", "layer_norm"]
        new += ["global_max_pool", "global_avg_pool"] if len(shape) > 1 else []
        new += spatial.get(len(shape), [])
        op = draw(st.sampled_from(["dense", "flatten", "reshape", "activation", "dropout", *recurrent, *new]))
        layer: dict[str, Any] = {"id": name, "op": op}
        units, features = draw(sizes), shape[-1]
        if op in recurrent:
            layer |= {"units": units, "returns": draw(st.sampled_from(["last", "sequence"]))}
            if op == "rnn":
                layer["activation"] = draw(st.sampled_from(["tanh", "relu", "identity"]))
            shape = (shape[0], units) if layer["returns"] == "sequence" else (units,)
            wide = units * {"rnn": 1, "lstm": 4, "gru": 3}[op]
            parameters |= {f"{name}.weight": (features, wide), f"{name}.recurrent": (units, wide)}
            parameters[f"{name}.bias"] = (wide,)
            layer |= draw(st.fixed_dictionaries({}, optional={"recurrent_init": initialisers()}))
        elif op == "dense":
            layer |= {"units": units, "bias": draw(st.booleans())}
            shape = (*shape[:-1], units)
            parameters[f"{name}.weight"] = (features, units)
            if layer["bias"]:
                parameters[f"{name}.bias"] = (units,)
        elif op[-2:] in ("1d", "2d"):
            options, spatial_shape = windows(draw, shape[1:], op.startswith("conv"))
            layer |= options
            shape = (shape[0], *spatial_shape)
            if op.startswith("conv"):
                layer |= {"filters": units, "bias": draw(st.booleans()), "groups": draw(divisors(shape[0], units))}
                sizes_of = [options["kernel"]] if op == "conv1d" else options["kernel"]
                parameters[f"{name}.weight"] = (units, shape[0] // layer["groups"], *sizes_of)
                if layer["bias"]:
                    parameters[f"{name}.bias"] = (units,)
                shape = (units, *shape[1:])
        elif op.startswith("global"):
            shape = shape[:1]
        elif op == "permute_dims":
            layer["axes"] = draw(st.permutations(range(len(shape))))
            shape = tuple(shape[axis] for axis in layer["axes"])
        elif op == "rbf":
            layer["units"] = units
            parameters |= {f"{name}.centers": (units, features), f"{name}.beta": (units,)}
            shape = (*shape[:-1], units)
        elif op.endswith("norm"):
            layer["eps"] = draw(st.floats(1e-9, 1))
            names = ("scale", "shift", "running_mean", "running_var") if op == "batch_norm" else ("scale", "shift")
            parameters |= {f"{name}.{kind}": (shape[0] if op == "batch_norm" else features,) for kind in names}
        elif op == "flatten":
            shape = (math.prod(shape),)
        elif op == "reshape":
            layer["shape"] = factors(draw, math.prod(shape))
            shape = tuple(layer["shape"])
        elif op == "activation":
            layer["activation"] = draw(st.sampled_from(["identity", "tanh", "relu", "softplus"]))
        else:
            layer["rate"] = draw(st.floats(0, 1, exclude_max=True))
        if op in ("dense", *recurrent):
            optional = {"weight_init": initialisers(), "bias_init": initialisers()}
            layer |= draw(st.fixed_dictionaries({}, optional=optional))
        layers.append(layer)
        shapes.append(shape)
    losses = ["mean_squared_error", "binary_cross_entropy"] + ["softmax_cross_entropy"] * (shape[-1] > 1)
    data = network(layers, input) | {"loss": {"op": draw(st.sampled_from(losses))}}
    data["input"]["dtype"] = draw(st.sampled_from(["float32", "float64"]))
    return data, shapes, parameters


@given(networks())
def test_shape_inference_agrees_with_plain_arithmetic(built: Built) -> None:
    data, shapes, parameters = built
    model = spec.parse(data)
    inferred = model.shapes()
    assert [inferred[0].input, *(shape.output for shape in inferred)] == shapes
    assert [shape.input for shape in inferred[1:]] == [shape.output for shape in inferred[:-1]]
    assert {name: parameter.shape for name, parameter in model.parameters().items()} == parameters
    assert {name: shape for layer in inferred for name, shape in layer.parameters.items()} == parameters


@given(networks())
def test_a_dump_reads_back_as_the_same_spec(built: Built) -> None:
    model = spec.parse(built[0])
    again = spec.loads(model.dump())
    assert again == model
    assert again.dump() == model.dump()
    assert again.digest == model.digest


@given(networks(), st.data())
def test_a_random_fault_is_refused_at_its_place(built: Built, data: st.DataObject) -> None:
    table = built[0]
    index = data.draw(st.integers(0, len(table["layers"]) - 1))
    layer = table["layers"][index]
    key = data.draw(st.sampled_from(sorted(layer)))
    layer[key] = data.draw(st.sampled_from([math.nan, -1, [], {}, "no such thing", 10**30]))
    with pytest.raises(SpecError) as caught:
        spec.parse(table, "random.toml")
    assert str(caught.value).startswith("random.toml: ")
    assert f"layers[{index}]" in str(caught.value)


# --- Canonical form ---


def test_the_digest_ignores_layout_comments_and_spelled_out_defaults() -> None:
    text = change(
        ('name = "small"', 'name = "small"  # a comment\n'),
        ("units = 5", 'activation = "tanh"\nunits = 0x5'),
        ("mean = 0,", ""),
        ("units = 2", 'units = 2\nbias_init = { name = "zeros" }'),
    )
    assert spec.loads(text).digest == spec.loads(GOOD).digest


@pytest.mark.parametrize(
    ("old", "new"), [("units = 5", "units = 6"), ("std = 0.5", "std = 0.25"), ('"small"', '"tall"')]
)
def test_the_digest_depends_on_every_value(old: str, new: str) -> None:
    assert spec.loads(change((old, new))).digest != spec.loads(GOOD).digest


def test_a_byte_order_mark_and_windows_line_ends_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert spec.load(path).digest == spec.loads(GOOD).digest


text_values = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text_values,
    lambda inner: st.lists(inner) | st.dictionaries(text_values, inner),
    max_leaves=8,
)


@given(st.dictionaries(text_values, values))
def test_toml_reads_back_what_it_dumped(table: dict[str, Any]) -> None:
    assert toml.parse(toml.dump(table)) == table


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"op": "conv2d", "kernel": 3}, {"op": "conv2d", "kernel": [3, 3]}),
        ({"op": "conv2d", "kernel": 3, "stride": 2}, {"op": "conv2d", "kernel": [3, 3], "stride": [2, 2]}),
        ({"op": "conv2d", "kernel": 3, "padding": 1}, {"op": "conv2d", "kernel": 3, "padding": [[1, 1], [1, 1]]}),
        ({"op": "conv2d", "kernel": 3, "padding": [1, 2]}, {"op": "conv2d", "kernel": 3, "padding": [[1, 1], [2, 2]]}),
        ({"op": "max_pool2d", "window": [2, 3]}, {"op": "max_pool2d", "window": [2, 3], "stride": [2, 3]}),
        ({"op": "conv3d", "kernel": 3, "padding": 1}, {"op": "conv3d", "kernel": [3, 3, 3], "padding": [[1, 1]] * 3}),
        (
            {"op": "conv2d_transpose", "kernel": 3, "stride": 2, "output_padding": 1},
            {"op": "conv2d_transpose", "kernel": 3, "stride": 2, "output_padding": [1, 1]},
        ),
    ],
)
def test_one_number_is_short_for_all(short: dict[str, Any], long: dict[str, Any]) -> None:
    more = {"filters": 2} if short["op"].startswith("conv") else {}
    shape = (1, 8, 8, 8) if short["op"] == "conv3d" else (1, 8, 8)
    models = [spec.parse(network([layer | more], shape) | {"opset": spec.OPSET}) for layer in (short, long)]
    assert models[0].dump() == models[1].dump()
    assert models[0] == models[1]


def test_geometry_is_by_axis() -> None:
    convolutions = [
        {"op": "conv1d", "filters": 2, "kernel": 3, "padding": [1, 2], "dilation": 2},
        {"op": "reshape", "shape": [2, 2, 4]},
        {"op": "max_pool2d", "window": [2, 3], "padding": [[1, 1], [0, 0]]},
    ]
    one, _, two = spec.parse(network(convolutions, (3, 9))).layers
    assert one.geometry == layers.Geometry((3,), (1,), ((1, 2),), (2,))
    assert one.geometry.extent == (5,)
    assert not one.geometry.is_symmetric
    assert two.geometry == layers.Geometry((2, 3), (2, 3), ((1, 1), (0, 0)), (1, 1))
    assert two.geometry.is_symmetric


# --- JSON Schema ---


def test_the_schema_describes_every_op_and_forbids_other_keys() -> None:
    schema = json.loads(json.dumps(spec.json_schema()))
    tables = [table for table in schema["$defs"].values() if table.get("type") == "object"]
    assert all(table["additionalProperties"] is False for table in [schema, *tables])
    ops = {table["properties"]["op"].get("const") for table in tables if "op" in table["properties"]}
    layer_ops = {kind.model_fields["op"].annotation.__args__[0] for kind in get_args(spec.AnyLayer)}
    assert layer_ops <= ops
    assert all("op" in table["required"] for table in tables if "op" in table["properties"])


# --- Bad input: each message names the place, what was found and what is allowed ---

OPS = ", ".join(
    sorted(f'"{op}"' for kind in get_args(spec.AnyLayer) for op in get_args(kind.model_fields["op"].annotation))
)
INITIALISER_NAMES = '"glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "normal", "ones", "uniform", "zeros"'


BAD = {
    "negative units": (
        "units = 5",
        "units = -3",
        'layers[1] (id "rnn").units: found -3, expected an integer from 1 to 16777216',
    ),
    "units not an integer": (
        "units = 5",
        "units = 5.0",
        'layers[1] (id "rnn").units: found 5.0, expected an integer from 1 to 16777216',
    ),
    "units not a number": (
        "units = 5",
        "units = true",
        'layers[1] (id "rnn").units: found true, expected an integer from 1 to 16777216',
    ),
    "unknown key": (
        "units = 5",
        "units = 5\ncolour = 1",
        (
            'layers[1] (id "rnn").colour: unknown key, expected one of "id", "op", "inputs", "units", "returns", '
            '"weight_init", "recurrent_init", "bias_init", "activation"'
        ),
    ),
    "unknown table": (
        '[loss]\nop = "softmax_cross_entropy"',
        '[loss]\nop = "softmax_cross_entropy"\n[training]\nepochs = 5',
        'training: unknown key, expected one of "format", "version", "opset", "name", "input", "layers", "loss"',
    ),
    "unknown op": (
        'op = "rnn"',
        'op = "rmn"',
        f'layers[1] (id "rnn").op: unknown op "rmn" (did you mean "rnn"?), expected one of {OPS}',
    ),
    "no op": ('op = "rnn"\n', "", f'layers[1] (id "rnn").op: missing, expected one of {OPS}'),
    "opset from the future": (
        "opset = 1",
        "opset = 9",
        "opset: found 9, expected an integer from 1 to 4 (a higher one needs a newer TwinGrad)",
    ),
    "version from the future": (
        "version = 1",
        "version = 2",
        "version: found 2, expected 1 (a higher one needs a newer TwinGrad)",
    ),
    "another format": (
        "twingrad-model",
        "twingrad-paper",
        'format: found "twingrad-paper", expected "twingrad-model"',
    ),
    "no format": ('format = "twingrad-model"\n', "", 'format: missing, expected "twingrad-model"'),
    "duplicate id": (
        'id = "rnn"',
        'id = "rows"',
        'layers[1] (id "rows").id: "rows" is the id of layers[0] already',
    ),
    "bad id": (
        'id = "rnn"',
        'id = "Rnn 1"',
        (
            'layers[1] (id "Rnn 1").id: found "Rnn 1", expected a text of at most 64 characters that matches '
            "^[a-z][a-z0-9_-]*$"
        ),
    ),
    "reshape that does not fit": (
        "shape = [3, 4]",
        "shape = [3, 5]",
        (
            'layers[0] (id "rows"): found an input of shape (N, 12), 12 elements per sample, '
            "expected 15 to fill (N, 3, 5)"
        ),
    ),
    "rnn over something flat": (
        "shape = [3, 4]",
        "shape = [12]",
        'layers[1] (id "rnn"): expected an input of shape (N, steps, features), found (N, 12)',
    ),
    "empty dimension": (
        "shape = [3, 4]",
        "shape = [3, 0]",
        'layers[0] (id "rows").shape[1]: found 0, expected an integer from 1 to 16777216',
    ),
    "no dimension": (
        "shape = [3, 4]",
        "shape = []",
        'layers[0] (id "rows").shape: found [], expected a list of 1 to 8, each an integer from 1 to 16777216',
    ),
    "too few dimensions": (
        '["N", 12]',
        "[12]",
        ('input.shape: found [12], expected a list of 2 to 9, each "N" or an integer from 1 to 16777216'),
    ),
    "no N": ('["N", 12]', "[100, 12]", 'input.shape: found [100, 12], expected "N" first and only there'),
    "two N": ('["N", 12]', '["N", "N"]', 'input.shape: found ["N", "N"], expected "N" first and only there'),
    "negative dimension": (
        '["N", 12]',
        '["N", -12]',
        'input.shape[1]: found -12, expected "N" or an integer from 1 to 16777216',
    ),
    "unknown choice": (
        'op = "rnn"',
        'op = "rnn"\nreturns = "first"',
        'layers[1] (id "rnn").returns: found "first", expected one of "last", "sequence"',
    ),
    "nan": (
        "std = 0.5",
        "std = nan",
        'layers[1] (id "rnn").weight_init.std: found nan, expected a finite number of at least 0',
    ),
    "inf": (
        "std = 0.5",
        "std = inf",
        'layers[1] (id "rnn").weight_init.std: found inf, expected a finite number of at least 0',
    ),
    "negative deviation": (
        "std = 0.5",
        "std = -0.5",
        'layers[1] (id "rnn").weight_init.std: found -0.5, expected a finite number of at least 0',
    ),
    "another initialisers option": (
        "std = 0.5",
        "low = 0.5",
        'layers[1] (id "rnn").weight_init.low: unknown key, expected one of "name", "mean", "std"',
    ),
    "empty interval": (
        '{ name = "normal", mean = 0, std = 0.5 }',
        '{ name = "uniform", low = 1, high = 0 }',
        'layers[1] (id "rnn").weight_init.low: found 1.0, expected at most high = 0.0',
    ),
    "unknown initialiser": (
        '{ name = "normal", mean = 0, std = 0.5 }',
        '"xavier"',
        f'layers[1] (id "rnn").weight_init: unknown name "xavier", expected one of {INITIALISER_NAMES}',
    ),
    "nameless initialiser": (
        '{ name = "normal", mean = 0, std = 0.5 }',
        "{ std = 0.5 }",
        f'layers[1] (id "rnn").weight_init.name: missing, expected one of {INITIALISER_NAMES}',
    ),
    "loss that does not fit": (
        "units = 2",
        "units = 1",
        (
            'loss: softmax_cross_entropy does not fit the output of layer "output": found logits of '
            "shape (N, 1), "
            "expected (N, …, classes) with 2 classes or more (for a single logit there is "
            "binary_cross_entropy)"
        ),
    ),
    "softmax twice": (
        "[loss]",
        '[[layers]]\nid = "p"\nop = "activation"\nactivation = "softmax"\n[loss]',
        (
            "loss: softmax_cross_entropy applies softmax itself: expected logits, found the output "
            'of layer "p" '
            "(softmax), which has to go"
        ),
    ),
    "unknown loss": (
        '"softmax_cross_entropy"',
        '"hinge"',
        (
            'loss.op: unknown op "hinge", expected one of "binary_cross_entropy", "mean_squared_error", '
            '"softmax_cross_entropy"'
        ),
    ),
    "drop everything": (
        'op = "reshape"\nshape = [3, 4]',
        'op = "dropout"\nrate = 1.0',
        'layers[0] (id "rows").rate: found 1.0, expected a finite number of at least 0 and below 1',
    ),
    "more than any memory": (
        "units = 5",
        "units = 16000000",
        'layers[1] (id "rnn"): rnn.recurrent would have 256000000000000 elements, expected at most 2147483647',
    ),
    "quoted key": (
        "[input]",
        "[input]\n'two words' = 1",
        'input."two words": unknown key, expected one of "shape", "dtype"',
    ),
    "key twice": (
        "opset = 1",
        "opset = 1\nlayers = 3",
        "not valid TOML: Cannot overwrite a value (at line 10",
    ),
    "number longer than python prints": (
        "units = 5",
        f"units = 0x{'f' * 5000}",
        'layers[1] (id "rnn").units: found 0xffff',
    ),
    "number longer than python reads": (
        "units = 5",
        f"units = {'9' * 5000}",
        "line 17: 'units = 9999999999…': a number of",
    ),
    "nested too deeply": ("units = 5", f"units = {'[' * 5000}", "not usable TOML: nested too deeply"),
    "syntax error with its line": (
        "units = 5",
        "units = 5 5",
        "not valid TOML: Expected newline or end of document after a statement (at line 17",
    ),
}


CONV1D = {"op": "conv1d", "filters": 4, "kernel": 3}
CONV2D = {"op": "conv2d", "filters": 4, "kernel": 3}
SIZE = "an integer from 1 to 16777216"
SIZES = f"{SIZE} or a list of 2, each {SIZE}"

UNFIT = {
    "sequence shorter than the kernel": (
        CONV1D,
        (3, 2),
        'a").kernel: found 3 for an input of shape (N, 3, 2): it spans 3, more than the 2 of its input',
    ),
    "sequence shorter than the dilated kernel": (
        CONV1D | {"dilation": 4, "padding": [1, 0]},
        (3, 7),
        'a").kernel: found 3 for an input of shape (N, 3, 7): it spans 9, more than the 7 (8 with its padding)',
    ),
    "image smaller than the kernel": (
        CONV2D | {"kernel": [2, 5]},
        (3, 4, 4),
        'a").kernel: found [2, 5] for an input of shape (N, 3, 4, 4): it spans 5, more than the 4 of its input',
    ),
    "window larger than its input": (
        {"op": "max_pool1d", "window": 9},
        (3, 8),
        'a").window: found 9 for an input of shape (N, 3, 8): it spans 9, more than the 8 of its input',
    ),
    "window wider than its input": (
        {"op": "avg_pool2d", "window": [2, 3]},
        (3, 8, 2),
        'a").window: found [2, 3] for an input of shape (N, 3, 8, 2): it spans 3, more than the 2 of its input',
    ),
    "convolution over something flat": (
        CONV1D,
        (784,),
        'a"): expected an input of shape (N, channels, length), found (N, 784)',
    ),
    "image without channels": (
        CONV2D,
        (28, 28),
        'a"): expected an input of shape (N, channels, height, width), found (N, 28, 28)',
    ),
    "groups that do not divide the channels": (
        CONV1D | {"groups": 2},
        (3, 8),
        'a").groups: found 2, which does not divide the 3 channels',
    ),
    "groups that do not divide the filters": (
        CONV1D | {"groups": 3},
        (3, 8),
        'a").groups: found 3, which does not divide the 4 filters',
    ),
    "no kernel": ({"op": "conv2d", "filters": 4}, (3, 8, 8), f'a").kernel: missing, expected {SIZES}'),
    "empty kernel": (CONV2D | {"kernel": 0}, (3, 8, 8), f'a").kernel: found 0, expected {SIZES}'),
    "half a kernel": (CONV2D | {"kernel": [3]}, (3, 8, 8), f'a").kernel: found [3], expected {SIZES}'),
    "kernel flat on one axis": (CONV2D | {"kernel": [3, 0]}, (3, 8, 8), f'a").kernel[1]: found 0, expected {SIZE}'),
    "negative padding": (
        CONV2D | {"padding": [1, [0, -1]]},
        (3, 8, 8),
        'a").padding[1][1]: found -1, expected an integer from 0 to 16777216',
    ),
    "padding by another name": (
        CONV1D | {"padding": "valid"},
        (3, 8),
        'a").padding: found "valid", expected an integer from 0 to 16777216 or a list of 2, each an integer from 0 to',
    ),
    "windows of padding alone": (
        {"op": "max_pool2d", "window": 3, "padding": [1, [0, 2]]},
        (3, 8, 8),
        'a").padding: found 2, expected at most half the window of 3: 1',
    ),
    "a faulty window is reported once": (
        {"op": "max_pool2d", "window": 0},
        (3, 8, 8),
        f'model: layers[0] (id "a").window: found 0, expected {SIZES}',
    ),
    "nothing to pool": (
        {"op": "global_max_pool"},
        (3,),
        'a"): expected an input of shape (N, channels, …), found (N, 3): nothing to pool',
    ),
    "no permutation": (
        {"op": "permute_dims", "axes": [1, 1]},
        (3, 8),
        'a").axes: found [1, 1], expected each of 0 to 1 once for an input of shape (N, 3, 8)',
    ),
    "permutation of other axes": (
        {"op": "permute_dims", "axes": [0, 2, 1]},
        (3, 8),
        'a").axes: found [0, 2, 1], expected each of 0 to 1 once for an input of shape (N, 3, 8)',
    ),
    "embedding of numbers": (
        EMBEDDING,
        (3, 8),
        'a"): embedding reads token ids, found numbers: it must be the first layer that computes, '
        'and input.dtype "int64"',
    ),
    "momentum above one": (
        {"op": "batch_norm", "momentum": 1.5},
        (3, 8),
        'a").momentum: found 1.5, expected a finite number above 0 and of at most 1',
    ),
    "no epsilon": (
        {"op": "layer_norm", "eps": 0},
        (3, 8),
        'a").eps: found 0, expected a finite number above 0',
    ),
    "padding that fills any memory": (
        CONV1D | {"stride": 2**24, "padding": 2**24},
        (2**12, 8),
        'a"): its padded input would have 137438986240 elements, expected at most 2147483647',
    ),
    "output larger than any memory": (
        CONV1D | {"filters": 2**20},
        (1, 2**12),
        'a"): its output would have 4292870144 elements, expected at most 2147483647',
    ),
}


@pytest.mark.parametrize(("layer", "input", "message"), UNFIT.values(), ids=UNFIT)
def test_layers_that_do_not_fit(layer: dict[str, Any], input: tuple[int, ...], message: str) -> None:
    found = refusal(network([layer], input))
    assert found.startswith('model: layers[0] (id "a")')
    assert message in found, found


UNFIT_OF_OPSET_4 = {
    "a volume for an image": (
        {"op": "conv3d", "filters": 2, "kernel": 2},
        'a"): expected an input of shape (N, channels, depth, height, width), found (N, 3, 4)',
    ),
    "nothing left of a transposed convolution": (
        {"op": "conv1d_transpose", "filters": 2, "kernel": 2, "padding": 4},
        'a").padding: found [[4, 4]] for an input of shape (N, 3, 4): nothing is left of the result, whose lengths '
        "would be [-3]",
    ),
    "padding of a word": (
        {"op": "conv1d_transpose", "filters": 2, "kernel": 2, "padding": "same"},
        'a").padding: found "same", expected an integer from 0',
    ),
    "more output padding than stride": (
        {"op": "conv1d_transpose", "filters": 2, "kernel": 2, "stride": 2, "output_padding": 2},
        'a").output_padding: found 2, expected less than the stride 2 or the dilation 1',
    ),
    "groups that do not divide": (
        {"op": "conv1d_transpose", "filters": 2, "kernel": 2, "groups": 2},
        'a").groups: found 2, which does not divide the 3 channels',
    ),
    "no size": ({"op": "interpolate"}, 'a").size: found neither of size and scale, expected one of them'),
    "two sizes": (
        {"op": "interpolate", "size": 2, "scale": 2},
        'a").size: found both of size and scale, expected one of them',
    ),
    "a size that is no number": (
        {"op": "interpolate", "size": "large"},
        'a").size: found "large", expected an integer from 1 to 16777216 or a list of 1 to 7, each an integer from',
    ),
    "a size of other axes": (
        {"op": "interpolate", "size": [2, 2]},
        'a").size: found [2, 2], expected one number, or 1 for (N, 3, 4)',
    ),
    "a scale beyond all sizes": (
        {"op": "interpolate", "scale": 2**23},
        'a").scale: found 8388608, which makes an axis longer than 16777216',
    ),
    "corners of the nearest": (
        {"op": "interpolate", "size": 2, "align_corners": True},
        'a").align_corners: found true with mode "nearest", expected it with "linear" alone',
    ),
}


@pytest.mark.parametrize(("layer", "message"), UNFIT_OF_OPSET_4.values(), ids=UNFIT_OF_OPSET_4)
def test_layers_of_opset_4_that_do_not_fit(layer: dict[str, Any], message: str) -> None:
    assert message in refusal(network([layer], (3, 4)) | {"opset": 4})


UNFIT_TOKENS = {
    "padding index out of range": (
        [EMBEDDING | {"padding_index": 9}],
        'layers[0] (id "a").padding_index: found 9, expected an id from 0 to 8, or -1 for none',
    ),
    "padding index below none": (
        [EMBEDDING | {"padding_index": -2}],
        'layers[0] (id "a").padding_index: found -2, expected an integer of at least -1 and below 16777216',
    ),
    "vocabulary larger than any memory": (
        [EMBEDDING | {"vocabulary": 2**24, "dimension": 2**8}],
        'layers[0] (id "a"): a.weight would have 4294967296 elements, expected at most 2147483647',
    ),
    "token ids without an embedding": (
        [{"op": "reshape", "shape": [3, 2]}, {"op": "dense", "units": 3}],
        'layers[1] (id "b"): dense computes with numbers, found token ids (input.dtype = "int64"): '
        "put an embedding before it",
    ),
    "token ids to the end": (
        [{"op": "flatten"}],
        'layers: input.dtype = "int64" (token ids) needs an embedding, found none',
    ),
    "embedding of an embedding": (
        [EMBEDDING, EMBEDDING],
        'layers[1] (id "b"): embedding reads token ids, found numbers: it must be the first layer that computes',
    ),
}


@pytest.mark.parametrize(("layers", "message"), UNFIT_TOKENS.values(), ids=UNFIT_TOKENS)
def test_token_ids_that_do_not_fit(layers: list[dict[str, Any]], message: str) -> None:
    assert message in refusal(tokens(layers, (6,)))


@pytest.mark.parametrize("kind", sorted((k for k in get_args(spec.AnyLayer) if k.since == 2), key=lambda k: k.__name__))
def test_opset_1_has_none_of_the_ops_of_opset_2(kind: type[layers.Layer]) -> None:
    (op,) = get_args(kind.model_fields["op"].annotation)
    options = {"filters": 1, "kernel": 1, "window": 1, "vocabulary": 3, "dimension": 2, "units": 2, "axes": [0, 1, 2]}
    layer = {"op": op} | {key: value for key, value in options.items() if key in kind.model_fields}
    shape = (3, 4) if op.endswith("1d") else (3, 4, 4)
    made = tokens([layer], shape) if op == "embedding" else network([layer], shape)
    spec.parse(made)
    assert refusal(made | {"opset": 1}) == f'model: layers[0] (id "a").op: {op} needs opset 2, found 1'


@pytest.mark.parametrize("key", ["dilation", "ceil_mode", "count_padding"])
def test_settings_of_pools_that_came_later_need_opset_3_and_are_said_where_they_differ(key: str) -> None:
    values = {"dilation": (1, 2), "ceil_mode": (False, True), "count_padding": (True, False)}
    pool = {"id": "a", "op": "avg_pool1d", "window": 2}
    usual, other = (network([pool | {key: value}], (2, 8)) for value in values[key])
    assert spec.parse(usual | {"opset": 3}).dump() == spec.parse(network([pool], (2, 8)) | {"opset": 3}).dump()
    assert f"{key} = " in spec.parse(other | {"opset": 3}).dump()
    assert refusal(other | {"opset": 2}) == f'model: layers[0] (id "a").{key}: {key} of a pool needs opset 3, found 2'


def test_a_window_of_a_pool_holds_an_element() -> None:
    pool = {"id": "a", "op": "max_pool1d", "window": 2, "dilation": 4, "padding": 2}
    assert "a window would lie on padding alone along the length" in refusal(network([pool], (2, 2)) | {"opset": 3})
    assert "expected at most half the window of 5: 2" in refusal(
        network([pool | {"padding": 3}], (2, 9)) | {"opset": 3}
    )


def test_places_of_windows_are_counted_as_one_by_one(rng: np.random.Generator) -> None:
    shown = set()
    for _ in range(300):
        n, k, d, stride = (int(rng.integers(1, most)) for most in (30, 6, 5, 4))
        before, after = (int(rng.integers(0, (d * (k - 1) + 1) // 2 + 1)) for _ in range(2))
        for ceil_mode in (False, True):
            at = Geometry((k,), (stride,), ((before, after),), (d,), ceil_mode)
            if n + before + after < d * (k - 1) + 1:
                continue
            (windows,) = at.output((n,))
            starts = range(-before, windows * stride - before, stride)
            for padding in (False, True):
                inside = range(-before, n + after) if padding else range(n)
                expected = tuple(sum(start + j * d in inside for j in range(k)) for start in starts)
                assert at.counted((n,), padding) == (expected,)
                if not padding:
                    assert at.has_empty_window((n,)) == (0 in expected,)
                    shown.add(0 in expected)
    assert shown == {False, True}


@pytest.mark.timeout(60)
def test_a_huge_dilated_pool_is_checked_at_once() -> None:
    pool = {"id": "a", "op": "max_pool1d", "window": 100_000, "stride": 1, "dilation": 2, "padding": 50_000}
    layers = [pool, {"id": "b", "op": "flatten"}, {"id": "c", "op": "dense", "units": 2}]
    shapes = spec.parse(network(layers, (1, 2**24)) | {"opset": 4}).shapes()
    assert shapes[0].output == (1, 2**24 + 100_000 - 199_998)


def test_opset_1_has_no_token_ids() -> None:
    assert (
        refusal(tokens([{"op": "flatten"}], (6,)) | {"opset": 1}) == "model: input.dtype: int64 needs opset 2, found 1"
    )


def refusal(made: dict[str, Any]) -> str:
    """What the spec says about data."""
    with pytest.raises(SpecError) as caught:
        spec.parse(made, "model")
    return str(caught.value)


@pytest.mark.parametrize(("old", "new", "message"), BAD.values(), ids=BAD)
def test_bad_input(old: str, new: str, message: str) -> None:
    found = complaint(change((old, new)))
    assert found.startswith("bad.toml: ")
    assert message in found, found


def test_all_problems_are_told_at_once() -> None:
    found = complaint(change(("units = 5", "units = 0\nunit = 5"), ("units = 2", 'units = "two"')))
    assert found.splitlines()[0] == "bad.toml: 3 problems"
    assert '  layers[1] (id "rnn").unit: unknown key (did you mean "units"?)' in found
    assert '  layers[2] (id "output").units: found "two"' in found


def test_what_follows_from_another_version_is_not_told() -> None:
    """An op of a newer opset is no mistake of the user's: that the opset is newer says it all."""
    assert "\n" not in complaint(change(("opset = 1", "opset = 5"), ('"rnn"\nunits', '"transformer"\nunits')))


def test_a_spec_of_no_layers() -> None:
    text = re.sub(r"\[\[layers\]\].*(?=\[loss\])", "", GOOD, flags=re.DOTALL)
    assert "layers: missing, expected a list of 1 to 1000" in complaint(text)


def test_an_op_needs_the_opset_that_brought_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.RNN, "since", 2)
    assert complaint(GOOD) == 'bad.toml: layers[1] (id "rnn").op: rnn needs opset 2, found 1'


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(GOOD.replace("small", "kräftig").encode("latin-1"))
    with pytest.raises(SpecError, match=r"latin\.toml: line 4 is not UTF-8 text: byte 0xe4 at offset 58"):
        spec.load(path)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"missing\.toml: there is no such file"):
        spec.load(tmp_path / "missing.toml")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="this is a folder"):
        spec.load(tmp_path)
    os.mkfifo(tmp_path / "fifo.toml")  # nobody writes to it
    with pytest.raises(SpecError, match=r"fifo\.toml: this is a FIFO, not a TOML file"):
        spec.load(tmp_path / "fifo.toml")


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot be read: Not a directory"):
        spec.load(tmp_path / "file" / "model.toml")


def test_the_errors_are_the_users_to_put_right() -> None:
    with pytest.raises(TwinGradError) as caught:
        spec.loads("")
    assert caught.value.exit_code == 2
    assert "format: missing" in str(caught.value)
