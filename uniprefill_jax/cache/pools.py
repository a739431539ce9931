"""The arrays behind pages and slots: one pool of pages for all attention layers, one of recurrent states.

All attention layers of a model have keys of one shape, so any page may serve any layer. Within a page the rows of one
key head lie together: a kernel copies them, or the whole page, in one piece. Slot 0 of the recurrent pool is
a dummy: rows of a decode batch without a request read and write it, so that none needs to be told apart. On a mesh the
pools are cut over heads; page numbers, slots and tables are the same on every shard.
"""

from dataclasses import replace

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from uniprefill_jax.models.config import ModelConfig

DUMMY_SLOT = 0


@struct.dataclass
class CachePools:
    """Keys and values by page; convolution inputs and recurrent states by linear layer and slot."""

    keys: Float[Array, "P heads page d"]  # as many heads as `held_kv_heads`
    values: Float[Array, "P heads page d"]
    conv: Float[Array, "linear_layers slots width-1 channels"]
    recurrent: Float[Array, "linear_layers slots heads key_dim value_dim"]


def attention_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers with keys and values, rising: the layers that page tables number."""
    return tuple(number for number, layer in enumerate(config.layers) if layer.mixer != "linear")


def linear_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers with a recurrent state, rising."""
    return tuple(number for number, layer in enumerate(config.layers) if layer.mixer == "linear")


def held_kv_heads(num_kv_heads: int, shards: int) -> int:
    """KV heads that the pages of all shards hold: where there are fewer than shards, each as often as shards read it.

    Every shard then holds the one head that it reads, instead of all of them.
    """
    return max(num_kv_heads, shards)


def make_pools(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: jnp.dtype,
    *,
    shards: int = 1,
    fill: float = 0.0,
) -> CachePools:
    """Pools for `num_slots` requests beside the dummy.

    `shards` is the number of tensor shards; `fill` is what the pools hold at first (tests use NaN).
    """
    pages = (num_pages, held_kv_heads(config.num_kv_heads, shards), page_size, config.head_dim)
    count, linear = len(linear_layers(config)), config.gated_delta_net
    conv, recurrent = (0, 0), (0, 0, 0)
    if linear is not None:
        conv = (linear.conv_width - 1, linear.conv_channels)
        recurrent = (linear.num_value_heads, linear.key_head_dim, linear.value_head_dim)
    states = CachePools(
        keys=jnp.full(pages, fill, dtype),
        values=jnp.full(pages, fill, dtype),
        conv=jnp.full((count, num_slots + 1, *conv), fill, dtype),
        recurrent=jnp.full((count, num_slots + 1, *recurrent), fill, jnp.float32),
    )
    return replace(
        states, conv=states.conv.at[:, DUMMY_SLOT].set(0), recurrent=states.recurrent.at[:, DUMMY_SLOT].set(0)
    )


def row_pages(config: ModelConfig, shards: int) -> int:
    """Pages that hold the hidden states of a page of tokens, keys and values used alike."""
    return -(-config.hidden_size // (2 * held_kv_heads(config.num_kv_heads, shards) * config.head_dim))


def bytes_of_page(config: ModelConfig, page_size: int, dtype: str) -> int:
    """Memory of one page, keys and values."""
    return 2 * page_size * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
