"""Flash attention over listed blocks of keys with wgmma and TMA (Mosaic GPU).

A tile is one block of query rows of one head. A team handles it: the compute warpgroups that its rows fill, which do
the steps of `causal_attention`, and a memory warpgroup that feeds them through their own ring: first the tile's own
block, then steps of gathered columns, then the blocks whose bits are set. Only the first two kinds are masked, and no
step is without work: the time goes with the blocks that are kept.

Tiles of 64 rows leave half of a multiprocessor's registers idle, so a program has two teams there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_sparse_attention.masks import WORD, Columns
from pallas_kernels.causal_attention.gpu_steps import LAYOUT, ROWS, Stream, attend, consumer_registers, iota


class Tiling(NamedTuple):
    """How one program is cut.

    Attributes:
        teams: tiles that a program handles side by side.
        keys: keys of one step, at most a block.
        stages: steps whose keys and values a team's ring holds.
    """

    teams: int
    keys: int
    stages: int


class Tiles(NamedTuple):
    """What every tile has to know, in the order in which tiles start.

    Attributes:
        head: query head.
        block: number of its block among all blocks of the layout.
        rows: rows that it has; the others of its block are padding. Less than none is no tile at all.
        first_column, column_steps, first_word, steps: as in `Steps`.
    """

    head: Int32[Array, " tiles"]
    block: Int32[Array, " tiles"]
    rows: Int32[Array, " tiles"]
    first_column: Int32[Array, " tiles"]
    column_steps: Int32[Array, " tiles"]
    first_word: Int32[Array, " tiles"]
    steps: Int32[Array, " tiles"]


def flash_attention(
    tiles: Tiles,
    bits: Int32[Array, "H Q words"],
    queries: Float[Array, "L H d"],
    keys: Float[Array, "L KV d"],
    values: Float[Array, "L KV d"],
    columns: Columns | None,
    *,
    block_size: int,
    scale: float,
    tiling: Tiling,
    interpretable: bool,
) -> Float[Array, "L H d"]:
    """Outputs, 0 in rows that are padding.

    Args:
        tiles: every block of every head, a multiple of the teams.
        bits: which blocks of keys a block of rows sees, lowest bit first, its own one left out.
        queries, keys, values: whole blocks, none of two requests; values are finite in all rows.
        columns: single columns that are seen besides.
        block_size: 64 or 128.
        scale: not negative.
        tiling: how the work is cut.
        interpretable: as in `attend`.
    """
    heads, head_dim = queries.shape[1:]
    group = heads // keys.shape[1]
    dtype = queries.dtype
    teams, step_keys, stages = tiling
    warpgroups = block_size // ROWS  # of a team that compute
    computing = teams * warpgroups
    per_block = block_size // step_keys
    table = jnp.stack(tiles, axis=1)
    column_arrays = () if columns is None else tuple(columns)

    def body(table_gmem, bits_gmem, q_gmem, k_gmem, v_gmem, *rest):
        column_refs, rest = rest[: len(column_arrays)], rest[len(column_arrays) :]
        out_gmem, q_smem, k_smem, v_smem, q_ready, *barriers = rest
        k_ready, v_ready, k_free, v_free = barriers
        warpgroup = lax.axis_index("warpgroup")
        team = jnp.where(warpgroup < computing, lax.div(warpgroup, warpgroups), warpgroup - computing)
        number = lax.axis_index("program") * teams + team
        tile = Tiles(*(table_gmem[number, column] for column in range(len(Tiles._fields))))
        own_row = tile.block * block_size

        def slot_of(step):
            return team * stages + lax.rem(step, stages)

        def produce():
            kv_head = lax.div(tile.head, group)

            def load(step, key_rows, value_rows):
                slot = slot_of(step)
                reused = step >= stages
                for rows, ring, ready, free in (
                    (key_rows, k_smem, k_ready, k_free),
                    (value_rows, v_smem, v_ready, v_free),
                ):

                    @pl.when(reused)
                    def _(free=free):
                        mgpu.barrier_wait(free.at[slot])

                    mgpu.copy_gmem_to_smem(rows, ring.at[slot], ready.at[slot])

            def load_block(block, step):
                for part in range(per_block):
                    row = pl.multiple_of(block * block_size + part * step_keys, step_keys)
                    place = (pl.ds(row, step_keys), kv_head)
                    load(step + part, k_gmem.at[place], v_gmem.at[place])
                return step + per_block

            def load_columns(step, _):
                place = pl.ds(pl.multiple_of(tile.first_column + (step - per_block) * step_keys, step_keys), step_keys)
                load(step, column_refs[0].at[place], column_refs[1].at[place])
                return ()

            def load_word(index, step):
                def load_lowest(carry):
                    word, step = carry
                    lowest = word & -word
                    step = load_block(index * WORD + WORD - 1 - lax.clz(lowest), step)
                    return word ^ lowest, step

                word = bits_gmem[tile.head, tile.block, index]
                return lax.while_loop(lambda carry: carry[0] != 0, load_lowest, (word, step))[1]

            step = load_block(tile.block, jnp.int32(0))
            if column_refs:
                lax.fori_loop(step, step + tile.column_steps, load_columns, ())
            words = lax.div(tile.block + WORD - 1, WORD)
            lax.fori_loop(tile.first_word, words, load_word, step + tile.column_steps)

            def drain(step, _):
                mgpu.barrier_wait(k_free.at[slot_of(step)])
                mgpu.barrier_wait(v_free.at[slot_of(step)])
                return ()

            # Every phase of a barrier is awaited by someone, so that none is left open when the program ends.
            lax.fori_loop(jnp.maximum(tile.steps - stages, 0), tile.steps, drain, ())

        def write(result, first):
            mgpu.commit_smem()  # until here other warps may have been reading the queries that lie there
            q_smem[warpgroup] = result
            mgpu.commit_smem()
            place = pl.ds(pl.multiple_of(own_row + first, ROWS), ROWS)
            mgpu.copy_smem_to_gmem(q_smem.at[warpgroup], out_gmem.at[place, tile.head])
            mgpu.wait_smem_to_gmem(0)

        def consume(first):
            place = pl.ds(pl.multiple_of(own_row + first, ROWS), ROWS)
            mgpu.copy_gmem_to_smem(q_gmem.at[place, tile.head], q_smem.at[warpgroup], q_ready.at[warpgroup])
            mgpu.barrier_wait(q_ready.at[warpgroup])
            shape = (ROWS, step_keys)

            def causal(step):
                return iota(shape, 1) + step * step_keys <= iota(shape, 0) + first

            def by_column(step):
                place = pl.ds(pl.multiple_of((step - per_block) * step_keys, step_keys), step_keys)
                seen = column_refs[2].at[tile.head, tile.block, place]
                seen = mgpu.load(seen, layout=LAYOUT.reduce(0), optimized=False)
                return lax.broadcast_in_dim(seen, shape, [1]) > 0

            parts = [(jnp.int32(per_block), causal)]
            if column_refs:
                parts.append((per_block + tile.column_steps, by_column))
            rings = (k_smem, v_smem, k_ready, v_ready, k_free, v_free)
            sums = attend(
                Stream(q_smem.at[warpgroup], *rings, slot_of),
                jnp.int32(0),
                (*parts, (tile.steps, None)),
                scale=scale,
                interpretable=interpretable,
            )
            final = sums.result * lax.broadcast_in_dim(1.0 / sums.total, sums.result.shape, [0])
            is_row = iota(final.shape, 0) + first < tile.rows
            write(jnp.where(is_row, final, 0.0).astype(dtype), first)

        @pl.when(warpgroup >= computing)
        def _():
            mgpu.set_max_registers(24, action="decrease")
            pl.when(tile.rows > 0)(produce)

        @pl.when(warpgroup < computing)
        def _():
            mgpu.set_max_registers(consumer_registers(computing, teams), action="increase")
            first = lax.rem(warpgroup, warpgroups) * ROWS
            pl.when(tile.rows > 0)(lambda: consume(first))

            @pl.when(tile.rows == 0)
            def _():
                write(mgpu.layout_cast(jnp.zeros((ROWS, head_dim), dtype), LAYOUT), first)

    transforms = (
        mgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    ring = mgpu.SMEM((teams * stages, step_keys, head_dim), dtype, transforms=transforms)
    return mgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(queries.shape, dtype),
        scratch_types=[
            mgpu.SMEM((computing, ROWS, head_dim), dtype, transforms=transforms),
            ring,
            ring,
            mgpu.Barrier(num_barriers=computing),
            mgpu.Barrier(num_barriers=teams * stages),
            mgpu.Barrier(num_barriers=teams * stages),
            mgpu.Barrier(num_arrivals=warpgroups, num_barriers=teams * stages),
            mgpu.Barrier(num_arrivals=warpgroups, num_barriers=teams * stages),
        ],
        grid=(table.shape[0] // teams,),
        grid_names=("program",),
        num_threads=computing + teams,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(table, bits, queries, keys, values, *column_arrays)
