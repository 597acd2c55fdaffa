"""TOML files: read with errors that name the file and the line, written in one canonical form."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TomlError", "dump", "inline", "key", "parse", "read"]


class TomlError(ValueError):
    """A text that is not there, not UTF-8 or not TOML. The message says what and where, not in which file."""


def read(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file. Raises `TomlError` when there is none to be had."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise TomlError("there is no such file") from None
    except IsADirectoryError:
        raise TomlError("this is a folder, not a TOML file") from None
    except OSError as error:
        raise TomlError(f"cannot be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig")  # some editors put a byte-order mark in front
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise TomlError(f"line {line} is not UTF-8 text: {byte}") from None


def parse(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises `TomlError`, naming line and column, when it isn't TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TomlError("not usable TOML: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and Python's limit on the digits of an integer
        raise TomlError(f"not valid TOML: {error}") from None


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


def _is_section(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key(name)} = {inline(value)}\n" for name, value in table.items())
