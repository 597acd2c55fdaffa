"""Metrics that are collected over the batches of an epoch, in buffers that are made once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from py_engine.errors import ShapeError


class Mean:
    """A running mean in float64, such as the loss of an epoch, weighted by the samples in each batch."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._total = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count `value` with `weight`."""
        self._total += float(value) * weight
        self._weight += weight

    @property
    def value(self) -> float:
        """The mean so far; NaN before the first value."""
        return self._total / self._weight if self._weight else float("nan")


class Accuracy:
    """The share of right answers, over all batches added so far.

    What counts as an answer follows from the shapes. Logits ``(N, ..., classes)`` with integer labels ``(N,
    ...)``: the class with the largest logit, the first of equals. Logits of the labels' own shape, or with
    one unit more, ``(N, ..., 1)``: binary, 1 where the logit is above 0, and labels are 1 where they are
    above one half. A class `ignored` is a label that counts nothing.
    """

    def __init__(self, ignored: int | None = None) -> None:
        self.ignored = ignored
        self._answers: NDArray[Any] = np.empty(0, np.intp)
        self._right: NDArray[np.bool_] = np.empty(0, np.bool_)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the buffers."""
        self.right = 0
        self.count = 0

    def add(self, logits: NDArray[Any], labels: NDArray[Any]) -> None:
        """Count one batch. Raises `ShapeError` if `logits` and `labels` don't belong together."""
        if labels.size > self._right.size:
            self._answers = np.empty(labels.size, np.intp)
            self._right = np.empty(labels.size, np.bool_)
        right = self._right[: labels.size].reshape(labels.shape)
        if logits.shape in (labels.shape, (*labels.shape, 1)):
            answers = self._answers[: labels.size].view(np.bool_)[: labels.size].reshape(labels.shape)
            np.greater(logits.reshape(labels.shape), 0, out=answers)
            np.greater(labels, 0.5, out=right)
            np.equal(answers, right, out=right)
        elif logits.shape[:-1] == labels.shape:
            answers = self._answers[: labels.size].reshape(labels.shape)
            np.argmax(logits, axis=-1, out=answers)
            np.equal(answers, labels, out=right)
            if self.ignored is not None:
                kept = labels != self.ignored
                self.right += int(np.count_nonzero(right & kept))
                self.count += int(np.count_nonzero(kept))
                return
        else:
            raise ShapeError(
                f"accuracy: expected labels of shape {logits.shape[:-1]} (classes) or {logits.shape} "
                f"(binary) for logits of shape {logits.shape}, actual {labels.shape}"
            )
        self.right += int(np.count_nonzero(right))
        self.count += labels.size

    @property
    def value(self) -> float:
        """The share so far, 0 to 1; NaN before the first batch."""
        return self.right / self.count if self.count else float("nan")


def accuracy(logits: NDArray[Any], labels: NDArray[Any]) -> float:
    """The share of right answers in one batch, as `Accuracy` counts it."""
    metric = Accuracy()
    metric.add(np.asarray(logits), np.asarray(labels))
    return metric.value
