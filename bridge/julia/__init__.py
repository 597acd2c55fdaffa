"""Julia from Python: found or installed, proved, and started in this process.

    from bridge import julia

    model = julia.build("model.toml", threads=2)
    losses = model.train_epoch(x, y, order)

`build` makes a session of the Julia engine; `runtime` starts Julia itself, through juliacall or by embedding libjulia;
`find` and `install` see to a Julia that works.
"""

from __future__ import annotations

from bridge.errors import JuliaError, JuliaUnavailableError
from bridge.julia.interface import Info, Runtime
from bridge.julia.model import build
from bridge.julia.start import Status, Verdict, runtime, status

__all__ = ["Info", "JuliaError", "JuliaUnavailableError", "Runtime", "Status", "Verdict", "build", "runtime", "status"]
