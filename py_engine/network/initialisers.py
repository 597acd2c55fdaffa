"""Initial values of parameters: a table of distributions and the streams they are drawn from.

Every parameter has its own random stream, which depends on the seed and on the parameter's name and on
nothing else: adding, removing or reordering layers leaves the initial values of the others as they were.
Values are drawn in float64 and rounded once, so that a float32 model starts at the rounded values of its
float64 twin.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike, NDArray

from py_engine.ad.ops.arguments import is_real, is_whole
from py_engine.errors import ConfigurationError

Shape = tuple[int, ...]
Values = NDArray[np.float64]
InitialiserLike = str | Mapping[str, Any]
"""An initialiser as a user writes it: a name, or a name with options, ``{"name": "normal", "std": 0.01}``."""


@dataclass(frozen=True)
class ParameterSpec:
    """What a layer says about one of its parameters before it exists.

    `fan_in` and `fan_out` are the numbers of connections into and out of one unit. For the stacked gates of
    an LSTM or GRU they are those of a single gate, since each gate is a separate matrix. What is not
    `trainable` belongs to the model like the others, but optimizers and gradients don't see it: a frozen
    embedding, or running statistics.
    """

    shape: Shape
    initialiser: InitialiserLike
    fan_in: int
    fan_out: int
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


# One function per row of the table: the positional arguments are the same for all, the keywords are the row's
# options.


def glorot_uniform(generator: Generator, shape: Shape, fan_in: int, fan_out: int) -> Values:
    """Uniform on ±sqrt(6 / (fan_in + fan_out)): Glorot and Bengio 2010, eq. 16 (Xavier)."""
    limit = math.sqrt(6.0 / (fan_in + fan_out))
    return generator.uniform(-limit, limit, shape)


def glorot_normal(generator: Generator, shape: Shape, fan_in: int, fan_out: int) -> Values:
    """Normal with variance 2 / (fan_in + fan_out): Glorot and Bengio 2010, eq. 12. Not truncated."""
    return generator.normal(0.0, math.sqrt(2.0 / (fan_in + fan_out)), shape)


def he_uniform(generator: Generator, shape: Shape, fan_in: int, fan_out: int) -> Values:
    """Uniform on ±sqrt(6 / fan_in), which has the variance of `he_normal`."""
    limit = math.sqrt(6.0 / fan_in)
    return generator.uniform(-limit, limit, shape)


def he_normal(generator: Generator, shape: Shape, fan_in: int, fan_out: int) -> Values:
    """Normal with variance 2 / fan_in: He et al. 2015, eq. 10. Not truncated."""
    return generator.normal(0.0, math.sqrt(2.0 / fan_in), shape)


def uniform(
    generator: Generator, shape: Shape, fan_in: int, fan_out: int, *, low: float = -0.1, high: float = 0.1
) -> Values:
    """Uniform on [low, high)."""
    if not low <= high:
        raise ConfigurationError(f"initialiser uniform: expected low <= high, actual low = {low}, high = {high}")
    return generator.uniform(low, high, shape)


def normal(
    generator: Generator, shape: Shape, fan_in: int, fan_out: int, *, mean: float = 0.0, std: float = 0.1
) -> Values:
    """Normal with the given mean and standard deviation."""
    if not std >= 0:
        raise ConfigurationError(f"initialiser normal: expected std >= 0, actual std = {std}")
    return generator.normal(mean, std, shape)


def zeros(generator: Generator, shape: Shape, fan_in: int, fan_out: int) -> Values:
    """All zero."""
    return np.zeros(shape)


def ones(generator: Generator, shape: Shape, fan_in: int, fan_out: int) -> Values:
    """All one."""
    return np.ones(shape)


Initialiser = Callable[..., Values]

INITIALISERS: dict[str, Initialiser] = {
    function.__name__: function
    for function in (glorot_uniform, glorot_normal, he_uniform, he_normal, uniform, normal, zeros, ones)
}


def resolve(initialiser: InitialiserLike) -> tuple[Initialiser, dict[str, float]]:
    """The function and the options that `initialiser` names.

    Raises `ConfigurationError` for an unknown name, an unknown option, or an option
    that is not a finite number.
    """
    named = initialiser if isinstance(initialiser, Mapping) else {"name": initialiser}
    options: dict[str, Any] = dict(named)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in INITIALISERS:
        raise ConfigurationError(f"unknown initialiser {name!r}; there are: {', '.join(INITIALISERS)}")
    function = INITIALISERS[name]
    known = inspect.getfullargspec(function).kwonlyargs
    for key, value in options.items():
        if key not in known:
            raise ConfigurationError(
                f"initialiser {name} has no option {key!r}; it takes {', '.join(known) if known else 'none'}"
            )
        if not is_real(value) or not math.isfinite(value):
            raise ConfigurationError(f"initialiser {name}: {key} must be a finite number, actual {value!r}")
    return function, options


def initialise(spec: ParameterSpec, generator: Generator, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """A new C-contiguous array of `spec.shape`, drawn from `generator`."""
    function, options = resolve(spec.initialiser)
    return function(generator, spec.shape, spec.fan_in, spec.fan_out, **options).astype(dtype)


def stream(seed: int, name: str) -> Generator:
    """The random stream of one named part of a model, decided by the seed and the name alone."""
    if not is_whole(seed, 0):
        raise ConfigurationError(f"a seed must be an integer >= 0, actual {seed!r}")
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=tuple(name.encode())))


def initialise_all(
    specs: Mapping[str, ParameterSpec], seed: int, dtype: DTypeLike = np.float32
) -> dict[str, NDArray[Any]]:
    """Initial values for all of `specs`, each drawn from its own `stream`."""
    return {name: initialise(spec, stream(seed, name), dtype) for name, spec in specs.items()}
