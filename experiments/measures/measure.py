"""What a measure is: one record, in its own file beside this one.

A file `experiments/measures/<any>.py` with `MEASURE = Measure(...)` is all that a measure takes: papers and commands
know its name and its keys under `[runs]`, sweeps plan and run it, and its rows get a tidy table and lines in the
terminal. All that the file imports decides the keys of its results, so it imports nothing that only shows something
(`progress`, `report`, `cli`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from experiments.measures.task import Task
    from experiments.papers import Paper, Runs
    from experiments.sweep import Job

Form = Any
"""What a part of a record must hold; see `experiments.records`."""

Row = dict[str, Any]

EPOCH: Mapping[str, Form] = {
    "epoch": "count",
    "seconds?": "number?",
    "seconds_with_evaluation?": "number?",
    **{f"{part}_loss?": "loss?" for part in ("train", "test")},
    **{f"{part}_accuracy?": "number?" for part in ("train", "test")},
    "bytes_allocated?": "number?",
}
"""The row of an epoch, in the part `epochs` of a record."""


@dataclass(frozen=True)
class Measure:
    """One thing that is measured of engines: what it is called, when it is run, how, and what comes of it."""

    name: str
    """As papers, commands and results call it."""
    place: int
    """Its place among the others, in `reproduce` and in lists."""
    title: str
    """Its heading in `reproduce`."""
    about: str
    """What `--help` says of it."""
    words: str
    """What reports call it."""
    run: Callable[..., Any]
    """Given an `Assignment`, it yields the parts of a record, each as soon as it is made."""
    form: Mapping[str, Form]
    """The parts that the record of a run that succeeded holds, with their forms; "?": older ones may lack it."""

    files: tuple[str, ...] = ()
    """Files that decide its results beside what its module imports."""
    timed: bool = True
    """Whether times count. If not, it runs with one thread unless told otherwise, and beside other runs."""
    plan: Literal["seeds", "engines", "together", "suites"] = "seeds"
    """A run for each seed and engine, for each engine, or for all engines together and each number of threads;
    "suites": see `experiments.microbenchmarks.sweep`."""
    networks: Callable[[Paper, Runs], Sequence[str]] = lambda paper, runs: ("",)
    """Unless planned by seeds: the networks that have a run each, by the names that its `settings` know."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Its keys under `[runs.<profile>]` of a paper, with their kinds (`experiments.papers.KINDS`); "?": optional."""
    check: Callable[[Callable[[str], Any]], str] = lambda option: ""
    """What is wrong with the values of its options, in words."""
    engines: str = ""
    """The option that lists its engines; without one it is for all of them."""
    only_listed: bool = False
    """Whether it is for none without that list."""
    fixed_engines: bool = False
    """Whether engines beyond the list cannot be asked for."""
    seeds: tuple[str, ...] = ("seeds",)
    """The options that limit its seeds. A number that the user asks for replaces the first."""
    threads: str = ""
    """The option with its number of threads, or numbers."""
    epochs: str = ""
    """The option with its number of epochs; without one it is that of all trainings."""
    rows: str = ""
    """The option with its training rows per epoch; without one they are all."""
    rounds: str = ""
    """The option with its number of rounds."""
    native: bool = False
    """Whether engines train from their own initialisation, in what the paper says to be their own way (`[own]`)."""
    models: Callable[[Job], Mapping[str, str]] = lambda job: {}
    """Other networks that it is given, as models by name."""
    settings: Callable[[Job], Row] = lambda job: {}
    """What decides its results beside the training, by value: it is in the record's hashes."""
    config: Callable[[Job, Task], Row] = lambda job, task: {}
    """What the record's `config` says beside that."""
    steps: Callable[[Job], int] = lambda job: job.epochs
    """How many steps of progress a run has."""

    columns: tuple[str, ...] = ()
    """The columns of its own tidy table; without any, what it measures of epochs is in those of all trainings."""
    records: Callable[[Row], Iterable[Row]] | None = None
    """The rows of that table from a record; by default the part that is called as the measure."""
    later: bool = False
    """Whether results of older releases lack its tidy table."""
    later_columns: tuple[str, ...] = ()
    """The columns that it lacks in those of older releases."""
    summary: tuple[str, ...] = ()
    """What the terminal shows of it: quantities of its runs (`experiments.quantities`), or columns of its table."""

    def table(self, record: Row) -> Iterable[Row]:
        """The rows of its tidy table from a record."""
        if not self.columns:
            return ()
        found: Iterable[Row] = record.get(self.name, ()) if self.records is None else self.records(record)
        return found
