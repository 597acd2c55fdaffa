"""Programs: a traced function as the list of ops that compute it. Passes take a program and return one.

Nothing in a program changes once it is made. Its variables are symbolic tensors, which are known by their identity;
what a program reads besides its inputs and its own results are constants: numbers, and tensors with data, which are
captured by reference, so that a later `assign` to them is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from py_engine.ad.containers import kind_of
from py_engine.ad.mutation import Watch, collecting_ops
from py_engine.ad.op import ZEROS, Equation, Op
from py_engine.ad.ops.elementary import stop_gradient
from py_engine.ad.state import STATE, entering
from py_engine.ad.tensor import FLOATS, Literal, Node, Tensor
from py_engine.errors import TraceError


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A function of tensors as the equations that compute it, in order.

    Attributes:
        watched: what the traced function took the values of: a replay raises where it has changed.
    """

    inputs: tuple[Tensor, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Tensor, ...]
    watched: tuple[Watch, ...] = ()

    def __repr__(self) -> str:
        return f"<{len(self.equations)} ops>"

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Apply the ops to other inputs, of the same shapes and dtypes."""
        values = {id(x): value for x, value in zip(self.inputs, inputs, strict=True)}
        with entering(scope=STATE.scope):
            for equation in self.equations:
                op, found = equation.op, tuple([values.get(id(x), x) for x in equation.inputs])
                STATE.scope = equation.scope
                results = op.apply_several(found, equation.attrs) if op.several else (op.apply(found, equation.attrs),)
                values.update(zip(map(id, equation.outputs), results, strict=True))
        return [values.get(id(x), x) for x in self.outputs]

    @property
    def random(self) -> str | None:
        """The name of an op that draws anew whenever it is computed, if there is one, in loops and branches too."""
        return next(filter(None, (drawing(equation.op, equation.attrs) for equation in self.equations)), None)

    @property
    def checks(self) -> bool:
        """Whether an op accepts only some values."""
        steps = [(x, x.op.checks) for x in self.equations]
        return any(check is not None and check(*x.inputs, **x.attrs) is not None for x, check in steps)

    def symbols(self) -> list[Tensor]:
        """Return a new symbolic tensor for each input."""
        return [Tensor.symbol(x.shape, x.dtype) for x in self.inputs]

    def without_unused(self, first: int) -> tuple[Program, list[bool]]:
        """Drop unused inputs after the first `first`; also return the mask of those that stay."""
        read = {id(x) for equation in self.equations for x in equation.inputs} | {id(x) for x in self.outputs}
        used = [i < first or id(x) in read for i, x in enumerate(self.inputs)]
        inputs = tuple(x for x, keep in zip(self.inputs, used, strict=True) if keep)
        return Program(inputs, self.equations, self.outputs, self.watched), used


def drawing(op: Op, attrs: Mapping[str, Any]) -> str | None:
    """The name of the op that draws random numbers: this one, or one in the loop or branches among its attributes."""
    if op.random:
        return op.name
    return next(filter(None, (program.random for program in programs_in(attrs))), None)


def programs_in(attrs: Mapping[str, Any]) -> list[Program]:
    """Return the programs in an op's attributes: those that it repeats or chooses from."""
    return [program for value in attrs.values() for program in getattr(value, "programs", ())]


def inner_equations(equation: Equation) -> Iterator[Equation]:
    """Yield the equations inside an equation, to any depth: a loop's body, or the op that `vmap` applies by samples."""
    inside = [inner for program in programs_in(equation.attrs) for inner in program.equations]
    if isinstance(op := equation.attrs.get("op"), Op) and "mapped" in equation.attrs:
        inside.append(replace(equation, op=op, attrs=dict(equation.attrs["attrs"])))
    for inner in inside:
        yield inner
        yield from inner_equations(inner)


# Tracing --------------------------------------------------------------------------------------------------


def tracing() -> collecting_ops:
    """Make every op symbolic, and collect the ops in the order they are made."""
    if STATE.trace is not None:
        raise TraceError("a function cannot be compiled inside another one's trace; call it uncompiled there")
    return collecting_ops(symbolic=True, watched=[])


def nested_trace() -> collecting_ops:
    """Make every op symbolic, and collect the ops, also inside another trace.

    Where layers called outside would `update` a parameter, those called inside can't: there is no value to give it.
    """
    kept = STATE.updates is not None or STATE.trace is None
    return collecting_ops(symbolic=True, grad_enabled=True, updates=_NoMore(STATE.updates or ()) if kept else None)


class _NoMore(list[Any]):
    """The updates that were made before, to which none may be added."""

    def append(self, update: Any) -> None:
        raise TraceError(
            "a layer gives a parameter a new value, such as its running statistics, inside a loop, a branch or vmap, "
            "where nothing has a value yet; call the layer outside of it"
        )


def trace(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Program:
    """Run `function` on symbolic inputs and return the program of what it did."""
    with tracing() as nodes:
        outputs = function(*inputs)
        watched = STATE.watched or ()
    return traced(nodes, inputs, outputs, watched)


def traced(
    nodes: Sequence[Tensor | Node],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    watched: Iterable[Watch] = (),
    checks: bool = True,
) -> Program:
    """Return the program of collected ops, without those that no output needs; see `prune`."""
    return prune(Program(tuple(inputs), equations_of(nodes), tuple(outputs), tuple(watched)), checks)


def equations_of(nodes: Iterable[Tensor | Node]) -> tuple[Equation, ...]:
    """Return collected ops as equations."""
    found = []
    for x in nodes:
        assert x.op is not None
        outputs = tuple([x.result(i) for i in range(len(x.kinds))]) if isinstance(x, Node) else (x,)
        found.append(Equation(x.op, x.inputs, x.attrs, outputs, x.scope))
    return tuple(found)


def without_inner(captured: Sequence[Tensor], level: int) -> list[Tensor]:
    """Return what a function captures, with the variables of transforms that began inside of it as constants."""
    return [Tensor(x.data) if x.level > level and x.data is not None else x for x in captured]


def close_over(
    nodes: Sequence[Tensor | Node],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    redraw: bool = True,
    checks: bool = True,
) -> tuple[Program, list[Tensor]]:
    """Return collected ops as a program, and the tensors from elsewhere that they read: its further inputs.

    Args:
        nodes: the ops, in order; they may have values, which the program does not hold.
        inputs: the program's own inputs.
        outputs: its results.
        redraw: whether ops that draw random numbers are part of it; if not, what they drew is another input.
        checks: whether checks of values that the results do not need are part of it, see `prune`.
    """
    collected = equations_of(nodes)
    inner = {id(x) for x in inputs} | {id(x) for step in collected for x in step.outputs}
    steps = []
    for step in _needed_equations(collected, outputs, checks):
        name = None if redraw else drawing(step.op, step.attrs)
        if name is None:
            steps.append(step)
        elif not step.op.random and any(x.requires_grad for x in step.inputs):
            raise TraceError(
                f"a loop or a branch that draws random numbers ({name}) is differentiated where they are kept and not "
                "drawn again; draw them before and pass them in"
            )
    made = {id(x) for x in inputs} | {id(x) for step in steps for x in step.outputs}
    captured: dict[int, Tensor] = {}
    for x in (*(a for step in steps for a in step.inputs), *outputs):
        if id(x) not in made and not isinstance(x, Literal):
            captured.setdefault(id(x), x)
    given = [*inputs, *captured.values()]
    symbols = [Tensor.symbol(x.shape, x.dtype) for x in given]
    variables = {id(x): symbol for x, symbol in zip(given, symbols, strict=True)}
    equations: list[Equation] = []
    for step in steps:
        reads = tuple([variables.get(id(a), a) for a in step.inputs])
        results = tuple([Tensor.symbol(x.shape, x.dtype, scope=step.scope) for x in step.outputs])
        equations.append(Equation(step.op, reads, step.attrs, results, step.scope))
        for x, found in zip(step.outputs, results, strict=True):
            if _made_without_grad(step, x):  # applied anew it would have a derivative
                equations.append(Equation.of(stop_gradient, (found,), {}, step.scope))
                found = equations[-1].output
            variables[id(x)] = found
    program = Program(tuple(symbols), tuple(equations), tuple(variables.get(id(x), x) for x in outputs))
    # What an op drew is a constant from here on; other captured tensors stay part of the graph around.
    return program, [Tensor(x.data) if id(x) in inner and x.data is not None else x for x in captured.values()]


def _made_without_grad(equation: Equation, x: Tensor) -> bool:
    """Whether its result `x` would have a derivative, had it not been made under `no_grad()`."""
    if x.requires_grad or x.dtype not in FLOATS or equation.op.constant:
        return False
    return any(a.requires_grad for a in equation.inputs)


# Dead code ------------------------------------------------------------------------------------------------


def prune(program: Program, checks: bool = True) -> Program:
    """Drop the equations that no output needs, but for their checks of values.

    A function refuses the same values whether or not its result depends on them. What a needed op checks is not
    checked twice.
    """
    equations = tuple(_needed_equations(program.equations, program.outputs, checks))
    return Program(program.inputs, equations, program.outputs, program.watched)


def _needed_equations(equations: Sequence[Equation], outputs: Sequence[Tensor], checks: bool) -> list[Equation]:
    needed = _needed(equations, {id(x) for x in outputs})
    others = [x for x in equations if x.op.checks is not None and not _is_read(x, needed)] if checks else []
    instead = _checks([x for x in equations if _is_read(x, needed)], others) if others else {}
    if instead:
        needed = _needed(equations, needed | {id(a) for check in instead.values() for a in check.inputs})
    found = []
    for x in equations:
        if _is_read(x, needed):
            found.append(x if x.op.narrow is None else _narrowed(x, needed))
        elif id(x) in instead:
            found.append(instead[id(x)])
    return found


def _needed(equations: Sequence[Equation], needed: set[int]) -> set[int]:
    """Return the ids of these variables and of all that they are computed from."""
    needed = set(needed)
    for equation in reversed(equations):
        if _is_read(equation, needed):
            needed.update(id(x) for x in equation.inputs)
    return needed


def _is_read(equation: Equation, needed: set[int]) -> bool:
    return any(id(x) in needed for x in equation.outputs)


def _narrowed(equation: Equation, needed: set[int]) -> Equation:
    """Return the op with no more results than are needed."""
    assert equation.op.narrow is not None
    attrs = equation.op.narrow(equation.attrs, [id(x) in needed for x in equation.outputs])
    kinds = equation.op.infer(*equation.inputs, **attrs)
    return Equation(equation.op, equation.inputs, attrs, equation.outputs[: len(kinds)], equation.scope)


def _checks(needed: Sequence[Equation], others: Sequence[Equation]) -> dict[int, Equation]:
    """Return for equations that are not needed those that only make their checks, each check once."""
    known: set[Any] = set()
    wanted = {id(x) for x in others}
    found: dict[int, Equation] = {}
    for equation in (*needed, *others):
        check = None if equation.op.checks is None else equation.op.checks(*equation.inputs, **equation.attrs)
        if check is None:
            continue
        op, inputs, attrs = check
        key = same(op, [id(x) for x in inputs], attrs)
        if key not in known and id(equation) in wanted:
            found[id(equation)] = equation if op is equation.op else Equation.of(op, inputs, attrs, equation.scope)
        known.add(key)
    return found


# Simplification -------------------------------------------------------------------------------------------


def same(op: Op, numbers: list[int], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is equal for ops that compute the same from inputs of these numbers."""
    if op.commutes:
        numbers.sort()
    return op, tuple(numbers), tuple([(name, _comparable(attrs[name])) for name in sorted(attrs)])


def _comparable(value: Any) -> Any:
    """Return what is equal for attributes with which an op computes the same; what can't be hashed equals nothing."""
    try:
        hash(value)
    except TypeError:
        return object()
    return kind_of(value), value


def simplify(program: Program) -> Program:
    """Merge equal ops (CSE), fold arithmetic on literals and drop ops that change nothing."""
    replaced: dict[int, Tensor] = {}
    known: dict[Any, tuple[Tensor, ...]] = {}
    made: dict[int, Equation] = {}
    literals: dict[tuple[str, bytes], Tensor] = {(x.dtype.str, x.numpy().tobytes()): x for x in ZEROS.values()}

    def resolve(x: Tensor) -> Tensor:
        x = replaced.get(id(x), x)
        if isinstance(x, Literal):
            x = literals.setdefault((x.dtype.str, x.numpy().tobytes()), x)
        return x

    equations = []
    for equation in program.equations:
        equation = equation.reading(tuple([resolve(x) for x in equation.inputs]))
        found = equation if equation.op.several else _simpler(equation, made)
        if isinstance(found, Tensor):
            replaced[id(equation.output)] = found
            continue
        equations.append(found)
        made.update((id(y), found) for y in found.outputs)
        if not (found.op.random or found.op.opaque):
            first = known.setdefault(same(found.op, [id(x) for x in found.inputs], found.attrs), found.outputs)
            replaced.update((id(y), z) for y, z in zip(found.outputs, first, strict=True) if y is not z)
    return prune(Program(program.inputs, tuple(equations), tuple(resolve(x) for x in program.outputs), program.watched))


def _simpler(equation: Equation, made: Mapping[int, Equation]) -> Tensor | Equation:
    """Return an existing tensor, or a literal, that equals the result; or the equation, perhaps a shorter one."""
    op, inputs, y = equation.op, equation.inputs, equation.output
    if op.elementwise and y.shape == () and all(isinstance(x, Literal) for x in inputs):
        return Literal(op.compute([x.data for x in inputs], [((), y.dtype)], equation.attrs)[0])
    found = None if op.simplify is None else op.simplify(equation, made)
    return equation if found is None else found
