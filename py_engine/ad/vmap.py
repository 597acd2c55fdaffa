"""vmap: a function of one sample as a function of many, by the ops' batching rules.

The function is traced on one sample, and the ops of that program are then applied to all samples at once: each op by
the rule of its record (`Op.batch`), those without a rule sample by sample, in one op. What does not depend on a sample
is computed once. The ops that are applied are ops like any other, so that `vmap` nests in all transforms and they in
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.containers import Structure, count, flatten, paths, unflatten
from py_engine.ad.op import Call, Check, Op, Shape, as_tensor, c_ordered, described
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.ops.blocks import same_scratch
from py_engine.ad.ops.shape import all_mapped, for_each, leading
from py_engine.ad.program import Program, close_over, drawing, nested_trace, traced, without_inner
from py_engine.ad.reverse import unbroadcast
from py_engine.ad.state import LEVELS, STATE, entering, inside_transform, restoring
from py_engine.ad.tensor import Array, Node, Tensor, plain_array, real_array
from py_engine.ad.transforms import Function, check_callable, owned
from py_engine.errors import ConfigurationError, NotDifferentiableError, ShapeError


def vmap(function: Function, in_axes: Any = 0, out_axes: Any = 0) -> Function:
    """Return a function that applies `function` to all samples along an axis of its arguments at once.

    The function is traced, in every call, on one sample: its Python code cannot branch on values (`cond`, `while_loop`
    and `where` can). Each op is applied to all samples in one call; a `custom_rule`, and a search in sorted vectors
    that differ, take one sample after the other, inside one op. Random masks are drawn for each sample.

    Args:
        function: takes arrays, tensors or nested containers of them as positional arguments and returns the same.
            Keyword arguments are handed to it as they are.
        in_axes: for each argument the axis of the samples, or None for one that all samples share (which may then be
            anything): one for all arguments, or a tuple with one for each; in the place of an axis may stand a
            container of axes for a container of arrays.
        out_axes: the same for what the function returns; None for what is the same for all samples.

    Returns:
        A function of arguments with one more axis each, of one length. It returns what `function` returns, with an axis
        of that length: arrays, where it is called with arrays.

    Raises:
        ShapeError: an argument has no such axis, or their lengths differ; names the place.
        ConfigurationError: `in_axes` or `out_axes` do not fit the arguments or the result, nothing is mapped, or
            `function` is not callable.
        TraceError: the function branches on a value.

    Example:
        >>> vmap(lambda a, b: a @ b, in_axes=(0, None))(np.eye(3), np.array([1.0, 2.0, 3.0]))
        array([1., 2., 3.])
        >>> samples = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> vmap(grad(lambda w, x: np.tanh(w @ x)), in_axes=(None, 0))(np.zeros(2), samples)
        array([[1., 2.],
               [3., 4.],
               [5., 6.]])
    """
    check_callable("vmap", function)

    @restoring
    def mapped(*args: Any, **kwargs: Any) -> Any:
        one, passed, all_samples = _arguments(args, in_axes)
        program, captured, returned = _traced(function, passed, one, kwargs)
        samples, given = len(all_samples[0]), flatten(args)[0]
        flags = [True] * len(one) + [False] * len(captured)
        found, flags = batched(program, samples, [*all_samples, *captured], flags)
        results = _placed(found, flags, samples, out_axes, returned)
        if inside_transform() or any(isinstance(x, Tensor) for x in given) or any(y.requires_grad for y in results):
            return unflatten(returned, results)
        # What is the same for all samples may have been captured, and belongs to others.
        return unflatten(returned, [a if m else np.array(a) for a, m in zip(owned(results, given), flags, strict=True)])

    return mapped


# Arguments and results ------------------------------------------------------------------------------------


def _arguments(args: Sequence[Any], in_axes: Any) -> tuple[list[Tensor], list[Any], list[Tensor]]:
    """Return symbols for one sample, the arguments with these in their places, and all samples, on first axes."""
    if isinstance(in_axes, (tuple, list)) and len(in_axes) != len(args):
        raise ConfigurationError(
            f"vmap: in_axes has {len(in_axes)} items, but the function was called with {len(args)} arguments"
        )
    each = in_axes if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
    samples: list[Tensor] = []
    passed: list[Any] = []
    moved: list[Tensor] = []
    first = ""
    for i, (arg, axes) in enumerate(zip(args, each, strict=True)):
        leaves, structure = flatten(arg)
        along = _axes("in_axes", axes, structure, f"argument {i}")
        for k, (axis, path) in enumerate(zip(along, paths(structure), strict=True)):
            if axis is None:
                if isinstance(leaves[k], np.ndarray) and leaves[k].dtype.kind in "fiub":
                    leaves[k] = Tensor(leaves[k])  # which a sample's positions index
                continue
            x, place = leaves[k], f"argument {i}{path}"
            x = x if isinstance(x, Tensor) else Tensor(real_array(plain_array(x), x))
            moved.append(ops.moveaxis(x, _checked_axis(axis, x.shape, place), 0))
            first = first or place
            if len(moved[-1]) != len(moved[0]):
                raise ShapeError(
                    f"vmap: {place} has {len(moved[-1])} samples along axis {axis}, but {first} has {len(moved[0])}"
                )
            leaves[k] = Tensor.symbol(moved[-1].shape[1:], x.dtype)
            samples.append(leaves[k])
        passed.append(unflatten(structure, leaves))
    if not moved:
        raise ConfigurationError("vmap: nothing is mapped; in_axes must name an axis of at least one array")
    return samples, passed, moved


def _axes(name: str, axes: Any, structure: Structure, place: str) -> list[int | None]:
    """Return the axis, or None, for each leaf of a container, from one for all of it or a container of them."""
    if axes is None or is_whole(axes):
        return [axes] * count(structure)
    items: Sequence[Any] | None = None
    if structure.kind is dict:
        if isinstance(axes, dict) and set(axes) == set(structure.keys):
            items = [axes[key] for key in structure.keys]
    elif structure.kind not in (None, NoneType) and isinstance(axes, (tuple, list)):
        items = axes if len(axes) == len(structure.children) else None
    if items is None:
        what = "an axis or None" if structure.kind is None else f"an axis or None, or {structure} of them"
        raise ConfigurationError(f"vmap: {name} for {place} must be {what}, got {axes!r}")
    return [a for item, child in zip(items, structure.children, strict=True) for a in _axes(name, item, child, place)]


def _checked_axis(axis: int, shape: Shape, place: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"vmap: {place} of shape {shape} has no axis {axis}")
    return int(axis)


def _traced(
    function: Function, passed: Sequence[Any], samples: Sequence[Tensor], kwargs: Mapping[str, Any]
) -> tuple[Program, list[Tensor], Structure]:
    """Return the program of one sample, the tensors that it captures, and the structure of its results."""
    level = next(LEVELS)
    with nested_trace() as nodes:
        leaves, returned = flatten(function(*passed, **kwargs))
        outputs = [as_tensor(leaf) for leaf in leaves]
    if not leaves:
        raise ShapeError(f"vmap: the function must return arrays, got {returned}")
    program, captured = close_over(nodes, samples, outputs)
    return program, without_inner(captured, level), returned


def _placed(
    found: Sequence[Tensor], flags: Sequence[bool], samples: int, out_axes: Any, returned: Structure
) -> list[Tensor]:
    """Return the results with the axis of the samples where `out_axes` says."""
    axes = _axes("out_axes", out_axes, returned, "the function's result")
    placed = []
    for y, mapped, axis, path in zip(found, flags, axes, paths(returned), strict=True):
        place = f"the function's result{path}"
        if axis is None:
            if mapped:
                raise ConfigurationError(
                    f"vmap: {place} differs from sample to sample, so that out_axes must name an axis for it"
                )
            placed.append(y)
            continue
        whole = y if mapped else for_each(y, samples)
        placed.append(ops.moveaxis(whole, 0, _checked_axis(axis, whole.shape, place)))
    return placed


# Programs of many samples ---------------------------------------------------------------------------------


def batched(
    program: Program, samples: int, inputs: Sequence[Tensor], mapped: Sequence[bool]
) -> tuple[list[Tensor], list[bool]]:
    """Apply a program of one sample to many.

    Args:
        program: of one sample.
        samples: how many.
        inputs: its inputs, of all samples (samples, *shape) where `mapped`, and shared by them where not.
        mapped: which.

    Returns:
        The results, and which of them are mapped; the others are the same for all samples.
    """
    values = {id(x): (value, m) for x, value, m in zip(program.inputs, inputs, mapped, strict=True)}
    del inputs  # only as long as they are needed, as all values: many samples are much memory
    last = {id(x): i for i, equation in enumerate(program.equations) for x in equation.inputs}
    last.update((id(x), len(program.equations)) for x in program.outputs)
    with entering(scope=STATE.scope):
        for i, equation in enumerate(program.equations):
            STATE.scope = equation.scope
            found = [values.get(id(x), (x, False)) for x in equation.inputs]
            results, flags = _applied(
                equation.op, samples, [m for _, m in found], [x for x, _ in found], equation.attrs
            )
            for y, result, m in zip(equation.outputs, results, flags, strict=True):
                if id(y) in last:
                    values[id(y)] = result, m
            del found, results
            for x in equation.inputs:
                if last[id(x)] == i:
                    values.pop(id(x), None)
    given = [values.get(id(x), (x, False)) for x in program.outputs]
    return [y for y, _ in given], [m for _, m in given]


def batched_program(
    program: Program, samples: int, mapped: Sequence[bool], results: Sequence[bool] = ()
) -> tuple[Program, list[bool]]:
    """Return the program of many samples as a program, and which of its results are mapped.

    Args:
        program: of one sample.
        samples: how many.
        mapped: which of its inputs differ from sample to sample: these are (samples, *shape).
        results: which of its results must be mapped, whatever they depend on; the first ones.
    """
    symbols = [
        Tensor.symbol((samples, *x.shape) if m else x.shape, x.dtype)
        for x, m in zip(program.inputs, mapped, strict=True)
    ]
    with nested_trace() as nodes:
        found, flags = batched(program, samples, symbols, mapped)
        for i, wanted in enumerate(results):
            if wanted and not flags[i]:
                found[i], flags[i] = for_each(found[i], samples), True
    return traced(nodes, symbols, found), flags


def _applied(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    """Return the results of an op for all samples, and which of them are mapped."""
    if not inputs and (name := drawing(op, attrs)) is not None:
        raise ConfigurationError(f"vmap: {op.name!r} draws random numbers ({name!r}) and reads nothing that is mapped")
    if not all(mapped) and drawing(op, attrs):  # each sample draws its own
        inputs, mapped = all_mapped(samples, mapped, inputs), [True] * len(inputs)
    if not any(mapped):
        results = op.apply_several(tuple(inputs), attrs) if op.several else (op.apply(tuple(inputs), attrs),)
        return results, [False] * len(results)
    rule = op.batch or (leading if op.elementwise else None)
    found = None if rule is None else rule(op, samples, mapped, inputs, attrs)
    if found is None:
        found = _one_by_one(op, samples, mapped, inputs, attrs)
    elif not op.several:
        found = (found,), (True,)
    return found


# Sample by sample -----------------------------------------------------------------------------------------
#
# One op, whatever the number of samples: its calls are those of the op for each. Its derivatives are the op's own rules
# for one sample, batched.


def _one_by_one(
    op: Op, samples: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    if (name := drawing(op, attrs)) is not None:  # what it draws would look like a constant to all who ask `drawing`
        within = "" if name == op.name else f" ({name!r})"
        raise ConfigurationError(f"vmap: {op.name!r} draws random numbers{within}, and has no batching rule")
    settings = {"op": op, "samples": samples, "mapped": tuple(mapped), "attrs": tuple(sorted(attrs.items()))}
    results = ONE_BY_ONE.apply_several(tuple(inputs), settings)
    return results, [True] * len(results)


Attrs = tuple[tuple[str, Any], ...]


def _sample(inputs: Sequence[Tensor], mapped: Sequence[bool]) -> list[Tensor]:
    """Return symbols for the inputs of one sample."""
    return [Tensor.symbol(x.shape[1:] if m else x.shape, x.dtype) for x, m in zip(inputs, mapped, strict=True)]


def _infer(*inputs: Tensor, op: Op, samples: int, mapped: Sequence[bool], attrs: Attrs) -> list[tuple[Shape, Any]]:
    kinds = op.infer(*_sample(inputs, mapped), **dict(attrs))
    return [((samples, *shape), dtype) for shape, dtype in (kinds if op.several else [kinds])]


def _bind(
    arrays: Sequence[Array], *rest: Any, op: Op, samples: int, mapped: Sequence[bool], attrs: Attrs
) -> list[Call]:
    *outs, scratch = rest
    calls: list[Call] = []
    for k, same in zip(range(samples), same_scratch(scratch), strict=False):
        own = [a[k, ...] if m else a for a, m in zip(arrays, mapped, strict=True)]
        places = [out[k, ...] for out in outs]
        if op.view is None:
            calls += op.calls(own, places, same, dict(attrs))
        else:
            found = op.view(*own, **dict(attrs))
            calls += map(partial, [np.copyto] * len(places), places, found if op.several else [found])
    return calls


def _checks(*inputs: Tensor, op: Op, samples: int, mapped: Sequence[bool], attrs: Attrs) -> Check | None:
    if op.checks is None or op.checks(*_sample(inputs, mapped), **dict(attrs)) is None:
        return None
    return ONE_BY_ONE, inputs, {"op": op, "samples": samples, "mapped": mapped, "attrs": attrs}


def _rule(
    node: Node, rule: Callable[..., Sequence[Tensor | None]], others: Sequence[Tensor], flags: Sequence[bool]
) -> Any:
    """Return what a rule of the op gives for one sample, applied to all, and which of that is mapped.

    Args:
        node: the op that was applied sample by sample.
        rule: `rule(y, inputs, others)`, with what the op made, its inputs and further tensors, of one sample.
        others: those of all samples.
        flags: which of them are mapped.
    """
    op, samples, mapped, attrs = (node.attrs[name] for name in ("op", "samples", "mapped", "attrs"))
    inputs, more = _sample(node.inputs, mapped), _sample(others, flags)
    with nested_trace() as nodes:
        made = op.apply_several(tuple(inputs), dict(attrs)) if op.several else (op.apply(tuple(inputs), dict(attrs)),)
        nodes.clear()  # its results are known
        found = rule(made[0].node if op.several else made[0], inputs, more)
        outputs = [x for x in found if x is not None]
    results = [node.result(i) for i in range(len(made))]
    program, captured = close_over(nodes, [*inputs, *made, *more], outputs)
    values, which = batched(
        program,
        samples,
        [*node.inputs, *results, *others, *captured],
        [*mapped, *[True] * len(made), *flags, *[False] * len(captured)],
    )
    pairs = iter(zip(values, which, strict=True))
    return [(None, False) if x is None else next(pairs) for x in found]


def _pull_back(cotangents: Sequence[Tensor | None], needs_grad: Sequence[bool], node: Node) -> list[Tensor | None]:
    op, samples, mapped = (node.attrs[name] for name in ("op", "samples", "mapped"))
    known = [g for g in cotangents if g is not None]

    def rule(y: Any, inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor | None]:
        rest = iter(seeds)
        found = op.pull([None if g is None else next(rest) for g in cotangents], needs_grad, y)
        return [None if g is None else unbroadcast(g, x) for g, x in zip(found, inputs, strict=True)]

    gradients: list[Tensor | None] = []
    for (g, m), of_sample in zip(_rule(node, rule, known, [True] * len(known)), mapped, strict=True):
        if g is not None:
            g = g if m else for_each(g, samples)
            g = g if of_sample else ops.sum(g, 0)
        gradients.append(g)
    return gradients


def _push_forward(
    tangents: Sequence[Tensor | None], node: Node, *inputs: Tensor, op: Op, samples: int, mapped: Any, attrs: Attrs
) -> list[Tensor | None]:
    if op.jvp is None:
        raise NotDifferentiableError(
            f"a derivative is taken through {described(node)} of {op.name!r}, but that has no jvp rule, which forward "
            "mode needs"
        )
    jvp = op.jvp
    flags = [m for t, m in zip(tangents, mapped, strict=True) if t is not None]

    def rule(y: Any, own: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        rest = iter(given)
        found = jvp([None if t is None else next(rest) for t in tangents], y, *own, **dict(attrs))
        several = found if op.several else [found]
        kinds = y.kinds if op.several else [(y.shape, y.dtype)]
        return [None if t is None else ops.broadcast_to(t, shape) for t, (shape, _) in zip(several, kinds, strict=True)]

    found = _rule(node, rule, [t for t in tangents if t is not None], flags)
    return [t if t is None or m else for_each(t, samples) for t, m in found]


ONE_BY_ONE: Op = Op(
    "one_by_one",
    _infer,
    bind=_bind,
    several=True,
    vjp=_pull_back,
    opaque=True,
    jvp=_push_forward,
    accepts=c_ordered,
    checks=_checks,
    doc="an op without a batching rule, applied to one sample after the other",
)
