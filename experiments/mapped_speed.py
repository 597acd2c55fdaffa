"""Training on files that may be larger than memory: how fast beside the same rows in memory, and in how much memory.

    python -m experiments.mapped_speed --gigabytes 4             # a file with a hole, which takes no room on a disk
    python -m experiments.mapped_speed --gigabytes 20 --written  # rows on a disk: beside reading it from start to end

Engines train one epoch after the other, from memory and from the file in turn. The file is in the system's cache then,
as far as it fits. With `--written` sequential reads of the file alternate with epochs, each after the system has
evicted its pages; the table shows the medians of both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge import memory, registry, spec, weights
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments.formats import fixed
from experiments.mapped import shuffled_blocks

FEATURES, BATCH, ROUNDS = 4096, 256, 3
MODEL = f"""
format = "twingrad-model"
version = 1
opset = 1
name = "one-layer"
input = {{ shape = ["N", {FEATURES}] }}
loss = {{ op = "softmax_cross_entropy" }}
layers = [{{ id = "dense", op = "dense", units = 10 }}]
"""
"""Little to compute for each byte, so that reading counts."""
PIECE = 64 * 1024 * 1024
"""Bytes of rows that are written, and read from start to end, at a time."""

Rows = NDArray[Any]


@dataclass(frozen=True)
class Row:
    """What was measured of one engine and file. Speeds are in bytes of rows per second; of pages in memory the best."""

    engine: str
    size: int
    anonymous: int
    """Bytes that the training process held after an epoch; pages of the file don't count."""
    mapped: float
    in_memory: float | None = None
    """None where the rows were not to be read into memory."""
    from_disk: float | None = None
    """Of an epoch after the system gave its pages of the file up: the median."""
    disk: float | None = None
    """Of reading the file from start to end: the median."""
    threads: int = 1
    """The number of engine threads."""


def write(folder: Path, size: int, written: bool) -> None:
    """Make the files `x.npy` of about `size` bytes, with a hole unless `written`, and `y.npy`."""
    each = 4 * FEATURES
    if written and shutil.disk_usage(folder).free < 2 * size:
        raise OSError(f"{folder}: less than {2 * size:,} bytes are free, twice as much as is to be written")
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (size // each, FEATURES))
    if written:
        count = PIECE // each
        for start in range(0, len(x), count):
            x[start : start + count] = np.random.default_rng(start).random(x[start : start + count].shape, np.float32)
        x.flush()
    np.save(folder / "y.npy", np.random.default_rng(0).integers(0, 10, len(x)))


def measured(
    engine: str, folder: Path, beside_memory: bool, written: bool, rounds: int = ROUNDS, threads: int = 1
) -> Row:
    """Train on the files of a folder."""
    network = spec.loads(MODEL, "the network")
    x, y = np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy")
    order = shuffled_blocks(np.arange(len(x)), x.nbytes // len(x), [0])
    disk = from_disk = None
    if written:
        alone, trained = [], []
        for _ in range(max(rounds, 1)):
            alone.append(_read(folder / "x.npy"))
            _give_up(folder / "x.npy")
            with Worker(engine, threads) as worker:
                trained.append(x.nbytes / _epoch(_built(worker, network, x, y), x, y, order))
        disk, from_disk = statistics.median(alone), statistics.median(trained)
    speeds: dict[str, list[float]] = {"mapped": [], "in memory": []}
    with Worker(engine, threads) as on_file, Worker(engine, threads) as on_memory:
        _built(on_file, network, x, y)
        sources: dict[str, tuple[Worker, Any]] = {"mapped": (on_file, x)}
        if beside_memory:
            _built(on_memory, network, x, y).preload(folder / "x.npy")
            sources["in memory"] = on_memory, folder / "x.npy"
        for turn in range(rounds + 1):
            for name, (worker, rows) in sources.items():
                seconds = _epoch(worker, rows, y, order)
                if turn or rounds == 0:  # in the first one pages come in
                    speeds[name].append(x.nbytes / seconds)
        anonymous = memory.held(on_file.pid)
    best = {name: max(found) for name, found in speeds.items() if found}
    return Row(engine, x.nbytes, anonymous, best["mapped"], best.get("in memory"), from_disk, disk, threads)


def _built(worker: Worker, network: ModelSpec, x: Rows, y: Rows) -> Worker:
    """The worker with a session, in which everything is planned."""
    worker.build(network, weights.initialise(network, 0), Optimizer("sgd", 0.001), BATCH)
    worker.train_epoch(np.array(x[:BATCH]), y[:BATCH], np.arange(BATCH))
    return worker


def _epoch(worker: Worker, x: Any, y: Rows, order: Rows) -> float:
    worker.train_epoch(x, y, order)
    return worker.seconds


def _read(path: Path) -> float:
    """Bytes per second of reading a file from start to end, from the disk."""
    _give_up(path)
    buffer = bytearray(PIECE)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return path.stat().st_size / (time.perf_counter() - begin)


def _give_up(path: Path) -> None:
    """Let the system forget the pages of a file, which nobody may map."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(rows: Sequence[Row]) -> list[str]:
    """What was measured, as a table in Markdown."""
    lines = [
        "| engine | threads | file, GB | anonymous memory, MB | mapped, MB/s | in memory, MB/s | share | "
        "from disk, MB/s | disk alone, MB/s | share |",
        "|:---|" + "---:|" * 9,
    ]
    for row in rows:
        cells = [str(row.threads), fixed(row.size / 1e9, 1)]
        cells += [fixed(row.anonymous / 1e6, 0), _speed(row.mapped), _speed(row.in_memory)]
        cells += [_share(row.mapped, row.in_memory), _speed(row.from_disk), _speed(row.disk)]
        cells += [_share(row.from_disk, row.disk)]
        lines.append(f"| {row.engine} | {' | '.join(cells)} |")
    return lines


def _speed(speed: float | None) -> str:
    return "–" if speed is None else fixed(speed / 1e6, 0)


def _share(speed: float | None, of: float | None) -> str:
    return "–" if speed is None or of is None else f"{fixed(100 * speed / of, 0)} %"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    able = [name for name in registry.names() if registry.get(name).maps]
    parser.add_argument("--engine", action="append", choices=able, help="may be given again (all that can)")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--written", action="store_true", help="rows on the disk, where they take room, not a hole")
    parser.add_argument("--mapped-only", action="store_true", help="without the same rows in memory")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="epochs after the first one (3)")
    parser.add_argument("--threads", type=int, default=1, help="number of engine threads, one core each (1)")
    parser.add_argument("--folder", type=Path, help="where files are made (TMPDIR)")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="twingrad-mapped-", dir=asked.folder) as folder:
        try:
            write(Path(folder), round(asked.gigabytes * 1e9), asked.written)
        except OSError as error:
            sys.exit(f"error: {error}")
        found = []
        for engine in asked.engine or able:
            registry.get(engine).prepare()
            found.append(
                measured(engine, Path(folder), not asked.mapped_only, asked.written, asked.rounds, asked.threads)
            )
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
