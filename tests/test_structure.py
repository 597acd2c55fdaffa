"""The picture of the engines' structure is that of the code."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

structure = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("structure.py"))))


def test_the_picture_is_drawn_from_the_code() -> None:
    assert structure.PICTURE.read_text("utf-8") == structure.picture(), "run python tests/structure.py"


def test_both_engines_have_the_same_layers_and_every_file_has_its_place() -> None:
    names = [*structure.layers()]
    files = structure.julia_files()
    assert [layer for layer in names if layer in files] == [*files]
    drawn = {file for group in files.values() for file in group}
    there = {path.relative_to(structure.JULIA).with_suffix("").as_posix() for path in structure.JULIA.rglob("*.jl")}
    alone = {"AD", "NETWORK", "TwinGrad", "entry", "functions", "precompile", "network/precompile", "versions"}
    kernels = {file for file in there if file.startswith("ad/kernels/")}
    assert there - alone - kernels == {file for file in drawn if not file.startswith("ad/kernels/")}
