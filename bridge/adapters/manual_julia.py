"""The hand-written networks of `bridge.adapters.manual` in Julia: manual.jl, called as the Julia engine is.

Nothing of the model reaches Julia but its sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bridge.adapters.julia import Entries, JuliaSession, load_engine, pointers
from bridge.adapters.manual_kinds import check
from bridge.checks import check_losses
from bridge.engine import Optimizer
from bridge.errors import SpecError
from bridge.julia.interface import Runtime, literal
from bridge.spec import Conv2D, Embedding, MaxPool1D, MaxPool2D, ModelSpec
from py_engine.network.parameters import Layout

__all__ = ["ManualJuliaSession"]

Array = NDArray[Any]

_SOURCE = Path(__file__).with_name("manual.jl")
_NAME = "manual-julia"
_KINDS = ("rnn", "image-cnn", "text-cnn")
"""In the order of manual.jl."""
_OWN = ("create", "train", "evaluate", "predict", "gradients", "free")

_loaded: Entries | None = None


def _load(threads: int) -> tuple[Runtime, Entries]:
    """The engine's runtime, and the entry points of manual.jl with the engine's own for messages and counters."""
    global _loaded
    here, engine = load_engine(threads)
    if _loaded is None:
        here.evaluate(f"Base.include(Main, {literal(_SOURCE)}); nothing")
        own = pointers(here, "TwinGradManual", _OWN)
        _loaded = Entries(**own, message=engine.message, allocated=engine.allocated)
    return here, _loaded


def _describe(
    spec: ModelSpec,
    optimizer: Optimizer,
    batch_size: int,
    dtype: np.dtype[Any],
    threads: int,
    techniques: Mapping[str, Any] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What `create` of manual.jl reads; `techniques` is always None, since there are none to switch."""
    kind = check(spec, optimizer, _NAME).name
    shapes = [parameter.shape for parameter in spec.parameters().values()]
    integers, floats = [_KINDS.index(kind) + 1, 8 * dtype.itemsize, batch_size, threads], [optimizer.learning_rate]
    if kind == "rnn":
        (features, units), classes = shapes[0], shapes[-1][0]
        integers += [math.prod(spec.input.sample) // features, features, units, classes]
    elif kind == "image-cnn":
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


def _check(spec: ModelSpec, optimizer: Optimizer) -> None:
    """See `bridge.adapters.manual_kinds.check`; of images there is one size of kernel and of window."""
    if check(spec, optimizer, _NAME).name != "image-cnn":
        return
    found = [list(layer.geometry.size) for layer in spec.layers if isinstance(layer, Conv2D | MaxPool2D)]
    if found != [[3, 3], [2, 2]]:
        raise SpecError(
            f'the model "{spec.name}"',
            [
                f"the engine {_NAME} is written by hand for a kernel of [3, 3] and a window of [2, 2], found "
                f"{found[0]} and {found[1]}: use another engine"
            ],
        )


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """One tensor after the other, with nothing between: manual.jl takes several of them for one matrix."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    starts = itertools.accumulate(sizes, initial=0)
    return Layout(shapes, dict(zip(shapes, starts, strict=False)), sum(sizes))


class ManualJuliaSession(JuliaSession):
    """A `Session` for the networks of `bridge.adapters.manual_kinds`.

    After an epoch with a loss that is not finite the parameters are those that it led to, as in `ManualSession`.
    """

    _load = staticmethod(_load)
    _describe = staticmethod(_describe)
    _layout = staticmethod(_layout)

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Array],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        threads: int = 1,
    ) -> None:
        _check(spec, optimizer)
        super().__init__(spec, params, optimizer, batch_size, dtype, threads)
        self._steps = 0

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        losses = super().train_epoch(x, y, order)
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses
