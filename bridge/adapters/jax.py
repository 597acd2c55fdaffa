"""JAX, used as someone who knows it well would: the whole training step is one function compiled by XLA, which gathers
its batch from data that is on the device already, and overwrites parameters and optimizer state (donated arguments).

Python calls the step once per batch, as in the other engines that Python drives, and reads the losses when the epoch is
over. (A call of an engine in Julia trains up to 50 batches, one after the other, with an update after each.) A
`lax.scan` over the whole epoch would spare those calls, but it is no step that a training loop could look at or stop
between, so its time would be that of something else.

Convolutions, pools and batch normalisation have channels last, which is faster on CPUs than channels first;
`bridge.channels_last` says what is left to transpose, and parameters are kept in that layout. A maximum over up to four
elements is written out, since XLA's own gradient of it takes three times as long on CPUs. Sequences of up to 32 steps
are unrolled, longer ones are a `lax.scan`. The optimizers are written out: epsilon has PyTorch's place.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import DTypeLike, NDArray

from bridge import linear_algebra, weights
from bridge.channels_last import channels_last, layouts
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

__all__ = ["JaxSession"]

jax.config.update("jax_platforms", "cpu")  # like all engines here

Array = NDArray[Any]
Tensor: TypeAlias = Any
"""An array of JAX's."""
Tensors = dict[str, Tensor]
"""Arrays by the full names of parameters."""

_UNROLLED = 32
"""The most steps of a sequence that are compiled one after the other."""

_WRITTEN_OUT = 4
"""The most elements of a window whose maximum is written out."""


class JaxSession(TensorSession):
    """A `Session` of compiled steps, one for each batch size."""

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
        super().__init__(spec, dtype, batch_size, _tensor)
        check_known(spec, optimizer.name, "jax", _LAYERS, _UPDATES)
        weights.check(params, spec, dtype)
        if dtype == np.float64:
            jax.config.update("jax_enable_x64", True)
        self._placed = channels_last(spec)
        self._layouts = layouts(spec, self._placed)
        self._is_random = any(isinstance(layer, Dropout) for layer in spec.layers)
        loss, count_right = _LOSSES[spec.loss.op]
        self._loss = partial(loss, **spec.loss.settings())
        self._count_right = partial(count_right, ignored=self._check.loss.ignored_class)
        self._update = partial(_UPDATES[optimizer.name], optimizer)
        self._clip_norm = optimizer.clip_norm
        self._names = list(spec.parameters())
        other = {name: jnp.array(self._layouts[name].stored(params[name])) for name in self._names}
        trained = {name: other.pop(name) for name, p in spec.parameters().items() if p.trainable}
        slots = [jax.tree.map(jnp.zeros_like, trained) for _ in range(_slots(optimizer))]
        # All that a step overwrites: trained parameters, other ones, the optimizer's arrays, the steps so far, and
        # the key of dropout's random numbers.
        self._state = trained, other, slots, jnp.zeros((), jnp.int32), jax.random.key(0)
        self._train = jax.jit(self._step, donate_argnums=0)
        self._gradients = jax.jit(self._loss_and_gradients)
        apply, evaluate = jax.jit(self._output), jax.jit(self._evaluate_part)
        self._apply = lambda x: apply(*self._state[:2], x)
        self._evaluate = lambda x, y: evaluate(*self._state[:2], x, y)

    @classmethod
    def start(cls, threads: int) -> None:
        """See `Starting.start`: XLA's client on the CPU, whose threads the environment of a worker has set."""
        jax.devices()

    def preload(self, x: Array, y: Array) -> None:
        """See `Preloading.preload`."""
        jax.block_until_ready(self._batch(x, y))

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        batch = self._batch(x, y)
        self._check.batches(len(x), len(x))
        (loss, _), gradients = self._gradients(*self._state[:2], self._state[4], *batch)
        return float(loss), self._arrays(gradients)

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        trained, other = self._state[:2]
        return self._arrays(trained | other)

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return linear_algebra.of_jax(jax)

    @staticmethod
    def own_parameters(spec: ModelSpec, seed: int, dtype: DTypeLike = "float32") -> dict[str, Array]:
        """What Flax's layers begin with, in the layout of the spec.

        LeCun's normal distribution, cut off at two deviations, for weights, orthogonal recurrent weights for every
        gate, zeros for biases, a normal distribution with deviation 1/√dimension for embeddings. A layer that Flax
        lacks begins as the spec says.
        """
        dtype = np.dtype(dtype)
        found = weights.initialise(spec, seed, dtype)
        init = jax.nn.initializers
        embedding = init.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        key = jax.random.key(seed)

        def draw(initialiser: Any, shape: tuple[int, ...]) -> Array:
            nonlocal key
            key, now = jax.random.split(key)
            return np.array(initialiser(now, shape, jnp.float32), dtype)

        for layer in spec.layers:
            for name in [name for name in found if name.startswith(f"{layer.id}.")]:
                shape, kind = found[name].shape, name.removeprefix(f"{layer.id}.")
                if isinstance(layer, Embedding):
                    found[name] = draw(embedding, shape)
                elif isinstance(layer, Convolution) and kind == "weight":
                    inside, out = (1, 0) if not isinstance(layer, TransposedConvolution) else (0, 1)
                    kernel = draw(init.lecun_normal(), (*shape[2:], shape[inside], shape[out]))
                    found[name] = np.ascontiguousarray(np.moveaxis(kernel, (-2, -1), (inside, out)))
                elif isinstance(layer, Dense) and kind == "weight":
                    found[name] = draw(init.lecun_normal(), shape)
                elif isinstance(layer, Recurrent) and kind in ("weight", "recurrent"):
                    initialiser = init.lecun_normal() if kind == "weight" else init.orthogonal()
                    gates = [draw(initialiser, (shape[0], layer.units)) for _ in range(layer.gates)]
                    found[name] = np.concatenate(gates, axis=1)
                elif kind == "bias":
                    found[name] = np.zeros(shape, dtype)
        return found

    def _train_rows(self, features: Tensor, targets: Tensor, order: NDArray[np.int64]) -> NDArray[np.float64]:
        rows = order.astype(np.int32)
        found = []
        for start in range(0, len(rows), self._batch_size):
            self._state, loss = self._train(self._state, features, targets, rows[start : start + self._batch_size])
            found.append(loss)
        losses = np.array(jax.device_get(found), np.float64)
        jax.block_until_ready(self._state)
        return losses

    def _arrays(self, tensors: Tensors) -> dict[str, Array]:
        return {name: self._layouts[name].shown(np.asarray(tensors[name])) for name in self._names if name in tensors}

    # What is compiled.

    def _step(self, state: Any, features: Tensor, targets: Tensor, rows: Tensor) -> tuple[Any, Tensor]:
        trained, other, slots, steps, key = state
        key, now = jax.random.split(key) if self._is_random else (key, key)
        x, y = _rows(features, rows), _rows(targets, rows)
        (loss, running), gradients = self._loss_and_gradients(trained, other, now, x, y)
        if self._clip_norm is not None:
            gradients = _clip(gradients, self._clip_norm)
        steps = steps + 1
        updated = {
            name: self._update(p, gradients[name], steps, *(s[name] for s in slots)) for name, p in trained.items()
        }
        trained = {name: new[0] for name, new in updated.items()}
        slots = [{name: new[1 + index] for name, new in updated.items()} for index in range(len(slots))]
        return (trained, other | running, slots, steps, key), loss

    def _loss_and_gradients(self, trained: Tensors, other: Tensors, key: Tensor, x: Tensor, y: Tensor) -> Any:
        def loss(trained: Tensors) -> tuple[Tensor, Tensors]:
            run = _Run(trained | other, training=True, key=key)
            return self._loss(self._network(run, x), y), run.running

        return jax.value_and_grad(loss, has_aux=True)(trained)

    def _network(self, run: _Run, x: Tensor) -> Tensor:
        made = [x]
        for placed in self._placed:
            values = [_moved(made[place + 1], axes) for place, axes in placed.sources]
            x = values[0] if placed.layer is None else _join(placed.layer, values)
            made.append(x if placed.layer is None else _LAYERS[placed.layer.op](placed.layer, run, x))
        return made[-1]

    def _output(self, trained: Tensors, other: Tensors, x: Tensor) -> Tensor:
        return self._network(_Run(trained | other), x)

    def _evaluate_part(self, trained: Tensors, other: Tensors, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = self._output(trained, other, x)
        return self._loss(output, y), self._count_right(output, y)


def _tensor(array: Array) -> Tensor:
    """The same values on the device; whole numbers take four bytes, which are enough for classes and token ids."""
    return jnp.asarray(array.astype(np.int32) if array.dtype.kind == "i" else array)


def _rows(data: Tensor, rows: Tensor) -> Tensor:
    return data.at[rows].get(mode="promise_in_bounds")  # as `DataCheck` has found


# The network ----------------------------------------------------------------------------------------------------------


class _Run:
    """One way through the network: its parameters, and what may happen on the way."""

    def __init__(self, params: Tensors, training: bool = False, key: Tensor = None) -> None:
        self.params = params
        self.training = training
        self.running: Tensors = {}
        """The running statistics after this batch."""
        self._key = key

    def key(self) -> Tensor:
        self._key, key = jax.random.split(self._key)
        return key


def _dense(layer: Dense, run: _Run, x: Tensor) -> Tensor:
    product = x @ run.params[f"{layer.id}.weight"]
    return product + run.params[f"{layer.id}.bias"] if layer.bias else product


def _recurrent(layer: Recurrent, run: _Run, x: Tensor) -> Tensor:
    inputs = x @ run.params[f"{layer.id}.weight"] + run.params[f"{layer.id}.bias"]
    cell = partial(_CELLS[layer.op], layer, run.params[f"{layer.id}.recurrent"])
    sequence = layer.returns == "sequence"
    if x.shape[1] <= _UNROLLED:
        state, outputs = None, []
        for step in range(x.shape[1]):
            state = cell(inputs[:, step], state)
            outputs.append(state[0])
        return jnp.stack(outputs, 1) if sequence else outputs[-1]

    def body(state: Any, now: Tensor) -> tuple[Any, Tensor | None]:
        state = cell(now, state)
        return state, state[0] if sequence else None

    state = (jnp.zeros((len(x), layer.units), x.dtype),) * (2 if layer.op == "lstm" else 1)
    state, states = lax.scan(body, state, jnp.swapaxes(inputs, 0, 1))
    return jnp.swapaxes(states, 0, 1) if sequence else state[0]


State: TypeAlias = tuple[Tensor, ...] | None
"""What a cell keeps from step to step; None, that is zeros, before the first."""


def _rnn_cell(layer: RNN, recurrent: Tensor, x: Tensor, state: State) -> tuple[Tensor, ...]:
    return (_ACTIVATIONS[layer.activation](x if state is None else x + state[0] @ recurrent),)


def _lstm_cell(layer: Recurrent, recurrent: Tensor, x: Tensor, state: State) -> tuple[Tensor, ...]:
    take, keep, new, show = jnp.split(x if state is None else x + state[0] @ recurrent, 4, 1)
    cell = jax.nn.sigmoid(take) * jnp.tanh(new)
    if state is not None:
        cell = jax.nn.sigmoid(keep) * state[1] + cell
    return jax.nn.sigmoid(show) * jnp.tanh(cell), cell


def _gru_cell(layer: Recurrent, recurrent: Tensor, x: Tensor, state: State) -> tuple[Tensor, ...]:
    reset, update, new = jnp.split(x, 3, 1)
    if state is None:
        return ((1 - jax.nn.sigmoid(update)) * jnp.tanh(new),)
    reset_state, update_state, new_state = jnp.split(state[0] @ recurrent, 3, 1)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_state) * new_state)
    update = jax.nn.sigmoid(update + update_state)
    return ((1 - update) * new + update * state[0],)


_CELLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"rnn": _rnn_cell, "lstm": _lstm_cell, "gru": _gru_cell}


def _moved(x: Tensor, axes: tuple[int, ...] | None) -> Tensor:
    return x if axes is None else jnp.transpose(x, (0, *(1 + axis for axis in axes)))


def _join(layer: Layer, values: list[Tensor]) -> Tensor:
    """One of all that a layer reads."""
    if isinstance(layer, Concat):
        return jnp.concatenate(values, layer.axis + 1)
    return functools.reduce(operator.add, values)


def _joined(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return x


def _attention(layer: MultiHeadAttention, run: _Run, x: Tensor) -> Tensor:
    samples, steps, _ = x.shape
    parts = x @ run.params[f"{layer.id}.weight"]
    if layer.bias:
        parts = parts + run.params[f"{layer.id}.bias"]
    query, key, value = jnp.moveaxis(parts.reshape(samples, steps, 3, layer.heads, -1), 2, 0)
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / math.sqrt(query.shape[-1])
    if layer.causal:
        scores = jnp.where(jnp.tri(steps, dtype=bool), scores, jnp.finfo(scores.dtype).min)
    found = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), value).reshape(x.shape)
    y = found @ run.params[f"{layer.id}.output_weight"]
    return y + run.params[f"{layer.id}.output_bias"] if layer.bias else y


def _position_embedding(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return x + run.params[f"{layer.id}.weight"]


def _flatten(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return x.reshape(len(x), -1)


def _reshape(layer: Reshape, run: _Run, x: Tensor) -> Tensor:
    return x.reshape(len(x), *layer.shape)


def _activation(layer: Activation, run: _Run, x: Tensor) -> Tensor:
    return _ACTIVATIONS[layer.activation](x)


def _dropout(layer: Dropout, run: _Run, x: Tensor) -> Tensor:
    if not run.training:
        return x
    kept = 1 - layer.rate
    # In the dtype of the samples: a Python number has that of JAX's switch for the process, and the masks follow it.
    return jnp.where(jax.random.bernoulli(run.key(), np.asarray(kept, x.dtype), x.shape), x / kept, 0)


def _convolution(layer: Convolution, run: _Run, x: Tensor) -> Tensor:
    at = layer.geometry
    settings = {"window_strides": at.stride, "padding": at.padding, "rhs_dilation": at.dilation}
    return _convolved(layer, run, x, run.params[f"{layer.id}.weight"], "IO", settings)


def _transposed(layer: TransposedConvolution, run: _Run, x: Tensor) -> Tensor:
    """A convolution of the input with zeros between its elements, by the kernels turned round."""
    at, weight = layer.geometry, run.params[f"{layer.id}.weight"]
    *kernel, filters, channels = weight.shape  # filters of a group, channels of all
    inside = channels // layer.groups
    by_group = jnp.swapaxes(weight.reshape(*kernel, filters, layer.groups, inside), -3, -2)
    turned = jnp.flip(by_group.reshape(*kernel, -1, inside), tuple(range(len(kernel))))
    padding = [
        (extent - 1 - before, extent - 1 - after + extra)
        for extent, (before, after), extra in zip(at.extent, at.padding, layer.extra, strict=True)
    ]
    ones = (1,) * len(at.size)
    settings = {"window_strides": ones, "padding": padding, "lhs_dilation": at.stride, "rhs_dilation": at.dilation}
    return _convolved(layer, run, x, turned, "OI", settings)


def _convolved(
    layer: Convolution, run: _Run, x: Tensor, weight: Tensor, order: str, settings: Mapping[str, Any]
) -> Tensor:
    """The product with kernels whose last two axes are channels and filters in this order ("IO" or "OI")."""
    axes = "DHW"[: x.ndim - 2]
    product = lax.conv_general_dilated(
        x,
        weight,
        dimension_numbers=(f"N{axes}C", f"{axes}{order}", f"N{axes}C"),
        feature_group_count=layer.groups,
        **settings,
    )
    return product + run.params[f"{layer.id}.bias"] if layer.bias else product


def _interpolate(layer: Interpolate, run: _Run, x: Tensor) -> Tensor:
    for axis, places in enumerate(layer.places((x.shape[-1], *x.shape[1:-1])), 1):
        first, share = np.array([at for at, _ in places]), np.array([part for _, part in places], x.dtype)
        before = jnp.take(x, first, axis)
        if share.any():
            behind = jnp.take(x, first + (share > 0), axis)
            before = before + (behind - before) * share.reshape(-1, *[1] * (x.ndim - 1 - axis))
        x = before
    return x


def _max_pool(layer: Pool, run: _Run, x: Tensor) -> Tensor:
    at = layer.geometry
    if math.prod(at.size) > _WRITTEN_OUT and set(at.dilation) == {1}:
        return _windows(layer, x, -math.inf, lax.max)
    x = jnp.pad(x, ((0, 0), *at.filled(x.shape[1:-1]), (0, 0)), constant_values=-math.inf)
    largest = None
    for corner in itertools.product(*map(range, at.size)):
        # What is at this place of every window.
        first = [place * dilation for place, dilation in zip(corner, at.dilation, strict=True)]
        last = (start + n - extent + 1 for start, n, extent in zip(first, x.shape[1:-1], at.extent, strict=True))
        found = x[:, *map(slice, first, last, at.stride)]
        if largest is None:
            largest = found
            continue
        # The first of equal ones has the gradient, and NaN wins.
        largest = jnp.where((largest >= found) | jnp.isnan(largest), largest, found)
    return largest


def _avg_pool(layer: Pool, run: _Run, x: Tensor) -> Tensor:
    counts = layer.geometry.counted(x.shape[1:-1], layer.counts_padding)
    counted = functools.reduce(operator.mul, np.ix_(*(np.maximum(n, 1) for n in counts)))
    sums = _windows(layer, x, 0.0, lax.add)
    whole = math.prod(layer.geometry.size)
    return sums / whole if np.all(counted == whole) else sums / counted.astype(x.dtype)[..., None]


def _windows(layer: Pool, x: Tensor, start: float, reduce: Any) -> Tensor:
    at, first = layer.geometry, np.array(start, x.dtype)[()]
    padding = ((0, 0), *at.filled(x.shape[1:-1]), (0, 0))
    return lax.reduce_window(
        x, first, reduce, (1, *at.size, 1), (1, *at.stride, 1), padding, window_dilation=(1, *at.dilation, 1)
    )


def _global_max(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    where = lax.stop_gradient(x).argmax(1, keepdims=True)  # of equal ones the first alone has the gradient
    return jnp.take_along_axis(x, where, 1, mode="promise_in_bounds")[:, 0]


def _global_average(layer: Layer, run: _Run, x: Tensor) -> Tensor:
    return x.mean(tuple(range(1, x.ndim - 1)))


def _embedding(layer: Embedding, run: _Run, x: Tensor) -> Tensor:
    found = _rows(run.params[f"{layer.id}.weight"], x)
    row = layer.padding_row
    return found if row is None else jnp.where((x == row)[..., None], lax.stop_gradient(found), found)


def _permuted(layer: PermuteDims, run: _Run, x: Tensor) -> Tensor:
    return x  # `channels_last` has seen to it


def _rbf(layer: RBF, run: _Run, x: Tensor) -> Tensor:
    away = x[..., None, :] - run.params[f"{layer.id}.centers"]
    return jnp.exp(-run.params[f"{layer.id}.beta"] * (away * away).sum(-1))


def _batch_norm(layer: BatchNorm, run: _Run, x: Tensor) -> Tensor:
    scale, shift, mean, variance = (
        run.params[f"{layer.id}.{name}"] for name in ("scale", "shift", "running_mean", "running_var")
    )
    if run.training:
        axes = tuple(range(x.ndim - 1))
        before = {"mean": mean, "var": variance}
        mean, variance = x.mean(axes), x.var(axes)
        count = math.prod(x.shape[:-1])
        now = {"mean": mean, "var": variance * (count / max(count - 1, 1))}
        for name, value in before.items():
            moved = value + layer.momentum * (lax.stop_gradient(now[name]) - value)
            run.running[f"{layer.id}.running_{name}"] = moved
    factor = scale * lax.rsqrt(variance + layer.eps)
    return (x - mean) * factor + shift


def _layer_norm(layer: LayerNorm, run: _Run, x: Tensor) -> Tensor:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    scale, shift = run.params[f"{layer.id}.scale"], run.params[f"{layer.id}.shift"]
    return (x - mean) * lax.rsqrt(variance + layer.eps) * scale + shift


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "softmax": jax.nn.softmax,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
}

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
    "conv1d_transpose": _transposed,
    "conv2d_transpose": _transposed,
    "conv3d_transpose": _transposed,
    "max_pool1d": _max_pool,
    "max_pool2d": _max_pool,
    "max_pool3d": _max_pool,
    "avg_pool1d": _avg_pool,
    "avg_pool2d": _avg_pool,
    "avg_pool3d": _avg_pool,
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
    chosen = jnp.take_along_axis(logits, labels[..., None], -1, mode="promise_in_bounds")[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def _weighted_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    class_weights: tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
    ignored_class: int | None = None,
) -> Tensor:
    classes, dtype = logits.shape[-1], logits.dtype
    weights = np.ones(classes, dtype) if class_weights is None else np.array(class_weights, dtype)
    kept = jnp.ones(labels.shape, dtype) if ignored_class is None else (labels != ignored_class).astype(dtype)
    hot = jax.nn.one_hot(jnp.where(kept > 0, labels, 0), classes, dtype=dtype) * kept[..., None] * weights
    logs = jax.nn.log_softmax(logits)
    rows = (1 - label_smoothing) * (hot * logs).sum(-1) + label_smoothing / classes * kept * (weights * logs).sum(-1)
    return -rows.sum() / hot.sum()


def _binary_cross_entropy(logits: Tensor, targets: Tensor, positive_weight: float = 1.0) -> Tensor:
    losses = positive_weight * targets * jax.nn.softplus(-logits) + (1 - targets) * jax.nn.softplus(logits)
    return losses.mean()


def _mean_squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return jnp.square(output - targets).mean()


def _right_classes(logits: Tensor, labels: Tensor, ignored: int | None) -> Tensor:
    right = logits.argmax(-1) == labels
    return (right if ignored is None else right & (labels != ignored)).sum()


def _right_answers(logits: Tensor, targets: Tensor, ignored: int | None) -> Tensor:
    return ((logits > 0) == (targets > 0.5)).sum()


def _no_answers(output: Tensor, targets: Tensor, ignored: int | None) -> Tensor:
    return jnp.nan


_LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "softmax_cross_entropy": (_cross_entropy, _right_classes),
    "binary_cross_entropy": (_binary_cross_entropy, _right_answers),
    "mean_squared_error": (_mean_squared_error, _no_answers),
}


# Optimizers: the parameter and its arrays after a step, by PyTorch's formulas -----------------------------------------


def _clip(gradients: Tensors, limit: float) -> Tensors:
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in gradients.values()))
    factor = jnp.minimum(limit / (norm + 1e-6), 1)
    return {name: factor * gradient for name, gradient in gradients.items()}


def _slots(optimizer: Optimizer) -> int:
    """How many arrays an optimizer keeps for each parameter."""
    return {"sgd": 0, "rmsprop": 1}.get(optimizer.name, 2) + bool(optimizer.momentum)


def _decayed(optimizer: Optimizer, p: Tensor, g: Tensor) -> Tensor:
    return g + optimizer.weight_decay * p if optimizer.weight_decay else g


def _sgd(optimizer: Optimizer, p: Tensor, g: Tensor, steps: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
    g = _decayed(optimizer, p, g)
    if not slots:
        return (p - optimizer.learning_rate * g,)
    velocity = optimizer.momentum * slots[0] + g
    move = g + optimizer.momentum * velocity if optimizer.nesterov else velocity
    return p - optimizer.learning_rate * move, velocity


def _rmsprop(optimizer: Optimizer, p: Tensor, g: Tensor, steps: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
    g = _decayed(optimizer, p, g)
    square = optimizer.alpha * slots[0] + (1 - optimizer.alpha) * g * g
    move = g / (jnp.sqrt(square) + optimizer.eps)
    if not optimizer.momentum:
        return p - optimizer.learning_rate * move, square
    velocity = optimizer.momentum * slots[1] + move
    return p - optimizer.learning_rate * velocity, square, velocity


def _adam(optimizer: Optimizer, p: Tensor, g: Tensor, steps: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
    first, second = optimizer.betas
    if optimizer.name == "adamw":
        p = p * (1 - optimizer.learning_rate * (optimizer.weight_decay or 0.0))
    else:
        g = _decayed(optimizer, p, g)
    mean = first * slots[0] + (1 - first) * g
    square = second * slots[1] + (1 - second) * g * g
    size = optimizer.learning_rate / _one_less_power(first, steps, p.dtype)
    root = jnp.sqrt(square) / jnp.sqrt(_one_less_power(second, steps, p.dtype)) + optimizer.eps
    return p - size * mean / root, mean, square


def _one_less_power(beta: float, steps: Tensor, dtype: Any) -> Tensor:
    """1 - beta ** steps, exactly also where that is close to 0."""
    return -jnp.expm1(math.log(beta) * steps.astype(dtype)) if beta else jnp.ones((), dtype)


_UPDATES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "adam": _adam,
    "adamw": _adam,
}
