"""What the engines made of a Julia package (flux.jl, lux.jl, simplechains.jl) have in common: see julia_package.jl.

Each is a Julia file beside its adapter, with the entry points of the Julia engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bridge.adapters import julia
from bridge.checks import check_chain, check_losses
from bridge.errors import SpecError
from bridge.layers import RBF, BatchNorm, LayerNorm
from bridge.libjulia.engine import SIGNATURES, Entries, load_engine, pointers
from bridge.libjulia.runtime import Runtime, literal
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from py_engine.errors import ConfigurationError
from py_engine.network.parameters import Layout

__all__ = ["PackageSession", "check", "check_loss", "check_optimizer", "refusal"]

Array = NDArray[Any]

_OWN = ("create", "train", "evaluate", "predict", "gradients", "free")

_included: dict[str, Entries] = {}
"""The entry points of the modules that have been included, by name."""


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


class PackageSession(julia.EntrySession):
    """A `Session` of the engine that has its name from its Julia file, which has neither messages nor counters.

    After an epoch with a loss that is not finite the parameters are those that it led to.
    """

    _accept = staticmethod(check)
    """Raises for what the engine cannot do."""

    _source: ClassVar[Path]
    _module: ClassVar[str]
    """What the file defines."""

    _steps = 0

    @classmethod
    def _describe(
        cls, spec: ModelSpec, optimizer: Optimizer, batch_size: int, dtype: np.dtype[Any], threads: int
    ) -> bytes:
        """A session as the Julia engine reads it, which julia_package.jl asks to do so."""
        cls._accept(spec, optimizer, cls._source.stem)
        return julia.describe(spec, optimizer, batch_size, dtype, threads)

    @classmethod
    def _load(cls, threads: int) -> tuple[Runtime, Entries]:
        here, engine = load_engine(threads)
        if cls._module not in _included:
            here.evaluate(f"Base.include(Main, {literal(cls._source)}); nothing")
            own = pointers(here, cls._module, {name: SIGNATURES[name] for name in _OWN})
            _included[cls._module] = Entries(**vars(engine) | own)
        return here, _included[cls._module]

    @staticmethod
    def _layout(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """One tensor after the other, with nothing between: a file may take several of them for one matrix."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        starts = itertools.accumulate(sizes, initial=0)
        return Layout(shapes, dict(zip(shapes, starts, strict=False)), sum(sizes))

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        losses = super().train_epoch(x, y, order)
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses
