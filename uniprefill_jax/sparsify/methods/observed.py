"""What a method wants to know of full-attention layers after them, kept beside the caches while layers run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.sparsify.methods.protocol import CacheCompression, SparseAttention

OBSERVED = "observed"  # beside the kinds of layers in a prefill's caches


class Observed(NamedTuple):
    """What was seen of full-attention layers: last queries, and how much was computed; None where nobody asks."""

    queries: Float[Array, "full_layers B n H d"] | None
    computed: Float[Array, "full_layers B"] | None


def nothing_observed(
    model: ModelConfig,
    num_requests: int,
    dtype: jnp.dtype,
    attention: SparseAttention | None,
    compression: CacheCompression | None,
) -> Observed:
    """Room for what these parts of a method ask for, in all full-attention layers."""
    full, queries = len(model.full_attention_layers), None
    if compression is not None:
        queries = jnp.zeros((full, num_requests, compression.observed, model.num_heads, model.head_dim), dtype)
    computed = None if attention is None else jnp.ones((full, num_requests), jnp.float32)
    return Observed(queries, computed)


def observe(seen: Observed, new: Observed, at: Int32[Array, ""]) -> Observed:
    """What was seen so far with that of full-attention layer number `at` written into it; None is left out.

    Leaves of `new` have no axis for the layers.
    """
    written = [
        old if own is None or old is None else jax.lax.dynamic_update_index_in_dim(old, own.astype(old.dtype), at, 0)
        for old, own in zip(seen, new, strict=True)
    ]
    return Observed(*written)
