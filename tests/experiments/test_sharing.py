"""Several processes and machines work at one sweep in one folder: each run once, whoever is killed, without flock."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.results import Results

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("sharing_driver.py")
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"


class Sweeps:
    """Processes that work at one sweep."""

    def __init__(self, folder: Path, seeds: int, seconds: float) -> None:
        self.results, self.log = Results(folder / "results"), folder / "log"
        self.seeds, self.seconds = seeds, seconds
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, machine: str) -> subprocess.Popen[str]:
        command = [sys.executable, DRIVER, self.results.root, machine, self.log, self.seeds, self.seconds]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def lines(self) -> list[list[Any]]:
        """What the processes said so far: what, machine, process, moment."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def wait(self, count: int, of: str = "") -> None:
        """Until so many runs have begun, of one machine or of all."""
        end = time.monotonic() + 120
        while sum(line[0] == "begin" and of in ("", line[1]) for line in self.lines()) < count:
            assert time.monotonic() < end, [process.poll() for process in self.processes]
            time.sleep(0.02)

    def finish(self, process: subprocess.Popen[str]) -> None:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors

    def check(self, killed: int = 0) -> None:
        """Each job has one finished record, and was run once, but for those in whose midst a process was killed."""
        records = self.results.records()
        assert [record["status"] for record in records] == ["ok"] * self.seeds
        assert len({record["job"] for record in records}) == self.seeds
        begun = Counter(what for what, *_ in self.lines())["begin"]
        assert self.seeds <= begun <= self.seeds + killed, self.lines()
        with (self.results.tidy / "runs.csv").open(newline="") as file:
            assert len({row["job"] for row in csv.DictReader(file)}) == self.seeds

    def overlapping(self) -> list[Any]:
        """Runs of one machine that went on at the same time; those of a killed process ended with it, unsaid."""
        open_runs: dict[str, int] = {}
        found = []
        for what, machine, pid, _ in sorted(self.lines(), key=lambda line: line[3]):
            if what == "end":
                open_runs.pop(machine, None)
            elif machine in open_runs and open_runs[machine] in self.alive:
                found.append((machine, pid))
            if what == "begin":
                open_runs[machine] = pid
        return found

    @property
    def alive(self) -> set[int]:
        """The processes that were not killed."""
        return {process.pid for process in self.processes if process.returncode != -signal.SIGKILL}


@contextlib.contextmanager
def sweeps(folder: Path, seeds: int, seconds: float) -> Iterator[Sweeps]:
    found = Sweeps(folder, seeds, seconds)
    try:
        yield found
    finally:
        for process in found.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def test_runs_are_done_once_and_those_of_killed_and_stopped_processes_are_taken_over(tmp_path: Path) -> None:
    with sweeps(tmp_path, 5, 0.3) as shared:
        first, other = shared.start("a"), shared.start("b")
        shared.wait(1, of="b")
        other.send_signal(signal.SIGSTOP)
        shared.wait(1, of="a")
        second = shared.start("a")  # a process of the same machine: it sees at once that the first one has ended
        first.kill()
        first.wait()
        shared.finish(second)
        shared.check(killed=2)
        written = {path: path.read_bytes() for path in shared.results.raw.glob("*.json")}
        other.send_signal(signal.SIGCONT)  # its run was taken over: what it made of it is left out
        shared.finish(other)
        assert {path: path.read_bytes() for path in shared.results.raw.glob("*.json")} == written
        shared.check(killed=2)
        assert {record["provenance"]["machine"]["stepping"] for record in shared.results.records()} == {"a"}


@pytest.mark.campaign
@pytest.mark.skipif(not CAMPAIGN, reason="does not apply: `make test` has a kill in the test above")
def test_a_campaign_of_kills_at_random_moments_loses_no_run(tmp_path: Path, seed: int) -> None:
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        share(folder, random.Random(f"{seed} {number}"), seeds=24, kills=8)


def share(folder: Path, source: random.Random, seeds: int, kills: int) -> None:
    """Two processes of one machine and one of another, of which one after the other is killed and started again."""
    with sweeps(folder, seeds, 0.2) as shared:
        running = {name: shared.start(name[0]) for name in ("a1", "a2", "b1")}
        killed = 0
        for number in range(kills):
            shared.wait(number + 1)
            time.sleep(source.uniform(0, 0.3))
            name = source.choice(sorted(running))
            if running[name].poll() is None:
                running[name].kill()
                killed += running[name].wait() == -signal.SIGKILL
            running[name] = shared.start(name[0])
        for process in running.values():
            shared.finish(process)
        shared.check(killed)
        assert shared.overlapping() == []
