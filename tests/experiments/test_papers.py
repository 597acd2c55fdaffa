"""A paper is data: every setting says where it comes from, and a mistake in the file is named by its place."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bridge import registry
from bridge import spec as model_spec
from bridge.spec import ModelSpec
from experiments import papers
from experiments.measures.registry import MEASURES
from experiments.papers import Paper, PaperFileError

PAPERS = papers.paper_keys()
TEXT = (papers.PAPERS_DIR / "mnist-rnn-e.toml").read_text(encoding="utf-8")


@pytest.fixture(params=PAPERS)
def paper(request: pytest.FixtureRequest) -> Paper:
    return papers.load_paper(request.param)


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def message(text: str) -> str:
    with pytest.raises(PaperFileError) as caught:
        papers.loads(text, "file.toml")
    return str(caught.value)


def test_both_rnn_studies_are_there() -> None:
    assert {"mnist-rnn-d", "mnist-rnn-e"} <= set(PAPERS)


def test_every_setting_names_its_source_and_ours_are_few_enough_to_explain(paper: Paper) -> None:
    settings = dict(paper.settings())
    assert {"training.learning_rate", "training.epochs"} <= settings.keys()
    assert not paper.reported or any(name.startswith("network.") for name in settings)
    assert {setting.source for setting in settings.values()} <= {"paper", "code", "ours"}


def test_engines_models_and_data_of_a_paper_exist(paper: Paper) -> None:
    assert set(paper.engine_names()) <= set(registry.names())
    assert paper.model in papers.models()
    from experiments import data

    assert paper.dataset in data.LOADERS


def recurrent(spec: ModelSpec) -> dict[str, Any]:
    segments, cell, output = spec.layers
    assert output.weight_init.name == cell.weight_init.name
    return {
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


def image(spec: ModelSpec) -> dict[str, Any]:
    shape, conv, relu, pool, flat, hidden, hidden_relu, output = spec.layers
    assert (flat.op, hidden_relu.activation) == ("flatten", relu.activation)
    weighted = (conv, hidden, output)
    assert len({layer.bias for layer in weighted}) == len({layer.weight_init.std for layer in weighted}) == 1
    return {
        "image": list(shape.shape),
        "filters": conv.filters,
        "kernel": list(conv.kernel),
        "convolution_padding": max(side for pair in conv.padding for side in pair),
        "biases": conv.bias,
        "activation": relu.activation,
        "pool": list(pool.window),
        "hidden_units": hidden.units,
        "output_units": output.units,
        "output_activation": spec.loss.applies,
        "weight_deviation": conv.weight_init.std,
        "loss": spec.loss.op,
    }


def text(spec: ModelSpec) -> dict[str, Any]:
    embedding, permuted, conv, relu, pool, flat, output = spec.layers
    assert flat.op == "flatten"
    return {
        "vocabulary": embedding.vocabulary,
        "embedding_dimension": embedding.dimension,
        "embedding_trained": embedding.trainable,
        "permutation": list(permuted.axes),
        "filters": conv.filters,
        "kernel": conv.kernel,
        "convolution_bias": conv.bias,
        "convolution_padding": max(conv.padding),
        "activation": relu.activation,
        "pool": pool.window,
        "output_units": output.units,
        "output_activation": spec.loss.applies,
        "loss": spec.loss.op,
    }


@pytest.mark.parametrize("key", papers.keys_of_others())
def test_the_network_of_a_paper_is_that_of_its_model_spec(key: str) -> None:
    paper = papers.load_paper(key)
    spec = model_spec.load(papers.model_path(paper.model))
    read = {"mnist-rnn": recurrent, "mnist-cnn": image, "imdb-cnn": text}[paper.model.removesuffix("-e")]
    assert {name: setting.value for name, setting in paper.network.items()} == read(spec)


def test_own_and_variant_networks_exist_and_read_the_same_data(paper: Paper) -> None:
    spec = model_spec.load(papers.model_path(paper.model))
    others = [variant.model.value for variant in paper.variants]
    others += [own.model.value for own in paper.own.values() if own.model]
    for name in others:
        other = model_spec.load(papers.model_path(name))
        assert (other.input, other.target) == (spec.input, spec.target)
    for name in paper.pretrained:
        assert name in spec.parameters()


def test_a_paper_that_shows_the_runs_of_another_trains_in_the_same_way() -> None:
    for key in PAPERS:
        one = papers.load_paper(key)
        if one.runs_of_paper is None:
            continue
        other = papers.load_paper(one.runs_of_paper)
        assert (one.model, one.dataset) == (other.model, other.dataset)
        assert one.engine_names() == other.engine_names()
        values = [
            {name: setting.value for name, setting in which.settings() if not name.startswith("network.")}
            for which in (one, other)
        ]
        assert values[0] == values[1]
        assert [item.model.value for item in one.variants] == [item.model.value for item in other.variants]


def test_the_text_studies_load_the_words_that_their_network_knows() -> None:
    for key in ("imdb-cnn-a", "imdb-cnn-c"):
        paper = papers.load_paper(key)
        spec = model_spec.load(papers.model_path(paper.model))
        assert paper.data["vocabulary"].value == paper.network["vocabulary"].value
        assert spec.input.sample == (paper.data["length"].value,)


@pytest.mark.parametrize(
    ("key", "values", "sources"),
    [
        ("mnist-rnn-d", [100, 0.015, 5], ["paper", "paper", "paper"]),
        ("mnist-rnn-e", [100, 0.015, 5], ["paper", "paper", "paper"]),
        ("mnist-cnn", [1, 0.01, 3], ["code", "code", "paper"]),
        ("imdb-cnn-a", [64, 0.001, 5], ["code", "code", "paper"]),
        ("imdb-cnn-c", [64, 0.001, 5], ["paper", "ours", "paper"]),
    ],
)
def test_the_settings_that_the_studies_state_are_as_stated(key: str, values: list[float], sources: list[str]) -> None:
    training = papers.load_paper(key).training
    stated = (training.batch_size, training.learning_rate, training.epochs)
    assert [setting.value for setting in stated] == values
    assert [setting.source for setting in stated] == sources


@pytest.mark.parametrize("kind", ["seeds", "own_seeds"])
def test_accuracy_has_five_seeds_or_a_reason(paper: Paper, kind: str) -> None:
    full = paper.runs.full
    few = [
        item for item in (getattr(full, kind), *getattr(full, kind.replace("seeds", "engine_seeds")).values()) if item
    ]
    assert all(item.value >= 5 or item.note for item in few)


def test_paper_d_averages_ten_executions() -> None:
    seeds = papers.load_paper("mnist-rnn-d").runs.full.seeds
    assert (seeds.value, seeds.source) == (10, "paper")


def test_what_paper_e_reports_is_complete() -> None:
    paper = papers.load_paper("mnist-rnn-e")
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


@pytest.mark.parametrize(
    ("key", "numbered"),
    [
        ("imdb-cnn-a", ["Figure 1", "Table I", "Table II", "Table III"]),
        ("mnist-cnn", ["Figure 1", "Figure 2", "Section V"]),
        ("imdb-cnn-c", ["Table I", "Table II", "Table III", "Figure 1", "Figure 2", "Figure 3"]),
    ],
)
def test_what_the_convolutional_studies_number_is_reproduced(key: str, numbered: list[str]) -> None:
    paper = papers.load_paper(key)
    named = [output.reproduces for output in (*paper.tables, *paper.figures)]
    for what in numbered:
        assert any(re.search(rf"\b{what}\b(?!I)", text) for text in named), what


def test_what_the_convolutional_studies_report_is_complete() -> None:
    a, b, c = (papers.load_paper(key) for key in ("imdb-cnn-a", "mnist-cnn", "imdb-cnn-c"))

    def values(paper: Paper, quantity: str) -> dict[str, Any]:
        return {item.row: item.by_epoch or item.value for item in paper.reported_for(quantity)}

    assert values(a, "seconds_first_epoch") == {"Own": 42.85, "Flux": 43.79, "PyTorch": 3.47, "TensorFlow": 4.0}
    assert values(a, "seconds_per_epoch") == {"Own": 13.5525, "Flux": 14.82, "PyTorch": 3.8325, "TensorFlow": 2.67}
    assert values(a, "megabytes_first_epoch") == {"Own": 12102.34, "Flux": 14683.87}
    assert values(a, "test_accuracy") == {"Own": 0.869, "Flux": 0.8676, "PyTorch": 0.8641, "TensorFlow": 0.8757}
    assert values(b, "test_accuracy") == {"Own": [0.96, 0.9713, 0.9784], "PyTorch": [0.91, 0.94, 0.95]}
    assert values(b, "seconds_total") == {"Own": 126.5, "PyTorch": 21.49}
    assert values(c, "test_loss") == {"PyTorch": 0.329, "Flux": 0.3249, "Own": 0.3511}
    assert len([item for item in c.cited if item.table == "gradients"]) == 20
    assert len([item for item in c.cited if item.table == "forward-mode"]) == 10


def test_every_figure_and_table_that_the_studies_number_is_reproduced() -> None:
    e, d = papers.load_paper("mnist-rnn-e"), papers.load_paper("mnist-rnn-d")
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
    with pytest.raises(PaperFileError, match=rf"{paper.key}: tables\[\d+\] \(id .*nothing produces '{lost}'"):
        paper.check_producers(tables - {lost}, figures)


def test_seed_counts_follow_the_profile_the_engine_and_the_measure() -> None:
    runs, time, memory = papers.load_paper("mnist-rnn-d").runs, MEASURES["time"], MEASURES["memory"]
    assert runs.full.seed_count("numpy", time) == 10
    assert runs.full.seed_count("torch-compile", time) == runs.full.engine_seeds["torch-compile"].value < 10
    assert runs.full.seed_count("numpy", memory) == 1
    assert runs.quick.seed_count("numpy", time) < 10


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('source = "paper"', 'source = "papr"', "network.segments.source: input should be 'paper', 'code' or 'ours'"),
        ("value = 64", "valu = 64", "network.units.value: missing; network.units.valu: unknown key"),
        ('id = "race"', 'id = "race", x = 1', '(id "race").x: unknown key'),
        ("value = 0.015", 'value = "fast"', "training.learning_rate.value: input should be a valid number"),
        ("epochs = { value = 5", "epochs = { value = 0", "training.epochs.value: input should be greater than"),
        ('seconds_total", 51.2', 'seconds_total", ""', 'reported[3] (id "Flux"): give exactly one of value, by_epoch'),
        (
            '51.2, "Table II"]',
            "51.2]",
            "reported[3]: found ['Flux', 'seconds_total', 51.2], expected [row, qu",
        ),
        (
            "[runs.quick]",
            "[runs.full.engine_seeds]\ntorhc = 1\n[runs.quick]",
            "runs.full.engine_seeds: 'torhc' is not among the engines",
        ),
        (
            "reported_as",
            'engines = ["numpy", "numpy", "julia", "torch", "flux"]\nreported_as',
            "engine given twice: numpy",
        ),
        ("numpy = ", "nunpy = ", "reported_as: 'nunpy' is not among the engines"),
        ("[own.jax]", "[own.jaxx]", "own: 'jaxx' is not among the engines"),
        ('engine = "julia", than', 'engne = "julia", than', "unknown key"),
        (", low = 0.4", "", 'claims[0] (id "float32"): a test needs an engine and at least one of low and high'),
        (', of = "float32"', "", 'claims[0] (id "float32"): `of` goes with technique_time_saved'),
        ("version = 2", "version = 3", "version: input should be 1 or 2, found 3"),
        ("[training]", "[training", "file.toml: not valid TOML"),
    ],
)
def test_a_mistake_is_named_by_its_place(old: str, new: str, expected: str) -> None:
    found = message(changed(old, new))
    assert found.startswith("file.toml: ")
    assert expected in found


def said(value: Any) -> Any:
    """What a paper says, without all that is empty."""
    if isinstance(value, dict):
        return {name: said(item) for name, item in value.items() if item not in (None, "", [], {})}
    return [said(item) for item in value] if isinstance(value, list) else value


def test_papers_mean_what_they_did_when_every_file_said_everything_itself() -> None:
    """A digest over all that a paper's file says, which the form of the files does not change; no retired engines."""
    found = {}
    for key in papers.keys_of_others():
        text = json.dumps(said(papers.load_paper(key).model_dump(mode="json", exclude={"version"})))
        found[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert found == {
        "imdb-cnn-a": "f9cb845830c954f5",
        "imdb-cnn-c": "28b5076a58bff9bc",
        "mnist-cnn": "0fa4e92443b48cb1",
        "mnist-cnn-batch100": "a82599993f014881",
        "mnist-rnn-d": "0dc262ad7eaf8b13",
        "mnist-rnn-e": "013684ee55de6e85",
    }


def test_a_bare_value_is_ours_and_what_a_file_leaves_out_is_the_default() -> None:
    paper = papers.loads(MINE)
    assert paper.network["units"] == papers.Setting(value=3, source="ours")
    assert paper.training.threads.value == 2 and paper.training.dtype.value == "float32"
    assert [(row.name, row.reported_as) for row in paper.engines] == [("numpy", ""), ("torch", "Theirs")]
    assert paper.runs.full.memory_engines is not None
    assert paper.runs.full.memory_engines.value == ["numpy", "torch"], "engines that the file has not are left out"
    assert set(paper.runs.full.engine_seeds) == {"torch"} and set(paper.own) == {"torch"}
    assert (paper.runs.quick.seeds.value, paper.runs.quick.race_rounds.value) == (7, 2)
    assert [item.producer for item in paper.tables] == ["parity", "epoch_times"]
    assert paper.tables[0].title and paper.tables[1].title == "Mine"


MINE = """
format = "twingrad-paper"
version = 2
key = "mine"
title = "Mine"
authors = []
task = "a task"
model = "mnist-rnn"
dataset = "mnist"
environment = "a machine"
engines = ["numpy", "torch"]
reported_as = { torch = "Theirs" }
reported = [["Theirs", "seconds_per_epoch", 3.5, "Table I"]]
tables = ["parity", { id = "times", producer = "epoch_times", title = "Mine" }]
network = { units = 3 }
[training]
optimizer = "sgd"
learning_rate = 0.1
batch_size = 10
epochs = 2
[runs.quick]
seeds = 7
"""


def test_an_unknown_paper_gets_the_nearest_name() -> None:
    with pytest.raises(PaperFileError, match="did you mean 'mnist-rnn-d'"):
        papers.load_paper("mnist-rnn-dd")


def test_a_paper_can_be_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "my-study.toml"
    path.write_text(changed('key = "mnist-rnn-e"', 'key = "my-study"'), encoding="utf-8")
    assert papers.load_paper(path).key == "my-study"
    assert papers.load_paper(str(path)).key == "my-study"
    with pytest.raises(PaperFileError, match="no paper file"):
        papers.load_paper(tmp_path / "absent.toml")


def test_the_key_in_a_file_must_be_its_name(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text(TEXT, encoding="utf-8")
    with pytest.raises(PaperFileError, match='key is "mnist-rnn-e", expected "other"'):
        papers.load_paper(path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PaperFileError, match=r"binary\.toml"):
        papers.load_paper(path)


def test_an_unknown_model_gets_the_nearest_name() -> None:
    with pytest.raises(PaperFileError, match="did you mean 'mnist-rnn'"):
        papers.model_path("mnist-rn")
