"""The bridge's modules form layers, as CONTRIBUTING.md lists them: imports are at the top, and point down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = re.search(r"^\| layer of the bridge \|.*?\n\n", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S)
assert TABLE
LAYERS = [re.findall(r"`([a-z_.*]+)`", row.split("|")[2]) for row in TABLE[0].strip().splitlines()[2:]]
"""From the lowest to the highest: patterns of module names inside `bridge`."""

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
    for path in sorted((ROOT / "bridge").rglob("*.py"))
}
EMPTY = {"bridge", "bridge.adapters", "bridge.libjulia"}
"""Packages whose own file imports nothing."""


def imports(source: str, late: bool) -> Iterator[str]:
    """The bridge's modules that a module imports at its top, or only when something is called."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if (id(node) in inside) != late:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (name for name in (whole, node.module) if name in MODULES and name not in EMPTY)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def in_strings(source: str) -> set[str]:
    """The bridge's modules that "module:name" texts of a module name."""
    texts = (str(node.value) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {text.partition(":")[0] for text in texts if re.fullmatch(r"bridge[\w.]*:\w+", text)}


def layer(name: str) -> int:
    short = name.removeprefix("bridge.")
    (found,) = [i for i, patterns in enumerate(LAYERS) if any(fnmatch(short, pattern) for pattern in patterns)]
    return found


def test_every_module_is_in_one_layer_and_every_pattern_names_a_module() -> None:
    assert len(LAYERS) == 8
    assert not any([*imports(MODULES[name], late=False)] for name in EMPTY)
    for name in MODULES.keys() - EMPTY:
        layer(name)
    for pattern in (pattern for patterns in LAYERS for pattern in patterns):
        assert any(fnmatch(name, f"bridge.{pattern}") for name in MODULES), pattern


@pytest.mark.parametrize("name", sorted(MODULES.keys() - EMPTY))
def test_a_module_imports_lower_layers_only_and_at_its_top(name: str) -> None:
    assert {other for other in imports(MODULES[name], late=False) if layer(other) > layer(name)} == set()
    assert [*imports(MODULES[name], late=True)] == []


def test_only_the_registry_imports_late_and_what_it_names_is_lower() -> None:
    computed = {name for name, source in MODULES.items() if re.search(r"(import_module|__import__)\((?!\")", source)}
    assert computed == {"bridge.registry"}
    named = {name: found for name, source in MODULES.items() if (found := in_strings(source))}
    assert named.keys() == {"bridge.registry"}
    assert "bridge.adapters.torch" in named["bridge.registry"] and "bridge.libjulia.engine" in named["bridge.registry"]
    assert {other for other in named["bridge.registry"] if layer(other) >= layer("bridge.registry")} == set()


def test_no_modules_import_each_other() -> None:
    graph = {name: {*imports(source, late=False), *imports(source, late=True)} for name, source in MODULES.items()}
    graph["bridge.registry"] |= in_strings(MODULES["bridge.registry"])
    assert "bridge.session" in graph["bridge.registry"] and "bridge.worker" in graph["bridge.julia.remote"]
    assert set(TopologicalSorter(graph).static_order()) == set(MODULES)


@pytest.mark.parametrize(
    ("source", "late"),
    [
        ("from bridge import worker", False),
        ("from bridge.worker import Worker", False),
        ("import bridge.worker as w", False),
        ("class C:\n    try:\n        from bridge import worker\n    except ImportError:\n        pass", False),
        ("if TYPE_CHECKING:\n    from bridge.worker import Worker", False),
        ("def f():\n    from bridge.worker import Worker", True),
        ("class C:\n    async def f(self):\n        if self:\n            import bridge.worker", True),
    ],
)
def test_an_import_is_seen_wherever_it_is(source: str, late: bool) -> None:
    assert set(imports(source, late)) == {"bridge.worker"} and not [*imports(source, not late)]
    graph = {name: {*imports(text, late=False)} for name, text in MODULES.items()} | {"bridge.spec": {"bridge.worker"}}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_a_module_that_a_row_names_is_seen() -> None:
    assert in_strings('Registered("x", "bridge.julia:X", "see bridge.worker")') == {"bridge.julia"}
