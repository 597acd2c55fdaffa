"""Opset 3: layers that name their inputs, padding that is given by a word, and what refuses which by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bridge import registry, spec, weights
from bridge.errors import SpecError
from bridge.session import Optimizer
from py_engine import network
from py_engine.errors import ConfigurationError, ShapeError

Layers = list[dict[str, Any]]
BELOW = {"id": "below", "op": "dense", "units": 4}
MIDDLE = {"id": "middle", "op": "dense", "units": 4}
ROWS = {"id": "rows", "op": "reshape", "shape": [1, 3, 4]}
SUM = {"id": "sum", "op": "add", "inputs": ["below", "middle"]}


def made(*layers: dict[str, Any], shape: tuple[int, ...] = (3, 4), opset: int = 3, dtype: str = "float32") -> Any:
    """A spec as data."""
    header = {"format": "twingrad-model", "version": 1, "opset": opset, "name": "net"}
    return {
        **header,
        "input": {"shape": ["N", *shape], "dtype": dtype},
        "layers": list(layers),
        "loss": {"op": "mean_squared_error"},
    }


def refusal(data: Any) -> str:
    with pytest.raises(SpecError) as caught:
        spec.parse(data, "model")
    return str(caught.value)


# Inputs -------------------------------------------------------------------------------------------------------


def test_shapes_and_sources_of_a_graph() -> None:
    branch = {"id": "branch", "op": "dense", "units": 2, "inputs": ["input"]}
    joined = {"id": "joined", "op": "concat", "axis": 1, "inputs": ["sum", "branch", "input"]}
    found = spec.parse(made(BELOW, MIDDLE, SUM, branch, joined))
    assert not found.is_chain
    assert found.sources() == [(-1,), (0,), (0, 1), (-1,), (2, 3, -1)]
    assert [shape.input for shape in found.shapes()] == [(3, 4), (3, 4), (3, 4), (3, 4), (3, 10)]
    assert found.output == (3, 10)
    assert list(found.parameters())[::2] == ["below.weight", "middle.weight", "branch.weight"]


def test_what_a_graph_says_is_read_back_and_a_chain_says_nothing_of_inputs() -> None:
    graph, chain = spec.parse(made(BELOW, MIDDLE, SUM)), spec.parse(made(BELOW, MIDDLE))
    assert spec.loads(graph.dump()) == graph
    assert "inputs" not in chain.dump() and graph.dump().count("inputs") == 1
    assert chain.is_chain and chain.sources() == [(-1,), (0,)]


WRONG: dict[str, tuple[tuple[dict[str, Any], ...], str]] = {
    "a layer that is not there": (
        (BELOW, MIDDLE, SUM | {"inputs": ["below", "midle"]}),
        'layers[2] (id "sum").inputs[1]: there is no layer "midle": expected one of "input", "below", "middle"',
    ),
    "a layer that comes later": (
        (BELOW, SUM, MIDDLE),
        'layers[1] (id "sum").inputs[1]: found "middle", which comes no earlier: expected one of "input", "below"',
    ),
    "itself": (
        (BELOW, MIDDLE, SUM | {"inputs": ["sum", "below"]}),
        'layers[2] (id "sum").inputs[0]: found "sum", which comes no earlier',
    ),
    "one input of an add": (
        (BELOW, SUM | {"inputs": ["below"]}),
        'layers[1] (id "sum").inputs: found 1, expected two or more names of layers, or of the input',
    ),
    "an add that names none": (
        (BELOW, {"id": "sum", "op": "add"}),
        'layers[1] (id "sum").inputs: found 1, expected two or more names',
    ),
    "several inputs of a dense layer": (
        (BELOW, MIDDLE | {"inputs": ["input", "below"]}),
        'layers[1] (id "middle").inputs: found 2, expected one: dense does not join several',
    ),
    "a sum of two shapes": (
        (BELOW, MIDDLE | {"units": 5}, SUM),
        'layers[2] (id "sum").inputs: found the shapes (N, 3, 4) and (N, 3, 5), expected one shape',
    ),
    "joined along another axis": (
        (BELOW, MIDDLE | {"units": 5}, SUM | {"op": "concat"}),
        'layers[2] (id "sum").inputs: found the shapes (N, 3, 4) and (N, 3, 5), expected some that differ along axis 0',
    ),
    "joined along an axis that is not there": (
        (BELOW, MIDDLE, SUM | {"op": "concat", "axis": 2}),
        'layers[2] (id "sum").inputs: found the shapes (N, 3, 4) and (N, 3, 4), expected some that differ along axis 2',
    ),
    "a layer for nobody": (
        (BELOW, MIDDLE, {"id": "last", "op": "dense", "units": 2, "inputs": ["below"]}),
        'layers[1] (id "middle"): nothing reads what layer "middle" makes',
    ),
    "a layer called input": (
        (BELOW | {"id": "input"}, MIDDLE, SUM | {"inputs": ["input", "middle"]}),
        'layers[0] (id "input").id: found "input", which the inputs of other layers mean the network\'s own by',
    ),
    "heads that do not divide": (
        (BELOW, {"id": "mixed", "op": "multi_head_attention", "heads": 3}),
        'layers[1] (id "mixed").heads: found 3, which does not divide the 4 features',
    ),
    "attention to images": (
        (ROWS, {"id": "mixed", "op": "multi_head_attention", "heads": 2}),
        'layers[1] (id "mixed"): expected an input of shape (N, steps, features), found (N, 1, 3, 4)',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "message"), WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_named_with_their_layer(layers: tuple[dict[str, Any], ...], message: str) -> None:
    assert message in refusal(made(*layers))


def test_a_layer_may_be_called_input_where_none_names_its_inputs() -> None:
    assert spec.parse(made(BELOW | {"id": "input"}, MIDDLE)).is_chain


# Opsets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((BELOW, MIDDLE, SUM), 'layers[2] (id "sum").op: add needs opset 3, found 2'),
        ((BELOW, MIDDLE | {"inputs": ["below"]}), '"middle").inputs: a layer with inputs needs opset 3, found 2'),
        (
            ({"id": "a", "op": "activation", "activation": "gelu"},),
            '(id "a"): gelu needs opset 3, found 2',
        ),
        (
            ({"id": "a", "op": "conv1d", "filters": 2, "kernel": 2, "padding": "same"},),
            '(id "a").padding: padding "same" needs opset 3, found 2',
        ),
        (({"id": "a", "op": "position_embedding"},), '(id "a").op: position_embedding needs opset 3, found 2'),
    ],
)
def test_what_is_new_needs_opset_3(layers: tuple[dict[str, Any], ...], message: str) -> None:
    spec.parse(made(*layers))
    assert message in refusal(made(*layers, opset=2))


VOLUME = {"id": "v", "op": "reshape", "shape": [1, 1, 3, 4]}


@pytest.mark.parametrize(
    "layer",
    [
        {"op": "conv3d", "filters": 1, "kernel": 1},
        {"op": "max_pool3d", "window": 1},
        {"op": "avg_pool3d", "window": 1},
        {"op": "conv3d_transpose", "filters": 1, "kernel": 1},
        {"op": "interpolate", "size": 2},
    ],
    ids=lambda layer: layer["op"],
)
def test_what_is_new_needs_opset_4(layer: dict[str, Any]) -> None:
    layers = VOLUME, {"id": "a", **layer}
    spec.parse(made(*layers, opset=4))
    assert f'layers[1] (id "a").op: {layer["op"]} needs opset 4, found 3' in refusal(made(*layers))


# Padding "same" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["conv1d", "max_pool1d", "avg_pool1d"])
@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_padding_of_the_same_length(op: str, length: int, size: int, stride: int) -> None:
    options = {"filters": 2, "kernel": size} if op == "conv1d" else {"window": size}
    layer = {"id": "a", "op": op, "stride": stride, "padding": "same", **options}
    found = spec.parse(made(layer, shape=(2, length)))
    (before, after), (place,) = found.layers[0].padding, found.shapes()
    assert place.output[1] == -(-length // stride)
    assert 0 <= after - before <= 1
    whole = (place.output[1] - 1) * stride + size
    assert before + after == max(whole - length, 0)
    assert (
        found == spec.loads(found.dump()) == spec.parse(made(layer | {"padding": [before, after]}, shape=(2, length)))
    )
    assert "same" not in found.dump()


def test_padding_of_the_same_size_by_axis_and_dilation() -> None:
    layer = {"id": "a", "op": "conv2d", "filters": 2, "kernel": [3, 2], "dilation": [2, 3], "padding": "same"}
    (found,) = spec.parse(made(layer, shape=(1, 5, 6))).layers
    assert found.padding == ((2, 2), (1, 2))


def test_padding_of_the_same_size_of_what_has_no_such_axes() -> None:
    layer = {"id": "a", "op": "conv2d", "filters": 2, "kernel": 3, "padding": "same"}
    assert 'layers[0] (id "a"): expected an input of shape (N, channels, height, width)' in refusal(made(layer))


# Engines ------------------------------------------------------------------------------------------------------

CHAINS_ALONE = ("flux", "lux", "simplechains")


def adapter_check(name: str) -> Callable[[spec.ModelSpec], Any]:
    """What an engine checks before it asks for its framework."""
    from bridge.adapters import julia_package, simplechains

    check = simplechains.check if name == "simplechains" else julia_package.check
    return lambda made: check(made, Optimizer("sgd", 0.1), name)


@pytest.mark.parametrize("name", CHAINS_ALONE)
def test_an_engine_of_chains_refuses_graphs_by_name(name: str) -> None:
    with pytest.raises(
        SpecError, match=rf'layers\[2\] \(id "sum"\).inputs: the engine {name} has no layer with inputs'
    ):
        adapter_check(name)(spec.parse(made(BELOW, MIDDLE, SUM)))


@pytest.mark.parametrize("name", ("flux", "lux"))
def test_an_engine_without_a_layer_refuses_it_by_name(name: str) -> None:
    for layer, what in (
        ({"op": "multi_head_attention", "heads": 2}, "multi_head_attention"),
        ({"op": "position_embedding"}, "position_embedding"),
        ({"op": "activation", "activation": "gelu"}, "gelu"),
    ):
        with pytest.raises(SpecError, match=rf'layers\[1\] \(id "a"\): the engine {name} has no {what}$'):
            adapter_check(name)(spec.parse(made(BELOW, {"id": "a", **layer})))


@pytest.mark.parametrize("name", CHAINS_ALONE)
def test_an_engine_without_the_layers_of_opset_4_refuses_them_by_name(name: str) -> None:
    for layer, what in (
        ({"op": "conv1d_transpose", "filters": 2, "kernel": 2}, "conv1d_transpose"),
        ({"op": "interpolate", "scale": 2}, "interpolate"),
    ):
        with pytest.raises(SpecError, match=rf'layers\[1\] \(id "a"\): the engine {name} has no {what}$'):
            adapter_check(name)(
                spec.parse(made({"id": "f", "op": "activation", "activation": "tanh"}, {"id": "a", **layer}, opset=4))
            )


@pytest.mark.parametrize("name", CHAINS_ALONE)
def test_an_engine_without_settings_of_a_loss_refuses_them_by_name(name: str) -> None:
    loss = {"op": "softmax_cross_entropy", "label_smoothing": 0.1}
    with pytest.raises(SpecError, match=rf"loss.label_smoothing: the engine {name} has no label_smoothing of a loss$"):
        adapter_check(name)(spec.parse(made(BELOW, shape=(4,), opset=4) | {"loss": loss}))


# The numpy engine's own graphs --------------------------------------------------------------------------------


def small() -> network.Graph:
    return network.Graph(
        network.Dense(4, 4, name="below"),
        network.Dense(4, 4, "relu", name="middle"),
        network.Add(name="sum"),
        network.Concat(name="joined"),
        inputs={"sum": ["below", "middle"], "joined": ["sum", "input"]},
        dtype=np.float64,
    )


def test_a_graph_computes_what_its_layers_do() -> None:
    graph, x = small(), np.random.default_rng(1).standard_normal((5, 4))
    p = graph.parameters.arrays
    below = x @ p["below.weight"] + p["below.bias"]
    middle = np.maximum(below @ p["middle.weight"] + p["middle.bias"], 0)
    np.testing.assert_allclose(graph(x).numpy(), np.concatenate([below + middle, x], 1), rtol=1e-13)
    assert graph.shapes((4,)) == {"below": (4,), "middle": (4,), "sum": (4,), "joined": (8,)}
    assert "Graph of 4 layers" in repr(graph) and "sum reads below and middle" in repr(graph)


def test_a_graph_of_the_engine_refuses_what_does_not_fit() -> None:
    below, middle = network.Dense(4, 4, name="below"), network.Dense(4, 5, name="middle")
    with pytest.raises(
        ConfigurationError, match="inputs of layer 'sum': 'middel' is none of what is before it: input, be"
    ):
        network.Graph(below, network.Add(name="sum"), inputs={"sum": ["below", "middel"]})
    with pytest.raises(ConfigurationError, match="inputs: there is no layer 'summe'; there are: below"):
        network.Graph(below, inputs={"summe": ["below"]})
    with pytest.raises(ConfigurationError, match="a layer of a graph can't be called 'input': that is"):
        network.Graph(network.Dense(4, 4, name="input"), network.Add(name="sum"), inputs={"sum": ["input", "input"]})
    graph = network.Graph(below, middle, network.Add(name="sum"), inputs={"sum": ["below", "middle"]})
    message = r"Add.* in layer 'sum': expected two or more samples of one shape, actual 2 of shape \(4,\) and \(5,\)"
    for call in (lambda: graph.shapes((4,)), lambda: graph(np.zeros((2, 4), np.float32))):
        with pytest.raises(ShapeError, match=message):
            call()
    with pytest.raises(ConfigurationError, match="the layers of a graph stay what they are"):
        graph.append(network.Flatten())
    with pytest.raises(ShapeError, match=r"Dense.* in layer 'middle': expected one input, actual 2 of shape"):
        network.Graph(below, network.Dense(4, 4, name="middle"), inputs={"middle": ["input", "below"]}).shapes((4,))
    with pytest.raises(ConfigurationError, match="heads must divide the 4 features, actual 3"):
        network.MultiHeadAttention(4, 3)


def test_a_graph_is_trained_sample_by_sample_and_without_replay_alike() -> None:
    model = spec.parse(made(BELOW, MIDDLE, SUM, {"id": "out", "op": "dense", "units": 2}))
    params = weights.initialise(model, 1, "float64")
    rng = np.random.default_rng(2)
    x, y, order = rng.standard_normal((8, 3, 4)), rng.standard_normal((8, 3, 2)), np.arange(8)
    found = []
    for techniques in ({}, {"replay": False}, {"batched": False}):
        session = registry.get("numpy").build(
            model, params, Optimizer("sgd", 0.1), 4, "float64", 1, **({"techniques": techniques} if techniques else {})
        )
        found.append(session.train_epoch(x, y, order))
        session.close()
    for losses in found[1:]:
        np.testing.assert_allclose(losses, found[0], rtol=1e-12)


def test_a_batch_of_a_graph_with_normalisation_is_split_over_threads() -> None:
    convolution = {"op": "conv1d", "filters": 3, "kernel": 3, "padding": "same"}
    layers = [
        {"id": "a", **convolution},
        {"id": "b", "op": "batch_norm"},
        {"id": "c", **convolution},
        {"id": "d", "op": "add", "inputs": ["a", "c"]},
    ]
    model = spec.parse(made(*layers, shape=(2, 6)))
    params = weights.initialise(model, 1, "float64")
    rng = np.random.default_rng(2)
    x, y, order = rng.standard_normal((16, 2, 6)), rng.standard_normal((16, 3, 6)), np.arange(16)
    found = []
    for threads in (1, 2):
        techniques = {"split_batch": threads > 1}
        session = registry.get("numpy").build(
            model, params, Optimizer("sgd", 0.1), 8, "float64", threads, techniques=techniques
        )
        found.append(session.train_epoch(x, y, order))
        session.close()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
