"""Flux, in this process's Julia: flux.jl, called as the Julia engine is, from the same weights and the same batches.

What it needs is a Julia with Flux 0.13.9 or later in its environment; see `bridge.libjulia.packages`. It is
tested against a stand-in, and against Flux where Julia has it: see tests/bridge/test_julia_packages.py.
"""

from __future__ import annotations

from pathlib import Path

from bridge.adapters.julia_package import PackageSession

__all__ = ["FluxSession"]


class FluxSession(PackageSession):
    """A `Session` of Flux for the layers and optimizers that its versions have alike."""

    _source = Path(__file__).with_name("flux.jl")
    _module = "TwinGradFlux"
