"""Networks of several sizes: engines take steps alternately, as in a race, with start-up and memory beside them.

Each run is of one network and number of threads, and of all engines, each in one process. For each size of mini-batch,
the smallest first, the engines build one after the other, while all others are stopped, and train until their steps
are steady. All start from the same weights and are given the same mini-batches in the same order; the losses of their
first `COMPARED` steps are compared with PyTorch's. A framework whose losses differ by more than `MOST_DEVIATION` is
left out at that size of mini-batch, with the reason; with an engine of ours the run fails.

Then they alternate: in a round each trains as many steps as take it about `sizes_milliseconds`, one at least. A
framework whose steps take over `SLOW` times as long as those of the fastest of `PEERS` takes part in every third round
only. Whether
it does is decided again after each round, by the median of its steps so far; and rounds are added until each framework
that is not so slow has been in as many as were asked for. So the fastest framework has been in all of them, even one
that was slow at first.

Start-up is what `build` and the first step take, once the engine is imported and its runtime has started, whose seconds
are counted apart. Memory is the peak from `build`, when the session before was closed, until the steps are steady, over
the level before the first one: what freed memory the process keeps from sizes before counts, and what it took to find
out what their calls cost does not. An engine that can say what the calls of a step cost (`Costed`) is asked for
that, and for what its threads do. Before and after, the machine itself is measured (`roofline`); the best of both gives
the limit of each step, and of the most expensive calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from experiments.measures.task import Assignment, Parts, RunError, Task, Watcher
from experiments.run_arrays import RunArrays
from experiments.slots import rotated
from py_engine.network.trainer import UPDATE

if TYPE_CHECKING:
    from experiments.papers import Paper, Runs
    from experiments.sweep import Job

PEERS = ("torch", "torch-compile", "tensorflow", "tensorflow-xla", "jax")
"""The frameworks of which the fastest is what ours are compared with."""
COMPILED = "torch-compile"
"""The engine that compiles anew for each size of mini-batch, so that it takes part in only one."""
GIVE_UP = 180.0
"""Seconds of building and a first step after which an engine takes no further part."""
MILLISECONDS = 50
"""How long the steps of a round take, where the paper's file says nothing."""
STEPS_MOST = 1000
SLOW, SPARSE = 2.0, 3
"""A framework whose steps take over `SLOW` times the fastest one's takes part in every `SPARSE`-th round only."""
BASE, COMPARED = "torch", 5
"""The engine whose losses the others' are compared with, and of how many steps, which all engines take."""
MOST_DEVIATION = 1e-3
"""By how much a loss may differ from PyTorch's in float32; see `compared`.

Most differences that were measured are 1e-7, the largest 9e-4 (MLP of 4,096 units). But Adam's first steps change every
parameter by about the learning rate, so that a rounded gradient near zero may turn a whole step, and where two places
of a max-pool differ by roundings only the gradient takes another way, which of a single sample may be seen in the loss.
"""
ABOVE_LIMIT, MEASURED_AGAIN = 1.25, 3
"""How many times the machine's highest rate a call may reach: rates of a machine that others use, too, vary by a tenth
and more. Above the highest rate, the machine is measured again, at most `MEASURED_AGAIN` times; above `ABOVE_LIMIT`
an error is raised."""

FACTS = (
    *("first", "start_seconds", "memory_bytes", "import_seconds", "level_bytes"),
    *("kernel", "kernel_share", "kernel_limit_share", "kernels", "rest_share", "threads_in_step", "loss_deviation"),
    "missing",
)
"""What the tidy table has of an engine, a network and a size of mini-batch, beside its rounds."""
_OTHERS = ("kernel", "kernels", "threads_in_step", "missing")
RATES = ("products_flops", "moved_bytes", "flops_per_second", "bytes_per_second")
"""What a limit follows from: the work of a step, and the rates of the machine."""
LIMITS = ("limit_microseconds", "limited_by", *RATES)
KERNELS = 4
"""How many of a step's ops a record names."""


class GaveUpError(RunError):
    """An engine was not ready in time."""


class OtherLossesError(RunError):
    """An engine of ours trains otherwise than PyTorch does."""


def run(given: Assignment) -> Parts:
    """The rounds, what else is known of each engine at each size of mini-batch, and why engines fell out."""
    asked = given.settings
    spec = model_spec.loads(asked["spec"], "the spec")
    rows: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    out: dict[str, str] = {}
    blas: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(RunArrays(generated.drawn_for(spec), given.task.work.folder))
        task = replace(given.task, spec=spec, optimizer=Optimizer(**asked["optimizer"]), work=work, pretrained={})
        tasks = {batch: replace(task, batch_size=batch) for batch in sorted(asked["batches"])}
        works = {batch: roofline.work_of(here) for batch, here in tasks.items()}
        one_of_them = next(iter(works.values()))  # whose parameters are those of all

        def measured() -> roofline.Rates:
            return roofline.measure(one_of_them, task.dtype, given.threads, roofline.SIZES)

        rates = measured()
        workers: dict[str, Worker] = {}
        levels: dict[str, int] = {}
        for batch, here in tasks.items():
            seconds: dict[str, float] = {}
            losses: dict[str, list[float]] = {}
            for name in given.engines:
                if name in failures or (name == COMPILED and batch != asked["compiled"]):
                    continue
                about: dict[str, Any] = {"engine": name, "batch": batch}
                if name in out:
                    facts.append(about | {"missing": out[name]})
                    continue
                try:
                    with failing(name, failures, (GaveUpError, SpecError)):
                        if name not in workers:
                            workers[name] = stack.enter_context(given.slot.start(name, given.threads))
                            about |= {"first": 1, "import_seconds": workers[name].import_seconds}
                        about["start_seconds"], losses[name] = begin(workers[name], here, levels)
                        seconds[name] = warm(workers[name], here, losses[name])
                        about["level_bytes"] = levels[name]
                        about["memory_bytes"] = workers[name].peak_rss() - levels[name]
                        workers[name].pause()
                        facts.append(about)
                except (GaveUpError, SpecError) as error:
                    out[name] = str(error)
                    facts.append(about | {"missing": str(error)})
            ready = {name: losses[name] for name in seconds if name not in failures}
            deviations, others = compared(ready, MOST_DEVIATION)
            for name, reason in others.items():
                if name in roofline.OURS:
                    raise OtherLossesError(f"engine {name} {reason} ({spec.name}, mini-batches of {batch})")
                del seconds[name]
                next(about for about in facts if (about["engine"], about["batch"]) == (name, batch))["missing"] = reason
            rows += all_rounds(workers, seconds, here, asked["rounds"], asked["milliseconds"], failures, given.watcher)
            for about in facts:
                name = about["engine"]
                if about["batch"] == batch and name in deviations:
                    about["loss_deviation"] = deviations[name]
                own = [row for row in rows if (row["engine"], row["batch"]) == (name, batch)]
                # With few rounds a slow framework may have taken part in none.
                if about["batch"] == batch and name in seconds and name not in failures and own:
                    with failing(name, failures):
                        workers[name].resume()
                        blas[name] = workers[name].linear_algebra()
                        # Of the ops and of most updates the least seconds count, so those of the fastest round, too.
                        step = min(row["microseconds_per_step"] for row in own) / 1e6
                        about |= ops_of(workers[name].costs(), step)
                        about["threads_in_step"] = workers[name].threads_in_step() or None
                        workers[name].pause()
            yield {"sizes": rows, "blas": blas, "failures": failures}
    for _ in range(MEASURED_AGAIN):
        rates = rates.best(measured())
        against = [_against(about, rates) for about in facts]
        if all(reached(about, rates) <= 1 for about in facts):
            break
    yield {
        "facts": against,
        "limits": {str(batch): roofline.Limit(work, rates).record() for batch, work in works.items()},
    }
    for about in facts:
        if (share := reached(about, rates)) > ABOVE_LIMIT:
            raise roofline.BelowLimitError(
                f"engine {about['engine']}: {about['ops'][0]['kernel']} in mini-batches of {about['batch']} reaches "
                f"{share:.2f} times the highest rate of this machine: its time, its operations or the machine is "
                "measured wrong; run it again on an idle machine"
            )


def begin(worker: Worker, task: Task, levels: dict[str, int]) -> tuple[float, list[float]]:
    """Build and take a first step: the seconds of both, and its loss.

    Raises GaveUpError after `GIVE_UP` seconds; the worker is ended then.

    `levels` keeps the resident memory of each engine's process before its first `build`.
    """
    worker.resume()
    task.preload(worker)
    worker.close_session()
    worker.reset_peak()
    levels.setdefault(worker.engine.name, worker.peak_rss())
    with giving_up(worker):
        seconds = task.build(worker)
        task.preload(worker)
        # Other rows than those of the steps that follow: of those of one step alone the loss is soon zero.
        losses, more = task.train(worker, task.work.order(task.seed, 2, task.batch_size))
        return seconds + more, losses.tolist()


def compared(losses: Mapping[str, Sequence[float]], most: float) -> tuple[dict[str, float], dict[str, str]]:
    """By how much the losses of each engine's first steps differ from PyTorch's at most, and by which by too much.

    The difference is relative to PyTorch's loss, or to its first one where that is larger: a loss near zero is a
    difference of larger numbers, whose roundings do not become smaller with it. Nothing without PyTorch.

    Args:
        losses: those of the same steps from the same weights.
        most: the difference up to which rounding explains it.

    Returns:
        The largest difference of each engine, and of those that exceed `most` or have a loss that is not finite the
        reason to leave them out.
    """
    found: dict[str, float] = {}
    others: dict[str, str] = {}
    for name, own in losses.items() if losses.get(BASE) else ():
        for step, (loss, expected) in enumerate(zip(own[:COMPARED], losses[BASE], strict=False), start=1):
            deviation = abs(loss - expected) / max(abs(expected), abs(losses[BASE][0]))
            if not deviation <= most:  # nor is NaN
                others[name] = (
                    f"trains otherwise than PyTorch: from the same weights and rows the loss of step {step} is "
                    f"{loss:.8g}, PyTorch's {expected:.8g}, a difference of {deviation:.2g} where {most:g} is explained"
                )
                break
            if name != BASE:
                found[name] = max(found.get(name, 0.0), deviation)
    return {name: largest for name, largest in found.items() if name not in others}, others


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


def all_rounds(
    workers: Mapping[str, Worker],
    seconds: dict[str, float],
    task: Task,
    rounds: int,
    milliseconds: float,
    failures: dict[str, str],
    watcher: Watcher,
) -> list[dict[str, Any]]:
    """As many rounds as were asked for, after one that warms up, and those that a framework lacks which is not so slow.

    `seconds` are those of a step, known from before; they become the medians of the rounds.
    """
    rows: list[dict[str, Any]] = []
    taken: dict[str, list[float]] = {}
    for number in itertools.count():
        found = list(in_round(number, workers, seconds, task, milliseconds, failures, number > rounds))
        if number <= rounds:
            watcher.step()
        if number == 0:
            continue
        rows += found
        for row in found:
            taken.setdefault(row["engine"], []).append(row["microseconds_per_step"] / 1e6)
        seconds |= {name: statistics.median(own) for name, own in taken.items()}
        known = {name: value for name, value in seconds.items() if name not in failures}
        # Each that lacks some takes part in the next round.
        if number >= rounds and all(len(taken.get(name, ())) >= rounds or is_slow(name, known) for name in known):
            break
    return rows


def is_slow(name: str, seconds: Mapping[str, float]) -> bool:
    """Whether an engine is a framework whose steps take so long that it need not be in every round."""
    fastest = min((taken for other, taken in seconds.items() if other in PEERS), default=math.inf)
    return name not in roofline.OURS and seconds[name] > SLOW * fastest


def in_round(
    number: int,
    workers: Mapping[str, Worker],
    seconds: Mapping[str, float],
    task: Task,
    milliseconds: float,
    failures: dict[str, str],
    is_added: bool = False,
) -> Iterator[dict[str, Any]]:
    """Let each engine that takes part in a round train; `seconds` are those of a step, as far as known before.

    In an added round no slow framework takes part.
    """
    known = {name: taken for name, taken in seconds.items() if name not in failures}
    for name in rotated([*known], number):
        if (is_added or number % SPARSE) and is_slow(name, known):
            continue
        steps = max(1, min(STEPS_MOST, round(milliseconds / 1e3 / seconds[name])))
        with failing(name, failures):
            workers[name].resume()
            order = task.work.order(task.seed, number + 1, steps * task.batch_size)
            _, taken = task.train(workers[name], order)
            workers[name].pause()
            step = {"microseconds_per_step": taken / steps * 1e6}
            yield {"engine": name, "batch": task.batch_size, "round": number, **step}


def ops_of(costs: Sequence[tuple[str, str, float, int, int]], step: float) -> dict[str, Any]:
    """What the ops of a step take, the most expensive first, and what is left; nothing without costs.

    An op of a layer counts with all its calls together, and the update as one. `step` is the least that was measured,
    since costs are the least of several repeats. `rest_share` is what neither ops nor the update account for: gathering
    rows, looking for NaN, and what threads wait for. `calls` are the bytes and operations of each call.
    """
    by_op: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for op, layer, seconds, moved, flops in costs:
        by_op.setdefault((op, layer), []).append((seconds, moved, flops))
    if not by_op:
        return {}
    spent = {key: sum(seconds for seconds, *_ in calls) for key, calls in by_op.items()}
    whole = max(step, sum(spent.values()))
    return {
        "rest_share": 1 - sum(spent.values()) / whole,
        "ops": [
            {
                "kernel": f"{op} of {layer}" if layer else op,
                "share": seconds / whole,
                "seconds": seconds,
                "calls": [(moved, flops) for _, moved, flops in by_op[op, layer]],
            }
            for (op, layer), seconds in sorted(spent.items(), key=lambda item: -item[1])
        ],
    }


def _against(about: Mapping[str, Any], rates: roofline.Rates) -> dict[str, Any]:
    """What is known of an engine, with the share of its ops' time that the machine would need for them.

    `kernel` is the op that takes most; `kernels` are the `KERNELS` from which most could be gained.
    """
    if "ops" not in about:
        return dict(about)
    found = {name: value for name, value in about.items() if name != "ops"}
    most, *_ = about["ops"]
    moved, flops = (sum(numbers) for numbers in zip(*most["calls"], strict=True))
    ops = [
        {
            "kernel": op["kernel"],
            "share": op["share"],
            "limit_share": least(op, rates, op["kernel"] == UPDATE) / op["seconds"],
        }
        for op in about["ops"]
    ]
    found |= {"kernel": most["kernel"], "kernel_share": most["share"], "kernel_limit_share": ops[0]["limit_share"]}
    found |= {"kernel_seconds": most["seconds"], "flops": flops, "moved": moved}
    return {**found, "kernels": sorted(ops, key=gain, reverse=True)[:KERNELS]}


def reached(about: Mapping[str, Any], rates: roofline.Rates) -> float:
    """How many times the machine's highest rate the op reaches at least that takes most: as if it worked in place."""
    if "ops" not in about:
        return 0.0
    most, *_ = about["ops"]
    return float(least(most, rates, in_place=True) / most["seconds"])


def least(op: Mapping[str, Any], rates: roofline.Rates, in_place: bool) -> float:
    """The seconds that the machine needs for the calls of an op: of each the longer of two times.

    That of its operations at the highest rate of arithmetic, and that of its bytes at the highest rate of memory of as
    many, or of half as many where it reads and writes in place, as the update does.
    """
    held = 2 if in_place else 1
    return sum(
        max(flops / rates.flops_per_second, moved / rates.bandwidth(moved // held)) for moved, flops in op["calls"]
    )


def gain(op: Mapping[str, Any]) -> float:
    """Which share of a step would be saved if one of its ops were at its limit."""
    return float(op["share"] * max(0.0, 1 - op["limit_share"]))


def as_text(kernels: Sequence[Mapping[str, Any]]) -> str:
    """Ops of a step as one cell of a table; `as_kernels` reads it."""
    return "; ".join(f"{op['kernel']} {op['share']:.4f} {op['limit_share']:.4f}" for op in kernels)


def as_kernels(text: str) -> list[dict[str, Any]]:
    """The ops that `as_text` wrote."""
    found = []
    for part in text.split("; ") if text else ():
        name, share, limit_share = part.rsplit(" ", 2)
        found.append({"kernel": name, "share": float(share), "limit_share": float(limit_share)})
    return found


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
        known["kernels"] = as_text(about["kernels"]) if "kernels" in about else None
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
                **{"engine": "text", "batch": "count", "round": "count", "microseconds_per_step": "positive"},
                # Its tidy rows have these.
                **dict.fromkeys(("family?", "kernel?", "kernels?", "threads_in_step?", "limited_by?"), "text?"),
            }
        ],
        "facts": [
            {
                **{"engine": "text", "batch": "count"},
                **{"kernel?": "text", "threads_in_step?": "text?", "missing?": "text"},
                "kernels?": [{"kernel": "text", "share": "number", "limit_share": "number"}],
                **dict.fromkeys((f"{name}?" for name in FACTS if name not in _OTHERS), "number?"),
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
    later_columns=(
        *("import_seconds", "level_bytes", "threads_in_step", "kernels", "rest_share", "loss_deviation"),
        *RATES,
    ),
)
