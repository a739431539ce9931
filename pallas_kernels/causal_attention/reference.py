"""Causal attention over visible ranges in plain jnp: the definition of the operation, for small sizes."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def causal_attention_reference(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    scale: float,
    return_lse: bool = False,
) -> tuple[Float[Array, "T H d"], Float[Array, "T H"] | None]:
    """Outputs and, where asked for, log-sum-exps, computed in float32; see `causal_attention`.

    Holds all scores at once: memory and work grow with H T^2, whatever the ranges.
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    row = jnp.arange(rows, dtype=jnp.int32)
    live = row < count
    # Padding may hold NaN, and NaN * 0 is NaN: the values go, not only their scores.
    query, key, value = (
        jnp.where(live[:, None, None], array, 0).astype(jnp.float32) for array in (queries, keys, values)
    )
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    precision = lax.Precision.HIGHEST
    scores = jnp.einsum("qkgd,ckd->kgqc", grouped, key, precision=precision) * scale
    visible = (row[None, :] <= row[:, None]) & (row[None, :] >= row_start[:, None]) & live[:, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.where(live[:, None], scores.max(-1, keepdims=True), 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.where(live[:, None], weights.sum(-1, keepdims=True), 1.0)
    outputs = jnp.einsum("kgqc,ckd->qkgd", weights / total, value, precision=precision)
    lse = (top + jnp.log(total))[..., 0].reshape(heads, rows).T if return_lse else None
    return outputs.reshape(queries.shape).astype(queries.dtype), lse
