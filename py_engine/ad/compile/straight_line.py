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

from py_engine.ad.program import Program
from py_engine.ad.tensor import Literal, Tensor

Scalar: TypeAlias = Callable[..., tuple[Any, ...]]
"""A function of floats."""

FLOAT64 = np.dtype(np.float64)

DOMAIN_ERRORS = (ArithmeticError, ValueError)
"""What Python raises where numpy gives an infinity or NaN."""

LONGEST = 20_000
"""Ops: Python compiles this number in about a second."""

DEEPEST = 16
"""A value with one reader is inlined in the reader's expression, up to this depth: no name, no storing."""

_VALUE = re.compile(r"\bv\d+\b")
"""The name of a value that is stored."""


def _edge() -> float:
    raise ValueError("the tape of arrays computes what numpy would")


_FUNCTIONS = {name: getattr(math, name) for name in dir(math) if not name.startswith("_")}
_FUNCTIONS |= {"abs": abs, "max": max, "edge": _edge}


def straight_line(program: Program) -> tuple[str, Scalar] | None:
    """Return a program as Python source and as the function that this defines: floats in, a tuple of them out.

    None where a value in it is not one float64 number (or the boolean of a comparison), or it is too long. The
    function raises one of `DOMAIN_ERRORS` where numpy would give an infinity or NaN that Python does not.
    """
    if len(program.equations) > LONGEST or not all(_is_float(x) for x in program.inputs):
        return None
    names = {id(x): f"x{i}" for i, x in enumerate(program.inputs)}
    uses = Counter(id(x) for equation in program.equations for x in equation.inputs)
    kept = {id(x) for x in program.outputs}
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
                names[id(x)] = own = f"c{len(captured) // 2}"
                captured.update({f"array_{own}": x.data, f"tensor_{own}": x})
                is_as_before = f"tensor_{own}.data is array_{own} and not array_{own}.shape"
                lines.append(f"    {own} = array_{own}.item() if {is_as_before} else edge()")
        return names[id(x)]

    for equation in program.equations:
        form, y = equation.op.scalar, equation.outputs[0]
        if form is None or not all(_is_float(x) or _is_truth(x) for x in (y, *equation.inputs)):
            return None
        if not isinstance(form, str):
            form = form(equation)
        parts, depth = [], 0
        for i, x in enumerate(equation.inputs):
            if id(x) in inside and uses[id(x)] == 1 and form.count(f"{{{i}}}") == 1 and inside[id(x)][1] < DEEPEST:
                part, deep = inside.pop(id(x))
                parts.append(f"({part})")
                depth = max(depth, deep + 1)
            elif (named := name(x)) is not None:
                parts.append(named)
            else:
                return None
        inside[id(y)] = form.format(*parts), depth
        if uses[id(y)] != 1 or id(y) in kept:
            name(y)
    results = [name(x) for x in program.outputs]
    if None in results:
        return None
    lines.append(f"    return ({''.join(f'{result}, ' for result in results)})")
    source = "\n".join(_with_few_names(lines))
    namespace: dict[str, Any] = {**_FUNCTIONS, **captured}
    exec(compile(source, "<straight line>", "exec"), namespace)
    return source, namespace["replay"]


def _with_few_names(lines: list[str]) -> list[str]:
    """Reuse the name of a value after its last reader.

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


def _is_truth(x: Tensor) -> bool:
    return x.shape == () and x.dtype == np.bool_
