"""Mixture of experts with a gated shared expert (Qwen3-Next): no token is dropped by capacity."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.config import MixtureConfig
from uniprefill_jax.models.feed_forward import FeedForward
from uniprefill_jax.models.parameters import ParameterScope
from uniprefill_jax.models.projection import LayerOfStack, gated_product, matrix, product, project, stacked_groups
from uniprefill_jax.parallel.mesh import TENSOR
from uniprefill_jax.parallel.shards import per_shard, shard_index, sum_over_shards


class Routing(NamedTuple):
    """Which experts each row goes to: the router's probabilities, the chosen experts, and what their outputs weigh."""

    probabilities: Float[Array, "T experts"]
    experts: Int32[Array, "T chosen"]
    weights: Float[Array, "T chosen"]


class MixtureOfExperts(nnx.Module):
    """Router in float32, rows sorted by expert, grouped matrix products over the experts."""

    def __init__(self, scope: ParameterScope, hidden_size: int, config: MixtureConfig, activation: str):
        embed, inner = ((hidden_size, "embed"),), ((config.expert_size, "expert_mlp"),)
        self.router = scope.linear("gate.weight", embed, ((config.num_experts, "choices"),))
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

    def __call__(self, x: Float[Array, "T D"], count: Int32[Array, ""] | None = None) -> Float[Array, "T D"]:
        """Every row through its experts and the shared expert; rows from `count` on are padding and choose none."""
        routing = self.route(x)
        experts = routing.experts
        if count is not None:
            real = jnp.arange(x.shape[0], dtype=jnp.int32) < count
            experts = jnp.where(real[:, None], experts, self.config.num_experts)
        with jax.named_scope("experts"):
            mixed = self._mix(x, routing.weights, experts)
        return self.add_shared(x, mixed, count)

    def route(self, x: Float[Array, "T D"]) -> Routing:
        """The likeliest experts of every row, float32."""
        with jax.named_scope("router"):
            logits = jnp.dot(x, matrix(self.router), preferred_element_type=jnp.float32)
            probabilities = jax.nn.softmax(logits, axis=-1)
            weights, experts = jax.lax.top_k(probabilities, self.config.experts_per_token)
            if self.config.normalise_top_k:
                weights = weights / weights.sum(axis=-1, keepdims=True)
        return Routing(probabilities, experts, weights)

    def add_shared(
        self, x: Float[Array, "T D"], mixed: Float[Array, "T D"], count: Int32[Array, ""] | None = None
    ) -> Float[Array, "T D"]:
        """What the chosen experts made of the rows `x`, plus the gated shared expert."""
        with jax.named_scope("shared_expert"):
            gate = jax.nn.sigmoid(project(x, self.shared_expert_gate))
            return mixed + gate * self.shared_expert(x, count)

    def _mix(
        self, x: Float[Array, "T D"], weights: Float[Array, "T chosen"], experts: Int32[Array, "T chosen"]
    ) -> Float[Array, "T D"]:
        """Weighted sum of the chosen experts' outputs; an expert past the last gives zero."""
        stacks = tuple(weight.get_value() for weight in (self.gate_proj, self.up_proj, self.down_proj))
        whole = PartitionSpec()
        cut = tuple(
            LayerOfStack(PartitionSpec(None, TENSOR), whole)  # pyright: ignore[reportArgumentType]
            if isinstance(stack, LayerOfStack)
            else PartitionSpec(TENSOR)
            for stack in stacks
        )
        return per_shard(self._mix_own, (whole, whole, whole, cut), whole)(x, weights, experts, stacks)

    def _mix_own(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T chosen"],
        experts: Int32[Array, "T chosen"],
        stacks: tuple[LayerOfStack | Array, ...],
    ) -> Float[Array, "T D"]:
        """`_mix` by a shard that holds some of the experts: rows of others go last and count for nothing."""
        num_rows, chosen = experts.shape
        gate, up, down = (stacked_groups(stack) for stack in stacks)
        first = shard_index() * gate.count
        flat = (experts - first).reshape(-1)
        flat = jnp.where((flat >= 0) & (flat < gate.count), flat, gate.count)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.zeros(gate.count, jnp.int32).at[flat].add(1, mode="drop")
        inner = gated_product(
            x[order // chosen],
            gate.matrices,
            up.matrices,
            sizes,
            activation=self.activation,
            first_group=gate.first,
        )
        outputs = product(inner, down.matrices, sizes, first_group=down.first)
        place = jnp.arange(order.size, dtype=jnp.int32)
        back = jnp.zeros_like(place).at[order].set(place, unique_indices=True).reshape(num_rows, chosen)
        # Choice by choice, so that the compiler reads the outputs where they lie instead of gathering them first.
        mixed = jnp.zeros(x.shape, jnp.float32)
        for choice in range(chosen):
            mixed += weights[:, choice, None] * outputs[back[:, choice]].astype(jnp.float32)
        return sum_over_shards(mixed).astype(x.dtype)
