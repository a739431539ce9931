"""Products of a few rows with one matrix of a stack on Hopper GPUs (Mosaic GPU): decode steps, ends of chunks.

Such a product is bound by the bytes of the matrix, so everything serves one end: copies in flight at all times on all
multiprocessors. The matrix, in cells of one step of the inner dimension by `width` columns, column tile after column
tile, forms one line, and every program takes an equal stretch of it, whatever the shape. What a stretch has of one
column tile is an item, the unit of partial results, which XLA adds up in a fixed order. Along the line each item is of
the next stretch, or the next tile, or both: stretch + tile numbers the items without a list.

The product is the transposed one, W^T x^T: the rows that wgmma wants 64 of are columns of the matrix, and the few rows
are its columns, of which it wants only 8.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

MOST_ROWS = 128  # beyond, tiles of 128 rows keep the matrix units busier than the memory
ALIGNMENT = 8  # rows
STEP = 64  # of the inner dimension: 128 bytes of a row, the widest swizzle
MULTIPROCESSORS = 132  # of an H100 or H200 (SXM)
PROGRAMS = 2  # on each of them: one computes while the other waits
SHARED_MEMORY = 227 * 1024
RESERVED_MEMORY = 3 * 1024  # barriers, and what the driver keeps per program
MOST_STAGES = 8
BYTES = 2  # of an element


class Tiling(NamedTuple):
    """How the line is cut.

    Attributes:
        width: columns of a tile.
        stages: cells in flight in one program.
        programs: programs, each with an equal stretch.
    """

    width: int
    stages: int
    programs: int


def default_tiling(rows: int, columns: int) -> Tiling:
    """Tiles as wide as divide the columns, and as many cells in flight as shared memory holds."""
    width = 128 if columns % 128 == 0 else 64
    memory = SHARED_MEMORY // PROGRAMS - RESERVED_MEMORY
    stages = min(MOST_STAGES, memory // ((width + rows) * STEP * BYTES))
    return Tiling(width, stages, PROGRAMS * MULTIPROCESSORS)


def few_rows_matmul(
    rows: Float[Array, "M K"],
    weights: tuple[Float[Array, "groups K N"], ...],
    count: Int32[Array, ""],
    group: Int32[Array, ""],
    combine: Callable[..., jax.Array],
    tiling: Tiling | None = None,
) -> Float[Array, "M N"]:
    """`combine` of the float32 products of the rows with every stack's matrix `group`; zeros from row `count` on."""
    num_rows, inner = rows.shape
    padded = -(-num_rows // ALIGNMENT) * ALIGNMENT
    columns = weights[0].shape[2]
    tiling = tiling or default_tiling(padded, columns)
    tiles, steps = len(weights) * columns // tiling.width, inner // STEP
    tiling = tiling._replace(programs=min(tiling.programs, tiles * steps))
    x = jnp.pad(rows, ((0, padded - num_rows), (0, 0)))
    partial = _multiply(x, weights, jnp.reshape(group, (1,)), tiling)
    items, there = items_of_tiles(tiles, steps, tiling.programs)
    total = jnp.zeros((tiles, *partial.shape[1:]), jnp.float32)
    for number in range(items.shape[1]):
        total += jnp.where(there[:, number, None, None], partial[items[:, number]], 0.0)
    products = total.reshape(len(weights), columns, padded)[:, :, :num_rows].swapaxes(1, 2)
    real = jnp.arange(num_rows, dtype=jnp.int32) < count
    return jnp.where(real[:, None], combine(*products), 0.0).astype(rows.dtype)


def items_of_tiles(tiles: int, steps: int, programs: int) -> tuple[np.ndarray, np.ndarray]:
    """For every tile its items in order, and which of these entries exist."""
    begin = np.arange(programs + 1) * tiles * steps // programs
    first = np.searchsorted(begin, np.arange(tiles) * steps, side="right") - 1
    last = np.searchsorted(begin, np.arange(1, tiles + 1) * steps, side="left") - 1
    stretch = first[:, None] + np.arange((last - first).max() + 1)
    there = stretch <= last[:, None]
    return np.where(there, stretch + np.arange(tiles)[:, None], 0), there


def _multiply(x, weights, group, tiling):
    """The kernel: undivided products of every item, [items, width, M] float32."""
    padded, inner = x.shape
    width, stages, programs = tiling
    column_tiles, steps = weights[0].shape[2] // width, inner // STEP
    tiles = len(weights) * column_tiles
    dtype = x.dtype

    def body(group_gmem, x_gmem, *refs):
        weights_gmem = refs[: len(weights)]
        out_gmem, x_smem, w_smem, ready, free = refs[len(weights) :]
        program = lax.axis_index("program")
        warpgroup = lax.axis_index("warpgroup")
        begin, end = (lax.div((program + more) * (tiles * steps), programs) for more in (0, 1))

        @pl.when(warpgroup == 1)
        def _produce():
            matrix = group_gmem[0]

            def load(index, _):
                slot = lax.rem(index - begin, stages)
                tile, step = lax.div(index, steps), lax.rem(index, steps)
                stack, part = lax.div(tile, column_tiles), pl.ds(step * STEP, STEP)
                own_columns = pl.ds(lax.rem(tile, column_tiles) * width, width)

                @pl.when(index - begin >= stages)
                def _():
                    mgpu.barrier_wait(free.at[slot])

                for number, source in enumerate(weights_gmem):

                    @pl.when(stack == number)
                    def _(source=source):
                        mgpu.copy_gmem_to_smem(source.at[matrix, part, own_columns], w_smem.at[slot], ready.at[slot])

                mgpu.copy_gmem_to_smem(x_gmem.at[:, part], x_smem.at[slot], ready.at[slot])
                return ()

            def drain(index, _):
                mgpu.barrier_wait(free.at[lax.rem(index - begin, stages)])
                return ()

            # Every phase of a barrier is awaited by someone, so that none is left open when the program ends.
            lax.fori_loop(begin, end, load, ())
            lax.fori_loop(jnp.maximum(end - stages, begin), end, drain, ())

        @pl.when(warpgroup == 0)
        def _consume():
            def multiply_item(place):
                tile = lax.div(place, steps)
                stop = jnp.minimum((tile + 1) * steps, end)

                def accumulate(accumulator):
                    def step(index, _):
                        slot = lax.rem(index - begin, stages)
                        mgpu.barrier_wait(ready.at[slot])
                        mgpu.wgmma(accumulator, w_smem.at[slot].transpose((1, 0)), x_smem.at[slot].transpose((1, 0)))
                        mgpu.wgmma_wait(1)  # all but this step's have ended

                        @pl.when(index > place)
                        def _():
                            mgpu.barrier_arrive(free.at[lax.rem(index - 1 - begin, stages)])

                        return ()

                    lax.fori_loop(place, stop, step, ())
                    return accumulator[...]

                result = pl.run_scoped(accumulate, mgpu.WGMMAAccumulatorRef((width, padded), jnp.float32))
                mgpu.barrier_arrive(free.at[lax.rem(stop - 1 - begin, stages)])
                out_gmem[program + tile] = result
                return stop

            lax.while_loop(lambda place: place < end, multiply_item, begin)

    tiled = (
        mgpu.TilingTransform((ALIGNMENT, STEP)),  # pyright: ignore[reportAbstractUsage]
        mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return mgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((programs + tiles - 1, width, padded), jnp.float32),
        scratch_types=[
            mgpu.SMEM((stages, padded, STEP), dtype, transforms=tiled),
            mgpu.SMEM((stages, STEP, width), dtype, transforms=tiled),
            mgpu.Barrier(num_arrivals=2, num_barriers=stages),
            mgpu.Barrier(num_barriers=stages),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(group, x, *weights)
