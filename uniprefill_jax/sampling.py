"""Drawing tokens from logits: greedy, or temperature with top-k and top-p.

What kind of rule it is decides the program; its numbers are traced, so another seed or temperature compiles nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from uniprefill_jax.config import SamplingConfig

# Alternatives reported beside a drawn token, whatever number was asked for: one program serves every number.
MAX_LOGPROBS = 20


class SamplingKind(NamedTuple):
    """The static side of a setting: greedy or not, and whether top-k or top-p restrict the draw."""

    greedy: bool
    restricted: bool

    @classmethod
    def of(cls, config: SamplingConfig) -> "SamplingKind":
        """The kind of a setting."""
        greedy = config.temperature == 0.0
        # The likeliest token stays whatever else is left out.
        return cls(greedy, not greedy and (config.top_k > 0 or config.top_p < 1.0))


class SamplingNumbers(NamedTuple):
    """The traced side of a setting."""

    temperature: Float[Array, ""]
    top_k: Int32[Array, ""]
    top_p: Float[Array, ""]
    seed: UInt32[Array, ""]

    @classmethod
    def of(cls, config: SamplingConfig) -> "SamplingNumbers":
        """The numbers of a setting."""
        return cls(
            jnp.asarray(config.temperature, jnp.float32),
            jnp.asarray(config.top_k, jnp.int32),
            jnp.asarray(config.top_p, jnp.float32),
            jnp.asarray(config.seed, jnp.uint32),
        )


class TokenLogprobs(NamedTuple):
    """How likely drawn tokens were, and what else was likely: natural logarithms, before temperature and restriction.

    Attributes:
        drawn: of the tokens drawn.
        likeliest: ids of the likeliest tokens, falling.
        values: of these.
    """

    drawn: Float[Array, " B"]
    likeliest: Int32[Array, "B k"]
    values: Float[Array, "B k"]


class Drawn(NamedTuple):
    """Drawn tokens, with their log-probabilities where anybody asked for them."""

    tokens: Int32[Array, " B"]
    logprobs: TokenLogprobs | None


def token_logprobs(logits: Float[Array, "B vocab"], tokens: Int32[Array, " B"]) -> TokenLogprobs:
    """Log-probabilities of `tokens` and of the `MAX_LOGPROBS` likeliest ones, in float32."""
    with jax.named_scope("token_logprobs"):
        values = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        drawn = jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
        best, ids = jax.lax.top_k(values, min(MAX_LOGPROBS, values.shape[-1]))
        return TokenLogprobs(drawn, ids.astype(jnp.int32), best)


def sample(
    logits: Float[Array, "B vocab"], kind: SamplingKind, numbers: SamplingNumbers, step: Int32[Array, ""]
) -> Int32[Array, " B"]:
    """One token per request. Draws depend on the seed and the step only, not on what else is in the batch."""
    if kind.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(numbers.seed), step)
    logits = logits / numbers.temperature
    if kind.restricted:
        logits = _restrict(logits, numbers)
    noise = jax.random.gumbel(key, logits.shape[-1:], jnp.float32)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def _restrict(logits: Float[Array, "B vocab"], numbers: SamplingNumbers) -> Float[Array, "B vocab"]:
    """Logits with everything outside top-k and top-p at minus infinity; the likeliest token always stays."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    stays = (numbers.top_k == 0) | (rank < numbers.top_k)
    probabilities = jax.nn.softmax(jnp.where(stays, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    stays = stays & ((numbers.top_p >= 1.0) | (before < numbers.top_p)) | (rank == 0)
    requests = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(stays.shape, bool).at[requests, order].set(stays)
    return jnp.where(kept, logits, -jnp.inf)
