"""The gated feed-forward layer shared by all families."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from uniprefill_jax.models.parameters import ParameterScope, constant

ACTIVATION_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


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

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Every row on its own."""
        with jax.named_scope("feed_forward"):
            gate = _linear(x, self.gate_proj, self.gate_bias)
            up = _linear(x, self.up_proj, self.up_bias)
            inner = ACTIVATION_FUNCTIONS[self.activation](gate) * up
            return _linear(inner, self.down_proj, self.down_bias)


def _linear(x: Float[Array, "T inputs"], weight: nnx.Param, bias: nnx.Param | None) -> Float[Array, "T outputs"]:
    product = jnp.dot(x, weight[...])
    return product if bias is None else product + bias[...]
