"""Convolution, pooling and interpolation layers. Channels come first: samples are (C, L), (C, H, W) or (C, D, H, W).

Settings are one whole number, or one for each spatial axis; padding also a pair, before and after, for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, ClassVar, TypeVar

import numpy as np

from py_engine.ad import ops
from py_engine.ad.ops.convolution import Padding, Pairs, Sizes, paddings, per_axis, windows_along
from py_engine.ad.ops.pooling import pool_settings
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, ShapeError
from py_engine.network.initialisers import InitialiserLike, ParameterSpec
from py_engine.network.layers import ACTIVATIONS, Layer, Shape, Tensors

T = TypeVar("T")


class Windowed(Layer):
    """What convolutions and pools share: windows that run over the spatial axes."""

    axes: ClassVar[int]

    def _sizes(self, name: str, value: Sizes) -> Shape:
        return self._checked(lambda: per_axis(name, value, self.axes))

    def _padding(self, value: Padding) -> Pairs:
        if self.axes == 1 and isinstance(value, Iterable):
            pair: list[Any] = list(value)
            value = [pair] if len(pair) == 2 and not isinstance(pair[0], Iterable) else pair
        return self._checked(lambda: paddings(value, self.axes))

    def _checked(self, setting: Callable[[], T]) -> T:
        try:
            return setting()
        except ShapeError as error:
            raise ConfigurationError(f"{type(self).__name__}: {error}") from None

    def _windows(self, input_shape: Shape, window: Shape, stride: Shape, padding: Pairs, dilation: Shape) -> Shape:
        """How many windows a sample has along each spatial axis."""
        try:
            return windows_along(input_shape[1:], window, stride, padding, dilation, "window")
        except ShapeError as error:
            raise self.reject(f"at least a window's size ({error})", input_shape) from None

    def __repr__(self) -> str:
        short = copy(self)
        for name in _SETTINGS & vars(self).keys():
            setattr(short, name, _shortened(getattr(self, name), name == "padding" and self.axes == 1))
        if getattr(self, "stride", None) == getattr(self, "window", ()):
            short.__dict__["stride"] = None
        return Layer.__repr__(short)

    def _spatial(self) -> str:
        return "length" if self.axes == 1 else ", ".join(("depth", "height", "width")[-self.axes :])


_SETTINGS = {"kernel", "window", "stride", "padding", "dilation", "output_padding"}
"""Of windows, along each axis."""


def _shortened(value: Any, of_one_axis: bool) -> Any:
    """One number where a setting is the same along all axes and on both sides; of one axis the pair alone."""
    found = value
    while isinstance(found, tuple) and found and all(item == found[0] for item in found):
        found = found[0]
    if not isinstance(found, tuple):
        return found
    return value[0] if of_one_axis else value


class Convolution(Windowed):
    """Cross-correlation of the channels of each group with that group's filters, then the activation.

    Parameters: `weight` (filters, channels / groups, *kernel); `bias` (filters,) unless ``bias=False``.
    """

    def __init__(
        self,
        channels: int,
        filters: int,
        kernel: Sizes,
        activation: str = "identity",
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        weight_init: InitialiserLike = "glorot_uniform",
        bias_init: InitialiserLike = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.channels = self._whole_number("channels", channels)
        self.filters = self._whole_number("filters", filters)
        self.kernel = self._sizes("kernel", kernel)
        self.activation = self._one_of("activation", activation, ACTIVATIONS)
        self.stride = self._sizes("stride", stride)
        self.padding = self._padding(padding)
        self.dilation = self._sizes("dilation", dilation)
        self.groups = self._whole_number("groups", groups)
        if self.channels % self.groups or self.filters % self.groups:
            raise ConfigurationError(
                f"{type(self).__name__}: {self.channels} channels and {self.filters} filters cannot be divided into "
                f"{self.groups} groups"
            )
        self.bias = bool(bias)
        self.weight_init = self._initialiser("weight_init", weight_init)
        self.bias_init = self._initialiser("bias_init", bias_init)

    @property
    def weight_shape(self) -> Shape:
        """(filters, channels / groups, *kernel)."""
        return (self.filters, self.channels // self.groups, *self.kernel)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`weight` and, if there is one, `bias`."""
        size = math.prod(self.kernel)
        fans = (self.channels // self.groups * size, self.filters // self.groups * size)
        specs = {"weight": ParameterSpec(self.weight_shape, self.weight_init, *fans)}
        if self.bias:
            specs["bias"] = ParameterSpec((self.filters,), self.bias_init, *fans)
        return specs

    def output_shape(self, input_shape: Shape) -> Shape:
        """(channels, ...) to (filters, ...)."""
        if len(input_shape) != self.axes + 1 or input_shape[0] != self.channels:
            raise self.reject(f"shape ({self.channels}, {self._spatial()})", input_shape)
        return (self.filters, *self._lengths(input_shape))

    def _lengths(self, input_shape: Shape) -> Shape:
        """The lengths of the spatial axes of the result."""
        return self._windows(input_shape, self.kernel, self.stride, self.padding, self.dilation)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.conv(x, weight, self.stride, self.padding, self.dilation, self.groups)

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """One op, the bias of each filter, the activation."""
        y = self._convolve(x, parameters["weight"])
        if self.bias:
            y = y + ops.reshape(parameters["bias"], (self.filters, *(1,) * self.axes))
        return ACTIVATIONS[self.activation](y)


class Conv1D(Convolution, op="conv1d"):
    """Cross-correlation along a sequence: (channels, length) to (filters, length'). See `Convolution`."""

    axes = 1


class Conv2D(Convolution, op="conv2d"):
    """Cross-correlation over an image: (channels, height, width) to (filters, height', width'). See `Convolution`."""

    axes = 2


class Conv3D(Convolution, op="conv3d"):
    """Cross-correlation over a volume: (channels, depth, height, width) to (filters, depth', height', width').

    See `Convolution`.
    """

    axes = 3


class TransposedConvolution(Convolution):
    """The transpose of a convolution: each element adds its multiple of the group's kernels; then bias and activation.

    `padding` is cut off the result, `output_padding` is more at the end of each axis, less than the stride or the
    dilation.

    Parameters: `weight` (channels, filters / groups, *kernel); `bias` (filters,) unless ``bias=False``.
    """

    def __init__(
        self,
        channels: int,
        filters: int,
        kernel: Sizes,
        activation: str = "identity",
        stride: Sizes = 1,
        padding: Padding = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        weight_init: InitialiserLike = "glorot_uniform",
        bias_init: InitialiserLike = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(
            channels, filters, kernel, activation, stride, padding, dilation, groups, bias, weight_init, bias_init, name
        )
        self.output_padding = self._checked(lambda: per_axis("output_padding", output_padding, self.axes, 0))
        for extra, step, apart in zip(self.output_padding, self.stride, self.dilation, strict=True):
            if extra >= max(step, apart):
                raise ConfigurationError(
                    f"{type(self).__name__}: output_padding must be less than the stride {step} or the dilation "
                    f"{apart}, actual {extra}"
                )

    @property
    def weight_shape(self) -> Shape:
        """(channels, filters / groups, *kernel)."""
        return (self.channels, self.filters // self.groups, *self.kernel)

    def _lengths(self, input_shape: Shape) -> Shape:
        found = tuple(
            (n - 1) * step + apart * (k - 1) + 1 - before - after + extra
            for n, k, step, (before, after), extra, apart in zip(
                *(input_shape[1:], self.kernel, self.stride, self.padding, self.output_padding, self.dilation),
                strict=True,
            )
        )
        if min(input_shape[1:]) < 1 or min(found) < 1:
            raise self.reject(f"elements of which padding leaves some (lengths would be {found})", input_shape)
        return found

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        at = self.stride, self.padding, self.output_padding, self.dilation, self.groups
        return ops.conv_transpose(x, weight, *at)


class Conv1DTranspose(TransposedConvolution, op="conv1d_transpose"):
    """The transpose of `Conv1D`: (channels, length) to (filters, length'). See `TransposedConvolution`."""

    axes = 1


class Conv2DTranspose(TransposedConvolution, op="conv2d_transpose"):
    """The transpose of `Conv2D`: (channels, height, width) to (filters, height', width').

    See `TransposedConvolution`.
    """

    axes = 2


class Conv3DTranspose(TransposedConvolution, op="conv3d_transpose"):
    """The transpose of `Conv3D`: (channels, depth, height, width) to (filters, depth', height', width').

    See `TransposedConvolution`.
    """

    axes = 3


class Pool(Windowed):
    """One number for each window of each channel. Padding is at most half the window.

    With `dilation` the elements of a window lie so far apart. With `ceil_mode` elements that are left over at the end,
    too few for a window, have one nevertheless.
    """

    op: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        window: Sizes,
        stride: Sizes | None = None,
        padding: Padding = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.window = self._sizes("window", window)
        self.stride = self.window if stride is None else self._sizes("stride", stride)
        self.padding = self._padding(padding)
        self.dilation = self._sizes("dilation", dilation)
        self.ceil_mode = ceil_mode
        for size, apart, pair in zip(self.window, self.dilation, self.padding, strict=True):
            reach = (size - 1) * apart + 1
            if 2 * max(pair) > reach:
                raise ConfigurationError(
                    f"{type(self).__name__}: padding must be at most half the window, {reach // 2}, actual {max(pair)}"
                )

    def output_shape(self, input_shape: Shape) -> Shape:
        """(channels, ...) to (channels, ...) with shorter axes."""
        if len(input_shape) != self.axes + 1:
            raise self.reject(f"shape (channels, {self._spatial()})", input_shape)
        x = Tensor.symbol((1, *input_shape), np.float32)
        self._windows(input_shape, self.window, self.stride, self.padding, self.dilation)
        try:
            at = pool_settings(type(self).__name__, x, *self._settings)
        except ShapeError as error:
            raise self.reject(f"windows that hold elements ({error})", input_shape) from None
        return (input_shape[0], *self._windows(input_shape, **at))

    @property
    def _settings(self) -> tuple[Any, ...]:
        return self.window, self.stride, self.padding, self.dilation, self.ceil_mode

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """One op."""
        return type(self).op(x, *self._settings)


class AvgPool(Pool):
    """The mean of each window. Padding counts as zeros, or without `count_padding` not at all."""

    op = staticmethod(ops.avg_pool)

    def __init__(
        self,
        window: Sizes,
        stride: Sizes | None = None,
        padding: Padding = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        count_padding: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(window, stride, padding, dilation, ceil_mode, name)
        self.count_padding = count_padding

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """One op, and a product where windows count fewer places."""
        at = self.window, self.stride, self.padding, self.dilation, self.ceil_mode, self.count_padding
        return ops.avg_pool(x, *at)


class MaxPool1D(Pool, op="max_pool1d"):
    """The largest of each window along a sequence, never the padding; of equal ones the first has the gradient."""

    axes = 1
    op = staticmethod(ops.max_pool)


class MaxPool2D(Pool, op="max_pool2d"):
    """The largest of each window of an image, never the padding; of equal ones the first has the gradient."""

    axes = 2
    op = staticmethod(ops.max_pool)


class MaxPool3D(Pool, op="max_pool3d"):
    """The largest of each window of a volume, never the padding; of equal ones the first has the gradient."""

    axes = 3
    op = staticmethod(ops.max_pool)


class AvgPool1D(AvgPool, op="avg_pool1d"):
    """The mean of each window along a sequence; padding counts as zeros unless told otherwise."""

    axes = 1


class AvgPool2D(AvgPool, op="avg_pool2d"):
    """The mean of each window of an image; padding counts as zeros unless told otherwise."""

    axes = 2


class AvgPool3D(AvgPool, op="avg_pool3d"):
    """The mean of each window of a volume; padding counts as zeros unless told otherwise."""

    axes = 3


class GlobalPool(Layer):
    """One number for each channel: (channels, ...) to (channels,)."""

    def output_shape(self, input_shape: Shape) -> Shape:
        """(channels, ...) to (channels,)."""
        if len(input_shape) < 2 or 0 in input_shape[1:]:
            raise self.reject("shape (channels, ...) with at least one element in each channel", input_shape)
        return input_shape[:1]


class GlobalMaxPool(GlobalPool, op="global_max_pool"):
    """The largest of each channel; of equal ones the first has the gradient."""

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """A window as long as the channel."""
        flat = ops.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))
        y: Tensor = ops.reshape(ops.max_pool(flat, flat.shape[2]), x.shape[:2])
        return y


class GlobalAvgPool(GlobalPool, op="global_avg_pool"):
    """The mean of each channel."""

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """The mean over all axes but the first two."""
        return ops.mean(x, tuple(range(2, x.ndim)))


class Interpolate(Layer, op="interpolate"):
    """Every channel in another size: (channels, ...) to the same with other lengths. See `ops.interpolate`.

    Args:
        size: the new lengths, one number or one for each axis after the channels.
        mode: "nearest" or "linear".
        align_corners: of "linear", whether the first and last elements stay where they are.
    """

    def __init__(
        self, size: Sizes, mode: str = "nearest", align_corners: bool = False, name: str | None = None
    ) -> None:
        super().__init__(name)
        axes = len(list(size)) if isinstance(size, Iterable) else 1
        try:
            lengths = per_axis("size", size, axes)
        except ShapeError as error:
            raise ConfigurationError(f"Interpolate: {error}") from None
        self.size: Sizes = lengths if isinstance(size, Iterable) else lengths[0]
        self.mode = self._one_of("mode", mode, ("nearest", "linear"))
        self.align_corners = bool(align_corners)
        if self.align_corners and mode == "nearest":
            raise ConfigurationError("Interpolate: align_corners is for mode linear")

    def output_shape(self, input_shape: Shape) -> Shape:
        """(channels, ...) to (channels, *size)."""
        axes = len(input_shape) - 1
        if axes < 1 or 0 in input_shape[1:] or (isinstance(self.size, tuple) and len(self.size) != axes):
            which = f"{len(self.size)} axes" if isinstance(self.size, tuple) else "one axis or more"
            raise self.reject(f"shape (channels, ...) with elements on {which} after the channels", input_shape)
        return (input_shape[0], *per_axis("size", self.size, axes))

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """Some rows of each axis, and between them."""
        return ops.interpolate(x, self.size, self.mode, self.align_corners)
