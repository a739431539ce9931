"""One drop: the last queries score the prompt in blocks, a top-p cut keeps the blocks that matter, the rest leaves.

This is the whole algorithm for the packed rows of a batch; `prefill.py` calls it between segments of layers.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_score import block_score
from pallas_kernels.compact_rows import compact_rows
from pallas_kernels.top_p_select import top_p_select
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.parallel.shards import maximum_over_shards, mean_over_shards, over_heads, replicated


class DropInputs(NamedTuple):
    """What a drop looks at: window queries and all keys of the drop layer, and the scores carried by tokens so far."""

    queries: Float[Array, "B n H d"]
    keys: Float[Array, "T KV d"]
    cu_seqlens: Int32[Array, " B+1"]
    token_scores: Float[Array, " T"]


class Drop(NamedTuple):
    """What a drop decided.

    indices: packed rows that stay, in order; the tail is out of range.
    cu_seqlens: cumulative lengths of what stays.
    token_scores: every row's block score, for the memory of later drops.
    block_mass: normalised score of each request's blocks, summing to 1.
    cut_margin: smallest distance of a cumulative mass to top_p, per request.
    discarded_mass: attention mass (mean over heads and window rows) of the blocks that lose tokens, per request.
    """

    indices: Int32[Array, " T"]
    cu_seqlens: Int32[Array, " B+1"]
    token_scores: Float[Array, " T"]
    block_mass: Float[Array, "B num_blocks"]
    cut_margin: Float[Array, " B"]
    discarded_mass: Float[Array, " B"]


def choose_tokens(
    inputs: DropInputs,
    config: UniPrefillConfig,
    *,
    top_p: Float[Array, ""],
    memory: Float[Array, ""],
    scale: float,
    num_blocks: int,
) -> Drop:
    """Score, order, cut and force (notes: algorithm, steps 2-4).

    `memory` is the weight of the carried scores; where `config.score_memory` is 0 none are read or written. Under a
    mesh each shard scores with its own heads; all else follows from the joint scores, on every shard alike.
    """

    def on_shard(
        queries: Float[Array, "B n heads d"],
        keys: Float[Array, "T kv_heads d"],
        cu_seqlens: Int32[Array, " B+1"],
        token_scores: Float[Array, " T"],
        top_p: Float[Array, ""],
        memory: Float[Array, ""],
    ) -> Drop:
        own = DropInputs(queries, keys, cu_seqlens, token_scores)
        return _choose_tokens(own, config, top_p=top_p, memory=memory, scale=scale, num_blocks=num_blocks)

    queries, keys, *others = inputs
    return over_heads(on_shard, queries, (keys,), *others, top_p, memory, head_axis=2, out_specs=PartitionSpec())


def _choose_tokens(
    inputs: DropInputs,
    config: UniPrefillConfig,
    *,
    top_p: Float[Array, ""],
    memory: Float[Array, ""],
    scale: float,
    num_blocks: int,
) -> Drop:
    queries, keys, cu_seqlens, token_scores = inputs
    num_rows = keys.shape[0]
    with jax.named_scope("score"):
        scores = block_score(
            queries,
            keys,
            cu_seqlens,
            num_blocks=num_blocks,
            block_size=config.block_size,
            scale=scale,
            peak=config.score == "peak",
        )
        mass = mean_over_shards(scores.mass)
        combined = mass if scores.peak is None else maximum_over_shards(scores.peak)
        if config.score_memory:
            rows = rows_of_blocks(cu_seqlens, num_blocks, config.block_size)
            combined = (1.0 - memory) * combined + memory * mean_over_blocks(token_scores, rows)
            spread = jnp.broadcast_to(combined[..., None], rows.shape)
            token_scores = jnp.zeros(num_rows, jnp.float32).at[rows].set(spread, mode="drop")
    with jax.named_scope("select"):
        selection = top_p_select(
            combined,
            cu_seqlens,
            top_p,
            num_rows=num_rows,
            block_size=config.block_size,
            sink_tokens=config.sink_tokens,
            window_tokens=config.window_tokens,
            cut=config.cut,
            over=config.top_p_over,
        )
        return Drop(
            indices=selection.indices,
            cu_seqlens=selection.cu_seqlens,
            token_scores=token_scores,
            block_mass=selection.normalised,
            cut_margin=selection.cut_margin,
            discarded_mass=jnp.where(selection.kept_blocks, 0.0, mass).sum(axis=-1),
        )


def compact(arrays: tuple[Array, ...], drop: Drop) -> tuple[Array, ...]:
    """Move the kept rows of every array to the front, in order; the rest is zero (notes: algorithm, step 5)."""
    with jax.named_scope("compact"):
        move = replicated(partial(compact_rows, out_rows=arrays[0].shape[0]))
        return move(arrays, drop.indices, drop.cu_seqlens[-1])


def rows_of_blocks(
    cu_seqlens: Int32[Array, " B+1"], num_blocks: int, block_size: int
) -> Int32[Array, "B num_blocks G"]:
    """Packed row numbers of each request's blocks; out of range (the int32 maximum) past the request's end."""
    first = jnp.arange(num_blocks * block_size, dtype=jnp.int32).reshape(num_blocks, block_size)
    rows = cu_seqlens[:-1, None, None] + first
    return jnp.where(rows < cu_seqlens[1:, None, None], rows, jnp.iinfo(jnp.int32).max)


def mean_over_blocks(
    token_scores: Float[Array, " T"], rows: Int32[Array, "B num_blocks G"]
) -> Float[Array, "B num_blocks"]:
    """Mean of a per-token value over the tokens of each block; 0 for blocks without tokens."""
    count = (rows < token_scores.shape[0]).sum(axis=-1)
    total = token_scores.at[rows].get(mode="fill", fill_value=0.0).sum(axis=-1)
    return total / jnp.maximum(count, 1)
