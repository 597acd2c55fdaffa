"""TensorFlow, used as someone who knows it well would: the whole training step is one `tf.function` per batch size,
which gathers its batch from constants and updates variables in place; losses are read when the epoch is over.

Convolutions and pools have channels last, the only order that TensorFlow has for them on CPUs; `bridge.channels_last`
says what is left to transpose. Batches of large images are normalised by the fused kernel, except with XLA, for which
a maximum over up to four elements is written out. Optimizers are TensorFlow's own fused updates, where their formulas
can be made PyTorch's; only RMSProp, which adds epsilon elsewhere, is written out. Sequences of up to 32 steps are
unrolled, longer ones are a `tf.while_loop` that stacks no more than is returned.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike, NDArray

from bridge import linear_algebra, weights
from bridge.channels_last import Layout, channels_last, layouts
from bridge.checks import TensorSession, check_known
from bridge.layers import (
    RBF,
    RNN,
    Activation,
    BatchNorm,
    Concat,
    Convolution,
    Dense,
    Dropout,
    Embedding,
    Interpolate,
    Layer,
    LayerNorm,
    MultiHeadAttention,
    PermuteDims,
    Pool,
    Recurrent,
    Reshape,
    TransposedConvolution,
)
from bridge.session import Optimizer
from bridge.spec import ModelSpec

__all__ = ["TensorFlowSession"]

Array = NDArray[Any]
Tensor: TypeAlias = Any
"""A tensor or a variable of TensorFlow's."""

_UNROLLED = 32
"""The most steps of a sequence that are separate operations in the graph."""

_WRITTEN_OUT = 4
"""The most elements of a window whose maximum is written out for XLA."""

_FUSED = 100_000
"""The fewest elements of images that TensorFlow's fused kernel normalises; fewer take it longer than separate ops."""


class TensorFlowSession(TensorSession):
    """A `Session` of compiled graphs, one for each batch size."""

    jit_compile: ClassVar[bool] = False
    """Whether XLA compiles the graphs."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Array],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        threads: int = 1,
    ) -> None:
        dtype = np.dtype(dtype)
        super().__init__(spec, dtype, batch_size, tf.constant)
        check_known(spec, optimizer.name, "tensorflow", _LAYERS, _Updates.KNOWN)
        weights.check(params, spec, dtype)
        _set_threads(threads)
        self._placed = channels_last(spec)
        self._layouts = layouts(spec, self._placed)
        loss, count_right = _LOSSES[spec.loss.op]
        self._loss = partial(loss, **spec.loss.settings())
        self._count_right = partial(count_right, ignored=self._check.loss.ignored_class)
        self._variables = {
            name: tf.Variable(self._layouts[name].stored(params[name]), trainable=p.trainable)
            for name, p in spec.parameters().items()
        }
        self._trained = [name for name, p in spec.parameters().items() if p.trainable]
        self._updates = _Updates(optimizer, [self._variables[name] for name in self._trained])
        # No Python control flow depends on a tensor's value: without AutoGraph a network is traced sooner.
        compiled = partial(tf.function, jit_compile=self.jit_compile, autograph=False)
        self._train = compiled(self._step)
        self._gradients = compiled(self._loss_and_gradients)
        self._apply = compiled(self._output)
        self._evaluate = compiled(self._evaluate_part)

    @classmethod
    def start(cls, threads: int) -> None:
        """See `Starting.start`: the context of eager ops, which keeps the number of threads that it begins with."""
        _set_threads(threads)
        tf.zeros(())

    def preload(self, x: Array, y: Array) -> None:
        """See `Preloading.preload`."""
        self._batch(x, y)

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        batch = self._batch(x, y)
        self._check.batches(len(x), len(x))
        loss, gradients = self._gradients(*batch)
        named = zip(self._trained, gradients, strict=True)
        return float(loss), {name: self._layouts[name].shown(gradient.numpy()) for name, gradient in named}

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        return {name: self._layouts[name].shown(variable.numpy()) for name, variable in self._variables.items()}

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return linear_algebra.of_tensorflow(tf, self.jit_compile)

    @staticmethod
    def own_parameters(spec: ModelSpec, seed: int, dtype: DTypeLike = "float32") -> dict[str, Array]:
        """What Keras's layers begin with, in the layout of the spec.

        Glorot's uniform distribution for weights, orthogonal recurrent weights, zeros for biases but for an LSTM's
        forget gates, which have ones, and -0.05 to 0.05 for embeddings. A layer that Keras lacks begins as the spec
        says.
        """
        dtype = np.dtype(dtype)
        found = weights.initialise(spec, seed, dtype)
        init = tf.keras.initializers

        def draw(kind: Any, shape: tuple[int, ...], number: int, **options: Any) -> Array:
            return np.array(kind(seed=1000 * seed + number, **options)(shape), dtype)

        layers = {layer.id: layer for layer in spec.layers}
        for number, name in enumerate(found):
            owner, _, kind = name.rpartition(".")
            layer, shape = layers[owner], found[name].shape
            if isinstance(layer, Embedding):
                found[name] = draw(init.RandomUniform, shape, number, minval=-0.05, maxval=0.05)
            elif isinstance(layer, Convolution) and kind == "weight":
                kernel = draw(init.GlorotUniform, (*shape[2:], shape[1], shape[0]), number)
                found[name] = Layout(is_kernel=True).shown(kernel)
            elif kind == "recurrent":
                found[name] = draw(init.Orthogonal, shape, number)
            elif kind == "weight" and isinstance(layer, Dense | Recurrent):
                found[name] = draw(init.GlorotUniform, shape, number)
            elif kind == "bias":
                found[name] = np.zeros(shape, dtype)
                if layer.op == "lstm":
                    found[name][shape[0] // 4 : shape[0] // 2] = 1
        return found

    def _train_rows(self, features: Tensor, targets: Tensor, order: NDArray[np.int64]) -> NDArray[np.float64]:
        edges = [*range(0, len(order), self._batch_size), len(order)]
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        found = [self._train(features, targets, batch) for batch in tf.split(order, sizes)]
        losses: NDArray[np.float64] = tf.stack(found).numpy().astype(np.float64)
        return losses

    # What is compiled.

    def _step(self, features: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
        run = self._run(training=True)
        loss, gradients = self._differentiate(run, tf.gather(features, rows), tf.gather(targets, rows))
        with tf.control_dependencies([loss, *gradients]):
            for variable, value in run.running:
                variable.assign(value)
            self._updates(gradients)
        return loss

    def _loss_and_gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self._differentiate(self._run(training=True), x, y)

    def _differentiate(self, run: _Run, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        with tf.GradientTape() as tape:
            loss = self._loss(self._network(run, x), y)
        variables = [self._variables[name] for name in self._trained]
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]  # an embedding's come as rows

    def _run(self, training: bool = False) -> _Run:
        return _Run(self._variables, training, self.jit_compile)

    def _network(self, run: _Run, x: Tensor) -> Tensor:
        made = [x]
        for placed in self._placed:
            values = [_transposed(made[place + 1], axes) for place, axes in placed.sources]
            x = values[0] if placed.layer is None else _join(placed.layer, values)
            made.append(x if placed.layer is None else _LAYERS[placed.layer.op](placed.layer, run, x))
        return made[-1]

    def _output(self, x: Tensor) -> Tensor:
        return self._network(self._run(), x)

    def _evaluate_part(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = self._output(x)
        return self._loss(output, y), self._count_right(output, y)


def _set_threads(threads: int) -> None:
    """Only where nothing has run in this process yet; a worker's environment says the same."""
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")  # all engines compute on the CPU
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)


# The network ----------------------------------------------------------------------------------------------------------


class _Run:
    """One way through the network: its parameters, and what may happen on the way."""

    def __init__(self, params: Mapping[str, Tensor], training: bool, xla: bool) -> None:
        self.params = params
        self.training = training
        self.xla = xla
        """Whether XLA compiles it."""
        self.running: list[tuple[Tensor, Tensor]] = []
        """Running statistics, and what they become with this batch."""

    def moved(self, layer: BatchNorm, now: Sequence[Tensor]) -> None:
        """Note what the running statistics become with the mean and the variance of this batch."""
        for name, value in zip(("running_mean", "running_var"), now, strict=True):
            before = self.params[f"{layer.id}.{name}"]
            self.running.append((before, before + layer.momentum * (value - before)))


def _dense(layer: Dense, run: _Run, x: Tensor) -> Tensor:
    weight = run.params[f"{layer.id}.weight"]
    product = tf.matmul(x, weight) if len(x.shape) == 2 else tf.tensordot(x, weight, 1)
    return tf.nn.bias_add(product, run.params[f"{layer.id}.bias"]) if layer.bias else product


def _recurrent(layer: Recurrent, run: _Run, x: Tensor) -> Tensor:
    inputs = tf.tensordot(x, run.params[f"{layer.id}.weight"], 1) + run.params[f"{layer.id}.bias"]
    cell = partial(_CELLS[layer.op], layer, run.params[f"{layer.id}.recurrent"])
    sequence = layer.returns == "sequence"
    if x.shape[1] <= _UNROLLED:
        state, outputs = None, []
        for now in tf.unstack(inputs, axis=1):
            state = cell(now, state)
            outputs.append(state[0])
        return tf.stack(outputs, 1) if sequence else outputs[-1]
    state = (tf.zeros((x.shape[0], layer.units), x.dtype),) * (2 if layer.op == "lstm" else 1)
    state, *outputs = _loop(cell, tf.transpose(inputs, (1, 0, 2)), state, sequence)
    return tf.transpose(outputs[0].stack(), (1, 0, 2)) if sequence else state[0]


def _loop(cell: Callable[..., Any], inputs: Tensor, state: tuple[Tensor, ...], sequence: bool) -> list[Any]:
    """The state after the last step and, for a sequence, a `tf.TensorArray` of what each step returns.

    `tf.scan` would stack the whole state of every step, and its gradient go through arrays of zeros.
    """
    steps = inputs.shape[0]
    rows = tf.TensorArray(inputs.dtype, steps).unstack(inputs)
    returned = [tf.TensorArray(inputs.dtype, steps, element_shape=state[0].shape)] if sequence else []

    def body(step: Tensor, state: tuple[Tensor, ...], *returned: Any) -> tuple[Any, ...]:
        state = cell(rows.read(step), state)
        return step + 1, state, *(outputs.write(step, state[0]) for outputs in returned)

    begun = tf.constant(0), state, *returned
    found = tf.while_loop(lambda step, *_: step < steps, body, begun, maximum_iterations=steps)
    return list(found[1:])


State: TypeAlias = tuple[Tensor, ...] | None
"""What a cell keeps from step to step; None, that is zeros, before the first."""


def _rnn_cell(layer: RNN, recurrent: Tensor, x: Tensor, state: State) -> tuple[Tensor, ...]:
    return (_ACTIVATIONS[layer.activation](x if state is None else x + tf.matmul(state[0], recurrent)),)


def _lstm_cell(layer: Recurrent, recurrent: Tensor, x: Tensor, state: State) -> tuple[Tensor, ...]:
    gates = x if state is None else x + tf.matmul(state[0], recurrent)
    take, keep, new, show = tf.split(gates, 4, 1)
    cell = tf.sigmoid(take) * tf.tanh(new)
    if state is not None:
        cell = tf.sigmoid(keep) * state[1] + cell
    return tf.sigmoid(show) * tf.tanh(cell), cell


def _gru_cell(layer: Recurrent, recurrent: Tensor, x: Tensor, state: State) -> tuple[Tensor, ...]:
    reset, update, new = tf.split(x, 3, 1)
    if state is None:
        return ((1 - tf.sigmoid(update)) * tf.tanh(new),)
    reset_state, update_state, new_state = tf.split(tf.matmul(state[0], recurrent), 3, 1)
    new = tf.tanh(new + tf.sigmoid(reset + reset_state) * new_state)
    update = tf.sigmoid(update + update_state)
    return ((1 - update) * new + update * state[0],)


_CELLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"rnn": _rnn_cell, "lstm": _lstm_cell, "gru": _gru_cell}


def _transposed(x: Tensor, axes: tuple[int, ...] | None) -> Tensor:
    return x if axes is None else tf.transpose(x, (0, *(1 + axis for axis in axes)))


def _join(layer: Layer, values: list[Tensor]) -> Tensor:
    """One of all that a layer reads."""
    if isinstance(layer, Concat):
        return tf.concat(values, layer.axis + 1)
    return functools.reduce(operator.add, values)


def _joined(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return x


def _attention(layer: MultiHeadAttention, run: _Run, x: Tensor) -> Tensor:
    samples, steps, features = x.shape
    parts = tf.tensordot(x, run.params[f"{layer.id}.weight"], 1)
    if layer.bias:
        parts = tf.nn.bias_add(parts, run.params[f"{layer.id}.bias"])
    width = features // layer.heads
    by_head = tf.transpose(tf.reshape(parts, (samples, steps, 3, layer.heads, width)), (2, 0, 3, 1, 4))
    query, key, value = tf.unstack(by_head)
    scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(width)
    if layer.causal:
        scores = tf.where(np.tri(steps, dtype=bool), scores, scores.dtype.min)
    found = tf.transpose(tf.matmul(tf.nn.softmax(scores), value), (0, 2, 1, 3))
    y = tf.tensordot(tf.reshape(found, x.shape), run.params[f"{layer.id}.output_weight"], 1)
    return tf.nn.bias_add(y, run.params[f"{layer.id}.output_bias"]) if layer.bias else y


def _position_embedding(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return x + run.params[f"{layer.id}.weight"]


def _flatten(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return tf.reshape(x, (x.shape[0], -1))


def _reshape(layer: Reshape, run: _Run, x: Tensor) -> Tensor:
    return tf.reshape(x, (x.shape[0], *layer.shape))


def _activation(layer: Activation, run: _Run, x: Tensor) -> Tensor:
    return _ACTIVATIONS[layer.activation](x)


def _dropout(layer: Dropout, run: _Run, x: Tensor) -> Tensor:
    return tf.nn.dropout(x, layer.rate) if run.training and layer.rate else x


def _convolution(layer: Convolution, run: _Run, x: Tensor) -> Tensor:
    at = layer.geometry
    kernel = _dilated(run.params[f"{layer.id}.weight"], at.dilation)
    volume = len(at.size) == 3
    if volume and any(map(any, at.padding)):  # which TensorFlow's own takes for images alone
        x = tf.pad(x, ((0, 0), *at.padding, (0, 0)))
    x = _with_two_axes(x)
    kernel = tf.expand_dims(kernel, 0) if len(at.size) == 1 else kernel
    padding = ((0, 0), *_two(at.padding, (0, 0)), (0, 0))
    strides = _two(at.stride, 1)

    def part(x: Tensor, kernel: Tensor) -> Tensor:
        if volume:
            return tf.nn.conv3d(x, kernel, (1, *at.stride, 1), "VALID")
        return tf.nn.conv2d(x, kernel, strides, padding if any(map(any, padding)) else "VALID")

    if layer.groups == 1:
        product = part(x, kernel)
    else:  # TensorFlow's kernels for CPUs have no gradient by groups
        parts = zip(tf.split(x, layer.groups, -1), tf.split(kernel, layer.groups, -1), strict=True)
        product = tf.concat([part(*pair) for pair in parts], -1)
    product = tf.squeeze(product, 1) if len(at.size) == 1 else product
    return tf.nn.bias_add(product, run.params[f"{layer.id}.bias"]) if layer.bias else product


def _transposed_convolution(layer: TransposedConvolution, run: _Run, x: Tensor) -> Tensor:
    at = layer.geometry
    kernel = _dilated(run.params[f"{layer.id}.weight"], at.dilation)
    kernel = tf.expand_dims(kernel, 0) if len(at.size) == 1 else kernel
    x = _with_two_axes(x)
    lengths = [(n - 1) * s + k for n, s, k in zip(x.shape[1:-1], _two(at.stride, 1), _two(at.extent, 1), strict=True)]
    shape = (x.shape[0], *lengths, layer.filters // layer.groups)
    function = tf.nn.conv3d_transpose if len(at.size) == 3 else tf.nn.conv2d_transpose

    def part(x: Tensor, kernel: Tensor) -> Tensor:
        return function(x, kernel, shape, _two(at.stride, 1), "VALID")

    pairs = zip(tf.split(x, layer.groups, -1), tf.split(kernel, layer.groups, -1), strict=True)
    whole = tf.concat([part(*pair) for pair in pairs], -1)
    whole = tf.squeeze(whole, 1) if len(at.size) == 1 else whole
    whole = tf.pad(whole, ((0, 0), *((0, extra) for extra in layer.extra), (0, 0)))
    kept = (slice(before, n - after) for n, (before, after) in zip(whole.shape[1:-1], at.padding, strict=True))
    product = whole[(slice(None), *kept)]
    return tf.nn.bias_add(product, run.params[f"{layer.id}.bias"]) if layer.bias else product


def _interpolate(layer: Interpolate, run: _Run, x: Tensor) -> Tensor:
    for axis, places in enumerate(layer.places((x.shape[-1], *x.shape[1:-1])), 1):
        first, share = (
            np.array([at for at, _ in places]),
            np.array([part for _, part in places], x.dtype.as_numpy_dtype),
        )
        before = tf.gather(x, first, axis=axis)
        if share.any():
            behind = tf.gather(x, first + (share > 0), axis=axis)
            before = before + (behind - before) * share.reshape(-1, *[1] * (len(x.shape) - 1 - axis))
        x = before
    return x


def _dilated(kernel: Tensor, dilation: Sequence[int]) -> Tensor:
    """A kernel with zeros between its elements: TensorFlow has no gradients of dilated convolutions on CPUs."""
    for axis, step in enumerate(dilation):
        if step > 1:
            shape = kernel.shape
            zeros = [[0, 0]] * (len(shape) + 1)
            zeros[axis + 1] = [0, step - 1]
            kernel = tf.pad(tf.expand_dims(kernel, axis + 1), zeros)
            kernel = tf.reshape(kernel, (*shape[:axis], shape[axis] * step, *shape[axis + 1 :]))
            kernel = tf.gather(kernel, range(shape[axis] * step - step + 1), axis=axis)
    return kernel


def _with_two_axes(x: Tensor) -> Tensor:
    """(N, length, channels) as an image of one row: there is nothing else for sequences."""
    return x if len(x.shape) > 3 else tf.expand_dims(x, 1)


def _two(values: Sequence[Any], first: Any) -> tuple[Any, ...]:
    return tuple(values) if len(values) > 1 else (first, *values)


def _pool(function: Callable[..., Tensor], filling: float, layer: Pool, run: _Run, x: Tensor) -> Tensor:
    at, lengths = layer.geometry, tuple(x.shape[1:-1])
    padding = at.filled(lengths)
    if any(map(any, padding)):
        x = tf.pad(x, ((0, 0), *padding, (0, 0)), constant_values=tf.constant(filling, x.dtype))
    if filling and run.xla and math.prod(at.size) <= _WRITTEN_OUT:
        return _maximum(layer, x)
    found = _pooled(function, "MAX" if filling else "AVG", x, at.size, at.stride, at.dilation)
    counts = () if filling else at.counted(lengths, layer.counts_padding)
    if all({*n} == {k} for n, k in zip(counts, at.size, strict=False)):
        return found
    counted = functools.reduce(operator.mul, np.ix_(*(np.maximum(n, 1) for n in counts)))
    return found * tf.constant((math.prod(at.size) / counted)[..., None], x.dtype)


def _maximum(layer: Pool, x: Tensor) -> Tensor:
    """A maximum of padded windows, written out: XLA's own gradient of it takes longer on CPUs."""
    at, largest = layer.geometry, None
    for corner in itertools.product(*map(range, at.size)):
        # What is at this place of every window.
        first = [place * dilation for place, dilation in zip(corner, at.dilation, strict=True)]
        last = (start + n - extent + 1 for start, n, extent in zip(first, x.shape[1:-1], at.extent, strict=True))
        found = x[(slice(None), *map(slice, first, last, at.stride))]
        if largest is None:
            largest = found
            continue
        # The first of equal ones has the gradient, and NaN wins.
        largest = tf.where((largest >= found) | tf.math.is_nan(largest), largest, found)
    return largest


def _pooled(
    function: Callable[..., Tensor],
    kind: str,
    x: Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """A pool without padding."""
    if len(size) == 3:  # first height and width, then depth: TensorFlow pools volumes in float32 alone on CPUs
        samples, depth, *lengths, channels = x.shape
        flat = tf.reshape(x, (samples * depth, *lengths, channels))
        flat = _pooled(function, kind, flat, size[1:], stride[1:], dilation[1:])
        height, width = flat.shape[1:3]
        flat = tf.reshape(flat, (samples, depth, height * width, channels))
        flat = _pooled(function, kind, flat, (size[0], 1), (stride[0], 1), (dilation[0], 1))
        return tf.reshape(flat, (samples, -1, height, width, channels))
    if set(dilation) == {1}:
        found = function(_with_two_axes(x), _two(size, 1), _two(stride, 1), "VALID")
        return found if len(size) == 2 else tf.squeeze(found, 1)
    # TensorFlow has a stride or a dilation, not both.
    found = tf.nn.pool(x, size, kind, padding="VALID", dilations=dilation)
    return found[(slice(None), *(slice(None, None, step) for step in stride))]


def _global_max(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    x = tf.reshape(x, (x.shape[0], -1, x.shape[-1]))
    where = tf.argmax(x, 1)  # of equal ones the first alone has the gradient
    return tf.gather(tf.transpose(x, (0, 2, 1)), where, axis=2, batch_dims=2)


def _global_average(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return tf.reduce_mean(x, tuple(range(1, len(x.shape) - 1)))


def _embedding(layer: Embedding, run: _Run, x: Tensor) -> Tensor:
    found = tf.gather(run.params[f"{layer.id}.weight"], x)
    row = layer.padding_row
    return found if row is None else tf.where((x == row)[..., None], tf.stop_gradient(found), found)


def _permuted(layer: PermuteDims, run: _Run, x: Tensor) -> Tensor:
    return x  # `channels_last` has seen to it


def _rbf(layer: RBF, run: _Run, x: Tensor) -> Tensor:
    away = x[..., None, :] - run.params[f"{layer.id}.centers"]
    return tf.exp(-run.params[f"{layer.id}.beta"] * tf.reduce_sum(away * away, -1))


def _batch_norm(layer: BatchNorm, run: _Run, x: Tensor) -> Tensor:
    scale, shift, mean, variance = (
        run.params[f"{layer.id}.{name}"] for name in ("scale", "shift", "running_mean", "running_var")
    )
    images_in_float32 = len(x.shape) == 4 and x.dtype == tf.float32
    if run.training and not run.xla and images_in_float32 and math.prod(x.shape) >= _FUSED:
        y, *now = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=shift, mean=[], variance=[], epsilon=layer.eps, is_training=True
        )[:3]  # normalised by the biased variance; the one that it returns is unbiased
        run.moved(layer, now)
        return y
    if run.training:
        mean, variance = tf.nn.moments(x, tuple(range(len(x.shape) - 1)))
        count = math.prod(x.shape[:-1])
        run.moved(layer, (mean, variance * (count / max(count - 1, 1))))
    return tf.nn.batch_normalization(x, mean, variance, shift, scale, layer.eps)


def _layer_norm(layer: LayerNorm, run: _Run, x: Tensor) -> Tensor:
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    scale, shift = run.params[f"{layer.id}.scale"], run.params[f"{layer.id}.shift"]
    return tf.nn.batch_normalization(x, mean, variance, shift, scale, layer.eps)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": tf.identity,
    "tanh": tf.tanh,
    "relu": tf.nn.relu,
    "sigmoid": tf.sigmoid,
    "softplus": tf.nn.softplus,
    "softmax": tf.nn.softmax,
    # TensorFlow's own have constants in float32, whatever they compute with.
    "gelu": lambda x: 0.5 * x * tf.math.erfc(-math.sqrt(0.5) * x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    "silu": tf.nn.silu,
    "leaky_relu": lambda x: tf.where(x > 0, x, 0.01 * x),
    "elu": tf.nn.elu,
}

_MAX, _AVERAGE = partial(_pool, tf.nn.max_pool2d, -math.inf), partial(_pool, tf.nn.avg_pool2d, 0.0)

_LAYERS: dict[str, Callable[[Any, _Run, Tensor], Tensor]] = {
    "dense": _dense,
    "rnn": _recurrent,
    "lstm": _recurrent,
    "gru": _recurrent,
    "flatten": _flatten,
    "reshape": _reshape,
    "activation": _activation,
    "dropout": _dropout,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "conv1d_transpose": _transposed_convolution,
    "conv2d_transpose": _transposed_convolution,
    "conv3d_transpose": _transposed_convolution,
    "max_pool1d": _MAX,
    "max_pool2d": _MAX,
    "max_pool3d": _MAX,
    "avg_pool1d": _AVERAGE,
    "avg_pool2d": _AVERAGE,
    "avg_pool3d": _AVERAGE,
    "interpolate": _interpolate,
    "global_max_pool": _global_max,
    "global_avg_pool": _global_average,
    "embedding": _embedding,
    "permute_dims": _permuted,
    "rbf": _rbf,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "multi_head_attention": _attention,
    "position_embedding": _position_embedding,
    "add": _joined,
    "concat": _joined,
}


# Losses: the mean over a batch, and the number of right answers in it -------------------------------------------------


def _cross_entropy(logits: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    if settings:
        return _weighted_cross_entropy(logits, labels, **settings)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _weighted_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    class_weights: tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
    ignored_class: int | None = None,
) -> Tensor:
    classes, dtype = logits.shape[-1], logits.dtype
    weights = tf.constant([1.0] * classes if class_weights is None else class_weights, dtype)
    kept = tf.ones(labels.shape, dtype) if ignored_class is None else tf.cast(labels != ignored_class, dtype)
    hot = tf.one_hot(tf.where(kept > 0, labels, 0), classes, dtype=dtype) * kept[..., None] * weights
    logs = tf.nn.log_softmax(logits)
    spread = kept * tf.reduce_sum(weights * logs, -1)
    rows = (1 - label_smoothing) * tf.reduce_sum(hot * logs, -1) + label_smoothing / classes * spread
    return -tf.reduce_sum(rows) / tf.reduce_sum(hot)


def _binary_cross_entropy(logits: Tensor, targets: Tensor, positive_weight: float = 1.0) -> Tensor:
    if positive_weight != 1:
        return tf.reduce_mean(tf.nn.weighted_cross_entropy_with_logits(targets, logits, positive_weight))
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(targets, logits))


def _mean_squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return tf.reduce_mean(tf.math.squared_difference(output, targets))


def _right_classes(logits: Tensor, labels: Tensor, ignored: int | None) -> Tensor:
    right = tf.argmax(logits, -1) == labels
    return tf.math.count_nonzero(right if ignored is None else right & (labels != ignored))


def _right_answers(logits: Tensor, targets: Tensor, ignored: int | None) -> Tensor:
    return tf.math.count_nonzero((logits > 0) == (targets > 0.5))


def _no_answers(output: Tensor, targets: Tensor, ignored: int | None) -> Tensor:
    return tf.constant(math.nan)


_LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "softmax_cross_entropy": (_cross_entropy, _right_classes),
    "binary_cross_entropy": (_binary_cross_entropy, _right_answers),
    "mean_squared_error": (_mean_squared_error, _no_answers),
}


# Optimizers -----------------------------------------------------------------------------------------------------------


class _Updates:
    """PyTorch's formulas, by TensorFlow's fused updates of variables where there are such."""

    KNOWN: ClassVar[Mapping[str, str]] = {"sgd": "_sgd", "rmsprop": "_rmsprop", "adam": "_adam", "adamw": "_adam"}
    """The method that updates a variable, by the optimizer's name."""

    def __init__(self, optimizer: Optimizer, variables: list[Tensor]) -> None:
        self._optimizer = optimizer
        self._variables = variables
        count = {"sgd": 0, "rmsprop": 1}.get(optimizer.name, 2) + bool(optimizer.momentum)
        self._slots = [[tf.Variable(tf.zeros_like(v), trainable=False) for _ in range(count)] for v in variables]
        self._steps = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._update = getattr(self, self.KNOWN[optimizer.name])

    def __call__(self, gradients: list[Tensor]) -> None:
        """Update every variable."""
        settings = self._optimizer
        if settings.clip_norm is not None:
            norm = tf.sqrt(tf.add_n([tf.reduce_sum(g * g) for g in gradients]))
            factor = tf.minimum(settings.clip_norm / (norm + 1e-6), 1)
            gradients = [factor * g for g in gradients]
        if settings.weight_decay and settings.name != "adamw":
            gradients = [g + settings.weight_decay * v for g, v in zip(gradients, self._variables, strict=True)]
        if self._update == self._adam:
            self._steps.assign_add(1)
        for variable, gradient, slots in zip(self._variables, gradients, self._slots, strict=True):
            self._update(variable, gradient, *slots)

    def _sgd(self, variable: Tensor, gradient: Tensor, *slots: Tensor) -> None:
        settings = self._optimizer
        rate = tf.constant(settings.learning_rate, variable.dtype)
        if not slots:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=slots[0].handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(settings.momentum, variable.dtype),
            use_nesterov=settings.nesterov,
        )

    def _rmsprop(self, variable: Tensor, gradient: Tensor, square: Tensor, *slots: Tensor) -> None:
        settings = self._optimizer
        now = square.assign(settings.alpha * square + (1 - settings.alpha) * gradient * gradient)
        move = gradient / (tf.sqrt(now) + settings.eps)
        if slots:
            move = slots[0].assign(settings.momentum * slots[0] + move)
        variable.assign_sub(settings.learning_rate * move)

    def _adam(self, variable: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
        settings, dtype = self._optimizer, variable.dtype
        if settings.name == "adamw":
            variable.assign(variable * (1 - settings.learning_rate * (settings.weight_decay or 0.0)))
        # TensorFlow adds epsilon before the bias is corrected, PyTorch after it. What corrects the bias is
        # computed here, in float64, from the betas as the update's own dtype has them.
        betas = [float(np.array(beta, dtype.as_numpy_dtype)) for beta in settings.betas]
        first, second = (1 - tf.pow(tf.constant(beta, tf.float64), self._steps) for beta in betas)
        root = tf.sqrt(second)
        none = tf.constant(0, dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=mean.handle,
            v=square.handle,
            beta1_power=none,
            beta2_power=none,
            lr=tf.cast(settings.learning_rate * root / first, dtype),
            beta1=tf.constant(betas[0], dtype),
            beta2=tf.constant(betas[1], dtype),
            epsilon=tf.cast(settings.eps * root, dtype),
            grad=gradient,
        )
