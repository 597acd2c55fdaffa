"""Time of the papers' networks in every engine: one epoch, and of one network everything before the second step."""

from __future__ import annotations

from .engines import CONVOLUTIONAL, ENGINES, SIZES, THREADS, Bench, trained


class Epoch:
    """An epoch of 100 mini-batches of 100 synthetic images, after a first one: gather, forward, backward, update."""

    params = (ENGINES, THREADS)
    param_names = ("engine", "threads")
    number = 1
    warmup_time = 0.0

    def setup(self, engine: str, threads: int) -> None:
        """Have a worker that has trained an epoch."""
        self.bench = trained(engine, threads)

    def time_100_steps(self, engine: str, threads: int) -> None:
        """Train."""
        self.bench.train(self.bench.epoch)


class Convolutional:
    """An epoch of the convolutional networks after a first one, on synthetic rows: 100 mini-batches, or 1000 images.

    With two threads alone, and one process for each combination: a run over many commits stays affordable.
    """

    params = (ENGINES, list(CONVOLUTIONAL))
    param_names = ("engine", "workload")
    number = 1
    repeat = (2, 5, 5.0)
    rounds = 1
    warmup_time = 0.0

    def setup(self, engine: str, workload: str) -> None:
        """Have a worker that has trained an epoch."""
        self.bench = trained(engine, 2, CONVOLUTIONAL[workload])

    def time_epoch(self, engine: str, workload: str) -> None:
        """Train."""
        self.bench.train(self.bench.epoch)


class Start:
    """From an engine that is imported to its first finished step: building, planning, compiling."""

    params = (ENGINES,)
    param_names = ("engine",)
    number = 1
    repeat = (2, 5, 20.0)
    rounds = 1
    warmup_time = 0.0

    def setup(self, engine: str) -> None:
        """Start a fresh worker: a second build in the same process would find things compiled."""
        self.bench = Bench(engine, threads=1)

    def time_build_and_first_step(self, engine: str) -> None:
        """Build and train on one mini-batch."""
        self.bench.build()
        self.bench.train(self.bench.step)

    def teardown(self, engine: str) -> None:
        """End the worker; there is none where the engine is not available."""
        if hasattr(self, "bench"):
            self.bench.close()


class Sizes:
    """Ten steps of the networks of the study `sizes` in their middle size, in mini-batches of 64, with two threads."""

    params = (ENGINES, list(SIZES))
    param_names = ("engine", "family")
    version = "1"
    number = 1
    repeat = (2, 5, 10.0)
    rounds = 1
    warmup_time = 0.0

    def setup(self, engine: str, family: str) -> None:
        """Have a worker that has trained an epoch."""
        self.bench = trained(engine, 2, SIZES[family])

    def time_10_steps(self, engine: str, family: str) -> None:
        """Train."""
        self.bench.train(self.bench.epoch)


class SizesStart:
    """The same networks: from an engine that is imported to its first finished step."""

    params = (ENGINES, list(SIZES))
    param_names = ("engine", "family")
    version = "1"
    timeout = 1800.0  # PyTorch compiles two GRUs for some minutes, and each time anew
    number = 1
    repeat = (2, 3, 20.0)
    rounds = 1
    warmup_time = 0.0

    def setup(self, engine: str, family: str) -> None:
        """Start a fresh worker."""
        self.bench = Bench(engine, 2, SIZES[family])

    def time_build_and_first_step(self, engine: str, family: str) -> None:
        """Build and train on one mini-batch."""
        self.bench.build()
        self.bench.train(self.bench.step)

    def teardown(self, engine: str, family: str) -> None:
        """End the worker; there is none where the engine is not available."""
        if hasattr(self, "bench"):
            self.bench.close()
