"""Causal attention over packed rows: row i sees rows [row_start[i], i]; starts never fall along the axis.

Three backends: "kernel" (pallas_kernels/causal_attention) and "xla" take any ranges, "cudnn" full causal attention of a
single request (NVIDIA, bfloat16 or float16). Ranges serve full attention, sliding windows and ragged batches, before
and after a drop. In "xla", below, key tiles that no row of a query tile sees are skipped.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

QUERY_TILE = 256
KEY_TILE = 256
MOST_SCORES = 2**25  # float32 numbers, 128 MiB, that `attention_of_rows` holds for several rows at a time
_NEGATIVE = -1e30

AttentionBackend = Literal["xla", "cudnn", "kernel"]


def full_causal_attention(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    *,
    scale: float,
) -> Float[Array, "T H d"]:
    """Causal attention of one request through cuDNN; padding rows at the end see the real ones and disturb none."""
    return jax.nn.dot_product_attention(
        queries[None], keys[None], values[None], scale=scale, is_causal=True, implementation="cudnn"
    )[0]


def causal_attention(
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    row_start: Int32[Array, " T"],
    count: Int32[Array, ""],
    *,
    scale: float,
) -> Float[Array, "T H d"]:
    """softmax(scale * q k^T) v over each row's visible range; query head h reads KV head h // (H / KV).

    Rows from `count` on are padding: whole tiles of them cost nothing and give zeros. Scores and softmax statistics are
    float32; the result has the type of `queries`. Flash-style: memory grows with T only.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    query_tile = min(QUERY_TILE, _round_up(num_rows, 64))
    key_tile = min(KEY_TILE, query_tile)
    query_tiles = math.ceil(num_rows / query_tile)
    key_rows = _round_up(num_rows, key_tile)

    keys = jnp.pad(keys, ((0, key_rows - num_rows), (0, 0), (0, 0))).swapaxes(0, 1)
    values = jnp.pad(values, ((0, key_rows - num_rows), (0, 0), (0, 0))).swapaxes(0, 1)
    padded = query_tiles * query_tile - num_rows
    # Heads that share a KV head are packed along the rows of one matrix product.
    # Float32 queries are scaled once; in a narrower type that would round, so there the scores are scaled.
    wide = queries.dtype == jnp.float32
    score_scale = 1.0 if wide else scale
    tiles = jnp.pad(queries * scale if wide else queries, ((0, padded), (0, 0), (0, 0)))
    tiles = tiles.reshape(query_tiles, query_tile, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    tiles = tiles.reshape(query_tiles, num_kv_heads, group * query_tile, head_dim)
    starts = jnp.pad(row_start, (0, padded), constant_values=num_rows - 1).reshape(query_tiles, query_tile)

    def query_block(index: Array, outputs: Array) -> Array:
        tile = jax.lax.dynamic_index_in_dim(tiles, index, keepdims=False)
        start = jax.lax.dynamic_index_in_dim(starts, index, keepdims=False)
        rows = index * query_tile + jnp.arange(query_tile, dtype=jnp.int32)

        def key_block(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            maximum, total, weighted = carry
            key = jax.lax.dynamic_slice_in_dim(keys, block * key_tile, key_tile, axis=1)
            value = jax.lax.dynamic_slice_in_dim(values, block * key_tile, key_tile, axis=1)
            scores = jnp.einsum("krd,kcd->krc", tile, key, preferred_element_type=jnp.float32) * score_scale
            columns = block * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
            visible = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= start[:, None])
            grouped = scores.reshape(num_kv_heads, group, query_tile, key_tile)
            scores = jnp.where(visible, grouped, _NEGATIVE).reshape(scores.shape)
            new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
            shrink = jnp.exp(maximum - new_maximum)
            weights = jnp.exp(scores - new_maximum[..., None])
            update = jnp.einsum("krc,kcd->krd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
            return new_maximum, total * shrink + weights.sum(axis=-1), weighted * shrink[..., None] + update

        first = start[0] // key_tile
        stop = (jnp.minimum(rows[-1], num_rows - 1)) // key_tile + 1
        shape = (num_kv_heads, group * query_tile)
        # A finite start keeps exp(maximum - new_maximum) defined while a row has seen nothing yet.
        carry = (
            jnp.full(shape, _NEGATIVE, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )
        _, total, weighted = jax.lax.fori_loop(first, stop, key_block, carry)
        output = (weighted / total[..., None]).astype(queries.dtype)
        return jax.lax.dynamic_update_index_in_dim(outputs, output, index, axis=0)

    used_tiles = (count + query_tile - 1) // query_tile
    outputs = jax.lax.fori_loop(0, used_tiles, query_block, jnp.zeros(tiles.shape, queries.dtype))
    outputs = outputs.reshape(query_tiles, num_kv_heads, group, query_tile, head_dim).transpose(0, 3, 1, 2, 4)
    return outputs.reshape(query_tiles * query_tile, num_heads, head_dim)[:num_rows]


def attention_of_rows(
    queries: Float[Array, "B H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    rows: Int32[Array, " B"],
    row_start: Int32[Array, " B"],
    *,
    scale: float,
) -> Float[Array, "B H d"]:
    """Attention of a few rows alone: query b is row `rows[b]` of the keys and sees rows [row_start[b], rows[b]].

    Scores and softmax are float32; the result has the type of `queries`.
    """
    num_rows, num_kv_heads, head_dim = keys.shape
    columns = jnp.arange(num_rows, dtype=jnp.int32)

    def attend(query: Float[Array, "few H d"], row: Int32[Array, " few"], start: Int32[Array, " few"]) -> Array:
        grouped = query.reshape(query.shape[0], num_kv_heads, -1, head_dim)
        scores = jnp.einsum("bkgd,tkd->bkgt", grouped, keys, preferred_element_type=jnp.float32) * scale
        visible = (columns[None, :] >= start[:, None]) & (columns[None, :] <= row[:, None])
        weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, _NEGATIVE), axis=-1)
        output = jnp.einsum("bkgt,tkd->bkgd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return output.reshape(query.shape).astype(query.dtype)

    if queries.shape[0] * queries.shape[1] * num_rows <= MOST_SCORES:
        return attend(queries, rows, row_start)
    return jax.lax.map(lambda one: attend(*(part[None] for part in one))[0], (queries, rows, row_start))


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
