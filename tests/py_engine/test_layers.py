"""Layers: the same outputs and gradients as PyTorch's, gradients that pass gradcheck, shapes that are checked."""

from __future__ import annotations

import numpy as np
import pytest

from py_engine.ad.gradcheck import gradcheck
from py_engine.ad.graph import trace
from py_engine.ad.tensor import Tensor, scope, tensor
from py_engine.errors import ConfigurationError, ShapeError
from py_engine.network.initialisers import initialise_all
from py_engine.network.layers import (
    ACTIVATIONS,
    GRU,
    LAYERS,
    LSTM,
    RNN,
    Activation,
    Dense,
    Dropout,
    Flatten,
    Layer,
    Recurrent,
    Reshape,
)

SAMPLES, STEPS, INPUTS, UNITS = 5, 4, 3, 6

# Every layer with the shape of a sample that goes in and that comes out.
CASES = [
    (Dense(INPUTS, UNITS), (INPUTS,), (UNITS,)),
    (Dense(INPUTS, UNITS, bias=False), (INPUTS,), (UNITS,)),
    (Dense(INPUTS, UNITS, "softplus"), (STEPS, INPUTS), (STEPS, UNITS)),
    (Dense(1, 1, "softmax"), (1,), (1,)),
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


def run(layer: Layer, x: np.ndarray, parameters: dict[str, np.ndarray], training: bool = False):
    """The output, and the gradients of a weighted sum of it for the input and the parameters."""
    inputs = tensor(x, requires_grad=True)
    leaves = {name: tensor(value, requires_grad=True) for name, value in parameters.items()}
    y = layer(inputs, leaves, training)
    (y * weights(y.shape).astype(x.dtype)).sum().backward()
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

    gradcheck(loss, batch(shape), *parameters.values())


@pytest.mark.parametrize(("layer", "shape", "expected"), CASES, ids=IDS)
@pytest.mark.parametrize("samples", [0, 1, SAMPLES])
def test_the_declared_shape_is_what_comes_out(layer, shape, expected, samples):
    assert layer.output_shape(shape) == expected
    parameters = {name: tensor(value) for name, value in values(layer).items()}
    assert layer(tensor(batch(shape, samples)), parameters).shape == (samples, *expected)


@pytest.mark.parametrize(("layer", "shape", "expected"), CASES, ids=IDS)
def test_float32_stays_float32(layer, shape, expected):
    parameters = {name: value.astype(np.float32) for name, value in values(layer).items()}
    y, gradients = run(layer, batch(shape).astype(np.float32), parameters, training=True)
    assert {y.dtype, *(g.dtype for g in gradients.values() if g is not None)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("layer", "shape", "expected"), CASES, ids=IDS)
def test_a_layer_can_be_traced_on_shapes_alone(layer, shape, expected):
    specs = layer.parameters()
    symbols = [Tensor.symbol((SAMPLES, *shape), np.float32)]
    symbols += [Tensor.symbol(spec.shape, np.float32, name) for name, spec in specs.items()]
    for training in (False, True):
        graph = trace(lambda x, *ps: [layer(x, dict(zip(specs, ps, strict=True)), training)], symbols)  # noqa: B023
        assert graph.outputs[0].shape == (SAMPLES, *expected)


def test_every_layer_is_in_the_table_and_tested():
    assert {type(layer) for layer, _, _ in CASES} == set(LAYERS.values())
    assert set(LAYERS) == {"dense", "rnn", "lstm", "gru", "flatten", "reshape", "activation", "dropout"}


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


# One by one -----------------------------------------------------------------------------------------------


def test_dense_and_reshape_are_what_their_formulas_say():
    layer = Dense(INPUTS, UNITS, "tanh")
    parameters, x = values(layer), batch((INPUTS,))
    y, _ = run(layer, x, parameters)
    np.testing.assert_allclose(y, np.tanh(x @ parameters["weight"] + parameters["bias"]), rtol=1e-14)
    pixels = np.arange(2 * 784.0).reshape(2, 784)
    np.testing.assert_array_equal(run(Reshape(4, 196), pixels, {})[0][1, 2], 784 + 2 * 196 + np.arange(196))
    np.testing.assert_array_equal(run(Flatten(), pixels.reshape(2, 4, 196), {})[0], pixels)


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
    """A gate is a matrix of its own: four side by side don't make its Glorot limit smaller."""
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
        (Reshape(2, 3), (5,), r"Reshape\(2, 3\): expected samples of 6 elements, actual shape \(5,\)"),
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
        (lambda: LSTM(3, 2, recurrent_init="x"), r"LSTM: recurrent_init: unknown initialiser 'x'"),
        (lambda: Reshape(4, -1), r"Reshape: every length must be an integer >= 1, actual -1"),
        (lambda: Activation("x"), r"Activation: activation must be one of"),
        (lambda: Dropout(1.0), r"Dropout: rate must be a number >= 0 and < 1, actual 1.0"),
        (lambda: Dropout(0.5, seed=-1), r"a seed must be an integer >= 0, actual -1"),
        (lambda: Flatten(name="a.b"), r"a layer's name must be a string without dots, actual 'a.b'"),
        (lambda: Flatten(name=""), r"a layer's name must be"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(Dense(196, 64)) == "Dense(196, 64)"
    assert repr(RNN(196, 64, recurrent_init="zeros", name="cell")) == (
        "RNN(196, 64, recurrent_init='zeros', name='cell')"
    )
    assert repr(Reshape(4, 196)) == "Reshape(4, 196)"
