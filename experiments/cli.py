"""The command `twingrad`: every step from raw data to the finished paper, and training and prediction by hand.

A user's mistake ends with `error: ...` and code 2, a failed run with code 1, ctrl-C with 130; none shows a
traceback. Heavy packages are imported by the commands that need them, so that `--help` is quick and works
without the extras.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem, get_completion_class

from bridge.errors import TwinGradError, printable, shown
from bridge.schedule import SCHEDULES
from bridge.session import OPTIMIZERS
from experiments import provenance
from experiments.extras import remedy
from experiments.formats import counted, duration, fixed, share, significant, size
from experiments.measures.registry import MEASURES
from experiments.output import STDOUT, Output, OutputError, check_apart
from experiments.papers import (
    LARGEST_SEED,
    MOST_EPOCHS,
    MOST_ROUNDS,
    MOST_ROWS,
    MOST_SEEDS,
    MOST_THREADS,
    PROFILES,
    Paper,
    ProfileName,
    load_paper,
    models,
    paper_keys,
)
from experiments.progress import Progress, Stages, download, table
from py_engine.errors import EngineError, NonFiniteError

if TYPE_CHECKING:
    from experiments.comparison import Comparison
    from experiments.results import Results
    from experiments.sweep import Job, Outcome, Sweep

COMMAND = "twingrad"
USER_ERROR, RUN_FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
LONGEST_LINE = 2_000
"""Characters of a line of an error that are shown."""
COMMITTED_RESULTS = Path("paper/results")


class Terminated(BaseException):
    """Another process asked this one to end (SIGTERM): clean up as after ctrl-C."""


# -----------------------------------------------------------------------------------------------------------
# What commands have in common


def reporting(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an `Output` and the option `--json`; whatever happens, what there is gets written."""

    @click.option("--json", "json_file", metavar="FILE", help="Also write everything as JSON to FILE ('-': stdout).")
    @functools.wraps(function)
    def command(json_file: str | None, **options: Any) -> None:
        context = click.get_current_context()
        if json_file not in (None, STDOUT):
            for param in context.command.params:
                option = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
                for path in _paths(options.get(str(param.name))):
                    check_apart({option: path, "--json": json_file}, {}, OutputError)
        output = Output(str(context.info_name), json_file)
        try:
            function(output, **options)
        except click.exceptions.Exit:
            raise
        except BaseException as error:
            stopped = isinstance(error, (KeyboardInterrupt, Terminated))
            output.errors.append("interrupted" if stopped else _message(error))
            try:
                output.write()
            except TwinGradError as unwritten:  # what stopped the command is said after it
                _complain(str(unwritten))
            raise
        output.write()
        if output.failed:
            raise click.exceptions.Exit(RUN_FAILED)

    return command


def _paths(value: Any) -> list[Path | str]:
    """The files among the values of a parameter: also one that is still to be made, where they can be nothing else.

    Of a folder of data those that may be mapped.
    """
    found: list[Path | str] = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, Path) or (isinstance(item, str) and os.path.isfile(item)):
            found.append(item)
        elif isinstance(item, str) and os.path.isdir(item) and os.access(item, os.R_OK):
            found += (place.path for place in os.scandir(item) if place.name.endswith((".npy", ".arrow")))
    return found


class Names(click.ParamType):
    """Names between commas."""

    name = "A,B"  # as `--help` shows it

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The names in order; empty ones and repetitions are refused."""
        names = value if isinstance(value, list) else [name.strip() for name in value.split(",")]
        if not all(names):
            self.fail(f"{value!r} has an empty name in it", param, ctx)
        if len(set(names)) < len(names):
            self.fail(f"{value!r} names something twice", param, ctx)
        return names


def completing(*lists: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """What a shell offers for a word: names out of lists, also after a comma, and files where none of them fits."""

    def complete(_context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        before, comma, last = begun.rpartition(",")
        names = [name for names in lists for name in names() if name.startswith(last)]
        found = [CompletionItem(before + comma + name) for name in names]
        return found or [CompletionItem(begun, type="file")]

    return complete


def _engines() -> list[str]:
    from bridge import registry

    return registry.names()


def _systems() -> list[str]:
    from experiments.microbenchmarks.registry import SYSTEMS

    return list(SYSTEMS)


def _data_sets() -> list[str]:
    from experiments import data

    return sorted(data.LOADERS)


class Seeds(click.ParamType):
    """A number of seeds, or seeds between commas."""

    name = "N|A,B"  # as `--help` shows it

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The seeds, each once."""
        if isinstance(value, tuple):
            return value
        seeds = Whole(0, MOST_SEEDS - 1)
        if "," not in value:
            return tuple(range(Whole(1, MOST_SEEDS).convert(value, param, ctx)))
        found = [seeds.convert(part.strip(), param, ctx) for part in value.removesuffix(",").split(",")]
        return tuple(dict.fromkeys(found))


class Whole(click.IntRange):
    """A whole number in a stated range, which `--help` shows; what is none is repeated in a message, but shortened."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(min=least, max=most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        with contextlib.suppress(ValueError):  # also of more digits than Python reads
            number = int(value)
            if int(self.min or 0) <= number <= int(self.max or 0):
                return number
        self.fail(f"{shown(value)} is not a whole number from {self.min} to {self.max:,}", param, ctx)


def _paper(name: str) -> Paper:
    """A paper, checked in full: one of the user's own also for tables and figures that nothing produces.

    A test does so for the others. Without what reports need, nothing can be reported either.
    """
    found = load_paper(name)
    if not found.comes_along:
        with contextlib.suppress(ImportError):
            from experiments import report

            found.check_producers(report.row_helpers.PRODUCERS, report.figures.PRODUCERS)
    return found


def option_results(default: str | None = "results") -> Callable[..., Any]:
    """The option `--results`."""
    return click.option(
        "--results",
        "results_dir",
        metavar="DIR",
        type=click.Path(path_type=Path),
        default=default,
        show_default=default is not None,
        help="Results folder.",
    )


option_data = click.option(
    "--data-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of the data sets (default: TWINGRAD_DATA, then the user cache, then a download, else the embedded "
    "sample).",
)
option_profile = click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="full",
    show_default=True,
    help="full: the seeds and measures of the paper file; quick: few seeds, to see that everything works; sample: the "
    "least, which `reproduce` always takes on the embedded sample.",
)
option_engines = click.option(
    "--engines",
    type=Names(),
    shell_complete=completing(_engines),
    help="Engines to use (default: all that the paper file names).",
)
option_threads = click.option(
    "--threads",
    type=Whole(1, MOST_THREADS),
    help="Threads of an engine, at most the cores (default: the paper file's; in train and predict 2, or the cores if "
    "there are fewer).",
)

option_dask = click.option(
    "--dask",
    metavar="ADDRESS",
    help="Have the workers of a Dask cluster do the runs; ADDRESS is its scheduler's.",
)


def examples(*lines: str) -> str:
    """The end of a help text."""
    return "\b\nExamples:\n" + "\n".join(f"  {COMMAND} {line}" for line in lines)


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "reproduce                      everything, into results/",
        "reproduce --profile quick      the same with few seeds",
        "race mnist-rnn-e --engines numpy,torch --rounds 5",
        "train mnist-rnn --data mnist --epochs 3 --save weights.safetensors",
        "doctor                         when something does not work",
    ),
)
@click.version_option(provenance.versions(["twingrad"]).get("twingrad", "(not installed)"), prog_name=COMMAND)
@click.pass_context
def cli(context: click.Context) -> None:
    """Regenerate the tables and figures of studies of automatic differentiation, and measure engines.

    Every command explains itself with --help. With --json FILE all but gradbench and completion write their output as
    JSON, too.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# -----------------------------------------------------------------------------------------------------------
# Looking around


@cli.command(
    "list", short_help="Show the papers, engines, models and data sets.", epilog=examples("list", "list --json -")
)
@reporting
def list_(output: Output) -> None:
    """Show the papers, engines, models and data sets there are."""
    from bridge import registry
    from experiments import data

    rows = []
    for key in paper_keys():
        paper = _paper(key)
        rows.append([key, paper.model, paper.dataset, paper.title])
        output.add([{"kind": "paper", "name": key, "model": paper.model, "title": paper.title}])
    table(output.console, ["PAPER", "MODEL", "DATA", "TITLE"], rows, numbers=4)
    rows = []
    for name in registry.names():
        label, found = registry.get(name).label, registry.availability(name)
        versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
        rows.append([name, label, *(("yes", versions) if found.ok else ("no", found.reason))])
        about = {"available": found.ok, "reason": found.reason, "versions": found.versions}
        output.add([{"kind": "engine", "name": name, "label": label, **about}])
    output.say()
    table(output.console, ["ENGINE", "LABEL", "AVAILABLE", "VERSION OR REASON"], rows, numbers=4)
    output.say()
    files = {name: str(path) for name, path in models().items()}
    table(output.console, ["MODEL", "FILE"], list(files.items()), numbers=2)
    output.add({"kind": "model", "name": name, "file": path} for name, path in files.items())
    output.say()
    table(output.console, ["DATA"], [[name] for name in sorted(data.LOADERS)])
    output.add({"kind": "data", "name": name} for name in sorted(data.LOADERS))


@cli.command(
    short_help="Look at this machine: what is there and what is missing.",
    epilog=examples("doctor", "doctor --data-dir /data"),
)
@option_results()
@option_data
@reporting
def doctor(output: Output, results_dir: Path, data_dir: Path | None) -> None:
    """Look at this machine: what is there, what is missing, and what to do about it.

    Ends with code 0 unless something essential is broken. Changes and downloads nothing.
    """
    from experiments import doctor

    findings = doctor.examine(output.console, results_dir, data_dir)
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    rows = [[marks[item.state], item.name, item.found] for item in findings]
    table(output.console, ["", "", ""], rows, numbers=3)
    advice: dict[str, list[str]] = {}  # each once, with all that it is about
    for item in findings:
        if item.advice:
            advice.setdefault(item.advice, []).append(item.name)
    if advice:
        output.say()
    for text, names in advice.items():
        output.say(f"{', '.join(names)}: {text}")
    output.add(vars(item) for item in findings)
    problems = [item for item in findings if item.state == "problem"]
    for item in problems:
        output.fail(f"{item.name}: {item.found}; {item.advice}")
    output.say()
    output.say(counted(len(problems), "problem") if problems else "Everything essential is there.")


# -----------------------------------------------------------------------------------------------------------
# Runs and measurements


@cli.command(
    short_help="Train the networks of papers with each engine, and measure.",
    epilog="\n".join(["\b", "Measures:", *(f"  {name:<16}{one.about}" for name, one in MEASURES.items()), "\n"])
    + examples(
        "run mnist-cnn",
        "run mnist-rnn-d mnist-rnn-e --engines numpy,torch --seeds 2",
        "run imdb-cnn-a --measure time,memory --profile quick --results /tmp/results",
        "run imdb-cnn-a --measure ablation --engines numpy",
        "run mnist-rnn-e --seeds 3,5 --set training.learning_rate=0.05 --results faster",
        "run mnist-rnn-d mnist-rnn-e --shard 2/5 --results /shared/results",
    ),
)
@click.argument("papers", nargs=-1, required=True, metavar="PAPER...", shell_complete=completing(paper_keys))
@option_engines
@click.option(
    "--seeds", type=Seeds(), help="Number of seeds, from 0, or these seeds: 3,5 (default: the paper file's number)."
)
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="Another value than the paper file's, such as training.learning_rate=0.1, with a separate --results folder.",
)
@option_profile
@option_threads
@click.option(
    "--measure",
    "measures",
    type=Names(),
    shell_complete=completing(lambda: MEASURES),
    help="Which measures, see below (default: the paper file's).",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Only this part of the runs, of N that take about equally long: each machine of a sweep has another I.",
)
@click.option(
    "--costs",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="What runs cost, as shards are cut; the same file on every machine (default: TwinGrad's own).",
)
@click.option(
    "--shared",
    is_flag=True,
    help="Work at the runs of the results folder together with other processes and machines (--shard does, too).",
)
@option_dask
@option_results()
@option_data
@reporting
def run(
    output: Output,
    papers: tuple[str, ...],
    engines: list[str] | None,
    seeds: tuple[int, ...] | None,
    settings: tuple[str, ...],
    profile: ProfileName,
    threads: int | None,
    measures: list[str] | None,
    shard: str | None,
    costs: Path | None,
    shared: bool,
    dask: str | None,
    results_dir: Path,
    data_dir: Path | None,
) -> None:
    """Train the networks of papers with each engine, and measure.

    Each (paper, engine, seed) runs in a fresh process; time and memory are separate runs. A run that is in
    the results folder already is not repeated: run an interrupted command again to resume it.

    A sweep is spread over machines by --shard, with the same command on each; their folders are put together by
    `twingrad merge`. Where all reach one folder they may write to it at the same time, with --shard or --shared: a run
    is done by one of them, runs of one that is killed are taken over, and processes of one machine alternate.
    """
    from experiments import changed, shards
    from experiments import sweep as sweeps
    from experiments.results import Results

    part = None if shard is None else shards.Shard.parse(shard)
    if costs is not None and part is None:
        raise click.UsageError("--costs says how shards are cut: give --shard, too")
    if dask is not None and (shared or part is not None):
        raise click.UsageError("--dask spreads the runs by itself: give it without --shard and --shared")

    jobs = []
    for name in papers:
        chosen = changed.changed(_paper(name), settings)
        most = max(seeds) + 1 if seeds else None
        if chosen.runs_of_paper:
            output.say(f"{name}: {_of_another(chosen)}")
        jobs += sweeps.plan(chosen, profile, engines, most, measures, threads, everywhere=part is not None)
    if seeds:
        seeded = {job.measure for job in jobs if job.seed}
        jobs = [job for job in jobs if job.seed in seeds or job.measure not in seeded]
    if part is not None:
        every, known = len(jobs), shards.read_costs(costs or shards.COSTS)
        jobs = shards.cut(jobs, part, known)
        spent = duration(sum(shards.cost(job, known) for job in jobs))
        output.say(f"shard {part}: {len(jobs)} of {every} runs, by the costs about {spent}")
    changed.note(results_dir, settings)
    results = Results(results_dir)
    with contextlib.ExitStack() as stack:
        leases = None
        if shared or part is not None:
            leases = stack.enter_context(results.shared(output.say))
        else:
            stack.enter_context(results.locked(output.say))
        _tell_older(output, results)
        with _progress(output, results, len(jobs)) as progress:
            sweep = sweeps.Sweep(results, data_dir, download(output.console), leases)
            outcome = sweep.run(jobs, progress) if dask is None else _by_cluster(dask, sweep, jobs, progress)
        results.write_tidy(leases=leases)
    _show(output, outcome)


def _of_another(paper: Paper) -> str:
    """Why a paper has fewer runs than others: they are another paper's."""
    return f"its networks are those of {paper.runs_of_paper}, whose runs it shows; run {paper.runs_of_paper}"


def _by_cluster(address: str, sweep: Sweep, jobs: Sequence[Job], progress: Progress) -> Outcome:
    from experiments import cluster

    return cluster.run(address, sweep, jobs, progress)


@cli.command(
    short_help="Let engines train alternately, and compare their steps.",
    epilog=examples(
        "race mnist-cnn-batch100", "race imdb-cnn-a --engines numpy,julia,torch,jax --rounds 5 --threads 2 --base jax"
    ),
)
@click.argument("paper", shell_complete=completing(paper_keys))
@option_engines
@click.option(
    "--rounds",
    type=Whole(1, MOST_ROUNDS),
    help="Rounds that count, after one that does not (default: the paper file's).",
)
@option_threads
@click.option("--base", help="Engine that the others are compared with (default: torch, else the first).")
@option_profile
@option_results()
@option_data
@reporting
def race(
    output: Output,
    paper: str,
    engines: list[str] | None,
    rounds: int | None,
    threads: int | None,
    base: str | None,
    profile: ProfileName,
    results_dir: Path,
    data_dir: Path | None,
) -> None:
    """Let engines train alternately, so that machine drift affects all equally, and compare their steps.

    Every engine keeps one process for the whole race; the idle ones are stopped. A round is one epoch of
    each engine, or the part of one that the paper file names, in an order that rotates. Ratios are taken
    within a round. Of the numbers of threads that the paper file has for races, this one has the first;
    --threads names another.
    """
    from experiments import changed
    from experiments import sweep as sweeps
    from experiments.measures import race
    from experiments.results import Results

    chosen = _paper(paper)
    jobs = sweeps.plan(chosen, profile, engines, None, ["race"], threads, rounds)[:1]
    if not jobs:
        raise click.UsageError(f"{paper} has no race: {_of_another(chosen)}")
    names = jobs[0].engines
    if base is not None and base not in names:
        raise click.UsageError(f"--base {base}: not among the engines of this race ({', '.join(names)})")
    changed.note(results_dir, ())
    results = Results(results_dir)
    with results.locked(output.say):
        _tell_older(output, results)
        with _progress(output, results, len(jobs)) as progress:
            outcome = sweeps.Sweep(results, data_dir, download(output.console)).run(jobs, progress, again=True)
        results.write_tidy()
    for record in outcome.records:
        if not record.get("race"):
            continue
        standings = race.standings(race.with_limits(record), base)
        output.add({**row, "threads": record["config"]["threads"]} for row in standings)
        _show_race(output, record, standings)
    _show_failures(output, outcome)


def _tell_older(output: Output, results: Results) -> None:
    """Say in one line that records of an older schema count for nothing here."""
    if count := results.older():
        output.say(
            f"{results.raw}: {counted(count, 'record')} of an older schema: run anew; "
            "the old files stay as they are, and are no longer shown"
        )


@contextlib.contextmanager
def _progress(output: Output, results: Results, count: int) -> Iterator[Progress]:
    """Show the progress of runs; after ctrl-C say what is kept."""
    progress = Progress(output.console, count)
    try:
        with progress.show():
            yield progress
    except (KeyboardInterrupt, Terminated):
        output.say()
        output.say(
            f"interrupted: {progress.done} of {count} runs are finished and kept in {results.raw}; "
            "run the same command again to resume it"
        )
        raise


def _show(output: Output, outcome: Outcome) -> None:
    """The runs of a sweep as tables, and for programs one row each."""
    from experiments import summary
    from experiments.measures import race

    output.add(summary.rows(outcome.records))
    for record in outcome.records:
        if record.get("race"):
            _show_race(output, record, race.standings(race.with_limits(record)))
    for headers, lines, words in summary.tables(outcome.records):
        output.say()
        table(output.console, headers, lines, numbers=words)
    output.say()
    reused = f" ({outcome.reused} of them were there already)" if outcome.reused else ""
    done = sum(record["status"] == "ok" for record in outcome.records)
    output.say(f"{done} of {len(outcome.records)} runs finished{reused} in {duration(outcome.seconds)}")
    _show_failures(output, outcome)


def _show_failures(output: Output, outcome: Outcome) -> None:
    for record in outcome.records:
        if record["status"] == "ok":
            continue
        what = record["config"]
        message = f"{what['paper']} {what['engine']} {what['measure']}: {record['error']}"
        if record["error_kind"] == "unavailable":
            output.errors.append(message)
            output.say(f"left out: {message}")
        else:
            output.fail(message)
            _complain(message)


def _show_race(output: Output, record: dict[str, Any], standings: list[dict[str, Any]]) -> None:
    setting = record["config"]
    notice = "" if record["data"]["source"] == "real" else " on the embedded sample"
    output.say()
    output.say(
        f"{setting['paper']}{notice}: {setting['rounds']} rounds of {setting['steps']} steps, batch "
        f"{setting['batch_size']}, threads {setting['threads']}; microseconds per step, median (least to most)"
    )
    rows = [
        [
            row["label"],
            fixed(row["microseconds_per_step"], 1),
            f"({fixed(row['least'], 1)} to {fixed(row['most'], 1)})",
            fixed(row["ratio"], 3),
            f"({fixed(row['ratio_least'], 3)} to {fixed(row['ratio_most'], 3)})",
            share(row["limit_share"]),
        ]
        for row in standings
    ]
    table(output.console, ["ENGINE", "STEP", "", f"RATIO TO {standings[0]['base']}", "", "OF THE LIMIT"], rows)
    if limit := record.get("roofline"):
        output.say(
            f"limit of a step: {fixed(limit['limit_microseconds'], 1)} microseconds, by its {limit['limited_by']}: "
            f"{significant(limit['products_flops'] / 1e6)} million operations at "
            f"{significant(limit['flops_per_second'] / 1e9)} a nanosecond, {size(limit['moved_bytes'])} at "
            f"{size(limit['bytes_per_second'])} a second"
        )


@cli.command(
    short_help="Time small functions and their gradients in many systems.",
    epilog=examples(
        "microbench", "microbench --profile quick --systems numpy-compiled,julia-compiled,torch,jax --json times.json"
    ),
)
@click.argument("paper", default="imdb-cnn-c", shell_complete=completing(paper_keys))
@click.option(
    "--systems",
    type=Names(),
    shell_complete=completing(_systems),
    help="Systems to measure (default: all that the paper file names and this machine has): numpy-eager, "
    "numpy-compiled, julia-eager, julia-compiled, julia-forward, manual, manual-julia, duals, torch, jax, tensorflow, "
    "autograd, zygote, reversediff, forwarddiff, enzyme, mooncake.",
)
@option_profile
@option_results()
@reporting
def microbench(output: Output, paper: str, systems: list[str] | None, profile: ProfileName, results_dir: Path) -> None:
    """Time small functions and their gradients, as PAPER's tables of micro-benchmarks do (default: imdb-cnn-c).

    Every system runs in a separate process with one thread; its value and gradients are checked against those written
    by hand before it is timed, and systems alternate in every round. Four suites: small functions, the same on large
    arrays, forward mode by chunk size, and the memory of a loop.
    """
    from experiments.microbenchmarks import sweep
    from experiments.results import Results

    jobs = sweep.plan(_paper(paper), profile, systems)
    results = Results(results_dir)
    with results.locked(output.say):
        _tell_older(output, results)
        _show_micro(output, _micro(output, jobs, results, again=True))
        results.write_tidy()


def _micro(output: Output, jobs: Sequence[Any], results: Any, again: bool = False) -> list[dict[str, Any]]:
    """Measure suites of micro-benchmarks with their progress shown."""
    from experiments.microbenchmarks import sweep

    progress = Progress(output.console, len(jobs), "suites")
    with progress.show():
        return sweep.run(jobs, results, progress, again)


def _show_micro(output: Output, records: Sequence[dict[str, Any]], tables: bool = True) -> None:
    """The medians as tables, what is missing and why, and for programs a row for each."""
    from experiments.microbenchmarks import sweep

    output.add(sweep.rows(records))
    missing: dict[str, None] = {}
    for record in records:
        if tables:
            output.say()
            headers, lines = sweep.table(record)
            table(output.console, headers, lines, numbers=5)
        missing |= dict.fromkeys(sweep.absent(record))
        if record["status"] != "ok":
            output.fail(f"micro-benchmarks, {record['config']['suite']}: {record['error']}")
            _complain(str(record["error"]))
    for text in missing:
        output.errors.append(text)
        output.say(f"left out: {text}")


# -----------------------------------------------------------------------------------------------------------
# From results to the paper


@cli.command(
    short_help="Make tables, figures and page from results.",
    epilog=examples("report", "report --results /tmp/results --output /tmp/report", "report my-study.toml"),
)
@click.argument("papers", nargs=-1, metavar="[PAPER]...", shell_complete=completing(paper_keys))
@option_results()
@click.option("--output", "out_dir", metavar="DIR", type=click.Path(path_type=Path), help="Default: DIR/report.")
@click.option(
    "--against",
    metavar="B",
    help="Have a section in the page that compares these results with B, as `twingrad compare` does.",
)
@option_data
@reporting
def report(
    output: Output,
    papers: tuple[str, ...],
    results_dir: Path,
    out_dir: Path | None,
    against: str | None,
    data_dir: Path | None,
) -> None:
    """Make the tables, the figures and the HTML page from results; nothing is run.

    Of all papers that come with TwinGrad and have results, or of those named. A paper of your own is named by its file.
    Results of several machines have tables of their times for each machine, and accuracies over all.
    """
    from experiments import compared, comparison

    for name in papers:
        _paper(name)
    _refresh_tidy(output, results_dir)
    section = None
    if against is not None:
        section = compared.document(comparison.compare(comparison.load(str(results_dir)), comparison.load(against)))
    from experiments import report as reports

    _show_built(
        output, reports.build(results_dir, out_dir or results_dir / "report", papers or None, data_dir, section)
    )
    if section is not None:
        output.say(section["verdict"][0])


@cli.command(
    short_help="Say whether results reproduce others, and what differs.",
    epilog=examples(
        "compare                               results/ with the committed ones",
        "compare theirs.tar.xz                 an archive of raw records with these",
        "compare results before --json -",
        "compare results@1f2e3d4 results@abcd  before a commit and after it",
    ),
)
@click.argument("here", default="results", metavar="[A]", shell_complete=completing())
@click.argument("there", default=str(COMMITTED_RESULTS), metavar="[B]", shell_complete=completing())
@reporting
def compare(output: Output, here: str, there: str) -> None:
    """Compare results A (default: results) with B (default: the committed ones of the checkout).

    Each is a results folder, or an archive of raw records. FOLDER@COMMIT is what a folder held when that commit had
    been run. Runs are matched by what they ask; accuracies and losses are compared, times as ratios to PyTorch's on
    each machine, the studies' claims, versions and hardware. The answer is "reproduced", with code 0, unless one of
    these differs in what both have, which ends with code 1:

    \b
    - a run that finished in B fails in A
    - a loss of the same training: by over 1e-4 at the first step, by over 1e-2
      in the first hundred
    - an accuracy: by over half a percentage point, with p below 0.05
    - the order: a step faster than PyTorch's in one and slower in the other,
      both with 95 % confidence
    - the verdict on a claim, unless its number is near the limit in both
    """
    from experiments import comparison

    _show_comparison(output, comparison.compare(comparison.load(here), comparison.load(there)))


def _show_comparison(output: Output, found: Comparison, failing: bool = True) -> None:
    """A comparison as tables and words; `failing`: differences that count end the command with code 1."""
    from experiments import compared

    for line in compared.lines(found, min(output.console.width, 100)):
        output.say(line)
    output.add(found.rows())
    for difference in found.counted if failing else ():
        output.fail(" ".join(filter(None, (difference.study, difference.engine + ":", difference.words))))


@cli.command(
    short_help="Put results of several machines into one folder.",
    epilog=examples("merge one two three --results all", "merge raw-of-a.tar.xz results-of-b --results all"),
)
@click.argument("sources", nargs=-1, required=True, metavar="A...", type=click.Path(path_type=Path))
@option_results()
@reporting
def merge(output: Output, sources: tuple[Path, ...], results_dir: Path) -> None:
    """Copy the raw records of results folders and archives A... into the results folder, and make its tables anew.

    Nothing that is in the folder is overwritten. Two finished runs that should be the same one, and records that are
    damaged, are named, not copied, and end the command with code 1. A failed run gives way to a finished one.
    """
    from experiments import merging
    from experiments.results import Results

    results = Results(results_dir)
    for source in sources:
        merging.found_in(source)
    merging.check(sources, results)
    with results.locked(output.say):
        merged = merging.merge(sources, results)
        results.write_tidy()
    output.add(merged.rows())
    for note in merged.notes:
        output.say(note)
    for conflict in merged.conflicts:
        output.fail(conflict)
        _complain(conflict)
    counts = [(merged.added, "added"), (merged.same, "there already")]
    counts += [(merged.replaced, "in the place of failed ones"), (merged.failed, "failed, and finished there")]
    told = ", ".join(f"{count} {words}" for count, words in counts if count)
    conflicts = f"; {len(merged.conflicts)} not copied" if merged.conflicts else ""
    output.say(f"{results_dir}: {told or 'nothing added'}{conflicts}")


@cli.command(
    short_help="Put the raw records of results into one file.",
    epilog=examples("archive", "archive --results results --output paper/results/raw.tar.xz"),
)
@option_results()
@click.option("--output", "out_file", metavar="FILE", type=click.Path(path_type=Path), help="Default: DIR/raw.tar.xz.")
@reporting
def archive(output: Output, results_dir: Path, out_file: Path | None) -> None:
    """Put the raw records of results into one file, from which all tidy tables can be made again.

    The same records give the same bytes. CONTRIBUTING.md says how results are committed with it.
    """
    from experiments import archive, changed
    from experiments.results import Results

    changed.refuse_archive(results_dir)
    results = Results(results_dir)
    records, out_file = results.files(), out_file or results.archive
    length = archive.write(out_file, records)
    output.add([{"kind": "archive", "file": str(out_file), "records": len(records), "bytes": length}])
    output.say(f"{out_file}: {len(records)} records ({size(length)})")


@cli.command(
    short_help="Make the PDF from results.",
    epilog=examples("paper", "paper --results results --output mine.pdf", "paper my-study.toml --results results"),
)
@click.argument("papers", nargs=-1, metavar="[PAPER]...", shell_complete=completing(paper_keys))
@option_results(default=None)
@click.option(
    "--output", "out_pdf", metavar="FILE", type=click.Path(path_type=Path), help="Default: DIR/report/paper.pdf."
)
@option_data
@reporting
def paper(
    output: Output, papers: tuple[str, ...], results_dir: Path | None, out_pdf: Path | None, data_dir: Path | None
) -> None:
    """Make the PDF from results: by default the committed ones of the checkout, with --results any others.

    Of all papers that come with TwinGrad and have results, or of those named. A paper of your own is named by its file.
    """
    for name in papers:
        _paper(name)
    if results_dir is None:
        committed = (COMMITTED_RESULTS / "tidy").is_dir()
        results_dir = COMMITTED_RESULTS if committed else Path("results")
        out_pdf = out_pdf or (COMMITTED_RESULTS.parent / "paper.pdf" if committed else None)
        output.say(f"from the results in {results_dir}")
    _refresh_tidy(output, results_dir)
    from experiments.report import paper as pdfs

    out_pdf = out_pdf or results_dir / "report" / "paper.pdf"
    _show_pdf(output, pdfs.build(results_dir, out_pdf, data_dir, papers or None))


@cli.command(
    short_help="Do everything, from raw data to the finished paper.",
    epilog=examples("reproduce", "reproduce --profile quick", "reproduce mnist-rnn-e --results /tmp/results"),
)
@click.argument("papers", nargs=-1, metavar="[PAPER]...", shell_complete=completing(paper_keys))
@option_profile
@option_engines
@option_threads
@option_dask
@option_results()
@option_data
@reporting
def reproduce(
    output: Output,
    papers: tuple[str, ...],
    profile: ProfileName,
    engines: list[str] | None,
    threads: int | None,
    dask: str | None,
    results_dir: Path,
    data_dir: Path | None,
) -> None:
    """Do everything: runs, measurements, tables, figures, the HTML page and the PDF, of all papers or of those named.

    Run an interrupted command again to resume it. Engines that are not there are left out, and the tables say so. With
    --dask a cluster does the runs; the micro-benchmarks, the tables and the paper are made here.
    """
    from experiments import changed, compared
    from experiments import sweep as sweeps
    from experiments.results import Results

    chosen = [_paper(name) for name in papers or paper_keys()]
    for item in chosen:  # a mistake in the options is reported before the data are fetched
        sweeps.plan(item, profile, engines, None, None, threads)
    changed.note(results_dir, ())
    results = Results(results_dir)
    sweep = sweeps.Sweep(results, data_dir, download(output.console))
    stages = Stages(output.console)
    sample = False
    with results.locked(output.say):
        _tell_older(output, results)
        with stages.stage("data"):
            jobs = _jobs(output, sweep, chosen, profile, engines, threads)
        for measure in MEASURES.values():
            part = [job for job in jobs if job.kind is measure]
            if part:
                with stages.stage(measure.title):
                    with _progress(output, results, len(part)) as progress:
                        outcome = (
                            sweep.run(part, progress) if dask is None else _by_cluster(dask, sweep, part, progress)
                        )
                    _show(output, outcome)
                    sample |= any(record["data"]["source"] == "sample" for record in outcome.records)
        suites = _suites(sweep, chosen, profile, engines, Progress(output.console, 0))
        if suites:
            with stages.stage("micro-benchmarks: small functions in many systems"):
                _show_micro(output, _micro(output, suites, results), tables=False)
        with stages.stage("tidy tables of all results"):
            counts = results.write_tidy()
            output.say(", ".join(f"{count} {name}" for name, count in counts.items()))
        with stages.stage("tables and figures"):
            found = _with_committed(output, results_dir)
            section = None if found is None else compared.document(found)
            from experiments import report as reports

            built = reports.build(results_dir, results.report, papers or None, data_dir, section)
            output.say(f"{len(built.written)} files in {results.report}")
        with stages.stage("the paper"):
            from experiments.report import paper as pdfs

            pdf = pdfs.build(results_dir, results.report / "paper.pdf", data_dir, papers or None)
            output.say(str(pdf))
    output.add({"kind": "stage", "name": name, "seconds": seconds} for name, seconds in stages.seconds)
    _show_built(output, built)
    _show_pdf(output, pdf)
    output.say()
    table(output.console, ["STAGE", "TIME"], [[name, duration(seconds)] for name, seconds in stages.seconds])
    output.say()
    if found is not None:
        _show_comparison(output, found, failing=False)
        output.say()
    if sample:
        output.say("All numbers come from the embedded sample, not from the papers' data; every output says so.")
    output.say(f"Done in {duration(stages.total())}. The paper: {pdf}")


def _with_committed(output: Output, results_dir: Path) -> Comparison | None:
    """These results compared with the committed ones of the checkout; None where that cannot be."""
    from experiments import comparison

    if not (COMMITTED_RESULTS / "tidy").is_dir():
        return None
    try:
        return comparison.compare(comparison.load(str(results_dir)), comparison.load(str(COMMITTED_RESULTS)))
    except TwinGradError as error:
        output.say(f"not compared with the committed results: {error}")
        return None


def _jobs(
    output: Output,
    sweep: Sweep,
    papers: Sequence[Paper],
    profile: ProfileName,
    engines: list[str] | None,
    threads: int | None,
) -> list[Job]:
    """The jobs of papers; where only the embedded sample is at hand, those of the profile that is made for it."""
    from experiments import sweep as sweeps

    jobs = []
    progress = Progress(output.console, 0)
    for paper in papers:
        if paper.runs_of_paper:
            output.say(f"{paper.key}: trains as {paper.runs_of_paper} does, whose runs it shows")
            continue
        profile_here = paper.reproduced.get(profile, profile)
        fitting = sweep.fitting(paper, profile_here, progress)
        if fitting != profile_here:
            output.say(f"{paper.key}: profile {fitting}, since only the embedded sample is at hand")
        jobs += sweeps.plan(paper, fitting, engines, None, None, threads)
    return jobs


def _suites(
    sweep: Sweep,
    papers: Sequence[Paper],
    profile: ProfileName,
    engines: list[str] | None,
    progress: Progress,
) -> list[Any]:
    """The suites of micro-benchmarks of papers, as small as the rest of what is run for them."""
    from experiments.microbenchmarks import sweep as micro

    jobs = []
    for paper in papers:
        if paper.microbenchmarks:
            fitting = sweep.fitting(paper, profile, progress)
            jobs += micro.plan(paper, fitting, micro.of_engines(paper, fitting, engines) if engines else None)
    return jobs


def _refresh_tidy(output: Output, results_dir: Path) -> None:
    """Make tidy anew from raw where it is older or damaged, and the folder is not a committed one."""
    from experiments import changed
    from experiments.results import COMMITTED, Results, Tidy, TidyError

    changed.refuse(results_dir)
    results = Results(results_dir)
    if (results_dir / COMMITTED).exists():
        return
    if results.tidy_is_current():
        if not any(results.raw.glob("*.json")):
            return
        try:
            Tidy.load(results_dir)
            return
        except TidyError as error:
            output.say(f"{error.place} is damaged, and made anew from the raw records")
    with results.locked(output.say):
        results.write_tidy()


def _show_pdf(output: Output, pdf: Path) -> None:
    length = pdf.stat().st_size
    output.add([{"kind": "pdf", "file": str(pdf), "bytes": length}])
    output.say(f"{pdf} ({size(length)})")


def _show_built(output: Output, built: Any) -> None:
    """Everything that was written, and what is missing and why."""
    output.say()
    for path in built.written:
        output.say(str(path))
    output.add({"kind": "file", "file": str(path)} for path in built.written)
    output.add({"kind": "missing", "what": text} for text in built.missing)
    if built.missing:
        output.say()
        output.say("Missing:")
    for text in built.missing:
        output.say(f"  {text}")


# -----------------------------------------------------------------------------------------------------------
# By hand


@cli.command(
    short_help="Train a model of your own, or one of the papers'.",
    epilog=examples(
        "train mnist-rnn --data mnist --epochs 5 --save weights.safetensors",
        "train imdb-cnn --data imdb --optimizer adam --learning-rate 0.001 --batch-size 64",
        "train mnist-cnn --data mnist --momentum 0.9 --schedule cosine --warmup 100 --validation 0.1 --patience 3",
        "train mnist-rnn --data mnist --epochs 50 --checkpoint run.safetensors --resume --curve curve.png",
        "train model.toml --data rows.npz --engine torch --optimizer adam --learning-rate 0.001",
        "train model.toml --data folder --shuffle blocks",
    ),
)
@click.argument("spec", shell_complete=completing(models))
@click.option(
    "--data",
    required=True,
    shell_complete=completing(_data_sets),
    help="A data set's name, or an .npz with x_train, y_train (and x_test, y_test). From a folder of such .npy files, "
    "or an Arrow file with columns x and y, rows are read as they are needed: it may be larger than memory.",
)
@click.option("--epochs", type=Whole(1, MOST_EPOCHS), default=5, show_default=True)
@click.option(
    "--engine", default="numpy", show_default=True, shell_complete=completing(_engines), help="See `twingrad list`."
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd", show_default=True)
@click.option("--learning-rate", type=float, default=0.015, show_default=True)
@click.option("--momentum", type=float, default=0.0, show_default=True, help="Of sgd and rmsprop.")
@click.option("--nesterov", is_flag=True, help="Nesterov's momentum, of sgd.")
@click.option("--weight-decay", type=float, help="Default: 0, and 0.01 in adamw.")
@click.option("--clip-norm", type=float, help="The largest norm of a step's gradient (default: no limit).")
@click.option(
    "--schedule", type=click.Choice(SCHEDULES), default="constant", show_default=True, help="Of the learning rate."
)
@click.option("--warmup", type=Whole(0, MOST_ROWS), default=0, show_default=True, help="Steps in which the rate grows.")
@click.option(
    "--step-epochs",
    type=Whole(1, MOST_EPOCHS),
    default=10,
    show_default=True,
    help="Of --schedule step: after how many epochs the rate falls, again and again.",
)
@click.option("--step-factor", type=float, default=0.1, show_default=True, help="Of --schedule step: to which part.")
@click.option("--batch-size", type=Whole(1, MOST_ROWS), default=100, show_default=True)
@click.option(
    "--shuffle",
    type=click.Choice(["rows", "blocks"]),
    default="rows",
    show_default=True,
    help="What is drawn at random: rows, or blocks of about 1 MB and the rows within 64 MB of them, for a large file.",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="The share of the training rows that is kept apart and evaluated after each epoch.",
)
@click.option(
    "--patience",
    type=Whole(1, MOST_EPOCHS),
    help="Stop after this number of epochs without a better validation loss, and keep the best weights.",
)
@click.option("--seed", type=Whole(0, LARGEST_SEED), default=0, show_default=True, help="Of weights and batches.")
@option_threads
@click.option("--weights", metavar="FILE", type=click.Path(path_type=Path), help="Start from these weights.")
@click.option(
    "--save", metavar="FILE", type=click.Path(path_type=Path), help="Write the trained weights (safetensors)."
)
@click.option(
    "--checkpoint", metavar="FILE", type=click.Path(path_type=Path), help="Write all of the training after each epoch."
)
@click.option("--resume", is_flag=True, help="Resume from the file of --checkpoint, if it exists.")
@click.option("--curve", metavar="FILE", help="The losses as a picture (.png, .svg, .pdf), or '-': in the terminal.")
@option_data
@reporting
def train(output: Output, **options: Any) -> None:
    """Train the network of SPEC, a model file or the name of a model that comes with TwinGrad.

    Run an interrupted command with --checkpoint FILE --resume again to resume it: it ends with the same weights as if
    it had never been interrupted.

    `mpiexec -n 4 twingrad train SPEC ...` trains on four processes, on one machine or several: each computes a part of
    every mini-batch.
    """
    from experiments import mpi, training

    with mpi.together(output) as communicator:
        options["threads"] = provenance.threads(options["threads"])
        training.train(training.Training(**options), output, communicator)


@cli.command(
    short_help="Check a model file, and draw its layers.",
    epilog=examples("check mnist-cnn", "check model.toml --json -"),
)
@click.argument("spec", shell_complete=completing(models))
@reporting
def check(output: Output, spec: str) -> None:
    """Check the model of SPEC, a file or the name of a model that comes with TwinGrad, and draw it.

    From the input down to the loss: each layer with its settings, the shape of what comes out of it, and its
    parameters. What is wrong in a file is named by its key.
    """
    from experiments import check, rows

    found = rows.load_spec(spec)
    for line in check.drawn(found):
        output.say(line)
    output.add(check.rows(found))


@cli.command(
    short_help="Predict with a trained network.",
    epilog=examples(
        "predict mnist-rnn weights.safetensors mnist",
        "predict model.toml weights.safetensors rows.npy --save predictions.npy",
    ),
)
@click.argument("spec", shell_complete=completing(models))
@click.argument("weights", type=click.Path(path_type=Path))
@click.argument("input", shell_complete=completing(_data_sets))
@click.option(
    "--engine", default="numpy", show_default=True, shell_complete=completing(_engines), help="See `twingrad list`."
)
@option_threads
@click.option("--save", metavar="FILE", type=click.Path(path_type=Path), help="Write the network's outputs (.npy).")
@click.option("--show", type=Whole(0, MOST_ROWS), default=10, show_default=True, help="How many rows to print.")
@option_data
@reporting
def predict(output: Output, **options: Any) -> None:
    """Predict with the network of SPEC and WEIGHTS for INPUT: an .npy of rows, or a data set's test rows."""
    from experiments import prediction

    options["threads"] = provenance.threads(options["threads"])
    prediction.predict(prediction.Prediction(**options), output)


@cli.command(
    short_help="Answer GradBench's messages with one of our engines.",
    epilog=examples("gradbench --engine numpy < messages.jsonl", "gradbench --engine julia --threads 2"),
)
@click.option(
    "--engine",
    type=click.Choice(["numpy", "julia"]),
    required=True,
    help="The engine that computes and differentiates.",
)
@click.option("--threads", type=Whole(1, MOST_THREADS), default=1, show_default=True, help="Threads of the engine.")
def gradbench(engine: str, threads: int) -> None:
    """Be a tool of GradBench, the benchmark of differentiable programming.

    It answers GradBench's messages, one per line of standard input, on standard output, and is started by it:
    gradbench run --tool "twingrad gradbench --engine numpy" --eval ...

    CONTRIBUTING.md says how to add a module.
    """
    from experiments.gradbench import protocol

    protocol.serve(engine, sys.stdin or (), sys.stdout, threads)


@cli.command(
    short_help="Write the API reference, the table of ops and the tutorial as web pages.",
    epilog=examples("docs build/docs"),
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@reporting
def docs(output: Output, folder: Path) -> None:
    """Write the documentation of the Python packages into FOLDER, as web pages that need no network."""
    from experiments import reference

    output.say(f"The first page: {reference.build(folder)}")


@cli.command(
    short_help="Print what lets a shell complete commands, options and names.",
    epilog=examples("completion bash > ~/.local/share/bash-completion/completions/twingrad"),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete this command: its options, papers, models, engines and data sets.

    \b
    bash  twingrad completion bash > ~/.local/share/bash-completion/completions/twingrad
    zsh   twingrad completion zsh > a file _twingrad in a folder of $fpath
    fish  twingrad completion fish > ~/.config/fish/completions/twingrad.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click has these three
    click.echo(kind(cli, {}, COMMAND, f"_{COMMAND.upper()}_COMPLETE").source())


# -----------------------------------------------------------------------------------------------------------
# The process


def main(arguments: Iterable[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the code that fits."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal's encoding lacks becomes a ?
            stream.reconfigure(errors="replace")
    sys.exit(invoke(arguments))


def invoke(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; the exit code. Every error that a user can meet is one line on standard error."""
    try:
        code = cli.main(None if arguments is None else list(arguments), prog_name=COMMAND, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        usage = f"\nSee `{context.command_path} --help`." if context else ""
        _complain(f"{error.format_message()}{usage}")
        return USER_ERROR
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except Terminated:
        click.echo("terminated", err=True)
        return TERMINATED
    except TwinGradError as error:
        _complain(str(error))
        return error.exit_code
    except EngineError as error:  # a loss that is not a number is a run's failure, the rest are settings and data
        _complain(str(error))
        return RUN_FAILED if isinstance(error, NonFiniteError) else USER_ERROR
    except OSError as error:  # of files of the user's there is a TwinGradError
        if error.filename is not None:
            _complain(_in_words(error))
            return RUN_FAILED
        with contextlib.suppress(OSError):  # or Python would try to write the rest at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # whoever read has seen enough
            _complain(f"the output could not be written: {error.strerror or error}")
        return RUN_FAILED
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in ("py_engine", "bridge", "experiments"):
            raise
        _complain(f"this needs the package {package}: {remedy(package)}")
        return USER_ERROR
    except MemoryError as error:
        _complain(f"not enough memory: {error or 'none is left'}; see the sizes in what was asked for")
        return RUN_FAILED


def _in_words(error: OSError) -> str:
    """What is wrong with a file of TwinGrad's own, such as a temporary one, and what to do."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space, or name another folder: " if full else "to use another folder: "
    places = "--results DIR for results, TWINGRAD_CACHE for the cache, TMPDIR for temporary files"
    return f"{error.filename}: {error.strerror or error}; {advice}{places}"


def _complain(message: str) -> None:
    """Say what is wrong on standard error, with nothing in it that a terminal obeys, and no line without end."""
    lines = printable(message).splitlines()
    cut = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in lines]
    click.echo("error: " + "\n".join(cut), err=True)


def _message(error: BaseException) -> str:
    return error.format_message() if isinstance(error, click.ClickException) else str(error)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated
