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
from collections.abc import Callable, Iterator
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
        self.results, self.log, self.seeds = Results(folder / "results"), folder / "log", seeds
        command = [sys.executable, DRIVER, self.results.root, self.log, seeds, seconds]
        self.driver = subprocess.Popen(
            list(map(str, command)),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.killed: set[int] = set()
        self.started: list[int] = []

    def start(self, machine: str) -> int:
        """Start a process of a machine; its number."""
        assert self.driver.stdin is not None and self.driver.stdout is not None
        self.driver.stdin.write(f"{machine}\n")
        self.driver.stdin.flush()
        self.started.append(int(self.driver.stdout.readline()))
        return self.started[-1]

    def kill(self, process: int) -> None:
        """End a process, unless it has ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            self.killed.add(process)

    def lines(self) -> list[list[Any]]:
        """What the processes said so far: what, machine, process, moment."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def wait(self, count: int, of: str = "") -> None:
        """Until `count` runs have begun, of one machine or of all."""
        self._until(lambda: sum(line[0] == "begin" and of in ("", line[1]) for line in self.lines()) >= count)

    def finish(self, process: int) -> None:
        """Until a process is done."""
        said = {"begin", "end"}
        self._until(lambda: any(line[2] == process and line[0] not in said for line in self.lines()))
        assert [line[0] for line in self.lines() if line[2] == process][-1] == "done"

    def _until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 500
        while not true():
            assert time.monotonic() < end, self.lines()
            time.sleep(0.02)

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
        """Runs of one machine that ran at the same time; those of a killed process ended with it, unsaid."""
        open_runs: dict[str, int] = {}
        found = []
        for what, machine, pid, _ in sorted(self.lines(), key=lambda line: line[3]):
            if what == "end":
                open_runs.pop(machine, None)
            elif machine in open_runs and open_runs[machine] not in self.killed:
                found.append((machine, pid))
            if what == "begin":
                open_runs[machine] = pid
        return found


@contextlib.contextmanager
def sweeps(folder: Path, seeds: int, seconds: float) -> Iterator[Sweeps]:
    found = Sweeps(folder, seeds, seconds)
    try:
        yield found
    finally:
        for process in found.started:
            found.kill(process)
        found.driver.communicate()


def test_runs_are_done_once_and_those_of_killed_and_stopped_processes_are_taken_over(tmp_path: Path) -> None:
    with sweeps(tmp_path, 5, 0.3) as shared:
        first, other = shared.start("a"), shared.start("b")
        shared.wait(1, of="b")
        os.kill(other, signal.SIGSTOP)
        shared.wait(1, of="a")
        second = shared.start("a")  # a process of the same machine: it sees at once that the first one has ended
        shared.kill(first)
        shared.finish(second)
        shared.check(killed=2)
        written = {path: path.read_bytes() for path in shared.results.raw.glob("*.json")}
        os.kill(other, signal.SIGCONT)  # its run was taken over: what it made of it is left out
        shared.finish(other)
        assert {path: path.read_bytes() for path in shared.results.raw.glob("*.json")} == written
        shared.check(killed=2)
        with shared.results.shared():
            left = [path.name for path in shared.results.work.glob("*")]
        assert not left, "what killed processes have left is removed by whoever comes next"
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
        for number in range(kills):
            shared.wait(number + 1)
            time.sleep(source.uniform(0, 0.3))
            name = source.choice(sorted(running))
            shared.kill(running[name])
            running[name] = shared.start(name[0])
        for process in running.values():
            shared.finish(process)
        shared.check(len(shared.killed))
        assert shared.overlapping() == []
