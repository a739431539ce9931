"""Flash attention on TPUs (Mosaic TPU): the kernel behind `causal_attention` and `chunk_attention`.

One grid step handles one tile of query rows of all heads that share a key head. It walks the tiles of keys that the
rows see, from the first row's start to the causal diagonal, in a loop whose bounds are known at run time only; keys and
values stay in HBM, as rows or in pages, and are copied by hand, the next tile while this one is multiplied. Only tiles
that some row sees in part are masked.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention.key_rows import KeyRows
from pallas_kernels.causal_attention.shapes import LN_2, LOG2_E

QUERY_ROWS = 512  # of one grid step, the heads of a group together
LARGEST_TILE = 512  # rows of keys or queries
SCORES = 1 << 20  # of one step, times the bytes of an input: float32 products take more of the chip's memory
LANES = 128
LOWEST = -1e30  # what a running maximum starts from: finite, so that rows that have seen nothing yet make no NaN

# Rows of the tile table.
KEY, COUNT, SEQUENCE, FIRST, WHOLE_FIRST = range(5)


def unsupported(heads: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype is {dtype}; it takes bfloat16 and float32"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    if heads // kv_heads > 8:
        return f"{heads // kv_heads} query heads per key head do not fit on chip; it takes 8"
    return None


def tile_sizes(group: int, most_keys: int, dtype: jnp.dtype) -> tuple[int, int]:
    """Query rows and keys of one step, of which the larger is a multiple of the smaller."""
    tile = _power_of_two(QUERY_ROWS // group)
    return tile, _power_of_two(min(most_keys, SCORES // dtype.itemsize // (group * tile)))


def _power_of_two(rows: int) -> int:
    return max(LANES, min(LARGEST_TILE, 1 << rows.bit_length() - 1))


def tile_table(
    row_start: Int32[Array, " padded"], tiles: KeyRows, tile: int, step_keys: int
) -> Int32[Array, "5 tiles"]:
    """For every tile of rows where it stands among the keys, the first tile of keys that it sees, and the first whose
    start all its rows see."""
    place = jnp.arange(tiles.first.shape[0], dtype=jnp.int32) * tile
    last_row = jnp.clip(tiles.count - 1, tiles.first, tiles.first + tile - 1)
    first = row_start[place] // step_keys
    whole_first = (row_start[place + last_row - tiles.first] + step_keys - 1) // step_keys
    return jnp.stack([*tiles, first, whole_first]).astype(jnp.int32)


def _kernel(table, *refs, paged, tile, step_keys, scale, return_lse):
    pages, refs = (refs[0], refs[1:]) if paged else (None, refs)
    start_ref, query_ref, key_hbm, value_hbm, output_ref, *refs = refs
    lse_ref, refs = (refs[0], refs[1:]) if return_lse else (None, refs)
    key_buffer, value_buffer, copied, maximum_ref, total_ref, result_ref = refs
    kv_head, index = pl.program_id(0), pl.program_id(1)
    group, _, head_dim = query_ref.shape[1:]
    count, sequence = table[COUNT, index], table[SEQUENCE, index]
    first_row = table[KEY, index]

    def sources(step):
        """Where the pieces of a step lie in HBM."""
        row = pl.multiple_of(step * step_keys, step_keys)
        if pages is None:
            return [(kv_head, pl.ds(row, step_keys))]
        page = key_hbm.shape[2]
        # Pieces without a real row read a page that has one: no other entry of the table is looked at.
        own = [jnp.minimum(row + place, count - 1) for place in range(0, step_keys, page)]
        return [(pages[sequence, lax.div(row, page)], kv_head) for row in own]

    def copies(step, slot):
        found = sources(step)
        piece = step_keys // len(found)
        return [
            pltpu.make_async_copy(hbm.at[source], buffer.at[slot, pl.ds(number * piece, piece)], copied.at[kind, slot])
            for number, source in enumerate(found)
            for kind, (hbm, buffer) in enumerate(((key_hbm, key_buffer), (value_hbm, value_buffer)))
        ]

    @pl.when(first_row >= count)
    def _():
        output_ref[...] = jnp.zeros_like(output_ref)
        if lse_ref is not None:
            lse_ref[...] = jnp.zeros_like(lse_ref)

    @pl.when(first_row < count)
    def _():
        first = table[FIRST, index]
        end = lax.div(jnp.minimum(first_row + tile, count) - 1, step_keys) + 1
        whole_first = jnp.clip(table[WHOLE_FIRST, index], first, end)
        whole_end = jnp.clip(lax.div(first_row + 1, step_keys), whole_first, end)
        maximum_ref[...] = jnp.full_like(maximum_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        result_ref[...] = jnp.zeros_like(result_ref)
        for copy in copies(first, lax.rem(first, 2)):
            copy.start()
        query = query_ref[0].reshape(group * tile, head_dim)
        precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT

        def mask(step, scores, value):
            row = first_row + lax.broadcasted_iota(jnp.int32, (tile, step_keys), 0)
            column = step * step_keys + lax.broadcasted_iota(jnp.int32, (tile, step_keys), 1)
            visible = (column <= row) & (column >= start_ref[...])
            scores = jnp.where(visible[None], scores.reshape(group, tile, step_keys), -jnp.inf)
            # Values of padding rows may hold NaN, which a weight of 0 does not cancel.
            live = step * step_keys + lax.broadcasted_iota(jnp.int32, (step_keys, head_dim), 0) < count
            return scores.reshape(group * tile, step_keys), jnp.where(live, value, jnp.zeros((), value.dtype))

        def advance(step, _):
            slot = lax.rem(step, 2)

            @pl.when(step + 1 < end)
            def _():
                for copy in copies(step + 1, 1 - slot):
                    copy.start()

            for copy in copies(step, slot):
                copy.wait()
            scores = lax.dot_general(
                query,
                key_buffer[slot],
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            ) * (scale * LOG2_E)
            whole = (step >= whole_first) & (step < whole_end)
            scores, value = lax.cond(
                whole, lambda *arrays: arrays, functools.partial(mask, step), scores, value_buffer[slot]
            )
            maximum = maximum_ref[...]
            higher = jnp.maximum(maximum, scores.max(axis=1, keepdims=True))
            weights = jnp.exp2(scores - higher)
            shrink = jnp.exp2(maximum - higher)
            maximum_ref[...] = higher
            total_ref[...] = total_ref[...] * shrink + weights.sum(axis=1, keepdims=True)
            result_ref[...] = result_ref[...] * shrink + jnp.dot(
                weights.astype(value.dtype), value, precision=precision, preferred_element_type=jnp.float32
            )
            return 0

        lax.fori_loop(first, end, advance, 0)
        total = total_ref[...]
        result = (result_ref[...] / total).reshape(group, tile, head_dim)
        live = first_row + lax.broadcasted_iota(jnp.int32, (tile, head_dim), 0) < count
        output_ref[0] = jnp.where(live[None], result, 0.0).astype(output_ref.dtype)
        if lse_ref is not None:
            column = (maximum_ref[...] + jnp.log2(total)) * LN_2
            lane = jnp.broadcast_to(column, (group * tile, LANES)).T[:1]
            live = first_row + lax.broadcasted_iota(jnp.int32, (1, tile), 1) < count
            for head in range(group):
                lse_ref[0, head : head + 1] = jnp.where(live, lane[:, head * tile : (head + 1) * tile], 0.0)


def flash_attention(
    table: Int32[Array, "5 tiles"],
    row_start: Int32[Array, " padded"],
    queries: Float[Array, "KV G padded d"],
    keys: Float[Array, "..."],
    values: Float[Array, "..."],
    page_tables: Int32[Array, "sequences max_pages"] | None = None,
    *,
    tile: int,
    step_keys: int,
    scale: float,
    return_lse: bool,
) -> tuple[Float[Array, "KV G padded d"], Float[Array, "KV G padded"] | None]:
    """Outputs and, where asked for, log-sum-exps.

    Args:
        table: of `tile_table`.
        row_start: every row's first visible key.
        queries: by key head, padded to whole tiles.
        keys, values: rows [KV, T, d] in whole steps, or with `page_tables` pages [P, KV, page, d].
        page_tables: where the rows of every sequence lie; a step is a multiple of a page.
        tile, step_keys: query rows and keys of one step.
        scale: factor on the scores.
        return_lse: also return log-sum-exps.
    """
    kv_heads, group, padded, head_dim = queries.shape
    scalars = (table,) if page_tables is None else (table, page_tables)
    dtype = queries.dtype
    rows = group * tile

    def tile_of(head, index, *_):
        return head, 0, index, 0

    out_specs = [pl.BlockSpec((1, group, tile, head_dim), tile_of)]
    out_shape = [jax.ShapeDtypeStruct(queries.shape, dtype)]
    if return_lse:
        out_specs.append(pl.BlockSpec((1, group, tile), lambda head, index, *_: (head, 0, index)))
        out_shape.append(jax.ShapeDtypeStruct((kv_heads, group, padded), jnp.float32))
    found = pl.pallas_call(
        functools.partial(
            _kernel, paged=page_tables is not None, tile=tile, step_keys=step_keys, scale=scale, return_lse=return_lse
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(kv_heads, padded // tile),
            in_specs=[
                pl.BlockSpec((tile, 1), lambda head, index, *_: (index, 0)),
                pl.BlockSpec((1, group, tile, head_dim), tile_of),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((2, step_keys, head_dim), dtype),
                pltpu.VMEM((2, step_keys, head_dim), dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        # Of full causal attention: what the ranges leave of it is known at run time only.
        cost_estimate=pl.CostEstimate(
            flops=2 * kv_heads * group * padded * padded * head_dim,
            bytes_accessed=(2 * queries.size + kv_heads * padded * padded // tile * head_dim) * dtype.itemsize,
            transcendentals=kv_heads * group * padded * padded // 2,
        ),
        name="causal_attention",
    )(*scalars, row_start[:, None], queries, keys, values)
    return found[0], found[1] if return_lse else None
