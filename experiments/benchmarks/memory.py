"""Memory of the network of mnist-rnn-d and -e, in every engine: two figures that are never mixed."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path

from .engines import ENGINES, Bench, imports


class _Memory:
    params = (ENGINES,)
    param_names = ("engine",)
    unit = "bytes"
    threads = 2

    def setup(self, engine: str) -> None:
        """Start a fresh worker; engine and data are in memory then."""
        self.bench = Bench(engine, self.threads)

    def teardown(self, engine: str) -> None:
        """End the worker; there is none where the engine is not available."""
        if hasattr(self, "bench"):
            self.bench.close()


class Peak(_Memory):
    """Resident memory, with two threads."""

    def track_peak(self, engine: str) -> int:
        """The most that is resident from before the build to the end of the first 100 steps."""
        self.bench.worker.reset_peak()
        self.bench.build()
        self.bench.train(self.bench.epoch)
        return self.bench.worker.peak_rss()


class Allocated(_Memory):
    """Bytes handed out, given back or not, as memray or the engine's runtime counts them; n/a without memray.

    With one thread: OpenBLAS allocates half a megabyte at every product that it spreads over several.
    """

    threads = 1
    version = "f4ce65575c766e2fc2448471bf532355a4cb8aeeda631dadda33a382c7d8f355"
    """What asv called it by its code before the import moved: so that its history continues."""

    def setup(self, engine: str) -> None:
        """Start the worker, with its one thread, where memray is available."""
        with imports():
            import memray  # noqa: F401

            try:
                from experiments.measures.memory import read_capture
            except ImportError:  # up to 0.1.0
                read_capture = import_module("experiments.measure.memory").read_capture
        self.read_capture = read_capture
        super().setup(engine)

    def track_second_epoch(self, engine: str) -> int:
        """In 100 steps, after 100 others."""
        self.bench.build()
        self.bench.train(self.bench.epoch)
        if getattr(self.bench.worker.engine, "counts_itself", False):
            before = self.bench.worker.allocated()[0]
            self.bench.train(self.bench.epoch)
            return self.bench.worker.allocated()[0] - before
        with tempfile.TemporaryDirectory(prefix="twingrad-bench-") as folder:
            capture = Path(folder, "capture.bin")
            self.bench.worker.start_memray(capture)
            self.bench.train(self.bench.epoch)
            self.bench.worker.stop_memray()
            return self.read_capture(capture)[0]
