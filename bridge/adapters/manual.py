"""The networks of the papers, written by hand in numpy: no graph, no AD, no layers.

This is what a patient numpy programmer could reach, and so the line that shows what our engine's generality costs. Each
module trains one kind of network, with one loss and one optimizer: `bridge.adapters.manual_rnn`,
`bridge.adapters.manual_images` and `bridge.adapters.manual_text`; all other networks are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from threadpoolctl import ThreadpoolController

from bridge import linear_algebra, weights
from bridge.adapters.manual_images import ImageNetwork
from bridge.adapters.manual_kinds import check
from bridge.adapters.manual_rnn import RecurrentNetwork
from bridge.adapters.manual_text import TextNetwork
from bridge.checks import DataCheck, check_losses
from bridge.session import Evaluation, Optimizer
from bridge.spec import ModelSpec

__all__ = ["ManualSession"]

Array = NDArray[Any]

_EVALUATION_BATCH = 1000


class Network(Protocol):
    """A network with its parameters, and the buffers for every batch size seen so far."""

    params: list[Array]
    """In the order of the spec."""
    gradients: list[Array | None]
    """The same; None for what is not trained."""
    blas_threads: int

    def predict(self, x: Array, rows: NDArray[np.int64], out: Array) -> None:
        """Put the outputs for some rows of `x` into `out`."""
        ...

    def train(
        self, x: Array, y: Array, batches: Array, rate: float, losses: NDArray[np.float64], update: bool = True
    ) -> None:
        """One step for each row of `batches`, row numbers of `x`; the loss before each step goes to `losses`.

        Without `update` the parameters stay, and `gradients` holds the gradient, times `rate` where that is 1.
        """
        ...

    def close(self) -> None:
        """End the threads."""
        ...


_NETWORKS: Mapping[str, Callable[[ModelSpec, Optimizer, np.dtype[Any], int], Network]] = {
    "rnn": RecurrentNetwork,
    "image-cnn": ImageNetwork,
    "text-cnn": TextNetwork,
}


class ManualSession:
    """A `Session` for the networks of `bridge.adapters.manual_kinds`."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Array],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        threads: int = 1,
    ) -> None:
        kind = check(spec, optimizer, "manual")
        dtype = np.dtype(dtype)
        weights.check(params, spec, dtype)
        self._batch_size = batch_size
        self._learning_rate = optimizer.learning_rate
        self._steps = 0
        self._dtype, self._output = dtype, spec.output
        self._check = DataCheck(spec, dtype)
        self._names = list(spec.parameters())
        self._classes = kind.loss == "softmax_cross_entropy"
        self._network = _NETWORKS[kind.name](spec, optimizer, dtype, threads)
        for name, view in zip(self._names, self._network.params, strict=True):
            view[...] = params[name]
        self._limits = ThreadpoolController().limit(limits=self._network.blas_threads, user_api="blas")

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        x, y = self._check.batch(x, y)
        order = self._check.order(order, x)
        losses = np.empty(-(-len(order) // self._batch_size))
        full = len(order) // self._batch_size
        whole = order[: full * self._batch_size].reshape(full, self._batch_size)
        rest = order[full * self._batch_size :][None]
        with np.errstate(all="ignore"):  # what overflows shows in the losses
            for rows, part in ((whole, losses[:full]), (rest, losses[full:])):
                if rows.size:
                    self._network.train(x, y, rows, self._learning_rate, part)
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses

    def evaluate(self, x: Array, y: Array) -> Evaluation:
        """See `Session.evaluate`."""
        x, y = self._check.batch(x, y)
        logits = self._predict(x)
        if not self._classes:
            losses = np.maximum(logits, 0) - logits * y + np.log1p(np.exp(-np.abs(logits)))
            return Evaluation(float(losses.mean(dtype=np.float64)), float(np.mean((logits > 0) == (y > 0.5))))
        highest = logits.max(axis=1)
        sums = np.exp(logits - highest[:, None]).sum(axis=1, dtype=np.float64)
        of_label = np.take_along_axis(logits, y[:, None], axis=1)[:, 0]
        loss = float(np.mean(np.log(sums) + highest - of_label))
        return Evaluation(loss, float(np.mean(logits.argmax(axis=1) == y)))

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        return self._predict(self._check.features(x))

    def _predict(self, x: Array) -> Array:
        output = np.empty((len(x), *self._output), self._dtype)
        for start in range(0, len(x), _EVALUATION_BATCH):
            part = output[start : start + _EVALUATION_BATCH]
            self._network.predict(x, np.arange(start, start + len(part)), part)
        return output

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        x, y = self._check.batch(x, y)
        losses = np.empty(1)
        self._network.train(x, y, np.arange(len(x))[None], 1.0, losses, update=False)
        return float(losses[0]), self._copies(self._network.gradients)

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        return self._copies(self._network.params)

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return linear_algebra.of_numpy()

    def close(self) -> None:
        """See `Session.close`."""
        self._network.close()
        self._limits.restore_original_limits()

    def _copies(self, arrays: Sequence[Array | None]) -> dict[str, Array]:
        return {name: array.copy() for name, array in zip(self._names, arrays, strict=True) if array is not None}
