"""Products of a few rows with one matrix of a stack on Hopper GPUs (Mosaic GPU): decode steps, ends of chunks.

Such a product is bound by the bytes of the matrix, so everything serves one end: copies in flight at all times on all
multiprocessors. Every program takes some columns of the matrix and an equal part of the inner dimension, so short that
there are about two programs for every multiprocessor; XLA adds up the parts, in a fixed order.

The product is the transposed one, W^T x^T: the rows that wgmma wants 64 of are columns of the matrix, and the few rows
are its columns, of which it wants only 8.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.hopper import MULTIPROCESSORS, SHARED_MEMORY

MOST_ROWS = 128  # beyond, tiles of 128 rows keep the matrix units busier than the memory
ALIGNMENT = 8  # rows
STEP = 64  # of the inner dimension: 128 bytes of a row, the widest swizzle
PER_MULTIPROCESSOR = 2  # programs: one computes while the other waits
PROGRAMS = PER_MULTIPROCESSOR * MULTIPROCESSORS
RESERVED_MEMORY = 3 * 1024  # barriers, and what the driver keeps per program
MOST_STAGES = 8
BYTES = 2  # of an element


class Tiling(NamedTuple):
    """How the product is cut.

    Attributes:
        width: columns of a program.
        parts: of the inner dimension; divides its steps.
        stages: steps in flight in one program.
    """

    width: int
    parts: int
    stages: int


def default_tiling(rows: int, inner: int, columns: int) -> Tiling:
    """Tiles as wide as divide the columns, as many parts as make one wave of programs, and all memory in flight."""
    width = 128 if columns % 128 == 0 else 64
    tiles, steps = columns // width, inner // STEP
    parts = max(parts for parts in range(1, steps + 1) if steps % parts == 0 and parts * tiles <= max(PROGRAMS, tiles))
    stages = (SHARED_MEMORY // PER_MULTIPROCESSOR - RESERVED_MEMORY) // ((width + rows) * STEP * BYTES)
    return Tiling(width, parts, min(stages, MOST_STAGES))


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
    tiling = tiling or default_tiling(padded, inner, len(weights) * columns)
    x = jnp.pad(rows, ((0, padded - num_rows), (0, 0)))
    parts = _multiply(x, weights, jnp.reshape(group, (1,)), tiling)
    products = parts.sum(1).reshape(len(weights), columns, padded)[:, :, :num_rows].swapaxes(1, 2)
    real = jnp.arange(num_rows, dtype=jnp.int32) < count
    return jnp.where(real[:, None], combine(*products), 0.0).astype(rows.dtype)


def _multiply(x, weights, group, tiling):
    """The kernel: the products of every part, [tiles, parts, width, M] float32, those of the first matrix first."""
    padded, inner = x.shape
    width, parts, stages = tiling
    column_tiles, steps = weights[0].shape[2] // width, inner // STEP // parts
    tiles = len(weights) * column_tiles
    dtype = x.dtype

    def body(group_gmem, x_gmem, *refs):
        weights_gmem = refs[: len(weights)]
        out_gmem, x_smem, w_smem, ready, free = refs[len(weights) :]
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 1)
        def _produce():
            matrix = group_gmem[0]
            stack = lax.div(tile, column_tiles)
            own_columns = pl.ds(lax.rem(tile, column_tiles) * width, width)

            def load(step, _):
                slot = lax.rem(step, stages)
                own_rows = pl.ds((part * steps + step) * STEP, STEP)

                @pl.when(step >= stages)
                def _():
                    mgpu.barrier_wait(free.at[slot])

                for number, source in enumerate(weights_gmem):

                    @pl.when(stack == number)
                    def _(source=source):
                        copied = source.at[matrix, own_rows, own_columns]
                        mgpu.copy_gmem_to_smem(copied, w_smem.at[slot], ready.at[slot])

                mgpu.copy_gmem_to_smem(x_gmem.at[:, own_rows], x_smem.at[slot], ready.at[slot])
                return ()

            def drain(step, _):
                mgpu.barrier_wait(free.at[lax.rem(step, stages)])
                return ()

            # Every phase of a barrier is awaited by someone, so that none is left open when the program ends.
            lax.fori_loop(0, steps, load, ())
            lax.fori_loop(max(steps - stages, 0), steps, drain, ())

        @pl.when(warpgroup == 0)
        def _consume():
            def accumulate(accumulator):
                def multiply(step, _):
                    slot = lax.rem(step, stages)
                    mgpu.barrier_wait(ready.at[slot])
                    mgpu.wgmma(accumulator, w_smem.at[slot].transpose((1, 0)), x_smem.at[slot].transpose((1, 0)))
                    mgpu.wgmma_wait(1)  # all but this step's have ended

                    @pl.when(step > 0)
                    def _():
                        mgpu.barrier_arrive(free.at[lax.rem(step - 1, stages)])

                    return ()

                lax.fori_loop(0, steps, multiply, ())
                return accumulator[...]

            result = pl.run_scoped(accumulate, mgpu.WGMMAAccumulatorRef((width, padded), jnp.float32))
            mgpu.barrier_arrive(free.at[(steps - 1) % stages])
            out_gmem[tile, part] = result

    tiled = (
        mgpu.TilingTransform((ALIGNMENT, STEP)),  # pyright: ignore[reportAbstractUsage]
        mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return mgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles, parts, width, padded), jnp.float32),
        scratch_types=[
            mgpu.SMEM((stages, padded, STEP), dtype, transforms=tiled),
            mgpu.SMEM((stages, STEP, width), dtype, transforms=tiled),
            mgpu.Barrier(num_arrivals=2, num_barriers=stages),
            mgpu.Barrier(num_barriers=stages),
        ],
        grid=(parts, tiles),
        grid_names=("part", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(group, x, *weights)
