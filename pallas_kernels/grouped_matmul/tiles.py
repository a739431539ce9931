"""Grouped matrix products in plain XLA at the cost of the rows that there are: tile by tile, each within one group.

For machines without a kernel. XLA's own ragged product multiplies every row with every group there.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.reference import ACTIVATIONS

TILE = 64  # rows


def grouped_matmul_tiles(
    rows: Float[Array, "M K"],
    weights: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
) -> Float[Array, "M N"]:
    """Rows of group g times `weights[first_group + g]`, sums in float32; see `grouped_matmul`."""
    return _over_tiles(rows, (weights,), group_sizes, first_group, lambda product: product)


def grouped_gated_matmul_tiles(
    rows: Float[Array, "M K"],
    gate: Float[Array, "groups K N"],
    up: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    *,
    activation: str,
) -> Float[Array, "M N"]:
    """`activation(rows @ gate) * (rows @ up)` by group; see `grouped_gated_matmul`."""
    function = ACTIVATIONS[activation]
    return _over_tiles(rows, (gate, up), group_sizes, first_group, lambda g, u: function(g) * u)


def _over_tiles(
    rows: Float[Array, "M K"],
    weights: tuple[Float[Array, "groups K N"], ...],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    combine: Callable[..., Array],
) -> Float[Array, "M N"]:
    num_rows, num_groups = rows.shape[0], group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    tiles_of = (group_sizes + TILE - 1) // TILE
    tile_ends = jnp.cumsum(tiles_of, dtype=jnp.int32)
    # A tile may reach past its group and past the last row; what lies there is read and thrown away.
    padded = jnp.pad(rows, ((0, TILE), (0, 0)))

    def one_tile(tile: Array, result: Array) -> Array:
        group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
        group = jnp.minimum(group, num_groups - 1).astype(jnp.int32)
        within = tile - (tile_ends[group] - tiles_of[group])
        first = ends[group] - group_sizes[group] + within * TILE
        own = first + jnp.arange(TILE, dtype=jnp.int32) < ends[group]
        part = lax.dynamic_slice_in_dim(padded, first, TILE)
        products = [
            jnp.dot(
                part,
                lax.dynamic_index_in_dim(array, first_group + group, 0, keepdims=False),
                preferred_element_type=jnp.float32,
            )
            for array in weights
        ]
        before = lax.dynamic_slice_in_dim(result, first, TILE)
        after = jnp.where(own[:, None], combine(*products).astype(rows.dtype), before)
        return lax.dynamic_update_slice_in_dim(result, after, first, axis=0)

    result = jnp.zeros((num_rows + TILE, weights[0].shape[2]), rows.dtype)
    return lax.fori_loop(0, tile_ends[-1], one_tile, result)[:num_rows]
