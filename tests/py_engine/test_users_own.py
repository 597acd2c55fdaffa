"""What users add themselves, layers, ops, losses and optimizers, is right beside every feature or is refused."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.op import Op, c_ordered
from py_engine.ad.techniques import Techniques
from py_engine.errors import ConfigurationError, DTypeError, LabelError, ShapeError
from py_engine.network import SGD, Adam, Chain, Dense, Dropout, Embedding, Flatten, Layer, Trainer
from py_engine.network import trainer as trainer_module
from py_engine.network.initialisers import ParameterSpec
from py_engine.network.layers import update
from py_engine.network.losses import Loss
from py_engine.network.parameters import FlatVector, Layout

STEPS = [Techniques(), Techniques(replay=False)]


def data():
    return np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), np.arange(8) % 2


class Own(Layer):
    """Does what it is given, and has a vector that is not trained."""

    def __init__(self, function, trainable=False):
        super().__init__()
        self.function, self.trainable = function, trainable

    def parameters(self):
        return {"kept": ParameterSpec((3,), "zeros", 3, 3, trainable=self.trainable)}

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        return self.function(x, parameters["kept"])


def trained(layer, techniques=STEPS[0], loss="softmax_cross_entropy", threads=1):
    chain = Chain(Dense(3, 3), layer, Dense(3, 2), seed=0)
    with closing(Trainer(chain, loss, SGD(0.1), batch_size=8, threads=threads, techniques=techniques)) as trainer:
        return [trainer.train_epoch(*data())[0] for _ in range(3)], chain.parameters.as_dict()


# Layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("techniques", STEPS, ids=["replayed", "eager"])
def test_a_new_value_of_another_shape_or_dtype_is_refused(techniques):
    for error, value in (
        (ShapeError, lambda x: ops.sum(x)),
        (DTypeError, lambda x: ops.astype(ops.sum(x, 0), np.float64)),
    ):
        with pytest.raises(error, match="expected a value of"):
            trained(Own(lambda x, kept, value=value: (update(kept, value(x)), x)[1]), techniques)


@pytest.mark.parametrize("techniques", STEPS, ids=["replayed", "eager"])
def test_what_the_optimizer_trains_no_layer_updates(techniques):
    with pytest.raises(ConfigurationError, match=r"own\.kept: a layer updates it by itself, and so does the optimizer"):
        trained(Own(lambda x, kept: (update(kept, kept * 2), x + kept)[1], trainable=True), techniques)


def test_a_value_is_that_before_the_step_however_the_step_is_made():
    class Previous(Own):
        """Keeps what its weight was before the step."""

        def parameters(self):
            return {**super().parameters(), "weight": ParameterSpec((3,), "ones", 3, 3)}

        def forward(self, x, parameters, training):
            if training:
                update(parameters["kept"], parameters["weight"])
            return x * parameters["weight"]

    (one, of_one), (two, of_two) = (trained(Previous(None), techniques) for techniques in STEPS)
    np.testing.assert_allclose(two, one, rtol=1e-6)
    assert np.abs(of_one["previous.kept"] - of_one["previous.weight"]).max() > 1e-4
    np.testing.assert_allclose(of_two["previous.kept"], of_one["previous.kept"], rtol=1e-6)


def test_a_result_that_output_shape_did_not_say_is_refused():
    chain = Chain(Dense(3, 3), Own(lambda x, kept: ops.mean(x, -1, keepdims=True)), seed=0)
    with pytest.raises(ShapeError, match=r"output_shape says samples of shape \(3,\), forward gave \(1,\)"):
        Trainer(chain, "mean_squared_error", threads=1).predict(data()[0])


def test_a_layer_shows_arrays_among_its_arguments():
    class Standardised(Own):
        def __init__(self, mean, scale=None):
            super().__init__(lambda x, kept: (x - mean) / (1 if scale is None else scale))
            self.mean, self.scale = mean, scale

    assert "Standardised(array([0., 0., 0.]), scale=array([1., 1., 1.])" in repr(Standardised(np.zeros(3), np.ones(3)))


def test_a_chain_with_an_embedding_can_be_copied():
    chain = Chain(Embedding(5, 2), Flatten(), Dense(6, 2), seed=0)
    other, ids = copy.deepcopy(chain), np.arange(6).reshape(2, 3) % 5
    np.testing.assert_array_equal(other(ids).numpy(), chain(ids).numpy())
    other.parameters.vector[...] = 0
    assert chain.parameters.vector.any() and repr(other) == repr(chain) and "weight_init" not in repr(chain)
    flat = FlatVector(Layout.of({"a": (3,)}), np.float32)
    copied = copy.deepcopy(flat)
    copied.arrays["a"][...] = 1
    assert copied.vector[:3].all() and not flat.vector.any()


# Ops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.parametrize("elementwise", [False, True])
def test_a_kernel_that_takes_one_layout_is_given_that(elementwise, size):
    def kernel(x, out):  # as a library in C that is given a pointer: elements as they lie in memory
        out.reshape(-1)[:] = np.ravel(x, "K") * 2

    twice = Op(
        "twice", ops.stop_gradient.infer, kernel=kernel, accepts=c_ordered, constant=True, elementwise=elementwise
    )
    both = Op(
        "both",
        lambda x: [(x.shape, x.dtype)] * 2,
        kernel=lambda x, a, b: (kernel(x, a), kernel(x, b)),
        accepts=c_ordered,
        constant=True,
        several=True,
    )
    a = np.arange(2.0 * size * size).reshape(size, 2 * size)
    for function in (lambda x: twice(x.T), lambda x: both.apply_several((x.T,), {})[1]):
        np.testing.assert_array_equal(function(Tensor(a)).numpy(), a.T * 2)
        np.testing.assert_array_equal(pe.compile(function)(a), a.T * 2)


def test_several_results_need_one_rule_for_all_their_cotangents():
    with pytest.raises(ValueError, match="both: an op with several results needs one vjp"):
        Op("both", lambda x: [(x.shape, x.dtype)] * 2, kernel=np.modf, several=True, vjp=(lambda g, y, x: g,))


def test_tangents_of_several_results_have_their_shapes():
    sum_and_difference = Op(
        "sum_and_difference",
        lambda a, b: [(np.broadcast_shapes(a.shape, b.shape), a.dtype)] * 2,
        kernel=lambda a, b, s, d: (np.add(a, b, s), np.subtract(a, b, d)),
        several=True,
        jvp=lambda t, node, a, b: [
            t[1] if t[0] is None else t[0] if t[1] is None else t[0] + t[1],
            -t[1] if t[0] is None else t[0] if t[1] is None else t[0] - t[1],
        ],
    )

    def total(b):
        return np.sum(sum_and_difference.apply_several((Tensor(np.ones(3)), b), {})[0])

    _, tangent = pe.jvp(total, (np.ones(1),), (np.ones(1),))
    assert tangent.item() == 3


def test_elementwise_ops_with_several_results_work_in_tapes():
    split = Op(
        "split",
        lambda x: [(x.shape, x.dtype)] * 2,
        kernel=lambda x, a, b: np.modf(x, a, b),
        several=True,
        elementwise=True,
        constant=True,
    )

    def function(x):
        fraction, whole = split.apply_several((x,), {})
        return np.sum(fraction * whole + x * fraction + whole)

    x = np.array([1.5, 2.25])
    assert pe.compile(function)(x) == function(Tensor(x)).item()


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (np.float64(0.0), -0.0), (1, True), ((0.0,), (-0.0,))])
def test_settings_that_differ_are_not_merged(first, second):
    def kernel(x, out, setting):
        value = setting[0] if isinstance(setting, tuple) else setting
        out[...] = -1 if isinstance(value, bool) else np.copysign(1, value)

    with_setting = Op("with_setting", lambda x, setting: (x.shape, x.dtype), kernel=kernel, constant=True)

    def both(x):
        return with_setting(x, setting=first) + 10 * with_setting(x, setting=second)

    np.testing.assert_array_equal(pe.compile(both)(np.zeros(3)), [1 - 10] * 3)


def test_settings_that_cannot_be_hashed_work_in_tapes():
    def kernel(x, out, shifts):
        np.add(x, shifts, out)

    shifted = Op("shifted", lambda x, shifts: (x.shape, x.dtype), kernel=kernel, constant=True)

    def twice(x):
        return shifted(x, shifts=np.arange(3.0)) + shifted(x, shifts=[1.0, 1.0, 1.0])

    np.testing.assert_array_equal(pe.compile(twice)(np.zeros(3)), [1, 2, 3])


# Losses ---------------------------------------------------------------------------------------------------


def test_a_loss_with_a_setting_of_that_name_is_no_loss_by_weights():
    def prepare(shape, targets, dtype, **settings):
        return np.ascontiguousarray(np.broadcast_to(np.asarray(targets)[:, None], shape), dtype)

    def loss(y, t, class_weights):
        return ops.mean(ops.square(y - t) * np.array(class_weights, np.float32))

    own = Loss("own", loss, prepare, False, {"class_weights": (1.0, 2.0)}, is_mean=True)
    split = Techniques(split_batch=True)
    (one, _), (two, _) = (trained(Own(lambda x, kept: x), split, own, threads) for threads in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-5)


@pytest.mark.parametrize("techniques", STEPS, ids=["replayed", "eager"])
def test_a_loss_of_several_numbers_and_targets_of_another_number_are_refused(techniques):
    def prepare(shape, targets, dtype):
        return np.asarray(targets, dtype)

    each = Loss("each", lambda y, t: ops.square(y[:, 0] - t), prepare, False)
    with pytest.raises(ShapeError, match=r"each: a loss gives one number, actual shape \(8,\)"):
        trained(Own(lambda x, kept: x), techniques, each)
    fewer = replace(each, name="fewer", prepare=lambda shape, t, dtype: np.asarray(t[t > 0], dtype))
    with pytest.raises(LabelError, match=r"fewer: of targets of shape \(8,\) prepare made shape \(4,\)"):
        trained(Own(lambda x, kept: x), techniques, fewer)
    a_list = replace(each, name="a list", prepare=lambda shape, t, dtype: list(t))
    with pytest.raises(LabelError, match=r"a list: of targets of shape .* prepare made list"):
        trained(Own(lambda x, kept: x), techniques, a_list)


# Optimizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.1)], ids=["momentum", "adam"])
def test_a_copied_optimizer_updates_the_copied_vectors(rule):
    vector, gradient, optimizer = np.ones(5, np.float32), np.ones(5, np.float32), rule()
    optimizer.bind(vector)
    optimizer.step(vector, gradient)
    copied = copy.deepcopy({"vector": vector, "gradient": gradient, "optimizer": optimizer})
    copied["optimizer"].step(copied["vector"], copied["gradient"])
    optimizer.step(vector, gradient)
    np.testing.assert_array_equal(copied["vector"], vector)
    for name, array in optimizer.state().items():
        np.testing.assert_array_equal(copied["optimizer"].state()[name], array)


def test_a_rule_whose_epsilon_is_no_number_is_not_flushed_by_it():
    class Adafactor(SGD):
        eps = (1e-30, 1e-3)

    vector = np.ones(5, np.float32)
    optimizer = Adafactor(0.1, momentum=0.5)
    optimizer.bind(vector)
    for _ in range(33):
        optimizer.step(vector, np.ones(5, np.float32))
    assert optimizer.steps == 33


def test_blocks_that_could_not_be_made_are_made_in_the_next_step(monkeypatch):
    vector, optimizer = np.ones(5, np.float32), SGD(0.1)
    optimizer.bind(vector)
    optimizer.step(vector, np.ones(5, np.float32))
    gradient = np.ones(5, np.float32)
    optimizer.momentum = 0.9
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_parts", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            optimizer.step(vector, gradient)
    optimizer.step(vector, gradient)
    assert optimizer.state()["velocity"].any()


def test_an_optimizer_that_began_anew_elsewhere_is_refused():
    chain, optimizer = Chain(Dense(3, 2)), Adam()
    first = Trainer(chain, optimizer=optimizer, batch_size=8, threads=1)
    first.train_epoch(*data())
    second = Trainer(chain, optimizer=optimizer, batch_size=4, threads=1)
    for call in (lambda: first.train_epoch(*data()), first.state):
        with pytest.raises(ConfigurationError, match="has begun anew with another trainer"):
            call()
    second.train_epoch(*data())


def test_of_an_update_for_which_there_are_no_threads_nothing_is_left(monkeypatch):
    monkeypatch.setattr(trainer_module, "SPLIT_FROM", 1)
    chain = Chain(Dense(3, 2), seed=0)
    x, y = data()
    techniques = Techniques(split_batch=False)
    with closing(Trainer(chain, batch_size=2, threads=2, accumulate=2, techniques=techniques)) as trainer:
        with monkeypatch.context() as patched:
            patched.setattr(trainer_module, "Team", lambda *_: (_ for _ in ()).throw(RuntimeError("no thread")))
            with pytest.raises(RuntimeError, match="no thread"):
                trainer.train_epoch(x[:4], y[:4])
        assert trainer.state()["pending"] == 0 and not trainer.state()["total"].any()
        trainer.train_epoch(x[:4], y[:4])


def test_streams_of_a_step_that_is_traced_again_go_on(monkeypatch):
    def resumed(fails):
        first = Trainer(Chain(Dense(3, 4), Dropout(0.5), Dense(4, 2), seed=0), batch_size=8, threads=1)
        first.train_epoch(*data())
        chain = Chain(Dense(3, 4), Dropout(0.5), Dense(4, 2), seed=0)
        chain.parameters.vector[...] = first.parameters.vector
        second = Trainer(chain, batch_size=8, threads=1)
        second.load_state(first.state())
        if fails:
            key = second._key(8, *data())
            with second._streams.tracing(key):  # as a plan does that fails once it was traced
                chain.apply(chain.parameters.tensors, Tensor.symbol((8, 3), np.float32), training=True)
        losses = [second.train_epoch(*data())[0] for _ in range(3)]
        return losses, second.state()["dropout.dropout"]

    (losses, state), (others, other) = resumed(False), resumed(True)
    np.testing.assert_array_equal(others, losses)
    np.testing.assert_array_equal(other, state)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_generator_of_the_users_draws_as_often_as_steps_are_made(threads):
    generator = np.random.default_rng(1)
    chain = Chain(Dense(3, 64), Own(lambda x, kept: ops.dropout(x, 0.5, generator)), Dense(64, 2), seed=0)
    x, y = data()
    with closing(Trainer(chain, batch_size=8, threads=threads)) as trainer:
        trainer.train_epoch(x, y)
        trainer.costs()
        trainer.train_epoch(x, y)
    expected = np.random.default_rng(1)
    expected.random((2, 8, 64), np.float32)
    assert generator.bit_generator.state == expected.bit_generator.state


@pytest.mark.parametrize(
    "function", [lambda chain, x: chain(x), lambda chain, x: Trainer(chain).train_epoch(x, [0] * 8)]
)
def test_a_layer_with_a_parameter_more_than_its_chain_has_is_named(function):
    class Growing(Own):
        more = False

        def parameters(self):
            spec = super().parameters()["kept"]
            return {"kept": spec, "other": spec} if self.more else {"kept": spec}

    layer = Growing(lambda x, kept: x + kept)
    chain = Chain(layer, seed=0)
    layer.more = True
    with pytest.raises(ConfigurationError, match="layer 'growing': its parameter 'other' has no value here"):
        function(chain, data()[0])


def test_steps_of_any_number_of_samples_are_planned_but_not_all_kept(monkeypatch):
    def trained_in(most):
        monkeypatch.setattr(trainer_module, "MOST_STEPS", most)
        chain = Chain(Dense(3, 4), Dropout(0.5), Dense(4, 2), seed=0)
        x, y = data()
        with closing(Trainer(chain, "softmax_cross_entropy", SGD(0.1), batch_size=8, threads=1)) as trainer:
            losses = []
            for count in (8, 5, 3, 8, 5, 7, 3, 8):
                losses += [*trainer.train_epoch(x[:count], y[:count])]
                assert len(trainer._steps) <= most
            return losses, trainer.state()["dropout.dropout"]

    (losses, state), (others, other) = trained_in(32), trained_in(2)
    np.testing.assert_array_equal(others, losses)
    np.testing.assert_array_equal(other, state)


class Scaled(Layer):
    """Reads what may change after a trainer has planned its steps; its own `forward` changes `calls`."""

    def __init__(self):
        super().__init__()
        self.factor, self.calls = 2.0, 0
        self.held = {"a": [1.0], "of": Plain()}
        self.array = np.ones(3, np.float32)

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        self.calls += 1
        return x * self.factor * self.held["a"][0] * self.held["of"].number * self.array * len(self.held)


class Plain:
    number = 1.0


CHANGES = {
    "a number": lambda layer: setattr(layer, "factor", 3.0),
    "a number by an array": lambda layer: setattr(layer, "factor", np.float32([3, 1, 2])),
    "another array": lambda layer: setattr(layer, "array", np.float32([3, 1, 2])),
    "an array in place": lambda layer: np.copyto(layer.array, [3, 1, 2]),
    "an item": lambda layer: layer.held["a"].__setitem__(0, 3.0),
    "another item": lambda layer: layer.held.update(b=1),
    "an object's number": lambda layer: setattr(layer.held["of"], "number", 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("threads", "how"),
    [
        (1, Techniques()),
        (2, Techniques(split_batch=True)),
        (1, Techniques(batched=False)),
        (1, Techniques(replay=False)),
    ],
)
def test_steps_are_planned_anew_where_attributes_of_a_layer_have_changed(change, threads, how):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)

    def new(values=None):
        chain = Chain(Dense(3, 3), Scaled(), Dense(3, 2), values=values)
        return Trainer(chain, optimizer=SGD(0.1), batch_size=8, threads=threads, techniques=how)

    with closing(new()) as trainer:
        for _ in range(2):
            trainer.train_epoch(x, y)
            trainer.predict(x)
            planned = trainer.tapes
        trainer.train_epoch(x, y)
        assert all(a is b for a, b in zip(planned, trainer.tapes, strict=True))
        CHANGES[change](trainer.chain["scaled"])
        with closing(new(trainer.parameters.as_dict())) as other:
            CHANGES[change](other.chain["scaled"])
            for use in (lambda t: t.predict(x), lambda t: t.evaluate(x, y).loss, lambda t: t.train_epoch(x, y)):
                np.testing.assert_array_equal(use(trainer), use(other))
            np.testing.assert_array_equal(trainer.parameters.vector, other.parameters.vector)
            np.testing.assert_allclose(trainer.predict(x), trainer.chain(x).numpy(), rtol=1e-5)


def test_streams_of_dropout_layers_go_on_where_steps_are_planned_anew():
    x, y = np.ones((8, 3), np.float32), np.arange(8) % 2
    found = []
    for value in (2.0, 2, 2.0):  # which compute the same
        chain = Chain(Dense(3, 30), Scaled(), Dropout(0.5), Dense(30, 2))
        chain["scaled"].array = np.float32(1)
        with closing(Trainer(chain, optimizer=SGD(0.1), batch_size=8, threads=1)) as trainer:
            trainer.train_epoch(x, y)
            chain["scaled"].factor = value
            found.append(trainer.train_epoch(x, y))
    assert found[0] == found[1] == found[2]
