"""PyTorch with torch.compile: forward pass, loss and backward pass as compiled kernels.

The optimizer stays torch's fused one, which is one kernel per parameter already. Compiled once for each batch size (a
last partial batch is a second one) in the first steps of the first epoch. Recurrent layers are unrolled: torch.compile
doesn't look into torch's own. Evaluation runs eagerly, so that its batch sizes cost no compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._inductor.config
from numpy.typing import DTypeLike, NDArray

from bridge.adapters.torch import TorchSession
from bridge.session import Optimizer
from bridge.spec import ModelSpec

__all__ = ["TorchCompileSession"]


class TorchCompileSession(TorchSession):
    """A `Session` that trains with compiled kernels."""

    _unrolls = True

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, NDArray[Any]],
        optimizer: Optimizer,
        batch_size: int,
        dtype: DTypeLike = "float32",
        threads: int = 1,
    ) -> None:
        super().__init__(spec, params, optimizer, batch_size, dtype, threads)
        # Compiled from nothing every time, so that the first epoch costs what it costs whatever ran before.
        torch._inductor.config.force_disable_caches = True
        # Helper processes that compile in parallel would stay on beside the measurement.
        torch._inductor.config.compile_threads = 1
        self._loss = torch.compile(self._loss, dynamic=False)  # type: ignore[method-assign]
