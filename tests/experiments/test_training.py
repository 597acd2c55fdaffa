"""`twingrad train`: schedules, validation, early stopping, checkpoints, and what it shows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from experiments import checkpoint, cli, curve, data, training
from experiments.errors import InputError
from experiments.output import Output
from experiments.rows import load_rows, load_spec

ROOT = Path(__file__).parents[2]
KILLS = 60 if os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign" else 1

NETWORK = """
format = "twingrad-model"
version = 1
opset = 2
name = "small"
input = {{ shape = ["N", 8] }}
loss = {{ op = "{loss}" }}
layers = [
    {{ id = "hidden", op = "dense", units = 12 }},
    {{ id = "tanh", op = "activation", activation = "tanh" }},
    {{ id = "noise", op = "dropout", rate = 0.2 }},
    {{ id = "output", op = "dense", units = {units} }},
]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Path:
    """A folder with a network and rows for it, and a regression."""
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("net.toml").write_text(NETWORK.format(loss="softmax_cross_entropy", units=3))
    Path("line.toml").write_text(NETWORK.format(loss="mean_squared_error", units=1))
    x = rng.standard_normal((300, 8)).astype(np.float32)
    classes = np.argmax(x[:, :3], axis=1)
    np.savez("rows.npz", x_train=x[:250], y_train=classes[:250], x_test=x[250:], y_test=classes[250:])
    np.savez("line.npz", x_train=x[:250], y_train=x[:250, :1], x_test=x[250:], y_test=x[250:, :1])
    return tmp_path


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str]) -> Any:
    """`train(options)` gives code, what was printed, and the epochs."""

    def call(*options: str, spec: str = "net.toml", data: str = "rows.npz") -> tuple[int, str, list[dict[str, Any]]]:
        base = ["train", spec, "--data", data, "--batch-size", "40", "--threads", "1", "--json", "said.json"]
        capsys.readouterr()
        code = cli.invoke([*base, "--learning-rate", "0.1", *options])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        said = Path("said.json")
        return code, out + err, json.loads(said.read_text())["rows"] if said.exists() else []

    return call


def same(first: str, second: str) -> None:
    one, two = load_file(first), load_file(second)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


FULL = ["--momentum", "0.9", "--weight-decay", "0.001", "--clip-norm", "1", "--schedule", "cosine", "--warmup", "5"]


def test_a_resumed_training_ends_with_the_same_bits(train: Any) -> None:
    options = ["--optimizer", "adam", "--schedule", "step", "--step-epochs", "2", "--warmup", "5"]
    options += ["--validation", "0.2", "--patience", "9"]
    assert train(*options, "--epochs", "5", "--save", "whole.safetensors")[0] == 0
    whole = train(*options, "--epochs", "5", "--checkpoint", "a.safetensors")[2]
    assert train(*options, "--epochs", "2", "--checkpoint", "b.safetensors")[0] == 0
    code, said, rows = train(
        *(*options, "--epochs", "5", "--checkpoint", "b.safetensors", "--resume", "--save", "resumed.safetensors")
    )
    assert code == 0 and "resuming after epoch 2 from b.safetensors" in said
    same("whole.safetensors", "resumed.safetensors")
    same("a.safetensors", "b.safetensors")
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in part] for part in (whole, rows)]
    assert timeless[0] == timeless[1]
    again = train(*options, "--epochs", "5", "--checkpoint", "b.safetensors", "--resume")
    assert again[0] == 0 and again[2] == rows  # nothing was left to do


@pytest.mark.campaign
def test_killed_at_any_moment_it_loses_nothing(folder: Path, rng: np.random.Generator) -> None:
    options = ["train", "net.toml", "--data", "rows.npz", "--batch-size", "40", "--threads", "1", *FULL]
    options += ["--epochs", "200", "--seed", "3"]
    command = [sys.executable, "-m", "experiments", *options, "--checkpoint"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "whole.safetensors"], env=variables, check=True, capture_output=True)
    for _ in range(KILLS):
        process = subprocess.Popen(
            [*command, "killed.safetensors", "--resume"],
            env=variables,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        while process.poll() is None and not Path("killed.safetensors").exists():
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.4)))
        process.send_signal(signal.SIGKILL)
        process.wait()
        load_file("killed.safetensors")
    subprocess.run([*command, "killed.safetensors", "--resume"], env=variables, check=True, capture_output=True)
    same("whole.safetensors", "killed.safetensors")


def test_an_interrupted_write_leaves_the_checkpoint_before(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("--epochs", "2", "--checkpoint", "run.safetensors")[0] == 0
    before = Path("run.safetensors").read_bytes()

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", broken)
    assert train("--epochs", "4", "--checkpoint", "run.safetensors", "--resume")[0] == cli.INTERRUPTED
    assert Path("run.safetensors").read_bytes() == before
    assert not list(Path().glob(".*.part"))


def test_what_was_measured_is_written_as_json_whatever_ends_a_training(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch_of = training._train_epoch

    def interrupted(*args: Any) -> dict[str, Any]:
        if args[3] == 3:
            raise KeyboardInterrupt
        return epoch_of(*args)

    with monkeypatch.context() as patched:
        patched.setattr(training, "_train_epoch", interrupted)
        code, _, rows = train("--epochs", "5", "--checkpoint", "run.safetensors")
    assert code == cli.INTERRUPTED and [row["epoch"] for row in rows] == [1, 2]
    code, _, rows = train("--epochs", "4", "--checkpoint", "run.safetensors", "--resume")
    assert code == 0 and [row["epoch"] for row in rows] == [1, 2, 3, 4]


def test_why_a_command_ended_is_said_where_its_json_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> dict[str, Any]:
        folder.joinpath("said.json").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_train_epoch", interrupted)
    code = cli.invoke(["train", "net.toml", "--data", "rows.npz", "--threads", "1", "--json", "said.json"])
    said = capsys.readouterr().err
    assert code == cli.INTERRUPTED and "said.json" in said and said.endswith("interrupted\n")


def test_one_file_for_two_options_is_refused(train: Any) -> None:
    for options in (
        ("--save", "run.safetensors", "--checkpoint", "run.safetensors"),
        ("--save", "./run.safetensors", "--checkpoint", "run.safetensors"),
    ):
        code, said, _ = train("--epochs", "1", *options)
        assert code == cli.USER_ERROR and "name the same file" in said
        assert not Path("run.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "history"),
    [
        *(("{}", history) for history in ("5", "[1]", "null", '[{"epoch": "one"}]', "[{}]", "[" * 10_000)),
        *((settings, "[]") for settings in ("[]", "5", "null", "[" * 10_000)),
        ('{"patience": 3}', '[{"epoch": 1, "validation_lozs": 0.5}]'),
    ],
)
def test_a_checkpoint_whose_history_or_settings_are_damaged_is_refused(
    tmp_path: Path, settings: str, history: str
) -> None:
    path = tmp_path / "run.safetensors"
    about = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "settings": settings, "history": history}
    path.write_bytes(to_safetensors({"params.a": np.ones(2)}, about))
    with pytest.raises(InputError, match="is damaged"):
        checkpoint.load(path)


def test_without_a_cache_folder_data_is_a_sample_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINGRAD_CACHE", "~nobody-of-this-name/x")
    found = data.load("mnist")
    assert found.source == "sample"
    assert "there is no user nobody-of-this-name" in f"{found.notice} {found.origin}"


def test_early_stopping_keeps_the_best_weights(train: Any) -> None:
    code, said, rows = train(
        *("--epochs", "60", "--learning-rate", "3", "--validation", "0.3", "--patience", "4"),
        *("--momentum", "0.9", "--save", "best.safetensors"),
    )
    assert code == 0
    losses = [row["validation_loss"] for row in rows]
    best = int(np.argmin(losses)) + 1
    assert len(rows) == best + 4 < 60
    assert f"the best epoch is {best}, and its weights are those that are kept" in said
    x = np.load("rows.npz")["x_test"]
    np.save("x.npy", x)
    assert cli.invoke(["predict", "net.toml", "best.safetensors", "x.npy", "--threads", "1", "--json", "p.json"]) == 0
    found = [row["class"] for row in json.loads(Path("p.json").read_text())["rows"]]
    assert np.mean(found == np.load("rows.npz")["y_test"]) == pytest.approx(rows[best - 1]["test_accuracy"])


def test_the_learning_rate_follows_the_schedule(train: Any) -> None:
    rows = train("--epochs", "4", "--schedule", "step", "--step-epochs", "2", "--step-factor", "0.5")[2]
    assert [row["learning_rate"] for row in rows] == [0.1, 0.1, 0.05, 0.05]
    rows = train("--epochs", "4", "--schedule", "cosine")[2]
    assert rows[-1]["learning_rate"] < 0.01 < rows[0]["learning_rate"]


def test_a_regression_shows_its_error_and_no_accuracy(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, rows = train("--epochs", "2", "--save", "w.safetensors", spec="line.toml", data="line.npz")
    assert code == 0 and "TEST RMSE" in said and "ACCURACY" not in said and "nan" not in said.lower()
    assert rows[-1]["test_rmse"] == pytest.approx(rows[-1]["test_loss"] ** 0.5) and "test_accuracy" not in rows[-1]


def test_the_accuracy_on_the_sample_is_called_so(train: Any) -> None:
    code, said, rows = train("--epochs", "1", "--save", "w.safetensors", spec="mnist-rnn", data="mnist")
    assert code == 0 and "TEST ACCURACY (SAMPLE)" in said and rows[0]["data"] == "sample"


def test_the_curve_is_a_picture_or_drawn(train: Any) -> None:
    pytest.importorskip("matplotlib")
    assert train("--epochs", "3", "--curve", "curve.png")[0] == 0
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    code, said, _ = train("--epochs", "3", "--curve", "-", "--validation", "0.2")
    assert code == 0 and "epoch 1 to 3; loss: ● training, ○ validation, × test" in said


@pytest.mark.parametrize("failure", [InputError("no picture"), KeyboardInterrupt()], ids=["an error", "ctrl-C"])
def test_weights_are_written_before_the_curve(train: Any, monkeypatch: pytest.MonkeyPatch, failure: Any) -> None:
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(curve, "picture", fail)
    assert train("--epochs", "1", "--curve", "curve.png", "--save", "kept.safetensors")[0] != 0
    assert load_file("kept.safetensors")


def test_a_drawn_curve_has_its_marks_where_the_losses_are() -> None:
    history = [{"epoch": epoch, "loss": 10.0 - epoch} for epoch in range(1, 11)]
    lines = curve.drawn(history)
    assert lines[0].startswith("9.00 ┤●") and lines[9].endswith("●") and lines[9].startswith("   0 ┤")
    assert curve.drawn([{"epoch": 1, "loss": float("nan")}]) == []
    assert len(curve.drawn([{"epoch": 1, "loss": 1.0}])) == 12


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--patience", "3"], "--patience stops by the validation loss: give --validation"),
        (["--resume"], "--resume resumes from the file that --checkpoint names"),
        (["--curve", "curve.txt"], "--curve: expected a file that ends in .png, .svg, .pdf, or -, found curve.txt"),
        (["--validation", "0.001"], "leaves none of a part"),
        (["--validation", "1"], "--validation"),
        (["--validation", "nan"], "--validation: expected a share from 0 to below 1, found nan"),
        (["--optimizer", "adam", "--momentum", "0.9"], "adam has no setting 'momentum'"),
        (["--clip-norm", "0"], "clip_norm must be a number above 0"),
        (["--schedule", "step", "--step-factor", "2"], "factor must be above 0 and at most 1"),
        (["--engine", "jax", "--schedule", "cosine"], "engine jax: its learning rate cannot change"),
        (["--engine", "jax", "--checkpoint", "c.safetensors"], "engines that can do both: numpy, julia, torch"),
        (["--checkpoint", "no/such/c.safetensors"], "existing folder"),
        (["--checkpoint", "c" * 300], "--checkpoint: cannot write"),
        (["--checkpoint", "rows.npz"], "rows.npz exists: give --resume"),
        (["--checkpoint", "rows.npz", "--resume"], "name the same file"),
        (["--checkpoint", "other.npz", "--resume"], "not a safetensors file"),
        (["--checkpoint", "weights.safetensors", "--resume"], "no checkpoint of `twingrad train`"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(options: list[str], expected: str, train: Any) -> None:
    if "weights.safetensors" in options:
        assert train("--epochs", "1", "--save", "weights.safetensors")[0] == 0
    shutil.copy("rows.npz", "other.npz")
    code, said, _ = train("--epochs", "1", *options)
    assert code == 2 and expected in said and "EPOCH" not in said


VOLUMES = """
format = "twingrad-model"
version = 1
opset = 2
name = "volumes"
input = { shape = ["N", 3, 4, 5] }
loss = { op = "mean_squared_error" }
layers = [{ id = "flat", op = "flatten" }, { id = "output", op = "dense", units = 6 },
          { id = "shaped", op = "reshape", shape = [2, 3] }]
"""


@pytest.mark.parametrize(
    ("rows", "targets", "reason"),
    [
        ((60,), (6,), None),
        ((3, 20), (3, 2), "targets of shape (N, 2, 3), found (9, 3, 2): transpose their axes"),
        ((12, 5), (2, 1, 3), None),
        ((3, 1, 4, 5), (2, 3), None),
        ((4, 5, 3), (2, 3), "rows of shape (N, 3, 4, 5), found (9, 4, 5, 3): transpose their axes"),
        ((5, 4, 3), (2, 3), "rows of shape (N, 3, 4, 5), found (9, 5, 4, 3): transpose their axes"),
        ((3, 4, 4), (2, 3), "rows of shape (N, 3, 4, 5), found (9, 3, 4, 4)"),
    ],
)
def test_axes_may_be_split_and_merged_but_not_be_in_another_order(
    rows: tuple[int, ...], targets: tuple[int, ...], reason: str | None, train: Any, rng: np.random.Generator
) -> None:
    Path("volumes.toml").write_text(VOLUMES)
    np.savez("volumes.npz", x_train=rng.random((9, *rows), np.float32), y_train=rng.random((9, *targets), np.float32))
    code, said, _ = train("--epochs", "1", "--batch-size", "3", spec="volumes.toml", data="volumes.npz")
    assert code == (0 if reason is None else 2), said
    assert reason is None or reason in said


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("spec", ["net.toml", "line.toml"])
def test_a_row_that_makes_no_number_is_named_by_predict(
    spec: str, value: float, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = spec.replace("toml", "npz").replace("net", "rows")
    assert train("--epochs", "1", "--save", "w.safetensors", spec=spec, data=data)[0] == 0
    x = np.zeros((5, 8), np.float32)
    x[3] = value
    np.save("x.npy", x)
    code = cli.invoke(["predict", spec, "w.safetensors", "x.npy", "--json", "predicted.json"])
    said = capsys.readouterr().err
    assert code == 2 and "error: x.npy: row 3 makes " in said


def test_a_checkpoint_that_another_training_has_written_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    one, other = (checkpoint.Checkpoint({"seed": seed}, {"w": np.ones(2)}, {}) for seed in (1, 2))
    for _ in range(2):
        one.save(path)
    written = path.read_bytes()
    with pytest.raises(InputError, match=r"another program has written .* in the meantime"):
        other.save(path)
    assert path.read_bytes() == written
    resumed = checkpoint.load(path)
    resumed.save(path)
    with pytest.raises(InputError, match="in the meantime"):
        one.save(path)
    path.unlink()
    with pytest.raises(InputError, match="in the meantime"):
        resumed.save(path)


def test_the_loss_of_an_epoch_counts_classes_as_evaluation_does(train: Any) -> None:
    text = NETWORK.format(loss="softmax_cross_entropy", units=3).replace("opset = 2", "opset = 4")
    text = text.replace('    { id = "noise", op = "dropout", rate = 0.2 },\n', "")
    text = text.replace(" }\nlayers", ", ignored_class = 1, class_weights = [1.0, 2.0, 30.0] }\nlayers")
    Path("counted.toml").write_text(text)
    with np.load("rows.npz") as found:
        x, y = found["x_train"], found["y_train"]
    order = np.argsort(y, kind="stable")  # so that batches have few or many of a class
    np.savez("same.npz", x_train=x[order], y_train=y[order], x_test=x, y_test=y)
    code, _, (row,) = train("--epochs", "1", "--learning-rate", "1e-12", spec="counted.toml", data="same.npz")
    assert code == 0 and row["loss"] == pytest.approx(row["test_loss"], rel=1e-5)


def test_a_checkpoint_beyond_the_epochs_that_are_asked_for_is_named(train: Any) -> None:
    options = ["--checkpoint", "run.safetensors", "--save", "w.safetensors"]
    assert train("--epochs", "3", *options)[0] == 0
    Path("w.safetensors").unlink()
    code, said, _ = train("--epochs", "2", *options, "--resume")
    assert code == 2 and "--epochs 2: run.safetensors is of epoch 3; give as many or more" in said
    assert not Path("w.safetensors").exists()
    assert train("--epochs", "3", *options, "--resume")[0] == 0 and Path("w.safetensors").exists()


def test_other_settings_than_those_of_the_checkpoint_are_named(train: Any) -> None:
    options = ["--epochs", "1", "--checkpoint", "run.safetensors"]
    assert train(*options)[0] == 0
    code, said, _ = train(*options, "--resume", "--batch-size", "50", "--seed", "4")
    assert code == 2 and "was made with" in said and "batch size 40, not 50" in said and "seed 0, not 4" in said


def test_a_loss_that_is_not_finite_names_its_epoch_and_step(train: Any) -> None:
    x = np.zeros((250, 8), np.float32)
    x[100, 3] = np.nan
    np.savez("bad.npz", x_train=x, y_train=np.zeros(250, np.int64))
    code, said, _ = train("--epochs", "2", data="bad.npz")
    assert code == 1 and "error: epoch 1: step " in said
    order = np.random.default_rng([0, 1]).permutation(250)
    assert f"step {np.flatnonzero(order == 100)[0] // 40 + 1} of the epoch" in said


def test_step_numbers_are_those_of_the_epoch_in_the_words_of_every_engine() -> None:
    ours = "step 3 of the epoch: the loss is nan"
    theirs = "the loss became nan at step 47 of training (step 3 of 5 in its epoch): lower the learning rate"
    assert training._renumbered(ours, 2, 40, 90) == "epoch 2: step 43 of the epoch: the loss is nan"
    assert "at step 47 of training (step 43 of 90): lower" in training._renumbered(theirs, 2, 40, 90)


def test_a_last_batch_that_is_too_small_is_refused_before_anything_is_trained(train: Any) -> None:
    text = Path("net.toml").read_text()
    first = text.index("layers = [") + len("layers = [")
    Path("norm.toml").write_text(f'{text[:first]}\n  {{ id = "norm", op = "batch_norm" }},{text[first:]}')
    arrays = dict(np.load("rows.npz"))
    np.savez("odd.npz", x_train=arrays["x_train"][:241], y_train=arrays["y_train"][:241])
    code, said, _ = train("--epochs", "1", spec="norm.toml", data="odd.npz")
    assert code != 0 and "241 rows in batches of 40 leave a batch of 1" in said and "EPOCH" not in said


def test_targets_of_mapped_files_are_one_array(folder: Path) -> None:
    """A view of a file is another array each time, which is written out for the worker anew."""
    x, y = np.zeros((30, 8), np.float32), np.arange(30) % 3
    np.save(folder / "x_train.npy", x)
    np.save(folder / "y_train.npy", y)
    for spec, targets in (("net.toml", y), ("line.toml", y[:, np.newaxis])):
        np.save(folder / "y_train.npy", targets)
        found, _ = load_rows(str(folder), None, load_spec(spec), Output("train"))
        assert found.files and np.asarray(found.y) is found.y


def test_a_validation_loss_that_is_no_number_is_not_the_best() -> None:
    def history(*losses: float) -> list[dict[str, Any]]:
        return [{"epoch": epoch, "validation_loss": loss} for epoch, loss in enumerate(losses, 1)]

    assert training._best(history(float("nan"), 2.0, 1.0, 1.0)) == 3
    assert training._is_over(history(1.0, float("nan"), float("nan")), 2)
    assert not training._is_over(history(float("nan"), 2.0, 3.0), 2)
