"""A number's origin: the commit and its state, the machine, and a digest over the sources of its engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import engine
from experiments import provenance


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree laid out as ours, in place of it."""
    for name, text in {
        "py_engine/ad/tape.py": "fast = 1",
        "julia_engine/src/AD.jl": "fast = 1",
        "bridge/adapters/numpy.py": "from py_engine import network",
        "bridge/adapters/torch.py": "import torch",
        "bridge/adapters/torch_compile.py": "from bridge.adapters.torch import TorchSession",
        "bridge/adapters/julia.py": 'SOURCES = "julia_engine"',
        "bridge/adapters/manual.jl": "fast = 1",
        "bridge/adapters/manual_julia.py": 'SOURCE = "manual.jl"',
        "bridge/worker.py": "import os",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    provenance.commit.cache_clear()
    yield tmp_path
    provenance.commit.cache_clear()


@pytest.fixture
def git(checkout: Path) -> Callable[..., None]:
    def call(*arguments: str) -> None:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=checkout, check=True, capture_output=True)
        provenance.commit.cache_clear()

    return call


def changed_by(path: Path, adapter: str) -> bool:
    before = provenance.engine_digest(f"bridge.adapters.{adapter}")
    path.write_text(path.read_text() + "\n# changed")
    return provenance.engine_digest(f"bridge.adapters.{adapter}") != before


@pytest.mark.parametrize(
    ("file", "adapter", "concerned"),
    [
        ("py_engine/ad/tape.py", "numpy", True),
        ("py_engine/ad/tape.py", "torch", False),
        ("bridge/adapters/numpy.py", "numpy", True),
        ("bridge/adapters/torch.py", "torch_compile", True),
        ("bridge/adapters/torch_compile.py", "torch", False),
        ("julia_engine/src/AD.jl", "julia", True),
        ("julia_engine/src/AD.jl", "numpy", False),
        ("bridge/worker.py", "numpy", False),
        ("bridge/adapters/manual.jl", "manual_julia", True),
        ("bridge/adapters/manual.jl", "julia", False),
    ],
)
def test_an_engines_digest_covers_its_own_sources(checkout: Path, file: str, adapter: str, concerned: bool) -> None:
    assert changed_by(checkout / file, adapter) is concerned


def test_a_new_source_file_changes_the_digest(checkout: Path) -> None:
    before = provenance.engine_digest("bridge.adapters.numpy")
    (checkout / "py_engine" / "ad" / "plan.py").touch()
    assert provenance.engine_digest("bridge.adapters.numpy") != before


@pytest.mark.parametrize("name", engine.names())
def test_every_engine_has_a_digest_over_at_least_its_adapter(name: str) -> None:
    row = engine.get(name)
    covered = {path.relative_to(provenance.ROOT).as_posix() for path in provenance.sources(row.module)}
    assert row.module.replace(".", "/") + ".py" in covered
    # Their adapters share code with the numpy engine's.
    on_both = ("manual", "julia", "manual-julia", "flux", "lux", "simplechains")
    assert ("py_engine/ad/tape.py" in covered) == (name == "numpy") or name in on_both


def test_commit_and_changes(checkout: Path, git: Callable[..., None]) -> None:
    assert provenance.commit() == ("unknown", None)
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    head, dirty = provenance.commit()
    assert (len(head), dirty) == (40, False)
    (checkout / "new.py").touch()
    provenance.commit.cache_clear()
    assert provenance.commit() == (head, True)


def test_what_every_output_says_of_the_machine() -> None:
    found = provenance.summary()
    assert found["cpu_model"] and found["python"] and found["cores"]
    assert provenance.versions(["numpy", "no-such-distribution"]).keys() == {"numpy"}
    assert provenance.now() < provenance.now()
