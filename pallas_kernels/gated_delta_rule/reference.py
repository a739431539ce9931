"""The gated delta rule in plain jnp, float32: the definition of the operation, row by row."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

NORM_EPSILON = 1e-6


def unit_length(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Rows divided by their length, float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def scaled_queries_and_keys(
    queries: Float[Array, "T Hk dk"], keys: Float[Array, "T Hk dk"], normalise: bool
) -> tuple[Float[Array, "T Hk dk"], Float[Array, "T Hk dk"]]:
    """Queries and keys as the recurrence takes them, float32: of unit length, queries x dk**-0.5, or as they are."""
    if normalise:
        return unit_length(queries) * keys.shape[-1] ** -0.5, unit_length(keys)
    return queries.astype(jnp.float32), keys.astype(jnp.float32)


def gated_delta_step(
    queries: Float[Array, "B Hk dk"],
    keys: Float[Array, "B Hk dk"],
    values: Float[Array, "B Hv dv"],
    log_decay: Float[Array, "B Hv"],
    strength: Float[Array, "B Hv"],
    state: Float[Array, "B Hv dk dv"],
    *,
    normalise: bool = True,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"]]:
    """One row of every request: outputs and new states, both float32; arguments as of `gated_delta_rule`."""
    queries, keys = scaled_queries_and_keys(queries, keys, normalise)
    batch, value_heads, key_dim, value_dim = state.shape
    # Value heads in groups that share a key head, so that no query or key is repeated.
    grouped = (batch, keys.shape[1], value_heads // keys.shape[1])
    decayed = state.astype(jnp.float32) * jnp.exp(log_decay.astype(jnp.float32))[..., None, None]
    decayed = decayed.reshape(*grouped, key_dim, value_dim)
    wanted = values.astype(jnp.float32).reshape(*grouped, value_dim)
    error = (wanted - jnp.einsum("bhgkv,bhk->bhgv", decayed, keys)) * strength.reshape(*grouped, 1)
    new = decayed + keys[:, :, None, :, None] * error[..., None, :]
    outputs = jnp.einsum("bhgkv,bhk->bhgv", new, queries)
    return outputs.reshape(batch, value_heads, value_dim), new.reshape(state.shape)


def gated_delta_rule_reference(
    queries: Float[Array, "T Hk dk"],
    keys: Float[Array, "T Hk dk"],
    values: Float[Array, "T Hv dv"],
    log_decay: Float[Array, "T Hv"],
    strength: Float[Array, "T Hv"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    initial_state: Float[Array, "B Hv dk dv"] | None,
    normalise: bool,
) -> tuple[Float[Array, "T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Outputs of every row and final states, float32: one step of the recurrence after another."""
    rows, value_heads, value_dim = values.shape
    batch = cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = jnp.zeros((batch, value_heads, keys.shape[2], value_dim), jnp.float32)
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = (row[:, None] >= cu_seqlens[None, 1:]).sum(-1, dtype=jnp.int32)

    def advance(states: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        owner, *arrays = row
        real = owner < batch
        arrays = [jnp.where(real, array, 0)[None] for array in arrays]
        output, state = gated_delta_step(*arrays, states[owner][None], normalise=normalise)
        return states.at[owner].set(state[0], mode="drop"), jnp.where(real, output[0], 0)

    states, outputs = jax.lax.scan(
        advance, initial_state.astype(jnp.float32), (owner, queries, keys, values, log_decay, strength)
    )
    return outputs, states
