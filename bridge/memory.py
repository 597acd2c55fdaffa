"""Peak resident memory of this process, as the kernel keeps it (Linux)."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.errors import EngineUnavailableError

__all__ = ["peak_rss", "reset_peak"]


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


def _unavailable(why: object) -> EngineUnavailableError:
    return EngineUnavailableError(f"peak memory can't be measured on this system: {why}")
