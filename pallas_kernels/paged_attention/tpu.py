"""Decode attention over pages on TPUs (Mosaic TPU).

The kernel goes along a list of steps that XLA makes from the lengths: each is a few pages in a row of one request. The
list's length is the grid's, known at run time alone, so padding costs nothing; the pipeline fetches the next step's
pages, whole ones, while this step's are multiplied.

All query heads meet the rows of all key heads of a page in one product, of which the pairs that belong together are
kept. The matrix unit takes every row of keys once either way, and a page then needs no cutting by heads. The kernel
that ships with JAX (`jax.experimental.pallas.ops.tpu.paged_attention`) does not serve here: it has no first visible
row, looks at entries of the page table that hold no visible row, and NaN in rows that nobody sees reach its results.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

STEP_BYTES = 1 << 20  # keys and values of one step, at most; where a page has more, a step is one page
MOST_PAGES = 16  # of one step: each is an operand of its own
LANES = 128
LOWEST = -1e30


def unsupported(heads: int, kv_heads: int, head_dim: int, page: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take this shape, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype is {dtype}; it takes bfloat16 and float32"
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    if page not in (8, 16, 32, 64, 128, 256):
        return f"pages have {page} rows; it takes 8, 16, 32, 64, 128 and 256"
    if kv_heads * page * head_dim * dtype.itemsize > STEP_BYTES:
        return f"a page of {kv_heads} key heads x {page} rows x {head_dim} does not fit on chip; take smaller pages"
    return None


def paged_attention_mosaic_tpu(
    queries: Float[Array, "B H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_table: Int32[Array, "R max_pages"],
    lengths: Int32[Array, " B"],
    first_visible: Int32[Array, " B"],
    first_request: Int32[Array, ""] | int = 0,
    *,
    scale: float,
) -> Float[Array, "B H d"]:
    """Outputs of every request; see `paged_attention`.

    Raises:
        ValueError: a dtype, head size or page size that the kernel does not take.
    """
    batch, heads, head_dim = queries.shape
    num_pages, kv_heads, page, _ = key_pages.shape
    reason = unsupported(heads, kv_heads, head_dim, page, key_pages.dtype)
    if reason is not None:
        raise ValueError(f"paged_attention: backend 'mosaic_tpu' cannot run this: {reason}; use backend='reference'")
    page_bytes = 2 * kv_heads * page * head_dim * key_pages.dtype.itemsize
    pages = min(max(STEP_BYTES // page_bytes, 1), MOST_PAGES, page_table.shape[1])
    lengths = jnp.clip(lengths, 0, page_table.shape[1] * page)
    first_visible = jnp.maximum(first_visible, 0)
    with jax.named_scope("list_steps"):
        request, row, count = _list_steps(lengths, first_visible, page * pages, -(-page_table.shape[1] // pages))
        # Pages without a visible row are replaced by one that has some: no other entry of the table is looked at.
        wanted = row[:, None] // page + jnp.arange(pages, dtype=jnp.int32)
        wanted = jnp.clip(wanted, (first_visible // page)[request, None], ((lengths - 1) // page)[request, None])
        ids = jnp.clip(page_table[first_request + request[:, None], wanted], 0, num_pages - 1)
    merged = (num_pages, kv_heads * page, head_dim)  # the same bytes
    outputs = _attend(
        (request, row, ids.reshape(-1), first_visible, lengths),
        jnp.maximum(count, 1),
        queries,
        key_pages.reshape(merged),
        value_pages.reshape(merged),
        kv_heads=kv_heads,
        pages=pages,
        scale=scale,
    )
    return jnp.where((lengths > first_visible)[:, None, None], outputs, 0)


def _list_steps(
    lengths: Int32[Array, " B"], first_visible: Int32[Array, " B"], step: int, most: int
) -> tuple[Int32[Array, " steps"], Int32[Array, " steps"], Int32[Array, ""]]:
    """For every step of `step` rows that holds a visible row, its request and its first row; and how many there are.

    A request has at most `most` of them. Entries past the last one repeat it.
    """
    batch = lengths.shape[0]
    count = (lengths + step - 1) // step - first_visible // step
    count = jnp.where(lengths > first_visible, count, 0)
    end = jnp.cumsum(count, dtype=jnp.int32)
    index = jnp.minimum(jnp.arange(batch * most, dtype=jnp.int32), jnp.maximum(end[-1] - 1, 0))
    request = jnp.searchsorted(end, index, side="right").astype(jnp.int32)
    request = jnp.minimum(request, batch - 1)
    row = (index - (end - count)[request] + first_visible[request] // step) * step
    return request, row.astype(jnp.int32), end[-1]


def _kernel(request, row, ids, first_visible, length, query, *refs, kv_heads, pages, scale, precision):
    key, value = refs[:pages], refs[pages : 2 * pages]
    output, result, maximum, total = refs[2 * pages :]
    step, last_step = pl.program_id(0), pl.num_programs(0) - 1
    own = request[step]
    first, stop = first_visible[own], length[own]
    heads = query.shape[1]
    rows, head_dim = key[0].shape[1:]
    page = rows // kv_heads

    @pl.when((step == 0) | (request[jnp.maximum(step - 1, 0)] != own))
    def _():
        result[...] = jnp.zeros_like(result)
        maximum[...] = jnp.full_like(maximum, LOWEST)
        total[...] = jnp.zeros_like(total)

    def visible(shape, axis, number):
        """Which rows of a page, key heads one after another along `axis`, the request's query sees."""
        place = lax.bitwise_and(lax.broadcasted_iota(jnp.int32, shape, axis), page - 1)
        place = place + (row[step] + number * page)
        return (place >= first) & (place < stop)

    def product(left, right, axis):
        return lax.dot_general(
            left, right, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    shape = (heads, rows)
    group = heads // kv_heads
    head = lax.broadcasted_iota(jnp.int32, shape, 0)
    first_head = lax.shift_right_logical(lax.broadcasted_iota(jnp.int32, shape, 1), page.bit_length() - 1) * group
    together = (head >= first_head) & (head < first_head + group)
    masks = [together & visible(shape, 1, number) for number in range(pages)]
    scores = [product(query[0], key[number][0], 1) * scale for number in range(pages)]
    scores = [jnp.where(mask, score, LOWEST) for mask, score in zip(masks, scores, strict=True)]
    before = maximum[:, :1]
    higher = functools.reduce(jnp.maximum, [score.max(1, keepdims=True) for score in scores], before)
    weights = [jnp.where(mask, jnp.exp(score - higher), 0.0) for mask, score in zip(masks, scores, strict=True)]
    shrink = jnp.exp(before - higher)
    update = jnp.zeros_like(result)
    for number in range(pages):
        # Values that nobody sees may hold NaN, which a weight of 0 does not cancel.
        seen = visible((rows, head_dim), 0, number)
        values = jnp.where(seen, value[number][0].astype(jnp.float32), 0.0).astype(value[number].dtype)
        update += product(weights[number].astype(values.dtype), values, 0)
    added = functools.reduce(jnp.add, [weight.sum(1, keepdims=True) for weight in weights])
    result[...] = result[...] * shrink + update
    maximum[...] = jnp.broadcast_to(higher, maximum.shape)
    total[...] = total[...] * shrink + added

    @pl.when((step == last_step) | (request[jnp.minimum(step + 1, last_step)] != own))
    def _():
        divisor = total[:, :1]
        output[0] = (result[...] / jnp.where(divisor > 0, divisor, 1.0)).astype(output.dtype)


def _attend(scalars, count, queries, keys, values, *, kv_heads, pages, scale):
    """The kernel: outputs of the requests that have steps; the others hold anything."""
    _, heads, head_dim = queries.shape
    rows = keys.shape[1]
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
    of_request = pl.BlockSpec((1, heads, head_dim), lambda step, request, *_: (request[step], 0, 0))
    of_page = [
        pl.BlockSpec(
            (1, rows, head_dim), lambda step, request, row, ids, *_, number=number: (ids[step * pages + number], 0, 0)
        )
        for number in range(pages)
    ]
    return pl.pallas_call(
        functools.partial(_kernel, kv_heads=kv_heads, pages=pages, scale=scale, precision=precision),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[of_request, *of_page, *of_page],
            out_specs=of_request,
            scratch_shapes=[
                pltpu.VMEM((heads, head_dim), jnp.float32),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="paged_attention",
    )(*scalars, queries, *[keys] * pages, *[values] * pages)
