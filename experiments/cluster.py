"""Runs on the workers of a Dask cluster: `twingrad run ... --dask ADDRESS`.

Each job is done by a worker as it would be done here, in a results folder of the worker's own host (`spool`), and its
record comes home. A record that could not be sent, because the client, the scheduler or the network was gone, is found
there when the job is handed out again: nothing that was finished is done twice.

A worker offers the resource `host`, and has all of it for a timed run, so that nothing else runs beside it. Runs in
which time plays no part take a share of it each. So it is with the memory that the worker's limit leaves: a run that
holds more is ended, and recorded with the reason.

    dask scheduler
    dask worker ADDRESS --nworkers 1 --nthreads 2 --resources host=1      # on every machine
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bridge import memory
from bridge.errors import TwinGradError
from bridge.files import cache_folder
from experiments import provenance, sources
from experiments.progress import Progress
from experiments.results import Record, Results
from experiments.run_arrays import RunArrays
from experiments.slots import MOST, Slot, slots
from experiments.summary import described
from experiments.sweep import Job, Outcome, Sweep, by_data, skeleton, starts, task_of

if TYPE_CHECKING:
    from experiments.data.dataset import Dataset
    from experiments.leases import Leases

RESOURCE = "host"
TRIES = 10
"""How often a job is handed out whose worker dies, before that is recorded as its failure."""
PAUSE = 2.0
"""Seconds before the scheduler is asked again, after it was lost."""
CONNECTING = 20.0
"""Seconds that the scheduler has for an answer."""


class ClusterError(TwinGradError):
    """A cluster that can't run a sweep: names the address or the worker, why, and what to do."""


@dataclass
class _Waiting:
    """A job that is handed out, its places in the sweep, what is known of its record, and how often it was lost."""

    numbers: list[int]
    job: Job
    record: Record
    deaths: int = 0


def spool() -> Path:
    """The results folder of a worker's host: what was finished there, whether or not it came home."""
    return cache_folder() / "cluster" / socket.gethostname()


# On the client ------------------------------------------------------------------------------------------------


def run(address: str, sweep: Sweep, jobs: Sequence[Job], progress: Progress) -> Outcome:
    """Run every job that has no record yet on the cluster's workers, and save the records as they come home."""
    begin = time.perf_counter()
    found: dict[int, Record] = {}
    reused = 0
    waiting: dict[str, _Waiting] = {}
    for part in by_data(list(enumerate(jobs))):
        with RunArrays(sweep.load(part[0][1].paper, progress), sweep.work) as work:
            for number, job in part:
                record = skeleton(job, task_of(job, work), work.dataset)
                known = sweep.results.finished(record["key"]) or sweep.results.finished_elsewhere(record)
                if known is None:
                    waiting.setdefault(record["job"], _Waiting([], job, record)).numbers.append(number)
                    continue
                found[number], reused = known, reused + 1
                progress.finish(str(job), "was finished before")
    while waiting:
        for one, host, record in _handed_out(address, waiting, progress):
            sweep.results.save(record)
            found |= dict.fromkeys(one.numbers, record)
            progress.finish(str(one.job), f"{described(record)}  on {host}")
    return Outcome([found[number] for number in range(len(jobs))], reused, time.perf_counter() - begin)


def _handed_out(
    address: str, waiting: dict[str, _Waiting], progress: Progress
) -> Iterator[tuple[_Waiting, str, Record]]:
    """Hand out all jobs that wait; give each with its host and record as it comes home, until the scheduler is lost."""
    distributed = _distributed()
    asked = {name: (one.job, name, *_decided_by(one)) for name, one in waiting.items()}
    try:
        with distributed.Client(address, timeout=CONNECTING, set_as_default=False) as client:
            _check_workers(client, address, progress)
            futures = {}
            for name, one in waiting.items():
                share = 1.0 if one.job.kind.timed else 1.0 / MOST
                key = f"{one.job.paper.key}-{name}-{one.deaths}-{time.time_ns()}"
                futures[client.submit(run_here, *asked[name], key=key, resources={RESOURCE: share}, retries=0)] = name
            for future in distributed.as_completed(futures, loop=client.loop):
                name = futures[future]
                one = waiting[name]
                try:
                    host, record = future.result()
                except distributed.KilledWorker:
                    one.deaths += 1
                    if one.deaths < TRIES:
                        progress.note(f"{one.job}: its worker died; handed out again")
                        continue
                    host, record = "the cluster", _failed(one)
                except (CancelledError, distributed.comm.CommClosedError):
                    continue  # the scheduler was lost, and with it who works at what: all is handed out again
                except Exception as error:
                    said = str(error) if isinstance(error, TwinGradError) else f"{type(error).__name__}: {error}"
                    raise ClusterError(f"{one.job.named}: {said}") from None
                del waiting[name]
                yield one, host, record
    except ValueError as error:
        raise ClusterError(f"--dask {address}: no address of a scheduler ({error}); expected tcp://HOST:PORT") from None
    except (OSError, TimeoutError) as error:
        if isinstance(error, socket.gaierror):
            raise ClusterError(f"--dask {address}: there is no such host ({error})") from None
        why = (str(error).splitlines() or [type(error).__name__])[0]
        progress.note(f"no scheduler at {address} ({why}): trying again")
        time.sleep(PAUSE)


def _decided_by(one: _Waiting) -> tuple[str, str]:
    """What must be the same on a worker: the digests of the sources and of the data."""
    return sources.SOURCES.digest(starts(one.job)), one.record["data"]["digest"]


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        raise ClusterError("--dask needs the package distributed: pip install 'twingrad[dask]'") from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # our own messages say what is lost
    return distributed


def _check_workers(client: Any, address: str, progress: Progress) -> None:
    """Raise `ClusterError` where no worker can take a run; without any worker wait for one, said once."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        progress.note(f"waiting for a worker: dask worker {address} --nworkers 1 --nthreads 2 --resources {RESOURCE}=1")
        client.wait_for_workers(1)
        workers = client.scheduler_info(n_workers=-1)["workers"]
    if not any(worker["resources"].get(RESOURCE, 0) >= 1 for worker in workers.values()):
        raise ClusterError(
            f"no worker of {address} offers the resource {RESOURCE}, of which a timed run has all, alone: start "
            f"workers with --resources {RESOURCE}=1"
        )


def _failed(one: _Waiting) -> Record:
    """The record of a job whose workers die."""
    error = f"{one.job.named}: its worker died {one.deaths} times, perhaps for want of memory"
    return {**one.record, "status": "failed", "error": error, "error_kind": "failed", "seconds": 0.0}


# On a worker --------------------------------------------------------------------------------------------------

_DATASETS: dict[str, Dataset] = {}
_PLACES: dict[int, queue.SimpleQueue[Slot]] = {}
_LOCK = threading.Lock()
_KEPT = ExitStack()
atexit.register(_KEPT.close)


def run_here(job: Job, name: str, sources_digest: str, data_digest: str) -> tuple[str, Record]:
    """Do a job on this host, unless it was done before; return the host's name and the record.

    `name` is the hash of what it asks, which its record must have, too.
    """
    host = socket.gethostname()
    try:
        if sources.SOURCES.digest(starts(job)) != sources_digest:
            commit, _ = provenance.commit()
            raise ClusterError(
                f"{host} has other sources of TwinGrad (commit {commit[:12]}) than the client: install the same "
                "everywhere"
            )
        silent = Progress(Console(quiet=True), 1)
        with _LOCK:
            sweep = Sweep(*_spooled(), datasets=_DATASETS)
            found = sweep.load(job.paper, silent)
        if found.digest != data_digest:
            with _LOCK:
                _DATASETS.clear()  # the next job looks again
            raise ClusterError(
                f"{host} has other data of {found.name} ({found.source}) than the client: name a folder with the same "
                "in TWINGRAD_DATA there"
            )
        with _place(job) as slot:
            (record,) = Sweep(*_spooled(), datasets=_DATASETS, slot=slot).run([job], silent).records
        if record["job"] != name:
            raise ClusterError(f"{host} has made another run of this job than was asked for")
    except TwinGradError as error:  # pickle makes only those again that take a message alone
        raise ClusterError(str(error)) from None
    except Exception as error:
        raise ClusterError(f"{host}: {type(error).__name__}: {error}") from None
    return host, record


_SPOOLED: list[tuple[Results, Any]] = []


def _spooled() -> tuple[Results, None, None, Leases]:
    """The spool and this process's leases in it, which all its threads share: so runs that may are side by side."""
    if not _SPOOLED:
        results = Results(spool())
        _SPOOLED.append((results, _KEPT.enter_context(results.shared())))
    results, leases = _SPOOLED[0]
    return results, None, None, leases


@contextmanager
def _place(job: Job) -> Iterator[Slot]:
    """Separate cores for a run beside others; all of them for a timed one. The same goes for the memory."""
    left = memory_left()
    if job.kind.timed:
        yield Slot(memory=left)
        return
    with _LOCK:
        if job.threads not in _PLACES:
            _PLACES[job.threads] = queue.SimpleQueue()
            for slot in slots(job.threads, provenance.cores()):
                _PLACES[job.threads].put(slot)
    slot = _PLACES[job.threads].get()
    slot.memory = None if left is None else left // MOST
    try:
        yield slot
    finally:
        _PLACES[job.threads].put(slot)


def memory_left() -> int | None:
    """Bytes that runs here may hold: of this Dask worker's limit what it does not hold itself; None: no limit."""
    try:
        limit: int | None = _distributed().get_worker().memory_manager.memory_limit
    except ValueError:  # no Dask worker runs this
        return None
    return max(0, limit - memory.held_alone(os.getpid())) if limit else None
