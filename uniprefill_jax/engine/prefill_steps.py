"""The device's side of a stepped prefill: the pieces that the executor compiles (notes: algorithm, "Chunked prefill").

Rows of a prompt wait in a buffer between stages. A chunk is loaded from one or more of these, run through a stage
against the pages of the stage's layers, and stored back; when a stage is through, the drop scores, selects and compacts
the buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.chunk_attention import ChunkRows, chunk_attention
from pallas_kernels.chunk_attention.rows import ALIGNMENT
from uniprefill_jax.cache.pools import CachePools, attention_layers, linear_layers
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.engine.stages import StageProgram
from uniprefill_jax.models.attention import Attention
from uniprefill_jax.models.batch import request_of_row
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
    """Rows of one or more requests on their way through a stage, one request's after the other's.

    Attributes:
        x: hidden states; zero in padding rows.
        positions: original positions.
        first_visible: for every distinct window of the model, the first row of its request that each row sees.
    """

    x: Float[Array, "C D"]
    positions: Int32[Array, " C"]
    first_visible: tuple[Int32[Array, " C"], ...]


class Members(NamedTuple):
    """Whose rows a chunk holds, one entry for every request; those that are not needed have no rows.

    A request that has left since the chunk was begun has a count of 0: its rows go along and leave nothing behind.

    Attributes:
        cu_seqlens: request r owns places ``[cu_seqlens[r], cu_seqlens[r+1])`` of the chunk.
        counts: how many rows that are.
        first_rows: number of the first of them among all rows of the request's stage.
        slots: recurrent slots; out of range for those that are not there.
    """

    cu_seqlens: Int32[Array, " R+1"]
    counts: Int32[Array, " R"]
    first_rows: Int32[Array, " R"]
    slots: Int32[Array, " R"]

    def of_rows(self, size: int) -> "MemberRows":
        """The same for each of a chunk's rows."""
        places = jnp.arange(size, dtype=jnp.int32)
        request = jnp.minimum(request_of_row(self.cu_seqlens, places), self.counts.shape[0] - 1)
        offsets = places - self.cu_seqlens[request]
        return MemberRows(request, offsets, self.first_rows[request] + offsets, offsets < self.counts[request])


class MemberRows(NamedTuple):
    """For every row of a chunk: its request, how many of its rows lie before it there, its number, if it is real."""

    request: Int32[Array, " C"]
    offsets: Int32[Array, " C"]
    rows: Int32[Array, " C"]
    real: Bool[Array, " C"]


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


def empty_chunk(size: int, width: int, dtype: jnp.dtype, num_windows: int) -> Chunk:
    """A chunk without rows, of hidden states of `width`."""
    positions, *firsts = (jnp.zeros(size, jnp.int32) for _ in range(1 + num_windows))
    return Chunk(jnp.zeros((size, width), dtype), positions, tuple(firsts))


def load_rows(
    chunk: Chunk,
    buffer: RowBuffer,
    place: Int32[Array, "3"],
    *,
    windows: tuple[int | None, ...],
    window_meaning: Literal["position", "kept"],
) -> Chunk:
    """The chunk with rows of a buffer in it; `place`: from where in the chunk, the first row and how many."""
    offsets = jnp.arange(chunk.x.shape[0], dtype=jnp.int32) - place[0]
    rows = place[1] + offsets
    real = (offsets >= 0) & (offsets < place[2])
    # Padding reads past the end of any buffer: it gets zeros, not whatever follows.
    wanted = jnp.where(real, rows, NOWHERE)
    x = buffer.x.at[wanted].get(mode="fill", fill_value=0)
    positions = buffer.positions.at[wanted].get(mode="fill", fill_value=0)
    first_visible = []
    for window, before in zip(windows, chunk.first_visible, strict=True):
        if window is None:
            first = jnp.zeros_like(rows)
        elif window_meaning == "kept":
            first = jnp.maximum(rows - window + 1, 0)
        else:
            first = jnp.searchsorted(buffer.positions, positions - window + 1, side="left").astype(jnp.int32)
        first_visible.append(jnp.where(real, first, before))
    return Chunk(
        jnp.where(real[:, None], x, chunk.x), jnp.where(real, positions, chunk.positions), tuple(first_visible)
    )


def store_rows(buffered: Float[Array, "R D"], x: Float[Array, "C D"], place: Int32[Array, "3"]) -> Float[Array, "R D"]:
    """Put a request's new hidden states back among its buffer's; `place` as for `load_rows`."""
    offsets = jnp.arange(x.shape[0], dtype=jnp.int32) - place[0]
    real = (offsets >= 0) & (offsets < place[2])
    return buffered.at[jnp.where(real, place[1] + offsets, NOWHERE)].set(x, mode="drop")


def last_queries(
    before: Float[Array, "n H d"], queries: Float[Array, "C H d"], place: Int32[Array, "3"]
) -> Float[Array, "n H d"]:
    """The last n queries of (those before, a request's in a chunk); `place` as for `load_rows`."""
    number = before.shape[0]
    offsets = place[2] - number + jnp.arange(number, dtype=jnp.int32)
    new = queries.at[jnp.where(offsets >= 0, place[0] + offsets, NOWHERE)].get(mode="fill", fill_value=0)
    old = before.at[jnp.where(offsets < 0, number + offsets, NOWHERE)].get(mode="fill", fill_value=0)
    return jnp.where((offsets >= 0)[:, None, None], new.astype(before.dtype), old)


def run_stage(
    program: StageProgram,
    model: CausalLM,
    pools: CachePools,
    chunk: Chunk,
    members: Members,
    page_tables: tuple[Int32[Array, "attention_layers max_pages"], ...],
    layers: Int32[Array, "3"],
) -> tuple[Float[Array, "C D"], CachePools, Float[Array, "C H d"] | None]:
    """One chunk through one stage: new hidden states, pools, and the queries of the stage's last mixer if it has any.

    `page_tables` are the members'. `layers` holds the layer of the first feed-forward, the first whole layer and the
    layer of the last mixer; those that the program lacks are ignored.
    """
    places = LayerPlaces(model.config)
    in_stack, in_pool = places.in_stack(), places.in_pool()
    windows = places.windows
    ropes = {
        layer.rope: rope_table(layer.rope, chunk.positions) for layer in model.config.layers if layer.rope is not None
    }
    own = members.of_rows(chunk.x.shape[0])
    tables, count = jnp.stack(page_tables), members.cu_seqlens[-1]

    def mix(kind: str, layer: Array | int, x: Array, pools: CachePools) -> tuple[Array, CachePools, Array | None]:
        spec, module = places.spec(kind), model.layer(kind, in_stack[layer])
        mixer, place = module.mixer, in_pool[layer]
        if isinstance(mixer, Attention):
            assert spec.rope is not None
            first = chunk.first_visible[windows.index(spec.window)]
            rope, scale = ropes[spec.rope], mixer.scale

            def attend(queries: Array, keys: Array, values: Array) -> tuple[Array, tuple[CachePools, Array]]:
                places = RowPlaces(tables[:, place], own.request, own.rows, own.real)
                attention = partial(_attend_members, scale=scale)
                ranges = (first, own.request, own.offsets, members.counts, members.first_rows)
                output, written = write_and_attend(attention, pools, (queries, keys, values), places, *ranges)
                return output, (written, queries)

            attended = partial(mixer.attend_with, rope=rope, attend=attend, count=count)
            x, (pools, queries) = module.mix_with(x, attended, count)
            return x, pools, queries
        cache = _states_before(pools, place, members)
        x, cache = module.mix_with(x, lambda x: mixer.extend(x, cache, members.cu_seqlens), count)
        return x, _write_state(pools, place, members.slots, cache), None

    def whole(kind: str, layer: Array | int, carry: tuple[Array, CachePools]) -> tuple[Array, CachePools]:
        x, pools = carry
        x, pools, _ = mix(kind, layer, x, pools)
        return model.layer(kind, in_stack[layer]).transform(x, count), pools

    x = chunk.x
    queries = None
    if program.feed_forward is not None:
        x = model.layer(program.feed_forward, in_stack[layers[0]]).transform(x, count)
    x, pools = loop_layers(program.middle, layers[1], whole, (x, pools))
    if program.last is not None:
        x, pools, queries = mix(program.last, layers[2], x, pools)
    return x, pools, queries


def _attend_members(
    queries: Float[Array, "C H d"],
    key_pages: Float[Array, "P KV page d"],
    value_pages: Float[Array, "P KV page d"],
    page_tables: Int32[Array, "R max_pages"],
    first: Int32[Array, " C"],
    request: Int32[Array, " C"],
    offsets: Int32[Array, " C"],
    counts: Int32[Array, " R"],
    first_rows: Int32[Array, " R"],
    *,
    scale: float,
) -> Float[Array, "C H d"]:
    """Attention of every request's rows over its own pages; no tile of queries may hold rows of two."""
    requests = counts.shape[0]
    if requests == 1:
        rows = ChunkRows(jnp.zeros(1, jnp.int32), counts, first_rows)
        return chunk_attention(queries, key_pages, value_pages, page_tables, first, rows, scale=scale)
    sizes = -(-counts // ALIGNMENT) * ALIGNMENT
    places = jnp.cumsum(sizes) - sizes
    wide = (-(-queries.shape[0] // ALIGNMENT) + requests) * ALIGNMENT
    spread = jnp.where(offsets < counts[request], places[request] + offsets, NOWHERE)
    spread_queries = jnp.zeros((wide, *queries.shape[1:]), queries.dtype).at[spread].set(queries, mode="drop")
    spread_first = jnp.zeros(wide, jnp.int32).at[spread].set(first, mode="drop")
    rows = ChunkRows(places, counts, first_rows)
    output = chunk_attention(spread_queries, key_pages, value_pages, page_tables, spread_first, rows, scale=scale)
    return output.at[spread].get(mode="fill", fill_value=0)


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
    """Where new rows go: whose they are and what number they have there; those not real go nowhere."""

    page_tables: Int32[Array, "R max_pages"]
    request: Int32[Array, " T"]
    rows: Int32[Array, " T"]
    real: Bool[Array, " T"]

    def write(self, pages: Float[Array, "P heads page d"], new: Float[Array, "T heads d"]) -> Array:
        """The pages with the new rows in them."""
        num_pages, heads, page, head_dim = pages.shape
        column = jnp.where(self.real, self.rows // page, NOWHERE)
        ids = self.page_tables.at[self.request, column].get(mode="fill", fill_value=num_pages)
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
    """Write keys and values into their pages, then `attention(queries, keys, values, page_tables, *ranges)` over these.

    `projected` are queries, keys and values of the new rows. On a mesh every shard does it with its own heads.
    """
    queries, keys, values = projected
    # Where shards outnumber KV heads the pages hold each head several times (see `held_kv_heads`).
    copies = pools.keys.shape[1] // keys.shape[1]
    if copies > 1:
        keys, values = (jnp.repeat(array, copies, axis=1) for array in (keys, values))

    def on_shard(queries: Array, keys: Array, values: Array, key_pages: Array, value_pages: Array, *rest: Any) -> Any:
        places, ranges = RowPlaces(*rest[:4]), rest[4:]
        key_pages, value_pages = places.write(key_pages, keys), places.write(value_pages, values)
        return attention(queries, key_pages, value_pages, places.page_tables, *ranges), key_pages, value_pages

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


def _states_before(pools: CachePools, place: Array, members: Members) -> RecurrentCache:
    """The members' states in one layer; empty before a first chunk, whatever the slot held."""
    empty = members.first_rows == 0
    conv, recurrent = pools.conv[place, members.slots], pools.recurrent[place, members.slots]
    return RecurrentCache(jnp.where(empty[:, None, None], 0, conv), jnp.where(empty[:, None, None, None], 0, recurrent))


def _write_state(pools: CachePools, place: Array, slots: Array, cache: RecurrentCache) -> CachePools:
    return replace(
        pools,
        conv=pools.conv.at[place, slots].set(cache.conv_state.astype(pools.conv.dtype), mode="drop"),
        recurrent=pools.recurrent.at[place, slots].set(cache.recurrent_state, mode="drop"),
    )
