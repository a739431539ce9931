"""SlimInfer (arXiv 2508.06447): blocks of hidden states that are of no relevance to the nearest queries leave.

The prompt is cut into blocks; a block's representative is its mean key, and its relevance what the mean of the last
queries makes of that: per head a softmax over the blocks, then the mean over the heads. After some layers only the most
relevant blocks go on. The authors move what left out of the GPU's memory; here it is gone.

There is no code of the authors', and their layers, sizes and budgets were not to be found, so these are ours: the
layers are UniPrefill's drop layers of the model, blocks are of 64 tokens, the last 64 queries count, the share of the
prompt's blocks that stays falls evenly from 0.9 to 0.4, the first block and those of the last 64 tokens always stay,
and prompts of at most 256 tokens are left whole.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.sparsify.drop import rows_of_blocks
from uniprefill_jax.sparsify.methods.checks import check_integer
from uniprefill_jax.sparsify.methods.token_choice import TokenChoice


@dataclass(frozen=True)
class SlimInfer(TokenChoice):
    """Attributes: those of `TokenChoice`, and

    queries: last queries of a prompt, by whose mean blocks are judged; they stay.
    """

    name: ClassVar[str] = "sliminfer"
    unit: ClassVar[int] = 64
    sinks: ClassVar[int] = 64
    queries: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "queries", 1)

    @property
    def window(self) -> int:
        """The queries that count."""
        return self.queries

    def worth(
        self,
        queries: Float[Array, "B n H d"],
        keys: Float[Array, "T KV d"],
        cu_seqlens: Int32[Array, " B+1"],
        scale: float,
    ) -> Float[Array, "B T"]:
        """Relevance of each token's block, spread evenly over its tokens."""
        num_requests, window, num_heads, head_dim = queries.shape
        num_rows, num_kv_heads, _ = keys.shape
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        own = (lengths[:, None] - window + jnp.arange(window) >= 0)[:, :, None, None]
        mean_query = jnp.where(own, queries, 0.0).sum(axis=1, dtype=jnp.float32)
        mean_query /= jnp.maximum(jnp.minimum(lengths, window), 1)[:, None, None]
        grouped = mean_query.reshape(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim)

        rows = rows_of_blocks(cu_seqlens, -(-num_rows // self.unit), self.unit)
        filled = (rows < num_rows).sum(axis=-1)
        blocks = keys.at[rows].get(mode="fill", fill_value=0)
        mean_key = blocks.sum(axis=2, dtype=jnp.float32) / jnp.maximum(filled, 1)[..., None, None]
        scores = jnp.einsum("bkgd,bckd->bkgc", grouped, mean_key) * scale
        exists = filled > 0
        shares = jax.nn.softmax(jnp.where(exists[:, None, None], scores, -1e30), axis=-1).mean(axis=(1, 2))
        each = jnp.where(exists, shares / jnp.maximum(filled, 1), 0.0)
        spread = jnp.repeat(each, self.unit, axis=-1)[:, :num_rows]
        return jnp.where(jnp.arange(num_rows) < lengths[:, None], spread, 0.0)
