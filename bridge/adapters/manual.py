"""The recurrent network of the papers mnist-rnn-d and -e, written by hand in numpy: no graph, no AD, no layers.

This is what a patient numpy programmer could reach, and so the line that shows what our engine's generality costs. It
trains one kind of network, with one loss and plain gradient descent, and refuses all others. How it gains its speed:

- Every array that a step touches is made once for each batch size and written with ``out=``.
- Samples are gathered time step by time step, so that each step's states are one contiguous block, the products of all
  steps with `weight` are one product, and so are their gradients and that of `recurrent`.
- Logits lie with classes first: maxima and sums over classes then run along whole rows of samples.
- Sums over samples are products with ones, several times faster than numpy's own sums over the first axis.
- The learning rate is part of the loss's gradient, so that what comes out at the end is the update itself; all
  parameters are one vector, and the update one subtraction.
- What the losses need is kept for every step, and their logarithms are taken once at the end of the epoch.

One Python thread, with BLAS using `threads` threads, was faster than splitting the batch between Python threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from threadpoolctl import ThreadpoolController

from bridge import weights
from bridge.checks import DataCheck, check_losses
from bridge.engine import Evaluation, Optimizer
from bridge.errors import SpecError
from bridge.spec import RNN, Dense, ModelSpec, Reshape
from py_engine.errors import ConfigurationError

__all__ = ["ManualSession", "check_optimizer", "check_spec"]

Array = NDArray[Any]

_EVALUATION_BATCH = 1000


class ManualSession:
    """A `Session` for reshape, rnn (tanh, returns last), dense with softmax_cross_entropy and plain sgd."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Array],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        threads: int = 1,
    ) -> None:
        check_spec(spec)
        check_optimizer(optimizer)
        dtype = np.dtype(dtype)
        weights.check(params, spec, dtype)
        self._batch_size = batch_size
        self._learning_rate = optimizer.learning_rate
        self._steps = 0
        self._check = DataCheck(spec, dtype)
        self._shapes = {name: parameter.shape for name, parameter in spec.parameters().items()}
        self._names = list(self._shapes)
        self._network = _Network(spec, dtype)
        for name, view in zip(self._names, self._network.params, strict=True):
            view[...] = params[name]
        self._limits = ThreadpoolController().limit(limits=threads, user_api="blas")

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
        highest = logits.max(axis=1)
        sums = np.exp(logits - highest[:, None]).sum(axis=1, dtype=np.float64)
        of_label = np.take_along_axis(logits, y[:, None], axis=1)[:, 0]
        loss = float(np.mean(np.log(sums) + highest - of_label))
        return Evaluation(loss, float(np.mean(logits.argmax(axis=1) == y)))

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        return self._predict(self._check.features(x))

    def _predict(self, x: Array) -> Array:
        output = np.empty((len(x), *self._shapes[self._names[-1]]), x.dtype)
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

    def close(self) -> None:
        """See `Session.close`."""
        self._limits.restore_original_limits()

    def _copies(self, arrays: list[Array]) -> dict[str, Array]:
        return {name: array.copy() for name, array in zip(self._names, arrays, strict=True)}


class _Network:
    """Parameters, gradients and the buffers for every batch size seen so far."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any]) -> None:
        shapes = [parameter.shape for parameter in spec.parameters().values()]
        (self.features, self.units), self.classes = shapes[0], shapes[-1][0]
        self.times = math.prod(spec.input.sample) // self.features
        self.dtype = dtype
        self.vector, self.params = _flat(shapes, dtype)
        self.gradient, self.gradients = _flat(shapes, dtype)
        self._one_hot = np.eye(self.classes, dtype=dtype)
        self._buffers: dict[int, _Buffers] = {}

    def predict(self, x: Array, rows: NDArray[np.int64], logits: Array) -> None:
        weight, recurrent, bias, output_weight, output_bias = self.params
        b = self._buffers_for(len(rows))
        b.forward(x.reshape(-1, self.features), rows, weight, recurrent, bias)
        np.matmul(b.states[-1], output_weight, out=logits)
        np.add(logits, output_bias, out=logits)

    def train(
        self, x: Array, y: Array, batches: Array, rate: float, losses: NDArray[np.float64], update: bool = True
    ) -> None:
        """One step for each row of `batches`, row numbers of `x`; the loss before each step goes to `losses`.

        Without `update` the parameters stay, and `gradients` holds `rate` times the gradient.
        """
        weight, recurrent, bias, output_weight, output_bias = self.params
        d_weight, d_recurrent, d_bias, d_output_weight, d_output_bias = self.gradients
        vector, gradient, one_hot = self.vector, self.gradient, self._one_hot
        output_weight_t, recurrent_t, output_bias_column = output_weight.T, recurrent.T, output_bias[:, None]
        steps, size = batches.shape
        b = self._buffers_for(size)
        forward, states, slopes, errors = b.forward, b.all_states, b.all_slopes, b.all_errors
        slope, error, d_state, recurrent_t_copy = list(b.slopes), list(b.errors), b.d_state, b.recurrent_t
        last_t, states_before_t, errors_after = b.states[-1].T, b.states_before.T, b.errors_after
        inputs_t, ones_all, ones_samples, ones_classes = b.inputs.T, b.ones_all, b.ones_samples, b.ones_classes
        highest, labels, targets, logits, logits_t = b.highest, b.labels, b.targets, b.logits, b.logits.T
        targets_flat, logits_flat = targets.reshape(-1), logits.reshape(-1)
        totals, of_label = b.for_losses(steps)
        scale, one = self.dtype.type(rate / size), self.dtype.type(1)
        add, subtract, multiply, divide, matmul = np.add, np.subtract, np.multiply, np.divide, np.matmul
        exp, copy, maximum = np.exp, np.copyto, np.maximum.reduce
        backwards = range(self.times - 1, 0, -1)
        pixels = x.reshape(-1, self.features)

        for step in range(steps):
            rows = batches[step]
            forward(pixels, rows, weight, recurrent, bias)
            matmul(output_weight_t, last_t, out=logits)
            add(logits, output_bias_column, out=logits)
            # Softmax, and what its cross-entropy with the labels is made of.
            maximum(logits, axis=0, out=highest)
            subtract(logits, highest, out=logits)
            y.take(rows, out=labels, mode="clip")
            one_hot.take(labels, axis=1, out=targets, mode="clip")
            of_label[step] = targets_flat.dot(logits_flat)
            exp(logits, out=logits)
            total = totals[step]
            matmul(ones_classes, logits, out=total)
            divide(logits, total, out=logits)
            # From here on logits hold the gradient by the logits.
            subtract(logits, targets, out=logits)
            multiply(logits, scale, out=logits)
            matmul(last_t, logits_t, out=d_output_weight)
            matmul(logits, ones_samples, out=d_output_bias)
            matmul(logits_t, output_weight_t, out=d_state)
            # The slope of tanh is 1 - tanh²; `error` is the gradient by what tanh was applied to.
            multiply(states, states, out=slopes)
            subtract(one, slopes, out=slopes)
            copy(recurrent_t_copy, recurrent_t)
            for time in backwards:
                multiply(d_state, slope[time], out=error[time])
                matmul(error[time], recurrent_t_copy, out=d_state)
            multiply(d_state, slope[0], out=error[0])
            if backwards:
                matmul(states_before_t, errors_after, out=d_recurrent)
            matmul(inputs_t, errors, out=d_weight)
            matmul(ones_all, errors, out=d_bias)
            if update:
                subtract(vector, gradient, out=vector)

        np.log(totals, out=totals)
        np.sum(totals, axis=1, dtype=np.float64, out=losses)
        np.subtract(losses, of_label, out=losses)
        np.divide(losses, size, out=losses)

    def _buffers_for(self, size: int) -> _Buffers:
        if size not in self._buffers:
            self._buffers[size] = _Buffers(self.times, size, self.features, self.units, self.classes, self.dtype)
        return self._buffers[size]


class _Buffers:
    """All that a batch of `size` samples needs. What is per time step lies time step by time step, then by sample."""

    def __init__(self, times: int, size: int, features: int, units: int, classes: int, dtype: np.dtype[Any]) -> None:
        self.size = size
        self.dtype = dtype
        self.inputs = np.empty((times * size, features), dtype)
        self.states, self.slopes, self.errors = (np.empty((times, size, units), dtype) for _ in range(3))
        self.all_states, self.all_slopes, self.all_errors = (
            array.reshape(times * size, units) for array in (self.states, self.slopes, self.errors)
        )
        self.states_before = self.all_states[: (times - 1) * size]
        self.errors_after = self.all_errors[size:]
        self.product, self.d_state = np.empty((2, size, units), dtype)
        self.recurrent_t = np.empty((units, units), dtype)
        self.logits, self.targets = np.empty((2, classes, size), dtype)
        self.highest = np.empty(size, dtype)
        self.labels = np.empty(size, np.int64)
        self.ones_all, self.ones_samples, self.ones_classes = (
            np.ones(count, dtype) for count in (times * size, size, classes)
        )
        self._lines = np.empty((times, size), np.int64)
        self._later_times = np.arange(1, times)[:, None]
        # `bias` written `times` times over, added to rows of as many states: long inner loops instead of short ones.
        self._biases = np.empty((times, units), dtype)
        self._wide_states = self.states.reshape(size, times * units)
        self._state = list(self.states)
        self._totals, self._of_label = np.empty((0, size), dtype), np.empty(0)

    def for_losses(self, steps: int) -> tuple[Array, NDArray[np.float64]]:
        """Room for what the losses of `steps` steps are made of: (steps, size) and (steps,)."""
        if len(self._totals) < steps:
            self._totals, self._of_label = np.empty((steps, self.size), self.dtype), np.empty(steps)
        return self._totals[:steps], self._of_label[:steps]

    def forward(self, pixels: Array, rows: Array, weight: Array, recurrent: Array, bias: Array) -> None:
        """Gather the samples `rows` from `pixels`, one line per sample and time step, and compute all states."""
        add, matmul, tanh, state, product = np.add, np.matmul, np.tanh, self._state, self.product
        first_line, later_lines = self._lines[0], self._lines[1:]
        np.multiply(rows, len(state), out=first_line)
        add(first_line, self._later_times, out=later_lines)
        pixels.take(self._lines.reshape(-1), axis=0, out=self.inputs, mode="clip")
        matmul(self.inputs, weight, out=self.all_states)
        np.copyto(self._biases, bias)
        add(self._wide_states, self._biases.reshape(-1), out=self._wide_states)
        tanh(state[0], out=state[0])
        for time in range(1, len(state)):
            matmul(state[time - 1], recurrent, out=product)
            add(product, state[time], out=product)
            tanh(product, out=state[time])


def _flat(shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> tuple[Array, list[Array]]:
    """A vector of zeros, and views into it of the given shapes, one after the other."""
    vector = np.zeros(sum(math.prod(shape) for shape in shapes), dtype)
    views, start = [], 0
    for shape in shapes:
        views.append(vector[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    return vector, views


def check_spec(spec: ModelSpec, engine: str = "manual") -> None:
    """Raise `SpecError` for a network, or a loss, that the hand-written engines don't know."""
    layers = [layer for layer in spec.layers if not isinstance(layer, Reshape)]
    match layers:
        case [RNN(activation="tanh", returns="last"), Dense(bias=True)]:
            if spec.loss.op == "softmax_cross_entropy" and isinstance(spec.layers[-2], RNN):
                return
    found = ", ".join(layer.op for layer in spec.layers)
    raise SpecError(
        f'the model "{spec.name}"',
        [
            f"the engine {engine} is written by hand for reshape, rnn (activation tanh, returns last), dense (with "
            f"bias) and softmax_cross_entropy; found {found} and {spec.loss.op}, or other options of them: use another "
            "engine"
        ],
    )


def check_optimizer(optimizer: Optimizer, engine: str = "manual") -> None:
    """Raise `ConfigurationError` for an optimizer other than plain gradient descent."""
    if optimizer != Optimizer("sgd", optimizer.learning_rate):
        raise ConfigurationError(
            f"the engine {engine} is written by hand for plain sgd, with a learning rate and nothing else; "
            f"found {optimizer.name} with {optimizer.settings()}: use another engine"
        )
