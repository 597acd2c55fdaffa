"""A study with other settings than those of its file: `twingrad run --set section.key=value`.

What is run then is not the study. Its results lie in a separate folder, which holds a note of what was changed; no
report shows them as the study's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bridge import toml
from bridge.errors import TwinGradError, shown
from bridge.files import write_atomically
from experiments import archive
from experiments.errors import ResultsError
from experiments.papers import Paper, PaperFileError
from experiments.results import COMMITTED

NOTE = "changed.json"
"""In a results folder: which settings its runs have in the place of the studies' own."""


class SettingError(TwinGradError):
    """A `--set` that cannot be: names the key as it was given, and what there is."""


def changed(paper: Paper, settings: Sequence[str]) -> Paper:
    """The paper with some settings replaced, each given as `section.key=value`, and checked in full again."""
    if not settings:
        return paper
    document: dict[str, Any] = paper.model_dump()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise SettingError(
                f"--set {shown(setting)}: expected section.key=value, such as training.learning_rate=0.1"
            )
        _replace(document, key.strip(), _value(text.strip()), paper)
    given = ", ".join(settings)
    try:
        found = Paper.model_validate(document)
    except ValueError as error:
        raise SettingError(f"--set {given}: {_problems(error)}") from None
    found._file = paper.file
    try:
        found.check(f"--set {given}")
    except PaperFileError as error:
        raise SettingError(str(error)) from None
    return found


def _replace(document: dict[str, Any], key: str, value: Any, paper: Paper) -> None:
    *sections, name = key.split(".")
    table: Any = document
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    found = table.get(name) if isinstance(table, dict) else None
    if not isinstance(found, dict) or "value" not in found:
        known = (
            sorted(name for name, item in table.items() if isinstance(item, dict)) if isinstance(table, dict) else []
        )
        there = f"{'.'.join(sections) or 'it'} has {', '.join(known)}" if known else "there is no such section"
        raise SettingError(f"--set {shown(key)}: {paper.key} has no such setting; {there}")
    found |= {"value": value, "source": "ours"}


def _value(text: str) -> Any:
    """A value as a TOML file has it; a word needs no quotes."""
    try:
        return toml.parse(f"value = {text}")["value"]
    except toml.TomlError:
        return text


def _problems(error: ValueError) -> str:
    """What pydantic found, each with the key that it is about."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())


def note(results_dir: Path, settings: Sequence[str]) -> None:
    """Hold a results folder for runs with these settings alone. Raises `ResultsError` where it has others."""
    there = noted(results_dir)
    asked = sorted(settings)
    if there is None and not asked:
        return
    if there is None and any((results_dir / name).exists() for name in ("raw", archive.NAME, COMMITTED)):
        raise ResultsError(
            f"{results_dir} holds runs of the studies as they are: give --results with a new folder for --set"
        )
    if there is not None and there != asked:
        raise ResultsError(
            f"{results_dir} holds runs with --set {' '.join(there)}: give the same, or another folder with --results"
        )
    if there is None:
        results_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(results_dir / NOTE, json.dumps(asked) + "\n")


def noted(results_dir: Path) -> list[str] | None:
    """The settings that the runs of a results folder have in the place of the studies' own; None: no others."""
    try:
        found = json.loads((results_dir / NOTE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{results_dir / NOTE} cannot be read: {error}") from None
    if not isinstance(found, list):
        raise ResultsError(f"{results_dir / NOTE} is damaged: expected a list of settings")
    return [str(item) for item in found]


def refuse_archive(results_dir: Path) -> None:
    """Raise `ResultsError` for a folder with such a note: an archive has none, and would pass for the study's runs."""
    if settings := noted(results_dir):
        raise ResultsError(
            f"{results_dir} holds runs with --set {' '.join(settings)}, which an archive does not say: keep the folder"
        )


def refuse(results_dir: Path) -> None:
    """Raise `ResultsError` for a folder whose runs no report may show as the studies'."""
    if settings := noted(results_dir):
        raise ResultsError(
            f"{results_dir} holds runs with --set {' '.join(settings)}, not those of the study. Its tables are in "
            f"{results_dir / 'tidy'}; for a report write the settings into a paper file of your own (CONTRIBUTING.md)"
        )
