"""Chunk attention in plain jnp: the definition of the operation, and the path on machines without a kernel."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.chunk_attention.rows import ALIGNMENT, ChunkRows

KEY_TILE = 256
MASKED = -1e30  # finite, so that a row whose every key is masked yields no NaN from inf - inf


def chunk_attention_reference(
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

    Tiles of keys outside a query tile's ranges cost nothing; scores, softmax statistics and sums are float32.
    """
    num_rows, heads, head_dim = queries.shape
    num_pages, kv_heads, page, _ = key_pages.shape
    tile_pages = max(KEY_TILE // page, 1)
    key_tile = tile_pages * page
    tables = jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % tile_pages)), constant_values=num_pages)
    # A single request has no neighbours in its tiles, and larger ones are faster.
    query_tile = min(ALIGNMENT if page_tables.shape[0] > 1 else 2 * ALIGNMENT, num_rows)
    padded = -num_rows % query_tile
    precision = lax.Precision.HIGHEST if key_pages.dtype == jnp.float32 else lax.Precision.DEFAULT

    tiles = jnp.pad(queries, ((0, padded), (0, 0), (0, 0)))
    tiles = tiles.reshape(-1, query_tile, kv_heads, heads // kv_heads, head_dim)
    request, row, stop = rows.of_places(jnp.arange(num_rows + padded, dtype=jnp.int32))
    lasts = jnp.where(row < stop, row, -1).reshape(-1, query_tile)
    firsts = jnp.pad(row_start, (0, padded)).reshape(-1, query_tile)

    def query_block(operands: tuple[Array, Array, Array, Array]) -> Array:
        query, first, last, request = operands

        def visit(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            maximum, total, weighted = carry
            ids = lax.dynamic_slice(tables, (request, number * tile_pages), (1, tile_pages))[0]
            row = number * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
            visible = (row >= first[:, None]) & (row <= last[:, None])
            real = (row <= last.max())[:, None, None]

            def gather(pages: Array) -> Array:
                taken = pages.at[ids].get(mode="fill", fill_value=0)
                taken = taken.swapaxes(1, 2).reshape(key_tile, kv_heads, head_dim)
                # Rows past the last visible one may hold NaN, and 0 * NaN is NaN.
                return jnp.where(real, taken, 0)

            scores = jnp.einsum(
                "qkgd,tkd->kgqt", query, gather(key_pages), precision=precision, preferred_element_type=jnp.float32
            )
            scores = jnp.where(visible, scores * scale, MASKED)
            higher = jnp.maximum(maximum, scores.max(-1))
            weights = jnp.where(visible, jnp.exp(scores - higher[..., None]), 0.0)
            shrink = jnp.exp(maximum - higher)
            update = jnp.einsum(
                "kgqt,tkd->kgqd",
                weights.astype(value_pages.dtype),
                gather(value_pages),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return higher, total * shrink + weights.sum(-1), weighted * shrink[..., None] + update

        shape = (kv_heads, heads // kv_heads, query_tile)
        empty = (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )
        start = jnp.where(last >= first, first, jnp.iinfo(jnp.int32).max).min() // key_tile
        stop = jnp.minimum(last.max() // key_tile + 1, tables.shape[1] // tile_pages)
        _, total, weighted = lax.fori_loop(start, stop, visit, empty)
        output = weighted / jnp.where(total > 0, total, 1.0)[..., None]
        return output.transpose(2, 0, 1, 3).astype(queries.dtype)

    outputs = lax.map(query_block, (tiles, firsts, lasts, request[::query_tile]))
    return outputs.reshape(-1, heads, head_dim)[:num_rows]
