"""The convolutional network of the papers imdb-cnn-a and imdb-cnn-c, written by hand in numpy. How it gains its speed:

- The tokens of a batch lie time step by time step, samples innermost: a step further on in the text is so many rows
  further on in memory, and a window of the pool is some whole rows.
- The convolution is one product of all tokens' vectors with all places of the kernel, whose results are added up each
  as many rows further on; its gradients are two products of the same form. There is no im2col.
- Bias and ReLU come after the pool, on a part of the numbers.
- Gradients of tokens' vectors are added into the embedding's by `ufunc.at`, in one dimension and two floats at a time
  as one complex number, which is how it is fast; each thread has its own columns of the matrix.
- Adam works on blocks that stay in the cache, shared out to the threads.
- Threads share the samples of a batch, each with its buffers, and a gradient of its own of all but the embedding.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.session import Optimizer
from bridge.spec import Conv1D, Embedding, MaxPool1D, ModelSpec
from py_engine.network.parameters import FlatVector, Layout
from py_engine.network.threads import Team

__all__ = ["TextNetwork"]

Array = NDArray[Any]

_LEAST_SAMPLES = 16
"""Fewer are not worth a thread."""
_BLOCK = 65_536
"""Elements of a block of Adam's."""


class TextNetwork:
    """embedding, conv1d, relu, max_pool1d, dense of one unit with binary_cross_entropy and Adam."""

    blas_threads = 1

    def __init__(self, spec: ModelSpec, optimizer: Optimizer, dtype: np.dtype[Any], threads: int) -> None:
        self.dtype = dtype
        parameters = spec.parameters()
        embedding, *others = (parameter.shape for parameter in parameters.values())
        self.trained = all(parameter.trainable for parameter in parameters.values())
        names = list(parameters)
        layout = Layout.of({name: parameters[name].shape for name in names if parameters[name].trainable})
        self.parameters, self.gradient = FlatVector(layout, dtype), FlatVector(layout, dtype)
        trained, gradients = self.parameters.arrays, self.gradient.arrays
        self.params = [trained[name] if name in trained else np.zeros(embedding, dtype) for name in names]
        self.gradients = [gradients.get(name) for name in names]
        self.small = Layout.of(dict(zip(names[1:], others, strict=True)))
        self._small_part = self.gradient.vector[layout.offsets[names[1]] :]
        self.window = next(layer.window for layer in spec.layers if isinstance(layer, MaxPool1D))
        self.kernel = next(layer.kernel for layer in spec.layers if isinstance(layer, Conv1D))
        self.padding = next(layer.padding_index for layer in spec.layers if isinstance(layer, Embedding))
        self.length = math.prod(spec.input.sample)
        self._team = Team(threads)
        self._adam = _Adam(optimizer, self.parameters.vector, self.gradient.vector, threads)
        self._batches: dict[tuple[int, int], _Batch] = {}

    def predict(self, x: Array, rows: NDArray[np.int64], out: Array) -> None:
        """See `Network.predict`."""
        (shard,) = self._batch(len(rows), 1).shards
        shard.rows = rows
        shard.forward(x)
        out[:, 0] = shard.logits

    def train(
        self, x: Array, y: Array, batches: Array, rate: float, losses: NDArray[np.float64], update: bool = True
    ) -> None:
        """See `Network.train`."""
        size = batches.shape[1]
        batch = self._batch(size, max(1, min(self._team.size, size // _LEAST_SAMPLES)))
        scale = self.dtype.type(1 / size)
        tasks = [partial(shard.step, x, y, scale) for shard in batch.shards]
        for step, rows in enumerate(batches):
            for shard in batch.shards:
                shard.rows = rows[shard.part]
            self._team.run(tasks)
            losses[step] = sum(shard.loss for shard in batch.shards) / size
            if self.trained:
                self._team.run(batch.additions)
                if self.padding >= 0:
                    batch.d_embedding[self.padding] = 0
            np.copyto(self._small_part, batch.shards[0].gradient.vector)
            for shard in batch.shards[1:]:
                np.add(self._small_part, shard.gradient.vector, out=self._small_part)
            if update:
                self._adam.step(rate, self._team)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def _batch(self, size: int, threads: int) -> _Batch:
        if (size, threads) not in self._batches:
            self._batches[size, threads] = _Batch(self, size, threads)
        return self._batches[size, threads]


class _Batch:
    """The shards of a batch, and how the gradients of tokens' vectors that they leave become the embedding's."""

    def __init__(self, network: TextNetwork, size: int, threads: int) -> None:
        vocabulary, dimension = network.params[0].shape
        ends = [size * k // threads for k in range(threads + 1)]
        self.columns = [2 * (dimension * k // threads // 2) for k in range(threads)] + [dimension]
        tokens = size * network.length
        self.ids = np.empty(tokens, np.int64)
        # Each thread's columns of all tokens' gradients are a matrix of their own.
        self.d_vectors = [
            np.empty((tokens, self.columns[k + 1] - self.columns[k]), network.dtype) for k in range(threads)
        ]
        self.shards = [_Shard(network, self, slice(ends[k], ends[k + 1])) for k in range(threads)]
        self.additions: list[Any] = []
        if not network.trained:
            return
        found = network.gradients[0]
        assert found is not None
        self.d_embedding: Array = found
        pair = 2 if dimension % 2 == 0 else 1
        kind = np.result_type(network.dtype, np.complex64) if pair == 2 else network.dtype
        to = self.d_embedding.reshape(-1).view(kind)
        for k, shard in enumerate(self.shards):
            shard.zeroed = self.d_embedding[vocabulary * k // threads : vocabulary * (k + 1) // threads]
            d_vectors = self.d_vectors[k]
            within = np.tile(np.arange(self.columns[k] // pair, self.columns[k + 1] // pair), (tokens, 1))
            places = np.empty_like(within)
            values = d_vectors.reshape(-1).view(kind)
            self.additions.append(partial(self._add, to, values, within, places, dimension // pair))

    def _add(self, to: Array, values: Array, within: Array, places: Array, width: int) -> None:
        np.copyto(places, self.ids[:, None])
        np.multiply(places, width, out=places)
        np.add(places, within, out=places)
        np.add.at(to, places.reshape(-1), values)


class _Shard:
    """The buffers for some samples of a batch, and what one thread does with them."""

    def __init__(self, network: TextNetwork, batch: _Batch, part: slice) -> None:
        self.part, self.gradient = part, FlatVector(network.small, network.dtype)
        self._embedding, self._weight, self._bias, self._w, self._b = network.params
        self._d_weight, self._d_bias, self._d_w, self._d_b = self.gradient.arrays.values()
        n, dtype, length = part.stop - part.start, network.dtype, network.length
        filters, dimension, kernel = self._weight.shape
        window, places = network.window, length * n
        pooled = (length - kernel + 1) // window
        self.rows = np.zeros(n, np.int64)
        self.zeroed: Array = np.empty(0, dtype)
        self._gathered = np.empty((n, length), np.int64)
        # Time steps, then samples.
        tokens = slice(part.start * length, part.stop * length)
        self._ids = batch.ids[tokens]
        self._vectors = np.empty((places, dimension), dtype)
        edges = batch.columns
        self._d_vectors = [
            (d_vectors[tokens], slice(edges[k], edges[k + 1])) for k, d_vectors in enumerate(batch.d_vectors)
        ]
        self._trained = network.trained

        # All places of the kernel below one another.
        self._kernels, self._d_kernels = np.empty((2, kernel, filters, dimension), dtype)
        self._products = np.empty((kernel, filters * places), dtype)
        self._sums = np.zeros(filters * places, dtype)  # those that reach over the end of the text are not used
        self._used = filters * places - (kernel - 1) * n

        def by_phase(sums: Array) -> list[Array]:
            whole = sums.reshape(filters, length, n)[:, : pooled * window].reshape(filters, pooled, window, n)
            return [whole[:, :, k] for k in range(window)]

        # What comes before the sums' gradient is zero, and so is that of sums that no window has.
        self._d_sums = np.zeros((kernel - 1) * n + filters * places, dtype)
        self._phases = by_phase(self._sums)
        self._d_phases = by_phase(self._d_sums[(kernel - 1) * n :])
        self._largest, self._pooled, self._d_pooled = np.empty((3, filters, pooled, n), dtype)
        self._won, self._taken = np.empty((2, filters, pooled, n), np.bool_)
        self._ones = np.ones(pooled * n, dtype)
        self.logits, self._targets, self._d_logits, self._scratch = np.empty((4, n), dtype)
        self.loss = 0.0
        """The sum over the samples."""

    def forward(self, x: Array) -> None:
        """From the tokens of `rows` to the logits."""
        n, places = len(self.rows), len(self._ids)
        kernels, products, largest = self._kernels, self._products, self._largest
        x.take(self.rows, axis=0, out=self._gathered, mode="clip")
        np.copyto(self._ids.reshape(-1, n), self._gathered.T)
        self._embedding.take(self._ids, axis=0, out=self._vectors, mode="clip")
        np.copyto(kernels, self._weight.transpose(2, 0, 1))
        flat = kernels.reshape(-1, kernels.shape[2])
        np.matmul(flat, self._vectors.T, out=products.reshape(len(flat), places))
        sums, used = self._sums[: self._used], self._used
        np.copyto(sums, products[0, :used])
        for k in range(1, len(products)):
            np.add(sums, products[k, k * n : k * n + used], out=sums)
        np.copyto(largest, self._phases[0])
        for phase in self._phases[1:]:
            np.maximum(largest, phase, out=largest)
        np.add(largest, self._bias[:, None, None], out=self._pooled)
        np.maximum(self._pooled, 0, out=self._pooled)
        np.matmul(self._w[:, 0], self._pooled.reshape(len(self._w), n), out=self.logits)
        np.add(self.logits, self._b[0], out=self.logits)

    def step(self, x: Array, y: Array, scale: Any) -> None:
        """The loss of `rows`, and `scale` times the gradient of its sum."""
        self.forward(x)
        self._binary_cross_entropy(y, scale)
        n, filters, pooled, d_pooled, d_logits = (
            len(self.rows),
            len(self._bias),
            self._pooled,
            self._d_pooled,
            self._d_logits,
        )
        np.matmul(pooled.reshape(-1, n), d_logits, out=self._d_w[:, 0])
        np.add.reduce(d_logits, out=self._d_b[0, ...])
        np.multiply(self._w, d_logits, out=d_pooled.reshape(-1, n))
        # The gradient of a window goes to the first of its elements that is the maximum, if ReLU let that through.
        taken, won = self._taken, self._won
        np.less_equal(pooled, 0, out=taken)
        np.copyto(d_pooled, 0, where=taken)
        np.matmul(d_pooled.reshape(filters, -1), self._ones, out=self._d_bias)
        for phase, d_phase in zip(self._phases, self._d_phases, strict=True):
            np.equal(phase, self._largest, out=won)
            np.greater(won, taken, out=won)  # of truth values: and not
            np.logical_or(taken, won, out=taken)
            np.multiply(d_pooled, won, out=d_phase)
        products, kernels, d_kernels = self._products, self._kernels, self._d_kernels
        before = (len(products) - 1) * n
        for k, d_product in enumerate(products):
            np.copyto(d_product, self._d_sums[before - k * n : before - k * n + len(d_product)])
        flat = products.reshape(-1, len(self._ids))
        np.matmul(flat, self._vectors, out=d_kernels.reshape(len(flat), -1))
        np.copyto(self._d_weight, d_kernels.transpose(1, 2, 0))
        if self._trained:
            self.zeroed.fill(0)
            for d_vectors, columns in self._d_vectors:
                np.matmul(flat.T, kernels.reshape(len(flat), -1)[:, columns], out=d_vectors)

    def _binary_cross_entropy(self, y: Array, scale: Any) -> None:
        """The gradient by the logits l, and the loss, max(l, 0) - l y + log(1 + exp(-|l|))."""
        logits, targets, d_logits, scratch = self.logits, self._targets, self._d_logits, self._scratch
        y.reshape(-1).take(self.rows, out=targets, mode="clip")
        np.abs(logits, out=scratch)
        np.negative(scratch, out=scratch)
        np.exp(scratch, out=scratch)
        np.log1p(scratch, out=scratch)
        np.maximum(logits, 0, out=d_logits)
        np.add(scratch, d_logits, out=scratch)
        self.loss = float(scratch.sum() - targets.dot(logits))
        # sigmoid(l) = exp(l - log(1 + exp(l))), without overflow.
        np.subtract(logits, scratch, out=d_logits)
        np.exp(d_logits, out=d_logits)
        np.subtract(d_logits, targets, out=d_logits)
        np.multiply(d_logits, scale, out=d_logits)


class _Adam:
    """Adam in place. Means are kept divided by 1 - beta, which saves two passes over the vector."""

    def __init__(self, optimizer: Optimizer, vector: Array, gradient: Array, threads: int) -> None:
        self._betas, self._eps = optimizer.betas, optimizer.eps
        self._steps, self._rate = 0, 0.0
        mean, square = np.zeros_like(vector), np.zeros_like(vector)
        scratch = np.empty((threads, _BLOCK), vector.dtype)
        self._tasks = []
        ends = [len(vector) * k // threads // 16 * 16 for k in range(threads)] + [len(vector)]
        for k in range(threads):
            blocks: list[tuple[Array, ...]] = []
            for start in range(ends[k], ends[k + 1], _BLOCK):
                part = slice(start, min(start + _BLOCK, ends[k + 1]))
                whole = scratch[k, : part.stop - part.start]
                blocks.append((vector[part], gradient[part], mean[part], square[part], whole))
            self._tasks.append(partial(self._update, blocks))

    def step(self, rate: float, team: Team) -> None:
        """One step with what the gradient now holds."""
        self._steps += 1
        self._rate = rate
        team.run(self._tasks)

    def _update(self, blocks: list[tuple[Array, ...]]) -> None:
        beta1, beta2 = self._betas
        root = math.sqrt((1 - beta2) / (1 - beta2**self._steps))
        rate = self._rate * (1 - beta1) / (1 - beta1**self._steps)
        for p, g, mean, square, s in blocks:
            np.multiply(mean, beta1, out=mean)
            np.add(mean, g, out=mean)
            np.multiply(g, g, out=s)
            np.multiply(square, beta2, out=square)
            np.add(square, s, out=square)
            np.sqrt(square, out=s)
            np.add(s, self._eps / root, out=s)
            np.divide(mean, s, out=s)
            np.multiply(s, rate / root, out=s)
            np.subtract(p, s, out=p)
