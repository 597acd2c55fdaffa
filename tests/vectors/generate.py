"""Test vectors that both engines replay: operands, upstream gradient, result and gradients of every op and function.

    python tests/vectors/generate.py        writes `index.tsv` and `values.bin` beside this file

No engine takes part: results are numpy formulas in extended precision, and gradients are their central differences of
eighth order, good to about 15 digits.  Where a function has a kink, the convention that both engines follow is
written out as a formula.  All operands are numbers that float32 holds exactly, so that one file serves both precisions.

`values.bin` holds elements of eight bytes, little-endian, in C order; `index.tsv` has one line per call:

    name  attributes  operands  upstream  result  gradients

Attributes are `key=value;key=value`; arrays are `dtype:shape:offset`, separated by `;`, with the offset in bytes and
dtype float64, int64 or bool (stored as int64).  Without a gradient there is `-`.  An index is written as one item
per axis, `position` or `start:count:step`, or `new`; places (of `assemble`) are indices separated by `|`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
HEADER = ("name", "attributes", "operands", "upstream", "result", "gradients")
EXACT = np.longdouble
"""Extended precision: 64 bits of mantissa on x86-64, 113 on most others."""

PI = EXACT("3.14159265358979323846264338327950288")
SEED = 20
Array = np.ndarray
Gradient = Callable[..., Sequence["Array | None"]]


# Cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: of the op or the function.
        reference: what it computes, on arrays of any precision, with the attributes as keywords.
        shapes: of the operands.
        domains: of each operand; the last one serves those that follow.
        attributes: the other arguments.
        differentiable: whether there are gradients.
        gradient: the convention at kinks, as a function of the upstream gradient and the operands.
    """

    name: str
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    domains: tuple[Callable[..., Any], ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    differentiable: bool = True
    gradient: Gradient | None = None

    def draw(self, rng: np.random.Generator) -> list[Array]:
        drawn = []
        for k, shape in enumerate(self.shapes):
            array = np.asarray(self.domains[min(k, len(self.domains) - 1)](rng, shape, k))
            drawn.append(short(array) if array.dtype == np.float64 else array)
        return drawn


def short(array: Array) -> Array:
    """The nearest numbers that float32 holds."""
    return array.astype(np.float32).astype(np.float64)


def anything(rng, shape, k):
    return rng.standard_normal(shape)


def positive(rng, shape, k):
    return rng.uniform(0.5, 2, shape)


def above_one(rng, shape, k):
    return rng.uniform(1.2, 3, shape)


def divisor(rng, shape, k):
    """Numbers that what `apart` draws first is no multiple of, nearly."""
    return rng.choice([0.8, 2.0, -1.2], shape)


def nonzero(rng, shape, k):
    return rng.uniform(0.5, 2, shape) * rng.choice([-1.0, 1.0], shape)


def inside(rng, shape, k):
    return rng.uniform(-0.7, 0.7, shape)


def between_poles(rng, shape, k):
    """Below 0, and apart from whole numbers."""
    return -rng.integers(0, 40, shape) - rng.uniform(0.2, 0.8, shape)


def share(rng, shape, k):
    return rng.uniform(0.1, 0.9, shape)


def apart(rng, shape, k):
    """No two elements, of this operand or of another one drawn so, close to each other or to 0."""
    n = int(np.prod(shape))
    return ((rng.permutation(n) - n // 2) * 0.4 + 0.1 * (k + 1) + rng.uniform(0, 0.05, n)).reshape(shape)


def ties(rng, shape, k):
    return rng.choice([-1.0, 0.0, 2.0], shape)


def equals(rng, shape, k):
    return np.full(shape, 1.5)


def origin(rng, shape, k):
    return np.zeros(shape)


def condition(rng, shape, k):
    return rng.random(shape) < 0.5


def below(n):
    return lambda rng, shape, k: rng.integers(0, n, shape)


def fixed(*values):
    return lambda rng, shape, k: np.asarray(values, np.float64).reshape(shape)


extreme = fixed(-200, -30, 0.5, 199, 200)
"""Beyond what float32's exponential, or float64's, can be taken of naively; extended precision reaches to 11,000."""


# References: formulas that hold in any precision -------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def logsumexp(x, axis=None, keepdims=False):
    return np.log(np.sum(np.exp(x), axis, keepdims=keepdims))


def softmax(x, axis=-1):
    return np.exp(x) / np.sum(np.exp(x), axis, keepdims=True)


def log_softmax(x, axis=-1):
    return np.log(softmax(x, axis))


def norm(x, axis=None, keepdims=False):
    return np.sqrt(np.sum(x * x, axis, keepdims=keepdims))


def one_hot(labels, classes, like):
    return np.eye(classes, dtype=like.dtype)[labels]


def cross_entropy(x, labels):
    return -np.sum(np.log(softmax(x)) * one_hot(labels, x.shape[-1], x)) / labels.size


def cross_entropy_gradient(g, x, labels):
    return (softmax(x) - one_hot(labels, x.shape[-1], x)) * g / max(labels.size, 1)


def binary_cross_entropy(x, t):
    return np.mean(-t * np.log(sigmoid(x)) - (1 - t) * np.log(sigmoid(-x)))


def scattered(g, i, shape):
    total = np.zeros(shape, g.dtype)
    np.add.at(total, i, g)
    return total


def index_of(text: str) -> tuple[Any, ...]:
    """The index that its items, as they are in the file, mean to numpy."""
    return tuple(_item(item) for item in text.split(",")) if text else ()


def _item(text: str) -> Any:
    if text == "new":
        return None
    if ":" not in text:
        return int(text)
    start, count, step = map(int, text.split(":"))
    stop = start + count * step
    return slice(start, None if stop < 0 and count else max(stop, 0) if count else start, step)


def assembled(*parts, places, shape):
    total = np.zeros(shape, parts[0].dtype)
    for part, place in zip(parts, places.split("|"), strict=True):
        total[index_of(place)] += part
    return total


def padded(x, pad_width, constant_values=0.0):
    return np.pad(x, np.reshape(pad_width, (-1, 2)), constant_values=constant_values)


def moved(x, source, destination):
    return np.moveaxis(x, source, destination)


def tensordot(a, b, axes_a, axes_b):
    return np.tensordot(a, b, (axes_a, axes_b))


def numbers(value, count):
    return np.broadcast_to(value, (count,))


def windows(x, sizes, stride, padding, dilation, fill):
    """For each window of x (N, C, lengths), its place among the outputs and its elements (N, C, sizes)."""
    axes = len(sizes)
    stride, dilation = numbers(stride, axes), numbers(dilation, axes)
    pairs = np.reshape(padding, (-1, 2)) if np.ndim(padding) else np.full((axes, 2), padding)
    x = np.pad(x, [(0, 0), (0, 0), *pairs], constant_values=fill)
    reach = (np.asarray(sizes) - 1) * dilation + 1
    counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    for place in np.ndindex(*counts):
        at = (slice(p * s, p * s + r, d) for p, s, r, d in zip(place, stride, reach, dilation, strict=True))
        yield place, x[(slice(None), slice(None), *at)]


def convolved(x, weight, stride=1, padding=0, dilation=1, groups=1):
    """Cross-correlation: the kernel is not turned round."""
    found = {}
    per_group, filters = weight.shape[1], len(weight) // groups
    for place, window in windows(x, weight.shape[2:], stride, padding, dilation, 0):
        sums = [
            np.sum(window[:, f // filters * per_group :][:, :per_group] * weight[f], tuple(range(1, window.ndim)))
            for f in range(len(weight))
        ]
        found[place] = np.stack(sums, axis=1)
    return gathered(found, (len(x), len(weight)))


def gathered(found, first):
    """Results (N, C) by their places, as one array (N, C, places)."""
    counts = [max(p[k] for p in found) + 1 for k in range(len(next(iter(found))))]
    return np.stack(list(found.values()), axis=-1).reshape(*first, *counts)


def transposed(function, place):
    """The transpose of a linear function by its operand at `place`: its products with every unit array."""

    def gradient(g, *others, shape, **attributes):
        total = np.zeros(shape, g.dtype)
        for at in np.ndindex(*shape):
            unit = np.zeros(shape, g.dtype)
            unit[at] = 1
            total[at] = np.sum(g * function(*others[:place], unit, *others[place:], **attributes))
        return total

    return gradient


def max_pooled(x, window, stride=None, padding=0):
    found = {
        place: np.max(w, tuple(range(2, w.ndim)))
        for place, w in windows(x, window, window if stride is None else stride, padding, 1, -np.inf)
    }
    return gathered(found, x.shape[:2])  # fmt: skip


def avg_pooled(x, window, stride=None, padding=0):
    found = {
        place: np.mean(w, tuple(range(2, w.ndim)))
        for place, w in windows(x, window, window if stride is None else stride, padding, 1, 0)
    }
    return gathered(found, x.shape[:2])  # fmt: skip


def max_picked(u, x, window, stride=None, padding=0):
    """The elements of `u` at the places of the maxima of `x`, of equal ones the first."""
    stride = window if stride is None else stride
    found = {}
    pairs = zip(windows(x, window, stride, padding, 1, -np.inf), windows(u, window, stride, padding, 1, 0), strict=True)
    for (place, w), (_, values) in pairs:
        first = np.argmax(w.reshape(*x.shape[:2], np.prod(window)), axis=-1)[..., np.newaxis]
        found[place] = np.take_along_axis(values.reshape(*x.shape[:2], np.prod(window)), first, axis=-1)[..., 0]
    return gathered(found, x.shape[:2])


def max_pool_gradient(g, x, **attributes):
    return transposed(max_picked, 0)(g, x, shape=x.shape, **attributes)


# Special functions, in extended precision -----------------------------------------------------------------------


def erf(x):
    """The power series of erf, whose terms no longer count after the hundredth for |x| < 3."""
    total, term = np.zeros_like(x), x
    for k in range(100):
        total = total + term / (2 * k + 1)
        term = -term * x * x / (k + 1)
    return total * 2 / np.sqrt(PI)


def far_erfc(x):
    """The continued fraction of erfc, for x > 2."""
    found = np.ones_like(x)
    for k in range(200, 0, -1):
        found = 1 + k / (2 * x * x) / found
    return np.exp(-x * x) / (x * np.sqrt(PI) * found)


BERNOULLI = [
    EXACT(p) / q for p, q in ((1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6), (-3617, 510))
]


def polygamma(x, n):
    """Derivative `n` of digamma, from the asymptotic series beyond 60."""
    shift = sum((x + j) ** -(n + 1) for j in range(60))
    x = x + 60
    if n == 0:
        found = np.log(x) - 1 / (2 * x) - sum(b / (2 * k * x ** (2 * k)) for k, b in enumerate(BERNOULLI, 1))
        return found - shift
    found = EXACT(math.factorial(n - 1)) / x**n + EXACT(math.factorial(n)) / (2 * x ** (n + 1))
    for k, b in enumerate(BERNOULLI, 1):
        found = found + b * math.factorial(2 * k + n - 1) / math.factorial(2 * k) / x ** (2 * k + n)
    return (-1) ** (n + 1) * (found + math.factorial(n) * shift)


def gammaln(x):
    """log |Γ| for x > -50, from Stirling's series beyond 60."""
    product = sum(np.log(np.abs(x + j)) for j in range(60))
    x = x + 60
    series = sum(b / (2 * k * (2 * k - 1) * x ** (2 * k - 1)) for k, b in enumerate(BERNOULLI, 1))
    return (x - EXACT(1) / 2) * np.log(x) - x + np.log(2 * PI) / 2 + series - product


# Matrices, in extended precision, which numpy's own functions for them do not have ------------------------------


def solved(a, b):
    """Gaussian elimination, with the largest element of each column."""
    rows = np.concatenate([a, b], axis=1)
    n = len(a)
    for k in range(n):
        largest = k + np.argmax(np.abs(rows[k:, k]))
        rows[[k, largest]] = rows[[largest, k]]
        rows[k] = rows[k] / rows[k, k]
        for i in range(n):
            if i != k:
                rows[i] = rows[i] - rows[i, k] * rows[k]
    return rows[:, n:]


def inverse(x):
    return solved(x, np.eye(len(x), dtype=x.dtype))


def determinant(x):
    if len(x) == 1:
        return x[0, 0]
    return sum((-1) ** j * x[0, j] * determinant(np.delete(x[1:], j, axis=1)) for j in range(len(x)))


def repeated_product(x, n):
    return reduce(np.matmul, [inverse(x) if n < 0 else x] * abs(n), np.eye(len(x), dtype=x.dtype))


def positive_definite(x):
    return np.matmul(x, x.T) + np.diag(np.arange(1, len(x) + 1)).astype(x.dtype)


def cholesky(x):
    a = positive_definite(x)
    found = np.zeros_like(a)
    for j in range(len(a)):
        found[j, j] = np.sqrt(a[j, j] - np.sum(found[j, :j] ** 2))
        for i in range(j + 1, len(a)):
            found[i, j] = (a[i, j] - np.sum(found[i, :j] * found[j, :j])) / found[j, j]
    return found


def jacobi(a):
    """Eigenvalues, rising, and eigenvectors of a symmetric matrix, by Jacobi's rotations."""
    n = len(a)
    vectors = np.eye(n, dtype=a.dtype)
    for _ in range(12):
        for p in range(n):
            for q in range(p + 1, n):
                angle = np.arctan2(2 * a[p, q], a[q, q] - a[p, p]) / 2
                turn = np.eye(n, dtype=a.dtype)
                turn[p, p] = turn[q, q] = np.cos(angle)
                turn[p, q], turn[q, p] = np.sin(angle), -np.sin(angle)
                a, vectors = np.matmul(turn.T, np.matmul(a, turn)), np.matmul(vectors, turn)
    order = np.argsort(np.diag(a))
    return np.diag(a)[order], vectors[:, order]


def eigenpairs(x):
    """Eigenvalues, and the squares of the eigenvectors, whose signs are free."""
    values, vectors = jacobi(positive_definite(x))
    return np.concatenate([values, np.ravel(vectors**2)])


def singular(x):
    """Singular values, falling, and the squares of u and vᵀ."""
    k = min(x.shape)
    squares, v = jacobi(np.matmul(x.T, x))
    s, v = np.sqrt(squares[::-1][:k]), v[:, ::-1][:, :k]
    u = np.matmul(x, v) / s
    return np.concatenate([s, np.ravel(u**2), np.ravel(v.T**2)])


def orthonormal(x):
    """The squares of q and r, whose signs are free."""
    q, r = np.zeros_like(x), np.zeros((x.shape[1], x.shape[1]), x.dtype)
    for j in range(x.shape[1]):
        column = x[:, j]
        for i in range(j):
            r[i, j] = np.sum(q[:, i] * x[:, j])
            column = column - r[i, j] * q[:, i]
        r[j, j] = np.sqrt(np.sum(column**2))
        q[:, j] = column / r[j, j]
    return np.concatenate([np.ravel(q**2), np.ravel(r**2)])


def dominant(rng, shape, k):
    """Matrices that are far from singular."""
    return rng.uniform(-1, 1, shape) + 3 * np.eye(*shape)


# Conventions at kinks -----------------------------------------------------------------------------------------


def no_slope(g, *operands):
    return [np.zeros(np.shape(x)) for x in operands]


def passes(mask: Callable[[Array], Array]) -> Gradient:
    return lambda g, x: [g * mask(x)]


def winners_share(pick: Callable[..., Any]) -> Gradient:
    def gradient(g, x, axis=None, keepdims=False):
        won = (x == pick(x, axis, keepdims=True)).astype(float)
        return [won / won.sum(axis, keepdims=True) * np.reshape(g, np.shape(pick(x, axis, keepdims=True)))]

    return gradient


# The list ---------------------------------------------------------------------------------------------------

UNARY_SHAPES = [(), (1,), (3,), (2, 3), (0, 2)]
BINARY_SHAPES = [((), ()), ((2, 3), (3,)), ((3, 1), (1, 4)), ((), (2, 3)), ((2, 1, 3), (4, 1)), ((0, 3), (1, 3))]
TERNARY_SHAPES = [((), (), ()), ((2, 3), (), (3,)), ((2, 1), (3,), (1, 1)), ((0, 2), (1, 2), ())]
UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "neg": (np.negative, anything),
    "square": (np.square, anything),
    "reciprocal": (lambda x: 1 / x, nonzero),
    "exp": (np.exp, anything),
    "expm1": (np.expm1, anything),
    "log": (np.log, positive),
    "log1p": (np.log1p, inside),
    "sqrt": (np.sqrt, positive),
    "cbrt": (np.cbrt, nonzero),
    "exp2": (np.exp2, anything),
    "log2": (np.log2, positive),
    "log10": (np.log10, positive),
    "arcsinh": (np.arcsinh, anything),
    "arccosh": (np.arccosh, above_one),
    "arctanh": (np.arctanh, inside),
    "deg2rad": (lambda x: x * (PI / 180), anything),
    "rad2deg": (lambda x: x * (180 / PI), anything),
    "sinc": (lambda x: np.sin(PI * x) / (PI * x), nonzero),
    "erf": (erf, nonzero),
    "erfc": (lambda x: 1 - erf(x), inside),
    "gammaln": (gammaln, positive),
    "digamma": (lambda x: polygamma(x, 0), positive),
    "logit": (lambda x: np.log(x / (1 - x)), share),
    "sin": (np.sin, anything),
    "cos": (np.cos, anything),
    "tan": (np.tan, inside),
    "arcsin": (np.arcsin, inside),
    "arccos": (np.arccos, inside),
    "arctan": (np.arctan, anything),
    "sinh": (np.sinh, anything),
    "cosh": (np.cosh, anything),
    "tanh": (np.tanh, anything),
    "sigmoid": (sigmoid, anything),
    "softplus": (lambda x: np.log1p(np.exp(x)), anything),
    "relu": (lambda x: np.maximum(x, 0), nonzero),
    "silu": (lambda x: x * sigmoid(x), anything),
    "gelu": (lambda x: x * (1 + erf(x / np.sqrt(EXACT(2)))) / 2, anything),
    "gelu_tanh": (lambda x: x * (1 + np.tanh(np.sqrt(2 / PI) * (x + 0.044715 * x**3))) / 2, anything),
    "selu": (lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)), nonzero),
    "mish": (lambda x: x * np.tanh(np.log1p(np.exp(x))), anything),
    "hard_swish": (lambda x: x * (x + 3) / 6, inside),
    "softsign": (lambda x: x / (1 + np.abs(x)), nonzero),
    "log_sigmoid": (lambda x: np.log(sigmoid(x)), anything),
    "step": (lambda x: 1 * (x > 0) + 0 * x, nonzero),
    "sign": (np.sign, nonzero),
    "abs": (np.abs, nonzero),
    "identity": (lambda x: x, anything),
    "copy": (lambda x: x, anything),
    "ravel": (np.ravel, anything),
}
BINARY: dict[str, tuple[Callable[..., Any], tuple[Callable[..., Any], ...]]] = {
    "add": (np.add, (anything,)),
    "sub": (np.subtract, (anything,)),
    "mul": (np.multiply, (anything,)),
    "div": (np.divide, (anything, nonzero)),
    "pow": (np.power, (positive, anything)),
    "logaddexp": (np.logaddexp, (anything,)),
    "arctan2": (np.arctan2, (nonzero,)),
    "hypot": (np.hypot, (nonzero,)),
    "mod": (np.mod, (apart, divisor)),
    "fmod": (np.fmod, (apart, divisor)),
    "copysign": (np.copysign, (nonzero,)),
    "leaky_relu": (lambda x, slope: np.where(x > 0, x, x * slope), (nonzero, share)),
    "elu": (lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)), (nonzero, positive)),
    "maximum": (np.maximum, (apart,)),
    "minimum": (np.minimum, (apart,)),
}
COMPARISONS = {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
OVER_AXES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((), {}), ((4,), {}), ((2, 3), {}), ((2, 3), {"axis": 0}), ((2, 3), {"axis": -1}),
    ((2, 3), {"axis": 1, "keepdims": True}), ((2, 3, 4), {"axis": (0, 2)}),
    ((2, 3, 4), {"axis": (1, 2), "keepdims": True}), ((3, 1), {"axis": 1}), ((2, 3), {"axis": ()}),
    ((0, 3), {"axis": 1}), ((2, 0, 3), {"axis": 2}),
]  # fmt: skip
ALONG_AXES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((3,), {}), ((2, 3), {}), ((2, 3), {"axis": 0}), ((2, 3, 2), {"axis": (0, 2)}), ((2, 1), {"axis": 1}),
    ((0, 3), {}),
]  # fmt: skip
EMPTY_SUMS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((0, 3), {"axis": 0}), ((0,), {}), ((2, 0), {"axis": 1, "keepdims": True}),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Every call of the file, in order."""
    yield from elementwise()
    yield from reductions()
    yield from shapes()
    yield from along()
    yield from products()
    yield from losses()
    yield from convolutions()
    yield from embeddings()
    yield from constants()
    yield from normalisations()
    yield from attentions()
    yield from resizings()
    yield from volumes()


def elementwise() -> Iterator[Case]:
    for name, (function, domain) in UNARY.items():
        for shape in UNARY_SHAPES:
            yield Case(name, function, (shape,), (domain,))
    for name, (function, domains) in BINARY.items():
        for pair in BINARY_SHAPES:
            yield Case(name, function, pair, domains)
    for name in ("maximum", "minimum"):  # the central difference of a tie is one half on either side
        yield Case(name, BINARY[name][0], ((3, 4), (4,)), (ties,))
    yield Case("relu", np.abs, ((2, 1),), (origin,), gradient=no_slope)
    yield Case("abs", np.abs, ((2,),), (origin,))
    yield Case("sign", np.sign, ((2,),), (origin,), gradient=no_slope)
    yield Case("step", lambda x: 0 * x, ((2,),), (origin,), gradient=no_slope)
    yield Case("pow", np.power, ((3,), (3,)), (origin, fixed(0, 1, 2)), gradient=lambda g, x, p: [g * (p == 1), 0 * g])
    yield Case("leaky_relu", np.multiply, ((2,), ()), (origin, fixed(0.25)), gradient=lambda g, x, s: [g * s, 0 * s])
    yield Case("elu", lambda x, alpha: alpha * np.expm1(x), ((2,), ()), (origin, fixed(0.25)))
    for name in ("silu", "log_sigmoid"):
        yield Case(name, UNARY[name][0], ((5,),), (extreme,))
    for name in ("tanh", "sigmoid", "softplus"):
        yield Case(name, UNARY[name][0], ((5,),), (extreme,))
    for pair in BINARY_SHAPES:
        yield Case("equal_mask", lambda a, b: 1 * (a == b) + 0 * (a + b), pair, (ties,), gradient=no_slope)
    for name, function in COMPARISONS.items():
        for pair in BINARY_SHAPES:
            yield Case(name, function, pair, (ties,), differentiable=False)
    for n in range(3):
        yield Case("polygamma", polygamma, ((4,),), (positive,), {"n": n})
        yield Case("polygamma", polygamma, ((6,),), (between_poles,), {"n": n})
    yield Case("polygamma", polygamma, ((3,),), (fixed(-0.5, -7.5, -20.5),), {"n": 2})
    yield Case("gammaln", gammaln, ((6,),), (between_poles,))
    places = fixed(2.5, 5.9375, 9.40625, 26.1875)
    yield Case("erfc", far_erfc, ((4,),), (places,), gradient=lambda g, x: [g * -2 / np.sqrt(PI) * np.exp(-x * x)])
    yield Case("logit", lambda x: np.log1p((2 * x - 1) / (1 - x)), ((3,),), (fixed(0.5, 0.5 + 2**-20, 0.5 - 2**-12),))
    for pair in BINARY_SHAPES:
        yield Case("floor_divide", np.floor_divide, pair, (apart, divisor), differentiable=False)
    for triple in TERNARY_SHAPES:
        yield Case("clip", lambda x, low, high: np.minimum(np.maximum(x, low), high), triple, (apart,))
        yield Case("where", np.where, triple, (condition, anything, anything))
    yield Case("clip", lambda x, a_min: np.maximum(x, a_min), ((2, 3),), (apart,), {"a_min": -0.5})
    yield Case("clip", lambda x, a_max: np.minimum(x, a_max), ((2, 3),), (apart,), {"a_max": 0.5})
    yield Case(
        "clip",
        lambda x, a_min, a_max: np.clip(x, a_min, a_max),
        ((5,),),
        (fixed(-2, -1, 0.5, 1, 2),),
        {"a_min": -1.0, "a_max": 1.0},
        gradient=lambda g, x, a_min, a_max: [g * ((x >= a_min) & (x <= a_max))],
    )
    for shape in UNARY_SHAPES:
        to_integers = {"dtype": "int64"}
        yield Case("astype", lambda x, dtype: np.trunc(x).astype(dtype), (shape,), (nonzero,), to_integers, False)
        yield Case("stop_gradient", lambda x: x, (shape,), (anything,), differentiable=False)
    for shape in ((3, 4), (0,)):  # each engine draws its own masks: here those that leave nothing to chance
        yield Case("dropout", lambda x, rate: x, (shape,), (anything,), {"rate": 0.0})
        yield Case("dropout_mask", lambda x, rate: 0 * x + 1, (shape,), (anything,), {"rate": 0.0}, False)


def reductions() -> Iterator[Case]:
    for shape, at in OVER_AXES + EMPTY_SUMS:
        yield Case("sum", np.sum, (shape,), (anything,), at)
    for shape, at in OVER_AXES:
        yield Case("mean", np.mean, (shape,), (anything,), at)
        yield Case("var", np.var, (shape,), (anything,), at)
        if at.get("axis") != ():  # numpy refuses a norm over no axes
            yield Case("norm", norm, (shape,), (nonzero,), at)
        yield Case("max", np.max, (shape,), (apart,), at)
        yield Case("min", np.min, (shape,), (apart,), at)
        yield Case("logsumexp", logsumexp, (shape,), (anything,), at)
    for pick in (np.max, np.min):
        name = "max" if pick is np.max else "min"
        yield Case(name, pick, ((3, 4),), (ties,), {"axis": 1}, gradient=winners_share(pick))
        yield Case(name, pick, ((2, 3),), (equals,), gradient=winners_share(pick))
    yield Case("norm", norm, ((3,),), (origin,))
    yield Case("var", np.var, ((3, 4),), (anything,), {"axis": 0, "ddof": 1})
    for shape, at in (((3, 4), {}), ((3, 4), {"axis": 1, "keepdims": True}), ((3, 2, 4), {"axis": (0, 1), "ddof": 1})):
        yield Case("std", np.std, (shape,), (apart,), at)
    yield Case("std", np.std, ((3,),), (equals,))
    for shape, at in ALONG_AXES:
        yield Case("softmax", softmax, (shape,), (anything,), at)
        yield Case("log_softmax", log_softmax, (shape,), (anything,), at)
    for name, function in (("softmax", softmax), ("log_softmax", log_softmax), ("logsumexp", logsumexp)):
        yield Case(name, function, ((5,),), (extreme,))


def shapes() -> Iterator[Case]:
    def moves(name: str, function: Callable[..., Any], *examples: tuple[Any, ...]) -> Iterator[Case]:
        for *operands, at in examples:
            yield Case(name, function, tuple(operands), (anything,), at)

    yield from moves(
        "reshape",
        np.reshape,
        ((2, 3), {"shape": (3, 2)}),
        ((4,), {"shape": (2, -1)}),
        ((1,), {"shape": ()}),
        ((0, 2), {"shape": (4, 0)}),
        ((2, 3, 2), {"shape": (3, 4)}),
    )
    yield from moves(
        "expand_dims",
        np.expand_dims,
        ((), {"axis": 0}),
        ((2, 3), {"axis": 1}),
        ((3,), {"axis": (0, -1)}),
        ((0,), {"axis": 0}),
    )
    yield from moves(
        "squeeze", np.squeeze, ((1, 3, 1), {}), ((1, 3, 1), {"axis": 0}), ((2, 1, 0), {"axis": -2}), ((1, 1), {})
    )
    yield from moves(
        "transpose",
        np.transpose,
        ((2, 3), {}),
        ((2, 3, 4), {"axes": (1, -1, 0)}),
        ((2, 3, 4), {"axes": (1, 2, 0)}),
        ((2, 0, 1), {"axes": (2, 0, 1)}),
    )
    yield from moves(
        "swapaxes", np.swapaxes, ((2, 3, 4), {"axis1": 0, "axis2": -1}), ((1, 0), {"axis1": 0, "axis2": 1})
    )
    yield from moves(
        "moveaxis",
        moved,
        ((2, 3, 4), {"source": 0, "destination": -1}),
        ((2, 3, 4), {"source": (0, 1), "destination": (2, 0)}),
    )
    yield from moves(
        "broadcast_to",
        np.broadcast_to,
        ((3,), {"shape": (2, 3)}),
        ((), {"shape": (2, 2)}),
        ((2, 1), {"shape": (4, 2, 3)}),
        ((1,), {"shape": (0,)}),
    )
    yield from moves(
        "concatenate",
        lambda *parts, axis=0: np.concatenate(parts, axis),
        ((2, 3), (1, 3), {"axis": 0}),
        ((2, 3), (2, 1), (2, 0), {"axis": 1}),
        ((3,), (3,), {"axis": -1}),
        ((0, 2), (0, 1), {"axis": 1}),
    )
    yield from moves(
        "stack",
        lambda *parts, axis=0: np.stack(parts, axis),
        ((), (), {"axis": 0}),
        ((2, 3), (2, 3), {"axis": 1}),
        ((3,), (3,), {"axis": -1}),
        ((0,), (0,), {"axis": 0}),
    )
    yield from moves(
        "pad",
        padded,
        ((2, 3), {"pad_width": (1, 1, 1, 1)}),
        ((2, 3), {"pad_width": (0, 1, 2, 0)}),
        ((0,), {"pad_width": (2, 2)}),
        ((3,), {"pad_width": (1, 2), "constant_values": 4.0}),
    )
    yield from moves(
        "getitem",
        lambda x, index: x[index_of(index)],
        ((2, 3), {"index": "0,0:3:1,new"}),
        ((3, 4), {"index": "2:2:-2,1"}),
        ((2, 0), {"index": "1,0:0:1"}),
    )
    yield from moves(
        "slice",
        lambda x, index: x[index_of(index)],
        ((2, 3, 4), {"index": "1,1:2:1,3:2:-2"}),
        ((1, 1, 3), {"index": "0,1:0:1,2:2:-2"}),
        ((5,), {"index": "4:5:-1"}),
    )
    yield from moves(
        "assemble",
        assembled,
        ((2, 3), (2, 1), {"places": "0:2:1,0:3:1|1:2:1,1:1:1", "shape": (3, 3)}),
        ((2,), (1,), {"places": "0:2:2|1:1:1", "shape": (4,)}),
    )
    yield from moves("flip", np.flip, ((3,), {"axis": 0}), ((2, 3), {}), ((2, 0, 3), {"axis": (0, 2)}))
    yield from moves(
        "roll",
        np.roll,
        ((4,), {"shift": 1, "axis": 0}),
        ((2, 3), {"shift": -1, "axis": 1}),
        ((0,), {"shift": 1, "axis": 0}),
    )
    yield from moves("repeat", np.repeat, ((3,), {"repeats": 2, "axis": 0}), ((2, 3), {"repeats": 3, "axis": 1}))
    yield from moves("tile", np.tile, ((3,), {"reps": (2,)}), ((2, 3), {"reps": (2, 1)}), ((2,), {"reps": (2, 3)}))
    yield from moves("diagonal", np.diagonal, ((3, 3), {}), ((2, 4), {"offset": 1}), ((4, 2), {"offset": -2}))
    yield from moves("trace", np.trace, ((3, 3), {}), ((1, 1), {}))
    yield from moves("diagflat", np.diagflat, ((3,), {}), ((2,), {"k": 1}), ((2,), {"k": -2}))
    for name, function in (("tril", np.tril), ("triu", np.triu)):
        yield from moves(name, function, ((3, 3), {}), ((2, 4), {"k": 1}), ((4, 2), {"k": -1}))
    for x, i, axis in (((5, 2), (4,), 0), ((2, 5), (3,), 1)):
        yield Case("take", lambda x, i, axis: np.take(x, i, axis), (x, i), (anything, below(5)), {"axis": axis})
        along = (3, 2) if axis == 0 else (2, 3)
        yield Case(
            "take_along_axis",
            lambda x, i, axis: np.take_along_axis(x, i, axis),
            (x, along),
            (anything, below(5)),
            {"axis": axis},
        )
    for x, i in (((5, 2), (4,)), ((5,), (2, 3)), ((5, 0), (2,)), ((5, 2, 3), (2, 2)), ((5, 2), (0,))):
        yield Case("gather", lambda x, i: x[i], (x, i), (anything, below(5)))
    for g, i, shape in (((4, 2), (4,), (5, 2)), ((2, 3), (2, 3), (5,)), ((0, 2), (0,), (5, 2))):
        yield Case("scatter", scattered, (g, i), (anything, below(5)), {"shape": shape})


def largest(x: Any, k: int, axis: int) -> Any:
    """The largest elements along an axis, falling: the first result of `topk`."""
    return np.take(np.flip(np.sort(x, axis), axis), range(k), axis)


def along() -> Iterator[Case]:
    """Functions along an axis. Places count from 0."""
    for shape, at in ((4,), {"axis": 0}), ((2, 3), {"axis": 0}), ((2, 3, 2), {"axis": 1}), ((0, 2), {"axis": 0}):
        yield Case("cumsum", np.cumsum, (shape,), (anything,), at)
        yield Case("cumprod", np.cumprod, (shape,), (anything,), at)
        yield Case("sort", np.sort, (shape,), (apart,), at)
        yield Case("argsort", lambda x, axis: np.argsort(x, axis, kind="stable"), (shape,), (apart,), at, False)
        if shape[0]:
            yield Case("topk", largest, (shape,), (apart,), {"k": 2, **at})
            yield Case("diff", np.diff, (shape,), (anything,), at)
            yield Case("median", np.median, (shape,), (apart,), at)
            yield Case("quantile", np.quantile, (shape,), (apart,), {"q": 0.3, **at})
    yield Case("cumprod", np.cumprod, ((7,),), (ties,), {"axis": 0})
    yield Case("argsort", lambda x, axis: np.argsort(x, axis, kind="stable"), ((6,),), (ties,), {"axis": 0}, False)
    yield Case("sort", np.sort, ((5,),), (extreme,), {"axis": 0})
    yield Case("median", np.median, ((3, 2),), (apart,))
    places = fixed(-1.5, 0, 0, 2, 7)
    for side in ("left", "right"):
        yield Case("searchsorted", np.searchsorted, ((5,), (2, 3)), (places, ties), {"side": side}, False)


def products() -> Iterator[Case]:
    for pair in (((2,), (3,)), ((2, 2), (1, 3)), ((2, 1), (2, 2))):
        yield Case("kron", np.kron, pair, (anything,))
    yield Case("cross", np.cross, ((3,), (3,)), (anything,))
    for n in (1, 3):
        yield Case("solve", solved, ((n, n), (n, 2)), (dominant, anything))
        yield Case("inv", inverse, ((n, n),), (dominant,))
        yield Case("det", determinant, ((n, n),), (dominant,))
        yield Case("logabsdet", lambda x: np.log(np.abs(determinant(x))), ((n, n),), (dominant,))
        yield Case("detsign", lambda x: np.sign(determinant(x)), ((n, n),), (dominant,), differentiable=False)
        yield Case("cholesky", cholesky, ((n, n),), (anything,))
        yield Case("eigh", eigenpairs, ((n, n),), (anything,))
    for power in (0, 1, 3, -2):
        yield Case("matrix_power", repeated_product, ((2, 2),), (dominant,), {"n": power})
    for shape in ((3, 2), (2, 2)):
        yield Case("pinv", lambda x: np.matmul(inverse(np.matmul(x.T, x)), x.T), (shape,), (dominant,))
        yield Case("svd", singular, (shape,), (dominant,))
        yield Case("qr", orthonormal, (shape,), (dominant,))
    for pair in (
        ((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((5, 2, 3), (3, 4)), ((1, 1), (1, 1)),
        ((5, 2, 3), (5, 3, 4)), ((2, 1, 2, 3), (5, 3, 4)), ((2, 3), (5, 3, 4)), ((3,), (5, 3, 4)), ((5, 2, 3), (3,)),
        ((2, 0), (0, 3)), ((0, 3), (3, 2)), ((4, 0, 3), (3, 2)), ((20, 33), (33, 17)),
    ):  # fmt: skip
        yield Case("matmul", np.matmul, pair, (anything,))
    for pair in (((), (2, 3)), ((3,), (3,)), ((2, 3), (3, 4)), ((3,), (3, 4)), ((0,), (0,))):
        yield Case("dot", np.dot, pair, (anything,))
    for pair in (((2,), (3,)), ((2, 2), (3,)), ((), (2,)), ((0,), (2,))):
        yield Case("outer", np.outer, pair, (anything,))
    for a, b, axes_a, axes_b in (
        ((2, 3, 4), (3, 4, 5), (1, 2), (0, 1)), ((2, 3), (3, 2), (1,), (0,)), ((2, 3), (4, 2), (0,), (1,)),
        ((2, 3), (4,), (), ()), ((0, 3), (3, 2), (1,), (0,)), ((2, 3, 4), (4, 5, 2), (0, 2), (2, 0)),
    ):  # fmt: skip
        yield Case("tensordot", tensordot, (a, b), (anything,), {"axes_a": axes_a, "axes_b": axes_b})
    for subscripts, *operands in (
        ("ij,jk->ik", (2, 3), (3, 4)),
        ("ii->i", (3, 3)),
        ("i,i->i", (1,), (0,)),
        ("...i->...", (2, 3, 4)),
        ("ij,ij->j", (1, 3), (2, 3)),
        ("ij,j,i->", (2, 3), (3,), (2,)),
        ("ij,j->i", (0, 3), (3,)),
        ("bij,bjk->bki", (2, 3, 4), (2, 4, 2)),
        ("ij->", (3, 2)),
        ("...i,...i->...", (2, 3), (3,)),
    ):
        yield Case(
            "einsum",
            lambda *x, subscripts: np.einsum(subscripts, *x),
            tuple(operands),
            (anything,),
            {"subscripts": subscripts},
        )


def convolutions() -> Iterator[Case]:
    """Attributes are by spatial axis, the first axis first; a padding of several numbers is a pair for each axis."""
    for x, weight, at in (
        ((2, 2, 5), (3, 2, 2), {}), ((1, 1, 4), (1, 1, 1), {}), ((1, 2, 6), (2, 2, 3), {"stride": 2, "padding": 1}),
        ((2, 2, 5), (4, 1, 2), {"dilation": 2, "groups": 2, "padding": (0, 2)}), ((1, 1, 3), (1, 1, 3), {}),
        ((0, 2, 4), (3, 2, 2), {}), ((2, 1, 3, 4), (2, 1, 2, 2), {}), ((1, 2, 4, 3), (3, 2, 3, 1), {"stride": (1, 2)}),
        ((1, 2, 3, 5), (2, 1, 2, 3), {"groups": 2, "padding": (1, 0, 0, 1), "stride": 2}),
        ((1, 1, 5, 6), (1, 1, 2, 2), {"dilation": (2, 3)}), ((1, 1, 2, 2), (1, 1, 3, 3), {"padding": 1}),
        ((1, 1, 3, 4), (6, 1, 3, 3), {"padding": 2}),
    ):  # fmt: skip
        yield Case("conv", convolved, (x, weight), (anything,), at)
        y = convolved(np.zeros(x), np.zeros(weight), **at).shape
        if (x[0] and len(x) == 3) or "padding" in at:
            yield Case(
                "conv_input_gradient",
                transposed(convolved, 0),
                (y, weight),
                (anything,),
                {"shape": x, **at},
                gradient=lambda u, g, w, shape, **at: [
                    convolved(u, w, **at),
                    transposed(convolved, 1)(g, u, shape=w.shape, **at),
                ],
            )
            yield Case(
                "conv_weight_gradient",
                transposed(convolved, 1),
                (y, x),
                (anything,),
                {"shape": weight, **at},
                gradient=lambda u, g, x, shape, **at: [
                    convolved(x, u, **at),
                    transposed(convolved, 0)(g, u, shape=x.shape, **at),
                ],
            )
    pools = (
        ((2, 2, 6), {"window": (2,)}), ((1, 2, 5), {"window": (2,)}), ((1, 1, 5), {"window": (3,), "stride": 1}),
        ((1, 2, 4), {"window": (3,), "padding": 1}), ((2, 1, 4, 4), {"window": (2, 2)}), ((0, 1, 2), {"window": (2,)}),
        ((1, 2, 5, 3), {"window": (2, 1), "stride": (1, 2)}), 
        ((1, 1, 3, 4), {"window": (3, 2), "padding": (1, 1, 0, 1)}),
        ((1, 1, 3, 3), {"window": (3, 3)}), ((2, 1, 3), {"window": (1,), "stride": 2}),
    )  # fmt: skip
    for x, at in pools:
        yield Case("max_pool", max_pooled, (x,), (apart,), at)
        yield Case("avg_pool", avg_pooled, (x,), (anything,), at)
        y = max_pooled(np.zeros(x), **at).shape
        yield from max_derivatives(x, y, apart, at)
        yield Case(
            "avg_pool_gradient",
            transposed(avg_pooled, 0),
            (y,),
            (anything,),
            {"shape": x, **at},
            gradient=lambda u, g, shape, **at: [avg_pooled(u, **at)],
        )
    for x, at in pools[:6:2]:  # of equal elements the first one wins
        yield Case(
            "max_pool", max_pooled, (x,), (ties,), at, gradient=lambda g, x, **at: [max_pool_gradient(g, x, **at)]
        )
        yield from max_derivatives(x, max_pooled(np.zeros(x), **at).shape, ties, at)


def max_derivatives(x, y, domain, at) -> Iterator[Case]:
    """They are linear in what they move; the places of the maxima have no slope."""
    yield Case(
        "max_pool_gradient",
        max_pool_gradient,
        (y, x),
        (anything, domain),
        at,
        gradient=lambda u, g, x, **at: [max_picked(u, x, **at), None],
    )
    yield Case(
        "max_pool_gather",
        max_picked,
        (x, x),
        (anything, domain),
        at,
        gradient=lambda g, u, x, **at: [max_pool_gradient(g, x, **at), None],
    )


def embeddings() -> Iterator[Case]:
    """Ids count from 0. The row of `padding_index` is looked up like the others and has no gradient."""
    for weight, ids in (((5, 2), (4,)), ((5, 3), (2, 3)), ((4, 1), ()), ((5, 4), (0, 2)), ((3, 2), (2, 5))):
        rows, vocabulary = (*ids, weight[1]), {"vocabulary": weight[0]}
        for at in ({}, {"padding_index": 1}):
            yield Case(
                "embedding",
                lambda w, i, padding_index=-1: w[i],
                (weight, ids),
                (anything, below(weight[0])),
                at,
                gradient=lambda g, w, i, padding_index=-1: [added(g, i, len(w), padding_index), None],
            )
            yield Case(
                "embedding_gradient",
                added,
                (rows, ids),
                (anything, below(weight[0])),
                {**vocabulary, **at},
                gradient=lambda u, g, i, vocabulary, padding_index=-1: [u[i] * (i != padding_index)[..., None], None],
            )


def added(g, ids, vocabulary, padding_index=-1):
    total = np.zeros((vocabulary, g.shape[-1]), g.dtype)
    np.add.at(total, ids, g)
    if padding_index >= 0:
        total[padding_index] = 0
    return total


def losses() -> Iterator[Case]:
    for x, y in (((4, 3), (4,)), ((2, 3, 3), (2, 3)), ((3,), ()), ((0, 3), (0,)), ((2, 1), (2,))):
        classes = below(x[-1])
        if y == (0,):  # whose mean is NaN
            yield Case("softmax_cross_entropy", cross_entropies, (x, y), (anything, classes), {"reduction": "sum"})
        else:
            yield Case("softmax_cross_entropy", cross_entropy, (x, y), (anything, classes))
        yield Case("softmax_cross_entropy_gradient", cross_entropy_gradient, ((), x, y), (anything, anything, classes))
    for shape in ((3,), (2, 3)):
        yield Case("binary_cross_entropy", binary_cross_entropy, (shape, shape), (anything, share))
    yield Case("binary_cross_entropy", binary_cross_entropy, ((5,), (5,)), (extreme, share))
    rows = fixed(-200, -30, 0.5, 199, 200, 200, -30, 199, 0.5, -200)
    yield Case("softmax_cross_entropy", cross_entropy, ((2, 5), (2,)), (rows, below(5)))
    for shape in ((), (2, 3)):
        yield Case("mean_squared_error", lambda p, t: np.mean((p - t) ** 2), (shape, shape), (anything,))
    for x, y in (((4, 3), (4,)), ((2, 3, 3), (2, 3)), ((2, 1), (2,))):
        for at in ({"label_smoothing": 0.25}, {"ignored": 0}, {"reduction": "sum"}, {"reduction": "none"}):
            if at != {"ignored": 0} or x == (4, 3):
                some = below(x[-1]) if at != {"ignored": 0} else lambda rng, shape, k: np.array([0, 2, 1, 2])
                yield Case("softmax_cross_entropy", cross_entropies, (x, y), (anything, some), at)
    three, all_of_it = lambda rng, shape, k: np.array([-7, 2, 0, 1]), {"label_smoothing": 0.5, "ignored": -7}
    for reduction in ("mean", "none"):
        at = {**all_of_it, "reduction": reduction}
        yield Case("softmax_cross_entropy", cross_entropies, ((4, 3), (4,), (3,)), (anything, three, positive), at)
    for reduction in ("mean", "sum", "none"):
        at = {"reduction": reduction}
        yield Case(
            "binary_cross_entropy",
            lambda x, t, w, p, reduction: REDUCTIONS[reduction](
                -w * (p * t * np.log(sigmoid(x)) + (1 - t) * np.log(sigmoid(-x)))
            ),
            ((2, 3), (2, 3), (3,), ()),
            (anything, share, positive),
            at,
        )
        yield Case(
            "mean_squared_error",
            lambda p, t, w, reduction: REDUCTIONS[reduction](w * (p - t) ** 2),
            ((2, 3), (2, 3), (3,)),
            (anything, anything, positive),
            at,
        )
    for shape, classes in (((3,), 4), ((), 2), ((2, 2), 1), ((0,), 3)):
        yield Case("one_hot", one_hot_rows, (shape,), (below(classes),), {"classes": classes}, False)
    yield Case("one_hot", one_hot_rows, ((4,),), (below(3),), {"classes": 3, "ignored": 1}, False)


REDUCTIONS: dict[str, Callable[[Array], Array]] = {"mean": np.mean, "sum": np.sum, "none": lambda x: x}


def one_hot_rows(labels, classes, ignored=None):
    return 1 * ((labels[..., None] == np.arange(classes)) & (labels[..., None] != ignored))


def cross_entropies(x, labels, weight=None, label_smoothing=0.0, ignored=None, reduction="mean"):
    hot = one_hot_rows(labels, x.shape[-1], ignored).astype(x.dtype)
    weight = np.ones(x.shape[-1], x.dtype) if weight is None else weight
    valid = np.sum(hot, -1, keepdims=True)
    targets = (1 - label_smoothing) * hot + label_smoothing * valid / x.shape[-1]
    rows = -np.sum(targets * weight * log_softmax(x), -1)
    return np.sum(rows) / np.sum(hot * weight) if reduction == "mean" else REDUCTIONS[reduction](rows)


def normalisations() -> Iterator[Case]:
    """Axes are by place; those of `layer_norm` are the last ones."""
    for shape, axes in (
        ((3,), (0,)),
        ((2, 4), (1,)),
        ((3, 2, 2), (0, 2)),
        ((2, 1), (1,)),
        ((2, 3), ()),
        ((0, 2), (1,)),
    ):
        at = {"axes": axes, "eps": 0.0625}
        yield Case(
            "reciprocal_std", lambda x, axes, eps: 1 / np.sqrt(variance(x, axes) + eps), (shape,), (anything,), at
        )
        yield Case(
            "standardize",
            lambda x, axis, eps: standard(x, axis, eps),
            (shape,),
            (anything,),
            {"axis": axes, "eps": 0.0625},
        )
    for shape, axis in (((2, 4), -1), ((2, 3, 2), (1, 2)), ((1, 1), -1)):
        last = shape[-1:] if axis == -1 else shape[1:]
        yield Case(
            "layer_norm",
            lambda x, w, b, axis: standard(x, axis, 1e-5) * w + b,
            (shape, last, last),
            (anything,) if shape[-1] > 1 else (equals,),
            {"axis": axis},
        )
    for shape in ((4, 2), (3, 2, 2), (2, 1, 2, 2)):

        def scaled(x, w, b):
            return standard(x, (0, *range(2, x.ndim)), 1e-5) * beside(w, x) + beside(b, x)

        def given(x, w, b, mean, variance):
            return (x - beside(mean, x)) / np.sqrt(beside(variance, x) + 1e-5) * beside(w, x) + beside(b, x)

        channels = shape[1:2]
        yield Case("batch_norm", scaled, (shape, channels, channels), (anything,))
        domains = (anything, anything, anything, anything, positive)
        yield Case("batch_norm", given, (shape, *(channels,) * 4), domains)
    for shape, groups in (((2, 6), 2), ((1, 4, 3), 2), ((2, 2, 2, 2), 1), ((1, 2, 3), 2)):
        yield Case(
            "group_norm",
            lambda x, w, b, groups: (
                standard(x.reshape(len(x), groups, -1), -1, 1e-5).reshape(x.shape) * beside(w, x) + beside(b, x)
            ),
            (shape, shape[1:2], shape[1:2]),
            (anything,),
            {"groups": groups},
        )


def variance(x, axes):
    return np.mean((x - np.mean(x, axes, keepdims=True)) ** 2, axes, keepdims=True)


def standard(x, axes, eps):
    return (x - np.mean(x, axes, keepdims=True)) / np.sqrt(variance(x, axes) + eps)


def beside(channels, x):
    """One number for each channel of x (N, C, ...)."""
    return channels.reshape(-1, *(1,) * (x.ndim - 2))


def attentions() -> Iterator[Case]:
    """The mask is true where a query, by row, sees a key."""
    for query, key, value, at in (
        ((2, 3), (4, 3), (4, 2), {}), ((2, 3, 4), (2, 3, 4), (2, 3, 4), {"causal": True}), ((1, 1), (1, 1), (1, 1), {}),
        ((2, 2, 3, 2), (2, 2, 3, 2), (2, 2, 3, 1), {"causal": True}), ((4, 2), (2, 2), (2, 3), {"causal": True}),
    ):  # fmt: skip
        yield Case("scaled_dot_product_attention", attended, (query, key, value), (anything,), at)
    seen = lambda rng, shape, k: np.array([[1, 0, 1], [0, 0, 0]], bool)  # the second query sees no key  # noqa: E731
    shapes = ((2, 2), (3, 2), (3, 2), (2, 3))
    yield Case("scaled_dot_product_attention", attended, shapes, (anything, anything, anything, seen))
    yield Case("scaled_dot_product_attention", attended, shapes, (anything,))


def attended(q, k, v, mask=None, causal=False):
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) / np.sqrt(EXACT(q.shape[-1]))
    seen = np.tri(q.shape[-2], k.shape[-2]) if causal else np.ones((q.shape[-2], k.shape[-2]))
    if mask is not None and mask.dtype == bool:
        seen = seen * mask
    elif mask is not None:
        scores = scores + mask
    powers = np.exp(scores) * seen
    total = np.sum(powers, -1, keepdims=True)
    return np.matmul(powers / np.where(total > 0, total, 1), v)


def resizings() -> Iterator[Case]:
    """New lengths are by spatial axis."""
    for shape, size in (
        ((1, 2, 4), (6,)),
        ((1, 1, 5), (2,)),
        ((2, 1, 1), (3,)),
        ((1, 1, 2, 3), (4, 5)),
        ((1, 1, 3), (1,)),
    ):
        for at in ({}, {"mode": "linear"}, {"mode": "linear", "align_corners": True}):
            yield Case("interpolate", resized, (shape,), (anything,), {"size": size, **at})
    for x, weight, at in (
        ((1, 2, 3), (2, 3, 2), {}), ((2, 2, 3), (2, 1, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ((1, 2, 2), (2, 1, 2), {"groups": 2, "dilation": 2}), ((1, 1, 2, 3), (1, 2, 3, 2), {"stride": (2, 1)}),
        ((1, 2, 2, 2), (2, 1, 2, 3), {"stride": (2, 3), "output_padding": (1, 2), "padding": (0, 1, 1, 0)}),
    ):  # fmt: skip
        yield Case("conv_transpose", spread_out, (x, weight), (anything,), at)
    for x, at in (
        ((1, 2, 7), {"window": (2,), "dilation": 3, "stride": 2}), ((1, 1, 5), {"window": (2,), "ceil_mode": True}),
        ((1, 1, 6, 5), {"window": (3, 2), "dilation": (2, 1), "padding": (1, 1, 1, 0)}),
        ((1, 1, 3), {"window": (3,), "stride": 2, "padding": 1, "ceil_mode": True}),
        ((1, 1, 4, 6), {"window": (3, 2), "stride": (2, 3), "ceil_mode": True, "padding": (1, 1, 0, 0)}),
    ):  # fmt: skip
        yield Case("max_pool", widely_pooled(np.max), (x,), (apart,), at)
        for more in ({}, {"count_padding": False}):
            yield Case("avg_pool", widely_pooled(np.mean), (x,), (anything,), {**at, **more})
        if "ceil_mode" not in at:
            y = widely_pooled(np.max)(np.zeros(x), **at).shape
            function, own = widely_pooled(np.mean), {"shape": x, **at}
            yield Case(
                "avg_pool_gradient",
                transposed(function, 0),
                (y,),
                (anything,),
                own,
                gradient=lambda u, g, shape, function=function, **at: [function(u, **at)],
            )


def resized(x, size, mode="nearest", align_corners=False):
    for axis, new in enumerate(size, 2):
        old, found = x.shape[axis], []
        for i in range(new):
            if mode == "nearest":
                place = EXACT(i * old // new)
            elif align_corners:
                place = EXACT(i) * (old - 1) / max(new - 1, 1)
            else:
                place = min(max((i + EXACT(1) / 2) * old / new - EXACT(1) / 2, EXACT(0)), EXACT(old - 1))
            first = int(place)
            share = (place - first).astype(x.dtype)
            behind = np.take(x, min(first + 1, old - 1), axis)
            found.append(np.take(x, first, axis) * (1 - share) + behind * share)
        x = np.stack(found, axis)
    return x


def volumes() -> Iterator[Case]:
    """Convolution and pooling over three axes, and a transpose with more behind the end than the stride."""
    for x, weight, at in (
        ((1, 1, 2, 3, 3), (2, 1, 2, 2, 1), {}), ((2, 1, 1, 1, 2), (1, 1, 1, 1, 1), {}),
        ((0, 1, 2, 2, 2), (1, 1, 2, 1, 2), {}),
        ((1, 2, 3, 2, 3), (2, 1, 2, 1, 2), {"groups": 2, "stride": (2, 1, 1), "padding": (1, 0, 0, 0, 0, 1)}),
        ((1, 1, 3, 2, 4), (1, 1, 2, 1, 2), {"dilation": (2, 1, 3)}),
    ):  # fmt: skip
        yield Case("conv", convolved, (x, weight), (anything,), at)
    for x, weight, at in (
        ((1, 2, 2, 1, 2), (2, 1, 2, 2, 1), {}),
        ((1, 2, 2, 1, 2), (2, 1, 2, 1, 2), {"groups": 2, "stride": (2, 1, 3), "padding": (1, 0, 0, 0, 0, 1)}),
        ((1, 1, 2, 1, 1), (1, 2, 2, 1, 2), {"stride": (3, 1, 1), "output_padding": (2, 0, 0), "dilation": (1, 1, 2)}),
        ((1, 1, 3), (1, 1, 2), {"dilation": 3, "output_padding": 2}),
        ((1, 1, 3), (1, 2, 2), {"dilation": 3, "output_padding": 2, "padding": 1}),
        ((1, 2, 2), (2, 1, 3), {"dilation": 4, "output_padding": 3, "padding": 3, "stride": 2, "groups": 2}),
    ):  # fmt: skip
        yield Case("conv_transpose", spread_out, (x, weight), (anything,), at)
    for x, at in (
        ((1, 1, 2, 3, 4), {"window": (2, 2, 2)}), ((1, 2, 3, 2, 2), {"window": (2, 1, 2), "stride": 1}),
        ((1, 1, 3, 2, 3), {"window": (2, 2, 2), "stride": (2, 1, 1), "padding": (1, 0, 0, 1, 1, 1)}),
    ):  # fmt: skip
        yield Case("max_pool", max_pooled, (x,), (apart,), at)
        yield Case("avg_pool", avg_pooled, (x,), (anything,), at)
        # Of equal elements the first one wins.
        yield Case(
            "max_pool", max_pooled, (x,), (ties,), at, gradient=lambda g, x, **at: [max_pool_gradient(g, x, **at)]
        )
    at = {"window": (2, 2, 2), "dilation": (2, 1, 1), "ceil_mode": True, "padding": (1, 1, 0, 0, 0, 1)}
    yield Case("max_pool", widely_pooled(np.max), ((1, 1, 3, 3, 3),), (apart,), at)
    for more in ({}, {"count_padding": False}):
        yield Case("avg_pool", widely_pooled(np.mean), ((1, 1, 3, 3, 3),), (anything,), {**at, **more})


def spread_out(x, weight, stride=1, padding=0, output_padding=0, dilation=1, groups=1):
    """Each element of x (N, F, lengths) adds the weight (F, C / groups, kernel), times itself."""
    axes = x.ndim - 2
    stride, dilation, more = (numbers(value, axes) for value in (stride, dilation, output_padding))
    pairs = np.reshape(padding, (-1, 2)) if np.ndim(padding) else np.full((axes, 2), padding)
    lengths = (np.array(x.shape[2:]) - 1) * stride + (np.array(weight.shape[2:]) - 1) * dilation + 1
    per_group, filters = weight.shape[1], len(weight) // groups
    total = np.zeros((len(x), per_group * groups, *(lengths + more)), x.dtype)
    for place in np.ndindex(*x.shape[2:]):
        for tap in np.ndindex(*weight.shape[2:]):
            at = tuple(np.array(place) * stride + np.array(tap) * dilation)
            for f in range(len(weight)):
                channels = slice(f // filters * per_group, (f // filters + 1) * per_group)
                total[(slice(None), channels, *at)] += (
                    x[(slice(None), slice(f, f + 1), *place)] * weight[(f, slice(None), *tap)]
                )
    kept = (slice(before, n + extra - after) for (before, after), n, extra in zip(pairs, lengths, more, strict=True))
    return total[(slice(None), slice(None), *kept)]


def widely_pooled(pick):
    """Windows of places that are `dilation` apart; what one has beyond the padding counts nothing."""

    def pool(x, window, stride=None, padding=0, dilation=1, ceil_mode=False, count_padding=True):
        axes = len(window)
        stride, dilation = numbers(window if stride is None else stride, axes), numbers(dilation, axes)
        pairs = np.reshape(padding, (-1, 2)) if np.ndim(padding) else np.full((axes, 2), padding)
        rounded = math.ceil if ceil_mode else math.floor
        counts = []
        for n, k, s, d, (before, after) in zip(x.shape[2:], window, stride, dilation, pairs, strict=True):
            counts.append(rounded((n + before + after - (k - 1) * d - 1) / s) + 1)
            counts[-1] -= (counts[-1] - 1) * s >= n + before  # a window begins before the end
        found = {}
        for place in np.ndindex(*counts):
            seen = []
            for tap in np.ndindex(*window):
                at = np.array(place) * stride - pairs[:, 0] + np.array(tap) * dilation
                inside = np.all((at >= 0) & (at < x.shape[2:]))
                in_padding = np.all((at >= -pairs[:, 0]) & (at < np.array(x.shape[2:]) + pairs[:, 1]))
                if inside:
                    seen.append(x[(slice(None), slice(None), *at)])
                elif in_padding and count_padding and pick is np.mean:
                    seen.append(np.zeros(x.shape[:2], x.dtype))
            found[place] = pick(np.stack(seen), 0)
        return gathered(found, x.shape[:2])

    return pool


# From cases to numbers ---------------------------------------------------------------------------------------

STEP = EXACT(2) ** -10
STENCIL = ((1, EXACT(4) / 5), (2, -EXACT(1) / 5), (3, EXACT(4) / 105), (4, -EXACT(1) / 280))
"""Weights of the central difference of eighth order: its error is below 1e-15 for the functions here."""


def differences(case: Case, upstream: Array, operands: Sequence[Array]) -> list[Array | None]:
    """The gradients of sum(upstream * reference) by every float operand."""

    def weighted(*xs: Array) -> Any:
        return np.sum(upstream.astype(EXACT) * case.reference(*xs, **case.attributes))

    exact = [x.astype(EXACT) if x.dtype == np.float64 else x for x in operands]
    found: list[Array | None] = []
    for k, x in enumerate(exact):
        if x.dtype != EXACT:
            found.append(None)
            continue
        gradient = np.zeros(x.shape, EXACT)
        for place in np.ndindex(x.shape):
            for steps, weight in STENCIL:
                for sign in (1, -1):
                    moved_x = x.copy()
                    moved_x[place] += sign * steps * STEP
                    moved_operands = [*exact[:k], moved_x, *exact[k + 1 :]]
                    gradient[place] += sign * weight * weighted(*moved_operands)
        found.append((gradient / STEP).astype(np.float64))
    return found


@dataclass(frozen=True)
class Vector:
    """One line of the index with its numbers; `upstream` is None where nothing is differentiated."""

    name: str
    attributes: dict[str, str]
    operands: list[Array]
    upstream: Array | None
    result: Array
    gradients: list[Array | None]


def compute() -> list[Vector]:
    """All vectors, from the formulas."""
    rng = np.random.default_rng(SEED)
    return [_vector(case, rng) for case in cases()]


def _vector(case: Case, rng: np.random.Generator) -> Vector:
    operands = case.draw(rng)
    exact = [x.astype(EXACT) if x.dtype == np.float64 else x for x in operands]
    result = np.asarray(case.reference(*exact, **case.attributes))
    if result.dtype == EXACT:
        result = result.astype(np.float64)
    attributes = {key: written(value) for key, value in case.attributes.items()}
    if not case.differentiable:
        return Vector(case.name, attributes, operands, None, result, [None] * len(operands))
    upstream = short(nonzero(rng, result.shape, 0))
    if case.gradient is None:
        return Vector(case.name, attributes, operands, upstream, result, differences(case, upstream, operands))
    by_convention = [None if g is None else np.asarray(g, np.float64) for g in
                     case.gradient(upstream, *operands, **case.attributes)]  # fmt: skip
    return Vector(case.name, attributes, operands, upstream, result, by_convention)


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value)) + ("," if len(value) == 1 else "")
    return str(value)


def constants() -> Iterator[Case]:
    """What has no derivative on purpose, and products. Positions count from 0, among all elements in C order."""
    for name, function in (("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc), ("round", np.rint)):
        for shape in UNARY_SHAPES:
            yield Case(name, function, (shape,), (nonzero,), differentiable=False)
        yield Case(name, function, ((6,),), (fixed(-1.5, -0.5, 0.5, 1.5, 2.5, 3),), differentiable=False)
    for name, function in (("isnan", np.isnan), ("isfinite", np.isfinite), ("isinf", np.isinf)):
        for shape in UNARY_SHAPES:
            yield Case(name, function, (shape,), (anything,), differentiable=False)
        yield Case(name, function, ((5,),), (fixed(np.nan, np.inf, -np.inf, 0, 1),), differentiable=False)
    for name, function in (("logical_and", np.logical_and), ("logical_or", np.logical_or)):
        for pair in BINARY_SHAPES:
            yield Case(name, function, pair, (condition,), differentiable=False)
    for shape in UNARY_SHAPES:
        yield Case("logical_not", np.logical_not, (shape,), (condition,), differentiable=False)
    for name, function in (("any", np.any), ("all", np.all)):
        for shape, at in OVER_AXES + EMPTY_SUMS:
            yield Case(name, function, (shape,), (condition,), at, False)
    for name, function in (("argmax", np.argmax), ("argmin", np.argmin)):
        for shape, at in ((4,), {}), ((2, 3), {}), ((2, 3), {"axis": 0}), ((2, 3, 4), {"axis": -1}):
            yield Case(name, function, (shape,), (apart,), at, False)
        yield Case(name, function, ((3, 4),), (ties,), {"axis": 1}, False)
    for shape, at in OVER_AXES + EMPTY_SUMS:
        yield Case("prod", np.prod, (shape,), (nonzero,), at)
    yield Case("prod", np.prod, ((3, 4),), (ties,), {"axis": 1})
    for name in ("maximum", "minimum"):
        yield Case(name, BINARY[name][0], ((4,), (4,)), (ties,))
    yield Case(
        "clip",
        lambda x, low, high: np.minimum(np.maximum(x, low), high),
        ((5,), (), ()),
        (fixed(-2, -1, 0.25, 1, 2), fixed(1), fixed(-1)),  # the bounds the wrong way round
        gradient=lambda g, x, low, high: [0 * g, 0 * low, np.sum(g)],
    )


# The files --------------------------------------------------------------------------------------------------


def write(folder: Path = FOLDER) -> None:
    """Compute all vectors and write both files."""
    data = bytearray()

    def entry(array: Array | None) -> str:
        if array is None:
            return "-"
        offset = len(data)
        data.extend(np.ascontiguousarray(array, "<f8" if array.dtype == np.float64 else "<i8").tobytes())
        return f"{array.dtype}:{','.join(map(str, array.shape))}:{offset}"

    lines = ["\t".join(HEADER)]
    for v in compute():
        fields = [v.name, ";".join(f"{key}={value}" for key, value in v.attributes.items())]
        fields += [";".join(map(entry, v.operands)), entry(v.upstream), entry(v.result)]
        fields += [";".join(map(entry, v.gradients))]
        lines.append("\t".join(fields))
    folder.joinpath("index.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    folder.joinpath("values.bin").write_bytes(bytes(data))


def read(folder: Path = FOLDER) -> list[Vector]:
    """The vectors as they are in the files."""
    data = folder.joinpath("values.bin").read_bytes()

    def array(text: str) -> Any:
        if text == "-":
            return None
        dtype, sizes, offset = text.split(":")
        shape = tuple(map(int, filter(None, sizes.split(","))))
        stored = np.dtype("<f8" if dtype == "float64" else "<i8")
        count = int(np.prod(shape))
        return np.frombuffer(data, stored, count, int(offset)).reshape(shape).astype(dtype)

    vectors = []
    header, *lines = folder.joinpath("index.tsv").read_text(encoding="utf-8").splitlines()
    if tuple(header.split("\t")) != HEADER:
        raise ValueError(f"index.tsv: expected the columns {HEADER}, got {header!r}")
    for line in lines:
        name, attributes, operands, upstream, result, gradients = line.split("\t")
        pairs = dict(item.split("=", 1) for item in attributes.split(";") if item)
        vectors.append(Vector(name, pairs, [array(x) for x in operands.split(";")], array(upstream), array(result),
                              [array(x) for x in gradients.split(";")]))  # fmt: skip
    return vectors


if __name__ == "__main__":
    write()
    sizes = [FOLDER.joinpath(name).stat().st_size for name in ("index.tsv", "values.bin")]
    print(f"{len(read())} vectors, {sum(sizes)} bytes", file=sys.stderr)
