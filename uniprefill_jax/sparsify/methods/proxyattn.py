"""ProxyAttn (arXiv 2509.24745): a few proxy heads, each the mean of several, score all tokens for all heads.

Neighbouring heads are dealt into groups; each group's mean queries against its mean keys give a softmax over tokens,
whose sums over blocks of 128 x 128 order the blocks of every row for all heads of the group. How many blocks a head
computes is its own: the share of the prompt's blocks that holds `gamma` of its last block of queries' attention, then
of every row that share of the blocks before it, the best ones, with the first block and the own one.

The authors' defaults were not to be found, so all of this reading beyond its idea (pooled proxy heads score tokens,
scores are shared, budgets are not) is ours: 4 proxies, or the next number below that divides the KV heads; gamma 0.95;
the budget's measure.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.sparsify.methods.checks import check_integer, check_share
from uniprefill_jax.sparsify.methods.protocol import Seen, SparseAttention
from uniprefill_jax.sparsify.methods.request_blocks import RequestBlocks, by_chunks
from uniprefill_jax.sparsify.methods.window_scores import map_window


@dataclass(frozen=True)
class ProxyAttn(SparseAttention):
    """Attributes:
    proxies: most proxy heads.
    gamma: share of its last queries' mass by which a head's budget is set.
    """

    name: ClassVar[str] = "proxyattn"
    proxies: int = 4
    gamma: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "proxies", 1)
        check_share(self, "gamma")

    def choose(
        self,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        blocks: RequestBlocks,
        scale: float,
    ) -> Seen:
        """Every head's share of its proxy's best blocks."""
        if self.gamma == 1.0:
            return Seen(jnp.broadcast_to(blocks.causal, (queries.shape[1], blocks.count, blocks.count)))
        num_rows, num_kv_heads, head_dim = keys.shape
        num_proxies = max(number for number in range(1, self.proxies + 1) if num_kv_heads % number == 0)
        mass = self._proxy_mass(
            queries.reshape(num_rows, num_proxies, -1, head_dim).mean(axis=2, dtype=jnp.float32).astype(queries.dtype),
            keys.reshape(num_rows, num_proxies, -1, head_dim).mean(axis=2, dtype=jnp.float32).astype(keys.dtype),
            blocks,
            scale,
        )
        forced = blocks.first_and_own
        order = jnp.argsort(-jnp.where(forced, jnp.inf, mass), axis=-1, stable=True)
        rank = jnp.repeat(jnp.argsort(order, axis=-1), queries.shape[1] // num_proxies, axis=0)
        share = self._shares(queries, keys, blocks, scale)
        budget = jnp.ceil(share[blocks.owner].T * (blocks.number + 1) - 1e-4)
        return Seen((rank < budget[..., None]) | forced)

    def _proxy_mass(
        self, queries: Float[Array, "T P d"], keys: Float[Array, "T P d"], blocks: RequestBlocks, scale: float
    ) -> Float[Array, "P Q Q"]:
        """Softmax over tokens, summed over blocks of queries and of keys."""
        count, size = blocks.count, blocks.size
        tokens = blocks.lay_out(keys).reshape(count * size, *keys.shape[1:])
        exists = blocks.is_row.reshape(-1)

        def rows_of(own: Float[Array, "C r P d"], index: Int32[Array, " C"]) -> Float[Array, "C P Q"]:
            scores = jnp.einsum("crpd,tpd->cprt", own, tokens, preferred_element_type=jnp.float32) * scale
            visible = blocks.visible(index, size, exists)
            weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
            weights = jnp.where(visible[:, None], weights, 0.0)
            return weights.reshape(*weights.shape[:-1], count, size).sum(axis=(2, 4))

        per_item = keys.shape[1] * size * exists.shape[0]
        mass = by_chunks(rows_of, count, per_item, blocks.lay_out(queries), jnp.arange(count, dtype=jnp.int32))
        return mass.swapaxes(0, 1)

    def _shares(
        self, queries: Float[Array, "T H d"], keys: Float[Array, "T KV d"], blocks: RequestBlocks, scale: float
    ) -> Float[Array, "B H"]:
        """Of every head, the share of its request's blocks that holds gamma of the last block of queries' mass."""
        size = blocks.size

        def share(probabilities: Float[Array, "G n T"], request: Int32[Array, ""]) -> Float[Array, " G"]:
            mass = jnp.pad(probabilities.sum(axis=1), ((0, 0), (0, -keys.shape[0] % size)))
            mass = -jnp.sort(-mass.reshape(mass.shape[0], -1, size).sum(axis=-1), axis=-1)
            before = jnp.cumsum(mass, axis=-1) - mass
            needed = (before < self.gamma * mass.sum(axis=-1, keepdims=True)).sum(axis=-1)
            return needed / jnp.maximum((blocks.lengths[request] + size - 1) // size, 1)

        window, _ = blocks.last_rows(size)
        return map_window(share, queries[window], keys, blocks.cu_seqlens, scale).reshape(-1, queries.shape[1])
