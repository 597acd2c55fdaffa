"""The functions of the micro-benchmarks, their inputs, and their derivatives written by hand in numpy.

The study that prints them defines none; these are the definitions published with the figures that it cites:

- SINCOS: sin(cos(x)) of a number;
- LOOP: r = 1, then 500 times r = r sin(x), at x = 2;
- LOGSUMEXP: log(sum(exp(x))) of 1,000 numbers;
- LOGISTIC REGRESSION: sum(sigmoid(W x + b)) with W (10, 784) and one x, by W and b;
- 2-LAYER MNIST MLP: 784 inputs, 32 rectified units, 10 logits, the cross-entropy of their softmax at one label, of one
  image, by all weights;
- Rosenbrock's and Ackley's functions of n numbers.

On arrays of 10,000 elements or more, the first two are applied to each element and summed, and the networks read 100
inputs at once (the network's loss is then the mean).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEPS = 500
"""How often LOOP multiplies."""

LABEL = 3
"""The class, from 0, of every image of the network."""


@dataclass(frozen=True)
class Benchmark:
    """A function with inputs: the first `by` of them are differentiated by, the others are constants."""

    name: str
    title: str
    inputs: Callable[[int], list[Array]]
    """The inputs by the size asked for: how many numbers, or how many rows that the networks read."""
    gradient: Callable[..., tuple[float, list[Array]]]
    """The value and the gradients by the first `by` inputs, by hand."""
    by: int = 1


def benchmark(name: str) -> Benchmark:
    """The benchmark of this name."""
    return BENCHMARKS[name]


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def _random(*shape: int, seed: int, scale: float = 1.0) -> Array:
    drawn: Array = scale * np.random.default_rng(seed).standard_normal(shape)
    return drawn


def _number(value: float, low: float, high: float) -> Callable[[int], list[Array]]:
    """One number, or `size` of them evenly spread."""
    return lambda size: [np.array(value) if size == 1 else np.linspace(low, high, size)]


def _images(rows: int) -> Array:
    """Pixels of one image (784,), or of some (784, rows)."""
    pixels = np.random.default_rng(5).random((784, rows))
    return pixels[:, 0] if rows == 1 else pixels


def _column(x: Array, images: Array) -> Array:
    """A bias (n,) as it is added to what is made of one image, or to a column for each image."""
    return x if images.ndim == 1 else x[:, None]


def _logistic_inputs(rows: int) -> list[Array]:
    return [_random(10, 784, seed=1, scale=0.05), _random(10, seed=2), _images(rows)]


def _network_inputs(rows: int) -> list[Array]:
    weights = [_random(32, 784, seed=1, scale=0.05), _random(32, seed=2), _random(10, 32, seed=3), _random(10, seed=4)]
    return [*weights, _images(rows)]


def point(n: int) -> list[Array]:
    """Where Rosenbrock's and Ackley's functions are differentiated; duals.cpp has the same."""
    return [0.5 + 0.001 * ((37 * np.arange(n)) % 1000).astype(np.float64)]


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients by hand. The first five are as short as a person would write them; programs of systems that are
# "by hand" have them once more, each in its language.


def sincos(x: Array) -> tuple[float, list[Array]]:
    """The sum of sin(cos(x))."""
    return float(np.sum(np.sin(np.cos(x)))), [-np.cos(np.cos(x)) * np.sin(x)]


def loop(x: Array) -> tuple[float, list[Array]]:
    """The sum of sin(x)^500, multiplication by multiplication."""
    s, c = np.sin(x), np.cos(x)
    r, derivative = np.ones_like(x), np.zeros_like(x)
    for _ in range(STEPS):
        derivative = derivative * s + r * c
        r = r * s
    return float(np.sum(r)), [derivative]


def logsumexp(x: Array) -> tuple[float, list[Array]]:
    """log(sum(exp(x)))."""
    e = np.exp(x)
    total = e.sum()
    return math.log(total), [e / total]


def logistic(w: Array, b: Array, x: Array) -> tuple[float, list[Array]]:
    """The sum of sigmoid(w x + b)."""
    s = 1 / (1 + np.exp(-(w @ x + _column(b, x))))
    d = s * (1 - s)
    return float(s.sum()), [np.outer(d, x), d] if x.ndim == 1 else [d @ x.T, d.sum(axis=1)]


def network(w1: Array, b1: Array, w2: Array, b2: Array, x: Array) -> tuple[float, list[Array]]:
    """The mean cross-entropy of the network's softmax at LABEL."""
    columns = x.reshape(784, -1)
    hidden = np.maximum(w1 @ columns + b1[:, None], 0)
    logits = w2 @ hidden + b2[:, None]
    e = np.exp(logits - logits.max(axis=0))
    total = e.sum(axis=0)
    shifted = logits[LABEL] - logits.max(axis=0)
    loss = float(np.mean(np.log(total) - shifted))
    d = e / total
    d[LABEL] -= 1
    d /= columns.shape[1]
    back = (w2.T @ d) * (hidden > 0)
    return loss, [back @ columns.T, back.sum(axis=1), d @ hidden.T, d.sum(axis=1)]


def rosenbrock(x: Array) -> tuple[float, list[Array]]:
    """sum((1 - x[i])² + 100 (x[i + 1] - x[i]²)²)."""
    left, right = 1 - x[:-1], x[1:] - x[:-1] ** 2
    gradient = np.zeros_like(x)
    gradient[:-1] = -2 * left - 400 * x[:-1] * right
    gradient[1:] += 200 * right
    return float(np.sum(left**2 + 100 * right**2)), [gradient]


def ackley(x: Array) -> tuple[float, list[Array]]:
    """-20 exp(-0.2 sqrt(mean(x²))) - exp(mean(cos(2π x))) + 20 + e."""
    n, turn = x.size, 2 * np.pi
    root, wave = np.sqrt(np.mean(x**2)), np.exp(np.mean(np.cos(turn * x)))
    bowl = 20 * np.exp(-0.2 * root)
    gradient = bowl * 0.2 * x / (n * root) + wave * turn * np.sin(turn * x) / n
    return float(20 + math.e - bowl - wave), [gradient]


BENCHMARKS = {
    item.name: item
    for item in (
        Benchmark("sincos", "SINCOS", _number(0.7, 0.1, 1.5), sincos),
        Benchmark("loop", "LOOP", _number(2.0, 1.4, 1.7), loop),
        Benchmark("logsumexp", "LOGSUMEXP", lambda size: [_random(size, seed=0)], logsumexp),
        Benchmark("logistic", "LOGISTIC REGRESSION", _logistic_inputs, logistic, 2),
        Benchmark("mlp", "2-LAYER MNIST MLP", _network_inputs, network, 4),
        Benchmark("rosenbrock", "Rosenbrock", point, rosenbrock),
        Benchmark("ackley", "Ackley", point, ackley),
    )
}

SMALL = {"sincos": 1, "loop": 1, "logsumexp": 1000, "logistic": 1, "mlp": 1}
"""The functions of the study's first table, with their sizes."""

CHUNKED = ("rosenbrock", "ackley")
"""The functions of its second one."""


def read(path: str, shapes: str) -> list[Array]:
    """The inputs that a file of bare numbers holds, one array after the other, each in C order."""
    numbers, found, start = np.fromfile(path), [], 0
    for text in shapes.split(","):
        shape = tuple(int(part) for part in text.split("x")) if text else ()
        found.append(numbers[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    return found


def shapes_of(arrays: Sequence[Any]) -> str:
    """The shapes of arrays as `read` takes them: 10x784,10,784."""
    return ",".join("x".join(map(str, np.shape(array))) for array in arrays)


def flat(value: Any, gradients: Sequence[Any]) -> Array:
    """A value and gradients as one vector: what a program writes, and is compared by."""
    return np.concatenate([np.ravel(np.asarray(item, dtype=np.float64)) for item in (value, *gradients)])
