"""First kernel of the gated delta rule on Hopper GPUs: everything about a chunk that does not depend on the state.

One program per chunk and key head. It normalises the chunk's keys and queries, and for each value head of the key head
writes two matrices of chunk x chunk: `solve` = (I + A)^-1 diag(strength) with A the strictly lower part of
strength_i decay_ij k_i.k_j, and `attention` = the lower part of decay_ij q_i.k_j.

The inverse is built from the diagonal outwards: with T the inverses of the diagonal blocks of size s and L the blocks
of A that join them in pairs, those of size 2s are T - T L T. Each T is a true inverse, whose entries stay of order one
however alike the keys are, where powers of A (the shorter way) can grow by 10^17.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_delta_rule.chunks import CHUNK
from pallas_kernels.gated_delta_rule.gpu_products import (
    BY_ROW,
    COMPILER,
    OPERAND,
    OPERAND_TILES,
    product,
    spare_operands,
)

ROW, ROWS, COLUMNS = 0, 1, 4  # columns of the slot table


def prepare(
    queries: Float[Array, "T Hk d"],
    keys: Float[Array, "T Hk d"],
    gates: Float[Array, "slots Hv two chunk"],
    slot_table: Int32[Array, "slots columns"],
    *,
    scale: float,
    normalise: bool,
    interpret: bool,
) -> tuple[Array, Array, Array, Array]:
    """Queries and keys [slots, Hk, chunk, d], solve and attention [slots, Hv, chunk, chunk], all float16.

    Args:
        queries, keys: packed rows, bfloat16.
        gates: cumulative log2 decay and strength of every place.
        slot_table: first row and number of rows of every slot; a slot of no rows is left unwritten.
        scale: factor on the queries.
        normalise: divide keys and queries by their length.
        interpret: True in the CPU interpreter.
    """
    _, key_heads, head_dim = keys.shape
    slots, value_heads = gates.shape[:2]
    ratio = value_heads // key_heads
    layout = mgpu.Layout.WGMMA
    square = (CHUNK, CHUNK)

    def body(
        q_gmem, k_gmem, gates_gmem, table_gmem, q_out, k_out, solve_out, attention_out,
        q_raw, k_raw, q_smem, k_smem, first, second, gates_smem, ready, *spare,
    ):  # fmt: skip
        operands = spare[0] if spare else None
        slot = lax.axis_index("slot")
        key_head = lax.axis_index("head")
        count = table_gmem[slot, ROWS]

        @pl.when(count > 0)
        def _():
            rows = pl.ds(table_gmem[slot, ROW], CHUNK)
            mgpu.copy_gmem_to_smem(k_gmem.at[rows, key_head], k_raw, ready)
            mgpu.copy_gmem_to_smem(q_gmem.at[rows, key_head], q_raw, ready)
            mgpu.copy_gmem_to_smem(gates_gmem.at[slot, pl.ds(key_head * ratio, ratio)], gates_smem, ready)
            mgpu.barrier_wait(ready)

            def unit(raw, factor):
                """Rows of length one, zero past the chunk's rows, whatever lies there."""
                exists = mgpu.broadcasted_iota(jnp.int32, (CHUNK, head_dim), 0, layout=layout) < count
                rows = mgpu.load(raw, layout=layout).astype(jnp.float32)
                rows = jnp.where(exists, rows, 0.0)
                if normalise:
                    length = lax.rsqrt((rows * rows).sum(axis=1) + 1e-6) * factor
                    return rows * lax.broadcast_in_dim(length, rows.shape, [0])
                return rows * factor

            k_smem[...] = unit(k_raw, 1.0).astype(OPERAND)
            q_smem[...] = unit(q_raw, scale).astype(OPERAND)
            mgpu.commit_smem()
            mgpu.copy_smem_to_gmem(k_smem, k_out.at[slot, key_head])
            mgpu.copy_smem_to_gmem(q_smem, q_out.at[slot, key_head])
            keys_by_keys = product(k_smem, k_smem, transpose=True)
            queries_by_keys = product(q_smem, k_smem, transpose=True)

            row = mgpu.broadcasted_iota(jnp.int32, square, 0, layout=layout)
            column = mgpu.broadcasted_iota(jnp.int32, square, 1, layout=layout)
            systems, inverses = [], []
            for j in range(ratio):
                by_row = mgpu.load(gates_smem.at[j, 0], layout=layout.reduce(1), optimized=False)
                by_column = mgpu.load(gates_smem.at[j, 0], layout=layout.reduce(0), optimized=False)
                strength = mgpu.load(gates_smem.at[j, 1], layout=layout.reduce(1), optimized=False)
                passed = lax.broadcast_in_dim(by_row, square, [0]) - lax.broadcast_in_dim(by_column, square, [1])
                # Above the diagonal the difference is positive and could overflow: mask before the exponential.
                decay = jnp.exp2(jnp.where(row >= column, passed, -jnp.inf))
                second[j] = (queries_by_keys * decay).astype(OPERAND)
                system = keys_by_keys * decay * lax.broadcast_in_dim(strength, square, [0])
                systems.append(jnp.where(row > column, system, 0.0))
                identity = jnp.where(row == column, 1.0, 0.0)
                inverses.append(identity - jnp.where((row ^ column) == 1, systems[j], 0.0))
            mgpu.commit_smem()
            for j in range(ratio):
                mgpu.copy_smem_to_gmem(second.at[j], attention_out.at[slot, key_head * ratio + j])

            size = 2
            while size < CHUNK:
                joins = ((row ^ column) & -size) == size
                for j in range(ratio):
                    first[j] = inverses[j].astype(OPERAND)
                if size == 2:
                    mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # `second` is about to be overwritten
                mgpu.commit_smem()
                for j in range(ratio):
                    joined = jnp.where(joins, systems[j], 0.0).astype(OPERAND)
                    second[j] = product(joined, first.at[j], spare=operands).astype(OPERAND)
                mgpu.commit_smem()
                for j in range(ratio):
                    change = product(inverses[j].astype(OPERAND), second.at[j], spare=operands)
                    inverses[j] = inverses[j] - change
                size *= 2
            for j in range(ratio):
                strength = mgpu.load(gates_smem.at[j, 1], layout=layout.reduce(0), optimized=False)
                first[j] = (inverses[j] * lax.broadcast_in_dim(strength, square, [1])).astype(OPERAND)
            mgpu.commit_smem()
            for j in range(ratio):
                mgpu.copy_smem_to_gmem(first.at[j], solve_out.at[slot, key_head * ratio + j])
            mgpu.wait_smem_to_gmem(0)

    rows_out = jax.ShapeDtypeStruct((slots, key_heads, CHUNK, head_dim), OPERAND)
    square_out = jax.ShapeDtypeStruct((slots, value_heads, *square), OPERAND)
    return mgpu.kernel(
        body,
        out_type=[rows_out, rows_out, square_out, square_out],
        scratch_types=[
            mgpu.SMEM((CHUNK, head_dim), keys.dtype, transforms=BY_ROW),
            mgpu.SMEM((CHUNK, head_dim), keys.dtype, transforms=BY_ROW),
            mgpu.SMEM((CHUNK, head_dim), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((CHUNK, head_dim), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((ratio, *square), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((ratio, *square), OPERAND, transforms=OPERAND_TILES),
            mgpu.SMEM((ratio, 2, CHUNK), jnp.float32),
            mgpu.Barrier(num_arrivals=3),
            *spare_operands(interpret),
        ],
        grid=(key_heads, slots),
        grid_names=("head", "slot"),
        compiler_params=COMPILER,
    )(queries, keys, gates, slot_table)
