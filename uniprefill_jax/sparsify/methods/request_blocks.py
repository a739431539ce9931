"""Blocks of a ragged batch: every request is cut into blocks of rows from its own start, its last one may be short."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32


@struct.dataclass
class RequestBlocks:
    """Request b owns blocks `cu_blocks[b]` to `cu_blocks[b + 1]`; blocks past the last are empty.

    Attributes:
        cu_seqlens, cu_blocks: first row, and first block, of every request, and the end.
        owner: request of every block; of an empty one the last request.
        number: of every block, its place within its request.
        rows: packed row numbers of every block's rows; the int32 maximum where there is none.
        size: rows of a block.
    """

    cu_seqlens: Int32[Array, " B+1"]
    cu_blocks: Int32[Array, " B+1"]
    owner: Int32[Array, " Q"]
    number: Int32[Array, " Q"]
    rows: Int32[Array, "Q size"]
    size: int = struct.field(pytree_node=False)

    @property
    def count(self) -> int:
        """Number of blocks, empty ones included."""
        return self.owner.shape[0]

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """Rows of every request."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def filled(self) -> Int32[Array, " Q"]:
        """Rows of every block."""
        return self.is_row.sum(axis=-1, dtype=jnp.int32)

    @property
    def is_row(self) -> Bool[Array, "Q size"]:
        """Which places of the blocks hold a row."""
        return self.rows != jnp.iinfo(jnp.int32).max

    @property
    def causal(self) -> Bool[Array, "Q Q"]:
        """Whether a block of queries may see a block of keys: of its own request, not later."""
        same = (self.owner[:, None] == self.owner[None, :]) & (self.number[:, None] >= self.number[None, :])
        exists = self.filled > 0
        return same & exists[:, None] & exists[None, :]

    @property
    def first_and_own(self) -> Bool[Array, "Q Q"]:
        """Of every block the first one of its request, and itself."""
        return (jnp.eye(self.count, dtype=bool) | (self.number == 0)[None, :]) & self.causal

    def visible(
        self, index: Int32[Array, " C"], per_block: int, exists: Bool[Array, " S"]
    ) -> Bool[Array, "C per_block S"]:
        """Which of S places, `per_block` to a block, the places of some blocks see: those of their request, not later.

        `index` numbers these blocks; what lies at a place need not exist, and then neither sees nor is seen.
        """
        places = jnp.arange(exists.shape[0], dtype=jnp.int32)
        row = index[:, None] * per_block + jnp.arange(per_block)
        first = (self.cu_blocks[self.owner[index]] * per_block)[:, None, None]
        return (places >= first) & (places <= row[..., None]) & exists & exists[row][..., None]

    def lay_out(self, array: Float[Array, "T *rest"]) -> Float[Array, "Q size *rest"]:
        """Packed rows, block by block; zeros where a block has none."""
        return array.at[self.rows].get(mode="fill", fill_value=0)

    def last_rows(self, count: int) -> tuple[Int32[Array, "B count"], Int32[Array, "B count"]]:
        """Of every request's last rows, right aligned: packed row numbers, and places within the request (negative
        where it is shorter, and the row number another's or 0)."""
        within = self.lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)
        return jnp.maximum(self.cu_seqlens[:-1, None] + within, 0), within


def blocks_of_requests(cu_seqlens: Int32[Array, " B+1"], num_rows: int, size: int) -> RequestBlocks:
    """The blocks of a batch of `num_rows` packed rows, as many as any division into requests can need."""
    num_requests = cu_seqlens.shape[0] - 1
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    cu_blocks = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((lengths + size - 1) // size, dtype=jnp.int32)])
    blocks = jnp.arange(-(-num_rows // size) + num_requests - 1, dtype=jnp.int32)
    owner = jnp.searchsorted(cu_blocks[1:], blocks, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, num_requests - 1)
    number = blocks - cu_blocks[owner]
    within = number[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    exists = within < lengths[owner][:, None]
    rows = jnp.where(exists, cu_seqlens[owner][:, None] + within, jnp.iinfo(jnp.int32).max)
    return RequestBlocks(cu_seqlens, cu_blocks, owner, number, rows, size)


def smallest_accepted(
    accepts: Callable[[Float[Array, "*rows"]], Bool[Array, "*rows"]], shape: tuple[int, ...]
) -> Float[Array, "*rows"]:
    """Of each row the smallest float32 from 0 on that is accepted, given that all above it are; infinity for none.

    How a cut by cumulative mass is found without a sort: values of one size stay or go together.
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        accepted = accepts(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(accepted, low, middle + 1), jnp.where(accepted, middle, high)

    # The bits of non-negative floats rise as they do; these are infinity's.
    infinity = jnp.full(shape, 0x7F800000, jnp.int32)
    return jax.lax.bitcast_convert_type(
        jax.lax.fori_loop(0, 31, halve, (jnp.zeros(shape, jnp.int32), infinity))[1], jnp.float32
    )


def by_chunks(function: Any, length: int, scores_per_item: int, *arrays: Array) -> Any:
    """`function` of slices of arrays along their first axis, so many items at a time that 2**25 scores are held."""
    chunk = max(1, min(length, 2**25 // max(1, scores_per_item)))
    number = -(-length // chunk)
    padded = [jnp.pad(array, ((0, number * chunk - length), *((0, 0),) * (array.ndim - 1))) for array in arrays]
    cut = [array.reshape(number, chunk, *array.shape[1:]) for array in padded]
    results = jax.lax.map(lambda parts: function(*parts), tuple(cut))
    return jax.tree.map(lambda part: part.reshape(number * chunk, *part.shape[2:])[:length], results)
