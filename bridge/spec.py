"""The model spec: one TOML file that every engine builds the same network from.

A spec is a list of layers from a small closed set, applied one after the other, and a loss. It says all that
decides the network, and nothing about training or data. Reading one checks everything, shapes included: an
engine never meets a spec it would have to refuse.

    spec = load("experiments/models/mnist-rnn.toml")
    for layer, shape in zip(spec.layers, spec.shapes()):
        print(layer.id, shape.input, "->", shape.output)

**Shapes** are of one sample. A batch puts one dimension in front of each of them, the symbolic N: the input
``["N", 784]`` has the shape ``(784,)`` here and is printed ``(N, 784)``. No layer mixes samples or changes
their number.

**Parameters** are named ``<layer id>.<parameter>`` and laid out in C order, in weights files and in all that
goes into and out of an engine; adapters convert where a framework differs. `weight` is (in, out) and used as
``x @ weight``, `recurrent` is (hidden, hidden) and used as ``h @ recurrent``, `bias` is (out,). Gates lie
side by side along the last axis.

**A new layer** is one class here, with its shape rule and its parameters, named in `AnyLayer`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bridge import explain, toml
from bridge.errors import SpecError
from bridge.explain import LocatedError

VERSION = 1
"""Version of the file's own structure."""
OPSET = 1
"""Version of the set of ops, raised when ops are added: an older TwinGrad must refuse what it can't build."""

LARGEST_SIZE = 2**24
"""Upper end of every size in a spec."""
MOST_ELEMENTS = 2**31 - 1
"""The most elements that a parameter, or what a layer makes of one sample, may have."""

Shape = tuple[int, ...]
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]


class Record(BaseModel):
    """Base of every table of a spec: unknown keys, NaN, Inf and values of another type are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# --- Initialisers ---

PlainName = Literal["glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "zeros", "ones"]


class PlainInitialiser(Record):
    """An initialiser without options: Glorot (Xavier) and He scaled by the fans, zeros, ones."""

    name: PlainName


class Uniform(Record):
    """Uniform between `low` and `high`."""

    name: Literal["uniform"]
    low: float = -0.1
    high: float = 0.1

    @model_validator(mode="after")
    def _check_order(self) -> Uniform:
        if self.low > self.high:
            raise LocatedError(["low"], f"found {self.low}, expected at most high = {self.high}")
        return self


class Normal(Record):
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


# --- Layers ---


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter before it exists. The fans are those of one unit, and of one gate where there are gates."""

    shape: Shape
    initialiser: AnyInitialiser
    fan_in: int
    fan_out: int


class Layer(Record):
    """Base of all layers; by itself it keeps its input's shape and has no parameters."""

    since: ClassVar[int] = 1
    """The opset that brought the op."""

    id: Name
    """Unique in the spec; the first part of the names of the layer's parameters."""
    op: str

    def output(self, input: Shape) -> Shape:
        """The shape of what the layer makes of `input`. Raises `ValueError` when `input` doesn't fit."""
        return input

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """The layer's parameters for an `input` that fits, in the order in which they are stored."""
        return {}


class Dense(Layer):
    """``x @ weight + bias`` along the last axis."""

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

    op: Literal["flatten"]

    def output(self, input: Shape) -> Shape:
        """(N, …) becomes (N, features)."""
        return (math.prod(input),)


class Reshape(Layer):
    """The same features of a sample in another shape, in C order."""

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
    activation: Literal["identity", "tanh", "relu", "sigmoid", "softplus", "softmax"]


class Dropout(Layer):
    """In training, each element becomes 0 with probability `rate` and is divided by 1 - rate otherwise."""

    op: Literal["dropout"]
    rate: Annotated[float, Field(ge=0, lt=1)]


AnyLayer = Dense | RNN | LSTM | GRU | Flatten | Reshape | Activation | Dropout


# --- Losses ---


@dataclass(frozen=True)
class Target:
    """What the loss compares the output for one sample with: integer classes or floating-point numbers."""

    shape: Shape
    kind: Literal["classes", "numbers"]


class Loss(Record):
    """Base of all losses; each is the mean over all that it compares."""

    applies: ClassVar[str | None] = None
    """The activation that is part of the loss, and that the last layer must leave to it."""

    op: str

    def target(self, output: Shape) -> Target:
        """The targets for a network's `output`. Raises `ValueError` when `output` doesn't fit."""
        return Target(output, "numbers")


class SoftmaxCrossEntropy(Loss):
    """Softmax along the last axis, and cross-entropy with an integer class for each row of logits."""

    applies: ClassVar[str | None] = "softmax"
    op: Literal["softmax_cross_entropy"]

    def target(self, output: Shape) -> Target:
        """One class for each row of logits: (N, …, classes) needs targets (N, …)."""
        if output[-1] < 2:
            raise ValueError(
                f"found logits of shape {show(output)}, expected (N, …, classes) with 2 classes or more "
                "(for a single logit there is binary_cross_entropy)"
            )
        return Target(output[:-1], "classes")


class BinaryCrossEntropy(Loss):
    """Sigmoid of every logit, and cross-entropy with a target from 0 to 1 for each."""

    applies: ClassVar[str | None] = "sigmoid"
    op: Literal["binary_cross_entropy"]


class MeanSquaredError(Loss):
    """Mean of the squared differences."""

    op: Literal["mean_squared_error"]


AnyLoss = SoftmaxCrossEntropy | BinaryCrossEntropy | MeanSquaredError


# --- The spec ---


@dataclass(frozen=True)
class LayerShape:
    """A layer's shapes for one sample, and those of its parameters by their full names."""

    id: str
    input: Shape
    output: Shape
    parameters: dict[str, Shape]


class Input(Record):
    """What the first layer reads."""

    shape: Annotated[tuple[Literal["N"] | Size, ...], Field(strict=False, min_length=2, max_length=9)]
    """"N" for the batch, then the shape of one sample."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of the data, and of parameters and arithmetic unless the caller says otherwise."""

    @model_validator(mode="after")
    def _check_batch_dimension(self) -> Input:
        batch, *sample = self.shape
        if batch != "N" or "N" in sample:
            found = toml.inline(self.shape)
            raise LocatedError(["shape"], f'found {found}, expected "N" first and only there')
        return self

    @property
    def sample(self) -> Shape:
        """The shape of one sample."""
        return tuple(size for size in self.shape if size != "N")


class ModelSpec(Record):
    """A network and its loss, checked in full. Made by `load`, `loads` or `parse`."""

    format: Literal["twingrad-model"]
    version: Annotated[int, Field(ge=1, le=VERSION)]
    opset: Annotated[int, Field(ge=1, le=OPSET)]
    name: Name
    input: Input
    layers: Annotated[
        tuple[Annotated[AnyLayer, Field(discriminator="op")], ...],
        Field(strict=False, min_length=1, max_length=1000),
    ]
    loss: Annotated[AnyLoss, Field(discriminator="op")]

    def shapes(self) -> list[LayerShape]:
        """The shapes of every layer, in order."""
        return list(self._infer())

    @property
    def output(self) -> Shape:
        """The shape of what the network makes of one sample."""
        return self.shapes()[-1].output

    @property
    def target(self) -> Target:
        """What the loss compares the output with."""
        return self.loss.target(self.output)

    def parameters(self) -> dict[str, ParameterSpec]:
        """All parameters by their full names, in the order in which they are stored."""
        return {
            f"{layer.id}.{name}": parameter
            for layer, shape in zip(self.layers, self.shapes(), strict=True)
            for name, parameter in layer.parameters(shape.input).items()
        }

    def dump(self) -> str:
        """The spec as TOML in its canonical form, with every default spelled out."""
        return toml.dump(self.model_dump())

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form: the same however the file was laid out."""
        return hashlib.sha256(self.dump().encode()).hexdigest()

    @model_validator(mode="after")
    def _check_layers(self) -> ModelSpec:
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.id in seen:
                raise LocatedError(
                    ["layers", index, "id"], f'"{layer.id}" is the id of layers[{seen[layer.id]}] already'
                )
            if layer.since > self.opset:
                raise LocatedError(["layers", index, "op"], f"{layer.op} needs opset {layer.since}, found {self.opset}")
            seen[layer.id] = index
        return self

    @model_validator(mode="after")
    def _check_shapes(self) -> ModelSpec:
        output, last = self.shapes()[-1].output, self.layers[-1]
        try:
            self.loss.target(output)
        except ValueError as error:
            raise LocatedError(
                ["loss"], f'{self.loss.op} does not fit the output of layer "{last.id}": {error}'
            ) from None
        if isinstance(last, Activation) and last.activation == self.loss.applies:
            raise LocatedError(
                ["loss"],
                f"{self.loss.op} applies {last.activation} itself: expected logits, "
                f'found the output of layer "{last.id}" ({last.activation}), which has to go',
            )
        return self

    def _infer(self) -> Iterator[LayerShape]:
        shape = self.input.sample
        for index, layer in enumerate(self.layers):
            try:
                output = layer.output(shape)
                parameters = {f"{layer.id}.{name}": p.shape for name, p in layer.parameters(shape).items()}
                _check_sizes({"its output": output, **parameters})
            except ValueError as error:
                raise LocatedError(["layers", index], str(error)) from None
            yield LayerShape(layer.id, shape, output, parameters)
            shape = output


def _check_sizes(shapes: dict[str, Shape]) -> None:
    for name, shape in shapes.items():
        size = math.prod(shape)
        if size > MOST_ELEMENTS:
            raise ValueError(f"{name} would have {size} elements, expected at most {MOST_ELEMENTS}")


def show(shape: Shape) -> str:
    """A shape as messages print it, with the batch dimension in front: ``(N, 4, 196)``."""
    return f"({', '.join(['N', *map(str, shape)])})"


# --- Reading ---


def load(path: str | os.PathLike[str]) -> ModelSpec:
    """Read a spec from a TOML file. Raises `SpecError`, naming the file and everything wrong with it."""
    source = str(Path(path))
    try:
        text = toml.read(path)
    except toml.TomlError as error:
        raise SpecError(source, [str(error)]) from None
    return loads(text, source)


def loads(text: str, source: str = "<string>") -> ModelSpec:
    """Read a spec from TOML text; `source` names it in errors."""
    try:
        data = toml.parse(text)
    except toml.TomlError as error:
        raise SpecError(source, [str(error)]) from None
    return parse(data, source)


def parse(data: dict[str, Any], source: str = "<data>") -> ModelSpec:
    """Check a spec given as nested dictionaries and lists; `source` names it in errors."""
    try:
        return ModelSpec.model_validate(data)
    except ValidationError as error:
        found = explain.problems(ModelSpec, error, data)
    # In a file of another kind or for a newer TwinGrad, whatever else seems wrong follows from that.
    header = {key: found[key] for key in ("format", "version", "opset") if key in found}
    for key in ("version", "opset"):
        if key in header:
            header[key] += " (a higher one needs a newer TwinGrad)"
    raise SpecError(source, [f"{place}: {text}" for place, text in (header or found).items()])


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of spec files, for editors and other programs. It can't check shapes."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **ModelSpec.model_json_schema(), "title": "TwinGrad model spec"}
