"""The Julia engine's own tests, run with the Julia that was found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bridge.julia.find import Julia

ENGINE = Path(__file__).parents[2] / "julia_engine"
LAST_LINES = 60


def test_the_julia_engine_passes_its_own_tests(julia: Julia, tmp_path: Path) -> None:
    # Two threads: the trainer's own need at least that many.
    command = [julia.executable, "--startup-file=no", f"--project={ENGINE}", str(ENGINE / "test" / "runtests.jl")]
    log = tmp_path / "runtests.log"
    with log.open("wb") as file:
        done = subprocess.run(
            command, env=julia.environment(2), cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    output = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join([f"{julia}", *output[-LAST_LINES:]]))
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\nended with code {done.returncode}:\n" + "\n".join(output[-LAST_LINES:]))
    assert any(line.startswith("Test Summary") for line in output), "the run ended without a summary of its tests"
