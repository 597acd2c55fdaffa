"""How the learning rate changes during a training: constant, in steps, or along a cosine, after a warm-up if asked for.

A schedule is settings only. `Schedule.rates` says the learning rate of each step, which sessions take as they are
(`bridge.session.Scheduling`), so that it is the same in every engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from py_engine.errors import ConfigurationError

__all__ = ["SCHEDULES", "Schedule"]

SCHEDULES = ("constant", "step", "cosine")


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes, step by step. Raises `ConfigurationError` for settings out of range.

    The formulas are those of torch.optim.lr_scheduler: `StepLR` by whole epochs, `CosineAnnealingLR` by steps, from
    the learning rate down to almost 0, and before them `LinearLR` from 1/warmup.
    """

    name: str = "constant"
    """One of `SCHEDULES`."""
    warmup: int = 0
    """The first steps, in which the learning rate grows linearly up to its own."""
    every: int = 10
    """Of `step`: after how many epochs the learning rate is multiplied by `factor`, again and again."""
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ConfigurationError(f"no schedule {self.name!r}; schedules: {', '.join(SCHEDULES)}")
        if self.warmup < 0 or self.every < 1:
            raise ConfigurationError(
                f"schedule: warmup must be at least 0 and every at least 1, found {self.warmup} and {self.every}"
            )
        if not 0 < self.factor <= 1:
            raise ConfigurationError(f"schedule: factor must be above 0 and at most 1, found {self.factor}")

    @property
    def is_constant(self) -> bool:
        """Whether all steps have the same learning rate."""
        return self.name == "constant" and not self.warmup

    def rates(self, learning_rate: float, first: int, count: int, per_epoch: int, total: int) -> NDArray[np.float64]:
        """The learning rates of `count` steps from step `first` (from 0) on, (count,).

        `per_epoch` is the number of steps of an epoch, `total` that of the whole training.
        """
        steps = np.arange(first, first + count)
        found = np.full(count, float(learning_rate))
        if self.name == "step":
            found *= self.factor ** (steps // per_epoch // self.every)
        elif self.name == "cosine":
            done = np.clip((steps - self.warmup) / max(1, total - self.warmup), 0, 1)
            found *= (1 + np.cos(math.pi * done)) / 2
        if self.warmup:
            found *= np.minimum((steps + 1) / self.warmup, 1)
        return found
