"""Decoding a batch: attention over what the prefill kept plus the tokens generated so far, recurrent steps.

Many steps are one program, a loop on the device that ends with the last request: the host is asked for nothing between
tokens. Prompt rows stay packed as the prefill left them, one length per request and segment; generated tokens have a
store of their own, so a prompt's cache is never padded as a whole. Where a batch holds far more rows than its longest
prompt, a layer's attention takes each request's rows out of it. Positions go on from the prompt's full length (paper
Eq. 17).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from uniprefill_jax.models.attention import AttentionCache, AttentionStep
from uniprefill_jax.models.batch import WindowMeaning
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.gated_delta_net import RecurrentCache
from uniprefill_jax.models.layer_loop import group_layers, index_table, loop_layers
from uniprefill_jax.models.rope import rope_table
from uniprefill_jax.prefill import LayerCaches, SegmentRows
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sparsify.methods.compression import compressed_lengths

# Taking rows out costs about as much as attending to this many times as many: they are read, written and read again.
COST_OF_TAKING = 3


@dataclass(frozen=True)
class DecodePlan:
    """The static side of a decode step.

    Attributes:
        model: the model's shape.
        segment_of_layer: whose rows each layer's prompt cache holds.
        window_meaning: whether windows count original positions or kept tokens.
        capacity: most tokens that can be generated.
        rows_apart: rows that are taken out of a prompt cache for every request; None: all attend to all rows, masked.
        logprobs: whether the log-probability of every token is kept.
        kept_rows: most prompt rows of a request that full-attention layers hold; None for all that entered.
    """

    model: ModelConfig
    segment_of_layer: tuple[int, ...]
    window_meaning: WindowMeaning
    capacity: int
    rows_apart: int | None = None
    logprobs: bool = False
    kept_rows: int | None = None

    @classmethod
    def after(
        cls, plan: PrefillPlan, capacity: int, *, longest: int | None = None, logprobs: bool = False
    ) -> "DecodePlan":
        """The plan that continues a prefill; `longest`: rows of its longest prompt at most, where that is known."""
        kept_rows = None if plan.compression is None else plan.compression.most_rows
        meaning = plan.config.sliding_window
        apart = longest is not None and plan.num_rows > COST_OF_TAKING * longest
        return cls(
            plan.model, plan.segment_of_layer, meaning, capacity, longest if apart else None, logprobs, kept_rows
        )


@struct.dataclass
class DecodeState:
    """What changes from token to token: the caches by layer kind and the number of tokens generated before this one.

    Attention kinds hold generated keys and values [layers, capacity, B, KV, d]; recurrent kinds hold their states.
    """

    caches: LayerCaches
    step: Int32[Array, ""]


@struct.dataclass
class Continuation:
    """What the tokens after a prompt have to be, and which of them end a request.

    Attributes:
        given: tokens to be fed instead of drawn ones, from the first after the prompt on; -1 where one is drawn.
        end_tokens: a drawn token among these ends its request.
    """

    given: Int32[Array, "capacity B"]
    end_tokens: Int32[Array, " ends"]


@struct.dataclass
class DecodeRun:
    """A batch on its way.

    Attributes:
        state: the caches, and how many tokens were fed.
        tokens: the tokens so far; row `state.step` is the next to be fed, rows after it are not known yet.
        logprobs: their natural log-probabilities, float32, from row 1 on; None unless the plan asks for them.
        ended: requests whose tokens no longer count, empty slots among them.
    """

    state: DecodeState
    tokens: Int32[Array, "capacity B"]
    logprobs: Float[Array, "capacity B"] | None
    ended: Bool[Array, " B"]


def start_decode(plan: DecodePlan, prompt_caches: LayerCaches, num_requests: int) -> DecodeState:
    """Empty stores for generated tokens; recurrent states go on from the prompt's."""
    caches: LayerCaches = {}
    for kind, cache in prompt_caches.items():
        if isinstance(cache, AttentionCache):
            layers, _, *head_shape = cache.keys.shape
            empty = jnp.zeros((layers, plan.capacity, num_requests, *head_shape), cache.keys.dtype)
            caches[kind] = AttentionCache(empty, empty)
        else:
            caches[kind] = cache
    return DecodeState(caches, jnp.zeros((), jnp.int32))


def start_run(state: DecodeState, plan: DecodePlan, first: Int32[Array, " B"], ended: Bool[Array, " B"]) -> DecodeRun:
    """The run that begins with the `first` tokens, drawn or given."""
    shape = (plan.capacity, first.shape[0])
    logprobs = jnp.zeros(shape, jnp.float32) if plan.logprobs else None
    return DecodeRun(state, jnp.zeros(shape, jnp.int32).at[0].set(first), logprobs, ended)


def decode_until(
    plan: DecodePlan,
    model: CausalLM,
    prompt_caches: LayerCaches,
    segments: SegmentRows,
    continuation: Continuation,
    draw: Callable[[Float[Array, "B vocab"], Int32[Array, ""]], Int32[Array, " B"]],
    run: DecodeRun,
    stop: Int32[Array, ""],
) -> DecodeRun:
    """Steps until token `stop` (below `plan.capacity`) is known, or every request has ended.

    `draw(logits, number)` gives the tokens of that number, counted from the first after the prompt.
    """

    def step(run: DecodeRun) -> DecodeRun:
        tokens = run.tokens[run.state.step]
        logits, state = decode_step(plan, model, prompt_caches, segments, run.state, tokens)
        given, drawn = continuation.given[state.step], draw(logits, state.step)
        is_drawn = given < 0
        tokens = jnp.where(is_drawn, drawn, given)
        logprobs = run.logprobs
        if logprobs is not None:
            with jax.named_scope("token_logprobs"):
                values = jax.nn.log_softmax(logits, axis=-1)
                own = jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
            logprobs = logprobs.at[state.step].set(own)
        ends = is_drawn & (tokens[:, None] == continuation.end_tokens).any(axis=-1)
        return DecodeRun(state, run.tokens.at[state.step].set(tokens), logprobs, run.ended | ends)

    return jax.lax.while_loop(lambda run: (run.state.step < stop) & ~run.ended.all(), step, run)


def decode_step(
    plan: DecodePlan,
    model: CausalLM,
    prompt_caches: LayerCaches,
    segments: SegmentRows,
    state: DecodeState,
    tokens: Int32[Array, " B"],
) -> tuple[Float[Array, "B vocab"], DecodeState]:
    """Logits after one more token of every request. `state.step` must stay below `plan.capacity`."""
    kinds = [layer.kind for layer in plan.model.layers]
    table = index_table(kinds)
    segment_table = jnp.asarray(plan.segment_of_layer, jnp.int32)
    prompt_lengths = segments.cu_seqlens[0, 1:] - segments.cu_seqlens[0, :-1]
    positions = prompt_lengths + state.step
    ropes = {layer.rope: rope_table(layer.rope, positions) for layer in plan.model.layers if layer.rope is not None}

    def body(kind: str, layer: Array | int, carry: tuple[Array, LayerCaches]) -> tuple[Array, LayerCaches]:
        x, caches = carry
        spec = plan.model.layers[kinds.index(kind)]
        at = table[layer]
        stack = caches[kind]
        kept = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, at, keepdims=False), stack)
        if isinstance(kept, RecurrentCache) or spec.rope is None:
            view = kept
        else:
            prompt = jax.tree.map(
                lambda array: jax.lax.dynamic_index_in_dim(array, at, keepdims=False), prompt_caches[kind]
            )
            segment = segment_table[layer]
            cu_seqlens = segments.cu_seqlens[segment]
            if plan.kept_rows is not None and spec.mixer == "full":
                cu_seqlens = compressed_lengths(cu_seqlens, plan.kept_rows)
            num_rows = prompt.keys.shape[0]
            apart = plan.rows_apart is not None
            rows = jnp.arange(plan.rows_apart or num_rows, dtype=jnp.int32)[None, :]
            if apart:
                rows = jnp.minimum(cu_seqlens[:-1, None] + rows, num_rows - 1)
            row_positions = segments.positions[segment][rows]
            visible = _visible_rows(plan, spec, rows, row_positions, cu_seqlens, positions, state.step)
            view = AttentionStep(
                prompt=prompt,
                generated=kept,
                prompt_rows=rows if apart else None,
                prompt_visible=visible,
                generated_visible=_visible_generated(spec, plan.capacity, state.step, x.shape[0]),
                step=state.step,
                rope=ropes[spec.rope],
            )
        module = model.layer(kind, at)
        x, kept = module.mix_step(x, view)
        updated = jax.tree.map(
            lambda array, new: jax.lax.dynamic_update_index_in_dim(array, new.astype(array.dtype), at, axis=0),
            stack,
            kept,
        )
        return module.transform(x, jnp.asarray(x.shape[0], jnp.int32)), {**caches, kind: updated}

    x, caches = loop_layers(group_layers(kinds), 0, body, (model.embed(tokens), state.caches))
    return model.logits(x), DecodeState(caches, state.step + 1)


def _visible_rows(
    plan: DecodePlan,
    spec: LayerSpec,
    rows: Int32[Array, "#B rows"],
    row_positions: Int32[Array, "#B rows"],
    cu_seqlens: Int32[Array, " B+1"],
    positions: Int32[Array, " B"],
    step: Int32[Array, ""],
) -> Bool[Array, "B rows"]:
    """Which of these rows of the prompts each request's current token sees in one layer."""
    start, stop = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    visible = (rows >= start) & (rows < stop)
    if spec.window is None:
        return visible
    if plan.window_meaning == "position":
        return visible & (row_positions > positions[:, None] - spec.window)
    return visible & (rows > stop + step - spec.window)


def _visible_generated(
    spec: LayerSpec, capacity: int, step: Int32[Array, ""], num_requests: int
) -> Bool[Array, "B capacity"]:
    """Generated tokens that the current one sees, itself included."""
    written = jnp.arange(capacity, dtype=jnp.int32)
    visible = written <= step
    if spec.window is not None:
        visible &= written > step - spec.window
    return jnp.broadcast_to(visible, (num_requests, capacity))
