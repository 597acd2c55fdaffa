"""Containers: taken apart and put together again, and the places of their leaves."""

from __future__ import annotations

import doctest
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import py_engine as pe
from py_engine.ad import containers
from py_engine.ad.containers import LEAF, flatten, flatten_as, paths, unflatten
from py_engine.errors import ShapeError


class Layer(NamedTuple):
    weight: object
    bias: object


nested = st.recursive(
    st.floats(allow_nan=False) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.builds(Layer, inner, inner)
    ),
    max_leaves=12,
)


def same(a, b):
    """Equal, and of the same types all the way down (a NamedTuple equals a tuple for Python)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@given(nested)
def test_what_was_taken_apart_is_put_together_again(value):
    leaves, structure = flatten(value)
    assert same(unflatten(structure, leaves), value)
    assert flatten_as(value, structure, "x") == leaves


@given(nested)
def test_the_path_of_a_leaf_leads_to_it(value):
    leaves, structure = flatten(value)
    found = [eval("value" + path, {"value": value}) for path in paths(structure)]
    assert len(found) == len(leaves)
    assert all(a is b for a, b in zip(found, leaves, strict=True))


@given(nested, nested)
def test_structures_are_equal_exactly_where_the_containers_are_alike(a, b):
    (_, first), (_, second) = flatten(a), flatten(b)
    marks = [["leaf"] * len(flatten(value)[0]) for value in (a, b)]
    alike = same(unflatten(first, marks[0]), unflatten(second, marks[1]))
    assert (first == second) == alike
    assert not alike or hash(first) == hash(second)


def test_a_named_tuple_without_fields_is_one_too():
    class Nothing(NamedTuple):
        pass

    leaves, structure = flatten([Nothing(), 1.0])
    assert same(unflatten(structure, leaves), [Nothing(), 1.0])


def test_arrays_tensors_and_numbers_are_leaves():
    for leaf in (np.ones(3), pe.tensor([1.0]), 2.0, 3, "name", object(), np.float32(1)):
        leaves, structure = flatten(leaf)
        assert leaves[0] is leaf and structure == LEAF
        assert unflatten(structure, [leaf]) is leaf
        assert paths(structure) == [""]


def test_fields_of_a_named_tuple_are_named():
    _, structure = flatten({"layers": [Layer(1.0, {"b": 2.0}), None]})
    assert paths(structure) == ["['layers'][0].weight", "['layers'][0].bias['b']"]


def test_a_dict_may_have_its_keys_in_another_order():
    leaves, structure = flatten({"a": 1.0, "b": [2.0, 3.0]})
    assert flatten_as({"b": [2.0, 3.0], "a": 1.0}, structure, "x") == leaves


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1.0}, r"x: expected a dict with the keys 'a', 'b', got a dict with the keys 'a'"),
        ({"a": 1.0, "b": [1.0]}, r"x\['b'\]: expected a list of 2, got a list of 1"),
        ({"a": 1.0, "b": (1.0, 2.0)}, r"x\['b'\]: expected a list of 2, got a tuple of 2"),
        ({"a": 1.0, "b": None}, r"x\['b'\]: expected a list of 2, got None"),
        (np.ones(2), r"x: expected a dict with the keys 'a', 'b', got one leaf \(ndarray\)"),
    ],
)
def test_another_structure_is_refused_with_its_place(value, message):
    _, structure = flatten({"a": 1.0, "b": [2.0, 3.0]})
    with pytest.raises(ShapeError, match=message):
        flatten_as(value, structure, "x")


@pytest.mark.parametrize("leaves", [[1.0], [1.0, 2.0, 3.0]])
def test_the_number_of_leaves_must_fit(leaves):
    _, structure = flatten((1.0, 2.0))
    with pytest.raises(ShapeError, match=rf"a tuple of 2 has 2 leaves in all, got {len(leaves)}"):
        unflatten(structure, leaves)


def test_the_examples_are_true():
    assert doctest.testmod(containers).failed == 0


EQUAL_KEYS = [1, 1.0, True, np.int64(1), np.float32(1), 1 + 0j]
EQUAL_KEYS += [(1,), (1.0,), (True,), ((1,),), ((True,),), 0.0, -0.0, (0.0,), (-0.0,), 0, False]
EQUAL_KEYS += [frozenset({1}), frozenset({True})]


def test_containers_whose_keys_are_equal_but_not_the_same_have_other_structures():
    for i, a in enumerate(EQUAL_KEYS):
        for k, b in enumerate(EQUAL_KEYS):
            assert (flatten({a: 1.0})[1] == flatten({b: 1.0})[1]) == (i == k), (a, b)
            assert (flatten([{"x": {a: 1.0}}])[1] == flatten([{"x": {b: 1.0}}])[1]) == (i == k), (a, b)


def test_a_compiled_function_is_traced_for_each_type_of_the_keys():
    def function(items):
        return sum(len(repr(key)) * x for key, x in items.items())

    compiled, x = pe.compile(function), np.ones(2)
    for _ in range(2):
        for key in EQUAL_KEYS:
            np.testing.assert_array_equal(compiled({key: x, "other": x}), (len(repr(key)) + 7) * x)
    assert len(compiled.tapes) == len(EQUAL_KEYS)
