"""Pictures of graphs: well-formed SVG that shows every op, and in which nothing overlaps or lies outside."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import py_engine as pe
from py_engine.errors import DTypeError, TraceError

SVG = "{http://www.w3.org/2000/svg}"


def mlp(parameters, x):
    hidden = np.tanh(x @ parameters["w1"] + parameters["b1"])
    return np.sum(hidden @ parameters["w2"])


PARAMETERS = {"w1": np.ones((3, 4)), "b1": np.ones(4), "w2": np.ones((4, 2))}
CASES = {
    "a chain": (lambda x: np.sum(np.square(np.sin(x))) * 0.5, (np.ones(3),)),
    "a network and its gradient": (pe.value_and_grad(mlp), (PARAMETERS, np.ones((5, 3)))),
    "a result that depends on nothing": (lambda x: (x, 3.0), (np.ones(2),)),
    "an array that is captured": (lambda x: x * np.arange(4.0), (np.ones(4),)),
    "long edges": (lambda x: np.exp(np.sin(np.cos(np.tanh(x)))) + x, (np.ones(2),)),
    "many inputs": (lambda *xs: sum(xs), [np.ones(2)] * 8),
}


def boxes(picture):
    root = ElementTree.fromstring(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    found = []
    for group in root.findall(f"{SVG}g"):
        for rect in group.findall(f"{SVG}rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
            found.append((x, y, w, h, [text.text for text in group.findall(f"{SVG}text")]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_boxes_lie_inside_and_apart(name):
    function, args = CASES[name]
    found = boxes(pe.draw(function, *args))
    assert found
    for (x1, y1, w1, h1, a), (x2, y2, w2, h2, b) in itertools.combinations(found, 2):
        assert x1 + w1 <= x2 or x2 + w2 <= x1 or y1 + h1 <= y2 or y2 + h2 <= y1, (a, b)


def test_each_op_stands_below_what_it_needs_with_its_shape():
    function, args = CASES["a chain"]
    shown = {texts[0]: (y, texts[1]) for _, y, _, _, texts in boxes(pe.draw(function, *args))}
    assert shown["x"][1] == "float64 (3,)"
    order = [shown[name][0] for name in ("x", "sin", "square", "mul(·, 0.5)")]
    assert order == sorted(order)
    assert shown["sum"][1] == shown["mul(·, 0.5)"][1] == "float64"


def test_inputs_in_containers_are_named_by_their_place():
    function, args = CASES["a network and its gradient"]
    names = {texts[0] for *_, texts in boxes(pe.draw(function, *args))}
    assert {"x[0]['w1']", "x[0]['b1']", "x[0]['w2']", "x[1]"} <= names


def test_without_simplification_the_graph_is_as_it_was_written():
    def twice(x):
        return np.sin(x) + np.sin(x)

    def sines(simplified):
        return sum(t[0] == "sin" for *_, t in boxes(pe.draw(twice, np.ones(2), simplified=simplified)))

    assert (sines(True), sines(False)) == (1, 2)


def test_numbers_are_taken_as_compiled_functions_take_them():
    assert "float32" in pe.draw(lambda x, rate: x * rate, np.ones(3, np.float32), 0.5)
    with pytest.raises(DTypeError, match="MaskedArray"):
        pe.draw(lambda x: x, np.ma.array(np.ones(3), mask=True))


def test_text_is_escaped():
    picture = pe.draw(lambda x: x["<&>"] * 2, {"<&>": np.ones(2)})
    assert any("<&>" in texts[0] for *_, texts in boxes(picture))


def test_notebooks_show_it():
    picture = pe.draw(lambda x: x * 2, np.ones(2))
    assert picture._repr_svg_() == picture


def test_a_branch_on_a_value_is_refused():
    with pytest.raises(TraceError):
        pe.draw(lambda x: x if x[0] > 0 else -x, np.ones(2))


def test_what_is_too_large_for_a_picture_is_refused():
    def long(x):
        for k in range(500):
            x = np.sin(x) * k
        return x

    with pytest.raises(TraceError, match=r"the graph has 1000 ops, more than the 400"):
        pe.draw(long, np.ones(2), simplified=False)
