"""What the README tells a user to type works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from bridge.julia.find import Julia
from experiments import config
from experiments.cli import cli
from experiments.report import select, table, tables
from experiments.results import Tidy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHELL = "".join(text for language, text in BLOCKS if language in ("", "sh"))


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
    assert len(examples) == 2
    for example in examples:
        names = dict(given)
        exec(compile(example, "<README.md>", "exec"), names)
    assert len(names["losses"]) == 3  # of the last example: 250 rows in batches of 100
    assert "accuracy" in capsys.readouterr().out


def test_the_example_of_julia_from_python_runs(julia: Julia) -> None:
    (example,) = [text for language, text in BLOCKS if language == "python" and JULIA_FROM_PYTHON in text]
    done = run([sys.executable, "-c", DATA + example + "print(losses.shape, logits.shape, sorted(gradients))"])
    assert "accuracy" in done
    assert "(3,) (50, 10) ['output.bias', 'output.weight', 'rnn.bias', 'rnn.recurrent', 'rnn.weight']" in done


def test_the_example_in_julia_runs(julia: Julia) -> None:
    (example,) = [text for language, text in BLOCKS if language == "julia"]
    command = [julia.executable, "--startup-file=no", f"--project={ROOT / 'julia_engine'}", "-e"]
    said = run([*command, example + "println(length(losses))"], julia.environment(1))
    assert re.fullmatch(r"Evaluation\(.*\)\n10\n", said)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_its_numbers_are_those_of_the_committed_results() -> None:
    paper = config.load_paper("mnist-rnn-e")
    view = select.view(paper, Tidy.load(ROOT / "paper" / "results"))
    race = [line for line in table.to_markdown(tables.race(view)).splitlines() if line.startswith("|")]
    assert "\n".join(race) in README
    allocated = {item["engine"]: item for item in tables.allocations(view).rows if "engine" in item}
    for engine in ("numpy", "julia", "torch"):
        assert table.size(allocated[engine]["bytes_later_epochs"]) in README


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
