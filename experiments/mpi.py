"""One training on the processes that mpiexec started: `mpiexec -n 4 twingrad train ...`.

Each process computes a part of every mini-batch in its own memory. Process 0 speaks for all, and writes the files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from bridge import registry
from bridge.errors import TwinGradError, printable
from bridge.session import Evaluation, Optimizer
from bridge.spec import ModelSpec
from experiments.errors import InputError
from experiments.output import Output
from py_engine.errors import EngineError, NonFiniteError

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where Open MPI and MPICH say how many processes they have started."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Where they and other launchers, such as Slurm's, say which of them this is."""
PATIENCE = 1.0
"""Seconds that other processes leave process 0 to say of an error that all of them have."""
PASSING = 0.2
"""Seconds for a launcher to pass on what was said, which `Abort` may end before it does."""
FAILED = 1
ELSEWHERE = "another process's part"
"""What a process says of an error that it does not see the cause of."""


def world() -> Any:
    """The communicator of mpiexec's processes; None for a process by itself."""
    if not any(name in os.environ for name in (*SIZES, *RANKS)):
        return None
    started = max((int(text) for name in SIZES if (text := os.environ.get(name, "")).isdecimal()), default=0)
    if started == 1:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"mpiexec started this process, and perhaps others, which can't speak to each other without mpi4py "
            f"({error}): pip install 'twingrad[mpi]'"
        ) from None
    size = MPI.COMM_WORLD.Get_size()
    if started and size != started:
        raise InputError(
            f"mpiexec started {started} processes, and mpi4py's MPI ({MPI.Get_library_version().split(',')[0]}) sees "
            f"{size}: both must be of the same MPI"
        )
    return MPI.COMM_WORLD if size > 1 else None


def check_agreement(communicator: Any, what: str) -> None:
    """Raise `InputError` in all processes unless all have the same digest of what decides the training."""
    found = communicator.allgather(what)
    others = [rank for rank, other in enumerate(found) if other != found[0]]
    if others:
        raise InputError(
            f"process {others[0]} has other data, weights, options or another checkpoint than process 0: give all "
            "the same"
        )


@contextmanager
def together(output: Output) -> Iterator[Any]:
    """Give the communicator, or None. An error of one process is said once, and ends all of them."""
    communicator = world()
    if communicator is None:
        yield None
        return
    rank = communicator.Get_rank()
    if rank:
        output.console, output.target = Console(quiet=True), None
    try:
        yield communicator
    except BaseException as error:
        if isinstance(error, NonFiniteError):  # of all of them, and one knows where it arose
            messages = communicator.gather(str(error))
            found = [text for text in messages or () if ELSEWHERE not in text]
            error = NonFiniteError(found[0]) if found else error
        if rank:
            time.sleep(PATIENCE)
        if isinstance(error, (TwinGradError, EngineError, OSError)):
            said = str(error)
        else:
            said = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"
        print(f"error: process {rank} of {communicator.Get_size()}: {printable(said)}", file=sys.stderr, flush=True)
        time.sleep(PASSING)
        communicator.Abort(FAILED)
        os._exit(FAILED)  # it may return, and all is said


class Here:
    """A session in this process, with what a training asks of a worker; its processes train together."""

    def __init__(self, engine: str, threads: int, communicator: Any) -> None:
        self._engine, self._threads, self._communicator = registry.get(engine), threads, communicator
        self._session: Any = None
        self.seconds = float("nan")
        """Of the last epoch, or part of one."""
        if not self._engine.communicates:
            others = ", ".join(name for name in registry.names() if registry.get(name).communicates)
            raise InputError(f"engine {engine} does not train on several processes; expected one of {others}")

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._session is not None:
            self._session.close()

    def build(self, spec: ModelSpec, params: Mapping[str, Any], rule: Optimizer, batch_size: int, dtype: str) -> None:
        """See `Worker.build`."""
        self._session = self._engine.build(
            spec, params, rule, batch_size, dtype, self._threads, communicator=self._communicator
        )

    def preload(self, *arrays: Any) -> None:
        """They are here already."""

    def train_epoch(self, x: NDArray[Any], y: NDArray[Any], order: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Session.train_epoch`."""
        return self._timed(self._session.train_epoch, x, y, order)

    def train_steps(
        self, x: NDArray[Any], y: NDArray[Any], order: NDArray[np.int64], rates: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """See `Scheduling.train_steps`."""
        return self._timed(self._session.train_steps, x, y, order, rates)

    def evaluate(self, x: NDArray[Any], y: NDArray[Any]) -> Evaluation:
        """See `Session.evaluate`."""
        found: Evaluation = self._session.evaluate(x, y)
        return found

    def params(self) -> dict[str, NDArray[Any]]:
        """See `Session.params`."""
        return dict(self._session.params())

    def state(self) -> dict[str, NDArray[Any]]:
        """See `Resumable.state`."""
        return dict(self._session.state())

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """See `Resumable.load_state`."""
        self._session.load_state(state)

    def _timed(self, work: Any, *arguments: Any) -> Any:
        begin = time.perf_counter()
        found = work(*arguments)
        self.seconds = time.perf_counter() - begin
        return found
