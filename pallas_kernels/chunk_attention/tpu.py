"""Chunk attention on TPUs: the flash kernel of `causal_attention` over keys and values that lie in pages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention import tpu_flash
from pallas_kernels.causal_attention.key_rows import KeyRows
from pallas_kernels.causal_attention.tpu_flash import flash_attention, tile_sizes, tile_table
from pallas_kernels.chunk_attention.rows import ALIGNMENT, ChunkRows


def unsupported(heads: int, kv_heads: int, head_dim: int, page: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    sublanes = 32 // jnp.dtype(dtype).itemsize  # rows of a tile of the chip's memory
    if page < sublanes or page & (page - 1):
        return f"pages have {page} rows; it takes powers of two from {sublanes}"
    return tpu_flash.unsupported(heads, kv_heads, head_dim, dtype)


def chunk_attention_mosaic_tpu(
    queries: Float[Array, "C H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_tables: Int32[Array, "R max_pages"],
    row_start: Int32[Array, " C"],
    rows: ChunkRows,
    *,
    scale: float,
) -> Float[Array, "C H d"]:
    """Outputs of every row; see `chunk_attention`.

    Raises:
        ValueError: a dtype, head size, group or page size that the kernel does not take.
    """
    num_rows, heads, head_dim = queries.shape
    kv_heads, page = key_pages.shape[1:3]
    reason = unsupported(heads, kv_heads, head_dim, page, key_pages.dtype)
    if reason is not None:
        raise ValueError(f"chunk_attention: backend 'mosaic_tpu' cannot run this: {reason}; use backend='reference'")
    tile, step_keys = tile_sizes(heads // kv_heads, page_tables.shape[1] * page, queries.dtype)
    tile, step_keys = min(tile, ALIGNMENT), max(step_keys, page)
    padded = -(-num_rows // tile) * tile
    queries = jnp.pad(queries, ((0, padded - num_rows), (0, 0), (0, 0))).swapaxes(0, 1)
    starts = jnp.pad(row_start, (0, padded - num_rows))
    request, row, stop = rows.of_places(jnp.arange(0, padded, tile, dtype=jnp.int32))
    outputs, _ = flash_attention(
        tile_table(starts, KeyRows(row, stop, request), tile, step_keys),
        starts,
        queries.reshape(kv_heads, -1, padded, head_dim),
        key_pages,
        value_pages,
        page_tables,
        tile=tile,
        step_keys=step_keys,
        scale=scale,
        return_lse=False,
    )
    return outputs.reshape(heads, padded, head_dim)[:, :num_rows].swapaxes(0, 1)
