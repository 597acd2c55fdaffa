"""Temporary files, by which processes exchange arrays: their folder, and a full disk in words."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from bridge.errors import WorkerError

__all__ = ["temporary_folder", "writing_temporary"]

_ELSEWHERE = "free some space there, or name another folder in TMPDIR"


def temporary_folder(prefix: str) -> Path:
    """A new folder among the system's temporary files; `WorkerError` where none can be made."""
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise WorkerError(f"no temporary folder can be made: {error.strerror or error}; {_ELSEWHERE}") from None


@contextlib.contextmanager
def writing_temporary(path: Path) -> Iterator[None]:
    """Remove a temporary file that can't be written, as on a full disk, and raise `WorkerError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # that of numpy, of a full disk, has no number
        with contextlib.suppress(OSError):
            path.unlink()
        reason = getattr(error, "strerror", None) or error
        raise WorkerError(f"{path} can't be written: {reason}; {_ELSEWHERE}") from None
