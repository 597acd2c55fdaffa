"""A copy of a tensor keeps its graph, or is refused: no way to copy one loses a gradient without a word."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor
from py_engine.errors import ConfigurationError, DTypeError, EngineError, NotDifferentiableError, TraceError
from py_engine.network import SGD, Activation, BatchNorm, Chain, Dense, Dropout, Trainer

X = np.array([0.5, -1.5, 2.0])

FORMS = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "of a list": lambda x: copy.deepcopy([x, 1])[0],
    "of a dict of tuples": lambda x: copy.deepcopy({"a": (x,)})["a"][0],
    "of a list, shallow": lambda x: copy.copy([x])[0],
    "of an object": lambda x: copy.deepcopy(type("Model", (), {"__init__": lambda self: setattr(self, "w", x)})()).w,
    "twice": lambda x: copy.deepcopy(copy.copy(x)),
    "tensor": pe.tensor,
    "tensor, dtype": lambda x: pe.tensor(x, dtype=np.float64),
    "tensor, leaf": lambda x: pe.tensor(x, requires_grad=True),
    "Tensor": Tensor,
    "np.array": np.array,
    "np.asarray": np.asarray,
    "np.array, dtype": lambda x: np.array(x, dtype=np.float64),
    "np.array of a list": lambda x: np.array([x, x])[0],
    "tensor of a list": lambda x: pe.tensor([x, x])[0],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle of a dict": lambda x: pickle.loads(pickle.dumps({"x": x}))["x"],
    "iterated": lambda x: np.stack(list(x)),
    "slice": lambda x: x[:],
}
KEEP = {"copy.copy", "copy.deepcopy", "of a list", "of a dict of tuples", "of a list, shallow", "of an object", "twice",
        "tensor", "tensor, dtype", "iterated", "slice"}  # fmt: skip


def f(form):
    """A function whose gradient is that of sum(sin(x) x²): half of it flows through the copies."""
    make = FORMS[form]

    def function(x):
        return np.sum(np.sin(make(x)) * make(x * x))

    return function


def exact(x):
    return np.cos(x) * x**2 + 2 * x * np.sin(x)


def backward(function):
    def gradient(x):
        leaf = pe.tensor(x, requires_grad=True)
        function(leaf * 1.0).backward()
        return leaf.grad

    return gradient


STATES = {
    "grad": pe.grad,
    "value_and_grad": lambda f: lambda x: pe.value_and_grad(f)(x)[1],
    "vjp": lambda f: lambda x: pe.vjp(f, x)[1](1.0)[0],
    "jvp": lambda f: lambda x: np.array([pe.jvp(f, (x,), (e,))[1] for e in np.eye(3)]),
    "backward": backward,
    "compile(grad)": lambda f: pe.compile(pe.grad(f)),
    "grad of compiled": lambda f: pe.grad(pe.compile(f)),
    "checkpoint": lambda f: pe.grad(pe.checkpoint(f)),
    "compiled checkpoint": lambda f: pe.compile(pe.grad(pe.checkpoint(f))),
    "scan": lambda f: pe.grad(lambda x: pe.scan(lambda c, e: (c + f(e), None), 0.0, np.stack([x, 0 * x]))[0]),
    "carry of a scan": lambda f: pe.grad(lambda x: pe.scan(lambda c, _: (c, f(c)), x, length=1)[1][0]),
    "captured by a scan": lambda f: pe.grad(lambda x: pe.scan(lambda c, e: (c + e * f(x), None), 0.0, np.ones(1))[0]),
    "jacobian": lambda f: lambda x: pe.jacobian(f, x, mode="forward"),
    "hvp": lambda f: lambda x: np.array([pe.hvp(lambda z: z[0] * f(z[1:]), np.r_[1, x], np.eye(4)[0])[1:]])[0],
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_within_a_function_keeps_the_gradient_or_is_refused(form, state):
    try:
        found = STATES[state](f(form))(X)
    except EngineError as error:
        assert form not in KEEP, error
    else:
        assert form in KEEP
        np.testing.assert_allclose(found, exact(X), rtol=1e-12)


@pytest.mark.parametrize("form", sorted(KEEP))
def test_a_copy_of_what_a_compiled_function_captures_is_read_anew(form):
    w = pe.tensor(X)
    function = pe.compile(lambda x: x * FORMS[form](w))
    np.testing.assert_array_equal(function(np.ones(3)), X)
    w.assign(2 * X)
    np.testing.assert_array_equal(function(np.ones(3)), 2 * X)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_deep_copy_of_a_leaf_is_a_leaf_of_its_own(requires_grad):
    w = Tensor(X.copy(), requires_grad, "weight")
    parameters = {"w": w, "again": [w]}
    found = copy.deepcopy(parameters)
    own = found["w"]
    assert own is not w and found["again"][0] is own  # what is one stays one
    assert (own.name, own.requires_grad, own.op, own.grad) == ("weight", requires_grad, None, None)
    own.assign(0)
    np.testing.assert_array_equal(w.numpy(), X)
    if requires_grad:
        np.sum(own * w).backward()
        np.testing.assert_array_equal(own.grad, X)
        again = copy.deepcopy(own)
        np.testing.assert_array_equal(again.grad, X)
        again.grad[...] = 0
        np.testing.assert_array_equal(own.grad, X)


def test_the_shallow_copy_of_a_leaf_shares_its_memory():
    w = pe.tensor(X, requires_grad=True)
    again = copy.copy(w)
    assert again is not w and again.requires_grad and again.numpy() is w.numpy()


def test_tensor_of_a_leaf_is_part_of_its_graph_and_on_demand_a_new_leaf():
    w = pe.tensor(X, requires_grad=True)
    np.sum(pe.tensor(w) * 3).backward()
    np.testing.assert_array_equal(w.grad, [3, 3, 3])
    new = pe.tensor(w, requires_grad=True)
    np.sum(new * 5).backward()
    np.testing.assert_array_equal((w.grad, new.grad), [[3, 3, 3], [5, 5, 5]])
    with pytest.raises(NotDifferentiableError, match="would become a leaf"):
        pe.tensor(w * 2, requires_grad=True)
    assert pe.tensor((w * 2).detach().numpy(), requires_grad=True).requires_grad


@pytest.mark.parametrize("data", [pe.tensor(X), [1.0, 2.0], 3.0, None, "x"], ids=lambda data: type(data).__name__)
def test_the_class_takes_arrays_only(data):
    with pytest.raises(DTypeError, match=r"Tensor: expected a numpy array, got .*tensor\(\) makes one"):
        Tensor(data)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "make",
    [
        lambda: pe.tensor(X),
        lambda: pe.tensor(X, requires_grad=True) * 2,
        lambda: Tensor.symbol((2,), np.float64),
        lambda: Chain(Dense(2, 3)),
        lambda: Chain(Dense(2, 3)).parameters,
        lambda: Trainer(Chain(Dense(2, 3))),
    ],
    ids=["leaf", "computed", "symbol", "chain", "parameters", "trainer"],
)
def test_nothing_is_pickled(make, protocol):
    with pytest.raises(ConfigurationError, match="pickled"):
        pickle.dumps(make(), protocol)


def chain():
    layers = [Dense(3, 5), Activation("tanh"), BatchNorm(5), Dropout(0.3), Dense(5, 2)]
    return Chain(*layers, seed=1, dtype=np.float64)


def test_the_deep_copy_of_a_chain_is_a_model_of_its_own(rng):
    x, y = rng.standard_normal((8, 3)), rng.integers(0, 2, 8)
    model = chain()
    Trainer(model, optimizer=SGD(0.1), batch_size=4, threads=1).train_epoch(x, y)
    twin = copy.deepcopy(model)
    np.testing.assert_array_equal(twin(x).numpy(), model(x).numpy())
    kept = model.parameters.as_dict()
    assert twin.parameters.trainable == model.parameters.trainable and twin.parameters.names == model.parameters.names
    for name, tensor in twin.parameters.tensors.items():
        assert tensor.requires_grad == model.parameters.tensors[name].requires_grad and tensor.name == name
        assert np.shares_memory(tensor.numpy(), twin.parameters.memory)
        assert not np.shares_memory(tensor.numpy(), model.parameters.memory)
    losses = [Trainer(m, optimizer=SGD(0.1), batch_size=4, threads=1).train_epoch(x, y) for m in (twin, model)]
    np.testing.assert_array_equal(*losses)  # the dropout layers' generators are copies, too
    for name, array in model.parameters.as_dict().items():
        np.testing.assert_array_equal(array, twin.parameters.arrays[name])
    assert any(np.any(kept[name] != array) for name, array in model.parameters.arrays.items())


def test_a_chain_is_not_copied_within_a_transform():
    model = chain()
    with pytest.raises(TraceError, match="copy them, or the chain, before"):
        pe.grad(lambda x: np.sum(copy.deepcopy(model)(x)))(np.ones((2, 3)))


def test_a_deep_copy_of_a_layer_is_a_layer():
    layer = copy.deepcopy(Dense(2, 3))
    assert repr(layer) == repr(Dense(2, 3))
    assert Chain(layer)(np.ones((1, 2), np.float32)).shape == (1, 3)


@pytest.mark.parametrize("form", [copy.copy, copy.deepcopy])
def test_a_trainer_is_not_copied(form):
    with pytest.raises(ConfigurationError, match="make a new one for a copy of the chain"):
        form(Trainer(chain()))


def test_a_deep_copy_of_a_compiled_function_is_compiled_anew():
    function = pe.compile(np.sin)
    function(X)
    again = copy.deepcopy({"f": function})["f"]
    np.testing.assert_array_equal(again(X), function(X))
    assert again.tapes.keys() == function.tapes.keys() and again.tapes is not function.tapes
