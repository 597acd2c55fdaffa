"""A step of mnist-cnn: convolution, maximum of 2 x 2, two dense layers, all without biases; gradient descent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def step(p: dict[str, Any], x: Any, y: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a mini-batch: pixels x (n, 784), digits y (n,)."""
    n, hidden, output = len(x), p["hidden.weight"], p["output.weight"]
    windows = sliding_window_view(x.reshape(n, 28, 28), (3, 3), (1, 2))
    a = np.einsum("nijkl,fkl->nfij", windows, p["conv.weight"][:, 0])
    blocks = np.maximum(a, 0).reshape(n, 6, 13, 2, 13, 2).swapaxes(3, 4).reshape(n, 6, 13, 13, 4)
    pooled = blocks.max(axis=4).reshape(n, 1014)
    b = pooled @ hidden
    h = np.maximum(b, 0)
    z = h @ output
    q = np.exp(z - z.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    loss = -np.log(q[np.arange(n), y]).mean()

    dz = (q - np.eye(10)[y]) / n
    db = dz @ output.T * (b > 0)
    dblocks = np.zeros_like(blocks)
    largest = blocks.argmax(axis=4)[..., None]
    np.put_along_axis(dblocks, largest, (db @ hidden.T).reshape(largest.shape), axis=4)
    da = dblocks.reshape(n, 6, 13, 13, 2, 2).swapaxes(3, 4).reshape(n, 6, 26, 26) * (a > 0)
    dconv = np.einsum("nfij,nijkl->fkl", da, windows)[:, None]
    return loss, {"conv.weight": dconv, "hidden.weight": pooled.T @ db, "output.weight": h.T @ dz}


def update(p: dict[str, Any], g: dict[str, Any], rate: float) -> None:
    """Gradient descent."""
    for name in p:
        p[name] -= rate * g[name]
