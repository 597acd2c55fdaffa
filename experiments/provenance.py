"""Where a number comes from: the commit, the machine, the versions and the sources that made it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from bridge.errors import TwinGradError

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds the packages: the checkout, or site-packages."""

ENGINE_PACKAGES = {"py_engine": ("*.py",), "julia_engine": ("*.jl", "*.toml")}
"""The engines of our own, and the files of theirs that decide what they compute."""


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


@cache
def cpu_model() -> str:
    """The CPU's model name as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"


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
            found[name] = importlib.metadata.version(name)
    return found


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds: sorts as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def summary() -> dict[str, object]:
    """What every record and every `--json` file says of the machine and the source."""
    head, dirty = commit()
    return {
        "commit": head,
        "dirty": dirty,
        "cpu_model": cpu_model(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "created": now(),
    }


def engine_digest(adapter: str) -> str:
    """A digest over an engine's sources: its adapter, and the adapters and engine packages that it names.

    `adapter` is a dotted module name such as `bridge.adapters.numpy`. The first 16 hex digits of a sha256.
    """
    digest = hashlib.sha256()
    for path in sorted(sources(adapter)):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def sources(adapter: str) -> set[Path]:
    """The files that `engine_digest` covers.

    An adapter that names an engine package anywhere depends on the whole of it: too much is a run repeated,
    too little would be an old number under a new engine.
    """
    found: set[Path] = set()
    waiting = [ROOT.joinpath(*adapter.split(".")).with_suffix(".py")]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        text = path.read_text(encoding="utf-8")
        for package, patterns in ENGINE_PACKAGES.items():
            if re.search(rf"\b{package}\b", text):
                found |= {file for pattern in patterns for file in (ROOT / package).rglob(pattern)}
        waiting += [path.with_name(name) for name in re.findall(r'"(\w+\.jl)"', text)]
        waiting += [path.with_name(f"{name}.py") for name in re.findall(r"\badapters(?:\.| import )(\w+)", text)]
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
