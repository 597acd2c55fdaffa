"""What says how good a network is: an accuracy where there are right answers, an error where there are none."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bridge.session import Evaluation
from bridge.spec import ModelSpec
from experiments.formats import fixed, fraction


@dataclass(frozen=True)
class Score:
    """The number, beside the loss, that a person reads: its key for programs, and its name."""

    key: str
    """`accuracy`, or `rmse` for a regression."""
    name: str
    head: str
    """The head of its column."""

    @classmethod
    def of(cls, spec: ModelSpec, is_sample: bool = False) -> Score:
        """That of a model; on the embedded sample it is called so, since it says nothing about the real data."""
        if spec.loss.op == "mean_squared_error":
            return cls("rmse", "root-mean-square error", "RMSE")
        if is_sample:
            return cls("accuracy", "accuracy (of the sample)", "ACCURACY (SAMPLE)")
        return cls("accuracy", "accuracy", "ACCURACY")

    def value(self, found: Evaluation) -> float:
        """The accuracy, 0 to 1; or the root of the mean squared error, in the units of the targets."""
        return math.sqrt(found.loss) if self.key == "rmse" else found.accuracy

    def shown(self, value: float) -> str:
        """The number as text."""
        return fixed(value, 4) if self.key == "rmse" else fraction(value)

    def text(self, found: Evaluation) -> str:
        """Its name and the number."""
        return f"{self.name} {self.shown(self.value(found))}"
