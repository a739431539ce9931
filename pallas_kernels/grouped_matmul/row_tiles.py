"""The row tiles of the Hopper kernel: which rows each covers, and whose they are."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

ALIGNMENT = 8  # rows at whose multiples TMA reaches the layout that wgmma reads
TILE_ROWS = 128
ZEROS = -1  # in place of a group: rows of no group


def tile_table(group_sizes: Int32[Array, " G"], first_group: Int32[Array, ""], rows: int) -> Int32[Array, "tiles+1 4"]:
    """Row tiles of every group with rows, and of the rows after the last one.

    Columns: first row, first and end of the rows to store, matrix or `ZEROS`. The last row holds how many
    tiles there are, and how many of them belong to groups.
    """
    groups = group_sizes.shape[0] + 1
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    ends = jnp.concatenate([ends, jnp.full(1, rows, jnp.int32)])
    aligned = starts // ALIGNMENT * ALIGNMENT
    tiles = jnp.where(ends > starts, (ends - aligned + TILE_ROWS - 1) // TILE_ROWS, 0)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    slots = (rows + (ALIGNMENT - 1) * groups) // TILE_ROWS + groups
    tile = jnp.arange(slots, dtype=jnp.int32)
    group = (tile[:, None] >= tile_ends[None, :]).sum(-1, dtype=jnp.int32)
    group = jnp.minimum(group, groups - 1)
    first_row = aligned[group] + (tile - (tile_ends - tiles)[group]) * TILE_ROWS
    weights = jnp.where(group == groups - 1, ZEROS, group + first_group)
    table = jnp.stack([first_row, starts[group], ends[group], weights], axis=1)
    totals = jnp.concatenate([tile_ends[-1:], tile_ends[-2:-1], jnp.zeros(2, jnp.int32)])
    return jnp.concatenate([table, totals[None]]).astype(jnp.int32)
