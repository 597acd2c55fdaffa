"""A Julia function as one of PyTorch's, with Julia in its own process: the two crash each other in one.

from bridge import julia

energy = julia.torch_function("(w, x) -> sum(abs2, tanh.(w * x))")
energy(w, x).backward()             # torch tensors
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.julia.function import JuliaFunction, check_texts
from bridge.julia.remote import RemoteFunction
from py_engine.errors import NotDifferentiableError

__all__ = ["torch_function"]


def torch_function(code: str, name: str = "", *, replay: bool = True, threads: int = 1) -> Callable[..., Any]:
    """Return a Julia function as one of torch tensors, differentiated by the Julia engine in another process.

    Args: see `bridge.julia.function`; a tensor of shape (N, C) is a Julia array of size (C, N).

    Returns:
        A function of CPU tensors, float32, float64 or int64, that returns a tensor. It is a `torch.autograd.Function`:
        gradients reach those arguments that require them, and can be differentiated again (``create_graph=True``). The
        process ends with the function.

    Raises: see `bridge.julia.function`; and `NotDifferentiableError` for a tensor that is not on the CPU.
    """
    import torch

    def function_of(julia: JuliaFunction) -> Callable[..., Any]:
        class Function(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                ctx.save_for_backward(*(x for x in args if isinstance(x, torch.Tensor)))
                # Copies: PyTorch notices when a tensor is written to before the derivative, and not for other arrays.
                ctx.others = [None if isinstance(x, torch.Tensor) else np.array(x) for x in args]
                return torch.from_numpy(julia.value(*(array(x, i) for i, x in enumerate(args))))

            @staticmethod
            def backward(ctx: Any, seed: Any) -> Any:
                saved = iter(ctx.saved_tensors)
                args = [next(saved) if x is None else x for x in ctx.others]
                arrays = [array(x, i) for i, x in enumerate(args)]
                if not torch.is_grad_enabled():
                    found = julia.pullback(array(seed, 0), *arrays)
                    return tuple(
                        torch.from_numpy(g) if needed and g is not None else None
                        for g, needed in zip(found, ctx.needs_input_grad, strict=True)
                    )
                needs_grad = [x.dtype.kind == "f" for x in arrays]
                return tuple(
                    function_of(julia.derivative(i, needs_grad))(*args, seed) if needed else None
                    for i, needed in enumerate(ctx.needs_input_grad)
                )

        def call(*args: Any) -> Any:
            return Function.apply(*args)

        call.__name__ = julia.__name__
        return call

    def array(x: Any, place: int) -> Any:
        if not isinstance(x, torch.Tensor):
            return np.asarray(x)
        if x.device.type != "cpu":
            raise NotDifferentiableError(
                f"{name or 'julia_function'}: argument {place} is on {x.device}; Julia has the CPU's memory only: "
                "pass x.cpu()"
            )
        try:
            return x.detach().resolve_neg().numpy()
        except TypeError as error:  # bfloat16 and sparse tensors, among others
            raise NotDifferentiableError(f"{name or 'julia_function'}: argument {place}: {error}") from None

    check_texts(code, name)
    return function_of(JuliaFunction(RemoteFunction.defined(code, name, replay, threads), name))
