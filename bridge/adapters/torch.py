"""PyTorch, used as someone who knows it well would: data as tensors once, batches by `index_select`, nothing read back
before the end of the epoch, torch's own layers and optimizers (fused where it has them so).

Its matrices are ours transposed, but for those of embeddings and convolutions, which are the same. Its recurrent layers
have a second bias: zero, and frozen, so that training stays the same as everywhere else. Gates are in the same order.
Convolutions of images have their weights, and so images, in memory with channels last: on CPUs a step takes 0.66 to
1.02 times as long so (LeNet-5 and CNNs of 3x3 convolutions, mini-batches of 1 to 256). The exception is a single
convolution of one image at a time, which takes 1.13 times as long.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch._dynamo  # which optimizers import when they are made: part of the import, as it is elsewhere
from numpy.typing import DTypeLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bridge import linear_algebra, weights
from bridge.checks import TensorSession, check_known, check_losses, check_rates
from bridge.layers import (
    RBF,
    RNN,
    Add,
    BatchNorm,
    Concat,
    Convolution,
    Dense,
    Embedding,
    Geometry,
    Interpolate,
    Layer,
    LayerNorm,
    MultiHeadAttention,
    Pool,
    PositionEmbedding,
    Recurrent,
    Shape,
    TransposedConvolution,
)
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from py_engine.errors import ParameterError

__all__ = ["Built", "TorchSession", "UnrolledRecurrent", "unrolled"]

Array = NDArray[Any]


class TorchSession(TensorSession):
    """A `Session` that runs eagerly."""

    _unrolls: ClassVar[bool] = False
    """Whether recurrent layers are plain loops."""

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
        check_known(spec, optimizer.name, "torch", _LAYERS, _OPTIMIZERS)
        weights.check(params, spec, dtype)
        torch.manual_seed(0)  # of what dropout draws
        torch.set_num_threads(threads)
        self._clip_norm = optimizer.clip_norm
        self._model, self._places = _build_model(spec, dtype, self._unrolls)
        images = [module for module in self._model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
        if batch_size > 1 or len(images) > 1:
            for module in images:
                module.to(memory_format=torch.channels_last)
        for name, place in self._places.items():
            place.set(params[name])
        criterion, count_right = _LOSSES[spec.loss.op]
        settings = _loss_settings(spec.loss.settings(), getattr(torch, dtype.name))
        self._criterion = partial(criterion, **settings) if settings else criterion
        self._count_right = partial(count_right, ignored=self._check.loss.ignored_class)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = _build_optimizer(trained, optimizer)
        self._trained = trained
        self._keys = (*_KEPT[optimizer.name], *(["momentum_buffer"] if optimizer.momentum else []))
        self._unread: list[nn.Parameter] | None = None  # what the loss does not depend on

    def train_steps(
        self, x: Array, y: Array, order: NDArray[np.int64], rates: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """See `Scheduling.train_steps`."""
        features, targets = self._batch(x, y)
        rows = self._check.order(order, x)
        self._check.batches(len(rows), self._batch_size)
        batches = np.split(rows, range(self._batch_size, len(rows), self._batch_size))
        check_rates(rates, len(batches))
        losses = np.empty(len(batches))
        for step, batch in enumerate(batches):
            for group in self._optimizer.param_groups:
                group["lr"] = float(rates[step])
            (losses[step],) = self._train_rows(features, targets, batch)
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        features, targets = self._batch(x, y)
        self._check.batches(len(x), len(x))
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        state = {name: place.value() for name, place in self._places.items() if not place.tensor.requires_grad}
        loss = self._loss(features, targets)
        loss.backward()
        for name, value in state.items():
            self._places[name].set(value)
        gradients = {name: place.gradient() for name, place in self._places.items() if place.tensor.requires_grad}
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), gradients

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        return {name: place.value() for name, place in self._places.items()}

    def state(self) -> dict[str, Array]:
        """See `Resumable.state`."""
        kept = self._optimizer.state_dict()["state"]
        found = {f"{index}.{name}": value for index, values in kept.items() for name, value in values.items()}
        arrays = {name: value.numpy().copy() for name, value in found.items() if isinstance(value, Tensor)}
        return arrays | {"random": torch.get_rng_state().numpy(), "steps": np.array(self._steps)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See `Resumable.load_state`."""
        if not {"random", "steps"} <= state.keys():
            raise ParameterError(f"expected the state of a session of PyTorch, found {', '.join(state)}")
        kept = self._fitting({name: array for name, array in state.items() if name not in ("random", "steps")})
        if int(state["steps"]) and len(kept) < len(self._trained) * bool(self._keys):
            raise ParameterError("the state does not fit: it is of an optimizer that keeps no arrays")
        groups = self._optimizer.state_dict()["param_groups"]
        try:
            torch.set_rng_state(torch.tensor(state["random"]))
        except (RuntimeError, TypeError) as error:
            raise ParameterError(f"the state does not fit: its random stream is none of PyTorch's ({error})") from None
        self._optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self._steps = int(state["steps"])

    def _fitting(self, arrays: Mapping[str, Array]) -> dict[int, dict[str, Tensor]]:
        """The optimizer's arrays by parameter and key, as it would have made them: fused kernels look at no strides.

        Raises `ParameterError` unless there are all, of the parameters' shapes and dtype, or none.
        """
        kept: dict[int, dict[str, Tensor]] = {}
        left = dict(arrays)
        for index, parameter in enumerate(self._trained if arrays else ()):
            for key in self._keys:
                array = left.pop(f"{index}.{key}", None)
                like = torch.empty(()) if key == "step" else torch.empty_like(parameter, requires_grad=False)
                expected = (tuple(like.shape), str(like.dtype).removeprefix("torch."))
                found = None if array is None else (array.shape, array.dtype.name)
                if array is None or found != expected:
                    raise ParameterError(f"the state does not fit: {index}.{key}: expected {expected}, found {found}")
                kept.setdefault(index, {})[key] = like.copy_(torch.tensor(array))
        if left:
            raise ParameterError(f"the state does not fit: this optimizer keeps no {', '.join(left)}")
        return kept

    def linear_algebra(self) -> str:
        """See `Session.linear_algebra`."""
        return linear_algebra.of_torch(torch)

    @staticmethod
    def own_parameters(spec: ModelSpec, seed: int, dtype: DTypeLike = "float32") -> dict[str, Array]:
        """What torch's layers start from after ``torch.manual_seed(seed)``, less the second bias of recurrent ones."""
        with torch.random.fork_rng(devices=[]):  # the global stream is left as it was: an open session draws from it
            torch.manual_seed(seed)
            _, places = _build_model(spec, np.dtype(dtype), unrolls=False)
            return {name: places[name].value() for name in spec.parameters()}

    def _train_rows(self, features: Tensor, targets: Tensor, order: NDArray[np.int64]) -> NDArray[np.float64]:
        rows = _tensor(order)
        self._model.train()
        steps = [
            self._step(features.index_select(0, batch), targets.index_select(0, batch))
            for batch in rows.split(self._batch_size)
        ]
        losses: NDArray[np.float64] = torch.stack(steps).double().numpy()
        return losses

    def _step(self, features: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(features, targets)
        loss.backward()
        if self._unread is None:
            self._unread = [p for p in self._trained if p.grad is None]
        for p in self._unread:  # such as `recurrent` in a sequence of one step: optimizers skip what has no gradient
            p.grad = torch.zeros_like(p)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        self._optimizer.step()
        return loss.detach()

    def _evaluate(self, features: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        with torch.inference_mode():
            output = self._apply(features)
            return self._criterion(output, targets), self._count_right(output, targets)

    def _apply(self, features: Tensor) -> Tensor:
        self._model.eval()
        with torch.inference_mode():
            return self._model(features)

    def _loss(self, features: Tensor, targets: Tensor) -> Tensor:
        return self._criterion(self._model(features), targets)


def _build_model(spec: ModelSpec, dtype: np.dtype[Any], unrolls: bool) -> tuple[nn.Module, dict[str, _Place]]:
    """The network, and where our parameters are in it; `unrolls` says whether recurrent layers are plain loops."""
    modules: list[nn.Module] = []
    places: dict[str, _Place] = {}
    for layer, shape in zip(spec.layers, spec.shapes(), strict=True):
        if unrolls and isinstance(layer, Recurrent):
            built = unrolled(layer, shape.input)
        else:
            built = _LAYERS[layer.op](layer, shape.input)
        modules.append(built.module.to(getattr(torch, dtype.name)))
        places |= {f"{layer.id}.{name}": place for name, place in built.places.items()}
    if spec.is_chain:
        return nn.Sequential(*modules), places
    return _Graph(modules, spec.sources(), [_join(layer) for layer in spec.layers]), places


# Layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where one of our parameters is: a parameter or a buffer of a module."""

    module: nn.Module
    name: str
    transposed: bool = True
    """Whether torch holds a matrix as its transpose."""

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.name)  # a buffer is another tensor once the module's dtype is changed

    def set(self, array: Array) -> None:
        with torch.no_grad():
            self.tensor.copy_(torch.from_numpy(np.array(self._turned(array))))

    def value(self) -> Array:
        return np.array(self._turned(self.tensor.detach().numpy()), order="C")

    def gradient(self) -> Array:
        gradient = self.tensor.grad
        return np.zeros_like(self.value()) if gradient is None else np.array(self._turned(gradient.numpy()), order="C")

    def _turned(self, array: Array) -> Array:
        return array.T if self.transposed else array


@dataclass(frozen=True)
class Built:
    """A layer's module, and our names for its parameters."""

    module: nn.Module
    places: Mapping[str, _Place]


class _Graph(nn.Module):  # type: ignore[misc]
    """Layers that read what those before them make: by their numbers, -1 for the input."""

    def __init__(
        self,
        modules: list[nn.Module],
        sources: list[tuple[int, ...]],
        joins: list[Callable[[list[Tensor]], Tensor]],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)
        self._sources = sources
        self._joins = joins

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer, sources, join in zip(self.layers, self._sources, self._joins, strict=True):
            made.append(layer(join([made[place + 1] for place in sources])))
        return made[-1]


def _join(layer: Layer) -> Callable[[list[Tensor]], Tensor]:
    """What makes one of all that a layer reads."""
    if isinstance(layer, Concat):
        return partial(torch.cat, dim=layer.axis + 1)
    return _sum if isinstance(layer, Add) else operator.itemgetter(0)


def _sum(values: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, values)


class _Attention(nn.Module):  # type: ignore[misc]
    """Self-attention whose biases may be missing, which torch's own has all in one product, too."""

    def __init__(self, features: int, heads: int, causal: bool, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(features, 3 * features, bias)
        self.outer = nn.Linear(features, features, bias)
        self._heads, self._causal = heads, causal
        nn.init.xavier_uniform_(self.inner.weight)  # as torch's own
        if bias:
            nn.init.zeros_(self.inner.bias)
            nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=self._causal)
        return self.outer(found.transpose(1, 2).flatten(2))


class _PositionEmbedding(nn.Module):  # type: ignore[misc]
    def __init__(self, steps: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(steps, features))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class _Apply(nn.Module):  # type: ignore[misc]
    """A function of the input, and of settings, as a module."""

    def __init__(self, function: Callable[..., Tensor], *settings: Any) -> None:
        super().__init__()
        self._function, self._settings = function, settings

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, *self._settings)


class _RBF(nn.Module):  # type: ignore[misc]
    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(units, features))
        self.beta = nn.Parameter(torch.ones(units))

    def forward(self, x: Tensor) -> Tensor:
        # Not through a matrix product, whose rounding is large beside the distance of what is close to a center.
        distance = torch.cdist(x.flatten(0, -2), self.centers, compute_mode="donot_use_mm_for_euclid_dist")
        return torch.exp(-self.beta * distance.square()).view(*x.shape[:-1], -1)


class _BatchNorm(nn.BatchNorm1d):  # type: ignore[misc]
    """Torch's classes for one, two and three axes differ only in what they accept."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class _Recurrent(nn.Module):  # type: ignore[misc]
    """One of torch's own recurrent layers, its second bias zero and frozen, its output or its last state."""

    def __init__(self, layer: nn.Module, returns: str) -> None:
        super().__init__()
        self.layer = layer
        self._sequence = returns == "sequence"
        nn.init.zeros_(layer.bias_hh_l0).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.layer(x)
        if self._sequence:
            return output
        return (state[0] if isinstance(state, tuple) else state)[0]


class UnrolledRecurrent(nn.Module):  # type: ignore[misc]
    """A recurrent layer as a plain loop: for torch.compile, which can't see into torch's own, and what they lack.

    The state of zeros before the first step is None, which saves a product with nothing.
    """

    def __init__(self, layer: Recurrent, features: int) -> None:
        super().__init__()
        width = layer.gates * layer.units
        self.weight = nn.Parameter(torch.empty(width, features))
        self.recurrent = nn.Parameter(torch.empty(width, layer.units))
        self.bias = nn.Parameter(torch.empty(width))
        self._sequence = layer.returns == "sequence"
        self._cell = {"rnn": self._rnn, "lstm": self._lstm, "gru": self._gru}[layer.op]
        self._activation = _ACTIVATIONS[layer.activation]() if isinstance(layer, RNN) else torch.tanh
        for parameter in self.parameters():  # as torch's own
            nn.init.uniform_(parameter, -1 / math.sqrt(layer.units), 1 / math.sqrt(layer.units))

    def forward(self, x: Tensor) -> Tensor:
        """(N, steps, features) to (N, units), or to (N, steps, units) for a sequence."""
        state: tuple[Tensor, ...] | None = None
        outputs = []
        for step in F.linear(x, self.weight, self.bias).unbind(1):
            state = self._cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1) if self._sequence else outputs[-1]

    def _rnn(self, x: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        return (self._activation(x if state is None else torch.addmm(x, state[0], self.recurrent.t())),)

    def _lstm(self, x: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        gates = x if state is None else torch.addmm(x, state[0], self.recurrent.t())
        take, keep, new, show = gates.chunk(4, 1)
        cell = torch.sigmoid(take) * torch.tanh(new)
        if state is not None:
            cell = cell + torch.sigmoid(keep) * state[1]
        return torch.sigmoid(show) * torch.tanh(cell), cell

    def _gru(self, x: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        reset, update, new = x.chunk(3, 1)
        if state is None:
            return ((1 - torch.sigmoid(update)) * torch.tanh(new),)
        (before,) = state
        reset_state, update_state, new_state = (before @ self.recurrent.t()).chunk(3, 1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_state) * new_state)
        return (torch.lerp(new, before, torch.sigmoid(update + update_state)),)


def _reshaped(x: Tensor, shape: Shape) -> Tensor:
    return x.reshape(len(x), *shape)


def _dense(layer: Dense, input: Shape) -> Built:
    module = nn.Linear(input[-1], layer.units, bias=layer.bias)
    return Built(module, {name: _Place(module, name) for name in (("weight", "bias") if layer.bias else ("weight",))})


def _convolution(layer: Convolution, input: Shape) -> Built:
    geometry = layer.geometry
    padding, ahead = _padding(geometry, 0.0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(geometry.size) - 1]
    module = kind(
        input[0], layer.filters, geometry.size, geometry.stride, padding, geometry.dilation, layer.groups, layer.bias
    )
    names = ("weight", "bias") if layer.bias else ("weight",)
    places = {name: _Place(module, name, transposed=False) for name in names}
    return Built(nn.Sequential(ahead, module) if ahead else module, places)


def _transposed(layer: TransposedConvolution, input: Shape) -> Built:
    at = layer.geometry
    cut, behind = _padding(replace(at, padding=tuple((-before, -after) for before, after in at.padding)), 0.0)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[len(at.size) - 1]
    padding = tuple(-sides for sides in cut)
    module = kind(
        *(input[0], layer.filters, at.size, at.stride, padding, layer.extra, layer.groups, layer.bias, at.dilation)
    )
    names = ("weight", "bias") if layer.bias else ("weight",)
    places = {name: _Place(module, name, transposed=False) for name in names}
    return Built(nn.Sequential(module, behind) if behind else module, places)


def _interpolate(layer: Interpolate, input: Shape) -> Built:
    kinds = ("linear", "bilinear", "trilinear")
    axes = len(input) - 1
    places = layer.places(input)
    if axes > len(kinds) or (layer.mode == "nearest" and places != _nearest_places(layer, input)):
        return Built(_Apply(_interpolated, places), {})
    corners = layer.align_corners if layer.mode == "linear" else None
    mode = kinds[axes - 1] if layer.mode == "linear" else "nearest"
    return Built(nn.Upsample(layer.lengths_out, mode=mode, align_corners=corners), {})


def _nearest_places(layer: Interpolate, input: Shape) -> list[list[tuple[int, float]]]:
    """Where torch looks for the nearest elements: it divides in float32, whose rounding may give a neighbour."""
    found = []
    for old, new in zip(input[1:], layer.lengths_out, strict=True):
        ratio = np.float32(old) / np.float32(new)
        at = np.minimum((np.arange(new, dtype=np.float32) * ratio).astype(np.int64), old - 1)
        found.append([(int(place), 0.0) for place in at])
    return found


def _interpolated(x: Tensor, places: list[list[tuple[int, float]]]) -> Tensor:
    """Elements of each axis, and between them, by number: what torch's own has not."""
    for axis, along in enumerate(places, 2):
        first, share = torch.tensor([at for at, _ in along]), x.new_tensor([part for _, part in along])
        before = x.index_select(axis, first)
        if share.any():
            behind = x.index_select(axis, first + (share > 0))
            before = before + (behind - before) * share.reshape(-1, *[1] * (x.dim() - 1 - axis))
        x = before
    return x


def _pool(layer: Pool, input: Shape) -> Built:
    at = replace(layer.geometry, padding=layer.geometry.filled(input[1:]), ceil_mode=False)
    takes_maximum = layer.op.startswith("max")
    counts = layer.geometry.counted(input[1:], layer.counts_padding)
    if not takes_maximum and (
        set(at.dilation) != {1} or any({*n} != {k} for n, k in zip(counts, at.size, strict=True))
    ):
        return Built(_Average(at, counts, input[0]), {})
    # torch pads by half the window at most, and does not count a dilated one's gaps.
    too_wide = any(before > size // 2 for (before, _), size in zip(at.padding, at.size, strict=True))
    padding, ahead = _padding(at, -math.inf if takes_maximum else 0.0, apart=too_wide)
    averages = nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d
    kinds = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d) if takes_maximum else averages
    more = {"dilation": at.dilation} if takes_maximum else {}
    module = kinds[len(at.size) - 1](at.size, at.stride, padding, **more)
    return Built(nn.Sequential(ahead, module) if ahead else module, {})


class _Average(nn.Module):  # type: ignore[misc]
    """The sum of every window, divided by how many of its places count."""

    def __init__(self, geometry: Geometry, counts: tuple[Shape, ...], channels: int) -> None:
        super().__init__()
        self._geometry, self._channels = geometry, channels
        self._sides = tuple(side for sides in reversed(geometry.padding) for side in sides)  # the last axis first
        counted = functools.reduce(operator.mul, np.ix_(*(np.maximum(n, 1) for n in counts)))
        self.register_buffer("_counted", torch.tensor(counted, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        at = self._geometry
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(at.size) - 1]
        ones = x.new_ones(self._channels, 1, *at.size)
        padded = F.pad(x, self._sides)
        sums = convolve(padded, ones, stride=at.stride, dilation=at.dilation, groups=self._channels)
        return sums / self._counted.to(x.dtype)


def _padding(geometry: Geometry, value: float, apart: bool = False) -> tuple[Shape, nn.Module | None]:
    """The padding that torch's layer does itself, and the layer before it where it can't.

    That is so if the two sides differ, or `apart` says so.
    """
    if geometry.is_symmetric and not apart:
        return tuple(before for before, _ in geometry.padding), None
    kind = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)[len(geometry.size) - 1]
    last_axis_first = tuple(side for sides in reversed(geometry.padding) for side in sides)
    return (0,) * len(geometry.size), kind(last_axis_first, value)


def _embedding(layer: Embedding, input: Shape) -> Built:
    module = nn.Embedding(layer.vocabulary, layer.dimension, layer.padding_row)
    module.weight.requires_grad_(layer.trainable)
    return Built(module, {"weight": _Place(module, "weight", transposed=False)})


def _rbf(layer: RBF, input: Shape) -> Built:
    module = _RBF(input[-1], layer.units)
    return Built(module, {name: _Place(module, name, transposed=False) for name in ("centers", "beta")})


def _batch_norm(layer: BatchNorm, input: Shape) -> Built:
    module = _BatchNorm(input[0], layer.eps, layer.momentum)
    names = {"scale": "weight", "shift": "bias", "running_mean": "running_mean", "running_var": "running_var"}
    return Built(module, {ours: _Place(module, name) for ours, name in names.items()})


def _layer_norm(layer: LayerNorm, input: Shape) -> Built:
    module = nn.LayerNorm(input[-1], layer.eps)
    return Built(module, {"scale": _Place(module, "weight"), "shift": _Place(module, "bias")})


def _attention(layer: MultiHeadAttention, input: Shape) -> Built:
    module = _Attention(input[-1], layer.heads, layer.causal, layer.bias)
    places = {"weight": _Place(module.inner, "weight"), "output_weight": _Place(module.outer, "weight")}
    biases = {"bias": _Place(module.inner, "bias"), "output_bias": _Place(module.outer, "bias")}
    return Built(module, places | biases if layer.bias else places)


def _position_embedding(layer: PositionEmbedding, input: Shape) -> Built:
    module = _PositionEmbedding(*input)
    return Built(module, {"weight": _Place(module, "weight", transposed=False)})


def _recurrent(layer: Recurrent, input: Shape) -> Built:
    if isinstance(layer, RNN) and layer.activation == "identity":
        return unrolled(layer, input)
    options = {"nonlinearity": layer.activation} if isinstance(layer, RNN) else {}
    kind = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[layer.op]
    module = kind(input[-1], layer.units, batch_first=True, **options)
    names = {"weight": "weight_ih_l0", "recurrent": "weight_hh_l0", "bias": "bias_ih_l0"}
    return Built(_Recurrent(module, layer.returns), {ours: _Place(module, name) for ours, name in names.items()})


def unrolled(layer: Recurrent, input: Shape) -> Built:
    """Any recurrent layer as an `UnrolledRecurrent`."""
    module = UnrolledRecurrent(layer, input[-1])
    return Built(module, {name: _Place(module, name) for name in ("weight", "recurrent", "bias")})


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softmax": lambda: nn.Softmax(-1),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
}

_LAYERS: dict[str, Callable[[Any, Shape], Built]] = {
    "dense": _dense,
    "rnn": _recurrent,
    "lstm": _recurrent,
    "gru": _recurrent,
    "flatten": lambda layer, input: Built(nn.Flatten(), {}),
    "reshape": lambda layer, input: Built(_Apply(_reshaped, layer.shape), {}),
    "activation": lambda layer, input: Built(_ACTIVATIONS[layer.activation](), {}),
    "dropout": lambda layer, input: Built(nn.Dropout(layer.rate), {}),
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "conv1d_transpose": _transposed,
    "conv2d_transpose": _transposed,
    "conv3d_transpose": _transposed,
    "max_pool1d": _pool,
    "max_pool2d": _pool,
    "max_pool3d": _pool,
    "avg_pool1d": _pool,
    "avg_pool2d": _pool,
    "avg_pool3d": _pool,
    "interpolate": _interpolate,
    "global_max_pool": lambda layer, input: Built(_Apply(lambda x: x.flatten(2).max(-1).values), {}),
    "global_avg_pool": lambda layer, input: Built(_Apply(lambda x: x.flatten(2).mean(-1)), {}),
    "embedding": _embedding,
    "permute_dims": lambda layer, input: Built(_Apply(torch.permute, (0, *(1 + axis for axis in layer.axes))), {}),
    "rbf": _rbf,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "multi_head_attention": _attention,
    "position_embedding": _position_embedding,
    "add": lambda layer, input: Built(nn.Identity(), {}),
    "concat": lambda layer, input: Built(nn.Identity(), {}),
}


# Losses: the mean over a batch, and the number of right answers in it -------------------------------------------------


def _loss_settings(settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A loss's settings by torch's names: weights as tensors."""
    names = {"class_weights": "weight", "ignored_class": "ignore_index", "positive_weight": "pos_weight"}
    return {
        names.get(name, name): torch.tensor(value, dtype=dtype) if name.endswith(("weight", "weights")) else value
        for name, value in settings.items()
    }


def _cross_entropy(logits: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    if logits.dim() > 2:  # classes after every step
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **settings)
    return F.cross_entropy(logits, labels, **settings)


def _right_classes(logits: Tensor, labels: Tensor, ignored: int | None) -> float:
    right = logits.argmax(-1) == labels
    return float((right if ignored is None else right & (labels != ignored)).sum())


def _right_answers(logits: Tensor, targets: Tensor, ignored: int | None) -> float:
    return float(((logits > 0) == (targets > 0.5)).sum())


def _no_answers(output: Tensor, targets: Tensor, ignored: int | None) -> float:
    return float("nan")


_LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., float]]] = {
    "softmax_cross_entropy": (_cross_entropy, _right_classes),
    "binary_cross_entropy": (F.binary_cross_entropy_with_logits, _right_answers),
    "mean_squared_error": (F.mse_loss, _no_answers),
}


# Optimizers -----------------------------------------------------------------------------------------------------------


_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, bool]]] = {
    "sgd": (torch.optim.SGD, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True}),
    "adam": (torch.optim.Adam, {"fused": True}),
    "adamw": (torch.optim.AdamW, {"fused": True}),
}
"""Each with its fastest form."""
_KEPT: dict[str, tuple[str, ...]] = {
    **{"sgd": (), "rmsprop": ("step", "square_avg")},
    **dict.fromkeys(("adam", "adamw"), ("step", "exp_avg", "exp_avg_sq")),
}
"""What each keeps of a parameter once it has been updated, beside a momentum."""


def _build_optimizer(parameters: list[Tensor], optimizer: Optimizer) -> torch.optim.Optimizer:
    kind, form = _OPTIMIZERS[optimizer.name]
    settings = optimizer.settings()
    del settings["clip_norm"]
    return kind(parameters, lr=settings.pop("learning_rate"), **settings, **form)


def _tensor(array: Array) -> Tensor:
    """The same memory as a tensor; a copy where the array is read-only, which tensors can't be."""
    return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
