"""What the one-pass kernels share: laying requests out on aligned rows, and turning log-sum-exps into mass and peak."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

LOG2_E = math.log2(math.e)


def align_requests(
    keys: Float[Array, "T KV d"], cu_seqlens: Int32[Array, "B+1"], alignment: int
) -> tuple[Float[Array, "aligned KV d"], Int32[Array, " B"]]:
    """Keys with every request moved to a multiple of `alignment` rows, and where each now starts; gaps hold anything.

    Costs one copy of the keys; batches of one request need none, because they start at row 0.
    """
    batch = cu_seqlens.shape[0] - 1
    rows = keys.shape[0]
    lengths = jnp.diff(cu_seqlens)
    ends = jnp.cumsum((lengths + alignment - 1) // alignment * alignment, dtype=jnp.int32)
    starts = jnp.pad(ends[:-1], (1, 0))
    aligned = (rows + batch * (alignment - 1)) // alignment * alignment
    row = jnp.arange(aligned, dtype=jnp.int32)
    owner = jnp.minimum((row[:, None] >= ends[None, :]).sum(-1, dtype=jnp.int32), batch - 1)
    source = row + (cu_seqlens[:-1] - starts)[owner]
    return jnp.take(keys, source, axis=0, mode="clip"), starts


def combine(
    block_lse: Float[Array, "slots H n"],
    span_lse: Float[Array, "spans H n"],
    span_request: Int32[Array, " spans"],
    first_slot: Int32[Array, " B"],
    cu_seqlens: Int32[Array, "B+1"],
    row_log_sum_exp: Float[Array, "B n H"] | None,
    *,
    num_blocks: int,
    block_size: int,
) -> tuple[Float[Array, "B num_blocks"], Float[Array, "B num_blocks"]]:
    """Mass and peak of every block: each row's log2-sum-exp from its spans, then the row's share of each block.

    Block b of request r lies in slot ``first_slot[r] + b``; slots in between, and spans whose request is none of the
    batch, were never written and may hold anything.
    """
    slots, _, window = block_lse.shape
    batch = cu_seqlens.shape[0] - 1
    lengths = jnp.diff(cu_seqlens)
    blocks = (lengths + block_size - 1) // block_size
    if row_log_sum_exp is None:
        mine = span_request[None, :] == jnp.arange(batch, dtype=jnp.int32)[:, None]
        values = jnp.where(mine[:, :, None, None], span_lse[None], -jnp.inf)
        top = values.max(1)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        row_lse = top + jnp.log2(jnp.exp2(values - top[:, None]).sum(1))
    else:
        row_lse = row_log_sum_exp.astype(jnp.float32).swapaxes(1, 2) * LOG2_E
    valid = jnp.arange(window, dtype=jnp.int32)[None, :] >= window - lengths[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)
    owner = (slot[:, None] >= first_slot[None, :]).sum(-1, dtype=jnp.int32) - 1
    owner = jnp.clip(owner, 0, batch - 1)
    used = slot - first_slot[owner] < blocks[owner]
    keep = used[:, None, None] & valid[owner][:, None, :]
    probability = jnp.where(keep, jnp.exp2(block_lse - row_lse[owner]), 0.0)
    mass, peak = probability.sum((1, 2)), probability.max((1, 2))
    place = jnp.arange(num_blocks, dtype=jnp.int32)[None, :]
    source = jnp.clip(first_slot[:, None] + place, 0, slots - 1)
    exists = place < blocks[:, None]
    return jnp.where(exists, mass[source], 0.0), jnp.where(exists, peak[source], 0.0)
