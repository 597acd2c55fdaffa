"""A paper is data: every setting says where it comes from, and a mistake in the file is named by its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import engine
from bridge import spec as model_spec
from experiments import config
from experiments.config import ConfigError, Paper

PAPERS = config.papers()
TEXT = (config.PAPERS_DIR / "mnist-rnn-e.toml").read_text(encoding="utf-8")


@pytest.fixture(params=PAPERS)
def paper(request: pytest.FixtureRequest) -> Paper:
    return config.load_paper(request.param)


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.loads(text, "file.toml")
    return str(caught.value)


def test_both_rnn_studies_are_there() -> None:
    assert {"mnist-rnn-d", "mnist-rnn-e"} <= set(PAPERS)


def test_every_setting_names_its_source_and_ours_are_few_enough_to_explain(paper: Paper) -> None:
    settings = dict(paper.settings())
    assert {"network.units", "training.learning_rate", "training.epochs"} <= settings.keys()
    assert {setting.source for setting in settings.values()} <= {"paper", "code", "ours"}


def test_engines_models_and_data_of_a_paper_exist(paper: Paper) -> None:
    assert set(paper.engine_names()) <= set(engine.names())
    assert paper.model in config.models()
    from experiments import data

    assert paper.dataset in data.LOADERS


def test_the_network_of_a_paper_is_that_of_its_model_spec(paper: Paper) -> None:
    spec = model_spec.load(config.model_path(paper.model))
    segments, cell, output = spec.layers
    stated = {name: setting.value for name, setting in paper.network.items()}
    built = {
        "segments": segments.shape[0],
        "segment_pixels": segments.shape[1],
        "cell": cell.op,
        "units": cell.units,
        "activation": cell.activation,
        "returns": cell.returns,
        "output_units": output.units,
        "output_activation": "identity",  # no activation layer follows
        "weight_init": cell.weight_init.name,
        "recurrent_init": cell.recurrent_init.name,
        "bias_init": cell.bias_init.name,
        "loss": spec.loss.op,
    }
    assert stated == built
    assert output.weight_init.name == stated["weight_init"]


def test_the_settings_that_the_studies_state_are_as_stated(paper: Paper) -> None:
    training = paper.training
    stated = (training.batch_size, training.learning_rate, training.epochs)
    assert [setting.value for setting in stated] == [100, 0.015, 5]
    assert [setting.source for setting in stated] == ["paper"] * 3


def test_paper_d_averages_ten_executions() -> None:
    seeds = config.load_paper("mnist-rnn-d").runs.full.seeds
    assert (seeds.value, seeds.source) == (10, "paper")


def test_what_paper_e_reports_is_complete() -> None:
    paper = config.load_paper("mnist-rnn-e")
    accuracy = {item.row: item.by_epoch for item in paper.reported_for("train_accuracy")}
    assert accuracy == {
        "Flux": [0.891, 0.919, 0.930, 0.938, 0.944],
        "PyTorch": [0.639, 0.829, 0.884, 0.906, 0.918],
        "Own": [0.700, 0.858, 0.888, 0.901, 0.910],
    }
    for quantity, expected in {
        "seconds_total": {"Flux": 51.2, "PyTorch": 94.0, "Own": 135.0},
        "test_accuracy": {"Flux": 0.944, "PyTorch": 0.92, "Own": 0.917},
        "gibibytes_total": {"Flux": 14.534, "PyTorch": None, "Own": 85.0},
    }.items():
        assert {item.row: item.value for item in paper.reported_for(quantity)} == expected
    assert len(paper.reported_for("train_accuracy", kind="rerun")) == 1


def test_every_figure_and_table_that_the_studies_number_is_reproduced() -> None:
    e, d = config.load_paper("mnist-rnn-e"), config.load_paper("mnist-rnn-d")
    named = " ".join(output.reproduces for output in (*e.tables, *e.figures))
    for what in ("Tables I, III and V", "Tables II, IV and VI", "Figure 1", "Figure 2", "Figure 3", "Figure 4"):
        assert what in named
    named = " ".join(output.reproduces for output in (*d.tables, *d.figures))
    for what in ("Figure 1", "Figure 2", "Figure 3"):
        assert what in named


def test_a_table_that_nothing_produces_is_an_error(paper: Paper) -> None:
    tables = {output.producer for output in paper.tables}
    figures = {output.producer for output in paper.figures}
    paper.check_producers(tables, figures)
    lost = paper.tables[-1].producer
    with pytest.raises(ConfigError, match=rf"{paper.key}: tables\[\d+\] \(id .*nothing produces '{lost}'"):
        paper.check_producers(tables - {lost}, figures)


def test_seed_counts_follow_the_profile_the_engine_and_the_measure() -> None:
    runs = config.load_paper("mnist-rnn-d").runs
    assert runs.full.seed_count("numpy") == 10
    assert runs.full.seed_count("torch-compile") == runs.full.engine_seeds["torch-compile"].value < 10
    assert runs.full.seed_count("numpy", "memory") == 1
    assert runs.quick.seed_count("numpy") < 10


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('source = "paper"', 'source = "papr"', "network.segments.source: input should be 'paper', 'code' or 'ours'"),
        ("value = 64", "valu = 64", "network.units.value: missing; network.units.valu: unknown key"),
        ('id = "race"', 'id = "race"\nx = 1', '(id "race").x: unknown key'),
        ("value = 0.015", 'value = "fast"', "training.learning_rate.value: input should be a valid number"),
        ("epochs = { value = 5", "epochs = { value = 0", "training.epochs.value: input should be greater than"),
        ("value = 51.2", "", 'reported[3] (id "Flux"): give exactly one of value, by_epoch and words'),
        ("torch-compile = {", "torch-copmile = {", "runs.full.engine_seeds: 'torch-copmile' is not among the engines"),
        ('name = "torch"', 'name = "numpy"', "engine given twice: numpy"),
        ("version = 1", "version = 2", "version: input should be 1, found 2"),
        ("[training]", "[training", "file.toml: not valid TOML"),
    ],
)
def test_a_mistake_is_named_by_its_place(old: str, new: str, expected: str) -> None:
    found = message(changed(old, new))
    assert found.startswith("file.toml: ")
    assert expected in found


def test_an_unknown_paper_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist-rnn-d'"):
        config.load_paper("mnist-rnn-dd")


def test_a_paper_can_be_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "my-study.toml"
    path.write_text(changed('key = "mnist-rnn-e"', 'key = "my-study"'), encoding="utf-8")
    assert config.load_paper(path).key == "my-study"
    assert config.load_paper(str(path)).key == "my-study"
    with pytest.raises(ConfigError, match="no paper file"):
        config.load_paper(tmp_path / "absent.toml")


def test_the_key_in_a_file_must_be_its_name(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text(TEXT, encoding="utf-8")
    with pytest.raises(ConfigError, match='key is "mnist-rnn-e", expected "other"'):
        config.load_paper(path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        config.load_paper(path)


def test_an_unknown_model_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist-rnn'"):
        config.model_path("mnist-rn")
