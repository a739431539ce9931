"""Grouped matrix products in plain jnp: the definition, and the same through XLA's own ragged product."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


def _loop_over_groups(rows, weights, group_sizes, first_group, combine):
    """Every group's product with all rows, of which its own are taken: exact and plain, and one group at a time."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    exact_rows = rows.astype(jnp.float32)

    def add_group(group, result):
        own = (row >= ends[group] - group_sizes[group]) & (row < ends[group])
        products = [
            jnp.dot(
                exact_rows,
                lax.dynamic_index_in_dim(array, first_group + group, 0, keepdims=False).astype(jnp.float32),
                precision=lax.Precision.HIGHEST,
            )
            for array in weights
        ]
        return jnp.where(own[:, None], combine(*products), result)

    result = jnp.zeros((rows.shape[0], weights[0].shape[2]), jnp.float32)
    return lax.fori_loop(0, group_sizes.shape[0], add_group, result).astype(rows.dtype)


def grouped_matmul_reference(
    rows: Float[Array, "M K"],
    weights: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
) -> Float[Array, "M N"]:
    """Rows of group g times `weights[first_group + g]` in float32; see `grouped_matmul`."""
    return _loop_over_groups(rows, (weights,), group_sizes, first_group, lambda product: product)


def grouped_gated_matmul_reference(
    rows: Float[Array, "M K"],
    gate: Float[Array, "groups K N"],
    up: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    *,
    activation: str,
) -> Float[Array, "M N"]:
    """`activation(rows @ gate) * (rows @ up)` by group in float32; see `grouped_gated_matmul`."""
    function = ACTIVATIONS[activation]
    return _loop_over_groups(rows, (gate, up), group_sizes, first_group, lambda g, u: function(g) * u)


def grouped_matmul_xla(
    rows: Float[Array, "M K"],
    weights: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
) -> Float[Array, "M N"]:
    """The same by `lax.ragged_dot` on the groups' slice of the weights.

    XLA spells it out on CPUs and GPUs: every row is copied and multiplied G times, by zero for all groups but its own,
    so that the weights must be finite even of groups without rows.
    """
    return _ragged_dot(rows, weights, group_sizes, first_group).astype(rows.dtype)


def grouped_gated_matmul_xla(
    rows: Float[Array, "M K"],
    gate: Float[Array, "groups K N"],
    up: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    *,
    activation: str,
) -> Float[Array, "M N"]:
    """The gated product by two calls of `lax.ragged_dot`; see `grouped_gated_matmul`."""
    gated = ACTIVATIONS[activation](_ragged_dot(rows, gate, group_sizes, first_group))
    return (gated * _ragged_dot(rows, up, group_sizes, first_group)).astype(rows.dtype)


def _ragged_dot(rows, weights, group_sizes, first_group):
    own = lax.dynamic_slice_in_dim(weights, first_group, group_sizes.shape[0])
    product = lax.ragged_dot(rows, own, group_sizes, preferred_element_type=jnp.float32)
    return zero_after(product, group_sizes)


def zero_after(product: Float[Array, "M N"], group_sizes: Int32[Array, " G"]) -> Float[Array, "M N"]:
    """Zeros in the rows that belong to no group, whatever a product left there."""
    row = jnp.arange(product.shape[0], dtype=jnp.int32)
    return jnp.where((row < group_sizes.sum())[:, None], product, 0)
