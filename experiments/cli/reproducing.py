"""The command `reproduce`: everything, from raw data to the finished paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.errors import TwinGradError
from experiments.cli.common import (
    COMMITTED_RESULTS,
    checked_paper,
    cli,
    completing,
    examples,
    option_dask,
    option_data,
    option_engines,
    option_profile,
    option_results,
    option_threads,
    reporting,
)
from experiments.cli.reports import show_built, show_comparison, show_pdf
from experiments.cli.runs import run_by_cluster, run_suites, show_runs, show_suites, shown_progress, tell_older
from experiments.formats import duration
from experiments.measures.registry import MEASURES
from experiments.output import Output
from experiments.papers import Paper, ProfileName, paper_keys
from experiments.progress import Progress, Stages, download, table

if TYPE_CHECKING:
    from experiments.comparison import Comparison
    from experiments.sweep import Job, Sweep


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

    chosen = [checked_paper(name) for name in papers or paper_keys()]
    for item in chosen:  # a mistake in the options is reported before the data are fetched
        sweeps.plan(item, profile, engines, None, None, threads)
    changed.note(results_dir, ())
    results = Results(results_dir)
    sweep = sweeps.Sweep(results, data_dir, download(output.console))
    stages = Stages(output.console)
    sample = False
    with results.locked(output.say):
        tell_older(output, results)
        with stages.stage("data"):
            jobs = _jobs(output, sweep, chosen, profile, engines, threads)
        for measure in MEASURES.values():
            part = [job for job in jobs if job.kind is measure]
            if part:
                with stages.stage(measure.title):
                    with shown_progress(output, results, len(part)) as progress:
                        outcome = (
                            sweep.run(part, progress) if dask is None else run_by_cluster(dask, sweep, part, progress)
                        )
                    show_runs(output, outcome)
                    sample |= any(record["data"]["source"] == "sample" for record in outcome.records)
        suites = _suites(sweep, chosen, profile, engines, Progress(output.console, 0))
        if suites:
            with stages.stage("micro-benchmarks: small functions in many systems"):
                show_suites(output, run_suites(output, suites, results), tables=False)
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

            pdf = pdfs.build(results_dir, results.report / "paper.pdf", papers=papers or None)  # of what was just made
            output.say(str(pdf))
    output.add({"kind": "stage", "name": name, "seconds": seconds} for name, seconds in stages.seconds)
    show_built(output, built)
    show_pdf(output, pdf)
    output.say()
    table(output.console, ["STAGE", "TIME"], [[name, duration(seconds)] for name, seconds in stages.seconds])
    output.say()
    if found is not None:
        show_comparison(output, found, failing=False)
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
