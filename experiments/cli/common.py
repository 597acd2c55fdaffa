"""What all commands have in common: the group that holds them, options, kinds of values, and their output."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from bridge.errors import TwinGradError, printable, shown
from experiments import provenance
from experiments.output import STDOUT, Output, OutputError, check_apart
from experiments.papers import MOST_SEEDS, MOST_THREADS, PROFILES, Paper, load_paper

COMMAND = "twingrad"
USER_ERROR, RUN_FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
LONGEST_LINE = 2_000
"""Characters of a line of an error that are shown."""
COMMITTED_RESULTS = Path("paper/results")


class Terminated(BaseException):
    """Another process asked this one to end (SIGTERM): clean up as after ctrl-C."""


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
            output.errors.append("interrupted" if stopped else message_of(error))
            try:
                output.write()
            except TwinGradError as unwritten:  # what stopped the command is said after it
                complain(str(unwritten))
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


def engine_names() -> list[str]:
    """What a shell offers for an engine."""
    from bridge import registry

    return registry.names()


def system_names() -> list[str]:
    """What a shell offers for a system of the micro-benchmarks."""
    from experiments.microbenchmarks.registry import SYSTEMS

    return list(SYSTEMS)


def data_set_names() -> list[str]:
    """What a shell offers for a data set."""
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


def checked_paper(name: str) -> Paper:
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
    shell_complete=completing(engine_names),
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


def complain(message: str) -> None:
    """Say what is wrong on standard error, with nothing in it that a terminal obeys, and no line without end."""
    lines = printable(message).splitlines()
    cut = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in lines]
    click.echo("error: " + "\n".join(cut), err=True)


def message_of(error: BaseException) -> str:
    """What an error says."""
    return error.format_message() if isinstance(error, click.ClickException) else str(error)
