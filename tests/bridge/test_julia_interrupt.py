"""Ctrl-C in a long epoch of the Julia engine: it stops, and Python, the session and the engine stay usable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge import julia as bridge_julia
from bridge.libjulia.find import Julia
from bridge.spec import ModelSpec

ROOT = Path(bridge_julia.__file__).parents[2]
PATIENCE = 60.0

# An epoch of ten million steps, which takes minutes: what is trained over and over is a handful of samples.
DATA = """
import sys
import numpy as np
from bridge import registry, spec, weights
from bridge.session import Optimizer
model = spec.loads({spec!r})
rng = np.random.default_rng(0)
x = rng.standard_normal((64, 15), dtype=np.float32)
y = rng.integers(0, 4, 64)
short, long = np.arange(64), np.tile(np.arange(64), 10_000_000 // 64)
rule = Optimizer("sgd", 1e-4)
def finite(arrays):
    return all(np.isfinite(array).all() for array in arrays.values())
"""

SESSION = """
from bridge import julia
session = julia.build(model, optimizer=rule, batch_size=1, threads={threads})
session.train_epoch(x, y, short)
before = session.params()
print("training", flush=True)
try:
    session.train_epoch(x, y, long)
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    sys.exit("the epoch ran to its end")
after = session.params()
assert finite(after) and any((after[name] != before[name]).any() for name in after)
first = session.evaluate(x, y).loss
losses = session.train_epoch(x, y, np.tile(short, 20))
assert len(losses) == 20 * 64 and np.isfinite(losses).all() and finite(session.params())
assert session.evaluate(x, y).loss < first
other = julia.build(model, session.params(), optimizer=rule, batch_size=8, threads={threads})
np.testing.assert_array_equal(other.predict(x), session.predict(x))
assert np.isfinite(other.train_epoch(x, y, short)).all()
session.close()
other.close()
print("done")
"""

WORKER = """
from bridge.worker import Worker
with Worker("julia", {threads}) as worker:
    worker.build(model, weights.initialise(model, 0), rule, 1)
    worker.train_epoch(x, y, short)
    print(worker.pid, worker._folder, flush=True)
    try:
        worker.train_epoch(x, y, long)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
with Worker("julia", {threads}) as worker:  # the next one is as good as new
    worker.build(model, weights.initialise(model, 0), rule, 1)
    assert np.isfinite(worker.train_epoch(x, y, short)).all()
print("done")
"""

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def start(
    request: pytest.FixtureRequest, julia: Julia, small_paper_model: ModelSpec, tmp_path: Path
) -> Iterator[Start]:
    """Starts a program with data and a model, in a separate process group, as a shell does."""
    if request.param > len(os.sched_getaffinity(0)):
        pytest.skip("does not apply: this process may use one core only")
    started = []

    def start(code: str) -> subprocess.Popen[str]:
        settings = {"spec": small_paper_model.dump(), "threads": request.param}
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", (DATA + code).format(**settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "TWINGRAD_JULIA": julia.executable, "PYTHONPATH": str(ROOT)},
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for a line of output and a moment more, press ctrl-C, see that it is heard; that line, and the rest."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    time.sleep(0.5)  # until it is in the midst of it
    assert process.poll() is None
    pressed = time.perf_counter()
    os.killpg(process.pid, signal.SIGINT)
    heard = process.stdout.readline()
    print(f"heard after {time.perf_counter() - pressed:.3f} s")
    out, said = process.communicate(timeout=PATIENCE)
    assert heard == "interrupted\n", said
    return line, out + said


def test_ctrl_c_stops_an_epoch_and_leaves_the_session_usable(start: Start) -> None:
    process = start(SESSION)
    _, rest = interrupt(process)
    assert rest == "done\n"
    assert process.returncode == 0


def test_ctrl_c_ends_a_worker_that_trains(start: Start) -> None:
    process = start(WORKER)
    line, rest = interrupt(process)
    pid, folder = line.split()
    assert rest == "done\n"
    assert process.returncode == 0
    assert not Path("/proc", pid).exists()
    assert not Path(folder).exists()
