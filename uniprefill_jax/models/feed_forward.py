"""The gated feed-forward layer shared by all families."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul import ACTIVATIONS
from uniprefill_jax.models.parameters import ParameterScope, constant
from uniprefill_jax.models.projection import gated_project, project


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, scope: ParameterScope, hidden_size: int, inner_size: int, activation: str, bias: bool = False):
        embed, inner = ((hidden_size, "embed"),), ((inner_size, "mlp"),)
        self.gate_proj = scope.linear("gate_proj.weight", embed, inner)
        self.up_proj = scope.linear("up_proj.weight", embed, inner)
        self.down_proj = scope.linear("down_proj.weight", inner, embed)
        zero = constant(0.0)
        self.gate_bias = scope.declare("gate_proj.bias", (inner_size,), ("mlp",), init=zero) if bias else None
        self.up_bias = scope.declare("up_proj.bias", (inner_size,), ("mlp",), init=zero) if bias else None
        self.down_bias = scope.declare("down_proj.bias", (hidden_size,), ("embed",), init=zero) if bias else None
        self.activation = activation

    def __call__(self, x: Float[Array, "T D"], count: Int32[Array, ""] | None = None) -> Float[Array, "T D"]:
        """Every row on its own; `count` real rows, where the product kernel may run (see `projection.project`)."""
        with jax.named_scope("feed_forward"):
            inner = None
            if self.gate_bias is None:
                inner = gated_project(x, self.gate_proj, self.up_proj, self.activation, count)
            if inner is None:
                gate = project(x, self.gate_proj, self.gate_bias, count)
                inner = ACTIVATIONS[self.activation](gate) * project(x, self.up_proj, self.up_bias, count)
            return project(inner, self.down_proj, self.down_bias, count)
