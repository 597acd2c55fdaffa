"""Flux, in this process's Julia: flux.jl, called as the Julia engine is, from the same weights and the same batches.

What it needs is a Julia with Flux 0.13.9 or later in its environment; see `bridge.julia.packages`. It was written to
that package's documentation and is tested against a stand-in: see tests/bridge/test_julia_packages.py.
"""

from __future__ import annotations

from pathlib import Path

from bridge.adapters import julia_package
from bridge.adapters.julia_program import ProgramSession
from bridge.engine import Optimizer
from bridge.spec import ModelSpec

__all__ = ["FluxSession"]


def check(spec: ModelSpec, optimizer: Optimizer) -> None:
    """See `julia_package.check`."""
    julia_package.check(spec, optimizer, "flux")


class FluxSession(ProgramSession):
    """A `Session` of Flux for the layers and optimizers that its versions have alike."""

    _source = Path(__file__).with_name("flux.jl")
    _module = "TwinGradFlux"
    _describe = staticmethod(julia_package.describing(check))
