"""Layers: the same outputs and gradients as PyTorch's, gradients that pass gradcheck, shapes that are checked."""

from __future__ import annotations

import numpy as np
import pytest

from py_engine.ad.gradcheck import gradcheck
from py_engine.ad.operators import tensor
from py_engine.ad.program import trace
from py_engine.ad.state import scope
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError
from py_engine.network import LAYERS
from py_engine.network.attention import MultiHeadAttention, PositionEmbedding
from py_engine.network.convolution import (
    AvgPool1D,
    AvgPool2D,
    AvgPool3D,
    Conv1D,
    Conv1DTranspose,
    Conv2D,
    Conv2DTranspose,
    Conv3D,
    Conv3DTranspose,
    GlobalAvgPool,
    GlobalMaxPool,
    Interpolate,
    MaxPool1D,
    MaxPool2D,
    MaxPool3D,
)
from py_engine.network.embedding import Embedding, PermuteDims
from py_engine.network.graph import Add, Concat
from py_engine.network.initialisers import initialise_all
from py_engine.network.layers import (
    ACTIVATIONS,
    GRU,
    LSTM,
    RBF,
    RNN,
    Activation,
    Dense,
    Dropout,
    Flatten,
    Layer,
    Recurrent,
    Reshape,
    collect_updates,
)
from py_engine.network.normalisation import BatchNorm, LayerNorm

SAMPLES, STEPS, INPUTS, UNITS, VOCABULARY = 5, 4, 3, 6, 7

# Every layer with the shape of a sample that goes in and that comes out.
CASES = [
    (Dense(INPUTS, UNITS), (INPUTS,), (UNITS,)),
    (Dense(INPUTS, UNITS, bias=False), (INPUTS,), (UNITS,)),
    (Dense(INPUTS, UNITS, "softplus"), (STEPS, INPUTS), (STEPS, UNITS)),
    (Dense(1, 1, "softmax"), (1,), (1,)),
    (Conv1D(2, 3, 2), (2, 5), (3, 4)),
    (Conv1D(2, 4, 2, "tanh", 2, (0, 1), 2, 2), (2, 5), (4, 2)),
    (Conv1D(1, 1, 3), (1, 3), (1, 1)),
    (Conv2D(2, 3, (2, 1), bias=False), (2, 3, 2), (3, 2, 2)),
    (Conv2D(1, 2, 3, "softplus", padding=1, stride=(1, 2)), (1, 3, 4), (2, 3, 2)),
    (Conv3D(2, 2, (2, 1, 2), padding=((0, 1), (0, 0), (1, 0)), stride=(1, 2, 1)), (2, 2, 3, 2), (2, 2, 2, 2)),
    (Conv1DTranspose(2, 3, 2), (2, 4), (3, 5)),
    (Conv1DTranspose(2, 4, 2, "tanh", 3, (0, 1), 2, 2, 2, False), (2, 3), (4, 10)),
    (Conv1DTranspose(1, 1, 1), (1, 1), (1, 1)),
    (Conv2DTranspose(2, 1, (2, 3), padding=((1, 0), (0, 1)), stride=(2, 1)), (2, 2, 3), (1, 3, 4)),
    (Conv3DTranspose(1, 2, (1, 2, 2), output_padding=(0, 1, 0), stride=2), (1, 2, 1, 2), (2, 3, 3, 4)),
    (MaxPool1D(2), (2, 5), (2, 2)),
    (MaxPool1D(3, 1, 1), (2, 4), (2, 4)),
    (MaxPool2D(2), (2, 4, 5), (2, 2, 2)),
    (MaxPool2D((2, 3), 1, ((1, 0), (0, 1))), (1, 2, 3), (1, 2, 2)),
    (AvgPool1D(2), (2, 5), (2, 2)),
    (AvgPool1D(3, 1, (1, 0)), (2, 4), (2, 3)),
    (AvgPool2D(2), (2, 4, 5), (2, 2, 2)),
    (MaxPool3D((1, 2, 2), 1, ((0, 0), (1, 0), (0, 1))), (2, 2, 2, 3), (2, 2, 2, 3)),
    (AvgPool3D(2, ceil_mode=True, count_padding=False), (2, 3, 2, 2), (2, 2, 1, 1)),
    (Interpolate(5), (2, 3), (2, 5)),
    (Interpolate((2, 5), "linear"), (2, 4, 3), (2, 2, 5)),
    (Interpolate((1, 3, 4), "linear", align_corners=True), (1, 2, 2, 2), (1, 1, 3, 4)),
    (GlobalMaxPool(), (2, 2, 3, 2), (2,)),
    (GlobalAvgPool(), (2, 2, 3, 2), (2,)),
    (GlobalMaxPool(), (3, 4), (3,)),
    (GlobalMaxPool(), (2, 3, 2), (2,)),
    (GlobalAvgPool(), (3, 4), (3,)),
    (GlobalAvgPool(), (2, 3, 2), (2,)),
    *((Dense(INPUTS, UNITS, name), (INPUTS,), (UNITS,)) for name in ACTIVATIONS),
    *((Activation(name), (INPUTS, 2), (INPUTS, 2)) for name in ACTIVATIONS),
    *((RNN(INPUTS, UNITS, name), (STEPS, INPUTS), (UNITS,)) for name in ("tanh", "identity", "relu")),
    (RNN(INPUTS, UNITS, returns="sequence"), (STEPS, INPUTS), (STEPS, UNITS)),
    (RNN(INPUTS, UNITS), (1, INPUTS), (UNITS,)),
    (RNN(1, 1, returns="sequence"), (1, 1), (1, 1)),
    *((cell(INPUTS, UNITS), (STEPS, INPUTS), (UNITS,)) for cell in (LSTM, GRU)),
    *((cell(INPUTS, UNITS, "sequence"), (STEPS, INPUTS), (STEPS, UNITS)) for cell in (LSTM, GRU)),
    *((cell(INPUTS, UNITS), (1, INPUTS), (UNITS,)) for cell in (LSTM, GRU)),
    (Flatten(), (STEPS, INPUTS, 2), (STEPS * INPUTS * 2,)),
    (Reshape(2, 6), (STEPS, INPUTS), (2, 6)),
    (Dropout(0.5), (INPUTS,), (INPUTS,)),
    (PermuteDims(0), (INPUTS,), (INPUTS,)),
    (PermuteDims(2, 0, 1), (STEPS, INPUTS, 2), (2, STEPS, INPUTS)),
    (RBF(INPUTS, UNITS), (INPUTS,), (UNITS,)),
    (RBF(INPUTS, 1), (STEPS, INPUTS), (STEPS, 1)),
    (BatchNorm(INPUTS), (INPUTS,), (INPUTS,)),
    (BatchNorm(INPUTS), (INPUTS, STEPS, 2), (INPUTS, STEPS, 2)),
    (BatchNorm(2), (2, 3, 2, 2), (2, 3, 2, 2)),
    (LayerNorm(INPUTS), (INPUTS,), (INPUTS,)),
    (LayerNorm(INPUTS), (STEPS, INPUTS), (STEPS, INPUTS)),
    (MultiHeadAttention(4, 2), (STEPS, 4), (STEPS, 4)),
    (MultiHeadAttention(4, 1, causal=True, bias=False), (STEPS, 4), (STEPS, 4)),
    (MultiHeadAttention(1, 1), (1, 1), (1, 1)),
    (PositionEmbedding(STEPS, INPUTS), (STEPS, INPUTS), (STEPS, INPUTS)),
    (Add(), (INPUTS,), (INPUTS,)),  # what they join is in tests/bridge/test_graph_spec.py
    (Concat(), (INPUTS,), (INPUTS,)),
    (Embedding(VOCABULARY, UNITS), (STEPS,), (STEPS, UNITS)),
    (Embedding(VOCABULARY, 1, padding_index=0), (), (1,)),
    (Embedding(VOCABULARY, UNITS, trainable=False), (2, STEPS), (2, STEPS, UNITS)),
]
IDS = [f"{layer!r}-{shape}" for layer, shape, _ in CASES]


def values(layer: Layer, seed: int = 1) -> dict[str, np.ndarray]:
    """Parameters in float64, the biases away from zero."""
    specs = layer.parameters()
    generator = np.random.default_rng(seed)
    return {
        name: array + 0.1 * generator.normal(size=array.shape)
        for name, array in initialise_all(specs, seed, np.float64).items()
    }


def batch(shape: tuple[int, ...], samples: int = SAMPLES, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(samples, *shape))


def batch_for(layer: Layer, shape: tuple[int, ...], samples: int = SAMPLES, dtype=np.float64) -> np.ndarray:
    """What the layer reads: numbers in `dtype`, or token ids (not that of padding, whose gradient is cut off)."""
    if isinstance(layer, Embedding):
        lowest = 0 if layer.padding_index is None else 1
        return np.random.default_rng(2).integers(lowest, layer.vocabulary, (samples, *shape))
    return batch(shape, samples).astype(dtype)


def test_settings_may_be_numbers_of_numpy():
    layers = (Dropout(np.float32(0.5)), BatchNorm(2, momentum=np.float32(0.5), eps=np.float64(1e-3)))
    assert (layers[0].rate, layers[1].momentum, layers[1].eps) == (0.5, 0.5, 1e-3)
    Dense(2, 2, weight_init={"name": "normal", "std": np.float32(0.5)})
    for wrong in (np.bool_(True), np.float32(np.nan), np.float32(1)):
        with pytest.raises(ConfigurationError, match="rate must be"):
            Dropout(wrong)


def run(layer: Layer, x: np.ndarray, parameters: dict[str, np.ndarray], training: bool = False):
    """The output, and the gradients of a weighted sum of it for the input and the parameters."""
    inputs = tensor(x, requires_grad=x.dtype.kind == "f")
    leaves = {name: tensor(value, requires_grad=True) for name, value in parameters.items()}
    y = layer(inputs, leaves, training)
    (y * weights(y.shape).astype(y.dtype)).sum().backward()
    return y.numpy(), {"x": inputs.grad, **{name: leaf.grad for name, leaf in leaves.items()}}


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape))).reshape(shape)


# What every layer must do ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "shape", "expected"), CASES, ids=IDS)
def test_gradients(layer, shape, expected):
    parameters = values(layer)

    def loss(x, *tensors):
        y = layer(x, dict(zip(parameters, tensors, strict=True)))
        return (y * weights(y.shape)).sum()

    gradcheck(loss, batch_for(layer, shape), *parameters.values())


@pytest.mark.parametrize(("layer", "shape", "expected"), CASES, ids=IDS)
@pytest.mark.parametrize("samples", [0, 1, SAMPLES])
def test_the_declared_shape_is_what_comes_out(layer, shape, expected, samples):
    assert layer.output_shape(shape) == expected
    parameters = {name: tensor(value) for name, value in values(layer).items()}
    assert layer(tensor(batch_for(layer, shape, samples)), parameters).shape == (samples, *expected)


@pytest.mark.parametrize(("layer", "shape", "expected"), CASES, ids=IDS)
def test_float32_stays_float32(layer, shape, expected):
    parameters = {name: value.astype(np.float32) for name, value in values(layer).items()}
    y, gradients = run(layer, batch_for(layer, shape, dtype=np.float32), parameters, training=True)
    assert {y.dtype, *(g.dtype for g in gradients.values() if g is not None)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("layer", "shape", "expected"), CASES, ids=IDS)
def test_a_layer_can_be_traced_on_shapes_alone(layer, shape, expected):
    specs = layer.parameters()
    symbols = [Tensor.symbol((SAMPLES, *shape), batch_for(layer, shape, dtype=np.float32).dtype)]
    symbols += [Tensor.symbol(spec.shape, np.float32, name) for name, spec in specs.items()]
    for training in (False, True):
        graph = trace(lambda x, *ps: [layer(x, dict(zip(specs, ps, strict=True)), training)], symbols)  # noqa: B023
        assert graph.outputs[0].shape == (SAMPLES, *expected)


def test_every_layer_is_in_the_table_and_tested():
    assert {type(layer) for layer, _, _ in CASES} == set(LAYERS.values())
    assert all(name.replace("_", "") == layer.__name__.lower() for name, layer in LAYERS.items())


# Against PyTorch ------------------------------------------------------------------------------------------


def torch_run(module, x, names, layout, returns="last", recurrent=True):
    """A torch module's output and gradients under our names and in our layout; `layout` maps torch's to ours."""
    import torch

    inputs = torch.tensor(x, requires_grad=True)
    y = module(inputs)
    if recurrent:
        y = y[0] if returns == "sequence" else y[0][:, -1]
    (y * torch.tensor(weights(tuple(y.shape)))).sum().backward()
    gradients = {ours: layout(dict(module.named_parameters())[name].grad.numpy()) for name, ours in names.items()}
    return y.detach().numpy(), {"x": inputs.grad.numpy(), **gradients}


def assert_same(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        np.testing.assert_allclose(gradient, theirs[1][name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("shape", [(INPUTS,), (STEPS, INPUTS)])
def test_dense_equals_torch(shape):
    torch = pytest.importorskip("torch")
    layer = Dense(INPUTS, UNITS)
    parameters = values(layer)
    module = torch.nn.Linear(INPUTS, UNITS, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(parameters["weight"].T))
        module.bias.copy_(torch.tensor(parameters["bias"]))
    x = batch(shape)
    theirs = torch_run(module, x, {"weight": "weight", "bias": "bias"}, np.transpose, recurrent=False)
    assert_same(run(layer, x, parameters), theirs)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_convolution_and_pools_equal_torch(axes):
    torch = pytest.importorskip("torch")
    layer = (Conv1D, Conv2D, Conv3D)[axes - 1](2, 4, 3, stride=2, padding=1, dilation=2, groups=2)
    parameters, x = values(layer), batch((2, 9, 8, 5)[: axes + 1])
    module = getattr(torch.nn, f"Conv{axes}d")(2, 4, 3, 2, 1, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        for name, value in parameters.items():
            getattr(module, name).copy_(torch.tensor(value))
    names = {"weight": "weight", "bias": "bias"}
    assert_same(run(layer, x, parameters), torch_run(module, x, names, lambda g: g, recurrent=False))
    pools = (MaxPool1D, AvgPool1D), (MaxPool2D, AvgPool2D), (MaxPool3D, AvgPool3D)
    for ours in pools[axes - 1]:
        module = getattr(torch.nn, ours.__name__.replace("D", "d"))(3, 2, 1)
        assert_same(run(ours(3, 2, 1), x, {}), torch_run(module, x, {}, None, recurrent=False))
    for global_pool, theirs in ((GlobalMaxPool, "Max"), (GlobalAvgPool, "Avg")):
        module = torch.nn.Sequential(getattr(torch.nn, f"Adaptive{theirs}Pool{axes}d")(1), torch.nn.Flatten())
        assert_same(run(global_pool(), x, {}), torch_run(module, x, {}, None, recurrent=False))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolution_equals_torch_with_the_same_weight(axes):
    torch = pytest.importorskip("torch")
    kind = (Conv1DTranspose, Conv2DTranspose, Conv3DTranspose)[axes - 1]
    layer = kind(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=2)
    parameters, x = values(layer), batch((4, 4, 3, 2)[: axes + 1])
    module = getattr(torch.nn, f"ConvTranspose{axes}d")(4, 6, 3, 2, 1, 1, 2, True, 2, dtype=torch.float64)
    assert parameters["weight"].shape == tuple(module.weight.shape)
    with torch.no_grad():
        for name, value in parameters.items():
            getattr(module, name).copy_(torch.tensor(value))
    names = {"weight": "weight", "bias": "bias"}
    assert_same(run(layer, x, parameters), torch_run(module, x, names, lambda g: g, recurrent=False))


@pytest.mark.parametrize(("mode", "align_corners"), [("nearest", False), ("linear", False), ("linear", True)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_interpolation_equals_torch(axes, mode, align_corners):
    torch = pytest.importorskip("torch")
    size, x = (7, 2, 5)[:axes], batch((2, 3, 4, 3)[: axes + 1])
    name = mode if mode == "nearest" else ("linear", "bilinear", "trilinear")[axes - 1]
    module = torch.nn.Upsample(size, mode=name, align_corners=align_corners if mode == "linear" else None)
    ours = run(Interpolate(size, mode, align_corners), x, {})
    assert_same(ours, torch_run(module, x, {}, None, recurrent=False))


@pytest.mark.parametrize("returns", ["last", "sequence"])
@pytest.mark.parametrize("steps", [1, STEPS, 20])
@pytest.mark.parametrize("kind", ["tanh", "relu", "lstm", "gru"])
def test_recurrent_layers_equal_torch(kind, steps, returns):
    """The gates have torch's order (i f g o, r z n), so that only the axes differ. Its second bias stays zero."""
    torch = pytest.importorskip("torch")
    layer: Recurrent
    if kind in ("tanh", "relu"):
        layer = RNN(INPUTS, UNITS, kind, returns)
        module = torch.nn.RNN(INPUTS, UNITS, nonlinearity=kind, batch_first=True, dtype=torch.float64)
    else:
        layer = {"lstm": LSTM, "gru": GRU}[kind](INPUTS, UNITS, returns)
        module = getattr(torch.nn, kind.upper())(INPUTS, UNITS, batch_first=True, dtype=torch.float64)
    parameters = values(layer)
    with torch.no_grad():
        module.weight_ih_l0.copy_(torch.tensor(parameters["weight"].T))
        module.weight_hh_l0.copy_(torch.tensor(parameters["recurrent"].T))
        module.bias_ih_l0.copy_(torch.tensor(parameters["bias"]))
        module.bias_hh_l0.zero_()
    names = {"weight_ih_l0": "weight", "weight_hh_l0": "recurrent", "bias_ih_l0": "bias"}
    x = batch((steps, INPUTS))
    ours = run(layer, x, parameters)
    if steps == 1:  # the recurrent weights play no part, and so have no gradient, where torch has zeros
        assert ours[1]["recurrent"] is None
        ours[1]["recurrent"] = np.zeros_like(parameters["recurrent"])
    assert_same(ours, torch_run(module, x, names, np.transpose, returns))


@pytest.mark.parametrize("momentum", [0.1, 1.0])
@pytest.mark.parametrize("shape", [(INPUTS,), (INPUTS, STEPS), (INPUTS, STEPS, 2)])
def test_batch_norm_equals_torch(shape, momentum):
    torch = pytest.importorskip("torch")
    layer = BatchNorm(INPUTS, momentum, eps=1e-3)
    kind = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d][len(shape) - 1]
    module = kind(INPUTS, momentum=momentum, eps=1e-3, dtype=torch.float64)
    parameters = values(layer)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(parameters["scale"]))
        module.bias.copy_(torch.tensor(parameters["shift"]))
        module.running_mean.copy_(torch.tensor(parameters["running_mean"]))
        module.running_var.copy_(torch.tensor(parameters["running_var"]))
    names = {"weight": "scale", "bias": "shift"}
    for training, seed in ((True, 3), (True, 4), (False, 5)):
        module.train(training)
        module.zero_grad()
        x = 2 * batch(shape, seed=seed) + 1
        with collect_updates() as updates:
            ours = run(layer, x, parameters, training)
        del ours[1]["running_mean"], ours[1]["running_var"]
        if training:
            parameters["running_mean"], parameters["running_var"] = (new.numpy() for _, new in updates)
        assert_same(ours, torch_run(module, x, names, np.asarray, recurrent=False))
        np.testing.assert_allclose(parameters["running_mean"], module.running_mean.numpy(), rtol=1e-12)
        np.testing.assert_allclose(parameters["running_var"], module.running_var.numpy(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(INPUTS,), (STEPS, INPUTS)])
def test_layer_norm_equals_torch(shape):
    torch = pytest.importorskip("torch")
    layer = LayerNorm(INPUTS, eps=1e-3)
    module = torch.nn.LayerNorm(INPUTS, eps=1e-3, dtype=torch.float64)
    parameters = values(layer)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(parameters["scale"]))
        module.bias.copy_(torch.tensor(parameters["shift"]))
    theirs = torch_run(module, batch(shape), {"weight": "scale", "bias": "shift"}, np.asarray, recurrent=False)
    assert_same(run(layer, batch(shape), parameters), theirs)


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_equals_torch(padding):
    torch = pytest.importorskip("torch")
    layer = Embedding(VOCABULARY, UNITS, padding)
    parameters = values(layer)
    module = torch.nn.Embedding(VOCABULARY, UNITS, padding_idx=padding, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(parameters["weight"]))
    ids = batch_for(layer, (50,))  # every id more than once
    y = module(torch.tensor(ids))
    (y * torch.tensor(weights(tuple(y.shape)))).sum().backward()
    ours, gradients = run(layer, ids, parameters)
    np.testing.assert_array_equal(ours, y.detach().numpy())
    np.testing.assert_allclose(gradients["weight"], module.weight.grad.numpy(), rtol=1e-12, atol=1e-12)
    assert padding is None or not gradients["weight"][padding].any()


# One by one -----------------------------------------------------------------------------------------------


def test_dense_and_reshape_are_what_their_formulas_say():
    layer = Dense(INPUTS, UNITS, "tanh")
    parameters, x = values(layer), batch((INPUTS,))
    y, _ = run(layer, x, parameters)
    np.testing.assert_allclose(y, np.tanh(x @ parameters["weight"] + parameters["bias"]), rtol=1e-14)
    pixels = np.arange(2 * 784.0).reshape(2, 784)
    np.testing.assert_array_equal(run(Reshape(4, 196), pixels, {})[0][1, 2], 784 + 2 * 196 + np.arange(196))
    np.testing.assert_array_equal(run(Flatten(), pixels.reshape(2, 4, 196), {})[0], pixels)


def test_rbf_permute_dims_and_layer_norm_are_what_their_formulas_say():
    layer = RBF(INPUTS, UNITS)
    parameters, x = values(layer), batch((STEPS, INPUTS))
    distances = np.linalg.norm(x[..., None, :] - parameters["centers"], axis=-1)
    np.testing.assert_allclose(run(layer, x, parameters)[0], np.exp(-parameters["beta"] * distances**2), rtol=1e-13)
    np.testing.assert_array_equal(run(PermuteDims(1, 0), x, {})[0], x.swapaxes(1, 2))
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        run(LayerNorm(INPUTS), x, {"scale": np.ones(INPUTS), "shift": np.zeros(INPUTS)})[0], expected, rtol=1e-12
    )


def test_rbf_is_exact_far_from_zero():
    """||x||² - 2 x·c + ||c||² would be off by more than the distance itself."""
    center = np.full((1, INPUTS), 1e4, np.float32)
    y, _ = run(RBF(INPUTS, 1), center + np.float32(0.5), {"centers": center, "beta": np.ones(1, np.float32)})
    np.testing.assert_allclose(y, np.exp(-0.25 * INPUTS), rtol=1e-5)


@pytest.mark.parametrize("shape", [(INPUTS,), (INPUTS, STEPS)])
def test_gradients_of_batch_norm_in_training(shape):
    layer = BatchNorm(INPUTS)

    def loss(x, scale, shift):
        state = {name: tensor(value) for name, value in values(layer).items() if name.startswith("running")}
        y = layer(x, {"scale": scale, "shift": shift, **state}, training=True)
        return (y * weights(y.shape)).sum()

    gradcheck(loss, batch(shape), values(layer)["scale"], values(layer)["shift"])


def test_updates_are_collected_or_made_at_once():
    layer = BatchNorm(INPUTS, momentum=0.5)
    x = batch((INPUTS,))
    parameters = {name: tensor(value.copy()) for name, value in values(layer).items()}
    before = {name: value.numpy().copy() for name, value in parameters.items()}
    with collect_updates() as updates:
        layer(tensor(x), parameters, training=True)
    assert all((parameters[name].numpy() == before[name]).all() for name in before)
    layer(tensor(x), parameters, training=True)
    for parameter, value in updates:
        np.testing.assert_array_equal(parameter.numpy(), value.numpy())
    np.testing.assert_allclose(
        parameters["running_mean"].numpy(), 0.5 * before["running_mean"] + 0.5 * x.mean(0), rtol=1e-12
    )


def test_frozen_parameters_say_so():
    assert not Embedding(VOCABULARY, UNITS, trainable=False).parameters()["weight"].trainable
    assert [spec.trainable for spec in BatchNorm(INPUTS).parameters().values()] == [True, True, False, False]


def test_a_sequence_of_784_steps():
    layer = RNN(1, 8)
    y, gradients = run(layer, batch((784, 1)), values(layer))
    assert y.shape == (SAMPLES, 8)
    assert np.isfinite(gradients["recurrent"]).all()


def test_the_last_state_is_the_end_of_the_sequence():
    for cell in (RNN, LSTM, GRU):
        parameters, x = values(cell(INPUTS, UNITS)), batch((STEPS, INPUTS))
        last, _ = run(cell(INPUTS, UNITS, returns="last"), x, parameters)
        sequence, _ = run(cell(INPUTS, UNITS, returns="sequence"), x, parameters)
        np.testing.assert_array_equal(sequence[:, -1], last)


def test_gates_are_initialised_one_by_one():
    """A gate is a separate matrix: four side by side don't make its Glorot limit smaller."""
    for cell in (LSTM, GRU):
        specs = cell(300, 200).parameters()
        assert (specs["weight"].fan_in, specs["weight"].fan_out) == (300, 200)
        assert (specs["recurrent"].fan_in, specs["recurrent"].fan_out) == (200, 200)


def test_dropout_is_off_outside_training():
    x = batch((INPUTS,))
    np.testing.assert_array_equal(run(Dropout(0.5), x, {})[0], x)


def test_dropout_keeps_the_mean_and_scales_gradients_alike():
    x = np.ones((200, 500))
    y, gradients = run(Dropout(0.2), x, {}, training=True)
    assert set(np.unique(y)) == {0.0, 1.25}
    assert (y == 0).mean() == pytest.approx(0.2, abs=0.01)
    np.testing.assert_allclose(gradients["x"], y * weights(y.shape))


def test_dropout_draws_by_seed_name_and_call():
    x = np.ones((20, 50))

    def draws(seed, name):
        layer = Dropout(0.5, seed)
        with scope(name):
            return [run(layer, x, {}, training=True)[0] for _ in range(2)]

    first, second = draws(0, "dropout")
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(draws(0, "dropout"), [first, second])
    assert not np.array_equal(draws(1, "dropout")[0], first)
    assert not np.array_equal(draws(0, "dropout2")[0], first)


# Bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (Dense(3, 2), (4,), r"Dense\(3, 2\): expected samples of shape \(\.\.\., 3\), actual shape \(4,\)"),
        (Dense(3, 2), (), r"expected samples of shape \(\.\.\., 3\), actual shape \(\)"),
        (RNN(3, 2), (3,), r"RNN\(3, 2\): expected samples of shape \(steps, 3\), actual shape \(3,\)"),
        (RNN(3, 2), (4, 5), r"expected samples of shape \(steps, 3\), actual shape \(4, 5\)"),
        (LSTM(3, 2), (0, 3), r"LSTM\(3, 2\): expected samples of shape \(steps, 3\), actual shape \(0, 3\)"),
        (GRU(3, 2), (2, 2, 3), r"expected samples of shape \(steps, 3\), actual shape \(2, 2, 3\)"),
        (
            Conv1D(2, 3, 4),
            (2, 3),
            r"Conv1D\(2, 3, 4\): expected samples of at least a window's size \(a window of length 4 does not fit an "
            r"input of length 3 along spatial axis 0\), actual shape \(2, 3\)",
        ),
        (
            Conv2D(1, 2, 3),
            (1, 28),
            r"Conv2D\(1, 2, 3\): expected samples of shape \(1, height, width\), actual .*\(1, 28\)",
        ),
        (
            Conv3D(1, 2, 3),
            (1, 8, 8),
            r"Conv3D\(1, 2, 3\): expected samples of shape \(1, depth, height, width\), actual .*\(1, 8, 8\)",
        ),
        (
            Conv1DTranspose(1, 1, 2, padding=2),
            (1, 2),
            r"expected samples of elements of which padding leaves some \(lengths would be \(-1,\)\), actual .*",
        ),
        (Interpolate((2, 2)), (1, 2), r"Interpolate\(\(2, 2\)\): expected samples of .* on 2 axes after the channels"),
        (Interpolate(2), (3,), r"Interpolate\(2\): expected samples of .* on one axis or more after the channels"),
        (Conv1D(2, 3, 1), (3, 9), r"expected samples of shape \(2, length\), actual shape \(3, 9\)"),
        (
            MaxPool2D(3),
            (1, 2, 4),
            r"MaxPool2D\(3\): expected .* window of length 3 does not fit an input of length 2 ",
        ),
        (AvgPool1D(2), (4,), r"AvgPool1D\(2\): expected samples of shape \(channels, length\), actual shape \(4,\)"),
        (GlobalMaxPool(), (4,), r"expected samples of shape \(channels, \.\.\.\)"),
        (Reshape(2, 3), (5,), r"Reshape\(2, 3\): expected samples of 6 elements, actual shape \(5,\)"),
        (RBF(3, 2), (4,), r"RBF\(3, 2\): expected samples of shape \(\.\.\., 3\), actual shape \(4,\)"),
        (PermuteDims(1, 0), (2, 3, 4), r"PermuteDims\(1, 0\): expected samples of 2 axes, actual shape \(2, 3, 4\)"),
        (BatchNorm(3), (4, 3), r"BatchNorm\(3\): expected samples of shape \(3, \.\.\.\), actual shape \(4, 3\)"),
        (LayerNorm(3), (3, 4), r"LayerNorm\(3\): expected samples of shape \(\.\.\., 3\), actual shape \(3, 4\)"),
        (Activation("softmax"), (), r"expected samples of shape \(\.\.\., classes\), actual shape \(\)"),
    ],
    ids=str,
)
def test_a_shape_that_does_not_fit_is_named(layer, shape, message):
    with pytest.raises(ShapeError, match=message):
        layer.output_shape(shape)
    with pytest.raises(ShapeError, match=message):
        layer(tensor(batch(shape)), {})
    with pytest.raises(ShapeError, match=r"in layer 'cell': expected"), scope("cell"):
        layer.output_shape(shape)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(0, 2), r"Dense: inputs must be an integer >= 1, actual 0"),
        (lambda: Dense(3, 2.5), r"Dense: units must be an integer >= 1, actual 2.5"),
        (lambda: Dense(3, True), r"Dense: units must be an integer"),
        (lambda: Dense(3, 2, "swish"), r"Dense: activation must be one of identity, tanh, .*, actual 'swish'"),
        (lambda: Dense(3, 2, weight_init="xavier"), r"Dense: weight_init: unknown initialiser 'xavier'"),
        (lambda: Dense(3, 2, bias_init={"name": "zeros", "std": 1}), r"Dense: bias_init: .* no option 'std'"),
        (lambda: RNN(3, 2, returns="all"), r"RNN: returns must be one of last, sequence, actual 'all'"),
        (lambda: Conv1D(2, 3, 0), r"Conv1D: kernel must be at least 1, actual 0"),
        (lambda: Conv2D(2, 3, (1, 2, 3)), r"Conv2D: kernel must be a whole number, or 2 of them, actual \(1, 2, 3\)"),
        (lambda: Conv2D(2, 3, 1, stride=1.5), r"Conv2D: stride must be a whole number"),
        (lambda: Conv1D(2, 3, 1, padding=(1, 2, 3)), r"Conv1D: padding must be a whole number >= 0"),
        (lambda: Conv1D(2, 3, 1, groups=2), r"2 channels and 3 filters cannot be divided into 2 groups"),
        (
            lambda: Conv1DTranspose(1, 1, 3, stride=2, output_padding=2),
            r"output_padding must be less than the stride 2 ",
        ),
        (lambda: Interpolate(0), r"Interpolate: size must be at least 1, actual 0"),
        (lambda: Interpolate(2, "cubic"), r"Interpolate: mode must be one of nearest, linear, actual 'cubic'"),
        (lambda: Interpolate(2, align_corners=True), r"Interpolate: align_corners is for mode linear"),
        (lambda: MaxPool1D(2, padding=2), r"MaxPool1D: padding must be at most half the window, 1, actual 2"),
        (lambda: AvgPool2D(2, 0), r"AvgPool2D: stride must be at least 1, actual 0"),
        (lambda: LSTM(3, 2, recurrent_init="x"), r"LSTM: recurrent_init: unknown initialiser 'x'"),
        (lambda: Reshape(4, -1), r"Reshape: every length must be an integer >= 1, actual -1"),
        (lambda: Activation("x"), r"Activation: activation must be one of"),
        (lambda: Dropout(1.0), r"Dropout: rate must be a number >= 0 and < 1, actual 1.0"),
        (lambda: Dropout(0.5, seed=-1), r"a seed must be an integer >= 0, actual -1"),
        (lambda: Embedding(0, 2), r"Embedding: vocabulary must be an integer >= 1, actual 0"),
        (lambda: Embedding(5, 2, padding_index=5), r"padding_index must be None or an id from 0 to 4, actual 5"),
        (lambda: PermuteDims(0, 2), r"PermuteDims: expected each of the axes 0, 1, .* actual \(0, 2\)"),
        (lambda: PermuteDims(), r"PermuteDims: expected each of the axes"),
        (lambda: RBF(2, 0), r"RBF: units must be an integer"),
        (lambda: BatchNorm(3, momentum=1.5), r"BatchNorm: momentum must be a number from 0 to 1, actual 1.5"),
        (lambda: BatchNorm(3, eps=0), r"BatchNorm: eps must be a finite number > 0, actual 0"),
        (lambda: LayerNorm(3, eps=float("nan")), r"LayerNorm: eps must be"),
        (lambda: Flatten(name="a.b"), r"a layer's name must be a string without dots, actual 'a.b'"),
        (lambda: Flatten(name=""), r"a layer's name must be"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(Dense(196, 64)) == "Dense(196, 64)"
    assert repr(Conv2D(1, 6, (3, 3), stride=(1, 2))) == "Conv2D(1, 6, 3, stride=(1, 2))"
    assert repr(MaxPool1D(2, padding=(0, 1))) == "MaxPool1D(2, padding=(0, 1))"
    assert repr(RNN(196, 64, recurrent_init="zeros", name="cell")) == (
        "RNN(196, 64, recurrent_init='zeros', name='cell')"
    )
    assert repr(Reshape(4, 196)) == "Reshape(4, 196)"


def test_repr_of_windows_makes_the_same_layer():
    for layer in (
        Conv2D(1, 1, 3, padding=[(1, 2), (1, 2)]),
        Conv2D(1, 1, 3, padding=[(1, 1), (2, 2)]),
        Conv2D(1, 1, (3, 2), padding=2),
        Conv1D(1, 1, 3, padding=(1, 2)),
        Conv1D(1, 1, 3, padding=2),
    ):
        again = eval(repr(layer), {"Conv1D": Conv1D, "Conv2D": Conv2D})
        assert (again.kernel, again.padding) == (layer.kernel, layer.padding), repr(layer)


def test_repr_of_windows_leaves_other_attributes_alone():
    class Tagged(Conv2D):
        def __init__(self, channels, filters, kernel, tags=None):
            super().__init__(channels, filters, kernel)
            self.tags = tags

    assert repr(Tagged(1, 2, 3, ())) == "Tagged(1, 2, 3, tags=())"
    assert repr(Tagged(1, 2, 3, ("a", "a"))) == "Tagged(1, 2, 3, tags=('a', 'a'))"


@pytest.mark.parametrize(("layer", "shape", "samples"), [(BatchNorm(3), (3,), 1), (BatchNorm(3), (3, 1), 0)])
def test_a_channel_with_one_value_has_no_statistics(layer, shape, samples):
    parameters = {name: tensor(value) for name, value in values(layer).items()}
    message = rf"BatchNorm\(3\).*in layer 'norm'.*more than one value .* actual {samples}"
    with pytest.raises(ShapeError, match=message), scope("norm"):
        layer(tensor(batch(shape, samples)), parameters, training=True)
    assert layer(tensor(batch(shape, samples)), parameters).shape == (samples, *shape)


@pytest.mark.parametrize(("bad", "position"), [(-1, 0), (VOCABULARY, 2)])
def test_an_id_out_of_range_is_named(bad, position):
    layer = Embedding(VOCABULARY, UNITS)
    ids = np.zeros((SAMPLES, STEPS), np.int64)
    ids[3, position] = bad
    message = rf"token id {bad} in row 3 at position {position} is not one of the 7 of the vocabulary, 0\.\.6"
    with pytest.raises(ShapeError, match=message):
        layer(tensor(ids), {"weight": tensor(values(layer)["weight"])})
    with pytest.raises(DTypeError, match="integer token ids, got float64"):
        layer(tensor(batch((STEPS,))), {"weight": tensor(values(layer)["weight"])})
