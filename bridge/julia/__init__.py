"""Julia from Python: found or installed, proved, and started in this process.

    from bridge import julia

    here = julia.runtime(threads=2)
    print(here.info())

`find` and `install` see to a Julia that works; `runtime` starts it, through juliacall or by embedding libjulia.
"""

from __future__ import annotations

from bridge.errors import JuliaError, JuliaUnavailableError
from bridge.julia.interface import Info, Runtime
from bridge.julia.start import Status, Verdict, runtime, status

__all__ = ["Info", "JuliaError", "JuliaUnavailableError", "Runtime", "Status", "Verdict", "runtime", "status"]
