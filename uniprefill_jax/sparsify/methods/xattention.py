"""XAttention (arXiv 2503.16428): sums along antidiagonals of the score map, at a stride, tell which blocks matter.

Every `stride` queries, in reversed order, and every `stride` keys are one long vector each; their product is the sum of
an antidiagonal of the scores. A causal softmax over this smaller map, summed over blocks of 128 x 128, orders the
blocks of a row: its first one and its own come first, then the others by their sum, and a block is computed while those
before it hold less than `threshold` of the row. Defaults: stride 16, threshold 0.9, as the authors use where they have
no table of thresholds per head.

Where this reading is ours: the authors pad prompts up to a multiple of 16,384 tokens, here each request is cut from its
own start and nothing is padded but its last block; keys are not repeated for grouped heads; blocks of equal sums are
computed together or not at all.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from uniprefill_jax.errors import ConfigError
from uniprefill_jax.sparsify.methods.checks import check_share
from uniprefill_jax.sparsify.methods.protocol import Seen, SparseAttention
from uniprefill_jax.sparsify.methods.request_blocks import RequestBlocks, by_chunks, smallest_accepted


@dataclass(frozen=True)
class XAttention(SparseAttention):
    """Attributes:
    threshold: share of a row's estimated mass that is computed.
    stride: rows that go into one of the estimate.
    """

    name: ClassVar[str] = "xattention"
    threshold: float = 0.9
    stride: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "threshold")
        if self.stride not in (4, 8, 16):
            raise ConfigError(f"xattention: stride is {self.stride!r}; use 4, 8 or 16")

    def choose(
        self,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        blocks: RequestBlocks,
        scale: float,
    ) -> Seen:
        """Blocks by the antidiagonal estimate, row by row."""
        count, per_block = blocks.count, blocks.size // self.stride
        num_kv_heads, head_dim = keys.shape[1:]
        group = queries.shape[1] // num_kv_heads
        long = (count, per_block, self.stride, num_kv_heads)
        # One long vector for the antidiagonal's queries, last first, and one for its keys.
        strided = blocks.lay_out(queries).reshape(*long, group, head_dim)[:, :, ::-1].transpose(0, 3, 4, 1, 2, 5)
        strided = strided.reshape(count, num_kv_heads, group, per_block, self.stride * head_dim)
        columns = blocks.lay_out(keys).reshape(*long, head_dim).transpose(3, 0, 1, 2, 4)
        columns = columns.reshape(num_kv_heads, count * per_block, self.stride * head_dim)
        exists = blocks.is_row.reshape(count, per_block, self.stride).any(axis=-1).reshape(-1)

        def rows_of(own: Float[Array, "C KV G r e"], index: Int32[Array, " C"]) -> Float[Array, "C KV G Q"]:
            scores = jnp.einsum("ckgre,kse->ckgrs", own, columns, preferred_element_type=jnp.float32)
            visible = blocks.visible(index, per_block, exists)
            scores = jnp.where(visible[:, None, None], scores * (scale / self.stride), -1e30)
            weights = jnp.where(visible[:, None, None], jax.nn.softmax(scores, axis=-1), 0.0)
            return weights.reshape(*weights.shape[:-1], count, per_block).sum(axis=(3, 5))

        per_item = queries.shape[1] * per_block * exists.shape[0]
        mass = by_chunks(rows_of, count, per_item, strided, jnp.arange(count, dtype=jnp.int32))
        mass = mass.transpose(1, 2, 0, 3).reshape(queries.shape[1], count, count)
        forced = blocks.first_and_own
        if self.threshold == 1.0:
            return Seen(jnp.broadcast_to(blocks.causal, mass.shape))
        others = jnp.where(forced, 0.0, mass)
        wanted = self.threshold * mass.sum(axis=-1) - jnp.where(forced, mass, 0.0).sum(axis=-1)

        def is_before(value: Float[Array, "H Q"]) -> Bool[Array, "H Q"]:
            """Whether blocks above a value hold less than is wanted: then a block of that value is computed."""
            return jnp.where(others > value[..., None], others, 0.0).sum(axis=-1) < wanted

        least = smallest_accepted(is_before, wanted.shape)
        return Seen(forced | (others >= least[..., None]))
