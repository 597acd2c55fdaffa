"""Fixtures of the report's tests: invented results, and the report that is made from them once per session."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

from experiments import report
from experiments.report import style
from experiments.report.view import View, paper_view
from experiments.results import Tidy


def _beside(name: str) -> ModuleType:
    """A module beside this file: test folders are not packages, so that it cannot be imported."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module `fake_results.py`."""
    return _beside("fake_results")


@pytest.fixture(scope="session")
def views() -> dict[bytes, View]:
    """The views that tests have asked for, by what they show."""
    return {}


@pytest.fixture
def view_of(fake: ModuleType, views: dict[bytes, View], tmp_path: Path) -> Callable[..., View]:
    """A function from sweeps (as `fake.rows` makes them) to what a report of one paper may show of them."""

    def make(*sweeps: Any, paper: str = "mnist-rnn-e") -> View:
        shown = hashlib.sha256(repr((paper, sweeps)).encode()).digest()
        if shown not in views:  # most tests look at one of a few sweeps
            views[shown] = paper_view(fake.about(paper), Tidy.load(fake.write(tmp_path / "results", *sweeps)))
        return views[shown]

    return make


@pytest.fixture(scope="session")
def full_results(fake: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete sweep of both RNN papers on invented real data."""
    folder = tmp_path_factory.mktemp("full")
    fake.write(folder, fake.rows(seeds=5), fake.rows("mnist-rnn-d", seeds=10))
    return folder


@pytest.fixture(scope="session")
def full_report(full_results: Path) -> report.Built:
    """Tables, figures and report.json of the complete sweep."""
    return report.build(full_results)


@pytest.fixture(scope="session")
def sample_results(fake: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep on the embedded sample."""
    folder = tmp_path_factory.mktemp("sample")
    sweeps = (fake.rows(seeds=2, data_source="sample"), fake.rows("mnist-rnn-d", seeds=2, data_source="sample"))
    fake.write(folder, *sweeps)
    return folder


@pytest.fixture(scope="session")
def sample_report(sample_results: Path) -> report.Built:
    """The report of the sweep on the embedded sample."""
    return report.build(sample_results)


@pytest.fixture(scope="session")
def invented() -> ModuleType:
    """The module `invented_records.py`."""
    return _beside("invented_records")


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are written as one empty picture: painting all takes longer than what is to be looked at here."""

    def save(figure: Figure, stem: Path, notice: str | None = None) -> None:
        paint(style.new(), stem, notice)

    paint = style.save
    monkeypatch.setattr(style, "save", save)
