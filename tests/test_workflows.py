"""The workflows and the Containerfile are well formed, call what everybody calls, and work in a fresh environment."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTAINERFILE = (ROOT / "Containerfile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "WORKDIR"}


def release_notes() -> ModuleType:
    found = importlib.util.spec_from_file_location("release_notes", ROOT / "tests" / "release_notes.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def steps(path: Path) -> Iterator[dict[str, Any]]:
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe")
    for job in yaml.load(path)["jobs"].values():
        yield from job["steps"]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, continued lines joined."""
    lines = [line for line in CONTAINERFILE.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined]


def test_the_workflows_are_those_of_the_schema() -> None:
    pytest.importorskip("check_jsonschema")
    assert [path.stem for path in WORKFLOWS] == ["julia", "pages", "release", "tests"]
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*check, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check-jsonschema" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_schema_finds_a_step_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("name: x\non: push\njobs:\n  a:\n    runs-on: b\n    steps:\n      - runs: make test\n")
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(wrong)]
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_workflows_call_what_everybody_calls(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    for command in commands:
        program, *words = shlex.split(command.splitlines()[0])
        if program == "make":
            assert words[0] in TARGETS, command
        elif program == "gh":
            assert words[:2] == ["release", "create"]
        else:
            assert (ROOT / program).is_file() and os.access(ROOT / program, os.X_OK), command
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]), step["uses"]


def test_a_release_attaches_packages_paper_page_and_raw_results() -> None:
    said = subprocess.run(["make", "-n", "release", "TAG=v1.0.0"], cwd=ROOT, capture_output=True, text=True, check=True)
    for part in ("hatchling build", "paper.pdf", "report.html", "raw.tar.xz", "release_notes.py v1.0.0"):
        assert part in said.stdout
    (attached,) = [
        step["run"] for step in steps(ROOT / ".github/workflows/release.yml") if "gh " in step.get("run", "")
    ]
    assert "build/release/*" in attached and "build/release-notes.md" in attached


def test_the_notes_are_the_changelogs_section_and_a_wrong_tag_is_named() -> None:
    module = release_notes()
    notes, problem = module.notes, module.problem
    changelog = "# Changelog\n\n## 0.2.0\n\n- new\n\n## 0.1.0\n\n- old\n"
    assert notes(changelog, "0.2.0") == "- new" and notes(changelog, "0.1.0") == "- old"
    citation = "\nversion: 0.2.0\n"
    assert problem("v0.2.0", "0.2.0", citation, changelog, "0.2.0") == ""
    assert "pyproject.toml has version 0.2.0" in problem("v0.3.0", "0.2.0", citation, changelog, "0.2.0")
    assert "Project.toml has version 0.1.0" in problem("v0.2.0", "0.2.0", citation, changelog, "0.1.0")
    assert "CITATION.cff" in problem("v0.1.0", "0.1.0", citation, changelog, "0.1.0")
    assert "says nothing of version 0.2.0" in problem("v0.2.0", "0.2.0", citation, "# Changelog\n", "0.2.0")
    assert problem("", "9.9.9", "", "", "") == ""


def test_all_files_with_the_version_have_the_same() -> None:
    pyproject, julia = (
        tomllib.loads((ROOT / name).read_text(encoding="utf-8"))
        for name in ("pyproject.toml", "julia_engine/Project.toml")
    )
    version = pyproject["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    tag, changelog = f"v{version}", f"## {version}\n\n- new\n"
    assert release_notes().problem(tag, version, citation, changelog, julia["version"]) == ""


def test_the_containerfile_is_well_formed() -> None:
    found = instructions()
    assert found[0] == ("FROM", "python:3.11-slim")
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert ("ENTRYPOINT", '["twingrad"]') in found
    for name, rest in found:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], check=False).returncode == 0, rest
    assert "It has not been built" in CONTAINERFILE


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh clone of what is committed, with its own home."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    (tmp_path / "home").mkdir()
    return tmp_path / "clone"


def fresh(folder: Path, *path: Path) -> dict[str, str]:
    kept = ("LANG", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "PIP_FIND_LINKS", "TWINGRAD_TEST_SEED")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    programs = os.pathsep.join([*map(str, path), "/usr/local/bin", "/usr/bin", "/bin"])
    return variables | {"HOME": str(folder / "home"), "PATH": programs}


@pytest.mark.campaign
def test_the_commands_of_the_containerfile_in_a_fresh_environment(checkout: Path, tmp_path: Path) -> None:
    if os.environ.get("TWINGRAD_TEST_PROFILE") != "campaign":
        pytest.skip("does not apply: installs some hundred MB; `make campaign ARGS='-k containerfile'` does so")
    venv.create(tmp_path / "venv", with_pip=True)
    variables = fresh(tmp_path, tmp_path / "venv" / "bin")
    for name, rest in instructions():
        if name == "ARG":
            variables |= dict([rest.split("=", 1)])
        if name == "ENV":
            variables |= dict(item.split("=", 1) for item in shlex.split(rest))
            variables |= {"TWINGRAD_DATA": "", "TWINGRAD_CACHE": str(tmp_path / "cache")}
        if name == "RUN" and "apt-get" not in rest:
            command = rest.replace("mkdir -p /data /results && ", "")
            done = subprocess.run(
                ["bash", "-c", command], cwd=checkout, env=variables, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    options = ["run", "mnist-rnn-e", "--engines", "numpy", "--measure", "time", "--seeds", "1"]
    for words in (["doctor"], ["check", "mnist-cnn"], options, ["report", "mnist-rnn-e"]):
        variables["TWINGRAD_OFFLINE"] = "1"
        done = subprocess.run(
            ["twingrad", *words], cwd=tmp_path / "home", env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.campaign
def test_the_commands_of_the_workflows_in_a_fresh_clone(checkout: Path, tmp_path: Path) -> None:
    """All but the tests themselves, the benchmarks of a whole commit, and what speaks to the host of the workflow."""
    if os.environ.get("TWINGRAD_TEST_PROFILE") != "campaign":
        pytest.skip("does not apply: installs 3.5 GB; `make campaign ARGS='-k fresh_clone'` does so")
    python = Path(sys.executable).resolve().parent
    variables = fresh(tmp_path, python) | {"GITHUB_REF_NAME": ""}
    for path in WORKFLOWS:
        for step in steps(path):
            command = step.get("run", "")
            if not command.startswith("make ") or command.startswith(("make test", "make bench")):
                continue
            done = subprocess.run(
                ["bash", "-c", command], cwd=checkout, env=variables, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    made = {
        file.name.split("-")[0] if "twingrad" in file.name else file.name
        for file in (checkout / "build/release").iterdir()
    }
    assert made == {"twingrad", "paper.pdf", "report.html", "raw.tar.xz"}
    assert (checkout / "build/site/index.html").is_file()
