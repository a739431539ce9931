"""The static side of a prefill: which program a batch of prompts runs, and what it costs by the cost model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.execution import LengthsBy, choose_execution
from uniprefill_jax.models.batch import Execution
from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.sparsify.buckets import length_ladder, prompt_bucket, request_bucket
from uniprefill_jax.sparsify.cost import prefill_flops
from uniprefill_jax.sparsify.drop_layers import segments_of_layers
from uniprefill_jax.sparsify.methods.protocol import CacheCompression, Method, SparseAttention
from uniprefill_jax.sparsify.methods.token_choice import TokenChoice
from uniprefill_jax.sparsify.traffic import prefill_bytes

# Larger chunks multiply faster; smaller ones waste fewer rows at the end of every segment, of which dense has one.
CPU_ROW_CHUNK = 256
CPU_DENSE_ROW_CHUNK = 512


@dataclass(frozen=True)
class PrefillPlan:
    """The static side of a prefill: one compiled program per plan.

    Attributes:
        model: the model's shape.
        config: the setting; `top_p` is traced and ignored here, of `score_memory` only whether there is any counts.
        drop_layers: resolved drop layers, rising; () is dense.
        num_rows: rows of the packed batch (a prompt bucket).
        num_requests: request slots.
        max_length: longest request that fits, which bounds the number of blocks.
        ladder: lengths, rising up to num_rows, at which the segments after a drop can run.
        row_chunk: most rows that row-wise work handles at a time (None: all).
        execution: who computes attention and products.
        attention: which entries of full attention are computed; None for all.
        compression: which cached rows decoding sees; None for all.
        tokens: which tokens leave at the drop layers, instead of those that the setting says.
    """

    model: ModelConfig
    config: UniPrefillConfig
    drop_layers: tuple[int, ...]
    num_rows: int
    num_requests: int
    max_length: int
    ladder: tuple[int, ...]
    row_chunk: int | None
    execution: Execution
    attention: SparseAttention | None = None
    compression: CacheCompression | None = None
    tokens: TokenChoice | None = None

    @classmethod
    def for_batch(
        cls,
        model: ModelConfig,
        setting: UniPrefillConfig | Method,
        drop_layers: tuple[int, ...],
        lengths: Sequence[int],
        dtype: jnp.dtype,
        lengths_by: LengthsBy = "auto",
        on_mesh: bool = False,
        platform: str | None = None,
    ) -> "PrefillPlan":
        """The plan of a batch of prompts of these lengths on `platform` ("cpu", "gpu", "tpu"; default: where jax runs).

        `lengths_by` says how the work follows the number of rows that drops leave: "loops" of chunks, a "ladder" of
        static lengths, or "kernels" that leave out padding rows. "auto" is loops on CPUs, kernels for bfloat16 on one
        Hopper GPU where they take the model's shape, and the ladder elsewhere (`on_mesh`: also there).

        Raises:
            ConfigError: prompts of these lengths have different block sizes; they cannot share a program.
        """
        longest = max(lengths)
        method = Method.of(setting).for_length(longest)
        sizes = {Method.of(setting).for_length(length).dropping.block_size for length in lengths}
        if len(sizes) > 1:
            raise ConfigError(
                f"prompts of {min(lengths):,} to {longest:,} tokens have blocks of {sorted(sizes)} tokens "
                "(most_blocks); plan those of one size together"
            )
        attention, compression, tokens = method.attention, method.compression, method.tokens
        # Where no prompt is long enough for a part to do anything the program is that without it.
        if tokens is not None and longest <= tokens.dense_below:
            drop_layers, tokens = (), None
        num_rows, num_requests = prompt_bucket(sum(lengths)), request_bucket(len(lengths))
        lengths_by, execution = choose_execution(model, dtype, num_requests, lengths_by, on_mesh, platform)
        return cls(
            model=model,
            config=method.dropping,
            drop_layers=drop_layers,
            num_rows=num_rows,
            num_requests=num_requests,
            max_length=min(prompt_bucket(longest), num_rows),
            ladder=length_ladder(num_rows) if lengths_by == "ladder" else (num_rows,),
            row_chunk=(CPU_ROW_CHUNK if drop_layers else CPU_DENSE_ROW_CHUNK) if lengths_by == "loops" else None,
            execution=execution,
            attention=None if attention is None or longest <= attention.dense_up_to else attention,
            compression=None if compression is None or longest <= compression.most_rows else compression,
            tokens=tokens,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest request that fits."""
        return -(-self.max_length // self.config.block_size)

    @property
    def segment_of_layer(self) -> tuple[int, ...]:
        """Which segment's rows enter each layer; see `segments_of_layers`."""
        return segments_of_layers(self.model, self.config, self.drop_layers)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers that may leave entries of full attention out: the last layer does not."""
        full = self.model.full_attention_layers
        return () if self.attention is None else tuple(layer for layer in full if layer < self.model.num_layers - 1)

    def computed_by_layer(
        self, computed: Float[Array, "sparse_layers B"] | np.ndarray | None, request: int
    ) -> dict[int, float]:
        """A request's part of an output's `computed`, by layer; empty without any."""
        return {} if computed is None else dict(zip(self.sparse_layers, map(float, computed[:, request]), strict=True))

    def flops(self, positions: Sequence[np.ndarray], computed: Mapping[int, float] | None = None) -> float:
        """Operations of one request by the cost model, from the original positions of its tokens in every segment, and
        the share of full attention that layers computed."""
        return sum(self.flops_by_step(positions, computed).values())

    def flops_by_step(
        self, positions: Sequence[np.ndarray], computed: Mapping[int, float] | None = None
    ) -> dict[str, float]:
        """`flops`, by the names that the steps have in a trace."""
        window = min(self.config.window_tokens, len(positions[0]))
        return prefill_flops(
            self.model,
            [positions[segment] for segment in self.segment_of_layer],
            [len(positions[segment]) for segment in self._segment_of_feed_forward[:-1]] + [1],
            window_meaning=self.config.sliding_window,
            scoring=[(window, len(positions[self.segment_of_layer[layer]])) for layer in self.drop_layers],
            computed=computed,
        )

    def bytes_by_step(self, requests: Sequence[Sequence[np.ndarray]], itemsize: int) -> dict[str, float]:
        """The least bytes that a batch moves, from the positions of every request's tokens in every segment.

        `itemsize` is that of weights and activations; the steps are named as in `flops_by_step`.
        """
        tokens = [sum(map(len, segment)) for segment in zip(*requests, strict=True)]
        window = sum(min(self.config.window_tokens, len(positions[0])) for positions in requests)
        return prefill_bytes(
            self.model,
            itemsize,
            [tokens[segment] for segment in self.segment_of_layer],
            [tokens[segment] for segment in self._segment_of_feed_forward[:-1]] + [len(requests)],
            len(requests),
            scoring=[(window, tokens[self.segment_of_layer[layer]]) for layer in self.drop_layers],
            compacted=tokens[1:],
        )

    @property
    def _segment_of_feed_forward(self) -> list[int]:
        """Which segment's rows enter each layer's feed-forward, which follows the layer's own drop; of the last layer's
        only one row per request does.
        """
        return [sum(drop <= layer for drop in self.drop_layers) for layer in range(self.model.num_layers)]

    def dense_flops(self, positions: np.ndarray) -> float:
        """Operations of one request if no token is dropped."""
        return replace(self, drop_layers=()).flops([positions])
