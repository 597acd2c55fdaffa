"""In CI a test that would be skipped for want of something fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / ".ci" / "run"


@pytest.mark.parametrize(
    ("ci", "reason", "outcome"),
    [
        ("true", "needs a C compiler", "failed"),
        ("true", "could not import 'torch'", "failed"),
        ("true", "does not apply: root may write anywhere", "skipped"),
        ("true", "needs the real data: set TWINGRAD_DATA", "skipped"),
        ("", "needs a C compiler", "skipped"),
    ],
)
def test_what_ci_may_skip(
    ci: str, reason: str, outcome: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    (conftest,) = (found for found in request.config.pluginmanager.get_plugins() if hasattr(found, "SKIPPED_IN_CI"))
    hook = conftest.pytest_runtest_makereport()
    next(hook)
    report = pytest.TestReport("test", ("file", 1, "test"), {}, "skipped", ("file", 1, f"Skipped: {reason}"), "setup")
    with pytest.raises(StopIteration) as made:
        hook.send(report)
    assert made.value.value.outcome == outcome
    assert reason in str(made.value.value.longrepr)


def test_ci_runs_the_tests_as_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "CI=$CI make $*"\n', encoding="utf-8")
    make.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([RUN], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
    assert "CI=true make test" in done.stdout
