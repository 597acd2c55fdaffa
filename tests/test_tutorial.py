"""The tutorial's examples run, and print what it says; so do the examples in docstrings."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import py_engine
from bridge.layers import LAYERS
from bridge.libjulia.find import Julia
from experiments import reference
from py_engine.ad.op import CONSTANT, TABLE
from py_engine.errors import DTypeError

TUTORIAL = Path(py_engine.__file__).with_name("TUTORIAL.md")
GUIDES = {path.stem: path for path in reference.GUIDES}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
MODULES = sorted(module.name for module in pkgutil.walk_packages(py_engine.__path__, "py_engine."))


def test_the_examples_print_what_the_tutorial_says() -> None:
    # Not IGNORE_EXCEPTION_DETAIL: what errors say is in the tutorial.
    result = doctest.testfile(str(TUTORIAL), module_relative=False, optionflags=doctest.ELLIPSIS, verbose=False)
    assert result.attempted > 30
    assert result.failed == 0


OF_PYTHON = [name for name, path in GUIDES.items() if "```pycon" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", OF_PYTHON)
def test_the_examples_of_the_guides_print_what_they_say(name: str) -> None:
    result = doctest.testfile(str(GUIDES[name]), module_relative=False, optionflags=doctest.ELLIPSIS, verbose=False)
    assert result.attempted > 5
    assert result.failed == 0


def names_of(guide: str) -> list[tuple[str, list[str]]]:
    """The rows of a guide's table of names: theirs, and ours."""
    rows = re.findall(r"^\| `([\w.@!]+)` \| (.*?) \|", GUIDES[guide].read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(rows) > 15 and len({theirs for theirs, _ in rows}) == len(rows)
    return [(theirs, re.findall(r"`(.*?)`", ours)) for theirs, ours in rows]


def found(name: str) -> object:
    """What a dotted name stands for. Raises `ImportError` or `AttributeError`."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            thing: object = importlib.import_module(".".join(parts[:end]))
            for part in parts[end:]:
                thing = getattr(thing, part)
            return thing
    raise ImportError(name)


@pytest.mark.parametrize("guide", OF_PYTHON)
def test_every_name_of_ours_in_a_guide_exists(guide: str) -> None:
    for _, ours in names_of(guide):
        assert all(name.startswith("py_engine.") and found(name) is not None for name in ours)
    with pytest.raises(AttributeError):
        found("py_engine.no_such_thing")


@pytest.mark.parametrize("guide", OF_PYTHON)
def test_every_name_of_theirs_in_a_guide_exists(guide: str) -> None:
    package = names_of(guide)[0][0].partition(".")[0]
    pytest.importorskip(package)
    for theirs, _ in names_of(guide):
        assert theirs.startswith(f"{package}.")
        found(theirs)


def test_every_name_of_ours_in_the_guide_for_zygote_is_exported() -> None:
    source = "".join(path.read_text("utf-8") for path in (GUIDES["COMING_FROM_ZYGOTE"].parent / "src").glob("*.jl"))
    exported = set(", ".join(re.findall(r"^export (.*)$", source, flags=re.MULTILINE)).split(", "))
    ours = {name for _, names in names_of("COMING_FROM_ZYGOTE") for name in names}
    assert len(ours) > 15 and ours <= exported


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings_are_right(name: str) -> None:
    module = importlib.import_module(name)
    names = {**vars(py_engine.ops), **vars(py_engine), "np": np, "pe": py_engine, **vars(module)}
    assert doctest.testmod(module, extraglobs=names, optionflags=FLAGS).failed == 0


@pytest.mark.parametrize("program", PROGRAMS, ids=["py_engine", "torch"])
def test_the_programs_with_julia_run(program: str, julia: Julia) -> None:
    if "torch" in program:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "0." in done.stdout


def test_the_pages_show_the_tutorial_every_function_and_every_op(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    first = reference.build(tmp_path / "pages")
    assert first.is_file()
    package = (tmp_path / "pages" / "py_engine.html").read_text(encoding="utf-8")
    assert "Rules of your own" in package
    assert all(f'id="{name}"' in package for name in py_engine.__all__ if name != "ops")
    ops = (tmp_path / "pages" / "py_engine" / "ad" / "ops.html").read_text(encoding="utf-8")
    assert all(f">{name}</" in ops for name in TABLE)
    layers = (tmp_path / "pages" / "bridge" / "spec.html").read_text(encoding="utf-8")
    assert all(f">{op}</" in layers for op in LAYERS)
    network = (tmp_path / "pages" / "py_engine" / "network.html").read_text(encoding="utf-8")
    bases = re.findall(r"class\s+\w+\(py_engine\.network\.([a-z_]+\.\w+)", re.sub(r"<[^>]+>", "", network))
    assert set(bases) <= {
        "convolution.Windowed",
        "convolution.AvgPool",
        "optimizers.WithMomentum",
    }  # all others are on the page, with the arguments of who inherits them
    for path in GUIDES.values():
        page = (tmp_path / "pages" / reference.page_name(path)).read_text(encoding="utf-8")
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert f">{title}<" in page and "<table>" in page and "What to look out for" in page
        assert reference.page_name(path) in first.read_text(encoding="utf-8")
    assert "Tutorial" not in (py_engine.__doc__ or "")  # the docstring itself is as it was
    assert not hasattr(py_engine.ops, "__all__")


def test_the_table_of_layers_has_every_key_with_what_it_may_be() -> None:
    lines = reference.layer_table().splitlines()
    for op, kind in LAYERS.items():
        first = next(number for number, line in enumerate(lines) if line.startswith(f"| `{op}` |"))
        keys = [key for key in kind.model_fields if key not in ("id", "op")]
        rows = [line.split(" | ") for line in lines[first + 1 : first + 1 + len(keys)]]
        assert {row[1] for row in rows} == {f"`{key}`" for key in keys}
    assert "|  | `units` | an integer from 1 to 16777216 |  |" in lines
    assert "|  | `bias` | true or false | `true` |" in lines


def test_pages_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    (tmp_path / "pages").write_text("in the way", encoding="utf-8")
    with pytest.raises(reference.DocumentationError, match="can't be written"):
        reference.build(tmp_path / "pages")


def test_the_table_of_numpys_functions_says_what_becomes_of_each():
    rows = dict(line.strip("| ").split(" | ") for line in reference.numpy_table().splitlines()[2:])
    assert rows["`numpy.cumsum`"] == rows["`numpy.linalg.solve`"] == "derivatives of any order"
    assert rows["`numpy.argsort`"] == rows["`numpy.floor`"] == rows["`numpy.isclose`"] == "constant"
    depends = "the shape of its result depends on values"
    assert rows["`numpy.unique_values`"] == f"refused: {depends}; use unique()"
    completed = "the columns that complete q in the mode 'complete'"
    assert rows["`numpy.linalg.qr`"] == f"derivatives of any order; none of {completed}"
    assert rows["`numpy.compress`"] == f"derivatives of any order; refused in traced functions: {depends}"
    assert rows["`numpy.put`"] == "refused: it writes into its argument"
    assert [name for name, state in rows.items() if state == "refused: there is no op"] == []
    assert rows["`numpy.linalg.eig`"] == "refused: its result is complex"
    assert sum(not state.startswith("refused") for state in rows.values()) > 320


def test_what_the_table_calls_constant_has_no_gradient():
    x = py_engine.Tensor(np.array([[0.5, 0.25], [0.75, 0.125]]), requires_grad=True)
    for function in CONSTANT - {np.isclose, np.allclose, np.array_equal, np.searchsorted, np.argpartition}:
        with contextlib.suppress(DTypeError, TypeError):  # for truth values alone, or of two operands
            result = function(x)
            assert not isinstance(result, py_engine.Tensor) or not result.requires_grad
