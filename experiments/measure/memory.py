"""Memory in two figures that are never mixed: bytes allocated per epoch, and the peak of resident memory.

Bytes allocated are all that `malloc`, `mmap` and their kin handed out during an epoch, given back or not, as
memray records it inside the worker, or for Julia what its own counters say (memray can't see into its heap);
`build` counts to the first epoch, imports and data to none. The peak is the kernel's VmHWM, reset after imports
and data and before `build`; it is taken in a run of its own, since memray needs memory itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge.worker import Worker
from experiments.measure.task import RunError, Task, Watcher


def measure(worker: Worker, task: Task, watcher: Watcher) -> dict[str, Any]:
    """Train in a fresh worker with memray around each epoch; the parts `startup` and `epochs` of a record."""
    if worker.engine.counts_itself:
        return _measure_counted(worker, task, watcher)
    task.preload(worker)
    epochs: list[dict[str, Any]] = []
    build_seconds = 0.0
    for epoch in range(1, task.epochs + 1):
        order = task.work.order(task.seed, epoch)
        capture = task.work.folder / f"memray-{worker.pid}-{epoch}.bin"
        worker.start_memray(capture)
        if epoch == 1:
            build_seconds = task.build(worker)
        task.train(worker, order)
        worker.stop_memray()
        allocated, allocations = read_capture(capture)
        capture.unlink()
        epochs.append({"epoch": epoch, "bytes_allocated": allocated, "allocations": allocations})
        watcher.step()
    startup = {"import_seconds": worker.import_seconds, "build_seconds": build_seconds}
    return {"startup": startup, "epochs": epochs}


def _measure_counted(worker: Worker, task: Task, watcher: Watcher) -> dict[str, Any]:
    """The same for an engine whose runtime counts: what it allocates while it starts and builds is of epoch 1."""
    task.preload(worker)
    epochs: list[dict[str, Any]] = []
    build_seconds = task.build(worker)
    before = (0, 0)
    for epoch in range(1, task.epochs + 1):
        task.train(worker, task.work.order(task.seed, epoch))
        now = worker.allocated()
        epochs.append({"epoch": epoch, "bytes_allocated": now[0] - before[0], "allocations": now[1] - before[1]})
        before = now
        watcher.step()
    startup = {"import_seconds": worker.import_seconds, "build_seconds": build_seconds}
    return {"startup": startup, "epochs": epochs}


def measure_peak(worker: Worker, task: Task, watcher: Watcher) -> dict[str, Any]:
    """Train in another fresh worker without memray; the part `peak_rss_bytes` of a record."""
    task.preload(worker)
    worker.reset_peak()
    task.build(worker)
    for epoch in range(1, task.epochs + 1):
        task.train(worker, task.work.order(task.seed, epoch))
        watcher.step()
    return {"peak_rss_bytes": worker.peak_rss()}


def read_capture(path: Path) -> tuple[int, int]:
    """The bytes handed out and the number of allocations in a memray capture."""
    try:
        import memray
    except ModuleNotFoundError:
        raise RunError("bytes allocated cannot be measured without memray: pip install 'twingrad[memory]'") from None
    given_back = {
        memray.AllocatorType.FREE,
        memray.AllocatorType.MUNMAP,
        memray.AllocatorType.PYMALLOC_FREE,
    }
    count = total = 0
    with memray.FileReader(path) as reader:
        for record in reader.get_allocation_records():
            if record.allocator not in given_back:
                count += record.n_allocations
                total += record.size
    return total, count
