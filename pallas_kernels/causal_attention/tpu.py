"""Causal attention on TPUs: flash attention (Mosaic TPU).

One grid step handles one tile of query rows of all heads that share a key head. It walks the tiles of keys that the
rows see, from the first row's start to the causal diagonal, in a loop whose bounds are known at run time only; keys and
values stay in HBM and are copied by hand, the next tile while this one is multiplied. Only tiles that some row sees in
part are masked.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention.shapes import LN_2, LOG2_E

QUERY_ROWS = 512  # of one grid step, the heads of a group together
LARGEST_TILE = 512  # rows of keys or queries
SCORES = 1 << 20  # of one step, times the bytes of an input: float32 products take more of the chip's memory
LANES = 128
LOWEST = -1e30  # what a running maximum starts from: finite, so that rows that have seen nothing yet make no NaN

# Rows of the tile table.
FIRST, WHOLE_FIRST = 0, 1


def unsupported(heads: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype is {dtype}; it takes bfloat16 and float32"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    if heads // kv_heads > 8:
        return f"{heads // kv_heads} query heads per key head do not fit on chip; it takes 8"
    return None


def causal_attention_mosaic_tpu(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    scale: float,
    return_lse: bool = False,
) -> tuple[Float[Array, "T H d"], Float[Array, "T H"] | None]:
    """Outputs and, where asked for, log-sum-exps; see `causal_attention`.

    Raises:
        ValueError: a dtype, head size or group that the kernel does not take.
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    reason = unsupported(heads, kv_heads, head_dim, queries.dtype)
    if reason is not None:
        raise ValueError(f"causal_attention: backend 'mosaic_tpu' cannot run this: {reason}; use backend='reference'")
    tile = _power_of_two(QUERY_ROWS // group)
    scores = SCORES // queries.dtype.itemsize // (group * tile)
    step_keys = _power_of_two(min(rows, scores))
    padded = -(-rows // max(tile, step_keys)) * max(tile, step_keys)
    queries, keys, values = (
        jnp.pad(array, ((0, padded - rows), (0, 0), (0, 0))).swapaxes(0, 1) for array in (queries, keys, values)
    )
    starts = jnp.pad(row_start, (0, padded - rows))
    outputs, lse = _attention(
        _tile_table(starts, count, tile, step_keys),
        jnp.reshape(count, 1),
        starts[:, None],
        queries.reshape(kv_heads, group, padded, head_dim),
        keys,
        values,
        tile=tile,
        step_keys=step_keys,
        scale=scale,
        return_lse=return_lse,
    )
    outputs = outputs.reshape(heads, padded, head_dim)[:, :rows].swapaxes(0, 1)
    return outputs, None if lse is None else lse.reshape(heads, padded)[:, :rows].T


def _power_of_two(rows: int) -> int:
    """The largest tile of at most `rows` rows, so that the larger of any two is a multiple of the other."""
    return max(LANES, min(LARGEST_TILE, 1 << rows.bit_length() - 1))


def _tile_table(
    starts: Int32[Array, " padded"], count: Int32[Array, ""], tile: int, step_keys: int
) -> Int32[Array, "2 tiles"]:
    """For every tile of rows, the first tile of keys that it sees, and the first whose start all its rows see."""
    first_row = jnp.arange(0, starts.shape[0], tile, dtype=jnp.int32)
    last_row = jnp.clip(count - 1, first_row, first_row + tile - 1)
    return jnp.stack([starts[first_row] // step_keys, (starts[last_row] + step_keys - 1) // step_keys])


def _kernel(table, count_ref, start_ref, query_ref, key_hbm, value_hbm, *refs, tile, step_keys, scale, return_lse):
    output_ref, lse_ref = refs[0], refs[1] if return_lse else None
    key_buffer, value_buffer, copied, maximum_ref, total_ref, result_ref = refs[1 + return_lse :]
    kv_head, index = pl.program_id(0), pl.program_id(1)
    group, _, head_dim = query_ref.shape[1:]
    count = count_ref[0]
    first_row = index * tile

    def copies(step, slot):
        place = pl.ds(pl.multiple_of(step * step_keys, step_keys), step_keys)
        return (
            pltpu.make_async_copy(key_hbm.at[kv_head, place], key_buffer.at[slot], copied.at[0, slot]),
            pltpu.make_async_copy(value_hbm.at[kv_head, place], value_buffer.at[slot], copied.at[1, slot]),
        )

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


def _attention(table, count, starts, queries, keys, values, *, tile, step_keys, scale, return_lse):
    kv_heads, group, padded, head_dim = queries.shape
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
        functools.partial(_kernel, tile=tile, step_keys=step_keys, scale=scale, return_lse=return_lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
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
    )(table, count, starts, queries, keys, values)
    return found[0], found[1] if return_lse else None
