"""Flux, Lux and SimpleChains behind the protocol, tried on stand-ins, and on the packages where they are.

Where a package is found, what is refused, and that layouts, losses, steps and the order of batches are the spec's. What
the packages themselves compute is tested on a Julia that has them, with what it has (`make test JULIA=...`).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry, spec, weights
from bridge.adapters import julia_package
from bridge.adapters.flux import FluxSession
from bridge.adapters.lux import LuxSession
from bridge.adapters.simplechains import SimpleChainsSession
from bridge.errors import SpecError
from bridge.libjulia import packages
from bridge.libjulia.find import Julia, Memory
from bridge.libjulia.start import Status
from bridge.session import Optimizer, Session
from py_engine.errors import ConfigurationError

Made = Callable[..., Any]
ROOT = Path(spec.__file__).parents[1]
LONGEST = 1500
"""Seconds: the packages compile what each network needs."""
STAND_INS = Path(__file__).with_name("stand_ins")
PACKAGES = {
    "Flux": "587475ba-b771-5e3f-ad9e-33799f191a9c",
    "Lux": "b2108857-7c20-44ae-9111-449ecde12c47",
    "Optimisers": "3bd65402-5787-11e9-1adc-39752487f4e2",
    "Zygote": "e88e6eb3-aa80-5325-afca-941959d7151f",
    "SimpleChains": "de6bee2f-e2f4-4ec7-b6ed-219cc6f6e9e5",
}
NEEDED = {
    "Random": "9a3f8284-a2c9-5f02-9a11-845980a1fd5c",
    "Statistics": "10745b16-79ce-11e8-11f9-7d13ad32a3b2",
    "Optimisers": PACKAGES["Optimisers"],
}


def library(folder: Path) -> Path:
    """Make a folder in which Julia finds the packages."""
    for name, uuid in PACKAGES.items():
        source = folder / name / "src"
        source.mkdir(parents=True)
        shutil.copy(STAND_INS / f"{name}.jl", source)
        shutil.copy(STAND_INS / "parts.jl", source)
        needed = "".join(f'{other} = "{its}"\n' for other, its in NEEDED.items() if other != name)
        (folder / name / "Project.toml").write_text(
            f'name = "{name}"\nuuid = "{uuid}"\nversion = "0.14.99"\n[deps]\n{needed}'
        )
    return folder


def look_into(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let Julia look for packages in a library, and keep beside it what it compiles and what is known of them."""
    patch.setenv("JULIA_LOAD_PATH", f"{folder}:")
    patch.setenv("JULIA_DEPOT_PATH", f"{folder.with_name('depot')}:")
    patch.setattr(packages, "Memory", lambda: Memory(folder.with_name("memory")))


@pytest.fixture
def own_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library that nothing is known of yet, and that the test may change."""
    look_into(library(tmp_path / "library"), monkeypatch)
    return tmp_path / "library"


@pytest.fixture(scope="module")
def common_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the other tests, whose packages are compiled once."""
    return library(tmp_path_factory.mktemp("packages") / "library")


@pytest.fixture
def with_library(common_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_into(common_library, monkeypatch)


# --- Whether the packages are there ---


@pytest.mark.usefixtures("julia", "own_library")
def test_a_package_is_found_where_julia_looks_and_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.package("Flux", ("setup", "update!")) == packages.Package("0.14.99", "")
    monkeypatch.setattr("subprocess.run", lambda *a, **k: pytest.fail("Julia was started once more"))
    assert packages.package("Flux", ("setup", "update!")).version == "0.14.99"


def test_a_package_that_julia_lacks_or_cannot_use(julia: Julia, own_library: Path) -> None:
    shutil.rmtree(own_library / "Lux")
    found = packages.package("Lux")
    assert f"Julia {julia.version} has no package Lux: " in found.problem
    assert 'Pkg.add("Lux")' in found.problem
    assert (
        "it is too old or too new, and lacks train_on_the_moon."
        in packages.package("Flux", ("setup", "train_on_the_moon")).problem
    )
    (own_library / "Flux" / "src" / "Flux.jl").write_text('module Flux\nerror("out of order")\nend')
    assert "out of order" in packages.package("Flux").problem


def test_environments_and_depots_are_looked_into(julia: Julia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JULIA_DEPOT_PATH", str(tmp_path))
    monkeypatch.delenv("JULIA_LOAD_PATH", raising=False)
    home = tmp_path / "environments" / "v{}.{}".format(*julia.release)
    home.mkdir(parents=True)
    (home / "Project.toml").write_text('[deps]\nNoSuchPackage = "587475ba-b771-5e3f-ad9e-33799f191a9d"\n')
    monkeypatch.setattr(packages, "Memory", lambda: Memory(tmp_path / "memory"))
    problem = packages.package("NoSuchPackage").problem
    assert f"named in {home / 'Project.toml'}" in problem
    assert "loading it ended with exit code 1" in problem


@pytest.mark.usefixtures("julia", "own_library")
@pytest.mark.parametrize("ending", ["killed", "late"])
def test_a_package_whose_loading_was_ended_is_tried_again(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(command: list[str], *_: Any) -> subprocess.CompletedProcess[str]:
        if ending == "late":
            raise subprocess.TimeoutExpired(command, 1200)
        return subprocess.CompletedProcess(command, -9, "", "")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(packages, "completed", ended)
        assert "for want of memory" in packages.package("Flux").problem or ending == "late"
    assert packages.package("Flux") == packages.Package("0.14.99", "")


@pytest.mark.usefixtures("julia")
def test_a_folder_that_may_not_be_looked_into_has_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JULIA_LOAD_PATH", "/" + 300 * "x")
    assert "has no package Flux" in packages.package("Flux").problem


def test_without_julia_its_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "status", lambda: Status(None, "no Julia that works was found", {}))
    assert packages.package("Flux").problem == "no Julia that works was found"
    for name in OLDEST:
        found = registry.availability(name)
        assert not found.ok
        assert found.reason == "no Julia that works was found"


OLDEST = {"flux": (1, 6), "lux": (1, 10), "simplechains": (1, 10)}


@pytest.mark.usefixtures("with_library")
@pytest.mark.parametrize("name", OLDEST)
def test_an_engine_is_there_with_all_of_its_packages(name: str, julia: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "{}.{}".format(*OLDEST[name])
    if julia.release < OLDEST[name]:
        assert f"needs Julia {wanted} or later, found {julia.version}" in registry.availability(name).reason
    known = packages.status()
    recent = dataclasses.replace(julia, version="1.10.0")
    monkeypatch.setattr(packages, "status", lambda: dataclasses.replace(known, julia=recent))
    found = registry.availability(name)
    assert found.ok, found.reason
    assert found.versions[name] == "0.14.99"
    assert registry.get(name).prepare is registry.get("julia").prepare, "its entry points are the Julia engine's"


@pytest.mark.parametrize("missing", ["Lux", "Optimisers", "Zygote"])
def test_lux_needs_its_companions(missing: str, julia: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def package(name: str, *_: Any) -> packages.Package:
        asked.append(name)
        return packages.Package("", f"there is no {name}") if name == missing else packages.Package("1.2.3", "")

    monkeypatch.setattr(packages, "package", package)
    assert registry.availability("lux").reason == f"there is no {missing}"
    assert asked[-1] == missing, "after what is missing nothing more is looked for"


# --- What is refused ---


class JuliaWouldStart(Exception):
    """In place of it."""


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, spec.ModelSpec, Optimizer], None]:
    """Ask an engine for a session; `JuliaWouldStart` when Julia would be started for it."""

    def load(session: Any, threads: int) -> None:
        raise JuliaWouldStart("nothing is refused")

    monkeypatch.setattr(julia_package.PackageSession, "_load", load)
    sessions = {"flux": FluxSession, "lux": LuxSession, "simplechains": SimpleChainsSession}
    return lambda name, made, optimizer: sessions[name](made, weights.initialise(made, 0, "float32"), optimizer, 10)


@pytest.mark.parametrize("name", ["flux", "lux"])
@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer("adamw", 0.1),
        Optimizer("sgd", 0.1, weight_decay=0.1),
        Optimizer("adam", 0.1, clip_norm=1.0),
        Optimizer("rmsprop", 0.1, momentum=0.5),
    ],
)
def test_optimizers_that_its_versions_have_not_alike(
    optimizer: Optimizer, name: str, small_paper_model: Any, begin: Made
) -> None:
    with pytest.raises(ConfigurationError, match=f"{optimizer.name}: the engine {name} has sgd, rmsprop without"):
        begin(name, small_paper_model, optimizer)


@pytest.mark.parametrize("name", ["flux", "lux"])
def test_layers_that_it_has_not(name: str, model: Made, begin: Made) -> None:
    other = model([4], {"id": "norm", "op": "batch_norm"}, {"op": "dense", "units": 3})
    with pytest.raises(SpecError, match=rf'layers\[0\] \(id "norm"\): the engine {name} has no batch_norm'):
        begin(name, other, Optimizer("sgd", 0.1))


DENSE: dict[str, Any] = {"op": "dense", "units": 3}


@pytest.mark.parametrize(
    ("shape", "layers", "message"),
    [
        ([3, 4], [{"op": "rnn", "units": 3}, DENSE], r"layers\[0\] .*the engine simplechains has no rnn"),
        ([7], [{"op": "embedding", "vocabulary": 5, "dimension": 2}, {"op": "flatten"}, DENSE], "has no embedding"),
        ([2, 7], [{"op": "conv1d", "filters": 2, "kernel": 3}, {"op": "flatten"}, DENSE], "has no conv1d"),
        ([4], [DENSE, {"op": "dropout", "rate": 0.5}, DENSE], r"layers\[1\] .*has no dropout"),
        ([4], [DENSE, {"op": "activation", "activation": "sigmoid"}, DENSE], "has no sigmoid"),
        ([4], [DENSE, {"op": "reshape", "shape": [1, 3]}, {"op": "flatten"}, DENSE], "has no reshape but in front"),
        ([2, 4], [DENSE, {"op": "flatten"}, DENSE], "put a flatten before it"),
        (
            [1, 6, 6],
            [{"op": "conv2d", "filters": 2, "kernel": 3, "padding": 1}, {"op": "flatten"}, DENSE],
            "has conv2d with stride, dilation and groups 1 and without padding",
        ),
        (
            [1, 5, 6],
            [{"op": "max_pool2d", "window": 2}, {"op": "flatten"}, DENSE],
            "has max_pool2d with windows side by side that leave nothing over",
        ),
    ],
)
def test_networks_that_simplechains_has_not(
    shape: list[int], layers: Any, message: str, model: Made, begin: Made
) -> None:
    with pytest.raises(SpecError, match=message):
        begin("simplechains", model(shape, *layers), Optimizer("sgd", 0.1))


def test_losses_and_optimizers_that_simplechains_has_not(model: Made, begin: Made) -> None:
    yes_or_no = model([4], {"op": "dense", "units": 1}, loss="binary_cross_entropy")
    with pytest.raises(SpecError, match="has softmax_cross_entropy and mean_squared_error of one axis, found binary"):
        begin("simplechains", yes_or_no, Optimizer("sgd", 0.1))
    with pytest.raises(ConfigurationError, match="adam: the engine simplechains has sgd, without"):
        begin("simplechains", model([4], DENSE), Optimizer("adam", 0.1))
    with pytest.raises(ConfigurationError, match="no nesterov"):
        begin("simplechains", model([4], DENSE), Optimizer("sgd", 0.1, momentum=0.9, nesterov=True))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mnist-cnn", JuliaWouldStart, "nothing is refused"),
        ("mnist-rnn", SpecError, "the engine simplechains has no rnn"),
        ("imdb-cnn", SpecError, "the engine simplechains has no embedding"),
    ],
)
def test_the_papers_networks_in_simplechains(
    name: str, error: type[Exception], message: str, published: Made, begin: Made
) -> None:
    with pytest.raises(error, match=message):
        begin("simplechains", published(name), Optimizer("sgd", 0.01))


# --- What they compute ---


def results(session: Session, x: Any, y: Any, order: Any) -> dict[str, Any]:
    """What a session makes of some data, by name."""
    loss, gradients = session.loss_and_gradients(x, y)
    found = {"loss": loss, "output": session.predict(x)}
    found |= {f"gradient of {key}": array for key, array in gradients.items()}
    found["losses"] = session.train_epoch(x, y, order)
    evaluation = session.evaluate(x, y)
    found |= {**session.params(), "loss of all": evaluation.loss, "accuracy": evaluation.accuracy}
    session.close()
    return found


# Run in its own process: Julia and PyTorch must not share one, and the depot must be set before Julia starts.
RUN = f"""
from __future__ import annotations
import importlib, json, sys
import numpy as np
from bridge import registry, spec
from bridge.session import Optimizer

{inspect.getsource(results)}

for name, path in json.loads(sys.argv[1]):
    module, _, kind = registry.get(name).adapter.partition(":")
    with np.load(path + ".npz") as file:
        arrays = dict(file)
    made = spec.load(path + ".toml")
    x, y, order = (arrays.pop(name) for name in ("x", "y", "order"))
    optimizer = Optimizer(**json.load(open(path + ".json")))
    session = getattr(importlib.import_module(module), kind)(made, arrays, optimizer, 3, "float64", 2)
    np.savez(f"{{path}}-{{name}}.npz", **results(session, x, y, order))
"""

RELU = {"op": "activation", "activation": "relu"}
CASES: dict[str, tuple[list[int], str, list[dict[str, Any]], str, Optimizer]] = {
    "dense": (
        [2, 3],
        "float64",
        [{"op": "dense", "units": 4}, {"op": "activation", "activation": "softmax"}, {"op": "dense", "units": 3}],
        "softmax_cross_entropy",
        Optimizer("sgd", 0.1, momentum=0.9, nesterov=True),
    ),
    "recurrent": (
        [12],
        "float64",
        [
            {"op": "reshape", "shape": [3, 4]},
            {"op": "gru", "units": 3, "returns": "sequence"},
            {"op": "lstm", "units": 2, "returns": "sequence"},
            {"op": "rnn", "units": 3},
            {"op": "dense", "units": 2, "bias": False},
        ],
        "mean_squared_error",
        Optimizer("sgd", 0.1, momentum=0.9),
    ),
    "images": (
        [2, 7, 6],
        "float64",
        [
            {
                "op": "conv2d",
                "filters": 4,
                "kernel": [3, 2],
                "stride": [1, 2],
                "padding": [[1, 0], [2, 1]],
                "dilation": [2, 1],
                "groups": 2,
            },
            RELU,
            {"op": "max_pool2d", "window": [2, 3], "stride": [1, 2], "padding": [[1, 0], [0, 1]]},
            {"op": "avg_pool2d", "window": [2, 1], "padding": [[0, 1], [0, 0]]},
            {"op": "flatten"},
            {"op": "dense", "units": 3},
        ],
        "softmax_cross_entropy",
        Optimizer("adam", 0.01),
    ),
    "tokens": (
        [7],
        "int64",
        [
            {"op": "embedding", "vocabulary": 9, "dimension": 3, "padding_index": 0},
            {"op": "permute_dims", "axes": [1, 0]},
            {"op": "conv1d", "filters": 2, "kernel": 3},
            {"op": "global_max_pool"},
            {"op": "dense", "units": 1},
        ],
        "binary_cross_entropy",
        Optimizer("adam", 0.01),
    ),
    "frozen": (
        [7],
        "int64",
        [
            {"op": "embedding", "vocabulary": 9, "dimension": 3, "trainable": False},
            {"op": "permute_dims", "axes": [1, 0]},
            {"op": "global_avg_pool"},
            {"op": "dropout", "rate": 0.0},
            {"op": "dense", "units": 1},
        ],
        "binary_cross_entropy",
        Optimizer("rmsprop", 0.01, alpha=0.8, eps=1e-3),
    ),
    "small-images": (
        [140],
        "float64",
        [
            {"op": "reshape", "shape": [2, 7, 10]},
            {"op": "conv2d", "filters": 3, "kernel": [2, 3], "bias": False},
            RELU,
            {"op": "max_pool2d", "window": [3, 2]},
            {"op": "conv2d", "filters": 2, "kernel": [2, 1]},
            {"op": "activation", "activation": "tanh"},
            {"op": "flatten"},
            {"op": "dense", "units": 4, "bias": False},
            {"op": "activation", "activation": "tanh"},
            {"op": "dense", "units": 3},
        ],
        "softmax_cross_entropy",
        Optimizer("sgd", 0.1, momentum=0.9),
    ),
    "small-dense": (
        [5],
        "float64",
        # SimpleChains 0.4.8 ends in an error for relu behind fewer than 8 units, where the CPU has AVX-512.
        [RELU, {"op": "dense", "units": 8}, RELU, {"op": "dense", "units": 2, "bias": False}],
        "mean_squared_error",
        Optimizer("sgd", 0.1),
    ),
}
IN = {name: ("flux", "lux") + (("simplechains",) if name.startswith("small") else ()) for name in CASES}


@pytest.mark.usefixtures("julia", "with_library")
def test_sessions_compute_what_the_numpy_engine_does(
    tmp_path: Path, model: Made, random_params: Made, random_data: Made
) -> None:
    """Within what finite differences in float64 allow."""
    compare([(engine, name) for name in CASES for engine in IN[name]], tmp_path, model, random_params, random_data)


@pytest.mark.timeout(LONGEST + 100)
@pytest.mark.usefixtures("julia")
@pytest.mark.parametrize("engine", OLDEST)
def test_the_packages_that_julia_has_compute_what_the_numpy_engine_does(
    engine: str, tmp_path: Path, model: Made, random_params: Made, random_data: Made
) -> None:
    found = registry.availability(engine)
    if not found.ok:
        pytest.skip(f"does not apply: {found.reason}")
    runs = [(engine, name) for name in CASES if engine in IN[name]]
    compare(runs, tmp_path, model, random_params, random_data)


def compare(runs: list[tuple[str, str]], folder: Path, model: Made, random_params: Made, random_data: Made) -> None:
    """Run cases in engines, all in one process of Julia, and compare with the numpy engine."""
    rows, expected = 8, {}
    for name in dict.fromkeys(name for _, name in runs):
        shape, dtype, layers, loss, optimizer = CASES[name]
        made = model(shape, *layers, loss=loss, dtype=dtype)
        params, (x, y) = random_params(made, "float64", 0.5), random_data(made, rows, "float64")
        order = np.arange(rows)[::-1].copy()
        (folder / f"{name}.toml").write_text(made.dump())
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(optimizer)))
        np.savez(folder / f"{name}.npz", x=x, y=y, order=order, **params)
        session = registry.get("numpy").build(made, params, optimizer, 3, "float64", 1)
        expected[name] = results(session, x, y, order)
    given = json.dumps([(engine, str(folder / name)) for engine, name in runs])
    command = [sys.executable, "-c", RUN, given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    for engine_name, name in runs:
        with np.load(folder / f"{name}-{engine_name}.npz") as computed:
            wanted, where = expected[name], f"{engine_name}, {name}"
            assert set(computed) == set(wanted)
            for key, array in wanted.items():
                np.testing.assert_allclose(computed[key], array, rtol=1e-5, atol=1e-6, err_msg=f"{where}: {key}")
