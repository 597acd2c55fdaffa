"""The trainer: the same losses however a batch is computed, no allocation, and errors that lose nothing."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from py_engine.ad.techniques import Techniques
from py_engine.errors import (
    ConfigurationError,
    DTypeError,
    EngineError,
    LabelError,
    NonFiniteError,
    ShapeError,
)
from py_engine.network import (
    GRU,
    LSTM,
    RNN,
    SGD,
    Activation,
    Adam,
    Chain,
    Dense,
    Dropout,
    Flatten,
    Reshape,
    Trainer,
)
from py_engine.network.threads import Team

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
    "replay", "preallocate", "reuse_memory", "in_place", "views", "place_parts", "simplify", "fused_loss", "batched",
    "flat_parameters",
]  # fmt: skip


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
    assert {*SWITCHES, "split_batch"} == set(Techniques.__dataclass_fields__)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_split_batch_gives_the_gradient_of_the_whole(batch, threads):
    x, y = batch
    whole, parameters = train(x, y, techniques=Techniques(split_batch=False))
    split, split_parameters = train(x, y, techniques=Techniques(split_batch=True), threads=threads)
    np.testing.assert_allclose(split, whole, rtol=1e-5)
    for name in parameters:
        np.testing.assert_allclose(split_parameters[name], parameters[name], rtol=1e-4, atol=1e-6)


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


def test_auto_leaves_small_batches_to_blas_and_splits_large_ones(rng):
    chain = Chain(Dense(64, 512, "tanh"), Dense(512, CLASSES))
    for samples, shards in ((16, [16]), (8192, [4096, 4096])):
        x = rng.standard_normal((samples, 64)).astype(np.float32)
        trainer = Trainer(chain, batch_size=samples, threads=2)
        trainer.train_epoch(x, rng.integers(0, CLASSES, samples))
        assert [len(tape.inputs[0]) for tape in trainer.tapes] == shards
        trainer.close()


def test_an_error_in_a_thread_reaches_the_caller_and_the_team_goes_on():
    team = Team(2)
    done = []
    with pytest.raises(ZeroDivisionError):
        team.run([lambda: done.append(1), lambda: 1 / 0])
    team.run([lambda: done.append(2), lambda: done.append(3)])
    team.close()
    assert sorted(done) == [1, 2, 3]


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


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_a_training_step_allocates_no_arrays(rng, layer):
    x = rng.standard_normal((4000, STEPS * FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, 4000)
    trainer = Trainer(recurrent_chain(layer), optimizer=Adam(), batch_size=1000, threads=1)
    order = rng.permutation(4000)
    trainer.train_epoch(x, y, order)
    smallest_activation = 1000 * CLASSES * 4
    tracemalloc.start()
    try:
        trainer.train_epoch(x, y, order)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        trainer.train_epoch(x, y, order)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
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


# Mistakes -------------------------------------------------------------------------------------------------


def test_nan_in_a_sample_names_step_and_input_and_keeps_the_parameters(batch):
    x, y = batch
    x[45, 3] = np.nan
    chain = recurrent_chain()
    reference = recurrent_chain()
    Trainer(reference, optimizer=SGD(0.1), batch_size=20, threads=1).train_epoch(x[:40], y[:40])
    with pytest.raises(NonFiniteError, match=r"step 2 of the epoch: the loss is nan: input 0 .* NaN"):
        Trainer(chain, optimizer=SGD(0.1), batch_size=20, threads=1).train_epoch(x, y)
    np.testing.assert_array_equal(chain.parameters.vector, reference.parameters.vector)


def test_an_overflow_names_the_first_op_and_layer(batch):
    x, y = batch
    chain = Chain(Dense(STEPS * FEATURES, 8, name="wide"), Activation("relu"), Dense(8, CLASSES, name="narrow"))
    chain.parameters.arrays["wide.weight"][...] = 1e30
    chain.parameters.arrays["narrow.weight"][...] = 1e30
    with pytest.raises(NonFiniteError, match=r"step 0 .* op 'matmul' in layer 'narrow' was the first"):
        Trainer(chain, batch_size=20, threads=1).train_epoch(x, y)


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
    with pytest.raises(ConfigurationError, match="new trainer"):
        trainer.train_epoch(*batch)
    Trainer(chain, threads=1).train_epoch(*batch)


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
