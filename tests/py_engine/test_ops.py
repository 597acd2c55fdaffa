"""Every op of the table by the same checks, driven by one line per op.

A line gives the op, the shapes it is tried at and the domain of each operand.  From it follow: the values (numpy's
own, or a formula), the gradient and its gradient against finite differences, the jvp rule against the vjp rule,
float32 in and float32 out, the compiled function against the eager one, and the promises a record makes about
memory.  Ties, infinities and other special values are in test_special_values.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, gradcheck, ops
from py_engine.ad.forward import push_forward
from py_engine.ad.op import NUMPY, TABLE, Op, elementwise, no_gradient
from py_engine.ad.reverse import gradients
from py_engine.ad.tensor import FLOATS
from py_engine.errors import DTypeError, GradientCheckError, ShapeError

# Domains: what an operand is drawn from -------------------------------------------------------------------


def anything(rng, shape, k):
    return rng.standard_normal(shape)


def positive(rng, shape, k):
    return rng.uniform(0.5, 2, shape)


def divisor(rng, shape, k):
    """Numbers that what `apart` draws first is no multiple of, nearly."""
    return rng.choice([0.8, 2.0, -1.2], shape)


def nonzero(rng, shape, k):
    return rng.uniform(0.5, 2, shape) * rng.choice([-1.0, 1.0], shape)


def inside(rng, shape, k):
    """Between -1 and 1, away from both."""
    return rng.uniform(-0.9, 0.9, shape)


def share(rng, shape, k):
    """Between 0 and 1."""
    return rng.uniform(0.1, 0.9, shape)


def apart(rng, shape, k):
    """No two elements, of this operand or of another one drawn so, closer than 0.03 to each other or to 0."""
    n = int(np.prod(shape))
    return ((rng.permutation(n) - n // 2) * 0.4 + 0.1 * (k + 1) + rng.uniform(0, 0.05, n)).reshape(shape)


def rising(rng, shape, k):
    return np.sort(rng.standard_normal(shape))


def condition(rng, shape, k):
    return rng.random(shape) < 0.5


def below(n):
    """Integers in [-n, n): positions on an axis of length n."""
    return lambda rng, shape, k: rng.integers(-n, n, shape)


def classes(n):
    return lambda rng, shape, k: rng.integers(0, n, shape)


def in_turn(n):
    return lambda rng, shape, k: np.arange(math.prod(shape)).reshape(shape) % n


def dominant(rng, shape, k):
    """Matrices that are far from singular, and of full rank."""
    return rng.uniform(-1, 1, shape) + 3 * np.eye(*shape[-2:])


# Shapes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """Operand shapes, and the other arguments of the call."""

    shapes: tuple[tuple[int, ...], ...]
    attrs: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([str(s).replace(" ", "") for s in self.shapes] + [f"{k}={v}" for k, v in self.attrs.items()])


def at(*shapes: tuple[int, ...], **attrs: Any) -> Example:
    return Example(shapes, attrs)


UNARY = [at(()), at((1,)), at((3,)), at((2, 3)), at((1, 3, 1)), at((0,)), at((2, 0, 3))]
BINARY = [
    at((), ()), at((3,), (3,)), at((2, 3), (3,)), at((3, 1), (1, 4)), at((), (2, 3)), at((2, 3), (1, 1)),
    at((2, 1, 3), (4, 1)), at((0, 3), (3,)), at((1,), (0,)),
]  # fmt: skip
TERNARY = [at((), (), ()), at((3,), (3,), (3,)), at((2, 3), (), (3,)), at((2, 1), (3,), (1, 1)), at((0, 2), (1, 2), ())]
OVER_AXES = [
    at(()), at((4,)), at((2, 3)), at((2, 3), axis=0), at((2, 3), axis=-1), at((2, 3), axis=1, keepdims=True),
    at((2, 3, 4), axis=(0, 2)), at((2, 3, 4), axis=(1, 2), keepdims=True), at((3, 1), axis=1), at((1, 3), axis=0),
    at((2, 3), axis=()), at((0, 3), axis=1), at((2, 0, 3), axis=2),
]  # fmt: skip
OVER_EMPTY = [at((0, 3), axis=0), at((0,)), at((2, 0), axis=1, keepdims=True)]
POSITIONS = [
    at(()), at((4,)), at((2, 3)), at((2, 3), axis=0), at((2, 3), axis=-1, keepdims=True), at((2, 3, 4), axis=1),
    at((0, 3), axis=1), at((2, 3), keepdims=True),
]  # fmt: skip
ALONG_AXES = [at((3,)), at((2, 3)), at((2, 3), axis=0), at((2, 3, 2), axis=(0, 2)), at((2, 1), axis=1), at((0, 3))]
MATRICES = [
    at((2, 3), (3, 4)), at((3,), (3, 4)), at((2, 3), (3,)), at((3,), (3,)), at((5, 2, 3), (3, 4)), at((1, 1), (1, 1)),
    at((5, 2, 3), (5, 3, 4)), at((2, 1, 2, 3), (5, 3, 4)), at((2, 3), (5, 3, 4)), at((3,), (5, 3, 4)),
    at((5, 2, 3), (3,)), at((2, 0), (0, 3)), at((0, 3), (3, 2)), at((4, 0, 3), (3, 2)),
]  # fmt: skip
DOTS = [at((), (2, 3)), at((3,), (3,)), at((2, 3), (3, 4)), at((2, 3), (5, 3, 4)), at((3,), (3, 4)), at((0,), (0,))]


# One line per op ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """How one op is tried.

    Attributes:
        name: in the op table, or of a function of `py_engine.ops`.
        call: on tensors and arrays.
        examples: the shapes and attributes to try.
        domains: of each operand; the last one serves those that follow.
        like: the same on arrays, where numpy has no function that the op stands in for.
        differentiable: whether its gradient is that of finite differences.
        random: it draws: anew in every replay, other values for another dtype.
    """

    name: str
    call: Callable[..., Tensor]
    examples: Sequence[Example]
    domains: tuple[Callable[..., Any], ...] = (anything,)
    like: Callable[..., Any] | None = None
    differentiable: bool = True
    random: bool = False

    def arrays(self, rng: np.random.Generator, example: Example, dtype: Any = np.float64) -> list[Any]:
        """Draw the operands, read-only: an op that writes into one fails."""
        drawn = []
        for k, shape in enumerate(example.shapes):
            array = np.asarray(self.domains[min(k, len(self.domains) - 1)](rng, shape, k))
            drawn.append(array.astype(dtype) if array.dtype == np.float64 else array)
            drawn[-1].flags.writeable = False
        return drawn


def slope_of_gammaln(x):
    """Gauss's sum, with Euler's constant, and a tail by the trapezoidal rule."""
    k, n = np.arange(20000.0), 20000.0
    found = np.sum(1 / (k + 1) - 1 / (np.expand_dims(x, -1) + k), -1) - np.euler_gamma
    return found + np.log((n + x) / (n + 1)) + (1 / (n + 1) - 1 / (n + x)) / 2


def positive_definite(x):
    return np.matmul(x, np.swapaxes(x, -1, -2)) + np.diag(np.arange(1, x.shape[-1] + 1)).astype(x.dtype)


def thin_svd(x):
    return np.linalg.svd(x, full_matrices=False)


def squares(factors, first=0):
    """Results of a decomposition as one vector, those from number `first` on squared: their signs are free."""
    return np.concatenate([np.ravel(x * x if i >= first else x) for i, x in enumerate(factors)])


def softmax(x, axis=-1):
    return np.exp(x) / np.sum(np.exp(x), axis, keepdims=True)


def scattered(g, i, j):
    total = np.zeros((5, 5))
    np.add.at(total, (i, j), g)
    return total


def looked_up(g, ids, vocabulary, padding_index=-1):
    total = np.zeros((vocabulary, g.shape[-1]))
    np.add.at(total, ids, g)
    if padding_index >= 0:
        total[padding_index] = 0
    return total


def correlated(x, weight, stride=1, padding=((0, 0), (0, 0)), dilation=1, groups=1):
    """Convolution over two axes, one window after the other."""
    x = np.pad(x, ((0, 0), (0, 0), *padding))
    reach = [(k - 1) * dilation + 1 for k in weight.shape[2:]]
    h, w = ((n - r) // stride + 1 for n, r in zip(x.shape[2:], reach, strict=True))
    y = np.zeros((len(x), len(weight), h, w))
    for n, f, i, j in np.ndindex(y.shape):
        c = f // (len(weight) // groups) * weight.shape[1]
        rows = slice(i * stride, i * stride + reach[0], dilation)
        columns = slice(j * stride, j * stride + reach[1], dilation)
        y[n, f, i, j] = np.sum(x[n, c : c + weight.shape[1], rows, columns] * weight[f])
    return y


def pooled(pick, fill):
    """Pooling over one axis, one window after the other."""

    def pool(x, window, stride=None, padding=0):
        x = np.pad(x, ((0, 0), (0, 0), (padding, padding)), constant_values=fill)
        starts = range(0, x.shape[2] - window + 1, stride or window)
        return np.stack([pick(x[:, :, i : i + window], axis=2) for i in starts], axis=2)

    return pool


def pulled(function, place):
    """The transpose of a linear function (or of a maximum, which is one nearby): by its operand at `place`."""

    def gradient(g, other, shape, **attrs):
        total = np.zeros(shape)
        for at in np.ndindex(shape):
            unit = np.zeros(shape)
            unit[at] = 1
            total[at] = np.sum(g * function(*((unit, other) if place == 0 else (other, unit)), **attrs))
        return total

    return gradient


def standardized(x, axis=-1, eps=1e-5):
    """Mean 0 and variance 1 over some axes."""
    return (x - np.mean(x, axis, keepdims=True)) / np.sqrt(np.var(x, axis, keepdims=True) + eps)


def by_channel(numbers, x):
    return np.reshape(numbers, (-1, *(1,) * (x.ndim - 2)))


def attended(q, k, v, mask=None, causal=False):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    seen = np.tri(q.shape[-2], k.shape[-2], dtype=bool) if causal else np.ones(scores.shape, bool)
    scores = scores if mask is None or mask.dtype == bool else scores + mask
    powers = np.exp(scores) * (seen if mask is None or mask.dtype != bool else seen & mask)
    return powers / np.maximum(np.sum(powers, -1, keepdims=True), 1e-300) @ v


def resized(x, size, mode="nearest", align_corners=False):
    """Nearest, or between neighbours by numpy's own interpolation, axis by axis."""
    for axis, new in enumerate(size, 2):
        old = x.shape[axis]
        if mode == "nearest":
            x = np.take(x, np.arange(new) * old // new, axis)
            continue
        places = np.linspace(0, old - 1, new) if align_corners else (np.arange(new) + 0.5) * old / new - 0.5
        x = np.apply_along_axis(lambda row, at=places, n=old: np.interp(at, np.arange(n), row), axis, x)
    return x


def weighted_entropy(x, labels, weight=None, label_smoothing=0.0, ignored=None, reduction="mean"):
    hot = np.eye(x.shape[-1])[labels] * (labels != ignored)[..., None]
    weight = np.ones(x.shape[-1]) if weight is None else weight
    targets = (1 - label_smoothing) * hot + label_smoothing / x.shape[-1] * hot.sum(-1, keepdims=True)
    rows = -np.sum(targets * weight * np.log(softmax(x)), -1)
    return {"mean": lambda: rows.sum() / (hot * weight).sum(), "sum": rows.sum, "none": lambda: rows}[reduction]()


def transposed(x, w, stride=1, padding=((0, 0), (0, 0)), output_padding=0, dilation=1, groups=1):
    """The transpose of a convolution over two axes."""
    sizes = zip(x.shape[2:], w.shape[2:], padding, strict=True)
    lengths = [(n - 1) * stride + (k - 1) * dilation + 1 - sum(pair) + output_padding for n, k, pair in sizes]
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return pulled(correlated, 0)(x, w, (len(x), w.shape[1] * groups, *lengths), **settings)


def first_winners(g, x, window, stride=None):
    """The gradient of a maximum over windows of one axis."""
    total = np.zeros(x.shape)
    for n, c, i in np.ndindex(g.shape):
        start = i * (stride or window)
        total[n, c, start + np.argmax(x[n, c, start : start + window])] += g[n, c, i]
    return total


def picked(u, x, window, stride=None):
    """Elements of `u` where the windows of one axis of `x` have their maximum."""
    starts = range(0, x.shape[2] - window + 1, stride or window)
    winners = [start + np.argmax(x[:, :, start : start + window], axis=2) for start in starts]
    return np.take_along_axis(u, np.stack(winners, axis=2), axis=2)


def full(stride=1, padding=((0, 0), (0, 0)), dilation=1, groups=1):
    """The attributes of a convolution over two axes, as the ops have them."""
    return {"stride": (stride,) * 2, "padding": padding, "dilation": (dilation,) * 2, "groups": groups}


def spread(window, stride):
    """The attributes of pooling over one axis, as the ops have them."""
    return {"window": (window,), "stride": (stride or window,), "padding": ((0, 0),), "dilation": (1,)}


FIELD = {"kernel": (2, 2), "stride": (1, 2), "padding": ((0, 1), (0, 0))}


def columns(x, kernel, stride, padding):
    """The windows over two axes as columns, one after the other."""
    x = np.pad(x, ((0, 0), (0, 0), *padding))
    counts = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], kernel, stride, strict=True)]
    found = np.zeros((x.shape[1], *kernel, len(x), *counts))
    for c, i, j, n, p, q in np.ndindex(found.shape):
        found[c, i, j, n, p, q] = x[n, c, p * stride[0] + i, q * stride[1] + j]
    return found.reshape(x.shape[1] * kernel[0] * kernel[1], len(x) * counts[0] * counts[1])


def shifted(z, kernel, samples, window, stride):
    """Sums of rows moved by their places in the kernel, in the order (place in the window, filter, sample, window)."""
    z = z.reshape(kernel, -1, samples, z.shape[1] // samples)
    count = (z.shape[3] - kernel + 1 - window) // stride + 1
    y = np.zeros((window, z.shape[1], samples, count))
    for w, f, n, o in np.ndindex(y.shape):
        y[w, f, n, o] = sum(z[k, f, n, o * stride + w + k] for k in range(kernel))
    return y


def summed_by_word(g, phases, ids, kernel, length, stride):
    """A pool's gradient at the first of the largest phases, for each different word, kernel place and filter."""
    which = np.unique(ids, return_inverse=True)[1]
    filters = len(g)
    found = np.zeros((min(ids.size, 5), kernel, filters))
    for f, n, o in np.ndindex(g.shape):
        start = o * stride + phases[:, f, n, o].argmax()
        for k in range(kernel):
            found[which.reshape(ids.shape)[n, start + k], k, f] += g[f, n, o]
    return found.reshape(len(found), kernel * filters)


def placed_by_word(sums, kernel, ids, padding_index):
    words = np.unique(ids)
    found = np.zeros((5, kernel.shape[1]))
    found[words] = sums[: len(words)] @ kernel
    if padding_index >= 0:
        found[padding_index] = 0
    return found


def by_word(name):
    """An op that reads the words of ids, as one that reads the ids."""
    return lambda a, b, ids, **attrs: TABLE[name](a, b, TABLE["words"](ids, vocabulary=5), **attrs)


CONVOLUTIONS = [
    at((2, 2, 4, 4), (3, 2, 2, 3)), at((1, 2, 4, 5), (4, 1, 2, 2), groups=2, stride=2, padding=((1, 0), (0, 1))),
    at((1, 1, 5, 4), (2, 1, 3, 2), dilation=2), at((0, 2, 3, 3), (1, 2, 3, 3)), at((1, 1, 1, 1), (1, 1, 1, 1)),
    at((2, 1, 2, 3), (1, 1, 4, 4), padding=((1, 1), (1, 0))),
]  # fmt: skip
POOLS = [
    at((2, 3, 4), window=2), at((1, 2, 5), window=2), at((1, 2, 5), window=3, stride=1),
    at((1, 1, 7), window=2, stride=3), at((2, 1, 4), window=3, padding=1),
    at((0, 2, 3), window=2), at((1, 1, 1), window=1), at((1, 2, 4), window=4),
]  # fmt: skip
PLACES = (((0, 2, 1), (0, None, 1)), ((1, 3, 1), (1, 2, 1)))  # [0:2, :] and [1:3, 1:2]: they overlap

LINES = [
    Line("add", ops.add, BINARY),
    Line("sub", ops.sub, BINARY),
    Line("mul", ops.mul, BINARY),
    Line("div", ops.div, BINARY, (anything, nonzero)),
    Line("neg", ops.neg, UNARY),
    Line("square", ops.square, UNARY),
    Line("reciprocal", ops.reciprocal, UNARY, (nonzero,)),
    Line("pow", ops.pow, BINARY, (positive, anything)),
    Line("exp", ops.exp, UNARY),
    Line("expm1", ops.expm1, UNARY),
    Line("log", ops.log, UNARY, (positive,)),
    Line("log1p", ops.log1p, UNARY, (inside,)),
    Line("sqrt", ops.sqrt, UNARY, (positive,)),
    Line("erf", ops.erf, UNARY, like=np.vectorize(math.erf, otypes=[float])),
    Line("erfc", ops.erfc, UNARY, like=np.vectorize(math.erfc, otypes=[float])),
    Line("gammaln", ops.gammaln, UNARY, (positive,), like=np.vectorize(math.lgamma, otypes=[float])),
    Line("digamma", ops.digamma, UNARY, (positive,), like=slope_of_gammaln),
    Line("polygamma", partial(ops.polygamma, 2), UNARY, (positive,), like=lambda x: -2 * np.sum(
         1.0 / (np.expand_dims(x, -1) + np.arange(1e5)) ** 3, -1) - 1e-10),
    Line("logit", ops.logit, UNARY, (share,), like=lambda x: np.log(x / (1 - x))),
    Line("cbrt", ops.cbrt, UNARY, (nonzero,)),
    Line("exp2", ops.exp2, UNARY),
    Line("log2", ops.log2, UNARY, (positive,)),
    Line("log10", ops.log10, UNARY, (positive,)),
    Line("logaddexp", ops.logaddexp, BINARY),
    Line("arcsinh", ops.arcsinh, UNARY),
    Line("arccosh", lambda x: ops.arccosh(1 + x), UNARY, (positive,), like=lambda x: np.arccosh(1 + x)),
    Line("arctanh", ops.arctanh, UNARY, (inside,)),
    Line("arctan2", ops.arctan2, BINARY, (nonzero,)),
    Line("hypot", ops.hypot, BINARY, (nonzero,)),
    Line("deg2rad", ops.deg2rad, UNARY),
    Line("rad2deg", ops.rad2deg, UNARY),
    Line("sinc", ops.sinc, UNARY, (nonzero,)),
    Line("floor_divide", ops.floor_divide, BINARY, (apart, divisor), differentiable=False),
    Line("mod", ops.mod, BINARY, (apart, divisor)),
    Line("fmod", ops.fmod, BINARY, (apart, divisor)),
    Line("copysign", ops.copysign, BINARY, (nonzero,)),
    Line("sin", ops.sin, UNARY),
    Line("cos", ops.cos, UNARY),
    Line("tan", ops.tan, UNARY, (inside,)),
    Line("arcsin", ops.arcsin, UNARY, (inside,)),
    Line("arccos", ops.arccos, UNARY, (inside,)),
    Line("arctan", ops.arctan, UNARY),
    Line("sinh", ops.sinh, UNARY),
    Line("cosh", ops.cosh, UNARY),
    Line("tanh", ops.tanh, UNARY),
    Line("sigmoid", ops.sigmoid, UNARY, like=lambda x: 1 / (1 + np.exp(-x))),
    Line("softplus", ops.softplus, UNARY, like=lambda x: np.logaddexp(0, x)),
    Line("relu", ops.relu, UNARY, (nonzero,), like=lambda x: np.maximum(x, 0)),
    Line("silu", ops.silu, UNARY, like=lambda x: x / (1 + np.exp(-x))),
    Line("gelu", ops.gelu, UNARY, like=lambda x: x * (1 + np.vectorize(math.erf, otypes=[float])(x / 2**0.5)) / 2),
    Line("gelu_tanh", partial(ops.gelu, approximate=True), UNARY,
         like=lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
    Line("leaky_relu", ops.leaky_relu, [*BINARY, at((2, 3))], (nonzero, share),
         like=lambda x, slope=0.01: np.where(x > 0, x, slope * x)),
    Line("elu", ops.elu, [*BINARY, at((2, 3))], (nonzero, positive),
         like=lambda x, alpha=1.0: np.where(x > 0, x, alpha * np.expm1(x))),
    Line("selu", ops.selu, UNARY, (nonzero,),
         like=lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))),
    Line("mish", ops.mish, UNARY, like=lambda x: x * np.tanh(np.logaddexp(0, x))),
    Line("hard_swish", ops.hard_swish, UNARY, (apart,), like=lambda x: x * np.clip(x + 3, 0, 6) / 6),
    Line("softsign", ops.softsign, UNARY, (nonzero,), like=lambda x: x / (1 + np.abs(x))),
    Line("log_sigmoid", ops.log_sigmoid, UNARY, like=lambda x: -np.logaddexp(0, -x)),
    Line("step", ops.step, UNARY, (nonzero,), like=lambda x: np.where(x > 0, 1.0, 0.0)),
    Line("sign", ops.sign, UNARY, (nonzero,)),
    Line("abs", ops.abs, UNARY, (nonzero,)),
    Line("equal_mask", ops.equal_mask, BINARY, (apart,), like=lambda a, b: 1.0 * (a == b)),
    Line("maximum", ops.maximum, BINARY, (apart,)),
    Line("minimum", ops.minimum, BINARY, (apart,)),
    Line("clip", lambda x, a_min=None, a_max=None: ops.clip(x, a_min, a_max),
         [*TERNARY, at((3,), a_min=-0.5), at((2, 3), a_max=0.5)], (apart,),
         like=lambda x, a_min=None, a_max=None: np.clip(x, a_min, a_max)),
    Line("where", ops.where, TERNARY, (condition, anything, anything)),
    Line("less", ops.less, BINARY, differentiable=False),
    Line("less_equal", ops.less_equal, BINARY, differentiable=False),
    Line("greater", ops.greater, BINARY, differentiable=False),
    Line("greater_equal", ops.greater_equal, BINARY, differentiable=False),
    Line("equal", ops.equal, BINARY, differentiable=False),
    Line("not_equal", ops.not_equal, BINARY, differentiable=False),
    *(Line(name, getattr(ops, name), UNARY, differentiable=False)
      for name in ("floor", "ceil", "trunc", "round", "isnan", "isfinite", "isinf")),
    Line("logical_and", ops.logical_and, BINARY, (condition,), differentiable=False),
    Line("logical_or", ops.logical_or, BINARY, (condition, anything), differentiable=False),
    Line("logical_not", ops.logical_not, UNARY, (condition,), differentiable=False),
    Line("astype", lambda x: ops.astype(x, np.int64), UNARY, like=lambda x: x.astype(np.int64), differentiable=False),
    Line("stop_gradient", ops.stop_gradient, UNARY, like=lambda x: x, differentiable=False),
    Line("identity", ops.identity, UNARY, like=lambda x: x),
    Line("copy", ops.copy, UNARY),
    Line("sum", ops.sum, OVER_AXES + OVER_EMPTY),
    Line("mean", ops.mean, OVER_AXES),
    Line("var", ops.var, [*OVER_AXES, at((3, 4), axis=0, ddof=1)]),
    Line("std", ops.std, [at((3, 4)), at((3, 4), axis=1, keepdims=True), at((3, 2, 4), axis=(0, 1), ddof=1)], (apart,)),
    Line("norm", ops.norm, [at(()), at((4,)), at((2, 3), axis=0), at((2, 3), axis=1, keepdims=True)], (nonzero,)),
    Line("max", ops.max, OVER_AXES, (apart,)),
    Line("min", ops.min, OVER_AXES, (apart,)),
    Line("prod", ops.prod, [*OVER_AXES, *OVER_EMPTY, at((7, 2), axis=0)]),
    Line("any", ops.any, OVER_AXES + OVER_EMPTY, (condition,), differentiable=False),
    Line("all", ops.all, OVER_AXES + OVER_EMPTY, (condition,), differentiable=False),
    Line("argmax", ops.argmax, POSITIONS, (apart,), differentiable=False),
    Line("argmin", ops.argmin, POSITIONS, (apart,), differentiable=False),
    Line("logsumexp", ops.logsumexp, OVER_AXES, like=lambda x, **at: np.log(np.sum(np.exp(x), **at))),
    Line("softmax", ops.softmax, ALONG_AXES, like=softmax),
    Line("log_softmax", ops.log_softmax, ALONG_AXES, like=lambda x, axis=-1: np.log(softmax(x, axis))),
    Line("reciprocal_std", lambda x, axes: TABLE["reciprocal_std"](x, axes=axes, eps=0.1),
         [at((), axes=()), at((4,), axes=(0,)), at((2, 3), axes=(1,)), at((2, 3, 4), axes=(0, 2)),
          at((3, 1), axes=(1,)), at((0, 3), axes=(1,))],
         like=lambda x, axes: 1 / np.sqrt(np.var(x, axes, keepdims=True) + 0.1)),
    Line("standardize", ops.standardize,
         [at((4,)), at((2, 3), axis=0), at((2, 3, 4), axis=(0, 2)), at((2, 3), axis=None), at((3, 1), eps=0.5),
          at((0, 3), axis=1)], like=standardized),
    Line("layer_norm", ops.layer_norm,
         [at((2, 4), (4,), (4,)), at((3,)), at((2, 2, 3), (2, 3), (2, 3), axis=(1, 2)), at((2, 3, 4), (4,)),
          at((0, 3), (3,), (3,))],
         like=lambda x, w=1.0, b=0.0, axis=-1: standardized(x, axis) * w + b),
    Line("batch_norm", ops.batch_norm,
         [at((4, 2), (2,), (2,)), at((3, 2, 4)), at((2, 3, 2, 2), (3,), (3,)),
          at((3, 2, 2), (2,), (2,), (2,), (2,))], (anything, anything, anything, anything, positive),
         like=lambda x, w=1.0, b=0.0, mean=None, var=None: by_channel(b, x) + by_channel(w, x) * (
            standardized(x, (0, *range(2, x.ndim))) if mean is None
            else (x - by_channel(mean, x)) / np.sqrt(by_channel(var, x) + 1e-5))),
    Line("group_norm", lambda x, w, b, groups: ops.group_norm(x, groups, w, b),
         [at((2, 4), (4,), (4,), groups=2), at((1, 4, 3), (4,), (4,), groups=1), at((2, 2, 2, 2), (2,), (2,), groups=2),
          at((0, 2, 3), (2,), (2,), groups=1)],
         like=lambda x, w, b, groups: standardized(
            x.reshape(len(x), groups, math.prod(x.shape[1:]) // groups)).reshape(x.shape) * by_channel(w, x)
            + by_channel(b, x)),
    Line("scaled_dot_product_attention", ops.scaled_dot_product_attention,
         [at((2, 3), (4, 3), (4, 2)), at((2, 3, 4), (2, 3, 4), (2, 3, 4), causal=True), at((1, 1), (1, 1), (1, 1)),
          at((2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 3)), at((4, 2), (2, 2), (2, 3), causal=True),
          at((2, 4, 2), (2, 3, 2), (2, 3, 1), (4, 3)), at((2, 4, 2), (2, 4, 2), (2, 4, 1), (2, 4, 4), causal=True),
          at((0, 2), (3, 2), (3, 1))],
         (anything, anything, anything, condition), like=attended),
    Line("interpolate", ops.interpolate,
         [at((2, 1, 4), size=(6,)), at((1, 2, 5), size=(2,), mode="linear"), at((1, 1, 3), size=(3,)),
          at((1, 1, 2, 3), size=(4, 5), mode="linear"),
          at((1, 1, 2, 3), size=(4, 5), mode="linear", align_corners=True),
          at((1, 1, 4), size=(1,), mode="linear", align_corners=True), at((1, 1, 1), size=(3,), mode="linear"),
          at((1, 1, 2, 2, 3), size=(3, 1, 4), mode="linear"), at((0, 1, 3), size=(2,))], like=resized),
    Line("reshape", ops.reshape,
         [at((2, 3), shape=(3, 2)), at((4,), shape=(2, -1)), at((1,), shape=()), at((0, 2), shape=(4, 0))]),
    Line("ravel", ops.ravel, UNARY),
    Line("expand_dims", ops.expand_dims,
         [at((), axis=0), at((2, 3), axis=1), at((3,), axis=(0, -1)), at((0,), axis=0)]),
    Line("squeeze", ops.squeeze, [at((1, 3, 1)), at((1, 3, 1), axis=0), at((2, 1, 0), axis=-2), at((1, 1))]),
    Line("transpose", ops.transpose,
         [at(()), at((2, 3)), at((2, 3, 4), axes=(1, -1, 0)), at((2, 0, 1), axes=(2, 0, 1))]),
    Line("swapaxes", ops.swapaxes, [at((2, 3, 4), axis1=0, axis2=-1), at((1, 0), axis1=0, axis2=1)]),
    Line("moveaxis", ops.moveaxis,
         [at((2, 3, 4), source=0, destination=-1), at((2, 3, 4), source=(0, 1), destination=(2, 0))]),
    Line("broadcast_to", ops.broadcast_to,
         [at((3,), shape=(2, 3)), at((), shape=(2, 2)), at((2, 1), shape=(4, 2, 3)), at((1,), shape=(0,))]),
    Line("assemble", lambda *parts: ops.assemble(parts, PLACES, (3, 3)), [at((2, 3), (2, 1))],
         like=lambda a, b: np.pad(a, ((0, 1), (0, 0))) + np.pad(b, ((1, 0), (1, 1)))),
    Line("concatenate", lambda *parts, axis=0: ops.concatenate(parts, axis),
         [at((2, 3), (1, 3)), at((2, 3), (2, 1), (2, 0), axis=1), at((3,), (3,), axis=-1), at((0, 2), (0, 1), axis=1)],
         like=lambda *parts, axis=0: np.concatenate(parts, axis)),
    Line("stack", lambda *parts, axis=0: ops.stack(parts, axis),
         [at((), ()), at((2, 3), (2, 3), axis=1), at((3,), (3,), axis=-1), at((0,), (0,))],
         like=lambda *parts, axis=0: np.stack(parts, axis)),
    Line("pad", ops.pad,
         [at((2, 3), pad_width=1), at((2, 3), pad_width=((0, 1), (2, 0))), at((0,), pad_width=2),
          at((3,), pad_width=(1, 2), constant_values=4.0)]),
    Line("flip", ops.flip, [at(()), at((3,)), at((2, 3), axis=1), at((2, 0, 3), axis=(0, -1)), at((2, 3))]),
    Line("roll", ops.roll,
         [at((4,), shift=1), at((2, 3), shift=-2), at((2, 3), shift=2, axis=1), at((2, 3), shift=(1, 1), axis=(0, 1)),
          at((0, 2), shift=1, axis=0)]),
    Line("repeat", ops.repeat,
         [at((), repeats=2), at((3,), repeats=2), at((2, 3), repeats=2, axis=0), at((2, 3), repeats=(2, 0, 1), axis=-1),
          at((0, 2), repeats=3, axis=1), at((2,), repeats=0)]),
    Line("tile", ops.tile, [at((3,), reps=2), at((2, 3), reps=(2, 1)), at((3,), reps=(2, 1, 2)), at((0,), reps=2)]),
    Line("diagonal", ops.diagonal,
         [at((3, 3)), at((2, 4), offset=1), at((4, 2), offset=-2), at((2, 3, 2), axis1=2, axis2=0),
          at((2, 2), offset=5), at((0, 3))]),
    Line("trace", ops.trace, [at((3, 3)), at((2, 4), offset=1), at((2, 3, 2), axis1=2, axis2=0), at((0, 3))]),
    Line("diagflat", ops.diagflat, [at((3,)), at((2, 2), k=1), at((2,), k=-2), at((), k=1), at((0,), k=2)]),
    Line("tril", ops.tril, [at((3, 3)), at((2, 4), k=1), at((2, 3, 3), k=-1), at((3,)), at((0, 2))]),
    Line("triu", ops.triu, [at((3, 3)), at((2, 4), k=1), at((2, 3, 3), k=-1), at((3,)), at((0, 2))]),
    Line("take", lambda x, i, **at: ops.take(x, i, **at),
         [at((5,), (2, 3)), at((2, 5), (3,), axis=1), at((5, 2), (), axis=0), at((2, 5), (3,), mode="wrap")],
         (anything, below(5)), like=np.take),
    Line("take_along_axis", ops.take_along_axis, [at((5,), (4,), axis=0), at((2, 5), (2, 3), axis=1), 
         at((5, 2), (1, 2), axis=0), at((5, 0), (2, 0), axis=0)], (anything, below(5))),
    Line("cumsum", ops.cumsum,
         [at(()), at((4,)), at((2, 3)), at((2, 3), axis=0), at((2, 3, 2), axis=-1), at((0, 2), axis=0)]),
    Line("cumprod", ops.cumprod,
         [at(()), at((4,)), at((2, 3)), at((5, 2), axis=0), at((1, 7), axis=-1), at((0, 2), axis=0),
          at((2, 1), axis=1)]),
    Line("diff", ops.diff,
         [at((4,)), at((3, 4), axis=0), at((2, 4), n=2), at((3,), n=3), at((1, 2), axis=0), at((0,))]),
    Line("sort", ops.sort,
         [at((5,)), at((2, 3), axis=0), at((2, 3), axis=None), at((2, 1)), at((0, 2), axis=0)], (apart,)),
    Line("topk", lambda x, **given: ops.topk(x, **given)[0],
         [at((5,), k=2), at((2, 3), k=1, axis=0), at((2, 3), k=3), at((2, 1), k=1), at((2, 3), k=0), at((0, 2), k=2)],
         (apart,), like=lambda x, k, axis=-1: np.take(np.flip(np.sort(x, axis), axis), range(k), axis)),
    Line("argsort", ops.argsort, [at((5,)), at((2, 3), axis=0), at((2, 3), axis=None), at((0, 2), axis=0)], (apart,),
         differentiable=False),
    Line("searchsorted", ops.searchsorted,
         [at((5,), ()), at((4,), (2, 3)), at((0,), (2,)), at((1,), (3,), side="right")], (rising, anything),
         differentiable=False),
    Line("median", ops.median,
         [at((5,)), at((4,)), at((2, 3), axis=0), at((2, 3, 2), axis=(0, 2), keepdims=True), at((1, 1))], (apart,)),
    Line("quantile", ops.quantile,
         [at((5,), q=0.3), at((2, 3), q=np.array([0.1, 0.5], "f4"), axis=1), at((4, 2), q=0.7, axis=0, method="hazen"),
          at((2, 3), q=0.6, keepdims=True, method="nearest"), at((1,), q=0.2)], (apart,)),
    Line("kron", ops.kron, [at((2,), (3,)), at((2, 2), (1, 3)), at((2,), (2, 2)), at((), (3,)), at((0,), (2,))]),
    Line("cross", ops.cross, [at((3,), (3,)), at((2, 3), (3,)), at((3, 2), (3, 2), axis=0), at((0, 3), (0, 3))]),
    Line("solve", ops.solve, [at((3, 3), (3, 2)), at((2, 2), (2,)), at((2, 3, 3), (3, 1)), at((1, 1), (1, 1)),
         at((0, 0), (0, 2))], (dominant, anything)),
    Line("inv", ops.inv, [at((3, 3)), at((2, 2, 2)), at((1, 1)), at((0, 3, 3))], (dominant,)),
    Line("det", ops.det, [at((3, 3)), at((2, 2, 2)), at((1, 1)), at((0, 3, 3))], (dominant,)),
    Line("logabsdet", lambda x: np.linalg.slogdet(x).logabsdet, [at((3, 3)), at((2, 2, 2)), at((1, 1))], (dominant,),
         like=lambda x: np.linalg.slogdet(x)[1]),
    Line("detsign", TABLE["detsign"], [at((3, 3)), at((2, 2, 2))], (anything,), like=lambda x: np.linalg.slogdet(x)[0],
         differentiable=False),
    Line("cholesky", lambda x: ops.cholesky(positive_definite(x)), [at((3, 3)), at((2, 2, 2)), at((1, 1))],
         like=lambda x: np.linalg.cholesky(positive_definite(x))),
    Line("eigh", lambda x: squares(np.linalg.eigh(positive_definite(x)), 1), [at((3, 3)), at((2, 2, 2)), at((1, 1))],
         like=lambda x: squares(np.linalg.eigh(positive_definite(x)), 1)),
    Line("svd", lambda x: squares(thin_svd(x)), [at((3, 3)), at((2, 4, 3)), at((2, 3)), at((1, 1))], (dominant,),
         like=lambda x: squares(thin_svd(x))),
    Line("qr", lambda x: squares(np.linalg.qr(x)), [at((3, 3)), at((2, 4, 3)), at((2, 3)), at((1, 1))], (dominant,),
         like=lambda x: squares(np.linalg.qr(x))),
    Line("pinv", ops.pinv, [at((3, 3)), at((2, 4, 3)), at((2, 3)), at((1, 1))], (dominant,), like=np.linalg.pinv),
    Line("matrix_power", ops.matrix_power, [at((2, 2), n=3), at((2, 2, 2), n=-1), at((2, 2), n=0), at((1, 1), n=2)],
         (dominant,)),
    Line("getitem", lambda x: x[0, ..., None], [at((2, 3)), at((1, 0, 2)), at((3,))], like=lambda x: x[0, ..., None]),
    Line("slice", lambda x: x[-1, 1:, ::-2], [at((2, 3, 4)), at((1, 1, 3)), at((2, 2, 0))],
         like=lambda x: x[-1, 1:, ::-2]),
    Line("gather", lambda x, i: x[i], [at((5, 2), (4,)), at((5,), (2, 3)), at((5, 0), (2,)), at((5, 2), ())],
         (anything, below(5)), like=lambda x, i: x[i]),
    Line("scatter", lambda g, i, j: TABLE["scatter"](g, i, j, pattern=("array", "array"), shape=(5, 5)),
         [at((2, 3), (2, 1), (3,)), at((4,), (4,), (4,)), at((0,), (0,), (0,)), at((), (), ())],
         (anything, below(5)), like=scattered),
    Line("embedding", ops.embedding,
         [at((5, 2), (4,)), at((5, 3), (2, 3)), at((5, 4), (4, 2)), at((5, 2), (0, 3)), at((5, 2), ()),
          at((5, 1), (1,))],
         (anything, classes(5)), like=lambda x, i: x[i]),
    Line("embedding_gradient", partial(ops.embedding_gradient, vocabulary=5),
         [at((4, 2), (4,)), at((2, 9, 3), (2, 9)), at((70, 4), (70,)), at((0, 3, 2), (0, 3)), at((2,), ()),
          at((4, 2), (4,), padding_index=0), at((2, 3, 3), (2, 3), padding_index=4)],
         (anything, classes(5)), like=partial(looked_up, vocabulary=5)),
    Line("matmul", ops.matmul, MATRICES),
    Line("dot", ops.dot, DOTS),
    Line("outer", ops.outer, [at((2,), (3,)), at((2, 2), (3,)), at((), (2,)), at((0,), (2,))]),
    Line("tensordot", ops.tensordot,
         [at((2, 3, 4), (3, 4, 5)), at((2, 3), (3, 2), axes=1), at((2, 3), (4, 2), axes=((0,), (1,))),
          at((2, 3), (4,), axes=0), at((0, 3), (3, 2), axes=1)]),
    Line("einsum", lambda *x, subscripts: ops.einsum(subscripts, *x),
         [at((2, 3), (3, 4), subscripts="ij,jk"), at((3, 3), subscripts="ii->i"), at((1,), (0,), subscripts="i,i->i"),
          at((2, 3, 4), subscripts="...i->..."), at((1, 3), (2, 3), subscripts="ij,ij->j"),
          at((2, 3), (3,), (2,), subscripts="ij,j,i->"), at((0, 3), (3,), subscripts="ij,j->i")],
         like=lambda *x, subscripts: np.einsum(subscripts, *x)),
    Line("conv", ops.conv, CONVOLUTIONS, like=correlated),
    Line("conv_input_gradient", lambda g, weight, lengths, **at: TABLE["conv_input_gradient"](
            g, weight, lengths=lengths, **full(**at)),
         [at((2, 3, 3, 2), (3, 2, 2, 3), lengths=(4, 4)), at((1, 4, 2, 3), (4, 1, 2, 2), lengths=(4, 5), groups=2,
             stride=2, padding=((1, 0), (0, 1))), at((0, 1, 2, 2), (1, 1, 1, 1), lengths=(2, 2))],
         like=lambda g, weight, lengths, **at: pulled(correlated, 0)(
            g, weight, (len(g), weight.shape[1] * at.get("groups", 1), *lengths), **at)),
    Line("conv_weight_gradient", lambda g, x, kernel, **at: TABLE["conv_weight_gradient"](
            g, x, kernel=kernel, **full(**at)),
         [at((2, 3, 3, 2), (2, 2, 4, 4), kernel=(2, 3)), at((1, 4, 2, 3), (1, 2, 4, 5), kernel=(2, 2), groups=2,
             stride=2, padding=((1, 0), (0, 1))), at((0, 1, 2, 2), (0, 1, 2, 2), kernel=(1, 1))],
         like=lambda g, x, kernel, **at: pulled(correlated, 1)(
            g, x, (g.shape[1], x.shape[1] // at.get("groups", 1), *kernel), **at)),
    Line("conv_transpose", ops.conv_transpose,
         [at((1, 2, 3, 2), (2, 3, 2, 2)), at((0, 1, 2, 2), (1, 1, 1, 1)), at((1, 1, 1, 1), (1, 1, 1, 1)),
          at((2, 2, 2, 2), (2, 1, 3, 2), stride=2, output_padding=1, padding=((1, 0), (0, 1))),
          at((1, 2, 2, 1), (2, 1, 2, 2), groups=2, dilation=2)], like=transposed),
    Line("max_pool", ops.max_pool, POOLS, (apart,), like=pooled(np.max, -np.inf)),
    Line("avg_pool", ops.avg_pool, POOLS, like=pooled(np.mean, 0)),
    Line("max_pool_gradient", lambda g, x, window, stride=None: TABLE["max_pool_gradient"](
            g, x, ops.max_pool(x, window, stride), lengths=x.shape[2:], **spread(window, stride)),
         [at((2, 3, 2), (2, 3, 4), window=2), at((1, 2, 3), (1, 2, 5), window=3, stride=1),
          at((0, 1, 1), (0, 1, 3), window=2)], (anything, apart), like=first_winners),
    Line("max_pool_gather", lambda u, x, window, stride=None: TABLE["max_pool_gather"](
            u, x, ops.max_pool(x, window, stride), **spread(window, stride)),
         [at((2, 3, 4), (2, 3, 4), window=2), at((1, 2, 5), (1, 2, 5), window=3, stride=1),
          at((0, 1, 3), (0, 1, 3), window=2)], (anything, apart), like=picked),
    Line("avg_pool_gradient", lambda g, lengths, window, stride=None: TABLE["avg_pool_gradient"](
            g, lengths=lengths, **spread(window, stride)),
         [at((2, 3, 2), lengths=(5,), window=2), at((1, 2, 3), lengths=(5,), window=3, stride=1),
          at((0, 1, 1), lengths=(3,), window=2)],
         like=lambda g, lengths, **at: pulled(lambda x, _, **at: pooled(np.mean, 0)(x, **at), 0)(
            g, None, (*g.shape[:2], *lengths), **at)),
    Line("columns", partial(TABLE["columns"]), [at((2, 2, 3, 4), **FIELD), at((1, 1, 2, 2), **FIELD),
         at((0, 1, 3, 2), **FIELD)], differentiable=False, like=columns),
    Line("columns_gradient", lambda g, shape: TABLE["columns_gradient"](g, shape=shape, **FIELD),
         [at((8, 12), shape=(2, 2, 3, 4)), at((4, 2), shape=(1, 1, 2, 2)), at((4, 0), shape=(0, 1, 3, 2))],
         differentiable=False,
         like=lambda g, shape: pulled(lambda x, _: columns(x, **FIELD), 0)(g, None, shape)),
    Line("shifted_phases_gradient", lambda g, places, **at: TABLE["shifted_phases_gradient"](
            g, places=places, **at),
         [at((2, 2, 2, 2), places=7, kernel=3, samples=2, window=2, stride=2), at((2, 2, 1, 2), places=5, kernel=1,
             samples=1, window=2, stride=3), at((3, 2, 1, 2), places=9, kernel=2, samples=1, window=3, stride=3)],
         differentiable=False, like=lambda g, places, kernel, samples, **at: pulled(
            lambda z, _: shifted(z, kernel=kernel, samples=samples, **at), 0)(
            g, None, (kernel * g.shape[1], samples * places))),
    Line("sliding_phases", TABLE["sliding_phases"],
         [at((14, 2), (6, 2), kernel=3, samples=2, window=2, stride=2), at((5, 3), (2, 3), kernel=1, samples=1,
             window=2, stride=3), at((20, 1), (4, 1), kernel=2, samples=2, window=3, stride=3),
             at((22, 2), (9, 2), kernel=3, samples=2, window=2, stride=3)],
         differentiable=False, like=lambda rows, weight, **at: shifted(weight @ rows.T, **at)),
    Line("sum_of_products", TABLE["sum_of_products"],
         [at((2, 3, 4), (2, 3, 4), axes=(0, 2), keepdims=True), at((2, 3, 4), (2, 3, 4), axes=(1, 2), keepdims=False),
          at((1, 3, 1), (1, 3, 1), axes=(0, 2), keepdims=False), at((5,), (5,), axes=(0,), keepdims=True)],
         differentiable=False, like=lambda a, b, axes, keepdims: np.sum(a * b, axis=axes, keepdims=keepdims)),
    Line("biased_phases", TABLE["biased_phases"],
         [at((4, 3, 5), (3,)), at((1, 2, 3, 2), (2,)), at((2, 3, 0), (3,))],
         differentiable=False, like=lambda p, b: p + b.reshape(-1, *(1,) * (p.ndim - 2))),
    Line("phase_max", TABLE["phase_max"], [at((4, 3, 5)), at((1, 3)), at((2, 0, 3))], (apart,),
         differentiable=False, like=lambda p: np.max(p, axis=0)),
    Line("phase_max_gradient", lambda g, p: TABLE["phase_max_gradient"](g, p, TABLE["phase_max"](p)),
         [at((3, 5), (4, 3, 5)), at((3,), (1, 3)), at((0, 3), (2, 0, 3))], (anything, apart),
         differentiable=False, like=lambda g, p: g * (p == np.max(p, axis=0))),
    Line("words", partial(TABLE["words"], vocabulary=5), [at((2, 7)), at((1, 3)), at((0, 3))], (classes(5),),
         differentiable=False, like=lambda ids: np.concatenate([
            [len(np.unique(ids))], np.pad(np.unique(ids), (0, min(ids.size, 5) - len(np.unique(ids)))),
            np.unique(ids, return_inverse=True)[1].ravel()])),
    Line("word_sums", lambda g, p, ids, **at: TABLE["word_sums"](
            g, p, TABLE["phase_max"](p), TABLE["words"](ids, vocabulary=5), length=ids.shape[1], **at),
         [at((3, 2, 3), (2, 3, 2, 3), (2, 7), kernel=2, stride=2), at((1, 1, 1), (3, 1, 1, 1), (1, 4), kernel=1,
             stride=2)],
         (anything, apart, classes(5)), differentiable=False,
         like=lambda g, p, ids, **at: summed_by_word(g, p, ids, length=ids.shape[1], **at)),
    Line("word_kernel_gradient", by_word("word_kernel_gradient"),
         [at((5, 4), (5, 3), (2, 7)), at((2, 3), (5, 1), (1, 2))],
         (anything, anything, classes(5)), differentiable=False,
         like=lambda sums, weight, ids: sums[: len(np.unique(ids))].T @ weight[np.unique(ids)]),
    Line("word_gradient", partial(by_word("word_gradient"), vocabulary=5),
         [at((5, 4), (4, 3), (2, 7), padding_index=-1), at((2, 3), (3, 2), (1, 2), padding_index=1)],
         (anything, anything, classes(5)), differentiable=False, like=placed_by_word),
    Line("word_phases", partial(TABLE["word_phases"], padding_index=-1),
         [at((5, 3), (4, 3), (2, 7), places=2, window=2, stride=2), at((5, 1), (3, 1), (1, 5), places=1, window=2,
             stride=3)],
         (anything, anything, classes(5)), differentiable=False,
         like=lambda weight, kernel, ids, places, **at: shifted(
            kernel @ weight[ids].reshape(-1, weight.shape[1]).T, places, len(ids), **at)),
    Line("softmax_cross_entropy", ops.softmax_cross_entropy,
         [at((4, 3), (4,)), at((2, 3, 3), (2, 3)), at((3,), ())],  # of no rows: see test_losses
         (anything, classes(3)), like=lambda x, y: -np.sum(np.log(softmax(x)) * np.eye(3)[y]) / y.size),
    Line("softmax_cross_entropy of weights", ops.softmax_cross_entropy,
         [at((4, 3), (4,), (3,)), at((4, 3), (4,), label_smoothing=0.3), at((0, 3), (0,), reduction="none"),
          at((2, 3, 3), (2, 3), (3,), label_smoothing=0.2, reduction="sum"),
          at((5, 3), (5,), (3,), ignored=0, label_smoothing=1), at((4, 3), (4,), ignored=1, reduction="none")],
         (anything, in_turn(3), positive), like=weighted_entropy),
    Line("one_hot", partial(ops.one_hot, classes=3, dtype=np.int64),
         [at((4,)), at(()), at((2, 3), ignored=1), at((0,))], (classes(3),), differentiable=False,
         like=lambda y, ignored=None: np.eye(3, dtype=int)[y] * (y != ignored)[..., None]),
    Line("softmax_cross_entropy_gradient",
         lambda g, x, y: TABLE["softmax_cross_entropy_gradient"](g, x, ops.logsumexp(x, -1), y),
         [at((), (4, 3), (4,)), at((), (1, 3), (1,)), at((), (2, 3, 3), (2, 3)), at((), (0, 3), (0,))],
         (anything, anything, classes(3)), like=lambda g, x, y: (softmax(x) - np.eye(3)[y]) * g / max(y.size, 1)),
    Line("binary_cross_entropy", ops.binary_cross_entropy, [at((3,), (3,)), at((2, 3), (2, 3))], (anything, share),
         like=lambda x, t: np.mean(t * np.log1p(np.exp(-x)) + (1 - t) * np.log1p(np.exp(x)))),
    Line("mean_squared_error", ops.mean_squared_error, [at((), ()), at((2, 3), (2, 3))],
         like=lambda p, t: np.mean((p - t) ** 2)),
    Line("dropout_mask", lambda x: TABLE["dropout_mask"](x, rate=0.4, generator=np.random.default_rng(1)),
         [at((3, 4)), at((0,))], like=lambda x: (np.random.default_rng(1).random(x.shape, x.dtype) >= 0.4) / 0.6,
         differentiable=False, random=True),
    Line("dropout", lambda x: ops.dropout(x, 0.4, np.random.default_rng(1)), [at((3, 4)), at((0,))],
         like=lambda x: x * (np.random.default_rng(1).random(x.shape, x.dtype) >= 0.4) / 0.6, random=True),
]  # fmt: skip

DIFFERENTIABLE = [line for line in LINES if line.differentiable]


def examples(lines: Sequence[Line]) -> Any:
    """Let a test of one example try those of each line: one test for each line, since thousands take long to hand out.

    A failure names its example.
    """

    def of_lines(test: Callable[..., None]) -> Any:
        @wraps(test)
        def try_all(line: Line, **given: Any) -> None:
            for example in line.examples:
                try:
                    test(line=line, example=example, **given)
                except Exception as error:
                    error.add_note(f"in the example {line.name} {example}")
                    raise

        takes = inspect.signature(test)
        rest = [parameter for name, parameter in takes.parameters.items() if name != "example"]
        try_all.__signature__ = takes.replace(parameters=rest)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("line", lines, ids=[line.name for line in lines])(try_all)

    return of_lines


def test_every_op_of_the_table_has_a_line():
    assert set(TABLE) <= {line.name for line in LINES}


PUBLIC = {name: getattr(ops, name) for name in dir(ops) if not name.startswith("_")}


def test_every_public_function_has_a_line():
    assert len(PUBLIC) > 80
    assert set(PUBLIC) <= {line.name for line in LINES}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_is_a_documented_function_on_tensors(name):
    function = PUBLIC[name]
    if isinstance(function, Op):
        assert TABLE[name] is function and function.doc and not function.fused
        return
    assert inspect.isfunction(function) and function.__module__.startswith("py_engine.ad.ops.")
    assert inspect.getdoc(function) and function.__annotations__["return"] in ("Tensor", "tuple[Tensor, Tensor]")
    assert "Operand" in " ".join(function.__annotations__.values())


def test_the_public_functions_are_all_that_the_modules_define():
    """No list names them: an op or function written in one of the modules is there, and what it is made of is not."""
    assert {"sin", "stop_gradient", "sum", "logsumexp", "conv", "getitem", "dropout", "mean"} <= set(PUBLIC)
    hidden = {"TABLE", "Op", "SUM", "np", "partial", "elementary", "shape", "random", "as_tensor", "aligned", "Pairs"}
    assert not hidden & set(vars(ops))


# Values ---------------------------------------------------------------------------------------------------


def reference(line: Line) -> Callable[..., Any]:
    """What the op computes, on arrays."""
    if line.like is not None:
        return line.like
    for function, stand_in in NUMPY.items():
        if stand_in is line.call and callable(function):
            return function
    raise AssertionError(f"the line of {line.name} needs `like`: no numpy function has it as its stand-in")


@examples(LINES)
def test_values(line, example, rng):
    arrays = line.arrays(rng, example)
    expected = np.asarray(reference(line)(*arrays, **example.attrs))
    result = line.call(*map(Tensor, arrays), **example.attrs)
    assert result.data.shape == result.shape == expected.shape
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-14)


@examples(LINES)
def test_memory_layout_does_not_matter(line, example, rng):
    arrays = line.arrays(rng, example)
    expected = line.call(*map(Tensor, arrays), **example.attrs).numpy()
    scattered = [Tensor(spread_out(a)) for a in arrays]
    eager = line.call(*scattered, **example.attrs).numpy()
    captured = pe.compile(lambda: line.call(*scattered, **example.attrs))()
    np.testing.assert_allclose(eager, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(captured, expected, rtol=1e-12, atol=1e-14)


def spread_out(array: np.ndarray) -> np.ndarray:
    """The same values, last axis slowest, backwards and with gaps between the elements."""
    room = np.zeros([2 * n for n in array.shape[::-1]], array.dtype).T
    view = room[(*(slice(None, None, -2) for _ in array.shape), ...)]
    view[...] = array
    return view


# Gradients ------------------------------------------------------------------------------------------------


@examples(DIFFERENTIABLE)
def test_gradient(line, example, rng, seed):
    gradcheck(partial(line.call, **example.attrs), *line.arrays(rng, example), seed=seed % 1000)


@examples(DIFFERENTIABLE)
def test_gradient_of_the_gradient(line, example, rng, seed):
    arrays = line.arrays(rng, example)
    shape = line.call(*arrays, **example.attrs).shape

    def pullback(weights, *operands):
        y = line.call(*operands, **example.attrs)
        found = gradients([y], [weights], [x for x in operands if x.requires_grad])
        return ops.concatenate([ops.ravel(g) for g in found if g is not None])

    gradcheck(pullback, rng.standard_normal(shape), *arrays, seed=seed % 1000)


def has_rule(op, i):
    """Whether input `i` has its own derivative."""
    return op.vjp is not None and not (isinstance(op.vjp, tuple) and op.vjp[i] is no_gradient)


def pulled_back(op, i, g, node):
    """The gradient by input `i`, which is the only one that is computed."""
    found = op.pull([g], [k == i for k in range(len(node.inputs))], node)
    assert len(found) == len(node.inputs)
    assert all(part is None for k, part in enumerate(found) if k != i), f"{op.name} computes what nobody needs"
    return found[i]


def recorded_nodes(line, example, rng):
    """Every op application of the example and of its gradient, recorded eagerly."""
    arrays = line.arrays(rng, example)
    operands = [Tensor(a, requires_grad=a.dtype in FLOATS) for a in arrays]
    y = line.call(*operands, **example.attrs)
    outputs = [y]
    if line.differentiable:
        seed = Tensor(rng.standard_normal(y.shape), requires_grad=True)
        outputs += [g for g in gradients([y], [seed], operands) if g is not None]
    return [node for node in pe.topological_sort(outputs) if node.op is not None and not node.op.several]


@examples(DIFFERENTIABLE)
def test_jvp_is_the_transpose_of_vjp(line, example, rng):
    for node in recorded_nodes(line, example, rng):
        if not node.op.vjp is not None:
            continue
        seed = Tensor(rng.standard_normal(node.shape))
        moving = [i for i, x in enumerate(node.inputs) if x.dtype in FLOATS and has_rule(node.op, i)]
        together = node.op.pull([seed], [i in moving for i in range(len(node.inputs))], node)
        for only in [moving, *([i] for i in moving)]:
            tangents = [Tensor(rng.standard_normal(x.shape)) if i in only else None for i, x in enumerate(node.inputs)]
            forward = node.op.jvp(tangents, node, *node.inputs, **node.attrs)
            assert forward.dtype == node.dtype
            there = np.sum(seed.numpy() * np.broadcast_to(forward.numpy(), node.shape))
            back = 0.0
            for i in only:
                pulled = pulled_back(node.op, i, seed, node)
                np.testing.assert_array_equal(pulled.numpy(), together[i].numpy(), err_msg=node.op.name)
                assert pulled.dtype == node.inputs[i].dtype
                back += np.sum(pulled.numpy() * tangents[i].numpy())  # the tangent broadcasts as the input did
            np.testing.assert_allclose(there, back, rtol=1e-10, atol=1e-12, err_msg=node.op.name)


@examples(DIFFERENTIABLE)
def test_many_tangents_at_once_are_the_same_as_one_after_the_other(line, example, rng):
    for node in recorded_nodes(line, example, rng):
        if not node.op.vjp is not None or node.op.opaque:
            continue
        moving = [i for i, x in enumerate(node.inputs) if x.dtype in FLOATS and has_rule(node.op, i)]
        for only in [moving, *([i] for i in moving)]:
            inputs = [Tensor(x.numpy(), requires_grad=i in only) for i, x in enumerate(node.inputs)]
            y = node.op.apply(tuple(inputs), node.attrs)
            variables = [inputs[i] for i in only]
            moves = [Tensor(rng.standard_normal((3, *x.shape))) for x in variables]

            def pushed(*tangents, y=y, variables=variables):
                return push_forward([y], dict(zip(variables, tangents, strict=True)))[0]

            together = pe.vmap(pushed)(*moves)
            for k in range(3):
                alone = pushed(*[Tensor(np.asarray(t.numpy()[k])) for t in moves])
                assert together.shape == (3, *y.shape) and alone.shape == y.shape and together.dtype == y.dtype
                np.testing.assert_allclose(
                    together.numpy()[k], alone.numpy(), rtol=1e-10, atol=1e-12, err_msg=node.op.name
                )


SEVERAL = [line for line in DIFFERENTIABLE if line.name in TABLE and TABLE[line.name].several]


@examples(SEVERAL)
def test_jvp_is_the_transpose_of_vjp_with_several_results(line, example, rng):
    (x,) = line.arrays(rng, example)
    y, pull = pe.vjp(line.call, x)
    weights, move = rng.standard_normal(y.shape), rng.standard_normal(x.shape)
    (_, forward), (back,) = pe.jvp(line.call, (x,), (move,)), pull(weights)
    np.testing.assert_allclose(np.sum(weights * forward), np.sum(back * move), rtol=1e-9)


# A wrong factor changes nothing where the derivative is 0, and the runtime assembles gradients of slices by itself.
WITHOUT_FACTOR = {"copysign", "step", "sign", "equal_mask", "slice"}
WRONG = [line for line in DIFFERENTIABLE if line.name in TABLE and line.name not in WITHOUT_FACTOR]


@pytest.mark.parametrize("line", WRONG, ids=lambda line: line.name)
def test_a_rule_wrong_by_a_thousandth_is_caught(line, rng, seed):
    op = TABLE[line.name]
    operands = line.arrays(rng, line.examples[0])
    count = len(op.vjp) if isinstance(op.vjp, tuple) else len(operands)
    for i in range(count):
        if not has_rule(op, i) or (i < len(operands) and operands[i].dtype not in FLOATS):
            continue
        with rule_made_wrong(op, i), pytest.raises(GradientCheckError):
            for example in line.examples:
                gradcheck(partial(line.call, **example.attrs), *line.arrays(rng, example), seed=seed % 1000)


@contextmanager
def rule_made_wrong(op, i):
    right = op.pull

    def wrong(cotangents, needs_grad, node):
        found = [*right(cotangents, needs_grad, node)]
        return [1.001 * g if k == i and g is not None else g for k, g in enumerate(found)]

    object.__setattr__(op, "pull", wrong)
    try:
        yield
    finally:
        object.__setattr__(op, "pull", right)


# Kinds of numbers -----------------------------------------------------------------------------------------


@examples(LINES)
def test_float32_stays_float32(line, example, rng):
    wide = line.arrays(rng, example)
    narrow = [a.astype(np.float32) if a.dtype == np.float64 else a for a in wide]
    floats = [i for i, a in enumerate(narrow) if a.dtype == np.float32]
    exact = line.call(*map(Tensor, wide), **example.attrs)
    weights = rng.standard_normal(exact.shape)
    comparable = exact.dtype == np.float64 and not line.random

    def outputs(weights, *operands):
        y = line.call(*operands, **example.attrs)
        found = gradients([y], [weights], [operands[i] for i in floats]) if line.differentiable else []
        return [y] + [g for g in found if g is not None]

    def run(arrays, weights):
        return outputs(Tensor(weights), *(Tensor(a, requires_grad=i in floats) for i, a in enumerate(arrays)))

    expected = [x.numpy() for x in run(wide, weights)]
    eager = [x.numpy() for x in run(narrow, weights.astype(np.float32))]
    compiled = pe.compile(outputs)(weights.astype(np.float32), *narrow)
    for results in (eager, compiled):
        for result, value in zip(results, expected, strict=True):
            assert result.dtype == (np.float32 if value.dtype == np.float64 else value.dtype)
            if comparable:
                np.testing.assert_allclose(result, value, rtol=2e-4, atol=2e-5)


# Compiled -------------------------------------------------------------------------------------------------


@examples(LINES)
def test_compiled_is_eager(line, example, rng):
    arrays = line.arrays(rng, example)
    floats = tuple(i for i, a in enumerate(arrays) if a.dtype == np.float64)
    weights = rng.standard_normal(line.call(*arrays, **example.attrs).shape)

    def weighted(*operands):
        return ops.sum(weights * line.call(*operands, **example.attrs))

    plain = partial(line.call, **example.attrs)
    function = pe.value_and_grad(weighted, floats) if line.differentiable else plain
    eager = flat(function(*arrays))
    compiled = pe.compile(function)
    for result, expected in zip(flat(compiled(*arrays)), eager, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)
    if line.random:
        return
    ((tape, _),) = compiled.tapes.values()
    after = []
    for byte in (0x00, 0xFF):
        tape.poison(byte)
        after.append([np.array(out) for out in tape(*arrays)])
    for zeros, ones, expected in zip(*after, eager, strict=True):
        np.testing.assert_array_equal(zeros, ones)
        np.testing.assert_allclose(zeros, expected, rtol=1e-12, atol=1e-13)


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, tuple):
        return [array for item in value for array in flat(item)]
    return [value.numpy() if isinstance(value, Tensor) else np.asarray(value)]


# What a record promises -----------------------------------------------------------------------------------


@examples(LINES)
def test_overwriting_is_safe_where_the_record_allows_it(line, example, rng):
    for node in recorded_nodes(line, example, rng):
        for i in node.op.overwrites:
            if i < len(node.inputs) and node.inputs[i].shape == node.shape and node.inputs[i].dtype == node.dtype:
                arrays = [np.array(x.numpy()) for x in node.inputs]
                for call in node.op.calls(arrays, [arrays[i]], np.empty, node.attrs):
                    call()
                np.testing.assert_array_equal(arrays[i], node.numpy(), err_msg=f"{node.op.name} over input {i}")


@examples(LINES)
def test_a_call_is_a_function_and_its_operands(line, example, rng):
    """No array is hidden in a closure or a method: a replay gives a call other arrays by its operands alone."""
    for node in recorded_nodes(line, example, rng):
        if node.op.view is None and not node.op.several:
            out = np.empty(node.shape, node.dtype)
            for call in node.op.calls([np.array(x.numpy()) for x in node.inputs], [out], np.empty, node.attrs):
                assert type(call) is partial, node.op.name
                hidden = [cell.cell_contents for cell in getattr(call.func, "__closure__", None) or ()]
                hidden.append(getattr(call.func, "__self__", None))
                assert not any(isinstance(value, (np.ndarray, Tensor)) for value in hidden), node.op.name


@examples(DIFFERENTIABLE)
def test_what_the_rules_read_is_the_same_whatever_shapes_and_attributes(line, example, rng):
    for node in recorded_nodes(line, example, rng):
        if not node.op.opaque:
            differentiated = tuple(x.requires_grad for x in node.inputs)
            read = node.op.operands_read(node.inputs, node.attrs, differentiated)
            key = True if len(differentiated) == 1 else differentiated
            assert set(read) <= set(node.op.reads.setdefault(key, read)), node.op.name


def test_records_are_complete():
    for op in TABLE.values():
        assert op.doc, f"{op.name} needs a line for the op reference"
        assert sum(way is not None for way in (op.kernel, op.bind, op.view)) >= 1, op.name
        assert (op.jvp is None) == (op.vjp is None), f"{op.name} has one of vjp and jvp, but not both"


# An op is one row and one line ------------------------------------------------------------------------------


def cube_times(a, b, out=None):
    y = a * a * a * b  # before `out` is written, whose memory may be an operand's
    return y if out is None else np.copyto(out, y)


@pytest.fixture
def new():
    """An op that the table does not have, for one test: its row, and its line."""
    before = set(TABLE)
    row = elementwise(
        "cube_times", cube_times, lambda y, a, b: 3 * a * a * b, lambda y, a, b: a * a * a, doc="a³ b",
        scalar="{0} * {0} * {0} * {1}",
    )  # fmt: skip
    yield Line("cube_times", row, BINARY, like=cube_times)
    del TABLE["cube_times"]
    assert set(TABLE) == before


GENERIC = [
    test_values, test_memory_layout_does_not_matter, test_gradient, test_gradient_of_the_gradient,
    test_jvp_is_the_transpose_of_vjp, test_many_tangents_at_once_are_the_same_as_one_after_the_other,
    test_float32_stays_float32, test_compiled_is_eager, test_overwriting_is_safe_where_the_record_allows_it,
    test_a_call_is_a_function_and_its_operands, test_what_the_rules_read_is_the_same_whatever_shapes_and_attributes,
]  # fmt: skip
A, B = np.array([[0.5], [-1.5]]), np.array([2.0, 3.0, -0.5])


@pytest.mark.parametrize("check", [*GENERIC, test_a_rule_wrong_by_a_thousandth_is_caught], ids=lambda f: f.__name__)
def test_the_checks_of_all_ops_hold_for_a_new_one(check, new, rng, seed):
    given = {"rng": rng, "seed": seed}
    takes = inspect.signature(check).parameters
    check(**{name: {"line": new, **given}[name] for name in takes})


def summed(f):
    return lambda a, b: np.sum(f(a, b))


EVERYWHERE = {
    "numbers": lambda f: (f(1.5, 2.0), 6.75),
    "arrays and tensors": lambda f: (f(Tensor(A), B), A**3 * B),
    "float32": lambda f: (f(np.float32(A), np.float32(B)), np.float32(A**3 * B)),
    "compile": lambda f: (pe.compile(f)(A, B), A**3 * B),
    "grad": lambda f: (pe.grad(summed(f))(A, B), 3 * A**2 * B.sum()),
    "by the other input": lambda f: (pe.grad(summed(f), 1)(A, B), np.full(3, (A**3).sum())),
    "compiled grad": lambda f: (pe.compile(pe.grad(summed(f)))(A, B), 3 * A**2 * B.sum()),
    "grad of grad": lambda f: (
        pe.grad(lambda a: np.sum(pe.grad(summed(f))(a, B)))(A), 6 * A * B.sum()
    ),
    "jvp": lambda f: (pe.jvp(f, (A, B), (A, B))[1], 4 * A**3 * B),
    "jacobian, many tangents at once": lambda f: (
        pe.jacobian(lambda b: f(A, b), B, mode="forward"), A[:, :, None] ** 3 * np.eye(3)[None]
    ),
    "hessian": lambda f: (pe.hessian(lambda b: np.sum(f(b, B)), B), np.diag(6 * B * B)),
    "hvp": lambda f: (pe.hvp(lambda b: np.sum(f(b, B)), B, B), 6 * B**3),
    "the body of a scan": lambda f: (
        pe.grad(lambda b: pe.scan(lambda c, x: (c + f(x, 2.0), None), 0.0, b)[0])(B), 6 * B**2
    ),
    "checkpoint": lambda f: (pe.grad(pe.checkpoint(summed(f)))(A, B), 3 * A**2 * B.sum()),
}  # fmt: skip


@pytest.mark.parametrize("use", EVERYWHERE)
def test_a_new_op_works_everywhere(use, new):
    found, expected = EVERYWHERE[use](new.call)
    found = found.numpy() if isinstance(found, Tensor) else np.asarray(found)
    np.testing.assert_allclose(found, expected, rtol=1e-6 if found.dtype == np.float32 else 1e-12)
    assert found.dtype == np.asarray(expected).dtype


def test_a_new_op_is_straight_line_code_on_single_numbers(new):
    compiled = pe.compile(pe.value_and_grad(new.call))
    assert compiled(1.5, 2.0) == (6.75, 13.5)
    assert compiled.source.splitlines()[1].startswith("def replay(") and "cube_times" not in compiled.source


def test_a_new_op_has_the_errors_of_all_others(new):
    message = r"cube_times in layer 'here': shapes \(2,\) and \(3,\) cannot be broadcast"
    with pytest.raises(ShapeError, match=message), pe.scope("here"):
        new.call(np.ones(2), np.ones(3))
    with pytest.raises(DTypeError, match="cube_times: operands of float32 and float64 cannot be mixed"):
        new.call(np.float32(A), B)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("a", "b", "share"),
    [(np.inf, 1, 1), (1, np.inf, 0), (-np.inf, 1, 0), (-np.inf, -np.inf, 0), (-np.inf, np.inf, 0), (800, -800, 1)],
)
def test_an_infinite_term_of_logaddexp_has_the_whole_derivative(a, b, share):
    for dtype in (np.float32, np.float64):
        x, y = np.array([a], dtype), np.array([b], dtype)
        for grad in (pe.grad, lambda f, *by: pe.compile(pe.grad(f, *by))):
            assert grad(lambda x, y: np.sum(np.logaddexp(x, y)))(x, y) == share
            assert grad(lambda x, y: np.sum(np.logaddexp(x, y)), 1)(y, x) == share
        assert pe.jvp(lambda x: np.logaddexp(x, y), (x,), (np.ones_like(x),))[1] == share  # noqa: B023
