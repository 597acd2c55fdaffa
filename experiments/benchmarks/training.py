"""Time of the network of mnist-rnn-d and -e, in every engine: one epoch, and everything before the second step."""

from __future__ import annotations

from .engines import ENGINES, THREADS, Bench, trained


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
        """End the worker; there is none where the engine is not to be had."""
        if hasattr(self, "bench"):
            self.bench.close()
