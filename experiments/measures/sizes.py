"""Networks of several sizes: engines take steps alternately, as in a race, with start-up and memory beside them.

Each run is of one network and number of threads, and of all engines, each in one process. For each size of mini-batch,
the smallest first, the engines build one after the other, while all others are stopped, and train until their steps
are steady. Then they alternate: in a round each trains as many steps as take it about `sizes_milliseconds`, one at
least. A framework whose steps take over `SLOW` times as long as the fastest one's takes part in every third round: it
can't be the best peer.

Start-up is what `build` and the first step take, once the engine is imported and its runtime has started, whose seconds
are counted apart. Memory is the peak since before the first `build`, over the level there. An engine that can say what
the calls of a step cost (`Costed`) is asked for the most expensive one, and for what its threads do. Before and after,
the machine itself is measured (`roofline`); the best of both gives the limit of each step, and of that call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge import spec as model_spec
from bridge.errors import SpecError
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments.data import generated
from experiments.measures import roofline
from experiments.measures.ablation import warm
from experiments.measures.measure import Measure
from experiments.measures.race import failing
from experiments.measures.task import Assignment, Parts, RunError, Task
from experiments.run_arrays import RunArrays
from experiments.slots import rotated

if TYPE_CHECKING:
    from experiments.papers import Paper, Runs
    from experiments.sweep import Job

COMPILED = "torch-compile"
"""The engine that compiles anew for each size of mini-batch, so that it takes part in only one."""
GIVE_UP = 180.0
"""Seconds of building and a first step after which an engine takes no further part."""
MILLISECONDS = 50
"""How long the steps of a round take, where the paper's file says nothing."""
STEPS_MOST = 1000
REST = "gathering and waiting"
"""What is neither in an op of a step nor in the update."""
SLOW, SPARSE = 2.0, 3
"""From how many times the fastest framework's time on another takes part in only every so many rounds."""

FACTS = (
    *("first", "start_seconds", "memory_bytes", "import_seconds", "level_bytes"),
    *("kernel", "kernel_share", "kernel_limit_share", "threads_in_step", "missing"),
)
"""What the tidy table has of an engine, a network and a size of mini-batch, beside its rounds."""
LIMITS = ("limit_microseconds", "limited_by")


class GaveUpError(RunError):
    """An engine was not ready in time."""


def run(given: Assignment) -> Parts:
    """The rounds, what else is known of each engine at each size of mini-batch, and why engines fell out."""
    asked = given.settings
    spec = model_spec.loads(asked["spec"], "the spec")
    rows: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    out: set[str] = set()
    blas: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(RunArrays(generated.drawn_for(spec), given.task.work.folder))
        task = replace(given.task, spec=spec, optimizer=Optimizer(**asked["optimizer"]), work=work, pretrained={})
        tasks = {batch: replace(task, batch_size=batch) for batch in sorted(asked["batches"])}
        works = {batch: roofline.work_of(here) for batch, here in tasks.items()}
        one_of_them = next(iter(works.values()))  # whose parameters are those of all
        rates = roofline.measure(one_of_them, task.dtype, given.threads)
        workers: dict[str, Worker] = {}
        levels: dict[str, int] = {}
        for batch, here in tasks.items():
            seconds: dict[str, float] = {}
            for name in given.engines:
                if name in out or name in failures or (name == COMPILED and batch != asked["compiled"]):
                    continue
                about: dict[str, Any] = {"engine": name, "batch": batch}
                try:
                    with failing(name, failures, (GaveUpError, SpecError)):
                        if name not in workers:
                            workers[name] = stack.enter_context(given.slot.start(name, given.threads))
                            about |= {"first": 1, "import_seconds": workers[name].import_seconds}
                        about["start_seconds"] = begin(workers[name], here, levels)
                        seconds[name] = warm(workers[name], here)
                        about["level_bytes"] = levels[name]
                        about["memory_bytes"] = workers[name].peak_rss() - levels[name]
                        workers[name].pause()
                        facts.append(about)
                except (GaveUpError, SpecError) as error:
                    out.add(name)
                    facts.append(about | {"missing": str(error)})
            for number in range(asked["rounds"] + 1):  # round 0 warms up
                found = list(in_round(number, workers, seconds, here, asked["milliseconds"], failures))
                rows += found if number else []
                given.watcher.step()
            for about in facts:
                name = about["engine"]
                own = [row for row in rows if (row["engine"], row["batch"]) == (name, batch)]
                # With few rounds a slow framework may have taken part in none.
                if about["batch"] == batch and name in seconds and name not in failures and own:
                    with failing(name, failures):
                        workers[name].resume()
                        blas[name] = workers[name].linear_algebra()
                        step = statistics.median(row["microseconds_per_step"] for row in own) / 1e6
                        about |= slowest(workers[name].costs(), step, here)
                        about["threads_in_step"] = workers[name].threads_in_step() or None
                        workers[name].pause()
            yield {"sizes": rows, "blas": blas, "failures": failures}
    rates = rates.best(roofline.measure(one_of_them, task.dtype, given.threads))
    yield {
        "facts": [_against(about, rates) for about in facts],
        "limits": {str(batch): roofline.Limit(work, rates).record() for batch, work in works.items()},
    }


def begin(worker: Worker, task: Task, levels: dict[str, int]) -> float:
    """Build and take a first step: the seconds of both. GaveUpError after `GIVE_UP` of them; the worker is ended then.

    `levels` keeps the resident memory of each engine's process before its first `build`.
    """
    worker.resume()
    task.preload(worker)
    if worker.engine.name not in levels:
        worker.reset_peak()
        levels[worker.engine.name] = worker.peak_rss()
    with giving_up(worker):
        seconds = task.build(worker)
        task.preload(worker)
        return seconds + task.train(worker, task.work.order(task.seed, 1, task.batch_size))[1]


@contextmanager
def giving_up(worker: Worker) -> Iterator[None]:
    """End the worker if the block takes longer than `GIVE_UP` seconds, and raise GaveUpError."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        worker.kill()

    timer = threading.Timer(GIVE_UP, give_up)
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise GaveUpError(f"given up: building and a first step took over {GIVE_UP:g} s") from error
        raise
    finally:
        timer.cancel()


def in_round(
    number: int,
    workers: Mapping[str, Worker],
    seconds: Mapping[str, float],
    task: Task,
    milliseconds: float,
    failures: dict[str, str],
) -> Iterator[dict[str, Any]]:
    """Let each engine that takes part in a round train; `seconds` are those of a step, as far as known before."""
    fastest = min((taken for name, taken in seconds.items() if name not in roofline.DIRECT), default=0.0)
    for name in rotated([name for name in seconds if name not in failures], number):
        if number % SPARSE and name not in roofline.DIRECT and seconds[name] > SLOW * fastest:
            continue
        steps = max(1, min(STEPS_MOST, round(milliseconds / 1e3 / seconds[name])))
        with failing(name, failures):
            workers[name].resume()
            order = task.work.order(task.seed, number + 1, steps * task.batch_size)
            _, taken = task.train(workers[name], order)
            workers[name].pause()
            step = {"microseconds_per_step": taken / steps * 1e6}
            yield {"engine": name, "batch": task.batch_size, "round": number, **step}


def slowest(costs: list[tuple[str, str, float, int, int]], step: float, task: Task) -> dict[str, Any]:
    """The op of a layer that takes most of a step, all its calls together, or the update; nothing without costs.

    What neither accounts for is `REST`: gathering rows, looking for NaN, and what threads wait for.
    """
    by_op: dict[tuple[str, str], tuple[float, int, int]] = {}
    for op, layer, seconds, moved, flops in costs:
        before = by_op.get((op, layer), (0.0, 0, 0))
        by_op[op, layer] = before[0] + seconds, before[1] + moved, before[2] + flops
    if not by_op:
        return {}
    rest = max(0.0, step - sum(cost[0] for cost in by_op.values()))
    by_op[REST, ""] = rest, roofline.work_of(task).batch, 0
    (op, layer), (seconds, moved, flops) = max(by_op.items(), key=lambda item: item[1][0])
    flops = flops or roofline.flops_by_op(task).get((op, layer), 0)
    total = sum(cost[0] for cost in by_op.values())
    name = f"{op} of {layer}" if layer else op
    return {"kernel": name, "kernel_share": seconds / total, "kernel_seconds": seconds, "flops": flops, "moved": moved}


def _against(about: Mapping[str, Any], rates: roofline.Rates) -> dict[str, Any]:
    """What is known of an engine, with the share of its slowest op's time that the machine would need for it."""
    if "kernel" not in about:
        return dict(about)
    least = max(about["flops"] / rates.flops_per_second, about["moved"] / rates.bandwidth(about["moved"]))
    return {**about, "kernel_limit_share": least / about["kernel_seconds"]}


def rows_of(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tidy rows of a record: the rounds with what is known beside them, and the engines that are missing."""
    config = record["config"]
    network = {name: config.get(name) for name in ("family", "size")}
    facts = {(about["engine"], about["batch"]): about for about in record.get("facts", ())}
    missing = [about for about in facts.values() if "missing" in about]
    for row in (*record.get("sizes", ()), *missing):
        limit = record.get("limits", {}).get(str(row["batch"]), {})
        about = facts.get((row["engine"], row["batch"]), {})
        known = {name: about.get(name) for name in FACTS} | {name: limit.get(name) for name in LIMITS}
        yield {**network, "label": record["entrants"].get(row["engine"], {}).get("label"), **row, **known}


def networks(paper: Paper, runs: Runs) -> list[str]:
    """The names of the networks that a profile measures."""
    asked = runs.option("sizes_networks")
    return [name for name in names(paper) if asked is None or name in asked]


def names(paper: Paper) -> list[str]:
    """The names of a paper's networks, "<family>-<size>", the smallest of all families first."""
    by_place = itertools.zip_longest(*([f"{one.id}-{size}" for size in one.sizes] for one in paper.families))
    return [name for found in by_place for name in found if name]


def network_settings(job: Job) -> dict[str, Any]:
    """A job's network and how it is trained, by value."""
    family, size = next(
        (family, size) for family in job.paper.families for size in family.sizes if job.network == f"{family.id}-{size}"
    )
    return {
        "family": family.id,
        "size": size,
        "spec": job.paper.sized(family, size).dump(),
        "optimizer": dataclasses.asdict(Optimizer(family.optimizer, family.learning_rate)),
    }


def _settings(job: Job) -> dict[str, Any]:
    few = job.option("sizes_batches_of_one_thread") if job.threads == 1 else None
    return {
        **network_settings(job),
        "batches": few or job.option("sizes_batches"),
        "rounds": job.rounds,
        "compiled": job.option("sizes_compiled_batch") if job.threads > 1 else None,
        "milliseconds": job.option("sizes_milliseconds") or MILLISECONDS,
    }


def _unusable(option: Any) -> str:
    needs = ("sizes_rounds", "sizes_threads", "sizes_batches")
    if "sizes" in option("measures") and (absent := [name for name in needs if not option(name)]):
        return f"the measure sizes needs {', '.join(absent)}"
    return ""


def _steps(job: Job) -> int:
    settings: Iterable[int] = _settings(job)["batches"]
    return (job.rounds + 1) * len(list(settings))


MEASURE = Measure(
    name="sizes",
    place=8,
    title="sizes: networks of several sizes, engines alternating",
    about="step time, start-up and memory of networks of several sizes",
    words="networks of several sizes",
    run=run,
    form={
        "sizes": [
            {
                **{"engine": "text", "batch": "count", "round": "count", "microseconds_per_step": "number"},
                # Its tidy rows have these.
                **dict.fromkeys(("family?", "kernel?", "threads_in_step?", "limited_by?"), "text?"),
            }
        ],
        "facts": [
            {
                **{"engine": "text", "batch": "count"},
                **{"kernel?": "text", "threads_in_step?": "text?", "missing?": "text"},
            }
        ],
        "limits": {"*": roofline.FORM},
    },
    files=("experiments/measures/roofline.jl",),
    plan="together",
    networks=networks,
    options={
        **{"sizes_rounds?": "rounds", "sizes_threads?": "threads list", "sizes_batches?": "counts"},
        "sizes_batches_of_one_thread?": "counts",
        "sizes_networks?": "names",  # "<family>-<size>"; all of them when absent
        "sizes_compiled_batch?": "count",  # the only one of PyTorch compiled, which has no part with one thread
        "sizes_milliseconds?": "count",
    },
    check=_unusable,
    threads="sizes_threads",
    rounds="sizes_rounds",
    settings=_settings,
    steps=_steps,
    columns=(
        *("key", "paper", "engine", "label", "threads", "profile", "data_source", "family", "size", "batch", "round"),
        *("microseconds_per_step", *FACTS, *LIMITS, "cpu_model", "machine", "commit", "created"),
    ),
    records=rows_of,
    later=True,
    later_columns=("import_seconds", "level_bytes", "threads_in_step"),
)
