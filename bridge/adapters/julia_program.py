"""A Julia file beside an adapter, with the engine's entry points: what the engines written in such files share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bridge.adapters.julia import EntrySession
from bridge.checks import check_losses
from bridge.libjulia.engine import SIGNATURES, Entries, load_engine, pointers
from bridge.libjulia.runtime import Runtime, literal
from py_engine.network.parameters import Layout

__all__ = ["ProgramSession"]

Array = NDArray[Any]

_OWN = ("create", "train", "evaluate", "predict", "gradients", "free")

_included: dict[str, Entries] = {}
"""The entry points of the modules that have been included, by name."""


class ProgramSession(EntrySession):
    """A `Session` of a Julia file that offers what the Julia engine's entry points do, but for messages and counters.

    After an epoch with a loss that is not finite the parameters are those that it led to.
    """

    _source: ClassVar[Path]
    _module: ClassVar[str]
    """What the file defines."""

    _steps = 0

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
