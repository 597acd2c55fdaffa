"""Rules of the user's own: a function that the engine does not look into, with the derivatives given by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from py_engine.ad import ops
from py_engine.ad.containers import flatten, unflatten
from py_engine.ad.forward import push_forward
from py_engine.ad.mutation import note_given
from py_engine.ad.op import Op, Shape, as_tensor, as_tensors
from py_engine.ad.reverse import gradients, variable
from py_engine.ad.state import LEVELS, STATE, entering, restoring
from py_engine.ad.tensor import FLOATS, Array, Node, Tensor
from py_engine.errors import ConfigurationError, DTypeError, EngineError, NotDifferentiableError, ShapeError, TraceError

Function = Callable[..., Any]
Kind = tuple[Shape, Any]


def stop_gradient(x: Any) -> Any:
    """Return the same values as constants, through which no gradient flows: an array or a container of arrays."""
    leaves, structure = flatten(x)
    return unflatten(structure, [ops.stop_gradient(leaf) for leaf in leaves])


def custom_rule(
    function: Function,
    vjp: Function | None = None,
    jvp: Function | None = None,
    infer: Callable[..., tuple[Sequence[int], Any]] | None = None,
) -> Callable[..., Tensor]:
    """Return `function` as an op with derivatives of the user's own.

    The function and its rules are called with numpy arrays, and may do anything with them but write to them or keep
    them: code that the engine does not know (scipy, a C library) is differentiable so, eagerly, in transforms, and
    as one call of a compiled tape. Second derivatives need rules that work on tensors as well, which is to say that
    they are written in operators, numpy's functions or `py_engine.ops`.

    Args:
        function: from arrays to one array.
        vjp: `vjp(g, y, *inputs)`, from the upstream gradient, the result and the inputs to one gradient per input,
            of its shape and dtype, or None for zero: a tuple, or the gradient itself if there is one input. Needed
            by `grad`, `vjp` and `backward()`.
        jvp: `jvp(tangents, y, *inputs)`, from a tuple of tangents (None for inputs that are not floats) to that of
            the result. Needed by `jvp` and forward mode.
        infer: `infer(*inputs)` gives the result's shape and dtype; the inputs have `.shape` and `.dtype`. None finds
            them in a trace by calling the function on ones.

    Raises:
        ShapeError: a result has another shape than it should, or there are too many or too few gradients.
        DTypeError: a result has another dtype than it should.
        NotDifferentiableError: a derivative is taken whose rule is missing, or the function captures a tensor that
            requires a gradient.

    Example:
        >>> cube = custom_rule(lambda x: x**3, vjp=lambda g, y, x: g * 3 * x**2)
        >>> grad(lambda x: np.sum(cube(x)))(np.array([1.0, 2.0]))
        array([ 3., 12.])
    """
    for name, given in (("vjp", vjp), ("jvp", jvp), ("infer", infer)):
        if given is not None and not callable(given):
            raise ConfigurationError(f"custom_rule: {name} must be a function, got {given!r}")
    rule = _Rule(getattr(function, "__name__", type(function).__name__), function, vjp, jvp, infer)

    @restoring
    def apply(*operands: ArrayLike | Tensor) -> Tensor:
        for i, x in enumerate(operands):
            if isinstance(x, (dict, list, tuple)) and any(isinstance(leaf, Tensor) for leaf in flatten(x)[0]):
                raise ShapeError(f"{rule.label}: input {i} is a container; pass its arrays as separate inputs")
        return rule.apply(as_tensors(operands))

    apply.__name__, apply.__doc__ = rule.name, function.__doc__
    return apply


@dataclass(frozen=True, eq=False, repr=False)
class _Rule:
    """A function with its derivatives."""

    name: str
    function: Function
    vjp: Function | None
    jvp: Function | None
    infer: Callable[..., tuple[Sequence[int], Any]] | None

    def __repr__(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return f"custom rule {self.name}"

    def apply(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if STATE.symbolic or any(x.data is None for x in inputs):
            if STATE.grad_enabled and any(x.data is None and x.requires_grad for x in captured(self.function)):
                raise self._uses_another()
            shape, dtype = self._kind(inputs)
            return CUSTOM.apply(inputs, {"rule": self, "shape": shape, "dtype": dtype})
        y = np.array(self.value([x.data for x in inputs]))  # the function may return the same memory again and again
        if self.infer is not None:
            self.check_kind(y, self._kind(inputs))
        return _made(CUSTOM, inputs, {"rule": self, "shape": y.shape, "dtype": y.dtype}, y)

    def value(self, arrays: Sequence[Any]) -> Array:
        with entering(trace=None, symbolic=False, differentiating=False, watched=None, given=None):
            y = self.function(*arrays)
        if isinstance(y, Tensor) and y.requires_grad and STATE.grad_enabled:
            raise self._uses_another()
        return _array(y, self.label)

    def check_kind(self, y: Array, kind: Kind) -> None:
        if (y.shape, y.dtype) != kind:
            raise ShapeError(
                f"{self.label}: the function returned shape {y.shape} {y.dtype}, but {kind[0]} {kind[1]} "
                f"{'is what infer said' if self.infer else 'when it was tried on ones; give infer=...'}"
            )

    def _uses_another(self) -> NotDifferentiableError:
        return NotDifferentiableError(
            f"{self.label}: the function uses a tensor that requires a gradient and is no input of it, so that its "
            "rule does not know it; make it an input, or take its .numpy() if it is a constant"
        )

    def _kind(self, inputs: Sequence[Tensor]) -> Kind:
        if self.infer is not None:
            shape, dtype = self.infer(*inputs)
            return tuple(int(n) for n in shape), np.dtype(dtype)
        try:
            with np.errstate(all="ignore"):
                y = self.value([np.ones(x.shape, x.dtype) for x in inputs])
        except Exception as error:
            raise TraceError(
                f"{self.label}: the shape of its result is found by calling it on ones, which failed "
                f"({type(error).__name__}: {error}); give infer=..., which tells shape and dtype"
            ) from error
        return y.shape, y.dtype

    # The rules on arrays ----------------------------------------------------------------------------------

    def pulled(self, needs_grad: Sequence[bool], g: Any, y: Any, *inputs: Any) -> list[Any]:
        """Return the gradients that are needed."""
        if self.vjp is None:
            raise self.missing("vjp")
        found = self.vjp(g, y, *inputs)
        if not isinstance(found, (tuple, list)):
            found = (found,)
        if len(found) != len(inputs):
            raise ShapeError(
                f"{self.label}: vjp must return one gradient per input, {len(inputs)} in all, but returned {len(found)}"
            )
        return [
            self._checked(f"the gradient of input {i}", part, x)
            for i, (part, x, needed) in enumerate(zip(found, inputs, needs_grad, strict=True))
            if needed
        ]

    def pushed(self, y: Any, tangents: Sequence[Any], *inputs: Any) -> list[Any]:
        """Return the tangent of the result."""
        if self.jvp is None:
            raise self.missing("jvp")
        found = self.jvp(tuple(tangents), y, *inputs)
        if found is None:
            raise ShapeError(f"{self.label}: jvp returned None; where the tangent is zero, return zeros")
        return [self._checked("the tangent of the result", found, y)]

    def _checked(self, what: str, found: Any, like: Any) -> Any:
        if found is None:
            return ops.broadcast_to(0.0, like.shape).astype(like.dtype) if isinstance(like, Tensor) else 0
        if not isinstance(found, Tensor):
            found = np.asarray(found)
        if found.shape != like.shape:
            raise ShapeError(f"{self.label}: {what} must have shape {like.shape}, got {found.shape}")
        if found.dtype != like.dtype:
            raise DTypeError(f"{self.label}: {what} must be of {like.dtype}, got {found.dtype}")
        return found

    def missing(self, which: str) -> NotDifferentiableError:
        wanted = "a gradient" if which == "vjp" else "a forward-mode derivative"
        return NotDifferentiableError(f"{self.label}: {wanted} is taken, but there is no rule for it; give {which}=...")


def captured(function: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors that a function has in its closure, and functions there, and so on: a result may depend on them."""
    if isinstance(function, Tensor):
        yield function
    elif isinstance(function, partial) and depth:
        for part in (function.func, *function.args, *function.keywords.values()):
            yield from captured(part, depth - 1)
    elif isinstance(function, (tuple, list)) and depth:
        for part in function:
            yield from captured(part, depth - 1)
    elif isinstance(function, FunctionType) and depth:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield from captured(cell.cell_contents, depth - 1)
        yield from captured(function.__defaults__ or (), depth - 1)


def _opaque() -> entering:
    """Run code of the user's own, which is not part of any trace."""
    return entering(trace=None, symbolic=False, grad_enabled=False, differentiating=False, watched=None, given=None)


def _array(y: Any, label: str) -> Array:
    if isinstance(y, tuple):
        raise ShapeError(
            f"{label}: the function must return one array, got a tuple of {len(y)}; join them with np.stack"
        )
    array = y.numpy() if isinstance(y, Tensor) else np.asarray(y)
    if array.dtype.kind not in "fiub":
        raise DTypeError(f"{label}: the function must return one array of numbers, got {array.dtype}")
    return array


def _made(op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], data: Array) -> Tensor:
    """Return the result of an op that is computed already."""
    result = Tensor(data)
    result.scope = STATE.scope
    if STATE.grad_enabled and data.dtype in FLOATS:
        result.level = max((x.level for x in inputs), default=0)
    if result.level or STATE.trace is not None:
        result.op, result.inputs, result.attrs = op, inputs, attrs
        result.versions = op.guard(inputs, attrs) if result.level else None
    if STATE.trace is not None:
        STATE.trace.append(result)
        note_given(inputs)
    return result


# The function as an op ------------------------------------------------------------------------------------


def _kernel(*arrays: Array, rule: _Rule, shape: Shape, dtype: Any) -> None:
    y = rule.value(arrays[:-1])
    rule.check_kind(y, (shape, dtype))
    np.copyto(arrays[-1], y)


def _pull_back(cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Tensor) -> list[Tensor | None]:
    rule: _Rule = node.attrs["rule"]
    if rule.vjp is None:
        raise rule.missing("vjp")
    (g,) = cotangents
    assert g is not None
    kinds = tuple([(x.shape, x.dtype) for x, needed in zip(node.inputs, needs_grad, strict=True) if needed])
    attrs = {"function": _Pulled(rule, tuple(needs_grad)), "kinds": kinds}
    found = iter(DERIVATIVE.apply_several((g, node, *node.inputs), attrs))
    return [next(found) if needed else None for needed in needs_grad]


def _jvp(tangents: Sequence[Tensor | None], y: Tensor, *inputs: Tensor, rule: _Rule, **attrs: Any) -> Tensor:
    if rule.jvp is None:
        raise rule.missing("jvp")
    known = [
        Tensor(np.zeros(x.shape, x.dtype)) if t is None and x.dtype in FLOATS else t
        for t, x in zip(tangents, inputs, strict=True)
    ]
    pushed = {"function": _Pushed(rule, tuple(t is not None for t in known)), "kinds": ((y.shape, y.dtype),)}
    (found,) = DERIVATIVE.apply_several((y, *inputs, *(t for t in known if t is not None)), pushed)
    return found


CUSTOM = Op(
    "custom",
    lambda *inputs, rule, shape, dtype: (shape, dtype),
    kernel=_kernel,
    vjp=_pull_back,
    opaque=True,
    jvp=_jvp,
    doc="a function of the user's own, with rules of the user's own",
)


# A rule as an op ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pulled:
    """The vjp rule as a function of upstream gradient, result and inputs."""

    rule: _Rule
    needs_grad: tuple[bool, ...]

    def __call__(self, *values: Any) -> list[Any]:
        return self.rule.pulled(self.needs_grad, *values)


@dataclass(frozen=True)
class _Pushed:
    """The jvp rule as a function of result, inputs and the tangents of those inputs that have one."""

    rule: _Rule
    given: tuple[bool, ...]

    def __call__(self, *values: Any) -> list[Any]:
        inputs = values[1 : 1 + len(self.given)]
        tangents = iter(values[1 + len(self.given) :])
        return self.rule.pushed(values[0], [next(tangents) if given else None for given in self.given], *inputs)


@restoring
def _compute_derivative(*arrays: Array, function: Any, kinds: Sequence[Kind]) -> None:
    count = len(arrays) - len(kinds)
    with _opaque():
        found = function(*arrays[:count])
    for out, part in zip(arrays[count:], found, strict=True):
        out[...] = part.numpy() if isinstance(part, Tensor) else part


def _on_tensors(
    inputs: Sequence[Tensor], needs_grad: Sequence[bool], function: Any
) -> tuple[list[Tensor], list[Tensor], int]:
    """Return new variables for these inputs, what the rule computes from them as a graph, and its level."""
    level = next(LEVELS)
    try:
        with entering(grad_enabled=True):
            own = [variable(x, level) if needed else x for x, needed in zip(inputs, needs_grad, strict=True)]
            return own, [as_tensor(part) for part in function(*own)], level
    except (EngineError, TypeError, AttributeError) as error:
        raise NotDifferentiableError(
            f"{function.rule.label}: a second derivative is taken, so its rules must work on tensors, too: write them "
            f"in operators, numpy's functions or py_engine.ops ({error})"
        ) from error


def _pull_back_derivative(
    cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node
) -> list[Tensor | None]:
    own, outputs, level = _on_tensors(node.inputs, needs_grad, node.attrs["function"])
    seeded = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None]
    targets = [x for x, needed in zip(own, needs_grad, strict=True) if needed]
    found = iter(gradients([y for y, _ in seeded], [g for _, g in seeded], targets, stop_at_targets=True, level=level))
    return [next(found) if needed else None for needed in needs_grad]


def _push_derivative(
    tangents: Sequence[Tensor | None], node: Node, *inputs: Tensor, function: Any, kinds: Sequence[Kind]
) -> list[Tensor | None]:
    own, outputs, level = _on_tensors(inputs, [t is not None for t in tangents], function)
    known = {x: t for x, t in zip(own, tangents, strict=True) if t is not None}
    return push_forward(outputs, known, level=level)


DERIVATIVE = Op(
    "custom_derivative",
    lambda *inputs, function, kinds: kinds,
    kernel=_compute_derivative,
    several=True,
    vjp=_pull_back_derivative,
    opaque=True,
    jvp=_push_derivative,
    doc="a derivative by a rule of the user's own",
)
