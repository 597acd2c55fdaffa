"""The hand-written network of `bridge.adapters.manual` in Julia: manual.jl, called as the Julia engine is.

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
from bridge.julia.interface import Runtime, literal
from bridge.spec import ModelSpec
from py_engine.network.parameters import Layout

__all__ = ["ManualJuliaSession"]

Array = NDArray[Any]

_SOURCE = Path(__file__).with_name("manual.jl")
_NAME = "manual-julia"
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
    shapes = [parameter.shape for parameter in spec.parameters().values()]
    (features, units), classes = shapes[0], shapes[-1][0]
    times = math.prod(spec.input.sample) // features
    integers = [8 * dtype.itemsize, batch_size, threads, times, features, units, classes]
    return np.array(integers, np.int64), np.array([optimizer.learning_rate])


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """One tensor after the other, with nothing between: manual.jl takes several of them for one matrix."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    starts = itertools.accumulate(sizes, initial=0)
    return Layout(shapes, dict(zip(shapes, starts, strict=False)), sum(sizes))


class ManualJuliaSession(JuliaSession):
    """A `Session` for reshape, rnn (tanh, returns last), dense with softmax_cross_entropy and plain sgd.

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
        check(spec, optimizer, _NAME)
        super().__init__(spec, params, optimizer, batch_size, dtype, threads)
        self._steps = 0

    def train_epoch(self, x: Array, y: Array, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        losses = super().train_epoch(x, y, order)
        check_losses(losses, self._steps)
        self._steps += len(losses)
        return losses
