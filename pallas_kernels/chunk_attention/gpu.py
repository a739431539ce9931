"""Chunk attention on Hopper GPUs: the flash kernel of `causal_attention` over keys and values that lie in pages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention import gpu_flash
from pallas_kernels.causal_attention.gpu_flash import PIECE, ROWS, Tiling, flash_attention, tile_table
from pallas_kernels.causal_attention.key_rows import KeyRows
from pallas_kernels.chunk_attention.rows import ALIGNMENT, ChunkRows


def unsupported(heads: int, kv_heads: int, head_dim: int, page: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if page % PIECE or page & (page - 1):
        return f"pages have {page} rows; it takes powers of two from {PIECE}"
    return gpu_flash.unsupported(heads, kv_heads, head_dim, dtype)


def default_tiling(head_dim: int) -> Tiling:
    """The tiling of `causal_attention`, with tiles of as many rows as requests are aligned to."""
    return gpu_flash.default_tiling(head_dim)._replace(warpgroups=ALIGNMENT // ROWS)


def chunk_attention_mosaic_gpu(
    queries: Float[Array, "C H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_tables: Int32[Array, "R max_pages"],
    row_start: Int32[Array, " C"],
    rows: ChunkRows,
    *,
    scale: float,
    tiling: Tiling | None = None,
    interpretable: bool = False,
) -> Float[Array, "C H d"]:
    """Outputs of every row; see `chunk_attention`, and `flash_attention` for `interpretable`.

    Raises:
        ValueError: a dtype, head size or page size that the kernel does not take.
    """
    num_rows, heads, head_dim = queries.shape
    kv_heads, page = key_pages.shape[1:3]
    reason = unsupported(heads, kv_heads, head_dim, page, key_pages.dtype)
    if reason is not None:
        raise ValueError(f"chunk_attention: backend 'mosaic_gpu' cannot run this: {reason}; use backend='reference'")
    tiling = tiling or default_tiling(head_dim)
    if scale < 0:
        queries, scale = -queries, -scale
    queries = jnp.pad(queries, ((0, -num_rows % ROWS), (0, 0), (0, 0)))
    starts = jnp.pad(row_start, (0, -num_rows % ALIGNMENT))
    request, row, stop = rows.of_places(jnp.arange(0, starts.shape[0], ROWS, dtype=jnp.int32))
    outputs, _ = flash_attention(
        tile_table(starts, KeyRows(row, stop, request), tiling),
        starts,
        queries,
        key_pages,
        value_pages,
        _last_values(value_pages, page_tables, rows, tiling.keys),
        page_tables,
        scale=scale,
        return_lse=False,
        tiling=tiling,
        interpretable=interpretable,
    )
    return outputs[:num_rows]


def _last_values(
    value_pages: Float[Array, "P KV page d"], page_tables: Int32[Array, "R max_pages"], rows: ChunkRows, keys: int
) -> Float[Array, "R keys KV d"]:
    """Every request's values from its last whole step on, zero from its end on."""
    page, max_pages = value_pages.shape[2], page_tables.shape[1]
    stop = (rows.first_rows + rows.counts)[:, None]
    row = stop // keys * keys + jnp.arange(keys, dtype=jnp.int32)
    ids = jnp.take_along_axis(page_tables, jnp.minimum(row // page, max_pages - 1), axis=1)
    values = value_pages.at[ids, :, row % page].get(mode="clip")
    return jnp.where((row < stop)[:, :, None, None], values, 0)
