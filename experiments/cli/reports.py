"""Commands from results to the paper: `report`, `compare`, `merge`, `archive` and `paper`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.cli.common import (
    COMMITTED_RESULTS,
    checked_paper,
    cli,
    complain,
    completing,
    examples,
    option_data,
    option_results,
    reporting,
)
from experiments.formats import size
from experiments.output import Output
from experiments.papers import paper_keys

if TYPE_CHECKING:
    from experiments.comparison import Comparison


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
        checked_paper(name)
    refresh_tidy(output, results_dir)
    section = None
    if against is not None:
        section = compared.document(comparison.compare(comparison.load(str(results_dir)), comparison.load(against)))
    from experiments import report as reports

    show_built(output, reports.build(results_dir, out_dir or results_dir / "report", papers or None, data_dir, section))
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

    show_comparison(output, comparison.compare(comparison.load(here), comparison.load(there)))


def show_comparison(output: Output, found: Comparison, failing: bool = True) -> None:
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
        complain(conflict)
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
        checked_paper(name)
    if results_dir is None:
        committed = (COMMITTED_RESULTS / "tidy").is_dir()
        results_dir = COMMITTED_RESULTS if committed else Path("results")
        out_pdf = out_pdf or (COMMITTED_RESULTS.parent / "paper.pdf" if committed else None)
        output.say(f"from the results in {results_dir}")
    refresh_tidy(output, results_dir)
    from experiments.report import paper as pdfs

    out_pdf = out_pdf or results_dir / "report" / "paper.pdf"
    show_pdf(output, pdfs.build(results_dir, out_pdf, data_dir, papers or None))


def refresh_tidy(output: Output, results_dir: Path) -> None:
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


def show_pdf(output: Output, pdf: Path) -> None:
    """The PDF that was written."""
    length = pdf.stat().st_size
    output.add([{"kind": "pdf", "file": str(pdf), "bytes": length}])
    output.say(f"{pdf} ({size(length)})")


def show_built(output: Output, built: Any) -> None:
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
