"""Ragged batches: requests packed along one token axis, and what the token mixers need to know about them.

Row i of the packed axis sees rows [row_start[i], i]: the start of its request, or of its sliding window. That one
integer per row covers causal order, request boundaries and windows, before and after tokens were dropped, because kept
rows stay in order of position.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.causal_attention import AttentionBackend
from uniprefill_jax.models.config import ModelConfig, RopeConfig
from uniprefill_jax.models.rope import rope_table
from uniprefill_jax.sparsify.methods.protocol import SparseAttention

WindowMeaning = Literal["position", "kept"]


@struct.dataclass
class PackedRows:
    """The rows that take part in a segment.

    Attributes:
        positions: original position of every row in its prompt.
        cu_seqlens: request r owns rows [cu_seqlens[r], cu_seqlens[r + 1]); rows past the last are padding.
        request: request of every row; the number of requests for padding.
        row_starts: first visible row, for every window in `rules`.
        rope_tables: cosines and sines, for every rotary configuration in `rules`.
        rules: what the model needs computed.
    """

    positions: Int32[Array, " T"]
    cu_seqlens: Int32[Array, " B+1"]
    request: Int32[Array, " T"]
    row_starts: tuple[Int32[Array, " T"], ...]
    rope_tables: tuple[tuple[Float[Array, "T half"], Float[Array, "T half"]], ...]
    rules: "PackingRules" = struct.field(pytree_node=False)

    @property
    def num_requests(self) -> int:
        """Number of request slots, empty ones included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def count(self) -> Int32[Array, ""]:
        """Number of real rows; padding follows them."""
        return self.cu_seqlens[-1]

    @property
    def kernel_count(self) -> Int32[Array, ""] | None:
        """`count` where row-wise products may skip padding (see `projection.project`), else None."""
        return self.count if self.rules.skip_padding else None

    def first(self, length: int) -> "PackedRows":
        """The first `length` rows, among them every real one."""
        positions, request, row_starts, rope_tables = jax.tree.map(
            lambda array: array[:length], (self.positions, self.request, self.row_starts, self.rope_tables)
        )
        return replace(self, positions=positions, request=request, row_starts=row_starts, rope_tables=rope_tables)

    def map_rows(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Apply a function of rows to (pytrees of) packed arrays, chunk by chunk over the real rows; the rest is zero.

        With one chunk the function sees all rows at once. Otherwise the number of chunks follows the device's row
        count: padding costs nothing, and intermediate results are as small as a chunk.
        """
        num_rows, chunk = self.positions.shape[0], self.rules.row_chunk
        if chunk is None or num_rows <= chunk:
            return function(*arrays)
        chunk = math.gcd(num_rows, chunk)

        def cut(start: Array | int) -> Any:
            return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, chunk), arrays)

        def step(number: Array, outputs: Any) -> Any:
            new = function(*cut(number * chunk))
            return jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, number * chunk, axis=0),
                outputs,
                new,
            )

        shapes = jax.eval_shape(function, *cut(0))
        empty = jax.tree.map(lambda shape: jnp.zeros((num_rows, *shape.shape[1:]), shape.dtype), shapes)
        return jax.lax.fori_loop(0, (self.count + chunk - 1) // chunk, step, empty)

    def row_start(self, window: int | None) -> Int32[Array, " T"]:
        """First row that each row sees under a window (None: its whole request)."""
        return self.row_starts[self.rules.windows.index(window)]

    def rope(self, rope: RopeConfig) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
        """Cosines and sines of the rows' positions."""
        return self.rope_tables[self.rules.ropes.index(rope)]


class Execution(NamedTuple):
    """Who computes the heavy parts: see the attributes of these names in `PackingRules`."""

    full_attention: AttentionBackend
    sliding_attention: AttentionBackend
    skip_padding: bool


@dataclass(frozen=True)
class PackingRules:
    """What a model and a setting need computed for every packed batch.

    Attributes:
        windows: distinct windows; None, the whole request, is always among them.
        ropes: distinct rotary configurations.
        window_meaning: whether windows count original positions or kept tokens.
        row_chunk: most rows that row-wise work handles at a time; None for all at once.
        full_attention: backend of full causal attention.
        sliding_attention: backend of sliding windows.
        skip_padding: whether products run on kernels that leave out padding rows and read weights where they lie.
        sparse: which entries of full attention are computed; None for all.
    """

    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    window_meaning: WindowMeaning
    row_chunk: int | None
    full_attention: AttentionBackend
    sliding_attention: AttentionBackend = "xla"
    skip_padding: bool = False
    sparse: SparseAttention | None = None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        window_meaning: WindowMeaning,
        row_chunk: int | None,
        execution: "Execution",
        sparse: SparseAttention | None = None,
    ) -> "PackingRules":
        """The distinct windows and rotary configurations of a model."""
        attention = [layer for layer in config.layers if layer.mixer != "linear"]
        windows = dict.fromkeys([None, *(layer.window for layer in attention)])
        ropes = dict.fromkeys(layer.rope for layer in attention if layer.rope is not None)
        return cls(tuple(windows), tuple(ropes), window_meaning, row_chunk, *execution, sparse)


def pack_rows(positions: Int32[Array, " T"], cu_seqlens: Int32[Array, " B+1"], rules: PackingRules) -> PackedRows:
    """Work out requests, visible ranges and rotary tables of packed rows."""
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
    request = request_of_row(cu_seqlens, rows)
    padding = rows >= cu_seqlens[-1]
    start = jnp.where(padding, rows, cu_seqlens[request])
    row_starts = []
    for window in rules.windows:
        if window is None:
            row_starts.append(start)
        elif rules.window_meaning == "kept":
            row_starts.append(jnp.maximum(start, rows - window + 1))
        else:
            first = _first_row_at(positions, start, rows, positions - window + 1)
            row_starts.append(jnp.where(padding, rows, first))
    rope_tables = tuple(rope_table(rope, positions) for rope in rules.ropes)
    return PackedRows(positions, cu_seqlens, request, tuple(row_starts), rope_tables, rules)


def request_of_row(cu_seqlens: Int32[Array, " B+1"], rows: Int32[Array, " T"]) -> Int32[Array, " T"]:
    """The request that owns each row; the number of requests for padding rows."""
    return jnp.searchsorted(cu_seqlens[1:], rows, side="right", method="compare_all").astype(jnp.int32)


def last_rows(cu_seqlens: Int32[Array, " B+1"], count: int) -> Int32[Array, "B count"]:
    """Row numbers of each request's last `count` rows, right aligned; clipped to 0 where a request is shorter."""
    rows = cu_seqlens[1:, None] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.maximum(rows, 0)


def _first_row_at(
    positions: Int32[Array, " T"],
    low: Int32[Array, " T"],
    high: Int32[Array, " T"],
    wanted: Int32[Array, " T"],
) -> Int32[Array, " T"]:
    """For each row, the first index in [low, high] whose position is at least `wanted` (positions rise there)."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        enough = positions[middle] >= wanted
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    steps = max(1, positions.shape[0]).bit_length()
    low, _ = jax.lax.fori_loop(0, steps, halve, (low, high))
    return jnp.minimum(low, high)
