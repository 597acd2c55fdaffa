"""Rounds in which the systems alternate, so that machine drift affects all of them equally.

Each system keeps one process. For each function all are made ready and their gradients checked; then they are timed in
rounds, in an order that starts one later each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.measures.measure import Measure
from experiments.measures.task import Watcher
from experiments.microbenchmarks.functions import CHUNKED, SMALL, benchmark
from experiments.microbenchmarks.process import Entrant, UnsupportedError
from experiments.microbenchmarks.registry import BenchmarkError
from experiments.slots import rotated

FORWARD_MODE = ("duals", "julia-forward", "forwarddiff")
"""The systems that are measured by chunk size; the others in reverse mode."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much is measured: `rounds` of `samples` that last `seconds` each, and how large the inputs are."""

    rounds: int
    samples: int
    seconds: float
    array: int
    """Elements of the arrays."""
    rows: int
    """Inputs that the networks read at once."""
    chunked: int
    """Inputs of the functions that are differentiated in chunks."""
    chunks: tuple[int, ...]
    chunk_rounds: int
    lengths: tuple[int, ...]
    """Steps of the loop whose memory is measured."""


@dataclass(frozen=True)
class Question:
    """One function of one size, with its chunk size (0: reverse mode, by hand, or the function alone)."""

    benchmark: str
    size: int
    chunk: int = 0

    def kinds(self, system: str) -> tuple[str, ...]:
        """What a system is timed for."""
        if self.chunk:
            return ("gradient",) if system in FORWARD_MODE else ()
        return ("forward",) if system == "duals" else () if system == "julia-forward" else ("forward", "gradient")


def questions(suite: str, sizes: Sizes) -> list[Question]:
    """What a suite asks every system."""
    match suite:
        case "gradients":
            return [Question(name, size) for name, size in SMALL.items()]
        case "arrays":
            large = {**dict.fromkeys(SMALL, sizes.array), "logistic": sizes.rows, "mlp": sizes.rows}
            large |= dict.fromkeys(CHUNKED, max(sizes.array, sizes.chunked))
            return [Question(name, size) for name, size in large.items()]
        case "chunks":
            return [Question(name, sizes.chunked, chunk) for name in CHUNKED for chunk in (0, *sizes.chunks)]
    return []


def parts(suite: str, sizes: Sizes) -> int:
    """How many steps of progress a suite has."""
    return 2 * len(sizes.lengths) if suite == "memory" else len(questions(suite, sizes))


def measure(suite: str, entrants: Mapping[str, Entrant], sizes: Sizes, watcher: Watcher) -> tuple[list[Row], list[Row]]:
    """The rows of a suite, and what is missing of it: rows with `missing`, the reason, and whether it is a `failure`.

    A system that fails is left out from there on; the others continue.
    """
    alive = dict(entrants)
    rows: list[Row] = []
    missing: list[Row] = []
    if suite == "memory":
        for length in sizes.lengths:
            for checkpoint in (False, True):
                for name, entrant in list(alive.items()):
                    about = {"engine": name, "benchmark": "scan", "size": length, "chunk": 0}
                    about["what"] = "checkpointed" if checkpoint else "plain"
                    with _noting(name, about, alive, missing):
                        rows.append({**about, "round": 1, "bytes": entrant.memory(length, checkpoint)})
                watcher.step()
        return rows, missing
    for question in questions(suite, sizes):
        about = {"benchmark": question.benchmark, "size": question.size, "chunk": question.chunk}
        ready: dict[str, float] = {}
        for name, entrant in list(alive.items()):
            if question.kinds(name):
                with _noting(name, {**about, "engine": name}, alive, missing):
                    ready[name] = entrant.prepare(benchmark(question.benchmark), question.size, question.chunk)
        one_call = question.chunk > 0  # which takes long enough
        rounds, samples = (sizes.chunk_rounds, 1) if one_call else (sizes.rounds, sizes.samples)
        for number in range(1, rounds + 1):
            for name in rotated([name for name in ready if name in alive], number):
                with _noting(name, {**about, "engine": name}, alive, missing):
                    for what in question.kinds(name):
                        found = alive[name].measure(what, 0.0 if one_call else sizes.seconds, samples)
                        own = {"engine": name, "what": what, "round": number, "gradient_error": ready[name]}
                        rows.append({**about, **own, "nanoseconds": sorted(found)[len(found) // 2]})
        watcher.step()
    return [row for row in rows if row["engine"] in alive], missing


@contextlib.contextmanager
def _noting(name: str, about: Row, alive: dict[str, Entrant], missing: list[Row]) -> Iterator[None]:
    """Note what a system lacks, or its failure, which ends its part."""
    try:
        yield
    except UnsupportedError as error:
        missing.append({**about, "missing": str(error), "failure": False})
    except BenchmarkError as error:
        alive.pop(name, None)
        missing.append({**about, "missing": str(error), "failure": True})


def table_rows(record: Row) -> Iterator[Row]:
    """What was measured of each system, and one row for a system that was not there."""
    suite = {"suite": record["config"]["suite"]}
    origins = {
        name: {
            "version": " ".join(f"{library} {version}" for library, version in entrant["versions"].items()),
            "engine_digest": entrant["engine_digest"],
            "blas": record["blas"].get(name, ""),
        }
        for name, entrant in record["entrants"].items()
    }
    for row in record.get(MEASURE.name, ()):
        yield suite | origins[row["engine"]] | row
    for name, entrant in record["entrants"].items():
        if entrant["error"] and not entrant["available"]:
            yield suite | origins[name] | {"engine": name, "label": entrant["label"], "missing": entrant["error"]}


MEASURE = Measure(
    name="microbenchmarks",
    place=8,
    title="micro-benchmarks: small functions in many systems",
    about="small functions and their gradients, see `twingrad microbench`",
    words="micro-benchmarks",
    run=measure,
    form={
        "microbenchmarks": [
            {
                **{"engine": "text", "benchmark?": "text", "label?": "text", "size?": "count", "chunk?": "count"},
                **{"what?": "text?", "missing?": "text?", "round?": "count?"},
                **{"nanoseconds?": "positive?", "bytes?": "number?", "gradient_error?": "number?"},
            }
        ]
    },
    plan="suites",
    # One row for each function, system and round, in nanoseconds per call or bytes; or with what is missing and why.
    columns=(
        *("key", "paper", "engine", "label", "threads", "profile", "suite", "benchmark", "size", "chunk", "what"),
        *("round", "nanoseconds", "bytes", "gradient_error", "missing", "version", "engine_digest", "commit", "dirty"),
        *("cpu_model", "machine", "blas", "created"),
    ),
    records=table_rows,
    later=True,
)
