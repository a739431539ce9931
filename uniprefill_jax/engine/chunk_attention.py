"""Attention of a chunk of one request's rows over that request's pages, the chunk's own rows among them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

QUERY_TILE = 256
KEY_TILE = 256
MASKED = -1e30


def chunk_attention(
    queries: Float[Array, "C H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_table: Int32[Array, " max_pages"],
    first_visible: Int32[Array, " C"],
    last_visible: Int32[Array, " C"],
    *,
    scale: float,
) -> Float[Array, "C H d"]:
    """softmax(scale * q k^T) v over each row's visible range [first_visible, last_visible] of the request's rows.

    Row i of the request lies in page ``page_table[i // page]`` at place ``i % page``; query head h reads KV head
    ``h // (H / KV)``. A row with an empty range (last before first) is padding and gives zeros. Rows that nobody sees
    are ignored, whatever they hold. Tiles of keys outside a query tile's ranges cost nothing; scores and softmax
    statistics are float32, the result has the dtype of the queries.
    """
    num_rows, heads, head_dim = queries.shape
    num_pages, kv_heads, page, _ = key_pages.shape
    group = heads // kv_heads
    tile_pages = max(KEY_TILE // page, 1)
    key_tile = tile_pages * page
    table = jnp.pad(page_table, (0, -page_table.shape[0] % tile_pages), constant_values=num_pages)
    query_tile = min(QUERY_TILE, num_rows)
    padded = -num_rows % query_tile
    precision = lax.Precision.HIGHEST if key_pages.dtype == jnp.float32 else lax.Precision.DEFAULT

    tiles = jnp.pad(queries, ((0, padded), (0, 0), (0, 0))).reshape(-1, query_tile, kv_heads, group, head_dim)
    firsts = jnp.pad(first_visible, (0, padded), constant_values=0).reshape(-1, query_tile)
    lasts = jnp.pad(last_visible, (0, padded), constant_values=-1).reshape(-1, query_tile)

    def query_block(operands: tuple[Array, Array, Array]) -> Array:
        query, first, last = operands

        def visit(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            maximum, total, weighted = carry
            ids = lax.dynamic_slice_in_dim(table, number * tile_pages, tile_pages)
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

        shape = (kv_heads, group, query_tile)
        empty = (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )
        start = jnp.where(last >= first, first, jnp.iinfo(jnp.int32).max).min() // key_tile
        stop = jnp.minimum(last.max() // key_tile + 1, table.shape[0] // tile_pages)
        _, total, weighted = lax.fori_loop(start, stop, visit, empty)
        output = weighted / jnp.where(total > 0, total, 1.0)[..., None]
        return output.transpose(2, 0, 1, 3).astype(queries.dtype)

    with jax.named_scope("chunk_attention"):
        outputs = lax.map(query_block, (tiles, firsts, lasts))
        return outputs.reshape(-1, heads, head_dim)[:num_rows]
