"""What a paper says of its network, held against the model spec that is trained.

A paper's `[network]` table names facts, such as `units` or `kernel`, in the studies' own words; `FACTS` says where each
is in a spec. Any other setting of a layer is named `"<layer id>.<key>"`, as in `"drop.rate"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge import spec as model_spec
from bridge.errors import SpecError, shown
from bridge.layers import Activation, Convolution, Dense, Embedding, Layer, PermuteDims, Recurrent, Reshape
from bridge.spec import ModelSpec

Fact = Callable[[ModelSpec], list[Any]]


def _every(key: str, kind: type[Layer] | str = Layer) -> Fact:
    """The setting `key` of every layer of a kind (a class, or the beginning of its op) that has it, in order."""

    def found(spec: ModelSpec) -> list[Any]:
        of_kind = [
            layer
            for layer in spec.layers
            if (layer.op.startswith(kind) if isinstance(kind, str) else isinstance(layer, kind))
        ]
        return [plain(getattr(layer, key)) for layer in of_kind if hasattr(layer, key)]

    return found


def _initialiser(key: str, option: str = "name") -> Fact:
    """An initialiser's name, or another option of it, for every layer that has this initialiser."""
    return lambda spec: [
        getattr(getattr(layer, key), option)
        for layer in spec.layers
        if hasattr(layer, key) and hasattr(getattr(layer, key), option)
    ]


def _hidden_activations(spec: ModelSpec) -> list[Any]:
    layers = spec.layers[:-1] if isinstance(spec.layers[-1], Activation) else spec.layers
    return [layer.activation for layer in layers if hasattr(layer, "activation")]


def _reshaped(spec: ModelSpec, axes: int) -> list[int]:
    """The first shape of a sample with this number of axes: its own, or what it is reshaped to."""
    shapes = [spec.input.sample, *(layer.shape for layer in spec.layers if isinstance(layer, Reshape))]
    return next((list(shape) for shape in shapes if len(shape) == axes), [])


def _largest_padding(spec: ModelSpec) -> list[int]:
    return [max(_numbers(layer.geometry.padding)) for layer in spec.layers if isinstance(layer, Convolution)]


def _numbers(nested: Any) -> Iterator[int]:
    for item in nested if isinstance(nested, tuple) else [nested]:
        yield from _numbers(item) if isinstance(item, tuple) else [item]


FACTS: Mapping[str, Fact] = {
    "image": lambda spec: [_reshaped(spec, 3)],
    "segments": lambda spec: _reshaped(spec, 2)[:1],
    "segment_pixels": lambda spec: _reshaped(spec, 2)[1:],
    "vocabulary": _every("vocabulary", Embedding),
    "embedding_dimension": _every("dimension", Embedding),
    "embedding_trained": _every("trainable", Embedding),
    "permutation": _every("axes", PermuteDims),
    "cell": _every("op", Recurrent),
    "units": _every("units", Recurrent),
    "returns": _every("returns", Recurrent),
    "filters": _every("filters", "conv"),
    "kernel": _every("kernel", "conv"),
    "convolution_bias": _every("bias", "conv"),
    "convolution_padding": _largest_padding,
    "pool": lambda spec: _every("window", "max_pool")(spec) + _every("window", "avg_pool")(spec),
    "hidden_units": lambda spec: _every("units", Dense)(spec)[:-1],
    "output_units": lambda spec: _every("units", Dense)(spec)[-1:],
    "biases": _every("bias"),
    "activation": _hidden_activations,
    "weight_init": _initialiser("weight_init"),
    "weight_deviation": _initialiser("weight_init", "std"),
    "recurrent_init": _initialiser("recurrent_init"),
    "bias_init": _initialiser("bias_init"),
    "loss": lambda spec: [spec.loss.op],
}
"""Each fact with what the layers of a spec say of it, one after the other."""


def disagreement(name: str, value: Any, spec: ModelSpec) -> str | None:
    """What is wrong with a fact that a paper states of the network `spec`; None where the two agree.

    Where several layers have the setting, `value` is that of all of them, or the list of each one's.
    """
    if name == "output_activation":
        last = spec.layers[-1]
        found = [last.activation] if isinstance(last, Activation) else [spec.loss.applies or "identity", "identity"]
        return None if value in found else f"found {shown(value)}, expected {' or '.join(map(shown, found))}"
    if name in FACTS:
        said = FACTS[name](spec)
    else:
        id, _, key = name.rpartition(".")
        layer = next((layer for layer in spec.layers if layer.id == id), None)
        if layer is None or key not in type(layer).model_fields:
            return (
                f"unknown key, expected one of {', '.join(sorted([*FACTS, 'output_activation']))}, or "
                '"<layer id>.<key>" for a setting of a layer'
            )
        said = [plain(getattr(layer, key))]
    if not said or said == [[]]:
        return "the model has no layer with such a setting"
    if value == said or all(_equal(value, item) for item in said):
        return None
    return f"found {shown(value)}, and the model has {', '.join(map(shown, said))}"


def changed(spec: ModelSpec, given: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> ModelSpec:
    """A network under another name with other settings, named `"<layer id>.<key>"` or `"input.<key>"`.

    `given` is the document that the spec was read from: where that has the padding "same", it is found anew.

    Raises SpecError for a setting that no layer has, and for a network that is none.
    """
    document = spec.model_dump(mode="json") | {"name": name}
    parts = {layer["id"]: layer for layer in document["layers"]} | {"input": document["input"]}
    for layer, source in zip(document["layers"], given["layers"], strict=True):
        if source.get("padding") == "same":
            layer["padding"] = "same"
    for key, value in changes.items():
        part, _, setting = key.rpartition(".")
        if part not in parts or setting not in parts[part]:
            raise SpecError(name, [f"{spec.name} has no setting {shown(key)}"])
        parts[part][setting] = value
    return model_spec.parse(document, name)


def plain(value: Any) -> Any:
    """A layer's setting as a paper's file would write it."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return getattr(value, "name", value)


def _equal(value: Any, said: Any) -> bool:
    return value == said and isinstance(value, bool) == isinstance(said, bool)
