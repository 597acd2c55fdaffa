"""The environment that Julia starts in: its threads, and the kernels of its BLAS."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = [
    "ENGINE",
    "cache_folder",
    "cpu_flags",
    "default_cache_folder",
    "kernels_for",
    "settings",
    "temporarily",
]

ENGINE = Path(__file__).parents[2] / "julia_engine"
"""The folder of the Julia engine's sources."""

CACHE_VARIABLE = "TWINGRAD_CACHE"

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


def cache_folder() -> Path:
    """TwinGrad's own folder for all that concerns Julia: in `TWINGRAD_CACHE`, or in the platform's cache of the user.

    A user without a home folder has none: raises `OSError`.
    """
    if setting := os.environ.get(CACHE_VARIABLE):
        return Path(setting).expanduser().absolute() / "julia"
    return default_cache_folder()


def default_cache_folder() -> Path:
    """The same folder where `TWINGRAD_CACHE` is not set: a Julia that was installed there serves with any setting."""
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} Name a folder in {CACHE_VARIABLE}") from None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "twingrad" / "Cache"
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches" / "twingrad"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "twingrad"
    return base / "julia"
