"""What the engines made of a Julia package (flux.jl, lux.jl, simplechains.jl) have in common: see julia_package.jl."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from bridge.adapters import julia
from bridge.adapters.julia_program import ProgramSession
from bridge.checks import check_chain
from bridge.errors import SpecError
from bridge.layers import RBF, BatchNorm, LayerNorm
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from py_engine.errors import ConfigurationError

__all__ = ["PackageSession", "check", "check_loss", "check_optimizer", "refusal"]


def check(spec: ModelSpec, optimizer: Optimizer, engine: str) -> None:
    """Raise for what Flux and Lux, or one of their versions, compute otherwise than the spec says."""
    check_chain(spec, engine)
    for index, layer in enumerate(spec.layers):
        if layer.since > 2 or isinstance(layer, RBF | BatchNorm | LayerNorm):
            raise refusal(spec, index, f"the engine {engine} has no {layer.op}")
        for key, what, opset in layer.needs:
            if key in ("activation", "dilation", "ceil_mode", "count_padding") and opset > 2:
                raise refusal(spec, index, f"the engine {engine} has no {what}")
    check_loss(spec, engine)
    check_optimizer(optimizer, engine, ("sgd", "rmsprop", "adam"))


def check_loss(spec: ModelSpec, engine: str) -> None:
    """Raise `SpecError` for the settings of a loss, which these engines have not."""
    for key in spec.loss.settings():
        raise SpecError(f'the model "{spec.name}"', [f"loss.{key}: the engine {engine} has no {key} of a loss"])


def check_optimizer(optimizer: Optimizer, engine: str, names: Collection[str]) -> None:
    """Raise for an optimizer of another name, for weight decay, a largest norm, and for RMSProp with momentum."""
    name = optimizer.name
    more = optimizer.weight_decay or optimizer.clip_norm or (name == "rmsprop" and optimizer.momentum)
    if name in names and not more:
        return
    known = ", ".join(f"{one} without momentum" if one == "rmsprop" else one for one in names)
    raise ConfigurationError(
        f"{name}: the engine {engine} has {known}, without weight_decay and clip_norm, found {optimizer.settings()}"
    )


def refusal(spec: ModelSpec, index: int, problem: str) -> SpecError:
    """The error for a layer that an engine cannot have."""
    return SpecError(f'the model "{spec.name}"', [f'layers[{index}] (id "{spec.layers[index].id}"): {problem}'])


class PackageSession(ProgramSession):
    """A `Session` of the engine that has its name from its Julia file."""

    _accept = staticmethod(check)
    """Raises for what the engine cannot do."""

    @classmethod
    def _describe(
        cls, spec: ModelSpec, optimizer: Optimizer, batch_size: int, dtype: np.dtype[Any], threads: int
    ) -> bytes:
        """A session as the Julia engine reads it, which julia_package.jl asks to do so."""
        cls._accept(spec, optimizer, cls._source.stem)
        return julia.describe(spec, optimizer, batch_size, dtype, threads)
