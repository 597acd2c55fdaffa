"""The tool's side of GradBench's protocol: one JSON message per line on standard input, one answer per line.

`start` is answered with the tool's name, `define` with whether there is such a module, `evaluate` with the output and a
timing for each run, `analysis` with nothing but its number.
"""

from __future__ import annotations

import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import ModuleType
from typing import Any, ClassVar, TextIO

import numpy as np
from numpy.typing import NDArray

import py_engine as pe
from bridge import julia
from bridge.errors import TwinGradError, shown
from experiments.gradbench.values import InputError

__all__ = ["ENGINES", "MODULES", "serve"]

Array = NDArray[Any]
Answer = dict[str, Any]

_PACKAGE = "experiments.gradbench"
MODULES = tuple(
    sorted(
        entry.name.removesuffix(".jl")
        for entry in resources.files(_PACKAGE).iterdir()
        if entry.name.endswith(".jl") and entry.name != "runs.jl"
    )
)
"""Those that both engines have."""


class MessageError(TwinGradError):
    """What stands on standard input is not GradBench's protocol."""


MOST_BYTES = 128_000_000
"""Characters of a message; one of GradBench's own largest (`gmm` of 10,000 points) has 30 million."""
MOST_VALUES, MOST_LISTS = 10_000_000, 1_000_000
"""Values, and lists and objects, of a message. Python holds each in some 32 or 64 bytes."""
LONGEST_ERROR = 2_000
"""Characters of an error in an answer."""
MOST_RUNS, MOST_SECONDS = 1_000_000, 3_600
"""What `min_runs` and `min_seconds` of an evaluation may ask for."""


def serve(engine: str, lines: TextIO | Iterable[str], answers: TextIO, threads: int = 1) -> None:
    """Answer messages until there are no more, or one of kind `end`.

    Raises `MessageError` for a line that is no message, `JuliaUnavailableError` for an engine that is not there.
    """
    tool = ENGINES[engine](threads)
    for number, line in enumerate(_bounded(lines), start=1):
        message = _message(line, number)
        if message["kind"] == "end":
            return
        answers.write(json.dumps({"id": message["id"], **_answer(tool, message)}) + "\n")
        answers.flush()


def _bounded(lines: TextIO | Iterable[str]) -> Iterator[str]:
    """The lines, each read no further than a character beyond the most that it may have."""
    if hasattr(lines, "readline"):
        return iter(lambda: lines.readline(MOST_BYTES + 1), "")
    return iter(lines)


def _message(line: str, number: int) -> dict[str, Any]:
    here = f"line {number} of standard input"
    if len(line) > MOST_BYTES:
        raise MessageError(f"{here} has more than {MOST_BYTES:,} characters")
    if line.count(",") >= MOST_VALUES or line.count("[") + line.count("{") > MOST_LISTS:
        raise MessageError(f"{here} has more than {MOST_VALUES:,} values or {MOST_LISTS:,} lists and objects")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # also too many digits, and lists too deep
        raise MessageError(f"{here} is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str) or "id" not in message:
        raise MessageError(f"{here} is no message: expected an object with 'id' and 'kind'")
    if isinstance(message["id"], list | dict):
        raise MessageError(f"{here} is no message: expected a number or a text for 'id', found {shown(message['id'])}")
    return message


def _answer(tool: Tool, message: Mapping[str, Any]) -> Answer:
    match message["kind"]:
        case "start":
            return {"tool": tool.name, "config": {"threads": tool.threads}}
        case "define":
            return _guarded(lambda: {"success": bool(_module(message.get("module")))})
        case "evaluate":
            return _guarded(lambda: _evaluate(tool, message))
        case _:
            return {}


def _guarded(work: Callable[[], Answer]) -> Answer:
    """The answer, or the failure in its place: a wrong input must not end the conversation."""
    try:
        return work()
    except (TwinGradError, pe.EngineError, LookupError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        return {"success": False, "error": f"{type(error).__name__}: {str(error)[:LONGEST_ERROR]}"}


def _evaluate(tool: Tool, message: Mapping[str, Any]) -> Answer:
    name, given = str(message.get("function")), message.get("input")
    module = _module(message.get("module"))
    if name not in module.FUNCTIONS:
        raise MessageError(
            f"module {message['module']} has no function {shown(name)}; it has {', '.join(module.FUNCTIONS)}"
        )
    options = given if isinstance(given, dict) else {}
    min_runs, min_seconds = (
        int(_least(options, "min_runs", 1, MOST_RUNS)),
        _least(options, "min_seconds", 0.0, MOST_SECONDS),
    )
    arrays, settings = module.read(given)
    result, nanoseconds = tool.run(Task(message["module"], name, arrays, settings, min_runs, min_seconds))
    if not all(np.isfinite(x).all() for x in result):
        raise InputError("the result is not finite, and JSON has no such numbers")
    timings = [{"name": "evaluate", "nanoseconds": n} for n in nanoseconds]
    return {"success": True, "output": module.write(result, given), "timings": timings}


def _least(options: Mapping[str, Any], name: str, default: float, most: float) -> float:
    found = options.get(name, default)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found <= most:
        raise InputError(f"{name}: expected a number of at most {most:,}, found {shown(found)}")
    return float(found)


def _module(name: Any) -> ModuleType:
    if name not in MODULES:
        raise MessageError(f"there is no module {shown(name)} here; there are {', '.join(MODULES)}")
    return importlib.import_module(f"{_PACKAGE}.{name}")


# Engines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A function of a module, what it is called with, and how often it runs at least and for how many seconds."""

    module: str
    function: str
    arrays: Sequence[Array]
    settings: Sequence[Any]
    min_runs: int
    min_seconds: float


class Tool(ABC):
    """An engine that runs a module's functions."""

    name: ClassVar[str]

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @abstractmethod
    def run(self, task: Task) -> tuple[list[Array], list[int]]:
        """Return the result's arrays, and the nanoseconds of each run."""


class Numpy(Tool):
    """The numpy engine; the first run traces the function."""

    name = "twingrad-numpy"

    def run(self, task: Task) -> tuple[list[Array], list[int]]:
        """See `Tool.run`."""
        from threadpoolctl import threadpool_limits

        make = _module(task.module).FUNCTIONS[task.function]
        compiled = pe.compile(make(*task.settings))
        nanoseconds: list[int] = []
        with threadpool_limits(self.threads):
            for _ in _runs(nanoseconds, task):
                before = time.perf_counter_ns()
                result = compiled(*task.arrays)
                nanoseconds.append(time.perf_counter_ns() - before)
        return list(result) if isinstance(result, tuple) else [result], nanoseconds


class Julia(Tool):
    """The Julia engine, in this process; times are taken in Julia, and the first run traces and compiles."""

    name = "twingrad-julia"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        from bridge.libjulia.engine import load_engine

        load_engine(threads)  # a Julia that isn't there is told of at once
        self._known: dict[tuple[str, str, int], Any] = {}

    def run(self, task: Task) -> tuple[list[Array], list[int]]:
        """See `Tool.run`."""
        key = (task.module, task.function, len(task.arrays))
        if key not in self._known:
            code = (
                f"const FUNCTIONS = begin\n{_source(task.module)}\nend\n{_source('runs')}\n"
                f"runs(FUNCTIONS.{task.function}, {len(task.arrays)})"
            )
            self._known[key] = julia.function(code, replay=False, threads=self.threads)
        return _unpacked(self._known[key].value(task.min_runs, task.min_seconds, *task.arrays, *task.settings))


def _source(name: str) -> str:
    return (resources.files(_PACKAGE) / f"{name}.jl").read_text(encoding="utf-8")


def _runs(done: Sequence[int], task: Task) -> Iterator[None]:
    total = 0
    while len(done) < max(task.min_runs, 1) or total < task.min_seconds * 1e9:
        yield
        total += done[-1]


def _unpacked(packed: Array) -> tuple[list[Array], list[int]]:
    """Take apart what runs.jl has put together: the number of runs, their times, then each array with its size."""
    count = int(packed[0])
    nanoseconds = [int(n) for n in packed[1 : 1 + count]]
    arrays, at = [], 1 + count
    while at < len(packed):
        axes = int(packed[at])
        shape = tuple(int(n) for n in packed[at + 1 : at + 1 + axes][::-1])
        at += 1 + axes
        size = int(np.prod(shape, dtype=int))
        arrays.append(packed[at : at + size].reshape(shape))
        at += size
    return arrays, nanoseconds


ENGINES: dict[str, type[Tool]] = {"numpy": Numpy, "julia": Julia}
