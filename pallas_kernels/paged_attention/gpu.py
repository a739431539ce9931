"""Decode attention over pages on Hopper GPUs (Mosaic GPU).

Decoding is bound by the bytes of keys and values, so everything serves one end: copies in flight at all times on all
multiprocessors. The programs are persistent and each takes an equal stretch of the rows of all requests (`gpu_work`); a
producer warpgroup streams the stretch's keys and values through a ring of buffers in shared memory without a pause
between requests, and the few bytes of results are the only ones written.

One program serves one key head and with it all query heads of the group, in one pass. The products are the transposed
ones, K q^T and V^T P^T: the rows that wgmma wants 64 of are keys and then head dimensions, and the few query heads are
its columns, of which it wants only 8.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.hopper import MULTIPROCESSORS, SHARED_MEMORY
from pallas_kernels.paged_attention.gpu_combine import LOWEST, combine
from pallas_kernels.paged_attention.gpu_work import BEGIN, END, FIRST, STOP, TABLE_ROW, line_up, stretch_begin

ALIGNMENT = 8  # rows; a TMA copy into the tiled layout that wgmma reads starts at a multiple of this
COLUMNS = 8  # query heads: the smallest number of columns of a wgmma
MOST_COLUMNS = 32
SLAB = 64  # columns of one swizzled tile
RESERVED_MEMORY = 5 * 1024  # barriers, the scratch memory of reductions, and what the driver keeps per program
BYTES = 2  # of an element
LOG2_E = 1.4426950408889634


class Tiling(NamedTuple):
    """How the work is cut.

    Attributes:
        keys: keys of one step, a multiple of 64.
        stages: steps whose keys and values shared memory holds, and thus how much is in flight.
        programs: programs on each multiprocessor; one computes while another waits.
    """

    keys: int
    stages: int
    programs: int


def unsupported(heads: int, kv_heads: int, head_dim: int, page: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype is {dtype}; it takes bfloat16 and float16 (wgmma has no float32 product)"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    if page not in (8, 16, 32, 64, 128, 256):
        return f"pages have {page} rows; it takes 8, 16, 32, 64, 128 and 256"
    if heads // kv_heads > MOST_COLUMNS:
        return f"{heads // kv_heads} query heads share a key head; it takes {MOST_COLUMNS} at most"
    return None


def default_tiling(head_dim: int, columns: int = COLUMNS) -> Tiling:
    """Steps of 32 KiB in two programs per multiprocessor, of 64 KiB in one at head size 256; as many as fit."""
    tiling = {64: Tiling(128, 1, 2), 128: Tiling(64, 1, 2), 256: Tiling(64, 1, 1)}[head_dim]
    left = SHARED_MEMORY // tiling.programs - shared_memory(tiling, head_dim, columns)
    return tiling._replace(stages=1 + left // (2 * tiling.keys * head_dim * BYTES))


def shared_memory(tiling: Tiling, head_dim: int, columns: int) -> int:
    """Bytes of shared memory that one program takes."""
    streamed = 2 * tiling.stages * tiling.keys * head_dim
    return (streamed + 2 * columns * head_dim + columns * tiling.keys) * BYTES + RESERVED_MEMORY


def paged_attention_mosaic_gpu(
    queries: Float[Array, "B H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_table: Int32[Array, "R max_pages"],
    lengths: Int32[Array, " B"],
    first_visible: Int32[Array, " B"],
    first_request: Int32[Array, ""] | int = 0,
    *,
    scale: float,
    tiling: Tiling | None = None,
) -> Float[Array, "B H d"]:
    """Outputs of every request; see `paged_attention`.

    Raises:
        ValueError: a dtype, head size, page size or group that the kernel does not take, or a tiling that does not fit.
    """
    batch, heads, head_dim = queries.shape
    _, kv_heads, page, _ = key_pages.shape
    reason = unsupported(heads, kv_heads, head_dim, page, key_pages.dtype)
    if reason is not None:
        raise ValueError(f"paged_attention: backend 'mosaic_gpu' cannot run this: {reason}; use backend='reference'")
    group = heads // kv_heads
    columns = -(-group // COLUMNS) * COLUMNS
    tiling = tiling or default_tiling(head_dim, columns)
    needed = tiling.programs * shared_memory(tiling, head_dim, columns)
    if tiling.keys % SLAB or needed > SHARED_MEMORY:
        raise ValueError(
            f"paged_attention: {tiling} needs {needed} bytes of shared memory on every multiprocessor at head size "
            f"{head_dim}; keys must be a multiple of {SLAB} and {SHARED_MEMORY} bytes suffice"
        )
    stretches = max(tiling.programs * MULTIPROCESSORS // kv_heads, 1)
    with jax.named_scope("line_up"):
        lengths = jnp.clip(lengths, 0, page_table.shape[1] * page)
        requests = line_up(lengths, jnp.maximum(first_visible, 0), tiling.keys, first_request)
    grouped = queries.reshape(batch, kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    partial, maximum, total = _attend(
        requests, page_table, grouped, key_pages, value_pages, stretches=stretches, scale=scale, tiling=tiling
    )
    with jax.named_scope("combine"):
        outputs = combine(partial, maximum, total, requests, stretches)[..., :group]
        return outputs.swapaxes(2, 3).reshape(batch, heads, head_dim).astype(queries.dtype)


def _attend(requests, page_table, queries, key_pages, value_pages, *, stretches, scale, tiling):
    """The kernel: undivided outputs [items, KV, d, columns], maxima and sums of weights [items, KV, columns]."""
    batch, kv_heads, columns, head_dim = queries.shape
    page = key_pages.shape[2]
    step_keys, stages, dtype = tiling.keys, tiling.stages, key_pages.dtype
    piece = min(page, step_keys)  # rows of one copy
    pieces = step_keys // piece
    factor = scale * LOG2_E
    layout = mgpu.Layout.WGMMA

    def body(
        requests_gmem, table_gmem, q_gmem, k_gmem, v_gmem,
        out_gmem, maximum_gmem, total_gmem,
        q_smem, k_smem, v_smem, p_smem, q_ready, k_ready, v_ready, k_free, v_free,
    ):  # fmt: skip
        stretch = lax.axis_index("stretch")
        kv_head = lax.axis_index("kv_head")
        warpgroup = lax.axis_index("warpgroup")
        steps = requests_gmem[batch - 1, END]
        begin, end = (stretch_begin(stretch + more, steps, stretches) for more in (0, 1))

        def request_at(place):
            """The request whose steps a place on the line is among: the first that ends beyond it."""

            def halve(_, bounds):
                low, high = bounds
                middle = lax.div(low + high, 2)
                beyond = requests_gmem[middle, END] > place
                return jnp.where(beyond, low, middle + 1), jnp.where(beyond, middle, high)

            bounds = jnp.int32(0), jnp.int32(batch - 1)
            return lax.fori_loop(0, (batch - 1).bit_length(), halve, bounds)[1]

        def for_items(visit, carry):
            """Call `visit(request, place, stop, carry)` for every item of the stretch, [place, stop) on the line."""

            def advance(state):
                place, carry = state
                request = request_at(place)
                stop = jnp.minimum(requests_gmem[request, END], end)
                return stop, visit(request, place, stop, carry)

            return lax.while_loop(lambda state: state[0] < end, advance, (begin, carry))[1]

        def first_row(request, place):
            """The row of the request that the step at this place on the line begins with."""
            skipped = lax.div(requests_gmem[request, FIRST], step_keys)
            return (place - requests_gmem[request, BEGIN] + skipped) * step_keys

        @pl.when(warpgroup == 1)
        def _produce():
            def load_item(request, place, stop, _):
                # Pieces without a visible row read a page that has one: no other entry of the table is looked at.
                first_page = lax.div(requests_gmem[request, FIRST], page)
                last_page = lax.div(requests_gmem[request, STOP] - 1, page)
                item_row = first_row(request, place)
                table_row = requests_gmem[request, TABLE_ROW]

                def load(index, _):
                    slot = lax.rem(index - begin, stages)
                    row = item_row + (index - place) * step_keys
                    sources = []
                    for number in range(pieces):
                        entry = jnp.clip(lax.div(row + number * piece, page), first_page, last_page)
                        source = (table_gmem[table_row, entry] * kv_heads + kv_head) * page
                        source = source if piece == page else source + lax.rem(row, page)
                        sources.append(pl.ds(pl.multiple_of(source, ALIGNMENT), piece))
                    for gmem, smem, ready, free in (
                        (k_gmem, k_smem, k_ready, k_free),
                        (v_gmem, v_smem, v_ready, v_free),
                    ):

                        @pl.when(index - begin >= stages)
                        def _(free=free):
                            mgpu.barrier_wait(free.at[slot])

                        for number, source in enumerate(sources):
                            target = smem.at[slot, pl.ds(number * piece, piece)]
                            mgpu.copy_gmem_to_smem(gmem.at[source], target, ready.at[slot])
                    return ()

                return lax.fori_loop(place, stop, load, ())

            def drain(index, _):
                mgpu.barrier_wait(k_free.at[lax.rem(index - begin, stages)])
                mgpu.barrier_wait(v_free.at[lax.rem(index - begin, stages)])
                return ()

            # Every phase of a barrier is awaited by someone, so that none is left open when the program ends.
            for_items(load_item, ())
            lax.fori_loop(jnp.maximum(end - stages, begin), end, drain, ())

        @pl.when(warpgroup == 0)
        def _consume():
            def fetch_queries(request, slot):
                mgpu.copy_gmem_to_smem(q_gmem.at[request, kv_head], q_smem.at[slot], q_ready.at[slot])

            def product(left, right):
                def multiply(accumulator):
                    mgpu.wgmma(accumulator, left, right)
                    return accumulator[...]

                shape = (left.shape[0], right.shape[1])
                return pl.run_scoped(multiply, mgpu.WGMMAAccumulatorRef(shape, jnp.float32))

            def attend_item(request, place, stop, number):
                query_slot = lax.rem(number, 2)
                query = q_smem.at[query_slot]
                item_row = first_row(request, place)
                first_visible, length = requests_gmem[request, FIRST], requests_gmem[request, STOP]

                # The other slot's last reader is the item before, whose products have ended.
                @pl.when(stop < end)
                def _():
                    fetch_queries(request_at(stop), 1 - query_slot)

                mgpu.barrier_wait(q_ready.at[query_slot])

                def advance(index, carry):
                    maximum, total, result = carry
                    slot = lax.rem(index - begin, stages)
                    row = item_row + (index - place) * step_keys

                    def visible(shape):
                        own = mgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + row
                        return (own >= first_visible) & (own < length)

                    mgpu.barrier_wait(k_ready.at[slot])
                    scores = product(k_smem.at[slot], query.transpose((1, 0)))
                    mgpu.barrier_arrive(k_free.at[slot])
                    scores = jnp.where(visible(scores.shape), scores * factor, -jnp.inf)
                    higher = jnp.maximum(maximum, scores.max(axis=0))
                    weights = jnp.exp2(scores - lax.broadcast_in_dim(higher, scores.shape, [1]))
                    shrink = jnp.exp2(maximum - higher)
                    p_smem.transpose((1, 0))[...] = weights.astype(dtype)
                    mgpu.barrier_wait(v_ready.at[slot])

                    # Values that nobody sees may hold NaN, which a weight of 0 does not cancel.
                    @pl.when((row < first_visible) | (row + step_keys > length))
                    def _():
                        for slab in range(0, head_dim, SLAB):
                            values = v_smem.at[slot, :, pl.ds(slab, SLAB)]
                            seen = visible((step_keys, SLAB))
                            values[...] = jnp.where(seen, mgpu.load(values, layout=layout), 0)

                    mgpu.commit_smem()
                    update = product(v_smem.at[slot].transpose((1, 0)), p_smem.transpose((1, 0)))
                    mgpu.barrier_arrive(v_free.at[slot])
                    total = total * lax.broadcast_in_dim(shrink, total.shape, [1]) + weights
                    result = result * lax.broadcast_in_dim(shrink, result.shape, [1]) + update
                    return higher, total, result

                def zeros(*shape):
                    return mgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)

                maximum = mgpu.layout_cast(jnp.full((columns,), LOWEST, jnp.float32), layout.reduce(0))
                carry = maximum, zeros(step_keys, columns), zeros(head_dim, columns)
                maximum, total, result = lax.fori_loop(place, stop, advance, carry)
                item = stretch + request
                out_gmem[item, kv_head] = result
                maximum_gmem[item, kv_head] = maximum
                total_gmem[item, kv_head] = total.sum(axis=0)
                return number + 1

            @pl.when(begin < end)
            def _():
                fetch_queries(request_at(begin), 0)

            for_items(attend_item, jnp.int32(0))

    transforms = (
        mgpu.TilingTransform((8, SLAB)),  # pyright: ignore[reportAbstractUsage]
        mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    partial = (batch + stretches - 1, kv_heads)
    return mgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((*partial, head_dim, columns), jnp.float32),
            jax.ShapeDtypeStruct((*partial, columns), jnp.float32),
            jax.ShapeDtypeStruct((*partial, columns), jnp.float32),
        ],
        scratch_types=[
            mgpu.SMEM((2, columns, head_dim), dtype, transforms=transforms),
            mgpu.SMEM((stages, step_keys, head_dim), dtype, transforms=transforms),
            mgpu.SMEM((stages, step_keys, head_dim), dtype, transforms=transforms),
            mgpu.SMEM((columns, step_keys), dtype, transforms=transforms),
            mgpu.Barrier(num_barriers=2),
            mgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
            mgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
            mgpu.Barrier(num_barriers=stages),
            mgpu.Barrier(num_barriers=stages),
        ],
        grid=(stretches, kv_heads),
        grid_names=("stretch", "kv_head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(
        requests,
        page_table,
        queries,
        key_pages.reshape(-1, head_dim),
        value_pages.reshape(-1, head_dim),
    )
