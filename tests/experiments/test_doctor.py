"""The doctor says what is missing and what to do, and calls only what is essential a problem."""

from __future__ import annotations

import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import threadpoolctl

from bridge.engine import Availability, Registered
from experiments import doctor, provenance
from experiments.doctor import Finding

BLAS = {"user_api": "blas", "internal_api": "openblas", "version": "0.3.30"}


def one(findings: Any, name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


@pytest.mark.parametrize(
    ("kernels", "flags", "setting", "advice"),
    [
        ("SkylakeX", doctor.AVX512, None, ""),
        ("Haswell", set(), None, ""),
        ("Haswell", doctor.AVX512, None, "set OPENBLAS_CORETYPE=SKYLAKEX for programs of your own"),
        ("Haswell", doctor.AVX512, "Haswell", "OPENBLAS_CORETYPE=Haswell in the environment chose them"),
    ],
)
def test_kernels_that_leave_avx512_unused_are_noticed(
    kernels: str, flags: set[str], setting: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: [BLAS | {"architecture": kernels}])
    monkeypatch.setattr(doctor, "cpu_flags", lambda: flags)
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    if setting:
        monkeypatch.setenv("OPENBLAS_CORETYPE", setting)
    found = one(doctor.numpy_and_blas(), "BLAS")
    assert found.state == ("note" if advice else "ok")
    assert advice in found.advice
    assert kernels in found.found


def test_an_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    found = one(doctor.python(), "Python")
    assert (found.state, found.advice) == ("problem", "use Python 3.11 or later")


def test_a_missing_engine_is_a_note_and_none_at_all_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registered, "availability", lambda self: Availability(self.name == "numpy", "not installed"))
    findings = list(doctor.engines())
    assert one(findings, "engine torch").state == "note"
    assert "engines" not in {finding.name for finding in findings}
    monkeypatch.setattr(Registered, "availability", lambda self: Availability(False, "not installed"))
    assert one(doctor.engines(), "engines").state == "problem"


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1e12, 1e12, 5e6))
    found = one(doctor.disk(tmp_path / "results"), "disk")
    assert (found.state, found.found) == ("problem", "5 MB free")
    assert not (tmp_path / "results").exists()  # the doctor changes nothing


def test_little_memory_and_one_core_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "memory_bytes", lambda: 2_000_000_000)
    monkeypatch.setattr(provenance, "cores", lambda: 1)
    findings = list(doctor.machine())
    assert {finding.name: finding.state for finding in findings} == {"CPU": "ok", "threads": "note", "memory": "note"}


def test_missing_packages_say_which_extra_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    for findings in (doctor.python(), doctor.tools()):
        for finding in findings:
            if finding.found == "not installed":
                assert "pip install 'twingrad[" in finding.advice
