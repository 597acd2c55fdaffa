"""What runs in the process of a system whose program is Python: it answers requests as `bridge.child_process` says.

A program has

- `prepare(name, inputs, by)`: a function of no arguments for the value, one for the gradients by the first `by` inputs,
  each to return when all work is done: an array or what numpy makes one of, or a list or tuple of them; or raises
  `Unsupported`, with the reason;
- `linear_algebra()`: the libraries that compute its products, as `bridge.linear_algebra` says them.

`prepare` (benchmark, inputs and result: files of bare numbers, shapes, by, chunk) writes the value and the gradients
into a file; `measure` (what, seconds, samples) answers with nanoseconds per call, a number for
each sample; `linear_algebra` answers with a text; `memory` (length, checkpoint) is what one program has. An error has
`kind` and `message`.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.child_process import Answer, serve
from experiments.microbenchmarks.functions import flat, read

Call = Callable[[], Any]


class Unsupported(Exception):
    """A function that a system can't differentiate, or a request that it does not know; the message says why."""


def main(start: Answer, folder: str) -> None:
    """Serve until standard input ends. `start` names the program's module; the folder is for files."""
    server = _Server()

    def load() -> Answer:
        server.program = importlib.import_module(start["module"])
        return {"result": {"ready": True}}

    serve(load, lambda call, request: {"result": server.answer(call, request)}, _failure, Path(folder))


def _failure(error: Exception) -> Answer:
    kind = "unsupported" if isinstance(error, Unsupported) else "failed"
    return {"kind": kind, "message": f"{type(error).__name__}: {error}".removeprefix("Unsupported: ")}


class _Server:
    """One prepared function at a time."""

    def __init__(self) -> None:
        self.program: Any = None
        self.calls: dict[str, Call] = {}
        self.counts: dict[str, int] = {}

    def answer(self, call: str, request: Answer) -> Answer:
        match call:
            case "prepare":
                return self.prepare(request)
            case "measure":
                return self.measure(request["what"], request["seconds"], request["samples"])
            case "linear_algebra":
                return {"text": self.program.linear_algebra()}
            case "memory" if hasattr(self.program, "memory"):
                return {"bytes": self.program.memory(request["length"], request["checkpoint"])}
        raise Unsupported(f"no call {call}")

    def prepare(self, request: Answer) -> Answer:
        if request["chunk"]:
            raise Unsupported("has no forward mode in chunks")
        inputs = read(request["inputs"], request["shapes"])
        forward, gradient = self.program.prepare(request["benchmark"], inputs, request["by"])
        self.calls = {"forward": forward, "gradient": gradient}
        self.counts = {}
        value, gradients = (x if isinstance(x, list | tuple) else [x] for x in (forward(), gradient()))
        flat(value[0], gradients).tofile(request["result"])
        return {}

    def measure(self, what: str, seconds: float, samples: int) -> Answer:
        call = self.calls[what]
        if what not in self.counts:
            self.counts[what] = _enough(call, seconds)
        count = self.counts[what]
        gc.collect()
        return {"nanoseconds": [_timed(call, count) / count for _ in range(samples)], "calls": count}


def _timed(call: Call, count: int) -> int:
    """Nanoseconds of `count` calls."""
    numbers = range(count)
    start = time.perf_counter_ns()
    for _ in numbers:
        call()
    return time.perf_counter_ns() - start


def _enough(call: Call, seconds: float) -> int:
    """How many calls make a sample of this length; finding it out also warms up."""
    call()  # the first one may compile, and take longer than the others
    count, wanted = 1, seconds * 1e9
    while True:
        taken = _timed(call, count)
        if taken >= 0.5 * wanted:
            return max(1, round(count * wanted / taken))
        count = max(2 * count, min(10 * count, int(count * wanted / max(taken, 1))))
