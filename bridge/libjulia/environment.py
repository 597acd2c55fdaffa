"""The environment that Julia starts in: its threads, and the kernels of its BLAS."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from bridge import files

__all__ = [
    "ENGINE",
    "cache_folder",
    "cpu_flags",
    "kernels_for",
    "settings",
    "temporarily",
]

ENGINE = Path(__file__).parents[2] / "julia_engine"
"""The folder of the Julia engine's sources."""

# What OpenBLAS's kernels need of a CPU, best first, and the later kernels that need the same and more. OpenBLAS knows
# the CPUs of its own time; on a newer one it may fall back to kernels twenty years old, at a quarter of the speed.
_KERNELS: tuple[tuple[str, frozenset[str], frozenset[str]], ...] = (
    (
        "SKYLAKEX",
        frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq"}),
        frozenset({"SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS"}),
    ),
    (
        "HASWELL",
        frozenset({"avx2", "fma"}),
        frozenset({"HASWELL", "ZEN", "EXCAVATOR", "SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS"}),
    ),
)


def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU, as Linux names them (empty elsewhere)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def kernels_for(chosen: str, flags: frozenset[str] | None = None) -> str | None:
    """The kernels to ask an OpenBLAS for, which by itself chose `chosen`; None: its own choice is as good."""
    available = cpu_flags() if flags is None else flags
    for name, needed, as_good in _KERNELS:
        if available >= needed:
            return None if not chosen or chosen.upper() in as_good else name
    return None


def settings(threads: int, chosen_kernels: str = "") -> dict[str, str]:
    """The variables that Julia and its BLAS read when they start; OPENBLAS_CORETYPE only where the user set none."""
    variables = {"JULIA_NUM_THREADS": str(threads)}
    better = kernels_for(chosen_kernels)
    if better is not None and not os.environ.get("OPENBLAS_CORETYPE"):
        variables["OPENBLAS_CORETYPE"] = better
    return variables


@contextlib.contextmanager
def temporarily(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process (for C libraries too) and put the old values back at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cache_folder(with_setting: bool = True) -> Path:
    """The folder for all that concerns Julia in `bridge.files.cache_folder`, which see."""
    return files.cache_folder(with_setting) / "julia"
