"""The bridge to Julia: what a call of Julia costs, and what comes before the second step, one part after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import c_int
from functools import cache
from typing import Any

from .engines import BATCH_SIZE, LEARNING_RATE, MODEL, imports, require

CALLS = 1000

SMALLEST = """
format = "twingrad-model"
version = 1
opset = 1
name = "smallest"
[input]
shape = ["N", 1]
dtype = "float32"
[[layers]]
id = "output"
op = "dense"
units = 1
[loss]
op = "mean_squared_error"
"""
"""So little to compute that a call of its session is nothing but a call."""

PREPARATION = f"""
import numpy as np
from bridge import julia, spec, weights
from bridge.adapters.julia import load_engine
try:
    from bridge.session import Optimizer
except ImportError:  # an older commit
    from bridge.engine import Optimizer
model = spec.load({str(MODEL)!r})
params = weights.initialise(model, 0, np.float32)
x = np.random.default_rng(0).random(({BATCH_SIZE}, *model.input.sample), dtype=np.float32)
y = np.arange({BATCH_SIZE}) % model.output[-1]
order = np.arange({BATCH_SIZE})
"""

PARTS = (
    "julia.runtime(1)",
    "load_engine(1)",
    f"session = julia.build(model, params, Optimizer('sgd', {LEARNING_RATE}), {BATCH_SIZE})",
    "session.train_epoch(x, y, order)",
)
"""From a Python that has its modules and data to a finished first step."""


def require_bridge() -> None:
    """Raise `NotImplementedError` where this commit has no bridge to Julia, or this machine no Julia."""
    require("julia", threads=1)
    with imports():
        from bridge.adapters.julia import load_engine  # noqa: F401
        from bridge.julia import build, runtime  # noqa: F401


@cache
def running() -> tuple[Any, Any, Any]:
    """Julia in this process: an entry point that adds one to a number, a session of `SMALLEST`, and a sample for it."""
    require_bridge()
    import numpy as np

    from bridge import julia, spec

    session = julia.build(spec.loads(SMALLEST), batch_size=1)
    successor = julia.runtime().function_pointer("TwinGradRuntime.successor_pointer", [c_int], c_int)
    sample = np.ones((1, 1), np.float32)
    session.predict(sample)  # compiled now
    return successor, session, sample


@cache
def compiled() -> None:
    """Have Julia compile the engine and keep the result, which happens once for an installation and takes long."""
    subprocess.run([sys.executable, "-c", "\n".join([PREPARATION, *PARTS[:2]])], stdin=subprocess.DEVNULL, check=True)


class Call:
    """A thousand calls of Julia: a single one is over before a clock can tell."""

    def setup(self) -> None:
        """Start Julia, in the first call of this in a process."""
        self.successor, self.session, self.sample = running()

    def time_1000_entry_points(self) -> None:
        """Of a function that does nothing: a number goes in and one comes out."""
        for number in range(CALLS):
            self.successor(number)

    def time_1000_predictions(self) -> None:
        """Of a session: its arguments are checked, and the result gets an array."""
        for _ in range(CALLS):
            self.session.predict(self.sample)


class Start:
    """The parts of Julia's start, with one thread; every sample is taken in its own process."""

    number = 1
    repeat = (2, 3, 10.0)
    rounds = 1
    warmup_time = 0.0

    def setup(self) -> None:
        """Let the processes find modules where this one does."""
        require_bridge()
        os.environ["PYTHONPATH"] = os.pathsep.join(place for place in sys.path if isinstance(place, str))

    def timeraw_start_julia(self) -> tuple[str, str]:
        """Find the Julia that was proved before, and start it."""
        return part(0)

    def timeraw_load_engine(self) -> tuple[str, str]:
        """Load what was compiled, in a Julia that runs."""
        compiled()
        return part(1)

    def timeraw_build(self) -> tuple[str, str]:
        """The session, in a Julia that has the engine."""
        return part(2)

    def timeraw_first_step(self) -> tuple[str, str]:
        """Train on one mini-batch, with all that Julia still has to compile for it."""
        return part(3)


def part(number: int) -> tuple[str, str]:
    """A part to be timed, and everything before it."""
    return PARTS[number], "\n".join([PREPARATION, *PARTS[:number]])
