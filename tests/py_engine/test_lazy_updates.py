"""Lazy updates of an embedding: the same as if Adam had updated all rows at every step, but for roundings."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from py_engine.ad import ops
from py_engine.ad.techniques import Techniques
from py_engine.errors import NonFiniteError, ShapeError
from py_engine.network import (
    Activation,
    Adam,
    AdamW,
    Chain,
    Conv1D,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    GlobalMaxPool,
    PermuteDims,
    RMSProp,
    Trainer,
    lazy_updates,
)
from py_engine.network.graph import Concat, Graph
from py_engine.network.initialisers import ParameterSpec
from py_engine.network.layers import Layer
from py_engine.network.threads import Team

VOCABULARY, DIMENSION, LENGTH, BATCH = 8192, 16, 10, 20


def flat_chain(dtype=np.float32, **options):
    return Chain(
        Embedding(VOCABULARY, DIMENSION, **options), Flatten(), Dense(LENGTH * DIMENSION, 3), dtype=dtype, seed=0
    )


def text_chain(**options):
    """Whose gradient by the word vectors is a product with sums for each different word."""
    return Chain(
        Embedding(VOCABULARY, DIMENSION, **options),
        PermuteDims(1, 0),
        Conv1D(DIMENSION, 8, 3),
        Activation("relu"),
        GlobalMaxPool(),
        Dense(8, 3),
        seed=0,
    )


@pytest.fixture
def data(rng):
    """Words of which some come often and most come seldom, in batches of a whole number and a rest."""
    ids = (VOCABULARY * rng.random((BATCH * 45 + 7, LENGTH)) ** 3).astype(np.int64)
    return ids, rng.integers(0, 3, len(ids))


@pytest.fixture
def gathers(monkeypatch):
    """The ids of each call that gathered rows."""
    found = []
    gather = lazy_updates.LazyUpdates.gather
    monkeypatch.setattr(lazy_updates.LazyUpdates, "gather", lambda self, ids: (found.append(ids), gather(self, ids))[1])
    return found


def trained(data, chain, epochs=1, rates=None, order=None, **options):
    given = {"batch_size": BATCH, "threads": 1, "optimizer": Adam(0.001), **options}
    trainer = Trainer(chain, **given)
    losses = np.concatenate([trainer.train_epoch(*data, order, rates) for _ in range(epochs)])
    trainer.close()
    return losses, chain.parameters.as_dict(), trainer.optimizer.state()


def assert_equal(actual, expected):
    """Equal but for roundings, which Adam makes a part of a step of where a gradient is nearly zero."""
    (losses, parameters, state), (other_losses, other_parameters, other_state) = actual, expected
    np.testing.assert_allclose(losses, other_losses, atol=2e-6)
    for name, array in parameters.items():
        apart = np.abs(array - other_parameters[name])
        assert np.quantile(apart, 0.9999) < 1e-6 and apart.max() < 1e-4
    assert state["steps"] == other_state["steps"]
    for name in ("mean", "square"):
        scale = np.abs(other_state[name]).max()
        np.testing.assert_allclose(state[name] / scale, other_state[name] / scale, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize("make", [flat_chain, text_chain])
@pytest.mark.parametrize(("threads", "split"), [(1, False), (2, False), (2, True), (3, True)])
def test_training_is_the_same_but_for_roundings(data, gathers, make, padding, threads, split):
    make = partial(make, padding_index=padding)
    how = partial(Techniques, split_batch=split)
    expected = trained(data, make(), 2, threads=threads, techniques=how(lazy_updates=False))
    assert not gathers
    actual = trained(data, make(), 2, threads=threads, techniques=how())
    assert len(gathers) == 2 * 46
    assert_equal(actual, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.95)])
def test_given_gradients_update_rows_as_the_dense_rule_does(rng, monkeypatch, betas, threads):
    """In a matrix among other parameters, with gradients of all sizes, at rates that change."""
    monkeypatch.setattr(lazy_updates, "SPLIT_FROM", 1)
    rows, dimension, first, size = 300, 8, 16, 16 + 300 * 8 + 32
    part = slice(first, first + rows * dimension)
    team = Team(threads) if threads > 1 else None
    start = (0.1 * rng.standard_normal(size)).astype(np.float32)
    vectors, gradients = [start.copy(), start.copy()], [np.zeros(size, np.float32) for _ in range(2)]
    dense, sparse = Adam(0.001, betas), Adam(0.001, betas)
    dense.bind(vectors[0])
    sparse.bind(vectors[1])
    shape = (rows, dimension)
    matrix, gradient = vectors[1][part].reshape(shape), gradients[1][part].reshape(shape)
    state = sparse.state_of(vectors[1], part)
    lazy = lazy_updates.LazyUpdates(sparse, part, [matrix, *state], gradient, team)
    for step in range(150):
        dense.learning_rate = sparse.learning_rate = 0.001 / (1 + step % 7)
        ids = rng.integers(0, rows if step % 10 else 30, rng.integers(1, 40))
        found = np.zeros(shape, np.float32)
        found[ids] = rng.standard_normal((len(ids), dimension)) * 10 ** rng.uniform(-10, 0, (len(ids), dimension))
        rest = rng.standard_normal(size)
        for g in gradients:
            g[:first], g[part.stop :] = rest[:first], rest[part.stop :]
        gradients[0][part] = found.ravel()
        lazy.gather(ids)
        np.testing.assert_allclose(matrix[ids], vectors[0][part].reshape(shape)[ids], rtol=0, atol=5e-7)
        dense.step(vectors[0], gradients[0])
        lazy.clear()
        assert not gradient.any()
        gradient[ids] = found[ids]
        assert lazy.squares() == pytest.approx(np.square(found).sum(), rel=1e-5)
        sparse.step(vectors[1], gradients[1], None, part)
        lazy.update()
    lazy.catch_up()
    np.testing.assert_allclose(vectors[1], vectors[0], rtol=0, atol=5e-7)
    for name, array in dense.state().items():
        np.testing.assert_allclose(sparse.state()[name], array, rtol=1e-5, atol=1e-6 * np.abs(array).max())
    if team is not None:
        team.close()


def test_a_schedule_and_the_rows_of_an_order_are_kept(data, gathers, rng):
    order = rng.permutation(len(data[0]))[: BATCH * 30]
    rates = np.linspace(0.002, 0.0, 30)
    expected = trained(data, flat_chain(), rates=rates, order=order, techniques=Techniques(lazy_updates=False))
    assert_equal(trained(data, flat_chain(), rates=rates, order=order), expected)
    assert len(gathers) == 30


@pytest.mark.parametrize("first", [1, 20, 300, 5000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9), (0.99, 0.95)])
@pytest.mark.parametrize("count", [1, 7, lazy_updates.WINDOW])
def test_many_steps_at_once_move_what_so_many_single_ones_do(rng, first, betas, count):
    """Whatever the ratio of the root to eps: where they are about equal, a division for many steps differs most."""
    mean = rng.standard_normal(2000) * 10.0 ** rng.uniform(-12, 2, 2000)
    square = np.abs(mean * 10.0 ** rng.uniform(-2, 2, 2000)) ** 2
    square[:10] = mean[:10] = 0
    optimizer = Adam(0.001, betas)
    optimizer.bind(np.zeros(1))
    p, m, v, factors = np.zeros(2000), mean.copy(), square.copy(), []
    moved = np.zeros(2000)
    for step in range(first, first + count):
        optimizer.steps = step
        factors.append(optimizer.factors())
        before = p.copy()
        optimizer.update(p, np.zeros(2000), np.empty(2000), m, v)
        moved += np.abs(p - before)
    now = lazy_updates.pending_updates(factors, betas, np.dtype(np.float64))
    found = [np.zeros((2000, 1)), mean[:, np.newaxis].copy(), square[:, np.newaxis].copy()]
    lazy_updates._apply(now, 0, found, *np.empty((2, 2000, 1)))
    np.testing.assert_allclose(found[1][:, 0], m, rtol=1e-12)
    np.testing.assert_allclose(found[2][:, 0], v, rtol=1e-12)
    assert (np.abs(found[0][:, 0] - p) <= (lazy_updates.SPREAD - 1) ** 2 / 16 * moved + 1e-14 * np.abs(p)).all()
    assert first < 5000 or betas != (0.9, 0.999) or len(now.divisions) == 1
    for since in range(1, count):  # rows that were looked up meanwhile
        later = lazy_updates.pending_updates(factors[since:], betas, np.dtype(np.float64))
        np.testing.assert_allclose(now.mean[since], later.mean[0], rtol=1e-12)
        np.testing.assert_allclose(
            sum(c[since] for c, _ in now.divisions), sum(c[0] for c, _ in later.divisions), rtol=1e-12
        )


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.001, 0.01, 0.1, 3.0])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.99), (0.97, 0.95), (0.9, 0.99)])
@pytest.mark.parametrize("rises", [None, 16, 30])
def test_no_parameter_is_far_from_what_single_steps_make_of_it(rng, rate, betas, rises):
    """At any learning rate, that of a warm-up too, after gradients rare or frequent, large or about as small as eps."""
    count, size = lazy_updates.WINDOW, 4000
    optimizer = Adam(rate, betas)
    optimizer.bind(np.zeros(1))
    p, m, v, s = np.zeros((4, size))
    scale, often = 10.0 ** rng.uniform(-12, 1, size), rng.uniform(0, 1, size)
    state, factors = [], []
    for step in range(200 + count):
        optimizer.steps = step + 1
        optimizer.learning_rate = rate / 100 if rises is not None and step < 200 + rises else rate
        gradient = scale * rng.standard_normal(size) * (rng.uniform(0, 1, size) < often)
        if step >= 200:
            factors.append(optimizer.factors())
            gradient[:] = 0
            state.append([x[:, np.newaxis].copy() for x in (p, m, v)])
        optimizer.update(p, gradient, s, m, v)
    now = lazy_updates.pending_updates(factors, betas, np.dtype(np.float64))
    for since, found in enumerate(state):
        lazy_updates._apply(now, since, found, *np.empty((2, size, 1)))
        assert np.abs(found[0][:, 0] - p).max() <= lazy_updates.MOST_APART
    assert rate > 0.001 or betas != (0.9, 0.999) or len(now.divisions) < 5


def test_a_step_that_fails_leaves_what_was_before_it(data, gathers, monkeypatch):
    ids, y = data
    expected = trained((ids[: BATCH * 21], y[: BATCH * 21]), text_chain(), techniques=Techniques(lazy_updates=False))
    for error in (KeyboardInterrupt, NonFiniteError):
        chain = text_chain()
        trainer = Trainer(chain, batch_size=BATCH, threads=1, optimizer=Adam(0.001))
        finish, left = trainer._check, [21]

        def check(*given, finish=finish, left=left, error=error):
            if not left[0]:
                raise error("stopped")
            left[0] -= 1
            finish(*given)

        monkeypatch.setattr(trainer, "_check", check)
        with pytest.raises(error):
            trainer.train_epoch(ids, y)
        assert_equal((expected[0], chain.parameters.as_dict(), trainer.optimizer.state()), expected)
        trainer.close()


@pytest.mark.parametrize(
    ("function", "left"),
    [
        *(("np.multiply", left) for left in (3, 20, 60, 63, 64, 90, 121, 160, 200, 240, 320, 400, 480)),
        *(("np.copyto", left) for left in (1, 5, 24, 25, 48)),
        *(("_apply", left) for left in (3, 20, 31, 32, 33, 47, 48, 60, 76)),
    ],
)
def test_an_interrupt_leaves_all_rows_as_after_the_last_step(data, monkeypatch, function, left):
    """While rows are gathered, while all are brought up to date, in blocks of which some are done, and within one."""
    monkeypatch.setattr(lazy_updates, "BLOCKS", (16_384, 16_384))
    chain = flat_chain()
    trainer = Trainer(chain, batch_size=BATCH, threads=1, optimizer=Adam(0.001))
    calls = [0]

    def interrupted(do, *given, **options):
        found = do(*given, **options)
        calls[0] += 1
        if calls[0] == left:
            raise KeyboardInterrupt
        return found

    patched = {name: getattr(np, name) for name in ("sqrt", "add", "divide", "multiply", "subtract", "copyto", "empty")}
    patched |= {name: getattr(np, name) for name in ("zeros", "array", "arange", "where", "maximum", "vdot")}
    patched |= {name: getattr(np, name) for name in ("intp", "bool_", "newaxis", "float64")}
    with monkeypatch.context() as patch:
        if function == "_apply":
            patch.setattr(lazy_updates, "_apply", partial(interrupted, lazy_updates._apply))
        else:
            name = function.removeprefix("np.")
            patched[name] = partial(interrupted, patched[name])
            patch.setattr(lazy_updates, "np", SimpleNamespace(**patched))
        with pytest.raises(KeyboardInterrupt):
            trainer.train_epoch(*data)
    steps = trainer.optimizer.steps
    part = data[0][: BATCH * steps], data[1][: BATCH * steps]
    losses, *expected = trained(part, flat_chain(), techniques=Techniques(lazy_updates=False)) if steps else (0,) * 3
    if steps:
        assert_equal((losses, chain.parameters.as_dict(), trainer.optimizer.state()), (losses, *expected))
    before = chain.parameters.as_dict()
    again = Trainer(flat_chain(), batch_size=BATCH, threads=1, optimizer=Adam(0.001))
    again.chain.parameters.load(before)
    again.load_state(trainer.state())
    trainer.train_epoch(*data)
    again.train_epoch(*data)
    assert (trainer.parameters.vector == again.parameters.vector).all(), "nothing of the interrupted step is left"
    trainer.close(), again.close()


def test_an_interrupt_after_all_rows_are_up_to_date_does_not_update_them_again(rng):
    class Once(np.ndarray):
        def fill(self, value):
            np.ndarray.fill(self, value)
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt

    found = []
    start, interrupted = rng.standard_normal(512).astype(np.float32), [True]
    for interrupts in (False, True):
        vector, gradient = start.copy(), np.zeros(512, np.float32)
        optimizer = Adam(0.01)
        optimizer.bind(vector)
        shape, part = (64, 8), slice(0, 512)
        arrays = [vector.reshape(shape), *optimizer.state_of(vector, part)]
        lazy = lazy_updates.LazyUpdates(optimizer, part, arrays, gradient.reshape(shape), None)
        for step in range(5):
            ids = np.array([step, step + 1])
            lazy.gather(ids)
            lazy.clear()
            gradient.reshape(shape)[ids] = 1
            lazy.squares()
            optimizer.step(vector, gradient, None, part)
            lazy.update()
        if interrupts:
            interrupted.clear()
            lazy._since = lazy._since.view(Once)
            with pytest.raises(KeyboardInterrupt):
                lazy.catch_up()
        lazy.catch_up()
        found.append((vector, optimizer.state()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for name, array in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][name], array)


def test_an_update_moves_the_rows_that_are_looked_up_and_a_part_of_the_others(data, gathers):
    moved = []
    for lazy in (True, False):
        chain = text_chain()
        techniques = Techniques(lazy_updates=lazy)
        trainer = Trainer(chain, batch_size=BATCH, threads=1, optimizer=Adam(0.001), techniques=techniques)
        trainer.train_epoch(*data)
        moved.append(trainer.costs()[-1].moved)
    matrix = chain.parameters.arrays["embedding.weight"]
    without = 2 * 3 * (chain.parameters.vector.nbytes - matrix.nbytes)
    assert without < moved[0] < moved[1] and moved[1] >= 7 * matrix.nbytes


def test_bytes_of_updates_of_the_whole_matrix_count_where_the_rows_of_others_are_updated_lazily(data, gathers):
    """One step is updated as a whole, several lazily, and the matrix is brought up to date at their end."""
    x, y = data
    chain = text_chain()
    trainer = Trainer(chain, batch_size=BATCH, threads=1, optimizer=Adam(0.001))
    matrix = chain.parameters.arrays["embedding.weight"].nbytes
    others = chain.parameters.vector.nbytes - matrix
    trainer.train_epoch(x[:BATCH], y[:BATCH])
    assert 7 * matrix + 6 * others <= trainer.costs()[-1].moved <= 7 * (matrix + others)
    trainer.train_epoch(x[: 2 * BATCH], y[: 2 * BATCH])
    ids = [len(np.unique(x[start : start + BATCH])) for start in (0, BATCH)]
    row = matrix // len(chain.parameters.arrays["embedding.weight"])
    lazily = 6 * matrix + 7 * row * sum(ids)
    moved = 3 * trainer.costs()[-1].moved
    assert 7 * matrix + lazily + 18 * others <= moved + 3 <= 7 * matrix + lazily + 21 * others + 3


def test_what_is_asked_between_epochs_is_up_to_date_and_changes_nothing(data, gathers):
    chains = [text_chain(), text_chain()]
    first, second = (Trainer(chain, batch_size=BATCH, threads=1, optimizer=Adam(0.001)) for chain in chains)
    first.train_epoch(*data)
    first.costs()
    loss, gradients = first.loss_and_gradients(data[0][:50], data[1][:50])
    dense = Trainer(chains[0], threads=1, techniques=Techniques(lazy_updates=False, sparse_rows=False, fuse=False))
    other_loss, expected = dense.loss_and_gradients(data[0][:50], data[1][:50])
    assert loss == pytest.approx(other_loss, rel=1e-5)
    np.testing.assert_allclose(gradients["embedding.weight"], expected["embedding.weight"], atol=1e-6)
    first.train_epoch(data[0][: 3 * BATCH], data[1][: 3 * BATCH])
    first.costs()
    first.train_epoch(data[0][:BATCH], data[1][:BATCH])  # the whole matrix is updated
    first.train_epoch(*data)
    for count in (len(data[0]), 3 * BATCH, BATCH, len(data[0])):
        second.train_epoch(data[0][:count], data[1][:count])
    assert (chains[0].parameters.vector == chains[1].parameters.vector).all()
    first.close(), second.close(), dense.close()


def test_a_training_that_is_resumed_goes_on_bit_for_bit(data, gathers):
    chains = [text_chain(), text_chain()]
    whole, resumed = (Trainer(chain, batch_size=BATCH, threads=1, optimizer=Adam(0.001)) for chain in chains)
    whole.train_epoch(*data)
    chains[1].parameters.load(chains[0].parameters.as_dict())
    resumed.load_state(whole.state())
    whole.train_epoch(*data)
    resumed.train_epoch(*data)
    assert gathers
    assert (chains[0].parameters.vector == chains[1].parameters.vector).all()
    whole.close(), resumed.close()


class Tied(Layer):
    """Reads the vectors of all words, or of some, beside the embedding and without a gradient."""

    chain: Chain

    def __init__(self, read):
        super().__init__("tied")
        self.read = read

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        return x + ops.mean(self.read(self.chain.parameters["embedding.weight"]))


class Folded(Embedding):
    """Looks other rows up than those of the samples' ids."""

    def forward(self, x, parameters, training):
        return ops.embedding(parameters["weight"], x // 2, -1)


class Positions(Layer):
    """Another matrix of which rows are looked up, the same in every sample."""

    def output_shape(self, input_shape):
        return input_shape

    def parameters(self):
        shape = (LENGTH, DIMENSION)
        return {"weight": ParameterSpec(shape, {"name": "normal", "std": 0.1}, *shape)}

    def forward(self, x, parameters, training):
        return x + ops.embedding(parameters["weight"], np.arange(LENGTH))


def two_embeddings():
    first, second = (Embedding(VOCABULARY, DIMENSION, name=name) for name in "ab")
    joined = Concat(1, name="c")
    inputs = {"b": ["input"], "c": ["a", "b"]}
    return Graph(first, second, joined, Flatten(), Dense(2 * LENGTH * DIMENSION, 3), inputs=inputs, seed=0)


@pytest.mark.parametrize(("threads", "split"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    "make",
    [
        two_embeddings,
        lambda: Chain(Embedding(VOCABULARY, DIMENSION), Positions(), Flatten(), Dense(LENGTH * DIMENSION, 3), seed=0),
    ],
    ids=["two embeddings", "positions"],
)
def test_other_matrices_of_which_rows_are_looked_up_are_not_updated_lazily(data, gathers, make, threads, split):
    how = partial(Techniques, split_batch=split)
    expected = trained(data, make(), 2, threads=threads, techniques=how(lazy_updates=False))
    assert_equal(trained(data, make(), 2, threads=threads, techniques=how()), expected)
    assert gathers


@pytest.mark.parametrize(
    "read",
    [
        ops.stop_gradient,
        lambda w: w.detach(),
        lambda w: ops.stop_gradient(ops.embedding(w, np.arange(3000))),
        lambda w: ops.embedding(ops.stop_gradient(w), np.arange(3000)),
    ],
    ids=["whole", "detached", "some rows", "some rows of all"],
)
def test_rows_that_a_layer_reads_by_other_numbers_are_not_updated_lazily(data, gathers, read):
    def make():
        chain = Chain(*flat_chain().layers.values(), Tied(read), seed=0)
        chain.layers["tied"].chain = chain
        return chain

    expected = trained(data, make(), techniques=Techniques(lazy_updates=False))
    assert_equal(trained(data, make()), expected)
    assert not gathers


def test_rows_that_an_embedding_looks_up_by_other_numbers_are_not_updated_lazily(data, gathers):
    def make():
        return Chain(Folded(VOCABULARY, DIMENSION), Flatten(), Dense(LENGTH * DIMENSION, 3), seed=0)

    expected = trained(data, make(), techniques=Techniques(lazy_updates=False))
    assert_equal(trained(data, make()), expected)
    assert not gathers


def test_asking_for_gradients_first_draws_no_other_dropout_masks(data):
    found = []
    for lazy in (False, True):
        chain = Chain(Embedding(VOCABULARY, DIMENSION), Dropout(0.5), Flatten(), Dense(LENGTH * DIMENSION, 3), seed=0)
        how = Techniques(lazy_updates=lazy)
        trainer = Trainer(chain, batch_size=BATCH, threads=1, optimizer=Adam(0.001), techniques=how)
        trainer.loss_and_gradients(data[0][:BATCH], data[1][:BATCH])
        losses = trainer.train_epoch(*data)
        found.append((losses, chain.parameters.as_dict(), trainer.optimizer.state()))
        trainer.close()
    assert_equal(*found)


def test_ids_that_were_changed_after_they_were_checked_are_refused(data):
    ids, y = data
    trainer = Trainer(flat_chain(), batch_size=BATCH, threads=1, optimizer=Adam(0.001))
    trainer.train_epoch(ids, y)
    ids[100, 0] = VOCABULARY
    with pytest.raises(ShapeError, match=f"id {VOCABULARY}"):
        trainer.train_epoch(ids, y)
    trainer.close()


class OwnAdam(Adam):
    def _update(self, p, g, s, *state):
        super()._update(p, g, s, *state)
        np.multiply(p, 0.99, out=p)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": Adam(0.001, weight_decay=0.1)},
        {"optimizer": AdamW(0.001)},
        {"optimizer": Adam(0.001, clip_norm=1.0)},
        {"optimizer": Adam(0.001, clip_value=1.0)},
        {"optimizer": Adam(0.001, (0.9, 0.5))},
        {"optimizer": RMSProp(0.001)},
        {"optimizer": OwnAdam(0.001)},
        {"accumulate": 2},
        {"batch_size": VOCABULARY // 4 // LENGTH + 1},
        {"techniques": Techniques(sparse_rows=False)},
        {"techniques": Techniques(flat_parameters=False)},
    ],
    ids=str,
)
def test_updates_are_lazy_only_where_that_is_the_same_and_less_work(data, gathers, options):
    trained(data, flat_chain(), **options)
    assert not gathers


def test_rows_are_not_updated_lazily_in_float64_or_in_small_or_frozen_matrices(data, gathers):
    trained(data, flat_chain(np.float64))
    trained((data[0] % 512, data[1]), Chain(Embedding(512, 16), Flatten(), Dense(160, 3)))
    trained(data, flat_chain(trainable=False))
    assert not gathers


def test_adamw_without_decay_updates_lazily(data, gathers):
    expected = trained(data, flat_chain(), techniques=Techniques(lazy_updates=False))
    assert_equal(trained(data, flat_chain(), optimizer=AdamW(0.001, weight_decay=0.0)), expected)
    assert gathers


def test_numbers_that_are_nearly_too_small_become_zero(data, gathers):
    """A mean that decays for thousands of steps is not left to numbers that processors are slow with."""
    rows = np.arange(1000, dtype=np.int64).reshape(100, LENGTH)
    order = np.concatenate([np.arange(100), np.tile(np.arange(5), 1000)])
    _, _, state = trained((rows, np.zeros(100, np.int64)), flat_chain(), order=order, batch_size=5)
    mean = np.abs(state["mean"])
    assert gathers
    assert not ((mean > 0) & (mean < np.finfo(np.float32).tiny)).any()
    assert (mean[200 * DIMENSION : 1000 * DIMENSION] == 0).all()
