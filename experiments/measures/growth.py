"""How time grows: of a training step with the size of its network, and of a gradient with the nodes of its graph.

A series is a network in sizes that differ in one thing. Of each size an engine's step and its start-up are timed, in
one process for all of them: start-up is `build` and the first step less a later one, of each the least, and is where
our engines trace and plan. The machine's limit of the step (`roofline`) is measured, too, once for each size of memory.
All sizes are timed `ROUNDS` times, one after the other, and of each time the least counts: a virtual machine's cores
may be far apart for some seconds, where a step that they share took up to four times as long.

What may explain a time that grows faster than its work is recorded beside it: the seconds of it that collecting garbage
took, and those that the system worked for the thread, such as on memory that is used first; the bytes of memory that
the work needs, and those of the machine's largest cache; of a step what its threads do.

The graph is one sine of ten numbers after another. Timed are the eager gradient, and of our engines also the first call
of the compiled gradient, which traces and plans it, and a later call, which replays it: in numpy and PyTorch by this
file, in a separate process, in Julia by `growth.jl`. The engines' times are of different minutes, of which one may be
slower: so a graph of `PEER_NODES` is also given to numpy and PyTorch alternately.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge import memory, registry
from bridge import spec as model_spec
from bridge.child import import_path
from bridge.errors import EngineUnavailableError, WorkerError
from bridge.libjulia import sysimage
from bridge.libjulia.environment import ENGINE
from bridge.libjulia.find import find
from bridge.session import Optimizer
from bridge.worker import Worker, environment
from experiments import machine, testing
from experiments.data import generated
from experiments.measures import roofline
from experiments.measures.ablation import chunk, warm
from experiments.measures.measure import Measure
from experiments.measures.task import Assignment, Parts, Task
from experiments.run_arrays import RunArrays

if TYPE_CHECKING:
    from experiments.sweep import Job

NODES = "nodes"
"""The series of graphs; the others are called as the paper's file has them."""
ROUNDS, REPEATS = 3, 3
"""How often all sizes of a network are timed, and the chunks of steps, or calls, each time; the fastest counts."""
CHUNK_SECONDS = 0.2
"""How long the steps of a chunk take, of which there is at least one."""
ONCE_SECONDS, CALL_SECONDS = 5.0, 30.0
"""What a call takes, at most, that is repeated, and one that a larger graph follows."""
ELEMENTS = 10
PEER, PEER_NODES, PEER_ROUNDS = "torch", 10_000, 20
"""The engine beside which numpy's eager gradient is timed, the nodes of the graph, and the number of rounds."""
BESIDE_PEER = ("peer_ratio", "peer_low", "peer_high")
"""Fields of that graph's row: the time over the peer's in the same round, the median and its confidence interval."""
ON_REQUEST = "on request"
"""The kind of calls of a process that waits before each for a line of its input."""
FIRST = "first"
"""What is timed of a network beside its step: `build` and the first step."""
EXPLAINING = ("collecting_seconds", "held_bytes", "cache_bytes", "threads_in_step", "system_seconds")
"""Fields of a row that older records lack."""

EAGER = "eager gradient"
"""What is timed of a graph in every engine."""

_START = "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "

Row = dict[str, Any]
Seconds = tuple[float, float, float]
"""What a call took, what of it collecting garbage took, and what the system worked for its thread."""
SHARES = ("collecting_seconds", "system_seconds")
"""The fields of the latter two."""
Timed = Callable[[int], dict[str, Seconds]]
"""Times a graph with a number of nodes: what was timed, and its seconds."""


def run(given: Assignment) -> Parts:
    """All sizes of all series in one worker, then the graphs in a separate process; after each the rows so far."""
    rows: list[Row] = []
    rates: dict[tuple[int, ...], roofline.Rates] = {}  # of the machine, by what they are measured for
    with given.start() as worker:
        for name, series in given.settings["series"].items():
            # What a process does once is no part of the growth: the largest network is built before.
            networks = [*series["specs"].items()]
            fastest: dict[tuple[int, str], Row] = {}
            for number, (value, document) in enumerate((networks[-1], *(ROUNDS * networks))):
                spec = model_spec.loads(document, f"the spec of {name} {value}")
                with RunArrays(generated.drawn_for(spec, 2 * given.settings["batch"]), given.task.work.folder) as work:
                    task = replace(
                        given.task,
                        spec=spec,
                        optimizer=Optimizer(**series["optimizer"]),
                        batch_size=given.settings["batch"],
                        work=work,
                        pretrained={},
                    )
                    if number == 0:
                        task.build(worker)
                        first_step(worker, task)
                        continue
                    for row in of_network(worker, task, given.threads, rates):
                        of = int(value), row["what"]
                        known = fastest.get(of)
                        if known is None or row["seconds"] < known["seconds"]:
                            fastest[of] = {"series": name, "value": int(value), **row}
                given.watcher.step()
                yield {"growth": [*rows, *with_start_up(fastest)]}
            rows += with_start_up(fastest)
        yield given.blas(worker)
    if given.engines[0] in KINDS:
        for row in of_graphs(given.engines[0], given.settings[NODES]):
            beside = beside_peer(PEER_NODES) if is_beside_peer(given.engines[0], row) else {}
            rows.append({"series": NODES, **row, **beside, "cache_bytes": machine.machine().cache_bytes})
        given.watcher.step()
    yield {"growth": rows}


def of_network(worker: Worker, task: Task, threads: int, rates: dict[tuple[int, ...], roofline.Rates]) -> Iterator[Row]:
    """The step of an engine at one size of a network, and `build` with the first one.

    The machine is measured if not in `rates`.
    """
    task.preload(worker)
    worker.close_session()
    system = worker.system_seconds()
    first = task.build(worker)
    before = worker.collecting_seconds(), system  # the former is asked of a session
    first += first_step(worker, task)
    after = worker.collecting_seconds(), worker.system_seconds()
    seconds = warm(worker, task)
    steps = max(1, round(CHUNK_SECONDS / seconds))
    step = min(chunk(worker, task, steps) for _ in range(REPEATS))
    work = roofline.work_of(task)
    if (needed := roofline.memory_sizes(work)) not in rates:
        rates[needed] = roofline.measure(work, task.dtype, threads)
    held = worker.held_bytes()
    known: Row = {} if held is None else {"held_bytes": held, "cache_bytes": machine.machine().cache_bytes}
    limit = {"limit_seconds": roofline.Limit(work, rates[needed]).seconds}
    yield {"what": "step", "seconds": step, **limit, "threads_in_step": worker.threads_in_step() or None, **known}
    for share, start, end in zip(SHARES, before, after, strict=True):
        if start is not None and end is not None:
            known[share] = end - start
    yield {"what": FIRST, "seconds": first, **known}


def with_start_up(fastest: Mapping[tuple[int, str], Row]) -> Iterator[Row]:
    """The rows of steps and of start-ups, from the fastest ones by size and what was timed."""
    for (value, what), row in fastest.items():
        if what != FIRST:
            yield row
            continue
        seconds = max(row["seconds"] - fastest[value, "step"]["seconds"], 0.0)
        yield (
            row
            | {"what": "start-up", "seconds": seconds}
            | {share: min(row[share], seconds) for share in SHARES if share in row}
        )


def first_step(worker: Worker, task: Task) -> float:
    """The seconds of a first step, which traces and plans it in our engines."""
    return task.train(worker, task.work.order(task.seed, 1, task.batch_size))[1]


def of_graphs(engine: str, nodes: Sequence[int]) -> Iterator[Row]:
    """What was timed of an engine's graphs: the rows of a record, without what is the same in all.

    Each kind of calls has a process, since what one has freed may be memory of the next.
    """
    variables = dict(environment(1))
    if engine == "julia":
        path = os.environ.get("JULIA_LOAD_PATH") or os.pathsep.join(("@", "@v#.#", "@stdlib"))
        variables["JULIA_LOAD_PATH"] = f"{ENGINE}{os.pathsep}{path}"
    for kind in KINDS[engine]:
        done = subprocess.run(
            _command(engine, kind, nodes), env=variables, capture_output=True, encoding="utf-8", check=False
        )
        if done.returncode:
            raise _not_timed(engine, done.stderr)
        for line in done.stdout.splitlines():
            what, count, seconds, collecting, system, held = line.split("\t")
            row = {"what": what, "value": int(count), "seconds": float(seconds)}
            shares = dict(zip(SHARES, (float(collecting), float(system)), strict=True))
            yield row | shares | ({"held_bytes": int(held)} if held else {})


def is_beside_peer(engine: str, row: Row) -> bool:
    """Whether what was timed has the peer's time as its target, and the peer is there."""
    asked = (engine, row["what"], row["value"]) == ("numpy", EAGER, PEER_NODES)
    return asked and registry.get(PEER).availability().ok


def beside_peer(nodes: int) -> Row:
    """How long numpy's eager gradient of a graph takes beside the peer's: both are called alternately."""
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(on_request(engine, nodes)) for engine in ("numpy", PEER))
        ratios = [ours() / theirs() for _ in range(PEER_ROUNDS)]
    low, high = testing.of_median(ratios) or (min(ratios), max(ratios))
    return dict(zip(BESIDE_PEER, (statistics.median(ratios), low, high), strict=True))


@contextmanager
def on_request(engine: str, nodes: int) -> Iterator[Callable[[], float]]:
    """A process whose eager gradient of a graph can be timed: the call that does so, and returns its seconds."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as said,
        subprocess.Popen(
            _command(engine, ON_REQUEST, [nodes]),
            env=dict(environment(1)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            encoding="utf-8",
        ) as process,
    ):

        def timed() -> float:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):  # of a process that has ended there is no answer
                process.stdin.write("\n")
                process.stdin.flush()
            if not (line := process.stdout.readline()):
                said.seek(0)
                raise _not_timed(engine, said.read())
            return float(line)

        try:
            yield timed
        finally:
            process.kill()  # it waits for the next request
            with suppress(OSError):  # what could not be written
                assert process.stdin is not None
                process.stdin.close()


def _not_timed(engine: str, said: str) -> WorkerError:
    last = (said.strip().splitlines() or ["nothing"])[-1][-500:]
    return WorkerError(f"engine {engine}: its graphs can't be timed; its process last said: {last}")


def _command(engine: str, kind: str, nodes: Sequence[int]) -> list[str]:
    """The program that times a kind of calls."""
    if engine == "julia":
        script = str(Path(__file__).with_name("growth.jl"))
        words = (kind, REPEATS, ONCE_SECONDS, CALL_SECONDS, ELEMENTS, *nodes)
        julia = find()
        return [julia.executable, "--startup-file=no", *sysimage.options(julia), script, *map(str, words)]
    code = _START + "from experiments.measures.growth import main; main(start)"
    start = {"path": import_path(), "engine": engine, "kind": kind, NODES: list(nodes)}
    return [sys.executable, "-c", code, json.dumps(start)]


def main(start: Mapping[str, Any]) -> None:
    """Time an engine's graphs in a separate process, and print what was found, as `growth.jl` does."""
    kinds = IN_PYTHON[start["engine"]]()
    if start["kind"] == ON_REQUEST:
        for _ in sys.stdin:
            print(*(seconds for seconds, *_ in kinds["eager"](start[NODES][0]).values()), flush=True)
        return
    timed = kinds[start["kind"]]
    timed(1)
    before = _peak()
    for count in start[NODES]:
        _peak()
        found = timed(count)
        held = "" if before is None else max(memory.peak_rss() - before, 0)
        for what, seconds in found.items():
            print(what, count, *seconds, held, sep="\t", flush=True)
        if max(found.values())[0] > CALL_SECONDS:
            break


def _peak() -> int | None:
    """The bytes that are resident now, from where on the peak is kept anew; None where the system does not say."""
    try:
        memory.reset_peak()
        return memory.peak_rss()
    except EngineUnavailableError:
        return None


def _of_numpy() -> dict[str, Timed]:
    import py_engine as pe

    x = np.linspace(0.1, 1.0, ELEMENTS)

    def gradient(count: int) -> Any:
        def chain(x: Any) -> Any:
            for _ in range(count):
                x = np.sin(x)
            return x.sum()

        return pe.grad(chain)

    def eager(count: int) -> dict[str, Seconds]:
        return {EAGER: _least(gradient(count), x)}

    def compiled(count: int) -> dict[str, Seconds]:
        function = gradient(count)
        kept: list[Any] = []

        def first(x: Any) -> None:
            kept[:] = [pe.compile(function)]
            kept[0](x)

        seconds = _least(first, x)
        return {"first call, compiled": seconds, "later call, compiled": _least(kept[0], x)}

    return {"eager": eager, "compiled": compiled}


def _of_torch() -> dict[str, Timed]:
    import torch

    x = torch.linspace(0.1, 1.0, ELEMENTS, dtype=torch.float64, requires_grad=True)

    def eager(count: int) -> dict[str, Seconds]:
        def gradient(x: Any) -> Any:
            y = x
            for _ in range(count):
                y = torch.sin(y)
            return torch.autograd.grad(y.sum(), x)

        return {EAGER: _least(gradient, x)}

    return {"eager": eager}


IN_PYTHON: Mapping[str, Callable[[], dict[str, Timed]]] = {"numpy": _of_numpy, "torch": _of_torch}
"""Engines that are asked in Python, and what of theirs is timed, by kind."""
KINDS = {"numpy": ("eager", "compiled"), "julia": ("eager", "compiled"), "torch": ("eager",)}
"""The kinds of calls of graphs that are timed."""


def _least(call: Callable[[Any], Any], x: Any) -> Seconds:
    """The least seconds of a few calls."""
    best = (float("inf"), 0.0, 0.0)
    for _ in range(REPEATS):
        collecting, system = memory.collecting_seconds(), memory.system_seconds() or 0.0
        start = time.perf_counter()
        call(x)
        taken = time.perf_counter() - start
        shares = memory.collecting_seconds() - collecting, (memory.system_seconds() or 0.0) - system
        best = min(best, (taken, *shares))
        if taken > ONCE_SECONDS:
            break
    return best


def _settings(job: Job) -> Row:
    """The networks by value, in all their sizes; and the versions of the engine that is measured beside this one."""
    beside = any(engine == "numpy" for engine in job.engines)
    return {
        **({"peer": dict(registry.get(PEER).availability().versions)} if beside else {}),
        "series": {
            series.id: {
                "optimizer": dataclasses.asdict(Optimizer(series.optimizer, series.learning_rate)),
                "specs": {size: job.paper.sized(series, size).dump() for size in series.sizes},
            }
            for series in job.paper.series
        },
        "batch": job.option("growth_batch"),
        NODES: job.option("growth_nodes"),
    }


def _unusable(option: Callable[[str], Any]) -> str:
    needs = ("growth_engines", "growth_batch", "growth_nodes")
    if "growth" in option("measures") and (absent := [name for name in needs if not option(name)]):
        return f"the measure growth needs {', '.join(absent)}"
    return ""


MEASURE = Measure(
    name="growth",
    place=10,
    title="growth: step and start-up over the size of a network, and gradients over nodes",
    about="time over the length, width and vocabulary of networks, and over the nodes of a graph",
    words="growth",
    run=run,
    form={
        "growth": [
            {
                **{"series": "text", "value": "count", "what": "text", "seconds": "number"},
                **dict.fromkeys(("limit_seconds?", "collecting_seconds?", "system_seconds?"), "number"),
                **dict.fromkeys((f"{name}?" for name in BESIDE_PEER), "positive"),
                **dict.fromkeys(("held_bytes?", "cache_bytes?"), "count"),
                "threads_in_step?": "text?",
            },
        ]
    },
    files=("experiments/measures/growth.jl", "experiments/measures/roofline.jl"),
    plan="engines",
    options={"growth_engines?": "engines", "growth_batch?": "count", "growth_nodes?": "counts"},
    check=_unusable,
    engines="growth_engines",
    only_listed=True,
    settings=_settings,
    steps=lambda job: ROUNDS * sum(len(series.sizes) for series in job.paper.series) + 1,
    columns=(
        *("key", "paper", "engine", "label", "threads", "profile", "series", "value", "what", "seconds"),
        *("limit_seconds", *EXPLAINING, *BESIDE_PEER, "data_source", "cpu_model", "machine", "commit", "created"),
    ),
    later=True,
    later_columns=(*EXPLAINING, *BESIDE_PEER),
    summary=("series", "value", "what", "seconds"),
)
