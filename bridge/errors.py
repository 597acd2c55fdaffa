"""Errors that a user of TwinGrad can act on.

The command line prints their message without a traceback and ends with their `exit_code`: 2 for something
the user can put right, 1 for a run that failed. py_engine, which knows nothing of this package, has a base of
its own (`py_engine.errors.EngineError`).
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence

__all__ = [
    "EngineUnavailableError",
    "JuliaError",
    "JuliaUnavailableError",
    "SpecError",
    "TwinGradError",
    "WeightsError",
    "WorkerError",
    "printable",
    "shown",
    "suggestion",
]

_SHOWN = 10
MOST_COUNTED = 100
"""How many problems of one file are looked for; of more it is said that there are more."""

_LONGEST = 80
"""Characters of the user's own text that a message repeats."""

_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""What a terminal obeys or hides instead of showing it; line feeds apart, which messages have themselves."""


class TwinGradError(Exception):
    """Base of all errors raised on purpose outside the engines."""

    exit_code = 2


class _FileError(TwinGradError):
    """Base of those that name a file and every problem in it."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(summary(source, self.problems))


class SpecError(_FileError):
    """A model spec that cannot be used: names the file and every problem in it."""


class WeightsError(_FileError):
    """Weights that cannot be read or written, or are not the model's: names the file and the tensors."""


class EngineUnavailableError(TwinGradError):
    """An engine that is unknown, or that this environment lacks the packages for."""


class WorkerError(TwinGradError):
    """A worker process that died or failed: carries what it last said."""

    exit_code = 1


class JuliaError(TwinGradError):
    """An exception in Julia code, with Julia's own message, or a call that Julia could not be asked to do."""

    exit_code = 1


class JuliaUnavailableError(EngineUnavailableError, JuliaError):
    """No Julia that works here, or none that this process can start: says why, and what to do."""

    exit_code = 2


def shown(value: object) -> str:
    """The user's own value as a message repeats it: on one line, cut where it is long, control characters escaped."""
    if isinstance(value, str):
        cut = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
        return printable(repr(cut))
    return printable(_SHORT.repr(value))


def printable(text: str) -> str:
    """A message with its control characters escaped, so that nothing in it moves the cursor or hides the rest."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message on an unknown name: the known one that it may be meant for, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class _Short(reprlib.Repr):
    """`repr` of anything, in bounded time and length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST

    def repr_int(self, value: int, level: int) -> str:
        digits = int(value.bit_length() * 0.30103) + 1
        return repr(value) if digits <= _LONGEST else f"a whole number of {digits:,} digits"


_SHORT = _Short()


def summary(source: str, problems: Sequence[str]) -> str:
    """One line for one problem of `source`; an indented list for several."""
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    many = len(problems) > MOST_COUNTED
    count = f"more than {MOST_COUNTED}" if many else str(len(problems))
    lines = [f"{source}: {count} problems", *problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append("and more" if many else f"and {len(problems) - _SHOWN} more")
    return "\n  ".join(lines)
