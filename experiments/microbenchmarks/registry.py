"""The systems that the micro-benchmarks measure: which there are, and which of them this machine has."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bridge import linear_algebra
from bridge import registry as engines
from bridge.errors import JuliaUnavailableError, TwinGradError
from bridge.libjulia import sysimage
from bridge.libjulia.find import find
from bridge.libjulia.packages import package

FOLDER = Path(__file__).resolve().parent / "systems"
DUALS = FOLDER.with_name("duals.cpp")

SUITES = ("gradients", "arrays", "chunks", "memory")
"""What is measured: small functions; the same on large arrays; forward mode by chunk size; the memory of a loop."""


class BenchmarkError(TwinGradError):
    """A system whose program failed."""

    exit_code = 1


class SystemUnavailableError(BenchmarkError):
    """A system that is not known, or not on this machine."""

    exit_code = 2


@dataclass(frozen=True)
class Found:
    """Whether a system can be run here: its versions, or what keeps it from that."""

    versions: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """What its compiled libraries are, beyond their versions; see `bridge.registry.Registered.libraries`."""

    @property
    def ok(self) -> bool:
        """Whether it can be run."""
        return not self.reason


@dataclass(frozen=True)
class System:
    """A system. `program` is its file in `systems/`; `needs` the package, Python's or Julia's, that it requires."""

    name: str
    label: str
    program: str
    suites: tuple[str, ...] = ("gradients",)
    needs: str = ""
    oldest: tuple[int, int] = (1, 6)
    """The Julia that a package of Julia's needs at least."""

    @property
    def language(self) -> str:
        """What its program is written in: py, jl or cpp."""
        return self.program.rpartition(".")[2]

    @property
    def path(self) -> Path:
        """Its program."""
        return DUALS if self.language == "cpp" else FOLDER / self.program

    def found(self) -> Found:
        """Whether this machine has it."""
        return _found(self)


OURS = ("gradients", "arrays", "chunks")

SYSTEMS = {
    system.name: system
    for system in (
        System("numpy-eager", "TwinGrad numpy, eager", "numpy_eager.py", OURS),
        System("numpy-compiled", "TwinGrad numpy, compiled", "numpy_compiled.py", (*OURS, "memory")),
        System("julia-eager", "TwinGrad Julia, eager", "julia_eager.jl", OURS),
        System("julia-compiled", "TwinGrad Julia, compiled", "julia_compiled.jl", OURS),
        System("julia-forward", "TwinGrad Julia, forward mode", "julia_forward.jl", ("chunks",)),
        System("manual", "Hand-written numpy", "manual.py", OURS),
        System("manual-julia", "Hand-written Julia", "manual.jl", ("gradients", "chunks")),
        System("duals", "C++ dual numbers", "duals.cpp", ("chunks",)),
        System("torch", "PyTorch", "torch.py", needs="torch"),
        System("jax", "JAX", "jax.py", needs="jax"),
        System("tensorflow", "TensorFlow", "tensorflow.py", needs="tensorflow"),
        System("autograd", "HIPS autograd", "autograd.py", needs="autograd"),
        System("zygote", "Zygote", "zygote.jl", needs="Zygote"),
        System("reversediff", "ReverseDiff", "reversediff.jl", needs="ReverseDiff"),
        System("forwarddiff", "ForwardDiff", "forwarddiff.jl", ("gradients", "chunks"), needs="ForwardDiff"),
        System("enzyme", "Enzyme", "enzyme.jl", needs="Enzyme", oldest=(1, 10)),
        System("mooncake", "Mooncake", "mooncake.jl", needs="Mooncake", oldest=(1, 10)),
    )
}


def get(name: str) -> System:
    """The system of this name; SystemUnavailableError when there is none."""
    if name not in SYSTEMS:
        raise SystemUnavailableError(f"no system {name!r}; systems: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


@cache
def _found(system: System) -> Found:
    match system.language:
        case "cpp":
            return _compiler()
        case "jl":
            return _julia(system)
    versions = {"python": platform.python_version()}
    if system.needs in engines.ENGINES:
        row = engines.get(system.needs)
        seen = row.availability()
        return Found(versions | seen.versions, libraries=row.libraries()) if seen.ok else Found(reason=seen.reason)
    names = [name for name in ("numpy", system.needs) if name]
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if system.needs and system.needs not in versions:
        return Found(reason=f"the package {system.needs} is not installed: pip install 'twingrad[microbenchmarks]'")
    return Found(versions, libraries={"numpy": linear_algebra.of_numpy()})


def _julia(system: System) -> Found:
    try:
        julia = find()
    except JuliaUnavailableError as error:
        return Found(reason=str(error).partition("\n")[0])
    blas = {"julia": f"{julia.blas} {julia.kernels}".strip()}
    if not system.needs:
        return Found({"julia": julia.version}, libraries=blas)
    seen = package(system.needs, oldest=system.oldest)
    if seen.problem:
        return Found(reason=seen.problem)
    return Found({"julia": julia.version, system.needs: seen.version}, libraries=blas)


def _compiler() -> Found:
    """The C++ compiler: CXX, which may be several words, or one of the usual names."""
    named = os.environ.get("CXX", "").split()
    for words in (named, ["g++"], ["clang++"], ["c++"]):
        if words and (path := shutil.which(words[0])):
            compiler = [path, *words[1:]]
            done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
            return Found({"compiler": shlex.join(compiler)}, libraries={"compiler": done.stdout.partition("\n")[0]})
    return Found(reason="no C++ compiler was found: install g++ or clang++, or name one in CXX")


def command(system: System) -> list[str]:
    """What to run for a system whose program answers lines of JSON; followed by its argument and its folder."""
    if system.language == "py":
        bootstrap = "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
        bootstrap += "from experiments.microbenchmarks.serve import main; main(start, sys.argv[2])"
        return [sys.executable, "-c", bootstrap]
    serve = Path(__file__).with_name("serve.jl")
    julia = find()
    return [julia.executable, "--startup-file=no", *sysimage.options(julia), str(serve), str(system.path)]
