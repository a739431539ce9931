"""Block-sparse causal attention over packed rows: the entry point that picks a backend."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sparse_attention import gpu, tpu
from pallas_kernels.block_sparse_attention.blocks import count_blocks
from pallas_kernels.block_sparse_attention.reference import block_sparse_attention_reference
from pallas_kernels.platform import Backend, Kernels, kernels_of

_BACKENDS = {
    "reference": block_sparse_attention_reference,
    "mosaic_gpu": gpu.block_sparse_attention_mosaic_gpu,
    "mosaic_tpu": tpu.block_sparse_attention_mosaic_tpu,
}


def choose_backend(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 128,
    dtype: str = "bfloat16",
    platform: str | None = None,
) -> Kernels:
    """Name the backend that `backend="auto"` takes for these shapes on `platform` (default: what jax runs on).

    The kernel wherever the machine has one that takes the shape; on Hopper float32 inputs go to the reference, because
    the matrix units have no float32 product. The time of the reference does not go with what is kept.
    """
    backend = kernels_of(platform)
    if backend == "reference":
        return backend
    unsupported = gpu.unsupported if backend == "mosaic_gpu" else tpu.unsupported
    reason = unsupported(heads, kv_heads, head_dim, block_size, jnp.dtype(dtype))
    return backend if reason is None else "reference"


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
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Returns:
        Outputs of the type of `queries`; 0 in padding rows. Scores and softmax are float32; weights are rounded to the
        type of `values` before they are multiplied.

    Raises:
        ValueError: shapes or types that do not fit together, or that the named backend cannot take.
    """
    rows, heads, head_dim = queries.shape
    if keys.shape != values.shape or keys.shape[::2] != (rows, head_dim) or heads % keys.shape[1]:
        raise ValueError(f"block_sparse_attention: queries {queries.shape}, keys {keys.shape}, values {values.shape}")
    if not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"block_sparse_attention: queries are {queries.dtype}, keys {keys.dtype}, values {values.dtype}; cast to "
            "one type"
        )
    needed = count_blocks(rows, cu_seqlens.shape[0] - 1, block_size)
    if block_mask.shape[0] != heads or min(block_mask.shape[1:]) < needed:
        raise ValueError(f"block_sparse_attention: block_mask is {block_mask.shape}; use {(heads, needed, needed)}")
    chosen = backend
    if backend == "auto":
        chosen = choose_backend(
            heads=heads, kv_heads=keys.shape[1], head_dim=head_dim, block_size=block_size, dtype=str(queries.dtype)
        )
    if chosen not in _BACKENDS:
        raise ValueError(
            f"block_sparse_attention: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}"
        )
    return _BACKENDS[chosen](
        queries, keys, values, cu_seqlens.astype(jnp.int32), block_mask, columns, block_size=block_size, scale=scale
    )
