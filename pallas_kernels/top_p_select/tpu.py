"""The cut on TPUs (Mosaic TPU): eight requests at a time, bisection instead of a sort; see `search`."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.top_p_select.search import NO_BLOCK, find_cut

REQUESTS = 8  # requests of one grid step: one sublane tile
LARGEST_NUM_BLOCKS = 32768  # float32 scores of eight requests then take 1 MB of VMEM


def unsupported(num_blocks: int) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if num_blocks > LARGEST_NUM_BLOCKS:
        return f"num_blocks is {num_blocks}; it takes at most {LARGEST_NUM_BLOCKS}"
    return None


def cut_blocks_mosaic_tpu(
    probability: Float[Array, "B num_blocks"],
    participating: Bool[Array, "B num_blocks"],
    top_p: Float[Array, " B"],
    cut: str,
) -> tuple[Bool[Array, "B num_blocks"], Float[Array, " B"]]:
    """The blocks that the cut keeps, and its margin; `probability` sums to 1 over the participating blocks."""
    batch, num_blocks = probability.shape
    reason = unsupported(num_blocks)
    if reason is not None:
        raise ValueError(f"top_p_select: backend 'mosaic_tpu' cannot run this: {reason}; use backend='reference'")
    scores = jnp.where(participating, probability, -1.0)
    kept, margin = pl.pallas_call(
        functools.partial(_kernel, cut=cut),
        grid=(pl.cdiv(batch, REQUESTS),),
        in_specs=[
            pl.BlockSpec((REQUESTS, num_blocks), lambda i: (i, 0)),
            pl.BlockSpec((REQUESTS, 1), lambda i: (i, 0)),
        ],
        out_specs=[
            pl.BlockSpec((REQUESTS, num_blocks), lambda i: (i, 0)),
            pl.BlockSpec((REQUESTS, 1), lambda i: (i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_blocks), jnp.int32),
            jax.ShapeDtypeStruct((batch, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="top_p_cut",
    )(scores, top_p[:, None])
    return kept > 0, margin[:, 0]


def _kernel(scores_ref, top_p_ref, kept_ref, margin_ref, *, cut):
    num_blocks = scores_ref.shape[1]

    def scores_and_bits():
        scores = scores_ref[...]
        return scores, lax.bitcast_convert_type(scores, jnp.int32)

    def mass_above(bits):
        scores, own = scores_and_bits()
        return jnp.where(own > bits, scores, 0.0).sum(1, keepdims=True)

    def ties_at(bits):
        scores, own = scores_and_bits()
        return (
            (own == bits).astype(jnp.int32).sum(1, keepdims=True),
            jnp.where(own == bits, scores, 0.0).max(1, keepdims=True),
        )

    def ties_from(bits, index):
        _, own = scores_and_bits()
        column = lax.broadcasted_iota(jnp.int32, own.shape, 1)
        return ((own == bits) & (column >= index)).astype(jnp.int32).sum(1, keepdims=True)

    _, own = scores_and_bits()
    lowest = jnp.where(own >= 0, own, NO_BLOCK).min(1, keepdims=True)
    bits, first_index, margin = find_cut(
        mass_above, ties_at, ties_from, lowest, top_p_ref[...], num_blocks=num_blocks, cut=cut
    )
    column = lax.broadcasted_iota(jnp.int32, own.shape, 1)
    kept_ref[...] = ((own > bits) | ((own == bits) & (column >= first_index))).astype(jnp.int32)
    margin_ref[...] = margin
