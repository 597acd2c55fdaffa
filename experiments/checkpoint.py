"""Checkpoints of `twingrad train`: all that a training needs to resume as if it had never been interrupted.

A checkpoint is one safetensors file, written whole or not at all: the parameters (`params.<name>`), the session's own
state (`state.<name>`: the optimizer's arrays, random streams), the best parameters so far where training may stop early
(`best.<name>`), and in the metadata the settings, the finished epochs, and what was measured in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as to_safetensors

from bridge import weights
from bridge.errors import WeightsError, shown
from experiments.errors import InputError, write

FORMAT, VERSION = "twingrad-checkpoint", "1"
Arrays = dict[str, NDArray[Any]]


@dataclass
class Checkpoint:
    """A training after a number of epochs."""

    settings: dict[str, Any]
    """What decides the training, by the option that sets it; see `differences`."""
    params: Arrays
    state: Arrays
    history: list[dict[str, Any]] = field(default_factory=list)
    """What was measured in each finished epoch."""
    best: Arrays = field(default_factory=dict)
    """The parameters with the least validation loss; empty where nothing is selected by it."""
    file: tuple[int, int] | None = None
    """Inode and time of the file that it was read from or written to last; None: of none yet."""

    def save(self, path: Path) -> None:
        """Write it to `path`, in the place of the one before, whole or not at all.

        Raises `InputError` where another training has written to `path` in the meantime: its file stays.
        """
        if _identity(path) != self.file:
            raise InputError(f"--checkpoint: another program has written {path} in the meantime: give another file")
        groups = {"params": self.params, "state": self.state, "best": self.best}
        arrays = {
            f"{group}.{name}": np.asarray(array, order="C")
            for group, own in groups.items()
            for name, array in own.items()
        }
        about = {
            "format": FORMAT,
            "version": VERSION,
            "settings": json.dumps(self.settings),
            "history": json.dumps(self.history),
        }
        write(path, to_safetensors(arrays, about), InputError, "--checkpoint with another file")
        self.file = _identity(path)


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one at its place; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"--checkpoint: {path} cannot be looked at: {error.strerror or error}") from None
    return found.st_ino, found.st_mtime_ns


def load(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises `InputError` for a file that is none, or damaged."""
    identity = _identity(path)
    try:
        with weights.opened(path) as file:
            about: Mapping[str, str] = file.metadata() or {}
            if about.get("format") != FORMAT or about.get("version") != VERSION:
                raise InputError(
                    f"--checkpoint: {path} is no checkpoint of `twingrad train` (format {FORMAT} {VERSION})"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except WeightsError as error:
        raise InputError(f"--checkpoint: {error}") from None
    except (AttributeError, TypeError) as error:  # of a dtype that numpy has not
        raise InputError(f"--checkpoint: {path} is damaged: {shown(str(error))}") from None
    groups: dict[str, Arrays] = {"params": {}, "state": {}, "best": {}}
    try:
        for name, array in arrays.items():
            group, _, own = name.partition(".")
            groups[group][own] = array
        settings, history = json.loads(about["settings"]), json.loads(about["history"])
    except (KeyError, ValueError, RecursionError) as error:
        raise InputError(f"--checkpoint: {path} is damaged: {shown(str(error))}") from None
    if not _is_whole(settings, history):
        raise InputError(f"--checkpoint: {path} is damaged: its settings, or what was measured, are none")
    return Checkpoint(settings, history=history, file=identity, **groups)


def _is_whole(settings: Any, history: Any) -> bool:
    """Whether these may be the settings, and what was measured in each epoch."""
    if not isinstance(settings, dict) or not isinstance(history, list):
        return False
    measured = {"epoch"} if settings.get("patience") is None else {"epoch", "validation_loss"}
    return all(
        isinstance(row, dict)
        and measured <= row.keys()
        and all(isinstance(value, int | float) for value in row.values())
        for row in history
    )


def differences(path: Path, made_with: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise `InputError` where a checkpoint was made with other settings than those that are asked for."""
    wrong = [
        f"{name} {made_with.get(name)}, not {asked.get(name)}"
        for name in dict.fromkeys((*made_with, *asked))
        if made_with.get(name) != asked.get(name)
    ]
    if wrong:
        raise InputError(
            f"--checkpoint: {path} was made with {'; '.join(wrong)}. Give the same options, or another file"
        )
