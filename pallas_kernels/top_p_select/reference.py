"""Top-p block selection in plain jnp: the definition of the operation, and the path on platforms without a kernel."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


def block_rows(
    lengths: Int32[Array, " B"], num_blocks: int, block_size: int, sink_tokens: int, window_tokens: int
) -> tuple[Int32[Array, "B num_blocks"], Int32[Array, "B num_blocks"]]:
    """Rows that each block holds, and how many of them are forced to stay (sink or window); 0 beyond the end."""
    first = jnp.arange(num_blocks, dtype=jnp.int32)[None, :] * block_size
    length = lengths[:, None]
    last = jnp.minimum(first + block_size, length)
    rows = jnp.maximum(last - first, 0)
    free = jnp.maximum(jnp.minimum(last, length - window_tokens) - jnp.maximum(first, sink_tokens), 0)
    return rows, rows - free


def normalise_over(
    scores: Float[Array, "B num_blocks"], participating: Bool[Array, "B num_blocks"]
) -> Float[Array, "B num_blocks"]:
    """Scores divided by their sum over the participating blocks; 0 elsewhere and where the sum is 0."""
    used = jnp.where(participating, scores.astype(jnp.float32), 0.0)
    total = used.sum(-1, keepdims=True)
    return used / jnp.where(total > 0, total, 1.0)


def cut_blocks(
    probability: Float[Array, "B num_blocks"],
    participating: Bool[Array, "B num_blocks"],
    top_p: Float[Array, " B"],
    cut: str,
) -> tuple[Bool[Array, "B num_blocks"], Float[Array, " B"]]:
    """The blocks that the cut keeps, and its margin; `probability` sums to 1 over the participating blocks."""
    batch, num_blocks = probability.shape
    # Ascending in (-probability, -index): the largest first, ties to the higher index, blocks that take no part last.
    key = jnp.where(participating, -probability, jnp.inf)
    index = jnp.broadcast_to(-jnp.arange(num_blocks, dtype=jnp.int32), key.shape)
    ordered, order = lax.sort((key, index), dimension=1, num_keys=2)
    taking_part = ordered < jnp.inf
    mass = jnp.where(taking_part, -ordered, 0.0)
    # A parallel prefix sum may fall back by a rounding; the running maximum keeps what stays a prefix of the order.
    inclusive = lax.cummax(jnp.cumsum(mass, axis=1), axis=1)
    exclusive = jnp.pad(inclusive[:, :-1], ((0, 0), (1, 0)))
    limit = top_p[:, None]
    if cut == "crossing":
        deciding = exclusive
        keep = exclusive <= limit
    else:
        deciding = inclusive
        keep = (inclusive <= limit) | (jnp.arange(num_blocks) == 0)
    keep = (keep | (limit >= 1)) & taking_part
    margin = jnp.where(taking_part, jnp.abs(deciding - limit), jnp.inf).min(-1)
    requests = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.zeros((batch, num_blocks), bool).at[requests, -order].set(keep, unique_indices=True), margin


def gather_indices(
    kept: Bool[Array, "B num_blocks"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    num_rows: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
) -> tuple[Int32[Array, " num_rows"], Int32[Array, "B+1"]]:
    """Packed row numbers of the kept rows, in order, and the cumulative lengths of what is kept."""
    batch, num_blocks = kept.shape
    lengths = jnp.diff(cu_seqlens)
    rows, forced = block_rows(lengths, num_blocks, block_size, sink_tokens, window_tokens)
    staying = jnp.where(kept, rows, forced)
    through = jnp.cumsum(staying.reshape(-1), dtype=jnp.int32).reshape(batch, num_blocks)
    kept_cu = jnp.pad(through[:, -1], (1, 0))

    # Where each row goes, from the rows that stay in the blocks before it and its rank within its own block.
    row = jnp.arange(num_rows, dtype=jnp.int32)
    request = (row[:, None] >= cu_seqlens[None, 1:]).sum(-1, dtype=jnp.int32)
    request = jnp.minimum(request, batch - 1)
    length = lengths[request]
    place = row - cu_seqlens[request]
    block = jnp.clip(place // block_size, 0, num_blocks - 1)
    first = block * block_size
    in_sink, in_window = place < sink_tokens, place >= length - window_tokens
    window_first = jnp.maximum(jnp.maximum(first, length - window_tokens), sink_tokens)
    sink_rows = jnp.clip(sink_tokens - first, 0, block_size)
    forced_rank = jnp.where(in_sink, place - first, place - window_first + sink_rows)
    whole = kept[request, block]
    rank = jnp.where(whole, place - first, forced_rank)
    stays = (whole | in_sink | in_window) & (row >= cu_seqlens[0]) & (row < cu_seqlens[-1])
    target = (through - staying)[request, block] + rank
    # Rows that leave aim past the end, each at a place of its own: the scatter may then assume that none collide.
    target = jnp.where(stays, target, num_rows + row)
    indices = jnp.full(num_rows, num_rows, jnp.int32).at[target].set(row, mode="drop", unique_indices=True)
    return indices, kept_cu


def select(
    cut_blocks: Callable[..., tuple[Bool[Array, "B num_blocks"], Float[Array, " B"]]],
    scores: Float[Array, "B num_blocks"],
    cu_seqlens: Int32[Array, "B+1"],
    top_p: Float[Array, " B"],
    *,
    num_rows: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    cut: str,
    over: str,
) -> tuple[
    Int32[Array, " num_rows"],
    Int32[Array, "B+1"],
    Bool[Array, "B num_blocks"],
    Float[Array, "B num_blocks"],
    Float[Array, " B"],
]:
    """Indices, kept cu_seqlens, kept blocks, normalised scores and cut margin, by the given way to find the cut."""
    num_blocks = scores.shape[1]
    rows, forced = block_rows(jnp.diff(cu_seqlens), num_blocks, block_size, sink_tokens, window_tokens)
    exists = rows > 0
    wholly_forced = exists & (rows == forced)
    participating = exists & ~wholly_forced if over == "candidates" else exists
    normalised = normalise_over(scores, exists)
    probability = normalised if over == "all" else normalise_over(scores, participating)
    chosen, margin = cut_blocks(probability, participating, top_p, cut)
    kept = chosen | wholly_forced
    indices, kept_cu = gather_indices(
        kept,
        cu_seqlens,
        num_rows=num_rows,
        block_size=block_size,
        sink_tokens=sink_tokens,
        window_tokens=window_tokens,
    )
    return indices, kept_cu, kept, normalised, margin
