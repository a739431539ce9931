"""Row compaction on Hopper GPUs at memory speed: TMA copies whole rows through shared memory (Mosaic GPU).

Each program walks steps of a few output rows. A row is one TMA load from wherever it lies; the rows of a step leave in
one TMA store, since they are neighbours in the output. Rows past `count` are loads from beyond the end of the array,
which TMA fills with zeros without touching memory. No register ever holds a value.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.hopper import MULTIPROCESSORS

STEP_BYTES = 32 * 1024
STAGES = 6
LOADS_AHEAD = 4
LARGEST_BOX = 256  # elements of one TMA box along one axis


def row_box(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[int, int] | None:
    """A row as (outer, inner) with both within a TMA box and `inner` whole 16-byte units, or None if there is none."""
    size = math.prod(shape[1:])
    unit = 16 // dtype.itemsize if dtype.itemsize <= 4 and dtype != jnp.bool_ else 0
    if unit == 0 or size % unit or size * dtype.itemsize > STEP_BYTES:
        return None
    inner = max(n for n in range(unit, LARGEST_BOX + 1, unit) if size % n == 0)
    return (size // inner, inner) if size // inner <= LARGEST_BOX else None


def compact_rows_mosaic_gpu(
    arrays: tuple[Shaped[Array, "T ..."], ...],
    indices: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    out_rows: int,
) -> tuple[Shaped[Array, "out_rows ..."], ...]:
    """Rows `indices[:count]` of each array, then zeros; see `compact_rows`.

    Raises:
        ValueError: a row that is not a multiple of 16 bytes or does not fit a TMA box (positions, booleans).
    """
    moved = []
    for place, array in enumerate(arrays):
        box = row_box(array.shape, array.dtype)
        if box is None:
            raise ValueError(
                f"compact_rows: backend 'mosaic_gpu' cannot move arrays[{place}], {array.dtype}{array.shape}: a row "
                f"must be a multiple of 16 bytes, at most {STEP_BYTES} of them; use backend='reference' or 'auto'"
            )
        moved.append(_compact(array, box, indices, count, out_rows))
    return tuple(moved)


def _compact(array, box, indices, count, out_rows):
    rows = array.shape[0]
    step_rows = max(1, min(STEP_BYTES // (box[0] * box[1] * array.dtype.itemsize), 32))
    steps = -(-out_rows // step_rows)
    taken = indices[: steps * step_rows]
    taken = jnp.pad(taken, (0, steps * step_rows - taken.shape[0]))
    place = jnp.arange(steps * step_rows, dtype=jnp.int32)
    live = place < jnp.minimum(jnp.minimum(count, indices.shape[0]), out_rows)
    source = jnp.where(live, taken, rows)
    programs = min(steps, MULTIPROCESSORS)

    def body(array_gmem, source_gmem, out_gmem, buffer, ready):
        program = lax.axis_index("program")
        mine = lax.div(steps - 1 - program, programs) + 1

        def load(index):
            slot = lax.rem(index, STAGES)
            first = (program + index * programs) * step_rows
            # All row numbers first: the copies that follow keep the order, and each read alone would cost its latency.
            numbers = [source_gmem[first + j] for j in range(step_rows)]
            for j, number in enumerate(numbers):
                mgpu.copy_gmem_to_smem(array_gmem.at[pl.ds(number, 1)], buffer.at[slot, pl.ds(j, 1)], ready.at[slot])

        def start(index, _):
            load(index)
            return ()

        lax.fori_loop(0, jnp.minimum(mine, LOADS_AHEAD), start, ())

        def move(index, _):
            slot = lax.rem(index, STAGES)
            mgpu.barrier_wait(ready.at[slot])
            first = (program + index * programs) * step_rows
            mgpu.copy_smem_to_gmem(buffer.at[slot], out_gmem.at[pl.ds(first, step_rows)])

            @pl.when(index + LOADS_AHEAD < mine)
            def _():
                mgpu.wait_smem_to_gmem(STAGES - LOADS_AHEAD, wait_read_only=True)
                load(index + LOADS_AHEAD)

            return ()

        lax.fori_loop(0, mine, move, ())
        mgpu.wait_smem_to_gmem(0)

    compacted = mgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((out_rows, *box), array.dtype),
        scratch_types=[
            mgpu.SMEM((STAGES, step_rows, *box), array.dtype),
            mgpu.Barrier(num_arrivals=step_rows, num_barriers=STAGES),
        ],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=mgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(array.reshape(rows, *box), source)
    return compacted.reshape(out_rows, *array.shape[1:])
