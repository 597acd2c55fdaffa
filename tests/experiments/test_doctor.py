"""The doctor says what is missing and what to do, and calls only what is essential a problem."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tempfile
import tomllib
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry
from bridge.errors import WorkerError
from bridge.libjulia import environment
from bridge.registry import Availability, Registered
from experiments import archive, doctor, papers, provenance
from experiments.data.dataset import Dataset
from experiments.doctor import Finding
from experiments.extras import EXTRAS, remedy
from experiments.results import COMMITTED

ROOT = Path(__file__).parents[2]

BLAS = {"internal_api": "openblas", "version": "0.3.30"}


def one(findings: Any, name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq"}


@pytest.mark.parametrize(
    ("in_runs", "here", "flags", "advice"),
    [
        ("SkylakeX", "SkylakeX", AVX512, ""),
        ("Haswell", "Haswell", frozenset(), ""),
        ("Haswell", "Haswell", AVX512, "TWINGRAD_OPENBLAS_CORETYPE=SKYLAKEX makes runs faster"),
        ("SandyBridge", "SandyBridge", AVX2, "TWINGRAD_OPENBLAS_CORETYPE=HASWELL makes runs faster"),
        ("SkylakeX", "Haswell", AVX512, "OPENBLAS_CORETYPE=Haswell in the environment, which runs ignore: unset it"),
    ],
)
def test_kernels_that_leave_what_the_cpu_has_unused_are_noticed(
    in_runs: str, here: str, flags: frozenset[str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(variables: dict[str, str]) -> dict[str, str]:
        return BLAS | {"architecture": here if "OPENBLAS_CORETYPE" in variables else in_runs}

    monkeypatch.setattr(doctor, "blas", found)
    monkeypatch.setattr(environment, "cpu_flags", lambda: flags)
    monkeypatch.setenv("OPENBLAS_CORETYPE", here)
    finding = one(doctor.numpy_and_blas(), "BLAS")
    assert finding.state == ("note" if advice else "ok")
    assert advice in finding.advice
    assert in_runs in finding.found


def test_the_kernels_are_asked_for_in_a_process_with_that_environment() -> None:
    found = doctor.blas({"OPENBLAS_CORETYPE": "SANDYBRIDGE"})
    if found is None or found["internal_api"] != "openblas":
        pytest.skip("needs a numpy with OpenBLAS")
    assert found["architecture"].upper() == "SANDYBRIDGE"


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
    assert (found.state, found.found) == ("problem", "5.00 MB free")
    assert not (tmp_path / "results").exists()  # the doctor changes nothing


def test_little_memory_and_one_core_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "memory_bytes", lambda: 2_000_000_000)
    monkeypatch.setattr(provenance, "cores", lambda: 1)
    findings = list(doctor.machine())
    assert {finding.name: finding.state for finding in findings} == {"CPU": "ok", "threads": "note", "memory": "note"}


def test_missing_packages_say_which_extra_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "versions", lambda _: {})
    for findings in (doctor.python(), doctor.tools()):
        for finding in findings:
            if finding.name != "TwinGrad" and finding.found.startswith("not installed"):
                assert finding.state == "note" and "pip install 'twingrad[" in finding.advice


def test_the_extras_are_those_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, extra in EXTRAS.items():
        wanted = {re.split(r"[>=\[]", item)[0] for item in project["optional-dependencies"][name]} - {"twingrad"}
        assert wanted == set(extra.packages)
        for module in extra.modules:
            assert remedy(module).startswith("pip install 'twingrad[")
    assert remedy("sklearn") == "pip install 'twingrad[data]'"


def test_it_says_for_each_study_what_an_engines_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    studies = sorted(key for key in papers.paper_keys() if not papers.load_paper(key).families)
    findings = list(doctor.threads())

    def uses(finding: doctor.Finding) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for use, keys in (part.split(": ") for part in finding.found.split("; ")):
            found.setdefault(use.removesuffix(doctor.UNDECIDED), []).extend(keys.split(", "))
        return found

    for finding in (one for one in findings if one.state == "ok"):
        said = uses(finding)
        # Where other work has the cores, the Julia engine finds one thread to be faster.
        possible = ["split over 2 threads"] + ["one thread"] * ("julia" in finding.name)
        assert "mnist-cnn-batch100" in [key for use in possible for key in said.get(use, [])]
        assert sorted(key for keys in said.values() for key in keys) == studies
    engines = [engine for engine in ("numpy", "julia") if registry.availability(engine).ok]
    assert [finding.name for finding in findings] == [f"threads of {engine}" for engine in engines]
    no_image = "julia" in engines and not doctor._starts_soon()
    assert [finding.name for finding in findings if finding.state == "note"] == ["threads of julia"] * no_image
    numpys = uses(findings[0])
    # The faster one is measured.
    assert "mnist-rnn-e" in [key for use in ("2 threads in BLAS", "one thread") for key in numpys.get(use, [])]
    monkeypatch.setattr(provenance, "cores", lambda: 1)
    assert not list(doctor.threads())


def test_what_an_engine_has_not_compared_in_time_is_not_called_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    monkeypatch.setattr(doctor, "ENGINES", ("numpy",))
    monkeypatch.setattr(doctor, "TRIED_SECONDS", 0.0)
    for decided in (False, True):
        monkeypatch.setattr(doctor.Worker, "threads_decided", lambda _, known=decided: known)
        (finding,) = doctor.threads()
        assert all((doctor.UNDECIDED in part) is not decided for part in finding.found.split("; "))


def test_an_engine_that_ends_when_it_is_asked_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any) -> None:
        raise WorkerError("it was ended")

    monkeypatch.setattr(provenance, "cores", lambda: 2)
    monkeypatch.setattr(doctor, "Worker", ended)
    assert ("note", "it was ended") in [(finding.state, finding.advice) for finding in doctor.threads()]


def test_data_that_is_nowhere_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path))
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    finding = one(doctor.data(None), "data mnist")
    assert finding.state == "note" and "train-images-idx3-ubyte.gz" in finding.advice


def test_generated_data_lacks_nothing() -> None:
    finding = one(doctor.data(None), "data generated")
    assert (finding.state, finding.found, finding.advice) == ("ok", "drawn where a run needs it", "")


def test_data_of_which_a_part_is_random_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((3, 2), np.int64)
    notice = "Synthetic/embedded sample in part: the vectors are random"
    found = Dataset("imdb", "sample", rows, rows[:, 0], rows, rows[:, 0], "d", origin="/reviews", notice=notice)
    monkeypatch.setattr("experiments.data.load", lambda *_, **__: found)
    monkeypatch.setattr(papers, "paper_keys", lambda: ["imdb-cnn-a"])
    finding = one(doctor.data(None), "data imdb")
    assert (finding.state, finding.found) == ("note", "a part of it is not on this machine yet")
    assert finding.advice.startswith(f"{notice} ")


def test_little_room_for_temporary_files_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    (other := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(other))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1e12, 1e12, 5e6 if path == other else 1e12))
    findings = list(doctor.disk(tmp_path / "results"))
    assert one(findings, "disk").state == "ok"
    assert one(findings, "temporary files").state == "problem" and "TMPDIR" in one(findings, "temporary files").advice


def test_committed_results_and_a_damaged_archive_are_said(tmp_path: Path) -> None:
    (tmp_path / COMMITTED).touch()
    (tmp_path / archive.NAME).write_bytes(b"none")
    found = [finding for finding in doctor.disk(tmp_path) if finding.name == "results"]
    assert [finding.state for finding in found] == ["note", "problem"] and archive.NAME in found[1].advice


@pytest.mark.parametrize(
    ("offline", "said"),
    [("1", "downloads are switched off by TWINGRAD_OFFLINE: change that, or put "), ("", "a run downloads it; ")],
)
def test_what_is_not_there_is_said_to_be_downloaded_only_where_it_is(
    offline: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TWINGRAD_OFFLINE", offline)
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path))
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    real = importlib.util.find_spec
    packages = ("pooch", "requests")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name in packages or real(name, *rest))
    found = one(doctor.data(None), "data mnist")
    assert found.state == "note" and found.advice.startswith(said)
