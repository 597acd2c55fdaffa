"""Finding a Julia on this machine, and proving that it works before anything relies on it.

    julia = find()
    print(julia.version, julia.executable)

Looked for in this order: the one that juliacall has started in this process; what `TWINGRAD_JULIA`,
`PYTHON_JULIACALL_EXE` or `PYTHON_JULIAPKG_EXE` names; the one that juliapkg has resolved; `julia` on PATH; the one that
`contrib.debian` unpacked. The first four must agree, and where there is one of them, nothing else is looked for.
With `TWINGRAD_CACHE` set to another folder, those that were installed or used without the setting come last. A Julia
counts when it is 1.5 or later, starts with threads, and throws and catches exceptions: a mismatched system library can
make every exception end in a segmentation fault. What a proof found is remembered until the files change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bridge.child import completed, ending, was_killed
from bridge.errors import JuliaUnavailableError
from bridge.files import expanded, write_atomically
from bridge.libjulia.environment import cache_folder, settings

__all__ = [
    "INSTALL",
    "OLDEST",
    "RUNNING",
    "Julia",
    "Memory",
    "find",
    "named",
    "own_executable",
    "prove",
    "resolved_by_juliapkg",
    "running",
]

OLDEST = (1, 5)
VARIABLE = "TWINGRAD_JULIA"
VARIABLES = (VARIABLE, "PYTHON_JULIACALL_EXE", "PYTHON_JULIAPKG_EXE")
"""Where a user may name a Julia: for TwinGrad, for juliacall, for juliapkg."""

RUNNING = "started by juliacall in this process"

INSTALL = "python -m bridge.julia.install"
"""The command that sets Julia up."""

PROOF_THREADS = 2
PROOF_SECONDS = 300.0
"""A Julia that was never started before, on a busy machine, may take a while."""

_PROBE = Path(__file__).with_name("probe.jl")
_LAST_LINES = 8

OWN_PREFIX = "debian-11"
"""The folder, in the cache, of the Julia that `contrib.debian` unpacks."""

_WITHOUT_SETTING = "found where TWINGRAD_CACHE is not set"

MANIFEST = "twingrad-julia.json"
"""The file that tells such a folder from others, written last into it."""


@dataclass(frozen=True)
class Julia:
    """A Julia that has been proved to work, and what embedding it takes."""

    executable: str
    """What to run; for TwinGrad's own, a script that names the folders of its libraries first."""
    source: str
    """How it was found: `RUNNING`, the name of a variable, "PATH", "juliapkg" or "installed by TwinGrad"; and, with
    `TWINGRAD_CACHE` set, whether it is one that was installed or used without the setting."""
    version: str
    bindir: str
    libjulia: str
    sysimage: str
    preload: tuple[str, ...]
    """Libraries to load before libjulia, which the system lacks or has in versions that don't fit."""
    blas: str
    """Its BLAS, with the version where that is known."""
    kernels: str
    """What this BLAS chooses for this CPU by itself; empty when it can't be asked."""

    @property
    def release(self) -> tuple[int, int, int]:
        """The version as numbers: (1, 10, 4)."""
        return _release(self.version)

    def environment(self, threads: int) -> dict[str, str]:
        """The environment to start `executable` in, as a separate process."""
        return dict(os.environ) | settings(threads, self.kernels)

    def __str__(self) -> str:
        return f"Julia {self.version} at {self.executable} ({self.source})"


def find() -> Julia:
    """The Julia to use. Raises `JuliaUnavailableError`, which says what was tried and what to do."""
    memory = Memory()
    wanted = [memory.prove(executable, source) for executable, source in _wanted()]
    for other in wanted[1:]:
        if other.bindir != wanted[0].bindir:
            raise JuliaUnavailableError(
                f"two Julias are wanted: {wanted[0]} and {other}; a process can have one. Let the settings name the "
                "same, or unset one of them"
            )
    if wanted:
        return wanted[0]
    problems = []
    for executable, source in _candidates():
        try:
            found = memory.prove(executable, source, again=False)
        except JuliaUnavailableError as error:
            problems.append(str(error))
            continue
        memory.choose(found)
        return found
    tried = "".join(f"\n  {problem}" for problem in problems) or " on PATH, by juliapkg, or of TwinGrad's own"
    raise JuliaUnavailableError(
        f"no Julia that works was found{':' if problems else ''}{tried}\nInstall one for TwinGrad with: {INSTALL}\n"
        f"or name one of {_dotted(OLDEST)} or later in {VARIABLE} (the program, or its folder)"
    )


class _PassingError(JuliaUnavailableError):
    """What kept a Julia from starting now may not do so the next time: it is not remembered."""


def prove(executable: str, source: str) -> Julia:
    """Start a Julia and let it show that it works; raises `JuliaUnavailableError` when it does not.

    Of a program that only starts the Julia which is chosen elsewhere, as juliaup's does, it is that Julia.
    """
    name = f"the Julia at {executable} ({source})"
    try:
        done = completed(
            [executable, "--startup-file=no", "--history-file=no", str(_PROBE)], _proof_environment(), PROOF_SECONDS
        )
    except OSError as error:
        raise _PassingError(f"{name} can't be started: {error.strerror or error}. {_advice(source)}") from None
    except subprocess.TimeoutExpired:
        raise _PassingError(f"{name} was not ready after {PROOF_SECONDS:.0f} seconds. {_advice(source)}") from None
    said, libraries = _read(done.stdout)
    version = said.get("version", "")
    if version and _release(version) < OLDEST:
        raise JuliaUnavailableError(
            f"{name} is too old: expected {_dotted(OLDEST)} or later, found {version}. {_advice(source)}"
        )
    if done.returncode or said.get("step", "start") != "":
        ended = ending(done.returncode)
        raise (_PassingError if was_killed(done.returncode) else JuliaUnavailableError)(
            f"{name} {ended} when it was to {said.get('step', 'start')}; it last said:{_last_lines(done.stderr)}"
            f"\n  {_advice(source)}"
        )
    if int(said["threads"]) != PROOF_THREADS and (os.cpu_count() or 1) >= PROOF_THREADS:
        raise JuliaUnavailableError(
            f"{name} was to start with {PROOF_THREADS} threads and has {said['threads']}. {_advice(source)}"
        )
    return Julia(
        executable=_started(executable, said["bindir"]),
        source=source,
        version=version,
        bindir=said["bindir"],
        libjulia=_libjulia(libraries, name, source),
        sysimage=said["sysimage"],
        preload=_preload(libraries, said["bindir"]),
        blas=said["blas"],
        kernels=said["kernels"],
    )


def _started(executable: str, bindir: str) -> str:
    """The program that runs when this one is started."""
    program = os.path.join(bindir, "julia")
    with contextlib.suppress(OSError):
        if not os.path.samefile(executable, program):
            return program
    return executable


@lru_cache(maxsize=8)
def _says_version(launcher: str, version: str) -> bool:
    """Whether this program still starts a Julia of that version."""
    try:
        done = completed([launcher, "--startup-file=no", "--version"], _proof_environment(), PROOF_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.split()[-1:] == [version]


def own_executable(cache: Path | None = None) -> str:
    """Where `contrib.debian` puts a Julia, in this cache or in another one."""
    return str((cache or cache_folder()) / OWN_PREFIX / "usr" / "bin" / "julia")


def running() -> str | None:
    """The Julia that juliacall has started in this process, if it has."""
    config = getattr(sys.modules.get("juliacall"), "CONFIG", {})
    return str(config["exepath"]) if config.get("inited") and config.get("exepath") else None


def named() -> str | None:
    """The first variable by which the user names a Julia, if there is one."""
    return next((name for name in VARIABLES if os.environ.get(name)), None)


def _wanted() -> Iterator[tuple[str, str]]:
    """Those that this process has, or that the user names, each with where."""
    if (running_here := running()) is not None:
        yield running_here, RUNNING
    for name in VARIABLES:
        if setting := os.environ.get(name):
            yield _named(setting, name), name


def _candidates() -> Iterator[tuple[str, str]]:
    if (resolved := resolved_by_juliapkg()) is not None:
        yield resolved[0], "juliapkg"
    if on_path := shutil.which("julia"):
        yield on_path, "PATH"
    yield from _installed(None, "installed by TwinGrad")
    with contextlib.suppress(OSError):
        default = cache_folder(with_setting=False)
        if default != cache_folder():
            if (kept := Memory(default).chosen()) is not None:
                yield kept.executable, f"{kept.source}, {_WITHOUT_SETTING}"
            yield from _installed(default, f"installed by TwinGrad, {_WITHOUT_SETTING}")


def _installed(cache: Path | None, source: str) -> Iterator[tuple[str, str]]:
    """TwinGrad's own in a cache, where it is whole."""
    with contextlib.suppress(OSError):
        own = own_executable(cache)
        if os.path.isfile(Path(own).parents[2] / MANIFEST):
            yield own, source


def _named(setting: str, variable: str) -> str:
    """The program that the user's setting means: a file, a folder that holds one, or a name on PATH."""
    path = expanded(setting)
    for program in (path, path / "bin" / "julia", path / "julia"):
        if os.path.isfile(program):  # False also where that may not be looked at, which Path.is_file raises for
            return str(program.absolute())
    if os.sep not in setting and (on_path := shutil.which(setting)):
        return on_path
    raise JuliaUnavailableError(
        f"{variable}={setting} names no Julia: expected the program, its folder, or a name on PATH. Correct it, or "
        "unset it to let TwinGrad look for one"
    )


def resolved_by_juliapkg() -> tuple[str, str] | None:
    """The Julia that juliapkg has set up for this Python, and its project; None where it has none.

    Read from what juliapkg has written: juliapkg itself waits for others that resolve, and may download.
    """
    project = _juliapkg_project()
    try:
        executable = json.loads((project / "pyjuliapkg" / "meta.json").read_text(encoding="utf-8"))["executable"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (executable, str(project)) if isinstance(executable, str) and os.path.isfile(executable) else None


def _juliapkg_project() -> Path:
    """The project that juliapkg uses: as the user says, that of the virtual environment, or the user's own."""
    if setting := os.environ.get("PYTHON_JULIAPKG_PROJECT"):
        return Path(setting)
    prefix = sys.prefix if sys.prefix != sys.base_prefix else os.environ.get("CONDA_PREFIX")
    if prefix:
        return Path(prefix) / "julia_env"
    depot = os.environ.get("JULIA_DEPOT_PATH", "").split(os.pathsep)[0]
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path(depot or Path.home() / ".julia") / "environments" / "pyjuliapkg"
    return Path(os.devnull)


def _proof_environment() -> dict[str, str]:
    """What could keep a sound Julia from starting is left out, and so is what decides the kernels of its BLAS."""
    without = {"OPENBLAS_CORETYPE", "JULIA_LOAD_PATH", "JULIA_PROJECT"}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"JULIA_NUM_THREADS": str(PROOF_THREADS)}


def _read(output: str) -> tuple[dict[str, str], list[str]]:
    said, libraries = {}, []
    for line in output.splitlines():
        name, _, value = line.partition("\t")
        if name == "library":
            libraries.append(value)
        else:
            said[name] = value
    return said, libraries


def _libjulia(libraries: list[str], name: str, source: str) -> str:
    # Beside it there may be libjulia-internal and libjulia-codegen, which it loads itself.
    for library in libraries:
        if Path(library).name.split(".")[0] == "libjulia":
            return library
    raise JuliaUnavailableError(f"{name} doesn't say which libjulia it runs from. {_advice(source)}")


def _preload(libraries: list[str], bindir: str) -> tuple[str, ...]:
    """Those in TwinGrad's own prefix, apart from libjulia and what Julia finds by itself in its private folder.

    The dynamic loader lists a library before those that it needs; the other way round is the order to load them in.
    """
    prefix = Path(bindir).parents[1]
    if not (prefix / MANIFEST).is_file():
        return ()
    inside = [path for path in map(Path, libraries) if path.is_relative_to(prefix)]
    wanted = [path for path in inside if path.parent.name != "julia" and path.name.split(".")[0] != "libjulia"]
    return tuple(str(path) for path in reversed(wanted))


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    return "".join(f"\n  {line}" for line in lines) or " nothing"


def _advice(source: str) -> str:
    change = f"name another one in {source}, or unset it" if source in VARIABLES else f"name another one in {VARIABLE}"
    return f"To use another: {change}, or install one for TwinGrad with: {INSTALL}"


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _release(version: str) -> tuple[int, int, int]:
    numbers = [int(part) for part in version.split("-")[0].split("+")[0].split(".")]
    major, minor, patch = (*numbers, 0, 0)[:3]
    return major, minor, patch


class Memory:
    """What is known of this machine's Julias from before: a small JSON file in a cache, read at every question.

    An entry counts only as long as the files that it speaks of are the same. A file that can't be read or written means
    no memory, never an error.
    """

    FORMAT = 1

    def __init__(self, cache: Path | None = None) -> None:
        """The memory in `cache`; None: in the cache that `TWINGRAD_CACHE` names, or the user's own."""
        self._cache = cache

    def chosen(self) -> Julia | None:
        """The Julia that was chosen before; None when there is none or when it is no longer there as it was."""
        content = self._read()
        return _proved(content["proofs"].get(content["chosen"]))

    def choose(self, julia: Julia) -> None:
        """Keep for those with another cache that this one is used."""
        content = self._read()
        if content["chosen"] != julia.executable:
            self._write(content | {"chosen": julia.executable})

    def prove(self, executable: str, source: str, again: bool = True) -> Julia:
        """The proof of this Julia that is remembered, or a new one; not `again` where a remembered one failed."""
        known = _proved(self._read()["proofs"].get(executable))
        if known is not None and known.executable != executable and not _says_version(executable, known.version):
            known = None
        if known is None:
            key = "failed", executable, _mark(executable)
            if not again and (problem := self.recall(*key)) is not None:
                raise JuliaUnavailableError(f"{problem} (found before; to try it again: {INSTALL} --again)")
            try:
                known = prove(executable, source)
            except _PassingError:
                raise
            except JuliaUnavailableError as error:
                self.note(*key, value=str(error))
                raise
            content = self._read()
            content["proofs"][executable] = {**dataclasses.asdict(known), "files": _fingerprint(known)}
            self._write(content)
        return dataclasses.replace(known, source=source)

    def forget(self) -> None:
        """Start afresh."""
        self._write({})

    def recall(self, *key: str) -> Any:
        """What `note` kept under this key, or None."""
        return self._read()["notes"].get("\n".join(key))

    def note(self, *key: str, value: Any) -> None:
        """Keep a finding on the backends for a Julia."""
        content = self._read()
        content["notes"]["\n".join(key)] = value
        self._write(content)

    def _read(self) -> dict[str, Any]:
        try:
            path = self._path()
            status = path.stat()
            content = _parsed(path, status.st_ino, status.st_size, status.st_mtime_ns)
        except (OSError, ValueError):
            content = None
        if not isinstance(content, dict) or content.get("format") != self.FORMAT:
            content = {}
        chosen = content.get("chosen")
        return {
            "chosen": chosen if isinstance(chosen, str) else None,
            "proofs": dict(_dictionary(content.get("proofs"))),
            "notes": dict(_dictionary(content.get("notes"))),
        }

    def _write(self, content: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"format": self.FORMAT, **content}, indent=1) + "\n")

    def _path(self) -> Path:
        return (self._cache or cache_folder()) / "julia.json"


@lru_cache(maxsize=4)
def _parsed(path: Path, *_identity: int) -> Any:
    """What a JSON file holds, parsed again when it is another file or has changed: a study asks a thousand times."""
    return json.loads(path.read_text(encoding="utf-8"))


def _proved(entry: Any) -> Julia | None:
    """The Julia of a remembered proof, if its files are as they were."""
    try:
        facts = dict(entry)
        files = facts.pop("files")
        julia = Julia(**facts | {"preload": tuple(facts["preload"])})
        return julia if _fingerprint(julia) == files else None
    except (KeyError, TypeError, ValueError, OSError):
        return None


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _fingerprint(julia: Julia) -> list[list[Any]]:
    """Size and time of the files that a Julia depends on: another version in their place changes one of them."""
    return [_described(path) for path in (julia.executable, julia.libjulia, julia.sysimage, *julia.preload)]


def _mark(path: str) -> str:
    """What a file is known by: another one in its place has another mark."""
    try:
        return str(_described(path)[1:])
    except OSError:
        return "gone"


def _described(path: str) -> list[Any]:
    """A file's path, size and time. Raises OSError where it is gone."""
    status = os.stat(path)
    return [path, status.st_size, status.st_mtime_ns]
