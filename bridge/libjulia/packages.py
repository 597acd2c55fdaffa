"""Julia packages of the user's that an engine needs: whether Julia has one, found out without starting it each time.

Looked for where Julia itself looks: the folders and environments that JULIA_LOAD_PATH names, or else the environment of
Julia's own version in its depots. What is there is loaded once, in its own process; what came of it is remembered
until the environment changes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge import toml
from bridge.child import completed, ending, was_killed
from bridge.files import expanded
from bridge.libjulia import engine
from bridge.libjulia.find import OLDEST, Julia, Memory
from bridge.libjulia.start import status

__all__ = ["Package", "lacks", "package", "versions"]

LOADING_SECONDS = 1200.0
"""A package with all that it needs may be compiled now."""

_LAST_LINES = 5


@dataclass(frozen=True)
class Package:
    """A package that Julia has, or what keeps it from having it."""

    version: str
    problem: str
    """What is wrong, and what to do; empty when the package can be used."""


def package(name: str, needs: tuple[str, ...] = (), oldest: tuple[int, int] = OLDEST) -> Package:
    """What Julia here makes of the package `name`, which must have the names in `needs`.

    `oldest` is the release of Julia that such a version of the package needs.
    """
    known = status()
    julia = known.julia
    if julia is None or known.obstacle:
        return Package("", known.obstacle)
    if julia.release < oldest:
        wanted = ".".join(map(str, oldest))
        return Package(
            "",
            # Without the package's name, so that one line can say it of many.
            f"needs Julia {wanted} or later, found {julia.version}: name one that has it in TWINGRAD_JULIA",
        )
    place = next(_places(julia, name), None)
    install = f"{julia.executable} -e 'import Pkg; Pkg.add(\"{name}\")'"
    if place is None:
        return Package("", f"Julia {julia.version} has no package {name}: {install}")
    memory = Memory()
    key = "package", name, *needs, julia.executable, str(place), str(place.stat().st_mtime_ns)
    found = memory.recall(*key)
    if not isinstance(found, list) or len(found) != 2:
        found, stays = _load(julia, name, needs)
        if stays:
            memory.note(*key, value=found)
    version, problem = map(str, found)
    advice = f". {name} is named in {place}; to install it anew: {install}"
    return Package(version, problem and f"Julia {julia.version} can't use its package {name}: {problem}{advice}")


def lacks(needs: Mapping[str, tuple[str, ...]], oldest: tuple[int, int]) -> str:
    """What keeps an engine from all the packages that it is made of; empty when all can be used.

    `needs` has for each of them the names that it must have.
    """
    found = (package(name, names, oldest) for name, names in needs.items())
    return next((one.problem for one in found if one.problem), "")


def versions(needs: Mapping[str, tuple[str, ...]], oldest: tuple[int, int]) -> dict[str, str]:
    """Of these packages, and of the Julia that they run in."""
    return {name.lower(): package(name, names, oldest).version for name, names in needs.items()} | engine.versions()


def _places(julia: Julia, name: str) -> Iterator[Path]:
    """The files that say that Julia has the package."""
    for entry in _load_path(julia):
        source = entry / name / "src" / f"{name}.jl"
        if os.path.isfile(source):  # False where it may not be looked at, which Path.is_file raises for
            yield source
        project = entry if entry.suffix == ".toml" else entry / "Project.toml"
        if os.path.isfile(project) and _names(project, name):
            manifest = project.with_name("Manifest.toml")
            yield manifest if os.path.isfile(manifest) else project


def _load_path(julia: Julia) -> Iterator[Path]:
    depots = [expanded(depot) for depot in os.environ.get("JULIA_DEPOT_PATH", "").split(os.pathsep) if depot]
    own = f"v{julia.release[0]}.{julia.release[1]}"
    for entry in (os.environ.get("JULIA_LOAD_PATH") or os.pathsep).split(os.pathsep):
        if entry and not entry.startswith("@"):
            yield expanded(entry)
        elif entry in ("", "@v#.#", f"@{own}"):
            yield from (depot / "environments" / own for depot in [*depots, expanded("~/.julia")])


def _names(project: Path, name: str) -> bool:
    try:
        dependencies = toml.parse(toml.read(project)).get("deps")
    except toml.TomlError:
        return False
    return isinstance(dependencies, dict) and name in dependencies


def _load(julia: Julia, name: str, needs: tuple[str, ...]) -> tuple[list[str], bool]:
    """The version and no problem, or the problem; and whether it would be so another time, with more time or memory."""
    lacks = "".join(f'isdefined({name}, Symbol("{need}")) || println("lacks\\t{need}"); ' for need in needs)
    code = (
        f'import {name}; {lacks}file = joinpath(dirname(dirname(pathof({name}))), "Project.toml"); '
        'isfile(file) && foreach(l -> startswith(l, "version") && println(l), eachline(file))'
    )
    command = [julia.executable, "--startup-file=no", "-e", code]
    try:
        done = completed(command, julia.environment(1), LOADING_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ["", f"Julia could not be asked ({error})"], False
    if done.returncode:
        said = " / ".join(done.stderr.strip().splitlines()[:_LAST_LINES])
        return ["", f"loading it {ending(done.returncode)}: {said}"], not was_killed(done.returncode)
    lines = done.stdout.splitlines()
    lacking = [line.partition("\t")[2] for line in lines if line.startswith("lacks\t")]
    if lacking:
        return ["", f"it is too old or too new, and lacks {', '.join(lacking)}"], True
    versions = [line.partition("=")[2].strip().strip('"') for line in lines if line.startswith("version")]
    return [versions[0] if versions else "unknown", ""], True
