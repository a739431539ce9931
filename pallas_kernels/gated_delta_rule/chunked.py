"""The gated delta rule in chunks of rows, plain XLA: the path on machines without a kernel.

Within a chunk the recurrence is a triangular system (the WY form), so that only one step per chunk is sequential.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_delta_rule.chunks import CHUNK, Chunks, Decay, chunk_decay, cut_chunks
from pallas_kernels.gated_delta_rule.reference import scaled_queries_and_keys

# Chunks whose inner systems are solved together, before the states pass through them one by one.
CHUNKS_AT_ONCE = 8


class SolvedChunk(NamedTuple):
    """All that a chunk's outputs need but the state from before it; h key heads, g value heads of each."""

    query: Float[Array, "*batch h chunk dk"]
    attention: Float[Array, "*batch h g chunk chunk"]
    new_value: Float[Array, "*batch h g chunk dv"]
    decayed_key: Float[Array, "*batch h g chunk dk"]
    key: Float[Array, "*batch h chunk dk"]
    since_start: Float[Array, "*batch h g chunk"]
    until_end: Float[Array, "*batch h g chunk"]


def solve_chunks(
    query: Float[Array, "*batch h chunk dk"],
    key: Float[Array, "*batch h chunk dk"],
    value: Float[Array, "*batch h g chunk dv"],
    decay: Decay,
) -> SolvedChunk:
    """The triangular systems of any number of chunks (Yang et al., arXiv 2412.06464); the decay is [*batch h g chunk].

    Queries and keys as `scaled_queries_and_keys` leaves them; everything is float32.
    """
    cumulative, beta, since_start, until_end = decay
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    # Differences above the diagonal are positive and could overflow: mask before the exponential.
    pairwise = jnp.exp2(jnp.where(lower, cumulative[..., :, None] - cumulative[..., None, :], -jnp.inf))
    system = jnp.einsum("...ik,...jk->...ij", key, key)[..., None, :, :] * pairwise * beta[..., None]
    decayed_key = key[..., None, :, :] * (beta * since_start)[..., None]
    right = jnp.concatenate([value * beta[..., None], decayed_key], axis=-1)
    solved = lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    new_value, decayed_key = jnp.split(solved, (value.shape[-1],), axis=-1)
    attention = jnp.einsum("...ik,...jk->...ij", query, key)[..., None, :, :] * pairwise
    return SolvedChunk(query, attention, new_value, decayed_key, key, since_start, until_end)


def advance_state(
    state: Float[Array, "*batch h g dk dv"], chunk: SolvedChunk
) -> tuple[Float[Array, "*batch h g dk dv"], Float[Array, "*batch h g chunk dv"]]:
    """One chunk of every batch element: the state after it, and its outputs."""
    corrected = chunk.new_value - jnp.einsum("...ik,...kv->...iv", chunk.decayed_key, state)
    output = jnp.einsum("...hik,...hgkv->...hgiv", chunk.query, state) * chunk.since_start[..., None]
    output += jnp.einsum("...ij,...jv->...iv", chunk.attention, corrected)
    state = state * chunk.since_start[..., -1, None, None]
    state += jnp.einsum("...hik,...hgiv->...hgkv", chunk.key, corrected * chunk.until_end[..., None])
    return state, output


def gated_delta_rule_xla(
    queries: Float[Array, "T Hk dk"],
    keys: Float[Array, "T Hk dk"],
    values: Float[Array, "T Hv dv"],
    log_decay: Float[Array, "T Hv"],
    strength: Float[Array, "T Hv"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    initial_state: Float[Array, "B Hv dk dv"] | None,
    normalise: bool,
) -> tuple[Float[Array, "T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Outputs of every row and final states, both float32; see `gated_delta_rule`."""
    rows, key_heads, key_dim = keys.shape
    value_heads, value_dim = values.shape[1:]
    batch = cu_seqlens.shape[0] - 1
    # Value heads in groups that share a key head.
    grouped = (key_heads, value_heads // key_heads)
    if initial_state is None:
        initial_state = jnp.zeros((batch, value_heads, key_dim, value_dim), jnp.float32)
    initial = initial_state.astype(jnp.float32).reshape(batch, *grouped, key_dim, value_dim)
    chunks = cut_chunks(cu_seqlens, rows)
    spare = -chunks.owner.shape[0] % CHUNKS_AT_ONCE
    chunks = chunks._replace(
        owner=jnp.pad(chunks.owner, (0, spare), constant_values=batch),
        first_row=jnp.pad(chunks.first_row, (0, spare)),
        rows=jnp.pad(chunks.rows, (0, spare)),
    )

    def advance(
        carry: tuple[Array, Array], chunk: tuple[Array, Array, SolvedChunk]
    ) -> tuple[tuple[Array, Array], Array]:
        state, states = carry
        owner, is_first, solved = chunk
        # A request's state starts from its row of `states`, which holds what it came with until it is done.
        state = jnp.where(is_first, states[jnp.minimum(owner, batch - 1)], state)
        state, output = advance_state(state, solved)
        return (state, states.at[owner].set(state, mode="drop")), output

    def several_chunks(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, states, packed = carry
        part = Chunks(
            chunks.first,
            chunks.count,
            *(lax.dynamic_slice_in_dim(x, number * CHUNKS_AT_ONCE, CHUNKS_AT_ONCE) for x in chunks[2:]),
        )
        real, places = part.real(), part.row_numbers()
        taken = jnp.where(real, places, 0)

        def take(x: Array) -> Array:
            """[T, H, d] to [chunks, H, chunk, d], zero where a chunk is longer than its request."""
            return jnp.where(real[..., None, None], x[taken], 0).swapaxes(1, 2)

        q, k = scaled_queries_and_keys(take(queries), take(keys), normalise)
        v = take(values).astype(jnp.float32).reshape(CHUNKS_AT_ONCE, *grouped, CHUNK, value_dim)
        decay = Decay(*(x.reshape(CHUNKS_AT_ONCE, *grouped, CHUNK) for x in chunk_decay(log_decay, strength, part)))
        is_first = part.first_row == cu_seqlens[jnp.minimum(part.owner, batch - 1)]
        parts = part.owner, is_first, solve_chunks(q, k, v, decay)
        (state, states), outputs = lax.scan(advance, (state, states), parts)
        outputs = outputs.reshape(CHUNKS_AT_ONCE, value_heads, CHUNK, value_dim).swapaxes(1, 2)
        target = jnp.where(real, places, rows).reshape(-1)
        return state, states, packed.at[target].set(outputs.reshape(-1, value_heads, value_dim), mode="drop")

    used = (chunks.count.sum() + CHUNKS_AT_ONCE - 1) // CHUNKS_AT_ONCE
    carry = (jnp.zeros_like(initial[0]), initial, jnp.zeros((rows, value_heads, value_dim), jnp.float32))
    _, states, packed = jax.lax.fori_loop(0, used, several_chunks, carry)
    return packed, states.reshape(batch, value_heads, key_dim, value_dim)
