"""A resumed training draws the masks of the undisturbed one, whatever was asked of the trainer meanwhile."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from py_engine.ad.techniques import Techniques
from py_engine.errors import ConfigurationError, NonFiniteError, ParameterError
from py_engine.network import Adam, BatchNorm, Chain, Dense, Dropout, Layer, Trainer
from py_engine.network.layers import held_layers

ROWS, BATCH = 22, 8


@pytest.fixture
def data(rng):
    return rng.standard_normal((ROWS, 6)).astype(np.float32), rng.integers(0, 3, ROWS)


def new_chain():
    return Chain(Dense(6, 16, "relu"), Dropout(0.5), Dense(16, 8), Dropout(0.2), Dense(8, 3), seed=0)


def new_trainer(chain=None, threads=1, split=False):
    chain = new_chain() if chain is None else chain
    how = Techniques(split_batch=split)
    return Trainer(chain, batch_size=BATCH, threads=threads, optimizer=Adam(0.01), techniques=how)


def assert_resumes(trainer, resumed, data, before=lambda trainer: None):
    """Whether both train alike from here on, once what `before` does is done to the second one."""
    if resumed.chain is not trainer.chain:
        resumed.parameters.vector[...] = trainer.parameters.vector
    state, vector = trainer.state(), trainer.parameters.vector.copy()
    resumed.load_state(state)
    before(resumed)
    expected = [trainer.train_epoch(*data) for _ in range(2)], trainer.parameters.vector.copy()
    resumed.parameters.vector[...] = vector
    found = [resumed.train_epoch(*data) for _ in range(2)], resumed.parameters.vector.copy()
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(resumed.state()[name], array)
    trainer.close(), resumed.close()


@pytest.mark.parametrize(("threads", "split"), [(1, False), (2, True)])
def test_a_copy_of_a_chain_that_was_trained_resumes(data, threads, split):
    trainer = new_trainer(None, threads, split)
    trainer.train_epoch(*data)
    assert_resumes(trainer, new_trainer(copy.deepcopy(trainer.chain), threads, split), data)


def test_another_trainer_of_the_same_chain_resumes(data):
    trainer = new_trainer()
    trainer.train_epoch(*data)
    other = new_trainer(trainer.chain)
    other.train_epoch(*data)
    assert_resumes(trainer, other, data)


def test_trainers_of_a_chain_that_are_made_before_either_trains_draw_different_masks(data):
    chain = new_chain()
    first, second = new_trainer(chain), new_trainer(chain)
    before = chain.parameters.vector.copy()
    losses = first.train_epoch(*data)
    chain.parameters.vector[...] = before
    assert not np.array_equal(second.train_epoch(*data), losses)


class Held(Layer):
    """Three dropout layers side by side."""

    def __init__(self):
        super().__init__()
        self.first, self.others = Dropout(0.5), {"of": [Dropout(0.5), Dropout(0.5)]}

    def output_shape(self, input_shape):
        return (3 * input_shape[0],)

    def forward(self, x, parameters, training):
        return np.concatenate([d(x, {}, training) for d in (self.first, *self.others["of"])], axis=1)


def test_dropout_layers_that_a_layer_holds_draw_different_masks(data):
    masks = [Chain(Held())(np.ones((5, 40)), training=True).numpy() for _ in range(2)]
    np.testing.assert_array_equal(*masks)
    assert len({part.tobytes() for part in np.split(masks[0], 3, axis=1)}) == 3


@pytest.mark.parametrize(("threads", "split"), [(1, False), (2, True)])
def test_dropout_layers_that_a_layer_holds_resume(data, threads, split):
    def new():
        return new_trainer(Chain(Dense(6, 16, "relu"), Held(), Dense(48, 3), seed=0), threads, split)

    trainer = new()
    trainer.train_epoch(*data)
    assert {"dropout.held.first", "dropout.held.others.of.0", "dropout.held.others.of.1"} < set(trainer.state())
    assert_resumes(trainer, new(), data)


def test_a_dropout_layer_in_two_places_is_one():
    held, shared = Held(), Dropout(0.5)
    held.first = held.others["of"][0] = shared
    assert list(held_layers({"held": held}, Dropout)) == ["held.first", "held.others.of.1"]
    assert list(held_layers({"held": held, "again": shared}, Dropout)) == ["again", "held.others.of.1"]


def test_dropout_layers_that_a_chain_in_a_layer_holds_are_found_and_names_differ():
    held = Held()
    held.first, held.others = Chain(Dropout(0.5)), {1: Dropout(0.5), "1": Dropout(0.5)}
    assert list(held_layers({"held": held}, Dropout)) == ["held.first.dropout", "held.others.1", "held.others.1'"]


class Plain:
    """No layer, and holds some."""

    def __init__(self, **held):
        self.__dict__.update(held)

    def both(self):
        return list(self.__dict__.values())


class Bound(Plain):
    def all_of(self, _):
        return self.both()


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second


@dataclass
class Fields:
    first: Any
    second: Any


class Holds(Layer):
    """Calls two dropout layers that it holds in what is no layer."""

    def __init__(self, held, both):
        super().__init__()
        self.held, self.both = held, both

    def output_shape(self, input_shape):
        return (2 * input_shape[0],)

    def forward(self, x, parameters, training):
        return np.concatenate([d(x, {}, training) for d in self.both(self.held)], axis=1)


HOLDERS = {
    "an object": (["held.a", "held.b"], lambda a, b: (Plain(a=a, b=b), Plain.both)),
    "objects in objects": (
        ["held.a.a", "held.b.0.b"],
        lambda a, b: (Plain(a=Plain(a=a), b=[Plain(b=b)]), lambda h: (h.a.a, h.b[0].b)),
    ),
    "slots": (["held.first", "held.second"], lambda a, b: (Slotted(a, b), lambda h: (h.first, h.second))),
    "a dataclass": (["held.first", "held.second"], lambda a, b: (Fields(a, b), lambda h: (h.first, h.second))),
    "what a function captures": (["both.a", "both.b"], lambda a, b: (None, lambda _: (a, b))),
    "a method": (["both.self.a", "both.self.b"], lambda a, b: (None, Bound(a=a, b=b).all_of)),
    "a partial function": (["both.0", "both.b"], lambda a, b: (None, partial(lambda a, _, b: (a, b), a, b=b))),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_layers_in_what_is_no_layer_are_found(data, holder):
    names, make = HOLDERS[holder]

    def held():
        return Holds(*make(Dropout(0.5), Dropout(0.5)))

    assert list(held_layers({"holds": held()}, Dropout)) == [f"holds.{name}" for name in names]
    masks = np.split(Chain(held())(np.ones((5, 40)), training=True).numpy(), 2, axis=1)
    assert not np.array_equal(*masks)

    def new():
        return new_trainer(Chain(Dense(6, 16, "relu"), held(), Dense(32, 3), seed=0), 1, False)

    trainer = new()
    trainer.train_epoch(*data)
    assert {f"dropout.holds.{name}" for name in names} < set(trainer.state())
    assert_resumes(trainer, new(), data)
    coupled = Chain(Holds(*make(BatchNorm(3), BatchNorm(3))))
    assert coupled.couples_batch == f"holds.{names[0]}" and coupled.splits


def test_a_long_chain_of_objects_is_looked_through():
    last = inner = Plain(dropout=Dropout(0.5))
    for _ in range(5000):
        inner = Plain(inner=inner)
    assert list(held_layers({"holds": Holds(inner, None)}, Dropout).values()) == [last.dropout]


def test_several_layers_in_a_set_are_refused():
    assert len(held_layers({"holds": Holds({Dropout(0.5)}, list)}, Dropout)) == 1
    with pytest.raises(ConfigurationError, match="a set, which has no order"):
        Chain(Holds({Dropout(0.5), Dropout(0.5)}, list))


def probe(trainer, data, rows):
    trainer.loss_and_gradients(data[0][:rows], data[1][:rows])


@pytest.mark.parametrize("rows", [3, BATCH, ROWS])
def test_asking_for_gradients_of_any_batch_leaves_a_state_to_resume_from(data, rows):
    """Those of a batch of the trained size draw from the stream of the training, which the state then has."""
    trainer = new_trainer()
    probe(trainer, data, rows)
    trainer.train_epoch(*data)
    probe(trainer, data, rows)
    assert_resumes(trainer, new_trainer(), data)


@pytest.mark.parametrize("rows", [3, ROWS])
def test_asking_a_resumed_trainer_for_gradients_of_other_batches_changes_nothing(data, rows):
    trainer = new_trainer()
    trainer.train_epoch(*data)
    assert_resumes(trainer, new_trainer(), data, lambda resumed: probe(resumed, data, rows))


def test_asking_changes_nothing_for_a_size_that_trains_first_after_it(data):
    """Nor for one that does so once the training is resumed."""
    trainer, other = new_trainer(), new_trainer()
    for probed in (trainer, other):
        probed.train_epoch(data[0][: 2 * BATCH], data[1][: 2 * BATCH])
    resumed = new_trainer()
    resumed.parameters.vector[...] = other.parameters.vector
    resumed.load_state(other.state())
    probe(resumed, data, 5)
    probe(other, data, 7)
    found = [probed.train_epoch(*data) for probed in (trainer, other, resumed)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_a_copy_of_a_chain_that_was_called_for_other_reasons_begins_the_same_streams(data):
    trainer = new_trainer()
    trainer.train_epoch(data[0][:BATCH], data[1][:BATCH])
    probe(trainer, data, 3)
    resumed = new_trainer(copy.deepcopy(trainer.chain))
    resumed.load_state(trainer.state())
    found = [one.train_epoch(data[0][: BATCH - 1], data[1][: BATCH - 1]) for one in (trainer, resumed)]
    np.testing.assert_array_equal(found[0], found[1])


def train_rows(trainer, data, rows):
    return trainer.train_epoch(data[0][:rows], data[1][:rows])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [[6, ROWS], [3, 6, 3, ROWS], [5, BATCH, 6, 5]])
def test_a_resumed_training_may_train_its_batches_in_another_order(data, rows, shared):
    """Batches of 8 and then 6 rows train first; those of `rows`, some of them new, once the training is resumed."""
    trainer = new_trainer()
    trainer.train_epoch(*data)
    resumed = new_trainer(copy.deepcopy(trainer.chain) if shared else None)
    resumed.parameters.vector[...] = trainer.parameters.vector
    resumed.load_state(trainer.state())
    for count in rows:
        np.testing.assert_array_equal(train_rows(resumed, data, count), train_rows(trainer, data, count))


def test_a_trainer_that_has_trained_more_sizes_resumes_too(data):
    trainer, resumed = new_trainer(), new_trainer()
    train_rows(trainer, data, BATCH)
    for rows in (ROWS, 3):
        train_rows(resumed, data, rows)
    resumed.parameters.vector[...] = trainer.parameters.vector
    resumed.optimizer.load_state(trainer.optimizer.state())
    resumed.load_state(trainer.state())
    for rows in (3, ROWS):
        np.testing.assert_array_equal(train_rows(resumed, data, rows), train_rows(trainer, data, rows))


def test_gradients_of_a_trained_size_are_the_same_once_resumed(data):
    trainer, resumed = new_trainer(), new_trainer()
    trainer.train_epoch(*data)
    resumed.parameters.vector[...] = trainer.parameters.vector
    resumed.load_state(trainer.state())
    assert (
        trainer.loss_and_gradients(data[0][:6], data[1][:6])[0]
        == resumed.loss_and_gradients(data[0][:6], data[1][:6])[0]
    )
    np.testing.assert_array_equal(resumed.train_epoch(*data), trainer.train_epoch(*data))


def test_a_state_of_an_older_version_resumes_in_the_order_in_which_it_was_trained(data):
    trainer, resumed = new_trainer(), new_trainer()
    trainer.train_epoch(*data)
    state = {name: array[:, 2:] if name.startswith("dropout") else array for name, array in trainer.state().items()}
    resumed.parameters.vector[...] = trainer.parameters.vector
    resumed.load_state(state)
    for rows in (ROWS, 3, ROWS):
        np.testing.assert_array_equal(train_rows(resumed, data, rows), train_rows(trainer, data, rows))
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(resumed.state()[name], array)


def test_two_trainers_of_a_chain_draw_other_masks(data):
    chain = new_chain()
    before = chain.parameters.vector.copy()
    losses = []
    for _ in range(2):
        chain.parameters.vector[...] = before
        losses.append(new_trainer(chain).train_epoch(*data))
    assert (losses[0] != losses[1]).any()


def test_costs_and_a_new_plan_change_nothing(data):
    trainer = new_trainer()
    trainer.train_epoch(*data)

    def forgets(resumed):
        resumed.train_epoch(*data)
        resumed.load_state(state)
        resumed.costs()
        resumed.close()

    state = trainer.state()
    assert_resumes(trainer, new_trainer(), data, forgets)


def test_a_copy_that_others_have_traced_is_not_among_the_streams(data):
    trainer = new_trainer()
    other = new_trainer(trainer.chain)
    other.train_epoch(*data)
    trainer.train_epoch(*data)
    assert {len(array) for name, array in trainer.state().items() if name.startswith("dropout")} == {2}


@pytest.mark.parametrize("words", [np.zeros((2, 5), np.uint64), np.zeros((2, 6)), np.zeros(6, np.uint64)])
def test_what_is_no_state_of_streams_is_refused_and_changes_nothing(data, words):
    trainer = new_trainer()
    trainer.train_epoch(*data)
    state = trainer.state()
    before = {name: array.copy() for name, array in state.items()}
    (name, *_) = (name for name in state if name.startswith("dropout"))
    state[name] = words
    state["optimizer.steps"] = state["optimizer.steps"] + 1
    with pytest.raises(ParameterError, match="expected streams"):
        trainer.load_state(state)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, before[name])


class Square(Layer):
    """Overflows where a large number was kept."""

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        return x * x


@pytest.mark.parametrize(
    ("threads", "how"), [(1, Techniques()), (2, Techniques(split_batch=True)), (1, Techniques(batched=False))]
)
@pytest.mark.parametrize("row", [1, BATCH + 2, 2 * BATCH + 3, ROWS - 1])
def test_what_was_not_finite_is_found_with_the_masks_of_the_step(data, threads, how, row):
    x, y = data
    x = x.copy()
    x[row, 0] = 1e30
    steps = []
    for seed in range(12):
        chain = Chain(Dropout(0.5, seed=seed), Square(name="square"), Dense(6, 3), seed=0)
        with closing(Trainer(chain, batch_size=BATCH, threads=threads, techniques=how)) as trainer:
            trainer.train_epoch(*data)  # the masks are not the first ones
            try:
                trainer.train_epoch(x, y)
            except NonFiniteError as error:
                steps.append(str(error))
    expected = "op 'mul' in layer 'square' was the first to give NaN or Inf"
    if not how.batched and (row + 1) % BATCH and row != ROWS - 1:
        expected = "it arose in one sample of the batch before the last"
    assert all(expected in step for step in steps)
    assert 2 < len(steps) < 12, "some masks drop the number, some do not"
    assert all(f"step {row // BATCH + 1} of the epoch" in step for step in steps)
