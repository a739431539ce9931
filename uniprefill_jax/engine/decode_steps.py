"""The device's side of decoding: one step of every running request, over the page tables of all layers.

A request may have any lengths in its layers, so that dense and shortened requests share a step: nothing here knows of
segments. The host reads nothing but the tokens, and hands in nothing but which rows run and the pages that they gained.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.paged_attention import paged_attention
from uniprefill_jax.cache.pools import DUMMY_SLOT, CachePools, attention_layers
from uniprefill_jax.engine.prefill_steps import LayerPlaces, RowPlaces, write_and_attend
from uniprefill_jax.models.attention import Attention
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.gated_delta_net import GatedDeltaNet, RecurrentCache
from uniprefill_jax.models.layer_loop import group_layers, loop_layers
from uniprefill_jax.models.rope import rope_table
from uniprefill_jax.parallel.shards import gathered
from uniprefill_jax.sampling import Drawn, SamplingKind, SamplingNumbers, sample, token_logprobs

# Commands to a row of the decode batch; a token id means: go on with this token, whatever was drawn.
IDLE = -2
GO_ON = -1


class SlotNumbers(NamedTuple):
    """Every slot's sampling setting; see `SamplingNumbers`."""

    temperature: Float[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float[Array, " B"]
    seed: UInt32[Array, " B"]


@struct.dataclass
class DecodeSlots:
    """What the device knows of every slot. A slot without a request holds leftovers that are never looked at.

    Attributes:
        page_tables: pages of every attention layer.
        kept: prompt tokens in every attention layer's pages; used = kept + decoded.
        decoded: generated tokens that were fed back so far.
        prompt_length: positions go on from here.
        tails: positions of the last prompt rows of every windowed layer, right aligned.
        window_counts_kept: whether windows count kept tokens instead of positions.
        tokens: last token drawn.
        numbers: sampling settings.
    """

    page_tables: Int32[Array, "attention_layers B max_pages"]
    kept: Int32[Array, "attention_layers B"]
    decoded: Int32[Array, " B"]
    prompt_length: Int32[Array, " B"]
    tails: Int32[Array, "window_layers B window"]
    window_counts_kept: Bool[Array, " B"]
    tokens: Int32[Array, " B"]
    numbers: SlotNumbers


@struct.dataclass
class Joining:
    """One request's column of `DecodeSlots`."""

    page_tables: Int32[Array, "attention_layers max_pages"]
    kept: Int32[Array | np.ndarray, " attention_layers"]
    prompt_length: Int32[Array, ""] | np.int32
    tails: Int32[Array, "window_layers window"]
    window_counts_kept: Bool[Array, ""] | np.bool_
    numbers: SamplingNumbers


def window_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers with a sliding window, rising."""
    return tuple(number for number, layer in enumerate(config.layers) if layer.window is not None)


def longest_window(config: ModelConfig) -> int:
    """The widest sliding window; 0 where there is none."""
    return max((layer.window for layer in config.layers if layer.window is not None), default=0)


def empty_slots(config: ModelConfig, num_slots: int, max_pages: int, absent: int) -> DecodeSlots:
    """Slots without requests; `absent` is the page number that means none."""
    layers, windowed = len(attention_layers(config)), len(window_layers(config))

    # Every array on its own: a buffer that is donated must not be another's too.
    def integers() -> Array:
        return jnp.zeros(num_slots, jnp.int32)

    def reals() -> Array:
        return jnp.zeros(num_slots, jnp.float32)

    return DecodeSlots(
        page_tables=jnp.full((layers, num_slots, max_pages), absent, jnp.int32),
        kept=jnp.zeros((layers, num_slots), jnp.int32),
        decoded=integers(),
        prompt_length=integers(),
        tails=jnp.zeros((windowed, num_slots, longest_window(config)), jnp.int32),
        window_counts_kept=jnp.zeros(num_slots, bool),
        tokens=integers(),
        numbers=SlotNumbers(reals(), integers(), reals(), jnp.zeros(num_slots, jnp.uint32)),
    )


def finish_prefill(
    kind: str,
    sampling: SamplingKind,
    model: CausalLM,
    slots: DecodeSlots,
    joining: Joining,
    slot: Int32[Array, ""],
    x: Float[Array, "C D"],
    last_row: Int32[Array, ""],
) -> tuple[DecodeSlots, Int32[Array, ""], Float[Array, " vocab"]]:
    """The last layer's feed-forward and the head for the last prompt token; its request joins the decode batch.

    `kind` is the last layer's. Returns the slots, the first token and the logits that it was drawn from.
    """
    in_stack = LayerPlaces(model.config).in_stack()
    last = jax.lax.dynamic_slice_in_dim(x, last_row, 1)
    logits = gathered(model.logits(model.layer(kind, in_stack[model.config.num_layers - 1]).transform(last)))
    token = sample(logits, sampling, joining.numbers, jnp.zeros((), jnp.int32))[0]
    joined = replace(
        slots,
        page_tables=slots.page_tables.at[:, slot].set(joining.page_tables, mode="drop"),
        kept=slots.kept.at[:, slot].set(joining.kept, mode="drop"),
        decoded=slots.decoded.at[slot].set(0, mode="drop"),
        prompt_length=slots.prompt_length.at[slot].set(joining.prompt_length, mode="drop"),
        tails=slots.tails.at[:, slot].set(joining.tails, mode="drop"),
        window_counts_kept=slots.window_counts_kept.at[slot].set(joining.window_counts_kept, mode="drop"),
        tokens=slots.tokens.at[slot].set(token, mode="drop"),
        numbers=SlotNumbers(
            *(all_.at[slot].set(own, mode="drop") for all_, own in zip(slots.numbers, joining.numbers, strict=True))
        ),
    )
    return joined, token, logits[0]


def decode_step(
    draws: bool,
    reports: bool,
    model: CausalLM,
    pools: CachePools,
    slots: DecodeSlots,
    commands: Int32[Array, " B"],
    new_pages: Int32[Array, "attention_layers B"],
) -> tuple[Drawn, DecodeSlots, CachePools]:
    """One more token of every row that does not idle: the tokens drawn, slots and pools.

    Args:
        draws: whether any row may draw instead of taking the likeliest (static).
        reports: whether any row wants log-probabilities (static).
        commands: IDLE, GO_ON, or the token to go on with.
        new_pages: the page that each row's new token opens in each layer; out of range where it opens none.
    """
    config = model.config
    places = LayerPlaces(config)
    in_stack, in_pool = places.in_stack(), places.in_pool()
    windowed = window_layers(config)
    in_tails = jnp.asarray([windowed.index(n) if n in windowed else 0 for n in range(config.num_layers)], jnp.int32)
    num_slots, page = commands.shape[0], pools.keys.shape[2]
    count = jnp.asarray(num_slots, jnp.int32)
    runs = commands != IDLE
    used = slots.kept + slots.decoded  # rows before the new one
    rows = jnp.arange(num_slots)
    attention = jnp.arange(slots.kept.shape[0])[:, None]
    # A page beyond the table, like a page that is none, is dropped.
    opened = jnp.where(new_pages < pools.keys.shape[0], used // page, jnp.iinfo(jnp.int32).max)
    page_tables = slots.page_tables.at[attention, rows, opened].set(new_pages, mode="drop")
    positions = slots.prompt_length + slots.decoded
    ropes = {layer.rope: rope_table(layer.rope, positions) for layer in config.layers if layer.rope is not None}
    recurrent_slots = jnp.where(runs, rows + 1, DUMMY_SLOT)
    # Tables of all layers, one after another: nothing has to be cut out for a layer.
    all_tables = page_tables.reshape(-1, page_tables.shape[2])

    def mix(kind: str, layer: Array | int, x: Array, pools: CachePools) -> tuple[Array, CachePools]:
        spec, module = places.spec(kind), model.layer(kind, in_stack[layer])
        mixer, place = module.mixer, in_pool[layer]
        if isinstance(mixer, Attention):
            assert spec.rope is not None
            rope, scale, before, first_request = ropes[spec.rope], mixer.scale, used[place], place * num_slots
            first = _first_visible(spec, slots, before, positions, in_tails[layer])

            def attend(queries: Array, keys: Array, values: Array) -> tuple[Array, CachePools]:
                lengths = jnp.where(runs, before + 1, 0)
                places = RowPlaces(all_tables, first_request + rows, before, runs)
                attention = partial(paged_attention, scale=scale)
                ranges = (lengths, first, first_request)
                return write_and_attend(attention, pools, (queries, keys, values), places, *ranges)

            attended = partial(mixer.attend_with, rope=rope, attend=attend, count=count)
            return module.mix_with(x, attended, count)
        assert isinstance(mixer, GatedDeltaNet)
        cache = RecurrentCache(pools.conv[place, recurrent_slots], pools.recurrent[place, recurrent_slots])
        x, cache = module.mix_with(x, lambda x: mixer.step(x, cache, count), count)
        conv = pools.conv.at[place, recurrent_slots].set(cache.conv_state.astype(pools.conv.dtype), mode="drop")
        recurrent = pools.recurrent.at[place, recurrent_slots].set(cache.recurrent_state, mode="drop")
        return x, replace(pools, conv=conv, recurrent=recurrent)

    def whole(kind: str, layer: Array | int, carry: tuple[Array, CachePools]) -> tuple[Array, CachePools]:
        x, pools = mix(kind, layer, *carry)
        return model.layer(kind, in_stack[layer]).transform(x, count), pools

    fed = jnp.where(runs, jnp.where(commands >= 0, commands, slots.tokens), 0)
    x, pools = loop_layers(group_layers(places.kinds), 0, whole, (model.embed(fed), pools))
    logits = gathered(model.logits(x))
    tokens = draw_tokens(draws, logits, slots.numbers, slots.decoded + 1)
    drawn = Drawn(tokens, token_logprobs(logits, tokens) if reports else None)
    after = replace(
        slots,
        page_tables=page_tables,
        decoded=slots.decoded + runs,
        tokens=jnp.where(runs, tokens, slots.tokens),
    )
    return drawn, after, pools


def _first_visible(
    spec: LayerSpec, slots: DecodeSlots, before: Int32[Array, " B"], positions: Int32[Array, " B"], tail: Array
) -> Int32[Array, " B"]:
    """First row that each request's new token sees in one layer."""
    if spec.window is None:
        return jnp.zeros_like(before)
    by_count = jnp.maximum(before + 1 - spec.window, 0)
    prompt_rows = (slots.tails[tail] > (positions - spec.window)[:, None]).sum(-1, dtype=jnp.int32)
    generated = jnp.minimum(slots.decoded + 1, spec.window)
    return jnp.where(slots.window_counts_kept, by_count, before + 1 - prompt_rows - generated)


def draw_tokens(
    draws: bool, logits: Float[Array, "B vocab"], numbers: SlotNumbers, steps: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """One token per row under its own setting; the draws are those that `LLM.generate` makes."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not draws:
        return greedy

    def one(logits: Array, numbers: SamplingNumbers, step: Array) -> Array:
        safe = numbers._replace(temperature=jnp.where(numbers.temperature > 0, numbers.temperature, 1.0))
        return sample(logits[None], SamplingKind(greedy=False, restricted=True), safe, step)[0]

    drawn = jax.vmap(one)(logits, SamplingNumbers(*numbers), steps)
    return jnp.where(numbers.temperature > 0, drawn, greedy)
