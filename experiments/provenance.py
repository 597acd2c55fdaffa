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
from typing import Any

from bridge.errors import TwinGradError
from bridge.registry import version
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


def settings() -> dict[str, dict[str, str]]:
    """The `SETTINGS` and `ALLOCATORS` that are set, as the part `settings` of what decides a run; nothing without."""
    names = [*SETTINGS, *sorted(filter(ALLOCATORS.fullmatch, os.environ))]
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    return {"settings": found} if found else {}


def memory_bytes() -> int | None:
    """The machine's memory, or None where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


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
