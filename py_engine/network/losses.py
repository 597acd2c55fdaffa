"""Losses: what a model is trained on, and what its targets must look like.

Each loss is a mean over all its targets, so that the loss of a batch is the mean of its shards' losses
weighted by their sizes. Where targets count by weights, or not at all, the mean is by the sum of the weights of the
whole batch, which its shards add up (`couples_batch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from py_engine.ad import ops
from py_engine.ad.ops.arguments import is_real, is_whole
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, LabelError
from py_engine.network.batch_sums import sum_of_parts

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Loss:
    """One row of the table: called with a model's outputs and prepared targets, it gives the scalar loss.

    `prepare(outputs_shape, targets, dtype, **settings)` checks targets and turns them into what the loss takes, an
    array with a row for each; it raises `LabelError`. `counts_answers` says whether `metrics.accuracy` means something
    beside this loss. `settings` are those that were given, by name; see `get`. `is_mean` says whether it is a mean over
    the targets, so that the loss of a batch is that of its parts, weighted by their sizes: only then threads or
    processes compute parts of a batch.
    """

    name: str
    function: Callable[..., Tensor]
    prepare: Callable[..., NDArray[Any]]
    counts_answers: bool
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_mean: bool = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, a scalar tensor."""
        return self.function(outputs, targets, **self.settings)

    @property
    def couples_batch(self) -> bool:
        """Whether its mean is by the weights of a whole batch's targets, not by their number."""
        weighs = not {"class_weights", "ignored_class"}.isdisjoint(self.settings)
        return weighs and self.function is _softmax_cross_entropy

    @property
    def ignored_class(self) -> int | None:
        """The target that counts nothing, or None."""
        return self.settings.get("ignored_class")

    def weight(self, targets: NDArray[Any]) -> float:
        """By how much the mean over these prepared targets counts beside the mean over others."""
        if not self.couples_batch:
            return float(len(targets))
        kept = targets if self.ignored_class is None else targets[targets != self.ignored_class]
        weights = self.settings.get("class_weights")
        return float(kept.size if weights is None else np.sum(np.asarray(weights)[kept]))

    def answers(self, targets: NDArray[Any]) -> int:
        """How many of these prepared targets are not ignored."""
        return targets.size if self.ignored_class is None else int(np.count_nonzero(targets != self.ignored_class))


def get(loss: str | Loss, **settings: Any) -> Loss:
    """The loss of that name with these settings; a `Loss`, which has its settings, is returned as it is.

    Args:
        loss: a name from `LOSSES`.
        class_weights: of softmax_cross_entropy: how much the loss of each class counts.
        label_smoothing: of softmax_cross_entropy: the share of each label that all classes have in equal parts.
        ignored_class: of softmax_cross_entropy: a label, perhaps not a class, that counts nothing.
        positive_weight: of binary_cross_entropy: how much the part of a loss for target 1 counts.

    Raises:
        ConfigurationError: another name, a setting that the loss has not, or a value that it does not take; settings of
            a `Loss`.
    """
    if isinstance(loss, Loss):
        if settings:
            raise ConfigurationError(
                f"{loss.name}: this Loss has its settings ({dict(loss.settings) or 'none'}), and no others are added "
                f"({', '.join(settings)}): give its name with all of them"
            )
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ConfigurationError(f"unknown loss {loss!r}; there are: {', '.join(LOSSES)}")
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in _SETTINGS.get(loss, {}):
            known = ", ".join(_SETTINGS.get(loss, {})) or "none"
            raise ConfigurationError(f"{loss}: there is no setting {name!r}; there are: {known}")
        check, expected = _SETTINGS[loss][name]
        if value is None:
            continue
        if not check(value):
            raise ConfigurationError(f"{loss}: {name} must be {expected}, actual {value!r}")
        found[name] = tuple(float(weight) for weight in value) if name == "class_weights" else value
    return replace(LOSSES[loss], settings=found)


def _is_number(value: Any, least: float, most: float = math.inf) -> bool:
    return is_real(value) and least <= value <= most and math.isfinite(value)


def _are_weights(value: Any) -> bool:
    if isinstance(value, Mapping | Set):  # lists of their keys, or in an order that is not the classes'
        return False
    try:
        weights = list(value)
    except TypeError:
        return False
    return all(_is_number(weight, 0) for weight in weights) and any(weights)


_SETTINGS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "softmax_cross_entropy": {
        "class_weights": (_are_weights, "finite numbers >= 0 in the order of the classes, not all of them 0"),
        "label_smoothing": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
        "ignored_class": (is_whole, "a whole number"),
    },
    "binary_cross_entropy": {
        "positive_weight": (lambda value: _is_number(value, 0) and value > 0, "a finite number > 0"),
    },
}
"""For each setting a check of values, and what they must be."""


def _softmax_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    class_weights: tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
    ignored_class: int | None = None,
) -> Tensor:
    if class_weights is None and ignored_class is None:
        return ops.softmax_cross_entropy(logits, labels, label_smoothing=label_smoothing)
    weight = None if class_weights is None else np.array(class_weights, logits.dtype)
    total = ops.softmax_cross_entropy(logits, labels, weight, label_smoothing, ignored_class, "sum")
    hot = ops.one_hot(labels, logits.shape[-1], ignored_class, logits.dtype)
    return total / sum_of_parts(ops.sum(hot if weight is None else hot * weight))


def check_targets(
    loss: str | Loss, outputs_shape: Shape, targets: ArrayLike, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """`targets` as a loss takes them: checked, C-contiguous, in the loss's own shape and dtype.

    `outputs_shape` is the model's (N, ...), `dtype` that of its outputs. Classes become int64; other targets
    become `dtype` in the shape of the outputs, a missing last axis of length 1 included. Targets that fit
    already are returned as they are, not copied.

    Raises `LabelError`, naming the first bad row, for labels that are not integers, that are out of range and not
    ignored, or that are not as many as the outputs.
    """
    found = get(loss)
    given = np.asarray(targets)
    prepared = found.prepare(outputs_shape, given, np.dtype(dtype), **found.settings)
    if not isinstance(prepared, np.ndarray) or prepared.shape[:1] != given.shape[:1]:
        kind = f"shape {prepared.shape}" if isinstance(prepared, np.ndarray) else type(prepared).__name__
        raise LabelError(
            f"{found.name}: of targets of shape {given.shape} prepare made {kind}, not an array of as many"
        )
    return prepared


def _classes(
    outputs_shape: Shape,
    targets: NDArray[Any],
    dtype: np.dtype[Any],
    class_weights: tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
    ignored_class: int | None = None,
) -> NDArray[Any]:
    loss = "softmax_cross_entropy"
    *expected, classes = outputs_shape
    if classes < 2:
        raise ConfigurationError(
            f"{loss}: expected a model with 2 outputs or more, one for each class, actual {classes}; "
            "for a single logit there is binary_cross_entropy"
        )
    if class_weights is not None and len(class_weights) != classes:
        raise ConfigurationError(
            f"{loss}: expected class_weights for {classes} classes, which the model has, actual {len(class_weights)}"
        )
    if targets.dtype.kind not in "iu":
        raise LabelError(f"{loss}: expected integer labels, actual dtype {targets.dtype}")
    _check_shape(loss, targets, tuple(expected))
    if targets.size and (targets.min() < 0 or targets.max() >= classes):
        wrong = (targets < 0) | (targets >= classes)
        if ignored_class is not None:
            wrong &= targets != ignored_class
        if wrong.any():
            where = _first(wrong)
            ignored = "" if ignored_class is None else f", or {ignored_class}, which is ignored"
            raise LabelError(
                f"{loss}: expected labels from 0 to {classes - 1} (the model has {classes} outputs){ignored}, "
                f"actual {targets[where]} in {_row(where)}; "
                f"{np.count_nonzero(wrong)} of {targets.size} are out of range"
            )
    return np.ascontiguousarray(targets, np.int64)


def _binary(
    outputs_shape: Shape, targets: NDArray[Any], dtype: np.dtype[Any], positive_weight: float | None = None
) -> NDArray[Any]:
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
        Loss("softmax_cross_entropy", _softmax_cross_entropy, _classes, counts_answers=True, is_mean=True),
        Loss("binary_cross_entropy", ops.binary_cross_entropy, _binary, counts_answers=True, is_mean=True),
        Loss(
            "mean_squared_error",
            ops.mean_squared_error,
            partial(_reals, "mean_squared_error"),
            counts_answers=False,
            is_mean=True,
        ),
    )
}
