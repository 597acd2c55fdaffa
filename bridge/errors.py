"""Errors that a user of TwinGrad can act on.

The command line prints their message without a traceback and ends with their `exit_code`: 2 for something
the user can put right, 1 for a run that failed. py_engine, which knows nothing of this package, has a base of
its own (`py_engine.errors.EngineError`).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "EngineUnavailableError",
    "JuliaError",
    "JuliaUnavailableError",
    "SpecError",
    "TwinGradError",
    "WeightsError",
    "WorkerError",
]

_SHOWN = 10


class TwinGradError(Exception):
    """Base of all errors raised on purpose outside the engines."""

    exit_code = 2


class SpecError(TwinGradError):
    """A model spec that cannot be used: names the file and every problem in it."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(summary(source, self.problems))


class WeightsError(TwinGradError):
    """Weights that cannot be read or written, or are not the model's: names the file and the tensors."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(summary(source, self.problems))


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


def summary(source: str, problems: Sequence[str]) -> str:
    """One line for one problem of `source`; an indented list for several."""
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    lines = [f"{source}: {len(problems)} problems", *problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more")
    return "\n  ".join(lines)
