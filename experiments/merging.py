"""One results folder out of several: `twingrad merge A B ... --results DIR`.

Raw records are copied as they are, and nothing that is in the folder already is overwritten. What conflicts with what
is there is named, and left where it was: two finished runs under one key with different results (the key says that they
should be the same run), and records that are damaged or whose hashes are not those of what they say. A finished run
takes the place of a failed one, which is kept in the folder `replaced`. Runs of one job on several machines are no
conflict: reports pool their accuracies and show their times apart. Nor are those of one job and machine from different
sources, of which reports show the newest; a note names them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import TwinGradError
from experiments import archive, changed, records
from experiments.results import SCHEMA, Record, Results, hashes


class MergeError(TwinGradError):
    """Results that cannot be merged: names which, and why."""


@dataclass
class Merged:
    """What came of a merge: the numbers of records, and in words what was not copied and why."""

    added: int = 0
    same: int = 0
    failed: int = 0
    """Failed runs left out, since a finished one is there."""
    replaced: int = 0
    conflicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """For programs."""
        numbers = {name: getattr(self, name) for name in ("added", "same", "failed", "replaced")}
        texts = [{"kind": "conflict", "what": text} for text in self.conflicts]
        return [{"kind": "merged", **numbers}, *texts, *({"kind": "note", "what": text} for text in self.notes)]


def found_in(source: Path) -> dict[str, tuple[str, bytes | records.DamagedError]]:
    """The raw records of a results folder, with its archive, or of an archive: their places and bytes by key.

    A file that cannot be read has the reason in the place of its bytes. Raises MergeError for what is neither a folder
    nor an archive, and where there is no record.
    """
    if source.is_dir():
        results = Results(source)
        packed = archive.read(results.archive) if results.archive.is_file() else {}
        found: dict[str, tuple[str, bytes | records.DamagedError]]
        found = {key: (f"{results.archive}/{key}.json", content) for key, content in packed.items()}
        for path in sorted(results.raw.glob("*.json")):
            try:
                found[path.stem] = str(path), records.content_of(path)
            except records.DamagedError as error:
                found[path.stem] = str(path), error
    elif source.is_file():
        found = {key: (f"{source}/{key}.json", content) for key, content in archive.read(source).items()}
    else:
        raise MergeError(f"{source}: neither a results folder nor an archive of raw records")
    if not found:
        raise MergeError(f"{source}: no raw records in it; expected a results folder or an archive of raw records")
    return found


def check(sources: Sequence[Path], results: Results) -> None:
    """Raise where runs with other settings (`--set`) would be mixed with those of the studies, or with others."""
    noted = {source: changed.noted(source) if source.is_dir() else None for source in sources}
    of_target = changed.noted(results.root)
    if of_target is not None or (results.raw.is_dir() and any(results.raw.glob("*.json"))):
        noted[results.root] = of_target
    if len({tuple(settings or ()) for settings in noted.values()}) > 1:
        told = "; ".join(f"{place}: {' '.join(settings) if settings else 'none'}" for place, settings in noted.items())
        raise MergeError(f"runs with different --set are not merged: {told}")
    for settings in noted.values():
        if settings:
            changed.note(results.root, settings)


def merge(sources: Sequence[Path], results: Results) -> Merged:
    """Copy the raw records of sources into a folder that the caller has locked."""
    found = {source: found_in(source) for source in sources}
    merged = Merged()
    for source, contents in found.items():
        later = older = 0
        for key, (place, content) in contents.items():
            try:
                if isinstance(content, records.DamagedError):
                    raise content
                record = sound(content, key)
            except records.DamagedError as error:
                merged.conflicts.append(f"{place} is damaged: {error}")
                continue
            if record is None:
                later += 1
            elif record["schema"] < SCHEMA:
                older += 1
            else:
                _put(record, place, content, results, merged)
        for count, words in ((older, "an older release, which have no job to match by"), (later, "a later release")):
            if count:
                merged.notes.append(f"{source}: {count} records of {words}: left out")
    merged.notes += _several_sources(results.records())
    return merged


def sound(content: bytes, key: str) -> Record | None:
    """The record in these bytes, of this release or an older one; None for one of a later release.

    Raises `DamagedError` for what is none, and for one whose hashes are not those of what it says.
    """
    record = records.parse(content, key, range(1, SCHEMA + 1))
    if record is not None and record["schema"] == SCHEMA:
        asked, decided_by = record.get("asked"), record.get("decided_by")
        try:
            made = hashes(asked, decided_by) if isinstance(asked, dict) and isinstance(decided_by, dict) else {}
        except RecursionError:
            raise records.DamagedError("what it says was asked is nested too deeply") from None
        if (made.get("key"), made.get("job")) != (key, record["job"]):
            raise records.DamagedError("its key is not the hash of what it says was asked and decided it")
        if lacking := [name for name in ("study", "measure", "threads", "profile") if name not in record["asked"]]:
            raise records.DamagedError(f"asked: lacks {', '.join(lacking)}")
    return record


def _put(record: Record, place: str, content: bytes, results: Results, merged: Merged) -> None:
    """Copy one record, unless something is there."""
    path = results.raw / f"{record['key']}.json"
    there = results.load(record["key"])
    if there is None and os.path.lexists(path):
        merged.conflicts.append(f"{place}: not copied, since {path} is of another release")
    elif there is None:
        results.put(record["key"], content)
        merged.added += 1
    elif there == json.loads(content):
        merged.same += 1
    elif record["status"] != "ok":
        merged.failed += 1
    elif there["status"] != "ok":
        if os.path.lexists(path):
            records.set_aside(path, results.root, records.REPLACED)
        results.put(record["key"], content)
        merged.replaced += 1
    else:
        config = record["config"]
        merged.conflicts.append(
            f"{place}: not copied: {path} is the same run ({config['paper']}, {config['engine']}, {config['measure']}, "
            f"seed {config['seed']}) of {there['provenance']['created'][:16]}, this one of "
            f"{record['provenance']['created'][:16]}"
        )


def _several_sources(found: Sequence[Record]) -> Iterator[str]:
    """A note for each engine that was run in several states, of which a report shows the newest alone."""
    states: dict[tuple[str, str], dict[str, str]] = {}
    for record in found:
        if record["status"] == "ok" and "entrants" not in record:
            state = states.setdefault((record["config"]["paper"], record["config"]["engine"]), {})
            state[record["provenance"]["engine_digest"]] = record["provenance"]["commit"][:8]
    for (paper, engine), commits in states.items():
        if len(commits) > 1:
            shown = ", ".join(dict.fromkeys(commits.values()))
            states_of = f"{len(commits)} states of the source (commits {shown})"
            yield f"{paper}, {engine}: run in {states_of}: reports show the newest"
