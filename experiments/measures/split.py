"""Whether threads pay: a step with all threads beside one with one thread, in two processes that alternate.

A run is of one network. For each size of mini-batch an engine builds it in a process with all threads and in one with a
single thread, and trains in both until its steps are steady and it has chosen how to use its threads. Then the two take
turns: in a round each trains as many steps as take it about `MILLISECONDS`, the one that begins changing from round to
round, while the other is stopped. So the machine's drift is in both, and their ratio in each round is what threads
bring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge import spec as model_spec
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments.data import generated
from experiments.measures import sizes
from experiments.measures.ablation import warm
from experiments.measures.measure import Measure
from experiments.measures.race import failing
from experiments.measures.task import Assignment, Parts, Task
from experiments.run_arrays import RunArrays

if TYPE_CHECKING:
    from experiments.sweep import Job

MILLISECONDS = 50
"""How long the steps of a round take in each of the two processes."""

Row = dict[str, Any]


def run(given: Assignment) -> Parts:
    """The rounds of each engine and size of mini-batch, and why engines fell out."""
    asked = given.settings
    spec = model_spec.loads(asked["spec"], "the spec")
    rows: list[Row] = []
    failures: dict[str, str] = {}
    blas: dict[str, str] = {}
    with RunArrays(generated.drawn_for(spec), given.task.work.folder) as work:
        task = replace(given.task, spec=spec, optimizer=Optimizer(**asked["optimizer"]), work=work, pretrained={})
        for name in given.engines:
            with failing(name, failures), contextlib.ExitStack() as stack:
                workers = [stack.enter_context(given.slot.start(name, count)) for count in (given.threads, 1)]
                for batch in sorted(asked["batches"]):
                    for row in rounds_of(workers, replace(task, batch_size=batch), asked["rounds"]):
                        rows.append({"engine": name, "batch": batch, **row})
                    given.watcher.step()
                    yield {"split": rows, "blas": blas, "failures": failures}
                blas[name] = workers[0].linear_algebra()
    yield {"split": [row for row in rows if row["engine"] not in failures], "blas": blas, "failures": failures}


def rounds_of(workers: list[Worker], task: Task, rounds: int) -> Iterator[Row]:
    """The steps of each round with all threads and with one, in the two workers, after a round that warms up."""
    seconds: list[float] = []
    use = ""
    for worker in workers:
        worker.resume()
        task.preload(worker)
        task.build(worker)
        task.preload(worker)
        seconds.append(warm(worker, task))
        use = worker.threads_in_step() if worker is workers[0] else use
        worker.pause()
    for number in range(rounds + 1):
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            steps = max(1, min(sizes.STEPS_MOST, round(MILLISECONDS / 1e3 / seconds[place])))
            order = task.work.order(task.seed, number + 1, steps * task.batch_size)
            workers[place].resume()
            _, spent = task.train(workers[place], order)
            workers[place].pause()
            seconds[place] = spent / steps
        if number:
            several, one = (value * 1e6 for value in seconds)
            steps_of = {"microseconds_per_step": several, "one_thread_microseconds": one}
            yield {"round": number, **steps_of, "threads_in_step": use or None}
    for worker in workers:
        worker.resume()


def _settings(job: Job) -> Row:
    """The network and how it is trained, by value."""
    return {**sizes.network_settings(job), "batches": job.option("sizes_batches"), "rounds": job.rounds}


def rows_of(record: Mapping[str, Any]) -> Iterator[Row]:
    """The tidy rows of a record."""
    network, entrants = {name: record["config"].get(name) for name in ("family", "size")}, record["entrants"]
    for row in record.get("split", ()):
        yield {**network, "label": entrants.get(row["engine"], {}).get("label"), **row}


def _unusable(option: Callable[[str], Any]) -> str:
    needs = ("split_engines", "split_rounds", "split_threads", "sizes_batches")
    if "split" in option("measures") and (absent := [name for name in needs if not option(name)]):
        return f"the measure split needs {', '.join(absent)}"
    return ""


MEASURE = Measure(
    name="split",
    place=12,
    title="threads: a step with all of them beside one with one thread",
    about="a step with all threads beside one with one thread, of networks of several sizes",
    words="threads beside one",
    run=run,
    form={
        "split": [
            {
                **{"engine": "text", "batch": "count", "round": "count", "family?": "text?"},
                **{"microseconds_per_step": "positive", "one_thread_microseconds": "positive"},
                "threads_in_step?": "text?",
            }
        ]
    },
    plan="together",
    networks=sizes.networks,
    options={"split_engines?": "engines", "split_rounds?": "rounds", "split_threads?": "threads list"},
    check=_unusable,
    engines="split_engines",
    only_listed=True,
    threads="split_threads",
    rounds="split_rounds",
    settings=_settings,
    steps=lambda job: len(job.engines) * len(job.option("sizes_batches")),
    columns=(
        *("key", "paper", "engine", "label", "threads", "profile", "family", "size", "batch", "round"),
        *("microseconds_per_step", "one_thread_microseconds", "threads_in_step", "data_source", "cpu_model", "machine"),
        *("commit", "created"),
    ),
    records=rows_of,
    later=True,
    summary=("family", "size", "batch", "microseconds_per_step", "one_thread_microseconds"),
)
