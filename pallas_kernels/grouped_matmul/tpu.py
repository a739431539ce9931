"""Grouped matrix products on TPUs (Mosaic TPU), by the kernel that ships with JAX (megablox).

It takes the weights of all groups there are and skips those without rows, so a whole model's stack goes in as it is,
with sizes of zero around the groups in hand: the compiler then keeps no copy of a layer's weights, which it does where
`lax.ragged_dot` is given a slice (128 MiB for 64 experts of 2048 x 512, compiled for v5e). Both compile for v5e, v5p
and v6e. No TPU was there to measure either.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.reference import ACTIVATIONS, zero_after

TILE_ROWS = 128
LARGEST_INNER, LARGEST_COLUMNS = 2048, 512  # of a tile of the weights: 2 MiB, and it stays for all rows of a group
LANES = 128


def unsupported(inner: int, columns: int, dtype: jnp.dtype, activation: str | None = None) -> str | None:
    """Why the kernel cannot take such a product, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype is {dtype}; it takes bfloat16 and float32"
    if inner % LANES or columns % LANES or not inner or not columns:
        return f"weights are {inner} x {columns}; both must be multiples of {LANES}"
    if activation is not None and activation not in ACTIVATIONS:
        return f"activation is {activation!r}; it takes {', '.join(map(repr, ACTIVATIONS))}"
    return None


def grouped_matmul_mosaic_tpu(
    rows: Float[Array, "M K"],
    weights: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
) -> Float[Array, "M N"]:
    """Rows of group g times `weights[first_group + g]`; see `grouped_matmul`.

    Raises:
        ValueError: a dtype or sizes that the kernel does not take.
    """
    _refuse(unsupported(weights.shape[1], weights.shape[2], rows.dtype), "grouped_matmul")
    return _product(rows, weights, group_sizes, first_group, rows.dtype)


def grouped_gated_matmul_mosaic_tpu(
    rows: Float[Array, "M K"],
    gate: Float[Array, "groups K N"],
    up: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    *,
    activation: str,
) -> Float[Array, "M N"]:
    """`activation(rows @ gate) * (rows @ up)` by group, in two passes over the rows; see `grouped_gated_matmul`.

    Raises:
        ValueError: a dtype, sizes or an activation that the kernel does not take.
    """
    _refuse(unsupported(gate.shape[1], gate.shape[2], rows.dtype, activation), "grouped_gated_matmul")
    gated = ACTIVATIONS[activation](_product(rows, gate, group_sizes, first_group, jnp.float32))
    return (gated * _product(rows, up, group_sizes, first_group, jnp.float32)).astype(rows.dtype)


def _refuse(reason: str | None, name: str) -> None:
    if reason is not None:
        raise ValueError(f"{name}: backend 'mosaic_tpu' cannot run this: {reason}; use backend='xla'")


def _product(rows, weights, group_sizes, first_group, dtype):
    count, inner = rows.shape
    padding = -count % TILE_ROWS
    if padding:
        rows = jnp.pad(rows, ((0, padding), (0, 0)))
    sizes = lax.dynamic_update_slice(jnp.zeros(weights.shape[0], jnp.int32), group_sizes, (first_group,))
    tiling = (TILE_ROWS, min(inner, LARGEST_INNER), min(weights.shape[2], LARGEST_COLUMNS))
    product = gmm(rows, weights, sizes, preferred_element_type=dtype, tiling=tiling)
    return zero_after(product[:count], group_sizes)
