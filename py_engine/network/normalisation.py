"""Normalisation over the batch or over features, as PyTorch has it."""

from __future__ import annotations

import math
from typing import Any

from py_engine.ad import ops
from py_engine.ad.op import here
from py_engine.ad.ops.arguments import is_real
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, ShapeError
from py_engine.network.batch_sums import samples_of, sum_of_parts
from py_engine.network.initialisers import ParameterSpec
from py_engine.network.layers import Layer, Shape, Tensors, latest, update


class BatchNorm(Layer, op="batch_norm"):
    """Each channel with mean 0 and variance 1, then scaled and shifted (Ioffe and Szegedy 2015).

    Channels are the first axis of a sample, (channels, ...). In training, mean and (biased) variance are those of
    the batch, over samples and all other axes, and the running ones are updated toward them by `momentum`, the variance
    as its unbiased estimate. Outside training the running ones are used.

    Parameters: `scale` and `shift`, and not trained, `running_mean` and `running_var`, all (channels,).
    """

    couples_batch = True
    sums_over_batch = True

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name)
        self.channels = self._whole_number("channels", channels)
        if not is_real(momentum) or not 0 <= momentum <= 1:
            raise ConfigurationError(f"BatchNorm: momentum must be a number from 0 to 1, actual {momentum!r}")
        self.momentum = float(momentum)
        self.eps = _eps("BatchNorm", eps)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`scale`, `shift`, and the state `running_mean` and `running_var`."""
        shape, fans = (self.channels,), (self.channels, self.channels)
        return {
            "scale": ParameterSpec(shape, "ones", *fans),
            "shift": ParameterSpec(shape, "zeros", *fans),
            "running_mean": ParameterSpec(shape, "zeros", *fans, trainable=False),
            "running_var": ParameterSpec(shape, "ones", *fans, trainable=False),
        }

    def output_shape(self, input_shape: Shape) -> Shape:
        """(channels, ...) to the same."""
        if not input_shape or input_shape[0] != self.channels:
            raise self.reject(f"shape ({self.channels}, ...)", input_shape)
        return input_shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """Normalise by the batch's statistics, and keep them; or by the running ones.

        Raises `ShapeError` in training for a single value per channel, which has no variance.
        """
        aligned = (self.channels, *[1] * (x.ndim - 2))
        scale, shift = (ops.reshape(parameters[name], aligned) for name in ("scale", "shift"))
        if not training:
            factor = scale / ops.sqrt(ops.reshape(parameters["running_var"], aligned) + self.eps)
            return x * factor + (shift - ops.reshape(parameters["running_mean"], aligned) * factor)
        count = samples_of(x) * math.prod(x.shape[2:])
        if count < 2:
            raise ShapeError(
                f"{here(repr(self))}: in training every channel needs more than one value in a batch, actual {count} "
                f"(batch of shape {x.shape}); take another batch size, also for what remains at the end"
            )
        axes = (0, *range(2, x.ndim))
        mean = sum_of_parts(ops.sum(x, axes, keepdims=True)) / float(count)  # exact where all numbers are equal
        centred = x - mean
        variance = sum_of_parts(ops.sum(ops.square(centred), axes, keepdims=True)) / float(count)
        self._move(parameters["running_mean"], mean)
        self._move(parameters["running_var"], variance * (count / (count - 1)))
        return centred * (scale / ops.sqrt(variance + self.eps)) + shift

    def _move(self, running: Tensor, found: Tensor) -> None:
        found = ops.stop_gradient(ops.reshape(found, (self.channels,)))
        update(running, (1 - self.momentum) * ops.stop_gradient(latest(running)) + self.momentum * found)


class LayerNorm(Layer, op="layer_norm"):
    """The last axis with mean 0 and (biased) variance 1, then scaled and shifted (Ba et al. 2016).

    Parameters: `scale` and `shift`, (features,).
    """

    def __init__(self, features: int, eps: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name)
        self.features = self._whole_number("features", features)
        self.eps = _eps("LayerNorm", eps)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`scale` and `shift`."""
        shape, fans = (self.features,), (self.features, self.features)
        return {"scale": ParameterSpec(shape, "ones", *fans), "shift": ParameterSpec(shape, "zeros", *fans)}

    def output_shape(self, input_shape: Shape) -> Shape:
        """(..., features) to the same."""
        if not input_shape or input_shape[-1] != self.features:
            raise self.reject(f"shape (..., {self.features})", input_shape)
        return input_shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """The same in training and outside."""
        return ops.layer_norm(x, parameters["scale"], parameters["shift"], eps=self.eps)


def _eps(layer: str, value: Any) -> float:
    if not is_real(value) or not 0 < value < math.inf:
        raise ConfigurationError(f"{layer}: eps must be a finite number > 0, actual {value!r}")
    return float(value)
