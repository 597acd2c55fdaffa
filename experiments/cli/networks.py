"""Commands on a single network, and small ones: `train`, `check`, `predict`, `gradbench`, `docs` and `completion`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from bridge.schedule import SCHEDULES
from bridge.session import OPTIMIZERS
from experiments import provenance
from experiments.cli.common import (
    COMMAND,
    Whole,
    cli,
    completing,
    data_set_names,
    engine_names,
    examples,
    option_data,
    option_threads,
    reporting,
)
from experiments.output import Output
from experiments.papers import LARGEST_SEED, MOST_EPOCHS, MOST_ROWS, MOST_THREADS, models


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
    shell_complete=completing(data_set_names),
    help="A data set's name, or an .npz with x_train, y_train (and x_test, y_test). From a folder of such .npy files, "
    "or an Arrow file with columns x and y, rows are read as they are needed: it may be larger than memory.",
)
@click.option("--epochs", type=Whole(1, MOST_EPOCHS), default=5, show_default=True)
@click.option(
    "--engine", default="numpy", show_default=True, shell_complete=completing(engine_names), help="See `twingrad list`."
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
@click.argument("input", shell_complete=completing(data_set_names))
@click.option(
    "--engine", default="numpy", show_default=True, shell_complete=completing(engine_names), help="See `twingrad list`."
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
