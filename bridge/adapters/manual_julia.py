"""The hand-written networks of `bridge.adapters.manual` in Julia: manual.jl, called as the Julia engine is.

Nothing of the model reaches Julia but its sizes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.adapters.julia_program import ProgramSession
from bridge.adapters.manual_kinds import check
from bridge.engine import Optimizer
from bridge.errors import SpecError
from bridge.spec import Conv2D, Embedding, MaxPool1D, MaxPool2D, ModelSpec

__all__ = ["ManualJuliaSession"]

_NAME = "manual-julia"
_KINDS = ("rnn", "image-cnn", "text-cnn")
"""In the order of manual.jl."""


def _describe(
    spec: ModelSpec, optimizer: Optimizer, batch_size: int, dtype: np.dtype[Any], threads: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What `create` of manual.jl reads.

    Raises for what manual.jl cannot do: see `bridge.adapters.manual_kinds.check`; and of images there is one size of
    kernel and of window.
    """
    kind = check(spec, optimizer, _NAME).name
    shapes = [parameter.shape for parameter in spec.parameters().values()]
    integers, floats = [_KINDS.index(kind) + 1, 8 * dtype.itemsize, batch_size, threads], [optimizer.learning_rate]
    if kind == "rnn":
        (features, units), classes = shapes[0], shapes[-1][0]
        integers += [math.prod(spec.input.sample) // features, features, units, classes]
    elif kind == "image-cnn":
        _check_geometry(spec)
        _, height, width = spec.shapes()[0].output
        integers += [height, width, shapes[0][0], *shapes[2]]
    else:
        embedding, conv, pool = spec.layers[0], shapes[1], spec.layers[4]
        assert isinstance(embedding, Embedding)
        assert isinstance(pool, MaxPool1D)
        integers += [math.prod(spec.input.sample), *shapes[0], conv[0], conv[2], pool.window]
        integers += [embedding.padding_index, int(embedding.trainable)]
        floats += [*optimizer.betas, optimizer.eps]
    return np.array(integers, np.int64), np.array(floats)


def _check_geometry(spec: ModelSpec) -> None:
    found = [list(layer.geometry.size) for layer in spec.layers if isinstance(layer, Conv2D | MaxPool2D)]
    if found != [[3, 3], [2, 2]]:
        raise SpecError(
            f'the model "{spec.name}"',
            [
                f"the engine {_NAME} is written by hand for a kernel of [3, 3] and a window of [2, 2], found "
                f"{found[0]} and {found[1]}: use another engine"
            ],
        )


class ManualJuliaSession(ProgramSession):
    """A `Session` for the networks of `bridge.adapters.manual_kinds`."""

    _source = Path(__file__).with_name("manual.jl")
    _module = "TwinGradManual"
    _describe = staticmethod(_describe)
