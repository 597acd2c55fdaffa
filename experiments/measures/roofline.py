"""The least time that a training step can take on this machine: what engines are held against.

The limit of a step is one call and, of two times, the longer one:

- that of its *products* at the highest rate of arithmetic that was measured here, in matrix products of many sizes and
  in multiply-adds on registers. Counted are the multiplications and additions of matrix products and convolutions,
  forward and backward, as the ops' records give them (`Equation.flops`), in the program of the step before anything is
  fused. Left out are all other operations, since fusion may do fewer of them; and of products what need not be
  multiplied: padding, the zeros that a maximum's gradient puts around the winners, results that no window reads, and
  rows that were looked up in a table or are added into one, since equal rows need be multiplied only once.
- that of the *bytes* that have to move: each row of the mini-batch is read once; each trained parameter, and each
  number that the optimizer keeps for it, is read and written once. Activations, gradients and parameters that are not
  trained may stay in registers, and don't count; nor do matrices of which only rows are looked up, where the optimizer
  allows the other rows to be updated later. The rate is the highest that was measured of reading, copying or updating
  arrays of the largest of `SIZES` that parameters and state together fill, or of larger ones: where they lie between
  two sizes, at the end of a cache, memory may be slower than that.

Both times may pass at once, so that only the longer one counts. A step that gives the right parameters, and computes
its products term by term in its dtype, can't be faster, however it is fused or ordered.
Algorithms with fewer multiplications can: ours have Winograd's for convolutions, with a quarter of them at least. In
a race a step of theirs below that part of its limit is an error; a step of another framework is shown as it is.

`measure` takes the rates in separate processes: in numpy, by this file, and in Julia, where there is one, by
`roofline.jl`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bridge.adapters.numpy import build_chain
from bridge.child import import_path
from bridge.errors import JuliaUnavailableError, TwinGradError
from bridge.libjulia.find import find
from bridge.spec import ModelSpec
from bridge.worker import environment
from experiments.measures.task import Task
from py_engine import network
from py_engine.ad.op import Equation, nbytes
from py_engine.ad.program import Program, simplify
from py_engine.ad.state import entering
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Tensor
from py_engine.network import losses
from py_engine.network.steps import trace_step

OURS, FEWEST = ("numpy", "julia"), 1 / 4
"""Engines of which it is known that they leave out no more multiplications than this part, by Winograd's algorithm."""

SIZES = tuple(2**power for power in (14, 16, 18, 20, 22, 24, 25, 26, 27))
"""Bytes of the arrays, of all threads together, whose bandwidth can be measured: 16 KiB to 128 MiB.

The largest caches end between the last ones, which are nearer each other for that."""

PRODUCTS = (128, 256, 512, 768, 1024)
"""Rows and columns of the matrices that are multiplied."""

_LINE = 64
"""Bytes of a cache line."""

SAMPLES, SECONDS = 5, 0.01
"""Samples of each rate, of which the best counts, and about how many seconds each takes."""

_TIMEOUT = 300.0
_START = "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "


class BelowLimitError(TwinGradError):
    """A step that was faster than the machine can compute it: one of the two is measured wrong."""

    exit_code = 1


# ---------------------------------------------------------------------------------------------------------------------
# What a step has to do


@dataclass(frozen=True)
class Work:
    """What one training step has to do on any machine."""

    products: float
    """Multiplications and additions of its products that can't be left out."""
    batch: int
    """Bytes of the mini-batch, read once."""
    state: int
    """Bytes of trained parameters and of what the optimizer keeps for them: read and written once."""
    ops: tuple[tuple[int, int], ...]
    """Operations and bytes of each of its ops by itself, the update included."""


def work_of(task: Task) -> Work:
    """The work of a step of a training."""
    spec, size = task.spec, task.batch_size
    chain, program, trained = _traced(task)
    x = program.inputs[0]
    rule = network.OPTIMIZERS[task.optimizer.name](**task.optimizer.settings())
    later = rule.weight_decay == 0 and (not rule.state_names or getattr(rule, "allows_lazy_updates", False))
    kept = 1 + len(rule.state_names)
    zeros, needless = skipped(program), unread(program)
    # Rows without a gradient don't change, or may change when they are looked up.
    changed = [not later or zeros.get(id(g), 0.0) < 1 for g in program.outputs[1 : 1 + len(trained)]]
    tensors = [chain.parameters[name] for name in trained]
    state = kept * sum(nbytes(x) for x, all_of_it in zip(tensors, changed, strict=True) if all_of_it)
    elements = sum(x.size for x in tensors)
    update = (2 * kept * elements, (2 * kept + 1) * elements * np.dtype(task.dtype).itemsize)
    ids = 1 if spec.vocabulary is None else np.min_scalar_type(spec.vocabulary - 1).itemsize
    read = size * int(np.prod(spec.input.sample)) * (x.dtype.itemsize if x.dtype.kind == "f" else ids)
    return Work(
        products=sum(one.flops * needed(one, zeros, needless) for one in program.equations if one.op.product),
        batch=read,
        state=state,
        ops=(*((one.flops, one.bytes) for one in program.equations), update),
    )


def _traced(task: Task) -> tuple[network.Chain, Program, list[str]]:
    """The network of a training, its step before anything is fused, and the parameters that are trained."""
    chain = build_chain(task.spec, task.dtype)
    shapes = _batch(task.spec, np.dtype(task.dtype))
    x, y = (Tensor.symbol((task.batch_size, *shape), dtype) for shape, dtype in shapes)
    with entering(techniques=Techniques(fuse=False)):
        program, trained, _ = trace_step(chain, losses.get(task.spec.loss.op, **task.spec.loss.settings()), x, y)
    return chain, simplify(program), trained


def _batch(spec: ModelSpec, dtype: np.dtype[Any]) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of a row and of its target."""
    x = np.dtype(np.int64) if spec.input.dtype == "int64" else dtype
    if spec.target.kind == "classes":
        return [(spec.input.sample, x), ((), np.dtype(np.int64))]
    return [(spec.input.sample, x), (spec.target.shape, dtype)]


def skipped(program: Program) -> dict[int, float]:
    """Of each variable, by its id, at most the share of elements that products need not multiply, where it is not 0."""
    found: dict[int, float] = {}
    for one in program.equations:
        share = sum(found.get(id(x), 0.0) for x in one.inputs)
        share += 0.0 if one.op.skipped is None else one.op.skipped(*one.inputs, **one.attrs)
        # What products or sums are made of is not zero because some of their terms are.
        if share and not one.op.product:
            found.update((id(y), min(1.0, share)) for y in one.outputs)
    return found


def unread(program: Program) -> dict[int, float]:
    """Of each variable, by its id, at most the share of elements that need not be computed, where it is not 0."""
    read = {id(y): 1.0 for y in program.outputs}
    for one in reversed(program.equations):
        result = max(read.get(id(y), 0.0) for y in one.outputs)
        for number, x in enumerate(one.inputs):
            part = 1.0
            if one.op.view is not None and not one.op.several:
                part = min(1.0, result * one.output.size / max(x.size, 1))
            elif one.op.unread is not None and number == 0:
                part -= one.op.unread(*one.inputs, **one.attrs)
            read[id(x)] = min(1.0, read.get(id(x), 0.0) + part)
    return {name: 1 - part for name, part in read.items() if part < 1}


def needed(product: Equation, zeros: Mapping[int, float], needless: Mapping[int, float]) -> float:
    """Which share of a product's terms can't be left out: at least this, since what is left out may be the same."""
    return max(0.0, 1 - needless.get(id(product.output), 0.0) - sum(zeros.get(id(x), 0.0) for x in product.inputs))


# ---------------------------------------------------------------------------------------------------------------------
# What a machine can do


@dataclass(frozen=True)
class Rates:
    """The highest rates that were measured with a number of threads and in a dtype."""

    flops_per_second: float
    bytes_per_second: Mapping[int, float]
    """By the bytes of the arrays."""
    call_seconds: Mapping[str, float]
    """What the shortest call takes, by language."""

    def best(self, other: Rates) -> Rates:
        """Of each the better one."""
        sizes = {*self.bytes_per_second, *other.bytes_per_second}
        calls = {**self.call_seconds, **other.call_seconds}
        return Rates(
            max(self.flops_per_second, other.flops_per_second),
            {n: max(rates.bytes_per_second.get(n, 0.0) for rates in (self, other)) for n in sorted(sizes)},
            {name: min(rates.call_seconds.get(name, calls[name]) for rates in (self, other)) for name in calls},
        )

    def bandwidth(self, size: int) -> float:
        """Bytes a second of arrays of the largest measured size that `size` bytes fill, or of a larger one."""
        from_here = max((n for n in self.bytes_per_second if n <= size), default=min(self.bytes_per_second))
        return max(rate for n, rate in self.bytes_per_second.items() if n >= from_here)


@dataclass(frozen=True)
class Limit:
    """The least time of a step, and what it follows from."""

    work: Work
    rates: Rates

    @property
    def products_seconds(self) -> float:
        """Of its products alone."""
        return self.work.products / self.rates.flops_per_second

    @property
    def memory_seconds(self) -> float:
        """Of the bytes that it moves alone."""
        return (2 * self.work.state + self.work.batch) / self.rates.bandwidth(self.work.state)

    @property
    def seconds(self) -> float:
        """The limit."""
        return max(self.products_seconds, self.memory_seconds) + min(self.rates.call_seconds.values())

    @property
    def op_by_op_seconds(self) -> float:
        """The same rates for each op by itself, as if none were fused: no limit, but what fusion has to start from."""
        rates = self.rates
        return sum(
            max(flops / rates.flops_per_second, moved / rates.bandwidth(moved)) for flops, moved in self.work.ops
        )

    def record(self) -> dict[str, Any]:
        """The part `roofline` of a record."""
        return {
            "limit_microseconds": self.seconds * 1e6,
            "limited_by": "products" if self.products_seconds >= self.memory_seconds else "memory",
            "op_by_op_microseconds": self.op_by_op_seconds * 1e6,
            "products_flops": self.work.products,
            "moved_bytes": 2 * self.work.state + self.work.batch,
            "state_bytes": self.work.state,
            "flops_per_second": self.rates.flops_per_second,
            "bytes_per_second": self.rates.bandwidth(self.work.state),
            "call_nanoseconds": {name: seconds * 1e9 for name, seconds in self.rates.call_seconds.items()},
        }


FORM = {
    "limited_by": "text",
    "call_nanoseconds": {"*": "number"},
    "limit_microseconds": "positive",
    **dict.fromkeys(("op_by_op_microseconds", "products_flops", "moved_bytes"), "number"),
    **dict.fromkeys(("state_bytes", "flops_per_second", "bytes_per_second"), "number"),
}
"""What that part must hold."""


def share(engine: str, label: str, step: float, limit: float) -> float:
    """Which share of a step's time its limit is.

    Raises:
        BelowLimitError: of an engine of ours, more than fewer multiplications explain.
    """
    if step < FEWEST * limit and engine in OURS:
        raise BelowLimitError(
            f"{label}: a step of {round(step, 2)} µs is below a quarter of its limit of {round(limit, 2)} µs, which "
            "this machine's products and memory allow: one of the two is measured wrong; run the race again on an idle "
            "machine"
        )
    return limit / step


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def memory_sizes(work: Work) -> tuple[int, ...]:
    """The sizes of memory whose rates this work needs: the largest that its state fills, and the next."""
    level = sum(size <= work.state for size in SIZES[1:])
    return SIZES[level : level + 2]


def measure(work: Work, dtype: str, threads: int, sizes: Sequence[int] | None = None) -> Rates:
    """Measure this machine in numpy, and in Julia where there is one.

    Of memory the rates of these sizes are measured, or those that this work needs.
    """
    sizes = sizes or memory_sizes(work)
    given = {"dtype": dtype, "threads": threads, "sizes": sizes, "samples": SAMPLES, "seconds": SECONDS}
    code = _START + "from experiments.measures.roofline import main; main(start)"
    variables = environment(threads)
    found = _rates("numpy", [sys.executable, "-c", code, json.dumps(given | {"path": import_path()})], variables)
    try:
        julia = find()
    except JuliaUnavailableError:
        return found
    script = Path(__file__).with_name("roofline.jl")
    words = [dtype, str(SAMPLES), str(SECONDS), *map(str, sizes)]
    command = [julia.executable, "--startup-file=no", "-O3", str(script), *words]
    return found.best(_rates("julia", command, variables | {"JULIA_NUM_THREADS": str(threads)}))


def _rates(name: str, command: Sequence[str], variables: Mapping[str, str]) -> Rates:
    """What a program measured: lines of a name and numbers."""
    try:
        done = subprocess.run(
            command, env=dict(variables), capture_output=True, encoding="utf-8", timeout=_TIMEOUT, check=False
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        rates = {int(size): float(rate) for word, size, rate in (line for line in lines if len(line) == 3)}
        single = {line[0]: float(line[1]) for line in lines if len(line) == 2}
        if not all(rate > 0 for rate in (single["flops"], single["call"], *rates.values())):
            raise ValueError("a rate is not above 0")
        return Rates(single["flops"], rates, {name: single["call"]})
    except (subprocess.TimeoutExpired, KeyError, ValueError) as error:
        said = done.stderr.strip()[-500:] if isinstance(error, KeyError | ValueError) else str(error)
        raise TwinGradError(f"this machine's rates can't be measured in {name}: {said}") from None


def main(start: Mapping[str, Any]) -> None:
    """Measure in numpy, in its own process, and print what was found."""
    dtype, threads, samples, seconds = (start[name] for name in ("dtype", "threads", "samples", "seconds"))
    print("flops", max(_product(n, dtype, samples, seconds) for n in PRODUCTS))
    for size in start["sizes"]:
        each = max(64, size // threads // 16 * 16)  # two halves of whole words
        print("bytes", size, _bandwidth(each, threads, samples, seconds))
    a = np.zeros(1, dtype)
    print("call", _best(lambda: np.add(a, a, a), samples, seconds))


def _product(n: int, dtype: str, samples: int, seconds: float) -> float:
    a, b, out = (np.full((n, n), 0.5, dtype) for _ in range(3))
    return 2 * n**3 / _best(lambda: np.matmul(a, b, out), samples, seconds)


def _bandwidth(size: int, threads: int, samples: int, seconds: float) -> float:
    """Bytes a second that threads read and write at the same time, each in an array of `size` bytes: copied, or read.

    A sample begins in all threads at once, and the slowest one tells how long it took.
    """
    # In one call several times over nearly the same memory: a cache line further each time, a quarter of it in all.
    rows = max(1, min(2**20 // size, size // (4 * _LINE)))
    half = size // 16 * 8

    def windows(memory: np.ndarray, length: int) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(memory, (rows, length // 8), (_LINE, 8))

    def memory() -> np.ndarray:
        """Written to: of memory that is zero from the start, all pages are one."""
        return np.ones((size + 2 * _LINE * rows) // 8, np.int64)

    def copying() -> Callable[[], object]:
        mine = memory()
        return partial(np.copyto, windows(mine[half // 8 + _LINE * rows // 8 :], half), windows(mine, half))

    def reading() -> Callable[[], object]:
        return windows(memory(), size).max

    moved = {copying: 2 * half * rows, reading: size // 8 * 8 * rows}
    return max(threads * count / _together(made, threads, samples, seconds) for made, count in moved.items())


def _together(made: Callable[[], Callable[[], object]], threads: int, samples: int, seconds: float) -> float:
    """The least seconds of a call that each thread makes for itself, when all make theirs at the same time."""
    count = max(1, int(seconds / _best(made(), 1, seconds)))
    barrier, took = threading.Barrier(threads), [[0.0] * samples for _ in range(threads)]

    def run(k: int) -> None:
        call = made()
        for sample in range(samples):
            barrier.wait()
            start = time.perf_counter()
            for _ in range(count):
                call()
            took[k][sample] = time.perf_counter() - start

    team = [threading.Thread(target=run, args=(k,)) for k in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return min(map(max, zip(*took, strict=True))) / count


def _best(call: Callable[[], object], samples: int, seconds: float) -> float:
    """The least seconds of a call, as the mean over as many as take about `seconds`."""
    call()
    count, best = 1, float("inf")
    for _ in range(100 * samples):
        start = time.perf_counter()
        for _ in range(count):
            call()
        taken = time.perf_counter() - start
        best = min(best, taken / count)
        if taken >= seconds / 2:
            samples -= 1
            if samples <= 0:
                break
        else:
            count = max(count + 1, int(seconds / max(best, 1e-9)))
    return best
