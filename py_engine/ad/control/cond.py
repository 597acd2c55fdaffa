"""Branches on values: one op with a program for each branch, of which a replay runs the one that is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.containers import Structure, flatten, flatten_as, paths, unflatten
from py_engine.ad.control.scan import Tapes, check_dtypes, like, tensors_of, zeros
from py_engine.ad.forward import push_forward
from py_engine.ad.op import Call, Op, Shape, as_tensor
from py_engine.ad.ops.shape import aligned
from py_engine.ad.program import Program, close_over, nested_trace, without_inner
from py_engine.ad.reverse import gradients
from py_engine.ad.state import LEVELS, STATE, restoring
from py_engine.ad.techniques import COMPILE_DEFAULTS, Techniques
from py_engine.ad.tensor import FLOATS, Array, Node, Tensor
from py_engine.ad.transforms import Function
from py_engine.ad.vmap import batched, batched_program
from py_engine.errors import ConfigurationError, DTypeError, ShapeError, TraceError


@restoring
def cond(pred: Any, true_fun: Function, false_fun: Function, *operands: Any) -> Any:
    """Return `true_fun(*operands)` where `pred` holds, and `false_fun(*operands)` where it does not.

    Both functions are traced, so that their Python code runs once and cannot branch on values; only one of them is
    computed, eagerly, in each replay of a compiled function, and in derivatives. These are of any order in both modes;
    the backward pass computes the inside of the branch once more. Under `vmap`, where `pred` differs from sample to
    sample, both are computed for all samples, and chosen from (as `where` does: keep both finite).

    Args:
        pred: one truth value, such as a comparison of numbers.
        true_fun: takes the operands and returns an array or a container of arrays. What it captures has its gradient.
        false_fun: takes the same and returns the same structure, shapes and dtypes.
        operands: arrays, tensors or containers of them.

    Raises:
        DTypeError: `pred` is no truth value; the functions' results differ in dtype; an operand is no array of numbers.
        ShapeError: `pred` is more than one value; the results differ in structure or shape.
        ConfigurationError: `true_fun` or `false_fun` is not callable.
        TraceError: a function branches on a value; or draws random numbers, and a derivative is taken.

    Example:
        >>> compiled = compile(grad(lambda x: cond(x > 0, lambda x: x**2, lambda x: -x, x)))
        >>> [float(compiled(np.array(x))) for x in (3.0, -3.0)]
        [6.0, -1.0]
    """
    for name, function in (("true_fun", true_fun), ("false_fun", false_fun)):
        if not callable(function):
            raise ConfigurationError(f"cond: {name} must be a function, got {type(function).__name__}")
    chosen = truth_value("cond: pred", pred)
    leaves, structure = flatten(operands)
    inputs = tensors_of(leaves)
    check_dtypes("cond", inputs, [f"operand {path}" for path in paths(structure)])
    branches, captured, returned = _traced((false_fun, true_fun), inputs, structure)
    values = (chosen, *inputs, *captured)
    if STATE.symbolic or any(x.data is None for x in values):
        return unflatten(returned, COND.apply_several(values, {"branches": branches}))
    return unflatten(returned, branches.programs[int(chosen.item())](values[1:]))


def truth_value(what: str, x: Any) -> Tensor:
    """Return one truth value as a tensor.

    Raises:
        DTypeError, ShapeError: it is something else.
    """
    found = as_tensor(x)
    if found.dtype != np.bool_:
        raise DTypeError(f"{what} must be a truth value, such as x > 0, got {found.dtype}")
    if found.shape:
        raise ShapeError(f"{what} must be one truth value, got shape {found.shape}; use numpy.any() or numpy.all()")
    return found


def _traced(
    functions: tuple[Function, Function], inputs: Sequence[Tensor], structure: Structure
) -> tuple[Branches, list[Tensor], Structure]:
    """Return the functions as programs of the same inputs, what they capture, and the structure of their results."""
    traces, leaves, returned, level = [], [], Structure(), next(LEVELS)
    for k, function in enumerate(functions):
        symbols = [Tensor.symbol(x.shape, x.dtype) for x in inputs]
        with nested_trace() as nodes:
            result = function(*unflatten(structure, symbols))
        if k == 0:
            found, returned = flatten(result)
        else:
            found = flatten_as(result, returned, "cond: what true_fun returned, compared with false_fun")
        traces.append((nodes, symbols))
        leaves.append(found)
    # A plain number has the dtype that the other branch's result has.
    first, second = (
        [like(x, y) if isinstance(y, Tensor) else as_tensor(x) for x, y in zip(own, others, strict=True)]
        for own, others in ((leaves[0], leaves[1]), (leaves[1], leaves[0]))
    )
    for a, b, path in zip(first, second, paths(returned), strict=True):
        if a.shape != b.shape:
            raise ShapeError(
                f"cond: the result{path} is of shape {b.shape} from true_fun, and {a.shape} from false_fun"
            )
        if a.dtype != b.dtype:
            raise DTypeError(f"cond: the result{path} is of {b.dtype} from true_fun, and {a.dtype} from false_fun")
    closed = [close_over(*traces[0], first), close_over(*traces[1], second)]
    branches, captured = _of_same_inputs(closed, len(inputs))
    return branches, without_inner(captured, level), returned


def _of_same_inputs(
    closed: Sequence[tuple[Program, list[Tensor]]], count: int, derived: bool = False
) -> tuple[Branches, list[Tensor]]:
    """Return programs that have `count` inputs, and then what each captures, as branches that have all of these."""
    captured = {id(x): x for _, own in closed for x in own}
    programs = []
    for program, own in closed:
        known = dict(zip(map(id, own), program.inputs[count:], strict=True))
        others = [known[i] if i in known else Tensor.symbol(x.shape, x.dtype) for i, x in captured.items()]
        programs.append(Program((*program.inputs[:count], *others), program.equations, program.outputs))
    return Branches((programs[0], programs[1]), derived), [*captured.values()]


# The op ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Branches:
    """Two programs, for a false and for a true predicate, of the same inputs and with results of the same kinds.

    Attributes:
        programs: the two.
        derived: whether it is a derivative of other branches, which make the checks of values.
    """

    programs: tuple[Program, Program]
    derived: bool = False
    derivatives: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reduced = [program.without_unused(0) for program in self.programs]
        self.tapes = [(Tapes(program), used) for program, used in reduced]

    def __repr__(self) -> str:
        return f"<{self.programs[1]!r} or {self.programs[0]!r}>"

    @property
    def kinds(self) -> list[tuple[Shape, Any]]:
        """Shape and dtype of each result."""
        return [(x.shape, x.dtype) for x in self.programs[0].outputs]

    @property
    def checks(self) -> bool:
        """Whether a program accepts only some values, and no other op checks them."""
        return not self.derived and any(program.checks for program in self.programs)

    def run(self, chosen: bool, inputs: Sequence[Array], outs: Sequence[Array], techniques: Techniques) -> None:
        """Compute one of the programs into these arrays."""
        tapes, used = self.tapes[chosen]
        with tapes.one(techniques) as tape:
            given = [x for x, read in zip(inputs, used, strict=True) if read]
            for buffer, array in zip(tape.inputs, given, strict=True):
                np.copyto(buffer, array)
            tape.run()
            for out, buffer in zip(outs, tape.outputs, strict=True):
                np.copyto(out, buffer)

    # Derivatives: branches again, whose programs compute the inside of a branch once more.

    def _derive(self, make: Callable[..., Any], *flags: tuple[bool, ...]) -> Any:
        key = (make.__name__, *flags)
        if key not in self.derivatives:
            for program in self.programs:
                if program.random is not None:
                    raise TraceError(
                        f"cond: a function draws random numbers ({program.random}), which its derivative would draw "
                        "anew; draw them before and pass them as an operand"
                    )
            closed = [make(program, *flags) for program in self.programs]
            self.derivatives[key] = _of_same_inputs([x for x, _ in closed], closed[0][1], derived=True)
        return self.derivatives[key]

    def backward(self, given: tuple[bool, ...], needs_grad: tuple[bool, ...]) -> tuple[Branches, list[Tensor]]:
        """Return the branches that compute the gradients by the inputs that need one, and constants that they read.

        Their inputs are those of the branches, and the cotangents of the results that are `given` one.
        """
        return self._derive(_backward, given, needs_grad)  # type: ignore[no-any-return]

    def tangent(self, given: tuple[bool, ...]) -> tuple[Branches, list[Tensor]]:
        """Return the branches that compute the tangents of all floating results, and constants that they read.

        Their inputs are those of the branches, and the tangents of those that are `given` one.
        """
        return self._derive(_tangent, given)  # type: ignore[no-any-return]


Closed = tuple[tuple[Program, list[Tensor]], int]
"""A program with what it captures, and the number of its own inputs."""


def _backward(program: Program, given: Sequence[bool], needs_grad: Sequence[bool]) -> Closed:
    inputs = program.symbols()
    seeds = [Tensor.symbol(y.shape, y.dtype) for y, has_seed in zip(program.outputs, given, strict=True) if has_seed]
    targets = [x for x, needed in zip(inputs, needs_grad, strict=True) if needed]
    with nested_trace() as nodes:
        outputs = [y for y, has_seed in zip(program(inputs), given, strict=True) if has_seed]
        found = gradients(outputs, seeds, targets, stop_at_targets=True)
        results = [zeros(x.shape, x.dtype) if g is None else g for g, x in zip(found, targets, strict=True)]
    own = [*inputs, *seeds]
    return close_over(nodes, own, results, checks=False), len(own)


def _tangent(program: Program, given: Sequence[bool]) -> Closed:
    inputs = program.symbols()
    known = {x: Tensor.symbol(x.shape, x.dtype) for x, has_tangent in zip(inputs, given, strict=True) if has_tangent}
    with nested_trace() as nodes:
        outputs = program(inputs)
        pushed = push_forward(outputs, known)
        results = [
            zeros(y.shape, y.dtype) if t is None else t
            for t, y in zip(pushed, outputs, strict=True)
            if y.dtype in FLOATS
        ]
    own = [*inputs, *known.values()]
    return close_over(nodes, own, results, checks=False), len(own)


def _kernel(chosen: Array, *arrays: Array, branches: Branches, techniques: Techniques | None = None) -> None:
    first = len(arrays) - len(branches.kinds)
    branches.run(bool(chosen), arrays[:first], arrays[first:], techniques or STATE.techniques or COMPILE_DEFAULTS)


def _bind(arrays: Sequence[Array], *rest: Any, **attrs: Any) -> Sequence[Call]:
    *outs, _ = rest  # and what makes scratch memory
    return [partial(_kernel, *arrays, *outs, techniques=STATE.techniques, **attrs)]


def _pull_back(cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    branches: Branches = node.attrs["branches"]
    seeds = [g for g in cotangents if g is not None]
    back, others = branches.backward(tuple(g is not None for g in cotangents), tuple(needs_grad[1:]))
    found = iter(COND.apply_several((*node.inputs, *seeds, *others), {"branches": back}))
    return [next(found) if needed else None for needed in needs_grad]


def _jvp(tangents: Sequence[Tensor | None], node: Node, *inputs: Tensor, branches: Branches) -> list[Tensor | None]:
    known = [t for t in tangents[1:] if t is not None]
    tangent_branches, others = branches.tangent(tuple(t is not None for t in tangents[1:]))
    found = iter(COND.apply_several((*inputs, *known, *others), {"branches": tangent_branches}))
    return [next(found) if dtype in FLOATS else None for _, dtype in node.kinds]


def _batch(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    branches: Branches = attrs["branches"]
    chosen, *values = inputs
    if mapped[0]:
        no, yes = (batched(program, samples, values, mapped[1:])[0] for program in branches.programs)
        kinds = branches.kinds
        chosen_for = [aligned(chosen, len(shape)) for shape, _ in kinds]
        return [ops.where(*three) for three in zip(chosen_for, yes, no, strict=True)], [True] * len(kinds)
    new, flags = branches.derivatives.get(("of_many", samples, *mapped), (None, []))
    if new is None:
        each = [batched_program(program, samples, mapped[1:])[1] for program in branches.programs]
        flags = [a or b for a, b in zip(*each, strict=True)]
        first, second = (batched_program(program, samples, mapped[1:], flags)[0] for program in branches.programs)
        new = Branches((first, second), branches.derived)
        branches.derivatives["of_many", samples, *mapped] = new, flags
    return op.apply_several(tuple(inputs), {"branches": new}), flags


COND: Op = Op(
    "cond",
    lambda *inputs, branches: branches.kinds,
    kernel=_kernel,
    bind=_bind,
    several=True,
    vjp=_pull_back,
    opaque=True,
    jvp=_jvp,
    batch=_batch,
    checks=lambda *inputs, **attrs: (COND, inputs, attrs) if attrs["branches"].checks else None,
    doc="one of two programs, chosen by a truth value",
)
