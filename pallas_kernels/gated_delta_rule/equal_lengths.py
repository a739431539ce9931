"""The gated delta rule over sequences of one length: loops of known length, so that it can be differentiated.

The kernels and the packed form follow lengths that are known on the device only, which reverse-mode differentiation
cannot; training has no such lengths.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gated_delta_rule.chunked import advance_state, solve_chunks
from pallas_kernels.gated_delta_rule.chunks import CHUNK, decay_within
from pallas_kernels.gated_delta_rule.reference import scaled_queries_and_keys


def gated_delta_rule_equal_lengths(
    queries: Float[Array, "B L Hk dk"],
    keys: Float[Array, "B L Hk dk"],
    values: Float[Array, "B L Hv dv"],
    log_decay: Float[Array, "B L Hv"],
    strength: Float[Array, "B L Hv"],
) -> Float[Array, "B L Hv dv"]:
    """Every row's output, float32, each sequence from an empty state; arguments as of `gated_delta_rule`."""
    batch, length, value_heads, value_dim = values.shape
    key_heads, key_dim = keys.shape[2:]
    num_chunks = -(-length // CHUNK)

    def chunked(x: Array) -> Array:
        """[B, L, H, ...] to [chunks, B, H, chunk, ...], float32; zeros after the last row leave the state alone."""
        padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, num_chunks * CHUNK - length), *((0, 0),) * (x.ndim - 2)))
        cut = padded.reshape(batch, num_chunks, CHUNK, *x.shape[2:])
        return jnp.moveaxis(cut, (1, 3), (0, 2))

    def grouped(x: Array) -> Array:
        """Value heads in groups that share a key head."""
        return x.reshape(*x.shape[:2], key_heads, value_heads // key_heads, *x.shape[3:])

    query, key = scaled_queries_and_keys(chunked(queries), chunked(keys), normalise=True)
    decay = decay_within(grouped(chunked(log_decay)), grouped(chunked(strength)))
    solved = solve_chunks(query, key, grouped(chunked(values)), decay)
    empty = jnp.zeros((batch, key_heads, value_heads // key_heads, key_dim, value_dim), jnp.float32)
    _, outputs = lax.scan(advance_state, empty, solved)
    outputs = outputs.reshape(num_chunks, batch, value_heads, CHUNK, value_dim)
    return jnp.moveaxis(outputs, (0, 2), (1, 3)).reshape(batch, num_chunks * CHUNK, value_heads, value_dim)[:, :length]
