"""LazyLLM (arXiv 2407.14057): prompt tokens that the last one does not look at leave, more of them in deeper layers.

A token's importance in a layer is the last token's attention to it, mean over the heads. After some layers only the
most important tokens go on.

There is no code of the authors', and their layers and percentiles were not to be found, so these are ours: the layers
are UniPrefill's drop layers of the model, the share of the prompt that stays falls evenly from 0.9 to 0.4, prompts of
at most 256 tokens are left whole. Also ours: importance comes from the very layer after whose attention tokens leave;
the last token always stays. Not here: the auxiliary cache, from which the authors' decoding brings tokens back that the
prefill let go; decoding sees what the prefill kept.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.sparsify.methods.token_choice import TokenChoice
from uniprefill_jax.sparsify.methods.window_scores import map_window


@dataclass(frozen=True)
class LazyLLM(TokenChoice):
    """Attributes: those of `TokenChoice`."""

    name: ClassVar[str] = "lazyllm"
    unit: ClassVar[int] = 1
    sinks: ClassVar[int] = 0

    @property
    def window(self) -> int:
        """The last token."""
        return 1

    def worth(
        self,
        queries: Float[Array, "B n H d"],
        keys: Float[Array, "T KV d"],
        cu_seqlens: Int32[Array, " B+1"],
        scale: float,
    ) -> Float[Array, "B T"]:
        """The last token's attention."""

        def attention(probabilities: Float[Array, "G n T"], request: Int32[Array, ""]) -> Float[Array, " T"]:
            del request
            return probabilities.sum(axis=(0, 1))

        by_kv_head = map_window(attention, queries, keys, cu_seqlens, scale)
        return by_kv_head.sum(axis=1, dtype=jnp.float32) / queries.shape[2]
