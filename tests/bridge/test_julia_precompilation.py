"""Whoever waits for Julia to compile the engine gets a message, and nobody else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.libjulia import precompilation
from bridge.libjulia.find import Julia


@pytest.fixture
def slow(julia: Julia, tmp_path: Path) -> Julia:
    """A Julia that takes a second for anything."""
    program = tmp_path / "julia"
    program.write_text("#!/bin/sh\nexec sleep 1\n", encoding="utf-8")
    program.chmod(0o755)
    return replace(julia, executable=str(program))


def test_compiling_says_what_it_does_and_how_long(
    slow: Julia, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precompilation, "PATIENCE", 0.1)
    monkeypatch.setattr(precompilation, "EVERY", (0.3, 0.3))
    precompilation.compile_engine(slow)
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first == "compiling the Julia engine (once per machine)"
    assert others and all(line.startswith(f"{first}: ") for line in others)
    assert last.startswith(f"{first}: done in ")


def test_what_is_compiled_already_is_loaded_in_silence(slow: Julia, capsys: pytest.CaptureFixture[str]) -> None:
    precompilation.compile_engine(slow)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("wanted", [None, "1"])
def test_machine_code_is_written_on_all_processors_unless_a_user_wants_otherwise(
    julia: Julia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    program, told = tmp_path / "julia", tmp_path / "told"
    program.write_text(f'#!/bin/sh\nprintf "%s" "$JULIA_IMAGE_THREADS" > "{told}"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.delenv("JULIA_IMAGE_THREADS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("JULIA_IMAGE_THREADS", wanted)
    precompilation.compile_engine(replace(julia, executable=str(program)))
    assert told.read_text(encoding="utf-8") == (wanted or str(os.cpu_count()))
