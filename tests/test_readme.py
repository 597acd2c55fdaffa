"""What the README tells a user to type works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from experiments.cli import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHELL = "".join(text for language, text in BLOCKS if language in ("", "sh"))


def test_the_python_examples_run(rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {
        "images": rng.random((250, 784), dtype=np.float32),
        "labels": rng.integers(0, 10, 250),
        "order": rng.permutation(250),
        "test_images": rng.random((50, 784), dtype=np.float32),
        "test_labels": rng.integers(0, 10, 50),
    }
    examples = [text for language, text in BLOCKS if language == "python"]
    assert len(examples) == 2
    for example in examples:
        names = dict(given)
        exec(compile(example, "<README.md>", "exec"), names)
    assert len(names["losses"]) == 3  # of the last example: 250 rows in batches of 100
    assert "accuracy" in capsys.readouterr().out


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
