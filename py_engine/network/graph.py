"""A model whose layers may read the results of any layers before them, and the layers that join several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from py_engine.ad import ops
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError
from py_engine.network.chain import Chain
from py_engine.network.layers import Layer, Shape, Tensors

V = TypeVar("V")

INPUT = "input"
"""What the input of a graph is called among the names that its layers read."""


class Joining(Layer):
    """A layer that joins several inputs; by itself, what is joined is its result."""

    def output_shape(self, input_shape: Shape) -> Shape:
        """The same."""
        return input_shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """Joined before."""
        return x


class Add(Joining, op="add"):
    """The sum of several inputs of one shape: a residual connection."""

    def merged_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of all of them."""
        if len(shapes) < 2 or len(set(shapes)) > 1:
            raise self.refused("two or more samples of one shape", shapes)
        return shapes[0]

    def merge(self, inputs: Sequence[Tensor]) -> Tensor:
        """The first plus the second, and so on."""
        return reduce(add, inputs)


class Concat(Joining, op="concat"):
    """Several inputs one after the other along an `axis` of a sample; their other lengths are the same."""

    def __init__(self, axis: int = 0, name: str | None = None) -> None:
        super().__init__(name)
        if not is_whole(axis, 0):
            raise ConfigurationError(f"Concat: axis must be an integer >= 0, actual {axis!r}")
        self.axis = int(axis)

    def merged_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The lengths along the axis added up."""
        axis = self.axis
        others = {(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes}
        if len(shapes) < 2 or len(others) > 1 or axis >= len(shapes[0]):
            raise self.refused(f"two or more samples that differ along axis {axis} alone", shapes)
        return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])

    def merge(self, inputs: Sequence[Tensor]) -> Tensor:
        """One concatenation."""
        return ops.concatenate(tuple(inputs), self.axis + 1)


class Graph(Chain):
    """Layers of which each reads the one before it, or those that `inputs` names for it; the last one's is the result.

        graph = Graph(Dense(4, 8, name="below"), Dense(8, 8, "relu", name="middle"), Add(name="sum"),
                      inputs={"sum": ["below", "middle"]})

    A layer reads only layers before it, or the network's own "input". Otherwise a graph is a `Chain`, whose layers
    stay what they are once it is made.
    """

    def __init__(
        self,
        *layers: Layer,
        inputs: Mapping[str, Sequence[str]],
        seed: int = 0,
        dtype: DTypeLike = np.float32,
        values: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        self.inputs = {name: _names_of(name, read) for name, read in inputs.items()}
        super().__init__(*layers, seed=seed, dtype=dtype, values=values)

    @property
    def takes_ids(self) -> str | None:
        """The id of the first layer that takes ids and reads the samples, which makes them ids, or None for numbers."""
        holds = {INPUT}
        for name, layer, read in self._reading():
            if holds.isdisjoint(read):
                continue
            if layer.takes_ids:
                return name
            if not layer.only_moves:
                return None
            holds.add(name)
        return None

    def _reading(self) -> list[tuple[str, Layer, tuple[str, ...]]]:
        before, found = INPUT, []
        for name, layer in self.layers.items():
            found.append((name, layer, self.inputs.get(name) or (before,)))
            before = name
        return found

    def through(self, x: V, step: Callable[[str, Layer, Sequence[V]], V]) -> V:
        """Run through the layers: `step(id, layer, values)`, with the values that it reads, gives that of the layer."""
        values = {INPUT: x}
        for name, layer, read in self._reading():
            x = values[name] = step(name, layer, [values[other] for other in read])
        return x

    def _become(self, layers: dict[str, Layer], values: Mapping[str, ArrayLike] | None = None) -> None:
        if getattr(self, "layers", None):
            raise ConfigurationError("the layers of a graph stay what they are; make a new Graph")
        if INPUT in layers:
            raise ConfigurationError(f"a layer of a graph can't be called {INPUT!r}: that is the graph's input")
        known = [INPUT]
        for name in self.inputs:
            if name not in layers:
                raise ConfigurationError(f"inputs: there is no layer {name!r}; there are: {', '.join(layers)}")
        for name in layers:
            for other in self.inputs.get(name, ()):
                if other not in known:
                    raise ConfigurationError(
                        f"inputs of layer {name!r}: {other!r} is none of what is before it: {', '.join(known)}"
                    )
            known.append(name)
        super()._become(layers, values)

    def __repr__(self) -> str:
        reads = ", ".join(f"{name} reads {' and '.join(read)}" for name, read in self.inputs.items() if read)
        return super().__repr__().replace("Chain of", "Graph of", 1) + (f"\n  {reads}" if reads else "")


def _names_of(layer: str, read: object) -> tuple[str, ...]:
    names = tuple(read) if isinstance(read, Iterable) and not isinstance(read, str) else (read,)
    if isinstance(read, str) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"inputs of layer {layer!r}: expected a list of names, actual {read!r}")
    return names
