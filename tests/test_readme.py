"""What the README tells a user to type works."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from bridge import registry
from bridge.libjulia import sysimage
from bridge.libjulia.find import Julia
from bridge.libjulia.sysimage import image_folder, usable
from experiments import cli as cli_module
from experiments import formats, papers
from experiments.cli import cli
from experiments.report import tables
from experiments.report.sizes import judged, points
from experiments.report.view import one_machine, paper_view
from experiments.results import Tidy

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "paper" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHELL = "".join(text for language, text in BLOCKS if language in ("", "sh"))


RACES = ("mnist-rnn-e", "mnist-cnn-batch100", "mnist-cnn", "imdb-cnn-a")
"""The studies whose races are in the README, as far as the committed results have them."""

JULIA_FROM_PYTHON = "from bridge import julia"

ONE_AFTER_ANOTHER = """
import json, sys
for example in json.load(sys.stdin):
    names = {}
    exec(compile(example, "<README.md>", "exec"), names)
    print("steps:", len(names.get("losses", ())))
"""


def as_printed(examples: list[str], folder: Path) -> str:
    """What Python examples print, each with its own names, in a folder that is no checkout and without real data."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TWINGRAD_OFFLINE": "1", "TWINGRAD_DATA": ""}
    variables["TWINGRAD_CACHE"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER],
        cwd=folder,
        env=variables,
        input=json.dumps(examples),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_python_examples_run(tmp_path: Path) -> None:
    examples = [text for language, text in BLOCKS if language == "python" and JULIA_FROM_PYTHON not in text]
    assert len(examples) == 5
    said = as_printed(examples, tmp_path)
    assert re.findall(r"steps: (\d+)", said) == ["0", "0", "15", "4", "0"]  # 1,500 digits, 200 pictures
    assert "sample (1500, 784) (1500,)" in said and "accuracy" in said and "weight (6, 1, 3, 3)" in said


def test_the_examples_of_julia_from_python_run(julia: Julia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The Julia of the tests, and its system image, which the cache in the temporary folder does not know.
    monkeypatch.setenv("TWINGRAD_JULIA", julia.executable)
    if usable(julia)[0]:
        (tmp_path / "julia").mkdir()
        (tmp_path / "julia" / "sysimage").symlink_to(image_folder())
    examples = [text for language, text in BLOCKS if language == "python" and JULIA_FROM_PYTHON in text]
    function, training, last, many = examples
    # Threads are those of the first session of a process.
    training += "print(losses.shape, logits.shape, sorted(gradients))"
    said = as_printed([training, function, last, many], tmp_path)
    assert "accuracy" in said
    assert "(15,) (297, 10) ['output.bias', 'output.weight', 'rnn.bias', 'rnn.recurrent', 'rnn.weight']" in said
    numbers = [float(word) for word in re.findall(r"^\[([\d. ]+)\]$", said, re.M)[0].split()]
    x = np.array([0.5, 1.0])
    np.testing.assert_allclose(numbers, 2 * np.tanh(x) * (1 - np.tanh(x) ** 2), rtol=1e-6)


def test_the_quick_starts_have_three_lines() -> None:
    head = README[: README.index("## Everything in one command")]
    starts = re.findall(r"^```\w*\n(.*?)^```$", head, flags=re.MULTILINE | re.DOTALL)
    assert [len(start.splitlines()) for start in starts] == [3, 3, 3, 3]
    assert "TwinGrad runs on Linux" in head


def test_its_commands_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first study, a changed one, a model drawn, and all trainings; without real data."""
    for name, value in {"TWINGRAD_OFFLINE": "1", "TWINGRAD_DATA": "", "TWINGRAD_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    lines = [line.partition("#")[0].strip() for line in SHELL.replace("\\\n", " ").splitlines()]
    chosen = [
        line for line in lines if re.match(r"twingrad (check|train|run mnist-rnn-e --engines numpy|completion)", line)
    ]
    chosen += ["twingrad report mnist-rnn-e"]
    assert len(chosen) == 7 and set(chosen) <= set(lines)
    (large,) = (text for language, text in BLOCKS if language == "python" and "open_memmap" in text)
    as_printed([large], tmp_path)
    for line in chosen:
        _, *words = shlex.split(line.partition(">")[0])
        assert cli_module.invoke(words) == 0, line
    assert Path("curve.png").exists() and Path("run.safetensors").exists()
    assert list(Path("results/report/tables").glob("mnist-rnn-e-*.csv"))


def test_the_examples_in_julia_run(julia: Julia) -> None:
    examples = [text for language, text in BLOCKS if language == "julia"]
    said = run_julia(julia, "".join(example + "println(length(losses))\n" for example in examples))
    assert re.fullmatch(r"Evaluation\(.*\)\n10\n4\n", said)


def test_the_example_of_the_numpy_engine_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", of_engine("py_engine"), flags=re.MULTILINE | re.DOTALL)
    said = as_printed([example], tmp_path)
    assert said.startswith("[0.84147098 0.90929743]\n") and "matmul" in said


def test_the_examples_of_the_julia_engine_run(julia: Julia) -> None:
    examples = re.findall(r"^```julia\n(.*?)^```$", of_engine("julia_engine"), flags=re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    modules = [f"module Example{i}\nusing TwinGrad\n{example}end\n" for i, example in enumerate(examples)]
    assert "tanh" in run_julia(julia, "".join(modules))


@pytest.mark.parametrize(("engine", "ending"), [("py_engine", "py"), ("julia_engine", "jl")])
def test_the_table_of_files_of_an_engine_names_all_of_them(engine: str, ending: str) -> None:
    table = of_engine(engine).partition("## What is where")[2].partition("\n## ")[0]
    named: set[Path] = set()
    for row in re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE):
        folder = ""
        for path in re.findall(r"`(.*?)`", row):  # a name without a folder is of the one before it
            folder = path.rpartition("/")[0] or folder
            found = set((ROOT / engine / folder).glob(path.rpartition("/")[2]))
            assert found, f"{path} of the row {row}"
            named |= found
    modules = {"__init__.py", "AD.jl", "NETWORK.jl", "TwinGrad.jl"}
    there = {path for path in (ROOT / engine).rglob(f"*.{ending}") if not {"test", "ext"} & set(path.parts[-2:-1])}
    assert sorted(path.name for path in there - named if path.name not in modules) == []


def of_engine(engine: str) -> str:
    """The README of an engine."""
    return (ROOT / engine / "README.md").read_text(encoding="utf-8")


def run_julia(julia: Julia, program: str) -> str:
    """What a program prints; where there is a system image with the engine, Julia starts with it."""
    options = ["--startup-file=no", f"--project={ROOT / 'julia_engine'}", *sysimage.options(julia)]
    return run([julia.executable, *options, "-e", program], julia.environment(1))


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("folder", [RESULTS, *sorted(RESULTS.glob("julia-*"))], ids=lambda folder: folder.name)
def test_its_races_are_those_of_the_committed_results(folder: Path) -> None:
    julia = "" if folder == RESULTS else folder.name.replace("julia-", "Julia ")
    expected = races(Tidy.load(folder), julia)
    assert expected in README, f"the README's table of races should be\n{expected}"


def races(results: Tidy, julia: str = "") -> str:
    """A row for each race, a column for each engine that took part in any of them; `julia` where it is another one."""
    rows, labels, machines = [], {}, []
    for key in RACES:
        view = paper_view(papers.load_paper(key), results)
        raced = [row for row in tables.race(view).rows if row["step_us_median"]]
        assert all(row["data"] == "real" for row in raced)
        machines += [row["machine"] for row in raced]
        labels |= {row["engine"]: row["system"] for row in raced}
        for threads in sorted({row["threads"] for row in raced}, reverse=True):
            cells = {row["engine"]: race_cell(row) for row in raced if row["threads"] == threads}
            rows.append((f"`{key}`, {threads} thread{'s' if threads > 1 else ''}", cells))
    engines = [name for name in registry.names() if name in labels]
    where = ", ".join(filter(None, [one_machine(machines, "the races"), julia]))
    lines = [[f"step \\[µs\\], {where}", *(labels[name] for name in engines)]]
    lines.append([":---", *("---:" for _ in engines)])
    lines += [[title, *(cells.get(name, "—") for name in engines)] for title, cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def race_cell(row: dict[str, Any]) -> str:
    step, share = formats.significant(row["step_us_median"]), formats.share(row["limit_share"])
    ratio = f"{row['ratio_median']:.2f}, " if row["ratio_median"] and row["engine"] != "torch" else ""
    return f"{step} ({ratio}{share})"


def test_its_first_sentence_of_numbers_is_that_of_the_committed_results() -> None:
    """The least and the most of our engines' median ratios to PyTorch, over all races of its table."""
    results = Tidy.load(RESULTS)
    raced = [row for key in RACES for row in tables.race(paper_view(papers.load_paper(key), results)).rows]

    def times(engine_name: str) -> str:
        ratios = [row["ratio_median"] for row in raced if row["engine"] == engine_name and row["ratio_median"]]
        return f"{1 / max(ratios):.1f} to {1 / min(ratios):.1f}"

    sentence = (
        "In the races of these studies, whose networks are small, a training step of TwinGrad's Julia engine is "
        f"{times('julia')} times as fast as eager PyTorch's, and one of its numpy engine {times('numpy')} times."
    )
    assert sentence in " ".join(README.split()), sentence


def test_its_sentence_about_ordinary_sizes_is_that_of_the_committed_results() -> None:
    """How often an engine of ours is slower, by the median of the ratios within rounds, as in the report's table."""
    raced = points(paper_view(papers.load_paper("sizes"), Tidy.load(RESULTS)))

    def slower(engine: str) -> tuple[int, int, str]:
        to_torch = [(steps[engine] / steps["torch"]).median() for _, _, steps in raced]
        to_fastest = [judged(rows, steps, engine)["ratio"] for _, rows, steps in raced]
        assert not np.isnan([*to_torch, *to_fastest]).any()
        most = f"{max(to_fastest):.2f}"
        return sum(ratio > 1 for ratio in to_torch), sum(ratio > 1 for ratio in to_fastest), most

    (julia, julia_fastest, julia_most), (ours, ours_fastest, most) = slower("julia"), slower("numpy")
    sentence = (
        f"In networks of ordinary sizes (`make sizes`: {len(raced)} combinations of network, mini-batch and threads) a "
        f"step of the Julia engine is slower than eager PyTorch's in {julia} and slower than the fastest framework's "
        f"in {julia_fastest}; for the numpy engine these are {ours} and {ours_fastest}. At most a step takes "
        f"{julia_most} and {most} times as long as the fastest framework's."
    )
    assert sentence in " ".join(README.split()), f"the README should say: {sentence}"


def test_its_allocations_are_those_of_the_committed_results() -> None:
    view = paper_view(papers.load_paper("mnist-rnn-e"), Tidy.load(RESULTS))
    allocated = {item["engine"]: item for item in tables.allocations(view).rows if "engine" in item}
    for name in ("numpy", "julia", "torch"):
        assert formats.size(allocated[name]["bytes_later_epochs"]) in README


def test_its_start_up_without_a_system_image_is_that_of_the_committed_results() -> None:
    runs = Tidy.load(RESULTS).runs
    timed = runs[(runs["measure"] == "time") & (runs["status"] == "ok")]
    julia = timed[timed["engine"] == "julia"]
    start = julia["first_epoch_seconds"] - julia["later_epoch_seconds"]
    usual = start.groupby(julia["paper"]).median()
    network = timed[timed["paper"] == "mnist-rnn-e"].groupby("engine")["total_seconds"].median()
    assert set(usual.index) == {papers.load_paper(key).runs_of_paper or key for key in papers.keys_of_others()}
    sentence = (
        "there the first epoch of a study's network, `build` included, takes the Julia engine "
        f"{usual.min():.1f} to {usual.max():.1f} s longer than a later one, and the whole of `mnist-rnn-e` takes it "
        f"{network['julia']:.1f} s (PyTorch: {network['torch']:.1f} s)."
    )
    assert sentence in " ".join(README.split()), sentence


def test_its_word_about_accuracies_is_true_of_the_committed_results() -> None:
    assert "From the same weights all engines end within half a point of PyTorch's test accuracy." in README
    results = Tidy.load(RESULTS)
    rows = [
        row
        for key in papers.keys_of_others()
        for row in tables.parity(paper_view(papers.load_paper(key), results)).rows
    ]
    differences = [row["max_test_accuracy_difference"] for row in rows if row.get("seeds")]
    assert len(differences) > 25
    assert max(differences) <= 0.005


def test_its_lists_of_studies_engines_and_extras_are_complete() -> None:
    assert named_in("study") == papers.paper_keys()
    assert named_in("engine") == sorted(registry.names())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ",".join(re.findall(r"pip install '\.\[(.*?)\]'", README)).split(",")
    named = {*extras, *re.findall(r"`(\w+)`", README[README.index("The extras:") :].partition("\n\n")[0])}
    assert {*named, "bench", "docs", "test", "dev", "all"} >= set(project["optional-dependencies"])
    assert set(extras) <= set(project["optional-dependencies"])


def test_its_table_of_environment_variables_is_complete() -> None:
    """Each variable of ours that a program reads, but for those that one process tells another."""
    told = {"TWINGRAD_ENGINE", "TWINGRAD_SESSIONS", "TWINGRAD_COMPLETE", "TWINGRAD_TEST_WAITS_FOR"}
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = set()
    for name in files.split("\0"):
        if (
            name.endswith((".py", ".jl", ".sh", "Makefile"))
            and not Path(name).name.startswith("test_")
            and (ROOT / name).is_file()
        ):
            found |= set(re.findall(r"\bTWINGRAD_[A-Z_]+\b", (ROOT / name).read_text(encoding="utf-8")))
    table = README[README.index("| variable |") :].partition("\n\n")[0]
    named = set(re.findall(r"`([A-Z_]+)`", table))
    assert found - told == {name for name in named if name.startswith("TWINGRAD_")}


def named_in(heading: str) -> list[str]:
    """The names between backticks in the first column of the table whose first heading is this."""
    (rows,) = re.findall(rf"^\| {heading} \|.*\n((?:\|.*\n)+)", README, flags=re.MULTILINE)
    return sorted(re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in rows.splitlines())))


def test_the_commands_exist() -> None:
    assert isinstance(cli, click.Group)
    named = set(re.findall(r"^twingrad ([a-z]+)", SHELL, flags=re.MULTILINE))
    assert {"list", "run", "race", "report", "paper", "train"} <= named <= set(cli.commands)


def test_the_options_exist() -> None:
    for command, rest in re.findall(r"^twingrad ([a-z]+)([^#\n]*)", SHELL, flags=re.MULTILINE):
        known = {option for parameter in cli.commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"reproduce", "test", "bench", "bench-compare"} <= set(re.findall(r"make ([a-z-]+)", SHELL)) <= targets
