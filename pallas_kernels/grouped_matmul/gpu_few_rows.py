"""Products of a few rows with one matrix of a stack on Hopper GPUs (Mosaic GPU): decode steps, ends of chunks.

Such a product is bound by the bytes of the matrix, so everything serves one end: copies in flight at all times on all
multiprocessors. Every program takes some columns of the matrix and a part of the inner dimension, so short that there
are about two programs for every multiprocessor; XLA adds up the parts, in a fixed order. Matrices that take the same
rows, such as those of query, key and value, share one launch.

The product is the transposed one, W^T x^T: the rows that wgmma wants 64 of are columns of the matrix, and the few rows
are its columns, of which it wants only 8.
"""

from collections.abc import Callable
from itertools import accumulate
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
        parts: of the inner dimension, as equal as whole steps allow.
        stages: steps in flight in one program.
    """

    width: int
    parts: int
    stages: int


def default_tiling(rows: int, inner: int, columns: tuple[int, ...]) -> Tiling:
    """Tiles as wide as divide all matrices' columns, as many parts as make one wave of programs, and all memory in
    flight."""
    width = 128 if all(count % 128 == 0 for count in columns) else 64
    parts = min(max(PROGRAMS // (sum(columns) // width), 1), inner // STEP)
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
    product = _product(rows, weights, group, tiling)
    return _finish(combine(*jnp.split(product, len(weights), axis=1)), rows, count)


def few_rows_matmul_each(
    rows: Float[Array, "M K"],
    weights: tuple[Float[Array, "groups K _"], ...],
    count: Int32[Array, ""],
    group: Int32[Array, ""],
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """Products of the rows with every stack's matrix `group`, whatever their columns; zeros from row `count` on."""
    product = _finish(_product(rows, weights, group, tiling), rows, count)
    # Left alone, XLA turns each matrix's product around on its own, and what is done with it as well.
    product = lax.optimization_barrier(product)
    ends = accumulate(weight.shape[2] for weight in weights)
    return tuple(jnp.split(product, list(ends)[:-1], axis=1))


def _product(rows, weights, group, tiling):
    """Float32 products with all matrices side by side, [M, N of all]."""
    num_rows, inner = rows.shape
    padded = -(-num_rows // ALIGNMENT) * ALIGNMENT
    tiling = tiling or default_tiling(padded, inner, tuple(weight.shape[2] for weight in weights))
    x = jnp.pad(rows, ((0, padded - num_rows), (0, 0)))
    parts = _multiply(x, weights, jnp.reshape(group, (1,)), tiling)
    return parts.sum(1).reshape(-1, padded).T[:num_rows]


def _finish(product, rows, count):
    """A product in the rows' type, zeros from row `count` on."""
    real = jnp.arange(rows.shape[0], dtype=jnp.int32) < count
    return jnp.where(real[:, None], product, 0.0).astype(rows.dtype)


def _multiply(x, weights, group, tiling):
    """The kernel: the products of every part, [tiles, parts, width, M] float32, those of the first matrix first."""
    padded, inner = x.shape
    width, parts, stages = tiling
    ends = list(accumulate(weight.shape[2] // width for weight in weights))  # of every matrix's tiles
    tiles, all_steps = ends[-1], inner // STEP
    dtype = x.dtype

    def body(group_gmem, x_gmem, *refs):
        weights_gmem = refs[: len(weights)]
        out_gmem, x_smem, w_smem, ready, free = refs[len(weights) :]
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        first_step = lax.div(part * all_steps, parts)
        steps = lax.div((part + 1) * all_steps, parts) - first_step
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 1)
        def _produce():
            matrix = group_gmem[0]

            def load(step, _):
                slot = lax.rem(step, stages)
                own_rows = pl.ds((first_step + step) * STEP, STEP)

                @pl.when(step >= stages)
                def _():
                    mgpu.barrier_wait(free.at[slot])

                for source, begin, end in zip(weights_gmem, [0, *ends], ends, strict=False):

                    @pl.when((tile >= begin) & (tile < end))
                    def _(source=source, begin=begin):
                        copied = source.at[matrix, own_rows, pl.ds((tile - begin) * width, width)]
                        mgpu.copy_gmem_to_smem(copied, w_smem.at[slot], ready.at[slot])

                mgpu.copy_gmem_to_smem(x_gmem.at[:, own_rows], x_smem.at[slot], ready.at[slot])
                return ()

            def drain(step, _):
                mgpu.barrier_wait(free.at[lax.rem(step, stages)])
                return ()

            # Every phase of a barrier is awaited by someone, so that none is left open when the program ends.
            lax.fori_loop(0, steps, load, ())
            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, ())

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
            mgpu.barrier_arrive(free.at[lax.rem(steps - 1, stages)])
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
