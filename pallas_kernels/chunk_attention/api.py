"""Chunk attention over pages: the entry point that picks a backend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.chunk_attention import gpu, tpu
from pallas_kernels.chunk_attention.reference import chunk_attention_reference
from pallas_kernels.chunk_attention.rows import ChunkRows
from pallas_kernels.paged_attention.pools import check_pools
from pallas_kernels.platform import Backend, Kernels, kernels_of

_BACKENDS = {
    "reference": chunk_attention_reference,
    "mosaic_gpu": gpu.chunk_attention_mosaic_gpu,
    "mosaic_tpu": tpu.chunk_attention_mosaic_tpu,
}


def choose_backend(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page: int = 64,
    dtype: str = "bfloat16",
    platform: str | None = None,
) -> Kernels:
    """Name the backend that `backend="auto"` takes for these shapes on `platform` (default: what jax runs on).

    The kernel wherever the machine has one that takes the shape, else the reference, which is tiled: it never holds all
    scores.
    """
    backend = kernels_of(platform)
    if backend == "reference":
        return backend
    unsupported = gpu.unsupported if backend == "mosaic_gpu" else tpu.unsupported
    return backend if unsupported(heads, kv_heads, head_dim, page, jnp.dtype(dtype)) is None else "reference"


def chunk_attention(
    queries: Float[Array, "C H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_tables: Int32[Array, "R max_pages"],
    row_start: Int32[Array, " C"],
    rows: ChunkRows,
    *,
    scale: float,
    backend: Backend = "auto",
) -> Float[Array, "C H d"]:
    """softmax(scale * q k^T) v of every row of a chunk over the rows of its request from `row_start` to itself.

    Row i of request r lies in page ``page_tables[r, i // page]`` at place ``i % page``; query head h reads KV head
    ``h // (H / KV)``. All of it is traced: lengths, windows and tables never recompile.

    Args:
        queries: rows of the chunk, after norms and rotary embedding; their keys and values are in the pages already.
        key_pages, value_pages: all pages of the pool; rows that no row sees are ignored, whatever they hold.
        page_tables: page numbers of every request; entries that hold no visible row are ignored, whatever they hold.
        row_start: first row of its request that every row sees, never falling within a request; ignored in padding.
        rows: which rows of the chunk are which request's.
        scale: factor on ``q . k`` before the softmax.
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Returns:
        Outputs in the dtype of the queries, 0 in padding; scores and softmax statistics are float32.

    Raises:
        ValueError: shapes that do not fit together, or that the named backend cannot take.
    """
    _check(queries, key_pages, value_pages, page_tables, row_start, rows)
    chosen = backend
    if backend == "auto":
        _, kv_heads, page, head_dim = key_pages.shape
        chosen = choose_backend(
            heads=queries.shape[1], kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=str(key_pages.dtype)
        )
    if chosen not in _BACKENDS:
        raise ValueError(f"chunk_attention: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}")
    with jax.named_scope("chunk_attention"):
        return _BACKENDS[chosen](queries, key_pages, value_pages, page_tables, row_start, rows, scale=scale)


def _check(queries, key_pages, value_pages, page_tables, row_start, rows) -> None:
    check_pools("chunk_attention", queries, key_pages, value_pages, page_tables)
    num_rows, requests = queries.shape[0], page_tables.shape[0]
    if row_start.shape != (num_rows,) or any(part.shape != (requests,) for part in rows):
        raise ValueError(
            f"chunk_attention: row_start {row_start.shape} must have one entry for each of {num_rows} rows, and "
            f"rows ({', '.join(str(part.shape) for part in rows)}) one for each of {requests} requests"
        )
