"""What this machine has and lacks for the experiments, and what to do about it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

import bridge.julia
from bridge import registry, weights
from bridge.errors import TwinGradError
from bridge.libjulia import sysimage
from bridge.libjulia.environment import kernels_for
from bridge.libjulia.numpy_blas import newer_than
from bridge.session import Optimizer
from bridge.worker import Worker, environment
from experiments import archive, papers, provenance, sources
from experiments.data import generated
from experiments.extras import EXTRAS
from experiments.formats import size
from experiments.progress import Steps
from experiments.records import UnreadableError
from experiments.results import COMMITTED, Results
from py_engine.errors import EngineError

State = Literal["ok", "note", "problem"]

ENGINES = ("numpy", "julia")
"""Those that say what their threads do."""

OLDEST_PYTHON = (3, 11)
DISK_NEEDED = 1_000_000_000
"""Bytes that a sweep may need at one time: the data set as arrays for the workers, captures, results."""
TEMPORARY_NEEDED = 100_000_000
"""Bytes of weights, orders and results that workers may have in temporary files at one time."""

TRIED_SECONDS = 3.0
"""Seconds of training, at most, in which an engine finds out how many threads are the fastest."""
UNDECIDED = ", not yet compared"
"""Behind what an engine's threads do where these seconds did not do."""

EXPECTED = {
    "mnist": "train-images-idx3-ubyte.gz and its three siblings",
    "imdb": "aclImdb_v1.tar.gz (or train.csv and test.csv) and glove.6B.50d.txt",
}
"""The files of each data set; README.md has all forms that are read."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, and what to do when it is not as it should be.

    "note" is something that works but could be better or is left out; "problem" is something essential.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def examine(console: Console, results_dir: Path, data_dir: Path | None = None) -> list[Finding]:
    """Look at everything, and say on the console how far that is; nothing is changed and nothing is downloaded."""
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "Python": python,
        "numpy": numpy_and_blas,
        "machine": machine,
        "threads of the engines": threads,
        "Julia": julia,
        "engines": engines,
        "data sets": lambda: data(data_dir),
        "disk": lambda: disk(results_dir),
        "tools": tools,
    }
    findings: list[Finding] = []
    with Steps(console, "looking", len(parts)) as progress:
        for done, (name, part) in enumerate(parts.items()):
            progress.show(done, name)
            findings += part()
    return findings


def python() -> Iterator[Finding]:
    """The interpreter and the project's own packages."""
    found = f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("Python", "problem", found, "use Python 3.11 or later")
    else:
        yield Finding("Python", "ok", found)
    head, dirty = provenance.commit()
    versions = provenance.versions(["twingrad", *(name for extra in EXTRAS.values() for name in extra.packages)])
    changed = {True: ", with changes that are not committed", False: "", None: ""}[dirty]
    yield Finding("TwinGrad", "ok", f"{versions.get('twingrad') or 'not installed, run from'} {_source(head, changed)}")
    for name, extra in EXTRAS.items():
        missing = [package for package in extra.packages if package not in versions]
        if missing:
            found = f"not installed ({', '.join(missing)})"
            yield Finding(f"extra {name}", "note", found, f"for {extra.purpose}: pip install 'twingrad[{name}]'")


def numpy_and_blas() -> Iterator[Finding]:
    """numpy, and the BLAS kernels that runs get and that programs started from this shell get."""
    yield Finding("numpy", "ok", np.__version__)
    in_runs, here = blas(environment(1)), blas(dict(os.environ))
    if in_runs is None or here is None:
        yield Finding("BLAS", "note", "not recognised", "times may be far from those of OpenBLAS or MKL")
        return
    advice = ""
    better = kernels_for(in_runs["architecture"]) if in_runs["internal_api"] == "openblas" else None
    if better is not None:
        advice = (
            f"this CPU has faster kernels, {better}: TWINGRAD_OPENBLAS_CORETYPE={better} makes runs faster, "
            f"OPENBLAS_CORETYPE={better} your own programs"
        )
    elif here["architecture"] != in_runs["architecture"]:
        advice = (
            f"your own programs get the kernels for {here['architecture']} from OPENBLAS_CORETYPE="
            f"{os.environ.get('OPENBLAS_CORETYPE', '')} in the environment, which runs ignore: unset it"
        )
    text = f"{in_runs['internal_api']} {in_runs['version']}, kernels for {in_runs['architecture']}"
    yield Finding("BLAS", "note" if advice else "ok", text, advice)


def blas(environment: dict[str, str]) -> dict[str, str] | None:
    """What numpy's BLAS says of itself in a process with this environment; None when it is not recognised."""
    code = (
        "import json, numpy, threadpoolctl; numpy.ones((2, 2)) @ numpy.ones((2, 2)); "
        "print(json.dumps([i for i in threadpoolctl.threadpool_info() if i['user_api'] == 'blas']))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return (
        {name: str(found[0].get(name) or "") for name in ("internal_api", "version", "architecture")} if found else None
    )


def machine() -> Iterator[Finding]:
    """CPU, cores and memory."""
    cores, memory = provenance.cores(), provenance.memory_bytes()
    yield Finding("CPU", "ok", f"{provenance.cpu_model()}, {cores} cores for this process")
    if cores < 2:
        yield Finding("threads", "note", "1 core", "runs with two threads will be slower than the paper file assumes")
    if memory is not None:
        little = memory < 4e9
        advice = "4 GB are advisable: races keep every engine in memory" if little else ""
        yield Finding("memory", "note" if little else "ok", size(memory), advice)


def threads() -> Iterator[Finding]:
    """What the threads of our engines do in a training step of each study's network: shapes and some steps decide.

    The records of a study with many networks say it themselves.
    """
    if provenance.cores() < 2:
        return
    studies = [paper for paper in map(papers.load_paper, papers.paper_keys()) if not paper.families]
    for engine in (name for name in ENGINES if registry.availability(name).ok):
        if engine == "julia" and not _starts_soon():
            advice = f"a system image of Julia makes each start shorter: {sysimage.COMMAND}, in a checkout"
            yield Finding("threads of julia", "note", "not asked, since it would have to be compiled first", advice)
            continue
        found: dict[str, list[str]] = {}
        try:
            for count, same in itertools.groupby(studies, lambda paper: paper.training.threads.value):
                with Worker(engine, count) as worker:
                    for paper in same:
                        found.setdefault(_threads_in_step(worker, paper), []).append(paper.key)
        except (TwinGradError, EngineError) as error:
            yield Finding(f"threads of {engine}", "note", "can't be asked", str(error))
            continue
        text = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in found.items())
        yield Finding(f"threads of {engine}", "ok", text)


def _starts_soon() -> bool:
    """Whether the machine code of the Julia engine is kept."""
    found = bridge.julia.status().julia
    return found is not None and (found.release >= sysimage.KEEPS_MACHINE_CODE or sysimage.usable(found)[0] is not None)


def _threads_in_step(worker: Worker, paper: papers.Paper) -> str:
    """What the worker's engine says of its threads, in the step of a mini-batch of this study."""
    spec, training = paper.spec(), paper.training
    samples = training.batch_size.value
    rows = generated.drawn_for(spec, samples)
    rule = Optimizer(training.optimizer.value, training.learning_rate.value)
    worker.build(spec, weights.initialise(spec, 0), rule, samples)
    steps, end = 10, time.monotonic() + TRIED_SECONDS
    while True:
        worker.train_epoch(rows.x_train, rows.y_train, np.tile(np.arange(samples), steps))
        if worker.threads_decided() or time.monotonic() > end:
            break
        steps = min(2 * steps, 1000)
    return worker.threads_in_step() + ("" if worker.threads_decided() else UNDECIDED)


def julia() -> Iterator[Finding]:
    """Which Julia there is, and which backends have been seen to work here."""
    status = bridge.julia.status()
    found = status.julia
    if found is None:
        yield Finding("Julia", "note", "none that works here", status.problem)
        return
    kernels = kernels_for(found.kernels) or found.kernels
    yield Finding("Julia", "ok", f"{found.version} ({found.source}), {found.executable}")
    blas = f"{found.blas}, kernels for {kernels}" if kernels else found.blas
    by_numpy = "; called from Python, the engine multiplies by numpy's" if newer_than(found.blas) else ""
    yield Finding("Julia's BLAS", "ok", blas + by_numpy)
    for backend, verdict in status.backends.items():
        said = "not tried yet" if verdict is None else "works" if verdict.ok else f"does not work: {verdict.reason}"
        yield Finding(f"Julia by {backend}", "note" if verdict is not None and not verdict.ok else "ok", said)


def engines() -> Iterator[Finding]:
    """Every engine in the registry; none is imported here."""
    some = False
    for name in registry.names():
        availability = registry.availability(name)
        versions = ", ".join(f"{package} {version}" for package, version in availability.versions.items())
        if availability.ok:
            some = True
            yield Finding(f"engine {name}", "ok", versions or "available")
        else:
            yield Finding(f"engine {name}", "note", "left out of runs", availability.reason)
    if not some:
        yield Finding("engines", "problem", "none is available", "install one: pip install 'twingrad[torch]'")


def data(data_dir: Path | None) -> Iterator[Finding]:
    """The datasets of the papers."""
    from experiments import data
    from experiments.data import fetch

    for name in sorted({papers.load_paper(key).dataset for key in papers.paper_keys()}):
        try:
            dataset = data.load(name, data_dir, allow_download=False)
        except data.NoSampleError:
            advice = f"put {EXPECTED[name]} in a folder and name that with --data-dir or TWINGRAD_DATA"
            yield Finding(f"data {name}", "note", "not on this machine", advice)
            continue
        except TwinGradError as error:
            yield Finding(f"data {name}", "problem", "cannot be used", str(error))
            continue
        if dataset.source == "real":
            yield Finding(f"data {name}", "ok", f"{len(dataset.y_train):,} training rows in {dataset.origin}")
        elif dataset.source == "generated":
            yield Finding(f"data {name}", "ok", "drawn where a run needs it")
        else:
            refused = fetch.refusal(True)
            brought = "a run downloads it; without a network" if refused is None else f"{refused}: change that, or"
            advice = (
                f"{brought} put {EXPECTED[name]} in a folder and name that with --data-dir or TWINGRAD_DATA, or the "
                "embedded sample is used in its place"
            )
            whole = dataset.origin.startswith(data.SAMPLE_LABEL)
            if not whole and dataset.notice:  # which part
                advice = f"{dataset.notice} {advice}"
            found = "not on this machine yet" if whole else "a part of it is not on this machine yet"
            yield Finding(f"data {name}", "note", found, advice)


def disk(results_dir: Path) -> Iterator[Finding]:
    """Room and write access where results go."""
    folder = results_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield Finding("results", "problem", f"{folder} is a file", "choose a folder with --results DIR")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        advice = f"get write access to {folder}, or choose another folder with --results DIR"
        yield Finding("results", "problem", f"no write access to {folder}", advice)
    else:
        if (results_dir / COMMITTED).exists():
            advice = "runs do not write there; choose another folder with --results DIR"
            yield Finding("results", "note", f"{results_dir} is committed", advice)
        else:
            yield Finding("results", "ok", f"{results_dir} can be written")
        for path, reason in Results(results_dir).damaged():
            if isinstance(reason, UnreadableError):
                yield Finding("results", "note", f"{path} {reason}", "let this user read it")
            else:
                yield Finding("results", "note", f"{path} is damaged: {reason}", "the next run sets it aside")
        try:
            if (packed := Results(results_dir).archive).is_file():
                archive.read(packed)
        except (TwinGradError, OSError) as error:
            yield Finding("results", "problem", "their archive cannot be read", str(error))
    free = shutil.disk_usage(folder).free
    if free < DISK_NEEDED:
        yield Finding("disk", "problem", f"{size(free)} free", f"a sweep may need {size(DISK_NEEDED)} at one time")
    else:
        yield Finding("disk", "ok", f"{size(free)} free")
    temporary = Path(tempfile.gettempdir())
    free = shutil.disk_usage(temporary).free
    if free < TEMPORARY_NEEDED:
        advice = f"workers may need {size(TEMPORARY_NEEDED)} there: free some, or name another folder in TMPDIR"
        yield Finding("temporary files", "problem", f"{size(free)} free in {temporary}", advice)


def tools() -> Iterator[Finding]:
    """What single outputs need."""
    versions = provenance.versions(["typst", "memray"])
    if "typst" in versions:  # of the extra "reports", which is named where it is missing
        yield Finding("typst", "ok", versions["typst"])
    if "memray" in versions:
        yield Finding("memray", "ok", versions["memray"])
    else:
        advice = "no allocated bytes without it: pip install 'twingrad[memory]'"
        yield Finding("memray", "note", "not installed", advice)


def _source(head: str, changed: str) -> str:
    return f"commit {head[:12]}{changed}" if head != "unknown" else f"{sources.ROOT} (no commit known)"
