"""A paper's TOML text as the document that a `Paper` is made from.

Version 2 is short: what a file leaves out is that of `_defaults.toml`, tables and figures are named, and what a study
reports and cites is in rows. A file of version 1, of TwinGrad 0.1, says everything itself, and is read as it is.

    reported = [[row, quantity, value, where], ...]    value: a number, one for each epoch, or words; a table of more
                                                       (note, kind, precision) may follow
    cited = [[table, row, column, value, where], ...]  value: "" where the study has none
    tables = ["parity", { id = "times", reproduces = "Table I" }]
    [claims.<id>]                                      text, where, test = { quantity, engine, than, of, low, high }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from bridge import toml
from bridge.errors import shown

Document = dict[str, Any]

DEFAULTS = Path(__file__).with_name("_defaults.toml")
REPORTED = ("row", "quantity", "value", "where")
CITED = ("table", "row", "column", "value", "where")


class RowError(ValueError):
    """A row that is none; names its place."""


@cache
def defaults() -> Document:
    """What papers of version 2 have in common."""
    return toml.parse(toml.read(DEFAULTS))


def document(text: str) -> Document:
    """The document of a paper's text, with what it leaves out. Raises `TomlError` and `RowError`."""
    found = toml.parse(text)
    return completed(found) if found.get("version") == 2 else found


def completed(given: Document) -> Document:
    """A document of version 2 with rows as tables, and what it leaves out from the defaults.

    `training` and each profile of `runs` are completed key by key; anything else that a file states replaces the
    default. Of the defaults, engines that the file does not have are left out.
    """
    usual = defaults()
    found = dict(given)
    found["engines"] = _engines(given.get("engines", usual["engines"]), found.pop("reported_as", {}))
    if isinstance(environment := given.get("environment"), str):
        found["environment"] = {"description": environment}
    names = {row["name"] for row in found["engines"] if isinstance(row, dict) and isinstance(row.get("name"), str)}
    found.setdefault("own", _of(names, usual["own"]))
    found["training"] = _filled(given.get("training", {}), usual["training"])
    runs = given.get("runs", {})
    if isinstance(runs, dict):
        profiles = {name: _filled(runs.get(name, {}), _of(names, usual["runs"][name])) for name in usual["runs"]}
        found["runs"] = runs | profiles
    for kind in ("tables", "figures"):
        found[kind] = _each(given.get(kind, []), partial(_output, usual=usual[kind]))
    found["reported"] = _rows(given.get("reported", []), "reported", REPORTED)
    found["cited"] = _rows(given.get("cited", []), "cited", CITED)
    if isinstance(claims := given.get("claims"), dict):
        found["claims"] = [_claim(name, claim) for name, claim in claims.items()]
    return found


def _each(items: Any, change: Callable[[Any], Any]) -> Any:
    """Every item of a list changed; anything else is left for the checks that follow."""
    return [change(item) for item in items] if isinstance(items, list) else items


def _filled(given: Any, usual: Mapping[str, Any]) -> Any:
    return {**usual, **given} if isinstance(given, dict) else given


def _engines(items: Any, reported_as: Any) -> Any:
    """The engines as tables: a name alone is one; `reported_as` names the study's row that each is shown beside."""
    rows = _each(items, lambda item: {"name": item} if isinstance(item, str) else item)
    if not isinstance(reported_as, dict):
        raise RowError(f"reported_as: found {shown(reported_as)}, expected a table of engines and rows")
    known = [row["name"] for row in rows if isinstance(row, dict) and "name" in row] if isinstance(rows, list) else []
    for name in reported_as:
        if name not in known:
            raise RowError(f"reported_as: {shown(name)} is not among the engines")
    return _each(
        rows,
        lambda row: (
            {**row, "reported_as": reported_as[row["name"]]}
            if isinstance(row, dict) and isinstance(row.get("name"), str) and row["name"] in reported_as
            else row
        ),
    )


def _of(names: set[str], usual: Mapping[str, Any]) -> Document:
    """Defaults without the engines that a file does not have."""
    known = {row["name"] for row in _engines(defaults()["engines"], {})}

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(item) for name, item in value.items() if name not in known - names}
        return [item for item in value if item not in known - names] if isinstance(value, list) else value

    return {name: kept(value) for name, value in usual.items() if name not in known - names}


def _output(item: Any, usual: Mapping[str, Any]) -> Any:
    """A table or figure: its id alone, or what differs from the default of this id."""
    given = {"id": item} if isinstance(item, str) else item
    if not isinstance(given, dict) or not isinstance(given.get("id"), str):
        return given
    return {**usual.get(given["id"], {}), **given}


def _rows(items: Any, place: str, names: tuple[str, ...]) -> Any:
    """Rows as tables; a table is left as it is."""
    if not isinstance(items, list):
        return items
    found = []
    for index, item in enumerate(items):
        if not isinstance(item, list):
            found.append(item)
            continue
        more = item[-1] if len(item) == len(names) + 1 and isinstance(item[-1], dict) else {}
        if len(item) != len(names) + bool(more):
            raise RowError(f"{place}[{index}]: found {shown(item)}, expected [{', '.join(names)}]")
        row = {**dict(zip(names, item, strict=False)), **more}
        value = row.pop("value")
        if isinstance(value, list):
            row["by_epoch"] = value
        elif isinstance(value, str) and value:
            row |= {"words": value, "precision": "words"}
        elif value != "":
            row["value"] = value
        found.append(row)
    return found


def _claim(name: str, given: Any) -> Any:
    """A claim with its id, and its test beside the rest."""
    if not isinstance(given, dict) or not isinstance(given.get("test", {}), dict):
        return given
    rest = {key: value for key, value in given.items() if key != "test"}
    return {"id": name, **rest, **given.get("test", {})}
