"""Row compaction on TPUs (Mosaic TPU): the DMA engine moves rows from memory to memory, whole runs at a time.

Output rows are dealt with in groups. A group whose rows are neighbours in the source, which is nearly every group when
whole blocks stay, is one copy; any other group is one copy per row, and rows past `count` are copies of zeros. Every
group thus moves the same number of bytes, which is what its semaphore waits for.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

GROUP = 16  # rows
GROUPS = 16  # groups of one grid step
LANES = 128


def unsupported(shape: tuple[int, ...], dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot move an array, or None if it can."""
    if math.prod(shape[1:]) % LANES or dtype.itemsize not in (2, 4):
        return f"{dtype}{tuple(shape)}: a row must be a multiple of {LANES} elements of 2 or 4 bytes"
    return None


def compact_rows_mosaic_tpu(
    arrays: tuple[Shaped[Array, "T ..."], ...],
    indices: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    out_rows: int,
) -> tuple[Shaped[Array, "out_rows ..."], ...]:
    """Rows `indices[:count]` of each array, then zeros; see `compact_rows`.

    Raises:
        ValueError: a row that is not a multiple of 128 elements of 2 or 4 bytes (positions, booleans).
    """
    for place, array in enumerate(arrays):
        reason = unsupported(array.shape, array.dtype)
        if reason is not None:
            raise ValueError(
                f"compact_rows: backend 'mosaic_tpu' cannot move arrays[{place}], {reason}; "
                "use backend='reference' or 'auto'"
            )
    steps = -(-out_rows // (GROUP * GROUPS))
    padded_rows = steps * GROUP * GROUPS
    taken = indices[:padded_rows]
    taken = jnp.pad(taken, (0, padded_rows - taken.shape[0]))
    live = jnp.arange(padded_rows, dtype=jnp.int32) < jnp.minimum(jnp.minimum(count, indices.shape[0]), out_rows)
    source = jnp.where(live, taken, -1).reshape(steps * GROUPS, GROUP)
    run = (source[:, 0] >= 0) & (source == source[:, :1] + jnp.arange(GROUP, dtype=jnp.int32)).all(1)
    source = source.reshape(steps, 1, GROUPS * GROUP)
    run = run.astype(jnp.int32).reshape(steps, 1, GROUPS)
    return tuple(_compact(array, source, run, out_rows) for array in arrays)


def _compact(array, source, run, out_rows):
    rows = array.shape[0]
    # A row on two axes of its own: copies of single rows then start and end on whole tiles.
    slabs = array.reshape(rows, -1, LANES)
    groups = -(-out_rows // GROUP)
    compacted = pl.pallas_call(
        functools.partial(_kernel, groups=groups),
        grid=(source.shape[0],),
        in_specs=[
            pl.BlockSpec((1, 1, GROUPS * GROUP), lambda step: (step, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, GROUPS), lambda step: (step, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((groups * GROUP, *slabs.shape[1:]), array.dtype),
        scratch_shapes=[pltpu.VMEM((GROUP, *slabs.shape[1:]), array.dtype), pltpu.SemaphoreType.DMA((2,))],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="compact_rows",
    )(source, run, slabs)
    return compacted[:out_rows].reshape(out_rows, *array.shape[1:])


def _kernel(source, run, array, out, zeros, done, *, groups):
    step = pl.program_id(0)

    @pl.when(step == 0)
    def _():
        zeros[...] = jnp.zeros_like(zeros)

    def wait(group, parity):
        @pl.when(group < groups)
        def _():
            rows = out.at[pl.ds(group * GROUP, GROUP)]
            pltpu.make_async_copy(rows, rows, done.at[parity]).wait()

    def start(index, _):
        group = step * GROUPS + index
        first = group * GROUP
        finished = done.at[lax.rem(step, 2)]

        @pl.when((group < groups) & (run[0, 0, index] == 1))
        def _():
            rows = array.at[pl.ds(source[0, 0, index * GROUP], GROUP)]
            pltpu.make_async_copy(rows, out.at[pl.ds(first, GROUP)], finished).start()

        @pl.when((group < groups) & (run[0, 0, index] == 0))
        def _():
            for j in range(GROUP):
                row = source[0, 0, index * GROUP + j]

                @pl.when(row >= 0)
                def _(row=row, j=j):
                    pltpu.make_async_copy(array.at[pl.ds(row, 1)], out.at[pl.ds(first + j, 1)], finished).start()

                @pl.when(row < 0)
                def _(j=j):
                    pltpu.make_async_copy(zeros.at[pl.ds(j, 1)], out.at[pl.ds(first + j, 1)], finished).start()

        return 0

    lax.fori_loop(0, GROUPS, start, 0)

    # The copies of one step run while the next one starts its own.
    def finish(of_step):
        def one(index, _):
            wait(of_step * GROUPS + index, lax.rem(of_step, 2))
            return 0

        lax.fori_loop(0, GROUPS, one, 0)

    @pl.when(step > 0)
    def _():
        finish(step - 1)

    @pl.when(step == pl.num_programs(0) - 1)
    def _():
        finish(step)
