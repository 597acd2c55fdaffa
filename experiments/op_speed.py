"""The speed of ops beside PyTorch and JAX: one table of gradients of single functions.

    python -m experiments.op_speed [--size 10 --size 100000] [--rounds 7] [NAMES...]

For each function the gradient of a weighted sum of its squared results is timed (of a sum alone, that of a linear
function is a constant, which a compiler folds): compiled by the numpy engine and by JAX, eagerly by PyTorch, in
float64, each with one thread. The systems alternate in rounds within one process, and the least time of a call is
shown, so that a loaded machine says something, too. Gradients that differ from the numpy engine's are not timed.
Systems that are not installed, and functions that one lacks, are left out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import threadpoolctl

import py_engine
from py_engine import ops

SLOW = 3.0
"""How many times the fastest of the others a function takes that is called slow."""
SECONDS = 0.02
"""How long the calls of one round take, at least."""

Array = Any
Function = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One function: `numpy(m, x)` with the functions of numpy or jax.numpy as `m`, and PyTorch's own.

    Attributes:
        name: numpy's, or that of one of `py_engine.ops`.
        numpy: for both, where JAX has numpy's names.
        torch: with the module `torch` as `m`; None where PyTorch has no such function.
        kind: what `x` is: "vector", "positive" (a vector of numbers from 0.1 to 0.9), "rows" (a matrix of 10 columns),
            "square" (a well conditioned matrix) or "images" (one, of 2 channels).
        jax: with the module `jax` as `m`; None where it is `numpy`.
    """

    name: str
    numpy: Function
    torch: Function | None
    kind: str = "vector"
    jax: Function | None = None


def same(name: str, kind: str = "vector", torch: str | None = None) -> Row:
    """A function of one argument that all have."""
    other = name.rpartition(".")[2] if torch is None else torch
    return Row(name, lambda m, x: _named(m, name)(x), lambda m, x: _named(m, other)(x), kind)


def ours(name: str, jax: str, torch: str, kind: str = "vector", *more: Any) -> Row:
    """A function of `py_engine.ops` of one argument, and what may follow it in all."""
    function = getattr(ops, name)
    return Row(
        name,
        lambda m, x: function(x, *more),
        lambda m, x: _named(m, torch)(x, *more),
        kind,
        lambda m, x: _named(m, jax)(x, *more),
    )


def _named(module: Any, name: str) -> Function:
    for part in name.split("."):
        module = getattr(module, part)
    return module


ROWS: Sequence[Row] = (
    *(same(name, torch=other) for name, other in (("arcsinh", "asinh"), ("arctan", "atan"), ("sinc", "sinc"))),
    *(same(name, "positive") for name in ("log2", "log10", "exp2", "deg2rad")),
    *(same(name, "positive", other) for name, other in (("arctanh", "atanh"), ("nan_to_num", "nan_to_num"))),
    Row("cbrt", lambda m, x: m.cbrt(x), None, "positive"),
    Row("hypot", lambda m, x: m.hypot(x, x[::-1]), lambda m, x: m.hypot(x, x.flip(0))),
    Row("arctan2", lambda m, x: m.arctan2(x, x[::-1]), lambda m, x: m.arctan2(x, x.flip(0))),
    Row("logaddexp", lambda m, x: m.logaddexp(x, x[::-1]), lambda m, x: m.logaddexp(x, x.flip(0))),
    Row("mod", lambda m, x: m.mod(x, 0.7), lambda m, x: m.remainder(x, 0.7)),
    Row("fmax", lambda m, x: m.fmax(x, x[::-1] * 0.5), lambda m, x: m.fmax(x, x.flip(0) * 0.5)),
    Row("i0", lambda m, x: m.i0(x), lambda m, x: m.special.i0(x), "positive"),
    Row("cumsum", lambda m, x: m.cumsum(x), lambda m, x: x.cumsum(0)),
    Row("cumprod", lambda m, x: m.cumprod(x), lambda m, x: x.cumprod(0), "positive"),
    Row("prod", lambda m, x: m.prod(x, axis=1), lambda m, x: x.prod(1), "rows"),
    Row("nansum", lambda m, x: m.nansum(x, axis=1), lambda m, x: x.nansum(1), "rows"),
    Row("nanmean", lambda m, x: m.nanmean(x, axis=1), lambda m, x: x.nanmean(1), "rows"),
    Row("nanmedian", lambda m, x: m.nanmedian(x), None),
    Row("sum where", lambda m, x: m.sum(x, where=x > 0), lambda m, x: m.where(x > 0, x, 0.0).sum()),
    Row("diff", lambda m, x: m.diff(x), lambda m, x: x.diff()),
    Row("gradient", lambda m, x: m.gradient(x), lambda m, x: m.gradient(x)[0]),
    Row("trapezoid", lambda m, x: m.trapezoid(x), lambda m, x: m.trapezoid(x)),
    Row("unwrap", lambda m, x: m.unwrap(x * 3), None),
    Row("roll", lambda m, x: m.roll(x, 3), lambda m, x: x.roll(3)),
    Row("flip", lambda m, x: m.flip(x), lambda m, x: x.flip(0)),
    Row("repeat", lambda m, x: m.repeat(x, 3), lambda m, x: x.repeat_interleave(3)),
    Row("tile", lambda m, x: m.tile(x, 3), lambda m, x: x.repeat(3)),
    Row("tril", lambda m, x: m.tril(x), lambda m, x: x.tril(), "square"),
    Row("diagonal", lambda m, x: m.diagonal(x), lambda m, x: x.diagonal(), "square"),
    Row("take", lambda m, x: m.take(x, _places(x.shape[0])), lambda m, x: x[m.as_tensor(_places(x.shape[0]))]),
    Row("sort", lambda m, x: m.sort(x), lambda m, x: x.sort().values),
    Row("median", lambda m, x: m.median(x, axis=1), None, "rows"),
    Row("quantile", lambda m, x: m.quantile(x, 0.3), lambda m, x: x.quantile(0.3)),
    Row("pad reflect", lambda m, x: m.pad(x, 3, mode="reflect"), None),
    Row("pad mean", lambda m, x: m.pad(x, 3, mode="mean"), None),
    Row("polyval", lambda m, x: m.polyval(np.array([0.5, -1.0, 2.0, 0.25]), x), None),
    Row("interp", lambda m, x: m.interp(x, np.linspace(-2, 2, 33), np.sin(np.linspace(-2, 2, 33))), None),
    Row("histogram", lambda m, x: m.histogram(_grid(x.shape[0]), 20, weights=x)[0], None),
    Row("convolve", lambda m, x: m.convolve(x, np.array([0.25, 0.5, 0.25])), None),
    Row("inner", lambda m, x: m.inner(x, x), lambda m, x: m.inner(x, x), "square"),
    Row("kron", lambda m, x: m.kron(x, np.eye(2)), lambda m, x: m.kron(x, m.eye(2, dtype=x.dtype)), "rows"),
    *(same(f"linalg.{name}", "square", f"linalg.{name}") for name in ("inv", "det", "pinv", "svdvals", "norm")),
    Row("linalg.solve", lambda m, x: m.linalg.solve(x, x[:, :1]), lambda m, x: m.linalg.solve(x, x[:, :1]), "square"),
    Row("linalg.slogdet", lambda m, x: m.linalg.slogdet(x)[1], lambda m, x: m.linalg.slogdet(x)[1], "square"),
    Row("linalg.cholesky", lambda m, x: m.linalg.cholesky(x @ x.T), lambda m, x: m.linalg.cholesky(x @ x.T), "square"),
    Row("linalg.eigh", lambda m, x: m.linalg.eigh(x + x.T)[0], lambda m, x: m.linalg.eigh(x + x.T)[0], "square"),
    Row("linalg.qr", lambda m, x: m.linalg.qr(x)[1], lambda m, x: m.linalg.qr(x)[1], "square"),
    *(same(name) for name in ("expm1", "sinh", "cosh", "tanh", "square", "abs", "trunc", "rad2deg")),
    *(same(name, "positive", other) for name, other in (("arcsin", "asin"), ("arccos", "acos"), ("log1p", "log1p"))),
    Row("arccosh", lambda m, x: m.arccosh(x + 1), lambda m, x: m.acosh(x + 1), "positive"),
    Row("power", lambda m, x: m.power(x, x[::-1]), lambda m, x: m.pow(x, x.flip(0)), "positive"),
    Row("floor_divide", lambda m, x: x + m.floor_divide(x, 0.7), None),
    Row("fmod", lambda m, x: m.fmod(x, 0.7), lambda m, x: m.fmod(x, 0.7)),
    Row("copysign", lambda m, x: m.copysign(x, x[::-1]), lambda m, x: m.copysign(x, x.flip(0))),
    Row("maximum", lambda m, x: m.maximum(x, x[::-1]), lambda m, x: m.maximum(x, x.flip(0))),
    Row("fmin", lambda m, x: m.fmin(x, x[::-1] * 0.5), lambda m, x: m.fmin(x, x.flip(0) * 0.5)),
    Row("clip", lambda m, x: m.clip(x, -0.5, 0.5), lambda m, x: m.clip(x, -0.5, 0.5)),
    Row("where", lambda m, x: m.where(x > 0, x, 0.5 * x), lambda m, x: m.where(x > 0, x, 0.5 * x)),
    Row("select", lambda m, x: m.select([x > 1, x > 0], [x, 2 * x], 3 * x), None),
    Row("max", lambda m, x: m.max(x, axis=1), lambda m, x: x.amax(1), "rows"),
    Row("ptp", lambda m, x: m.ptp(x, axis=1), lambda m, x: x.amax(1) - x.amin(1), "rows"),
    Row("var", lambda m, x: m.var(x, axis=1), lambda m, x: x.var(1, correction=0), "rows"),
    Row("std", lambda m, x: m.std(x, axis=1), lambda m, x: x.std(1, correction=0), "rows"),
    Row("nanvar", lambda m, x: m.nanvar(x, axis=1), None, "rows"),
    Row("average", lambda m, x: m.average(x, axis=0, weights=_grid(len(x)) ** 2 + 0.5), None, "rows"),
    Row("cov", lambda m, x: m.cov(x), lambda m, x: m.cov(x), "square"),
    Row("corrcoef", lambda m, x: m.corrcoef(x), lambda m, x: m.corrcoef(x), "square"),
    Row("percentile", lambda m, x: m.percentile(x, 30.0), lambda m, x: x.quantile(0.3)),
    Row("partition", lambda m, x: m.partition(x, 4)[4], lambda m, x: x.kthvalue(5).values),
    Row("ediff1d", lambda m, x: m.ediff1d(x), lambda m, x: x.diff()),
    Row("vstack", lambda m, x: m.vstack([x, 2 * x]), lambda m, x: m.vstack([x, 2 * x]), "rows"),
    Row("stack", lambda m, x: m.stack([x, 2 * x], axis=1), lambda m, x: m.stack([x, 2 * x], 1), "rows"),
    Row("append", lambda m, x: m.append(x, 2 * x), lambda m, x: m.cat([x, 2 * x])),
    Row("split", lambda m, x: m.split(x, 2)[1], lambda m, x: x.tensor_split(2)[1]),
    Row("rot90", lambda m, x: m.rot90(x), lambda m, x: m.rot90(x), "square"),
    Row("moveaxis", lambda m, x: m.moveaxis(x, 0, 1), lambda m, x: m.moveaxis(x, 0, 1), "square"),
    Row("diag", lambda m, x: m.diag(x[0]), lambda m, x: m.diag(x[0]), "square"),
    Row("trace", lambda m, x: m.trace(x), lambda m, x: m.trace(x), "square"),
    Row(
        "take_along_axis",
        lambda m, x: m.take_along_axis(x, _order(x), 1),
        lambda m, x: m.take_along_dim(x, m.as_tensor(_order(x)), 1),
        "rows",
    ),
    Row("matmul", lambda m, x: m.matmul(x, x), lambda m, x: m.matmul(x, x), "square"),
    Row("einsum", lambda m, x: m.einsum("ij,kj->ik", x, x), lambda m, x: m.einsum("ij,kj->ik", x, x), "square"),
    Row("outer", lambda m, x: m.outer(x[0], x[1]), lambda m, x: m.outer(x[0], x[1]), "square"),
    Row("vdot", lambda m, x: m.vdot(x, x), lambda m, x: m.vdot(x, x)),
    Row("cross", lambda m, x: m.cross(x[:, :3], x[:, 3:6]), lambda m, x: m.cross(x[:, :3], x[:, 3:6], dim=1), "rows"),
    Row("linalg.matrix_power", lambda m, x: m.linalg.matrix_power(x, 3), lambda m, x: x @ x @ x, "square"),
    Row(
        "linalg.eigvalsh",
        lambda m, x: m.linalg.eigvalsh(x + x.T),
        lambda m, x: m.linalg.eigvalsh(x + x.T),
        "square",
    ),
    *(ours(name, f"scipy.special.{name}", f"special.{name}") for name in ("erf", "erfc")),
    *(ours(name, f"scipy.special.{name}", f"special.{name}", "positive") for name in ("gammaln", "digamma", "logit")),
    Row(
        "polygamma",
        lambda m, x: ops.polygamma(1, x),
        lambda m, x: m.special.polygamma(1, x),
        "positive",
        lambda m, x: m.scipy.special.polygamma(1, x),
    ),
    *(
        ours(name, f"nn.{name}", f"nn.functional.{torch}")
        for name, torch in (
            *(("relu", "relu"), ("sigmoid", "sigmoid"), ("log_sigmoid", "logsigmoid"), ("softplus", "softplus")),
            *(("silu", "silu"), ("elu", "elu"), ("selu", "selu"), ("leaky_relu", "leaky_relu"), ("mish", "mish")),
            ("hard_swish", "hardswish"),
        )
    ),
    ours("softsign", "nn.soft_sign", "nn.functional.softsign"),
    Row(
        "gelu_tanh",
        lambda m, x: ops.gelu_tanh(x),
        lambda m, x: m.nn.functional.gelu(x, approximate="tanh"),
        "vector",
        lambda m, x: m.nn.gelu(x, approximate=True),
    ),
    Row(
        "gelu",
        lambda m, x: ops.gelu(x),
        lambda m, x: m.nn.functional.gelu(x),
        "vector",
        lambda m, x: m.nn.gelu(x, approximate=False),
    ),
    *(ours(name, f"nn.{name}", f"nn.functional.{name}", "rows", -1) for name in ("softmax", "log_softmax")),
    ours("logsumexp", "scipy.special.logsumexp", "logsumexp", "rows", 1),
    Row(
        "layer_norm",
        lambda m, x: ops.layer_norm(x),
        lambda m, x: m.nn.functional.layer_norm(x, (10,)),
        "rows",
        lambda m, x: m.nn.standardize(x, epsilon=1e-5),
    ),
    Row(
        "scaled_dot_product_attention",
        lambda m, x: ops.scaled_dot_product_attention(x, x, x),
        lambda m, x: m.nn.functional.scaled_dot_product_attention(x, x, x),
        "square",
        lambda m, x: m.nn.dot_product_attention(*[x[None, :, None]] * 3)[0, :, 0],
    ),
    Row(
        "conv",
        lambda m, x: ops.conv(x, _kernel()),
        lambda m, x: m.nn.functional.conv2d(x, m.as_tensor(_kernel())),
        "images",
        lambda m, x: m.lax.conv(x, _kernel(), (1, 1), "VALID"),
    ),
    Row(
        "conv_transpose",
        lambda m, x: ops.conv_transpose(x, _kernel().swapaxes(0, 1)),
        lambda m, x: m.nn.functional.conv_transpose2d(x, m.as_tensor(_kernel().swapaxes(0, 1))),
        "images",
    ),
    Row("max_pool", lambda m, x: ops.max_pool(x, 2), lambda m, x: m.nn.functional.max_pool2d(x, 2), "images"),
    Row("avg_pool", lambda m, x: ops.avg_pool(x, 2), lambda m, x: m.nn.functional.avg_pool2d(x, 2), "images"),
    Row(
        "interpolate",
        lambda m, x: ops.interpolate(x, 2 * x.shape[2], "linear"),
        lambda m, x: m.nn.functional.interpolate(x, 2 * x.shape[2], mode="bilinear"),
        "images",
        lambda m, x: m.image.resize(x, (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), "linear"),
    ),
)


def _places(n: int) -> Array:
    return np.arange(n)[::-1].copy() // 2


def _order(x: Array) -> Array:
    return np.arange(x.shape[0] * x.shape[1]).reshape(x.shape) * 7 % x.shape[1]


def _kernel() -> Array:
    return np.cos(np.arange(4 * 2 * 3 * 3)).reshape(4, 2, 3, 3)


def _grid(n: int) -> Array:
    return np.sin(np.arange(n) * 1.7)


def given(kind: str, size: int) -> Array:
    """The argument: about `size` numbers."""
    rng = np.random.default_rng(7)
    if kind == "square":
        n = max(int(size**0.5), 2)
        return rng.standard_normal((n, n)) / n**0.5 + 2 * np.eye(n)
    if kind == "images":
        n = max(int((size / 2) ** 0.5), 4)
        return rng.standard_normal((1, 2, n, n))
    x = rng.uniform(0.1, 0.9, size) if kind == "positive" else rng.standard_normal(size)
    return x.reshape(-1, 10) if kind == "rows" else x


def _weighted(function: Function, given: Any, module: Any, weights: Array) -> Function:
    return lambda x: module.sum(module.square(function(given, x)) * weights)


def gradients(row: Row, size: int) -> tuple[Array, dict[str, Callable[[], Any]]]:
    """The argument, and for each system that has the function a repeatable call that computes its gradient."""
    x = given(row.kind, size)
    shape = np.shape(row.numpy(np, x))
    weights = np.cos(np.arange(np.prod(shape), dtype=float)).reshape(shape)
    compiled = py_engine.compile(py_engine.grad(_weighted(row.numpy, np, np, weights)))
    calls: dict[str, Callable[[], Any]] = {"numpy": lambda: compiled(x)}
    if row.torch is not None and (torch := _torch()) is not None:
        variable, w = torch.tensor(x, requires_grad=True), torch.tensor(weights)
        function = _weighted(row.torch, torch, torch, w)
        calls["torch"] = lambda: torch.autograd.grad(function(variable), variable)[0].numpy()
    if (jax := _jax()) is not None:
        named = (row.numpy, jax.numpy) if row.jax is None else (row.jax, jax)
        function_of_jax = jax.jit(jax.grad(_weighted(*named, jax.numpy, jax.numpy.asarray(weights))))
        on_device = jax.numpy.asarray(x)
        calls["jax"] = lambda: function_of_jax(on_device).block_until_ready()
    return x, calls


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def _jax() -> Any:
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    try:
        import jax
        import jax.scipy
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)
    return jax


def agreeing(calls: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """The calls whose gradient is the numpy engine's."""
    expected = np.asarray(calls["numpy"]())
    found = {}
    for system, call in calls.items():
        try:
            same_gradient = np.allclose(np.asarray(call()), expected, rtol=1e-6, atol=1e-9)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue  # it lacks the function, or an argument of it
        if same_gradient:
            found[system] = call
    return found


def least_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least seconds of one call of each, from rounds in which they alternate."""
    counts = {}
    for system, call in calls.items():
        begin = time.perf_counter()
        call()
        counts[system] = max(1, int(SECONDS / max(time.perf_counter() - begin, 1e-7)))
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for system, call in calls.items():
            begin = time.perf_counter()
            for _ in range(counts[system]):
                call()
            best[system] = min(best[system], (time.perf_counter() - begin) / counts[system])
    return best


def measured(rows: Sequence[Row], sizes: Sequence[int], rounds: int) -> Iterator[tuple[Row, int, dict[str, float]]]:
    """Each function of each size with the least time of each system that has it."""
    for row in rows:
        for size in sizes:
            _, calls = gradients(row, size)
            yield row, size, least_times(agreeing(calls), rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, in microseconds, and the names of the slow ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="functions by name (all)")
    parser.add_argument("--size", type=int, action="append", help="elements (10 and 100000)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if not options.names or row.name in options.names]
    slow = []
    print("| function | elements | numpy µs | torch µs | jax µs | to the faster |\n|:---|---:|---:|---:|---:|---:|")
    with threadpoolctl.threadpool_limits(1):
        for row, size, times in measured(rows, options.size or [10, 100_000], options.rounds):
            others = [seconds for system, seconds in times.items() if system != "numpy"]
            ratio = times["numpy"] / min(others) if others else float("nan")
            cells = [f"{times[system] * 1e6:.1f}" if system in times else "—" for system in ("numpy", "torch", "jax")]
            print(f"| {row.name} | {size} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)
            if ratio > SLOW:
                slow.append(f"{row.name} of {size} ({ratio:.1f})")
    print(f"\nMore than {SLOW:g} times the faster one: {', '.join(slow) or 'none'}.")


if __name__ == "__main__":
    main()
