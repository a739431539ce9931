"""How decode attention is shared out over the programs of a GPU, and how their partial results become one.

The visible rows of all requests, in steps of equal size, form one line, and every program takes an equal stretch of it,
whatever the lengths. What a stretch has of one request is an item, the unit of partial results. Going along the line,
each item is of the next stretch, or the next request, or both: stretch + request numbers the items without a list.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

# Columns of the request table: where its steps begin and end on the line, and its visible rows [first, stop).
BEGIN, END, FIRST, STOP = 0, 1, 2, 3


def line_up(lengths: Int32[Array, " B"], first_visible: Int32[Array, " B"], step: int) -> Int32[Array, "B columns"]:
    """The request table: the steps of `step` rows that hold a visible row, one request after another."""
    count = (lengths + step - 1) // step - first_visible // step
    count = jnp.where(lengths > first_visible, count, 0)
    end = jnp.cumsum(count, dtype=jnp.int32)
    return jnp.stack([end - count, end, first_visible, lengths], axis=1).astype(jnp.int32)


def stretch_begin(stretch: Array | int, steps: Array, stretches: int) -> Array:
    """Place on a line of `steps` steps where one of `stretches` equal stretches begins."""
    return lax.div(stretch * steps, jnp.int32(stretches))


def items_of(requests: Int32[Array, "B columns"], stretches: int) -> Bool[Array, "B items"]:
    """Which items belong to which request; items that none has do not exist."""
    begin, end = requests[:, BEGIN], requests[:, END]
    steps = end[-1]
    # The stretch that holds a step is the last one that begins at or before it.
    first = ((begin + 1) * stretches - 1) // jnp.maximum(steps, 1)
    last = (end * stretches - 1) // jnp.maximum(steps, 1)
    batch = requests.shape[0]
    stretch = jnp.arange(batch + stretches - 1, dtype=jnp.int32) - jnp.arange(batch, dtype=jnp.int32)[:, None]
    empty = stretch_begin(stretch, steps, stretches) == stretch_begin(stretch + 1, steps, stretches)
    return (stretch >= first[:, None]) & (stretch <= last[:, None]) & (end > begin)[:, None] & ~empty


def combine(
    partial: Float[Array, "items KV d G"],
    maximum: Float[Array, "items KV G"],
    total: Float[Array, "items KV G"],
    owned: Bool[Array, "B items"],
) -> Float[Array, "B KV G d"]:
    """Outputs of every request, float32, from undivided partial ones with their maxima (in log2) and sums of weights.

    Items that no request owns may hold anything. A request without items gets 0.
    """
    items, kv_heads, head_dim, group = partial.shape
    batch = owned.shape[0]
    by_request = owned[:, :, None, None]
    highest = jnp.where(by_request, maximum[None], -jnp.inf).max(1, keepdims=True)
    weights = jnp.where(by_request, jnp.exp2(maximum[None] - highest), 0.0)
    divisor = jnp.where(by_request, weights * total[None], 0.0).sum(1)
    weight = weights.sum(0)[:, :, None, :]
    weighted = jnp.where(weight > 0, partial * weight, 0.0)
    # A product rather than a sum over segments: that would add in an order that changes from run to run.
    summed = jnp.dot(owned.astype(jnp.float32), weighted.reshape(items, -1), precision=lax.Precision.HIGHEST)
    summed = summed.reshape(batch, kv_heads, head_dim, group)
    return (summed / jnp.where(divisor > 0, divisor, 1.0)[:, :, None, :]).swapaxes(2, 3)
