"""What a command says: text for people on the console, and the same as JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from bridge.errors import TwinGradError, printable
from bridge.files import descriptor, obstacle
from experiments import provenance
from experiments.errors import write
from experiments.results import plain

SCHEMA = 1
STDOUT = "-"
PATIENCE = 1.0
"""Seconds of waiting after which it is said what for."""


class OutputError(TwinGradError):
    """The file that a command should write its output to cannot be written."""


class Output:
    """Collects `rows` and `errors` while a command prints to `console`; `write` makes the JSON file of them.

    With `-` (or `/dev/stdout`) as the target the JSON goes to standard output, and everything for people to standard
    error.
    """

    def __init__(self, command: str, target: str | None = None) -> None:
        self.command = command
        self.target = STDOUT if target is not None and descriptor(Path(target)) == 1 else target  # as /dev/stdout
        self.console = Console(stderr=self.target == STDOUT, highlight=False, soft_wrap=True)
        if self.console.width < 1:  # COLUMNS=0, with which nothing would be printed
            self.console.width = 80
        self.rows: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.failed = False
        if self.target not in (None, STDOUT):
            check_place("--json", Path(str(target)), OutputError)

    def say(self, text: str = "") -> None:
        """Print a line for people."""
        self.console.print(printable(text), markup=False)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Print a line as soon as the block has taken over `PATIENCE` seconds."""

        failed: list[BaseException] = []

        def say() -> None:
            try:
                self.say(text)
            except (OSError, SystemExit) as error:  # such as where nobody reads the output any more
                failed.append(error)

        timer = threading.Timer(PATIENCE, say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
        if failed:
            raise failed[0]

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows for programs."""
        self.rows += rows

    def fail(self, message: str) -> None:
        """Record something that went wrong while the rest continues; the command then ends with code 1."""
        self.errors.append(message)
        self.failed = True

    def document(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "provenance": provenance.summary(),
            "rows": plain(self.rows),
            "errors": self.errors,
        }

    def write(self) -> None:
        """Write the JSON where the user asked for it, whole or not at all."""
        if self.target is None:
            return
        text = json.dumps(self.document(), indent=1, ensure_ascii=self.target == STDOUT, allow_nan=False) + "\n"
        if self.target == STDOUT:
            if sys.stdout is None:  # as with >&-
                raise OutputError("--json -: there is no standard output; name a file")
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        write(Path(self.target), text, OutputError, "--json with another file")


def check_place(option: str, path: Path, failure: type[TwinGradError]) -> None:
    """Raise `failure` where no file can be written at `path`, before a long run that would write it at its end."""
    reason = obstacle(path)
    if reason is not None:
        raise failure(f"{option}: cannot write {path}: {reason}; give a file in an existing folder with write access")


def check_apart(
    written: Mapping[str, Path | str | None], read: Mapping[str, Path | str | None], failure: type[TwinGradError]
) -> None:
    """Raise `failure` where one file would be written by two options, or by one and is read: each by its option."""
    places = {os.path.realpath(path): option for option, path in read.items() if path and os.path.isfile(path)}
    for option, path in written.items():
        if path is None:
            continue
        place = os.path.realpath(path)
        if place in places and (os.path.isfile(place) or not os.path.exists(place)):
            raise failure(f"{places[place]} and {option} name the same file, {path}: give two files")
        places[place] = option
