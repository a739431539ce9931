"""Block-sparse causal attention in plain jnp: the definition of the operation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def block_sparse_attention_reference(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, " B+1"],
    block_mask: Bool[Array, "H Q K"],
    columns: Int32[Array, "H B C"] | None,
    *,
    block_size: int,
    scale: float,
) -> Float[Array, "T H d"]:
    """See `block_sparse_attention`. Work grows with H T^2, whatever is seen; memory with H T times the block size."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, num_requests = keys.shape[1], cu_seqlens.shape[0] - 1
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    live = rows < cu_seqlens[-1]
    request = jnp.searchsorted(cu_seqlens[1:], rows, side="right", method="compare_all")
    request = jnp.minimum(request, num_requests - 1)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    cu_blocks = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((lengths + block_size - 1) // block_size)])
    block = jnp.where(live, cu_blocks[request] + (rows - cu_seqlens[request]) // block_size, 0)
    is_column = jnp.zeros((num_heads, num_rows), bool)
    if columns is not None:
        is_some = columns < jnp.iinfo(jnp.int32).max
        at = jnp.where(is_some, cu_seqlens[:-1, None] + columns, num_rows).reshape(num_heads, -1)
        is_column = is_column.at[jnp.arange(num_heads)[:, None], at].set(True, mode="drop")
    # Padding may hold NaN, and NaN * 0 is NaN.
    keys, values = (jnp.where(live[:, None, None], array, 0) for array in (keys, values))

    def attend(own: Int32[Array, " few"]) -> Float[Array, "few H d"]:
        query = queries[own].reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = jnp.einsum("rkgd,tkd->kgrt", query, keys, preferred_element_type=jnp.float32) * scale
        scores = scores.reshape(num_heads, -1, num_rows)
        of_block = block_mask[:, block[own]][:, :, block] | (block[own][:, None] == block[None, :])
        possible = (rows[None, :] <= own[:, None]) & (request[own][:, None] == request[None, :]) & live[None, :]
        visible = ((of_block | is_column[:, None]) & possible) | (rows[None, :] == own[:, None])
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(values.dtype)
        weights = weights.reshape(num_kv_heads, -1, *weights.shape[1:])
        output = jnp.einsum("kgrt,tkd->rkgd", weights, values, preferred_element_type=jnp.float32)
        return output.reshape(-1, num_heads, head_dim).astype(queries.dtype)

    padded = -(-num_rows // block_size) * block_size
    own = jnp.minimum(jnp.arange(padded, dtype=jnp.int32), num_rows - 1).reshape(-1, block_size)
    outputs = jax.lax.map(attend, own).reshape(padded, num_heads, head_dim)[:num_rows]
    return jnp.where(live[:, None, None], outputs, 0)
