"""Functions of single numbers as straight-line Python on plain floats.

A numpy call on one number is nearly all overhead: Python's own float arithmetic and the functions of `math` are ten
times faster. Their results are the same but for the last bit of a sine. Where they would differ, at the edges of a
function's domain (1 / 0, log 0, exp 1000), Python raises; then the tape of arrays computes what numpy would.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from py_engine.ad import ops
from py_engine.ad.graph import Graph
from py_engine.ad.ops.record import Op
from py_engine.ad.ops.reduction import MAX, MIN, SUM
from py_engine.ad.ops.shape import COPY
from py_engine.ad.sums import ADD_IN_ANY_ORDER
from py_engine.ad.tensor import Literal, Tensor

__all__ = ["DOMAIN_ERRORS", "FLOAT64", "Program", "straight_line"]

Program: TypeAlias = Callable[..., tuple[Any, ...]]

FLOAT64 = np.dtype(np.float64)

DOMAIN_ERRORS = (ArithmeticError, ValueError)
"""What Python raises where numpy gives an infinity or NaN."""

LONGEST = 20_000
"""Ops: Python compiles so many in about a second."""

DEEPEST = 16
"""A value that only one other needs stands inside its expression, up to this depth: no name, no storing."""

EXPRESSIONS: dict[Op, str] = {
    ops.add: "{0} + {1}",
    ADD_IN_ANY_ORDER: "{0} + {1}",
    ops.sub: "{0} - {1}",
    ops.mul: "{0} * {1}",
    ops.div: "{0} / {1}",
    ops.neg: "-{0}",
    ops.square: "{0} * {0}",
    ops.reciprocal: "1.0 / {0}",
    ops.pow: "pow({0}, {1}) if {1} != 0.5 or {0} > 0.0 else edge()",  # numpy takes the root, of -0 and -inf another one
    ops.exp: "exp({0})",
    ops.expm1: "expm1({0})",
    ops.log: "log({0})",
    ops.log1p: "log1p({0})",
    ops.sqrt: "sqrt({0})",
    ops.sin: "sin({0})",
    ops.cos: "cos({0})",
    ops.tan: "tan({0})",
    ops.arcsin: "asin({0})",
    ops.arccos: "acos({0})",
    ops.arctan: "atan({0})",
    ops.sinh: "sinh({0})",
    ops.cosh: "cosh({0})",
    ops.tanh: "tanh({0})",
    ops.sigmoid: "1.0 / (1.0 + exp(-{0}))",
    ops.softplus: "max({0}, 0.0) + log1p(exp(-abs({0})))",
    ops.relu: "{0} if {0} > 0.0 or {0} != {0} else 0.0",
    ops.step: "1.0 if {0} > 0.0 else 0.0",
    ops.abs: "abs({0})",
    ops.sign: "copysign(1.0, {0}) if {0} < 0.0 or {0} > 0.0 else {0} + 0.0",
    ops.maximum: "{0} if {0} > {1} or {0} != {0} else {1}",
    ops.minimum: "{0} if {0} < {1} or {0} != {0} else {1}",
    ops.equal_mask: "1.0 if {0} == {1} else 0.0",
    ops.WHERE: "{1} if {0} else {2}",
    ops.less: "{0} < {1}",
    ops.less_equal: "{0} <= {1}",
    ops.greater: "{0} > {1}",
    ops.greater_equal: "{0} >= {1}",
    ops.equal: "{0} == {1}",
    ops.not_equal: "{0} != {1}",
    **dict.fromkeys((COPY, ops.identity, ops.stop_gradient, MAX, MIN), "{0}"),
    SUM: "{0} + 0.0",
}
"""For each op its value for single numbers, as Python."""

_VALUE = re.compile(r"\bv\d+\b")
"""The name of a value that is stored."""


def _edge() -> float:
    raise ValueError("the tape of arrays computes what numpy would")


_FUNCTIONS = {name: getattr(math, name) for name in dir(math) if not name.startswith("_")}
_FUNCTIONS |= {"abs": abs, "max": max, "edge": _edge}


def straight_line(graph: Graph) -> tuple[str, Program] | None:
    """Return a graph as Python source and as the function that this defines: floats in, a tuple of them out.

    None where a value in it is not one float64 number (or the boolean of a comparison), or it is too long. The
    function raises one of `DOMAIN_ERRORS` where numpy would give an infinity or NaN that Python does not.
    """
    if len(graph.nodes) > LONGEST or not all(_is_float(x) for x in graph.inputs):
        return None
    names = {id(x): f"x{i}" for i, x in enumerate(graph.inputs)}
    uses = Counter(id(x) for node in graph.nodes for x in node.inputs)
    kept = {id(x) for x in graph.outputs}
    inside: dict[int, tuple[str, int]] = {}  # expressions that have no name so far, with their depth
    captured: dict[str, Any] = {}
    lines = [f"def replay({', '.join(names.values())}):"]

    def name(x: Tensor) -> str | None:
        if id(x) in inside:
            names[id(x)] = f"v{len(lines)}"
            lines.append(f"    {names[id(x)]} = {inside.pop(id(x))[0]}")
        elif id(x) not in names:
            if x.data is None or not _is_float(x):
                return None
            if isinstance(x, Literal):
                names[id(x)] = f"({x.item()!r})"
            else:
                names[id(x)] = own = f"c{len(captured)}"
                captured[f"array_{own}"] = x.data
                lines.append(f"    {own} = array_{own}.item()")
        return names[id(x)]

    for node in graph.nodes:
        form = EXPRESSIONS.get(node.op) if node.op is not None else None
        if node.op is ops.mul and all(x.dtype == np.bool_ for x in node.inputs):
            form = "{0} and {1}"
        elif node.op is ops.ASTYPE and node.inputs[0].dtype == np.bool_ and _is_float(node):
            form = "1.0 if {0} else 0.0"
        elif form is None or not (_is_float(node) or all(_is_float(x) for x in node.inputs)):
            return None
        elif node.op is ops.pow and isinstance(node.inputs[1], Literal):
            form = "pow({0}, {1}) if {0} > 0.0 else edge()" if node.inputs[1].item() == 0.5 else "pow({0}, {1})"
        parts, depth = [], 0
        for i, x in enumerate(node.inputs):
            if id(x) in inside and uses[id(x)] == 1 and form.count(f"{{{i}}}") == 1 and inside[id(x)][1] < DEEPEST:
                part, deep = inside.pop(id(x))
                parts.append(f"({part})")
                depth = max(depth, deep + 1)
            elif (named := name(x)) is not None:
                parts.append(named)
            else:
                return None
        inside[id(node)] = form.format(*parts), depth
        if uses[id(node)] != 1 or id(node) in kept:
            name(node)
    results = [name(x) for x in graph.outputs]
    if None in results:
        return None
    lines.append(f"    return ({''.join(f'{result}, ' for result in results)})")
    source = "\n".join(_with_few_names(lines))
    namespace: dict[str, Any] = {**_FUNCTIONS, **captured}
    exec(compile(source, "<straight line>", "exec"), namespace)
    return source, namespace["replay"]


def _with_few_names(lines: list[str]) -> list[str]:
    """Use the name of a value again once nobody reads it any more.

    Python then frees the number at once, and makes the next one where it was, not all of them at the end.
    """
    last = {name: i for i, line in enumerate(lines) for name in _VALUE.findall(line)}
    free: list[str] = []
    names: dict[str, str] = {}
    renamed = []
    for i, line in enumerate(lines):
        target, equals, expression = line.rpartition(" = ")
        found = dict.fromkeys(_VALUE.findall(expression))
        expression = _VALUE.sub(lambda match: names[match[0]], expression)
        free += (names[name] for name in found if last[name] == i)
        if made := _VALUE.search(target):
            names[made[0]] = free.pop() if free else made[0]
            target = f"    {names[made[0]]}"
        renamed.append(target + equals + expression)
    return renamed


def _is_float(x: Tensor) -> bool:
    return x.shape == () and x.dtype == FLOAT64
