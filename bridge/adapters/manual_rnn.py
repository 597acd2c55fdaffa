"""The recurrent network of the papers mnist-rnn-d and -e, written by hand in numpy: no graph, no AD, no layers.

How it gains its speed:

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.session import Optimizer
from bridge.spec import ModelSpec

__all__ = ["RecurrentNetwork"]

Array = NDArray[Any]


class RecurrentNetwork:
    """Parameters, gradients and the buffers for every batch size seen so far."""

    def __init__(self, spec: ModelSpec, optimizer: Optimizer, dtype: np.dtype[Any], threads: int) -> None:
        shapes = [parameter.shape for parameter in spec.parameters().values()]
        (self.features, self.units), self.classes = shapes[0], shapes[-1][0]
        self.times = math.prod(spec.input.sample) // self.features
        self.dtype = dtype
        self.vector, self.params = _flat(shapes, dtype)
        self.gradient, gradients = _flat(shapes, dtype)
        self.gradients: list[Array | None] = [*gradients]
        self._gradients = gradients
        self.blas_threads = threads
        self._one_hot = np.eye(self.classes, dtype=dtype)
        self._buffers: dict[int, _Buffers] = {}

    def predict(self, x: Array, rows: NDArray[np.int64], logits: Array) -> None:
        """See `Network.predict`."""
        weight, recurrent, bias, output_weight, output_bias = self.params
        b = self._buffers_for(len(rows))
        b.forward(x.reshape(-1, self.features), rows, weight, recurrent, bias)
        np.matmul(b.states[-1], output_weight, out=logits)
        np.add(logits, output_bias, out=logits)

    def train(
        self, x: Array, y: Array, batches: Array, rate: float, losses: NDArray[np.float64], update: bool = True
    ) -> None:
        """See `Network.train`."""
        weight, recurrent, bias, output_weight, output_bias = self.params
        d_weight, d_recurrent, d_bias, d_output_weight, d_output_bias = self._gradients
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

    def close(self) -> None:
        """There are no threads to end."""

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
