"""What every engine is: sessions that train the network of a model spec, and the optimizers that they train with.

What a session computes is fixed by the spec, the weights, the data and the order of the rows; what may differ is how
fast, and in how much memory:

    session = registry.get("numpy").build(spec, params, Optimizer("sgd", 0.015), 100, dtype="float32", threads=2)
    losses = session.train_epoch(x, y, order)
    print(session.evaluate(x_test, y_test).accuracy)

`bridge.registry` lists the engines; measurements run a session in its own process: `bridge.worker`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bridge.errors import suggestion
from py_engine.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "OPTIMIZERS",
    "Costed",
    "Counting",
    "Evaluation",
    "Optimizer",
    "Preloading",
    "Resumable",
    "Scheduling",
    "Session",
    "Starting",
]

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
                f"no optimizer {self.name!r}{suggestion(self.name, OPTIMIZERS)}; optimizers: {', '.join(OPTIMIZERS)}"
            )
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", 0.01 if self.name == "adamw" else 0.0)
        if isinstance(self.betas, list):  # as in JSON
            object.__setattr__(self, "betas", tuple(self.betas))
        if not isinstance(self.nesterov, bool):
            raise ConfigurationError(f"{self.name}: nesterov must be True or False, found {self.nesterov!r}")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
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
        """Predict: (rows, *output shape of the spec), logits where the loss takes logits."""
        ...

    def loss_and_gradients(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, dict[str, NDArray[Any]]]:
        """The loss of all rows as one batch, and its gradient by each trained parameter; none is updated."""
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
    """A session whose framework computes with a copy of the data in its own memory."""

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
    """A session that can resume where another one was, bit for bit: one that was built with the same arguments, but for
    the parameters, which are then those that the other had."""

    def state(self) -> dict[str, NDArray[Any]]:
        """All that training depends on beside the parameters: the optimizer's arrays, its steps, random streams."""
        ...

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over a `state`, before anything is trained. Raises `ParameterError` for one that does not fit."""
        ...


@runtime_checkable
class Costed(Protocol):
    """A session that can say where the time of its last planned step goes, and what its threads do."""

    def costs(self) -> list[tuple[str, str, float, int, int]]:
        """Op, layer, seconds, bytes moved and operations of each op of a step, and of the update.

        They are timed as they run, beside those of the other threads: the sum of the seconds is a step's, but for
        gathering the rows, looking for NaN, and waiting. Operations are those of the op as it runs, of a fused op those
        of all that it does; at least the multiplications and additions of its products count.
        """
        ...

    def threads_in_step(self) -> str:
        """What the threads do in it, in words: "split over 2 threads"."""
        ...

    def threads_decided(self) -> bool:
        """Whether that is known: engines may try in the first steps what is the fastest. True before the first step."""
        ...

    def held_bytes(self) -> int:
        """About how many bytes the steps planned so far need: values, gradients, optimizer state; no parameters."""
        ...

    def collecting_seconds(self) -> float:
        """Seconds that its process has spent collecting garbage since some moment before the first call."""
        ...


@runtime_checkable
class Starting(Protocol):
    """A class of sessions whose runtime does not start with the import: Julia, JAX's client, TensorFlow's context."""

    def start(self, threads: int) -> None:
        """Start it now, so that neither its time nor its memory counts for the first session."""
        ...


class Counting(Protocol):
    """A session whose runtime counts what it allocates."""

    def allocated(self) -> tuple[int, int]:
        """Bytes and allocations since the runtime started."""
        ...
