"""Block scores on Hopper GPUs: one pass over the keys with wgmma and TMA (Mosaic GPU).

The softmax needs each row's log-sum-exp before any block's mass is known, which would mean two passes over the keys.
Instead one pass writes the log2-sum-exp of every (row, block): `block_size` times less than the scores, one number that
holds both the block's maximum and its sum. A row's log-sum-exp and the block's mass both follow from these numbers, in
one small step after the kernel.

One program handles `row_tiles` tiles of 64 query rows of one key head (one warpgroup each, so that the softmax of one
overlaps the matrix product of another) and one contiguous span of one request's keys, which a producer warpgroup
streams through shared memory. Spans are cut from the real lengths at run time, so that they fill the chip whatever the
padding.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_score.combine import LOG2_E, align_requests, combine
from pallas_kernels.hopper import MULTIPROCESSORS, SHARED_MEMORY

ALIGNMENT = 8  # rows; a TMA copy into the tiled layout that wgmma reads starts at a multiple of this
ROWS = 64  # query rows of one warpgroup's wgmma


class Tiling(NamedTuple):
    """How one program is cut: warpgroups of 64 rows, keys per step, steps in flight, passes over the chip."""

    row_tiles: int
    keys: int
    stages: int
    waves: int


def unsupported(window: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype is {dtype}; it takes bfloat16 and float16 (wgmma has no float32 product)"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    if block_size not in (32, 64, 128):
        return f"block_size is {block_size}; it takes 32, 64 and 128"
    return None


def default_tiling(window: int, heads: int, kv_heads: int, head_dim: int, rows: int) -> Tiling:
    """Tiling by shape: as many row tiles as divide the work evenly, as many key buffers as then fit."""
    tiles = heads // kv_heads * -(-window // ROWS)
    most = 2 if head_dim == 256 else 4
    row_tiles = max(count for count in range(1, most + 1) if tiles % count == 0)
    keys = 128
    left = SHARED_MEMORY - 4096 - row_tiles * ROWS * head_dim * 2
    stages = min(4, left // (keys * head_dim * 2))
    waves = 1 if rows <= 32768 else 4
    return Tiling(row_tiles, keys, stages, waves)


def block_score_mosaic_gpu(
    queries: Float[Array, "B n H d"],
    keys: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    num_blocks: int,
    block_size: int,
    scale: float,
    row_log_sum_exp: Float[Array, "B n H"] | None = None,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "B num_blocks"], Float[Array, "B num_blocks"]]:
    """Undivided mass and peak of every block of every request, both float32; see `block_score`.

    Raises:
        ValueError: a dtype, head size or block size that the kernel does not take.
    """
    batch, window, heads, head_dim = queries.shape
    rows, kv_heads, _ = keys.shape
    reason = unsupported(window, heads, kv_heads, head_dim, block_size, keys.dtype)
    if reason is not None:
        raise ValueError(f"block_score: backend 'mosaic_gpu' cannot run this: {reason}; use backend='reference'")
    tiling = tiling or default_tiling(window, heads, kv_heads, head_dim, rows)
    if scale < 0:  # the kernel takes the maximum before it scales
        queries, scale = -queries, -scale
    padding = -window % ROWS
    if padding:
        queries = jnp.pad(queries, ((0, 0), (0, padding), (0, 0), (0, 0)))
    programs = heads * (window + padding) // (ROWS * tiling.row_tiles)
    wanted = max(1, min(tiling.waves * MULTIPROCESSORS // programs, -(-rows // tiling.keys)))
    if batch > 1 or rows % ALIGNMENT:
        keys, starts = align_requests(keys, cu_seqlens, ALIGNMENT)
    else:
        starts = cu_seqlens[:-1]
    spans = _cut_spans(cu_seqlens, starts, wanted, tiling.keys, block_size)
    block_slots = (rows + batch * (block_size - 1)) // block_size
    block_lse, span_lse = _block_log_sum_exp(
        queries, keys, spans, window=window, block_slots=block_slots, block_size=block_size, scale=scale, tiling=tiling
    )
    blocks = (jnp.diff(cu_seqlens) + block_size - 1) // block_size
    return combine(
        block_lse[:, :, :window],
        span_lse[:, :, :window],
        spans[:, REQUEST],
        jnp.cumsum(blocks, dtype=jnp.int32) - blocks,
        cu_seqlens,
        row_log_sum_exp,
        num_blocks=num_blocks,
        block_size=block_size,
    )


# Columns of the span table.
REQUEST, FIRST_ROW, FIRST_KEY, KEYS, FIRST_BLOCK, LENGTH, COLUMNS = 0, 1, 2, 3, 4, 5, 8


def _cut_spans(
    cu_seqlens: Int32[Array, "B+1"], starts: Int32[Array, " B"], wanted: int, step: int, block_size: int
) -> Int32[Array, "spans columns"]:
    """Cut every request into spans of equal size, a multiple of `step` keys; at most `wanted + B - 1` in total."""
    batch = cu_seqlens.shape[0] - 1
    lengths = jnp.diff(cu_seqlens)
    steps = (lengths + step - 1) // step
    per_span = jnp.maximum((steps.sum() + wanted - 1) // wanted, 1)
    spans_of = (steps + per_span - 1) // per_span
    span_end = jnp.cumsum(spans_of, dtype=jnp.int32)
    blocks = (lengths + block_size - 1) // block_size
    block_start = jnp.cumsum(blocks, dtype=jnp.int32) - blocks
    span = jnp.arange(wanted + batch - 1, dtype=jnp.int32)
    request = (span[:, None] >= span_end[None, :]).sum(-1, dtype=jnp.int32)
    used = request < batch
    owner = jnp.minimum(request, batch - 1)
    first_key = (span - (span_end - spans_of)[owner]) * per_span * step
    count = jnp.where(used, jnp.minimum(per_span * step, lengths[owner] - first_key), 0)
    columns = [
        jnp.where(used, request, batch),
        starts[owner] + first_key,
        first_key,
        count,
        block_start[owner] + first_key // block_size,
        lengths[owner],
    ]
    table = jnp.stack(columns + [jnp.zeros_like(span)] * (COLUMNS - len(columns)), axis=1)
    return table.astype(jnp.int32)


def _block_log_sum_exp(queries, keys, spans, *, window, block_slots, block_size, scale, tiling):
    """The kernel: log2-sum-exp of scaled scores per (block, head, row) and per (span, head, row)."""
    _, padded_window, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    tiles_per_head = padded_window // ROWS
    programs_per_kv_head = group * tiles_per_head // tiling.row_tiles
    step = tiling.keys
    blocks_per_step = step // block_size
    factor = scale * LOG2_E
    layout = mgpu.Layout.WGMMA
    producer = tiling.row_tiles

    def body(q_gmem, k_gmem, spans_gmem, block_gmem, span_gmem, q_smem, k_smem, q_ready, k_ready, k_free):
        program = lax.axis_index("program")
        span = lax.axis_index("span")
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(program, programs_per_kv_head)
        request = spans_gmem[span, REQUEST]
        first_row = spans_gmem[span, FIRST_ROW]
        first_key = spans_gmem[span, FIRST_KEY]
        count = spans_gmem[span, KEYS]
        first_block = spans_gmem[span, FIRST_BLOCK]
        length = spans_gmem[span, LENGTH]
        steps = lax.div(count + (step - 1), step)

        @pl.when((warpgroup == producer) & (steps > 0))
        def _produce():
            mgpu.set_max_registers(24, action="decrease")

            def load(index, _):
                slot = lax.rem(index, tiling.stages)

                @pl.when(index >= tiling.stages)
                def _():
                    mgpu.barrier_wait(k_free.at[slot])

                row = pl.multiple_of(first_row + index * step, ALIGNMENT)
                mgpu.copy_gmem_to_smem(k_gmem.at[pl.ds(row, step), kv_head], k_smem.at[slot], k_ready.at[slot])
                return ()

            lax.fori_loop(0, steps, load, ())

        @pl.when((warpgroup < producer) & (steps > 0))
        def _consume():
            mgpu.set_max_registers(_consumer_registers(tiling.row_tiles), action="increase")
            tile = lax.rem(program, programs_per_kv_head) * tiling.row_tiles + warpgroup
            head = kv_head * group + lax.div(tile, tiles_per_head)
            first_query = lax.rem(tile, tiles_per_head) * ROWS
            mgpu.copy_gmem_to_smem(
                q_gmem.at[request, pl.ds(first_query, ROWS), head], q_smem.at[warpgroup], q_ready.at[warpgroup]
            )
            mgpu.barrier_wait(q_ready.at[warpgroup])
            # Keys at or before this position are visible to every row of the tile, and rows before the request's start
            # exist only where the whole request fits the window, where this is negative.
            all_visible = length - window + first_query
            plain_steps = jnp.clip(lax.div(all_visible + 1 - first_key, step), 0, steps)
            plain_steps = jnp.where(all_visible < 0, 0, plain_steps)

            def advance(index, carry, *, masked):
                running, total = carry
                slot = lax.rem(index, tiling.stages)
                mgpu.barrier_wait(k_ready.at[slot])

                def product(acc):
                    mgpu.wgmma(acc, q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0)))
                    return acc[...]

                scores = pl.run_scoped(product, mgpu.WGMMAAccumulatorRef((ROWS, step), jnp.float32))
                mgpu.barrier_arrive(k_free.at[slot])
                if masked:
                    shape = (ROWS, step)
                    row = mgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                    column = mgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
                    visible = column + (first_key + index * step) <= row + all_visible
                    visible = visible & (row + all_visible >= 0) & (row + first_query < window)
                    scores = jnp.where(visible, scores * factor, -jnp.inf)
                for block in range(blocks_per_step):
                    piece = scores[:, block * block_size : (block + 1) * block_size]
                    if masked:
                        top = piece.max(axis=1)
                        top = jnp.where(top == -jnp.inf, 0.0, top)
                        weights = jnp.exp2(piece - lax.broadcast_in_dim(top, piece.shape, [0]))
                    else:
                        top = piece.max(axis=1) * factor
                        weights = jnp.exp2(piece * factor - lax.broadcast_in_dim(top, piece.shape, [0]))
                    lse = top + jnp.log2(weights.sum(axis=1))
                    slot_of_block = first_block + index * blocks_per_step + block

                    @pl.when(index * step + block * block_size < count)
                    def _(lse=lse, slot_of_block=slot_of_block):
                        block_gmem[slot_of_block, head, pl.ds(first_query, ROWS)] = lse

                    higher = jnp.maximum(running, lse)
                    safe = jnp.where(higher == -jnp.inf, 0.0, higher)
                    total = total * jnp.exp2(running - safe) + jnp.exp2(lse - safe)
                    running = higher
                return running, total

            reduced = layout.reduce(1)
            carry = (
                mgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), reduced),
                mgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), reduced),
            )
            carry = lax.fori_loop(0, plain_steps, functools.partial(advance, masked=False), carry)
            running, total = lax.fori_loop(plain_steps, steps, functools.partial(advance, masked=True), carry)
            running = jnp.where(running == -jnp.inf, 0.0, running)
            span_gmem[span, head, pl.ds(first_query, ROWS)] = running + jnp.log2(total)

    transforms = (
        mgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return mgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((block_slots, heads, padded_window), jnp.float32),
            jax.ShapeDtypeStruct((spans.shape[0], heads, padded_window), jnp.float32),
        ],
        scratch_types=[
            mgpu.SMEM((tiling.row_tiles, ROWS, head_dim), keys.dtype, transforms=transforms),
            mgpu.SMEM((tiling.stages, step, head_dim), keys.dtype, transforms=transforms),
            mgpu.Barrier(num_barriers=tiling.row_tiles),
            mgpu.Barrier(num_barriers=tiling.stages),
            mgpu.Barrier(num_arrivals=tiling.row_tiles, num_barriers=tiling.stages),
        ],
        grid=(kv_heads * programs_per_kv_head, spans.shape[0]),
        grid_names=("program", "span"),
        num_threads=tiling.row_tiles + 1,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(queries, keys, spans)


def _consumer_registers(row_tiles: int) -> int:
    """Registers per thread of a consumer once the producer warpgroup has given up all but 24.

    What can be shared out is what the program was launched with: the register file over its threads, in eights.
    """
    launched = min(65536 // (128 * (row_tiles + 1)) // 8 * 8, 240)
    return min(240, (launched * (row_tiles + 1) - 24) // row_tiles // 8 * 8)
