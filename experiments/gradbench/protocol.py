"""The tool's side of GradBench's protocol: one JSON message per line on standard input, one answer per line.

`start` is answered with the tool's name, `define` with whether the engine has such a module, `evaluate` with the output
and timings, `analysis` with nothing but its number. A function is compiled when it is first evaluated for arguments of
these shapes and settings, which is a separate timing, `prepare`; each run is a timing `evaluate`. What was compiled
serves later messages.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

import py_engine as pe
from bridge import julia
from bridge.errors import TwinGradError, shown
from experiments import gradbench
from experiments.gradbench.values import InputError

__all__ = ["ENGINES", "modules", "serve"]

Array = NDArray[Any]
Answer = dict[str, Any]

_OWN = ("protocol", "values")
"""Files of the package that are no modules of GradBench."""


class MessageError(TwinGradError):
    """What comes on standard input is not GradBench's protocol."""


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
            return _guarded(lambda: {"success": bool(tool.functions(_module(message.get("module"))))})
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
    functions = tool.functions(module)
    if name not in functions:
        raise MessageError(f"module {message['module']} has no function {shown(name)}; it has {', '.join(functions)}")
    options = given if isinstance(given, dict) else {}
    min_runs, min_seconds = (
        int(_least(options, "min_runs", 1, MOST_RUNS)),
        _least(options, "min_seconds", 0.0, MOST_SECONDS),
    )
    arrays, settings = module.read(given)
    run = tool.run(Task(module, name, arrays, tuple(settings), min_runs, min_seconds))
    if not all(np.isfinite(x).all() for x in run.result):
        raise InputError("the result is not finite, and JSON has no such numbers")
    timings = [{"name": "prepare", "nanoseconds": n} for n in run.preparation]
    timings += [{"name": "evaluate", "nanoseconds": n} for n in run.nanoseconds]
    output = module.write(run.result, given) if hasattr(module, "write") else np.asarray(run.result[0]).tolist()
    return {"success": True, "output": output, "timings": timings}


def _least(options: Mapping[str, Any], name: str, default: float, most: float) -> float:
    found = options.get(name, default)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found <= most:
        raise InputError(f"{name}: expected a number of at most {most:,}, found {shown(found)}")
    return float(found)


def modules() -> list[str]:
    """The modules that at least one engine has."""
    return sorted(found.name for found in pkgutil.iter_modules(gradbench.__path__) if found.name not in _OWN)


def _module(name: Any) -> ModuleType:
    if name not in modules():
        raise MessageError(f"there is no module {shown(name)} here; there are {', '.join(modules())}")
    return importlib.import_module(f"{gradbench.__name__}.{name}")


# Engines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A function of a module, what it is called with, and how often it runs at least and for how many seconds."""

    module: ModuleType
    function: str
    arrays: Sequence[Array]
    settings: tuple[Any, ...]
    min_runs: int
    min_seconds: float


@dataclass(frozen=True)
class Run:
    """The result's arrays, the nanoseconds of each evaluation, and those of what was made before the first, if any."""

    result: list[Array]
    nanoseconds: list[int]
    preparation: list[int]


KEPT = 4
"""Compiled functions that are kept, the last ones: each holds the memory of one evaluation."""


class Numpy:
    """The numpy engine. Functions that a module names in `EAGER` run as they are, all others compiled."""

    name = "twingrad-numpy"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._known: OrderedDict[Any, Callable[..., Any]] = OrderedDict()

    def functions(self, module: ModuleType) -> list[str]:
        """Return the functions of a module that the engine has; raises `MessageError` where it has none."""
        found = [name for name, make in module.FUNCTIONS.items() if make is not None]
        return found or _refuse(module, "Julia")

    def run(self, task: Task) -> Run:
        """Run a function."""
        from threadpoolctl import threadpool_limits

        nanoseconds: list[int] = []
        with threadpool_limits(self.threads):
            function, preparation = self._prepared(task)
            for _ in _runs(nanoseconds, task):
                before = time.perf_counter_ns()
                result = function(*task.arrays)
                nanoseconds.append(time.perf_counter_ns() - before)
        return Run(list(result) if isinstance(result, tuple) else [result], nanoseconds, preparation)

    def _prepared(self, task: Task) -> tuple[Callable[..., Any], list[int]]:
        """Return the function, and the time that its compilation took, if it was compiled now."""
        key = task.module.__name__, task.function, task.settings, tuple(x.shape for x in task.arrays)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key], []
        function = task.module.FUNCTIONS[task.function](*task.settings)
        if task.function in getattr(task.module, "EAGER", ()):
            return function, []
        before = time.perf_counter_ns()
        compiled = pe.compile(function)
        compiled(*task.arrays)
        preparation = time.perf_counter_ns() - before
        self._known[key] = compiled
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return compiled, [preparation]


class Julia:
    """The Julia engine, in this process; times are taken in Julia. Functions that the module's Julia file names in
    `eager` run as they are, all others compiled."""

    name = "twingrad-julia"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        from bridge.libjulia.engine import load_engine

        load_engine(threads)  # a missing Julia is reported at once
        self._known: dict[tuple[str, str, int], Any] = {}

    def functions(self, module: ModuleType) -> list[str]:
        """Return the functions of a module that the engine has; raises `MessageError` where it has none."""
        return list(module.FUNCTIONS) if _beside(module).is_file() else _refuse(module, "numpy")

    def run(self, task: Task) -> Run:
        """Run a function."""
        key = (task.module.__name__, task.function, len(task.arrays))
        if key not in self._known:
            file, runs = _beside(task.module), Path(__file__).with_name("runs.jl")
            code = (
                f"const FUNCTIONS = begin\n{file.read_text('utf-8')}\nend\n{runs.read_text('utf-8')}\n"
                f"const COMPILED = !(:{task.function} in get(FUNCTIONS, :eager, ()))\n"
                f"runs(FUNCTIONS.{task.function}, {len(task.arrays)}, COMPILED, {KEPT})"
            )
            self._known[key] = julia.function(code, replay=False, threads=self.threads)
        return _unpacked(self._known[key].value(task.min_runs, task.min_seconds, *task.arrays, *task.settings))


def _beside(module: ModuleType) -> Path:
    """The file of a module for the Julia engine."""
    return Path(str(module.__file__)).with_suffix(".jl")


def _refuse(module: ModuleType, only: str) -> list[str]:
    raise MessageError(f"the module {shown(module.__name__.rpartition('.')[2])} is for the {only} engine only")


def _runs(done: Sequence[int], task: Task) -> Iterator[None]:
    total = 0
    while len(done) < max(task.min_runs, 1) or total < task.min_seconds * 1e9:
        yield
        total += done[-1]


def _unpacked(packed: Array) -> Run:
    """Take apart what runs.jl has put together: numbers of times, and times, twice; then each array with its size."""
    preparation, at = _counted(packed, 0)
    nanoseconds, at = _counted(packed, at)
    arrays = []
    while at < len(packed):
        axes = int(packed[at])
        shape = tuple(int(n) for n in packed[at + 1 : at + 1 + axes][::-1])
        at += 1 + axes
        size = int(np.prod(shape, dtype=int))
        arrays.append(packed[at : at + size].reshape(shape))
        at += size
    return Run(arrays, nanoseconds, preparation)


def _counted(packed: Array, at: int) -> tuple[list[int], int]:
    """Return as many numbers as the one here says, and where they end."""
    end = at + 1 + int(packed[at])
    return [int(n) for n in packed[at + 1 : end]], end


Tool: TypeAlias = Numpy | Julia
"""An engine that runs a module's functions."""

ENGINES: dict[str, type[Tool]] = {"numpy": Numpy, "julia": Julia}
