"""A model as a drawing: its layers from the input down to the loss, with shapes and parameters."""

from __future__ import annotations

import math
from typing import Any

from bridge.layers import Layer, Shape
from bridge.spec import Loss, ModelSpec
from experiments.formats import aligned, size

_HIDDEN = ("id", "op")
_MOST_SHOWN = 8


def drawn(spec: ModelSpec) -> list[str]:
    """The model as lines of text: a box for each layer, and beside it what comes out and what is learned there."""
    boxes = [["input", spec.input.dtype, _shape(spec.input.sample), "", ""]]
    for layer, layer_shape in _rows(spec):
        parameters = _parameters(spec, layer)
        detail = ", ".join(f"{key} {shape}" for key, (shape, _) in parameters.items())
        frozen = " (not all trained)" if not all(trained for _, trained in parameters.values()) else ""
        count = f"{sum(math.prod(shape) for shape, _ in parameters.values()):,}" if parameters else ""
        boxes.append([layer.id, _described(layer), _shape(layer_shape.output), count, detail + frozen])
    targets = f"{_shape(spec.target.shape)} {'classes' if spec.target.kind == 'classes' else 'numbers'}"
    boxes.append(["loss", _described(spec.loss), "", "", f"targets {targets}"])
    arrow = f"{'│':>{max(len(name) for name, *_ in boxes) // 2 + 1}}"
    first, *others = aligned(boxes, (0, 1, 4))
    lines = [first]
    for other in others:
        lines += [arrow, other]
    found = spec.parameters().values()
    total = sum(math.prod(p.shape) for p in found)
    trained = sum(math.prod(p.shape) for p in found if p.trainable)
    held = size(total * (8 if spec.dtype == "float64" else 4))
    rest = "" if trained == total else f", {trained:,} of them trained"
    lines += ["", f"{spec.name}: {len(spec.layers)} layers, {total:,} parameters{rest} ({held} in {spec.dtype})"]
    return lines


def rows(spec: ModelSpec) -> list[dict[str, Any]]:
    """The same for programs: a row for each layer."""
    return [
        {
            "layer": layer.id,
            "op": layer.op,
            "settings": layer.model_dump(exclude=set(_HIDDEN)),
            "input": list(layer_shape.input),
            "output": list(layer_shape.output),
            "parameters": {name: list(shape) for name, (shape, _) in _parameters(spec, layer).items()},
        }
        for layer, layer_shape in _rows(spec)
    ]


def _rows(spec: ModelSpec) -> list[tuple[Layer, Any]]:
    return list(zip(spec.layers, spec.shapes(), strict=True))


def _described(layer: Layer | Loss) -> str:
    """The op, and the settings that its user wrote or that are not as by default."""
    given = layer.model_dump(exclude=set(_HIDDEN), exclude_defaults=True)
    return " ".join([layer.op, *(f"{name}={_value(value)}" for name, value in given.items())])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name", value))
    if isinstance(value, tuple) and len(value) > _MOST_SHOWN:
        return f"{len(value)} numbers"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _parameters(spec: ModelSpec, layer: Layer) -> dict[str, tuple[Shape, bool]]:
    """The shape of each parameter of a layer, by its own name, and whether it is trained."""
    start = f"{layer.id}."
    found = {name.removeprefix(start): p for name, p in spec.parameters().items() if name.startswith(start)}
    return {name: (p.shape, p.trainable) for name, p in found.items()}


def _shape(sample: Shape) -> str:
    return f"({', '.join(['N', *map(str, sample)])})"
