"""The system image with the engine in it: made whole or not at all, and used only where it fits.

Scripts stand in for Julia and the C compiler; that a real image works is seen by the command itself, which trains with
each before it gets its name.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge import registry
from bridge.errors import JuliaUnavailableError
from bridge.julia import Status
from bridge.libjulia import engine, environment, start
from bridge.libjulia import sysimage as images
from bridge.libjulia.find import Julia
from bridge.libjulia.runtime import EMBEDDED, JULIACALL
from contrib import sysimage

COMPILE = """#!/bin/sh
for argument; do case "$argument" in --output-o=*) echo compiled > "${argument#--output-o=}";; esac; done
"""
LINK = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo image > "$2"
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Julia:
    """A Julia and a C compiler that write what they are asked for, whose images work, and a separate cache."""
    for name in ("libjulia", "sys"):
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(program(tmp_path / "cc", LINK)))
    monkeypatch.delenv(images.VARIABLE, raising=False)
    monkeypatch.setattr(sysimage, "_prove", lambda image: None)
    monkeypatch.setattr(sysimage, "find", lambda: julia)
    executable = str(program(tmp_path / "julia", COMPILE))
    libjulia, base = str(tmp_path / "libjulia"), str(tmp_path / "sys")
    julia = Julia(executable, "PATH", "1.5.3", str(tmp_path), libjulia, base, (), "OpenBLAS", "Haswell")
    return julia


def left() -> list[str]:
    folder = environment.cache_folder() / "sysimage"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_julia_that_keeps_compiled_code_needs_no_image(stand_in: Julia) -> None:
    sysimage.build(stand_in, lambda line: None)
    assert images.usable(stand_in)[0]
    newer = dataclasses.replace(stand_in, version="1.9.0")
    assert images.usable(newer) == (None, "")
    with pytest.raises(JuliaUnavailableError, match="keeps compiled code"):
        sysimage.build(newer)


def test_without_an_image_nothing_is_said(stand_in: Julia) -> None:
    assert images.usable(stand_in) == (None, "")


def test_an_image_is_used_once_it_is_there(stand_in: Julia) -> None:
    lines: list[str] = []
    image = sysimage.build(stand_in, lines.append)
    assert image.read_text() == "image\n"
    assert left() == [image.name]
    assert images.usable(stand_in) == (str(image), f"with the system image {image}")
    assert len(lines) == 3


def test_results_tell_of_it(stand_in: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "status", lambda: Status(stand_in, "", {}))
    versions = registry.ENGINES["julia"].availability().versions
    assert versions["julia"] == "1.5.3"
    assert "sysimage" not in versions
    image = sysimage.build(stand_in, print)
    assert registry.ENGINES["julia"].availability().versions == {**versions, "sysimage": image.stem[-16:]}


def test_it_can_be_forbidden(stand_in: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    sysimage.build(stand_in, print)
    monkeypatch.setenv(images.VARIABLE, "0")
    assert images.usable(stand_in) == (None, "")


@pytest.mark.parametrize("change", ["engine", "julia", "processor"])
def test_an_image_that_is_out_of_date_is_left_aside_and_replaced(
    stand_in: Julia, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "engine"
    (engine / "src" / "ad").mkdir(parents=True)
    (engine / "Project.toml").write_text("")
    source = engine / "src" / "ad" / "tape.jl"
    source.write_text("a")
    monkeypatch.setattr(images, "ENGINE", engine)
    old = sysimage.build(stand_in, print)
    if change == "engine":
        source.write_text("b")
    elif change == "julia":
        Path(stand_in.sysimage).write_text("another one")
    else:
        monkeypatch.setattr(images, "cpu_flags", lambda: frozenset({"another"}))
    found, note = images.usable(stand_in)
    assert found is None
    assert note.endswith("make it anew with python -m contrib.sysimage")
    new = sysimage.build(stand_in, print)
    assert new != old
    assert left() == [new.name]


def test_images_of_other_julias_are_kept(stand_in: Julia) -> None:
    other = sysimage.build(dataclasses.replace(stand_in, version="1.6.7"), print)
    image = sysimage.build(stand_in, print)
    assert left() == sorted([other.name, image.name])


@pytest.mark.parametrize("broken", ["julia", "cc", "the image"])
def test_a_failure_changes_nothing(
    stand_in: Julia, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sysimage.build(stand_in, print)

    def prove(image: Path) -> None:
        assert image.is_file()
        raise JuliaUnavailableError("the image: it does not learn")

    if broken == "the image":
        monkeypatch.setattr(sysimage, "_prove", prove)
    elif broken == "cc":
        program(tmp_path / "cc", "#!/bin/sh\necho out of space >&2\nexit 3\n")
    else:
        other = str(program(tmp_path / "other", "#!/bin/sh\necho out of space >&2\nexit 3\n"))
        monkeypatch.setattr(sysimage, "path_for", lambda julia: before.with_name(f"twingrad-1.5.3-new{before.suffix}"))
        stand_in = dataclasses.replace(stand_in, executable=other)
    expected = "does not learn" if broken == "the image" else "ended with exit code 3; it last said:\n  out of space"
    with pytest.raises(JuliaUnavailableError, match=expected):
        sysimage.build(stand_in, print)
    assert left() == [before.name]
    assert before.read_text() == "image\n"


def test_without_a_compiler(stand_in: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JuliaUnavailableError, match="no C compiler was found"):
        sysimage.build(stand_in, print)
    assert left() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="does not apply: root may write anywhere")
def test_a_folder_that_can_not_be_written(stand_in: Julia, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(JuliaUnavailableError, match="the system image can't be written"):
        sysimage.build(stand_in, print)


def test_the_command(stand_in: Julia, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sysimage.main([]) == 0
    (name,) = left()
    assert name in capsys.readouterr().out
    monkeypatch.setattr(sysimage, "build", None)
    assert sysimage.main([]) == 0  # there is nothing left to do
    assert sysimage.main(["--remove"]) == 0
    assert left() == []

    def fail(julia: Julia, say: object) -> Path:
        raise JuliaUnavailableError("no C compiler")

    monkeypatch.setattr(sysimage, "build", fail)
    assert sysimage.main(["--again"]) == 2
    assert capsys.readouterr().err == "error: no C compiler\n"


@pytest.mark.parametrize(
    ("image", "backend", "compiles"), [("x.so", EMBEDDED, False), ("x.so", JULIACALL, True), (None, EMBEDDED, True)]
)
def test_the_engine_is_compiled_beforehand_unless_julia_starts_with_it_in_an_image(
    image: str | None, backend: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    found = object()
    monkeypatch.setattr(start, "status", lambda: SimpleNamespace(julia=found))
    monkeypatch.setattr(start, "backend", lambda julia: backend)
    monkeypatch.setattr(images, "usable", lambda julia: (image, ""))
    monkeypatch.setattr(engine, "compile_engine", asked.append)
    engine.prepare()
    assert asked == [found] * compiles
