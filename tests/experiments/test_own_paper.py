"""A paper of the user's own runs and is reported, as CONTRIBUTING.md shows; what does not fit is said first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry, toml, weights
from bridge import spec as model_spec
from bridge.errors import TwinGradError, WeightsError
from bridge.session import Optimizer
from experiments import cli, papers
from experiments.cli.common import checked_paper
from experiments.papers import PaperFileError, network

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "experiments" / "models"


def documented() -> tuple[str, str]:
    """The model and the paper of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### A paper of your own")[2]
    model, paper = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    return model, paper


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The documented files, and the embedded sample for data."""
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    for name, text in zip(("my-net", "my-study"), documented(), strict=True):
        (tmp_path / "own" / f"{name}.toml").write_text(text, encoding="utf-8")
    return tmp_path / "own"


def test_the_documented_paper_runs_and_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["run", "own/my-study.toml"]) == 0
    assert cli.invoke(["report"]) == 2
    assert "twingrad report my-study.toml" in capsys.readouterr().err
    assert cli.invoke(["report", "own/my-study.toml"]) == 0
    report = Path("results/report")
    for name in ("tables/my-study-results.csv", "figures/my-study-network.svg", "report.html"):
        assert (report / name).is_file(), name
    assert "A small network of my own" in (report / "report.html").read_text(encoding="utf-8")
    assert cli.invoke(["paper", "own/my-study.toml", "--results", "results"]) == 0
    assert (report / "paper.pdf").read_bytes().startswith(b"%PDF")


def test_a_paper_of_the_first_release_is_read_as_it_was(folder: Path) -> None:
    """It says everything itself, and the defaults of today's papers do not enter it."""
    new, path = papers.load_paper(folder / "my-study.toml"), folder / "old" / "my-study.toml"
    path.parent.mkdir()
    path.write_text(FIRST.replace("my-net.toml", "../my-net.toml"), encoding="utf-8")
    old = papers.load_paper(path)
    assert (old.network, old.tables, old.figures) == (new.network, new.tables, new.figures)
    values = [{name: setting.value for name, setting in paper.settings() if "own." not in name} for paper in (old, new)]
    assert values[0] == values[1]
    assert (old.runs.full.seeds, old.runs.quick.measures) == (new.runs.full.seeds, old.runs.full.measures)
    assert (old.runs.full.engine_seeds, old.own, old.environment) == ({}, {}, new.environment)


FIRST = """
format = "twingrad-paper"
version = 1
key = "my-study"
title = "A small network of my own"
authors = ["Me"]
task = "digits by one hidden layer"
model = "my-net.toml"                          # beside this file; or the name of a model of `twingrad list`
dataset = "mnist"
environment = { description = "my machine" }
reported = []                                  # a study of your own has no numbers of others to show

[[engines]]
name = "numpy"

[network]                                      # held against the model before anything runs
hidden_units = { value = 16, source = "ours" }
activation = { value = "relu", source = "ours" }

[training]
optimizer = { value = "sgd", source = "ours" }
learning_rate = { value = 0.1, source = "ours" }
batch_size = { value = 100, source = "ours" }
epochs = { value = 1, source = "ours" }
shuffle = { value = true, source = "ours" }
pixels = { value = "0 to 1", source = "ours" }
dtype = { value = "float32", source = "ours" }
threads = { value = 1, source = "ours" }

[runs.full]
seeds = { value = 1, source = "ours" }
measures = { value = ["time"], source = "ours" }
memory_seeds = { value = 1, source = "ours" }
memory_threads = { value = 1, source = "ours" }
race_rounds = { value = 2, source = "ours" }
race_threads = { value = [1], source = "ours" }

[[tables]]
id = "results"
producer = "epoch_times"
title = "Time and accuracy"

[[figures]]
id = "network"
producer = "architecture"
title = "The network"
"""
"""The example of CONTRIBUTING.md in version 0.1.0."""


def problem(folder: Path, old: str, new: str, file: str = "my-study") -> str:
    """What is said of the paper after a change."""
    path = folder / f"{file}.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(TwinGradError) as caught:
        checked_paper(str(folder / "my-study.toml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[network]", "[pretrained]\nhiden = { value = 'g', source = 'ours' }\n[network]", "pretrained.hiden: model"),
        ("hidden_units = 16", "hidden_units = 32", "network.hidden_units: found 32, and the model has 16"),
        ('"relu"', '"tanh"', "network.activation: found 'tanh', and the model has 'relu'"),
        ("hidden_units =", "hiden_units =", "network.hiden_units: unknown key"),
        ("hidden_units = 16", "kernel = 3", "network.kernel: the model has no layer with"),
        ("hidden_units = 16", '"hidden.bias" = false', "network.hidden.bias: found False, and"),
        ('"epoch_times"', '"epoch_time"', 'tables[0] (id "results").producer: nothing produces \'epoch_time\' (did'),
        ('"architecture"', '"architect"', 'figures[0] (id "network").producer: nothing produces'),
        ('"my-net.toml"', '"other.toml"', "other.toml: there is no such file"),
        ('"my-net.toml"', '"mnist-rn"', "no model 'mnist-rn' (did you mean 'mnist-rnn'?)"),
        ('dataset = "mnist"', 'dataset = "mnst"', "dataset: no data set 'mnst' (did you mean 'mnist'?)"),
        ('["numpy"]', '[{ name = ["numpy"] }]', "engines[0]"),
        ("[network]", "[data]\nlength = { value = 3, source = 'ours' }\n[network]", "data.length: mnist has no"),
        ('["numpy"]', '["nunpy"]', "engines[0].name: no engine 'nunpy' (did you mean 'numpy'?)"),
        ('model = "my-net', 'runs_of_paper = "mnist"\nmodel = "my-net', "runs_of_paper: no paper 'mnist'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_file_and_key(old: str, new: str, expected: str, folder: Path) -> None:
    found = problem(folder, old, new)
    assert expected in found, found
    assert ".toml" in found or "paper my-study" in found


def test_a_mistake_in_the_model_names_the_models_file(folder: Path) -> None:
    assert 'my-net.toml: layers[0] (id "hidden").units' in problem(folder, "units = 16", "units = 0", "my-net")


def test_the_key_of_a_paper_that_comes_along_is_taken(folder: Path) -> None:
    text = (folder / "my-study.toml").read_text(encoding="utf-8").replace('"my-study"', '"mnist-cnn"')
    (folder / "mnist-cnn.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PaperFileError, match="a paper that comes with TwinGrad has it"):
        papers.load_paper(folder / "mnist-cnn.toml")


@pytest.mark.parametrize("key", papers.paper_keys())
def test_every_fact_of_every_paper_is_held_against_its_model(key: str) -> None:
    """Each one, changed, is found to be wrong: none is compared with itself or not at all."""
    paper = papers.load_paper(key)
    for name, setting in paper.network.items():
        assert network.disagreement(name, setting.value, paper.spec()) is None
        for other in ("nothing", -1, [], [setting.value, -1]):
            assert network.disagreement(name, other, paper.spec()), (name, other)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["hidden.weight", "output.bias"])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, name: str, folder: Path) -> None:
    spec = papers.load_paper(folder / "my-study.toml").spec()
    params = weights.initialise(spec, 0)
    params[name].flat[3] = value
    weights.save(folder / "w.safetensors", params)
    place = "[0, 3]" if name == "hidden.weight" else "[3]"
    with pytest.raises(WeightsError, match=re.escape(f"{name}: found {value} at {place}, expected finite numbers")):
        weights.load(folder / "w.safetensors", spec)
    with pytest.raises(WeightsError, match=re.escape(f"{name}: found {value}")):
        registry.get("numpy").build(spec, params, Optimizer("sgd", 0.1), 10, "float32", 1)


def test_training_from_weights_that_are_not_finite_is_refused_before_it_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = papers.load_paper(folder / "my-study.toml").spec()
    weights.save("w.safetensors", weights.initialise(spec, 0) | {"output.bias": np.full(10, np.inf, np.float32)})
    command = ["train", "own/my-net.toml", "--data", "mnist", "--epochs", "1", "--weights", "w.safetensors"]
    assert cli.invoke(command) == 2
    assert 'error: w.safetensors (for the model "my-net"): output.bias: found inf at [0]' in capsys.readouterr().err


def test_the_padding_same_is_that_of_the_size_that_a_family_has() -> None:
    given = toml.parse(toml.read(MODELS / "sizes-cnn.toml"))
    spec = model_spec.parse(given)

    def padding(changes: dict[str, Any]) -> Any:
        found = network.changed(spec, given, changes, "other")
        return next(layer for layer in found.layers if layer.id == "conv1").padding

    assert padding({}) == ((1, 1), (1, 1))
    assert padding({"conv1.kernel": 5}) == ((2, 2), (2, 2))
    assert padding({"conv1.kernel": 5, "conv1.padding": [[0, 0], [0, 0]]}) == ((0, 0), (0, 0))
