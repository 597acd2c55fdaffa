"""PyTorch, used as someone who knows it well would: data as tensors once, batches by `index_select`, nothing read back
before the end of the epoch, torch's own layers and optimizers (fused where it has them so).

Its parameters are ours transposed, and its recurrent layers have a second bias: zero, and frozen, so that training
stays the same as everywhere else. Gates are in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bridge import weights
from bridge.checks import DataCheck, PerArray, check_losses
from bridge.engine import Evaluation, Optimizer
from bridge.spec import RNN, Dense, Layer, ModelSpec, Recurrent, Shape

__all__ = ["Built", "TorchSession", "UnrolledRecurrent", "unrolled"]

Array = NDArray[Any]

_EVALUATION_BATCH = 1000


class TorchSession:
    """A `Session` that runs eagerly."""

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
        weights.check(params, spec, dtype)
        torch.set_num_threads(threads)
        self._batch_size = batch_size
        self._clip_norm = optimizer.clip_norm
        self._steps = 0
        self._check = DataCheck(spec, dtype)
        self._tensors = PerArray(_tensor)
        self._places: dict[str, _Place] = {}
        self._model = self._build_model(spec, getattr(torch, dtype.name))
        self._write(params)
        self._criterion, self._count_right = _LOSSES[spec.loss.op]
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = _build_optimizer(trained, optimizer)
        self._trained = trained

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        features, targets = self._batch(x, y)
        rows = _tensor(self._check.order(order, x))
        self._model.train()
        steps = [
            self._step(features.index_select(0, batch), targets.index_select(0, batch))
            for batch in rows.split(self._batch_size)
        ]
        losses: NDArray[np.float64] = torch.stack(steps).double().numpy()
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses

    def evaluate(self, x: Array, y: Array) -> Evaluation:
        """See `Session.evaluate`."""
        features, targets = self._batch(x, y)
        loss = right = 0.0
        self._model.eval()
        with torch.inference_mode():
            for part, wanted in zip(features.split(_EVALUATION_BATCH), targets.split(_EVALUATION_BATCH), strict=True):
                output = self._model(part)
                loss += float(self._criterion(output, wanted)) * len(part)
                right += self._count_right(output, wanted) * len(part)
        return Evaluation(loss / len(x), right / len(x))

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        features = self._tensors(self._check.features(x))
        self._model.eval()
        with torch.inference_mode():
            parts = [self._model(part) for part in features.split(_EVALUATION_BATCH)]
        output: Array = torch.cat(parts).numpy()
        return output

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """See `Session.loss_and_gradients`."""
        features, targets = self._batch(x, y)
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(features, targets)
        loss.backward()
        gradients = {name: place.gradient() for name, place in self._places.items()}
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), gradients

    def params(self) -> dict[str, Array]:
        """See `Session.params`."""
        return {name: place.value() for name, place in self._places.items()}

    def close(self) -> None:
        """See `Session.close`: there is nothing that isn't freed with the session."""

    def _batch(self, x: Array, y: Array) -> tuple[Tensor, Tensor]:
        checked = self._check.batch(x, y)
        return self._tensors(checked[0]), self._tensors(checked[1])

    def _step(self, features: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(features, targets)
        loss.backward()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        self._optimizer.step()
        return loss.detach()

    def _loss(self, features: Tensor, targets: Tensor) -> Tensor:
        return self._criterion(self._model(features), targets)

    def _build_model(self, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
        """The network, with where our parameters are in it in `_places`."""
        modules = []
        for layer, shape in zip(spec.layers, spec.shapes(), strict=True):
            built = self._build_layer(layer, shape.input)
            modules.append(built.module.to(dtype))
            self._places |= {f"{layer.id}.{name}": place for name, place in built.places.items()}
        return nn.Sequential(*modules)

    def _build_layer(self, layer: Layer, input: Shape) -> Built:
        return _LAYERS[layer.op](layer, input)

    def _write(self, params: Mapping[str, Array]) -> None:
        with torch.no_grad():
            for name, place in self._places.items():
                place.parameter.copy_(torch.from_numpy(np.array(params[name].T)))


# Layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where one of our parameters is: a parameter of torch's, which holds it transposed."""

    parameter: Tensor

    def value(self) -> Array:
        return np.array(self.parameter.detach().numpy().T, order="C")

    def gradient(self) -> Array:
        gradient = self.parameter.grad
        return np.zeros_like(self.value()) if gradient is None else np.array(gradient.numpy().T, order="C")


@dataclass(frozen=True)
class Built:
    """A layer's module, and our names for its parameters."""

    module: nn.Module
    places: Mapping[str, _Place]


class _Reshape(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self._shape)


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
        self._activation = _FUNCTIONS[layer.activation] if isinstance(layer, RNN) else torch.tanh

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


def _dense(layer: Dense, input: Shape) -> Built:
    module = nn.Linear(input[-1], layer.units, bias=layer.bias)
    places = {"weight": _Place(module.weight)}
    return Built(module, places | {"bias": _Place(module.bias)} if layer.bias else places)


def _recurrent(layer: Recurrent, input: Shape) -> Built:
    if isinstance(layer, RNN) and layer.activation == "identity":
        return unrolled(layer, input)
    options = {"nonlinearity": layer.activation} if isinstance(layer, RNN) else {}
    kind = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[layer.op]
    module = kind(input[-1], layer.units, batch_first=True, **options)
    names = {"weight": module.weight_ih_l0, "recurrent": module.weight_hh_l0, "bias": module.bias_ih_l0}
    return Built(_Recurrent(module, layer.returns), {name: _Place(tensor) for name, tensor in names.items()})


def unrolled(layer: Recurrent, input: Shape) -> Built:
    """Any recurrent layer as an `UnrolledRecurrent`."""
    module = UnrolledRecurrent(layer, input[-1])
    return Built(module, {name: _Place(getattr(module, name)) for name in ("weight", "recurrent", "bias")})


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": nn.Identity(), "tanh": torch.tanh, "relu": torch.relu}

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softmax": lambda: nn.Softmax(-1),
}

_LAYERS: dict[str, Callable[[Any, Shape], Built]] = {
    "dense": _dense,
    "rnn": _recurrent,
    "lstm": _recurrent,
    "gru": _recurrent,
    "flatten": lambda layer, input: Built(nn.Flatten(), {}),
    "reshape": lambda layer, input: Built(_Reshape(layer.shape), {}),
    "activation": lambda layer, input: Built(_ACTIVATIONS[layer.activation](), {}),
    "dropout": lambda layer, input: Built(nn.Dropout(layer.rate), {}),
}


# Losses: the mean over a batch, and the share of right answers in it --------------------------------------------------


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dim() > 2:  # classes after every step
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return F.cross_entropy(logits, labels)


def _binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets)


def _mean_squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets)


def _right_classes(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) == labels).double().mean())


def _right_answers(logits: Tensor, targets: Tensor) -> float:
    return float(((logits > 0) == (targets > 0.5)).double().mean())


def _no_answers(output: Tensor, targets: Tensor) -> float:
    return float("nan")


_LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], float]]] = {
    "softmax_cross_entropy": (_cross_entropy, _right_classes),
    "binary_cross_entropy": (_binary_cross_entropy, _right_answers),
    "mean_squared_error": (_mean_squared_error, _no_answers),
}


# Optimizers -----------------------------------------------------------------------------------------------------------


_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, bool]]] = {
    "sgd": (torch.optim.SGD, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True}),
    "adam": (torch.optim.Adam, {"fused": True}),
    "adamw": (torch.optim.AdamW, {"fused": True}),
}
"""Each with its fastest form."""


def _build_optimizer(parameters: list[Tensor], optimizer: Optimizer) -> torch.optim.Optimizer:
    kind, form = _OPTIMIZERS[optimizer.name]
    settings = optimizer.settings()
    del settings["clip_norm"]
    return kind(parameters, lr=settings.pop("learning_rate"), **settings, **form)


def _tensor(array: Array) -> Tensor:
    """The same memory as a tensor; a copy where the array is read-only, which tensors can't be."""
    return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
