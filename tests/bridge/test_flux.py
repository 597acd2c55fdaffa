"""Flux behind the protocol, tried on a stand-in: layouts, the order of batches, what is refused, where it is found."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import engine, spec
from bridge.adapters import flux
from bridge.engine import Optimizer
from bridge.errors import SpecError
from bridge.julia import packages
from bridge.julia.find import Julia
from bridge.julia.start import Status
from py_engine.errors import ConfigurationError

Made = Callable[..., Any]
ROOT = Path(spec.__file__).parents[1]
STAND_IN = Path(__file__).with_name("flux_stand_in.jl")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder in which Julia finds a package Flux."""
    package = tmp_path / "library" / "Flux"
    (package / "src").mkdir(parents=True)
    shutil.copy(STAND_IN, package / "src" / "Flux.jl")
    (package / "Project.toml").write_text(
        'name = "Flux"\nuuid = "587475ba-b771-5e3f-ad9e-33799f191a9c"\nversion = "0.14.99"\n'
        '[deps]\nStatistics = "10745b16-79ce-11e8-11f9-7d13ad32a3b2"\n'
    )
    return package.parent


@pytest.fixture
def with_library(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("JULIA_LOAD_PATH", f"{library}:")
    monkeypatch.setenv("JULIA_DEPOT_PATH", f"{tmp_path / 'depot'}:")
    return library


# --- Whether there is a Flux ---


def test_a_package_is_found_where_julia_looks_and_loaded_once(
    julia: Julia, with_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packages.package("Flux", ("setup", "update!")) == packages.Package("0.14.99", "")
    monkeypatch.setattr("subprocess.run", lambda *a, **k: pytest.fail("Julia was started once more"))
    assert packages.package("Flux", ("setup", "update!")).version == "0.14.99"
    row = engine.get("flux")
    if julia.release >= (1, 6):
        assert row.availability().versions["flux"] == "0.14.99"
    else:
        assert "Flux needs Julia 1.6 or later, found" in row.availability().reason


def test_a_package_that_julia_lacks_or_cannot_use(julia: Julia, with_library: Path) -> None:
    found = packages.package("Lux")
    assert f"Julia {julia.version} has no package Lux: " in found.problem
    assert 'Pkg.add("Lux")' in found.problem
    assert (
        "it is too old or too new, and lacks train_on_the_moon."
        in packages.package("Flux", ("setup", "train_on_the_moon")).problem
    )
    (with_library / "Flux" / "src" / "Flux.jl").write_text('module Flux\nerror("out of order")\nend')
    assert "out of order" in packages.package("Flux").problem


def test_environments_and_depots_are_looked_into(julia: Julia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JULIA_DEPOT_PATH", str(tmp_path))
    monkeypatch.delenv("JULIA_LOAD_PATH", raising=False)
    home = tmp_path / "environments" / "v{}.{}".format(*julia.release)
    home.mkdir(parents=True)
    (home / "Project.toml").write_text('[deps]\nNoSuchPackage = "587475ba-b771-5e3f-ad9e-33799f191a9d"\n')
    problem = packages.package("NoSuchPackage").problem
    assert f"named in {home / 'Project.toml'}" in problem
    assert "loading it ended with exit code 1" in problem


def test_without_julia_its_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "status", lambda: Status(None, "no Julia that works was found", {}))
    assert packages.package("Flux").problem == "no Julia that works was found"
    found = engine.availability("flux")
    assert not found.ok
    assert found.reason == "no Julia that works was found"


# --- What is refused ---


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer("adamw", 0.1),
        Optimizer("sgd", 0.1, weight_decay=0.1),
        Optimizer("adam", 0.1, clip_norm=1.0),
        Optimizer("rmsprop", 0.1, momentum=0.5),
    ],
)
def test_optimizers_that_its_versions_have_not_alike(optimizer: Optimizer, small_paper_model: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{optimizer.name}: the engine flux has sgd, rmsprop without"):
        flux.check(small_paper_model, optimizer)


def test_layers_that_it_has_not(model: Made) -> None:
    other = model([4], {"id": "norm", "op": "batch_norm"}, {"op": "dense", "units": 3})
    with pytest.raises(SpecError, match=r'layers\[0\] \(id "norm"\): the engine flux has no batch_norm'):
        flux.check(other, Optimizer("sgd", 0.1))


# --- What it computes ---

# Run in a process of its own: Julia and PyTorch must not share one, and the depot must be set before Julia starts.
RUN = """
import json, sys
import numpy as np
from bridge import spec, weights
from bridge.adapters.flux import FluxSession
from bridge.engine import Optimizer
for path in sys.argv[1:]:
    with np.load(path + ".npz") as file:
        arrays = dict(file)
    made = spec.load(path + ".toml")
    x, y, order = (arrays.pop(name) for name in ("x", "y", "order"))
    optimizer = Optimizer(**json.load(open(path + ".json")))
    session = FluxSession(made, arrays, optimizer, 3, "float64", 1)
    loss, gradients = session.loss_and_gradients(x, y)
    found = {"loss": loss, "output": session.predict(x)}
    found |= {f"gradient of {name}": array for name, array in gradients.items()}
    found["losses"] = session.train_epoch(x, y, order)
    evaluation = session.evaluate(x, y)
    found |= {**session.params(), "loss of all": evaluation.loss, "accuracy": evaluation.accuracy}
    session.close()
    np.savez(path + "-found.npz", **found)
"""

RELU = {"op": "activation", "activation": "relu"}
CASES: dict[str, tuple[list[int], str, list[dict[str, Any]], str, Optimizer]] = {
    "dense": (
        [2, 3],
        "float64",
        [{"op": "dense", "units": 4}, {"op": "activation", "activation": "softmax"}, {"op": "dense", "units": 3}],
        "softmax_cross_entropy",
        Optimizer("sgd", 0.1),
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
        Optimizer("adam", 0.01),
    ),
}


def test_sessions_compute_what_the_numpy_engine_does(
    julia: Julia, with_library: Path, tmp_path: Path, model: Made, random_params: Made, random_data: Made
) -> None:
    """Within what finite differences in float64 allow."""
    rows, expected = 8, {}
    for name, (shape, dtype, layers, loss, optimizer) in CASES.items():
        made = model(shape, *layers, loss=loss, dtype=dtype)
        params, (x, y) = random_params(made, "float64", 0.5), random_data(made, rows, "float64")
        order = np.arange(rows)[::-1].copy()
        (tmp_path / f"{name}.toml").write_text(made.dump())
        (tmp_path / f"{name}.json").write_text(json.dumps(dataclasses.asdict(optimizer)))
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, order=order, **params)
        session = engine.get("numpy").build(made, params, optimizer, 3, "float64", 1)
        value, gradients = session.loss_and_gradients(x, y)
        found = {"loss": value, "output": session.predict(x)}
        found |= {f"gradient of {key}": array for key, array in gradients.items()}
        found["losses"] = session.train_epoch(x, y, order)
        evaluation = session.evaluate(x, y)
        found |= {**session.params(), "loss of all": evaluation.loss, "accuracy": evaluation.accuracy}
        expected[name] = found
    command = [sys.executable, "-c", RUN, *(str(tmp_path / name) for name in CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    for name, wanted in expected.items():
        with np.load(tmp_path / f"{name}-found.npz") as computed:
            assert set(computed) == set(wanted)
            for key, array in wanted.items():
                np.testing.assert_allclose(computed[key], array, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {key}")
