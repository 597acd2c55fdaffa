"""What py_engine costs beside numpy's own work: a chain of cheap operations on a small array."""

from __future__ import annotations

from typing import Any

from .engines import imports

SIZE = 10
"""Elements of the array: so few that the calls, not the arithmetic, take the time."""


class Overhead:
    """`operations` sines in a row: numpy alone, the eager gradient, and the gradient replayed from a tape."""

    params = ((10, 1000),)
    param_names = ("operations",)
    warmup_time = 0.2

    def setup(self, operations: int) -> None:
        """Build the three functions."""
        with imports():
            import numpy as np

            from py_engine import compile, grad

        def chain(x: Any) -> Any:
            for _ in range(operations):
                x = np.sin(x)
            return x.sum()

        self.x = np.linspace(0.1, 1.0, SIZE)
        self.forward = chain
        self.gradient = grad(chain)
        self.replayed = compile(grad(chain))
        self.replayed(self.x)

    def time_numpy(self, operations: int) -> None:
        """The forward pass with plain arrays."""
        self.forward(self.x)

    def time_eager_gradient(self, operations: int) -> None:
        """Recorded, then walked backward, in every call."""
        self.gradient(self.x)

    def time_replayed_gradient(self, operations: int) -> None:
        """Recorded and planned before, replayed in every call."""
        self.replayed(self.x)
