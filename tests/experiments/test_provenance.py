"""A number's origin: the commit and its state, the machine, and a digest over the sources of its engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge import registry
from experiments import provenance
from experiments.sources import SOURCES


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of our tree."""
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


@pytest.mark.parametrize("name", registry.names())
def test_an_engines_digest_covers_its_adapter_and_not_the_measures(name: str) -> None:
    row = registry.get(name)
    before = SOURCES.digest([row.module])
    adapter = row.module.replace(".", "/") + ".py"
    for file, concerned in (
        (adapter, True),
        ("experiments/measures/training.py", False),
        ("experiments/cli/runs.py", False),
    ):
        changed = SOURCES.with_changes({file: b"changed = True"})
        assert (changed.digest([row.module]) != before) is concerned, file


def test_commit_and_changes(checkout: Path, git: Callable[..., None]) -> None:
    assert provenance.commit() == ("unknown", None)
    (checkout / "old.py").touch()
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


def test_what_decides_how_memory_is_allocated_is_among_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    before = provenance.settings()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("LD_PRELOAD", "another.so")
    monkeypatch.setenv("NO_MALLOC_", "1")
    added = {"MALLOC_ARENA_MAX": "1", "LD_PRELOAD": "another.so"}
    assert provenance.settings() == {"settings": before.get("settings", {}) | added}


def test_what_decides_how_runtimes_compute_is_among_the_settings_without_places_and_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(os.environ):
        if provenance.RUNTIMES.fullmatch(name):
            monkeypatch.delenv(name)
    before = provenance.settings().get("settings", {})
    added = {
        **{"OMP_WAIT_POLICY": "passive", "OMP_PROC_BIND": "close", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"},
        **{"MKL_CBWR": "COMPATIBLE", "TORCHINDUCTOR_FREEZING": "1", "TORCH_COMPILE_DISABLE": "1"},
        **{"JAX_ENABLE_X64": "1", "TF_DETERMINISTIC_OPS": "1", "JULIA_NUM_GC_THREADS": "2"},
    }
    places = {"JAX_COMPILATION_CACHE_DIR": "cache", "TF_XLA_DUMP": f"somewhere{os.sep}here"}
    ignored = (
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "JULIA_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"),  # workers set them
        *("TF_ENABLE_ONEDNN_OPTS", "JULIA_DEPOT_PATH", "JULIA_PROJECT", "JULIA_PKG_SERVER", "TORCH_HOME"),
        *("TF_CPP_MIN_LOG_LEVEL", "JULIA_ACCESS_TOKEN", "JAX_SECRET", "NO_OMP_WAIT_POLICY", "OMP_EMPTY"),
    )
    for name, value in {**added, **places, **dict.fromkeys(ignored, "7"), "OMP_EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    assert provenance.settings() == {"settings": before | added | dict.fromkeys(places, "set")}


def test_what_others_had_of_the_cores_leaves_out_what_ran_here(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([(100.0, 40.0, 5.0), (120.0, 50.0, 12.0), (120.0, 40.0, 5.0), (100.0, 40.0, 5.0), None])
    monkeypatch.setattr(provenance, "_processor_seconds", lambda: next(moments))
    assert provenance.OthersShare().value() == pytest.approx((20 - 10 - 7) / 20)
    later = provenance.OthersShare()
    assert later.value() is None  # no time has passed: a clock that went backwards says nothing
    assert later.value() is None  # nor does a system that says nothing


@pytest.mark.skipif(not provenance.CORES.exists(), reason="does not apply: the system does not count")
def test_what_a_process_that_was_started_here_works_counts_as_its_own() -> None:
    (before, _, own), others = provenance._processor_seconds() or (0, 0, 0), provenance.OthersShare()
    program = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
    (after, _, more), found = provenance._processor_seconds() or (0, 0, 0), others.value()
    assert after > before and more - own >= 0.3
    assert found is not None and found <= 1 - 0.3 / (after - before + 0.1)


@pytest.mark.parametrize("contents", ["", "cpu 1 2", "cpu a b c d e f g h i j", None])
def test_a_system_that_does_not_count_has_no_share(
    contents: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "stat"
    if contents is not None:
        found.write_text(contents)
    monkeypatch.setattr(provenance, "CORES", found)
    assert provenance.OthersShare().value() is None
