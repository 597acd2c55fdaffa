"""What several machines would bring to the training of each study's network: measured here, and calculated from there.

    mpiexec -n 2 python -m experiments.parallel_speed --save points.json         # steps of one process, and of two
    python -m experiments.parallel_speed --points points.json --figure speed.svg
    mpiexec -n 2 python -m experiments.parallel_speed --overlap        # what an all-reduce during a step would bring

A step of p machines takes as long as that of one on its own mini-batch, and one all-reduce of the gradient. A ring of
machines sends each byte about twice: 2 (p - 1) messages of latency, and 2 (p - 1) / p times the bytes over the
bandwidth. Where every machine keeps the study's mini-batch, p machines do p times the work in that time.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge import registry, spec, weights
from bridge.files import write_atomically
from bridge.session import Optimizer
from experiments.formats import fixed
from experiments.papers import model_path

NETWORKS = {"mnist-rnn": 100, "mnist-cnn": 100, "imdb-cnn": 64}
"""The studies' networks, and the rows of a mini-batch of one process."""
LATENCY, BANDWIDTH = 20e-6, 1.25e9
"""Seconds of a message, and bytes in a second: of ten-gigabit Ethernet."""
MOST = 1024
STEPS, ROUNDS = 20, 9

Point = dict[str, Any]


def step_seconds(
    step: float, size: int, machines: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH
) -> float:
    """The calculated time of a step of machines that have a mini-batch each, and `size` bytes to add up."""
    return step + 2 * (machines - 1) * latency + 2 * (machines - 1) / machines * size / bandwidth


def speed_up(step: float, size: int, machines: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> float:
    """How much more work they do in the same time than one."""
    return machines * step / step_seconds(step, size, machines, latency, bandwidth)


def measured(engine: str, network: str, communicator: Any) -> Point:
    """Seconds of a step of this process alone, while the others take theirs, of one together, and of the all-reduce."""
    model, size = spec.load(model_path(network)), communicator.Get_size()
    random = np.random.default_rng(communicator.Get_rank())
    rows = NETWORKS[network] * STEPS
    x = _rows(model, rows, random)
    y = random.integers(0, 2, (rows, *model.target.shape)).astype("int64" if model.target.kind == "classes" else "f4")
    initial, rule = weights.initialise(model, 0), Optimizer("sgd", 1e-6)
    batch, order = NETWORKS[network], np.arange(rows)
    build = registry.get(engine).build
    alone = build(model, initial, rule, batch, "float32", 1)
    # Every process has other rows, so that each trains on its part of a mini-batch that is as many times larger.
    wide = np.resize(order, rows * size)
    together = build(model, initial, rule, batch * size, "float32", 1, communicator=communicator)
    gradient = np.zeros(sum(int(np.prod(p.shape)) for p in model.parameters().values() if p.trainable), np.float32)
    received = np.empty_like(gradient)
    calls: dict[str, Callable[[], Any]] = {
        "alone": lambda: alone.train_epoch(x, y, order),
        "together": lambda: together.train_epoch(x, y, wide),
        "all_reduce": lambda: [communicator.Allreduce(gradient, received) for _ in range(STEPS)],
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            communicator.Barrier()
            begin = time.perf_counter()
            call()
            communicator.Barrier()
            if turn:  # in the first one everything is planned
                found[name].append((time.perf_counter() - begin) / STEPS)
    seconds = {name: statistics.median(times) for name, times in found.items()}
    return {"engine": engine, "network": network, "machines": size, "bytes": gradient.nbytes, **seconds}


def overlap(network: str, communicator: Any, pieces: int = 4) -> Point:
    """Seconds of a step with its all-reduce after it, and with the pieces of it during it, the best of several.

    The step is products of matrices that take as long as the numpy engine's on the study's mini-batch. After each of
    its parts the all-reduce of a piece of the gradient begins, and all have ended when the step has: nothing could
    overlap better.
    """
    model = spec.load(model_path(network))
    wanted = _step_seconds(model, NETWORKS[network])
    size = sum(int(np.prod(p.shape)) for p in model.parameters().values() if p.trainable)
    gradient, received = np.zeros(size, np.float32), np.empty(size, np.float32)
    a = np.ones((64, 64), np.float32)
    begin = time.perf_counter()
    for _ in range(1000):
        a @ a
    count = max(pieces, round(1000 * wanted / (time.perf_counter() - begin)))
    count = int(communicator.bcast(count))
    parts = np.array_split(np.arange(size), pieces)

    def work(times: int) -> None:
        for _ in range(times):
            a @ a

    def after() -> None:
        work(pieces * (count // pieces))
        communicator.Allreduce(gradient, received)

    def during() -> None:
        begun = []
        for part in parts:
            work(count // pieces)
            piece = slice(part[0], part[-1] + 1)
            begun.append(communicator.Iallreduce(gradient[piece], received[piece]))
        for one in begun:
            one.Wait()

    calls = {"after": after, "during": during, "step": lambda: work(pieces * (count // pieces))}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(10 * ROUNDS + 1):
        for name, call in calls.items():
            communicator.Barrier()
            begin = time.perf_counter()
            call()
            if turn:
                found[name].append(communicator.allreduce(time.perf_counter() - begin) / communicator.Get_size())
    return {"network": network, "bytes": gradient.nbytes, **{name: min(times) for name, times in found.items()}}


def _step_seconds(model: spec.ModelSpec, batch: int) -> float:
    """Seconds of a step of the numpy engine."""
    random = np.random.default_rng(0)
    x = _rows(model, 5 * batch, random)
    y = random.integers(0, 2, (5 * batch, *model.target.shape))
    y = y.astype("int64" if model.target.kind == "classes" else "f4")
    initial, rule = weights.initialise(model, 0), Optimizer("sgd", 1e-6)
    session = registry.get("numpy").build(model, initial, rule, batch, "float32", 1)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        session.train_epoch(x, y, np.arange(len(x)))
        times.append((time.perf_counter() - begin) / 5)
    return min(times)


def _rows(model: spec.ModelSpec, count: int, random: np.random.Generator) -> Any:
    shape = (count, *model.input.sample)
    if model.vocabulary is not None:
        return random.integers(0, model.vocabulary, shape)
    return random.standard_normal(shape).astype(np.float32)


def table(points: Sequence[Point]) -> list[str]:
    """The measured steps, what they bring, and what is calculated for as many and for more machines."""
    lines = [
        "| network | engine | step, µs | all-reduce, µs | together, µs | brings | calculated for 16 | for 1,024 |",
        "|:---|:---|---:|---:|---:|---:|---:|---:|",
    ]
    for point in points:
        brings = point["machines"] * point["alone"] / point["together"]
        cells = [fixed(1e6 * point[name], 0) for name in ("alone", "all_reduce", "together")]
        cells += [f"{fixed(brings, 2)} of {point['machines']}"]
        cells += [fixed(speed_up(point["alone"], point["bytes"], machines), 1) for machines in (16, MOST)]
        lines.append(f"| {point['network']} | {point['engine']} | {' | '.join(cells)} |")
    return lines


def draw(points: Sequence[Point], path: Path, latency: float, bandwidth: float) -> None:
    """The calculated speed-up of each network over the number of machines, with the measured points on it."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    machines = 2 ** np.arange(1, int(np.log2(MOST)) + 1)
    axes.plot(machines, machines, color="0.7", linestyle=":", label="as many times as machines")
    for point in points:
        line = [speed_up(point["alone"], point["bytes"], int(p), latency, bandwidth) for p in machines]
        (drawn,) = axes.plot(machines, line, label=f"{point['network']}, {point['engine']}")
        brings = point["machines"] * point["alone"] / point["together"]
        axes.plot([point["machines"]], [brings], "o", color=drawn.get_color())
    axes.set(xscale="log", yscale="log", xlabel="machines", ylabel="work in the same time")
    axes.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"])
    axes.legend(frameon=False, fontsize="small", title="dots: measured on this machine", title_fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure under mpiexec, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    able = [name for name in registry.names() if registry.get(name).communicates]
    parser.add_argument("--engine", action="append", choices=able, help="may be given again (numpy)")
    parser.add_argument("--save", type=Path, help="measure, and write the points to this file")
    parser.add_argument("--points", type=Path, help="show these points")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--latency", type=float, default=LATENCY, help="seconds of a message")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes in a second")
    parser.add_argument("--overlap", action="store_true", help="measure all-reduces after steps, and during them")
    asked = parser.parse_args(arguments)
    if asked.overlap:
        from mpi4py import MPI

        found = [overlap(network, MPI.COMM_WORLD) for network in NETWORKS]
        if MPI.COMM_WORLD.Get_rank() == 0:
            print("| network | gradient, KB | step, µs | all-reduce after it, µs | during it, µs |")
            print("|:---|---:|---:|---:|---:|")
            for row in found:
                cells = [fixed(row["bytes"] / 1e3, 0)] + [fixed(1e6 * row[n], 0) for n in ("step", "after", "during")]
                print(f"| {row['network']} | {' | '.join(cells)} |")
        return
    if (asked.save is None) == (asked.points is None):
        parser.error("give --save to measure, or --points to show what was measured")
    if asked.points is not None:
        points = json.loads(asked.points.read_text(encoding="utf-8"))
        print("\n".join(table(points)))
        if asked.figure is not None:
            draw(points, asked.figure, asked.latency, asked.bandwidth)
        return
    from mpi4py import MPI

    engines = asked.engine or ["numpy"]
    points = [measured(engine, network, MPI.COMM_WORLD) for engine in engines for network in NETWORKS]
    if MPI.COMM_WORLD.Get_rank() == 0:
        write_atomically(asked.save, json.dumps(points, indent=1) + "\n")
        print("\n".join(table(points)))


if __name__ == "__main__":
    main()
