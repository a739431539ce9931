"""Paged decode attention in plain jnp: the definition of the operation, and the path on machines without a kernel."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

TILE_ROWS = 256
# Stands for "masked" in scores. Finite, so that a row whose every key is masked yields no NaN from inf - inf.
MASKED = -1e30


def paged_attention_reference(
    queries: Float[Array, "B H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_table: Int32[Array, "R max_pages"],
    lengths: Int32[Array, " B"],
    first_visible: Int32[Array, " B"],
    first_request: Int32[Array, ""] | int = 0,
    *,
    scale: float,
) -> Float[Array, "B H d"]:
    """Outputs of every request; see `paged_attention`.

    Walks the pages in tiles, from the first visible row of any request to the longest request's end, with a running
    softmax: the work follows the real lengths, and nothing larger than one tile per request is gathered at a time.
    """
    batch, heads, head_dim = queries.shape
    page_table = lax.dynamic_slice_in_dim(page_table, first_request, batch)
    num_pages, kv_heads, page, _ = key_pages.shape
    tile_pages = min(max(TILE_ROWS // page, 1), page_table.shape[1])
    tile = tile_pages * page
    spare = -page_table.shape[1] % tile_pages
    table = jnp.pad(page_table, ((0, 0), (0, spare)), constant_values=num_pages)
    precision = lax.Precision.HIGHEST if key_pages.dtype == jnp.float32 else lax.Precision.DEFAULT
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, head_dim)

    def visit(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, weighted = carry
        ids = lax.dynamic_slice_in_dim(table, number * tile_pages, tile_pages, axis=1)
        row = number * tile + jnp.arange(tile, dtype=jnp.int32)
        visible = (row >= first_visible[:, None]) & (row < lengths[:, None])

        def gather(pages: Array) -> Array:
            taken = pages.at[ids].get(mode="fill", fill_value=0)
            taken = taken.swapaxes(2, 3).reshape(batch, tile, kv_heads, head_dim)
            # Rows that nobody sees may hold NaN, and 0 * NaN is NaN: the values go, not only their weights.
            return jnp.where(visible[:, :, None, None], taken, 0)

        keys, values = gather(key_pages), gather(value_pages)
        scores = jnp.einsum("bkgd,btkd->bkgt", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
        mask = visible[:, None, None, :]
        scores = jnp.where(mask, scores * scale, MASKED)
        higher = jnp.maximum(maximum, scores.max(-1))
        weights = jnp.where(mask, jnp.exp(scores - higher[..., None]), 0.0)
        shrink = jnp.exp(maximum - higher)
        update = jnp.einsum(
            "bkgt,btkd->bkgd",
            weights.astype(values.dtype),
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return higher, total * shrink + weights.sum(-1), weighted * shrink[..., None] + update

    shape = (batch, kv_heads, heads // kv_heads)
    empty = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    first = jnp.where(lengths > 0, first_visible, jnp.iinfo(jnp.int32).max).min() // tile
    stop = jnp.minimum((lengths.max() + tile - 1) // tile, table.shape[1] // tile_pages)
    _, total, weighted = lax.fori_loop(first, stop, visit, empty)
    output = weighted / jnp.where(total > 0, total, 1.0)[..., None]
    return output.reshape(batch, heads, head_dim).astype(queries.dtype)
