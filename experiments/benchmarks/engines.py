"""What the benchmarks of all engines share: the network, synthetic data, and the worker process that trains."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENGINES = ["numpy", "julia", "manual", "manual-julia", "torch", "torch-compile"]
"""A list of its own, not the registry's: asv takes the parameters from one commit and uses them for all."""

THREADS = [1, 2]

STEPS = 100
"""Mini-batches in an epoch here: so many that passing the order to the worker and the losses back is no matter."""

BATCH_SIZE = 100
LEARNING_RATE = 0.015
MODEL = Path(__file__).parents[1] / "models" / "mnist-rnn.toml"


@contextmanager
def imports() -> Iterator[None]:
    """Raise `NotImplementedError` for an import that fails: this commit does not have the thing yet, or any more."""
    try:
        yield
    except ImportError as error:
        raise NotImplementedError(f"this commit lacks it: {error}") from error


def require(engine: str, threads: int) -> None:
    """Raise `NotImplementedError` where this commit, or this machine, can't train with the engine."""
    with imports():
        from bridge import engine as engines
        from bridge.errors import EngineUnavailableError
    try:
        found = engines.availability(engine)
    except EngineUnavailableError as error:
        raise NotImplementedError(str(error)) from error
    if not found.ok:
        raise NotImplementedError(found.reason)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > cores:
        raise NotImplementedError(f"{threads} threads want as many cores, and there are {cores}")


class Bench:
    """An engine in a worker process of its own, with images and labels drawn at random; not built yet."""

    def __init__(self, engine: str, threads: int) -> None:
        require(engine, threads)
        with imports():
            import numpy as np

            from bridge import spec, weights
            from bridge.errors import EngineUnavailableError
            from bridge.worker import Worker

        try:
            self.worker = Worker(engine, threads)
        except EngineUnavailableError as error:
            raise NotImplementedError(str(error)) from error
        self.model = spec.load(MODEL)
        self.params = weights.initialise(self.model, 0, np.float32)
        rng = np.random.default_rng(0)
        rows = STEPS * BATCH_SIZE
        self.x = rng.random((rows, *self.model.input.sample), dtype=np.float32)
        self.y = rng.integers(0, self.model.output[-1], rows)
        self._folder = tempfile.TemporaryDirectory(prefix="twingrad-bench-")
        self.epoch = self._save("epoch", rng.permutation(rows))
        self.step = self._save("step", np.arange(BATCH_SIZE))
        self.worker.preload(self.x, self.y)

    def build(self) -> None:
        """Begin a session, in place of the one before."""
        from bridge.engine import Optimizer

        self.worker.build(self.model, self.params, Optimizer("sgd", LEARNING_RATE), BATCH_SIZE)

    def train(self, order: Path) -> None:
        """Train on the rows of an order: `epoch` or `step`."""
        self.worker.train_epoch(self.x, self.y, order)

    def close(self) -> None:
        """End the worker and remove the files."""
        self.worker.close()
        self._folder.cleanup()

    def _save(self, name: str, rows: Any) -> Path:
        import numpy as np

        path = Path(self._folder.name, f"{name}.npy")
        np.save(path, rows.astype(np.int64), allow_pickle=False)
        return path


_current: tuple[tuple[str, int], Bench] | None = None


def trained(engine: str, threads: int) -> Bench:
    """A bench that has built and trained an epoch; kept for the next call, since asv sets up before every sample."""
    global _current
    if _current is None or _current[0] != (engine, threads):
        release()
        bench = Bench(engine, threads)
        bench.build()
        bench.train(bench.epoch)
        _current = (engine, threads), bench
    return _current[1]


def release() -> None:
    """End the bench that `trained` keeps."""
    global _current
    if _current is not None:
        _current[1].close()
        _current = None
