"""Row compaction in plain jnp: the definition of the operation, and the path on platforms without a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def compact_rows_reference(
    arrays: tuple[Shaped[Array, "T ..."], ...],
    indices: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    out_rows: int,
) -> tuple[Shaped[Array, "out_rows ..."], ...]:
    """Gather rows `indices[:count]` of each array to the front of a new one; the rest is zero, even where NaN was."""
    taken = indices[:out_rows]
    if taken.shape[0] < out_rows:
        taken = jnp.pad(taken, (0, out_rows - taken.shape[0]))
    live = jnp.arange(out_rows, dtype=jnp.int32) < jnp.minimum(count, indices.shape[0])

    def gather(array):
        rows = jnp.take(array, taken, axis=0, mode="clip")
        return jnp.where(live.reshape((-1,) + (1,) * (array.ndim - 1)), rows, jnp.zeros((), array.dtype))

    return tuple(gather(array) for array in arrays)
