"""What the benchmarks of all engines share: the networks, synthetic data, and the worker process that trains."""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINES = [
    *("numpy", "julia", "manual", "manual-julia", "torch", "torch-compile"),
    *("tensorflow", "tensorflow-xla", "jax", "flux", "lux", "simplechains"),
]
"""A separate list, not the registry's: asv takes the parameters from one commit and uses them for all, also for older
ones that have `manual` and `manual-julia`."""

THREADS = [1, 2]

STEPS = 100
"""Mini-batches in an epoch here: enough that passing the order to the worker and the losses back does not matter."""

BATCH_SIZE = 100
LEARNING_RATE = 0.015
MODELS = Path(__file__).parents[1] / "models"
MODEL = MODELS / "mnist-rnn.toml"


@dataclass(frozen=True)
class Workload:
    """A network and how it is trained: model, mini-batch, optimizer, and steps of an epoch here."""

    model: str
    batch_size: int = BATCH_SIZE
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    steps: int = STEPS
    changes: tuple[tuple[str, Any], ...] = ()
    """What differs from the model, as `"<layer id>.<key>"` and value."""


RNN = Workload("mnist-rnn", learning_rate=LEARNING_RATE)
CONVOLUTIONAL = {
    "mnist-cnn": Workload("mnist-cnn"),
    "mnist-cnn-batch1": Workload("mnist-cnn", batch_size=1, steps=1000),
    "imdb-cnn": Workload("imdb-cnn", batch_size=64, optimizer="adam", learning_rate=0.001),
}
"""The workloads of the papers besides the recurrent one, by the names that the pages show."""


def _sizes() -> dict[str, Workload]:
    """The middle size of each family of the study `sizes`, by the family's name."""
    study = tomllib.loads((MODELS.parent / "papers" / "sizes.toml").read_text(encoding="utf-8"))
    return {
        family["id"]: Workload(
            *(family["model"], 64, family["optimizer"], family["learning_rate"], 10),
            changes=tuple(list(family["sizes"].values())[len(family["sizes"]) // 2].items()),
        )
        for family in study["families"]
    }


SIZES = _sizes()


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
        from bridge.errors import EngineUnavailableError

        try:
            from bridge.registry import availability
        except ImportError:  # an older commit
            from bridge.engine import availability  # type: ignore[no-redef]
    try:
        found = availability(engine)
    except EngineUnavailableError as error:
        raise NotImplementedError(str(error)) from error
    if not found.ok:
        raise NotImplementedError(found.reason)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > cores:
        raise NotImplementedError(f"{threads} threads want as many cores, and there are {cores}")


class Bench:
    """An engine in a separate worker process, with data drawn at random; not built yet."""

    def __init__(self, engine: str, threads: int, workload: Workload = RNN) -> None:
        require(engine, threads)
        with imports():
            import numpy as np

            from bridge import spec, weights
            from bridge.errors import EngineUnavailableError, SpecError
            from bridge.worker import Worker

        self.workload = workload
        try:
            self.model = spec.load(MODELS / f"{workload.model}.toml")
            if workload.changes:
                document = self.model.model_dump(mode="json")
                for key, value in workload.changes:
                    id, _, setting = key.rpartition(".")
                    next(layer for layer in document["layers"] if layer["id"] == id)[setting] = value
                self.model = spec.parse(document)
        except SpecError as error:  # its layers are newer than this commit
            raise NotImplementedError(str(error)) from error
        try:
            self.worker = Worker(engine, threads)
        except EngineUnavailableError as error:
            raise NotImplementedError(str(error)) from error
        self.params = weights.initialise(self.model, 0, np.float32)
        rng = np.random.default_rng(0)
        rows = workload.steps * workload.batch_size
        self.x, self.y = drawn(self.model, rows, rng)
        self._folder = tempfile.TemporaryDirectory(prefix="twingrad-bench-")
        self.epoch = self._save("epoch", rng.permutation(rows))
        self.step = self._save("step", np.arange(workload.batch_size))
        self.worker.preload(self.x, self.y)

    def build(self) -> None:
        """Begin a session, in place of the one before."""
        from bridge.errors import SpecError

        try:
            from bridge.session import Optimizer
        except ImportError:  # an older commit
            from bridge.engine import Optimizer  # type: ignore[no-redef]

        workload = self.workload
        optimizer = Optimizer(workload.optimizer, workload.learning_rate)
        try:
            self.worker.build(self.model, self.params, optimizer, workload.batch_size)
        except SpecError as error:  # this engine does not have the network, or not yet
            self.close()
            raise NotImplementedError(str(error)) from error

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


def drawn(model: Any, rows: int, rng: Any) -> tuple[Any, Any]:
    """Features and targets at random, in the shapes and types that a model wants."""
    import numpy as np

    if model.input.dtype == "int64":
        x = rng.integers(0, model.layers[0].vocabulary, (rows, *model.input.sample))
    else:
        x = rng.random((rows, *model.input.sample), dtype=np.float32)
    if model.target.kind == "classes":
        return x, rng.integers(0, model.output[-1], rows)
    return x, rng.integers(0, 2, (rows, *model.target.shape)).astype(np.float32)


_current: tuple[tuple[str, int, Workload], Bench] | None = None


def trained(engine: str, threads: int, workload: Workload = RNN) -> Bench:
    """A bench that has built and trained an epoch; kept for the next call, since asv sets up before every sample."""
    global _current
    if _current is None or _current[0] != (engine, threads, workload):
        release()
        bench = Bench(engine, threads, workload)
        bench.build()
        bench.train(bench.epoch)
        _current = (engine, threads, workload), bench
    return _current[1]


def release() -> None:
    """End the bench that `trained` keeps."""
    global _current
    if _current is not None:
        _current[1].close()
        _current = None
