"""Decode attention over pages: the entry point that picks a backend."""

from typing import Literal

from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.reference import paged_attention_reference

Backend = Literal["auto", "reference"]


def paged_attention(
    queries: Float[Array, "B H d"],
    key_pages: Float[Array, "P page KV d"],
    value_pages: Float[Array, "P page KV d"],
    page_table: Int32[Array, "B max_pages"],
    lengths: Int32[Array, " B"],
    first_visible: Int32[Array, " B"],
    *,
    scale: float,
    backend: Backend = "auto",
) -> Float[Array, "B H d"]:
    """softmax(scale * q k^T) v of one query per request over its rows [first_visible, length).

    Row i of request r lies in page ``page_table[r, i // page]`` at place ``i % page``; query head h reads KV head
    ``h // (H / KV)``.

    Args:
        queries: one row per request, after norms and rotary embedding.
        key_pages, value_pages: all pages of the pool; rows that no request sees are ignored, whatever they hold.
        page_table: page numbers; entries that hold no visible row are ignored, whatever they hold.
        lengths: rows of each request; 0 for an empty slot, whose output is 0.
        first_visible: first row that each request's query sees: 0, or the start of its sliding window.
        scale: factor on ``q . k`` before the softmax.
        backend: "auto" takes the reference, the only backend so far; one that is named is used or refused.

    Returns:
        Outputs in the dtype of the queries; scores and softmax statistics are float32.

    Raises:
        ValueError: shapes that do not fit together, or an unknown backend.
    """
    _check(queries, key_pages, value_pages, page_table, lengths, first_visible)
    if backend not in ("auto", "reference"):
        raise ValueError(f"paged_attention: backend is {backend!r}; use 'auto' or 'reference'")
    return paged_attention_reference(queries, key_pages, value_pages, page_table, lengths, first_visible, scale=scale)


def _check(queries, key_pages, value_pages, page_table, lengths, first_visible) -> None:
    if queries.ndim != 3 or key_pages.ndim != 4 or key_pages.shape != value_pages.shape or page_table.ndim != 2:
        raise ValueError(
            "paged_attention: needs queries [B, H, d], key_pages and value_pages [P, page, KV, d] and page_table "
            f"[B, max_pages]; got {queries.shape}, {key_pages.shape}, {value_pages.shape} and {page_table.shape}"
        )
    batch, heads, head_dim = queries.shape
    kv_heads = key_pages.shape[2]
    if key_pages.shape[3] != head_dim or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"paged_attention: queries {queries.shape} and key_pages {key_pages.shape} do not fit; head sizes must "
            "agree and query heads be a multiple of key heads"
        )
    if page_table.shape[0] != batch or lengths.shape != (batch,) or first_visible.shape != (batch,):
        raise ValueError(
            f"paged_attention: page_table {page_table.shape}, lengths {lengths.shape} and first_visible "
            f"{first_visible.shape} must have one entry for each of {batch} requests"
        )
