"""The raw records of a results folder as one file, from which its tidy tables can be made again byte for byte.

    raw.tar.xz      members raw/<key>.json, sorted by name, without times, owners or modes that vary

The same records give the same bytes. An archive comes from others: what is read is bounded in size, no name leads
anywhere but to a record, nothing is written to disk, and nothing is evaluated.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from bridge.errors import TwinGradError, shown
from experiments import errors
from experiments.formats import size

NAME = "raw.tar.xz"
"""The archive in a results folder."""

FILE_LIMIT = 5_000_000
"""Bytes of an archive: it is committed."""
CONTENT_LIMIT = 100_000_000
"""Bytes of all that an archive holds."""
RECORD_LIMIT = 20_000_000
"""Bytes of one record."""
MEMORY_LIMIT = 100_000_000
"""Bytes that the decompressor may take for its window."""

_DAMAGED = (tarfile.TarError, lzma.LZMAError, EOFError, ValueError, IndexError, OverflowError, RecursionError)
"""What reading a damaged archive raises; the last four come of odd numbers in headers, and of headers in a long row."""

_MEMBER = re.compile(r"raw/([0-9a-f]{16})\.json")
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2**26}]


class ArchiveError(TwinGradError):
    """An archive that cannot be read or made; names it, why, and what to do."""


def pack(records: Mapping[str, bytes]) -> bytes:
    """The archive of records, given as the bytes of their files by key."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for key in sorted(records):
            member = tarfile.TarInfo(f"raw/{key}.json")  # no time, no owner
            member.mode, member.size = 0o644, len(records[key])
            archive.addfile(member, io.BytesIO(records[key]))
    return lzma.compress(buffer.getvalue(), format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=_FILTERS)


def write(path: Path, records: Mapping[str, bytes]) -> int:
    """Write the archive whole or not at all; its size in bytes. ArchiveError for none, too many, or no space."""
    if not records:
        raise ArchiveError(f"{path}: no raw records to archive; run `twingrad reproduce` first")
    content = pack(records)
    if len(content) > FILE_LIMIT:
        raise ArchiveError(
            f"{path}: the records of an archive may take {size(FILE_LIMIT)} at most, and these would take "
            f"{size(len(content))}; archive a part of the results, such as those of one study"
        )
    unpack(content, path)  # what is written can be read
    errors.write(path, content, ArchiveError, "--output FILE")
    return len(content)


def read(path: Path) -> dict[str, bytes]:
    """The bytes of every record in an archive, by key, sorted; ArchiveError for anything that is none."""
    if path.stat().st_size > FILE_LIMIT:
        raise _error(path, f"it has {size(path.stat().st_size)}, more than {size(FILE_LIMIT)}")
    return unpack(path.read_bytes(), path)


def unpack(content: bytes, path: Path) -> dict[str, bytes]:
    """The records in the bytes of an archive; `path` is what errors call it."""
    if len(content) > FILE_LIMIT:
        raise _error(path, f"it has {size(len(content))}, more than {size(FILE_LIMIT)}")
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(decompressed(content)), mode="r:") as archive:
            for member in archive:
                key = _key(member, path)
                if key in found:
                    raise _error(path, f"{member.name} is in it twice")
                file = archive.extractfile(member)
                found[key] = file.read() if file else b""
                if len(found[key]) != member.size:
                    raise _error(path, f"{member.name} is cut short")
    except _DAMAGED as error:
        raise _error(path, str(error) or type(error).__name__) from None
    if not found:
        raise _error(path, "no record is in it")
    return dict(sorted(found.items()))


def decompressed(content: bytes) -> bytes:
    """What xz packed, in bounded memory; ValueError or LZMAError for what is too large, or not packed so."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_LIMIT)
    whole = decompressor.decompress(content, max_length=CONTENT_LIMIT + 1)
    if len(whole) > CONTENT_LIMIT:
        raise ValueError(f"it holds more than {size(CONTENT_LIMIT)}")
    if not decompressor.eof:
        raise ValueError("it is cut short")
    if decompressor.unused_data:
        raise ValueError("something follows its end")
    return whole


def _key(member: tarfile.TarInfo, path: Path) -> str:
    """The key of a member that is a plain file with the name of a record."""
    named = _MEMBER.fullmatch(member.name)
    if named is None or member.type != tarfile.REGTYPE or member.issparse():
        raise _error(path, f"{shown(member.name)} is no record (raw/<16 hex digits>.json)")
    if member.size > RECORD_LIMIT:
        raise _error(path, f"{member.name} has {size(member.size)}, more than {size(RECORD_LIMIT)}")
    return named[1]


def _error(path: Path, reason: str) -> ArchiveError:
    return ArchiveError(f"{path}: no archive of raw records: {reason}; remove it, or make it with `twingrad archive`")
