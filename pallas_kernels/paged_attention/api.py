"""Decode attention over pages: the entry point that picks a backend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention import gpu, tpu
from pallas_kernels.paged_attention.pools import check_pools
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.platform import Backend, Kernels, kernels_of

_BACKENDS = {
    "reference": paged_attention_reference,
    "mosaic_gpu": gpu.paged_attention_mosaic_gpu,
    "mosaic_tpu": tpu.paged_attention_mosaic_tpu,
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

    The kernel wherever the machine has one that takes the shape, else the reference.
    """
    backend = kernels_of(platform)
    if backend == "reference":
        return backend
    unsupported = gpu.unsupported if backend == "mosaic_gpu" else tpu.unsupported
    return backend if unsupported(heads, kv_heads, head_dim, page, jnp.dtype(dtype)) is None else "reference"


def paged_attention(
    queries: Float[Array, "B H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_table: Int32[Array, "R max_pages"],
    lengths: Int32[Array, " B"],
    first_visible: Int32[Array, " B"],
    first_request: Int32[Array, ""] | int = 0,
    *,
    scale: float,
    backend: Backend = "auto",
) -> Float[Array, "B H d"]:
    """softmax(scale * q k^T) v of one query per request over its rows [first_visible, length).

    Row i of request r lies in page ``page_table[first_request + r, i // page]`` at place ``i % page``; query head h
    reads KV head ``h // (H / KV)``. All of it is traced: lengths, windows and tables never recompile.

    Args:
        queries: one row per request, after norms and rotary embedding.
        key_pages, value_pages: all pages of the pool; rows that no request sees are ignored, whatever they hold.
        page_table: page numbers, perhaps of other layers before and after these; entries that hold no visible row are
            ignored, whatever they hold.
        lengths: rows of each request; 0 for an empty slot.
        first_visible: first row that each request's query sees: 0, or the start of its sliding window.
        first_request: row of the table that request 0 has; traced, so that a loop over layers cuts no table out.
        scale: factor on ``q . k`` before the softmax.
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Returns:
        Outputs in the dtype of the queries, 0 for a request that sees no row; scores and softmax statistics are
        float32.

    Raises:
        ValueError: shapes that do not fit together, or that the named backend cannot take.
    """
    _check(queries, key_pages, value_pages, page_table, lengths, first_visible)
    chosen = backend
    if backend == "auto":
        _, kv_heads, page, head_dim = key_pages.shape
        chosen = choose_backend(
            heads=queries.shape[1], kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=str(key_pages.dtype)
        )
    if chosen not in _BACKENDS:
        raise ValueError(f"paged_attention: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}")
    with jax.named_scope("paged_attention"):
        first = jnp.asarray(first_request, jnp.int32)
        return _BACKENDS[chosen](
            queries, key_pages, value_pages, page_table, lengths, first_visible, first, scale=scale
        )


def _check(queries, key_pages, value_pages, page_table, lengths, first_visible) -> None:
    check_pools("paged_attention", queries, key_pages, value_pages, page_table)
    batch = queries.shape[0]
    if page_table.shape[0] < batch or lengths.shape != (batch,) or first_visible.shape != (batch,):
        raise ValueError(
            f"paged_attention: page_table {page_table.shape}, lengths {lengths.shape} and first_visible "
            f"{first_visible.shape} must have one entry for each of {batch} requests (only the table may have more)"
        )
