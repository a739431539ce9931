"""The cut on Hopper GPUs (Mosaic GPU): one program per request, bisection instead of a sort; see `search`.

The scores of a request stay in shared memory; each of the bisection's sums is one walk over them by one warpgroup.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.top_p_select.search import NO_BLOCK, find_cut

LANES = 256  # elements of one TMA box along one axis
CHUNK = 8  # rows of LANES elements that one step of a sum covers: 16 elements a thread
LARGEST_NUM_BLOCKS = 32768


def unsupported(num_blocks: int) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if num_blocks > LARGEST_NUM_BLOCKS:
        return f"num_blocks is {num_blocks}; it takes at most {LARGEST_NUM_BLOCKS}"
    return None


def cut_blocks_mosaic_gpu(
    probability: Float[Array, "B num_blocks"],
    participating: Bool[Array, "B num_blocks"],
    top_p: Float[Array, " B"],
    cut: str,
) -> tuple[Bool[Array, "B num_blocks"], Float[Array, " B"]]:
    """The blocks that the cut keeps, and its margin; `probability` sums to 1 over the participating blocks."""
    batch, num_blocks = probability.shape
    reason = unsupported(num_blocks)
    if reason is not None:
        raise ValueError(f"top_p_select: backend 'mosaic_gpu' cannot run this: {reason}; use backend='reference'")
    scores = jnp.where(participating, probability, -1.0)
    rows = -(-num_blocks // (LANES * CHUNK)) * CHUNK
    padded = jnp.pad(scores, ((0, 0), (0, rows * LANES - num_blocks)), constant_values=-1.0)

    def body(scores_gmem, top_p_gmem, threshold_gmem, margin_gmem, buffer, ready):
        request = lax.axis_index("request")
        for first in range(0, rows, LANES):
            part = pl.ds(first, min(LANES, rows - first))
            mgpu.copy_gmem_to_smem(scores_gmem.at[request, part], buffer.at[part], ready)
        mgpu.barrier_wait(ready)

        def walk(initial, dtype, step):
            """Fold `step` over the chunks elementwise; the caller reduces the result."""
            start = jnp.full((CHUNK, LANES), initial, dtype)

            def visit(chunk, carry):
                scores = buffer[pl.ds(chunk * CHUNK, CHUNK)]
                return step(carry, chunk, scores, lax.bitcast_convert_type(scores, jnp.int32))

            if rows == CHUNK:
                return visit(0, start)
            return lax.fori_loop(0, rows // CHUNK, visit, start)

        def mass_above(bits):
            def step(total, _, scores, own):
                return total + jnp.where(own > bits, scores, 0.0)

            return walk(0.0, jnp.float32, step).sum()

        def ties_at(bits):
            def count(total, _, scores, own):
                return total + jnp.where(own == bits, 1, 0)

            def largest(top, _, scores, own):
                return jnp.maximum(top, jnp.where(own == bits, scores, 0.0))

            return walk(0, jnp.int32, count).sum(), walk(0.0, jnp.float32, largest).max()

        def ties_from(bits, index):
            shape = (CHUNK, LANES)
            place = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES + lax.broadcasted_iota(jnp.int32, shape, 1)

            def step(total, chunk, scores, own):
                here = (own == bits) & (place + chunk * (CHUNK * LANES) >= index)
                return total + jnp.where(here, 1, 0)

            return walk(0, jnp.int32, step).sum()

        def lower(least, _, scores, own):
            return jnp.minimum(least, jnp.where(own >= 0, own, NO_BLOCK))

        lowest = walk(NO_BLOCK, jnp.int32, lower).min()
        bits, first_index, margin = find_cut(
            mass_above, ties_at, ties_from, lowest, top_p_gmem[request], num_blocks=num_blocks, cut=cut
        )
        threshold_gmem[request, 0] = bits
        threshold_gmem[request, 1] = first_index
        margin_gmem[request] = margin

    threshold, margin = mgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((batch, 2), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.float32)],
        scratch_types=[
            mgpu.SMEM((rows, LANES), jnp.float32),
            mgpu.Barrier(num_arrivals=-(-rows // LANES)),
        ],
        grid=(batch,),
        grid_names=("request",),
        compiler_params=mgpu.CompilerParams(unsafe_no_auto_barriers=True),  # nothing but TMA writes shared memory
    )(padded.reshape(batch, rows, LANES), top_p)
    own = lax.bitcast_convert_type(scores, jnp.int32)
    place = jnp.arange(num_blocks, dtype=jnp.int32)
    kept = (own > threshold[:, :1]) | ((own == threshold[:, :1]) & (place >= threshold[:, 1:]))
    return kept, margin
