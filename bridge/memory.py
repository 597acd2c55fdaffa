"""Resident memory of processes, as the kernel keeps it (Linux), and the time that garbage and the system take."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import time
from collections.abc import Mapping
from pathlib import Path

from bridge.errors import EngineUnavailableError

__all__ = ["collecting_seconds", "give_back", "held", "held_alone", "peak_rss", "reset_peak", "system_seconds"]


def reset_peak() -> None:
    """Forget the peak so far: from here on it is the most that is resident at any time after this call."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise _unavailable(error) from None


def peak_rss() -> int:
    """The most memory, in bytes, that was resident at any time since `reset_peak` or the start of the process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError as error:
        raise _unavailable(error) from None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise _unavailable("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024


def give_back() -> None:
    """Free what is only referred to in circles, and give freed memory back to the system, where glibc keeps it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class _Collections:
    """Adds up what Python's collections of garbage take, of which it is called at the start and the end of each."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began


_collections = _Collections()


def collecting_seconds() -> float:
    """Seconds that Python has spent collecting garbage in this process since this was first called."""
    if _collections not in gc.callbacks:
        gc.callbacks.append(_collections)
    return _collections.seconds


def system_seconds() -> float | None:
    """Seconds that the system has worked for this thread, such as on fresh memory; None where nothing reports it."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_stime
    except (ImportError, AttributeError):
        return None


def held(pid: int) -> int:
    """Bytes that a process and all that it has started hold; see `held_alone`."""
    return held_alone(pid) + sum(map(held, _children(pid)))


def held_alone(pid: int) -> int:
    """Bytes that a process holds and can't give back: pages of files, mapped ones among them, don't count.

    0 for one that has ended, and on systems that do not say it.
    """
    found = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found += 1024 * int(rest.split()[0])
    return found


def _children(pid: int) -> list[int]:
    """The processes that the threads of a process have started, and that have not ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _unavailable(why: object) -> EngineUnavailableError:
    return EngineUnavailableError(f"peak memory can't be measured on this system: {why}")
