"""The modules of the experiments form layers, as CONTRIBUTING.md lists them: imports point down, also late ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
TABLE = re.search(r"^\| layer of the experiments \|.*?\n\n(.*?)\n\n", CONTRIBUTING, re.M | re.S)
assert TABLE
LAYERS = [re.findall(r"`([a-z_.*]+)`", row.split("|")[2]) for row in TABLE[0].splitlines() if row.startswith("| ")][1:]
"""From the lowest to the highest: patterns of module names inside `experiments`."""
ASIDE = re.findall(r"`([a-z_]+)`", TABLE[1])
"""Programs and folders that are in no layer."""


def short(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "experiments").with_suffix("").parts).removesuffix(".__init__")


MODULES = {short(path): path.read_text("utf-8") for path in sorted((ROOT / "experiments").rglob("*.py"))}
NAMED = sorted(name for name in MODULES if name != "__init__" and name.partition(".")[0] not in ASIDE)

UPWARDS = {("quantities", "report.microbenchmarks")}
"""Late imports of a higher layer: papers' files name quantities, some of which are computed as reports do."""


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """The modules of the experiments that a module imports, but for the types alone, and whether it does so late."""
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, late = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending += [(child, late) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "experiments":
            inside = str(node.module).partition(".")[2]
            for alias in node.names:
                whole = f"{inside}.{alias.name}".removeprefix(".")
                name = whole if whole in MODULES else inside
                if name in MODULES:
                    yield name, late
        elif isinstance(node, ast.Import):
            names = (alias.name.removeprefix("experiments.") for alias in node.names)
            yield from ((name, late) for name in names if name in MODULES)


def layer(name: str) -> int:
    (found,) = [i for i, patterns in enumerate(LAYERS) if any(fnmatch(name, pattern) for pattern in patterns)]
    return found


def test_every_module_is_in_one_layer_or_aside_and_every_pattern_names_a_module() -> None:
    assert len(LAYERS) == 9
    for name in NAMED:
        layer(name)
    for pattern in (pattern for patterns in LAYERS for pattern in patterns):
        assert any(fnmatch(name, pattern) for name in MODULES), pattern
    for name in ASIDE:
        assert (ROOT / "experiments" / name).is_dir() or name in MODULES, name


@pytest.mark.parametrize("name", NAMED)
def test_a_module_imports_lower_layers_only(name: str) -> None:
    others = {(other, late) for other, late in imports(MODULES[name]) if other in NAMED}
    assert {other for other, late in others if layer(other) > layer(name) and not late} == set()
    above = {(name, other) for other, late in others if layer(other) > layer(name)}
    assert above == {pair for pair in UPWARDS if pair[0] == name}


def test_no_modules_import_each_other_at_their_top() -> None:
    graph = {name: {other for other, late in imports(source) if not late} for name, source in MODULES.items()}
    assert "papers" in graph["sweep"] and "sweep" in dict(imports(MODULES["cli.runs"]))
    list(TopologicalSorter({name: others - {name} for name, others in graph.items()}).static_order())


def test_an_import_is_seen_wherever_it_is() -> None:
    assert list(imports("from experiments import papers")) == [("papers", False)]
    assert list(imports("def f():\n    import experiments.papers")) == [("papers", True)]
    assert not list(imports("if TYPE_CHECKING:\n    from experiments.papers import Paper"))
