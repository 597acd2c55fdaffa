"""The registry of the engines there are, and whether each of them can be used here.

    session = get("numpy").build(spec, params, Optimizer("sgd", 0.015), batch_size=100, dtype="float32", threads=2)

**A new engine** is one adapter file with a class that is called with the arguments of `Registered.build` and
gives a `bridge.session.Session`, and one row in `ENGINES`. Nothing here imports a framework: a row says what the engine
needs, and only `build` (or `load`) imports its adapter; what asks for a Julia is imported when Julia is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from numpy.typing import DTypeLike, NDArray

from bridge import weights
from bridge.errors import EngineUnavailableError, suggestion
from bridge.session import Optimizer, Session
from bridge.spec import ModelSpec
from py_engine.errors import ConfigurationError

__all__ = ["ENGINES", "Availability", "Registered", "availability", "check_resumable", "get", "names", "version"]

_COMPILED = re.compile(r"\.(so|dylib|dll|pyd)(\.[\d.]+)?$")
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Availability:
    """Whether an engine can be used here; if not, `reason` says what is missing and what to do."""

    ok: bool
    reason: str
    versions: dict[str, str] = field(default_factory=dict)
    """The versions of the packages that it is made of."""


@dataclass(frozen=True)
class Registered:
    """An engine of `ENGINES`: what is known of it without importing it."""

    name: str
    label: str
    adapter: str
    """Where its session class is: "module:class"."""
    distributions: tuple[str, ...]
    extra: str = ""
    """The extra of the distribution twingrad that installs what it needs."""
    lacks: Callable[[], str] = str
    """What else is missing on this machine, and what to do; empty when nothing is."""
    counts_itself: bool = False
    """Whether its sessions are `Counting`: its runtime manages memory that no profiler of the process sees rightly."""
    counting: Mapping[str, str] = field(default_factory=dict)
    """Environment variables without which it keeps pools of memory, so that a profiler sees little of what it uses."""
    counting_note: str = ""
    """What these change, for the tables of allocated bytes: "oneDNN off"."""
    runtime: Callable[[], dict[str, str]] = dict
    """The versions of what it runs on besides Python packages."""
    runtime_libraries: Callable[[], dict[str, str]] = dict
    """The BLAS of what it runs on besides Python packages."""
    prepare: Callable[[], None] = lambda: None
    """What is done once, before its sessions are timed: compiling what stays compiled on this machine."""
    resumable: bool = False
    """Whether its sessions are `Scheduling` and `Resumable`."""
    maps: bool = False
    """Whether its sessions train on rows that map a file as they lie there; others read them whole."""
    communicates: bool = False
    """Whether `build` takes a communicator: whether several processes can train together."""
    techniques: bool = False
    """Whether `build` takes `techniques`: settings of what makes it fast, by name, to see what each of them brings."""
    functions: str = ""
    """Where its class for a programmer's own functions is, "module:class"; empty for an engine without."""

    @property
    def module(self) -> str:
        """The dotted name of its adapter."""
        return self.adapter.partition(":")[0]

    def availability(self) -> Availability:
        """Whether the engine can be used here, found out without importing it."""
        versions, missing = {}, []
        for distribution in self.distributions:
            try:
                versions[distribution] = version(distribution)
            except importlib.metadata.PackageNotFoundError:
                missing.append(distribution)
        if missing:
            remedy = f"pip install 'twingrad[{self.extra}]'" if self.extra else f"pip install {' '.join(missing)}"
            are = "is" if len(missing) == 1 else "are"
            return Availability(False, f"{', '.join(missing)} {are} not installed: {remedy}", versions)
        reason = self.lacks()
        return Availability(not reason, reason, versions | ({} if reason else self.runtime()))

    def libraries(self) -> dict[str, str]:
        """What its compiled libraries are, beyond their versions: two builds of one version may have another BLAS.

        A digest for each Python package, over what its installation says of them; found out without importing it.
        """
        return {name: _compiled(name) for name in self.distributions} | self.runtime_libraries()

    def load(self) -> Callable[..., Session]:
        """Import the adapter, and with it the framework. Raises `EngineUnavailableError` when it can't be used here."""
        found = self.availability()
        if not found.ok:
            raise EngineUnavailableError(f"engine {self.name}: {found.reason}")
        try:
            return cast("Callable[..., Session]", _imported(self.adapter))
        except (ImportError, OSError) as error:  # installed, but broken: its own shared library is missing
            raise EngineUnavailableError(f"engine {self.name} is installed but can't be imported: {error}") from error

    def build(
        self,
        spec: ModelSpec,
        params: Mapping[str, NDArray[Any]],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike,
        threads: int,
        techniques: Mapping[str, Any] | None = None,
        communicator: Any = None,
    ) -> Session:
        """Make a session that starts from `params` and computes in `dtype` with `threads` threads.

        For our own engines, `techniques` switches what makes the engine fast, and the processes of a
        `communicator`, such as `mpi4py.MPI.COMM_WORLD`, train together. Raises `EngineUnavailableError` when
        the engine can't be used here, `WeightsError` when `params` don't belong to the spec, `SpecError` when it can't
        do what the spec asks, `ConfigurationError` for settings that it does not have.
        """
        for number in (batch_size, threads):
            if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(
                    "batch_size and threads must be integers of at least 1, "
                    f"found batch_size={batch_size!r}, threads={threads!r}"
                )
        dtype = weights.float_dtype(dtype)
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(f'expected an Optimizer, such as Optimizer("sgd", 0.01), found {optimizer!r}')
        if not any(parameter.trainable for parameter in spec.parameters().values()):
            raise ConfigurationError(f'the model "{spec.name}" has no parameters: there is nothing to train')
        if techniques and not self.techniques:
            raise ConfigurationError(f"engine {self.name} has no techniques to set, found {', '.join(techniques)}")
        if communicator is not None and not self.communicates:
            raise ConfigurationError(f"engine {self.name} does not train on several processes")
        more: dict[str, Any] = {"techniques": techniques} if techniques else {}
        more |= {"communicator": communicator} if communicator is not None else {}
        return self.load()(
            spec=spec, params=params, optimizer=optimizer, batch_size=batch_size, dtype=dtype, threads=threads, **more
        )

    def function(self, code: str, name: str, replay: bool, threads: int) -> Any:
        """A programmer's own function, in the engine's language and in this process: see `bridge.julia.function`."""
        if not self.functions:
            raise ConfigurationError(f"engine {self.name} takes no functions of a programmer's own")
        return _imported(self.functions).defined(code, name, replay, threads)

    def own_parameters(self, spec: ModelSpec, seed: int, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
        """Initial parameters as the engine itself would choose them for the network of a spec, in our layout.

        The initialisers of a spec are those of our own engines; a framework has its own, which its session class gives
        by a function of this name.
        """
        found = dict(getattr(self.load(), "own_parameters", weights.initialise)(spec, seed, dtype))
        for name, parameter in spec.parameters().items():
            if parameter.zero_row is not None:  # of padding, whatever the initialiser says
                found[name][parameter.zero_row] = 0
        return found


def names() -> list[str]:
    """The names of all engines, in the order in which tables show them."""
    return list(ENGINES)


def get(name: str) -> Registered:
    """The engine of this name; nothing is imported yet. Raises `EngineUnavailableError` when there is none."""
    if name not in ENGINES:
        raise EngineUnavailableError(f"no engine {name!r}{suggestion(name, ENGINES)}; engines: {', '.join(ENGINES)}")
    return ENGINES[name]


def availability(name: str) -> Availability:
    """Whether the engine of this name can be used here, and if not, why."""
    return get(name).availability()


def check_resumable(name: str) -> None:
    """Raise `ConfigurationError` for an engine whose sessions have one learning rate, and no state to save."""
    if not get(name).resumable:
        able = ", ".join(row.name for row in ENGINES.values() if row.resumable)
        raise ConfigurationError(
            f"engine {name}: its learning rate cannot change during a training, and its training cannot be resumed; "
            f"engines that can do both: {able}"
        )


def _lacks_compiler() -> str:
    """What torch.compile needs to build its C++ kernels and lacks here."""
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"torch.compile needs a C++ compiler ({' or '.join(compilers)}): install one, or set CXX"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return (
            f"torch.compile needs Python's C headers, and there is no Python.h in {sysconfig.get_path('include')}: "
            "install the development package of this Python (python3-dev on Debian)"
        )
    return ""


def version(distribution: str) -> str:
    """The version of an installed distribution; PackageNotFoundError where there is none.

    `importlib.metadata.version` reads the whole description of a package for it, a thousand times in a study.
    """
    found = importlib.metadata.distribution(distribution)
    match = _VERSION.search((found.read_text("METADATA") or "").partition("\n\n")[0])
    return match[1] if match else found.version


@cache
def _compiled(distribution: str) -> str:
    """A digest over the compiled libraries of an installed distribution, as its RECORD lists them, or empty."""
    try:
        record = importlib.metadata.distribution(distribution).read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""
    lines = sorted(line for line in record.splitlines() if _COMPILED.search(line.partition(",")[0]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""


def _installed(*distributions: str) -> tuple[str, ...]:
    """The first of these builds of one framework that is installed, or else the last."""
    for distribution in distributions[:-1]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(distribution)
            return (distribution,)
    return distributions[-1:]


_TENSORFLOW: dict[str, Any] = {
    "distributions": _installed("tensorflow", "tensorflow-cpu"),
    "extra": "tensorflow",
    "counting": {"TF_ENABLE_ONEDNN_OPTS": "0"},
    "counting_note": "oneDNN off",
}


def _imported(place: str) -> Any:
    """What a module has under a name, "module:name"; only here is a module of the bridge imported late."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _late(place: str, *arguments: Any) -> Callable[[], Any]:
    """A call of such a function with these arguments, which imports its module when it is made."""
    return lambda: _imported(place)(*arguments)


# Also of engines made of Julia packages: they run behind the Julia engine's entry points, and so need it compiled.
_IN_JULIA: dict[str, Any] = {
    "counts_itself": True,
    "prepare": _late("bridge.libjulia.engine:prepare"),
    "runtime_libraries": _late("bridge.libjulia.engine:blas"),
}
_JULIA: dict[str, Any] = {
    **_IN_JULIA,
    "lacks": _late("bridge.libjulia.engine:lacks"),
    "runtime": _late("bridge.libjulia.engine:versions"),
}


def _of_packages(needs: Mapping[str, tuple[str, ...]], oldest: tuple[int, int]) -> dict[str, Any]:
    """What a row says of an engine made of Julia packages, from the names that each must have; the first is its own.

    `oldest` is the release of Julia that they need.
    """
    lacks = _late("bridge.libjulia.packages:lacks", needs, oldest)
    runtime = _late("bridge.libjulia.packages:versions", needs, oldest)
    return {"distributions": (), **_IN_JULIA, "lacks": lacks, "runtime": runtime}


_ROWS = (
    Registered(
        "numpy",
        "TwinGrad numpy",
        "bridge.adapters.numpy:NumpySession",
        ("numpy",),
        resumable=True,
        maps=True,
        communicates=True,
        techniques=True,
    ),
    Registered(
        "julia",
        "TwinGrad Julia",
        "bridge.adapters.julia:JuliaSession",
        (),
        resumable=True,
        maps=True,
        communicates=True,
        techniques=True,
        functions="bridge.libjulia.functions:EmbeddedFunction",
        **_JULIA,
    ),
    Registered("torch", "PyTorch", "bridge.adapters.torch:TorchSession", ("torch",), extra="torch", resumable=True),
    Registered(
        "torch-compile",
        "PyTorch compiled",
        "bridge.adapters.torch_compile:TorchCompileSession",
        ("torch",),
        extra="torch",
        resumable=True,
        lacks=_lacks_compiler,
    ),
    Registered("tensorflow", "TensorFlow", "bridge.adapters.tensorflow:TensorFlowSession", **_TENSORFLOW),
    Registered(
        "tensorflow-xla", "TensorFlow XLA", "bridge.adapters.tensorflow_xla:TensorFlowXLASession", **_TENSORFLOW
    ),
    Registered("jax", "JAX", "bridge.adapters.jax:JaxSession", ("jax", "jaxlib"), extra="jax"),
    Registered(
        "flux",
        "Flux",
        "bridge.adapters.flux:FluxSession",
        **_of_packages({"Flux": ("setup", "update!", "withgradient", "Embedding")}, oldest=(1, 6)),
    ),
    Registered(
        "lux",
        "Lux",
        "bridge.adapters.lux:LuxSession",
        **_of_packages(
            {"Lux": ("AbstractLuxLayer", "CrossEntropyLoss"), "Optimisers": ("freeze!",), "Zygote": ()}, oldest=(1, 10)
        ),
    ),
    Registered(
        "simplechains",
        "SimpleChains",
        "bridge.adapters.simplechains:SimpleChainsSession",
        # loss_multiplier came when losses became sums over a batch; they were means before.
        **_of_packages({"SimpleChains": ("TurboDense", "Conv", "valgrad!", "loss_multiplier")}, oldest=(1, 10)),
    ),
)

ENGINES: dict[str, Registered] = {row.name: row for row in _ROWS}
"""All engines by name, in the order in which tables show them."""
