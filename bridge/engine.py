"""The one protocol that all engines are driven through, and the registry of the engines there are.

An engine trains the network of a model spec from given weights. What it computes is fixed by the spec, the weights, the
data and the order of the rows; what may differ is how fast, and in how much memory:

    session = get("numpy").build(spec, params, Optimizer("sgd", 0.015), batch_size=100, dtype="float32", threads=2)
    losses = session.train_epoch(x, y, order)
    print(session.evaluate(x_test, y_test).accuracy)

Measurements run a session in a process of its own: `bridge.worker`.

**A new engine** is one adapter file with a class that is called with the arguments of `Engine.build` and gives a
`Session`, and one row in `ENGINES`. Nothing here imports a framework: a row says what the engine needs, and only
`build` (or `load`) imports its adapter.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import math
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from bridge.errors import EngineUnavailableError
from py_engine.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from bridge.julia.packages import Package
    from bridge.spec import ModelSpec

__all__ = [
    "ENGINES",
    "OPTIMIZERS",
    "Availability",
    "Engine",
    "Evaluation",
    "Optimizer",
    "Registered",
    "Resumable",
    "Scheduling",
    "Session",
    "availability",
    "check_resumable",
    "get",
    "names",
]

_COMPILED = re.compile(r"\.(so|dylib|dll|pyd)(\.[\d.]+)?$")
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "rmsprop": ("alpha", "eps", "momentum"),
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
}
"""Each optimizer and the settings it has beside `learning_rate`, `weight_decay` and `clip_norm`, which all have.

**A new optimizer** is a row here, with fields of `Optimizer` for settings that no other has. From these follow what
files and commands accept, the arguments of the numpy engine's class, and the text that reaches the Julia engine.
"""

# What the numbers of a setting must be.
_NOT_NEGATIVE = {"at_least": 0.0}
_POSITIVE = {"above": 0.0}
_FRACTION = {"at_least": 0.0, "below": 1.0}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its settings; formulas and the places of epsilon are PyTorch's, and so are the defaults.

    Raises `ConfigurationError` for a setting that is out of range or that the named optimizer doesn't have.
    """

    name: str
    """One of `OPTIMIZERS`."""
    learning_rate: float = field(metadata=_NOT_NEGATIVE)
    momentum: float = field(default=0.0, metadata=_FRACTION)
    nesterov: bool = False
    alpha: float = field(default=0.99, metadata=_FRACTION)
    """How much of its running mean square RMSProp keeps at each step."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata=_FRACTION)
    """How much of their running means of the gradient and of its square Adam and AdamW keep at each step."""
    eps: float = field(default=1e-8, metadata=_POSITIVE)
    weight_decay: float | None = field(default=None, metadata=_NOT_NEGATIVE)
    """Decoupled in adamw, added to the gradient elsewhere. None: the default, 0.01 in adamw and 0 elsewhere."""
    clip_norm: float | None = field(default=None, metadata=_POSITIVE)
    """Upper limit of the norm of the whole gradient; None: no limit."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigurationError(
                f"no optimizer {self.name!r}{_suggestion(self.name, OPTIMIZERS)}; optimizers: {', '.join(OPTIMIZERS)}"
            )
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", 0.01 if self.name == "adamw" else 0.0)
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON has only lists
        if not isinstance(self.nesterov, bool):
            raise ConfigurationError(f"{self.name}: nesterov must be True or False, found {self.nesterov!r}")
        if len(self.betas) != 2:
            raise ConfigurationError(f"{self.name}: betas must be two numbers, found {self.betas!r}")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if not setting.metadata or (value is None and setting.default is None):
                continue
            if isinstance(setting.default, tuple):
                for index, number in enumerate(value):
                    self._check_number(f"{setting.name}[{index}]", number, **setting.metadata)
            else:
                self._check_number(setting.name, value, **setting.metadata)
        if self.nesterov and not self.momentum:
            raise ConfigurationError(f"{self.name}: nesterov needs a momentum above 0")
        self._check_foreign_settings()

    def settings(self) -> dict[str, Any]:
        """The settings that this optimizer has, by name."""
        return {name: getattr(self, name) for name in self._own_names()}

    def _own_names(self) -> tuple[str, ...]:
        return ("learning_rate", *OPTIMIZERS[self.name], "weight_decay", "clip_norm")

    def _check_foreign_settings(self) -> None:
        for setting in fields(self):
            if setting.name in ("name", *self._own_names()) or getattr(self, setting.name) == setting.default:
                continue
            raise ConfigurationError(
                f"{self.name} has no setting {setting.name!r}; it has {', '.join(self._own_names())}"
            )

    def _check_number(
        self, name: str, value: Any, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf
    ) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and at_least <= value < below and value > above:
            return
        limits = [f"at least {at_least:g}"] if at_least > -math.inf else []
        limits += [f"above {above:g}"] if above > -math.inf else []
        limits += [f"below {below:g}"] if below < math.inf else []
        raise ConfigurationError(f"{self.name}: {name} must be a number {' and '.join(limits)}, found {value!r}")


@dataclass(frozen=True)
class Evaluation:
    """How well a network does on some data. `loss` is the mean over all samples."""

    loss: float
    accuracy: float
    """The share of right answers, 0 to 1: the largest logit for classes, logits above 0 for yes or no; NaN for
    mean_squared_error, which has no right answers."""


class Session(Protocol):
    """A network in training, in one engine.

    `x` holds one sample per row, (rows, *input shape of the spec), C-contiguous, in the session's dtype, or int64 where
    the spec reads token ids; `y` the targets: int64 classes, or numbers in the session's dtype. Both are taken to stay
    as they are between calls: what is made of them (checks, tensors) is made once per array. Parameters and gradients
    are dictionaries of arrays by name, in the layout of `bridge.spec`, and copies; what isn't trained has no gradient.

    Raises `ShapeError`, `DTypeError` and `LabelError` (all of `py_engine.errors`) for data that doesn't fit the spec.
    """

    def train_epoch(self, x: NDArray[Any], y: NDArray[Any], order: NDArray[np.int64]) -> NDArray[np.float64]:
        """Train once on the rows of `order`, in batches cut from it one after the other; the last may be smaller.

        Gives the loss of every step, taken before the step, and only when all work is done: exactly this call is timed.
        Raises `NonFiniteError` with the step when a loss is NaN or infinite.
        """
        ...

    def evaluate(self, x: NDArray[Any], y: NDArray[Any]) -> Evaluation:
        """Loss and accuracy on some data; nothing is learned from it."""
        ...

    def predict(self, x: NDArray[Any]) -> NDArray[Any]:
        """What the network makes of each row: (rows, *output shape of the spec), logits where the loss takes logits."""
        ...

    def loss_and_gradients(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, dict[str, NDArray[Any]]]:
        """The loss of all rows as one batch, and its gradient by each parameter; the parameters stay as they are."""
        ...

    def params(self) -> dict[str, NDArray[Any]]:
        """The parameters as they now are."""
        ...

    def linear_algebra(self) -> str:
        """The libraries that compute its matrix products, as they say themselves; see `bridge.linear_algebra`."""
        ...

    def close(self) -> None:
        """Give up what the session holds. Calling it twice does no harm."""
        ...


@runtime_checkable
class Preloading(Protocol):
    """A session whose framework computes with a copy of the data in memory of its own."""

    def preload(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Make the copy now, so that neither its time nor its memory counts for the first epoch."""
        ...


@runtime_checkable
class Scheduling(Protocol):
    """A session whose learning rate can change from step to step."""

    def train_steps(
        self, x: NDArray[Any], y: NDArray[Any], order: NDArray[np.int64], rates: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """`Session.train_epoch` with a learning rate for each step, (steps,)."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A session that can go on where another one was, bit for bit: one that was built with the same arguments, but for
    the parameters, which are then those that the other had."""

    def state(self) -> dict[str, NDArray[Any]]:
        """All that training depends on beside the parameters: the optimizer's arrays, its steps, random streams."""
        ...

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over a `state`, before anything is trained. Raises `ParameterError` for one that does not fit."""
        ...


class Counting(Protocol):
    """A session whose runtime counts what it allocates."""

    def allocated(self) -> tuple[int, int]:
        """Bytes and allocations since the runtime started."""
        ...


class Engine(Protocol):
    """Something that can train the network of a spec."""

    @property
    def name(self) -> str:
        """What a user calls it: `torch-compile`."""
        ...

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        ...

    @property
    def distributions(self) -> tuple[str, ...]:
        """The installed packages whose versions decide its results, the one it is named for first."""
        ...

    def build(
        self,
        spec: ModelSpec,
        params: Mapping[str, NDArray[Any]],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike,
        threads: int,
        techniques: Mapping[str, Any] | None = None,
    ) -> Session:
        """A session that starts from `params` and computes in `dtype` with `threads` threads.

        `techniques` switches what makes the engine fast, for engines of our own: see `Registered.techniques`. Raises
        `WeightsError` when `params` don't belong to the spec, `SpecError` when the engine can't do what it asks.
        """
        ...


@dataclass(frozen=True)
class Availability:
    """Whether an engine can be used here; if not, `reason` says what is missing and what to do."""

    ok: bool
    reason: str
    versions: dict[str, str] = field(default_factory=dict)
    """The versions of the packages that it is made of."""


def _nothing_to_do() -> None:
    """What most engines need before their sessions are timed."""


def _nothing() -> str:
    return ""


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
    lacks: Callable[[], str] = _nothing
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
    prepare: Callable[[], None] = _nothing_to_do
    """What is done once, before its sessions are timed: compiling what stays compiled on this machine."""
    resumable: bool = False
    """Whether its sessions are `Scheduling` and `Resumable`."""
    techniques: bool = False
    """Whether `build` takes `techniques`: settings of what makes it fast, by name, to see what each of them brings."""

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
        module, _, attribute = self.adapter.partition(":")
        try:
            return cast("Callable[..., Session]", getattr(importlib.import_module(module), attribute))
        except (ImportError, OSError) as error:  # installed, but broken: a shared library of its own is missing
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
    ) -> Session:
        """See `Engine.build`."""
        for number in (batch_size, threads):
            if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(
                    "batch_size and threads must be integers of at least 1, "
                    f"found batch_size={batch_size!r}, threads={threads!r}"
                )
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(f'expected an Optimizer, such as Optimizer("sgd", 0.01), found {optimizer!r}')
        if not any(parameter.trainable for parameter in spec.parameters().values()):
            raise ConfigurationError(f'the model "{spec.name}" has no parameters: there is nothing to train')
        if techniques and not self.techniques:
            raise ConfigurationError(f"engine {self.name} has no techniques to set, found {', '.join(techniques)}")
        more = {"techniques": techniques} if techniques else {}
        return self.load()(
            spec=spec, params=params, optimizer=optimizer, batch_size=batch_size, dtype=dtype, threads=threads, **more
        )

    def own_parameters(self, spec: ModelSpec, seed: int, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
        """Initial parameters as the engine itself would choose them for the network of a spec, in our layout.

        The initialisers of a spec are those of our own engines; a framework has its own, which its session class gives
        by a function of this name.
        """
        from bridge import weights  # here, since it imports numpy and the engine

        return dict(getattr(self.load(), "own_parameters", weights.initialise)(spec, seed, dtype))


def names() -> list[str]:
    """The names of all engines, in the order in which tables show them."""
    return list(ENGINES)


def get(name: str) -> Registered:
    """The engine of this name; nothing is imported yet. Raises `EngineUnavailableError` when there is none."""
    if name not in ENGINES:
        raise EngineUnavailableError(f"no engine {name!r}{_suggestion(name, ENGINES)}; engines: {', '.join(ENGINES)}")
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


def _suggestion(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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


def _lacks_julia() -> str:
    """Why there is no Julia that works here."""
    from bridge.julia import status  # only here: the other engines have no need of it

    return status().obstacle


def _julia_version() -> dict[str, str]:
    from bridge.julia import status

    found = status().julia
    if found is None:
        return {}
    from bridge.julia import sysimage  # here, since it needs this module

    image, _ = sysimage.usable(found)
    return {"julia": found.version} | ({"sysimage": sysimage.key(image)} if image else {})


def _julia_blas() -> dict[str, str]:
    from bridge.julia import status

    found = status().julia
    return {} if found is None else {"julia": f"{found.blas} {found.kernels}".strip()}


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


def _compile_julia_engine() -> None:
    from bridge.julia import status
    from bridge.julia.ahead import compile_engine

    if (found := status().julia) is not None:
        compile_engine(found)


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


# Also of engines made of Julia packages: they run behind the Julia engine's entry points, and so need it compiled.
_IN_JULIA: dict[str, Any] = {
    "counts_itself": True,
    "prepare": _compile_julia_engine,
    "runtime_libraries": _julia_blas,
}
_JULIA: dict[str, Any] = {**_IN_JULIA, "lacks": _lacks_julia, "runtime": _julia_version}


def _of_packages(needs: Mapping[str, tuple[str, ...]], oldest: tuple[int, int]) -> dict[str, Any]:
    """What a row says of an engine made of Julia packages, from the names that each must have; the first is its own.

    `oldest` is the release of Julia that they need.
    """

    def found() -> Iterator[tuple[str, Package]]:
        from bridge.julia.packages import package  # here, since it needs Julia's modules

        return ((name, package(name, names, oldest)) for name, names in needs.items())

    def lacks() -> str:
        return next((package.problem for _, package in found() if package.problem), "")

    def runtime() -> dict[str, str]:
        return {name.lower(): package.version for name, package in found()} | _julia_version()

    return {"distributions": (), **_IN_JULIA, "lacks": lacks, "runtime": runtime}


_ROWS = (
    Registered(
        "numpy", "TwinGrad numpy", "bridge.adapters.numpy:NumpySession", ("numpy",), resumable=True, techniques=True
    ),
    Registered(
        "julia", "TwinGrad Julia", "bridge.adapters.julia:JuliaSession", (), resumable=True, techniques=True, **_JULIA
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
