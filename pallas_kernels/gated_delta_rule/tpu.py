"""The gated delta rule on TPUs (Mosaic TPU): one pass over the chunks, the state in on-chip memory.

A grid step is one chunk of one value head; the chunks of a head follow one another and hand the state on in scratch
memory. Rows are laid out beforehand so that every chunk is a block of its own. Products are float32 at full precision:
the matrix units' single pass in bfloat16 would cost more accuracy than the operation has to give.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_delta_rule.chunks import CHUNK, Chunks, chunk_decay, cut_chunks
from pallas_kernels.gated_delta_rule.reference import NORM_EPSILON

LANES = 128
CUMULATIVE, STRENGTH, SINCE_START, UNTIL_END = 0, 1, 2, 3  # rows of a block of gates
OWNER, FIRST, ROWS, TABLE_ROWS = 0, 1, 2, 3  # rows of the slot table


def unsupported(
    heads: int, key_heads: int, key_dim: int, value_dim: int, dtype: jnp.dtype, value_dtype: jnp.dtype
) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    for name, given in (("queries and keys", dtype), ("values", value_dtype)):
        if given not in (jnp.bfloat16, jnp.float32):
            return f"{name} are {given}; it takes bfloat16 and float32"
    if key_dim % LANES or value_dim % LANES:
        return f"head sizes are {key_dim} (keys) and {value_dim} (values); it takes multiples of {LANES}"
    return None


def gated_delta_rule_mosaic_tpu(
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
    """Outputs in the dtype of the values, final states in float32; see `gated_delta_rule`.

    Raises:
        ValueError: dtypes or head sizes that the kernel does not take.
    """
    rows, key_heads, key_dim = keys.shape
    heads, value_dim = values.shape[1:]
    reason = unsupported(heads, key_heads, key_dim, value_dim, keys.dtype, values.dtype)
    if reason is not None:
        raise ValueError(f"gated_delta_rule: backend 'mosaic_tpu' cannot run this: {reason}; use backend='xla'")
    batch = cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)
    initial_state = initial_state.astype(jnp.float32)
    chunks = cut_chunks(cu_seqlens, rows)
    owner = jnp.minimum(chunks.owner, batch - 1)
    is_first = (chunks.first_row == cu_seqlens[owner]) & (chunks.rows > 0)
    table = jnp.stack([owner, is_first.astype(jnp.int32), chunks.rows]).astype(jnp.int32)
    real, places = chunks.real().reshape(-1), chunks.row_numbers().reshape(-1)

    def lay_out(x: Array) -> Array:
        """[T, H, d] to [H, slots x chunk, d], zero where there is no row."""
        return jnp.where(real[:, None, None], x[jnp.where(real, places, 0)], 0).swapaxes(0, 1)

    gates = jnp.stack(chunk_decay(log_decay, strength, chunks), axis=2)
    outputs, states = _walk(
        table, lay_out(queries), lay_out(keys), lay_out(values), gates, initial_state, normalise=normalise
    )
    lengths = jnp.diff(cu_seqlens)
    states = jnp.where((lengths > 0)[:, None, None, None], states, initial_state)
    return _gather_back(outputs, chunks, cu_seqlens, rows), states


def _gather_back(outputs: Array, chunks: Chunks, cu_seqlens: Int32[Array, "B+1"], rows: int) -> Array:
    """[H, slots x chunk, d] to [T, H, d], zero in padding rows."""
    batch = cu_seqlens.shape[0] - 1
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = (row[:, None] >= cu_seqlens[None, 1:]).sum(-1, dtype=jnp.int32)
    within = jnp.minimum(owner, batch - 1)
    source = chunks.first[within] * CHUNK + row - cu_seqlens[within]
    taken = jnp.take(outputs, source, axis=1, mode="clip").swapaxes(0, 1)
    return jnp.where((owner < batch)[:, None, None], taken, jnp.zeros((), outputs.dtype))


def _dot(left: Array, right: Array, contract: tuple[int, int]) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _unit_inverse(system: Array, row: Array, column: Array) -> Array:
    """(I + system)^-1 of a strictly lower matrix, its diagonal blocks joined in pairs until one is left."""
    inverse = jnp.where(row == column, 1.0, 0.0) - jnp.where((row ^ column) == 1, system, 0.0)
    size = 2
    while size < CHUNK:
        joins = jnp.where(((row ^ column) & -size) == size, system, 0.0)
        inverse = inverse - _dot(inverse, _dot(joins, inverse, (1, 0)), (1, 0))
        size *= 2
    return inverse


def _kernel(table, query, key, value, gates, initial, output, final, state, *, normalise):
    slot = pl.program_id(1)

    @pl.when(table[FIRST, slot] == 1)
    def _():
        state[...] = initial[0, 0]

    @pl.when(table[ROWS, slot] > 0)
    def _():
        row = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        column = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)

        def gate(which):
            """A row of gates along the lanes, and the same along the sublanes."""
            lanes = gates[0, 0, which : which + 1, :]
            return lanes, jnp.where(row == column, lanes, 0.0).sum(1, keepdims=True)

        queries, keys = query[0].astype(jnp.float32), key[0].astype(jnp.float32)
        if normalise:
            queries, keys = (
                rows * lax.rsqrt((rows * rows).sum(1, keepdims=True) + NORM_EPSILON) for rows in (queries, keys)
            )
            queries *= queries.shape[1] ** -0.5
        by_column, by_row = gate(CUMULATIVE)
        strength = gate(STRENGTH)[1]
        since_start = gate(SINCE_START)[1]
        # Above the diagonal the difference is positive and could overflow: mask before the exponential.
        decay = jnp.exp2(jnp.where(row >= column, by_row - by_column, -jnp.inf))
        system = jnp.where(row > column, _dot(keys, keys, (1, 1)) * decay * strength, 0.0)
        error = (value[0].astype(jnp.float32) - _dot(keys, state[...], (1, 0)) * since_start) * strength
        news = _dot(_unit_inverse(system, row, column), error, (1, 0))
        outputs = _dot(queries, state[...], (1, 0)) * since_start
        outputs += _dot(_dot(queries, keys, (1, 1)) * decay, news, (1, 0))
        output[0] = outputs.astype(output.dtype)
        whole = since_start[CHUNK - 1 :, :]
        state[...] = state[...] * whole + _dot(keys, news * gate(UNTIL_END)[1], (0, 0))
        final[0, 0] = state[...]


def _walk(table, queries, keys, values, gates, initial, *, normalise):
    heads, placed, value_dim = values.shape
    key_heads, _, key_dim = keys.shape
    ratio = heads // key_heads
    slots = placed // CHUNK

    def of_key_head(head, slot, table):
        return lax.div(head, ratio), slot, 0

    def of_owner(head, slot, table):
        return table[OWNER, slot], head, 0, 0

    def kernel(*refs):
        _kernel(*refs, normalise=normalise)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, slots),
            in_specs=[
                pl.BlockSpec((1, CHUNK, key_dim), of_key_head),
                pl.BlockSpec((1, CHUNK, key_dim), of_key_head),
                pl.BlockSpec((1, CHUNK, value_dim), lambda head, slot, table: (head, slot, 0)),
                pl.BlockSpec((1, 1, 4, CHUNK), lambda head, slot, table: (slot, head, 0, 0)),
                pl.BlockSpec((1, 1, key_dim, value_dim), of_owner),
            ],
            out_specs=[
                pl.BlockSpec((1, CHUNK, value_dim), lambda head, slot, table: (head, slot, 0)),
                pl.BlockSpec((1, 1, key_dim, value_dim), of_owner),
            ],
            scratch_shapes=[pltpu.VMEM((key_dim, value_dim), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="gated_delta_rule",
    )(table, queries, keys, values, gates, initial)
