"""Every benchmark runs once, under asv itself, for engines of each kind; each engine is a parameter."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bridge import registry as engines
from bridge import spec
from bridge.libjulia.environment import cache_folder
from bridge.libjulia.find import Julia
from experiments.benchmarks.bridge import require_bridge
from experiments.benchmarks.engines import CONVOLUTIONAL, ENGINES, MODEL, Bench, Workload, drawn, require

# They wait for one run of asv, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[1]

RETIRED = ("manual", "manual-julia")
"""Engines that are no more: older commits have them, and newer ones nothing to show."""


@pytest.mark.parametrize("engine", RETIRED)
def test_a_retired_engine_is_nothing_to_show(engine: str) -> None:
    with pytest.raises(NotImplementedError, match=f"no engine '{engine}'"):
        require(engine, 1)


BY_ENGINE = {
    "training.Epoch.time_100_steps",
    "training.Convolutional.time_epoch",
    "training.Start.time_build_and_first_step",
    "training.Sizes.time_10_steps",
    "training.SizesStart.time_build_and_first_step",
    "memory.Allocated.track_second_epoch",
    "memory.Peak.track_peak",
}
OF_PY_ENGINE = {
    "eager.Overhead.time_numpy",
    "eager.Overhead.time_eager_gradient",
    "eager.Overhead.time_replayed_gradient",
}
OF_BRIDGE = {
    "bridge.Call.time_1000_entry_points",
    "bridge.Call.time_1000_predictions",
    "bridge.Start.timeraw_start_julia",
    "bridge.Start.timeraw_load_engine",
    "bridge.Start.timeraw_build",
    "bridge.Start.timeraw_first_step",
}
OF_SYSTEMS = {"micro.Gradient.track_gradient"}
ALL = BY_ENGINE | OF_PY_ENGINE | OF_BRIDGE | OF_SYSTEMS

CHOSEN = (
    r"^(training\.(Epoch|Start)|memory)\..*\('numpy'",
    r"^training\.Convolutional\..*\('numpy', 'mnist-cnn'",
    r"^training\.Sizes(Start)?\..*\('numpy', 'lenet5'",
    r"^memory\.Allocated\..*\('julia'",  # its own runtime counts
    r"^micro\..*, 'sincos'",
    r"^eager\..*\('?10'?\)",
    r"^bridge\.",
)
"""The combinations that run here. An engine takes up to half a minute to start, and asv does it for each of them; that
every engine trains is what the tests of the adapters show."""


class Asv:
    """asv with the project's configuration, but with results, pages and machine file in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = json.loads((ROOT / "asv.conf.json").read_text(encoding="utf-8"))
        config |= {"repo": str(ROOT), "benchmark_dir": str(self._benchmarks(ROOT / config["benchmark_dir"]))}
        config |= {key: str(folder / key) for key in ("env_dir", "results_dir", "html_dir")}
        (folder / "asv.conf.json").write_text(json.dumps(config), encoding="utf-8")

    def _benchmarks(self, folder: Path) -> Path:
        """A copy in which the micro-benchmarks, of which only `sincos` is shown, measure no other function in advance.

        Julia takes a minute to compile them all; `test_microbenchmarks.py` tries each.
        """
        copy = self.folder / "experiments" / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("models", "papers"):  # which the benchmarks look for beside their folder
            (copy.parent / name).symlink_to(folder.parent / name)
        text = (copy / "micro.py").read_text(encoding="utf-8")
        assert text.count("for name in FUNCTIONS:") == 1
        text = text.replace("for name in FUNCTIONS:", 'for name in ("sincos",):')
        (copy / "micro.py").write_text(text, encoding="utf-8")
        return copy

    def __call__(self, *arguments: str) -> str:
        # asv's machine file lies in the home folder; Julia, and what it has compiled, stay where they are.
        environment = {"JULIA_DEPOT_PATH": f"{Path.home() / '.julia'}{os.pathsep}", **os.environ}
        environment |= {"HOME": str(self.folder), "TWINGRAD_CACHE": str(cache_folder().parent)}
        done = subprocess.run(
            [sys.executable, "-m", "asv", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def asv(tmp_path_factory: pytest.TempPathFactory) -> Asv:
    asv = Asv(tmp_path_factory.mktemp("asv"))
    asv("machine", "--yes")
    chosen = [argument for expression in CHOSEN for argument in ("--bench", expression)]
    asv("run", "--python=same", "--set-commit-hash=HEAD", "--quick", "--show-stderr", "--launch-method=spawn", *chosen)
    return asv


@pytest.fixture(scope="module")
def rows(asv: Asv) -> dict[str, dict[tuple[str, ...], Any]]:
    """For every benchmark the value of each combination of parameters; None or NaN is n/a."""
    (file,) = (path for path in (asv.folder / "results_dir").glob("*/*.json") if path.name != "machine.json")
    saved = json.loads(file.read_text(encoding="utf-8"))
    columns = saved["result_columns"]
    found = {}
    for name, row in saved["results"].items():
        result = dict(zip(columns, row, strict=False))
        combinations = list(product(*([value.strip("'") for value in values] for values in result["params"])))
        values = result["result"] or [None] * len(combinations)
        found[name] = dict(zip(combinations, values, strict=True))
    return found


def possible(engine: str, threads: int) -> bool:
    try:
        require(engine, threads)
    except NotImplementedError:
        return False
    return True


def expected(name: str, combination: tuple[str, ...]) -> bool:
    """Whether it has run, and this machine has a value for it."""
    shown = f"{name}({', '.join(map(repr, combination))})"
    if not any(re.search(expression, shown) for expression in CHOSEN):
        return False
    if name in BY_ENGINE:
        if name.startswith(("memory.Peak.", "training.Convolutional.", "training.Sizes")):
            return possible(combination[0], 2)
        return possible(combination[0], int([*combination, "1"][1]))
    numpy_alone = name in OF_PY_ENGINE or (name in OF_SYSTEMS and combination[0].startswith("numpy"))
    return numpy_alone or possible("julia", 1)


def test_all_benchmarks_are_found(rows: dict[str, dict[tuple[str, ...], Any]]) -> None:
    assert set(rows) == ALL


@pytest.mark.parametrize("name", sorted(ALL))
def test_what_has_run_has_a_value(rows: dict[str, dict[tuple[str, ...], Any]], name: str) -> None:
    for combination, value in rows[name].items():
        if expected(name, combination):
            assert value is not None and math.isfinite(value) and value > 0, (combination, value)
        else:
            assert value is None or math.isnan(value), (combination, value)


@pytest.mark.parametrize("name", sorted(BY_ENGINE))
def test_every_engine_of_the_registry_has_a_row(rows: dict[str, dict[tuple[str, ...], Any]], name: str) -> None:
    assert {combination[0] for combination in rows[name]} == {*engines.names(), *RETIRED}


def test_time_is_measured_with_one_and_with_two_threads(rows: dict[str, dict[tuple[str, ...], Any]]) -> None:
    assert set(rows["training.Epoch.time_100_steps"]) == set(product(ENGINES, ("1", "2")))


@pytest.fixture(scope="module")
def commits(asv: Asv, rows: dict[str, dict[tuple[str, ...], Any]]) -> int:
    """How many commits the pages show: what was measured stands for those before, too, once `rows` has been read."""
    (file,) = (path for path in (asv.folder / "results_dir").glob("*/*.json") if path.name != "machine.json")
    saved = json.loads(file.read_text(encoding="utf-8"))
    earlier = subprocess.run(
        ["git", "log", "--first-parent", "--format=%H", "--max-count=12", "--skip=1", saved["commit_hash"]],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for commit in earlier:
        name = file.name.replace(saved["commit_hash"][:8], commit[:8])
        file.with_name(name).write_text(json.dumps(saved | {"commit_hash": commit}), encoding="utf-8")
    asv("publish")
    return len(earlier) + 1


@pytest.mark.usefixtures("commits")
def test_the_pages_show_every_engine(asv: Asv) -> None:
    pages = asv.folder / "html_dir"
    assert (pages / "index.html").is_file()
    index = json.loads((pages / "index.json").read_text(encoding="utf-8"))
    assert set(index["benchmarks"]) == ALL
    for name in BY_ENGINE:
        shown = {value.strip("'") for value in index["benchmarks"][name]["params"][0]}
        assert shown == set(ENGINES)


def test_the_graphs_have_a_point_for_every_commit(asv: Asv, commits: int, pages: ModuleType, browser: Any) -> None:
    """In a browser, with what was measured standing for the commits before, too."""
    if pages.local("https://web/jquery.flot.min.js", pages.SCRIPTS) is None:
        pytest.skip("needs the scripts of asv's pages without the web: Debian's package libjs-jquery-flot")
    shown = pages.points(browser, asv.folder / "html_dir")
    assert set(shown) == ALL
    assert {name for name, lines in shown.items() if lines} >= BY_ENGINE | OF_PY_ENGINE
    for lines in shown.values():
        assert set(lines.values()) <= {commits}


def test_what_a_commit_lacks_is_not_available_rather_than_failed() -> None:
    with pytest.raises(NotImplementedError, match="no engine 'fortran'"):
        require("fortran", threads=1)
    with pytest.raises(NotImplementedError, match="1000000 threads"):
        require("numpy", threads=1_000_000)


def test_a_network_newer_than_the_commit_is_not_available_rather_than_failed(tmp_path: Path) -> None:
    newer = MODEL.read_text(encoding="utf-8").replace("opset = 1", "opset = 999")
    (tmp_path / "newer.toml").write_text(newer, encoding="utf-8")
    with pytest.raises(NotImplementedError, match="opset"):
        Bench("numpy", 1, Workload(str(tmp_path / "newer")))


@pytest.mark.parametrize("workload", sorted({item.model for item in CONVOLUTIONAL.values()}))
def test_synthetic_rows_are_what_a_network_reads(workload: str) -> None:
    model = spec.load(MODEL.with_name(f"{workload}.toml"))
    x, y = drawn(model, 7, np.random.default_rng(0))
    assert x.shape == (7, *model.input.sample) and x.dtype == model.input.dtype
    assert y.shape == (7, *model.target.shape)
    assert y.dtype == (np.int64 if model.target.kind == "classes" else np.float32)


def test_the_bridge_is_not_available_without_julia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINGRAD_JULIA", "/nowhere")
    with pytest.raises(NotImplementedError, match="TWINGRAD_JULIA=/nowhere names no Julia"):
        require_bridge()


def test_the_bridge_is_not_available_in_a_commit_without_it(julia: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bridge.adapters.julia", None)
    with pytest.raises(NotImplementedError, match=r"this commit lacks it: .*bridge\.adapters\.julia"):
        require_bridge()
