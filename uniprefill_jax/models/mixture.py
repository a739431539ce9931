"""Mixture of experts with a gated shared expert (Qwen3-Next): no token is dropped by capacity."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from uniprefill_jax.models.config import MixtureConfig
from uniprefill_jax.models.feed_forward import ACTIVATION_FUNCTIONS, FeedForward
from uniprefill_jax.models.parameters import ParameterScope


class MixtureOfExperts(nnx.Module):
    """Router in float32, rows sorted by expert, one grouped matrix product per projection."""

    def __init__(self, scope: ParameterScope, hidden_size: int, config: MixtureConfig, activation: str):
        embed, inner = ((hidden_size, "embed"),), ((config.expert_size, "expert_mlp"),)
        self.router = scope.linear("gate.weight", embed, ((config.num_experts, "experts"),))
        experts = scope.child("experts.{expert}", experts=config.num_experts)
        self.gate_proj = experts.linear("gate_proj.weight", embed, inner)
        self.up_proj = experts.linear("up_proj.weight", embed, inner)
        self.down_proj = experts.linear("down_proj.weight", inner, embed)
        self.shared_expert = FeedForward(
            scope.child("shared_expert"), hidden_size, config.shared_expert_size, activation
        )
        self.shared_expert_gate = scope.linear("shared_expert_gate.weight", embed, ((1, "one"),))
        self.activation = activation
        self.config = config

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Every row through its experts and the shared expert."""
        num_rows, hidden_size = x.shape
        chosen = self.config.experts_per_token
        with jax.named_scope("router"):
            logits = jnp.dot(x, self.router[...])
            probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
            weights, experts = jax.lax.top_k(probabilities, chosen)
            if self.config.normalise_top_k:
                weights = weights / weights.sum(axis=-1, keepdims=True)
            weights = weights.astype(x.dtype)
        with jax.named_scope("experts"):
            flat = experts.reshape(-1)
            order = jnp.argsort(flat, stable=True)
            sizes = jnp.bincount(flat, length=self.config.num_experts).astype(jnp.int32)
            sorted_rows = x[order // chosen]
            gate = jax.lax.ragged_dot(sorted_rows, self.gate_proj[...], sizes)
            up = jax.lax.ragged_dot(sorted_rows, self.up_proj[...], sizes)
            inner = ACTIVATION_FUNCTIONS[self.activation](gate) * up
            outputs = jax.lax.ragged_dot(inner, self.down_proj[...], sizes)
            back = jnp.argsort(order)
            per_choice = outputs[back].reshape(num_rows, chosen, hidden_size)
            mixed = jnp.einsum("tc,tcd->td", weights, per_choice)
        with jax.named_scope("shared_expert"):
            gate = jax.nn.sigmoid(jnp.dot(x, self.shared_expert_gate[...]))
            return mixed + gate * self.shared_expert(x)
