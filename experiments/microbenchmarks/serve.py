"""What runs in the process of a system whose program is Python: answers requests, a line of JSON each.

A program has

- `prepare(name, inputs, by)`: a function of no arguments for the value, one for the gradients by the first `by` inputs,
  each to return when all work is done; or raises `Unsupported`, with the reason;
- `numpy(result)`: a result as numpy arrays;
- `linear_algebra()`: the libraries that compute its products, as `bridge.linear_algebra` says them.

Requests are flat objects: `prepare` (benchmark, inputs and result: files of bare numbers, shapes, by, chunk) writes the
value and the gradients into a file; `measure` (what, seconds, samples) answers with nanoseconds per call, a number for
each sample; `linear_algebra` answers with a text; `memory` (length, checkpoint) is what one program has. An error is
`{"error": {"kind": ..., "message": ...}}`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from experiments.microbenchmarks.functions import flat, read

Call = Callable[[], Any]


class Unsupported(Exception):
    """A function that a system can't differentiate, or a request that it does not know; the message says why."""


def main(start: dict[str, Any]) -> None:
    """Serve until standard input ends. `start` names the program's module."""
    requests, answers = _streams()
    server: _Server | None = None

    def load() -> dict[str, Any]:
        nonlocal server
        server = _Server(importlib.import_module(start["module"]))
        return {"ready": True}

    _send(answers, _guarded(load))
    if server is not None:
        for line in requests:
            _send(answers, _guarded(partial(server.answer, json.loads(line))))


def _streams() -> tuple[TextIO, TextIO]:
    """The protocol keeps its pipe to itself: what a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return sys.stdin, answers


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"result": work()}
    except Exception as error:
        traceback.print_exc()
        kind = "unsupported" if isinstance(error, Unsupported) else "failed"
        return {"error": {"kind": kind, "message": f"{type(error).__name__}: {error}".removeprefix("Unsupported: ")}}


class _Server:
    """One prepared function at a time."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.calls: dict[str, Call] = {}
        self.counts: dict[str, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["call"]:
            case "prepare":
                return self.prepare(request)
            case "measure":
                return self.measure(request["what"], request["seconds"], request["samples"])
            case "linear_algebra":
                return {"text": self.program.linear_algebra()}
            case "memory" if hasattr(self.program, "memory"):
                return {"bytes": self.program.memory(request["length"], request["checkpoint"])}
        raise Unsupported(f"no call {request['call']}")

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["chunk"]:
            raise Unsupported("has no forward mode in chunks")
        inputs = read(request["inputs"], request["shapes"])
        forward, gradient = self.program.prepare(request["benchmark"], inputs, request["by"])
        self.calls = {"forward": forward, "gradient": gradient}
        self.counts = {}
        value, gradients = self.program.numpy(forward()), self.program.numpy(gradient())
        flat(value[0], gradients).tofile(request["result"])
        return {}

    def measure(self, what: str, seconds: float, samples: int) -> dict[str, Any]:
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
    count, wanted = 1, seconds * 1e9
    while True:
        taken = _timed(call, count)
        if taken >= 0.5 * wanted:
            return max(1, round(count * wanted / taken))
        count = max(2 * count, min(10 * count, int(count * wanted / max(taken, 1))))
