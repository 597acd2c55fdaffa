"""All measures: every file of this folder that has a `MEASURE`, and the micro-benchmarks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from experiments.measures.measure import Measure
from experiments.microbenchmarks import measure as micro


def _found() -> list[Measure]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    modules = (import_module(f"experiments.measures.{name}") for name in names if name not in ("__init__", "registry"))
    return [module.MEASURE for module in modules if hasattr(module, "MEASURE")]


MEASURES: dict[str, Measure] = {one.name: one for one in sorted(_found(), key=lambda one: one.place)}
"""Those of engines by name, in the order in which `reproduce` takes them."""

RECORDED: dict[str, Measure] = MEASURES | {micro.MEASURE.name: micro.MEASURE}
"""All that have records: those of engines, and the micro-benchmarks of systems."""

TRAINED: tuple[str, ...] = tuple(name for name, one in MEASURES.items() if not one.columns)
"""Those that train one engine per run, with its epochs in a tidy file of all."""

TABLES: tuple[str, ...] = tuple(name for name, one in MEASURES.items() if one.columns)
"""Those of engines with their own tidy file."""

WORDS: dict[str, str] = {name: one.words for name, one in RECORDED.items()}
"""What reports call them."""
