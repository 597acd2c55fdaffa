"""Writing files: whole or not at all where that is possible, and never in the place of what is no regular file.

Also the folder of TwinGrad's cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import platformdirs

__all__ = [
    "cache_folder",
    "create_exclusively",
    "descriptor",
    "expanded",
    "obstacle",
    "replacing",
    "write_atomically",
]

_CACHE_VARIABLE = "TWINGRAD_CACHE"

_MOST_LINKS = 40

_REFUSED = {
    stat.S_IFDIR: (errno.EISDIR, "it is a folder"),
    stat.S_IFSOCK: (errno.EINVAL, "it is a socket"),
    stat.S_IFBLK: (errno.EINVAL, "it is a disk"),
}
"""What is neither replaced nor written to: the number and the words of the error."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of file systems that have no hard links."""


def expanded(path: str | Path) -> Path:
    """A path with the home folder in place of ``~`` or ``~name``; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def cache_folder(with_setting: bool = True) -> Path:
    """TwinGrad's own folder for what can be made or downloaded again: `TWINGRAD_CACHE`, or in the platform's cache.

    Without the setting it is the latter, whatever is set. A user without a home folder has none: raises `OSError`.
    """
    if with_setting and (setting := os.environ.get(_CACHE_VARIABLE)):
        folder = expanded(setting)
        if folder.parts[:1] and folder.parts[0].startswith("~"):
            raise FileNotFoundError(f"{_CACHE_VARIABLE}={setting}: there is no user {folder.parts[0][1:]}")
        return folder.absolute()
    try:
        return platformdirs.user_cache_path("twingrad", appauthor=False).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} (name a folder in {_CACHE_VARIABLE})") from None


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` to `path` so that a reader, or a crash at any moment, sees the old file or the new one.

    Text is written as UTF-8. See `replacing` for symbolic links, pipes and devices, and for the errors.
    """
    with replacing(path) as file:
        file.write(encoded(content) if isinstance(content, str) else content)


def encoded(text: str) -> bytes:
    """Text as UTF-8. Bytes of a file's name that are none are written as in Python's and JSON's strings: \\udce9."""
    return text.encode("utf-8", "backslashreplace")


def create_exclusively(path: str | os.PathLike[str], content: str) -> bool:
    """Create the file at `path` with `content` unless something is there; whether it was created.

    Of several processes that try at once exactly one succeeds, also of those on several machines that share a network
    file system: the file is completed under a temporary name and linked to its own. Where there are no hard links it is
    opened exclusively, and may be seen before its content is there. Raises `OSError` where nothing can be written.
    """
    target = Path(path)
    temporary = target.parent / f".{secrets.token_hex(8)}.part"
    try:
        _create(temporary, content)
        try:
            os.link(temporary, target)
        except FileExistsError:  # of this call's own making where a network lost the answer, and asked again
            return os.stat(temporary).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                _create(target, content)
            except FileExistsError:
                return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _create(path: Path, content: str) -> None:
    """Write a file that is not there yet."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(encoded(content))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A stream whose bytes become the file at `path` when the block ends, and leave nothing when it fails.

    The new file is completed and flushed to disk under a temporary name in the same folder, then renamed; it has the
    permissions of the file that it replaces. A symbolic link is followed: it stays, and its target is replaced or made.
    A FIFO, a terminal and any other character device, and the process's own open files (`/dev/stdout`, `/dev/fd/3`) are
    written to, never replaced.

    Raises `OSError` where nothing can be written: a missing folder, no permission, a folder, a socket or a disk in the
    place of the file, links that lead in a circle.
    """
    opened = _open_special(Path(path))
    if opened is not None:
        with opened as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    mode = _kept_mode(target)
    temporary = target.parent / f".{secrets.token_hex(8)}.part"
    # The umask of the process is applied to 0666 here, as for any new file.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(temporary, mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # of a full disk, for one, which knows an open file alone
        raise
    _flush_folder(target.parent)


def obstacle(path: str | os.PathLike[str]) -> str | None:
    """Why nothing can be written at `path`, in words that follow its name; None when a file can be written there.

    Found out before a long run that would write it at its end; nothing is opened or changed.
    """
    path = Path(path)
    if descriptor(path) is not None:
        return None
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    if mode is not None:
        if stat.S_IFMT(mode) in _REFUSED:
            return _REFUSED[stat.S_IFMT(mode)][1]
        if not os.access(path, os.W_OK):
            return os.strerror(errno.EACCES)
        if not stat.S_ISREG(mode):
            return None
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no write access to {folder}"


def descriptor(path: Path) -> int | None:
    """The open file of this process that `path` stands for, as `/dev/stdout` and `/dev/fd/3` do; None for any other.

    Such a path may lead to a regular file. To replace that would lose what was written to it so far.
    """
    own = {"/dev/fd", "/proc/self/fd", f"/proc/{os.getpid()}/fd"}
    at = path.absolute()
    for _ in range(_MOST_LINKS):
        try:
            folder = os.path.realpath(at.parent)
            if (folder in own or str(at.parent) in own) and at.name.isdecimal():
                os.fstat(int(at.name))
                return int(at.name)
            at = Path(folder, os.readlink(at))
        except (OSError, ValueError):  # no link, or nothing there
            return None
    return None


def _open_special(path: Path) -> IO[bytes] | None:
    """A stream into what is there, where that is not to be replaced; None for a regular file, and where nothing is."""
    number = descriptor(path)
    if number is not None:
        for stream in (sys.stdout, sys.stderr):  # what was printed before comes before
            if stream is not None:
                stream.flush()
        return os.fdopen(os.dup(number), "wb")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    if stat.S_IFMT(mode) in _REFUSED:
        raise OSError(*_REFUSED[stat.S_IFMT(mode)], str(path))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), "wb")


def _kept_mode(target: Path) -> int | None:
    """The permissions of the file to be replaced; None for a new one. One that may not be written is not replaced."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return stat.S_IMODE(mode)


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable where folders can be opened and flushed (not on Windows)."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be written and not listed
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
