"""GradBench's `gmm`: the log-posterior of a mixture of Gaussians with a Wishart prior (ADBench), and its gradient.

The inverse covariance of component k is QᵀQ with a lower triangular Q, whose diagonal is exp(q[k]) and whose other
elements are l[k], column after column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import py_engine as pe
from experiments.gradbench.values import Arrays, InputError, array, check_work, integer, number


def read(given: Any) -> tuple[Arrays, tuple[float, int, int]]:
    """alpha (k,), mu (k, d), q (k, d), l (k, d (d-1) / 2) and x (n, d); then gamma, m, and the sign of the prior.

    Older versions of the benchmark say `means` for mu, and `icf` for q and l side by side, and subtract the logarithm
    of the prior, which newer ones add.
    """
    d, k, n = (integer(given, name, least=1) for name in ("d", "k", "n"))
    check_work(k * d * max(n, d), f"d={d:,}, k={k:,}, n={n:,}")
    mu = array(given, "means" if _old(given) else "mu", 2)
    if _old(given):
        icf = array(given, "icf", 2)
        q, lower = icf[:, :d].copy(), icf[:, d:].copy()
    else:
        q, lower = array(given, "q", 2), array(given, "l", 2)
    arrays = {"alpha": array(given, "alpha", 1), "mu": mu, "q": q, "l": lower, "x": array(given, "x", 2)}
    shapes = {"alpha": (k,), "mu": (k, d), "q": (k, d), "l": (k, d * (d - 1) // 2), "x": (n, d)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise InputError(f"{name}: expected shape {shape} for d={d}, k={k}, n={n}, found {arrays[name].shape}")
    gamma = float(number("gamma", given.get("gamma")))
    if gamma <= 0:
        raise InputError(f"gamma: expected a number above 0, found {gamma}")
    return list(arrays.values()), (gamma, integer(given, "m"), -1 if _old(given) else 1)


def objective(gamma: float, m: int, sign: int) -> Callable[..., Any]:
    """The log-posterior, a number."""

    def log_posterior(alpha: Any, mu: Any, q: Any, lower: Any, x: Any) -> Any:
        (k, d), n = mu.shape, x.shape[0]
        diagonal, logs = np.exp(q), np.sum(q, axis=1)
        # Q (k, d, d): zero, the diagonal and the rest are side by side, and each element takes its own from there.
        parts = np.concatenate([np.zeros((k, 1)), diagonal, lower], axis=1)
        Q = np.reshape(parts[:, _places(d)], (k, d, d))
        # Q (x - mu), with one product for all points: (k, n, d).
        away = x @ np.swapaxes(Q, 1, 2) - np.swapaxes(Q @ np.reshape(mu, (k, d, 1)), 1, 2)
        inner = np.reshape(alpha + logs, (k, 1)) - np.sum(away * away, axis=2) / 2
        largest = np.max(inner, axis=0)
        likelihood = np.sum(largest + np.log(np.sum(np.exp(inner - largest), axis=0)))
        weights = pe.ops.logsumexp(alpha)
        prior = m * np.sum(logs) - gamma**2 / 2 * (np.sum(diagonal * diagonal) + np.sum(lower * lower))
        constant = -n * d / 2 * math.log(2 * math.pi)
        return likelihood - n * weights + constant + sign * (prior + k * _wishart(d, gamma, m))

    return log_posterior


def jacobian(gamma: float, m: int, sign: int) -> Callable[..., Any]:
    """Its derivatives by alpha, mu, q and l."""
    return pe.grad(objective(gamma, m, sign), argnums=(0, 1, 2, 3))


def write(result: Arrays, given: Any) -> Any:
    """A number; or gradients by name, and for older versions in one list: alpha, means, then icf."""
    if len(result) == 1:
        return float(np.asarray(result[0]))
    alpha, mu, q, lower = result
    if _old(given):
        return np.concatenate([alpha, mu.ravel(), np.hstack([q, lower]).ravel()]).tolist()
    return {"alpha": alpha.tolist(), "mu": mu.tolist(), "q": q.tolist(), "l": lower.tolist()}


def _old(given: Any) -> bool:
    return isinstance(given, dict) and "icf" in given


def _places(d: int) -> Any:
    """For each element of Q, row after row: its place among zero, the diagonal, and the columns below it."""
    places = np.zeros((d, d), np.int64)
    places[np.diag_indices(d)] = 1 + np.arange(d)
    columns, rows = np.triu_indices(d, 1)
    places[rows, columns] = 1 + d + np.arange(len(rows))
    return places.ravel()


def _wishart(d: int, gamma: float, m: int) -> float:
    """What of a component's prior does not depend on the parameters."""
    degrees = d + m + 1
    multigamma = d * (d - 1) / 4 * math.log(math.pi) + sum(math.lgamma((degrees - j) / 2) for j in range(d))
    return degrees * d * math.log(gamma / math.sqrt(2)) - multigamma


FUNCTIONS = {"objective": objective, "jacobian": jacobian}
