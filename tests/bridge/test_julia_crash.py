"""A Julia that passes its proof as a program and crashes when it is embedded. Its libjulia is a stand-in here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bridge import registry
from bridge.errors import WorkerError
from bridge.libjulia import start
from bridge.libjulia.embedded import _SIGNATURES
from bridge.libjulia.find import Julia, Memory, _fingerprint, find
from bridge.libjulia.runtime import EMBEDDED, JULIACALL
from bridge.worker import Worker

CRASHING = """
#include <stdio.h>
#include <stdlib.h>
int jl_is_initialized(void) { return 0; }
void jl_init_with_image(const char *bindir, const char *image) { fputs("no memory for the heap\\n", stderr); abort(); }
"""


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Julia:
    """The first Julia on PATH, remembered as proved in a cache of this test's own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a libjulia that crashes: cc or gcc")
    source, library = tmp_path / "libjulia.c", tmp_path / "libjulia.so"
    others = [name for name, *_ in _SIGNATURES if name != "jl_is_initialized"]
    source.write_text(CRASHING + "".join(f"void {name}(void) {{}}\n" for name in others), encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    executable, image = tmp_path / "julia", tmp_path / "sys.so"
    executable.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    executable.chmod(0o755)
    image.write_bytes(b"")
    julia = Julia(str(executable), "PATH", "1.9.4", str(tmp_path), str(library), str(image), (), "a stand-in", "")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TWINGRAD_JULIA", raising=False)
    monkeypatch.delenv("TWINGRAD_JULIA_BACKEND", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    proof = vars(julia) | {"files": _fingerprint(julia)}
    Memory()._write({"chosen": None, "proofs": {julia.executable: proof}, "notes": {}})
    assert find() == julia
    return julia


def test_the_worker_reports_the_crash(crashing: Julia) -> None:
    with pytest.raises(WorkerError, match=r"(?s)SIGABRT in starting.*no memory for the heap"):
        Worker("julia", threads=1)


def test_what_was_seen_to_crash_is_not_tried_again(crashing: Julia) -> None:
    memory = Memory()
    assert registry.availability("julia").ok  # nobody has tried yet
    seen = start.verify(EMBEDDED, crashing, memory)
    assert not seen.ok
    assert "SIGABRT" in seen.reason
    assert "no memory for the heap" in seen.reason
    start.verify(JULIACALL, crashing, memory)
    found = registry.availability("julia")
    assert not found.ok
    assert seen.reason in found.reason
    assert "python -m bridge.julia.install" in found.reason
