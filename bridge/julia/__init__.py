"""Julia from Python: found or installed, proved, and started in this process.

    from bridge import julia

    model = julia.build("model.toml", threads=2)
    losses = model.train_epoch(x, y, order)

    energy = julia.function("(w, x) -> sum(abs2, tanh.(w * x))")
    py_engine.grad(energy)(w, x)

`build` makes a session of the Julia engine, `function` an op of a programmer's own Julia code; `runtime` starts
Julia itself, through juliacall or by embedding libjulia; `status` says which Julia was found on this machine, and
`python -m bridge.julia.install` finds or installs one.
"""

from __future__ import annotations

from bridge.errors import JuliaError, JuliaUnavailableError
from bridge.julia.function import JuliaFunction, function, function_file
from bridge.julia.model import build
from bridge.julia.torch_function import torch_function
from bridge.libjulia.runtime import Info, Runtime
from bridge.libjulia.start import Status, Verdict, runtime, status

__all__ = [
    "Info",
    "JuliaError",
    "JuliaFunction",
    "JuliaUnavailableError",
    "Runtime",
    "Status",
    "Verdict",
    "build",
    "function",
    "function_file",
    "runtime",
    "status",
    "torch_function",
]
