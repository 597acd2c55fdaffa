"""Where a framework computes with channels last: the transpositions that a spec's network needs there, and no more.

In a spec channels are the first axis of a sample; TensorFlow's and XLA's convolutions and pools on CPUs want them last.
Data stays as those leave it until a layer asks for something else. So a permutation of axes may cost nothing, and
neither does flattening images in front of a dense layer: that layer's rows are kept in the order of what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.layers import Convolution, Dense, Flatten, Layer, PermuteDims
from bridge.spec import ModelSpec

__all__ = ["Layout", "Placed", "channels_last", "layouts"]

Array = NDArray[Any]

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """A layer, and how its input lies in memory."""

    layer: Layer | None
    """None: only the transposition is left to do."""
    sources: tuple[tuple[int, Axes | None], ...]
    """Which values it reads, by the numbers of their layers (-1: the input), and for each the order in which to take
    the axes of a sample, unless they lie right."""
    rows: NDArray[np.int64] | None = None
    """For a dense layer whose features come in another order: which rows of its weight these are."""


def channels_last(spec: ModelSpec) -> list[Placed]:
    """The layers of a network in which convolutions, pools and batch norms get their channels last.

    Every layer finds its sample's axes in the order of the spec, but for these, and for those that treat all elements
    alike. An embedding adds its axis at the end, a permutation has nothing to do.
    """
    placed: list[Placed] = []
    made: list[Axes] = [tuple(range(len(spec.input.sample)))]
    """Which axis of a sample, by the spec's count, each axis in memory is: of the input, and of each layer's result."""
    rows: NDArray[np.int64] | None = None
    layers = zip(spec.layers, spec.shapes(), spec.sources(), strict=True)
    for index, (layer, shape, sources) in enumerate(layers):
        in_order = tuple(range(len(shape.input)))
        stored = made[sources[0] + 1]
        as_it_lies = tuple((place, None) for place in sources)
        if isinstance(layer, PermuteDims):
            placed.append(Placed(layer, as_it_lies))
            stored = tuple(layer.axes.index(axis) for axis in stored)
        elif (
            isinstance(layer, Flatten)
            and stored != in_order
            and spec.is_chain
            and _next_is_dense(spec.layers[index + 1 :])
        ):
            placed.append(Placed(layer, as_it_lies))
            rows = np.arange(math.prod(shape.input)).reshape(shape.input).transpose(stored).ravel()
            stored = (0,)
        else:
            wanted = stored if layer.elementwise else in_order
            if layer.channels_last:
                wanted = (*in_order[1:], 0)
            moved = tuple((place, _move(made[place + 1], wanted)) for place in sources)
            placed.append(Placed(layer, moved, rows if layer.op == "dense" else None))
            rows = None if layer.op == "dense" else rows
            stored = wanted if len(shape.output) == len(wanted) else tuple(range(len(shape.output)))
        made.append(stored)
    last = _move(made[-1], tuple(range(len(made[-1]))))
    return placed if last is None else [*placed, Placed(None, ((len(placed) - 1, last),))]


def _move(stored: Axes, wanted: Axes) -> Axes | None:
    return None if stored == wanted else tuple(stored.index(axis) for axis in wanted)


def _next_is_dense(layers: Sequence[Layer]) -> bool:
    return next((isinstance(layer, Dense) for layer in layers if not layer.elementwise), False)


class Layout:
    """A parameter in the layout of the spec, and as such a framework has it: kernels (…, channels, filters)."""

    def __init__(self, is_kernel: bool = False, rows: NDArray[np.int64] | None = None) -> None:
        self._is_kernel = is_kernel
        self._rows = rows

    def stored(self, array: Array) -> Array:
        """As the framework has it, perhaps as a view."""
        if self._is_kernel:
            array = np.moveaxis(array, (0, 1), (-1, -2))
        return array if self._rows is None else array[self._rows]

    def shown(self, array: Array) -> Array:
        """In the layout of the spec, as a copy."""
        if self._is_kernel:
            return np.array(np.moveaxis(array, (-1, -2), (0, 1)), order="C")
        made = np.empty_like(array)
        made[... if self._rows is None else self._rows] = array
        return made


def layouts(spec: ModelSpec, placed: Sequence[Placed]) -> dict[str, Layout]:
    """The layout of every parameter, by its full name."""
    found = {name: Layout() for name in spec.parameters()}
    for here in placed:
        if isinstance(here.layer, Convolution | Dense):
            found[f"{here.layer.id}.weight"] = Layout(isinstance(here.layer, Convolution), here.rows)
    return found
