"""Ctrl-C at any moment ends a call and nothing else: the state is what it was, and the next calls are right.

Python interrupts where a function begins, and after a call of a function in C. Here a profiler raises at these places,
one after the other, those around the state's own blocks among them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

import py_engine as pe
from py_engine import network as net
from py_engine.ad import state
from py_engine.ad.state import STATE
from py_engine.ad.techniques import Techniques

X, ROWS = np.array([0.5, -1.0, 2.0]), np.ones((2, 3))
W = pe.tensor(X, requires_grad=True)


def f(x: Any) -> Any:
    return np.sum(np.tanh(x * x))


def stepped(x: Any) -> Any:
    return np.sum(pe.scan(lambda carry, row: (carry * row, None), x, ROWS)[0])


def branched(x: Any) -> Any:
    return np.sum(pe.cond(x[0] > 0, np.sin, np.cos, x))


def repeated(x: Any) -> Any:
    return pe.while_loop(lambda y: np.sum(y * y) > 1, lambda y: y / 2, x)[0]


def trained(replay: bool) -> None:
    chain = net.Chain(net.Dense(3, 4), net.BatchNorm(4))
    trainer = net.Trainer(chain, batch_size=2, threads=1, techniques=Techniques(replay=replay))
    trainer.train_epoch(np.eye(3, dtype=np.float32)[:2], np.array([0, 1]))


cubed = pe.custom_rule(lambda x: x**3, vjp=lambda g, y, x: g * 3 * x**2, jvp=lambda t, y, x: t[0] * 3 * x**2)

CALLS: dict[str, Callable[[], Any]] = {
    "an op": lambda: np.tanh(W),
    "backward": lambda: f(W).backward(),
    "grad": lambda: pe.grad(f)(X),
    "grad of a container": lambda: pe.grad(lambda c: f(c["x"]))({"x": X}),
    "vjp": lambda: pe.vjp(f, X)[1](1.0),
    "jvp": lambda: pe.jvp(f, (X,), (X,)),
    "jacobian": lambda: pe.jacobian(np.tanh, X),
    "hessian": lambda: pe.hessian(f, X),
    "hvp": lambda: pe.hvp(f, X, X),
    "sparse_jacobian": lambda: pe.sparse_jacobian(np.tanh, X),
    "sparse_hessian": lambda: pe.sparse_hessian(f, X),
    "vmap": lambda: pe.vmap(pe.grad(f))(ROWS),
    "checkpoint": lambda: pe.grad(pe.checkpoint(f))(X),
    "custom_rule": lambda: pe.grad(lambda x: np.sum(cubed(x)))(X),
    "scan": lambda: pe.grad(stepped)(X),
    "cond": lambda: pe.grad(branched)(X),
    "while_loop": lambda: pe.grad(repeated)(X),
    "compile": lambda: pe.compile(pe.grad(f))(X),
    "compiled loops": lambda: pe.compile(pe.grad(lambda x: stepped(x) + branched(x) + repeated(x)))(X),
    "compile without buffers": lambda: pe.compile(pe.grad(f), Techniques(preallocate=False))(X),
    "draw": lambda: pe.draw(f, X),
    "gradcheck": lambda: pe.gradcheck(f, X),
    "training": lambda: trained(replay=True),
    "training, eagerly": lambda: trained(replay=False),
}


def interrupted_at(number: int, call: Callable[[], Any]) -> list[bool]:
    """Call it, raising at the place of this number; for each place before whether it is one of the state's blocks."""
    places: list[bool] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        # An exception in a generator that is being discarded is printed and forgotten.
        if event in ("call", "c_return") and not frame.f_code.co_flags & CO_GENERATOR:
            places.append(frame.f_code.co_filename == state.__file__ and frame.f_code.co_name != "restored")
            if len(places) == number:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return places


@pytest.mark.campaign
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_no_state(name: str, rng: np.random.Generator) -> None:
    call = CALLS[name]
    call()
    before, expected = dict(STATE.__dict__), pe.grad(f)(X)
    places = np.array(interrupted_at(0, call))
    tried = {
        *np.flatnonzero(places).tolist(),
        *rng.integers(0, len(places), settings.default.max_examples).tolist(),
    }
    for place in sorted(tried):
        interrupted_at(place + 1, call)
        assert before == STATE.__dict__, f"interrupted at {place} of {len(places)}"
        assert gc.isenabled()
        np.testing.assert_array_equal(pe.grad(f)(X), expected)
        np.testing.assert_allclose(pe.compile(pe.grad(f))(X), expected, rtol=1e-12)
    call()
