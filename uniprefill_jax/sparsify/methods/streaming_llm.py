"""StreamingLLM (arXiv 2309.17453): decoding sees the first few tokens, the attention sinks, and the most recent ones.

Defaults are those of the authors' streaming demo: 4 sinks, 2000 recent tokens. The prefill is dense.

Where this reading is ours: the authors number the kept keys anew, from 0 on, so that a model can go on past the length
it was trained for; here prompts are within that length and keys keep their positions. What decoding adds is never
evicted.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.batch import request_of_row
from uniprefill_jax.sparsify.methods.checks import check_integer
from uniprefill_jax.sparsify.methods.protocol import CacheCompression


@dataclass(frozen=True)
class StreamingLLM(CacheCompression):
    """Attributes:
    sinks: first rows of a prompt that stay.
    recent: last rows of a prompt that stay.
    """

    name: ClassVar[str] = "streaming_llm"
    sinks: int = 4
    recent: int = 2000

    def __post_init__(self) -> None:
        check_integer(self, "sinks", 0)
        check_integer(self, "recent", 1)

    @property
    def most_rows(self) -> int:
        """Sinks and recent rows."""
        return self.sinks + self.recent

    @property
    def observed(self) -> int:
        """Queries decide nothing."""
        return 0

    def score(
        self,
        queries: Float[Array, "B n H d"],
        keys: Float[Array, "T KV d"],
        cu_seqlens: Int32[Array, " B+1"],
        scale: float,
    ) -> Float[Array, "T KV"]:
        """The later the better, but for the sinks, which are best."""
        del queries, scale
        rows = jnp.arange(keys.shape[0], dtype=jnp.int32)
        within = rows - cu_seqlens[jnp.minimum(request_of_row(cu_seqlens, rows), cu_seqlens.shape[0] - 2)]
        worth = jnp.where(within < self.sinks, jnp.inf, within.astype(jnp.float32))
        return jnp.broadcast_to(worth[:, None], keys.shape[:2])
