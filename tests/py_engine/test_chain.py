"""Chains: ids, the flat vector and its views, editing, and what is said when something doesn't fit."""

from __future__ import annotations

import numpy as np
import pytest

from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, DTypeError, ParameterError, ShapeError
from py_engine.network import chain as chain_module
from py_engine.network.chain import Chain
from py_engine.network.embedding import Embedding, PermuteDims
from py_engine.network.graph import Graph
from py_engine.network.initialisers import initialise_all
from py_engine.network.layers import RNN, Activation, Dense, Dropout, Flatten, Layer, Reshape
from py_engine.network.normalisation import BatchNorm
from py_engine.network.parameters import ALIGNMENT, FlatVector, Parameters


def mnist_rnn(**settings) -> Chain:
    return Chain(Reshape(4, 196), RNN(196, 64), Dense(64, 10, name="output"), **settings)


def batch(samples: int = 3, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(0).random((samples, 784)).astype(dtype)


# What it computes -----------------------------------------------------------------------------------------


def test_a_chain_is_its_layers_one_after_the_other():
    chain, x = mnist_rnn(), batch()
    p = chain.parameters.as_dict()
    h = np.zeros((3, 64), np.float32)
    for t in range(4):
        h = np.tanh(x.reshape(3, 4, 196)[:, t] @ p["rnn.weight"] + h @ p["rnn.recurrent"] + p["rnn.bias"])
    logits = chain(x)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits.numpy(), h @ p["output.weight"] + p["output.bias"], rtol=1e-5, atol=1e-6)


def test_backward_reaches_every_parameter():
    chain = mnist_rnn()
    chain(batch()).sum().backward()
    for name, tensor in chain.parameters.tensors.items():
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape, name


def test_apply_uses_the_given_tensors_only():
    chain, x = mnist_rnn(), batch()
    zeros = {name: Tensor(np.zeros_like(a)) for name, a in chain.parameters.arrays.items()}
    assert not chain.apply(zeros, x).numpy().any()


def test_shapes_are_known_without_running():
    chain = mnist_rnn()
    assert chain.shapes((784,)) == {"reshape": (4, 196), "rnn": (64,), "output": (10,)}
    assert chain.output_shape((784,)) == (10,)
    assert chain.output_shape((28, 28)) == (10,)


def test_training_reaches_the_layers():
    chain = Chain(Dropout(0.9))
    x = np.ones((10, 10), np.float32)
    np.testing.assert_array_equal(chain(x).numpy(), x)
    assert (chain(x, training=True).numpy() == 0).any()


def test_an_empty_chain_returns_its_input():
    x = batch()
    assert Chain()(x).numpy() is x
    assert Chain().output_shape((784,)) == (784,)
    assert Chain().parameters.vector.size == 0


# Ids ------------------------------------------------------------------------------------------------------


def test_ids_are_class_names_numbered_when_taken():
    chain = Chain(Dense(1, 1), Dense(1, 1), Dense(1, 1, name="dense4"), Activation("tanh"), Dense(1, 1), Dense(1, 1))
    assert list(chain.layers) == ["dense", "dense2", "dense4", "activation", "dense3", "dense5"]


def test_parameters_are_named_by_id_in_order():
    assert mnist_rnn().parameters.names == (
        "rnn.weight",
        "rnn.recurrent",
        "rnn.bias",
        "output.weight",
        "output.bias",
    )


def test_two_layers_of_one_name_are_refused():
    with pytest.raises(ConfigurationError, match="two layers are called 'a'"):
        Chain(Dense(1, 1, name="a"), Dense(1, 1, name="a"))
    chain = Chain(Dense(1, 1, name="a"))
    with pytest.raises(ConfigurationError, match="two layers are called 'a'"):
        chain.append(Flatten(name="a"))
    assert len(chain) == 1


# Initial values -------------------------------------------------------------------------------------------


def test_initial_values_come_from_the_seed_and_the_names():
    chain = mnist_rnn(seed=5)
    specs = {f"{name}.{p}": spec for name, layer in chain.layers.items() for p, spec in layer.parameters().items()}
    for name, value in initialise_all(specs, 5).items():
        np.testing.assert_array_equal(chain.parameters.arrays[name], value)
    same, other = mnist_rnn(seed=5), mnist_rnn(seed=6)
    np.testing.assert_array_equal(same.parameters.vector, chain.parameters.vector)
    assert not np.array_equal(other.parameters.vector, chain.parameters.vector)


def test_given_values_are_taken_and_nothing_is_drawn(monkeypatch):
    values = mnist_rnn(seed=5).parameters.as_dict()
    monkeypatch.setattr(chain_module, "initialise", lambda *_: pytest.fail("drawn"))
    chain = mnist_rnn(values=values)
    for name, array in values.items():
        np.testing.assert_array_equal(chain.parameters.arrays[name], array)
    assert chain.parameters.arrays["output.weight"] is not values["output.weight"]
    graph = Graph(*chain, inputs={}, values=values)
    np.testing.assert_array_equal(graph.parameters.vector, chain.parameters.vector)
    del values["output.weight"]
    with pytest.raises(ParameterError, match=r"missing: output\.weight"):
        mnist_rnn(values=values)


def test_an_initial_value_of_another_shape_is_refused():
    dense = Dense(3, 1, name="a")
    chain = Chain(dense)
    dense.units = 4
    with pytest.raises(ParameterError, match=r"parameter a\.weight: expected shape \(3, 4\), actual \(3, 1\)"):
        chain.append(Dense(4, 2))


def test_dtype():
    chain = mnist_rnn(dtype=np.float64)
    assert chain(batch(dtype=np.float64)).dtype == np.float64
    with pytest.raises(ConfigurationError, match="parameters are float32 or float64, actual int64"):
        mnist_rnn(dtype=np.int64)
    with pytest.raises(DTypeError, match="in layer 'rnn'"):
        chain(batch())


# Editing --------------------------------------------------------------------------------------------------


def test_layers_can_be_appended_inserted_and_removed_and_the_others_keep_their_values():
    chain = Chain(Dense(4, 3), Dense(3, 2), seed=1)
    chain.parameters.vector += 1.0
    before = chain.parameters.as_dict()
    x = np.ones((5, 4), np.float32)

    chain.append(Dense(2, 7))
    chain.insert(1, Activation("tanh"))
    chain.insert(0, Dense(4, 4, name="first"))
    assert list(chain.layers) == ["first", "dense", "activation", "dense2", "dense3"]
    for name, value in before.items():
        np.testing.assert_array_equal(chain.parameters.arrays[name], value)
    fresh = Chain(Dense(4, 4, name="first"), seed=1).parameters.arrays["first.weight"]
    np.testing.assert_array_equal(chain.parameters.arrays["first.weight"], fresh)
    assert chain(x).shape == (5, 7)

    assert isinstance(chain.remove("first"), Dense)
    assert isinstance(chain.remove(-1), Dense)
    assert isinstance(chain.remove(1), Activation)
    assert list(chain.layers) == ["dense", "dense2"]
    assert chain.parameters.as_dict().keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(chain.parameters.arrays[name], value)
    assert chain(x).shape == (5, 2)


def test_layers_are_found_by_index_and_id():
    chain = mnist_rnn()
    assert chain["rnn"] is chain[1] is chain[-2]
    assert [type(layer) for layer in chain] == [Reshape, RNN, Dense]
    for missing in ("lstm", 3, -4, None):
        with pytest.raises(ConfigurationError, match="in this chain of 3: reshape, rnn, output"):
            chain[missing]
        with pytest.raises(ConfigurationError, match="in this chain of 3: reshape, rnn, output"):
            chain.remove(missing)
    with pytest.raises(ConfigurationError, match="made of layers, actual 'dense'"):
        chain.append("dense")


def test_repr_shows_layers_shapes_and_counts():
    assert repr(mnist_rnn()).splitlines() == [
        "Chain of 3 layers, 17,354 parameters, float32",
        "  reshape  Reshape(4, 196)",
        "  rnn      RNN(196, 64)",
        "           weight (196, 64), recurrent (64, 64), bias (64,): 16,704",
        "  output   Dense(64, 10, name='output')",
        "           weight (64, 10), bias (10,): 650",
    ]


def test_a_layer_of_ones_own():
    class Scale(Layer):
        def output_shape(self, input_shape):
            return input_shape

        def forward(self, x, parameters, training):
            return x * 2.0

    chain = Chain(Flatten(), Scale(), Scale())
    assert list(chain.layers) == ["flatten", "scale", "scale2"]
    np.testing.assert_array_equal(chain(batch()).numpy(), 4 * batch())


# Errors name the layer ------------------------------------------------------------------------------------


def test_a_shape_that_does_not_fit_names_the_layer():
    chain = Chain(Reshape(4, 196), RNN(195, 64, name="cell"))
    message = r"RNN\(195, 64, .*in layer 'cell': expected samples of shape \(steps, 195\), actual shape \(4, 196\)"
    with pytest.raises(ShapeError, match=message):
        chain(batch())
    with pytest.raises(ShapeError, match=message):
        chain.output_shape((784,))
    with pytest.raises(
        ShapeError, match=r"in layer 'reshape': expected samples of 784 elements, actual shape \(783,\)"
    ):
        chain(batch()[:, :783])
    with pytest.raises(ShapeError, match="called with a batch"):
        chain(np.float32(1.0))


# The flat vector ------------------------------------------------------------------------------------------


def test_tensors_are_views_into_one_vector():
    parameters = mnist_rnn().parameters
    for name, tensor in parameters.tensors.items():
        assert tensor.requires_grad
        assert tensor.data is parameters.arrays[name]
        assert np.shares_memory(tensor.data, parameters.vector)
        assert tensor.data.flags.c_contiguous
    parameters.vector[:] = 0
    assert not any(tensor.numpy().any() for tensor in parameters.tensors.values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tensors_start_on_cache_lines_and_do_not_overlap(dtype):
    parameters = Parameters({"a": (3, 5), "b": (), "c": (17,), "d": (0, 4), "e": (32,)}, dtype)
    assert dict(parameters.layout.offsets) == {"a": 0, "b": 16, "c": 32, "d": 64, "e": 64}
    assert parameters.vector.size == 96
    assert parameters.count == 15 + 1 + 17 + 32
    for array in parameters.arrays.values():
        assert array.size == 0 or array.ctypes.data % 64 == 0
    for array in parameters.arrays.values():
        array += 1
    assert parameters.vector.sum() == parameters.count
    assert all(offset % ALIGNMENT == 0 for offset in parameters.layout.offsets.values())


def test_zeros_like_has_the_same_layout():
    chain = mnist_rnn()
    gradient = chain.parameters.zeros_like()
    assert type(gradient) is FlatVector
    assert gradient.vector.shape == chain.parameters.vector.shape
    assert gradient.vector.dtype == np.float32
    assert not gradient.vector.any()
    assert not np.shares_memory(gradient.vector, chain.parameters.vector)
    gradient.arrays["rnn.bias"][:] = 1.0
    chain.parameters.vector += gradient.vector
    np.testing.assert_array_equal(chain.parameters.arrays["rnn.bias"], 1.0)


def test_what_is_not_trained_lies_behind_the_vector():
    chain = Chain(
        Embedding(6, 3, trainable=False, name="frozen"), Flatten(), BatchNorm(6, name="norm"), Dense(6, 2), seed=1
    )
    parameters = chain.parameters
    assert parameters.names == (
        "frozen.weight", "norm.scale", "norm.shift", "norm.running_mean", "norm.running_var", "dense.weight",
        "dense.bias",
    )  # fmt: skip
    assert parameters.trainable == ("norm.scale", "norm.shift", "dense.weight", "dense.bias")
    assert {name for name, x in parameters.tensors.items() if x.requires_grad} == set(parameters.trainable)
    assert list(parameters.zeros_like().arrays) == list(parameters.trainable)
    assert parameters.vector.size == 4 * ALIGNMENT and parameters.memory.size == 8 * ALIGNMENT
    behind = parameters.memory[parameters.vector.size :]
    for k, name in enumerate(("frozen.weight", "norm.running_mean", "norm.running_var")):
        array = parameters.arrays[name]
        start = (0, 2, 3)[k] * ALIGNMENT
        np.testing.assert_array_equal(behind[start : start + array.size], array.ravel())
        assert np.shares_memory(array, parameters.memory) and not np.shares_memory(array, parameters.vector)
    assert parameters.count == 18 + 4 * 6 + 12 + 2
    assert "(not all trained)" in repr(chain)
    values = {name: array + 1 for name, array in parameters.as_dict().items()}
    parameters.load(values)
    np.testing.assert_array_equal(parameters.arrays["norm.running_var"], 2.0)
    np.testing.assert_array_equal(parameters.arrays["frozen.weight"], values["frozen.weight"])
    chain.append(Dense(2, 2))
    np.testing.assert_array_equal(chain.parameters.arrays["norm.running_var"], 2.0)


def test_a_chain_knows_whether_it_reads_token_ids_and_couples_its_batch():
    tokens = Chain(
        Reshape(2, 2), PermuteDims(1, 0), Flatten(), Embedding(5, 2, name="words"), BatchNorm(4, name="norm")
    )
    assert (tokens.takes_ids, tokens.couples_batch) == ("words", "norm")
    assert (mnist_rnn().takes_ids, mnist_rnn().couples_batch) == (None, None)
    assert Chain(Activation("relu"), Embedding(5, 2)).takes_ids is None


def test_as_dict_and_load_go_round_in_place():
    source, target = mnist_rnn(seed=1), mnist_rnn(seed=2)
    vector = target.parameters.vector
    target.parameters.load(source.parameters.as_dict())
    assert target.parameters.vector is vector
    np.testing.assert_array_equal(vector, source.parameters.vector)
    source.parameters.as_dict()["rnn.bias"][:] = 7
    assert not source.parameters.arrays["rnn.bias"].any()


def test_loading_tensors_that_change_places():
    chain = Chain(Dense(3, 3, name="a"), Dense(3, 3, name="b"))
    before, views = chain.parameters.as_dict(), chain.parameters.arrays
    chain.parameters.load({name: views[("b" if name[0] == "a" else "a") + name[1:]] for name in views})
    np.testing.assert_array_equal(views["a.weight"], before["b.weight"])
    np.testing.assert_array_equal(views["b.weight"], before["a.weight"])


def test_layers_are_found_by_integers_of_numpy_and_not_by_truth_values():
    chain = Chain(Dense(3, 3), Dense(3, 2))
    assert chain[np.int64(-1)] is chain["dense2"] and chain[np.uint8(0)] is chain["dense"]
    with pytest.raises(ConfigurationError, match="no layer True in this chain of 2"):
        chain[True]


def test_what_a_layer_of_a_graph_reads_may_come_from_an_iterator():
    graph = Graph(
        *(Dense(3, 3, name=name) for name in ("below", "middle", "above")), inputs={"above": iter(["below"])}, seed=0
    )
    assert graph.inputs == {"above": ("below",)}


@pytest.mark.parametrize("read", ["below", ["below", 1]])
def test_what_a_layer_of_a_graph_reads_is_a_list_of_names(read):
    with pytest.raises(ConfigurationError, match=r"inputs of layer 'above': expected a list of names, actual .*below"):
        Graph(Dense(3, 3, name="below"), Dense(3, 3, name="above"), inputs={"above": read})


def test_loading_rounds_to_the_dtype_of_the_model():
    parameters = mnist_rnn().parameters
    wide = {name: array.astype(np.float64) + 1e-12 for name, array in parameters.as_dict().items()}
    before = parameters.vector.copy()
    parameters.load(wide)
    np.testing.assert_allclose(parameters.vector, before, atol=1e-11)


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: without(v, "rnn.bias"), r"missing: rnn\.bias; the model has: rnn\.weight, "),
        (lambda v: v | {"extra.bias": np.zeros(3)}, r"not in the model: extra\.bias; the model has"),
        (
            lambda v: without(v, "rnn.bias") | {"rnn.biases": np.zeros(64)},
            r"missing: rnn\.bias; not in the model: rnn\.biases",
        ),
        (
            lambda v: v | {"rnn.weight": v["rnn.weight"].T},
            r"parameter rnn\.weight: expected shape \(196, 64\), actual \(64, 196\)",
        ),
        (lambda v: v | {"rnn.bias": np.full(64, "1")}, r"parameter rnn\.bias: expected real numbers"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(change, message):
    parameters = mnist_rnn().parameters
    before = parameters.vector.copy()
    values = {name: array + 1 for name, array in parameters.as_dict().items()}
    with pytest.raises(ParameterError, match=message):
        parameters.load(change(values))
    np.testing.assert_array_equal(parameters.vector, before)


def test_parameters_are_a_collection_of_names():
    parameters = mnist_rnn().parameters
    assert list(parameters) == list(parameters.names)
    assert len(parameters) == 5
    assert "rnn.bias" in parameters
    assert parameters["rnn.bias"] is parameters.tensors["rnn.bias"]
    with pytest.raises(ParameterError, match=r"no parameter 'rnn\.biases'; there are: rnn\.weight"):
        parameters["rnn.biases"]
    assert "17,354 float32 in 5 tensors" in repr(parameters)
