"""A sweep on a Dask cluster of real processes: the results of a run here, whatever is killed meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge import memory
from contrib import slurm_cluster
from experiments import cli, cluster, data
from experiments.results import Results

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = Path(__file__).with_name("cluster_preload.py")
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
KILLS = 20 if CAMPAIGN else 2
CUTS = 10 if CAMPAIGN else 1
FEW = ["mnist-cnn-batch100", "--engines", "numpy", "--measure", "time", "--seeds", "2"]
MANY = ["mnist-cnn-batch100", "mnist-rnn-d", "mnist-rnn-e", "--engines", "numpy,torch"]
MANY += ["--measure", "time,memory,own", "--seeds", "10"]
RUN = ["run", *(MANY if CAMPAIGN else FEW), "--profile", "sample", "--threads", "1"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Proxy:
    """A stretch of the network: what is sent to its port reaches another one, as long as it is whole."""

    def __init__(self, target: int) -> None:
        self.port, self.target = free_port(), target
        self._whole = threading.Event()
        self._whole.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Stop forwarding, without closing a connection."""
        self._whole.clear()

    def mend(self, lost: bool) -> None:
        """Let all arrive; `lost`: as after a longer time, when both ends have given up their connections."""
        if lost:
            self._drop()
        self._whole.set()

    def close(self) -> None:
        self._listener.close()
        self._drop()
        self._whole.set()

    def _drop(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._whole.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            near.close()
            return
        self._sockets += [near, far]
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Cluster:
    """A scheduler and workers in separate processes, which may be killed, cut off and started again."""

    def __init__(self, folder: Path, workers: int = 2, resources: str = "host=1", *options: str) -> None:
        self.folder, self.port, self.resources, self.options = folder, free_port(), resources, options
        self.log = folder / "log"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.workers = [f"worker-{number}" for number in range(workers)]
        self.names = ("scheduler", *self.workers)
        self.proxies = {name: [Proxy(self.port)] for name in ("client", *self.workers)}
        self.ports = {name: free_port() for name in self.workers}
        for name, port in self.ports.items():
            self.proxies[name].append(Proxy(port))
        self.address = f"tcp://127.0.0.1:{self.proxies['client'][0].port}"
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        if name == "scheduler":
            own = ["scheduler", "--port", str(self.port), "--host", "127.0.0.1"]
        else:
            to_scheduler, to_worker = self.proxies[name]
            own = [
                *("worker", f"tcp://127.0.0.1:{to_scheduler.port}", "--nworkers", "1", "--nthreads", "2", "--no-nanny"),
                *("--listen-address", f"tcp://127.0.0.1:{self.ports[name]}"),
                *("--contact-address", f"tcp://127.0.0.1:{to_worker.port}"),
                *("--resources", self.resources, "--preload", str(PRELOAD), *self.options),
                *("--local-directory", str(self.folder / "dask"), "--death-timeout", "60"),
            ]
        with (self.folder / f"{name}.txt").open("ab") as said:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dask", *own, "--no-dashboard"],
                env=os.environ | {"PYTHONPATH": str(ROOT), "LOG": str(self.log)},
                cwd=self.folder,
                stdout=said,
                stderr=said,
            )

    def kill(self, name: str) -> bool:
        """Kill a process; whether it was running something."""
        pid = self.processes[name].pid
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()
        events = [event["what"] for event in self.events() if event["pid"] == pid]
        return events.count("begin") > events.count("end")

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

    def wait_for_a_run(self, client: subprocess.Popen[bytes], moments: random.Random) -> None:
        """Wait until one more run begins, and for a random moment of it."""
        before = len(self.begun())
        limit = time.monotonic() + 240
        while len(self.begun()) == before:
            assert client.poll() is None and time.monotonic() < limit, (self.folder / "client.txt").read_text()
            self.revive()
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 3 if CAMPAIGN else 0.5))

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        for one in itertools.chain(*self.proxies.values()):
            one.close()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def begun(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["what"] == "begin"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No real data, and an empty cache for all processes, this one included."""
    pytest.importorskip("distributed")
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cluster, "_SPOOLED", [])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    cluster._KEPT.close()


@pytest.fixture
def cluster_of(place: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*arguments: Any) -> Cluster:
        made.append(Cluster(place, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of runs without a cluster, and the weights that they ended with."""
    folder = tmp_path_factory.mktemp("here")
    variables = {"PYTHONPATH": str(ROOT), "LOG": str(folder / "log"), "TWINGRAD_CACHE": str(folder / "cache")}
    variables |= {"TWINGRAD_OFFLINE": "1", "TWINGRAD_DATA": ""}
    with (folder / "said").open("wb") as said:
        command = [sys.executable, str(PRELOAD), *RUN, "--results", str(folder / "results")]
        subprocess.run(command, env=os.environ | variables, stdout=said, stderr=said, check=True)
    return content(folder / "results"), ended([json.loads(line) for line in (folder / "log").read_text().splitlines()])


@pytest.mark.campaign
@pytest.mark.timeout(5400)
def test_whatever_is_killed_the_results_are_those_of_a_run_here(
    cluster_of: Callable[..., Cluster], here: tuple[Any, Any], place: Path, seed: int
) -> None:
    """Workers and the scheduler are killed at random moments, and the client, which is then started again."""
    there = cluster_of()
    moments = random.Random(seed)
    client = command(there, "there", place)
    killed: Counter[str] = Counter()
    for number in range(KILLS):
        there.wait_for_a_run(client, moments)
        victim = moments.choice(("client", *there.names)) if CAMPAIGN else ("worker-0", "scheduler")[number]
        killed[victim] += 1
        if victim != "client":
            killed["in the midst of a run"] += there.kill(victim)
        if victim == "client" or not (CAMPAIGN or number):
            client.kill()
            client.wait()
            client = command(there, "there", place)
        there.revive()
    assert there.until(client) == 0, (place / "client.txt").read_text()
    check(there, "there", here)
    # Once more: nothing is run again.
    count = len(there.events())
    assert command(there, "there", place).wait(timeout=300) == 0
    assert len(there.events()) == count
    print(f"killed: {dict(killed)}; {len(there.begun())} runs begun for {len(here[0])} jobs")


@pytest.mark.campaign
@pytest.mark.timeout(5400)
def test_where_the_network_is_cut_no_finished_run_is_lost_or_done_again(
    cluster_of: Callable[..., Cluster], here: tuple[Any, Any], place: Path, seed: int
) -> None:
    """Between the client or a worker and the scheduler nothing arrives for a while; then all does, or is lost."""
    there = cluster_of(2 if CAMPAIGN else 1)
    moments = random.Random(seed)
    client = command(there, "there", place)
    said: Counter[str] = Counter()
    for _ in range(CUTS):
        there.wait_for_a_run(client, moments)
        sides = [moments.choice(list(there.proxies))] if CAMPAIGN else ["client", "worker-0"]
        lost = not CAMPAIGN or moments.random() < 0.5
        for one in itertools.chain(*(there.proxies[name] for name in sides)):
            one.cut()
        time.sleep(moments.uniform(0, 15) if CAMPAIGN else 1)
        for one in itertools.chain(*(there.proxies[name] for name in sides)):
            one.mend(lost)
        said[f"{' and '.join(sides)}, {'lost' if lost else 'late'}"] += 1
    assert there.until(client) == 0, (place / "client.txt").read_text()
    check(there, "there", here)
    count = len(there.begun())
    assert there.until(command(there, "once more", place)) == 0  # as if nothing had reached the client
    assert content("once more") == here[0]
    assert len(there.begun()) == count
    print(f"cut: {dict(said)}; {len(there.begun())} runs begun for {len(here[0])} jobs")


def command(there: Cluster, results: str, place: Path) -> subprocess.Popen[bytes]:
    with (place / "client.txt").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments", *RUN, "--results", results, "--dask", there.address],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=said,
            stderr=said,
        )


def content(folder: str | Path) -> dict[str, Any]:
    """Of every record what does not depend on the moment, by job."""
    found = {}
    for record in Results(Path(folder)).records():
        assert record["status"] == "ok", record["error"]
        assert record["job"] not in found
        epochs = [[epoch.get(name) for name in ("test_accuracy", "train_loss")] for epoch in record.get("epochs", ())]
        weights = record["provenance"]["weights_digest"]
        found[record["job"]] = record["config"], record["data"], weights, epochs, record.get("step_losses")
    return found


def ended(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The digests of the weights after each epoch, of all runs that ended; none of them did so twice."""
    found: dict[str, Any] = {}
    for event in events:
        if event["what"] == "end":
            assert event["run"] not in found
            found[event["run"]] = event["weights"]
    return found


def check(there: Cluster, folder: str, here: tuple[Any, Any]) -> None:
    """Records and weights are those of runs here, each recorded once, and nothing ran beside a timed run."""
    assert content(folder) == here[0]
    found = ended(there.events())
    assert found.keys() <= here[1].keys() and {name: here[1][name] for name in found} == found
    assert any(found.values())
    for event in there.begun():
        assert not any(other["timed"] or event["timed"] for other in event["beside"]), event


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


def test_a_run_that_needs_more_memory_than_its_dask_worker_has_is_recorded_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from experiments import papers, sources, sweep

    job = sweep.plan(papers.load_paper("mnist-cnn-batch100"), "sample", ["numpy"], 1, ["time"], 1)[0]
    dask = type(sys)("distributed")
    dask.get_worker = lambda: SimpleNamespace(memory_manager=SimpleNamespace(memory_limit=limit))  # type: ignore[attr-defined]
    monkeypatch.setattr(cluster, "_distributed", lambda: dask)
    digests = sources.SOURCES.digest(sweep.starts(job)), data.load("mnist").digest
    limit: int | None = None
    assert cluster.memory_left() is None
    limit = memory.held_alone(os.getpid()) + 10**9
    assert 0.8e9 < (cluster.memory_left() or 0) < 1.2e9
    limit = 20_000_000  # less than this process holds itself
    with pytest.raises(cluster.ClusterError, match="made another run of this job"):
        cluster.run_here(job, "a job", *digests)
    (record,) = Results(cluster.spool()).records()
    assert record["status"] == "failed" and record["error_kind"] == "failed"
    assert re.search(r"the run held \S+ MB of memory, more than the 0 MB that it may have here", record["error"])


@pytest.mark.parametrize("address", ["localhost", "tcp://127.0.0.1:port"])
def test_what_is_no_address_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke([*RUN, "--dask", address]) == 2
    said = capsys.readouterr().err
    assert f"--dask {address}: no address of a scheduler" in said and "Traceback" not in said


@pytest.mark.campaign
@pytest.mark.skipif(not CAMPAIGN, reason="does not apply: `make test` has the limit of one run above")
@pytest.mark.timeout(600)
def test_a_sweep_on_workers_with_too_little_memory_ends_and_says_why(
    cluster_of: Callable[..., Cluster], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE", "False")  # for Dask's own limits it is too small, too
    there = cluster_of(1, "host=1", "--memory-limit", "60 MB")
    assert there.until(command(there, "there", place)) != 0
    records = Results(place / "there").records()
    assert len(records) == len(there.begun())  # none was tried twice
    for record in records:
        assert re.search(r"the run held \S+ MB of memory, more than the 0 MB", record["error"]), record


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
