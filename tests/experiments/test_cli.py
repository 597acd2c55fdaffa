"""The command line explains itself, tells mistakes from failures, keeps what is finished, shows no traceback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry
from bridge.libjulia import sysimage
from bridge.registry import Availability, Registered
from experiments import cli, doctor, papers, sweep
from experiments.measures import ablation, roofline
from experiments.measures.registry import MEASURES
from experiments.microbenchmarks.registry import SYSTEMS
from experiments.report import Built
from experiments.results import COMMITTED, Results

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(cli.cli.commands)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is found out of a Julia, once for all tests, which has the system image that there is."""
    folder = tmp_path_factory.mktemp("cache")
    if sysimage.image_folder().is_dir():
        (folder / "julia").mkdir()
        (folder / "julia" / "sysimage").symlink_to(sysimage.image_folder())
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """No network, no real data, a cache without them: the embedded sample."""
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)


class Said:
    """What a command printed, and the code it ended with."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in out + err, err


@pytest.fixture
def twingrad(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the command in this process."""

    def call(*arguments: str | Path) -> Said:
        capsys.readouterr()
        code = cli.invoke(list(map(str, arguments)))
        return Said(code, *capsys.readouterr())

    return call


@contextlib.contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """The command in its own process, ended at the latest with the test."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "experiments", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_some(*more: str | Path) -> list[str | Path]:
    return ["run", "mnist-rnn-e", "--engines", "numpy", "--measure", "time", "--threads", "1", *more]


# Help -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example_and_writes_json(command: str, twingrad: Any) -> None:
    said = twingrad(command, "--help")
    assert said.code == 0
    assert f"twingrad {command}" in said.out.split("Examples:")[1]
    assert ("--json FILE" in said.out) == (command not in ("gradbench", "completion"))  # which other programs read


def test_the_help_of_microbench_names_every_system() -> None:
    (option,) = [option for option in cli.cli.commands["microbench"].params if option.name == "systems"]
    assert option.help.endswith(f": {', '.join(SYSTEMS)}.")


def test_the_commands_are_those_of_the_readme(twingrad: Any) -> None:
    expected = {"list", "run", "race", "microbench", "report", "paper", "reproduce", "train", "predict", "doctor"}
    expected |= {"archive", "check", "compare", "completion", "docs", "gradbench", "merge"}
    assert expected == set(COMMANDS)
    said = twingrad("--help")
    assert said.code == 0 and all(name in said.out for name in expected)


def test_the_command_alone_shows_its_help(twingrad: Any) -> None:
    said = twingrad()
    assert (said.code, said.out, said.err) == (0, twingrad("--help").out, "")


def test_help_tells_of_every_measure(twingrad: Any) -> None:
    measures = twingrad("run", "--help").out.partition("Measures:")[2].partition("Examples:")[0]
    told = re.findall(r"^    (\w+) +\S", measures, flags=re.MULTILINE)
    assert told == [*MEASURES]


def test_the_module_is_the_same_command() -> None:
    with started("list") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "mnist-rnn-d" in out


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "No such command"),
        (["run"], "Missing argument 'PAPER...'"),
        (["run", "mnist-rnn-x"], "did you mean 'mnist-rnn-"),
        (["run", "mnist-rnn-e", "--engines", "numpy,torhc"], "did you mean 'torch'"),
        (["run", "mnist-rnn-e", "--engines", "numpy,,torch"], "empty name"),
        (["run", "mnist-rnn-e", "--engines", "numpy,numpy"], "names something twice"),
        (["run", "mnist-rnn-e", "--measure", "speed"], "no measure 'speed'; measures: time, memory, own"),
        (["run", "mnist-rnn-e", "--seeds", "0"], "'0' is not a whole number from 1"),
        (["run", "mnist-rnn-e", "--profile", "half"], "'half' is not one of 'full', 'quick'"),
        (["run", "mnist-rnn-e", "--data-dir", "/nowhere"], "/nowhere"),
        (
            ["race", "mnist-rnn-e", "--engines", "numpy,jax", "--base", "torch"],
            "--base torch: not among the engines",
        ),
        (["microbench", "--systems", "caffe"], "no system 'caffe'; systems: numpy-eager, "),
        (["report"], "nothing has been run into it"),
        (["paper", "--results", "elsewhere"], "nothing has been run into it"),
        (["compare"], "results: there is no such results folder or archive"),
        (["merge", "absent"], "absent: neither a results folder nor an archive"),
        (["run", "mnist-rnn-e", "--shard", "3/2"], "--shard '3/2': expected i/n, such as 1/4"),
        (["run", "mnist-rnn-e", "--costs", "costs.csv"], "--costs says how shards are cut"),
        (["run", "mnist-rnn-e", "--shard", "1/2", "--costs", "absent.csv"], "absent.csv: cannot be read"),
        (["train", "absent.toml", "--data", "mnist"], "absent.toml: there is no such file"),
        (["train", "mnist-rn", "--data", "mnist"], "did you mean 'mnist-rnn'"),
        (
            ["train", "mnist-rnn", "--data", "cifar"],
            "cifar: neither an .npz or .arrow file, a folder of .npy files, nor a data set (generated, imdb, mnist)",
        ),
        (["train", "mnist-rnn", "--data", "absent.npz"], "absent.npz: there is no such file"),
        (["train", "mnist-rnn", "--data", "mnist", "--save", "no/such/folder/w.safetensors"], "existing folder"),
        (["train", "mnist-rnn", "--data", "mnist", "--learning-rate", "-1"], "learning_rate must be a number"),
        (["train", "mnist-rnn", "--data", "mnist", "--batch-size", "100000"], "of 100,000 rows is more than the"),
        (["predict", "mnist-rnn", "absent.safetensors", "mnist"], "absent.safetensors"),
        (["list", "--json", "no/such/folder/list.json"], "--json: cannot write"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(arguments: list[str], expected: str, twingrad: Any) -> None:
    said = twingrad(*arguments)
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert expected in said.err


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "--json", "-"]], ids=" ".join)
def test_output_on_a_full_disk_is_one_line(arguments: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("does not apply: this system has no /dev/full")
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "experiments", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert run.returncode == 1
    assert run.stderr.endswith("error: the output could not be written: No space left on device\n")
    assert "Traceback" not in run.stderr


def test_a_place_without_write_access_is_refused_before_training(
    twingrad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    said = twingrad("train", "mnist-rnn", "--data", "mnist", "--save", tmp_path / "w.safetensors")
    assert said.code == 2
    assert "existing folder with write access" in said.err and not said.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "mnist-rnn-e", "--engines", "numpy,julia"],
        ["race", "mnist-rnn-e", "--engines", "julia"],
        ["train", "mnist-rnn", "--data", "mnist", "--engine", "julia"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_julia_that_does_not_work_is_named_before_anything_is_run(
    arguments: list[str], broken_julia: str, twingrad: Any
) -> None:
    said = twingrad(*arguments)
    assert said.code == 2
    assert re.search(r"^error: engine julia: ", said.err)
    assert broken_julia in said.err
    assert not list(Path("results").rglob("*.json"))


def test_a_results_folder_that_cannot_be_written(twingrad: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    said = twingrad(*run_some("--results", tmp_path / "taken"))
    assert said.code == 2
    assert re.search(r"error: cannot write .*taken.*--results DIR", said.err)


def test_committed_results_are_not_run_over(twingrad: Any, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / COMMITTED).touch()
    said = twingrad(*run_some())
    assert said.code == 2 and "committed" in said.err


def test_a_second_run_in_the_same_folder(twingrad: Any, tmp_path: Path) -> None:
    with started(*run_some("--seeds", "50")) as first:
        assert first.stdout is not None
        while "[ 1/50]" not in first.stdout.readline():
            assert first.poll() is None
        said = twingrad(*run_some())
        assert said.code == 2
        assert f"is in use by another twingrad process (process {first.pid})" in said.err


# Looking around -------------------------------------------------------------------------------------------------------


def test_list_names_everything_and_why_an_engine_is_not_available(
    twingrad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Registered.availability

    def without_torch(self: Registered) -> Availability:
        return Availability(False, "torch is not installed") if self.name == "torch" else real(self)

    monkeypatch.setattr(Registered, "availability", without_torch)
    said = twingrad("list", "--json", "list.json")
    assert said.code == 0
    for name in (*papers.paper_keys(), *registry.names(), *papers.models()):
        assert name in said.out
    assert re.search(r"torch .* no +torch is not installed", said.out)
    rows = json.loads(Path("list.json").read_text())["rows"]
    assert {row["kind"] for row in rows} == {"paper", "engine", "model", "data"}
    (row,) = [row for row in rows if row["name"] == "torch"]
    assert (row["available"], row["reason"]) == (False, "torch is not installed")


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor asks for no steps of each study's network, which takes seconds."""
    monkeypatch.setattr(doctor, "_threads_in_step", lambda *_: "one thread")


@pytest.mark.usefixtures("no_steps")
def test_the_doctor_finds_this_machine_fit_and_says_what_the_data_needs(twingrad: Any) -> None:
    said = twingrad("doctor", "--json", "doctor.json")
    assert said.code == 0
    assert "Everything essential is there." in said.out
    findings = {row["name"]: row for row in json.loads(Path("doctor.json").read_text())["rows"]}
    assert {"Python", "numpy", "BLAS", "CPU", "data mnist", "results", "disk", "typst", "memray"} <= findings.keys()
    assert findings["data mnist"]["state"] == "note"
    assert "TWINGRAD_DATA" in findings["data mnist"]["advice"]


@pytest.mark.usefixtures("no_steps")
def test_the_doctor_ends_with_1_when_results_have_no_place(twingrad: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    said = twingrad("doctor", "--results", tmp_path / "taken")
    assert said.code == 1
    assert re.search(r"PROBLEM +results", said.out)


@pytest.mark.usefixtures("no_steps")
def test_a_damaged_data_file_is_named_and_no_sample_stands_in_for_it(twingrad: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte").write_bytes(b"not an IDX file")
    said = twingrad("doctor", "--data-dir", tmp_path)
    assert said.code == 1
    assert "train-images-idx3-ubyte" in said.out
    said = twingrad(*run_some("--data-dir", tmp_path))
    assert said.code == 2
    assert said.err.startswith("error: ") and "train-images-idx3-ubyte" in said.err
    assert "sample" not in said.out


# Runs -----------------------------------------------------------------------------------------------------------------


def test_a_run_is_recorded_and_resumed(twingrad: Any, tmp_path: Path) -> None:
    said = twingrad(*run_some("--seeds", "2", "--json", "run.json"))
    assert said.code == 0
    assert "embedded sample" in said.out
    assert re.search(r"\[2/2\] mnist-rnn-e  numpy +time +seed 1  accuracy of the sample 0\.\d{4}", said.out)
    document = json.loads(Path("run.json").read_text())
    assert document.keys() == {"schema", "command", "provenance", "rows", "errors"}
    assert (document["command"], document["errors"]) == ("run", [])
    assert [(row["engine"], row["seed"], row["status"]) for row in document["rows"]] == [
        ("numpy", 0, "ok"),
        ("numpy", 1, "ok"),
    ]
    assert document["rows"][0]["data_source"] == "sample"
    said = twingrad(*run_some("--seeds", "2"))
    assert said.code == 0 and "2 of them were there already" in said.out
    assert (tmp_path / "results" / "tidy" / "runs.csv").is_file()


def test_json_to_standard_output_is_json_alone(twingrad: Any) -> None:
    said = twingrad(*run_some("--seeds", "1", "--json", "-"))
    assert said.code == 0
    assert len(json.loads(said.out)["rows"]) == 1
    assert "accuracy of the sample" in said.err


def test_a_mistake_is_in_the_json_too(twingrad: Any) -> None:
    said = twingrad("report", "--json", "-")
    assert said.code == 2
    (error,) = json.loads(said.out)["errors"]
    assert "nothing has been run into it" in error


def test_a_failed_run_is_recorded_and_ends_with_1(twingrad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = papers.load_paper("mnist-rnn-e")
    wild = paper.training.learning_rate.model_copy(update={"value": 3e38})
    diverging = paper.model_copy(update={"training": paper.training.model_copy(update={"learning_rate": wild})})
    monkeypatch.setattr("experiments.cli.common.load_paper", lambda _: diverging)
    said = twingrad(*run_some("--seeds", "1", "--json", "run.json"))
    assert said.code == 1
    assert re.search(r"^error: mnist-rnn-e numpy time: .*(NaN|nan|inf|Inf).*step", said.err, re.MULTILINE)
    (record,) = Results(Path("results")).records()
    assert record["status"] == "failed" and "step" in record["error"]
    document = json.loads(Path("run.json").read_text())
    assert document["rows"][0]["status"] == "failed" and document["errors"]


def test_an_engine_of_the_paper_that_is_missing_is_left_out_with_its_reason(
    twingrad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "experiments.sweep.engines.ENGINES",
        {**registry.ENGINES, "torch": Registered("torch", "PyTorch", "bridge.adapters.torch:X", ("no-such-package",))},
    )
    paper = papers.load_paper("mnist-rnn-e")
    only_torch = paper.model_copy(update={"engines": [row for row in paper.engines if row.name == "torch"]})
    monkeypatch.setattr("experiments.cli.common.load_paper", lambda _: only_torch)
    said = twingrad("run", "mnist-rnn-e", "--measure", "time", "--seeds", "1", "--threads", "1")
    assert said.code == 0
    assert re.search(r"left out: mnist-rnn-e torch time: .*no-such-package is not installed", said.out)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_what_is_kept_and_resumes(
    number: signal.Signals, code: int, twingrad: Any, tmp_path: Path
) -> None:
    with started(*run_some("--seeds", "50", "--json", "run.json")) as process:
        assert process.stdout is not None
        line = ""
        while "[ 1/50]" not in line:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    kept = int(re.search(r"interrupted: (\d+) of 50 runs are finished and kept", out)[1])  # type: ignore[index]
    assert "run the same command again" in out
    assert "Traceback" not in out + err
    assert len(list((tmp_path / "results" / "raw").glob("*.json"))) == kept >= 1
    assert json.loads(Path("run.json").read_text())["errors"] == ["interrupted"]
    said = twingrad(*run_some("--seeds", "1"))
    assert "1 of them were there already" in said.out


def test_a_killed_run_leaves_whole_results_and_no_worker(twingrad: Any, tmp_path: Path) -> None:
    with started(*run_some("--seeds", "50")) as process:
        assert process.stdout is not None
        while "[ 1/50]" not in process.stdout.readline():
            assert process.poll() is None
        process.kill()
        process.wait(timeout=60)
    for path in (tmp_path / "results" / "raw").glob("*.json"):
        json.loads(path.read_text())
    said = twingrad(*run_some("--seeds", "1"))
    assert said.code == 0 and "1 of them were there already" in said.out
    assert not (tmp_path / "results" / ".work").exists() or not list((tmp_path / "results" / ".work").iterdir())


def test_a_race_prints_steps_and_ratios(twingrad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SAMPLES", 1)  # of this machine's rates
    monkeypatch.setattr(roofline, "SECONDS", 0.001)
    said = twingrad(
        *("race", "mnist-rnn-e", "--engines", "numpy,torch", "--rounds", "1", "--threads", "1"),
        *("--base", "numpy", "--json", "race.json"),
    )
    assert said.code == 0, said.err
    assert "on the embedded sample: 1 rounds of 600 steps, batch 100, threads 1" in said.out
    assert "RATIO TO numpy" in said.out
    rows = {row["engine"]: row for row in json.loads(Path("race.json").read_text())["rows"]}
    assert rows["numpy"]["ratio"] == 1.0
    assert rows["torch"]["ratio"] == rows["torch"]["microseconds_per_step"] / rows["numpy"]["microseconds_per_step"]
    assert "OF THE LIMIT" in said.out and "limit of a step: " in said.out
    assert 0 < rows["numpy"]["limit_share"] < 1


def test_output_that_nobody_reads_ends_the_command_quietly() -> None:
    with started("list") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.wait(timeout=60)
        assert process.stderr.read() == ""


# Checking a model, and running a study that is changed ---------------------------------------------------------------


def test_a_model_is_drawn_with_its_shapes_and_parameters(twingrad: Any) -> None:
    said = twingrad("check", "mnist-cnn", "--json", "check.json")
    assert said.code == 0
    assert re.search(r"^conv +conv2d filters=6 .*\(N, 6, 26, 26\) +54  weight \(6, 1, 3, 3\)$", said.out, re.M)
    assert "loss         softmax_cross_entropy" in said.out and "targets (N) classes" in said.out
    assert "mnist-cnn: 8 layers, 86,070 parameters (344 kB in float32)" in said.out
    rows = json.loads(Path("check.json").read_text())["rows"]
    assert [row["layer"] for row in rows][:2] == ["image", "conv"] and rows[1]["output"] == [6, 26, 26]
    for name in papers.models():
        assert twingrad("check", name).code == 0


def test_a_loss_is_drawn_with_its_settings(twingrad: Any) -> None:
    text = papers.model_path("mnist-cnn").read_text().replace("opset = 2", "opset = 4")
    weights = ", ".join(["1.5"] * 10)
    Path("net.toml").write_text(f"{text}ignored_class = 3\nclass_weights = [{weights}]\n")
    said = twingrad("check", "net.toml")
    assert said.code == 0 and "softmax_cross_entropy class_weights=10 numbers ignored_class=3" in said.out


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("units = 64", "units = 0", 'layers[1] (id "rnn").units: found 0'),
        ("units = 64", "unit = 64", 'layers[1] (id "rnn").unit:'),
        ("shape = [4, 196]", "shape = [4, 195]", "layers[0]"),
    ],
)
def test_what_is_wrong_in_a_model_is_named_by_its_key(key: str, value: str, expected: str, twingrad: Any) -> None:
    text = papers.model_path("mnist-rnn").read_text()
    assert key in text
    Path("net.toml").write_text(text.replace(key, value))
    said = twingrad("check", "net.toml")
    assert said.code == 2 and said.err.startswith("error: net.toml") and expected in said.err


def test_seeds_by_number_and_by_name(twingrad: Any) -> None:
    options = run_some("--profile", "sample", "--results", "some", "--json", "-")
    said = twingrad(*options, "--seeds", "1,3")
    assert said.code == 0 and sorted({row["seed"] for row in json.loads(said.out)["rows"]}) == [1, 3]
    for given in ("0", "a", "3,x", "5000", "1,,2"):
        assert twingrad(*options, "--seeds", given).code == 2


def test_seeds_that_no_run_is_planned_with_are_refused(twingrad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sweep.plan
    monkeypatch.setattr(sweep, "plan", lambda *of, **more: [job for job in plan(*of, **more) if job.seed < 2])
    said = twingrad(*run_some("--seeds", "3,5"))
    assert said.code == 2 and "no run has a seed of 3, 5" in said.err


def test_a_changed_study_has_a_folder_of_its_own(twingrad: Any) -> None:
    options = run_some("--profile", "sample", "--seeds", "1", "--json", "-")
    usual = json.loads(twingrad(*options).out)["rows"]
    slower = ["--set", "training.learning_rate=0.0001", "--set", "training.batch_size=300"]
    refused = twingrad(*options, *slower)
    assert refused.code == 2 and "give --results with a new folder for --set" in refused.err
    said = twingrad(*options, *slower, "--results", "slow")
    assert said.code == 0, said.err
    changed = json.loads(said.out)["rows"]
    (record,) = (json.loads(file.read_text()) for file in Path("slow/raw").glob("*.json"))
    assert record["config"]["batch_size"] == 300 and record["config"]["training"]["training.learning_rate"] == 0.0001
    assert changed[0]["test_accuracy"] < usual[0]["test_accuracy"]
    assert twingrad(*options, *slower, "--results", "slow").code == 0
    small = ["microbench", "--systems", "numpy-eager"]
    for command in (options, ["report"], ["race", "mnist-rnn-e", "--engines", "numpy"], small):
        again = twingrad(*command, "--results", "slow")
        assert again.code == 2 and "--set training.batch_size=300 training.learning_rate=0.0001" in again.err


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("training.learnin_rate=0.1", "has no such setting; training has batch_size,"),
        ("a.b.c=1", "there is no such section"),
        ("training.optimizer=adm", "training.optimizer.value"),
        ("training.learning_rate", "expected section.key=value"),
        ("network.units=65", "units"),
        ("title=x", "has no such setting"),
    ],
)
def test_a_setting_that_cannot_be_is_named_by_its_key(setting: str, expected: str, twingrad: Any) -> None:
    said = twingrad(*run_some("--set", setting, "--results", "other"))
    assert said.code == 2 and said.err.startswith("error: --set") and expected in said.err
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("twingrad ru", ["run"]),
        ("twingrad run mnist-r", ["mnist-rnn-d", "mnist-rnn-e"]),
        ("twingrad run mnist-cnn --engines numpy,ja", ["numpy,jax"]),
        ("twingrad microbench --systems torch,numpy", ["torch,numpy-compiled", "torch,numpy-eager"]),
        ("twingrad train mnist-c", ["mnist-cnn", "mnist-cnn-bias"]),
        ("twingrad train mnist-cnn --sched", ["--schedule"]),
        ("twingrad train mnist-cnn --schedule co", ["constant", "cosine"]),
    ],
)
def test_bash_completes_commands_options_and_names(
    line: str, expected: list[str], twingrad: Any, tmp_path: Path
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("does not apply: there is no bash")
    program = tmp_path / "twingrad"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m experiments "$@"\n')
    program.chmod(0o755)
    script = twingrad("completion", "bash").out.replace("complete -o nosort", ": complete -o nosort")
    words = f"COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}"
    asked = f"{script}\n{words}\n_twingrad_completion {program}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", asked], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell: str, twingrad: Any) -> None:
    said = twingrad("completion", shell)
    assert said.code == 0 and f"_TWINGRAD_COMPLETE={shell}_complete" in said.out


# By hand --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Two classes that a line divides, in an .npz."""
    x = rng.standard_normal((400, 784)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    x[:, 0] *= 20
    np.savez(tmp_path / "rows.npz", x_train=x[:300], y_train=y[:300], x_test=x[300:], y_test=y[300:])
    return tmp_path / "rows.npz"


def test_training_and_prediction_by_hand(twingrad: Any, rows: Path, tmp_path: Path) -> None:
    trained = twingrad(
        *("train", "mnist-rnn", "--data", rows, "--epochs", "3", "--learning-rate", "0.1", "--threads", "1"),
        *("--engine", "numpy", "--save", "weights.safetensors", "--json", "train.json"),
    )
    assert trained.code == 0, trained.err
    epochs = json.loads(Path("train.json").read_text())["rows"]
    assert [row["epoch"] for row in epochs] == [1, 2, 3]
    assert epochs[2]["loss"] < epochs[0]["loss"]

    np.save("input.npy", np.load(rows)["x_test"])
    said = twingrad(
        *("predict", "mnist-rnn", "weights.safetensors", "input.npy", "--engine", "numpy", "--threads", "1"),
        *("--save", "outputs.npy", "--show", "3", "--json", "predict.json"),
    )
    assert said.code == 0, said.err
    predicted = json.loads(Path("predict.json").read_text())["rows"]
    assert len(predicted) == 100 and "and 97 more rows" in said.out
    assert np.load("outputs.npy").shape == (100, 10)
    right = np.mean([row["class"] for row in predicted] == np.load(rows)["y_test"])
    assert right == pytest.approx(epochs[2]["test_accuracy"])


def test_prediction_for_a_data_set_says_how_good_it_is(twingrad: Any) -> None:
    assert twingrad("train", "mnist-rnn", "--data", "mnist", "--epochs", "1", "--save", "w.safetensors").code == 0
    said = twingrad("predict", "mnist-rnn", "w.safetensors", "mnist")
    assert said.code == 0
    assert re.search(r"accuracy \(of the sample\) 0\.\d{4} on 297 rows", said.out)


def test_training_goes_on_from_weights(twingrad: Any, rows: Path) -> None:
    base = ["train", "mnist-rnn", "--data", rows, "--engine", "numpy", "--epochs", "1", "--threads", "1"]
    assert twingrad(*base, "--save", "first.safetensors").code == 0
    first = twingrad(*base, "--json", "-")
    second = twingrad(*base, "--weights", "first.safetensors", "--json", "-")
    assert json.loads(second.out)["rows"][0]["loss"] < json.loads(first.out)["rows"][0]["loss"]


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x_train": np.zeros((3, 784), np.float32)}, "expected the arrays x_train and y_train, found x_train"),
        (
            {"x_train": np.zeros((3, 700)), "y_train": np.zeros(3, int)},
            r"expects rows of shape (N, 784), found (3, 700)",
        ),
        ({"x_train": np.zeros((3, 784)), "y_train": np.zeros(2, int)}, "3 rows but 2 labels"),
        ({"x_train": np.zeros((3, 784)), "y_train": np.array([0, 1, 10])}, "10"),
        ({"x_train": np.array([["a"]]), "y_train": np.zeros(1, int)}, "rows must be numbers"),
        (
            {"x_train": np.full((1, 784), 1e300), "y_train": np.zeros(1, int)},
            "for float32, such as 1.0·10³⁰⁰ in row 0",
        ),
        ({"x_train": np.zeros((0, 784)), "y_train": np.zeros(0, int)}, "bad.npz: there are no rows"),
        ({"x_train": np.zeros((3, 784)), "y_train": np.int64(1)}, "expected a label, or numbers, for each row"),
        ({"x_train": np.zeros((2, 784)), "y_train": np.array(["a", "b"])}, "expected a label, or numbers, for"),
        ({"x_train": np.zeros((2, 784)), "y_train": np.zeros(2, complex)}, "expected a label, or numbers, for"),
        ({"x_train": np.array([None]), "y_train": np.zeros(1, int)}, "not an .npz file that can be read"),
        (
            {"x_train": np.zeros((3, 784)), "y_train": np.zeros(3, int), "x_test": np.zeros((2, 784))},
            "bad.npz: x_test is alone: give both x_test and y_test, or neither",
        ),
        (
            {"x_train": np.zeros((3, 784)), "y_train": np.zeros(3, int), "y_test": np.zeros(2, int)},
            "bad.npz: y_test is alone: give both x_test and y_test, or neither",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    arrays: dict[str, np.ndarray], expected: str, twingrad: Any, tmp_path: Path
) -> None:
    np.savez(tmp_path / "bad.npz", allow_pickle=True, **arrays)
    said = twingrad("train", "mnist-rnn", "--data", "bad.npz", "--engine", "numpy", "--threads", "1")
    assert said.code in (1, 2)
    assert said.err.startswith("error: ") and expected in said.err


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["check", "model.toml", "--json", "model.toml"], "SPEC and --json"),
        (["train", "model.toml", "--data", "rows.npz", "--json", "rows.npz"], "--data and --json"),
        (["train", "model.toml", "--data", "rows.npz", "--save", "new", "--json", "new"], "--save and --json"),
        (["train", "model.toml", "--data", "folder", "--json", "folder/x_train.npy"], "--data and --json"),
        (["train", "model.toml", "--data", "rows.npz", "--save", "model.toml"], "SPEC and --save"),
        (["predict", "model.toml", "w.safetensors", "rows.npy", "--save", "rows.npy"], "INPUT and --save"),
    ],
)
def test_what_a_command_reads_is_not_replaced(arguments: list[str], options: str, twingrad: Any) -> None:
    Path("model.toml").write_text(papers.model_path("mnist-rnn").read_text())
    Path("folder").mkdir()
    for name in ("rows.npz", "rows.npy", "w.safetensors", "folder/x_train.npy"):
        Path(name).write_text("mine")
    before = {path: path.read_text() for path in Path().rglob("*") if path.is_file()}
    said = twingrad(*arguments)
    assert said.code == 2 and f"error: {options} name the same file, " in said.err
    assert {path: path.read_text() for path in before} == before


def test_weights_of_another_network_are_refused(twingrad: Any, rows: Path) -> None:
    text = papers.model_path("mnist-rnn").read_text().replace("units = 64", "units = 32")
    Path("small.toml").write_text(text)
    base = ["--data", rows, "--engine", "numpy", "--epochs", "1", "--threads", "1"]
    assert twingrad("train", "small.toml", *base, "--save", "small.safetensors").code == 0
    said = twingrad("predict", "mnist-rnn", "small.safetensors", "mnist")
    assert said.code == 2
    assert "small.safetensors" in said.err and "rnn.weight" in said.err


# The whole way --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sketched")
def test_reproduce_makes_everything_from_the_sample_and_says_so(
    twingrad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typst")
    start = time.time()
    # The way is tested, not how exact the numbers are: short chunks of steps, few techniques of the ablation (each has
    # three sessions), and this machine's rates measured once and briefly.
    monkeypatch.setattr(ablation, "CHUNK_SECONDS", 0.01)
    every = ablation.techniques
    monkeypatch.setattr(ablation, "techniques", lambda engine: every(engine)[:3])
    monkeypatch.setattr(roofline, "SAMPLES", 1)
    monkeypatch.setattr(roofline, "SECONDS", 0.001)
    measured, rates = roofline._rates, {}

    def once(name: str, command: list[str], variables: dict[str, str]) -> roofline.Rates:
        if (asked := (name, *command)) not in rates:
            rates[asked] = measured(name, command, variables)
        return rates[asked]

    monkeypatch.setattr(roofline, "_rates", once)
    options = ["reproduce", "--profile", "sample", "--engines", "numpy", "--threads", "1"]
    said = twingrad(*options, "--json", "reproduce.json")
    assert said.code == 0, said.err
    report = tmp_path / "results" / "report"
    pdf = report / "paper.pdf"
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.stat().st_mtime > start - 1
    for key in papers.paper_keys():
        paper = papers.load_paper(key)
        for output in paper.tables:
            assert list((report / "tables").glob(f"{key}-{output.id}.csv"))
        for output in paper.figures:
            assert list((report / "figures").glob(f"{key}-{output.id}.svg"))
    assert "embedded sample" in said.out and str(Path("results/report/paper.pdf")) in said.out
    assert "Missing:" in said.out and "PyTorch" in said.out.split("Missing:")[1]
    rows = json.loads(Path("reproduce.json").read_text())["rows"]
    assert {"stage", "file", "missing", "pdf"} <= {row.get("kind") for row in rows}
    # What is made from the results would be made once more.
    monkeypatch.setattr("experiments.report.build", lambda *_: Built(report))
    monkeypatch.setattr("experiments.report.paper.build", lambda *_, **__: pdf)
    again = twingrad(*options)
    assert again.code == 0
    assert not re.search(r"\d+ of \d+ runs finished in ", again.out)  # every one of them was there already


# Faults of the system -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"COLUMNS": "0"},
        {"COLUMNS": "1", "TERM": "dumb"},
    ],
    ids=str,
)
def test_a_drawing_is_printed_whatever_the_terminal_can_show(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "experiments", "check", "mnist-rnn", "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env={**os.environ, **environment})
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr and b"layers, " in done.stderr
    assert json.loads(done.stdout.decode("ascii"))["errors"] == []

    shown = subprocess.run(command[:-2], cwd=ROOT, capture_output=True, env={**os.environ, **environment})
    assert (shown.returncode, shown.stderr) == (0, b"") and b"layers, " in shown.stdout


@pytest.mark.parametrize("module", ["experiments.cli", "click", "bridge.session", "numpy", "pydantic"])
def test_ctrl_c_while_the_command_is_imported_shows_no_traceback(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "from experiments.__main__ import main\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "list"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (cli.INTERRUPTED, "interrupted\n")


FULL = OSError(errno.ENOSPC, "No space left on device", "/somewhere/full")


@pytest.mark.parametrize("place", ["tempfile.mkdtemp", "numpy.save"])
@pytest.mark.parametrize(
    "error",
    [FULL, OSError("10 requested and 3 written"), FileNotFoundError(errno.ENOENT, "No space left: no folder")],
    ids=["errno", "numpy's own", "tempfile's own"],
)
def test_a_full_disk_says_so_wherever_it_happens(
    place: str, error: OSError, twingrad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(place, full)
    said = twingrad("train", "mnist-rnn", "--data", "mnist", "--epochs", "1")
    assert said.code == cli.RUN_FAILED
    assert "No space left" in said.err or "10 requested and 3 written" in said.err
    assert "TMPDIR" in said.err


def test_no_memory_is_one_line(twingrad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr("bridge.weights.initialise", none_left)
    said = twingrad("train", "mnist-rnn", "--data", "mnist")
    assert said.code == cli.RUN_FAILED and "error: not enough memory: Unable to allocate 8.00 TiB" in said.err


@pytest.mark.parametrize("command", ["race", "run"])
def test_a_paper_whose_networks_are_anothers_names_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.invoke([command, "imdb-cnn-c", "--results", str(tmp_path)])
    said = capsys.readouterr()
    assert "run imdb-cnn-a" in said.out + said.err
    assert code == (2 if command == "race" else 0)
