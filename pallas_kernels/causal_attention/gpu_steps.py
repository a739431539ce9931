"""The online softmax of one warpgroup of 64 query rows over steps of keys that a memory warpgroup streams (Mosaic GPU).

In every step two products are in flight: the scores of this step's keys, and the weights of the previous step times its
values. The softmax of this step runs while the second product does, and while other warpgroups keep the matrix units
busy. Which keys a step holds is the producer's affair, and which of them a row sees is the caller's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from pallas_kernels.causal_attention.shapes import LOG2_E

ROWS = 64  # query rows of one warpgroup's wgmma
LOWEST = -1e30  # what a running maximum starts from: finite, so that rows that have seen nothing yet make no NaN
LAYOUT = mgpu.Layout.WGMMA

Visible = Callable[[Any], Array]
"""Of a step, the entries [ROWS, keys] that are seen."""


class Stream(NamedTuple):
    """What a compute warpgroup reads.

    Attributes:
        queries: its rows in shared memory [ROWS, d], there already.
        keys, values: rings in shared memory [slots, keys, d].
        k_ready, v_ready, k_free, v_free: barriers of every slot; the free ones await all readers of the slot.
        slot_of: the slot of a step.
    """

    queries: Any
    keys: Any
    values: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    slot_of: Callable[[Any], Any]


class Sums(NamedTuple):
    """Sum of weights times values [ROWS, d], the maximum of scores in units of log2, and the sum of weights [ROWS]."""

    result: Any
    maximum: Any
    total: Any


def attend(
    stream: Stream,
    first: Any,
    parts: Sequence[tuple[Any, Visible | None]],
    *,
    scale: float,
    interpretable: bool,
) -> Sums:
    """Runs from step `first` through `parts`: the step at which each ends, and what of its steps is visible.

    There is at least one step; the first one is masked as the first part is, and there every row sees something. None
    is all of a step. `scale` is not negative, because the maximum is taken before it is applied. `interpretable` is for
    the CPU interpreter alone, which knows neither operands in registers nor accumulators that hold something already:
    values are then multiplied by a plain dot, which does not compile for a GPU.
    """
    queries, k_smem, v_smem, k_ready, v_ready, k_free, v_free, slot_of = stream
    (step_keys, head_dim), dtype = k_smem.shape[1:], k_smem.dtype
    factor = scale * LOG2_E

    def score(accumulator, slot):
        mgpu.wgmma(accumulator, queries, k_smem.at[slot].transpose((1, 0)))

    scores_type = mgpu.WGMMAAccumulatorRef((ROWS, step_keys), jnp.float32)

    def weigh(scores, step, maximum, total, visible):
        return _weigh(scores, None if visible is None else visible(step), factor, maximum, total)

    def advance(step, carry, *, visible):
        """Scores and weights of this step while the previous step's weights meet their values."""
        result, maximum, total, weights = carry
        slot, previous = slot_of(step), slot_of(step - 1)

        # The new weights stay float32 until the product of the old ones is done: narrowed before that, they
        # would go to the registers that it reads, and the compiler would run one after the other.
        def products(result_ref, maximum_ref, total_ref, shrink_ref, weights_ref):
            def both(scores_ref):
                score(scores_ref, slot)
                mgpu.wgmma(result_ref, weights, v_smem.at[previous])
                return mgpu.wgmma_accumulator_load(scores_ref, wait_n=1)

            scores = pl.run_scoped(both, scores_type)
            mgpu.barrier_arrive(k_free.at[slot])
            higher, total, shrink, new = weigh(scores, step, maximum_ref[...], total_ref[...], visible)
            maximum_ref[...] = higher
            total_ref[...] = total
            shrink_ref[...] = shrink
            weights_ref[...] = new

        mgpu.barrier_wait(k_ready.at[slot])
        mgpu.barrier_wait(v_ready.at[previous])
        if not interpretable:
            blank = mgpu.layout_cast(jnp.zeros((ROWS, step_keys), jnp.float32), LAYOUT)
            state = (mgpu.WGMMAAccumulatorRef.init(result), maximum, total, maximum, blank)
            updated: Any = pl.run_state(lambda refs: products(*refs))(state)
            result, maximum, total, shrink, new = updated
        else:
            scores = pl.run_scoped(lambda ref: (score(ref, slot), ref[...])[1], scores_type)
            result = result + value(weights, previous)
            mgpu.barrier_arrive(k_free.at[slot])
            maximum, total, shrink, new = weigh(scores, step, maximum, total, visible)
        mgpu.barrier_arrive(v_free.at[previous])
        result = result * lax.broadcast_in_dim(shrink, result.shape, [0])
        return result, maximum, total, lax.optimization_barrier(new.astype(dtype))

    def value(weights, slot):
        product = jnp.dot(weights, v_smem[slot], preferred_element_type=jnp.float32)
        mgpu.commit_smem()  # an ordinary read: it ends before the copy that reuses the slot starts
        return product

    def first_scores(accumulator):
        mgpu.barrier_wait(k_ready.at[slot_of(first)])
        score(accumulator, slot_of(first))
        return accumulator[...]

    scores = pl.run_scoped(first_scores, scores_type)
    mgpu.barrier_arrive(k_free.at[slot_of(first)])
    reduced = LAYOUT.reduce(1)
    maximum = mgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), reduced)
    total = mgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), reduced)
    maximum, total, _, weights = weigh(scores, first, maximum, total, parts[0][1])
    result = mgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), LAYOUT)
    carry = (result, maximum, total, lax.optimization_barrier(weights.astype(dtype)))
    # Several loops rather than one that decides in every step: that was up to a tenth slower.
    begin, end = first + 1, first + 1
    for end, visible in parts:
        carry = lax.fori_loop(begin, end, functools.partial(advance, visible=visible), carry)
        begin = end
    result, maximum, total, weights = carry
    last = slot_of(end - 1)
    mgpu.barrier_wait(v_ready.at[last])
    if not interpretable:
        accumulator = mgpu.WGMMAAccumulatorRef.init(result)
        result: Any = pl.run_state(lambda ref: mgpu.wgmma(ref, weights, v_smem.at[last]))(accumulator)
    else:
        result = result + value(weights, last)
    mgpu.barrier_arrive(v_free.at[last])
    return Sums(result, maximum, total)


def iota(shape: tuple[int, ...], dimension: int, layout: Any = LAYOUT) -> Array:
    """Index along one dimension, in the layout of scores or one reduced from it."""
    return mgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


def _weigh(scores, visible, factor, maximum, total):
    """The running maximum (of scores in units of log2) and sum, what earlier results shrink by, and the weights."""
    if visible is None:
        higher = jnp.maximum(maximum, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(higher, scores.shape, [0]))
    else:
        scores = jnp.where(visible, scores * factor, -jnp.inf)
        higher = jnp.maximum(maximum, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(higher, scores.shape, [0]))
    shrink = jnp.exp2(maximum - higher)
    return higher, total * shrink + weights.sum(axis=1), shrink, weights


def consumer_registers(computing: int, copying: int = 1) -> int:
    """Registers per thread of a compute warpgroup once the memory warpgroups have given up all but 24.

    What can be shared out is what the program was launched with: the register file over its threads, in eights.
    """
    warpgroups = computing + copying
    launched = min(65536 // (128 * warpgroups) // 8 * 8, 240)
    return min(240, (launched * warpgroups - 24 * copying) // computing // 8 * 8)
