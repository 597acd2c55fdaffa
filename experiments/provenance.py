"""Where a number comes from: the commit, the machine, the versions and the sources that made it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from bridge.errors import TwinGradError
from bridge.registry import version
from bridge.worker import KERNEL_VARIABLES, THREAD_VARIABLES
from experiments.machine import machine
from experiments.sources import ROOT


class TooManyThreadsError(TwinGradError):
    """More threads than cores: their times would be those of waiting for each other."""


@cache
def commit() -> tuple[str, bool | None]:
    """The commit of this source and whether it was changed since; ("unknown", None) outside a checkout."""
    if not (ROOT / ".git").exists():
        return "unknown", None
    try:
        head = _git("rev-parse", "HEAD")
        return head, bool(_git("status", "--porcelain", "--untracked-files=normal"))
    except (OSError, subprocess.SubprocessError):
        return "unknown", None


def cpu_model() -> str:
    """The CPU's model name as the system gives it, which may be that of several generations: see `machine`."""
    return machine().name or platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(asked: int | None, usual: int = 2) -> int:
    """The threads asked for, or the usual ones as far as there are cores; TooManyThreadsError for more than that."""
    available = cores()
    if asked is not None and asked > available:
        raise TooManyThreadsError(
            f"{asked} threads asked for, but this process may use {available} core{'s' if available > 1 else ''}"
        )
    return asked or min(usual, available)


SETTINGS = (
    *("TWINGRAD_VECTOR_BYTES", "TWINGRAD_OPENBLAS_CORETYPE", "TWINGRAD_SIMD", "NPY_DISABLE_CPU_FEATURES"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "XLA_FLAGS", "TF_XLA_FLAGS"),
)
"""Environment variables that workers receive, and that decide how engines compute."""


ALLOCATORS = re.compile(r"MALLOC_\w+|GLIBC_TUNABLES|LD_PRELOAD")
"""Variables that decide how memory is allocated, and freed memory kept: of what is measured, both time and memory."""

RUNTIMES = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|ONEDNN|DNNL|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|JAX|XLA|TF|JULIA)_\w+"
)
"""Variables of what engines run on: where threads run and how they wait, caches of compiled code, switches."""

WITHOUT_EFFECT = re.compile(
    r"JULIA_(PKG|SSL|PYTHONCALL|CONDAPKG)_\w+|JULIA_(DEPOT_PATH|LOAD_PATH|PROJECT|BINDIR|EDITOR|SHELL|HISTORY|DEBUG)"
    r"|JULIA_(IMAGE_THREADS|NUM_PRECOMPILE_TASKS)|OMP_DISPLAY_\w+|KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK|WARNINGS|SETTINGS)"
    r"|TORCH_(HOME|LOGS\w*)|TORCHINDUCTOR_CACHE_DIR|TF_CPP_\w+|JAX_(LOG|TRACEBACK)\w*"
    r"|\w*(TOKEN|SECRET|PASSWORD|CREDENTIAL|API_KEY|ACCESS_KEY)\w*"
)
"""Those of them that change no result: where packages are, whose versions are recorded; what is printed; secrets; what
is switched off here; and what packages set themselves."""

_PLACE = re.compile(r"\w+_(DIR|PATH|FILE|HOME|ROOT|URL|SERVER)")


def settings() -> dict[str, dict[str, str]]:
    """The `SETTINGS`, `ALLOCATORS` and `RUNTIMES` that are set, as the part `settings` of what decides a run.

    Nothing without. Not those that workers set anew or drop. Of a place, such as that of a cache, only "set" is kept.
    """
    elsewhere = {*SETTINGS, *THREAD_VARIABLES, *KERNEL_VARIABLES}
    others = [name for name in sorted(filter(RUNTIMES.fullmatch, os.environ)) if name not in elsewhere]
    names = [*SETTINGS, *sorted(filter(ALLOCATORS.fullmatch, os.environ))]
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    found |= {
        name: "set" if _PLACE.fullmatch(name) or os.sep in os.environ[name] else os.environ[name]
        for name in others
        if os.environ[name] and not WITHOUT_EFFECT.fullmatch(name)
    }
    return {"settings": found} if found else {}


def memory_bytes() -> int | None:
    """The machine's memory, or None where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


CORES = Path("/proc/stat")
"""Where Linux counts what its cores do, in its first line."""


class OthersShare:
    """Counts from when it is made which share of the machine's cores others had: processes that this one did not start.

    The host of a virtual machine counts, too, where the system says what it took. A process that this one started
    counts as its own once it has ended.
    """

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def value(self) -> float | None:
        """The share since then, from 0 to 1; None where the system does not say."""
        if self._before is None or (now := _processor_seconds()) is None:
            return None
        everything, idle, own = (after - before for after, before in zip(now, self._before, strict=True))
        return min(1.0, max(0.0, (everything - idle - own) / everything)) if everything > 0 else None


def _processor_seconds() -> tuple[float, float, float] | None:
    """The seconds of all cores since the system started, those without work, and those of this process and its own."""
    try:
        import resource

        words = CORES.read_text(encoding="ascii").split(maxsplit=9)
        ticks, tick = [int(word) for word in words[1:9]], os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]  # with nothing to do, and waiting for a disk
    except (OSError, ValueError, IndexError, ImportError):  # the file is Linux's and the module Unix's
        return None
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(ticks) / tick, idle / tick, sum(one.ru_utime + one.ru_stime for one in used)


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """The installed versions of distributions; those that are not installed are left out."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = version(name)
    return found


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds: sorts as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def summary() -> dict[str, Any]:
    """What every record and every `--json` file says of the machine and the source."""
    head, dirty = commit()
    return {
        "commit": head,
        "dirty": dirty,
        "cpu_model": cpu_model(),
        "machine": machine().record(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "created": now(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
