"""Causal attention over packed rows: the entry point that picks a backend."""

from typing import Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.causal_attention import gpu, tpu
from pallas_kernels.causal_attention.reference import causal_attention_reference
from pallas_kernels.platform import Backend, Kernels, kernels_of

_BACKENDS = {
    "reference": causal_attention_reference,
    "mosaic_gpu": gpu.causal_attention_mosaic_gpu,
    "mosaic_tpu": tpu.causal_attention_mosaic_tpu,
}


def choose_backend(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    platform: str | None = None,
) -> Kernels:
    """Name the backend that `backend="auto"` takes for these shapes on `platform` (default: what jax runs on).

    The kernel wherever the machine has one that takes the shape; on Hopper float32 inputs go to the reference, because
    the matrix units have no float32 product. The reference holds all scores at once: where it is the answer, callers
    with long inputs want a tiled path of their own.
    """
    backend = kernels_of(platform)
    if backend == "reference":
        return backend
    unsupported = gpu.unsupported if backend == "mosaic_gpu" else tpu.unsupported
    reason = unsupported(heads, kv_heads, head_dim, jnp.dtype(dtype))
    return backend if reason is None else "reference"


@overload
def causal_attention(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""] | int,
    *,
    scale: float,
    return_lse: Literal[False] = False,
    backend: Backend = "auto",
) -> Float[Array, "T H d"]: ...


@overload
def causal_attention(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""] | int,
    *,
    scale: float,
    return_lse: Literal[True],
    backend: Backend = "auto",
) -> tuple[Float[Array, "T H d"], Float[Array, "T H"]]: ...


def causal_attention(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""] | int,
    *,
    scale: float,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Float[Array, "T H d"] | tuple[Float[Array, "T H d"], Float[Array, "T H"]]:
    """softmax(scale * q k^T) v of every row over the rows that it sees: `[row_start[i], i]` for row i.

    One start per row expresses packed requests (where its request starts), sliding windows (the first row in reach)
    and windows measured in original positions after tokens were dropped.

    Args:
        queries: rows of the packed axis; query head h reads key head ``h // (H / KV)``.
        keys: of the type of `queries`.
        values: of the type of `queries`.
        row_start: first visible row, never falling along the axis and at most the row itself; traced, so ranges never
            recompile. Entries from `count` on are ignored.
        count: number of real rows; traced. The rows from there on are padding: they are ignored, whatever they hold,
            and tiles of them cost no arithmetic.
        scale: factor on ``q . k`` before the softmax.
        return_lse: also return each row's natural log of the sum of exponentials of its scaled scores.
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Returns:
        Outputs of the type of `queries`, or outputs and float32 log-sum-exps; 0 in padding rows. Softmax statistics and
        sums are float32; the kernels round the weights to the type of `values` before they multiply.

    Raises:
        ValueError: shapes that do not fit together, or that the named backend cannot take.
    """
    _check(queries, keys, values, row_start)
    if backend == "auto":
        _, heads, head_dim = queries.shape
        chosen = choose_backend(heads=heads, kv_heads=keys.shape[1], head_dim=head_dim, dtype=str(queries.dtype))
    else:
        chosen = backend
    if chosen not in _BACKENDS:
        raise ValueError(f"causal_attention: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}")
    outputs, lse = _BACKENDS[chosen](
        queries,
        keys,
        values,
        row_start.astype(jnp.int32),
        jnp.asarray(count, jnp.int32),
        scale=scale,
        return_lse=return_lse,
    )
    if lse is None:
        return outputs
    return outputs, lse


def _check(queries, keys, values, row_start) -> None:
    if queries.ndim != 3 or keys.ndim != 3:
        raise ValueError(
            f"causal_attention: needs queries [T, H, d] and keys [T, KV, d]; got {queries.shape} and {keys.shape}"
        )
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape != (rows, kv_heads, head_dim) or values.shape != keys.shape:
        raise ValueError(
            f"causal_attention: keys are {keys.shape} and values {values.shape}; with queries {queries.shape} both "
            f"must be ({rows}, KV, {head_dim})"
        )
    if rows < 1:
        raise ValueError("causal_attention: there are no rows; it needs at least 1")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"causal_attention: {heads} query heads are not a multiple of {kv_heads} key heads")
    if row_start.shape != (rows,):
        raise ValueError(f"causal_attention: row_start has shape {row_start.shape}; it needs {(rows,)}")
    if not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"causal_attention: queries are {queries.dtype}, keys {keys.dtype}, values {values.dtype}; cast to one type"
        )
