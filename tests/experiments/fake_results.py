"""An invented results folder for the tests of the report: no number in it was measured.

The columns are those of `experiments.results.COLUMNS`; the machine is called "Invented CPU" so that nothing made from
it can be taken for a result. Values come from a fixed generator.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.microbenchmarks.functions import CHUNKED, SMALL
from experiments.microbenchmarks.measure import FORWARD_MODE
from experiments.microbenchmarks.registry import SYSTEMS
from experiments.papers import Paper, load_paper, paper_keys
from experiments.results import COLUMNS

CPU = "Invented CPU 9000"
CREATED = "2001-02-03T04:05:06.789012+00:00"
LABELS = {
    "numpy": "TwinGrad numpy",
    "julia": "TwinGrad Julia",
    "torch": "PyTorch",
    "torch-compile": "PyTorch compiled",
    "tensorflow": "TensorFlow",
    "tensorflow-xla": "TensorFlow XLA",
    "jax": "JAX",
    "flux": "Flux",
}
ABLATED = ("numpy", "julia")
VARIED = ("numpy", "julia", "torch")
_STEP_US = {
    "numpy": 300.0,
    "julia": 120.0,
    "torch": 800.0,
    "torch-compile": 700.0,
    "tensorflow": 650.0,
    "tensorflow-xla": 600.0,
    "jax": 500.0,
    "flux": 900.0,
}
_BYTES = {
    **{"numpy": 3e6, "julia": 3e3, "torch": 1.0e9, "torch-compile": 0.9e9},
    **{"tensorflow": 0.8e9, "tensorflow-xla": 0.7e9, "jax": 0.6e9, "flux": 1.2e10},
}

_LIMIT = {
    **{"limited_by": "products", "op_by_op_microseconds": 150.0, "products_flops": 4e6, "moved_bytes": 1e6},
    **{"flops_per_second": 1e11, "bytes_per_second": 5e10},
}

Rows = dict[str, list[dict[str, Any]]]


@cache
def about(paper: str) -> Paper:
    """A paper that comes with the project, read once."""
    return load_paper(paper)


def rows(
    paper: str = "mnist-rnn-e",
    seeds: int = 3,
    engines: tuple[str, ...] = tuple(LABELS),
    data_source: str = "real",
    cpu_model: str = CPU,
    profile: str = "full",
) -> Rows:
    """Rows for every tidy file, as a finished sweep of one paper would leave them."""
    found: Rows = {name: [] for name in COLUMNS}
    generator = np.random.default_rng(7)
    described = about(paper)
    epochs = described.training.epochs.value
    for engine in engines:
        base = {
            "paper": paper,
            "engine": engine,
            "label": LABELS[engine],
            "threads": 2,
            "dtype": "float32",
            "profile": profile,
            "data_source": data_source,
            "dataset_digest": "d" * 64,
            "cpu_model": cpu_model,
            "commit": "c0ffee" * 6,
            "dirty": False,
            "created": CREATED,
        }
        for seed in range(seeds):
            _add_run(found, base, "time", seed, epochs, generator)
            if engine in described.own:
                _add_run(found, base, "own", seed, epochs, generator)
            for variant in described.variants if engine in VARIED else ():
                _add_variant(found, base, seed, variant.id, epochs)
        if epochs > 1:
            _add_run(found, base, "memory", 0, epochs, generator)
        if engine in ABLATED:
            _add_ablation(found, base)
        for threads in (2, 1):
            for number in range(5):
                found["race"].append(
                    base
                    | {
                        "key": f"race-{threads}",
                        "threads": threads,
                        "round": number,
                        "microseconds_per_step": _STEP_US[engine] * (3 - threads) ** 0.4 * generator.normal(1, 0.02),
                        **_LIMIT,
                        "limit_microseconds": 80.0 / threads,
                    }
                )
        for quantity, values in (
            ("batch_size", (1, 10, 100, 1000, 10_000)),
            ("sequence_length", (4, 28, 112, 392, 784)),
        ):
            for value in values:
                found["scaling"].append(
                    base
                    | {
                        "key": "scaling",
                        "quantity": quantity,
                        "value": value,
                        "microseconds_per_step": _STEP_US[engine] * (0.3 + 0.7 * value / values[1]),
                    }
                )
    for threads in (2, 1):
        race = {"key": f"race-{threads}", "seed": 0, "measure": "race", "threads": threads, "status": "ok"}
        found["runs"] += [
            base | race | {"engine": engine, "label": LABELS[engine], "engine_digest": "e" * 64} for engine in engines
        ]
    for family in described.families:
        for place, size in enumerate(family.sizes, start=1):
            for threads in (2, 1):
                _add_size(found, base | {"family": family.id, "size": int(size), "threads": threads}, engines, place)
            _add_split(found, base | {"family": family.id, "size": int(size), "threads": 2})
    for training in described.trainings:
        _add_total(found, base | {"network": training.id, "threads": 2}, ("numpy", "julia", "torch"))
    for engine in engines if described.series else ():
        _add_growth(found, base | {"engine": engine, "label": LABELS[engine]})
    for shown in map(about, paper_keys()):
        if shown.microbenchmarks and paper in (shown.key, shown.runs_of_paper):
            _add_microbenchmarks(found, base | {"paper": shown.key}, shown.microbenchmarks.systems.value)
    return found


ABSENT = ("zygote", "reversediff", "forwarddiff", "enzyme", "mooncake")
"""Systems of the micro-benchmarks that the invented machine lacks."""


def _add_microbenchmarks(found: Rows, base: dict[str, Any], systems: list[str]) -> None:
    """Three rounds of every suite: the later a system in the list, the slower it is."""
    base = base | {"threads": 1, "engine_digest": "e" * 64, "version": "invented 1.0"}
    for place, name in enumerate(systems):
        for suite in SYSTEMS[name].suites:
            row = base | {"key": f"micro-{suite}", "suite": suite, "engine": name, "label": SYSTEMS[name].label}
            if name in ABSENT:
                found["microbenchmarks"].append(row | {"missing": f"Julia 1.5.3 has no package {SYSTEMS[name].needs}"})
                continue
            asked = {"gradients": SMALL, "arrays": dict.fromkeys([*SMALL, *CHUNKED], 10_000)}.get(suite, {})
            points = [(benchmark, size, 0) for benchmark, size in asked.items()]
            if suite == "chunks":
                chunks = range(1, 6) if name in FORWARD_MODE else (0,)
                points = [(benchmark, 12_000, chunk) for benchmark in CHUNKED for chunk in chunks]
            for number, (benchmark, size, chunk) in enumerate(points, start=1):
                for what, factor in (("forward", 1.0), ("gradient", 2.5)):
                    if chunk and what == "forward":
                        continue
                    point = {"benchmark": benchmark, "size": size, "chunk": chunk, "what": what, "gradient_error": 0.0}
                    base_time = 100.0 * 3**number * (1 + place) * factor * (1e3 / chunk if chunk else 1)
                    for turn, share in enumerate((0.9, 1.0, 1.2), start=1):
                        found["microbenchmarks"].append(row | point | {"round": turn, "nanoseconds": base_time * share})
            if suite == "memory":
                for length in (10, 100, 1000):
                    for what, peak in (("plain", 1e4 * length), ("checkpointed", 1e5 * length**0.5)):
                        point = {"benchmark": "scan", "size": length, "chunk": 0, "what": what, "round": 1}
                        found["microbenchmarks"].append(row | point | {"bytes": peak})


def _add_size(found: Rows, base: dict[str, Any], engines: tuple[str, ...], place: int) -> None:
    """Twenty rounds of a network: the numpy engine is behind at the largest size, and has a step that holds it."""
    base = base | {"key": f"sizes-{base['family']}-{place}-{base['threads']}", "engine_digest": "e" * 64}
    generator = np.random.default_rng(place)
    for engine in engines:
        row = base | {"engine": engine, "label": LABELS[engine]}
        for batch in (1, 16, 64, 256) if base["threads"] == 2 else (1, 64):
            limit = 2.0 * 4**place * batch
            facts = {
                **{"first": 1 if batch == 1 else None, "start_seconds": 2.5, "memory_bytes": 1e6 * batch},
                **{"import_seconds": 1.5, "level_bytes": 2e8},
                **{"kernel": "matmul of dense1", "kernel_share": 0.6, "kernel_limit_share": 0.4},
                "kernels": "matmul of dense1 0.6 0.4; relu of dense1 0.2 0.1; sums and update 0.1 1.1",
                **{"rest_share": 0.1, "loss_deviation": None if engine == "torch" else 2e-6 * (1 + place)},
                **{"limit_microseconds": limit, "limited_by": "products", "batch": batch},
            }
            if engine == "torch-compile":
                if batch == 64:
                    found["sizes"].append(row | facts | {"missing": "given up: an invented reason"})
                continue
            slow = 3.0 if engine == "numpy" and place == 3 else 1.0
            for number in range(1, 21):
                step = 3 * limit * slow * _STEP_US[engine] / 1000 * generator.normal(1, 0.02)
                found["sizes"].append(row | facts | {"round": number, "microseconds_per_step": step})
    for engine in engines:
        about = {"engine": engine, "label": LABELS[engine], "seed": 0, "measure": "sizes", "status": "ok"}
        found["runs"].append(base | about | {"framework_version": f"{engine} 1.0"})


def _add_split(found: Rows, base: dict[str, Any]) -> None:
    """Eight rounds on a machine that drifts: in mini-batches of 64 Julia's step is slower with two threads."""
    base = base | {"key": f"split-{base['family']}-{base['size']}", "engine_digest": "e" * 64}
    for engine in ("numpy", "julia"):
        about = {"engine": engine, "label": LABELS[engine], "threads_in_step": "products shared by 2 threads"}
        for batch in (1, 16, 64, 256):
            ratio = 0.6 if engine == "numpy" else 1.5 if batch == 64 else 1.02
            for number in range(1, 9):
                one = 1000.0 * (1 + number / 16)
                several = ratio * one * (3 if number == 4 else 1)
                steps = {"microseconds_per_step": several, "one_thread_microseconds": one}
                found["split"].append(base | about | steps | {"batch": batch, "round": number})
        run = {"engine": engine, "label": LABELS[engine], "seed": 0, "measure": "split", "status": "ok"}
        found["runs"].append(base | run | {"framework_version": f"{engine} 1.0"})


def _add_growth(found: Rows, base: dict[str, Any]) -> None:
    """Steps and start-up in proportion to the size, gradients to the nodes' square root."""
    base = base | {"key": f"growth-{base['engine']}", "engine_digest": "e" * 64}
    for series, power in (("width", 1.0), ("length", 1.0), ("vocabulary", 1.0), ("nodes", 0.5)):
        for value in (100, 1000, 10_000):
            row = base | {"series": series, "value": value, "seconds": 1e-6 * value**power}
            if series == "nodes":
                found["growth"].append(row | {"what": "eager gradient"})
                continue
            found["growth"].append(row | {"what": "step", "limit_seconds": 1e-8 * value})
            found["growth"].append(row | {"what": "start-up"})


def _add_total(found: Rows, base: dict[str, Any], engines: tuple[str, ...]) -> None:
    """Three rounds of a whole training, in which the Julia engine takes half of PyTorch's time."""
    base = base | {"key": f"totals-{base['network']}", "engine_digest": "e" * 64}
    for engine in engines:
        row = base | {"engine": engine, "label": LABELS[engine], "import_seconds": 1.5, "start_seconds": 0.4}
        total = 4.0 if engine == "julia" else 8.0
        found["totals"] += [row | {"round": number, "total_seconds": total + number} for number in (1, 2, 3)]
        about = {"engine": engine, "label": LABELS[engine], "seed": 0, "measure": "totals", "status": "ok"}
        found["runs"].append(base | about | {"framework_version": f"{engine} 1.0"})


def write(folder: Path, *sweeps: Rows) -> Path:
    """Write sweeps as `<folder>/tidy/*.csv`, each with its own keys, and return the folder."""
    (folder / "tidy").mkdir(parents=True, exist_ok=True)
    for name, columns in COLUMNS.items():
        with (folder / "tidy" / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            for number, sweep in enumerate(sweeps):  # what differs between them changes the keys
                writer.writerows(row | {"key": f"{row['key']}-{number}"} for row in sweep[name])
    return folder


def _add_run(
    found: Rows, base: dict[str, Any], measure: str, seed: int, epochs: int, generator: np.random.Generator
) -> None:
    engine = base["engine"]
    base = base | {
        "key": f"{base['paper']}-{engine}-{measure}-{seed}-{base['data_source']}",
        "seed": seed,
        "measure": measure,
    }
    timed = measure in ("time", "own")
    # Losses and accuracies depend on the seed alone: engines that start from the same weights agree.
    same = np.random.default_rng(seed)
    accuracy = 0.93 - 0.3 * np.exp(-np.arange(1, epochs + 1) / 1.3) + same.normal(0, 0.002)
    seconds = _STEP_US[engine] * 600e-6 * (1 + 0.02 * generator.standard_normal(epochs))
    seconds[0] *= 20 if engine == "torch-compile" else 1.2
    allocated = np.full(epochs, _BYTES[engine])
    allocated[0] += 8e6
    for index in range(epochs):
        found["epochs"].append(
            base
            | {
                "epoch": index + 1,
                "seconds": seconds[index] if timed else None,
                "seconds_with_evaluation": seconds[index] * 1.3 if timed else None,
                "train_loss": 2.3 - 2.2 * accuracy[index],
                "train_accuracy": accuracy[index],
                "test_loss": 2.35 - 2.2 * accuracy[index],
                "test_accuracy": accuracy[index] + 0.003,
                "bytes_allocated": None if timed else allocated[index],
            }
        )
    if measure == "time":
        loss = 2.3 * np.exp(-np.arange(100) / 120) + same.normal(0, 0.03, 100)
        loss = loss + (generator.normal(0, 2e-7, 100) if engine != "torch" else 0)
        found["steps"] += [base | {"step": step, "loss": value} for step, value in enumerate(loss, start=1)]
    found["runs"].append(
        base
        | {
            "status": "ok",
            "import_seconds": 1.5 if "torch" in engine else 0.2,
            "build_seconds": 0.01,
            "first_epoch_seconds": seconds[0] if timed else None,
            "later_epoch_seconds": seconds[1:].mean() if timed and epochs > 1 else None,
            "total_seconds": seconds.sum() if timed else None,
            "total_seconds_with_evaluation": seconds.sum() * 1.3 if timed else None,
            "train_accuracy": accuracy[-1],
            "test_accuracy": accuracy[-1] + 0.003,
            "test_loss": 2.35 - 2.2 * accuracy[-1],
            "bytes_first_epoch": None if timed else allocated[0],
            "bytes_later_epochs": None if timed else allocated[1:].mean(),
            "peak_rss_bytes": None if timed else 3.1e8 if "torch" in engine else 2.2e8,
            "blas": "Invented BLAS 1.0",
            "python": "3.11.0",
            "framework_version": "numpy 2.0.0" if engine == "numpy" else "torch 2.0.0",
            "engine_digest": "e" * 64,
            "others_share": 0.01 * (seed + 1) if timed else None,
        }
    )


def _add_variant(found: Rows, base: dict[str, Any], seed: int, variant: str, epochs: int) -> None:
    for epoch in range(1, epochs + 1):
        accuracy = 0.7 + 0.02 * epoch + 0.001 * seed - (0.05 if variant == "static" else 0)
        found["variants"].append(
            base
            | {
                "key": f"{base['paper']}-{base['engine']}-variants-{seed}-{base['data_source']}",
                "seed": seed,
                "variant": variant,
                "model": variant,
                "epoch": epoch,
                "seconds": _STEP_US[base["engine"]] * 1e-3,
                "train_accuracy": accuracy + 0.05,
                "test_accuracy": accuracy,
                "test_loss": 1 - accuracy,
                "engine_digest": "e" * 64,
            }
        )


def _add_ablation(found: Rows, base: dict[str, Any]) -> None:
    names = ("replay", "preallocate", "float32")
    configurations = [("all", ""), *(("without", name) for name in names), *(("alone", name) for name in names)]
    factors = {"all": 1.0, "without": 1.5, "alone": 8.0, "none": 10.0}
    for kind, technique in (*configurations, ("none", "")):
        found["ablation"].append(
            base
            | {
                "key": f"{base['paper']}-{base['engine']}-ablation",
                "configuration": kind,
                "technique": technique,
                "microseconds_per_step": _STEP_US[base["engine"]] * factors[kind],
                "bytes_per_epoch": 1e6 * factors[kind],
                "steps": 100,
                "engine_digest": "e" * 64,
            }
        )
