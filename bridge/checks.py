"""What adapters check before they compute, and what they keep per array.

Every engine refuses the same data with the same words. Data is looked at once: an array that has passed isn't looked at
again as long as it is among the last few seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bridge.spec import ModelSpec, Shape, show
from py_engine.errors import DTypeError, LabelError, NonFiniteError, ShapeError

__all__ = ["DataCheck", "PerArray", "check_losses", "check_order"]

T = TypeVar("T")

_KEPT = 8
"""How many arrays a `PerArray` remembers: a train and a test set of features and targets, and the same once more."""


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
    """Checks features and targets against a spec, each array once; raises the errors that `Session` names."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any]) -> None:
        self._sample = spec.input.sample
        self._output = spec.output
        self._target = spec.target
        self._loss = spec.loss.op
        self._dtype = dtype
        self._features = PerArray(self._check_features)
        self._targets = PerArray(self._check_targets)

    def features(self, x: NDArray[Any]) -> None:
        """Check what the network reads."""
        self._features(x)

    def batch(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Check features and the targets that go with them."""
        self._features(x)
        self._targets(y)
        if len(x) != len(y):
            raise ShapeError(f"x has {len(x)} rows and y has {len(y)}: there must be one target for every row")

    def _check_features(self, x: NDArray[Any]) -> None:
        _check_array("x", x, self._dtype, [self._sample])

    def _check_targets(self, y: NDArray[Any]) -> None:
        if self._target.kind == "classes":
            _check_array("y", y, np.dtype(np.int64), [self._target.shape])
            self._check_range(y, 0, self._output[-1] - 1, f"the model has {self._output[-1]} classes, 0 to")
            return
        shapes = [self._target.shape, *([self._target.shape[:-1]] if self._target.shape[-1] == 1 else [])]
        _check_array("y", y, self._dtype, shapes)
        if self._loss == "binary_cross_entropy":
            self._check_range(y, 0, 1, "targets go from 0 to")

    def _check_range(self, y: NDArray[Any], low: int, high: int, expected: str) -> None:
        # One comparison that NaN fails too; the search for the first culprit is only made when there is one.
        if y.min() >= low and y.max() <= high:
            return
        wrong = np.flatnonzero(~((y >= low) & (y <= high)))
        row = int(np.unravel_index(wrong[0], y.shape)[0])
        more = f", the first of {len(wrong)} such labels" if len(wrong) > 1 else ""
        raise LabelError(f"label {y.flat[wrong[0]].item()!r} in row {row} of y{more}: {expected} {high}")


def _check_array(name: str, array: NDArray[Any], dtype: np.dtype[Any], samples: list[Shape]) -> None:
    if not isinstance(array, np.ndarray):
        raise DTypeError(f"{name}: expected a numpy array, found {type(array).__name__}")
    if array.shape[1:] not in samples or not array.ndim:
        expected = " or ".join(show(sample) for sample in samples)
        raise ShapeError(f"{name}: expected shape {expected}, found {array.shape}")
    if not len(array):
        raise ShapeError(f"{name} has no rows")
    if array.dtype != dtype:
        raise DTypeError(
            f"{name}: expected {dtype}, found {array.dtype}; convert it with {name}.astype({str(dtype)!r})"
        )
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name} isn't contiguous in C order; make it so with np.ascontiguousarray({name})")


def check_order(order: NDArray[Any], rows: int) -> NDArray[np.int64]:
    """`order` as contiguous int64, after a check that it names rows that are there."""
    if not isinstance(order, np.ndarray) or order.ndim != 1 or order.dtype.kind not in "iu":
        found = f"{order.dtype} of shape {order.shape}" if isinstance(order, np.ndarray) else type(order).__name__
        raise ShapeError(f"order: expected row numbers in one dimension, found {found}")
    if len(order) and not (order.min() >= 0 and order.max() < rows):
        wrong = int(order[(order < 0) | (order >= rows)][0])
        raise ShapeError(f"order names row {wrong}, but x has rows 0 to {rows - 1}")
    return np.ascontiguousarray(order, dtype=np.int64)


def check_losses(losses: NDArray[np.float64], steps_before: int) -> None:
    """Raise `NonFiniteError` for the first NaN or infinite loss of an epoch, `steps_before` steps into training."""
    wrong = np.flatnonzero(~np.isfinite(losses))
    if len(wrong):
        step = int(wrong[0])
        raise NonFiniteError(
            f"the loss became {losses[step]} at step {steps_before + step + 1} of training (step {step + 1} of "
            f"{len(losses)} in its epoch): lower the learning rate, limit the gradient with clip_norm, "
            "or look for NaN in the data"
        )
