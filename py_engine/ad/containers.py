"""Nested containers of arrays: taken apart into their leaves, and put together again.

A container is a tuple, list, dict or NamedTuple, nested to any depth; None is a container of nothing. All else (an
array, a tensor, a number) is a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from types import NoneType
from typing import Any

import numpy as np

from py_engine.ad.tensor import Tensor
from py_engine.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Structure:
    """What a container is without its leaves; hashable, and equal for containers of the same types and keys.

    Attributes:
        kind: the type, or None for a leaf.
        keys: of a dict its keys, of a NamedTuple its fields, both in their order.
        children: the structures of its items.
        key_kinds: what tells the keys 1, 1.0 and True apart, which are equal; empty where all are strings.
    """

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    key_kinds: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind is None:
            return "an array"
        if self.kind is NoneType:
            return "None"
        if self.kind is dict:
            return f"a dict with the keys {', '.join(map(repr, self.keys))}" if self.keys else "an empty dict"
        return f"a {self.kind.__name__} of {len(self.children)}"


LEAF = Structure()


def kind_of(value: Any) -> Any:
    """Return what of a hashable value `==` does not see: types, and the signs of zeros.

    >>> kind_of(1) == kind_of(True), kind_of((0.0,)) == kind_of((-0.0,)), kind_of(2.5) == kind_of(2.5)
    (False, False, True)
    """
    if isinstance(value, Number):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return type(value), tuple(map(kind_of, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(kind_of, value))
    return type(value)


_PLAIN = frozenset({Tensor, np.ndarray, float, int})


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a container, from left to right, and its structure.

    >>> leaves, structure = flatten({"weights": [1.0, 2.0], "bias": 3.0})
    >>> leaves
    [1.0, 2.0, 3.0]
    >>> unflatten(structure, [4.0, 5.0, 6.0])
    {'weights': [4.0, 5.0], 'bias': 6.0}
    """
    if value.__class__ in _PLAIN:  # nearly always
        return [value], LEAF
    leaves: list[Any] = []
    return leaves, _structure(value, leaves)


def _structure(value: Any, leaves: list[Any]) -> Structure:
    kind = _kind(value)
    if kind is None:
        leaves.append(value)
        return LEAF
    if kind is NoneType:
        return Structure(kind)
    if kind is dict:
        kinds = () if all(key.__class__ is str for key in value) else tuple(map(kind_of, value))
        return Structure(kind, tuple(value), tuple([_structure(item, leaves) for item in value.values()]), kinds)
    return Structure(kind, getattr(kind, "_fields", ()), tuple([_structure(item, leaves) for item in value]))


def _kind(value: Any) -> type | None:
    """The type that a container is rebuilt as, or None for a leaf."""
    if value is None:
        return NoneType
    if isinstance(value, tuple):
        return type(value) if hasattr(value, "_fields") else tuple
    return list if isinstance(value, list) else dict if isinstance(value, dict) else None


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Return the container of this structure with these leaves.

    Raises:
        ShapeError: there are too many or too few leaves.
    """
    if structure is LEAF and leaves.__class__ is list and len(leaves) == 1:
        return leaves[0]
    rest = list(leaves)
    if len(rest) != count(structure):
        raise ShapeError(f"unflatten: {structure} has {count(structure)} leaves in all, got {len(rest)}")
    return _filled(structure, iter(rest))


def _filled(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    if kind is NoneType:
        return None
    items = [_filled(child, leaves) for child in structure.children]
    if kind is dict:
        return dict(zip(structure.keys, items, strict=True))
    return items if kind is list else kind(*items) if hasattr(kind, "_fields") else tuple(items)


def count(structure: Structure) -> int:
    """Return the number of leaves."""
    return 1 if structure.kind is None else sum(count(child) for child in structure.children)


def paths(structure: Structure) -> list[str]:
    """Return where each leaf is, as Python would index it: `['layers'][1].weight`; empty for a lone leaf.

    >>> paths(flatten({"layers": [1.0, (2.0, 3.0)]})[1])
    ["['layers'][0]", "['layers'][1][0]", "['layers'][1][1]"]
    """
    if structure.kind is None:
        return [""]
    return [
        step + rest for step, child in zip(_steps(structure), structure.children, strict=True) for rest in paths(child)
    ]


def _steps(structure: Structure) -> Sequence[str]:
    if structure.kind is dict:
        return [f"[{key!r}]" for key in structure.keys]
    if structure.keys:
        return [f".{name}" for name in structure.keys]
    return [f"[{i}]" for i in range(len(structure.children))]


def flatten_as(value: Any, structure: Structure, name: str) -> list[Any]:
    """Return the leaves of a container that must have this structure, in its order.

    Args:
        value: the container; a dict may have its keys in another order.
        structure: what it must be.
        name: of the container, for messages.

    Raises:
        ShapeError: it is another one; names the place, what was expected and what was found.
    """
    kind = structure.kind
    if kind is None:
        return [value]  # whatever it is: the caller knows what an array may be made of
    found = _kind(value)
    same = found is kind and (
        set(value) == set(structure.keys) if kind is dict else kind is NoneType or len(value) == len(structure.children)
    )
    if not same:
        what = f"one leaf ({type(value).__name__})" if found is None else str(_structure(value, []))
        raise ShapeError(f"{name}: expected {structure}, got {what}")
    if kind is NoneType:
        return []
    items = [value[key] for key in structure.keys] if kind is dict else value
    return [
        leaf
        for item, child, step in zip(items, structure.children, _steps(structure), strict=True)
        for leaf in flatten_as(item, child, name + step)
    ]
