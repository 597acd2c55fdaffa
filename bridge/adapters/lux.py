"""Lux, in this process's Julia: lux.jl, called as the Julia engine is, from the same weights and the same batches.

What it needs is a Julia with Lux 1, Optimisers and Zygote in its environment; see `bridge.libjulia.packages`. It is
tested against stand-ins, and against these packages where Julia has them: see tests/bridge/test_julia_packages.py.
"""

from __future__ import annotations

from pathlib import Path

from bridge.adapters.julia_package import PackageSession

__all__ = ["LuxSession"]


class LuxSession(PackageSession):
    """A `Session` of Lux."""

    _source = Path(__file__).with_name("lux.jl")
    _module = "TwinGradLux"
