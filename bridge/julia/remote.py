"""A Julia function in its own process, for Python programs that can't have Julia in theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from bridge.worker import Worker

__all__ = ["RemoteFunction"]

Array = NDArray[Any]


class RemoteFunction:
    """A function in the Julia of a worker process; what it raises there is raised here."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker, self._number = worker, number

    @classmethod
    def defined(cls, code: str, name: str, replay: bool, threads: int) -> RemoteFunction:
        """Define it in a new process; see `bridge.julia.function`."""
        worker = Worker("julia", threads)
        try:
            return cls(worker, worker.define_function(code, name, bool(replay)))
        except BaseException:
            worker.close()
            raise

    def value(self, arrays: Sequence[Array]) -> Array:
        """See `bridge.julia.JuliaFunction.value`."""
        return self._worker.function_value(self._number, arrays)

    def pullback(self, seed: Array, arrays: Sequence[Array]) -> list[Array | None]:
        """See `bridge.julia.JuliaFunction.pullback`."""
        return self._worker.function_pullback(self._number, seed, arrays)

    def derivative(self, by: int | None, needs_grad: Sequence[bool]) -> RemoteFunction:
        """See `bridge.julia.JuliaFunction.derivative`; in the same process."""
        return RemoteFunction(self._worker, self._worker.derive_function(self._number, by, needs_grad))

    def close(self) -> None:
        """End the process."""
        self._worker.close()
