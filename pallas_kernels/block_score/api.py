"""Block scores of the last queries of every request: the entry point that picks a backend."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_score import gpu, tpu
from pallas_kernels.block_score.reference import block_score_reference
from pallas_kernels.platform import Backend, Kernels, kernels_of

_BACKENDS = {
    "reference": block_score_reference,
    "mosaic_gpu": gpu.block_score_mosaic_gpu,
    "mosaic_tpu": tpu.block_score_mosaic_tpu,
}


class BlockScores(NamedTuple):
    """Scores of the blocks of every request, float32; blocks beyond a request's end hold 0."""

    mass: Float[Array, "B num_blocks"]
    peak: Float[Array, "B num_blocks"] | None


def choose_backend(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    window: int = 128,
    block_size: int = 64,
    dtype: str = "bfloat16",
    platform: str | None = None,
) -> Kernels:
    """Name the backend that `backend="auto"` takes for these shapes on `platform` (default: what jax runs on).

    The kernel wherever the machine has one that takes the shape; on Hopper float32 inputs go to the reference, because
    the matrix units have no float32 product.
    """
    backend = kernels_of(platform)
    if backend == "reference":
        return backend
    unsupported = gpu.unsupported if backend == "mosaic_gpu" else tpu.unsupported
    reason = unsupported(window, heads, kv_heads, head_dim, block_size, jnp.dtype(dtype))
    return backend if reason is None else "reference"


def block_score(
    queries: Float[Array, "B n H d"],
    keys: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    num_blocks: int,
    block_size: int,
    scale: float,
    peak: bool = False,
    normalise: bool = True,
    row_log_sum_exp: Float[Array, "B n H"] | None = None,
    backend: Backend = "auto",
) -> BlockScores:
    """Softmax mass that the last `n` queries of each request put on each block of its keys.

    Args:
        queries: row j of request r is the query at packed row ``cu_seqlens[r+1] - n + j``. Rows that fall before the
            request's first row are ignored, whatever they hold.
        keys: packed keys; rows from ``cu_seqlens[B]`` on are padding and are ignored, whatever they hold.
        cu_seqlens: request r owns rows ``[cu_seqlens[r], cu_seqlens[r+1])``, the first of them row 0; traced, so
            lengths never recompile.
        num_blocks: blocks per request in the result; at least ``ceil(length / block_size)`` of the longest request.
        block_size: tokens per block, counted from the first row of each request.
        scale: factor on ``q . k`` before the softmax.
        peak: also return the maximum over heads and rows of the mass in a block.
        normalise: divide the mass by (heads x valid rows), so that each non-empty request sums to 1. False gives the
            plain sum, which shards over heads add up.
        row_log_sum_exp: each row's log-sum-exp of scaled scores, where the attention already produced it. Saves the
            reference one of its two passes over the keys; the kernels make one pass either way.
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Returns:
        BlockScores(mass, peak); peak is None unless asked for. An empty request scores 0 everywhere.

    Raises:
        ValueError: shapes that do not fit together, or that the named backend cannot take.
    """
    _check(queries, keys, cu_seqlens, num_blocks, block_size, row_log_sum_exp)
    _, window, heads, head_dim = queries.shape
    if backend == "auto":
        chosen = choose_backend(
            heads=heads,
            kv_heads=keys.shape[1],
            head_dim=head_dim,
            window=window,
            block_size=block_size,
            dtype=str(keys.dtype),
        )
    else:
        chosen = backend
    if chosen not in _BACKENDS:
        raise ValueError(f"block_score: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}")
    mass, peaks = _BACKENDS[chosen](
        queries,
        keys,
        cu_seqlens,
        num_blocks=num_blocks,
        block_size=block_size,
        scale=scale,
        row_log_sum_exp=row_log_sum_exp,
    )
    if normalise:
        valid_rows = jnp.clip(jnp.diff(cu_seqlens), 0, queries.shape[1])
        mass = mass / jnp.maximum(valid_rows * queries.shape[2], 1)[:, None].astype(jnp.float32)
    return BlockScores(mass, peaks if peak else None)


def _check(queries, keys, cu_seqlens, num_blocks, block_size, row_log_sum_exp) -> None:
    if queries.ndim != 4 or keys.ndim != 3 or cu_seqlens.ndim != 1:
        raise ValueError(
            "block_score: needs queries [B, n, H, d], keys [T, KV, d] and cu_seqlens [B+1]; "
            f"got {queries.shape}, {keys.shape} and {cu_seqlens.shape}"
        )
    batch, window, heads, head_dim = queries.shape
    rows, kv_heads, key_dim = keys.shape
    if key_dim != head_dim:
        raise ValueError(f"block_score: queries have head size {head_dim} and keys {key_dim}; they must agree")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"block_score: {heads} query heads are not a multiple of {kv_heads} key heads")
    if cu_seqlens.shape[0] != batch + 1:
        raise ValueError(
            f"block_score: cu_seqlens has {cu_seqlens.shape[0]} entries for {batch} requests; it needs {batch + 1}"
        )
    if min(batch, window, rows, num_blocks, block_size) < 1:
        raise ValueError(
            f"block_score: batch {batch}, window {window}, rows {rows}, num_blocks {num_blocks} and "
            f"block_size {block_size} must all be at least 1"
        )
    if queries.dtype != keys.dtype:
        raise ValueError(f"block_score: queries are {queries.dtype} and keys {keys.dtype}; cast one of them")
    if row_log_sum_exp is not None and row_log_sum_exp.shape != (batch, window, heads):
        raise ValueError(
            f"block_score: row_log_sum_exp has shape {row_log_sum_exp.shape}; it needs {(batch, window, heads)}"
        )
