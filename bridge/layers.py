"""The layers of a model spec: the settings of each, the shape of its output, and its parameters.

`bridge.spec`, which says how shapes and parameters are laid out, reads them from a file. **A new layer** is one class
here: its keys, their types, defaults and ranges are declared in it and nowhere else. From the class follow the reading
and the checking of files, their JSON Schema, the messages of errors, the names and shapes in weights files, what the
numpy engine's class of the same `op` is made with, and the line of text that reaches the Julia engine.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    model_validator,
)

from bridge import toml
from bridge.validation import LocatedError

LARGEST_SIZE = 2**24
"""Upper end of every size in a spec."""
MOST_ELEMENTS = 2**31 - 1
"""The most elements that a parameter, or what a layer makes of one sample, may have."""

Shape = tuple[int, ...]
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Padding = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
Reads = Literal["numbers", "tokens", "any"]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]


class Record(BaseModel):
    """Base of every table of a spec: unknown keys, NaN, Inf and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe each key by the docstring below it.

        pydantic would read the docstrings of all classes whenever this module is imported, which takes a third of that.
        """
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for kind in (kind for kind in reversed(cls.__mro__) if issubclass(kind, Record)):
            for name, text in _docstrings(kind.__module__).get(kind.__name__, {}).items():
                if name in properties:
                    properties[name]["description"] = text
        return schema


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the attributes of a module's classes, by class and attribute; none without its source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {
        node.name: {
            at.target.id: inspect.cleandoc(below.value.value)
            for at, below in itertools.pairwise(node.body)
            if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name)
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(below.value.value, str)
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


# --- Initialisers ---

PlainName = Literal["glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "zeros", "ones"]


class InitialiserTable(Record):
    """Base of all initialisers."""


class PlainInitialiser(InitialiserTable):
    """An initialiser without options: Glorot (Xavier) and He scaled by the fans, zeros, ones."""

    name: PlainName


class Uniform(InitialiserTable):
    """Uniform between `low` and `high`."""

    name: Literal["uniform"]
    low: float = -0.1
    high: float = 0.1

    @model_validator(mode="after")
    def _check_order(self) -> Uniform:
        if self.low > self.high:
            raise LocatedError(["low"], f"found {self.low}, expected at most high = {self.high}")
        return self


class Normal(InitialiserTable):
    """Normal with the given mean and standard deviation."""

    name: Literal["normal"]
    mean: float = 0.0
    std: Annotated[float, Field(ge=0)] = 0.1


AnyInitialiser = PlainInitialiser | Uniform | Normal
Table = Annotated[AnyInitialiser, Field(discriminator="name")]


def _spell_out(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Initialiser = Annotated[
    Table,
    BeforeValidator(_spell_out, json_schema_input_type=Literal[PlainName, "uniform", "normal"] | Table),
]
"""A table, or its name alone, which leaves the options at their defaults."""

GLOROT_UNIFORM = PlainInitialiser(name="glorot_uniform")
ZEROS = PlainInitialiser(name="zeros")
ONES = PlainInitialiser(name="ones")
NORMAL = Normal(name="normal")
STANDARD_NORMAL = Normal(name="normal", std=1.0)


# --- What is given for every spatial axis ---


def _repeated(count: int) -> Callable[[object], object]:
    """Read one number as short for `count` of it."""
    return lambda value: (value,) * count if isinstance(value, int) else value


Same = Literal["same"]
"""Padding with which there is a window for every `stride` elements of the input; it stands for these numbers."""

_TwoSizes = Annotated[tuple[Size, ...], Field(strict=False, min_length=2, max_length=2)]
_ThreeSizes = Annotated[tuple[Size, ...], Field(strict=False, min_length=3, max_length=3)]
_TwoPaddings = Annotated[tuple[Padding, ...], Field(strict=False, min_length=2, max_length=2)]
_ThreePaddings = Annotated[tuple[Padding, ...], Field(strict=False, min_length=3, max_length=3)]

Sizes2D = Annotated[_TwoSizes, BeforeValidator(_repeated(2), json_schema_input_type=Size | _TwoSizes)]
"""Of height and width."""
Sizes3D = Annotated[_ThreeSizes, BeforeValidator(_repeated(3), json_schema_input_type=Size | _ThreeSizes)]
"""Of depth, height and width."""
Padding1D = Annotated[_TwoPaddings, BeforeValidator(_repeated(2), json_schema_input_type=Padding | _TwoPaddings | Same)]
"""Before and after the axis."""
_Sides = Annotated[_TwoPaddings, BeforeValidator(_repeated(2), json_schema_input_type=Padding | _TwoPaddings)]
_Paddings = Annotated[tuple[_Sides, ...], Field(strict=False, min_length=2, max_length=2)]
Padding2D = Annotated[_Paddings, BeforeValidator(_repeated(2), json_schema_input_type=Padding | _Paddings | Same)]
"""Of height (top and bottom) and width (left and right)."""
_Paddings3 = Annotated[tuple[_Sides, ...], Field(strict=False, min_length=3, max_length=3)]
Padding3D = Annotated[_Paddings3, BeforeValidator(_repeated(3), json_schema_input_type=Padding | _Paddings3 | Same)]
"""Of depth (front and back), height and width."""

# What is cut off the result of a transposed convolution is given as numbers alone.
Cut1D = _Sides
Cut2D = Annotated[_Paddings, BeforeValidator(_repeated(2), json_schema_input_type=Padding | _Paddings)]
Cut3D = Annotated[_Paddings3, BeforeValidator(_repeated(3), json_schema_input_type=Padding | _Paddings3)]
Extra2D = _Sides
"""More elements at the end of height and width."""
Extra3D = Annotated[_ThreePaddings, BeforeValidator(_repeated(3), json_schema_input_type=Padding | _ThreePaddings)]
"""More elements at the end of depth, height and width."""


@dataclass(frozen=True)
class Geometry:
    """Where a kernel or a window lies on its input: one entry of each field for every spatial axis."""

    size: Shape
    stride: Shape
    padding: tuple[Shape, ...]
    """Before and after each axis."""
    dilation: Shape
    """The distance of neighbouring elements of the kernel."""
    ceil_mode: bool = False
    """Whether elements that are left over at the end, too few for a window, have one nevertheless."""

    @property
    def extent(self) -> Shape:
        """From the first element of the kernel to its last."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.size, self.dilation, strict=True))

    @property
    def is_symmetric(self) -> bool:
        """Whether there is the same padding before and after every axis."""
        return all(before == after for before, after in self.padding)

    def same(self, input: Shape) -> tuple[Shape, ...]:
        """The least padding with which axes of `input` have a window for every `stride` elements; more of it behind."""
        found = []
        for n, extent, stride in zip(input, self.extent, self.stride, strict=True):
            total = max((-(-n // stride) - 1) * stride + extent - n, 0)
            found.append((total // 2, total - total // 2))
        return tuple(found)

    def output(self, input: Shape) -> Shape:
        """The spatial axes of what becomes of those of `input`. Raises `ValueError` where nothing is left of one."""
        padded = tuple(n + sum(padding) for n, padding in zip(input, self.padding, strict=True))
        for n, whole, extent in zip(input, padded, self.extent, strict=True):
            if whole < extent:
                padding = f" ({whole} with its padding)" if whole != n else ""
                raise ValueError(f"it spans {extent}, more than the {n}{padding} of its input")
        filled = (n + sum(padding) for n, padding in zip(input, self.filled(input), strict=True))
        return tuple((n - k) // s + 1 for n, k, s in zip(filled, self.extent, self.stride, strict=True))

    def filled(self, input: Shape) -> tuple[Shape, ...]:
        """The padding with which every window lies within: with `ceil_mode` one begins wherever an element is left."""
        if not self.ceil_mode:
            return self.padding
        found = []
        for n, extent, stride, (before, after) in zip(input, self.extent, self.stride, self.padding, strict=True):
            last = -(-max(n + before + after - extent, 0) // stride) * stride
            if last >= n + before:
                last -= stride
            found.append((before, max(last + extent - n - before, after)))
        return tuple(found)

    def counted(self, input: Shape, padding: bool) -> tuple[Shape, ...]:
        """How many of its places count, for each window along each axis: those in the input, and in its `padding`."""
        found = []
        for n, k, stride, sides, dilation, windows in zip(
            input, self.size, self.stride, self.padding, self.dilation, self.output(input), strict=True
        ):
            before, after = sides
            begin, stop = (-before, n + after) if padding else (0, n)
            starts = stride * np.arange(windows) - before
            first = np.maximum(-((starts - begin) // dilation), 0)  # of the window's places, the first in there
            last = np.minimum((stop - 1 - starts) // dilation, k - 1)
            found.append(tuple(np.maximum(last - first + 1, 0).tolist()))
        return tuple(found)

    def has_empty_window(self, input: Shape) -> tuple[bool, ...]:
        """Whether none of its places is in the input, for any window along each axis: dilated, it may step over it."""
        found = []
        for n, k, stride, (before, _), dilation, windows in zip(
            input, self.size, self.stride, self.padding, self.dilation, self.output(input), strict=True
        ):
            starts = np.arange(-before, 0, stride)[:windows]  # all others begin in it
            first = -(starts // dilation)
            found.append(bool(np.any((first >= k) | (starts + first * dilation >= n))))
        return tuple(found)


# --- Layers ---


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter before it exists. The fans are those of one unit, and of one gate where there are gates."""

    shape: Shape
    initialiser: AnyInitialiser
    fan_in: int
    fan_out: int
    trainable: bool = True
    """Whether it has a gradient and an optimizer changes it."""
    zero_row: int | None = None
    """The row that starts at zero, whatever the initialiser says."""


LAYERS: dict[str, type[Layer]] = {}
"""Every layer by its op, in the order in which they are defined: filled by the classes themselves."""


class Layer(Record):
    """Base of all layers; by itself it keeps its input's shape and has no parameters.

    A subclass whose `op` has one value is a layer of the spec.
    """

    since: ClassVar[int] = 1
    """The opset that brought the op."""
    reads: ClassVar[Reads] = "numbers"
    """What its input may hold. Only an embedding makes numbers of token ids."""
    channels_last: ClassVar[bool] = False
    """Whether frameworks that keep the channels of a sample last compute it so, see `bridge.channels_last`."""
    lengths: ClassVar[Mapping[str, int]] = {}
    """Lengths of its input that the numpy engine's layer is made with, by name: of which axis of a sample each is."""

    id: Name
    """Unique in the spec; the first part of the names of the layer's parameters."""
    op: str
    inputs: Annotated[tuple[Name, ...], Field(strict=False, max_length=64)] = ()
    """Ids of the layers before it that it reads, or "input" for the network's own; the one before it if none."""

    @property
    def unsaid(self) -> list[str]:
        """Keys that the canonical form leaves out: those that came later, where they have their defaults."""
        return [] if self.inputs else ["inputs"]

    @property
    def needs(self) -> list[tuple[str, str, int]]:
        """What of its table needs an opset: the key, what is there, and the opset."""
        return [("op", self.op, self.since), *([("inputs", "a layer with inputs", 3)] if self.inputs else [])]

    def merged(self, inputs: Sequence[Shape]) -> Shape:
        """The shape of what the results that it reads make together. Raises `ValueError` where they do not fit."""
        if len(inputs) != 1:
            raise LocatedError(["inputs"], f"found {len(inputs)}, expected one: {self.op} does not join several")
        return inputs[0]

    def resolved(self, input: Shape) -> Self:
        """The same layer with explicit numbers for what is given by a word."""
        return self

    @property
    def elementwise(self) -> bool:
        """Whether it treats all elements of a sample alike, whatever the order of their axes."""
        return False

    def output(self, input: Shape) -> Shape:
        """The output shape for `input`. Raises `ValueError` when `input` doesn't fit."""
        return input

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """The layer's parameters for an `input` that fits, in the order in which they are stored."""
        return {}

    def least_rows(self, input: Shape) -> int:
        """The fewest samples of shape `input` that the layer can be trained on at a time."""
        return 1

    def settings(self) -> dict[str, Any]:
        """What an engine's layer of this op receives, by name: the keys of its table but `id`, `op` and initialisers.

        Engines start from given weights, so that initialisers are not theirs. None leaves a setting out.
        """
        return {
            name: value
            for name, value in self
            if name not in Layer.model_fields and not isinstance(value, InitialiserTable)
        }

    def arguments(self, input: Shape) -> dict[str, Any]:
        """What the numpy engine's layer of this op is made with, by name: `settings`, and `lengths` of `input`."""
        return {**{name: input[axis] for name, axis in self.lengths.items()}, **self.settings()}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Enter a layer that has an op in `LAYERS`; the bases of several have none."""
        for op in get_args(cls.model_fields["op"].annotation):
            LAYERS[op] = cls


class Dense(Layer):
    """``x @ weight + bias`` along the last axis."""

    lengths: ClassVar[Mapping[str, int]] = {"inputs": -1}
    op: Literal["dense"]
    units: Size
    bias: bool = True
    weight_init: Initialiser = GLOROT_UNIFORM
    bias_init: Initialiser = ZEROS

    def output(self, input: Shape) -> Shape:
        """(N, …, features) becomes (N, …, units)."""
        return (*input[:-1], self.units)

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Weight (features, units) and, unless switched off, bias (units,)."""
        features, units = input[-1], self.units
        weight = ParameterSpec((features, units), self.weight_init, features, units)
        bias = ParameterSpec((units,), self.bias_init, features, units)
        return {"weight": weight, "bias": bias} if self.bias else {"weight": weight}


class Recurrent(Layer):
    """Base of the layers that read a sequence step by step, from a state of zeros."""

    gates: ClassVar[int] = 1
    lengths: ClassVar[Mapping[str, int]] = {"inputs": -1}

    units: Size
    returns: Literal["last", "sequence"] = "last"
    """The state after the last step (many-to-one) or after every step (many-to-many)."""
    weight_init: Initialiser = GLOROT_UNIFORM
    recurrent_init: Initialiser = GLOROT_UNIFORM
    bias_init: Initialiser = ZEROS

    def output(self, input: Shape) -> Shape:
        """(N, steps, features) becomes (N, units), or (N, steps, units) for a sequence."""
        if len(input) != 2:
            raise ValueError(f"expected an input of shape (N, steps, features), found {show(input)}")
        return (input[0], self.units) if self.returns == "sequence" else (self.units,)

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Weight (features, gates · units), recurrent (units, gates · units) and bias (gates · units,)."""
        features, units, width = input[-1], self.units, self.gates * self.units
        return {
            "weight": ParameterSpec((features, width), self.weight_init, features, units),
            "recurrent": ParameterSpec((units, width), self.recurrent_init, units, units),
            "bias": ParameterSpec((width,), self.bias_init, features, units),
        }


class RNN(Recurrent):
    """The vanilla cell: ``h = activation(x @ weight + h @ recurrent + bias)``."""

    op: Literal["rnn"]
    activation: Literal["tanh", "relu", "identity"] = "tanh"


class LSTM(Recurrent):
    """Long short-term memory; gates in order input, forget, cell, output."""

    gates: ClassVar[int] = 4
    op: Literal["lstm"]


class GRU(Recurrent):
    """Gated recurrent unit, reset after the product, bias on the input; gates in order reset, update, new."""

    gates: ClassVar[int] = 3
    op: Literal["gru"]


class Flatten(Layer):
    """All features of a sample in one row, in C order."""

    reads: ClassVar[Reads] = "any"
    op: Literal["flatten"]

    def output(self, input: Shape) -> Shape:
        """(N, …) becomes (N, features)."""
        return (math.prod(input),)


class Reshape(Layer):
    """The same features of a sample in another shape, in C order."""

    reads: ClassVar[Reads] = "any"
    op: Literal["reshape"]
    shape: Annotated[tuple[Size, ...], Field(strict=False, min_length=1, max_length=8)]
    """Of one sample, without N."""

    def output(self, input: Shape) -> Shape:
        """(N, …) becomes (N, *shape)."""
        if math.prod(input) != math.prod(self.shape):
            raise ValueError(
                f"found an input of shape {show(input)}, {math.prod(input)} elements per sample, "
                f"expected {math.prod(self.shape)} to fill {show(self.shape)}"
            )
        return self.shape


class Activation(Layer):
    """A function of every element, or softmax along the last axis."""

    op: Literal["activation"]
    activation: Literal[
        "identity", "tanh", "relu", "sigmoid", "softplus", "softmax", "gelu", "gelu_tanh", "silu", "leaky_relu", "elu"
    ]
    """gelu is exact, gelu_tanh its approximation; leaky_relu has slope 0.01, elu alpha 1."""

    @property
    def needs(self) -> list[tuple[str, str, int]]:
        """See `Layer.needs`: some functions came later."""
        newer = self.activation in ("gelu", "gelu_tanh", "silu", "leaky_relu", "elu")
        return [*super().needs, *([("activation", self.activation, 3)] if newer else [])]

    @property
    def elementwise(self) -> bool:
        """All but softmax are."""
        return self.activation != "softmax"


class Dropout(Layer):
    """In training, each element becomes 0 with probability `rate` and is divided by 1 - rate otherwise."""

    op: Literal["dropout"]
    rate: Annotated[float, Field(ge=0, lt=1)]

    @property
    def elementwise(self) -> bool:
        """Yes."""
        return True


class Windowed(Layer):
    """Base of the layers that move a kernel or a window over the axes after the first, which is that of channels."""

    since: ClassVar[int] = 2
    channels_last: ClassVar[bool] = True
    axes: ClassVar[tuple[str, ...]]
    """What the axes are called."""
    size_key: ClassVar[str] = "kernel"
    """The key that says the size of the kernel or window."""
    pads_same: ClassVar[bool] = True
    """Whether its padding may be "same"."""

    _same: bool = PrivateAttr(False)
    """Whether its padding is "same", and not known yet."""

    @model_validator(mode="wrap")
    @classmethod
    def _read_same(cls, data: Any, read: Callable[[Any], Self]) -> Self:
        """The padding "same" waits for the shape of an input; until then there is none."""
        same = cls.pads_same and isinstance(data, dict) and data.get("padding") == "same"
        layer = read({key: value for key, value in data.items() if key != "padding"} if same else data)
        layer._same = layer._same or same
        return layer

    @property
    def needs(self) -> list[tuple[str, str, int]]:
        """See `Layer.needs`: "same" came later."""
        return [*super().needs, *([("padding", 'padding "same"', 3)] if self._same else [])]

    def resolved(self, input: Shape) -> Self:
        """See `Layer.resolved`: "same" becomes the numbers that it is for this input."""
        if not self._same or len(input) != 1 + len(self.axes):
            return self
        pairs = self.geometry.same(input[1:])
        found = self.model_copy(update={"padding": pairs if len(self.axes) > 1 else pairs[0]})
        found._same = False
        return found

    @property
    def geometry(self) -> Geometry:
        """Where the window lies, axis by axis, whatever the number of axes."""
        size, stride, padding, dilation = map(self._each, (self.size_key, "stride", "padding", "dilation"))
        return Geometry(size, stride, padding, dilation, getattr(self, "ceil_mode", False))

    def _each(self, key: str) -> tuple[Any, ...]:
        """A setting with one entry for each axis; the layers of one axis hold the entry alone."""
        value = getattr(self, key)
        return (value,) if len(self.axes) == 1 else value

    def _move(self, input: Shape, channels: int) -> Shape:
        _check_axes(input, self.axes)
        try:
            spatial = self.geometry.output(input[1:])
        except ValueError as error:
            found = toml.inline(getattr(self, self.size_key))
            raise LocatedError([self.size_key], f"found {found} for an input of shape {show(input)}: {error}") from None
        padded = (n + sum(padding) for n, padding in zip(input[1:], self.geometry.padding, strict=True))
        check_sizes({"its padded input": (input[0], *padded)})
        return (channels, *spatial)


class Convolution(Windowed):
    """Base of the convolutions: cross-correlations of all channels of a group with its filters, plus a bias each."""

    lengths: ClassVar[Mapping[str, int]] = {"channels": 0}
    filters: Size
    groups: Size = 1
    """Number of independent channel groups; each has as many of the filters as the others."""
    bias: bool = True
    weight_init: Initialiser = GLOROT_UNIFORM
    bias_init: Initialiser = ZEROS

    def output(self, input: Shape) -> Shape:
        """(N, channels, …) becomes (N, filters, …)."""
        output = self._move(input, self.filters)
        for what, number in (("channels", input[0]), ("filters", self.filters)):
            if number % self.groups:
                raise LocatedError(["groups"], f"found {self.groups}, which does not divide the {number} {what}")
        return output

    def weight_shape(self, channels: int) -> Shape:
        """(filters, channels / groups, *kernel)."""
        return (self.filters, channels // self.groups, *self.geometry.size)

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Weight of `weight_shape` and, unless switched off, bias (filters,)."""
        size = math.prod(self.geometry.size)
        fan_in, fan_out = input[0] // self.groups * size, self.filters // self.groups * size
        weight = ParameterSpec(self.weight_shape(input[0]), self.weight_init, fan_in, fan_out)
        bias = ParameterSpec((self.filters,), self.bias_init, fan_in, fan_out)
        return {"weight": weight, "bias": bias} if self.bias else {"weight": weight}


class Conv1D(Convolution):
    """Convolution along a sequence: (N, channels, length) to (N, filters, length)."""

    axes: ClassVar[tuple[str, ...]] = ("length",)
    op: Literal["conv1d"]
    kernel: Size
    stride: Size = 1
    padding: Padding1D = (0, 0)
    dilation: Size = 1


class Conv2D(Convolution):
    """Convolution over an image: (N, channels, height, width) to (N, filters, height, width)."""

    axes: ClassVar[tuple[str, ...]] = ("height", "width")
    op: Literal["conv2d"]
    kernel: Sizes2D
    stride: Sizes2D = (1, 1)
    padding: Padding2D = ((0, 0), (0, 0))
    dilation: Sizes2D = (1, 1)


class Conv3D(Convolution):
    """Convolution over a volume: (N, channels, depth, height, width) to (N, filters, depth, height, width)."""

    since: ClassVar[int] = 4
    axes: ClassVar[tuple[str, ...]] = ("depth", "height", "width")
    op: Literal["conv3d"]
    kernel: Sizes3D
    stride: Sizes3D = (1, 1, 1)
    padding: Padding3D = ((0, 0), (0, 0), (0, 0))
    dilation: Sizes3D = (1, 1, 1)


class TransposedConvolution(Convolution):
    """Base of the transposed convolutions: each element adds its multiple of the kernels to the result, plus a bias.

    Neighbouring elements add at places `stride` apart. `padding` is how many elements are cut off the result before and
    after each axis, `output_padding` how many it has more at the end of each. The weight is that of the convolution of
    which this is the transpose: its first axis is the input's channels.
    """

    since: ClassVar[int] = 4
    pads_same: ClassVar[bool] = False

    @property
    def extra(self) -> Shape:
        """`output_padding`, whatever the number of axes."""
        return self._each("output_padding")

    def weight_shape(self, channels: int) -> Shape:
        """(channels, filters / groups, *kernel)."""
        return (channels, self.filters // self.groups, *self.geometry.size)

    def _move(self, input: Shape, channels: int) -> Shape:
        _check_axes(input, self.axes)
        at = self.geometry
        for extra, stride, dilation in zip(self.extra, at.stride, at.dilation, strict=True):
            if extra >= max(stride, dilation):
                problem = f"found {extra}, expected less than the stride {stride} or the dilation {dilation}"
                raise LocatedError(["output_padding"], problem)
        whole = [(n - 1) * s + k for n, s, k in zip(input[1:], at.stride, at.extent, strict=True)]
        check_sizes({"its result before padding is cut off": (channels, *whole)})
        found = tuple(n - sum(sides) + extra for n, sides, extra in zip(whole, at.padding, self.extra, strict=True))
        if min(found) < 1:
            raise LocatedError(
                ["padding"],
                f"found {toml.inline(at.padding)} for an input of shape {show(input)}: nothing is left of the result, "
                f"whose lengths would be {toml.inline(found)}",
            )
        return (channels, *found)


class Conv1DTranspose(TransposedConvolution):
    """Transposed convolution along a sequence: (N, channels, length) to (N, filters, length)."""

    axes: ClassVar[tuple[str, ...]] = ("length",)
    op: Literal["conv1d_transpose"]
    kernel: Size
    stride: Size = 1
    padding: Cut1D = (0, 0)
    """How many elements of the result are cut off before and after."""
    output_padding: Padding = 0
    """How many elements the result has more at its end; less than the stride or the dilation."""
    dilation: Size = 1


class Conv2DTranspose(TransposedConvolution):
    """Transposed convolution over an image: (N, channels, height, width) to (N, filters, height, width)."""

    axes: ClassVar[tuple[str, ...]] = ("height", "width")
    op: Literal["conv2d_transpose"]
    kernel: Sizes2D
    stride: Sizes2D = (1, 1)
    padding: Cut2D = ((0, 0), (0, 0))
    """How many elements of the result are cut off before and after each axis."""
    output_padding: Extra2D = (0, 0)
    """How many elements the result has more at the end of each axis; less than the stride or the dilation."""
    dilation: Sizes2D = (1, 1)


class Conv3DTranspose(TransposedConvolution):
    """Transposed convolution over a volume: (N, channels, depth, height, width) to the same with filters."""

    axes: ClassVar[tuple[str, ...]] = ("depth", "height", "width")
    op: Literal["conv3d_transpose"]
    kernel: Sizes3D
    stride: Sizes3D = (1, 1, 1)
    padding: Cut3D = ((0, 0), (0, 0), (0, 0))
    """How many elements of the result are cut off before and after each axis."""
    output_padding: Extra3D = (0, 0, 0)
    """How many elements the result has more at the end of each axis; less than the stride or the dilation."""
    dilation: Sizes3D = (1, 1, 1)


class Pool(Windowed):
    """Base of the layers that make one number of every window, channel by channel.

    Padding is at most half the window, so that no window holds nothing else. A maximum never comes from it; the average
    counts it as zeros, or with `count_padding = false` not at all. What a window has beyond it, with `ceil_mode`, never
    counts.
    """

    size_key: ClassVar[str] = "window"

    @property
    def _later(self) -> dict[str, bool]:
        """Keys that came with opset 3, and whether they say something else than their defaults."""
        averages = {"count_padding": not self.counts_padding} if "count_padding" in type(self).model_fields else {}
        return {
            "dilation": set(self.geometry.dilation) != {1},
            "ceil_mode": self.geometry.ceil_mode,
            **averages,
        }

    @property
    def needs(self) -> list[tuple[str, str, int]]:
        """See `Layer.needs`: some settings came later."""
        return [*super().needs, *((key, f"{key} of a pool", 3) for key, given in self._later.items() if given)]

    @property
    def unsaid(self) -> list[str]:
        """See `Layer.unsaid`."""
        return [*super().unsaid, *(key for key, given in self._later.items() if not given)]

    @property
    def counts_padding(self) -> bool:
        """Whether padding counts, as zeros, in an average."""
        return bool(getattr(self, "count_padding", True))

    def output(self, input: Shape) -> Shape:
        """(N, channels, …) becomes (N, channels, …) with shorter axes."""
        found = self._move(input, input[0])
        at = self.geometry
        for axis, is_empty in enumerate(at.has_empty_window(input[1:]) if set(at.dilation) != {1} else ()):
            if input[1 + axis] and is_empty:
                raise LocatedError(["padding"], f"a window would lie on padding alone along the {self.axes[axis]}")
        return found

    @model_validator(mode="after")
    def _check_padding(self) -> Pool:
        for extent, padding in zip(self.geometry.extent, self.geometry.padding, strict=True):
            if 2 * max(padding) > extent:
                raise LocatedError(
                    ["padding"], f"found {max(padding)}, expected at most half the window of {extent}: {extent // 2}"
                )
        return self


class Pool1D(Pool):
    """Base of the pools along a sequence."""

    axes: ClassVar[tuple[str, ...]] = ("length",)
    window: Size
    stride: Size = Field(default_factory=lambda data: data["window"])
    """The length of the window, unless given."""
    padding: Padding1D = (0, 0)
    dilation: Size = 1
    """The distance of neighbouring elements of a window."""
    ceil_mode: bool = False
    """Whether elements that are left over at the end, too few for a window, have one nevertheless."""


class Pool2D(Pool):
    """Base of the pools over an image."""

    axes: ClassVar[tuple[str, ...]] = ("height", "width")
    window: Sizes2D
    stride: Sizes2D = Field(default_factory=lambda data: data["window"])
    """The size of the window, unless given."""
    padding: Padding2D = ((0, 0), (0, 0))
    dilation: Sizes2D = (1, 1)
    """The distance of neighbouring elements of a window."""
    ceil_mode: bool = False
    """Whether elements that are left over at an end, too few for a window, have one nevertheless."""


class Pool3D(Pool):
    """Base of the pools over a volume."""

    since: ClassVar[int] = 4
    axes: ClassVar[tuple[str, ...]] = ("depth", "height", "width")
    window: Sizes3D
    stride: Sizes3D = Field(default_factory=lambda data: data["window"])
    """The size of the window, unless given."""
    padding: Padding3D = ((0, 0), (0, 0), (0, 0))
    dilation: Sizes3D = (1, 1, 1)
    """The distance of neighbouring elements of a window."""
    ceil_mode: bool = False
    """Whether elements that are left over at an end, too few for a window, have one nevertheless."""


class MaxPool1D(Pool1D):
    """The largest of every window along a sequence."""

    op: Literal["max_pool1d"]


class MaxPool2D(Pool2D):
    """The largest of every window of an image."""

    op: Literal["max_pool2d"]


class MaxPool3D(Pool3D):
    """The largest of every window of a volume."""

    op: Literal["max_pool3d"]


class AvgPool1D(Pool1D):
    """The average of every window along a sequence."""

    op: Literal["avg_pool1d"]
    count_padding: bool = True
    """Whether padding counts, as zeros."""


class AvgPool2D(Pool2D):
    """The average of every window of an image."""

    op: Literal["avg_pool2d"]
    count_padding: bool = True
    """Whether padding counts, as zeros."""


class AvgPool3D(Pool3D):
    """The average of every window of a volume."""

    op: Literal["avg_pool3d"]
    count_padding: bool = True
    """Whether padding counts, as zeros."""


class Interpolate(Layer):
    """Every channel in another size: (N, channels, …) to the same with other lengths of the axes after the channels.

    With mode "nearest" an element is the one whose part of the axis it lies in; with "linear" it lies between the two
    that are nearest, along one axis after the other.
    """

    since: ClassVar[int] = 4
    channels_last: ClassVar[bool] = True
    op: Literal["interpolate"]
    size: Size | Annotated[tuple[Size, ...], Field(strict=False, min_length=1, max_length=7)] | None = None
    """The new lengths: one number for all axes, or one for each."""
    scale: Size | Annotated[tuple[Size, ...], Field(strict=False, min_length=1, max_length=7)] | None = None
    """In the place of `size`: how many times as long each axis becomes."""
    mode: Literal["nearest", "linear"] = "nearest"
    align_corners: bool = False
    """Of "linear": whether the first and last elements stay where they are, or elements are centres of equal parts."""

    @property
    def unsaid(self) -> list[str]:
        """See `Layer.unsaid`; a `scale` has become a `size`."""
        return [*super().unsaid, "scale"]

    @model_validator(mode="after")
    def _check_settings(self) -> Interpolate:
        if (self.size is None) == (self.scale is None):
            found = "neither" if self.size is None else "both"
            raise LocatedError(["size"], f"found {found} of size and scale, expected one of them")
        if self.align_corners and self.mode == "nearest":
            raise LocatedError(["align_corners"], 'found true with mode "nearest", expected it with "linear" alone')
        return self

    def resolved(self, input: Shape) -> Self:
        """See `Layer.resolved`: a size for each axis."""
        axes, given = len(input) - 1, self.size if self.scale is None else self.scale
        if axes < 1:
            raise ValueError(
                f"expected an input of shape (N, channels, …), found {show(input)}: nothing to interpolate"
            )
        key = "size" if self.scale is None else "scale"
        each: Shape = given if isinstance(given, tuple) else (given or 1,) * axes  # one of them is there
        if len(each) != axes:
            raise LocatedError([key], f"found {toml.inline(each)}, expected one number, or {axes} for {show(input)}")
        if self.scale is None:
            return self.model_copy(update={"size": each})
        size = tuple(times * n for times, n in zip(each, input[1:], strict=True))
        if max(size) > LARGEST_SIZE:
            raise LocatedError(["scale"], f"found {toml.inline(given)}, which makes an axis longer than {LARGEST_SIZE}")
        return self.model_copy(update={"size": size, "scale": None})

    @property
    def lengths_out(self) -> Shape:
        """The new length of each axis after the channels, once it is resolved."""
        assert isinstance(self.size, tuple)
        return self.size

    def settings(self) -> dict[str, Any]:
        """See `Layer.settings`; a `scale` has become a `size`."""
        return {name: value for name, value in super().settings().items() if name != "scale"}

    def output(self, input: Shape) -> Shape:
        """(N, channels, …) becomes (N, channels, *size)."""
        return (input[0], *self.lengths_out)

    def places(self, input: Shape) -> list[list[tuple[int, float]]]:
        """For each axis the place of each new element: the old one before it, its share of the way to the next."""
        found = []
        for old, new in zip(input[1:], self.lengths_out, strict=True):
            if self.mode == "nearest" or new == old:
                found.append([(i * old // new, 0.0) for i in range(new)])
                continue
            step = (old - 1) / max(new - 1, 1)
            centres = (min(max((i + 0.5) * (old / new) - 0.5, 0.0), old - 1.0) for i in range(new))
            at = [i * step for i in range(new)] if self.align_corners else list(centres)
            found.append([(min(int(place), old - 1), place - min(int(place), old - 1)) for place in at])
        return found


class GlobalPool(Layer):
    """Base of the layers that make one number of every channel."""

    since: ClassVar[int] = 2
    channels_last: ClassVar[bool] = True

    def output(self, input: Shape) -> Shape:
        """(N, channels, …) becomes (N, channels)."""
        if len(input) < 2:
            raise ValueError(f"expected an input of shape (N, channels, …), found {show(input)}: nothing to pool")
        return input[:1]


class GlobalMaxPool(GlobalPool):
    """The largest of every channel."""

    op: Literal["global_max_pool"]


class GlobalAvgPool(GlobalPool):
    """The average of every channel."""

    op: Literal["global_avg_pool"]


class Embedding(Layer):
    """A row of `weight` for every token id."""

    since: ClassVar[int] = 2
    reads: ClassVar[Reads] = "tokens"
    op: Literal["embedding"]
    vocabulary: Size
    """Ids are from 0 to vocabulary - 1."""
    dimension: Size
    padding_index: Annotated[int, Field(ge=-1, lt=LARGEST_SIZE)] = -1
    """The id whose row has no gradient and starts at zero; -1 for none."""
    trainable: bool = True
    """Whether the rows are trained, or stay what they are."""
    weight_init: Initialiser = NORMAL

    @property
    def padding_row(self) -> int | None:
        """The row of `padding_index`, or None."""
        return self.padding_index if self.padding_index >= 0 else None

    def settings(self) -> dict[str, Any]:
        """See `Layer.settings`; `padding_index` is None for none."""
        return super().settings() | {"padding_index": self.padding_row}

    def output(self, input: Shape) -> Shape:
        """(N, …) becomes (N, …, dimension)."""
        return (*input, self.dimension)

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Weight (vocabulary, dimension)."""
        shape = (self.vocabulary, self.dimension)
        return {"weight": ParameterSpec(shape, self.weight_init, *shape, self.trainable, self.padding_row)}

    @model_validator(mode="after")
    def _check_padding_index(self) -> Embedding:
        if self.padding_index >= self.vocabulary:
            raise LocatedError(
                ["padding_index"],
                f"found {self.padding_index}, expected an id from 0 to {self.vocabulary - 1}, or -1 for none",
            )
        return self


class PermuteDims(Layer):
    """The axes of a sample in another order."""

    since: ClassVar[int] = 2
    reads: ClassVar[Reads] = "any"
    op: Literal["permute_dims"]
    axes: Annotated[tuple[Annotated[int, Field(ge=0, le=7)], ...], Field(strict=False, min_length=1, max_length=8)]
    """For every axis of the output, that of the input; of one sample, from 0."""

    def output(self, input: Shape) -> Shape:
        """The axes of (N, …) after N, in the order of `axes`."""
        if sorted(self.axes) != list(range(len(input))):
            raise LocatedError(
                ["axes"],
                f"found {toml.inline(self.axes)}, expected each of 0 to {len(input) - 1} once "
                f"for an input of shape {show(input)}",
            )
        return tuple(input[axis] for axis in self.axes)


class RBF(Layer):
    """Radial basis functions along the last axis: ``exp(-beta · ‖x - center‖²)`` for every unit."""

    since: ClassVar[int] = 2
    lengths: ClassVar[Mapping[str, int]] = {"inputs": -1}
    op: Literal["rbf"]
    units: Size
    centers_init: Initialiser = STANDARD_NORMAL
    beta_init: Initialiser = ONES

    def output(self, input: Shape) -> Shape:
        """(N, …, features) becomes (N, …, units)."""
        return (*input[:-1], self.units)

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Centers (units, features) and beta (units,)."""
        fans = input[-1], self.units
        return {
            "centers": ParameterSpec((self.units, input[-1]), self.centers_init, *fans),
            "beta": ParameterSpec((self.units,), self.beta_init, *fans),
        }


class BatchNorm(Layer):
    """Every channel, the first axis of a sample, less its mean and by its deviation, times `scale`, plus `shift`.

    In training, mean and (biased) variance are those of the batch and of all axes but that of channels; elsewhere they
    are the running ones, which every step updates by `momentum` towards the batch's mean and unbiased variance.
    """

    since: ClassVar[int] = 2
    channels_last: ClassVar[bool] = True
    lengths: ClassVar[Mapping[str, int]] = {"channels": 0}
    op: Literal["batch_norm"]
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Scale, shift, and running_mean and running_var, which are not trained, each (channels,)."""
        shape, fans = input[:1], (input[0], input[0])
        return {
            "scale": ParameterSpec(shape, ONES, *fans),
            "shift": ParameterSpec(shape, ZEROS, *fans),
            "running_mean": ParameterSpec(shape, ZEROS, *fans, trainable=False),
            "running_var": ParameterSpec(shape, ONES, *fans, trainable=False),
        }

    def least_rows(self, input: Shape) -> int:
        """Two where a sample has one value of each channel, which by itself has no variance."""
        return 2 if math.prod(input[1:]) == 1 else 1


class LayerNorm(Layer):
    """Every row along the last axis, less its mean and by its deviation, times `scale`, plus `shift`."""

    since: ClassVar[int] = 2
    lengths: ClassVar[Mapping[str, int]] = {"features": -1}
    op: Literal["layer_norm"]
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Scale and shift, each (features,)."""
        shape, fans = input[-1:], (input[-1], input[-1])
        return {"scale": ParameterSpec(shape, ONES, *fans), "shift": ParameterSpec(shape, ZEROS, *fans)}


class MultiHeadAttention(Layer):
    """Each step's mean of all steps, weighted by how well they fit it, in several heads: of (N, steps, features).

    Queries, keys and values are ``x @ weight + bias``, side by side; each head has its part of the features of each.
    What the heads find, side by side, goes through ``@ output_weight + output_bias``.
    """

    since: ClassVar[int] = 3
    lengths: ClassVar[Mapping[str, int]] = {"features": -1}
    op: Literal["multi_head_attention"]
    heads: Size
    """They share the features equally."""
    causal: bool = False
    """Whether a step sees itself and those before it alone."""
    bias: bool = True
    weight_init: Initialiser = GLOROT_UNIFORM
    bias_init: Initialiser = ZEROS

    def output(self, input: Shape) -> Shape:
        """(N, steps, features) stays so."""
        if len(input) != 2:
            raise ValueError(f"expected an input of shape (N, steps, features), found {show(input)}")
        if input[1] % self.heads:
            raise LocatedError(["heads"], f"found {self.heads}, which does not divide the {input[1]} features")
        return input

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Weight (features, 3 · features), output_weight (features, features), and a bias each unless switched off."""
        n, fans = input[-1], (input[-1], input[-1])
        found = {
            "weight": ParameterSpec((n, 3 * n), self.weight_init, *fans),
            "bias": ParameterSpec((3 * n,), self.bias_init, *fans),
            "output_weight": ParameterSpec(fans, self.weight_init, *fans),
            "output_bias": ParameterSpec((n,), self.bias_init, *fans),
        }
        return found if self.bias else {name: parameter for name, parameter in found.items() if "bias" not in name}


class PositionEmbedding(Layer):
    """A learned vector for each step, added to it: (N, steps, features) to the same."""

    since: ClassVar[int] = 3
    lengths: ClassVar[Mapping[str, int]] = {"steps": -2, "features": -1}
    op: Literal["position_embedding"]
    weight_init: Initialiser = NORMAL

    def output(self, input: Shape) -> Shape:
        """(N, steps, features) stays so."""
        if len(input) != 2:
            raise ValueError(f"expected an input of shape (N, steps, features), found {show(input)}")
        return input

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Weight (steps, features)."""
        return {"weight": ParameterSpec(input, self.weight_init, input[0], input[1])}


class Add(Layer):
    """The sum of the several inputs that it names, of one shape: a residual connection."""

    since: ClassVar[int] = 3
    op: Literal["add"]

    @property
    def elementwise(self) -> bool:
        """Yes."""
        return True

    def merged(self, inputs: Sequence[Shape]) -> Shape:
        """The shape of all of them."""
        _check_joined(inputs)
        if len(set(inputs)) > 1:
            raise LocatedError(["inputs"], f"found the shapes {_all(inputs)}, expected one shape")
        return inputs[0]


class Concat(Layer):
    """The several inputs that it names, one after the other along an axis of a sample."""

    since: ClassVar[int] = 3
    op: Literal["concat"]
    axis: Annotated[int, Field(ge=0, le=7)] = 0
    """Of one sample, from 0; the other axes have the same lengths."""

    def merged(self, inputs: Sequence[Shape]) -> Shape:
        """The lengths along the axis added up."""
        _check_joined(inputs)
        axis, first = self.axis, inputs[0]
        if axis >= len(first) or len({(len(shape), shape[:axis], shape[axis + 1 :]) for shape in inputs}) > 1:
            raise LocatedError(
                ["inputs"],
                f"found the shapes {_all(inputs)}, expected some that differ along axis {axis} of a sample alone",
            )
        return (*first[:axis], sum(shape[axis] for shape in inputs), *first[axis + 1 :])


def _check_joined(inputs: Sequence[Shape]) -> None:
    if len(inputs) < 2:
        raise LocatedError(["inputs"], f"found {len(inputs)}, expected two or more names of layers, or of the input")


def _all(shapes: Sequence[Shape]) -> str:
    return " and ".join(map(show, shapes))


# --- Shapes in messages, and their limits ---


def _check_axes(input: Shape, axes: tuple[str, ...]) -> None:
    if len(input) != 1 + len(axes):
        expected = ", ".join(["N", "channels", *axes])
        raise ValueError(f"expected an input of shape ({expected}), found {show(input)}")


def check_sizes(shapes: dict[str, Shape]) -> None:
    """Raise `ValueError` for the first of some things, by name, that would have too many elements."""
    for name, shape in shapes.items():
        size = math.prod(shape)
        if size > MOST_ELEMENTS:
            raise ValueError(f"{name} would have {size} elements, expected at most {MOST_ELEMENTS}")


def show(shape: Shape) -> str:
    """A shape as messages print it, with the batch dimension in front: ``(N, 4, 196)``."""
    return f"({', '.join(['N', *map(str, shape)])})"
