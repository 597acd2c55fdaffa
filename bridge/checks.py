"""What adapters check before they compute, what they keep per array, and what those of tensors share.

Every engine refuses the same data with the same words. An array is looked at once, and not again as long as it is among
the last few seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bridge.errors import SpecError
from bridge.layers import show
from bridge.session import Evaluation
from bridge.spec import ModelSpec
from py_engine.ad.ops.indexing import check_ids
from py_engine.ad.tensor import check_class
from py_engine.errors import ConfigurationError, DTypeError, LabelError, NonFiniteError, ShapeError
from py_engine.network import losses

__all__ = ["DataCheck", "EvaluationSum", "PerArray", "TensorSession", "check_chain", "check_known", "check_losses"]

T = TypeVar("T")
Array = NDArray[Any]

_KEPT = 8
"""How many arrays a `PerArray` remembers: a train and a test set of features and targets, and the same once more."""

_EVALUATION_BATCH = 1000


class PerArray(Generic[T]):
    """What `make` makes of an array, made once for each array object; the arrays are held so that none is mistaken."""

    def __init__(self, make: Callable[[NDArray[Any]], T], drop: Callable[[T], None] | None = None) -> None:
        self._make = make
        self._drop = drop
        self._known: OrderedDict[int, tuple[NDArray[Any], T]] = OrderedDict()

    def __call__(self, array: NDArray[Any]) -> T:
        """What was made of this array, now or before."""
        key = id(array)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key][1]
        made = self._make(array)
        self._known[key] = (array, made)
        if len(self._known) > _KEPT:
            _, (_, oldest) = self._known.popitem(last=False)
            if self._drop is not None:
                self._drop(oldest)
        return made


class DataCheck:
    """Checks data against a spec, and gives it as engines compute with it; raises the errors that `Session` names."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any]) -> None:
        self._spec = spec
        self._dtype = dtype
        self.loss = losses.get(spec.loss.op, **spec.loss.settings())
        """The numpy engine's loss, which knows how much targets count."""
        inputs = zip(spec.layers, (shape.input for shape in spec.shapes()), strict=True)
        least = [(layer, layer.least_rows(input)) for layer, input in inputs]
        self._least_rows = [(layer, rows) for layer, rows in least if rows > 1]
        self.features = PerArray(self._check_features)
        """What the network reads, contiguous in C order: numbers, or int64 token ids that the vocabulary has."""
        self.targets = PerArray(self._check_targets)
        """What the loss takes: int64 classes, or numbers in the shape and dtype of the network's output."""

    def batch(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Features, and the targets that go with them row by row."""
        features, targets = self.features(x), self.targets(y)
        if len(features) != len(targets):
            raise ShapeError(f"x has {len(x)} rows and y has {len(y)}: there must be one target for every row")
        return features, targets

    def order(self, order: NDArray[Any], x: NDArray[Any]) -> NDArray[np.int64]:
        """Row numbers of `x` as contiguous int64."""
        order = np.asarray(order)
        if order.ndim != 1 or order.dtype.kind not in "iu" or not len(order):
            raise ShapeError(f"order: expected one or more row numbers, found {order.dtype} of shape {order.shape}")
        if order.min() < 0 or order.max() >= len(x):
            wrong = order[(order < 0) | (order >= len(x))]
            raise ShapeError(f"order names row {wrong[0]}, but x has rows 0 to {len(x) - 1}")
        return np.ascontiguousarray(order, dtype=np.int64)

    def batches(self, rows: int, batch_size: int) -> None:
        """Raise `ConfigurationError` where one of the batches that `rows` are cut into can't be trained on."""
        smallest = rows % batch_size or batch_size
        for layer, least in self._least_rows:
            if smallest < least:
                raise ConfigurationError(
                    f"layer {layer.id!r} ({layer.op}) needs {least} rows or more in a batch, and {rows} rows in "
                    f"batches of {batch_size} leave a batch of {smallest}: choose another batch size, or leave rows out"
                )

    def _check_features(self, x: NDArray[Any]) -> NDArray[Any]:
        if not isinstance(x, np.ndarray):
            raise DTypeError(
                f"x: expected a numpy array, found {type(x).__name__}; convert it with np.asarray(x, np.{self._dtype})"
            )
        check_class(x)
        if x.ndim == 0 or x.shape[1:] != self._spec.input.sample:
            raise ShapeError(f"x: expected shape {show(self._spec.input.sample)}, found {x.shape}")
        if not len(x):
            raise ShapeError("x has no rows")
        if self._spec.vocabulary is not None:
            return self._check_tokens(x, self._spec.vocabulary)
        if x.dtype != self._dtype:
            raise DTypeError(f"x: expected {self._dtype}, found {x.dtype}; convert it with x.astype(np.{self._dtype})")
        return np.require(x, requirements=["C_CONTIGUOUS", "ALIGNED"])

    def _check_tokens(self, x: NDArray[Any], vocabulary: int) -> NDArray[Any]:
        if x.dtype.kind not in "iu":
            raise DTypeError(f"x: expected token ids (int64), found {x.dtype}; convert them with x.astype(np.int64)")
        check_ids(x, vocabulary, "x")
        return np.require(x, np.int64, ["C_CONTIGUOUS", "ALIGNED"])

    def _check_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        if np.ndim(y) == 0:
            raise LabelError(f"y: expected one target for every row, found {y!r}")
        check_class(y)
        return losses.check_targets(self.loss, (len(y), *self._spec.output), y, self._dtype)


class EvaluationSum:
    """Mean loss and share of right answers, added up over parts of the data; what is ignored counts in neither."""

    def __init__(self, loss: losses.Loss) -> None:
        self._loss = loss
        self._total = self._weight = self._right = 0.0
        self._answers = 0

    def add(self, targets: NDArray[Any], loss: float, right: float) -> None:
        """Count a part with these targets: its mean loss, and how many of its answers are right."""
        if weight := self._loss.weight(targets):
            self._total += loss * weight
            self._weight += weight
        self._right += right
        self._answers += self._loss.answers(targets)

    def result(self) -> Evaluation:
        """Both so far; NaN where nothing counts."""
        loss = self._total / self._weight if self._weight else float("nan")
        return Evaluation(loss, self._right / self._answers if self._answers else float("nan"))


class TensorSession:
    """What sessions of frameworks with tensors have in common.

    Data become tensors once for each array, and what is not training goes through the network in parts.
    """

    _train_rows: Callable[[Any, Any, NDArray[np.int64]], NDArray[np.float64]]
    """Trains on rows of features and targets in this order; the loss of each batch."""
    _evaluate: Callable[[Any, Any], tuple[Any, Any]]
    """The mean loss of features and targets, and how many answers are right."""
    _apply: Callable[[Any], Any]
    """The network's outputs for features, as an array or something that numpy converts to one."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any], batch_size: int, tensor: Callable[[Array], Any]) -> None:
        self._batch_size = batch_size
        self._steps = 0
        self._check = DataCheck(spec, dtype)
        self._tensors = PerArray(tensor)

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        features, targets = self._batch(x, y)
        rows = self._check.order(order, x)
        self._check.batches(len(rows), self._batch_size)
        losses = self._train_rows(features, targets, rows)
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses

    def evaluate(self, x: Array, y: Array) -> Evaluation:
        """See `Session.evaluate`."""
        features, targets = self._batch(x, y)
        checked, sums = self._check.targets(y), EvaluationSum(self._check.loss)
        for part in _parts(x):
            loss, right = self._evaluate(features[part], targets[part])
            sums.add(checked[part], float(loss), float(right))
        return sums.result()

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        features = self._tensors(self._check.features(x))
        return np.concatenate([self._apply(features[part]) for part in _parts(x)])

    def close(self) -> None:
        """See `Session.close`: there is nothing that isn't freed with the session."""

    def _batch(self, x: Array, y: Array) -> tuple[Any, Any]:
        features, targets = self._check.batch(x, y)
        return self._tensors(features), self._tensors(targets)


def _parts(x: Array) -> list[slice]:
    return [slice(start, start + _EVALUATION_BATCH) for start in range(0, len(x), _EVALUATION_BATCH)]


def check_known(
    spec: ModelSpec, optimizer: str, engine: str, layers: Collection[str], optimizers: Collection[str]
) -> None:
    """Raise for what an engine's adapter has no counterpart of: `SpecError` for a layer, else `ConfigurationError`.

    `layers` and `optimizers` are the names of those that it has; layers may read any before them.
    """
    for index, layer in enumerate(spec.layers):
        if layer.op not in layers:
            problem = f'layers[{index}] (id "{layer.id}"): the engine {engine} has no {layer.op}'
            raise SpecError(f'the model "{spec.name}"', [problem])
    if optimizer not in optimizers:
        raise ConfigurationError(f"the engine {engine} has no optimizer {optimizer}; it has {', '.join(optimizers)}")


def check_chain(spec: ModelSpec, engine: str) -> None:
    """Raise `SpecError` for the first layer that names its inputs, of an engine that has chains of layers alone."""
    for index, layer in enumerate(spec.layers):
        if layer.inputs:
            found = f'layers[{index}] (id "{layer.id}").inputs: the engine {engine} has no layer with inputs'
            raise SpecError(f'the model "{spec.name}"', [f"{found}, each reads the one before it"])


def check_rates(rates: NDArray[np.float64], steps: int) -> None:
    """Raise for learning rates of another number than that of the steps, and for one that is none."""
    if rates.shape != (steps,):
        raise ShapeError(f"expected a learning rate for each of {steps} steps, found shape {rates.shape}")
    if not (np.isfinite(rates) & (rates >= 0)).all():
        raise ConfigurationError(f"learning rates must be finite numbers >= 0, found {rates}")


def check_losses(found: NDArray[np.float64], steps_before: int) -> None:
    """Raise `NonFiniteError` for the first NaN or infinite loss of an epoch, `steps_before` steps into training."""
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        step = int(wrong[0])
        raise NonFiniteError(
            f"the loss became {found[step]} at step {steps_before + step + 1} of training (step {step + 1} of "
            f"{len(found)} in its epoch): lower the learning rate, limit the gradient with clip_norm, "
            "or look for NaN in the data"
        )
