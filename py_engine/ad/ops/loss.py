"""Losses, each the mean over the batch unless another reduction is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from py_engine.ad.op import (
    Call,
    Check,
    Op,
    Scratch,
    Shape,
    Tangents,
    all_below,
    as_tensor,
    as_tensors,
    c_ordered,
    check_op,
    define,
    here,
    no_gradient,
    per_element,
    total,
)
from py_engine.ad.ops.arguments import as_dtype, whole
from py_engine.ad.ops.elementary import astype, exp, greater, softplus, square, where
from py_engine.ad.ops.reduction import bind_subtract, log_softmax, logsumexp, mean, sum
from py_engine.ad.ops.shape import aligned, all_mapped, expand_dims, leading, reshape
from py_engine.ad.tensor import FLOATS, Array, Literal, Operand, Tensor
from py_engine.errors import ConfigurationError, DTypeError, LabelError, ShapeError

# Softmax cross-entropy ------------------------------------------------------------------------------------
#
# loss = mean(logsumexp(logits) - logits[label]). The logsumexp is a separate node, so that the gradient
# (softmax(logits) - one_hot(labels)) / n can be computed from it with one exp and no reduction; that gradient is
# a fused op, too. Its rule for `logits` is the total derivative, through the logsumexp as well.


def _label_places(labels: Array, classes: int, scratch: Scratch) -> tuple[Array, list[Call]]:
    """Return the place of each row's label in the flat logits, and the calls that check the labels and find it."""
    rows = np.arange(labels.size, dtype=np.intp) * classes
    places = scratch(rows.shape, np.intp)
    return places, [
        partial(_check_labels, labels, classes, here("softmax_cross_entropy")),
        partial(np.add, rows, labels.reshape(-1), places, casting="unsafe"),  # labels may be uint64
    ]


def _check_labels(labels: Array, classes: int, where: str, ignored: int | None = None) -> None:
    if all_below(labels, classes):
        return
    labels = labels.reshape(-1)
    wrong = np.flatnonzero(((labels < 0) | (labels >= classes)) & (ignored is None or labels != ignored))
    if not wrong.size:
        return
    row, but = int(wrong[0]), "" if ignored is None else f", nor {ignored}, which is ignored"
    raise LabelError(
        f"{where}: label {labels[row]} in row {row} is not one of the {classes} classes 0..{classes - 1}{but}"
    )


CHECK_LABELS = check_op("check_labels", _check_labels, leading)


def _labels_checked(logits: Tensor, labels: Tensor) -> Check:
    return CHECK_LABELS, (labels,), {"classes": logits.shape[-1], "of": "softmax_cross_entropy"}


def _infer_loss(logits: Tensor, lse: Tensor, labels: Tensor) -> tuple[Shape, Any]:
    _check_labels_shape(logits, labels)
    return (), logits.dtype


def _check_labels_shape(logits: Tensor, labels: Tensor) -> None:
    if logits.dtype not in FLOATS:
        raise DTypeError(f"expected float32 or float64 logits, got {logits.dtype}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DTypeError(f"expected integer labels, got {labels.dtype}")
    if not logits.shape or labels.shape != logits.shape[:-1]:
        raise ShapeError(f"logits of shape {logits.shape} need labels of shape {logits.shape[:-1]}, got {labels.shape}")


def _bind_loss(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    logits, lse, labels = arrays
    n = labels.size
    places, calls = _label_places(labels, logits.shape[-1], scratch)
    picked = scratch((n,), logits.dtype)
    if n == 0:
        return [partial(np.ndarray.fill, out, np.nan)]  # the mean of nothing
    weights = np.full(n, 1 / n, logits.dtype)
    return [
        *calls,
        partial(np.ndarray.take, logits.reshape(-1), places, 0, picked, "clip"),
        partial(np.subtract, lse.reshape(-1), picked, picked),
        partial(np.dot, weights, picked, out),
    ]


def _bind_gradient(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    g, logits, lse, labels = arrays
    n = labels.size
    places, calls = _label_places(labels, logits.shape[-1], scratch)
    flat = out.reshape(-1)
    picked, less = scratch((n,), logits.dtype), scratch((n,), logits.dtype)  # two: a single number, see _bind_shift
    one = np.ones((), logits.dtype)
    scale = scratch((), logits.dtype) if n > 1 else g  # of a single row the mean is itself
    return [
        *calls,
        *bind_subtract(logits, lse[..., np.newaxis], out),
        partial(np.exp, out, out),
        partial(np.ndarray.take, flat, places, 0, picked, "clip"),
        partial(np.subtract, picked, one, less),
        partial(np.ndarray.__setitem__, flat, places, less),
        *([partial(np.multiply, g, 1 / n, scale)] if n > 1 else []),
        partial(np.multiply, out, scale, out),
    ]


def _tangent(u: Tensor, g: Tensor, logits: Tensor, lse: Tensor, labels: Tensor) -> Tensor:
    # The derivative of exp(logits - lse) g / n with respect to logits (and minus that to lse), times u.
    return u * exp(logits - expand_dims(lse, -1)) * (g * (1 / max(math.prod(labels.shape), 1)))


def _gradient_jvp(t: Tangents, y: Tensor, g: Tensor, logits: Tensor, lse: Tensor, labels: Tensor) -> Tensor | None:
    terms = []
    if t[0] is not None:
        terms.append(t[0] * SOFTMAX_CROSS_ENTROPY_GRADIENT(Tensor(np.ones((), y.dtype)), logits, lse, labels))
    if t[1] is not None:
        terms.append(_tangent(t[1], g, logits, lse, labels))
    if t[2] is not None:
        terms.append(-_tangent(expand_dims(t[2], -1), g, logits, lse, labels))
    return total(terms)


def _batch_loss(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    logits, lse, labels = all_mapped(count, mapped, inputs)
    check, checked_inputs, check_attrs = _labels_checked(logits, labels)
    check.apply(checked_inputs, check_attrs)
    flat = reshape(logits, (labels.size, logits.shape[-1]))
    picked = flat[np.arange(labels.size), reshape(labels, (labels.size,))]
    samples = math.prod(labels.shape[1:])
    losses = sum(lse - reshape(picked, lse.shape), tuple(range(1, lse.ndim))) * (1 / max(samples, 1))
    return losses if samples else losses + math.nan  # the mean of nothing


def _batch_loss_gradient(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    g, *others = inputs
    logits, lse, labels = all_mapped(count, mapped[1:], others) if any(mapped[1:]) else others
    ones = Literal(np.asarray(max(labels.size, 1), logits.dtype))  # upstream, times the number of rows
    samples = math.prod(labels.shape[1:] if any(mapped[1:]) else labels.shape)
    factor = g * (1 / max(samples, 1))
    shape = inputs[1].ndim - mapped[1]
    return op(ones, logits, lse, labels) * (aligned(factor, shape) if mapped[0] else factor)


SOFTMAX_CROSS_ENTROPY: Op = define(
    name="softmax_cross_entropy",
    infer=_infer_loss,
    bind=_bind_loss,
    vjp=(
        lambda g, y, logits, lse, labels: SOFTMAX_CROSS_ENTROPY_GRADIENT(g, logits, lse, labels),
        no_gradient,  # the rule for the logits contains it
        no_gradient,
    ),
    jvp=lambda t, y, logits, lse, labels: sum(
        t[0] * SOFTMAX_CROSS_ENTROPY_GRADIENT(Tensor(np.ones((), y.dtype)), logits, lse, labels)
    ),
    batch=_batch_loss,
    accepts=c_ordered,
    checks=lambda logits, lse, labels: _labels_checked(logits, labels),
    flops=per_element(4),
    doc="mean of -log softmax(logits)[label]",
)
SOFTMAX_CROSS_ENTROPY_GRADIENT: Op = define(
    name="softmax_cross_entropy_gradient",
    infer=lambda g, logits, lse, labels: (logits.shape, logits.dtype),
    bind=_bind_gradient,
    vjp=(
        lambda u, y, g, logits, lse, labels: sum(
            u * SOFTMAX_CROSS_ENTROPY_GRADIENT(Tensor(np.ones((), y.dtype)), logits, lse, labels)
        ),
        lambda u, y, g, logits, lse, labels: _tangent(u, g, logits, lse, labels),
        lambda u, y, g, logits, lse, labels: -sum(_tangent(u, g, logits, lse, labels), -1),
        no_gradient,
    ),
    jvp=_gradient_jvp,
    batch=_batch_loss_gradient,
    accepts=c_ordered,
    checks=lambda g, logits, lse, labels: _labels_checked(logits, labels),
    flops=lambda g, logits, lse, labels: 4 * logits.size,
    doc="(softmax(logits) - one_hot(labels)) g / n",
)


# Labels as rows of zeros with a one, for what the fused ops do not compute.


def _infer_one_hot(labels: Tensor, classes: int, ignored: int | None, dtype: Any) -> tuple[Shape, Any]:
    if not np.issubdtype(labels.dtype, np.integer):
        raise DTypeError(f"expected integer labels, got {labels.dtype}")
    return (*labels.shape, classes), dtype


def _write_one_hot(labels: Array, out: Array, classes: int, ignored: int | None, where: str) -> None:
    _check_labels(labels, classes, where, ignored)
    np.equal(labels[..., np.newaxis], np.arange(classes), out=out, casting="unsafe")
    if ignored is not None:
        out[labels == ignored] = 0


def _bind_one_hot(
    arrays: Sequence[Array], out: Array, scratch: Scratch, classes: int, ignored: int | None, dtype: Any
) -> Sequence[Call]:
    return [partial(_write_one_hot, arrays[0], out, classes, ignored, here("one_hot"))]


ONE_HOT: Op = define(
    name="one_hot",
    infer=_infer_one_hot,
    bind=_bind_one_hot,
    constant=True,
    checks=lambda labels, classes, ignored, dtype: (
        CHECK_LABELS,
        (labels,),
        {"classes": classes, "ignored": ignored, "of": "one_hot"},
    ),
    flops=per_element(0),
    batch=leading,
    doc="for each label a row of zeros with a one at its class",
)


def one_hot(labels: Operand, classes: int, ignored: int | None = None, dtype: DTypeLike = np.float64) -> Tensor:
    """For each of the integer `labels` a row of zeros with a one at its class; of `ignored` ones zeros alone.

    Of labels (...) it is (..., classes).

    Raises:
        ShapeError: `classes` is less than 1.
        LabelError: a label is neither in [0, classes) nor `ignored`. So does every replay.
    """
    number = whole(classes, "one_hot: classes")
    if number < 1:
        raise ShapeError(f"one_hot: classes must be at least 1, got {number}")
    kept = None if ignored is None else whole(ignored, "one_hot: ignored")
    return ONE_HOT(as_tensor(labels), classes=number, ignored=kept, dtype=as_dtype(dtype))


def _check_weights(function: str, name: str, weight: Operand | None, of: Tensor) -> None:
    if weight is None:
        return
    shape = as_tensor(weight).shape
    given = (1,) * (of.ndim - len(shape)) + shape
    if len(given) > of.ndim or any(n not in (1, m) for n, m in zip(given, of.shape, strict=True)):
        raise ShapeError(f"{function}: {name} must broadcast to shape {of.shape}, got {shape}")


def _reduced(function: str, rows: Tensor, reduction: str, shares: Tensor | None = None) -> Tensor:
    """Return the mean of the rows, or with `shares` their sum by that of these; their sum; or themselves."""
    if reduction == "none":
        return rows
    if reduction == "sum":
        return sum(rows)
    if reduction != "mean":
        raise ConfigurationError(f"{function}: reduction must be mean, sum or none, got {reduction!r}")
    return mean(rows) if shares is None else sum(rows) / sum(shares)


def softmax_cross_entropy(
    logits: Operand,
    labels: Operand,
    weight: Operand | None = None,
    label_smoothing: float = 0.0,
    ignored: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy between softmax(logits) and integer labels.

    Args:
        logits: (..., classes), unnormalised log-probabilities.
        labels: (...), integers in [0, classes). Without the arguments below one-hot vectors are never built.
        weight: (classes,), by which the losses of each class count; a mean is by the sum of these.
        label_smoothing: the share of each label that all classes have in equal parts.
        ignored: a label, perhaps not in [0, classes), whose rows count nothing.
        reduction: "mean", "sum" or "none", for a loss for each label.

    Raises:
        LabelError: a label is out of range; names the first one and its row. So does every replay.
        ShapeError: the labels' shape is not (...), or the weights' not (classes,).
        DTypeError: the logits are not floats, or the labels not integers.
        ConfigurationError: an argument has no meaning.
    """
    logits, labels = as_tensor(logits), as_tensor(labels)
    _check_labels_shape(logits, labels)
    if not isinstance(label_smoothing, (int, float, np.number)) or not 0 <= label_smoothing <= 1:
        raise ConfigurationError(f"softmax_cross_entropy: label_smoothing must be from 0 to 1, got {label_smoothing!r}")
    smoothing = float(label_smoothing)
    ignored = None if ignored is None else whole(ignored, "softmax_cross_entropy: ignored")
    if weight is None and not smoothing and ignored is None and reduction == "mean":
        return SOFTMAX_CROSS_ENTROPY(logits, logsumexp(logits, -1), labels)
    classes = logits.shape[-1]
    hot = ONE_HOT(labels, classes=classes, ignored=ignored, dtype=logits.dtype)
    logs, shares = log_softmax(logits, -1), hot
    if weight is not None:
        _, by_class = as_tensors((logits, weight))
        if by_class.shape != (classes,):
            raise ShapeError(f"softmax_cross_entropy: expected weights ({classes},), got shape {by_class.shape}")
        logs, shares = logs * by_class, hot * by_class
    rows = -sum(where(greater(hot, 0), logs, 0), -1)
    if smoothing:
        spread = where(greater(sum(hot, -1), 0), -sum(logs, -1), 0)
        rows = (1 - smoothing) * rows + (smoothing / classes) * spread
    return _reduced("softmax_cross_entropy", rows, reduction, sum(shares, -1))


# Other losses ---------------------------------------------------------------------------------------------


def binary_cross_entropy(
    logits: Operand,
    targets: Operand,
    weight: Operand | None = None,
    positive_weight: Operand | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy between sigmoid(logits) and targets in [0, 1], of the same shape.

    Computed as t softplus(-x) + (1 - t) softplus(x): no term is negative, so that nothing cancels at large logits.

    Args:
        weight: by which each loss counts; broadcasts to the logits.
        positive_weight: by which the part of a loss for target 1 counts; broadcasts likewise.
        reduction: "mean", over all elements, "sum" or "none".

    Raises:
        ShapeError: logits and targets differ in shape, or weights do not broadcast.
        ConfigurationError: there is no such reduction.
    """
    logits, targets = as_tensors((logits, targets))
    if logits.shape != targets.shape:
        raise ShapeError(
            f"binary_cross_entropy: logits of shape {logits.shape} and targets of shape {targets.shape} differ"
        )
    _check_weights("binary_cross_entropy", "weight", weight, logits)
    _check_weights("binary_cross_entropy", "positive_weight", positive_weight, logits)
    if targets.dtype == np.bool_:
        targets = astype(targets, logits.dtype)
    positives = targets * softplus(-logits)
    if positive_weight is not None:
        positives = positives * positive_weight
    losses = positives + (1 - targets) * softplus(logits)
    return _reduced("binary_cross_entropy", losses if weight is None else losses * weight, reduction)


def mean_squared_error(
    predictions: Operand, targets: Operand, weight: Operand | None = None, reduction: str = "mean"
) -> Tensor:
    """Mean of (prediction - target)², over all elements; both of the same shape.

    Args:
        weight: by which each square counts; broadcasts to the predictions.
        reduction: "mean", over all elements, "sum" or "none".

    Raises:
        ShapeError: predictions and targets differ in shape, or the weight does not broadcast.
        ConfigurationError: there is no such reduction.
    """
    predictions, targets = as_tensors((predictions, targets))
    if predictions.shape != targets.shape:
        raise ShapeError(
            f"mean_squared_error: predictions of shape {predictions.shape} and targets of shape {targets.shape} differ"
        )
    _check_weights("mean_squared_error", "weight", weight, predictions)
    squares = square(predictions - targets)
    return _reduced("mean_squared_error", squares if weight is None else squares * weight, reduction)
