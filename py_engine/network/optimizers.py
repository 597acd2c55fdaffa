"""Optimizers: one update rule each, run over the flat parameter vector in place.

The formulas and the places of epsilon are PyTorch's, so that the same settings mean the same thing there. A rule is
written once, for one block of the vector: the base class cuts parameters, gradient and state into blocks that fit a
cache together, shares them out to threads where there are many, and a step allocates no arrays. Which length of block
and how many threads are fastest follows from caches and from what a call costs here, so that it is measured in the
first steps, and now and then again; the numbers are the same with all. Numbers that would cost a pass over the vector
are folded into others: a running mean ``m = beta * m + (1 - beta) * g`` is kept divided by ``1 - beta``.
"""

from __future__ import annotations

import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from py_engine.ad.memory import segments
from py_engine.ad.ops.arguments import is_real
from py_engine.errors import ConfigurationError, NonFiniteError, ParameterError
from py_engine.network.threads import Task, Team, Trials

Vector = NDArray[Any]

BLOCKS = (65_536, 262_144)
"""Elements per block that are tried: of float32 256 KiB and 1 MiB, for the second and the third level of a cache.

Smaller blocks lose more to call overhead than they gain; with several threads larger ones, since at the end of each
call a thread waits for the interpreter.
"""

SPLIT_FROM = 131_072
"""Elements of a vector from which on its blocks are shared out to the threads of a team, if there is one."""

SMALLEST_EPS = 1e-30
"""A smaller epsilon would vanish in float32 and leave 0 / 0 where a gradient is zero."""

FLUSHED_EVERY = 32
"""Steps after which numbers of the state that are nearly too small for its dtype become zero.

Processors take many times as long for numbers below the smallest normal one, and a running mean that is decayed never
gets to zero by itself.
"""

FLUSHED = 64
"""How many times the smallest normal number is the least that is kept: decayed by 0.9, it is not below that before."""

LEAST_EPS_OVER_ROOT = 1e4
"""How many times the root of the least that is kept an epsilon must be: beside a smaller one that root would count."""

NORM_PIECE = 8192
"""Elements whose squares BLAS adds up at once for a norm: it shares longer vectors out, and rounds by its threads."""

_Block = tuple[Vector, Vector, Vector, Vector, tuple[Vector, ...]]
"""Parameters, gradient, decayed gradient, scratch, state."""


class _Number:
    """A setting that is checked whenever it is set, also after the optimizer is made."""

    def __init__(self, optional: bool = False, **limits: float) -> None:
        self.optional, self.limits = optional, limits

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Optimizer | None, owner: type) -> Any:
        if optimizer is None:
            return self
        if self.name not in optimizer.__dict__:
            raise AttributeError(f"{type(optimizer).__name__} has no {self.name} yet")
        return optimizer.__dict__[self.name]

    def __set__(self, optimizer: Optimizer, value: Any) -> None:
        unset = self.optional and value is None
        optimizer.__dict__[self.name] = None if unset else optimizer._number(self.name, value, **self.limits)


class Optimizer(ABC):
    """What all optimizers share: the settings, the state, clipping, weight decay, and the loop over blocks.

    Use: ``bind`` once to the vector that is to be trained, then ``step`` after every gradient.

    - All settings can be set at any time and hold from the next step on.
    - `weight_decay` adds ``weight_decay * parameters`` to the gradient (in `AdamW` it is decoupled from it).
    - `clip_value` limits every element of the gradient to ±`clip_value`; `clip_norm` then limits the norm of
      the whole gradient. Clipping changes the gradient vector in place, otherwise it is only read.
    """

    decoupled: ClassVar[bool] = False
    """Whether the rule applies the weight decay itself."""

    state_names: tuple[str, ...] = ()
    """Names of the arrays, each as long as the parameter vector, that the rule keeps between steps."""

    unit_settings: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that give the unit in which these arrays are kept. A new value rescales them."""

    learning_rate = _Number(at_least=0.0)
    """The step size."""
    weight_decay = _Number(at_least=0.0)
    clip_norm = _Number(optional=True, above=0.0)
    clip_value = _Number(optional=True, above=0.0)

    def __init__(
        self,
        learning_rate: float,
        *,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.steps = 0
        self.binding: object = None
        """Another object whenever the state begins anew, see `bind`."""
        self._vector: Vector | None = None
        self._cuts: set[int] = set()
        self._gradient: Vector | None = None
        self._without: slice | None = None
        self._threads = 0
        self._state: dict[str, Vector] = {}
        self._cut_by: Trials[list[list[_Block]]] = Trials([])  # the blocks of each thread

    # What a subclass gives.

    @abstractmethod
    def _update(self, p: Vector, g: Vector, s: Vector, *state: Vector) -> None:
        """Apply the rule to one block of parameters `p`, gradient `g` and `state`, with `s` as scratch.

        Threads call it at the same time for different blocks. `p` and `state` are changed, `g` is only read;
        `self.steps` is the number of this step, from 1. Where `p`, `g` and `state` are zero, `p` must stay zero:
        that is the padding of the vector.
        """

    # What a user calls.

    @property
    def decided(self) -> bool:
        """Whether it is known which length of block and how many threads are the fastest; not before a first step."""
        return self._cut_by.decided

    @property
    def comparing(self) -> bool:
        """Whether the next step is one of those that tell that; not before a first step."""
        return not self.decided or self._cut_by.comparing

    @property
    def allows_lazy_updates(self) -> bool:
        """Whether what it does to elements without a gradient can be done later, for many steps at once."""
        return False

    def bind(self, vector: Vector, cuts: Iterable[int] = (), team: Team | None = None) -> None:
        """Make `vector` the one to train, with a new state of zeros, which the threads of a `team`, if any, write.

        A step runs over blocks that also end at the offsets in `cuts`: the offsets of a `Layout` make it one
        loop per tensor. That changes the time it takes and nothing else.
        """
        if vector.ndim != 1 or vector.dtype not in (np.float32, np.float64):
            raise ConfigurationError(
                f"{self._name}.bind: expected one flat float32 or float64 vector, "
                f"actual shape {vector.shape}, dtype {vector.dtype}"
            )
        self.steps = 0
        self.binding = object()
        self._vector = vector
        self._cuts = {cut for cut in cuts if 0 < cut < vector.size}
        self._gradient = None
        self._cut_by = Trials([])
        self._state = {name: _zeros(vector, team) for name in self.state_names}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: blocks are views of the vectors, and are cut anew."""
        return {**self.__dict__, "_gradient": None, "_cut_by": Trials([])}

    def step(self, vector: Vector, gradient: Vector, team: Team | None = None, without: slice | None = None) -> None:
        """Update `vector` in place from `gradient` (same shape and dtype; clipping overwrites it).

        With a `team` a large vector is shared out to its threads; the result is the same. The part `without` is left as
        it is, for `update`.

        Raises `NonFiniteError` if the norm is to be clipped and is NaN or Inf; the parameters are then
        unchanged.
        """
        self._check_bound(vector)
        threads = team.size if team is not None and _size(vector, without) >= SPLIT_FROM else 1
        if gradient is not self._gradient or threads != self._threads or without != self._without:
            self._cut(vector, gradient, threads, without)
        self._clip(gradient)
        self.steps += 1
        # The tasks are made anew at each step: if they were kept, they and this optimizer would be a reference cycle.
        run = team.run if team is not None else _run_first
        self._cut_by.run(lambda parts: run([partial(self._update_all, blocks) for blocks in parts]))

    def update(self, p: Vector, g: Vector, s: Vector, *state: Vector) -> None:
        """Do what the last step did to other parameters `p`, from their gradient and state, with `s` as scratch."""
        self._update(p, g, s, *state)

    def state_of(self, vector: Vector, part: slice) -> list[Vector]:
        """The state of a part of the vector that it is bound to, as views."""
        self._check_bound(vector)
        return [array[part] for array in self._state.values()]

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of all that a checkpoint needs besides the parameters and the settings.

        Arrays are in the rule's own units, and the settings that give these (betas, alpha) are among them.
        """
        arrays: dict[str, NDArray[Any]] = {name: array.copy() for name, array in self._state.items()}
        units = {name: np.array(getattr(self, name), np.float64) for name in self.unit_settings}
        return {"steps": np.array(self.steps, np.int64), **units, **arrays}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Copy a `state` back in, after `bind`.

        The settings stay those of this optimizer, also where the state is of another one with other settings: the
        running means are the same numbers then, and the next step continues them with the settings of now. So
        PyTorch has it where settings are set after `load_state_dict`. A state without the settings that give its units,
        as version 0.2 saved it, is taken to be of the settings of now.

        Raises `ParameterError`, and changes nothing, if it doesn't fit.
        """
        if self._vector is None:
            raise ConfigurationError(f"{self._name}.load_state: call bind(vector) first")
        expected: dict[str, tuple[int, ...]] = {"steps": ()}
        expected |= {name: array.shape for name, array in self._state.items()}
        units = {name: state[name] for name in self.unit_settings if name in state}
        state = {name: array for name, array in state.items() if name not in units}
        actual = {name: np.shape(array) for name, array in state.items()}
        if actual != expected:
            raise ParameterError(f"{self._name}.load_state: expected arrays {expected}, actual {actual}")
        for name, array in state.items():
            if np.asarray(array).dtype.kind not in "fiu":
                raise ParameterError(f"{self._name}.load_state: expected real numbers as {name}, actual {array!r}")
        if np.asarray(state["steps"]).dtype.kind not in "iu" or not state["steps"] >= 0:
            raise ParameterError(f"{self._name}.load_state: expected whole steps >= 0, actual {state['steps']!r}")
        settings = {name: getattr(self, name) for name in units}
        try:
            for name, value in units.items():
                setattr(self, name, np.asarray(value).tolist())
        except ConfigurationError as error:
            raise ParameterError(f"{self._name}.load_state: {error}") from None
        self.steps = int(state["steps"])
        for name, array in self._state.items():
            array[...] = state[name]
        for name, value in settings.items():
            setattr(self, name, value)  # which rescales the arrays

    def __repr__(self) -> str:
        values = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        return f"{self._name}({', '.join(f'{name}={v!r}' for name, v in values.items() if v is not None)})"

    # How it works.

    def _keep(self, names: tuple[str, ...]) -> None:
        """Keep these arrays between steps from now on; new ones are zeros."""
        self.state_names = names
        if self._vector is not None and tuple(self._state) != names:
            before, vector = self._state, self._vector
            self._state = {name: before[name] if name in before else _zeros(vector) for name in names}
            self._gradient = None  # so that blocks are cut anew

    def _rescale(self, name: str, factor: float) -> None:
        """Change the unit in which an array of the state is kept."""
        if name in self._state and factor != 1.0:
            np.multiply(self._state[name], factor, out=self._state[name])

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_bound(self, vector: Vector) -> None:
        if vector is not self._vector:
            raise ConfigurationError(f"{self._name}.step: this vector isn't the bound one; call bind(vector) first")

    def _number(
        self, name: str, value: float, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf
    ) -> float:
        """`value` as a float, or an error that says which setting is wrong and what it may be."""
        if is_real(value) and math.isfinite(value) and at_least <= value < below and value > above:
            return float(value)
        limits = [f">= {at_least:g}"] if at_least > -math.inf else []
        limits += [f"> {above:g}"] if above > -math.inf else []
        limits += [f"< {below:g}"] if below < math.inf else []
        raise ConfigurationError(
            f"{self._name}: {name} must be a finite number {' and '.join(limits)}, actual {value!r}"
        )

    def _cut(self, vector: Vector, gradient: Vector, threads: int, without: slice | None) -> None:
        """Cut everything into blocks once, so that a step makes no views: in each way that may be the fastest."""
        if gradient.shape != vector.shape or gradient.dtype != vector.dtype:
            raise ConfigurationError(
                f"{self._name}.step: expected a gradient of shape {vector.shape} and dtype {vector.dtype}, "
                f"actual {gradient.shape} and {gradient.dtype}"
            )
        self._gradient = None  # until all is cut
        self._threads, self._without = threads, without
        size = _size(vector, without)
        blocks = BLOCKS if size >= SPLIT_FROM else BLOCKS[:1]
        self._cut_by = Trials(
            [
                self._parts(vector, gradient, count, block)
                for count in sorted({1, threads}, reverse=True)
                for block in blocks  # of those that take about the same time the larger ones are left
                if block == blocks[0] or block < size // count
            ]
        )
        self._gradient = gradient

    def _parts(self, vector: Vector, gradient: Vector, threads: int, length: int) -> list[list[_Block]]:
        """The blocks of the part that each thread updates."""
        parts: list[list[_Block]] = []
        size = _size(vector, self._without)
        gap, skipped = size if self._without is None else self._without.start, vector.size - size
        cuts = {gap, *(cut if cut <= gap else max(gap, cut - skipped) for cut in self._cuts)}
        for mine in segments(size, threads):  # elements are numbered as if there were no gap
            first, last = mine.start, mine.stop
            decayed, scratch = np.empty((2, min(length, last - first)), vector.dtype)
            blocks: list[_Block] = []
            edges = {*range(first, last, length), *(cut for cut in cuts if first < cut < last), last}
            for start, stop in itertools.pairwise(sorted(edges)):
                behind = skipped if start >= gap else 0
                part, whole = slice(start + behind, stop + behind), slice(stop - start)
                state = tuple(array[part] for array in self._state.values())
                blocks.append((vector[part], gradient[part], decayed[whole], scratch[whole], state))
            parts.append(blocks)
        return parts

    def _update_all(self, blocks: list[_Block]) -> None:
        coupled_decay = 0.0 if self.decoupled else self.weight_decay
        for p, g, decayed, s, state in blocks:
            if coupled_decay:
                np.multiply(p, coupled_decay, out=decayed)
                np.add(decayed, g, out=decayed)
                g = decayed
            self._update(p, g, s, *state)
            if self.steps % FLUSHED_EVERY == 0:
                self.flush(state, s)

    def flush(self, state: Iterable[Vector], s: Vector) -> None:
        """Make numbers of a state that are nearly too small for its dtype zero, with `s` as scratch."""
        eps = getattr(self, "eps", 1.0)
        least = FLUSHED * np.finfo(s.dtype).tiny
        if is_real(eps) and eps < LEAST_EPS_OVER_ROOT * math.sqrt(least):
            return
        for array in state:
            np.abs(array, out=s)
            np.greater_equal(s, least, out=s)
            np.multiply(array, s, out=array)

    def _clip(self, gradient: Vector) -> None:
        if self.clip_value is not None:
            np.clip(gradient, -self.clip_value, self.clip_value, out=gradient)
        if self.clip_norm is not None:
            pieces = (gradient[i : i + NORM_PIECE] for i in range(0, gradient.size, NORM_PIECE))
            with np.errstate(over="ignore"):
                norm = math.sqrt(sum(float(piece.dot(piece)) for piece in pieces))
            unit = 1.0
            if norm == math.inf:  # finite numbers may have squares that are not
                norm, unit = _norm_of_large(gradient)
            if not math.isfinite(norm):
                raise NonFiniteError(
                    f"{self._name}, step {self.steps + 1}: the norm of the gradient is {norm}; "
                    "the parameters were left unchanged. Lower the learning rate, or look for NaN in the data"
                )
            # As torch.nn.utils.clip_grad_norm_ has it, the 1e-6 included.
            if (scale := min(1.0, self.clip_norm / (norm + 1e-6)) * unit) != 1.0:
                np.multiply(gradient, scale, out=gradient)


def _norm_of_large(gradient: Vector) -> tuple[float, float]:
    """Divide a vector by its largest element; return the norm that it had, and what it was divided by."""
    most = float(max(gradient.max(), -gradient.min()))
    if not math.isfinite(most):
        return most, 1.0
    np.divide(gradient, most, out=gradient)
    pieces = (gradient[i : i + NORM_PIECE] for i in range(0, gradient.size, NORM_PIECE))
    return most * math.sqrt(sum(float(piece.dot(piece)) for piece in pieces)), most


def _zeros(vector: Vector, team: Team | None = None) -> Vector:
    """Zeros like `vector`; the threads of a team write a part each, since the first use of memory is slow."""
    if team is None:
        return np.zeros_like(vector)
    found = np.empty_like(vector)
    team.run([partial(found[part].fill, 0) for part in segments(found.size, team.size)])
    return found


def _size(vector: Vector, without: slice | None) -> int:
    """How many elements a vector has without a part."""
    return vector.size if without is None else vector.size - (without.stop - without.start)


def _run_first(tasks: list[Task]) -> None:
    """What a team would do with the task of one thread."""
    tasks[0]()


class WithMomentum(Optimizer):
    """A rule that collects its steps in a velocity where there is momentum."""

    kept_always: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays that it keeps without momentum, too."""

    @property
    def momentum(self) -> float:
        """The part of the velocity that is kept from one step to the next."""
        return self._momentum

    @momentum.setter
    def momentum(self, value: float) -> None:
        self._momentum = self._number("momentum", value, at_least=0.0, below=1.0)
        self._keep((*self.kept_always, "velocity") if self._momentum else self.kept_always)


class SGD(WithMomentum):
    """Gradient descent, with momentum and Nesterov's variant of it: ``torch.optim.SGD`` without dampening.

    ``velocity = momentum * velocity + gradient``; the step is ``velocity``, or for Nesterov
    ``gradient + momentum * velocity``, times the learning rate.
    """

    def __init__(
        self,
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, clip_norm=clip_norm, clip_value=clip_value)
        self.momentum = momentum
        self.nesterov = bool(nesterov)
        if self.nesterov and not self.momentum:
            raise ConfigurationError("SGD: nesterov needs a momentum above 0")

    def _update(self, p: Vector, g: Vector, s: Vector, *state: Vector) -> None:
        rate = self.learning_rate
        if not state:
            np.multiply(g, rate, out=s)
            np.subtract(p, s, out=p)
            return
        (velocity,) = state
        np.multiply(velocity, self.momentum, out=velocity)
        np.add(velocity, g, out=velocity)
        if self.nesterov:
            np.multiply(g, rate, out=s)
            np.subtract(p, s, out=p)
            rate *= self.momentum
        np.multiply(velocity, rate, out=s)
        np.subtract(p, s, out=p)


class RMSProp(WithMomentum):
    """Gradient over the root of its running mean square: ``torch.optim.RMSprop``, not centred.

    ``square = alpha * square + (1 - alpha) * gradient²``; the step is ``gradient / (sqrt(square) + eps)``,
    collected in ``velocity`` where there is momentum, times the learning rate.
    """

    kept_always = ("square",)
    unit_settings = ("alpha",)
    eps = _Number(at_least=SMALLEST_EPS)

    def __init__(
        self,
        learning_rate: float = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, clip_norm=clip_norm, clip_value=clip_value)
        self.alpha = alpha
        self.eps = eps
        self.momentum = momentum

    @property
    def alpha(self) -> float:
        """The part of the mean square that is kept from one step to the next."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        before = getattr(self, "_alpha", 0.0)
        self._alpha = self._number("alpha", value, at_least=0.0, below=1.0)
        smaller = (1.0 - before) / (1.0 - self._alpha)
        self._rescale("square", smaller)
        self._rescale("velocity", math.sqrt(1.0 / smaller))

    def _update(self, p: Vector, g: Vector, s: Vector, *state: Vector) -> None:
        square, *velocity = state
        root = math.sqrt(1.0 - self.alpha)
        np.multiply(g, g, out=s)
        np.multiply(square, self.alpha, out=square)
        np.add(square, s, out=square)
        np.sqrt(square, out=s)
        np.add(s, self.eps / root, out=s)
        np.divide(g, s, out=s)
        for v in velocity:
            np.multiply(v, self.momentum, out=v)
            np.add(v, s, out=v)
        np.multiply(velocity[0] if velocity else s, self.learning_rate / root, out=s)
        np.subtract(p, s, out=p)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1) as ``torch.optim.Adam`` has it: eps beside the corrected root.

    ``mean = beta1 * mean + (1 - beta1) * gradient`` and ``square`` likewise of ``gradient²``, both divided by
    ``1 - beta**steps``; the step is ``mean / (sqrt(square) + eps)`` times the learning rate.
    """

    state_names = ("mean", "square")
    unit_settings = ("betas",)
    eps = _Number(at_least=SMALLEST_EPS)

    def __init__(
        self,
        learning_rate: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, clip_norm=clip_norm, clip_value=clip_value)
        self.betas = betas
        self.eps = eps

    @property
    def betas(self) -> tuple[float, float]:
        """The parts of the mean and of the mean square that are kept from one step to the next."""
        return self._betas

    @betas.setter
    def betas(self, value: tuple[float, float]) -> None:
        try:
            beta1, beta2 = value
        except (TypeError, ValueError):
            raise ConfigurationError(f"{self._name}: betas must be two numbers, actual {value!r}") from None
        before = getattr(self, "_betas", (0.0, 0.0))
        self._betas = (
            self._number("betas[0]", beta1, at_least=0.0, below=1.0),
            self._number("betas[1]", beta2, at_least=0.0, below=1.0),
        )
        for name, old, new in zip(("mean", "square"), before, self._betas, strict=True):
            self._rescale(name, (1.0 - old) / (1.0 - new))

    @property
    def allows_lazy_updates(self) -> bool:
        """Whether elements without a gradient are updated by nothing but their means, which decay slowly."""
        plain = type(self) in (Adam, AdamW) and not self.weight_decay
        return plain and self.clip_norm is None and self.clip_value is None and self.betas[1] >= 0.9

    def factors(self) -> tuple[float, float]:
        """The numbers c and e of the last step: parameters change by ``c * mean / (sqrt(square) + e)``.

        The corrections of both means, and the units in which they are kept, are in them.
        """
        beta1, beta2 = self.betas
        root = math.sqrt((1.0 - beta2) / (1.0 - beta2**self.steps))
        rate = self.learning_rate * (1.0 - beta1) / (1.0 - beta1**self.steps)
        return rate / root, self.eps / root

    def _update(self, p: Vector, g: Vector, s: Vector, *state: Vector) -> None:
        mean, square = state
        beta1, beta2 = self.betas
        np.multiply(mean, beta1, out=mean)
        np.add(mean, g, out=mean)
        np.multiply(g, g, out=s)
        np.multiply(square, beta2, out=square)
        np.add(square, s, out=square)
        rate, eps = self.factors()
        np.sqrt(square, out=s)
        np.add(s, eps, out=s)
        np.divide(mean, s, out=s)
        np.multiply(s, rate, out=s)
        np.subtract(p, s, out=p)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as ``torch.optim.AdamW`` has it.

    The parameters are first multiplied by ``1 - learning_rate * weight_decay``; the gradient knows nothing of
    it.
    """

    decoupled = True

    def __init__(
        self,
        learning_rate: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, betas, eps, weight_decay, clip_norm=clip_norm, clip_value=clip_value)

    def _update(self, p: Vector, g: Vector, s: Vector, *state: Vector) -> None:
        if self.weight_decay:
            np.multiply(p, 1.0 - self.learning_rate * self.weight_decay, out=p)
        super()._update(p, g, s, *state)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "rmsprop": RMSProp, "adam": Adam, "adamw": AdamW}
