"""Role: how many tokens stay after a drop layer, and which; what LazyLLM and SlimInfer have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.parallel.shards import mean_over_shards, over_heads
from uniprefill_jax.sparsify.drop import Drop, DropInputs
from uniprefill_jax.sparsify.methods.checks import check_integer, check_share

# Shares are counted in thousandths, in integers, so that a share of a length is the same number everywhere.
THOUSANDTHS = 1000


@dataclass(frozen=True)
class TokenChoice(ABC):
    """After every drop layer the best tokens stay, a share of the prompt's that falls from layer to layer.

    Tokens leave as in UniPrefill, for good as far as the prefill goes, between the drop layer's attention and its
    feed-forward. The share falls evenly from `first_keep` after the first drop layer to `last_keep` after the last.

    Attributes:
        dense_below: requests of at most so many tokens lose none.
        drop_layers: full-attention layers after which tokens leave, or "auto", as of `UniPrefillConfig`.
        first_keep, last_keep: share of the prompt's tokens that stay after the first, and after the last, drop layer.
    """

    name: ClassVar[str]
    unit: ClassVar[int]  # neighbouring tokens that stay or leave together
    sinks: ClassVar[int]  # first tokens, which stay
    dense_below: int = 256
    drop_layers: Literal["auto"] | tuple[int, ...] = "auto"
    first_keep: float = 0.9
    last_keep: float = 0.4

    def __post_init__(self) -> None:
        check_integer(self, "dense_below", 0)
        check_share(self, "first_keep")
        check_share(self, "last_keep")
        if self.last_keep > self.first_keep:
            raise ConfigError(
                f"{self.name}: last_keep is {self.last_keep} and first_keep {self.first_keep}; use a last one that is "
                "not above the first, for tokens that left do not come back"
            )

    @property
    @abstractmethod
    def window(self) -> int:
        """Last tokens of a request, which choose and stay."""

    @property
    def dropping(self) -> UniPrefillConfig:
        """Where tokens leave, as the prefill reads it; its share of mass decides nothing."""
        return UniPrefillConfig(
            top_p=0.5, block_size=64, sink_tokens=0, window_tokens=self.window, drop_layers=self.drop_layers
        )

    @abstractmethod
    def worth(
        self,
        queries: Float[Array, "B n H d"],
        keys: Float[Array, "T KV d"],
        cu_seqlens: Int32[Array, " B+1"],
        scale: float,
    ) -> Float[Array, "B T"]:
        """Worth of every token, counted from each request's start, mean over these heads, summing to 1; 0 past the end.

        `queries` are the request's last `window` ones, right aligned; a shorter request has others' in front.
        """

    def shares(self, num_drops: int) -> np.ndarray:
        """Thousandths of the prompt that stay after each of so many drop layers."""
        falling = np.linspace(self.first_keep, self.last_keep, num_drops)
        return np.round(THOUSANDTHS * falling).astype(np.int32)

    def choose(
        self,
        inputs: DropInputs,
        prompt_lengths: Int32[Array, " B"],
        drop: Int32[Array, ""],
        *,
        num_drops: int,
        scale: float,
        num_blocks: int,
    ) -> Drop:
        """What stays after drop layer number `drop` of `num_drops`; ties go to the earlier token.

        The report's masses are shares of worth, its margin what the last to stay is worth more than the first to leave.
        """

        def on_shard(queries: Array, keys: Array, cu_seqlens: Array) -> Array:
            return mean_over_shards(self.worth(queries, keys, cu_seqlens, scale))

        with jax.named_scope("score"):
            heads = (inputs.queries, (inputs.keys,), inputs.cu_seqlens)
            worth = over_heads(on_shard, *heads, head_axis=2, out_specs=PartitionSpec())
        with jax.named_scope("select"):
            share = jnp.asarray(self.shares(num_drops))[drop]
            return self._cut(worth, inputs, prompt_lengths, share, num_blocks)

    def _cut(
        self,
        worth: Float[Array, "B T"],
        inputs: DropInputs,
        prompt_lengths: Int32[Array, " B"],
        share: Int32[Array, ""],
        num_blocks: int,
    ) -> Drop:
        cu_seqlens, num_rows = inputs.cu_seqlens, worth.shape[1]
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        places = jnp.arange(num_rows, dtype=jnp.int32)
        exists = places < lengths[:, None]
        forced = (places < self.sinks) | (places >= lengths[:, None] - self.window)
        forced |= (prompt_lengths <= self.dense_below)[:, None]
        by_unit = _sum_units(worth, self.unit)
        is_forced = _sum_units((forced & exists).astype(jnp.float32), self.unit) > 0
        is_there = _sum_units(exists.astype(jnp.float32), self.unit) > 0
        ranked = jnp.where(is_there, jnp.where(is_forced, jnp.inf, by_unit), -1.0)
        order = jnp.argsort(-ranked, axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1)
        units = (prompt_lengths + self.unit - 1) // self.unit
        count = jnp.maximum((units * share + THOUSANDTHS - 1) // THOUSANDTHS, is_forced.sum(axis=-1))
        kept_units = (rank < count[:, None]) & is_there
        kept = jnp.repeat(kept_units, self.unit, axis=-1)[:, :num_rows] & exists

        least = jnp.where(kept_units, ranked, jnp.inf).min(axis=-1)
        best_left = jnp.where(kept_units | ~is_there, -jnp.inf, ranked).max(axis=-1)
        margin = jnp.where(jnp.isfinite(least) & jnp.isfinite(best_left), least - best_left, 1.0)

        request = jnp.searchsorted(cu_seqlens[1:], places, side="right", method="compare_all")
        inside = jnp.minimum(request, lengths.shape[0] - 1)
        stays = kept[inside, jnp.maximum(places - cu_seqlens[inside], 0)] & (request < lengths.shape[0])
        ends = jnp.cumsum(kept.sum(axis=-1, dtype=jnp.int32), dtype=jnp.int32)
        by_block = _sum_units(worth, 64)[:, :num_blocks]
        return Drop(
            indices=jnp.nonzero(stays, size=num_rows, fill_value=num_rows)[0].astype(jnp.int32),
            cu_seqlens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
            token_scores=inputs.token_scores,
            block_mass=jnp.pad(by_block, ((0, 0), (0, num_blocks - by_block.shape[1]))),
            cut_margin=margin,
            discarded_mass=jnp.where(kept, 0.0, worth).sum(axis=-1),
        )


def _sum_units(values: Float[Array, "B T"], unit: int) -> Float[Array, "B units"]:
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % unit)))
    return padded.reshape(values.shape[0], -1, unit).sum(axis=-1)
