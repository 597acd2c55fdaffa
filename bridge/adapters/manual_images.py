"""The convolutional network of the paper mnist-cnn, written by hand in numpy. How it gains its speed:

- Samples are the innermost axis of all arrays, so that calls run over long pieces of memory, and what the dense layers
  read is there already: the pooled planes are (features, samples).
- The convolution and the pool's windows are one matrix product. A window with all that its elements see is a patch of
  the image, and one column; each element of the window is a *phase*, with the kernel in its own place on the patch. So
  the maximum of a window is that of a few phases, each one piece of memory.
- ReLU comes after the pool, on a part of the numbers.
- The learning rate is part of the loss's gradient, and the update is one subtraction; gradients by pixels are not
  computed.
- Threads share the samples of a batch, each with buffers and a gradient of its own.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from bridge.session import Optimizer
from bridge.spec import Conv2D, MaxPool2D, ModelSpec
from py_engine.network.parameters import FlatVector, Layout
from py_engine.network.threads import Team

__all__ = ["ImageNetwork"]

Array = NDArray[Any]

_LEAST_SAMPLES = 16
"""Fewer are not worth a thread."""


class ImageNetwork:
    """conv2d, relu, max_pool2d, dense, relu, dense with softmax_cross_entropy and plain sgd."""

    blas_threads = 1

    def __init__(self, spec: ModelSpec, optimizer: Optimizer, dtype: np.dtype[Any], threads: int) -> None:
        layout = Layout.of({name: parameter.shape for name, parameter in spec.parameters().items()})
        self.parameters, self.gradient = FlatVector(layout, dtype), FlatVector(layout, dtype)
        self.params = list(self.parameters.arrays.values())
        self.gradients: list[Array | None] = list(self.gradient.arrays.values())
        self.dtype = dtype
        _, self.height, self.width = spec.shapes()[0].output
        _, self.pooled_height, self.pooled_width = spec.shapes()[3].output
        self.window = next(layer.geometry.size for layer in spec.layers if isinstance(layer, MaxPool2D))
        self.kernel = next(layer.geometry.size for layer in spec.layers if isinstance(layer, Conv2D))
        self.one_hot = np.eye(spec.output[-1], dtype=dtype)
        self._team = Team(threads)
        self._shards: dict[tuple[int, int], list[_Shard]] = {}

    def predict(self, x: Array, rows: NDArray[np.int64], out: Array) -> None:
        """See `Network.predict`."""
        (shard,) = self._shards_of(len(rows), 1)
        shard.rows = rows
        shard.forward(x)
        out[...] = shard.logits.T

    def train(
        self, x: Array, y: Array, batches: Array, rate: float, losses: NDArray[np.float64], update: bool = True
    ) -> None:
        """See `Network.train`."""
        size = batches.shape[1]
        shards = self._shards_of(size, max(1, min(self._team.size, size // _LEAST_SAMPLES)))
        found = np.empty((len(shards), len(losses)))
        scale = self.dtype.type(rate / size)
        tasks = [partial(shard.step, x, y, scale) for shard in shards]
        vector, gradient, others = self.parameters.vector, self.gradient.vector, shards[1:]
        for step, rows in enumerate(batches):
            for shard in shards:
                shard.rows = rows[shard.part]
            self._team.run(tasks)
            for k, shard in enumerate(shards):
                found[k, step] = shard.loss
            for shard in others:
                np.add(gradient, shard.gradient.vector, out=gradient)
            if update:
                np.subtract(vector, gradient, out=vector)
        np.divide(found.sum(axis=0), size, out=losses)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def _shards_of(self, size: int, threads: int) -> list[_Shard]:
        if (size, threads) not in self._shards:
            ends = [size * k // threads for k in range(threads + 1)]
            self._shards[size, threads] = [
                _Shard(self, slice(ends[k], ends[k + 1]), self.gradient.zeros_like() if k else self.gradient)
                for k in range(threads)
            ]
        return self._shards[size, threads]


class _Shard:
    """The buffers for some samples of a batch, and what one thread does with them."""

    def __init__(self, network: ImageNetwork, part: slice, gradient: FlatVector) -> None:
        self.part, self.gradient = part, gradient
        n, dtype, one_hot = part.stop - part.start, network.dtype, network.one_hot
        kernel, window = network.kernel, network.window
        filters, hidden, classes = network.params[0].shape[0], network.params[1].shape[1], len(one_hot)
        self.rows = np.zeros(n, np.int64)
        self._one_hot, self._weight, self._w1, self._w2 = one_hot, *network.params
        self._d_weight, self._d_w1, self._d_w2 = gradient.arrays.values()

        # A patch is what a window's elements see; neighbouring patches are as far apart as windows.
        patch = (window[0] + kernel[0] - 1, window[1] + kernel[1] - 1)
        planes = (network.pooled_height, network.pooled_width)
        places = math.prod(planes) * n
        self._gathered = np.empty((n, network.height * network.width), dtype)
        self._images = np.empty((network.height, network.width, n), dtype)  # samples innermost
        down, across, sample = self._images.strides
        strides = (down, across, window[0] * down, window[1] * across, sample)
        self._windows = as_strided(self._images, (*patch, *planes, n), strides, writeable=False)
        self._columns = np.empty((math.prod(patch), places), dtype)

        # The kernel in its place on the patch, for each element of the window; around it are zeros.
        phases = math.prod(window)
        self._placed = np.zeros((*window, filters, *patch), dtype)
        self._d_placed = np.empty_like(self._placed)
        here = [
            (a, b, slice(None), slice(a, a + kernel[0]), slice(b, b + kernel[1]))
            for a, b in product(range(window[0]), range(window[1]))
        ]
        self._kernels, self._d_kernels = [self._placed[at] for at in here], [self._d_placed[at] for at in here]

        self._phases = np.empty((phases, filters, places), dtype)
        self._pooled, self._d_pooled = np.empty((2, filters, places), dtype)
        self._won = np.empty(self._phases.shape, np.bool_)
        self._taken = np.empty(self._pooled.shape, np.bool_)
        self._hidden, self._d_hidden = np.empty((2, hidden, n), dtype)
        self._alive = np.empty((hidden, n), np.bool_)
        self.logits, self._targets = np.empty((2, classes, n), dtype)
        self._labels = np.empty(n, np.int64)
        self._highest, self._total = np.empty((2, n), dtype)
        self.loss = 0.0
        """The sum over the samples."""

    def forward(self, x: Array) -> None:
        """From the pixels of `rows` to the logits (classes, samples)."""
        phases, pooled = self._phases, self._pooled
        x.take(self.rows, axis=0, out=self._gathered, mode="clip")
        np.copyto(self._images.reshape(-1, len(self.rows)), self._gathered.T)
        np.copyto(self._columns.reshape(self._windows.shape), self._windows)
        for kernel in self._kernels:
            np.copyto(kernel, self._weight[:, 0])
        flat = phases.reshape(-1, phases.shape[2])
        np.matmul(self._placed.reshape(len(flat), -1), self._columns, out=flat)
        np.maximum(phases[0], 0, out=pooled)
        for phase in phases[1:]:
            np.maximum(pooled, phase, out=pooled)
        _times(self._w1.T, pooled.reshape(len(self._w1), -1), self._hidden)
        np.maximum(self._hidden, 0, out=self._hidden)
        _times(self._w2.T, self._hidden, self.logits)

    def step(self, x: Array, y: Array, scale: Any) -> None:
        """The loss of `rows`, and `scale` times the gradient of its sum."""
        self.forward(x)
        self._softmax(y, scale)
        hidden, d_hidden, pooled, d_pooled = self._hidden, self._d_hidden, self._pooled, self._d_pooled
        phases, won, d_logits = self._phases, self._won, self.logits
        _outer(hidden, d_logits, self._d_w2)
        _times(self._w2, d_logits, d_hidden)
        np.greater(hidden, 0, out=self._alive)
        np.multiply(d_hidden, self._alive, out=d_hidden)
        _outer(pooled.reshape(len(self._w1), -1), d_hidden, self._d_w1)
        _times(self._w1, d_hidden, d_pooled.reshape(len(self._w1), -1))
        # The gradient of a window goes to the first of its elements that is the maximum, if ReLU let that through.
        taken = self._taken
        np.less_equal(pooled, 0, out=taken)
        for k, phase in enumerate(phases):
            mine: Array = won[k]
            np.equal(phase, pooled, out=mine)
            np.greater(mine, taken, out=mine)  # of truth values: and not
            np.logical_or(taken, mine, out=taken)
        np.copyto(phases, won)
        for phase in phases:
            np.multiply(phase, d_pooled, out=phase)
        flat = phases.reshape(-1, phases.shape[2])
        np.matmul(flat, self._columns.T, out=self._d_placed.reshape(len(flat), -1))
        d_weight = self._d_weight[:, 0]
        np.copyto(d_weight, self._d_kernels[0])
        for kernel in self._d_kernels[1:]:
            np.add(d_weight, kernel, out=d_weight)

    def _softmax(self, y: Array, scale: Any) -> None:
        """Make the logits their own gradient, and keep the loss."""
        logits, targets = self.logits, self._targets
        np.maximum.reduce(logits, axis=0, out=self._highest)
        np.subtract(logits, self._highest, out=logits)
        y.take(self.rows, out=self._labels, mode="clip")
        self._one_hot.take(self._labels, axis=1, out=targets, mode="clip")
        of_label = targets.reshape(-1).dot(logits.reshape(-1))
        np.exp(logits, out=logits)
        np.add.reduce(logits, axis=0, out=self._total)
        np.divide(logits, self._total, out=logits)
        np.subtract(logits, targets, out=logits)
        np.multiply(logits, scale, out=logits)
        np.log(self._total, out=self._total)
        self.loss = float(self._total.sum() - of_label)


# What a product with a single sample really is, numpy has to be told.


def _times(a: Array, b: Array, out: Array) -> None:
    """Put a b into `out`; the columns of b are samples."""
    if b.shape[1] == 1:
        np.matmul(a, b[:, 0], out=out[:, 0])
    else:
        np.matmul(a, b, out=out)


def _outer(a: Array, b: Array, out: Array) -> None:
    """Put a bᵀ into `out`; the columns of both are samples."""
    if b.shape[1] == 1:
        np.multiply(a, b.T, out=out)
    else:
        np.matmul(a, b.T, out=out)
