"""A step of imdb-cnn-a and imdb-cnn-c: trained embedding, convolution, maximum of 8, one logit; Adam."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def step(p: dict[str, Any], x: Any, y: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a mini-batch: tokens x (n, 130), where 0 is padding, and labels y (n, 1)."""
    n, table, weight = len(x), p["embedding.weight"], p["conv.weight"]
    windows = sliding_window_view(table[x], 3, 1)
    a = np.einsum("nick,fck->nfi", windows, weight) + p["conv.bias"][:, None]
    blocks = np.maximum(a, 0).reshape(n, 8, 16, 8)
    pooled = blocks.max(axis=3).reshape(n, 128)
    z = pooled @ p["output.weight"] + p["output.bias"]
    loss = (np.maximum(z, 0) - z * y + np.log1p(np.exp(-abs(z)))).mean()

    g = {name: np.zeros_like(value) for name, value in p.items()}
    dz = (1 / (1 + np.exp(-z)) - y) / n
    g["output.weight"], g["output.bias"] = pooled.T @ dz, dz.sum(axis=0)
    dblocks = np.zeros_like(blocks)
    largest = blocks.argmax(axis=3)[..., None]
    np.put_along_axis(dblocks, largest, (dz @ p["output.weight"].T).reshape(largest.shape), axis=3)
    da = dblocks.reshape(a.shape) * (a > 0)
    g["conv.weight"], g["conv.bias"] = np.einsum("nfi,nick->fck", da, windows), da.sum(axis=(0, 2))
    for k in range(3):
        np.add.at(g["embedding.weight"], x[:, k : k + 128], np.einsum("nfi,fc->nic", da, weight[:, :, k]))
    g["embedding.weight"][0] = 0
    return loss, g


def update(p: dict[str, Any], g: dict[str, Any], state: dict[Any, Any], rate: float) -> None:
    """Adam; the state is the number of steps, and the means of the gradient and of its square by name."""
    state["steps"] = state.get("steps", 0) + 1
    for name in p:
        mean, square = (state.setdefault((kind, name), np.zeros_like(p[name])) for kind in ("mean", "square"))
        mean += 0.1 * (g[name] - mean)
        square += 0.001 * (g[name] ** 2 - square)
        m, s = mean / (1 - 0.9 ** state["steps"]), square / (1 - 0.999 ** state["steps"])
        p[name] -= rate * m / (np.sqrt(s) + 1e-8)
