"""Layers: what each computes, and what it says about its parameters and shapes.

A layer holds settings, not values. It declares its parameters, and is called with the batch and the tensors
that hold them, ``layer(x, {"weight": ..., "bias": ...}, training=False)``, so the same object serves eager
use, tracing and any number of threads. Shapes in this file are per sample unless they begin with N, the
batch; sequences are (T, features). Every layer is written in ops alone.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np

from py_engine.ad import ops, state
from py_engine.ad.op import here
from py_engine.ad.ops.arguments import is_real, is_whole
from py_engine.ad.state import STATE, collecting
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, DTypeError, ShapeError
from py_engine.network import recurrence
from py_engine.network.initialisers import InitialiserLike, ParameterSpec, resolve, stream
from py_engine.network.recurrence import Recurrence

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": ops.tanh,
    "relu": ops.relu,
    "sigmoid": ops.sigmoid,
    "softplus": ops.softplus,
    "gelu": ops.gelu,
    "gelu_tanh": ops.gelu_tanh,
    "silu": ops.silu,
    "leaky_relu": ops.leaky_relu,  # of slope 0.01
    "elu": ops.elu,  # of alpha 1
    "softmax": ops.softmax,  # over the last axis
}


LAYERS: dict[str, type[Layer]] = {}
"""Every layer by the name that a model spec has for it: the `op` that its class is defined with."""


class Layer(ABC):
    """What all layers share. Your own layer overrides `output_shape`, `forward` and perhaps `parameters`.

    The constructor's arguments are kept in attributes of the same names. Those of a layer of the model spec, such as
    ``class Dense(Layer, op="dense")``, have the names that the spec's settings have.
    """

    couples_batch: ClassVar[bool] = False
    """Whether, in training, the samples of a batch affect each other, so that it can't be trained sample by sample.

    Of a layer that does not say so a trainer tries whether they do, and then computes whole batches."""

    sums_over_batch: ClassVar[bool] = False
    """Whether they do so by sums over the batch alone, each a `sum_of_parts`: it can be split over threads."""

    only_moves: ClassVar[bool] = False
    """Whether it only rearranges elements, and so takes token ids as well as numbers."""

    takes_ids: ClassVar[bool] = False
    """Whether its samples are token ids, which it looks up: a layer that hands them to an `Embedding` says so."""

    def __init_subclass__(cls, op: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if op is None:
            return
        if op in LAYERS:
            raise ConfigurationError(f"{cls.__name__}: the layer {op!r} is {LAYERS[op].__name__} already")
        LAYERS[op] = cls

    def __init__(self, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name or "." in name):
            raise ConfigurationError(f"a layer's name must be a string without dots, actual {name!r}")
        self.name = name

    def parameters(self) -> dict[str, ParameterSpec]:
        """The layer's parameters by name, in the order in which they are stored."""
        return {}

    @abstractmethod
    def output_shape(self, input_shape: Shape) -> Shape:
        """The shape of a sample that comes out for a sample of `input_shape`.

        Raises `ShapeError`, saying what is expected, if such a sample can't go in.
        """

    @abstractmethod
    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """Compute the output for a batch `x` whose shape has been checked."""

    def __call__(self, x: Tensor, parameters: Tensors, training: bool = False) -> Tensor:
        """Compute the output for a batch `x` (N, ...). Raises `ShapeError` if its samples don't fit."""
        expected = self.output_shape(x.shape[1:])
        y = self.forward(x, parameters, training)
        if y.shape[1:] != tuple(expected):
            raise ShapeError(
                f"{here(repr(self))}: output_shape says samples of shape {tuple(expected)}, forward gave {y.shape[1:]}"
            )
        return y

    def merged_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of a sample that the layer's inputs make together; a layer that joins several overrides it.

        Raises `ShapeError`, saying what is expected, if they don't fit.
        """
        if len(shapes) != 1:
            raise self.refused("one input", shapes)
        return shapes[0]

    def merge(self, inputs: Sequence[Tensor]) -> Tensor:
        """What the layer's inputs, whose shapes fit, make together."""
        return inputs[0]

    def refused(self, expected: str, shapes: Sequence[Shape]) -> ShapeError:
        """The error for `merged_shape` to raise: inputs of these shapes don't fit, `expected` would."""
        found = " and ".join(map(str, shapes))
        return ShapeError(f"{here(repr(self))}: expected {expected}, actual {len(shapes)} of shape {found}")

    def reject(self, expected: str, input_shape: Shape) -> ShapeError:
        """The error for `output_shape` to raise: samples of `input_shape` don't fit, `expected` would."""
        return ShapeError(f"{here(repr(self))}: expected samples of {expected}, actual shape {input_shape}")

    def __repr__(self) -> str:
        shown = []
        for name, argument in inspect.signature(type(self).__init__).parameters.items():
            value = getattr(self, name, argument.default)
            if argument.kind is argument.VAR_POSITIONAL:
                shown += [repr(item) for item in value]
            elif name != "self" and _differs(value, argument.default):
                shown.append(repr(value) if argument.default is argument.empty else f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _whole_number(self, name: str, value: Any) -> int:
        if not is_whole(value, 1):
            raise ConfigurationError(f"{type(self).__name__}: {name} must be an integer >= 1, actual {value!r}")
        return int(value)

    def _one_of(self, name: str, value: str, allowed: Any) -> str:
        if value not in allowed:
            raise ConfigurationError(
                f"{type(self).__name__}: {name} must be one of {', '.join(allowed)}, actual {value!r}"
            )
        return value

    def _initialiser(self, name: str, value: InitialiserLike) -> InitialiserLike:
        if isinstance(value, Mapping):
            value = dict(value)  # which can be deep-copied, as a read-only view can't
        try:
            resolve(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{type(self).__name__}: {name}: {error}") from None
        return value


def _differs(value: Any, default: Any) -> bool:
    """Whether an argument is another than its default: of arrays, whether it is another object."""
    if isinstance(value, np.ndarray) or isinstance(default, np.ndarray):
        return value is not default
    return bool(value != default)


class Dense(Layer, op="dense"):
    """``activation(x @ weight + bias)`` on the last axis of x: (..., inputs) to (..., units).

    Parameters: `weight` (inputs, units); `bias` (units,) unless ``bias=False``.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        activation: str = "identity",
        bias: bool = True,
        weight_init: InitialiserLike = "glorot_uniform",
        bias_init: InitialiserLike = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.inputs = self._whole_number("inputs", inputs)
        self.units = self._whole_number("units", units)
        self.activation = self._one_of("activation", activation, ACTIVATIONS)
        self.bias = bool(bias)
        self.weight_init = self._initialiser("weight_init", weight_init)
        self.bias_init = self._initialiser("bias_init", bias_init)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`weight` and, if there is one, `bias`."""
        fans = (self.inputs, self.units)
        specs = {"weight": ParameterSpec(fans, self.weight_init, *fans)}
        if self.bias:
            specs["bias"] = ParameterSpec((self.units,), self.bias_init, *fans)
        return specs

    def output_shape(self, input_shape: Shape) -> Shape:
        """(..., inputs) to (..., units)."""
        if not input_shape or input_shape[-1] != self.inputs:
            raise self.reject(f"shape (..., {self.inputs})", input_shape)
        return (*input_shape[:-1], self.units)

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """One matrix product: the axes between batch and features are folded into the batch."""
        rows = x if x.ndim == 2 else ops.reshape(x, (-1, self.inputs))
        y = rows @ parameters["weight"]
        if self.bias:
            y = y + parameters["bias"]
        if x.ndim != 2:
            y = ops.reshape(y, (*x.shape[:-1], self.units))
        return ACTIVATIONS[self.activation](y)


class Recurrent(Layer):
    """What RNN, LSTM and GRU share: (T, inputs) to the last state, (units,), or to all states, (T, units).

    The input projection of all steps is one matrix product outside the loop. States before the first step are
    zero, and so are left out of it. Parameters: `weight` (inputs, gates · units), `recurrent` (units, gates ·
    units), used as ``h @ recurrent``, and `bias` (gates · units,), added on the input side.
    """

    gates: ClassVar[int] = 1

    recurrence: ClassVar[Recurrence]
    """All steps as one op and in single ops, of a layer that does not override `states`."""

    def __init__(
        self,
        inputs: int,
        units: int,
        returns: str = "last",
        weight_init: InitialiserLike = "glorot_uniform",
        recurrent_init: InitialiserLike = "glorot_uniform",
        bias_init: InitialiserLike = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.inputs = self._whole_number("inputs", inputs)
        self.units = self._whole_number("units", units)
        self.returns = self._one_of("returns", returns, ("last", "sequence"))
        self.weight_init = self._initialiser("weight_init", weight_init)
        self.recurrent_init = self._initialiser("recurrent_init", recurrent_init)
        self.bias_init = self._initialiser("bias_init", bias_init)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`weight`, `recurrent` and `bias`, the gates side by side."""
        inputs, units, width = self.inputs, self.units, self.gates * self.units
        return {
            "weight": ParameterSpec((inputs, width), self.weight_init, inputs, units),
            "recurrent": ParameterSpec((units, width), self.recurrent_init, units, units),
            "bias": ParameterSpec((width,), self.bias_init, inputs, units),
        }

    def output_shape(self, input_shape: Shape) -> Shape:
        """(T, inputs) to (units,) or (T, units); T is at least 1."""
        if len(input_shape) != 2 or input_shape[1] != self.inputs or input_shape[0] < 1:
            raise self.reject(f"shape (steps, {self.inputs})", input_shape)
        return (self.units,) if self.returns == "last" else (input_shape[0], self.units)

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """Project all steps at once, then run through them.

        Time becomes the first axis, so that each step is one piece of memory: before the projection or after it,
        whichever moves less.
        """
        samples, steps, inputs = x.shape
        width = self.gates * self.units
        first = inputs < width
        rows = ops.transpose(x, (1, 0, 2)) if first else x
        rows = ops.reshape(rows, (samples * steps, inputs)) @ parameters["weight"] + parameters["bias"]
        if first:
            projected = ops.reshape(rows, (steps, samples, width))
        else:
            projected = ops.copy(ops.transpose(ops.reshape(rows, (samples, steps, width)), (1, 0, 2)))
        return self.states(projected, parameters["recurrent"])

    def states(self, projected: Tensor, recurrent: Tensor) -> Tensor:
        """The last hidden state (N, units), or all (N, T, units), from projected inputs (T, N, gates · units).

        They are one op where the technique `fuse` is on, which keeps what a gradient needs where there may be one.
        """
        last = self.returns == "last"
        if STATE.techniques is None or STATE.techniques.fuse:
            traced = projected.data is None or STATE.trace is not None
            keep = traced or (STATE.grad_enabled and max(projected.level, recurrent.level) > 0)
            found = self.recurrence.op.apply_several((projected, recurrent), {"last": last, "keep": keep})[0]
        else:
            found = self.recurrence.steps(projected, recurrent, last, False)[0]
        return found if last else ops.transpose(found, (1, 0, 2))


class RNN(Recurrent, op="rnn"):
    """The vanilla recurrent layer, ``h_t = activation(x_t @ weight + h_{t-1} @ recurrent + bias)``.

    It `returns` the "last" state or the "sequence" of all; see `Recurrent`.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        activation: str = "tanh",
        returns: str = "last",
        weight_init: InitialiserLike = "glorot_uniform",
        recurrent_init: InitialiserLike = "glorot_uniform",
        bias_init: InitialiserLike = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(inputs, units, returns, weight_init, recurrent_init, bias_init, name)
        self.activation = self._one_of("activation", activation, ACTIVATIONS)

    def states(self, projected: Tensor, recurrent: Tensor) -> Tensor:
        """One product and one activation per step."""
        activation = ACTIVATIONS[self.activation]
        found = [activation(projected[0])]
        for t in range(1, len(projected)):
            found.append(activation(projected[t] + found[-1] @ recurrent))
        return found[-1] if self.returns == "last" else ops.stack(found, axis=1)


class LSTM(Recurrent, op="lstm"):
    """Long short-term memory with a forget gate (Gers et al. 2000), without peepholes; gates i, f, g, o.

    ``c_t = f * c_{t-1} + i * g`` and ``h_t = o * tanh(c_t)``, where i, f and o are sigmoids and g is the tanh
    of their part of ``x_t @ weight + h_{t-1} @ recurrent + bias``. Its arguments are `RNN`'s without `activation`.
    """

    gates = 4
    recurrence = recurrence.LSTM


class GRU(Recurrent, op="gru"):
    """Gated recurrent unit (Cho et al. 2014), with the reset after the product; gates r, z, n.

    ``h_t = (1 - z) * n + z * h_{t-1}``, where r and z are sigmoids of their part of ``x_t @ weight + bias +
    h_{t-1} @ recurrent``, and n is the tanh of its part of it with the product times r. Its arguments are `RNN`'s
    without `activation`.
    """

    gates = 3
    recurrence = recurrence.GRU


class Flatten(Layer, op="flatten"):
    """Each sample as one vector, in C order."""

    only_moves = True

    def output_shape(self, input_shape: Shape) -> Shape:
        """(...) to (product,)."""
        return (math.prod(input_shape),)

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """A view."""
        y: Tensor = ops.reshape(x, (x.shape[0], *self.output_shape(x.shape[1:])))
        return y


class Reshape(Layer, op="reshape"):
    """Each sample in another shape, in C order: ``Reshape(4, 196)`` cuts 784 pixels into 4 segments."""

    only_moves = True

    def __init__(self, *shape: int, name: str | None = None) -> None:
        super().__init__(name)
        self.shape = tuple(self._whole_number("every length", length) for length in shape)

    def output_shape(self, input_shape: Shape) -> Shape:
        """(...) to `shape`, which has the same number of elements."""
        if math.prod(input_shape) != math.prod(self.shape):
            raise self.reject(f"{math.prod(self.shape)} elements", input_shape)
        return self.shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """A view."""
        y: Tensor = ops.reshape(x, (x.shape[0], *self.shape))
        return y


class Activation(Layer, op="activation"):
    """One of `ACTIVATIONS` by name, on every element (softmax: over the last axis)."""

    def __init__(self, activation: str, name: str | None = None) -> None:
        super().__init__(name)
        self.activation = self._one_of("activation", activation, ACTIVATIONS)

    def output_shape(self, input_shape: Shape) -> Shape:
        """The same; softmax needs an axis to run over."""
        if self.activation == "softmax" and not input_shape:
            raise self.reject("shape (..., classes)", input_shape)
        return input_shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """The activation alone."""
        return ACTIVATIONS[self.activation](x)


class RBF(Layer, op="rbf"):
    """Radial basis functions of the last axis: (..., inputs) to ``exp(-beta_j * ||x - centers_j||²)``, (..., units).

    The distances are summed from differences, (rows, units, inputs) of them: exact for samples close to a centre
    and far from zero, where the expanded square would be all rounding. Parameters: `centers` (units, inputs) and
    `beta` (units,).
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        centers_init: InitialiserLike = MappingProxyType({"name": "normal", "std": 1.0}),
        beta_init: InitialiserLike = "ones",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.inputs = self._whole_number("inputs", inputs)
        self.units = self._whole_number("units", units)
        self.centers_init = self._initialiser("centers_init", centers_init)
        self.beta_init = self._initialiser("beta_init", beta_init)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`centers` and `beta`."""
        return {
            "centers": ParameterSpec((self.units, self.inputs), self.centers_init, self.inputs, self.units),
            "beta": ParameterSpec((self.units,), self.beta_init, self.inputs, self.units),
        }

    def output_shape(self, input_shape: Shape) -> Shape:
        """(..., inputs) to (..., units)."""
        if not input_shape or input_shape[-1] != self.inputs:
            raise self.reject(f"shape (..., {self.inputs})", input_shape)
        return (*input_shape[:-1], self.units)

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """Differences, distances, exponentials."""
        differences = ops.expand_dims(x, -2) - parameters["centers"]
        return ops.exp(-parameters["beta"] * ops.sum(ops.square(differences), -1))


class Dropout(Layer, op="dropout"):
    """In training, zero each element with probability `rate` and divide the others by 1 - rate; else nothing.

    Every call in training, and so every traced copy, draws from a separate stream, decided by `seed`, the layer's name
    in its chain, the number of calls before and the rank: two layers, threads or processes never share one. Inside a
    layer that holds it, its name has that of the attribute, too.

    Attributes:
        place: where it is in a layer of the chain that holds it, such as "blocks.1.dropout"; the chain sets it.
        rank: which of the processes that train together this is; the trainer sets it.
        calls: how often it was called in training.
        traced: of the copies traced last the scope and the stream, which a trainer takes over.
    """

    def __init__(self, rate: float, seed: int = 0, name: str | None = None) -> None:
        super().__init__(name)
        if not is_real(rate) or not 0 <= rate < 1:
            raise ConfigurationError(f"Dropout: rate must be a number >= 0 and < 1, actual {rate!r}")
        stream(seed, "")  # a bad seed is an error here, not in the first training step
        self.rate = float(rate)
        self.seed = seed
        self.place = ""
        self.rank = 0
        self.calls = 0
        self.traced: list[tuple[str, np.random.Generator]] | None = None

    def output_shape(self, input_shape: Shape) -> Shape:
        """The same."""
        return input_shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """Off outside training."""
        if not training:
            return x
        self.calls += 1
        generator = self.new_stream(STATE.scope, self.calls)
        if x.data is None and self.traced is not None:  # one for each copy in a step that a trainer traces
            self.traced.append((STATE.scope, generator))
        return ops.dropout(x, self.rate, generator)

    def new_stream(self, scope: str, number: int) -> np.random.Generator:
        """The stream of this number of the layer in this place of a chain."""
        where = f"{scope}.{self.place}" if self.place else scope
        return stream(self.seed, f"{where}/{number}{f'/{self.rank}' if self.rank else ''}")


@contextmanager
def tracing_aside(layers: Mapping[str, Layer]) -> Iterator[None]:
    """Trace layers inside for other reasons than to train: the streams of their dropout layers stay as they are."""
    before = [(dropout, dropout.calls, dropout.traced) for dropout in held_layers(layers, Dropout).values()]
    try:
        for dropout, *_ in before:
            dropout.traced = None
        yield
    finally:
        for dropout, calls, copies in before:
            dropout.calls, dropout.traced = calls, copies


def settings_of(layer: Layer) -> dict[str, Any]:
    """Return the constructor's arguments of a layer of the model spec; of others nothing: these may change theirs."""
    if type(layer) not in LAYERS.values():
        return {}
    return {name: vars(layer)[name] for name in inspect.signature(type(layer)).parameters if name in vars(layer)}


Kind = TypeVar("Kind", bound=Layer)


def held_layers(layers: Mapping[str, Layer], kind: type[Kind]) -> dict[str, Kind]:
    """Return the layers of a kind among these and in what they hold, by their names: `layer`, or `layer.place`.

    What they hold is looked for in containers, in objects of a user's own classes, and in what functions capture.
    Raises `ConfigurationError` for several in a set.
    """
    found = {name: layer for name, layer in layers.items() if isinstance(layer, kind)}
    known = {id(layer) for layer in found.values()}
    looked_into: set[int] = set()

    waiting: list[tuple[Any, str]] = [(layer, name) for name, layer in reversed(list(layers.items()))]
    while waiting:  # the last one first: in depth, in order
        value, name = waiting.pop()
        if isinstance(value, kind) and id(value) not in known:
            known.add(id(value))
            free = name
            while free in found:  # such as of the keys 1 and "1"
                free += "'"
            found[free] = value
        if id(value) not in looked_into:
            parts = _parts_of(value)
            if parts:
                looked_into.add(id(value))
                waiting += [(part, f"{name}.{key}") for key, part in reversed(parts)]
    return found


def is_users_own(layer: Layer) -> bool:
    """Whether a layer, or one that it holds, is none of the engine's own."""
    held = held_layers({"": layer}, Layer)  # type: ignore[type-abstract]  # none is made
    return any(type(one).__module__.partition(".")[0] != "py_engine" for one in held.values())


class Fields:
    """What layers hold, as it is now: numbers, texts, and which objects; not what is in arrays, which are read anew."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._values: dict[tuple[int, Any], Any] = {}
        self._objects: dict[int, Any] = {}  # which keeps their ids
        waiting: list[Any] = list(layers)
        while waiting:
            value = waiting.pop()
            if id(value) in self._objects or isinstance(value, Dropout):  # whose state is the engine's
                continue
            parts = _parts_of(value)
            if parts:
                self._objects[id(value)] = value
            for key, part in parts:
                self._values[id(value), key] = part
                waiting.append(part)

    def changed(self, others: Fields) -> set[tuple[int, Any]]:
        """Return the places, an object's id and a name, where these differ from others."""
        missing = object()
        before, now = self._values, others._values
        return {key for key in before | now if not _is_same(before.get(key, missing), now.get(key, missing))}


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (
        type(a) is type(b) and isinstance(a, (int, float, complex, str, bytes)) and (a == b or a != a != b)
    )


_NO_LAYERS = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, Tensor, type, ModuleType)


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what an object holds, by the names or the places there."""
    if isinstance(value, _NO_LAYERS):
        return []
    if isinstance(value, Layer):
        return list(vars(value).items())
    layers = getattr(value, "layers", value)
    if isinstance(layers, Mapping):
        return list(layers.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, set | frozenset):
        if sum(isinstance(part, Layer) for part in value) > 1:
            raise ConfigurationError("a layer holds others in a set, which has no order; hold them in a list")
        return list(enumerate(value))
    if isinstance(value, MethodType):
        return [*_parts_of(value.__func__), ("self", value.__self__)]
    if isinstance(value, partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        return [(name, cell.cell_contents) for name, cell in zip(names, cells, strict=True) if _is_filled(cell)]
    if type(value).__module__.partition(".")[0] == "py_engine":
        return []  # an engine's object keeps much that is none of a layer's own
    slots = [name for cls in type(value).__mro__ for name in (getattr(cls, "__slots__", None) or ())]
    own = [(name, getattr(value, name)) for name in slots if isinstance(name, str) and hasattr(value, name)]
    return [*own, *getattr(value, "__dict__", {}).items()]


def _is_filled(cell: CellType) -> bool:
    """Whether a captured variable has a value yet."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


# State that training changes by itself --------------------------------------------------------------------


def collect_updates() -> collecting:
    """Collect what layers called inside want to `update`: pairs of a parameter and its new value."""
    return collecting("updates")


def update(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter that is not trained a new value, from a layer's `forward` in training.

    Eagerly that happens at once. A trainer collects the updates and makes them part of its step; in a function
    that anything else compiles, they are left out. See `latest`.

    Raises:
        ShapeError, DTypeError: the value is of another shape or dtype.
    """
    new = ops.stop_gradient(value)
    if new.shape != parameter.shape:
        raise ShapeError(f"update: expected a value of shape {parameter.shape}, actual {new.shape}")
    if new.dtype != parameter.dtype:
        raise DTypeError(f"update: expected a value of {parameter.dtype}, actual {new.dtype}")
    state.update(parameter, new)


def latest(parameter: Tensor) -> Tensor:
    """The value that a parameter has by now: that of the last `update` in this step, or else its own."""
    return next((value for updated, value in reversed(STATE.updates or ()) if updated is parameter), parameter)
