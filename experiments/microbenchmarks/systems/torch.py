"""PyTorch, eager: `torch.autograd.grad` of tensors that are there already."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bridge.linear_algebra import of_torch
from experiments.microbenchmarks.functions import LABEL, STEPS

linear_algebra = partial(of_torch, torch)

torch.set_num_threads(1)


def sincos(x: Any) -> Any:
    """sin(cos(x))."""
    return torch.sin(torch.cos(x))


def loop(x: Any) -> Any:
    """500 multiplications by sin(x)."""
    r = 1.0
    for _ in range(STEPS):
        r = r * torch.sin(x)
    return r


def logsumexp(x: Any) -> Any:
    """log(sum(exp(x)))."""
    return torch.logsumexp(x, 0)


def logistic(w: Any, b: Any, x: Any) -> Any:
    """The sum of sigmoid(w x + b)."""
    return torch.sigmoid(torch.addmv(b, w, x)).sum()


def mlp(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """The network's cross-entropy."""
    return F.cross_entropy(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), _LABEL)


_LABEL = torch.tensor(LABEL)
FUNCTIONS = {item.__name__: item for item in (sincos, loop, logsumexp, logistic, mlp)}


def prepare(name: str, inputs: list[Any], by: int) -> Any:
    """The value, without a record, and the gradients."""
    function, arguments = FUNCTIONS[name], [torch.tensor(x) for x in inputs]
    variables = [x.requires_grad_() for x in arguments[:by]]

    def value() -> Any:
        with torch.no_grad():
            return function(*arguments)

    return value, lambda: torch.autograd.grad(function(*arguments), variables)
