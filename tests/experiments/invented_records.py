"""Invented raw records for the tests of comparing and merging: no number in them was measured."""

from __future__ import annotations

import json
import random
from typing import Any

from experiments.results import Record, unfinished

LABELS = {"numpy": "TwinGrad numpy", "julia": "TwinGrad Julia", "torch": "PyTorch"}
MACHINES = {"a": "Invented CPU a0000000", "b": "Invented CPU b0000000"}
ROUNDS = 9


def record(
    engine: str = "numpy",
    seed: int = 0,
    measure: str = "time",
    machine: str = "a",
    status: str = "ok",
    paper: str = "mnist-rnn-e",
    accuracy: float = 0.9,
    commit: str = "c0ffee" * 6,
    created: str = "2001-02-03T04:05:06",
    sources: str = "s1",
    **more: Any,
) -> Record:
    """The record of a run; accuracies and losses depend on the seed alone, times on the machine."""
    together = measure == "race"
    names = list(LABELS) if together else [engine]
    asked = {
        **{"study": paper, "engines": names, "measure": measure, "seed": seed, "threads": 2, "profile": "full"},
        **{"data": {"name": "mnist", "digest": "d"}, "network": "n", "training": {"epochs": 2}, "settings": {}},
    } | more.pop("asked", {})
    label = MACHINES[machine]
    config = {
        **{"paper": paper, "engine": ",".join(names), "label": "Race" if together else LABELS[engine], "seed": seed},
        **{"measure": measure, "threads": 2, "dtype": "float32", "profile": asked["profile"]},
    }
    versions = {name: "1.0" for name in names}
    origin = {
        **{"commit": commit, "dirty": False, "cpu_model": "Invented CPU", "cores": 2, "memory_bytes": 8e9},
        **{"machine": {"label": label, "digest": label[-8:] * 2}, "platform": "Invented", "python": "3.11.0"},
        **{"versions": versions, "engine_digest": sources, "created": created},
    }
    decided = {"sources": sources, "machine": label[-8:] * 2, "versions": versions}
    data = {"name": "mnist", "source": "real", "digest": "d", "train_rows": 60_000, "test_rows": 10_000}
    made = unfinished(asked, decided, config=config, data=data, provenance=origin)
    made["blas"] = dict.fromkeys(names, "Invented BLAS")
    made["seconds"] = 1.0
    draw = random.Random(f"{seed} {machine}")
    if together:
        made["entrants"] = {
            name: {"label": LABELS[name], "engine_digest": sources, "versions": {}, "error": None} for name in names
        }
        speed = {"numpy": 300.0, "julia": 120.0, "torch": 800.0} | more.pop("speed", {})
        made["race"] = [
            {"round": turn, "engine": name, "label": name, "microseconds_per_step": speed[name] * draw.uniform(1, 1.1)}
            for turn in range(1, ROUNDS + 1)
            for name in names
        ]  # fmt: skip
    else:
        same = random.Random(seed)
        last = accuracy + same.gauss(0, 0.002)
        made["startup"] = {"import_seconds": 0.1, "build_seconds": 0.1}
        made["epochs"] = [
            {"epoch": epoch, "seconds": draw.random(), "train_accuracy": last, "test_accuracy": last, "test_loss": 0.3}
            for epoch in (1, 2)
        ]
        made["step_losses"] = [2.3 / (1 + step / 50) for step in range(100)] if measure == "time" else []
    if status != "ok":
        made |= {"status": "failed", "error": f"{engine}: it failed", "error_kind": status}
        for part in ("epochs", "step_losses", "race"):
            made.pop(part, None)
    return json.loads(json.dumps(made | more))


def sweep(machine: str = "a", seeds: int = 5, **changes: Any) -> list[Record]:
    """The records of a sweep on one machine."""
    found = [record(engine, seed, machine=machine, **changes) for seed in range(seeds) for engine in LABELS]
    changes.pop("accuracy", None)
    return [*found, record(measure="race", machine=machine, **changes)]
