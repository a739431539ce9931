"""What a method may do to a prefill: its roles, and the method that fills some of them."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.sparsify.methods.checks import check_integer
from uniprefill_jax.sparsify.methods.request_blocks import RequestBlocks, blocks_of_requests
from uniprefill_jax.sparsify.methods.token_choice import TokenChoice

DENSE = "dense"
NOWHERE = jnp.iinfo(jnp.int32).max


class Seen(NamedTuple):
    """The entries of a full attention that are computed, beside which every row sees its own block.

    blocks: by query head, for a block of queries the blocks of keys; `blocks_of_requests` numbers both.
    columns: by query head and request, rows (counted within the request, rising, `NOWHERE` at the end) that all later
        ones see, whatever the blocks say; None for no such rows.
    """

    blocks: Bool[Array, "H Q Q"]
    columns: Int32[Array, "H B C"] | None = None


def computed_share(seen: Seen, blocks: RequestBlocks) -> Float[Array, " B"]:
    """Share of each request's causal pairs of rows that are computed, mean over the heads; 0 without rows."""
    filled = blocks.filled.astype(jnp.float32)
    size, count = blocks.size, blocks.count
    pairs = jnp.where(jnp.eye(count, dtype=bool), filled * (filled + 1) / 2, filled[:, None] * filled[None, :])
    alone = jnp.zeros(())
    if seen.columns is not None:
        heads, requests, _ = seen.columns.shape
        block = jnp.where(seen.columns == NOWHERE, count, blocks.cu_blocks[:-1, None] + seen.columns // size)
        in_block = jnp.zeros((heads, count)).at[jnp.arange(heads)[:, None], block.reshape(heads, -1)]
        in_block = in_block.add(1.0, mode="drop")
        alone = jnp.where(blocks.causal, filled[:, None] * in_block[:, None, :], 0.0)
    of_row = jnp.where(seen.blocks, pairs, alone).sum(axis=-1).mean(axis=0)
    total = jax.ops.segment_sum(of_row, blocks.owner, num_segments=blocks.lengths.shape[0])
    lengths = blocks.lengths.astype(jnp.float32)
    return total / jnp.maximum(lengths * (lengths + 1) / 2, 1.0)


@dataclass(frozen=True)
class SparseAttention(ABC):
    """Role: which entries of a full-attention layer's scores are computed.

    Sliding-window and recurrent layers are left alone. So is the last layer, of which only each request's last row is
    needed: that row sees everything, which costs less than to find out what it might do without. Choices are made for
    every layer, request and query head on its own; heads that share a KV head choose apart.

    Attributes:
        dense_below: requests of at most so many rows in a layer see everything; see `dense_up_to`.
        block_size: rows of a block of queries and of a block of keys.
    """

    name: ClassVar[str]
    dense_below: int = 256
    block_size: int = 128

    def __post_init__(self) -> None:
        check_integer(self, "dense_below", 0)
        if self.block_size not in (64, 128):
            raise ConfigError(f"{self.name}: block_size is {self.block_size!r}; use 64 or 128")

    @property
    def dense_up_to(self) -> int:
        """Longest request that sees everything: `dense_below`, or more where the part's budget covers more."""
        return self.dense_below

    @abstractmethod
    def choose(
        self,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        blocks: RequestBlocks,
        scale: float,
    ) -> Seen:
        """What each head computes, from queries and keys after norms and rotary embedding; `scale` multiplies q . k.

        `blocks` says which rows are whose. What lies above the diagonal, or is of another request, does not count.
        """

    def seen(
        self,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        cu_seqlens: Int32[Array, " B+1"],
        scale: float,
    ) -> tuple[Seen, RequestBlocks]:
        """What each head computes, short requests whole; only blocks on or below the diagonal of a request are set."""
        with jax.named_scope("sparse_choice"):
            blocks = blocks_of_requests(cu_seqlens, queries.shape[0], self.block_size)
            choice = self.choose(queries, keys, blocks, scale)
            short = (blocks.lengths <= self.dense_up_to)[blocks.owner]
            always = short[:, None] | jnp.eye(blocks.count, dtype=bool)
            return choice._replace(blocks=(choice.blocks | always) & blocks.causal), blocks


@dataclass(frozen=True)
class CacheCompression(ABC):
    """Role: which rows of a full-attention layer's prompt cache decoding sees, after a prefill that saw them all.

    Of every request each KV head keeps equally many rows, the fewer of the request's and `most_rows`, so that what is
    kept lies packed like any prompt cache. Kept keys stay as they were turned, at their original positions.

    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """The capacity: most prompt rows of a request that a layer's cache holds. Shorter ones keep all."""

    @property
    @abstractmethod
    def observed(self) -> int:
        """Last queries of every request that `score` wants to see."""

    @abstractmethod
    def score(
        self,
        queries: Float[Array, "B n H d"],
        keys: Float[Array, "T KV d"],
        cu_seqlens: Int32[Array, " B+1"],
        scale: float,
    ) -> Float[Array, "T KV"]:
        """The worth of every cached row to every KV head; of each request the `most_rows` best stay."""


@dataclass(frozen=True)
class Method:
    """What is done to a prefill. Static: compiled programs are kept by it.

    Attributes:
        name: as users write it, and as results call it.
        dropping: where tokens leave, and which.
        tokens: which tokens leave there, instead of those that `dropping` says.
        attention: which entries of full attention are computed; None for all.
        compression: which cached rows decoding sees; None for all.
    """

    name: str = DENSE
    dropping: UniPrefillConfig = field(default_factory=UniPrefillConfig.dense)
    attention: SparseAttention | None = None
    compression: CacheCompression | None = None
    tokens: TokenChoice | None = None

    @classmethod
    def of(cls, setting: "UniPrefillConfig | Method") -> "Method":
        """The method that a setting of token dropping is; a method is itself."""
        if isinstance(setting, Method):
            return setting
        return cls(DENSE if setting.is_dense else "uniprefill", setting)

    @classmethod
    def parse(cls, text: str) -> "Method":
        """The method that a text such as `xattention:threshold=0.95` or `uniprefill:top_p=0.9+snapkv` names.

        Raises:
            InputError, ConfigError: an unknown name or field, a value that it cannot have, two parts of one role.
        """
        from uniprefill_jax.sparsify.methods.registry import parse_method  # it knows all methods, which know this file

        return parse_method(text)

    @property
    def is_dense(self) -> bool:
        """Whether nothing is left out."""
        return self.dropping.is_dense and self.attention is None and self.compression is None

    def for_length(self, length: int) -> "Method":
        """The method as it is for a prompt of `length` tokens; see `UniPrefillConfig.for_length`."""
        return replace(self, dropping=self.dropping.for_length(length))

    @property
    def definition(self) -> dict[str, Any]:
        """Everything that decides the results, in JSON's types."""
        present = [part for part in (self.tokens, self.attention, self.compression) if part is not None]
        # Through JSON and back tuples are lists.
        parts = {part.name: {field: listed(value) for field, value in asdict(part).items()} for part in present}
        dropping = {} if self.tokens is not None else {"dropping": self.dropping.definition}
        return {"method": self.name} | dropping | parts


def listed(value: Any) -> Any:
    """The value as JSON gives it back: a tuple is a list."""
    return list(value) if isinstance(value, tuple) else value
