"""Losses: what a model is trained on, and what its targets must look like.

Each loss is a mean over all its targets, so that the loss of a batch is the mean of its shards' losses
weighted by their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from py_engine.ad import ops
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, LabelError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Loss:
    """One row of the table: called with a model's outputs and prepared targets, it gives the scalar loss.

    `prepare(outputs_shape, targets, dtype)` checks targets and turns them into what the loss takes; it raises
    `LabelError`. `counts_answers` says whether `metrics.accuracy` means something beside this loss.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    prepare: Callable[[Shape, NDArray[Any], np.dtype[Any]], NDArray[Any]]
    counts_answers: bool

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, a scalar tensor."""
        return self.function(outputs, targets)


def get(name: str) -> Loss:
    """The loss of that name, or a `ConfigurationError` that lists the names there are."""
    if name not in LOSSES:
        raise ConfigurationError(f"unknown loss {name!r}; there are: {', '.join(LOSSES)}")
    return LOSSES[name]


def check_targets(name: str, outputs_shape: Shape, targets: ArrayLike, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """`targets` as the loss `name` takes them: checked, C-contiguous, in the loss's own shape and dtype.

    `outputs_shape` is the model's (N, ...), `dtype` that of its outputs. Classes become int64; other targets
    become `dtype` in the shape of the outputs, a missing last axis of length 1 included. Targets that fit
    already are returned as they are, not copied.

    Raises `LabelError`, naming the first bad row, for labels that are not integers, that are out of range, or
    that are not as many as the outputs.
    """
    return get(name).prepare(outputs_shape, np.asarray(targets), np.dtype(dtype))


def _classes(outputs_shape: Shape, targets: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    loss = "softmax_cross_entropy"
    *expected, classes = outputs_shape
    if targets.dtype.kind not in "iu":
        raise LabelError(f"{loss}: expected integer labels, actual dtype {targets.dtype}")
    _check_shape(loss, targets, tuple(expected))
    if targets.size and (targets.min() < 0 or targets.max() >= classes):
        wrong = (targets < 0) | (targets >= classes)
        where = _first(wrong)
        raise LabelError(
            f"{loss}: expected labels from 0 to {classes - 1} (the model has {classes} outputs), "
            f"actual {targets[where]} in {_row(where)}; "
            f"{np.count_nonzero(wrong)} of {targets.size} are out of range"
        )
    return np.ascontiguousarray(targets, np.int64)


def _binary(outputs_shape: Shape, targets: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    loss = "binary_cross_entropy"
    values = _reals(loss, outputs_shape, targets, dtype)
    if values.size and not (values.min() >= 0 and values.max() <= 1):
        wrong = ~((values >= 0) & (values <= 1))
        where = _first(wrong)
        raise LabelError(
            f"{loss}: expected labels from 0 to 1, actual {values[where]} in {_row(where)}; "
            f"{np.count_nonzero(wrong)} of {values.size} are out of range"
        )
    return values


def _reals(loss: str, outputs_shape: Shape, targets: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Targets in the outputs' own shape and dtype.

    The shape is never broadcast: (N, 1) outputs against (N,) targets would silently become N × N differences.
    """
    if targets.dtype.kind not in "fiub":
        raise LabelError(f"{loss}: expected real numbers as targets, actual dtype {targets.dtype}")
    if (*targets.shape, 1) == outputs_shape:
        targets = targets[..., np.newaxis]
    _check_shape(loss, targets, outputs_shape)
    if targets.dtype.kind == "f" and not np.isfinite(targets).all():
        where = _first(~np.isfinite(targets))
        raise LabelError(f"{loss}: expected finite targets, actual {targets[where]} in {_row(where)}")
    return np.ascontiguousarray(targets, dtype)


def _check_shape(loss: str, targets: NDArray[Any], expected: Shape) -> None:
    if targets.shape != expected:
        raise LabelError(f"{loss}: expected targets of shape {expected}, actual {targets.shape}")


def _first(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(np.argmax(wrong), wrong.shape))


def _row(where: tuple[int, ...]) -> str:
    return f"row {where[0]}" + (f" at {list(where[1:])}" if len(where) > 1 else "")


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("softmax_cross_entropy", ops.softmax_cross_entropy, _classes, counts_answers=True),
        Loss("binary_cross_entropy", ops.binary_cross_entropy, _binary, counts_answers=True),
        Loss("mean_squared_error", ops.mean_squared_error, partial(_reals, "mean_squared_error"), counts_answers=False),
    )
}
