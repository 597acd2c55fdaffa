"""Networks and cells drawn from a model spec: one box per layer, recurrent layers unrolled over their steps.

Feature maps (channels by height by width) are drawn as stacks, sequences (channels by length) as grids.

Nothing here knows a particular network. Shapes are those of one sample, as the spec infers them; a new op is drawn as a
plain box until it gets a line in `_describe`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from bridge.layers import RNN, Recurrent
from bridge.spec import LayerShape, ModelSpec
from experiments.formats import significant
from experiments.report import style
from experiments.report.view import ReportError

INK = "#222222"
FILLS = {
    "input": "#F2F2F2",
    "parameters": "#D6E8F5",
    "plain": "#FFFFFF",
    "loss": "#FBE5D6",
    "state": "#E6F5EE",
    "returned": "#8FD3B6",
}
"""Fill colours: data, layers with parameters, layers without, the loss, steps of a recurrent layer, and those steps
whose state the layer returns."""

BOX_HEIGHT = 0.3
CELLS_HEIGHT = 0.62
GAP = 0.14
MAPS_HEIGHT = 0.36
DRAWN = ("embedding", "permute_dims", *(f"{kind}{n}d" for kind in ("conv", "max_pool", "avg_pool") for n in (1, 2)))
"""The ops whose output is drawn inside their box."""
MOST_MAPS = 8
"""At most this many channels are drawn."""
MOST_STEPS = 6
"""A longer sequence is drawn as its first steps, an ellipsis and its last."""


@dataclass(frozen=True)
class Box:
    """One box of the drawing: what is left and right in it, its fill, and the steps drawn inside it."""

    title: str
    detail: str
    fill: str
    steps: int = 0
    returns: str = "last"
    maps: tuple[int, ...] = ()
    """Shape of the output where it is drawn: (channels, height, width) or (rows, columns)."""


def boxes(spec: ModelSpec) -> list[Box]:
    """The boxes of a network from its input to its loss."""
    found = [Box("input", _shape(spec.input.sample), "input")]
    for layer, shape in zip(spec.layers, spec.shapes(), strict=True):
        count = sum(math.prod(size) for size in shape.parameters.values())
        detail = _shape(shape.output) + (f"\n{significant(count, 1)} parameters" if count else "")
        found.append(
            Box(
                title=f"{layer.id}: {_describe(layer, shape)}",
                detail=detail,
                fill="parameters" if count else "plain",
                steps=shape.input[0] if isinstance(layer, Recurrent) else 0,
                returns=layer.returns if isinstance(layer, Recurrent) else "last",
                maps=shape.output if layer.op in DRAWN and 2 <= len(shape.output) <= 3 else (),
            )
        )
    found.append(Box(spec.loss.op.replace("_", " "), "loss", "loss"))
    return found


def network(spec: ModelSpec) -> Figure:
    """The network as a column of boxes, top to bottom, one column of the paper wide."""
    drawn = boxes(spec)
    heights = [BOX_HEIGHT + (CELLS_HEIGHT if box.steps else MAPS_HEIGHT if box.maps else 0.0) for box in drawn]
    longest = max((side for box in drawn for side in box.maps[-2:]), default=1)
    height = sum(heights) + GAP * (len(drawn) - 1)
    figure = style.new(style.COLUMN, height + 0.1)
    axes = _canvas(figure, style.COLUMN, height)
    top = height
    left, right = 0.05, style.COLUMN - 0.05
    for index, (box, tall) in enumerate(zip(drawn, heights, strict=True)):
        bottom = top - tall
        _rectangle(axes, left, bottom, right - left, tall, FILLS[box.fill])
        middle = top - BOX_HEIGHT / 2
        axes.text(left + 0.08, middle, box.title, va="center", fontsize=6.5, color=INK)
        axes.text(
            right - 0.08,
            middle,
            box.detail,
            va="center",
            ha="right",
            fontsize=6.0,
            color=INK,
            linespacing=1.1,
        )
        if box.steps:
            _cells(axes, box, left + 0.1, bottom + 0.08, right - left - 0.2, CELLS_HEIGHT - 0.14)
        if box.maps:
            _maps(axes, box.maps, longest, style.COLUMN / 2, bottom + 0.06, MAPS_HEIGHT - 0.08)
        if index + 1 < len(drawn):
            centre = style.COLUMN / 2
            _arrow(axes, (centre, bottom), (centre, bottom - GAP))
        top = bottom - GAP
    return figure


def cell(spec: ModelSpec) -> Figure:
    """The first vanilla recurrent cell of the network: what one step computes, with its sizes."""
    found = next(
        ((layer, shape) for layer, shape in zip(spec.layers, spec.shapes(), strict=True) if isinstance(layer, RNN)),
        None,
    )
    if found is None:
        raise ReportError(
            f'model "{spec.name}" has no vanilla recurrent layer (op = "rnn"), so there is no cell to draw'
        )
    layer, shape = found
    features, units = shape.input[-1], layer.units
    width, height = style.COLUMN, 1.75
    figure = style.new(width, height)
    axes = _canvas(figure, width, height)
    upper, lower = 1.22, 0.42
    _rectangle(axes, 0.62, 0.14, 2.12, 1.46, "#FAFAFA", line=0.6)
    axes.text(0.7, 1.49, f"{layer.id}, one step", fontsize=6.0, va="center", color="#555555")

    _node(axes, 1.08, upper, r"$\times\,W_h$", FILLS["parameters"])
    _node(axes, 1.08, lower, r"$\times\,W_x$", FILLS["parameters"])
    _node(axes, 1.78, upper, r"$+\,b$", FILLS["parameters"])
    _node(axes, 2.4, upper, layer.activation, FILLS["state"])

    _arrow(axes, (0.16, upper), (0.85, upper))
    _arrow(axes, (0.16, lower), (0.85, lower))
    _arrow(axes, (1.31, upper), (1.55, upper))
    _elbow(axes, (1.31, lower), (1.78, upper - 0.14))
    _arrow(axes, (2.01, upper), (2.17, upper))
    _arrow(axes, (2.63, upper), (width - 0.2, upper))
    axes.text(0.3, upper + 0.08, r"$h_{t-1}$", ha="center", va="bottom", fontsize=7.5)
    axes.text(0.3, lower + 0.08, r"$x_t$", ha="center", va="bottom", fontsize=7.5)
    axes.text(width - 0.3, upper + 0.08, r"$h_t$", ha="center", va="bottom", fontsize=7.5)
    for x, y, size in ((0.3, upper, units), (0.3, lower, features), (width - 0.3, upper, units)):
        axes.text(x, y - 0.08, str(size), ha="center", va="top", fontsize=6.0, color="#555555")
    sizes = f"$W_x$  {features}×{units}\n$W_h$  {units}×{units}\n$b$  {units}"
    axes.text(2.66, 0.62, sizes, ha="right", va="center", fontsize=6.0, color="#555555", linespacing=1.5)
    return figure


def _describe(layer: object, shape: LayerShape) -> str:
    """What a layer does, in a few words."""
    op = str(getattr(layer, "op", ""))
    if isinstance(layer, Recurrent):
        activation = f", {layer.activation}" if isinstance(layer, RNN) else ""
        many = "many-to-one" if layer.returns == "last" else "many-to-many"
        return f"{op.upper()}{activation}, {many}"
    if op == "reshape" and len(shape.output) == 2:
        return f"{shape.output[0]} segments of {shape.output[1]}"
    if op.startswith("conv"):
        kernel = "×".join(map(str, _sizes(getattr(layer, "kernel", ()))))
        bias = "" if getattr(layer, "bias", True) else ", no bias"
        plain = op.removesuffix("_transpose")
        what = f"{'' if plain == op else 'transposed '}{plain[:-2]} {plain[-2:].upper()}"
        return f"{what}, {getattr(layer, 'filters', '')} filters of {kernel}{bias}"
    if op.startswith(("max_pool", "avg_pool")):
        return f"{op[:3]}-pool {'×'.join(map(str, _sizes(getattr(layer, 'window', ()))))}"
    if op == "embedding":
        trained = "trained" if getattr(layer, "trainable", True) else "static"
        return f"embedding, {significant(getattr(layer, 'vocabulary', 0), 1)} words, {trained}"
    if op == "permute_dims":
        return "swapped axes" if len(shape.output) == 2 else "permuted axes"
    for name in ("activation", "rate"):
        if hasattr(layer, name):
            return f"{op} {getattr(layer, name)}"
    return op


def _sizes(value: object) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (int(str(value)),)


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(("N", *map(str, shape)))


def _cells(axes: Axes, box: Box, left: float, bottom: float, width: float, height: float) -> None:
    """The unrolled steps of a recurrent layer: inputs from below, the state from left to right."""
    shown: list[int | None] = list(range(1, box.steps + 1))
    if box.steps > MOST_STEPS:
        shown = [1, 2, 3, None, box.steps - 1, box.steps]
    slot = width / len(shown)
    side, tall = min(0.42, slot * 0.6), 0.2
    middle = bottom + height - tall / 2 - 0.04
    for index, step in enumerate(shown):
        centre = left + slot * (index + 0.5)
        if index + 1 < len(shown):
            _arrow(axes, (centre + side / 2, middle), (centre + slot - side / 2, middle), size=5)
            if index == 0:
                axes.text(centre + slot / 2, middle + 0.03, "$h$", ha="center", va="bottom", fontsize=5.5)
        if step is None:
            axes.text(centre, middle, "…", ha="center", va="center", fontsize=8)
            continue
        fill = FILLS["returned" if box.returns == "sequence" or step == box.steps else "state"]
        _rectangle(axes, centre - side / 2, middle - tall / 2, side, tall, fill, line=0.6, round_=0.04)
        axes.text(centre, middle, f"$h_{{{step}}}$", ha="center", va="center", fontsize=6.0)
        _arrow(axes, (centre, bottom + 0.09), (centre, middle - tall / 2), size=5)
        axes.text(centre, bottom + 0.08, f"$x_{{{step}}}$", ha="center", va="top", fontsize=6.0)


def _maps(axes: Axes, shape: tuple[int, ...], longest: int, centre: float, bottom: float, height: float) -> None:
    """Feature maps one behind the other, or one grid of rows and columns; sides in proportion to the network's longest.

    Sides of a sequence differ by far more than those of an image: it may be wider than it is high.
    """
    if len(shape) == 3:
        count, (tall, wide) = min(shape[0], MOST_MAPS), (height * 0.8 * side / longest for side in shape[1:])
    else:
        count, tall, wide = 1, height * max(0.15, shape[0] / longest), 2.4 * max(0.06, shape[1] / longest)
    shift = 0.2 * height / max(1, count - 1) if count > 1 else 0.0
    spacing = min(wide + 0.04, 2.6 / count)
    left = centre - (spacing * (count - 1) + wide) / 2
    for index in range(count):
        lower = bottom + (height - tall - shift) / 2
        _rectangle(axes, left + index * spacing, lower, wide, tall, FILLS["state"], line=0.5, round_=0.0)


def _canvas(figure: Figure, width: float, height: float) -> Axes:
    """Axes without frame, whose units are inches."""
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    margin = (figure.get_figheight() - height) / 2
    axes.set_xlim(0, width)
    axes.set_ylim(-margin, height + margin)
    axes.set_axis_off()
    return axes


def _rectangle(
    axes: Axes,
    left: float,
    bottom: float,
    width: float,
    height: float,
    fill: str,
    line: float = 0.8,
    round_: float = 0.05,
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom),
            width,
            height,
            boxstyle=f"round,pad=0,rounding_size={round_}",
            facecolor=fill,
            edgecolor=INK,
            linewidth=line,
        )
    )


def _node(axes: Axes, x: float, y: float, text: str, fill: str) -> None:
    _rectangle(axes, x - 0.23, y - 0.14, 0.46, 0.28, fill, line=0.7)
    axes.text(x, y, text, ha="center", va="center", fontsize=7.0, color=INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], size: float = 7) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=size, linewidth=0.7, color=INK, shrinkA=0, shrinkB=0
        )
    )


def _elbow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow that first goes across, then up or down."""
    axes.plot([start[0], end[0]], [start[1], start[1]], color=INK, linewidth=0.7, solid_capstyle="butt")
    _arrow(axes, (end[0], start[1]), end)
