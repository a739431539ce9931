"""The device's side of prefix reuse: pages copied, rows and recurrent states saved and restored.

A page of rows holds what `page_size` tokens hand on, cut into as many key and value pages as a row needs: so rows lie
in the pool beside the pages of their tokens, and on a mesh every shard keeps its part.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.cache.pools import CachePools
from uniprefill_jax.engine.prefill_steps import NOWHERE


def copy_pages(pools: CachePools, sources: Int32[Array, " layers"], targets: Int32[Array, " layers"]) -> CachePools:
    """Copy pages; a page number out of range stands for none."""

    def copied(pages: Array) -> Array:
        return pages.at[targets].set(pages.at[sources].get(mode="fill", fill_value=0), mode="drop")

    return replace(pools, keys=copied(pools.keys), values=copied(pools.values))


def save_rows(
    pools: CachePools, x: Float[Array, "R D"], columns: Int32[Array, " n"], ids: Int32[Array, "n row_pages"]
) -> CachePools:
    """Write the rows of pages of tokens `columns` to the pages `ids`; those out of range are none."""
    _, heads, page, head_dim = pools.keys.shape
    rows = jnp.where(columns < x.shape[0], columns * page, NOWHERE - page)[:, None] + jnp.arange(page)
    taken = x.at[rows].get(mode="fill", fill_value=0).astype(pools.keys.dtype)
    wide = ids.shape[1] * 2 * heads * head_dim
    taken = jnp.pad(taken, ((0, 0), (0, 0), (0, wide - x.shape[1])))
    # [n, page, row pages, keys or values, heads, d] -> keys and values as the pool holds pages.
    parts = taken.reshape(len(columns), page, ids.shape[1], 2, heads, head_dim).transpose(3, 0, 2, 4, 1, 5)
    keys, values = parts.reshape(2, -1, heads, page, head_dim)
    places = ids.reshape(-1)
    return replace(
        pools,
        keys=pools.keys.at[places].set(keys, mode="drop"),
        values=pools.values.at[places].set(values, mode="drop"),
    )


def restore_rows(
    pools: CachePools, x: Float[Array, "R D"], ids: Int32[Array, "n row_pages"], count: Int32[Array, ""]
) -> Float[Array, "R D"]:
    """The buffer with its first `count` rows read from pages, one row of `ids` for every page of tokens."""
    _, heads, page, head_dim = pools.keys.shape
    places = ids.reshape(-1)
    parts = [pages.at[places].get(mode="fill", fill_value=0) for pages in (pools.keys, pools.values)]
    wide = jnp.stack(parts).reshape(2, *ids.shape, heads, page, head_dim).transpose(1, 4, 2, 0, 3, 5)
    rows = wide.reshape(ids.shape[0] * page, -1)[: x.shape[0], : x.shape[1]].astype(x.dtype)
    rows = jnp.pad(rows, ((0, x.shape[0] - rows.shape[0]), (0, 0)))
    return jnp.where((jnp.arange(x.shape[0]) < count)[:, None], rows, x)


def copy_state(pools: CachePools, source: Int32[Array, ""], target: Int32[Array, ""]) -> CachePools:
    """Copy the recurrent state of a slot, of every linear layer, to another."""
    return replace(
        pools,
        conv=pools.conv.at[:, target].set(pools.conv[:, source], mode="drop"),
        recurrent=pools.recurrent.at[:, target].set(pools.recurrent[:, source], mode="drop"),
    )
