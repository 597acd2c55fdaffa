"""A run that is killed at any moment, again and again, ends with what an undisturbed one has."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.results import Results

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
ENGINES = ["numpy", "torch"] if CAMPAIGN else ["numpy"]
"""A campaign kills PyTorch's processes, too: most of its time is that of importing it into each."""
COMMAND = ["run", "mnist-cnn-batch100", "--profile", "sample", "--engines", ",".join(ENGINES)]
KILLS = 20 if CAMPAIGN else 2


def started(tmp_path: Path, results: str) -> subprocess.Popen[bytes]:
    """The command in its own process, on the embedded sample, with temporary files under `tmp_path`."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if name != "TWINGRAD_DATA"}
    variables |= {"PYTHONPATH": str(ROOT), "TWINGRAD_OFFLINE": "1", "TWINGRAD_CACHE": str(tmp_path / "cache")}
    variables |= {"TWINGRAD_JULIA": str(tmp_path / "none")}  # whose rates of the machine a race would measure
    arguments = [*COMMAND, "--measure", "time,memory,race", "--threads", "1", "--results", str(tmp_path / results)]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *arguments],
        env=variables | {"TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def finished(tmp_path: Path, results: str) -> dict[str, Any]:
    """Run the command to its end: of every record what does not depend on the moment, by key."""
    with started(tmp_path, results) as process:
        assert process.wait(timeout=300) == 0
    assert not (tmp_path / results / ".work").exists() or not list((tmp_path / results / ".work").iterdir())
    assert not list((tmp_path / results).glob("**/*.part"))
    found = {}
    for record in Results(tmp_path / results).records():
        assert record["status"] == "ok", record["error"]
        epochs = [[epoch.get(name) for name in ("test_accuracy", "train_loss")] for epoch in record.get("epochs", ())]
        raced = [(row["round"], row["engine"]) for row in record.get("race", ())]
        found[record["key"]] = record["config"], record["data"], epochs, record.get("step_losses"), raced
    tidy = (tmp_path / results / "tidy" / "runs.csv").read_text(encoding="utf-8").splitlines()
    assert {line.split(",")[0] for line in tidy[1:]} == set(found)
    return found


def alive(folder: Path) -> list[str]:
    """The processes whose command line names the folder, as those of workers do."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # gone meanwhile
            continue
    return [line for line in lines if str(folder) in line]


@pytest.mark.campaign
def test_a_run_killed_at_random_moments_ends_with_the_results_of_an_undisturbed_one(tmp_path: Path, seed: int) -> None:
    begin = time.monotonic()
    expected = finished(tmp_path, "undisturbed")
    whole = time.monotonic() - begin
    assert len(expected) == 2 * len(ENGINES) + 1
    moments = random.Random(seed)
    kept = 0
    for _ in range(KILLS):
        with started(tmp_path, "killed") as process:
            time.sleep(moments.uniform(0.1, 0.8) * whole)
            process.send_signal(signal.SIGKILL)
        raw = [json.loads(path.read_text()) for path in (tmp_path / "killed" / "raw").glob("*.json")]
        assert kept <= len(raw)  # nothing that was there is lost, and each is whole
        kept = len(raw)
        deadline = time.monotonic() + 20
        while alive(tmp_path / "tmp") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive(tmp_path / "tmp") == []
    assert finished(tmp_path, "killed") == expected
