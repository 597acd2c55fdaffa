"""Starting Julia in this process: with which of the two backends, decided once and reported.

juliacall is the first choice, where it has been seen to work on this machine with this Julia; otherwise libjulia is
embedded directly. It is seen in its own process, since a Julia that failed to start can't be started again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge import toml
from bridge.child import completed, ending, import_path, was_killed
from bridge.errors import JuliaUnavailableError
from bridge.libjulia import juliacall
from bridge.libjulia import sysimage as images
from bridge.libjulia.embedded import EmbeddedRuntime
from bridge.libjulia.find import INSTALL, Julia, Memory, find, resolved_by_juliapkg
from bridge.libjulia.juliacall import PROJECT_VARIABLE, JuliacallRuntime, Project
from bridge.libjulia.runtime import BACKENDS, EMBEDDED, JULIACALL, Runtime

__all__ = [
    "Status",
    "Verdict",
    "backend",
    "choose",
    "known_project",
    "remember_project",
    "runtime",
    "status",
    "verdict",
    "verify",
]

VARIABLE = "TWINGRAD_JULIA_BACKEND"
FORMER_VARIABLE = "TWINGRAD_JULIA_WAY"
"""What it was called; read where the other is not set."""

_NO_PROJECT = f"PythonCall.jl is not set up: {INSTALL}"

VERIFICATION_SECONDS = 600.0
"""PythonCall.jl is compiled when it is loaded for the first time, which takes minutes on a slow machine."""

# Run in its own process, with the modules of this one. What it prints last is for `verify`.
_VERIFICATION = """
import json, sys
start = json.loads(sys.argv[1])
sys.path[:] = start["path"]
from bridge.errors import TwinGradError
from bridge.libjulia.start import demonstrate
try:
    demonstrate(start["backend"], start["julia"], start["project"])
except TwinGradError as error:
    sys.exit(str(error))
"""

_runtime: Runtime | None = None
_settings: dict[str, Any] = {}


@dataclass(frozen=True)
class Status:
    """What is known of Julia on this machine, without starting it in this process."""

    julia: Julia | None
    problem: str
    """Why there is none, and what to do; empty when there is one."""
    backends: dict[str, Verdict | None]
    """For each backend whether it works; None where nobody has tried yet (`bridge.julia.install` does)."""

    @property
    def obstacle(self) -> str:
        """Why Julia can't be used from this Python, as far as that is known; empty when nothing speaks against it."""
        failed = {name: seen.reason for name, seen in self.backends.items() if seen is not None and not seen.ok}
        if self.problem or not failed or len(failed) < len(self.backends):
            return self.problem
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        return f"{self.julia} works, but can't be started from this Python: {reasons}. To try again: {INSTALL} --again"


@dataclass(frozen=True)
class Verdict:
    """Whether a backend works with a Julia, on this machine and in this Python environment."""

    ok: bool
    reason: str
    """Why not; empty when it does."""


def runtime(threads: int | None = None, backend: str | None = None, sysimage: str | None = None) -> Runtime:
    """Julia in this process: started by the first call, which must come from the main thread; the same ever after.

    `threads`: how many threads Julia has (default: `JULIA_NUM_THREADS`, or 1). `backend`: "juliacall" or "embedded"
    (default: `TWINGRAD_JULIA_BACKEND`, or the best that works here). `sysimage`: the file of a system image of this
    Julia (default, when embedded: the one that `bridge.libjulia.sysimage` finds, if it fits, or Julia's own).
    Raises `JuliaUnavailableError` when Julia can't be started here, or runs already but not as asked for.
    """
    global _runtime
    if _runtime is not None:
        _check_same(threads, backend, sysimage)
        return _runtime
    variable, asked = _asked()
    wanted = backend or asked
    if wanted is not None and wanted not in BACKENDS:
        named = f"backend={backend!r}" if backend else f"{variable}={wanted}"
        raise JuliaUnavailableError(f"{named}: expected one of {', '.join(BACKENDS)}")
    joined = juliacall.running()
    count = 1 if joined and threads is None else _thread_count(threads)
    julia = find()
    memory = Memory()
    if joined:
        if wanted == EMBEDDED:
            raise JuliaUnavailableError("Julia runs in this process already, started by juliacall: use that backend")
        chosen, notes = JULIACALL, ["juliacall had started Julia in this process"]
    elif wanted is not None:
        chosen, notes = wanted, [f"{wanted} was asked for"]
    else:
        chosen, notes = choose(julia, memory)
    if chosen == JULIACALL:
        project = known_project(julia, memory)
        if not juliacall.running():
            reason = juliacall.obstacle(julia) or (_NO_PROJECT if project is None else None)
            if reason is not None:  # juliacall itself would download what it lacks
                raise JuliaUnavailableError(reason)
        _runtime = JuliacallRuntime(julia, count, project, notes, sysimage)
        count = int(_runtime.evaluate("Threads.nthreads()") or count)
    else:
        if sysimage is None:
            sysimage, note = images.usable(julia)
            notes = [*notes, note] if note else notes
        _runtime = EmbeddedRuntime(julia, count, notes, sysimage)
    _settings.update(threads=count, sysimage=sysimage)
    if joined:
        _check_same(threads, backend, sysimage)
    elif threads is not None and count < threads:
        raise JuliaUnavailableError(
            f"juliacall started Julia with {count} of {threads} threads that were asked for: PYTHON_JULIACALL_THREADS "
            "says so, or there are no more cores; change it, or ask for as many"
        )
    return _runtime


def started() -> bool:
    """Whether `runtime` has started or joined Julia in this process."""
    return _runtime is not None


def status() -> Status:
    """See `Status`. Takes a second where a Julia is looked at for the first time; raises nothing."""
    try:
        julia = find()
    except JuliaUnavailableError as error:
        return Status(None, str(error), dict.fromkeys(BACKENDS))
    memory = Memory()
    backends: dict[str, Verdict | None] = {}
    for name in BACKENDS:
        reason = juliacall.obstacle(julia) if name == JULIACALL else None
        try:
            backends[name] = verdict(name, julia, memory) if reason is None else Verdict(False, reason)
        except JuliaUnavailableError as error:  # a project that is not there
            backends[name] = Verdict(False, str(error))
    return Status(julia, "", backends)


def choose(julia: Julia, memory: Memory) -> tuple[str, list[str]]:
    """The backend for this Julia, and why not the other one; what isn't known yet is found out."""
    reason = juliacall.obstacle(julia)
    if reason is None and known_project(julia, memory) is None:
        reason = _NO_PROJECT
    if reason is None:
        seen = verdict(JULIACALL, julia, memory) or verify(JULIACALL, julia, memory)
        if seen.ok:
            return JULIACALL, []
        reason = seen.reason
    return EMBEDDED, [f"not through juliacall: {reason}"]


def backend(julia: Julia) -> str | None:
    """The backend of this Julia in a new process, the one asked for or the one that works; None: nobody has tried."""
    if asked := _asked()[1]:
        return asked
    memory = Memory()
    try:
        if juliacall.obstacle(julia) is not None or known_project(julia, memory) is None:
            return EMBEDDED
        seen = verdict(JULIACALL, julia, memory)
    except JuliaUnavailableError:  # whoever starts Julia gets this error
        return None
    return None if seen is None else JULIACALL if seen.ok else EMBEDDED


def _asked() -> tuple[str, str | None]:
    """The environment variable that names a backend, and which; None where none does."""
    for name in (VARIABLE, FORMER_VARIABLE):
        if named := os.environ.get(name):
            return name, named
    return VARIABLE, None


def verdict(backend: str, julia: Julia, memory: Memory) -> Verdict | None:
    """What is known of a backend from before; None: nothing yet."""
    match memory.recall(*_key(backend, julia, memory)):
        case {"ok": bool(ok), "reason": str(reason)}:
            return Verdict(ok, reason)
    return None


def verify(backend: str, julia: Julia, memory: Memory) -> Verdict:
    """Start Julia by this backend in another process, with two threads, see it compute, throw and end; remembered."""
    if backend == JULIACALL and (reason := juliacall.obstacle(julia)) is not None:
        return Verdict(False, reason)
    project = known_project(julia, memory)
    start = {
        "path": import_path(),
        "backend": backend,
        "julia": dataclasses.asdict(julia),
        "project": dataclasses.asdict(project) if project else None,
    }
    try:
        done = completed([sys.executable, "-c", _VERIFICATION, json.dumps(start)], timeout=VERIFICATION_SECONDS)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"{backend} was not ready after {VERIFICATION_SECONDS:.0f} seconds")
    if done.returncode == 0:
        seen = Verdict(True, "")
    else:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        seen = Verdict(False, f"{backend} {ending(done.returncode)}: {said[-1] if said else 'no message'}")
    if not was_killed(done.returncode):  # for want of memory, perhaps: it may be otherwise another time
        memory.note(*_key(backend, julia, memory), value=dataclasses.asdict(seen))
    return seen


def demonstrate(backend: str, julia: dict[str, Any], project: dict[str, str] | None) -> None:
    """What `verify` runs: raises, or ends the process, where a backend does not work."""
    from ctypes import c_int

    facts = Julia(**julia | {"preload": tuple(julia["preload"])})
    here: Runtime
    if backend == JULIACALL:
        here = JuliacallRuntime(facts, 2, Project(**project) if project else None)
    else:
        here = EmbeddedRuntime(facts, 2)
    found = here.evaluate("string(VERSION)")
    if found != facts.version:
        raise JuliaUnavailableError(f"{backend} leads to Julia {found}, not to {facts}")
    if here.evaluate("TwinGradRuntime.catches()") is not True:
        raise JuliaUnavailableError("exceptions are not caught")
    if here.function_pointer("TwinGradRuntime.successor_pointer", [c_int], c_int)(41) != 42:
        raise JuliaUnavailableError("an entry point computes something else")


def known_project(julia: Julia, memory: Memory) -> Project | None:
    """The project with PythonCall.jl for this Julia: the one that the user names, or that was set up in this Python."""
    if named := os.environ.get(PROJECT_VARIABLE):
        if not os.path.isdir(named):
            raise JuliaUnavailableError(f"{PROJECT_VARIABLE}={named} names no folder: correct it, or unset it")
        return Project(julia.executable, named)
    match memory.recall("project", julia.executable, sys.prefix):
        case {"executable": str(executable), "project": str(project)} if os.path.isdir(project):
            return Project(executable, project)
    resolved = resolved_by_juliapkg()
    if resolved is not None and resolved[0] == julia.executable and _has_pythoncall(resolved[1]):
        return Project(*resolved)
    return None


def _has_pythoncall(project: str) -> bool:
    try:
        return "PythonCall" in toml.parse(toml.read(Path(project) / "Project.toml")).get("deps", {})
    except toml.TomlError:
        return False


def remember_project(julia: Julia, memory: Memory, project: Project) -> None:
    """Keep what `juliacall.prepare` made."""
    memory.note("project", julia.executable, sys.prefix, value=dataclasses.asdict(project))


def _key(backend: str, julia: Julia, memory: Memory) -> tuple[str, ...]:
    key = ("verdict", backend, julia.executable, julia.version, sys.prefix, platform.python_version())
    if backend == EMBEDDED:
        return key
    project = known_project(julia, memory)
    return (*key, juliacall.version() or "", project.project if project else "")


def _thread_count(threads: int | None) -> int:
    if threads is None:
        setting = (os.environ.get("JULIA_NUM_THREADS") or "1").strip()
        count, comma, interactive = setting.partition(",")  # Julia 1.9 and later have a pool for interactive tasks
        is_pool = not comma or interactive == "auto" or interactive.isdecimal()
        if count == "auto" and is_pool:
            return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if not count.removeprefix("-").isdecimal() or not is_pool:
            raise JuliaUnavailableError(
                f"JULIA_NUM_THREADS={setting}: expected a number of threads or auto, with or without those of the "
                "interactive pool, such as 4,1"
            )
        return max(1, int(count))  # as Julia has it
    if threads < 1:
        raise JuliaUnavailableError(f"Julia needs at least 1 thread, found threads={threads}")
    return threads


def _check_same(threads: int | None, backend: str | None, sysimage: str | None) -> None:
    assert _runtime is not None
    asked = {"threads": threads, "backend": backend, "sysimage": sysimage}
    there = {**_settings, "backend": _runtime.backend}
    for name, value in asked.items():
        # Julia that juliacall has started may have more threads than are asked for.
        enough = name == "threads" and _runtime.backend == JULIACALL and value is not None and value <= there[name]
        if value is not None and value != there[name] and not enough:
            raise JuliaUnavailableError(
                f"Julia runs in this process already, with {name}={there[name]!r}: {name}={value!r} needs a new process"
            )
