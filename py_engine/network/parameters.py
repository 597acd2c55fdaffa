"""All parameters of a model as one flat vector with a named view per tensor.

One vector makes the optimizer one loop, a checkpoint one array, a reduction over threads one addition, and
gives the bridge one pointer. A gradient vector has the same layout, so the two can be combined without
looking at names. What is not trained (frozen weights, running statistics) lies behind the vector in the same
memory, out of the optimizer's sight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from py_engine.ad.memory import aligned_zeros
from py_engine.ad.state import inside_transform
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, ParameterError, TraceError

ALIGNMENT = 16
"""Every tensor starts at a multiple of this many elements: 64 bytes, a cache line, for float32."""


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in a flat vector of `size` elements; what lies between them is padding."""

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Lay the tensors out one after the other in the order of `shapes`, each aligned."""
        offsets = {}
        end = 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        return cls(MappingProxyType(dict(shapes)), MappingProxyType(offsets), end)

    def views(self, vector: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The named tensors as views into `vector`."""
        return {
            name: vector[self.offsets[name] : self.offsets[name] + math.prod(shape)].reshape(shape)
            for name, shape in self.shapes.items()
        }


class FlatVector:
    """A vector of zeros in a given layout, with `arrays`, the named views into it.

    The padding starts as zeros and stays so: nothing that works on the whole vector (a sum, a norm, an
    optimizer step) need know of it.
    """

    def __init__(self, layout: Layout, dtype: DTypeLike) -> None:
        self.layout = layout
        self.vector = aligned_zeros(layout.size * np.dtype(dtype).itemsize).view(dtype)
        self.arrays = layout.views(self.vector)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatVector:
        copied = memo[id(self)] = self.zeros_like()
        copied.vector[...] = self.vector
        return copied

    def zeros_like(self) -> FlatVector:
        """A new vector of zeros in the same layout and dtype, such as a gradient."""
        return FlatVector(self.layout, self.vector.dtype)

    def as_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of all tensors by name."""
        return {name: array.copy() for name, array in self.arrays.items()}


class Parameters(FlatVector):
    """The named parameters of a model: `vector` holds the trainable ones, `tensors` maps each name to a `Tensor` view.

    Writing into `vector`, into ``arrays[name]`` or into ``tensors[name].data`` is the same thing.

    Args:
        shapes: by name, in the model's order.
        dtype: float32 or float64.
        frozen: names of those that are not trained. `arrays` and `tensors` hold them in their places between the
            others; `memory` is the vector with them behind it, in the same order and alignment.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: DTypeLike = np.float32, frozen: Collection[str] = ()
    ) -> None:
        if np.dtype(dtype) not in (np.float32, np.float64):
            raise ConfigurationError(f"parameters are float32 or float64, actual {np.dtype(dtype)}")
        self.layout = Layout.of({name: shape for name, shape in shapes.items() if name not in frozen})
        rest = Layout.of({name: shape for name, shape in shapes.items() if name in frozen})
        self.memory = aligned_zeros((self.layout.size + rest.size) * np.dtype(dtype).itemsize).view(dtype)
        self.vector = self.memory[: self.layout.size]
        views = self.layout.views(self.vector) | rest.views(self.memory[self.layout.size :])
        self.arrays = {name: views[name] for name in shapes}
        self.tensors: Mapping[str, Tensor] = MappingProxyType(
            {name: Tensor(a, requires_grad=name not in frozen, name=name) for name, a in self.arrays.items()}
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        if inside_transform():
            raise TraceError(
                "the parameters of a model are copied inside a function that is differentiated or traced, where the "
                "copy would be cut off from them; copy them, or the chain, before"
            )
        shapes = {name: array.shape for name, array in self.arrays.items()}
        found = Parameters(shapes, self.dtype, [name for name in shapes if name not in self.layout.shapes])
        found.memory[...] = self.memory
        for name, x in self.tensors.items():
            found.tensors[name].requires_grad = x.requires_grad
            found.tensors[name].grad = None if x.grad is None else x.grad.copy()
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "parameters are not pickled; save their arrays, for example np.savez(file, **chain.parameters.as_dict())"
        )

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of those that are trained, in the order of the vector."""
        return tuple(self.layout.shapes)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the model's order."""
        return tuple(self.arrays)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        return self.vector.dtype

    @property
    def count(self) -> int:
        """Number of parameters, without the padding of the vector."""
        return sum(array.size for array in self.arrays.values())

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ParameterError(f"no parameter {name!r}; there are: {', '.join(self.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        lines = [f"  {name} {array.shape}" for name, array in self.arrays.items()]
        return "\n".join([f"Parameters({self.count:,} {self.dtype} in {len(self)} tensors", *lines, ")"])

    def load(self, values: Mapping[str, ArrayLike]) -> None:
        """Copy `values` in, rounding to this dtype.

        Raises `ParameterError`, and changes nothing, unless `values` has exactly these names and shapes.
        """
        missing = [name for name in self.arrays if name not in values]
        extra = [name for name in values if name not in self.arrays]
        if missing or extra:
            raise ParameterError(
                "; ".join(
                    ["parameters don't match the model"]
                    + ([f"missing: {', '.join(missing)}"] if missing else [])
                    + ([f"not in the model: {', '.join(extra)}"] if extra else [])
                    + [f"the model has: {', '.join(self.names)}"]
                )
            )
        arrays = {name: self._checked(name, values[name]) for name in self.arrays}
        # Of these parameters' own memory, such as two tensors that change places, all is read before any is written.
        arrays = {name: a.copy() if np.may_share_memory(a, self.memory) else a for name, a in arrays.items()}
        for name, array in arrays.items():
            self.arrays[name][...] = array

    def put(self, name: str, value: ArrayLike) -> None:
        """Copy the values of one tensor in. Raises `ParameterError`, and changes nothing, if their shape is another."""
        self.arrays[name][...] = self._checked(name, value)

    def _checked(self, name: str, value: ArrayLike) -> NDArray[Any]:
        array, expected = np.asarray(value), self.arrays[name].shape
        if array.shape != expected:
            raise ParameterError(f"parameter {name}: expected shape {expected}, actual {array.shape}")
        if array.dtype.kind not in "fiu":
            raise ParameterError(f"parameter {name}: expected real numbers, actual dtype {array.dtype}")
        return array
