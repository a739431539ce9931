"""MInference (arXiv 2407.02490), vertical-slash: some columns and some diagonals of the score map are computed.

Softmax of the last 64 queries over the prompt: its sums by column and by diagonal say which `vertical` columns (the
first 30 always) and which `slash` diagonals (the nearest 100 always) matter for all rows. Columns are computed one by
one, diagonals in blocks. Defaults: 512 columns and 2048 diagonals for every head, which is what the authors ship for
Llama-3.1-8B, from their offline search.

Where this reading is ours: blocks lie on a grid, so that the rows of a block of queries see the one or two blocks of
keys that a diagonal crosses, where the authors' kernel places one block per diagonal and row of blocks; never is less
computed. As in the authors' code the budgets do not shrink with a prompt, and are cut to its length. A request of no
more rows than one of them, whose columns or diagonals are then all taken, is dense without a choice being made.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from uniprefill_jax.sparsify.methods.checks import check_integer
from uniprefill_jax.sparsify.methods.protocol import NOWHERE, Seen, SparseAttention
from uniprefill_jax.sparsify.methods.request_blocks import RequestBlocks
from uniprefill_jax.sparsify.methods.window_scores import map_window, sum_diagonals

WINDOW = 64
SURE_COLUMNS, SURE_DIAGONALS = 30, 100


@dataclass(frozen=True)
class MInference(SparseAttention):
    """Attributes:
    vertical: columns that every head sees, at least 30.
    slash: diagonals that every head sees, at least 50.
    """

    name: ClassVar[str] = "minference"
    block_size: int = 64
    vertical: int = 512
    slash: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "vertical", 30)
        check_integer(self, "slash", 50)

    @property
    def dense_up_to(self) -> int:
        """As many rows as there are columns or diagonals to take."""
        return max(self.dense_below, self.vertical, self.slash)

    def choose(
        self,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        blocks: RequestBlocks,
        scale: float,
    ) -> Seen:
        """The best columns, and the blocks that the best diagonals cross."""
        num_rows, lengths = keys.shape[0], blocks.lengths
        places = jnp.arange(num_rows, dtype=jnp.int32)

        def patterns(
            probabilities: Float[Array, "G n T"], request: Int32[Array, ""]
        ) -> tuple[Int32[Array, "G C"], Bool[Array, "G T"]]:
            length = lengths[request]
            exists = places < length
            columns = jnp.where(places < SURE_COLUMNS, jnp.inf, probabilities.sum(axis=1))
            best, at = jax.lax.top_k(jnp.where(exists, columns, -1.0), min(self.vertical, num_rows))
            verticals = jnp.sort(jnp.where(best >= 0.0, at.astype(jnp.int32), NOWHERE), axis=-1)
            diagonals = jnp.where(places < SURE_DIAGONALS, jnp.inf, sum_diagonals(probabilities, length))
            best, at = jax.lax.top_k(jnp.where(exists, diagonals, -1.0), min(self.slash, num_rows))
            at = jnp.where(best >= 0.0, at, num_rows)
            chosen = jnp.zeros(columns.shape, bool)
            return verticals, jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(chosen, at)

        window, _ = blocks.last_rows(WINDOW)
        verticals, diagonals = map_window(patterns, queries[window], keys, blocks.cu_seqlens, scale)
        columns = verticals.reshape(lengths.shape[0], queries.shape[1], -1).swapaxes(0, 1)
        crossed = crossed_blocks(diagonals.reshape(lengths.shape[0], queries.shape[1], num_rows), blocks.size)
        return Seen(blocks_by_distance(crossed, blocks), columns)


def crossed_blocks(diagonals: Bool[Array, "B H T"], size: int) -> Bool[Array, "B H D"]:
    """Of blocks so many blocks before the diagonal, whether any of the diagonals crosses them.

    A block D before has the distances D * size - (size - 1) to D * size + (size - 1).
    """
    padding = -diagonals.shape[-1] % size + size
    cut = jnp.pad(diagonals, ((0, 0), (0, 0), (0, padding)))
    cut = cut.reshape(*diagonals.shape[:2], -1, size)
    before = jnp.pad(cut[..., 1:].any(axis=-1), ((0, 0), (0, 0), (1, 0)))[..., :-1]
    return cut.any(axis=-1) | before


def blocks_by_distance(distances: Bool[Array, "B H D"], blocks: RequestBlocks) -> Bool[Array, "H Q Q"]:
    """Pairs of blocks by their distance in blocks, which each request and head has its own choice of."""
    count = blocks.count
    # Row q of the result is the choice of its request backwards, from where the distance q - k is that of k = 0 on.
    fitted = jnp.pad(distances, ((0, 0), (0, 0), (0, max(0, count - distances.shape[-1]))))[..., :count]
    backwards = jnp.pad(fitted[..., ::-1], ((0, 0), (0, 0), (0, count)))

    def row(owner: Int32[Array, ""], index: Int32[Array, ""]) -> Bool[Array, "H Q"]:
        size = (1, backwards.shape[1], count)
        return jax.lax.dynamic_slice(backwards, (owner, 0, count - 1 - index), size)[0]

    return jax.vmap(row, out_axes=1)(blocks.owner, jnp.arange(count, dtype=jnp.int32))
