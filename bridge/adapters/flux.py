"""Flux, in this process's Julia: flux.jl, called as the Julia engine is, from the same weights and the same batches.

What it needs is a Julia with Flux 0.13.9 or later in its environment; see `bridge.julia.packages`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bridge.adapters import julia
from bridge.adapters.julia import Entries, JuliaSession, load_engine, pointers
from bridge.checks import check_losses
from bridge.engine import Optimizer
from bridge.errors import SpecError
from bridge.julia.interface import Runtime, literal
from bridge.spec import RBF, BatchNorm, LayerNorm, ModelSpec
from py_engine.errors import ConfigurationError
from py_engine.network.parameters import Layout

__all__ = ["FluxSession"]

Array = NDArray[Any]

_SOURCE = Path(__file__).with_name("flux.jl")
_OWN = ("create", "train", "evaluate", "predict", "gradients", "free")

_loaded: Entries | None = None


def check(spec: ModelSpec, optimizer: Optimizer) -> None:
    """Raise for what Flux, in one of the versions that flux.jl is for, computes otherwise than the spec says."""
    for index, layer in enumerate(spec.layers):
        if isinstance(layer, RBF | BatchNorm | LayerNorm):
            raise SpecError(
                f'the model "{spec.name}"', [f'layers[{index}] (id "{layer.id}"): the engine flux has no {layer.op}']
            )
    name = optimizer.name
    if name == "adamw" or optimizer.weight_decay or optimizer.clip_norm or (name == "rmsprop" and optimizer.momentum):
        raise ConfigurationError(
            f"{name}: the engine flux has sgd, rmsprop without momentum, and adam, without weight_decay and clip_norm, "
            f"found {optimizer.settings()}"
        )


def _load(threads: int) -> tuple[Runtime, Entries]:
    """The engine's runtime, and the entry points of flux.jl with the engine's own for messages and counters."""
    global _loaded
    here, engine = load_engine(threads)
    if _loaded is None:
        here.evaluate(f"Base.include(Main, {literal(_SOURCE)}); nothing")
        own = pointers(here, "TwinGradFlux", _OWN)
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
    """What `create` of flux.jl reads; `techniques` are those of our own engine, of which Flux has none."""
    integers, floats = julia.describe(spec, optimizer, batch_size, dtype, threads)
    trained = sum(math.prod(p.shape) for p in spec.parameters().values() if p.trainable)
    sizes = [*(shape.input for shape in spec.shapes()), spec.output]
    first = [8 * dtype.itemsize, trained, len(sizes), *itertools.chain(*((len(size), *size) for size in sizes))]
    return np.concatenate([np.array(first, np.int64), integers]), floats


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """One tensor after the other, with nothing between."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    starts = itertools.accumulate(sizes, initial=0)
    return Layout(shapes, dict(zip(shapes, starts, strict=False)), sum(sizes))


class FluxSession(JuliaSession):
    """A `Session` of Flux for the layers and optimizers that its versions have alike.

    After an epoch with a loss that is not finite the parameters are those that it led to.
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
        check(spec, optimizer)
        super().__init__(spec, params, optimizer, batch_size, dtype, threads)
        self._steps = 0

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        losses = super().train_epoch(x, y, order)
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses
