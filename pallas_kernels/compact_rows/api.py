"""Row compaction: the entry point that picks a backend."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.compact_rows.gpu import compact_rows_mosaic_gpu, row_box
from pallas_kernels.compact_rows.reference import compact_rows_reference
from pallas_kernels.compact_rows.tpu import compact_rows_mosaic_tpu
from pallas_kernels.platform import Backend, Kernels, kernels_of

_KERNELS = {"mosaic_gpu": compact_rows_mosaic_gpu, "mosaic_tpu": compact_rows_mosaic_tpu}


def choose_backend(*, row: tuple[int, ...] = (4096,), dtype: str = "bfloat16", platform: str | None = None) -> Kernels:
    """Name the backend that `backend="auto"` takes for an array of such rows (default platform: what jax runs on).

    On Hopper the kernel, for rows that it can move. On TPUs the reference: the kernel wants each row on whole tiles,
    which costs a copy of the array unless its producer already writes it so, and no TPU was there to measure whether
    it still wins.
    """
    if kernels_of(platform) == "mosaic_gpu" and row_box((1, *row), jnp.dtype(dtype)) is not None:
        return "mosaic_gpu"
    return "reference"


def compact_rows(
    arrays: tuple[Shaped[Array, "T ..."], ...],
    indices: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    out_rows: int,
    backend: Backend = "auto",
) -> tuple[Shaped[Array, "out_rows ..."], ...]:
    """Gather the kept rows of several arrays to the front, in order.

    Args:
        arrays: any dtypes, equal first axis (hidden state, residual, positions).
        indices: row to take for each output row, as `top_p_select` returns them; entries from `count` on are ignored.
        count: number of rows to take; traced.
        out_rows: rows of the results.
        backend: "auto" is `choose_backend` for each array; one that is named is used or refused, never replaced.

    Returns:
        For each array, ``out[i] = array[indices[i]]`` for ``i < min(count, out_rows)`` and zeros beyond.

    Raises:
        ValueError: no arrays, first axes that differ, or shapes that the named backend cannot take.
    """
    if not arrays:
        raise ValueError("compact_rows: arrays is empty; pass at least one array")
    rows = arrays[0].shape[0]
    for place, array in enumerate(arrays):
        if array.shape[0] != rows:
            raise ValueError(f"compact_rows: arrays[{place}] has {array.shape[0]} rows and arrays[0] has {rows}")
    if out_rows < 1:
        raise ValueError(f"compact_rows: out_rows is {out_rows}; it must be at least 1")
    count = jnp.asarray(count, jnp.int32)
    if backend == "reference":
        return compact_rows_reference(arrays, indices, count, out_rows=out_rows)
    if backend in _KERNELS:
        return _KERNELS[backend](arrays, indices, count, out_rows=out_rows)
    if backend != "auto":
        raise ValueError(f"compact_rows: backend is {backend!r}; use 'auto', 'reference', 'mosaic_gpu' or 'mosaic_tpu'")
    # Array by array: positions are too narrow for a kernel and too small to need one.
    chosen: list[Kernels] = [choose_backend(row=array.shape[1:], dtype=str(array.dtype)) for array in arrays]
    moved = {
        name: iter(
            compact_rows(
                tuple(array for array, own in zip(arrays, chosen, strict=True) if own == name),
                indices,
                count,
                out_rows=out_rows,
                backend=name,
            )
        )
        for name in set(chosen)
    }
    return tuple(next(moved[name]) for name in chosen)
