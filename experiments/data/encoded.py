"""Encoded data in the user cache: made once, read within a second afterwards.

An entry is one file. Its first line names the format and the version, its second one is the sha256 of all that
follows: numpy's npz (no pickle). A file that is anything but whole, or that another version wrote, is as good as
none: it is made anew, and a note says so. A cache that cannot be written costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bridge.files import cache_folder, write_atomically

Arrays = dict[str, NDArray]

_MAGIC = b"twingrad encoded data, version "


def entry(dataset: str, key: str) -> Path | None:
    """The file of what is known by `key` (hex), the digest of everything that it is made from; None without a cache."""
    try:
        return cache_folder() / "encoded" / f"{dataset}-{key[:32]}"
    except OSError:
        return None


def remember(path: Path | None, version: str, make: Callable[[], Arrays]) -> tuple[Arrays, str | None]:
    """What `path` holds, or else what `make()` returns, which is then written there.

    The second value is None, or a note for the user: why what was there could not be used, or why nothing could
    be written. `make` may raise; nothing is written then.
    """
    if path is None:
        return make(), "encoded data can't be kept: there is no cache folder (TWINGRAD_CACHE); the next run makes it"
    arrays, fault = _read(path, version)
    if arrays is not None:
        return arrays, None
    notes = [] if fault is None else [f"{path} {fault}, so it is made anew"]
    arrays = make()
    try:
        _write(path, version, arrays)
    except OSError as error:
        notes.append(f"encoded data can't be kept in {path.parent} ({error.strerror or error}): the next run makes it")
    return arrays, "; ".join(notes) or None


def _read(path: Path, version: str) -> tuple[Arrays | None, str | None]:
    """The arrays in `path`, or None and what is wrong with it (None also where there is no such file)."""
    try:
        contents = path.read_bytes()
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"can't be read ({error.strerror or error})"
    first, _, rest = contents.partition(b"\n")
    if first.startswith(_MAGIC) and first != _MAGIC + version.encode():
        return None, "was written by another version of twingrad"
    checksum, _, stored = rest.partition(b"\n")
    if not first.startswith(_MAGIC) or hashlib.sha256(stored).hexdigest().encode() != checksum:
        return None, "was cut short or altered"
    with np.load(io.BytesIO(stored), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}, None


def _write(path: Path, version: str, arrays: Mapping[str, NDArray]) -> None:
    """Put `arrays` in `path`: the whole file, or none."""
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    stored = stream.getvalue()
    checksum = hashlib.sha256(stored).hexdigest().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"\n".join([_MAGIC + version.encode(), checksum, stored]))


def from_words(words: tuple[str, ...]) -> NDArray[np.uint8]:
    """Strings as bytes that an npz can hold."""
    return np.frombuffer("\0".join(words).encode(), np.uint8)


def to_words(stored: NDArray[np.uint8]) -> tuple[str, ...]:
    """The strings that `from_words` stored."""
    return tuple(stored.tobytes().decode().split("\0")) if len(stored) else ()
