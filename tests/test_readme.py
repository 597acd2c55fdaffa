"""What the README tells a user to type works."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from bridge import engine
from bridge.julia.find import Julia
from experiments import formats, papers
from experiments.cli import cli
from experiments.report import tables
from experiments.report.view import one_machine, paper_view
from experiments.results import Tidy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHELL = "".join(text for language, text in BLOCKS if language in ("", "sh"))


RACES = ("mnist-rnn-e", "mnist-cnn-batch100", "mnist-cnn", "imdb-cnn-a")
"""The studies whose races stand in the README, as far as the committed results have them."""

JULIA_FROM_PYTHON = "from bridge import julia"
DATA = """
import numpy as np
rng = np.random.default_rng(0)
images, labels, order = rng.random((250, 784), dtype=np.float32), rng.integers(0, 10, 250), rng.permutation(250)
test_images, test_labels = rng.random((50, 784), dtype=np.float32), rng.integers(0, 10, 50)
"""


def test_the_python_examples_run(rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {
        "images": rng.random((250, 784), dtype=np.float32),
        "labels": rng.integers(0, 10, 250),
        "order": rng.permutation(250),
        "test_images": rng.random((50, 784), dtype=np.float32),
        "test_labels": rng.integers(0, 10, 50),
    }
    examples = [text for language, text in BLOCKS if language == "python" and JULIA_FROM_PYTHON not in text]
    assert len(examples) == 3
    steps = []
    for example in examples:
        names = dict(given)
        exec(compile(example, "<README.md>", "exec"), names)
        steps.append(len(names.get("losses", ())))
    assert steps == [0, 3, 4]  # 250 rows in batches of 100, 200 pictures in batches of 50
    said = capsys.readouterr().out
    assert "accuracy" in said
    assert "weight (6, 1, 3, 3)" in said


def test_the_examples_of_julia_from_python_run(julia: Julia) -> None:
    training, function = [text for language, text in BLOCKS if language == "python" and JULIA_FROM_PYTHON in text]
    assert run([sys.executable, "-c", function + "print(gradient.shape)"]) == "(3, 2)\n"
    done = run([sys.executable, "-c", DATA + training + "print(losses.shape, logits.shape, sorted(gradients))"])
    assert "accuracy" in done
    assert "(3,) (50, 10) ['output.bias', 'output.weight', 'rnn.bias', 'rnn.recurrent', 'rnn.weight']" in done


def test_the_examples_in_julia_run(julia: Julia) -> None:
    examples = [text for language, text in BLOCKS if language == "julia"]
    command = [julia.executable, "--startup-file=no", f"--project={ROOT / 'julia_engine'}", "-e"]
    said = run([*command, "".join(example + "println(length(losses))\n" for example in examples)], julia.environment(1))
    assert re.fullmatch(r"Evaluation\(.*\)\n10\n4\n", said)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_its_races_are_those_of_the_committed_results() -> None:
    expected = races(Tidy.load(ROOT / "paper" / "results"))
    assert expected in README, f"the README's table of races should be\n{expected}"


def races(results: Tidy) -> str:
    """A row for each race, a column for each engine that took part in any of them."""
    rows, labels, machines = [], {}, []
    for key in RACES:
        view = paper_view(papers.load_paper(key), results)
        raced = [row for row in tables.race(view).rows if row["step_us_median"]]
        assert all(row["data"] == "real" for row in raced)
        machines += [row["machine"] for row in raced]
        labels |= {row["engine"]: row["system"] for row in raced}
        for threads in sorted({row["threads"] for row in raced}, reverse=True):
            cells = {row["engine"]: race_cell(row) for row in raced if row["threads"] == threads}
            rows.append((f"`{key}`, {threads} thread{'s' if threads > 1 else ''}", cells))
    engines = [name for name in engine.names() if name in labels]
    lines = [[f"step \\[µs\\], {one_machine(machines, 'the races')}", *(labels[name] for name in engines)]]
    lines.append([":---", *("---:" for _ in engines)])
    lines += [[title, *(cells.get(name, "—") for name in engines)] for title, cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def race_cell(row: dict[str, Any]) -> str:
    step = formats.significant(row["step_us_median"])
    return f"{step} ({row['ratio_median']:.2f})" if row["ratio_median"] and row["engine"] != "torch" else step


def test_its_allocations_are_those_of_the_committed_results() -> None:
    view = paper_view(papers.load_paper("mnist-rnn-e"), Tidy.load(ROOT / "paper" / "results"))
    allocated = {item["engine"]: item for item in tables.allocations(view).rows if "engine" in item}
    for name in ("numpy", "julia", "torch"):
        assert formats.size(allocated[name]["bytes_later_epochs"]) in README


def test_its_word_about_accuracies_is_true_of_the_committed_results() -> None:
    assert "From the same weights all engines end within half a point of PyTorch's test accuracy." in README
    results = Tidy.load(ROOT / "paper" / "results")
    rows = [
        row for key in papers.paper_keys() for row in tables.parity(paper_view(papers.load_paper(key), results)).rows
    ]
    differences = [row["max_test_accuracy_difference"] for row in rows if row.get("seeds")]
    assert len(differences) > 30
    assert max(differences) <= 0.005


def test_its_lists_of_studies_engines_and_extras_are_complete() -> None:
    assert named_in("study") == papers.paper_keys()
    assert named_in("engine") == sorted(engine.names())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"^pip install '\.\[(.*)\]'", SHELL, flags=re.MULTILINE)
    assert {*extras.split(","), "bench", "docs", "test", "dev", "all"} == set(project["optional-dependencies"])


def named_in(heading: str) -> list[str]:
    """The names between backticks in the first column of the table whose first heading is this."""
    (rows,) = re.findall(rf"^\| {heading} \|.*\n((?:\|.*\n)+)", README, flags=re.MULTILINE)
    return sorted(re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in rows.splitlines())))


def test_the_commands_exist() -> None:
    assert isinstance(cli, click.Group)
    named = set(re.findall(r"^twingrad ([a-z]+)", SHELL, flags=re.MULTILINE))
    assert {"list", "run", "race", "report", "paper", "train"} <= named <= set(cli.commands)


def test_the_options_exist() -> None:
    for command, rest in re.findall(r"^twingrad ([a-z]+)([^#\n]*)", SHELL, flags=re.MULTILINE):
        known = {option for parameter in cli.commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"reproduce", "test", "bench", "bench-compare"} <= set(re.findall(r"make ([a-z-]+)", SHELL)) <= targets
