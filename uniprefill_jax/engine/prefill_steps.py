"""The device's side of a stepped prefill: the pieces that the executor compiles (notes: algorithm, "Chunked prefill").

Rows of the prompt wait in a buffer between stages. A chunk is loaded from it, run through a stage against the pages of
the stage's layers, and stored back; when a stage is through, the drop scores, selects and compacts the buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.chunk_attention import ChunkRows, chunk_attention
from uniprefill_jax.cache.pools import CachePools, attention_layers, linear_layers
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.engine.stages import StageProgram
from uniprefill_jax.models.attention import Attention
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.gated_delta_net import RecurrentCache
from uniprefill_jax.models.layer_loop import index_table, loop_layers
from uniprefill_jax.models.rope import rope_table
from uniprefill_jax.parallel.mesh import TENSOR
from uniprefill_jax.parallel.shards import per_shard
from uniprefill_jax.sparsify.drop import DropInputs, choose_tokens, compact

# Position of rows that hold no token: behind all that do, so that positions always rise.
NOWHERE = jnp.iinfo(jnp.int32).max


@struct.dataclass
class RowBuffer:
    """A prompt between stages: hidden states, original positions, and block scores for the memory of later drops."""

    x: Float[Array, "R D"]
    positions: Int32[Array, " R"]
    token_scores: Float[Array, " R"]


@struct.dataclass
class Chunk:
    """Rows on their way through a stage.

    Attributes:
        x: hidden states; zero in padding rows.
        positions: original positions.
        rows: row numbers in the stage.
        first_visible: for every distinct window of the model, the first row that each row sees.
        count: real rows; the rest is padding.
    """

    x: Float[Array, "C D"]
    positions: Int32[Array, " C"]
    rows: Int32[Array, " C"]
    first_visible: tuple[Int32[Array, " C"], ...]
    count: Int32[Array, ""]

    @property
    def real(self) -> Bool[Array, " C"]:
        """Which rows are not padding."""
        return jnp.arange(self.rows.shape[0]) < self.count

    @property
    def chunk_rows(self) -> ChunkRows:
        """All of it are one request's."""
        return ChunkRows(jnp.zeros(1, jnp.int32), self.count[None], self.rows[:1])


class DropOutcome(NamedTuple):
    """What a drop leaves: the compacted rows, where they were, and what the host wants to know."""

    kept: RowBuffer
    indices: Int32[Array, " R"]
    token_scores: Float[Array, " R"]
    count: Int32[Array, ""]
    cut_margin: Float[Array, ""]


@dataclass(frozen=True)
class LayerPlaces:
    """Where a model's layers lie in stacks and pools."""

    model: ModelConfig

    @property
    def kinds(self) -> list[str]:
        """Kind of every layer."""
        return [layer.kind for layer in self.model.layers]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Distinct windows; None, everything, is the first."""
        return tuple(dict.fromkeys([None, *(layer.window for layer in self.model.layers)]))

    def spec(self, kind: str) -> LayerSpec:
        """What all layers of a kind have in common."""
        return self.model.layers[self.kinds.index(kind)]

    def in_stack(self) -> Int32[Array, " layers"]:
        """For every layer, its index among those of its kind."""
        return index_table(self.kinds)

    def in_pool(self) -> Int32[Array, " layers"]:
        """For every layer, its number among attention layers, or among linear layers."""
        places = {layer: place for place, layer in enumerate(attention_layers(self.model))}
        places |= {layer: place for place, layer in enumerate(linear_layers(self.model))}
        return jnp.asarray([places[layer] for layer in range(self.model.num_layers)], jnp.int32)


def start_rows(model: CausalLM, tokens: Int32[Array, " R"], length: Int32[Array, ""]) -> RowBuffer:
    """Embeddings of a prompt, padded to the buffer."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    real = rows < length
    x = jnp.where(real[:, None], model.embed(tokens), 0)
    return RowBuffer(x, jnp.where(real, rows, NOWHERE), jnp.zeros(tokens.shape[0], jnp.float32))


def load_chunk(
    buffer: RowBuffer,
    start: Int32[Array, ""],
    count: Int32[Array, ""],
    *,
    size: int,
    windows: tuple[int | None, ...],
    window_meaning: Literal["position", "kept"],
) -> Chunk:
    """Rows [start, start + count) of a buffer."""
    offsets = jnp.arange(size, dtype=jnp.int32)
    rows = start + offsets
    # Padding reads past the end of any buffer: it gets zeros, not whatever follows.
    wanted = jnp.where(offsets < count, rows, NOWHERE)
    x = buffer.x.at[wanted].get(mode="fill", fill_value=0)
    positions = buffer.positions.at[wanted].get(mode="fill", fill_value=0)
    first_visible = []
    for window in windows:
        if window is None:
            first_visible.append(jnp.zeros_like(rows))
        elif window_meaning == "kept":
            first_visible.append(jnp.maximum(rows - window + 1, 0))
        else:
            first = jnp.searchsorted(buffer.positions, positions - window + 1, side="left")
            first_visible.append(first.astype(jnp.int32))
    return Chunk(x, positions, rows, tuple(first_visible), count)


def store_chunk(buffered: Float[Array, "R D"], x: Float[Array, "C D"], chunk: Chunk) -> Float[Array, "R D"]:
    """Put a chunk's new hidden states back among the buffer's; padding goes nowhere."""
    wanted = jnp.where(chunk.real, chunk.rows, NOWHERE)
    return buffered.at[wanted].set(x, mode="drop")


def run_stage(
    program: StageProgram,
    model: CausalLM,
    pools: CachePools,
    chunk: Chunk,
    page_tables: Int32[Array, "attention_layers max_pages"],
    slot: Int32[Array, ""],
    window_queries: Float[Array, "n H d"],
    layers: Int32[Array, "3"],
) -> tuple[Float[Array, "C D"], CachePools, Float[Array, "n H d"]]:
    """One chunk through one stage: new hidden states, pools, and the last n queries of the stage's last mixer so far.

    `slot` is the request's recurrent slot. `layers` holds the layer of the first feed-forward, the first whole layer
    and the layer of the last mixer; those that the program lacks are ignored.
    """
    places = LayerPlaces(model.config)
    in_stack, in_pool = places.in_stack(), places.in_pool()
    windows = places.windows
    ropes = {
        layer.rope: rope_table(layer.rope, chunk.positions) for layer in model.config.layers if layer.rope is not None
    }

    def mix(kind: str, layer: Array | int, x: Array, pools: CachePools) -> tuple[Array, CachePools, Array | None]:
        spec, module = places.spec(kind), model.layer(kind, in_stack[layer])
        mixer, place = module.mixer, in_pool[layer]
        if isinstance(mixer, Attention):
            assert spec.rope is not None
            first = chunk.first_visible[windows.index(spec.window)]
            rope, scale, table = ropes[spec.rope], mixer.scale, page_tables[place]

            def attention(
                queries: Array, keys: Array, values: Array, table: Array, first: Array, *rows: Array
            ) -> Array:
                return chunk_attention(queries, keys, values, table[None], first, ChunkRows(*rows), scale=scale)

            def attend(queries: Array, keys: Array, values: Array) -> tuple[Array, tuple[CachePools, Array]]:
                places = RowPlaces(table, chunk.rows, chunk.real)
                ranges = (first, *chunk.chunk_rows)
                output, written = write_and_attend(attention, pools, (queries, keys, values), places, *ranges)
                return output, (written, queries)

            attended = partial(mixer.attend_with, rope=rope, attend=attend, count=chunk.count)
            x, (pools, queries) = module.mix_with(x, attended, chunk.count)
            return x, pools, queries
        cache = _state_before(pools, place, slot, chunk.rows[0] == 0)
        x, cache = module.mix_with(x, lambda x: mixer.extend(x, cache, chunk.count), chunk.count)
        return x, _write_state(pools, place, slot[None], cache), None

    def whole(kind: str, layer: Array | int, carry: tuple[Array, CachePools]) -> tuple[Array, CachePools]:
        x, pools = carry
        x, pools, _ = mix(kind, layer, x, pools)
        return model.layer(kind, in_stack[layer]).transform(x, chunk.count), pools

    x = chunk.x
    if program.feed_forward is not None:
        x = model.layer(program.feed_forward, in_stack[layers[0]]).transform(x, chunk.count)
    x, pools = loop_layers(program.middle, layers[1], whole, (x, pools))
    if program.last is not None:
        x, pools, queries = mix(program.last, layers[2], x, pools)
        if queries is not None and window_queries.shape[0]:
            # The last n of (those before, this chunk's real ones).
            joined = jnp.concatenate([window_queries, queries.astype(window_queries.dtype)])
            window_queries = jax.lax.dynamic_slice_in_dim(joined, chunk.count, window_queries.shape[0])
    return x, pools, window_queries


def drop_rows(
    config: UniPrefillConfig,
    model: ModelConfig,
    pools: CachePools,
    page_table: Int32[Array, " max_pages"],
    buffer: RowBuffer,
    window_queries: Float[Array, "n H d"],
    length: Int32[Array, ""],
    top_p: Float[Array, ""],
    memory: Float[Array, ""],
) -> DropOutcome:
    """One drop: `length` rows of the buffer are scored by their last queries, and those that stay move to its front."""
    num_rows, page = buffer.positions.shape[0], pools.keys.shape[2]
    keys = pools.keys.at[page_table[: num_rows // page]].get(mode="fill", fill_value=0)
    keys = keys.swapaxes(1, 2).reshape(-1, keys.shape[1], keys.shape[3])
    if keys.shape[0] < num_rows:
        keys = jnp.pad(keys, ((0, num_rows - keys.shape[0]), (0, 0), (0, 0)))
    drop = choose_tokens(
        DropInputs(window_queries[None], keys, jnp.stack([jnp.zeros_like(length), length]), buffer.token_scores),
        config,
        top_p=top_p,
        memory=memory,
        scale=model.attention_scale,
        num_blocks=-(-num_rows // config.block_size),
    )
    x, positions, token_scores = compact((buffer.x, buffer.positions, drop.token_scores), drop)
    count = drop.cu_seqlens[-1]
    positions = jnp.where(jnp.arange(num_rows) < count, positions, NOWHERE)
    return DropOutcome(
        RowBuffer(x, positions, token_scores), drop.indices, drop.token_scores, count, drop.cut_margin[0]
    )


def put_back(full: Float[Array, "R D"], kept: Float[Array, "R D"], indices: Int32[Array, " R"]) -> Float[Array, "R D"]:
    """All rows again (carry mode): those that were kept as they are now, the others as they were left."""
    return full.at[indices].set(kept, mode="drop")


class RowPlaces(NamedTuple):
    """Where new rows go: rows of one request, or (a table per row) of one request each; those not real go nowhere."""

    page_table: Int32[Array, " max_pages"] | Int32[Array, "T max_pages"]
    rows: Int32[Array, " T"]
    real: Bool[Array, " T"]

    def write(self, pages: Float[Array, "P heads page d"], new: Float[Array, "T heads d"]) -> Array:
        """The pages with the new rows in them."""
        num_pages, heads, page, head_dim = pages.shape
        column = jnp.where(self.real, self.rows // page, NOWHERE)
        if self.page_table.ndim == 1:
            ids = self.page_table.at[column].get(mode="fill", fill_value=num_pages)
        else:
            ids = self.page_table.at[jnp.arange(self.rows.shape[0]), column].get(mode="fill", fill_value=num_pages)
        places = (ids[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)) * page + (self.rows % page)[:, None]
        places = jnp.where((ids < num_pages)[:, None], places, NOWHERE).reshape(-1)
        # By rows of one key head: a TPU would keep the pool in another order for updates that span the heads of a row,
        # and copy all of it to and fro in every layer.
        updates = new.astype(pages.dtype).reshape(-1, head_dim)
        return pages.reshape(-1, head_dim).at[places].set(updates, mode="drop").reshape(pages.shape)


def write_and_attend(
    attention: Callable[..., Float[Array, "T H d"]],
    pools: CachePools,
    projected: tuple[Float[Array, "T H d"], Float[Array, "T KV d"], Float[Array, "T KV d"]],
    places: RowPlaces,
    *ranges: Int32[Array, "..."],
) -> tuple[Float[Array, "T H d"], CachePools]:
    """Write keys and values into their pages, then `attention(queries, keys, values, page_table, *ranges)` over these.

    `projected` are queries, keys and values of the new rows. On a mesh every shard does it with its own heads.
    """
    queries, keys, values = projected
    # Where shards outnumber KV heads the pages hold each head several times (see `held_kv_heads`).
    copies = pools.keys.shape[1] // keys.shape[1]
    if copies > 1:
        keys, values = (jnp.repeat(array, copies, axis=1) for array in (keys, values))

    def on_shard(queries: Array, keys: Array, values: Array, key_pages: Array, value_pages: Array, *rest: Any) -> Any:
        places, ranges = RowPlaces(*rest[:3]), rest[3:]
        key_pages, value_pages = places.write(key_pages, keys), places.write(value_pages, values)
        return attention(queries, key_pages, value_pages, places.page_table, *ranges), key_pages, value_pages

    cut, whole = PartitionSpec(None, TENSOR), PartitionSpec()
    specs = (*(cut,) * 5, *(whole,) * (len(places) + len(ranges)))
    shards = per_shard(on_shard, specs, (cut, cut, cut))
    output, key_pages, value_pages = shards(queries, keys, values, pools.keys, pools.values, *places, *ranges)
    return output, replace(pools, keys=key_pages, values=value_pages)


def last_positions(
    tails: Int32[Array, "window_layers window"],
    buffer: RowBuffer,
    length: Int32[Array, ""],
    in_segment: Bool[Array, " window_layers"],
) -> Int32[Array, "window_layers window"]:
    """Note the positions of a segment's last rows for its windowed layers, right aligned: decoding may see them."""
    window = tails.shape[1]
    rows = length - window + jnp.arange(window, dtype=jnp.int32)
    absent = jnp.iinfo(jnp.int32).min
    found = buffer.positions.at[jnp.where(rows >= 0, rows, NOWHERE)].get(mode="fill", fill_value=absent)
    return jnp.where(in_segment[:, None], found, tails)


def _state_before(pools: CachePools, place: Array, slot: Array, is_first: Array) -> RecurrentCache:
    """A request's state in one layer; empty before its first chunk, whatever the slot held."""
    conv, recurrent = pools.conv[place, slot], pools.recurrent[place, slot]
    return RecurrentCache(jnp.where(is_first, 0, conv)[None], jnp.where(is_first, 0, recurrent)[None])


def _write_state(pools: CachePools, place: Array, slots: Array, cache: RecurrentCache) -> CachePools:
    return replace(
        pools,
        conv=pools.conv.at[place, slots].set(cache.conv_state.astype(pools.conv.dtype), mode="drop"),
        recurrent=pools.recurrent.at[place, slots].set(cache.recurrent_state, mode="drop"),
    )
