"""Block-sparse attention on Hopper GPUs: what the kernel of `gpu_flash` reads, from masks and columns."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sparse_attention.blocks import NOWHERE, Blocks
from pallas_kernels.block_sparse_attention.gpu_flash import WORD, Columns, Tiles, Tiling, flash_attention
from pallas_kernels.causal_attention import gpu_flash as causal_flash


def unsupported(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if block_size not in (64, 128):
        return f"block_size is {block_size}; it takes 64 and 128"
    return causal_flash.unsupported(heads, kv_heads, head_dim, dtype)


def default_tiling(head_dim: int, block_size: int) -> Tiling:
    """As many keys to a step and as many stages as registers and shared memory hold; of size 256, one team's."""
    if block_size == 128:
        return {64: Tiling(1, 128, 4), 128: Tiling(1, 128, 2), 256: Tiling(1, 64, 2)}[head_dim]
    return {64: Tiling(2, 64, 4), 128: Tiling(2, 64, 3), 256: Tiling(1, 64, 3)}[head_dim]


def block_sparse_attention_mosaic_gpu(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, " B+1"],
    block_mask: Bool[Array, "H Q K"],
    columns: Int32[Array, "H B C"] | None,
    *,
    block_size: int,
    scale: float,
    tiling: Tiling | None = None,
    interpretable: bool = False,
) -> Float[Array, "T H d"]:
    """Outputs of every row; see `block_sparse_attention`, and `flash_attention` for `interpretable`.

    Raises:
        ValueError: a dtype, head size or block size that the kernel does not take.
    """
    rows, heads, head_dim = queries.shape
    reason = unsupported(heads, keys.shape[1], head_dim, block_size, queries.dtype)
    if reason is not None:
        raise ValueError(
            f"block_sparse_attention: backend 'mosaic_gpu' cannot run this: {reason}; use backend='reference'"
        )
    tiling = tiling or default_tiling(head_dim, block_size)
    if scale < 0:
        queries, scale = -queries, -scale
    blocks = Blocks.of_requests(cu_seqlens, rows, block_size)
    queries, keys, values = blocks.lay_out(queries, keys, values)
    values = jnp.where(blocks.is_row()[:, None, None], values, 0)  # a weight of 0 does not cancel NaN
    block = jnp.arange(blocks.filled.shape[0], dtype=jnp.int32)
    mask = block_mask[:, : len(block), : len(block)]
    earlier = (block < block[:, None]) & (block >= blocks.first[:, None])
    bits = _pack(mask & earlier)
    gathered = None if columns is None else _gather(columns, mask, blocks, keys, values, tiling.keys)
    outputs = flash_attention(
        _tiles(bits, gathered, blocks, keys.shape[1], tiling),
        bits,
        queries,
        keys,
        values,
        gathered,
        block_size=block_size,
        scale=scale,
        tiling=tiling,
        interpretable=interpretable,
    )
    return blocks.collect(outputs, rows)


def _pack(mask: Bool[Array, "H Q K"]) -> Int32[Array, "H Q words"]:
    """Words of bits, lowest first."""
    padded = jnp.pad(mask, ((0, 0), (0, 0), (0, -mask.shape[2] % WORD)))
    padded = padded.reshape(*mask.shape[:2], -1, WORD).astype(jnp.uint32)
    words = (padded << jnp.arange(WORD, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _gather(
    columns: Int32[Array, "H B C"],
    mask: Bool[Array, "H Q K"],
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


def _tiles(
    bits: Int32[Array, "H Q words"], columns: Columns | None, blocks: Blocks, kv_heads: int, tiling: Tiling
) -> Tiles:
    """Tiles of one key head after those of another, as keys fit into the cache that way; of each the longest first."""
    heads, count = bits.shape[:2]
    requests = blocks.cu_seqlens.shape[0] - 1
    shape = (heads, count)
    per_block = blocks.size // tiling.keys
    head = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32)[:, None], shape)
    first_column = column_steps = jnp.zeros(shape, jnp.int32)
    if columns is not None:
        width = columns.seen.shape[2]
        number = jnp.arange(1, width + 1, dtype=jnp.int32)
        column_steps = ((columns.seen * number).max(axis=-1) + tiling.keys - 1) // tiling.keys
        first_column = (head * requests + blocks.owner) * width
    kept = jax.lax.population_count(bits).sum(axis=-1, dtype=jnp.int32)
    rows = jnp.broadcast_to(blocks.filled, shape)
    steps = jnp.where(rows > 0, (1 + kept) * per_block + column_steps, 0)
    block = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), shape)
    first_word = jnp.broadcast_to(blocks.first // WORD, shape)
    order = jnp.argsort(-steps.reshape(kv_heads, -1), axis=-1).astype(jnp.int32)
    order = (order + jnp.arange(kv_heads, dtype=jnp.int32)[:, None] * order.shape[1]).reshape(-1)
    tiles = Tiles(head, block, rows, first_column, column_steps, first_word, steps)
    tiles = Tiles(*(array.reshape(-1)[order] for array in tiles))
    padding = -len(order) % tiling.teams
    ended = tiles._replace(rows=jnp.pad(tiles.rows, (0, padding), constant_values=-1))
    return Tiles(*(jnp.pad(array, (0, len(order) + padding - len(array))) for array in ended))
