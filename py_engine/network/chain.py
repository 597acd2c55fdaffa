"""A model as a chain of layers over one flat vector of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from py_engine.ad.op import Equation, as_tensor
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.ops.indexing import CHECK_IDS
from py_engine.ad.program import Program, trace
from py_engine.ad.state import collecting, restoring, scope
from py_engine.ad.tensor import Operand, Tensor
from py_engine.errors import ConfigurationError, ShapeError
from py_engine.network.initialisers import ParameterSpec, initialise, stream
from py_engine.network.layers import Dropout, Layer, held_layers, tracing_aside
from py_engine.network.parameters import Parameters

Shape = tuple[int, ...]
V = TypeVar("V")


class Chain:
    """Layers applied one after the other; call it with a batch to get the outputs (logits).

        chain = Chain(Reshape(4, 196), RNN(196, 64), Dense(64, 10), seed=0)
        logits = chain(x)

    Each layer has an id: its own `name`, or that of its class in lower case, numbered when taken (`dense`,
    `dense2`). A layer keeps its id as long as it is in the chain. Parameters are called ``<id>.<name>``;
    their initial values come from `seed` and that name alone, so adding or removing a layer changes no other. If
    `values` gives all of them by name, none is drawn.

    Editing makes a new `parameters` object, into which the values of the layers that stay are copied; the old
    one is no longer used. What was built from it (a trainer, a bound optimizer) has to be built again.
    """

    def __init__(
        self,
        *layers: Layer,
        seed: int = 0,
        dtype: DTypeLike = np.float32,
        values: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        self.seed = seed
        self.layers: dict[str, Layer] = {}
        self.parameters = Parameters({}, dtype)
        added: dict[str, Layer] = {}
        for layer in layers:
            added[_new_id(layer, added)] = layer
        self._become(added, values)

    # What it computes -------------------------------------------------------------------------------------

    def __call__(self, x: Operand, training: bool = False) -> Tensor:
        """The outputs for a batch `x` (N, ...). Raises `ShapeError` naming the layer that it doesn't fit."""
        return self.apply(self.parameters.tensors, x, training)

    @restoring
    def apply(self, tensors: Mapping[str, Tensor], x: Operand, training: bool = False) -> Tensor:
        """The outputs for a batch, with the parameters' values taken from `tensors`, by their full names.

        The chain's own values play no part: this is the function that is traced and differentiated.
        """
        y = as_tensor(x)
        if not y.shape:
            raise ShapeError("a chain is called with a batch (N, ...), actual shape ()")

        def compute(name: str, layer: Layer, given: Sequence[Tensor]) -> Tensor:
            with scope(name):
                layer.merged_shape([x.shape[1:] for x in given])
                missing = [local for local in layer.parameters() if f"{name}.{local}" not in tensors]
                if missing:
                    raise ConfigurationError(
                        f"layer {name!r}: its parameter {missing[0]!r} has no value here; a layer that has got another "
                        "parameter after its chain was made needs a new chain"
                    )
                own = {local: tensors[f"{name}.{local}"] for local in layer.parameters()}
                return layer(layer.merge(given), own, training)

        return self.through(y, compute)

    @restoring
    def shapes(self, input_shape: Shape) -> dict[str, Shape]:
        """The shape of the sample that comes out of each layer, by id, for a sample of `input_shape`.

        Raises `ShapeError` naming the layer that doesn't fit what comes to it.
        """
        result = {}

        def infer(name: str, layer: Layer, given: Sequence[Shape]) -> Shape:
            with scope(name):
                result[name] = layer.output_shape(layer.merged_shape(given))
            return result[name]

        self.through(input_shape, infer)
        return result

    def output_shape(self, input_shape: Shape) -> Shape:
        """The shape of an output sample for an input sample of `input_shape`; errors as `shapes`."""
        return [input_shape, *self.shapes(input_shape).values()][-1]

    @property
    def takes_ids(self) -> str | None:
        """The id of the layer that takes ids to which the samples go, which makes them ids, or None for numbers."""
        for name, layer in self.layers.items():
            if layer.takes_ids:
                return name
            if not layer.only_moves:
                break
        return None

    @property
    def couples_batch(self) -> str | None:
        """The first layer, its id and place, in which the samples of a batch affect each other in training, or None."""
        return next((name for name, layer in self._held().items() if layer.couples_batch), None)

    @property
    def splits(self) -> bool:
        """Whether a batch can be split over threads: if its samples affect each other, then by sums over it."""
        return all(layer.sums_over_batch or not layer.couples_batch for layer in self._held().values())

    def _held(self) -> dict[str, Layer]:
        """The layers, and those that they hold."""
        return held_layers(self.layers, Layer)  # type: ignore[type-abstract]  # none is made

    @restoring
    def lookups(self, samples: int, input_shape: Shape, training: bool) -> tuple[Program, list[tuple[int, str]]]:
        """What is looked up of token ids: a program from ids (samples, *input_shape), and a vocabulary for each result.

        Not among it are ids that are looked up inside a loop, or computed from numbers. The program's own checks are of
        indices.

        Returns:
            The program, and for each of its results how many ids there may be and the name of the layer that reads it.
        """
        ids = Tensor.symbol((samples, *input_shape), np.int64)
        with tracing_aside(self.layers), collecting("updates"):
            program = trace(lambda x: [self(x, training)], [ids])
        known, steps = {id(ids)}, []
        read: list[Tensor] = []
        rules: list[tuple[int, str]] = []
        for step in program.equations:
            check = None if step.op.checks is None else step.op.checks(*step.inputs, **step.attrs)
            if check is not None and not known.isdisjoint(map(id, check[1])) and _are_known(check[1], known):
                op, inputs, attrs = check
                if op is CHECK_IDS:
                    read.append(inputs[0])
                    rules.append((attrs["vocabulary"], step.scope))
                else:
                    steps.append(Equation.of(op, inputs, attrs, step.scope))
            are_ids = all(y.dtype.kind in "iub" for y in step.outputs) and not step.op.random
            if are_ids and _are_known(step.inputs, known):
                steps.append(step)
                known.update(map(id, step.outputs))
        return Program((ids,), tuple(steps), tuple(read)), rules

    # Editing ----------------------------------------------------------------------------------------------

    def append(self, layer: Layer) -> None:
        """Add `layer` at the end."""
        self.insert(len(self), layer)

    def insert(self, index: int, layer: Layer) -> None:
        """Add `layer` before the layer at `index`, as `list.insert` does."""
        entries = list(self.layers.items())
        entries.insert(index, (_new_id(layer, self.layers), layer))
        self._become(dict(entries))

    def remove(self, layer: int | str) -> Layer:
        """Take out the layer with this index or id, and return it; its values are lost."""
        name = self._id(layer)
        removed = self.layers[name]
        self._become({other: kept for other, kept in self.layers.items() if other != name})
        return removed

    # As a collection of layers ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers.values())

    def __getitem__(self, layer: int | str) -> Layer:
        return self.layers[self._id(layer)]

    def __repr__(self) -> str:
        width = max(map(len, self.layers), default=0)
        lines = [f"Chain of {len(self)} layers, {self.parameters.count:,} parameters, {self.parameters.dtype}"]
        for name, layer in self.layers.items():
            lines.append(f"  {name:{width}}  {layer!r}")
            if specs := layer.parameters():
                shapes = ", ".join(f"{local} {spec.shape}" for local, spec in specs.items())
                count = sum(spec.size for spec in specs.values())
                frozen = "" if all(spec.trainable for spec in specs.values()) else " (not all trained)"
                lines.append(f"  {'':{width}}  {shapes}: {count:,}{frozen}")
        return "\n".join(lines)

    # How it works -----------------------------------------------------------------------------------------

    def through(self, x: V, step: Callable[[str, Layer, Sequence[V]], V]) -> V:
        """Run through the layers: `step(id, layer, values)`, with the values that it reads, gives that of the layer."""
        for name, layer in self.layers.items():
            x = step(name, layer, [x])
        return x

    def _id(self, layer: int | str) -> str:
        ids = list(self.layers)
        if isinstance(layer, str) and layer in ids:
            return layer
        if is_whole(layer, -len(ids)) and int(layer) < len(ids):
            return ids[int(layer)]
        raise ConfigurationError(f"no layer {layer!r} in this chain of {len(ids)}: {', '.join(ids) or 'empty'}")

    def _become(self, layers: dict[str, Layer], values: Mapping[str, ArrayLike] | None = None) -> None:
        """Take over `layers` with new parameters.

        Their values are `values`, or else the old ones where the name stays and initial ones elsewhere.
        """
        specs: dict[str, ParameterSpec] = {
            f"{name}.{local}": spec for name, layer in layers.items() for local, spec in layer.parameters().items()
        }
        kept = self.parameters.arrays
        frozen = {name for name, spec in specs.items() if not spec.trainable}
        dtype = self.parameters.dtype
        parameters = Parameters({name: spec.shape for name, spec in specs.items()}, dtype, frozen)
        if values is not None:
            parameters.load(values)
        else:
            for name, spec in specs.items():
                parameters.put(name, kept[name] if name in kept else initialise(spec, stream(self.seed, name), dtype))
        for name, dropout in held_layers(layers, Dropout).items():
            dropout.place = name.partition(".")[2] or dropout.place
        self.layers, self.parameters = layers, parameters


def _are_known(inputs: Sequence[Tensor], known: set[int]) -> bool:
    """Whether these are among the known, or constants."""
    return all(id(x) in known or x.data is not None for x in inputs)


def _new_id(layer: Layer, taken: Mapping[str, Layer]) -> str:
    if not isinstance(layer, Layer):
        raise ConfigurationError(f"a chain is made of layers, actual {layer!r}")
    if layer.name is not None:
        if layer.name in taken:
            raise ConfigurationError(f"two layers are called {layer.name!r}; names in a chain must differ")
        return layer.name
    kind = type(layer).__name__.lower()
    number = 1
    while (name := kind if number == 1 else f"{kind}{number}") in taken:
        number += 1
    return name
