"""The numpy engine's modules form layers, as CONTRIBUTING.md lists them: imports point down, and never in a circle."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = [
    re.findall(r"`([a-z_.*]+)`", row.split("|")[2])
    for row in re.search(r"^\| layer \|.*?\n\n", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S)[0]
    .strip()
    .splitlines()[2:]
]
"""From the lowest to the highest: patterns of module names inside `py_engine`."""


def name_of(path: Path) -> str:
    """`py_engine/ad/op.py` is `ad.op`, the folder `py_engine/network` is `network`, `py_engine` the empty name."""
    parts = path.relative_to(ROOT / "py_engine").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path.read_text("utf-8") for path in sorted((ROOT / "py_engine").rglob("*.py"))}


@cache
def imports(source: str, typing_only: bool = False) -> set[str]:
    """The engine's modules that a module imports: at its top, in functions and classes, in any branch.

    With `typing_only` those that it imports for annotations, under `if TYPE_CHECKING:`, and without it all others.
    """
    tree = ast.parse(source)
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if (id(node) in guarded) != typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in PATHS else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {PATHS[name] for name in found if name in PATHS}


PATHS = {f"py_engine.{name}" if name else "py_engine": name for name in MODULES}

EMPTY = {"ad", "ad.compile", "ad.control"}
"""Packages whose own file imports nothing."""


def layer(name: str) -> int:
    (found,) = [i for i, patterns in enumerate(LAYERS) if any(fnmatch(name, pattern) for pattern in patterns)]
    return found


def test_every_module_is_in_one_layer_and_every_pattern_names_a_module() -> None:
    assert len(LAYERS) > 4
    assert not any(imports(MODULES[name]) for name in EMPTY)
    for name in MODULES.keys() - EMPTY - {""}:
        assert sum(fnmatch(name, pattern) for patterns in LAYERS for pattern in patterns) == 1, name
    for patterns in LAYERS:
        for pattern in patterns:
            assert any(fnmatch(name, pattern) for name in MODULES), pattern


@pytest.mark.parametrize("name", sorted(MODULES.keys() - EMPTY - {""}))
def test_a_module_imports_nothing_of_a_higher_layer_and_never_the_whole_engine(name: str) -> None:
    found = imports(MODULES[name])
    assert "" not in found
    assert {other for other in found - EMPTY if layer(other) > layer(name)} == set()


def test_no_modules_import_each_other() -> None:
    graph = {name: imports(source) for name, source in MODULES.items()}
    assert "ad.op" in graph["ad.reverse"] and "ad.ops.elementary" in graph["ad.ops"]
    order = [*TopologicalSorter(graph).static_order()]
    assert set(order) == set(MODULES)


def test_only_the_tensor_names_higher_layers_in_annotations() -> None:
    upward = {
        (name, other)
        for name, source in MODULES.items()
        for other in imports(source, typing_only=True)
        if layer(other) >= layer(name)
    }
    assert upward == {("ad.tensor", "ad.op"), ("ad.tensor", "ad.operators")}


@pytest.mark.parametrize(
    "source",
    [
        "from py_engine.ad.compile import tape",
        "from py_engine.ad.compile.tape import Tape",
        "import py_engine.ad.compile.tape",
        "def f():\n    from py_engine.ad.compile.tape import Tape",
        "class C:\n    def f(self):\n        if self:\n            import py_engine.ad.compile.tape as t",
        "try:\n    from py_engine.ad.compile import tape\nexcept ImportError:\n    pass",
    ],
)
def test_an_import_is_seen_wherever_it_is(source: str) -> None:
    assert imports(source) == {"ad.compile.tape"}
    with pytest.raises(CycleError):
        TopologicalSorter({**{n: imports(s) for n, s in MODULES.items()}, "ad.state": imports(source)}).prepare()


# What passes know of ops ----------------------------------------------------------------------------------

PASSES = [x for x in MODULES if x and x not in EMPTY and 2 <= layer(x) <= 5 and x != "ad.compile.fusion"]
PASSES.append("network.steps")
"""All that works on programs and graphs, but for fusion, whose patterns are of certain ops."""


def ops_told_apart(source: str) -> list[str]:
    """The comparisons of an op with one of the table: what tells them apart belongs into a field of the record."""

    def is_op(node: ast.expr) -> bool:
        return (getattr(node, "attr", None) or getattr(node, "id", None)) == "op"

    def is_free(node: ast.expr) -> bool:
        return is_op(node) or (isinstance(node, ast.Constant) and node.value is None)

    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and any(map(is_op, (node.left, *node.comparators)))
        and not all(map(is_free, (node.left, *node.comparators)))
    ]


@pytest.mark.parametrize("name", PASSES)
def test_passes_ask_the_record_and_not_which_op_it_is(name: str) -> None:
    assert {"ad.program", "ad.reverse", "ad.compile.tape", "ad.compile.reassociation", "ad.control.scan"} <= set(PASSES)
    assert ops_told_apart(MODULES[name]) == []


def test_a_comparison_of_ops_is_seen() -> None:
    assert ops_told_apart("if x.op is RESHAPE or op in (SUM, MAX) or op is not None or a.op is b.op: pass") == [
        "x.op is RESHAPE",
        "op in (SUM, MAX)",
    ]
    assert ops_told_apart(MODULES["ad.compile.fusion"])
