"""Block-sparse attention on TPUs (Mosaic TPU).

One grid step handles one block of query rows of one head. It walks the row's own block, then steps of gathered columns,
then the blocks whose bits are set. What it has to know, these bits included, comes to scalar memory with it, where a
list for the whole grid would not fit. Keys and values stay in HBM and are copied by hand, the next step's while this
one's are multiplied.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sparse_attention.blocks import Blocks
from pallas_kernels.block_sparse_attention.masks import WORD, Columns, count_steps, gather, pack
from pallas_kernels.causal_attention.shapes import LOG2_E

LOWEST = -1e30  # what a running maximum starts from: finite, so that rows that have seen nothing yet make no NaN

# What stands before a block's words of bits: its rows, and its `Steps`.
ROWS, FIRST_COLUMN, COLUMN_STEPS, FIRST_WORD, STEPS, BITS = range(6)


def unsupported(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if block_size not in (64, 128):
        return f"block_size is {block_size}; it takes 64 and 128"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype is {dtype}; it takes bfloat16 and float32"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    return None


def block_sparse_attention_mosaic_tpu(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, " B+1"],
    block_mask: Bool[Array, "H Q K"],
    columns: Int32[Array, "H B C"] | None,
    *,
    block_size: int,
    scale: float,
) -> Float[Array, "T H d"]:
    """Outputs of every row; see `block_sparse_attention`.

    Raises:
        ValueError: a dtype, head size or block size that the kernel does not take.
    """
    rows, heads, head_dim = queries.shape
    reason = unsupported(heads, keys.shape[1], head_dim, block_size, queries.dtype)
    if reason is not None:
        raise ValueError(
            f"block_sparse_attention: backend 'mosaic_tpu' cannot run this: {reason}; use backend='reference'"
        )
    blocks = Blocks.of_requests(cu_seqlens, rows, block_size)
    queries, keys, values = blocks.lay_out(queries, keys, values)
    values = jnp.where(blocks.is_row()[:, None, None], values, 0)  # a weight of 0 does not cancel NaN
    count = blocks.filled.shape[0]
    mask = block_mask[:, :count, :count]
    bits = pack(mask, blocks)
    gathered = None if columns is None else gather(columns, mask, blocks, keys, values, block_size)
    steps = count_steps(bits, gathered, blocks, block_size)
    known = [jnp.broadcast_to(blocks.filled, (heads, count)), *steps]
    outputs = _attend(
        jnp.concatenate([jnp.stack(known, axis=-1), bits], axis=-1),
        queries.swapaxes(0, 1),
        keys.swapaxes(0, 1),
        values.swapaxes(0, 1),
        gathered,
        size=block_size,
        scale=scale,
    )
    return blocks.collect(outputs.swapaxes(0, 1), rows)


def _kernel(known, query_ref, key_hbm, value_hbm, *refs, has_columns, size, scale):
    columns: Any = Columns(*refs[:3]) if has_columns else None
    refs = refs[3:] if has_columns else refs
    output_ref, key_buffer, value_buffer, copied, maximum_ref, total_ref, result_ref = refs
    head, block = pl.program_id(0), pl.program_id(1)
    kv_head = lax.div(head, pl.num_programs(0) // key_hbm.shape[0])
    rows, steps = known[0, 0, ROWS], known[0, 0, STEPS]
    column_end = 1 + known[0, 0, COLUMN_STEPS]

    def copies(sources, slot):
        return [
            pltpu.make_async_copy(source, buffer.at[slot], copied.at[kind, slot])
            for kind, (source, buffer) in enumerate(zip(sources, (key_buffer, value_buffer), strict=True))
        ]

    def of_block(number):
        place = pl.ds(pl.multiple_of(number * size, size), size)
        return key_hbm.at[kv_head, place], value_hbm.at[kv_head, place]

    def of_columns(step):
        place = pl.ds(pl.multiple_of(known[0, 0, FIRST_COLUMN] + (step - 1) * size, size), size)
        return columns.keys.at[place], columns.values.at[place]

    def next_block(index, word):
        """The lowest block of this word, or of the first later one that has some; and what is left."""
        index, word = lax.while_loop(
            lambda state: state[1] == 0,
            lambda state: (state[0] + 1, known[0, 0, BITS + state[0] + 1]),
            (index, word),
        )
        lowest = word & -word
        return index * WORD + WORD - 1 - lax.clz(lowest), index, word ^ lowest

    @pl.when(rows == 0)
    def _():
        output_ref[...] = jnp.zeros_like(output_ref)

    @pl.when(rows > 0)
    def _():
        maximum_ref[...] = jnp.full_like(maximum_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        result_ref[...] = jnp.zeros_like(result_ref)
        for copy in copies(of_block(block), 0):
            copy.start()
        query = query_ref[0]
        precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT

        def start(step, state):
            """Starts the copies of a step, and where in the bits the next one is."""
            slot = lax.rem(step, 2)

            def from_block(state):
                number, *state = next_block(*state)
                for copy in copies(of_block(number), slot):
                    copy.start()
                return tuple(state)

            def from_columns(state):
                for copy in copies(of_columns(step), slot):
                    copy.start()
                return state

            if not has_columns:
                return from_block(state)
            return lax.cond(step < column_end, from_columns, from_block, state)

        def hide(step, scores):
            row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
            from_row = lax.broadcasted_iota(jnp.int32, (1, size), 1)  # the first one that sees a key
            if has_columns:
                by_column = jnp.where(columns.seen[0, 0, jnp.maximum(step - 1, 0)] > 0, 0, size)
                from_row = jnp.where(step == 0, from_row, by_column)
            return jnp.where(row >= from_row, scores, -jnp.inf)

        def advance(step, state):
            slot = lax.rem(step, 2)
            state = lax.cond(step + 1 < steps, functools.partial(start, step + 1), lambda state: state, state)
            for copy in copies(of_block(block), slot):  # of the same bytes as the one that was started
                copy.wait()
            scores = lax.dot_general(
                query,
                key_buffer[slot],
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            ) * (scale * LOG2_E)
            scores = lax.cond(step < column_end, functools.partial(hide, step), lambda scores: scores, scores)
            maximum = maximum_ref[...]
            higher = jnp.maximum(maximum, scores.max(axis=1, keepdims=True))
            weights = jnp.exp2(scores - higher)
            shrink = jnp.exp2(maximum - higher)
            maximum_ref[...] = higher
            total_ref[...] = total_ref[...] * shrink + weights.sum(axis=1, keepdims=True)
            value = value_buffer[slot]
            result_ref[...] = result_ref[...] * shrink + jnp.dot(
                weights.astype(value.dtype), value, precision=precision, preferred_element_type=jnp.float32
            )
            return state

        first_word = known[0, 0, FIRST_WORD]
        lax.fori_loop(0, steps, advance, (first_word, known[0, 0, BITS + first_word]))
        live = lax.broadcasted_iota(jnp.int32, result_ref.shape, 0) < rows
        output_ref[0] = jnp.where(live, result_ref[...] / total_ref[...], 0.0).astype(output_ref.dtype)


def _attend(
    known: Int32[Array, "H Q words"],
    queries: Float[Array, "H L d"],
    keys: Float[Array, "KV L d"],
    values: Float[Array, "KV L d"],
    columns: Columns | None,
    *,
    size: int,
    scale: float,
) -> Float[Array, "H L d"]:
    heads, length, head_dim = queries.shape
    dtype = queries.dtype
    count, words = known.shape[1:]
    block_of_rows = pl.BlockSpec((1, size, head_dim), lambda head, block: (head, block, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs = [known.reshape(heads * count, 1, words), queries, keys, values]
    in_specs = [
        pl.BlockSpec((1, 1, words), lambda head, block: (head * count + block, 0, 0), memory_space=pltpu.SMEM),
        block_of_rows,
        in_hbm,
        in_hbm,
    ]
    if columns is not None:
        seen = columns.seen.reshape(heads, count, -1, 1, size)
        inputs += [columns.keys, columns.values, seen]
        in_specs += [in_hbm, in_hbm, pl.BlockSpec((1, 1, *seen.shape[2:]), lambda head, block: (head, block, 0, 0, 0))]
    return pl.pallas_call(
        functools.partial(_kernel, has_columns=columns is not None, size=size, scale=scale),
        grid=(heads, count),
        in_specs=in_specs,
        out_specs=block_of_rows,
        scratch_shapes=[
            pltpu.VMEM((2, size, head_dim), dtype),
            pltpu.VMEM((2, size, head_dim), dtype),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.VMEM((size, 1), jnp.float32),
            pltpu.VMEM((size, 1), jnp.float32),
            pltpu.VMEM((size, head_dim), jnp.float32),
        ],
        out_shape=jax.ShapeDtypeStruct(queries.shape, dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        # Of everything kept: what is left of it is known at run time only.
        cost_estimate=pl.CostEstimate(
            flops=2 * heads * length * length * head_dim,
            bytes_accessed=heads * (2 * length + length * length // size) * head_dim * dtype.itemsize,
            transcendentals=heads * length * length // 2,
        ),
        name="block_sparse_attention",
    )(*inputs)
