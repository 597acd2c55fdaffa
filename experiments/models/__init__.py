"""The models that come with TwinGrad: `load("mnist-rnn")`."""

from __future__ import annotations

from pathlib import Path

from bridge import spec
from bridge.errors import SpecError

__all__ = ["load", "names"]

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all models."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load(name: str) -> spec.ModelSpec:
    """The model of this name. Raises `SpecError` where there is none."""
    if name not in names():
        raise SpecError(name, [f"no model of this name comes with TwinGrad; models: {', '.join(names())}"])
    return spec.load(_FOLDER / f"{name}.toml")
