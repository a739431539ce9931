"""Code that runs once per tensor shard: kernels see the heads or experts of their shard only.

The mesh is the one in force while a program is traced (`jax.set_mesh`). Without one, or with one shard, functions run
as they are.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from uniprefill_jax.parallel.mesh import TENSOR


def tensor_shards() -> int:
    """Tensor shards of the mesh in force; 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(TENSOR, 1)


def per_shard(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on every tensor shard's part of its arguments; outputs said to be replicated must be so."""
    mesh = jax.sharding.get_abstract_mesh()
    if tensor_shards() == 1 or AxisType.Manual in mesh.axis_types:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def replicated(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of replicated arrays on every shard alike: how a kernel runs on what is not cut."""
    return per_shard(function, PartitionSpec(), PartitionSpec())


def whole(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The array, kept whole on every shard: for what is small and would be cut and put together again."""
    if tensor_shards() == 1 or _inside():
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec())


def gathered(array: Shaped[Array, "*rows columns"]) -> Shaped[Array, "*rows columns"]:
    """An array whose last axis the shards made in parts (logits), whole on every shard.

    Said in two steps, or the compiler may gather the weights behind it instead.
    """
    if tensor_shards() == 1 or _inside():
        return array
    cut = PartitionSpec(*(None,) * (array.ndim - 1), TENSOR)
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(array, cut), PartitionSpec())


def shard_index() -> Int32[Array, ""] | int:
    """Which tensor shard this is, inside `per_shard`; 0 where nothing is cut."""
    return jax.lax.axis_index(TENSOR) if _inside() else 0


def over_heads(
    function: Callable[..., Any],
    queries: Shaped[Array, "..."],
    cached: tuple[Shaped[Array, "... KV d"], ...],
    *others: Any,
    head_axis: int,
    out_specs: Any,
) -> Any:
    """`function(queries, *cached, *others)` with the query heads, and the KV heads that they read, dealt out.

    Where there are fewer KV heads than shards every shard holds them all and reads one. `others` are replicated.
    """
    shards = tensor_shards()
    kv_heads = cached[0].shape[-2]
    cut = kv_heads % shards == 0

    def on_shard(queries: Array, cached: tuple[Array, ...], *others: Any) -> Any:
        if not cut:
            first = shard_index() * kv_heads // shards
            cached = tuple(jax.lax.dynamic_slice_in_dim(array, first, 1, axis=-2) for array in cached)
        return function(queries, *cached, *others)

    query_spec = PartitionSpec(*(TENSOR if axis == head_axis else None for axis in range(queries.ndim)))
    axis = TENSOR if cut else None
    cached_specs = tuple(PartitionSpec(*(None,) * (array.ndim - 2), axis, None) for array in cached)
    specs = (query_spec, cached_specs, *(PartitionSpec() for _ in others))
    return per_shard(on_shard, specs, out_specs)(queries, cached, *others)


def mean_over_shards(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Mean over the tensor shards, inside `per_shard`, in float32.

    Parts are gathered and then added in one order, so that every shard has the same bits whatever the interconnect.
    """
    if not _inside():
        return values
    return jax.lax.all_gather(values.astype(jnp.float32), TENSOR).mean(axis=0)


def maximum_over_shards(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Maximum over the tensor shards, inside `per_shard`."""
    return jax.lax.pmax(values, TENSOR) if _inside() else values


def sum_over_shards(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sum over the tensor shards, inside `per_shard`."""
    return jax.lax.psum(values, TENSOR) if _inside() else values


def _inside() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return tensor_shards() > 1 and AxisType.Manual in mesh.axis_types
