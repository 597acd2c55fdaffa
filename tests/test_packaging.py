"""One wheel carries everything, and the arrows of imports point one way: experiments → bridge → engines."""

from __future__ import annotations

import ast
import email.parser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bridge.libjulia.find import Julia

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("py_engine", "bridge", "experiments")
# julia_engine is a folder of sources, not a Python package.
SHIPPED = (*PACKAGES, "julia_engine")
ARROWS = {"py_engine": {"py_engine"}, "bridge": {"py_engine", "bridge"}, "experiments": set(PACKAGES)}


def sources(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names that a file imports, at its top or inside a function, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = path.relative_to(ROOT).parts[:-1]
            if node.level > len(inside):
                pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno}: a relative import leaves the package")
            yield (inside[0] if node.level else (node.module or "").split(".")[0]), node.lineno


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distribution_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None, requirement
    return normalised(match[0])


CORE = {distribution_of(requirement) for requirement in PROJECT["dependencies"]}
EXTRAS = {
    extra: {distribution_of(requirement) for requirement in requirements}
    for extra, requirements in PROJECT["optional-dependencies"].items()
}
DECLARED = CORE.union(*EXTRAS.values())
# What a user has who does not develop TwinGrad.
FOR_USE = CORE.union(*(EXTRAS[extra] for extra in EXTRAS if extra not in ("bench", "test", "dev", "all")))


def run_isolated(
    code: str, cwd: Path, python: str | os.PathLike[str] = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [python, "-I", "-c", code],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = list(folder.glob("*.whl"))
    assert [path.name.split("-")[0] for path in built] == ["twingrad"]
    return zipfile.ZipFile(built[0])


@pytest.fixture(scope="session")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    wheel.extractall(folder)
    return folder


def with_all_they_require(distributions: set[str]) -> set[str]:
    """These and, over and over, what they require on this machine."""
    found: set[str] = set()
    waiting = set(distributions)
    while waiting:
        name = waiting.pop()
        found.add(name)
        requirements = map(Requirement, importlib.metadata.requires(name) or [])
        wanted = {
            normalised(requirement.name)
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        }
        waiting |= wanted - found
    return found


@pytest.fixture(scope="session")
def bare_python(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it requires, extras left out, and nothing else.

    What it requires is linked to rather than installed, so that no network is needed.
    """
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in with_all_they_require(CORE):
        distribution = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))).absolute())
    assert wheel.filename is not None
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    done = subprocess.run([*command, wheel.filename], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(next(entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))).decode()


def test_the_wheel_carries_every_file_of_the_shipped_folders(wheel: zipfile.ZipFile) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", *SHIPPED], cwd=ROOT, capture_output=True, check=True).stdout
    tracked = {name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()}
    assert not tracked - set(wheel.namelist())
    assert any(name.startswith("experiments/papers/") and name.endswith(".toml") for name in wheel.namelist())
    assert any(name.startswith("experiments/models/") and name.endswith(".toml") for name in wheel.namelist())
    assert "experiments/report/text/main.typ" in wheel.namelist()


def test_the_wheel_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} <= set(SHIPPED)
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.endswith(".pyc")]
    recipes = {path.name for path in (ROOT / "contrib").iterdir()} - {"__init__.py", "__pycache__"}
    assert recipes >= {"debian.py", "sysimage.jl"}
    bridge = [wheel.read(name) for name in wheel.namelist() if name.startswith("bridge/")]
    assert len(bridge) > 40 and not any(b"bullseye" in text or b"--output-o" in text for text in bridge)


def test_the_wheel_describes_itself(wheel: zipfile.ZipFile) -> None:
    described = email.parser.Parser().parsestr(metadata(wheel, "METADATA"))
    assert described["Name"] == "twingrad"
    assert described["Version"] == PROJECT["version"]
    assert described["License-Expression"] == "MIT"
    assert described["Requires-Python"] == ">=3.11"
    assert set(described.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    required = {distribution_of(line) for line in described.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert required == CORE
    assert "twingrad = experiments.__main__:main" in metadata(wheel, "entry_points.txt")
    assert "The TwinGrad authors" in metadata(wheel, "licenses/LICENSE")


def test_the_citation_names_the_version(wheel: zipfile.ZipFile) -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(PROJECT['version'])}$", citation, flags=re.MULTILINE)


def test_py_engine_pulls_in_numpy_threadpoolctl_and_the_standard_library_only(unpacked: Path) -> None:
    code = f"""
import pkgutil, sys
before = set(sys.modules)
sys.path.insert(0, {str(unpacked)!r})
import py_engine
assert py_engine.__file__.startswith({str(unpacked)!r}), py_engine.__file__
for module in pkgutil.walk_packages(py_engine.__path__, "py_engine."):
    __import__(module.name)
# Cython's runtime, inside numpy's own modules, registers two names that no file is behind.
pulled = {{name.split(".")[0] for name in set(sys.modules) - before if getattr(sys.modules[name], "__file__", None)}}
print(*sorted(pulled - sys.stdlib_module_names))
"""
    done = run_isolated(code, unpacked)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"py_engine", "numpy", "threadpoolctl"}


def test_the_papers_and_models_load_from_the_wheel(unpacked: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(unpacked)!r})
import experiments.papers as papers
assert papers.__file__.startswith({str(unpacked)!r}), papers.__file__
print(*(papers.load_paper(key).key for key in papers.paper_keys()))
"""
    done = run_isolated(code, unpacked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(path.stem for path in (ROOT / "experiments" / "papers").glob("[!_]*.toml"))


def test_the_command_answers_with_the_core_dependencies_alone(unpacked: Path) -> None:
    """`pip install twingrad` brings no extra: the command must still start, and say what it can do."""
    installed = importlib.metadata.packages_distributions()
    optional = {normalised(name) for name in DECLARED - CORE}
    blocked = sorted(
        module
        for module, distributions in installed.items()
        if {normalised(name) for name in distributions} & optional and module.isidentifier()
    )
    assert {"torch", "seaborn", "memray"} <= set(blocked)
    code = f"""
import sys
sys.path.insert(0, {str(unpacked)!r})
sys.modules.update(dict.fromkeys({blocked!r}))
sys.argv = ["twingrad", "--help"]
from experiments.cli import main
main()
"""
    done = run_isolated(code, unpacked)
    assert done.returncode == 0, done.stderr
    assert "reproduce" in done.stdout


def test_the_wheel_in_a_bare_environment_trains_on_the_julia_engine(
    bare_python: Path, julia: Julia, tmp_path: Path
) -> None:
    """Nothing is known of this Julia there, and nothing is compiled yet."""
    (tmp_path / "tiny.toml").write_text(
        """
        format = "twingrad-model"
        version = 1
        opset = 1
        name = "tiny"
        [input]
        shape = ["N", 6]
        dtype = "float32"
        [[layers]]
        id = "segments"
        op = "reshape"
        shape = [2, 3]
        [[layers]]
        id = "rnn"
        op = "rnn"
        units = 4
        [[layers]]
        id = "output"
        op = "dense"
        units = 2
        [loss]
        op = "softmax_cross_entropy"
        """,
        encoding="utf-8",
    )
    code = """
import importlib.util, sys
from pathlib import Path
import numpy as np
from bridge import julia
from bridge.libjulia.environment import ENGINE

assert ENGINE.is_dir() and ENGINE.is_relative_to(sys.prefix), ENGINE
assert not any(map(importlib.util.find_spec, ("torch", "pandas", "pytest")))
model = julia.build("tiny.toml", batch_size=8)
x = np.random.default_rng(0).standard_normal((20, 6), dtype=np.float32)
y = (x[:, 0] > 0).astype(np.int64)
before = model.evaluate(x, y).loss
losses = model.train_epoch(x, y, np.arange(20))
assert losses.shape == (3,) and np.isfinite(losses).all(), losses
assert model.evaluate(x, y).loss < before
print(julia.runtime().evaluate("pathof(TwinGrad)"))
"""
    done = run_isolated(
        code,
        tmp_path,
        bare_python,
        TWINGRAD_JULIA=julia.executable,
        TWINGRAD_CACHE=str(tmp_path / "cache"),
        JULIA_DEPOT_PATH=f"{tmp_path / 'depot'}{os.pathsep}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()).is_relative_to(bare_python.parents[1])
    assert list((tmp_path / "depot" / "compiled").rglob("TwinGrad/*.ji"))


def test_the_wheel_in_a_bare_environment_is_enough_to_look_check_train_and_predict(
    bare_python: Path, tmp_path: Path
) -> None:
    """What needs no package beyond the core: the doctor finds no problem, and files of MNIST are read."""
    environment = {"TWINGRAD_CACHE": str(tmp_path / "cache"), "TWINGRAD_OFFLINE": "1", "TWINGRAD_DATA": ""}
    commands = """
import json, sys
import numpy as np
from experiments import cli, doctor

doctor.TRIED_SECONDS = 0  # of steps of the studies' networks
assert cli.invoke(["doctor", "--json", "doctor.json"]) == 0
found = {row["name"]: row for row in json.load(open("doctor.json"))["rows"]}
assert not [name for name, row in found.items() if row["state"] == "problem"], found
assert sum("pip install" in row["advice"] and name.startswith("extra") for name, row in found.items()) == 3
assert cli.invoke(["list"]) == cli.invoke(["check", "mnist-rnn"]) == cli.invoke(["completion", "fish"]) == 0
rng = np.random.default_rng(0)
np.savez("rows.npz", x_train=rng.random((200, 784), np.float32), y_train=rng.integers(0, 10, 200))
trained = ["train", "mnist-rnn", "--data", "rows.npz", "--epochs", "1", "--save", "w.safetensors", "--threads", "1"]
assert cli.invoke([*trained, "--curve", "-"]) == 0
np.save("rows.npy", rng.random((5, 784), np.float32))
assert cli.invoke(["predict", "mnist-rnn", "w.safetensors", "rows.npy", "--threads", "1"]) == 0
assert cli.invoke(["train", "mnist-rnn", "--data", "mnist"]) == 2
assert cli.invoke(["report"]) == 2
assert not {"pandas", "matplotlib", "sklearn", "pooch"} & sys.modules.keys()
"""
    done = run_isolated(commands, tmp_path, bare_python, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything essential is there." in done.stdout
    assert done.stdout.count("python -m bridge.julia.install") <= 1  # one word for all engines that lack a Julia
    assert "pip install 'twingrad[data]'" in done.stderr  # of the data set that is nowhere
    assert "this needs the package matplotlib: pip install 'twingrad[reports]'" in done.stderr


def test_the_real_mnist_is_read_in_a_bare_environment(bare_python: Path, tmp_path: Path) -> None:
    folder = os.environ.get("TWINGRAD_DATA", "")
    if not (Path(folder) / "mnist").is_dir():
        pytest.skip("needs the real data: set TWINGRAD_DATA to the folder that holds mnist/")
    code = "from experiments.data import load; print(load('mnist').x_train.shape)"
    done = run_isolated(code, tmp_path, bare_python, TWINGRAD_DATA=folder)
    assert done.stdout == "(60000, 784)\n", done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    forbidden = {*PACKAGES, "contrib", "julia_engine", "tests"} - ARROWS[package]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for name, line in imports(path)
        if name in forbidden
    ]
    assert sources(package)
    assert not wrong


def test_py_engine_names_no_other_package() -> None:
    allowed = {"py_engine", "numpy", "threadpoolctl"} | sys.stdlib_module_names
    found = [(path.name, name) for path in sources("py_engine") for name, _ in imports(path) if name not in allowed]
    assert found == [("scipy_functions.py", "scipy")]  # late, for what scipy computes


@pytest.mark.parametrize("package", ["bridge", "experiments"])
def test_every_import_is_declared_in_the_core_or_an_extra(package: str) -> None:
    installed = importlib.metadata.packages_distributions()
    own = set(PACKAGES) | sys.stdlib_module_names
    undeclared = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for name, line in imports(path)
        if name not in own and not {normalised(found) for found in installed.get(name, [name])} & FOR_USE
    ]
    assert not undeclared


def test_frameworks_are_imported_by_their_adapters_only() -> None:
    """A framework lives in its own process, an engine's worker or a system's program: nothing else imports it.

    But for programs that time single functions of several in one process, or graphs in a separate one.
    """
    frameworks = {"torch", "tensorflow", "jax", "juliacall"}
    places = {ROOT / "bridge" / "adapters", ROOT / "bridge" / "julia", ROOT / "bridge" / "libjulia"}
    places |= {ROOT / "experiments" / "microbenchmarks" / "systems"}
    programs = {ROOT / "experiments" / "op_speed.py", ROOT / "experiments" / "measures" / "growth.py"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package in PACKAGES
        for path in sources(package)
        if path.parent not in places and path not in programs
        for name, line in imports(path)
        if name in frameworks
    ]
    assert not wrong


def test_constraints_pin_every_dependency_that_is_declared() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert DECLARED - {"twingrad"} <= {normalised(name) for name in pinned}


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    stub = tmp_path / "python-of-old"
    stub.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 && exit\nexit 1\n', encoding="utf-8")
    stub.chmod(0o755)
    done = subprocess.run(
        ["make", "lint", f"PYTHON={stub}", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or later" in done.stderr
    assert "Python 3.8.1" in done.stderr
    assert not (tmp_path / "venv").exists()


PROGRAM = """#!/bin/sh
for word; do printf '%s|' "$word"; done >> "$LOG"
echo >> "$LOG"
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; for name in python ruff mypy twingrad check-jsonschema; do cp "$0" "$3/bin/$name"; done ;;
esac
"""
"""Notes its arguments, and pretends to be Python: `-m venv` makes a folder of more such programs."""


@pytest.mark.parametrize(
    "goal",
    ["lint", "test", "reproduce", "sizes", "curves", "campaign", "docs", "bench", "bench-compare", "release"],
)
def test_make_takes_paths_with_blanks(goal: str, tmp_path: Path) -> None:
    stub, venv, log = tmp_path / "my python" / "python3", tmp_path / "my venv", tmp_path / "log"
    stub.parent.mkdir()
    stub.write_text(PROGRAM, encoding="utf-8")
    stub.chmod(0o755)
    source = tmp_path / "a source"
    (source / "paper" / "results").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    (source / "paper" / "results" / "raw.tar.xz").touch()
    (source / "build" / "report").mkdir(parents=True)
    paths = {"RESULTS": "my results", "JULIA": f"{tmp_path}/my julia/julia", "DASK": "tcp://a b"}
    command = ["make", goal, f"PYTHON={stub}", f"VENV={venv}", *(f"{name}={value}" for name, value in paths.items())]
    # A release has the page that a report makes, which nobody makes here.
    command += ["--ignore-errors"] if goal == "release" else []
    done = subprocess.run(
        command, cwd=source, env={**os.environ, "LOG": str(log)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = log.read_text(encoding="utf-8")
    assert f"-m|venv|{venv}|" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a source", "log", "my python", "my venv"]
    for given in {"reproduce": ["my results", "tcp://a b"], "sizes": ["my results"]}.get(goal, []):
        assert f"|{given}|" in said


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
