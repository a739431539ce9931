"""Block scores on TPUs: one pass over the keys (Mosaic TPU).

As on GPUs, one pass writes the log2-sum-exp of every (row, block) instead of scores, and a small step afterwards turns
these into mass and peak. One grid step multiplies a tile of keys of one key head with all query rows of that head's
group; the keys run along sublanes, so that a block's maximum and sum are reductions over sublanes and the query rows
stay in lanes. Tiles beyond a request's end are skipped: neither fetched nor computed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_score.combine import LOG2_E, align_requests, combine

# Rows of the tile table.
REQUEST, TILE, FIRST_KEY, LENGTH, ROWS_OF_TABLE = 0, 1, 2, 3, 4
SCORE_BYTES = 4 << 20  # float32 scores of one grid step, so that they and their exponentials fit every VMEM


def unsupported(window: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype is {dtype}; it takes bfloat16 and float32"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    if block_size not in (32, 64, 128):
        return f"block_size is {block_size}; it takes 32, 64 and 128"
    if heads // kv_heads * window * 8 * block_size * 4 > SCORE_BYTES:
        return f"{heads // kv_heads} query heads per key head x window {window} does not fit on chip"
    return None


def block_score_mosaic_tpu(
    queries: Float[Array, "B n H d"],
    keys: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    num_blocks: int,
    block_size: int,
    scale: float,
    row_log_sum_exp: Float[Array, "B n H"] | None = None,
) -> tuple[Float[Array, "B num_blocks"], Float[Array, "B num_blocks"]]:
    """Undivided mass and peak of every block of every request, both float32; see `block_score`.

    Raises:
        ValueError: a dtype, head size, block size or group that the kernel does not take.
    """
    batch, window, heads, head_dim = queries.shape
    rows, kv_heads, _ = keys.shape
    group = heads // kv_heads
    reason = unsupported(window, heads, kv_heads, head_dim, block_size, keys.dtype)
    if reason is not None:
        raise ValueError(f"block_score: backend 'mosaic_tpu' cannot run this: {reason}; use backend='reference'")
    tile = _tile_keys(group * window, block_size)
    if batch > 1:
        keys, starts = align_requests(keys, cu_seqlens, tile)
    else:
        starts = jnp.zeros((1,), jnp.int32)
    tiles = -(-keys.shape[0] // tile)
    lengths = jnp.diff(cu_seqlens)
    table = _tile_table(lengths, starts, tiles, tile)
    grouped = queries.reshape(batch, window, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    block_lse, tile_lse = _block_log_sum_exp(
        table,
        grouped.reshape(batch, kv_heads, group * window, head_dim),
        keys.swapaxes(0, 1),
        window=window,
        tile=tile,
        block_size=block_size,
        scale=scale,
    )

    def by_head(array):
        return array.reshape(kv_heads, -1, group, window).swapaxes(0, 1).reshape(-1, heads, window)

    return combine(
        by_head(block_lse),
        by_head(tile_lse),
        table[REQUEST],
        starts // block_size,
        cu_seqlens,
        row_log_sum_exp,
        num_blocks=num_blocks,
        block_size=block_size,
    )


def _tile_keys(query_rows: int, block_size: int) -> int:
    """Keys per grid step: at least eight blocks (one sublane tile of results), at most what the scores allow."""
    tile = 8 * block_size
    while tile < 1024 and 2 * tile * query_rows * 4 <= SCORE_BYTES:
        tile *= 2
    return tile


def _tile_table(
    lengths: Int32[Array, " B"], starts: Int32[Array, " B"], tiles: int, tile: int
) -> Int32[Array, "4 tiles"]:
    """For every tile of keys its request (B where it has none), the tile to fetch, its first key and the length."""
    batch = lengths.shape[0]
    index = jnp.arange(tiles, dtype=jnp.int32)
    owner = (index[:, None] * tile >= starts[None, :]).sum(-1, dtype=jnp.int32) - 1
    owner = jnp.clip(owner, 0, batch - 1)
    first_key = index * tile - starts[owner]
    used = first_key < lengths[owner]
    # A tile that is not used names the last one that was, so that nothing is fetched for it.
    fetched = lax.cummax(jnp.where(used, index, 0), axis=0)
    return jnp.stack([jnp.where(used, owner, batch), fetched, first_key, lengths[owner]])


def _kernel(table, query, key, block_lse, tile_lse, *, window, block_size, scale, batch, precision):
    index = pl.program_id(1)

    @pl.when(table[REQUEST, index] < batch)
    def _():
        tile, rows = key.shape[1], query.shape[2]
        scores = lax.dot_general(
            key[0], query[0, 0], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        position = table[FIRST_KEY, index] + lax.broadcasted_iota(jnp.int32, (tile, rows), 0)
        row = lax.rem(lax.broadcasted_iota(jnp.int32, (tile, rows), 1), window)
        visible = position <= table[LENGTH, index] - window + row
        scores = jnp.where(visible, scores * (scale * LOG2_E), -jnp.inf).reshape(tile // block_size, block_size, rows)
        top = scores.max(1)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        blocks = top + jnp.log2(jnp.exp2(scores - top[:, None, :]).sum(1))
        block_lse[0] = blocks
        top = blocks.max(0, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        tile_lse[0, 0] = top + jnp.log2(jnp.exp2(blocks - top).sum(0, keepdims=True))


def _block_log_sum_exp(table, queries, keys, *, window, tile, block_size, scale):
    batch, kv_heads, query_rows, head_dim = queries.shape
    tiles = table.shape[1]
    blocks = tile // block_size
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT

    def query_index(head, index, table):
        return jnp.minimum(table[REQUEST, table[TILE, index]], batch - 1), head, 0, 0

    return pl.pallas_call(
        functools.partial(_kernel, window=window, block_size=block_size, scale=scale, batch=batch, precision=precision),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(kv_heads, tiles),
            in_specs=[
                pl.BlockSpec((1, 1, query_rows, head_dim), query_index),
                pl.BlockSpec((1, tile, head_dim), lambda head, index, table: (head, table[TILE, index], 0)),
            ],
            out_specs=[
                pl.BlockSpec((1, blocks, query_rows), lambda head, index, table: (head, index, 0)),
                pl.BlockSpec((1, 1, 1, query_rows), lambda head, index, table: (head, index, 0, 0)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((kv_heads, tiles * blocks, query_rows), jnp.float32),
            jax.ShapeDtypeStruct((kv_heads, tiles, 1, query_rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * kv_heads * query_rows * tiles * tile * head_dim,
            bytes_accessed=kv_heads * tiles * tile * head_dim * keys.dtype.itemsize,
            transcendentals=kv_heads * query_rows * tiles * tile,
        ),
        name="block_score",
    )(table, queries, keys)
