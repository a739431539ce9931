"""One drop: the last queries score the prompt in blocks, a top-p cut keeps the blocks that matter, the rest leaves.

This is the whole algorithm for the packed rows of a batch; `prefill.py` calls it between segments of layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_score import block_score
from pallas_kernels.compact_rows import compact_rows
from pallas_kernels.top_p_select import top_p_select
from uniprefill_jax.config import UniPrefillConfig


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

    `memory` is the weight of the carried scores; where `config.score_memory` is 0 none are read or written.
    """
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
        combined = scores.mass if scores.peak is None else scores.peak
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
            discarded_mass=jnp.where(selection.kept_blocks, 0.0, scores.mass).sum(axis=-1),
        )


def compact(arrays: tuple[Array, ...], drop: Drop) -> tuple[Array, ...]:
    """Move the kept rows of every array to the front, in order; the rest is zero (notes: algorithm, step 5)."""
    with jax.named_scope("compact"):
        return compact_rows(arrays, drop.indices, drop.cu_seqlens[-1], out_rows=arrays[0].shape[0])


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
