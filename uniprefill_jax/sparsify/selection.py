"""Scoring and selection for one request on their own, for users who bring queries and keys of their own model."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pallas_kernels.block_score import block_score
from pallas_kernels.top_p_select import top_p_select
from uniprefill_jax.config import BLOCK_SIZES, UniPrefillConfig
from uniprefill_jax.errors import InputError

_score = jax.jit(block_score, static_argnames=("num_blocks", "block_size", "scale", "peak"))
_select = jax.jit(
    top_p_select, static_argnames=("num_rows", "block_size", "sink_tokens", "window_tokens", "cut", "over")
)


def score_blocks(
    queries: Float[Array, "n H d"],
    keys: Float[Array, "T KV d"],
    length: int,
    *,
    block_size: int = 64,
    scale: float | None = None,
    score: str = "mean",
) -> Float[Array, " blocks"]:
    """Score of every block of a request's first `length` keys by its last n queries, normalised to sum 1, float32.

    Args:
        queries: the last n queries, after norms and rotary embedding; row n - 1 is the last token's.
        keys: all keys, after norms and rotary embedding; rows from `length` on are ignored.
        length: tokens of the request.
        block_size: tokens per block.
        scale: factor on q . k; by default 1 / sqrt(d).
        score: "mean" or "peak" over heads and rows.

    Raises InputError for shapes or values that do not fit together.
    """
    if score not in ("mean", "peak"):
        raise InputError(f"score_blocks: score is {score!r}; use 'mean' or 'peak'")
    if block_size not in BLOCK_SIZES:
        raise InputError(f"score_blocks: block_size is {block_size!r}; use one of {BLOCK_SIZES}")
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[2] != keys.shape[2] or queries.shape[1] % keys.shape[1]:
        raise InputError(
            f"score_blocks: queries {queries.shape} and keys {keys.shape} do not fit; use [n, H, d] and "
            "[T, KV, d] with H a multiple of KV"
        )
    if not 1 <= length <= keys.shape[0]:
        raise InputError(f"score_blocks: length is {length}; use 1 to the number of keys, {keys.shape[0]}")
    scores = _score(
        queries[None],
        keys,
        jnp.asarray([0, length], jnp.int32),
        num_blocks=-(-keys.shape[0] // block_size),
        block_size=block_size,
        scale=keys.shape[2] ** -0.5 if scale is None else scale,
        peak=score == "peak",
    )
    values = (scores.mass if scores.peak is None else scores.peak)[0]
    return values / values.sum()


def select_tokens(
    block_mass: Float[Array, " blocks"], length: int, config: UniPrefillConfig
) -> Bool[np.ndarray, " length"]:
    """Which of a request's `length` tokens stay, forced ones included (notes: algorithm, steps 3 and 4).

    `block_mass` holds at least ceil(length / block_size) scores; they are normalised here. `length` may be what an
    earlier drop left, so that a setting with most_blocks must have been settled (`UniPrefillConfig.for_length`).
    """
    if config.most_blocks:
        raise InputError(
            f"select_tokens: most_blocks is {config.most_blocks}; pass config.for_length(prompt tokens) instead"
        )
    num_blocks = -(-length // config.block_size)
    if length < 1 or block_mass.ndim != 1 or block_mass.shape[0] < num_blocks:
        raise InputError(
            f"select_tokens: {block_mass.shape} block scores for {length} tokens; {num_blocks} are "
            f"needed for blocks of {config.block_size}"
        )
    selection = _select(
        jnp.asarray(block_mass, jnp.float32)[None, :num_blocks],
        jnp.asarray([0, length], jnp.int32),
        config.top_p,
        num_rows=length,
        block_size=config.block_size,
        sink_tokens=config.sink_tokens,
        window_tokens=config.window_tokens,
        cut=config.cut,
        over=config.top_p_over,
    )
    kept = np.zeros(length, bool)
    kept[np.asarray(selection.indices)[: int(selection.cu_seqlens[-1])]] = True
    return kept
