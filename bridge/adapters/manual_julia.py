"""The hand-written networks of `bridge.adapters.manual` in Julia: manual.jl, called as the Julia engine is.

Nothing of the model reaches Julia but its sizes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from bridge.adapters import julia
from bridge.adapters.julia_program import ProgramSession
from bridge.adapters.manual_kinds import check
from bridge.errors import SpecError
from bridge.session import Optimizer
from bridge.spec import Conv2D, Embedding, MaxPool1D, MaxPool2D, ModelSpec

__all__ = ["ManualJuliaSession"]

_NAME = "manual-julia"


def _describe(spec: ModelSpec, optimizer: Optimizer, batch_size: int, dtype: np.dtype[Any], threads: int) -> bytes:
    """What `create` of manual.jl reads.

    Raises for what manual.jl cannot do: see `bridge.adapters.manual_kinds.check`; and of images there is one size of
    kernel and of window.
    """
    kind = check(spec, optimizer, _NAME).name
    shapes = [parameter.shape for parameter in spec.parameters().values()]
    settings: dict[str, Any] = {"kind": kind, "dtype": dtype.name, "batch_size": batch_size, "threads": threads}
    settings["learning_rate"] = float(optimizer.learning_rate)
    if kind == "rnn":
        (features, units), classes = shapes[0], shapes[-1][0]
        times = math.prod(spec.input.sample) // features
        settings |= {"times": times, "features": features, "units": units, "classes": classes}
    elif kind == "image-cnn":
        _check_geometry(spec)
        _, height, width = spec.shapes()[0].output
        hidden, classes = shapes[2]
        settings |= {"height": height, "width": width, "filters": shapes[0][0], "hidden": hidden, "classes": classes}
    else:
        embedding, (filters, _, kernel), pool = spec.layers[0], shapes[1], spec.layers[4]
        assert isinstance(embedding, Embedding)
        assert isinstance(pool, MaxPool1D)
        settings |= {"length": math.prod(spec.input.sample), "filters": filters, "kernel": kernel}
        settings |= {"vocabulary": embedding.vocabulary, "dimension": embedding.dimension, "window": pool.window}
        settings |= {"padding": embedding.padding_index, "trained": embedding.trainable}
        settings |= {"betas": optimizer.betas, "eps": float(optimizer.eps)}
    return julia.line("network", settings)


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
