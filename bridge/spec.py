"""The model spec: one TOML file that every engine builds the same network from.

A spec is a list of layers from a small closed set and a loss. Each layer reads what the one before it makes, or what
the layers before it make that it names (`inputs`): residual connections and branches. A spec says all that decides the
network, and nothing about training or data. Reading one checks everything, shapes included: an
engine never meets a spec it would have to refuse.

    spec = load("experiments/models/mnist-rnn.toml")
    for layer, shape in zip(spec.layers, spec.shapes()):
        print(layer.id, shape.input, "->", shape.output)

**Shapes** are of one sample. A batch puts one dimension in front of each of them, the symbolic N: the input
``["N", 784]`` has the shape ``(784,)`` here and is printed ``(N, 784)``. No layer changes the number of samples, and
only batch normalisation mixes them.

**Input** is numbers, or with ``dtype = "int64"`` token ids, rows of the embedding that must then come before any other
layer that computes.

**Sequences, images and volumes** have their channels first: (channels, length), (channels, height, width) and
(channels, depth, height, width). A convolution is a cross-correlation, as in all frameworks. Padding is a number of
zeros before and after each axis, or "same", which reading turns into such numbers; what a window leaves over at the end
is dropped. The padding of a transposed convolution is what is cut off its result.

**Parameters** are named ``<layer id>.<parameter>`` and laid out in C order, in weights files and in all that
goes into and out of an engine; adapters convert where a framework differs. `weight` is (in, out) and used as
``x @ weight``, `recurrent` is (hidden, hidden) and used as ``h @ recurrent``, `bias` is (out,). Gates lie
side by side along the last axis. A convolution's `weight` is (filters, channels of one group, *kernel), a transposed
one's (channels, filters of one group, *kernel), as in PyTorch, an embedding's (vocabulary, dimension). A parameter that
is not *trainable*, such as a frozen embedding or the running statistics of batch normalisation, is stored and passed
like any other, but has no gradient, and optimizers leave it alone.

**A loss** is the mean over all targets of a mini-batch. With weights of classes, or a class that is ignored, it is the
mean by the weights of the whole mini-batch: over MPI, where each process knows a part of them, that is refused.

**A new layer** is one class in `bridge.layers`, with its settings, its shape rule and its parameters.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, ValidationError, model_validator

from bridge import toml, validation
from bridge.errors import SpecError
from bridge.layers import (
    LAYERS,
    Activation,
    Embedding,
    Layer,
    Name,
    ParameterSpec,
    Record,
    Shape,
    Size,
    check_sizes,
    show,
)
from bridge.validation import LocatedError

__all__ = [
    "INPUT",
    "OPSET",
    "VERSION",
    "AnyLayer",
    "AnyLoss",
    "BinaryCrossEntropy",
    "Input",
    "LayerShape",
    "Loss",
    "MeanSquaredError",
    "ModelSpec",
    "SoftmaxCrossEntropy",
    "Target",
    "json_schema",
    "load",
    "loads",
    "parse",
]

VERSION = 1
"""Version of the file's own structure."""
OPSET = 4
"""Version of the set of ops, raised when ops are added: an older TwinGrad must refuse what it can't build."""


# --- Losses ---


@dataclass(frozen=True)
class Target:
    """What the loss compares the output for one sample with: integer classes or floating-point numbers."""

    shape: Shape
    kind: Literal["classes", "numbers"]


class Loss(Record):
    """Base of all losses; each is the mean over all that it compares.

    Its settings beside `op` came with opset 4.
    """

    applies: ClassVar[str | None] = None
    """The activation that is part of the loss, and that the last layer must leave to it."""

    op: str

    def settings(self) -> dict[str, Any]:
        """What an engine's loss of this op receives, by name: the settings that differ from their defaults."""
        fields = type(self).model_fields
        return {name: value for name, value in self if name != "op" and value != fields[name].default}

    @property
    def unsaid(self) -> list[str]:
        """Keys that the canonical form leaves out: those that came later, where they have their defaults."""
        return [name for name in type(self).model_fields if name != "op" and name not in self.settings()]

    def target(self, output: Shape) -> Target:
        """The targets for a network's `output`. Raises `ValueError` when `output` doesn't fit."""
        return Target(output, "numbers")


class SoftmaxCrossEntropy(Loss):
    """Softmax along the last axis, and cross-entropy with an integer class for each row of logits.

    With `class_weights` or an `ignored_class` the mean of a mini-batch is that of its targets by their weights.
    """

    applies: ClassVar[str | None] = "softmax"
    op: Literal["softmax_cross_entropy"]
    class_weights: (
        Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=2, max_length=2**16)] | None
    ) = None
    """How much the loss of each class counts; all alike unless given."""
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of each target that all classes have in equal parts."""
    ignored_class: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """A target that counts nothing, in the loss and in accuracy; it need not be a class."""

    def target(self, output: Shape) -> Target:
        """One class for each row of logits: (N, …, classes) needs targets (N, …)."""
        if output[-1] < 2:
            raise ValueError(
                f"found logits of shape {show(output)}, expected (N, …, classes) with 2 classes or more "
                "(for a single logit there is binary_cross_entropy)"
            )
        if self.class_weights is not None and len(self.class_weights) != output[-1]:
            raise ValueError(
                f"found {len(self.class_weights)} class_weights, expected one for each of {output[-1]} classes"
            )
        return Target(output[:-1], "classes")

    @model_validator(mode="after")
    def _check_weights(self) -> SoftmaxCrossEntropy:
        if self.class_weights is not None and not any(self.class_weights):
            raise LocatedError(["class_weights"], "found zeros alone, expected one number above 0 or more")
        return self


class BinaryCrossEntropy(Loss):
    """Sigmoid of every logit, and cross-entropy with a target from 0 to 1 for each."""

    applies: ClassVar[str | None] = "sigmoid"
    op: Literal["binary_cross_entropy"]
    positive_weight: Annotated[float, Field(gt=0)] = 1.0
    """How much the part of a loss for target 1 counts; that for target 0 counts 1."""


class MeanSquaredError(Loss):
    """Mean of the squared differences."""

    op: Literal["mean_squared_error"]


AnyLoss = SoftmaxCrossEntropy | BinaryCrossEntropy | MeanSquaredError


# --- The spec ---

if TYPE_CHECKING:  # type checkers read no unions that are computed
    AnyLayer: TypeAlias = Layer
else:
    AnyLayer = functools.reduce(operator.or_, LAYERS.values())


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
    dtype: Literal["float32", "float64", "int64"] = "float32"
    """Of the data; of parameters and arithmetic, too, unless the caller says otherwise. int64: token ids."""

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

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Of parameters and arithmetic, unless the caller says otherwise: the input's, or float32 for token ids."""
        return "float32" if self.input.dtype == "int64" else self.input.dtype

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the input may hold, from 0 on; None where the input is numbers."""
        return min((layer.vocabulary for layer in self.layers if isinstance(layer, Embedding)), default=None)

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads what the one before it makes."""
        return not any(layer.inputs for layer in self.layers)

    def sources(self) -> list[tuple[int, ...]]:
        """For every layer the numbers of those whose results it reads, -1 for the input."""
        places = {INPUT: -1} | {layer.id: index for index, layer in enumerate(self.layers)}
        return [tuple(places[name] for name in layer.inputs) or (index - 1,) for index, layer in enumerate(self.layers)]

    def shapes(self) -> list[LayerShape]:
        """The shapes of every layer, in order."""
        return [shape for _, shape in self._infer()]

    @property
    def output(self) -> Shape:
        """The output shape of one sample."""
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

    def in_memory(self) -> dict[str, ParameterSpec]:
        """The same in the order of an engine's one vector: the trainable ones first."""
        return dict(sorted(self.parameters().items(), key=lambda item: not item[1].trainable))

    def dump(self) -> str:
        """The spec as TOML in its canonical form, with every default spelled out but those of keys that came later."""
        found = self.model_dump()
        for layer, table in zip(self.layers, found["layers"], strict=True):
            for key in layer.unsaid:
                del table[key]
        for key in self.loss.unsaid:
            del found["loss"][key]
        return toml.dump(found)

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
            for key, what, opset in layer.needs:
                if opset > self.opset:
                    raise LocatedError(["layers", index, key], f"{what} needs opset {opset}, found {self.opset}")
            seen[layer.id] = index
        for key in self.loss.settings():
            if self.opset < 4:
                raise LocatedError(["loss", key], f"{key} of a loss needs opset 4, found {self.opset}")
        if self.input.dtype == "int64" and self.opset < Embedding.since:
            raise LocatedError(["input", "dtype"], f"int64 needs opset {Embedding.since}, found {self.opset}")
        return self

    @model_validator(mode="after")
    def _check_inputs(self) -> ModelSpec:
        """Layers read what is before them, and nothing is computed for nobody."""
        if self.is_chain:
            return self
        before = [INPUT]
        for index, layer in enumerate(self.layers):
            if layer.id == INPUT:
                problem = (
                    f'found "{INPUT}", which the inputs of other layers mean the network\'s own by; expected another'
                )
                raise LocatedError(["layers", index, "id"], problem)
            for number, name in enumerate(layer.inputs):
                if name not in before:
                    after = name in [other.id for other in self.layers[index:]]
                    found = f'found "{name}", which comes no earlier' if after else f'there is no layer "{name}"'
                    known = ", ".join(f'"{other}"' for other in before)
                    raise LocatedError(["layers", index, "inputs", number], f"{found}: expected one of {known}")
            before.append(layer.id)
        read = {place for places in self.sources() for place in places}
        for index, layer in enumerate(self.layers[:-1]):
            if index not in read:
                raise LocatedError(["layers", index], f'nothing reads what layer "{layer.id}" makes')
        return self

    @model_validator(mode="after")
    def _resolve(self) -> ModelSpec:
        """Put numbers in the place of padding that is given by a word."""
        self.__dict__["layers"] = tuple(layer for layer, _ in self._infer())
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

    def _infer(self) -> Iterator[tuple[Layer, LayerShape]]:
        start = "tokens" if self.input.dtype == "int64" else "numbers"
        made: list[tuple[Shape, str]] = [(self.input.sample, start)]  # at 0 the input, then what each layer makes
        for index, (layer, sources) in enumerate(zip(self.layers, self.sources(), strict=True)):
            kinds = [made[place + 1][1] for place in sources]
            for holds in kinds:
                if layer.reads not in (holds, "any"):
                    raise LocatedError(["layers", index], f"{layer.op} {_WRONG_INPUT[holds]}")
            try:
                shape = layer.merged([made[place + 1][0] for place in sources])
                layer = layer.resolved(shape)
                output = layer.output(shape)
                parameters = {f"{layer.id}.{name}": p.shape for name, p in layer.parameters(shape).items()}
                check_sizes({"its output": output, **parameters})
            except ValueError as error:
                steps = error.steps if isinstance(error, LocatedError) else ()
                raise LocatedError(["layers", index, *steps], str(error)) from None
            yield layer, LayerShape(layer.id, shape, output, parameters)
            made.append((output, "numbers" if layer.reads == "tokens" else kinds[0]))
        if made[-1][1] == "tokens":
            raise LocatedError(["layers"], 'input.dtype = "int64" (token ids) needs an embedding, found none')


INPUT = "input"
"""What `inputs` of layers call the network's own input."""

_WRONG_INPUT = {
    "tokens": 'computes with numbers, found token ids (input.dtype = "int64"): put an embedding before it',
    "numbers": 'reads token ids, found numbers: it must be the first layer that computes, and input.dtype "int64"',
}


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


_HEADER = ("format", "version", "opset")


def parse(data: dict[str, Any], source: str = "<data>") -> ModelSpec:
    """Check a spec given as nested dictionaries and lists; `source` names it in errors."""
    try:
        return ModelSpec.model_validate(data)
    except ValidationError as error:
        found = validation.problems(ModelSpec, error, data, first=_HEADER)
    # In a file of another kind or for a newer TwinGrad, whatever else seems wrong follows from that.
    header = {key: found[key] for key in _HEADER if key in found}
    for key in ("version", "opset"):
        if key in header:
            header[key] += " (a higher one needs a newer TwinGrad)"
    raise SpecError(source, [f"{place}: {text}" for place, text in (header or found).items()])


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of spec files, for editors and other programs. It can't check shapes."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **ModelSpec.model_json_schema(), "title": "TwinGrad model spec"}
