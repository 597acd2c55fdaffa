"""A system's program in its own process, and what it is asked; C++ is compiled here and run once per question."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from bridge.child import Child, ChildDiedError, import_path
from bridge.libjulia.environment import ENGINE, kernels_for
from bridge.libjulia.find import find
from bridge.temporary import temporary_folder
from bridge.worker import environment
from experiments.microbenchmarks import registry
from experiments.microbenchmarks.functions import Array, Benchmark, flat, shapes_of
from experiments.microbenchmarks.registry import DUALS, BenchmarkError, System

TOLERANCE = 1e-9
"""How far, relative to the largest of them, a value or gradient may be from that by hand."""

_LAST_LINES = 6
_FEW = 120
_WEIGHTS = 7
"""The gradient's elements count 1 to 7 in the checksum that duals.cpp prints."""


class UnsupportedError(BenchmarkError):
    """Something that a system does not have, which is no failure."""


class WrongGradientError(BenchmarkError):
    """A system's value or gradients are not those by hand: it is not timed."""


def start(system: System, threads: int, place: int = 0) -> Entrant:
    """Start a system's program; it gets ready while others are started, too. `place` chooses the core that it gets."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    core = cores[place % len(cores)] if cores else None
    return Compiled(system) if system.language == "cpp" else Process(system, threads, core)


def largest_error(found: Array, value: float, gradients: Sequence[Array]) -> float:
    """Relative to the largest element, the value and each of the gradients by itself; infinite where sizes differ."""
    start, errors = 0, []
    for wanted in (np.array(value), *gradients):
        part, start = found[start : start + wanted.size], start + wanted.size
        if part.size != wanted.size:
            return float("inf")
        scale = max(float(np.max(np.abs(wanted))), 1e-300)
        errors.append(float(np.max(np.abs(part - wanted.ravel()))) / scale)
    return max(errors) if start == found.size and np.isfinite(errors).all() else float("inf")


def _check(system: System, benchmark: Benchmark, error: float) -> float:
    if not error <= TOLERANCE:
        raise WrongGradientError(
            f"{system.label}: value and gradient of {benchmark.title} differ from those by hand by {error:.1e} of "
            f"their size, more than {TOLERANCE:.0e}: not timed"
        )
    return error


class Process:
    """A program that answers lines of JSON."""

    def __init__(self, system: System, threads: int, core: int | None = None) -> None:
        self.system = system
        self._ready = False
        command, variables = [*registry.command(system), *self._argument()], self._environment(threads)
        self.folder = temporary_folder("twingrad-micro-")
        self._child = Child([*command, str(self.folder)], variables, self.folder, () if core is None else (core,))

    def prepare(self, benchmark: Benchmark, size: int, chunk: int = 0) -> float:
        """Make ready for a function, and check value and gradients; the largest relative error.

        Raises UnsupportedError where the system does not have this, WrongGradientError, or BenchmarkError.
        """
        inputs = benchmark.inputs(size)
        given, result = self.folder / "inputs", self.folder / "result"
        flat(0.0, inputs)[1:].tofile(given)
        result.unlink(missing_ok=True)
        names = {"benchmark": benchmark.name, "inputs": str(given), "result": str(result)}
        self.ask("prepare", **names, shapes=shapes_of(inputs), by=benchmark.by, chunk=chunk)
        return _check(self.system, benchmark, largest_error(np.fromfile(result), *benchmark.gradient(*inputs)))

    def measure(self, what: str, seconds: float, samples: int) -> list[float]:
        """Nanoseconds of a call of "forward" or "gradient", one per sample of about `seconds` seconds."""
        found: list[float] = self.ask("measure", what=what, seconds=seconds, samples=samples)["nanoseconds"]
        return found

    def linear_algebra(self) -> str:
        """The libraries that compute its products, as it says itself."""
        return str(self.ask("linear_algebra")["text"])

    def memory(self, length: int, checkpoint: bool) -> int:
        """The peak of bytes while a loop of `length` steps is differentiated."""
        return int(self.ask("memory", length=length, checkpoint=checkpoint)["bytes"])

    def ask(self, call: str, **fields: Any) -> dict[str, Any]:
        """The answer to a request; UnsupportedError or BenchmarkError for what it gives instead."""
        if not self._ready:
            self._answer("starting")
            self._ready = True
        return self._answer(call, fields)

    def close(self) -> None:
        """End it."""
        self._child.close()

    def _answer(self, call: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request, or without fields the first one, which comes unasked."""
        try:
            answer = self._child.receive() if fields is None else self._child.ask(call, **fields)
        except ChildDiedError as death:
            last = " / ".join(death.said[-_LAST_LINES:]) or "nothing"
            raise BenchmarkError(
                f"{self.system.label}: its process ended with status {death.status} in {call}; it last said: {last}"
            ) from None
        if "error" not in answer:
            found: dict[str, Any] = answer["result"]
            return found
        kind = UnsupportedError if answer["error"]["kind"] == "unsupported" else BenchmarkError
        message = answer["error"]["message"]
        raise kind(message if kind is UnsupportedError else f"{self.system.label}: {call}: {message}")

    def _argument(self) -> list[str]:
        if self.system.language != "py":
            return []
        module = f"experiments.microbenchmarks.systems.{self.system.path.stem}"
        return [json.dumps({"module": module, "path": import_path()})]

    def _environment(self, threads: int) -> dict[str, str]:
        variables = environment(threads)
        if self.system.language == "jl":
            better = kernels_for(find().kernels)
            if better is not None:  # unless the user chose them on purpose
                variables = {"OPENBLAS_CORETYPE": better} | variables
            path = os.environ.get("JULIA_LOAD_PATH") or os.pathsep.join(("@", "@v#.#", "@stdlib"))
            variables |= {"JULIA_NUM_THREADS": str(threads), "JULIA_LOAD_PATH": f"{ENGINE}{os.pathsep}{path}"}
        return variables | {"TF_CPP_MIN_LOG_LEVEL": "3"}


class Compiled:
    """The dual numbers in C++: compiled for this processor with full optimisation, and started for every question."""

    FLAGS = ("-O3", "-march=native", "-std=c++17")

    def __init__(self, system: System) -> None:
        self.system = system
        self.folder = temporary_folder("twingrad-micro-")
        self.program = self.folder / "duals"
        compiler = system.found().versions["compiler"]
        command = [*shlex.split(compiler), *self.FLAGS, str(DUALS), "-o", str(self.program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.problem = "" if done.returncode == 0 else f"{compiler} could not compile {DUALS.name}: {done.stderr[:300]}"
        self.asked: tuple[Benchmark, int, int] | None = None

    def prepare(self, benchmark: Benchmark, size: int, chunk: int = 0) -> float:
        """See `Process.prepare`; what is compared is a sum of the gradient's elements with weights.

        Here for few inputs, since a gradient may take seconds; for all of them with every time that is taken.
        """
        if self.problem:
            raise BenchmarkError(self.problem)
        self.asked = (benchmark, min(size, _FEW), chunk)
        error = self._run(1)[0]["error"]
        self.asked = (benchmark, size, chunk)
        return float(error)

    def measure(self, what: str, seconds: float, samples: int) -> list[float]:
        """See `Process.measure`: `what` is what was prepared, the gradient by chunks or the function alone."""
        calls = max(1, round(seconds / max(self._run(1)[0]["seconds"], 1e-9))) if seconds else 1
        runs = [row["seconds"] * 1e9 for row in self._run(calls * samples)]
        return [float(np.mean(runs[i * calls : (i + 1) * calls])) for i in range(samples)]

    def linear_algebra(self) -> str:
        """See `Process.linear_algebra`: its loops are its own."""
        return "none"

    def memory(self, length: int, checkpoint: bool) -> int:
        """See `Process.memory`."""
        raise UnsupportedError("has no loops")

    def close(self) -> None:
        """See `Process.close`."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, repetitions: int) -> list[dict[str, Any]]:
        assert self.asked is not None
        benchmark, size, chunk = self.asked
        arguments = [str(self.program), benchmark.name, str(size), str(chunk), str(repetitions)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise BenchmarkError(f"{self.system.label}: {said[:300]}")
        value, (gradient,) = benchmark.gradient(*benchmark.inputs(size))
        wanted = float(np.sum((np.arange(size) % _WEIGHTS + 1) * gradient)) if chunk else value
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        for row in rows:
            row["error"] = _check(self.system, benchmark, abs(row["checksum"] - wanted) / max(abs(wanted), 1e-300))
        return rows


Entrant: TypeAlias = Process | Compiled
"""A system that takes part."""
