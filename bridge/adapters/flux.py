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
from numpy.typing import NDArray

from bridge.adapters import julia
from bridge.adapters.julia_program import ProgramSession
from bridge.engine import Optimizer
from bridge.errors import SpecError
from bridge.spec import RBF, BatchNorm, LayerNorm, ModelSpec
from py_engine.errors import ConfigurationError

__all__ = ["FluxSession"]


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


class FluxSession(ProgramSession):
    """A `Session` of Flux for the layers and optimizers that its versions have alike."""

    _source = Path(__file__).with_name("flux.jl")
    _module = "TwinGradFlux"
    _accept = staticmethod(check)
    _describe = staticmethod(_describe)
