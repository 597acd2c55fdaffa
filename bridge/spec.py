"""The model spec: one TOML file that every engine builds the same network from.

A spec is a list of layers from a small closed set, applied one after the other, and a loss. It says everything that
decides the network and nothing about training or data. Reading one checks all of it, shapes included, so that an engine
never meets a spec that it would have to refuse:

    spec = load("experiments/models/mnist-rnn.toml")
    for layer, shape in zip(spec.layers, spec.shapes()):
        print(layer.id, shape.input, "->", shape.output)

**Shapes** are of one sample. A batch adds one dimension in front of every one of them, the symbolic N: the input
``["N", 784]`` has the shape ``(784,)`` here and is printed ``(N, 784)``. No layer mixes samples or changes their number.

**Layout** of the parameters, in weights files and in every engine's inputs and outputs (adapters convert where a
framework differs): all in C order, named ``<layer id>.<parameter>``. `weight` is (in, out) and used as ``x @ weight``;
`recurrent` is (hidden, hidden) and used as ``h @ recurrent``; `bias` is (out,). The gates of an LSTM (input, forget,
cell, output) and of a GRU (reset, update, new) lie side by side along the last axis.

**A new layer** is one class here, with its shape rule and its parameters, and its name in `AnyLayer`.
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

__all__ = ["FORMAT", "OPSET", "VERSION", "ModelSpec", "json_schema", "load", "loads", "parse"]

FORMAT = "twingrad-model"
VERSION = 1
"""Version of the file's own structure."""
OPSET = 1
"""Version of the set of ops: raised when ops are added, so that an older TwinGrad refuses what it can't build."""

LARGEST = 2**24
"""Upper end of every size in a spec."""
MOST_ELEMENTS = 2**31 - 1
"""The most elements that one parameter, or the activations of one sample, may have."""

Shape = tuple[int, ...]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]
Size = Annotated[int, Field(ge=1, le=LARGEST)]
DType = Literal["float32", "float64"]
Activation = Literal["identity", "tanh", "relu", "sigmoid", "softplus", "softmax"]


class Record(BaseModel):
    """Base of every table of a spec: unknown keys, NaN and numbers of the wrong kind are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# Initialisers ---------------------------------------------------------------------------------------------------------


class PlainInitialiser(Record):
    """An initialiser without options: Glorot (Xavier) and He by their fans, zeros, ones."""

    name: Literal["glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "zeros", "ones"]


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


def _spell_out(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


AnyInitialiser = Annotated[PlainInitialiser | Uniform | Normal, Field(discriminator="name")]
InitialiserName = Literal[
    "glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "zeros", "ones", "uniform", "normal"
]
Initialiser = Annotated[
    AnyInitialiser, BeforeValidator(_spell_out, json_schema_input_type=InitialiserName | AnyInitialiser)
]
"""A table, or its name alone where the options keep their defaults."""

GLOROT_UNIFORM = PlainInitialiser(name="glorot_uniform")
ZEROS = PlainInitialiser(name="zeros")


# Layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter before it exists. `fan_in` and `fan_out` are those of one unit, of one gate where there are gates."""

    shape: Shape
    initialiser: PlainInitialiser | Uniform | Normal
    fan_in: int
    fan_out: int


class Layer(Record):
    """Base of all layers. A shape rule raises `ValueError` saying what input it expects when it gets another."""

    since: ClassVar[int] = 1
    """The opset that brought the op."""

    id: Name
    """Unique in the spec; the first part of the names of the layer's parameters."""
    op: str

    def output(self, input: Shape) -> Shape:
        """The shape of what the layer makes of an `input` shape."""
        raise NotImplementedError

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """The layer's parameters for an `input` shape, in the order in which they are stored."""
        return {}


class Dense(Layer):
    """``x @ weight + bias`` along the last axis: (…, features) -> (…, units)."""

    op: Literal["dense"]
    units: Size
    bias: bool = True
    weight_init: Initialiser = GLOROT_UNIFORM
    bias_init: Initialiser = ZEROS

    def output(self, input: Shape) -> Shape:
        return (*input[:-1], self.units)

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        fan_in, units = input[-1], self.units
        found = {"weight": ParameterSpec((fan_in, units), self.weight_init, fan_in, units)}
        if self.bias:
            found["bias"] = ParameterSpec((units,), self.bias_init, fan_in, units)
        return found


class Recurrent(Layer):
    """Base of the layers that read (steps, features) step by step, starting from a state of zeros."""

    gates: ClassVar[int] = 1

    units: Size
    returns: Literal["last", "sequence"] = "last"
    """The state after the last step (many-to-one) or after every step (many-to-many)."""
    weight_init: Initialiser = GLOROT_UNIFORM
    recurrent_init: Initialiser = GLOROT_UNIFORM
    bias_init: Initialiser = ZEROS

    def output(self, input: Shape) -> Shape:
        if len(input) != 2:
            raise ValueError(f"expected an input of shape (N, steps, features), found {show(input)}")
        return (input[0], self.units) if self.returns == "sequence" else (self.units,)

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
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
    """Long short-term memory, gates in the order input, forget, cell, output."""

    gates: ClassVar[int] = 4
    op: Literal["lstm"]


class GRU(Recurrent):
    """Gated recurrent unit, reset after the product, gates in the order reset, update, new; bias on the input side."""

    gates: ClassVar[int] = 3
    op: Literal["gru"]


class Flatten(Layer):
    """All features of a sample in one row, in C order."""

    op: Literal["flatten"]

    def output(self, input: Shape) -> Shape:
        return (math.prod(input),)


class Reshape(Layer):
    """The same features of a sample in another shape, in C order."""

    op: Literal["reshape"]
    shape: Annotated[tuple[Size, ...], Field(strict=False, min_length=1, max_length=8)]
    """Of one sample, without N."""

    def output(self, input: Shape) -> Shape:
        if math.prod(input) != math.prod(self.shape):
            raise ValueError(
                f"shape {show(self.shape)} holds {math.prod(self.shape)} elements per sample, "
                f"but its input {show(input)} has {math.prod(input)}"
            )
        return self.shape


class Activate(Layer):
    """A function of every element; softmax along the last axis."""

    op: Literal["activation"]
    function: Activation

    def output(self, input: Shape) -> Shape:
        return input


class Dropout(Layer):
    """In training, each element is zero with probability `rate`, the others divided by 1 - rate; otherwise nothing."""

    op: Literal["dropout"]
    rate: Annotated[float, Field(ge=0, lt=1)]

    def output(self, input: Shape) -> Shape:
        return input


AnyLayer = Annotated[
    Dense | RNN | LSTM | GRU | Flatten | Reshape | Activate | Dropout,
    Field(discriminator="op"),
]


# Losses ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What the loss compares one sample's output with: integer classes, or numbers in the dtype of training."""

    shape: Shape
    kind: Literal["classes", "numbers"]


class Loss(Record):
    """Base of all losses, each the mean over the batch (and over steps, where there are several)."""

    applies: ClassVar[str | None] = None
    """The activation that is part of the loss: the last layer must leave it out."""

    op: str

    def target(self, output: Shape) -> Target:
        """The targets for a network's `output` shape. Raises `ValueError` when the loss can't be applied to it."""
        return Target(output, "numbers")


class SoftmaxCrossEntropy(Loss):
    """Softmax over the last axis and cross-entropy with an integer class for each row of logits."""

    applies: ClassVar[str | None] = "softmax"
    op: Literal["softmax_cross_entropy"]

    def target(self, output: Shape) -> Target:
        if output[-1] < 2:
            raise ValueError(
                f"{self.op} expects logits of shape (N, …, classes) with 2 or more classes, found {show(output)}; "
                "for one logit per sample use binary_cross_entropy"
            )
        return Target(output[:-1], "classes")


class BinaryCrossEntropy(Loss):
    """Sigmoid of every logit and cross-entropy with a target from 0 to 1 for each."""

    applies: ClassVar[str | None] = "sigmoid"
    op: Literal["binary_cross_entropy"]


class MeanSquaredError(Loss):
    """Mean of the squared differences."""

    op: Literal["mean_squared_error"]


AnyLoss = Annotated[SoftmaxCrossEntropy | BinaryCrossEntropy | MeanSquaredError, Field(discriminator="op")]


# The spec -------------------------------------------------------------------------------------------------------------


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
    dtype: DType = "float32"
    """Of the data, and of parameters and arithmetic unless the caller says otherwise."""

    @model_validator(mode="after")
    def _check_batch_dimension(self) -> Input:
        if [size == "N" for size in self.shape] != [True] + [False] * (len(self.shape) - 1):
            raise LocatedError(["shape"], f'found {toml.inline(self.shape)}, expected "N" once, as the first size')
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
    layers: Annotated[tuple[AnyLayer, ...], Field(strict=False, min_length=1, max_length=1000)]
    loss: AnyLoss

    def shapes(self) -> list[LayerShape]:
        """The shapes of every layer, in order."""
        return list(self._infer())

    @property
    def output(self) -> Shape:
        """The shape of what the network makes of one sample."""
        return self.shapes()[-1].output

    @property
    def target(self) -> Target:
        """What the loss expects beside each sample."""
        return self.loss.target(self.output)

    def parameters(self) -> dict[str, ParameterSpec]:
        """All parameters by their full names, in the order in which they are stored."""
        return {
            f"{layer.id}.{name}": parameter
            for layer, shape in zip(self.layers, self.shapes(), strict=True)
            for name, parameter in layer.parameters(shape.input).items()
        }

    def dump(self) -> str:
        """The spec as TOML in canonical form, every default spelled out: equal specs have equal dumps."""
        return toml.dump(self.model_dump())

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form: the same however the file was laid out."""
        return hashlib.sha256(self.dump().encode()).hexdigest()

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        """Refuse what no engine could build."""
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.id in seen:
                raise LocatedError(["layers", index], f'"{layer.id}" is already the id of layers[{seen[layer.id]}]')
            if layer.since > self.opset:
                raise LocatedError(["layers", index, "op"], f"{layer.op} needs opset {layer.since}, not {self.opset}")
            seen[layer.id] = index
        output = self.input.sample
        for shape in self._infer():
            output = shape.output
        self._check_loss(output)
        return self

    def _infer(self) -> Iterator[LayerShape]:
        shape = self.input.sample
        for index, layer in enumerate(self.layers):
            try:
                output = layer.output(shape)
                parameters = {f"{layer.id}.{name}": p.shape for name, p in layer.parameters(shape).items()}
                for name, size in {"its output": output, **parameters}.items():
                    if math.prod(size) > MOST_ELEMENTS:
                        raise ValueError(f"{name} would have {math.prod(size)} elements, at most {MOST_ELEMENTS} fit")
            except ValueError as error:
                raise LocatedError(["layers", index], str(error)) from None
            yield LayerShape(layer.id, shape, output, parameters)
            shape = output

    def _check_loss(self, output: Shape) -> None:
        last = self.layers[-1]
        try:
            self.loss.target(output)
        except ValueError as error:
            raise LocatedError(["loss"], f'{error} from layer "{last.id}"') from None
        if isinstance(last, Activate) and last.function == self.loss.applies:
            raise LocatedError(
                ["loss"],
                f'{self.loss.op} applies {self.loss.applies} itself and expects logits, found the output of '
                f'layer "{last.id}" ({last.function}): remove that layer',
            )


def show(shape: Shape) -> str:
    """A shape as messages print it, with the batch dimension in front."""
    return f"({', '.join(['N', *map(str, shape)])})"


# Reading --------------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> ModelSpec:
    """Read a spec from a TOML file. Raises `SpecError` naming the file and everything wrong with it."""
    try:
        text = toml.read(path)
    except toml.TomlError as error:
        raise SpecError(str(Path(path)), [str(error)]) from None
    return loads(text, str(Path(path)))


def loads(text: str, source: str = "<string>") -> ModelSpec:
    """Read a spec from TOML text; `source` names it in errors."""
    try:
        return parse(toml.parse(text), source)
    except toml.TomlError as error:
        raise SpecError(source, [str(error)]) from None


def parse(data: dict[str, Any], source: str = "<data>") -> ModelSpec:
    """Check a spec given as nested dictionaries and lists; `source` names it in errors."""
    try:
        return ModelSpec.model_validate(data)
    except ValidationError as error:
        problems = explain.problems(ModelSpec, error, data)
    # In a file of another kind, or from a newer TwinGrad, everything else that seems wrong follows from that.
    header = [text for text in problems if text.startswith(("format:", "version:", "opset:"))]
    raise SpecError(source, header or problems)


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of spec files, for editors and other programs. Shapes are beyond what it can check."""
    schema = ModelSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "TwinGrad model spec"}
