"""Switching fusion off changes no derivative of any order: of every pattern that it rewrites, through every entry.

Only results of public functions are compared, so that it does not matter when the rewriting happens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import py_engine as pe
from py_engine import Techniques, ops
from py_engine.network import SGD, Chain, Dense, Embedding, Flatten, Layer, ParameterSpec, PermuteDims, Trainer

PLAIN = replace(Techniques(), fuse=False)


def pooled(window, bias=False, relu=False, stride=None, padding=0):
    """Convolution, perhaps a bias, perhaps relu, and the pool."""

    def function(p):
        y = ops.conv(p["x"], p["kernel"], padding=padding)
        if bias:
            y = y + ops.reshape(p["bias"], (-1, *(1,) * (y.ndim - 2)))
        return ops.max_pool(ops.relu(y) if relu else y, window, stride)

    return function


def texts(image):
    """Word vectors under a convolution along the text."""

    def function(p):
        y = ops.embedding(p["words"], IDS, 0)
        y = ops.reshape(y, (len(IDS), 1, *y.shape[1:])) if image else ops.transpose(y, (0, 2, 1))
        y = ops.conv(y, p["kernel"][:, np.newaxis] if image else ops.transpose(p["kernel"], (0, 2, 1)))
        y = y + ops.reshape(p["bias"], (-1, *(1,) * (y.ndim - 2)))
        return ops.max_pool(ops.relu(y), (8, 1) if image else 8)

    return function


IDS = np.random.default_rng(3).integers(0, 7, (2, 18))
IMAGES, SIGNALS = (
    {"x": (2, 1, 6, 6), "kernel": (3, 1, 3, 3), "bias": (3,)},
    {"x": (2, 40, 18), "kernel": (3, 40, 3), "bias": (3,)},
)
WORDS = {"words": (7, 40), "kernel": (3, 3, 40), "bias": (3,)}

PATTERNS = {
    "images": (pooled(2), IMAGES),
    "images, bias": (pooled(2, bias=True), IMAGES),
    "images, relu": (pooled(2, relu=True), IMAGES),
    "images, bias and relu": (pooled(2, bias=True, relu=True), IMAGES),
    "images, padded": (pooled(2, bias=True, padding=1), IMAGES),
    "images, overlapping windows": (pooled(2, relu=True, stride=1), IMAGES),
    "signals": (pooled(8, bias=True, relu=True), SIGNALS),
    "texts": (texts(image=False), WORDS),
    "texts as images": (texts(image=True), WORDS),
}


def scalar(pattern):
    return lambda p: np.sum(pattern(p) ** 3) / 100


def along(function, v):
    """The derivative of the function along `v`, by the gradient."""
    return lambda p: sum(np.sum(g * v[name]) for name, g in pe.grad(function)(p).items())


ORDERS = {
    0: lambda f, v: f,
    1: lambda f, v: pe.grad(f),
    2: lambda f, v: pe.grad(along(f, v)),
    3: lambda f, v: pe.grad(along(along(f, v), v)),
}
"""For each order the derivative that is compared, by gradients of gradients."""

ENTRIES = {
    "compile": (0, lambda f, v, how: pe.compile(f, how)),
    "compile(grad)": (1, lambda f, v, how: pe.compile(pe.grad(f), how)),
    "compile(value_and_grad)": (1, lambda f, v, how: lambda p: pe.compile(pe.value_and_grad(f), how)(p)[1]),
    "grad of a compiled function": (1, lambda f, v, how: pe.grad(pe.compile(f, how))),
    "compile(grad of grad)": (2, lambda f, v, how: pe.compile(ORDERS[2](f, v), how)),
    "compile(hvp)": (2, lambda f, v, how: pe.compile(lambda p: pe.hvp(f, p, v), how)),
    "compile(jvp of grad)": (2, lambda f, v, how: pe.compile(lambda p: pe.jvp(pe.grad(f), (p,), (v,))[1], how)),
    "grad of grad of a compiled function": (2, lambda f, v, how: ORDERS[2](pe.compile(f, how), v)),
    "hvp of a compiled function": (2, lambda f, v, how: lambda p: pe.hvp(pe.compile(f, how), p, v)),
    "compile(grad of grad of grad)": (3, lambda f, v, how: pe.compile(ORDERS[3](f, v), how)),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_order_is_the_same_with_fusion_and_without(pattern, entry, rng):
    function, shapes = PATTERNS[pattern]
    p, v = ({name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(2))
    f = scalar(function)
    order, make = ENTRIES[entry]
    fused, plain = (leaves(make(f, v, how)(p)) for how in (Techniques(), PLAIN))
    eager = leaves(ORDERS[order](f, v)(p))
    assert any(np.any(a != 0) for a in eager)
    for a, b, c in zip(fused, plain, eager, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(b, c, rtol=1e-9, atol=1e-9)


def leaves(value):
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value.numpy() if isinstance(value, pe.Tensor) else np.asarray(value)]


class Slopes(Layer):
    """The derivative, by its input, of what a fusable chain computes: its training takes second derivatives."""

    def __init__(self, inputs, *, order=1, name=None):
        super().__init__(name)
        self.inputs, self.order = inputs, order

    def parameters(self):
        fans = 3 * self.inputs, 9
        return {
            "kernel": ParameterSpec((3, self.inputs, 3), "glorot_uniform", *fans),
            "bias": ParameterSpec((3,), "zeros", *fans),
        }

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        f = lambda x: np.sum(pooled(8, bias=True, relu=True)({"x": x, **parameters}) ** (2 + self.order))  # noqa: E731
        g = pe.grad(f)
        if self.order == 2:
            return x + pe.grad(lambda x: np.sum(g(x) * x))(x)
        return x + g(x)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
def test_training_through_derivatives_is_the_same_with_fusion_and_without(threads, order, rng):
    x, y = rng.integers(0, 11, (12, 18)), rng.integers(0, 4, 12)
    results = []
    for how in (Techniques(split_batch=threads > 1), replace(PLAIN, split_batch=threads > 1)):
        layers = [Embedding(11, 6), PermuteDims(1, 0), Slopes(6, order=order), Flatten(), Dense(108, 4)]
        model = Chain(*layers, dtype=np.float64)
        trainer = Trainer(model, optimizer=SGD(0.1), batch_size=5, threads=threads, techniques=how)
        losses = np.concatenate([trainer.train_epoch(x, y) for _ in range(2)])
        results.append([losses, trainer.predict(x), *model.parameters.as_dict().values()])
        trainer.close()
    for on, off in zip(*results, strict=True):
        np.testing.assert_allclose(on, off, rtol=1e-9, atol=1e-12)
