"""Figures: each is drawn, fits its column, overlaps nothing, says what its data are, and is the same in every run."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from bridge import spec as model_spec
from experiments import papers, report
from experiments.data import SAMPLE_LABEL
from experiments.papers import Output, load_paper
from experiments.report import architecture, figures, style
from experiments.report.figures import NotDrawnError
from experiments.report.row_helpers import PARITY_TOLERANCE, loss_differences
from experiments.report.view import MixedMachinesError, ReportError, View

ViewOf = Callable[..., View]
NEEDS_RUNS = sorted(set(figures.PRODUCERS) - {"architecture", "recurrent_cell", "dataset_examples", "review_examples"})
ASKED_FOR = [(key, item.producer) for key in papers.paper_keys() for item in load_paper(key).figures]
"""Every figure that a paper names."""


def suited(producer: str) -> str:
    """A paper that asks for a figure: mnist-rnn-e where it does."""
    return next((key for key, name in reversed(ASKED_FOR) if name == producer), "mnist-rnn-e")


@pytest.fixture(autouse=True)
def no_data_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the embedded sample, whatever is on this machine."""
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))


def output(producer: str) -> Output:
    return Output(id="figure", producer=producer, title="A figure")


def drawn(producer: str, view: View) -> Figure:
    with style.theme():
        figure = figures.PRODUCERS[producer](view)
        figure.draw_without_rendering()
    return figure


def texts(figure: Figure) -> list[Text]:
    """The texts that can be seen: not those of ticks outside the axes."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            outside = [tick for tick in ticks if not low <= tick.get_loc() <= high]
            hidden |= {id(label) for tick in outside for label in (tick.label1, tick.label2)}
        if not axes.axison:  # a picture: only its title and what was written into it
            hidden |= {id(item) for item in axes.findobj(Text)} - {id(item) for item in (axes.title, *axes.texts)}
    found = [item for item in figure.findobj(Text) if item.get_visible() and item.get_text().strip()]
    return [item for item in found if id(item) not in hidden]


# ----------------------------------------------------------------------------------------------------------
# The files


def test_every_figure_of_the_papers_is_a_vector_and_a_picture(full_report: report.Built) -> None:
    for path in (full_report.folder / "figures").glob("*.svg"):
        root = ET.parse(path).getroot()
        assert root.tag.endswith("svg")
        assert not root.findall(".//{http://www.w3.org/2000/svg}text"), "letters are paths: a reader needs no font"
        assert "<dc:date>" not in path.read_text(encoding="utf-8")
        picture = matplotlib.image.imread(path.with_suffix(".png"))
        assert picture[..., :3].min() < 0.5 < picture[..., :3].max(), "something is drawn on a white ground"


def test_no_figure_is_wider_than_the_column_it_was_made_for(full_report: report.Built) -> None:
    for path in (full_report.folder / "figures").glob("*.svg"):
        if path.stem == "design" or path.stem.startswith("overview-"):  # over both columns
            continue
        width = float(ET.parse(path).getroot().attrib["width"].removesuffix("pt"))
        assert width <= style.COLUMN * 72 * 1.02, path.name
        assert not figures.is_wide(path.with_suffix(""))


def test_the_callers_settings_of_matplotlib_stay() -> None:
    before = dict(mpl.rcParams)
    with style.theme():
        assert mpl.rcParams["svg.hashsalt"] == "twingrad"
    assert dict(mpl.rcParams) == before


def test_a_figure_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with style.theme():
        figure = style.new()
        figure.subplots()
        style.save(figure, tmp_path / "one")
        old = (tmp_path / "one.svg").read_bytes()
        monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            style.save(figure, tmp_path / "one")
    assert (tmp_path / "one.svg").read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "one.svg"]


# ----------------------------------------------------------------------------------------------------------
# What is drawn


@pytest.mark.parametrize(("key", "producer"), ASKED_FOR)
def test_no_text_lies_on_another_or_leaves_the_column(
    producer: str, key: str, fake: ModuleType, view_of: ViewOf
) -> None:
    of = load_paper(key).runs_of_paper or key
    figure = drawn(producer, view_of(fake.rows(of, seeds=3, data_source="sample"), paper=key))
    boxes = [(item.get_text(), item.get_window_extent()) for item in texts(figure)]
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        width = min(first.x1, second.x1) - max(first.x0, second.x0)
        height = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert width <= 1.5 or height <= 1.5, f"{one!r} and {other!r} overlap"
    for text, box in boxes:
        assert box.x0 > -2 and box.x1 < figure.bbox.x1 + 2, text


@pytest.mark.parametrize("producer", sorted(figures.PRODUCERS))
def test_a_figure_from_sample_data_says_so(
    producer: str, fake: ModuleType, view_of: ViewOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []
    save = style.save

    def keep(figure: Figure, *args: Any) -> None:
        save(figure, *args)
        saved.append(figure)

    monkeypatch.setattr(style, "save", keep)
    key = suited(producer)
    view = view_of(fake.rows(load_paper(key).runs_of_paper or key, seeds=1, data_source="sample"), paper=key)
    figures.make(output(producer), view, tmp_path / "figure")
    saved[0].draw_without_rendering()
    notice = next(item for item in saved[0].texts if item.get_text().startswith(SAMPLE_LABEL))
    others = [item.get_window_extent() for item in texts(saved[0]) if item is not notice]
    assert notice.get_window_extent().y0 >= max(box.y1 for box in others) - 1, "above everything else"


def test_measured_is_filled_and_reported_is_hollow_and_dashed(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows(seeds=2))
    lines = {str(line.get_label()): line for line in drawn("accuracy_over_epochs", view).axes[0].lines}
    reported = {name: line for name, line in lines.items() if name.endswith("(reported)")}
    assert set(reported) == {"Flux (reported)", "PyTorch (reported)", "The paper's own (reported)"}
    for name, line in lines.items():
        hollow = line.get_markerfacecolor() == "white" and line.get_linestyle() == "--"
        assert hollow == (name in reported), name
    assert list(reported["Flux (reported)"].get_ydata()) == [0.891, 0.919, 0.930, 0.938, 0.944]
    assert reported["PyTorch (reported)"].get_color() == style.look("torch").color


def test_engines_that_agree_have_one_line_and_others_their_own(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows("mnist-rnn-d", seeds=1)
    for item in sweep["epochs"]:
        if item["measure"] == "time":
            item["train_accuracy"] = 0.5 + 0.05 * item["epoch"] + (0.1 if item["engine"] == "jax" else 0)
    axes = drawn("accuracy_over_epochs", view_of(sweep, paper="mnist-rnn-d")).axes[0]
    labels = [str(line.get_label()) for line in axes.lines]
    assert labels == [f"TwinGrad numpy and {len(fake.LABELS) - 2} more", "JAX"]


def test_a_logarithmic_axis_has_no_bars(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows("imdb-cnn-a", seeds=1), paper="imdb-cnn-a")
    for name in ("time_by_epoch", "memory_by_epoch", "memory_per_epoch"):
        for axes in drawn(name, view).axes:
            scales = (axes.get_xscale(), axes.get_yscale())
            assert "log" not in scales or not axes.patches, name


def test_reported_times_have_a_panel_and_an_axis_of_their_own(fake: ModuleType, view_of: ViewOf) -> None:
    figure = drawn("time_per_epoch", view_of(fake.rows("mnist-rnn-d", seeds=2), paper="mnist-rnn-d"))
    measured, reported = figure.axes
    assert not measured.get_shared_x_axes().joined(measured, reported)
    assert "reported by the paper" in reported.get_title(loc="left")
    assert [label.get_text() for label in reported.get_yticklabels()] == ["The paper's own", "PyTorch", "Flux"]
    assert {"≈ 11 s", "less than both"} <= {item.get_text() for item in texts(figure)}


def test_bars_start_at_zero_and_are_the_means(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows("mnist-rnn-d", seeds=3)
    axes = drawn("time_per_epoch", view_of(sweep, paper="mnist-rnn-d")).axes[0]
    assert axes.get_xlim()[0] == 0
    seconds = [item["seconds"] for item in sweep["epochs"] if item["engine"] == "numpy" and item["measure"] == "time"]
    assert axes.patches[0].get_width() == pytest.approx(np.mean(seconds))


def test_any_number_of_variants_can_be_told_apart(fake: ModuleType, view_of: ViewOf) -> None:
    sweep = fake.rows("imdb-cnn-a", seeds=1)
    names = [f"v{number}" for number in range(12)]
    rows = [item for item in sweep["variants"] if item["variant"] == "static"]
    more = [item | {"variant": name} for name in names for item in rows]
    view = view_of(sweep | {"variants": more}, paper="imdb-cnn-a")
    (one, *_) = view.paper.variants
    variants = [one.model_copy(update={"id": name, "title": name}) for name in names]
    view = replace(view, paper=view.paper.model_copy(update={"variants": variants}))
    lines = [line for line in drawn("variants", view).axes[0].lines if len(line.get_xdata())]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == len(lines) == 13


@pytest.mark.parametrize("kind", ["all", "without", "none", "alone"])
def test_an_ablation_that_is_there_in_part_is_drawn_as_far_as_it_is(
    kind: str, fake: ModuleType, view_of: ViewOf, tmp_path: Path
) -> None:
    sweep = fake.rows("imdb-cnn-a", seeds=1)

    def lacking(*engines: str) -> View:
        rows = [item for item in sweep["ablation"] if item["configuration"] != kind or item["engine"] not in engines]
        return view_of(sweep | {"ablation": rows}, paper="imdb-cnn-a")

    axes = drawn("ablation", lacking("numpy")).axes[0]
    shown = {str(line.get_label()): line.get_xdata() for line in axes.lines if len(line.get_xdata()) > 2}
    assert set(shown) == {"TwinGrad Julia"} | ({"TwinGrad numpy"} if kind in ("none", "alone") else set())
    assert axes.get_yticklabels()[-1].get_text() == "all of them"
    if kind in ("none", "alone"):
        assert np.isnan(shown["TwinGrad numpy"]).tolist() == [False] * 3 + [kind == "none"]
    reason = figures.make(output("ablation"), lacking("numpy", "julia"), tmp_path / "figure")
    assert (reason is None) == (kind in ("none", "alone")), reason


def test_the_guide_of_the_scaling_figure_is_linear(fake: ModuleType, view_of: ViewOf) -> None:
    for axes in drawn("scaling", view_of(fake.rows(seeds=1))).axes:
        guide = next(line for line in axes.lines if line.get_label() == "linear growth")
        (x0, x1), (y0, y1) = guide.get_data()
        assert np.log(y1 / y0) == pytest.approx(np.log(x1 / x0))


def test_differences_of_the_loss_are_drawn_with_their_tolerance(fake: ModuleType, view_of: ViewOf) -> None:
    view = view_of(fake.rows(seeds=2))
    upper, lower = drawn("loss_first_steps", view).axes
    apart = [name for name in view.engines() if (loss_differences(view, name) > PARITY_TOLERANCE).any()]
    assert len(upper.lines) == 1 + len({*apart} - {view.engines()[0]}), "those that agree have one line"
    assert len(lower.lines) == len(fake.LABELS), "all others against the reference, and the tolerance"
    assert 1e-4 in {float(np.atleast_1d(line.get_ydata())[0]) for line in lower.lines}


# ----------------------------------------------------------------------------------------------------------
# Not drawn


@pytest.mark.parametrize("producer", NEEDS_RUNS)
def test_without_runs_a_panel_says_why(producer: str, fake: ModuleType, view_of: ViewOf, tmp_path: Path) -> None:
    nothing: dict[str, Any] = {name: [] for name in fake.rows()}
    reason = figures.make(output(producer), view_of(nothing, paper=suited(producer)), tmp_path / "figure")
    assert reason and ("not run" in reason or "was run" in reason or "no scaling run" in reason)
    assert (tmp_path / "figure.svg").is_file() and (tmp_path / "figure.png").is_file()


@pytest.mark.parametrize("producer", [name for name in NEEDS_RUNS if name != "ratios_by_size"])  # of two engines
def test_a_figure_with_one_engine_and_one_seed_is_drawn(
    producer: str, fake: ModuleType, view_of: ViewOf, tmp_path: Path
) -> None:
    key = suited(producer)
    view = view_of(fake.rows(load_paper(key).runs_of_paper or key, seeds=1, engines=("numpy",)), paper=key)
    assert figures.make(output(producer), view, tmp_path / "figure") is None


@pytest.mark.parametrize("producer", NEEDS_RUNS)
def test_a_figure_never_mixes_machines(producer: str, fake: ModuleType, view_of: ViewOf) -> None:
    key = suited(producer)
    sweep = fake.rows(load_paper(key).runs_of_paper or key, seeds=1)
    for items in sweep.values():
        for item in items:
            if item["engine"].startswith(("torch", "julia")) or item.get("size") == 1000:
                item["cpu_model"] = "Another CPU"
    with pytest.raises(MixedMachinesError):
        drawn(producer, view_of(sweep, paper=key))


def test_examples_are_those_of_the_data_that_was_used(fake: ModuleType, view_of: ViewOf) -> None:
    figure = drawn("dataset_examples", view_of(fake.rows(seeds=1, data_source="sample")))
    assert len([axes for axes in figure.axes if axes.images]) == 20
    with pytest.raises(NotDrawnError, match=r"made from the real dataset.*--data-dir or TWINGRAD_DATA"):
        drawn("dataset_examples", view_of(fake.rows(seeds=1)))


def test_examples_of_the_real_data(fake: ModuleType, view_of: ViewOf, data_dir: Path) -> None:
    view = view_of(fake.rows(seeds=1))
    figure = drawn("dataset_examples", replace(view, data_dir=data_dir))
    assert len([axes for axes in figure.axes if axes.images]) == 20


# ----------------------------------------------------------------------------------------------------------
# Networks from their spec

SPEC = """
format = "twingrad-model"
version = 1
opset = 1
name = "drawn"
[input]
shape = ["N", 784]
[[layers]]
id = "steps"
op = "reshape"
shape = [28, 28]
[[layers]]
id = "memory"
op = "lstm"
units = 32
returns = "sequence"
[[layers]]
id = "thin"
op = "dropout"
rate = 0.5
[[layers]]
id = "cell"
op = "rnn"
units = 16
activation = "relu"
[[layers]]
id = "bend"
op = "activation"
activation = "softplus"
[[layers]]
id = "output"
op = "dense"
units = 10
[loss]
op = "softmax_cross_entropy"
"""


def test_every_layer_of_a_spec_has_a_box_with_its_shape() -> None:
    spec = model_spec.loads(SPEC)
    boxes = architecture.boxes(spec)
    assert [box.title.partition(":")[0] for box in boxes[1:-1]] == [layer.id for layer in spec.layers]
    assert boxes[0].detail == "N × 784"
    assert boxes[2].title == "memory: LSTM, many-to-many" and boxes[2].steps == 28
    assert boxes[2].detail == f"N × 28 × 32\n{4 * 32 * (28 + 32 + 1)} parameters"
    assert boxes[3].title == "thin: dropout 0.5" and boxes[5].title == "bend: activation softplus"
    assert boxes[-1].title == "softmax cross entropy"


def test_a_transposed_convolution_is_named() -> None:
    layer = '[[layers]]\nid = "up"\nop = "conv2d_transpose"\nfilters = 3\nkernel = [2, 1]\n'
    head = 'format = "twingrad-model"\nversion = 1\nopset = 4\nname = "up"\ninput = { shape = ["N", 1, 4, 4] }\n'
    spec = model_spec.loads(f'{head}loss = {{ op = "mean_squared_error" }}\n{layer}')
    assert architecture.boxes(spec)[1].title == "up: transposed conv 2D, 3 filters of 2×1"


def test_the_drawing_shows_every_box_and_the_first_and_last_step() -> None:
    spec = model_spec.loads(SPEC)
    with style.theme():
        figure = architecture.network(spec)
    shown = {item.get_text() for item in texts(figure)}
    for box in architecture.boxes(spec):
        assert {box.title, box.detail} <= shown
    assert {"$h_{1}$", "$h_{28}$", "…"} <= shown


def test_the_drawing_follows_the_spec() -> None:
    other = model_spec.loads(SPEC.replace("shape = [28, 28]", "shape = [4, 196]").replace("units = 16", "units = 48"))
    with style.theme():
        shown = {item.get_text() for item in texts(architecture.network(other))}
        cell = {item.get_text() for item in texts(architecture.cell(other))}
    assert "steps: 4 segments of 196" in shown and "$h_{4}$" in shown and "…" not in shown
    assert {"relu", "48"} <= cell


def test_a_network_without_a_vanilla_cell_has_none_to_draw() -> None:
    spec = model_spec.loads(SPEC.replace('op = "rnn"', 'op = "gru"').replace('activation = "relu"\n', ""))
    with pytest.raises(ReportError, match=r'model "drawn" has no vanilla recurrent layer'):
        architecture.cell(spec)


@pytest.mark.parametrize("name", sorted(papers.models()))
def test_every_network_that_comes_with_the_project_can_be_drawn(name: str) -> None:
    with style.theme():
        assert texts(architecture.network(model_spec.load(papers.model_path(name))))


# ----------------------------------------------------------------------------------------------------------
# Colours

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009,
# severity 1.0, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, matrix: Any) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody with a deficiency sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(np.asarray(matrix) @ linear, 0, 1) / (XYZ @ np.ones(3))
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", sorted(DEFICIENCIES))
def test_engines_can_be_told_apart_by_everybody(deficiency: str) -> None:
    for (one, first), (other, second) in itertools.combinations(style.LOOKS.items(), 2):
        distance = np.linalg.norm(
            lab(first.color, DEFICIENCIES[deficiency]) - lab(second.color, DEFICIENCIES[deficiency])
        )
        assert distance > 10, f"{one} and {other}: {distance:.1f}"
        assert first.marker != second.marker


def test_an_unknown_engine_gets_a_look_and_keeps_it() -> None:
    assert style.look("some-new-engine") == style.look("some-new-engine")
    assert style.look("pytorch") == style.LOOKS["torch"]
