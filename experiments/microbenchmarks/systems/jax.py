"""JAX: `jit` of the function and of its gradient, with arrays that are on the device already."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bridge.linear_algebra import of_jax
from experiments.microbenchmarks.functions import LABEL, STEPS

linear_algebra = partial(of_jax, jax)

jax.config.update("jax_platforms", "cpu")  # like all systems here
jax.config.update("jax_enable_x64", True)


def sincos(x: Any) -> Any:
    """sin(cos(x))."""
    return jnp.sin(jnp.cos(x))


def loop(x: Any) -> Any:
    """500 multiplications by sin(x)."""
    return jax.lax.fori_loop(0, STEPS, lambda _, r: r * jnp.sin(x), jnp.ones_like(x))


def logsumexp(x: Any) -> Any:
    """log(sum(exp(x)))."""
    return jax.nn.logsumexp(x)


def logistic(w: Any, b: Any, x: Any) -> Any:
    """The sum of sigmoid(w x + b)."""
    return jnp.sum(jax.nn.sigmoid(w @ x + b))


def mlp(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """The network's cross-entropy."""
    return -jax.nn.log_softmax(w2 @ jax.nn.relu(w1 @ x + b1) + b2)[LABEL]


FUNCTIONS = {item.__name__: item for item in (sincos, loop, logsumexp, logistic, mlp)}


def prepare(name: str, inputs: list[Any], by: int) -> Any:
    """The value and the gradients, compiled; a call waits until its result is there."""
    function, arguments = FUNCTIONS[name], [jnp.asarray(x) for x in inputs]
    value = partial(jax.jit(function), *arguments)
    gradient = partial(jax.jit(jax.grad(function, tuple(range(by)))), *arguments)
    return lambda: value().block_until_ready(), lambda: jax.block_until_ready(gradient())
