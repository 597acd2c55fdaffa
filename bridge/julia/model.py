"""A model of a spec, trained by the Julia engine: no need to know Julia or the engine protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import DTypeLike, NDArray

from bridge import registry, weights
from bridge import spec as specs
from bridge.libjulia.find import find
from bridge.session import Optimizer, Session
from bridge.worker import Worker

__all__ = ["build"]


def build(
    model: specs.ModelSpec | str | os.PathLike[str],
    params: Mapping[str, NDArray[Any]] | None = None,
    optimizer: Optimizer | None = None,
    batch_size: int = 100,
    dtype: DTypeLike = "float32",
    threads: int = 1,
    seed: int = 0,
    *,
    process: bool = False,
) -> Session:
    """Start Julia, unless it runs, and make a session that trains `model` in numpy's own memory.

    Args:
        model: a model spec, or the TOML file that holds one.
        params: initial weights by name; None draws the spec's initial weights from `seed`.
        optimizer: the update rule; plain gradient descent with learning rate 0.01 by default.
        batch_size: samples per step.
        dtype: float32 or float64.
        threads: Julia's threads; fixed for the process by the first session.
        seed: of the initial weights.
        process: whether Julia runs in a separate process, which ends with `close()`: for a program that calls it from
            several threads or from an event loop, or has several sessions compute at the same time. Arrays are then
            copied to and fro.

    Returns:
        A session with `train_epoch(x, y, order)`, `evaluate(x, y)`, `predict(x)`, `loss_and_gradients(x, y)`,
        `params()` and `close()`; see `bridge.session.Session`.

    Raises:
        JuliaUnavailableError: no Julia works here; says what to do.
        SpecError, WeightsError: the model or the weights are wrong.
    """
    find()  # here and not by the registry, whose error is one of any engine that can't be used
    spec = model if isinstance(model, specs.ModelSpec) else specs.load(model)
    initial = weights.initialise(spec, seed, dtype) if params is None else params
    rule = Optimizer("sgd", 0.01) if optimizer is None else optimizer
    if not process:
        return registry.get("julia").build(spec, initial, rule, batch_size, dtype, threads)
    worker = Worker("julia", threads)
    try:
        worker.build(spec, initial, rule, batch_size, dtype)
    except BaseException:
        worker.close()
        raise
    return worker
