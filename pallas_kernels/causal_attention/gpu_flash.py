"""Flash attention with wgmma and TMA (Mosaic GPU): the kernel behind `causal_attention` and `chunk_attention`.

One program handles one tile of query rows of one head: a few compute warpgroups of 64 rows each, which do the steps of
`gpu_steps`, and a memory warpgroup that streams key and value tiles through shared memory.

Which key tiles a program visits follows from the rows' first visible ones at run time: from the first tile that its
first row sees to the causal diagonal. Only tiles that some row sees in part are masked. Programs start in order of
falling work, so that the longest do not end last.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention.gpu_steps import LAYOUT, ROWS, Stream, attend, consumer_registers, iota
from pallas_kernels.causal_attention.key_rows import KeyRows
from pallas_kernels.causal_attention.shapes import LN_2

PIECE = 8  # rows of which copies to shared memory are multiples

# Columns of the tile table; the last two repeat for every warpgroup.
QUERY, KEY, COUNT, SEQUENCE, FIRST, WHOLE_FIRST = 0, 1, 2, 3, 4, 5


class Tiling(NamedTuple):
    """How one program is cut.

    Attributes:
        warpgroups: compute warpgroups, 64 query rows each.
        keys: keys of one step.
        stages: steps whose keys and values shared memory holds.
    """

    warpgroups: int
    keys: int
    stages: int


def unsupported(heads: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype is {dtype}; it takes bfloat16 and float16 (wgmma has no float32 product)"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    return None


def default_tiling(head_dim: int) -> Tiling:
    """The fastest tiling measured for a head size: as many rows and keys as the registers hold."""
    return {64: Tiling(3, 128, 4), 128: Tiling(2, 128, 2), 256: Tiling(2, 64, 2)}[head_dim]


def tile_table(row_start: Int32[Array, " rows"], groups: KeyRows, tiling: Tiling) -> Int32[Array, "tiles columns"]:
    """What every program has to know, longest first: its tile's first row among the queries and among the keys, the
    count, the sequence, and for each of its warpgroups the first tile of keys that it sees and the first that all its
    rows see from the beginning.

    `row_start` holds every query row's first visible key; all groups of a tile are of one sequence.
    """
    first_row, count, sequence = groups
    group = jnp.arange(first_row.shape[0], dtype=jnp.int32)
    last_row = jnp.clip(count - 1, first_row, first_row + ROWS - 1)
    real = first_row < count
    steps = jnp.where(real, last_row // tiling.keys + 1, 0)
    first = jnp.where(real, row_start[group * ROWS] // tiling.keys, 0)
    whole_first = (row_start[group * ROWS + last_row - first_row] + tiling.keys - 1) // tiling.keys
    by_tile = (x.reshape(-1, tiling.warpgroups) for x in (first_row, count, sequence, first, whole_first, steps))
    first_row, count, sequence, first, whole_first, steps = by_tile
    tiles = first.shape[0]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    work = steps.max(1) - first[:, 0]
    # A stable sort by falling work, as ranks: cheaper on a GPU than a sort of so few.
    earlier = (work[None, :] > work[:, None]) | ((work[None, :] == work[:, None]) & (tile[None, :] < tile[:, None]))
    rank = earlier.sum(1, dtype=jnp.int32)
    shared = jnp.stack([tile * (tiling.warpgroups * ROWS), first_row[:, 0], count[:, 0], sequence[:, 0]], axis=1)
    of_warpgroups = jnp.stack([first, whole_first], axis=2).reshape(tiles, -1)
    table = jnp.concatenate([shared, of_warpgroups], axis=1).astype(jnp.int32)
    return jnp.zeros_like(table).at[rank].set(table, unique_indices=True)


def flash_attention(
    table: Int32[Array, "tiles columns"],
    row_start: Int32[Array, " rows"],
    queries: Float[Array, "T H d"],
    keys: Float[Array, "..."],
    values: Float[Array, "..."],
    last_values: Float[Array, "sequences keys KV d"],
    page_tables: Int32[Array, "sequences max_pages"] | None = None,
    *,
    scale: float,
    return_lse: bool,
    tiling: Tiling,
    interpretable: bool,
) -> tuple[Float[Array, "T H d"], Float[Array, "H rows"] | None]:
    """Outputs and, where asked for, log-sum-exps.

    Args:
        table: of `tile_table`.
        row_start: every row's first visible key, padded to whole tiles.
        queries: padded to whole groups of 64 rows.
        keys, values: rows [T, KV, d], at least as many as a step has, or with `page_tables` pages [P, KV, page, d].
        last_values: the values of every sequence's last step that is not full, with zeros for rows that are not there:
            where `values` hold NaN, a weight of 0 does not cancel it.
        page_tables: where the rows of every sequence lie.
        scale: factor on the scores; not negative, because the kernel takes the maximum before it scales.
        return_lse: also return log-sum-exps.
        tiling: how the work is cut.
        interpretable: for the CPU interpreter alone, which knows neither operands in registers nor accumulators that
            hold something already: values are then multiplied by a plain dot, which does not compile for a GPU.
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    step_keys, stages, dtype = tiling.keys, tiling.stages, queries.dtype
    page = step_keys if page_tables is None else keys.shape[2]
    piece = min(page, step_keys)  # rows of one copy
    pieces = step_keys // piece
    if page_tables is not None:
        keys, values = (pages.reshape(-1, head_dim) for pages in (keys, values))
    layout = LAYOUT
    producer = tiling.warpgroups

    def body(table_gmem, starts_gmem, q_gmem, k_gmem, v_gmem, last_gmem, *rest):
        pages_gmem, rest = (None, rest) if page_tables is None else (rest[0], rest[1:])
        out_gmem, rest = rest[0], rest[1:]
        lse_gmem, rest = (rest[0], rest[1:]) if return_lse else (None, rest)
        q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free = rest
        program = lax.axis_index("program")
        warpgroup = lax.axis_index("warpgroup")
        rank = lax.div(program, heads)
        head = lax.rem(program, heads)
        first_query = table_gmem[rank, QUERY]
        first_row = table_gmem[rank, KEY]
        count = table_gmem[rank, COUNT]
        sequence = table_gmem[rank, SEQUENCE]
        begin = table_gmem[rank, FIRST]
        last_row = jnp.minimum(first_row + tiling.warpgroups * ROWS, count) - 1
        end = jnp.where(first_row < count, lax.div(last_row, step_keys) + 1, begin)

        @pl.when(warpgroup == producer)
        def _produce():
            mgpu.set_max_registers(24, action="decrease")
            kv_head = lax.div(head, group)

            def sources(row):
                """Where the pieces of a step begin, as an index of `keys` and `values` each."""
                if pages_gmem is None:
                    return [(pl.ds(row, step_keys), kv_head)]
                found = []
                for number in range(pieces):
                    # Pieces without a real row read a page that has one: no other entry of the table is looked at.
                    own = jnp.minimum(row + number * piece, count - 1)
                    entry = (pages_gmem[sequence, lax.div(own, page)] * kv_heads + kv_head) * page
                    entry = entry if piece == page else entry + lax.rem(row, page)
                    found.append((pl.ds(pl.multiple_of(entry, PIECE), piece),))
                return found

            def load(index, _):
                slot = lax.rem(index, stages)
                reused = index >= stages
                row = (begin + index) * step_keys
                found = sources(row)

                def copy(source, target, number, ready):
                    mgpu.copy_gmem_to_smem(source, target.at[slot, pl.ds(number * piece, piece)], ready.at[slot])

                @pl.when(reused)
                def _():
                    mgpu.barrier_wait(k_free.at[slot])

                for number, place in enumerate(found):
                    copy(k_gmem.at[place], k_smem, number, k_ready)

                @pl.when(reused)
                def _():
                    mgpu.barrier_wait(v_free.at[slot])

                @pl.when(row + step_keys <= count)
                def _():
                    for number, place in enumerate(found):
                        copy(v_gmem.at[place], v_smem, number, v_ready)

                @pl.when(row + step_keys > count)
                def _():
                    for number in range(pieces):
                        last = last_gmem.at[sequence, pl.ds(number * piece, piece), kv_head]
                        copy(last, v_smem, number, v_ready)

                return ()

            def drain(index, _):
                mgpu.barrier_wait(k_free.at[lax.rem(index, stages)])
                mgpu.barrier_wait(v_free.at[lax.rem(index, stages)])
                return ()

            # Every phase of a barrier is awaited by someone, so that none is left open when the program ends.
            lax.fori_loop(0, end - begin, load, ())
            lax.fori_loop(jnp.maximum(end - begin - stages, 0), end - begin, drain, ())

        @pl.when(warpgroup < producer)
        def _consume():
            mgpu.set_max_registers(consumer_registers(tiling.warpgroups), action="increase")
            own_query = pl.multiple_of(first_query + warpgroup * ROWS, ROWS)
            own_row = first_row + warpgroup * ROWS
            own_first = jnp.minimum(table_gmem[rank, FIRST + 2 * warpgroup], end)
            own_last_row = jnp.minimum(own_row + ROWS, count) - 1
            own_end = jnp.where(own_row < count, lax.div(own_last_row, step_keys) + 1, end)
            own_first = jnp.where(own_row < count, own_first, end)
            whole_first = jnp.clip(table_gmem[rank, WHOLE_FIRST + 2 * warpgroup], own_first + 1, own_end)
            whole_end = jnp.clip(lax.div(own_row + 1, step_keys), whole_first, own_end)

            def slot_of(step):
                return lax.rem(step - begin, stages)

            def skip(step, _):
                slot = slot_of(step)
                mgpu.barrier_wait(k_ready.at[slot])
                mgpu.barrier_arrive(k_free.at[slot])
                mgpu.barrier_wait(v_ready.at[slot])
                mgpu.barrier_arrive(v_free.at[slot])
                return ()

            def write(result):
                mgpu.commit_smem()  # until here other warps may have been reading the queries that lie there
                q_smem[warpgroup] = result
                mgpu.commit_smem()
                mgpu.copy_smem_to_gmem(q_smem.at[warpgroup], out_gmem.at[pl.ds(own_query, ROWS), head])
                mgpu.wait_smem_to_gmem(0)

            @pl.when(own_row < count)
            def _():
                mgpu.copy_gmem_to_smem(
                    q_gmem.at[pl.ds(own_query, ROWS), head], q_smem.at[warpgroup], q_ready.at[warpgroup]
                )

            lax.fori_loop(begin, own_first, skip, ())

            @pl.when(own_row < count)
            def _():
                start = mgpu.load(starts_gmem.at[pl.ds(own_query, ROWS)], layout=layout.reduce(1), optimized=False)
                mgpu.barrier_wait(q_ready.at[warpgroup])

                def visible(step):
                    shape = (ROWS, step_keys)
                    row = iota(shape, 0) + own_row
                    column = iota(shape, 1) + step * step_keys
                    return (column <= row) & (column >= lax.broadcast_in_dim(start, shape, [0]))

                rings = (k_smem, v_smem, k_ready, v_ready, k_free, v_free)
                sums = attend(
                    Stream(q_smem.at[warpgroup], *rings, slot_of),
                    own_first,
                    ((whole_first, visible), (whole_end, None), (own_end, visible)),
                    scale=scale,
                    interpretable=interpretable,
                )
                row = iota((ROWS, head_dim), 0) + own_row
                final = sums.result * lax.broadcast_in_dim(1.0 / sums.total, sums.result.shape, [0])
                write(jnp.where(row < count, final, 0.0).astype(dtype))
                if lse_gmem is not None:
                    row = iota((ROWS,), 0, layout.reduce(1)) + own_row
                    lse = (sums.maximum + jnp.log2(sums.total)) * LN_2
                    lse_gmem[head, pl.ds(own_query, ROWS)] = jnp.where(row < count, lse, 0.0)

            @pl.when((own_row >= count) & (own_query < rows))
            def _():
                write(mgpu.layout_cast(jnp.zeros((ROWS, head_dim), dtype), layout))
                if lse_gmem is not None:
                    lse_gmem[head, pl.ds(own_query, ROWS)] = mgpu.layout_cast(
                        jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)
                    )

            lax.fori_loop(own_end, end, skip, ())

    transforms = (
        mgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    out_type = [jax.ShapeDtypeStruct(queries.shape, dtype)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct((heads, row_start.shape[0]), jnp.float32))
    found = mgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            mgpu.SMEM((tiling.warpgroups, ROWS, head_dim), dtype, transforms=transforms),
            mgpu.SMEM((stages, step_keys, head_dim), dtype, transforms=transforms),
            mgpu.SMEM((stages, step_keys, head_dim), dtype, transforms=transforms),
            mgpu.Barrier(num_barriers=tiling.warpgroups),
            mgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
            mgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
            mgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=stages),
            mgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=stages),
        ],
        grid=(table.shape[0] * heads,),
        grid_names=("program",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(table, row_start, queries, keys, values, last_values, *(() if page_tables is None else (page_tables,)))
    return found[0], found[1] if return_lse else None
