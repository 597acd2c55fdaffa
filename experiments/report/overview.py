"""The figures that hold all studies together: time, whole trainings, accuracy and memory, each relative to PyTorch.

A figure has one row per study, and in it one point per engine: ratios on a logarithmic axis, where a half and a double
are equally far from one, differences of accuracies on a linear one. A line through a point is its 95 % confidence
interval, where there are runs enough for one. Ratios of times and differences of accuracies are those within a round or
a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.formats import given, power_of_ten
from experiments.report import style
from experiments.report.row_helpers import REFERENCE
from experiments.report.view import View
from experiments.testing import Interval, of_mean, of_median

BANDS = 0.62
"""The share of a row's height over which its engines' points are spread."""


@dataclass(frozen=True)
class Point:
    """What one engine makes of a quantity in one study."""

    value: float
    interval: Interval | None = None


Measured = Callable[[View], dict[str, Point]]


@dataclass(frozen=True)
class Overview:
    """A figure over all studies. `points` gives those of a study by engine; `reference` is where PyTorch is."""

    id: str
    title: str
    axis: str
    points: Measured
    reference: float
    logarithmic: bool = True


def draw(overview: Overview, views: Sequence[View], stem: Path) -> bool:
    """Draw the figure of these studies as `<stem>.svg` and `.png`; False where no study has a point for it."""
    shared: dict[tuple[str, str], list[str]] = {}  # studies of one task have their trainings in common, and one row
    for view in views:
        shared.setdefault((view.paper.runs_of_paper or view.paper.key, _machine(view)), []).append(view.paper.key)
    found = {
        ",\n".join(shared[place]) + place[1]: points
        for view in views
        if (place := (view.paper.key, _machine(view))) in shared and (points := overview.points(view))
    }
    if not found:
        return False
    with style.theme():
        style.save(_figure(overview, found, _labels(views)), stem)
    return True


def _machine(view: View) -> str:
    """A line with the machine of a row, where results come from several."""
    return f"\n{view.machines[0]}" if view.machines else ""


def _labels(views: Sequence[View]) -> dict[str, str]:
    """The engines of all studies in the order of the first that has them, and what figures call them."""
    return {engine: view.label(engine) for view in views for engine in view.engines()}


def _figure(overview: Overview, found: dict[str, dict[str, Point]], labels: dict[str, str]) -> Figure:
    engines = [engine for engine in labels if any(engine in points for points in found.values())]
    offsets = dict(zip(engines, np.linspace(-BANDS / 2, BANDS / 2, len(engines)), strict=True))
    figure = style.new(style.PAGE, 0.75 + 0.42 * len(found))
    axes = figure.subplots()
    for row, points in enumerate(found.values()):
        for engine, point in points.items():
            look, height = style.look(engine), row + (offsets[engine] if len(engines) > 1 else 0.0)
            if point.interval is not None:
                axes.plot(point.interval, (height, height), color=look.color, linewidth=1.0)
            axes.plot(point.value, height, look.marker, color=look.color, markersize=3.6)
    for engine in engines:
        look = style.look(engine)
        axes.plot([], [], look.marker, color=look.color, markersize=3.6, label=labels[engine])
    _lay_out(axes, overview, list(found))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=min(len(engines), 5))
    return figure


def _lay_out(axes: Axes, overview: Overview, rows: Sequence[str]) -> None:
    axes.axvline(overview.reference, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for border in np.arange(0.5, len(rows) - 1):
        axes.axhline(border, color="#D9D9D9", linewidth=0.6)
    if overview.logarithmic:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        few = np.log10(high / low) > 3  # over many decades there is room for their own ticks only
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if few else (1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value) if few else given(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(overview.axis)
    style.clean(axes, "x")


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn


def rounds_of(view: View) -> pd.DataFrame:
    """The microseconds per step of the race with the most threads, rounds by engines; empty where there was none."""
    rounds = view.table("race")
    rounds = rounds[rounds["threads"] == rounds["threads"].max()]
    return rounds.pivot_table(index="round", columns="engine", values="microseconds_per_step")


def _step_ratios(view: View) -> dict[str, Point]:
    steps = rounds_of(view)
    if REFERENCE not in steps:
        return {}
    ratios = {engine: (steps[engine] / steps[REFERENCE]).dropna() for engine in steps if engine != REFERENCE}
    return {
        engine: Point(float(values.median()), of_median(values)) for engine, values in ratios.items() if len(values)
    }


def _by_seed(view: View, column: str) -> pd.DataFrame:
    """A column of the trainings with shared weights, seeds by engines."""
    return view.ok("time").pivot_table(index="seed", columns="engine", values=column, dropna=False)


def _total_ratios(view: View) -> dict[str, Point]:
    seconds = _by_seed(view, "total_seconds")
    if REFERENCE not in seconds:
        return {}
    ratios = {engine: (seconds[engine] / seconds[REFERENCE]).dropna() for engine in seconds if engine != REFERENCE}
    return {engine: Point(float(values.mean()), of_mean(values)) for engine, values in ratios.items() if len(values)}


def _accuracy_differences(view: View) -> dict[str, Point]:
    accuracy = 100 * _by_seed(view, "test_accuracy")
    if REFERENCE not in accuracy:
        return {}
    differences = {engine: (accuracy[engine] - accuracy[REFERENCE]).dropna() for engine in accuracy}
    return {
        engine: Point(float(values.mean()), of_mean(values))
        for engine, values in differences.items()
        if engine != REFERENCE and len(values)
    }


def _bytes_ratios(view: View) -> dict[str, Point]:
    allocated = view.ok("memory").groupby("engine")["bytes_later_epochs"].mean()
    if not allocated.get(REFERENCE, 0) > 0:
        return {}
    ratios = allocated / allocated[REFERENCE]
    return {str(engine): Point(float(ratio)) for engine, ratio in ratios.items() if engine != REFERENCE and ratio > 0}


OVERVIEWS = (
    Overview(
        "steps", "Time of a training step, as a ratio to PyTorch's", "time per step, PyTorch = 1", _step_ratios, 1
    ),
    Overview(
        "totals",
        "Time of a whole training, compilation included, as a ratio to PyTorch's",
        "time of all epochs, PyTorch = 1",
        _total_ratios,
        1,
    ),
    Overview(
        "accuracies",
        "Accuracy on the test data after the last epoch, as the difference from PyTorch's at the same seed",
        "test accuracy less PyTorch's, percentage points",
        _accuracy_differences,
        0,
        logarithmic=False,
    ),
    Overview(
        "bytes",
        "Bytes allocated in an epoch after the first, as a ratio to PyTorch's",
        "bytes allocated per later epoch, PyTorch = 1",
        _bytes_ratios,
        1,
    ),
)
"""The figures of the paper's main part, in its order."""
