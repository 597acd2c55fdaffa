"""A step of mnist-rnn-d and mnist-rnn-e: four segments through a recurrent layer, softmax, gradient descent."""

from __future__ import annotations

from typing import Any

import numpy as np


def step(p: dict[str, Any], x: Any, y: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a mini-batch: pixels x (n, 784), digits y (n,)."""
    n, weight, recurrent = len(x), p["rnn.weight"], p["rnn.recurrent"]
    x = x.reshape(n, 4, 196)
    h = [np.zeros((n, 64))]
    for t in range(4):
        h.append(np.tanh(x[:, t] @ weight + h[t] @ recurrent + p["rnn.bias"]))
    z = h[4] @ p["output.weight"] + p["output.bias"]
    q = np.exp(z - z.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    loss = -np.log(q[np.arange(n), y]).mean()

    g = {name: np.zeros_like(value) for name, value in p.items()}
    dz = (q - np.eye(10)[y]) / n
    g["output.weight"], g["output.bias"] = h[4].T @ dz, dz.sum(axis=0)
    dh = dz @ p["output.weight"].T
    for t in reversed(range(4)):
        da = dh * (1 - h[t + 1] ** 2)
        g["rnn.weight"] += x[:, t].T @ da
        g["rnn.recurrent"] += h[t].T @ da
        g["rnn.bias"] += da.sum(axis=0)
        dh = da @ recurrent.T
    return loss, g


def update(p: dict[str, Any], g: dict[str, Any], rate: float) -> None:
    """Gradient descent."""
    for name in p:
        p[name] -= rate * g[name]
