"""What the kernels read in place of masks: bits of blocks, gathered columns, and how many steps that makes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sparse_attention.blocks import NOWHERE, Blocks

WORD = 32  # blocks of one word of bits


class Columns(NamedTuple):
    """Keys and values of single columns, gathered.

    Attributes:
        keys, values: by query head, request and number of the column, in whole steps.
        seen: whether a block of rows sees a column and does not see it within a block; 1 or 0.
    """

    keys: Float[Array, "columns d"]
    values: Float[Array, "columns d"]
    seen: Int32[Array, "H Q C"]


class Steps(NamedTuple):
    """What a block of query rows has before it.

    Attributes:
        first_column: number of its first gathered column.
        column_steps: steps of columns.
        first_word: the first word of its bits that holds one.
        steps: all its steps, those of its own block and of the kept ones included; none where it has no rows.
    """

    first_column: Int32[Array, "H Q"]
    column_steps: Int32[Array, "H Q"]
    first_word: Int32[Array, "H Q"]
    steps: Int32[Array, "H Q"]


def pack(mask: Bool[Array, "H Q Q"], blocks: Blocks) -> Int32[Array, "H Q words"]:
    """Words of bits, lowest first: the blocks before a row's own, of its request, that the mask keeps."""
    block = jnp.arange(mask.shape[1], dtype=jnp.int32)
    mask &= (block < block[:, None]) & (block >= blocks.first[:, None])
    padded = jnp.pad(mask, ((0, 0), (0, 0), (0, -mask.shape[2] % WORD)))
    padded = padded.reshape(*mask.shape[:2], -1, WORD).astype(jnp.uint32)
    words = (padded << jnp.arange(WORD, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def gather(
    columns: Int32[Array, "H B C"],
    mask: Bool[Array, "H Q Q"],
    blocks: Blocks,
    keys: Float[Array, "L KV d"],
    values: Float[Array, "L KV d"],
    step_keys: int,
) -> Columns:
    """The columns' keys and values, and which blocks of rows see them as columns alone."""
    heads, (kv_heads, head_dim) = columns.shape[0], keys.shape[1:]
    columns = jnp.pad(columns, ((0, 0), (0, 0), (0, -columns.shape[2] % step_keys)), constant_values=NOWHERE)
    is_some = columns < NOWHERE
    place = jnp.where(is_some, blocks.cu_blocks[:-1, None] * blocks.size + columns, 0)
    kv_head = (jnp.arange(heads, dtype=jnp.int32) // (heads // kv_heads))[:, None, None]
    own_keys, own_values = (array[place, kv_head].reshape(-1, head_dim) for array in (keys, values))
    block = jnp.arange(mask.shape[1], dtype=jnp.int32)
    at = jnp.where(is_some, place // blocks.size, NOWHERE)[:, blocks.owner]
    earlier = at < block[:, None]  # those of a block's own rows are seen with it
    kept = jnp.take_along_axis(mask, jnp.minimum(at, len(block) - 1), axis=2)
    return Columns(own_keys, own_values, (earlier & ~kept).astype(jnp.int32))


def count_steps(bits: Int32[Array, "H Q words"], columns: Columns | None, blocks: Blocks, step_keys: int) -> Steps:
    """Steps of `step_keys` keys, of which a block has one or several."""
    heads, count = bits.shape[:2]
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    first_column = column_steps = jnp.zeros((heads, count), jnp.int32)
    if columns is not None:
        width = columns.seen.shape[2]
        number = jnp.arange(1, width + 1, dtype=jnp.int32)
        column_steps = ((columns.seen * number).max(axis=-1) + step_keys - 1) // step_keys
        first_column = (head * (blocks.cu_seqlens.shape[0] - 1) + blocks.owner) * width
    kept = jax.lax.population_count(bits).sum(axis=-1, dtype=jnp.int32)
    steps = jnp.where(blocks.filled > 0, (1 + kept) * (blocks.size // step_keys) + column_steps, 0)
    first_word = jnp.broadcast_to(blocks.first // WORD, steps.shape)
    return Steps(first_column, column_steps, first_word, steps)
