"""Whether a raw record or a tidy table is sound: damaged ones are named and set aside, never read halfway.

A record is checked for everything that a reader of records takes from it, so that none of them needs to. What else it
holds, such as what a later release adds, is left alone.
"""

from __future__ import annotations

import errno
import io
import json
import lzma
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import shown
from experiments import archive, formats
from experiments.measures.measure import EPOCH
from experiments.measures.registry import RECORDED
from experiments.papers import PROFILES

if TYPE_CHECKING:
    import pandas as pd

MOST_RECORD_BYTES = 64_000_000
"""Of a raw record; the largest of a full run has 200,000."""
MOST_TABLE_BYTES = 1_000_000_000
"""Of a tidy table."""
LARGEST = 1e18
"""Of any number in them but losses: seconds, bytes, counts."""
LARGEST_LOSS = 1e300
"""Of a loss: a run that diverges may end before its loss is infinite."""

DAMAGED = "damaged"
"""The folder, in a results folder, of what was set aside."""


class DamagedError(ValueError):
    """A record or table that can't be used; the message says why, in words that follow its name."""


class UnreadableError(DamagedError):
    """A file that the system does not let us read, such as for want of permission; what is in it may be sound."""


# -----------------------------------------------------------------------------------------------------------
# Raw records

# What a record must hold: "text", "number" and so on, or None where "?" is behind; a table with its names, optional
# where "?" is behind; a list of one form; {"*": form} for a table with any names.
_RECORD: Mapping[str, Any] = {
    "schema": "count",
    "key": "text",
    "status": "status",
    "error?": "text?",
    "error_kind?": "text?",
    "seconds?": "number",
    "job?": "text",
    "blas?": {"*": "text"},
    "config": {
        **{name: "text" for name in ("paper", "engine", "label", "dtype")},
        **{"seed": "count", "threads": "count", "measure": "measure", "profile": "profile"},
        **{"rounds?": "count", "steps?": "count", "batch_size?": "count", "suite?": "text"},
    },
    "asked?": {"study?": "text", "measure?": "text"},
    "decided_by?": {"machine?": "text", "sources?": "text"},
    "data": {"source": "source", "digest": "text", "name?": "text", "train_rows?": "count", "test_rows?": "count"},
    "provenance": {
        **{name: "text" for name in ("commit", "cpu_model", "created", "python", "engine_digest")},
        **{"dirty": "flag?", "versions": {"*": "text"}, "blas?": "text", "machine?": {"label": "text"}},
        **{"memory_bytes?": "number?", "threads?": "count", "others_share?": "number?"},
    },
    "startup?": {"import_seconds?": "number?", "build_seconds?": "number?"},
    "epochs?": [EPOCH],
    "step_losses?": ["loss?"],
    "peak_rss_bytes?": "number?",
    "entrants?": {
        "*": {
            **{"label": "text", "engine_digest": "text", "error": "text?"},
            **{"versions?": {"*": "text"}, "available?": "flag"},
        }
    },
    **{f"{part.removesuffix('?')}?": form for measure in RECORDED.values() for part, form in measure.form.items()},
}
_SINCE_2 = {
    "job": "text",
    "blas": {"*": "text"},
    "provenance": {"machine": {"label": "text"}},
    "entrants?": {"*": {"versions": {"*": "text"}}},
}
"""What records of schema 2 hold beside."""
_UP_TO_1 = {"provenance": {"blas": "text"}}
"""What those of schema 1 do, but for the micro-benchmarks'."""
_OF_MICRO = {"config": {"suite": "text"}, "entrants": {"*": {"versions": {"*": "text"}, "available": "flag"}}}
"""What those of micro-benchmarks do."""
_WORDS = {
    "status": ("ok", "failed"),
    "measure": tuple(RECORDED),
    "profile": PROFILES,
    "source": ("real", "sample", "generated", "none"),
}


def read(path: Path, schemas: range) -> dict[str, Any] | None:
    """The record in a file; None for one of another schema than these, which another release wrote.

    Raises `DamagedError` for what is no file, no JSON or no record.
    """
    return parse(content_of(path), path.stem, schemas)


def parse(contents: bytes, key: str, schemas: range) -> dict[str, Any] | None:
    """The same from the contents of a file that is called `key`."""
    record = _parsed(contents)
    schema = record.get("schema") if isinstance(record, dict) else None
    if isinstance(schema, int) and not isinstance(schema, bool) and schema not in schemas:
        return None
    problem = fault(record)
    if problem is None and record["key"] != key:
        problem = f"key: found {shown(record['key'])}, expected the file's name"
    if problem is not None:
        raise DamagedError(problem)
    return dict(record)


def fault(record: Any) -> str | None:
    """What is wrong with a record, with its place; None for a sound one."""
    problem = next(_faults(record, _RECORD, ""), None)
    if problem is not None:
        return problem
    measure = RECORDED[record["config"]["measure"]]
    micro = measure.plan == "suites"
    more: dict[str, Any] = _SINCE_2 if record["schema"] >= 2 else {} if micro else _UP_TO_1
    problem = next(_faults(record, more, ""), None)
    if problem is None and micro:
        problem = next(_faults(record, _OF_MICRO, ""), None)
    if problem is not None:
        return problem
    if record["status"] == "ok":
        for part in (
            *filter(_is_needed, measure.form),
            *(["entrants"] if measure.plan in ("together", "suites") else []),
        ):
            if part not in record:
                return f"{part}: missing, though the run succeeded"
        if "epochs" in measure.form and not record["epochs"]:
            return "epochs: found none, though the run succeeded"
    elif record.get("error") is None:
        return "error: missing, though the run failed"
    rows = [row for one in RECORDED.values() if one.plan in ("together", "suites") for row in record.get(one.name, ())]
    stranger = next((row["engine"] for row in rows if row["engine"] not in record.get("entrants", {})), None)
    return None if stranger is None else f"entrants: {shown(stranger)} is missing, of which there are numbers"


def _is_needed(part: str) -> bool:
    return not part.endswith("?")


def _faults(value: Any, form: Any, place: str) -> Iterator[str]:
    if isinstance(form, list):
        if not isinstance(value, list):
            yield f"{place}: found {shown(value)}, expected a list"
            return
        for index, item in enumerate(value):
            yield from _faults(item, form[0], f"{place}[{index}]")
    elif isinstance(form, dict):
        yield from _table_faults(value, form, place)
    elif not (form.endswith("?") and value is None) and not _is(form.removesuffix("?"), value):
        yield f"{place}: found {shown(value)}, expected {_described(form)}"


def _table_faults(value: Any, form: Mapping[str, Any], place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place or 'the record'}: found {shown(value)}, expected a table"
        return
    prefix = f"{place}." if place else ""
    if "*" in form:
        for name, item in value.items():
            yield from _faults(item, form["*"], f"{prefix}{shown(name)}")
        return
    for name, inner in form.items():
        known = name.removesuffix("?")
        if known in value:
            yield from _faults(value[known], inner, f"{prefix}{known}")
        elif known == name:
            yield f"{prefix}{known}: missing"


def _is(kind: str, value: Any) -> bool:
    match kind:
        case "text":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "count":
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
        case "number" | "positive" | "loss":
            if not isinstance(value, int | float) or isinstance(value, bool) or (kind == "positive" and value <= 0):
                return False
            return abs(value) <= (LARGEST_LOSS if kind == "loss" else LARGEST)
    return isinstance(value, str) and value in _WORDS[kind]


def _described(form: str) -> str:
    kind = form.removesuffix("?")
    names = {"text": "a text", "flag": "true or false", "count": "a whole number from 0", "number": "a finite number"}
    names |= {"loss": names["number"], "positive": "a number above 0"}
    return names.get(kind) or " or ".join(_WORDS.get(kind, ()))


def _parsed(contents: bytes) -> Any:
    try:
        return json.loads(contents.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DamagedError(f"not UTF-8 text: byte 0x{contents[error.start]:02x} at offset {error.start:,}") from None
    except RecursionError:
        raise DamagedError("not JSON of ours: nested too deeply") from None
    except ValueError as error:
        raise DamagedError(f"not JSON: {error}" if contents else "empty") from None


def content_of(path: Path, most: int = MOST_RECORD_BYTES) -> bytes:
    """A regular file, or what a link to one leads to, of at most `most` bytes. Raises `DamagedError`."""
    check_regular(path, most)
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise UnreadableError(f"can't be read: {error.strerror or error}") from None


def check_regular(path: Path, most: int = MOST_TABLE_BYTES) -> None:
    """Raise `DamagedError` for what is no regular file of at most `most` bytes: a FIFO would be waited for."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise DamagedError("a link that leads nowhere" if path.is_symlink() else "there is no such file") from None
    except OSError as error:
        kind = DamagedError if error.errno == errno.ELOOP else UnreadableError  # a link to itself has nothing in it
        raise kind(f"can't be read: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError("a folder, not a file" if stat.S_ISDIR(status.st_mode) else "no regular file")
    if status.st_size > most:
        raise DamagedError(f"{status.st_size:,} bytes, more than the {most:,} that are read")


# -----------------------------------------------------------------------------------------------------------
# Tidy tables

_TEXTS = frozenset(
    {
        *("key", "job", "paper", "engine", "label", "measure", "dtype", "profile", "data_source", "dataset_digest"),
        *("status", "error", "commit", "cpu_model", "machine", "blas", "python", "framework_version", "engine_digest"),
        *("created", "quantity", "configuration", "technique", "variant", "model", "suite", "benchmark", "what"),
        *("missing", "version", "dirty", "training_digest"),
    }
)
"""Columns of text of today's tables."""

_ROWS = [form for one in RECORDED.values() if one.columns for form in one.form[one.name]]
TEXTS = _TEXTS | {name.removesuffix("?") for form in _ROWS for name, kind in form.items() if kind.startswith("text")}
"""Columns of text; all others are numbers."""


def _kinds(form: Any) -> Iterator[tuple[str, str]]:
    """The values that a form describes, however deep: their names and kinds."""
    for name, inner in form.items() if isinstance(form, dict) else [("", item) for item in form]:
        if isinstance(inner, str):
            yield name.removesuffix("?"), inner.removesuffix("?")
        else:
            yield from _kinds(inner)


POSITIVE = frozenset(name for name, kind in _kinds(_RECORD) if kind == "positive")
"""Columns of numbers above 0: times that others are divided by."""

_NEEDED = frozenset({"key", "paper", "engine", "label", "measure", "threads", "profile", "data_source", "status"})
_NEEDED_TOO = frozenset({"created", "cpu_model", "seed", "epoch", "round", "step", "quantity", "value", "variant"})
"""Columns in which no row is empty, but for what is missing of the micro-benchmarks."""

_IDENTITY = (
    *("key", "paper", "engine", "seed", "epoch", "step", "round", "quantity", "value", "configuration", "technique"),
    *("variant", "suite", "benchmark", "size", "chunk", "what", "missing"),
    *(name for form in _ROWS for name, kind in form.items() if kind in ("text", "count") and name not in _TEXTS),
)
"""Columns that together say what a row is about, as far as a table has them: no two rows have the same in all."""

_ALLOWED = {"status": _WORDS["status"], "measure": _WORDS["measure"], "profile": PROFILES}
_ALLOWED |= {"data_source": _WORDS["source"]}


def read_table(path: Path, columns: tuple[str, ...], later: tuple[str, ...] = ()) -> pd.DataFrame:
    """A tidy table, which may be packed (.xz), with these columns, of which it may lack the `later` ones.

    Raises `DamagedError`.
    """
    import pandas as pd

    check_regular(path)
    try:
        source = io.BytesIO(archive.decompressed(path.read_bytes())) if path.suffix == ".xz" else path
        # Small tables, of which rows are taken thousands of times: with pyarrow's texts that takes twice as long.
        with pd.option_context("mode.string_storage", "python"):
            frame = pd.read_csv(source, dtype=dict.fromkeys(TEXTS, str), low_memory=False)
    except UnicodeDecodeError as error:
        raise DamagedError(f"not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise DamagedError(f"can't be read: {error.strerror or error}") from None
    except (ValueError, MemoryError, OverflowError, lzma.LZMAError) as error:  # pandas' own are ValueErrors
        raise DamagedError(f"not a table: {shown(str(error))}") from None
    absent = [column for column in columns if column not in frame.columns and column not in later]
    if absent:
        raise DamagedError(f"lacks the column {absent[0]!r}")
    if not isinstance(frame.index, pd.RangeIndex):
        raise DamagedError("not a table: its rows have more values than its header")
    for column in columns:
        if column in frame.columns:
            frame[column] = _checked(frame, column)
    _check_repeated(frame, [column for column in dict.fromkeys(_IDENTITY) if column in columns])
    return frame


def _check_repeated(frame: pd.DataFrame, names: list[str]) -> None:
    repeated = frame.duplicated(names)
    if not repeated.any():
        return
    row = int(repeated.to_numpy().argmax())
    here = frame[names].iloc[row]
    same = ((frame[names] == here) | (frame[names].isna() & here.isna())).all(axis=1)
    what = ", ".join(f"{name} {_told(value)}" for name, value in here.dropna().items())
    raise DamagedError(f"row {row + 1:,} repeats row {int(same.to_numpy().argmax()) + 1:,}: {what}")


def _checked(frame: pd.DataFrame, column: str) -> pd.Series[Any]:
    import pandas as pd

    values = frame[column]
    if column == "dirty":
        wrong = ~values.isna() & ~values.isin(["True", "False"])
        values = values.map({"True": True, "False": False})
    elif column in TEXTS:
        wrong = ~values.isna() & ~values.isin(_ALLOWED[column]) if column in _ALLOWED else values != values  # none
        wrong &= ~values.isna()
    else:
        numbers = pd.to_numeric(values, errors="coerce")
        wrong = (numbers.isna() & ~values.isna()) | (
            numbers.abs() > (LARGEST_LOSS if column.endswith("loss") else LARGEST)
        )
        if column in POSITIVE:
            wrong |= numbers <= 0
        values = numbers
    if column in _NEEDED or (column in _NEEDED_TOO and "missing" not in frame.columns):
        wrong |= frame[column].isna()
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        found = frame[column].iloc[row]
        number = "a number above 0" if column in POSITIVE else "a number"
        raise DamagedError(
            f"row {row + 1:,}, column {column}: found {'nothing' if pd.isna(found) else shown(found)}, expected "
            f"{' or '.join(_ALLOWED[column]) if column in _ALLOWED else 'a text' if column in TEXTS else number}"
        )
    return values


def _told(value: Any) -> str:
    return shown(value) if isinstance(value, str) else formats.given(value)


REPLACED = "replaced"
"""The folder, in a results folder, of failed runs in whose place finished ones were put."""


def set_aside(path: Path, root: Path, where: str = DAMAGED) -> Path:
    """Move something damaged into the folder `DAMAGED` of a results folder, under a name that is free there."""
    target = free_place(path, root, where)
    os.rename(path, target)
    return target


def free_place(path: Path, root: Path, where: str) -> Path:
    """A name for a file of this name that is free in a folder of a results folder, which is made."""
    folder = root / where
    folder.mkdir(exist_ok=True)
    return next(
        target
        for number in range(1_000_000)
        if not os.path.lexists(target := folder / (f"{path.name}.{number}" if number else path.name))
    )
