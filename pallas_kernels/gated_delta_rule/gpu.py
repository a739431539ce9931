"""The gated delta rule on Hopper GPUs in two kernels with wgmma and TMA (Mosaic GPU).

`gpu_prepare` does, for all chunks at once, what does not depend on the state. The kernel here then walks the chunks of
every request in order, one program per request, value head and half of the value columns. It keeps the state
transposed, [value columns, key dim]: then state, error and update are each the left operand of the next product, which
wgmma takes from the registers that the product before it left its result in, and nothing of the chain passes through
shared memory. Per chunk, with e the decay since the chunk's start and d that until its end:
    R^T = V^T - (S^T K^T) e          N^T = R^T solve^T
    O^T = (S^T Q^T) e + N^T attention^T          S^T = S^T e_last + (N^T d) K
A producer warpgroup streams the chunks' operands through shared memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_delta_rule.chunks import CHUNK, Chunks, chunk_decay, cut_chunks
from pallas_kernels.gated_delta_rule.gpu_prepare import prepare
from pallas_kernels.gated_delta_rule.gpu_products import (
    BY_ROW,
    COMPILER,
    OPERAND,
    OPERAND_TILES,
    product,
    spare_operands,
)
from pallas_kernels.hopper import MULTIPROCESSORS

HEAD_DIM = 128
COLUMNS = 64  # value columns of one warpgroup: the rows of its wgmma
VALUE_RANGE = 64.0  # the largest value after scaling; the state can grow a thousandfold beyond it
FIRST, COUNT, ROW, TABLE_COLUMNS = 0, 1, 2, 4  # columns of the request table


class Tiling(NamedTuple):
    """How the walk over the chunks is cut: warpgroups of 64 value columns per program, chunks in flight."""

    warpgroups: int
    stages: int


def unsupported(
    heads: int, key_heads: int, key_dim: int, value_dim: int, dtype: jnp.dtype, value_dtype: jnp.dtype
) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype != jnp.bfloat16 or value_dtype != jnp.bfloat16:
        return f"queries and keys are {dtype} and values {value_dtype}; it takes bfloat16"
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        return f"head sizes are {key_dim} (keys) and {value_dim} (values); it takes {HEAD_DIM} and {HEAD_DIM}"
    if heads // key_heads not in (1, 2, 4):
        return f"{heads} value heads share {key_heads} key heads; it takes 1, 2 or 4 per key head"
    return None


def default_tiling(batch: int, heads: int) -> Tiling:
    """One warpgroup per program while that leaves multiprocessors free, else both halves of a head together."""
    if batch * heads * HEAD_DIM // COLUMNS <= MULTIPROCESSORS:
        return Tiling(1, 3)
    return Tiling(2, 3)


def gated_delta_rule_mosaic_gpu(
    queries: Float[Array, "T Hk dk"],
    keys: Float[Array, "T Hk dk"],
    values: Float[Array, "T Hv dv"],
    log_decay: Float[Array, "T Hv"],
    strength: Float[Array, "T Hv"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    initial_state: Float[Array, "B Hv dk dv"] | None,
    normalise: bool,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Outputs in the dtype of the values, final states in float32; see `gated_delta_rule`.

    Raises:
        ValueError: dtypes, head sizes or numbers of heads that the kernel does not take.
    """
    rows, key_heads, key_dim = keys.shape
    heads, value_dim = values.shape[1:]
    reason = unsupported(heads, key_heads, key_dim, value_dim, keys.dtype, values.dtype)
    if reason is not None:
        raise ValueError(f"gated_delta_rule: backend 'mosaic_gpu' cannot run this: {reason}; use backend='xla'")
    if rows < CHUNK:  # a TMA box is no larger than the array
        queries, keys, values = (jnp.pad(x, ((0, CHUNK - rows), (0, 0), (0, 0))) for x in (queries, keys, values))
    batch = cu_seqlens.shape[0] - 1
    chunks = cut_chunks(cu_seqlens, rows)
    decay = chunk_decay(log_decay, strength, chunks)
    slot_table = jnp.stack([chunks.first_row, chunks.rows, *[jnp.zeros_like(chunks.rows)] * 2], axis=1)
    prepared = prepare(
        queries,
        keys,
        jnp.stack([decay.cumulative, decay.strength], axis=2),
        slot_table,
        scale=key_dim**-0.5 if normalise else 1.0,
        normalise=normalise,
        interpret=interpret,
    )
    factor = _value_factor(values, initial_state, cu_seqlens)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)
    outputs, tails, state = _walk(
        *prepared,
        values,
        jnp.stack([decay.since_start, decay.until_end], axis=2),
        factor,
        initial_state.astype(jnp.float32).swapaxes(2, 3),
        _request_table(chunks, cu_seqlens),
        tiling=tiling or default_tiling(batch, heads),
        interpret=interpret,
    )
    if batch > 1:
        outputs = _place_tails(outputs, tails, cu_seqlens)
    return outputs[:rows], state.swapaxes(2, 3)


def _value_factor(values, initial_state, cu_seqlens) -> Float[Array, " Hv"]:
    """A power of two per head that brings the largest value and state near VALUE_RANGE, so that float16 holds both."""
    real = jnp.arange(values.shape[0], dtype=jnp.int32) < cu_seqlens[-1]
    largest = jnp.where(real[:, None, None], jnp.abs(values), 0).max((0, 2)).astype(jnp.float32)
    if initial_state is not None:
        largest = jnp.maximum(largest, jnp.abs(initial_state).max((0, 2, 3)))
    exponent = jnp.floor(jnp.log2(VALUE_RANGE / jnp.maximum(largest, 1e-30)))
    return jnp.exp2(jnp.clip(exponent, -100, 100))


def _request_table(chunks: Chunks, cu_seqlens: Int32[Array, "B+1"]) -> Int32[Array, "B columns"]:
    columns = [chunks.first, chunks.count, cu_seqlens[:-1], jnp.diff(cu_seqlens)]
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def _place_tails(outputs, tails, cu_seqlens):
    """Write the last rows of every request but the last, which fill only part of a chunk, where they belong."""
    lengths = jnp.diff(cu_seqlens)[:-1]
    place = jnp.arange(CHUNK, dtype=jnp.int32)
    whole = lengths // CHUNK * CHUNK
    rows = (cu_seqlens[:-2] + whole)[:, None] + place
    rows = jnp.where(place < (lengths - whole)[:, None], rows, outputs.shape[0])
    return outputs.at[rows.reshape(-1)].set(tails.reshape(-1, *tails.shape[2:]), mode="drop")


def _walk(queries, keys, solve, attention, values, gates, factor, initial, requests, *, tiling, interpret):
    """The kernel: outputs, last partial chunks of all requests but the last, and transposed final states."""
    rows, heads, value_dim = values.shape
    key_heads, _, key_dim = keys.shape[1:]
    batch = requests.shape[0]
    ratio = heads // key_heads
    warpgroups, stages = tiling
    parts = value_dim // COLUMNS // warpgroups  # programs that share a head
    layout = mgpu.Layout.WGMMA
    square = (COLUMNS, CHUNK)

    def body(
        q_gmem, k_gmem, solve_gmem, attention_gmem, v_gmem, gates_gmem, factor_gmem, initial_gmem, table_gmem,
        o_gmem, tails_gmem, final_gmem,
        q_smem, k_smem, solve_smem, attention_smem, v_smem, gates_smem, o_smem, ready, free, *spare,
    ):  # fmt: skip
        request = lax.axis_index("request")
        head = lax.div(lax.axis_index("stream"), parts)
        part = lax.rem(lax.axis_index("stream"), parts)
        warpgroup = lax.axis_index("warpgroup")
        first, count = table_gmem[request, FIRST], table_gmem[request, COUNT]
        first_row, length = table_gmem[request, ROW], table_gmem[request, ROW + 1]

        def columns_of(index):
            return pl.ds((part * warpgroups + index) * COLUMNS, COLUMNS)

        @pl.when(warpgroup == warpgroups)
        def _produce():
            mgpu.set_max_registers(24, action="decrease")

            def load(index, _):
                stage = lax.rem(index, stages)

                @pl.when(index >= stages)
                def _():
                    mgpu.barrier_wait(free.at[stage])

                slot, arrived = first + index, ready.at[stage]
                key_head = lax.div(head, ratio)
                mgpu.copy_gmem_to_smem(k_gmem.at[slot, key_head], k_smem.at[stage], arrived)
                mgpu.copy_gmem_to_smem(gates_gmem.at[slot, head], gates_smem.at[stage], arrived)
                rows_of_chunk = pl.ds(first_row + index * CHUNK, CHUNK)
                for own in range(warpgroups):
                    source = v_gmem.at[rows_of_chunk, head, columns_of(own)]
                    mgpu.copy_gmem_to_smem(source, v_smem.at[stage, own], arrived)
                mgpu.copy_gmem_to_smem(solve_gmem.at[slot, head], solve_smem.at[stage], arrived)
                mgpu.copy_gmem_to_smem(q_gmem.at[slot, key_head], q_smem.at[stage], arrived)
                mgpu.copy_gmem_to_smem(attention_gmem.at[slot, head], attention_smem.at[stage], arrived)
                return ()

            lax.fori_loop(0, count, load, ())

        @pl.when(warpgroup < warpgroups)
        def _consume():
            mgpu.set_max_registers(240 if warpgroups == 1 else 232, action="increase")
            columns = columns_of(warpgroup)
            operands = spare[0].at[warpgroup] if spare else None
            value_factor = factor_gmem[head]
            back = 1.0 / value_factor
            state = mgpu.load(initial_gmem.at[request, head, columns], layout=layout, optimized=False) * value_factor
            place = mgpu.broadcasted_iota(jnp.int32, square, 1, layout=layout)

            def store(buffer, index, outputs):
                """Send a chunk's outputs off; what lies past the request's end is zero."""
                o_smem.at[warpgroup, buffer].transpose((1, 0))[...] = outputs
                mgpu.commit_smem()
                last = index == count - 1
                partial = last & (request < batch - 1) & ((index + 1) * CHUNK > length)

                @pl.when(partial)
                def _():
                    mgpu.copy_smem_to_gmem(o_smem.at[warpgroup, buffer], tails_gmem.at[request, :, head, columns])

                @pl.when(jnp.logical_not(partial))
                def _():
                    target = o_gmem.at[pl.ds(first_row + index * CHUNK, CHUNK), head, columns]
                    mgpu.copy_smem_to_gmem(o_smem.at[warpgroup, buffer], target)

            def advance(index, state):
                stage = lax.rem(index, stages)
                mgpu.barrier_wait(ready.at[stage])

                def gate(which, axis):
                    gates = mgpu.load(gates_smem.at[stage, which], layout=layout.reduce(1 - axis), optimized=False)
                    return lax.broadcast_in_dim(gates, square, [axis])

                operand = state.astype(OPERAND)
                seen = product(operand, k_smem.at[stage], transpose=True, spare=operands)
                values = mgpu.load(v_smem.at[stage, warpgroup].transpose((1, 0)), layout=layout).astype(jnp.float32)
                since_start = gate(0, 1)
                error = jnp.where(place < length - index * CHUNK, values * value_factor - seen * since_start, 0.0)
                news = product(error.astype(OPERAND), solve_smem.at[stage], transpose=True, spare=operands)
                outputs = product(operand, q_smem.at[stage], transpose=True, spare=operands) * since_start
                outputs += product(news.astype(OPERAND), attention_smem.at[stage], transpose=True, spare=operands)
                added = product((news * gate(1, 1)).astype(OPERAND), k_smem.at[stage], spare=operands)
                state = state * gates_smem[stage, 0, CHUNK - 1] + added
                mgpu.barrier_arrive(free.at[stage])
                mgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the buffer's last copy but one has left
                store(lax.rem(index, 2), index, (outputs * back).astype(o_smem.dtype))
                return state

            state = lax.fori_loop(0, count, advance, state)
            final_gmem[request, head, columns] = state * back

            # Rows that belong to no request become zero: the last request's programs see to it.
            mgpu.wait_smem_to_gmem(0)
            padding = rows - (first_row + count * CHUNK)

            @pl.when((request == batch - 1) & (padding > 0))
            def _():
                o_smem[warpgroup, 0] = mgpu.layout_cast(jnp.zeros((CHUNK, COLUMNS), o_smem.dtype), layout)
                mgpu.commit_smem()

                def clear(index, _):
                    target = o_gmem.at[pl.ds(first_row + (count + index) * CHUNK, CHUNK), head, columns]
                    mgpu.copy_smem_to_gmem(o_smem.at[warpgroup, 0], target)
                    return ()

                lax.fori_loop(0, lax.div(padding + CHUNK - 1, CHUNK), clear, ())
                mgpu.wait_smem_to_gmem(0)

    return mgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            jax.ShapeDtypeStruct((max(batch - 1, 1), CHUNK, heads, value_dim), values.dtype),
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        ],
        scratch_types=[
            mgpu.SMEM((stages, CHUNK, key_dim), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((stages, CHUNK, key_dim), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((stages, CHUNK, CHUNK), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((stages, CHUNK, CHUNK), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((stages, warpgroups, CHUNK, COLUMNS), values.dtype, transforms=BY_ROW),
            mgpu.SMEM((stages, 2, CHUNK), jnp.float32),
            mgpu.SMEM((warpgroups, 2, CHUNK, COLUMNS), values.dtype, transforms=BY_ROW),
            mgpu.Barrier(num_arrivals=5 + warpgroups, num_barriers=stages),
            mgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            *spare_operands(interpret, warpgroups),
        ],
        grid=(heads * parts, batch),
        grid_names=("stream", "request"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
    )(queries, keys, solve, attention, values, gates, factor, initial, requests)
