"""Lux, in this process's Julia: lux.jl, called as the Julia engine is, from the same weights and the same batches.

What it needs is a Julia with Lux 1, Optimisers and Zygote in its environment; see `bridge.julia.packages`. It was
written to the documentation of these packages and is tested against stand-ins: see tests/bridge/test_julia_packages.py.
"""

from __future__ import annotations

from pathlib import Path

from bridge.adapters import julia_package
from bridge.adapters.julia_program import ProgramSession
from bridge.engine import Optimizer
from bridge.spec import ModelSpec

__all__ = ["LuxSession"]


def check(spec: ModelSpec, optimizer: Optimizer) -> None:
    """See `julia_package.check`."""
    julia_package.check(spec, optimizer, "lux")


class LuxSession(ProgramSession):
    """A `Session` of Lux."""

    _source = Path(__file__).with_name("lux.jl")
    _module = "TwinGradLux"
    _describe = staticmethod(julia_package.describing(check))
