"""The figures of the report, each drawn by one producer from the tidy results.

A producer takes the rows that one paper may show (`View`) and returns a matplotlib figure, or raises
`NotDrawnError` with the reason; then a panel with that reason takes its place. What a paper reports is drawn hollow
or in a separate panel, with its machine named, never as if it had been measured here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from experiments import data
from experiments.data.dataset import Dataset
from experiments.formats import counted, fixed, fraction, given, significant, size
from experiments.measures.registry import WORDS
from experiments.papers import Output, Reported
from experiments.quantities import QUANTITIES
from experiments.report import architecture as drawing
from experiments.report import style
from experiments.report.row_helpers import (
    PARITY_TOLERANCE,
    REFERENCE,
    SCALED,
    UNITS,
    loss_differences,
    of_memory,
    reported_name,
)
from experiments.report.style import COLUMN
from experiments.report.view import ReportError, View

Producer = Callable[..., Figure]
PRODUCERS: dict[str, Producer] = {}

VISIBLE = 0.01
"""Curves that are nowhere farther apart than this share of the picture's height are drawn as one."""


class NotDrawnError(ReportError):
    """There is nothing to draw; the message says why."""


def producer(function: Producer) -> Producer:
    """Enter a function in PRODUCERS under its own name, which is what paper files call it by."""
    PRODUCERS[function.__name__] = function
    return function


OF_DATASET = ("dataset_examples", "review_examples")
"""What shows rows of the data set, and so needs it."""


def make(output: Output, view: View, stem: Path) -> str | None:
    """Draw the figure that a paper's file asks for as `<stem>.svg` and `.png`; the reason when it is not drawn."""
    with style.theme():
        try:
            asked = [output.quantities] if output.quantities else []
            figure, reason = PRODUCERS[output.producer](view, *asked), None
        except NotDrawnError as error:
            figure, reason = _instead(str(error)), str(error)
        style.save(figure, stem, view.notice)
    return reason


def caption(output: Output) -> str:
    """A figure's title, what it reproduces, and its caption if it has one."""
    title = output.title + (f" (the paper's {output.reproduces})" if output.reproduces else "")
    return f"{title}. {output.caption}" if output.caption else title


def is_wide(stem: Path) -> bool:
    """Whether a saved figure needs both columns of the paper."""
    with stem.with_name(stem.name + ".svg").open(encoding="utf-8") as file:
        head = file.read(2000)
    points = float(head.partition('width="')[2].partition("pt")[0])
    return points > 1.2 * COLUMN * 72


# ----------------------------------------------------------------------------------------------------------
# What is drawn without a run: the data and the network


@producer
def dataset_examples(view: View) -> Figure:
    """Twenty training images, two of each class, with their labels."""
    dataset = _dataset(view)
    labels = np.asarray(dataset.y_train)
    side = int(np.sqrt(dataset.x_train.shape[1]))
    if dataset.vocabulary is not None or side * side != dataset.x_train.shape[1] or labels.max() > 9:
        raise NotDrawnError(f"the rows of {dataset.name} are not square images of ten classes")
    chosen = [np.flatnonzero(labels == digit)[:2] for digit in range(10)]
    figure = style.new(COLUMN, 0.95)
    grid = figure.subplots(2, 10)
    for digit, rows in enumerate(chosen):
        for line in range(2):
            axes = grid[line][digit]
            axes.set_axis_off()
            if line < len(rows):
                axes.imshow(dataset.x_train[rows[line]].reshape(side, side), cmap="gray_r", interpolation="nearest")
        grid[0][digit].set_title(str(digit), fontsize=6.5, pad=2)
    if view.data_source is None and dataset.source == "sample":
        grid[1][0].annotate(data.SAMPLE_LABEL, (0, -0.2), xycoords="axes fraction", fontsize=6, color=style.WARNING)
    return figure


@producer
def review_examples(view: View) -> Figure:
    """The beginnings of two reviews of each class, and the words that the network is given of the first."""
    dataset = _dataset(view)
    if not dataset.examples or dataset.vocabulary is None:
        raise NotDrawnError(f"the rows of {dataset.name} are no texts")
    labels = np.asarray(dataset.y_train)[: len(dataset.examples)]
    chosen = [row for label in (1, 0) for row in np.flatnonzero(labels == label)[:2]]
    parts = [(("positive" if labels[row] else "negative"), _start(dataset.examples[row])) for row in chosen]
    if chosen:
        words = [dataset.vocabulary[number] for number in dataset.x_train[chosen[0]] if number]
        parts.append(("as the network reads the first", _start(" ".join(words))))
    lines = [textwrap.wrap(text, 74) for _, text in parts]
    height = sum(0.2 + 0.125 * len(item) for item in lines)
    figure = style.new(COLUMN, height)
    top = 1.0
    for (title, _), text in zip(parts, lines, strict=True):
        figure.text(0.01, top, title, va="top", fontsize=6.5, weight="bold")
        figure.text(0.01, top - 0.12 / height, "\n".join(text), va="top", fontsize=6.0, linespacing=1.3)
        top -= (0.2 + 0.125 * len(text)) / height
    return figure


def _start(text: str, length: int = 210) -> str:
    """The first words of a text, on one line, without what matplotlib would take for a formula."""
    return textwrap.shorten(" ".join(text.split()).replace("$", "\\$"), length, placeholder=" …")


def _dataset(view: View) -> Dataset:
    """The data that the results were made from; NotDrawnError when others are at hand."""
    options = view.paper.loader_options()
    dataset = data.load(view.paper.dataset, data_dir=view.data_dir, allow_download=False, **options)
    if view.data_source is not None and dataset.source != view.data_source:
        raise NotDrawnError(
            f"the results were made from {_source(view.data_source)}, but what is at hand is "
            f"{_source(dataset.source)}; name the data with --data-dir or TWINGRAD_DATA"
        )
    return dataset


@producer
def architecture(view: View) -> Figure:
    """The paper's network, drawn from its model spec."""
    return drawing.network(view.paper.spec())


@producer
def recurrent_cell(view: View) -> Figure:
    """One step of the network's vanilla recurrent layer, drawn from its model spec."""
    return drawing.cell(view.paper.spec())


# ----------------------------------------------------------------------------------------------------------
# Bars


@producer
def bars(view: View, names: Sequence[str] = ("later_epoch_seconds",)) -> Figure:
    """Any quantities of engines, which a paper's file names: a panel for each, with the spread over the runs."""
    quantities = [QUANTITIES[name] for name in names]
    engines = list(dict.fromkeys(engine for one in quantities for engine in _engines(view, one.measure)))
    figure = style.new(COLUMN, len(quantities) * (0.55 + 0.24 * len(engines)))
    panels = figure.subplots(len(quantities), 1, squeeze=False)[:, 0]
    for axes, quantity in zip(panels, quantities, strict=True):
        longest = 0.0
        for position, engine in enumerate(engines):
            value = quantity.value(view, engine)
            if value is None:
                continue
            spread = _sd(np.atleast_1d(quantity.values(view, engine)))
            _bar(axes, position, value, spread, engine)
            _beside(axes, value + spread, position, quantity.unit.show(value))
            longest = max(longest, value + spread)
        _rows(axes, [view.label(engine) for engine in engines])
        axes.set_xlim(0, longest * 1.4 or 1)
        unit = quantity.unit
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: unit.number(value)))
        axes.set_xlabel(f"{quantity.label}{f' [{unit.symbol}]' if unit.symbol else ''}")
    return figure


@producer
def time_per_epoch(view: View) -> Figure:
    """Average time per epoch as bars with the spread over the seeds; reported times in a separate panel."""
    engines = _engines(view, "time")
    reported = view.paper.reported_for("seconds_per_epoch")
    figure = style.new(COLUMN, 0.65 + 0.24 * len(engines) + (0.5 + 0.24 * len(reported) if reported else 0))
    panels = figure.subplots(2, 1, height_ratios=(len(engines), len(reported))) if reported else [figure.subplots()]
    axes = panels[0]
    longest = 0.0
    for position, engine in enumerate(engines):
        epochs = view.epochs_of("time", engine)
        values = epochs.groupby("key")["seconds"].mean().to_numpy()
        later = float(epochs.loc[epochs["epoch"] > 1, "seconds"].mean())
        _bar(axes, position, values.mean(), _sd(values), engine)
        axes.plot(later, position, marker="|", color="black", markersize=9, markeredgewidth=1.2)
        end = max(values.mean() + _sd(values), later)
        longest = max(longest, end)
        text = f"{significant(float(values.mean()))} s" + (
            f", later {significant(later)} s" if later < 0.9 * values.mean() else ""
        )
        _beside(axes, end, position, text)
    _rows(axes, [view.label(engine) for engine in engines])
    axes.set_xlim(0, longest * 1.6)
    axes.set_xlabel("seconds per epoch (| without the first)")
    if reported:
        axes.set_title("measured here", loc="left")
        _reported_bars(panels[1], reported)
        panels[1].set_title(_reported_where(view, 44), loc="left")
        panels[1].set_xlabel("seconds per epoch")
    return figure


@producer
def test_accuracy(view: View) -> Figure:
    """Accuracy on the test data after the last epoch: every seed as a dot, mean and standard deviation beside them.

    Dots, not bars: the differences are far smaller than the values, and a bar whose axis does not start at zero lies.
    """
    engines = _engines(view, "time")
    figure = style.new(COLUMN, 0.55 + 0.3 * len(engines))
    axes = figure.subplots()
    for position, engine in enumerate(engines):
        values = view.ok("time", engine).sort_values("seed")["test_accuracy"].to_numpy()
        look = style.look(engine)
        offsets = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(1)
        axes.plot(values, position + offsets, ".", color=look.color, alpha=0.55, markersize=4)
        axes.errorbar(
            values.mean(),
            position,
            xerr=_sd(values),
            fmt=look.marker,
            color="black",
            markersize=4,
            capsize=2,
            linewidth=1,
        )
        axes.annotate(
            fraction(values.mean()) + (f" ± {fraction(_sd(values))}" if len(values) > 1 else ""),
            (1.01, position),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=6,
        )
    low, high = axes.get_xlim()
    margin = max(0.0, 0.004 - (high - low)) / 2  # so that noise in the fifth digit does not fill the picture
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    _rows(axes, [view.label(engine) for engine in engines])
    axes.set_xlabel("test accuracy (the axis does not start at 0)")
    return figure


@producer
def memory_per_epoch(view: View) -> Figure:
    """Bytes allocated in the first epoch (filled) and in each later one (hollow), on a logarithmic axis."""
    engines = _engines(view, "memory")
    figure = style.new(COLUMN, 0.55 + 0.24 * len(engines))
    axes = figure.subplots()
    names = ("bytes_first_epoch", "bytes_later_epochs")
    pairs = {engine: view.ok("memory", engine)[[*names]].mean().clip(lower=1).dropna() for engine in engines}
    everything = np.concatenate([*pairs.values()])
    if not len(everything):
        raise NotDrawnError(f"no memory run of {view.paper.key} has counted its allocations")
    axes.set_xscale("log")
    for position, engine in enumerate(engines):
        look, pair = style.look(engine), pairs[engine]
        axes.plot(pair, [position] * len(pair), color=look.color, linewidth=0.8, alpha=0.6)
        for name, value in pair.items():
            filled = look.color if name == names[0] else "white"
            axes.plot(value, position, look.marker, color=look.color, markerfacecolor=filled, markersize=4)
        if len(pair):
            _beside(axes, pair.max(), position, ", later ".join(size(value) for value in pair))
    axes.set_xlim(10 ** np.floor(np.log10(everything.min()) - 0.3), everything.max() * 3e4)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value, trim=True)))
    axes.xaxis.set_minor_locator(NullLocator())
    _rows(axes, [view.label(engine) for engine in engines])
    axes.set_xlabel("allocated: first epoch, each later one (hollow)")
    return figure


@producer
def time_by_epoch(view: View) -> Figure:
    """Seconds of every epoch as bars, side by side; what the paper reports in a separate panel."""
    engines = _engines(view, "time")
    measured = {
        engine: view.epochs_of("time", engine).groupby("epoch")["seconds"].mean().dropna() for engine in engines
    }
    reported = _reported_by_epoch(view, ("seconds_by_epoch",), "seconds_first_epoch", "seconds_per_epoch", 1.0)
    return _by_epoch(view, measured, reported, "seconds", FuncFormatter(lambda value, _: significant(value, trim=True)))


@producer
def memory_by_epoch(view: View) -> Figure:
    """Bytes allocated in every epoch as bars, side by side; what the paper reports in a separate panel."""
    engines = _engines(view, "memory")
    measured = {
        engine: view.epochs_of("memory", engine).groupby("epoch")["bytes_allocated"].mean().dropna().clip(lower=1)
        for engine in engines
    }
    measured = {engine: values for engine, values in measured.items() if len(values)}
    if not measured:
        raise NotDrawnError(f"no memory run of {view.paper.key} has counted its allocations")
    first, later = (of_memory(view.paper, what)[:1] or [""] for what in ("first_epoch", "per_epoch"))
    unit = UNITS.get((later[0] or "gibibytes").partition("_")[0], 1.0)
    reported = _reported_by_epoch(view, ("gibibytes_by_epoch",), first[0], later[0], unit)
    return _by_epoch(view, measured, reported, "allocated", FuncFormatter(lambda value, _: size(value, trim=True)))


def _reported_by_epoch(
    view: View, by_epoch: tuple[str, ...], first: str, later: str, unit: float
) -> dict[str, pd.Series]:
    """What the paper reports for each epoch, by row: printed so, or as a first epoch and an average of the others."""
    epochs = range(1, view.paper.training.epochs.value + 1)
    found: dict[str, pd.Series] = {}
    for item in view.paper.reported:
        if item.kind != "paper":
            continue
        values = found.get(item.row, pd.Series(dtype=float))
        if item.quantity in by_epoch:
            values = pd.Series(dict(enumerate(item.by_epoch, start=1))) * unit
        elif item.value is not None and item.quantity in (first, later):
            chosen = [1] if item.quantity == first else [epoch for epoch in epochs if epoch > 1]
            values = values.reindex(epochs)
            values[chosen] = item.value * unit
        if len(values):
            found[item.row] = values
    return found


def _by_epoch(
    view: View,
    measured: dict[str, pd.Series],
    reported: dict[str, pd.Series],
    label: str,
    formatter: FuncFormatter,
) -> Figure:
    """A group for each epoch: bars from zero, or markers on a logarithmic axis, where a bar has no beginning."""
    figure = style.new(COLUMN, 2.1 + (1.5 if reported else 0))
    panels = np.atleast_1d(figure.subplots(2 if reported else 1, 1))
    groups: list[tuple[Axes, dict[str, pd.Series], bool]] = [(panels[0], measured, True)]
    if reported:
        groups.append((panels[1], reported, False))
        panels[0].set_title("measured here", loc="left")
        panels[1].set_title(_reported_where(view, 50), loc="left")
    for axes, systems, ours in groups:
        width = 0.84 / len(systems)
        logarithmic = _scale(axes, np.concatenate([values.dropna() for values in systems.values()]))
        for index, (name, values) in enumerate(systems.items()):
            look = style.look(name)
            places = values.index.to_numpy(dtype=float) + (index - (len(systems) - 1) / 2) * width
            text = view.label(name) if ours else "The paper's own" if name == "Own" else name
            if logarithmic:
                filled = look.color if ours else "white"
                axes.plot(
                    places, values, look.marker, color=look.color, markerfacecolor=filled, markersize=3, label=text
                )
                continue
            hollow = {"facecolor": "white", "edgecolor": look.color, "linestyle": "--"}
            looks = {"color": look.color} if ours else hollow
            axes.bar(places, values, 0.9 * width, label=text, linewidth=0.8, **looks)
        axes.yaxis.set_major_formatter(formatter)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(label)
        style.clean(axes)
        if not ours:
            axes.legend(loc="upper right", ncols=len(systems), bbox_to_anchor=(1.0, -0.16))
    panels[-1].set_xlabel("epoch", loc="left")
    _legend(figure, panels[0])
    return figure


def _scale(axes: Axes, values: np.ndarray) -> bool:
    """An axis from zero where all values can be seen so, else a logarithmic one; whether it is that."""
    low, high = float(values.min()), float(values.max())
    if high <= 15 * low:
        axes.set_ylim(0, 1.08 * high)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        return False
    axes.set_yscale("log")
    axes.set_ylim(low / 2, 1.6 * high)
    decades = np.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(base=10 if decades < 4 else 100, subs=(1, 3) if decades < 1.8 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    return True


@producer
def variants(view: View) -> Figure:
    """Test accuracy by epoch of the paper's network and of its variants, in a panel for each engine."""
    engines = [engine for engine in view.engines() if len(view.table("variants", engine))]
    if not engines:
        raise NotDrawnError(f"variants of {view.paper.key}: not run")
    titles = {variant.id: variant.title for variant in view.paper.variants}
    figure = style.new(COLUMN, 2.1)
    panels = np.atleast_1d(figure.subplots(1, len(engines), sharey=True))
    lines = zip(cycle(("-", "--", ":", "-.")), cycle(("o", "s", "^", "v", "D")), strict=False)  # 20 pairs
    styles = dict(zip(["", *titles], lines, strict=False))
    for axes, engine in zip(panels, engines, strict=True):
        rows = view.table("variants", engine)
        frames = {"": view.epochs_of("time", engine)}
        frames |= {name: rows[rows["variant"] == name] for name in titles}
        for name, frame in frames.items():
            mean = frame.groupby("epoch")["test_accuracy"].mean()
            line, marker = styles[name]
            title = titles.get(name, "the paper's network")
            axes.plot(mean.index, mean, line, marker=marker, color=style.look(engine).color, label=title)
        axes.set_title(view.label(engine))
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.clean(axes)
    panels[0].set_ylabel("test accuracy")
    _legend(figure, panels[0])
    return figure


@producer
def ablation(view: View) -> Figure:
    """How much longer a step takes without each technique, in each engine, on a logarithmic axis."""
    factors: dict[str, pd.Series] = {}
    for engine in view.engines():
        rows = view.table("ablation", engine).dropna(subset="microseconds_per_step")
        steps = rows.set_index(["configuration", rows["technique"].fillna("")])["microseconds_per_step"]
        if ("all", "") not in steps.index or "without" not in steps.index:
            continue
        factors[engine] = steps["without"] / steps["all", ""]
        if ("none", "") in steps.index:
            factors[engine]["all of them"] = steps["none", ""] / steps["all", ""]
    if not factors:
        raise NotDrawnError(f"ablation of {view.paper.key}: not run, or only in part")
    names = list(dict.fromkeys(name for values in factors.values() for name in values.index))
    names.sort(key=lambda name: name == "all of them")  # the last row
    figure = style.new(COLUMN, 0.7 + 0.19 * len(names))
    axes = figure.subplots()
    for index, engine in enumerate(factors):
        look = style.look(engine)
        values = factors[engine].reindex(names)
        offset = 0.22 * (index - (len(factors) - 1) / 2)
        places = np.arange(len(names)) + offset
        axes.plot(values, places, look.marker, color=look.color, label=view.label(engine))
        axes.hlines(places, 1, values, color=look.color, linewidth=0.8)
    axes.axvline(1, color="black", linewidth=0.7)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value, trim=True)))
    _rows(axes, [name.replace("_", " ") for name in names])
    axes.set_xlabel("step time without the technique / with all of them")
    _legend(figure, axes)
    return figure


# ----------------------------------------------------------------------------------------------------------
# Lines


@producer
def accuracy_over_epochs(view: View) -> Figure:
    """Training accuracy by epoch: measured with filled markers, reported hollow and dashed."""
    figure = style.new(COLUMN, 2.9)
    axes = figure.subplots()
    for engines in _agreeing(view, _engines(view, "time"), ["train_accuracy"]):
        _by_epoch_line(axes, view, engines, "train_accuracy")
        by_epoch = view.epochs_of("time", engines[0]).groupby("epoch")["train_accuracy"]
        mean, spread = by_epoch.mean(), by_epoch.std()
        if spread.notna().any():
            color = style.look(engines[0]).color
            axes.fill_between(mean.index, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)
    for item in view.paper.reported_for("train_accuracy"):
        if not item.by_epoch:
            continue
        look = style.look(item.row)
        axes.plot(
            range(1, len(item.by_epoch) + 1),
            item.by_epoch,
            color=look.color,
            marker=look.marker,
            markerfacecolor="white",
            linestyle="--",
            linewidth=0.8,
            label=f"{reported_name(item)} (reported)",
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("training accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    style.clean(axes)
    return figure


@producer
def loss_over_epochs(view: View) -> Figure:
    """Training and test loss after each epoch, mean over the seeds."""
    figure = style.new(COLUMN, 2.0)
    panels = figure.subplots(1, 2, sharey=True)
    names = ("train_loss", "test_loss")
    groups = _agreeing(view, _engines(view, "time"), names)
    for axes, name, title in zip(panels, names, ("training", "test"), strict=True):
        for engines in groups:
            _by_epoch_line(axes, view, engines, name)
        axes.set_title(title)
        axes.margins(0.1, 0.15)  # the markers are large beside so low a panel
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.clean(axes)
    panels[0].set_ylabel("loss")
    _legend(figure, panels[0])
    return figure


def _agreeing(view: View, engines: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Engines whose curves at the first seed are one line to the eye, together: those need no line each."""
    curves = {}
    for engine in engines:
        epochs = view.epochs_of("time", engine)
        curves[engine] = epochs[epochs["seed"] == epochs["seed"].min()].groupby("epoch")[[*names]].mean()
    height = max(1e-9, float(pd.concat(curves.values()).max().max() - pd.concat(curves.values()).min().min()))
    groups: list[list[str]] = []
    for engine, curve in curves.items():
        near = [group for group in groups if (curve - curves[group[0]]).abs().max().max() < VISIBLE * height]
        if near:
            near[0].append(engine)
        else:
            groups.append([engine])
    return groups


def _by_epoch_line(axes: Axes, view: View, engines: Sequence[str], name: str) -> None:
    """The mean of a column by epoch, of the first of some engines that agree; the label counts the others."""
    mean, look = view.epochs_of("time", engines[0]).groupby("epoch")[name].mean(), style.look(engines[0])
    text = view.label(engines[0]) + (f" and {len(engines) - 1} more" if len(engines) > 1 else "")
    axes.plot(mean.index, mean, color=look.color, marker=look.marker, markersize=5, label=text)


@producer
def loss_first_steps(view: View) -> Figure:
    """Loss of the first steps at the lowest seed, and below it the difference from the reference over all seeds.

    Engines that agree within the tolerance have one line, the first one's.
    """
    engines = [engine for engine in _engines(view, "time") if (view.steps["engine"] == engine).any()]
    if not engines:
        raise NotDrawnError(f"no run of {view.paper.key} has kept its first steps' losses")
    figure = style.new(COLUMN, 2.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.2, 1))
    for engine in engines:
        look = style.look(engine)
        difference = loss_differences(view, engine).groupby("step").max()
        if engine == engines[0] or (difference > PARITY_TOLERANCE).any():
            steps = view.steps[view.steps["engine"] == engine]
            steps = steps[steps["seed"] == steps["seed"].min()].sort_values("step")
            color = "black" if engine == engines[0] else look.color
            upper.plot(steps["step"], steps["loss"], color=color, linewidth=1)
        if engine != REFERENCE:
            difference = difference[difference > 0]  # equal to the last bit has no place on a logarithmic axis
            label = view.label(engine)
            lower.plot(difference.index, difference, look.marker, color=look.color, markersize=2, label=label)
    upper.set_ylabel("loss")
    _legend(figure, lower)
    lower.axhline(PARITY_TOLERANCE, color="black", linewidth=0.7, linestyle="--")
    lower.annotate(
        "tolerance",
        (1, PARITY_TOLERANCE),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=6,
    )
    lower.set_yscale("log")
    lower.set_ylim(1e-9, max(1e-3, 3 * lower.dataLim.y1))
    lower.set_ylabel(f"|Δ| to {view.label(REFERENCE)}")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        style.clean(axes)
    return figure


@producer
def race(view: View) -> Figure:
    """Time per step of each round, and the median, for every engine and number of threads."""
    every = view.table("race")
    if not len(every):
        raise NotDrawnError(f"no race was run: twingrad race {view.paper.key}")
    engines = [engine for engine in view.engines() if len(view.table("race", engine))]
    threads = sorted(every["threads"].unique(), reverse=True)
    figure = style.new(COLUMN, 0.5 + (0.22 * len(engines) + 0.25) * len(threads))
    panels = np.atleast_1d(figure.subplots(len(threads), 1, sharex=True))
    for axes, count in zip(panels, threads, strict=True):
        rounds = every[every["threads"] == count]
        medians = rounds.groupby("engine")["microseconds_per_step"].median()
        for position, engine in enumerate(engines):
            values = rounds.loc[rounds["engine"] == engine, "microseconds_per_step"]
            if not len(values):
                axes.annotate("not run", (0, position), va="center", fontsize=6)
                continue
            look = style.look(engine)
            axes.barh(position, medians[engine], 0.7, color=look.color, alpha=0.35, linewidth=0)
            axes.plot(values, [position] * len(values), "|", color=look.color, markersize=6)
            text = f"{significant(medians[engine])} µs"
            if REFERENCE in medians and engine != REFERENCE:
                paired = rounds.pivot_table(index="round", columns="engine", values="microseconds_per_step")
                text += f" ({fixed((paired[engine] / paired[REFERENCE]).median())})"
            _beside(axes, values.max(), position, text)
        _rows(axes, [view.label(engine) for engine in engines])
        title = f"{counted(count, 'thread')} each"
        limits = rounds["limit_microseconds"].dropna()
        if len(limits):
            axes.axvline(limits.iloc[0], color="#555555", linewidth=0.8, linestyle=":")
            title += f"; dotted: the limit, {significant(limits.iloc[0])} µs"
        axes.set_title(title, loc="left")
    panels[-1].set_xlim(0, every["microseconds_per_step"].max() * 1.45)
    panels[-1].set_xlabel(f"µs per step (ratio to {view.label(REFERENCE)})")
    return figure


@producer
def scaling(view: View) -> Figure:
    """Step time against batch size and sequence length, logarithmic, with a guide of linear growth."""
    points = view.table("scaling")
    if not len(points):
        raise NotDrawnError(f"no scaling run: twingrad run {view.paper.key}")
    present = {quantity: name for quantity, name in SCALED.items() if (points["quantity"] == quantity).any()}
    figure = style.new(COLUMN, 2.1)
    panels = np.atleast_1d(figure.subplots(1, len(present), sharey=True))
    for axes, (quantity, name) in zip(panels, present.items(), strict=True):
        part = points[points["quantity"] == quantity]
        for engine in view.engines():
            line = part[part["engine"] == engine].sort_values("value")
            if len(line):
                look = style.look(engine)
                axes.plot(
                    line["value"],
                    line["microseconds_per_step"],
                    color=look.color,
                    marker=look.marker,
                    label=view.label(engine),
                )
        if len(part):
            _linear_guide(axes, part)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(name.lower())
        style.clean(axes, "both")
    panels[0].set_ylabel("µs per step")
    _legend(figure, panels[0])
    return figure


# ----------------------------------------------------------------------------------------------------------
# Parts


def _engines(view: View, measure: str) -> list[str]:
    """The engines with finished runs of a measure; NotDrawnError when there are none."""
    engines = [engine for engine in view.engines() if len(view.ok(measure, engine))]
    if not engines:
        reasons = dict.fromkeys(view.why_missing(engine, measure) or "" for engine in view.engines())
        why = "; ".join(filter(None, reasons)) or f"not planned in the profile {view.profile}"
        raise NotDrawnError(f"{WORDS[measure]} of {view.paper.key}: {why}")
    return engines


def _bar(axes: Axes, position: int, value: float, spread: float, engine: str) -> None:
    """A horizontal bar in an engine's colour, with the spread of its runs."""
    look = {"color": style.look(engine).color, "edgecolor": "black", "linewidth": 0.5}
    axes.barh(position, value, 0.7, xerr=spread or None, error_kw={"elinewidth": 0.8, "capsize": 2}, **look)


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)


def _reported_where(view: View, width: int) -> str:
    """The title of a panel with what the study reports."""
    machine = view.paper.environment.description.replace(" GB", "\u00a0GB")
    return textwrap.fill(f"reported by the paper (machine: {machine})", width)


def _instead(reason: str) -> Figure:
    """A panel that stands for a figure and says why there is none."""
    figure = style.new(COLUMN, 0.8)
    figure.text(0.5, 0.5, f"not drawn: {reason}", ha="center", va="center", wrap=True, fontsize=7, color=style.WARNING)
    return figure


def _source(name: str) -> str:
    return {"real": "the real dataset", "generated": "generated rows"}.get(name, f"the {data.SAMPLE_LABEL}")


def _sd(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _reported_bars(axes: Axes, items: Sequence[Reported]) -> None:
    """Hollow, dashed bars; words where the paper gives no number."""
    longest = max((item.value or 0.0 for item in items), default=0.0) or 1.0
    for position, item in enumerate(items):
        color = style.look(item.row).color
        if item.value is None:
            _beside(axes, 0, position, item.words)
            continue
        axes.barh(position, item.value, 0.7, facecolor="white", edgecolor=color, linestyle="--", linewidth=1)
        _beside(axes, item.value, position, f"{'≈ ' if item.precision == 'approximate' else ''}{given(item.value)} s")
    _rows(axes, [reported_name(item) for item in items])
    axes.set_xlim(0, longest * 1.3)


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    """A text to the right of a bar's end."""
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=6)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Named rows from top to bottom, with a grid along the values."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    style.clean(axes, "x")


def _linear_guide(axes: Axes, points: pd.DataFrame) -> None:
    """A dotted line of slope one through the right-most point of the fastest engine, half as high."""
    last = points[points["value"] == points["value"].max()]["microseconds_per_step"].min() / 2
    ends = np.array([points["value"].min(), points["value"].max()], dtype=float)
    lowest = points["microseconds_per_step"].min() / 3
    start = max(ends[0], ends[1] * lowest / last)
    axes.plot(
        [start, ends[1]],
        [last * start / ends[1], last],
        ":",
        color="#555555",
        linewidth=1,
        label="linear growth",
    )
