"""Block-sparse causal attention over packed rows: the entry point that picks a backend."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sparse_attention.reference import block_sparse_attention_reference
from pallas_kernels.platform import Backend

_BACKENDS = {"reference": block_sparse_attention_reference}


def block_sparse_attention(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, " B+1"],
    block_mask: Bool[Array, "H Q K"],
    columns: Int32[Array, "H B C"] | None = None,
    *,
    block_size: int = 128,
    scale: float,
    backend: Backend = "auto",
) -> Float[Array, "T H d"]:
    """softmax(scale * q k^T) v over the entries that each query head sees.

    Row i of a request sees row j <= i of it where `block_mask[h, block(i), block(j)]`, where j is among
    `columns[h, request]`, and where both lie in one block.

    Args:
        queries: rows of the packed axis; query head h reads key head ``h // (H / KV)``.
        keys: of the type of `queries`.
        values: of the type of `queries`.
        cu_seqlens: request b owns rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``; rows past the last are padding.
        block_mask: blocks are counted within requests: request b owns, on both axes, as many as its rows fill, from the
            sum of those of the requests before it on. What is above the diagonal or of another request is ignored.
        columns: rows, counted within the request and rising, that all later ones see; the int32 maximum is none.
        block_size: rows of a block.
        scale: factor on ``q . k`` before the softmax.
        backend: "auto" is the reference, so far the only one.

    Returns:
        Outputs of the type of `queries`; 0 in padding rows. Scores and softmax are float32.

    Raises:
        ValueError: shapes that do not fit together, or another backend.
    """
    rows, heads, head_dim = queries.shape
    if keys.shape != values.shape or keys.shape[::2] != (rows, head_dim) or heads % keys.shape[1]:
        raise ValueError(f"block_sparse_attention: queries {queries.shape}, keys {keys.shape}, values {values.shape}")
    needed = -(-rows // block_size) + cu_seqlens.shape[0] - 2
    if block_mask.shape[0] != heads or min(block_mask.shape[1:]) < needed:
        raise ValueError(f"block_sparse_attention: block_mask is {block_mask.shape}; use {(heads, needed, needed)}")
    chosen = "reference" if backend == "auto" else backend
    if chosen not in _BACKENDS:
        raise ValueError(
            f"block_sparse_attention: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}"
        )
    return _BACKENDS[chosen](
        queries, keys, values, cu_seqlens.astype(jnp.int32), block_mask, columns, block_size=block_size, scale=scale
    )
