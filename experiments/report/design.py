"""The figure of the engines' design: from a model spec to a replayed tape, and a memory plan that one engine made.

The plan on the right is not a sketch: the network's training step is compiled by the numpy engine for this figure, and
every rectangle is a piece of its one block of memory, as long as it is in use.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from bridge import spec, weights
from bridge.adapters.numpy import NumpySession
from bridge.session import Optimizer
from experiments.formats import size
from experiments.papers import model_path
from experiments.report import style
from py_engine.ad.compile.tape import Tape

MODEL = "mnist-rnn"
BATCH = 100

STAGES = (
    ("model spec", "layers from a closed set; every shape inferred"),
    ("op records", "shape rule, forward into a buffer, derivatives written in ops"),
    ("joint graph", "forward and backward as one; sorted once, simplified, fused"),
    ("plan", "lifetimes give every value its place in one block of memory"),
    ("tape", "calls bound to their buffers, in order"),
    ("replay", "for every mini-batch: gather, run, update one vector of parameters"),
)
"""What becomes of a network, step by step."""

FORWARD, BACKWARD = style.LOOKS["numpy"].color, style.LOOKS["torch"].color


def draw(stem: Path) -> None:
    """Write the figure as `<stem>.svg` and `<stem>.png`."""
    with style.theme():
        figure = style.new(style.PAGE, 2.55)
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.35))
        _stages(left)
        _plan(right, compiled())
        style.save(figure, stem)


def compiled() -> Tape:
    """The tape of one training step of the recurrent network, for a whole batch."""
    network = spec.load(model_path(MODEL))
    session = NumpySession(network, weights.initialise(network, 0, "float32"), Optimizer("sgd", 0.015), BATCH)
    target = np.zeros((BATCH, *network.target.shape), np.int64)
    session.loss_and_gradients(np.zeros((BATCH, *network.input.sample), np.float32), target)
    return session.trainer.tapes[0]


def _stages(axes: Axes) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(STAGES), 0)
    for row, (name, what) in enumerate(STAGES):
        box = FancyBboxPatch(
            (0.02, row + 0.14),
            0.26,
            0.72,
            boxstyle="round,pad=0,rounding_size=0.03",
            linewidth=0.7,
            facecolor="#EEF3F7",
        )
        axes.add_patch(box)
        axes.text(0.15, row + 0.5, name, ha="center", va="center", weight="bold", fontsize=6.5)
        axes.text(0.32, row + 0.5, textwrap.fill(what, 40), ha="left", va="center", fontsize=6.2, linespacing=1.15)
        if row:
            arrow = {"arrowstyle": "-|>", "linewidth": 0.7, "mutation_scale": 6, "color": "black"}
            axes.annotate("", (0.15, row + 0.15), (0.15, row - 0.15), arrowprops=arrow)


def _plan(axes: Axes, tape: Tape) -> None:
    """One rectangle per piece of memory: steps from left to right, bytes from bottom to top."""
    values, steps = tape.values, len(tape.program.equations)
    start = len(values) - steps
    loss = next(i for i, x in enumerate(values) if x is tape.program.outputs[0])
    for owner, offset in tape.plan.offset.items():
        begin, end = tape.plan.lifetime[owner]
        value, equation = values[owner], tape.equations[owner]
        assert equation is not None
        color = FORWARD if begin <= loss else BACKWARD
        place = (begin - start, offset / 1000)
        width, height = end - begin + 1, value.nbytes / 1000
        axes.add_patch(Rectangle(place, width, height, facecolor=color, alpha=0.55, edgecolor="white", linewidth=0.5))
        if width >= 6 and height >= 12:
            axes.text(
                place[0] + width / 2, place[1] + height / 2, equation.op.name, ha="center", va="center", fontsize=5.5
            )
    owners = zip(tape.program.equations, tape.plan.storage[start:], strict=True)
    total = sum(x.output.nbytes for x, owner in owners if owner in tape.plan.offset and x.op.view is None)
    axes.set_xlim(0, steps)
    axes.set_ylim(0, tape.plan.size / 1000 * 1.02)
    axes.axvline(loss - start + 1, color="black", linewidth=0.6, linestyle=(0, (3, 2)), zorder=0)
    axes.set_xlabel("step of the tape")
    axes.set_ylabel("place in the block [kB]")
    axes.set_title(f"Plan of a step of {MODEL}, batch {BATCH}: {size(tape.plan.size)} hold values of {size(total)}")
    handles = [Patch(color=FORWARD, alpha=0.55, label="forward"), Patch(color=BACKWARD, alpha=0.55, label="backward")]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=2)
    style.clean(axes, grid="")
