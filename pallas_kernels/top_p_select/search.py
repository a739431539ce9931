"""The cut without a sort, shared by the kernels: a binary search for the last kept block.

A block is kept iff the mass before it in the order is <= top_p, so the kept blocks are those above a threshold value
and, among the blocks that equal it, those from some index on. Both thresholds are found by bisection: 31 sums over the
blocks for the value's bits (non-negative floats order like integers), up to 16 counts for the index. Sums of
non-negative numbers in a fixed order never fall when a term joins, so rounding cannot break the bisection.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

VALUE_ROUNDS = 31
LARGEST_BITS = 0x40000000  # of 2.0: above every normalised score
NO_BLOCK = 0x7FFFFFFF  # stands for the smallest bits where no block takes part

type Scalars = jax.Array  # a scalar per program (GPU) or one value per row of the tile (TPU)


def find_cut(
    mass_above: Callable[[Scalars], Scalars],
    ties_at: Callable[[Scalars], tuple[Scalars, Scalars]],
    ties_from: Callable[[Scalars, Scalars], Scalars],
    lowest: Scalars,
    top_p: Scalars,
    *,
    num_blocks: int,
    cut: str,
) -> tuple[Scalars, Scalars, Scalars]:
    """Threshold bits, first kept index among the blocks that equal it, and the margin of the cut.

    Args:
        mass_above: bits -> sum of the scores above them, float32.
        ties_at: bits -> (how many scores equal them, int32; the score itself, float32).
        ties_from: bits, index -> how many scores equal the bits from that index on, int32.
        lowest: bits of the smallest score that takes part, or NO_BLOCK.
        top_p: float32; 1 and more keeps everything.
    """
    limit = jnp.where(top_p >= 1.0, jnp.inf, top_p)

    def halve_values(_, bounds):
        low, high = bounds
        middle = (low + high) >> 1
        fits = mass_above(middle) <= limit
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    _, bits = lax.fori_loop(0, VALUE_ROUNDS, halve_values, (lowest * 0 - 1, lowest * 0 + LARGEST_BITS))
    bits = jnp.maximum(bits, lowest)
    above = mass_above(bits)
    ties, value = ties_at(bits)
    ties_float = ties.astype(jnp.float32)
    room = jnp.where(value > 0.0, jnp.minimum((limit - above) / jnp.maximum(value, 1e-37), ties_float), ties_float)
    fitting = jnp.minimum(room.astype(jnp.int32) + 1, ties)
    fitting_float = fitting.astype(jnp.float32)
    before = above + (fitting_float - 1.0) * value
    through = above + fitting_float * value
    is_first = (above == 0.0) & (fitting == 1)
    if cut == "crossing":
        kept = fitting
        has_next = (fitting < ties) | (lowest < bits)
        margin = jnp.minimum(jnp.abs(before - top_p), jnp.where(has_next, jnp.abs(through - top_p), jnp.inf))
    else:
        kept = jnp.where((through <= limit) | is_first, fitting, fitting - 1)
        margin = jnp.minimum(jnp.abs(through - top_p), jnp.where(is_first, jnp.inf, jnp.abs(before - top_p)))
    margin = jnp.where(ties > 0, margin, jnp.inf)

    def halve_indices(_, bounds):
        low, high = bounds
        middle = (low + high) >> 1
        fits = ties_from(bits, middle) <= kept
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    # Hardly ever does the cut fall among equal scores, and only then is there an index to search for.
    split = kept < ties
    split_anywhere = split.astype(jnp.int32).max() if split.ndim else split.astype(jnp.int32)
    rounds = jnp.where(split_anywhere > 0, num_blocks.bit_length() + 1, 0)
    bounds = (lowest * 0 - 1, jnp.where(split, num_blocks, 0))
    _, first_index = lax.fori_loop(0, rounds, halve_indices, bounds)
    return bits, first_index, margin
