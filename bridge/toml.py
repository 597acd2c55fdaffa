"""TOML files: read with errors that name the file and the line, written in one canonical form."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.errors import printable, shown

MOST_BYTES = 1_000_000
"""Of a file. The largest of the project has 20,000."""
MOST_PARTS = 50
"""Of a dotted key, such as `runs.full.seeds` with three."""
DEEPEST = 100
"""How many tables and lists may lie in each other."""

__all__ = ["TomlError", "dump", "inline", "key", "parse", "read"]


class TomlError(ValueError):
    """A text that is not there, not UTF-8 or not TOML. The message says what and where, not in which file."""


def read(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file. Raises `TomlError` when it can't be read."""
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):  # opening it waits, for ever where nobody writes
            raise TomlError("this is a FIFO, not a TOML file: save what comes out of it to one")
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise TomlError("there is no such file") from None
    except IsADirectoryError:
        raise TomlError("this is a folder, not a TOML file") from None
    except OSError as error:
        raise TomlError(f"cannot be read: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise TomlError(f"more than {MOST_BYTES:,} bytes, the most that is read: is this the right file?")
    try:
        return data.decode("utf-8-sig")  # some editors put a byte-order mark in front
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start:,}"
        raise TomlError(f"line {line} is not UTF-8 text: {byte}") from None


def parse(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises `TomlError`, naming the line, when it isn't TOML, or larger than any use of it.

    The limits keep the time and memory of a file of nonsense small: tomllib needs minutes for a key of 50,000 parts.
    """
    if len(text) > MOST_BYTES:
        raise TomlError(f"more than {MOST_BYTES:,} characters, the most that is read")
    if (long := _MANY_PARTS.search(text)) is not None:
        raise TomlError(
            f"line {_line_of(text, long.start())}: the key {shown(long[0])} has more than {MOST_PARTS} parts"
        )
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise TomlError("not usable TOML: nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise TomlError(f"not valid TOML: {printable(str(error))}") from None
    except ValueError as error:  # Python's limit on the digits of an integer
        number = _MANY_DIGITS.search(text)
        if number is None:
            raise TomlError(f"not valid TOML: {error}") from None
        line, start = _line_of(text, number.start()), shown(_line_at(text, number.start()))
        raise TomlError(f"not usable TOML: line {line}: {start}: a number of {len(number[0]):,} digits") from None
    if _depth(tables) > DEEPEST:
        raise TomlError(f"not usable TOML: nested too deeply, more than {DEEPEST} tables and lists in each other")
    return tables


def dump(table: Mapping[str, Any]) -> str:
    """TOML text of nested tables of strings, booleans, numbers and lists, in the order given.

    Tables and lists of tables at the top become sections; what lies deeper is written inline, as are lists of
    anything else.
    """
    plain = {name: value for name, value in table.items() if not _is_section(value)}
    sections = {name: value for name, value in table.items() if _is_section(value)}
    blocks = [_lines(plain)] if plain else []
    for name, value in sections.items():
        if isinstance(value, Mapping):
            blocks.append(f"[{key(name)}]\n{_lines(value)}")
        else:
            blocks.extend(f"[[{key(name)}]]\n{_lines(item)}" for item in value)
    return "\n".join(blocks)


def inline(value: Any) -> str:
    """One value as TOML writes it on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)  # the shortest text that reads back as the same number; also nan and inf
        case int():
            return str(value) if abs(value) < 2**64 else hex(value)  # Python limits the length of decimals
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            items = ", ".join(f"{key(name)} = {inline(item)}" for name, item in value.items())
            return f"{{ {items} }}" if items else "{}"
        case list() | tuple():
            return f"[{', '.join(map(inline, value))}]"
        case _:  # dates and times
            return str(value)


def key(name: str) -> str:
    """A key as TOML writes it: bare where that is allowed."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else inline(name)


_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_MANY_PARTS = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_PARTS},}}+")
_MANY_DIGITS = re.compile(r"\d[\d_]{999,}+")


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _line_at(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1 : at].lstrip() + text[at : at + 10] + "…"


def _depth(tables: Any) -> int:
    """How many tables and lists lie in each other, found without recursion; it need not be exact beyond `DEEPEST`."""
    level, found = [tables], 0
    while level and found <= DEEPEST:
        found += 1
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
    return found


def _is_section(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key(name)} = {inline(value)}\n" for name, value in table.items())
