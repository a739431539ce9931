"""FlexPrefill (arXiv 2502.20766): each head decides, from the last block of queries, how it is sparse and by how much.

The last `block_size` queries' softmax gives the mass of every column and of every diagonal. A head's columns and
diagonals are as many, in blocks, as hold the share `gamma` of that mass, at least `min_budget` and at most `max_budget`
tokens of either; the best blocks of columns and of diagonals, the first block and the own one are computed. Where
products of mean queries and mean keys tell the mass of blocks well (square root of the Jensen-Shannon divergence below
`tau`), the head is query-aware instead: of the whole map of such products the fewest entries that hold `gamma`, beside
`min_budget` of columns and diagonals. Defaults: gamma 0.9, tau 0.1, budgets 1024 and 32768 tokens, blocks of 128;
requests of up to `dense_below` (two blocks) or `min_budget` tokens, the more of the two, are dense, as in the authors'
code: the least budget is all of such a request.

Where this reading is ours: the budgets' least is the authors' patch's default, the most their example's. In a request
that does not end with a block, diagonals are cut into blocks by their distance, not from the request's start.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from uniprefill_jax.sparsify.methods.checks import check_integer, check_share
from uniprefill_jax.sparsify.methods.minference import blocks_by_distance
from uniprefill_jax.sparsify.methods.protocol import Seen, SparseAttention
from uniprefill_jax.sparsify.methods.request_blocks import RequestBlocks, smallest_accepted
from uniprefill_jax.sparsify.methods.window_scores import map_window, sum_diagonals


@dataclass(frozen=True)
class FlexPrefill(SparseAttention):
    """Attributes:
    gamma: share of the mass that is computed.
    tau: largest divergence at which a head is query-aware; 0 for none.
    min_budget, max_budget: least and most tokens of columns, and of diagonals.
    """

    name: ClassVar[str] = "flexprefill"
    dense_below: int = 256
    gamma: float = 0.9
    tau: float = 0.1
    min_budget: int = 1024
    max_budget: int = 32768

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "gamma")
        check_share(self, "tau")
        check_integer(self, "min_budget", 1)
        check_integer(self, "max_budget", self.min_budget)

    @property
    def dense_up_to(self) -> int:
        """The least budget, of columns and of diagonals."""
        return max(self.dense_below, self.min_budget)

    def choose(
        self,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        blocks: RequestBlocks,
        scale: float,
    ) -> Seen:
        """Vertical-slash blocks of every head, and query-aware ones of some."""
        num_heads, num_requests = queries.shape[1], blocks.lengths.shape[0]
        size, group = blocks.size, num_heads // keys.shape[1]
        filled = jnp.maximum(blocks.filled, 1)[:, None, None]
        mean_keys = blocks.lay_out(keys.astype(jnp.float32)).sum(axis=1) / filled
        mean_keys = jnp.repeat(mean_keys, group, axis=1)
        mean_queries = blocks.lay_out(queries.astype(jnp.float32)).sum(axis=1) / filled
        window, within = blocks.last_rows(size)
        last = queries[window]

        shape = (num_requests, num_heads, -1)
        found = map_window(self._vertical_slash(blocks), last, keys, blocks.cu_seqlens, scale)
        verticals, slashes, least_verticals, least_slashes, mass = (part.reshape(shape) for part in found)

        counted = (within >= 0)[..., None, None]
        mean_last = jnp.where(counted, last.astype(jnp.float32), 0.0).sum(axis=1) / jnp.maximum(counted.sum(axis=1), 1)
        own_blocks = (blocks.owner[None, :] == jnp.arange(num_requests)[:, None]) & (blocks.filled > 0)
        guess = jnp.einsum("bhd,khd->bhk", mean_last, mean_keys) * scale
        guess = jax.nn.softmax(jnp.where(own_blocks[:, None], guess, -1e30), axis=-1)
        at = jnp.arange(blocks.count)[None, :] - blocks.cu_blocks[:-1, None]  # of every block, its place in a request
        true = jnp.take_along_axis(mass, jnp.clip(at, 0, mass.shape[-1] - 1)[:, None], axis=-1)
        true = jnp.where(own_blocks[:, None], true, 0.0)
        query_aware = _divergence(guess, true) < self.tau  # [B, H]

        chosen_verticals = jnp.where(query_aware[..., None], least_verticals, verticals)
        chosen_slashes = jnp.where(query_aware[..., None], least_slashes, slashes)
        by_column = chosen_verticals[blocks.owner][:, :, jnp.clip(blocks.number, 0, verticals.shape[-1] - 1)]
        seen = by_column.swapaxes(0, 1) | blocks_by_distance(chosen_slashes, blocks)
        if self.tau > 0:
            aware = self._query_aware(mean_queries, mean_keys, blocks, scale)
            seen |= aware & query_aware[blocks.owner].T[:, :, None]
        return Seen(seen)

    def _vertical_slash(self, blocks: RequestBlocks):
        """Of one request and KV head: blocks of columns and of diagonals, at the head's own budget and at the least."""
        size, lengths = blocks.size, blocks.lengths

        def found(
            probabilities: Float[Array, "G n T"], request: Int32[Array, ""]
        ) -> tuple[Array, Array, Array, Array, Float[Array, "G D"]]:
            length = lengths[request]
            most = (length + size - 1) // size
            rows = jnp.minimum(length, size)
            vertical = probabilities.sum(axis=1) / rows
            slash = sum_diagonals(probabilities, length) / rows
            verticals, least_verticals = self._best_blocks(vertical, most, size)
            slashes, least_slashes = self._best_blocks(slash, most, size)
            return verticals, slashes, least_verticals, least_slashes, _sum_blocks(vertical, size)

        return found

    def _best_blocks(
        self, values: Float[Array, "G T"], most: Int32[Array, ""], size: int
    ) -> tuple[Bool[Array, "G D"], Bool[Array, "G D"]]:
        """The best blocks at the budget that the values ask for, and at the least one; the first block is the best."""
        least_budget, most_budget = -(-self.min_budget // size), -(-self.max_budget // size)
        held = jnp.cumsum(-jnp.sort(-values, axis=-1), axis=-1)
        needed = ((held <= self.gamma).sum(axis=-1) + 1) // size + 1
        budget = jnp.minimum(jnp.clip(needed, least_budget, most_budget), most)
        places = jnp.arange(-(-values.shape[-1] // size))
        worth = jnp.where(places == 0, jnp.inf, _sum_blocks(values, size))
        order = jnp.argsort(-jnp.where(places < most, worth, -1.0), axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1)
        exists = places < most
        return (rank < budget[:, None]) & exists, (rank < least_budget) & exists

    def _query_aware(
        self,
        mean_queries: Float[Array, "Q H d"],
        mean_keys: Float[Array, "Q H d"],
        blocks: RequestBlocks,
        scale: float,
    ) -> Bool[Array, "H Q Q"]:
        """Of each request's map of blocks, every row of mass 1, the largest entries up to the share gamma of all."""
        if self.gamma == 1.0:
            return jnp.broadcast_to(blocks.causal, (mean_keys.shape[1], blocks.count, blocks.count))
        scores = jnp.einsum("qhd,khd->hqk", mean_queries, mean_keys) * scale
        weights = jax.nn.softmax(jnp.where(blocks.causal, scores, -1e30), axis=-1)
        weights = jnp.where(blocks.causal, weights, 0.0)
        num_requests = blocks.lengths.shape[0]
        limit = self.gamma * (blocks.cu_blocks[1:] - blocks.cu_blocks[:-1])
        own = jax.nn.one_hot(blocks.owner, num_requests)

        def fits(value: Float[Array, "H B"]) -> Bool[Array, "H B"]:
            rows = jnp.where(weights >= value[:, blocks.owner, None], weights, 0.0).sum(axis=-1)
            return jnp.einsum("hq,qb->hb", rows, own, precision="highest") <= limit

        least = smallest_accepted(fits, (weights.shape[0], num_requests))
        return weights >= least[:, blocks.owner, None]


def _sum_blocks(values: Float[Array, "G T"], size: int) -> Float[Array, "G D"]:
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[-1] % size)))
    return padded.reshape(values.shape[0], -1, size).sum(axis=-1)


def _divergence(first: Float[Array, "B H Q"], second: Float[Array, "B H Q"]) -> Float[Array, "B H"]:
    """Square root of the Jensen-Shannon divergence, in nats."""
    middle = (first + second) / 2
    parts = jax.scipy.special.rel_entr(first, middle) + jax.scipy.special.rel_entr(second, middle)
    return jnp.sqrt(jnp.maximum(0.5 * parts.sum(axis=-1), 0.0))
