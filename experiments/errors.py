"""Errors of the results folder, and what to say of a file that cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

from bridge.errors import TwinGradError
from bridge.files import write_atomically

__all__ = ["InputError", "ResultsError", "ResultsInUseError", "StoppedError", "explain", "write"]


class InputError(TwinGradError):
    """Rows, labels or a file of the user's that cannot be used; names it, what was expected and found."""


class ResultsError(TwinGradError):
    """A results folder that cannot be used: names it, why, and what to do."""


class StoppedError(TwinGradError):
    """Work that was stopped before it began."""


class ResultsInUseError(ResultsError):
    """Another run is writing to the results folder."""


def explain(error: OSError, path: Path, option: str = "--results DIR") -> str:
    """What went wrong with writing `path`, and what can be done; `option` is how another place is chosen."""
    folder = path if path.is_dir() else path.parent
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"cannot write {path}: no space left; free some on the disk that holds {folder} and give the "
            "same command again: finished runs are kept"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"cannot write {path}: {error.strerror}; get write access to {folder} or use {option}"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"cannot write {path}: a part of this path is a file, not a folder; use {option}"
    return f"cannot write {path}: {error.strerror or error}; use {option}"


def write(
    path: Path,
    content: bytes | str,
    failure: type[TwinGradError] = ResultsError,
    option: str = "--results DIR",
    parents: bool = False,
) -> None:
    """Write a file whole or not at all, with `parents` its folders, too. Raises `failure` with what `explain` says."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise failure(explain(error, path, option)) from error
