"""What the engine does in this thread: whether it traces, keeps the graph or is inside a transform."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from functools import wraps
from itertools import count
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class _State(threading.local):
    def __init__(self) -> None:  # in each thread
        self.trace: list[Any] | None = None  # the tensors, and nodes of several results, made so far
        self.symbolic = False  # ops made now have a shape and a dtype, and no values
        self.grad_enabled = True  # ops made now can be differentiated
        self.differentiating = False  # inside a function that grad() was given
        self.given: Any = None  # while ops are collected: the arrays they read, see Given
        self.watched: list[Any] | None = None  # while a function is traced: what it took the values of, see Watch
        self.techniques: Any = None  # of the function or tape that is traced, bound or run: tapes inside have the same
        self.one_blas_thread = False  # what is bound now runs only while BLAS has one thread
        self.winograd = (
            False  # what is bound now may compute convolutions by Winograd's algorithm, which rounds otherwise
        )
        self.updates: list[Any] | None = None  # in a training step: new values of what is not trained
        self.scope = ""  # the layer whose ops are being made, for messages


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
        self.outer: Any = None  # what was before, and the same of a block around this one that one object entered

    def __enter__(self) -> Any:
        self.outer = {name: getattr(STATE, name) for name in self.fields}, self.outer
        STATE.__dict__.update(self.fields)

    def __exit__(self, *_: object) -> None:
        before, self.outer = self.outer
        STATE.__dict__.update(before)

    def __call__(self, function: F) -> F:
        """Return `function` as one that is called in this state: use as a decorator."""

        @wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            with copy(self):  # a function may call itself
                return function(*args, **kwargs)

        return cast(F, entered)


class collecting(entering):
    """`entering` with a new list in the field `name`: the block's variable."""

    __slots__ = ("name",)

    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(**{name: []}, **fields)
        self.name = name

    def __enter__(self) -> list[Any]:
        super().__enter__()
        return self.fields[self.name]  # type: ignore[no-any-return]


def restoring(function: F) -> F:
    """Return `function` so that the thread's state is restored whatever ends a call, ctrl-C at any moment included.

    `entering` alone cannot do that: an interrupt may come between the end of its block and the restoring. All functions
    that users call, and that enter a state, are wrapped in this. None uses a generator for that (`contextmanager`): one
    that is interrupted restores its own part later, when the traceback is forgotten.
    """

    @wraps(function)
    def restored(*args: Any, **kwargs: Any) -> Any:
        outer = STATE.__dict__.copy()
        try:
            return function(*args, **kwargs)
        finally:
            STATE.__dict__.update(outer)  # one call in C: no interrupt comes before it

    return cast(F, restored)


def inside_transform() -> bool:
    """Return whether a function is being differentiated or traced in this thread."""
    return STATE.differentiating or STATE.trace is not None


def update(parameter: Any, value: Any) -> None:
    """Give a leaf the values of a tensor: at once, or, where updates are collected, by who collects them."""
    if STATE.updates is not None:
        STATE.updates.append((parameter, value))
    elif parameter.data is not None and value.data is not None:
        parameter.data[...] = value.data


class scope(entering):
    """Label the ops made inside with the layer `name`; nested scopes are joined by a slash."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __enter__(self) -> None:
        self.fields = {"scope": f"{STATE.scope}/{self.name}" if STATE.scope else self.name}
        super().__enter__()


class no_grad(entering):
    """Compute without a graph: results made inside cannot be differentiated."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(grad_enabled=False)
