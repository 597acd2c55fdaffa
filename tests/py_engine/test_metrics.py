"""Accuracy and running means."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from py_engine.errors import ShapeError
from py_engine.network.metrics import Accuracy, Mean, accuracy


def test_mean_is_weighted_by_batch_size():
    mean = Mean()
    mean.add(1.0, weight=100)
    mean.add(4.0, weight=50)
    assert mean.value == pytest.approx(2.0)
    mean.reset()
    assert math.isnan(mean.value)


def test_classes_are_decided_by_the_largest_logit_and_ties_by_the_first():
    logits = np.array([[0.0, 2.0, 1.0], [5.0, 5.0, 1.0], [0.0, 0.0, 1.0]], np.float32)
    assert accuracy(logits, np.array([1, 0, 0])) == pytest.approx(2 / 3)


def test_every_step_of_a_sequence_counts():
    logits = np.zeros((2, 3, 4))
    logits[..., 2] = 1
    assert accuracy(logits, np.array([[2, 2, 0], [2, 1, 0]])) == pytest.approx(3 / 6)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_binary_answers_are_positive_logits(shape, dtype):
    logits = np.array([-1.0, 2.0, 0.0, 3.0], np.float32).reshape(shape)
    assert accuracy(logits, np.array([0, 1, 0, 0], dtype)) == 0.75


def test_one_class_column_with_labels_of_its_own_shape():
    assert accuracy(np.array([[-1.0], [1.0]]), np.array([[0], [1]])) == 1.0


def test_batches_of_different_sizes_accumulate():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(250, 10))
    labels = generator.integers(10, size=250)
    metric = Accuracy()
    for part in (slice(0, 100), slice(100, 200), slice(200, 250)):
        metric.add(logits[part], labels[part])
    assert metric.count == 250
    assert metric.value == np.mean(logits.argmax(axis=1) == labels)


def test_shapes_that_do_not_belong_together_are_an_error():
    with pytest.raises(ShapeError, match=r"expected labels of shape \(5,\).*actual \(4,\)"):
        accuracy(np.zeros((5, 3)), np.zeros(4, np.int64))


def test_no_buffers_are_allocated_after_the_first_batch():
    logits = np.zeros((10_000, 10), np.float32)
    labels = np.zeros(10_000, np.int64)
    metric = Accuracy()
    metric.add(logits, labels)
    peaks = []
    for _ in range(3):  # the least: a table of Python's may grow meanwhile
        tracemalloc.start()
        metric.add(logits, labels)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < 5_000


def test_no_batches_have_no_accuracy():
    assert math.isnan(Accuracy().value)
