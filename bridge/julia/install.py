"""Setting Julia up for TwinGrad: ``python -m bridge.julia.install``.

Finds a Julia that works, or has juliapkg install one for this user alone. Then both backends, which start it from
Python, are tried, and all of it is remembered, so that a second call has nothing to do. A checkout has recipes for
machines that can't reach Julia's own servers: ``python -m contrib.julia``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from bridge.errors import JuliaUnavailableError, TwinGradError
from bridge.libjulia import find as finding
from bridge.libjulia import juliacall, start
from bridge.libjulia.environment import kernels_for
from bridge.libjulia.find import Julia, Memory
from bridge.libjulia.juliacall import Project
from bridge.libjulia.runtime import EMBEDDED, JULIACALL

__all__ = ["RECIPES", "Recipe", "main", "say", "set_up"]

OFFLINE_VARIABLE = "TWINGRAD_OFFLINE"

RECIPES = "python -m contrib.julia"
"""The command of a checkout that has more ways to install one."""

Say = Callable[[str], None]

say: Say = partial(print, flush=True)
"""Prints a line of progress at once."""

Recipe = Callable[[Memory, Say], tuple[Julia, Project | None]]
"""Installs a Julia and proves it. Raises `JuliaUnavailableError` with the reason when it can't."""


def set_up(say: Say = print, again: bool = False, recipes: Sequence[Recipe] = ()) -> Julia:
    """Find or install a Julia, see which backends work, remember it and return it; `say` gets lines of progress.

    With `again`, what was remembered is forgotten first. The recipes are tried where juliapkg can't install one.
    Raises `JuliaUnavailableError` when nothing works.
    """
    memory = Memory()
    if again:
        memory.forget()
    julia, project = _find_or_install(memory, say, recipes)
    say(f"{julia}")
    say(f"  {_describe_blas(julia)}")
    backends = _backends(julia, memory, project, say)
    if not any(seen.ok for seen in backends.values()):
        reasons = "".join(f"\n  {name}: {seen.reason}" for name, seen in backends.items())
        raise JuliaUnavailableError(f"{julia} works, but can't be started from this Python:{reasons}")
    return julia


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Ends with 0 when a Julia is ready, with 2 when there is none."""
    parser = argparse.ArgumentParser(prog=finding.INSTALL, description="Find or install a Julia for TwinGrad.")
    parser.add_argument("--again", action="store_true", help="forget what is remembered, and look and try afresh")
    parser.add_argument("--path", action="store_true", help="print the program's path and nothing else")
    options = parser.parse_args(arguments)
    try:
        julia = set_up((lambda line: None) if options.path else say, options.again)
    except TwinGradError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.path:
        print(julia.executable)
    return 0


def _find_or_install(memory: Memory, say: Say, recipes: Sequence[Recipe]) -> tuple[Julia, Project | None]:
    try:
        return finding.find(), None
    except JuliaUnavailableError as error:
        if finding.named() or finding.running():
            raise
        say(str(error).splitlines()[0])
    if _offline():
        raise JuliaUnavailableError(
            f"no Julia that works, and {OFFLINE_VARIABLE} forbids to install one: unset it, or name one in "
            f"{finding.VARIABLE}"
        )
    say("installing one, for you alone")
    problems = []
    for install in (_from_juliapkg, *recipes):
        try:
            julia, project = install(memory, say)
        except JuliaUnavailableError as error:
            problems.append(str(error))
            say(f"  failed: {error}")
            continue
        memory.choose(julia)
        return julia, project
    raise JuliaUnavailableError(
        "no Julia could be installed:"
        + "".join(f"\n  {problem}" for problem in problems)
        + f"\nInstall Julia {'.'.join(map(str, finding.OLDEST))} or later by hand, and put it on PATH or name it in "
        f"{finding.VARIABLE}"
        + ("" if recipes else f"; a checkout of TwinGrad can install that of Debian 11: {RECIPES}")
    )


def _from_juliapkg(memory: Memory, say: Say) -> tuple[Julia, Project | None]:
    say("asking juliapkg, which downloads Julia (some minutes)")
    project = juliacall.prepare(say=lambda line: say(f"  {line}"))
    return memory.prove(project.executable, "juliapkg"), project


def _backends(julia: Julia, memory: Memory, project: Project | None, say: Say) -> dict[str, start.Verdict]:
    reason = juliacall.obstacle(julia) or _prepare_project(julia, memory, project, say)
    seen = {}
    for backend in (JULIACALL, EMBEDDED):
        known = start.verdict(backend, julia, memory)
        if known is not None and known.ok:
            seen[backend] = known
        elif backend == JULIACALL and reason is not None:  # without a project juliacall would try to download one
            seen[backend] = start.Verdict(False, reason)
        else:
            seen[backend] = start.verify(backend, julia, memory)
        say(f"  {backend}: {'works' if seen[backend].ok else seen[backend].reason}")
    return seen


def _prepare_project(julia: Julia, memory: Memory, project: Project | None, say: Say) -> str | None:
    """PythonCall.jl for juliacall; the reason where there is none. Without it the other backend remains."""
    if start.known_project(julia, memory) is not None:
        return None
    if project is None and _offline():
        return f"PythonCall.jl is not set up, and {OFFLINE_VARIABLE} forbids to download it"
    try:
        if project is None:
            say("  asking juliapkg for PythonCall.jl (some minutes)")
            project = juliacall.prepare(julia.executable, lambda line: say(f"    {line}"))
        start.remember_project(julia, memory, project)
    except JuliaUnavailableError as error:
        return str(error)
    return None


def _offline() -> bool:
    return os.environ.get(OFFLINE_VARIABLE, "").lower() not in ("", "0", "false", "no")


def _describe_blas(julia: Julia) -> str:
    if not julia.kernels:
        return julia.blas
    if users := os.environ.get("OPENBLAS_CORETYPE"):
        return f"{julia.blas}, with the kernels that OPENBLAS_CORETYPE names: {users}"
    if (better := kernels_for(julia.kernels)) is not None:
        return f"{julia.blas}, set to use its kernels for {better} (it would take those for {julia.kernels})"
    return f"{julia.blas}, kernels for {julia.kernels}"


if __name__ == "__main__":
    sys.exit(main())
