"""Downloads into the user cache: several mirrors, digests checked, whole files or none.

Being without a network is an ordinary state, not a failure: mirrors are all asked at once whether they
answer, and within `CONTACT_SECONDS` it is known that none does.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bridge.files import replacing
from experiments.data.dataset import Progress

MIRRORS_VARIABLE = "TWINGRAD_MIRRORS"
OFFLINE_VARIABLE = "TWINGRAD_OFFLINE"

CONTACT_SECONDS = 5.0
"""How long a mirror may take to answer at all (name lookup, connection and first reply together)."""
STALL_SECONDS = 10.0
"""How long a transfer under way may stand still."""
LEFT_SECONDS = 3600.0
"""After how long a file of a transfer that nothing was written to is one of a process that was killed."""


class DownloadError(Exception):
    """No mirror delivered a file; the message lists what each of them did and ends in a sample's notice."""


class _WrongBytesError(ValueError):
    """A mirror delivered something other than the file."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as the mirrors hold it."""

    name: str
    size: int
    sha256: str


def refusal(allow_download: bool) -> str | None:
    """Why nothing may be downloaded, or None when it may."""
    if not allow_download:
        return "downloads are switched off"
    if os.environ.get(OFFLINE_VARIABLE, "").lower() not in ("", "0", "false", "no"):
        return f"downloads are switched off by {OFFLINE_VARIABLE}"
    missing = [name for name in ("pooch", "requests") if importlib.util.find_spec(name) is None]
    if missing:
        return f"downloads need {' and '.join(missing)}: pip install 'twingrad[data]'"
    return None


def mirrors_for(dataset: str, default: Sequence[str]) -> list[str]:
    """Base URLs to ask for a dataset's files: those of `TWINGRAD_MIRRORS`, or the dataset's own list."""
    bases = [f"{base.rstrip('/')}/{dataset}" for base in os.environ.get(MIRRORS_VARIABLE, "").split()]
    return bases or [base.rstrip("/") for base in default]


def download(
    files: Sequence[RemoteFile],
    folder: Path,
    mirrors: Sequence[str],
    progress: Progress | None = None,
    contact_seconds: float = CONTACT_SECONDS,
    stall_seconds: float = STALL_SECONDS,
) -> None:
    """Bring the `files` that `folder` lacks into it, each from the first mirror that delivers it.

    A file appears under its name only when its sha256 is right; anything else is deleted. Raises
    `DownloadError` at the first file that no mirror delivers; the files before it stay, and the next call
    resumes from there.
    """
    wanted = [file for file in files if not os.path.exists(folder / file.name)]
    if not wanted:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(f"the cache folder {folder} can't be made: {error.strerror or error}") from error
    for left in folder.glob(".*.part"):  # by a download that was killed; one that is at work writes to its file
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                left.unlink()
    contacts = [_Contact(mirror, f"{mirror}/{wanted[0].name}", contact_seconds) for mirror in mirrors]
    for file in wanted:
        contacts = _fetch(file, folder, contacts, progress, (contact_seconds, stall_seconds))


def _fetch(
    file: RemoteFile,
    folder: Path,
    contacts: list[_Contact],
    progress: Progress | None,
    timeouts: tuple[float, float],
) -> list[_Contact]:
    """Fetch one file; returns the contacts with the one that delivered it in front, for the next file."""
    failures = []
    for contact in contacts:
        failure = contact.failure()
        if failure is None:
            failure = _transfer(f"{contact.mirror}/{file.name}", file, folder, progress, timeouts)
        if failure is None:
            return [contact, *(other for other in contacts if other is not contact)]
        failures.append(f"{contact.mirror}: {failure}")
    raise DownloadError(f"the download of {file.name} failed ({'; '.join(failures) or 'no mirror is named'})")


class _Contact:
    """A question to one mirror, asked in the background: does it answer at all?

    The thread is what bounds the wait: a name lookup has no timeout and can take half a minute.
    """

    def __init__(self, mirror: str, url: str, seconds: float) -> None:
        self.mirror = mirror
        self._deadline = time.monotonic() + seconds
        self._failure: str | None = f"no answer within {seconds:g} s"
        self._thread = threading.Thread(target=self._ask, args=(url, seconds), daemon=True)
        self._thread.start()

    def _ask(self, url: str, seconds: float) -> None:
        import pooch

        try:
            # Any reply will do, an error page included: whether the file is there is seen when it is fetched.
            pooch.HTTPDownloader(timeout=seconds)(url, None, None, check_only=True)
        except Exception as error:
            self._failure = _in_words(error)
        else:
            self._failure = None

    def failure(self) -> str | None:
        """What went wrong, or None when the mirror answers."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        return self._failure


def _transfer(
    url: str, file: RemoteFile, folder: Path, progress: Progress | None, timeouts: tuple[float, float]
) -> str | None:
    """Fetch `url` into `folder`; what went wrong in words, or None."""
    import pooch

    # The files are compressed already; a server that compresses or unpacks them on the way changes the bytes.
    http = pooch.HTTPDownloader(timeout=timeouts, headers={"Accept-Encoding": "identity"})

    try:
        with replacing(folder / file.name) as stream:
            received = _Received(stream, file, progress)
            http(url, received, None)
            received.check()
    except (OSError, ValueError) as error:  # everything that requests raises is an OSError
        return _in_words(error, connection_error="the connection broke off; nothing was kept")
    return None


class _Received:
    """The bytes of one file on their way to disk: counted, bounded, digested."""

    def __init__(self, stream: IO[bytes], file: RemoteFile, progress: Progress | None) -> None:
        self._stream, self._file, self._progress = stream, file, progress
        self._sha256 = hashlib.sha256()
        self._count = 0

    def write(self, chunk: bytes) -> None:
        self._count += len(chunk)
        if self._count > self._file.size:
            raise _WrongBytesError(f"it sent more than {self._file.size:,} bytes; nothing was kept")
        self._sha256.update(chunk)
        self._stream.write(chunk)
        if self._progress is not None:
            self._progress(self._file.name, self._count, self._file.size)

    def flush(self) -> None:
        self._stream.flush()

    def check(self) -> None:
        found = self._sha256.hexdigest()
        if found != self._file.sha256:
            raise _WrongBytesError(
                f"it sent wrong bytes ({self._count:,} of {self._file.size:,}; "
                f"expected sha256 {self._file.sha256}, found {found}); nothing was kept"
            )


def _in_words(error: Exception, connection_error: str = "no connection") -> str:
    """A download's error in a few words; the libraries' own fill a screen."""
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, exceptions.Timeout):
        return "no answer in time"
    if isinstance(error, exceptions.SSLError):
        return "its certificate was not accepted"
    if isinstance(error, exceptions.ProxyError):
        return "the proxy did not connect"
    if isinstance(error, exceptions.ConnectionError | exceptions.ChunkedEncodingError):
        return connection_error
    if isinstance(error, OSError) and not isinstance(error, exceptions.RequestException):
        return f"the file could not be written: {error.strerror or error}"
    return str(error)
