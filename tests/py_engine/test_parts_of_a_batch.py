"""What depends on a whole batch is not computed of its parts: layers that a layer holds, and losses of a user's own."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from py_engine import checkpoint, cond, custom_rule, scan, vmap, while_loop
from py_engine.ad import ops
from py_engine.ad.op import Op
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError, TraceError
from py_engine.network import (
    SGD,
    BatchNorm,
    Chain,
    Concat,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    Graph,
    Layer,
    Trainer,
    losses,
)
from py_engine.network import trainer as trainer_module
from py_engine.network.batch_sums import samples_of, sum_of_parts
from py_engine.network.initialisers import ParameterSpec
from py_engine.network.layers import update
from py_engine.network.losses import Loss

SPLIT = Techniques(split_batch=True)


class Block(Layer):
    """Holds a layer that normalises, at some depth."""

    def __init__(self, deep=False):
        super().__init__()
        self.norm = {"of": [BatchNorm(3)]} if deep else BatchNorm(3)

    @property
    def held(self):
        return self.norm if isinstance(self.norm, BatchNorm) else self.norm["of"][0]

    def parameters(self):
        return self.held.parameters()

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        return self.held(x, parameters, training)


class Twice(Block):
    """Calls it twice, with different samples."""

    def output_shape(self, input_shape):
        return (3,)

    def forward(self, x, parameters, training):
        return self.norm(x[:, :3], parameters, training) + self.norm(x[:, 3:], parameters, training)


class Seen(Layer):
    """Keeps the mean of all batches; each sample's output is its own."""

    def parameters(self):
        return {"mean": ParameterSpec((3,), "zeros", 3, 3, trainable=False)}

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        if training:
            update(parameters["mean"], ops.mean(x, 0))
        return x


class Counted(Seen):
    """Adds up how many samples there were."""

    def forward(self, x, parameters, training):
        if training:
            update(parameters["mean"], parameters["mean"] + float(len(x)))
        return x


class Alone:
    """A communicator of one process."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1

    def Allreduce(self, sendbuf, recvbuf):
        recvbuf[...] = sendbuf


def data(columns=3):
    x = np.random.default_rng(0).normal(size=(8, columns)).astype(np.float32)
    x[4:, :3] += 10
    return x, np.arange(8) % 2


def trained(chain, threads, loss="softmax_cross_entropy", techniques=SPLIT):
    x, y = data()
    with closing(Trainer(chain, loss, SGD(0.1), batch_size=8, threads=threads, techniques=techniques)) as trainer:
        found = [trainer.train_epoch(x, y) for _ in range(2)]
    return np.concatenate(found), chain.parameters.as_dict()


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Block()],
        lambda: [Block(deep=True)],
        lambda: [Seen()],
        lambda: [Seen(), BatchNorm(3)],
        lambda: [Counted(), BatchNorm(3)],
    ],
    ids=["held", "held deep", "its own state", "its own state, beside sums over the batch", "a number of samples"],
)
def test_a_split_batch_computes_what_a_whole_one_does(layers):
    (one, of_one), (two, of_two) = (trained(Chain(*layers(), Dense(3, 2), seed=0), threads) for threads in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
    for name, array in of_one.items():
        np.testing.assert_allclose(of_two[name], array, rtol=1e-4, atol=1e-5)


class OfSteps(Block):
    """Normalises all steps in time of all samples together; `count`: or a part of them."""

    def __init__(self, count=None):
        super().__init__()
        self.count = count

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        rows = ops.reshape(x, (-1, 3))
        found = self.norm(rows[: self.count], parameters, training)
        return ops.reshape(found, x.shape) if self.count is None else x + ops.sum(found)


def test_several_rows_for_each_sample_are_normalised_together_in_parts_as_in_the_whole():
    x = np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32)
    x[4:] += 10

    def of_steps(threads, count=None):
        chain = Chain(OfSteps(count), Flatten(), Dense(12, 2), seed=0)
        with closing(Trainer(chain, optimizer=SGD(0.1), batch_size=8, threads=threads, techniques=SPLIT)) as trainer:
            found = [trainer.train_epoch(x, np.arange(8) % 2) for _ in range(2)]
        return np.concatenate(found), chain.parameters.as_dict()

    (one, of_one), (two, of_two) = of_steps(1), of_steps(2)
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
    for name, array in of_one.items():
        np.testing.assert_allclose(of_two[name], array, rtol=1e-4, atol=1e-5)
    of_steps(1, count=6)
    with pytest.raises(ShapeError, match="statistics of 6 samples, for a part of 4 of a batch"):
        of_steps(2, count=6)


centred = Op(
    "centred",
    ops.stop_gradient.infer,
    kernel=lambda x, out: np.subtract(x, np.mean(x, 0), out),
    vjp=(lambda g, y, x: centred(g),),
    couples_batch=True,
)

BLOCKS = {
    "outside": lambda x, f: f(x),
    "scan": lambda x, f: scan(lambda h, t: (f(h) * t, None), x, np.array([1, 0.5, 2], x.dtype))[0],
    "cond": lambda x, f: cond(ops.sum(ops.square(x)) > 0, f, lambda x: x, x),
    "while_loop": lambda x, f: while_loop(lambda h: ops.sum(ops.square(h)) > 2, lambda h: f(h) * 0.5, x, max_steps=20),
    "a loop in a loop": lambda x, f: scan(
        lambda h, _: (cond(ops.sum(ops.square(h)) > 0, f, lambda h: h, h), None), x, length=2
    )[0],
    "checkpoint": lambda x, f: checkpoint(f)(x),
    "a checkpoint in a checkpoint": lambda x, f: checkpoint(lambda h: checkpoint(f)(f(h)))(x),
    "vmap": lambda x, f: vmap(f, in_axes=1, out_axes=1)(x),
    "vmap in a loop": lambda x, f: scan(lambda h, _: (vmap(f, in_axes=1, out_axes=1)(h), None), x, length=2)[0],
}


class OfOneBlock(Layer):
    """Centres a batch by an op that says so, or by sums over its parts, in a loop or a branch."""

    def __init__(self, block, sums):
        super().__init__()
        self.block = block
        self.couples_batch = self.sums_over_batch = sums

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        def by_sums(x):
            mean = sum_of_parts(ops.sum(x, 0)) / samples_of(x)
            return (x - mean) * ops.tanh(mean)

        return BLOCKS[self.block](x, by_sums if self.couples_batch else centred)


@pytest.mark.parametrize("sums", [False, True], ids=["an op", "sums over the batch"])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_couples_a_batch_is_seen_in_loops_and_branches(block, sums):
    (one, of_one), (two, of_two) = (
        trained(Chain(Dense(3, 3), OfOneBlock(block, sums), Dense(3, 2), seed=0), threads) for threads in (1, 2)
    )
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
    for name, array in of_one.items():
        np.testing.assert_allclose(of_two[name], array, rtol=1e-4, atol=1e-5)


def test_a_batch_is_whole_where_only_a_gradient_couples_it():
    same = Op(
        "same", ops.stop_gradient.infer, kernel=lambda x, out: np.copyto(out, x), vjp=(lambda g, y, x: centred(g),)
    )

    class Repeated(OfOneBlock):
        def forward(self, x, parameters, training):
            return BLOCKS[self.block](x, lambda h: same(h) * 0.9)

    for block in BLOCKS:
        (one, of_one), (two, of_two) = (
            trained(Chain(Dense(3, 3), Repeated(block, sums=False), Dense(3, 2), seed=0), threads) for threads in (1, 2)
        )
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6, err_msg=block)
        for name, array in of_one.items():
            np.testing.assert_allclose(of_two[name], array, rtol=1e-4, atol=1e-5, err_msg=f"{block}: {name}")


def test_a_normalised_block_in_a_checkpoint_is_split_as_any_other():
    class Normalised(Block):
        def forward(self, x, parameters, training):
            return checkpoint(lambda h: self.held(ops.tanh(h), parameters, training))(x)

    (one, of_one), (two, of_two) = (
        trained(Chain(Dense(3, 3), Normalised(), Dense(3, 2), seed=0), threads) for threads in (1, 2)
    )
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
    for name, array in of_one.items():
        np.testing.assert_allclose(of_two[name], array, rtol=1e-4, atol=1e-5)


NESTED = {name: BLOCKS[name] for name in ("scan", "cond", "while_loop", "a loop in a loop")}
NESTED["vmap"] = lambda x, f: vmap(f)(ops.stack([x, x]))[0]


@pytest.mark.parametrize("block", NESTED)
def test_statistics_that_a_loop_or_a_branch_would_drop_are_refused(block):
    class Normalised(Block):
        def forward(self, x, parameters, training):
            return NESTED[block](x, lambda h: self.held(h, parameters, training))

    chain = Chain(Dense(3, 3), Normalised(), Dense(3, 2), seed=0)
    with pytest.raises(TraceError, match="its running statistics, inside a loop, a branch or vmap"):
        chain(data()[0], training=True)
    for techniques in (Techniques(), Techniques(replay=False)):
        with pytest.raises(TraceError, match="its running statistics, inside a loop, a branch or vmap"):
            trained(chain, 1, techniques=techniques)
    chain(data()[0])  # without training there is nothing to keep


def test_what_needs_a_whole_batch_in_evaluation_is_evaluated_of_all_samples(monkeypatch):
    monkeypatch.setattr(trainer_module, "EVALUATION_BATCH", 3)
    chain = Chain(Dense(3, 3), OfOneBlock("scan", sums=False), Dense(3, 2), seed=0)
    x, y = data()
    with closing(Trainer(chain, batch_size=8, threads=1)) as trainer:
        np.testing.assert_allclose(trainer.predict(x), chain(x).numpy(), rtol=1e-5, atol=1e-6)
        expected = losses.get("softmax_cross_entropy")(chain(x), Tensor(y)).item()
        assert trainer.evaluate(x, y).loss == pytest.approx(expected, rel=1e-5)


def test_one_generator_for_both_parts_of_a_batch_leaves_it_whole():
    class Drops(OfOneBlock):
        def forward(self, x, parameters, training):
            return BLOCKS[self.block](x, lambda h: ops.dropout(h, 0.5, self.generator)) if training else x

    def found(block, threads):
        layer = Drops(block, sums=False)
        layer.generator = np.random.default_rng(1)
        return trained(Chain(Dense(3, 3), layer, Dense(3, 2), seed=0), threads)[0]

    for block in ("outside", "checkpoint", "vmap"):
        np.testing.assert_allclose(found(block, 2), found(block, 1), rtol=1e-5)


def test_dropout_keeps_no_stream_of_an_eager_loop():
    layer = Dropout(0.5)
    for _ in range(3):
        scan(lambda h, _: (layer(h, {}, True), None), np.ones((2, 3)), length=2)
    assert layer.traced is None


class Own(Layer):
    """A layer of a user's own that declares nothing."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        return self.compute(x)


class BesideSums(Block):
    """Sums over the batch by a layer that it holds, and couples it by ordinary ops, too."""

    def forward(self, x, parameters, training):
        return self.held(x - ops.mean(ops.tanh(x), 0), parameters, training)


UNDECLARED = {
    "a mean": lambda: Own(lambda x: x - ops.mean(x, 0)),
    "sum_of_parts": lambda: Own(lambda x: x - sum_of_parts(ops.sum(x, 0)) / samples_of(x)),
    "a mean of logarithms": lambda: Own(lambda x: ops.log(ops.exp(x)) - ops.mean(ops.log(ops.exp(x)), 0)),
    "softmax": lambda: Own(lambda x: ops.softmax(x, 0)),
    "a running sum": lambda: Own(lambda x: 0.1 * ops.cumsum(x, 0)),
    "another sample": lambda: Own(lambda x: x * x[::-1]),
    "the one before": lambda: Own(lambda x: ops.concatenate([x[:1], x[1:] + x[:-1]])),
    "attention": lambda: Own(lambda x: ops.softmax(x @ x.T) @ x),
    "a loop": lambda: Own(lambda x: scan(lambda h, _: (h - ops.mean(h, 0), None), x, length=2)[0]),
    "a gradient": lambda: Own(custom_rule(lambda x: x * 1.0, vjp=lambda g, y, x: (g - ops.mean(g, 0),))),
    "beside sums over the batch": BesideSums,
}


@pytest.mark.parametrize("couples", UNDECLARED)
def test_a_layer_that_couples_a_batch_and_does_not_say_so_is_computed_of_whole_batches(couples, monkeypatch):
    monkeypatch.setattr(trainer_module, "EVALUATION_BATCH", 3)

    def chain():
        return Chain(Dense(3, 3), UNDECLARED[couples](), Dense(3, 2), seed=0)

    (one, of_one), (two, of_two) = (trained(chain(), threads) for threads in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
    for name, array in of_one.items():
        np.testing.assert_allclose(of_two[name], array, rtol=1e-4, atol=1e-5)
    x, y = data()
    evaluated = chain()
    with closing(Trainer(evaluated, batch_size=8, threads=1)) as trainer:
        np.testing.assert_allclose(trainer.predict(x), evaluated(x).numpy(), rtol=1e-5, atol=1e-6)
        expected = losses.get("softmax_cross_entropy")(evaluated(x), Tensor(y)).item()
        assert trainer.evaluate(x, y).loss == pytest.approx(expected, rel=1e-5)
    if couples == "beside sums over the batch":
        return
    with (
        closing(Trainer(chain(), batch_size=8, threads=1, communicator=Alone())) as trainer,
        pytest.raises(
            ConfigurationError, match=r"in layer 'own' the samples of a batch affect each other.*one process"
        ),
    ):
        trainer.train_epoch(*data())
    with pytest.raises(ConfigurationError, match=r"in layer 'own' the samples .* sample by sample"):
        trained(chain(), 1, techniques=Techniques(batched=False))


class Drops(Own):
    """Holds a layer that draws random numbers."""

    def __init__(self):
        super().__init__(None)
        self.dropout = Dropout(0.5)

    def forward(self, x, parameters, training):
        return self.dropout(x, {}, training)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Own(lambda x: x / (1 + ops.sum(ops.square(x), 1, keepdims=True)))],
        lambda: [Own(lambda x: ops.log(1 - ops.sqrt(x)))],
        lambda: [Own(lambda x: scan(lambda h, _: (ops.tanh(h), None), x, length=2)[0])],
        lambda: [Drops()],
        lambda: [Block()],
        lambda: [Own(lambda x: x), BatchNorm(3), Own(ops.stop_gradient)],
    ],
    ids=["a norm", "of shares", "a loop", "dropout", "sums over the batch", "beside them"],
)
def test_a_batch_is_split_where_a_layer_of_a_users_own_keeps_samples_apart(layers):
    x, y = data()
    with closing(Trainer(Chain(*layers(), Dense(3, 2)), batch_size=8, threads=2, techniques=SPLIT)) as trainer:
        trainer.train_epoch(np.abs(x) / 20, y)
        assert trainer.threads_in_step() == "split over 2 threads"


def test_looking_for_what_couples_a_batch_draws_no_random_numbers():
    layer = Drops()
    trained(Chain(layer, Dense(3, 2), seed=0), 2)
    assert layer.dropout.calls == 3  # of the whole and of two parts
    assert layer.dropout.traced is None


@pytest.mark.parametrize("block", BLOCKS)
def test_an_op_that_needs_a_whole_batch_is_refused_where_a_batch_is_in_parts(block):
    chain = Chain(Dense(3, 3), OfOneBlock(block, sums=False), Dense(3, 2), seed=0)
    for _ in range(2):  # nothing is kept of what was refused
        with (
            closing(Trainer(chain, batch_size=8, threads=1, communicator=Alone())) as trainer,
            pytest.raises(ConfigurationError, match="op 'centred' needs a whole batch, of which each process"),
        ):
            trainer.train_epoch(*data())
        with pytest.raises(ConfigurationError, match=r"op 'centred' needs a whole batch, .*sample by sample"):
            trained(chain, 1, techniques=Techniques(batched=False))


def test_processes_need_traced_steps():
    with pytest.raises(ConfigurationError, match="with a communicator the technique replay can't be switched off"):
        Trainer(Chain(Dense(3, 2)), batch_size=8, communicator=Alone(), techniques=Techniques(replay=False))


def test_such_layers_are_named_and_refused_where_a_batch_is_in_parts():
    chain = Chain(Block(deep=True), Dense(3, 2), seed=0)
    assert chain.couples_batch == "block.norm.of.0" and chain.splits
    with pytest.raises(ConfigurationError, match=r"layer 'block\.norm\.of\.0' needs the statistics of a whole batch"):
        Trainer(chain, batch_size=8, threads=1, communicator=Alone())
    with pytest.raises(ConfigurationError, match=r"layer 'block\.norm\.of\.0' needs a whole batch"):
        trained(chain, 1, techniques=Techniques(batched=False))
    with (
        closing(Trainer(Chain(Seen(), Dense(3, 2)), batch_size=8, threads=1, communicator=Alone())) as trainer,
        pytest.raises(ConfigurationError, match="a layer keeps statistics of a whole batch"),
    ):
        trainer.train_epoch(*data())
    with pytest.raises(ConfigurationError, match="a layer updates a parameter by itself in training"):
        trained(Chain(Seen(), Dense(3, 2)), 1, techniques=Techniques(batched=False))


def test_a_layer_that_is_called_twice_in_a_step_keeps_both_statistics():
    x, y = data(6)
    eagerly, in_steps = (Chain(Twice(), Dense(3, 2), seed=0) for _ in range(2))
    eagerly(x, training=True)
    with closing(Trainer(in_steps, batch_size=8, threads=1, optimizer=SGD(0.0))) as trainer:
        trainer.train_epoch(x, y)
    for name in ("twice.running_mean", "twice.running_var"):
        expected = eagerly.parameters[name].numpy()
        np.testing.assert_allclose(in_steps.parameters[name].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(eagerly.parameters["twice.running_mean"].numpy()).max() > 0.1


def root_mean_square(is_mean):
    def prepare(shape, targets, dtype):
        return np.ascontiguousarray(np.broadcast_to(targets[:, np.newaxis], shape), dtype)

    return Loss(
        "rms", lambda y, t: ops.sqrt(ops.mean(ops.square(y - t))), prepare, counts_answers=False, is_mean=is_mean
    )


def test_a_loss_that_is_no_mean_is_computed_of_the_whole_batch():
    losses_of = [trained(Chain(Dense(3, 2), seed=0), threads, root_mean_square(False))[0] for threads in (1, 2)]
    np.testing.assert_allclose(losses_of[1], losses_of[0], rtol=1e-5)
    split = trained(Chain(Dense(3, 2), seed=0), 2, root_mean_square(True))[0]
    assert abs(split[0] - losses_of[0][0]) > 1e-3, "who says that it is a mean is believed"
    with pytest.raises(ConfigurationError, match="rms is not known to be a mean over the targets"):
        Trainer(Chain(Dense(3, 2)), root_mean_square(False), batch_size=8, threads=1, communicator=Alone())
    with pytest.raises(ConfigurationError, match=r"rms is not known to be a mean .* sample by sample"):
        trained(Chain(Dense(3, 2)), 1, root_mean_square(False), Techniques(batched=False))


def test_a_loss_that_is_no_mean_is_evaluated_of_all_samples(monkeypatch):
    monkeypatch.setattr(trainer_module, "EVALUATION_BATCH", 3)
    x, y = data()
    for is_mean in (False, True):
        chain = Chain(Dense(3, 2), seed=0)
        with closing(Trainer(chain, root_mean_square(is_mean), batch_size=8, threads=1)) as trainer:
            errors = trainer.predict(x) - y[:, np.newaxis]
            found = trainer.evaluate(x, y).loss
        assert (abs(found - np.sqrt(np.mean(errors**2))) < 1e-5) == (not is_mean)


def test_equal_numbers_are_normalised_to_zero():
    for count in range(1, 130):  # 41 and others times their reciprocal are not 1 in float32
        x = np.full((1, count), 1e6, np.float32)
        assert not ops.layer_norm(x).numpy().any(), count
        assert ops.avg_pool(np.ones((1, 1, count), np.float32), count).item() == 1, count
        if count > 1:
            assert not Chain(BatchNorm(1))(np.full((count, 1), 1e6, np.float32), training=True).numpy().any(), count


def test_settings_are_not_added_to_those_of_a_loss():
    weighted = losses.get("softmax_cross_entropy", class_weights=[1, 9])
    assert losses.get(weighted) is weighted
    with pytest.raises(ConfigurationError, match=r"softmax_cross_entropy: this Loss has its settings .*ignored_class"):
        losses.get(weighted, ignored_class=1)


def test_targets_of_another_dtype_are_no_others_numbers():
    own = Loss("own", lambda y, t: ops.mean(ops.square(y - t)), lambda shape, t, dtype: t, counts_answers=False)
    x = np.random.default_rng(0).normal(size=(4, 3))
    half = np.full((4, 1), 0.5)
    with closing(Trainer(Chain(Dense(3, 1), dtype=np.float64), own, SGD(0.0), batch_size=4, threads=1)) as trainer:
        trainer.train_epoch(x, np.zeros((4, 1), np.int64))
        (found,) = trainer.train_epoch(x, half)
        assert found == pytest.approx(trainer.evaluate(x, half).loss)


def test_ids_that_the_smaller_of_two_embeddings_lacks_are_found_before_anything_is_trained():
    graph = Graph(
        Embedding(10, 2, name="large"),
        Embedding(5, 2, name="small"),
        Concat(1, name="both"),
        Flatten(),
        Dense(12, 2),
        inputs={"small": ["input"], "both": ["large", "small"]},
    )
    x = np.zeros((8, 3), np.int64)
    x[7, 0] = 7
    before = graph.parameters.vector.copy()
    with (
        closing(Trainer(graph, batch_size=4, threads=1)) as trainer,
        pytest.raises(ShapeError, match="layer 'small': token id 7 in row 7 at position 0"),
    ):
        trainer.train_epoch(x, np.arange(8) % 2)
    np.testing.assert_array_equal(graph.parameters.vector, before)


class Words(Layer):
    """Looks up vectors by an embedding that it holds, at some depth."""

    takes_ids = True

    def __init__(self, vocabulary=5, trainable=True, name=None):
        super().__init__(name)
        self.held = {"embeddings": [Embedding(vocabulary, 2, trainable=trainable)]}

    def parameters(self):
        return self.held["embeddings"][0].parameters()

    def output_shape(self, input_shape):
        return (*input_shape, 2)

    def forward(self, x, parameters, training):
        return self.held["embeddings"][0](x, parameters, training)


class Fixed(Words):
    """Looks up vectors that are no parameter, by an op."""

    def __init__(self, look_up, name=None):
        super().__init__(name=name)
        self.vectors = np.ones((5, 2), np.float32)
        self.look_up = look_up

    def parameters(self):
        return {}

    def forward(self, x, parameters, training):
        return self.look_up(self.vectors, x)


class Part(Layer):
    """A part of the ids of each sample."""

    only_moves = True

    def __init__(self, start, stop, name=None):
        super().__init__(name)
        self.start, self.stop = start, stop

    def output_shape(self, input_shape):
        return (self.stop - self.start,)

    def forward(self, x, parameters, training):
        return x[:, self.start : self.stop]


def beside(layer):
    """A graph in which a layer reads the same ids as an embedding of more of them."""
    inputs = {"words": ["input"], "both": ["large", "words"]}
    return Graph(Embedding(10, 2, name="large"), layer, Concat(1, name="both"), Flatten(), Dense(12, 2), inputs=inputs)


LOOKUPS = {
    "held": lambda: Chain(Words(name="words"), Flatten(), Dense(6, 2)),
    "held, not trained": lambda: Chain(Words(trainable=False, name="words"), Flatten(), Dense(6, 2)),
    "held, beside another": lambda: beside(Words(name="words")),
    "held, not trained, beside another": lambda: beside(Words(trainable=False, name="words")),
    "an op": lambda: beside(Fixed(lambda vectors, x: ops.embedding(vectors, x, -1), name="words")),
    "flat ids": lambda: beside(
        Fixed(lambda v, x: ops.reshape(ops.embedding(v, ops.reshape(x, (-1,)), -1), (*x.shape, 2)), name="words")
    ),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("bad", [-1, 5, 7])
@pytest.mark.parametrize("how", [Techniques(), Techniques(replay=False), Techniques(batched=False)])
def test_ids_that_a_layer_of_a_users_own_looks_up_are_checked_before_anything_is_trained(lookup, bad, how):
    chain = LOOKUPS[lookup]()
    x = np.arange(24).reshape(8, 3) % 5
    with closing(Trainer(chain, batch_size=4, threads=1, techniques=how)) as trainer:
        trainer.train_epoch(x, np.arange(8) % 2)
        before = chain.parameters.vector.copy()
        x = x.copy()
        x[7, 1] = bad
        layer = "large" if bad < 0 and "large" in chain.layers else "words"
        for use in (trainer.train_epoch, trainer.evaluate):
            with pytest.raises(ShapeError, match=f"layer '{layer}': token id {bad} in row 7 at position 1"):
                use(x, np.arange(8) % 2)
        with pytest.raises(DTypeError, match="looks up integer token ids, the samples are of float64"):
            trainer.train_epoch(x.astype(float), np.arange(8) % 2)
    np.testing.assert_array_equal(chain.parameters.vector, before)


def test_indices_of_an_array_are_checked_before_anything_is_trained():
    chain = beside(Fixed(lambda vectors, x: Tensor(vectors)[x], name="words"))
    x = np.zeros((8, 3), np.int64)
    x[7, 1] = 7
    before = chain.parameters.vector.copy()
    with closing(Trainer(chain, batch_size=4, threads=1)) as trainer, pytest.raises(ShapeError, match="index 7"):
        trainer.train_epoch(x, np.arange(8) % 2)
    np.testing.assert_array_equal(chain.parameters.vector, before)


def test_each_embedding_is_asked_for_the_ids_that_it_reads():
    graph = Graph(
        *(Part(0, 1, name="left"), Embedding(10, 2, name="large")),
        *(Part(1, 3, name="right"), Embedding(5, 2, name="small")),
        *(Concat(0, name="both"), Flatten(), Dense(6, 2)),
        inputs={"right": ["input"], "both": ["large", "small"]},
    )
    x = np.array([[9, 1, 2], [7, 3, 4]] * 4)
    with closing(Trainer(graph, batch_size=4, threads=1)) as trainer:
        trainer.train_epoch(x, np.arange(8) % 2)
        x = x.copy()
        x[5, 2] = 9
        with pytest.raises(ShapeError, match="layer 'small': token id 9 in row 5 at position 1"):
            trainer.train_epoch(x, np.arange(8) % 2)


def test_ids_are_checked_in_every_part_of_many_samples(monkeypatch):
    monkeypatch.setattr(trainer_module, "EVALUATION_BATCH", 3)
    for row in range(8):
        x = np.zeros((8, 3), np.int64)
        x[row, 2] = 5
        with (
            closing(Trainer(Chain(Words(), Flatten(), Dense(6, 2)), threads=1)) as trainer,
            pytest.raises(ShapeError, match=f"layer 'words': token id 5 in row {row} at position 2"),
        ):
            trainer.predict(x)


def test_a_layer_that_does_not_say_that_it_takes_ids_is_told_to():
    class Silent(Words):
        takes_ids = False

    with (
        closing(Trainer(Chain(Silent(name="words"), Flatten(), Dense(6, 2)), threads=1)) as trainer,
        pytest.raises(DTypeError, match=r"'words\.held\.embeddings\.0' gets them if .* says takes_ids = True"),
    ):
        trainer.train_epoch(np.zeros((8, 3), np.int64), np.arange(8) % 2)


def test_a_batch_of_ids_is_split_and_stays_whole_where_a_layer_couples_it():
    class Coupled(Words):
        def forward(self, x, parameters, training):
            found = super().forward(x, parameters, training)
            return found - ops.mean(found, 0)

    for layer, said in ((Words(), "split over 2 threads"), (Coupled(), "")):
        chain = Chain(layer, Flatten(), Dense(6, 2))
        with closing(Trainer(chain, batch_size=8, threads=2, techniques=SPLIT)) as trainer:
            trainer.train_epoch(np.arange(24).reshape(8, 3) % 5, np.arange(8) % 2)
            assert trainer.threads_in_step().startswith(said or ("one", "2 threads", "products"))
