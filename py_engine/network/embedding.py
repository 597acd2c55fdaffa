"""Layers for token ids: the lookup of their vectors, and the order of axes that a convolution wants."""

from __future__ import annotations

from types import MappingProxyType

from py_engine.ad import ops
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError
from py_engine.network.initialisers import InitialiserLike, ParameterSpec
from py_engine.network.layers import Layer, Shape, Tensors


class Embedding(Layer, op="embedding"):
    """A vector for every token id: (...) of integers from 0 to vocabulary - 1 becomes (..., dimension).

    Parameter: `weight` (vocabulary, dimension). A layer of your own that holds one, and hands it its samples, says
    ``takes_ids = True``.

    Args:
        vocabulary: number of ids.
        dimension: length of the vectors.
        padding_index: an id whose vector is looked up like the others and gets no gradient, or None.
        trainable: whether the vectors are trained at all.
        weight_init: initial values.
        name: the layer's id in a chain.
    """

    takes_ids = True

    def __init__(
        self,
        vocabulary: int,
        dimension: int,
        padding_index: int | None = None,
        trainable: bool = True,
        weight_init: InitialiserLike = MappingProxyType({"name": "normal", "std": 0.1}),
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.vocabulary = self._whole_number("vocabulary", vocabulary)
        self.dimension = self._whole_number("dimension", dimension)
        if padding_index is not None and not (is_whole(padding_index, 0) and padding_index < self.vocabulary):
            raise ConfigurationError(
                f"Embedding: padding_index must be None or an id from 0 to {self.vocabulary - 1}, "
                f"actual {padding_index!r}"
            )
        self.padding_index = padding_index
        self.trainable = bool(trainable)
        self.weight_init = self._initialiser("weight_init", weight_init)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`weight`."""
        shape = (self.vocabulary, self.dimension)
        return {"weight": ParameterSpec(shape, self.weight_init, *shape, trainable=self.trainable)}

    def output_shape(self, input_shape: Shape) -> Shape:
        """(...) to (..., dimension)."""
        return (*input_shape, self.dimension)

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """The rows of these ids."""
        padding = -1 if self.padding_index is None else self.padding_index
        return ops.embedding(parameters["weight"], x, padding)


class PermuteDims(Layer, op="permute_dims"):
    """The axes of each sample in another order: ``PermuteDims(1, 0)`` makes (T, features) (features, T).

    Axes are counted from 0, the batch not among them.
    """

    only_moves = True

    def __init__(self, *axes: int, name: str | None = None) -> None:
        super().__init__(name)
        if not axes or not all(map(is_whole, axes)) or sorted(axes) != list(range(len(axes))):
            raise ConfigurationError(
                f"PermuteDims: expected each of the axes 0, 1, ... of a sample once, actual {axes!r}"
            )
        self.axes = axes

    def output_shape(self, input_shape: Shape) -> Shape:
        """Output axis k is input axis ``axes[k]``."""
        if len(input_shape) != len(self.axes):
            raise self.reject(f"{len(self.axes)} axes", input_shape)
        return tuple(input_shape[axis] for axis in self.axes)

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """A view."""
        return ops.transpose(x, (0, *(axis + 1 for axis in self.axes)))
