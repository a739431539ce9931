"""Row compaction: the entry point that picks a backend."""

from typing import Literal

from jaxtyping import Array, Int32, Shaped

from pallas_kernels.compact_rows.reference import compact_rows_reference

Backend = Literal["auto", "reference", "mosaic_gpu", "mosaic_tpu"]


def choose_backend(*, platform: str | None = None) -> str:
    """Name the backend that `backend="auto"` takes on `platform` (default: jax's default backend)."""
    del platform
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
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

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
    if backend == "auto":
        backend = choose_backend()  # type: ignore[assignment]
    if backend == "reference":
        return compact_rows_reference(arrays, indices, count, out_rows=out_rows)
    raise ValueError(f"compact_rows: backend {backend!r} is not one of auto, reference, mosaic_gpu, mosaic_tpu")
