"""A Julia function in a process of its own, for Python programs that can't have Julia in theirs, PyTorch's among them.

from bridge import julia

energy = julia.torch_function("(w, x) -> sum(abs2, tanh.(w * x))")
energy(w, x).backward()             # torch tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.worker import Worker
from py_engine.errors import NotDifferentiableError

__all__ = ["Remote", "torch_function"]

Array = NDArray[Any]


class Remote:
    """A function in the Julia of a worker process; what it raises there is raised here."""

    def __init__(self, code: str, name: str, replay: bool, threads: int) -> None:
        self._worker = Worker("julia", threads)
        try:
            self._worker.define_function(code, name, replay)
        except BaseException:
            self._worker.close()
            raise

    def value(self, arrays: Sequence[Array]) -> Array:
        """See `JuliaFunction.value`."""
        return self._worker.function_value(arrays)

    def pullback(self, seed: Array, arrays: Sequence[Array]) -> list[Array | None]:
        """See `JuliaFunction.pullback`."""
        return self._worker.function_pullback(seed, arrays)

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def torch_function(code: str, name: str = "", *, replay: bool = True, threads: int = 1) -> Callable[..., Any]:
    """Return a Julia function as one of torch tensors, differentiated by the Julia engine in another process.

    Args: see `bridge.julia.function`; a tensor of shape (N, C) is a Julia array of size (C, N).

    Returns:
        A function of CPU tensors, float32, float64 or int64, that returns a tensor. It is a `torch.autograd.Function`:
        gradients reach those arguments that require them. A second derivative is an error of PyTorch's. The process
        ends with the function.

    Raises: see `bridge.julia.function`; and `NotDifferentiableError` for a tensor that is not on the CPU.
    """
    import torch

    from bridge.julia.function import JuliaFunction

    julia = JuliaFunction(Remote(code, name, replay, threads), name)

    def array(x: Any, place: int) -> Array:
        if not isinstance(x, torch.Tensor):
            return np.asarray(x)
        if x.device.type != "cpu":
            raise NotDifferentiableError(
                f"{julia.__name__}: argument {place} is on {x.device}; Julia has the CPU's memory only: pass x.cpu()"
            )
        found: Array = x.detach().numpy()
        return found

    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.arrays = [array(x, i).copy() for i, x in enumerate(args)]
            return torch.from_numpy(julia.value(*ctx.arrays))

        @staticmethod
        @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
        def backward(ctx: Any, seed: Any) -> Any:
            found = julia.pullback(array(seed, 0), *ctx.arrays)
            wanted = zip(found, ctx.needs_input_grad, strict=True)
            return tuple(torch.from_numpy(g) if needed and g is not None else None for g, needed in wanted)

    def call(*args: Any) -> Any:
        return Function.apply(*args)

    call.__name__ = julia.__name__
    return call
