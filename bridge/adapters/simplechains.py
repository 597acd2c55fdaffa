"""SimpleChains, in this process's Julia: simplechains.jl, called as the Julia engine is, from the same weights.

What it needs is a Julia with SimpleChains 0.4 in its environment; see `bridge.libjulia.packages`. It is
tested against a stand-in, and against SimpleChains where Julia has it: see tests/bridge/test_julia_packages.py. It is
for small dense and convolutional networks; what it lacks of a network is refused.
"""

from __future__ import annotations

from pathlib import Path

from bridge.adapters import julia_package
from bridge.checks import check_chain
from bridge.errors import SpecError
from bridge.layers import Activation, Conv2D, Dense, Flatten, Layer, MaxPool2D, PermuteDims, Reshape, Shape
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from py_engine.errors import ConfigurationError

__all__ = ["SimpleChainsSession"]

ACTIVATIONS = ("identity", "tanh", "relu")
LOSSES = ("softmax_cross_entropy", "mean_squared_error")


def check(spec: ModelSpec, optimizer: Optimizer, engine: str) -> None:
    """Raise for what SimpleChains lacks, or computes otherwise than the spec says."""
    check_chain(spec, engine)
    first = True  # layers that give another shape to the data, before any that computes
    for index, (layer, shape) in enumerate(zip(spec.layers, spec.shapes(), strict=True)):
        first = first and isinstance(layer, Reshape | Flatten | PermuteDims)
        if not first and (problem := _problem(layer, shape.input)):
            raise julia_package.refusal(spec, index, f"the engine {engine} has {problem}")
    if spec.loss.op not in LOSSES or len(spec.output) > 1:
        found = f"{spec.loss.op} of an output of {len(spec.output)} axes"
        wanted = " and ".join(LOSSES)
        raise SpecError(
            f'the model "{spec.name}"', [f"loss: the engine {engine} has {wanted} of one axis, found {found}"]
        )
    julia_package.check_loss(spec, engine)
    julia_package.check_optimizer(optimizer, engine, ("sgd",))
    if optimizer.nesterov:
        raise ConfigurationError(f"sgd: the engine {engine} has no nesterov momentum")


def _problem(layer: Layer, size: Shape) -> str:
    """What is wrong with a layer for samples of this size; nothing when SimpleChains has it."""
    match layer:
        case Dense() if len(size) == 1:
            return ""
        case Dense():
            return f"dense layers for samples of one axis, found {len(size)}: put a flatten before it"
        case Flatten():
            return ""
        case Activation():
            return "" if layer.activation in ACTIVATIONS else f"no {layer.activation}"
        case Conv2D():
            at = layer.geometry
            plain = {*at.stride, *at.dilation, layer.groups} == {1} and not any(map(any, at.padding))
            return "" if plain else "conv2d with stride, dilation and groups 1 and without padding"
        case MaxPool2D():
            at = layer.geometry
            rest = any(length % window for length, window in zip(size[1:], at.size, strict=True))
            plain = at.stride == at.size and set(at.dilation) == {1} and not any(map(any, at.padding)) and not rest
            return "" if plain else "max_pool2d with windows side by side that leave nothing over, without padding"
    return f"no {layer.op}" + (" but in front" if isinstance(layer, Reshape | PermuteDims) else "")


class SimpleChainsSession(julia_package.PackageSession):
    """A `Session` of SimpleChains for the networks that it has."""

    _source = Path(__file__).with_name("simplechains.jl")
    _module = "TwinGradSimpleChains"
    _accept = staticmethod(check)
