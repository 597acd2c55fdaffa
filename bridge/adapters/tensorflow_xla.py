"""TensorFlow with its graphs compiled by XLA (`jit_compile=True`); all else is as in `bridge.adapters.tensorflow`.

Compiled once for each batch size, a last partial batch being a second one, in the first epoch.
"""

from __future__ import annotations

from typing import ClassVar

from bridge.adapters.tensorflow import TensorFlowSession

__all__ = ["TensorFlowXLASession"]


class TensorFlowXLASession(TensorFlowSession):
    """A `Session` of graphs that XLA has compiled."""

    jit_compile: ClassVar[bool] = True
