"""Values that an op does not accept are refused by every replay as they are eagerly."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import py_engine as pe
from py_engine import Techniques, Tensor, ops
from py_engine.ad.containers import flatten
from py_engine.ad.op import CHECKS, all_below
from py_engine.ad.ops.indexing import SCATTER
from py_engine.errors import EngineError, LabelError, ShapeError
from py_engine.network import Activation, Chain, Conv1D, Dense, Embedding, Flatten, MaxPool1D, PermuteDims, Trainer

N = 5
"""Classes, words and rows: integers in [0, N) are right."""


def labels_of(rng, shape):
    return (rng.standard_normal((*shape, N)), rng.integers(0, N, shape)), ops.softmax_cross_entropy, LabelError


def ids_of(rng, shape):
    return (rng.standard_normal((N, 3)), rng.integers(0, N, shape)), lambda w, i: ops.embedding(w, i), ShapeError


def padded_ids_of(rng, shape):
    return (rng.standard_normal((N, 3)), rng.integers(0, N, shape)), lambda w, i: ops.embedding(w, i, 2), ShapeError


def rows_of(rng, shape):
    call = lambda g, i: ops.embedding_gradient(g, i, N)  # noqa: E731
    return (rng.standard_normal((*shape, 3)), rng.integers(0, N, shape)), call, ShapeError


def index_of(rng, shape):
    return (rng.standard_normal((N, 3)), rng.integers(-N, N, shape)), lambda x, i: ops.getitem(x, i), ShapeError


def indices_of(rng, shape):
    call = lambda x, i: ops.getitem(x, (slice(None), 1, i))  # noqa: E731
    return (rng.standard_normal((2, 3, N)), rng.integers(-N, N, shape)), call, ShapeError


def scattered_of(rng, shape):
    call = lambda g, i: SCATTER(g, i, pattern=("array",), shape=(N,))  # noqa: E731
    return (rng.standard_normal(shape), rng.integers(-N, N, shape)), call, ShapeError


CHECKED = [labels_of, ids_of, padded_ids_of, rows_of, index_of, indices_of, scattered_of]
SHAPES = [(1,), (7,), (3, 4), (40, 60)]


def total(call):
    def f(x, i):
        with pe.scope("layer 3"):
            return np.sum(ops.square(call(x, i)))

    return f


def stacked_scan(f):
    return lambda x, i: pe.scan(lambda c, k: (c + f(x, k), None), 0.0, ops.stack([i, i]))[0]


REPLAYS = {
    "compiled": lambda f: pe.compile(f),
    "compiled gradient": lambda f: pe.compile(pe.grad(f)),
    "compiled value and gradient": lambda f: pe.compile(pe.value_and_grad(f)),
    "compiled forward mode": lambda f: pe.compile(lambda x, i: pe.jvp(lambda x: f(x, i), (x,), (x,))[1]),
    "compiled gradient of the gradient": lambda f: pe.compile(
        pe.grad(lambda x, i: np.sum(ops.square(pe.grad(f)(x, i))))
    ),
    "compiled scan": lambda f: pe.compile(stacked_scan(f)),
    "compiled gradient of a scan": lambda f: pe.compile(pe.grad(stacked_scan(f))),
    "compiled checkpoint": lambda f: pe.compile(pe.grad(pe.checkpoint(f))),
    "without buffers": lambda f: pe.compile(f, replace(Techniques(), preallocate=False)),
    "without simplification": lambda f: pe.compile(pe.grad(f), replace(Techniques(), simplify=False)),
    "scan": lambda f: stacked_scan(f),
    "gradient of a scan": lambda f: pe.grad(stacked_scan(f)),
}


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("make", CHECKED, ids=lambda make: make.__name__)
def test_every_replay_refuses_the_values_that_the_eager_call_refuses(make, replay, rng):
    for shape in SHAPES:
        (x, good), call, error = make(rng, shape)
        f = total(call)
        g = REPLAYS[replay](f)
        expected = g(x, good)
        for value in (-1, -N, -N - 1, N - 1, N, 2**40):
            bad = good.copy()
            bad[tuple(rng.integers(0, n) for n in shape)] = value
            message = ""
            try:
                f(Tensor(x), Tensor(bad))
            except EngineError as refused:
                assert isinstance(refused, error)
                message = str(refused)
            if message:
                with pytest.raises(error, match=rf"layer 3.*{value}"):
                    g(x, bad)
            else:
                g(x, bad)
        for again, first in zip(flatten(g(x, good))[0], flatten(expected)[0], strict=True):
            np.testing.assert_array_equal(again, first)  # a refused call leaves nothing behind


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("classes", [3, 130, 300])
def test_labels_of_every_integer_dtype_are_checked(dtype, classes, rng):
    logits = rng.standard_normal((4, classes))
    good = np.array([0, 1, 2, 2], dtype)
    replay = pe.compile(ops.softmax_cross_entropy)
    replay(logits, good)
    info = np.iinfo(dtype)
    for value in {info.min, -1, -100, classes, 200, info.max}:
        if not info.min <= value <= info.max:
            continue
        labels = good.copy()
        labels[2] = value
        for call in (ops.softmax_cross_entropy, replay):
            if 0 <= value < classes:
                call(logits, labels)
            else:
                with pytest.raises(LabelError, match=f"label {value} in row 2 is not one of the {classes} classes"):
                    call(logits, labels)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_a_check_of_a_batch_allocates_no_more_than_a_view(dtype):
    labels = np.arange(1000).astype(dtype) % N
    assert all_below(labels, N)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            all_below(labels, N)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 500, f"a check had {peak} bytes at once"


def test_no_element_of_nothing_is_refused():
    assert pe.compile(ops.softmax_cross_entropy)(np.ones((0, 3)), np.zeros(0, np.int64)).shape == ()
    assert pe.compile(ops.embedding)(np.ones((4, 3)), np.zeros((0, 2), np.int64)).shape == (0, 2, 3)


def test_captured_labels_and_ids_that_change_are_checked(rng):
    logits, labels = rng.standard_normal((6, N)), rng.integers(0, N, 6)
    weight, ids = rng.standard_normal((N, 2)), rng.integers(0, N, 6)
    loss = pe.compile(pe.grad(lambda x: ops.softmax_cross_entropy(x, labels)))
    rows = pe.compile(pe.grad(lambda w: np.sum(ops.embedding(w, ids) ** 2)))
    for function, x, array, error in ((loss, logits, labels, LabelError), (rows, weight, ids, ShapeError)):
        function(x)
        array[3] = -1
        with pytest.raises(error, match="-1 in row 3"):
            function(x)


def texts(*more):
    words = Embedding(11, 40, padding_index=0)
    layers = [words, PermuteDims(1, 0), Conv1D(40, 3, 3), Activation("relu"), MaxPool1D(8)]
    return Chain(*layers, Flatten(), Dense(6, 4), *more, dtype=np.float64)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("row", [3, 21], ids=["a whole batch", "the last one"])
def test_ids_that_change_after_the_trainer_checked_them_are_refused(row, threads, fuse, rng):
    x, y = rng.integers(0, 11, (23, 20)), rng.integers(0, 4, 23)
    techniques = replace(Techniques(), fuse=fuse, split_batch=threads > 1)
    trainer = Trainer(texts(), batch_size=10, threads=threads, techniques=techniques)
    trainer.train_epoch(x, y)
    for value in (-1, 11, -(2**40)):
        kept = x[row, 7]
        x[row, 7] = value
        with pytest.raises(ShapeError, match=f"token id {value} in row .* at position 7"):
            trainer.train_epoch(x, y)
        x[row, 7] = kept
    trainer.train_epoch(x, y)
    trainer.close()


# Checks of what no result needs ---------------------------------------------------------------------------


def beside(f):
    """The same checks, made for a value that the result does not depend on."""

    def g(x, i):
        f(x, i)
        return np.sum(ops.square(x))

    return g


def deep_beside(f):
    """The values that are checked are computed, from what nothing else needs."""

    def g(x, i):
        offset = ops.argmax(ops.stop_gradient(np.zeros(3)) * np.sum(x))  # 0
        f(x, i + offset.astype(i.dtype))
        return np.sum(ops.square(x))

    return g


def scans_beside(f):
    return lambda x, i: beside(lambda x, i: pe.scan(lambda c, k: (c + f(x, k), None), 0.0, ops.stack([i, i])))(x, i)


UNNEEDED = {
    **{name: lambda f, replay=replay: replay(beside(f)) for name, replay in REPLAYS.items()},
    "computed values": lambda f: pe.compile(deep_beside(f)),
    "a scan that is not needed": lambda f: pe.compile(scans_beside(f)),
    "a gradient beside such a scan": lambda f: pe.compile(pe.grad(scans_beside(f))),
    "a scan of checkpoints": lambda f: pe.compile(stacked_scan(pe.checkpoint(beside(f)))),
    "a scan in segments": lambda f: pe.compile(
        pe.grad(
            lambda x, i: pe.scan(lambda c, k: (c + beside(f)(x, k), None), 0.0, ops.stack([i, i, i, i]), checkpoint=2)[
                0
            ]
        )
    ),
    "an output that is dropped": lambda f: pe.compile(lambda x, i: (f(x, i), np.sum(x))[1]),
}


@pytest.mark.parametrize("replay", UNNEEDED)
@pytest.mark.parametrize("make", CHECKED, ids=lambda make: make.__name__)
def test_a_value_that_is_refused_eagerly_is_refused_where_no_result_needs_it(make, replay, rng):
    for shape in SHAPES[1:3]:
        (x, good), call, error = make(rng, shape)
        f = total(call)
        g = UNNEEDED[replay](f)
        expected = g(x, good)
        bad = good.copy()
        bad[tuple(rng.integers(0, n) for n in shape)] = 2**40
        with pytest.raises(error, match=rf"layer 3.*{2**40}"):
            f(Tensor(x), Tensor(bad))
        with pytest.raises(error, match=rf"layer 3.*{2**40}"):
            g(x, bad)
        for again, first in zip(flatten(g(x, good))[0], flatten(expected)[0], strict=True):
            np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("make", CHECKED, ids=lambda make: make.__name__)
def test_a_check_of_what_is_not_needed_computes_nothing_else_and_is_made_once(make, rng):
    (x, good), call, _ = make(rng, (7,))

    def ops_of(f):
        g = pe.compile(f)
        g(x, good)
        ((tape, _),) = g.tapes.values()
        return [step.equation.op.name for step in tape.steps]

    f = total(call)
    alone = ops_of(lambda x, i: np.sum(x))
    (check,) = set(ops_of(lambda x, i: (f(x, i), f(x * 2, i), np.sum(x))[2])) - {*alone}
    assert check.startswith("check_")
    assert ops_of(lambda x, i: (f(x * 2, i), f(x, i))[1]) == ops_of(f)  # what is needed checks the same
    assert ops_of(lambda x, i: pe.grad(f)(x, i)) == ops_of(lambda x, i: pe.value_and_grad(f)(x, i)[1])


class LooksUp(Activation):
    """A layer that looks words up, and whose result does not depend on them."""

    ids = np.array([0, 3, 1])

    def forward(self, x, parameters, training):
        ops.embedding(np.ones((4, 2)), self.ids)
        return super().forward(x, parameters, training)


@pytest.mark.parametrize("fuse", [True, False])
def test_the_trainer_checks_what_its_loss_does_not_need(fuse, rng):
    x, y = rng.integers(0, 11, (20, 20)), rng.integers(0, 4, 20)
    layer = LooksUp("relu", name="looks up")
    layer.ids = ids = LooksUp.ids.copy()
    trainer = Trainer(texts(layer), batch_size=10, techniques=replace(Techniques(), fuse=fuse))
    trainer.train_epoch(x, y)
    trainer.predict(x)
    ids[1] = 4
    for call in (lambda: trainer.train_epoch(x, y), lambda: trainer.predict(x)):
        with pytest.raises(ShapeError, match="layer 'looks up': token id 4 in row 1"):
            call()
    trainer.close()


@pytest.mark.parametrize("make", [labels_of, ids_of, padded_ids_of], ids=lambda make: make.__name__)
def test_a_tape_checks_an_array_once_for_all_ops(make, rng):
    (x, good), call, _ = make(rng, (7,))
    f = pe.compile(pe.value_and_grad(total(call)))
    f(x, good)
    ((tape, _),) = f.tapes.values()
    calls = [call.func for step in tape.steps for call in step.calls if isinstance(call, partial)]
    assert sum(function in CHECKS for function in calls) == 1
    assert sum(step.equation.op.checks is not None for step in tape.steps) == 2  # the op and its gradient


# What functions of numpy's names refuse ------------------------------------------------------------------------------

RANGE = "the range of bins"
REFUSED = {
    "average": (lambda x, w: np.average(x, weights=w), np.ones(3), np.zeros(3), "the weights sum to zero"),
    "cov, fweights": (lambda x, w: np.cov(x, fweights=w), np.arange(3.0), np.array([1, -1, 2]), "must not be negative"),
    "cov, aweights": (lambda x, w: np.cov(x, aweights=w), np.arange(3.0), np.zeros(3), "the weights sum to zero"),
    "cov, halves": (lambda x, w: np.cov(x, fweights=w), np.arange(3.0), np.full(3, 0.5), "must be whole numbers"),
    "histogram": (lambda x, b: np.histogram(x, bins=b)[0], np.arange(3.0), np.array([2.0, 0.0, 1.0]), "must not fall"),
    "histogram, range": (
        *(lambda x, r: np.histogram(x, 3, range=(r[0], r[1]))[0], np.arange(3.0), np.array([1.0, 0.0])),
        f"{RANGE} falls",
    ),
    "histogram, infinite": (lambda x, _: np.histogram(x, 3)[0], np.array([0.0, np.inf]), np.ones(1), RANGE),
    "digitize": (np.digitize, np.array([0.5]), np.array([0.0, 2.0, 1.0]), "must rise, or fall"),
    "quantile": (
        *(
            lambda x, w: np.quantile(x, 0.5, weights=w, method="inverted_cdf"),
            np.arange(3.0),
            np.array([1.0, -1.0, 1.0]),
        ),
        "none negative",
    ),
    "interp": (lambda x, p: np.interp(x, x, x, period=p), np.arange(3.0), np.zeros(()), "other than 0"),
    "geomspace": (lambda x, _: np.geomspace(x[0], 1.0, 3), np.zeros(2), np.ones(1), "cannot begin or end with zero"),
}
"""A call, two arguments of which it refuses the values, and the message."""


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_functions_of_numpy_s_names_refuse_are_refused_in_replays_and_by_vmap(name):
    call, x, other, message = REFUSED[name]
    with pytest.raises(EngineError, match=message):
        call(pe.tensor(x), other)
    with pytest.raises(EngineError, match=message):
        pe.compile(call)(x, other)
    with pytest.raises(EngineError, match=message):
        pe.vmap(call)(np.stack([x, x]), np.stack([other, other]))


def test_a_replay_refuses_values_that_its_trace_did_not_have():
    mean = pe.compile(lambda x, w: np.average(x, weights=w))
    assert mean(np.arange(3.0), np.ones(3)) == 1
    with pytest.raises(EngineError, match="average: the weights sum to zero"):
        mean(np.arange(3.0), np.zeros(3))
    places = pe.compile(np.digitize)
    for edges in ([0.0, 1.0, 2.0], [2.0, 1.0, 0.0]):
        np.testing.assert_array_equal(places(np.array([0.5, 1.5]), np.array(edges)), np.digitize([0.5, 1.5], edges))
    both = pe.vmap(np.digitize)(np.array([[0.5], [0.5]]), np.array([[0.0, 1.0], [1.0, 0.0]]))
    np.testing.assert_array_equal(both, [[1], [1]])
