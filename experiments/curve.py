"""The learning curve of `twingrad train`: as a picture, or drawn in the terminal."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.errors import InputError, write
from experiments.extras import remedy
from experiments.formats import significant

TERMINAL = "-"
SUFFIXES = (".png", ".svg", ".pdf")
WIDTH, HEIGHT = 60, 10
"""Characters of a curve in the terminal."""

LINES = (("loss", "training", "●"), ("validation_loss", "validation", "○"), ("test_loss", "test", "×"))
"""Each line: its key in what was measured in an epoch, its name, and its mark in the terminal."""


def check(target: str) -> None:
    """Raise `InputError` for a file that is no picture, and where none can be drawn."""
    if target == TERMINAL:
        return
    if Path(target).suffix not in SUFFIXES:
        raise InputError(f"--curve: expected a file that ends in {', '.join(SUFFIXES)}, or -, found {target}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"--curve {target} needs matplotlib: {remedy('matplotlib')}; --curve - needs nothing")


def picture(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the losses over the epochs as a picture, in the format that the file's name ends in."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="loss")
    for key, name, _ in LINES:
        found = [(row["epoch"], row[key]) for row in history if key in row]
        if found:
            axes.plot(*zip(*found, strict=True), marker="." if len(found) < 40 else "", label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=150)
    write(path, buffer.getvalue(), InputError, "--curve with another file")


def drawn(history: Sequence[dict[str, Any]]) -> list[str]:
    """The losses over the epochs as lines of text; where two marks meet, the first of `LINES` is shown."""
    points = [
        (row["epoch"], row[key], mark)
        for key, _, mark in reversed(LINES)
        for row in history
        if key in row and math.isfinite(row[key])
    ]
    if not points:
        return []
    first, last = min(epoch for epoch, *_ in points), max(epoch for epoch, *_ in points)
    low, high = min(loss for _, loss, _ in points), max(loss for _, loss, _ in points)
    width = min(WIDTH, 4 * (last - first) + 1)
    canvas = [[" "] * width for _ in range(HEIGHT)]
    for epoch, loss, mark in points:
        column = round((epoch - first) / max(1, last - first) * (width - 1))
        row = round((high - loss) / (high - low or 1) * (HEIGHT - 1))
        canvas[row][column] = mark
    scale = {0: significant(high), HEIGHT - 1: significant(low)}
    margin = max(map(len, scale.values()))
    lines = [f"{scale.get(number, ''):>{margin}} ┤{''.join(cells)}".rstrip() for number, cells in enumerate(canvas)]
    keys = {key for row in history for key in row}
    legend = ", ".join(f"{mark} {name}" for key, name, mark in LINES if key in keys)
    return [*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  epoch {first} to {last}; loss: {legend}"]
