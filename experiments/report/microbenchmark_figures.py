"""The figures of the micro-benchmarks: times on a logarithmic axis, times by chunk size, memory by length."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.formats import nanoseconds, size
from experiments.microbenchmarks.functions import BENCHMARKS, CHUNKED, SMALL
from experiments.microbenchmarks.measure import FORWARD_MODE
from experiments.report import style
from experiments.report.figures import NotDrawnError, producer
from experiments.report.microbenchmarks import cited, medians, systems, time_of
from experiments.report.style import COLUMN, PAGE
from experiments.report.view import View

MOST_ACROSS = 5
"""Panels side by side whose titles and times have room."""


@producer
def micro_gradients(view: View) -> Figure:
    """A panel for each small function: forward pass (tick) and gradient (dot) of every system, logarithmic."""
    return _dots(view, "gradients", list(SMALL), with_cited=True)


@producer
def micro_ratios(view: View) -> Figure:
    """The same for large arrays."""
    rows = _rows(view, "arrays")
    return _dots(view, "arrays", [name for name in BENCHMARKS if name in set(rows["benchmark"])])


@producer
def micro_chunks(view: View) -> Figure:
    """Time of a gradient by chunk size, a panel for each function and one for what the study cites."""
    rows = _rows(view, "chunks")
    reported = cited(view.paper, "forward-mode")
    figure = style.new(PAGE, 2.3)
    panels = figure.subplots(1, len(CHUNKED) + bool(reported), squeeze=False)[0]
    for axes, name in zip(panels, CHUNKED, strict=False):
        here = rows[rows["benchmark"] == name]
        for system in systems(view, "chunks"):
            look, label = style.look(system), view.label(system)
            line = here[(here["engine"] == system) & (here["chunk"] > 0)].sort_values("chunk")
            if system in FORWARD_MODE and len(line):
                axes.plot(line["chunk"], line["nanoseconds"], color=look.color, marker=look.marker, label=label)
            elif system not in FORWARD_MODE and system.endswith(("compiled", "julia")):
                whole = time_of(here, system, name, "gradient")
                if whole:
                    form = "--" if system.endswith("compiled") else ":"
                    kind = "reverse mode" if system.endswith("compiled") else "derivative"
                    axes.axhline(whole, color=look.color, linestyle=form, linewidth=0.9, label=f"{label}, {kind}")
        inputs = f", {int(here['size'].iloc[0]):,} inputs" if len(here) else ""
        axes.set_title(f"{BENCHMARKS[name].title}{inputs}", loc="left")
        _times(axes.yaxis, axes)
        axes.set_xlabel("chunk size N")
        axes.set_xticks(sorted({int(chunk) for chunk in here["chunk"] if chunk}))
    panels[0].set_ylabel("time of a gradient")
    if reported:
        axes = panels[-1]
        for system, times in reported.items():
            look = style.look("duals" if system == "C++" else system.lower())
            points = {int(row): value * 1e9 for row, value in times.items() if value is not None}
            axes.plot(
                points.keys(),
                points.values(),
                color=look.color,
                marker=look.marker,
                markerfacecolor="white",
                linestyle=(0, (2, 2)),
                label=f"{system} (cited)",
            )
        axes.set_title("cited for both, another machine", loc="left")
        _times(axes.yaxis, axes)
        axes.set_xlabel("chunk size N")
    handles: dict[str, object] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


@producer
def micro_memory(view: View) -> Figure:
    """Peak bytes of a gradient through a loop by its length, with guides of linear and square-root growth."""
    rows = _rows(view, "memory")
    figure = style.new(COLUMN, 2.0)
    axes = figure.subplots()
    for what, label, name in (("plain", "all steps kept", "torch"), ("checkpointed", "checkpointed", "numpy")):
        line = rows[rows["what"] == what].sort_values("size")
        look = style.look(name)
        axes.plot(line["size"], line["bytes"], color=look.color, marker=look.marker, label=label)
        if len(line) > 1:
            power = 1.0 if what == "plain" else 0.5
            ends = line["size"].to_numpy(dtype=float)[[0, -1]]
            guide = line["bytes"].iloc[-1] * (ends / ends[1]) ** power
            growth = "linear" if what == "plain" else "square root"
            axes.plot(ends, guide, ":", color=look.color, linewidth=0.9, label=f"growth: {growth}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value, trim=True)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("steps of the loop")
    axes.set_ylabel("peak memory of a gradient")
    style.clean(axes, "both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


# ----------------------------------------------------------------------------------------------------------
# Parts


def _rows(view: View, suite: str) -> pd.DataFrame:
    rows = medians(view, suite)
    if not len(rows):
        raise NotDrawnError(f"micro-benchmarks ({suite}) not run: twingrad microbench {view.paper.key}")
    return rows


def _dots(view: View, suite: str, names: list[str], with_cited: bool = False) -> Figure:
    rows = _rows(view, suite)
    reported = cited(view.paper, suite) if with_cited else {}
    measured = [name for name in systems(view, suite) if name in set(rows["engine"])]
    labels = [view.label(name) for name in measured] + [f"{name} (cited)" for name in reported]
    down = -(-len(names) // MOST_ACROSS)
    across = -(-len(names) // down)
    figure = style.new(PAGE, 0.35 + down * (0.4 + 0.145 * len(labels)))
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(panels, names, strict=False):
        for place, system in enumerate(measured):
            forward, gradient = (time_of(rows, system, name, what) for what in ("forward", "gradient"))
            look = style.look(system)
            filled = "white" if system.endswith("eager") else look.color
            if forward and gradient:
                axes.plot([forward, gradient], [place, place], color=look.color, linewidth=0.8, alpha=0.6)
            if forward:
                axes.plot(forward, place, "|", color=look.color, markersize=6)
            if gradient:
                axes.plot(gradient, place, look.marker, color=look.color, markerfacecolor=filled, markersize=4)
        for place, (system, times) in enumerate(reported.items(), start=len(measured)):
            seconds = times.get(BENCHMARKS[name].title)
            if seconds is not None:
                marker = "|" if system == "Forward" else "D"
                axes.plot(seconds * 1e9, place, marker, color="black", markerfacecolor="white", markersize=4)
        if reported:
            axes.axhline(len(measured) - 0.5, color="#999999", linewidth=0.5)
        _times(axes.xaxis, axes, "x")
        axes.set_title(BENCHMARKS[name].title.replace("LOGISTIC REGRESSION", "LOGISTIC"), loc="left", fontsize=6)
        axes.tick_params(axis="x", labelsize=5.5)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    for axes in panels:
        axes.tick_params(axis="y", length=0)
    figure.supxlabel("time of a call: forward pass alone (tick) and gradient (marker)", fontsize=7)
    return figure


def _times(axis: Axis, axes: Axes, grid: str = "both") -> None:
    """A logarithmic axis of times, in nanoseconds, with their units."""
    (axes.set_xscale if grid == "x" else axes.set_yscale)("log")
    low, high = axes.get_xlim() if grid == "x" else axes.get_ylim()
    decades = np.log10(high / low)
    axis.set_major_locator(
        LogLocator(base=10, subs=(1.0,) if decades > 1.2 else (1.0, 2.0, 5.0), numticks=3 if grid == "x" else 6)
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: nanoseconds(value, trim=True)))
    axis.set_minor_formatter(NullFormatter())
    style.clean(axes, "x" if grid == "x" else "both")
