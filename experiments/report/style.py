"""One look for every figure: theme, sizes, a colour and a marker per system, reproducible files.

The colours are those of Okabe and Ito (*Color Universal Design*, 2008) with grey and brown added, which stay apart
under the common colour vision deficiencies (a test computes it); the marker says the same thing a second time, for
grey prints.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.transforms import Bbox

from bridge.files import write_atomically

COLUMN = 3.35
"""Width in inches of a figure that fills one column of the paper."""

PAGE = 7.0
"""Width in inches of a figure that fills both columns of the paper."""

PNG_DPI = 200
"""Resolution of the PNG exports."""


WARNING = "#B00020"
"""Colour of what a reader must not overlook."""


@dataclass(frozen=True)
class Look:
    """How one system is drawn: colour (hex) and marker of its lines."""

    color: str
    marker: str


LOOKS: dict[str, Look] = {
    "numpy": Look("#0072B2", "o"),
    "julia": Look("#CC79A7", "s"),
    "torch": Look("#D55E00", "^"),
    "torch-compile": Look("#E69F00", "v"),
    "tensorflow": Look("#56B4E9", "D"),
    "tensorflow-xla": Look("#3A16D6", "d"),
    "jax": Look("#009E73", "P"),
    "flux": Look("#7B3F00", "X"),
    "lux": Look("#00147F", "<"),
    "simplechains": Look("#661950", ">"),
    "manual": Look("#7A7A7A", "*"),
    "manual-julia": Look("#B9A2C6", "p"),
    "own": Look("#000000", "h"),
}
"""Engines by their registry name, and the papers' own engines as `own`."""

ALIASES = {
    "Own": "own",
    "PyTorch": "torch",
    "pytorch": "torch",
    "Flux": "flux",
    "TensorFlow": "tensorflow",
    "numpy-eager": "numpy",
    "numpy-compiled": "numpy",
    "julia-eager": "julia",
    "julia-compiled": "julia",
    "julia-forward": "julia",
    "duals": "manual",
    "forwarddiff": "flux",
}
"""Rows that papers report, and systems of the micro-benchmarks, that are drawn as an engine."""

_SPARE = ("#332288", "#117733", "#882255", "#44AA99")


def look(name: str) -> Look:
    """Return the look of an engine or a reported system; an unknown name gets a spare one, always the same."""
    name = ALIASES.get(name, name)
    if name in LOOKS:
        return LOOKS[name]
    return Look(_SPARE[sum(name.encode()) % len(_SPARE)], "p")


_RC = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs on every machine
    "font.size": 7.0,
    "axes.titlesize": 7.0,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.title_fontsize": 6.5,
    "legend.frameon": False,
    "legend.columnspacing": 1.2,
    "legend.handlelength": 1.6,
    "legend.labelspacing": 0.3,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.color": "#D9D9D9",
    "lines.linewidth": 1.2,
    "lines.markersize": 4.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path",  # a reader of the SVG needs no font
    "svg.hashsalt": "twingrad",  # element ids would be random otherwise
    "savefig.facecolor": "white",
    "figure.facecolor": "white",
    "figure.autolayout": False,  # a figure without a layout engine stays without one
    "figure.constrained_layout.use": False,
}


@contextmanager
def theme() -> Iterator[None]:
    """Apply the project's seaborn theme inside a `with` block, and put the caller's settings back after it."""
    with mpl.rc_context():
        sns.set_theme(context="paper", style="ticks", palette=[entry.color for entry in LOOKS.values()], rc=_RC)
        yield


def new(width: float = COLUMN, height: float = 2.2) -> Figure:
    """Return an empty figure of the given size in inches; no pyplot, so nothing global has to be closed."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def clean(axes: Axes, grid: Literal["x", "y", "both", ""] = "y") -> None:
    """Take the upper and right frame off and draw a light grid along `grid` ("x", "y", "both" or "")."""
    sns.despine(ax=axes)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(True, axis=grid, which="major")


def save(figure: Figure, stem: Path, notice: str | None = None) -> None:
    """Write `<stem>.svg` and `<stem>.png`: equal bytes for equal content, and each file whole or not at all.

    `notice` is printed above everything else; it is how a figure made from sample data says so.
    """
    if figure.axes and (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine(None)  # it stays so; with "none" matplotlib would draw each file twice
    for legend in figure.legends:
        _pin(figure, legend)
    box = figure.get_tightbbox()
    top = box.y1
    width, height = figure.get_size_inches()
    if notice:
        figure.text(
            0.5,
            top / height,
            notice,
            ha="center",
            va="bottom",
            fontsize=6.0,
            color=WARNING,
            style="italic",
        )
        top = figure.get_tightbbox().y1
    # As wide as it was made, so that the paper scales all figures alike; as high as its content.
    box = Bbox.from_extents(min(box.x0, 0), box.y0 - 0.02, max(box.x1, width), top + 0.02)
    stem.parent.mkdir(parents=True, exist_ok=True)
    # A date or a version of the writer in the file would make it differ from one run to the next.
    for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], dpi=PNG_DPI, metadata=metadata, bbox_inches=box)
        write_atomically(stem.with_name(stem.name + suffix), buffer.getvalue())


def _pin(figure: Figure, legend: Legend) -> None:
    """Keep a figure's legend where it is: saving a part of the figure would move it to the part's edge."""
    extent = legend.get_window_extent().transformed(figure.transFigure.inverted())
    legend.borderaxespad = 0
    legend.set_loc("lower left")
    legend.set_bbox_to_anchor((extent.x0, extent.y0), transform=figure.transFigure)
