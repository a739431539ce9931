"""How packed requests are cut into chunks, and what the decay does inside a chunk; shared by every chunked backend.

A request starts a chunk of its own, so that a state never crosses from one request to the next. Chunks lie in slots:
those of request r in slots ``first[r] + 0, 1, ...``; slots past the last chunk own no rows.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

CHUNK = 64
LOG2_E = math.log2(math.e)


class Chunks(NamedTuple):
    """Slots of a packed batch: per request its first slot and number of chunks, per slot its rows."""

    first: Int32[Array, " B"]
    count: Int32[Array, " B"]
    owner: Int32[Array, " slots"]  # B where a slot is not used
    first_row: Int32[Array, " slots"]
    rows: Int32[Array, " slots"]  # 0 where a slot is not used

    def row_numbers(self) -> Int32[Array, "slots chunk"]:
        """Packed row of every place; places past a chunk's rows hold the numbers that would follow."""
        return self.first_row[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)

    def real(self) -> Bool[Array, "slots chunk"]:
        """Whether a place holds a row of its request."""
        return jnp.arange(CHUNK, dtype=jnp.int32) < self.rows[:, None]


def most_chunks(rows: int, batch: int) -> int:
    """Slots that `rows` packed rows of `batch` requests can need, whatever the lengths."""
    return rows // CHUNK + batch


def cut_chunks(cu_seqlens: Int32[Array, "B+1"], rows: int) -> Chunks:
    """Slots for every chunk of every request, in order."""
    batch = cu_seqlens.shape[0] - 1
    lengths = jnp.diff(cu_seqlens).astype(jnp.int32)
    count = (lengths + CHUNK - 1) // CHUNK
    end = jnp.cumsum(count, dtype=jnp.int32)
    first = end - count
    slot = jnp.arange(most_chunks(rows, batch), dtype=jnp.int32)
    owner = (slot[:, None] >= end[None, :]).sum(-1, dtype=jnp.int32)
    within = jnp.minimum(owner, batch - 1)
    passed = (slot - first[within]) * CHUNK
    used = owner < batch
    return Chunks(
        first,
        count,
        owner,
        jnp.where(used, cu_seqlens[within] + passed, 0).astype(jnp.int32),
        jnp.where(used, jnp.minimum(lengths[within] - passed, CHUNK), 0),
    )


class Decay(NamedTuple):
    """What the gates of a chunk come to, per slot, value head and place; places without a row leave the state alone."""

    cumulative: Float[Array, "slots Hv chunk"]  # log2 of the decay from before the chunk to after this row
    strength: Float[Array, "slots Hv chunk"]  # 0 where there is no row
    since_start: Float[Array, "slots Hv chunk"]  # exp2(cumulative)
    until_end: Float[Array, "slots Hv chunk"]  # decay from after this row to the end of the chunk


def chunk_decay(log_decay: Float[Array, "T Hv"], strength: Float[Array, "T Hv"], chunks: Chunks) -> Decay:
    """Gates of every chunk, float32."""
    real = chunks.real()[..., None]
    rows = jnp.where(chunks.real(), chunks.row_numbers(), 0)
    gates = jnp.where(real, log_decay.astype(jnp.float32)[rows], 0.0).swapaxes(1, 2)
    beta = jnp.where(real, strength.astype(jnp.float32)[rows], 0.0).swapaxes(1, 2)
    return decay_within(gates, beta)


def decay_within(gates: Float[Array, "... chunk"], strength: Float[Array, "... chunk"]) -> Decay:
    """The same from log decays and strengths that lie chunk by chunk; both are 0 where there is no row."""
    cumulative = jnp.cumsum(gates * LOG2_E, axis=-1)
    return Decay(cumulative, strength, jnp.exp2(cumulative), jnp.exp2(cumulative[..., -1:] - cumulative))
