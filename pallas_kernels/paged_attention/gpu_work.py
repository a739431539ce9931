"""How decode attention is shared out over the programs of a GPU.

The visible rows of all requests, in steps of equal size, form one line, and every program takes an equal stretch of it,
whatever the lengths. What a stretch has of one request is an item, the unit of partial results. Going along the line,
each item is of the next stretch, or the next request, or both: stretch + request numbers the items without a list.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

# Columns of the request table: where its steps begin and end on the line, its visible rows [first, stop), and which row
# of the page table it has.
BEGIN, END, FIRST, STOP, TABLE_ROW = 0, 1, 2, 3, 4


def line_up(
    lengths: Int32[Array, " B"],
    first_visible: Int32[Array, " B"],
    step: int,
    first_request: Int32[Array, ""] | int = 0,
) -> Int32[Array, "B columns"]:
    """The request table: the steps of `step` rows that hold a visible row, one request after another."""
    count = (lengths + step - 1) // step - first_visible // step
    count = jnp.where(lengths > first_visible, count, 0)
    end = jnp.cumsum(count, dtype=jnp.int32)
    table_row = first_request + jnp.arange(lengths.shape[0], dtype=jnp.int32)
    return jnp.stack([end - count, end, first_visible, lengths, table_row], axis=1).astype(jnp.int32)


def stretch_begin(stretch: Array | int, steps: Array, stretches: int) -> Array:
    """Place on a line of `steps` steps where one of `stretches` equal stretches begins."""
    return lax.div(stretch * steps, jnp.int32(stretches))


def count_items(begin: Array, end: Array, steps: Array, stretches: int) -> Array:
    """Stretches that hold some of steps [begin, end) of a line of `steps`."""
    spanned = stretch_of(end - 1, steps, stretches) - stretch_of(begin, steps, stretches) + 1
    # On a line shorter than there are stretches, each holds one step or none.
    return jnp.where(end > begin, jnp.minimum(spanned, end - begin), 0)


def item_stretch(number: Array, begin: Array, steps: Array, stretches: int) -> Array:
    """The stretch with the item of this number (0, 1, ...) among those of a request whose steps start at `begin`."""
    alone = stretch_of(begin + number, steps, stretches)
    return jnp.where(steps < stretches, alone, stretch_of(begin, steps, stretches) + number)


def stretch_of(place: Array, steps: Array, stretches: int) -> Array:
    """The stretch that holds a place on the line: the last one that begins at or before it."""
    return lax.div((place + 1) * stretches - 1, jnp.maximum(steps, 1))
