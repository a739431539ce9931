"""Drawing tokens from logits: greedy, or temperature with top-k and top-p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.config import SamplingConfig


def sample(logits: Float[Array, "B vocab"], config: SamplingConfig, step: Int32[Array, ""]) -> Int32[Array, " B"]:
    """One token per request. Draws depend on the seed and the step only, not on what else is in the batch."""
    if config.temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    allowed = _restrict(logits / config.temperature, config)
    noise = jax.random.gumbel(key, logits.shape[-1:], jnp.float32)
    return jnp.argmax(allowed + noise, axis=-1).astype(jnp.int32)


def _restrict(logits: Float[Array, "B vocab"], config: SamplingConfig) -> Float[Array, "B vocab"]:
    """Logits with everything outside top-k and top-p at minus infinity; the likeliest token always stays."""
    if config.top_k == 0 and config.top_p >= 1.0:
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    stays = jnp.ones(ordered.shape, bool)
    if config.top_k:
        stays &= rank < config.top_k
    if config.top_p < 1.0:
        probabilities = jax.nn.softmax(jnp.where(stays, ordered, -jnp.inf), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        stays &= before < config.top_p
    stays = stays.at[:, 0].set(True)
    requests = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(stays.shape, bool).at[requests, order].set(stays)
    return jnp.where(kept, logits, -jnp.inf)
