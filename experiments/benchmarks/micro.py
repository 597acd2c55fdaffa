"""The micro-benchmarks of both engines: the gradient of each small function, eager and compiled."""

from __future__ import annotations

from typing import Any

from .engines import imports

SYSTEMS = ("numpy-eager", "numpy-compiled", "julia-eager", "julia-compiled")
FUNCTIONS = ("sincos", "loop", "logsumexp", "logistic", "mlp")
SECONDS, SAMPLES = 0.005, 9
"""Of a sample, and how many there are; their median counts."""


class Gradient:
    """Nanoseconds of a gradient, taken as `twingrad microbench` takes them; the systems' programs start only once."""

    params = (SYSTEMS, FUNCTIONS)
    param_names = ("system", "function")
    unit = "ns"

    def setup_cache(self) -> dict[str, float]:
        """Measure everything that this commit and this machine have: time by "system function"."""
        found: dict[str, float] = {}
        try:
            with imports():
                from experiments.microbenchmarks import functions, process, registry
        except NotImplementedError:
            return found
        for system in SYSTEMS:
            if not registry.get(system).found().ok:
                continue
            program = process.start(registry.get(system), 1)
            try:
                for name in FUNCTIONS:
                    program.prepare(functions.benchmark(name), functions.SMALL[name])
                    found[f"{system} {name}"] = sorted(program.measure("gradient", SECONDS, SAMPLES))[SAMPLES // 2]
            finally:
                program.close()
        return found

    setup_cache.timeout = 600  # type: ignore[attr-defined]

    def setup(self, times: dict[str, float], system: str, function: str) -> None:
        """Raise `NotImplementedError` where there is nothing to show."""
        if f"{system} {function}" not in times:
            raise NotImplementedError(f"{system} is not there")

    def track_gradient(self, times: dict[str, float], system: str, function: str) -> Any:
        """The median of the samples."""
        return times[f"{system} {function}"]
