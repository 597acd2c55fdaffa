"""Memory in two figures that are never mixed: bytes allocated per epoch, and the peak of resident memory.

Bytes allocated are all that `malloc`, `mmap` and their kin handed out during an epoch, given back or not, as
memray records it inside the worker, or for Julia what its own counters say (memray can't see into its heap).
TensorFlow takes its memory from a pool as long as oneDNN is on, so it is counted with oneDNN off: see
`Registered.counting`. XLA allocates one piece for all that a step computes, and uses its parts again within the step.
`build` counts to the first epoch, imports and data to none. Where a paper's file says so, memray records epochs of
only a part of the rows, and one with more of them, which tells what a step allocates and what an epoch. The peak is the
kernel's VmHWM, reset after imports and data and before `build`; it is taken in a separate run, since memray needs
memory itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bridge.worker import Worker
from experiments.measures.measure import EPOCH, Measure
from experiments.measures.task import Assignment, Parts, RunError, Task, Watcher

T = TypeVar("T")


def run(given: Assignment) -> Parts:
    """The peak in one fresh worker, and the bytes allocated in another."""
    with given.start() as worker:
        yield measure_peak(worker, given.task, given.watcher)
        yield given.blas(worker)
    with given.start(counting=True) as worker:
        yield measure(worker, given.task, given.watcher)


def measure(worker: Worker, task: Task, watcher: Watcher) -> dict[str, Any]:
    """Train in a fresh worker with memray around each epoch; the part `epochs` of a record."""
    if worker.engine.counts_itself:
        return _measure_counted(worker, task, watcher)
    task.preload(worker)
    epochs: list[dict[str, Any]] = []
    of_build, _ = recorded(worker, task, lambda: task.build(worker))
    task.preload(worker)  # between two captures: a framework's own copy of the data is of no epoch
    for epoch, order in enumerate(_orders(task), 1):
        found, _ = recorded(worker, task, partial(task.train, worker, order))
        allocated, allocations = map(sum, zip(found, of_build, strict=True)) if epoch == 1 else found
        epochs.append({"epoch": epoch, "bytes_allocated": allocated, "allocations": allocations})
        watcher.step()
    return {"epochs": whole_epochs(epochs, task)}


def _rows(task: Task) -> tuple[int, int]:
    """How many rows the epochs have, and how many more the last one, in whole mini-batches; 0: there is no such epoch.

    Where there are no more the epochs have all rows.
    """
    rows = len(task.work.dataset.y_train)
    few = task.rows_per_epoch or rows
    odd = (few - rows) % task.batch_size  # without these the last mini-batch is as large as that of a whole epoch
    few -= odd if few - odd >= task.batch_size else 0
    more = min(few, rows - few) // task.batch_size * task.batch_size
    return (few, more) if more else (rows, 0)


def _orders(task: Task) -> list[Path]:
    """The order of the rows in each epoch, and in one with more of them where the others have only a part."""
    few, more = _rows(task)
    lengths = [few] * task.epochs + [few + more] * bool(more)
    return [task.work.order(task.seed, epoch, length) for epoch, length in enumerate(lengths, 1)]


def recorded(worker: Worker, task: Task, work: Callable[[], T]) -> tuple[tuple[int, int], T]:
    """The bytes and the number of allocations of some work in a worker, and what the work returns."""
    capture = task.work.folder / f"memray-{worker.pid}.bin"
    worker.start_memray(capture)
    result = work()
    worker.stop_memray()
    counted = read_capture(capture)
    capture.unlink()
    return counted, result


def _measure_counted(worker: Worker, task: Task, watcher: Watcher) -> dict[str, Any]:
    """The same for an engine whose runtime counts, which costs no time: of all rows.

    What it allocates while it starts and builds is of epoch 1.
    """
    task.preload(worker)
    epochs: list[dict[str, Any]] = []
    task.build(worker)
    before = (0, 0)
    for epoch in range(1, task.epochs + 1):
        task.train(worker, task.work.order(task.seed, epoch))
        now = worker.allocated()
        epochs.append({"epoch": epoch, "bytes_allocated": now[0] - before[0], "allocations": now[1] - before[1]})
        before = now
        watcher.step()
    return {"epochs": epochs}


def whole_epochs(epochs: list[dict[str, Any]], task: Task) -> list[dict[str, Any]]:
    """What epochs of all rows would allocate: all but the last, which has more rows than those before it.

    The rows that an epoch lacks allocate what the last one's additional rows do; what an epoch allocates once, and what
    the first one compiles, is in each as it was counted.
    """
    few, more = _rows(task)
    if not more:
        return epochs
    *counted, last = epochs
    lacking = len(task.work.dataset.y_train) - few
    whole = [dict(epoch) for epoch in counted]
    for name in ("bytes_allocated", "allocations"):
        of_more = last[name] - counted[-1][name]
        for epoch in whole:
            epoch[name] = round(epoch[name] + of_more * lacking / more)
    return whole


def measure_peak(worker: Worker, task: Task, watcher: Watcher) -> dict[str, Any]:
    """Train in another fresh worker without memray; the part `peak_rss_bytes` of a record."""
    task.preload(worker)
    worker.reset_peak()
    task.build(worker)
    for order in _orders(task):
        task.train(worker, order)
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


def _unusable(option: Callable[[str], Any]) -> str:
    if option("memory_rows") and (option("memory_epochs") or 1) < 2:
        return (
            "memory_rows needs memory_epochs of at least 2: a later epoch is what one with more rows is compared with"
        )
    return ""


MEASURE = Measure(
    name="memory",
    place=2,
    title="memory: bytes allocated and peak, in separate runs",
    about="bytes allocated per epoch, and peak memory",
    words="bytes allocated and peak memory",
    run=run,
    form={"epochs": [EPOCH]},
    timed=False,
    options={
        "memory_seeds": "seeds",
        "memory_threads": "threads",
        "memory_epochs?": "epochs",  # the second one is like all that follow
        "memory_rows?": "count",  # of an epoch: what all rows would allocate follows from one with more of them
        "memory_engines?": "engines",
    },
    check=_unusable,
    engines="memory_engines",
    seeds=("seeds", "memory_seeds"),
    threads="memory_threads",
    epochs="memory_epochs",
    rows="memory_rows",
    config=lambda job, task: {"rows": task.rows_per_epoch},
    steps=lambda job: 2 * (job.epochs + bool(job.option("memory_rows"))),
    summary=("bytes_later_epochs", "peak_rss_bytes"),
)
