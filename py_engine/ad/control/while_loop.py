"""Loops that end on a value: one op, whose number of steps is found when it runs.

The op keeps the number of steps and the last carry, nothing else. A derivative is a loop of that number of steps: in
forward mode the tangents are carried beside the values; in reverse mode another op runs the steps once more, keeps the
carry at the start of each of about √n segments, and goes backward segment by segment. Both of these have derivatives
that are such ops again, so that there are derivatives of any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.compile.tape import Tape
from py_engine.ad.containers import flatten, flatten_as, paths, unflatten
from py_engine.ad.control.cond import truth_value
from py_engine.ad.control.scan import Loop, Tapes, check_dtypes, check_kept, like, tensors_of, zeros
from py_engine.ad.op import Call, Op, Shape
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.ops.shape import aligned, all_mapped, for_each
from py_engine.ad.program import Program, close_over, nested_trace, traced, without_inner
from py_engine.ad.state import LEVELS, STATE, restoring
from py_engine.ad.techniques import COMPILE_DEFAULTS, Techniques
from py_engine.ad.tensor import FLOATS, Array, Literal, Node, Tensor
from py_engine.ad.transforms import Function
from py_engine.ad.vmap import batched, batched_program
from py_engine.errors import ConfigurationError, ShapeError

COUNT = np.dtype(np.int64)
"""Of numbers of steps."""


@restoring
def while_loop(cond: Function, body: Function, init: Any, max_steps: int | None = None) -> Any:
    """Return the carry at the end of `while cond(carry): carry = body(carry)`, as one op.

    Both functions are traced, so that their Python code runs once and cannot branch on values. Nothing is kept of the
    steps. Forward mode carries the tangents through as many steps. Reverse mode, for n steps, runs the loop once more,
    keeping about √n carries, and each step a second time on the way back: memory for 2√n carries while it runs, and
    about the time of two more loops beside the steps' own gradients. Tensors that `body` captures have their gradients;
    `cond` has none, and neither has the number of steps. Under `vmap`, where the samples end at different steps, all
    take as many as the last one, and those that have ended keep their carry (the body is computed on it all the same:
    keep it finite there).

    Args:
        cond: takes the carry and returns one truth value.
        body: takes the carry and returns the new one, of the same structure, shapes and dtypes.
        init: the first carry: an array or a container of arrays; all floats in it are of one dtype.
        max_steps: the loop ends after this number of steps, whatever `cond` says; None: no limit.

    Raises:
        ShapeError, DTypeError: the carry changes its structure, shape or dtype; `cond` returns no single truth value.
        ConfigurationError: `cond` or `body` is not callable, or `max_steps` is no number of steps.
        TraceError: a function branches on a value; or `body`, under `vmap` also `cond`, draws random numbers, and a
            derivative is taken of it.

    Source: the segments after Chen et al., "Training deep nets with sublinear memory cost" (2016).

    Example:
        >>> def root(a):
        ...     return while_loop(lambda x: abs(x * x - a) > 1e-12, lambda x: (x + a / x) / 2, a)
        >>> compiled = compile(value_and_grad(root))
        >>> [float(x.round(9)) for x in compiled(np.array(2.0))]
        [1.414213562, 0.353553391]
    """
    for name, function in (("cond", cond), ("body", body)):
        if not callable(function):
            raise ConfigurationError(f"while_loop: {name} must be a function, got {type(function).__name__}")
    if max_steps is not None and not is_whole(max_steps, 0):
        raise ConfigurationError(f"while_loop: max_steps must be a number of steps or None, got {max_steps!r}")
    leaves, structure = flatten(init)
    if not leaves:
        raise ShapeError(f"while_loop: init must hold an array at least, got {structure}")
    carries = tensors_of(leaves)
    check_dtypes("while_loop", carries, [f"the carry{path}" for path in paths(structure)])
    old, level = [Tensor.symbol(x.shape, x.dtype) for x in carries], next(LEVELS)
    with nested_trace() as nodes:
        found = flatten_as(body(unflatten(structure, old)), structure, "while_loop: the carry that body returned")
        new = [like(x, was) for x, was in zip(found, old, strict=True)]
    check_kept("while_loop", new, old, structure)
    step, constants = close_over(nodes, old, new)
    again = [Tensor.symbol(x.shape, x.dtype) for x in carries]
    with nested_trace() as nodes:
        go_on = truth_value("while_loop: what cond returns", cond(unflatten(structure, again)))
    test, read = close_over(nodes, again, [go_on])
    loop = While(Loop(step, len(carries), 0, 0, name="while_loop"), test, None if max_steps is None else int(max_steps))
    captured = without_inner([*constants, *read], level)
    results = WHILE.apply_several((*carries, *captured), {"loop": loop})
    return unflatten(structure, results[1:])


@dataclass(eq=False)
class While:
    """A loop that ends on a value.

    Attributes:
        steps: the body, as a loop whose length is not known: from carries and constants to carries.
        test: from carries and its own constants to whether there is another step.
        limit: the largest number of steps, if there is one.
    """

    steps: Loop
    test: Program
    limit: int | None
    derivatives: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tests = Tapes(self.test)

    def __repr__(self) -> str:
        return f"<{self.steps.body!r} while {self.test!r}>"

    @property
    def constants(self) -> int:
        """How many constants the body has; those of the test come behind them."""
        return len(self.steps.body.inputs) - self.steps.carries

    @property
    def programs(self) -> list[Program]:
        """Those of the steps, and the test; see `programs_in`."""
        return [*self.steps.programs, self.test]

    @property
    def checks(self) -> bool:
        """Whether the body or the test accepts only some values."""
        return self.steps.checks or self.test.checks

    def run(self, inputs: Sequence[Array], outs: Sequence[Array], techniques: Techniques) -> None:
        """Compute the number of steps and the last carries into these arrays."""
        c, end = self.steps.carries, self.steps.carries + self.constants
        with self.steps.tapes.one(techniques) as tape, self.tests.one(techniques) as test:
            _fill(tape.inputs, inputs[:end])
            _fill(test.inputs[c:], inputs[end:])
            count = 0
            while self.limit is None or count < self.limit:
                _fill(test.inputs[:c], tape.inputs[:c])
                test.run()
                if not test.outputs[0].item():
                    break
                _step(tape, c)
                count += 1
            _fill(outs, [np.asarray(count), *tape.inputs[:c]])

    def of_many(self, samples: int, mapped: tuple[bool, ...]) -> tuple[While, list[bool], bool]:
        """Return the loop of many samples, which of its carries are mapped, and whether the samples' steps differ.

        Where they differ, its carry is that of all samples, then the number of steps of each, and then 1 for each that
        has not ended, else 0. Its body reads the constants of the test, too: that is evaluated once after each step,
        since it may draw random numbers.
        """
        key = ("of_many", samples, *mapped)
        if key not in self.derivatives:
            self.derivatives[key] = self._of_many(samples, mapped)
        return self.derivatives[key]  # type: ignore[no-any-return]

    def _of_many(self, samples: int, mapped: tuple[bool, ...]) -> tuple[While, list[bool], bool]:
        c, end = self.steps.carries, self.steps.carries + self.constants
        steps, carried = self.steps.of_many(samples, mapped[:end])
        test, (differs,) = batched_program(self.test, samples, [*carried, *mapped[end:]])
        if not differs:
            return While(steps, test, self.limit), carried, False
        body, constants, read = self.steps.body, self.steps.body.inputs[c:], self.test.inputs[c:]
        carries = _symbols(body.inputs[:c], [True] * c, samples)
        counts, going = (Tensor.symbol((samples,), COUNT) for _ in range(2))
        given = _symbols(constants, mapped[c:end], samples)
        tested = _symbols(read, mapped[end:], samples)
        with nested_trace() as nodes:
            new, _ = batched(body, samples, [*carries, *given], [True] * c + list(mapped[c:end]))
            holds = ops.greater(going, 0)
            chosen = [
                ops.where(aligned(holds, x.ndim), y, z) for x, y, z in zip(body.inputs, new, carries, strict=False)
            ]
            done, seen = counts + going, chosen
            if self.limit is not None:
                # No sample is tested after the last step, whose carries the test may refuse: it sees those before it.
                more = ops.less(done, self.limit)
                seen = [ops.where(aligned(more, y.ndim - 1), y, z) for y, z in zip(chosen, carries, strict=False)]
            results = [*chosen, done, going * self.going_on(samples, seen, tested, mapped[end:])]
        masked = traced(nodes, [*carries, counts, going, *given, *tested], results)
        again = [*_symbols(body.inputs[:c], [True] * c, samples), *(Tensor.symbol((samples,), COUNT) for _ in range(2))]
        with nested_trace() as nodes:
            some = ops.any(ops.greater(again[-1], 0))
        test = traced(nodes, again, [some])
        return While(Loop(masked, c + 2, 0, 0, name="while_loop"), test, self.limit), [True] * c, True

    def going_on(
        self, samples: int, carries: Sequence[Tensor], read: Sequence[Tensor], mapped: Sequence[bool]
    ) -> Tensor:
        """Evaluate the test of all samples, whose carries are all mapped: 1 for each that has another step, else 0."""
        (holds,), _ = batched(self.test, samples, [*carries, *read], [True] * len(carries) + list(mapped))
        return ops.astype(holds, COUNT)


def _symbols(like: Sequence[Tensor], mapped: Sequence[bool], samples: int) -> list[Tensor]:
    return [Tensor.symbol((samples, *x.shape) if m else x.shape, x.dtype) for x, m in zip(like, mapped, strict=True)]


def _fill(places: Sequence[Array], values: Sequence[Array]) -> None:
    for place, value in zip(places, values, strict=True):
        np.copyto(place, value)


def _step(tape: Tape, carries: int) -> None:
    """Run a body once: its carries are the new ones."""
    tape.run()
    _fill(tape.inputs[:carries], tape.outputs[:carries])


# The loop, until a value says so --------------------------------------------------------------------------


def _techniques(techniques: Techniques | None) -> Techniques:
    return techniques or STATE.techniques or COMPILE_DEFAULTS


def _bound(kernel: Callable[..., None]) -> Callable[..., Sequence[Call]]:
    def bind(arrays: Sequence[Array], *rest: Any, **attrs: Any) -> Sequence[Call]:
        *outs, _ = rest  # and what makes scratch memory
        return [partial(kernel, *arrays, *outs, techniques=STATE.techniques, **attrs)]

    return bind


def _kernel_while(*arrays: Array, loop: While, techniques: Techniques | None = None) -> None:
    first = len(arrays) - loop.steps.carries - 1
    loop.run(arrays[:first], arrays[first:], _techniques(techniques))


def _while_pull(cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    loop: While = node.attrs["loop"]
    end = loop.steps.carries + loop.constants
    found = _gradients(loop.steps, node.result(0), node.inputs[:end], cotangents[1:], needs_grad[:end])
    return [*found, *[None] * (len(node.inputs) - end)]


def _while_jvp(tangents: Sequence[Tensor | None], node: Node, *inputs: Tensor, loop: While) -> list[Tensor | None]:
    end = loop.steps.carries + loop.constants
    return [None, *_tangents(loop.steps, node.result(0), inputs[:end], tangents[:end])]


def _while_batch(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    loop: While = attrs["loop"]
    c, end = loop.steps.carries, loop.steps.carries + loop.constants
    new, carried, differs = loop.of_many(samples, tuple(mapped))
    carries = all_mapped(samples, [m or not f for m, f in zip(mapped[:c], carried, strict=True)], inputs[:c])
    if not differs:
        return op.apply_several((*carries, *inputs[c:]), {"loop": new}), [False, *carried]
    counts = Tensor(np.zeros(samples, COUNT))
    going = counts if loop.limit == 0 else loop.going_on(samples, carries, inputs[end:], mapped[end:])
    found = op.apply_several((*carries, counts, going, *inputs[c:]), {"loop": new})
    return [found[c + 1], *found[1 : c + 1]], [True] * (c + 1)


WHILE: Op = Op(
    "while_loop",
    lambda *inputs, loop: [((), COUNT), *loop.steps.results],
    kernel=_kernel_while,
    bind=_bound(_kernel_while),
    several=True,
    vjp=_while_pull,
    opaque=True,
    jvp=_while_jvp,
    batch=_while_batch,
    checks=lambda *inputs, **attrs: (WHILE, inputs, attrs) if attrs["loop"].checks else None,
    doc="a body repeated while a value says so; the first result is the number of steps",
)


# A known number of steps ----------------------------------------------------------------------------------
#
# What the derivatives of a loop are made of: the loop with the number of steps as an input, and its gradient. With f
# the loop, x its carries and constants, g the cotangents of its results and J the Jacobian, the gradient is gᵀ J(x).
# That is linear in g. Its tangent along v is the gradient by x of gᵀ J(x) v, where J(x) v is what the loop f' that
# carries tangents beside the values makes of (x, v): a gradient of f' by x. So is its own gradient.


def _gradients(
    loop: Loop, n: Tensor, inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of `n` steps of a loop by those inputs that need one, given those by its results."""
    floating = [i for i in range(loop.carries) if inputs[i].dtype in FLOATS]
    seeds = [zeros(*loop.results[i]) if (g := cotangents[i]) is None else g for i in floating]
    flags = tuple(bool(needed) and x.dtype in FLOATS for needed, x in zip(needs, inputs, strict=True))
    if not any(flags):
        return [None] * len(inputs)
    _, others, _ = _backward(loop, flags)
    found = iter(GRADIENT.apply_several((n, *inputs, *seeds, *others), {"loop": loop, "needs": flags}))
    return [next(found) if needed else None for needed in flags]


def _tangents(
    loop: Loop, n: Tensor, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the tangents of the carries after `n` steps of a loop."""
    tangent_loop, both = _with_tangents(loop, inputs, tangents)
    found = iter(REPEAT.apply_several((n, *both), {"loop": tangent_loop})[loop.carries :])
    return [next(found) if dtype in FLOATS else None for _, dtype in loop.results]


def _with_tangents(
    loop: Loop, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Loop, list[Tensor]]:
    """Return the loop that carries tangents beside the values, and its inputs: carries, their tangents, constants,
    those of their tangents that there are, and constants of the rules."""
    c = loop.carries
    tangent_loop, others = loop.tangent(tuple(t is not None for t in tangents))
    of_carries = [
        zeros(x.shape, x.dtype) if t is None else t
        for x, t in zip(inputs[:c], tangents[:c], strict=True)
        if x.dtype in FLOATS
    ]
    return tangent_loop, [*inputs[:c], *of_carries, *inputs[c:], *(t for t in tangents[c:] if t is not None), *others]


def _backward(loop: Loop, needs: tuple[bool, ...]) -> tuple[Loop, list[Tensor], list[bool]]:
    return loop.backward(tuple(dtype in FLOATS for _, dtype in loop.results), needs)


def _kernel_repeat(*arrays: Array, loop: Loop, techniques: Techniques | None = None) -> None:
    inputs, outs = arrays[1 : -loop.carries], arrays[-loop.carries :]
    with loop.tapes.one(_techniques(techniques)) as tape:
        _fill(tape.inputs, inputs)
        for _ in range(arrays[0].item()):
            _step(tape, loop.carries)
        _fill(outs, tape.inputs[: loop.carries])


def _repeat_pull(cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    n, *inputs = node.inputs
    return [None, *_gradients(node.attrs["loop"], n, inputs, cotangents, needs_grad[1:])]


def _repeat_jvp(
    tangents: Sequence[Tensor | None], node: Node, n: Tensor, *inputs: Tensor, loop: Loop
) -> list[Tensor | None]:
    return _tangents(loop, n, inputs, tangents[1:])


def _repeat_batch(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    loop: Loop = attrs["loop"]
    n, new, flags, given = _of_many(loop, samples, mapped, inputs)
    found = op.apply_several((n, *given), {"loop": new})
    return found[: loop.carries], flags


def _of_many(
    loop: Loop, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor]
) -> tuple[Tensor, Loop, list[bool], list[Tensor]]:
    """Return the loop of many samples: the number of its steps, the loop, which carries are mapped, and its inputs.

    Where the samples' numbers of steps differ, another carry counts the steps, and another constant, the last one, is
    the number of each.
    """
    (n, *values), (of_n, *of_values) = inputs, mapped
    c = loop.carries
    if not of_n:
        new, flags = loop.of_many(samples, tuple(of_values))
        carries = all_mapped(samples, [m or not f for m, f in zip(of_values[:c], flags, strict=True)], values[:c])
        return n, new, flags, [*carries, *values[c:]]
    key = ("masked", samples, *of_values[c:])
    if key not in loop.derivatives:
        loop.derivatives[key] = _masked(loop, samples, of_values[c:])
    new = loop.derivatives[key]
    carries = all_mapped(samples, of_values[:c], values[:c])
    first = Tensor(np.zeros((), COUNT))
    most = n[ops.argmax(n)] if samples else first
    return most, new, [True] * c, [*carries, first, *values[c:], n]


def _masked(loop: Loop, samples: int, mapped: Sequence[bool]) -> Loop:
    c, body = loop.carries, loop.body
    carries = _symbols(body.inputs[:c], [True] * c, samples)
    constants = _symbols(body.inputs[c:], mapped, samples)
    done, ends = Tensor.symbol((), COUNT), Tensor.symbol((samples,), COUNT)
    with nested_trace() as nodes:
        new, _ = batched(body, samples, [*carries, *constants], [True] * c + list(mapped))
        holds = done < ends
        chosen = [ops.where(aligned(holds, x.ndim), y, z) for x, y, z in zip(body.inputs, new, carries, strict=False)]
        results = [*chosen, done + Literal(np.ones((), COUNT))]
    masked = traced(nodes, [*carries, done, *constants, ends], results)
    return Loop(masked, c + 1, 0, 0, derived=loop.derived, name=loop.name)


REPEAT: Op = Op(
    "repeat_steps",
    lambda *inputs, loop: loop.results,
    kernel=_kernel_repeat,
    bind=_bound(_kernel_repeat),
    several=True,
    vjp=_repeat_pull,
    opaque=True,
    jvp=_repeat_jvp,
    batch=_repeat_batch,
    doc="a body repeated for a number of steps that is an input",
)


# Its gradient ---------------------------------------------------------------------------------------------


def _infer_gradient(n: Tensor, *inputs: Tensor, loop: Loop, needs: Sequence[bool]) -> list[tuple[Shape, Any]]:
    return [(x.shape, x.dtype) for x, needed in zip(loop.body.inputs, needs, strict=True) if needed]


def _kernel_gradient(*arrays: Array, loop: Loop, needs: tuple[bool, ...], techniques: Techniques | None = None) -> None:
    back, others, used = _backward(loop, needs)
    c, wanted, n = loop.carries, len(needs), arrays[0].item()
    inputs, rest = arrays[1 : 1 + wanted], arrays[1 + wanted :]
    seeds, rest = rest[: back.carries], rest[back.carries :]
    constants, outs = rest[: len(others)], rest[len(others) :]
    flags = used[back.carries :]
    kinds = _techniques(techniques)
    with loop.tapes.one(kinds) as tape, back.tapes.one(kinds) as gradient:
        _fill(tape.inputs, inputs)
        _fill(gradient.inputs[: back.carries], seeds)
        first = back.carries + sum(flags[:c])
        _fill(
            gradient.inputs[first:], [x for x, read in zip((*inputs[c:], *constants), flags[c:], strict=True) if read]
        )
        sums = [np.zeros_like(x) for x in gradient.outputs[back.carries :]]
        size = max(1, math.isqrt(n))
        starts = []
        for start in range(0, n, size):
            starts.append([x.copy() for x in tape.inputs[:c]])
            for _ in range(size if start + size < n else 0):
                _step(tape, c)
        for start in reversed(range(0, n, size)):
            kept = [starts.pop()]
            _fill(tape.inputs[:c], kept[0])
            for _ in range(start + 1, min(start + size, n)):
                _step(tape, c)
                kept.append([x.copy() for x in tape.inputs[:c]])
            while kept:
                carry = kept.pop()
                _fill(gradient.inputs[back.carries : first], [x for x, read in zip(carry, flags, strict=False) if read])
                gradient.run()
                for total, part in zip(sums, gradient.outputs[back.carries :], strict=True):
                    np.add(total, part, total)
                _fill(gradient.inputs[: back.carries], gradient.outputs[: back.carries])
        floating = [i for i in range(c) if inputs[i].dtype in FLOATS]
        by_carry = dict(zip(floating, gradient.inputs, strict=False))
        found = [by_carry[i] for i in range(c) if needs[i]] + sums
        _fill(outs, found)


def _split(loop: Loop, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return carries and constants, and seeds, of the inputs of a gradient behind the number of steps."""
    wanted = len(loop.body.inputs)
    seeds = sum(dtype in FLOATS for _, dtype in loop.results)
    return list(inputs[:wanted]), list(inputs[wanted : wanted + seeds])


def _cotangents(loop: Loop, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the cotangents of a loop's results from those of the floating ones."""
    rest = iter(seeds)
    return [next(rest) if dtype in FLOATS else None for _, dtype in loop.results]


def _gradient_jvp(
    tangents: Sequence[Tensor | None], node: Node, n: Tensor, *inputs: Tensor, loop: Loop, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    values, seeds = _split(loop, inputs)
    of_values, of_seeds = list(tangents[1 : 1 + len(values)]), tangents[1 + len(values) :][: len(seeds)]
    if all(t is None for t in of_values):  # linear in the seeds
        found = _gradients(loop, n, values, _cotangents(loop, of_seeds), needs)
        return [g for g, needed in zip(found, needs, strict=True) if needed]
    tangent_loop, both = _with_tangents(loop, values, of_values)
    found = _by_values(loop, tangent_loop, n, both, [*_cotangents(loop, of_seeds), *seeds], needs)
    return [g for g, needed in zip(found, needs, strict=True) if needed]


def _by_values(
    loop: Loop,
    tangent_loop: Loop,
    n: Tensor,
    both: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the loop that carries tangents by the inputs of the loop itself."""
    c, inputs = loop.carries, len(loop.body.inputs)
    behind = c + sum(x.dtype in FLOATS for x in loop.body.inputs[:c])
    places = [*range(c), *range(behind, behind + inputs - c)]
    wanted = dict(zip(places, needs, strict=True))
    found = _gradients(tangent_loop, n, both, cotangents, [wanted.get(k, False) for k in range(len(both))])
    return [found[k] for k in places]


def _gradient_pull(given: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    loop, needs = node.attrs["loop"], node.attrs["needs"]
    n, *inputs = node.inputs
    values, seeds = _split(loop, inputs)
    rest = iter(given)
    of_values = [next(rest) if needed else None for needed in needs]
    by_seeds = [t for t in _tangents(loop, n, values, of_values) if t is not None]
    by_values: list[Tensor | None] = [None] * len(values)
    if any(needs_grad[1 : 1 + len(values)]):
        tangent_loop, both = _with_tangents(loop, values, of_values)
        cotangents = [*[None] * loop.carries, *seeds]
        by_values = _by_values(loop, tangent_loop, n, both, cotangents, needs_grad[1 : 1 + len(values)])
    others = len(inputs) - len(values) - len(seeds)
    return [None, *by_values, *by_seeds, *[None] * others]


def _gradient_batch(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    loop, needs = attrs["loop"], attrs["needs"]
    n, *rest = inputs
    values, seeds = _split(loop, rest)
    # What there is a gradient by is each sample's own: gradients by what they share would be those of all.
    flags = [
        m or needed or (i < loop.carries and x.dtype in FLOATS)
        for i, (x, m, needed) in enumerate(zip(values, mapped[1:], needs, strict=False))
    ]
    own = [x if m or not f else for_each(x, samples) for x, m, f in zip(values, mapped[1:], flags, strict=False)]
    of_seeds = mapped[1 + len(values) :][: len(seeds)]
    steps, new, _, given = _of_many(loop, samples, [mapped[0], *flags], [n, *own])
    cotangents = _cotangents(new, all_mapped(samples, of_seeds, seeds))
    c = loop.carries
    wanted = [*needs[:c], False, *needs[c:], False] if mapped[0] else needs  # by what counts the steps there is none
    found = _gradients(new, steps, given, cotangents, wanted)
    results = [g for g in found if g is not None]
    return results, [True] * len(results)


GRADIENT: Op = Op(
    "repeat_steps_gradient",
    _infer_gradient,
    kernel=_kernel_gradient,
    bind=_bound(_kernel_gradient),
    several=True,
    vjp=_gradient_pull,
    opaque=True,
    jvp=_gradient_jvp,
    batch=_gradient_batch,
    doc="gradient of repeat_steps by some of its inputs",
)
