"""What queries, pools of pages and page tables have to have in common."""

from jaxtyping import Array, Float, Int32


def check_pools(
    name: str,
    queries: Float[Array, "rows H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_table: Int32[Array, "requests max_pages"],
) -> None:
    """Raise ValueError, in the name of an operation, where shapes or types do not fit together."""
    if queries.ndim != 3 or key_pages.ndim != 4 or key_pages.shape != value_pages.shape or page_table.ndim != 2:
        raise ValueError(
            f"{name}: needs queries [rows, H, d], key_pages and value_pages [P, KV, page, d] and page_table "
            f"[requests, max_pages]; got {queries.shape}, {key_pages.shape}, {value_pages.shape} and {page_table.shape}"
        )
    heads, head_dim = queries.shape[1:]
    kv_heads = key_pages.shape[1]
    if key_pages.shape[3] != head_dim or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{name}: queries {queries.shape} and key_pages {key_pages.shape} do not fit; head sizes must agree and "
            "query heads be a multiple of key heads"
        )
    if queries.dtype != key_pages.dtype or key_pages.dtype != value_pages.dtype:
        raise ValueError(
            f"{name}: queries are {queries.dtype}, key_pages {key_pages.dtype} and value_pages {value_pages.dtype}; "
            "all must have one dtype"
        )
