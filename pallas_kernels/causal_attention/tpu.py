"""Causal attention on TPUs: the flash kernel of `tpu_flash` over packed rows, whose keys are the rows' own."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention.key_rows import KeyRows
from pallas_kernels.causal_attention.tpu_flash import flash_attention, tile_sizes, tile_table, unsupported


def causal_attention_mosaic_tpu(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    scale: float,
    return_lse: bool = False,
) -> tuple[Float[Array, "T H d"], Float[Array, "T H"] | None]:
    """Outputs and, where asked for, log-sum-exps; see `causal_attention`.

    Raises:
        ValueError: a dtype, head size or group that the kernel does not take.
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    reason = unsupported(heads, kv_heads, head_dim, queries.dtype)
    if reason is not None:
        raise ValueError(f"causal_attention: backend 'mosaic_tpu' cannot run this: {reason}; use backend='reference'")
    tile, step_keys = tile_sizes(heads // kv_heads, rows, queries.dtype)
    padded = -(-rows // max(tile, step_keys)) * max(tile, step_keys)
    queries, keys, values = (
        jnp.pad(array, ((0, padded - rows), (0, 0), (0, 0))).swapaxes(0, 1) for array in (queries, keys, values)
    )
    starts = jnp.pad(row_start, (0, padded - rows))
    first = jnp.arange(0, padded, tile, dtype=jnp.int32)
    tiles = KeyRows(first, jnp.broadcast_to(count, first.shape), jnp.zeros_like(first))
    outputs, lse = flash_attention(
        tile_table(starts, tiles, tile, step_keys),
        starts,
        queries.reshape(kv_heads, -1, padded, head_dim),
        keys,
        values,
        tile=tile,
        step_keys=step_keys,
        scale=scale,
        return_lse=return_lse,
    )
    outputs = outputs.reshape(heads, padded, head_dim)[:, :rows].swapaxes(0, 1)
    return outputs, None if lse is None else lse.reshape(heads, padded)[:, :rows].T
