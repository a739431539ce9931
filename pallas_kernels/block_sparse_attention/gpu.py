"""Block-sparse attention on Hopper GPUs: what the kernel of `gpu_flash` reads, from masks and columns."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sparse_attention.blocks import Blocks
from pallas_kernels.block_sparse_attention.gpu_flash import Tiles, Tiling, flash_attention
from pallas_kernels.block_sparse_attention.masks import Steps, count_steps, gather, pack
from pallas_kernels.causal_attention import gpu_flash as causal_flash


def unsupported(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if block_size not in (64, 128):
        return f"block_size is {block_size}; it takes 64 and 128"
    return causal_flash.unsupported(heads, kv_heads, head_dim, dtype)


def default_tiling(head_dim: int, block_size: int) -> Tiling:
    """As many keys to a step as registers hold; of size 256, one team's.

    Measured on an H200 (size 128, blocks of 64, 32,768 rows, a tenth kept): two stages 1.76 ms, three 2.01 ms.
    """
    if block_size == 128:
        return {64: Tiling(1, 128, 4), 128: Tiling(1, 128, 2), 256: Tiling(1, 64, 2)}[head_dim]
    return {64: Tiling(2, 64, 4), 128: Tiling(2, 64, 2), 256: Tiling(1, 64, 3)}[head_dim]


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
    count = blocks.filled.shape[0]
    mask = block_mask[:, :count, :count]
    bits = pack(mask, blocks)
    gathered = None if columns is None else gather(columns, mask, blocks, keys, values, tiling.keys)
    steps = count_steps(bits, gathered, blocks, tiling.keys)
    outputs = flash_attention(
        _tiles(steps, blocks, keys.shape[1], tiling.teams),
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


def _tiles(steps: Steps, blocks: Blocks, kv_heads: int, teams: int) -> Tiles:
    """Tiles of one key head after those of another, as keys fit into the cache that way; of each the longest first."""
    heads, count = steps.steps.shape
    head = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32)[:, None], (heads, count))
    block = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (heads, count))
    rows = jnp.broadcast_to(blocks.filled, (heads, count))
    order = jnp.argsort(-steps.steps.reshape(kv_heads, -1), axis=-1).astype(jnp.int32)
    order = (order + jnp.arange(kv_heads, dtype=jnp.int32)[:, None] * order.shape[1]).reshape(-1)
    tiles = Tiles(*(array.reshape(-1)[order] for array in (head, block, rows, *steps)))
    padding = (0, -len(order) % teams)
    rows = jnp.pad(tiles.rows, padding, constant_values=-1)
    return Tiles(*(jnp.pad(array, padding) for array in tiles))._replace(rows=rows)
