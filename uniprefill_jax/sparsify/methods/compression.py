"""Applies a cache compression: of every full-attention layer's prompt cache the rows that stay, packed again."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.batch import request_of_row
from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.sparsify.methods.protocol import CacheCompression


def compress_caches(
    compression: CacheCompression,
    model: ModelConfig,
    caches: dict[str, Any],
    queries: Float[Array, "full_layers B n H d"],
    cu_seqlens: Int32[Array, "layers B+1"],
) -> dict[str, Any]:
    """The caches, with those of full-attention layers, keys and values [layers, T, KV, d], shortened.

    Request b then has the rows that `compressed_lengths` says, in their old order; each KV head has its own. `queries`
    are each request's last ones in every full-attention layer, `cu_seqlens` of the rows that entered each layer.
    """
    full = model.full_attention_layers
    shortened = dict(caches)
    for kind in model.kinds:
        layers = model.layers_of_kind(kind)
        if model.layers[layers[0]].mixer != "full":
            continue
        own = queries[jnp.asarray([full.index(layer) for layer in layers])]
        entered = cu_seqlens[jnp.asarray(layers)]

        def shorten(parts: tuple[Any, Array, Array]) -> Any:
            cache, queries, entered = parts
            kept = kept_rows(compression, queries, cache.keys, entered, model.attention_scale)
            return jax.tree.map(lambda rows: jnp.take_along_axis(rows, kept[..., None], axis=0), cache)

        with jax.named_scope("compress_cache"):
            shortened[kind] = jax.lax.map(shorten, (caches[kind], own, entered))
    return shortened


def kept_rows(
    compression: CacheCompression,
    queries: Float[Array, "B n H d"],
    keys: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, " B+1"],
    scale: float,
) -> Int32[Array, "rows KV"]:
    """Packed row numbers that stay in one layer, rising, for each KV head; past the last they are 0."""
    num_rows, lengths = keys.shape[0], cu_seqlens[1:] - cu_seqlens[:-1]
    worth = compression.score(queries, keys, cu_seqlens, scale)
    places = jnp.arange(num_rows, dtype=jnp.int32)
    of_request = worth.at[cu_seqlens[:-1, None] + places].get(mode="fill", fill_value=0.0)
    of_request = jnp.where(places[:, None] < lengths[:, None, None], of_request, -jnp.inf)
    best, at = jax.lax.top_k(of_request.swapaxes(1, 2), min(compression.most_rows, num_rows))
    at = jnp.sort(jnp.where(best == -jnp.inf, num_rows, at), axis=-1)  # [B, KV, most rows]
    kept = compressed_lengths(cu_seqlens, compression.most_rows)
    rows = jnp.arange(min(num_rows, lengths.shape[0] * compression.most_rows), dtype=jnp.int32)
    request = request_of_row(kept, rows)
    inside = jnp.minimum(request, lengths.shape[0] - 1)
    chosen = cu_seqlens[inside, None] + at[inside, :, jnp.minimum(rows - kept[inside], at.shape[-1] - 1)]
    return jnp.where((request < lengths.shape[0])[:, None], chosen, 0)


def compressed_lengths(cu_seqlens: Int32[Array, " B+1"], most_rows: int) -> Int32[Array, " B+1"]:
    """Cumulative lengths of what stays of requests with these."""
    kept = jnp.minimum(cu_seqlens[1:] - cu_seqlens[:-1], most_rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(kept, dtype=jnp.int32)])
