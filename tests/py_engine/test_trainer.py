"""The trainer: the same losses however a batch is computed, no allocation, and errors that lose nothing."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import threading
import tracemalloc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.compile import products
from py_engine.ad.compile.tape import Tape
from py_engine.ad.ops import product_parts
from py_engine.ad.techniques import Techniques
from py_engine.errors import (
    ConfigurationError,
    DTypeError,
    EngineError,
    LabelError,
    NonFiniteError,
    ParameterError,
    ShapeError,
)
from py_engine.network import (
    GRU,
    LSTM,
    RNN,
    SGD,
    Activation,
    Adam,
    AdamW,
    BatchNorm,
    Chain,
    Conv1D,
    Conv2D,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    GlobalMaxPool,
    Layer,
    PermuteDims,
    Reshape,
    Trainer,
    losses,
    steps,
)
from py_engine.network import threads as threads_module
from py_engine.network import trainer as trainer_module
from py_engine.network.optimizers import SPLIT_FROM as SPLIT_OPTIMIZER_FROM
from py_engine.network.steps import SPLIT_FROM, make_step

SAMPLES, STEPS, FEATURES, CLASSES = 61, 3, 5, 4


@pytest.fixture
def batch(rng):
    x = rng.standard_normal((SAMPLES, STEPS * FEATURES)).astype(np.float32)
    return x, rng.integers(0, CLASSES, SAMPLES)


def recurrent_chain(layer=RNN, dtype=np.float32, seed=0, **options):
    return Chain(
        Reshape(STEPS, FEATURES),
        layer(FEATURES, 16, **options),
        Dense(16, CLASSES, name="output"),
        seed=seed,
        dtype=dtype,
    )


def train(x, y, epochs=3, chain=None, **options):
    chain = chain or recurrent_chain()
    trainer = Trainer(chain, **{"batch_size": 20, "threads": 2, "optimizer": SGD(0.1), **options})
    losses = np.concatenate([trainer.train_epoch(x, y) for _ in range(epochs)])
    trainer.close()
    return losses, chain.parameters.as_dict()


SWITCHES = [
    "replay", "preallocate", "reuse_memory", "in_place", "views", "place_parts", "straight_line", "simplify", "join",
    "fused_loss", "fuse", "batched", "flat_parameters",
]  # fmt: skip


WEIGHTED = [
    {"class_weights": [0.5, 2, 1, 0.1]},
    {"ignored_class": -100},
    {"class_weights": [0.5, 2, 1, 0.1], "label_smoothing": 0.2, "ignored_class": 1},
    {"label_smoothing": 0.2},
]


@pytest.mark.parametrize("make", [recurrent_chain, lambda dtype: Chain(BatchNorm(15), Dense(15, CLASSES), dtype=dtype)])
@pytest.mark.parametrize("settings", WEIGHTED, ids=lambda settings: " ".join(settings))
def test_a_weighted_loss_of_a_split_batch_is_that_of_the_whole(batch, settings, make):
    """Shards have different sums of weights, and one of them has ignored labels alone."""
    x, y = batch[0][:60].astype(np.float64), batch[1][:60].copy()
    loss = losses.get("softmax_cross_entropy", **settings)
    if loss.ignored_class is not None:
        y[:12] = loss.ignored_class
    found = []
    for how in ({"threads": 1}, {"threads": 3, "techniques": Techniques(split_batch=True)}):
        chain = make(dtype=np.float64)
        step_losses, params = train(x, y, chain=chain, loss=loss, **how)
        evaluated = Trainer(chain, loss, threads=1).evaluate(x, y)
        found.append([step_losses, *params.values(), evaluated.loss, evaluated.accuracy])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
    assert np.isfinite(found[0][0]).all()


@pytest.mark.parametrize("switch", ["replay", "fused_loss", "preallocate", "simplify"])
def test_a_weighted_loss_is_the_same_without_a_technique(batch, switch):
    loss = losses.get("softmax_cross_entropy", **WEIGHTED[2])
    expected, _ = train(*batch, loss=loss)
    found, _ = train(*batch, loss=loss, techniques=Techniques(**{switch: False}))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_weighted_loss_is_refused_sample_by_sample(batch):
    loss = losses.get("softmax_cross_entropy", ignored_class=0)
    with pytest.raises(
        ConfigurationError, match="softmax_cross_entropy with ignored_class is the mean of a whole batch"
    ):
        train(*batch, loss=loss, techniques=Techniques(batched=False))


def test_ignored_labels_count_neither_in_the_loss_nor_in_accuracy(batch):
    x, y = batch
    loss = losses.get("softmax_cross_entropy", ignored_class=-1)
    chain = recurrent_chain()
    kept = np.arange(SAMPLES) % 3 > 0
    trainer, plain = Trainer(chain, loss, threads=1), Trainer(chain, threads=1)
    found, expected = trainer.evaluate(x, np.where(kept, y, -1)), plain.evaluate(x[kept], y[kept])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6) and found.accuracy == expected.accuracy
    nothing = trainer.evaluate(x, np.full(SAMPLES, -1))
    assert np.isnan(nothing.loss) and np.isnan(nothing.accuracy)
    with pytest.raises(NonFiniteError, match="step 1 of the epoch: the loss is nan"):
        trainer.train_epoch(x, np.full(SAMPLES, -1))


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_switching_a_technique_off_changes_no_result(batch, switch, layer):
    x, y = batch
    x = x.astype(np.float64)
    chains = [recurrent_chain(layer, np.float64) for _ in range(2)]
    losses, parameters = train(x, y, chain=chains[0], techniques=Techniques())
    other_losses, other_parameters = train(x, y, chain=chains[1], techniques=replace(Techniques(), **{switch: False}))
    np.testing.assert_allclose(other_losses, losses, rtol=1e-10)
    for name in parameters:
        np.testing.assert_allclose(other_parameters[name], parameters[name], rtol=1e-9, atol=1e-12)


def test_every_technique_is_a_switch_tested_here_or_below():
    """`test_fusion.py` has `fuse` for convolutions, other files have `lazy_updates`, `product_parts` and `winograd`."""
    elsewhere = {"split_batch", "sparse_rows", "lazy_updates", "product_parts", "winograd"}
    assert {*SWITCHES, *elsewhere} == set(Techniques.__dataclass_fields__)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_split_batch_gives_the_gradient_of_the_whole(batch, threads):
    x, y = batch
    whole, parameters = train(x, y, techniques=Techniques(split_batch=False))
    split, split_parameters = train(x, y, techniques=Techniques(split_batch=True), threads=threads)
    np.testing.assert_allclose(split, whole, rtol=1e-5)
    for name in parameters:
        np.testing.assert_allclose(split_parameters[name], parameters[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_the_rows_of_an_embedding_are_added_up_as_its_whole_gradients_are(sparse, rng):
    x, y = rng.integers(0, 30, (17, 6)), rng.integers(0, 4, 17)
    layers = [Embedding(30, 5, padding_index=0), Flatten(), Dense(30, 4)]
    whole, parameters = train(x, y, chain=Chain(*layers, dtype=np.float64), techniques=Techniques(split_batch=False))
    chain, how = Chain(*layers, dtype=np.float64), Techniques(split_batch=True, sparse_rows=sparse)
    split, split_parameters = train(x, y, chain=chain, threads=3, techniques=how)
    np.testing.assert_allclose(split, whole, rtol=1e-12)
    for name in parameters:
        np.testing.assert_allclose(split_parameters[name], parameters[name], rtol=1e-10, atol=1e-14)
    trainer = Trainer(Chain(*layers, dtype=np.float64), batch_size=10, threads=2, techniques=how)
    trainer.train_epoch(x[:10], y[:10])
    dense = [any(out.shape == (30, 5) for out in tape.outputs) for tape in trainer.tapes]
    trainer.close()
    assert dense == [not sparse] * 2


def test_a_split_batch_has_a_tape_per_thread_and_the_threads_end(batch):
    x, y = batch
    trainer = Trainer(recurrent_chain(), batch_size=20, threads=2, techniques=Techniques(split_batch=True))
    trainer.train_epoch(x[:20], y[:20])
    assert [len(tape.inputs[0]) for tape in trainer.tapes] == [10, 10]
    assert any(thread.name.startswith("py_engine") for thread in threading.enumerate())
    trainer.close()
    for thread in threading.enumerate():
        if thread.name.startswith("py_engine"):
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_threads_end_with_a_trainer_that_nobody_closes(batch):
    x, y = batch
    before = set(threading.enumerate())
    trainer = Trainer(recurrent_chain(), batch_size=20, threads=2, techniques=Techniques(split_batch=True))
    trainer.train_epoch(x[:20], y[:20])
    (thread,) = set(threading.enumerate()) - before
    del trainer
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.parametrize(("optimizer", "arrays"), [(Adam(0.01), 2), (SGD(0.1, momentum=0.9), 1), (SGD(0.1), 0)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_state_of_a_large_network_starts_as_zeros_that_all_threads_write(monkeypatch, optimizer, arrays, threads):
    monkeypatch.setattr(trainer_module, "SPLIT_FROM", 1)
    monkeypatch.setattr(np, "empty_like", lambda array: np.full(array.shape, np.nan, array.dtype))
    runs, before = [], threading.active_count()
    run = threads_module.Team.run
    monkeypatch.setattr(threads_module.Team, "run", lambda team, tasks: runs.append(len(tasks)) or run(team, tasks))
    trainer = Trainer(Chain(Dense(33, 7)), batch_size=4, threads=threads, optimizer=copy.copy(optimizer))
    state = trainer.optimizer.state()
    assert state["steps"] == 0
    assert [(array == 0).all() for array in state.values() if array.shape == trainer.parameters.vector.shape] == [
        True
    ] * arrays
    assert runs == (arrays * [2] if threads == 2 else [])
    assert threading.active_count() <= before + (threads - 1), "those of the team end"


def test_auto_leaves_small_batches_to_blas_and_splits_large_ones(rng):
    chain = Chain(Dense(64, 512, "tanh"), Dense(512, CLASSES))
    for samples, shards in ((16, [16]), (8192, [4096, 4096])):
        x = rng.standard_normal((samples, 64)).astype(np.float32)
        trainer = Trainer(chain, batch_size=samples, threads=2)
        trainer.train_epoch(x, rng.integers(0, CLASSES, samples))
        assert [len(tape.inputs[0]) for tape in trainer.tapes] == shards
        trainer.close()


def test_auto_leaves_wide_layers_to_blas_and_splits_where_a_large_gradient_is_rows_or_gathering_is_most(rng):
    wide = Chain(Dense(512, 1024, "relu"), Dense(1024, CLASSES)), rng.standard_normal((256, 512)).astype(np.float32)
    gathered = Chain(Dense(2048, CLASSES)), rng.standard_normal((256, 2048)).astype(np.float32)
    text = Chain(Embedding(20000, 64), Flatten(), Dense(64 * 64, CLASSES)), rng.integers(1, 20000, (256, 64))
    for (chain, x), shards in ((wide, [256]), (text, [128, 128]), (gathered, [128, 128])):
        trainer = Trainer(chain, batch_size=256, threads=2)
        trainer.train_epoch(x, rng.integers(0, CLASSES, 256))
        assert [len(tape.inputs[0]) for tape in trainer.tapes] == shards
        steps = [step for tape in trainer.tapes for step in tape.steps]
        assert max(a.nbytes for step in steps for a in step.arrays) > SPLIT_FROM
        trainer.close()


@pytest.mark.parametrize("layer", [LSTM, GRU])
def test_auto_leaves_thousands_of_short_calls_whole_and_splits_them_where_they_are_long(monkeypatch, rng, layer):
    monkeypatch.setattr(
        product_parts, "_multiplies_without_copies", lambda: False
    )  # on any machine, as with kernels for AVX2
    for units, samples, shards in ((64, 64, [64]), (128, 256, [128, 128])):
        trainer = Trainer(Chain(layer(64, units), Dense(units, CLASSES)), batch_size=samples, threads=2)
        x = rng.standard_normal((samples, 64, 64)).astype(np.float32)
        trainer.train_epoch(x, rng.integers(0, CLASSES, samples))
        assert [len(tape.inputs[0]) for tape in trainer.tapes] == shards
        assert sum(len(step.calls) for step in trainer.tapes[0].steps) > 1000
        trainer.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_streams_of_batches_that_have_not_come_again_are_kept_when_a_training_is_resumed_twice(batch, threads):
    x, y = batch

    def go_on_from(trainer=None):
        fresh = Trainer(dropping_chain(), batch_size=20, threads=threads, optimizer=SGD(0.1))
        if trainer is not None:
            fresh.parameters.vector[...] = trainer.parameters.vector
            fresh.load_state(trainer.state())
        return fresh

    whole = go_on_from()
    for rows in (40, 41):  # the last row of 41 is a batch with another stream
        whole.train_epoch(x[:rows], y[:rows])
    once = go_on_from(whole)
    once.train_epoch(x[:40], y[:40])
    twice = go_on_from(once)
    for trainer in (once, twice):
        trainer.train_epoch(x[:41], y[:41])
    for rows in (40, 41):
        whole.train_epoch(x[:rows], y[:rows])
    np.testing.assert_array_equal(once.parameters.vector, whole.parameters.vector)
    np.testing.assert_array_equal(twice.parameters.vector, whole.parameters.vector)


def share_small_products(monkeypatch):
    monkeypatch.setattr(products, "SHARED_FLOPS", 1)
    monkeypatch.setattr(steps, "SHARED_FROM", 1)


def test_forward_passes_of_any_number_of_samples_are_planned_but_not_all_kept(rng):
    x = rng.standard_normal((100, 5)).astype(np.float32)
    trainer = Trainer(Chain(Dense(5, 3), seed=0), batch_size=10, threads=1)
    expected = trainer.predict(x)
    for count in range(1, 100):
        np.testing.assert_allclose(trainer.predict(x[:count]), expected[:count], rtol=1e-6)
        assert len(trainer._forwards) <= trainer_module.MOST_FORWARDS


def dropping_chain():
    return Chain(Dense(STEPS * FEATURES, 32, "tanh"), Dropout(0.5, seed=1), Dense(32, CLASSES), seed=0)


@pytest.mark.parametrize("all_threads", ["2 threads in BLAS", "products shared by 2 threads"])
@pytest.mark.parametrize(
    "seconds", [(1, 2), (2, 1), (1, 1.02)], ids=["all are faster", "one is", "they are about as fast"]
)
def test_whether_threads_share_the_products_of_a_whole_batch_is_measured_and_changes_nothing(
    batch, monkeypatch, seconds, all_threads
):
    x, y = batch
    same = np.testing.assert_array_equal
    monkeypatch.setattr(threads_module, "BUSY_SECONDS", 0)
    monkeypatch.setattr(threads_module, "TURN_SECONDS", 0)
    if "shared" in all_threads:
        share_small_products(monkeypatch)
        # On some processors parts of such small products are rounded in another way.
        monkeypatch.setattr(threads_module.Trials, "fix", lambda self: None)
        same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    losses, parameters = train(x, y, chain=dropping_chain(), techniques=Techniques(split_batch=False))
    monkeypatch.setattr(steps, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(steps, "OPERATIONS_PER_CALL", 0)
    times = list(np.repeat(np.cumsum((0, *seconds * 3)), 2)[1:-1])  # each trial begins when the last one ends
    end = times[-1]
    monkeypatch.setattr(threads_module, "perf_counter", lambda: times.pop(0) if times else end)
    chain = dropping_chain()
    trainer = Trainer(chain, batch_size=20, threads=2, optimizer=SGD(0.1))
    found = [trainer.train_epoch(x, y)]
    assert len(times) == 12, "neither the first three whole batches, nor the row that is left, have been timed"
    found.append(trainer.train_epoch(x, y))
    assert len(times) == 6 and not trainer.threads_decided()
    found.append(trainer.train_epoch(x, y))
    assert not times and trainer.threads_decided()
    trainer.loss_and_gradients(x[:20], y[:20])
    assert trainer.threads_in_step() == (all_threads if seconds == (1, 2) else "one thread")
    same(np.concatenate(found), losses)
    for name, array in chain.parameters.as_dict().items():
        same(array, parameters[name])


@pytest.mark.parametrize("all_threads", ["2 threads in BLAS", "products shared by 2 threads"])
def test_where_one_thread_rounds_in_another_way_the_size_of_the_products_decides(batch, monkeypatch, all_threads):
    monkeypatch.setattr(steps, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(steps, "OPERATIONS_PER_CALL", 0)
    if "shared" in all_threads:
        share_small_products(monkeypatch)
    digests = itertools.count()
    monkeypatch.setattr(trainer_module, "checksum", lambda array: next(digests))
    monkeypatch.setattr(threads_module, "perf_counter", lambda: pytest.fail("there is nothing to be timed"))

    def threads_in_step():
        trainer = Trainer(recurrent_chain(), batch_size=20, threads=2, optimizer=SGD(0.1))
        used = []

        def run(step, *given, run=trainer._run):
            used.append((trainer._blas_count, step.runs_in_team))
            return run(step, *given)

        monkeypatch.setattr(trainer, "_run", run)
        x, y = (array[:60] for array in batch)
        for _ in range(2):
            trainer.train_epoch(x, y)
        trainer.loss_and_gradients(x[:20], y[:20])
        assert len(used) == 8 and len({*used[:2], *used[3:]}) == 1 and used[2] != used[3], "other numbers count nowhere"
        return trainer.threads_in_step()

    assert threads_in_step() == (all_threads if "shared" in all_threads else "one thread")
    monkeypatch.setattr(steps, "LARGE_PRODUCT", 0)
    assert threads_in_step() == all_threads


@pytest.mark.parametrize("fixed", ["all threads", "one thread"])
@pytest.mark.parametrize(
    ("seconds", "kept"), [((1.0, 1.25), True), ((1.0, 1.15), False), ((1.2, 1.0), False), ((0.04, 0.2), False)]
)
def test_the_third_step_is_made_in_both_ways_and_a_long_one_shows_which_is_faster(
    batch, monkeypatch, seconds, kept, fixed
):
    monkeypatch.setattr(steps, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(steps, "OPERATIONS_PER_CALL", 0)
    monkeypatch.setattr(steps, "LARGE_PRODUCT", 0 if fixed == "all threads" else math.inf)
    x, y = (array[:60] for array in batch)
    expected = train(x, y, chain=dropping_chain(), techniques=Techniques(split_batch=False))
    clock, runs = [0.0], []
    chain = dropping_chain()
    trainer = Trainer(chain, batch_size=20, threads=2, optimizer=SGD(0.1))

    def run(step, *given, run=trainer._run):
        runs.append(trainer._blas_count)
        clock[0] += seconds[2 - trainer._blas_count]
        return run(step, *given)

    monkeypatch.setattr(trainer, "_run", run)
    for module in (trainer_module, threads_module):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    losses = trainer.train_epoch(x, y)
    (step,) = trainer._steps.values()
    assert runs == ([2, 2, 1, 2] if fixed == "all threads" else [1, 1, 2, 1]) and step.threads.compared
    assert step.threads.decided == kept and (not kept or step.threads.way.blas == 2)
    losses = np.concatenate([losses, *(trainer.train_epoch(x, y) for _ in range(2))])
    assert len(runs) == len(losses) + 1
    np.testing.assert_array_equal(losses, expected[0])
    for name, array in chain.parameters.as_dict().items():
        np.testing.assert_array_equal(array, expected[1][name])


def test_a_loss_that_is_not_finite_leaves_no_way_untried(batch, monkeypatch):
    monkeypatch.setattr(steps, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(steps, "OPERATIONS_PER_CALL", 0)
    x, y = (array[:20] for array in batch)
    trainer = Trainer(recurrent_chain(), batch_size=20, threads=2, optimizer=SGD(0.1))
    for _ in range(2):
        trainer.train_epoch(x, y)
    with pytest.raises(NonFiniteError):
        trainer.train_epoch(np.full_like(x, np.nan), y)
    (step,) = trainer._steps.values()
    assert not step.threads.compared
    trainer.train_epoch(x, y)
    assert step.threads.compared and len(step.threads.ways) == 2


@pytest.mark.parametrize(("elements", "shares"), [(1, True), (10**6, False)])
def test_a_team_shares_products_where_the_update_takes_longer_than_waking_its_threads(
    batch, monkeypatch, elements, shares
):
    share_small_products(monkeypatch)
    monkeypatch.setattr(steps, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(steps, "OPERATIONS_PER_CALL", 0)
    monkeypatch.setattr(steps, "LARGE_PRODUCT", 0)
    monkeypatch.setattr(steps, "SHARED_FROM", elements)
    trainer = Trainer(dropping_chain(), batch_size=20, threads=2)
    trainer.loss_and_gradients(batch[0][:20], batch[1][:20])
    assert trainer.threads_in_step() == ("products shared by 2 threads" if shares else "2 threads in BLAS")


@pytest.mark.parametrize("replay", [True, False])
def test_a_step_that_is_first_planned_inside_no_grad_has_its_gradient(batch, replay):
    x, y = batch[0][:20], batch[1][:20]
    trainers = [
        Trainer(recurrent_chain(), batch_size=20, threads=1, optimizer=SGD(0.1), techniques=Techniques(replay=replay))
        for _ in range(2)
    ]
    expected = trainers[0].loss_and_gradients(x, y)
    with pe.no_grad():
        found = trainers[1].loss_and_gradients(x, y)
    assert found[0] == expected[0] and any(np.any(g) for g in expected[1].values())
    for name, gradient in expected[1].items():
        np.testing.assert_array_equal(found[1][name], gradient)
    np.testing.assert_array_equal(*(trainer.train_epoch(x, y) for trainer in trainers))
    np.testing.assert_array_equal(*(trainer.parameters.vector for trainer in trainers))


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_small_products_are_left_to_one_thread_whatever_a_clock_says(monkeypatch, rng, layer):
    monkeypatch.setattr(threads_module, "perf_counter", lambda: pytest.fail("there is nothing to be timed"))
    x, y = rng.standard_normal((1, 40, 8)).astype(np.float32), np.zeros(1, np.int64)
    said = []
    for units in (64, 2000):
        trainer = Trainer(Chain(layer(8, units), Dense(units, 3)), batch_size=1, threads=2)
        trainer.loss_and_gradients(x[:, : 40 if units == 64 else 2], y)
        said.append(trainer.threads_in_step())
        trainer.close()
    assert said[0] == "one thread" and said[1] != "one thread"


@pytest.mark.parametrize(
    ("seconds", "runs", "left"),
    [((2, 1), 6, "last"), ((1, 2), 6, "first"), ((1, 1.02), 6, "last"), ((0.01, 0.02), 18, "first")],
    ids=["the last is faster", "the first is", "about as fast", "short runs"],
)
def test_ways_are_tried_in_turn_until_their_times_are_known(monkeypatch, seconds, runs, left):
    now = itertools.accumulate(itertools.cycle((0, seconds[0], 0, seconds[1])))
    monkeypatch.setattr(threads_module, "perf_counter", lambda: next(now))
    trials, tried = threads_module.Trials(["first", "last"]), []
    while not trials.decided:
        assert trials.run(lambda way: tried.append(way) or way) == tried[-1]
    assert tried == ["first", "last"] * (runs // 2)
    assert trials.way == left
    assert trials.run(str) == left


def test_of_several_ways_that_take_about_the_same_time_the_last_is_chosen(monkeypatch):
    clock, taken = [0.0], dict(enumerate((1.0, 1.02, 1.04, 1.05)))

    def do(way):
        clock[0] += taken[way]

    monkeypatch.setattr(threads_module, "perf_counter", lambda: clock[0])
    trials = threads_module.Trials(list(taken))
    while not trials.decided:
        trials.run(do)
    assert trials.way == 1


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 1.08, 1.09), "one"),
        ((1.0, 1.12, 1.15), "all"),
        ((1.0, 1.05, 1.2), "shared"),
        ((1.2, 1.0, 1.05), "shared"),
        ((1.2, 1.0, 1.02), "one"),
        ((1.0, 1.08, 1.105), "shared"),
    ],
)
def test_threads_of_blas_must_gain_more_than_those_of_a_team(monkeypatch, seconds, chosen):
    clock, taken = [0.0], dict(zip(("all", "shared", "one"), seconds, strict=True))

    def do(way):
        clock[0] += taken[way]

    monkeypatch.setattr(threads_module, "perf_counter", lambda: clock[0])
    trials = threads_module.Trials(list(taken), blas=[2, 1, 1])
    while not trials.decided:
        trials.run(do)
    assert trials.way == chosen


def test_where_threads_of_blas_differ_a_turn_has_several_runs_the_first_of_which_do_not_count(monkeypatch):
    clock, tried, busy = [0.0], [], [0.0]

    def do(way):
        busy[0] = 0.1 if way == "all" else max(0.0, busy[0] - 0.04)  # all others wait busily beside it for so long
        clock[0] += {"all": 0.02, "one": 0.04 if busy[0] > 1e-9 else 0.01}[way]
        tried.append(way)

    monkeypatch.setattr(threads_module, "perf_counter", lambda: clock[0])
    trials = threads_module.Trials(["all", "one"], blas=[2, 1])
    while not trials.decided:
        trials.run(do)
    assert trials.way == "one"
    turns = [(way, len(list(runs))) for way, runs in itertools.groupby(tried)]
    assert [way for way, _ in turns] == ["all", "one"] * 3 and min(count for _, count in turns) > 3


def test_ways_are_compared_again_after_some_seconds_of_runs(monkeypatch):
    clock, seconds = [0.0], {"first": 0.1, "last": 0.2}

    def do(way):
        clock[0] += seconds[way]
        return way

    monkeypatch.setattr(threads_module, "perf_counter", lambda: clock[0])
    trials = threads_module.Trials(["first", "last"])
    assert [trials.run(do) for _ in range(6)] == ["first", "last"] * 3 and trials.way == trials.next == "first"
    clock[0] += 1e6  # seconds of others do not count
    runs = 0
    while not trials.comparing:
        assert trials.run(do) == "first"
        runs += 1
    least = max(threads_module.AGAIN_SECONDS, threads_module.AGAIN_TIMES * 0.9)
    assert least / 0.1 <= runs <= least / 0.1 + 2, "a comparison takes no more than a fiftieth of the time"
    seconds["first"] = 0.3  # other work has come
    for expected in ["first", "last"] * 3:
        assert trials.comparing and trials.decided and trials.way == "first"  # until they have been compared
        assert trials.next == expected and trials.run(do) == expected
    assert trials.way == "last" and not trials.comparing and trials.run(do) == "last"
    trials.spend(1e6)
    assert trials.comparing
    trials.fix()
    trials.spend(1e6)
    assert not trials.comparing and trials.run(do) == "first"


def test_ways_are_compared_again_where_the_chosen_one_has_become_slower_than_fewer_threads_were(monkeypatch):
    clock, seconds = [0.0], {"all": 0.1, "some": 0.3, "one": 0.2}

    def do(way):
        clock[0] += seconds[way]
        return way

    def seconds_until_compared(most):
        start = clock[0]
        while not trials.comparing and clock[0] - start < most:
            trials.run(do)
        return clock[0] - start

    monkeypatch.setattr(threads_module, "perf_counter", lambda: clock[0])
    trials = threads_module.Trials(list(seconds))
    while not trials.decided:
        trials.run(do)
    assert trials.way == "all" and clock[0] == pytest.approx(1.8)
    seconds["all"] = 0.2 * threads_module.GAIN - 1e-6
    assert seconds_until_compared(most=15) >= 15, "one thread was hardly faster"
    trials = threads_module.Trials(list(seconds))
    clock[0], seconds["all"] = 0.0, 0.1
    while not trials.decided:
        trials.run(do)
    for number in range(60):  # single runs that other work slows down
        seconds["all"] = 0.25 if number % 3 == 0 else 0.1
        trials.run(do)
    assert not trials.comparing and trials.way == "all"
    comparisons = 0
    while clock[0] < 100:  # they are slow whenever they are not compared
        seconds["all"] = 0.3
        seconds_until_compared(most=100)
        seconds["all"], comparisons = 0.1, comparisons + 1
        while trials.comparing:
            trials.run(do)
        assert trials.way == "all"
    assert 3 <= comparisons <= 7, "less often each time"
    seconds["all"] = 0.3
    seconds_until_compared(most=100)
    while trials.comparing:
        trials.run(do)
    seconds["one"] = 1.0
    assert trials.way == "one" and seconds_until_compared(most=15) >= 15, "nothing uses fewer threads"


@pytest.mark.parametrize(
    ("samples", "rate", "together"),
    [(20, 0.0, True), (21, 0.0, False), (20, 0.5, False)],
    ids=["equal parts", "unequal parts", "a random generator for each part"],
)
def test_parts_of_a_batch_share_a_plan_where_one_suits_both(rng, monkeypatch, samples, rate, together):
    def trained(planned_apart):
        if planned_apart:
            monkeypatch.setattr(Tape, "beside", lambda tape, results: None)
        layers = [GRU(FEATURES, 16), *([Dropout(rate, seed=1)] if rate else []), Dense(16, CLASSES)]
        trainer = Trainer(
            Chain(*layers, seed=0), batch_size=samples, threads=2, techniques=Techniques(split_batch=True)
        )
        losses = [trainer.train_epoch(x, y) for _ in range(3)]
        first, second = trainer.tapes
        trainer.close()
        return losses, trainer.parameters.vector, first.plan is second.plan

    x, y = rng.standard_normal((samples, STEPS, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, samples)
    losses, parameters, share = trained(planned_apart=False)
    assert share is together
    apart = trained(planned_apart=True)
    np.testing.assert_array_equal(losses, apart[0])
    np.testing.assert_array_equal(parameters, apart[1])
    assert not apart[2]


@pytest.mark.parametrize(("value", "ends"), [(np.nan, True), (np.inf, True), (1e30, False)])
@pytest.mark.parametrize("place", [0, -1])
def test_threads_that_check_a_gradient_find_what_is_not_finite_anywhere(batch, monkeypatch, place, value, ends):
    share_small_products(monkeypatch)
    monkeypatch.setattr(trainer_module, "SPLIT_FROM", 32)
    monkeypatch.setattr(trainer_module, "SQUARES_SHARED_FROM", 32)
    chain = recurrent_chain()
    trainer = Trainer(chain, optimizer=SGD(0.0), batch_size=20, threads=2, techniques=Techniques(split_batch=True))
    monkeypatch.setattr(
        trainer_module, "make_step", lambda *arguments: write_after(make_step(*arguments), place, value)
    )
    x, y = batch[0][:20], batch[1][:20]
    before = chain.parameters.vector.copy()
    if ends:
        with pytest.raises(NonFiniteError, match="step 1 of the epoch: the gradient is not finite"):
            trainer.train_epoch(x, y)
    else:
        trainer.train_epoch(x, y)  # only squares are infinite
    np.testing.assert_array_equal(chain.parameters.vector, before)
    trainer.close()


def write_after(step, place, value):
    """A step that leaves a value in the vector of its gradient."""
    run = step.run

    def written(*arguments):
        loss = run(*arguments)
        step.shards[0].gradient.vector[place] = value
        return loss

    step.run = written
    return step


@pytest.mark.parametrize("split", [False, "auto", True])
def test_a_closed_trainer_gives_its_memory_back_without_a_collection(batch, split):
    gc.collect()
    gc.disable()
    try:
        units = SPLIT_OPTIMIZER_FROM // 16  # enough for the optimizer to share the vector out to threads
        chain = Chain(Reshape(STEPS, FEATURES), GRU(FEATURES, 16), Dense(16, units), Dense(units, CLASSES))
        trainer = Trainer(chain, optimizer=Adam(), batch_size=20, threads=2, techniques=Techniques(split_batch=split))
        trainer.train_epoch(*batch)
        trainer.evaluate(*batch)
        parts = [weakref.ref(part) for part in (trainer, chain, trainer.optimizer, trainer.tapes[0])]
        trainer.close()
        del trainer, chain
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_a_batch_that_is_not_split_is_planned_once(rng, monkeypatch):
    made = []
    monkeypatch.setattr(trainer_module, "make_step", lambda *args: made.append(args[4]) or make_step(*args))
    model = Chain(Dense(3, 2), dtype=np.float64)
    trainer = Trainer(model, optimizer=SGD(0.1), batch_size=8, threads=2)
    trainer.train_epoch(rng.standard_normal((20, 3)), rng.integers(0, 2, 20))
    trainer.close()
    assert made == [8, 4]


def test_a_partial_last_batch_has_a_plan_of_its_own(batch):
    x, y = batch  # 61 samples: three batches of 20, then one of 1
    trainer = Trainer(recurrent_chain(), batch_size=20, threads=1)
    losses = trainer.train_epoch(x, y)
    assert len(losses) == 4
    assert sorted(len(tape.inputs[0]) for tape in trainer.tapes) == [1, 20]
    reference = Trainer(recurrent_chain(), batch_size=20, threads=1)
    for k in range(3):
        reference.train_epoch(x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20])
    assert reference.loss_and_gradients(x[60:], y[60:])[0] == pytest.approx(losses[3], rel=1e-5)


def test_order_picks_the_rows(batch):
    x, y = batch
    order = np.random.default_rng(3).permutation(SAMPLES)
    by_order, _ = Trainer(recurrent_chain(), threads=1), None
    by_rows = Trainer(recurrent_chain(), threads=1)
    np.testing.assert_array_equal(by_order.train_epoch(x, y, order), by_rows.train_epoch(x[order], y[order]))


def test_accumulated_batches_make_one_update_of_their_mean(batch):
    x, y = batch[0][:60], batch[1][:60]
    small, large = recurrent_chain(), recurrent_chain()
    Trainer(small, optimizer=SGD(0.1), batch_size=20, accumulate=3, threads=1).train_epoch(x, y)
    Trainer(large, optimizer=SGD(0.1), batch_size=60, threads=1).train_epoch(x, y)
    np.testing.assert_allclose(small.parameters.vector, large.parameters.vector, rtol=1e-4, atol=1e-6)


def allocated_at_once(trainer, x, y, order):
    """The most bytes that an epoch after the first held beside what was there before it."""
    tracemalloc.start()
    try:
        trainer.train_epoch(x, y, order)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        trainer.train_epoch(x, y, order)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_a_training_step_allocates_no_arrays(rng, layer):
    x = rng.standard_normal((4000, STEPS * FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, 4000)
    trainer = Trainer(recurrent_chain(layer), optimizer=Adam(), batch_size=1000, threads=1)
    order = rng.permutation(4000)
    trainer.train_epoch(x, y, order)
    smallest_activation = 1000 * CLASSES * 4
    peak = allocated_at_once(trainer, x, y, order)
    # numpy's call frames and 0-d results remain, and the checks of an epoch's order; no array of a batch does.
    assert peak < smallest_activation + order.nbytes, f"a step allocated {peak} bytes at once"


def test_dropout_is_off_in_evaluation_and_seeded_in_training(batch):
    x, y = batch

    def run(seed):
        chain = Chain(Dense(STEPS * FEATURES, 32, "relu"), Dropout(0.5, seed=seed), Dense(32, CLASSES))
        trainer = Trainer(chain, optimizer=SGD(0.1), batch_size=20, threads=1)
        return trainer.train_epoch(x, y), trainer.predict(x), trainer.predict(x)

    losses, first, second = run(0)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(run(0)[0], losses)
    assert not np.array_equal(run(1)[0], losses)


def test_a_parameter_that_is_not_to_be_trained_is_refused(batch):
    chain = Chain(Dense(STEPS * FEATURES, 8), BatchNorm(8), Dense(8, CLASSES))
    trainer = Trainer(chain, batch_size=41, threads=1)
    trainer.train_epoch(*batch)
    chain.parameters.tensors["dense.weight"].requires_grad = False
    before = chain.parameters.vector.copy()
    for call in (trainer.train_epoch, trainer.loss_and_gradients):
        with pytest.raises(ConfigurationError, match=r"dense\.weight has requires_grad = False, but"):
            call(*batch)
    np.testing.assert_array_equal(chain.parameters.vector, before)
    chain.parameters.tensors["dense.weight"].requires_grad = True
    trainer.train_epoch(*batch)


@pytest.mark.parametrize("name", ["chain", "loss", "optimizer", "batch_size", "threads", "accumulate", "techniques"])
def test_a_trainer_keeps_what_it_was_made_with(name):
    trainer = Trainer(Chain(Dense(3, 2)))
    with pytest.raises(ConfigurationError, match=f"a trainer keeps the {name} that it was made with; make a new one"):
        setattr(trainer, name, getattr(trainer, name))


def test_replays_of_dropout_draw_new_masks(batch):
    x, y = batch[0][:20], batch[1][:20]
    chain = Chain(Dense(STEPS * FEATURES, 32, "relu"), Dropout(0.5), Dense(32, CLASSES))
    trainer = Trainer(chain, optimizer=SGD(0.0), batch_size=20, threads=1)
    assert len({trainer.train_epoch(x, y)[0] for _ in range(5)}) == 5


def test_many_to_many(rng):
    x = rng.standard_normal((30, 7, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, (30, 7))
    trainer = Trainer(
        Chain(GRU(FEATURES, 16, returns="sequence"), Dense(16, CLASSES)),
        optimizer=Adam(0.02),
        batch_size=10,
        threads=1,
    )
    losses = np.concatenate([trainer.train_epoch(x, y) for _ in range(60)])
    assert losses[-3:].mean() < 0.5 * losses[:3].mean()
    assert trainer.evaluate(x, y).accuracy > 0.6
    assert trainer.predict(x).shape == (30, 7, CLASSES)


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mean_squared_error"])
def test_other_losses_train(rng, loss):
    x = rng.standard_normal((64, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.float32)
    trainer = Trainer(Chain(Dense(6, 8, "tanh"), Dense(8, 1)), loss, Adam(0.05), batch_size=16, threads=1)
    for _ in range(30):
        losses = trainer.train_epoch(x, y)
    assert losses.mean() < 0.2
    evaluation = trainer.evaluate(x, y)
    assert evaluation.loss < 0.2
    assert evaluation.accuracy > 0.9 or np.isnan(evaluation.accuracy)


def test_evaluate_and_predict_agree_with_the_chain(batch):
    x, y = batch
    chain = recurrent_chain()
    trainer = Trainer(chain, threads=1)
    logits = chain(x).numpy()
    np.testing.assert_allclose(trainer.predict(x), logits, rtol=1e-5, atol=1e-6)
    assert trainer.evaluate(x, y).accuracy == (logits.argmax(1) == y).mean()


def test_source_shows_the_tape(batch):
    trainer = Trainer(recurrent_chain(), threads=1)
    trainer.train_epoch(*batch)
    assert "matmul(" in trainer.source
    assert "rnn.weight" in trainer.source


# Token ids, and what is not trained -----------------------------------------------------------------------

VOCABULARY, LENGTH = 40, 9


def token_chain(dtype=np.float32, **options):
    return Chain(
        PermuteDims(0),
        Embedding(VOCABULARY, 6, name="words", **options),
        PermuteDims(1, 0),
        Flatten(),
        Dense(6 * LENGTH, 8, "tanh", name="hidden"),
        Dense(8, 1, name="output"),
        dtype=dtype,
    )


@pytest.fixture
def text(rng):
    ids = rng.integers(0, VOCABULARY, (SAMPLES, LENGTH))
    return ids, (ids[:, :1] < VOCABULARY // 2).astype(np.float32)


def train_text(x, y, chain, **options):
    return train(x, y, chain=chain, loss="binary_cross_entropy", **{"optimizer": Adam(0.01), **options})


@pytest.mark.parametrize("switch", [*SWITCHES, "split_batch"])
def test_embeddings_are_the_same_with_any_technique_off(text, switch):
    ids, y = text
    chains = [token_chain(np.float64, padding_index=0) for _ in range(2)]
    losses, parameters = train_text(ids, y, chains[0], techniques=Techniques(split_batch=True))
    options = {"split_batch": True, switch: False}
    other_losses, other_parameters = train_text(ids, y, chains[1], techniques=Techniques(**options))
    np.testing.assert_allclose(other_losses, losses, rtol=1e-10)
    for name in parameters:
        np.testing.assert_allclose(other_parameters[name], parameters[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("ours", "theirs"), [(Adam(0.01), "Adam"), (AdamW(0.01), "AdamW"), (SGD(0.5), "SGD")])
def test_training_embeddings_equals_torch(torch, text, ours, theirs, threads):
    """Dense in the rows that a batch does not touch, too: Adam keeps updating them."""
    ids, y = text
    chain = token_chain(padding_index=3)
    weights = {name: torch.tensor(a) for name, a in chain.parameters.as_dict().items()}
    embedding = torch.nn.Embedding(VOCABULARY, 6, padding_idx=3)
    hidden, output = torch.nn.Linear(6 * LENGTH, 8), torch.nn.Linear(8, 1)
    with torch.no_grad():
        embedding.weight.copy_(weights["words.weight"])
        for module, name in ((hidden, "hidden"), (output, "output")):
            module.weight.copy_(weights[f"{name}.weight"].T)
            module.bias.copy_(weights[f"{name}.bias"])
    parameters = [p for module in (embedding, hidden, output) for p in module.parameters()]
    optimizer = getattr(torch.optim, theirs)(parameters, lr=ours.learning_rate)
    expected = []
    for _ in range(5):
        for start in range(0, SAMPLES, 20):
            h = embedding(torch.tensor(ids[start : start + 20])).permute(0, 2, 1).flatten(1)
            logits = output(torch.tanh(hidden(h)))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(y[start : start + 20]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    losses, found = train_text(
        ids, y, chain, epochs=5, optimizer=ours, threads=threads, techniques=Techniques(split_batch=threads > 1)
    )
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    np.testing.assert_allclose(found["words.weight"], embedding.weight.detach().numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dimension", [1, 8, 17, 26, 50])
def test_rows_of_all_shards_are_added_up_in_columns(rng, dimension, threads, dtype):
    """Whatever the width of the threads' columns; with ids that repeat in a shard and between shards."""
    ids = rng.integers(0, 5, (30, LENGTH))
    y = rng.integers(0, 2, (30, 1)).astype(dtype)
    updated = []
    for split in (False, True):
        chain = Chain(Embedding(VOCABULARY, dimension, 2), Flatten(), Dense(LENGTH * dimension, 1), dtype=dtype)
        before = chain.parameters.arrays["embedding.weight"].copy()
        for _ in range(2):  # the second sum starts from zero again
            train_text(ids, y, chain, optimizer=SGD(0.5), threads=threads, techniques=Techniques(split_batch=split))
        updated.append(chain.parameters.arrays["embedding.weight"] - before)
    np.testing.assert_allclose(updated[1], updated[0], rtol=1e-4, atol=1e-6)
    moved = updated[1].any(axis=1)
    assert moved.tolist() == [row < 5 and row != 2 for row in range(VOCABULARY)]


@pytest.mark.parametrize("techniques", [Techniques(), Techniques(replay=False), Techniques(batched=False)])
def test_a_frozen_embedding_stays_and_the_rest_is_trained(text, techniques):
    chain = token_chain(trainable=False)
    before = chain.parameters.as_dict()
    _, after = train_text(*text, chain, techniques=techniques)
    np.testing.assert_array_equal(after["words.weight"], before["words.weight"])
    assert (after["hidden.weight"] != before["hidden.weight"]).any()
    _, gradients = Trainer(chain, "binary_cross_entropy", threads=1).loss_and_gradients(*text)
    assert list(gradients) == ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]


def test_a_step_on_token_ids_allocates_no_arrays(rng):
    ids = rng.integers(0, 5000, (400, 50))
    y = rng.integers(0, 2, (400, 1)).astype(np.float32)
    chain = Chain(Embedding(5000, 30), Flatten(), Dense(50 * 30, 1))
    for techniques in (Techniques(split_batch=True), Techniques(split_batch=False)):
        trainer = Trainer(chain, "binary_cross_entropy", Adam(), 100, threads=2, techniques=techniques)
        order = rng.permutation(400)
        trainer.train_epoch(ids, y, order)
        peak = allocated_at_once(trainer, ids, y, order)
        trainer.close()
        assert peak < 30_000, f"a step allocated {peak} bytes at once; the ids of a batch are {100 * 50 * 8}"


def batch_norm_chain(dtype=np.float32):
    return Chain(
        Dense(STEPS * FEATURES, 12, name="hidden"), BatchNorm(12, name="norm"), Dense(12, CLASSES, name="output"),
        dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("replay", [True, False])
def test_training_with_batch_norm_equals_torch(torch, batch, replay):
    x, y = batch[0][:60], batch[1][:60]
    chain = batch_norm_chain()
    weights = {name: torch.tensor(a) for name, a in chain.parameters.as_dict().items()}
    model = torch.nn.Sequential(
        torch.nn.Linear(STEPS * FEATURES, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, CLASSES)
    )
    with torch.no_grad():
        for module, name in ((model[0], "hidden"), (model[2], "output")):
            module.weight.copy_(weights[f"{name}.weight"].T)
            module.bias.copy_(weights[f"{name}.bias"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        for start in range(0, 60, 20):
            rows = slice(start, start + 20)
            loss = torch.nn.functional.cross_entropy(model(torch.tensor(x[rows])), torch.tensor(y[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    losses, found = train(x, y, chain=chain, techniques=Techniques(split_batch=True, replay=replay))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(found["norm.running_mean"], model[1].running_mean.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["norm.running_var"], model[1].running_var.numpy(), rtol=1e-4, atol=1e-5)
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor(x)).numpy()
    np.testing.assert_allclose(Trainer(chain, threads=1).predict(x), logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_split_batch_is_normalised_as_a_whole_one(rng, threads):
    def image_chain():
        return Chain(
            *(Reshape(2, 4, 4), Conv2D(2, 3, 3, padding=1), BatchNorm(3, name="norm"), Activation("relu")),
            *(Flatten(), Dense(48, 7), BatchNorm(7), Dense(7, CLASSES)),
            dtype=np.float64,
        )

    x, y = rng.standard_normal((47, 32)), rng.integers(0, CLASSES, 47)
    trainers = [
        Trainer(image_chain(), batch_size=20, threads=n, optimizer=SGD(0.1), techniques=Techniques(split_batch=True))
        for n in (1, threads)
    ]
    losses = [np.concatenate([trainer.train_epoch(x, y) for _ in range(3)]) for trainer in trainers]
    assert [len(trainer.tapes) for trainer in trainers] == [2, 2 * threads]  # of whole batches and of the last
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-12)
    whole, split = (trainer.parameters.memory for trainer in trainers)
    np.testing.assert_allclose(split, whole, rtol=1e-11, atol=1e-13)
    for trainer in trainers:
        trainer.close()


def test_a_thread_that_fails_keeps_nobody_waiting(batch, monkeypatch):
    x, y = batch[0][:40], batch[1][:40]
    trainer = Trainer(batch_norm_chain(), batch_size=20, threads=2, techniques=Techniques(split_batch=True))
    trainer.train_epoch(x, y)
    (step,) = trainer._steps.values()
    for shard in step.shards:  # the caller's thread, then the other one
        with monkeypatch.context() as patch:
            patch.setattr(shard, "run", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.train_epoch(x, y)
        assert np.isfinite(trainer.train_epoch(x, y)).all()
    trainer.close()


def test_a_shard_that_fails_while_it_is_timed_keeps_nobody_waiting(batch, monkeypatch):
    trainer = Trainer(batch_norm_chain(), batch_size=20, threads=2, techniques=Techniques(split_batch=True))
    trainer.train_epoch(batch[0][:40], batch[1][:40])
    (step,) = trainer._steps.values()
    for shard in step.shards:
        with monkeypatch.context() as patch:
            patch.setattr(shard.tape, "costs", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.costs()
        assert trainer.costs()
    trainer.close()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("split", [True, False])
def test_asking_what_a_step_takes_changes_nothing_and_tells_of_every_layer_and_the_update(batch, split, accumulate):
    def trained(asks):
        chain = Chain(Dense(15, 16), BatchNorm(16), Dropout(0.5), Dense(16, CLASSES), seed=0)
        trainer = Trainer(
            chain,
            optimizer=Adam(0.01),
            batch_size=20,
            threads=2,
            accumulate=accumulate,
            techniques=Techniques(split_batch=split),
        )
        assert trainer.costs() == [], "nothing was planned"
        trainer.loss_and_gradients(batch[0][:20], batch[1][:20])
        assert "sums and update" not in {cost.op for cost in trainer.costs()}
        trainer.train_epoch(batch[0][:40], batch[1][:40])
        costs = [trainer.costs() for _ in range(asks)]
        trainer.train_epoch(batch[0][:40], batch[1][:40])
        trainer.close()
        return chain.parameters.as_dict(), costs

    (expected, _), (actual, (costs, _)) = trained(0), trained(2)
    assert all((actual[name] == expected[name]).all() for name in expected)
    assert {cost.layer for cost in costs} == {"dense", "batchnorm", "dropout", "dense2", ""}
    assert costs[-1].op == "sums and update"
    assert all(cost.seconds > 0 and cost.moved > 0 for cost in costs)
    products = [cost for cost in costs if (cost.op, cost.layer) == ("matmul", "dense2")]
    assert len(products) % (1 + split) == 0, "as many of each shard"


def test_what_is_not_finite_in_a_split_normalised_batch_is_found(batch):
    x, y = batch[0][:20].copy(), batch[1][:20]
    trainer = Trainer(batch_norm_chain(), batch_size=20, threads=2, techniques=Techniques(split_batch=True))
    trainer.train_epoch(x, y)
    x[15, 0] = np.nan
    with pytest.raises(NonFiniteError, match="step 1 of the epoch"):
        trainer.train_epoch(x, y)
    trainer.close()


def test_a_batch_that_is_coupled_is_not_trained_sample_by_sample(batch):
    x, y = batch[0][:40], batch[1][:40]
    with pytest.raises(ConfigurationError, match="layer 'norm' needs a whole batch"):
        Trainer(batch_norm_chain(), threads=1, techniques=Techniques(batched=False)).train_epoch(x, y)


def test_running_statistics_stay_when_nothing_is_trained(batch):
    chain = batch_norm_chain()
    before = chain.parameters.memory.copy()
    trainer = Trainer(chain, threads=1)
    trainer.loss_and_gradients(*batch)
    trainer.evaluate(*batch)
    trainer.predict(batch[0])
    with pytest.raises(ShapeError, match=r"layer 'norm'.* more than one value"):  # 61 samples: the last batch is of 1
        Trainer(chain, batch_size=20, threads=1).train_epoch(*batch)
    np.testing.assert_array_equal(chain.parameters.memory, before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x + 1, ShapeError, r"layer 'words': token id 40 in row \d+ at position \d .* 0\.\.39"),
        (lambda x: x - 1, ShapeError, r"layer 'words': token id -1 in row"),
        (lambda x: x.astype(np.float32), DTypeError, r"layer 'words' looks up integer token ids, .* float32"),
    ],
)
def test_wrong_ids_are_refused_before_training(text, change, error, message):
    ids, y = text
    chain = token_chain()
    before = chain.parameters.vector.copy()
    trainer = Trainer(chain, "binary_cross_entropy", threads=1)
    trainer.evaluate(ids, y)
    for use in (trainer.train_epoch, trainer.evaluate):
        with pytest.raises(error, match=message):
            use(change(ids), y)
    np.testing.assert_array_equal(chain.parameters.vector, before)


def test_ids_of_any_integer_dtype_serve(text):
    ids, y = text
    expected, _ = train_text(ids, y, token_chain())
    for dtype in (np.uint8, np.int32, np.uint64):
        np.testing.assert_array_equal(train_text(ids.astype(dtype), y, token_chain())[0], expected)


# Mistakes -------------------------------------------------------------------------------------------------


def test_nan_in_a_sample_names_step_and_input_and_keeps_the_parameters(batch):
    x, y = batch
    x[45, 3] = np.nan
    chain = recurrent_chain()
    reference = recurrent_chain()
    Trainer(reference, optimizer=SGD(0.1), batch_size=20, threads=1).train_epoch(x[:40], y[:40])
    with pytest.raises(NonFiniteError, match=r"step 3 of the epoch: the loss is nan: input 0 .* NaN"):
        Trainer(chain, optimizer=SGD(0.1), batch_size=20, threads=1).train_epoch(x, y)
    np.testing.assert_array_equal(chain.parameters.vector, reference.parameters.vector)


def test_an_overflow_names_the_first_op_and_layer(batch):
    x, y = batch
    chain = Chain(Dense(STEPS * FEATURES, 8, name="wide"), Activation("relu"), Dense(8, CLASSES, name="narrow"))
    chain.parameters.arrays["wide.weight"][...] = 1e30
    chain.parameters.arrays["narrow.weight"][...] = 1e30
    with pytest.raises(NonFiniteError, match=r"step 1 .* op 'matmul' in layer 'narrow' was the first"):
        Trainer(chain, batch_size=20, threads=1).train_epoch(x, y)


@pytest.mark.filterwarnings("error")
def test_where_threads_share_the_products_an_overflow_is_no_warning(batch, monkeypatch):
    share_small_products(monkeypatch)
    monkeypatch.setattr(steps, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(steps, "LARGE_PRODUCT", 0)
    chain = dropping_chain()
    trainer = Trainer(chain, batch_size=20, threads=2)
    x, y = batch[0][:20], batch[1][:20]
    trainer.loss_and_gradients(x, y)
    assert trainer.threads_in_step() == "products shared by 2 threads"
    for name in ("dense.weight", "dense2.weight"):
        chain.parameters.arrays[name][...] = 3e38
    with pytest.raises(NonFiniteError, match="op 'matmul"):
        trainer.train_epoch(x, y)
    trainer.close()


@pytest.mark.filterwarnings("error")
def test_an_overflow_in_what_the_parts_of_a_split_batch_leave_for_the_sum_is_no_warning(rng):
    """The gradient by word vectors is a product of each part, beside its tape."""
    ids = np.concatenate([rng.integers(1, 25, (10, 10)), rng.integers(25, 50, (10, 10))])  # no word is in both parts
    y = rng.integers(0, CLASSES, 20)
    layers = PermuteDims(1, 0), Conv1D(16, 8, 3), Activation("relu"), GlobalMaxPool(), Dense(8, CLASSES)
    chain = Chain(Embedding(50, 16), *layers, seed=0)
    trainer = Trainer(chain, batch_size=20, threads=2, techniques=Techniques(split_batch=True))
    trainer.loss_and_gradients(ids, y)
    chain.parameters.arrays["embedding.weight"][...] *= 1e-38
    chain.parameters.arrays["conv1d.weight"][...] *= 1e38
    chain.parameters.arrays["dense.weight"][...] *= 1e3
    with pytest.raises(NonFiniteError, match="the gradient is not finite"):
        trainer.train_epoch(ids, y)
    trainer.close()


def test_a_trainer_has_a_thread_for_each_core_that_the_process_may_use(batch, monkeypatch):
    monkeypatch.setattr(threads_module.os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    monkeypatch.setattr(threads_module.os, "cpu_count", lambda: 64)
    assert Trainer(recurrent_chain()).threads == 3
    monkeypatch.delattr(threads_module.os, "sched_getaffinity")
    assert Trainer(recurrent_chain()).threads == 64
    assert Trainer(recurrent_chain(), threads=2).threads == 2


def test_the_seconds_of_an_update_are_the_least_and_the_mean_where_rows_are_updated_lazily(batch):
    trainer = Trainer(recurrent_chain(), batch_size=20, threads=1)
    trainer.train_epoch(batch[0][:20], batch[1][:20])
    for lazily, seconds, moved in ((False, 1.0, 10), (True, 2.0, 30)):
        trainer._updates.clear()
        trainer._updates.extend([(3.0, 50, lazily), (1.0, 10, False)])
        update = trainer.costs()[-1]
        assert 0 <= update.seconds - seconds < 0.5 and update.moved == trainer._planned.gradient_bytes + moved
    trainer.close()


def test_a_parameter_that_is_nan_already_is_named(batch):
    chain = recurrent_chain()
    chain.parameters.arrays["rnn.bias"][2] = np.nan
    with pytest.raises(NonFiniteError, match=r"rnn\.bias holds NaN"):
        Trainer(chain, threads=1).train_epoch(*batch)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, y: (x.astype(np.float64), y), DTypeError, "float32.*float64"),
        (lambda x, y: (x[:, :-1], y), ShapeError, "reshape"),
        (lambda x, y: (x, y[:-1]), LabelError, "61 samples"),
        (lambda x, y: (x, np.where(np.arange(61) == 7, 9, y)), LabelError, "actual 9 in row 7"),
        (lambda x, y: (x, y.astype(np.float32)), LabelError, "integer labels"),
        (lambda x, y: (x[:0], y[:0]), ShapeError, "no samples"),
    ],
)
def test_wrong_data_is_refused_before_training(batch, change, error, message):
    chain = recurrent_chain()
    before = chain.parameters.vector.copy()
    with pytest.raises(error, match=message):
        Trainer(chain, threads=1).train_epoch(*change(*batch))
    np.testing.assert_array_equal(chain.parameters.vector, before)


@pytest.mark.parametrize("order", [[0, 61], [-1, 2], [], [[0, 1]], [0.0, 1.0]])
def test_a_wrong_order_is_refused(batch, order):
    with pytest.raises(ShapeError, match="order must"):
        Trainer(recurrent_chain(), threads=1).train_epoch(*batch, order)


def test_changed_layers_need_a_new_trainer(batch):
    chain = recurrent_chain()
    trainer = Trainer(chain, threads=1)
    chain.append(Dense(CLASSES, CLASSES))
    for ask in (trainer.train_epoch, trainer.evaluate, trainer.loss_and_gradients):
        with pytest.raises(ConfigurationError, match="new trainer"):
            ask(*batch)
    Trainer(chain, threads=1).train_epoch(*batch)


def test_a_prediction_is_not_that_of_the_layers_before(batch):
    chain = recurrent_chain()
    trainer = Trainer(chain, threads=1)
    trainer.predict(batch[0])
    chain.append(Activation("relu"))
    with pytest.raises(ConfigurationError, match="new trainer"):
        trainer.predict(batch[0])


@pytest.mark.parametrize(("threads", "split"), [(1, False), (2, True)])
@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_a_parameter_without_a_gradient_at_one_length_has_none_after_another_length(rng, layer, threads, split):
    """A single step of a recurrent layer does not read `recurrent`."""
    chain = Chain(layer(FEATURES, 4), Dense(4, CLASSES), seed=0)
    name = next(name for name in chain.parameters.arrays if name.endswith("recurrent"))
    how = Techniques(split_batch=split)
    trainer = Trainer(chain, batch_size=8, threads=threads, optimizer=SGD(0.1), techniques=how)
    x, y = rng.standard_normal((8, 5, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, 8)
    short = np.ascontiguousarray(x[:, :1])
    assert not trainer.loss_and_gradients(short, y)[1][name].any()
    assert trainer.loss_and_gradients(x, y)[1][name].any()
    assert not trainer.loss_and_gradients(short, y)[1][name].any()
    trainer.train_epoch(x, y)
    before = chain.parameters.arrays[name].copy()
    trainer.train_epoch(short, y)
    np.testing.assert_array_equal(chain.parameters.arrays[name], before)
    trainer.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_gradient_whose_squares_are_too_large_is_clipped(threads):
    optimizer = SGD(1.0, clip_norm=1.0)
    trainer = Trainer(Chain(Dense(4, 1)), loss="mean_squared_error", optimizer=optimizer, batch_size=8, threads=threads)
    before = trainer.parameters.vector.copy()
    trainer.train_epoch(np.full((8, 4), 1e5, np.float32), np.full((8, 1), 1e15, np.float32))
    assert np.linalg.norm(trainer.parameters.vector - before) == pytest.approx(1, rel=1e-3)
    trainer.close()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_of_an_accumulated_update_that_fails_nothing_is_left(monkeypatch):
    good = np.array([[1], [2], [1], [2]], np.float32), np.array([0, 1, 0, 1])
    bad = good[0].copy()
    bad[2:] = 1e25

    def make(**options):
        return Trainer(Chain(Dense(1, 2), seed=0), optimizer=SGD(0.1, **options), batch_size=2, accumulate=2, threads=1)

    trainer, expected = make(clip_norm=1.0), make(clip_norm=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("py_engine.network.optimizers._norm_of_large", lambda gradient: (np.inf, 1.0))
        with pytest.raises(NonFiniteError, match="norm"):
            trainer.train_epoch(bad, good[1])
    trainer.train_epoch(*good)
    expected.train_epoch(*good)
    np.testing.assert_array_equal(trainer.parameters.vector, expected.parameters.vector)

    trainer = make()
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(trainer.optimizer, "_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train_epoch(*good)
    before = trainer.parameters.vector.copy()
    trainer.train_epoch(good[0][:2], good[1][:2])
    np.testing.assert_array_equal(trainer.parameters.vector, before)
    trainer.train_epoch(good[0][:2], good[1][:2])
    assert (trainer.parameters.vector != before).any()


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0}, {"threads": 0}, {"accumulate": 0}, {"batch_size": 2.5},
        {"loss": "hinge"}, {"techniques": Techniques(split_batch="often")},
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(options):
    with pytest.raises(EngineError):
        Trainer(recurrent_chain(), **options)


def test_flatten_only_chain_has_no_gradient_to_lose(rng):
    x = rng.standard_normal((10, 2, 2)).astype(np.float32)
    trainer = Trainer(Chain(Flatten()), threads=1)
    assert len(trainer.train_epoch(x, rng.integers(0, 4, 10))) == 1


@pytest.mark.parametrize("optimizer", ["sgd", SGD, 0.01])
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(ConfigurationError, match=r"expected an optimizer, such as SGD\(0\.01\), actual"):
        Trainer(Chain(Dense(3, 2)), optimizer=optimizer)


@pytest.mark.parametrize("chain", [[Dense(3, 2)], Dense(3, 2), "mnist-cnn"])
def test_what_is_no_chain_is_refused(chain):
    with pytest.raises(ConfigurationError, match="Trainer: expected a Chain of layers, actual"):
        Trainer(chain)


def test_a_trainer_goes_on_from_a_state_bit_for_bit(batch):
    x, y = batch

    def make():
        chain = Chain(Dense(STEPS * FEATURES, 16, "relu"), Dropout(0.5), Dense(16, CLASSES))
        return Trainer(chain, optimizer=Adam(0.01), batch_size=30, threads=1, accumulate=2)

    whole, first, second = make(), make(), make()
    expected = [whole.train_epoch(x, y) for _ in range(4)]
    begun = [first.train_epoch(x, y) for _ in range(2)]
    second.parameters.load(first.parameters.as_dict())
    second.load_state(first.state())
    np.testing.assert_array_equal([*begun, *(second.train_epoch(x, y) for _ in range(2))], expected)
    np.testing.assert_array_equal(second.parameters.vector, whole.parameters.vector)
    with pytest.raises(ParameterError, match=r"Trainer\.load_state: expected optimizer\.steps"):
        second.load_state({})
    eager = Trainer(first.chain, techniques=Techniques(replay=False), threads=1)
    with pytest.raises(ConfigurationError, match="eager steps of a dropout layer can't be resumed"):
        eager.state()


def test_each_step_has_its_own_learning_rate(batch):
    x, y = batch
    starts = range(0, len(x), 20)
    rates = np.linspace(0.1, 0.0, len(starts))
    at_once, step_by_step = (
        Trainer(Chain(Dense(STEPS * FEATURES, CLASSES)), batch_size=20, threads=1) for _ in range(2)
    )
    losses = at_once.train_epoch(x, y, rates=rates)
    expected = []
    for start, rate in zip(starts, rates, strict=True):
        step_by_step.optimizer.learning_rate = rate
        expected += [*step_by_step.train_epoch(x, y, range(start, min(start + 20, len(x))))]
    np.testing.assert_array_equal(losses, expected)
    with pytest.raises(ShapeError, match="a learning rate for each of"):
        at_once.train_epoch(x, y, rates=[0.1])
    before = at_once.parameters.vector.copy()
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(ConfigurationError, match="learning rates must be finite numbers >= 0"):
            at_once.train_epoch(x, y, rates=[*rates[:-1], wrong])
    for wrong in ("a", rates * 1j, rates > 0, [[0.1], [0.1, 0.2]], [None] * len(rates)):
        with pytest.raises(ConfigurationError, match="learning rates must be finite numbers >= 0"):
            at_once.train_epoch(x, y, rates=wrong)
    np.testing.assert_array_equal(at_once.parameters.vector, before)


def test_settings_of_layers_that_are_changed_later_are_refused(rng):
    chain = Chain(Dense(4, 8, "relu"), Dropout(0.5), Dense(8, 3))
    trainer = Trainer(chain, threads=1)
    x, y = rng.normal(size=(6, 4)).astype(np.float32), np.arange(6) % 3
    trainer.train_epoch(x, y)
    chain["dropout"].rate = 0.0
    for use in (lambda: trainer.train_epoch(x, y), lambda: trainer.predict(x)):
        with pytest.raises(ConfigurationError, match=r"layer 'dropout': rate was changed from 0\.5 to 0\.0 after this"):
            use()
    Trainer(chain, threads=1).train_epoch(x, y)


def test_targets_that_are_one_number_are_refused(rng):
    with pytest.raises(LabelError, match=r"1 samples need as many targets, got 0$"):
        Trainer(Chain(Dense(4, 3)), threads=1).train_epoch(rng.normal(size=(1, 4)).astype(np.float32), 0)


@pytest.mark.parametrize(
    "change",
    [
        {"pending": np.array([1, 2])},
        {"pending": np.array(2)},
        {"pending": np.array(-1)},
        {"total": np.zeros(3)},
        {"total": [0.0]},
    ],
)
def test_a_state_of_accumulated_gradients_that_does_not_fit_changes_nothing(change):
    trainer = Trainer(Chain(Dense(4, 3)), threads=1, accumulate=2)
    with pytest.raises(ParameterError, match=r"Trainer\.load_state: (pending|total) is not of this"):
        trainer.load_state({**trainer.state(), "optimizer.steps": np.array(7), **change})
    assert trainer.optimizer.steps == 0


@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_a_part_of_an_update_is_continued_by_as_many_mini_batches_alone(accumulate):
    def new(count):
        return Trainer(Chain(Dense(4, 3), seed=0), batch_size=2, threads=1, accumulate=count)

    first, other = new(4), new(accumulate)
    x, y = np.ones((2, 4), np.float32), np.array([0, 1])
    first.train_epoch(x, y)
    state = first.state()
    if accumulate == 4:
        other.load_state(state)
        other.load_state({name: array for name, array in state.items() if name != "accumulate"})  # an older one
    else:
        with pytest.raises(ParameterError, match=f"of an update of 4 mini-batches is not one of {accumulate}"):
            other.load_state(state)
    other.load_state(new(4).state())  # of which nothing is pending


@pytest.mark.parametrize("before", [True, False])
def test_what_is_trained_is_decided_when_a_chain_is_made(before):
    x, y = np.zeros((4, 3), np.int64), np.arange(4) % 2
    chain = Chain(Embedding(5, 2, trainable=before), Flatten(), Dense(6, 2))
    chain["embedding"].trainable = not before
    with pytest.raises(ConfigurationError, match="whether weight is trained was changed after its chain was made"):
        Trainer(chain, threads=1)
    chain["embedding"].trainable = before
    trainer = Trainer(chain, threads=1)
    trainer.train_epoch(x, y)
    chain.parameters["embedding.weight"].requires_grad = not before
    with pytest.raises(ConfigurationError, match=f"embedding.weight has requires_grad = {not before}"):
        trainer.train_epoch(x, y)


def test_settings_of_a_layer_that_a_layer_holds_are_kept_to_as_well():
    class Holds(Layer):
        def __init__(self):
            super().__init__()
            self.norm = BatchNorm(3)

        def parameters(self):
            return self.norm.parameters()

        def output_shape(self, input_shape):
            return input_shape

        def forward(self, x, parameters, training):
            return self.norm(x, parameters, training)

    chain = Chain(Holds(), Dense(3, 2))
    trainer = Trainer(chain, threads=1)
    x, y = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), np.arange(4) % 2
    trainer.train_epoch(x, y)
    chain["holds"].norm.momentum = 0.5
    with pytest.raises(ConfigurationError, match=r"holds\.norm.*momentum was changed from 0\.1 to 0\.5"):
        trainer.train_epoch(x, y)


@pytest.mark.parametrize("settings", [{"betas": (0.5, 0.9)}, {}], ids=["other settings", "the same"])
def test_the_state_of_a_trainer_is_continued_by_one_with_other_betas(settings, rng):
    x, y = rng.normal(size=(6, 4)).astype(np.float32), np.arange(6) % 3
    first = Trainer(Chain(Dense(4, 3), seed=1), optimizer=Adam(0.1), threads=1)
    first.train_epoch(x, y)
    state, parameters = first.state(), first.parameters.vector.copy()
    second = Trainer(Chain(Dense(4, 3), seed=2), optimizer=Adam(0.1, **settings), threads=1)
    second.parameters.vector[...] = parameters
    second.load_state(state)
    for name, value in settings.items():
        setattr(first.optimizer, name, value)
    for trainer in (first, second):
        trainer.train_epoch(x, y)
    np.testing.assert_array_equal(second.parameters.vector, first.parameters.vector)
    old = {name: array for name, array in first.state().items() if name != "optimizer.betas"}
    second.load_state(old)  # as version 0.2 saved it: of the settings of now
    np.testing.assert_array_equal(second.optimizer.state()["mean"], old["optimizer.mean"])
