"""Causal attention on Hopper GPUs: the flash kernel of `gpu_flash` over packed rows, whose keys are the rows' own."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention.gpu_flash import (
    ROWS,
    Tiling,
    default_tiling,
    flash_attention,
    tile_table,
    unsupported,
)
from pallas_kernels.causal_attention.key_rows import KeyRows


def causal_attention_mosaic_gpu(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    scale: float,
    return_lse: bool = False,
    tiling: Tiling | None = None,
    interpretable: bool = False,
) -> tuple[Float[Array, "T H d"], Float[Array, "T H"] | None]:
    """Outputs and, where asked for, log-sum-exps; see `causal_attention`, and `flash_attention` for `interpretable`.

    Raises:
        ValueError: a dtype or head size that the kernel does not take.
    """
    rows, heads, head_dim = queries.shape
    reason = unsupported(heads, keys.shape[1], head_dim, queries.dtype)
    if reason is not None:
        raise ValueError(f"causal_attention: backend 'mosaic_gpu' cannot run this: {reason}; use backend='reference'")
    tiling = tiling or default_tiling(head_dim)
    if scale < 0:
        queries, scale = -queries, -scale
    padding = max(rows + -rows % ROWS, tiling.keys) - rows  # at least one whole copy of keys
    if padding:
        queries, keys, values = (jnp.pad(x, ((0, padding), (0, 0), (0, 0))) for x in (queries, keys, values))
    tile_rows = tiling.warpgroups * ROWS
    starts = jnp.pad(row_start, (0, -(rows + padding) % tile_rows + padding))
    first = jnp.arange(0, starts.shape[0], ROWS, dtype=jnp.int32)
    groups = KeyRows(first, jnp.broadcast_to(count, first.shape), jnp.zeros_like(first))
    row = count // tiling.keys * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
    last_values = jnp.where((row < count)[:, None, None], jnp.take(values, row, axis=0, mode="clip"), 0)
    outputs, lse = flash_attention(
        tile_table(starts, groups, tiling),
        starts,
        queries,
        keys,
        values,
        last_values[None],
        scale=scale,
        return_lse=return_lse,
        tiling=tiling,
        interpretable=interpretable,
    )
    return outputs[:rows], None if lse is None else lse[:, :rows].T
