"""A new measure is one file: with it alone, papers and commands know it, and it is planned, run, kept and shown."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.sources import KINDS, PACKAGES, ROOT

MEASURE = '''"""How long engines take to build a network, by the batch size."""

from __future__ import annotations

from dataclasses import replace

from experiments.measures.measure import Measure
from experiments.measures.task import Assignment, Parts


def run(given: Assignment) -> Parts:
    """Build once for every batch size, in one worker; after each one the rows so far."""
    rows = []
    with given.start() as worker:
        for size in given.settings["batches"]:
            seconds = replace(given.task, batch_size=size).build(worker)
            rows.append({"batch": size, "phase": "build", "build_milliseconds": seconds * 1e3})
            given.watcher.step()
            yield {"building": rows}
        yield given.blas(worker)


MEASURE = Measure(
    name="building",
    place=20,
    title="building: time to build by batch size",
    about="time that an engine takes to build a network",
    words="building",
    run=run,
    form={"building": [{"batch": "count", "phase": "text", "build_milliseconds": "number"}]},
    plan="engines",
    options={"building_batches?": "counts"},
    settings=lambda job: {"batches": job.option("building_batches") or [1]},
    steps=lambda job: len(job.option("building_batches") or [1]),
    columns=("key", "paper", "engine", "label", "threads", "batch", "phase", "build_milliseconds", "data_source",
             "cpu_model", "machine", "created"),
    later=True,
    summary=("batch", "build_milliseconds"),
)
'''

PAPER = """
format = "twingrad-paper"
version = 2
key = "mine"
title = "Mine"
authors = []
task = "a task"
model = "mnist-rnn"
dataset = "mnist"
environment = "a machine"
engines = ["numpy", "torch"]
network = { units = 64 }
[training]
optimizer = "sgd"
learning_rate = 0.1
batch_size = 10
epochs = 1
pixels = "0 to 1"
threads = 1
[runs.full]
measures = ["building"]
building_batches = [10, 100]
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the packages with the new file, and a paper that asks for the measure."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in KINDS:
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    (tmp_path / "experiments" / "measures" / "building.py").write_text(MEASURE, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(PAPER, encoding="utf-8")
    return tmp_path


def twingrad(folder: Path, *arguments: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "TWINGRAD_DATA"}
    variables |= {"PYTHONPATH": str(folder), "TWINGRAD_OFFLINE": "1", "TWINGRAD_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "experiments", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_measure_in_a_file_of_its_own_is_planned_run_kept_and_shown(installed: Path) -> None:
    help_lines = [" ".join(line.split()) for line in twingrad(installed, "run", "--help").splitlines()]
    assert "building time that an engine takes to build a network" in help_lines
    said = twingrad(installed, "run", "mine.toml", "--results", "results")
    assert "2 rows  (in all" in said and "2 of 2 runs finished" in said
    lines = [line.split() for line in said.splitlines()]
    table = lines[lines.index(["PAPER", "ENGINE", "BATCH", "BUILD", "MILLISECONDS"]) :]
    assert [line[:3] for line in table if line[:1] == ["mine"]] == [
        ["mine", engine, batch] for engine in ("numpy", "torch") for batch in ("10", "100")
    ]
    with (installed / "results" / "tidy" / "building.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["engine"], row["batch"], row["phase"]) for row in rows] == [
        (engine, batch, "build") for engine in ("numpy", "torch") for batch in ("10", "100")
    ]
    assert all(float(row["build_milliseconds"]) > 0 for row in rows)
