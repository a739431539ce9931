"""Packed requests laid out in whole blocks, so that no block holds rows of two."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

NOWHERE = jnp.iinfo(jnp.int32).max


def count_blocks(rows: int, requests: int, block_size: int) -> int:
    """Blocks that any `requests` requests of `rows` rows together can fill."""
    return -(-rows // block_size) + requests - 1


class Blocks(NamedTuple):
    """Where blocks and rows lie; request b owns blocks ``cu_blocks[b]`` to ``cu_blocks[b + 1]``.

    Attributes:
        cu_seqlens, cu_blocks: first row, and first block, of every request, and the end.
        owner: request of every block; of one that is not used the last.
        filled: rows of every block.
        size: rows that a block has place for.
    """

    cu_seqlens: Int32[Array, " B+1"]
    cu_blocks: Int32[Array, " B+1"]
    owner: Int32[Array, " Q"]
    filled: Int32[Array, " Q"]
    size: int

    @classmethod
    def of_requests(cls, cu_seqlens: Int32[Array, " B+1"], rows: int, size: int) -> "Blocks":
        """The blocks of a batch of `rows` packed rows, padding included."""
        requests = cu_seqlens.shape[0] - 1
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        cu_blocks = jnp.cumsum((lengths + size - 1) // size, dtype=jnp.int32)
        block = jnp.arange(count_blocks(rows, requests, size), dtype=jnp.int32)
        owner = jnp.searchsorted(cu_blocks, block, side="right", method="compare_all").astype(jnp.int32)
        owner = jnp.minimum(owner, requests - 1)
        cu_blocks = jnp.concatenate([jnp.zeros(1, jnp.int32), cu_blocks])
        filled = jnp.clip(lengths[owner] - (block - cu_blocks[owner]) * size, 0, size)
        return cls(cu_seqlens, cu_blocks, owner, filled, size)

    @property
    def first(self) -> Int32[Array, " Q"]:
        """The first block of every block's request."""
        return self.cu_blocks[self.owner]

    def lay_out(self, *arrays: Float[Array, "T *rest"]) -> list[Float[Array, "L *rest"]]:
        """Packed rows, block by block. One request stays where it is, and what its padding holds stays too."""
        rows = self.filled.shape[0] * self.size
        if self.cu_blocks.shape[0] == 2:
            return [jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1))) for x in arrays]
        start = self.cu_seqlens[self.owner] + (jnp.arange(self.filled.shape[0]) - self.first) * self.size
        place = jnp.arange(self.size, dtype=jnp.int32)
        row = jnp.where(place < self.filled[:, None], start[:, None] + place, NOWHERE).reshape(-1)
        return [x.at[row].get(mode="fill", fill_value=0) for x in arrays]

    def collect(self, array: Float[Array, "L *rest"], rows: int) -> Float[Array, "T *rest"]:
        """The packed rows of what is laid out; zeros in padding."""
        if self.cu_blocks.shape[0] == 2:
            return array[:rows]
        row = jnp.arange(rows, dtype=jnp.int32)
        request = jnp.searchsorted(self.cu_seqlens[1:], row, side="right", method="compare_all")
        request = jnp.minimum(request, self.cu_seqlens.shape[0] - 2)
        place = self.cu_blocks[request] * self.size + row - self.cu_seqlens[request]
        return array.at[jnp.where(row < self.cu_seqlens[-1], place, NOWHERE)].get(mode="fill", fill_value=0)

    def is_row(self) -> Array:
        """Which places of the layout hold a row."""
        return (jnp.arange(self.size) < self.filled[:, None]).reshape(-1)
