"""What the engine does in this thread: whether it traces, keeps the graph or is inside a transform."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any


class _State(threading.local):
    trace: list[Any] | None = None  # the tensors, and nodes of several results, made so far
    symbolic: bool = False  # ops made now have a shape and a dtype, and no values
    grad_enabled: bool = True  # ops made now can be differentiated
    differentiating: bool = False  # inside a function that grad() was given
    watched: list[Any] | None = None  # while a function is traced: what it took the values of, see mutation.Watch
    techniques: Any = None  # those of the tape that is bound or run: tapes inside it have the same
    scope: str = ""  # the layer whose ops are being made, for messages


STATE = _State()

LEVELS = count(2)
"""The levels of transforms, in the order in which they begin; 1 is that of `backward()`."""


class entering:
    """Set fields of the thread's state inside a `with` block; at its end they are what they were before.

    What takes microseconds in all sets and restores them itself, in a third of the time.
    """

    __slots__ = ("fields", "outer")

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __enter__(self) -> None:
        self.outer = {name: getattr(STATE, name) for name in self.fields}
        STATE.__dict__.update(self.fields)

    def __exit__(self, *_: object) -> None:
        STATE.__dict__.update(self.outer)


def inside_transform() -> bool:
    """Return whether a function is being differentiated or traced in this thread."""
    return STATE.differentiating or STATE.trace is not None


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Label the ops made inside with the layer `name`; nested scopes are joined by a slash."""
    with entering(scope=f"{STATE.scope}/{name}" if STATE.scope else name):
        yield


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without a graph: results made inside cannot be differentiated."""
    with entering(grad_enabled=False):
        yield
