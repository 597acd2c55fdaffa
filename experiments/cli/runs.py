"""Commands that run and measure: `run`, `race` and `microbench`, and what is shown of runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.cli.common import (
    Names,
    Seeds,
    Terminated,
    Whole,
    checked_paper,
    cli,
    complain,
    completing,
    examples,
    option_dask,
    option_data,
    option_engines,
    option_profile,
    option_results,
    option_threads,
    reporting,
    system_names,
)
from experiments.formats import counted, duration, fixed, share, significant, size
from experiments.measures.registry import MEASURES
from experiments.output import Output
from experiments.papers import MOST_ROUNDS, Paper, ProfileName, paper_keys
from experiments.progress import Progress, download, table

if TYPE_CHECKING:
    from experiments.results import Results
    from experiments.sweep import Job, Outcome, Sweep


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
        chosen = changed.changed(checked_paper(name), settings)
        most = max(seeds) + 1 if seeds else None
        if chosen.runs_of_paper:
            output.say(f"{name}: {_of_another(chosen)}")
        jobs += sweeps.plan(chosen, profile, engines, most, measures, threads, everywhere=part is not None)
    if seeds and jobs:
        seeded = {job.measure for job in jobs if job.seed}
        jobs = [job for job in jobs if job.seed in seeds or job.measure not in seeded]
        if not jobs:
            raise click.UsageError(f"no run has a seed of {', '.join(map(str, seeds))}: the paper file plans fewer")
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
        tell_older(output, results)
        with shown_progress(output, results, len(jobs)) as progress:
            sweep = sweeps.Sweep(results, data_dir, download(output.console), leases)
            outcome = sweep.run(jobs, progress) if dask is None else run_by_cluster(dask, sweep, jobs, progress)
        results.write_tidy(leases=leases)
    show_runs(output, outcome)


def _of_another(paper: Paper) -> str:
    """Why a paper has fewer runs than others: they are another paper's."""
    return f"its networks are those of {paper.runs_of_paper}, whose runs it shows; run {paper.runs_of_paper}"


def run_by_cluster(address: str, sweep: Sweep, jobs: Sequence[Job], progress: Progress) -> Outcome:
    """Have the workers of a Dask cluster, whose scheduler is at this address, do the runs."""
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

    chosen = checked_paper(paper)
    jobs = sweeps.plan(chosen, profile, engines, None, ["race"], threads, rounds)[:1]
    if not jobs:
        raise click.UsageError(f"{paper} has no race: {_of_another(chosen)}")
    names = jobs[0].engines
    if base is not None and base not in names:
        raise click.UsageError(f"--base {base}: not among the engines of this race ({', '.join(names)})")
    changed.note(results_dir, ())
    results = Results(results_dir)
    with results.locked(output.say):
        tell_older(output, results)
        with shown_progress(output, results, len(jobs)) as progress:
            outcome = sweeps.Sweep(results, data_dir, download(output.console)).run(jobs, progress, again=True)
        results.write_tidy()
    for record in outcome.records:
        if not record.get("race"):
            continue
        standings = race.standings(race.with_limits(record), base)
        output.add({**row, "threads": record["config"]["threads"]} for row in standings)
        _show_race(output, record, standings)
    _show_failures(output, outcome)


def tell_older(output: Output, results: Results) -> None:
    """Say in one line that records of an older schema count for nothing here."""
    if count := results.older():
        output.say(
            f"{results.raw}: {counted(count, 'record')} of an older schema: run anew; "
            "the old files stay as they are, and are no longer shown"
        )


@contextlib.contextmanager
def shown_progress(output: Output, results: Results, count: int) -> Iterator[Progress]:
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


def show_runs(output: Output, outcome: Outcome) -> None:
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
            complain(message)


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
    shell_complete=completing(system_names),
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
    from experiments import changed
    from experiments.microbenchmarks import sweep
    from experiments.results import Results

    jobs = sweep.plan(checked_paper(paper), profile, systems)
    changed.note(results_dir, ())
    results = Results(results_dir)
    with results.locked(output.say):
        tell_older(output, results)
        show_suites(output, run_suites(output, jobs, results, again=True))
        results.write_tidy()


def run_suites(output: Output, jobs: Sequence[Any], results: Any, again: bool = False) -> list[dict[str, Any]]:
    """Measure suites of micro-benchmarks with their progress shown."""
    from experiments.microbenchmarks import sweep

    progress = Progress(output.console, len(jobs), "suites")
    with progress.show():
        return sweep.run(jobs, results, progress, again)


def show_suites(output: Output, records: Sequence[dict[str, Any]], tables: bool = True) -> None:
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
            complain(str(record["error"]))
    for text in missing:
        output.errors.append(text)
        output.say(f"left out: {text}")
