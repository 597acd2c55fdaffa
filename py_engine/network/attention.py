"""Attention layers, for sequences (steps, features)."""

from __future__ import annotations

from py_engine.ad import ops
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError
from py_engine.network.initialisers import InitialiserLike, ParameterSpec
from py_engine.network.layers import Layer, Shape, Tensors


class MultiHeadAttention(Layer, op="multi_head_attention"):
    """Each step's mean of all steps, weighted by how well they fit it, in several heads (Vaswani et al. 2017).

    Queries, keys and values are ``x @ weight + bias``, side by side; each head has its part of their features. What the
    heads find, side by side, times `output_weight` plus `output_bias` is the result: (steps, features) to the same.
    `causal` lets a step see itself and those before it alone.

    Parameters: `weight` (features, 3 · features), `output_weight` (features, features), and unless ``bias=False``
    `bias` (3 · features,) and `output_bias` (features,).
    """

    def __init__(
        self,
        features: int,
        heads: int,
        causal: bool = False,
        bias: bool = True,
        weight_init: InitialiserLike = "glorot_uniform",
        bias_init: InitialiserLike = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.features = self._whole_number("features", features)
        self.heads = self._whole_number("heads", heads)
        if self.features % self.heads:
            raise ConfigurationError(
                f"MultiHeadAttention: heads must divide the {self.features} features, actual {self.heads}"
            )
        self.causal = bool(causal)
        self.bias = bool(bias)
        self.weight_init = self._initialiser("weight_init", weight_init)
        self.bias_init = self._initialiser("bias_init", bias_init)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`weight`, `bias`, `output_weight` and `output_bias`."""
        n, fans = self.features, (self.features, self.features)
        specs = {
            "weight": ParameterSpec((n, 3 * n), self.weight_init, *fans),
            "bias": ParameterSpec((3 * n,), self.bias_init, *fans),
            "output_weight": ParameterSpec(fans, self.weight_init, *fans),
            "output_bias": ParameterSpec((n,), self.bias_init, *fans),
        }
        return specs if self.bias else {name: spec for name, spec in specs.items() if "bias" not in name}

    def output_shape(self, input_shape: Shape) -> Shape:
        """(steps, features) to the same; there is at least one step."""
        if len(input_shape) != 2 or input_shape[1] != self.features or input_shape[0] < 1:
            raise self.reject(f"shape (steps, {self.features})", input_shape)
        return input_shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """One product for queries, keys and values, attention in all heads at once, one product for the result."""
        samples, steps, features = x.shape
        rows = ops.reshape(x, (samples * steps, features)) @ parameters["weight"]
        if self.bias:
            rows = rows + parameters["bias"]
        by_head = ops.reshape(rows, (samples, steps, 3, self.heads, features // self.heads))
        by_head = ops.transpose(by_head, (2, 0, 3, 1, 4))
        found = ops.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], causal=self.causal)
        y = ops.reshape(ops.transpose(found, (0, 2, 1, 3)), (samples * steps, features)) @ parameters["output_weight"]
        if self.bias:
            y = y + parameters["output_bias"]
        return ops.reshape(y, x.shape)


class PositionEmbedding(Layer, op="position_embedding"):
    """A learned vector for each step, added to it: (steps, features) to the same.

    Parameter: `weight` (steps, features).
    """

    def __init__(
        self, steps: int, features: int, weight_init: InitialiserLike = "normal", name: str | None = None
    ) -> None:
        super().__init__(name)
        self.steps = self._whole_number("steps", steps)
        self.features = self._whole_number("features", features)
        self.weight_init = self._initialiser("weight_init", weight_init)

    def parameters(self) -> dict[str, ParameterSpec]:
        """`weight`."""
        shape = (self.steps, self.features)
        return {"weight": ParameterSpec(shape, self.weight_init, *shape)}

    def output_shape(self, input_shape: Shape) -> Shape:
        """(steps, features) to the same."""
        if input_shape != (self.steps, self.features):
            raise self.reject(f"shape ({self.steps}, {self.features})", input_shape)
        return input_shape

    def forward(self, x: Tensor, parameters: Tensors, training: bool) -> Tensor:
        """One sum."""
        return x + parameters["weight"]
