"""`scipy.integrate` on tensors: ordinary differential equations, by scipy's solver, with derivatives by their adjoints.

Source: L. S. Pontryagin et al., The Mathematical Theory of Optimal Processes (1962), as used by R. T. Q. Chen,
Y. Rubanova, J. Bettencourt and D. Duvenaud, Neural Ordinary Differential Equations (2018).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.control.custom import captured, custom_rule
from py_engine.ad.op import as_floats
from py_engine.ad.ops.scipy_functions import installed
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.ad.transforms import jvp, vjp
from py_engine.errors import ConfigurationError, EngineError, NotDifferentiableError, ShapeError

__all__ = ["IntegrationError", "odeint"]

CAPTURED = "odeint: func captures a tensor that requires a gradient; pass it in args, or take its .numpy()"
SOLVED = ("Integration successful.", "Nothing was done; the integration time was 0.")
RUNNING = threading.local()
"""Whether this thread is inside scipy's solver, which cannot be entered again."""


class IntegrationError(EngineError, ArithmeticError):
    """A differential equation was not solved to its tolerances."""


def odeint(
    func: Callable[..., Any],
    y0: Operand,
    t: Operand,
    args: Operand | tuple[Operand, ...] = (),
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Tensor:
    """Integrate dy/dt = func(y, t, *args) from y0, as `scipy.integrate.odeint` does; the result is (m, n).

    Derivatives, by `y0`, `t` and `args`, are solutions of differential equations too, to the same tolerances. They may
    be taken again. In reverse mode the equation is solved backwards, which a stiff one may not allow: that is an error,
    and forward mode (`jvp`) goes the other way.

    Args:
        func: of a state (n,), a time () and `args`, written in operators, numpy's functions or `py_engine.ops`; it
            returns the derivative (n,). What is differentiated by is in `args`.
        y0: the state at t[0], (n,); a number is one of length 1.
        t: times (m,), ascending or descending: the first is that of `y0`.
        args: a tuple of arrays of floats, or one array: further arguments of `func`.
        rtol, atol: scipy's tolerances of a step, relative and absolute.

    Raises:
        IntegrationError: the solver gave up, or `func` calls `odeint` itself.
        NotDifferentiableError: `func` captures a tensor that requires a gradient.
        ShapeError: the state is no vector, there are no times, or `func` returns another shape.
        ConfigurationError: scipy is not installed, or a tolerance is no positive number.
    """
    solver = installed("integrate", "odeint").odeint
    given = args if isinstance(args, tuple) else (args,)
    y0, t, *rest = as_floats(y0, t, *given)
    if y0.ndim == 0:
        y0 = ops.reshape(y0, (1,))
    if y0.ndim != 1 or t.ndim != 1 or not t.size:
        raise ShapeError(f"odeint: y0 must be (n,) and t (m,), at least one time, got {y0.shape} and {t.shape}")
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance > 0):
            raise ConfigurationError(f"odeint: {name} must be a positive number, got {tolerance!r}")
    if any(x.data is None and x.requires_grad for x in captured(func)):
        raise NotDifferentiableError(CAPTURED)
    return _solution(func, solver, {"rtol": rtol, "atol": atol})(y0, t, *rest)


def _solution(func: Callable[..., Any], solver: Any, tolerances: dict[str, float | None]) -> Callable[..., Tensor]:
    """Return the op that solves, of y0, t and the further arguments."""

    def slope(y: Any, t: Any, *args: Any) -> Tensor:
        found = ops.identity(func(y, t, *args))
        if found.shape != y.shape:
            raise ShapeError(f"odeint: func must return shape {y.shape}, that of the state, got {found.shape}")
        return found

    def solve(y0: Array, t: Array, *args: Array) -> Array:
        if getattr(RUNNING, "inside", False):
            raise IntegrationError("odeint: func calls odeint, and scipy's solver cannot be entered again")

        def derivative(y: Array, at: float) -> Array:
            found = slope(y.astype(y0.dtype), np.asarray(at, t.dtype), *args)
            if found.requires_grad:
                raise NotDifferentiableError(CAPTURED)
            return found.numpy()

        RUNNING.inside = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what they say is in the message
                found, info = solver(derivative, y0, t, **tolerances, full_output=True)
        finally:
            RUNNING.inside = False
        if info["message"] not in SOLVED or not np.isfinite(found).all():
            raise IntegrationError(f"odeint: the equation was not solved: {info['message']}")
        return np.asarray(found, y0.dtype)

    def adjoint(g: Any, y: Any, y0: Any, t: Any, *args: Any) -> tuple[Any, ...]:
        n = y0.shape[0]
        ends = np.cumsum([2 * n + 1, *(arg.size for arg in args)])

        def backward(state: Any, at: Any, *args: Any) -> Any:
            now, pull = vjp(slope, state[:n], at, *args)
            return np.concatenate([now, *(-np.reshape(part, -1) for part in pull(state[n : 2 * n]))])

        solved = _solution(backward, solver, tolerances)
        by_y: Any = g[-1]
        by_t0: Any = np.zeros((), y.dtype)
        rest: Any = np.zeros(int(ends[-1]) - 2 * n - 1, y.dtype)
        by_t: list[Any] = []
        for i in range(y.shape[0] - 1, 0, -1):
            by_t.append(np.sum(g[i] * slope(y[i], t[i], *args)))
            by_t0 = by_t0 - by_t[-1]
            begin = np.concatenate([y[i], by_y, np.reshape(by_t0, 1), rest])
            state = solved(begin, np.stack([t[i], t[i - 1]]), *args)[1]
            by_y, by_t0, rest = state[n : 2 * n] + g[i - 1], state[2 * n], state[2 * n + 1 :]
        of_args = [rest[a - ends[0] : b - ends[0]] for a, b in pairwise(ends)]
        return (
            by_y,
            np.stack([by_t0, *reversed(by_t)]),
            *(np.reshape(part, arg.shape) for part, arg in zip(of_args, args, strict=True)),
        )

    def sensitivity(tangents: Any, y: Any, y0: Any, t: Any, *args: Any) -> Any:
        n, count = y0.shape[0], len(args)
        by_y0, by_t, *by_args = tangents

        def forward(state: Any, at: Any, *both: Any) -> Any:
            inputs, outward = (state[:n], at, *both[:count]), (state[n:], np.zeros_like(at), *both[count:])
            return np.concatenate(jvp(slope, inputs, outward))

        state = np.concatenate([y0, by_y0 - slope(y0, t[0], *args) * by_t[0]])
        moved = _solution(forward, solver, tolerances)(state, t, *args, *by_args)[:, n:]
        return moved + np.stack([slope(y[i], t[i], *args) * by_t[i] for i in range(y.shape[0])])

    return custom_rule(solve, adjoint, sensitivity, infer=lambda y0, t, *args: ((t.shape[0], *y0.shape), y0.dtype))
