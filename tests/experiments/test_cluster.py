"""A sweep on a Dask cluster of real processes: the results of a run here, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contrib import slurm_cluster
from experiments import cli, cluster
from experiments.results import Results

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
KILLS = 20 if CAMPAIGN else 2
RUN = ["run", "mnist-cnn-batch100", "--profile", "sample", "--engines", "numpy", "--measure", "time,own"]
RUN += ["--threads", "1", "--seeds", "6" if CAMPAIGN else "2"]
START = ("--no-dashboard", "--host", "127.0.0.1")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Cluster:
    """A scheduler and workers in separate processes, which may be killed and started again."""

    def __init__(self, folder: Path, workers: int = 2, resources: str = "host=1") -> None:
        self.folder, self.port, self.resources = folder, free_port(), resources
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.log = folder / "log"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.names = ("scheduler", *(f"worker-{number}" for number in range(workers)))
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        own = ["scheduler", "--port", str(self.port)] if name == "scheduler" else [
            *("worker", self.address, "--nworkers", "1", "--nthreads", "2", "--no-nanny"),
            *("--resources", self.resources, "--preload", str(Path(__file__).with_name("cluster_preload.py"))),
            *("--local-directory", str(self.folder / "dask"), "--death-timeout", "60"),
        ]  # fmt: skip
        with (self.folder / f"{name}.txt").open("ab") as said:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dask", *own, *START],
                env=os.environ | {"PYTHONPATH": str(ROOT), "LOG": str(self.log)},
                cwd=self.folder,
                stdout=said,
                stderr=said,
            )

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def revive(self) -> None:
        """Start again what has ended, as who looks after a cluster does: workers end with their scheduler."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                self.start(name)

    def until(self, client: subprocess.Popen[bytes]) -> int:
        """What a client ends with, while all is started again that ends."""
        limit = time.monotonic() + (1800 if CAMPAIGN else 300)
        while client.poll() is None and time.monotonic() < limit:
            self.revive()
            time.sleep(0.2)
        return client.wait(timeout=1)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def events(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No real data, and an empty cache, which all processes share."""
    pytest.importorskip("distributed")
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cluster_of(place: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*arguments: Any) -> Cluster:
        made.append(Cluster(place, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def content(folder: str) -> dict[str, Any]:
    """Of every record what does not depend on the moment, by job."""
    found = {}
    for record in Results(Path(folder)).records():
        assert record["status"] == "ok", record["error"]
        assert record["job"] not in found
        epochs = [[epoch.get(name) for name in ("test_accuracy", "train_loss")] for epoch in record["epochs"]]
        weights = record["provenance"]["weights_digest"]
        found[record["job"]] = record["config"], record["data"], weights, epochs, record.get("step_losses")
    return found


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_whatever_is_killed_the_results_are_those_of_a_run_here(
    cluster_of: Callable[..., Cluster], place: Path, seed: int
) -> None:
    """Workers and the scheduler are killed at random moments, and the client, which is then started again."""
    assert cli.invoke([*RUN, "--results", "here"]) == 0
    expected = content("here")
    there = cluster_of()
    moments = random.Random(seed)
    client = command(there, "there", place)
    for number in range(KILLS):
        before = len(there.events())
        limit = time.monotonic() + 120
        while len(there.events()) < before + 1 and client.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 1))
        victim = moments.choice(there.names) if CAMPAIGN else there.names[1 - number]
        there.kill(victim)
        if number == 0 or (CAMPAIGN and moments.random() < 0.3):
            client.kill()
            client.wait()
            client = command(there, "there", place)
        time.sleep(moments.uniform(0, 1))
        there.revive()
    assert there.until(client) == 0, (place / "client.txt").read_text()
    assert content("there") == expected
    check_timed_runs_are_alone(there.events())
    # Once more: nothing is run again.
    count = len(there.events())
    assert command(there, "there", place).wait(timeout=300) == 0
    assert len(there.events()) == count


def command(there: Cluster, results: str, place: Path) -> subprocess.Popen[bytes]:
    with (place / "client.txt").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments", *RUN, "--results", results, "--dask", there.address],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=said,
            stderr=said,
        )


def check_timed_runs_are_alone(events: list[list[Any]]) -> None:
    """No run of this host begins during a timed one; those of a killed worker ended with it."""
    running: dict[tuple[Any, ...], bool] = {}
    owners: dict[int, tuple[Any, ...]] = {}
    for what, timed, measure, job_seed, pid, _ in events:
        one = (measure, job_seed, pid)
        if what == "end":
            running.pop(one, None)
            continue
        for other in [other for other in running if not Path(f"/proc/{other[2]}").exists()]:
            running.pop(other)
        assert not any(running.values()) and not (timed and running), (one, running)
        running[one] = timed
        owners[pid] = one
    assert len(owners) > 0


def test_what_did_not_come_home_is_not_done_again(cluster_of: Callable[..., Cluster], place: Path) -> None:
    there = cluster_of(1)
    assert command(there, "first", place).wait(timeout=300) == 0
    count = len(there.events())
    assert command(there, "second", place).wait(timeout=300) == 0  # as if nothing had reached the client
    assert content("second") == content("first")
    assert len(there.events()) == count


def test_workers_without_the_resource_are_named(cluster_of: Callable[..., Cluster], place: Path) -> None:
    there = cluster_of(1, "other=1")
    process = command(there, "there", place)
    assert process.wait(timeout=120) == 2
    said = (place / "client.txt").read_text()
    assert re.search(r"error: no worker of tcp://127.0.0.1:\d+ offers the resource host", said)
    assert "Traceback" not in said


def test_a_worker_with_other_sources_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import papers, sweep

    job = sweep.plan(papers.load_paper("mnist-cnn-batch100"), "sample", ["numpy"], 1, ["time"], 1)[0]
    with pytest.raises(cluster.ClusterError, match="has other sources of TwinGrad"):
        cluster.run_here(job, "a job", "another digest", "data")


def test_a_worker_with_other_data_is_named() -> None:
    from experiments import papers, sources, sweep

    job = sweep.plan(papers.load_paper("mnist-cnn-batch100"), "sample", ["numpy"], 1, ["time"], 1)[0]
    with pytest.raises(cluster.ClusterError, match=r"has other data of mnist \(sample\) than the client"):
        cluster.run_here(job, "a job", sources.SOURCES.digest(sweep.starts(job)), "the digest of the real data")


@pytest.mark.parametrize("address", ["localhost", "tcp://127.0.0.1:port"])
def test_what_is_no_address_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke([*RUN, "--dask", address]) == 2
    said = capsys.readouterr().err
    assert f"--dask {address}: no address of a scheduler" in said and "Traceback" not in said


@pytest.mark.parametrize("more", [["--shared"], ["--shard", "1/2"]])
def test_it_spreads_runs_by_itself(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke([*RUN, *more, "--dask", "tcp://127.0.0.1:1"]) == 2
    assert "--dask spreads the runs by itself" in capsys.readouterr().err


def test_the_script_for_slurm_offers_the_host_and_has_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dask_jobqueue")
    slurm_cluster.main(["--cores", "4", "--memory", "6 GB", "--walltime", "01:00:00", "--queue", "long", "--dry-run"])
    script = capsys.readouterr().out
    for line in ("#SBATCH -p long", "#SBATCH --cpus-per-task=4", "#SBATCH -t 01:00:00", "#SBATCH --exclusive"):
        assert line in script, script
    assert "--resources host=1" in script and "--nthreads 4" in script
